#include "worker/track/tracker_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <stdexcept>
#include <thread>

#include "base/fake_clock.h"
#include "base/test_wait.h"

namespace muster {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Record {
  Mutex mu;
  std::vector<std::string> calls ABSL_GUARDED_BY(mu);
  Notification entered;
  Notification proceed;

  void Add(const std::string& call) {
    MutexLock lock(&mu);
    calls.push_back(call);
  }
  std::vector<std::string> Calls() {
    MutexLock lock(&mu);
    return calls;
  }
};

class FakeTracker final : public GeneralTracker {
 public:
  FakeTracker(std::string name, Record* record, bool main_only = true)
      : name_(std::move(name)), record_(record), main_only_(main_only) {}
  std::string name() const override { return name_; }
  bool main_process_only() const override { return main_only_; }
  absl::Status start() override {
    record_->Add("start");
    return name_ == "broken" ? absl::UnavailableError("no server") : absl::OkStatus();
  }
  absl::Status store_init_configuration(const TrackerValues& config) override {
    record_->Add("config " + config[0].first);
    return absl::OkStatus();
  }
  absl::Status log(const TrackerEntry& entry) override {
    if (name_ == "slow") {
      if (!record_->entered.HasBeenNotified()) record_->entered.Notify();
      record_->proceed.WaitForNotification();
    }
    if (name_ == "failing") return absl::UnavailableError("gone");
    if (name_ == "throwing") throw std::runtime_error("oops");
    if (name_ == "throwing a number") throw 1;
    record_->Add(entry.values[0].first + "=" + entry.values[0].second.text() + "@" +
                 std::to_string(entry.step.value_or(-1)) + "/" +
                 std::to_string(absl::ToUnixSeconds(entry.time)));
    return absl::OkStatus();
  }
  absl::Status finish() override {
    record_->Add("finish");
    return absl::OkStatus();
  }

 private:
  const std::string name_;
  Record* const record_;
  const bool main_only_;
};

template <typename... Trackers>
std::vector<std::unique_ptr<GeneralTracker>> List(Trackers... trackers) {
  std::vector<std::unique_ptr<GeneralTracker>> list;
  (list.push_back(std::move(trackers)), ...);
  return list;
}

TEST(TrackerSet, Entries_ComeInOrderWithTheTimeOfTheCall) {
  Record record;
  FakeClock clock(absl::FromUnixSeconds(100));
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("a", &record)), 0, {{"lr", 1}},
                               {.clock = &clock});
  ASSERT_TRUE(set.ok());
  (*set)->Log({{"loss", 1}}, 4);
  clock.Advance(absl::Seconds(5));
  (*set)->Log({{"loss", 2}});
  EXPECT_TRUE((*set)->Finish().ok());
  EXPECT_TRUE((*set)->Finish().ok());
  (*set)->Log({{"loss", 3}});
  EXPECT_THAT(record.Calls(),
              ElementsAre("start", "config lr", "loss=1@4/100", "loss=2@5/105", "finish"));
}

TEST(TrackerSet, OtherRanks_HaveOnlyTheTrackersForAll) {
  Record main, all;
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("main", &main),
                                    std::make_unique<FakeTracker>("all", &all, false)),
                               1, {}, {});
  ASSERT_TRUE(set.ok());
  (*set)->Log({{"loss", 1}}, 1);
  (*set)->Flush();
  EXPECT_TRUE(main.Calls().empty());
  EXPECT_EQ(all.Calls().size(), 2u);
  EXPECT_EQ((*(*set)->Get("main"))->name(), "blank");
  EXPECT_EQ((*(*set)->Get("all"))->name(), "all");
  EXPECT_THAT(std::string((*set)->Get("x").status().message()), HasSubstr("it has main, all"));
}

TEST(TrackerSet, TrackerThatDoesNotStart_IsNamed) {
  Record record;
  const auto set =
      TrackerSet::Start(List(std::make_unique<FakeTracker>("broken", &record)), 0, {}, {});
  EXPECT_EQ(std::string(set.status().message()), "tracker broken: no server");
}

TEST(TrackerSet, TrackerThatDoesNotStart_OthersThatHaveStartedAreFinished) {
  Record good, broken, later;
  EXPECT_FALSE(TrackerSet::Start(List(std::make_unique<FakeTracker>("good", &good),
                                      std::make_unique<FakeTracker>("broken", &broken),
                                      std::make_unique<FakeTracker>("later", &later)),
                                 0, {}, {})
                   .ok());
  EXPECT_THAT(good.Calls(), ElementsAre("start", "finish"));
  EXPECT_THAT(broken.Calls(), ElementsAre("start"));
  EXPECT_THAT(later.Calls(), ElementsAre());
}

TEST(TrackerSet, NullTrackerOrTwoOfOneName_AreRefused) {
  Record record;
  EXPECT_THAT(
      std::string(
          TrackerSet::Start(List(std::unique_ptr<FakeTracker>()), 1, {}, {}).status().message()),
      HasSubstr("null tracker"));
  EXPECT_THAT(std::string(TrackerSet::Start(List(std::make_unique<FakeTracker>("a", &record),
                                                 std::make_unique<FakeTracker>("a", &record)),
                                            1, {}, {})
                              .status()
                              .message()),
              HasSubstr("two trackers named \"a\""));
  EXPECT_THAT(record.Calls(), ElementsAre());
}

TEST(TrackerSet, FailingTrackers_DoNotStopOthersAndAreToldAtTheEnd) {
  Record failing, throwing, number, good;
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("failing", &failing),
                                    std::make_unique<FakeTracker>("throwing", &throwing),
                                    std::make_unique<FakeTracker>("throwing a number", &number),
                                    std::make_unique<FakeTracker>("good", &good)),
                               0, {}, {});
  for (int i = 0; i < 3; ++i) (*set)->Log({{"loss", i}}, i);
  EXPECT_EQ(std::string((*set)->Finish().message()), "tracker failing: gone");
  EXPECT_EQ(good.Calls().size(), 5u);
}

TEST(TrackerSet, TrackerThatIsTaken_HasNoCallInProgress) {
  Record record;
  FakeClock clock(absl::FromUnixSeconds(100));
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("slow", &record)), 0, {},
                               {.clock = &clock});
  ASSERT_TRUE(set.ok());
  (*set)->Log({{"loss", 1}}, 1);
  (*set)->Log({{"loss", 2}}, 2);
  record.entered.WaitForNotification();
  record.proceed.Notify();
  const auto tracker = (*set)->Get("slow");
  ASSERT_TRUE(tracker.ok());
  EXPECT_THAT(record.Calls(), ElementsAre("start", "loss=1@1/100", "loss=2@2/100"));
  EXPECT_TRUE((*tracker)->log({{{"own", 3}}, 3, clock.WallNow()}).ok());
  EXPECT_TRUE((*set)->Finish().ok());
}

TEST(TrackerSet, TrackerThatAsksForItself_DoesNotWaitForItself) {
  class Asking final : public GeneralTracker {
   public:
    std::string name() const override { return "asking"; }
    absl::Status start() override { return absl::OkStatus(); }
    absl::Status log(const TrackerEntry&) override { return set->Get("asking").status(); }
    TrackerSet* set = nullptr;
  };
  auto tracker = std::make_unique<Asking>();
  Asking* const asking = tracker.get();
  auto set = TrackerSet::Start(List(std::move(tracker)), 0, {}, {});
  ASSERT_TRUE(set.ok());
  asking->set = set->get();
  (*set)->Log({{"loss", 1}});
  EXPECT_TRUE((*set)->Finish().ok());
}

TEST(TrackerSet, EntriesWithoutSteps_AreNumberedFromTheLargestNextStepOn) {
  class Continued final : public GeneralTracker {
   public:
    Continued(std::string name, int64_t next) : name_(std::move(name)), next_(next) {}
    std::string name() const override { return name_; }
    absl::Status start() override { return absl::OkStatus(); }
    int64_t next_step() const override { return next_; }
    absl::Status log(const TrackerEntry& entry) override {
      steps.push_back(entry.step.value());
      return absl::OkStatus();
    }
    std::vector<int64_t> steps;

   private:
    const std::string name_;
    const int64_t next_;
  };
  auto first = std::make_unique<Continued>("a", 7);
  auto second = std::make_unique<Continued>("b", 3);
  const std::vector<Continued*> both = {first.get(), second.get()};
  auto set = TrackerSet::Start(List(std::move(first), std::move(second)), 0, {}, {});
  ASSERT_TRUE(set.ok());
  (*set)->Log({{"loss", 1}});
  (*set)->Log({{"loss", 2}}, 20);
  (*set)->Log({{"loss", 3}});
  EXPECT_TRUE((*set)->Finish().ok());
  for (const Continued* tracker : both) EXPECT_THAT(tracker->steps, ElementsAre(7, 20, 21));
}

TEST(TrackerSet, FullQueue_LogWaitsAndLosesNothing) {
  Record record;
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("slow", &record)), 0, {},
                               {.queue_limit = 2, .patience = absl::InfiniteDuration()});
  std::thread program([&] {
    for (int i = 0; i < 6; ++i) (*set)->Log({{"x", i}});
  });
  WaitUntil([&] { return (*set)->waiting() > 0 || (*set)->dropped() > 0; });
  record.proceed.Notify();
  program.join();
  EXPECT_TRUE((*set)->Finish().ok());
  EXPECT_EQ((*set)->dropped(), 0);
  const std::vector<std::string> calls = record.Calls();
  ASSERT_EQ(calls.size(), 8u);
  for (int i = 0; i < 6; ++i) {
    const std::string number = std::to_string(i);
    EXPECT_THAT(calls[i + 1], HasSubstr("x=" + number + "@" + number));
  }
}

TEST(TrackerSet, TrackerThatHangs_DoesNotHoldTrainingAndIsNamed) {
  Record record;
  std::vector<std::string> warnings;
  auto set = TrackerSet::Start(
      List(std::make_unique<FakeTracker>("slow", &record)), 0, {},
      {.queue_limit = 2, .patience = absl::ZeroDuration(), .warn = [&](const std::string& text) {
         warnings.push_back(text);
       }});
  (*set)->Log({{"x", 0}});
  record.entered.WaitForNotification();
  for (int i = 1; i <= 5; ++i) (*set)->Log({{"x", i}});
  EXPECT_EQ((*set)->dropped(), 3);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("tracker slow has been writing an entry for"));
  record.proceed.Notify();
  (*set)->Flush();
  (*set)->Log({{"x", 6}});
  EXPECT_TRUE((*set)->Finish().ok());
  const std::vector<std::string> calls = record.Calls();
  ASSERT_EQ(calls.size(), 6u);
  EXPECT_THAT(calls[3], HasSubstr("x=2@2"));
  EXPECT_THAT(calls[4], HasSubstr("x=6@6")) << "the steps of what was dropped are not given again";
  EXPECT_THAT(warnings.back(), HasSubstr("3 tracked entries were dropped"));
}

// Writes an entry on request.
class SteppedTracker final : public GeneralTracker {
 public:
  explicit SteppedTracker(int64_t* written) : written_(written) {}
  std::string name() const override {
    EXPECT_FALSE(logging_) << "name() in a call of log()";
    return "stepped";
  }
  absl::Status start() override { return absl::OkStatus(); }
  absl::Status log(const TrackerEntry&) override {
    MutexLock lock(&mu_);
    logging_ = true;
    while (*written_ >= allowed_) changed_.Wait(&mu_);
    ++*written_;
    logging_ = false;
    return absl::OkStatus();
  }
  void Allow(int64_t entries) {
    MutexLock lock(&mu_);
    allowed_ += entries;
    changed_.SignalAll();
  }
  bool HasWrittenAll() {
    MutexLock lock(&mu_);
    return *written_ == allowed_ && logging_;
  }

 private:
  int64_t* const written_;  // outlives the tracker
  std::atomic<bool> logging_ = false;
  Mutex mu_;
  CondVar changed_;
  int64_t allowed_ ABSL_GUARDED_BY(mu_) = 0;
};

class SteppedTrackerSet {
 public:
  // Makes a set with a full queue of eight, and an entry that the tracker is writing.
  SteppedTrackerSet() {
    auto tracker = std::make_unique<SteppedTracker>(&written_);
    tracker_ = tracker.get();
    set_ = *TrackerSet::Start(
        List(std::move(tracker)), 0, {},
        {.queue_limit = 8, .clock = &clock_, .warn = [this](const std::string& text) {
           warnings_.push_back(text);
         }});
    Log();
    Step(0);
    for (int i = 0; i < 8; ++i) Log();
  }
  ~SteppedTrackerSet() { tracker_->Allow(1000); }
  void Log() { set_->Log({{"x", 1}}); }
  // Writes as many entries, the last one after `time`.
  void Step(int entries, absl::Duration time = absl::ZeroDuration()) {
    clock_.Advance(time);
    tracker_->Allow(entries);
    WaitUntil([&] { return tracker_->HasWrittenAll(); });
  }
  // Logs an entry for which there is no room, and then makes room for one.
  void LogAndStep(absl::Duration time = absl::ZeroDuration()) {
    const int64_t before = dropped();
    std::thread program([this] { Log(); });
    WaitUntil([&] { return set_->waiting() > 0 || dropped() > before; });
    Step(1, time);
    program.join();
  }
  int64_t dropped() const { return set_->dropped(); }
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  int64_t written_ = 0;
  FakeClock clock_{absl::FromUnixSeconds(100)};
  std::vector<std::string> warnings_;
  SteppedTracker* tracker_ = nullptr;
  std::unique_ptr<TrackerSet> set_;
};

TEST(TrackerSet, TrackerThatIsFarTooSlow_HoldsTrainingForThePatienceInAll) {
  SteppedTrackerSet set;
  set.LogAndStep(absl::Seconds(30));
  set.LogAndStep(absl::Seconds(30));
  EXPECT_EQ(set.dropped(), 0);
  set.LogAndStep();
  EXPECT_EQ(set.dropped(), 1);
  // Entries for which there is room are not lost.
  set.Log();
  EXPECT_EQ(set.dropped(), 1);
  set.LogAndStep();
  EXPECT_EQ(set.dropped(), 2);
  EXPECT_THAT(set.warnings(), Contains(HasSubstr("full for 1m")).Times(1));
}

TEST(TrackerSet, QueueThatHasFallenToHalf_IsWaitedForAndReportedAgain) {
  SteppedTrackerSet set;
  set.LogAndStep(absl::Minutes(1));
  set.LogAndStep();
  EXPECT_EQ(set.dropped(), 1);
  set.Step(3);
  for (int i = 0; i < 4; ++i) set.Log();
  set.LogAndStep(absl::Minutes(1));
  EXPECT_EQ(set.dropped(), 1);
  set.LogAndStep();
  EXPECT_EQ(set.dropped(), 2);
  EXPECT_THAT(set.warnings(), Contains(HasSubstr("full for 1m")).Times(2));
}

TEST(TrackerSet, BurstLongerThanThePatience_IsWholeWhileTheQueueMovesOn) {
  SteppedTrackerSet set;
  for (int i = 0; i < 40; ++i) set.LogAndStep(absl::Seconds(14));
  EXPECT_EQ(set.dropped(), 0);
}

TEST(TrackerSet, LargestStep_IsNotPassed) {
  Record record;
  FakeClock clock(absl::FromUnixSeconds(100));
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("a", &record)), 0, {},
                               {.clock = &clock});
  (*set)->Log({{"x", 1}}, std::numeric_limits<int64_t>::max());
  (*set)->Log({{"x", 2}});
  EXPECT_TRUE((*set)->Finish().ok());
  EXPECT_THAT(record.Calls(), ElementsAre("start", "x=1@9223372036854775807/100",
                                          "x=2@9223372036854775807/100", "finish"));
}

TEST(TrackerSet, FinishThatWaits_SaysForWhichTracker) {
  Record record;
  std::vector<std::string> warnings;
  Notification warned;
  auto set =
      TrackerSet::Start(List(std::make_unique<FakeTracker>("slow", &record)), 0, {},
                        {.patience = absl::Milliseconds(1), .warn = [&](const std::string& text) {
                           warnings.push_back(text);
                           if (!record.proceed.HasBeenNotified()) record.proceed.Notify();
                         }});
  (*set)->Log({{"x", 0}});
  EXPECT_TRUE((*set)->Finish().ok());
  ASSERT_FALSE(warnings.empty());
  EXPECT_THAT(warnings[0], HasSubstr("still waiting until 1 tracked entries are written"));
}

TEST(TrackerSet, LogAfterFinish_IsLostWithOneWarning) {
  Record record;
  std::vector<std::string> warnings;
  auto set =
      TrackerSet::Start(List(std::make_unique<FakeTracker>("a", &record)), 0, {},
                        {.warn = [&](const std::string& text) { warnings.push_back(text); }});
  EXPECT_TRUE((*set)->Finish().ok());
  (*set)->Log({{"x", 0}});
  (*set)->Log({{"x", 1}});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("log() after end_training()"));
}

}  // namespace
}  // namespace muster
