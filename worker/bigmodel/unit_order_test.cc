#include "worker/bigmodel/unit_order.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(UnitOf, Names_EndAtTheLastNumber) {
  EXPECT_EQ(UnitOf("model.layers.3.mlp.up_proj.weight"), "model.layers.3");
  EXPECT_EQ(UnitOf("model.layers.3.block_sparse_moe.experts.5.w1.weight"),
            "model.layers.3.block_sparse_moe.experts.5");
  EXPECT_EQ(UnitOf("model.layers.3.block_sparse_moe.gate.weight"), "model.layers.3");
  EXPECT_EQ(UnitOf("transformer.wte.weight"), "transformer.wte");
  EXPECT_EQ(UnitOf("weight"), "");
  EXPECT_EQ(UnitOf("0.weight"), "0");
}

TEST(UnitOrder, SecondPass_IsExpectedToBeTheFirst) {
  UnitOrder order(4);
  EXPECT_FALSE(order.Next(1).has_value());
  for (const size_t unit : {2, 0, 0, 1}) order.Use(unit);
  // At the end of the first pass the next one begins.
  EXPECT_EQ(order.Next(1), 2);
  order.Use(2);
  EXPECT_EQ(order.Next(1), 0);
  EXPECT_EQ(order.Next(2), 1);
  EXPECT_FALSE(order.Next(3).has_value());
}

TEST(UnitOrder, Distance_IsFarthestForWhatWasJustUsed) {
  UnitOrder order(4);
  for (const size_t unit : {0, 1, 2}) order.Use(unit);
  EXPECT_EQ(order.Distance(2), 0);
  EXPECT_EQ(order.Distance(0), 1);
  EXPECT_EQ(order.Distance(1), 2);
  EXPECT_EQ(order.Distance(3), 4);
}

TEST(UnitOrder, UnitThatTheLastPassLeftOut_IsNotExpected) {
  UnitOrder order(4);
  for (const size_t unit : {0, 1, 2, 3, 0, 2, 3, 0}) order.Use(unit);
  EXPECT_FALSE(order.Next(1).has_value());
  EXPECT_EQ(order.Next(2), 2);
}

}  // namespace
}  // namespace muster
