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

TEST_F(JobClientTest, FollowLog_SecondAttempt_IsFollowedUntilTheJobEnds) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1);
  job.set_attempts(1);
  fake_.Add(job);
  job.set_attempts(2);
  job.set_revision(2);
  fake_.Change(job);
  v1::JobRecord end = FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1, 3);
  end.set_attempts(2);
  fake_.Change(end);
  fake_.SetLog(1, 0, "one\ntwo\n");
  fake_.SetLog(2, 0, "three\n");
  std::string text;
  const absl::Status status = client_->follow_log("mnist-1", {}, [&](const LogChunk& chunk) {
    absl::StrAppend(&text, chunk.data);
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(text, "one\ntwo\nthree\n");
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
