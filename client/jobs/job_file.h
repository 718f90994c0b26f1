#ifndef MUSTER_CLIENT_JOBS_JOB_FILE_H_
#define MUSTER_CLIENT_JOBS_JOB_FILE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::client {

// One key of a job file, which is also a flag of `muster submit`.
struct JobKey {
  std::string name;        // "max_restarts"
  std::string value_name;  // for the help; empty: true or false
  std::string help;
  bool repeated = false;  // as a flag
};
const std::vector<JobKey>& JobKeys();

// Sets one key from a flag's words. Errors: INVALID_ARGUMENT that names the flag and what to write.
absl::Status SetJobKey(const std::string& name, const std::vector<std::string>& words,
                       v1::JobSpec* spec);

// Reads a job file: YAML with the keys of JobKeys, and `command`, a list of words or one line that
// is split at blanks (there is no shell: no quotes, variables or pipes). Errors: INVALID_ARGUMENT
// "SOURCE:LINE: ..." that names the key and what to write; RESOURCE_EXHAUSTED.
absl::StatusOr<v1::JobSpec> ParseJobFile(absl::string_view text, absl::string_view source);

// A job's name made of its program: "./build/train_mnist" -> "train_mnist".
std::string JobNameOf(absl::string_view program);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_JOB_FILE_H_
