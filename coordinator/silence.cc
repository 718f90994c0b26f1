#include "coordinator/silence.h"

#include "absl/strings/str_cat.h"

namespace muster::coordinator {

SilenceVerdict JudgeSilence(const Silence& silence) {
  const absl::Duration recent = silence.lease / 2;
  if (silence.agent.has_value() && *silence.agent < recent)
    return {false, "its agent sends beats that do not list it"};
  if (silence.worker >= silence.lease + silence.outage_tolerance) {
    return {false,
            absl::StrCat("the outage_tolerance of ", absl::FormatDuration(silence.outage_tolerance),
                         " has also passed")};
  }
  if (silence.generation >= recent) {
    if (silence.awaited) return {false, "others wait for its generation to end"};
    return {true, "all workers of its generation are silent: the network may be partitioned"};
  }
  if (IsCut(silence)) {
    return {true, absl::StrCat(silence.agents_silent, " of ",
                               silence.agents_silent + silence.agents_heard,
                               " agents fell silent at once: the network may be partitioned")};
  }
  return {false, "other workers of its generation are not silent"};
}

}  // namespace muster::coordinator
