#include "worker/checkpoint/for_each.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"

namespace muster {
namespace {

// Starts `most` threads at most.
struct Starter {
  explicit Starter(int most_threads) : most(most_threads) {}
  std::function<std::optional<std::thread>(std::function<void()>)> start() {
    return [this](std::function<void()> work) -> std::optional<std::thread> {
      if (started == most) return std::nullopt;
      ++started;
      return TryStartThread(std::move(work));
    };
  }
  const int most;
  int started = 0;
};

TEST(ForEachTest, EachNumber_IsWorkedOnOnce) {
  for (const int most : {0, 1, 4}) {
    for (const int count : {0, 1, 3, 100}) {
      Starter starter(most);
      std::vector<std::atomic<int>> calls(count);
      const absl::Status status =
          ForEach(calls.size(), {.threads = 4, .start = starter.start()}, [&](uint64_t i) {
            ++calls[i];
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(std::all_of(calls.begin(), calls.end(), [](const auto& n) { return n == 1; }))
          << count << " with " << most << " threads";
      EXPECT_EQ(starter.started, count < 2 ? 0 : std::min({count, most, 4}));
    }
  }
}

TEST(ForEachTest, WithoutThreads_TheCallerDoesAll) {
  Starter none(0);
  bool meanwhile = false;
  std::set<std::thread::id> by;
  EXPECT_TRUE(ForEach(3,
                      {.threads = 4, .meanwhile = [&] { meanwhile = true; }, .start = none.start()},
                      [&](uint64_t) {
                        EXPECT_TRUE(meanwhile);
                        by.insert(std::this_thread::get_id());
                        return absl::OkStatus();
                      })
                  .ok());
  EXPECT_EQ(by, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(ForEachTest, Threads_WorkBesideTheCaller) {
  Mutex mu;
  CondVar changed;
  bool worked = false;
  const auto wait = [&] {
    MutexLock lock(&mu);
    while (!worked) changed.Wait(&mu);
  };
  EXPECT_TRUE(ForEach(2, {.threads = 2, .meanwhile = wait}, [&](uint64_t) {
                MutexLock lock(&mu);
                worked = true;
                changed.SignalAll();
                return absl::OkStatus();
              }).ok());
}

TEST(ForEachTest, FirstError_EndsAllAndIsReturned) {
  for (const int threads : {1, 3}) {
    std::atomic<int> calls{0};
    const absl::Status status = ForEach(1'000'000, {.threads = threads}, [&](uint64_t i) {
      ++calls;
      return i < 10 ? absl::OkStatus() : absl::DataLossError(absl::StrCat("number ", i));
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_LE(calls, 10 + threads);
  }
}

}  // namespace
}  // namespace muster
