#include "tests/chaos/plans.h"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/defaults.h"
#include "base/failpoint.h"
#include "base/log.h"

namespace muster::chaos {
namespace {

// When in a run a place is passed.
enum class Scene {
  kStart,
  kWork,
  kLeave,
  kLostWorker,    // beyond its lease
  kKilledWorker,  // with an agent
  kBrokenStream,  // of an agent
  kWatchers,      // workers wait for what they wrote to come back in a watch
  kAbandon
};

struct Place {
  const char* failpoint;
  Scene scene;
  uint64_t at;
};

constexpr Place kPlaces[] = {
    {"journal.open", Scene::kStart, 1},
    {"journal.term_bump", Scene::kStart, 1},
    {"journal.term_durable", Scene::kStart, 1},
    {"journal.opened", Scene::kStart, 1},
    {"journal.replay_start", Scene::kStart, 1},
    {"journal.replay_record", Scene::kStart, 3},
    {"journal.replay_end", Scene::kStart, 1},
    {"engine.replayed", Scene::kStart, 1},
    {"engine.term_held", Scene::kStart, 1},
    {"engine.serving", Scene::kStart, 1},
    {"server.listen", Scene::kStart, 1},
    {"journal.before_append", Scene::kWork, 12},
    {"journal.after_append", Scene::kWork, 12},
    {"journal.commit_begin", Scene::kWork, 10},
    {"journal.before_fsync", Scene::kWork, 10},
    {"journal.after_fsync", Scene::kWork, 10},
    {"journal.after_progress", Scene::kWork, 10},
    {"journal.snapshot_begin", Scene::kWork, 1},
    // The second snapshot is the first that is built from another one.
    {"journal.snapshot_built", Scene::kWork, 2},
    {"journal.snapshot_part", Scene::kWork, 2},
    {"journal.snapshot_written", Scene::kWork, 2},
    {"journal.snapshot_named", Scene::kWork, 2},
    {"journal.snapshot_publish", Scene::kWork, 2},
    {"journal.snapshot_durable", Scene::kWork, 1},
    // From the second snapshot on there are records to delete.
    {"journal.snapshot_truncated", Scene::kWork, 1},
    // The join that makes the rendezvous complete.
    {"engine.join", Scene::kWork, 2},
    {"engine.apply", Scene::kWork, 40},
    {"engine.applied", Scene::kWork, 40},
    {"engine.hold_join", Scene::kWork, 1},
    {"engine.hold_txn", Scene::kWork, 9},
    {"engine.hold_trigger", Scene::kWork, 1},
    {"engine.release", Scene::kWork, 8},
    // The second reply, when one of two workers has its answer.
    {"engine.reply_join", Scene::kWork, 2},
    {"engine.reply_arrive", Scene::kWork, 12},
    {"engine.reply_txn", Scene::kWork, 25},
    {"engine.reply_trigger", Scene::kWork, 1},
    {"engine.reply_poll", Scene::kWork, 11},
    {"engine.reply_beat", Scene::kWork, 1},
    {"engine.reply_leave", Scene::kWork, 1},
    {"engine.replied", Scene::kWork, 30},
    {"engine.watch_open", Scene::kWork, 1},
    {"engine.watch_push", Scene::kWatchers, 6},
    {"engine.snapshot", Scene::kWork, 1},
    {"engine.snapshot_queued", Scene::kWork, 1},
    {"engine.abandon", Scene::kAbandon, 1},
    {"engine.lease_expired", Scene::kLostWorker, 1},
    {"server.shutdown", Scene::kLeave, 1},
    {"engine.stopping", Scene::kLeave, 1},
    {"journal.stop", Scene::kLeave, 1},
};

struct WorkerPlace {
  const char* failpoint;
  uint64_t at;
};

constexpr WorkerPlace kWorkerPlaces[] = {
    {"worker.connected", 1},     {"worker.join", 1},         {"worker.joined", 1},
    {"worker.txn", 15},          {"worker.txn_done", 15},    {"worker.wait", 6},
    {"worker.barrier", 8},       {"worker.barrier_done", 8}, {"worker.raise_trigger", 1},
    {"worker.poll_triggers", 6}, {"worker.beat", 1},         {"worker.leave", 1},
};

// Returns whether a failpoint is passed only by unary calls.
bool NeedsUnaryCalls(const std::string& failpoint) {
  return failpoint == "engine.replied" || failpoint == "engine.reply_beat";
}

// The coordinator's failpoints in runs with agents.
constexpr Place kAgentsPlaces[] = {
    {"engine.hello", Scene::kWork, 2},
    {"engine.welcome", Scene::kWork, 2},
    {"engine.resume", Scene::kBrokenStream, 1},
    {"engine.directive", Scene::kKilledWorker, 1},
    {"engine.session_end", Scene::kWork, 1},
    {"engine.report_exit", Scene::kKilledWorker, 1},
    {"engine.hold_exit", Scene::kKilledWorker, 1},
};

// The failpoints of the first agent, or of the second one if the first one's worker dies.
constexpr Place kAgentPlaces[] = {
    {"agent.before_fork", Scene::kWork, 2},
    {"agent.after_fork", Scene::kWork, 2},
    {"agent.spawned", Scene::kWork, 2},
    {"agent.output", Scene::kWork, 3},
    {"agent.stop_worker", Scene::kKilledWorker, 1},
    {"agent.reaped", Scene::kKilledWorker, 1},
    {"agent.hello", Scene::kWork, 1},
    {"agent.welcomed", Scene::kWork, 1},
    {"agent.frame", Scene::kWork, 10},
    {"agent.received", Scene::kWork, 10},
    {"agent.directive", Scene::kKilledWorker, 1},
    {"agent.seated", Scene::kWork, 2},
    {"agent.send_together", Scene::kWork, 6},
    {"agent.answer_together", Scene::kWork, 6},
    {"agent.report_exit", Scene::kKilledWorker, 1},
    {"agent.fail", Scene::kKilledWorker, 1},
    {"agent.finish", Scene::kWork, 1},
};

constexpr WorkerPlace kTrainingPlaces[] = {
    {"worker.group_begin", 1},
    {"worker.group_built", 1},
    {"worker.step", 8},
    {"worker.checkpoint_copy", 2},
    {"worker.checkpoint_block", 5},
    {"worker.checkpoint_sync", 5},
    {"worker.checkpoint_staged", 2},
    {"worker.checkpoint_publish", 2},
    {"worker.checkpoint_renamed", 2},
    {"worker.checkpoint_replaced", 1},
    {"worker.checkpoint_begun", 2},
    {"worker.checkpoint_report", 2},
    {"worker.checkpoint_seal", 2},
    {"worker.checkpoint_sealed", 2},
    {"worker.checkpoint_noted", 2},
    {"worker.checkpoint_registered", 2},
    {"worker.checkpoint_doomed", 1},
    {"worker.checkpoint_deleted", 2},
};

// The failpoints of a coordinator whose job trains.
constexpr WorkerPlace kTrainingsCoordinator[] = {
    {"engine.hold_join", 2},    {"engine.apply", 40},         {"engine.reply_txn", 4},
    {"engine.reply_arrive", 3}, {"journal.before_fsync", 10}, {"engine.snapshot", 1},
};

template <typename Places>
auto Find(const Places& places, const std::string& failpoint) {
  const auto it = std::find_if(std::begin(places), std::end(places),
                               [&](const auto& place) { return failpoint == place.failpoint; });
  return it == std::end(places) ? nullptr : &*it;
}

uint64_t UsualPass(const std::string& failpoint) {
  for (const auto* place :
       {Find(kPlaces, failpoint), Find(kAgentsPlaces, failpoint), Find(kAgentPlaces, failpoint)}) {
    if (place != nullptr) return place->at;
  }
  const WorkerPlace* const place = Find(kWorkerPlaces, failpoint);
  MUSTER_CHECK(place != nullptr) << failpoint;
  return place->at;
}

std::string Arm(const std::string& failpoint, const std::string& action, uint64_t at,
                uint64_t usual) {
  return absl::StrCat(failpoint, "=", action, "@", at == 0 ? usual : at);
}

Plan TwoAgents(const std::string& name) {
  Plan plan;
  plan.name = absl::StrCat("agents.", name);
  plan.agents = 2;
  plan.workers = 4;
  plan.lease = absl::Seconds(2);
  plan.timeout = absl::Seconds(90);
  return plan;
}

Plan Training(const std::string& name) {
  Plan plan = TwoAgents(absl::StrCat("training.", name));
  plan.trains = true;
  plan.rounds = 3;
  plan.timeout = absl::Seconds(120);
  return plan;
}

int Between(std::mt19937& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

}  // namespace

std::vector<std::string> WorkerFailpoints() {
  std::vector<std::string> names;
  for (const WorkerPlace& place : kWorkerPlaces) names.push_back(place.failpoint);
  return names;
}

Plan WorkerPlan(const std::string& failpoint, const std::string& action, uint64_t at) {
  const WorkerPlace* const place = Find(kWorkerPlaces, failpoint);
  MUSTER_CHECK(place != nullptr) << failpoint;
  Plan plan;
  plan.name = failpoint;
  plan.lease = absl::Seconds(2);
  plan.worker_failpoints[0] = {Arm(failpoint, action, at, place->at)};
  return plan;
}

std::vector<std::string> CoordinatorFailpoints() {
  std::vector<std::string> names;
  for (const Place& place : kPlaces) names.push_back(place.failpoint);
  return names;
}

// Arms a failpoint of the coordinator in `plan`, with what it takes to come there.
static void SetScene(Plan& plan, Scene scene, const std::string& armed) {
  plan.coordinator_failpoints = {armed};
  switch (scene) {
    case Scene::kStart:
      plan.coordinator_failpoints = {
          plan.agents == 0 ? "engine.replied=kill@30" : "engine.apply=kill@60", armed};
      break;
    case Scene::kWork:
      break;
    case Scene::kLeave:
      plan.signals = {{.worker = 0, .round = 6, .target = -1, .signal = SIGTERM}};
      break;
    case Scene::kLostWorker:
      plan.lease = absl::Milliseconds(500);
      plan.signals = {{.worker = 0,
                       .round = 6,
                       .target = 1,
                       .signal = SIGSTOP,
                       .stopped_for = absl::Milliseconds(1500)}};
      if (plan.agents > 0) {  // which beat every 2 s
        plan.lease = kShortestLease;
        plan.signals[0].stopped_for = absl::Seconds(10);
      }
      break;
    case Scene::kKilledWorker:
      plan.signals = {{.worker = 0, .round = 6, .target = 1, .signal = SIGKILL}};
      break;
    case Scene::kBrokenStream:
      plan.agent_failpoints[0] = {"agent.received=error@10"};
      break;
    case Scene::kAbandon:
      plan.abandons = true;
      break;
    case Scene::kWatchers:
      // A watcher that no worker waits for may get everything in one batch.
      plan.workers_watch = true;
      break;
  }
}

Plan CoordinatorPlan(const std::string& failpoint, const std::string& action, uint64_t at) {
  const Place* const place = Find(kPlaces, failpoint);
  MUSTER_CHECK(place != nullptr) << failpoint;
  Plan plan;
  plan.name = failpoint;
  plan.lease = absl::Seconds(2);
  // A snapshot is written in the background, by a thread of low priority: it needs some CPU.
  if (absl::StartsWith(failpoint, "journal.snapshot_")) plan.rounds = 60;
  SetScene(plan, place->scene, Arm(failpoint, action, at, place->at));
  return plan;
}

std::vector<std::string> AgentsFailpoints() {
  std::vector<std::string> names;
  for (const Place& place : kPlaces) {
    if (!NeedsUnaryCalls(place.failpoint)) names.push_back(place.failpoint);
  }
  for (const Place& place : kAgentsPlaces) names.push_back(place.failpoint);
  for (const Place& place : kAgentPlaces) names.push_back(place.failpoint);
  for (const WorkerPlace& place : kWorkerPlaces) names.push_back(place.failpoint);
  return names;
}

Plan AgentsPlan(const std::string& failpoint, const std::string& action, uint64_t at) {
  Plan plan = TwoAgents(failpoint);
  if (const WorkerPlace* const place = Find(kWorkerPlaces, failpoint)) {
    plan.worker_failpoints[0] = {Arm(failpoint, action, at, place->at)};
    return plan;
  }
  if (const Place* const place = Find(kAgentPlaces, failpoint)) {
    SetScene(plan, place->scene, "");
    plan.coordinator_failpoints.clear();
    plan.agent_failpoints[failpoint == "agent.directive" ? 1 : 0] = {
        Arm(failpoint, action, at, place->at)};
    return plan;
  }
  const Place* place = Find(kPlaces, failpoint);
  if (place == nullptr) place = Find(kAgentsPlaces, failpoint);
  MUSTER_CHECK(place != nullptr) << failpoint;
  SetScene(plan, place->scene, Arm(failpoint, action, at, place->at));
  return plan;
}

std::vector<std::string> TrainingFailpoints() {
  std::vector<std::string> names;
  for (const WorkerPlace& place : kTrainingPlaces) names.push_back(place.failpoint);
  for (const WorkerPlace& place : kTrainingsCoordinator) names.push_back(place.failpoint);
  return names;
}

Plan TrainingPlan(const std::string& failpoint, const std::string& action, uint64_t at) {
  Plan plan = Training(failpoint);
  if (failpoint == "worker.checkpoint_replaced") plan.worker_env["MUSTER_CHAOS_ONE_FOLDER"] = "1";
  if (failpoint == "worker.checkpoint_doomed") plan.worker_env["MUSTER_CHAOS_KEEP"] = "1";
  if (failpoint == "worker.checkpoint_copy" || failpoint == "worker.checkpoint_block" ||
      failpoint == "worker.checkpoint_sync") {
    plan.worker_env["MUSTER_CHAOS_ASYNCHRONOUS"] = "1";
  }
  if (const WorkerPlace* const place = Find(kTrainingPlaces, failpoint)) {
    plan.worker_failpoints[0] = {Arm(failpoint, action, at, place->at)};
    return plan;
  }
  const WorkerPlace* const place = Find(kTrainingsCoordinator, failpoint);
  MUSTER_CHECK(place != nullptr) << failpoint;
  plan.coordinator_failpoints = {Arm(failpoint, action, at, place->at)};
  return plan;
}

std::vector<Plan> OutagePlans(absl::Duration outage) {
  Plan waits = TwoAgents("outage");
  waits.lease = absl::Seconds(5);
  waits.expected_generations = 1;
  waits.signals = {{.worker = 0, .round = 6, .signal = SIGKILL}};
  Plan trains = Training("outage");
  trains.rounds = 4;
  trains.signals = {{.worker = 0, .round = 0, .signal = SIGKILL}};
  // Trains another epoch without a coordinator, for which a synchronous save would wait.
  trains.worker_env["MUSTER_CHAOS_ASYNCHRONOUS"] = "1";
  trains.said_in_outage = "round 1";
  for (Plan* plan : {&waits, &trains}) {
    absl::StrAppend(&plan->name, ".", absl::FormatDuration(outage));
    plan->outage = outage;
    plan->timeout += outage;
  }
  return {waits, trains};
}

namespace {

Plan BehindHubs(const std::string& name, int hubs) {
  Plan plan;
  plan.name = absl::StrCat("hubs.", name);
  plan.agents = 3;
  plan.workers = 6;
  plan.hubs = hubs;
  plan.coordinator_flags = {"--direct_agents", "0"};
  plan.lease = absl::Seconds(16);
  plan.expected_generations = 1;
  plan.timeout = absl::Seconds(120);
  return plan;
}

SignalAt OnceBehindHubs(int round, int target, int signal) {
  return {.worker = 0,
          .round = round,
          .target = target,
          .signal = signal,
          .once_agents_say = "this node uses hub "};
}

}  // namespace

Plan HubKilledPlan() {
  Plan plan = BehindHubs("killed", 2);
  plan.signals = {OnceBehindHubs(6, TargetOfHub(0), SIGKILL)};
  return plan;
}

Plan OnlyHubKilledPlan() {
  Plan plan = BehindHubs("only_killed", 1);
  // Kills the second hub, to which the agents that come back are sent, or will be.
  plan.signals = {OnceBehindHubs(6, TargetOfHub(0), SIGKILL),
                  OnceBehindHubs(13, TargetOfHub(0), SIGKILL)};
  return plan;
}

Plan HubStoppedPlan() {
  Plan plan = BehindHubs("stopped", 1);
  plan.signals = {OnceBehindHubs(6, TargetOfHub(0), SIGSTOP),
                  OnceBehindHubs(12, TargetOfHub(0), SIGCONT)};
  plan.signals[0].stopped_for = plan.timeout;
  return plan;
}

Plan HubWithWorkersKilledPlan() {
  Plan plan = BehindHubs("with_workers_killed", 0);
  plan.first_agent_is_hub = true;
  plan.signals = {OnceBehindHubs(6, TargetOfAgent(0), SIGKILL)};
  plan.expected_generations = 2;
  return plan;
}

Plan HubAndCoordinatorKilledPlan() {
  Plan plan = BehindHubs("both_killed", 1);
  plan.signals = {OnceBehindHubs(6, TargetOfHub(0), SIGKILL),
                  OnceBehindHubs(6, kCoordinator, SIGKILL)};
  return plan;
}

Plan CoordinatorKilledPlan(absl::Duration outage) {
  Plan plan = BehindHubs("coordinator_killed", 2);
  plan.signals = {OnceBehindHubs(6, kCoordinator, SIGKILL)};
  plan.outage = outage;
  return plan;
}

std::vector<Plan> LongPlans(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Plan> plans;
  const auto draw = [&](const auto& make, const std::string& name,
                        const std::vector<std::string>& actions, bool more_deaths) {
    for (const std::string& action : actions) {
      // Draws passes up to three times as late as usual: later ones usually lie behind the end of
      // the run.
      const int latest = 3 * static_cast<int>(UsualPass(name));
      const int at = Between(random, 0, 3) == 0 ? 0 : Between(random, 1, latest);
      Plan plan = make(name, action, at);
      absl::StrAppend(&plan.name, "=", action, "@", at);
      if (plan.agents == 0) plan.workers = Between(random, 2, 4);
      plan.timeout = absl::Seconds(120);
      for (int more = more_deaths ? Between(random, 0, 2) : 0; more > 0; --more) {
        plan.signals.push_back({.worker = Between(random, 0, plan.workers - 1),
                                .round = Between(random, 0, plan.rounds - 1),
                                .target = Between(random, -1 - plan.agents, plan.workers - 1),
                                .signal = SIGKILL});
      }
      plans.push_back(std::move(plan));
    }
  };
  const std::vector<std::string> usual = {"kill", "stop", "delay:100ms"};
  for (const std::string& name : CoordinatorFailpoints()) {
    std::vector<std::string> actions = usual;
    if (FindFailpoint(name)->fails) {
      for (const char* action : {"error", "error:RESOURCE_EXHAUSTED", "error:DATA_LOSS"}) {
        actions.push_back(action);
      }
    }
    draw(CoordinatorPlan, name, actions, true);
  }
  for (const std::string& name : WorkerFailpoints()) draw(WorkerPlan, name, usual, true);
  for (const std::string& name : AgentsFailpoints()) {
    std::vector<std::string> actions = {"kill"};
    if (absl::StartsWith(name, "agent.")) actions.push_back("delay:100ms");
    if (name == "agent.frame" || name == "agent.received") actions.push_back("error");
    draw(AgentsPlan, name, actions, true);
  }
  for (const std::string& name : TrainingFailpoints()) {
    plans.push_back(TrainingPlan(name));
    absl::StrAppend(&plans.back().name, "=kill");
  }
  return plans;
}

std::set<std::string> ArmedIn(const std::vector<Plan>& plans) {
  std::set<std::string> names;
  const auto add = [&](const std::vector<std::string>& starts) {
    for (const std::string& start : starts) {
      for (const absl::string_view part : absl::StrSplit(start, ',', absl::SkipEmpty())) {
        names.emplace(part.substr(0, part.find('=')));
      }
    }
  };
  for (const Plan& plan : plans) {
    add(plan.coordinator_failpoints);
    for (const auto& [worker, starts] : plan.worker_failpoints) add(starts);
    for (const auto& [agent, starts] : plan.agent_failpoints) add(starts);
  }
  return names;
}

}  // namespace muster::chaos
