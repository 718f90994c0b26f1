#ifndef MUSTER_TESTS_SIMULATION_LINEARIZABILITY_H_
#define MUSTER_TESTS_SIMULATION_LINEARIZABILITY_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace muster::simulation {

// One operation on one key as its caller saw it.
struct KvEvent {
  enum Kind { kPut, kGet, kCas, kAdd, kDelete };
  static constexpr int64_t kAbsent = std::numeric_limits<int64_t>::min();

  Kind kind = kGet;
  int64_t arg = 0;     // put: the value; cas: the new value; add: the delta
  int64_t expect = 0;  // cas: the value compared with
  // Until it is answered, an operation may have happened or not.
  bool answered = false;
  int64_t result = 0;  // get: what was read; add: the sum; cas: 1 or 0
  absl::Time start;
  absl::Time end = absl::InfiniteFuture();  // of the answer
};

// Returns whether some order of these operations, in which one that ended before another began
// comes first, gives every answer that was seen; the key starts as `initial`. An exhaustive search
// with memory of visited states, after Wing, Gong and Lowe. Of more than 64 operations the first
// are checked, up to a moment that makes that sound.
bool IsLinearizable(std::vector<KvEvent> events, int64_t initial = KvEvent::kAbsent);

// Returns one line for each operation, for reports.
std::string ToText(const std::vector<KvEvent>& events);

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_LINEARIZABILITY_H_
