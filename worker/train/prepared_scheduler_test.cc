#include "worker/train/prepared_scheduler.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

class CountingScheduler : public Scheduler {
 public:
  explicit CountingScheduler(int64_t limit = 1000) : limit_(limit) {}
  bool Step() override {
    if (count_ == limit_) return false;
    ++count_;
    return true;
  }
  int64_t step_count() const override { return count_; }
  PlainState SaveState() const override { return {}; }
  void CheckState(const PlainState&) const override {}
  void LoadState(const PlainState&) override {}

 private:
  const int64_t limit_;
  int64_t count_ = 0;
};

MicroStep Sync(int64_t window) { return {.sync = true, .window_length = window}; }

TEST(PreparedScheduler, Default_StepsOncePerOptimizerStep) {
  CountingScheduler inner;
  PreparedScheduler scheduler(inner, {.num_processes = 8});
  EXPECT_EQ(scheduler.Step({.sync = false}, false), 0);
  EXPECT_EQ(scheduler.Step(Sync(4), false), 1);
  EXPECT_EQ(scheduler.Step(Sync(4), /*optimizer_step_was_skipped=*/true), 0);
  EXPECT_EQ(inner.step_count(), 1);
}

TEST(PreparedScheduler, ProcessUnits_StepOncePerProcessUnlessBatchesAreSplit) {
  CountingScheduler inner;
  PreparedScheduler folded(inner, {.units = SchedulerUnits::kProcesses, .num_processes = 3});
  EXPECT_EQ(folded.Step(Sync(1), false), 3);
  PreparedScheduler split(
      inner, {.units = SchedulerUnits::kProcesses, .num_processes = 3, .split_batches = true});
  EXPECT_EQ(split.Step(Sync(1), false), 1);
}

TEST(PreparedScheduler, StepWithOptimizerOff_AlwaysStepsOnce) {
  CountingScheduler inner;
  PreparedScheduler scheduler(
      inner,
      {.step_with_optimizer = false, .units = SchedulerUnits::kProcesses, .num_processes = 3});
  EXPECT_EQ(scheduler.Step({.sync = false}, false), 1);
  EXPECT_EQ(scheduler.Step(Sync(1), true), 1);
}

TEST(PreparedScheduler, D12_AdjustScheduler_EndsWithTheTraining) {
  // A schedule of 14 batches; accumulation over 4 gives windows of 4, 4, 4 and 2.
  CountingScheduler inner;
  PreparedScheduler scheduler(inner, {.adjust_scheduler = true});
  Accumulation accumulation({.num_steps = 4, .adjust_scheduler = true});
  for (int i = 0; i < 14; ++i) {
    scheduler.Step(accumulation.Begin(BatchFacts{.is_last = i == 13}), false);
  }
  EXPECT_EQ(inner.step_count(), 14);
}

TEST(PreparedScheduler, EndedSchedule_StaysWhereItIs) {
  CountingScheduler inner(/*limit=*/4);
  PreparedScheduler scheduler(inner, {.units = SchedulerUnits::kProcesses, .num_processes = 3});
  EXPECT_EQ(scheduler.Step(Sync(1), false), 3);
  EXPECT_EQ(scheduler.Step(Sync(1), false), 1);
  EXPECT_EQ(scheduler.Step(Sync(1), false), 0);
}

}  // namespace
}  // namespace muster
