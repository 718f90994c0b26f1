#include "worker/checkpoint/tensor_uploads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/zeros.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/test_left_copies.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

constexpr size_t kBlock = 64 << 10;

FakeStreams& Streams() { return FakeDevice(); }

bool Same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::Tensor Empty(const at::Tensor& like) {
  return at::empty(like.sizes(), at::TensorOptions(Streams().device()).dtype(like.dtype()));
}

// A device that does nothing before a thread waits for it.
class TensorUploadsTest : public testing::Test {
 protected:
  TensorUploadOptions Options() {
    return {.threads = 3, .least_bytes = 0, .uploads = [this](const c10::Device& device) {
              return std::make_unique<DeviceUploads>(
                  device, DeviceUploads::Room{.block_bytes = kBlock, .threads = 3, .blocks = 4},
                  [this](char* to, const char* from, size_t bytes) {
                    ++queued_;
                    copies_.Leave(to, from, bytes);
                  },
                  nullptr);
            }};
  }

  std::atomic<size_t> queued_ = 0;
  LeftCopies copies_{Streams()};
  const at::Tensor large_ = at::arange(300'000, at::kFloat), small_ = at::arange(5, at::kLong);
};

TEST_F(TensorUploadsTest, TensorsInMemory_AreUploadedInBlocks) {
  const at::Tensor a = Empty(large_), b = Empty(small_), on_host = at::zeros({5}, at::kLong);
  const auto version = a._version();
  const absl::Status status = CopyTensors({{a, large_}, {on_host, small_}, {b, small_}}, Options());
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(copies_.size(), 0u) << "the device still reads memory that goes";
  EXPECT_TRUE(Same(a, large_) && Same(b, small_) && Same(on_host, small_));
  EXPECT_GT(a._version(), version);
  EXPECT_EQ(queued_, (large_.nbytes() + kBlock - 1) / kBlock + 1);
}

// Two names of one parameter for which a state has two values: the later one wins, as with copy_().
TEST_F(TensorUploadsTest, TargetsThatOverlap_WaitForThoseBefore) {
  const at::Tensor one = at::arange(1000, at::kFloat), two = one.add(1), three = one.add(2);
  const at::Tensor a = Empty(one), c = Empty(one);
  const at::Tensor part = at::for_blob(static_cast<float*>(a.data_ptr()) + 500, {500})
                              .options(a.options())
                              .target_device(a.device())
                              .make_tensor();
  TensorUploadOptions options = Options();
  std::vector<size_t> waiting;
  options.uploads = [&](const c10::Device& device) {
    return std::make_unique<DeviceUploads>(
        device, DeviceUploads::Room{.block_bytes = kBlock, .threads = 1, .blocks = 9},
        [&](char* to, const char* from, size_t bytes) {
          waiting.push_back(copies_.size());
          copies_.Leave(to, from, bytes);
        },
        nullptr);
  };
  options.threads = 1;
  const absl::Status status =
      CopyTensors({{a, one}, {c, one}, {a, two}, {part, three.narrow(0, 500, 500)}}, options);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(waiting, (std::vector<size_t>{0, 1, 0, 0}));
  EXPECT_TRUE(Same(c, one) && Same(part, three.narrow(0, 500, 500)));
  EXPECT_EQ(std::memcmp(a.const_data_ptr(), two.const_data_ptr(), 2000), 0);
}

// Also for tensors that are copied directly in between.
TEST_F(TensorUploadsTest, CopiesThatMeetAnUpload_ComeInTheirOrder) {
  const at::Tensor a = Empty(large_), b = Empty(large_);
  const at::Tensor source = large_.clone(), other = large_.add(1), back = at::zeros({300'000});
  const absl::Status status = CopyTensors(
      {
          {a, source},
          {source, other},     // after it was read
          {back, a},           // after it was written
          {b, other},          // and
          {b, Empty(large_)},  // over it
          {b, source},
      },
      Options());
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Same(a, large_) && Same(source, other) && Same(back, large_) && Same(b, other));
}

TEST_F(TensorUploadsTest, FewBytes_AreCopied) {
  const at::Tensor a = Empty(large_);
  TensorUploadOptions options = Options();
  options.least_bytes = large_.nbytes() + 1;
  ASSERT_TRUE(CopyTensors({{a, large_}}, options).ok());
  EXPECT_TRUE(Same(a, large_));
  EXPECT_EQ(queued_, 0u);
}

// At a point where an error is not acceptable, copy_() uses memory of the driver.
TEST_F(TensorUploadsTest, WithoutMemoryForBlocks_TensorsAreCopied) {
  const at::Tensor a = Empty(large_);
  TensorUploadOptions options = Options();
  options.uploads = [](const c10::Device& device) {
    return std::make_unique<DeviceUploads>(
        device, DeviceUploads::Room{.block_bytes = SIZE_MAX / 2 / kBlock * kBlock},
        [](char*, const char*, size_t) {}, nullptr);
  };
  const absl::Status status = CopyTensors({{a, large_}}, options);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Same(a, large_));
}

TEST_F(TensorUploadsTest, SourceThatFails_IsTheErrorAndNothingIsUnderWay) {
  const at::Tensor a = Empty(large_);
  const TensorUpload upload{
      .to = a,
      .type = at::kFloat,
      .bytes = large_.nbytes(),
      .fetch = [](uint64_t begin, size_t size, char* block) -> absl::StatusOr<size_t> {
        if (begin > 500'000) return absl::DataLossError("it ends");
        std::memset(block, 1, size);
        return 0;
      }};
  const absl::Status status = UploadTensors({upload}, Options());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(copies_.size(), 0u);
}

// As direct I/O does: with preceding bytes that fill a block of the disk.
TEST_F(TensorUploadsTest, ValuesThatBeginInTheMiddleOfABlock_AreWhole) {
  for (const size_t remainder : {size_t{8}, size_t{4000}}) {
    const at::Tensor a = Empty(large_);
    const auto* const from = static_cast<const char*>(large_.const_data_ptr());
    const TensorUpload upload{
        .to = a,
        .type = at::kFloat,
        .bytes = large_.nbytes(),
        .fetch = [&](uint64_t begin, size_t size, char* block) -> absl::StatusOr<size_t> {
          const size_t offset = (begin + remainder) % 4096;
          EXPECT_LE(offset + size, kBlock);
          EXPECT_EQ(offset, begin == 0 ? remainder : 0);
          std::memset(block, 0x5a, kBlock);
          std::memcpy(block + offset, from + begin, size);
          return offset;
        },
        .remainder = remainder};
    ASSERT_TRUE(UploadTensors({upload}, Options()).ok());
    EXPECT_TRUE(Same(a, large_));
  }
}

TEST_F(TensorUploadsTest, WhatTakesAnUpload) {
  const at::Tensor there = Empty(large_);
  EXPECT_TRUE(TakesUpload(there, at::kFloat, large_.nbytes()));
  EXPECT_TRUE(TakesUpload(there, at::kBFloat16, large_.nbytes() / 2)) << "converts";
  EXPECT_FALSE(TakesUpload(there, at::kLong, large_.nbytes() * 2));
  EXPECT_FALSE(TakesUpload(there, at::kFloat, large_.nbytes() - 4));
  EXPECT_FALSE(TakesUpload(large_, at::kFloat, large_.nbytes())) << "is on the host";
}

}  // namespace
}  // namespace muster
