#include "coordinator/service/core_runner.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/errors.h"
#include "coordinator/service/error_answer.h"
#include "rpc/frame_bytes.h"
#include "rpc/session/agent_session.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

constexpr uint32_t kProtocol = 1;
constexpr absl::Duration kTrimPeriod = absl::Seconds(5);
constexpr size_t kTrimBytes = 8 << 20;
constexpr int kTrims = 2;
constexpr size_t kBytesOfCall = 512;  // besides its request and its answer, while it is open
// After this many rounds, a thread that only brought an event has applied enough events of others.
constexpr int kRounds = 64;

absl::Status StoppingStatus() {
  return rpc::ErrorWithReason(absl::StatusCode::kUnavailable,
                              "the coordinator is stopping; reconnect", v1::ERROR_REASON_STOPPING,
                              /*retryable=*/true);
}

// Hits the failpoint of an answer that has to wait for the disk.
void FailAtHold(const Answer& answer) {
  switch (answer.kind()) {
    case v1::OpResult::kJoin:
      MUSTER_FAILPOINT("engine.hold_join");
      break;
    case v1::OpResult::kTxn:
      MUSTER_FAILPOINT("engine.hold_txn");
      break;
    case v1::OpResult::kRaiseTrigger:
      MUSTER_FAILPOINT("engine.hold_trigger");
      break;
    case v1::OpResult::kReportExit:
      MUSTER_FAILPOINT("engine.hold_exit");
      break;
    default:
      break;
  }
}

void FailAtReply(const Answer& answer) {
  switch (answer.kind()) {
    case v1::OpResult::kJoin:
      MUSTER_FAILPOINT("engine.reply_join");
      break;
    case v1::OpResult::kLeave:
      MUSTER_FAILPOINT("engine.reply_leave");
      break;
    case v1::OpResult::kArrive:
      MUSTER_FAILPOINT("engine.reply_arrive");
      break;
    case v1::OpResult::kTxn:
      MUSTER_FAILPOINT("engine.reply_txn");
      break;
    case v1::OpResult::kRaiseTrigger:
      MUSTER_FAILPOINT("engine.reply_trigger");
      break;
    case v1::OpResult::kPollTriggers:
      MUSTER_FAILPOINT("engine.reply_poll");
      break;
    case v1::OpResult::kHeartbeat:
      MUSTER_FAILPOINT("engine.reply_beat");
      break;
    default:
      break;
  }
}

}  // namespace

CoreRunner::CoreRunner(const Options& options, std::unique_ptr<Journal> journal)
    : options_(options),
      journal_(std::move(journal)),
      stopping_answer_(ErrorAnswer(absl::StatusCode::kUnavailable,
                                   "the coordinator is stopping; reconnect",
                                   v1::ERROR_REASON_STOPPING, /*retryable=*/true)),
      cancelled_(ErrorAnswer(absl::StatusCode::kCancelled, "the caller disconnected",
                             v1::ERROR_REASON_UNSPECIFIED,
                             /*retryable=*/false)),
      too_many_watchers_(OverloadedAnswer(
          "too many watches are open: end those that are not needed, or try again later")),
      snapshot_busy_(OverloadedAnswer("a snapshot is being written: try again when it is done")),
      core_([this] {
        CoreOptions core = options_.core;
        core.cluster_id = journal_->cluster_id();
        core.restore_id = journal_->restore_id();
        core.catches_up = true;
        return core;
      }()),
      calls_(options_.limits),
      gate_(options_.limits),
      sessions_(options_.limits.unsent_bytes, options_.resume_window),
      watchers_(core_, options_.limits.answer_bytes),
      snapshots_(
          [this] {
            Snapshots::Options snapshots{.records = options_.snapshot_records,
                                         .bytes = options_.snapshot_bytes,
                                         .core = options_.core,
                                         .clock = options_.clock};
            snapshots.core.cluster_id = journal_->cluster_id();
            return snapshots;
          }(),
          journal_.get()) {}

CoreRunner::~CoreRunner() { Stop(); }

absl::Status CoreRunner::Start() {
  {
    MutexLock lock(&mu_);
    applying_ = true;  // by this thread, until the term is durable
  }
  {
    const HoldTurn turn(&turn_);
    MUSTER_RETURN_IF_ERROR(BeginTerm());
  }
  {
    MutexLock lock(&mu_);
    applying_ = false;
  }
  thread_ = std::thread([this] { Run(); });
  fan_out_.Start();
  return absl::OkStatus();
}

absl::Status CoreRunner::BeginTerm() {
  uint64_t records = 0;
  const absl::Time start = absl::Now();
  MUSTER_RETURN_IF_ERROR(journal_->Replay(
      [this](uint64_t, absl::string_view state) {
        turn_.AssertHeld();
        return core_.Restore(state);
      },
      [this, &records](uint64_t, absl::string_view record) {
        turn_.AssertHeld();
        ++records;
        return core_.Replay(record);
      }));
  gate_.Begin(core_.last_record_revision());
  watchers_.Durable(gate_.durable());
  journal_->Start([this](const Journal::Progress& progress) {
    if (turn_.IsMine()) {  // a journal in memory, from within Append
      turn_.AssertHeld();
      DoProgress(progress);
    } else {
      // Not applied on the journal's thread, where the next commit should start at once.
      Post(
          [this, progress] {
            turn_.AssertHeld();
            DoProgress(progress);
          },
          By::kThread);
    }
  });
  MUSTER_FAILPOINT_STATUS("engine.replayed");
  const uint64_t term = std::max(journal_->term(), core_.last_term() + 1);
  if (term > Core::kMaxTerm) {
    return absl::FailedPreconditionError(
        absl::StrCat("journal '", journal_->description(), "' would begin term ", term, ", and ",
                     Core::kMaxTerm, " is the last: start with an empty directory"));
  }
  const bool restored = journal_->restored() > core_.restored_term();
  core_.StartTerm(term, options_.clock->Now(), &out_, restored);
  const uint64_t needed = out_.records.empty() ? gate_.durable() : out_.records.back().revision;
  Drain();
  MUSTER_FAILPOINT("engine.term_held");
  while (!gate_.IsDurable(needed) && gate_.status().ok()) {
    std::vector<Task> tasks;
    {
      MutexLock lock(&mu_);
      while (queue_.empty()) wake_.Wait(&mu_);
      tasks.swap(queue_);
      queue_depth_.fetch_sub(tasks.size(), std::memory_order_relaxed);
    }
    ApplyBatch(tasks);
  }
  MUSTER_RETURN_IF_ERROR(gate_.status());
  MUSTER_FAILPOINT_STATUS("engine.serving");
  if (records > 0 || term > 1) {
    MUSTER_LOG(Info) << "term " << term << " from " << journal_->description() << ": " << records
                     << " records replayed in " << absl::FormatDuration(absl::Now() - start)
                     << ", revision " << core_.revision();
  }
  return absl::OkStatus();
}

void CoreRunner::SetEndsForGood(const std::string& why) {
  MutexLock lock(&mu_);
  ends_for_good_ = OneLine(why);  // a message takes only UTF-8
}

void CoreRunner::Stop() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  wake_.SignalAll();
  if (thread_.joinable()) thread_.join();
  fan_out_.Stop();
  journal_->Stop();
  MutexLock lock(&mu_);
  ended_ = true;
}

bool CoreRunner::Post(Task&& task, By by) {
  {
    MutexLock lock(&mu_);
    if (ended_) return false;
    queue_.push_back(std::move(task));
    queue_depth_.fetch_add(1, std::memory_order_relaxed);
    if (applying_) {
      // Start waits for the journal without applying.
      if (by == By::kThread) wake_.SignalAll();
      return true;
    }
    if (by == By::kThread || stop_ || handed_over_) {
      wake_.SignalAll();
      return true;
    }
    applying_ = true;
  }
  turn_.Take();
  ApplyAll();
  return true;
}

void CoreRunner::ApplyAll() {
  std::vector<Task> tasks;
  bool wake = false;
  for (int round = 0;; ++round) {
    tasks.clear();  // not under the lock: a task may own much
    {
      MutexLock lock(&mu_);
      // The queue, `tasks` and spare_ exchange their buffers, so that a busy runner allocates none.
      if (spare_.capacity() < tasks.capacity()) spare_.swap(tasks);
      handed_over_ = stop_ || SnapshotDue() || (round >= kRounds && !queue_.empty());
      if (queue_.empty() || handed_over_) {
        wake = handed_over_ || armed_ == absl::InfinitePast() || NextDeadline() < armed_;
        turn_.Give();
        applying_ = false;
        break;
      }
      tasks.swap(queue_);
      if (queue_.capacity() == 0) queue_.swap(spare_);
      queue_depth_.fetch_sub(tasks.size(), std::memory_order_relaxed);
    }
    ApplyBatch(tasks);
  }
  if (wake) wake_.SignalAll();
}

void CoreRunner::ApplyBatch(std::vector<Task>& tasks) {
  events_.fetch_add(tasks.size(), std::memory_order_relaxed);
  const absl::Time now = options_.clock->Now();
  if (!stopped_ && core_.NextDeadline() <= now) {
    const uint64_t lost = core_.stats().workers_lost;
    core_.Tick(now, &out_);
    if (core_.stats().workers_lost > lost) MUSTER_FAILPOINT("engine.lease_expired");
  }
  if (!stopped_) {
    while (const auto session = sessions_.TakeExpired(now)) EndSession(session);
  }
  for (Task& task : tasks) task();
  Drain();
  while (FlushSessions()) Drain();
  watchers_.Serve();
}

absl::Time CoreRunner::NextDeadline() const {
  if (stopped_) return absl::InfiniteFuture();
  const absl::Time core = core_.NextDeadline();
  return std::min(core, sessions_.NextExpiry());
}

bool CoreRunner::SnapshotDue() const {
  return !stopped_ && gate_.status().ok() && snapshots_.Due();
}

// A burst (ten thousand joins) leaves memory that the allocator keeps for the thread that made it:
// gives it back. Asking how much it is costs a walk over all free pieces, tens of milliseconds with
// 100,000 workers, so it is done a few times after a burst, since agents let go of answers later,
// and not while only beats come.
void CoreRunner::MaybeTrim(absl::Time now) {
  if (now < last_trim_ + kTrimPeriod) return;
  if (passed_bytes_.load(std::memory_order_relaxed) >= kTrimBytes) {
    passed_bytes_ = 0;
    trims_left_ = kTrims;
  }
  if (trims_left_ == 0) return;
  --trims_left_;
  last_trim_ = now;
  const struct mallinfo2 info = mallinfo2();
  if (info.fordblks > kTrimBytes) malloc_trim(0);
}

void CoreRunner::Run() {
  std::vector<Task> nothing;
  mu_.Lock();
  while (true) {
    if (applying_) {
      armed_ = absl::InfinitePast();
      wake_.Wait(&mu_);
      continue;
    }
    if (stop_) break;
    handed_over_ = false;
    const absl::Time now = options_.clock->Now();
    turn_.Take();  // no thread is applying, nor begins to while mu_ is held
    const absl::Time deadline = NextDeadline();
    const bool snapshot_due = SnapshotDue();
    if (queue_.empty() && deadline > now && !snapshot_due) {
      turn_.Give();
      armed_ = std::min(deadline, now + kTrimPeriod);
      wake_.WaitWithTimeout(&mu_, armed_ - now);
      if (!applying_ && queue_.empty()) {
        mu_.Unlock();
        MaybeTrim(options_.clock->Now());
        mu_.Lock();
      }
      continue;
    }
    applying_ = true;
    mu_.Unlock();
    if (snapshot_due) TakeSnapshot();
    ApplyBatch(nothing);
    ApplyAll();
    mu_.Lock();
  }
  applying_ = true;
  mu_.Unlock();
  const HoldTurn turn(&turn_);
  StopAll();
  // Events posted meanwhile are answered here too; later ones are answered by the thread that posts
  // them.
  while (true) {
    std::vector<Task> tasks;
    {
      MutexLock lock(&mu_);
      if (queue_.empty()) {
        ended_ = true;
        return;
      }
      tasks.swap(queue_);
    }
    for (Task& task : tasks) task();
    out_.Clear();
  }
}

void CoreRunner::Drain() {
  // A memory journal reports progress inside Append, which only moves what is durable.
  for (Record& record : out_.records) {
    gate_.Sent(record.revision, record.payload.size());
    journal_->Append(record.revision, std::move(record.payload));
  }
  out_.records.clear();
  for (const Reply& reply : out_.replies) {
    if (gate_.IsDurable(reply.durable_revision)) {
      Deliver(reply.call, reply.answer);
    } else if (!gate_.status().ok()) {
      Deliver(reply.call, gate_.failed_answer());
    } else {
      FailAtHold(*reply.answer);
      gate_.Hold(reply);
    }
  }
  for (const NodeDirective& directive : out_.directives) {
    if (gate_.IsDurable(directive.durable_revision)) {
      Direct(directive);
    } else {
      gate_.Hold(directive);
    }
  }
  for (const std::string& job_id : out_.changed_jobs) {
    watchers_.Changed({WatchTopic::kGroup, job_id});
  }
  for (const std::string& job_id : out_.changed_submitted) {
    watchers_.Changed({WatchTopic::kSubmitted, job_id});
  }
  if (!out_.changed_submitted.empty()) watchers_.Changed({WatchTopic::kSubmitted, ""});
  for (const Notice& notice : out_.notices) {
    if (!options_.log_notices) break;
    const std::string job = notice.job_id.empty() ? "" : absl::StrCat("job ", notice.job_id, ": ");
    if (notice.warning) {
      MUSTER_LOG(Warning) << job << notice.text;
    } else {
      MUSTER_LOG(Info) << job << notice.text;
    }
  }
  if (out_.catch_up && !catching_up_ && !stopped_) {
    catching_up_ = true;
    const absl::Time asked = options_.clock->Now();
    if (on_catch_up_) {
      on_catch_up_(asked);
    } else {
      CaughtUp(asked);
    }
  }
  const bool deposed = out_.deposed;
  const std::string deposed_why = std::move(out_.deposed_why);
  out_.Clear();
  if (deposed && !stopped_) {
    MUSTER_LOG(Error) << "this coordinator stops serving: " << deposed_why;
    StopAll();
    if (on_deposed_) on_deposed_();
  }
}

void CoreRunner::Deliver(CallId id, std::shared_ptr<const Answer> answer) {
  const std::optional<OpenCall> call = calls_.Remove(id);
  if (!call.has_value()) return;  // abandoned
  answer = calls_.Fit(*call, std::move(answer));
  passed_bytes_.fetch_add(kBytesOfCall + call->bytes + answer->bytes().size(),
                          std::memory_order_relaxed);
  calls_.Answered(*call, options_.clock->Now());
  FailAtReply(*answer);
  if (call->sink != nullptr) {
    call->sink->OnAnswer(answer);
    MUSTER_FAILPOINT("engine.replied");
    return;
  }
  {
    MutexLock lock(&call->session->mu);
    call->session->agent.outbox().AddResult(call->op_id, answer);
  }
  sessions_.MarkDirty(call->session);
}

void CoreRunner::Direct(const NodeDirective& directive) {
  const std::shared_ptr<AttachedAgent> session = sessions_.OfNode(directive.node);
  if (session == nullptr) return;
  MUSTER_FAILPOINT("engine.directive");
  {
    MutexLock lock(&session->mu);
    session->agent.outbox().AddDirective(directive.directive);
  }
  sessions_.MarkDirty(session);
}

void CoreRunner::ReleaseDurable() {
  MUSTER_FAILPOINT("engine.release");
  while (const std::optional<Reply> reply = gate_.NextReply()) Deliver(reply->call, reply->answer);
  while (const std::optional<NodeDirective> directive = gate_.NextDirective()) Direct(*directive);
}

void CoreRunner::DoProgress(const Journal::Progress& progress) {
  const bool changed = gate_.OnProgress(progress);
  watchers_.Durable(gate_.durable());
  if (progress.status.ok() && progress.took > absl::ZeroDuration())
    fsync_seconds_.Observe(progress.took);
  if (progress.status.ok()) {
    journal_records_.fetch_add(progress.records, std::memory_order_relaxed);
    journal_bytes_.fetch_add(progress.bytes, std::memory_order_relaxed);
  }
  if (changed) {
    journal_ok_ = progress.status.ok();
    if (on_journal_health_) on_journal_health_(progress.status);
  }
  if (gate_.HoldsAny()) ReleaseDurable();
  if (!progress.status.ok()) {
    for (const Reply& reply : gate_.TakeReplies()) Deliver(reply.call, gate_.failed_answer());
    snapshots_.Answer(rpc::FromOpError(gate_.failed_answer()->Parse().error()));
  }
}

bool CoreRunner::FlushSessions() {
  bool ended = false;
  std::vector<std::shared_ptr<AttachedAgent>> dirty = sessions_.TakeDirty();
  std::vector<std::shared_ptr<AttachedAgent>> writable;
  writable.reserve(dirty.size());
  for (std::shared_ptr<AttachedAgent>& session : dirty) {
    bool too_much;
    std::shared_ptr<AgentStream> stream;
    {
      MutexLock lock(&session->mu);
      too_much = session->agent.outbox().bytes() > options_.limits.unacknowledged_bytes;
      stream = session->stream;
    }
    if (!too_much) {
      writable.push_back(std::move(session));
      continue;
    }
    MUSTER_LOG(Warning) << "agent '" << session->node << "' has not acknowledged "
                        << (options_.limits.unacknowledged_bytes >> 20)
                        << " MiB of answers: its session ends";
    overloaded_.fetch_add(1, std::memory_order_relaxed);
    if (stream != nullptr) {
      sessions_.Forget(stream);
      stream->Close(rpc::ErrorWithReason(
          absl::StatusCode::kResourceExhausted,
          "the agent does not acknowledge its frames: its session has ended, connect again",
          v1::ERROR_REASON_OVERLOADED, /*retryable=*/true));
    }
    EndSession(session);
    ended = true;
  }
  fan_out_.Write(std::move(writable));
  sessions_.ReadNext();
  return ended;
}

void CoreRunner::Call(CallId id, std::unique_ptr<v1::Op> op, size_t bytes,
                      std::shared_ptr<CallSink> sink, std::shared_ptr<const Identity> identity) {
  if (queued_bytes_.fetch_add(bytes) + bytes > options_.limits.queued_bytes) {
    queued_bytes_.fetch_sub(bytes);
    overloaded_.fetch_add(1, std::memory_order_relaxed);
    sink->OnAnswer(too_many_calls_);
    return;
  }
  const bool posted =
      Post([this, id, op = std::move(op), bytes, sink, identity = std::move(identity)] {
        turn_.AssertHeld();
        queued_bytes_.fetch_sub(bytes);
        DoCall(id, *op, {.node = "", .identity = identity.get()},
               {.sink = sink, .session = nullptr, .op_id = 0, .bytes = bytes});
      });
  if (!posted) sink->OnAnswer(stopping_answer_);
}

std::shared_ptr<const Answer> CoreRunner::Refusal(CallId id, const v1::Op& op) {
  std::shared_ptr<const Answer> refusal = gate_.Refusal(op);
  if (refusal == gate_.failed_answer()) return refusal;
  if (refusal == nullptr) refusal = calls_.Refusal(id, op);
  if (refusal != nullptr) overloaded_.fetch_add(1, std::memory_order_relaxed);
  return refusal;
}

void CoreRunner::DoCall(CallId id, const v1::Op& op, const Caller& caller, OpenCall call) {
  const absl::Time now = options_.clock->Now();
  calls_.Add(id, op, std::move(call), now);
  if (stopped_) {
    Deliver(id, stopping_answer_);
  } else if (std::shared_ptr<const Answer> refusal = Refusal(id, op)) {
    Deliver(id, std::move(refusal));
  } else {
    if (op.has_join()) MUSTER_FAILPOINT("engine.join");
    if (op.has_report_exit()) MUSTER_FAILPOINT("engine.report_exit");
    MUSTER_FAILPOINT("engine.apply");
    core_.Handle(id, op, caller, now, &out_);
    MUSTER_FAILPOINT("engine.applied");
  }
}

void CoreRunner::Abandon(CallId id) {
  Post([this, id] {
    turn_.AssertHeld();
    if (!calls_.Contains(id)) return;
    MUSTER_FAILPOINT("engine.abandon");
    if (!stopped_) core_.Abandon(id, options_.clock->Now(), &out_);
    Deliver(id, cancelled_);
  });
}

void CoreRunner::AgentFrame(const std::shared_ptr<AgentStream>& stream,
                            std::shared_ptr<const v1::AgentFrame> frame, size_t bytes) {
  const bool posted = Post([this, stream, frame = std::move(frame), bytes] {
    turn_.AssertHeld();
    if (stopped_) {
      stream->Close(StoppingStatus());
      return;
    }
    DoFrame(stream, *frame, bytes);
    sessions_.ReadLater(stream);
  });
  if (!posted) stream->Close(StoppingStatus());
}

void CoreRunner::DoFrame(const std::shared_ptr<AgentStream>& stream, const v1::AgentFrame& frame,
                         size_t bytes) {
  const std::shared_ptr<AttachedAgent> session = sessions_.OfStream(stream);
  if (session == nullptr) {
    if (frame.has_hello()) {
      DoHello(stream, frame.hello());
    } else {
      stream->Close(absl::InvalidArgumentError("the first frame of a stream must be hello"));
    }
    return;
  }
  if (frame.has_hello()) {
    stream->Close(absl::InvalidArgumentError("a stream has only one hello"));
    return;
  }
  bool follows;
  {
    MutexLock lock(&session->mu);
    follows = session->agent.Follows(frame);
    // Otherwise it was applied when it came on an earlier stream.
    if (follows && !session->agent.Receive(frame)) return;
  }
  if (!follows) {
    stream->Close(absl::InvalidArgumentError(
        absl::StrCat("frame ", frame.seq(), " does not follow the last one: frames are missing")));
    return;
  }
  sessions_.MarkDirty(session);
  const absl::Time now = options_.clock->Now();
  switch (frame.kind_case()) {
    case v1::AgentFrame::kOps:
      for (const v1::Op& op : frame.ops().ops()) {
        // Each operation counts for itself: otherwise a large one that is held would count as the
        // small ones beside it.
        const size_t op_bytes = frame.ops().ops_size() == 1 ? bytes : op.ByteSizeLong();
        DoCall(NewCallId(), op, {.node = session->node, .identity = session->identity.get()},
               {.sink = nullptr, .session = session, .op_id = op.op_id(), .bytes = op_bytes});
      }
      break;
    case v1::AgentFrame::kBeat:
      for (const v1::WorkerBeat& worker : frame.beat().workers()) {
        if (session->group().empty() || Covers(*session->identity, worker.job_id())) continue;
        stream->Close(rpc::ErrorWithReason(
            absl::StatusCode::kPermissionDenied,
            absl::StrCat("the token of ", Quoted(session->group()),
                         " may not speak for workers of job ", Quoted(worker.job_id())),
            v1::ERROR_REASON_SCOPE));
        return;
      }
      core_.HandleBeat(session->node, frame.beat(), now, &out_);
      break;
    case v1::AgentFrame::kStack:
      core_.HandleStack(session->node, frame.stack(), now, &out_, session->identity.get());
      break;
    case v1::AgentFrame::kBye:
      EndSession(session);
      stream->Close(absl::OkStatus());
      break;
    case v1::AgentFrame::kHello:
    case v1::AgentFrame::KIND_NOT_SET:
      break;
  }
}

void CoreRunner::DoHello(const std::shared_ptr<AgentStream>& stream, const v1::Hello& hello) {
  MUSTER_FAILPOINT("engine.hello");
  if (hello.node().empty() || hello.node().size() > 256) {
    stream->Close(rpc::ErrorWithReason(absl::StatusCode::kInvalidArgument,
                                       "hello.node must have 1 to 256 bytes",
                                       v1::ERROR_REASON_BAD_FIELD));
    return;
  }
  if (hello.protocol_min() > kProtocol || hello.protocol_max() < kProtocol) {
    stream->Close(absl::FailedPreconditionError(
        absl::StrCat("agent '", hello.node(), "' (version ", hello.version(), ") speaks protocol ",
                     hello.protocol_min(), " to ", hello.protocol_max(),
                     ", this coordinator speaks ", kProtocol, ": use matching versions")));
    return;
  }
  const std::shared_ptr<const Identity> identity = stream->identity();
  if (identity != nullptr && identity->role == Role::kAttempt) {
    if (const auto over = core_.CheckAttempt(identity->group)) {
      stream->Close(rpc::FromOpError(*over));
      return;
    }
  }
  if (const std::shared_ptr<AttachedAgent> known = sessions_.OfNode(hello.node());
      known != nullptr &&
      known->group() != (identity == nullptr ? absl::string_view() : identity->group)) {
    stream->Close(rpc::ErrorWithReason(
        absl::StatusCode::kPermissionDenied,
        absl::StrCat("agent ", Quoted(hello.node()),
                     " is connected with the token of another job: give each agent its own name"),
        v1::ERROR_REASON_SCOPE));
    return;
  }
  const AgentSessions::Former former = sessions_.Resume(hello);
  if (former.resumes) {
    MUSTER_FAILPOINT("engine.resume");
  } else if (former.session != nullptr) {
    EndSession(former.session);
  }
  const std::shared_ptr<AttachedAgent> session =
      former.resumes ? former.session : sessions_.Begin(hello, identity);
  sessions_.Attach(stream, session);
  {
    MutexLock lock(&session->mu);
    session->stream = stream;
    session->agent.Welcome(kProtocol, core_.last_term(), journal_->cluster_id(),
                           options_.core.default_lease);
  }
  stream->Bind(session);
  MUSTER_FAILPOINT("engine.welcome");
  sessions_.MarkDirty(session);
  if (former.stream != nullptr)
    former.stream->Close(absl::AbortedError("another stream of this agent took over"));
  core_.AttachAgent(session->node, hello, options_.clock->Now(), &out_, session->group());
}

void CoreRunner::AgentClosed(const std::shared_ptr<AgentStream>& stream) {
  Post([this, stream] {
    turn_.AssertHeld();
    sessions_.Detach(stream, options_.clock->Now());
  });
}

void CoreRunner::EndSession(const std::shared_ptr<AttachedAgent>& session) {
  if (session->ended) return;
  session->ended = true;
  MUSTER_FAILPOINT("engine.session_end");
  const absl::Time now = options_.clock->Now();
  const std::vector<CallId> calls(session->calls.begin(), session->calls.end());
  for (const CallId id : calls) {
    core_.Abandon(id, now, &out_);
    calls_.Remove(id);
  }
  sessions_.Remove(session);
  core_.DetachAgent(session->node, now, &out_);
}

void CoreRunner::WatchOpen(std::shared_ptr<WatchStream> stream,
                           std::unique_ptr<WatchSource> source) {
  const bool posted = Post([this, stream, source = std::move(source)]() mutable {
    turn_.AssertHeld();
    if (stopped_) {
      stream->Close(StoppingStatus());
      return;
    }
    if (watchers_.size() >= options_.limits.watchers) {
      overloaded_.fetch_add(1, std::memory_order_relaxed);
      stream->Close(rpc::FromOpError(too_many_watchers_->Parse().error()));
      return;
    }
    MUSTER_FAILPOINT("engine.watch_open");
    // Everything the core has put out must be in the history before it is read.
    Drain();
    if (stopped_) {
      stream->Close(StoppingStatus());
    } else {
      watchers_.Open(stream, std::move(source));
    }
  });
  if (!posted) stream->Close(StoppingStatus());
}

void CoreRunner::WatchWritable(const std::shared_ptr<WatchStream>& stream) {
  Post([this, stream] {
    turn_.AssertHeld();
    watchers_.Writable(stream);
  });
}

void CoreRunner::WatchClosed(const std::shared_ptr<WatchStream>& stream) {
  Post([this, stream] {
    turn_.AssertHeld();
    watchers_.Forget(stream.get());
  });
}

void CoreRunner::Snapshot(std::function<void(absl::StatusOr<uint64_t>)> done) {
  // Only recorded here: the thread writes it, so that it does not delay threads that bring events.
  const bool posted = Post(
      [this, done] {
        turn_.AssertHeld();
        if (stopped_) {
          done(StoppingStatus());
        } else if (!gate_.status().ok()) {
          done(rpc::FromOpError(gate_.failed_answer()->Parse().error()));
        } else if (!snapshots_.Request(done)) {
          overloaded_.fetch_add(1, std::memory_order_relaxed);
          done(rpc::FromOpError(snapshot_busy_->Parse().error()));
        }
      },
      By::kThread);
  if (!posted) done(StoppingStatus());
}

void CoreRunner::TakeSnapshot() {
  snapshots_.Take(core_, [this](const Snapshots::Written& written) {
    Post(
        [this, written] {
          turn_.AssertHeld();
          // The replica that the snapshot was built with is destroyed: gives back what the
          // allocator keeps of it.
          passed_bytes_.fetch_add(kTrimBytes, std::memory_order_relaxed);
          snapshots_.Ended(written);
        },
        By::kThread);
  });
}

void CoreRunner::CaughtUp(absl::Time asked) {
  Post(
      [this, asked] {
        turn_.AssertHeld();
        catching_up_ = false;
        if (!stopped_) core_.CaughtUp(asked, options_.clock->Now(), &out_);
      },
      By::kThread);
}

void CoreRunner::WithCore(absl::AnyInvocable<void(Core*)> task) {
  auto shared = std::make_shared<absl::AnyInvocable<void(Core*)>>(std::move(task));
  const bool posted = Post(
      [this, shared] {
        turn_.AssertHeld();
        (*shared)(stopped_ ? nullptr : &core_);
      },
      By::kThread);
  if (!posted) (*shared)(nullptr);
}

void CoreRunner::StopAll() {
  if (stopped_) return;
  stopped_ = true;
  MUSTER_FAILPOINT("engine.stopping");
  for (const CallId id : calls_.Ids()) Deliver(id, stopping_answer_);
  gate_.Clear();
  snapshots_.Answer(StoppingStatus());
  v1::CoordinatorFrame goodbye;
  {
    MutexLock lock(&mu_);
    goodbye.mutable_goodbye()->set_final(ends_for_good_.has_value());
    goodbye.mutable_goodbye()->set_reason(ends_for_good_.value_or("the coordinator is stopping"));
  }
  *goodbye.mutable_goodbye()->mutable_retry_after() = ToProto(absl::Milliseconds(50));
  const std::vector<std::shared_ptr<AgentStream>> open = sessions_.RemoveAll();
  const grpc::Slice last(goodbye.SerializeAsString());
  for (const auto& stream : open) stream->CloseAfter(grpc::ByteBuffer(&last, 1), StoppingStatus());
  watchers_.CloseAll(StoppingStatus());
}

}  // namespace muster::coordinator
