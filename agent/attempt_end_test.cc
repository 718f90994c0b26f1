#include "agent/attempt_end.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "absl/time/time.h"
#include "base/file.h"
#include "base/test_folder.h"

namespace muster::agent {
namespace {

JobResult FailedHere(int exit_code, int signal) {
  JobResult result;
  result.outcome = JobResult::Outcome::kFailed;
  WorkerEnd end;
  end.rank = 3;
  end.host = "n";
  end.exit.exit_code = exit_code;
  end.exit.signal = signal;
  end.exit.at = absl::FromUnixMillis(1'700'000'000'123);
  result.failure.why = end.ToString();
  result.failure.last_lines = {"bye"};
  result.failed_here = end;
  return result;
}

TEST(DescribeEndTest, FailureOfAProcessHere_HasItsRankAndClass) {
  v1::AttemptEnd end = DescribeEnd(FailedHere(1, 0), {}, false, 2);
  EXPECT_EQ(end.end_class(), v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(end.rank(), 3);
  EXPECT_EQ(end.exit_code(), 1);
  EXPECT_EQ(end.last_lines(0), "bye");
  EXPECT_EQ(end.failed_unix_ms(), 1'700'000'000'123);
  EXPECT_EQ(DescribeEnd(FailedHere(2, 0), {}, false, 1).end_class(), v1::END_CLASS_USER_ERROR);
  EXPECT_EQ(DescribeEnd(FailedHere(42, 0), {42}, false, 1).end_class(), v1::END_CLASS_USER_ERROR);
  EXPECT_EQ(DescribeEnd(FailedHere(0, SIGSEGV), {}, true, 1).end_class(),
            v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(DescribeEnd(FailedHere(0, SIGKILL), {}, true, 1).end_class(),
            v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(DescribeEnd(FailedHere(0, SIGKILL), {}, false, 1).end_class(),
            v1::END_CLASS_PROCESS_FAILED);
}

TEST(DescribeEndTest, StoppedAfterItsOwnFailure_IsTheFailure) {
  JobResult result = FailedHere(7, 0);
  result.outcome = JobResult::Outcome::kStopped;
  v1::AttemptEnd end = DescribeEnd(result, {}, false, 2);
  EXPECT_EQ(end.end_class(), v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(end.rank(), 3);
  EXPECT_EQ(end.exit_code(), 7);
  // Without a failure here, or with that of another node.
  result.failure.why = "rank 1 on m was killed";
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).end_class(), v1::END_CLASS_CANCELLED);
  result.failed_here.reset();
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).end_class(), v1::END_CLASS_CANCELLED);
}

TEST(DescribeEndTest, ControlGroupOfAWorker_KnowsBetterThanTheMachine) {
  JobResult result = FailedHere(0, SIGKILL);
  // Another process of the machine was killed for memory.
  result.failed_here->counts_memory_kills = true;
  EXPECT_EQ(DescribeEnd(result, {}, true, 1).end_class(), v1::END_CLASS_PROCESS_FAILED);
  result.failed_here->memory_kill = "for memory, because it reached its limit of 1.00 GiB";
  result.failure.why = result.failed_here->ToString();
  v1::AttemptEnd end = DescribeEnd(result, {}, false, 1);
  EXPECT_EQ(end.end_class(), v1::END_CLASS_OUT_OF_MEMORY);
  EXPECT_EQ(end.why(),
            "rank 3 (pid 0 on n) was killed by signal 9 (SIGKILL), by the kernel for memory, "
            "because it reached its limit of 1.00 GiB");
  // The kernel took a process that the worker had started, and the worker made an error of it.
  result.failed_here->exit = {.exit_code = 2};
  result.failure.why = result.failed_here->ToString();
  EXPECT_EQ(DescribeEnd(result, {}, false, 1).end_class(), v1::END_CLASS_OUT_OF_MEMORY);
}

TEST(DescribeEndTest, WorkerKilledBecauseTheJobHangs_IsAHangWithAllStacks) {
  HangReport hang;
  hang.hang.why = "no rank has shown progress for 10m: rank 5 (...)";
  hang.hang.rank = 5;
  hang.ranks.emplace_back().add_ranks(5);
  hang.ranks.back().set_stack("#0 poll");
  JobResult result = FailedHere(0, SIGKILL);
  result.failed_here->killed_because = hang.hang.why;
  result.failure.why = result.failed_here->ToString();
  const v1::AttemptEnd end = DescribeEnd(result, {}, true, 2, &hang);
  EXPECT_EQ(end.end_class(), v1::END_CLASS_HANG);
  EXPECT_EQ(end.why(), hang.hang.why);
  EXPECT_EQ(end.rank(), 5);
  EXPECT_EQ(end.signal(), 0);
  EXPECT_EQ(end.last_lines_size(), 0) << "they are another rank's";
  ASSERT_EQ(end.hung_size(), 1);
  EXPECT_EQ(end.hung(0).stack(), "#0 poll");
  // A worker that failed on its own, before or after, keeps its class.
  EXPECT_EQ(DescribeEnd(FailedHere(1, 0), {}, false, 2, &hang).end_class(),
            v1::END_CLASS_PROCESS_FAILED);
  result.failure.why = "another node was first";
  EXPECT_EQ(DescribeEnd(result, {}, false, 2, &hang).end_class(), v1::END_CLASS_PEER_FAILED);
}

TEST(DescribeEndTest, FailureThatBeganElsewhere_IsAnEcho) {
  JobResult result = FailedHere(1, 0);
  result.failure.why = "rank 0 (pid 7 on other) was killed by signal 9 (SIGKILL)";
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).end_class(), v1::END_CLASS_PEER_FAILED);
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).failed_unix_ms(), 1'700'000'000'123);
  result.failed_here.reset();
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).failed_unix_ms(), 0);
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).end_class(), v1::END_CLASS_PEER_FAILED);
}

TEST(DescribeEndTest, UserErrorBesideAFailureElsewhere_IsTold) {
  JobResult result = FailedHere(2, 0);
  result.failed_here->last_lines = {"unknown option"};
  result.failure.why = "rank 0 (pid 7 on other) was killed by signal 9 (SIGKILL)";
  for (const auto outcome : {JobResult::Outcome::kFailed, JobResult::Outcome::kStopped}) {
    result.outcome = outcome;
    const v1::AttemptEnd end = DescribeEnd(result, {}, false, 2);
    EXPECT_EQ(end.end_class(), v1::END_CLASS_USER_ERROR);
    EXPECT_EQ(end.why(), "rank 3 (pid 0 on n) exited with code 2");
    EXPECT_EQ(end.rank(), 3);
    ASSERT_EQ(end.last_lines_size(), 1);
    EXPECT_EQ(end.last_lines(0), "unknown option");
  }
}

TEST(DescribeEndTest, Refusal_IsTheNodesOrAPeers) {
  JobResult result;
  result.outcome = JobResult::Outcome::kRefused;
  result.status = absl::InvalidArgumentError("the token file is missing");
  EXPECT_EQ(DescribeEnd(result, {}, false, 1).end_class(), v1::END_CLASS_NODE_FAILED);
  result.status = absl::ResourceExhaustedError("too many open files");
  EXPECT_EQ(DescribeEnd(result, {}, false, 1).end_class(), v1::END_CLASS_NODE_FAILED);
  result.status = absl::DeadlineExceededError("machine 1 did not join");
  EXPECT_EQ(DescribeEnd(result, {}, false, 2).end_class(), v1::END_CLASS_PEER_FAILED);
}

TEST(EndFileTest, End_IsReadAsItWasWritten_AndGarbageIsRefused) {
  const TestFolder folder;
  const std::string path = JoinPath(folder.path(), "end.json");
  JobResult result = FailedHere(1, 0);
  result.failure.last_lines = {"not \xff UTF-8"};
  const v1::AttemptEnd end = DescribeEnd(result, {}, false, 1);
  ASSERT_TRUE(WriteEnd(path, end).ok());
  const absl::StatusOr<v1::AttemptEnd> read = ReadEnd(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), end.SerializeAsString());
  ASSERT_TRUE(WriteFileAtomically(path, "{}").ok());
  EXPECT_EQ(ReadEnd(path).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadEnd(path + "x").status().code(), absl::StatusCode::kNotFound);
  // A later look does not find it smaller, either.
  ASSERT_TRUE(WriteFileAtomically(path, std::string((1 << 20) + 1, ' ')).ok());
  EXPECT_EQ(ReadEnd(path).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace muster::agent
