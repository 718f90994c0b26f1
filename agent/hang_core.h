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

// No rank of a job shows progress any more.
struct Hang {
  std::string why;  // one line: for how long, which ranks, and what they were doing
  int rank = -1;    // the only one for which others wait; -1: none, or several
};

struct HangReport {
  Hang hang;
  std::vector<v1::HungRanks> ranks;  // all of the job, as they were before any was ended
};

// Judges from what the coordinator knows of a job's ranks whether the job hangs: whether for
// `timeout` no rank has finished a step, begun or ended a collective or a bucket of one, or begun a
// phase of the program. Workers count these, so what is as before at two looks because it has come
// back in between is progress. Not thread-safe; pure.
//
// Time does not count:
// - before some rank has finished a step in its process: compilation and the first batch take long;
// - while a rank saves or loads a state: what waits there has deadlines of its own;
// - while a rank is not heard: that is for its lease to judge;
// - from the loss of a rank until another process has its place, for at most half an hour: the
//   others can only wait;
// - while the coordinator does not answer, or this process was not running.
// Programs without Muster's library have no ranks here, so they never hang.
class HangCore {
 public:
  // How often to look at most.
  static absl::Duration Period(absl::Duration timeout);

  explicit HangCore(absl::Duration timeout) : timeout_(timeout) {}

  // What is known at `now`. Tells of a hang once in a generation.
  std::optional<Hang> Look(const v1::GetMembersReply& members, absl::Time now);
  // Whether nothing has changed since Look told of a hang; if something has, it may tell again.
  bool StillHangs(const v1::GetMembersReply& members);
  // The coordinator did not say.
  void LookInVain() {
    since_ = looked_ = absl::InfinitePast();
    told_ = false;
  }

 private:
  const absl::Duration timeout_;
  uint64_t generation_ = 0;
  bool told_ = false;
  std::string shown_;                        // by all ranks
  absl::Time since_ = absl::InfinitePast();  // it was last changed, or time did not count
  absl::Time looked_ = absl::InfinitePast();
  absl::Time lacks_since_ = absl::InfiniteFuture();  // a rank
};

// "step 12, backward, AllReduce #41 (1,024 Float)"
std::string DescribeProgress(int64_t step, const std::string& phase, const std::string& collective);

// The same for a report: ranks with equal stacks and progress together, in the order of the first
// of each; at most `max_bytes`: later groups come without a stack, then not at all.
std::vector<v1::HungRanks> GroupHungRanks(const std::vector<v1::RankStack>& stacks,
                                          const v1::GetMembersReply& members, size_t max_bytes);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_HANG_CORE_H_
