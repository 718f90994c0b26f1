#include "worker/parallel/paged_storage.h"

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "ATen/EmptyTensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/add.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/batch_norm.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/ones.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Six numbers that are absent until they are used.
class Numbers : public Page {
 public:
  Numbers() : flat(at::arange(6, at::kFloat)), registration(flat, this) { FreeMemory(flat); }

  void Require(bool write, const char* op) override {
    uses.push_back(std::string(op) + (write ? " writes" : ""));
    if (flat.storage().data() != nullptr) return;
    AllocateMemory(flat);
    at::Tensor values = at::arange(6, at::kFloat);
    flat.copy_(values);
    ++loads;
  }

  at::Tensor flat;
  const PageRegistration registration;
  std::vector<std::string> uses;
  int loads = 0;
};

TEST(PagedStorage, Operator_FindsTheContents) {
  Numbers page;
  const at::Tensor matrix = PagedView(page.flat, {2, 3}, {3, 1}, 0);
  EXPECT_TRUE(at::equal(matrix.sum(1), at::arange(6, at::kFloat).view({2, 3}).sum(1)));
  EXPECT_EQ(page.loads, 1);
  FreeMemory(page.flat);
  // In a list, as an optional argument and through views of views.
  EXPECT_EQ(at::cat({matrix, matrix}).numel(), 12);
  FreeMemory(page.flat);
  const at::Tensor bias = PagedView(page.flat, {2}, {1}, 4);
  EXPECT_TRUE(at::equal(at::linear(at::ones({1, 3}), at::ones({2, 3}), bias),
                        at::arange(7, 9, at::kFloat).view({1, 2})));
  FreeMemory(page.flat);
  EXPECT_EQ(matrix.t().detach()[2][1].item<float>(), 5);
  EXPECT_EQ(page.loads, 4);
}

TEST(PagedStorage, View_AsksForNothing) {
  Numbers page;
  const at::Tensor matrix = PagedView(page.flat, {2, 3}, {3, 1}, 0);
  const at::Tensor view = matrix.t().view({3, 2}).detach().unsqueeze(0);
  EXPECT_EQ(view.numel(), 6);
  EXPECT_THAT(page.uses, IsEmpty());
}

TEST(PagedStorage, TensorThatBecomesAPagedOne_AsksForNothing) {
  Numbers page;
  const at::Tensor weight = at::ones({2, 3});
  weight.set_data(PagedView(page.flat, {2, 3}, {3, 1}, 0));
  EXPECT_THAT(page.uses, IsEmpty());
  EXPECT_EQ(weight.sum().item<float>(), 15);
}

TEST(PagedStorage, DataPointerOfContentsThatAreAway_IsAnError) {
  Numbers page;
  const at::Tensor row = PagedView(page.flat, {6}, {1}, 0);
  EXPECT_THAT(ErrorOf([&] { row.data_ptr<float>(); }), HasSubstr("not allocated yet"));
}

TEST(PagedStorage, Write_IsSaid) {
  Numbers page;
  const at::Tensor row = PagedView(page.flat, {6}, {1}, 0);
  row.zero_();
  EXPECT_THAT(page.uses, ElementsAre("aten::zero_ writes"));
  page.uses.clear();
  at::Tensor result = at::ones({6});
  at::add_out(result, row, row);
  EXPECT_THAT(page.uses, Not(IsEmpty()));
  for (const std::string& use : page.uses) EXPECT_THAT(use, Not(HasSubstr("writes")));
}

// No schema declares these writes.
TEST(PagedStorage, WriteOfRunningStatistics_IsSaid) {
  Numbers page;
  const at::Tensor mean = PagedView(page.flat, {3}, {1}, 0);
  const at::Tensor variance = PagedView(page.flat, {3}, {1}, 3);
  for (const bool training : {false, true}) {
    page.uses.clear();
    at::batch_norm(at::ones({2, 3}), {}, {}, mean, variance, training, 0.1, 1e-5, false);
    ASSERT_THAT(page.uses, Not(IsEmpty()));
    EXPECT_EQ(page.uses[0], training ? "aten::batch_norm writes" : "aten::batch_norm");
  }
}

TEST(PagedStorage, ContentsFreedBetweenForwardAndBackward_ComeBackForTheSavedTensor) {
  Numbers page;
  at::Tensor weight = at::ones({2, 3}).requires_grad_();
  weight.set_data(PagedView(page.flat, {2, 3}, {3, 1}, 0));
  at::Tensor x = at::ones({1, 3}).requires_grad_();
  const at::Tensor out = at::linear(x, weight).sum();
  FreeMemory(page.flat);
  out.backward();
  // set_data() reads it as well.
  EXPECT_GE(page.loads, 2);
  EXPECT_TRUE(at::equal(x.grad(), at::arange(6, at::kFloat).view({2, 3}).sum(0, true)));
  EXPECT_TRUE(at::equal(weight.grad(), at::ones({2, 3})));
  // The result of an operator on a paged tensor is an ordinary tensor.
  FreeMemory(page.flat);
  page.uses.clear();
  weight.grad().add_(1);
  x.grad().add_(1);
  EXPECT_THAT(page.uses, IsEmpty());
}

TEST(PagedStorage, PagesOfOneOperator_StayPinnedUntilItHasEnded) {
  Numbers first, second;
  const at::Tensor a = PagedView(first.flat, {6}, {1}, 0), b = PagedView(second.flat, {6}, {1}, 0);
  struct Watch : Numbers {
    void Require(bool write, const char* op) override {
      Numbers::Require(write, op);
      others_pins = other->pins();
    }
    Numbers* other = nullptr;
    int others_pins = 0;
  } third;
  third.other = &first;
  const at::Tensor c = PagedView(third.flat, {6}, {1}, 0);
  EXPECT_EQ(at::cat({a, b, c}).numel(), 18);
  EXPECT_EQ(third.others_pins, 1);
  EXPECT_EQ(first.pins(), 0);
}

// The change concerns the page itself, or another one that the operator takes as well.
TEST(PagedStorage, ContentsThatComingChangesWhatIsAllowed_AreAskedAgain) {
  struct Ended : Numbers {
    void Allow(const at::Tensor&, bool, const char* op) override {
      TORCH_CHECK(!*ended, op, " comes too late");
    }
    const bool* ended = nullptr;
  } ending;
  struct Ends : Numbers {
    void Require(bool write, const char* op) override {
      Numbers::Require(write, op);
      ended = true;
    }
    bool ended = false;
  } other;
  ending.ended = &other.ended;
  const at::Tensor a = PagedView(ending.flat, {6}, {1}, 0), b = PagedView(other.flat, {6}, {1}, 0);
  EXPECT_EQ(a.sum().item<float>(), 15);
  EXPECT_THAT(ErrorOf([&] { at::add(a, b); }), HasSubstr("comes too late"));
  EXPECT_EQ(ending.pins() + other.pins(), 0);
}

// Devices of which each thread has a current one, like GPUs; during the test they replace the CPU,
// which has none.
class SeveralDevices : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CPU> {
 public:
  SeveralDevices() : before_(Registry().exchange(this)) {}
  ~SeveralDevices() { Registry() = before_; }
  c10::Device getDevice() const override { return c10::Device(c10::kCPU, current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(c10::kCPU, std::exchange(current, device.index()));
  }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }

  static thread_local c10::DeviceIndex current;

 private:
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& Registry() {
    return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CPU)];
  }
  const c10::impl::DeviceGuardImplInterface* const before_;
};
thread_local c10::DeviceIndex SeveralDevices::current = 0;

TEST(PagedStorage, Memory_IsOfTheTensorsDeviceOnAThreadThatHasAnother) {
  class Devices : public c10::Allocator {
   public:
    c10::DataPtr allocate(size_t bytes) override {
      given.push_back(SeveralDevices::current);
      c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
      memory.unsafe_set_device(c10::Device(c10::kCPU, 0));
      return memory;
    }
    void copy_data(void* to, const void* from, size_t bytes) const override {
      default_copy_data(to, from, bytes);
    }
    std::vector<c10::DeviceIndex> given;
  } allocator;
  const at::Tensor flat = at::detail::empty_generic(
      {4}, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), at::kFloat, std::nullopt);
  FreeMemory(flat);
  allocator.given.clear();
  const SeveralDevices devices;
  SeveralDevices::current = 5;
  AllocateMemory(flat);
  EXPECT_THAT(allocator.given, ElementsAre(0));
  EXPECT_EQ(SeveralDevices::current, 5);
}

TEST(PagedStorage, PageThatIsGone_IsAnError) {
  at::Tensor left;
  {
    Numbers page;
    left = PagedView(page.flat, {6}, {1}, 0);
  }
  EXPECT_THAT(ErrorOf([&] { left.sum(); }), HasSubstr("after what holds its values is gone"));
}

}  // namespace
}  // namespace muster
