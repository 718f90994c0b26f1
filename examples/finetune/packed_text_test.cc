#include "examples/finetune/packed_text.h"

#include <gtest/gtest.h>

#include "ATen/Functions.h"
#include "tests/testdata/golden.h"

namespace {

muster::Tokenizer Recorded() {
  auto tokenizer = muster::Tokenizer::FromFile(
      muster::testing_support::GoldenPath("hf_tokenizer/gpt2_shared/tokenizer.json"));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *tokenizer;
}

TEST(PackText, Documents_FollowEachOtherWithEndTokensBetween) {
  const muster::Tokenizer tokenizer = Recorded();
  const std::vector<int64_t> one = *tokenizer.EncodeIds("One day"),
                             two = *tokenizer.EncodeIds("Two");
  std::vector<int64_t> all = one;
  all.push_back(7);
  all.insert(all.end(), two.begin(), two.end());
  all.push_back(7);
  const auto packed = PackText("One day\n\n\n\nTwo\n\n", tokenizer, 2, 7);
  ASSERT_TRUE(packed.ok()) << packed.status();
  all.resize(all.size() / 2 * 2);
  EXPECT_TRUE(at::equal(packed->flatten(), at::tensor(all, c10::kLong)));
}

TEST(PackText, LinesOfWindows_AreDividedAlike) {
  const muster::Tokenizer tokenizer = Recorded();
  const auto unix_lines = PackText("One\n\nTwo\n\nSix\n\n", tokenizer, 1, 7);
  ASSERT_TRUE(unix_lines.ok()) << unix_lines.status();
  for (const char* const text :
       {"One\r\n\r\nTwo\r\n\r\nSix\r\n\r\n", "One\n\r\nTwo\r\n\nSix\n\n"}) {
    const auto packed = PackText(text, tokenizer, 1, 7);
    ASSERT_TRUE(packed.ok()) << packed.status();
    EXPECT_TRUE(at::equal(*packed, *unix_lines)) << text;
  }
}

TEST(PackText, TooShortForARow_SaysHowShort) {
  const auto packed = PackText("a", Recorded(), 1000, -1);
  EXPECT_EQ(packed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(packed.status().message().find("less than one row of 1000"), std::string::npos);
}

}  // namespace
