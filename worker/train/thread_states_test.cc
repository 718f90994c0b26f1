#include "worker/train/thread_states.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::ElementsAre;

thread_local int64_t number = 1;
thread_local int64_t late = 2;

TEST(ThreadStates, Scope_GivesAnotherThreadTheStatesOfThisOne) {
  AddThreadState({[] { return number; }, [](int64_t value) { number = value; }});
  number = 5;
  const std::vector<int64_t> saved = SaveThreadStates();
  EXPECT_THAT(saved, ElementsAre(5));
  AddThreadState({[] { return late; }, [](int64_t value) { late = value; }});
  std::thread([&] {
    {
      const ThreadStatesScope scope(saved);
      EXPECT_EQ(number, 5);
      EXPECT_EQ(late, 2) << "added after they were saved";
      number = 7;
    }
    EXPECT_EQ(number, 1);
  }).join();
  EXPECT_THAT(SaveThreadStates(), ElementsAre(5, 2));
}

}  // namespace
}  // namespace muster
