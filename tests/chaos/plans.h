#ifndef MUSTER_TESTS_CHAOS_PLANS_H_
#define MUSTER_TESTS_CHAOS_PLANS_H_

#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/chaos/cluster.h"

namespace muster::chaos {

// Returns a run that passes a failpoint of the coordinator, with all that it takes to get there.
// `action` is as in MUSTER_FAILPOINTS ("kill", "stop", "delay:50ms", ...), without @N; `at` 0: the
// pass that is most telling, else that one. Workers are without an agent.
Plan CoordinatorPlan(const std::string& failpoint, const std::string& action = "kill",
                     uint64_t at = 0);
std::vector<std::string> CoordinatorFailpoints();

// The same for the failpoints of the workers; one of two workers has it.
Plan WorkerPlan(const std::string& failpoint, const std::string& action = "kill", uint64_t at = 0);
std::vector<std::string> WorkerFailpoints();

// The same with a coordinator on its own and two agents with two workers each: failpoints of all
// three.
Plan AgentsPlan(const std::string& failpoint, const std::string& action = "kill", uint64_t at = 0);
std::vector<std::string> AgentsFailpoints();

// The same with workers that train with LibTorch.
Plan TrainingPlan(const std::string& failpoint, const std::string& action = "kill",
                  uint64_t at = 0);
std::vector<std::string> TrainingFailpoints();

// The coordinator dies in the middle of a job and stays away for `outage`: one job waits for it in
// a barrier meanwhile, and one continues to train.
std::vector<Plan> OutagePlans(absl::Duration outage);

// Three agents with two workers each, behind hubs, to which something happens in the middle of the
// job. The lease is long enough for a busy machine; an agent leaves a stalled hub after a quarter
// of it.
Plan HubKilledPlan();      // one that has no worker of the job; there is another
Plan OnlyHubKilledPlan();  // none is left until it is there again
Plan HubStoppedPlan();     // until all are back at the coordinator, then it continues
Plan HubWithWorkersKilledPlan();
Plan HubAndCoordinatorKilledPlan();
Plan CoordinatorKilledPlan(absl::Duration outage);

// One round of the long set, drawn from `seed`: every failpoint with every action that it takes, at
// drawn passes, plus other deaths.
std::vector<Plan> LongPlans(uint32_t seed);

// Returns the failpoints that `plans` arm.
std::set<std::string> ArmedIn(const std::vector<Plan>& plans);

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_PLANS_H_
