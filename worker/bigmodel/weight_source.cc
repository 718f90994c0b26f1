#include "worker/bigmodel/weight_source.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/streamed_file.h"

namespace muster {
namespace {

// Detects that the file was written to since it was opened, so that its tensors may have changed:
// DATA_LOSS. A file that takes its name is another file.
class UnchangedFile {
 public:
  // Borrows `file`.
  static absl::StatusOr<std::shared_ptr<const UnchangedFile>> Of(const StreamedFile& file,
                                                                 bool mmap) {
    struct stat opened;
    if (fstat(file.fd(), &opened) != 0) return absl::ErrnoToStatus(errno, "cannot examine it");
    std::optional<MappedFile> mapped;
    if (mmap) {
      MUSTER_ASSIGN_OR_RETURN(MappedFile made,
                              MappedFile::Of(file.fd(), static_cast<uint64_t>(opened.st_size)));
      mapped.emplace(std::move(made));
    }
    return std::make_shared<const UnchangedFile>(file, opened, std::move(mapped));
  }
  UnchangedFile(const StreamedFile& file, const struct stat& opened,
                std::optional<MappedFile> mapped)
      : file_(file), opened_(opened), mapped_(std::move(mapped)) {}

  const StreamedFile& file() const { return file_; }
  // Null if it is not mapped.
  const MappedFile* mapped() const { return mapped_.has_value() ? &*mapped_ : nullptr; }
  absl::Status Check() const {
    struct stat now;
    if (fstat(file_.fd(), &now) != 0) return absl::ErrnoToStatus(errno, "cannot examine it");
    if (now.st_size == opened_.st_size && now.st_mtim.tv_sec == opened_.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec) {
      return absl::OkStatus();
    }
    return absl::DataLossError(
        "it was changed while it is used: load the model again, and replace files by renaming");
  }

 private:
  const StreamedFile& file_;
  const struct stat opened_;
  const std::optional<MappedFile> mapped_;
};

class FileWeights final : public WeightSource {
 public:
  struct Part {
    const WeightEntry* entry;
    at::ScalarType type;
    std::shared_ptr<const UnchangedFile> file;
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
    absl::Status status =
        part.file->file().Read(part.entry->tensor.begin + begin, bytes, to, scratch);
    if (status.ok()) status = part.file->Check();
    return Named(i, status);
  }
  absl::StatusOr<const char*> Fetch(size_t i, uint64_t begin, size_t bytes,
                                    ReadScratch& scratch) const override {
    const Part& part = parts_[i];
    const uint64_t at = part.entry->tensor.begin + begin;
    absl::Status status = scratch.Grow(StreamedFile::RoomFor(at, bytes));
    size_t offset = 0;
    if (status.ok()) {
      const absl::StatusOr<size_t> fetched = part.file->file().Fetch(at, bytes, scratch.data());
      status = fetched.ok() ? part.file->Check() : fetched.status();
      offset = fetched.value_or(0);
    }
    if (!status.ok()) return Named(i, status);
    return scratch.data() + offset;
  }
  MappedPlace Mapped(size_t i) const override {
    const Part& part = parts_[i];
    const uint64_t begin = part.entry->tensor.begin;
    // Operators may not accept numbers that are not aligned to their size.
    if (part.file->mapped() == nullptr || begin % c10::elementSize(part.type) != 0) return {};
    return {part.file->mapped(), begin};
  }
  absl::Status LoadPages(size_t i, uint64_t begin, size_t bytes) const override {
    const Part& part = parts_[i];
    const absl::Status loaded =
        part.file->mapped()->LoadPages(part.entry->tensor.begin + begin, bytes);
    // Prefer the error of a changed file, which says more than that of a missing part.
    absl::Status status = part.file->Check();
    status.Update(loaded);
    return Named(i, status);
  }
  absl::Status CheckUnchanged(size_t i) const override { return Named(i, parts_[i].file->Check()); }
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
    std::shared_ptr<const WeightFiles> files, const std::vector<size_t>& entries, bool mmap) {
  std::map<size_t, std::shared_ptr<const UnchangedFile>> opened;
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
    std::shared_ptr<const UnchangedFile>& file = opened[entry.file];
    if (file == nullptr) {
      absl::StatusOr<std::shared_ptr<const UnchangedFile>> opened_file =
          UnchangedFile::Of(*files->StreamedFileOf(entry), mmap);
      if (!opened_file.ok()) {
        return absl::Status(opened_file.status().code(),
                            absl::StrCat(place, opened_file.status().message()));
      }
      file = *std::move(opened_file);
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
