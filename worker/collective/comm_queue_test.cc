// The behaviour of every CommQueue after errors.
#include "worker/collective/comm_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/collective/comm_stream.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

void Fail() { TORCH_CHECK(false, "peer lost"); }

template <class Queue>
std::unique_ptr<CommQueue> Make() {
  return std::make_unique<Queue>();
}
template <>
std::unique_ptr<CommQueue> Make<CommStream>() {
  // A device type for which LibTorch for CPUs implements nothing.
  return std::make_unique<CommStream>(FakeStreams::Install(c10::DeviceType::PrivateUse1).device());
}

template <class Queue>
class CommQueueErrors : public testing::Test {
 protected:
  const std::unique_ptr<CommQueue> queue_ = Make<Queue>();
};

using Queues = testing::Types<CommThread, CommStream>;
TYPED_TEST_SUITE(CommQueueErrors, Queues);

TYPED_TEST(CommQueueErrors, Error_IsThrownByItsWaitAndStopsWhatComesBehind) {
  CommQueue& queue = *this->queue_;
  bool ran = false;
  const CommQueue::Ticket failed = queue.Submit(Fail);
  const CommQueue::Ticket next = queue.Submit([&] { ran = true; });
  EXPECT_EQ(ErrorOf([&] { queue.Wait(failed); }), "peer lost");
  EXPECT_FALSE(queue.IsCurrent());
  EXPECT_FALSE(queue.WaitQuietly(next));
  EXPECT_FALSE(ran) << "ranks would no longer be in step";
  // The error was thrown already.
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "no error");
  queue.Wait(queue.Submit([&] { ran = true; }));
  EXPECT_TRUE(ran);
}

TYPED_TEST(CommQueueErrors, WorkThatWasNotRun_ThrowsTheErrorThatStoppedIt) {
  CommQueue& queue = *this->queue_;
  queue.Submit(Fail);
  const CommQueue::Ticket next = queue.Submit([] {});
  EXPECT_EQ(ErrorOf([&] { queue.Wait(next); }), "peer lost");
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "no error");
}

TYPED_TEST(CommQueueErrors, ErrorThatNobodyWaitedFor_IsThrownByTheNextDrain) {
  CommQueue& queue = *this->queue_;
  bool ran = false;
  EXPECT_FALSE(queue.WaitQuietly(queue.Submit(Fail)));
  EXPECT_FALSE(queue.WaitQuietly(queue.Submit([&] { ran = true; })));
  EXPECT_FALSE(ran) << "ranks must not differ in when they submit";
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "peer lost");
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "no error");
  queue.Wait(queue.Submit([&] { ran = true; }));
  EXPECT_TRUE(ran);
}

TYPED_TEST(CommQueueErrors, ErrorThatWasSeen_IsThrownByEveryWaitForIt) {
  CommQueue& queue = *this->queue_;
  const CommQueue::Ticket failed = queue.Submit(Fail);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ErrorOf([&] { queue.Wait(failed); }), "peer lost");
  // It does not hide later errors.
  const CommQueue::Ticket other = queue.Submit([] { TORCH_CHECK(false, "no memory"); });
  EXPECT_FALSE(queue.WaitQuietly(other));
  EXPECT_EQ(ErrorOf([&] { queue.Wait(failed); }), "peer lost");
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "no memory");
}

TYPED_TEST(CommQueueErrors, ErrorOfAnotherThreadsWork_IsThrownByDrain) {
  CommQueue& queue = *this->queue_;
  std::thread([&] { queue.Submit(Fail); }).join();
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "peer lost");
}

TYPED_TEST(CommQueueErrors, WhatFailedWorkHolds_IsFree) {
  CommQueue& queue = *this->queue_;
  std::vector<std::weak_ptr<int>> held;
  std::vector<CommQueue::Ticket> tickets;
  for (int i = 0; i < 3; ++i) {
    auto one = std::make_shared<int>(i);
    held.push_back(one);
    tickets.push_back(queue.Submit([one = std::move(one)] { Fail(); }));
  }
  for (const CommQueue::Ticket& ticket : tickets) EXPECT_FALSE(queue.WaitQuietly(ticket));
  for (const std::weak_ptr<int>& one : held) EXPECT_TRUE(one.expired());
}

TYPED_TEST(CommQueueErrors, AllocationThatFails_ThrowsAtOnceAndLeavesNothingBehind) {
  CommQueue& queue = *this->queue_;
  EXPECT_EQ(ErrorOf([&] { queue.Allocate([] { TORCH_CHECK(false, "no memory"); }); }), "no memory");
  EXPECT_EQ(ErrorOf([&] { queue.Drain(); }), "no error") << "it was seen";
  bool ran = false;
  queue.Wait(queue.Submit([&] { ran = true; }));
  EXPECT_TRUE(ran);
}

TYPED_TEST(CommQueueErrors, Destructor_EndsWithAnErrorThatNobodyHasSeen) {
  CommQueue& queue = *this->queue_;
  queue.Submit(Fail);
  queue.Submit([] {});
}

}  // namespace
}  // namespace muster
