#include "base/size_pair.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

std::string Both(int64_t first, int64_t second) {
  const SizePair texts = HumanBytesApart(first, second);
  return texts.first + ", " + texts.second;
}

TEST(HumanBytesApart, DifferentSizes_HaveDifferentTexts) {
  EXPECT_EQ(Both(2048, 1024), "2.00 KiB, 1.00 KiB");
  EXPECT_EQ(Both(4000, 3999), "4000 B, 3999 B");
  EXPECT_EQ(Both((int64_t{1} << 40) + 1, int64_t{1} << 40), "1099511627777 B, 1099511627776 B");
  EXPECT_EQ(Both(999, 998), "999 B, 998 B");
  EXPECT_EQ(Both(4000, 4000), "3.91 KiB, 3.91 KiB");
}

}  // namespace
}  // namespace muster
