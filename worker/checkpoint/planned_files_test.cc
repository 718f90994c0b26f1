#include "worker/checkpoint/planned_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::string SummaryOf(const std::vector<std::string>& names) {
  TensorList list;
  for (const std::string& name : names) list.Add(name, "F32", {2, 3});
  return list.Summary();
}

TEST(TensorListTest, SummaryKnowsNamesTypesAndShapes_NotTheOrder) {
  EXPECT_EQ(SummaryOf({"a", "b"}), SummaryOf({"b", "a"}));
  EXPECT_THAT(SummaryOf({"a", "b"}), HasSubstr("2 tensors, "));
  EXPECT_NE(SummaryOf({"a", "b"}), SummaryOf({"a", "c"}));
  EXPECT_NE(SummaryOf({"a", "b"}), SummaryOf({"a", "b", "b"}));
  EXPECT_NE(SummaryOf({"a\tb"}), SummaryOf({"a", "b"}));
  TensorList type, shape;
  type.Add("a", "F16", {2, 3});
  shape.Add("a", "F32", {6});
  EXPECT_NE(type.Summary(), SummaryOf({"a"}));
  EXPECT_NE(shape.Summary(), SummaryOf({"a"}));
}

TEST(TensorListTest, MillionTensors_TakeAFewBytes) {
  TensorList list;
  for (int i = 0; i < 1'000'000; ++i) list.Add(absl::StrCat("layers.", i), "BF16", {4096, 4096});
  EXPECT_LT(list.Summary().size(), 64u);
}

class PlannedFilesTest : public testing::Test {
 protected:
  std::string Error() const { return std::string(CheckPlannedFiles(ranks_).message()); }
  std::vector<FileReport> ranks_ = {
      {.planned = {{"m-1", SummaryOf({"a"})}, {"m-2", SummaryOf({"b"})}},
       .held = {{"m-1", SummaryOf({"a"})}, {"custom", "1 tensor, x"}}},
      {.planned = {{"o-2", SummaryOf({"s"})}},
       .held = {{"m-2", SummaryOf({"b"})}, {"o-2", SummaryOf({"s"})}}}};
};

TEST_F(PlannedFilesTest, EachFileWithItsTensors_IsCovered) {
  EXPECT_EQ(Error(), "");
  for (FileReport& rank : ranks_) {
    const absl::StatusOr<FileReport> parsed = FileReport::Parse(rank.Encode());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    rank = *parsed;
  }
  EXPECT_EQ(Error(), "");
  EXPECT_FALSE(FileReport::Parse("[1]").ok());
}

TEST_F(PlannedFilesTest, FileThatNoRankHas_IsNamed) {
  ranks_[1].held.erase("m-2");
  EXPECT_THAT(Error(), HasSubstr("no rank has written m-2, which rank 0 plans"));
}

TEST_F(PlannedFilesTest, TensorThatIsMissingOrTooMany_NamesFileAndRank) {
  ranks_[1].held["m-2"] = SummaryOf({"b", "a"});
  EXPECT_THAT(Error(), HasSubstr("m-2 of rank 1 has 2 tensors"));
  ranks_[1].held["m-2"] = SummaryOf({});
  EXPECT_THAT(Error(), HasSubstr("m-2 of rank 1 has 0 tensors"));
}

TEST_F(PlannedFilesTest, FileOfTwoRanks_OrOfTwoPlans_IsRefused) {
  ranks_[0].held["m-2"] = SummaryOf({"b"});
  EXPECT_THAT(Error(), HasSubstr("ranks 0 and 1 have both written m-2"));
  ranks_[0].held.erase("m-2");
  ranks_[1].planned["m-2"] = SummaryOf({"c"});
  EXPECT_THAT(Error(), HasSubstr("the ranks plan m-2 differently"));
}

}  // namespace
}  // namespace muster
