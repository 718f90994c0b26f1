#include "worker/checkpoint/state.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/snapshot.h"

namespace muster {

absl::Status StateWriter::CheckName(const std::string& name) const {
  const auto has_name = [&name](const auto& file) { return file.name == name; };
  if (std::any_of(files_.begin(), files_.end(), has_name) ||
      (snapshot_ != nullptr &&
       std::any_of(snapshot_->files().begin(), snapshot_->files().end(), has_name))) {
    return absl::InvalidArgumentError(absl::StrCat("file ", name, " was written already"));
  }
  if (name.find('/') != std::string::npos || name == kManifestName) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name, "\" is not a valid name for a checkpoint's file"));
  }
  return absl::OkStatus();
}

absl::Status StateWriter::Write(const std::string& name, const StateDict& state,
                                SharedTensors shared) {
  MUSTER_RETURN_IF_ERROR(CheckName(name));
  if (snapshot_ != nullptr) return snapshot_->Add(name, state, shared);
  MUSTER_ASSIGN_OR_RETURN(const FileDigest digest,
                          WriteStateDict(JoinPath(staging_, name), state, shared));
  files_.push_back({.name = name, .rank = rank_, .digest = digest});
  return absl::OkStatus();
}

absl::Status StateWriter::WriteModel(const std::string& name, const NamedTensors& tensors) {
  MUSTER_RETURN_IF_ERROR(CheckName(name));
  const WriteSafetensorsOptions options{.metadata = SafetensorsMetadata{{"format", "pt"}}};
  if (snapshot_ != nullptr) return snapshot_->Add(name, tensors, options);
  MUSTER_ASSIGN_OR_RETURN(const FileDigest digest,
                          WriteSafetensors(JoinPath(staging_, name), tensors, options));
  files_.push_back({.name = name, .rank = rank_, .digest = digest});
  return absl::OkStatus();
}

absl::StatusOr<StateReader> StateReader::Open(const std::string& dir) {
  MUSTER_ASSIGN_OR_RETURN(Manifest manifest, VerifyCheckpoint(dir, VerifyLevel::kSizes));
  return StateReader(dir, std::move(manifest));
}

int StateReader::Count(std::string (*name)(int)) const {
  int count = 0;
  while (Has(name(count))) ++count;
  return count;
}

absl::StatusOr<StateDict> StateReader::Read(absl::string_view name) const {
  const ManifestFile* const file = manifest_.Find(name);
  if (file == nullptr) {
    const std::string names = absl::StrJoin(
        manifest_.files, ", ",
        [](std::string* out, const ManifestFile& entry) { absl::StrAppend(out, entry.name); });
    return absl::NotFoundError(
        absl::StrCat("checkpoint ", dir_, " has no ", name, " (it has ", names, ")"));
  }
  return ReadStateDict(JoinPath(dir_, name), file->digest, file->blocks);
}

absl::Status CheckStagingIsVisible(const std::string& path) {
  if (PathExists(path)) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      path, " of rank 0 is not visible here; checkpoints need a file system that all ranks share"));
}

absl::Status PublishCheckpoint(Staging& staging, const CheckpointInfo& info, int world_size,
                               std::vector<ManifestFile> files) {
  Manifest manifest;
  manifest.info = info;
  manifest.info.world_size = world_size;
  manifest.created = absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone());
  manifest.files = std::move(files);
  return staging.Publish(manifest);
}

absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            absl::FunctionRef<absl::Status(StateWriter&)> write) {
  std::optional<Staging> staging;
  absl::Status begun;
  if (comm.rank() == 0) {
    absl::StatusOr<Staging> created = Staging::Create(dir);
    begun = created.status();
    if (created.ok()) staging.emplace(*std::move(created));
  }
  MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, begun));
  const std::string path = comm.BroadcastBytes(staging ? staging->path() : "", 0);
  StateWriter writer(path, comm.rank());
  const absl::Status written = GuardRank([&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(CheckStagingIsVisible(path));
    return write(writer);
  });
  Manifest manifest;
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, written, writer.files(), &manifest.files));
  absl::Status published;
  if (staging.has_value()) {
    published = PublishCheckpoint(*staging, info, comm.size(), std::move(manifest.files));
  }
  return StatusOfMain(comm, published);
}

absl::Status CheckNumberIsFree(const CheckpointFolder& folder, int64_t iteration, int total_limit) {
  if (total_limit < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("total_limit is ", total_limit, "; it must be 0 (keep all) or more"));
  }
  const std::string dir = folder.PathOf(iteration);
  if (!PathExists(JoinPath(dir, kManifestName))) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "checkpoint ", dir, " exists; load it first to go on after it, or name another folder"));
}

absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, int total_limit,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write) {
  const std::string dir = folder.PathOf(info.iteration);
  absl::Status free;
  if (comm.rank() == 0) free = CheckNumberIsFree(folder, info.iteration, total_limit);
  MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, free));
  MUSTER_RETURN_IF_ERROR(SaveCheckpoint(comm, dir, info, write));
  absl::Status rotated;
  if (comm.rank() == 0 && total_limit > 0) rotated = folder.Rotate(total_limit);
  return StatusOfMain(comm, rotated);
}

absl::StatusOr<StateReader> OpenCheckpoint(Comm& comm, const std::string& dir,
                                           const CheckpointFolder& folder) {
  std::string found = dir;
  if (dir.empty()) {
    absl::Status status;
    if (comm.rank() == 0) {
      absl::StatusOr<std::string> newest = folder.Newest();
      status = newest.status();
      if (newest.ok()) found = *std::move(newest);
    }
    MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, status));
    found = comm.BroadcastBytes(found, 0);
  }
  absl::StatusOr<StateReader> reader = StateReader::Open(found);
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, reader.status(), {}, nullptr));
  return reader;
}

}  // namespace muster
