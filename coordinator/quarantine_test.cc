#include "coordinator/quarantine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);
constexpr char kDied[] = "was killed by signal 9";

std::map<std::string, Quarantine::Host> All(const Quarantine& quarantine, absl::Time now) {
  std::map<std::string, Quarantine::Host> all;
  quarantine.ForEach(
      now, [&](const std::string& name, const Quarantine::Host& host) { all[name] = host; });
  return all;
}

TEST(JudgeStrikes, FewerThanTheLimit_OnlySaysHowMany) {
  const StrikeDecision decision = JudgeStrikes({}, 2, true, kDied);
  EXPECT_FALSE(decision.quarantine);
  EXPECT_EQ(decision.why,
            "named 2 times within 1h, last because a worker was killed by signal 9: 3 times "
            "quarantine it");
}

TEST(JudgeStrikes, AsManyAsTheLimit_Quarantines) {
  const StrikeDecision decision = JudgeStrikes({}, 3, true, kDied);
  EXPECT_TRUE(decision.quarantine);
  EXPECT_EQ(decision.why, "named 3 times within 1h, last because a worker was killed by signal 9");
}

TEST(JudgeStrikes, OnlyHostOfTheJob_IsNeverQuarantined) {
  const StrikeDecision decision = JudgeStrikes({}, 5, false, kDied);
  EXPECT_FALSE(decision.quarantine);
  EXPECT_THAT(decision.why, HasSubstr("no other host"));
}

TEST(Quarantine, StrikesWithinTheWindow_Count) {
  Quarantine quarantine({});
  EXPECT_EQ(quarantine.Strike("h0", true, kDied, kNow)->strikes.size(), 1u);
  EXPECT_EQ(quarantine.Strike("h0", true, kDied, kNow + absl::Minutes(30))->strikes.size(), 2u);
  // The first one no longer counts.
  const auto third = quarantine.Strike("h0", true, kDied, kNow + absl::Minutes(60));
  EXPECT_EQ(third->strikes.size(), 2u);
  EXPECT_FALSE(third->decision.quarantine);
  const auto fourth = quarantine.Strike("h0", true, kDied, kNow + absl::Minutes(61));
  EXPECT_TRUE(fourth->decision.quarantine);
  EXPECT_EQ(fourth->strikes.size(), 0u);  // the next quarantine takes as many again
}

TEST(Quarantine, OnlyHost_KeepsAsManyStrikesAsTheLimit) {
  Quarantine quarantine({});
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(quarantine.Strike("h0", false, kDied, kNow)->decision.quarantine);
  }
  EXPECT_EQ(All(quarantine, kNow)["h0"].strikes.size(), 3u);
}

TEST(Quarantine, SwitchedOffOrWithoutAHost_CountsNothing) {
  EXPECT_EQ(Quarantine({.strikes = 0}).Strike("h0", true, kDied, kNow), std::nullopt);
  EXPECT_EQ(Quarantine({}).Strike("", true, kDied, kNow), std::nullopt);
}

TEST(Quarantine, StateOf_FollowsWhoQuarantinedAndForHowLong) {
  Quarantine quarantine({});
  EXPECT_EQ(quarantine.StateOf("h0", kNow), Quarantine::State::kFree);
  EXPECT_EQ(quarantine.NextFree(kNow), absl::InfiniteFuture());
  quarantine.Set("h0", absl::Minutes(2), "slow", /*automatic=*/true, kNow);
  quarantine.Set("h1", absl::Minutes(1), "repair", /*automatic=*/false, kNow);
  EXPECT_EQ(quarantine.StateOf("h0", kNow), Quarantine::State::kLastResort);
  EXPECT_EQ(quarantine.StateOf("h1", kNow), Quarantine::State::kBlocked);
  EXPECT_EQ(quarantine.FreeAt("h0", kNow), kNow + absl::Minutes(2));
  EXPECT_EQ(quarantine.NextFree(kNow), kNow + absl::Minutes(1));
  const absl::Time later = kNow + absl::Minutes(1);
  EXPECT_EQ(quarantine.StateOf("h1", later), Quarantine::State::kFree);
  EXPECT_EQ(quarantine.NextFree(later), kNow + absl::Minutes(2));
  quarantine.Set("h0", absl::ZeroDuration(), "", false, later);
  EXPECT_EQ(quarantine.StateOf("h0", later), Quarantine::State::kFree);
}

TEST(Quarantine, RestoredWithoutTimes_CountsFromTheStartOfTheTerm) {
  Quarantine quarantine({});
  quarantine.RestoreStrikes("h0", {absl::InfiniteFuture(), absl::InfiniteFuture()});
  quarantine.RestoreSet("h1", absl::Minutes(5), absl::InfiniteFuture(), "repair", false);
  // Before the term starts there is no time.
  EXPECT_EQ(All(quarantine, absl::InfinitePast())["h0"].strikes.size(), 2u);
  EXPECT_EQ(All(quarantine, absl::InfinitePast())["h1"].left, absl::Minutes(5));
  quarantine.StartTerm(kNow);
  EXPECT_EQ(quarantine.StateOf("h1", kNow), Quarantine::State::kBlocked);
  EXPECT_EQ(All(quarantine, kNow + absl::Minutes(2))["h1"].left, absl::Minutes(3));
  EXPECT_EQ(All(quarantine, kNow + absl::Minutes(9))["h1"].left, absl::ZeroDuration());
  EXPECT_TRUE(quarantine.Strike("h0", true, kDied, kNow)->decision.quarantine);
}

TEST(Quarantine, Restored_EndsWhenItWouldHave) {
  Quarantine quarantine({});
  const absl::Time ago = kNow - absl::Minutes(40);
  quarantine.RestoreStrikes("h0", {kNow - absl::Minutes(61), ago});
  quarantine.RestoreSet("h1", absl::Minutes(50), ago + absl::Minutes(50), "repair", false);
  quarantine.RestoreSet("h2", absl::Minutes(30), ago + absl::Minutes(30), "repair", false);
  // The clock was ahead when this strike was recorded.
  quarantine.RestoreStrikes("h3", {kNow + absl::Hours(9)});
  quarantine.RestoreSet("h4", absl::Minutes(5), kNow + absl::Hours(9), "repair", false);
  EXPECT_EQ(All(quarantine, absl::InfinitePast())["h2"].left, absl::Minutes(30));
  quarantine.StartTerm(kNow);
  std::map<std::string, Quarantine::Host> all = All(quarantine, kNow);
  EXPECT_EQ(all["h0"].strikes, std::vector<absl::Time>{ago});
  EXPECT_EQ(all["h1"].left, absl::Minutes(10));
  EXPECT_EQ(all.count("h2"), 0u);
  EXPECT_EQ(all["h3"].strikes, std::vector<absl::Time>{kNow});
  EXPECT_EQ(all["h4"].left, absl::Minutes(5));
}

TEST(Quarantine, HostsWithNothingAgainstThem_AreForgotten) {
  Quarantine quarantine({});
  quarantine.Strike("h0", true, kDied, kNow);
  quarantine.Strike("h1", true, kDied, kNow + absl::Hours(2));
  EXPECT_EQ(All(quarantine, kNow).count("h0"), 0u);
  quarantine.Clear();
  EXPECT_THAT(All(quarantine, kNow), IsEmpty());
}

TEST(Quarantine, MoreHostsThanAreKept_AreNotCounted) {
  Quarantine quarantine({});
  for (size_t i = 0; i < Quarantine::kMaxHosts; ++i) {
    quarantine.Set(absl::StrCat("h", i), absl::Hours(1), "", true, kNow);
  }
  EXPECT_FALSE(quarantine.HasRoomFor("more"));
  EXPECT_TRUE(quarantine.HasRoomFor("h7"));
  EXPECT_EQ(quarantine.Strike("more", true, kDied, kNow), std::nullopt);
  EXPECT_NE(quarantine.Strike("h7", true, kDied, kNow), std::nullopt);
}

}  // namespace
}  // namespace muster::coordinator
