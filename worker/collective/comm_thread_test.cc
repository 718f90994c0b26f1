#include "worker/collective/comm_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(CommThread, Work_RunsOnAnotherThreadInOrder) {
  CommThread thread;
  std::vector<int> order;
  const std::thread::id here = std::this_thread::get_id();
  EXPECT_FALSE(thread.IsCurrent());
  for (int i = 0; i < 100; ++i) {
    thread.Submit([&, i] {
      EXPECT_TRUE(thread.IsCurrent());
      EXPECT_NE(std::this_thread::get_id(), here);
      order.push_back(i);
    });
  }
  thread.Drain();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(CommThread, Wait_ReturnsWhenItsWorkIsDone) {
  CommThread thread;
  Notification release;
  int done = 0;
  const CommThread::Ticket first = thread.Submit([&] { done = 1; });
  const CommThread::Ticket second = thread.Submit([&] {
    release.WaitForNotification();
    done = 2;
  });
  thread.Wait(first);
  EXPECT_EQ(done, 1) << "the second one waits for the release";
  release.Notify();
  EXPECT_TRUE(thread.WaitQuietly(second));
  EXPECT_EQ(done, 2);
}

// Also work that was queued before the failure; comm_queue_test tests later work.
TEST(CommThread, Error_EndsWhatIsQueued) {
  CommThread thread;
  Notification release;
  bool ran = false;
  const CommThread::Ticket failed = thread.Submit([&] {
    release.WaitForNotification();
    throw std::runtime_error("peer lost");
  });
  const CommThread::Ticket queued = thread.Submit([&] { ran = true; });
  release.Notify();
  EXPECT_FALSE(thread.WaitQuietly(queued));
  EXPECT_FALSE(ran);
  EXPECT_THROW(thread.Wait(failed), std::runtime_error);
}

TEST(CommThread, Work_ComesFromTheCallSiteOfItsCaller) {
  CommThread thread;
  std::vector<std::string> sites;
  {
    const CallSite site(std::source_location::current());
    thread.Submit([&] { sites.push_back(CurrentCallSite()); });
  }
  thread.Submit([&] { sites.push_back(CurrentCallSite()); });
  thread.Drain();
  EXPECT_THAT(sites, ElementsAre(testing::StartsWith("comm_thread_test.cc:"), IsEmpty()));
}

TEST(CommThread, WorkIsDone_WhenWhatItHoldsIsFree) {
  CommThread thread;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  const CommThread::Ticket ticket = thread.Submit([held = std::move(held)] {});
  thread.Wait(ticket);
  EXPECT_TRUE(watch.expired());
}

TEST(CommThread, Destructor_RunsWhatIsQueued) {
  std::atomic<int> ran = 0;
  {
    CommThread thread;
    for (int i = 0; i < 10; ++i) thread.Submit([&] { ++ran; });
  }
  EXPECT_EQ(ran, 10);
}

}  // namespace
}  // namespace muster
