#include "muster/internal/loop_tracker.h"

#include <memory>
#include <string>

#include "c10/util/Exception.h"
#include "gtest/gtest.h"
#include "muster/internal/test_parts.h"

namespace muster::internal {
namespace {

BatchInfo Batch(int64_t index, bool is_last, int64_t batches_left = -1) {
  BatchInfo info;
  info.index = index;
  info.is_last = is_last;
  info.batches_left = batches_left;
  return info;
}

// One loader, whose passes the test simulates.
class LoopTrackerTest : public testing::Test {
 protected:
  LoopTrackerTest() {
    parts_.registry.AddLoader(loader_);
    loops_.LoadersAdded();
  }
  void Give(const BatchInfo& info, uint64_t pass = 1) {
    loader_->pass = pass;
    loops_.observer()->OnBatch(pass, std::make_shared<const BatchInfo>(info));
  }
  void End(uint64_t pass = 1) {
    loader_->pass = 0;
    loops_.observer()->OnEnd(pass);
  }

  Parts parts_;
  const std::shared_ptr<PlaceOnlyLoader> loader_ = std::make_shared<PlaceOnlyLoader>("a");
  LoopTracker& loops_ = parts_.loops;
};

TEST_F(LoopTrackerTest, InnermostLoop_GivesTheBatch) {
  EXPECT_EQ(loops_.current_batch(), nullptr);
  Give(Batch(4, false), 1);
  Give(Batch(0, true), 2);
  EXPECT_EQ(loops_.current_batch()->index, 0);
  End(2);
  EXPECT_EQ(loops_.current_batch()->index, 4);
  End(1);
  EXPECT_EQ(loops_.current_batch(), nullptr);
  EXPECT_EQ(loops_.batches(), 2);
}

TEST_F(LoopTrackerTest, LoopsSideBySideThatDisagree_AreRefused) {
  Give(Batch(0, false, 5), 1);
  Give(Batch(0, false, 5), 2);
  Give(Batch(1, false, 4), 1);
  EXPECT_THROW(loops_.BatchOfMicroStep(), c10::Error);
  Give(Batch(1, false, 4), 2);
  EXPECT_EQ(loops_.BatchOfMicroStep()->batches_left, 4);
}

TEST_F(LoopTrackerTest, ShuffledLoadersSideBySideInOneOrder_AreWarnedOf) {
  struct Case {
    int64_t seed, epoch, num_samples;
    std::string order, signature;
    bool warned;
  };
  for (const Case& other :
       {Case{7, 2, 40, "shuffle", "b", true}, Case{6, 3, 40, "shuffle", "b", true},
        Case{8, 2, 40, "shuffle", "b", false}, Case{7, 2, 41, "shuffle", "b", false},
        Case{7, 2, 40, "sequential", "b", false}, Case{7, 2, 40, "shuffle", "b seed=7", false}}) {
    Parts parts;
    const auto first = std::make_shared<PlaceOnlyLoader>("a");
    const auto second = std::make_shared<PlaceOnlyLoader>(other.signature);
    first->state = {.epoch = 2, .seed = 7, .num_samples = 40, .order = "shuffle"};
    second->state = {.epoch = other.epoch,
                     .seed = other.seed,
                     .num_samples = other.num_samples,
                     .order = other.order};
    first->pass = 1;
    second->pass = 2;
    for (const auto& loader : {first, second}) parts.registry.AddLoader(loader);
    parts.loops.LoadersAdded();
    testing::internal::CaptureStderr();
    for (int index = 0; index < 3; ++index) {
      for (const uint64_t pass : {1, 2}) {
        parts.loops.observer()->OnBatch(
            pass, std::make_shared<const BatchInfo>(Batch(index, index == 2)));
      }
    }
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("in the same order") != std::string::npos, other.warned) << log;
    EXPECT_EQ(log.find("in the same order"), log.rfind("in the same order"));
  }
}

TEST_F(LoopTrackerTest, EpochTrainedToTheEnd_IsDone) {
  loops_.SetEpoch(2, /*open=*/true);
  Give(Batch(0, true));
  loops_.MarkTrained();
  EXPECT_FALSE(loops_.EpochIsDone());
  End();
  EXPECT_TRUE(loops_.EpochIsDone());
  CheckpointInfo info;
  loops_.SavePlace(&info);
  EXPECT_EQ(info.epoch, 2);
  EXPECT_EQ(info.cursor["first_epoch"], 3);
}

TEST_F(LoopTrackerTest, LoadedPlace_SkipsFinishedPassesOfItsEpoch) {
  CheckpointInfo info;
  info.cursor = {{"first_epoch", 1}, {"finished_passes.0", 1}};
  loops_.LoadPlace(info, 1);
  EXPECT_EQ(loops_.FirstEpoch(3, ""), 1);
  EXPECT_FALSE(loops_.observer()->SkipsPass(*loader_));
  loops_.SetEpoch(1, /*open=*/true);
  EXPECT_TRUE(loops_.observer()->SkipsPass(*loader_));
  EXPECT_FALSE(loops_.observer()->SkipsPass(*loader_));
}

TEST(LoopTracker, ObserverThatOutlivesIt_DoesNothing) {
  auto parts = std::make_unique<Parts>();
  const std::shared_ptr<LoaderObserver> observer = parts->loops.observer();
  parts.reset();
  observer->OnStart();
  observer->OnBatch(1, std::make_shared<const BatchInfo>());
  EXPECT_TRUE(observer->CountsAsTrained(1));
  observer->OnEnd(1);
}

}  // namespace
}  // namespace muster::internal
