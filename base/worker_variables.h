#ifndef MUSTER_BASE_WORKER_VARIABLES_H_
#define MUSTER_BASE_WORKER_VARIABLES_H_

#include "absl/strings/string_view.h"

namespace muster {

// A variable that launches and agents set for every process. A value that a user gives for it must
// be refused, because it would be overwritten without notice.
struct WorkerVariable {
  absl::string_view name;
  // The setting of a launch with the same meaning, "mixed_precision"; empty if there is none, as
  // for the place in the job.
  absl::string_view setting;
};

// Returns null if a user may give this variable to the processes. Pure, thread-safe.
const WorkerVariable* FindWorkerVariable(absl::string_view name);

}  // namespace muster

#endif  // MUSTER_BASE_WORKER_VARIABLES_H_
