#ifndef MUSTER_WORKER_JOB_LOST_COLLECTIVE_H_
#define MUSTER_WORKER_JOB_LOST_COLLECTIVE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "worker/collective/progress_board.h"
#include "worker/job/coordinator_client.h"

namespace muster {

// The sources of information about the ranks of a group when one of its collectives is lost.
struct LostCollectiveSources {
  // Knows the position of every rank. Null if there is none.
  std::shared_ptr<CoordinatorClient> coordinator;
  // Without a coordinator: the store where waiting ranks leave a note. May be null.
  c10::intrusive_ptr<c10d::Store> store;
  // This rank's board.
  std::shared_ptr<ProgressBoard> board;
  int rank = 0;            // rank in the job
  std::vector<int> ranks;  // ranks of the group, as ranks of the job
  absl::Duration timeout;  // timeout of a collective
  // The time within which ranks that wait in the same collective may arrive here one after the
  // other.
  absl::Duration grace = absl::Seconds(10);
};

// Returns one line: which ranks did not take part in the collective on `mine`, where each of them
// is, and which ranks wait. `members`: the coordinator's facts, at most a heartbeat old. Ranks of
// `ranks` that wait in the same collective have taken part. Failed ranks of the job outside of the
// group are named, too: they may be why one of these has left. `timed_out`: this rank has waited
// for the whole timeout; otherwise a connection was lost.
std::string DescribeLostCollective(const ProgressBoard::Facts& mine,
                                   const LostCollectiveSources& sources,
                                   const std::vector<MemberInfo>& members, bool timed_out = true);

// Returns one line about the ranks that are gone, and why; empty if there are none.
std::string DescribeGone(const std::vector<MemberInfo>& members);

// Returns DescribeLostCollective() of the present state of `sources`, with the transport's first
// line at the end. Call it while the collective is still on the board. Blocks up to `grace` and the
// patience of a call. Never fails: at worst it says that the cause is unknown.
std::string ExplainLostCollective(const LostCollectiveSources& sources, absl::string_view error);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_LOST_COLLECTIVE_H_
