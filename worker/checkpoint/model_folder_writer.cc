#include "worker/checkpoint/model_folder_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/lasting_folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/removal.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/write_at.h"

namespace muster {
namespace {

constexpr absl::string_view kScratchMark = ".saving-";

// Removes what killed writers have left.
void RemoveAbandoned(const std::string& folder) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    const std::string path = JoinPath(folder, name);
    if (!HasMark(name, "", kScratchMark) || MayHaveDistantWriter(path)) continue;
    const OwnedFd lock(LockFolder(path));
    // If a folder cannot be removed, it only takes room.
    if (lock.open()) (void)RemoveCheckpointTree(path);
  }
}

// Says what Accelerate makes of the folder: it takes pytorch_model.bin before model.safetensors,
// and refuses a folder with two indexes (its load_checkpoint_in_model). `sharded`: the model that
// was saved has an index.
void WarnOfPickles(const std::string& folder, const std::vector<std::string>& names, bool sharded) {
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (has("pytorch_model.bin")) {
    MUSTER_LOG(Warning) << folder << " has pytorch_model.bin of another save, which Accelerate "
                        << "would load in place of the model that was saved now: remove it";
  } else if (sharded && has("pytorch_model.bin.index.json")) {
    MUSTER_LOG(Warning) << folder << " has pytorch_model.bin.index.json of another save: "
                        << "Accelerate refuses a folder with two indexes; remove it";
  }
}

}  // namespace

absl::Status CheckNoCheckpoint(const std::string& folder) {
  if (!PathExists(JoinPath(folder, kManifestName))) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      folder,
      " is a checkpoint, which this would damage: write to another folder, or load the "
      "model that the checkpoint has, whose files are like these"));
}

ModelFolderWriter::ModelFolderWriter(std::string folder, ShardPlan plan)
    : folder_(std::move(folder)), plan_(std::move(plan)) {}

ModelFolderWriter::~ModelFolderWriter() {
  if (!scratch_.empty()) (void)RemoveCheckpointTree(scratch_);
}

absl::StatusOr<std::unique_ptr<ModelFolderWriter>> ModelFolderWriter::Begin(
    const std::string& folder, const std::vector<SafetensorsEntry>& tensors,
    int64_t max_shard_bytes) {
  MUSTER_RETURN_IF_ERROR(CheckNoCheckpoint(folder));
  std::vector<TensorToShard> planned;
  for (const SafetensorsEntry& tensor : tensors) {
    MUSTER_ASSIGN_OR_RETURN(const uint64_t bytes, SafetensorsBytes(tensor.type, tensor.shape));
    planned.push_back({.name = tensor.name, .bytes = bytes, .storage = ""});
  }
  MUSTER_ASSIGN_OR_RETURN(ShardPlan plan,
                          PlanShards(planned, {.max_shard_bytes = max_shard_bytes}));
  std::unique_ptr<ModelFolderWriter> writer(new ModelFolderWriter(folder, std::move(plan)));
  MUSTER_RETURN_IF_ERROR(writer->LayOut(tensors));
  MUSTER_RETURN_IF_ERROR(MakeLastingFolder(folder));
  RemoveAbandoned(folder);
  MUSTER_ASSIGN_OR_RETURN(WriterFolder scratch, MakeWriterFolder([&folder] {
                            return JoinPath(folder, absl::StrCat(kScratchMark, RandomHex()));
                          }));
  writer->scratch_ = std::move(scratch.path);
  writer->lock_ = OwnedFd(scratch.lock);
  return writer;
}

absl::Status ModelFolderWriter::LayOut(const std::vector<SafetensorsEntry>& tensors) {
  absl::flat_hash_map<absl::string_view, const SafetensorsEntry*> by_name;
  for (const SafetensorsEntry& tensor : tensors) by_name[tensor.name] = &tensor;
  for (const ShardPlan::File& planned : plan_.files) {
    std::vector<SafetensorsEntry> entries;
    for (const std::string& name : planned.tensors) entries.push_back(*by_name.at(name));
    File file;
    file.name = planned.name;
    MUSTER_ASSIGN_OR_RETURN(
        file.layout, LayOutSafetensors(std::move(entries), SafetensorsMetadata{{"format", "pt"}}));
    file.missing = file.layout.data_bytes;
    for (const SafetensorsEntry& entry : file.layout.tensors) {
      places_[entry.name] = {.file = files_.size(), .begin = entry.begin, .end = entry.end};
    }
    files_.push_back(std::move(file));
  }
  return absl::OkStatus();
}

absl::Status ModelFolderWriter::Open(File* file) const {
  file->fd = OwnedFd(
      open(JoinPath(scratch_, file->name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file->fd.open()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", file->name, " in ", folder_));
  }
  return WriteAt(file->fd.get(), 0, file->layout.prefix, absl::StrCat("cannot write ", file->name));
}

absl::Status ModelFolderWriter::Close(File* file) {
  const OwnedFd fd = std::move(file->fd);
  if (TEMP_FAILURE_RETRY(fsync(fd.get())) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", file->name));
}

absl::Status ModelFolderWriter::Write(absl::string_view name, uint64_t offset,
                                      absl::string_view bytes) {
  const auto found = places_.find(name);
  if (found == places_.end()) {
    return absl::NotFoundError(absl::StrCat("tensor \"", Printable(name), "\" is not planned"));
  }
  const auto& [index, begin, end] = found->second;
  File& file = files_[index];
  if (offset > end - begin || bytes.size() > end - begin - offset || bytes.size() > file.missing) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", Printable(name), "\" has ",
                                                   end - begin, " bytes: ", bytes.size(),
                                                   " do not fit at byte ", offset));
  }
  if (bytes.empty()) return absl::OkStatus();
  if (!file.fd.open()) MUSTER_RETURN_IF_ERROR(Open(&file));
  MUSTER_RETURN_IF_ERROR(WriteAt(file.fd.get(), file.layout.prefix.size() + begin + offset, bytes,
                                 absl::StrCat("cannot write ", file.name)));
  file.missing -= bytes.size();
  return file.missing == 0 ? Close(&file) : absl::OkStatus();
}

absl::Status ModelFolderWriter::Finish() {
  for (File& file : files_) {
    if (file.missing > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(file.name, " lacks ", file.missing, " bytes of its tensors"));
    }
    if (file.layout.data_bytes > 0) continue;
    MUSTER_RETURN_IF_ERROR(Open(&file));
    MUSTER_RETURN_IF_ERROR(Close(&file));
  }
  if (plan_.index_name.has_value()) {
    MUSTER_RETURN_IF_ERROR(
        WriteFileAtomically(JoinPath(scratch_, *plan_.index_name), EncodeShardIndex(plan_)));
  }
  MUSTER_RETURN_IF_ERROR(MoveIn());
  return RemoveCheckpointTree(scratch_);
}

absl::Status ModelFolderWriter::MoveIn() const {
  // Check again: a checkpoint that is saved beside training may have got its name meanwhile.
  MUSTER_RETURN_IF_ERROR(CheckNoCheckpoint(folder_));
  const std::vector<std::string> fresh = FileNames();
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> before, ListDirectory(folder_));
  MUSTER_RETURN_IF_ERROR(
      RemoveTree(JoinPath(folder_, absl::StrCat(kModelStem, kModelExtension, ".index.json"))));
  const auto move = [this](const std::string& name) {
    if (rename(JoinPath(scratch_, name).c_str(), JoinPath(folder_, name).c_str()) == 0) {
      return absl::OkStatus();
    }
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot move ", name, " into ", folder_));
  };
  for (const File& file : files_) MUSTER_RETURN_IF_ERROR(move(file.name));
  for (const std::string& name : before) {
    if (!IsShardFileName(name, kModelStem, kModelExtension)) continue;
    if (std::find(fresh.begin(), fresh.end(), name) != fresh.end()) continue;
    MUSTER_RETURN_IF_ERROR(RemoveTree(JoinPath(folder_, name)));
  }
  if (plan_.index_name.has_value()) MUSTER_RETURN_IF_ERROR(move(*plan_.index_name));
  WarnOfPickles(folder_, before, plan_.index_name.has_value());
  return SyncDirectory(folder_);
}

std::vector<std::string> ModelFolderWriter::FileNames() const {
  std::vector<std::string> names;
  for (const File& file : files_) names.push_back(file.name);
  if (plan_.index_name.has_value()) names.push_back(*plan_.index_name);
  return names;
}

}  // namespace muster
