// CPU nanoseconds that a training step pays for triggers and for being observed while nothing is
// raised: one TriggerWatch::Check, and one step and collective on the ProgressBoard. Prints one
// JSON line.
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/load_average.h"
#include "worker/collective/progress_board.h"
#include "worker/job/trigger_watch.h"

namespace {

constexpr int kTimes = 1'000'000;

// Returns the CPU time of the thread: the polls are on another one.
template <typename F>
double MedianNanos(F f) {
  std::vector<double> rounds;
  for (int round = 0; round < 9; ++round) {
    timespec begin, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    for (int i = 0; i < kTimes; ++i) f(i);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    rounds.push_back(((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / kTimes);
  }
  std::nth_element(rounds.begin(), rounds.begin() + rounds.size() / 2, rounds.end());
  return rounds[rounds.size() / 2];
}

}  // namespace

int main() {
  muster::TriggerWatch watch(
      0, [](const muster::TriggerPoll&) { return std::vector<muster::TriggerInfo>(); },
      muster::TriggerWatch::OptionsFor(1));
  const double check = MedianNanos([&](int i) {
    if (!watch.Check("stop", i).ok()) std::abort();
  });
  muster::ProgressBoard board;
  const double progress = MedianNanos([&](int i) {
    board.SetStep(i);
    muster::CollectiveOnBoard collective(board, "AllReduce", i, "Float");
  });
  std::printf(
      "{\"bench\":\"trigger_check\",\"check_cpu_ns\":%.1f,\"progress_cpu_ns\":%.1f,\"load\":%.2f}"
      "\n",
      check, progress, muster::bench::LoadAverage());
  return 0;
}
