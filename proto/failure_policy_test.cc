#include "proto/failure_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(FailurePolicyTest, Text_IsReadOrRefused) {
  const auto policy = ParseFailurePolicy("max_restarts=5,oom=1,node_lost=0");
  ASSERT_TRUE(policy.has_value());
  EXPECT_EQ(policy->max_restarts, 5);
  EXPECT_THAT(policy->class_limits, ElementsAre(Pair("node_lost", 0), Pair("oom", 1)));
  for (const char* const bad :
       {"", "oom", "oom=", "=1", "oom=-1", "oom=1000001", "oom=1,", "user_error=1", "oom=1.5"}) {
    EXPECT_FALSE(ParseFailurePolicy(bad).has_value()) << bad;
  }
}

TEST(FailurePolicyTest, ClassesWithoutATotal_HaveTheRestartsThatThereAre) {
  FailurePolicy policy = *ParseFailurePolicy("oom=1,hang=2,node_lost=7");
  CompletePolicy(&policy);
  EXPECT_EQ(policy.max_restarts, 3);
  EXPECT_THAT(policy.class_limits, ElementsAre(Pair("failed", 0), Pair("hang", 2),
                                               Pair("node_lost", 7), Pair("oom", 1)));
  policy = *ParseFailurePolicy("node_lost=7");
  CompletePolicy(&policy);
  EXPECT_FALSE(policy.max_restarts.has_value()) << "it counts against nothing else";
}

TEST(FailurePolicyTest, Limit_LetsAsManyStartsFollow) {
  const ClassCounts limits = ToClassCounts({{"failed", 1}, {"oom", 0}});
  ClassCounts counts;
  EXPECT_EQ(WhyOverLimit(limits, counts, v1::END_CLASS_OUT_OF_MEMORY),
            "its failure policy allows 0 restarts after OUT_OF_MEMORY");
  EXPECT_EQ(WhyOverLimit(limits, counts, v1::END_CLASS_PEER_FAILED), "");
  CountStart(limits, v1::END_CLASS_PEER_FAILED, &counts);
  EXPECT_EQ(WhyOverLimit(limits, counts, v1::END_CLASS_PROCESS_FAILED),
            "its failure policy allows 1 restart after PROCESS_FAILED");
  // Other classes are not counted.
  CountStart(limits, v1::END_CLASS_HANG, &counts);
  EXPECT_EQ(WhyOverLimit(limits, counts, v1::END_CLASS_HANG), "");
  EXPECT_EQ(counts.size(), 1);
}

}  // namespace
}  // namespace muster
