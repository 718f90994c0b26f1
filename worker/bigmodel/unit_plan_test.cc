#include "worker/bigmodel/unit_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::FieldsAre;
using ::testing::IsEmpty;

TEST(PlanOffloadUnits, Modules_StayWholeWhereTheyFit) {
  const auto units = PlanOffloadUnits({{"head", 50},
                                       {"embed.weight", 60},
                                       {"layers.0.up.weight", 40},
                                       {"layers.0.down.weight", 40},
                                       {"layers.1.up.weight", 400},
                                       {"layers.1.up.bias", 10},
                                       {"layers.1.down.weight", 40},
                                       {"layers.1.down.bias", 10}},
                                      100);
  EXPECT_THAT(units,
              ElementsAre(FieldsAre("head", ElementsAre(0)), FieldsAre("embed", ElementsAre(1)),
                          FieldsAre("layers.0", ElementsAre(2, 3)),
                          FieldsAre("layers.1.up.weight", ElementsAre(4)),
                          FieldsAre("layers.1.up.bias", ElementsAre(5)),
                          FieldsAre("layers.1.down", ElementsAre(6, 7))));
}

TEST(PlanOffloadUnits, NothingOrOneModel_IsAtMostOneUnit) {
  EXPECT_THAT(PlanOffloadUnits({}, 100), IsEmpty());
  EXPECT_THAT(PlanOffloadUnits({{"a.b", 1}, {"c", 2}}, 100),
              ElementsAre(FieldsAre("a.b", ElementsAre(0, 1))));
}

}  // namespace
}  // namespace muster
