#include "client/jobs/async_client.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "client/jobs/fake_job_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;

class AsyncClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto client = AsyncClient::Connect({.address = fake_.address()});
    ASSERT_TRUE(client.ok()) << client.status();
    client_.emplace(*std::move(client));
  }

  FakeJobService fake_;
  std::optional<AsyncClient> client_;
};

TEST_F(AsyncClientTest, Results_AreToldOnOneThread_AndErrorsAsStatus) {
  std::set<std::thread::id> threads;
  Notification submitted, found, failed, cancelled;
  absl::StatusOr<Submission> made;
  absl::StatusOr<Job> job, none, stopped;
  const auto submit = client_->submit({.name = "mnist", .command = {"./train"}}, {},
                                      [&](absl::StatusOr<Submission> result) {
                                        threads.insert(std::this_thread::get_id());
                                        made = std::move(result);
                                        submitted.Notify();
                                      });
  submitted.WaitForNotification();
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->job.id, "mnist-1");
  const auto get = client_->get("mnist-1", [&](absl::StatusOr<Job> result) {
    threads.insert(std::this_thread::get_id());
    job = std::move(result);
    found.Notify();
  });
  const auto get_none = client_->get("none-1", [&](absl::StatusOr<Job> result) {
    threads.insert(std::this_thread::get_id());
    none = std::move(result);
    failed.Notify();
  });
  const auto control =
      client_->start([](Client& client) { return client.cancel("mnist-1", "old"); },
                     [&](absl::StatusOr<Job> result) {
                       threads.insert(std::this_thread::get_id());
                       stopped = std::move(result);
                       cancelled.Notify();
                     });
  for (const Notification* each : {&found, &failed, &cancelled}) each->WaitForNotification();
  EXPECT_EQ(job->id, "mnist-1");
  EXPECT_TRUE(absl::IsNotFound(none.status())) << none.status();
  EXPECT_TRUE(stopped.ok()) << stopped.status();
  EXPECT_EQ(threads.size(), 1u);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0u);
  EXPECT_THAT(fake_.actions(), ElementsAre("CANCEL mnist-1 old0"));
}

TEST_F(AsyncClientTest, Watch_TellsChangesAndTheEnd) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1, 1));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 2));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1, 3));
  std::vector<JobState> seen;
  Notification ended;
  const auto watch = client_->watch(
      "mnist-1", [&](const Job& job) { seen.push_back(job.state); },
      [&](const absl::StatusOr<Job>& end) {
        EXPECT_TRUE(end.ok()) << end.status();
        ended.Notify();
      });
  ended.WaitForNotification();
  EXPECT_THAT(seen, ElementsAre(JobState::kQueued, JobState::kRunning, JobState::kSucceeded));
}

TEST_F(AsyncClientTest, FollowLog_TellsTheLinesAndTheEnd) {
  v1::JobRecord job = FakeJob("mnist-1", v1::JOB_STATE_SUCCEEDED, 1, 1);
  job.set_attempts(1);
  fake_.Add(job);
  fake_.SetLog(1, 0, "one\ntwo\n");
  std::string text;
  Notification ended;
  const auto log = client_->follow_log(
      "mnist-1", {}, [&](const LogChunk& chunk) { text += chunk.data; },
      [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        ended.Notify();
      });
  ended.WaitForNotification();
  EXPECT_EQ(text, "one\ntwo\n");
}

TEST_F(AsyncClientTest, CancelledCall_MakesNoCallbackAfterwards) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1));
  Mutex mu;
  int told = 0;
  bool over = false;
  Notification first;
  auto watch = client_->watch_all(
      {},
      [&](const JobUpdate&) {
        MutexLock lock(&mu);
        EXPECT_FALSE(over);
        if (++told == 1) first.Notify();
      },
      [](const absl::Status& status) { ADD_FAILURE() << "it was cancelled: " << status; });
  first.WaitForNotification();
  watch.cancel();
  {
    MutexLock lock(&mu);
    over = true;
  }
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1, 2));
  // A further callback would have come before anything that another call receives now.
  Notification next;
  const auto get = client_->get("mnist-1", [&](const absl::StatusOr<Job>&) { next.Notify(); });
  next.WaitForNotification();
  EXPECT_EQ(told, 1);
  watch.cancel();
}

TEST_F(AsyncClientTest, CancelFromItsOwnCallback_IsTheLastOne) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_QUEUED, 1, 1));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 2));
  fake_.Change(FakeJob("mnist-1", v1::JOB_STATE_FAILED, 1, 3));
  int told = 0;
  AsyncClient::Call watch;
  Notification may_begin, cancelled;
  watch = client_->watch(
      "mnist-1",
      [&](const Job& job) {
        may_begin.WaitForNotification();
        ++told;
        watch.cancel();
        EXPECT_EQ(job.id, "mnist-1") << "what it was told is still there";
        cancelled.Notify();
      },
      [](const absl::StatusOr<Job>&) { ADD_FAILURE() << "it was cancelled"; });
  may_begin.Notify();
  cancelled.WaitForNotification();
  Notification next;
  const auto get = client_->get("mnist-1", [&](const absl::StatusOr<Job>&) { next.Notify(); });
  next.WaitForNotification();
  EXPECT_EQ(told, 1);
}

TEST_F(AsyncClientTest, CancelWhileACallbackRuns_WaitsForIt) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1));
  Notification runs, go_on;
  bool returned = false;
  auto watch = client_->watch(
      "mnist-1",
      [&](const Job&) {
        runs.Notify();
        go_on.WaitForNotification();
        returned = true;
      },
      [](const absl::StatusOr<Job>&) {});
  runs.WaitForNotification();
  std::thread other([&] { go_on.Notify(); });
  watch.cancel();
  EXPECT_TRUE(returned);
  other.join();
}

TEST_F(AsyncClientTest, CallToACoordinatorThatIsAway_IsCancelledAtOnce) {
  fake_.Lose(1 << 20);
  auto get = client_->get("mnist-1", [](const absl::StatusOr<Job>&) {
    ADD_FAILURE() << "it is repeated for half a minute";
  });
  get.cancel();
}

TEST_F(AsyncClientTest, EndOfTheClient_EndsItsCalls_WhichMayOutliveIt) {
  fake_.Add(FakeJob("mnist-1", v1::JOB_STATE_RUNNING, 1, 1));
  Notification first;
  AsyncClient::Call watch = client_->watch(
      "mnist-1", [&](const Job&) { first.Notify(); },
      [](const absl::StatusOr<Job>&) { ADD_FAILURE() << "the client is gone"; });
  first.WaitForNotification();
  client_.reset();
  watch.cancel();
}

}  // namespace
}  // namespace muster::client
