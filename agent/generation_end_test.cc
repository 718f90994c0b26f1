#include "agent/generation_end.h"

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

AttemptEnd End(AttemptEnd::Cause cause, v1::EndClass end_class = v1::END_CLASS_UNSPECIFIED) {
  AttemptEnd end = {"rank 1 died", {"line"}, cause};
  end.end_class = end_class;
  return end;
}

absl::Status Refused(v1::ErrorReason reason, bool has_culprit = false) {
  v1::ErrorDetail detail;
  detail.set_reason(reason);
  if (has_culprit) detail.add_culprits()->set_rank(1);
  return rpc::WithDetail(absl::FailedPreconditionError("it has ended"), detail);
}

// All machines must count the same, whether or not they have read the key "end".
TEST(GenerationEndTest, AnotherAttemptBegins_WordsKeepCauseClassAndReason) {
  for (const AttemptEnd& end :
       {End(AttemptEnd::Cause::kFailed),
        End(AttemptEnd::Cause::kFailed, v1::END_CLASS_PROCESS_FAILED),
        End(AttemptEnd::Cause::kFailed, v1::END_CLASS_OUT_OF_MEMORY),
        End(AttemptEnd::Cause::kFailed, v1::END_CLASS_HANG), End(AttemptEnd::Cause::kMachineLost),
        End(AttemptEnd::Cause::kMachineLeft), End(AttemptEnd::Cause::kMachineCame)}) {
    const std::string reason = AnotherBegins(end);
    // The coordinator's words: in the directive, and to a call that waited.
    for (const char* const added : {"", "; join the next one"}) {
      for (const bool elastic : {true, false}) {
        const AttemptEnd told = EndOfGeneration(
            elastic, absl::StrCat("generation 1 has ended: ended on request: ", reason, added),
            /*has_culprit=*/false);
        EXPECT_EQ(told.cause, end.cause) << reason;
        EXPECT_EQ(ClassOf(told), ClassOf(end)) << reason;
        EXPECT_EQ(told.why, "rank 1 died");
      }
    }
  }
}

TEST(GenerationEndTest, AgentThatGaveUp_HasLeft_WhichCountsOnlyIfTheNumberOfMachinesIsFixed) {
  const std::string why = "ended on request: machine 1 gave up: no answer";
  EXPECT_EQ(EndOfGeneration(/*elastic=*/true, why, false).cause, AttemptEnd::Cause::kMachineLeft);
  EXPECT_EQ(EndOfGeneration(/*elastic=*/false, why, false).cause, AttemptEnd::Cause::kFailed);
  EXPECT_EQ(EndOfGeneration(/*elastic=*/true, why, false).why, why);
}

TEST(GenerationEndTest, MemberIsLost_IsNotCalledARank) {
  const std::string why = "rank 1 (node1 on gpu-1, pid 7) gave no sign of life for 4s";
  const AttemptEnd lost = EndOfGeneration(/*elastic=*/true, why, /*has_culprit=*/true);
  EXPECT_EQ(lost.cause, AttemptEnd::Cause::kMachineLost);
  EXPECT_EQ(lost.why,
            "a machine is lost: machine 1 (node1 on gpu-1, pid 7) gave no sign of life for 4s");
  const AttemptEnd failed = EndOfGeneration(/*elastic=*/false, why, /*has_culprit=*/true);
  EXPECT_EQ(failed.cause, AttemptEnd::Cause::kFailed);
  EXPECT_EQ(failed.why, "machine 1 (node1 on gpu-1, pid 7) gave no sign of life for 4s");
  // What names no machine stays as it is.
  for (const char* const other : {"rank ", "rank 1", "rank x (node1)", " (node1) rank 1", ""}) {
    EXPECT_EQ(EndOfGeneration(/*elastic=*/false, other, /*has_culprit=*/true).why, other);
  }
}

TEST(GenerationEndTest, RefusedCall_EndsTheAttemptOnlyIfItSaysSo) {
  for (const bool elastic : {true, false}) {
    EXPECT_FALSE(EndOfRefused(elastic, absl::UnavailableError("away")).has_value());
    EXPECT_FALSE(EndOfRefused(elastic, Refused(v1::ERROR_REASON_WAIT_TIMEOUT)).has_value());
    EXPECT_TRUE(EndOfRefused(elastic, Refused(v1::ERROR_REASON_GENERATION_ENDED)).has_value());
    for (const v1::ErrorReason reason :
         {v1::ERROR_REASON_STALE_GENERATION, v1::ERROR_REASON_NOT_MEMBER,
          v1::ERROR_REASON_LEASE_EXPIRED}) {
      EXPECT_TRUE(IsCutOff(reason));
      const std::optional<AttemptEnd> end = EndOfRefused(elastic, Refused(reason));
      ASSERT_EQ(end.has_value(), elastic) << "a fixed number of machines waits for this one";
      if (elastic) {
        EXPECT_EQ(end->cause, AttemptEnd::Cause::kMachineLost);
        EXPECT_EQ(end->why, "this machine was cut off from the others: it has ended");
      }
    }
  }
  const absl::Status lost = Refused(v1::ERROR_REASON_GENERATION_ENDED, /*has_culprit=*/true);
  EXPECT_TRUE(HasCulprit(lost));
  EXPECT_EQ(EndOfRefused(/*elastic=*/true, lost)->cause, AttemptEnd::Cause::kMachineLost);
  EXPECT_FALSE(HasCulprit(Refused(v1::ERROR_REASON_GENERATION_ENDED)));
}

TEST(GenerationEndTest, RefusedPlace_SpeaksOfMachines) {
  EXPECT_EQ(
      OfMachines("job \"job.agents\": 1 of 3 workers joined within 2s; missing: rank 1, rank 2: "
                 "start the missing workers or lower min_workers"),
      "job \"job.agents\": 1 of 3 machines joined within 2s; missing: machine 1, machine 2: start "
      "the missing machines");
}

}  // namespace
}  // namespace muster::agent
