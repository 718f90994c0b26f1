#include "worker/checkpoint/file_plans.h"

#include <gtest/gtest.h>

#include <string>

#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"

namespace muster {
namespace {

class FilePlansTest : public ::testing::Test {
 protected:
  // Plans a file and compares the result with that of a plan without memory.
  void Plan(const std::string& path, const NamedTensors& tensors, const std::string& step,
            SharedTensors shared = SharedTensors::kWriteAll) {
    const WriteSafetensorsOptions options{
        .metadata = SafetensorsMetadata{{"step", step}}, .shared = shared, .data_alignment = 4096};
    const auto plan = plans_.Plan(path, tensors, options);
    const auto fresh = PlanSafetensors(path, tensors, options);
    ASSERT_EQ(plan.status(), fresh.status());
    if (!fresh.ok()) return;
    EXPECT_EQ(plan->layout.prefix, fresh->layout.prefix);
    EXPECT_EQ(plan->layout.data_bytes, fresh->layout.data_bytes);
    ASSERT_EQ(plan->layout.tensors.size(), fresh->layout.tensors.size());
    for (size_t i = 0; i < plan->sources.size(); ++i) {
      EXPECT_EQ(plan->layout.tensors[i].name, fresh->layout.tensors[i].name);
      EXPECT_EQ(plan->layout.tensors[i].begin, fresh->layout.tensors[i].begin);
      EXPECT_EQ(plan->sources[i].const_data_ptr(), fresh->sources[i].const_data_ptr());
    }
  }

  FilePlans plans_;
};

TEST_F(FilePlansTest, SameTensors_AreLaidOutOnce) {
  const NamedTensors tensors = {{"b", at::ones({2, 3})}, {"a", at::zeros({4}, at::kLong)}};
  Plan("/x.tmp-1/model.safetensors", tensors, "1");
  EXPECT_EQ(plans_.made(), 1);
  // Other values, other metadata, another folder.
  Plan("/x.tmp-2/model.safetensors", {{"b", at::zeros({2, 3})}, {"a", at::ones({4}, at::kLong)}},
       "22222222222");
  EXPECT_EQ(plans_.made(), 1);
  EXPECT_EQ(plans_.reused(), 1);
  Plan("/x.tmp-2/other.safetensors", tensors, "1");
  EXPECT_EQ(plans_.made(), 2);
}

TEST_F(FilePlansTest, OtherTensors_AreLaidOutAgain) {
  const std::string path = "/x/optimizer.safetensors";
  int64_t made = 0;
  const NamedTensors lists[] = {
      {{"a", at::ones({2, 3})}},
      {{"a", at::ones({3, 2})}},                        // another shape
      {{"a", at::ones({3, 2}, at::kHalf)}},             // another type
      {{"c", at::ones({3, 2}, at::kHalf)}},             // another name
      {{"c", at::ones({3, 2})}, {"d", at::ones({1})}},  // one more, as after the first step
      {{"d", at::ones({1})}, {"c", at::ones({3, 2})}},  // another order
      {{"d", at::ones({1})}},
      {},
  };
  for (const NamedTensors& list : lists) {
    Plan(path, list, "1");
    EXPECT_EQ(plans_.made(), ++made);
    Plan(path, list, "2");
    EXPECT_EQ(plans_.made(), made);
  }
}

TEST_F(FilePlansTest, TensorsThatShareMemoryNow_AreWrittenOnceOrTwiceAsTheyAre) {
  const at::Tensor one = at::ones({4}), other = at::ones({4});
  for (const auto& [second, made] : {std::pair{other, 1}, {one, 2}, {one, 2}, {other, 3}}) {
    Plan("/x/model.safetensors", {{"a", one}, {"b", second}}, "1", SharedTensors::kKeepFirst);
    EXPECT_EQ(plans_.made(), made);
  }
}

TEST_F(FilePlansTest, BadTensors_AreRefusedAlsoWhereGoodOnesAreKnown) {
  const std::string path = "/x/model.safetensors";
  Plan(path, {{"a", at::ones({2})}}, "1");
  Plan(path, {{"a", at::Tensor()}}, "1");
  Plan(path, {{"a", at::ones({2})}}, "1");
  Plan(path, {{"a", at::ones({2})}}, "\xff");
  Plan(path, {{"a", at::ones({2}, at::TensorOptions().device(at::kMeta))}}, "1");
  Plan(path, {{"a", at::ones({2})}, {"a", at::ones({2})}}, "1");
}

TEST_F(FilePlansTest, FilesThatAreNotWrittenAnyMore_AreForgotten) {
  const NamedTensors tensors = {{"a", at::ones({2})}};
  plans_.BeginSave();
  Plan("/x/a.safetensors", tensors, "1");
  Plan("/x/b.safetensors", tensors, "1");
  plans_.BeginSave();
  Plan("/x/a.safetensors", tensors, "2");
  plans_.BeginSave();
  Plan("/x/a.safetensors", tensors, "3");
  EXPECT_EQ(plans_.made(), 2);
  Plan("/x/b.safetensors", tensors, "3");
  EXPECT_EQ(plans_.made(), 3);
}

}  // namespace
}  // namespace muster
