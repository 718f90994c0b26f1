#include "worker/models/kv_cache.h"

#include <gtest/gtest.h>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "worker/checkpoint/test_huge_file.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

at::Tensor Filled(int64_t batch, int64_t count, double value) {
  return at::full({batch, 1, count, 2}, value, c10::kFloat);
}

TEST(KvCache, Append_GivesAllPositionsSoFar) {
  KvCache cache(2, 1, 1, 4, 2, c10::kFloat);
  for (int64_t layer = 0; layer < 2; ++layer) {
    cache.Append(layer, Filled(1, 2, 1), Filled(1, 2, -1));
  }
  cache.Advance(2);
  const auto [keys, values] = cache.Append(1, Filled(1, 1, 5), Filled(1, 1, -5));
  EXPECT_TRUE(at::equal(keys.select(3, 0).flatten(), at::tensor({1., 1., 5.}, c10::kFloat)));
  EXPECT_TRUE(at::equal(values.select(3, 1).flatten(), at::tensor({-1., -1., -5.}, c10::kFloat)));
}

TEST(KvCache, MemoryThatTheHostRefuses_IsNamed) {
  const AtMostOneMoreTebibyte scarce;
  const absl::Status status = Guard([] { KvCache(2, 1, 1, int64_t{1} << 40, 1, c10::kFloat); });
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("keys and values of 1 row of up to 1099511627776 tokens: needs "
                                  "17592186044416 bytes"),
            std::string::npos)
      << status;
}

TEST(KvCache, BeyondTheCapacity_SaysHowMuchIsNeeded) {
  KvCache cache(1, 1, 1, 4, 2, c10::kFloat);
  try {
    cache.Append(0, Filled(1, 5, 1), Filled(1, 5, 1));
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("room for 4 positions; 5 are needed"),
              std::string::npos);
  }
}

TEST(KvCache, RepeatedAndReordered_ContinuesTheOtherRowsButKeepsThePrompt) {
  KvCache prompt(1, 1, 1, 4, 2, c10::kFloat);
  prompt.Append(0, Filled(1, 2, 1), Filled(1, 2, 1));
  prompt.Advance(2);
  KvCache cache = prompt.Repeated(2);
  EXPECT_EQ(cache.batch(), 2);
  const at::Tensor next = at::tensor({7., 8.}, c10::kFloat).view({2, 1, 1, 1}).expand({2, 1, 1, 2});
  cache.Append(0, next, next);
  cache.Advance(1);
  cache.Reorder(at::tensor({1, 1}, c10::kLong), 2);
  const at::Tensor keys = cache.Append(0, next, next).first.select(3, 0).squeeze(1);
  EXPECT_TRUE(
      at::equal(keys, at::tensor({1., 1., 8., 7., 1., 1., 8., 8.}, c10::kFloat).view({2, 4})));
}

}  // namespace
}  // namespace muster::models
