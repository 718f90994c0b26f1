#include "worker/checkpoint/weight_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/test_huge_file.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing_support::TestdataPath;

class WeightLoaderTest : public testing::Test {
 protected:
  void Save(const NamedTensors& tensors) { ASSERT_TRUE(SaveModelFiles(dir_, tensors).ok()); }
  std::string ErrorOf(const NamedTensors& targets, const LoadWeightsOptions& options = {}) {
    return std::string(LoadWeights(dir_, targets, options).status().message());
  }

  const TestFolder test_folder_;
  const std::string dir_ = test_folder_.Path("weights");
};

TEST_F(WeightLoaderTest, ValuesConvertAndFillAnyStrides) {
  Save({{"a", at::full({2, 3}, 1.5, at::kBFloat16)}, {"n", at::full({}, 7, at::kLong)}});
  at::Tensor a = at::zeros({3, 2}).t();
  at::Tensor n = at::zeros({}, at::kLong);
  const auto report = LoadWeights(dir_, {{"a", a}, {"n", n}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->loaded, ElementsAre("a", "n"));
  EXPECT_TRUE(a.equal(at::full({2, 3}, 1.5)));
  EXPECT_EQ(a.scalar_type(), at::kFloat);
  EXPECT_EQ(n.item<int64_t>(), 7);
}

TEST_F(WeightLoaderTest, WhatDoesNotFit_IsListedAndNothingChanges) {
  Save({{"a", at::ones({2})},
        {"b", at::ones({3})},
        {"c", at::ones({2}, at::kLong)},
        {"x", at::ones({1})}});
  at::Tensor a = at::zeros({2}), b = at::zeros({2}), c = at::zeros({2}), d = at::zeros({1});
  const NamedTensors targets = {{"a", a}, {"b", b}, {"c", c}, {"d", d}};
  const std::string error = ErrorOf(targets);
  EXPECT_THAT(error, HasSubstr("missing: d; unexpected: x; mismatched: b ([3] F32 in the file, [2] "
                               "Float here), c ([2] I64 in the file, [2] Float here)"));
  EXPECT_THAT(ErrorOf(targets, {.strict = false}), HasSubstr("mismatched: b"));
  EXPECT_EQ(a.sum().item<double>(), 0);
  const auto report = LoadWeights(dir_, targets, {.strict = false, .skip_mismatched = true});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->loaded, ElementsAre("a"));
  EXPECT_THAT(report->missing, ElementsAre("d"));
  EXPECT_THAT(report->unexpected, ElementsAre("x"));
  EXPECT_EQ(report->mismatched.size(), 2u);
  EXPECT_EQ(a.sum().item<double>(), 2);
  EXPECT_EQ(b.sum().item<double>(), 0);
}

TEST_F(WeightLoaderTest, TypeWithoutFractions_IsRefusedAndNothingChanges) {
  Save({{"a", at::ones({2})}});
  at::Tensor a = at::zeros({2}), b = at::zeros({2});
  for (const at::ScalarType type :
       {at::kInt, at::kBool, at::kComplexFloat, at::kQInt8, at::ScalarType::Undefined}) {
    EXPECT_THAT(
        ErrorOf({{"a", a}, {"b", b}}, {.strict = false, .skip_mismatched = true, .dtype = type}),
        HasSubstr("dtype must be a floating-point type"));
  }
  EXPECT_EQ(a.scalar_type(), at::kFloat);
  EXPECT_EQ(b.scalar_type(), at::kFloat);
  EXPECT_EQ(a.sum().item<double>(), 0);
}

TEST_F(WeightLoaderTest, TargetsOnADevice_GetTheirValues) {
  Save({{"a", at::full({3}, 1.5)}, {"b", at::full({2}, 7, at::kFloat)}, {"n", at::ones({1})}});
  const at::Tensor a = OnFakeDevice({0, 0, 0}), b = OnFakeDevice({0, 0});
  at::Tensor n = at::zeros({1});
  const size_t before = CopiesToFakeDevice().size();
  const auto report =
      LoadWeights(dir_, {{"a", a}, {"b", b}, {"tied", b}, {"n", n}}, {.strict = false});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(ValuesOf(a), (std::vector<float>{1.5, 1.5, 1.5}));
  EXPECT_EQ(ValuesOf(b), (std::vector<float>{7, 7}));
  EXPECT_EQ(n.item<float>(), 1);
  EXPECT_EQ(CopiesToFakeDevice().size() - before, 2u);
}

// The tensor of another type would be converted after all that go straight to their places.
TEST_F(WeightLoaderTest, TargetsOnADeviceThatOverlap_AreWrittenInTheirOrder) {
  Save({{"a", at::full({4}, 1, at::kHalf)}, {"b", at::full({2}, 7, at::kBFloat16)}});
  const auto options = at::TensorOptions(FakeDevice().device()).dtype(at::kBFloat16);
  const at::Tensor a = at::empty({4}, options);
  auto* const bits = static_cast<uint16_t*>(a.data_ptr());
  const at::Tensor b = at::for_blob(bits + 1, {2})
                           .options(options)
                           .target_device(FakeDevice().device())
                           .make_tensor();
  const auto report = LoadWeights(dir_, {{"a", a}, {"b", b}});
  ASSERT_TRUE(report.ok()) << report.status();
  // The device copies the bits of 1.0 in float16; those of 7 are in bfloat16.
  EXPECT_EQ(std::vector<uint16_t>(bits, bits + 4),
            (std::vector<uint16_t>{0x3c00, 0x40e0, 0x40e0, 0x3c00}));
}

// A tensor that is copied because it has other strides in the file comes after those that several
// threads read.
TEST_F(WeightLoaderTest, TargetsOnTheHostThatOverlap_AreWrittenInTheirOrder) {
  Save({{"a", at::ones({4, 4})}, {"b", at::full({2, 4}, 7.0)}, {"c", at::full({2}, 9.0)}});
  const at::Tensor a = at::zeros({4, 4});
  const auto report =
      LoadWeights(dir_, {{"a", a}, {"b", a.t().narrow(0, 1, 2)}, {"c", a[0].narrow(0, 0, 2)}});
  ASSERT_TRUE(report.ok()) << report.status();
  at::Tensor want = at::ones({4, 4});
  want.narrow(1, 1, 2).fill_(7);
  want[0].narrow(0, 0, 2).fill_(9);
  EXPECT_TRUE(a.equal(want));
}

// They share the memory of a tensor, but have other values.
TEST_F(WeightLoaderTest, ConjugatedView_IsNoNameOfItsTensor) {
  const at::Tensor value = at::randn({3}, at::kComplexFloat);
  Save({{"a", value}, {"b", value.conj()}});
  const at::Tensor a = at::zeros({3}, at::kComplexFloat);
  const auto report = LoadWeights(dir_, {{"a", a}, {"b", a.conj()}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->loaded, ElementsAre("a", "b"));
  EXPECT_TRUE(a.equal(value));

  // Two values for one tensor, in memory.
  const at::Tensor tied = at::zeros({3}, at::kComplexFloat);
  const auto matched = MatchedWeights::Match("here", {{"a", value}, {"b", value.conj()}},
                                             {{"a", tied}, {"b", tied}}, {});
  EXPECT_THAT(std::string(matched.status().message()), HasSubstr("but another one in the file"));
}

TEST_F(WeightLoaderTest, TypeThatNoFileHolds_NamesTheTensor) {
  const at::Tensor odd = at::zeros({1}, at::kComplexDouble);
  const auto matched = MatchedWeights::Match("here", {{"odd", odd}}, {{"odd", odd}}, {});
  EXPECT_THAT(std::string(matched.status().message()), HasSubstr("here: tensor \"odd\": "));
}

TEST_F(WeightLoaderTest, TensorOfTerabytes_IsAStatusThatNamesIt) {
  const std::string path = test_folder_.Path("huge.safetensors");
  WriteHugeFile(path, "huge");
  const auto files = WeightFiles::Open(path);
  ASSERT_TRUE(files.ok()) << files.status();
  const AtMostOneMoreTebibyte scarce;
  const absl::Status status = ReadWeight(*files, files->entries()[0]).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(path + ": tensor \"huge\": needs 4398046511104 bytes"));
}

TEST_F(WeightLoaderTest, PrefixAndRename_ChooseAndNameTensors) {
  Save({{"model.a", at::ones({2})}, {"model.skip", at::ones({2})}, {"head", at::ones({2})}});
  at::Tensor a = at::zeros({2});
  LoadWeightsOptions options{.prefix = "model.", .rename = [](const std::string& name) {
                               return name == "skip" ? "" : "block." + name;
                             }};
  const auto report = LoadWeights(dir_, {{"block.a", a}}, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->loaded, ElementsAre("block.a"));
  EXPECT_THAT(report->ignored, ElementsAre("head", "model.skip"));
  EXPECT_EQ(a.sum().item<double>(), 2);
  EXPECT_THAT(ErrorOf({{"a", a}}, {.strict = false, .prefix = "none."}),
              HasSubstr("no name in the file begins with \"none.\""));
  const auto same = [](const std::string&) { return std::string("a"); };
  EXPECT_THAT(ErrorOf({{"a", a}}, {.strict = false, .rename = same}), HasSubstr("named twice: a"));
}

TEST_F(WeightLoaderTest, Dtype_ChangesFloatsAndTheirTiesButNoIntegers) {
  Save({{"a", at::full({2}, 1.5)}, {"n", at::full({1}, 3, at::kLong)}});
  at::Tensor a = at::zeros({2}).requires_grad_(), n = at::zeros({1}, at::kLong);
  at::Tensor rest = at::ones({1}, at::kDouble);
  const auto report = LoadWeights(dir_, {{"a", a}, {"tied", a}, {"n", n}, {"rest", rest}},
                                  {.strict = false, .dtype = at::kBFloat16});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->missing, ElementsAre("rest"));
  EXPECT_EQ(a.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(a.requires_grad());
  EXPECT_EQ(a.sum().item<double>(), 3);
  EXPECT_EQ(n.scalar_type(), at::kLong);
  EXPECT_EQ(rest.scalar_type(), at::kBFloat16);
  EXPECT_EQ(rest.item<double>(), 1);
}

TEST_F(WeightLoaderTest, ViewsOfOtherStrides_MustGetTheSameElements) {
  const at::Tensor values = at::arange(4, at::kFloat).view({2, 2});
  const at::Tensor a = at::zeros({2, 2});
  const NamedTensors targets = {{"a", a}, {"b", a.t()}, {"c", a}};
  const NamedTensors other = {{"a", values}, {"b", values.add(1)}, {"c", values.clone()}};
  Save(other);
  EXPECT_THAT(ErrorOf(targets), HasSubstr("mismatched: a (shares memory here"));
  EXPECT_THAT(std::string(MatchedWeights::Match("m", other, targets).status().message()),
              HasSubstr("mismatched: a (shares memory here"));
  EXPECT_EQ(a.sum().item<double>(), 0);
  const auto report = LoadWeights(dir_, targets, {.skip_mismatched = true});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->loaded, ElementsAre("b"));
  EXPECT_EQ(report->mismatched.size(), 2u);
  EXPECT_TRUE(a.t().equal(values.add(1)));
  Save({{"a", values}, {"b", values.t().contiguous()}, {"c", values.clone()}});
  EXPECT_EQ(ErrorOf(targets), "");
  EXPECT_TRUE(a.equal(values));
}

TEST_F(WeightLoaderTest, TiedTensors_AreOneOrAnError) {
  Save({{"embed", at::ones({2})}});
  at::Tensor tied = at::zeros({2});
  const auto report = LoadWeights(dir_, {{"head", tied}, {"embed", tied}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->missing, IsEmpty());
  EXPECT_EQ(tied.sum().item<double>(), 2);
  Save({{"embed", at::ones({2})}, {"head", at::ones({2})}});
  EXPECT_EQ(ErrorOf({{"embed", tied}, {"head", tied}}), "");
  Save({{"embed", at::ones({2})}, {"head", at::zeros({2})}});
  EXPECT_THAT(ErrorOf({{"embed", tied}, {"head", tied}}),
              HasSubstr("head (the same tensor as embed here, but another one in the file)"));
}

TEST_F(WeightLoaderTest, NamesOfOneMemory_StayOneWhenTheTypeChanges) {
  // Two tensors that do not know of each other: not is_same(), but with one memory.
  at::Tensor embed = at::zeros({2}), head = at::zeros({2});
  head.set_data(embed);
  // Tensors that no file has are tied as well.
  at::Tensor rest = at::ones({3}), same_rest = at::ones({3});
  same_rest.set_data(rest);
  ASSERT_FALSE(embed.is_same(head));
  for (const bool both : {false, true}) {
    SCOPED_TRACE(both);
    NamedTensors saved = {{"embed", at::full({2}, 1.5)}};
    if (both) saved.emplace_back("head", at::full({2}, 1.5));
    Save(saved);
    const at::ScalarType type = both ? at::kHalf : at::kBFloat16;
    const auto report = LoadWeights(
        dir_, {{"head", head}, {"embed", embed}, {"rest", rest}, {"same_rest", same_rest}},
        {.strict = false, .dtype = type});
    ASSERT_TRUE(report.ok()) << report.status();
    for (const at::Tensor& tensor : {embed, head, rest, same_rest}) {
      EXPECT_EQ(tensor.scalar_type(), type);
    }
    EXPECT_EQ(head.data_ptr(), embed.data_ptr());
    EXPECT_EQ(same_rest.data_ptr(), rest.data_ptr());
    EXPECT_EQ(head.sum().item<double>(), 3);
    EXPECT_EQ(same_rest.sum().item<double>(), 3);
  }
}

TEST_F(WeightLoaderTest, TargetsWithoutMemoryOrWithOverlap_AreNotWrittenBlindly) {
  Save({{"a", at::ones({2, 3})}});
  EXPECT_THAT(ErrorOf({{"a", at::zeros({2, 3}, at::TensorOptions().device(at::kMeta))}}),
              HasSubstr("on the meta device: give it memory first"));
  at::Tensor expanded = at::zeros({2, 1}).expand({2, 3});
  ASSERT_EQ(ErrorOf({{"a", expanded}}), "");
  EXPECT_EQ(expanded.sum().item<double>(), 6);
}

TEST_F(WeightLoaderTest, MemoryThatIsRefused_NamesTheTensorAndTheWayOut) {
  const AtMostOneMoreTebibyte scarce;
  // A tensor with one element that is repeated takes no memory.
  const auto huge = [](at::ScalarType type) { return at::zeros({1}, type).expand({kTebibyte}); };
  for (const at::ScalarType type : {at::kFloat, at::kHalf}) {
    // Another layout, and another type for a tensor that no file has.
    const bool is_missing = type == at::kHalf;
    auto matched = MatchedWeights::Match(
        "here", {{is_missing ? "b" : "a", is_missing ? at::ones({2}) : huge(type)}},
        {{"a", huge(at::kFloat)}, {"b", at::ones({2})}}, {.strict = false, .dtype = type});
    ASSERT_TRUE(matched.ok()) << matched.status();
    const absl::Status status = matched->Copy();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(
        std::string(status.message()),
        testing::AllOf(testing::StartsWith("tensor \"a\" of the model, [1099511627776] "
                                           "Float: needs "),
                       HasSubstr(is_missing ? "2199023255552 bytes" : "4398046511104 bytes"),
                       HasSubstr("load_checkpoint_and_dispatch")));
  }
  // Values are compared if names lead to one tensor.
  const at::Tensor tied = huge(at::kFloat);
  const absl::Status status =
      MatchedWeights::Match("here", {{"a", huge(at::kHalf)}, {"b", huge(at::kHalf)}},
                            {{"a", tied}, {"b", tied}})
          .status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::StartsWith("here: tensor \"a\": needs 8796093022208 bytes"),
                             HasSubstr("to be compared, in Float, with b")));
}

TEST_F(WeightLoaderTest, MatchedWeights_ChangeNothingBeforeTheyAreCopied) {
  at::Tensor a = at::zeros({2}), b = at::zeros({2});
  const at::Tensor tied = at::ones({2}, at::kDouble);
  const auto refused = MatchedWeights::Match("here", {{"a", at::ones({3})}}, {{"a", a}});
  EXPECT_THAT(
      refused.status().message(),
      testing::AllOf(HasSubstr("here: the weights do not fit this model: mismatched: a ([3] F32"),
                     HasSubstr("load the file of this model")));
  auto matched = MatchedWeights::Match("here", {{"x.a", tied}, {"x.b", tied}, {"y", a}},
                                       {{"a", a}, {"b", b}}, {.prefix = "x."});
  ASSERT_TRUE(matched.ok()) << matched.status();
  EXPECT_THAT(matched->report().loaded, ElementsAre("a", "b"));
  EXPECT_THAT(matched->report().ignored, ElementsAre("y"));
  EXPECT_EQ(a.sum().item<double>(), 0);
  ASSERT_TRUE(matched->Copy().ok());
  EXPECT_EQ(a.sum().item<double>() + b.sum().item<double>(), 4);
}

// As a download or another save does it.
TEST_F(WeightLoaderTest, FilesThatAreOpen_AreReadWhateverHasTheirNamesNow) {
  Save({{"a", at::ones({2})}});
  const auto files = WeightFiles::Open(dir_);
  ASSERT_TRUE(files.ok()) << files.status();
  Save({{"a", at::full({2}, 5.0)}});
  const at::Tensor a = at::zeros({2});
  const auto report = LoadWeights(*files, {{"a", a}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(a.equal(at::ones({2})));
}

TEST_F(WeightLoaderTest, TorchFile_LoadsEveryTypeAndLayout) {
  for (const std::string name : {"types", "layouts", "pytorch_model"}) {
    SCOPED_TRACE(name);
    const auto plain = ModelFiles::Open(TestdataPath("torch_files/" + name + ".safetensors"));
    ASSERT_TRUE(plain.ok()) << plain.status();
    NamedTensors targets;
    for (const std::string& tensor : plain->Names()) {
      targets.emplace_back(tensor, at::zeros_like(*plain->Read(tensor)));
    }
    const auto report = LoadWeights(TestdataPath("torch_files/" + name + ".bin"), targets);
    ASSERT_TRUE(report.ok()) << report.status();
    for (const auto& [tensor, target] : targets) {
      const at::Tensor wanted = *plain->Read(tensor);
      EXPECT_EQ(memcmp(target.data_ptr(), wanted.data_ptr(), wanted.nbytes()), 0) << tensor;
    }
  }
}

}  // namespace
}  // namespace muster
