#include "coordinator/jobs/attempt_times.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace muster::coordinator {
namespace {

using Stage = AttemptStage;

absl::Time At(int64_t ms) { return absl::FromUnixMillis(ms); }

bool Note(Stage stage, int64_t at, int64_t now, v1::AttemptTimes* times, int64_t not_before = 0) {
  return NoteStage({.stage = stage, .at = At(at), .now = At(now), .not_before = not_before}, times);
}

TEST(AttemptTimes, Stages_AreNotedOnce) {
  v1::AttemptTimes times;
  EXPECT_TRUE(Note(Stage::kPlaced, 1000, 1000, &times));
  EXPECT_TRUE(Note(Stage::kSealed, 2000, 2000, &times));
  EXPECT_TRUE(Note(Stage::kRestored, 2500, 3000, &times));
  EXPECT_TRUE(Note(Stage::kStepped, 2700, 3000, &times));
  EXPECT_FALSE(Note(Stage::kRestored, 2400, 4000, &times));
  EXPECT_FALSE(Note(Stage::kPlaced, 5000, 5000, &times));
  EXPECT_EQ(times.placed_unix_ms(), 1000);
  EXPECT_EQ(times.sealed_unix_ms(), 2000);
  EXPECT_EQ(times.restored_unix_ms(), 2500);
  EXPECT_EQ(times.stepped_unix_ms(), 2700);
  EXPECT_EQ(LatestOf(times), 2700);
  EXPECT_EQ(LatestOf({}), 0);
}

TEST(AttemptTimes, WhatIsToldOfThePast_IsLimited) {
  v1::AttemptTimes times;
  Note(Stage::kPlaced, 1000, 1000, &times);
  Note(Stage::kSealed, 2000, 2000, &times);
  EXPECT_TRUE(Note(Stage::kRestored, 500, 3000, &times));
  EXPECT_EQ(times.restored_unix_ms(), 2000) << "not before the seal";
  EXPECT_TRUE(Note(Stage::kStepped, 9000, 3000, &times));
  EXPECT_EQ(times.stepped_unix_ms(), 3000) << "not in the future";
  v1::AttemptTimes infinite;
  EXPECT_TRUE(NoteStage(
      {.stage = Stage::kFailed, .at = absl::InfinitePast(), .now = At(7000), .not_before = 6000},
      &infinite));
  EXPECT_EQ(infinite.failed_unix_ms(), 6000);
}

TEST(AttemptTimes, StageBeforeAKnownOne_IsUnknown) {
  v1::AttemptTimes times;
  Note(Stage::kStepped, 3000, 3000, &times);
  EXPECT_FALSE(Note(Stage::kRestored, 2000, 4000, &times));
  EXPECT_FALSE(Note(Stage::kSealed, 2000, 4000, &times));
  EXPECT_EQ(times.sealed_unix_ms(), 0);
}

TEST(AttemptTimes, Clock_ThatHasGoneBack_SaysNothing) {
  v1::AttemptTimes times;
  Note(Stage::kPlaced, 5000, 5000, &times);
  EXPECT_FALSE(Note(Stage::kSealed, 4000, 4000, &times));
  EXPECT_TRUE(Note(Stage::kSealed, 6000, 6000, &times));
  v1::AttemptTimes next;
  EXPECT_FALSE(Note(Stage::kPlaced, 6000, 6000, &next, /*not_before=*/7000));
  EXPECT_TRUE(Note(Stage::kPlaced, 7000, 7000, &next, /*not_before=*/7000));
}

TEST(AttemptTimes, Failure_IsTheEarliest_AlsoAfterTheDecision) {
  v1::AttemptTimes times;
  Note(Stage::kStepped, 1000, 1000, &times);
  Note(Stage::kDetected, 5000, 5000, &times);
  Note(Stage::kDecided, 5200, 5200, &times);
  EXPECT_TRUE(Note(Stage::kFailed, 5100, 6000, &times));
  EXPECT_EQ(times.failed_unix_ms(), 5000) << "not after it was known";
  EXPECT_TRUE(Note(Stage::kFailed, 4000, 6000, &times));
  EXPECT_FALSE(Note(Stage::kFailed, 4500, 6000, &times));
  EXPECT_EQ(times.failed_unix_ms(), 4000);
  EXPECT_TRUE(Note(Stage::kFailed, 10, 6000, &times));
  EXPECT_EQ(times.failed_unix_ms(), 1000);
}

TEST(AttemptTimes, Seal_IsTheLastBeforeTheState_AndWhatGoesOnHasNotFailed) {
  v1::AttemptTimes times;
  Note(Stage::kPlaced, 1000, 1000, &times);
  Note(Stage::kSealed, 2000, 2000, &times);
  Note(Stage::kDetected, 2500, 2500, &times);
  EXPECT_TRUE(Note(Stage::kSealed, 3000, 3000, &times));
  EXPECT_EQ(times.sealed_unix_ms(), 3000);
  EXPECT_EQ(times.detected_unix_ms(), 0);
  Note(Stage::kStepped, 4000, 4000, &times);
  Note(Stage::kDetected, 5000, 5000, &times);
  EXPECT_TRUE(Note(Stage::kSealed, 6000, 6000, &times));
  EXPECT_EQ(times.sealed_unix_ms(), 3000);
  EXPECT_EQ(times.detected_unix_ms(), 0);
  Note(Stage::kDetected, 7000, 7000, &times);
  Note(Stage::kDecided, 7000, 7000, &times);
  EXPECT_FALSE(Note(Stage::kSealed, 8000, 8000, &times));
  EXPECT_EQ(times.detected_unix_ms(), 7000);
}

}  // namespace
}  // namespace muster::coordinator
