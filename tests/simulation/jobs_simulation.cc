#include "tests/simulation/jobs_simulation.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/defaults.h"
#include "base/log.h"
#include "coordinator/errors.h"
#include "coordinator/jobs/attempt_times.h"
#include "coordinator/jobs/placement.h"
#include "coordinator/jobs/record_history.h"

namespace muster::simulation {
namespace {

using coordinator::CallId;
using coordinator::JobsCore;
using coordinator::JobsMutants;
using coordinator::JobsOptions;
using coordinator::JobsOutput;

constexpr char kCluster[] = "c";
constexpr char kFailure[] = "failure ";  // and its number: why a process or an attempt has ended
using AttemptKey = std::pair<std::string, int>;

struct Node {
  std::string name;
  uint64_t uid = 0;
  int cpus = 0;
  bool silent = false;
  uint64_t seen = 0;
  std::optional<CallId> call;  // in flight or held
  std::map<AttemptKey, v1::AttemptReport> attempts;
  std::map<AttemptKey, int> processes;
};

class Simulation {
 public:
  Simulation(uint64_t seed, JobsMutants mutants) : random_(seed) {
    options_.mutants = mutants;
    options_.node_lease = absl::Seconds(30);
    const int nodes = 1 + Up(4);
    for (int i = 0; i < nodes; ++i) {
      Node& node = nodes_.emplace_back();
      node.name = absl::StrCat("n", i);
      node.uid = random_();
      node.cpus = 1 + Up(4);
    }
    StartCore();
  }

  JobsSimulationResult Run() {
    for (int step = 0; step < 400 && result_.violation.empty(); ++step) {
      ++result_.events;
      Step();
    }
    // The quiet phase: everything that can run does.
    for (Node& node : nodes_) node.silent = false;
    quiet_ = true;
    for (int step = 0; step < 3000 && result_.violation.empty() && !AllEnded(); ++step) Step();
    if (result_.violation.empty() && !AllEnded()) {
      Violation(absl::StrCat("jobs do not end: ", Unended()));
    }
    if (result_.violation.empty()) CheckReplay();
    for (const auto& [id, record] : told_) result_.attempts += record.attempts();
    result_.stepped = static_cast<int>(stepped_.size());
    return result_;
  }

 private:
  int Up(int n) { return static_cast<int>(random_() % (n + 1)); }
  bool Chance(int percent) { return Up(99) < percent; }
  void Violation(std::string what) {
    if (result_.violation.empty()) result_.violation = std::move(what);
  }

  // ---- the coordinator

  void StartCore() {
    core_ = std::make_unique<JobsCore>(options_);
    for (const v1::JournalChange& change : journal_) Replay(change, core_.get());
    for (Node& node : nodes_) node.call.reset();
    JobsOutput out;
    core_->StartTerm(NextEvent(), 0, &out);
    Take(std::move(out));
  }
  void Replay(const v1::JournalChange& change, JobsCore* core) {
    if (change.has_job_record_changed()) {
      const absl::Status restored = core->Restore(change.job_record_changed());
      if (!restored.ok()) {
        Violation(absl::StrCat(restored.message(), ": ", change.ShortDebugString()));
      }
    }
    if (change.has_node_changed()) core->Restore(change.node_changed());
  }
  JobsCore::Event NextEvent() { return {now_, revision_ += 2, kCluster}; }

  void Take(JobsOutput out) {
    // A crash before the record is durable loses the record and everything that would have
    // followed.
    if (!quiet_ && Chance(1)) {
      ++result_.restarts;
      StartCore();
      return;
    }
    for (v1::JournalChange& change : out.changes) {
      if (change.job_record_changed().has_record()) {
        v1::JobRecordChanged whole = change.job_record_changed();
        if (!coordinator::RestoreKnownHistory(told_[whole.record().job_id()], &whole).ok()) {
          Violation(absl::StrCat("a history is not whole: ", change.ShortDebugString()));
        }
        if (told_[whole.record().job_id()].job_id().empty()) told_.erase(whole.record().job_id());
        OnRecord(whole.record());
      }
      if (!change.job_record_changed().job_id().empty()) OnPlacement(change.job_record_changed());
      journal_.push_back(std::move(change));
    }
    CheckRoom();
    // A crash may also come after the record is durable, before any answer is sent.
    const bool crash = !quiet_ && Chance(1);
    if (!crash) {
      for (auto& closed : out.closed_groups) closed_.insert(closed.first);
      for (auto& [call, result] : out.replies) Deliver(call, std::move(result));
    }
    if (crash) {
      ++result_.restarts;
      StartCore();
    }
  }

  void OnRecord(const v1::JobRecord& record) {
    const auto former = told_.find(record.job_id());
    if (former != told_.end() && former->second.attempts() < record.attempts()) {
      for (const v1::Placement& one : record.history(record.history_size() - 1).placements()) {
        for (const v1::Placement& spare : former->second.spares()) {
          result_.promotions += one.node() == spare.node() ? 1 : 0;
        }
      }
      for (const v1::JobAttempt& attempt : former->second.history()) {
        if (attempt.end().end_class() == v1::END_CLASS_RESIZED &&
            attempt.number() == former->second.attempts()) {
          ++result_.resizes;
          if (record.restarts() > former->second.restarts()) {
            Violation(absl::StrCat(record.job_id(), " counts a resize as a restart"));
          }
        }
        if (attempt.end().end_class() == v1::END_CLASS_USER_ERROR &&
            attempt.number() == former->second.attempts() && !Succeeded(attempt) &&
            !by_hand_.contains({record.job_id(), attempt.number()})) {
          Violation(absl::StrCat(record.job_id(), " is retried after a user error"));
        }
      }
    }
    if (former != told_.end() && record.state() == v1::JOB_STATE_QUEUED &&
        former->second.state() != v1::JOB_STATE_SUSPENDED &&
        former->second.state() != v1::JOB_STATE_QUEUED && record.history_size() > 0 &&
        former->second.attempts() == record.attempts()) {
      const v1::JobAttempt& last = record.history(record.history_size() - 1);
      if (last.end().end_class() == v1::END_CLASS_HANG && !Succeeded(last) &&
          !by_hand_.contains({record.job_id(), last.number()})) {
        ++result_.hangs;
        for (const v1::ClassCount& limit : record.spec().class_limits()) {
          std::set<AttemptKey> hung;  // since an operator has retried the job
          followed_hangs_.insert({record.job_id(), last.number()});
          for (const AttemptKey& key : followed_hangs_) {
            const auto later = by_hand_.upper_bound(key);
            const bool retried = later != by_hand_.end() && later->first == key.first;
            if (key.first == record.job_id() && !retried) hung.insert(key);
          }
          if (static_cast<int>(hung.size()) > limit.count()) {
            Violation(absl::StrCat(record.job_id(), " is restarted after ", hung.size(),
                                   " hangs, and its failure policy allows ", limit.count()));
          }
        }
        if (record.restarts() == former->second.restarts()) {
          Violation(
              absl::StrCat(record.job_id(), " is restarted after a hang, which is not counted"));
        }
      }
    }
    if (former != told_.end()) CheckFreeStart(former->second, record);
    if (record.restarts() > record.spec().max_restarts()) {
      Violation(absl::StrCat(record.job_id(), " has had ", record.restarts(), " restarts of ",
                             record.spec().max_restarts()));
    }
    // The job may have been resized later.
    const int told_attempts = former == told_.end() ? 0 : former->second.attempts();
    if (record.attempts() > told_attempts) {
      const v1::JobAttempt& last = record.history(record.history_size() - 1);
      const int processes = coordinator::CountProcesses(last);
      if (processes < record.spec().min_processes() || processes > record.spec().max_processes()) {
        Violation(absl::StrCat("attempt ", last.number(), " of ", record.job_id(), " has ",
                               processes, " processes"));
      }
    }
    if (former != told_.end()) CheckRestartsInPlace(former->second, record);
    if (former != told_.end()) CheckCountedOnce(former->second, record);
    CheckTimes(record);
    if (record.state() == v1::JOB_STATE_SUCCEEDED &&
        !Succeeded(record.history(record.history_size() - 1))) {
      Violation(absl::StrCat(record.job_id(), " has succeeded, but not its processes"));
    }
    told_[record.job_id()] = record;
  }
  // A start that is not counted follows only an end that the program could not prevent. If a runner
  // was stopped, its end hides no cause.
  void CheckFreeStart(const v1::JobRecord& before, const v1::JobRecord& now) {
    const bool ended = before.state() == v1::JOB_STATE_STARTING ||
                       before.state() == v1::JOB_STATE_RUNNING ||
                       before.state() == v1::JOB_STATE_STOPPING;
    if (!ended || now.state() != v1::JOB_STATE_QUEUED || now.restarts() > before.restarts()) return;
    const v1::EndClass end_class = now.history(now.history_size() - 1).end().end_class();
    switch (end_class) {
      case v1::END_CLASS_NODE_LOST:
      case v1::END_CLASS_NODE_FAILED:
      case v1::END_CLASS_PREEMPTED:
      case v1::END_CLASS_RESIZED:
      case v1::END_CLASS_SUSPENDED:
        ++result_.free;
        break;
      default:
        Violation(absl::StrCat(now.job_id(), " starts again for free after ",
                               v1::EndClass_Name(end_class)));
    }
  }

  // A node requests each restart once; the restart counts, and leaves an entry with its cause.
  void CheckRestartsInPlace(const v1::JobRecord& before, const v1::JobRecord& now) {
    if (before.history_size() == 0 || now.history_size() == 0) return;
    const v1::JobAttempt& was = before.history(before.history_size() - 1);
    const v1::JobAttempt& is = now.history(now.history_size() - 1);
    if (was.number() != is.number() || was.restarts() == is.restarts()) return;
    ++result_.restarts_in_place;
    const v1::AttemptEnd& cause = now.history(now.history_size() - 2).end();
    const std::string what = absl::StrCat("restart ", is.restarts(), " within attempt ",
                                          is.number(), " of ", now.job_id());
    if (is.restarts() != was.restarts() + 1 || now.restarts() != before.restarts() + 1) {
      Violation(absl::StrCat(what, " counts as ", now.restarts() - before.restarts()));
    }
    if (now.restarts() > now.spec().max_restarts()) Violation(absl::StrCat(what, " is too many"));
    if (was.stop()) Violation(absl::StrCat(what, " follows the order to stop"));
    if (cause.end_class() == v1::END_CLASS_USER_ERROR) {
      Violation(absl::StrCat(what, " follows a user error"));
    }
    if (!asked_.contains({now.job_id(), is.number(), is.restarts()})) {
      Violation(absl::StrCat(what, " was not asked for"));
    }
  }
  // A runner that is stopped before it learns that its request was granted reports the request once
  // more.
  void CheckCountedOnce(const v1::JobRecord& before, const v1::JobRecord& now) {
    if (now.restarts() <= before.restarts()) return;
    // The attempt after the last end has no end yet.
    const auto cause =
        std::find_if(now.history().rbegin(), now.history().rend(),
                     [](const v1::JobAttempt& attempt) { return attempt.has_end(); });
    if (cause == now.history().rend()) {
      return Violation(absl::StrCat(now.job_id(), " counts a restart without a cause"));
    }
    ++result_.counted;
    // The coordinator itself detects other ends, such as the loss of a node.
    if (!absl::StartsWith(cause->end().why(), kFailure)) return;
    if (!counted_.insert({now.job_id(), cause->end().why()}).second) {
      Violation(absl::StrCat(now.job_id(), " counts ", cause->end().why(), " twice"));
    }
  }
  void OnPlacement(const v1::JobRecordChanged& change) {
    v1::JobRecord& record = told_.at(change.job_id());
    v1::JobAttempt* const last = record.mutable_history(record.history_size() - 1);
    last->mutable_placements(change.node_rank())->set_state(change.state());
  }
  // The room of a node is promised only once: to what runs, or as a spare for what may follow.
  void CheckRoom() {
    std::map<std::string, int> used;
    for (const auto& [id, record] : told_) {
      std::set<std::string> own;
      if (record.history_size() > 0) {
        for (const v1::Placement& one : record.history(record.history_size() - 1).placements()) {
          if (one.state() == v1::PLACEMENT_STATE_ENDED) continue;
          used[one.node()] += one.processes();
          own.insert(one.node());
        }
      }
      for (const v1::Placement& spare : record.spares()) {
        used[spare.node()] += spare.processes();
        // The loss of the node would take both.
        const bool runs =
            record.state() == v1::JOB_STATE_STARTING || record.state() == v1::JOB_STATE_RUNNING;
        if (!own.insert(spare.node()).second && runs) {
          Violation(absl::StrCat(id, " has a spare on ", spare.node(), ", where it runs"));
        }
      }
      if (record.spares_size() > record.spec().spare_nodes()) {
        Violation(absl::StrCat(id, " has ", record.spares_size(), " spares"));
      }
      if (record.spares_size() > 0 && (record.state() == v1::JOB_STATE_SUSPENDED ||
                                       record.state() >= v1::JOB_STATE_SUCCEEDED)) {
        Violation(absl::StrCat(id, " keeps spares and is ", v1::JobState_Name(record.state())));
      }
    }
    for (const Node& node : nodes_) {
      if (used[node.name] > node.cpus) {
        Violation(absl::StrCat("room for ", used[node.name], " processes is promised on ",
                               node.name, ", which has ", node.cpus, " CPUs"));
      }
    }
  }
  // Stages are in order over all attempts, none is in the future, and none is forgotten.
  void CheckTimes(const v1::JobRecord& record) {
    int64_t last = 0;
    for (const v1::JobAttempt& attempt : record.history()) {
      const v1::AttemptTimes& times = attempt.times();
      for (const int64_t time :
           {times.placed_unix_ms(), times.sealed_unix_ms(), times.restored_unix_ms(),
            times.stepped_unix_ms(), times.failed_unix_ms(), times.detected_unix_ms(),
            times.decided_unix_ms(), times.fenced_unix_ms()}) {
        if (time == 0) continue;
        if (time < last || absl::FromUnixMillis(time) > std::max(now_, ticked_)) {
          Violation(absl::StrCat("the stages of attempt ", attempt.number(), " of ",
                                 record.job_id(), " are out of order: ", times.ShortDebugString()));
        }
        last = time;
      }
      const bool over = &attempt != &record.history(record.history_size() - 1);
      if (over && (times.placed_unix_ms() == 0 || times.fenced_unix_ms() == 0)) {
        Violation(absl::StrCat("it is not known when attempt ", attempt.number(), " of ",
                               record.job_id(), " was placed and fenced"));
      }
      if (times.stepped_unix_ms() != 0) stepped_.insert({record.job_id(), attempt.number()});
    }
    const auto former = told_.find(record.job_id());
    if (former == told_.end()) return;
    for (const v1::JobAttempt& before : former->second.history()) {
      for (const v1::JobAttempt& attempt : record.history()) {
        if (attempt.number() != before.number() || attempt.restarts() != before.restarts()) {
          continue;
        }
        if (before.times().stepped_unix_ms() != 0 &&
            before.times().stepped_unix_ms() != attempt.times().stepped_unix_ms()) {
          Violation(absl::StrCat("the first step of attempt ", attempt.number(), " of ",
                                 record.job_id(), " has moved"));
        }
      }
    }
  }
  // Reports what workers and agents of a running attempt say about it, now or too late.
  void GroupSays() {
    for (Node& node : nodes_) {
      for (const auto& [key, report] : node.attempts) {
        if (!Chance(30)) continue;
        const coordinator::AttemptStage stages[] = {
            coordinator::AttemptStage::kSealed, coordinator::AttemptStage::kRestored,
            coordinator::AttemptStage::kStepped, coordinator::AttemptStage::kDetected};
        const coordinator::AttemptStage stage = stages[Up(3)];
        const absl::Time at =
            Chance(20) ? absl::InfinitePast() : now_ + absl::Milliseconds(2000 - Up(20'000));
        JobsOutput out;
        core_->Hear({absl::StrCat(JobsCore::GroupOf(key.first, key.second),
                                  Chance(20) ? kAgentsSuffix : ""),
                     stage, at},
                    NextEvent(), &out);
        Take(std::move(out));
        return;
      }
    }
  }
  static bool Succeeded(const v1::JobAttempt& attempt) {
    return std::all_of(attempt.placements().begin(), attempt.placements().end(),
                       [](const v1::Placement& placement) {
                         return placement.end_class() == v1::END_CLASS_SUCCEEDED;
                       });
  }

  void Send(const v1::Op& op, Node* node) {
    const CallId call = ++calls_;
    if (node != nullptr) node->call = call;
    JobsOutput out;
    core_->Handle(call, op, NextEvent(), &out);
    Take(std::move(out));
  }

  void Deliver(CallId call, v1::OpResult result) {
    for (Node& node : nodes_) {
      if (node.call != call) continue;
      node.call.reset();
      // The reply is lost with the connection.
      if (node.silent || (!quiet_ && Chance(10)) || result.has_error()) return;
      node.seen = result.sync_node().version();
      Obey(&node, result.sync_node());
      return;
    }
  }

  // ---- nodes

  void Sync(Node* node) {
    v1::Op op;
    v1::SyncNodeRequest* const request = op.mutable_sync_node();
    request->set_node(node->name);
    request->set_node_uid(node->uid);
    request->set_cluster_id(kCluster);
    request->mutable_info()->set_cpus(node->cpus);
    request->mutable_info()->set_restarts_in_place(true);
    request->mutable_info()->set_takes_files(true);
    request->set_seen_version(node->seen);
    for (const auto& [key, report] : node->attempts) *request->add_attempts() = report;
    Send(op, node);
  }

  void Obey(Node* node, const v1::SyncNodeReply& reply) {
    std::set<AttemptKey> wanted;
    for (const v1::NodeAssignment& assignment : reply.assignments()) {
      const AttemptKey key(assignment.job_id(), assignment.attempt());
      wanted.insert(key);
      if (!node->attempts.contains(key)) {
        if (!assignment.stop()) OnStart(*node, assignment);
        v1::AttemptReport& report = node->attempts[key];
        report.set_job_id(key.first);
        report.set_attempt(key.second);
        report.set_state(v1::PLACEMENT_STATE_RUNNING);
        node->processes[key] = assignment.processes();
        if (assignment.stop()) {
          End(node, &report, v1::END_CLASS_CANCELLED);
          node->processes.erase(key);
        }
      } else if (assignment.stop() && Chance(70)) {
        End(node, &node->attempts[key], v1::END_CLASS_CANCELLED);
      } else if (assignment.restarts() >= node->attempts[key].restart() &&
                 node->attempts[key].state() == v1::PLACEMENT_STATE_RUNNING) {
        restarts_on_[{node->name, key.first, key.second}] = assignment.restarts();
        node->attempts[key].clear_restart();
        node->attempts[key].clear_end();
      }
    }
    for (auto it = node->attempts.begin(); it != node->attempts.end();) {
      if (wanted.contains(it->first)) {
        ++it;
      } else if (it->second.state() == v1::PLACEMENT_STATE_ENDED) {
        it = node->attempts.erase(it);
      } else {
        End(node, &it->second, v1::END_CLASS_CANCELLED);
        ++it;
      }
    }
    int used = 0;
    for (const auto& [key, count] : node->processes) used += count;
    if (used > node->cpus) {
      Violation(absl::StrCat(node->name, " has ", used, " processes for ", node->cpus, " CPUs"));
    }
  }

  void OnStart(const Node& node, const v1::NodeAssignment& assignment) {
    if (!started_.insert({node.name, node.uid, assignment.job_id(), assignment.attempt()}).second) {
      Violation(absl::StrCat("attempt ", assignment.attempt(), " of ", assignment.job_id(),
                             " starts twice on ", node.name));
    }
    for (const Node& other : nodes_) {
      for (const auto& [key, count] : other.processes) {
        if (key.first == assignment.job_id() && key.second < assignment.attempt() &&
            !was_lost_.contains(other.name)) {
          Violation(absl::StrCat("attempt ", assignment.attempt(), " of ", key.first,
                                 " starts while attempt ", key.second, " runs on ", other.name));
        }
      }
    }
  }

  void End(Node* node, v1::AttemptReport* report, v1::EndClass end_class) {
    if (report->state() == v1::PLACEMENT_STATE_ENDED) return;
    report->set_state(v1::PLACEMENT_STATE_ENDED);
    // A runner that is stopped while it waits for an answer ends with its request.
    if (report->restart() == 0 || report->attempt() % 2 == 0) {
      report->clear_restart();
      report->mutable_end()->set_end_class(end_class);
      report->mutable_end()->set_why(absl::StrCat(kFailure, ++failures_));
    }
    if (report->attempt() % 3 != 0) {
      report->mutable_failed_ago()->set_seconds(report->attempt() % 5 * 10);
    }
    node->processes.erase({report->job_id(), report->attempt()});
  }

  // ---- what happens

  void Step() {
    now_ += absl::Milliseconds(Up(quiet_ ? 4000 : 3000));
    // Deadlines come before later events.
    while (core_->NextDeadline() < now_) {
      const absl::Time due = core_->NextDeadline();
      JobsOutput out;
      core_->Tick({std::max(due, ticked_), revision_ += 2, kCluster}, &out);
      ticked_ = std::max(due, ticked_) + absl::Milliseconds(1);
      NoteLost(&out);
      Take(std::move(out));
      if (ticked_ >= now_) break;
    }
    ticked_ = now_;
    for (Node& node : nodes_) {
      if (!node.silent && !node.call.has_value()) Sync(&node);
    }
    EndSomething();
    GroupSays();
    if (quiet_) return;
    LoseSomething();
    switch (Up(12)) {
      case 0:
      case 1:
        if (jobs_.size() < 12) Submit();
        break;
      case 2:
        if (!jobs_.empty()) Control();
        break;
      case 3: {  // its connection breaks
        Node& node = Any();
        if (node.call.has_value()) core_->Abandon(*node.call);
        node.call.reset();
        break;
      }
      case 4:
        if (Chance(30)) Any().silent = true;
        break;
      case 5:
        Any().silent = false;
        break;
      case 6: {  // the machine is set up again
        Node& node = Any();
        if (!Chance(20)) break;
        if (node.call.has_value()) core_->Abandon(*node.call);
        node.call.reset();
        node.uid = random_();
        node.attempts.clear();
        node.processes.clear();
        node.seen = 0;
        break;
      }
      case 7:
        if (Chance(20)) {
          ++result_.restarts;
          StartCore();
        }
        break;
      default:
        break;
    }
  }
  Node& Any() { return nodes_[random_() % nodes_.size()]; }

  // A node that was lost once may have processes of a fenced attempt. Must be called before the
  // output of the event is delivered; any event may also start jobs and answer nodes, so the output
  // of this one follows the other's.
  void NoteLost(JobsOutput* out) {
    v1::Op op;
    op.mutable_list_nodes();
    JobsOutput more;
    core_->Handle(++calls_, op, {ticked_, revision_ += 2, kCluster}, &more);
    for (auto& [call, result] : more.replies) {
      for (const v1::NodeRecord& node : result.list_nodes().nodes()) {
        if (node.lost() && was_lost_.insert(node.node()).second) ++result_.lost_nodes;
      }
      out->replies.emplace_back(call, std::move(result));
    }
    for (v1::JournalChange& change : more.changes) out->changes.push_back(std::move(change));
    for (auto& group : more.closed_groups) out->closed_groups.push_back(std::move(group));
  }

  void EndSomething() {
    for (Node& node : nodes_) {
      for (auto& [key, report] : node.attempts) {
        if (report.state() == v1::PLACEMENT_STATE_ENDED || !Chance(quiet_ ? 50 : 8)) continue;
        v1::EndClass end_class = v1::END_CLASS_SUCCEEDED;
        if (!quiet_) {
          const v1::EndClass classes[] = {
              v1::END_CLASS_SUCCEEDED,      v1::END_CLASS_SUCCEEDED,  v1::END_CLASS_PROCESS_FAILED,
              v1::END_CLASS_PROCESS_FAILED, v1::END_CLASS_USER_ERROR, v1::END_CLASS_NODE_FAILED,
              v1::END_CLASS_OUT_OF_MEMORY,  v1::END_CLASS_HANG,       v1::END_CLASS_PEER_FAILED,
              v1::END_CLASS_PEER_FAILED};
          end_class = classes[Up(9)];
        }
        End(&node, &report, end_class);
        // The node reports that at once.
        if (node.call.has_value()) core_->Abandon(*node.call);
        node.call.reset();
        break;
      }
    }
  }

  // Loses a process of an attempt whose other processes can continue: its nodes ask, one after the
  // other.
  void LoseSomething() {
    for (Node& node : nodes_) {
      for (auto& [key, report] : node.attempts) {
        if (report.state() == v1::PLACEMENT_STATE_ENDED || !Chance(8)) continue;
        const v1::EndClass classes[] = {v1::END_CLASS_PROCESS_FAILED, v1::END_CLASS_OUT_OF_MEMORY,
                                        v1::END_CLASS_PEER_FAILED, v1::END_CLASS_USER_ERROR};
        report.set_restart(restarts_on_[{node.name, key.first, key.second}] + 1);
        report.mutable_end()->set_end_class(classes[Up(3)]);
        report.mutable_end()->set_why(absl::StrCat(kFailure, ++failures_));
        asked_.insert({key.first, key.second, report.restart()});
        if (node.call.has_value()) core_->Abandon(*node.call);
        node.call.reset();
        break;
      }
    }
  }

  // Returns the most processes that fit: a larger job would never end.
  int MostProcesses() {
    int cpus = 0;
    for (const Node& node : nodes_) cpus = std::max(cpus, node.cpus);
    return cpus;
  }

  void Submit() {
    v1::Op op;
    v1::JobSpec* const spec = op.mutable_submit_job()->mutable_spec();
    spec->set_name("j");
    *spec->add_argv() = std::string("train");
    spec->set_min_processes(1 + Up(3));
    spec->set_max_processes(spec->min_processes() + Up(3));
    spec->set_priority(Up(2));
    spec->set_preemptible(Chance(50));
    spec->set_max_restarts(Up(2));
    if (Chance(30)) {  // limits only hangs
      spec->add_class_limits()->set_end_class(v1::END_CLASS_HANG);
      spec->mutable_class_limits(0)->set_count(Up(1));
    }
    spec->set_wait_for_nodes(true);
    if (Chance(20)) spec->mutable_time_limit()->set_seconds(10 + Up(60));
    if (Chance(30)) spec->mutable_restart_delay()->set_seconds(1 + Up(5));
    if (spec->min_processes() < spec->max_processes() && Chance(50)) {
      spec->mutable_grow_after()->set_seconds(Up(20));
    }
    if (Chance(40)) spec->set_spare_nodes(1 + Up(1));
    if (spec->min_processes() > MostProcesses()) return;
    jobs_.insert(absl::StrCat("j-", jobs_.size() + 1));
    const std::string key = absl::StrCat("key", ++keys_);
    op.mutable_submit_job()->set_idempotency_key(key);
    // Repeats until it has succeeded, because a crash may have lost the call.
    for (int i = 0; i < 3; ++i) Send(op, nullptr);
    jobs_.clear();
    for (const auto& [id, record] : told_) jobs_.insert(id);
  }

  void Control() {
    auto it = jobs_.begin();
    std::advance(it, Up(static_cast<int>(jobs_.size()) - 1));
    v1::Op op;
    op.mutable_control_job()->set_job_id(*it);
    const v1::JobAction actions[] = {
        v1::JOB_ACTION_CANCEL, v1::JOB_ACTION_SUSPEND, v1::JOB_ACTION_RESUME, v1::JOB_ACTION_RESUME,
        v1::JOB_ACTION_RETRY,  v1::JOB_ACTION_RESIZE,  v1::JOB_ACTION_RESIZE};
    op.mutable_control_job()->set_action(actions[Up(6)]);
    op.mutable_control_job()->set_min_processes(1 + Up(MostProcesses() - 1));
    op.mutable_control_job()->set_max_processes(op.control_job().min_processes() + Up(3));
    const auto told = told_.find(*it);
    if (told != told_.end()) op.mutable_control_job()->set_after_attempt(told->second.attempts());
    // A retry by an operator is counted as one after a user error, too.
    if (op.control_job().action() == v1::JOB_ACTION_RETRY && told != told_.end()) {
      by_hand_.insert({*it, told->second.attempts()});
    }
    Send(op, nullptr);
  }

  bool AllEnded() { return Unended().empty(); }
  std::string Unended() {
    for (const auto& [id, told] : told_) {
      const v1::JobRecord* const record = core_->Find(id);
      if (record == nullptr) return absl::StrCat(id, " is unknown");
      switch (record->state()) {
        case v1::JOB_STATE_SUCCEEDED:
        case v1::JOB_STATE_FAILED:
        case v1::JOB_STATE_CANCELLED:
        case v1::JOB_STATE_SUSPENDED:
          break;
        default:
          return absl::StrCat(record->ShortDebugString());
      }
    }
    return "";
  }

  void CheckReplay() {
    JobsCore replayed(options_);
    for (const v1::JournalChange& change : journal_) Replay(change, &replayed);
    const auto all = [](const JobsCore& core) {
      std::string text;
      core.ForEachChange(
          [&](const v1::JournalChange& change) { text += change.ShortDebugString() + "\n"; });
      return text;
    };
    if (all(replayed) != all(*core_)) Violation("the journal makes another state");
  }

  std::mt19937_64 random_;
  JobsOptions options_;
  JobsSimulationResult result_;
  std::unique_ptr<JobsCore> core_;
  std::vector<v1::JournalChange> journal_;
  std::deque<Node> nodes_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  absl::Time ticked_ = now_;
  uint64_t revision_ = 1000;
  CallId calls_ = 0;
  int keys_ = 0;
  int failures_ = 0;
  bool quiet_ = false;
  std::set<std::string> jobs_;
  std::map<std::string, v1::JobRecord> told_;  // records according to the journal
  std::set<AttemptKey> by_hand_;         // attempts after which an operator has retried the job
  std::set<AttemptKey> followed_hangs_;  // those of jobs with a limit on hangs
  std::set<AttemptKey> stepped_;
  // Jobs, and which of their failures were counted.
  std::set<std::pair<std::string, std::string>> counted_;
  // Restarts within an attempt that were requested.
  std::set<std::tuple<std::string, int, int>> asked_;
  // Restarts that a node knows of.
  std::map<std::tuple<std::string, std::string, int>, int> restarts_on_;
  std::set<std::string> closed_;
  std::set<std::string> was_lost_;
  std::set<std::tuple<std::string, uint64_t, std::string, int>> started_;
};

}  // namespace

JobsSimulationResult RunJobsSimulation(uint64_t seed, JobsMutants mutants) {
  return Simulation(seed, mutants).Run();
}

}  // namespace muster::simulation
