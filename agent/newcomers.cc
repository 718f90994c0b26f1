#include "agent/newcomers.h"

#include <algorithm>

namespace muster::agent {
namespace {

bool Waits(const v1::Member& machine) {
  return machine.rank() < 0 && machine.state() == v1::WORKER_STATE_JOINING;
}

std::set<uint64_t> Waiting(const std::vector<v1::Member>& machines) {
  std::set<uint64_t> waiting;
  for (const v1::Member& machine : machines) {
    if (Waits(machine)) waiting.insert(machine.incarnation());
  }
  return waiting;
}

}  // namespace

std::optional<v1::Member> Newcomers::Choose(
    const std::vector<v1::Member>& machines, absl::Time now,
    const std::function<bool(const std::string&)>& is_quarantined) {
  std::set<uint64_t> seated;
  for (const v1::Member& machine : machines) {
    if (machine.rank() >= 0 && machine.state() == v1::WORKER_STATE_RUNNING) {
      seated.insert(machine.incarnation());
    }
  }
  // A machine that gives up and asks again later counts as new.
  const std::set<uint64_t> waiting = Waiting(machines);
  std::erase_if(passed_over_, [&](uint64_t one) { return waiting.count(one) == 0; });
  std::set<std::string> quarantined;
  for (const v1::Member& machine : machines) {
    if (!Waits(machine) || passed_over_.count(machine.incarnation()) > 0) continue;
    const auto former = newcomers_.find(machine.host());
    if (former != newcomers_.end() && seated.count(former->second.incarnation) > 0) {
      newcomers_.erase(former);
    } else if (former != newcomers_.end() && now < former->second.again) {
      continue;
    }
    // This machine would get no place, however often it comes back.
    if (quarantined.count(machine.host()) > 0) continue;
    if (is_quarantined(machine.host())) {
      quarantined.insert(machine.host());
      continue;
    }
    return machine;
  }
  return std::nullopt;
}

void Newcomers::Came(const v1::Member& chosen, const std::vector<v1::Member>& machines,
                     absl::Time now) {
  // A machine that gets no place after all (its host has been quarantined meanwhile) ends no
  // further attempt.
  passed_over_ = Waiting(machines);
  Newcomer& came = newcomers_[chosen.host()];
  came.incarnation = chosen.incarnation();
  came.again = now + came.pause;
  came.pause = std::min(2 * came.pause, kLongestPause);
}

}  // namespace muster::agent
