#include "worker/checkpoint/memory_mirror.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<int> Targets(const std::vector<std::string>& nodes) {
  std::vector<int> targets;
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    const auto peers = PlanMirror(nodes, static_cast<int>(rank));
    targets.push_back(peers.ok() ? peers->to : -1);
  }
  return targets;
}

TEST(PlanMirror, NodesOfEqualSize_MakeARing) {
  EXPECT_THAT(Targets({"a", "a", "b", "b", "c", "c"}), ElementsAre(2, 3, 4, 5, 0, 1));
  // Ranks need not be in the order of nodes.
  EXPECT_THAT(Targets({"b", "a", "b", "a"}), ElementsAre(1, 0, 3, 2));
  EXPECT_THAT(PlanMirror({"a", "b", "c"}, 1)->from, ElementsAre(0));
}

TEST(PlanMirror, NodesOfDifferentSize_ShareWhatComes) {
  const std::vector<std::string> nodes = {"a", "a", "a", "b"};
  EXPECT_THAT(Targets(nodes), ElementsAre(3, 3, 3, 0));
  EXPECT_THAT(PlanMirror(nodes, 3)->from, ElementsAre(0, 1, 2));
  EXPECT_THAT(PlanMirror(nodes, 1)->from, IsEmpty());
}

TEST(PlanMirror, OneNodeOrTooManyForARank_IsRefusedForAll) {
  EXPECT_TRUE(absl::IsFailedPrecondition(PlanMirror({"a", "a"}, 0).status()));
  std::vector<std::string> nodes(MemoryMirror::kMostSources, "a");
  nodes.emplace_back("b");
  EXPECT_TRUE(PlanMirror(nodes, 0).ok());
  nodes.emplace_back("a");
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    const auto plan = PlanMirror(nodes, static_cast<int>(rank));
    EXPECT_TRUE(absl::IsFailedPrecondition(plan.status()));
    EXPECT_THAT(plan.status().message(),
                HasSubstr(absl::StrCat("the saves of ", MemoryMirror::kMostSources + 1)));
  }
}

}  // namespace
}  // namespace muster
