#ifndef MUSTER_WORKER_JOB_AGENT_TELLS_H_
#define MUSTER_WORKER_JOB_AGENT_TELLS_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace muster {

// Whether `error` of this process is only the echo of another one's failure that its agent prints
// (MUSTER_AGENT_TELLS): it names a process that was killed or whose exit code is not 0. No agent
// reports a process that has just left the job, or a broken network between living processes.
// `variables` are those of this process. Pure.
bool AgentTells(const absl::Status& error, const std::map<std::string, std::string>& variables);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_AGENT_TELLS_H_
