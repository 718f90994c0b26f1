#include "worker/models/per_device.h"

#include <gtest/gtest.h>

#include <vector>

#include "ATen/ops/ones.h"
#include "worker/checkpoint/fake_device.h"

namespace muster::models {
namespace {

TEST(PerDevice, EachDevice_GetsOneCopy) {
  int moves = 0;
  const auto move = [&moves](const at::Tensor& tensor, const at::Device& device) {
    ++moves;
    return MovedTo(tensor, device);
  };
  const at::Tensor mask = at::ones({3});
  PerDevice masks(mask, at::kCPU, move);
  EXPECT_TRUE(masks.On(at::kCPU).is_same(mask));
  EXPECT_EQ(moves, 0);
  const at::Tensor& there = masks.On(at::kMeta);
  EXPECT_TRUE(there.is_meta());
  EXPECT_TRUE(masks.On(at::kMeta).is_same(there));
  EXPECT_EQ(moves, 1);
}

TEST(MovedTo, TensorThatIsThereOrUndefined_IsItself) {
  const at::Tensor tensor = at::ones({3});
  EXPECT_TRUE(MovedTo(tensor, at::kCPU).is_same(tensor));
  EXPECT_FALSE(MovedTo(at::Tensor(), at::kMeta).defined());
}

// For example for a layer that the program has put on the CPU, in a model on a GPU.
TEST(MovedTo, TensorOfADevice_IsOnTheHostWhenTheCallReturns) {
  const std::vector<float> values = {1, 2, 3};
  const at::Tensor there = OnFakeDevice(values);
  const int waits = FakeDevice().host_waits();
  const at::Tensor here = MovedTo(there, at::kCPU);
  EXPECT_EQ(FakeDevice().host_waits(), waits + 1);
  EXPECT_EQ(ValuesOf(here), values);
}

}  // namespace
}  // namespace muster::models
