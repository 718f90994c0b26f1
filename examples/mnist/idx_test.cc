#include "examples/mnist/idx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Write(const std::string& bytes) {
  static int count = 0;
  const std::string path =
      testing::TempDir() + "/idx-" + std::to_string(getpid()) + "-" + std::to_string(count++);
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::string Bytes(std::initializer_list<int> bytes) {
  return std::string(bytes.begin(), bytes.end());
}

const std::string kHeader = Bytes({0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3});

TEST(ReadIdx, WholeFile_GivesSizesAndValues) {
  const auto array = ReadIdx(Write(kHeader + Bytes({1, 2, 3, 4, 5, 255})), 3);
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(array->sizes, ElementsAre(2, 1, 3));
  EXPECT_THAT(array->values, ElementsAre(1, 2, 3, 4, 5, 255));
}

TEST(ReadIdx, Truncated_NamesFileBytesAndWayOut) {
  const std::string path = Write(kHeader + "abc");
  EXPECT_EQ(ReadIdx(path, 3).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(std::string(ReadIdx(path, 3).status().message()),
            path + ": expected 22 bytes, found 19; run tools/fetch_mnist to get the right file");
}

TEST(ReadIdx, EveryPrefix_IsRefused) {
  const std::string whole = kHeader + "abcdef";
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto array = ReadIdx(Write(whole.substr(0, length)), 3);
    ASSERT_FALSE(array.ok()) << length;
    EXPECT_THAT(std::string(array.status().message()),
                HasSubstr("found " + std::to_string(length)));
  }
}

TEST(ReadIdx, OtherFiles_AreRefusedWithReason) {
  const auto why = [](const std::string& bytes, int dimensions = 3) {
    return std::string(ReadIdx(Write(bytes), dimensions).status().message());
  };
  EXPECT_THAT(why(Bytes({0x1f, 0x8b, 8, 0, 1, 2, 3, 4})), HasSubstr("gunzip"));
  EXPECT_THAT(why("<html></html>"), HasSubstr("two zero bytes"));
  EXPECT_THAT(why(kHeader + "abcdef", 1), HasSubstr("expected 1 dimensions, found 3"));
  EXPECT_THAT(why(Bytes({0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0}), 1), HasSubstr("found 13"));
  EXPECT_THAT(why(Bytes({0, 0, 8, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1})),
              HasSubstr("larger than any"));
  EXPECT_THAT(why(kHeader + "abcdefg"), HasSubstr("expected 22 bytes, found 23"));
  EXPECT_EQ(ReadIdx("/nowhere/x", 3).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(ReadIdx(testing::TempDir(), 3).ok());
}

}  // namespace
