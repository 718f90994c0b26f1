#include "agent/end_watch.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "agent/attempt_state.h"
#include "agent/fake_op_sender.h"
#include "base/mutex.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {
namespace {

// Keeps the last answer's receiver even if it is forgotten, because the answer is on its way.
class KeepingSender final : public OpSender {
 public:
  uint64_t Submit(v1::Op, Done done) override {
    MutexLock lock(&mu_);
    done_ = std::move(done);
    changed_.SignalAll();
    return 1;
  }
  void Forget(uint64_t) override {}
  Done Take() {
    MutexLock lock(&mu_);
    while (!done_) changed_.Wait(&mu_);
    return std::exchange(done_, nullptr);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  Done done_ ABSL_GUARDED_BY(mu_);
};

class EndWatchTest : public ::testing::Test {
 protected:
  void Start(const std::string& key = "gen/1/end") {
    attempt_->Begin([this](AttemptEnd end) {
      end_ = std::move(end);
      ended_.Notify();
    });
    v1::Op wait;
    wait.mutable_wait()->add_keys(key);
    watch_->Start(std::move(wait));
  }
  static v1::OpResult Written(const std::string& value) {
    v1::OpResult result;
    result.mutable_wait()->add_kvs()->set_value(value);
    return result;
  }
  static v1::OpResult Error(v1::ErrorReason reason, absl::StatusCode code) {
    v1::OpResult result;
    result.mutable_error()->set_code(static_cast<int>(code));
    result.mutable_error()->set_message("it has ended");
    result.mutable_error()->mutable_detail()->set_reason(reason);
    return result;
  }

  FakeOpSender sender_;
  AttemptEnd end_;
  Notification ended_;
  std::shared_ptr<AttemptState> attempt_ = std::make_shared<AttemptState>();
  std::unique_ptr<EndWatch> watch_ =
      std::make_unique<EndWatch>(attempt_, &sender_, /*elastic=*/true);
};

TEST_F(EndWatchTest, AnotherAgentWritesTheEnd_AttemptEndsWithItsWords) {
  Start();
  EXPECT_EQ(sender_.WaitForOp().wait().keys(0), "gen/1/end");
  sender_.Answer(Written(R"({"why": "rank 0 died"})"));
  ended_.WaitForNotification();
  EXPECT_EQ(end_.why, "rank 0 died");
}

TEST_F(EndWatchTest, CallTimesOutOrCoordinatorIsOverloaded_ItWaitsAgain) {
  Start();
  for (const absl::StatusCode code :
       {absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable}) {
    sender_.WaitForOp();
    sender_.Answer(Error(code == absl::StatusCode::kDeadlineExceeded ? v1::ERROR_REASON_WAIT_TIMEOUT
                                                                     : v1::ERROR_REASON_UNSPECIFIED,
                         code));
  }
  EXPECT_EQ(sender_.WaitForOp().wait().keys(0), "gen/1/end");
  EXPECT_FALSE(attempt_->ended().has_value());
}

// The directive that announces the end of a generation has the cause.
TEST_F(EndWatchTest, GenerationHasEnded_IsBelievedTheSecondTime) {
  Start();
  sender_.WaitForOp();
  sender_.Answer(Error(v1::ERROR_REASON_GENERATION_ENDED, absl::StatusCode::kFailedPrecondition));
  EXPECT_FALSE(attempt_->ended().has_value());
  sender_.WaitForOp();
  sender_.Answer(Error(v1::ERROR_REASON_GENERATION_ENDED, absl::StatusCode::kFailedPrecondition));
  ended_.WaitForNotification();
  EXPECT_EQ(end_.why, "it has ended");
  EXPECT_EQ(end_.cause, AttemptEnd::Cause::kMachineLeft);
}

TEST_F(EndWatchTest, CutOffOrRefusedOtherwise_AttemptEnds) {
  Start();
  sender_.WaitForOp();
  sender_.Answer(Error(v1::ERROR_REASON_LEASE_EXPIRED, absl::StatusCode::kFailedPrecondition));
  ended_.WaitForNotification();
  EXPECT_EQ(end_.cause, AttemptEnd::Cause::kMachineLost);
  watch_->Stop();
  Start();
  sender_.WaitForOp();
  sender_.Answer(Error(v1::ERROR_REASON_UNSPECIFIED, absl::StatusCode::kPermissionDenied));
  EXPECT_EQ(attempt_->ended()->cause, AttemptEnd::Cause::kFailed);
}

TEST_F(EndWatchTest, AnswerAfterTheWatch_EndsNoLaterAttempt) {
  KeepingSender sender;
  watch_ = std::make_unique<EndWatch>(attempt_, &sender, /*elastic=*/true);
  Start();
  const OpSender::Done first = sender.Take();
  watch_->Stop();
  Start("gen/2/end");
  const OpSender::Done second = sender.Take();
  first(Written(R"({"why": "of the attempt before"})"));
  EXPECT_FALSE(attempt_->ended().has_value());
  watch_.reset();
  second(Written(R"({"why": "of nobody"})"));
  first(Error(v1::ERROR_REASON_WAIT_TIMEOUT, absl::StatusCode::kDeadlineExceeded));
  EXPECT_FALSE(attempt_->ended().has_value());
}

TEST_F(EndWatchTest, Stop_ForgetsTheOperation) {
  Start();
  sender_.WaitForOp();
  watch_.reset();
  EXPECT_TRUE(sender_.ops().empty());
}

}  // namespace
}  // namespace muster::agent
