#include "coordinator/service/disk_watch.h"

#include "base/fake_clock.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr DiskLimits kLimits = {.size_warning = 1000, .free_warning = 500, .free_least = 100};

TEST(JudgeDisk, EachLimit_IsJudgedAtItsEdge) {
  const auto judge = [](int64_t used, int64_t free) {
    return JudgeDisk("/data", {.used = used, .free = free}, kLimits);
  };
  EXPECT_THAT(judge(1000, 500).warnings, IsEmpty());
  EXPECT_THAT(judge(1001, 500).warnings, ElementsAre(HasSubstr("--journal_size_warning_mib")));
  EXPECT_THAT(judge(1000, 499).warnings, ElementsAre(HasSubstr("--disk_free_warning_mib")));
  EXPECT_EQ(judge(1001, 100).no_room, "");
  EXPECT_THAT(judge(1000, 99).no_room,
              HasSubstr("the file system of /data has 99 B left, less than the 100 B"));
  EXPECT_THAT(judge(1001, 99).warnings,
              ElementsAre(HasSubstr("no job can be submitted"), HasSubstr("/data has 1001 B")));
  // Warnings are sent in messages, which take only UTF-8.
  EXPECT_THAT(JudgeDisk("/caf\xe9", {.used = 0, .free = 499}, kLimits).warnings,
              ElementsAre(HasSubstr("/caf\\xe9 has")));
  // Not "3.91 KiB, less than the 3.91 KiB".
  const DiskJudgement close =
      JudgeDisk("/data", {.used = 4000, .free = 3999},
                {.size_warning = 3999, .free_warning = 4000, .free_least = 4000});
  EXPECT_THAT(close.no_room, HasSubstr("has 3999 B left, less than the 4000 B that"));
  EXPECT_THAT(close.warnings[1], HasSubstr("has 4000 B, more than 3999 B ("));
  // 0: no limit.
  EXPECT_THAT(JudgeDisk("/data", {.used = int64_t{1} << 60, .free = 0}, {0, 0, 0}).warnings,
              IsEmpty());
}

TEST(MeasureDisk, Directory_HasTheBytesOfItsFiles) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("sub")).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("a"), std::string(1000, 'x')).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("sub/b"), std::string(234, 'x')).ok());
  const absl::StatusOr<DiskSizes> sizes = MeasureDisk(folder.Path("."));
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->used, 1234);
  EXPECT_GT(sizes->free, 0);
  EXPECT_THAT(MeasureDisk(folder.Path("none")).status().message(), HasSubstr("none"));
}

TEST(DiskWatch, Tick_TellsBothEdges_AndKeepsWhatItKnowsWhenItCannotMeasure) {
  FakeClock clock;
  absl::StatusOr<DiskSizes> sizes = DiskSizes{.used = 1, .free = 1000};
  DiskJudgement judged;
  DiskWatch watch({.directory = "/data",
                   .limits = kLimits,
                   .measure = [&] { return sizes; },
                   .on_judged = [&](const DiskJudgement& judgement) { judged = judgement; },
                   .clock = &clock});
  EXPECT_EQ(watch.Tick(), clock.Now() + DiskWatch::kPeriod);
  EXPECT_TRUE(watch.has_room());
  EXPECT_THAT(judged.warnings, IsEmpty());
  sizes = DiskSizes{.used = 1, .free = 99};
  watch.Tick();
  EXPECT_FALSE(watch.has_room());
  EXPECT_NE(judged.no_room, "");
  sizes = absl::UnavailableError("the disk does not answer");
  watch.Tick();
  EXPECT_FALSE(watch.has_room());
  EXPECT_EQ(watch.sizes().free, 99);
  sizes = DiskSizes{.used = 1, .free = 500};
  watch.Tick();
  EXPECT_TRUE(watch.has_room());
  EXPECT_EQ(judged.no_room, "");
}

}  // namespace
}  // namespace muster::coordinator
