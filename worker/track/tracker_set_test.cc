#include "worker/track/tracker_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "base/fake_clock.h"

namespace muster {
namespace {

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
              ElementsAre("start", "config lr", "loss=1@4/100", "loss=2@-1/105", "finish"));
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

TEST(TrackerSet, FullQueue_DropsTheOldestAndCounts) {
  Record record;
  auto set = TrackerSet::Start(List(std::make_unique<FakeTracker>("slow", &record)), 0, {},
                               {.queue_limit = 2});
  (*set)->Log({{"x", 0}}, 0);
  record.entered.WaitForNotification();
  for (int i = 1; i <= 5; ++i) (*set)->Log({{"x", i}}, i);
  EXPECT_EQ((*set)->dropped(), 3);
  record.proceed.Notify();
  EXPECT_TRUE((*set)->Finish().ok());
  const std::vector<std::string> calls = record.Calls();
  ASSERT_EQ(calls.size(), 5u);
  EXPECT_THAT(calls[1], HasSubstr("x=0@0"));
  EXPECT_THAT(calls[2], HasSubstr("x=4@4"));
  EXPECT_THAT(calls[3], HasSubstr("x=5@5"));
}

}  // namespace
}  // namespace muster
