#ifndef MUSTER_COORDINATOR_SILENCE_H_
#define MUSTER_COORDINATOR_SILENCE_H_

#include <optional>
#include <string>

#include "absl/time/time.h"

namespace muster::coordinator {

// What is known when the lease of a worker has run out.
struct Silence {
  absl::Duration lease = absl::Seconds(6);
  absl::Duration outage_tolerance = absl::Seconds(90);
  // For how long nothing was heard: of the worker; of anybody of its generation; and for how long
  // the agent that speaks for it has sent no beat (nothing: it has sent none yet, or is not
  // attached).
  absl::Duration worker;
  absl::Duration generation;
  std::optional<absl::Duration> agent;
  // Somebody waits for the generation to end, and is heard: throughout the silence, or for
  // kTimeToReturn. After a cut, somebody who waits may well be the first that is back.
  bool awaited = false;
  // Of the agents of all jobs: how many speak, and how many have stopped when the worker did,
  // within about a lease.
  int agents_heard = 0;
  int agents_silent = 0;
};

// Whether the worker keeps its seat for now, and why, in words that follow "because".
struct SilenceVerdict {
  bool keep = false;
  std::string why;
};

// Tells a machine that is dead from a network that is cut. One worker that is silent while the
// others speak is dead. Where nobody speaks any more it is more likely that the coordinator is the
// one that is cut off, and to end the generation would help nobody: the workers go on without it
// for `outage_tolerance`, and so long it waits for them. Likewise if most agents (at least
// kAgentsOfACut) fall silent at once: machines do not die like that.
//
// "At once" is half a lease: those who are cut off together were last heard of within a beat of one
// another, and there are three beats in a lease. O(1).
SilenceVerdict JudgeSilence(const Silence& silence);

inline constexpr int kAgentsOfACut = 3;
// After a cut, how much later than the first the others may be back: an attempt to connect that
// began before its end takes up to 10 s, and the wait for the next one up to 5 s.
inline constexpr absl::Duration kTimeToReturn = absl::Seconds(15);
// An agent that sent nothing for so long was away: it beats every 2 s, a hub every second.
inline constexpr absl::Duration kMissedBeats = absl::Seconds(4);
inline bool IsCut(const Silence& silence) {
  return silence.agents_silent >= kAgentsOfACut && silence.agents_silent > silence.agents_heard;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SILENCE_H_
