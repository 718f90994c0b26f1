#include "worker/checkpoint/polite_pace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace muster {
namespace {

// The cores are wanted if a thread has waited for one for more than this part of its work.
constexpr double kWaits = 0.25;
// A piece is shorter than training's time slices, so one that did not wait tells little. The weight
// of the pieces before the last one, each that much less than the next.
constexpr double kBefore = 0.75;
// Training may change what it does meanwhile.
constexpr absl::Duration kLongestRest = absl::Milliseconds(500);

}  // namespace

std::optional<PolitePace::CpuTimes> PolitePace::OfThisThread() {
  const int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  char text[128];
  const ssize_t bytes = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (bytes <= 0) return std::nullopt;
  text[bytes] = '\0';
  unsigned long long ran = 0, waited = 0;
  if (std::sscanf(text, "%llu %llu", &ran, &waited) != 2) return std::nullopt;
  if (ran == 0 && waited == 0) return std::nullopt;  // the kernel does not count
  return CpuTimes{.ran = absl::Nanoseconds(static_cast<int64_t>(ran)),
                  .waited = absl::Nanoseconds(static_cast<int64_t>(waited))};
}

void PolitePace::Begin(const CpuTimes& times, absl::Time now) {
  last_ = times;
  lately_ = {};
  rested_ = now;
}

absl::Duration PolitePace::Rest(const CpuTimes& times, absl::Time now, absl::Duration also,
                                absl::Duration most) {
  const absl::Duration ran = times.ran - last_.ran, waited = times.waited - last_.waited;
  const absl::Duration elapsed =
      rested_ == absl::InfinitePast() ? ran + waited : std::max(now - rested_, ran + waited);
  last_ = times;
  lately_.ran = kBefore * lately_.ran + ran;
  lately_.waited = kBefore * lately_.waited + waited;
  absl::Duration rest;
  if (lately_.waited > kWaits * lately_.ran) {
    rest = std::clamp((ran + also) / share_ - elapsed, rest, std::min(most, kLongestRest));
  }
  rested_ = now + rest;
  return rest;
}

PoliteWriters::PoliteWriters(double share, int threads)
    : share_(share), threads_(std::max(threads, 1)) {}

int PoliteWriters::Threads() const { return std::this_thread::get_id() == main_ ? 1 : threads_; }

}  // namespace muster
