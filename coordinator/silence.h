#ifndef MUSTER_COORDINATOR_SILENCE_H_
#define MUSTER_COORDINATOR_SILENCE_H_

#include <optional>
#include <string>

#include "absl/time/time.h"
#include "base/defaults.h"

namespace muster::coordinator {

// The facts at the expiry of a worker's lease.
struct Silence {
  absl::Duration lease = kDefaultLease;
  absl::Duration outage_tolerance = kDefaultOutageTolerance;
  // The length of the silence: of the worker; of all workers of its generation; and of the agent
  // that speaks for it (nullopt: it has sent no beat yet, or is not attached).
  absl::Duration worker;
  absl::Duration generation;
  std::optional<absl::Duration> agent;
  // Another worker waits for the generation to end, and has sent messages throughout the silence,
  // or for kTimeToReturn: after a partition, such a worker may well be the first that is back.
  bool awaited = false;
  // Among the agents of all jobs: how many send beats, and how many fell silent when the worker
  // did, within about a lease.
  int agents_heard = 0;
  int agents_silent = 0;
};

// Whether the worker keeps its seat for now, and why, in words that follow "because".
struct SilenceVerdict {
  bool keep = false;
  std::string why;
};

// Distinguishes a dead machine from a partitioned network. A worker that is silent while the others
// are not is dead. If all are silent, it is more likely that the coordinator itself is
// disconnected, and ending the generation would help no worker: they continue without the
// coordinator for `outage_tolerance`, and it waits for them as long. The same holds if most agents
// (at least kAgentsOfACut) fall silent at once: machines do not die together.
//
// "At once" is half a lease: agents that are disconnected together sent their last messages within
// a beat of one another, and a lease has three beats. O(1).
SilenceVerdict JudgeSilence(const Silence& silence);

inline constexpr int kAgentsOfACut = 3;
// After a partition, how much later than the first agent the others may be back: an attempt to
// connect that began before its end takes up to 10 s, and the wait for the next one up to 5 s.
inline constexpr absl::Duration kTimeToReturn = absl::Seconds(15);
// An agent that was silent for this long was away: it beats every 2 s, a hub every second.
inline constexpr absl::Duration kMissedBeats = absl::Seconds(4);
inline bool IsCut(const Silence& silence) {
  return silence.agents_silent >= kAgentsOfACut && silence.agents_silent > silence.agents_heard;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SILENCE_H_
