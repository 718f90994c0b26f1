#include "worker/checkpoint/weight_uploads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/test_left_copies.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

FakeStreams& Streams() { return FakeDevice(); }

// A file of weights, and a device that does nothing before a thread waits for it.
class WeightUploadsTest : public testing::Test {
 protected:
  WeightUploadsTest() {
    EXPECT_TRUE(SaveModelFiles(dir_, weights_).ok());
    absl::StatusOr<WeightFiles> files = WeightFiles::Open(dir_);
    EXPECT_TRUE(files.ok()) << files.status();
    files_ = std::make_unique<WeightFiles>(*std::move(files));
  }

  size_t left() const { return copies_.size(); }
  // Of all weights, of their own types.
  std::vector<WeightUpload> Uploads() {
    std::vector<WeightUpload> uploads;
    for (const auto& [name, weight] : weights_) {
      uploads.push_back({.from = files_->Find(name), .to = EmptyLike(weight)});
    }
    return uploads;
  }
  static at::Tensor EmptyLike(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), at::TensorOptions(Streams().device()).dtype(tensor.dtype()));
  }
  absl::Status Upload(const std::vector<WeightUpload>& uploads) {
    return UploadWeights(
        *files_, uploads,
        {.threads = 3, .converted_bytes = 0, .uploads = [this](const auto& device) {
           // Tensors are of several blocks, and more than there are.
           return std::make_unique<DeviceUploads>(
               device, 64 << 10, 4,
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

TEST_F(WeightUploadsTest, Weights_AreThereAndCountAsChanged) {
  const std::vector<WeightUpload> uploads = Uploads();
  const auto version = uploads[0].to._version();
  const absl::Status status = Upload(uploads);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(left(), 0u);
  for (size_t i = 0; i < uploads.size(); ++i) {
    EXPECT_TRUE(Same(uploads[i].to, weights_[i].second)) << weights_[i].first;
  }
  EXPECT_NE(uploads[0].to._version(), version);
}

TEST_F(WeightUploadsTest, FileThatEnds_IsTheErrorAndNothingIsUnderWay) {
  const std::string path = files_->FileOf(*files_->Find("a"));
  const absl::StatusOr<std::string> text = ReadFile(path);
  ASSERT_TRUE(text.ok());
  // In place: the file is open.
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(text->size() / 2)), 0);
  const absl::Status status = Upload(Uploads());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  EXPECT_EQ(left(), 0u) << "the device still reads memory that goes";
}

// Room for all of them at a time is not needed.
TEST_F(WeightUploadsTest, TensorsOfAnotherType_TakeNoMoreMemoryThanAllowed) {
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
    std::vector<WeightUpload> uploads;
    for (const auto& [name, weight] : weights) {
      uploads.push_back({.from = files->Find(name), .to = EmptyLike(weight.to(at::kBFloat16))});
    }
    const int64_t before = MemoryOfFakeDevice().now;
    LimitFakeDevice(-1);
    const absl::Status status =
        UploadWeights(*files, uploads, {.threads = 2, .converted_bytes = allowed});
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

TEST_F(WeightUploadsTest, WhatGoesStraightToADevice) {
  const WeightEntry& a = *files_->Find("a");
  const at::Tensor there = EmptyLike(weights_[0].second);
  EXPECT_TRUE(IsUploadable(a, there));
  EXPECT_TRUE(IsUploadable(a, EmptyLike(weights_[0].second.to(at::kBFloat16)))) << "converts";
  EXPECT_FALSE(IsUploadable(a, at::zeros({300, 1000}))) << "is on the host";
  EXPECT_FALSE(IsUploadable(a, EmptyLike(weights_[0].second.to(at::kLong))));
  EXPECT_FALSE(IsUploadable(*files_->Find("b"), there));
  WeightEntry turned = a;
  turned.tensor.strides = {1, 300};
  EXPECT_FALSE(IsUploadable(turned, there));
}

}  // namespace
}  // namespace muster
