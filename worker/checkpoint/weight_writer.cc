#include "worker/checkpoint/weight_writer.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"

namespace muster {
namespace {

constexpr char kStem[] = "model";
constexpr char kExtension[] = ".safetensors";

absl::Status WriteOne(const WeightFiles& weights, const std::vector<std::string>& names,
                      const std::string& path) {
  std::vector<SafetensorsEntry> entries;
  for (const std::string& name : names) {
    const StoredTensor& tensor = weights.Find(name)->tensor;
    entries.push_back({.name = name, .type = tensor.type, .shape = tensor.shape});
  }
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

// A file that is read must not be replaced by its own copy, nor one of the folder's shards removed.
absl::Status CheckNotRead(const WeightFiles& weights, const std::string& folder,
                          const std::vector<std::string>& names) {
  if (PathExists(JoinPath(folder, "manifest.json"))) {
    return absl::AlreadyExistsError(absl::StrCat(
        folder, " is a checkpoint, which this would damage: write to another folder or file"));
  }
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

}  // namespace

absl::StatusOr<CopiedWeights> CopyWeights(const WeightFiles& weights, const std::string& to,
                                          int64_t max_shard_bytes) {
  std::vector<PlannedTensor> planned;
  CopiedWeights copied;
  absl::flat_hash_set<std::string> seen;
  for (const WeightFiles::Entry& entry : weights.entries()) {
    const std::string storage = weights.StorageOf(entry);
    if (!storage.empty() && !seen.insert(storage).second) {
      copied.left_out.push_back(entry.tensor.name);
      continue;
    }
    const uint64_t bytes = WeightFiles::BytesOf(entry);
    planned.push_back({.name = entry.tensor.name, .bytes = bytes, .storage = ""});
    ++copied.tensors;
    copied.bytes += bytes;
  }
  if (absl::EndsWith(to, kExtension)) {
    MUSTER_RETURN_IF_ERROR(CheckNotRead(weights, ParentPath(to), {BaseName(to)}));
    std::vector<std::string> names;
    for (const PlannedTensor& tensor : planned) names.push_back(tensor.name);
    MUSTER_RETURN_IF_ERROR(MakeDirectories(ParentPath(to)));
    MUSTER_RETURN_IF_ERROR(WriteOne(weights, names, to));
    copied.files = {BaseName(to)};
    return copied;
  }
  MUSTER_ASSIGN_OR_RETURN(const ShardPlan plan,
                          PlanShards(planned, {.max_shard_bytes = max_shard_bytes}));
  MUSTER_RETURN_IF_ERROR(MakeDirectories(to));
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> before, ListDirectory(to));
  std::vector<std::string> replaced;
  for (const std::string& name : before) {
    if (IsShardFileName(name, kStem, kExtension)) replaced.push_back(name);
  }
  MUSTER_RETURN_IF_ERROR(CheckNotRead(weights, to, replaced));
  // Writes everything under temporary names first, then renames.
  const std::string scratch = JoinPath(to, absl::StrCat(".saving-", RandomHex()));
  MUSTER_RETURN_IF_ERROR(MakeDirectories(scratch));
  const auto write = [&]() -> absl::Status {
    for (const ShardPlan::File& file : plan.files) {
      MUSTER_RETURN_IF_ERROR(WriteOne(weights, file.tensors, JoinPath(scratch, file.name)));
      copied.files.push_back(file.name);
    }
    if (plan.index_name.has_value()) {
      MUSTER_RETURN_IF_ERROR(
          WriteFileAtomically(JoinPath(scratch, *plan.index_name), EncodeShardIndex(plan)));
      copied.files.push_back(*plan.index_name);
    }
    // A crash from here on leaves no index rather than one that mixes two copies.
    MUSTER_RETURN_IF_ERROR(
        RemoveTree(JoinPath(to, absl::StrCat(kStem, kExtension, ".index.json"))));
    for (const std::string& name : replaced) {
      const bool stays =
          std::find(copied.files.begin(), copied.files.end(), name) != copied.files.end();
      if (!stays) MUSTER_RETURN_IF_ERROR(RemoveTree(JoinPath(to, name)));
    }
    for (const std::string& name : copied.files) {
      if (rename(JoinPath(scratch, name).c_str(), JoinPath(to, name).c_str()) != 0) {
        return absl::ErrnoToStatus(errno, absl::StrCat("cannot move ", name, " into ", to));
      }
    }
    return SyncDirectory(to);
  };
  absl::Status status = write();
  status.Update(RemoveTree(scratch));
  if (!status.ok()) return status;
  return copied;
}

}  // namespace muster
