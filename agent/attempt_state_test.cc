#include "agent/attempt_state.h"

#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using Until = AttemptState::Until;

class AttemptStateTest : public ::testing::Test {
 protected:
  void Begin() {
    state_.Begin([this](AttemptEnd end) { told_.push_back(end.why); });
  }
  absl::Status Await(Until until, absl::Time deadline = absl::InfiniteFuture()) {
    AttemptState::Answer answer;
    return state_.Await(&answer, deadline, until).status();
  }

  std::vector<std::string> told_;
  AttemptState state_;
};

TEST_F(AttemptStateTest, SeveralEnds_FirstCountsAndIsTold) {
  Begin();
  EXPECT_FALSE(state_.ended().has_value());
  state_.End({"first", {}});
  state_.End({"second", {}});
  EXPECT_THAT(told_, ElementsAre("first"));
  EXPECT_EQ(state_.ended()->why, "first");
  Begin();
  EXPECT_FALSE(state_.ended().has_value()) << "another attempt";
  state_.End({"third", {}});
  EXPECT_THAT(told_, ElementsAre("first", "third"));
}

TEST_F(AttemptStateTest, ListenerIsForgotten_EndIsKnownButNotTold) {
  Begin();
  state_.ForgetListener();
  state_.End({"late", {}});
  EXPECT_THAT(told_, ElementsAre());
  EXPECT_EQ(state_.ended()->why, "late");
}

TEST_F(AttemptStateTest, Interrupt_EndsCallsOfTheAttemptWithoutACause) {
  Begin();
  std::thread other([this] { state_.Interrupt(); });
  EXPECT_EQ(Await(Until::kEnded).code(), absl::StatusCode::kAborted);
  other.join();
  EXPECT_THAT(told_, ElementsAre());
  EXPECT_EQ(state_.ended()->why, "");
}

TEST_F(AttemptStateTest, Await_ReturnsEarlyOnlyForWhatItsCallerNames) {
  state_.End({"end", {}});
  EXPECT_EQ(Await(Until::kEnded).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Await(Until::kCancelled, absl::InfinitePast()).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(state_.cancelled());
  std::thread user([this] { state_.Cancel(); });
  EXPECT_EQ(Await(Until::kCancelled).code(), absl::StatusCode::kCancelled);
  user.join();
  EXPECT_TRUE(state_.cancelled());
  EXPECT_EQ(Await(Until::kEnded).code(), absl::StatusCode::kCancelled) << "the stronger reason";
  EXPECT_EQ(Await(Until::kAnswered, absl::InfinitePast()).code(),
            absl::StatusCode::kDeadlineExceeded);
  // These would never return otherwise.
  state_.Pause(absl::InfiniteDuration(), Until::kCancelled);
  state_.Pause(absl::InfiniteDuration(), Until::kEnded);
}

TEST_F(AttemptStateTest, AnswerThatHasCome_IsTakenWhateverElseHappened) {
  state_.Cancel();
  AttemptState::Answer answer;
  v1::OpResult result;
  result.mutable_error()->set_message("refused");
  state_.Deliver(result, &answer);
  const absl::StatusOr<v1::OpResult> taken =
      state_.Await(&answer, absl::InfinitePast(), Until::kEnded);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->error().message(), "refused");
}

TEST_F(AttemptStateTest, AnswerThatComesLater_EndsTheWait) {
  AttemptState::Answer answer;
  std::thread coordinator([&] { state_.Deliver(v1::OpResult(), &answer); });
  EXPECT_TRUE(state_.Await(&answer, absl::InfiniteFuture(), Until::kAnswered).ok());
  coordinator.join();
}

}  // namespace
}  // namespace muster::agent
