#include "base/memory_left.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"

namespace muster {
namespace {

// Returns the number in a file that follows `name`; -1: there is none.
int64_t NumberIn(const std::string& path, const char* name) {
  FILE* const file = fopen(path.c_str(), "re");
  if (file == nullptr) return -1;
  char line[256];
  long long number = -1;  // NOLINT: what sscanf takes
  while (number < 0 && fgets(line, sizeof(line), file) != nullptr) {
    if (strncmp(line, name, strlen(name)) != 0) continue;
    if (sscanf(line + strlen(name), "%lld", &number) != 1) number = -1;
  }
  fclose(file);
  return number;
}

// The files of a control group, and names in its memory.stat.
struct Interface {
  const char *limit, *used, *cache, *shared;
};
constexpr Interface kFirst = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache ",
                              "total_shmem "};
constexpr Interface kSecond = {"memory.max", "memory.current", "file ", "shmem "};

size_t LeftOfGroup(const std::string& folder, const Interface& names) {
  const auto number = [&](const char* file, const char* name) {
    return NumberIn(JoinPath(folder, file), name);
  };
  const int64_t limit = number(names.limit, ""), used = number(names.used, "");
  if (limit < 0 || used < 0) return SIZE_MAX;
  // The page cache counts as used, but the kernel reclaims it when memory is needed. It is counted
  // separately and later, so it can exceed what is used; subtracting it without the clamp could
  // overflow.
  const int64_t cache = std::max<int64_t>(0, number("memory.stat", names.cache)) -
                        std::max<int64_t>(0, number("memory.stat", names.shared));
  const int64_t held = used - std::clamp<int64_t>(cache, 0, used);
  return static_cast<size_t>(std::max<int64_t>(0, limit - held));
}

// Returns the memory left in the group `path` below `mount` and in the groups above it. Parts of
// the path that are hidden from a container do not exist there and are skipped.
size_t LeftOfGroups(const std::string& mount, absl::string_view path, const Interface& names) {
  size_t left = LeftOfGroup(mount, names);
  std::string folder = mount;
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    folder = JoinPath(folder, std::string(part));
    left = std::min(left, LeftOfGroup(folder, names));
  }
  return left;
}

}  // namespace

size_t MemoryLeft(const std::string& root) {
  size_t left = SIZE_MAX;
  const int64_t kilobytes = NumberIn(root + "/proc/meminfo", "MemAvailable:");
  if (kilobytes >= 0) left = static_cast<size_t>(kilobytes) * 1024;
  const std::string first = root + "/sys/fs/cgroup/memory", second = root + "/sys/fs/cgroup";
  // Where a container finds the files if the paths of its groups are hidden from it.
  left = std::min({left, LeftOfGroup(first, kFirst), LeftOfGroup(second, kSecond)});
  const absl::StatusOr<std::string> groups = ReadFile(root + "/proc/self/cgroup");
  if (!groups.ok()) return left;
  for (const absl::string_view line : absl::StrSplit(*groups, '\n')) {
    // NUMBER:CONTROLLERS:PATH
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (parts[1].empty()) {
      left = std::min(left, LeftOfGroups(second, parts[2], kSecond));
    } else if (std::count(controllers.begin(), controllers.end(), "memory") > 0) {
      left = std::min(left, LeftOfGroups(first, parts[2], kFirst));
    }
  }
  return left;
}

}  // namespace muster
