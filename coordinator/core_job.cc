#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/defaults.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"
#include "coordinator/seating.h"

namespace muster::coordinator {
namespace {

constexpr size_t kMaxCallsOfJoin = 8;
constexpr int kNamed = 4;
constexpr absl::Duration kTimeoutTextKept = absl::Seconds(1);

// Fills in the save that has lasted longest, all parts of it together.
void FillSave(const std::vector<Seat>& seats, v1::JobStatus* status) {
  v1::SaveProgress save;
  int writers = 0;
  const auto writes = [](const Seat& seat) { return seat.alive() && seat.save() != nullptr; };
  for (const Seat& seat : seats) {
    if (!writes(seat)) continue;
    if (writers++ == 0 || seat.save()->step() < save.step()) save.set_step(seat.save()->step());
  }
  if (writers == 0) return;
  writers = 0;
  absl::Duration elapsed;
  for (const Seat& seat : seats) {
    if (!writes(seat) || seat.save()->step() != save.step()) continue;
    ++writers;
    if (save.path().empty()) save.set_path(seat.save()->path());
    save.set_written_bytes(save.written_bytes() + seat.save()->written_bytes());
    save.set_bytes(save.bytes() + seat.save()->bytes());
    save.set_asynchronous(seat.save()->asynchronous());
    elapsed = std::max(elapsed, FromProto(seat.save()->elapsed()));
  }
  *save.mutable_elapsed() = ToProto(elapsed);
  *status->mutable_save() = std::move(save);
  status->set_saving(writers);
}

}  // namespace

LeaseTerms Core::Impl::Job::Terms() const {
  LeaseTerms terms;
  terms.length = Or(spec_.has_lease(), spec_.lease(), impl_->options_.default_lease);
  terms.outage_tolerance = spec_.has_outage_tolerance()
                               ? std::max(FromProto(spec_.outage_tolerance()), absl::ZeroDuration())
                               : impl_->options_.default_outage_tolerance;
  return terms;
}

bool Core::Impl::Job::Over() const {
  // After a restore, workers have no seats but may live: they have a lease to come back.
  if (impl_->restored_term_ == impl_->term_ && leases_.FloorEnds() > impl_->now_) return false;
  return Idle() && RestartedBy().empty() && !leases_.AnyRuns(impl_->now_);
}

std::string Core::Impl::Job::RestartedBy() const {
  if (!Idle() || members_.closed() || members_.FormerWorld() == 0) return "";
  if (members_.ended_at() + JoinTimeout() <= impl_->now_)
    return "";  // a worker that comes later belongs to another run
  for (const Seat& seat : members_.seats()) {
    if (seat.record().state() != v1::WORKER_STATE_EXITED || !seat.record().exit().may_restart())
      continue;
    // The seat names the agent that spoke for the worker last. If that is a hub, or was one, the
    // worker's own agent is one on its host: it may be behind that hub, another one, or none by
    // now.
    const std::string& host = seat.record().topology().host();
    const std::string& node = seat.record().node();
    // If an agent of this host spoke for itself, other agents there have nothing to do with the
    // job.
    const bool through_hub = !absl::StartsWith(node, absl::StrCat(host.substr(0, 64), "/"));
    std::string agent = through_hub ? impl_->hubs_.AgentOn(host) : "";
    const bool own = impl_->agents_.Has(node) && !impl_->agents_.SpeaksForOthers(node);
    if (own || (agent.empty() && leases_.FloorEnds() > impl_->now_)) agent = node;
    if (!agent.empty()) return absl::StrCat("agent ", Quoted(agent), " on host ", Quoted(host));
  }
  return "";
}

bool Core::Impl::Job::IsMember(const v1::Fence& fence, absl::string_view node) const {
  return members_.Holds(fence.worker_id(), fence.incarnation()) ||
         rendezvous_.Waits(fence.worker_id(), fence.incarnation()) ||
         incarnations_.Departed(fence.worker_id()) == fence.incarnation() || members_.HasNode(node);
}

uint64_t Core::Impl::Job::NewestOf(absl::string_view worker_id) const {
  if (const Waiter* const waiter = rendezvous_.Find(worker_id)) {
    return waiter->request.fence().incarnation();
  }
  const Seat* const seat = members_.Find(worker_id);
  return seat == nullptr ? 0 : seat->record().incarnation();
}

v1::OpError Core::Impl::Job::Superseded(const std::string& worker_id, uint64_t newer) const {
  v1::OpError error =
      MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_SUPERSEDED,
                absl::StrCat("worker ", Quoted(worker_id), " was restarted (incarnation ",
                             absl::Hex(newer), "): this older process must end"));
  error.mutable_detail()->set_current_incarnation(newer);
  error.mutable_detail()->set_current_generation(generation());
  error.mutable_detail()->set_current_term(impl_->term_);
  return error;
}

v1::OpError Core::Impl::Job::Stale(const v1::Fence& fence) const {
  v1::OpError error =
      MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_STALE_GENERATION,
                absl::StrCat("generation ", fence.generation(), " of job ", Quoted(id_),
                             " has ended, generation ", generation(), " is current: join again"));
  error.mutable_detail()->set_current_generation(generation());
  error.mutable_detail()->set_current_term(impl_->term_);
  return error;
}

v1::OpError Core::Impl::Job::Ended() const {
  v1::OpError error =
      MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_GENERATION_ENDED,
                absl::StrCat("generation ", generation(), " of job ", Quoted(id_),
                             " has ended: ", members_.why_ended(), "; join the next one"));
  error.mutable_detail()->set_current_generation(generation());
  error.mutable_detail()->set_current_term(impl_->term_);
  for (const v1::Culprit& culprit : members_.end_culprits())
    *error.mutable_detail()->add_culprits() = culprit;
  return error;
}

std::optional<v1::OpError> Core::Impl::Job::CheckGeneration(const v1::Fence& fence) const {
  if (fence.generation() < generation() && !impl_->options_.mutants.accepts_stale_generation)
    return Stale(fence);
  if (fence.generation() > generation()) {
    v1::OpError error = MakeError(
        absl::StatusCode::kInternal, v1::ERROR_REASON_FUTURE_GENERATION,
        absl::StrCat("generation ", fence.generation(), " of job ", Quoted(id_),
                     " was never sealed here (", generation(),
                     " is the last): the caller's state is corrupt, or this coordinator began from "
                     "an older copy of the data directory: stop it, run "
                     "muster-coordinator --restored DIRECTORY and start it again"));
    error.mutable_detail()->set_current_generation(generation());
    error.mutable_detail()->set_current_term(impl_->term_);
    return error;
  }
  return std::nullopt;
}

v1::Culprit Core::Impl::Job::DescribeRank(int rank) const {
  v1::Culprit culprit;
  culprit.set_rank(rank);
  culprit.set_generation(generation());
  if (rank < 0 || static_cast<size_t>(rank) >= members_.seats().size()) return culprit;
  const Seat& seat = members_.at(rank);
  culprit.set_worker_id(seat.record().worker_id());
  culprit.set_host(seat.record().topology().host());
  culprit.set_pid(seat.record().pid());
  culprit.set_last_step(seat.step());
  culprit.set_last_collective(seat.last_collective());
  culprit.set_native_stack(seat.stack());
  *culprit.mutable_heartbeat_age() = ToProto(impl_->now_ - leases_.last_seen(rank));
  const v1::ExitCause& exit = seat.record().exit();
  switch (seat.record().state()) {
    case v1::WORKER_STATE_EXITED:
      culprit.set_process_state(exit.signal() != 0
                                    ? absl::StrCat("killed(", exit.signal(), ")")
                                    : absl::StrCat("exited(", exit.exit_code(), ")"));
      break;
    case v1::WORKER_STATE_LEFT:
      culprit.set_process_state("left");
      break;
    case v1::WORKER_STATE_LOST:
      culprit.set_process_state(seat.process_state().empty() ? "lost" : seat.process_state());
      break;
    default:
      culprit.set_process_state(seat.process_state().empty() ? "unknown" : seat.process_state());
  }
  return culprit;
}

std::string Core::Impl::Job::GoneText(const Seat& seat) const {
  const v1::ExitCause& exit = seat.record().exit();
  switch (seat.record().state()) {
    case v1::WORKER_STATE_EXITED:
      return exit.signal() != 0 ? absl::StrCat("was killed by signal ", exit.signal())
                                : absl::StrCat("exited with code ", exit.exit_code());
    case v1::WORKER_STATE_LOST:
      return absl::StrCat(
          "gave no sign of life for ",
          absl::FormatDuration(absl::Trunc(std::max(Lease(), leases_.lost_after(seat.rank())),
                                           absl::Milliseconds(100))));
    case v1::WORKER_STATE_LEFT:
      return "left the job";
    case v1::WORKER_STATE_FENCED:
      return "was restarted";
    default:
      return "is gone";
  }
}

v1::WorkerState Core::Impl::Job::StateOf(const Seat& seat) const {
  // After the end of a generation, no worker takes the seats of the silent ones.
  const bool lost =
      !sealed() && seat.alive() && !Waits(seat) && leases_.IsOver(seat.rank(), impl_->now_);
  return lost ? v1::WORKER_STATE_LOST : seat.record().state();
}

v1::Member Core::Impl::Job::MakeMember(const Seat& seat) const {
  v1::Member member;
  member.set_rank(seat.rank());
  member.set_worker_id(seat.record().worker_id());
  member.set_incarnation(seat.record().incarnation());
  member.set_state(StateOf(seat));
  member.set_host(seat.record().topology().host());
  member.set_pid(seat.record().pid());
  member.set_last_step(seat.step());
  *member.mutable_heartbeat_age() =
      ToProto(std::max(impl_->now_ - leases_.last_seen(seat.rank()), absl::ZeroDuration()));
  member.set_phase(seat.phase());
  member.set_last_collective(seat.last_collective());
  member.set_progress(seat.progress());
  if (seat.alive() && seat.save() != nullptr) *member.mutable_save() = *seat.save();
  if (seat.record().has_exit()) *member.mutable_exit() = seat.record().exit();
  member.set_why_rank(seat.record().why_rank());
  return member;
}

v1::Member Core::Impl::Job::MakeMember(const Waiter& waiter) const {
  v1::Member member;
  member.set_rank(-1);
  member.set_worker_id(waiter.request.fence().worker_id());
  member.set_incarnation(waiter.request.fence().incarnation());
  member.set_state(v1::WORKER_STATE_JOINING);
  member.set_host(waiter.request.topology().host());
  member.set_pid(waiter.request.pid());
  if (waiter.kind == WaiterKind::kBlocked) {
    member.set_why_rank("waits: an operator has quarantined its host");
  } else if (sealed() && !waiter.passed_over.empty()) {
    member.set_why_rank(waiter.passed_over);
  } else if (!rendezvous_.why().empty()) {
    member.set_why_rank(absl::StrCat("waits for ", rendezvous_.why()));
  }
  return member;
}

void Core::Impl::Job::EmitMember(const Seat& seat) {
  v1::WatchEvent event;
  *event.mutable_member() = MakeMember(seat);
  log_->Other(impl_->Rev(), std::move(event));
  watch_touched_ = true;
}

void Core::Impl::Job::FenceIncarnation(const std::string& worker_id, uint64_t incarnation) {
  RememberFenced(worker_id, incarnation);
  v1::IncarnationFenced* fenced = impl_->Change()->mutable_incarnation_fenced();
  fenced->set_job_id(id_);
  fenced->set_worker_id(worker_id);
  fenced->set_incarnation(incarnation);
  membership_touched_ = true;
}

void Core::Impl::Job::RememberFenced(const std::string& worker_id, uint64_t incarnation) {
  // In a snapshot the seats come after the fences, and late after a restore; the spec is there.
  incarnations_.Fence(worker_id, incarnation,
                      static_cast<size_t>(std::max(members_.size(), spec_.max_workers())));
  answers_.Forget(worker_id);
}

void Core::Impl::Job::NoteDeparted(const std::vector<Seat>& old_seats) {
  for (const Seat& seat : members_.seats()) incarnations_.Return(seat.record().worker_id());
  for (const Seat& seat : old_seats) {
    if (members_.Find(seat.record().worker_id()) == nullptr &&
        !impl_->options_.mutants.forgets_departed)
      incarnations_.Depart(seat.record().worker_id(), seat.record().incarnation());
  }
  for (const std::string& worker_id : incarnations_.ForgetOldest(members_.seats().size())) {
    answers_.Forget(worker_id);
  }
}

void Core::Impl::Job::Kill(const std::string& node, const std::string& worker_id,
                           uint64_t incarnation) {
  auto directive = std::make_shared<v1::Directive>();
  v1::KillWorker* kill = directive->mutable_kill_worker();
  kill->set_job_id(id_);
  kill->set_worker_id(worker_id);
  kill->set_incarnation(incarnation);
  kill->set_why("a newer incarnation took its seat");
  impl_->Direct(node, std::move(directive), membership_record_);
}

void Core::Impl::Job::TellAgain(const std::string& node, const v1::WorkerBeat& worker,
                                bool* told_node) {
  if (incarnations_.IsFenced(worker.worker_id(), worker.incarnation()))
    return Kill(node, worker.worker_id(), worker.incarnation());
  if (*told_node) return;
  if (rendezvous_.Waits(worker.worker_id(), worker.incarnation())) return;
  const Seat* const seat = members_.Find(worker.worker_id());
  const bool sat = seat != nullptr
                       ? seat->record().incarnation() == worker.incarnation() && !sealed() &&
                             seat->record().state() != v1::WORKER_STATE_LEFT &&
                             seat->record().state() != v1::WORKER_STATE_EXITED
                       : incarnations_.Departed(worker.worker_id()) == worker.incarnation();
  if (!sat) return;
  *told_node = true;  // what follows is the same for all workers of the job
  auto directive = std::make_shared<v1::Directive>();
  v1::GenerationEnded* told = directive->mutable_generation_ended();
  told->set_job_id(id_);
  told->set_generation(sealed() ? generation() - 1 : generation());
  told->set_why(sealed() ? absl::StrCat("generation ", generation(), " has been sealed")
                         : members_.why_ended());
  if (!sealed()) {
    for (const v1::Culprit& culprit : members_.end_culprits()) *told->add_culprits() = culprit;
  }
  impl_->Direct(node, std::move(directive), membership_record_);
}

WaiterKind Core::Impl::Job::KindOf(const v1::JoinRequest& request) const {
  switch (quarantine_.StateOf(request.topology().host(), impl_->now_)) {
    case Quarantine::State::kLastResort:
      return WaiterKind::kLastResort;
    case Quarantine::State::kBlocked:
      return WaiterKind::kBlocked;
    case Quarantine::State::kFree:
      break;
  }
  return request.spare() ? WaiterKind::kSpare : WaiterKind::kOrdinary;
}

void Core::Impl::Job::Recount() {
  rendezvous_.CheckAt(rendezvous_.empty() ? absl::InfiniteFuture()
                                          : quarantine_.NextFree(impl_->now_));
  rendezvous_.Reclassify([this](const v1::JoinRequest& request) { return KindOf(request); });
}

Waiter Core::Impl::Job::Unqueue(absl::string_view worker_id) {
  timeout_changed_ = true;
  Waiter waiter = rendezvous_.Remove(worker_id);
  for (const CallId call : waiter.calls) impl_->held_.erase(call);
  return waiter;
}

void Core::Impl::Job::DropWaiting(const std::string& worker_id, const v1::OpError& error) {
  if (!rendezvous_.Waits(worker_id)) return;
  const Waiter waiter = Unqueue(worker_id);
  for (const CallId call : waiter.calls) impl_->SendError(call, error, membership_record_);
}

void Core::Impl::Job::AbandonJoin(const std::string& worker_id, CallId call) {
  if (!rendezvous_.Waits(worker_id)) return;
  std::vector<CallId>& calls = rendezvous_.Place(worker_id, std::nullopt)->calls;
  calls.erase(std::remove(calls.begin(), calls.end(), call), calls.end());
  if (!calls.empty()) return;
  Unqueue(worker_id);
  Evaluate();
}

void Core::Impl::Job::Enqueue(CallId call, const v1::JoinRequest& request, const Caller& caller) {
  const std::string& worker_id = request.fence().worker_id();
  const uint64_t incarnation = request.fence().incarnation();
  std::optional<uint64_t> order;
  if (rendezvous_.Waits(worker_id) && !rendezvous_.Waits(worker_id, incarnation)) {
    const Waiter older = Unqueue(worker_id);
    order = older.order;
    FenceIncarnation(worker_id, older.request.fence().incarnation());
    const v1::OpError error = Superseded(worker_id, incarnation);
    for (const CallId old : older.calls) impl_->SendError(old, error, membership_record_);
  }
  if (!rendezvous_.Waits(worker_id)) {
    timeout_changed_ = true;
    gave_up_.erase(worker_id);
  }
  Waiter& waiter = *rendezvous_.Place(worker_id, order);
  waiter.request = request;
  waiter.node = std::string(caller.node);
  if (waiter.asked <= leases_.LastHeard() || waiter.asked + Lease() <= impl_->now_)
    waiter.back = impl_->now_;
  waiter.asked = impl_->now_;
  // The kind of a waiter may have changed with its request.
  rendezvous_.SetKind(&waiter, KindOf(request));
  rendezvous_.CheckBy(quarantine_.FreeAt(request.topology().host(), impl_->now_));
  leases_.JudgeAgain(impl_->now_);
  if (waiter.calls.size() >= kMaxCallsOfJoin) {
    impl_->SendError(
        waiter.calls.front(),
        MakeError(absl::StatusCode::kCancelled, v1::ERROR_REASON_SUPERSEDED,
                  absl::StrCat("worker ", Quoted(worker_id), " asked for its seat again")),
        0);
    impl_->held_.erase(waiter.calls.front());
    waiter.calls.erase(waiter.calls.begin());
  }
  waiter.calls.push_back(call);
  impl_->held_[call] = {id_, Held::kJoin, worker_id};
  // A retry does not restart the time.
  if (request.spare()) {
    rendezvous_.SetDeadline(worker_id, &waiter, absl::InfiniteFuture());
  } else if (waiter.deadline == absl::InfiniteFuture()) {
    rendezvous_.SetDeadline(worker_id, &waiter,
                            impl_->now_ + RestOf(JoinTimeout(), request.waited()));
  }
  Evaluate();
}

bool Core::Impl::Job::SurvivorsWait() const {
  return std::all_of(members_.seats().begin(), members_.seats().end(),
                     [&](const Seat& seat) { return !seat.alive() || Waits(seat); });
}

absl::Time Core::Impl::Job::ClaimsEnd() const {
  // If the number of agents varies, one that is slow to stop its workers is still there, and may be
  // the one that hosts this coordinator. Other workers may hang while their agent still speaks for
  // them.
  if (spec_.min_workers() >= spec_.max_workers() || !absl::EndsWith(id_, kAgentsSuffix)) {
    return absl::InfinitePast();
  }
  absl::Time end = absl::InfinitePast();
  for (const Seat& seat : members_.seats()) {
    if (!seat.alive() || Waits(seat)) continue;
    end = std::max(end, leases_.last_seen(seat.rank()) + Lease());
  }
  return std::min(end, members_.ended_at() + JoinTimeout());
}

void Core::Impl::Job::Evaluate() {
  if (rendezvous_.empty()) return;
  if (members_.closed()) return rendezvous_.Hold("nothing: the job has ended");
  if (sealed()) {
    return rendezvous_.Hold(absl::StrCat("a free seat: generation ", generation(), " runs with ",
                                         members_.seats().size(), " workers"));
  }
  SealQuestion question;
  question.min_workers = spec_.min_workers();
  question.max_workers = spec_.max_workers();
  question.divisible_by = spec_.divisible_by();
  question.now = impl_->now_;
  question.last_call =
      spec_.has_last_call() ? FromProto(spec_.last_call()) : impl_->options_.default_last_call;
  const int spares = rendezvous_.Count(WaiterKind::kSpare);
  if (spares > 0) {
    if (HasSealed()) {
      question.last_call = std::min(question.last_call, impl_->options_.recovery_last_call);
    }
    // Spares replace lost workers.
    if (rendezvous_.Count(WaiterKind::kOrdinary) + spares >= spec_.min_workers()) {
      question.former_world = members_.FormerWorld();
      question.survivors_wait = SurvivorsWait();
    }
  }
  question.claims_end = ClaimsEnd();
  if (question.claims_end > impl_->now_) rendezvous_.CheckBy(question.claims_end);
  const SealDecision& decision = rendezvous_.Decide(question);
  if (decision.seal) Seal(decision.world_size);
}

std::vector<Candidate> Core::Impl::Job::Candidates() const {
  const bool has_spares = rendezvous_.Count(WaiterKind::kSpare) > 0;
  std::vector<Candidate> candidates;
  candidates.reserve(rendezvous_.size());
  for (const Waiter* const waiter : rendezvous_.ByArrival()) {
    if (waiter->kind == WaiterKind::kBlocked) continue;
    Candidate candidate;
    candidate.worker_id = waiter->request.fence().worker_id();
    candidate.topology = waiter->request.topology();
    candidate.preferred_rank = waiter->request.preferred_rank();
    const Seat* const seat = members_.Find(candidate.worker_id);
    if (seat != nullptr && !(impl_->options_.mutants.spare_moves_survivors && has_spares)) {
      candidate.previous_rank = seat->rank();
    }
    candidate.spare = waiter->kind == WaiterKind::kSpare;
    candidate.last_resort = waiter->kind == WaiterKind::kLastResort;
    candidate.order = waiter->order;
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

std::vector<std::vector<CallId>> Core::Impl::Job::TakeSeats(int world_size,
                                                            std::vector<Seat>* former_seats) {
  const std::vector<Candidate> candidates = Candidates();
  std::vector<FormerSeat> former;
  former.reserve(members_.size());
  for (const Seat& seat : members_.seats()) {
    const v1::Topology& t = seat.record().topology();
    former.push_back({seat.record().worker_id(), t.host(), t.rack(), t.nvlink_domain()});
  }
  Seating seating = AssignRanks(candidates, world_size, former);
  std::vector<std::vector<CallId>> calls(world_size);
  std::vector<v1::SeatRecord> records(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const int i = seating.seats[rank];
    Waiter waiter = Unqueue(candidates[i].worker_id);
    records[rank] = MakeSeatRecord(waiter.request, waiter.node);
    records[rank].set_why_rank(std::move(seating.why[i]));
    calls[rank] = std::move(waiter.calls);
  }
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (!rendezvous_.Waits(candidates[i].worker_id)) continue;
    rendezvous_.Place(candidates[i].worker_id, std::nullopt)->passed_over =
        std::move(seating.why[i]);
  }
  ForgetTimeouts();
  *former_seats = members_.Seal(std::move(records));
  return calls;
}

void Core::Impl::Job::Seal(int world_size) {
  std::vector<Seat> old_seats;
  const std::vector<std::vector<CallId>> calls = TakeSeats(world_size, &old_seats);
  Evaluate();  // for the workers that still wait

  v1::GenerationSealed* sealed = impl_->Change()->mutable_generation_sealed();
  sealed->set_job_id(id_);
  members_.Fill(sealed);
  membership_touched_ = true;
  ++impl_->stats_.generations_sealed;

  const std::unique_ptr<BarrierSet> old_barriers = std::move(barriers_);
  BeginGeneration(true);
  NoteDeparted(old_seats);
  if (old_barriers != nullptr) {
    std::vector<int> former_ranks(world_size, -1);
    for (const Seat& seat : old_seats) {
      const Seat* const now = members_.Find(seat.record().worker_id());
      if (now != nullptr) former_ranks[now->rank()] = seat.rank();
    }
    barriers_->InheritScores(*old_barriers, former_ranks);
  }
  std::vector<KvChange> changes;
  for (const Seat& seat : old_seats) {
    if (members_.Find(seat.record().worker_id()) == nullptr)
      kv_.DropLease(seat.record().worker_id(), &changes);
  }
  KvChanged(changes);
  // A restart follows its failure at once; workers that come later belong to another run.
  if (members_.ended_at() + JoinTimeout() <= impl_->now_)
    DropTriggers(absl::StrCat("the job has been unused for ",
                              absl::FormatDuration(impl_->now_ - members_.ended_at())));
  std::vector<v1::TriggerChanged> triggers;
  triggers_.StartGeneration(world_size, &triggers);
  TriggersChanged(std::move(triggers));
  CheckpointSet::Changes checkpoints;
  checkpoints_.DropPreparing(&checkpoints);
  CheckpointsChanged(std::move(checkpoints));
  v1::WatchEvent event;
  event.set_generation_sealed(generation());
  log_->Other(impl_->Rev(), std::move(event));
  watch_touched_ = true;
  TellJobs(AttemptStage::kSealed, impl_->now_);
  for (int rank = 0; rank < world_size; ++rank) {
    for (const CallId call : calls[rank]) SendSeat(call, members_.at(rank));
  }
  impl_->Note(id_, false,
              absl::StrCat("generation ", generation(), " sealed with ", world_size, " workers on ",
                           members_.num_nodes(), " hosts"));
}

void Core::Impl::Job::BeginGeneration(bool counters_known) {
  leases_.BeginGeneration(impl_->now_);
  restored_told_ = stepped_told_ = false;
  BarrierOptions options;
  options.default_timeout = impl_->options_.default_barrier_timeout;
  options.default_soft_timeout = impl_->options_.default_soft_timeout;
  options.diag_budget = impl_->options_.diag_budget;
  options.diag_max_stacks = impl_->options_.diag_max_stacks;
  options.kept_results = impl_->options_.kept_barrier_results;
  options.kept_bytes = impl_->options_.kept_barrier_bytes;
  options.release_one_early = impl_->options_.mutants.barrier_releases_one_early;
  barriers_ =
      std::make_unique<BarrierSet>(options, generation(), members_.size(), counters_known, this);
  seen_counts_ = {};
  agree_ = std::make_unique<AgreeSet>(
      members_.size(), counters_known,
      [this](int rank) -> std::optional<uint64_t> {
        if (!members_.at(rank).alive()) return std::nullopt;
        return members_.at(rank).record().incarnation();
      },
      [this](int rank) { return CulpritText(DescribeRank(rank)); });
}

void Core::Impl::Job::SendSeat(CallId call, const Seat& seat) {
  v1::OpResult result;
  v1::JoinReply* reply = result.mutable_join();
  *reply->mutable_header() = impl_->Header();
  reply->set_generation(generation());
  reply->set_rank(seat.rank());
  reply->set_world_size(members_.size());
  reply->set_table_digest(members_.digest());
  reply->set_generation_prefix(absl::StrCat("gen/", generation(), "/"));
  reply->set_node_rank(seat.record().node_rank());
  reply->set_num_nodes(members_.num_nodes());
  impl_->Send(call, result, membership_record_);
}

void Core::Impl::Job::Reseat(int rank, CallId call, const v1::JoinRequest& request,
                             const Caller& caller) {
  const Seat& seat = members_.at(rank);
  const bool was_alive = seat.alive();
  const bool was_same = seat.record().incarnation() == request.fence().incarnation();
  const std::string& worker_id = request.fence().worker_id();
  if (!was_same) {
    FenceIncarnation(worker_id, seat.record().incarnation());
    if (was_alive) Kill(seat.record().node(), worker_id, seat.record().incarnation());
    std::vector<KvChange> changes;
    kv_.DropLease(worker_id, &changes);
    KvChanged(changes);
  }
  if (was_alive) {
    // No agreement may contain both incarnations: the old one leaves first.
    members_.Vacate(rank);
    std::vector<AgreeSet::Done> done;
    agree_->RankGone(rank, impl_->Header(), &done);
    AgreeDone(std::move(done));
  }
  v1::SeatRecord record = MakeSeatRecord(request, caller.node);
  record.set_why_rank(was_same ? seat.record().why_rank() : "keeps its rank after a restart");
  members_.Replace(rank, std::move(record));
  leases_.Replace(rank, impl_->now_);
  barriers_->RankReplaced(rank, impl_->now_);
  agree_->RankReplaced(rank);
  triggers_.RankReplaced(rank);
  CheckpointSet::Changes checkpoints;
  checkpoints_.DropPreparing(&checkpoints);
  CheckpointsChanged(std::move(checkpoints));
  v1::SeatTaken* taken = impl_->Change()->mutable_seat_taken();
  taken->set_job_id(id_);
  taken->set_generation(generation());
  *taken->mutable_seat() = seat.record();
  taken->set_table_digest(members_.digest());
  membership_touched_ = true;
  EmitMember(seat);
  SendSeat(call, seat);
}

void Core::Impl::Job::EndGeneration(const std::string& why, std::vector<v1::Culprit> culprits) {
  if (!sealed()) return;
  members_.End(why, std::move(culprits), impl_->now_);
  timeout_ = nullptr;  // its text says that a generation runs
  ++impl_->stats_.generations_ended;
  v1::GenerationClosed* ended = impl_->Change()->mutable_generation_closed();
  ended->set_job_id(id_);
  members_.Fill(ended);
  membership_touched_ = true;

  const v1::OpError error = Ended();
  barriers_->EndAll(error);
  barriers_->DropPayloads();
  std::vector<AgreeSet::Done> done;
  agree_->EndAll(error, &done);
  AgreeDone(std::move(done));
  const std::vector<CallId> waits = kv_.TakeWaits(/*only_workers=*/true);
  if (!waits.empty()) {
    v1::OpResult result;
    *result.mutable_error() = error;
    Deliver(waits, std::make_shared<Answer>(result));
  }
  StacksDone(stack_calls_.TakeAll());
  std::vector<KvChange> changes;
  kv_.DropPrefix(absl::StrCat("gen/", generation(), "/"), &changes);
  KvChanged(changes);
  // Keys that are tied to a lease outlive the generation if their worker does.
  leases_.EndGeneration();

  v1::WatchEvent event;
  event.set_generation_ended(generation());
  log_->Other(impl_->Rev(), std::move(event));
  watch_touched_ = true;
  auto directive = std::make_shared<v1::Directive>();
  v1::GenerationEnded* told = directive->mutable_generation_ended();
  told->set_job_id(id_);
  told->set_generation(generation());
  told->set_why(why);
  for (const v1::Culprit& culprit : members_.end_culprits()) *told->add_culprits() = culprit;
  absl::flat_hash_set<absl::string_view> nodes;
  for (const Seat& seat : members_.seats()) {
    if (!nodes.insert(seat.record().node()).second) continue;
    impl_->Direct(seat.record().node(), directive, membership_record_);
  }
  impl_->Note(id_, !members_.end_culprits().empty(),
              absl::StrCat("generation ", generation(), " ended: ", why));

  if (members_.FormerWorld() == 0) DropTriggers("all workers have left the job");
  if (members_.closed()) return rendezvous_.Hold("nothing: the job has ended");
  rendezvous_.Hold("");
  Recount();
  Evaluate();
}

void Core::Impl::Job::WorkerGone(int rank, v1::WorkerState state, const v1::ExitCause& cause) {
  const Seat& seat = members_.at(rank);
  const bool was_alive = seat.alive();
  leases_.Gone(rank);
  members_.Gone(rank, state, cause);
  const std::string& worker_id = seat.record().worker_id();
  v1::WorkerEnded* ended = impl_->Change()->mutable_worker_ended();
  ended->set_job_id(id_);
  ended->set_worker_id(worker_id);
  ended->set_incarnation(seat.record().incarnation());
  ended->set_state(state);
  *ended->mutable_exit() = cause;
  membership_touched_ = true;
  EmitMember(seat);
  std::vector<KvChange> changes;
  kv_.DropLease(worker_id, &changes);
  KvChanged(changes);
  if (!was_alive) return;
  const bool failed =
      state == v1::WORKER_STATE_LOST ||
      (state == v1::WORKER_STATE_EXITED && (cause.exit_code() != 0 || cause.signal() != 0)) ||
      state == v1::WORKER_STATE_FENCED;
  if (state == v1::WORKER_STATE_LOST) ++impl_->stats_.workers_lost;
  if (state == v1::WORKER_STATE_EXITED && failed) ++impl_->stats_.workers_failed;
  if (failed && state != v1::WORKER_STATE_FENCED) {
    // If a process has ended, its agent knows when; for a lost one only its last sign of life in
    // this term is known.
    const bool heard = state == v1::WORKER_STATE_LOST &&
                       leases_.last_seen(rank) > leases_.FloorEnds() - leases_.length();
    TellJobs(AttemptStage::kDetected, heard ? leases_.last_seen(rank) : absl::InfinitePast());
  }
  if (!sealed()) return;
  const std::string what = GoneText(seat);
  if (failed && state != v1::WORKER_STATE_FENCED) Strike(seat.record().topology().host(), what);
  const v1::Culprit culprit = DescribeRank(rank);
  const std::string why =
      absl::StrCat(CulpritText(culprit), " ", what,
                   cause.message().empty() ? "" : absl::StrCat(": ", cause.message()));
  if (failed && spec_.end_generation_on_failure()) {
    EndGeneration(why, {culprit});
    return;
  }
  if (failed) impl_->Note(id_, true, why);
  barriers_->RankGone(rank, what, impl_->now_);
  std::vector<AgreeSet::Done> done;
  agree_->RankGone(rank, impl_->Header(), &done);
  AgreeDone(std::move(done));
  std::vector<v1::TriggerChanged> triggers;
  triggers_.RankGone(rank, &triggers);
  TriggersChanged(std::move(triggers));
  if (members_.alive() == 0) EndGeneration("every worker has left", {});
}

void Core::Impl::Job::LeaveBetween(const std::string& worker_id, const v1::ExitCause& cause) {
  const Seat& seat = *members_.Find(worker_id);
  if (!seat.alive()) return;
  WorkerGone(seat.rank(), v1::WORKER_STATE_LEFT, cause);
  if (members_.FormerWorld() == 0) DropTriggers("all workers have left the job");
}

void Core::Impl::Job::Strike(const std::string& host, const std::string& what) {
  const auto struck =
      quarantine_.Strike(host, /*other_hosts=*/members_.num_nodes() > 1, what, impl_->now_);
  if (!struck.has_value()) return;
  if (struck->decision.quarantine) {
    QuarantineHost(host, impl_->options_.quarantine_for, struck->decision.why, true);
  }
  v1::HostStruck* change = impl_->Change()->mutable_host_struck();
  change->set_job_id(id_);
  change->set_host(host);
  SetStrikes(struck->strikes, change);
  membership_touched_ = true;
}

void Core::Impl::Job::QuarantineHost(const std::string& host, absl::Duration length,
                                     const std::string& reason, bool automatic) {
  quarantine_.Set(host, length, reason, automatic, impl_->now_);
  v1::HostQuarantined* quarantined = impl_->Change()->mutable_host_quarantined();
  quarantined->set_job_id(id_);
  quarantined->set_host(host);
  *quarantined->mutable_for_() = ToProto(length);
  if (length > absl::ZeroDuration()) {
    quarantined->set_until_unix_ms(absl::ToUnixMillis(impl_->now_ + length));
  }
  quarantined->set_reason(reason);
  quarantined->set_automatic(automatic);
  membership_touched_ = true;
  impl_->Note(id_, true,
              length > absl::ZeroDuration()
                  ? absl::StrCat("host ", Quoted(host), " is quarantined for ",
                                 absl::FormatDuration(length), ": ", reason)
                  : absl::StrCat("host ", Quoted(host), " is no longer quarantined"));
  Recount();
}

void Core::Impl::Job::Blame(absl::Span<const int32_t> ranks) {
  absl::btree_set<std::string> hosts;
  for (const int rank : ranks) hosts.insert(members_.at(rank).record().topology().host());
  for (const std::string& host : hosts) Strike(host, "kept a barrier waiting until its deadline");
}

v1::OpError Core::Impl::Job::RendezvousTimeout() const {
  // If the workers that gave up and those that wait are enough together, the waiting ones came too
  // late for the others.
  const int all = rendezvous_.size() + static_cast<int>(gave_up_.size());
  const bool too_late = all >= spec_.min_workers();
  const int here = too_late ? rendezvous_.size() : all;
  const auto is_here = [&](const std::string& worker_id) {
    return rendezvous_.Waits(worker_id) || (!too_late && gave_up_.contains(worker_id));
  };
  std::string text = absl::StrCat("job ", Quoted(id_), ": ", here, " of ",
                                  spec_.min_workers() == spec_.max_workers() ? "" : "at least ",
                                  spec_.min_workers(), " workers joined within ",
                                  absl::FormatDuration(JoinTimeout()));
  v1::OpError error =
      MakeError(absl::StatusCode::kDeadlineExceeded, v1::ERROR_REASON_RENDEZVOUS_TIMEOUT, "");
  if (sealed()) {
    text = absl::StrCat("job ", Quoted(id_), ": generation ", generation(), " runs with ",
                        members_.seats().size(), " workers and no seat was freed within ",
                        absl::FormatDuration(JoinTimeout()),
                        ": end the generation to admit new workers");
  } else {
    std::string missing;
    int count = 0;
    for (const Seat& seat : members_.seats()) {
      if (is_here(seat.record().worker_id())) continue;
      const v1::Culprit culprit = DescribeRank(seat.rank());
      if (count++ < kNamed)
        absl::StrAppend(&missing, missing.empty() ? "" : ", ", CulpritText(culprit));
      if (count <= 64) *error.mutable_detail()->add_culprits() = culprit;
      error.mutable_detail()->add_missing_ranks(seat.rank());
    }
    if (members_.seats().empty()) {
      absl::flat_hash_set<int> claimed;
      rendezvous_.ForEach([&](const std::string&, const Waiter& waiter) {
        claimed.insert(waiter.request.preferred_rank());
      });
      for (const auto& [worker_id, one] : gave_up_) {
        if (!too_late) claimed.insert(one.preferred_rank);
      }
      claimed.erase(-1);
      for (int rank = 0; !claimed.empty() && rank < std::min(spec_.min_workers(), 4096); ++rank) {
        if (claimed.contains(rank)) continue;
        if (count++ < 16) absl::StrAppend(&missing, missing.empty() ? "rank " : ", rank ", rank);
        error.mutable_detail()->add_missing_ranks(rank);
      }
    }
    if (!missing.empty())
      absl::StrAppend(&text, "; missing: ", missing, count > kNamed ? " and more" : "");
    const int blocked = rendezvous_.Count(WaiterKind::kBlocked);
    if (blocked > 0)
      absl::StrAppend(&text, "; ", blocked, " of those that joined are on quarantined hosts");
    if (too_late && !gave_up_.empty()) {
      absl::Time last = absl::InfinitePast();
      for (const auto& [worker_id, one] : gave_up_) last = std::max(last, one.at);
      absl::StrAppend(&text, "; ", gave_up_.size(), " more gave up, the last one ",
                      absl::FormatDuration(absl::Trunc(impl_->now_ - last, absl::Seconds(1))),
                      " ago");
    }
    absl::StrAppend(&text, ": start the missing workers or lower min_workers");
  }
  error.set_message(std::move(text));
  return error;
}

void Core::Impl::Job::Close(const std::string& why) {
  if (members_.closed()) return;
  members_.Close(why);
  EndGeneration(why, {});
  v1::JobClosed* closed = impl_->Change()->mutable_job_closed();
  closed->set_job_id(id_);
  closed->set_why(why);
  membership_touched_ = true;
  const v1::OpError error =
      MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
                absl::StrCat("job ", Quoted(id_), " has ended: ", why));
  for (const std::string& worker_id : rendezvous_.ByName()) DropWaiting(worker_id, error);
}

void Core::Impl::Job::Recorded(uint64_t revision) {
  if (membership_touched_) membership_record_ = revision;
  if (kv_touched_) kv_record_ = revision;
  if (barrier_touched_) barrier_record_ = revision;
  if (watch_touched_) log_->MarkDurable(revision);
}

void Core::Impl::Job::AfterEvent() {
  if (watch_touched_) impl_->out_->changed_jobs.push_back(id_);
  // A caller that only reads does not keep an idle job.
  const bool idle = Idle();
  if (!std::exchange(was_idle_, idle) || !idle || membership_touched_ || kv_touched_ ||
      barrier_touched_ || watch_touched_) {
    Touch();
  }
  membership_touched_ = kv_touched_ = barrier_touched_ = watch_touched_ = false;
  if (barriers_ != nullptr) {
    const BarrierCounts& counts = barriers_->counts();
    if (counts.passed > seen_counts_.passed) {
      impl_->stats_.barriers_passed += counts.passed - seen_counts_.passed;
      impl_->stats_.barrier_wait.Observe(absl::ToDoubleSeconds(counts.last_wait));
    }
    impl_->stats_.barriers_failed += counts.failed - seen_counts_.failed;
    seen_counts_ = counts;
  }
  const absl::Duration lease =
      sealed() && members_.alive() > 0 ? Lease() : absl::InfiniteDuration();
  if (lease != running_lease_) {
    impl_->leases_.erase({running_lease_, id_});
    running_lease_ = lease;
    if (lease != absl::InfiniteDuration()) impl_->leases_.insert({lease, id_});
  }
  const absl::Time next = NextDeadline();
  if (next != scheduled_) {
    impl_->deadlines_.erase({scheduled_, id_});
    scheduled_ = next;
    if (next != absl::InfiniteFuture()) impl_->deadlines_.insert({next, id_});
  }
}

void Core::Impl::Job::Unschedule() {
  impl_->deadlines_.erase({scheduled_, id_});
  impl_->leases_.erase({running_lease_, id_});
}

void Core::Impl::Job::FillStatus(v1::JobStatus* status) const {
  status->set_job_id(id_);
  status->set_generation(generation());
  status->set_rendezvous_state(StateName());
  status->set_world_size(members_.size());
  status->set_waiting(rendezvous_.size());
  status->set_waits_for(rendezvous_.why());
  if (const absl::Time until = rendezvous_.waits_until(); until != absl::InfiniteFuture()) {
    *status->mutable_waits_at_most() = ToProto(std::max(until - impl_->now_, absl::ZeroDuration()));
  }
  int64_t min_step = std::numeric_limits<int64_t>::max();
  int64_t max_step = 0;
  for (const Seat& seat : members_.seats()) {
    min_step = std::min(min_step, seat.step());
    max_step = std::max(max_step, seat.step());
  }
  status->set_min_step(members_.seats().empty() ? 0 : min_step);
  status->set_max_step(max_step);
  FillSave(members_.seats(), status);
  if (leases_.silent() > 0) {
    status->set_silent(leases_.silent());
    *status->mutable_silent_for() = ToProto(leases_.SilentFor(impl_->now_));
    status->set_silent_why(leases_.silent_why());
  }
  quarantine_.ForEach(impl_->now_, [&](const std::string& name, const Quarantine::Host& host) {
    if (host.left == absl::ZeroDuration()) return;
    v1::QuarantinedHost* out = status->add_quarantined();
    out->set_host(name);
    *out->mutable_left() = ToProto(host.left);
    out->set_reason(host.reason);
    out->set_automatic(host.automatic);
  });
}

void Core::Impl::Job::Tick() {
  const absl::Time now = impl_->now_;
  if (now < hold_until_) return;
  if (Idle() && touched_ + Retention() <= now) {
    expired_ = true;
    return;
  }
  // Its checkpoints keep the job, but not the keys of its workers.
  if (KeysExpire() <= now) {
    std::vector<KvChange> changes;
    kv_.DropPrefix("", &changes);
    KvChanged(changes);
  }
  if (RestsAt() <= now) Rest();
  if (barriers_ != nullptr) barriers_->Tick(now);
  if (agree_ != nullptr) {
    std::vector<AgreeSet::Done> done;
    agree_->Tick(now, &done);
    AgreeDone(std::move(done));
  }
  StacksDone(stack_calls_.TakeExpired(now));
  std::vector<KvStore::Ready> expired;
  kv_.TakeExpired(now, &expired);
  for (KvStore::Ready& ready : expired) {
    impl_->held_.erase(ready.call);
    impl_->SendError(ready.call, std::move(ready.error), AllRecords());
  }
  TickLeases();
  if (rendezvous_.FirstExpired(now).has_value()) {
    TickTimeouts();
    Evaluate();
  }
  if (rendezvous_.IsDue(now)) {
    Recount();
    Evaluate();
  }
}

void Core::Impl::Job::Rest() {
  rests_ = true;
  log_->Compact();
  std::map<std::string, std::pair<uint64_t, uint64_t>> newest;  // by name
  answers_.ForEachNewestOfWorkers(
      [&](const std::string& worker_id, uint64_t incarnation, uint64_t up_to) {
        newest[worker_id] = {incarnation, up_to};
      });
  for (const auto& [worker_id, ids] : newest) {
    const auto& [incarnation, up_to] = ids;
    answers_.RememberForgotten(worker_id, incarnation, up_to);
    *impl_->Change()->mutable_requests_forgotten() = Forgotten(worker_id, incarnation, up_to);
  }
}

void Core::Impl::Job::TickTimeouts() {
  const absl::Time now = impl_->now_;
  if (timeout_ == nullptr || (timeout_changed_ && timeout_made_ + kTimeoutTextKept <= now)) {
    absl::erase_if(gave_up_, [&](const auto& one) { return one.second.at + JoinTimeout() <= now; });
    v1::OpResult result;
    *result.mutable_error() = RendezvousTimeout();
    timeout_ = std::make_shared<Answer>(result);
    timeout_made_ = now;
    timeout_changed_ = false;
    impl_->Note(id_, true, result.error().message());
  }
  while (const std::optional<std::string> worker_id = rendezvous_.FirstExpired(now)) {
    // A worker that gives up still counts for the others.
    const bool changed = timeout_changed_;
    const Waiter waiter = Unqueue(*worker_id);
    timeout_changed_ = changed;
    gave_up_[*worker_id] = {now, waiter.request.preferred_rank()};
    for (const CallId call : waiter.calls) impl_->Send(call, timeout_, membership_record_);
  }
  // Workers that come from now on have waited with none of them.
  if (rendezvous_.empty()) ForgetTimeouts();
}

void Core::Impl::Job::TickLeases() {
  using Kind = LeaseDecision::Kind;
  Leases::Outside outside;
  outside.now = impl_->now_;
  outside.read_until = impl_->options_.catches_up ? impl_->caught_up_ : absl::InfiniteFuture();
  // A loss may end the generation, and so change which workers are due.
  while (const std::optional<int> rank = leases_.TakeDue(impl_->now_)) {
    const Seat& seat = members_.at(*rank);
    outside.waits = !members_.sealed() && Waits(seat);
    const bool awaited_reading = leases_.AwaitsReading();
    const int silent = leases_.silent();
    const LeaseDecision decision = leases_.Judge(*rank, outside, [this] { return IsAwaited(); });
    if (decision.unread > absl::ZeroDuration() && !impl_->unread_jobs_.empty()) {
      impl_->Note(id_, true,
                  absl::StrCat("this coordinator has been behind on its incoming messages for ",
                               absl::FormatDuration(absl::Trunc(decision.unread, absl::Seconds(1))),
                               ": workers whose messages are pending may count as lost"));
    }
    switch (decision.kind) {
      case Kind::kHeld:
        break;
      case Kind::kReadFirst:
        if (!awaited_reading) impl_->unread_jobs_.push_back(id_);
        impl_->out_->catch_up = true;
        break;
      case Kind::kEnded: {
        ++impl_->stats_.workers_lost;
        EmitMember(seat);
        std::vector<KvChange> changes;
        kv_.DropLease(seat.record().worker_id(), &changes);
        KvChanged(changes);
        break;
      }
      case Kind::kSilent:
        if (silent == 0) NoteFirstSilent(*rank, decision.why);
        break;
      case Kind::kLost: {
        v1::ExitCause cause;
        cause.set_lease_expired(true);
        if (leases_.is_silent(*rank)) cause.set_message(decision.why);
        WorkerGone(*rank, v1::WORKER_STATE_LOST, cause);
        break;
      }
    }
  }
}

void Core::Impl::Job::NoteFirstSilent(int rank, const std::string& why) {
  impl_->Note(
      id_, true,
      absl::StrCat(CulpritText(DescribeRank(rank)), " and maybe others gave no sign of life for ",
                   absl::FormatDuration(Lease()), ", but ", why, "; generation ", generation(),
                   " continues if they are back within ",
                   absl::FormatDuration(leases_.outage_tolerance())));
}

void Core::Impl::Job::NoteAllHeard() {
  impl_->Note(id_, false,
              absl::StrCat("all workers are back: generation ", generation(), " continues"));
}

void Core::Impl::Job::EndIfNobodyIsHeard(absl::string_view for_what) {
  if (!sealed() || leases_.silent() == 0 || leases_.silent() < members_.alive()) return;
  EndGeneration(absl::StrCat("all workers were silent for a lease, and ", for_what), {});
}

bool Core::Impl::Job::IsAwaited() const {
  const absl::Time recent = impl_->now_ - Lease() / 2;
  const absl::Time long_ago = impl_->now_ - leases_.TimeToReturn();
  bool awaited = false;
  rendezvous_.ForEach([&](const std::string&, const Waiter& waiter) {
    if (awaited) return;
    if (const std::optional<Agents::LastHeard> voice = impl_->agents_.LastHeardOf(waiter.node)) {
      awaited =
          voice->beat > recent && (voice->back <= leases_.LastHeard() || voice->back <= long_ago);
    } else {
      // Its call is the only evidence: it got through at a time when calls of the others could have
      // too.
      awaited = waiter.back > leases_.LastHeard() && waiter.back <= long_ago;
    }
  });
  return awaited;
}

void Core::Impl::Job::AskStack(int rank) { QueryStack(rank); }

uint64_t Core::Impl::Job::QueryStack(int rank) {
  const Seat& seat = members_.at(rank);
  if (seat.record().node().empty() || !seat.alive()) return 0;
  return impl_->AskForStack({id_, seat.record().worker_id(), /*unseated=*/false},
                            seat.record().pid(), seat.record().node(), membership_record_);
}

std::optional<v1::OpError> Core::Impl::Job::CaptureStacks(CallId call,
                                                          const v1::CaptureStacksRequest& request) {
  if (!sealed()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_STATE,
        absl::StrCat("job ", Quoted(id_), " has no running workers to take stacks of",
                     members_.why_ended().empty() ? "" : ": generation ",
                     members_.why_ended().empty() ? "" : absl::StrCat(generation(), " has ended: "),
                     members_.why_ended()));
  }
  StacksAsked wanted;
  if (auto error = CheckStacks(request, members_.size(), &wanted)) return error;
  if (stack_calls_.full()) return TooManyStackCalls(id_);
  std::vector<StackCalls::Asked> asked;
  asked.reserve(wanted.ranks.size());
  for (const int32_t rank : wanted.ranks) asked.push_back({rank, QueryStack(rank)});
  StacksDone(stack_calls_.Add(call, impl_->now_ + wanted.timeout, wanted.next, std::move(asked)));
  return std::nullopt;
}

void Core::Impl::Job::StacksDone(std::vector<StackCalls::Done> done) {
  for (const StackCalls::Done& one : done) {
    v1::OpResult result;
    v1::CaptureStacksReply* const reply = result.mutable_capture_stacks();
    *reply->mutable_header() = impl_->Header();
    reply->set_generation(generation());
    reply->set_next(one.next);
    for (const StackCalls::Asked& asked : one.asked) {
      v1::RankStack* const row = reply->add_stacks();
      *row->mutable_worker() = DescribeRank(asked.rank);
      if (asked.answered) {
        if (row->worker().native_stack().empty()) {
          row->set_missing("its agent has looked, and there is no stack to be read");
        }
        continue;
      }
      // A stack from an earlier question is not what the worker does now.
      row->mutable_worker()->clear_native_stack();
      const Seat& seat = members_.at(asked.rank);
      row->set_missing(!seat.alive()                  ? "its process has ended"
                       : seat.record().node().empty() ? "it has no agent that could take it"
                                                      : "its agent has not answered in time");
    }
    Deliver({one.call}, std::make_shared<Answer>(result));
  }
}

void Core::Impl::Job::Deliver(const std::vector<CallId>& calls,
                              std::shared_ptr<const Answer> answer) {
  const uint64_t durable = std::max(membership_record_, barrier_record_);
  for (const CallId call : calls) {
    // Callers that have disconnected meanwhile are no longer held.
    if (impl_->held_.erase(call) > 0) impl_->Send(call, answer, durable);
  }
}

void Core::Impl::Job::JournalEnd(const std::string& barrier_id, uint64_t counter,
                                 const Answer& answer) {
  v1::BarrierEnded* ended = impl_->Change()->mutable_barrier_ended();
  ended->set_job_id(id_);
  ended->set_generation(generation());
  ended->set_barrier_id(barrier_id);
  ended->set_counter(counter);
  *ended->mutable_answer() = answer.Parse();
  barrier_touched_ = true;
}

void Core::Impl::Job::Report(const v1::BarrierReport& report, absl::Span<const int32_t> members) {
  impl_->out_->reports.push_back(report);
  impl_->Note(id_, true, report.message());
  // If the barrier failed, the waiting callers have the answer.
  if (report.state() != v1::BARRIER_STATE_OPEN) return;
  auto directive = std::make_shared<v1::Directive>();
  directive->mutable_barrier_late()->set_job_id(id_);
  v1::BarrierReport* told = directive->mutable_barrier_late()->mutable_report();
  *told = report;
  if (told->missing_ranks_size() > kMissingInError)
    told->mutable_missing_ranks()->Truncate(kMissingInError);
  if (told->culprits_size() > kCulpritsInError) {
    told->mutable_culprits()->DeleteSubrange(kCulpritsInError,
                                             told->culprits_size() - kCulpritsInError);
  }
  // There may be thousands of nodes to notify.
  for (v1::Culprit& culprit : *told->mutable_culprits()) culprit.clear_native_stack();
  absl::flat_hash_set<absl::string_view> nodes;
  const size_t count = members.empty() ? members_.seats().size() : members.size();
  for (size_t i = 0; i < count; ++i) {
    const Seat& seat = members_.at(members.empty() ? i : members[i]);
    if (nodes.insert(seat.record().node()).second)
      impl_->Direct(seat.record().node(), directive, membership_record_);
  }
}

void Core::Impl::Job::AgreeDone(std::vector<AgreeSet::Done> done) {
  for (AgreeSet::Done& one : done) {
    // In the journal the empty barrier name denotes agreements.
    if (one.journal) JournalEnd("", one.counter, *one.answer);
    Deliver(one.calls, one.answer);
  }
}

void Core::Impl::Job::KvChanged(const std::vector<KvChange>& changes) {
  if (changes.empty()) return;
  const uint64_t revision = impl_->Rev();
  v1::KvChanged* record = nullptr;
  for (const KvChange& change : changes) {
    const bool was_durable = change.before != nullptr && change.before->durable();
    const bool is_durable = change.after != nullptr && change.after->durable();
    if ((was_durable || is_durable) && record == nullptr) {
      record = impl_->Change()->mutable_kv_changed();
      record->set_job_id(id_);
      kv_touched_ = true;
    }
    if (is_durable) {
      change.after->CopyTo(record->add_puts());
    } else if (was_durable) {
      record->add_deletes(std::string(change.key()));
    }
    if (change.after != nullptr) {
      log_->Put(revision, change.after);
    } else {
      log_->Deleted(revision, change.key());
    }
  }
  watch_touched_ = true;
  impl_->stats_.kv_writes += changes.size();
  std::vector<KvStore::Ready> ready;
  kv_.TakeReady(changes, &ready);
  std::shared_ptr<const v1::WaitReply> last;
  std::shared_ptr<const Answer> answer;
  for (KvStore::Ready& one : ready) {
    if (one.reply == nullptr) {
      impl_->held_.erase(one.call);
      impl_->SendError(one.call, std::move(one.error), AllRecords());
      continue;
    }
    if (one.reply != last) {
      last = one.reply;
      v1::OpResult result;
      *result.mutable_wait() = *one.reply;
      *result.mutable_wait()->mutable_header() = impl_->Header();
      answer = std::make_shared<Answer>(result);
    }
    impl_->held_.erase(one.call);
    impl_->Send(one.call, answer, AllRecords());
  }
}

void Core::Impl::Job::TriggersChanged(std::vector<v1::TriggerChanged> changes) {
  for (v1::TriggerChanged& change : changes) {
    change.set_job_id(id_);
    const v1::TriggerRecord& trigger = change.trigger();
    if (!change.removed() && trigger.align() == v1::TRIGGER_ALIGN_AT_STEP &&
        trigger.effective_step() > trigger.step()) {
      impl_->Note(
          id_, true,
          absl::StrCat("trigger ", Quoted(trigger.name()), " was requested before step ",
                       trigger.step(), ", which a rank had already begun: all act before step ",
                       trigger.effective_step()));
    }
    *impl_->Change()->mutable_trigger_changed() = std::move(change);
    membership_touched_ = true;
  }
}

void Core::Impl::Job::DropTriggers(const std::string& why) {
  std::vector<v1::TriggerChanged> changes;
  triggers_.DropAll(&changes);
  if (changes.empty()) return;
  impl_->Note(id_, true,
              absl::StrCat("dropped ", changes.size(), " triggers, the first ",
                           Quoted(changes[0].trigger().name()), ": ", why));
  TriggersChanged(std::move(changes));
}

std::optional<v1::OpError> Core::Impl::Job::Txn(const v1::TxnRequest& request, const Seat* seat,
                                                v1::OpResult* result) {
  const absl::string_view lease =
      seat != nullptr ? absl::string_view(seat->record().worker_id()) : "";
  const uint64_t revision =
      impl_->event_revision_ != 0 ? impl_->event_revision_ : impl_->revision_ + 1;
  std::vector<KvChange> changes;
  v1::TxnReply* reply = result->mutable_txn();
  if (auto error = kv_.Txn(request, lease, revision, reply, &changes)) return error;
  if (!changes.empty()) {
    impl_->Rev();
    KvChanged(changes);
    impl_->WatchKeys(id_);
  }
  *reply->mutable_header() = impl_->Header();
  return std::nullopt;
}

const char* Core::Impl::Job::StateName() const {
  if (members_.closed()) return "CLOSED";
  if (sealed()) return "SEALED";
  if (rendezvous_.in_last_call()) return "LAST_CALL";
  if (!rendezvous_.empty() || !HasSealed()) return "COLLECTING";
  return "ENDED";
}

}  // namespace muster::coordinator
