#ifndef MUSTER_TESTS_CHAOS_PLANS_H_
#define MUSTER_TESTS_CHAOS_PLANS_H_

#include <string>
#include <vector>

#include "tests/chaos/cluster.h"

namespace muster::chaos {

// A run that passes a failpoint of the coordinator, with all that it takes to come there. `action` is what MUSTER_FAILPOINTS takes ("kill", "stop", "delay:50ms", ...), without
// @N; `at` 0: the pass at which it tells most, else that one.
Plan CoordinatorPlan(const std::string& failpoint, const std::string& action = "kill",
                     uint64_t at = 0);
std::vector<std::string> CoordinatorFailpoints();

// The same for the failpoints of the workers; one of two workers has it.
Plan WorkerPlan(const std::string& failpoint, const std::string& action = "kill", uint64_t at = 0);
std::vector<std::string> WorkerFailpoints();

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_PLANS_H_
