#ifndef MUSTER_PROTO_JOB_LIMITS_H_
#define MUSTER_PROTO_JOB_LIMITS_H_

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// What submitted jobs may have, wherever they run.

inline constexpr size_t kMaxSpecBytes = 128 << 10;
inline constexpr size_t kMaxJobName = 64;
// SyncNodeRequest.held_jobs; what else a node holds has its time.
inline constexpr int kMaxHeldJobs = 1000;

// JobSpec.hang_timeout: progress is told every 2 s, and looked at less often.
inline constexpr absl::Duration kLeastHangTimeout = absl::Seconds(10);

// Where a program keeps its checkpoints if neither it nor MUSTER_PROJECT_DIR says otherwise: below
// the folder in which it runs.
inline constexpr char kDefaultProjectFolder[] = "muster-run";

// 1 to kMaxJobName letters, digits, '-' and '_'.
inline bool IsJobName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxJobName &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_';
         });
}

}  // namespace muster

#endif  // MUSTER_PROTO_JOB_LIMITS_H_
