#ifndef MUSTER_AGENT_JOB_FILES_H_
#define MUSTER_AGENT_JOB_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

// Writes JobSpec.files into `folder`, an attempt's own folder, which exists: with mode 0600 or
// 0700, in folders of mode 0700. Blocks on the disk. Errors: INVALID_ARGUMENT for a path that leads
// out of the folder, DATA_LOSS for content with another digest, or what the system says.
absl::Status WriteJobFiles(const v1::JobSpec& spec, const std::string& folder);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_JOB_FILES_H_
