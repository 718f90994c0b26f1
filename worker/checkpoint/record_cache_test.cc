#include "worker/checkpoint/record_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

int reads = 0;

std::optional<std::string> ReadText(const std::string& dir) {
  ++reads;
  for (const char* const name : {kSealName, kSealingName}) {
    const absl::StatusOr<std::string> text = ReadFile(JoinPath(dir, name));
    if (text.ok() && *text != "damaged") return *text;
  }
  return std::nullopt;
}

class RecordCacheTest : public testing::Test {
 protected:
  void Put(const std::string& dir, const std::string& text, const char* name = kSealName) {
    ASSERT_TRUE(MakeDirectories(folder_.Path(dir)).ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(folder_.Path(dir), name), text).ok());
  }
  std::vector<std::string> All() {
    reads = 0;
    return cache_.ReadAll(folder_.path());
  }

  const TestFolder folder_;
  RecordCache<std::string> cache_{&ReadText};
};

TEST_F(RecordCacheTest, Record_IsReadOnceAndAgainWhenItChanges) {
  Put("a", "1");
  Put("b", "2");
  EXPECT_THAT(All(), UnorderedElementsAre("1", "2"));
  EXPECT_EQ(reads, 2);
  EXPECT_THAT(All(), UnorderedElementsAre("1", "2"));
  EXPECT_EQ(reads, 0);
  Put("b", "3");
  EXPECT_THAT(All(), UnorderedElementsAre("1", "3"));
  EXPECT_EQ(reads, 1);
  ASSERT_TRUE(RemoveTree(folder_.Path("a")).ok());
  EXPECT_THAT(All(), UnorderedElementsAre("3"));
  EXPECT_EQ(reads, 0);
}

TEST_F(RecordCacheTest, RecordWithoutItsName_IsReadEachTime) {
  Put("a", "1", kSealingName);
  EXPECT_THAT(All(), UnorderedElementsAre("1"));
  Put("a", "2", kSealingName);
  EXPECT_THAT(All(), UnorderedElementsAre("2"));
}

TEST_F(RecordCacheTest, WhatIsNoRecord_IsLeftOut) {
  EXPECT_THAT(All(), IsEmpty());
  EXPECT_THAT(cache_.ReadAll(folder_.Path("none")), IsEmpty());
  Put("a", "damaged");
  ASSERT_TRUE(MakeDirectories(folder_.Path("b")).ok());
  EXPECT_THAT(All(), IsEmpty());
  EXPECT_EQ(reads, 1);
}

}  // namespace
}  // namespace muster
