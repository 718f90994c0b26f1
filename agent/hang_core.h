#ifndef MUSTER_AGENT_HANG_CORE_H_
#define MUSTER_AGENT_HANG_CORE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::agent {

// A finding that no rank of a job shows progress any longer.
struct Hang {
  std::string why;  // one line: for how long, which ranks, and what they were doing
  int rank = -1;    // the only rank for which others wait; -1: none, or several
};

struct HangReport {
  Hang hang;
  std::vector<v1::HungRanks> ranks;  // all ranks of the job, as they were before any was ended
};

// Judges from what the coordinator knows about a job's ranks whether the job hangs: whether for
// `timeout` no rank has finished a step, begun or ended a collective or a bucket of one, or begun a
// phase of the program. Workers count such events, so progress that leads back to the same state
// between two looks is noticed. Not thread-safe; pure.
//
// Time does not count:
// - before some rank has finished a step in its process: compilation and the first batch take long;
// - while a rank saves or loads a state: operations that wait there have their own deadlines;
// - while a rank shows no sign of life: its lease decides about that;
// - from the loss of a rank until another process has taken its place, for at most half an hour:
//   the others can only wait;
// - while the coordinator does not answer, or this process was not running.
// Programs without Muster's library have no ranks here, so they never hang.
class HangCore {
 public:
  // The longest time between two looks.
  static absl::Duration Period(absl::Duration timeout);

  explicit HangCore(absl::Duration timeout) : timeout_(timeout) {}

  // Takes what is known at `now`. Reports a hang once per generation.
  std::optional<Hang> Look(const v1::GetMembersReply& members, absl::Time now);
  // Returns whether nothing has changed since Look reported a hang; otherwise Look may report one
  // again.
  bool StillHangs(const v1::GetMembersReply& members);
  // The coordinator gave no answer.
  void LookInVain() {
    since_ = looked_ = absl::InfinitePast();
    reported_ = false;
  }

 private:
  const absl::Duration timeout_;
  uint64_t generation_ = 0;
  bool reported_ = false;
  std::string shown_;                        // what all ranks showed last
  absl::Time since_ = absl::InfinitePast();  // when that changed last, or time did not count
  absl::Time looked_ = absl::InfinitePast();
  absl::Time lacks_since_ = absl::InfiniteFuture();  // since when a rank is missing
};

// "step 12, backward, AllReduce #41 (1,024 Float)"
std::string DescribeProgress(int64_t step, const std::string& phase, const std::string& collective);

// Groups the ranks for a report: ranks with equal stacks and progress together, in the order of the
// first rank of each group; at most `max_bytes`: later groups lose their stacks, then are left out.
std::vector<v1::HungRanks> GroupHungRanks(const std::vector<v1::RankStack>& stacks,
                                          const v1::GetMembersReply& members, size_t max_bytes);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_HANG_CORE_H_
