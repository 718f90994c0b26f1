#ifndef MUSTER_AGENT_END_CLASS_H_
#define MUSTER_AGENT_END_CLASS_H_

#include <cstdint>
#include <vector>

#include "agent/job_coordination.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

// Whether no retry can help after this end: exit codes 2, 126, 127 and `user_error_codes` of a
// worker that ended by itself. Pure.
bool IsUserError(const WorkerEnd& end, const std::vector<int>& user_error_codes);

// The class of a failed worker's end. `out_of_memory`: the kernel has killed a process of this
// machine for memory while the worker ran, which counts if its control group does not say more.
// Pure.
v1::EndClass ClassOf(const WorkerEnd& end, const std::vector<int>& user_error_codes,
                     bool out_of_memory);

// How many processes the kernel of this machine has killed for memory; -1: it does not say.
int64_t CountMemoryKills();

}  // namespace muster::agent

#endif  // MUSTER_AGENT_END_CLASS_H_
