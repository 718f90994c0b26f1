#include "agent/attempt_restarts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_hidden_path.h"
#include "base/test_wait.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

WorkerEnd Ended(int exit_code, int signal) {
  WorkerEnd end;
  end.rank = 1;
  end.host = "n";
  end.exit.exit_code = exit_code;
  end.exit.signal = signal;
  return end;
}

JobResult Failed(const WorkerEnd& end) {
  JobResult result;
  result.outcome = JobResult::Outcome::kFailed;
  result.failure = {.why = end.ToString(), .last_lines = {"bye"}, .restarts = true};
  result.failed_here = end;
  return result;
}

class AttemptRestartsTest : public testing::Test {
 protected:
  AttemptRestarts::Options Options(int left) {
    return {.folder = folder_.path(), .left = left, .user_error_codes = {42}};
  }

  const TestFolder folder_;
};

TEST_F(AttemptRestartsTest, MayAsk_WhileSomeAreLeft_AndARestartCanHelp) {
  const AttemptRestarts restarts(Options(2));
  EXPECT_TRUE(restarts.MayAsk(1, Ended(0, SIGSEGV)));
  EXPECT_TRUE(restarts.MayAsk(2, Ended(1, 0)));
  EXPECT_FALSE(restarts.MayAsk(3, Ended(1, 0)));
  EXPECT_FALSE(restarts.MayAsk(1, Ended(2, 0)));
  EXPECT_FALSE(restarts.MayAsk(1, Ended(42, 0)));
  WorkerEnd for_memory = Ended(0, SIGKILL);
  for_memory.memory_kill = "for memory";
  EXPECT_TRUE(restarts.MayAsk(1, for_memory));
}

TEST_F(AttemptRestartsTest, Request_IsReadAndAnswered_AlsoByAnAgentThatComesLater) {
  AttemptRestarts restarts(Options(2));
  const OwnedFd events = WatchFolders();
  ASSERT_TRUE(events.open());
  ASSERT_TRUE(WatchFolder(events.get(), folder_.path()).ok());
  EXPECT_FALSE(TakeFolderEvents(events.get()));
  EXPECT_EQ(ReadRestartRequest(folder_.path())->restart, 0);
  std::thread runner([&] {
    EXPECT_TRUE(restarts.Await(1, Failed(Ended(3, 0))).ok());
    EXPECT_TRUE(restarts.Await(2, Failed(Ended(4, 0))).ok());
  });
  for (int restart = 1; restart <= 2; ++restart) {
    absl::StatusOr<RestartRequest> request;
    WaitUntil([&] {
      request = ReadRestartRequest(folder_.path());
      return request->restart >= restart;
    });
    EXPECT_EQ(request->restart, restart);
    EXPECT_EQ(request->end.exit_code(), 2 + restart);
    EXPECT_EQ(request->end.end_class(), v1::END_CLASS_PROCESS_FAILED);
    EXPECT_TRUE(AllowRestart(folder_.path(), restart, absl::Milliseconds(1)).ok());
  }
  runner.join();
  EXPECT_TRUE(TakeFolderEvents(events.get()));
}

TEST_F(AttemptRestartsTest, Cancel_EndsTheWaitForTheAnswerAndForTheDelay) {
  AttemptRestarts unanswered(Options(1));
  unanswered.Cancel();
  EXPECT_TRUE(absl::IsCancelled(unanswered.Await(1, Failed(Ended(3, 0)))));
  AttemptRestarts delayed(Options(1));
  ASSERT_TRUE(AllowRestart(folder_.path(), 1, absl::Hours(24 * 365)).ok());
  std::thread other([&] { delayed.Cancel(); });
  EXPECT_TRUE(absl::IsAborted(delayed.Await(1, Failed(Ended(3, 0))))) << "it was allowed";
  other.join();
  // At the same time as the answer.
  ASSERT_TRUE(AllowRestart(folder_.path(), 1, absl::ZeroDuration()).ok());
  EXPECT_TRUE(absl::IsAborted(delayed.Await(1, Failed(Ended(3, 0)))));
}

TEST_F(AttemptRestartsTest, EndWithTheFailureThatWasAskedFor_NamesTheRestart) {
  AttemptRestarts restarts(Options(2));
  WorkerEnd lost = Ended(3, 0);
  lost.exit.at = absl::FromUnixMillis(1'000);
  EXPECT_EQ(*AskedFor(folder_.path(), restarts.Describe(Failed(lost), nullptr)), 0);
  restarts.Cancel();
  JobResult result = Failed(lost);
  EXPECT_TRUE(absl::IsCancelled(restarts.Await(1, result)));
  result.outcome = JobResult::Outcome::kStopped;
  EXPECT_EQ(*AskedFor(folder_.path(), restarts.Describe(result, nullptr)), 1);
  // A later end is a different one, and so is a stop request.
  lost.exit.at = absl::FromUnixMillis(2'000);
  EXPECT_EQ(*AskedFor(folder_.path(), restarts.Describe(Failed(lost), nullptr)), 0);
  result.failed_here.reset();
  EXPECT_EQ(*AskedFor(folder_.path(), restarts.Describe(result, nullptr)), 0);
}

// Otherwise the end would be counted twice: as a restart, and as an end.
TEST_F(AttemptRestartsTest, RequestThatCannotBeReadNow_IsNotTakenForNone) {
  AttemptRestarts restarts(Options(2));
  WorkerEnd lost = Ended(3, 0);
  lost.exit.at = absl::FromUnixMillis(1'000);
  restarts.Cancel();
  EXPECT_TRUE(absl::IsCancelled(restarts.Await(1, Failed(lost))));
  const v1::AttemptEnd end = restarts.Describe(Failed(lost), nullptr);
  {
    const HiddenPath hidden(folder_.Path("restart_1.json"));
    const absl::Status status = AskedFor(folder_.path(), end).status();
    EXPECT_THAT(status.message(), HasSubstr("restart_1.json"));
  }
  EXPECT_EQ(*AskedFor(folder_.path(), end), 1);
}

TEST_F(AttemptRestartsTest, EndWithoutAFailureOfItsOwn_IsNotTakenForTheOneBefore) {
  AttemptRestarts restarts(Options(2));
  restarts.Cancel();
  JobResult echo = Failed(Ended(3, 0));
  echo.failed_here.reset();
  EXPECT_TRUE(absl::IsCancelled(restarts.Await(1, echo)));
  EXPECT_EQ(*AskedFor(folder_.path(), restarts.Describe(echo, nullptr)), 0);
}

TEST_F(AttemptRestartsTest, NoAnswerAtAll_IsNotAwaitedForEver) {
  AttemptRestarts::Options options = Options(1);
  options.patience = absl::ZeroDuration();
  AttemptRestarts restarts(options);
  EXPECT_TRUE(absl::IsDeadlineExceeded(restarts.Await(1, Failed(Ended(3, 0)))));
  ASSERT_TRUE(AllowRestart(folder_.path(), 1, absl::ZeroDuration()).ok());
  EXPECT_TRUE(restarts.Await(1, Failed(Ended(3, 0))).ok());
}

TEST_F(AttemptRestartsTest, FilesThatAreNone_AllowNothing) {
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("restarts_allowed"), "9").ok());
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("restart_x.json"), "{}").ok());
  EXPECT_EQ(ReadRestartRequest(folder_.path())->restart, 0);
  AttemptRestarts restarts(Options(1));
  restarts.Cancel();
  EXPECT_TRUE(absl::IsCancelled(restarts.Await(1, Failed(Ended(3, 0)))));
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("restart_7.json"), "{}").ok());
  EXPECT_FALSE(ReadRestartRequest(folder_.path()).ok());
}

TEST_F(AttemptRestartsTest, FolderThatIsNotThere_IsAnError) {
  AttemptRestarts restarts({.folder = folder_.Path("none"), .left = 1});
  EXPECT_THAT(std::string(restarts.Await(1, Failed(Ended(3, 0))).message()), HasSubstr("none"));
}

}  // namespace
}  // namespace muster::agent
