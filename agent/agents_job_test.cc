#include "agent/agents_job.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "agent/attempt_state.h"
#include "agent/op_sender.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Until = AgentsJob::Until;

// Answers each operation from within Submit, or never.
class AnsweringSender final : public OpSender {
 public:
  uint64_t Submit(v1::Op op, Done done) override {
    v1::OpResult result;
    const bool answered = answer && answer(op, &result);
    ops.push_back(std::move(op));
    if (answered) done(result);
    return ops.size();
  }
  void Forget(uint64_t op_id) override { forgotten.push_back(op_id); }

  std::function<bool(const v1::Op&, v1::OpResult*)> answer;
  std::vector<v1::Op> ops;
  std::vector<uint64_t> forgotten;
};

class AgentsJobTest : public ::testing::Test {
 protected:
  AgentsJobTest() {
    v1::JoinReply seat;
    seat.set_generation(3);
    seat.set_generation_prefix("gen/3/");
    job_.Sit(seat);
  }
  void Refuse(absl::StatusCode code) {
    sender_.answer = [code](const v1::Op&, v1::OpResult* result) {
      result->mutable_error()->set_code(static_cast<int>(code));
      return true;
    };
  }
  // The key "end" exists, with this value.
  void AnswerThatItEnded(const std::string& value) {
    sender_.answer = [value](const v1::Op& op, v1::OpResult* result) {
      EXPECT_EQ(op.txn().otherwise(0).get().key(), "gen/3/end");
      result->mutable_txn()->set_succeeded(false);
      result->mutable_txn()->add_results()->add_kvs()->set_value(value);
      return true;
    };
  }
  void AnswerThatItWasWritten() {
    sender_.answer = [](const v1::Op&, v1::OpResult* result) {
      result->mutable_txn()->set_succeeded(true);
      return true;
    };
  }
  std::vector<std::string> UnlessKeys() const {
    std::vector<std::string> keys;
    for (const v1::Compare& one : sender_.ops.back().txn().compares()) {
      EXPECT_EQ(one.target(), v1::Compare::EXISTS);
      EXPECT_EQ(one.number(), 0);
      keys.push_back(one.key());
    }
    return keys;
  }

  AnsweringSender sender_;
  std::shared_ptr<AttemptState> attempt_ = std::make_shared<AttemptState>();
  AgentsJob job_{
      {.coordinator = "10.0.0.1:29400", .job = "job", .worker_id = "node1", .incarnation = 7},
      &sender_,
      attempt_};
};

TEST_F(AgentsJobTest, Fence_NamesTheSeatAndANewRequest) {
  const v1::Fence first = job_.Fence(), second = job_.Fence();
  EXPECT_EQ(first.job_id(), "job.agents");
  EXPECT_EQ(first.worker_id(), "node1");
  EXPECT_EQ(first.incarnation(), 7u);
  EXPECT_EQ(first.generation(), 3u);
  EXPECT_NE(first.request_id(), second.request_id());
}

TEST_F(AgentsJobTest, NoAnswer_SaysFromWhomAndDropsTheOperationUnlessItIsHeld) {
  EXPECT_EQ(job_.Call(v1::Op(), absl::ZeroDuration(), Until::kCancelled).status(),
            absl::UnavailableError("no answer from the coordinator at 10.0.0.1:29400 within 0"));
  EXPECT_THAT(sender_.forgotten, ElementsAre(1u));
  EXPECT_FALSE(
      job_.Call(v1::Op(), absl::ZeroDuration(), Until::kCancelled, AgentsJob::Late::kHeld).ok());
  EXPECT_THAT(sender_.forgotten, ElementsAre(1u)) << "it may be carried out later";
}

TEST_F(AgentsJobTest, LaunchIsCancelledOrTheAttemptEnds_CallReturns) {
  attempt_->End({"why", {}});
  EXPECT_EQ(job_.Call(v1::Op(), absl::InfiniteDuration(), Until::kEnded).status().code(),
            absl::StatusCode::kAborted);
  attempt_->Cancel();
  EXPECT_EQ(job_.Call(v1::Op(), absl::InfiniteDuration(), Until::kCancelled).status().code(),
            absl::StatusCode::kCancelled);
  Refuse(absl::StatusCode::kNotFound);
  EXPECT_EQ(job_.Call(v1::Op(), absl::InfiniteDuration(), Until::kAnswered).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(AgentsJobTest, CallUnless_AsksWhileItWaits) {
  int asked = 0;
  const auto third_time = [&asked] { return ++asked == 3; };
  EXPECT_FALSE(job_.CallUnless(third_time, absl::ZeroDuration(), v1::Op(), absl::InfiniteDuration())
                   .has_value());
  EXPECT_EQ(asked, 3);
  EXPECT_THAT(sender_.forgotten, ElementsAre(1u));

  const auto never = [] { return false; };
  auto result = job_.CallUnless(never, absl::ZeroDuration(), v1::Op(), absl::ZeroDuration());
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->status().code(), absl::StatusCode::kUnavailable);
  AnswerThatItWasWritten();
  result = job_.CallUnless(never, absl::ZeroDuration(), v1::Op(), absl::InfiniteDuration());
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->ok());
}

TEST_F(AgentsJobTest, Machines_ComeInPages) {
  sender_.answer = [](const v1::Op& op, v1::OpResult* result) {
    const int first = op.get_members().first();
    result->mutable_get_members()->add_members()->set_worker_id(absl::StrCat("node", first));
    if (first < 2) result->mutable_get_members()->set_next(first + 1);
    return true;
  };
  const absl::StatusOr<std::vector<v1::Member>> machines = job_.Machines(Until::kCancelled);
  ASSERT_TRUE(machines.ok()) << machines.status();
  ASSERT_EQ(machines->size(), 3u);
  EXPECT_EQ(machines->back().worker_id(), "node2");
  // A coordinator that names the same page again is not asked forever.
  sender_.answer = [](const v1::Op& op, v1::OpResult* result) {
    result->mutable_get_members()->set_next(op.get_members().first());
    return true;
  };
  EXPECT_TRUE(job_.Machines(Until::kCancelled).ok());
}

TEST_F(AgentsJobTest, Finished_IsEmptyUnknownOrTheKey) {
  Refuse(absl::StatusCode::kNotFound);
  EXPECT_EQ(job_.Finished(), "") << "there is no such job yet";
  Refuse(absl::StatusCode::kInternal);
  EXPECT_EQ(job_.Finished(), std::nullopt);
  AnswerThatItWasWritten();  // without the result of the get
  EXPECT_EQ(job_.Finished(), std::nullopt);
  sender_.answer = [](const v1::Op& op, v1::OpResult* result) {
    EXPECT_EQ(op.txn().then(0).get().key(), "finished");
    EXPECT_EQ(op.txn().fence().generation(), 0u) << "it needs no seat";
    result->mutable_txn()->add_results()->add_kvs()->set_value("gen/3/");
    return true;
  };
  EXPECT_EQ(job_.Finished(), "gen/3/");
  AnswerThatItWasWritten();
  job_.WriteFinished();
  EXPECT_EQ(sender_.ops.back().txn().then(0).put().value(), "gen/3/");
}

TEST_F(AgentsJobTest, AllSettings_AreThoseOfTheGenerations) {
  sender_.answer = [](const v1::Op& op, v1::OpResult* result) {
    EXPECT_TRUE(op.txn().then(0).get().prefix());
    v1::KvOpResult* const got = result->mutable_txn()->add_results();
    for (const char* const key : {"gen/2/settings", "gen/3/count/1", "gen/3/settings"}) {
      v1::KeyValue* const kv = got->add_kvs();
      kv->set_key(key);
      kv->set_value(absl::StrCat("value of ", key));
    }
    return true;
  };
  const absl::StatusOr<std::vector<std::string>> all = job_.AllSettings();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT(*all, ElementsAre("value of gen/2/settings", "value of gen/3/settings"));
}

TEST_F(AgentsJobTest, Done_IsNotWrittenInAnAttemptThatEnded) {
  AnswerThatItWasWritten();
  EXPECT_TRUE(job_.WriteDone().ok());
  EXPECT_EQ(sender_.ops.back().txn().then(0).put().key(), "gen/3/done");
  EXPECT_THAT(UnlessKeys(), ElementsAre("gen/3/end"));
  EXPECT_FALSE(attempt_->ended().has_value());
  AnswerThatItEnded(R"({"why": "rank 0 died"})");
  EXPECT_EQ(job_.WriteDone().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(attempt_->ended()->why, "rank 0 died");
}

TEST_F(AgentsJobTest, SeveralAgentsWriteTheEnd_AllReturnTheFirst) {
  const AttemptEnd end = {"rank 1 died", {}};
  AnswerThatItWasWritten();
  EXPECT_EQ(job_.WriteEnd(end, absl::Seconds(1))->why, "rank 1 died");
  EXPECT_EQ(sender_.ops.back().txn().then(0).put().key(), "gen/3/end");
  EXPECT_THAT(sender_.ops.back().txn().then(0).put().value(), HasSubstr("rank 1 died"));
  EXPECT_THAT(UnlessKeys(), ElementsAre("gen/3/end"));
  AnswerThatItEnded(R"({"why": "rank 0 died"})");
  EXPECT_EQ(job_.WriteEnd(end, absl::Seconds(1))->why, "rank 0 died");
  sender_.answer = nullptr;
  EXPECT_EQ(job_.WriteEnd(end, absl::ZeroDuration()).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_THAT(sender_.forgotten, ElementsAre()) << "the others hear of it later";
}

TEST_F(AgentsJobTest, MachineIsDone_AttemptDoesNotEndForANewcomer) {
  const AttemptEnd end = {"another machine has come", {}};
  AnswerThatItWasWritten();
  EXPECT_TRUE(job_.WriteEndUnlessDone(end));
  EXPECT_THAT(UnlessKeys(), ElementsAre("gen/3/end", "gen/3/done"));
  sender_.answer = [](const v1::Op&, v1::OpResult* result) {
    result->mutable_txn()->set_succeeded(false);
    return true;
  };
  EXPECT_FALSE(job_.WriteEndUnlessDone(end));
}

}  // namespace
}  // namespace muster::agent
