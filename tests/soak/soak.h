#ifndef MUSTER_TESTS_SOAK_SOAK_H_
#define MUSTER_TESTS_SOAK_SOAK_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace muster::soak {

struct SoakOptions {
  absl::Duration duration = absl::Minutes(30);
  uint32_t seed = 1;  // of the first job; each further one has the next
  // The most resident memory that the coordinator may hold at any time; an agent may hold a quarter
  // of it.
  int64_t memory_bytes = int64_t{1} << 30;
  // Called after each job with a line about it.
  std::function<void(const std::string&)> report = [](const std::string&) {};
};

// Runs job after job until the duration has passed: a coordinator with its journal, two agents,
// four workers, as tests/chaos has them, and all the while everything of Hostile against the
// coordinator; drawn: a failpoint at which one of them is killed or the disk is full, and more of
// them stopped for a while or killed. Returns what was wrong, one line each with the job's seed and
// at the end the logs of the first bad job; empty: nothing.
//
// Under AddressSanitizer, any finding in coordinator or agent ends that process with a report and a
// code that counts as wrong.
std::vector<std::string> Soak(const SoakOptions& options);

}  // namespace muster::soak

#endif  // MUSTER_TESTS_SOAK_SOAK_H_
