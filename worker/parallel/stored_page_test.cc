#include "worker/parallel/stored_page.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/memory_parts.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/host_parts.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kSize = 4;

// Records which places were written.
class Store : public MemoryParts {
 public:
  void Write(uint64_t place, const void* from, uint64_t bytes) override {
    MemoryParts::Write(place, from, bytes);
    written.push_back(place / bytes);
  }

  std::vector<uint64_t> written;  // numbers of pages
};

class StoredPageTest : public testing::Test {
 protected:
  // Adds page number i with values i, and a tensor of it.
  void Add() {
    const auto number = static_cast<int64_t>(pages_.size());
    at::Tensor flat = at::full({kSize}, number, at::kFloat);
    const uint64_t place = store_.Reserve(flat.nbytes());
    tensors_.push_back(PagedView(flat, {kSize}, {1}, 0));
    pages_.push_back(std::make_shared<StoredPage>(std::move(flat), store_, place, among_,
                                                  "page " + std::to_string(number)));
    among_.Came(pages_.back());
  }
  std::vector<int> Present() const {
    std::vector<int> present;
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (pages_[i]->present()) present.push_back(static_cast<int>(i));
    }
    return present;
  }

  Store store_;
  StoredPages among_;
  std::vector<std::shared_ptr<StoredPage>> pages_;
  std::vector<at::Tensor> tensors_;
};

TEST_F(StoredPageTest, Operators_FindTheirPages_TheNewestTwoStay) {
  for (int i = 0; i < 4; ++i) Add();
  EXPECT_THAT(Present(), ElementsAre(2, 3));
  EXPECT_EQ(tensors_[0].sum().item<float>(), 0);
  EXPECT_EQ(tensors_[1].sum().item<float>(), kSize);
  EXPECT_THAT(Present(), ElementsAre(0, 1));
  tensors_[0].add_(7);
  EXPECT_EQ(tensors_[3].sum().item<float>(), 3 * kSize);
  EXPECT_EQ(tensors_[2].sum().item<float>(), 2 * kSize);
  EXPECT_THAT(Present(), ElementsAre(2, 3));
  EXPECT_EQ(tensors_[0].sum().item<float>(), 7 * kSize);
}

TEST_F(StoredPageTest, WhatHasNotChanged_IsNotWritten) {
  for (int i = 0; i < 4; ++i) Add();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i);
  EXPECT_THAT(store_.written, ElementsAre(0, 1, 2, 3));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i);
  tensors_[1].zero_();
  for (int i = 2; i < 4; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i);
  EXPECT_THAT(store_.written, ElementsAre(0, 1, 2, 3, 1));
}

TEST_F(StoredPageTest, WhatNoTensorHas_IsNotWritten) {
  for (int i = 0; i < 2; ++i) Add();
  tensors_[0] = at::Tensor();
  EXPECT_FALSE(pages_[0]->used());
  for (int i = 2; i < 4; ++i) Add();
  EXPECT_THAT(store_.written, ElementsAre(1));
  EXPECT_THAT(Present(), ElementsAre(2, 3));
  // A destroyed page does not count among those that stay.
  tensors_[3] = at::Tensor();
  pages_.pop_back();
  EXPECT_EQ(tensors_[1].max().item<float>(), 1);
  EXPECT_THAT(Present(), ElementsAre(1, 2));
}

TEST_F(StoredPageTest, OperatorOfAList_HasAllOfItsPages_OneAfterTheOtherByForEachPage) {
  for (int i = 0; i < 5; ++i) Add();
  EXPECT_EQ(at::cat(tensors_).sum().item<float>(), 10 * kSize);
  EXPECT_EQ(Present().size(), 5u);
  EXPECT_EQ(tensors_[0].sum().item<float>(), 0);  // it is present, and nothing is read
  Add();
  EXPECT_THAT(Present(), ElementsAre(2, 5)) << "the last that had to come";
  size_t most = 0;
  ForEachPage(tensors_, [&](const std::vector<at::Tensor>& group, const auto&) {
    at::_foreach_add_(group, 1);
    most = std::max(most, Present().size());
  });
  EXPECT_EQ(most, 2u);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i + 1);
}

TEST_F(StoredPageTest, FusedOptimizer_LeavesGradientsAsTheyAre) {
  for (int i = 0; i < 3; ++i) Add();  // the gradients
  store_.written.clear();
  const auto step = [&](const std::optional<at::Tensor>& scale) {
    for (const at::Tensor& grad : tensors_) {
      std::vector<at::Tensor> parameters = {at::ones({kSize})};
      at::_fused_sgd_(parameters, {grad}, {}, 0, 0, 0.5, 0, false, false, false, scale);
      EXPECT_TRUE(at::equal(parameters[0], at::ones({kSize}).sub(grad, 0.5)));
    }
  };
  step(std::nullopt);
  EXPECT_THAT(store_.written, ElementsAre(1, 2)) << "as they came, and no more";
  store_.written.clear();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i);
  EXPECT_THAT(store_.written, IsEmpty());
  // A scale is removed in place.
  std::vector<at::Tensor> parameters = {at::ones({kSize})};
  at::_fused_sgd_(parameters, {tensors_[0]}, {}, 0, 0, 0.5, 0, false, false, false,
                  at::full({}, 2.0, at::kFloat));
  for (int i = 1; i < 3; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i);
  EXPECT_THAT(store_.written, ElementsAre(0));
}

TEST_F(StoredPageTest, StoreThatFails_ThrowsNamingThePage_AndLosesNothing) {
  for (int i = 0; i < 2; ++i) Add();
  store_.broken = store_.full = true;
  EXPECT_THAT(ErrorOf([&] { Add(); }),
              AllOf(HasSubstr("the disk is full"), HasSubstr("while writing page 0")));
  EXPECT_EQ(Present().size(), 3u);
  store_.broken = store_.full = false;
  Add();
  EXPECT_THAT(Present(), ElementsAre(2, 3));
  store_.broken = store_.full = true;
  EXPECT_THAT(ErrorOf([&] { tensors_[0].sum(); }),
              AllOf(HasSubstr("the disk is broken"), HasSubstr("while reading page 0")));
  store_.broken = store_.full = false;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(tensors_[i].max().item<float>(), i);
}

TEST_F(StoredPageTest, CopyTo_LeavesThePageWhereItIs) {
  for (int i = 0; i < 3; ++i) Add();
  for (const at::ScalarType type : {at::kFloat, at::kHalf}) {
    for (int i = 0; i < 3; ++i) {
      at::Tensor to = at::zeros({kSize}, type);
      pages_[i]->CopyTo(to);
      EXPECT_TRUE(at::equal(to, at::full({kSize}, i, type)));
    }
  }
  EXPECT_THAT(Present(), ElementsAre(1, 2));
}

// Pages of a device, whose places are in the host's memory.
class StoredPageOfADevice : public testing::Test {
 protected:
  static constexpr int64_t kBytes = kSize * static_cast<int64_t>(sizeof(float));
  using Point = FakeStreams::Point;

  StoredPageOfADevice() { LimitFakeDevice(-1); }
  ~StoredPageOfADevice() override { LimitFakeDevice(-1); }

  void Add() {
    const size_t number = pages_.size();
    const at::Tensor flat =
        at::empty({kSize}, at::TensorOptions().dtype(at::kFloat).device(FakeDevice().device()));
    SetValues(flat, static_cast<float>(number));
    const uint64_t place = store_.Reserve(kBytes);
    tensors_.push_back(PagedView(flat, {kSize}, {1}, 0));
    pages_.push_back(std::make_shared<StoredPage>(flat, store_, place, among_,
                                                  "page " + std::to_string(number)));
    among_.Came(pages_.back());
  }
  // An operator of the program, then the copy, whose point it returns.
  Point WriteOn(const c10::Stream& stream, size_t i, float value) {
    const c10::StreamGuard on(stream);
    tensors_[i].copy_(at::full({kSize}, value), /*non_blocking=*/true);
    return CopiesToFakeDevice().back();
  }
  Point ReadOn(const c10::Stream& stream, size_t i, float value) {
    const c10::StreamGuard on(stream);
    const at::Tensor read = at::zeros({kSize});
    read.copy_(tensors_[i], /*non_blocking=*/true);
    EXPECT_TRUE(at::equal(read, at::full({kSize}, value))) << i;
    return CopiesFromFakeDevice().back();
  }
  static bool IsBefore(const Point& point, const c10::Stream& stream) {
    const c10::StreamGuard on(stream);
    return FakeDevice().IsBefore(point);
  }

  const c10::Stream program_ = FakeDevice().getNewStream(FakeDevice().device(), 0);
  const c10::Stream other_ = FakeDevice().getNewStream(FakeDevice().device(), 0);
  const c10::StreamGuard guard_{program_};
  const HostPinning pinning_{.pin = [](void*, size_t) { return true; }, .unpin = [](void*) {}};
  HostParts store_{FakeDevice().device(), 1, &pinning_};
  StoredPages among_;
  std::vector<std::shared_ptr<StoredPage>> pages_;
  std::vector<at::Tensor> tensors_;
};

TEST_F(StoredPageOfADevice, Operators_FindTheirPages_AndTheHostWaitsForNone) {
  const int waits = FakeDevice().host_waits();
  const int64_t before = MemoryOfFakeDevice().now;
  for (int i = 0; i < 5; ++i) Add();
  EXPECT_EQ(MemoryOfFakeDevice().now - before, 2 * kBytes);
  for (size_t i = 0; i < 5; ++i) ReadOn(program_, i, static_cast<float>(i));
  for (size_t i = 0; i < 5; ++i) WriteOn(program_, i, static_cast<float>(10 + i));
  for (size_t i = 0; i < 5; ++i) ReadOn(program_, i, static_cast<float>(10 + i));
  EXPECT_EQ(MemoryOfFakeDevice().now - before, 2 * kBytes);
  for (const auto& page : pages_) EXPECT_TRUE(page->Free());
  EXPECT_EQ(MemoryOfFakeDevice().now, before);
  EXPECT_EQ(FakeDevice().host_waits(), waits);
}

TEST_F(StoredPageOfADevice, WhatHasNotChanged_IsNotCopiedBack) {
  for (int i = 0; i < 3; ++i) Add();
  for (const auto& page : pages_) page->Free();
  ReadOn(program_, 0, 0);
  const size_t copies = CopiesFromFakeDevice().size();
  pages_[0]->Free();
  EXPECT_EQ(CopiesFromFakeDevice().size(), copies);
}

TEST_F(StoredPageOfADevice, MemoryThatIsFreed_HasBeenUsedByAllStreams) {
  Add();
  const Point write = WriteOn(other_, 0, 7);
  EXPECT_FALSE(FakeDevice().IsBefore(write));
  pages_[0]->Free();
  EXPECT_TRUE(FakeDevice().IsBefore(write)) << "it goes to what this stream does next";
  ReadOn(program_, 0, 7);
}

TEST_F(StoredPageOfADevice, ContentsOfOneStream_AreThereForAnother) {
  Add();
  pages_[0]->Free();
  ReadOn(program_, 0, 0);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_FALSE(IsBefore(in, other_));
  ReadOn(other_, 0, 0);
  EXPECT_TRUE(IsBefore(in, other_));
}

TEST_F(StoredPageOfADevice, PageThatOneStreamGaveBack_IsReadByAnotherAfterwards) {
  Add();
  WriteOn(program_, 0, 3);
  pages_[0]->Free();
  const Point out = CopiesFromFakeDevice().back();
  EXPECT_FALSE(IsBefore(out, other_));
  ReadOn(other_, 0, 3);
  EXPECT_TRUE(IsBefore(out, other_));
}

TEST_F(StoredPageOfADevice, PageThatComesAgain_IsOfTheStreamThatAsksForIt) {
  Add();
  pages_[0]->Free();
  const Point write = WriteOn(other_, 0, 4);
  pages_[0]->Free();
  const Point out = CopiesFromFakeDevice().back();
  EXPECT_EQ(out.stream, other_.id()) << "the allocator gives its memory to what that does next";
  EXPECT_GT(out.number, write.number);
  EXPECT_TRUE(FakeDevice().IsBefore(out));
}

TEST_F(StoredPageOfADevice, CopyTo_OnAnotherStream_IsInOrderWithThePage) {
  const at::Tensor to =
      at::empty({kSize}, at::TensorOptions().dtype(at::kFloat).device(FakeDevice().device()));
  for (const bool present : {false, true}) {
    SCOPED_TRACE(present);
    Add();
    const size_t i = pages_.size() - 1;
    const Point write = WriteOn(program_, i, 5);
    if (!present) pages_[i]->Free();
    {
      const c10::StreamGuard on(other_);
      pages_[i]->CopyTo(to);
      EXPECT_TRUE(FakeDevice().IsBefore(write));
      EXPECT_EQ(ValuesOf(to), std::vector<float>(kSize, 5));
    }
    EXPECT_EQ(pages_[i]->present(), present);
    Point copy = {};
    {
      const c10::StreamGuard on(other_);
      copy = {other_.id(), FakeDevice().Operate().number - 1};
    }
    // Later writes of the program, or to the place, come after the copy.
    WriteOn(program_, i, 6);
    pages_[i]->Free();
    EXPECT_TRUE(FakeDevice().IsBefore(copy));
  }
}

TEST_F(StoredPageOfADevice, PageThatIsGone_LeavesItsMemoryInOrder) {
  Add();
  const Point use = ReadOn(other_, 0, 0);
  pages_.clear();
  EXPECT_TRUE(FakeDevice().IsBefore(use));
}

TEST_F(StoredPageOfADevice, DeviceWithoutRoom_IsNamed_AndNothingIsLost) {
  for (int i = 0; i < 3; ++i) Add();
  LimitFakeDevice(MemoryOfFakeDevice().now);
  EXPECT_THAT(ErrorOf([&] { ReadOn(program_, 0, 0); }),
              AllOf(HasSubstr("has no room"), HasSubstr("while reading page 0")));
  LimitFakeDevice(-1);
  for (size_t i = 0; i < 3; ++i) ReadOn(program_, i, static_cast<float>(i));
}

}  // namespace
}  // namespace muster
