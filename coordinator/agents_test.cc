#include "coordinator/agents.h"

#include <gtest/gtest.h>

#include <optional>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);
constexpr absl::Duration kLease = absl::Seconds(6);

// `count` agents, which have all sent a beat.
Agents Attached(int count) {
  Agents agents;
  for (int i = 0; i < count; ++i) {
    agents.Attach(absl::StrCat("n", i), kNow);
    agents.Beat(absl::StrCat("n", i), false, kNow);
  }
  return agents;
}

Silence CountFor(Agents* agents, absl::Time last_seen, absl::Time now) {
  Silence silence;
  agents->CountFor(last_seen, kLease, now, &silence);
  return silence;
}

TEST(Agents, Number_IsThatOfTheSession) {
  Agents agents = Attached(1);
  const uint64_t first = agents.NumberOf("n0");
  EXPECT_GT(first, 0u);
  agents.Attach("n0", kNow);  // another stream of the same session
  EXPECT_EQ(agents.NumberOf("n0"), first);
  agents.Detach("n0");
  EXPECT_EQ(agents.NumberOf("n0"), 0u);
  EXPECT_EQ(agents.Beat("n0", false, kNow), 0u);
  agents.Attach("n0", kNow);
  EXPECT_GT(agents.NumberOf("n0"), first);
}

TEST(Agents, WithoutABeat_ProvesNothing) {
  Agents agents;
  agents.Attach("n0", kNow);
  EXPECT_EQ(agents.LastHeardOf("n0"), std::nullopt);
  EXPECT_EQ(agents.WitnessBeat("n0", agents.NumberOf("n0")), std::nullopt);
  agents.Beat("n0", false, kNow + absl::Seconds(1));
  EXPECT_EQ(agents.LastHeardOf("n0")->beat, kNow + absl::Seconds(1));
  EXPECT_EQ(agents.WitnessBeat("n0", agents.NumberOf("n0")), kNow + absl::Seconds(1));
}

TEST(Agents, HubOrAnotherSession_IsNoWitness) {
  Agents agents = Attached(2);
  EXPECT_EQ(agents.WitnessBeat("n0", agents.NumberOf("n1")), std::nullopt);
  agents.Beat("n0", /*for_others=*/true, kNow);
  agents.Beat("n0", /*for_others=*/false, kNow);
  EXPECT_EQ(agents.WitnessBeat("n0", agents.NumberOf("n0")), std::nullopt);
}

TEST(Agents, HeardAfterMissedBeats_IsBack) {
  Agents agents = Attached(1);
  agents.Beat("n0", false, kNow + absl::Seconds(2));
  EXPECT_EQ(agents.LastHeardOf("n0")->back, kNow);
  agents.Beat("n0", false, kNow + absl::Seconds(7));
  EXPECT_EQ(agents.LastHeardOf("n0")->back, kNow + absl::Seconds(7));
}

TEST(Agents, MostSilentAtOnce_IsACutUntilMostAreBack) {
  Agents agents = Attached(5);
  const absl::Time later = kNow + kLease;
  agents.Beat("n0", false, later);
  const Silence cut = CountFor(&agents, kNow, later);
  EXPECT_EQ(cut.agents_heard, 1);
  EXPECT_EQ(cut.agents_silent, 4);
  EXPECT_TRUE(IsCut(cut));
  // However long it takes, the same agents count as cut off.
  const absl::Time long_after = later + absl::Seconds(60);
  agents.Beat("n0", false, long_after);
  EXPECT_EQ(CountFor(&agents, kNow, long_after).agents_silent, 4);
  EXPECT_EQ(agents.cut_ended(), absl::InfinitePast());
  agents.Beat("n1", false, long_after);
  EXPECT_EQ(CountFor(&agents, kNow, long_after).agents_silent, 3);
  EXPECT_EQ(agents.cut_ended(), absl::InfinitePast());
  agents.Beat("n2", false, long_after);
  EXPECT_EQ(agents.cut_ended(), long_after);
}

TEST(Agents, FewSilent_IsNoCut) {
  Agents agents = Attached(5);
  const absl::Time later = kNow + kLease;
  for (const char* node : {"n0", "n1", "n2"}) agents.Beat(node, false, later);
  const Silence silence = CountFor(&agents, kNow, later);
  EXPECT_EQ(silence.agents_heard, 3);
  EXPECT_EQ(silence.agents_silent, 2);
  EXPECT_FALSE(IsCut(silence));
}

}  // namespace
}  // namespace muster::coordinator
