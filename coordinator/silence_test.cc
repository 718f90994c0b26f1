#include "coordinator/silence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

// Returns the facts about one worker of several whose lease has just run out; the others were heard
// a moment ago.
Silence OneOfMany() {
  Silence silence;
  silence.worker = absl::Seconds(6);
  silence.generation = absl::Seconds(1);
  return silence;
}

TEST(Silence, OneWorkerWhileOthersSpeak_IsGivenUp) {
  const SilenceVerdict verdict = JudgeSilence(OneOfMany());
  EXPECT_FALSE(verdict.keep);
  EXPECT_THAT(verdict.why, HasSubstr("other workers of its generation are not silent"));
}

TEST(Silence, NobodyOfTheGenerationSpeaks_IsKeptForTheToleranceAndNoLonger) {
  Silence silence = OneOfMany();
  silence.generation = absl::Seconds(4.1);  // the last beat of another came 1.9 s later
  EXPECT_TRUE(JudgeSilence(silence).keep);
  EXPECT_THAT(JudgeSilence(silence).why, HasSubstr("all workers of its generation are silent"));
  silence.worker = absl::Seconds(95.9);
  EXPECT_TRUE(JudgeSilence(silence).keep);
  silence.worker = absl::Seconds(96);
  EXPECT_FALSE(JudgeSilence(silence).keep);
  EXPECT_THAT(JudgeSilence(silence).why, HasSubstr("outage_tolerance of 1m30s"));
}

TEST(Silence, WithoutTolerance_IsGivenUpAfterTheLease) {
  Silence silence = OneOfMany();
  silence.generation = silence.worker;
  silence.outage_tolerance = absl::ZeroDuration();
  EXPECT_FALSE(JudgeSilence(silence).keep);
}

TEST(Silence, OfAWorkerWhoseAgentSpeaks_IsNoCut) {
  Silence silence = OneOfMany();
  silence.generation = silence.worker;
  silence.agent = absl::Seconds(2);
  EXPECT_FALSE(JudgeSilence(silence).keep);
  EXPECT_THAT(JudgeSilence(silence).why, HasSubstr("its agent sends beats"));
  silence.agent = absl::Seconds(5);
  EXPECT_TRUE(JudgeSilence(silence).keep);
}

TEST(Silence, OthersWaitForTheEndOfTheGeneration_IsGivenUp) {
  Silence silence = OneOfMany();
  silence.generation = silence.worker;
  silence.awaited = true;
  EXPECT_FALSE(JudgeSilence(silence).keep);
  EXPECT_THAT(JudgeSilence(silence).why, HasSubstr("others wait"));
}

TEST(Silence, MostAgentsAtOnce_AreACut_FewAreNot) {
  Silence silence = OneOfMany();
  silence.agents_heard = 2;
  silence.agents_silent = 3;
  EXPECT_TRUE(JudgeSilence(silence).keep);
  EXPECT_THAT(JudgeSilence(silence).why, HasSubstr("3 of 5 agents fell silent at once"));
  silence.agents_heard = 3;  // no majority
  EXPECT_FALSE(JudgeSilence(silence).keep);
  silence.agents_heard = 1;
  silence.agents_silent = 2;  // two machines do die together
  EXPECT_FALSE(JudgeSilence(silence).keep);
}

}  // namespace
}  // namespace muster::coordinator
