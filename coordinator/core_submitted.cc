#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/defaults.h"
#include "coordinator/core_impl.h"

// What the operations on submitted jobs and nodes do: jobs/jobs_core.h decides, this journals and
// answers.

namespace muster::coordinator {
namespace {

constexpr int kMostAttempts = 10'000;  // looked at for checkpoints

// The header is field 1 of every reply.
void SetHeader(const v1::ReplyHeader& header, v1::OpResult* result) {
  if (result->has_error() || result->kind_case() == v1::OpResult::KIND_NOT_SET) return;
  const auto* const kind =
      v1::OpResult::descriptor()->FindFieldByNumber(static_cast<int>(result->kind_case()));
  google::protobuf::Message* const reply = result->GetReflection()->MutableMessage(result, kind);
  const auto* const field = reply->GetDescriptor()->FindFieldByName("header");
  reply->GetReflection()->MutableMessage(reply, field)->CopyFrom(header);
}

}  // namespace

JobsCore::Event Core::Impl::JobsEvent() const {
  return {.now = now_,
          .revision = event_revision_ != 0 ? event_revision_ : revision_ + 1,
          .cluster_id = options_.cluster_id};
}

std::string Core::Impl::OwnerOf(absl::string_view job) const {
  const v1::JobRecord* record = submitted_->Find(job);
  if (record == nullptr) {
    if (const auto attempt = submitted_->AttemptOf(job)) record = submitted_->Find(attempt->first);
  }
  return record == nullptr ? "" : record->owner();
}

void Core::Impl::EndJobs(JobsOutput out) {
  if (!out.changes.empty()) jobs_record_ = Rev();
  for (v1::JournalChange& change : out.changes) {
    if (change.has_job_record_changed()) {
      const v1::JobRecordChanged& changed = change.job_record_changed();
      out_->changed_submitted.push_back(changed.has_record()         ? changed.record().job_id()
                                        : !changed.removed().empty() ? changed.removed()
                                                                     : changed.job_id());
    }
    *Change() = std::move(change);
  }
  const v1::ReplyHeader header = Header();
  for (auto& [call, result] : out.replies) {
    SetHeader(header, &result);
    // Also if it changes nothing: it may tell what another event has changed.
    Send(call, result, jobs_record_);
  }
  for (JobsOutput::Notice& notice : out.notices) {
    Note(notice.job_id, notice.warning, std::move(notice.text));
  }
  End(nullptr);
  for (const auto& [group, why] : out.closed_groups) CloseGroup(group, why);
}

void Core::Impl::TellJobs() {
  if (!serving_) return;
  for (const JobsCore::GroupNews& news : std::exchange(group_news_, {})) {
    JobsOutput out;
    submitted_->Hear(news, JobsEvent(), &out);
    EndJobs(std::move(out));
  }
}

void Core::Impl::CloseGroup(const std::string& group, const std::string& why) {
  for (const std::string& id : {group, absl::StrCat(group, kAgentsSuffix)}) {
    Job* const job = FindJob(id);
    if (job == nullptr || job->members().closed()) continue;
    job->Close(why);
    End(job);
  }
}

void Core::Impl::Submitted(Incoming* in) {
  JobsOutput out;
  JobsCore::Event event = JobsEvent();
  event.caller = in->caller.identity;
  submitted_->Handle(in->call, in->op, event, &out);
  EndJobs(std::move(out));
}

std::optional<std::string> Core::Impl::WhyGroupEnded(absl::string_view group) const {
  (void)absl::ConsumeSuffix(&group, kAgentsSuffix);
  const auto attempt = submitted_->AttemptOf(group);
  if (!attempt.has_value()) return std::nullopt;
  const v1::JobRecord& job = *submitted_->Find(attempt->first);
  const bool active = job.state() == v1::JOB_STATE_STARTING ||
                      job.state() == v1::JOB_STATE_RUNNING || job.state() == v1::JOB_STATE_STOPPING;
  if (active && job.history(job.history_size() - 1).number() == attempt->second) {
    return std::nullopt;
  }
  return absl::StrCat("attempt ", attempt->second, " of job ", job.job_id(), " is over");
}

Core::Impl::Job* Core::Impl::FormerAttempt(absl::string_view group) {
  const auto attempt = submitted_->AttemptOf(group);
  if (!attempt.has_value()) return nullptr;
  // Attempts in between may have ended before their workers joined.
  for (int number = attempt->second - 1; number >= std::max(1, attempt->second - kMostAttempts);
       --number) {
    Job* const former = FindJob(JobsCore::GroupOf(attempt->first, number));
    if (former != nullptr && former->checkpoints().size() > 0) return former;
  }
  return nullptr;
}

void Core::Impl::StartJobsTerm(bool restored) {
  JobsOutput out;
  submitted_->StartTerm(JobsEvent(), restored, &out);
  EndJobs(std::move(out));
  for (const Job* job : JobsById()) {
    if (const auto why = WhyGroupEnded(job->id())) CloseGroup(job->id(), *why);
  }
}

}  // namespace muster::coordinator
