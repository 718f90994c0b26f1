#include "worker/parallel/pass_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

PassReport Report() {
  return {.history = 1,
          .events = 2,
          .trained = 3,
          .turns = 4,
          .intention = PassIntention{.reduces = true, .step_follows = true}.Packed(),
          .announced = 0,
          .written = false,
          .failed = false,
          .late = {},
          .unused = {}};
}

TEST(PassReports, EqualReports_AreTheSame) {
  PassReport report = Report();
  report.late = {0, 4};
  report.unused = {2, 3};
  const PassReports all({report.Packed(), report.Packed()});
  EXPECT_TRUE(all.same_history && all.same_trained && all.same_turns);
  EXPECT_FALSE(all.any_written || all.any_failed);
  EXPECT_THAT(all.late, ElementsAre(0, 4));
  EXPECT_THAT(all.unused, ElementsAre(2, 3));
  EXPECT_THAT(all.announced, ElementsAre(0, 0));
  EXPECT_NO_THROW(CheckIntentions(all.intentions));
}

TEST(PassReports, WhatSomeHaveIsLate_WhatAllHaveIsUnused) {
  PassReport a = Report(), b = Report(), c = Report();
  a.late = {5};
  b.late = {1, 5};
  a.unused = {0, 2, 7};
  b.unused = {2, 7};
  c.unused = {1, 2, 9};
  const PassReports all({a.Packed(), b.Packed(), c.Packed()});
  EXPECT_THAT(all.late, ElementsAre(1, 5));
  EXPECT_THAT(all.unused, ElementsAre(2));
  c.unused.clear();
  EXPECT_THAT(PassReports({a.Packed(), b.Packed(), c.Packed()}).unused, IsEmpty());
}

TEST(PassReports, EachDifference_IsToldApart) {
  const auto with = [](auto change) {
    PassReport other = Report();
    change(other);
    return PassReports({Report().Packed(), other.Packed()});
  };
  EXPECT_FALSE(with([](PassReport& report) { report.history = 9; }).same_history);
  EXPECT_FALSE(with([](PassReport& report) { report.events = 9; }).same_history);
  EXPECT_FALSE(with([](PassReport& report) { report.trained = 9; }).same_trained);
  EXPECT_FALSE(with([](PassReport& report) { report.turns = 9; }).same_turns);
  const PassReports written = with([](PassReport& report) { report.written = true; });
  EXPECT_TRUE(written.any_written);
  EXPECT_FALSE(written.any_failed);
  const PassReports failed = with([](PassReport& report) { report.failed = true; });
  EXPECT_TRUE(failed.any_failed);
  EXPECT_FALSE(failed.any_written);
  EXPECT_TRUE(failed.same_history && failed.same_trained && failed.same_turns);
}

TEST(CheckIntentions, DifferentOnes_ThrowWithBoth) {
  const PassIntention steps = {.reduces = true, .step_follows = true};
  const PassIntention reduces = {.reduces = true, .step_follows = false};
  const PassIntention adds = {.reduces = false, .step_follows = true};
  const auto error = [](PassIntention a, PassIntention b) {
    return ErrorOf([&] { CheckIntentions({a.Packed(), a.Packed(), b.Packed()}); });
  };
  EXPECT_THAT(error(steps, adds), HasSubstr("on rank 0 it reduces gradients for an optimizer's "
                                            "step, on rank 2 it only adds gradients up"));
  EXPECT_THAT(error(steps, reduces), HasSubstr("on rank 2 it reduces gradients within an "
                                               "accumulation window"));
  // Passes that do not reduce have the same intention, whatever follows.
  const PassIntention adds_within = {.reduces = false, .step_follows = false};
  EXPECT_EQ(adds.Packed(), adds_within.Packed());
}

TEST(CheckAnnouncements, DifferentOnes_ThrowWithBoth) {
  EXPECT_NO_THROW(CheckAnnouncements({3, 3, 3}));
  EXPECT_THAT(ErrorOf([] {
                CheckAnnouncements({1, 1, 0});
              }),
              HasSubstr("rank 0 1 times, rank 2 0 times"));
}

}  // namespace
}  // namespace muster
