#include "worker/parallel/memory_order.h"

#include <gtest/gtest.h>

#include <optional>

#include "ATen/core/Tensor.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "c10/util/Exception.h"
#include "worker/collective/fake_streams.h"

namespace muster {
namespace {

using Point = FakeStreams::Point;

FakeStreams& Streams() { return FakeStreams::Install(c10::DeviceType::CPU); }

class MemoryOrderTest : public testing::Test {
 protected:
  MemoryOrderTest() { order_.Begin(); }

  static Point OperateOn(const c10::Stream& stream) {
    const c10::StreamGuard on(stream);
    return Streams().Operate();
  }
  // Whether `point` ends before the next operation on `stream`.
  static bool IsBefore(const Point& point, const c10::Stream& stream) {
    const c10::StreamGuard on(stream);
    return Streams().IsBefore(point);
  }
  void UseOn(const c10::Stream& stream) {
    const c10::StreamGuard on(stream);
    order_.Use();
  }

  const c10::Stream own_ = Streams().getNewStream(Streams().device(), 0);
  const c10::Stream other_ = Streams().getNewStream(Streams().device(), 0);
  const c10::Stream third_ = Streams().getNewStream(Streams().device(), 0);
  const c10::StreamGuard guard_{own_};
  MemoryOrder order_{Streams().device()};
};

TEST_F(MemoryOrderTest, UseByAnotherStream_ComesAfterWhatFillsTheMemory) {
  const Point fill = OperateOn(own_);
  EXPECT_FALSE(IsBefore(fill, other_));
  UseOn(other_);
  EXPECT_TRUE(IsBefore(fill, other_));
}

TEST_F(MemoryOrderTest, LastOperation_ComesAfterAllUses_AndTheCallersStreamAfterIt) {
  UseOn(other_);
  const Point use = OperateOn(other_);
  EXPECT_FALSE(IsBefore(use, own_));
  std::optional<Point> last;
  {
    const c10::StreamGuard on(third_);
    order_.End([&] {
      EXPECT_EQ(Streams().Current(), own_);
      EXPECT_TRUE(Streams().IsBefore(use));
      last = Streams().Operate();
    });
    EXPECT_EQ(Streams().Current(), third_);
    EXPECT_TRUE(Streams().IsBefore(*last));
  }
  EXPECT_FALSE(IsBefore(*last, other_)) << "it has no more to do with the memory";
}

TEST_F(MemoryOrderTest, Copy_ComesBetweenTheUsesBeforeAndAfterIt) {
  UseOn(other_);
  const Point first = OperateOn(own_);
  const Point second = OperateOn(other_);
  std::optional<Point> copy;
  {
    const c10::StreamGuard on(third_);
    order_.Copy([&] {
      EXPECT_EQ(Streams().Current(), third_);
      EXPECT_TRUE(Streams().IsBefore(first));
      EXPECT_TRUE(Streams().IsBefore(second));
      copy = Streams().Operate();
    });
  }
  EXPECT_TRUE(IsBefore(*copy, own_));
  EXPECT_TRUE(IsBefore(*copy, other_));
}

TEST_F(MemoryOrderTest, LastOperationThatThrows_EndsNothing) {
  UseOn(other_);
  EXPECT_THROW(order_.End([] { TORCH_CHECK(false, "the disk is full"); }), c10::Error);
  const Point use = OperateOn(other_);
  EXPECT_FALSE(IsBefore(use, own_));
  order_.End([&] { EXPECT_TRUE(Streams().IsBefore(use)); });
}

TEST_F(MemoryOrderTest, MemoryThatComesAgain_HasTheStreamItIsTakenOn) {
  UseOn(other_);
  order_.End([] {});
  const c10::StreamGuard on(third_);
  order_.Begin();
  const Point use = OperateOn(other_);
  order_.End([&] {
    EXPECT_EQ(Streams().Current(), third_);
    EXPECT_FALSE(Streams().IsBefore(use)) << "of somebody else's memory";
  });
}

TEST_F(MemoryOrderTest, Host_WaitsForNothing) {
  const int waits = Streams().host_waits();
  UseOn(other_);
  order_.Copy([] {});
  order_.End([] {});
  EXPECT_EQ(Streams().host_waits(), waits);
}

}  // namespace
}  // namespace muster
