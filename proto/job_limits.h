#ifndef MUSTER_PROTO_JOB_LIMITS_H_
#define MUSTER_PROTO_JOB_LIMITS_H_

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// What submitted jobs may have, wherever they run.

inline constexpr size_t kMaxSpecBytes = 128 << 10;
inline constexpr size_t kMaxJobName = 64;
// SyncNodeRequest.held_jobs; what else a node holds has its time.
inline constexpr int kMaxHeldJobs = 1000;

// JobSpec.files: of all together.
inline constexpr size_t kMaxFileBytes = 96 << 10;
inline constexpr int kMaxFiles = 256;
inline constexpr size_t kMaxFilePath = 256;

// JobSpec.hang_timeout: progress is reported every 2 s, and examined less often.
inline constexpr absl::Duration kLeastHangTimeout = absl::Seconds(10);

// JobSpec.restart_delay, also when it has doubled.
inline constexpr absl::Duration kMaxRestartDelay = absl::Minutes(5);

// Where a program keeps its checkpoints if neither it nor MUSTER_PROJECT_DIR says otherwise: below
// the folder in which it runs.
inline constexpr char kDefaultProjectFolder[] = "muster-run";
// In it: where save_state() puts those that it names itself, and load_state() finds them.
inline constexpr char kCheckpointsFolder[] = "checkpoints";

// 1 to kMaxJobName letters, digits, '-' and '_'.
inline bool IsJobName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxJobName &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_';
         });
}

// A path below a folder, from which it does not lead out: of JobSpec.files.
inline bool IsJobFilePath(absl::string_view path) {
  if (path.empty() || path.size() > kMaxFilePath) return false;
  if (absl::StrContains(path, absl::string_view("\0", 1))) return false;
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part.empty() || part == "." || part == "..") return false;
  }
  return true;
}

}  // namespace muster

#endif  // MUSTER_PROTO_JOB_LIMITS_H_
