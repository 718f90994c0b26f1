#include "worker/text/encoding_ops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::text {
namespace {

using testing::HasSubstr;
using Ids = std::vector<int64_t>;

Encoding Of(const Ids& ids) {
  Encoding encoding;
  encoding.ids = ids;
  for (const int64_t id : ids) {
    encoding.tokens.push_back(std::to_string(id));
    encoding.offsets.push_back({id, id + 1});
  }
  encoding.type_ids.assign(ids.size(), 0);
  encoding.special_tokens_mask.assign(ids.size(), 0);
  encoding.attention_mask.assign(ids.size(), 1);
  return encoding;
}

std::vector<Ids> Windows(const Encoding& encoding) {
  std::vector<Ids> windows = {encoding.ids};
  for (const Encoding& window : encoding.overflowing) windows.push_back(window.ids);
  return windows;
}

TEST(Truncate, WindowsShareTheStride_FromEitherSide) {
  Encoding right = Of({0, 1, 2, 3, 4});
  ASSERT_TRUE(Truncate(right, 3, {.stride = 1}).ok());
  EXPECT_EQ(Windows(right), (std::vector<Ids>{{0, 1, 2}, {2, 3, 4}}));
  EXPECT_EQ(right.tokens, (std::vector<std::string>{"0", "1", "2"}));
  Encoding left = Of({0, 1, 2, 3, 4});
  ASSERT_TRUE(Truncate(left, 2, {.direction = TextSide::kLeft}).ok());
  EXPECT_EQ(Windows(left), (std::vector<Ids>{{3, 4}, {1, 2}, {0}}));
  Encoding all = Of({0, 1});
  ASSERT_TRUE(Truncate(all, 0, {}).ok());
  EXPECT_EQ(Windows(all), (std::vector<Ids>{{}, {0, 1}}));
  Encoding stuck = Of({0, 1, 2});
  EXPECT_THAT(std::string(Truncate(stuck, 2, {.stride = 2}).message()), HasSubstr("stride of 2"));
}

TEST(Truncate, Pairs_FollowTheStrategy) {
  const auto sizes = [](int64_t first, int64_t second, int64_t length,
                        Truncation::Strategy strategy) {
    Encoding a = Of(Ids(first, 1)), b = Of(Ids(second, 2));
    const absl::Status status = Truncate(a, &b, length, {.strategy = strategy});
    return status.ok() ? std::make_pair(a.size(), b.size())
                       : std::make_pair(size_t{99}, size_t{99});
  };
  using S = Truncation::Strategy;
  EXPECT_EQ(sizes(2, 8, 6, S::kLongestFirst), std::make_pair(size_t{2}, size_t{4}));
  EXPECT_EQ(sizes(8, 2, 6, S::kLongestFirst), std::make_pair(size_t{4}, size_t{2}));
  EXPECT_EQ(sizes(8, 9, 5, S::kLongestFirst), std::make_pair(size_t{2}, size_t{3}));
  EXPECT_EQ(sizes(9, 8, 5, S::kLongestFirst), std::make_pair(size_t{3}, size_t{2}));
  EXPECT_EQ(sizes(8, 3, 6, S::kOnlyFirst), std::make_pair(size_t{3}, size_t{3}));
  EXPECT_EQ(sizes(3, 8, 6, S::kOnlySecond), std::make_pair(size_t{3}, size_t{3}));
  EXPECT_EQ(sizes(2, 8, 6, S::kOnlyFirst), std::make_pair(size_t{99}, size_t{99}));
  Encoding alone = Of({1, 2, 3});
  EXPECT_THAT(std::string(Truncate(alone, nullptr, 2, {.strategy = S::kOnlySecond}).message()),
              HasSubstr("needs a second text"));
}

TEST(Append, Windows_AreCombined) {
  Encoding a = Of({1}), b = Of({2});
  a.overflowing = {Of({3})};
  b.overflowing = {Of({4})};
  Append(a, b);
  EXPECT_EQ(Windows(a), (std::vector<Ids>{{1, 2}, {3, 2}, {3, 4}, {1, 4}}));
}

TEST(Pad, AllBecomeAsLongAsTheLongest) {
  std::vector<Encoding> encodings = {Of({1}), Of({2, 3, 4})};
  encodings[0].overflowing = {Of({5, 6})};
  Pad(encodings, {.pad_to_multiple_of = 2, .pad_id = 9, .direction = TextSide::kLeft});
  EXPECT_EQ(encodings[0].ids, (Ids{9, 9, 9, 1}));
  EXPECT_EQ(encodings[0].attention_mask, (Ids{0, 0, 0, 1}));
  EXPECT_EQ(encodings[0].special_tokens_mask, (Ids{1, 1, 1, 0}));
  EXPECT_EQ(encodings[0].tokens[0], "[PAD]");
  EXPECT_EQ(encodings[0].overflowing[0].ids, (Ids{9, 9, 5, 6}));
  EXPECT_EQ(encodings[1].ids, (Ids{9, 2, 3, 4}));
  Pad(encodings, {.length = 2});
  EXPECT_EQ(encodings[1].size(), 4u);
}

}  // namespace
}  // namespace muster::text
