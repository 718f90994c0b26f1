#include "base/worker_variables.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

// The test of MakeWorkerVariables checks that these are the ones that it sets.
TEST(FindWorkerVariable, PlaceAndSettings_AreTold) {
  ASSERT_NE(FindWorkerVariable("RANK"), nullptr);
  EXPECT_EQ(FindWorkerVariable("RANK")->setting, "");
  ASSERT_NE(FindWorkerVariable("ACCELERATE_MIXED_PRECISION"), nullptr);
  EXPECT_EQ(FindWorkerVariable("ACCELERATE_MIXED_PRECISION")->setting, "mixed_precision");
  EXPECT_EQ(FindWorkerVariable("OMP_NUM_THREADS"), nullptr);
  EXPECT_EQ(FindWorkerVariable("MUSTER_SHARDING"), nullptr);
  EXPECT_EQ(FindWorkerVariable(""), nullptr);
}

}  // namespace
}  // namespace muster
