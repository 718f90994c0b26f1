#include "worker/checkpoint/weight_writer.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/clean_path.h"
#include "worker/checkpoint/lasting_folder.h"
#include "worker/checkpoint/model_folder_writer.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"

namespace muster {
namespace {

absl::Status WriteOne(const WeightFiles& weights, std::vector<SafetensorsEntry> entries,
                      const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(
      const SafetensorsLayout layout,
      LayOutSafetensors(std::move(entries), SafetensorsMetadata{{"format", "pt"}}));
  MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  MUSTER_RETURN_IF_ERROR(file.Append(layout.prefix));
  for (const SafetensorsEntry& entry : layout.tensors) {
    MUSTER_RETURN_IF_ERROR(weights.Stream(
        *weights.Find(entry.name), [&](absl::string_view part) { return file.Append(part); }));
  }
  return file.Commit();
}

bool IsSameFile(const std::string& a, const std::string& b) {
  struct stat first, second;
  return stat(a.c_str(), &first) == 0 && stat(b.c_str(), &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

// Checks that no file that is read would be replaced by its own copy, or removed as a shard in the
// folder.
absl::Status CheckNotRead(const WeightFiles& weights, const std::string& folder,
                          const std::vector<std::string>& names) {
  MUSTER_RETURN_IF_ERROR(CheckNoCheckpoint(folder));
  for (const std::string& name : names) {
    const std::string path = JoinPath(folder, name);
    for (const std::string& source : weights.Files()) {
      if (!IsSameFile(source, path)) continue;
      return absl::AlreadyExistsError(absl::StrCat(
          path, " is one of the files that are read: write to another folder or file"));
    }
  }
  return absl::OkStatus();
}

// The new folders on the way to a path that does not exist yet. A failure leaves none of them
// behind.
class NewFolders {
 public:
  explicit NewFolders(const std::string& folder) : there_(folder) {
    while (!PathExists(there_)) {
      missing_.push_back(there_);
      there_ = ParentPath(there_);
    }
  }
  // Returns the nearest folder that exists.
  const std::string& there() const { return there_; }
  void RemoveEmpty() const {
    for (const std::string& folder : missing_) {
      if (rmdir(folder.c_str()) != 0) return;
    }
  }

 private:
  std::string there_;
  std::vector<std::string> missing_;  // the deepest first
};

// Checks, before anything is written, that there is room: a view may repeat a few bytes of a small
// file endlessly.
absl::Status CheckSpace(const std::string& folder, uint64_t bytes) {
  struct statvfs info;
  // Some file systems do not report it.
  if (statvfs(folder.c_str(), &info) != 0 || info.f_blocks == 0) return absl::OkStatus();
  const uint64_t left = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  if (bytes <= left) return absl::OkStatus();
  // Return the error with which the write would fail.
  return absl::ErrnoToStatus(
      ENOSPC, absl::StrCat("the tensors take ", bytes, " bytes, but the disk of ", folder, " has ",
                           left, " left (make room, or write to another disk)"));
}

absl::StatusOr<CopiedWeights> CopyInto(const WeightFiles& weights, const std::string& to,
                                       int64_t max_shard_bytes, const NewFolders& folders) {
  std::vector<SafetensorsEntry> entries;
  CopiedWeights copied;
  absl::flat_hash_set<std::string> seen;
  for (const WeightFiles::Entry& entry : weights.entries()) {
    const std::string storage = weights.StorageOf(entry);
    if (!storage.empty() && !seen.insert(storage).second) {
      copied.left_out.push_back(entry.tensor.name);
      continue;
    }
    entries.push_back(
        {.name = entry.tensor.name, .type = entry.tensor.type, .shape = entry.tensor.shape});
    if (const absl::Status fits = LayOutSafetensors({entries.back()}, std::nullopt).status();
        !fits.ok()) {
      return absl::Status(fits.code(),
                          absl::StrCat(weights.FileOf(entry), ": ", fits.message(),
                                       ": safetensors files cannot hold it; save it there under "
                                       "another name"));
    }
    ++copied.tensors;
    if (__builtin_add_overflow(copied.bytes, WeightFiles::BytesOf(entry), &copied.bytes)) {
      return absl::ResourceExhaustedError("the tensors take more than 2^64 bytes");
    }
  }
  if (absl::EndsWith(to, kModelExtension)) {
    MUSTER_RETURN_IF_ERROR(CheckNotRead(weights, ParentPath(to), {BaseName(to)}));
    MUSTER_RETURN_IF_ERROR(CheckSpace(folders.there(), copied.bytes));
    MUSTER_RETURN_IF_ERROR(MakeLastingFolder(ParentPath(to)));
    MUSTER_RETURN_IF_ERROR(WriteOne(weights, std::move(entries), to));
    copied.files = {BaseName(to)};
    return copied;
  }
  MUSTER_RETURN_IF_ERROR(CheckSpace(folders.there(), copied.bytes));
  MUSTER_RETURN_IF_ERROR(MakeDirectories(to));
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> before, ListDirectory(to));
  std::vector<std::string> replaced;
  for (const std::string& name : before) {
    if (IsShardFileName(name, kModelStem, kModelExtension)) replaced.push_back(name);
  }
  MUSTER_RETURN_IF_ERROR(CheckNotRead(weights, to, replaced));
  MUSTER_ASSIGN_OR_RETURN(const std::unique_ptr<ModelFolderWriter> writer,
                          ModelFolderWriter::Begin(to, entries, max_shard_bytes));
  for (const SafetensorsEntry& entry : entries) {
    uint64_t offset = 0;
    MUSTER_RETURN_IF_ERROR(weights.Stream(*weights.Find(entry.name), [&](absl::string_view part) {
      const uint64_t at = std::exchange(offset, offset + part.size());
      return writer->Write(entry.name, at, part);
    }));
  }
  MUSTER_RETURN_IF_ERROR(writer->Finish());
  copied.files = writer->FileNames();
  return copied;
}

}  // namespace

absl::StatusOr<CopiedWeights> CopyWeights(const WeightFiles& weights, const std::string& wanted,
                                          int64_t max_shard_bytes) {
  // Clean the path, so that no folder is created only to be left with "..".
  const std::string to = CleanPath(wanted);
  const NewFolders folders(absl::EndsWith(to, kModelExtension) ? ParentPath(to) : to);
  absl::StatusOr<CopiedWeights> copied = CopyInto(weights, to, max_shard_bytes, folders);
  if (!copied.ok()) folders.RemoveEmpty();
  return copied;
}

}  // namespace muster
