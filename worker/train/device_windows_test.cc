#include "worker/train/device_windows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "ATen/Functions.h"
#include "c10/core/StreamGuard.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using Point = FakeStreams::Point;

FakeStreams& Streams() { return FakeDevice(); }

// Whether `first` ends before `second` begins.
bool IsBefore(const Point& first, const Point& second) {
  // On one stream the numbers decide. On two: what the second operation's stream waits for, which
  // may be more than it waited for at that time. Tests ask before they make it wait for more.
  if (first.stream == second.stream) return first.number < second.number;
  const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, Streams().device(), second.stream));
  return Streams().IsBefore(first);
}

class DeviceWindowsTest : public testing::Test {
 protected:
  static constexpr int64_t kBytes = 16;

  DeviceWindowsTest() { LimitFakeDevice(-1); }
  ~DeviceWindowsTest() override {
    Streams().Break(false);
    LimitFakeDevice(-1);
  }

  const c10::Stream program_ = Streams().getNewStream(Streams().device(), 0);
  const c10::StreamGuard guard_{program_};
  static at::Tensor Room() {
    return at::empty({kBytes}, at::TensorOptions().dtype(at::kByte).device(Streams().device()));
  }
  static char* DataOf(const DeviceWindows::Window& window) {
    return static_cast<char*>(window.tensor().data_ptr());
  }
  std::unique_ptr<DeviceWindows::Window> Fetch(const at::Tensor& host) {
    return windows_.Fetch(Room(), host);
  }

  DeviceWindows windows_{Streams().device()};
  const at::Tensor first_ = at::full({kBytes}, 'a', at::kByte);
  const at::Tensor second_ = at::full({kBytes}, 'b', at::kByte);
};

TEST_F(DeviceWindowsTest, Window_ComesBeforeItsUseAndGoesAfterIt) {
  const int waits = Streams().host_waits();
  windows_.Follow();
  auto window = Fetch(first_);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_FALSE(Streams().IsBefore(in)) << "the program goes on";
  windows_.Use(*window);
  EXPECT_TRUE(Streams().IsBefore(in));
  EXPECT_EQ(std::string(DataOf(*window), kBytes), std::string(kBytes, 'a'));
  std::memset(DataOf(*window), 'c', kBytes);
  const Point update = Streams().Operate();
  const auto ticket = windows_.Return(*window, first_);
  const Point out = CopiesFromFakeDevice().back();
  EXPECT_TRUE(first_.eq('c').all().item<bool>());
  EXPECT_TRUE(IsBefore(update, out));
  EXPECT_FALSE(Streams().IsBefore(out));
  EXPECT_EQ(Streams().host_waits(), waits) << "the device waits, not the host";
  window.reset();
  EXPECT_TRUE(Streams().IsBefore(out)) << "its memory goes to what the stream does next";
  EXPECT_EQ(MemoryOfFakeDevice().now, 0);
  EXPECT_EQ(Streams().host_waits(), waits);
  ticket->Wait();
  EXPECT_EQ(Streams().host_waits(), waits + 1);
}

TEST_F(DeviceWindowsTest, NextWindow_ComesWhileOneIsUpdatedAndOneGoes) {
  windows_.Follow();
  auto first = Fetch(first_);
  windows_.Use(*first);
  const Point update = Streams().Operate();
  windows_.Return(*first, first_);
  const Point out = CopiesFromFakeDevice().back();
  auto second = Fetch(second_);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_TRUE(IsBefore(update, in)) << "its memory may be what the stream has used";
  EXPECT_FALSE(IsBefore(out, in));
  windows_.Use(*second);
  const Point next = Streams().Operate();
  EXPECT_FALSE(IsBefore(out, next));
  EXPECT_TRUE(IsBefore(in, next));
}

TEST_F(DeviceWindowsTest, WindowOfTheNextStep_ComesAfterItHasGone) {
  windows_.Follow();
  auto window = Fetch(first_);
  windows_.Use(*window);
  windows_.Return(*window, first_);
  const Point out = CopiesFromFakeDevice().back();
  // A program that steps on another stream, which is not ordered with the first.
  const c10::StreamGuard other(Streams().getNewStream(Streams().device(), 0));
  windows_.Follow();
  auto again = Fetch(first_);
  EXPECT_TRUE(IsBefore(out, CopiesToFakeDevice().back()));
}

TEST_F(DeviceWindowsTest, WindowWithoutContents_IsNotCopied) {
  const size_t copies = CopiesToFakeDevice().size();
  auto window = Fetch(at::Tensor());
  EXPECT_EQ(CopiesToFakeDevice().size(), copies);
  windows_.Use(*window);
  std::memset(DataOf(*window), 'd', kBytes);
  windows_.Return(*window, first_);
  EXPECT_TRUE(first_.eq('d').all().item<bool>());
}

TEST_F(DeviceWindowsTest, Wait_WaitsOnceForWhatIsUnderWay) {
  windows_.Wait();
  const int waits = Streams().host_waits();
  auto window = Fetch(first_);
  windows_.Return(*window, first_);
  windows_.Wait();
  EXPECT_GT(Streams().host_waits(), waits);
  const int waited = Streams().host_waits();
  windows_.Wait();
  EXPECT_EQ(Streams().host_waits(), waited);
}

TEST_F(DeviceWindowsTest, WindowThatFollowsATicket_ComesAfterIt) {
  auto first = Fetch(at::Tensor()), second = Fetch(at::Tensor());
  const auto ticket = windows_.Return(*first, first_);
  const Point out = CopiesFromFakeDevice().back();
  windows_.Return(*second, second_);
  const Point later = CopiesFromFakeDevice().back();
  windows_.Follow(*ticket);
  auto again = Fetch(first_);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_TRUE(IsBefore(out, in));
  EXPECT_FALSE(IsBefore(later, in));
}

TEST_F(DeviceWindowsTest, WindowThatOutlivesTheRest_StillOrdersItsMemory) {
  auto windows = std::make_unique<DeviceWindows>(Streams().device());
  auto window = windows->Fetch(Room(), first_);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_EQ(window->stream(), windows->Current());
  windows.reset();
  {
    const c10::StreamGuard other(Streams().getNewStream(Streams().device(), 0));
    window.reset();
    EXPECT_FALSE(Streams().IsBefore(in));
  }
  EXPECT_TRUE(Streams().IsBefore(in)) << "the stream that its memory is from";
}

TEST_F(DeviceWindowsTest, DeviceThatFails_IsAnErrorAndEndsQuietly) {
  auto window = Fetch(first_);
  Streams().Break(true);
  EXPECT_THAT(ErrorOf([&] { windows_.Use(*window); }), HasSubstr("the device is broken"));
  window.reset();
}

}  // namespace
}  // namespace muster
