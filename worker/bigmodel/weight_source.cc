#include "worker/bigmodel/weight_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/cached_pages.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {
namespace {

uint64_t RoundDown(uint64_t n) { return n / kDirectAlignment * kDirectAlignment; }

// A file that is read through the page cache where it is there already, and else past it: a model
// that is streamed once per pass would only drive out of the cache what others have there.
class StreamedFile {
 public:
  static absl::StatusOr<std::unique_ptr<StreamedFile>> Open(const std::string& path) {
    OwnedFd cached(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (cached.get() < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    auto file = std::make_unique<StreamedFile>();
    file->cached_ = std::move(cached);
    // Refused by some file systems: then everything goes through the cache.
    file->direct_ = OwnedFd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    file->is_direct_ = file->direct_.get() >= 0;
    if (fstat(file->cached_.get(), &file->opened_) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot examine ", path));
    }
    file->pages_.emplace(file->cached_.get(), static_cast<uint64_t>(file->opened_.st_size));
    return file;
  }

  // DATA_LOSS if somebody has written into the file since it was opened: its tensors may be others
  // now. A file that takes its name is another one.
  absl::Status CheckUnchanged() const {
    struct stat now;
    if (fstat(cached_.get(), &now) != 0) return absl::ErrnoToStatus(errno, "cannot examine it");
    if (now.st_size == opened_.st_size && now.st_mtim.tv_sec == opened_.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec) {
      return absl::OkStatus();
    }
    return absl::DataLossError(
        "it was changed while it is used: load the model again, and replace files by renaming");
  }

  absl::Status Read(uint64_t begin, size_t bytes, char* to, ReadScratch& scratch) const {
    if (!is_direct_ || pages_->Has(begin, bytes)) {
      return ReadFrom(cached_.get(), begin, bytes, bytes, to);
    }
    if (IsDirectAligned(begin) && IsDirectAligned(bytes) && IsDirectAligned(to)) {
      return ReadFrom(direct_.get(), begin, bytes, bytes, to);
    }
    MUSTER_ASSIGN_OR_RETURN(const char* const from, Fetch(begin, bytes, scratch));
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }

  absl::StatusOr<const char*> Fetch(uint64_t begin, size_t bytes, ReadScratch& scratch) const {
    const uint64_t first = RoundDown(begin), whole = DirectAlignedUp(begin + bytes) - first;
    MUSTER_RETURN_IF_ERROR(scratch.Grow(whole));
    if (!is_direct_ || pages_->Has(begin, bytes)) {
      MUSTER_RETURN_IF_ERROR(ReadFrom(cached_.get(), begin, bytes, bytes, scratch.data()));
      return scratch.data();
    }
    // The end of the file may come before the end of the last block.
    MUSTER_RETURN_IF_ERROR(
        ReadFrom(direct_.get(), first, begin + bytes - first, whole, scratch.data()));
    return scratch.data() + (begin - first);
  }

 private:
  // Reads up to `most` bytes; `needed` must be there.
  absl::Status ReadFrom(int fd, uint64_t at, size_t needed, size_t most, char* to) const {
    size_t done = 0;
    while (done < needed) {
      const ssize_t got = pread(fd, to + done, most - done, static_cast<off_t>(at + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EINVAL && fd == direct_.get()) {
        is_direct_ = false;
        return ReadFrom(cached_.get(), at, needed, needed, to);
      }
      if (got < 0)
        return absl::ErrnoToStatus(errno, absl::StrCat("cannot read at byte ", at + done));
      if (got == 0) {
        return absl::DataLossError(absl::StrCat("it ends at byte ", at + done, ", before byte ",
                                                at + needed, ": it was changed while it is used"));
      }
      done += static_cast<size_t>(got);
      // A direct read that stops between blocks has met the end of the file.
      if (fd == direct_.get() && done < needed && !IsDirectAligned(done)) {
        return absl::DataLossError(absl::StrCat("it ends at byte ", at + done, ", before byte ",
                                                at + needed, ": it was changed while it is used"));
      }
    }
    return absl::OkStatus();
  }

  OwnedFd cached_, direct_;
  struct stat opened_ = {};
  std::optional<CachedPages> pages_;
  mutable std::atomic<bool> is_direct_ = false;
};

class FileWeights final : public WeightSource {
 public:
  struct Part {
    const WeightEntry* entry;
    at::ScalarType type;
    std::shared_ptr<const StreamedFile> file;
  };

  FileWeights(std::shared_ptr<const WeightFiles> files, std::vector<Part> parts)
      : files_(std::move(files)), parts_(std::move(parts)) {}

  size_t size() const override { return parts_.size(); }
  std::string Describe(size_t i) const override {
    return absl::StrCat(files_->FileOf(*parts_[i].entry), ": tensor \"",
                        Printable(parts_[i].entry->tensor.name), "\"");
  }
  at::ScalarType type(size_t i) const override { return parts_[i].type; }
  uint64_t bytes(size_t i) const override { return parts_[i].entry->tensor.extent_bytes; }

  absl::Status Read(size_t i, uint64_t begin, size_t bytes, char* to,
                    ReadScratch& scratch) const override {
    const Part& part = parts_[i];
    absl::Status status = part.file->Read(part.entry->tensor.begin + begin, bytes, to, scratch);
    if (status.ok()) status = part.file->CheckUnchanged();
    return Named(i, status);
  }
  absl::StatusOr<const char*> Fetch(size_t i, uint64_t begin, size_t bytes,
                                    ReadScratch& scratch) const override {
    const Part& part = parts_[i];
    absl::StatusOr<const char*> fetched =
        part.file->Fetch(part.entry->tensor.begin + begin, bytes, scratch);
    const absl::Status status = fetched.ok() ? part.file->CheckUnchanged() : fetched.status();
    if (!status.ok()) return Named(i, status);
    return fetched;
  }
  size_t Remainder(size_t i) const override {
    return parts_[i].entry->tensor.begin % kDirectAlignment;
  }

 private:
  absl::Status Named(size_t i, const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(Describe(i), ": ", status.message()));
  }

  const std::shared_ptr<const WeightFiles> files_;
  const std::vector<Part> parts_;
};

class HostWeights final : public WeightSource {
 public:
  HostWeights(std::vector<std::string> names, std::vector<at::Tensor> tensors)
      : names_(std::move(names)), tensors_(std::move(tensors)) {}

  size_t size() const override { return tensors_.size(); }
  std::string Describe(size_t i) const override {
    return absl::StrCat("host memory: tensor \"", names_[i], "\"");
  }
  at::ScalarType type(size_t i) const override { return tensors_[i].scalar_type(); }
  uint64_t bytes(size_t i) const override { return tensors_[i].nbytes(); }
  absl::Status Read(size_t i, uint64_t begin, size_t bytes, char* to, ReadScratch&) const override {
    std::memcpy(to, At(i, begin), bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<const char*> Fetch(size_t i, uint64_t begin, size_t, ReadScratch&) const override {
    return At(i, begin);
  }
  bool is_in_memory() const override { return true; }
  size_t Remainder(size_t) const override { return 0; }

 private:
  const char* At(size_t i, uint64_t begin) const {
    return static_cast<const char*>(tensors_[i].const_data_ptr()) + begin;
  }

  const std::vector<std::string> names_;
  const std::vector<at::Tensor> tensors_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const WeightSource>> OpenWeightSource(
    std::shared_ptr<const WeightFiles> files, const std::vector<size_t>& entries) {
  std::map<size_t, std::shared_ptr<const StreamedFile>> opened;
  std::vector<FileWeights::Part> parts;
  for (const size_t i : entries) {
    const WeightEntry& entry = files->entries()[i];
    const std::string place =
        absl::StrCat(files->FileOf(entry), ": tensor \"", Printable(entry.tensor.name), "\": ");
    const absl::StatusOr<at::ScalarType> type = ToScalarType(entry.tensor.type);
    if (!type.ok()) {
      return absl::Status(type.status().code(), absl::StrCat(place, type.status().message()));
    }
    if (!entry.tensor.strides.empty()) {
      return absl::UnimplementedError(absl::StrCat(
          place,
          "is stored transposed, and cannot be used from the disk: convert the file with "
          "`muster merge-weights`, or keep the tensor on another device"));
    }
    std::shared_ptr<const StreamedFile>& file = opened[entry.file];
    if (file == nullptr) {
      MUSTER_ASSIGN_OR_RETURN(file, StreamedFile::Open(files->FileOf(entry)));
    }
    parts.push_back({&entry, *type, file});
  }
  return std::make_shared<const FileWeights>(std::move(files), std::move(parts));
}

std::shared_ptr<const WeightSource> HostWeightSource(std::vector<std::string> names,
                                                     std::vector<at::Tensor> tensors) {
  return std::make_shared<const HostWeights>(std::move(names), std::move(tensors));
}

}  // namespace muster
