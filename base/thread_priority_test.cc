#include "base/thread_priority.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <thread>

namespace muster {
namespace {

int Nice() { return getpriority(PRIO_PROCESS, 0); }

TEST(ThreadPriority, LoweredThread_LeavesTheOthersAsTheyAre) {
  const int before = Nice();
  std::thread([] {
    LowerThreadPriority(kIdleNice);
    EXPECT_EQ(Nice(), kIdleNice);
    std::thread([] { EXPECT_EQ(Nice(), kIdleNice); }).join();
  }).join();
  EXPECT_EQ(Nice(), before);
}

}  // namespace
}  // namespace muster
