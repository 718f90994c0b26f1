#include "coordinator/service/open_calls.h"

#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

class OpenCallsTest : public ::testing::Test {
 protected:
  OpenCallsTest() {
    limits_.calls = 3;
    limits_.calls_of_agent = 2;
    limits_.held_bytes_of_agent = 4096;
    limits_.held_bytes_of_callers = 4096;
    limits_.answer_bytes = 400;
    calls_ = std::make_unique<OpenCalls>(limits_);
    join_.mutable_join();
    read_.mutable_get_members();
    v1::Hello hello;
    hello.set_node("node");
    agent_ = std::make_shared<AttachedAgent>(hello, nullptr, 1000);
  }
  // Returns the error that the call is refused with; empty: it is not.
  std::string Add(CallId id, const v1::Op& op, size_t bytes, bool of_agent = false) {
    calls_->Add(id, op, {.sink = nullptr, .session = of_agent ? agent_ : nullptr, .bytes = bytes},
                kNow);
    const std::shared_ptr<const Answer> refusal = calls_->Refusal(id, op);
    return refusal == nullptr ? "" : refusal->Parse().error().message();
  }
  v1::OpResult Fit(const OpenCall& call, const v1::OpResult& result) {
    return calls_->Fit(call, std::make_shared<Answer>(result))->Parse();
  }

  RunnerLimits limits_;
  std::unique_ptr<OpenCalls> calls_;
  std::shared_ptr<AttachedAgent> agent_;
  v1::Op join_, read_;
};

TEST_F(OpenCallsTest, OneTooMany_IsRefusedUntilOneIsAnswered) {
  for (CallId id = 1; id <= 3; ++id) EXPECT_EQ(Add(id, read_, 10), "");
  EXPECT_THAT(Add(4, read_, 10), HasSubstr("too many calls"));
  EXPECT_TRUE(calls_->Remove(4).has_value());
  EXPECT_TRUE(calls_->Remove(1).has_value());
  EXPECT_FALSE(calls_->Remove(1).has_value());
  EXPECT_EQ(Add(5, read_, 10), "");
  EXPECT_THAT(calls_->Ids(), UnorderedElementsAre(2, 3, 5));
}

TEST_F(OpenCallsTest, AgentsHaveAShareOfTheirOwn) {
  EXPECT_EQ(Add(1, read_, 10, true), "");
  EXPECT_EQ(Add(2, read_, 10, true), "");
  EXPECT_THAT(Add(3, read_, 10, true), HasSubstr("too many calls"));
  EXPECT_THAT(agent_->calls, UnorderedElementsAre(1, 2, 3));
  calls_->Remove(3);
  EXPECT_EQ(Add(4, read_, 10), "");
  EXPECT_EQ(calls_->size(), 3u);
  EXPECT_EQ(calls_->held_bytes(true), 20u);
  EXPECT_EQ(calls_->held_bytes(false), 10u);
  calls_->Remove(1);
  calls_->Remove(2);
  EXPECT_THAT(agent_->calls, IsEmpty());
  EXPECT_EQ(agent_->held_bytes, 0u);
}

TEST_F(OpenCallsTest, TooManyBytes_RefusesLargeCallsThatMayBeHeldFirst) {
  EXPECT_EQ(Add(1, join_, 4000), "");
  EXPECT_THAT(Add(2, join_, 3000), HasSubstr("too many bytes"));
  calls_->Remove(2);
  EXPECT_EQ(Add(2, join_, 2000), "");  // small: to twice as much
  EXPECT_EQ(Add(3, read_, 9000), "");  // it waits for no other call
}

TEST_F(OpenCallsTest, LargeAnswer_BecomesAnErrorThatSaysWhetherItWasDone) {
  v1::OpResult large;
  large.mutable_txn()->mutable_header()->set_revision(17);
  large.mutable_txn()->add_results()->add_kvs()->set_value(std::string(500, 'x'));
  OpenCall call;
  EXPECT_EQ(Fit(call, large).error().detail().reason(), v1::ERROR_REASON_LIMIT);
  call.changes = true;
  const v1::OpError error = Fit(call, large).error();
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_RESULT_TOO_LARGE);
  EXPECT_EQ(error.detail().revision(), 17u);
  large.mutable_txn()->clear_results();
  EXPECT_TRUE(Fit(call, large).has_txn());
}

TEST_F(OpenCallsTest, LargeError_LosesItsCulprits) {
  v1::OpResult failed;
  failed.mutable_error()->set_message("late");
  v1::ErrorDetail* const detail = failed.mutable_error()->mutable_detail();
  detail->add_culprits()->set_native_stack(std::string(500, 'x'));
  v1::OpError error = Fit({}, failed).error();
  EXPECT_EQ(error.message(), "late");
  EXPECT_EQ(error.detail().culprits_size(), 1);
  detail->add_culprits()->set_host(std::string(500, 'h'));
  error = Fit({}, failed).error();
  EXPECT_EQ(error.message(), "late");
  EXPECT_EQ(error.detail().culprits_size(), 0);
}

TEST_F(OpenCallsTest, Answered_CountsFromItsTurn) {
  Add(1, join_, 10);
  calls_->Answered(*calls_->Remove(1), kNow + absl::Seconds(2));
  EXPECT_EQ(calls_->seconds(v1::Op::kJoin).SumSeconds(), 2.0);
  EXPECT_EQ(calls_->seconds(v1::Op::kLeave).SumSeconds(), 0.0);
}

}  // namespace
}  // namespace muster::coordinator
