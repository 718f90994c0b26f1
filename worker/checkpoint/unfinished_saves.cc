#include "worker/checkpoint/unfinished_saves.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/sealing.h"

namespace muster {
namespace {

constexpr uint64_t kStatBlock = 512;

// Whether `path` is a checkpoint that the one in `dir` has replaced, and that is being removed.
bool IsReplaced(const std::string& path, const std::string& dir) {
  return PathExists(JoinPath(path, kManifestName)) && PathExists(JoinPath(dir, kManifestName)) &&
         !IsNewerCheckpoint(path, dir).value_or(false);
}

// Examines a folder. Absent: it is not an unfinished save, or has just become a checkpoint.
std::optional<UnfinishedSave> LookAt(const std::string& path, const std::string& checkpoint) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || IsReplaced(path, checkpoint)) {
    return std::nullopt;
  }
  UnfinishedSave save;
  save.path = path;
  save.checkpoint = checkpoint;
  save.writer = WriterOf(path);
  save.sealed = PathExists(JoinPath(path, kSealName));
  if (const absl::StatusOr<Sealing> sealing = ReadSealing(path); sealing.ok() && !save.sealed) {
    save.sealed = sealing->state == Sealing::State::kSealed;
    save.asked = sealing->state == Sealing::State::kAsked;
  }
  save.changed = absl::TimeFromTimespec(info.st_mtim);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(path);
  if (absl::IsNotFound(names.status())) return std::nullopt;
  // A new folder is not locked in the moment of its creation, but only afterwards.
  if (names.ok() && names->empty() && save.writer == FolderWriter::kGone) {
    save.writer = FolderWriter::kUnknown;
  }
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    if (stat(JoinPath(path, name).c_str(), &info) != 0) continue;
    save.bytes += static_cast<uint64_t>(info.st_blocks) * kStatBlock;
    save.changed = std::max(save.changed, absl::TimeFromTimespec(info.st_mtim));
  }
  return save;
}

absl::StatusOr<std::vector<UnfinishedSave>> Find(
    const std::string& parent, absl::FunctionRef<bool(absl::string_view stem)> wanted) {
  std::vector<UnfinishedSave> saves;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  if (absl::IsNotFound(names.status())) return saves;
  MUSTER_RETURN_IF_ERROR(names.status());
  for (const std::string& name : *names) {
    const absl::string_view stem = StemOf(name, kStagingMark);
    if (!HasMark(name, stem, kStagingMark) || IsDoomed(name) || !wanted(stem)) continue;
    std::optional<UnfinishedSave> save = LookAt(JoinPath(parent, name), JoinPath(parent, stem));
    if (save.has_value()) saves.push_back(*std::move(save));
  }
  return saves;
}

}  // namespace

absl::StatusOr<std::vector<UnfinishedSave>> UnfinishedSavesIn(const std::string& root) {
  MUSTER_ASSIGN_OR_RETURN(std::vector<UnfinishedSave> saves,
                          Find(root, [](absl::string_view /*stem*/) { return true; }));
  // Other programs may use such names for their folders.
  const auto is_foreign = [](const UnfinishedSave& save) {
    return !IsNumberedName(BaseName(save.checkpoint)) && save.writer != FolderWriter::kAlive &&
           !save.sealed && !save.asked && !PathExists(JoinPath(save.path, kManifestName));
  };
  saves.erase(std::remove_if(saves.begin(), saves.end(), is_foreign), saves.end());
  return saves;
}

absl::StatusOr<std::vector<UnfinishedSave>> UnfinishedSavesOf(const std::string& dir) {
  // "link/" means what the link points to, like "link"; "." has a name.
  std::error_code error;
  std::string plain = dir;
  while (plain.size() > 1 && plain.back() == '/') plain.pop_back();
  const bool named = BaseName(plain) != "." && BaseName(plain) != "..";
  std::string real = plain;
  if (!named || std::filesystem::is_symlink(plain, error)) {
    const std::filesystem::path target = std::filesystem::canonical(plain, error);
    if (!error) real = target.string();
  }
  const std::string name = BaseName(real);
  auto saves = Find(ParentPath(real), [&](absl::string_view stem) { return stem == name; });
  // The contents of `dir` itself can still be seen.
  if (absl::IsPermissionDenied(saves.status())) return std::vector<UnfinishedSave>();
  return saves;
}

}  // namespace muster
