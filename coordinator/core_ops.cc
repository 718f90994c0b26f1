#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/defaults.h"
#include "base/log.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr int kMaxWorkers = 1 << 20;
constexpr size_t kMaxMembersBytes = 3 << 20;  // of one page: a message has at most 4 MiB
constexpr size_t kMemberOverhead = 4;         // tag and length
constexpr size_t kMaxQueries = 4096;          // for stacks, without an answer

std::optional<v1::OpError> CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty())
    return BadField(field, absl::StrCat(field, " is empty: it has 1 to ", kMaxName, " bytes"));
  if (name.size() > kMaxName) {
    return TooLarge(field, absl::StrCat(field, " ", Quoted(name), " has ", name.size(),
                                        " bytes: at most ", kMaxName));
  }
  return std::nullopt;
}

// Callers' reasons appear in errors, each of which is one line.
std::string Reason(absl::string_view text) { return Cut(OneLine(Cut(text, 1024)), 1024); }

std::string CallerText(const Seat* seat) {
  return seat != nullptr ? absl::StrCat("rank ", seat->rank()) : "an operator";
}

std::optional<v1::OpError> CheckSpec(const v1::RendezvousSpec& spec) {
  if (spec.min_workers() < 1 || spec.max_workers() < spec.min_workers() ||
      spec.max_workers() > kMaxWorkers) {
    return BadField("spec",
                    absl::StrCat("a job needs 1 <= min_workers <= max_workers <= ", kMaxWorkers,
                                 ", not ", spec.min_workers(), ":", spec.max_workers()));
  }
  if (spec.divisible_by() < 0) {
    return BadField("spec.divisible_by",
                    absl::StrCat("divisible_by is ", spec.divisible_by(), ": give 1 or more"));
  }
  const int64_t step = std::max(1, spec.divisible_by());
  if ((spec.min_workers() + step - 1) / step * step > spec.max_workers()) {
    return BadField("spec.divisible_by",
                    absl::StrCat("no world size from ", spec.min_workers(), " to ",
                                 spec.max_workers(), " is a multiple of ", step));
  }
  const std::pair<const char*, const google::protobuf::Duration*> durations[] = {
      {"spec.join_timeout", &spec.join_timeout()},
      {"spec.last_call", &spec.last_call()},
      {"spec.lease", &spec.lease()},
      {"spec.outage_tolerance", &spec.outage_tolerance()}};
  for (const auto& [field, duration] : durations) {
    if (FromProto(*duration) < absl::ZeroDuration()) {
      return BadField(
          field, absl::StrCat(field, " is negative: give a duration, or none for the default"));
    }
  }
  return std::nullopt;
}

// Returns whether both ask for the same job. How long each continues without the coordinator may
// differ.
bool SameSpec(v1::RendezvousSpec a, v1::RendezvousSpec b) {
  a.clear_outage_tolerance();
  b.clear_outage_tolerance();
  return a.SerializeAsString() == b.SerializeAsString();
}

// Checks a join that any caller may have sent.
std::optional<v1::OpError> CheckJoin(const v1::JoinRequest& request) {
  const v1::Fence& fence = request.fence();
  if (auto error = CheckName("fence.job_id", fence.job_id())) return error;
  if (auto error = CheckName("fence.worker_id", fence.worker_id())) return error;
  if (fence.incarnation() == 0) {
    return BadField("fence.incarnation",
                    absl::StrCat("worker ", Quoted(fence.worker_id()),
                                 " has incarnation 0: draw a random one at process start"));
  }
  const std::pair<const char*, const std::string*> texts[] = {
      {"topology.host", &request.topology().host()},
      {"topology.rack", &request.topology().rack()},
      {"topology.nvlink_domain", &request.topology().nvlink_domain()},
      {"endpoint", &request.endpoint()}};
  for (const auto& [field, text] : texts) {
    if (text->size() > kMaxName) {
      return TooLarge(field, absl::StrCat(field, " of worker ", Quoted(fence.worker_id()), " has ",
                                          text->size(), " bytes: at most ", kMaxName));
    }
  }
  return std::nullopt;
}

}  // namespace

template <typename Request, typename F>
void Core::Impl::Once(Incoming* in, const Request& request, Rules rules, F f) {
  const v1::Fence& fence = request.fence();
  const bool dedupe = rules.writes && RememberedAnswers::CanRemember(fence);
  uint64_t hash = 0;
  if (dedupe) {
    if (Job* const job = FindJob(fence.job_id()); job != nullptr && !IsAhead(fence)) {
      hash = HashRequest(request, in->op.kind_case());
      StoredAnswer stored;
      switch (job->answers().Find(fence, hash, &stored)) {
        case RememberedAnswers::State::kKnown:
          ++stats_.repeated_requests;
          Send(in->call, stored.answer,
               std::max(stored.durable_revision, rules.reads ? job->kv_record() : 0));
          return;
        case RememberedAnswers::State::kReused:
          SendError(
              in->call,
              MakeError(
                  absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_KEY_REUSED,
                  absl::StrCat("request_id ", fence.request_id(), " of worker ",
                               Quoted(fence.worker_id()),
                               " was used for another request: increment it for each new request")),
              0);
          return;
        case RememberedAnswers::State::kForgotten:
          SendError(
              in->call,
              MakeError(absl::StatusCode::kOutOfRange, v1::ERROR_REASON_RESULT_FORGOTTEN,
                        absl::StrCat("request_id ", fence.request_id(), " of worker ",
                                     Quoted(fence.worker_id()),
                                     " was sent before, or too late: of a worker the last ",
                                     options_.kept_answers,
                                     " answers are kept, and none once its job has had no "
                                     "generation for its join_timeout; whether it took effect is "
                                     "unknown")),
              0);
          return;
        case RememberedAnswers::State::kNew:
          break;
      }
    }
  }
  Who who;
  if (auto error = CheckFence(fence, rules.operators, &who)) {
    SendError(in->call, *std::move(error), who.job != nullptr ? who.job->membership_record() : 0);
    return;
  }
  in->touched = who.job;
  auto* const result = google::protobuf::Arena::CreateMessage<v1::OpResult>(&arena_);
  if (auto error = f(who, result)) {
    SendError(in->call, *std::move(error),
              rules.reads ? who.job->AllRecords() : who.job->membership_record());
    return;
  }
  auto answer = std::make_shared<Answer>(*result);
  if (dedupe) {
    uint64_t durable = 0;
    if (record_ != nullptr) {
      durable = Rev();
      v1::RequestAnswered* answered = Change()->mutable_request_answered();
      answered->set_job_id(who.job->id());
      answered->set_worker_id(fence.worker_id());
      answered->set_incarnation(fence.incarnation());
      answered->set_request_id(fence.request_id());
      answered->set_request_hash(hash);
      answered->unsafe_arena_set_allocated_answer(result);
    }
    who.job->answers().Remember(fence.worker_id(), fence.incarnation(), fence.request_id(), hash,
                                {answer, durable});
  }
  Send(in->call, std::move(answer),
       rules.reads ? who.job->AllRecords() : who.job->membership_record());
}

Core::Impl::Job* Core::Impl::BeginJob(Incoming* in, Job* former) {
  const v1::JoinRequest& request = in->op.join();
  const std::string& job_id = request.fence().job_id();
  // The new job continues its generation numbers, so that leftover workers of the former one are
  // stale.
  const uint64_t generation = former != nullptr ? former->generation() : 0;
  if (former != nullptr) {
    in->touched = nullptr;
    // The removal is in one record with the beginning of the new job: a crash leaves both jobs, or
    // only the new one.
    Remove(
        former,
        absl::StrCat("it has ended, and another job of this name begins (",
                     request.spec().min_workers(), ":", request.spec().max_workers(), " workers)"),
        /*replaced=*/true);
  }
  auto owned = std::make_unique<Job>(this, job_id);
  Job* const job = owned.get();
  job->Begin(request.spec(), generation);
  AdoptCheckpoints(job);
  v1::JobCreated* created = Change()->mutable_job_created();
  if (Job* const earlier = FormerAttempt(job_id)) {
    job->checkpoints().Adopt(&earlier->checkpoints());
    created->set_takes_checkpoints_of(earlier->id());
  }
  jobs_[job_id] = std::move(owned);
  created->set_job_id(job->id());
  *created->mutable_spec() = request.spec();
  created->set_generation(generation);
  job->TouchMembership();
  return job;
}

bool Core::Impl::IsResizedByItsAgents(const Job& job, const Caller& caller) const {
  const Job* const agents = FindJob(absl::StrCat(job.id(), kAgentsSuffix));
  return agents != nullptr && agents->sealed() &&
         agents->spec().min_workers() < agents->spec().max_workers() &&
         agents->members().HasNode(caller.node);
}

Core::Impl::Job* Core::Impl::JobToJoin(Incoming* in) {
  const v1::JoinRequest& request = in->op.join();
  const v1::Fence& fence = request.fence();
  const auto fail = [&](v1::OpError error, uint64_t durable = 0) -> Job* {
    SendError(in->call, std::move(error), durable);
    return nullptr;
  };
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) {
    // An unknown job is not an error here: this is how it begins, also for workers from another
    // cluster.
    const v1::ErrorReason reason = error->detail().reason();
    if (reason == v1::ERROR_REASON_STOPPING || reason == v1::ERROR_REASON_STALE_TERM ||
        reason == v1::ERROR_REASON_BAD_FIELD)
      return fail(*std::move(error));
  }
  if (request.has_spec()) {
    if (auto error = CheckSpec(request.spec())) return fail(*std::move(error));
  }
  if (const auto why = job == nullptr ? WhyGroupEnded(fence.job_id()) : std::nullopt) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
                          absl::StrCat("job ", Quoted(fence.job_id()), " has ended: ", *why)),
                jobs_record_);
  }
  const bool other_spec =
      job != nullptr && request.has_spec() && !SameSpec(request.spec(), job->spec());
  if (other_spec) {
    in->touched = job;
    job->EndIfNobodyIsHeard("another job of this name begins");
  }
  // The name of an ended job is free for another one.
  const bool begins = job == nullptr || (other_spec && !job->members().closed() &&
                                         (job->Over() || IsResizedByItsAgents(*job, in->caller)));
  const int max_workers = begins ? request.spec().max_workers() : job->spec().max_workers();
  if (job == nullptr && !request.has_spec()) {
    return fail(BadField("spec", absl::StrCat("job ", Quoted(fence.job_id()), " is new and worker ",
                                              Quoted(fence.worker_id()),
                                              " sends no rendezvous spec: the first worker must")));
  }
  if (request.preferred_rank() < -1 || request.preferred_rank() >= max_workers) {
    return fail(
        BadField("preferred_rank",
                 absl::StrCat("worker ", Quoted(fence.worker_id()), " prefers rank ",
                              request.preferred_rank(), " in a job of at most ", max_workers,
                              " workers: use 0 to ", max_workers - 1, ", or -1 for any")));
  }
  if (begins) return BeginJob(in, job);
  if (job->members().closed()) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
                          absl::StrCat("job ", Quoted(job->id()),
                                       " has ended: ", job->members().why_ended())),
                job->membership_record());
  }
  if (other_spec) {
    return fail(BadField(
        "spec",
        absl::StrCat("worker ", Quoted(fence.worker_id()), " sends another rendezvous spec (",
                     request.spec().min_workers(), ":", request.spec().max_workers(), ") than job ",
                     Quoted(job->id()), " was started with (", job->spec().min_workers(), ":",
                     job->spec().max_workers(), ") and ",
                     job->RestartedBy().empty()
                         ? "some of its workers are alive"
                         : absl::StrCat("it is being restarted by ", job->RestartedBy()),
                     ": use the same, or another job id, or wait until it has ended")));
  }
  return job;
}

void Core::Impl::Join(Incoming* in) {
  const v1::JoinRequest& request = in->op.join();
  const v1::Fence& fence = request.fence();
  if (auto error = CheckJoin(request)) return SendError(in->call, *std::move(error), 0);
  Job* const job = JobToJoin(in);
  if (job == nullptr) return;
  const auto fail = [&](v1::OpError error, uint64_t durable) {
    SendError(in->call, std::move(error), durable);
  };
  in->touched = job;
  Seat* const seat = job->FindSeat(fence.worker_id());
  const Incarnations& incarnations = job->incarnations();
  const std::optional<uint64_t> departed = incarnations.Departed(fence.worker_id());
  if (departed.has_value() && *departed != fence.incarnation() &&
      !incarnations.IsFenced(fence.worker_id(), *departed) &&
      !incarnations.IsFenced(fence.worker_id(), fence.incarnation())) {
    job->FenceIncarnation(fence.worker_id(), *departed);
  }
  if (incarnations.IsFenced(fence.worker_id(), fence.incarnation())) {
    ++stats_.fenced_calls;
    return fail(job->Superseded(fence.worker_id(), job->NewestOf(fence.worker_id())),
                job->membership_record());
  }
  if (seat != nullptr && seat->record().incarnation() == fence.incarnation() &&
      seat->record().state() == v1::WORKER_STATE_EXITED) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                          absl::StrCat("this incarnation of worker ", Quoted(fence.worker_id()),
                                       " ", job->GoneText(*seat),
                                       " according to its agent: start a new process")),
                job->membership_record());
  }
  if (seat != nullptr && job->sealed()) {
    const bool same = seat->record().incarnation() == fence.incarnation();
    if (same && seat->alive()) {
      // This is a retry: its first answer was lost.
      job->RenewLease(*seat);
      job->SendSeat(in->call, *seat);
      return;
    }
    if (!job->spec().end_generation_on_failure() &&
        seat->record().state() != v1::WORKER_STATE_LEFT) {
      job->Reseat(seat->rank(), in->call, request, in->caller);
      return;
    }
    if (!same) {
      const uint64_t old = seat->record().incarnation();
      if (seat->alive()) {
        job->Kill(seat->record().node(), fence.worker_id(), old);
        job->WorkerGone(seat->rank(), v1::WORKER_STATE_FENCED, v1::ExitCause());
      }
      job->FenceIncarnation(fence.worker_id(), old);
    }
  } else if (seat != nullptr && seat->record().incarnation() != fence.incarnation()) {
    job->FenceIncarnation(fence.worker_id(), seat->record().incarnation());
    if (seat->alive()) job->WorkerGone(seat->rank(), v1::WORKER_STATE_FENCED, v1::ExitCause());
  }
  job->Enqueue(in->call, request, in->caller);
}

void Core::Impl::Arrive(Incoming* in) {
  const v1::ArriveRequest& request = in->op.arrive();
  Who who;
  if (auto error = CheckFence(request.fence(), false, &who)) {
    SendError(in->call, *std::move(error), who.job != nullptr ? who.job->membership_record() : 0);
    return;
  }
  in->touched = who.job;
  if (request.rank() != who.seat->rank()) {
    SendError(in->call,
              BadField("rank", absl::StrCat("worker ", Quoted(request.fence().worker_id()),
                                            " holds rank ", who.seat->rank(), ", not ",
                                            request.rank(), ": use the rank of the join reply")),
              who.job->membership_record());
    return;
  }
  who.seat->AtStep(request.step());
  const int32_t rank = request.rank();
  Arrival arrival;
  arrival.call = in->call;
  arrival.barrier_id = request.barrier_id();
  arrival.counter = request.counter();
  arrival.ranks = absl::MakeConstSpan(&rank, 1);
  arrival.timeout = FromProto(request.timeout());
  arrival.soft_timeout = FromProto(request.soft_timeout());
  arrival.waited = FromProto(request.waited());
  arrival.participants =
      absl::MakeConstSpan(request.participants().data(), request.participants_size());
  if (!request.payload().empty()) arrival.payloads.push_back(request.payload());
  arrival.call_site = request.call_site();
  arrival.call_site_text = request.call_site_text();
  arrival.previous_state = request.previous_state();
  held_[in->call] = {who.job->id(), Held::kBarrier, ""};
  if (auto error = who.job->barriers()->Arrive(arrival, now_)) {
    held_.erase(in->call);
    SendError(in->call, *std::move(error), who.job->AllRecords());
  }
}

void Core::Impl::ArriveMany(Incoming* in) {
  const v1::ArriveManyRequest& request = in->op.arrive_many();
  const v1::Fence& fence = request.fence();
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return SendError(in->call, *std::move(error), 0);
  const auto fail = [&](v1::OpError error) {
    ++stats_.fenced_calls;
    error.mutable_detail()->set_current_generation(job->generation());
    error.mutable_detail()->set_current_term(term_);
    SendError(in->call, std::move(error), job->membership_record());
  };
  if (auto error = job->CheckGeneration(fence)) return fail(*std::move(error));
  if (!job->sealed()) return fail(job->Ended());
  in->touched = job;
  if (request.incarnations_size() != request.ranks_size()) {
    return fail(BadField(
        "incarnations",
        absl::StrCat("barrier ", Quoted(request.barrier_id()), " got ", request.incarnations_size(),
                     " incarnations for ", request.ranks_size(), " ranks: give one for each")));
  }
  const int world_size = job->members().size();
  for (int i = 0; i < request.ranks_size(); ++i) {
    const int rank = request.ranks(i);
    if (rank < 0 || rank >= world_size) {
      return fail(BadField(
          "ranks", absl::StrCat("rank ", rank, " does not exist in a world of ", world_size)));
    }
    const Seat& seat = job->seats()[rank];
    if (seat.record().incarnation() != request.incarnations(i)) {
      return fail(job->Superseded(seat.record().worker_id(), seat.record().incarnation()));
    }
    if (!seat.alive()) {
      return fail(
          MakeError(absl::StatusCode::kFailedPrecondition,
                    seat.record().state() == v1::WORKER_STATE_LOST ? v1::ERROR_REASON_LEASE_EXPIRED
                                                                   : v1::ERROR_REASON_NOT_MEMBER,
                    absl::StrCat("rank ", rank, " (worker ", Quoted(seat.record().worker_id()),
                                 ") ", job->GoneText(seat), ": it cannot arrive at a barrier")));
    }
  }
  const uint64_t agent = agents_.NumberOf(in->caller.node);
  for (const int rank : request.ranks()) {
    Seat& seat = *job->seat(rank);
    job->RenewLease(seat);
    seat.AtStep(request.step());
    if (!in->caller.node.empty()) seat.HeardThrough(in->caller.node, agent);
  }
  Arrival arrival;
  arrival.call = in->call;
  arrival.barrier_id = request.barrier_id();
  arrival.counter = request.counter();
  arrival.ranks = absl::MakeConstSpan(request.ranks().data(), request.ranks_size());
  arrival.lateness_us =
      absl::MakeConstSpan(request.lateness_us().data(), request.lateness_us_size());
  arrival.timeout = FromProto(request.timeout());
  arrival.soft_timeout = FromProto(request.soft_timeout());
  arrival.waited = FromProto(request.waited());
  arrival.waited_less_us =
      absl::MakeConstSpan(request.waited_less_us().data(), request.waited_less_us_size());
  arrival.participants =
      absl::MakeConstSpan(request.participants().data(), request.participants_size());
  arrival.payloads.assign(request.payloads().begin(), request.payloads().end());
  arrival.call_site = request.call_site();
  arrival.call_site_text = request.call_site_text();
  arrival.previous_state = request.previous_state();
  held_[in->call] = {job->id(), Held::kBarrier, ""};
  if (auto error = job->barriers()->Arrive(arrival, now_)) {
    held_.erase(in->call);
    SendError(in->call, *std::move(error), job->AllRecords());
  }
}

void Core::Impl::Heartbeat(Incoming* in) {
  const v1::HeartbeatRequest& request = in->op.heartbeat();
  const v1::Fence& fence = request.fence();
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return SendError(in->call, *std::move(error), 0);
  in->touched = job;
  const auto answer = [&] {
    v1::OpResult result;
    v1::HeartbeatReply* reply = result.mutable_heartbeat();
    *reply->mutable_header() = Header();
    reply->set_generation(job->generation());
    reply->set_generation_ended(!job->sealed() || fence.generation() < job->generation());
    if (reply->generation_ended()) {
      reply->set_why(!job->sealed()
                         ? job->members().why_ended()
                         : absl::StrCat("generation ", job->generation(), " has been sealed"));
    }
    Send(in->call, result, job->membership_record());
  };
  Seat* const seat = job->FindSeat(fence.worker_id());
  if (options_.mutants.dead_incarnation_renews_lease && seat != nullptr) {
    job->RenewLease(*seat);
    return answer();
  }
  Who who;
  if (auto error = CheckFence(fence, false, &who)) {
    const v1::ErrorReason reason = error->detail().reason();
    // The worker is behind, but not dead: what it must know is in the reply.
    if (reason == v1::ERROR_REASON_STALE_GENERATION) return answer();
    if (reason == v1::ERROR_REASON_GENERATION_ENDED) {
      if (seat != nullptr && seat->record().incarnation() == fence.incarnation()) {
        job->RenewLease(*seat);
        job->Touch();  // its worker lives, though without a seat
      }
      return answer();
    }
    return SendError(in->call, *std::move(error), job->membership_record());
  }
  job->NoteProgress(seat, request);
  answer();
}

void Core::Impl::ReportExit(Incoming* in) {
  const v1::ReportExitRequest& request = in->op.report_exit();
  Job* job = nullptr;
  if (auto error = CheckJob(request.fence(), &job))
    return SendError(in->call, *std::move(error), 0);
  in->touched = job;
  Seat* const seat = job->FindSeat(request.worker_id());
  v1::ExitCause cause = request.cause();
  cause.set_message(Reason(cause.message()));
  while (cause.last_log_lines_size() > 64) cause.mutable_last_log_lines()->RemoveLast();
  for (std::string& line : *cause.mutable_last_log_lines()) line = Cut(line, 1024);
  bool dropped = false;
  if (job->rendezvous().Waits(request.worker_id(), request.incarnation())) {
    job->FenceIncarnation(request.worker_id(), request.incarnation());
    job->DropWaiting(
        request.worker_id(),
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                  absl::StrCat("worker ", Quoted(request.worker_id()),
                               " has ended according to its agent: start a new process")));
    dropped = true;
  }
  // A report about any other incarnation is outdated.
  if (seat != nullptr && seat->record().incarnation() == request.incarnation() &&
      seat->record().state() != v1::WORKER_STATE_EXITED &&
      seat->record().state() != v1::WORKER_STATE_FENCED) {
    job->WorkerGone(seat->rank(), v1::WORKER_STATE_EXITED, cause);
  }
  // This comes last, because a seal replaces the seats.
  if (dropped) job->Evaluate();
  v1::OpResult result;
  *result.mutable_report_exit()->mutable_header() = Header();
  Send(in->call, result, job->membership_record());
}

void Core::Impl::WaitKeys(Incoming* in) {
  const v1::WaitRequest& request = in->op.wait();
  Who who;
  if (auto error = CheckFence(request.fence(), true, &who)) {
    return SendError(in->call, *std::move(error),
                     who.job != nullptr ? who.job->membership_record() : 0);
  }
  in->touched = who.job;
  if (auto error = who.job->kv().CheckWait(request))
    return SendError(in->call, *std::move(error), 0);
  v1::OpResult result;
  if (who.job->kv().StartWait(in->call, request, now_, result.mutable_wait())) {
    *result.mutable_wait()->mutable_header() = Header();
    Send(in->call, result, who.job->AllRecords());
    return;
  }
  held_[in->call] = {who.job->id(), Held::kWait, ""};
}

void Core::Impl::AgreeAlive(Incoming* in) {
  const v1::AgreeAliveRequest& request = in->op.agree_alive();
  Who who;
  if (!CheckRank(in, request.fence(), request.rank(), &who)) return;
  held_[in->call] = {who.job->id(), Held::kBarrier, ""};
  std::vector<AgreeSet::Done> done;
  if (auto error =
          who.job->agree()->Enter(in->call, request, request.rank(), now_, Header(), &done)) {
    held_.erase(in->call);
    return SendError(in->call, *std::move(error), who.job->membership_record());
  }
  who.job->AgreeDone(std::move(done));
}

void Core::Impl::PollTriggers(Incoming* in) {
  const v1::PollTriggersRequest& request = in->op.poll_triggers();
  Who who;
  if (!CheckRank(in, request.fence(), request.rank(), &who)) return;
  v1::OpResult result;
  std::vector<v1::TriggerChanged> changes;
  std::vector<uint64_t> acked;
  if (auto error = who.job->triggers().Poll(request, request.rank(), result.mutable_poll_triggers(),
                                            &changes, &acked)) {
    return SendError(in->call, *std::move(error), 0);
  }
  for (const uint64_t trigger_id : acked) {
    v1::TriggerAcked* change = Change()->mutable_trigger_acked();
    change->set_job_id(who.job->id());
    change->set_trigger_id(trigger_id);
    change->add_ranks(request.rank());
  }
  who.seat->AtStep(request.step());
  who.job->TriggersChanged(std::move(changes));
  *result.mutable_poll_triggers()->mutable_header() = Header();
  Send(in->call, result, who.job->membership_record());
}

void Core::Impl::GetRankTable(Incoming* in) {
  const v1::GetRankTableRequest& request = in->op.get_rank_table();
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(in->call, UnknownJob(request.job_id()), 0);
  if (!job->HasSealed() ||
      (request.generation() != 0 && request.generation() != job->generation())) {
    v1::OpError error =
        MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                  absl::StrCat("the rank table of generation ", request.generation(), " of job ",
                               Quoted(job->id()), " is not kept: ",
                               !job->HasSealed() ? "none has been sealed yet"
                                                 : absl::StrCat(job->generation(), " is current")));
    error.mutable_detail()->set_current_generation(job->generation());
    return SendError(in->call, std::move(error), job->membership_record());
  }
  const int world_size = job->members().size();
  if (request.first_rank() < 0 || request.first_rank() > world_size || request.max_rows() < 0) {
    return SendError(
        in->call,
        BadField("first_rank",
                 absl::StrCat("a page of ", request.max_rows(), " rows from rank ",
                              request.first_rank(), " does not exist in a world of ", world_size)),
        0);
  }
  v1::OpResult result;
  v1::GetRankTableReply* reply = result.mutable_get_rank_table();
  *reply->mutable_header() = Header();
  reply->set_generation(job->generation());
  reply->set_table_digest(job->members().digest());
  reply->set_world_size(world_size);
  reply->set_next_rank(-1);
  if (request.if_digest_differs() != job->members().digest()) {
    const int rows = request.max_rows() == 0
                         ? options_.rank_table_page
                         : std::min(request.max_rows(), 10 * options_.rank_table_page);
    const int end =
        static_cast<int>(std::min<int64_t>(world_size, int64_t{request.first_rank()} + rows));
    for (int rank = request.first_rank(); rank < end; ++rank)
      FillRow(job->seats()[rank].record(), reply->add_rows());
    if (end < world_size) reply->set_next_rank(end);
  }
  Send(in->call, result, job->membership_record());
}

void Core::Impl::GetMembers(Incoming* in) {
  const v1::GetMembersRequest& request = in->op.get_members();
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(in->call, UnknownJob(request.job_id()), 0);
  const int seats = job->members().size();
  const int all = seats + job->rendezvous().size();
  if (request.first() < 0 || (request.first() > all)) {
    return SendError(in->call,
                     BadField("first", absl::StrCat("job ", Quoted(request.job_id()), " has ", all,
                                                    " members, so no page begins at ",
                                                    request.first(), ": list them from 0 again")),
                     job->membership_record());
  }
  v1::OpResult result;
  v1::GetMembersReply* reply = result.mutable_get_members();
  *reply->mutable_header() = Header();
  reply->set_generation(job->generation());
  const std::vector<const Waiter*> waiting = job->rendezvous().ByArrival();
  size_t bytes = 0;
  for (int i = request.first(); i < all; ++i) {
    v1::Member member =
        i < seats ? job->MakeMember(job->seats()[i]) : job->MakeMember(*waiting[i - seats]);
    if (bytes > kMaxMembersBytes / 3 && member.has_exit()) {
      // Ten thousand failed ranks fit into one message, though not the text of each.
      member.mutable_exit()->clear_last_log_lines();
      member.mutable_exit()->set_message(Cut(member.exit().message(), 64));
    }
    bytes += member.ByteSizeLong() + kMemberOverhead;
    if (bytes > kMaxMembersBytes && i > request.first()) {
      reply->set_next(i);
      break;
    }
    *reply->add_members() = std::move(member);
  }
  Send(in->call, result, job->membership_record());
}

void Core::Impl::CaptureStacks(Incoming* in) {
  const v1::CaptureStacksRequest& request = in->op.capture_stacks();
  Job* const job = FindJob(request.job_id());
  if ((job == nullptr || !job->sealed()) && unseated_.Size(request.job_id(), now_) > 0) {
    return CaptureUnseated(in);
  }
  if (job == nullptr) return SendError(in->call, UnknownJob(request.job_id()), 0);
  in->touched = job;
  held_[in->call] = {job->id(), Held::kStacks, ""};
  if (auto error = job->CaptureStacks(in->call, request)) {
    held_.erase(in->call);
    SendError(in->call, *std::move(error), job->membership_record());
  }
}

uint64_t Core::Impl::AskForStack(Query query, int64_t pid, const std::string& node,
                                 uint64_t durable) {
  if (queries_.size() >= kMaxQueries) queries_.erase(queries_.begin());  // the oldest
  const uint64_t number = next_query_++;
  auto directive = std::make_shared<v1::Directive>();
  v1::CollectStack* ask = directive->mutable_collect_stack();
  ask->set_query_id(number);
  ask->set_job_id(query.job_id);
  ask->set_worker_id(query.worker_id);
  ask->set_pid(pid);
  queries_[number] = std::move(query);
  Direct(node, std::move(directive), durable);
  return number;
}

void Core::Impl::CaptureUnseated(Incoming* in) {
  const v1::CaptureStacksRequest& request = in->op.capture_stacks();
  const std::string& job_id = request.job_id();
  StacksAsked wanted;
  if (auto error = CheckStacks(request, unseated_.Size(job_id, now_), &wanted)) {
    return SendError(in->call, *std::move(error), 0);
  }
  if (unseated_.CallsAreFull(job_id)) return SendError(in->call, TooManyStackCalls(job_id), 0);
  held_[in->call] = {job_id, Held::kStacks, ""};
  std::vector<StackCalls::Asked> asked;
  asked.reserve(wanted.ranks.size());
  for (const int32_t rank : wanted.ranks) {
    const Unseated::Process* const process = unseated_.Find(job_id, rank, now_);
    asked.push_back({rank, process == nullptr
                               ? 0
                               : AskForStack({job_id, process->worker_id, /*unseated=*/true},
                                             process->pid, process->node, 0)});
  }
  UnseatedDone(job_id, unseated_.AddCall(job_id, in->call, now_ + wanted.timeout, wanted.next,
                                         std::move(asked)));
}

void Core::Impl::UnseatedDone(const std::string& job_id, std::vector<StackCalls::Done> done) {
  for (const StackCalls::Done& one : done) {
    v1::OpResult result;
    v1::CaptureStacksReply* const reply = result.mutable_capture_stacks();
    *reply->mutable_header() = Header();
    reply->set_next(one.next);
    for (const StackCalls::Asked& asked : one.asked) {
      v1::RankStack* const row = reply->add_stacks();
      v1::Culprit* const worker = row->mutable_worker();
      worker->set_rank(asked.rank);
      const Unseated::Process* const process = unseated_.Find(job_id, asked.rank, now_);
      if (process == nullptr) {
        row->set_missing("no process of it is known here");
        continue;
      }
      worker->set_worker_id(process->worker_id);
      worker->set_host(process->host);
      worker->set_pid(process->pid);
      worker->set_process_state(process->process_state);
      *worker->mutable_heartbeat_age() = ToProto(now_ - process->heard);
      if (!asked.answered) {
        row->set_missing("its agent has not answered in time");
      } else if (process->stack.empty()) {
        row->set_missing("its agent has looked, and there is no stack to be read");
      } else {
        worker->set_native_stack(process->stack);
      }
    }
    // Callers that have disconnected meanwhile are no longer held.
    if (held_.erase(one.call) > 0) Send(one.call, result, 0);
  }
}

void Core::Impl::RemoveJob(Incoming* in) {
  const v1::RemoveJobRequest& request = in->op.remove_job();
  Job* job = nullptr;
  if (auto error = CheckJob(request.fence(), &job))
    return SendError(in->call, *std::move(error), 0);
  job->EndIfNobodyIsHeard("an operator removes the job");
  if (!job->Over()) {
    in->touched = job;
    const std::string restarted_by = job->RestartedBy();
    v1::OpError error = MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_RUNS,
        !restarted_by.empty()
            ? absl::StrCat("job ", Quoted(job->id()), " is being restarted by ", restarted_by,
                           ": stop that agent, then remove the job")
            : absl::StrCat("job ", Quoted(job->id()), " has workers (", job->members().alive(),
                           " seated, ", job->rendezvous().size(), " waiting, state ",
                           job->StateName(), "): stop them, then remove it"));
    error.mutable_detail()->set_current_generation(job->generation());
    return SendError(in->call, std::move(error), job->membership_record());
  }
  Remove(job, "on request of an operator");
  v1::OpResult result;
  *result.mutable_remove_job()->mutable_header() = Header();
  Send(in->call, result, last_record_);
}

void Core::Impl::Leave(Incoming* in) {
  const v1::LeaveRequest& request = in->op.leave();
  const v1::Fence& fence = request.fence();
  Job* const job = FindJob(fence.job_id());
  // Whether the worker had a seat in the generation that has ended before this call.
  const bool had_seat = job != nullptr && !job->sealed() &&
                        job->members().Holds(fence.worker_id(), fence.incarnation()) &&
                        !job->incarnations().IsFenced(fence.worker_id(), fence.incarnation());
  v1::ExitCause cause;
  cause.set_message(Reason(request.reason()));
  Once(in, request, {.operators = false}, [&](Who who, v1::OpResult* result) {
    who.job->WorkerGone(who.seat->rank(), v1::WORKER_STATE_LEFT, cause);
    *result->mutable_leave()->mutable_header() = Header();
    return std::optional<v1::OpError>();
  });
  // A worker that waits for a seat gives up its place, and one that had a seat its claim to
  // another, so no caller waits for it.
  Job* same = nullptr;
  if (job == nullptr || out_->deposed || CheckJob(fence, &same).has_value()) return;
  const bool waits = job->rendezvous().Waits(fence.worker_id(), fence.incarnation());
  if (!had_seat && !waits) return;
  out_->replies.resize(first_reply_);
  if (waits) {
    job->DropWaiting(fence.worker_id(),
                     MakeError(absl::StatusCode::kCancelled, v1::ERROR_REASON_NOT_MEMBER,
                               absl::StrCat("worker ", Quoted(fence.worker_id()),
                                            " left while it waited for a seat")));
  }
  if (had_seat) job->LeaveBetween(fence.worker_id(), cause);
  job->Evaluate();  // last: a seal replaces the seats
  v1::OpResult result;
  *result.mutable_leave()->mutable_header() = Header();
  Send(in->call, result, had_seat ? job->membership_record() : 0);
  in->touched = job;
}

void Core::Impl::EndGeneration(Incoming* in) {
  const v1::EndGenerationRequest& request = in->op.end_generation();
  Once(in, request, {.operators = true}, [&](Who who, v1::OpResult* result) {
    who.job->EndGeneration(
        absl::StrCat("ended on request of ", CallerText(who.seat),
                     request.reason().empty() ? "" : ": ", Reason(request.reason())),
        {});
    v1::EndGenerationReply* reply = result->mutable_end_generation();
    *reply->mutable_header() = Header();
    // The waiting workers may have been enough for the next generation at once.
    reply->set_next_generation(who.job->sealed() ? who.job->generation()
                                                 : who.job->generation() + 1);
    return std::optional<v1::OpError>();
  });
}

void Core::Impl::CancelBarrier(Incoming* in) {
  const v1::CancelBarrierRequest& request = in->op.cancel_barrier();
  Once(in, request, {.operators = true},
       [&](Who who, v1::OpResult* result) -> std::optional<v1::OpError> {
         if (who.job->sealed()) {
           if (auto error = who.job->barriers()->Cancel(request.barrier_id(), request.counter(),
                                                        CallerText(who.seat),
                                                        Reason(request.reason()), now_)) {
             return error;
           }
         }
         *result->mutable_cancel_barrier()->mutable_header() = Header();
         return std::nullopt;
       });
}

void Core::Impl::RecallBarriers(Incoming* in) {
  // Rows report what their caller saw; a stale caller has nothing to report.
  Job* job = nullptr;
  const v1::RecallBarriersRequest& request = in->op.recall_barriers();
  const v1::Fence& fence = request.fence();
  std::optional<v1::OpError> error = CheckJob(fence, &job);
  if (!error.has_value()) error = job->CheckGeneration(fence);
  if (!error.has_value() && !job->sealed()) error = job->Ended();
  if (!error.has_value()) {
    // The caller may be an agent, which has no seat.
    const Seat* const seat = job->FindSeat(fence.worker_id());
    const uint64_t newest = seat != nullptr ? seat->record().incarnation() : 0;
    if (job->incarnations().IsFenced(fence.worker_id(), fence.incarnation()) ||
        (newest != 0 && newest != fence.incarnation())) {
      error = job->Superseded(fence.worker_id(), newest);
    }
  }
  if (error.has_value()) {
    return SendError(in->call, *std::move(error), job != nullptr ? job->membership_record() : 0);
  }
  in->touched = job;
  for (const v1::SeenBarrier& seen : request.seen()) {
    if (options_.mutants.ignores_recall) break;
    job->barriers()->Recall(seen.barrier_id(), seen.counter(), seen.state());
  }
  v1::OpResult result;
  *result.mutable_recall_barriers()->mutable_header() = Header();
  Send(in->call, result, job->membership_record());
}

void Core::Impl::Txn(Incoming* in) {
  const v1::TxnRequest& request = in->op.txn();
  Once(in, request,
       {.operators = true, .reads = KvStore::Reads(request), .writes = KvStore::Writes(request)},
       [&](Who who, v1::OpResult* result) { return who.job->Txn(request, who.seat, result); });
}

void Core::Impl::RaiseTrigger(Incoming* in) {
  const v1::RaiseTriggerRequest& request = in->op.raise_trigger();
  Once(in, request, {.operators = true},
       [&](Who who, v1::OpResult* result) -> std::optional<v1::OpError> {
         if (who.job->Over()) {
           v1::OpError error = MakeError(
               absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_ENDED,
               absl::StrCat("no worker of job ", Quoted(who.job->id()),
                            " is left to act on trigger ", Quoted(request.name()),
                            who.job->members().why_ended().empty() ? "" : ": ",
                            who.job->members().why_ended(), "; raise it when the job runs again"));
           error.mutable_detail()->set_current_generation(who.job->generation());
           return error;
         }
         std::vector<v1::TriggerChanged> changes;
         v1::RaiseTriggerReply* reply = result->mutable_raise_trigger();
         if (auto error = who.job->triggers().Raise(
                 request, who.seat != nullptr ? who.seat->rank() : -1,
                 event_revision_ != 0 ? event_revision_ : revision_ + 1, reply, &changes)) {
           return error;
         }
         Rev();
         ++stats_.triggers_raised;
         who.job->TriggersChanged(std::move(changes));
         *reply->mutable_header() = Header();
         return std::nullopt;
       });
}

void Core::Impl::QuarantineHost(Incoming* in) {
  const v1::QuarantineRequest& request = in->op.quarantine();
  Once(in, request, {.operators = true},
       [&](Who who, v1::OpResult* result) -> std::optional<v1::OpError> {
         if (auto error = CheckName("host", request.host())) return error;
         if (!who.job->quarantine().HasRoomFor(request.host())) {
           return TooLarge(
               "host", absl::StrCat("job ", Quoted(who.job->id()), " has ", Quarantine::kMaxHosts,
                                    " hosts in quarantine or struck: lift some of "
                                    "them first"));
         }
         const absl::Duration length = FromProto(request.for_());
         if (length < absl::ZeroDuration()) {
           return BadField("for", "the length of a quarantine is negative: 0 lifts it");
         }
         who.job->QuarantineHost(request.host(), std::min(length, absl::Hours(24 * 365)),
                                 Reason(request.reason()), false);
         who.job->Evaluate();
         *result->mutable_quarantine()->mutable_header() = Header();
         return std::nullopt;
       });
}

void Core::Impl::DescribeBarrier(Incoming* in) {
  const v1::DescribeBarrierRequest& request = in->op.describe_barrier();
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(in->call, UnknownJob(request.job_id()), 0);
  v1::OpResult result;
  *result.mutable_describe_barrier()->mutable_header() = Header();
  std::optional<v1::OpError> error;
  if (job->barriers() != nullptr) {
    error = job->barriers()->Describe(request.barrier_id(), request.counter(), now_,
                                      result.mutable_describe_barrier()->mutable_report());
  } else {
    error = MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                      absl::StrCat("job ", Quoted(request.job_id()),
                                   " has had no generation yet, so no barriers"));
  }
  if (error.has_value()) return SendError(in->call, *std::move(error), job->AllRecords());
  Send(in->call, result, job->AllRecords());
}

void Core::Impl::ListBarriers(Incoming* in) {
  const v1::ListBarriersRequest& request = in->op.list_barriers();
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(in->call, UnknownJob(request.job_id()), 0);
  v1::OpResult result;
  *result.mutable_list_barriers()->mutable_header() = Header();
  if (job->barriers() != nullptr) {
    job->barriers()->List(request.only_open(), now_, result.mutable_list_barriers());
  }
  Send(in->call, result, job->AllRecords());
}

void Core::Impl::StragglerReport(Incoming* in) {
  const v1::StragglerReportRequest& request = in->op.straggler_report();
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(in->call, UnknownJob(request.job_id()), 0);
  v1::OpResult result;
  *result.mutable_straggler_report()->mutable_header() = Header();
  if (job->barriers() != nullptr) job->barriers()->Stragglers(result.mutable_straggler_report());
  Send(in->call, result, job->AllRecords());
}

void Core::Impl::Checkpoint(Incoming* in) {
  const v1::Op& op = in->op;
  // Answers reveal earlier changes, which must be durable.
  const auto once = [&](const auto& request, bool operators, bool writes) {
    Once(
        in, request, {.operators = operators, .reads = true, .writes = writes},
        [&](Who who, v1::OpResult* result) { return who.job->CheckpointOp(op, who.seat, result); });
  };
  switch (op.kind_case()) {
    case v1::Op::kBeginCheckpoint:
      return once(op.begin_checkpoint(), false, true);
    case v1::Op::kReportShards:
      // Not remembered: a repeated part is recognised by its number.
      return once(op.report_shards(), false, false);
    case v1::Op::kSealCheckpoint:
      return once(op.seal_checkpoint(), false, true);
    case v1::Op::kPublishCheckpoint:
      return once(op.publish_checkpoint(), false, true);
    case v1::Op::kAbortCheckpoint:
      return once(op.abort_checkpoint(), true, true);
    case v1::Op::kCheckpointDeleted:
      return once(op.checkpoint_deleted(), true, true);
    case v1::Op::kMarkCheckpoint:
      return once(op.mark_checkpoint(), true, true);
    case v1::Op::kVerifyCheckpoint:
      return once(op.verify_checkpoint(), true, true);
    case v1::Op::kCollectCheckpoints:
      return once(op.collect_checkpoints(), true, true);
    case v1::Op::kResolveCheckpoint:
      return once(op.resolve_checkpoint(), true, false);
    default:
      return once(op.list_checkpoints(), true, false);
  }
}

// Every kind of operation: the method that does it, and whether it may be refused while the journal
// cannot be written.
constexpr Core::Impl::Operation Core::Impl::kOperations[] = {
    {v1::Op::kJoin, &Impl::Join, Journal::kNeeded},
    {v1::Op::kLeave, &Impl::Leave, Journal::kNotNeeded},
    {v1::Op::kEndGeneration, &Impl::EndGeneration, Journal::kNeeded},
    {v1::Op::kArrive, &Impl::Arrive, Journal::kNotNeeded},
    {v1::Op::kArriveMany, &Impl::ArriveMany, Journal::kNotNeeded},
    {v1::Op::kCancelBarrier, &Impl::CancelBarrier, Journal::kNotNeeded},
    {v1::Op::kRecallBarriers, &Impl::RecallBarriers, Journal::kNotNeeded},
    {v1::Op::kTxn, &Impl::Txn, Journal::kForDurableKeys},
    {v1::Op::kWait, &Impl::WaitKeys, Journal::kNotNeeded},
    {v1::Op::kRaiseTrigger, &Impl::RaiseTrigger, Journal::kNeeded},
    {v1::Op::kPollTriggers, &Impl::PollTriggers, Journal::kNotNeeded},
    {v1::Op::kHeartbeat, &Impl::Heartbeat, Journal::kNotNeeded},
    {v1::Op::kReportExit, &Impl::ReportExit, Journal::kNotNeeded},
    {v1::Op::kAgreeAlive, &Impl::AgreeAlive, Journal::kNotNeeded},
    {v1::Op::kQuarantine, &Impl::QuarantineHost, Journal::kNeeded},
    {v1::Op::kRemoveJob, &Impl::RemoveJob, Journal::kNeeded},
    {v1::Op::kBeginCheckpoint, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kReportShards, &Impl::Checkpoint, Journal::kNotNeeded},
    {v1::Op::kSealCheckpoint, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kPublishCheckpoint, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kAbortCheckpoint, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kCheckpointDeleted, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kMarkCheckpoint, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kVerifyCheckpoint, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kCollectCheckpoints, &Impl::Checkpoint, Journal::kNeeded},
    {v1::Op::kResolveCheckpoint, &Impl::Checkpoint, Journal::kNotNeeded},
    {v1::Op::kListCheckpoints, &Impl::Checkpoint, Journal::kNotNeeded},
    {v1::Op::kSubmitJob, &Impl::Submitted, Journal::kNeeded},
    {v1::Op::kControlJob, &Impl::Submitted, Journal::kNeeded},
    {v1::Op::kGetJob, &Impl::Submitted, Journal::kNotNeeded},
    {v1::Op::kListJobs, &Impl::Submitted, Journal::kNotNeeded},
    {v1::Op::kReadJobLog, &Impl::Submitted, Journal::kNotNeeded},
    {v1::Op::kSyncNode, &Impl::Submitted, Journal::kNotNeeded},
    {v1::Op::kAnswerLog, &Impl::Submitted, Journal::kNotNeeded},
    {v1::Op::kControlNode, &Impl::Submitted, Journal::kNeeded},
    {v1::Op::kListNodes, &Impl::Submitted, Journal::kNotNeeded},
    {v1::Op::kGetRankTable, &Impl::GetRankTable, Journal::kNotNeeded},
    {v1::Op::kDescribeBarrier, &Impl::DescribeBarrier, Journal::kNotNeeded},
    {v1::Op::kListBarriers, &Impl::ListBarriers, Journal::kNotNeeded},
    {v1::Op::kStragglerReport, &Impl::StragglerReport, Journal::kNotNeeded},
    {v1::Op::kGetMembers, &Impl::GetMembers, Journal::kNotNeeded},
    {v1::Op::kCaptureStacks, &Impl::CaptureStacks, Journal::kNotNeeded},
};

const Core::Impl::Operation* Core::Impl::FindOperation(const v1::Op& op) {
  for (const Operation& operation : kOperations) {
    if (operation.kind == op.kind_case()) return &operation;
  }
  return nullptr;
}

std::optional<v1::OpError> Core::Impl::CheckAttempt(absl::string_view group) const {
  const std::optional<std::string> why = WhyGroupEnded(group);
  if (!why.has_value() && submitted_->AttemptOf(group).has_value()) return std::nullopt;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
      absl::StrCat(why.value_or(absl::StrCat("attempt ", Quoted(group), " has been removed")),
                   ": its token has ended with it"));
}

std::optional<v1::OpError> Core::Impl::CheckIdentity(const Identity& who, const v1::Op& op) {
  // The id of a submitted job is not the name of a rendezvous job: that may be another user's.
  const auto owner_of = [&](absl::string_view job) {
    return submitted_->AttemptOf(job).has_value() == op.has_control_job() ? "" : OwnerOf(job);
  };
  if (auto error = CheckAccess(who, op, owner_of)) {
    ++stats_.refused_calls;
    return error;
  }
  if (who.role != Role::kAttempt || op.has_leave() || op.has_report_exit()) return std::nullopt;
  return CheckAttempt(who.group);
}

Core::Impl::Job* Core::Impl::HandleOp(CallId call, const v1::Op& op, const Caller& caller) {
  caller_node_ = caller.node;
  const Identity* const who = caller.identity;
  caller_may_depose_ = who == nullptr || who->role == Role::kAdmin;
  std::optional<v1::Op> unnamed;
  if (who != nullptr) {
    if (const std::optional<v1::OpError> error = CheckIdentity(*who, op)) {
      SendError(call, *error, 0);
      return nullptr;
    }
    // A person is no worker: naming one would renew its lease.
    if (who->role == Role::kView || who->role == Role::kSubmit) {
      ForgetWorker(who->name, &unnamed.emplace(op));
    }
  }
  Incoming in{call, unnamed.has_value() ? *unnamed : op, caller};
  if (const Operation* const operation = FindOperation(op)) {
    (this->*operation->run)(&in);
  } else {
    SendError(call,
              BadField("kind",
                       "the operation is of a kind that this server does not know: use a client of "
                       "its version"),
              0);
  }
  return in.touched;
}

bool Core::NeedsJournal(const v1::Op& op) {
  const Impl::Operation* const operation = Impl::FindOperation(op);
  if (operation == nullptr) return false;
  if (operation->journal != Impl::Journal::kForDurableKeys) {
    return operation->journal == Impl::Journal::kNeeded;
  }
  const auto durable = [](const google::protobuf::RepeatedPtrField<v1::KvOp>& ops) {
    return std::any_of(ops.begin(), ops.end(), [](const v1::KvOp& one) {
      return one.put().klass() == v1::KV_CLASS_DURABLE ||
             one.add().klass() == v1::KV_CLASS_DURABLE ||
             one.append().klass() == v1::KV_CLASS_DURABLE;
    });
  };
  return durable(op.txn().then()) || durable(op.txn().otherwise());
}

}  // namespace muster::coordinator
