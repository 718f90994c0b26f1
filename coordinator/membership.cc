#include "coordinator/membership.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr size_t kMaxText = 256;
constexpr size_t kMaxSavePath = 4096;
constexpr uint64_t kMaxSaveBytes = uint64_t{1} << 60;
constexpr size_t kMaxProcessState = 64;
constexpr size_t kMaxStack = 16 << 10;

void SetText(absl::string_view text, size_t max, std::string* field) {
  if (*field != text) *field = Cut(text, max);
}

uint64_t FingerprintRow(const v1::SeatRecord& seat) {
  v1::RankRow row;
  FillRow(seat, &row);
  const std::string bytes = row.SerializeAsString();
  return XXH3_64bits(bytes.data(), bytes.size());
}

// The digest 0 means that a caller has no table.
uint64_t NotZero(uint64_t digest) { return digest == 0 ? 1 : digest; }

absl::Status BadRank(absl::string_view job_id, int rank) {
  return absl::DataLossError(absl::StrCat("the journal seats a worker of job ", Quoted(job_id),
                                          " at rank ", rank, ", which its table does not have"));
}

}  // namespace

void Seat::SetPhase(absl::string_view phase) { SetText(phase, kMaxText, &phase_); }
void Seat::SetLastCollective(absl::string_view collective) {
  SetText(collective, kMaxText, &last_collective_);
}
void Seat::SetSave(const v1::SaveProgress* save) {
  if (save == nullptr) return save_.reset();
  auto known = std::make_shared<v1::SaveProgress>(*save);
  known->DiscardUnknownFields();
  known->set_path(Cut(save->path(), kMaxSavePath));
  known->set_written_bytes(std::min(save->written_bytes(), kMaxSaveBytes));
  known->set_bytes(std::min(save->bytes(), kMaxSaveBytes));
  save_ = std::move(known);
}
void Seat::SetProcessState(absl::string_view state) {
  SetText(state, kMaxProcessState, &process_state_);
}
void Seat::SetStack(absl::string_view stack) { stack_ = Cut(stack, kMaxStack); }

void Seat::HeardThrough(absl::string_view node, uint64_t agent) {
  if (agent != 0 && via_ == agent) return;
  if (record_.node() != node) record_.set_node(std::string(node));
  via_ = agent;
}

void FillRow(const v1::SeatRecord& seat, v1::RankRow* row) {
  row->set_rank(seat.rank());
  row->set_worker_id(seat.worker_id());
  row->set_incarnation(seat.incarnation());
  row->set_host(seat.topology().host());
  row->set_endpoint(seat.endpoint());
  row->set_local_rank(seat.topology().local_rank());
  row->set_node_rank(seat.node_rank());
  row->set_pid(seat.pid());
}

v1::SeatRecord MakeSeatRecord(const v1::JoinRequest& request, absl::string_view node) {
  v1::SeatRecord record;
  record.set_worker_id(request.fence().worker_id());
  record.set_incarnation(request.fence().incarnation());
  *record.mutable_topology() = request.topology();
  record.set_endpoint(request.endpoint());
  record.set_pid(request.pid());
  record.set_node(std::string(node));
  record.set_state(v1::WORKER_STATE_RUNNING);
  return record;
}

bool Membership::HasNode(absl::string_view node) const {
  return !node.empty() && std::any_of(seats_.begin(), seats_.end(), [node](const Seat& seat) {
    return seat.record().node() == node;
  });
}

int Membership::FormerWorld() const {
  return static_cast<int>(std::count_if(seats_.begin(), seats_.end(), [](const Seat& seat) {
    const v1::ExitCause& exit = seat.record().exit();
    return seat.record().state() != v1::WORKER_STATE_LEFT &&
           (seat.record().state() != v1::WORKER_STATE_EXITED || exit.exit_code() != 0 ||
            exit.signal() != 0);
  }));
}

std::vector<Seat> Membership::Seal(std::vector<v1::SeatRecord> records) {
  std::vector<Seat> former = std::exchange(seats_, {});
  seats_.reserve(records.size());
  absl::flat_hash_map<std::string, int> nodes;
  for (v1::SeatRecord& record : records) {
    const auto [node, is_new] =
        nodes.try_emplace(record.topology().host(), static_cast<int>(nodes.size()));
    record.set_rank(size());
    record.set_node_rank(node->second);
    seats_.emplace_back(std::move(record));
  }
  num_nodes_ = static_cast<int>(nodes.size());
  ++generation_;
  sealed_ = true;
  why_ended_.clear();
  end_culprits_.clear();
  // The digest is a sum, so that a seat's new worker costs its row and not the table. Rows have
  // their ranks.
  digest_ = 0;
  for (const Seat& seat : seats_) digest_ += FingerprintRow(seat.record());
  digest_ = NotZero(digest_);
  Index();
  return former;
}

void Membership::Index() {
  rank_of_.clear();
  alive_ = 0;
  for (const Seat& seat : seats_) {
    rank_of_[seat.record().worker_id()] = seat.rank();
    alive_ += seat.alive() ? 1 : 0;
  }
}

void Membership::SetState(Seat* seat, v1::WorkerState state) {
  alive_ -= seat->alive() ? 1 : 0;
  seat->record_.set_state(state);
  alive_ += seat->alive() ? 1 : 0;
}

void Membership::Replace(int rank, v1::SeatRecord record) {
  Seat& seat = seats_[rank];
  record.set_rank(rank);
  record.set_node_rank(seat.record_.node_rank());
  SetState(&seat, record.state());
  digest_ -= FingerprintRow(seat.record());
  seat = Seat(std::move(record));
  digest_ = NotZero(digest_ + FingerprintRow(seat.record()));
}

void Membership::Gone(int rank, v1::WorkerState state, const v1::ExitCause& cause) {
  SetState(&seats_[rank], state);
  *seats_[rank].record_.mutable_exit() = cause;
}

void Membership::Vacate(int rank) { SetState(&seats_[rank], v1::WORKER_STATE_FENCED); }

void Membership::End(const std::string& why, std::vector<v1::Culprit> culprits, absl::Time now) {
  sealed_ = false;
  why_ended_ = why;
  end_culprits_ = std::move(culprits);
  ended_at_ = now;
}

void Membership::Close(const std::string& why) {
  closed_ = true;
  why_ended_ = why;
}

absl::Status Membership::Restore(const v1::GenerationSealed& sealed, std::vector<Seat>* former) {
  generation_ = sealed.generation();
  sealed_ = restored_one_ = true;
  why_ended_.clear();
  end_culprits_.clear();
  digest_ = sealed.table_digest();
  num_nodes_ = sealed.num_nodes();
  *former = std::exchange(seats_, {});
  for (const v1::SeatRecord& record : sealed.seats()) {
    if (record.rank() != size()) return BadRank(sealed.job_id(), record.rank());
    seats_.emplace_back(record);
  }
  Index();
  return absl::OkStatus();
}

void Membership::Restore(const v1::GenerationClosed& ended) {
  sealed_ = false;
  why_ended_ = ended.why();
  end_culprits_.assign(ended.culprits().begin(), ended.culprits().end());
}

absl::Status Membership::Restore(const v1::SeatTaken& taken) {
  const int rank = taken.seat().rank();
  if (rank < 0 || rank >= size()) return BadRank(taken.job_id(), rank);
  Seat& seat = seats_[rank];
  if (seat.record_.worker_id() != taken.seat().worker_id()) {
    rank_of_.erase(seat.record_.worker_id());
    rank_of_[taken.seat().worker_id()] = rank;
  }
  SetState(&seat, taken.seat().state());
  seat = Seat(taken.seat());
  digest_ = taken.table_digest();
  return absl::OkStatus();
}

void Membership::Restore(const v1::WorkerEnded& ended) {
  if (!Holds(ended.worker_id(), ended.incarnation())) return;
  Gone(Find(ended.worker_id())->rank(), ended.state(), ended.exit());
}

void Membership::BecomeRestored(uint64_t skipped) {
  seats_.clear();
  Index();
  generation_ += skipped;
  sealed_ = false;
  if (!closed_) why_ended_ = "the coordinator was restored from a copy of its data";
  end_culprits_.clear();
}

void Membership::Fill(v1::GenerationSealed* sealed) const {
  sealed->set_generation(generation_);
  sealed->set_table_digest(digest_);
  sealed->set_num_nodes(num_nodes_);
  for (const Seat& seat : seats_) *sealed->add_seats() = seat.record();
}

void Membership::Fill(v1::GenerationClosed* ended) const {
  ended->set_generation(generation_);
  ended->set_why(why_ended_);
  for (const v1::Culprit& culprit : end_culprits_) *ended->add_culprits() = culprit;
}

}  // namespace muster::coordinator
