#include "worker/collective/comm_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using Point = FakeStreams::Point;

// A device type for which LibTorch for CPUs implements nothing.
FakeStreams& Streams() { return FakeStreams::Install(c10::DeviceType::PrivateUse1); }
c10::Stream NewStream() { return Streams().getNewStream(Streams().device(), 0); }

// Whether `point` comes before the next operation on `stream`.
bool IsBefore(const Point& point, const c10::Stream& stream) {
  const c10::StreamGuard guard(stream);
  return Streams().IsBefore(point);
}

class CommStreamTest : public testing::Test {
 protected:
  // Each test has its own streams.
  const c10::Stream program_ = NewStream();
  const c10::StreamGuard guard_{program_};
  CommStream queue_{Streams().device()};
};

TEST_F(CommStreamTest, Body_RunsInItsCallersThreadOnTheStream) {
  const std::thread::id here = std::this_thread::get_id();
  bool ran = false;
  EXPECT_FALSE(queue_.IsCurrent());
  queue_.Submit([&] {
    ran = true;
    EXPECT_TRUE(queue_.IsCurrent());
    EXPECT_EQ(std::this_thread::get_id(), here);
    EXPECT_EQ(Streams().Current(), queue_.stream());
  });
  EXPECT_TRUE(ran);
  EXPECT_FALSE(queue_.IsCurrent());
  EXPECT_EQ(Streams().Current(), program_);
  EXPECT_NE(queue_.stream(), program_);
  EXPECT_TRUE(queue_.Suits(Streams().device()));
  EXPECT_FALSE(queue_.Suits(c10::Device(c10::DeviceType::CPU)));
}

TEST_F(CommStreamTest, Body_ComesAfterWhatWasQueuedAndBesideWhatComesThen) {
  const Point before = Streams().Operate();
  Point inside{};
  const CommQueue::Ticket ticket = queue_.Submit([&] {
    EXPECT_TRUE(Streams().IsBefore(before));
    inside = Streams().Operate();
  });
  const Point beside = Streams().Operate();
  EXPECT_FALSE(Streams().IsBefore(inside)) << "the device may do both at a time";
  EXPECT_FALSE(IsBefore(beside, queue_.stream()));
  queue_.Wait(ticket);
  EXPECT_TRUE(Streams().IsBefore(inside));
  EXPECT_FALSE(IsBefore(beside, queue_.stream())) << "the stream waits for nobody";
}

TEST_F(CommStreamTest, Wait_IsForItsWorkAndNotForWhatCameLater) {
  Point first{}, second{};
  const CommQueue::Ticket one = queue_.Submit([&] { first = Streams().Operate(); });
  const CommQueue::Ticket two = queue_.Submit([&] { second = Streams().Operate(); });
  queue_.Wait(one);
  EXPECT_TRUE(Streams().IsBefore(first));
  EXPECT_FALSE(Streams().IsBefore(second));
  EXPECT_TRUE(queue_.WaitQuietly(two));
  EXPECT_TRUE(Streams().IsBefore(second));
}

TEST_F(CommStreamTest, Wait_IsThatOfEachStream) {
  Point inside{};
  const CommQueue::Ticket ticket = queue_.Submit([&] { inside = Streams().Operate(); });
  queue_.Wait(ticket);
  const c10::Stream other = NewStream();
  const c10::StreamGuard guard(other);
  EXPECT_FALSE(Streams().IsBefore(inside));
  queue_.Wait(ticket);
  EXPECT_TRUE(Streams().IsBefore(inside));
}

TEST_F(CommStreamTest, StreamsThatHaveWaited_AreFollowedByTheNextBody) {
  const CommQueue::Ticket ticket = queue_.Submit([] {});
  const c10::Stream other = NewStream(), stranger = NewStream();
  Point of_other{}, of_stranger{};
  {
    const c10::StreamGuard guard(other);
    queue_.Wait(ticket);
    of_other = Streams().Operate();
  }
  {
    const c10::StreamGuard guard(stranger);
    of_stranger = Streams().Operate();
  }
  queue_.Submit([&] {
    EXPECT_TRUE(Streams().IsBefore(of_other)) << "it may use what the body before has made";
    EXPECT_FALSE(Streams().IsBefore(of_stranger));
  });
}

TEST_F(CommStreamTest, Drain_IsForAllOfIt) {
  Point inside{};
  queue_.Drain();
  queue_.Submit([] {});
  queue_.Submit([&] { inside = Streams().Operate(); });
  queue_.Drain();
  EXPECT_TRUE(Streams().IsBefore(inside));
}

TEST_F(CommStreamTest, Allocate_IsOnTheStreamAndOrderedWithTheCallerBothWays) {
  Point freed{}, made{};
  queue_.Submit([&] { freed = Streams().Operate(); });
  const Point used = Streams().Operate();
  queue_.Allocate([&] {
    EXPECT_EQ(Streams().Current(), queue_.stream());
    made = Streams().Operate();
    EXPECT_TRUE(Streams().IsBefore(used));
  });
  EXPECT_EQ(Streams().Current(), program_);
  EXPECT_TRUE(Streams().IsBefore(freed));
  EXPECT_TRUE(Streams().IsBefore(made));
  // In a body it is there already.
  queue_.Submit([&] {
    queue_.Allocate([&] { EXPECT_EQ(Streams().Current(), queue_.stream()); });
    EXPECT_TRUE(queue_.IsCurrent());
  });
  EXPECT_EQ(ErrorOf([&] { queue_.Drain(); }), "no error");
}

TEST_F(CommStreamTest, Host_NeverWaitsAndEventsGoWithTheirTickets) {
  const int waits = Streams().host_waits();
  const int events = Streams().events();
  {
    std::vector<CommQueue::Ticket> tickets;
    for (int i = 0; i < 10; ++i) tickets.push_back(queue_.Submit([] {}));
    for (const CommQueue::Ticket& ticket : tickets) queue_.Wait(ticket);
    queue_.Drain();
  }
  EXPECT_EQ(Streams().host_waits(), waits);
  EXPECT_LE(Streams().events(), events + 1) << "the last one stays for Drain()";
}

// comm_queue_test tests the rest of the behaviour.
TEST_F(CommStreamTest, WorkThatThrows_IsWaitedForAllTheSame) {
  Point inside{};
  const CommQueue::Ticket failed = queue_.Submit([&] {
    inside = Streams().Operate();
    TORCH_CHECK(false, "peer lost");
  });
  EXPECT_EQ(Streams().Current(), program_);
  EXPECT_EQ(ErrorOf([&] { queue_.Wait(failed); }), "peer lost");
  EXPECT_TRUE(Streams().IsBefore(inside)) << "what it had queued uses memory";
}

TEST_F(CommStreamTest, DeviceThatFails_IsAnErrorOfTheWork) {
  Streams().Break(true);
  bool ran = false;
  const CommQueue::Ticket ticket = queue_.Submit([&] { ran = true; });
  EXPECT_FALSE(queue_.WaitQuietly(ticket));
  EXPECT_FALSE(ran) << "it would not come after what was queued";
  Streams().Break(false);
  EXPECT_THAT(ErrorOf([&] { queue_.Drain(); }), HasSubstr("the device is broken"));
  // A later failure is thrown to the next caller.
  const CommQueue::Ticket good = queue_.Submit([] {});
  Streams().Break(true);
  EXPECT_FALSE(queue_.WaitQuietly(good));
  Streams().Break(false);
  EXPECT_THAT(ErrorOf([&] { queue_.Drain(); }), HasSubstr("the device is broken"));
}

TEST_F(CommStreamTest, WorkIsDone_WhenWhatItHoldsIsFree) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  std::optional<CommQueue::Ticket> ticket = queue_.Submit([held = std::move(held)] {});
  EXPECT_TRUE(watch.expired());
}

TEST_F(CommStreamTest, WorkThatSubmits_IsRefused) {
  const CommQueue::Ticket ticket = queue_.Submit([&] { queue_.Submit([] {}); });
  EXPECT_THAT(ErrorOf([&] { queue_.Wait(ticket); }), HasSubstr("work that submits work"));
}

TEST_F(CommStreamTest, BodiesOfTwoThreads_RunOneAtATime) {
  int inside = 0, ran = 0;
  const auto submit = [&] {
    for (int i = 0; i < 200; ++i) {
      queue_.Submit([&] {
        EXPECT_EQ(++inside, 1);
        ++ran;
        --inside;
      });
      queue_.Drain();
    }
  };
  std::thread other(submit);
  submit();
  other.join();
  EXPECT_EQ(ran, 400);
}

// Records where a collective is queued.
class PointComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  void AllReduce(at::Tensor& /*tensor*/, ReduceOp /*op*/) override { last = Streams().Operate(); }
  Point last{};
};

TEST_F(CommStreamTest, OrderedComm_KeepsOneOrderOnTheDevice) {
  LocalComm alone;
  auto points = std::make_unique<PointComm>(alone);
  PointComm& inner = *points;
  auto queue = std::make_shared<CommStream>(Streams().device());
  const std::unique_ptr<Comm> comm = MakeOrderedComm(std::move(points), queue);
  at::Tensor x = at::ones({2});
  queue->Submit([&] { comm->AllReduce(x, ReduceOp::kSum); });
  const Point in_body = inner.last;
  EXPECT_EQ(in_body.stream, queue->stream().id());
  EXPECT_FALSE(Streams().IsBefore(in_body));
  comm->AllReduce(x, ReduceOp::kSum);
  const Point of_program = inner.last;
  EXPECT_EQ(of_program.stream, program_.id());
  EXPECT_TRUE(Streams().IsBefore(in_body));
  queue->Submit([&] { EXPECT_TRUE(Streams().IsBefore(of_program)); });
}

}  // namespace
}  // namespace muster
