#ifndef MUSTER_COORDINATOR_JOBS_RECORD_HISTORY_H_
#define MUSTER_COORDINATOR_JOBS_RECORD_HISTORY_H_

#include <utility>

#include "absl/status/status.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/journal.pb.h"

namespace muster::coordinator {

// Identifies an entry of a job's history: the number of the attempt and its restarts so far within
// the attempt. (0, 0): none.
using HistoryKey = std::pair<int, int>;

// Returns the key of the current entry, which is the last.
HistoryKey CurrentEntry(const v1::JobRecord& record);

// Removes from `change`, which has the job's record, the history entries that the journal already
// has, and counts them. Only the current entry changes, so the entries before `known`, the current
// one when the journal last got this job, need not be written again with their last lines, stacks
// and placements. Pure.
void OmitKnownHistory(const HistoryKey& known, v1::JobRecordChanged* change);

// Restores what OmitKnownHistory has removed. `before`: the job's record after all earlier changes.
// Pure. Errors: DATA_LOSS if it does not have that many entries.
absl::Status RestoreKnownHistory(const v1::JobRecord& before, v1::JobRecordChanged* change);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_RECORD_HISTORY_H_
