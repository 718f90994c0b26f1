#ifndef MUSTER_CLIENT_JOBS_RECOVERY_H_
#define MUSTER_CLIENT_JOBS_RECOVERY_H_

#include <vector>

#include "client/jobs/job_types.h"

namespace muster {

// Returns the recovery after an attempt that has ended. `next`: the attempt that followed; null:
// none yet.
Recovery RecoveryOf(const Attempt& ended, const Attempt* next);

// Returns one for each attempt in job.history that has ended and was followed by another, in this
// order.
std::vector<Recovery> Recoveries(const Job& job);

}  // namespace muster

#endif  // MUSTER_CLIENT_JOBS_RECOVERY_H_
