#ifndef MUSTER_COORDINATOR_BARRIER_H_
#define MUSTER_COORDINATOR_BARRIER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "coordinator/answer.h"
#include "proto/muster/v1/barrier.pb.h"
#include "proto/muster/v1/error.pb.h"

namespace muster::coordinator {

// Ranks that arrive together: one, or all arrived ranks of an agent.
struct Arrival {
  CallId call = 0;
  absl::string_view barrier_id;
  uint64_t counter = 0;
  absl::Span<const int32_t> ranks;
  absl::Span<const int32_t> lateness_us;          // how long ago each arrived; empty: just now
  absl::Duration timeout;                         // zero: the default; negative: never
  absl::Duration soft_timeout;                    // zero: the default
  absl::Duration waited;                          // see v1::ArriveRequest
  absl::Span<const int64_t> waited_less_us = {};  // see v1::ArriveManyRequest
  absl::Span<const int32_t> participants;         // empty: every rank
  std::vector<absl::string_view> payloads;        // empty, or one for each rank
  uint64_t call_site = 0;
  absl::string_view call_site_text;
  v1::BarrierState previous_state = v1::BARRIER_STATE_UNSPECIFIED;
};

// How much of a failed barrier's report an error carries; Describe gives all.
constexpr int kCulpritsInError = 64;
constexpr int kMissingInError = 4096;

// A BarrierSet's queries to its owner.
class BarrierHost {
 public:
  virtual ~BarrierHost() = default;
  virtual v1::ReplyHeader Header() const = 0;
  // The facts about the worker at `rank`.
  virtual v1::Culprit DescribeRank(int rank) const = 0;
  // Asks the agent of `rank` for its stack, which DescribeRank has once it comes.
  virtual void AskStack(int rank) = 0;
  // Sends one answer to many calls.
  virtual void Deliver(const std::vector<CallId>& calls, std::shared_ptr<const Answer> answer) = 0;
  // Puts the end of (barrier_id, counter) into the journal before any answer that is delivered from
  // now on is sent.
  virtual void JournalEnd(const std::string& barrier_id, uint64_t counter,
                          const Answer& answer) = 0;
  // Reports that a barrier of these ranks (empty: all) reached its soft deadline (state OPEN) or
  // failed.
  virtual void Report(const v1::BarrierReport& report, absl::Span<const int32_t> members) = 0;
  // Notes that these ranks kept others waiting until a deadline.
  virtual void Blame(absl::Span<const int32_t> ranks) = 0;
};

struct BarrierOptions {
  absl::Duration default_timeout = absl::Seconds(1800);
  absl::Duration default_soft_timeout = absl::Seconds(60);
  absl::Duration diag_budget = absl::Seconds(2);
  int diag_max_stacks = 16;
  size_t kept_results = 1000;
  size_t kept_bytes = 16 << 20;
  bool release_one_early = false;  // a deliberate fault, see Mutants
};

struct BarrierCounts {
  uint64_t passed = 0;
  uint64_t failed = 0;
  absl::Duration last_wait;  // of the latest barrier that passed
};

// All barriers of one generation of one job. Not thread-safe.
//
// An instance is (barrier_id, counter). The first arrival of a counter opens it and fixes deadline
// and participants:
//
//   OPEN -> PASSED     all participants have arrived
//        -> TIMED_OUT  the deadline came first: DEADLINE_EXCEEDED / BARRIER_TIMEOUT
//        -> FAILED     a participant that has not arrived is dead or gone:
//                      FAILED_PRECONDITION / RANK_FAILED
//        -> CANCELLED  CANCELLED / CANCELLED_BY_PEER
//        -> DESYNC     ranks disagree what they are doing: FAILED_PRECONDITION / DESYNC
//
// All callers get the same bytes. Afterwards the same counter gives the same result again; the
// latest `kept_results` are kept, older ones answer OUT_OF_RANGE / RESULT_FORGOTTEN. The next
// instance has counter + 1; any other counter fails with BARRIER_COUNTER, or ends an open instance
// as DESYNC.
//
// Desync: two arrivals at one instance differ in call_site or participants, a rank arrives at the
// instance after one that is still open, or (among arrivals with a call_site, which thereby belong
// to the one ordered sequence of their rank) rank a waits in one barrier and rank b in another
// while each is missing from the other's.
//
// The passing of a barrier without payloads is not journaled. After a restart (`counters_known`
// false) the set takes the counters its callers bring, and learns from previous_state and Recall
// what had passed. An instance gets the rest of its timeout according to the caller that has waited
// longest, so that the callers learn the missing ranks before they give up.
//
// The set knows the latest kMaxNames names, and all whose results are kept. An older name counts as
// never used: its counter is unknown, so it continues with the caller's.
class BarrierSet {
 public:
  static constexpr size_t kMaxId = 256;
  static constexpr size_t kMaxPayload = 4096;
  static constexpr size_t kMaxPayloads = 3 << 20;  // for one instance
  static constexpr int kMaxOpen = 4096;
  static constexpr size_t kMaxNames = 65536;

  BarrierSet(const BarrierOptions& options, uint64_t generation, int world_size,
             bool counters_known, BarrierHost* host);
  BarrierSet(const BarrierSet&) = delete;
  BarrierSet& operator=(const BarrierSet&) = delete;

  // Requires that the ranks are alive. Returns an error that concerns this call only; otherwise the
  // answer is delivered, now or later.
  std::optional<v1::OpError> Arrive(const Arrival& arrival, absl::Time now);
  // Cancels an instance. `by`: the caller that cancels, for the report. Errors: NOT_FOUND.
  std::optional<v1::OpError> Cancel(absl::string_view barrier_id, uint64_t counter,
                                    absl::string_view by, absl::string_view reason, absl::Time now);
  void Recall(absl::string_view barrier_id, uint64_t counter, v1::BarrierState state);
  // Until `until` after a restart, an instance that may have passed before does not fail because a
  // rank is gone, so that the ranks that saw it pass have time to report it.
  void HoldFailuresUntil(absl::Time until) { hold_until_ = until; }
  // Restores a finished instance, at replay.
  void RestoreEnd(absl::string_view barrier_id, uint64_t counter, v1::OpResult answer);

  // Notes that `rank` is dead or gone: instances that wait for it fail at once.
  void RankGone(int rank, absl::string_view what, absl::Time now);
  // Notes that another incarnation took the seat of `rank`: the old one's arrivals are undone.
  void RankReplaced(int rank, absl::Time now);
  // Ends all open instances with `error`, which is delivered, not journaled.
  void EndAll(const v1::OpError& error);

  void Tick(absl::Time now);
  absl::Time NextDeadline() const;

  // Errors: NOT_FOUND.
  std::optional<v1::OpError> Describe(absl::string_view barrier_id, uint64_t counter,
                                      absl::Time now, v1::BarrierReport* report) const;
  void List(bool only_open, absl::Time now, v1::ListBarriersReply* reply) const;
  void Stragglers(v1::StragglerReportReply* reply) const;
  // Continues with the lateness that `former` has counted. `former_ranks` has each rank's rank
  // there; -1: it had none.
  void InheritScores(const BarrierSet& former, absl::Span<const int> former_ranks);
  // Drops what passed barriers carried, which no rank can ask for once the generation has ended.
  // Reports stay.
  void DropPayloads();
  const BarrierCounts& counts() const { return counts_; }
  size_t open() const { return open_.size(); }
  // Calls f(id, counter, answer) for the kept results that are journaled, oldest first.
  template <typename F>
  void ForEachJournaled(F f) const {
    for (const Kept& kept : kept_) {
      if (kept.journaled) f(kept.id, kept.counter, *kept.answer);
    }
  }

 private:
  struct Instance {
    uint64_t sequence = 0;
    std::string id;
    uint64_t counter = 0;
    bool anchored = true;  // surely not passed in an earlier term
    absl::Time opened;
    absl::Time deadline;
    absl::Duration timeout;
    absl::Time soft_at;
    absl::Time soft_diag_at;  // when to ask for the stacks of the report at soft_at
    absl::Time diag_at;
    absl::Time gone_at =
        absl::InfiniteFuture();    // when to look for ranks that are gone, if that was put off
    absl::Time next_at;            // the earliest of those still to come
    std::vector<int32_t> members;  // sorted; empty: every rank
    int expected = 0;
    int arrived = 0;
    std::vector<int64_t> at_us;  // by position: arrival relative to `opened`; kAbsent: not yet
    std::vector<std::string> payloads;
    bool has_payloads = false;
    uint64_t call_site = 0;
    std::string call_site_text;
    int opened_by = -1;
    std::vector<CallId> calls;
  };
  struct Kept {
    std::string id;
    uint64_t counter = 0;
    std::shared_ptr<const Answer> answer;
    v1::BarrierReport report;
    size_t bytes = 0;
    bool journaled = false;
  };
  struct Name {
    // The counter after the last finished one; nullopt: none finished.
    std::optional<uint64_t> next;
    Instance* open = nullptr;
    bool anchored = false;  // an instance passed in this term by the arrival of all
    bool idle = false;      // is in idle_names_
  };
  struct RankScore {
    uint64_t barriers = 0;
    uint64_t times_last = 0;
    int64_t sum_us = 0;
    int64_t max_us = 0;
  };
  static constexpr int64_t kAbsent = INT64_MIN;

  int Position(const Instance& instance, int rank) const;  // -1: not a participant
  int RankAt(const Instance& instance, int position) const;
  std::optional<v1::OpError> CheckArrival(const Arrival& arrival) const;
  // Answers an arrival at an instance that has ended.
  std::optional<v1::OpError> AnswerEnded(const Arrival& arrival);
  // The open instance that an arrival is for; null: it has ended, and the call was answered.
  std::optional<v1::OpError> FindOrOpen(const Arrival& arrival, absl::Time now, Instance** found);
  void Count(const Arrival& arrival, absl::Time now, Instance* instance);
  Instance* Open(const Arrival& arrival, absl::Time now);
  // In a set that began with a restart: moves the deadline of `instance` forward to what is left of
  // the timeout after `waited`.
  void CountWaited(Instance* instance, absl::Duration waited, absl::Time now);
  // Whether `id` is known or there is room for it, after forgetting the name that was used least
  // recently.
  bool HasRoomFor(absl::string_view id);
  // Forgets a name without an instance after a refusal, so that it takes no room.
  void ForgetUnused(absl::string_view id);
  std::optional<v1::OpError> CheckSame(const Instance& instance, const Arrival& arrival);
  // Ends `instance` and another one as DESYNC if each waits for a rank that waits in the other.
  void CheckOrder(Instance* instance, const Arrival& arrival, absl::Time now);
  // Fills the fields that a report has in every state.
  v1::BarrierReport MakeReport(const Instance& instance, v1::BarrierState state,
                               absl::Time end) const;
  void AddMissing(const Instance& instance, v1::BarrierReport* report) const;
  void Pass(Instance* instance, absl::Time now);
  void Fail(Instance* instance, v1::BarrierReport report, absl::StatusCode code,
            v1::ErrorReason reason);
  void FailGone(Instance* instance, int rank, absl::string_view what, absl::Time now);
  // Fails `instance` if a rank it waits for is gone; true: it no longer exists.
  bool FailIfGone(Instance* instance, absl::Time now);
  void FailDesync(Instance* instance, const std::string& message, absl::Time now, int odd_rank,
                  const std::string& odd_place);
  void Finish(Instance* instance, std::shared_ptr<const Answer> answer, v1::BarrierReport report,
              bool journal);
  void Keep(std::string id, uint64_t counter, std::shared_ptr<const Answer> answer,
            v1::BarrierReport report, bool journaled);
  void RecallPassed(const std::string& id, uint64_t counter);
  void AskStacks(const Instance& instance);
  void Schedule(Instance* instance);
  void AddScores(const Instance& instance, int last_rank, int64_t first_us);
  std::string Place(const Instance& instance) const;

  const BarrierOptions options_;
  const uint64_t generation_;
  const int world_size_;
  const bool counters_known_;
  BarrierHost* const host_;

  uint64_t next_sequence_ = 1;
  absl::Time hold_until_ = absl::InfinitePast();
  absl::btree_map<uint64_t, std::unique_ptr<Instance>> open_;  // by sequence
  int open_checked_ = 0;                                       // how many of them have a call_site
  absl::flat_hash_map<std::string, Name> names_;
  std::deque<Kept> kept_;
  uint64_t kept_base_ = 0;  // the number of kept_.front() among all ever kept
  size_t kept_bytes_ = 0;
  std::deque<std::string> idle_names_;  // names whose latest result was dropped; may be in use
                                        // again
  bool forgot_names_ = false;
  absl::flat_hash_map<std::pair<std::string, uint64_t>, uint64_t> kept_at_;
  absl::btree_map<std::pair<absl::Time, uint64_t>, Instance*> timers_;
  // Two windows of half the kept history each, so that scores follow what is recent at O(ranks)
  // memory.
  std::vector<RankScore> scores_[2];
  size_t scored_ = 0;
  absl::btree_map<int, std::string> gone_;  // ranks that will not come, and what became of them
  BarrierCounts counts_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_BARRIER_H_
