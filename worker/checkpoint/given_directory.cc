#include "worker/checkpoint/given_directory.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "worker/checkpoint/clean_path.h"

namespace muster {
namespace {

bool AreAlike(const GivenDirectory& one, const GivenDirectory& other, GivenAlike alike) {
  if (one.path.empty() != other.path.empty()) return false;
  if (alike == GivenAlike::kOrNone || one.folder.empty() || other.folder.empty()) return true;
  if (alike == GivenAlike::kByFolder) return one.path == other.path || one.folder == other.folder;
  // A node that has no copy has no link to it either, and one node may use a link for a name.
  return BaseName(AbsolutePath(one.path)) == BaseName(AbsolutePath(other.path)) ||
         BaseName(one.folder) == BaseName(other.folder);
}

}  // namespace

GivenDirectory FollowGivenDirectory(const std::string& path) {
  if (path.empty()) return {};
  const std::string absolute = AbsolutePath(path);
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::weakly_canonical(absolute, error);
  return {.path = path, .folder = error ? absolute : folder.string()};
}

absl::Status CheckGivenAlike(absl::string_view call, const std::vector<GivenDirectory>& directories,
                             GivenAlike alike) {
  const auto given = [](const GivenDirectory& directory) {
    return directory.path.empty() ? "no directory" : directory.path;
  };
  for (size_t r = 1; r < directories.size(); ++r) {
    const GivenDirectory &here = directories[r], &there = directories[0];
    if (AreAlike(here, there, alike)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(call, ": rank ", r, " gives ", given(here), ", and rank 0 ", given(there),
                     ": give all processes the directory of one checkpoint",
                     here.path.empty() != there.path.empty() ? ", or none" : ""));
  }
  return absl::OkStatus();
}

}  // namespace muster
