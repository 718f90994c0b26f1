#include "client/jobs/job_client.h"

#include "client/jobs/fake_job_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;

class JobClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto client = Client::Connect({.address = fake_.address()});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = std::make_unique<Client>(*std::move(client));
  }

  FakeJobService fake_;
  std::unique_ptr<Client> client_;
};

TEST_F(JobClientTest, Submit_AnswerLost_IsRepeatedWithTheSameKey) {
  fake_.Lose(2);
  const auto made = client_->submit({.name = "mnist", .command = {"./train"}, .max_processes = 3});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->job.id, "mnist-1");
  EXPECT_EQ(made->plan.processes, 3);
  const auto calls = fake_.submitted();
  ASSERT_EQ(calls.size(), 3u);
  EXPECT_EQ(calls[0].idempotency_key().size(), 32u);
  EXPECT_EQ(calls[0].idempotency_key(), calls[2].idempotency_key());
  EXPECT_EQ(calls[0].unix_ms(), calls[2].unix_ms());
}

TEST_F(JobClientTest, Submit_ArgumentThatIsNotUtf8_IsRefusedAndNamed) {
  const absl::Status status =
      client_->submit({.name = "mnist", .command = {"./train", "caf\xe9"}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "spec.argv[1] is not UTF-8: \"caf\\xe9\"");
}

TEST_F(JobClientTest, Remove_AnswerLost_JobThatIsGoneIsNoError) {
  EXPECT_TRUE(absl::IsNotFound(client_->remove("mnist-1")));
  fake_.Lose(1);
  EXPECT_TRUE(client_->remove("mnist-1").ok());
}

TEST_F(JobClientTest, Get_UnknownJob_IsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(client_->get("nothing-1").status()));
}

TEST_F(JobClientTest, List_SeveralPages_AreJoined) {
  for (int i = 1; i <= 5; ++i)
    fake_.Add(FakeJob(absl::StrCat("mnist-", i), v1::JOB_STATE_RUNNING, i));
  const auto jobs = client_->list();
  ASSERT_TRUE(jobs.ok()) << jobs.status();
  ASSERT_EQ(jobs->size(), 5u);
  EXPECT_EQ(jobs->back().id, "mnist-5");
  EXPECT_EQ(jobs->back().state, JobState::kRunning);
}

TEST_F(JobClientTest, Wait_JobThatChanges_ReturnsItsEnd) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1, 1));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 2));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1, 3));
  std::vector<JobState> seen;
  const auto job = client_->watch("mnist-1", [&](const Job& now) {
    seen.push_back(now.state);
    return true;
  });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_THAT(seen, ElementsAre(JobState::kQueued, JobState::kRunning, JobState::kSucceeded));
  EXPECT_TRUE(client_->wait("mnist-1").ok());
}

TEST_F(JobClientTest, Watch_BrokenStream_GoesOnFromTheRevisionItHasSeen) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1, 10));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_STARTING, 1, 20));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 30));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1, 40));
  fake_.BreakWatches(2);
  std::vector<JobState> seen;
  const auto job = client_->watch("mnist-1", [&](const Job& now) {
    seen.push_back(now.state);
    return true;
  });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state, JobState::kSucceeded);
  EXPECT_THAT(seen, ElementsAre(JobState::kQueued, JobState::kStarting, JobState::kRunning,
                                JobState::kSucceeded));
  EXPECT_THAT(fake_.watched_from(), ElementsAre(10, 20, 30));
}

TEST_F(JobClientTest, Watch_OfACoordinatorWithoutIt_HoldsCalls) {
  fake_.HaveNoWatch();
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1, 1));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 2));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1, 3));
  int calls = 0;
  const auto job = client_->watch("mnist-1", [&](const Job&) { return ++calls > 0; });
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state, JobState::kFailed);
  EXPECT_EQ(calls, 3);
}

TEST_F(JobClientTest, WatchAll_TellsEachChangeOnce_AndWhatIsGone_AcrossARestart) {
  fake_.Add(FakeJob("a-1", v1::JOB_STATE_QUEUED, 1, 10));
  fake_.Add(FakeJob("b-2", v1::JOB_STATE_QUEUED, 2, 11));
  fake_.Change(FakeJob("b-2", v1::JOB_STATE_RUNNING, 2, 12));
  fake_.BreakWatches(1);
  std::vector<std::string> told;
  const absl::Status status = client_->watch_all({}, [&](const JobUpdate& update) {
    told.push_back(absl::StrCat(update.id, " ",
                                update.job.has_value() ? JobStateName(update.job->state) : "gone"));
    // Between two streams.
    if (told.size() == 2) fake_.Remove("a-1");
    return told.size() < 4;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(told, ElementsAre("a-1 QUEUED", "b-2 QUEUED", "a-1 gone", "b-2 RUNNING"));
  EXPECT_THAT(fake_.watched_from(), ElementsAre(0, 11));
}

TEST_F(JobClientTest, Wait_NoTimeLeft_SaysTheState) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1));
  const absl::Status status = client_->wait("mnist-1", absl::ZeroDuration()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_NE(status.message().find("QUEUED"), absl::string_view::npos) << status;
}

TEST_F(JobClientTest, Control_Actions_AreSent) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1);
  job.set_attempts(4);
  fake_.Add(job);
  EXPECT_TRUE(client_->cancel("mnist-1", "old").ok());
  EXPECT_TRUE(client_->retry("mnist-1").ok());
  const absl::StatusOr<Job> resized = client_->resize("mnist-1", 2, 6, "more");
  ASSERT_TRUE(resized.ok()) << resized.status();
  EXPECT_EQ(resized->spec.min_processes, 2);
  EXPECT_EQ(resized->spec.max_processes, 6);
  EXPECT_TRUE(client_->remove("mnist-1").ok());
  EXPECT_THAT(fake_.actions(), ElementsAre("CANCEL mnist-1 old0", "RETRY mnist-1 4",
                                           "RESIZE mnist-1 more0", "REMOVE mnist-1 0"));
}

class FollowLogTest : public JobClientTest {
 protected:
  void SetUp() override {
    JobClientTest::SetUp();
    // Not repeated more often than a test needs.
    auto client = Client::Connect({.address = fake_.address(), .retry_for = absl::ZeroDuration()});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = std::make_unique<Client>(*std::move(client));
  }
  static v1::JobRecord Record(v1::JobState state, int attempts, uint64_t revision) {
    v1::JobRecord job = FakeJob("mnist-1", state, 1, revision);
    job.set_attempts(attempts);
    return job;
  }
  // Returns a job with its attempts, of one process each.
  static v1::JobRecord Record(v1::JobState state, std::vector<int> numbers, int attempts,
                              uint64_t revision) {
    v1::JobRecord job = Record(state, attempts, revision);
    for (const int number : numbers) {
      job.add_history()->set_number(number);
      job.mutable_history()->rbegin()->add_placements()->set_processes(1);
    }
    return job;
  }
  // Returns everything that is read until the end.
  std::string Follow(const LogOptions& options = {}) {
    std::string text;
    status_ = client_->follow_log("mnist-1", options, [&](const LogChunk& chunk) {
      absl::StrAppend(&text, chunk.data);
      return true;
    });
    return text;
  }

  absl::Status status_;
};

TEST_F(FollowLogTest, SecondAttempt_IsFollowedUntilTheJobEnds) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_RUNNING, 2, 2));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, 2, 3));
  fake_.SetLog(1, 0, "one\ntwo\n");
  fake_.SetLog(2, 0, "three\n");
  EXPECT_EQ(Follow(), "one\ntwo\nthree\n");
  EXPECT_TRUE(status_.ok()) << status_;
}

TEST_F(FollowLogTest, NodeThatDoesNotAnswerForAWhile_IsAskedAgain) {
  for (const grpc::StatusCode code :
       {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::DEADLINE_EXCEEDED}) {
    FakeJobService fake;
    auto client = Client::Connect({.address = fake.address(), .retry_for = absl::ZeroDuration()});
    ASSERT_TRUE(client.ok()) << client.status();
    fake.Add(Record(v1::JOB_STATE_RUNNING, 1, 1));
    fake.Change(Record(v1::JOB_STATE_SUCCEEDED, 1, 2));
    fake.SetLog(1, 0, "one\n");
    fake.FailLog(1, code, 3);
    std::string text;
    const absl::Status status = client->follow_log("mnist-1", {}, [&](const LogChunk& chunk) {
      absl::StrAppend(&text, chunk.data);
      return true;
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(text, "one\n");
  }
}

// Its agent was restarted, and the job ended meanwhile.
TEST_F(FollowLogTest, NodeDoesNotAnswerWhileTheJobEnds_TheEndOfTheLogIsRead) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, {1}, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, {1}, 1, 2));
  fake_.SetLog(1, 0, "one\ntwo\n");
  std::string text;
  const absl::Status status = client_->follow_log("mnist-1", {}, [&](const LogChunk& chunk) {
    if (text.empty()) {
      fake_.FailLog(1, grpc::StatusCode::DEADLINE_EXCEEDED, 2);
      (void)client_->watch("mnist-1", [](const Job& now) { return !HasEnded(now.state); });
    }
    absl::StrAppend(&text, chunk.data);
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(text, "one\ntwo\n");
}

TEST_F(FollowLogTest, CoordinatorThatIsAway_IsWaitedFor) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, 1, 2));
  fake_.SetLog(1, 0, "one\ntwo\nthree\n");
  std::string text;
  const absl::Status status = client_->follow_log("mnist-1", {}, [&](const LogChunk& chunk) {
    if (text.empty()) fake_.Lose(5);
    absl::StrAppend(&text, chunk.data);
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(text, "one\ntwo\nthree\n");
}

TEST_F(FollowLogTest, NodeOfAnAttemptIsLost_TheNextOneIsFollowed) {
  for (const grpc::StatusCode code : {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::NOT_FOUND}) {
    FakeJobService fake;
    auto client = Client::Connect({.address = fake.address(), .retry_for = absl::ZeroDuration()});
    ASSERT_TRUE(client.ok()) << client.status();
    fake.Add(Record(v1::JOB_STATE_RUNNING, 1, 1));
    fake.Change(Record(v1::JOB_STATE_RUNNING, 2, 2));
    fake.Change(Record(v1::JOB_STATE_SUCCEEDED, 2, 3));
    fake.SetLog(1, 0, "one\ntwo\n");
    fake.SetLog(2, 0, "three\n");
    std::string text;
    ::testing::internal::CaptureStderr();
    const absl::Status status = client->follow_log("mnist-1", {}, [&](const LogChunk& chunk) {
      if (text.empty()) {
        fake.FailLog(1, code);
        (void)client->watch("mnist-1", [](const Job& now) { return now.attempts < 2; });
      }
      absl::StrAppend(&text, chunk.data);
      return true;
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(text, "one\ntthree\n");
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                ::testing::HasSubstr("rank 0 has no more output of attempt 1 here: the node "
                                     "does not answer; that of the next attempt follows"));
  }
}

// Its disk fails, or it has too many files open. The attempt has that rank, and continues.
TEST_F(FollowLogTest, NodeThatCannotReadTheLogForAWhile_IsAskedAgain) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, {1}, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, {1}, 1, 2));
  fake_.SetLog(1, 0, "one\ntwo\n");
  std::string text;
  const absl::Status status = client_->follow_log("mnist-1", {}, [&](const LogChunk& chunk) {
    if (text.empty()) fake_.FailLog(1, grpc::StatusCode::NOT_FOUND, 2);
    absl::StrAppend(&text, chunk.data);
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(text, "one\ntwo\n");
}

// The coordinator has skipped numbers that no attempt has, thousands for each day since the copy.
TEST_F(FollowLogTest, CoordinatorThatWasRestoredFromACopy_TheAttemptThatThereIsIsFollowed) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, {1}, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_QUEUED, {1}, 1001, 2));
  fake_.Change(Record(v1::JOB_STATE_RUNNING, {1, 1002}, 1002, 3));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, {1, 1002}, 1002, 4));
  fake_.SetLog(1, 0, "one\n");
  fake_.SetLog(1002, 0, "two\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Follow(), "one\ntwo\n");
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::Not(::testing::HasSubstr("has no more output")));
}

// For example while the caller was not connected.
TEST_F(FollowLogTest, AttemptsOfWhichTheWatchTellsTheLastAlone_AreAllFollowed) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, {1}, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, {1, 2, 3}, 3, 2));
  for (int attempt = 1; attempt <= 3; ++attempt) {
    fake_.SetLog(attempt, 0, absl::StrCat("attempt ", attempt, "\n"));
  }
  EXPECT_EQ(Follow(), "attempt 1\nattempt 2\nattempt 3\n");
  EXPECT_TRUE(status_.ok()) << status_;
}

// An elastic job that has lost a node, and grows again.
TEST_F(FollowLogTest, AttemptWithoutThatRank_TheOneAfterItIsFollowed) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, 1, 1));
  fake_.Change(Record(v1::JOB_STATE_RUNNING, 2, 2));
  fake_.Change(Record(v1::JOB_STATE_RUNNING, 3, 3));
  fake_.Change(Record(v1::JOB_STATE_SUCCEEDED, 3, 4));
  fake_.SetLog(1, 7, "one\n");
  fake_.SetLog(3, 7, "three\n");
  EXPECT_EQ(Follow({.rank = 7}), "one\nthree\n");
  EXPECT_TRUE(status_.ok()) << status_;
}

TEST_F(FollowLogTest, RankThatThereNeverWas_IsAnError) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, 1, 1));
  fake_.SetLog(1, 0, "one\n");
  EXPECT_EQ(Follow({.rank = 7}), "");
  EXPECT_TRUE(absl::IsNotFound(status_)) << status_;
}

TEST_F(FollowLogTest, OneAttemptThatIsOver_IsNotFollowedByAnother) {
  fake_.Add(Record(v1::JOB_STATE_RUNNING, 2, 1));
  fake_.SetLog(2, 0, "two\n");
  fake_.FailLog(1, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Follow({.attempt = 1}), "");
  EXPECT_TRUE(absl::IsUnavailable(status_)) << status_;
}

TEST_F(FollowLogTest, JobThatHasEndedOnANodeThatIsAway_IsAnError) {
  fake_.Add(Record(v1::JOB_STATE_FAILED, 1, 1));
  fake_.FailLog(1, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Follow(), "");
  EXPECT_TRUE(absl::IsUnavailable(status_)) << status_;
}

TEST_F(JobClientTest, Nodes_ListAndDrain_AreSent) {
  v1::NodeRecord node;
  node.set_node("a");
  node.mutable_info()->set_cpus(8);
  fake_.AddNode(node);
  const auto nodes = client_->nodes();
  ASSERT_TRUE(nodes.ok()) << nodes.status();
  ASSERT_EQ(nodes->size(), 1u);
  EXPECT_TRUE((*nodes)[0].known);
  EXPECT_EQ((*nodes)[0].cpus, 8);
  EXPECT_TRUE(client_->drain("a", "disk").ok());
  EXPECT_TRUE(absl::IsNotFound(client_->cordon("b")));
  EXPECT_THAT(fake_.actions(), ElementsAre("DRAIN a disk"));
}

}  // namespace
}  // namespace muster::client
