#include "coordinator/agents.h"

namespace muster::coordinator {

void Agents::Attach(absl::string_view node, absl::Time now) {
  Agent& agent = agents_[node];
  if (agent.number == 0) agent.number = next_number_++;
  Heard(node, &agent, now);
}

uint64_t Agents::Beat(absl::string_view node, bool for_others, absl::Time now) {
  const auto it = agents_.find(node);
  if (it == agents_.end()) return 0;
  Heard(node, &it->second, now);
  it->second.beat = now;
  it->second.was_hub |= for_others;
  return it->second.number;
}

uint64_t Agents::NumberOf(absl::string_view node) const {
  const auto it = agents_.find(node);
  return it == agents_.end() ? 0 : it->second.number;
}

std::optional<Agents::LastHeard> Agents::LastHeardOf(absl::string_view node) const {
  const auto it = agents_.find(node);
  if (it == agents_.end() || it->second.beat == absl::InfinitePast()) return std::nullopt;
  return LastHeard{it->second.beat, it->second.back};
}

std::optional<absl::Time> Agents::WitnessBeat(absl::string_view node, uint64_t via) const {
  const auto it = agents_.find(node);
  if (it == agents_.end() || it->second.was_hub || it->second.number != via ||
      it->second.beat == absl::InfinitePast()) {
    return std::nullopt;
  }
  return it->second.beat;
}

void Agents::CountFor(absl::Time last_seen, absl::Duration lease, absl::Time now,
                      Silence* silence) {
  if (!partitioned_.empty() && last_seen <= cut_began_) {
    silence->agents_silent = static_cast<int>(partitioned_.size());
    silence->agents_heard = before_partition_ - silence->agents_silent;
    return;
  }
  if (counted_ + lease / 8 <= now) {
    counted_ = now;
    heard_ = silent_ = 0;
    for (const auto& [node, agent] : agents_) {
      heard_ += now - agent.heard < lease / 2 ? 1 : 0;
      silent_ += FellSilent(agent, lease, now) ? 1 : 0;
    }
  }
  silence->agents_heard = heard_;
  silence->agents_silent = silent_;
  if (!IsCut(*silence)) return;
  cut_began_ = now;
  partitioned_.clear();
  before_partition_ = heard_ + silent_;
  for (const auto& [node, agent] : agents_) {
    if (FellSilent(agent, lease, now)) partitioned_.insert(node);
  }
}

bool Agents::FellSilent(const Agent& agent, absl::Duration lease, absl::Time now) {
  const absl::Duration silence = now - agent.heard;
  return silence >= lease / 2 && silence < 2 * lease;
}

void Agents::Heard(absl::string_view node, Agent* agent, absl::Time now) {
  if (agent->heard + kMissedBeats <= now) agent->back = now;
  agent->heard = now;
  if (partitioned_.empty() || partitioned_.erase(node) == 0) return;
  if (2 * static_cast<int>(partitioned_.size()) > before_partition_) return;
  // Most agents are back: the others have some time to follow.
  partitioned_.clear();
  partition_ended_ = now;
}

}  // namespace muster::coordinator
