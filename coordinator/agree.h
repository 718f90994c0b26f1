#ifndef MUSTER_COORDINATOR_AGREE_H_
#define MUSTER_COORDINATOR_AGREE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/time/time.h"
#include "coordinator/answer.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::coordinator {

// AgreeAlive of one generation: a barrier over the living part of a set of ranks. It ends when
// every rank of the set is either inside or dead; at that moment all get the same list of those
// inside. A repeat of a finished counter gets the same answer again (the last 64 are kept). Not
// thread-safe.
class AgreeSet {
 public:
  // The state of a rank: its incarnation if it lives.
  using Alive = std::function<std::optional<uint64_t>(int rank)>;
  using Describe = std::function<std::string(int rank)>;
  // `journal`: the answer must be durable before it is sent, as the end of `counter`.
  struct Done {
    bool journal = false;
    uint64_t counter = 0;
    std::vector<CallId> calls;
    std::shared_ptr<const Answer> answer;
  };

  AgreeSet(int world_size, bool counters_known, Alive alive, Describe describe);

  // An error here concerns this call only. Errors: BAD_FIELD; BARRIER_COUNTER; RESULT_FORGOTTEN;
  // LIMIT if 1,024 are open; DESYNC if the set differs from that of the others.
  std::optional<v1::OpError> Enter(CallId call, const v1::AgreeAliveRequest& request, int rank,
                                   absl::Time now, const v1::ReplyHeader& header,
                                   std::vector<Done>* done);
  // Notes that a living rank died or left; called once for each death. `alive` already says so.
  void RankGone(int rank, const v1::ReplyHeader& header, std::vector<Done>* done);
  // Notes that a rank that was gone lives again, as another incarnation.
  void RankReplaced(int rank);
  void EndAll(const v1::OpError& error, std::vector<Done>* done);
  // After a restart, callers that come again have until `until`, or for their timeout if that is
  // less, however long they have waited. Ranks that have died meanwhile are known to be dead by
  // then.
  void HoldFailuresUntil(absl::Time until) { hold_until_ = until; }
  // Restores a finished agreement, at replay.
  void Restore(uint64_t counter, v1::OpResult answer);
  // Calls f(counter, answer) for each answer that is kept.
  template <typename F>
  void ForEachKept(F f) const {
    for (const auto& [counter, answer] : kept_) f(counter, *answer);
  }
  // Fails the calls whose deadline has passed with BARRIER_TIMEOUT, which names the living ranks
  // that did not come.
  void Tick(absl::Time now, std::vector<Done>* done);
  absl::Time NextDeadline() const;

 private:
  struct Instance {
    std::vector<int32_t> set;  // sorted
    absl::btree_set<int32_t> inside;
    int outside = 0;  // living ranks of the set that are not inside
    absl::Time deadline;
    absl::Duration timeout;
    std::vector<CallId> calls;
  };
  void TryFinish(uint64_t counter, const v1::ReplyHeader& header, std::vector<Done>* done);
  void Keep(uint64_t counter, std::shared_ptr<const Answer> answer);

  const int world_size_;
  const bool counters_known_;  // false after a restart: any counter that has not ended will do
  const Alive alive_;
  const Describe describe_;
  absl::Time hold_until_ = absl::InfinitePast();
  uint64_t next_ = 0;
  absl::btree_map<uint64_t, Instance> open_;
  std::deque<std::pair<uint64_t, std::shared_ptr<const Answer>>> kept_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_AGREE_H_
