#include "worker/checkpoint/shape_text.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(ShapeText, ShapeOfATensor_IsWhole) {
  EXPECT_EQ(ShapeText({}), "[]");
  EXPECT_EQ(ShapeText({2, 3}), "[2, 3]");
  EXPECT_EQ(ShapeText(std::vector<uint64_t>(64, 1)).size(), 64 * 3);
}

TEST(ShapeText, ShapeThatNoTensorHas_IsShort) {
  EXPECT_EQ(ShapeText(std::vector<uint64_t>(5000, 1)),
            "[1, 1, 1, 1, 1, 1, 1, 1, ... (5000 dimensions)]");
}

}  // namespace
}  // namespace muster
