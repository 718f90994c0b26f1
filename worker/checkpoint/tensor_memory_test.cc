#include "worker/checkpoint/tensor_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "c10/util/Exception.h"
#include "worker/checkpoint/test_huge_file.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(TensorSizes, WhatATensorCanHave_IsTaken) {
  EXPECT_THAT(*TensorSizes({2, 0, 3}, ""), ElementsAre(2, 0, 3));
  EXPECT_EQ(TensorSizes(std::vector<uint64_t>(64, 1), "")->size(), 64u);
}

TEST(TensorSizes, MoreOrLargerDimensions_AreRefused) {
  for (const std::vector<uint64_t>& shape :
       {std::vector<uint64_t>(65, 1), std::vector<uint64_t>{uint64_t{1} << 63, 0}}) {
    const absl::Status status = TensorSizes(shape, PlaceOfTensor("f", "w")).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith("f: tensor \"w\": shape: "));
  }
}

TEST(NewTensor, SizesAndType_AreThoseAskedFor) {
  const at::Tensor tensor = *NewTensor({2, 3}, at::kHalf, "");
  EXPECT_THAT(tensor.sizes(), ElementsAre(2, 3));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_EQ(NewTensor({0, 4}, at::kFloat, "")->numel(), 0);
}

TEST(NewTensor, MoreThanThereIs_IsAStatus) {
  const AtMostOneMoreTebibyte scarce;
  const absl::Status status = NewTensor({4, kTebibyte}, at::kByte, "f: ").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(StartsWith("f: "), HasSubstr("4398046511104 bytes")));
}

TEST(WithMemory, OtherErrors_PassThrough) {
  EXPECT_TRUE(WithMemory("t ", 1, "way out", [] {}).ok());
  EXPECT_THROW(std::ignore = WithMemory("t ", 1, "way out", [] { TORCH_CHECK(false, "no"); }),
               c10::Error);
}

// The zero does not help, because LibTorch multiplies the other sizes.
TEST(NewTensor, BytesBeyond64Bits_AreAStatus) {
  const int64_t huge = int64_t{1} << 62;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{huge, 8}, {huge, 8, 0}}) {
    const absl::Status status = NewTensor(sizes, at::kFloat, "f: ").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
}

}  // namespace
}  // namespace muster
