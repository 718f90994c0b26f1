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

// Describes for the coordinator how one node's part of an attempt has ended. Pure.
// `user_error_codes` and `out_of_memory`: see ClassOf. An end that began on another node is
// PEER_FAILED, because that node reports the cause, unless a process of this node has ended with a
// user error. A refusal counts as a fault of the node; only the caller knows whether it is one of
// the program. `hang`: the last hang for which this node has ended an attempt; null: none.
v1::AttemptEnd DescribeEnd(const JobResult& result, const std::vector<int>& user_error_codes,
                           bool out_of_memory, int num_nodes, const HangReport* hang = nullptr);

// Reads a file in the folder of an attempt. Errors: those of the disk; DATA_LOSS if the file is
// larger than `max_bytes`, since retrying does not help then.
absl::StatusOr<std::string> ReadAttemptFile(const std::string& path, int64_t max_bytes);

// Write and read the file in which a runner leaves the end for the agent. Errors: those of the
// disk; DATA_LOSS if the content is not an AttemptEnd.
absl::Status WriteEnd(const std::string& path, const v1::AttemptEnd& end);
absl::StatusOr<v1::AttemptEnd> ReadEnd(const std::string& path);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_END_H_
