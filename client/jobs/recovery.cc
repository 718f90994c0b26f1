#include "client/jobs/recovery.h"

#include <cstddef>
#include <optional>

#include "absl/time/time.h"

namespace muster {
namespace {

std::optional<absl::Duration> Between(absl::Time from, absl::Time to) {
  if (from == absl::InfinitePast() || to == absl::InfinitePast()) return std::nullopt;
  return to - from;
}

}  // namespace

Recovery RecoveryOf(const Attempt& ended, const Attempt* next) {
  const AttemptTimes& end = ended.times;
  Recovery recovery;
  recovery.attempt = ended.number;
  recovery.restarts = ended.restarts;
  recovery.detect = Between(end.failed, end.detected);
  recovery.decide = Between(end.detected, end.decided);
  recovery.fence = Between(end.decided, end.fenced);
  if (next == nullptr) return recovery;
  const AttemptTimes& start = next->times;
  recovery.place = Between(end.fenced, start.placed);
  recovery.rendezvous = Between(start.placed, start.sealed);
  recovery.restore = Between(start.sealed, start.restored);
  recovery.first_step = Between(
      start.restored != absl::InfinitePast() ? start.restored : start.sealed, start.stepped);
  recovery.total = Between(end.failed, start.stepped);
  return recovery;
}

std::vector<Recovery> Recoveries(const Job& job) {
  std::vector<Recovery> recoveries;
  for (size_t i = 0; i + 1 < job.history.size(); ++i) {
    recoveries.push_back(RecoveryOf(job.history[i], &job.history[i + 1]));
  }
  return recoveries;
}

}  // namespace muster
