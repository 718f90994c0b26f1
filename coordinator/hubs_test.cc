#include "coordinator/hubs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kMinute = absl::Minutes(1);

class HubsTest : public ::testing::Test {
 protected:
  static v1::Hello Hello(const std::string& node, bool offers = true, bool follows = true) {
    v1::Hello hello;
    hello.set_node(node);
    if (offers) hello.set_hub_address(node + ":29401");
    if (follows) hello.add_features("hub");
    return hello;
  }
  void Make(int direct, int per_hub) {
    hubs_.emplace(HubOptions{.direct_agents = direct, .agents_per_hub = per_hub});
  }
  // Returns who moved to which hub.
  std::map<std::string, std::string> Decide() {
    std::map<std::string, std::string> moved;
    for (const HubMove& move : hubs_->Decide()) moved[move.node] = move.hub;
    return moved;
  }
  std::map<std::string, std::string> Attach(const v1::Hello& hello) {
    hubs_->Attach(hello.node(), hello, now_);
    return Decide();
  }
  std::map<std::string, std::string> Tell(const std::string& hub,
                                          const std::vector<std::string>& nodes) {
    v1::HubRoster roster;
    for (const std::string& node : nodes) roster.add_agents()->set_node(node);
    hubs_->Roster(hub, roster, now_);
    return Decide();
  }
  std::map<std::string, std::string> Detach(const std::string& node) {
    hubs_->Detach(node, now_);
    return Decide();
  }
  std::map<std::string, std::string> After(absl::Duration time) {
    now_ += time;
    hubs_->Tick(now_);
    return Decide();
  }
  // Attaches an agent that is back from `hub`, in a new session.
  std::map<std::string, std::string> Failed(const std::string& node, const std::string& hub,
                                            bool offers = false) {
    v1::Hello hello = Hello(node, offers);
    hello.set_session_id("of the hub");
    hello.set_failed_hub(hub);
    return Attach(hello);
  }
  using Moves = std::map<std::string, std::string>;

  std::optional<Hubs> hubs_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(HubsTest, Agents_UpToTheLimit_StayDirect) {
  Make(2, 4);
  EXPECT_THAT(Attach(Hello("a")), IsEmpty());
  EXPECT_THAT(Attach(Hello("b")), IsEmpty());
  EXPECT_EQ(hubs_->hubs(), 0);
}

TEST_F(HubsTest, NewestBeyondTheLimit_GoesToTheOldestThatOffersItself) {
  Make(2, 4);
  Attach(Hello("a", /*offers=*/false));
  Attach(Hello("b"));
  EXPECT_EQ(Attach(Hello("c")), (Moves{{"c", "b"}}));
  // b is a hub now and no longer counts.
  EXPECT_THAT(Attach(Hello("d")), IsEmpty());
  EXPECT_EQ(Attach(Hello("e")), (Moves{{"e", "b"}}));
  EXPECT_EQ(hubs_->hubs(), 1);
}

TEST_F(HubsTest, Move_SaysAddressAndWhy) {
  Make(0, 4);
  hubs_->Attach("a", Hello("a"), now_);
  hubs_->Attach("b", Hello("b"), now_);
  const std::vector<HubMove> moves = hubs_->Decide();
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(moves[0].node, "b");
  EXPECT_EQ(moves[0].address, "a:29401");
  EXPECT_THAT(moves[0].why, HasSubstr("2 agents have streams of their own, more than the 0"));
  EXPECT_THAT(moves[0].why, HasSubstr("\"a\""));
}

TEST_F(HubsTest, FullHub_AnotherBecomesOne) {
  Make(1, 2);
  Attach(Hello("a"));
  EXPECT_EQ(Attach(Hello("b")), (Moves{{"b", "a"}}));
  EXPECT_THAT(Attach(Hello("c")), IsEmpty());
  EXPECT_EQ(Attach(Hello("d")), (Moves{{"d", "a"}}));
  EXPECT_EQ(Attach(Hello("e")), (Moves{{"e", "c"}}));
  EXPECT_EQ(hubs_->hubs(), 2);
}

TEST_F(HubsTest, NoHubs_NobodyMoves) {
  Make(0, 0);
  for (int i = 0; i < 10; ++i) EXPECT_THAT(Attach(Hello(absl::StrCat("n", i))), IsEmpty());
  EXPECT_EQ(hubs_->TakeNotice(), std::nullopt);
}

TEST_F(HubsTest, AgentsThatDoNotKnowUseHub_StayDirectWithoutANotice) {
  Make(1, 4);
  for (int i = 0; i < 10; ++i) {
    EXPECT_THAT(Attach(Hello(absl::StrCat("n", i), /*offers=*/true, /*follows=*/false)), IsEmpty());
  }
  EXPECT_EQ(hubs_->TakeNotice(), std::nullopt);
  // An agent that knows the directive moves in their place.
  EXPECT_EQ(Attach(Hello("new")), (Moves{{"new", "n0"}}));
}

TEST_F(HubsTest, NobodyOffersItself_IsSaidOnceUntilThatChanges) {
  Make(1, 4);
  for (int i = 0; i < 5; ++i) Attach(Hello(absl::StrCat("n", i), /*offers=*/false));
  const std::optional<std::string> notice = hubs_->TakeNotice();
  ASSERT_TRUE(notice.has_value());
  EXPECT_THAT(*notice, HasSubstr("--hub_listen"));
  Attach(Hello("n5", /*offers=*/false));
  EXPECT_EQ(hubs_->TakeNotice(), std::nullopt);
  // All above the limit go to the first agent that can be a hub.
  EXPECT_EQ(Attach(Hello("able")).size(), 4u);
  for (int i = 0; i < 6; ++i) Detach(absl::StrCat("n", i));
  Detach("able");
  for (int i = 6; i < 9; ++i) Attach(Hello(absl::StrCat("n", i), /*offers=*/false));
  EXPECT_TRUE(hubs_->TakeNotice().has_value());
}

TEST_F(HubsTest, Roster_EndsTheWayAndCounts) {
  Make(1, 2);
  Attach(Hello("a"));
  Attach(Hello("b"));
  Detach("b");
  EXPECT_EQ(hubs_->agents_behind(), 0);
  Tell("a", {"b"});
  EXPECT_EQ(hubs_->agents_behind(), 1);
  // It has arrived: nothing runs out.
  EXPECT_EQ(hubs_->NextDeadline(), absl::InfiniteFuture());
  Tell("a", {});
  EXPECT_EQ(hubs_->agents_behind(), 0);
  EXPECT_EQ(hubs_->hubs(), 0);
}

TEST_F(HubsTest, AgentThatMovedWithoutEndingItsSession_CountsBehindItsHub) {
  Make(1, 4);
  Attach(Hello("a"));
  Attach(Hello("b"));
  Tell("a", {"b"});
  EXPECT_EQ(hubs_->agents_behind(), 1);
  Detach("b");  // the rest of its old session
  EXPECT_EQ(hubs_->agents_behind(), 1);
}

TEST_F(HubsTest, StaleRoster_DoesNotTakeAnAgentThatIsHere) {
  Make(4, 4);
  Attach(Hello("a"));
  Attach(Hello("b"));
  Tell("a", {"b"});
  EXPECT_EQ(hubs_->agents_behind(), 0);
  // Once the agent is not attached here, the roster holds.
  Detach("b");
  EXPECT_EQ(hubs_->agents_behind(), 1);
}

TEST_F(HubsTest, HubAfterARestart_IsNotMovedBeforeItsFirstBeat) {
  Make(1, 4);
  for (const char* node : {"a", "b", "c"}) {
    v1::Hello hello = Hello(node);
    hello.set_session_id("of the last term");
    EXPECT_THAT(Attach(hello), IsEmpty());
  }
  // c speaks for others, and is used again; the newest of the others moves when its time is up.
  EXPECT_THAT(Tell("c", {"x", "y"}), IsEmpty());
  EXPECT_EQ(hubs_->agents_behind(), 2);
  EXPECT_EQ(After(Hubs::kFirstBeat), (Moves{{"b", "c"}}));
}

TEST_F(HubsTest, AgentThatComesFromAHub_IsNone) {
  Make(1, 4);
  Attach(Hello("a"));
  EXPECT_EQ(Failed("b", "x", /*offers=*/true), (Moves{{"b", "a"}}));
}

TEST_F(HubsTest, RosterOfAnAgentOnItsWay_KeepsItHere) {
  Make(1, 4);
  Attach(Hello("a"));
  EXPECT_EQ(Attach(Hello("b")), (Moves{{"b", "a"}}));
  // b turns out to be a hub: it stays. a has no agents on their way and may move to it.
  EXPECT_THAT(Tell("b", {"x"}), IsEmpty());
  EXPECT_EQ(Attach(Hello("c")), (Moves{{"c", "b"}}));
}

TEST_F(HubsTest, AgentThatNeverArrives_FreesItsPlaceAndIsLetAlone) {
  Make(1, 1);
  Attach(Hello("a"));
  EXPECT_EQ(Attach(Hello("b")), (Moves{{"b", "a"}}));
  EXPECT_THAT(After(Hubs::kArrival), IsEmpty());
  // b, whose directive may still be under way to it, is neither moved nor made a hub.
  EXPECT_EQ(Attach(Hello("c")), (Moves{{"c", "a"}}));
}

TEST_F(HubsTest, FailedHub_IsNotGivenToThatAgent) {
  Make(1, 8);
  Attach(Hello("a"));
  Attach(Hello("b", /*offers=*/false));
  Detach("b");
  EXPECT_THAT(Failed("b", "a"), IsEmpty());
  // Other agents still go there.
  EXPECT_EQ(Attach(Hello("c")), (Moves{{"c", "a"}}));
  EXPECT_EQ(hubs_->TakeNotice(), std::nullopt);
}

TEST_F(HubsTest, FailedHub_AnotherIsGivenAtOnce) {
  Make(1, 8);
  Attach(Hello("a"));
  Attach(Hello("b", /*offers=*/false));
  Attach(Hello("d"));
  Detach("b");
  EXPECT_EQ(Failed("b", "a"), (Moves{{"b", "d"}}));
}

TEST_F(HubsTest, HubReportedByTwo_IsGivenToNobodyForAMinute) {
  Make(0, 8);
  Attach(Hello("a"));
  for (const char* node : {"b", "c"}) {
    EXPECT_EQ(Attach(Hello(node, /*offers=*/false)), (Moves{{node, "a"}}));
    Detach(node);
  }
  EXPECT_THAT(Failed("b", "a"), IsEmpty());
  EXPECT_THAT(Failed("c", "a"), IsEmpty());
  EXPECT_THAT(Attach(Hello("d", /*offers=*/false)), IsEmpty());
  EXPECT_THAT(After(kMinute - absl::Seconds(1)), IsEmpty());
  EXPECT_EQ(After(absl::Seconds(1)).count("d"), 1u);
}

TEST_F(HubsTest, HubReportedAndNotAttached_IsGivenToNobodyForAMinute) {
  Make(0, 8);
  Attach(Hello("a"));
  EXPECT_EQ(Attach(Hello("b", /*offers=*/false)), (Moves{{"b", "a"}}));
  Detach("b");
  Detach("a");
  EXPECT_THAT(Failed("b", "a"), IsEmpty());
  EXPECT_THAT(Attach(Hello("a")), IsEmpty());
  EXPECT_THAT(After(kMinute), ::testing::Contains(::testing::Pair("b", "a")));
}

TEST_F(HubsTest, HubThatEnds_ItsAgentsGoElsewhere) {
  Make(1, 8);
  Attach(Hello("a"));
  Attach(Hello("b"));
  Detach("b");
  Tell("a", {"b"});
  Detach("a");
  EXPECT_EQ(hubs_->agents_behind(), 0);
  v1::Hello back = Hello("b", /*offers=*/false);
  back.set_session_id("of the hub");
  EXPECT_THAT(Attach(back), IsEmpty());
  EXPECT_THAT(Attach(Hello("c")), ::testing::SizeIs(1));
}

TEST_F(HubsTest, AgentThatReachesNoHub_WaitsLongerEachTime) {
  Make(0, 1000);
  for (int i = 0; i < 40; ++i) Attach(Hello(absl::StrCat("hub", i), true, /*follows=*/false));
  std::optional<std::string> hub = Attach(Hello("lonely", /*offers=*/false))["lonely"];
  int moves = 1;
  const absl::Time end = now_ + absl::Hours(4);
  while (now_ < end) {
    std::map<std::string, std::string> moved;
    if (hub.has_value()) {
      Detach("lonely");
      moved = Failed("lonely", *hub);
    } else {
      moved = After(std::max(absl::Seconds(1), std::min(hubs_->NextDeadline(), end) - now_));
    }
    hub.reset();
    if (const auto it = moved.find("lonely"); it != moved.end()) {
      hub = it->second;
      ++moves;
    }
  }
  EXPECT_GE(moves, 8);
  EXPECT_LE(moves, 16);
}

TEST_F(HubsTest, AgentStartedAgain_DoesNotWait) {
  Make(0, 1000);
  Attach(Hello("hub", true, /*follows=*/false));
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(Attach(Hello("b", /*offers=*/false)), (Moves{{"b", "hub"}}));
    Detach("b");
  }
}

TEST_F(HubsTest, Roster_IsBounded) {
  Make(0, 8);
  Attach(Hello("a"));
  v1::HubRoster roster;
  roster.add_agents();                                    // no name
  roster.add_agents()->set_node("a");                     // itself
  roster.add_agents()->set_node(std::string(5000, 'x'));  // no name that an agent can have
  for (int i = 0; i < 3; ++i) roster.add_agents()->set_node("twice");
  for (size_t i = 0; i < 3 * Hubs::kMaxRoster; ++i)
    roster.add_agents()->set_node(absl::StrCat("n", i));
  hubs_->Roster("a", roster, now_);
  EXPECT_EQ(hubs_->agents_behind(), static_cast<int>(Hubs::kMaxRoster));
  hubs_->Roster("nobody", roster, now_);
  EXPECT_EQ(hubs_->agents_behind(), static_cast<int>(Hubs::kMaxRoster));
}

// A little world around the decisions: what agents do with them, and what can go wrong. It keeps
// its own books and compares.
class World {
 public:
  World(int seed, HubOptions options)
      : options_(options), hubs_(options), random_(static_cast<uint32_t>(seed)) {}

  void Step() {
    const int what = Draw(100);
    if (what < 25) {
      Come(absl::StrCat("n", Draw(120)));
    } else if (what < 55) {
      Follow();
    } else if (what < 70) {
      Beat();
    } else if (what < 78) {
      Leave();
    } else if (what < 84) {
      Fail();
    } else {
      Wait(what < 97 ? absl::Milliseconds(Draw(500)) : absl::Seconds(Draw(90)));
    }
    hubs_.Tick(now_);
    Apply();
    Check();
  }
  // Lets nothing fail from here on: every agent finds a place.
  void Settle() {
    for (int i = 0; i < 10'000; ++i) {
      for (const auto& [node, to] : std::map<std::string, std::string>(sent_)) Go(node);
      for (const auto& [node, agent] : agents_) Tell(node);
      Apply();
      Check();
      if (!sent_.empty()) continue;
      const absl::Time next = hubs_.NextDeadline();
      if (next == absl::InfiniteFuture()) break;
      now_ = std::max(now_, next);
      hubs_.Tick(now_);
      Apply();
    }
    int plain = 0, movable = 0, able = 0, both = 0;
    for (const auto& [node, agent] : agents_) {
      if (!agent.hub.empty() || !Behind(node).empty()) continue;
      ++plain;
      if (lost_.contains(node)) continue;
      const bool offers = !agent.hello.hub_address().empty();
      const bool follows = agent.hello.features_size() > 0;
      movable += follows ? 1 : 0;
      able += offers ? 1 : 0;
      both += follows && offers ? 1 : 0;
    }
    if (plain > options_.direct_agents) {
      EXPECT_TRUE(movable == 0 ||
                  (Rooms() == 0 && (able == 0 || (able + movable == 2 && both == 1))))
          << plain << " agents stay, of which " << movable << " could move and " << able
          << " could be hubs; " << Rooms() << " hubs have room";
    }
  }
  int moves() const { return moves_; }
  int comings() const { return comings_; }

 private:
  struct Agent {
    v1::Hello hello;
    std::string hub;  // it is behind; empty: it has a stream of its own
  };

  int Draw(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  template <typename Map>
  std::string Any(const Map& map) {
    if (map.empty()) return "";
    return std::next(map.begin(), Draw(static_cast<int>(map.size())))->first;
  }
  std::vector<std::string> Behind(const std::string& hub) const {
    std::vector<std::string> nodes;
    for (const auto& [node, agent] : agents_)
      if (agent.hub == hub) nodes.push_back(node);
    return nodes;
  }
  int Rooms() const {
    int rooms = 0;
    for (const auto& [node, agent] : agents_) {
      const int behind = static_cast<int>(Behind(node).size());
      rooms += behind > 0 && behind < options_.agents_per_hub ? 1 : 0;
    }
    return rooms;
  }

  void Attach(const std::string& node, const std::string& failed, bool fresh) {
    Agent& agent = agents_[node];
    agent.hub.clear();
    agent.hello.set_session_id(fresh ? "" : "an earlier one");
    agent.hello.set_failed_hub(failed);
    ++comings_;
    sent_.erase(node);
    lost_.erase(node);
    hubs_.Attach(node, agent.hello, now_);
  }
  void Come(const std::string& node) {
    if (agents_.contains(node)) return;
    v1::Hello hello;
    hello.set_node(node);
    if (Draw(3) > 0) hello.set_hub_address(node + ":1");
    if (Draw(10) > 0) hello.add_features("hub");
    agents_[node].hello = hello;
    Attach(node, "", /*fresh=*/true);
  }
  // Waits. A hub that lives beats at least this often.
  void Wait(absl::Duration time) {
    now_ += time;
    // An agent that does not follow in time for its hub to list it never does.
    for (auto it = sent_.begin(); it != sent_.end();) {
      if (sent_at_[it->first] + Hubs::kArrival - absl::Seconds(3) > now_) {
        ++it;
      } else {
        lost_.insert(it->first);
        it = sent_.erase(it);
      }
    }
    if (now_ < beaten_ + absl::Seconds(2)) return;
    beaten_ = now_;
    for (const auto& [node, agent] : agents_) {
      Tell(node);
      Apply();
    }
  }
  // Lets an agent follow its directive.
  void Follow() { Go(Any(sent_)); }
  void Go(const std::string& node) {
    if (node.empty()) return;
    const std::string hub = sent_[node];
    sent_.erase(node);
    if (!Behind(node).empty()) return;  // a hub with agents does not follow
    hubs_.Detach(node, now_);
    Apply();
    const auto it = agents_.find(hub);
    if (it != agents_.end() && it->second.hub.empty()) {
      agents_[node].hub = hub;
    } else {
      Attach(node, hub, /*fresh=*/false);
    }
  }
  void Beat() {
    const std::string node = Any(agents_);
    if (!node.empty()) Tell(node);
  }
  void Tell(const std::string& hub) {
    if (!agents_.at(hub).hub.empty()) return;
    v1::HubRoster roster;
    for (const std::string& node : Behind(hub)) roster.add_agents()->set_node(node);
    Forget(hub);
    for (const auto& one : roster.agents()) told_[one.node()] = hub;
    hubs_.Roster(hub, roster, now_);
  }
  void Forget(const std::string& hub) {
    for (auto it = told_.begin(); it != told_.end();)
      it = it->second == hub ? told_.erase(it) : std::next(it);
  }
  void Leave() {
    const std::string node = Any(agents_);
    if (node.empty()) return;
    if (agents_[node].hub.empty()) hubs_.Detach(node, now_);
    const std::vector<std::string> behind = Behind(node);
    agents_.erase(node);
    sent_.erase(node);
    lost_.erase(node);
    Forget(node);
    Apply();
    for (const std::string& one : behind) {
      Attach(one, Draw(2) == 0 ? node : "", /*fresh=*/false);
      Apply();
    }
  }
  // Lets a hub fail one agent, and live on.
  void Fail() {
    const std::string node = Any(agents_);
    if (node.empty() || agents_[node].hub.empty()) return;
    Attach(node, agents_[node].hub, /*fresh=*/false);
  }
  void Apply() {
    for (const HubMove& move : hubs_.Decide()) {
      ++moves_;
      ASSERT_TRUE(agents_.contains(move.node) && agents_[move.node].hub.empty());
      ASSERT_EQ(agents_[move.node].hello.features_size(), 1);
      ASSERT_TRUE(agents_.contains(move.hub)) << "a hub that is not attached";
      ASSERT_EQ(agents_[move.hub].hub, "") << "a hub behind a hub";
      ASSERT_FALSE(sent_.contains(move.hub)) << "a hub that was sent away";
      ASSERT_EQ(agents_[move.hub].hello.hub_address(), move.address);
      ASSERT_NE(move.address, "");
      for (const auto& [node, hub] : told_)
        ASSERT_NE(hub, move.node) << "a hub that has agents was moved";
      for (const auto& [node, to] : sent_) ASSERT_NE(to, move.node) << "a hub was moved";
      sent_[move.node] = move.hub;
      sent_at_[move.node] = now_;
      int load = static_cast<int>(Behind(move.hub).size());
      for (const auto& [node, to] : sent_) load += to == move.hub ? 1 : 0;
      // The hub has not yet told of those that left it: then there are fewer than was thought.
      ASSERT_LE(load, options_.agents_per_hub) << "overload of " << move.hub;
    }
  }
  void Check() {
    int behind = 0;
    for (const auto& [node, hub] : told_) {
      const auto it = agents_.find(node);
      behind += it == agents_.end() || !it->second.hub.empty() ? 1 : 0;
    }
    ASSERT_EQ(hubs_.agents_behind(), behind);
  }

  const HubOptions options_;
  Hubs hubs_;
  std::mt19937 random_;
  absl::Time now_ = absl::UnixEpoch();
  absl::Time beaten_ = absl::UnixEpoch();
  std::map<std::string, Agent> agents_;
  std::map<std::string, std::string> sent_;  // under way -> its hub
  std::map<std::string, absl::Time> sent_at_;
  std::set<std::string> lost_;               // was sent to a hub, and stays
  std::map<std::string, std::string> told_;  // -> the last hub that listed it
  int moves_ = 0;
  int comings_ = 0;
};

TEST(HubsProperty, RandomEvents_KeepTheRules) {
  for (int seed = 0; seed < 30 && !::testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    World world(seed, {.direct_agents = seed % 7, .agents_per_hub = 1 + seed % 9});
    for (int i = 0; i < 500 && !::testing::Test::HasFailure(); ++i) world.Step();
    world.Settle();
    // Each arrival is followed by at most one move.
    EXPECT_LE(world.moves(), world.comings());
    EXPECT_GT(world.moves(), 0);
  }
}

v1::Hello HubHello(const std::string& node) {
  v1::Hello hello;
  hello.set_node(node);
  hello.set_host(node);
  hello.add_features("hub");
  hello.set_hub_address(node + ":1");
  hello.set_session_id("before");
  return hello;
}

TEST(GroupedHubsTest, Agents_GoToHubsOfTheirOwnGroupOnly) {
  GroupedHubs hubs({.direct_agents = 1, .agents_per_hub = 8});
  const absl::Time now = absl::UnixEpoch() + Hubs::kFirstBeat;
  std::map<std::string, std::string> moves;
  // Alternately of three groups: each has one agent directly, and one that is a hub.
  for (int i = 0; i < 12; ++i) {
    const std::string group = absl::StrCat(std::string(i % 3 == 0 ? "" : "job.1"), i % 3);
    const std::string node = absl::StrCat(group, "/", i);
    hubs.Attach(group, node, HubHello(node), absl::UnixEpoch());
    hubs.Roster(node, {}, now);
    hubs.Tick(now);
    for (const HubMove& move : hubs.Decide()) moves[move.node] = move.hub;
  }
  EXPECT_FALSE(moves.empty());
  for (const auto& [node, hub] : moves) {
    EXPECT_EQ(node.substr(0, node.find('/')), hub.substr(0, hub.find('/'))) << node << " " << hub;
  }
  EXPECT_EQ(hubs.hubs(), 3);
  EXPECT_TRUE(hubs.Decide().empty());
}

TEST(GroupedHubsTest, LastAgentOfAGroup_LeavesNothingBehind) {
  GroupedHubs hubs({.direct_agents = 1, .agents_per_hub = 8});
  const absl::Time now = absl::UnixEpoch() + Hubs::kFirstBeat;
  for (const char* node : {"a", "b", "c", "d"}) {
    hubs.Attach("job.1", node, HubHello(node), absl::UnixEpoch());
    hubs.Roster(node, {}, now);
  }
  hubs.Tick(now);
  EXPECT_FALSE(hubs.Decide().empty());
  EXPECT_NE(hubs.NextDeadline(), absl::InfiniteFuture());
  EXPECT_EQ(hubs.AgentOn("a"), "a");
  for (const char* node : {"a", "b", "c", "d", "never"}) hubs.Detach(node, now);
  EXPECT_EQ(hubs.NextDeadline(), absl::InfiniteFuture());
  EXPECT_EQ(hubs.hubs(), 0);
  EXPECT_EQ(hubs.agents_behind(), 0);
  EXPECT_EQ(hubs.AgentOn("a"), "");
  EXPECT_TRUE(hubs.Decide().empty());
}

}  // namespace
}  // namespace muster::coordinator
