#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr int kMaxWorkers = 1 << 20;
constexpr size_t kMaxMembersBytes = 3 << 20;  // of one page: a message has at most 4 MiB
constexpr size_t kMemberOverhead = 4;         // tag and length

std::optional<v1::OpError> CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty())
    return BadField(field, absl::StrCat(field, " is empty: it has 1 to ", kMaxName, " bytes"));
  if (name.size() > kMaxName) {
    return TooLarge(field, absl::StrCat(field, " ", Quoted(name), " has ", name.size(),
                                        " bytes: at most ", kMaxName));
  }
  return std::nullopt;
}

// What somebody gives as a reason stands in errors, each of which is one line.
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

// Whether both ask for the same job. How long each goes on without the coordinator is its own
// affair.
bool SameSpec(v1::RendezvousSpec a, v1::RendezvousSpec b) {
  a.clear_outage_tolerance();
  b.clear_outage_tolerance();
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

std::optional<v1::OpError> Core::Impl::CheckJob(const v1::Fence& fence, Job** job) {
  *job = FindJob(fence.job_id());
  // Its terms are not ours: a process that is left over from them must not depose us.
  if (fence.cluster() != 0 && cluster_ != 0 && fence.cluster() != cluster_) {
    v1::OpError error =
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_OTHER_CLUSTER,
                  absl::StrCat("the caller worked with another coordinator's data than this one's "
                               "(cluster ",
                               options_.cluster_id,
                               "): the data directory was changed, or the address went to another "
                               "coordinator; start the job again"));
    error.mutable_detail()->set_current_term(term_);
    return error;
  }
  if (IsAhead(fence)) return Ahead(fence, *job);
  if (*job == nullptr) return UnknownJob(fence.job_id());
  return std::nullopt;
}

std::string Core::Impl::Impossible(const v1::Fence& fence) const {
  const uint64_t seen = fence.term_seen();
  if (seen > std::min(kMaxTerm, term_ + kMaxTermsAhead)) {
    return absl::StrCat("no coordinator of this cluster can have begun more than ",
                        std::min(kMaxTermsAhead, kMaxTerm - term_),
                        " terms since: the caller's state is corrupt; restart it");
  }
  const uint64_t term_of_revision = fence.revision_seen() >> kRevisionBits;
  if (term_of_revision > std::max(seen, term_)) {
    return absl::StrCat("that revision is of term ", term_of_revision,
                        ", which the caller has not seen: the caller's state is corrupt; restart it");
  }
  return "";
}

v1::OpError Core::Impl::Ahead(const v1::Fence& fence, const Job* job) {
  const std::string seen =
      fence.term_seen() > term_
          ? absl::StrCat("this coordinator serves term ", term_, ", but the caller has seen term ",
                         fence.term_seen())
          : absl::StrCat("this coordinator is at revision ", revision_,
                         ", but the caller has seen revision ", fence.revision_seen());
  constexpr absl::string_view kWayOut =
      ": if another coordinator took over, that one serves; if this one began from an older copy "
      "of the data directory, stop it, run muster-coordinator --restored DIRECTORY and start it "
      "again";
  const bool same_cluster = cluster_ != 0 && fence.cluster() == cluster_;
  // Numbers that no coordinator of this cluster can have given out prove a broken caller, member or
  // not.
  if (const std::string why = same_cluster ? Impossible(fence) : ""; !why.empty()) {
    ++stats_.unproven_deposals;
    v1::OpError error = BadField("fence.term_seen", absl::StrCat(seen, ", and ", why));
    error.mutable_detail()->set_current_term(term_);
    return error;
  }
  const bool proven = same_cluster && job != nullptr && job->IsMember(fence, caller_node_);
  v1::OpError error;
  if (proven) {
    out_->deposed = true;
    out_->deposed_why = absl::StrCat(seen, " (job ", Quoted(fence.job_id()), ", worker ",
                                     Quoted(fence.worker_id()), ")", kWayOut);
    error = MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_STOPPING,
                      absl::StrCat(seen, kWayOut));
  } else {
    const std::string refusal =
        same_cluster ? absl::StrCat(seen, ", and it is no member of a job here", kWayOut)
                     : absl::StrCat(seen,
                                    " and does not say of which cluster: name the cluster of "
                                    "the reply that said so (Fence.cluster)");
    // Anybody can send these: the log has the first, the second, the fourth and so on.
    const uint64_t count = ++stats_.unproven_deposals;
    if ((count & (count - 1)) == 0)
      Note(Cut(fence.job_id(), kMaxName), true,
           absl::StrCat(refusal, "; refused, ", count, " so far"));
    error = MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_STALE_TERM, refusal);
  }
  error.mutable_detail()->set_current_term(term_);
  return error;
}

void Core::Impl::CheckAgent(absl::string_view node, const v1::Hello& hello) {
  v1::Fence fence;
  fence.set_term_seen(hello.term_seen());
  if (!serving_ || !IsAhead(fence) || hello.cluster_id() != options_.cluster_id) return;
  fence.set_cluster(cluster_);
  fence.set_worker_id(std::string(node));
  caller_node_ = node;
  const Job* job = nullptr;
  for (const auto& [id, one] : jobs_) {
    if (!one->HasNode(node)) continue;
    fence.set_job_id(id);
    job = one.get();
    break;
  }
  Ahead(fence, job);
}

std::optional<v1::OpError> Core::Impl::CheckFence(const v1::Fence& fence, bool operators,
                                                  Who* who) {
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return error;
  who->job = job;
  const auto refuse = [&](v1::OpError error) {
    ++stats_.fenced_calls;
    error.mutable_detail()->set_current_generation(job->generation_);
    error.mutable_detail()->set_current_term(term_);
    return error;
  };
  if (fence.worker_id().empty()) {
    if (!operators) {
      return BadField("fence.worker_id",
                      "only a seated worker may call this: fence.worker_id is empty");
    }
    if (fence.generation() != 0) {
      if (auto error = job->CheckGeneration(fence)) return refuse(*std::move(error));
    }
    return std::nullopt;
  }
  Seat* const seat = job->FindSeat(fence.worker_id());
  const bool waits = job->rendezvous_.Waits(fence.worker_id());
  const uint64_t newest = job->NewestOf(fence.worker_id());
  if (job->incarnations_.IsFenced(fence.worker_id(), fence.incarnation())) {
    return refuse(job->Superseded(fence.worker_id(), newest));
  }
  if (seat != nullptr && seat->record.incarnation() != fence.incarnation() &&
      !(waits && newest == fence.incarnation())) {
    return refuse(job->Superseded(fence.worker_id(), newest));
  }
  if (auto error = job->CheckGeneration(fence)) return refuse(*std::move(error));
  if (!job->sealed_ && seat != nullptr) return refuse(job->Ended());
  if (seat == nullptr || seat->record.incarnation() != fence.incarnation()) {
    return refuse(
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                  absl::StrCat("worker ", Quoted(fence.worker_id()), " has no seat in generation ",
                               job->generation_, " of job ", Quoted(job->id_), ": join first")));
  }
  switch (seat->record.state()) {
    case v1::WORKER_STATE_RUNNING:
      break;
    case v1::WORKER_STATE_LOST:
      return refuse(MakeError(
          absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_LEASE_EXPIRED,
          absl::StrCat("the lease of worker ", Quoted(fence.worker_id()), " (rank ", seat->rank(),
                       ") ran out after ", absl::FormatDuration(job->Lease()),
                       " without a sign of life: join again")));
    default:
      return refuse(
          MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                    absl::StrCat("worker ", Quoted(fence.worker_id()), " (rank ", seat->rank(),
                                 ") ", job->GoneText(*seat), ": join again if it lives")));
  }
  job->RenewLease(seat);
  who->seat = seat;
  return std::nullopt;
}

template <typename Request, typename F>
void Core::Impl::Once(CallId call, const Request& request, int kind, Rules rules, Job** touched,
                      F f) {
  const v1::Fence& fence = request.fence();
  const bool dedupe = rules.writes && RememberedAnswers::CanRemember(fence);
  uint64_t hash = 0;
  if (dedupe) {
    if (Job* const job = FindJob(fence.job_id()); job != nullptr && !IsAhead(fence)) {
      hash = HashRequest(request, kind);
      StoredAnswer stored;
      switch (job->answers_.Find(fence, hash, &stored)) {
        case RememberedAnswers::State::kKnown:
          ++stats_.repeated_requests;
          Send(call, stored.answer,
               std::max(stored.durable_revision, rules.reads ? job->kv_record_ : 0));
          return;
        case RememberedAnswers::State::kReused:
          SendError(
              call,
              MakeError(
                  absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_KEY_REUSED,
                  absl::StrCat(
                      "request_id ", fence.request_id(), " of worker ", Quoted(fence.worker_id()),
                      " was used for another request: count on by one for each new request")),
              0);
          return;
        case RememberedAnswers::State::kForgotten:
          SendError(
              call,
              MakeError(absl::StatusCode::kOutOfRange, v1::ERROR_REASON_RESULT_FORGOTTEN,
                        absl::StrCat("request_id ", fence.request_id(), " of worker ",
                                     Quoted(fence.worker_id()), " is older than the last ",
                                     options_.kept_answers,
                                     " answers that are kept: whether it took effect is unknown")),
              0);
          return;
        case RememberedAnswers::State::kNew:
          break;
      }
    }
  }
  Who who;
  if (auto error = CheckFence(fence, rules.operators, &who)) {
    SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
    return;
  }
  *touched = who.job;
  auto* const result = google::protobuf::Arena::CreateMessage<v1::OpResult>(&arena_);
  if (auto error = f(who, result)) {
    SendError(call, *std::move(error),
              rules.reads ? who.job->AllRecords() : who.job->membership_record_);
    return;
  }
  auto answer = std::make_shared<Answer>(*result);
  if (dedupe) {
    uint64_t durable = 0;
    if (record_ != nullptr) {
      durable = Rev();
      v1::RequestAnswered* answered = Change()->mutable_request_answered();
      answered->set_job_id(who.job->id_);
      answered->set_worker_id(fence.worker_id());
      answered->set_incarnation(fence.incarnation());
      answered->set_request_id(fence.request_id());
      answered->set_request_hash(hash);
      answered->unsafe_arena_set_allocated_answer(result);
    }
    who.job->answers_.Remember(fence.worker_id(), fence.incarnation(), fence.request_id(), hash,
                               {answer, durable});
  }
  Send(call, std::move(answer), rules.reads ? who.job->AllRecords() : who.job->membership_record_);
}

void Core::Impl::Join(CallId call, const v1::JoinRequest& request, const Caller& caller,
                      Job** touched) {
  const v1::Fence& fence = request.fence();
  const auto fail = [&](v1::OpError error, uint64_t durable = 0) {
    SendError(call, std::move(error), durable);
  };
  if (auto error = CheckName("fence.job_id", fence.job_id())) return fail(*std::move(error));
  if (auto error = CheckName("fence.worker_id", fence.worker_id())) return fail(*std::move(error));
  if (fence.incarnation() == 0) {
    return fail(BadField("fence.incarnation",
                         absl::StrCat("worker ", Quoted(fence.worker_id()),
                                      " has incarnation 0: draw a random one at process start")));
  }
  const std::pair<const char*, const std::string*> texts[] = {
      {"topology.host", &request.topology().host()},
      {"topology.rack", &request.topology().rack()},
      {"topology.nvlink_domain", &request.topology().nvlink_domain()},
      {"endpoint", &request.endpoint()}};
  for (const auto& [field, text] : texts) {
    if (text->size() > kMaxName) {
      return fail(
          TooLarge(field, absl::StrCat(field, " of worker ", Quoted(fence.worker_id()), " has ",
                                       text->size(), " bytes: at most ", kMaxName)));
    }
  }
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) {
    // That the job is unknown is no error here: this is how it begins, also for whoever comes from
    // another cluster.
    const v1::ErrorReason reason = error->detail().reason();
    if (reason == v1::ERROR_REASON_STOPPING || reason == v1::ERROR_REASON_STALE_TERM ||
        reason == v1::ERROR_REASON_BAD_FIELD)
      return fail(*std::move(error));
  }
  if (request.has_spec()) {
    if (auto error = CheckSpec(request.spec())) return fail(*std::move(error));
  }
  const bool other_spec =
      job != nullptr && request.has_spec() && !SameSpec(request.spec(), job->spec_);
  if (other_spec) {
    *touched = job;
    job->EndIfNobodyIsHeard("another job of this name begins");
  }
  // The name of a job that is over is free for another one.
  const bool begins = job == nullptr || (other_spec && !job->closed_ && job->Over());
  const int max_workers = begins ? request.spec().max_workers() : job->spec_.max_workers();
  if (job == nullptr && !request.has_spec()) {
    return fail(
        BadField("spec", absl::StrCat("job ", Quoted(fence.job_id()), " is new and worker ",
                                      Quoted(fence.worker_id()),
                                      " brings no rendezvous spec: the first worker must")));
  }
  if (request.preferred_rank() < -1 || request.preferred_rank() >= max_workers) {
    return fail(
        BadField("preferred_rank",
                 absl::StrCat("worker ", Quoted(fence.worker_id()), " prefers rank ",
                              request.preferred_rank(), " in a job of at most ", max_workers,
                              " workers: use 0 to ", max_workers - 1, ", or -1 for any")));
  }
  if (begins) {
    // Its generations are counted on, so that whoever is left over of the former one is behind.
    const uint64_t generation = job != nullptr ? job->generation_ : 0;
    if (job != nullptr) {
      *touched = nullptr;
      // In one record with the begin of the new one: a crash leaves both jobs or the new one.
      Remove(job,
             absl::StrCat("it is over, and another job of this name begins (",
                          request.spec().min_workers(), ":", request.spec().max_workers(),
                          " workers)"),
             /*replaced=*/true);
    }
    auto owned = std::make_unique<Job>(this, fence.job_id());
    job = owned.get();
    job->spec_ = request.spec();
    job->generation_ = generation;
    jobs_[fence.job_id()] = std::move(owned);
    v1::JobCreated* created = Change()->mutable_job_created();
    created->set_job_id(job->id_);
    *created->mutable_spec() = job->spec_;
    created->set_generation(generation);
    job->membership_touched_ = true;
  } else if (job->closed_) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
                          absl::StrCat("job ", Quoted(job->id_), " is over: ", job->why_ended_)),
                job->membership_record_);
  } else if (other_spec) {
    return fail(BadField(
        "spec",
        absl::StrCat("worker ", Quoted(fence.worker_id()), " brings another rendezvous spec (",
                     request.spec().min_workers(), ":", request.spec().max_workers(), ") than job ",
                     Quoted(job->id_), " was begun with (", job->spec_.min_workers(), ":",
                     job->spec_.max_workers(), ") and ",
                     job->RestartedBy().empty()
                         ? "workers of it are alive"
                         : absl::StrCat("it is being started again by ", job->RestartedBy()),
                     ": use the same, or another job id, or wait until it has ended")));
  }
  *touched = job;
  Seat* const seat = job->FindSeat(fence.worker_id());
  const Incarnations& incarnations = job->incarnations_;
  const std::optional<uint64_t> departed = incarnations.Departed(fence.worker_id());
  if (departed.has_value() && *departed != fence.incarnation() &&
      !incarnations.IsFenced(fence.worker_id(), *departed) &&
      !incarnations.IsFenced(fence.worker_id(), fence.incarnation())) {
    job->FenceIncarnation(fence.worker_id(), *departed);
  }
  if (incarnations.IsFenced(fence.worker_id(), fence.incarnation())) {
    ++stats_.fenced_calls;
    return fail(job->Superseded(fence.worker_id(), job->NewestOf(fence.worker_id())),
                job->membership_record_);
  }
  if (seat != nullptr && seat->record.incarnation() == fence.incarnation() &&
      seat->record.state() == v1::WORKER_STATE_EXITED) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                          absl::StrCat("this incarnation of worker ", Quoted(fence.worker_id()),
                                       " ", job->GoneText(*seat),
                                       " according to its agent: start a new process")),
                job->membership_record_);
  }
  if (seat != nullptr && job->sealed_) {
    const bool same = seat->record.incarnation() == fence.incarnation();
    if (same && seat->alive()) {
      // A retry: its first answer was lost.
      job->RenewLease(seat);
      job->SendSeat(call, *seat);
      return;
    }
    if (!job->spec_.end_generation_on_failure() && seat->record.state() != v1::WORKER_STATE_LEFT) {
      job->Reseat(seat, call, request, caller);
      return;
    }
    if (!same) {
      const uint64_t old = seat->record.incarnation();
      if (seat->alive()) {
        job->Kill(seat->record.node(), fence.worker_id(), old);
        job->WorkerGone(seat, v1::WORKER_STATE_FENCED, v1::ExitCause());
      }
      job->FenceIncarnation(fence.worker_id(), old);
    }
  } else if (seat != nullptr && seat->record.incarnation() != fence.incarnation()) {
    job->FenceIncarnation(fence.worker_id(), seat->record.incarnation());
    if (seat->alive()) job->WorkerGone(seat, v1::WORKER_STATE_FENCED, v1::ExitCause());
  }
  job->Enqueue(call, request, caller);
}

void Core::Impl::Arrive(CallId call, const v1::ArriveRequest& request, Job** touched) {
  Who who;
  if (auto error = CheckFence(request.fence(), false, &who)) {
    SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
    return;
  }
  *touched = who.job;
  if (request.rank() != who.seat->rank()) {
    SendError(call,
              BadField("rank", absl::StrCat("worker ", Quoted(request.fence().worker_id()),
                                            " holds rank ", who.seat->rank(), ", not ",
                                            request.rank(), ": use the rank of the join reply")),
              who.job->membership_record_);
    return;
  }
  who.seat->step = std::max(who.seat->step, request.step());
  const int32_t rank = request.rank();
  Arrival arrival;
  arrival.call = call;
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
  held_[call] = {who.job->id_, Held::kBarrier, ""};
  if (auto error = who.job->barriers_->Arrive(arrival, now_)) {
    held_.erase(call);
    SendError(call, *std::move(error), who.job->AllRecords());
  }
}

void Core::Impl::ArriveMany(CallId call, const v1::ArriveManyRequest& request, const Caller& caller,
                            Job** touched) {
  const v1::Fence& fence = request.fence();
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return SendError(call, *std::move(error), 0);
  const auto fail = [&](v1::OpError error) {
    ++stats_.fenced_calls;
    error.mutable_detail()->set_current_generation(job->generation_);
    error.mutable_detail()->set_current_term(term_);
    SendError(call, std::move(error), job->membership_record_);
  };
  if (auto error = job->CheckGeneration(fence)) return fail(*std::move(error));
  if (!job->sealed_) return fail(job->Ended());
  *touched = job;
  if (request.incarnations_size() != request.ranks_size()) {
    return fail(BadField(
        "incarnations",
        absl::StrCat("barrier ", Quoted(request.barrier_id()), " got ", request.incarnations_size(),
                     " incarnations for ", request.ranks_size(), " ranks: give one for each")));
  }
  const int world_size = static_cast<int>(job->seats_.size());
  for (int i = 0; i < request.ranks_size(); ++i) {
    const int rank = request.ranks(i);
    if (rank < 0 || rank >= world_size) {
      return fail(BadField(
          "ranks", absl::StrCat("rank ", rank, " does not exist in a world of ", world_size)));
    }
    const Seat& seat = job->seats_[rank];
    if (seat.record.incarnation() != request.incarnations(i)) {
      return fail(job->Superseded(seat.record.worker_id(), seat.record.incarnation()));
    }
    if (!seat.alive()) {
      return fail(
          MakeError(absl::StatusCode::kFailedPrecondition,
                    seat.record.state() == v1::WORKER_STATE_LOST ? v1::ERROR_REASON_LEASE_EXPIRED
                                                                 : v1::ERROR_REASON_NOT_MEMBER,
                    absl::StrCat("rank ", rank, " (worker ", Quoted(seat.record.worker_id()), ") ",
                                 job->GoneText(seat), ": it cannot arrive at a barrier")));
    }
  }
  const uint64_t agent = agents_.NumberOf(caller.node);
  for (const int rank : request.ranks()) {
    Seat& seat = job->seats_[rank];
    job->RenewLease(&seat);
    seat.step = std::max(seat.step, request.step());
    if (!caller.node.empty()) job->HeardThrough(&seat, caller.node, agent);
  }
  Arrival arrival;
  arrival.call = call;
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
  held_[call] = {job->id_, Held::kBarrier, ""};
  if (auto error = job->barriers_->Arrive(arrival, now_)) {
    held_.erase(call);
    SendError(call, *std::move(error), job->AllRecords());
  }
}

void Core::Impl::Heartbeat(CallId call, const v1::HeartbeatRequest& request, Job** touched) {
  const v1::Fence& fence = request.fence();
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return SendError(call, *std::move(error), 0);
  *touched = job;
  const auto answer = [&] {
    v1::OpResult result;
    v1::HeartbeatReply* reply = result.mutable_heartbeat();
    *reply->mutable_header() = Header();
    reply->set_generation(job->generation_);
    reply->set_generation_ended(!job->sealed_ || fence.generation() < job->generation_);
    if (reply->generation_ended()) {
      reply->set_why(!job->sealed_
                         ? job->why_ended_
                         : absl::StrCat("generation ", job->generation_, " has been sealed"));
    }
    Send(call, result, job->membership_record_);
  };
  Seat* const seat = job->FindSeat(fence.worker_id());
  if (options_.mutants.dead_incarnation_renews_lease && seat != nullptr) {
    job->RenewLease(seat);
    return answer();
  }
  Who who;
  if (auto error = CheckFence(fence, false, &who)) {
    const v1::ErrorReason reason = error->detail().reason();
    // Behind, but not dead: what it must know is in the reply.
    if (reason == v1::ERROR_REASON_STALE_GENERATION) return answer();
    if (reason == v1::ERROR_REASON_GENERATION_ENDED) {
      if (seat != nullptr && seat->record.incarnation() == fence.incarnation())
        job->RenewLease(seat);
      return answer();
    }
    return SendError(call, *std::move(error), job->membership_record_);
  }
  seat->step = std::max(seat->step, request.step());
  seat->phase = Cut(request.phase(), kMaxName);
  seat->last_collective = Cut(request.last_collective(), kMaxName);
  answer();
}

void Core::Impl::ReportExit(CallId call, const v1::ReportExitRequest& request, Job** touched) {
  Job* job = nullptr;
  if (auto error = CheckJob(request.fence(), &job)) return SendError(call, *std::move(error), 0);
  *touched = job;
  Seat* const seat = job->FindSeat(request.worker_id());
  v1::ExitCause cause = request.cause();
  cause.set_message(Reason(cause.message()));
  while (cause.last_log_lines_size() > 64) cause.mutable_last_log_lines()->RemoveLast();
  for (std::string& line : *cause.mutable_last_log_lines()) line = Cut(line, 1024);
  if (job->rendezvous_.Waits(request.worker_id(), request.incarnation())) {
    job->FenceIncarnation(request.worker_id(), request.incarnation());
    job->DropWaiting(
        request.worker_id(),
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                  absl::StrCat("worker ", Quoted(request.worker_id()),
                               " has ended according to its agent: start a new process")));
    job->Evaluate();
  }
  // A report about any other incarnation is old news.
  if (seat != nullptr && seat->record.incarnation() == request.incarnation() &&
      seat->record.state() != v1::WORKER_STATE_EXITED &&
      seat->record.state() != v1::WORKER_STATE_FENCED) {
    job->WorkerGone(seat, v1::WORKER_STATE_EXITED, cause);
  }
  v1::OpResult result;
  *result.mutable_report_exit()->mutable_header() = Header();
  Send(call, result, job->membership_record_);
}

void Core::Impl::WaitKeys(CallId call, const v1::WaitRequest& request, Job** touched) {
  Who who;
  if (auto error = CheckFence(request.fence(), true, &who)) {
    return SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
  }
  *touched = who.job;
  if (auto error = who.job->kv_.CheckWait(request)) return SendError(call, *std::move(error), 0);
  v1::OpResult result;
  if (who.job->kv_.StartWait(call, request, now_, result.mutable_wait())) {
    *result.mutable_wait()->mutable_header() = Header();
    Send(call, result, who.job->AllRecords());
    return;
  }
  held_[call] = {who.job->id_, Held::kWait, ""};
}

bool Core::Impl::CheckRank(CallId call, const v1::Fence& fence, int32_t rank, Who* who,
                           Job** touched) {
  if (auto error = CheckFence(fence, false, who)) {
    SendError(call, *std::move(error), who->job != nullptr ? who->job->membership_record_ : 0);
    return false;
  }
  *touched = who->job;
  if (rank == who->seat->rank()) return true;
  SendError(call,
            BadField("rank", absl::StrCat("worker ", Quoted(fence.worker_id()), " holds rank ",
                                          who->seat->rank(), ", not ", rank)),
            0);
  return false;
}

void Core::Impl::AgreeAlive(CallId call, const v1::AgreeAliveRequest& request, Job** touched) {
  Who who;
  if (!CheckRank(call, request.fence(), request.rank(), &who, touched)) return;
  held_[call] = {who.job->id_, Held::kBarrier, ""};
  std::vector<AgreeSet::Done> done;
  if (auto error = who.job->agree_->Enter(call, request, request.rank(), now_, Header(), &done)) {
    held_.erase(call);
    return SendError(call, *std::move(error), who.job->membership_record_);
  }
  who.job->AgreeDone(std::move(done));
}

void Core::Impl::PollTriggers(CallId call, const v1::PollTriggersRequest& request, Job** touched) {
  Who who;
  if (!CheckRank(call, request.fence(), request.rank(), &who, touched)) return;
  v1::OpResult result;
  std::vector<v1::TriggerChanged> changes;
  std::vector<uint64_t> acked;
  if (auto error = who.job->triggers_.Poll(request, request.rank(), result.mutable_poll_triggers(),
                                           &changes, &acked)) {
    return SendError(call, *std::move(error), 0);
  }
  for (const uint64_t trigger_id : acked) {
    v1::TriggerAcked* change = Change()->mutable_trigger_acked();
    change->set_job_id(who.job->id_);
    change->set_trigger_id(trigger_id);
    change->add_ranks(request.rank());
  }
  who.seat->step = std::max(who.seat->step, request.step());
  who.job->TriggersChanged(std::move(changes));
  *result.mutable_poll_triggers()->mutable_header() = Header();
  Send(call, result, who.job->membership_record_);
}

void Core::Impl::GetRankTable(CallId call, const v1::GetRankTableRequest& request) {
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(call, UnknownJob(request.job_id()), 0);
  if (!job->HasSealed() ||
      (request.generation() != 0 && request.generation() != job->generation_)) {
    v1::OpError error =
        MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                  absl::StrCat("the rank table of generation ", request.generation(), " of job ",
                               Quoted(job->id_), " is not kept: ",
                               !job->HasSealed() ? "none has been sealed yet"
                                                 : absl::StrCat(job->generation_, " is current")));
    error.mutable_detail()->set_current_generation(job->generation_);
    return SendError(call, std::move(error), job->membership_record_);
  }
  const int world_size = static_cast<int>(job->seats_.size());
  if (request.first_rank() < 0 || request.first_rank() > world_size || request.max_rows() < 0) {
    return SendError(
        call,
        BadField("first_rank",
                 absl::StrCat("a page of ", request.max_rows(), " rows from rank ",
                              request.first_rank(), " does not exist in a world of ", world_size)),
        0);
  }
  v1::OpResult result;
  v1::GetRankTableReply* reply = result.mutable_get_rank_table();
  *reply->mutable_header() = Header();
  reply->set_generation(job->generation_);
  reply->set_table_digest(job->digest_);
  reply->set_world_size(world_size);
  reply->set_next_rank(-1);
  if (request.if_digest_differs() != job->digest_) {
    const int rows = request.max_rows() == 0
                         ? options_.rank_table_page
                         : std::min(request.max_rows(), 10 * options_.rank_table_page);
    const int end =
        static_cast<int>(std::min<int64_t>(world_size, int64_t{request.first_rank()} + rows));
    for (int rank = request.first_rank(); rank < end; ++rank)
      FillRow(job->seats_[rank].record, reply->add_rows());
    if (end < world_size) reply->set_next_rank(end);
  }
  Send(call, result, job->membership_record_);
}

void Core::Impl::GetMembers(CallId call, const v1::GetMembersRequest& request) {
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(call, UnknownJob(request.job_id()), 0);
  const int seats = static_cast<int>(job->seats_.size());
  const int all = seats + job->rendezvous_.size();
  if (request.first() < 0 || (request.first() > all)) {
    return SendError(call,
                     BadField("first", absl::StrCat("job ", Quoted(request.job_id()), " has ", all,
                                                    " members, so no page begins at ",
                                                    request.first(), ": list them from 0 again")),
                     job->membership_record_);
  }
  v1::OpResult result;
  v1::GetMembersReply* reply = result.mutable_get_members();
  *reply->mutable_header() = Header();
  reply->set_generation(job->generation_);
  const std::vector<const Waiter*> waiting = job->rendezvous_.ByArrival();
  size_t bytes = 0;
  for (int i = request.first(); i < all; ++i) {
    v1::Member member;
    if (i < seats) {
      member = job->MakeMember(job->seats_[i]);
    } else {
      const Waiter& one = *waiting[i - seats];
      member.set_rank(-1);
      member.set_worker_id(one.request.fence().worker_id());
      member.set_incarnation(one.request.fence().incarnation());
      member.set_state(v1::WORKER_STATE_JOINING);
      member.set_host(one.request.topology().host());
      member.set_pid(one.request.pid());
    }
    if (bytes > kMaxMembersBytes / 3 && member.has_exit()) {
      // Of ten thousand that failed, all fit into one message, if not what each of them said.
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
  Send(call, result, job->membership_record_);
}

void Core::Impl::RemoveJob(CallId call, const v1::RemoveJobRequest& request, Job** touched) {
  Job* job = nullptr;
  if (auto error = CheckJob(request.fence(), &job)) return SendError(call, *std::move(error), 0);
  job->EndIfNobodyIsHeard("an operator removes the job");
  if (!job->Over()) {
    *touched = job;
    const std::string restarted_by = job->RestartedBy();
    v1::OpError error =
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_RUNS,
                  !restarted_by.empty()
                      ? absl::StrCat("job ", Quoted(job->id_), " is being started again by ",
                                     restarted_by, ": stop that agent, then remove the job")
                      : absl::StrCat("job ", Quoted(job->id_), " has workers (", job->alive_,
                                     " seated, ", job->rendezvous_.size(), " waiting, state ",
                                     job->StateName(), "): stop them, then remove it"));
    error.mutable_detail()->set_current_generation(job->generation_);
    return SendError(call, std::move(error), job->membership_record_);
  }
  Remove(job, "on request of an operator");
  v1::OpResult result;
  *result.mutable_remove_job()->mutable_header() = Header();
  Send(call, result, last_record_);
}

Core::Impl::Job* Core::Impl::HandleOp(CallId call, const v1::Op& op, const Caller& caller) {
  Job* touched = nullptr;
  caller_node_ = caller.node;
  const int kind = op.kind_case();
  const auto checkpoint = [&](const auto& request, Rules rules) {
    Once(call, request, kind, rules, &touched, [&](Who who, v1::OpResult* result) {
      return who.job->CheckpointOp(op, who.seat, result);
    });
  };
  switch (op.kind_case()) {
    case v1::Op::kJoin:
      Join(call, op.join(), caller, &touched);
      break;
    case v1::Op::kLeave:
      Once(call, op.leave(), kind, {.operators = false}, &touched,
           [&](Who who, v1::OpResult* result) {
             v1::ExitCause cause;
             cause.set_message(Reason(op.leave().reason()));
             who.job->WorkerGone(who.seat, v1::WORKER_STATE_LEFT, cause);
             *result->mutable_leave()->mutable_header() = Header();
             return std::optional<v1::OpError>();
           });
      // A worker that waits for a seat gives up its place.
      if (Job* const job = FindJob(op.leave().fence().job_id())) {
        const v1::Fence& fence = op.leave().fence();
        if (job->rendezvous_.Waits(fence.worker_id(), fence.incarnation())) {
          out_->replies.resize(first_reply_);
          job->DropWaiting(fence.worker_id(),
                           MakeError(absl::StatusCode::kCancelled, v1::ERROR_REASON_NOT_MEMBER,
                                     absl::StrCat("worker ", Quoted(op.leave().fence().worker_id()),
                                                  " left while it waited for a seat")));
          job->Evaluate();
          v1::OpResult result;
          *result.mutable_leave()->mutable_header() = Header();
          Send(call, result, 0);
          touched = job;
        }
      }
      break;
    case v1::Op::kEndGeneration:
      Once(call, op.end_generation(), kind, {.operators = true}, &touched,
           [&](Who who, v1::OpResult* result) {
             who.job->EndGeneration(absl::StrCat("ended on request of ", CallerText(who.seat),
                                                 op.end_generation().reason().empty() ? "" : ": ",
                                                 Reason(op.end_generation().reason())),
                                    {});
             v1::EndGenerationReply* reply = result->mutable_end_generation();
             *reply->mutable_header() = Header();
             // The waiting may have been enough for the next one at once.
             reply->set_next_generation(who.job->sealed_ ? who.job->generation_
                                                         : who.job->generation_ + 1);
             return std::optional<v1::OpError>();
           });
      break;
    case v1::Op::kArrive:
      Arrive(call, op.arrive(), &touched);
      break;
    case v1::Op::kArriveMany:
      ArriveMany(call, op.arrive_many(), caller, &touched);
      break;
    case v1::Op::kCancelBarrier:
      Once(call, op.cancel_barrier(), kind, {.operators = true}, &touched,
           [&](Who who, v1::OpResult* result) {
             if (who.job->sealed_) {
               if (auto error = who.job->barriers_->Cancel(
                       op.cancel_barrier().barrier_id(), op.cancel_barrier().counter(),
                       CallerText(who.seat), Reason(op.cancel_barrier().reason()), now_)) {
                 return error;
               }
             }
             *result->mutable_cancel_barrier()->mutable_header() = Header();
             return std::optional<v1::OpError>();
           });
      break;
    case v1::Op::kRecallBarriers: {
      // Rows speak of what their caller saw; a caller that is behind has nothing to tell.
      Job* job = nullptr;
      const v1::RecallBarriersRequest& request = op.recall_barriers();
      std::optional<v1::OpError> error = CheckJob(request.fence(), &job);
      if (!error.has_value()) error = job->CheckGeneration(request.fence());
      if (!error.has_value() && !job->sealed_) error = job->Ended();
      if (!error.has_value()) {
        // It may be an agent, which has no seat.
        const Seat* const seat = job->FindSeat(request.fence().worker_id());
        const uint64_t newest = seat != nullptr ? seat->record.incarnation() : 0;
        if (job->incarnations_.IsFenced(request.fence().worker_id(),
                                        request.fence().incarnation()) ||
            (newest != 0 && newest != request.fence().incarnation())) {
          error = job->Superseded(request.fence().worker_id(), newest);
        }
      }
      if (error.has_value()) {
        SendError(call, *std::move(error), job != nullptr ? job->membership_record_ : 0);
        break;
      }
      touched = job;
      for (const v1::SeenBarrier& seen : request.seen()) {
        if (options_.mutants.ignores_recall) break;
        job->barriers_->Recall(seen.barrier_id(), seen.counter(), seen.state());
      }
      v1::OpResult result;
      *result.mutable_recall_barriers()->mutable_header() = Header();
      Send(call, result, job->membership_record_);
      break;
    }
    case v1::Op::kTxn:
      Once(call, op.txn(), kind,
           {.operators = true,
            .reads = KvStore::Reads(op.txn()),
            .writes = KvStore::Writes(op.txn())},
           &touched,
           [&](Who who, v1::OpResult* result) { return who.job->Txn(op.txn(), who.seat, result); });
      break;
    case v1::Op::kWait:
      WaitKeys(call, op.wait(), &touched);
      break;
    case v1::Op::kRaiseTrigger:
      Once(call, op.raise_trigger(), kind, {.operators = true}, &touched,
           [&](Who who, v1::OpResult* result) {
             if (who.job->Over()) {
               v1::OpError error = MakeError(
                   absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_ENDED,
                   absl::StrCat("no worker of job ", Quoted(who.job->id_),
                                " is left to act upon trigger ", Quoted(op.raise_trigger().name()),
                                who.job->why_ended_.empty() ? "" : ": ", who.job->why_ended_,
                                "; raise it when the job runs again"));
               error.mutable_detail()->set_current_generation(who.job->generation_);
               return std::optional<v1::OpError>(std::move(error));
             }
             std::vector<v1::TriggerChanged> changes;
             v1::RaiseTriggerReply* reply = result->mutable_raise_trigger();
             if (auto error = who.job->triggers_.Raise(
                     op.raise_trigger(), who.seat != nullptr ? who.seat->rank() : -1,
                     event_revision_ != 0 ? event_revision_ : revision_ + 1, reply, &changes)) {
               return error;
             }
             Rev();
             ++stats_.triggers_raised;
             who.job->TriggersChanged(std::move(changes));
             *reply->mutable_header() = Header();
             return std::optional<v1::OpError>();
           });
      break;
    case v1::Op::kPollTriggers:
      PollTriggers(call, op.poll_triggers(), &touched);
      break;
    case v1::Op::kHeartbeat:
      Heartbeat(call, op.heartbeat(), &touched);
      break;
    case v1::Op::kReportExit:
      ReportExit(call, op.report_exit(), &touched);
      break;
    case v1::Op::kAgreeAlive:
      AgreeAlive(call, op.agree_alive(), &touched);
      break;
    case v1::Op::kQuarantine:
      Once(
          call, op.quarantine(), kind, {.operators = true}, &touched,
          [&](Who who, v1::OpResult* result) {
            if (auto error = CheckName("host", op.quarantine().host())) return error;
            if (!who.job->quarantine_.HasRoomFor(op.quarantine().host())) {
              return std::optional<v1::OpError>(TooLarge(
                  "host", absl::StrCat("job ", Quoted(who.job->id_), " has ", Quarantine::kMaxHosts,
                                       " hosts in quarantine or struck: lift some of them first")));
            }
            const absl::Duration length = FromProto(op.quarantine().for_());
            if (length < absl::ZeroDuration()) {
              return std::optional<v1::OpError>(
                  BadField("for", "the length of a quarantine is negative: 0 lifts it"));
            }
            who.job->QuarantineHost(op.quarantine().host(), std::min(length, absl::Hours(24 * 365)),
                                    Reason(op.quarantine().reason()), false);
            who.job->Evaluate();
            *result->mutable_quarantine()->mutable_header() = Header();
            return std::optional<v1::OpError>();
          });
      break;
    case v1::Op::kRemoveJob:
      RemoveJob(call, op.remove_job(), &touched);
      break;
    case v1::Op::kGetRankTable:
      GetRankTable(call, op.get_rank_table());
      break;
    case v1::Op::kDescribeBarrier:
    case v1::Op::kListBarriers:
    case v1::Op::kStragglerReport: {
      const std::string& job_id = op.has_describe_barrier() ? op.describe_barrier().job_id()
                                  : op.has_list_barriers()  ? op.list_barriers().job_id()
                                                            : op.straggler_report().job_id();
      const Job* const job = FindJob(job_id);
      if (job == nullptr) {
        SendError(call, UnknownJob(job_id), 0);
        break;
      }
      v1::OpResult result;
      if (op.has_describe_barrier()) {
        *result.mutable_describe_barrier()->mutable_header() = Header();
        std::optional<v1::OpError> error;
        if (job->barriers_ != nullptr) {
          error = job->barriers_->Describe(op.describe_barrier().barrier_id(),
                                           op.describe_barrier().counter(), now_,
                                           result.mutable_describe_barrier()->mutable_report());
        } else {
          error = MakeError(
              absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
              absl::StrCat("job ", Quoted(job_id), " has had no generation yet, so no barriers"));
        }
        if (error.has_value()) {
          SendError(call, *std::move(error), job->AllRecords());
          break;
        }
      } else if (op.has_list_barriers()) {
        *result.mutable_list_barriers()->mutable_header() = Header();
        if (job->barriers_ != nullptr) {
          job->barriers_->List(op.list_barriers().only_open(), now_,
                               result.mutable_list_barriers());
        }
      } else {
        *result.mutable_straggler_report()->mutable_header() = Header();
        if (job->barriers_ != nullptr)
          job->barriers_->Stragglers(result.mutable_straggler_report());
      }
      Send(call, result, job->AllRecords());
      break;
    }
    case v1::Op::kGetMembers:
      GetMembers(call, op.get_members());
      break;
    case v1::Op::kBeginCheckpoint:
      checkpoint(op.begin_checkpoint(), {.reads = true});
      break;
    case v1::Op::kReportShards:
      // Not remembered: a repeat of a part is known by its number.
      checkpoint(op.report_shards(), {.reads = true, .writes = false});
      break;
    case v1::Op::kSealCheckpoint:
      checkpoint(op.seal_checkpoint(), {.reads = true});
      break;
    case v1::Op::kPublishCheckpoint:
      checkpoint(op.publish_checkpoint(), {.reads = true});
      break;
    case v1::Op::kAbortCheckpoint:
      checkpoint(op.abort_checkpoint(), {.operators = true, .reads = true});
      break;
    case v1::Op::kCheckpointDeleted:
      checkpoint(op.checkpoint_deleted(), {.operators = true, .reads = true});
      break;
    case v1::Op::kMarkCheckpoint:
      checkpoint(op.mark_checkpoint(), {.operators = true, .reads = true});
      break;
    case v1::Op::kCollectCheckpoints:
      checkpoint(op.collect_checkpoints(), {.operators = true, .reads = true});
      break;
    case v1::Op::kResolveCheckpoint:
      checkpoint(op.resolve_checkpoint(), {.operators = true, .reads = true, .writes = false});
      break;
    case v1::Op::kListCheckpoints:
      checkpoint(op.list_checkpoints(), {.operators = true, .reads = true, .writes = false});
      break;
    case v1::Op::KIND_NOT_SET:
      SendError(
          call,
          BadField("kind",
                   "the operation has no kind this server knows: use a client of its version"),
          0);
      break;
  }
  return touched;
}

}  // namespace muster::coordinator
