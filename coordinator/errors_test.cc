#include "coordinator/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

TEST(Errors, MakeError_RetryableFollowsFromTheReason) {
  EXPECT_TRUE(MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_JOURNAL_FAILED, "x")
                  .detail()
                  .retryable());
  EXPECT_FALSE(
      MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_SUPERSEDED, "x").detail().retryable());
}

TEST(Errors, Cut_KeepsWholeCharacters) {
  EXPECT_EQ(Cut("abc", 5), "abc");
  EXPECT_EQ(Cut("abc", 2), "ab");
  EXPECT_EQ(Cut("a\u00e9", 2), "a");
  EXPECT_EQ(Cut("\u20ac", 2), "");
}

TEST(Errors, Quoted_EscapesAndCuts) {
  EXPECT_EQ(Quoted(std::string("a\n\0z", 4)), "\"a\\n\\x00z\"");
  EXPECT_LT(Quoted(std::string(10000, 'x')).size(), 100u);
}

TEST(Errors, CulpritText_SaysWhatIsKnown) {
  v1::Culprit culprit;
  culprit.set_rank(3);
  culprit.set_worker_id("w3");
  EXPECT_EQ(CulpritText(culprit), "rank 3 (w3)");
  culprit.set_host("node7");
  culprit.set_pid(4711);
  culprit.set_process_state("stopped");
  culprit.set_last_step(41);
  culprit.set_last_collective("all_reduce #9");
  *culprit.mutable_heartbeat_age() = ToProto(absl::Milliseconds(3100));
  EXPECT_EQ(CulpritText(culprit),
            "rank 3 (w3 on node7, pid 4711, stopped, step 41, last collective all_reduce #9, last "
            "heard of 3.1s ago)");
}

}  // namespace
}  // namespace muster::coordinator
