#ifndef MUSTER_BASE_DEFAULTS_H_
#define MUSTER_BASE_DEFAULTS_H_

#include "absl/time/time.h"

namespace muster {

// Defaults that several components must agree on.

// How long the coordinator may be unreachable before a job fails (`outage_tolerance`).
inline constexpr absl::Duration kDefaultOutageTolerance = absl::Seconds(90);

// How long a worker may show no sign of life before it counts as lost (`lease`), and the shortest
// such time that leaves room for two heartbeats.
inline constexpr absl::Duration kDefaultLease = absl::Seconds(6);
inline constexpr absl::Duration kShortestLease = absl::Seconds(4);

// The agents of a job meet in a separate rendezvous job, named after the job with this suffix.
inline constexpr char kAgentsSuffix[] = ".agents";

}  // namespace muster

#endif  // MUSTER_BASE_DEFAULTS_H_
