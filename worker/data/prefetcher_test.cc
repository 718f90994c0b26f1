#include "worker/data/prefetcher.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "base/mutex.h"
#include "base/test_threads.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using Numbers = Prefetcher<int64_t>;

Numbers::Produce CountTo(int64_t end) {
  return [end](int64_t number) {
    return number < end ? std::optional<int64_t>(number) : std::nullopt;
  };
}

TEST(Prefetcher, AnyThreadsAndCapacity_GivesAllInOrder) {
  for (size_t threads : {1, 2, 7}) {
    for (int64_t capacity : {1, 2, 3, 16}) {
      Numbers numbers(std::vector<Numbers::Produce>(threads, CountTo(500)), capacity);
      for (int64_t expected = 0; expected < 500; ++expected) ASSERT_EQ(numbers.Next(), expected);
      EXPECT_EQ(numbers.Next(), std::nullopt);
      EXPECT_EQ(numbers.Next(), std::nullopt);
    }
  }
}

TEST(Prefetcher, FewerThreadsThanFunctions_GiveAllInOrder) {
  for (const int threads : {1, 2}) {
    const ThreadsLeft left(threads);
    Numbers numbers(std::vector<Numbers::Produce>(3, CountTo(100)), 4);
    for (int64_t expected = 0; expected < 100; ++expected) ASSERT_EQ(numbers.Next(), expected);
    EXPECT_EQ(numbers.Next(), std::nullopt);
  }
}

TEST(Prefetcher, NoThread_IsAnError) {
  const ThreadsLeft none(0);
  EXPECT_THROW(Numbers(std::vector<Numbers::Produce>(3, CountTo(9)), 4), std::system_error);
}

TEST(Prefetcher, Exception_ComesInItsPlaceAndEndsIt) {
  const auto produce = [](int64_t number) -> std::optional<int64_t> {
    if (number >= 3) throw std::runtime_error("number " + std::to_string(number));
    return number;
  };
  Numbers numbers(std::vector<Numbers::Produce>(3, produce), 4);
  for (int64_t expected = 0; expected < 3; ++expected) EXPECT_EQ(numbers.Next(), expected);
  try {
    numbers.Next();
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "number 3");
  }
  EXPECT_EQ(numbers.Next(), std::nullopt);
}

TEST(Prefetcher, Capacity_BoundsHowFarItRunsAhead) {
  std::atomic<int64_t> highest{0};
  Notification three_made;
  const auto produce = [&](int64_t number) {
    highest = number;
    if (number == 2) three_made.Notify();
    return std::optional<int64_t>(number);
  };
  Numbers numbers({produce}, 3);
  three_made.WaitForNotification();
  EXPECT_EQ(highest, 2);
}

TEST(Prefetcher, DestroyedWhileThreadsWork_JoinsThem) {
  for (int round = 0; round < 200; ++round) {
    auto alive = std::make_shared<int>(0);
    {
      const auto produce = [alive](int64_t number) { return std::optional<int64_t>(number); };
      Numbers numbers(std::vector<Numbers::Produce>(4, produce), 8);
      for (int i = 0; i < round % 5; ++i) numbers.Next();
    }
    EXPECT_EQ(alive.use_count(), 1);
  }
}

}  // namespace
}  // namespace muster
