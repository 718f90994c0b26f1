#ifndef MUSTER_AGENT_ATTEMPT_END_H_
#define MUSTER_AGENT_ATTEMPT_END_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/agent.h"
#include "agent/hang_core.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

// What ended one node's part of an attempt, for the coordinator. Pure. `user_error_codes`: exit
// codes that a retry cannot help, besides 2, 126 and 127. `out_of_memory`: the kernel has killed a
// process of this machine for memory while it ran, which counts if the worker's control group does
// not say more. An end that began on another node is PEER_FAILED: the report of
// that node has the cause. A refusal counts as the
// fault of the node: whether it is that of the program, the caller knows.
// `hang`: the last one that this node has ended an attempt for; null: none.
v1::AttemptEnd DescribeEnd(const JobResult& result, const std::vector<int>& user_error_codes,
                           bool out_of_memory, int num_nodes, const HangReport* hang = nullptr);

// How many processes the kernel of this machine has killed for memory; -1: it does not say.
int64_t CountMemoryKills();

// The file in which a runner leaves it for the agent. Errors: those of the disk; DATA_LOSS for a
// file that is none.
absl::Status WriteEnd(const std::string& path, const v1::AttemptEnd& end);
absl::StatusOr<v1::AttemptEnd> ReadEnd(const std::string& path);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_END_H_
