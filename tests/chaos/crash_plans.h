#ifndef MUSTER_TESTS_CHAOS_CRASH_PLANS_H_
#define MUSTER_TESTS_CHAOS_CRASH_PLANS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/chaos/cluster.h"

namespace muster::chaos {

// A training of two ranks, each with an agent, that saves after every epoch and keeps two
// checkpoints. One process is killed (SIGKILL) at one moment of a save and is started again.
struct CrashPlan {
  Plan plan;
  // Called when the moment came; empty: the plan's failpoints say so.
  std::string once;
};

// Returns the same plans in every build: the moments before and after each step of a save.
std::vector<CrashPlan> CrashPlans();
// Runs the training undisturbed. Returns the calls of a whole save of rank 0, and of the removal of
// an old checkpoint, before which none of CrashPlans() kills it; none if the plans are complete.
std::vector<std::string> CallsWithoutAPlan();
// Returns `count` plans at drawn moments, each of which comes.
std::vector<CrashPlan> DrawnCrashPlans(uint32_t seed, int count);

// Runs the plan. Returns what was wrong: besides what Cluster reports, that a checkpoint which was
// sealed or acknowledged did not load, that something is left over, or that what is kept is not
// whole. `reached`: whether a process was killed. `logs`: set if something was wrong.
std::vector<std::string> RunCrashPlan(const CrashPlan& plan, bool* reached, std::string* logs);

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_CRASH_PLANS_H_
