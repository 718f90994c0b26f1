#ifndef MUSTER_CLIENT_JOBS_JOB_FILES_H_
#define MUSTER_CLIENT_JOBS_JOB_FILES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// Adds these files, and all files in these folders, to `files`: each under its last name, those of
// a folder below the folder's last name. Blocks on the disk. Errors, one line that names the path:
// NOT_FOUND, PERMISSION_DENIED; INVALID_ARGUMENT for a symbolic link or anything else that is
// neither a file nor a folder, and for two of the same name; RESOURCE_EXHAUSTED beyond kMaxFiles
// and kMaxFileBytes (proto/job_limits.h).
absl::Status ReadJobFiles(const std::vector<std::string>& paths, std::vector<JobFile>* files);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_JOB_FILES_H_
