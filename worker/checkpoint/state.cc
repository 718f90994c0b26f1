#include "worker/checkpoint/state.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/publication.h"
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
        absl::StrCat("\"", name, "\" is no name for a checkpoint's file"));
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

namespace {

absl::Status Save(Comm& comm, Publication publication,
                  absl::FunctionRef<absl::Status(StateWriter&)> write) {
  std::optional<Staging> staging;
  absl::Status begun;
  if (comm.rank() == 0) {
    absl::StatusOr<Staging> created = Staging::Create(publication.path);
    begun = created.status();
    if (created.ok()) staging.emplace(*std::move(created));
  }
  MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, begun));
  publication.staging_path = comm.BroadcastBytes(staging ? staging->path() : "", 0);
  StateWriter writer(publication.staging_path, comm.rank());
  const absl::Status written = GuardRank([&]() -> absl::Status {
    MUSTER_RETURN_IF_ERROR(CheckStagingIsVisible(publication.staging_path));
    return write(writer);
  });
  return PublishTogether(comm, staging.has_value() ? &*staging : nullptr, publication, written,
                         writer.files());
}

}  // namespace

absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            absl::FunctionRef<absl::Status(StateWriter&)> write) {
  return SaveCheckpoint(comm, dir, info, PublishOptions(), write);
}

absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            const PublishOptions& options,
                            absl::FunctionRef<absl::Status(StateWriter&)> write) {
  return Save(comm, {.options = options, .info = info, .path = dir, .staging_path = ""}, write);
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
                                    const CheckpointInfo& info, const PublishOptions& options,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write) {
  absl::Status free;
  if (comm.rank() == 0) free = CheckNumberIsFree(folder, info.iteration, options.keep);
  MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, free));
  return Save(comm,
              {.options = options,
               .info = info,
               .path = folder.PathOf(info.iteration),
               .staging_path = "",
               .folder = folder},
              write);
}

absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, int total_limit,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write) {
  return SaveNumberedCheckpoint(comm, folder, info, PublishOptions{.keep = total_limit}, write);
}

absl::StatusOr<StateReader> OpenCheckpoint(Comm& comm, const std::string& dir,
                                           const CheckpointFolder& folder,
                                           CheckpointRegistrar* registrar) {
  std::string found = dir;
  if (dir.empty()) {
    absl::Status status;
    if (comm.rank() == 0) {
      status = GuardRank([&]() -> absl::Status {
        MUSTER_ASSIGN_OR_RETURN(found, FindCheckpointToResume(folder, registrar));
        return absl::OkStatus();
      });
    }
    MUSTER_RETURN_IF_ERROR(StatusOfMain(comm, status));
    found = comm.BroadcastBytes(found, 0);
  }
  absl::StatusOr<StateReader> reader = StateReader::Open(found);
  MUSTER_RETURN_IF_ERROR(AgreeOnFiles(comm, reader.status(), {}, nullptr));
  return reader;
}

}  // namespace muster
