#include "tests/chaos/plans.h"

#include <csignal>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace muster::chaos {
namespace {

// When in a run a place is passed.
enum class Scene { kStart, kWork, kLeave, kLostWorker, kAbandon };

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
    // From the second snapshot on there are records to delete.
    {"journal.snapshot_truncated", Scene::kWork, 2},
    {"journal.snapshot_written", Scene::kWork, 2},
    {"journal.snapshot_durable", Scene::kWork, 1},
    {"engine.apply", Scene::kWork, 40},
    {"engine.applied", Scene::kWork, 40},
    {"engine.hold_join", Scene::kWork, 1},
    {"engine.hold_txn", Scene::kWork, 9},
    {"engine.hold_trigger", Scene::kWork, 1},
    {"engine.release", Scene::kWork, 8},
    // The second: one of two has been told.
    {"engine.reply_join", Scene::kWork, 2},
    {"engine.reply_arrive", Scene::kWork, 12},
    {"engine.reply_txn", Scene::kWork, 25},
    {"engine.reply_trigger", Scene::kWork, 1},
    {"engine.reply_poll", Scene::kWork, 11},
    {"engine.reply_beat", Scene::kWork, 1},
    {"engine.replied", Scene::kWork, 30},
    {"engine.watch_open", Scene::kWork, 1},
    {"engine.watch_push", Scene::kWork, 6},
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

}  // namespace

std::vector<std::string> WorkerFailpoints() {
  std::vector<std::string> names;
  for (const WorkerPlace& place : kWorkerPlaces) names.push_back(place.failpoint);
  return names;
}

Plan WorkerPlan(const std::string& failpoint, const std::string& action, uint64_t at) {
  const WorkerPlace* place = nullptr;
  for (const WorkerPlace& p : kWorkerPlaces) {
    if (failpoint == p.failpoint) place = &p;
  }
  MUSTER_CHECK(place != nullptr) << failpoint;
  Plan plan;
  plan.name = failpoint;
  plan.lease = absl::Seconds(2);
  plan.worker_failpoints[0] = {absl::StrCat(failpoint, "=", action, "@", at == 0 ? place->at : at)};
  return plan;
}

std::vector<std::string> CoordinatorFailpoints() {
  std::vector<std::string> names;
  for (const Place& place : kPlaces) names.push_back(place.failpoint);
  return names;
}

Plan CoordinatorPlan(const std::string& failpoint, const std::string& action, uint64_t at) {
  const Place* place = nullptr;
  for (const Place& p : kPlaces) {
    if (failpoint == p.failpoint) place = &p;
  }
  MUSTER_CHECK(place != nullptr) << failpoint;
  Plan plan;
  plan.name = failpoint;
  plan.lease = absl::Seconds(2);
  const std::string armed = absl::StrCat(failpoint, "=", action, "@", at == 0 ? place->at : at);
  switch (place->scene) {
    case Scene::kStart:
      plan.coordinator_failpoints = {"engine.replied=kill@30", armed};
      break;
    case Scene::kWork:
      plan.coordinator_failpoints = {armed};
      break;
    case Scene::kLeave:
      plan.coordinator_failpoints = {armed};
      plan.signals = {{.worker = 0, .round = 6, .target = -1, .signal = SIGTERM}};
      break;
    case Scene::kLostWorker:
      plan.coordinator_failpoints = {armed};
      plan.lease = absl::Milliseconds(500);
      plan.signals = {{.worker = 0,
                       .round = 6,
                       .target = 1,
                       .signal = SIGSTOP,
                       .stopped_for = absl::Milliseconds(1000)}};
      break;
    case Scene::kAbandon:
      plan.coordinator_failpoints = {armed};
      plan.abandons = true;
      break;
  }
  return plan;
}

}  // namespace muster::chaos
