#include "worker/parallel/running_statistics.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

// Calls `op` with every flag set to `flag`.
bool Writes(const std::string& op, bool flag) {
  const c10::FunctionSchema& schema =
      c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), "").schema();
  const std::vector<c10::IValue> arguments(schema.arguments().size(), flag);
  return WritesUndeclaredStatistics(schema, arguments.data());
}

// Checks all of LibTorch's operators: a new one must be examined.
TEST(RunningStatistics, OperatorsOfLibTorch_AreKnown) {
  std::set<std::string> in_training, always, never;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || !name.overload_name.empty()) continue;
    const c10::FunctionSchema& schema =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), "").schema();
    if (std::none_of(schema.arguments().begin(), schema.arguments().end(),
                     &IsUndeclaredStatistic)) {
      continue;
    }
    std::set<std::string>& kind = Writes(name.name, false)  ? always
                                  : Writes(name.name, true) ? in_training
                                                            : never;
    kind.insert(name.name.substr(6));
  }
  EXPECT_THAT(in_training,
              testing::ElementsAre("_batch_norm_impl_index", "batch_norm", "cudnn_batch_norm",
                                   "instance_norm", "miopen_batch_norm", "native_batch_norm"));
  EXPECT_THAT(always,
              testing::ElementsAre("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
                                   "batch_norm_update_stats"));
  EXPECT_THAT(never, testing::IsSupersetOf(
                         {"native_batch_norm_backward", "_native_batch_norm_legit_no_training"}));
}

TEST(RunningStatistics, DeclaredOnes_AreLeftToTheSchema) {
  const c10::FunctionSchema& schema =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::_native_batch_norm_legit", "").schema();
  EXPECT_TRUE(
      std::none_of(schema.arguments().begin(), schema.arguments().end(), &IsUndeclaredStatistic));
}

}  // namespace
}  // namespace muster
