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

// What ended one node's part of an attempt, for the coordinator. Pure. `user_error_codes` and
// `out_of_memory`: see ClassOf. An end that began on another node is PEER_FAILED, because the
// report of that node has the cause, unless a process of this node has ended by a user error. A
// refusal counts as the fault of the node: whether it is that of the program, the caller knows.
// `hang`: the last one that this node has ended an attempt for; null: none.
v1::AttemptEnd DescribeEnd(const JobResult& result, const std::vector<int>& user_error_codes,
                           bool out_of_memory, int num_nodes, const HangReport* hang = nullptr);

// A file in the folder of an attempt. Errors: those of the disk; DATA_LOSS for one that is larger,
// which no later look reads.
absl::StatusOr<std::string> ReadAttemptFile(const std::string& path, int64_t max_bytes);

// The file in which a runner leaves it for the agent. Errors: those of the disk; DATA_LOSS for a
// file that is none.
absl::Status WriteEnd(const std::string& path, const v1::AttemptEnd& end);
absl::StatusOr<v1::AttemptEnd> ReadEnd(const std::string& path);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_END_H_
