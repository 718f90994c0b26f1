#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"

namespace muster::coordinator {

std::optional<v1::OpError> Core::Impl::CheckJob(const v1::Fence& fence, Job** job) {
  *job = FindJob(fence.job_id());
  // Terms of another cluster are not ours: a process left over from it must not depose us.
  if (fence.cluster() != 0 && cluster_ != 0 && fence.cluster() != cluster_) {
    v1::OpError error = MakeError(
        absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_OTHER_CLUSTER,
        absl::StrCat("the caller belongs to a different cluster than this coordinator (cluster ",
                     options_.cluster_id,
                     "): the coordinator got another data directory, or another coordinator took "
                     "over its address; start the job again"));
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
    return absl::StrCat(
        "that revision is of term ", term_of_revision,
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
  // Names and incarnations of members can be read by others, and a job is not trusted to end the
  // coordinator of all: only admins, and callers without roles, prove anything.
  const bool proven =
      same_cluster && job != nullptr && job->IsMember(fence, caller_node_) && caller_may_depose_;
  v1::OpError error;
  if (proven) {
    out_->deposed = true;
    out_->deposed_why = absl::StrCat(seen, " (job ", Quoted(fence.job_id()), ", worker ",
                                     Quoted(fence.worker_id()), ")", kWayOut);
    error = MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_STOPPING,
                      absl::StrCat(seen, kWayOut));
  } else {
    const std::string refusal =
        same_cluster ? absl::StrCat(seen, ", and is not a member of a job here", kWayOut)
                     : absl::StrCat(seen,
                                    " and does not name its cluster: send the cluster of "
                                    "the reply that said so (Fence.cluster)");
    // Any process can send these, so the log has only the first, the second, the fourth and so on.
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
    if (!one->members().HasNode(node)) continue;
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
    error.mutable_detail()->set_current_generation(job->generation());
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
  const Waiter* const waiter = job->rendezvous().Find(fence.worker_id());
  const bool waits = waiter != nullptr;
  const uint64_t newest = waits ? waiter->request.fence().incarnation()
                                : (seat != nullptr ? seat->record().incarnation() : 0);
  if (job->incarnations().IsFenced(fence.worker_id(), fence.incarnation())) {
    return refuse(job->Superseded(fence.worker_id(), newest));
  }
  if (seat != nullptr && seat->record().incarnation() != fence.incarnation() &&
      !(waits && newest == fence.incarnation())) {
    return refuse(job->Superseded(fence.worker_id(), newest));
  }
  if (auto error = job->CheckGeneration(fence)) return refuse(*std::move(error));
  if (!job->sealed() && seat != nullptr) return refuse(job->Ended());
  if (seat == nullptr || seat->record().incarnation() != fence.incarnation()) {
    return refuse(
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                  absl::StrCat("worker ", Quoted(fence.worker_id()), " has no seat in generation ",
                               job->generation(), " of job ", Quoted(job->id()), ": join first")));
  }
  switch (seat->record().state()) {
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
                                 ") ", job->GoneText(*seat), ": join again if it is alive")));
  }
  job->RenewLease(*seat);
  who->seat = seat;
  return std::nullopt;
}

bool Core::Impl::CheckRank(Incoming* in, const v1::Fence& fence, int32_t rank, Who* who) {
  if (auto error = CheckFence(fence, false, who)) {
    SendError(in->call, *std::move(error), who->job != nullptr ? who->job->membership_record() : 0);
    return false;
  }
  in->touched = who->job;
  if (rank == who->seat->rank()) return true;
  SendError(in->call,
            BadField("rank", absl::StrCat("worker ", Quoted(fence.worker_id()), " holds rank ",
                                          who->seat->rank(), ", not ", rank)),
            0);
  return false;
}

}  // namespace muster::coordinator
