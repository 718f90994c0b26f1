#ifndef MUSTER_BASE_BACKOFF_H_
#define MUSTER_BASE_BACKOFF_H_

#include "absl/time/time.h"

namespace muster {

// Computes how long to wait before each repeat of one operation: a random part, at least half, of a
// span that doubles from the first to the last, so that callers that failed together do not retry
// together. Pure; not thread-safe.
class Backoff {
 public:
  Backoff(absl::Duration first, absl::Duration last) : span_(first), last_(last) {}

  // `share`: random, from 0 to 1. `retry_after`: the delay that the server asked for; the wait is
  // this delay plus the random part, because every caller was asked for the same delay.
  absl::Duration Next(double share, absl::Duration retry_after = absl::ZeroDuration());

 private:
  absl::Duration span_;
  const absl::Duration last_;
};

// Returns a random number from 0 to 1, different in each process and each time. Thread-safe.
double RandomShare();

}  // namespace muster

#endif  // MUSTER_BASE_BACKOFF_H_
