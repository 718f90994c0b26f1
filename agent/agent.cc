#include "agent/agent.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "agent/end_class.h"
#include "agent/log_folder.h"
#include "agent/process_state.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"

namespace muster::agent {

Agent::Agent(AgentOptions options, ProcessHost& host, OutputMux& output, JobCoordination& link)
    : options_(std::move(options)),
      host_(host),
      output_(output),
      link_(link),
      hostname_(HostName()) {}

void Agent::Stop() {
  {
    // Under one lock, so that a thread that sees stop_wanted_ also finds the event.
    MutexLock lock(&mu_);
    stop_wanted_ = true;
    events_.push_back(StopWanted{});
    changed_.SignalAll();
  }
  link_.Cancel();
  if (options_.gate != nullptr) options_.gate->Cancel();
}

void Agent::Kill(const std::string& worker_id, uint64_t incarnation, const std::string& why,
                 v1::EndClass as) {
  Post(KillWanted{worker_id, incarnation, why, as});
}

void Agent::Reenters(const std::string& worker_id, Reentry reentry) {
  Post(ReentryTold{worker_id, reentry});
}

void Agent::Post(Event event) {
  MutexLock lock(&mu_);
  events_.push_back(std::move(event));
  changed_.SignalAll();
}

Agent::Event Agent::Next() { return *NextWithin(absl::InfiniteDuration()); }

std::optional<Agent::Event> Agent::NextWithin(absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mu_);
  while (events_.empty()) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return std::nullopt;
    changed_.WaitWithTimeout(&mu_, left);
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Agent::TakeStop() {
  stopped_ = true;
  MutexLock lock(&mu_);
  const auto first = std::find_if(events_.begin(), events_.end(), [](const Event& event) {
    return std::holds_alternative<StopWanted>(event);
  });
  if (first != events_.end()) events_.erase(first);
}

absl::Status Agent::StartWorker(const Meeting& meeting, int attempt, int local_rank) {
  Worker& worker = workers_[local_rank];
  worker.rank = meeting.node_rank * options_.slots + local_rank;
  worker.worker_id = absl::StrCat("w", worker.rank);
  worker.incarnation = RandomId();

  WorkerEnvironment told = options_.worker;
  told.place = {.rank = worker.rank,
                .world_size = meeting.num_nodes * options_.slots,
                .local_rank = local_rank,
                .local_world_size = options_.slots,
                .node_rank = meeting.node_rank,
                .num_nodes = meeting.num_nodes};
  told.worker_id = worker.worker_id;
  told.incarnation = worker.incarnation;
  told.master_addr = meeting.master_addr;
  told.master_port = meeting.master_port;
  told.restart_count += attempt;
  told.max_restarts += options_.max_restarts;

  MUSTER_RETURN_IF_ERROR(LogWorker(worker.rank, attempt));
  ProcessOptions process;
  process.argv = options_.argv;
  process.env = ToEnvironmentBlock(MakeWorkerVariables(told, options_.inherited));
  process.stdin_fd = worker.rank == 0 ? options_.stdin_fd : -1;
  process.stdout_terminal = options_.stdout_terminal;
  process.stderr_terminal = options_.stderr_terminal;
  process.kept_lines = options_.kept_lines;
  const int rank = worker.rank;
  OwnedFd group;
  if (options_.groups != nullptr) {
    MUSTER_ASSIGN_OR_RETURN(group, options_.groups->Make(rank));
    process.group_fd = group.get();
  }
  process.on_line = [this, rank](OutputStream stream, absl::string_view line) {
    output_.Line(rank, stream, line);
  };
  process.on_partial = [this, rank](OutputStream stream, absl::string_view text) {
    output_.Partial(rank, stream, text);
  };
  process.on_deaf = [this, rank](absl::string_view state) {
    output_.Note(absl::StrCat("muster: rank ", rank, " on ", hostname_,
                              " has not ended after SIGKILL: ", state, "; still waiting for it"));
  };
  process.on_exit = [this, local_rank](const ProcessExit& exit) { Post(Ended{local_rank, exit}); };
  MUSTER_ASSIGN_OR_RETURN(worker.process, host_.Spawn(std::move(process)));
  ++running_;
  if (options_.processes != nullptr) {
    options_.processes->Started(worker.worker_id, worker.incarnation, worker.rank,
                                worker.process->pid());
  }
  return absl::OkStatus();
}

absl::Status Agent::BeginLogs(const Meeting& meeting) {
  if (options_.log_dir.empty() || logs_begun_) return absl::OkStatus();
  absl::StatusOr<LogFolder> folder = BeginLogFolder(options_.log_dir, meeting.launch);
  if (absl::IsUnimplemented(folder.status())) {
    output_.Note(absl::StrCat("muster: log_dir: ", folder.status().message(),
                              ", which machines that share the folder need to move the logs of an "
                              "earlier launch: this one overwrites them"));
  } else if (!folder.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("log_dir: ", folder.status().message()));
  } else {
    if (!folder->before.empty()) {
      output_.Note(
          absl::StrCat("muster: the logs of an earlier launch are in ", folder->before, " now"));
    }
    log_lock_ = std::move(folder->runs);
  }
  logs_begun_ = true;
  return absl::OkStatus();
}

absl::Status Agent::LogWorker(int rank, int attempt) {
  if (options_.log_dir.empty()) return absl::OkStatus();
  // With a gate, the processes that follow a rank's first one append to the log of attempt 0.
  if (options_.gate != nullptr && attempt > 0) return absl::OkStatus();
  const std::string folder = absl::StrCat(options_.log_dir, "/attempt_", attempt);
  absl::Status status = MakeDirectories(folder);
  if (status.ok()) status = output_.AddLog(rank, absl::StrCat(folder, "/rank_", rank, ".log"));
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("log_dir: ", status.message()));
}

absl::Status Agent::StartWorkers(const Meeting& meeting, int attempt) {
  if (meeting.node_rank != node_rank_ || meeting.num_nodes != num_nodes_) {
    // Kept workers would no longer have the ranks that their variables say.
    StopWorkers(options_.failure_grace);
    WaitForWorkers();
    if (stopped_) return absl::CancelledError("the job was stopped");
  }
  node_rank_ = meeting.node_rank;
  num_nodes_ = meeting.num_nodes;
  MUSTER_RETURN_IF_ERROR(BeginLogs(meeting));
  workers_.resize(options_.slots);
  for (int local_rank = 0; local_rank < options_.slots; ++local_rank) {
    Worker& worker = workers_[local_rank];
    if (worker.kept) {
      worker.kept = false;
      MUSTER_RETURN_IF_ERROR(LogWorker(worker.rank, attempt));
      continue;
    }
    worker = Worker();
    if (options_.gate != nullptr && attempt > 0) {
      output_.Line(node_rank_ * options_.slots + local_rank, OutputStream::kStderr,
                   absl::StrCat("muster: ", restarted_after_, "; rank ",
                                node_rank_ * options_.slots + local_rank, " starts again"));
    }
    MUSTER_RETURN_IF_ERROR(StartWorker(meeting, attempt, local_rank));
  }
  return absl::OkStatus();
}

absl::Status Agent::Renew(const Meeting& meeting, int attempt, const Ended& ended) {
  const WorkerEnd end = OnEnded(ended);
  output_.Note(absl::StrCat("muster: ", end.ToString(),
                            " before it has joined the others again; starting it again"));
  workers_[ended.local_rank] = Worker();
  return StartWorker(meeting, attempt, ended.local_rank);
}

int Agent::kept() const {
  return static_cast<int>(std::count_if(workers_.begin(), workers_.end(),
                                        [](const Worker& worker) { return worker.kept; }));
}

bool Agent::IsReentering(const Worker& worker) {
  return (worker.awaited || worker.reentry == Reentry::kReturned) && worker.killed_because.empty();
}

void Agent::OnReentry(const ReentryTold& told) {
  for (Worker& worker : workers_) {
    if (worker.worker_id != told.worker_id || worker.process == nullptr || worker.ended) continue;
    if (worker.renewed) continue;
    worker.reentry = told.reentry;
    // Also if it repeats that it can re-enter: then it has a new seat.
    if (told.reentry != Reentry::kNone) worker.awaited = false;
    // It has finished its work, so it cannot re-enter: it is started again.
    if (told.reentry == Reentry::kNone && worker.awaited) {
      worker.renewed = true;
      worker.process->Stop(options_.failure_grace);
    }
  }
}

void Agent::StopAwaited() {
  for (Worker& worker : workers_) {
    if (!worker.awaited || worker.ended || worker.renewed) continue;
    output_.Note(absl::StrCat("muster: rank ", worker.rank, " (pid ", worker.process->pid(), " on ",
                              hostname_, ") has not joined the others again within ",
                              absl::FormatDuration(options_.reentry_timeout)));
    worker.renewed = true;
    worker.process->Stop(options_.failure_grace);
  }
}

WorkerEnd Agent::OnEnded(const Ended& event) {
  Worker& worker = workers_[event.local_rank];
  worker.ended = true;
  worker.kept = worker.awaited = false;
  --running_;
  if (options_.processes != nullptr) {
    options_.processes->Ended(worker.worker_id, worker.incarnation);
  }
  WorkerEnd end;
  end.rank = worker.rank;
  end.worker_id = worker.worker_id;
  end.incarnation = worker.incarnation;
  end.pid = worker.process->pid();
  end.host = hostname_;
  end.exit = event.exit;
  end.killed_because = worker.killed_because;
  end.killed_as = worker.killed_as;
  end.last_lines = worker.process->LastLines();
  if (options_.groups != nullptr && !end.exit.ok()) {
    const std::optional<std::string> kill = options_.groups->MemoryKill(worker.rank);
    end.counts_memory_kills = kill.has_value();
    end.memory_kill = kill.value_or("");
  }
  end.may_restart = MayRestart(end);
  if (worker.by_itself && IsUserError(end, options_.user_error_codes)) user_error_ = EndBy(end);
  if (!end.exit.stuck.empty()) stuck_.push_back(end.ToString());
  link_.ReportEnd(end);
  return end;
}

void Agent::StopWorkers(absl::Duration grace) {
  for (Worker& worker : workers_) {
    worker.kept = worker.awaited = false;
    if (worker.process != nullptr && !worker.ended) worker.process->Stop(grace);
  }
}

v1::EndClass Agent::ClassOfWorker(const WorkerEnd& end) const {
  return ClassOf(end, options_.user_error_codes, CountMemoryKills() > memory_kills_);
}

AttemptEnd Agent::EndBy(const WorkerEnd& culprit) const {
  AttemptEnd end;
  end.why = culprit.ToString();
  end.last_lines = culprit.last_lines;
  end.end_class = ClassOfWorker(culprit);
  return end;
}

std::optional<std::string> Agent::WhyLast(v1::EndClass end_class) const {
  // If nothing restarts, the reason is not needed.
  if (!MayRetry(end_class)) {
    return options_.max_restarts > 0 ? "a restart does not help after a user error" : "";
  }
  if (CountsAsRestart(end_class) && counted_.total >= options_.max_restarts) return "";
  std::string over = WhyOverLimit(options_.class_limits, counted_.by_class, end_class);
  if (over.empty()) return std::nullopt;
  return over;
}

bool Agent::MayRestart(const WorkerEnd& cause) const {
  if (stopped_) return false;
  if (options_.gate == nullptr) return !WhyLast(ClassOfWorker(cause)).has_value();
  // A worker that was killed for a reason, such as a hang, may not be the only one to blame.
  return cause.killed_because.empty() && options_.gate->MayAsk(attempt_ + 1, cause);
}

bool Agent::IsWorthKeeping(const WorkerEnd& cause) const {
  if (options_.gate == nullptr || !cause.may_restart) return false;
  return std::any_of(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    if (worker.reentry == Reentry::kNone) return false;
    // All workers run the same program: if this one could re-enter, so can those of other nodes.
    if (worker.worker_id == cause.worker_id) return num_nodes_ > 1;
    return !worker.ended && worker.killed_because.empty();
  });
}

AttemptEnd Agent::EndOfThisMachine(std::string why) const {
  return {std::move(why),
          {},
          options_.elastic ? AttemptEnd::Cause::kMachineLeft : AttemptEnd::Cause::kFailed};
}

void Agent::StopOrKeepWorkers(const AttemptEnd& end) {
  const bool again = options_.gate != nullptr ? end.restarts : !WhyLast(ClassOf(end)).has_value();
  const bool restarts = again && !options_.elastic && !stopped_;
  // If nothing has failed, the workers get the time to save.
  const bool orderly =
      end.cause == AttemptEnd::Cause::kMachineCame || end.cause == AttemptEnd::Cause::kMachineLeft;
  for (Worker& worker : workers_) {
    if (worker.process == nullptr || worker.ended) continue;
    worker.kept = restarts && worker.reentry != Reentry::kNone && worker.killed_because.empty();
    worker.awaited = worker.kept && worker.reentry == Reentry::kAble;
    if (!worker.kept) {
      worker.process->Stop(orderly ? std::max(options_.stop_grace, options_.failure_grace)
                                   : options_.failure_grace);
    }
  }
}

void Agent::KillWorker(const KillWanted& wanted) {
  for (Worker& worker : workers_) {
    if (worker.worker_id != wanted.worker_id || worker.incarnation != wanted.incarnation ||
        worker.process == nullptr || worker.ended || !worker.killed_because.empty()) {
      continue;
    }
    worker.killed_because = wanted.why.empty() ? "at the coordinator's request" : wanted.why;
    worker.killed_as = wanted.as;
    worker.process->Stop(options_.failure_grace);
  }
}

void Agent::WaitForWorkers() {
  while (running_ > kept()) {
    const Event event = Next();
    if (const auto* ended = std::get_if<Ended>(&event)) OnEnded(*ended);
    if (const auto* kill = std::get_if<KillWanted>(&event)) KillWorker(*kill);
    if (const auto* told = std::get_if<ReentryTold>(&event)) OnReentry(*told);
    if (std::holds_alternative<StopWanted>(event)) {
      StopWorkers(stopped_ ? absl::ZeroDuration() : options_.stop_grace);
      stopped_ = true;
    }
  }
}

void Agent::MarkEnded() {
  for (Worker& worker : workers_) {
    if (worker.process == nullptr || worker.ended || worker.renewed) continue;
    const std::string state = ReadProcessState(worker.process->pid()).name;
    worker.by_itself = state == "zombie" || state == "gone";
  }
}

void Agent::NoteLast(const AttemptEnd& local, const AttemptEnd& agreed) {
  // An end that follows from the loss or departure of another machine is not a user error.
  if (options_.gate != nullptr || agreed.cause != AttemptEnd::Cause::kFailed) return;
  if (!MayRetry(ClassOf(local)) && MayRetry(ClassOf(agreed))) counted_.last = local;
}

AttemptEnd Agent::Culprit(const Ended& first) {
  WorkerEnd culprit = OnEnded(first);
  const auto is_user_error = [this](const WorkerEnd& end) {
    return IsUserError(end, options_.user_error_codes);
  };
  const absl::Time deadline = Clock::Real().Now() + options_.settle;
  // No restart helps after a user error, so it takes precedence over other failures.
  while (running_ > 0 && !is_user_error(culprit)) {
    // A death by a signal is not a consequence of another failure, so consider only workers that
    // have ended by now.
    const absl::Duration left =
        culprit.exit.signal != 0 ? absl::ZeroDuration() : deadline - Clock::Real().Now();
    std::optional<Event> event = NextWithin(left);
    if (!event.has_value()) break;
    if (const auto* told = std::get_if<ReentryTold>(&*event)) {
      // From a survivor, which can report before the culprit is found.
      OnReentry(*told);
      continue;
    }
    const auto* ended = std::get_if<Ended>(&*event);
    if (ended == nullptr) {
      Post(*std::move(event));
      break;
    }
    const bool stopped_here = workers_[ended->local_rank].renewed;
    WorkerEnd end = OnEnded(*ended);
    const bool better = culprit.exit.signal == 0 && end.exit.signal != 0;
    if (!stopped_here && (better || is_user_error(end))) culprit = std::move(end);
  }
  AttemptEnd end = EndBy(culprit);
  culprit_ = std::move(culprit);
  return end;
}

std::optional<AttemptEnd> Agent::RunAttempt(const Meeting& meeting, int attempt,
                                            absl::Status* refused) {
  memory_kills_ = CountMemoryKills();
  link_.Watch([this](AttemptEnd end) { Post(EndedElsewhere{std::move(end)}); });
  const auto not_started = [&](const absl::Status& status) {
    StopWorkers(absl::ZeroDuration());
    WaitForWorkers();
    *refused = status;
    return link_.Fail(EndOfThisMachine(
        absl::StrCat("a worker could not be started on ", hostname_, ": ", status.message())));
  };
  absl::Status status = options_.ready ? options_.ready() : absl::OkStatus();
  if (status.ok()) status = StartWorkers(meeting, attempt);
  if (!status.ok() && !stopped_) return not_started(status);
  if (stopped_) {
    link_.Fail({absl::StrCat("the job was stopped on ", hostname_), {}});
    return std::nullopt;
  }
  absl::Time reentry_ends = Clock::Real().Now() + options_.reentry_timeout;
  while (running_ > 0) {
    std::optional<Event> next = NextWithin(reentry_ends - Clock::Real().Now());
    if (!next.has_value()) {
      reentry_ends = absl::InfiniteFuture();
      StopAwaited();
      continue;
    }
    const Event event = *std::move(next);
    if (const auto* told = std::get_if<ReentryTold>(&event)) {
      OnReentry(*told);
      continue;
    }
    if (const auto* ended = std::get_if<Ended>(&event)) {
      if (IsReentering(workers_[ended->local_rank])) {
        if (absl::Status status = Renew(meeting, attempt, *ended); !status.ok()) {
          return not_started(status);
        }
        continue;
      }
      if (ended->exit.ok() && workers_[ended->local_rank].killed_because.empty()) {
        OnEnded(*ended);
        continue;
      }
      AttemptEnd local = Culprit(*ended);
      local.restarts = IsWorthKeeping(*culprit_);
      StopOrKeepWorkers(local);
      AttemptEnd end = link_.Fail(local);
      NoteLast(local, end);
      // Another node has already reported a failure after which a restart could help. After this
      // failure none can, and the gate has to learn that.
      if (options_.gate != nullptr && end.restarts && !culprit_->may_restart) {
        end = std::move(local);
      }
      if (options_.gate != nullptr && !end.restarts) StopWorkers(options_.failure_grace);
      WaitForWorkers();
      return end;
    }
    if (const auto* elsewhere = std::get_if<EndedElsewhere>(&event)) {
      MarkEnded();
      StopOrKeepWorkers(elsewhere->end);
      WaitForWorkers();
      if (user_error_.has_value()) NoteLast(*user_error_, elsewhere->end);
      return elsewhere->end;
    }
    if (const auto* kill = std::get_if<KillWanted>(&event)) {
      KillWorker(*kill);
      continue;
    }
    stopped_ = true;
    const AttemptEnd stopped = EndOfThisMachine(
        absl::StrCat(options_.elastic ? "the launch" : "the job", " was stopped on ", hostname_));
    // The workers of all machines get the signal together, so that they can save.
    if (options_.elastic) link_.Fail(stopped);
    StopWorkers(options_.stop_grace);
    WaitForWorkers();
    if (!options_.elastic) link_.Fail(stopped);
    return std::nullopt;
  }
  const absl::Status finished = link_.Finish();
  if (finished.ok()) return std::nullopt;
  {
    MutexLock lock(&mu_);
    if (stop_wanted_) {
      stopped_ = true;
      return std::nullopt;
    }
  }
  // Another node failed after the workers of this one were done.
  while (true) {
    std::optional<Event> event = NextWithin(absl::Seconds(1));
    if (!event.has_value()) return EndOfThisMachine(std::string(finished.message()));
    if (auto* elsewhere = std::get_if<EndedElsewhere>(&*event)) return std::move(elsewhere->end);
  }
}

JobResult Agent::Run() {
  JobResult result = RunAttempts();
  // Workers that were kept for an attempt that did not begin.
  StopWorkers(result.outcome == JobResult::Outcome::kStopped ? options_.stop_grace
                                                             : options_.failure_grace);
  WaitForWorkers();
  return result;
}

JobResult Agent::RunAttempts() {
  JobResult result;
  for (int attempt = 0;; ++attempt) {
    result.restarts = attempt_ = attempt;
    const absl::StatusOr<Meeting> meeting = link_.Meet(attempt, counted_);
    bool stop_wanted;
    {
      MutexLock lock(&mu_);
      stop_wanted = stop_wanted_;
      // Keep the events left from the previous attempt: kept workers may have ended or reported
      // meanwhile.
      std::deque<Event> left;
      for (Event& event : events_) {
        if (!std::holds_alternative<EndedElsewhere>(event)) left.push_back(std::move(event));
      }
      events_.swap(left);
    }
    if (stop_wanted) {
      TakeStop();
      result.failed_here.reset();  // from the previous attempt
      result.outcome = JobResult::Outcome::kStopped;
      return result;
    }
    if (!meeting.ok()) {
      result.outcome = attempt == 0 ? JobResult::Outcome::kRefused : JobResult::Outcome::kFailed;
      result.status = meeting.status();
      if (attempt > 0) result.failure = {std::string(meeting.status().message()), {}};
      // The end of the last attempt, which this machine was to report when the machines meet.
      if (!counted_.last.why.empty()) {
        result.failure = counted_.last;
        absl::StrAppend(&result.failure.why, "; and ", meeting.status().message());
      }
      return result;
    }
    if (meeting->finished) {
      output_.Note(
          "muster: the job has already succeeded on all machines, so this one starts nothing");
      output_.Flush(options_.failure_grace);
      result.outcome = JobResult::Outcome::kSucceeded;
      return result;
    }
    result.restarts = attempt = attempt_ = meeting->attempt;
    counted_ = meeting->counted;
    if (!counted_.last.why.empty()) {
      result.outcome = JobResult::Outcome::kFailed;
      result.failure = counted_.last;
      const std::optional<std::string> last = WhyLast(ClassOf(result.failure));
      if (last.has_value() && !last->empty()) absl::StrAppend(&result.failure.why, "; ", *last);
      return result;
    }
    if (options_.elastic) {
      output_.Note(absl::StrCat("muster: the job runs on ", meeting->num_nodes,
                                meeting->num_nodes == 1 ? " machine" : " machines",
                                ", of which this one is number ", meeting->node_rank));
    }
    absl::Status refused;
    culprit_.reset();
    user_error_.reset();
    std::optional<AttemptEnd> end = RunAttempt(*meeting, attempt, &refused);
    result.failed_here = culprit_;
    if (!stuck_.empty()) {
      // It may still hold its GPU and its files, so no other process is started.
      result.outcome = JobResult::Outcome::kFailed;
      const std::string stuck =
          absl::StrCat(absl::StrJoin(stuck_, "; "), ": left behind until the kernel releases it");
      if (end.has_value()) result.failure = *std::move(end);
      if (result.failure.why.empty()) {
        result.failure.why = stuck;
      } else if (!absl::StrContains(result.failure.why, stuck_[0])) {
        absl::StrAppend(&result.failure.why, "; and ", stuck);
      }
      return result;
    }
    if (stopped_) {
      result.outcome = JobResult::Outcome::kStopped;
      // The attempt had failed before the stop was requested.
      if (end.has_value()) result.failure = *std::move(end);
      return result;
    }
    if (!end.has_value()) {
      result.outcome = JobResult::Outcome::kSucceeded;
      return result;
    }
    result.failure = *std::move(end);
    if (!refused.ok()) {
      result.outcome = JobResult::Outcome::kRefused;
      result.status = refused;
      return result;
    }
    const v1::EndClass end_class = ClassOf(result.failure);
    const bool counts = CountsAsRestart(end_class);
    const std::optional<std::string> last =
        options_.gate != nullptr ? std::nullopt : WhyLast(end_class);
    const bool again = options_.gate != nullptr ? result.failure.restarts : !last.has_value();
    result.outcome = JobResult::Outcome::kFailed;
    if (!again) {
      if (last.has_value() && !last->empty()) absl::StrAppend(&result.failure.why, "; ", *last);
      return result;
    }
    if (options_.gate != nullptr) {
      const absl::Status allowed = options_.gate->Await(attempt + 1, result);
      if (absl::IsCancelled(allowed) || absl::IsAborted(allowed)) {
        TakeStop();
        if (absl::IsAborted(allowed)) {
          // The gate counted this failure when it allowed the restart.
          result.failed_here.reset();
          result.failure = {};
        }
        result.outcome = JobResult::Outcome::kStopped;
        return result;
      }
      if (!allowed.ok()) {
        output_.Note(absl::StrCat("muster: cannot ask for a restart: ", allowed.message()));
        return result;
      }
    }
    // The machines meet once more only to learn of that end.
    if (!counted_.last.why.empty()) continue;
    if (counts) ++counted_.total;
    CountStart(options_.class_limits, end_class, &counted_.by_class);
    restarted_after_ = result.failure.why;
    const int others = kept();
    output_.Note(absl::StrCat(
        "muster: ", result.failure.why, "; starting ",
        others == 0 ? "all workers"
                    : absl::StrCat(options_.slots - others, " of ", options_.slots, " workers"),
        " again", others == 0 ? "" : ", the others continue in their processes",
        options_.gate != nullptr ? absl::StrCat(" (restart ", attempt + 1, " within the attempt)")
        : counts ? absl::StrCat(" (restart ", counted_.total, " of ", options_.max_restarts, ")")
                 : " (not counted as a restart)"));
    output_.Flush(options_.failure_grace);
  }
}

}  // namespace muster::agent
