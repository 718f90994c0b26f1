#include "coordinator/seating.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;

v1::RendezvousSpec Spec(int min, int max, int divisible_by = 0) {
  v1::RendezvousSpec spec;
  spec.set_min_workers(min);
  spec.set_max_workers(max);
  spec.set_divisible_by(divisible_by);
  return spec;
}

Candidate Make(const std::string& id, const std::string& host, uint64_t order, int previous = -1) {
  Candidate candidate;
  candidate.worker_id = id;
  candidate.topology.set_host(host);
  candidate.order = order;
  candidate.previous_rank = previous;
  return candidate;
}

std::vector<std::string> Ids(const std::vector<Candidate>& candidates, int world,
                             const std::vector<FormerSeat>& former = {}) {
  std::vector<std::string> ids;
  for (const int i : AssignRanks(candidates, world, former).seats) {
    ids.push_back(candidates[i].worker_id);
  }
  return ids;
}

TEST(FeasibleWorld, Fixed_NeedsAll) {
  EXPECT_EQ(FeasibleWorld(Spec(4, 4), 0, 3, 0, 0), std::nullopt);
  EXPECT_EQ(FeasibleWorld(Spec(4, 4), 0, 4, 0, 0), 4);
  EXPECT_EQ(FeasibleWorld(Spec(4, 4), 0, 9, 0, 0), 4);
}

TEST(FeasibleWorld, Elastic_TakesAllOrdinaryUpToMax) {
  EXPECT_EQ(FeasibleWorld(Spec(2, 8), 0, 1, 0, 0), std::nullopt);
  EXPECT_EQ(FeasibleWorld(Spec(2, 8), 0, 5, 0, 0), 5);
  EXPECT_EQ(FeasibleWorld(Spec(2, 8), 0, 12, 0, 0), 8);
}

TEST(FeasibleWorld, DivisibleBy_RoundsDownButNotBelowMin) {
  EXPECT_EQ(FeasibleWorld(Spec(2, 8, 4), 0, 7, 0, 0), 4);
  EXPECT_EQ(FeasibleWorld(Spec(3, 8, 4), 0, 3, 0, 0), std::nullopt);
  EXPECT_EQ(FeasibleWorld(Spec(5, 8, 4), 0, 7, 1, 0), 8);
  EXPECT_EQ(FeasibleWorld(Spec(5, 7, 4), 0, 7, 9, 0), std::nullopt);
}

TEST(FeasibleWorld, Spares_FillUpToMinOnly) {
  EXPECT_EQ(FeasibleWorld(Spec(4, 8), 0, 3, 5, 0), 4);
  EXPECT_EQ(FeasibleWorld(Spec(4, 8), 0, 4, 5, 0), 4);
  EXPECT_EQ(FeasibleWorld(Spec(4, 4), 0, 2, 1, 1), 4);
}

TEST(FeasibleWorld, Spares_ReplaceWhoWasLost) {
  EXPECT_EQ(FeasibleWorld(Spec(2, 8), 6, 5, 3, 0), 6);
  EXPECT_EQ(FeasibleWorld(Spec(2, 8), 6, 3, 1, 0), 4);
  EXPECT_EQ(FeasibleWorld(Spec(2, 8), 6, 7, 3, 0), 7);  // newcomers make it larger, spares do not
  EXPECT_EQ(FeasibleWorld(Spec(2, 8, 4), 8, 7, 1, 0), 8);
  EXPECT_EQ(FeasibleWorld(Spec(2, 8, 4), 8, 6, 1, 0), 4);
}

TEST(CompareNatural, Numbers_CompareAsNumbers) {
  EXPECT_LT(CompareNatural("node9", "node10"), 0);
  EXPECT_GT(CompareNatural("node10", "node9"), 0);
  EXPECT_EQ(CompareNatural("node07", "node7"), 0);
  EXPECT_LT(CompareNatural("a", "b"), 0);
  EXPECT_LT(CompareNatural("", "a"), 0);
  EXPECT_LT(CompareNatural("n99999999999999999999998", "n99999999999999999999999"), 0);
}

TEST(AssignRanks, FirstTime_HostsAreContiguousInNaturalOrder) {
  std::vector<Candidate> candidates;
  const std::vector<std::string> hosts = {"node10", "node9", "node10", "node9"};
  const int local[] = {1, 0, 0, 1};
  for (int i = 0; i < 4; ++i) {
    candidates.push_back(Make(absl::StrCat("w", i), hosts[i], i));
    candidates[i].topology.set_local_rank(local[i]);
  }
  EXPECT_THAT(Ids(candidates, 4), ElementsAre("w1", "w3", "w2", "w0"));
}

TEST(AssignRanks, RackAndDomain_ComeBeforeHost) {
  std::vector<Candidate> candidates = {Make("a", "h1", 0), Make("b", "h2", 1), Make("c", "h3", 2)};
  candidates[0].topology.set_rack("r2");
  candidates[1].topology.set_rack("r1");
  candidates[1].topology.set_nvlink_domain("d2");
  candidates[2].topology.set_rack("r1");
  candidates[2].topology.set_nvlink_domain("d1");
  EXPECT_THAT(Ids(candidates, 3), ElementsAre("c", "b", "a"));
}

TEST(AssignRanks, Survivors_KeepTheirRank) {
  const std::vector<Candidate> candidates = {Make("new", "h0", 0), Make("b", "h1", 1, 1),
                                             Make("a", "h0", 2, 0), Make("d", "h3", 3, 3)};
  EXPECT_THAT(Ids(candidates, 4), ElementsAre("a", "b", "new", "d"));
}

TEST(AssignRanks, Shrunk_HighRanksMoveIntoHoles) {
  const std::vector<Candidate> candidates = {Make("c", "h2", 0, 2), Make("d", "h3", 1, 3),
                                             Make("a", "h0", 2, 0)};
  const std::vector<std::string> ids = Ids(candidates, 3);
  EXPECT_EQ(ids[0], "a");
  EXPECT_EQ(ids[2], "c");
  EXPECT_EQ(ids[1], "d");
}

TEST(AssignRanks, PreferredRank_IsGrantedIfFree) {
  std::vector<Candidate> candidates = {Make("x", "h", 0), Make("y", "h", 1), Make("z", "h", 2)};
  candidates[0].preferred_rank = 2;
  candidates[1].preferred_rank = 2;
  candidates[2].preferred_rank = 0;
  EXPECT_THAT(Ids(candidates, 3), ElementsAre("z", "y", "x"));
}

TEST(AssignRanks, PreferredRank_DoesNotMoveASurvivor) {
  std::vector<Candidate> candidates = {Make("new", "h", 0), Make("old", "h", 1, 0)};
  candidates[0].preferred_rank = 0;
  EXPECT_THAT(Ids(candidates, 2), ElementsAre("old", "new"));
}

TEST(AssignRanks, Spares_GoToHolesNearBy) {
  std::vector<Candidate> candidates = {Make("s1", "x1", 0), Make("s2", "x2", 1),
                                       Make("a", "h0", 2, 0), Make("b", "h1", 3, 1)};
  candidates[0].spare = candidates[1].spare = true;
  candidates[0].topology.set_nvlink_domain("d9");
  candidates[0].topology.set_rack("r1");
  candidates[1].topology.set_nvlink_domain("d3");
  candidates[1].topology.set_rack("r2");
  const std::vector<FormerSeat> former = {{"a", "h0", "r1", "d1"},
                                          {"b", "h1", "r1", "d1"},
                                          {"c", "h2", "r9", "d3"},
                                          {"d", "h3", "r1", "d7"}};
  EXPECT_THAT(Ids(candidates, 4, former), ElementsAre("a", "b", "s2", "s1"));
}

TEST(AssignRanks, MoreThanSeats_SparesAndLastResortsStayOut) {
  std::vector<Candidate> candidates = {Make("resort", "h", 0, 0), Make("spare", "h", 1),
                                       Make("plain", "h", 2), Make("old", "h", 3, 1)};
  candidates[0].last_resort = true;
  candidates[1].spare = true;
  EXPECT_THAT(Ids(candidates, 2), ElementsAre("plain", "old"));
  EXPECT_THAT(Ids(candidates, 3), ::testing::Not(::testing::Contains("resort")));
}

TEST(AssignRanks, EachRank_HasItsReasonInWords) {
  std::vector<Candidate> candidates = {Make("a", "h0", 0, 0),  Make("b", "h1", 1, 6),
                                       Make("near", "h2", 2),  Make("rack", "h9", 3),
                                       Make("spare", "h8", 4), Make("asks", "h0", 5)};
  candidates[3].topology.set_rack("r1");
  candidates[4].spare = true;
  candidates[5].preferred_rank = 5;
  const std::vector<FormerSeat> former = {{"a", "h0", "", ""},
                                          {"w1", "h1", "", ""},
                                          {"w2", "h2", "", ""},
                                          {"w3", "h3", "r1", ""},
                                          {"w4", "h7", "", "d1"}};
  const Seating seating = AssignRanks(candidates, 6, former);
  EXPECT_THAT(seating.seats, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(seating.why,
              ElementsAre("keeps its rank", "had rank 6; takes the rank of \"w1\" on the same host",
                          "takes the rank of \"w2\" on the same host",
                          "takes the rank of \"w3\" in the same rack",
                          "was a spare; takes the rank of \"w4\"", "asked for this rank"));
}

TEST(AssignRanks, FirstTime_IsByOrderOfHosts) {
  EXPECT_THAT(AssignRanks({Make("a", "h0", 0), Make("b", "h1", 1)}, 2, {}).why,
              ElementsAre("by order of racks and hosts", "by order of racks and hosts"));
}

TEST(AssignRanks, WithoutASeat_SaysWhyItWaits) {
  std::vector<Candidate> candidates = {Make("plain", "h", 0), Make("late", "h", 1),
                                       Make("spare", "h", 2), Make("resort", "h", 3)};
  candidates[2].spare = true;
  candidates[3].last_resort = true;
  EXPECT_THAT(AssignRanks(candidates, 1, {}).why,
              ElementsAre("by order of racks and hosts",
                          "waits: the only seat is taken by workers that had one or came earlier",
                          "waits as a spare: the only seat is taken",
                          "waits: its host is quarantined, and the only seat is taken without it"));
}

TEST(AssignRanks, LastResortThatIsNeeded_SaysSo) {
  std::vector<Candidate> candidates = {Make("a", "h0", 0), Make("resort", "h1", 1)};
  candidates[1].last_resort = true;
  EXPECT_EQ(AssignRanks(candidates, 2, {}).why[1],
            "is needed although its host is quarantined; by order of racks and hosts");
}

TEST(AssignRanks, TenThousand_EverySeatIsTakenOnce) {
  std::vector<Candidate> candidates;
  for (int i = 0; i < 10000; ++i) {
    candidates.push_back(
        Make(absl::StrCat("w", i), absl::StrCat("h", i % 1250), i, i % 3 == 0 ? i : -1));
  }
  std::vector<bool> taken(10000);
  for (const int i :
       AssignRanks(candidates, 10000, std::vector<FormerSeat>(10000, {"w", "h7", "", ""})).seats) {
    ASSERT_GE(i, 0);
    EXPECT_FALSE(taken[i]);
    taken[i] = true;
  }
}

}  // namespace
}  // namespace muster::coordinator
