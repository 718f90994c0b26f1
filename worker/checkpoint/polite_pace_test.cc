#include "worker/checkpoint/polite_pace.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

namespace muster {
namespace {

constexpr absl::Duration kMs = absl::Milliseconds(1);

TEST(PolitePaceTest, IdleCores_AreUsed) {
  PolitePace pace(0.02);
  absl::Time now = absl::UnixEpoch();
  for (int i = 1; i < 10; ++i) {
    now += 12 * kMs;
    EXPECT_EQ(pace.Rest({.ran = 2 * i * kMs, .waited = i * kMs / 4}, now), absl::ZeroDuration());
  }
}

TEST(PolitePaceTest, CoresThatAreWanted_AreLeftButForTheShare) {
  PolitePace pace(0.02);
  const absl::Time start = absl::UnixEpoch();
  absl::Time now = start;
  absl::Duration ran, waited;
  for (int i = 1; i <= 20; ++i) {
    ran += 2 * kMs;
    waited += 3 * kMs;
    now += 9 * kMs;  // 4 ms of it for the disk
    now += pace.Rest({.ran = ran, .waited = waited}, now);
  }
  const double share = absl::FDivDuration(ran, now - start);
  EXPECT_GT(share, 0.018);
  EXPECT_LT(share, 0.021);
  // The cores are idle now, which a single piece without a wait does not show.
  int pieces = 0;
  absl::Duration rest;
  do {
    ran += 2 * kMs;
    now += 2 * kMs;
    rest = pace.Rest({.ran = ran, .waited = waited}, now);
    now += rest;
    ++pieces;
  } while (rest > absl::ZeroDuration() && pieces < 20);
  EXPECT_GT(pieces, 1);
  EXPECT_LT(pieces, 20);
}

TEST(PolitePaceTest, WhatTheWorkTookElsewhere_IsMadeUpFor) {
  PolitePace pace(0.02);
  const absl::Time now = absl::UnixEpoch();
  EXPECT_EQ(pace.Rest({.ran = kMs, .waited = 3 * kMs}, now, 2 * kMs), 146 * kMs);
  // No rest if cores are idle.
  PolitePace undisturbed(0.02);
  EXPECT_EQ(undisturbed.Rest({.ran = kMs, .waited = 0 * kMs}, now, 2 * kMs), absl::ZeroDuration());
}

TEST(PolitePaceTest, SlowDisk_IsRestEnough) {
  PolitePace pace(0.02);
  absl::Time now = absl::UnixEpoch();
  EXPECT_GT(pace.Rest({.ran = kMs, .waited = kMs}, now), absl::ZeroDuration());
  now += absl::Seconds(2);
  EXPECT_EQ(pace.Rest({.ran = 2 * kMs, .waited = 2 * kMs}, now), absl::ZeroDuration());
}

TEST(PolitePaceTest, WhatTheThreadDidBefore_DoesNotCount) {
  PolitePace pace(0.02);
  const absl::Time now = absl::UnixEpoch();
  pace.Begin({.ran = absl::Seconds(5), .waited = absl::Seconds(5)}, now);
  EXPECT_EQ(
      pace.Rest({.ran = absl::Seconds(5) + kMs, .waited = absl::Seconds(5) + kMs}, now + 2 * kMs),
      48 * kMs);
}

TEST(PolitePaceTest, LongPiece_DoesNotRestForever) {
  PolitePace pace(0.001);
  EXPECT_EQ(pace.Rest({.ran = absl::Seconds(9), .waited = absl::Seconds(9)}, absl::UnixEpoch()),
            absl::Milliseconds(500));
}

TEST(PolitePaceTest, RestThatMayNotBeLong_IsShort) {
  PolitePace pace(0.02);
  EXPECT_EQ(pace.Rest({.ran = kMs, .waited = kMs}, absl::UnixEpoch(), kMs, 7 * kMs), 7 * kMs);
}

TEST(PolitePaceTest, ThisThread_HasRun) {
  const std::optional<PolitePace::CpuTimes> times = PolitePace::OfThisThread();
  // Some kernels lack these counts.
  if (times.has_value()) {
    EXPECT_GE(times->ran, absl::ZeroDuration());
    EXPECT_GE(times->waited, absl::ZeroDuration());
  }
}

// If a file system refuses direct I/O, one thread writes each file, with the share that several
// threads have otherwise.
TEST(PoliteWritersTest, ThreadThatWritesAlone_HasTheWholeShare) {
  PoliteWriters writers(0.04, 2);
  writers.WriteFromThisThread();
  EXPECT_EQ(writers.ShareOfThisThread(), 0.04);
  EXPECT_EQ(writers.Threads(), 1);
  std::thread([&] {
    EXPECT_EQ(writers.ShareOfThisThread(), 0.02);
    EXPECT_EQ(writers.Threads(), 2);
  }).join();
}

}  // namespace
}  // namespace muster
