#include "agent/newcomers.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::agent {
namespace {

v1::Member Seated(const std::string& host, uint64_t incarnation,
                  v1::WorkerState state = v1::WORKER_STATE_RUNNING) {
  v1::Member machine;
  machine.set_rank(0);
  machine.set_host(host);
  machine.set_incarnation(incarnation);
  machine.set_state(state);
  return machine;
}
v1::Member Waits(const std::string& host, uint64_t incarnation) {
  v1::Member machine = Seated(host, incarnation, v1::WORKER_STATE_JOINING);
  machine.set_rank(-1);
  return machine;
}

class NewcomersTest : public ::testing::Test {
 protected:
  // Returns the incarnation of the machine for which the attempt ends; 0: none.
  uint64_t Look(const std::vector<v1::Member>& machines) {
    const std::optional<v1::Member> chosen =
        newcomers_.Choose(machines, now_, [this](const std::string& host) {
          asked_.push_back(host);
          return host == quarantined_;
        });
    if (!chosen.has_value()) return 0;
    newcomers_.Came(*chosen, machines, now_);
    return chosen->incarnation();
  }

  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  std::string quarantined_;
  std::vector<std::string> asked_;
  Newcomers newcomers_;
};

TEST_F(NewcomersTest, OnlyAMachineThatWaitsForItsFirstPlace_EndsTheAttempt) {
  EXPECT_EQ(Look({}), 0u);
  EXPECT_EQ(Look({Seated("a", 1)}), 0u);
  // It has a seat of the generation that ends, and waits for the next one.
  EXPECT_EQ(Look({Seated("a", 1, v1::WORKER_STATE_JOINING)}), 0u);
  EXPECT_EQ(Look({Seated("a", 1), Waits("b", 2), Waits("c", 3)}), 2u);
}

TEST_F(NewcomersTest, MachineThatGotNoPlace_EndsNoFurtherAttemptWhileItWaits) {
  EXPECT_EQ(Look({Waits("b", 2), Waits("c", 3)}), 2u);
  now_ += absl::Hours(1);
  EXPECT_EQ(Look({Waits("b", 2), Waits("c", 3)}), 0u);
  EXPECT_EQ(Look({Waits("b", 2), Waits("c", 3), Waits("d", 4)}), 4u);
  // It has given up, and asks again.
  EXPECT_EQ(Look({Waits("b", 2)}), 0u);
  EXPECT_EQ(Look({Waits("b", 2), Waits("c", 3)}), 3u);
}

TEST_F(NewcomersTest, LaunchThatKeepsStarting_EndsAttemptsLessAndLessOften) {
  uint64_t incarnation = 1;
  EXPECT_EQ(Look({Waits("b", incarnation)}), incarnation);
  for (absl::Duration pause = Newcomers::kFirstPause; pause < Newcomers::kLongestPause;
       pause *= 2) {
    ++incarnation;
    now_ += pause - absl::Nanoseconds(1);
    EXPECT_EQ(Look({Waits("b", incarnation)}), 0u) << pause;
    EXPECT_EQ(Look({Waits("other host", 1000 + incarnation)}), 1000 + incarnation);
    now_ += absl::Nanoseconds(1);
    EXPECT_EQ(Look({Waits("b", incarnation)}), incarnation) << pause;
  }
  for (int i = 0; i < 2; ++i) {
    ++incarnation;
    now_ += Newcomers::kLongestPause - absl::Nanoseconds(1);
    EXPECT_EQ(Look({Waits("b", incarnation)}), 0u);
    now_ += absl::Nanoseconds(1);
    EXPECT_EQ(Look({Waits("b", incarnation)}), incarnation);
  }
}

// Two launches on one host.
TEST_F(NewcomersTest, MachineThatCameStillRuns_NextFromItsHostNeedNotWait) {
  EXPECT_EQ(Look({Waits("b", 2)}), 2u);
  EXPECT_EQ(Look({Seated("b", 2), Waits("b", 3)}), 3u);
  EXPECT_EQ(Look({Seated("b", 3, v1::WORKER_STATE_LOST), Waits("b", 4)}), 0u);
  now_ += Newcomers::kFirstPause;
  EXPECT_EQ(Look({Waits("b", 4)}), 4u) << "the pause has not doubled";
}

TEST_F(NewcomersTest, HostInQuarantine_IsPassedOverAndAskedAboutOncePerLook) {
  quarantined_ = "b";
  EXPECT_EQ(Look({Waits("b", 2), Waits("b", 3), Waits("c", 4), Waits("b", 5)}), 4u);
  EXPECT_EQ(asked_, (std::vector<std::string>{"b", "c"}));
  quarantined_ = "";
  EXPECT_EQ(Look({Waits("b", 6)}), 6u);
}

}  // namespace
}  // namespace muster::agent
