#include "worker/collective/shared_parts.h"

#include <sys/resource.h>

#include "ATen/Functions.h"
#include "gtest/gtest.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

constexpr int64_t kPart = 3 * kSharedPartPage / 4;  // floats

TEST(SharedParts, WhatARankWrites_TheOthersRead) {
  for (const bool whole : {false, true}) {
    RunShmRanks(3, [&](Comm& comm) {
      const auto parts = ShareParts(comm, kPart, at::kFloat, whole);
      ASSERT_TRUE(parts.has_value());
      EXPECT_EQ(parts->mine.numel(), kPart);
      EXPECT_TRUE(at::equal(parts->all, at::zeros({3 * kPart})));
      comm.Barrier();
      parts->mine.fill_(comm.rank() + 1);
      comm.Barrier();
      for (int r = 0; r < 3; ++r) {
        EXPECT_TRUE(at::equal(parts->all.narrow(0, r * kPart, kPart), at::full({kPart}, r + 1.0F)));
        if (!whole) continue;
        // The other ranks' parts are only zeroed memory here.
        EXPECT_TRUE(at::equal(parts->whole.narrow(0, r * kPart, kPart),
                              at::full({kPart}, r == comm.rank() ? r + 1.0F : 0.0F)));
      }
      EXPECT_EQ(parts->whole.defined(), whole);
    });
  }
}

TEST(SharedParts, RankThatHasGone_LeavesItsValues) {
  RunShmRanks(2, [](Comm& comm) {
    auto parts = ShareParts(comm, kPart, at::kFloat, /*whole=*/false);
    ASSERT_TRUE(parts.has_value());
    parts->mine.fill_(7);
    comm.Barrier();
    if (comm.rank() == 1) parts.reset();
    comm.Barrier();
    if (comm.rank() == 0) {
      EXPECT_TRUE(at::equal(parts->all, at::full({2 * kPart}, 7.0F)));
    }
  });
}

TEST(SharedParts, WithoutMemoryOrSharing_AreNone) {
  RunRanks(2, [](Comm& comm) {
    EXPECT_FALSE(RanksShareMemory(comm));
    EXPECT_FALSE(ShareParts(comm, kPart, at::kFloat, false).has_value());
    EXPECT_FALSE(AllocateReachable(comm, kPart, at::kFloat).defined());
  });
  // The limit of the process, which contains all ranks here.
  rlimit enough = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &enough), 0);
  rlimit small = enough;
  small.rlim_cur = kSharedPartPage;
  RunShmRanks(2, [&](Comm& comm) {
    EXPECT_TRUE(RanksShareMemory(comm));
    comm.Barrier();
    if (comm.rank() == 0) setrlimit(RLIMIT_FSIZE, &small);
    comm.Barrier();
    EXPECT_FALSE(ShareParts(comm, kPart, at::kFloat, false).has_value());
    comm.Barrier();
    if (comm.rank() == 0) setrlimit(RLIMIT_FSIZE, &enough);
    comm.Barrier();
    EXPECT_TRUE(ShareParts(comm, kPart, at::kFloat, false).has_value());
    EXPECT_TRUE(AllocateReachable(comm, kPart, at::kFloat).defined());
  });
}

}  // namespace
}  // namespace muster
