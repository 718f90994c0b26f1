#ifndef MUSTER_AGENT_END_CLASS_H_
#define MUSTER_AGENT_END_CLASS_H_

#include <cstdint>
#include <vector>

#include "agent/job_coordination.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

// Returns whether no retry can help after this end: a worker that ended by itself with exit code 2,
// 126, 127 or one of `user_error_codes`. Pure.
bool IsUserError(const WorkerEnd& end, const std::vector<int>& user_error_codes);

// Returns the class of a failed worker's end. `out_of_memory`: the kernel has killed a process of
// this machine for memory while the worker ran, which is decisive unless its control group has
// exact counts. Pure.
v1::EndClass ClassOf(const WorkerEnd& end, const std::vector<int>& user_error_codes,
                     bool out_of_memory);

// Returns how many processes the kernel of this machine has killed for memory; -1: it does not
// report it.
int64_t CountMemoryKills();

}  // namespace muster::agent

#endif  // MUSTER_AGENT_END_CLASS_H_
