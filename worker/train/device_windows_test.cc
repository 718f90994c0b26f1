#include "worker/train/device_windows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "c10/core/StreamGuard.h"
#include "c10/util/Exception.h"
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
  // Of one stream: numbers say so. Of two: what the stream of the second one waits for, which may
  // be more than what it waited for then. Tests ask before they make it wait for more.
  if (first.stream == second.stream) return first.number < second.number;
  const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, Streams().device(), second.stream));
  return Streams().IsBefore(first);
}

class DeviceWindowsTest : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 16;

  DeviceWindowsTest() { LimitFakeDevice(-1); }
  ~DeviceWindowsTest() override {
    Streams().Break(false);
    LimitFakeDevice(-1);
  }

  const c10::Stream program_ = Streams().getNewStream(Streams().device(), 0);
  const c10::StreamGuard guard_{program_};
  DeviceWindows windows_{Streams().device()};
  std::vector<char> first_ = std::vector<char>(kBytes, 'a');
  std::vector<char> second_ = std::vector<char>(kBytes, 'b');
};

TEST_F(DeviceWindowsTest, Window_ComesBeforeItsUseAndGoesAfterIt) {
  const int waits = Streams().host_waits();
  windows_.Begin();
  auto window = windows_.Fetch(first_.data(), kBytes);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_FALSE(Streams().IsBefore(in)) << "the program goes on";
  windows_.Use(*window);
  EXPECT_TRUE(Streams().IsBefore(in));
  EXPECT_EQ(std::memcmp(window->data(), first_.data(), kBytes), 0);
  std::memset(window->data(), 'c', kBytes);
  const Point update = Streams().Operate();
  const auto ticket = windows_.Return(*window, first_.data());
  const Point out = CopiesFromFakeDevice().back();
  EXPECT_EQ(first_, std::vector<char>(kBytes, 'c'));
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
  windows_.Begin();
  auto first = windows_.Fetch(first_.data(), kBytes);
  windows_.Use(*first);
  const Point update = Streams().Operate();
  windows_.Return(*first, first_.data());
  const Point out = CopiesFromFakeDevice().back();
  auto second = windows_.Fetch(second_.data(), kBytes);
  const Point in = CopiesToFakeDevice().back();
  EXPECT_TRUE(IsBefore(update, in)) << "its memory may be what the stream has used";
  EXPECT_FALSE(IsBefore(out, in));
  windows_.Use(*second);
  const Point next = Streams().Operate();
  EXPECT_FALSE(IsBefore(out, next));
  EXPECT_TRUE(IsBefore(in, next));
}

TEST_F(DeviceWindowsTest, WindowOfTheNextStep_ComesAfterItHasGone) {
  windows_.Begin();
  auto window = windows_.Fetch(first_.data(), kBytes);
  windows_.Use(*window);
  windows_.Return(*window, first_.data());
  const Point out = CopiesFromFakeDevice().back();
  // A program that steps on another stream, which knows nothing of the first.
  const c10::StreamGuard other(Streams().getNewStream(Streams().device(), 0));
  windows_.Begin();
  auto again = windows_.Fetch(first_.data(), kBytes);
  EXPECT_TRUE(IsBefore(out, CopiesToFakeDevice().back()));
}

TEST_F(DeviceWindowsTest, WindowWithoutContents_IsNotCopied) {
  const size_t copies = CopiesToFakeDevice().size();
  auto window = windows_.Fetch(nullptr, kBytes);
  EXPECT_EQ(CopiesToFakeDevice().size(), copies);
  windows_.Use(*window);
  std::memset(window->data(), 'd', kBytes);
  windows_.Return(*window, first_.data());
  EXPECT_EQ(first_, std::vector<char>(kBytes, 'd'));
}

TEST_F(DeviceWindowsTest, Wait_WaitsOnceForWhatIsUnderWay) {
  windows_.Wait();
  const int waits = Streams().host_waits();
  auto window = windows_.Fetch(first_.data(), kBytes);
  windows_.Return(*window, first_.data());
  windows_.Wait();
  EXPECT_GT(Streams().host_waits(), waits);
  const int waited = Streams().host_waits();
  windows_.Wait();
  EXPECT_EQ(Streams().host_waits(), waited);
}

TEST_F(DeviceWindowsTest, NoRoom_IsAnErrorWithNothingQueued) {
  LimitFakeDevice(kBytes);
  auto window = windows_.Fetch(first_.data(), kBytes);
  const size_t copies = CopiesToFakeDevice().size();
  EXPECT_THROW(windows_.Fetch(second_.data(), kBytes), c10::OutOfMemoryError);
  EXPECT_EQ(CopiesToFakeDevice().size(), copies);
  window.reset();
  windows_.Fetch(second_.data(), kBytes);
}

TEST_F(DeviceWindowsTest, DeviceThatFails_IsAnErrorAndEndsQuietly) {
  auto window = windows_.Fetch(first_.data(), kBytes);
  Streams().Break(true);
  EXPECT_THAT(ErrorOf([&] { windows_.Use(*window); }), HasSubstr("the device is broken"));
  window.reset();
}

}  // namespace
}  // namespace muster
