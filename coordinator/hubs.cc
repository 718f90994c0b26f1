#include "coordinator/hubs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr absl::string_view kHubFeature = "hub";
constexpr size_t kMaxName = 256;
constexpr size_t kMaxPasts = 1 << 17;
constexpr size_t kMaxSuspects = 1 << 14;
constexpr size_t kMaxFailed = 8;  // hubs that failed one agent
constexpr int kFreeMoves = 2;     // before an agent waits

absl::Duration Doubled(absl::Duration first, int times, absl::Duration most) {
  return std::min(most, first * (int64_t{1} << std::clamp(times, 0, 16)));
}

}  // namespace

Hubs::Agent* Hubs::Find(absl::string_view node) {
  const auto it = agents_.find(node);
  return it == agents_.end() ? nullptr : it->second.get();
}

void Hubs::Unindex(Agent* agent) {
  if (agent->load() > 0) --hubs_;
  rooms_.erase({{-agent->load(), agent->order}, agent});
  if (!agent->plain()) return;
  --plain_;
  movable_.erase({agent->order, agent});
  able_.erase({agent->order, agent});
  waiting_.erase({agent->movable_at, agent->node});
}

void Hubs::Index(Agent* agent) {
  const bool can_serve =
      !agent->address.empty() && !agent->lost && !agent->gone && agent->barred_until <= now_;
  if (agent->load() > 0) {
    ++hubs_;
    if (can_serve && !agent->under_way && agent->load() < options_.agents_per_hub)
      rooms_.insert({{-agent->load(), agent->order}, agent});
  }
  if (!agent->plain()) return;
  ++plain_;
  if (can_serve) able_.insert({agent->order, agent});
  if (!agent->follows || agent->lost) return;
  if (agent->movable_at <= now_) {
    movable_.insert({agent->order, agent});
  } else {
    waiting_.insert({agent->movable_at, agent->node});
  }
}

bool Hubs::IsDirect(absl::string_view node) const {
  const auto it = agents_.find(node);
  return it != agents_.end() && !it->second->gone;
}

void Hubs::AddComing(const std::string& hub, int n) {
  int& coming = coming_[hub];
  coming += n;
  if (Agent* const agent = Find(hub)) {
    Unindex(agent);
    agent->coming = coming;
    Index(agent);
  }
  if (coming == 0) coming_.erase(hub);
}

void Hubs::EndMove(const std::string& node) {
  const auto it = under_way_.find(node);
  if (it == under_way_.end()) return;
  const UnderWay move = std::move(it->second);
  arrivals_.erase({move.until, node});
  under_way_.erase(it);
  AddComing(move.hub, -1);
  if (Agent* const agent = Find(node)) {
    Unindex(agent);
    agent->under_way = false;
    Index(agent);
  }
}

Hubs::Past& Hubs::Remember(const std::string& node) {
  Past& past = past_[node];
  if (past.last + kMemory <= now_) past = Past();
  past.last = now_;
  past_order_.emplace_back(now_, node);
  return past;
}

absl::Time Hubs::MayMoveAt(const std::string& node) const {
  const auto it = past_.find(node);
  if (it == past_.end() || it->second.moves < kFreeMoves || it->second.last + kMemory <= now_)
    return absl::InfinitePast();
  return it->second.last + Doubled(kBarred, it->second.moves - kFreeMoves, kMemory / 2);
}

bool Hubs::Failed(const std::string& node, const std::string& hub) const {
  const auto it = past_.find(node);
  return it != past_.end() &&
         std::any_of(it->second.failed.begin(), it->second.failed.end(),
                     [&](const auto& one) { return one.first == hub && one.second > now_; });
}

void Hubs::HubFailed(const std::string& hub, const std::string& reporter) {
  auto& failed = Remember(reporter).failed;
  failed.erase(
      std::remove_if(failed.begin(), failed.end(),
                     [&](const auto& one) { return one.first == hub || one.second <= now_; }),
      failed.end());
  if (failed.size() >= kMaxFailed) failed.erase(failed.begin());
  failed.emplace_back(hub, now_ + kBarred);

  if (suspects_.size() >= kMaxSuspects && !suspects_.contains(hub)) return;
  Suspect& suspect = suspects_[hub];
  const bool second = suspect.reported + kBarred > now_ && suspect.reporter != reporter;
  suspect.reporter = reporter;
  suspect.reported = now_;
  if (suspect.until <= now_ && (second || Find(hub) == nullptr))
    suspect.until = now_ + Doubled(kBarred, suspect.times++, kMemory / 2);
  LookAgain(hub, &suspect);
}

void Hubs::LookAgain(const std::string& hub, Suspect* suspect) {
  bars_.erase({suspect->look_at, hub});
  suspect->look_at = suspect->until > now_ ? suspect->until
                                           : std::max(suspect->until, suspect->reported) + kMemory;
  bars_.insert({suspect->look_at, hub});
  if (Agent* const agent = Find(hub)) {
    Unindex(agent);
    agent->barred_until = suspect->until;
    Index(agent);
  }
}

void Hubs::Advance(absl::Time now) {
  now_ = std::max(now_, now);
  while (!past_order_.empty() &&
         (past_order_.front().first + kMemory <= now_ || past_order_.size() > kMaxPasts)) {
    const auto it = past_.find(past_order_.front().second);
    if (it != past_.end() && it->second.last <= past_order_.front().first) past_.erase(it);
    past_order_.pop_front();
  }
}

void Hubs::Attach(absl::string_view node, const v1::Hello& hello, absl::Time now) {
  Advance(now);
  if (options_.agents_per_hub <= 0) return;
  const std::string name(node);
  Agent* agent = Find(node);
  const bool resumed = agent != nullptr;
  if (!resumed) {
    // The agent may have been on its way to a hub, and is back.
    EndMove(name);
    if (const auto it = listed_.find(node); it != listed_.end()) --behind_;
    auto owned = std::make_unique<Agent>();
    agent = owned.get();
    agent->node = name;
    agent->order = next_order_++;
    agents_[name] = std::move(owned);
    if (const auto it = coming_.find(node); it != coming_.end()) agent->coming = it->second;
    if (const auto it = suspects_.find(node); it != suspects_.end())
      agent->barred_until = it->second.until;
  } else {
    Unindex(agent);
    if (agent->gone && listed_.contains(node)) --behind_;
    agent->gone = false;
  }
  SetHost(name, hello.host());
  agent->address = hello.hub_address().size() <= kMaxName ? hello.hub_address() : "";
  agent->follows = std::find(hello.features().begin(), hello.features().end(), kHubFeature) !=
                   hello.features().end();
  const bool fresh = hello.session_id().empty();
  if (fresh && hello.failed_hub().empty()) past_.erase(name);
  if (!resumed) {
    // An agent that comes from a hub was not a hub itself.
    const bool may_be_hub = !fresh && !agent->address.empty() && hello.failed_hub().empty();
    agent->movable_at =
        std::max(MayMoveAt(name), may_be_hub ? now_ + kFirstBeat : absl::InfinitePast());
  }
  Index(agent);
  if (hello.failed_hub().empty() || hello.failed_hub().size() > kMaxName) return;
  if (resumed) EndMove(name);
  HubFailed(hello.failed_hub(), name);
}

void Hubs::Detach(absl::string_view node, absl::Time now) {
  Advance(now);
  Agent* const agent = Find(node);
  if (agent == nullptr) return;
  List(agent, nullptr);
  Unindex(agent);
  if (!agent->gone && listed_.contains(node)) ++behind_;
  agents_.erase(node);
  DropHost(std::string(node));
}

std::string Hubs::AgentOn(absl::string_view host) const {
  const auto it = on_host_.lower_bound({std::string(host), ""});
  return it == on_host_.end() || it->first != host ? "" : it->second;
}

void Hubs::SetHost(const std::string& node, absl::string_view host) {
  const std::string known(host.substr(0, kMaxName));
  std::string& last = host_of_[node];
  if (last == known && !known.empty()) return;
  on_host_.erase({last, node});
  last = known;
  if (!known.empty()) on_host_.insert({known, node});
}

void Hubs::DropHost(const std::string& node) {
  const auto it = host_of_.find(node);
  if (it == host_of_.end() || agents_.contains(node) || listed_.contains(node)) return;
  on_host_.erase({it->second, node});
  host_of_.erase(it);
}

void Hubs::List(Agent* hub, const v1::HubRoster* roster) {
  Unindex(hub);
  for (const std::string& node : hub->roster) {
    const auto it = listed_.find(node);
    if (it == listed_.end() || it->second != hub) continue;  // another one lists it since
    if (!IsDirect(node)) --behind_;
    listed_.erase(it);
    DropHost(node);
  }
  hub->roster.clear();
  for (int i = 0; roster != nullptr && i < roster->agents_size(); ++i) {
    const std::string& node = roster->agents(i).node();
    if (hub->roster.size() >= kMaxRoster) break;
    if (node.empty() || node.size() > kMaxName || node == hub->node) continue;
    if (listed_.size() >= kMaxListed && !listed_.contains(node)) continue;
    const auto [it, is_new] = listed_.try_emplace(node, hub);
    if (!is_new && it->second == hub) continue;  // twice in one roster
    it->second = hub;
    if (is_new && !IsDirect(node)) ++behind_;
    SetHost(node, roster->agents(i).host());
    hub->roster.push_back(node);
  }
  hub->roster.shrink_to_fit();
  Index(hub);
}

void Hubs::Roster(absl::string_view node, const v1::HubRoster& roster, absl::Time now) {
  Advance(now);
  Agent* const hub = Find(node);
  if (hub == nullptr) return;
  List(hub, &roster);
  // The hub has agents behind it, which this coordinator did not know of when it sent it away: it
  // stays.
  if (!hub->roster.empty()) EndMove(hub->node);
  for (const std::string& one : hub->roster) {
    const auto it = under_way_.find(one);
    if (it == under_way_.end() || it->second.hub != hub->node) continue;
    EndMove(one);
    // Its session here may continue for a while if the agent did not end it.
    if (Agent* const agent = Find(one)) {
      Unindex(agent);
      agent->gone = true;
      Index(agent);
      ++behind_;
    }
  }
  if (hub->roster.empty()) return;
  if (const auto it = suspects_.find(node); it != suspects_.end() && it->second.until <= now_)
    it->second.times = 0;
}

void Hubs::Tick(absl::Time now) {
  Advance(now);
  while (!waiting_.empty() && waiting_.begin()->first <= now_) {
    Agent* const agent = Find(waiting_.begin()->second);
    Unindex(agent);
    Index(agent);
  }
  while (!arrivals_.empty() && arrivals_.begin()->first <= now_) {
    const std::string node = arrivals_.begin()->second;
    EndMove(node);
    if (Agent* const agent = Find(node)) {
      Unindex(agent);
      agent->lost = true;
      Index(agent);
    }
  }
  while (!bars_.empty() && bars_.begin()->first <= now_) {
    const std::string hub = bars_.begin()->second;
    const auto it = suspects_.find(hub);
    if (std::max(it->second.until, it->second.reported) + kMemory <= now_) {
      bars_.erase(bars_.begin());
      suspects_.erase(it);
    } else {
      LookAgain(hub, &it->second);
    }
  }
}

absl::Time Hubs::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const ByTime* const times : {&waiting_, &arrivals_, &bars_})
    if (!times->empty()) next = std::min(next, times->begin()->first);
  return next;
}

Hubs::Agent* Hubs::HubFor(const Agent& agent) {
  for (const auto& [key, hub] : rooms_)
    if (!Failed(agent.node, hub->node)) return hub;
  for (const auto& [order, hub] : able_)
    if (hub != &agent && !Failed(agent.node, hub->node)) return hub;
  return nullptr;
}

std::vector<HubMove> Hubs::Decide() {
  std::vector<HubMove> moves;
  while (plain_ > options_.direct_agents && !movable_.empty()) {
    if (rooms_.empty() && able_.empty()) {
      if (!said_) {
        notice_ = absl::StrCat(
            plain_, " agents have streams of their own, more than the ", options_.direct_agents,
            " of --direct_agents, and none can be a hub for others: start agents with "
            "--hub_listen, or give --agents_per_hub 0 if this is intended");
      }
      said_ = true;
      return moves;
    }
    Agent* const agent = movable_.rbegin()->second;
    Agent* const hub = HubFor(*agent);
    if (hub == nullptr) {
      Unindex(agent);
      agent->movable_at = now_ + kBarred;
      Index(agent);
      continue;
    }
    moves.push_back(
        {agent->node, hub->node, hub->address,
         absl::StrCat(plain_, " agents have streams of their own, more than the ",
                      options_.direct_agents, " of --direct_agents; hub ", Quoted(hub->node),
                      " has ", hub->load(), " of at most ", options_.agents_per_hub, " agents")});
    Unindex(agent);
    agent->under_way = true;
    Index(agent);
    under_way_[agent->node] = {hub->node, now_ + kArrival};
    arrivals_.insert({now_ + kArrival, agent->node});
    AddComing(hub->node, 1);
    ++Remember(agent->node).moves;
  }
  if (plain_ <= options_.direct_agents) said_ = false;
  return moves;
}

std::optional<std::string> Hubs::TakeNotice() { return std::exchange(notice_, std::nullopt); }

template <typename F>
void GroupedHubs::Change(Groups::value_type* group, F change) {
  auto& [name, entry] = *group;
  behind_ -= entry.hubs->agents_behind();
  hubs_ -= entry.hubs->hubs();
  change(entry.hubs.get());
  behind_ += entry.hubs->agents_behind();
  hubs_ += entry.hubs->hubs();
  changed_.insert(name);
  const absl::Time deadline = entry.hubs->NextDeadline();
  if (deadline == entry.deadline) return;
  deadlines_.erase({entry.deadline, name});
  entry.deadline = deadline;
  if (deadline != absl::InfiniteFuture()) deadlines_.insert({deadline, name});
}

void GroupedHubs::Attach(absl::string_view group, absl::string_view node, const v1::Hello& hello,
                         absl::Time now) {
  const auto it = groups_.try_emplace(std::string(group)).first;
  if (it->second.hubs == nullptr) it->second.hubs = std::make_unique<Hubs>(options_);
  if (group_of_.insert_or_assign(node, std::string(group)).second) ++it->second.attached;
  Change(&*it, [&](Hubs* hubs) { hubs->Attach(node, hello, now); });
}

void GroupedHubs::Detach(absl::string_view node, absl::Time now) {
  const auto of = group_of_.find(node);
  if (of == group_of_.end()) return;
  const auto it = groups_.find(of->second);
  group_of_.erase(of);
  Change(&*it, [&](Hubs* hubs) { hubs->Detach(node, now); });
  if (--it->second.attached > 0 || it->first.empty()) return;
  behind_ -= it->second.hubs->agents_behind();
  hubs_ -= it->second.hubs->hubs();
  deadlines_.erase({it->second.deadline, it->first});
  changed_.erase(it->first);
  groups_.erase(it);
}

void GroupedHubs::Roster(absl::string_view node, const v1::HubRoster& roster, absl::Time now) {
  const auto of = group_of_.find(node);
  if (of == group_of_.end()) return;
  Change(&*groups_.find(of->second), [&](Hubs* hubs) { hubs->Roster(node, roster, now); });
}

void GroupedHubs::Tick(absl::Time now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto it = groups_.find(deadlines_.begin()->second);
    const absl::Time before = it->second.deadline;
    Change(&*it, [&](Hubs* hubs) { hubs->Tick(now); });
    if (it->second.deadline == before) return;  // its next event is not due to time alone
  }
}

absl::Time GroupedHubs::NextDeadline() const {
  return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
}

std::vector<HubMove> GroupedHubs::Decide() {
  std::vector<HubMove> moves;
  for (const std::string& name : std::exchange(changed_, {})) {
    const auto it = groups_.find(name);
    if (it == groups_.end()) continue;
    Change(&*it, [&](Hubs* hubs) {
      for (HubMove& move : hubs->Decide()) moves.push_back(std::move(move));
    });
    changed_.erase(name);
  }
  return moves;
}

std::optional<std::string> GroupedHubs::TakeNotice() {
  for (auto& [name, group] : groups_) {
    std::optional<std::string> notice = group.hubs->TakeNotice();
    if (!notice.has_value()) continue;
    return name.empty() ? notice : absl::StrCat("attempt ", name, ": ", *notice);
  }
  return std::nullopt;
}

std::string GroupedHubs::AgentOn(absl::string_view host) const {
  for (const auto& [name, group] : groups_) {
    std::string agent = group.hubs->AgentOn(host);
    if (!agent.empty()) return agent;
  }
  return "";
}

}  // namespace muster::coordinator
