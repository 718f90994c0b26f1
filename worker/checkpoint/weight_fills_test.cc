#include "worker/checkpoint/weight_fills.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "c10/core/InferenceMode.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/test_left_copies.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

FakeStreams& Streams() { return FakeDevice(); }

// A file of weights, and a device that does nothing before a thread waits for it.
class WeightFillsTest : public testing::Test {
 protected:
  WeightFillsTest() {
    EXPECT_TRUE(SaveModelFiles(dir_, weights_).ok());
    absl::StatusOr<WeightFiles> files = WeightFiles::Open(dir_);
    EXPECT_TRUE(files.ok()) << files.status();
    files_ = std::make_unique<WeightFiles>(*std::move(files));
  }

  size_t left() const { return copies_.size(); }
  // Returns fills of all weights, with their own types.
  std::vector<WeightFill> Uploads() {
    std::vector<WeightFill> uploads;
    for (const auto& [name, weight] : weights_) {
      uploads.push_back({.from = files_->Find(name), .to = EmptyLike(weight)});
    }
    return uploads;
  }
  static at::Tensor EmptyLike(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), at::TensorOptions(Streams().device()).dtype(tensor.dtype()));
  }
  absl::Status Upload(const std::vector<WeightFill>& uploads) {
    return FillWeights(
        *files_, uploads,
        {.threads = 3,
         .converted_bytes = 0,
         .least_bytes = 0,
         .uploads = [this](const auto& device) {
           // Tensors span several blocks, more than exist.
           return std::make_unique<DeviceUploads>(
               device, DeviceUploads::Room{.block_bytes = 64 << 10, .threads = 3, .blocks = 4},
               [this](char* to, const char* from, size_t bytes) { copies_.Leave(to, from, bytes); },
               nullptr);
         }});
  }
  static bool Same(const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
           std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  }

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("weights");
  const NamedTensors weights_ = {{"a", at::arange(300'000, at::kFloat).view({300, 1000})},
                                 {"b", at::arange(7, at::kLong)},
                                 {"c", at::arange(50'000, at::kFloat).to(at::kBFloat16)}};
  std::unique_ptr<WeightFiles> files_;
  LeftCopies copies_{Streams()};
};

TEST_F(WeightFillsTest, Weights_AreThereAndCountAsChanged) {
  const std::vector<WeightFill> uploads = Uploads();
  const auto version = uploads[0].to._version();
  const absl::Status status = Upload(uploads);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(left(), 0u);
  for (size_t i = 0; i < uploads.size(); ++i) {
    EXPECT_TRUE(Same(uploads[i].to, weights_[i].second)) << weights_[i].first;
  }
  EXPECT_NE(uploads[0].to._version(), version);
}

TEST_F(WeightFillsTest, WeightsOnTheHost_AreThereConvertedAndCountAsChanged) {
  const at::Tensor a = at::zeros({300, 1000}), b = at::zeros({7}, at::kLong),
                   c = at::zeros({50'000}, at::kDouble);
  const auto version = a._version(), converted = c._version();
  const absl::Status status = FillWeights(*files_, {{.from = files_->Find("a"), .to = a},
                                                    {.from = files_->Find("b"), .to = b},
                                                    {.from = files_->Find("c"), .to = c}});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Same(a, weights_[0].second) && Same(b, weights_[1].second));
  EXPECT_TRUE(Same(c, weights_[2].second.to(at::kDouble)));
  EXPECT_NE(a._version(), version);
  EXPECT_NE(c._version(), converted);
}

// The mode applies to the calling thread; reading threads have none.
TEST_F(WeightFillsTest, UnderInferenceMode_WeightsAreThereAndConverted) {
  const at::Tensor before = at::zeros({50'000}, at::kDouble);
  const auto version = before._version();
  const c10::InferenceMode inference;
  const at::Tensor a = at::zeros({300, 1000}), c = at::zeros({50'000}, at::kDouble);
  const absl::Status status = FillWeights(*files_, {{.from = files_->Find("a"), .to = a},
                                                    {.from = files_->Find("c"), .to = c},
                                                    {.from = files_->Find("c"), .to = before}});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Same(a, weights_[0].second));
  EXPECT_TRUE(Same(c, weights_[2].second.to(at::kDouble)) && Same(before, c));
  EXPECT_NE(before._version(), version);
}

// Sanitizers detect addresses that are not aligned for a number.
TEST_F(WeightFillsTest, HeaderOfOddLength_LeavesValuesThatConvert) {
  const at::Tensor values = at::arange(100'000, at::kFloat);
  const std::string header = R"({"x":{"dtype":"F32","shape":[100000],"data_offsets":[0,400000]}} )";
  ASSERT_EQ(header.size() % 2, 1u);
  const uint64_t length = header.size();
  std::string text(reinterpret_cast<const char*>(&length), sizeof(length));
  text.append(header).append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  const std::string path = folder_.Path("odd.safetensors");
  ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  const absl::StatusOr<WeightFiles> files = WeightFiles::Open(path);
  ASSERT_TRUE(files.ok()) << files.status();
  const at::Tensor x = at::zeros({100'000}, at::kDouble);
  const absl::Status status = FillWeights(*files, {{.from = files->Find("x"), .to = x}});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Same(x, values.to(at::kDouble)));
}

// Like a model in which one parameter is a part of another.
TEST_F(WeightFillsTest, TargetsOnTheHostThatOverlap_AreWrittenInTheirOrder) {
  // Few bytes, which are read before all of the first tensor is there.
  const at::Tensor a = at::zeros({300, 1000});
  auto* const bytes = static_cast<char*>(a.data_ptr()) + 1'000'000;
  const at::Tensor b = at::from_blob(bytes, {7}, at::kLong);
  for (int i = 0; i < 20; ++i) {
    a.zero_();
    const absl::Status status = FillWeights(
        *files_, {{.from = files_->Find("a"), .to = a}, {.from = files_->Find("b"), .to = b}},
        {.threads = 3});
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(Same(b, weights_[1].second));
  }
}

TEST_F(WeightFillsTest, FillsThatAreLeft_AreMadeBeforeACopyToTheSameMemory) {
  const at::Tensor a = at::zeros({300, 1000}), b = at::zeros({7}, at::kLong);
  const at::Tensor row = a[7];
  WeightFills fills(*files_);
  fills.Add({.from = files_->Find("a"), .to = a});
  ASSERT_TRUE(fills.MakeBefore(b).ok());
  EXPECT_FALSE(a.any().item<bool>()) << "they are made together";
  ASSERT_TRUE(fills.MakeBefore(row).ok());
  row.fill_(-1);
  fills.Add({.from = files_->Find("b"), .to = b});
  ASSERT_TRUE(fills.Make().ok());
  at::Tensor expected = weights_[0].second.clone();
  expected[7].fill_(-1);
  EXPECT_TRUE(Same(a, expected) && Same(b, weights_[1].second));
}

TEST_F(WeightFillsTest, FileThatEnds_IsTheErrorAndNothingIsUnderWay) {
  const std::string path = files_->FileOf(*files_->Find("a"));
  const absl::StatusOr<std::string> text = ReadFile(path);
  ASSERT_TRUE(text.ok());
  // Truncated in place, because the file is open.
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(text->size() / 2)), 0);
  const absl::Status status = Upload(Uploads());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  EXPECT_EQ(left(), 0u) << "the device still reads memory that goes";
}

// There need not be room for all of them at a time.
TEST_F(WeightFillsTest, TensorsOfAnotherType_TakeNoMoreMemoryThanAllowed) {
  constexpr size_t kEach = 100'000;
  NamedTensors weights;
  for (const char* const name : {"p", "q", "r", "s"}) {
    weights.emplace_back(name, at::full({kEach / 2}, name[0], at::kHalf));
  }
  const std::string dir = folder_.Path("converted");
  ASSERT_TRUE(SaveModelFiles(dir, weights).ok());
  const absl::StatusOr<WeightFiles> files = WeightFiles::Open(dir);
  ASSERT_TRUE(files.ok()) << files.status();
  const auto peak = [&](size_t allowed) {
    std::vector<WeightFill> uploads;
    for (const auto& [name, weight] : weights) {
      uploads.push_back({.from = files->Find(name), .to = EmptyLike(weight.to(at::kBFloat16))});
    }
    const int64_t before = MemoryOfFakeDevice().now;
    LimitFakeDevice(-1);
    const absl::Status status =
        FillWeights(*files, uploads, {.threads = 2, .converted_bytes = allowed});
    EXPECT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < uploads.size(); ++i) {
      // The device copies bits.
      EXPECT_EQ(
          std::memcmp(uploads[i].to.const_data_ptr(), weights[i].second.const_data_ptr(), kEach), 0)
          << weights[i].first;
    }
    EXPECT_EQ(MemoryOfFakeDevice().now, before);
    return static_cast<size_t>(MemoryOfFakeDevice().peak - before);
  };
  EXPECT_EQ(peak(4 * kEach), 4 * kEach);
  EXPECT_EQ(peak(2 * kEach), 2 * kEach);
  EXPECT_EQ(peak(kEach / 2), kEach) << "one that is larger by itself";
}

TEST_F(WeightFillsTest, WhatIsReadWhereItGoes) {
  const WeightEntry& a = *files_->Find("a");
  const at::Tensor there = EmptyLike(weights_[0].second);
  EXPECT_TRUE(IsFillable(a, there));
  EXPECT_TRUE(IsFillable(a, EmptyLike(weights_[0].second.to(at::kBFloat16)))) << "converts";
  EXPECT_TRUE(IsFillable(a, at::zeros({300, 1000})));
  EXPECT_TRUE(IsFillable(a, at::zeros({300, 1000}, at::kBFloat16))) << "converts";
  EXPECT_FALSE(IsFillable(a, at::zeros({300, 1000}, at::kLong)));
  const at::Tensor offloaded = at::from_blob(nullptr, {300, 1000}, at::kFloat);
  EXPECT_FALSE(IsFillable(a, offloaded)) << "has no memory";
  EXPECT_FALSE(IsFillable(a, at::zeros({1000, 300}).t())) << "is not contiguous";
  EXPECT_FALSE(IsFillable(a, EmptyLike(weights_[0].second.to(at::kLong))));
  EXPECT_FALSE(IsFillable(*files_->Find("b"), there));
  WeightEntry turned = a;
  turned.tensor.strides = {1, 300};
  EXPECT_FALSE(IsFillable(turned, there));
}

}  // namespace
}  // namespace muster
