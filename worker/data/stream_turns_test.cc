#include "worker/data/stream_turns.h"

#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(StreamTurns, PassThatBeginsLater_TakesTheStream) {
  StreamTurns turns;
  const int64_t first = turns.Begin();
  for (int i = 0; i < 2; ++i) StreamTurns::Turn(turns, first);
  const int64_t second = turns.Begin();
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(StreamTurns::Turn(turns, first), DataError);
    StreamTurns::Turn(turns, second);
  }
}

TEST(StreamTurns, PassThatBeginsWhileAnotherReads_WaitsForIt) {
  StreamTurns turns;
  std::optional<StreamTurns::Turn> reading;
  reading.emplace(turns, turns.Begin());
  std::atomic<bool> read{false};
  std::atomic<bool> asked{false};
  std::thread other([&] {
    asked = true;
    turns.Begin();
    EXPECT_TRUE(read);
  });
  // Enough time for a thread that does not wait.
  while (!asked) std::this_thread::yield();
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  read = true;
  reading.reset();
  other.join();
}

}  // namespace
}  // namespace muster
