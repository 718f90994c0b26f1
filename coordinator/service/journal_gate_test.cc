#include "coordinator/service/journal_gate.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;

class JournalGateTest : public ::testing::Test {
 protected:
  JournalGateTest() {
    limits_.journal_backlog_bytes = 100;
    gate_ = std::make_unique<JournalGate>(limits_);
    gate_->Begin(10);
    write_.mutable_join();
    ephemeral_.mutable_arrive();
    read_.mutable_get_members();
  }
  bool Progress(uint64_t revision, absl::Status status = absl::OkStatus()) {
    Journal::Progress progress;
    progress.durable_revision = revision;
    progress.status = std::move(status);
    return gate_->OnProgress(progress);
  }
  std::vector<CallId> Released() {
    std::vector<CallId> calls;
    while (const auto reply = gate_->NextReply()) calls.push_back(reply->call);
    return calls;
  }
  v1::ErrorReason Reason(const v1::Op& op) {
    const std::shared_ptr<const Answer> refusal = gate_->Refusal(op);
    return refusal == nullptr ? v1::ERROR_REASON_UNSPECIFIED
                              : refusal->Parse().error().detail().reason();
  }

  RunnerLimits limits_;
  std::unique_ptr<JournalGate> gate_;
  v1::Op write_, ephemeral_, read_;
};

TEST_F(JournalGateTest, HeldAnswers_GoOutByRevisionOnceDurable) {
  EXPECT_TRUE(gate_->IsDurable(10));
  EXPECT_FALSE(gate_->IsDurable(11));
  gate_->Hold({.call = 3, .answer = nullptr, .durable_revision = 13});
  gate_->Hold({.call = 1, .answer = nullptr, .durable_revision = 11});
  gate_->Hold({.call = 2, .answer = nullptr, .durable_revision = 11});
  gate_->Hold(NodeDirective{.node = "a", .directive = nullptr, .durable_revision = 12});
  EXPECT_THAT(Released(), ElementsAre());
  EXPECT_FALSE(Progress(12));
  EXPECT_THAT(Released(), ElementsAre(1, 2));
  EXPECT_EQ(gate_->NextDirective()->node, "a");
  EXPECT_FALSE(gate_->NextDirective().has_value());
  EXPECT_TRUE(gate_->HoldsAny());
  EXPECT_FALSE(Progress(11));  // late news
  EXPECT_FALSE(Progress(13));
  EXPECT_THAT(Released(), ElementsAre(3));
  EXPECT_FALSE(gate_->HoldsAny());
}

TEST_F(JournalGateTest, FailedJournal_RefusesWhatNeedsItAndGivesUpAnswers) {
  gate_->Hold({.call = 1, .answer = nullptr, .durable_revision = 11});
  EXPECT_TRUE(Progress(10, absl::UnavailableError("I/O error")));
  EXPECT_FALSE(Progress(10, absl::UnavailableError("I/O error")));
  EXPECT_EQ(Reason(write_), v1::ERROR_REASON_JOURNAL_FAILED);
  EXPECT_EQ(Reason(read_), v1::ERROR_REASON_UNSPECIFIED);
  const std::vector<Reply> given_up = gate_->TakeReplies();
  ASSERT_EQ(given_up.size(), 1u);
  EXPECT_EQ(given_up[0].call, 1u);
  EXPECT_FALSE(gate_->HoldsAny());
  EXPECT_TRUE(Progress(11));
  EXPECT_EQ(Reason(write_), v1::ERROR_REASON_UNSPECIFIED);
}

TEST_F(JournalGateTest, DirectiveThatIsRepeated_IsHeldOnce) {
  // Each beat of an agent brings it again while the disk is full.
  const auto ended = [](const std::string& job, uint64_t generation) {
    auto directive = std::make_shared<v1::Directive>();
    directive->mutable_generation_ended()->set_job_id(job);
    directive->mutable_generation_ended()->set_generation(generation);
    return directive;
  };
  const auto kill = [](const std::string& worker, uint64_t incarnation) {
    auto directive = std::make_shared<v1::Directive>();
    directive->mutable_kill_worker()->set_job_id("j");
    directive->mutable_kill_worker()->set_worker_id(worker);
    directive->mutable_kill_worker()->set_incarnation(incarnation);
    return directive;
  };
  for (uint64_t revision = 11; revision < 31; ++revision) {
    for (const char* node : {"a", "b"}) {
      gate_->Hold(NodeDirective{node, ended("j", 1), revision});
      gate_->Hold(NodeDirective{node, ended("j", 2), revision});
      gate_->Hold(NodeDirective{node, ended("k", 1), revision});
      gate_->Hold(NodeDirective{node, kill("w", 7), revision});
      gate_->Hold(NodeDirective{node, kill("w", 8), revision});
    }
  }
  const auto released = [this] {
    int count = 0;
    while (gate_->NextDirective().has_value()) ++count;
    return count;
  };
  Progress(11);
  EXPECT_EQ(released(), 10);
  EXPECT_FALSE(gate_->HoldsAny());
  // A directive that has gone out may be sent again.
  gate_->Hold(NodeDirective{"a", ended("j", 1), 40});
  gate_->Hold(NodeDirective{"a", ended("j", 1), 41});
  gate_->Clear();
  EXPECT_FALSE(gate_->HoldsAny());
  gate_->Hold(NodeDirective{"a", ended("j", 1), 42});
  Progress(42);
  EXPECT_EQ(released(), 1);
}

TEST_F(JournalGateTest, SlowDisk_RefusesWritesAtFirstAndThenAllChanges) {
  gate_->Sent(11, 101);
  EXPECT_EQ(Reason(write_), v1::ERROR_REASON_OVERLOADED);
  EXPECT_EQ(Reason(ephemeral_), v1::ERROR_REASON_UNSPECIFIED);
  gate_->Sent(12, 100);
  EXPECT_EQ(gate_->backlog_bytes(), 201u);
  EXPECT_EQ(Reason(ephemeral_), v1::ERROR_REASON_OVERLOADED);
  EXPECT_EQ(Reason(read_), v1::ERROR_REASON_UNSPECIFIED);
  Progress(11);
  EXPECT_EQ(gate_->backlog_bytes(), 100u);
  EXPECT_EQ(Reason(write_), v1::ERROR_REASON_UNSPECIFIED);
}

}  // namespace
}  // namespace muster::coordinator
