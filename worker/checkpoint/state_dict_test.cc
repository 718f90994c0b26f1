#include "worker/checkpoint/state_dict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/zeros.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/fake_device.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class StateDictTest : public testing::Test {
 protected:
  const TestFolder test_folder_;
  const std::string folder_ = test_folder_.path();
};

StateDict Scalars() {
  StateDict state;
  state.SetBool("flag", true);
  state.SetInt("count", std::numeric_limits<int64_t>::min());
  state.SetDouble("rate", 0.1);
  state.SetDouble("whole", 3.0);
  state.SetDouble("infinite", -std::numeric_limits<double>::infinity());
  state.SetText("text", "a \"b\" ✓");
  state.SetMetadata("format", "pt");
  return state;
}

TEST_F(StateDictTest, ScalarsAndTensors_RoundTripInBothFormats) {
  StateDict state = Scalars();
  const std::string json = JoinPath(folder_, "s.json");
  const auto digest = WriteStateDict(json, state);
  ASSERT_TRUE(digest.ok()) << digest.status();
  state.SetTensor("state.0.exp_avg", at::randn({3}));
  const std::string file = JoinPath(folder_, "s.safetensors");
  ASSERT_TRUE(WriteStateDict(file, state).ok());
  for (const std::string& path : {json, file}) {
    const auto back = ReadStateDict(path, *DigestFile(path));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back->GetBool("flag"), true);
    EXPECT_EQ(*back->GetInt("count"), std::numeric_limits<int64_t>::min());
    EXPECT_EQ(*back->GetDouble("rate"), 0.1);
    EXPECT_EQ(*back->GetDouble("whole"), 3.0);
    EXPECT_TRUE(std::isinf(*back->GetDouble("infinite")));
    EXPECT_EQ(*back->GetText("text"), "a \"b\" ✓");
    EXPECT_EQ(back->metadata().at("format"), "pt");
    EXPECT_EQ(back->metadata().size(), 1u);
  }
  EXPECT_TRUE(ReadStateDict(file)
                  ->GetTensor("state.0.exp_avg")
                  ->equal(*state.GetTensor("state.0.exp_avg")));
}

TEST_F(StateDictTest, FlippedByte_IsDataLossNamingFile) {
  StateDict state;
  state.SetTensor("w", at::ones({100}));
  for (const char* name : {"s.safetensors", "s.json"}) {
    const std::string path = JoinPath(folder_, name);
    const auto digest =
        WriteStateDict(path, absl::string_view(name) == "s.json" ? Scalars() : state);
    ASSERT_TRUE(digest.ok());
    const std::string good = *ReadFile(path);
    for (size_t at = 0; at < good.size(); at += 13) {
      std::string bad = good;
      bad[at] ^= 0x10;
      ASSERT_TRUE(WriteFileAtomically(path, bad).ok());
      const auto read = ReadStateDict(path, *digest);
      EXPECT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << at << read.status();
      EXPECT_THAT(std::string(read.status().message()), HasSubstr(path));
    }
    ASSERT_TRUE(WriteFileAtomically(path, good.substr(0, good.size() / 2)).ok());
    EXPECT_EQ(ReadStateDict(path, *digest).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST_F(StateDictTest, WrongUse_IsToldByName) {
  const StateDict state = Scalars();
  EXPECT_EQ(state.GetInt("nothing").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(state.GetInt("rate").status().message()),
            "state \"rate\" is a number, not an integer");
  StateDict tensor;
  tensor.SetTensor("w", at::ones({1}));
  EXPECT_FALSE(WriteStateDict(JoinPath(folder_, "a.json"), tensor).ok());
  EXPECT_FALSE(WriteStateDict(JoinPath(folder_, "a.bin"), tensor).ok());
  StateDict bytes;
  bytes.SetText("t", "\xff");
  EXPECT_FALSE(WriteStateDict(JoinPath(folder_, "a.json"), bytes).ok());
}

TEST_F(StateDictTest, TensorThatTorchCannotHave_IsNamed) {
  const std::vector<SafetensorsEntry> entries = {
      {.name = "a", .type = SafetensorsType::kF4, .shape = {16}},
      {.name = "b", .type = SafetensorsType::kU8, .shape = std::vector<uint64_t>(5000, 1)}};
  for (const SafetensorsEntry& entry : entries) {
    const uint64_t bytes = *SafetensorsBytes(entry.type, entry.shape);
    const auto file = EncodeSafetensors({entry}, {std::string(bytes, 'x')}, std::nullopt);
    ASSERT_TRUE(file.ok()) << file.status();
    const absl::Status status = ParseStateDict(*file, "f.safetensors").status();
    EXPECT_TRUE(absl::IsUnimplemented(status) || absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::StartsWith("f.safetensors: tensor \"" + entry.name + "\": "));
    EXPECT_LT(status.message().size(), 200u);
  }
}

TEST_F(StateDictTest, MergeAndSub_AreInverse) {
  StateDict inner = Scalars();
  inner.SetTensor("w", at::ones({2}));
  StateDict outer;
  outer.SetInt("ab", 1);
  outer.Merge("a", inner);
  const StateDict back = outer.Sub("a");
  EXPECT_EQ(back.scalars(), inner.scalars());
  EXPECT_EQ(back.tensors().size(), 1u);
}

TEST(LoadTensors, D16_MissingNames_AreAnErrorEvenWhenStrictIsForgotten) {
  const at::Tensor a = at::zeros({2}), b = at::zeros({2});
  const NamedTensors targets = {{"a", a}, {"b", b}};
  const absl::Status status =
      LoadTensors({{"a", at::ones({2})}, {"c", at::ones({2})}}, targets, "m");
  EXPECT_EQ(std::string(status.message()),
            "m: the tensors do not fit this model: missing: b; unexpected: c");
  EXPECT_EQ(a.sum().item<float>(), 0) << "nothing is copied unless all fits";
  EXPECT_TRUE(LoadTensors({{"a", at::ones({2})}, {"c", at::ones({2})}}, targets, "m",
                          {.allow_missing = true, .allow_unexpected = true})
                  .ok());
  EXPECT_EQ(a.sum().item<float>(), 2);
}

TEST(LoadTensors, LargeTensorsOfADevice_AreUploadedInBlocks) {
  const at::Tensor large = at::arange(5'000'000, at::kFloat);  // 20 MB
  const at::Tensor there =
      at::empty(large.sizes(), at::TensorOptions(FakeDevice().device()).dtype(at::kFloat));
  const size_t before = CopiesToFakeDevice().size();
  ASSERT_TRUE(LoadTensors({{"w", large}}, {{"w", there}}, "m").ok());
  EXPECT_GE(CopiesToFakeDevice().size() - before, 10u);
  EXPECT_EQ(std::memcmp(there.const_data_ptr(), large.const_data_ptr(), large.nbytes()), 0);
}

TEST(LoadTensors, ShapesAndTypes_MustFit) {
  const at::Tensor target = at::zeros({2}, at::kFloat);
  EXPECT_THAT(std::string(LoadTensors({{"w", at::ones({3})}}, {{"w", target}}, "m").message()),
              AllOf(HasSubstr("w ([3] Float in the file, [2] Float here)")));
  EXPECT_FALSE(LoadTensors({{"w", at::ones({2}, at::kLong)}}, {{"w", target}}, "m").ok());
  EXPECT_TRUE(LoadTensors({{"w", at::ones({2}, at::kBFloat16)}}, {{"w", target}}, "m").ok());
}

TEST(LoadTensors, TiedTarget_NeedsOneName) {
  const at::Tensor tied = at::zeros({2});
  EXPECT_TRUE(LoadTensors({{"embed", at::ones({2})}}, {{"embed", tied}, {"head", tied}}, "m").ok());
  EXPECT_EQ(tied.sum().item<float>(), 2);
}

// Otherwise the last one would win silently.
TEST(LoadTensors, TiedTarget_OfWhichTheFileHasTwoValues_IsRefusedBeforeAnythingChanges) {
  const at::Tensor tied = at::zeros({2}), other = at::zeros({2});
  const NamedTensors targets = {{"a", other}, {"embed", tied}, {"head", tied}};
  const NamedTensors differ = {
      {"a", at::ones({2})}, {"embed", at::ones({2})}, {"head", at::full({2}, 2.0)}};
  for (const bool check_only : {true, false}) {
    const absl::Status status = LoadTensors(differ, targets, "m", {.check_only = check_only});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("head (the same tensor as embed here, but another one in the file)"));
  }
  EXPECT_EQ(tied.sum().item<float>() + other.sum().item<float>(), 0);
  // Different bytes that have the same value here.
  NamedTensors same = differ;
  same[2].second = at::ones({2}, at::kDouble);
  EXPECT_TRUE(LoadTensors(same, targets, "m").ok());
  EXPECT_EQ(tied.sum().item<float>(), 2);
  // Another part of the same memory is another tensor.
  const at::Tensor both = at::zeros({4});
  EXPECT_TRUE(
      LoadTensors(differ,
                  {{"a", other}, {"embed", both.slice(0, 0, 2)}, {"head", both.slice(0, 2)}}, "m")
          .ok());
  EXPECT_EQ(both.sum().item<float>(), 6);
}

// Two parameters may be views of one memory.
TEST(LoadTensors, TargetsThatShareElementsOtherwise_AreRefusedUnlessTheFileAgrees) {
  const at::Tensor square = at::zeros({2, 2}), values = at::arange(4, at::kFloat).view({2, 2});
  const NamedTensors transposed = {{"a", square}, {"b", square.t()}};
  for (const bool check_only : {true, false}) {
    const absl::Status status =
        LoadTensors({{"a", values}, {"b", values}}, transposed, "m", {.check_only = check_only});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("different: a (shares memory here"));
  }
  EXPECT_EQ(square.sum().item<float>(), 0);
  EXPECT_TRUE(LoadTensors({{"a", values}, {"b", values.t()}}, transposed, "m").ok());
  EXPECT_TRUE(at::equal(square, values));
  // A tensor and a part of it, which begins elsewhere.
  const NamedTensors part = {{"whole", square}, {"row", square[1]}};
  EXPECT_FALSE(LoadTensors({{"whole", values}, {"row", at::ones({2})}}, part, "m").ok());
  EXPECT_TRUE(
      LoadTensors({{"whole", values}, {"row", at::arange(2, 4, at::kDouble)}}, part, "m").ok());
  // Columns are interleaved, but share nothing.
  EXPECT_TRUE(LoadTensors({{"a", at::ones({2})}, {"b", at::zeros({2})}},
                          {{"a", square.select(1, 0)}, {"b", square.select(1, 1)}}, "m")
                  .ok());
  EXPECT_EQ(square.sum().item<float>(), 2);
}

TEST(LoadTensors, TiedTargetTooLargeToCompare_IsAnErrorThatNamesIt) {
  const at::Tensor huge = at::zeros({1}).expand({int64_t{1} << 45});
  const absl::Status status = LoadTensors({{"a", huge}, {"b", huge}}, {{"a", huge}, {"b", huge}},
                                          "m", {.check_only = true});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("m: tensor \"b\": needs"));
}

TEST(LoadTensors, ValuesThatWereChecked_AreNotComparedAgain) {
  const at::Tensor tied = at::zeros({2});
  EXPECT_TRUE(LoadTensors({{"a", at::ones({2})}, {"b", at::full({2}, 2.0)}},
                          {{"a", tied}, {"b", tied}}, "m", {.values_checked = true})
                  .ok());
  EXPECT_EQ(tied.sum().item<float>(), 2) << "the first name's, once";
}

TEST(LoadTensors, ShapesOnly_LooksAtNoValues) {
  const at::Tensor tied = at::zeros({2});
  EXPECT_TRUE(LoadTensors({{"a", at::ones({2})}, {"b", at::full({2}, 2.0)}},
                          {{"a", tied}, {"b", tied}}, "m", {.shapes_only = true})
                  .ok());
  EXPECT_EQ(tied.sum().item<float>(), 0);
}

TEST(LoadTensors, TargetThatNeedsGradient_IsFilled) {
  const at::Tensor target = at::zeros({2}).requires_grad_();
  EXPECT_TRUE(LoadTensors({{"w", at::ones({2})}}, {{"w", target}}, "m").ok());
  EXPECT_EQ(target.sum().item<float>(), 2);
}

}  // namespace
}  // namespace muster
