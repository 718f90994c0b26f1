#include "coordinator/core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"

namespace muster::coordinator {

void DurationCounts::Observe(double seconds) {
  int bucket = 0;
  while (bucket < kBuckets - 1 && seconds > Bound(bucket)) ++bucket;
  ++buckets[bucket];
  sum_seconds += seconds;
}

void Output::Clear() {
  replies.clear();
  records.clear();
  directives.clear();
  changed_jobs.clear();
  changed_submitted.clear();
  reports.clear();
  notices.clear();
  catch_up = false;
  deposed = false;
  deposed_why.clear();
}

void Core::Impl::Begin(absl::Time now, Output* out) {
  // A gap much longer than the ticks in it shows that this process was paused (stopped, swapped,
  // suspended): its workers' beats may be waiting unread, so no lease expires because of the pause.
  if (now_ != absl::InfinitePast() && now > now_) {
    const absl::Duration gap = now - now_;
    now_ = now;
    if (gap > absl::Milliseconds(20)) {
      for (auto it = leases_.begin(); it != leases_.end() && gap > it->first / 2; ++it) {
        ++stats_.jobs_visited;
        FindJob(it->second)->Resume();
      }
    }
  }
  now_ = std::max(now_, now);
  out_ = out;
  event_revision_ = 0;
  record_ = nullptr;
  arena_.Reset();
  first_reply_ = out->replies.size();
  first_directive_ = out->directives.size();
}

void Core::Impl::End(Job* job) {
  if (record_ != nullptr) {
    const uint64_t revision = Rev();
    record_->set_revision(revision);
    record_->set_term(term_);
    last_record_ = revision;
    out_->records.push_back({revision, record_->SerializeAsString()});
    for (size_t i = first_reply_; i < out_->replies.size(); ++i)
      out_->replies[i].durable_revision = revision;
    for (size_t i = first_directive_; i < out_->directives.size(); ++i) {
      out_->directives[i].durable_revision = revision;
    }
    if (job != nullptr) job->Recorded(revision);
    record_ = nullptr;
  }
  if (options_.mutants.acknowledges_before_durable) {
    for (size_t i = first_reply_; i < out_->replies.size(); ++i)
      out_->replies[i].durable_revision = 0;
  }
  FreeIfLarge(&held_);
  event_revision_ = 0;
  first_reply_ = out_->replies.size();
  first_directive_ = out_->directives.size();
  if (job != nullptr) job->AfterEvent();
  TellJobs();
}

Core::Core(CoreOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Core::~Core() = default;

void Core::Handle(CallId call, const v1::Op& op, const Caller& caller, absl::Time now,
                  Output* out) {
  impl_->Begin(now, out);
  if (!impl_->serving_) {
    impl_->SendError(call,
                     MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_STARTING,
                               "the coordinator is still reading its journal: try again"),
                     0);
    return;
  }
  Impl::Job* const touched = impl_->HandleOp(call, op, caller);
  // The operations on submitted jobs have ended it.
  if (!JobsCore::Takes(op.kind_case())) impl_->End(touched);
}

void Core::Abandon(CallId call, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  if (impl_->submitted_->Abandon(call)) return;
  const auto it = impl_->held_.find(call);
  if (it == impl_->held_.end()) return;
  const Impl::Held held = std::move(it->second);
  impl_->held_.erase(it);
  if (held.kind == Impl::Held::kStacks) impl_->unseated_.Abandon(held.job_id, call);
  Impl::Job* const job = impl_->FindJob(held.job_id);
  if (job == nullptr) return;
  if (held.kind == Impl::Held::kWait) job->kv().AbandonWait(call);
  if (held.kind == Impl::Held::kStacks) job->AbandonStacks(call);
  if (held.kind == Impl::Held::kJoin) {
    job->AbandonJoin(held.worker_id, call);
  }
  impl_->End(job);
}

void Core::AttachAgent(absl::string_view node, const v1::Hello& hello, absl::Time now, Output* out,
                       absl::string_view group) {
  impl_->Begin(now, out);
  impl_->agents_.Attach(node, impl_->now_);
  impl_->caller_may_depose_ = group.empty();
  impl_->CheckAgent(node, hello);
  impl_->hubs_.Attach(group, node, hello, impl_->now_);
  impl_->MoveAgents();
}

void Core::DetachAgent(absl::string_view node, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  impl_->agents_.Detach(node);
  impl_->hubs_.Detach(node, impl_->now_);
  impl_->MoveAgents();
}

void Core::Impl::MoveAgents() {
  for (HubMove& move : hubs_.Decide()) {
    auto directive = std::make_shared<v1::Directive>();
    v1::UseHub* use = directive->mutable_use_hub();
    use->set_node(std::move(move.hub));
    use->set_address(std::move(move.address));
    use->set_why(std::move(move.why));
    Direct(move.node, std::move(directive), 0);
  }
  if (std::optional<std::string> notice = hubs_.TakeNotice()) Note("", true, *std::move(notice));
}

void Core::HandleBeat(absl::string_view node, const v1::Beat& beat, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  if (beat.has_hub()) {
    impl_->hubs_.Roster(node, beat.hub(), impl_->now_);
    impl_->MoveAgents();
  }
  const uint64_t agent = impl_->agents_.Beat(node, beat.hub().agents_size() > 0, impl_->now_);
  Impl::Job* job = nullptr;
  Seat* seat = nullptr;
  // The workers of a node mostly have neighbouring ranks: less to look up for a hub's hundreds.
  const auto find_after = [&job](const Seat* last, const std::string& worker_id) {
    const size_t next = last == nullptr ? 0 : static_cast<size_t>(last->rank()) + 1;
    return next < job->seats().size() && job->seats()[next].record().worker_id() == worker_id
               ? job->seat(static_cast<int>(next))
               : job->FindSeat(worker_id);
  };
  bool told = false;
  for (const v1::WorkerBeat& worker : beat.workers()) {
    if (worker.has_unseated()) {
      impl_->unseated_.Said(node, worker, impl_->now_);
      continue;
    }
    if (job == nullptr || job->id() != worker.job_id()) {
      job = impl_->FindJob(worker.job_id());
      seat = nullptr;
      told = false;
    }
    if (job == nullptr) continue;
    seat = find_after(seat, worker.worker_id());
    const bool same = seat != nullptr && (seat->record().incarnation() == worker.incarnation() ||
                                          impl_->options_.mutants.dead_incarnation_renews_lease);
    if (!job->sealed() || !same) {
      job->TellAgain(std::string(node), worker, &told);
      job->Touch();
    }
    if (!same || !seat->alive()) continue;
    job->RenewLease(*seat);
    job->NoteProgress(seat, worker);
    seat->SetProcessState(worker.process_state());
    seat->HeardThrough(node, agent);
    if (job->watch_touched()) impl_->End(job);
  }
  impl_->TellJobs();
}

void Core::HandleStack(absl::string_view, const v1::StackReply& stack, absl::Time now, Output* out,
                       const Identity* identity) {
  impl_->Begin(now, out);
  const auto it = impl_->queries_.find(stack.query_id());
  if (it == impl_->queries_.end()) return;
  const auto [job_id, worker_id, unseated] = it->second;
  // The numbers of queries can be guessed: the agent of one attempt answers for no other.
  if (identity != nullptr && identity->role == Role::kAttempt && !Covers(*identity, job_id)) return;
  impl_->queries_.erase(it);
  if (unseated) {
    if (!impl_->unseated_.SetStack(job_id, worker_id, stack)) return;
    impl_->UnseatedDone(job_id, impl_->unseated_.Answered(job_id, stack.query_id()));
    return;
  }
  Impl::Job* const job = impl_->FindJob(job_id);
  Seat* const seat = job != nullptr ? job->FindSeat(worker_id) : nullptr;
  if (seat == nullptr ||
      (stack.pid() != 0 && seat->record().pid() != 0 && stack.pid() != seat->record().pid()))
    return;
  seat->SetStack(stack.native_stack());
  if (!stack.process_state().empty()) seat->SetProcessState(stack.process_state());
  job->StackTaken(stack.query_id());
  impl_->End(job);
}

void Core::CaughtUp(absl::Time until, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  impl_->caught_up_ = std::max(impl_->caught_up_, until);
  for (const std::string& job_id : std::exchange(impl_->unread_jobs_, {})) {
    Impl::Job* const job = impl_->FindJob(job_id);
    if (job == nullptr) continue;
    job->CaughtUp();
    impl_->End(job);
  }
}

void Core::Tick(absl::Time now, Output* out) {
  impl_->Begin(now, out);
  if (impl_->hubs_.NextDeadline() <= impl_->now_) {
    impl_->hubs_.Tick(impl_->now_);
    impl_->MoveAgents();
  }
  if (impl_->unseated_.NextDeadline() <= impl_->now_) {
    for (const std::string& job_id : impl_->unseated_.Expired(impl_->now_)) {
      impl_->UnseatedDone(job_id, impl_->unseated_.TakeExpired(job_id, impl_->now_));
    }
  }
  if (impl_->serving_ && impl_->submitted_->NextDeadline() <= impl_->now_) {
    JobsOutput jobs;
    impl_->submitted_->Tick(impl_->JobsEvent(), &jobs);
    impl_->EndJobs(std::move(jobs));
  }
  while (impl_->serving_ && !impl_->deadlines_.empty() &&
         impl_->deadlines_.begin()->first <= impl_->now_) {
    ++impl_->stats_.jobs_visited;
    const std::string job_id = impl_->deadlines_.begin()->second;
    Impl::Job* const job = impl_->FindJob(job_id);
    MUSTER_CHECK(job != nullptr) << "a deadline without a job: " << job_id;
    job->Tick();
    if (job->expired()) {
      impl_->Remove(job,
                    absl::StrCat("no worker of it for ", absl::FormatDuration(job->Retention())));
    } else {
      impl_->End(job);
    }
  }
}

absl::Time Core::NextDeadline() const {
  absl::Time next =
      impl_->deadlines_.empty() ? absl::InfiniteFuture() : impl_->deadlines_.begin()->first;
  next = std::min({next, impl_->hubs_.NextDeadline(), impl_->unseated_.NextDeadline()});
  if (impl_->serving_) next = std::min(next, impl_->submitted_->NextDeadline());
  // Regular ticks while leases run: their absence shows that this process was paused.
  if (!impl_->leases_.empty()) {
    const absl::Duration shortest = impl_->leases_.begin()->first;
    next = std::min(next, impl_->now_ + std::min(absl::Seconds(1), shortest / 4));
  }
  return next;
}

uint64_t Core::last_term() const { return impl_->term_; }
uint64_t Core::restored_term() const { return impl_->restored_term_; }
uint64_t Core::revision() const { return impl_->revision_; }
uint64_t Core::last_record_revision() const { return impl_->last_record_; }

void Core::CloseJob(absl::string_view job_id, absl::string_view why, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  Impl::Job* const job = impl_->FindJob(job_id);
  if (job == nullptr) return;
  job->Close(std::string(why));
  impl_->End(job);
}

void Core::RemoveJob(absl::string_view job_id, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  if (Impl::Job* const job = impl_->FindJob(job_id)) impl_->Remove(job, "by its owner");
}

void Core::Impl::Remove(Job* job, const std::string& why, bool replaced) {
  Note(job->id(), false, absl::StrCat("removed: ", why));
  job->Close("removed");
  v1::JobRemoved* const removed = Change()->mutable_job_removed();
  removed->set_job_id(job->id());
  if (replaced && job->checkpoints().size() > 0) {
    removed->set_keeps_checkpoints(true);
    LeaveCheckpoints(job);
  }
  job->TouchWatch();  // its watchers must learn that it is gone
  if (replaced) {
    Rev();  // the history of the new job begins after that of this one
    out_->changed_jobs.push_back(job->id());
  } else {
    End(job);
  }
  ++stats_.jobs_removed;
  job->Unschedule();
  // The writes that operators still wait for will never come. The waits of workers have ended with
  // their generation.
  for (const CallId call : job->kv().TakeWaits(/*only_workers=*/false)) {
    held_.erase(call);
    SendError(call, UnknownJob(job->id()), last_record_);
  }
  jobs_.erase(job->id());
}

std::optional<v1::OpError> Core::ReadWatch(const v1::WatchRequest& request, uint64_t from,
                                           uint64_t durable_revision, size_t max_bytes,
                                           v1::WatchBatch* batch) const {
  const Impl::Job* const job = impl_->FindJob(request.job_id());
  if (job == nullptr) return Impl::UnknownJob(request.job_id());
  *batch->mutable_header() = impl_->Header();
  if (from == 0) from = impl_->revision_ + 1;
  if (from > impl_->revision_ + 1) {
    v1::OpError error = MakeError(
        absl::StatusCode::kOutOfRange, v1::ERROR_REASON_COMPACTED,
        absl::StrCat(
            "revision ", from, " has not been reached here (the last is ", impl_->revision_,
            "): it belongs to a state that was lost; read the keys again and watch from the "
            "revision of that reply"));
    error.mutable_detail()->set_compacted_revision(impl_->revision_);
    return error;
  }
  if (impl_->options_.mutants.watch_skips_a_revision && from % 5 == 0) ++from;
  return job->log().Read(request, from, durable_revision, impl_->revision_, max_bytes, batch);
}

std::optional<v1::OpError> Core::ReadJobs(const v1::WatchJobsRequest& request, const Identity* who,
                                          uint64_t durable_revision, size_t max_bytes,
                                          JobsCore::WatchPlace* place,
                                          v1::WatchJobsBatch* batch) const {
  *batch->mutable_header() = impl_->Header();
  // The watcher's revision belongs to a state that was lost or to another cluster, so everything
  // that the watcher has must be compared again.
  if (place->seen > impl_->revision_) *place = {.seen = 1};
  std::optional<v1::OpError> error =
      impl_->submitted_->ReadChanges(request, who, durable_revision, max_bytes, place, batch);
  // The answer that a job is gone waits until its removal is durable.
  if (error.has_value() && impl_->jobs_record_ > durable_revision) return std::nullopt;
  return error;
}

void Core::SetWarnings(std::vector<std::string> warnings, std::string no_room) {
  impl_->warnings_ = std::move(warnings);
  impl_->submitted_->SetNoRoom(std::move(no_room));
}

void Core::FillStatus(v1::StatusReply* status) const {
  for (const std::string& warning : impl_->warnings_) status->add_warnings(warning);
  *status->mutable_header() = impl_->Header();
  status->set_agents(static_cast<int>(impl_->agents_.size()) + agents_behind_hubs());
  status->set_agents_behind_hubs(agents_behind_hubs());
  status->set_hubs(hubs());
  for (const Impl::Job* job : impl_->JobsById()) job->FillStatus(status->add_jobs());
}

v1::ReplyHeader Core::Header() const { return impl_->Header(); }
const CoreStats& Core::stats() const { return impl_->stats_; }

size_t Core::kv_bytes() const { return impl_->kv_budget_.used; }

std::string Core::OwnerOf(absl::string_view job) const { return impl_->OwnerOf(job); }

std::optional<v1::OpError> Core::CheckAttempt(absl::string_view group) const {
  return impl_->CheckAttempt(group);
}

int Core::agents_behind_hubs() const { return impl_->hubs_.agents_behind(); }
int Core::hubs() const { return impl_->hubs_.hubs(); }

std::map<v1::WorkerState, int64_t> Core::MembersByState() const {
  std::map<v1::WorkerState, int64_t> counts;
  for (const auto& [id, job] : impl_->jobs_) {
    for (const Seat& seat : job->seats()) {
      // Workers that wait for the next generation are counted below, as JOINING.
      if (job->sealed() || !job->Waits(seat)) ++counts[job->StateOf(seat)];
    }
    if (!job->rendezvous().empty()) counts[v1::WORKER_STATE_JOINING] += job->rendezvous().size();
  }
  return counts;
}

}  // namespace muster::coordinator
