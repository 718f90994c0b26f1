#include "agent/machines.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "rpc/session/duration.h"

namespace muster::agent {

bool CoordinatorsLaunchHasCome(const std::vector<v1::Member>& machines) {
  // If others run, it has asked before, and continues to serve them without a place.
  return std::any_of(machines.begin(), machines.end(), [](const v1::Member& machine) {
    return machine.worker_id() == "node0" ||
           (machine.rank() >= 0 && machine.state() == v1::WORKER_STATE_RUNNING);
  });
}

bool DiedBeforeItLeft(const std::vector<v1::Member>& machines, const std::string& worker_id,
                      absl::Duration within) {
  bool died = false;
  for (const v1::Member& machine : machines) {
    if (machine.state() == v1::WORKER_STATE_JOINING) return false;
    if (machine.worker_id() != worker_id) continue;
    died = machine.state() != v1::WORKER_STATE_LEFT &&
           rpc::FromProto(machine.heartbeat_age()) < within;
  }
  return died;
}

Others LookAtOthers(const std::vector<v1::Member>& machines, absl::Duration silent_after) {
  std::set<std::pair<std::string, uint64_t>> joining;
  for (const v1::Member& machine : machines) {
    if (machine.state() == v1::WORKER_STATE_JOINING) {
      joining.insert({machine.worker_id(), machine.incarnation()});
    }
  }
  Others others;
  others.any_waits = !joining.empty();
  for (const v1::Member& machine : machines) {
    if (machine.rank() < 0 || machine.state() != v1::WORKER_STATE_RUNNING) continue;
    others.meet_again |= joining.contains({machine.worker_id(), machine.incarnation()});
    if (rpc::FromProto(machine.heartbeat_age()) <= silent_after) ++others.running;
  }
  return others;
}

Signs SignsOfOthers(const std::vector<v1::Member>& machines, const std::string& self,
                    absl::Duration elapsed) {
  Signs signs;
  signs.all_heard = true;
  for (const v1::Member& machine : machines) {
    if (machine.rank() < 0 || machine.worker_id() == self) continue;
    if (machine.state() != v1::WORKER_STATE_RUNNING) return {.lost = machine};
    if (rpc::FromProto(machine.heartbeat_age()) >= elapsed) signs.all_heard = false;
  }
  return signs;
}

}  // namespace muster::agent
