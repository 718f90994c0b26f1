#ifndef MUSTER_COORDINATOR_MEMBERSHIP_H_
#define MUSTER_COORDINATOR_MEMBERSHIP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/muster/v1/journal.pb.h"
#include "proto/muster/v1/membership.pb.h"
#include "proto/muster/v1/rendezvous.pb.h"

namespace muster::coordinator {

// One worker's place in the current generation. What must survive a crash is in `record`, which
// Membership alone changes; the rest is what the worker, or its agent, reports.
class Seat {
 public:
  explicit Seat(v1::SeatRecord record) : record_(std::move(record)) {}

  const v1::SeatRecord& record() const { return record_; }
  int rank() const { return record_.rank(); }
  bool alive() const { return record_.state() == v1::WORKER_STATE_RUNNING; }
  // Agents::NumberOf record().node(), once it was looked up; before that, 0.
  uint64_t via() const { return via_; }

  int64_t step() const { return step_; }
  const std::string& phase() const { return phase_; }
  const std::string& last_collective() const { return last_collective_; }
  uint64_t progress() const { return progress_; }  // 0: not counted
  // The checkpoint that the worker writes; null: none.
  const v1::SaveProgress* save() const { return save_.get(); }
  const std::string& process_state() const { return process_state_; }
  const std::string& stack() const { return stack_; }

  void AtStep(int64_t step) { step_ = std::max(step_, step); }
  // Long texts are cut.
  void SetPhase(absl::string_view phase);
  void SetLastCollective(absl::string_view collective);
  void SetProgress(uint64_t progress) { progress_ = progress; }
  void SetSave(const v1::SaveProgress* save);
  void SetProcessState(absl::string_view state);
  void SetStack(absl::string_view stack);
  // Notes that a message named the seat's worker, through the agent of `node` with number `agent`:
  // a hub's messages name hundreds of workers, whose names need not be compared each time.
  void HeardThrough(absl::string_view node, uint64_t agent);

 private:
  friend class Membership;

  v1::SeatRecord record_;
  uint64_t via_ = 0;
  int64_t step_ = 0;
  uint64_t progress_ = 0;
  std::shared_ptr<const v1::SaveProgress> save_;  // few have one
  std::string phase_;
  std::string last_collective_;
  std::string process_state_;
  std::string stack_;
};

void FillRow(const v1::SeatRecord& seat, v1::RankRow* row);

// Returns the record of the worker that asks for a seat; it lacks rank and node_rank.
v1::SeatRecord MakeSeatRecord(const v1::JoinRequest& request, absl::string_view node);

// The generations of a job, the seats of the last one, and whether it continues. Time is the
// business of leases.h. Not thread-safe.
class Membership {
 public:
  // Called once, before anything else, with the generation to count from.
  void Begin(uint64_t generation) { generation_ = generation; }

  uint64_t generation() const { return generation_; }  // the last sealed
  bool sealed() const { return sealed_; }              // and not ended
  bool closed() const { return closed_; }              // no other generation follows
  // Why the last generation has ended, if it has, and who caused that.
  const std::string& why_ended() const { return why_ended_; }
  const std::vector<v1::Culprit>& end_culprits() const { return end_culprits_; }
  // When the generation ended, in this term; infinite: it has not.
  absl::Time ended_at() const { return ended_at_; }
  uint64_t digest() const { return digest_; }  // the rank table's
  int num_nodes() const { return num_nodes_; }
  int size() const { return static_cast<int>(seats_.size()); }
  int alive() const { return alive_; }
  const std::vector<Seat>& seats() const { return seats_; }  // by rank
  // Valid until the next generation.
  Seat* mutable_at(int rank) { return &seats_[rank]; }
  const Seat& at(int rank) const { return seats_[rank]; }
  // Returns null if the worker has no seat.
  Seat* Find(absl::string_view worker_id) {
    const auto it = rank_of_.find(worker_id);
    return it == rank_of_.end() ? nullptr : &seats_[it->second];
  }
  const Seat* Find(absl::string_view worker_id) const {
    return const_cast<Membership*>(this)->Find(worker_id);
  }
  bool Holds(absl::string_view worker_id, uint64_t incarnation) const {
    const Seat* const seat = Find(worker_id);
    return seat != nullptr && seat->record().incarnation() == incarnation;
  }
  bool HasNode(absl::string_view node) const;
  // Returns how many workers the last generation had that did not leave it on purpose.
  int FormerWorld() const;

  // Seals the next generation: the record at index `rank` gets that seat. Returns the seats of the
  // last generation.
  std::vector<Seat> Seal(std::vector<v1::SeatRecord> records);
  // Gives a seat of this generation a new worker, or a new start of its worker.
  void Replace(int rank, v1::SeatRecord record);
  // Notes that the worker of a seat is gone.
  void Gone(int rank, v1::WorkerState state, const v1::ExitCause& cause);
  // Frees the seat that a newer start of its worker is about to take.
  void Vacate(int rank);
  void End(const std::string& why, std::vector<v1::Culprit> culprits, absl::Time now);
  void Close(const std::string& why);

  // Apply what a record of the journal says. Errors: DATA_LOSS.
  absl::Status Restore(const v1::GenerationSealed& sealed, std::vector<Seat>* former);
  void Restore(const v1::GenerationClosed& ended);
  absl::Status Restore(const v1::SeatTaken& taken);
  // Has no effect for a worker that no longer holds a seat.
  void Restore(const v1::WorkerEnded& ended);
  // Called after replay. If the workers of a job gather for the first time, no generation has
  // ended.
  void StartTerm(absl::Time now) {
    if (!sealed_ && restored_one_) ended_at_ = now;
  }
  // Notes that the history since a copy of it was taken is lost: it is not known who holds which
  // seat, and up to `skipped` generations may have been sealed.
  void BecomeRestored(uint64_t skipped);

  // Fill the same records, for a snapshot.
  void Fill(v1::GenerationSealed* sealed) const;
  void Fill(v1::GenerationClosed* ended) const;

 private:
  void Index();
  void SetState(Seat* seat, v1::WorkerState state);

  uint64_t generation_ = 0;
  bool sealed_ = false;
  bool closed_ = false;
  std::string why_ended_;
  absl::Time ended_at_ = absl::InfiniteFuture();
  bool restored_one_ = false;  // whether a generation was restored
  std::vector<v1::Culprit> end_culprits_;
  std::vector<Seat> seats_;
  absl::flat_hash_map<std::string, int> rank_of_;
  int alive_ = 0;
  uint64_t digest_ = 0;
  int num_nodes_ = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_MEMBERSHIP_H_
