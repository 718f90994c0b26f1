#include "coordinator/stack_calls.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const absl::Time kStart = absl::FromUnixSeconds(1000);

std::vector<CallId> Calls(const std::vector<StackCalls::Done>& done) {
  std::vector<CallId> calls;
  for (const StackCalls::Done& one : done) calls.push_back(one.call);
  return calls;
}

TEST(StackCalls, LastAnswer_EndsTheCall) {
  StackCalls calls;
  EXPECT_THAT(calls.Add(1, kStart, 64, {{.rank = 0, .query = 10}, {.rank = 1, .query = 11}}),
              IsEmpty());
  EXPECT_THAT(calls.Answered(10), IsEmpty());
  EXPECT_THAT(calls.Answered(10), IsEmpty());  // repeated
  EXPECT_THAT(calls.Answered(99), IsEmpty());
  const std::vector<StackCalls::Done> done = calls.Answered(11);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].call, 1u);
  EXPECT_EQ(done[0].next, 64);
  EXPECT_TRUE(done[0].asked[0].answered && done[0].asked[1].answered);
  EXPECT_EQ(calls.NextDeadline(), absl::InfiniteFuture());
}

TEST(StackCalls, NobodyToAsk_EndsAtOnceAndIsNotAnswered) {
  StackCalls calls;
  const std::vector<StackCalls::Done> done = calls.Add(1, kStart, 0, {{.rank = 3, .query = 0}});
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].asked[0].answered);
  EXPECT_THAT(calls.Answered(0), IsEmpty());
}

TEST(StackCalls, Deadline_EndsWithWhatHasCome) {
  StackCalls calls;
  calls.Add(1, kStart + absl::Seconds(2), 0, {{.rank = 0, .query = 1}, {.rank = 1, .query = 2}});
  calls.Add(2, kStart + absl::Seconds(1), 0, {{.rank = 0, .query = 3}});
  EXPECT_EQ(calls.NextDeadline(), kStart + absl::Seconds(1));
  calls.Answered(2);
  EXPECT_THAT(Calls(calls.TakeExpired(kStart + absl::Seconds(1))), ElementsAre(2u));
  const std::vector<StackCalls::Done> done = calls.TakeExpired(kStart + absl::Seconds(2));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].asked[0].answered);
  EXPECT_TRUE(done[0].asked[1].answered);
}

TEST(StackCalls, Full_UntilACallEndsOrItsCallerIsGone) {
  StackCalls calls;
  for (CallId call = 1; call <= StackCalls::kMaxOpen; ++call) {
    EXPECT_FALSE(calls.full());
    calls.Add(call, kStart, 0, {{.rank = 0, .query = call}});
  }
  EXPECT_TRUE(calls.full());
  calls.Abandon(1);
  EXPECT_FALSE(calls.full());
  EXPECT_THAT(calls.Answered(1), IsEmpty());
  EXPECT_EQ(calls.TakeAll().size(), StackCalls::kMaxOpen - 1);
  EXPECT_THAT(calls.TakeAll(), IsEmpty());
}

}  // namespace
}  // namespace muster::coordinator
