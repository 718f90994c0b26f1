#ifndef MUSTER_COORDINATOR_TRIGGER_H_
#define MUSTER_COORDINATOR_TRIGGER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/journal.pb.h"
#include "proto/muster/v1/trigger.pb.h"

namespace muster::coordinator {

// The triggers of one job: flags that take effect on the same step on every rank, without a
// collective per check. Not thread-safe.
//
// The rule: a poll returns every trigger, decided or not. A rank that polls with an undecided
// trigger in `pending` promises not to begin step `horizon` before it knows the decision. The
// effective step is decided once, as soon as every living rank has promised for this trigger: the
// largest horizon + min_lead_steps (NEXT_STEP), or the step asked for (AT_STEP; later if a horizon
// is beyond it). So no rank can have begun it without the decision, and a rank that has seen no
// trigger has promised nothing: it keeps training while the coordinator is away. NOW needs no
// decision: each rank acts when it sees it. Promises are not journaled: after a restart every rank
// promises again.
//
// Every poll returns a trigger until the rank acknowledges it. Acknowledgements are journaled, so
// that no rank acts on it again after a restart. Ranks must still remember the trigger_ids they
// have acted on: a restarted coordinator returns again the triggers whose acknowledgements it had
// not written.
class TriggerSet {
 public:
  static constexpr size_t kMaxName = 128;
  static constexpr size_t kMaxPayload = 64 << 10;
  static constexpr size_t kMaxLive = 256;
  // The limit for all live triggers together: every poll returns all of them in one message.
  static constexpr size_t kMaxPayloads = 512 << 10;
  // How far ahead a horizon or lead may be: keeps arithmetic on steps from overflowing.
  static constexpr int64_t kMaxStep = int64_t{1} << 60;

  // `decides_early`: a deliberate fault, see Mutants.
  explicit TriggerSet(bool decides_early = false) : decides_early_(decides_early) {}

  // Starts a generation of `world_size` ranks: no rank has promised anything. Triggers raised by
  // ranks of the previous one are dropped (a restore may undo their steps); those of operators are
  // decided again.
  void StartGeneration(int world_size, std::vector<v1::TriggerChanged>* changes);
  // The same at replay: what happens to the triggers themselves is replayed by Restore.
  void RestoreGeneration(int world_size);
  // Forgets promises only: the same generation under a new coordinator.
  void Resume();
  // All ranks have left on purpose: no rank will act on the remaining triggers, and they do not
  // apply to another run of the job.
  void DropAll(std::vector<v1::TriggerChanged>* changes);

  // `rank` is -1 for an operator. If a rank raises a trigger for the next step that another rank
  // has raised with the same text and that is not decided yet, both are one trigger: when a job is
  // stopped, every rank raises "stop". Errors: BAD_FIELD, LIMIT; FAILED_PRECONDITION if a rank may
  // have passed `step`.
  std::optional<v1::OpError> Raise(const v1::RaiseTriggerRequest& request, int rank,
                                   uint64_t trigger_id, v1::RaiseTriggerReply* reply,
                                   std::vector<v1::TriggerChanged>* changes);
  // `acked` gets the triggers that are not removed and that `rank` acknowledges for the first time.
  // Errors: BAD_FIELD.
  std::optional<v1::OpError> Poll(const v1::PollTriggersRequest& request, int rank,
                                  v1::PollTriggersReply* reply,
                                  std::vector<v1::TriggerChanged>* changes,
                                  std::vector<uint64_t>* acked);
  // Notes that `rank` will not poll again: its promise and acknowledgement are no longer awaited.
  void RankGone(int rank, std::vector<v1::TriggerChanged>* changes);
  // Notes that another incarnation took the seat.
  void RankReplaced(int rank);

  void Restore(const v1::TriggerChanged& change);
  void RestoreAck(uint64_t trigger_id, int rank);
  // Forgets all without notifying any rank.
  void Clear() { triggers_.clear(); }
  // Calls f(record, acknowledged), the latter by rank.
  template <typename F>
  void ForEach(F f) const {
    for (const auto& [id, trigger] : triggers_) f(trigger.record, trigger.acked);
  }
  size_t size() const { return triggers_.size(); }

 private:
  struct Trigger {
    v1::TriggerRecord record;
    std::vector<bool> acked, promised;  // by rank
    int unacked = 0;                    // living ranks that have not acknowledged it
    int unpromised = 0;                 // living ranks that have not promised
    int64_t max_horizon = 0;            // the largest of the promises

    bool decided() const {
      return record.effective_step() >= 0 || record.align() == v1::TRIGGER_ALIGN_NOW;
    }
  };
  // Decides what can be decided.
  void Decide(std::vector<v1::TriggerChanged>* changes);
  void ResetRanks(Trigger* trigger);
  void RemoveDone(std::vector<v1::TriggerChanged>* changes);

  const bool decides_early_;
  int world_size_ = 0;
  std::vector<bool> gone_;  // by rank
  int64_t max_step_ = 0;    // the last one that some rank of this generation has finished
  absl::btree_map<uint64_t, Trigger> triggers_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_TRIGGER_H_
