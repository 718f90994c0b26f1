#include "worker/track/logger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/ones.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

struct Lines {
  Mutex mu;
  std::vector<std::string> all ABSL_GUARDED_BY(mu);

  RankLogger::Sink Sink() {
    return [this](LogLevel, const std::string& line, const char*, int) {
      MutexLock lock(&mu);
      all.push_back(line);
    };
  }
  std::vector<std::string> All() {
    MutexLock lock(&mu);
    return all;
  }
};

TEST(RankLogger, MainProcessOnly_IsTheDefault) {
  Lines lines;
  RunRanks(3, [&](Comm& comm) { RankLogger(comm, lines.Sink()).Info("hello"); });
  EXPECT_THAT(lines.All(), ElementsAre("[RANK 0] hello"));
}

TEST(RankLogger, AllRanks_SpeakWhenAsked) {
  Lines lines;
  RunRanks(3, [&](Comm& comm) {
    RankLogger(comm, lines.Sink()).Warning("x", {.main_process_only = false});
  });
  EXPECT_THAT(lines.All(), UnorderedElementsAre("[RANK 0] x", "[RANK 1] x", "[RANK 2] x"));
}

TEST(RankLogger, InOrder_RanksSpeakOneAfterTheOther) {
  Lines lines;
  RunRanks(4, [&](Comm& comm) {
    RankLogger logger(comm, lines.Sink());
    for (int i = 0; i < 5; ++i) logger.Info("x", {.in_order = true});
  });
  const std::vector<std::string> all = lines.All();
  ASSERT_EQ(all.size(), 20u);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i], "[RANK " + std::to_string(i % 4) + "] x");
  }
}

TEST(RankLogger, BelowTheLevel_NothingIsSaidButBarriersHold) {
  Lines lines;
  const LogLevel before = GetLogLevel();
  SetLogLevel(LogLevel::kError);
  RunRanks(2, [&](Comm& comm) {
    RankLogger logger(comm, lines.Sink());
    logger.Info("x", {.in_order = true});
    logger.Error("y");
  });
  SetLogLevel(before);
  EXPECT_THAT(lines.All(), ElementsAre("[RANK 0] y"));
}

TEST(RankLogger, WarningOnceInOrder_IsACollectiveOnEachRankEachTime) {
  Lines lines;
  RunRanks(2, [&](Comm& comm) {
    RankLogger logger(comm, lines.Sink());
    if (comm.rank() == 0) logger.WarningOnce("x");
    logger.WarningOnce("x", {.in_order = true});
    // Ranks that are out of step would disagree, or wait for each other.
    at::Tensor one = at::ones({1});
    comm.AllReduce(one, ReduceOp::kSum);
    EXPECT_EQ(one.item<float>(), 2);
  });
  EXPECT_THAT(lines.All(), UnorderedElementsAre("[RANK 0] x", "[RANK 1] x"));
}

TEST(RankLogger, InOrderWhereNotAllTakePart_ThrowsBeforeTheBarrier) {
  Lines lines;
  RunRanks(2, [&](Comm& comm) {
    // Rank 1 makes no call.
    if (comm.rank() == 1) return;
    RankLogger logger(comm, lines.Sink(), [] { throw std::runtime_error("not all"); });
    EXPECT_THROW(logger.Info("x", {.in_order = true}), std::runtime_error);
    logger.Info("y");
  });
  EXPECT_THAT(lines.All(), ElementsAre("[RANK 0] y"));
}

TEST(RankLogger, WarningOnce_IsSaidOncePerText) {
  Lines lines;
  RunRanks(1, [&](Comm& comm) {
    RankLogger logger(comm, lines.Sink());
    for (int i = 0; i < 3; ++i) {
      logger.WarningOnce("a");
      logger.WarningOnce("b");
    }
  });
  EXPECT_THAT(lines.All(), ElementsAre("[RANK 0] a", "[RANK 0] b"));
}

}  // namespace
}  // namespace muster
