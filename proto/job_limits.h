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

// Limits of submitted jobs, wherever they run.

inline constexpr size_t kMaxSpecBytes = 128 << 10;
inline constexpr size_t kMaxJobName = 64;
// The most entries of SyncNodeRequest.held_jobs; a node keeps what it holds beyond them for its
// usual time.
inline constexpr int kMaxHeldJobs = 1000;

// The most bytes of JobSpec.files, all files together.
inline constexpr size_t kMaxFileBytes = 96 << 10;
inline constexpr int kMaxFiles = 256;
inline constexpr size_t kMaxFilePath = 256;

// The least JobSpec.hang_timeout: progress is reported every 2 s, and examined less often.
inline constexpr absl::Duration kLeastHangTimeout = absl::Seconds(10);

// The most JobSpec.restart_delay, also when it has doubled.
inline constexpr absl::Duration kMaxRestartDelay = absl::Minutes(5);

// The folder, below the one in which a program runs, for its checkpoints, if neither the program
// nor MUSTER_PROJECT_DIR names another.
inline constexpr char kDefaultProjectFolder[] = "muster-run";
// A folder in the project folder: save_state() puts the checkpoints there that it names itself, and
// load_state() finds them there.
inline constexpr char kCheckpointsFolder[] = "checkpoints";

// 1 to kMaxJobName letters, digits, '-' and '_'.
inline bool IsJobName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxJobName &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_';
         });
}

// Returns whether `path` is a path below a folder that does not lead out of it, as JobSpec.files
// requires.
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
