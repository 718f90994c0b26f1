#include "coordinator/jobs/attempt_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "coordinator/errors.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"

namespace muster::coordinator {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(5);

std::vector<v1::EndClass> AllClasses() {
  std::vector<v1::EndClass> classes;
  for (int i = 0; i < v1::EndClass_ARRAYSIZE; ++i) {
    if (v1::EndClass_IsValid(i)) classes.push_back(static_cast<v1::EndClass>(i));
  }
  return classes;
}

// Returns a job whose attempt on two nodes has ended in this way.
v1::JobRecord Ended(v1::EndClass end_class, int max_restarts = 3) {
  v1::JobRecord record;
  record.mutable_spec()->set_max_restarts(max_restarts);
  record.mutable_spec()->mutable_restart_delay()->set_seconds(10);
  v1::JobAttempt* const attempt = record.add_history();
  attempt->set_number(1);
  for (const char* const node : {"a", "b"}) {
    v1::Placement* const placement = attempt->add_placements();
    placement->set_node(node);
    placement->set_state(v1::PLACEMENT_STATE_ENDED);
    placement->set_end_class(end_class);
  }
  attempt->mutable_end()->set_end_class(end_class);
  attempt->mutable_end()->set_why("the cause");
  attempt->mutable_end()->set_node("b");
  return record;
}

TEST(AttemptOutcomeTest, Cause_OfEachPairOfEnds) {
  using Classes = std::set<v1::EndClass>;
  const Classes user_error = {v1::END_CLASS_USER_ERROR};
  // The ends that replace each cause.
  std::map<v1::EndClass, Classes> better = {
      {v1::END_CLASS_PROCESS_FAILED, user_error},
      {v1::END_CLASS_OUT_OF_MEMORY, user_error},
      {v1::END_CLASS_HANG, user_error},
      {v1::END_CLASS_PEER_FAILED,
       {v1::END_CLASS_PROCESS_FAILED, v1::END_CLASS_USER_ERROR, v1::END_CLASS_OUT_OF_MEMORY,
        v1::END_CLASS_NODE_LOST, v1::END_CLASS_NODE_FAILED, v1::END_CLASS_HANG}},
  };
  for (const v1::EndClass end : AllClasses()) {
    if (end == v1::END_CLASS_UNSPECIFIED || end == v1::END_CLASS_SUCCEEDED) continue;
    better[v1::END_CLASS_UNSPECIFIED].insert(end);
  }
  for (const v1::EndClass former : AllClasses()) {
    for (const v1::EndClass end : AllClasses()) {
      EXPECT_EQ(IsBetterCause(former, end), better[former].contains(end))
          << v1::EndClass_Name(former) << " and then " << v1::EndClass_Name(end);
    }
  }
}

TEST(AttemptOutcomeTest, Cause_OfThreeEndsInAnyOrder_IsNeverThatARunnerWasStopped) {
  for (const v1::EndClass cause :
       {v1::END_CLASS_PROCESS_FAILED, v1::END_CLASS_USER_ERROR, v1::END_CLASS_OUT_OF_MEMORY,
        v1::END_CLASS_HANG, v1::END_CLASS_NODE_LOST, v1::END_CLASS_NODE_FAILED}) {
    // A runner is stopped only after another one has failed.
    for (const std::vector<v1::EndClass>& order : std::vector<std::vector<v1::EndClass>>{
             {cause, v1::END_CLASS_CANCELLED, v1::END_CLASS_PEER_FAILED},
             {v1::END_CLASS_PEER_FAILED, cause, v1::END_CLASS_CANCELLED},
             {v1::END_CLASS_PEER_FAILED, v1::END_CLASS_CANCELLED, cause}}) {
      v1::EndClass end = v1::END_CLASS_UNSPECIFIED;
      for (const v1::EndClass next : order) {
        if (IsBetterCause(end, next)) end = next;
      }
      EXPECT_EQ(end, cause);
    }
  }
}

TEST(AttemptOutcomeTest, ReportedEnd_OfARunnerThatSomethingElseStopped_IsTheNodes) {
  v1::AttemptEnd cancelled, failed;
  cancelled.set_end_class(v1::END_CLASS_CANCELLED);
  failed.set_end_class(v1::END_CLASS_NODE_FAILED);
  v1::JobAttempt attempt;
  v1::AttemptReport report;
  report.mutable_ran_for()->set_seconds(59);
  const auto understood = [&](const v1::AttemptEnd& end, bool running = true,
                              bool counted = false) {
    return Understand(report, end, attempt, running, counted);
  };
  EXPECT_EQ(understood(cancelled).end.end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_TRUE(understood(cancelled).given_up_early);
  EXPECT_EQ(understood(failed).end.end_class(), v1::END_CLASS_NODE_FAILED);
  EXPECT_FALSE(understood(failed).given_up_early);
  report.mutable_ran_for()->set_seconds(60);
  EXPECT_EQ(understood(cancelled).end.end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_FALSE(understood(cancelled).given_up_early);
  EXPECT_EQ(understood(failed).end.end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_EQ(understood(failed, /*running=*/false).end.end_class(), v1::END_CLASS_NODE_FAILED);
  // The attempt was allowed to continue before it was stopped.
  cancelled.set_node("a");
  failed.set_node("a");
  const ReportedEnd counted = understood(failed, true, /*counted=*/true);
  EXPECT_EQ(counted.end.end_class(), v1::END_CLASS_NODE_LOST);
  EXPECT_EQ(counted.end.node(), "a");
  EXPECT_FALSE(counted.given_up_early);
  attempt.set_stop(true);
  EXPECT_EQ(understood(cancelled).end.end_class(), v1::END_CLASS_CANCELLED);
  EXPECT_EQ(understood(failed, true, /*counted=*/true).end.end_class(), v1::END_CLASS_CANCELLED);
}

TEST(AttemptOutcomeTest, Times_AreByTheCoordinatorsClock_WhateverThatOfTheNodeShows) {
  v1::JobAttempt attempt;
  attempt.mutable_times()->set_placed_unix_ms(absl::ToUnixMillis(kNow - absl::Minutes(3)));
  v1::AttemptReport report;
  report.mutable_ran_for()->set_seconds(100);
  for (const int64_t ahead : {int64_t{0}, int64_t{660'000}, int64_t{-660'000}}) {
    report.set_started_unix_ms(absl::ToUnixMillis(kNow - absl::Seconds(100)) + ahead);
    report.set_ended_unix_ms(absl::ToUnixMillis(kNow - absl::Seconds(40)) + ahead);
    EXPECT_EQ(StartedAt(report, attempt, kNow), kNow - absl::Seconds(100));
    EXPECT_EQ(EndedAt(report, attempt, kNow), kNow - absl::Seconds(40));
  }
  // The node's clock was set in between, or is nonsense.
  for (const int64_t ended :
       {int64_t{1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    report.set_ended_unix_ms(ended);
    EXPECT_GE(EndedAt(report, attempt, kNow), kNow - absl::Seconds(100));
    EXPECT_LE(EndedAt(report, attempt, kNow), kNow);
  }
  report.mutable_ran_for()->set_seconds(300'000'000'000);
  EXPECT_EQ(StartedAt(report, attempt, kNow), kNow - absl::Minutes(3));
  report.mutable_ran_for()->set_seconds(-300'000'000'000);
  EXPECT_EQ(StartedAt(report, attempt, kNow), kNow);
  report.clear_started_unix_ms();
  EXPECT_EQ(EndedAt(report, attempt, kNow), kNow);
  // This clock was set back.
  attempt.mutable_times()->set_placed_unix_ms(absl::ToUnixMillis(kNow + absl::Hours(1)));
  EXPECT_EQ(StartedAt(report, attempt, kNow), kNow);
}

TEST(AttemptOutcomeTest, RestartDelay_OfRecordsWithAnyTimes_IsWithinItsBounds) {
  v1::JobRecord record = Ended(v1::END_CLASS_PROCESS_FAILED);
  record.mutable_history(0)->set_started_unix_ms(std::numeric_limits<int64_t>::min());
  record.mutable_history(0)->set_ended_unix_ms(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(RestartDelay(record, 0, 5), absl::Seconds(10));
  record.mutable_history(0)->set_started_unix_ms(std::numeric_limits<int64_t>::max());
  record.mutable_history(0)->set_ended_unix_ms(std::numeric_limits<int64_t>::min());
  EXPECT_EQ(RestartDelay(record, 0, 2), absl::Seconds(40));
  EXPECT_EQ(RestartDelay(record, 0, 1'000'000), kMaxRestartDelay);
}

TEST(AttemptOutcomeTest, Outcome_OfEachClass) {
  for (const v1::EndClass end_class : AllClasses()) {
    if (end_class == v1::END_CLASS_UNSPECIFIED) continue;
    const v1::JobRecord record = Ended(end_class);
    const AttemptOutcome outcome = OutcomeOf({.record = record, .could_not_start = {"a"}});
    SCOPED_TRACE(v1::EndClass_Name(end_class));
    EXPECT_EQ(outcome.end_class, end_class);
    const bool again = MayRetry(end_class) && end_class != v1::END_CLASS_SUCCEEDED;
    EXPECT_EQ(outcome.state, end_class == v1::END_CLASS_SUCCEEDED ? v1::JOB_STATE_SUCCEEDED
                             : again                              ? v1::JOB_STATE_QUEUED
                                                                  : v1::JOB_STATE_FAILED);
    EXPECT_EQ(outcome.counts_class, again);
    EXPECT_EQ(outcome.counts_restart, CountsAsRestart(end_class));
    const bool failed = end_class == v1::END_CLASS_NODE_FAILED;
    EXPECT_EQ(outcome.delay, outcome.counts_restart ? absl::Seconds(10)
                             : failed               ? kNodeFailureDelay
                                                    : absl::ZeroDuration());
    EXPECT_THAT(outcome.avoid, testing::ElementsAreArray(failed ? std::vector<std::string>{"b", "a"}
                                                                : std::vector<std::string>{}));
  }
}

TEST(AttemptOutcomeTest, Outcome_OfAJobThatAPersonWantsToEnd) {
  for (const v1::EndClass end_class : AllClasses()) {
    if (end_class == v1::END_CLASS_UNSPECIFIED) continue;
    v1::JobRecord record = Ended(end_class);
    const bool succeeded = end_class == v1::END_CLASS_SUCCEEDED;
    record.set_wanted(v1::JOB_ACTION_CANCEL);
    EXPECT_EQ(OutcomeOf({.record = record}).state,
              succeeded ? v1::JOB_STATE_SUCCEEDED : v1::JOB_STATE_CANCELLED);
    record.set_wanted(v1::JOB_ACTION_SUSPEND);
    EXPECT_EQ(OutcomeOf({.record = record}).state, succeeded             ? v1::JOB_STATE_SUCCEEDED
                                                   : MayRetry(end_class) ? v1::JOB_STATE_SUSPENDED
                                                                         : v1::JOB_STATE_FAILED);
  }
}

TEST(AttemptOutcomeTest, Outcome_WithoutARestartLeft_SaysWhichLimitIsReached) {
  v1::JobRecord record = Ended(v1::END_CLASS_PEER_FAILED, /*max_restarts=*/1);
  AttemptOutcome outcome = OutcomeOf({.record = record});
  EXPECT_EQ(outcome.state, v1::JOB_STATE_QUEUED);
  EXPECT_EQ(outcome.why, "restart 1 of 1 after: the cause");
  record.set_restarts(1);
  outcome = OutcomeOf({.record = record});
  EXPECT_EQ(outcome.state, v1::JOB_STATE_FAILED);
  EXPECT_EQ(outcome.why, "the cause; it was restarted 1 time");
  EXPECT_FALSE(outcome.counts_class);
  record.set_restarts(0);
  v1::ClassCount* const limit = record.mutable_spec()->add_class_limits();
  limit->set_end_class(v1::END_CLASS_PROCESS_FAILED);
  outcome = OutcomeOf({.record = record});
  EXPECT_EQ(outcome.state, v1::JOB_STATE_FAILED);
  EXPECT_EQ(outcome.why, "the cause; its failure policy allows 0 restarts after PROCESS_FAILED");
}

TEST(AttemptOutcomeTest, Outcome_OfManyAttemptsInARowThatCouldNotStart_IsAFailure) {
  const v1::JobRecord record = Ended(v1::END_CLASS_NODE_FAILED);
  EXPECT_EQ(OutcomeOf({.record = record, .node_failures = kMaxNodeFailures - 2}).state,
            v1::JOB_STATE_QUEUED);
  const AttemptOutcome outcome =
      OutcomeOf({.record = record, .node_failures = kMaxNodeFailures - 1});
  EXPECT_EQ(outcome.state, v1::JOB_STATE_FAILED);
  EXPECT_EQ(outcome.why, "the cause; 16 attempts in a row could not start");
}

TEST(AttemptOutcomeTest, Outcome_OfARunnerThatIsEndedEarly_Waits) {
  const v1::JobRecord record = Ended(v1::END_CLASS_NODE_LOST);
  EXPECT_EQ(OutcomeOf({.record = record}).delay, absl::ZeroDuration());
  EXPECT_EQ(OutcomeOf({.record = record, .given_up_early = true}).delay, kNodeFailureDelay);
}

}  // namespace
}  // namespace muster::coordinator
