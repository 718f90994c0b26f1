#include "worker/collective/host_lanes.h"

#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::ElementsAre;

HostLayout LayoutOf(const std::string& hosts) {
  std::vector<std::string> identities;
  for (const char host : hosts) identities.emplace_back(1, host);
  return GroupIntoHosts(identities);
}

TEST(GroupIntoHosts, RanksThatDoNotFollowOneAnother_AreTogether) {
  const HostLayout layout = LayoutOf("baab");
  EXPECT_THAT(layout.hosts, ElementsAre(ElementsAre(0, 3), ElementsAre(1, 2)));
  EXPECT_THAT(layout.host_of, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(layout.local_of, ElementsAre(0, 0, 1, 1));
}

TEST(MakeLanes, EqualHosts_OneLaneForEachRank) {
  const std::vector<Lane> lanes = MakeLanes(LayoutOf("aabb"));
  ASSERT_EQ(lanes.size(), 2u);
  EXPECT_THAT(lanes[0].ranks, ElementsAre(0, 2));
  EXPECT_THAT(lanes[1].ranks, ElementsAre(1, 3));
}

// For any hosts: the lanes together are the payload, each rank of a host carries as much as the
// others, and a payload with one part for each rank of a host is cut at these parts.
TEST(MakeLanes, AnyHosts_WholePayloadEvenlyCarried) {
  for (const std::string hosts :
       {"a", "ab", "abb", "aaab", "abab", "aaabbc", "aaabb", "abcd", "aaaabbbcc", "abbbbbbb"}) {
    const HostLayout layout = LayoutOf(hosts);
    const std::vector<Lane> lanes = MakeLanes(layout);
    for (int host = 0; host < static_cast<int>(layout.hosts.size()); ++host) {
      for (const int64_t part : {0, 1, 5, 1000}) {
        const int64_t count = part * layout.ranks_on(host);
        std::map<int, int64_t> carried;
        int64_t at = 0;
        for (const Lane& lane : lanes) {
          const auto [first, last] = lane.Of(count);
          EXPECT_EQ(first, at) << hosts;
          at = last;
          const int rank = lane.ranks[host];
          EXPECT_EQ(layout.host_of[rank], host);
          EXPECT_GE(first, layout.local_of[rank] * part) << hosts;
          EXPECT_LE(last, (layout.local_of[rank] + 1) * part) << hosts;
          carried[rank] += last - first;
        }
        EXPECT_EQ(at, count);
        for (const int rank : layout.hosts[host]) EXPECT_EQ(carried[rank], part) << hosts;
      }
    }
  }
}

TEST(ShareOf, SharesAreTheWhole) {
  for (const int64_t count : {0, 1, 2, 3, 100}) {
    int64_t at = 0;
    for (int host = 0; host < 3; ++host) {
      EXPECT_EQ(ShareOf(count, host, 3).first, at);
      at = ShareOf(count, host, 3).second;
    }
    EXPECT_EQ(at, count);
  }
}

}  // namespace
}  // namespace muster
