#include "worker/checkpoint/state.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

using Json = nlohmann::json;

std::string FirstLine(absl::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

// Runs `work`, whose exceptions must not keep this rank from telling the others.
absl::Status Guarded(absl::FunctionRef<absl::Status()> work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    return absl::InternalError(FirstLine(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::InternalError(FirstLine(error.what()));
  }
}

std::string Encode(const absl::Status& status, const std::vector<ManifestFile>& files = {}) {
  Json json = {{"code", static_cast<int>(status.code())}, {"files", Json::array()}};
  const std::string message(status.message());
  json["message"] = IsValidUtf8(message) ? message : "(a message that is not text)";
  for (const ManifestFile& file : files) {
    json["files"].push_back({file.name, file.rank, file.digest.bytes, file.digest.xxh3});
  }
  return json.dump();
}

absl::Status Decode(const std::string& bytes, std::vector<ManifestFile>* files = nullptr) {
  const Json json = Json::parse(bytes);
  if (files != nullptr) {
    for (const Json& file : json["files"]) {
      files->push_back(
          {.name = file[0], .rank = file[1], .digest = {.bytes = file[2], .xxh3 = file[3]}});
    }
  }
  return absl::Status(static_cast<absl::StatusCode>(json["code"].get<int>()),
                      json["message"].get<std::string>());
}

// One status for all ranks: OK, or the first failure with its rank.
absl::Status Agree(Comm& comm, const absl::Status& mine, const std::vector<ManifestFile>& my_files,
                   std::vector<ManifestFile>* files) {
  const std::vector<std::string> all = comm.AllGatherBytes(Encode(mine, my_files));
  absl::Status first;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const absl::Status status = Decode(all[rank], files);
    if (status.ok() || !first.ok()) continue;
    first = all.size() == 1
                ? status
                : absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message()));
  }
  return first;
}

// Rank 0's status, on every rank.
absl::Status FromMain(Comm& comm, const absl::Status& mine) {
  return Decode(comm.BroadcastBytes(comm.rank() == 0 ? Encode(mine) : "", 0));
}

}  // namespace

absl::Status StateWriter::CheckName(const std::string& name) const {
  for (const ManifestFile& file : files_) {
    if (file.name == name) {
      return absl::InvalidArgumentError(absl::StrCat("file ", name, " was written already"));
    }
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
  MUSTER_ASSIGN_OR_RETURN(const FileDigest digest,
                          WriteStateDict(JoinPath(staging_, name), state, shared));
  files_.push_back({.name = name, .rank = rank_, .digest = digest});
  return absl::OkStatus();
}

absl::Status StateWriter::WriteModel(const std::string& name, const NamedTensors& tensors) {
  MUSTER_RETURN_IF_ERROR(CheckName(name));
  MUSTER_ASSIGN_OR_RETURN(const FileDigest digest,
                          WriteSafetensors(JoinPath(staging_, name), tensors,
                                           {.metadata = SafetensorsMetadata{{"format", "pt"}}}));
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
  return ReadStateDict(JoinPath(dir_, name), file->digest);
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
  MUSTER_RETURN_IF_ERROR(FromMain(comm, begun));
  const std::string path = comm.BroadcastBytes(staging ? staging->path() : "", 0);
  StateWriter writer(path, comm.rank());
  const absl::Status written = Guarded([&]() -> absl::Status {
    if (!PathExists(path)) {
      return absl::NotFoundError(absl::StrCat(
          path,
          " of rank 0 is not visible here; checkpoints need a file system that all ranks "
          "share"));
    }
    return write(writer);
  });
  Manifest manifest;
  MUSTER_RETURN_IF_ERROR(Agree(comm, written, writer.files(), &manifest.files));
  absl::Status published;
  if (staging.has_value()) {
    manifest.info = info;
    manifest.info.world_size = comm.size();
    manifest.created = absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone());
    published = staging->Publish(manifest);
  }
  return FromMain(comm, published);
}

absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, int total_limit,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write) {
  const std::string dir = folder.PathOf(info.iteration);
  absl::Status free;
  if (comm.rank() == 0) {
    if (total_limit < 0) {
      free = absl::InvalidArgumentError(
          absl::StrCat("total_limit is ", total_limit, "; it must be 0 (keep all) or more"));
    } else if (PathExists(JoinPath(dir, kManifestName))) {
      free = absl::AlreadyExistsError(absl::StrCat(
          "checkpoint ", dir, " exists; load it first to go on after it, or name another folder"));
    }
  }
  MUSTER_RETURN_IF_ERROR(FromMain(comm, free));
  MUSTER_RETURN_IF_ERROR(SaveCheckpoint(comm, dir, info, write));
  absl::Status rotated;
  if (comm.rank() == 0 && total_limit > 0) rotated = folder.Rotate(total_limit);
  return FromMain(comm, rotated);
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
    MUSTER_RETURN_IF_ERROR(FromMain(comm, status));
    found = comm.BroadcastBytes(found, 0);
  }
  absl::StatusOr<StateReader> reader = StateReader::Open(found);
  MUSTER_RETURN_IF_ERROR(Agree(comm, reader.status(), {}, nullptr));
  return reader;
}

}  // namespace muster
