#ifndef MUSTER_BASE_DEFAULTS_H_
#define MUSTER_BASE_DEFAULTS_H_

#include "absl/time/time.h"

namespace muster {

// Defaults on which several components must agree.

// How long the coordinator may be away before a job fails (`outage_tolerance`).
inline constexpr absl::Duration kDefaultOutageTolerance = absl::Seconds(90);

// After what time without a sign of life a worker counts as lost (`lease`), and the shortest that
// leaves time for two beats.
inline constexpr absl::Duration kDefaultLease = absl::Seconds(6);
inline constexpr absl::Duration kShortestLease = absl::Seconds(4);

// The agents of a job meet in a rendezvous job of their own: the job's name and this.
inline constexpr char kAgentsSuffix[] = ".agents";

}  // namespace muster

#endif  // MUSTER_BASE_DEFAULTS_H_
