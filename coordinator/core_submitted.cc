#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/defaults.h"
#include "base/home_path.h"
#include "coordinator/core_impl.h"
#include "proto/job_limits.h"

// The operations on submitted jobs and nodes: jobs/jobs_core.h decides, this file journals and
// answers.

namespace muster::coordinator {
namespace {

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
    // This holds also if the operation changes nothing: it may reveal what another event has
    // changed.
    Send(call, result, jobs_record_);
  }
  for (JobsOutput::Notice& notice : out.notices) {
    Note(notice.job_id, notice.warning, std::move(notice.text));
  }
  End(nullptr);
  CloseGroups(out.closed_groups);
}

void Core::Impl::TellJobs() {
  if (!serving_) return;
  for (const JobsCore::GroupNews& news : std::exchange(group_news_, {})) {
    JobsOutput out;
    submitted_->Hear(news, JobsEvent(), &out);
    EndJobs(std::move(out));
  }
}

void Core::Impl::CloseGroups(const std::vector<EndedGroup>& ended) {
  for (const auto& [group, why] : ended) {
    for (const std::string& id : {group, absl::StrCat(group, kAgentsSuffix)}) {
      Job* const job = FindJob(id);
      if (job == nullptr || job->members().closed()) continue;
      job->Close(why);
      End(job);
    }
  }
}

void Core::Impl::Submitted(Incoming* in) {
  JobsOutput out;
  JobsCore::Event event = JobsEvent();
  event.caller = in->caller.identity;
  submitted_->Handle(in->call, in->op, event, &out);
  if (in->op.submit_job().dry_run()) {
    for (auto& [call, result] : out.replies) {
      if (call == in->call && result.has_submit_job()) {
        PlanCheckpoint(result.mutable_submit_job());
      }
    }
  }
  EndJobs(std::move(out));
}

void Core::Impl::PlanCheckpoint(v1::SubmitJobReply* reply) {
  v1::PlannedCheckpoint* const plan = reply->mutable_plan()->mutable_checkpoint();
  const v1::JobRecord& job = reply->job();
  const Job* const own =
      reply->existed() ? LastWithCheckpoints(job.job_id(), job.attempts()) : nullptr;
  const v1::CheckpointRecord* record =
      own == nullptr ? nullptr : own->checkpoints().NewestPromoted(/*folder=*/"");
  if (record != nullptr) {
    plan->set_decided_by("coordinator");
    *plan->mutable_record() = *record;
    plan->set_why(
        "the newest one of this job that is promoted; if its files are not whole, the one before");
    return;
  }
  plan->set_decided_by("program");
  std::string folder = kDefaultProjectFolder;
  for (const v1::NameValue& variable : job.spec().env()) {
    if (variable.name() == "MUSTER_PROJECT_DIR" && !variable.value().empty()) {
      folder = variable.value();
    }
  }
  if (BeginsAtHome(folder)) {
    plan->set_why("the checkpoints are in the home of the job's user, which only its nodes know");
    return;
  }
  const std::string& below = job.spec().working_directory();
  if (folder[0] != '/' && below.empty()) {
    plan->set_why(
        "the job runs in a private folder of each attempt, which begins empty; with a workdir that "
        "its nodes share, checkpoints stay");
    return;
  }
  if (folder[0] != '/') folder = absl::StrCat(absl::StripSuffix(below, "/"), "/", folder);
  // The same folder as workers register.
  folder = std::filesystem::path(folder).lexically_normal().string();
  plan->set_folder(absl::StrCat(absl::StripSuffix(folder, "/"), "/", kCheckpointsFolder));
  for (const Job* const other : JobsById()) {
    const v1::CheckpointRecord* const known = other->checkpoints().NewestPromoted(plan->folder());
    if (known == nullptr || (record != nullptr && record->checkpoint_id() > known->checkpoint_id()))
      continue;
    record = known;
    *plan->mutable_record() = *record;
    if (record->job_id().empty()) plan->mutable_record()->set_job_id(other->id());
  }
  plan->set_why(
      record == nullptr
          ? "this job has no checkpoint here: rank 0 takes the newest one in the folder that is "
            "whole, and this coordinator knows none there"
          : "this job has no checkpoint here: rank 0 takes the newest one in the folder that is "
            "whole; the newest that this coordinator knows there is another job's");
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
  return LastWithCheckpoints(attempt->first, attempt->second - 1);
}

Core::Impl::Job* Core::Impl::LastWithCheckpoints(const std::string& job_id, int number) {
  // Attempts in between may have ended before their workers joined; and a restore from a copy skips
  // more numbers than can be looked at.
  Job* last = nullptr;
  int last_number = 0;
  for (const auto& [id, group] : jobs_) {
    absl::string_view text = id;
    int one = 0;
    if (!absl::ConsumePrefix(&text, job_id) || !absl::ConsumePrefix(&text, ".") ||
        !absl::SimpleAtoi(text, &one) || one <= last_number || one > number ||
        JobsCore::GroupOf(job_id, one) != id || group->checkpoints().size() == 0) {
      continue;
    }
    last = group.get();
    last_number = one;
  }
  return last;
}

std::vector<Core::Impl::EndedGroup> Core::Impl::StartJobsTerm(uint64_t lost_terms) {
  JobsOutput out;
  submitted_->StartTerm(JobsEvent(), lost_terms, &out);
  std::vector<EndedGroup> ended = std::exchange(out.closed_groups, {});
  EndJobs(std::move(out));
  for (const Job* job : JobsById()) {
    if (auto why = WhyGroupEnded(job->id())) ended.emplace_back(job->id(), *std::move(why));
  }
  return ended;
}

}  // namespace muster::coordinator
