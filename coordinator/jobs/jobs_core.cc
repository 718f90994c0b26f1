#include "coordinator/jobs/jobs_core.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/defaults.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/errors.h"
#include "coordinator/jobs/job_spec.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"

namespace muster::coordinator {
namespace {

constexpr size_t kMaxNodeName = 256;
constexpr int kLeastLogLevel = 1, kMostLogLevel = 4;  // see LogLevel in operations.proto
constexpr size_t kMaxInfoBytes = 16 << 10;
constexpr size_t kMaxWhy = 1024;
constexpr int kMaxLines = 20;
constexpr size_t kMaxLine = 4096;
constexpr size_t kMaxHungBytes = 64 << 10;  // for AttemptEnd.hung
constexpr int kMaxPage = 500;
constexpr size_t kMaxPageBytes = 3 << 20;
constexpr absl::Duration kMaxHold = absl::Seconds(60);
constexpr absl::Duration kMaxLogAge = absl::Hours(24 * 365 * 100);
constexpr absl::Duration kMaxLogWait = absl::Seconds(30);
// In addition to the wait. Shorter than a client's patience (5 s for a command), because this error
// names the silent node and says that the call may be tried again.
constexpr absl::Duration kLogTimeout = absl::Seconds(3);
constexpr int kMaxLogBytes = 1 << 20;
constexpr size_t kMaxQueries = 256;  // open queries of one node
// The delay of a schedule for which no caller waits, so that it covers several changes.
constexpr absl::Duration kScheduleSoon = absl::Milliseconds(100);
// How long a job avoids a node that could not start it; doubled with each such failure, because a
// job that grows would otherwise be stopped for the node again and again.
constexpr absl::Duration kAvoidedFirst = absl::Minutes(30);
constexpr absl::Duration kAvoidedMost = absl::Hours(24);
constexpr absl::Duration kTickWhileNodesRun = absl::Seconds(1);
// More than the attempts of one job, and more than the jobs, that the lost part of the history can
// contain.
constexpr int kLostAttempts = 1000;
// A restore adds this many terms, and one for each minute since the copy was made (see
// SqliteJournal::kLostTerms). The minutes also lengthen the gap in the numbers here, so that two
// restores from one copy do not use the same numbers: for each minute, more numbers than the first
// restored coordinator can have used in it. All restores of a journal together add less than
// Core::kMaxTerm, so the numbers fit.
constexpr uint64_t kTermsOfARestore = 65536;
constexpr int kAttemptsOfAMinute = 16;
constexpr int kJobsOfAMinute = 1000;

std::string Reason(absl::string_view text) { return Cut(OneLine(Cut(text, kMaxWhy)), kMaxWhy); }

v1::OpError WrongState(const v1::JobRecord& job, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_STATE,
                   absl::StrCat("job ", job.job_id(), " ", what));
}

absl::string_view StateText(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_QUEUED:
      return "waits in the queue";
    case v1::JOB_STATE_STARTING:
      return "is starting";
    case v1::JOB_STATE_RUNNING:
      return "runs";
    case v1::JOB_STATE_STOPPING:
      return "is being stopped";
    case v1::JOB_STATE_SUSPENDED:
      return "is suspended";
    case v1::JOB_STATE_SUCCEEDED:
      return "has succeeded";
    case v1::JOB_STATE_FAILED:
      return "has failed";
    case v1::JOB_STATE_CANCELLED:
      return "was cancelled";
    default:
      return "is in an unknown state";
  }
}

// Returns what a node reports about an end, limited to what may be kept.
v1::AttemptEnd Cleaned(const v1::AttemptEnd& end, const std::string& node) {
  v1::AttemptEnd clean;
  clean.set_end_class(v1::EndClass_IsValid(end.end_class()) &&
                              end.end_class() != v1::END_CLASS_UNSPECIFIED
                          ? end.end_class()
                          : v1::END_CLASS_PROCESS_FAILED);
  clean.set_why(end.why().empty() ? absl::StrCat("node ", node, " gives no reason")
                                  : Reason(end.why()));
  clean.set_node(node);
  clean.set_rank(end.rank());
  clean.set_exit_code(end.exit_code());
  clean.set_signal(end.signal());
  const int from = std::max(0, end.last_lines_size() - kMaxLines);
  for (int i = from; i < end.last_lines_size(); ++i) {
    clean.add_last_lines(Cut(end.last_lines(i), kMaxLine));
  }
  size_t bytes = 0;
  for (const v1::HungRanks& hung : end.hung()) {
    bytes += hung.ByteSizeLong();
    if (bytes > kMaxHungBytes) break;
    *clean.add_hung() = hung;
  }
  return clean;
}

const v1::JobAttempt& Last(const v1::JobRecord& record) {
  return record.history(record.history_size() - 1);
}

// Returns the number of the last attempt that has begun; 0 if none has. After a restore from a
// copy, attempts() is larger by the numbers that are left out.
int LastBegun(const v1::JobRecord& record) {
  return record.history_size() == 0 ? 0 : Last(record).number();
}

// "node a, which could not start it", "3 nodes, which could not start it"
std::string DescribeAvoided(const v1::JobRecord& record) {
  const int count = record.avoided_nodes_size();
  return absl::StrCat(count == 1 ? absl::StrCat("node ", Quoted(record.avoided_nodes(0)))
                                 : absl::StrCat(count, " nodes"),
                      ", which could not start it");
}

// Returns whether an active job has the attempt and placements that it must have.
bool IsWhole(const v1::JobRecord& record) {
  if (record.history_size() == 0) return false;
  const v1::JobAttempt& attempt = Last(record);
  for (int i = 0; i < attempt.placements_size(); ++i) {
    if (attempt.placements(i).node_rank() != i) return false;
  }
  return attempt.placements_size() > 0;
}

// Returns whether the job passes the filters of a ListJobsRequest or a WatchJobsRequest.
template <typename Request>
bool IsNamed(const Request& request, const std::string& job_id, const std::string& owner) {
  return (request.owner().empty() || owner == request.owner()) &&
         absl::StartsWith(job_id, request.name_prefix());
}
template <typename Request>
bool IsInState(const Request& request, const v1::JobRecord& record) {
  return request.states_size() == 0 || std::find(request.states().begin(), request.states().end(),
                                                 record.state()) != request.states().end();
}

// Returns whether a part of the attempt is over: then the attempt is about to end.
bool HasEndedPart(const v1::JobAttempt& attempt) {
  return std::any_of(attempt.placements().begin(), attempt.placements().end(),
                     [](const v1::Placement& placement) {
                       return placement.state() == v1::PLACEMENT_STATE_ENDED;
                     });
}

}  // namespace

bool JobsCore::Takes(v1::Op::KindCase kind) {
  switch (kind) {
    case v1::Op::kSubmitJob:
    case v1::Op::kControlJob:
    case v1::Op::kGetJob:
    case v1::Op::kListJobs:
    case v1::Op::kReadJobLog:
    case v1::Op::kSyncNode:
    case v1::Op::kAnswerLog:
    case v1::Op::kControlNode:
    case v1::Op::kListNodes:
      return true;
    default:
      return false;
  }
}

std::string JobsCore::GroupOf(absl::string_view job_id, int attempt) {
  return absl::StrCat(job_id, ".", attempt);
}

std::optional<std::pair<std::string, int>> JobsCore::AttemptOf(absl::string_view group) const {
  const size_t dot = group.rfind('.');
  int attempt = 0;
  if (dot == absl::string_view::npos || !absl::SimpleAtoi(group.substr(dot + 1), &attempt)) {
    return std::nullopt;
  }
  const v1::JobRecord* const job = Find(group.substr(0, dot));
  if (job == nullptr || attempt < 1 || attempt > job->attempts() ||
      GroupOf(job->job_id(), attempt) != group) {
    return std::nullopt;
  }
  return std::make_pair(job->job_id(), attempt);
}

const v1::JobRecord* JobsCore::Find(absl::string_view job_id) const {
  const auto it = by_id_.find(job_id);
  return it == by_id_.end() ? nullptr : &jobs_.at(it->second).record;
}

JobsCore::Job* JobsCore::FindJob(absl::string_view job_id) {
  const auto it = by_id_.find(job_id);
  return it == by_id_.end() ? nullptr : &jobs_.at(it->second);
}

v1::OpError JobsCore::UnknownJob(absl::string_view job_id) {
  return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                   absl::StrCat("no job ", Quoted(job_id),
                                " was submitted here, or it has been removed; muster list shows "
                                "the jobs"));
}

bool JobsCore::IsActive(v1::JobState state) {
  return state == v1::JOB_STATE_STARTING || state == v1::JOB_STATE_RUNNING ||
         state == v1::JOB_STATE_STOPPING;
}

bool JobsCore::HasEnded(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

v1::JobAttempt* JobsCore::Current(Job* job) {
  MUSTER_CHECK(job->record.history_size() > 0) << job->record.job_id() << " has no attempt";
  return job->record.mutable_history(job->record.history_size() - 1);
}

// ---- events

void JobsCore::Begin(const Event& event, JobsOutput* out) {
  // A gap longer than the regular ticks shows that this process was paused: reports of nodes may be
  // waiting unread.
  if (now_ != absl::InfinitePast() && event.now - now_ > options_.node_lease / 2) {
    for (auto& [name, node] : nodes_) {
      if (!node.lost && node.heard != absl::InfinitePast()) {
        node.heard = event.now;
        SetNodeTimer(name, &node);
      }
    }
  }
  now_ = std::max(now_, event.now);
  revision_ = event.revision;
  cluster_id_ = std::string(event.cluster_id);
  caller_ = event.caller;
  out_ = out;
}

void JobsCore::End() {
  if (dirty_ || schedule_at_ <= now_) RunSchedule();
  for (const uint64_t sequence : touched_jobs_) {
    const auto it = jobs_.find(sequence);
    if (it == jobs_.end()) continue;  // this event has removed it and recorded that
    v1::JobRecord& record = it->second.record;
    SetRevision(&it->second, revision_);
    Measure(&it->second);
    v1::JobRecordChanged* const changed = out_->changes.emplace_back().mutable_job_record_changed();
    *changed->mutable_record() = record;
    OmitKnownHistory(std::exchange(it->second.in_journal, CurrentEntry(record)), changed);
    AnswerGets(it->second);
  }
  JournalPlacements();
  for (const std::string& name : touched_nodes_) {
    const auto it = nodes_.find(name);
    if (it == nodes_.end()) continue;
    // A touch that changes nothing in the journal, such as an order, also gets its own version: the
    // next change has the revision that it was given.
    it->second.version = std::max(revision_, it->second.version + 1);
    if (it->second.held.has_value()) AnswerSync(name, &it->second);
  }
  touched_jobs_.clear();
  touched_nodes_.clear();
  for (const std::function<void()>& then : std::exchange(at_end_, {})) then();
  out_ = nullptr;
}

void JobsCore::AnswerGets(const Job& job) {
  const auto waiting = gets_of_.find(job.record.job_id());
  if (waiting == gets_of_.end()) return;
  for (const CallId call : std::exchange(waiting->second, {})) {
    const auto get = gets_.find(call);
    call_timers_.erase({get->second.until, call});
    const bool with_env = get->second.with_env;
    gets_.erase(get);
    ReplyJob(call, job, with_env);
  }
  gets_of_.erase(job.record.job_id());
}

void JobsCore::JournalPlacements() {
  absl::btree_set<uint64_t> changed_jobs;  // each call gets all placements at once
  for (const auto& [sequence, node_rank] : touched_placements_) {
    const auto it = jobs_.find(sequence);
    if (it == jobs_.end() || touched_jobs_.contains(sequence)) continue;
    const v1::JobRecord& record = it->second.record;
    SetRevision(&it->second, revision_);
    const v1::JobAttempt& attempt = *Current(&it->second);
    v1::JobRecordChanged* const changed = out_->changes.emplace_back().mutable_job_record_changed();
    changed->set_job_id(record.job_id());
    changed->set_node_rank(node_rank);
    changed->set_state(attempt.placements(node_rank).state());
    changed->set_end_class(attempt.placements(node_rank).end_class());
    changed->set_ended_unix_ms(attempt.ended_unix_ms());
    changed->set_revision(revision_);
    changed_jobs.insert(sequence);
  }
  touched_placements_.clear();
  for (const uint64_t sequence : changed_jobs) AnswerGets(jobs_.at(sequence));
}

void JobsCore::ReplyError(CallId call, v1::OpError error) {
  v1::OpResult result;
  *result.mutable_error() = std::move(error);
  Reply(call, std::move(result));
}

void JobsCore::Handle(CallId call, const v1::Op& op, const Event& event, JobsOutput* out) {
  Begin(event, out);
  Error error;
  switch (op.kind_case()) {
    case v1::Op::kSubmitJob:
      error = Submit(call, op.submit_job());
      break;
    case v1::Op::kControlJob:
      error = Control(call, op.control_job());
      break;
    case v1::Op::kGetJob:
      error = Get(call, op.get_job());
      break;
    case v1::Op::kListJobs:
      error = List(call, op.list_jobs());
      break;
    case v1::Op::kReadJobLog:
      error = ReadLog(call, op.read_job_log());
      break;
    case v1::Op::kSyncNode:
      error = Sync(call, op.sync_node());
      break;
    case v1::Op::kAnswerLog:
      error = AnswerLog(call, op.answer_log());
      break;
    case v1::Op::kControlNode:
      error = ControlNode(call, op.control_node());
      break;
    case v1::Op::kListNodes:
      error = ListNodes(call, op.list_nodes());
      break;
    default:
      error = BadField("kind", "this is not an operation on jobs");
  }
  if (error.has_value()) ReplyError(call, *std::move(error));
  End();
}

bool JobsCore::Abandon(CallId call) {
  if (const auto get = gets_.find(call); get != gets_.end()) {
    call_timers_.erase({get->second.until, call});
    const auto of = gets_of_.find(get->second.job_id);
    of->second.erase(call);
    if (of->second.empty()) gets_of_.erase(of);
    gets_.erase(get);
    return true;
  }
  if (const auto sync = syncs_.find(call); sync != syncs_.end()) {
    const auto node = nodes_.find(sync->second);
    if (node != nodes_.end() && node->second.held == call) {
      node->second.held.reset();
      node->second.held_until = absl::InfiniteFuture();
      node->second.hung_up = true;
    }
    syncs_.erase(sync);
    return true;
  }
  if (const auto read = reads_.find(call); read != reads_.end()) {
    const auto query = queries_.find(read->second);
    if (query != queries_.end()) {
      query_timers_.erase({query->second.until, query->first});
      queries_.erase(query);
    }
    reads_.erase(read);
    return true;
  }
  return false;
}

void JobsCore::Tick(const Event& event, JobsOutput* out) {
  Begin(event, out);
  while (!node_timers_.empty() && node_timers_.begin()->first <= now_) {
    TickNode(std::string(node_timers_.begin()->second));
  }
  while (!limits_.empty() && limits_.begin()->first <= now_) {
    Job& job = jobs_.at(limits_.begin()->second);
    limits_.erase(limits_.begin());
    job.ends_by = absl::InfiniteFuture();
    Stop(&job, v1::END_CLASS_TIME_LIMIT,
         absl::StrCat("attempt ", job.record.attempts(), " has run for its time limit of ",
                      absl::FormatDuration(FromProto(job.record.spec().time_limit()))));
  }
  while (!retained_.empty() && retained_.begin()->first <= now_) {
    const uint64_t sequence = retained_.begin()->second;
    const v1::JobRecord& record = jobs_.at(sequence).record;
    out_->notices.push_back(
        {false, record.job_id(),
         absl::StrCat("removed: it has ended ",
                      absl::FormatDuration(FromProto(record.spec().retention())), " ago")});
    Forget(sequence);
  }
  while (!avoided_.empty() && std::get<0>(*avoided_.begin()) <= now_) {
    const auto [until, sequence, node] = *avoided_.begin();
    TryAgain(&jobs_.at(sequence), node);
  }
  while (!call_timers_.empty() && call_timers_.begin()->first <= now_) {
    const CallId call = call_timers_.begin()->second;
    const HeldGet get = gets_.at(call);
    const Job* const job = FindJob(get.job_id);
    Abandon(call);
    if (job != nullptr) ReplyJob(call, *job, get.with_env);
  }
  while (!query_timers_.empty() && query_timers_.begin()->first <= now_) {
    const uint64_t id = query_timers_.begin()->second;
    const OpenQuery query = queries_.at(id);
    query_timers_.erase(query_timers_.begin());
    queries_.erase(id);
    reads_.erase(query.call);
    ReplyError(query.call, MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_UNSPECIFIED,
                                     absl::StrCat("node ", Quoted(query.node),
                                                  " did not answer in time: try again")));
  }
  End();
}

void JobsCore::Hear(const GroupNews& news, const Event& event, JobsOutput* out) {
  Begin(event, out);
  absl::string_view group = news.group;
  const bool of_agents = absl::ConsumeSuffix(&group, kAgentsSuffix);
  const auto attempt = AttemptOf(group);
  Job* const job = attempt.has_value() ? FindJob(attempt->first) : nullptr;
  if (job != nullptr && IsActive(job->record.state()) &&
      Current(job)->number() == attempt->second) {
    const v1::AttemptTimes& times = Current(job)->times();
    switch (news.stage) {
      case AttemptStage::kSealed:
        // The sealing of the workers' group takes precedence over that of the agents' group.
        if (!of_agents || times.sealed_unix_ms() == 0) Reach(job, news.stage);
        break;
      case AttemptStage::kDetected:
        // A worker that ends because it was stopped has not failed.
        if (Current(job)->has_end() || Current(job)->stop()) break;
        Reach(job, news.stage);
        if (news.at != absl::InfinitePast()) Reach(job, AttemptStage::kFailed, news.at);
        break;
      default:
        Reach(job, news.stage, news.at);
    }
  }
  End();
}

void JobsCore::Reach(Job* job, AttemptStage stage, absl::Time at) {
  v1::JobRecord& record = job->record;
  StageNews news = {
      .stage = stage, .at = at, .now = now_, .as_told = options_.mutants.believes_ages};
  if (record.history_size() > 1) {
    news.not_before = LatestOf(record.history(record.history_size() - 2).times());
  }
  if (NoteStage(news, Current(job)->mutable_times())) Touch(*job);
}

absl::Time JobsCore::NextDeadline() const {
  absl::Time next = dirty_ ? now_ : schedule_at_;
  if (!node_timers_.empty()) next = std::min(next, node_timers_.begin()->first);
  if (!limits_.empty()) next = std::min(next, limits_.begin()->first);
  if (!retained_.empty()) next = std::min(next, retained_.begin()->first);
  if (!avoided_.empty()) next = std::min(next, std::get<0>(*avoided_.begin()));
  if (!call_timers_.empty()) next = std::min(next, call_timers_.begin()->first);
  if (!query_timers_.empty()) next = std::min(next, query_timers_.begin()->first);
  // Ticks regularly while nodes have leases: a gap shows that this process was paused.
  if (!node_timers_.empty()) next = std::min(next, now_ + kTickWhileNodesRun);
  return next;
}

// ---- jobs

JobsCore::Error JobsCore::Resubmit(CallId call, const Job& job, uint64_t hash, bool dry_run) {
  if (job.record.request_hash() != hash) {
    return MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_KEY_REUSED,
                     absl::StrCat("the idempotency_key ", Quoted(job.record.idempotency_key()),
                                  " was used for job ", job.record.job_id(),
                                  ", which has another specification: use a new key"));
  }
  v1::OpResult result;
  *result.mutable_submit_job()->mutable_job() = View(job);
  result.mutable_submit_job()->set_existed(true);
  if (dry_run) {
    v1::JobPlan* const plan = result.mutable_submit_job()->mutable_plan();
    plan->set_why(absl::StrCat("job ", job.record.job_id(), " has this key, and ",
                               StateText(job.record.state())));
    if (IsActive(job.record.state())) {
      *plan->mutable_placements() = Last(job.record).placements();
      plan->set_processes(CountProcesses(Last(job.record)));
      PlanPorts(plan);
    }
    *plan->mutable_spares() = job.record.spares();
  }
  Reply(call, std::move(result));
  return std::nullopt;
}

JobsCore::Error JobsCore::CheckSize(const v1::JobSpec& spec) const {
  if (spec.wait_for_nodes() || !Settled()) return std::nullopt;
  // Cordoned nodes count, because they return.
  const CandidateNodes all = Candidates(/*free=*/false, /*cordoned_too=*/true);
  if (all.empty() || HasRoom(spec, {}, all)) return std::nullopt;
  const auto lost = std::count_if(nodes_.begin(), nodes_.end(), [](const auto& node) {
    return node.second.lost || !node.second.known;
  });
  return MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_BAD_FIELD,
                   absl::StrCat("the job is larger than all nodes together",
                                lost == 0 ? ""
                                          : absl::StrCat(", without ", lost,
                                                         lost == 1 ? " that is" : " that are",
                                                         " lost (muster nodes)"),
                                ": it needs ", Place(spec, {}, all).why,
                                "; ask for less, or set wait_for_nodes to queue it"));
}

JobsCore::Error JobsCore::Submit(CallId call, const v1::SubmitJobRequest& request) {
  if (request.idempotency_key().size() > kMaxKey) {
    return TooLarge("idempotency_key",
                    absl::StrCat("the idempotency_key has ", request.idempotency_key().size(),
                                 " bytes: at most ", kMaxKey));
  }
  if (request.owner().size() > kMaxKey) {
    return TooLarge(
        "owner", absl::StrCat("owner has ", request.owner().size(), " bytes: at most ", kMaxKey));
  }
  // The identity from the transport takes precedence over the client's claim.
  const std::string owner =
      caller_ != nullptr && !caller_->name.empty() ? caller_->name : request.owner();
  v1::JobSpec spec = request.spec();
  // First checks whether this is a repeat: what an older coordinator has accepted stays accepted.
  if (Error error = CheckSpecSize(spec)) return error;
  FillJobSpec(&spec);
  const uint64_t hash = HashJobSpec(spec);
  if (const auto it = by_key_.find(Key(owner, request.idempotency_key()));
      !request.idempotency_key().empty() && it != by_key_.end()) {
    return Resubmit(call, jobs_.at(it->second), hash, request.dry_run());
  }
  if (Error error = CheckFilledJobSpec(spec)) return error;
  if (!no_room_.empty()) {
    return MakeError(absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT, no_room_);
  }
  if (Error error = CheckSize(spec)) return error;
  if (Error error = CheckLimits(owner, spec)) return error;
  if (request.dry_run()) {
    v1::OpResult result;
    v1::SubmitJobReply* const reply = result.mutable_submit_job();
    *reply->mutable_plan() = PlanOf(owner, spec);
    reply->mutable_job()->set_owner(owner);
    for (v1::JobFile& file : *spec.mutable_files()) file.clear_content();
    *reply->mutable_job()->mutable_spec() = std::move(spec);
    Reply(call, std::move(result));
    return std::nullopt;
  }
  if (!MakeRoomForOne()) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT,
        absl::StrCat(
            "the coordinator has ", jobs_.size(), " jobs of ", bytes_ >> 20,
            " MiB that have not ended, which is its limit: try again when some have ended"));
  }
  const uint64_t sequence = ++last_sequence_;
  Job& job = jobs_[sequence];
  v1::JobRecord& record = job.record;
  record.set_job_id(absl::StrCat(spec.name(), "-", sequence));
  *record.mutable_spec() = std::move(spec);
  record.set_owner(owner);
  record.set_sequence(sequence);
  record.set_idempotency_key(request.idempotency_key());
  record.set_request_hash(hash);
  record.set_submitted_unix_ms(request.unix_ms());
  by_id_[record.job_id()] = sequence;
  if (!request.idempotency_key().empty()) by_key_[KeyOf(record)] = sequence;
  SetState(&job, v1::JOB_STATE_QUEUED, "it was submitted");
  out_->notices.push_back(
      {false, record.job_id(), absl::StrCat("submitted: ", DescribeDemand(record.spec()))});
  at_end_.push_back([this, call, sequence] {
    const Job& job = jobs_.at(sequence);
    v1::OpResult result;
    *result.mutable_submit_job()->mutable_job() = View(job);
    *result.mutable_submit_job()->mutable_plan() = PlanOf(job);
    Reply(call, std::move(result));
  });
  return std::nullopt;
}

v1::JobPlan JobsCore::PlanOf(const std::string& owner, const v1::JobSpec& spec) const {
  v1::JobRecord record;
  record.set_sequence(last_sequence_ + 1);
  record.set_job_id(absl::StrCat(spec.name(), "-", record.sequence()));
  record.set_owner(owner);
  *record.mutable_spec() = spec;
  ScheduleQuestion question = Question();
  question.queued.push_back({&record});
  ScheduleDecision decision = Schedule(std::move(question));
  for (ScheduleDecision::Start& start : decision.starts) {
    if (start.job_id != record.job_id()) continue;
    v1::JobPlan plan;
    plan.set_starts_now(true);
    plan.set_processes(start.placement.processes);
    for (v1::Placement& one : start.placement.placements) *plan.add_placements() = std::move(one);
    for (v1::Placement& spare : start.placement.spares) *plan.add_spares() = std::move(spare);
    PlanPorts(&plan);
    return plan;
  }
  for (const auto& [job_id, why] : decision.waits) {
    if (job_id == record.job_id()) return PlanOfOneThatWaits(record, why);
  }
  return PlanOfOneThatWaits(record, "");
}

v1::JobPlan JobsCore::PlanOfOneThatWaits(const v1::JobRecord& record,
                                         const std::string& why) const {
  v1::JobPlan plan;
  plan.set_why(absl::StrCat("waits for ", why));
  PlacementDecision decision =
      Place(record.spec(), record.avoided_nodes(), Candidates(/*free=*/false));
  plan.set_processes(decision.processes);
  for (v1::Placement& one : decision.placements) *plan.add_placements() = std::move(one);
  // The owner's limit allows only this many besides the job itself.
  const int most = record.owner().empty() ? 0 : options_.max_processes_of_owner;
  int64_t left = most > 0 ? most - decision.processes : std::numeric_limits<int64_t>::max();
  for (v1::Placement& spare : decision.spares) {
    left -= spare.processes();
    if (left < 0) break;
    *plan.add_spares() = std::move(spare);
  }
  PlanPorts(&plan);
  return plan;
}

v1::JobPlan JobsCore::PlanOf(const Job& job) const {
  const v1::JobRecord& record = job.record;
  if (!IsActive(record.state())) return PlanOfOneThatWaits(record, job.waits_for);
  v1::JobPlan plan;
  plan.set_starts_now(true);
  *plan.mutable_placements() = Last(record).placements();
  plan.set_processes(CountProcesses(Last(record)));
  *plan.mutable_spares() = record.spares();
  PlanPorts(&plan);
  return plan;
}

void JobsCore::PlanPorts(v1::JobPlan* plan) const {
  if (plan->placements_size() == 0) return;
  const auto add = [&](absl::string_view name, const std::string& node, absl::string_view why) {
    v1::PlannedPort* const port = plan->add_ports();
    port->set_name(std::string(name));
    port->set_node(node);
    port->set_why(std::string(why));
    const auto it = nodes_.find(node);
    if (it == nodes_.end()) return;
    port->set_first(it->second.info.first_free_port());
    port->set_last(it->second.info.last_free_port());
  };
  add("master_port", plan->placements(0).node(),
      "MASTER_PORT of programs that meet by themselves, at rank 0: its node takes a free port when "
      "an attempt starts");
  for (const v1::Placement& placement : plan->placements()) {
    add("processes", placement.node(),
        "each process takes free ports for its process groups; to the coordinator they go through "
        "a socket of their node's agent");
  }
}

v1::JobRecord JobsCore::View(const Job& job) {
  v1::JobRecord view = job.record;
  for (v1::JobFile& file : *view.mutable_spec()->mutable_files()) file.clear_content();
  SetWords(job, &view);
  return view;
}

void JobsCore::SetWords(const Job& job, v1::JobRecord* view) {
  const v1::JobRecord& record = job.record;
  view->set_attempts(LastBegun(record));
  if (record.state() == v1::JOB_STATE_QUEUED && !job.waits_for.empty()) {
    view->set_why(absl::StrCat(record.why(), "; it waits for ", job.waits_for));
  }
  if (record.state() == v1::JOB_STATE_RUNNING && !HasEndedPart(Last(record)) &&
      CountProcesses(Last(record)) < record.spec().min_processes()) {
    view->set_why(absl::StrCat(record.why(), "; it starts again when there is room for ",
                               DescribeSize(record.spec())));
  }
  if (record.state() == v1::JOB_STATE_RUNNING && record.avoided_nodes_size() > 0 &&
      CountProcesses(Last(record)) < record.spec().max_processes()) {
    view->set_why(absl::StrCat(view->why(), "; for some time it avoids ", DescribeAvoided(record)));
  }
}

v1::JobRecord JobsCore::Listed(const Job& job) {
  const v1::JobRecord& record = job.record;
  // For a job of a thousand nodes, earlier attempts are most of its record, so they are not copied.
  v1::JobRecord view;
  view.set_job_id(record.job_id());
  *view.mutable_spec() = record.spec();
  view.mutable_spec()->clear_env();
  for (v1::JobFile& file : *view.mutable_spec()->mutable_files()) file.clear_content();
  view.set_owner(record.owner());
  view.set_state(record.state());
  view.set_why(record.why());
  view.set_restarts(record.restarts());
  if (record.history_size() > 0) {
    v1::JobAttempt* const last = view.add_history();
    *last = Last(record);
    if (last->has_end()) last->mutable_end()->clear_hung();  // large
  }
  view.set_sequence(record.sequence());
  view.set_revision(record.revision());
  view.set_idempotency_key(record.idempotency_key());
  view.set_request_hash(record.request_hash());
  view.set_submitted_unix_ms(record.submitted_unix_ms());
  *view.mutable_avoided_nodes() = record.avoided_nodes();
  view.set_wanted(record.wanted());
  view.set_grows(record.grows());
  *view.mutable_spares() = record.spares();
  *view.mutable_class_restarts() = record.class_restarts();
  view.set_ended_unix_ms(record.ended_unix_ms());
  SetWords(job, &view);
  return view;
}

void JobsCore::SetRevision(Job* job, uint64_t revision) {
  changes_.Changed(job->record.sequence(), job->record.revision(), revision);
  job->record.set_revision(revision);
}

bool JobsCore::SeesEnv(const Identity* who, const v1::JobRecord& record) {
  return who == nullptr || who->role == Role::kAdmin || who->name == record.owner();
}

JobsCore::Error JobsCore::CheckProcesses(const std::string& owner, const v1::JobSpec& spec) const {
  const int most = options_.max_processes_of_owner;
  if (owner.empty() || most <= 0 || spec.max_processes() <= most) return std::nullopt;
  return MakeError(
      absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT,
      absl::StrCat("the job has up to ", spec.max_processes(), " processes, and each user may run ",
                   most, " at a time: ask for fewer"));
}

JobsCore::Error JobsCore::CheckLimits(const std::string& owner, const v1::JobSpec& spec) const {
  if (owner.empty()) return std::nullopt;
  if (Error error = CheckProcesses(owner, spec)) return error;
  const int most = options_.max_jobs_of_owner;
  if (most <= 0) return std::nullopt;
  int jobs = 0;
  for (const auto& [sequence, job] : jobs_) {
    jobs += job.record.owner() == owner && !HasEnded(job.record.state()) ? 1 : 0;
  }
  if (jobs < most) return std::nullopt;
  return MakeError(absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT,
                   absl::StrCat("user ", Quoted(owner), " has ", jobs,
                                " jobs that have not ended, and each user may have ", most,
                                ": submit again when one has ended, or cancel one"));
}

void JobsCore::ReplyJob(CallId call, const Job& job, bool with_env) {
  v1::OpResult result;
  *result.mutable_get_job()->mutable_job() = View(job);
  if (!with_env) result.mutable_get_job()->mutable_job()->mutable_spec()->clear_env();
  Reply(call, std::move(result));
}

JobsCore::Error JobsCore::Get(CallId call, const v1::GetJobRequest& request) {
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return UnknownJob(request.job_id());
  const absl::Duration hold = std::min(FromProto(request.hold()), kMaxHold);
  if (request.seen_revision() != job->record.revision() || hold <= absl::ZeroDuration()) {
    ReplyJob(call, *job, SeesEnv(caller_, job->record));
    return std::nullopt;
  }
  gets_[call] = {request.job_id(), now_ + hold, SeesEnv(caller_, job->record)};
  gets_of_[request.job_id()].insert(call);
  call_timers_.insert({now_ + hold, call});
  return std::nullopt;
}

JobsCore::Error JobsCore::List(CallId call, const v1::ListJobsRequest& request) {
  if (request.page_size() < 0 || request.page_size() > kMaxPage) {
    return BadField("page_size", absl::StrCat("page_size is ", request.page_size(), ": give 1 to ",
                                              kMaxPage, ", or 0 for 100"));
  }
  const int page = request.page_size() == 0 ? 100 : request.page_size();
  v1::OpResult result;
  v1::ListJobsReply* const reply = result.mutable_list_jobs();
  size_t bytes = 0;
  for (auto it = jobs_.upper_bound(request.after_sequence()); it != jobs_.end(); ++it) {
    const v1::JobRecord& record = it->second.record;
    if (!IsNamed(request, record.job_id(), record.owner()) || !IsInState(request, record)) continue;
    if (reply->jobs_size() == page || bytes > kMaxPageBytes) {
      reply->set_more(true);
      break;
    }
    v1::JobRecord* const job = reply->add_jobs();
    *job = Listed(it->second);
    bytes += job->ByteSizeLong();
  }
  Reply(call, std::move(result));
  return std::nullopt;
}

std::optional<v1::OpError> JobsCore::ReadChanges(const v1::WatchJobsRequest& request,
                                                 const Identity* who, uint64_t durable_revision,
                                                 size_t max_bytes, WatchPlace* place,
                                                 v1::WatchJobsBatch* batch) const {
  if (!request.job_id().empty()) {
    const auto it = by_id_.find(request.job_id());
    if (it == by_id_.end()) return UnknownJob(request.job_id());
    const Job& job = jobs_.at(it->second);
    const uint64_t revision = job.record.revision();
    if (revision > place->seen && revision <= durable_revision) {
      v1::JobRecord* const record = batch->add_jobs();
      *record = View(job);
      if (!SeesEnv(who, *record)) record->mutable_spec()->clear_env();
      place->seen = revision;
    }
    batch->set_seen_revision(place->seen);
    return std::nullopt;
  }
  // A watcher that has read nothing has nothing to forget.
  const bool resumes = place->seen != 0 || place->last.first != 0;
  if (resumes && std::max(place->seen, place->removals_seen) < changes_.forgotten()) {
    batch->set_lists_kept(true);
    for (const auto& [sequence, job] : jobs_) {
      if (IsNamed(request, job.record.job_id(), job.record.owner()) &&
          IsInState(request, job.record)) {
        batch->add_kept(job.record.job_id());
      }
    }
    place->removals_seen = changes_.forgotten();
  }
  const auto& removals = changes_.removals();
  const uint64_t known = std::max(resumes ? place->seen : durable_revision, place->removals_seen);
  for (auto it = std::upper_bound(removals.begin(), removals.end(), known,
                                  [](uint64_t revision, const JobChanges::Removal&removal) {
                                    return revision < removal.revision;
                                  });
       it != removals.end() && it->revision <= durable_revision; ++it) {
    if (IsNamed(request, it->job_id, it->owner)) batch->add_gone(it->job_id);
  }
  place->removals_seen = std::max(place->removals_seen, durable_revision);
  size_t bytes = batch->ByteSizeLong();
  const auto& changes = changes_.changes();
  const std::pair<uint64_t, uint64_t> all_of_seen = {place->seen, UINT64_MAX};
  auto it = changes.upper_bound(std::max(all_of_seen, place->last));
  for (bool first = true; it != changes.end() && it->first <= durable_revision;
       ++it, first = false) {
    if (bytes > max_bytes && !first) {
      batch->set_more(true);
      break;
    }
    const Job& job = jobs_.at(it->second);
    place->last = *it;
    if (!IsNamed(request, job.record.job_id(), job.record.owner())) continue;
    if (IsInState(request, job.record)) {
      v1::JobRecord* const record = batch->add_jobs();
      *record = Listed(job);
      bytes += record->ByteSizeLong();
    } else if (resumes) {
      batch->add_gone(job.record.job_id());
      bytes += job.record.job_id().size();
    }
  }
  // A watcher that resumes from here gets the rest of a partly sent revision, and the sent part
  // again.
  place->seen = std::max(place->seen, batch->more() ? it->first - 1 : durable_revision);
  batch->set_seen_revision(place->seen);
  return std::nullopt;
}

JobsCore::Error JobsCore::Control(CallId call, const v1::ControlJobRequest& request) {
  Job* const job = FindJob(request.job_id());
  if (job == nullptr) return UnknownJob(request.job_id());
  const std::string why = Reason(request.why());
  if (request.action() == v1::JOB_ACTION_REMOVE) {
    if (Error error = Remove(job)) return error;
    v1::OpResult result;
    result.mutable_control_job();
    Reply(call, std::move(result));
    return std::nullopt;
  }
  const bool resize = request.action() == v1::JOB_ACTION_RESIZE;
  if (Error error = resize ? Resize(job, request, why)
                           : Act(job, request.action(), request.after_attempt(), why)) {
    return error;
  }
  const uint64_t sequence = job->record.sequence();
  at_end_.push_back([this, call, sequence] {
    v1::OpResult result;
    *result.mutable_control_job()->mutable_job() = View(jobs_.at(sequence));
    Reply(call, std::move(result));
  });
  return std::nullopt;
}

JobsCore::Error JobsCore::Act(Job* job, v1::JobAction action, int after_attempt,
                              const std::string& why) {
  v1::JobRecord& record = job->record;
  const v1::JobState state = record.state();
  const std::string suffix = why.empty() ? "" : absl::StrCat(": ", why);
  const bool leaves = action == v1::JOB_ACTION_CANCEL || action == v1::JOB_ACTION_SUSPEND;
  if (leaves && state == v1::JOB_STATE_STOPPING && record.wanted() != v1::JOB_ACTION_CANCEL) {
    DropSpares(job);
  }
  switch (action) {
    case v1::JOB_ACTION_CANCEL:
      if (state == v1::JOB_STATE_CANCELLED) return std::nullopt;
      if (HasEnded(state)) return WrongState(record, StateText(state));
      if (!IsActive(state)) {
        SetState(job, v1::JOB_STATE_CANCELLED, absl::StrCat("it was cancelled", suffix));
        return std::nullopt;
      }
      record.set_wanted(v1::JOB_ACTION_CANCEL);
      Stop(job, v1::END_CLASS_CANCELLED, absl::StrCat("it was cancelled", suffix));
      Touch(*job);
      return std::nullopt;
    case v1::JOB_ACTION_SUSPEND:
      if (state == v1::JOB_STATE_SUSPENDED) return std::nullopt;
      if (HasEnded(state)) return WrongState(record, StateText(state));
      if (!IsActive(state)) {
        SetState(job, v1::JOB_STATE_SUSPENDED, absl::StrCat("it was suspended", suffix));
        return std::nullopt;
      }
      if (record.wanted() == v1::JOB_ACTION_CANCEL) {
        return WrongState(record, "is being cancelled");
      }
      record.set_wanted(v1::JOB_ACTION_SUSPEND);
      Stop(job, v1::END_CLASS_SUSPENDED, absl::StrCat("it was suspended", suffix));
      Touch(*job);
      return std::nullopt;
    case v1::JOB_ACTION_RESUME:
      if (HasEnded(state)) {
        return WrongState(
            record, absl::StrCat(StateText(state), ": ",
                                 state == v1::JOB_STATE_SUCCEEDED ? "submit it again" : "retry it",
                                 " to run it again"));
      }
      if (state == v1::JOB_STATE_SUSPENDED) {
        SetState(job, v1::JOB_STATE_QUEUED, absl::StrCat("it was resumed", suffix));
      } else if (record.wanted() == v1::JOB_ACTION_SUSPEND) {
        record.clear_wanted();
        Touch(*job);
      }
      return std::nullopt;
    case v1::JOB_ACTION_RETRY:
      return Retry(job, after_attempt, why);
    default:
      return BadField("action", absl::StrCat("action ", static_cast<int>(action), " is unknown"));
  }
}

JobsCore::Error JobsCore::Retry(Job* job, int after_attempt, const std::string& why) {
  v1::JobRecord& record = job->record;
  if (record.state() == v1::JOB_STATE_SUCCEEDED) {
    return WrongState(record, "has succeeded: submit it again to run it again");
  }
  if (record.state() == v1::JOB_STATE_SUSPENDED) {
    return WrongState(record, "is suspended: resume it");
  }
  if (!HasEnded(record.state())) return std::nullopt;
  if (after_attempt <= 0 && LastBegun(record) > 0) {
    return BadField("after_attempt",
                    absl::StrCat("after_attempt is ", after_attempt, ", and attempt ",
                                 LastBegun(record), " of job ", record.job_id(),
                                 " has ended: give the number of the last one that you know of, "
                                 "so that a repeat of the call starts no other"));
  }
  // This repeats the call that has already begun the attempt.
  if (after_attempt < LastBegun(record)) return std::nullopt;
  if (Error error = CheckLimits(record.owner(), record.spec())) return error;
  record.set_restarts(0);
  record.clear_class_restarts();
  ForgetAvoided(job);
  job->avoided.clear();
  job->node_failures = 0;
  job->not_before = absl::InfinitePast();
  SetState(job, v1::JOB_STATE_QUEUED,
           why.empty() ? "it is retried" : absl::StrCat("it is retried: ", why));
  return std::nullopt;
}

JobsCore::Error JobsCore::Resize(Job* job, const v1::ControlJobRequest& request,
                                 const std::string& why) {
  v1::JobRecord& record = job->record;
  if (record.state() == v1::JOB_STATE_SUCCEEDED) {
    return WrongState(record, "has succeeded: submit it again with another number of processes");
  }
  if (record.wanted() == v1::JOB_ACTION_CANCEL) return WrongState(record, "is being cancelled");
  v1::JobSpec spec = record.spec();
  spec.set_min_processes(request.min_processes());
  spec.set_max_processes(request.max_processes());
  if (Error error = CompleteProcesses(&spec)) return error;
  if (Error error = CheckSize(spec)) return error;
  if (Error error = CheckProcesses(record.owner(), spec)) return error;
  const std::string suffix = why.empty() ? "" : absl::StrCat(": ", why);
  const bool runs =
      record.state() == v1::JOB_STATE_STARTING || record.state() == v1::JOB_STATE_RUNNING;
  const bool changes = spec.min_processes() != record.spec().min_processes() ||
                       spec.max_processes() != record.spec().max_processes();
  if (runs && HasEndedPart(Last(record))) {
    if (!changes) return std::nullopt;
    return WrongState(record, "has processes that have succeeded: it keeps its size");
  }
  if (changes) {
    out_->notices.push_back({false, record.job_id(),
                             absl::StrCat("resized from ", DescribeSize(record.spec()), " to ",
                                          DescribeSize(spec), suffix)});
    record.mutable_spec()->set_min_processes(spec.min_processes());
    record.mutable_spec()->set_max_processes(spec.max_processes());
    Touch(*job);
    dirty_ = true;
  }
  if (!runs) return std::nullopt;
  const int now = CountProcesses(Last(record));
  if (now > spec.max_processes()) {
    Stop(job, v1::END_CLASS_RESIZED,
         absl::StrCat("it is resized from ", now, " to ", DescribeSize(spec), suffix));
    return std::nullopt;
  }
  if (now == spec.max_processes()) return std::nullopt;
  record.set_grows(true);
  Touch(*job);
  NoteGrowth(*job);
  dirty_ = true;
  return std::nullopt;
}

absl::Time JobsCore::GrowsFrom(const Job& job) const {
  const v1::JobRecord& record = job.record;
  if (record.state() != v1::JOB_STATE_RUNNING || Last(record).stop() ||
      HasEndedPart(Last(record))) {
    return absl::InfiniteFuture();
  }
  const int now = CountProcesses(Last(record));
  if (now >= record.spec().max_processes()) return absl::InfiniteFuture();
  if (record.grows() || now < record.spec().min_processes()) return absl::InfinitePast();
  if (!record.spec().has_grow_after()) return absl::InfiniteFuture();
  return job.runs_since + FromProto(record.spec().grow_after());
}

void JobsCore::NoteSpares(const Job& job) {
  const v1::JobRecord& record = job.record;
  const uint64_t sequence = record.sequence();
  if (record.spares_size() > 0) {
    spared_.insert(sequence);
  } else {
    spared_.erase(sequence);
  }
  const bool runs =
      record.state() == v1::JOB_STATE_STARTING || record.state() == v1::JOB_STATE_RUNNING;
  if (runs && record.spares_size() < record.spec().spare_nodes()) {
    unspared_.insert(sequence);
  } else {
    unspared_.erase(sequence);
  }
}

void JobsCore::DropSpares(Job* job) {
  if (job->record.spares_size() == 0) return;
  job->record.clear_spares();
  NoteSpares(*job);
  Touch(*job);
  dirty_ = true;
}

void JobsCore::DropSparesOn(const std::string& node, std::optional<int> gpus) {
  for (const uint64_t sequence : absl::btree_set<uint64_t>(spared_)) {
    Job& job = jobs_.at(sequence);
    auto* const spares = job.record.mutable_spares();
    const auto gone = std::remove_if(spares->begin(), spares->end(), [&](const v1::Placement& one) {
      return one.node() == node &&
             (!gpus.has_value() || std::any_of(one.gpus().begin(), one.gpus().end(),
                                               [&](int gpu) { return gpu >= *gpus; }));
    });
    if (gone == spares->end()) continue;
    spares->erase(gone, spares->end());
    NoteSpares(job);
    Touch(job);
    dirty_ = true;
  }
}

void JobsCore::NoteGrowth(const Job& job) {
  if (GrowsFrom(job) == absl::InfiniteFuture()) {
    may_grow_.erase(job.record.sequence());
  } else {
    may_grow_.insert(job.record.sequence());
  }
}

JobsCore::Error JobsCore::Remove(Job* job) {
  if (!HasEnded(job->record.state())) {
    return WrongState(job->record,
                      absl::StrCat(StateText(job->record.state()), ": cancel it first"));
  }
  Forget(job->record.sequence());
  return std::nullopt;
}

void JobsCore::Forget(uint64_t sequence) {
  const auto it = jobs_.find(sequence);
  const v1::JobRecord& record = it->second.record;
  out_->changes.emplace_back().mutable_job_record_changed()->set_removed(record.job_id());
  if (const auto of = gets_of_.find(record.job_id()); of != gets_of_.end()) {
    for (const CallId call : absl::btree_set<CallId>(of->second)) {
      Abandon(call);
      ReplyError(call, UnknownJob(record.job_id()));
    }
  }
  changes_.Removed(sequence, record.revision(), {revision_, record.job_id(), record.owner()});
  by_id_.erase(record.job_id());
  by_key_.erase(KeyOf(record));
  ended_.erase(EndOf(record));
  spared_.erase(sequence);
  unspared_.erase(sequence);
  retained_.erase({it->second.forget_at, sequence});
  bytes_ -= it->second.bytes;
  jobs_.erase(it);
}

void JobsCore::Measure(Job* job) {
  const size_t bytes = job->record.ByteSizeLong();
  bytes_ += bytes - job->bytes;
  job->bytes = bytes;
}

bool JobsCore::MakeRoomForOne() {
  while (jobs_.size() >= options_.max_jobs || bytes_ >= options_.max_bytes) {
    if (ended_.empty()) return false;
    Forget(ended_.begin()->second);
  }
  return true;
}

void JobsCore::SetState(Job* job, v1::JobState state, std::string why) {
  v1::JobRecord& record = job->record;
  const uint64_t sequence = record.sequence();
  queued_.erase(sequence);
  active_.erase(sequence);
  ended_.erase(EndOf(record));
  if (state == v1::JOB_STATE_QUEUED) queued_.insert(sequence);
  if (IsActive(state)) active_.insert(sequence);
  record.clear_ended_unix_ms();
  if (HasEnded(state)) {
    record.set_ended_unix_ms(absl::ToUnixMillis(now_));
    ended_.insert(EndOf(record));
  }
  record.set_state(state);
  record.set_why(std::move(why));
  job->waits_for.clear();
  if (state == v1::JOB_STATE_RUNNING) job->runs_since = now_;
  // The next attempt starts with as many processes as fit.
  if (!IsActive(state)) record.clear_grows();
  if (HasEnded(state) || state == v1::JOB_STATE_SUSPENDED) record.clear_spares();
  if (HasEnded(state)) ForgetAvoided(job);
  NoteGrowth(*job);
  NoteSpares(*job);
  NoteRetention(job);
  Touch(*job);
  dirty_ = true;
}

void JobsCore::NoteRetention(Job* job) {
  const v1::JobRecord& record = job->record;
  retained_.erase({job->forget_at, record.sequence()});
  job->forget_at = absl::InfiniteFuture();
  if (!HasEnded(record.state()) || !record.spec().has_retention()) return;
  // The clock of an earlier coordinator may have been ahead.
  job->forget_at = std::min(absl::FromUnixMillis(record.ended_unix_ms()), now_) +
                   FromProto(record.spec().retention());
  retained_.insert({job->forget_at, record.sequence()});
}

void JobsCore::Stop(Job* job, v1::EndClass end_class, const std::string& why) {
  v1::JobAttempt* const attempt = Current(job);
  if (!attempt->has_end()) {
    attempt->mutable_end()->set_end_class(end_class);
    attempt->mutable_end()->set_why(why);
    attempt->mutable_end()->set_rank(-1);
  }
  if (attempt->stop()) return;
  attempt->set_stop(true);
  // If no other attempt follows, no room is kept for one.
  if (end_class == v1::END_CLASS_CANCELLED || end_class == v1::END_CLASS_SUSPENDED ||
      end_class == v1::END_CLASS_TIME_LIMIT || end_class == v1::END_CLASS_USER_ERROR) {
    DropSpares(job);
  }
  Reach(job, AttemptStage::kDecided);
  for (const v1::Placement& placement : attempt->placements()) TouchNode(placement.node());
  SetState(job, v1::JOB_STATE_STOPPING, attempt->end().why());
}

void JobsCore::Avoid(Job* job, const std::string& node) {
  const auto& avoided = job->record.avoided_nodes();
  if (node.empty() || std::find(avoided.begin(), avoided.end(), node) != avoided.end()) return;
  job->record.add_avoided_nodes(node);
  ++job->avoided[node].times;
  AvoidForAWhile(job, node);
  Touch(*job);
}

void JobsCore::AvoidForAWhile(Job* job, const std::string& node) {
  Job::Avoidance& avoidance = job->avoided[node];
  const int doublings = std::clamp(avoidance.times - 1, 0, 10);
  avoidance.until = now_ + std::min(kAvoidedFirst * (1 << doublings), kAvoidedMost);
  avoided_.insert({avoidance.until, job->record.sequence(), node});
}

void JobsCore::TryAgain(Job* job, const std::string& node) {
  // If the job ended under an older coordinator, the end of the avoidance is not known.
  if (const auto it = job->avoided.find(node); it != job->avoided.end()) {
    avoided_.erase({it->second.until, job->record.sequence(), node});
  }
  auto* const nodes = job->record.mutable_avoided_nodes();
  nodes->erase(std::remove(nodes->begin(), nodes->end(), node), nodes->end());
  Touch(*job);
  dirty_ = true;
}

void JobsCore::ForgetAvoided(Job* job) {
  while (job->record.avoided_nodes_size() > 0) {
    TryAgain(job, std::string(job->record.avoided_nodes(0)));
  }
}

void JobsCore::EndPlacement(Job* job, v1::Placement* placement, const v1::AttemptEnd& end,
                            absl::Time failed) {
  v1::JobAttempt* const attempt = Current(job);
  // If many nodes cannot start it, for example because their disks are full, the next attempts
  // avoid all of them at once. Processes of one node may have been killed only because another node
  // failed.
  if (placement->state() == v1::PLACEMENT_STATE_ASSIGNED &&
      end.end_class() == v1::END_CLASS_NODE_FAILED &&
      attempt->end().end_class() == v1::END_CLASS_NODE_FAILED) {
    job->could_not_start.push_back(placement->node());
  }
  placement->set_state(v1::PLACEMENT_STATE_ENDED);
  placement->set_end_class(end.end_class());
  if (const auto node = nodes_.find(placement->node()); node != nodes_.end()) {
    node->second.jobs.erase(job->record.sequence());
  }
  TouchNode(placement->node());
  TouchPlacement(*job, *placement);
  // Schedules once for many events, because a job of a thousand nodes ends in a thousand events.
  ScheduleSoon();
  if (end.end_class() != v1::END_CLASS_SUCCEEDED) {
    const v1::EndClass former = attempt->end().end_class();
    const bool echo =  // a consequence of a failure that no node has reported
        options_.mutants.forgets_echoes && former == v1::END_CLASS_PEER_FAILED;
    if (IsBetterCause(former, end.end_class()) || echo) {
      *attempt->mutable_end() = end;
      Touch(*job);
      Reach(job, AttemptStage::kDetected);
      if (failed != absl::InfinitePast()) Reach(job, AttemptStage::kFailed, failed);
    }
    Stop(job, end.end_class(), end.why());
  }
  const bool over = std::all_of(
      attempt->placements().begin(), attempt->placements().end(),
      [](const v1::Placement& other) { return other.state() == v1::PLACEMENT_STATE_ENDED; });
  if (over || (options_.mutants.starts_before_former_ended && attempt->stop())) Finish(job);
}

void JobsCore::Finish(Job* job) {
  Reach(job, AttemptStage::kFenced);
  v1::JobRecord& record = job->record;
  const v1::JobAttempt& attempt = *Current(job);
  if (job->ends_by != absl::InfiniteFuture()) {
    limits_.erase({std::exchange(job->ends_by, absl::InfiniteFuture()), record.sequence()});
  }
  const AttemptOutcome outcome =
      OutcomeOf({.record = record,
                 .node_failures = job->node_failures,
                 .given_up_early = job->given_up_early,
                 .could_not_start = job->could_not_start,
                 .retries_user_errors = options_.mutants.retries_user_errors,
                 .forgets_class_limits = options_.mutants.forgets_class_limits,
                 .restarts_hangs_for_free = options_.mutants.restarts_hangs_for_free});
  const bool succeeded = outcome.end_class == v1::END_CLASS_SUCCEEDED;
  const std::string ended = absl::StrCat(
      "attempt ", attempt.number(),
      " has ended: ", succeeded ? "all processes have succeeded" : attempt.end().why());
  out_->closed_groups.emplace_back(GroupOf(record.job_id(), attempt.number()), ended);
  out_->notices.push_back({!succeeded, record.job_id(), ended});
  record.clear_wanted();
  if (outcome.end_class != v1::END_CLASS_NODE_FAILED) {
    job->node_failures = 0;
  } else if (outcome.state == v1::JOB_STATE_QUEUED) {
    ++job->node_failures;
  }
  if (outcome.counts_class) {
    CountStart(record.spec().class_limits(), outcome.end_class, record.mutable_class_restarts());
  }
  if (outcome.counts_restart) record.set_restarts(record.restarts() + 1);
  for (const std::string& node : outcome.avoid) Avoid(job, node);
  if (outcome.state == v1::JOB_STATE_QUEUED) {
    const bool waits = outcome.delay > absl::ZeroDuration();
    job->not_before = waits ? now_ + outcome.delay : absl::InfinitePast();
  }
  SetState(job, outcome.state, outcome.why);
}

// ---- logs

JobsCore::Error JobsCore::ReadLog(CallId call, const v1::ReadJobLogRequest& request) {
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return UnknownJob(request.job_id());
  if (request.max_bytes() < 0 || request.max_bytes() > kMaxLogBytes) {
    return BadField("max_bytes", absl::StrCat("max_bytes is ", request.max_bytes(),
                                              ": give at most ", kMaxLogBytes));
  }
  if (request.offset() < -1 || request.tail_lines() < 0) {
    return BadField("offset", "offset is a number of bytes, or -1 for the last tail_lines lines");
  }
  const int last = LastBegun(job->record);
  const int wanted = request.attempt() == 0 ? last : request.attempt();
  const v1::JobAttempt* attempt = nullptr;
  for (const v1::JobAttempt& one : job->record.history()) {
    if (one.number() == wanted) attempt = &one;
  }
  if (attempt == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                     last == 0 ? absl::StrCat("job ", job->record.job_id(),
                                              " has not started: ", View(*job).why())
                               : absl::StrCat("job ", job->record.job_id(), " has no attempt ",
                                              wanted, " whose logs are known: the last is ", last));
  }
  const v1::Placement* placement = nullptr;
  int rank = request.rank();
  for (const v1::Placement& one : attempt->placements()) {
    if (rank >= 0 && rank < one.processes()) {
      placement = &one;
      break;
    }
    rank -= one.processes();
  }
  if (request.rank() < 0 || placement == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                     absl::StrCat("attempt ", wanted, " of job ", job->record.job_id(),
                                  " has no rank ", request.rank()));
  }
  const auto it = nodes_.find(placement->node());
  if (it == nodes_.end() || !it->second.known || it->second.lost) {
    return MakeError(
        absl::StatusCode::kUnavailable, v1::ERROR_REASON_UNSPECIFIED,
        absl::StrCat("node ", Quoted(placement->node()), ", which has this log, is not connected"));
  }
  Node& node = it->second;
  if (node.uid != placement->node_uid()) {
    return MakeError(
        absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
        absl::StrCat("node ", Quoted(placement->node()), " has lost this log with its records"));
  }
  if (node.queries.size() >= kMaxQueries) {
    return MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_OVERLOADED,
                     absl::StrCat("node ", Quoted(placement->node()),
                                  " has too many questions about logs: try again"));
  }
  if (request.has_since_ago() && (FromProto(request.since_ago()) < absl::ZeroDuration() ||
                                  FromProto(request.since_ago()) > kMaxLogAge)) {
    return BadField("since_ago",
                    "since_ago is how long ago the first line was written: 0 to 100 years");
  }
  const absl::Duration wait =
      std::clamp(FromProto(request.wait()), absl::ZeroDuration(), kMaxLogWait);
  const uint64_t id = next_query_++;
  v1::LogQuery& query = node.queries.emplace_back();
  query.set_query_id(id);
  query.set_job_id(job->record.job_id());
  query.set_attempt(wanted);
  query.set_local_rank(rank);
  query.set_offset(request.offset());
  query.set_tail_lines(request.tail_lines());
  query.set_max_bytes(request.max_bytes() == 0 ? 256 << 10 : request.max_bytes());
  *query.mutable_wait() = ToProto(wait);
  if (request.has_since_ago()) *query.mutable_since_ago() = request.since_ago();
  const absl::Time until = now_ + wait + kLogTimeout;
  queries_[id] = {call, placement->node(), wanted, until};
  query_timers_.insert({until, id});
  reads_[call] = id;
  if (node.held.has_value()) AnswerSync(it->first, &node);
  return std::nullopt;
}

JobsCore::Error JobsCore::AnswerLog(CallId call, const v1::AnswerLogRequest& request) {
  if (request.data().size() > kMaxLogBytes) {
    return TooLarge("data", absl::StrCat("the answer has ", request.data().size(),
                                         " bytes: at most ", kMaxLogBytes));
  }
  const auto it = queries_.find(request.query_id());
  if (it != queries_.end() && it->second.node == request.node()) {
    const OpenQuery query = it->second;
    query_timers_.erase({query.until, it->first});
    queries_.erase(it);
    reads_.erase(query.call);
    if (request.error().empty()) {
      v1::OpResult result;
      v1::ReadJobLogReply* const reply = result.mutable_read_job_log();
      reply->set_data(request.data());
      reply->set_offset(request.offset());
      reply->set_next_offset(request.next_offset());
      reply->set_ended(request.ended());
      reply->set_attempt(query.attempt);
      reply->set_node(query.node);
      Reply(query.call, std::move(result));
    } else {
      ReplyError(query.call, MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                                       absl::StrCat("node ", Quoted(query.node), ": ",
                                                    Reason(request.error()))));
    }
  }
  v1::OpResult result;
  result.mutable_answer_log();
  Reply(call, std::move(result));
  return std::nullopt;
}

// ---- nodes

JobsCore::Error JobsCore::CheckSync(const v1::SyncNodeRequest& request) const {
  if (request.node().empty() || request.node().size() > kMaxNodeName) {
    return BadField("node", absl::StrCat("node has ", request.node().size(),
                                         " bytes: a name has 1 to ", kMaxNodeName));
  }
  if (request.node_uid() == 0) {
    return BadField("node_uid", absl::StrCat("node ", Quoted(request.node()),
                                             " has node_uid 0: draw a random one and keep it"));
  }
  if (request.info().ByteSizeLong() > kMaxInfoBytes) {
    return TooLarge(
        "info", absl::StrCat("what node ", Quoted(request.node()), " says of itself has more than ",
                             kMaxInfoBytes, " bytes"));
  }
  if (request.info().cpus() < 0 || request.info().memory_bytes() < 0) {
    return BadField("info", absl::StrCat("node ", Quoted(request.node()),
                                         " has a negative number of CPUs or bytes"));
  }
  const auto it = nodes_.find(request.node());
  if (it == nodes_.end()) {
    if (nodes_.size() < kMaxNodes) return std::nullopt;
    return MakeError(
        absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT,
        absl::StrCat("the coordinator has ", nodes_.size(), " nodes: at most ", kMaxNodes));
  }
  const Node& node = it->second;
  // A sequence number is a time of the node's clock, which may have been set back before its agent
  // was restarted. An older call that was still on its way does not come this long after the last
  // one.
  const bool silent = !node.held.has_value() && now_ - node.heard >= options_.node_lease / 2;
  if (node.uid == request.node_uid() && request.sequence() != 0 &&
      request.sequence() < node.sequence && !silent) {
    return MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_SUPERSEDED,
                     absl::StrCat("node ", Quoted(request.node()), " has made a later call"));
  }
  if (node.known && !node.lost && node.uid != request.node_uid() && !node.hung_up) {
    return MakeError(absl::StatusCode::kAlreadyExists, v1::ERROR_REASON_SUPERSEDED,
                     absl::StrCat("another agent of the name ", Quoted(request.node()),
                                  " is connected, on host ", Quoted(node.info.host()),
                                  ": give each agent a name of its own (--node)"));
  }
  return std::nullopt;
}

JobsCore::Error JobsCore::Sync(CallId call, const v1::SyncNodeRequest& request) {
  if (Error error = CheckSync(request)) return error;
  Node& node = nodes_[request.node()];
  const std::string& name = request.node();
  const bool was_known = node.known;  // since this coordinator started
  if (!node.known || node.lost) {
    out_->notices.push_back(
        {false, "",
         absl::StrCat("node ", Quoted(name), " is ", node.known ? "back" : "here", ": ",
                      request.info().cpus(), " CPUs, ", request.info().gpus_size(), " GPUs")});
    NodesHaveMore();
    // All changes have later revisions.
    if (node.version == 0) node.version = revision_ - 1;
  }
  if (node.uid != 0 && node.uid != request.node_uid()) {
    node.uid = request.node_uid();
    dirty_ = true;
    DropSparesOn(name);
  }
  node.uid = request.node_uid();
  node.sequence = request.sequence();
  node.hung_up = false;
  node.known = true;
  node.lost = false;
  if (now_ - heard_any_ > options_.node_lease / 2) returned_at_ = now_;
  node.heard = node.called = heard_any_ = now_;
  if (!google::protobuf::util::MessageDifferencer::Equals(node.info, request.info())) {
    NodesHaveMore();
    // Room that is kept may not exist any more; spares are placed again if it does.
    v1::NodeInfo with_level = node.info;
    with_level.set_log_level(request.info().log_level());
    if (was_known &&
        !google::protobuf::util::MessageDifferencer::Equals(with_level, request.info())) {
      DropSparesOn(name);
    }
    node.info = request.info();
    dirty_ = true;
    // The node's resources before this coordinator started are not known.
    if (!was_known) DropSparesOn(name, node.info.gpus_size());
  }
  if (request.cluster_id().empty() || request.cluster_id() == cluster_id_) {
    for (const v1::AttemptReport& report : request.attempts()) OnReport(name, &node, report);
    OnMissing(name, &node, request);
  }
  node.held_jobs.clear();
  // Another cluster may have jobs with the same names.
  if (request.cluster_id() == cluster_id_) {
    const int count = std::min(request.held_jobs_size(), kMaxHeldJobs);
    node.held_jobs.assign(request.held_jobs().begin(), request.held_jobs().begin() + count);
  }
  if (std::string leftover = LeftoverOf(name, request); leftover != node.leftover) {
    node.leftover = std::move(leftover);
    NodesHaveMore();
  }
  if (node.held.has_value()) {
    // The answer to the older call may never be read, so the new call gets the queries.
    std::vector<v1::LogQuery> queries = std::exchange(node.queries, {});
    AnswerSync(name, &node);
    node.queries = std::move(queries);
  }
  node.held = call;
  node.held_until = now_ + options_.node_lease / 3;
  syncs_[call] = name;
  SetNodeTimer(name, &node);
  at_end_.push_back([this, call, name, was_known, seen = request.seen_version()] {
    const auto it = nodes_.find(name);
    if (it == nodes_.end() || it->second.held != call) return;
    // Versions from different terms cannot be compared.
    if (!was_known || seen != it->second.version || !it->second.queries.empty()) {
      AnswerSync(name, &it->second);
    }
  });
  return std::nullopt;
}

void JobsCore::OnReport(const std::string& name, Node* node, const v1::AttemptReport& report) {
  Job* const job = FindJob(report.job_id());
  if (job == nullptr || !IsActive(job->record.state())) return;
  v1::JobAttempt* const attempt = Current(job);
  if (report.attempt() != attempt->number()) return;
  for (v1::Placement& placement : *attempt->mutable_placements()) {
    if (placement.node() != name || placement.node_uid() != node->uid ||
        placement.state() == v1::PLACEMENT_STATE_ENDED) {
      continue;
    }
    if (report.started_unix_ms() != 0 && attempt->started_unix_ms() == 0) {
      attempt->set_started_unix_ms(absl::ToUnixMillis(StartedAt(report, *attempt, now_)));
      Touch(*job);
    }
    if (report.state() == v1::PLACEMENT_STATE_RUNNING) {
      if (job->record.spec().has_time_limit() && job->ends_by == absl::InfiniteFuture() &&
          !attempt->stop()) {
        job->ends_by =
            now_ + FromProto(job->record.spec().time_limit()) - FromProto(report.ran_for());
        limits_.insert({job->ends_by, job->record.sequence()});
      }
      if (placement.state() != v1::PLACEMENT_STATE_RUNNING) {
        placement.set_state(v1::PLACEMENT_STATE_RUNNING);
        TouchPlacement(*job, placement);
        const bool all = std::none_of(attempt->placements().begin(), attempt->placements().end(),
                                      [](const v1::Placement& other) {
                                        return other.state() == v1::PLACEMENT_STATE_ASSIGNED;
                                      });
        if (all && job->record.state() == v1::JOB_STATE_STARTING) {
          SetState(job, v1::JOB_STATE_RUNNING,
                   absl::StrCat("attempt ", attempt->number(), " runs"));
        }
      }
      if (report.restart() > 0) OnAsked(job, placement, report);
    } else if (report.state() == v1::PLACEMENT_STATE_ENDED) {
      attempt->set_ended_unix_ms(
          std::max(attempt->ended_unix_ms(), absl::ToUnixMillis(EndedAt(report, *attempt, now_))));
      const bool counted = report.restart() > 0 && report.restart() <= attempt->restarts() &&
                           !options_.mutants.counts_failures_twice;
      const ReportedEnd reported =
          Understand(report, Cleaned(report.end(), name), *attempt,
                     placement.state() == v1::PLACEMENT_STATE_RUNNING, counted);
      if (reported.given_up_early) job->given_up_early = true;
      EndPlacement(job, &placement, reported.end,
                   report.has_failed_ago() && !counted ? now_ - FromProto(report.failed_ago())
                                                       : absl::InfinitePast());
    }
    return;
  }
}

void JobsCore::OnAsked(Job* job, const v1::Placement& placement, const v1::AttemptReport& report) {
  v1::JobAttempt* const attempt = Current(job);
  if (attempt->stop() || report.restart() != attempt->restarts() + 1) return;
  v1::AttemptEnd& end = job->asked[placement.node_rank()];
  end = Cleaned(report.end(), placement.node());
  // The node that has the cause asks too, unless it is lost; then the attempt ends.
  const bool all = static_cast<int>(job->asked.size()) == attempt->placements_size();
  if (end.end_class() == v1::END_CLASS_PEER_FAILED && !all) return;
  const absl::Time failed =
      report.has_failed_ago() ? now_ - FromProto(report.failed_ago()) : absl::InfinitePast();
  *attempt->mutable_end() = end;
  Touch(*job);
  Reach(job, AttemptStage::kDetected);
  if (failed != absl::InfinitePast()) Reach(job, AttemptStage::kFailed, failed);
  const ClassCounts& limits = job->record.spec().class_limits();
  if (!attempt->may_restart() || !CountsAsRestart(end.end_class()) ||
      !HasRestartLeft(job->record) ||
      (!WhyOverLimit(limits, job->record.class_restarts(), end.end_class()).empty() &&
       !options_.mutants.forgets_class_limits)) {
    // The job ends as after any failure; once nothing is left, the record says what follows.
    return Stop(job, end.end_class(), end.why());
  }
  CountStart(limits, end.end_class(), job->record.mutable_class_restarts());
  RestartInPlace(job, report);
}

void JobsCore::RestartInPlace(Job* job, const v1::AttemptReport& report) {
  v1::JobRecord& record = job->record;
  // A node asks only after the processes that had to end have ended.
  Reach(job, AttemptStage::kDecided);
  Reach(job, AttemptStage::kFenced);
  const int64_t ended = absl::ToUnixMillis(EndedAt(report, *Current(job), now_));
  Current(job)->set_ended_unix_ms(ended);
  if (!options_.mutants.restarts_in_place_for_free) record.set_restarts(record.restarts() + 1);
  while (record.history_size() >= kKeptAttempts) {
    record.mutable_history()->DeleteSubrange(0, 1);
  }
  const v1::JobAttempt former = *Current(job);
  v1::JobAttempt* const next = record.add_history();
  *next = former;
  next->clear_end();
  next->clear_times();
  next->clear_ended_unix_ms();
  next->set_started_unix_ms(ended);
  next->set_restarts(former.restarts() + 1);
  job->asked.clear();
  Reach(job, AttemptStage::kPlaced);
  record.set_why(absl::StrCat("restart ", record.restarts(), " of ", record.spec().max_restarts(),
                              ", within attempt ", next->number(),
                              ", after: ", former.end().why()));
  out_->notices.push_back({true, record.job_id(), record.why()});
  for (const v1::Placement& placement : next->placements()) TouchNode(placement.node());
}

std::string JobsCore::LeftoverOf(const std::string& name,
                                 const v1::SyncNodeRequest& request) const {
  const bool ours = request.cluster_id().empty() || request.cluster_id() == cluster_id_;
  for (const v1::AttemptReport& report : request.attempts()) {
    if (report.state() == v1::PLACEMENT_STATE_ENDED) continue;
    const v1::JobRecord* const job = ours ? Find(report.job_id()) : nullptr;
    const std::string group = GroupOf(report.job_id(), report.attempt());
    if (job == nullptr || !IsActive(job->state())) return group;
    const v1::JobAttempt& attempt = Last(*job);
    const bool assigned = attempt.number() == report.attempt() &&
                          std::any_of(attempt.placements().begin(), attempt.placements().end(),
                                      [&](const v1::Placement& placement) {
                                        return placement.node() == name &&
                                               placement.state() != v1::PLACEMENT_STATE_ENDED;
                                      });
    if (!assigned) return group;
  }
  return "";
}

void JobsCore::OnMissing(const std::string& name, Node* node, const v1::SyncNodeRequest& request) {
  for (const uint64_t sequence : absl::btree_set<uint64_t>(node->jobs)) {
    Job& job = jobs_.at(sequence);
    const int attempt = Current(&job)->number();
    const auto& reports = request.attempts();
    const bool reported =
        std::any_of(reports.begin(), reports.end(), [&](const v1::AttemptReport& report) {
          return report.job_id() == job.record.job_id() && report.attempt() == attempt;
        });
    for (v1::Placement& placement : *Current(&job)->mutable_placements()) {
      if (placement.node() != name || placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
      v1::AttemptEnd end;
      end.set_end_class(v1::END_CLASS_NODE_LOST);
      end.set_node(name);
      end.set_rank(-1);
      if (placement.node_uid() != node->uid) {
        end.set_why(absl::StrCat("node ", Quoted(name), " has lost its records of attempts"));
      } else if (placement.state() == v1::PLACEMENT_STATE_RUNNING && !reported) {
        end.set_why(absl::StrCat("node ", Quoted(name),
                                 " no longer knows the attempt that ran "
                                 "there"));
      } else {
        continue;
      }
      EndPlacement(&job, &placement, end);
      break;
    }
  }
}

void JobsCore::AnswerSync(const std::string& name, Node* node) {
  v1::OpResult result;
  v1::SyncNodeReply* const reply = result.mutable_sync_node();
  reply->set_version(node->version);
  size_t bytes = 0;
  *reply->mutable_lease() = ToProto(options_.node_lease);
  for (const uint64_t sequence : node->jobs) {
    const Job& job = jobs_.at(sequence);
    const v1::JobAttempt& attempt = Last(job.record);
    for (const v1::Placement& placement : attempt.placements()) {
      if (placement.node() != name || placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
      v1::NodeAssignment* const assignment = reply->add_assignments();
      assignment->set_job_id(job.record.job_id());
      assignment->set_attempt(attempt.number());
      // A node that has begun does not need the whole specification; and if many attempts begin at
      // once, a message has room for only some.
      const bool whole = placement.state() == v1::PLACEMENT_STATE_ASSIGNED;
      if (whole && bytes < kMaxPageBytes) {
        *assignment->mutable_spec() = job.record.spec();
        bytes += job.record.spec().ByteSizeLong();
      } else {
        *assignment->mutable_spec()->mutable_stop_grace() = job.record.spec().stop_grace();
        if (whole) reply->set_version(0);  // the node calls again at once
      }
      assignment->set_node_rank(placement.node_rank());
      assignment->set_num_nodes(attempt.placements_size());
      assignment->set_processes(placement.processes());
      *assignment->mutable_gpus() = placement.gpus();
      if (whole && options_.attempt_token) {
        assignment->set_token(
            options_.attempt_token(GroupOf(job.record.job_id(), attempt.number())));
      }
      if (whole && attempt.may_restart()) {
        // The same for all nodes, no matter when they begin.
        assignment->set_restarts_left(job.record.spec().max_restarts() - job.record.restarts() +
                                      attempt.restarts());
      }
      assignment->set_restarts(attempt.restarts());
      if (attempt.restarts() > 0) {
        *assignment->mutable_restart_delay() = ToProto(DelayInPlace(job.record));
      }
      assignment->set_stop(attempt.stop());
      if (attempt.stop()) assignment->set_stop_why(attempt.end().why());
    }
  }
  for (v1::LogQuery& query : node->queries) {
    if (queries_.contains(query.query_id())) *reply->add_queries() = std::move(query);
  }
  node->queries.clear();
  if (node->log_level_until <= now_) node->log_level.reset();
  if (node->log_level.has_value()) {
    *reply->mutable_log_level() = *node->log_level;
    if (node->log_level_until != absl::InfiniteFuture()) {
      *reply->mutable_log_level()->mutable_for_() = ToProto(node->log_level_until - now_);
    }
  }
  for (const std::string& id : node->held_jobs) {
    const v1::JobRecord* const job = Find(id);
    if (job == nullptr || HasEnded(job->state())) reply->add_ended_jobs(id);
  }
  const CallId call = *node->held;
  node->held.reset();
  node->held_until = absl::InfiniteFuture();
  syncs_.erase(call);
  SetNodeTimer(name, node);
  Reply(call, std::move(result));
}

void JobsCore::SetNodeTimer(const std::string& name, Node* node) {
  if (node->timer != absl::InfiniteFuture()) node_timers_.erase({node->timer, name});
  node->timer = node->lost ? node->heard + RetentionOf(*node)
                           : std::min(node->held_until, node->heard + options_.node_lease);
  if (node->timer <= now_) node->timer = now_ + kTickWhileNodesRun;
  node_timers_.insert({node->timer, name});
}

void JobsCore::TickNode(const std::string& name) {
  Node& node = nodes_.at(name);
  node_timers_.erase({std::exchange(node.timer, absl::InfiniteFuture()), name});
  if (node.held.has_value() && node.held_until <= now_) return AnswerSync(name, &node);
  const absl::Duration silent = now_ - node.heard;
  if (node.lost) {
    if (silent >= RetentionOf(node) && node.jobs.empty()) {
      if (node.cordoned) {
        out_->notices.push_back(
            {false, "",
             absl::StrCat("node ", Quoted(name), ", which is cordoned, has been silent for ",
                          absl::FormatDuration(RetentionOf(node)), ": it is forgotten")});
        out_->changes.emplace_back().mutable_node_changed()->set_node(name);
      }
      nodes_.erase(name);
      return;
    }
  } else if (silent >= options_.node_lease) {
    // After a time in which no node was heard, all nodes have one lease from the first one's
    // return, but no more: a network that fails repeatedly must not keep a lost node forever.
    const absl::Time since = std::max(node.heard, returned_at_);
    const bool others = heard_any_ > since + options_.node_lease / 2;
    const bool over =
        now_ - since >= options_.node_lease && (others || silent >= options_.outage_tolerance);
    if (over || silent >= options_.outage_tolerance + options_.node_lease) {
      LoseNode(name, &node,
               absl::StrCat("node ", Quoted(name), " has been silent for ",
                            absl::FormatDuration(absl::Seconds(absl::ToInt64Seconds(silent)))));
    }
  }
  SetNodeTimer(name, &node);
}

void JobsCore::LoseNode(const std::string& name, Node* node, const std::string& why) {
  node->lost = true;
  out_->notices.push_back({true, "", why});
  if (node->held.has_value()) AnswerSync(name, node);
  v1::AttemptEnd end;
  end.set_end_class(v1::END_CLASS_NODE_LOST);
  end.set_why(why);
  end.set_node(name);
  end.set_rank(-1);
  for (const uint64_t sequence : absl::btree_set<uint64_t>(node->jobs)) {
    Job& job = jobs_.at(sequence);
    for (v1::Placement& placement : *Current(&job)->mutable_placements()) {
      if (placement.node() != name || placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
      EndPlacement(&job, &placement, end, node->called);
      break;
    }
  }
  DropSparesOn(name);
  dirty_ = true;
}

JobsCore::Error JobsCore::ControlNode(CallId call, const v1::ControlNodeRequest& request) {
  const auto it = nodes_.find(request.node());
  if (it == nodes_.end()) {
    return MakeError(absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
                     absl::StrCat("no node ", Quoted(request.node()),
                                  " is known here; muster nodes lists the nodes"));
  }
  Node& node = it->second;
  if (request.action() == v1::NODE_ACTION_LOG_LEVEL) return OrderLogLevel(call, request, &node);
  const bool drain = request.action() == v1::NODE_ACTION_DRAIN;
  const bool cordon = drain || request.action() == v1::NODE_ACTION_CORDON;
  if (!cordon && request.action() != v1::NODE_ACTION_UNCORDON) {
    return BadField("action",
                    absl::StrCat("action ", static_cast<int>(request.action()), " is unknown"));
  }
  const std::string why = cordon ? Reason(request.why()) : "";
  if (node.cordoned != cordon || node.draining != drain || node.why != why) {
    node.cordoned = cordon;
    node.draining = drain;
    node.why = why;
    v1::NodeChanged* const changed = out_->changes.emplace_back().mutable_node_changed();
    changed->set_node(request.node());
    changed->set_cordoned(cordon);
    changed->set_draining(drain);
    changed->set_why(why);
    NodesHaveMore();
    SetNodeTimer(request.node(), &node);
  }
  if (cordon) DropSparesOn(request.node());
  if (drain) {
    for (const uint64_t sequence : absl::btree_set<uint64_t>(node.jobs)) {
      Stop(&jobs_.at(sequence), v1::END_CLASS_PREEMPTED,
           absl::StrCat("node ", Quoted(request.node()), " is drained",
                        why.empty() ? "" : absl::StrCat(": ", why)));
    }
  }
  at_end_.push_back([this, call] {
    v1::OpResult result;
    result.mutable_control_node();
    Reply(call, std::move(result));
  });
  return std::nullopt;
}

JobsCore::Error JobsCore::OrderLogLevel(CallId call, const v1::ControlNodeRequest& request,
                                        Node* node) {
  if (request.log_level() < kLeastLogLevel || request.log_level() > kMostLogLevel) {
    return BadField("log_level",
                    absl::StrCat("log_level is ", request.log_level(), ": give ", kLeastLogLevel,
                                 " (debug) to ", kMostLogLevel, " (error)"));
  }
  if (request.has_for_() && (FromProto(request.for_()) < absl::Seconds(1) ||
                             FromProto(request.for_()) > absl::Hours(24))) {
    return BadField("for", "for is the time after which the level before returns: 1 s to 24 h");
  }
  if (!node->known || node->lost) {
    return MakeError(
        absl::StatusCode::kUnavailable, v1::ERROR_REASON_UNSPECIFIED,
        absl::StrCat("node ", Quoted(request.node()), " is not connected: try again when it is"));
  }
  v1::LogLevelOrder& order = node->log_level.emplace();
  // Orders do not change the journal, so two may have the same revision.
  last_order_ = std::max<uint64_t>(revision_, last_order_ + 1);
  order.set_id(last_order_);
  order.set_level(request.log_level());
  node->log_level_until =
      request.has_for_() ? now_ + FromProto(request.for_()) : absl::InfiniteFuture();
  TouchNode(request.node());
  at_end_.push_back([this, call] {
    v1::OpResult result;
    result.mutable_control_node();
    Reply(call, std::move(result));
  });
  return std::nullopt;
}

JobsCore::Error JobsCore::ListNodes(CallId call, const v1::ListNodesRequest& request) {
  v1::OpResult result;
  v1::ListNodesReply* const reply = result.mutable_list_nodes();
  absl::flat_hash_map<std::string,
                      std::vector<std::pair<const v1::ProcessResources*, const v1::Placement*>>>
      used;
  for (const uint64_t sequence : active_) {
    const v1::JobRecord& job = jobs_.at(sequence).record;
    for (const v1::Placement& placement : Last(job).placements()) {
      if (placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
      used[placement.node()].emplace_back(&job.spec().per_process(), &placement);
    }
  }
  absl::flat_hash_map<std::string, std::vector<std::string>> spare_of;
  for (const uint64_t sequence : spared_) {
    const v1::JobRecord& job = jobs_.at(sequence).record;
    for (const v1::Placement& spare : job.spares()) {
      used[spare.node()].emplace_back(&job.spec().per_process(), &spare);
      spare_of[spare.node()].push_back(job.job_id());
    }
  }
  size_t bytes = 0;
  for (auto it = nodes_.upper_bound(request.after_node()); it != nodes_.end(); ++it) {
    const auto& [name, node] = *it;
    if (bytes > kMaxPageBytes) {
      reply->set_more(true);
      break;
    }
    v1::NodeRecord* const record = reply->add_nodes();
    record->set_node(name);
    if (node.known) *record->mutable_info() = node.info;
    record->set_cordoned(node.cordoned);
    record->set_draining(node.draining);
    record->set_why(node.why);
    if (node.known && !node.lost && !node.leftover.empty()) {
      record->set_why(absl::StrCat(node.why, node.why.empty() ? "" : "; ",
                                   "it still has processes of ", Quoted(node.leftover),
                                   ", which are to end: nothing starts there before"));
    }
    record->set_lost(node.lost);
    if (node.known) *record->mutable_heard_ago() = ToProto(now_ - node.heard);
    for (const uint64_t sequence : node.jobs) {
      record->add_jobs(jobs_.at(sequence).record.job_id());
    }
    for (const std::string& id : spare_of[name]) record->add_spare_of(id);
    for (const auto& [process, placement] : used[name]) {
      record->set_used_cpus(record->used_cpus() + placement->processes() * process->cpus());
      record->set_used_memory_bytes(record->used_memory_bytes() +
                                    placement->processes() * process->memory_bytes());
      for (const int gpu : placement->gpus()) record->add_used_gpus(gpu);
    }
    bytes += record->ByteSizeLong();
  }
  Reply(call, std::move(result));
  return std::nullopt;
}

// ---- the schedule

CandidateNodes JobsCore::Candidates(bool free, bool cordoned_too) const {
  CandidateNodes candidates;
  for (const auto& [name, node] : nodes_) {
    if (!node.known || node.lost || (node.cordoned && !cordoned_too) ||
        (free && !node.leftover.empty())) {
      continue;
    }
    CandidateNode candidate{.info = &node.info, .uid = node.uid, .space = {}};
    candidate.space.cpus = node.info.cpus();
    candidate.space.memory = node.info.memory_bytes();
    candidate.space.info = &node.info;
    for (int i = 0; i < node.info.gpus_size(); ++i) candidate.space.gpus.insert(i);
    candidates.emplace(name, std::move(candidate));
  }
  if (!free) return candidates;
  for (const uint64_t sequence : active_) {
    const v1::JobRecord& job = jobs_.at(sequence).record;
    for (const v1::Placement& placement : Last(job).placements()) {
      if (placement.state() == v1::PLACEMENT_STATE_ENDED) continue;
      const auto it = candidates.find(placement.node());
      if (it != candidates.end()) it->second.space.Take(placement, job.spec().per_process());
    }
  }
  if (options_.mutants.gives_spares_away) return candidates;
  for (const uint64_t sequence : spared_) {
    const v1::JobRecord& job = jobs_.at(sequence).record;
    for (const v1::Placement& spare : job.spares()) {
      const auto it = candidates.find(spare.node());
      if (it != candidates.end()) it->second.space.Take(spare, job.spec().per_process());
    }
  }
  return candidates;
}

ScheduleQuestion JobsCore::Question() const {
  ScheduleQuestion question;
  question.nodes = Candidates(/*free=*/true);
  question.settled = Settled();
  question.awaits_nodes = resumes_ && !Settled();
  // This includes jobs that had ended or were suspended when the copy was made, and are requested
  // again at once.
  question.may_run_unseen = restored_ && !Settled();
  question.now = now_;
  question.max_processes_of_owner = options_.max_processes_of_owner;
  question.too_large = too_large_;
  for (const uint64_t sequence : queued_) {
    const Job& job = jobs_.at(sequence);
    question.queued.push_back({&job.record, job.not_before});
    // The job has not begun since a restore; the coordinator may have been restarted after that.
    if (job.record.attempts() != LastBegun(job.record)) question.may_run_unseen |= !Settled();
  }
  for (const uint64_t sequence : active_) {
    const Job& job = jobs_.at(sequence);
    absl::Time ends_by = job.ends_by;
    // No node has reported that the job runs: its time begins soon, but not before now.
    if (ends_by == absl::InfiniteFuture() && job.record.spec().has_time_limit()) {
      ends_by = now_ + FromProto(job.record.spec().time_limit());
    }
    // At its limit the job is stopped, which may take the whole stop_grace.
    ends_by += FromProto(job.record.spec().stop_grace());
    question.active.push_back({&job.record, &Last(job.record), ends_by, GrowsFrom(job)});
  }
  return question;
}

void JobsCore::NodesHaveMore() {
  dirty_ = true;
  too_large_.clear();
}

void JobsCore::ScheduleSoon() { schedule_at_ = std::min(schedule_at_, now_ + kScheduleSoon); }

void JobsCore::RunSchedule() {
  dirty_ = false;
  schedule_at_ = absl::InfiniteFuture();
  if (queued_.empty() && may_grow_.empty() && unspared_.empty()) return;
  ScheduleDecision decision = Schedule(Question());
  schedule_at_ = decision.next;
  too_large_ = std::move(decision.too_large);
  if (decision.unfinished) ScheduleSoon();
  // Nothing is preempted before all nodes have had the time to connect.
  if (!Settled()) schedule_at_ = std::min(schedule_at_, started_ + options_.node_lease);
  for (const std::string& job_id : decision.yields) DropSpares(FindJob(job_id));
  for (auto& [job_id, placement] : decision.starts) Start(FindJob(job_id), std::move(placement));
  for (auto& [job_id, spares] : decision.spares) {
    Job* const job = FindJob(job_id);
    for (v1::Placement& spare : spares) *job->record.add_spares() = std::move(spare);
    NoteSpares(*job);
    Touch(*job);
  }
  for (const auto& [job_id, why] : decision.preempts) {
    DropSpares(FindJob(job_id));
    Stop(FindJob(job_id), v1::END_CLASS_PREEMPTED, why);
  }
  for (const auto& [job_id, why] : decision.grows) {
    Stop(FindJob(job_id), v1::END_CLASS_RESIZED, why);
  }
  bool again = false;
  for (const auto& [job_id, why] : decision.waits) {
    Job* const job = FindJob(job_id);
    job->waits_for = why;
    again = StopAvoiding(job) || again;
  }
  dirty_ = again;
}

bool JobsCore::StopAvoiding(Job* job) {
  v1::JobRecord& record = job->record;
  // The other nodes may still come back.
  if (resumes_ && !Settled()) return false;
  if (record.avoided_nodes_size() == 0 ||
      !Place(record.spec(), record.avoided_nodes(), Candidates(/*free=*/false))
           .placements.empty()) {
    return false;
  }
  ForgetAvoided(job);
  return true;
}

void JobsCore::Start(Job* job, PlacementDecision placement) {
  v1::JobRecord& record = job->record;
  record.set_attempts(record.attempts() + 1);
  if (record.history_size() >= kKeptAttempts) {
    record.mutable_history()->DeleteSubrange(0, record.history_size() - kKeptAttempts + 1);
  }
  v1::JobAttempt* const attempt = record.add_history();
  attempt->set_number(record.attempts());
  if (options_.mutants.places_half_a_gang && placement.placements.size() > 1) {
    placement.placements.pop_back();
  }
  std::vector<std::string> names;
  bool all_can = true;
  for (v1::Placement& one : placement.placements) {
    names.push_back(one.node());
    nodes_.at(one.node()).jobs.insert(record.sequence());
    TouchNode(one.node());
    all_can = all_can && nodes_.at(one.node()).info.restarts_in_place();
    *attempt->add_placements() = std::move(one);
  }
  attempt->set_may_restart(all_can);
  job->given_up_early = false;
  job->could_not_start.clear();
  job->asked.clear();
  record.clear_spares();
  for (v1::Placement& spare : placement.spares) *record.add_spares() = std::move(spare);
  Reach(job, AttemptStage::kPlaced);
  const size_t more = names.size() > 4 ? names.size() - 4 : 0;
  names.resize(names.size() - more);
  SetState(job, v1::JOB_STATE_STARTING,
           absl::StrCat("attempt ", attempt->number(), " starts ", placement.processes,
                        placement.processes == 1 ? " process" : " processes", " on ",
                        absl::StrJoin(names, ", "),
                        more > 0 ? absl::StrCat(" and ", more, " more") : ""));
  out_->notices.push_back({false, record.job_id(), record.why()});
}

// ---- the journal

absl::Status JobsCore::RestorePlacement(const v1::JobRecordChanged& change) {
  Job* const job = FindJob(change.job_id());
  v1::JobAttempt* const attempt =
      job == nullptr || job->record.history_size() == 0 ? nullptr : Current(job);
  if (attempt == nullptr || change.node_rank() < 0 ||
      change.node_rank() >= attempt->placements_size()) {
    return absl::DataLossError(absl::StrCat("the journal changes a placement that job ",
                                            Quoted(change.job_id()), " does not have"));
  }
  v1::Placement* const placement = attempt->mutable_placements(change.node_rank());
  placement->set_state(change.state());
  placement->set_end_class(change.end_class());
  if (change.ended_unix_ms() != 0) attempt->set_ended_unix_ms(change.ended_unix_ms());
  SetRevision(job, change.revision());
  return absl::OkStatus();
}

absl::Status JobsCore::Restore(const v1::JobRecordChanged& change) {
  if (!change.job_id().empty()) return RestorePlacement(change);
  last_sequence_ = std::max(last_sequence_, change.sequence());
  if (!change.removed().empty()) {
    const auto it = by_id_.find(change.removed());
    if (it == by_id_.end()) return absl::OkStatus();
    const uint64_t sequence = it->second;
    by_key_.erase(KeyOf(jobs_.at(sequence).record));
    by_id_.erase(it);
    bytes_ -= jobs_.at(sequence).bytes;
    changes_.Changed(sequence, jobs_.at(sequence).record.revision(), 0);
    jobs_.erase(sequence);
    return absl::OkStatus();
  }
  if (!change.has_record()) return absl::OkStatus();
  v1::JobRecordChanged whole = change;
  const v1::JobRecord* const before = Find(change.record().job_id());
  MUSTER_RETURN_IF_ERROR(
      RestoreKnownHistory(before == nullptr ? v1::JobRecord() : *before, &whole));
  const v1::JobRecord& record = whole.record();
  const auto by_id = by_id_.find(record.job_id());
  const auto by_sequence = jobs_.find(record.sequence());
  const bool new_one = by_id == by_id_.end() && by_sequence == jobs_.end();
  const bool same = by_id != by_id_.end() && by_id->second == record.sequence();
  if (record.job_id().empty() || !(new_one || same) ||
      (IsActive(record.state()) && !IsWhole(record))) {
    return absl::DataLossError(absl::StrCat("the journal has a record of job ",
                                            Quoted(record.job_id()),
                                            " that no coordinator has written"));
  }
  last_sequence_ = std::max(last_sequence_, record.sequence());
  Job& job = jobs_[record.sequence()];
  changes_.Changed(record.sequence(), job.record.revision(), record.revision());
  job.record = record;
  job.in_journal = CurrentEntry(record);
  Measure(&job);
  by_id_[record.job_id()] = record.sequence();
  if (!record.idempotency_key().empty()) by_key_[KeyOf(record)] = record.sequence();
  return absl::OkStatus();
}

void JobsCore::Restore(const v1::NodeChanged& change) {
  // Nothing is known of a node that is not cordoned but what it reports itself.
  if (!change.cordoned()) {
    nodes_.erase(change.node());
    return;
  }
  Node& node = nodes_[change.node()];
  node.cordoned = change.cordoned();
  node.draining = change.draining();
  node.why = change.why();
}

void JobsCore::ForEachChange(const std::function<void(const v1::JournalChange&)>& f) const {
  v1::JournalChange change;
  for (const auto& [sequence, job] : jobs_) {
    *change.mutable_job_record_changed()->mutable_record() = job.record;
    f(change);
  }
  if (last_sequence_ > 0) {
    change.mutable_job_record_changed()->Clear();
    change.mutable_job_record_changed()->set_sequence(last_sequence_);
    f(change);
  }
  for (const auto& [name, node] : nodes_) {
    if (!node.cordoned) continue;
    v1::NodeChanged* const changed = change.mutable_node_changed();
    changed->Clear();
    changed->set_node(name);
    changed->set_cordoned(node.cordoned);
    changed->set_draining(node.draining);
    changed->set_why(node.why);
    f(change);
  }
}

void JobsCore::StartTerm(const Event& event, uint64_t lost_terms, JobsOutput* out) {
  const bool restored = lost_terms != 0;
  const uint64_t minutes = std::max(lost_terms, kTermsOfARestore) - kTermsOfARestore;
  now_ = event.now;  // a time of an earlier term does not matter
  Begin(event, out);
  started_ = heard_any_ = now_;
  changes_.ForgetRemovals(event.revision - 1);
  if (restored) {
    last_sequence_ += kLostAttempts + minutes * kJobsOfAMinute;
    out_->changes.emplace_back().mutable_job_record_changed()->set_sequence(last_sequence_);
  }
  for (auto& [sequence, job] : jobs_) {
    const v1::JobState state = job.record.state();
    if (state == v1::JOB_STATE_QUEUED) {
      queued_.insert(sequence);
      job.not_before = DelayEnds(job.record, now_);
    }
    NoteSpares(job);
    if (!HasEnded(state)) {
      for (const std::string& node : job.record.avoided_nodes()) AvoidForAWhile(&job, node);
    }
    // The clock of an earlier coordinator was ahead: the retention begins now, and not again with
    // each term.
    if (HasEnded(state) && job.record.spec().has_retention() &&
        absl::FromUnixMillis(job.record.ended_unix_ms()) > now_) {
      job.record.set_ended_unix_ms(absl::ToUnixMillis(now_));
      Touch(job);
    }
    if (HasEnded(state)) ended_.insert(EndOf(job.record));
    NoteRetention(&job);
    // Nodes with spares are lost like other nodes if they do not come back.
    for (const v1::Placement& spare : job.record.spares()) nodes_[spare.node()];
    if (IsActive(state)) {
      active_.insert(sequence);
      job.runs_since = now_;
      NoteGrowth(job);
      for (const v1::Placement& placement : Current(&job)->placements()) {
        if (placement.state() != v1::PLACEMENT_STATE_ENDED) {
          nodes_[placement.node()].jobs.insert(sequence);
        }
      }
    }
  }
  resumes_ = !queued_.empty() || !active_.empty();
  restored_ = restored;
  for (auto& [name, node] : nodes_) {
    node.heard = now_;
    SetNodeTimer(name, &node);
  }
  // Nodes may still answer queries of the earlier coordinator, so the ids must differ.
  next_query_ = event.revision;
  if (restored) {
    // Later attempts may be running: nodes end attempts that they have and this record does not.
    for (const uint64_t sequence : absl::btree_set<uint64_t>(active_)) {
      Job& job = jobs_.at(sequence);
      Stop(&job, v1::END_CLASS_NODE_LOST, "the coordinator was restored from a copy");
    }
    for (auto& [sequence, job] : jobs_) {
      job.record.set_attempts(job.record.attempts() + kLostAttempts +
                              static_cast<int>(minutes) * kAttemptsOfAMinute);
      Touch(job);
    }
  }
  dirty_ = true;
  End();
}

}  // namespace muster::coordinator
