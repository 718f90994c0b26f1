#include "base/failpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/mutex.h"

namespace muster {
namespace failpoint_internal {
std::atomic<bool> g_armed{false};
}  // namespace failpoint_internal

namespace {

constexpr FailpointInfo kFailpoints[] = {
    {"journal.open", true, "the data directory is locked, the file is not open yet"},
    {"journal.term_bump", true, "the new term is written, not committed"},
    {"journal.term_durable", true, "the new term is committed, its directory not synced"},
    {"journal.opened", true, "the journal is open, nothing is replayed"},
    {"journal.replay_start", true, "before the first record is replayed"},
    {"journal.replay_record", true, "after each replayed record"},
    {"journal.replay_end", true, "after the last replayed record"},
    {"journal.before_append", false, "a record has been made, the journal does not have it"},
    {"journal.after_append", false, "the journal has queued a record"},
    {"journal.commit_begin", true, "a group commit has begun"},
    {"journal.before_fsync", true, "the records of a group commit are written, not synced"},
    {"journal.after_fsync", false, "the records of a group commit are synced, not acknowledged"},
    {"journal.after_progress", false, "the core runner has learned of a group commit"},
    {"journal.snapshot_begin", true, "a snapshot is asked for, nothing is read"},
    {"journal.snapshot_built", true, "its state is built, its file is not begun"},
    {"journal.snapshot_part", true, "after each part that is written to its file"},
    {"journal.snapshot_written", true, "its file is written, not synced and not named"},
    {"journal.snapshot_named", true, "its file is on disk, nothing refers to it"},
    {"journal.snapshot_publish", true, "what makes it current is written, not committed"},
    {"journal.snapshot_durable", false, "it is current, the data that it replaces still exists"},
    {"journal.snapshot_truncated", false, "after each step in which old records are deleted"},
    {"journal.stop", false, "the journal begins to stop"},
    {"engine.replayed", true, "replayed, the new term is not begun"},
    {"engine.term_held", false, "the record of the new term is queued, not durable"},
    {"engine.serving", true, "the new term is durable, no call has been taken"},
    {"engine.join", false, "a seat is requested, the rendezvous has not seen the request"},
    {"engine.report_exit", false, "a worker's end is reported, its generation continues"},
    {"engine.hold_exit", false, "a worker's end has ended its generation, not durably"},
    {"engine.apply", false, "before an operation is applied"},
    {"engine.applied", false, "after an operation was applied, before its record is queued"},
    {"engine.hold_join", false, "a generation is sealed, the seal is not durable"},
    {"engine.hold_txn", false, "a durable transaction is done, not durable yet"},
    {"engine.hold_trigger", false, "a trigger is raised, not durable"},
    {"engine.release", false, "a commit releases held answers, before the first"},
    {"engine.reply_join", false, "before a seat is given; the seal is durable"},
    {"engine.reply_leave", false, "before it is confirmed that a worker has left"},
    {"engine.reply_arrive", false, "before an answer of a barrier"},
    {"engine.reply_txn", false, "before the answer of a transaction"},
    {"engine.reply_trigger", false, "before the answer of a raised trigger"},
    {"engine.reply_poll", false, "before triggers are sent"},
    {"engine.reply_beat", false, "before a heartbeat is answered"},
    {"engine.replied", false, "after an answer was handed to the network"},
    {"engine.lease_expired", false, "a worker has just been found lost"},
    {"engine.hello", false, "an agent says hello"},
    {"engine.welcome", false, "the welcome is queued"},
    {"engine.resume", false, "an agent has resumed its session"},
    {"engine.directive", false, "before a directive is queued for an agent"},
    {"engine.session_end", false, "an agent's session has ended"},
    {"engine.watch_open", false, "a watch begins"},
    {"engine.watch_push", false, "before events go to a watcher"},
    {"engine.abandon", false, "a caller has disconnected"},
    {"engine.snapshot", false, "a snapshot is due, the journal has no request yet"},
    {"engine.snapshot_queued", false, "the journal has begun it, in the background"},
    {"engine.stopping", false, "the core runner stops: before waiting calls are answered"},
    {"server.listen", true, "the core runner serves, the port is not open yet"},
    {"server.shutdown", false, "asked to stop, before it begins"},
    {"agent.before_fork", true, "before a worker's process is created"},
    {"agent.after_fork", false, "the process is created, whether it runs its program is unknown"},
    {"agent.spawned", false, "the worker runs, the agent does not watch it yet"},
    {"agent.output", false, "before a worker's output is read"},
    {"agent.stop_worker", false, "before a worker is asked to end"},
    {"agent.reaped", false, "a worker has ended, its end is not reported"},
    {"agent.hello", false, "before the agent says hello, for the first time or again"},
    {"agent.welcomed", false, "the agent is welcomed, nothing has been resent"},
    {"agent.frame", true, "operations of workers are about to go out; error: the stream breaks"},
    {"agent.received", true,
     "answers or a directive arrived, none is delivered; error: the stream breaks"},
    {"agent.directive", false, "a directive is about to be followed"},
    {"agent.seated", false, "a worker has a seat, agent and worker do not know it yet"},
    {"agent.send_together", false, "arrivals of several ranks have become one message"},
    {"agent.answer_together", false, "its answer arrived, no rank has it"},
    {"agent.report_exit", false, "before the coordinator learns how a worker ended"},
    {"agent.fail", false, "before the other machines learn that this one failed"},
    {"agent.finish", false, "all workers here ended well, the other machines do not know"},
    {"worker.connected", true, "the coordinator has answered"},
    {"worker.join", true, "before it asks for a seat"},
    {"worker.joined", true, "it has a seat and does not know it yet"},
    {"worker.leave", false, "before it gives up its seat"},
    {"worker.txn", true, "before a transaction on keys is sent"},
    {"worker.txn_done", false, "after one was answered"},
    {"worker.wait", true, "before it waits for keys"},
    {"worker.barrier", true, "before it arrives at a barrier"},
    {"worker.barrier_done", false, "a barrier was answered, it has not counted it"},
    {"worker.raise_trigger", true, "before it raises a trigger"},
    {"worker.poll_triggers", true, "before it asks for triggers"},
    {"worker.beat", false, "before a heartbeat of its own"},
    {"worker.group_begin", true, "seated, before the process group is built"},
    {"worker.group_built", true, "the process group is built"},
    {"worker.step", false, "the gradients are reduced, before the optimizer's step"},
    {"worker.checkpoint_copy", false, "before a lazy save's thread copies what was left"},
    {"worker.checkpoint_block", true, "before each block of a checkpoint's file is written"},
    {"worker.checkpoint_sync", true, "after the last block of each of its files, not synced"},
    {"worker.checkpoint_staged", true, "the shards are staged, before the manifest is written"},
    {"worker.checkpoint_publish", true, "the checkpoint is whole, before it gets its name"},
    {"worker.checkpoint_begun", true, "it has its manifest and the registry knows of it"},
    {"worker.checkpoint_report", true, "before this rank reports its shards"},
    {"worker.checkpoint_seal", true, "all have reported, before it is sealed"},
    {"worker.checkpoint_sealed", true, "it is sealed, before the seal is written beside it"},
    {"worker.checkpoint_noted", true, "its seal is written, it has no name yet"},
    {"worker.checkpoint_registered", false, "its publication is registered, old ones are there"},
    {"worker.checkpoint_doomed", true, "an old one is out of sight, on its way out"},
    {"worker.checkpoint_deleted", false, "old ones are gone, the registry does not know"},
    {"worker.checkpoint_renamed", true, "it has its name, the directory is not synced"},
    {"worker.checkpoint_replaced", true, "it has replaced an older one, which is not deleted yet"},
};

enum class Action { kKill, kStop, kError, kDelay, kReport };

struct Armed {
  const FailpointInfo* info;  // nullptr: all (report only)
  Action action;
  absl::StatusCode code = absl::StatusCode::kUnavailable;
  absl::Duration delay;
  uint64_t at = 1;
  uint64_t passes = 0;
};

struct State {
  Mutex mu;
  CondVar changed;  // `reporting` is less
  std::vector<Armed> armed ABSL_GUARDED_BY(mu);
  std::string once_path ABSL_GUARDED_BY(mu);
  std::string report_path ABSL_GUARDED_BY(mu);
  std::set<std::string> reported ABSL_GUARDED_BY(mu);
  int reporting ABSL_GUARDED_BY(mu) = 0;  // threads that write a report
};

State& GetState() {
  static State* const state = new State;  // never destroyed: threads may pass during exit
  return *state;
}

absl::Status Wrong(absl::string_view part, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("MUSTER_FAILPOINTS: '", part, "': ", why, " (docs/failpoints.md)"));
}

absl::StatusOr<absl::StatusCode> ParseCode(absl::string_view part, absl::string_view name) {
  if (name.empty() || name == "UNAVAILABLE") return absl::StatusCode::kUnavailable;
  if (name == "RESOURCE_EXHAUSTED") return absl::StatusCode::kResourceExhausted;
  if (name == "DATA_LOSS") return absl::StatusCode::kDataLoss;
  if (name == "INTERNAL") return absl::StatusCode::kInternal;
  return Wrong(part, "error takes UNAVAILABLE, RESOURCE_EXHAUSTED, DATA_LOSS or INTERNAL");
}

absl::StatusOr<Armed> Parse(absl::string_view part) {
  const std::vector<absl::string_view> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
  if (sides.size() != 2) return Wrong(part, "NAME=ACTION is needed");
  Armed armed;
  armed.info = FindFailpoint(sides[0]);
  const std::vector<absl::string_view> counted = absl::StrSplit(sides[1], absl::MaxSplits('@', 1));
  if (counted.size() == 2 && (!absl::SimpleAtoi(counted[1], &armed.at) || armed.at == 0)) {
    return Wrong(part, "a number from 1 on must follow @");
  }
  const std::vector<absl::string_view> words = absl::StrSplit(counted[0], absl::MaxSplits(':', 1));
  const absl::string_view argument = words.size() == 2 ? words[1] : "";
  if (words[0] == "kill") {
    armed.action = Action::kKill;
  } else if (words[0] == "stop") {
    armed.action = Action::kStop;
  } else if (words[0] == "error") {
    armed.action = Action::kError;
    absl::StatusOr<absl::StatusCode> code = ParseCode(part, argument);
    if (!code.ok()) return code.status();
    armed.code = *code;
  } else if (words[0] == "delay") {
    armed.action = Action::kDelay;
    if (!absl::ParseDuration(argument, &armed.delay) || armed.delay < absl::ZeroDuration()) {
      return Wrong(part, "delay:DURATION is needed, for example delay:200ms");
    }
  } else if (words[0] == "report") {
    armed.action = Action::kReport;
  } else {
    return Wrong(part, "the actions are kill, stop, error, delay and report");
  }
  const bool all = sides[0] == "*";
  if (armed.info == nullptr && !all) {
    return Wrong(part,
                 "there is no failpoint of this name; muster-coordinator --list_failpoints "
                 "prints them all");
  }
  if (all && armed.action != Action::kReport) return Wrong(part, "* takes only report");
  if (armed.action == Action::kError && !armed.info->fails) {
    return Wrong(part, "this failpoint cannot return an error");
  }
  return armed;
}

// One write per line, so that lines of several processes do not mix.
void AppendLine(const std::string& path, absl::string_view text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const std::string line = absl::StrCat(text, "\n");
  if (write(fd, line.data(), line.size()) < 0) {
    MUSTER_LOG(Warning) << "failpoint report: cannot write " << path;
  }
  close(fd);
}

bool TakeOnce(const std::string& path) {
  if (path.empty()) return true;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  close(fd);
  return true;
}

}  // namespace

const FailpointInfo* FindFailpoint(absl::string_view name) {
  for (const FailpointInfo& info : kFailpoints) {
    if (name == info.name) return &info;
  }
  return nullptr;
}

std::string ListFailpoints() {
  std::string text;
  for (const FailpointInfo& info : kFailpoints) {
    absl::StrAppend(&text, absl::StrFormat("%-28s %-5s %s\n", info.name, info.fails ? "error" : "",
                                           info.place));
  }
  return text;
}

absl::Status ArmFailpoints(absl::string_view spec, const std::string& once_path,
                           const std::string& report_path) {
  std::vector<Armed> parsed;
  for (const absl::string_view part : absl::StrSplit(spec, ',', absl::SkipEmpty())) {
    absl::StatusOr<Armed> armed = Parse(part);
    if (!armed.ok()) return armed.status();
    if (armed->action == Action::kReport && report_path.empty()) {
      return Wrong(part, "report needs a file in MUSTER_FAILPOINTS_REPORT");
    }
    parsed.push_back(*std::move(armed));
  }
  State& state = GetState();
  MutexLock lock(&state.mu);
  failpoint_internal::g_armed = !parsed.empty();
  state.armed = std::move(parsed);
  state.once_path = once_path;
  state.report_path = report_path;
  state.reported.clear();
  return absl::OkStatus();
}

absl::Status ArmFailpointsFromEnvironment() {
  static const absl::Status* const status = [] {
    const auto variable = [](const char* name) {
      const char* const value = std::getenv(name);
      return std::string(value == nullptr ? "" : value);
    };
    const std::string spec = variable("MUSTER_FAILPOINTS");
    if (spec.empty()) return new absl::Status();
    auto* result = new absl::Status(ArmFailpoints(spec, variable("MUSTER_FAILPOINTS_ONCE"),
                                                  variable("MUSTER_FAILPOINTS_REPORT")));
    if (result->ok()) {
      MUSTER_LOG(Warning) << "MUSTER_FAILPOINTS is set: this process fails on purpose (" << spec
                          << ")";
    }
    return result;
  }();
  return *status;
}

absl::Status failpoint_internal::Hit(const char* name) {
  State& state = GetState();
  bool fires = false;
  Action action = Action::kReport;
  absl::StatusCode code = absl::StatusCode::kOk;
  absl::Duration delay;
  uint64_t at = 0;
  std::string report_path;
  std::string once_path;
  {
    MutexLock lock(&state.mu);
    const Armed* found = nullptr;
    for (Armed& armed : state.armed) {
      if (armed.action == Action::kReport) {
        if (armed.info != nullptr && armed.info != FindFailpoint(name)) continue;
        if (!state.reported.insert(name).second) continue;
        report_path = state.report_path;
        ++state.reporting;
        continue;
      }
      if (name != absl::string_view(armed.info->name)) continue;
      if (++armed.passes == armed.at && found == nullptr) found = &armed;
    }
    fires = found != nullptr;
    if (fires) {
      action = found->action;
      code = found->code;
      delay = found->delay;
      at = found->at;
      once_path = state.once_path;
    }
  }
  // If the reader of the report blocks the write, only this thread waits, and no other failpoint.
  if (!report_path.empty()) {
    AppendLine(report_path, name);
    MutexLock lock(&state.mu);
    --state.reporting;
    state.changed.SignalAll();
  }
  if (!fires || !TakeOnce(once_path)) return absl::OkStatus();
  // Logged before the action: the last line of a process that killed itself has the reason.
  MUSTER_LOG(Warning) << "failpoint " << name << " fires (pass " << at << ")";
  switch (action) {
    case Action::kKill: {
      // Wait until the failpoints that other threads have passed are in the report.
      MutexLock lock(&state.mu);
      while (state.reporting > 0) state.changed.Wait(&state.mu);
      raise(SIGKILL);
      break;
    }
    case Action::kStop:
      raise(SIGSTOP);
      break;
    case Action::kError:
      return absl::Status(code, absl::StrCat("failpoint ", name));
    case Action::kDelay:
      Notification().WaitForNotificationWithTimeout(delay);
      break;
    case Action::kReport:
      break;
  }
  return absl::OkStatus();
}

}  // namespace muster
