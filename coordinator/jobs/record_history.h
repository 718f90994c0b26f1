#ifndef MUSTER_COORDINATOR_JOBS_RECORD_HISTORY_H_
#define MUSTER_COORDINATOR_JOBS_RECORD_HISTORY_H_

#include <utility>

#include "absl/status/status.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/journal.pb.h"

namespace muster::coordinator {

// Which entry of a job's history: its number, and its restarts within the attempt. (0, 0): none.
using HistoryKey = std::pair<int, int>;

// Of the current one, which is the last.
HistoryKey CurrentEntry(const v1::JobRecord& record);

// Only the current entry changes. So what was before it when the journal got this job last, which
// `known` says, need not be written again, with the last lines, stacks and placements of each:
// takes them out of `change`, which has the record, and counts them. Pure.
void OmitKnownHistory(const HistoryKey& known, v1::JobRecordChanged* change);

// Puts back what OmitKnownHistory has taken out. `before`: the job's record by the changes before.
// Pure. Errors: DATA_LOSS it does not have so many entries.
absl::Status RestoreKnownHistory(const v1::JobRecord& before, v1::JobRecordChanged* change);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_RECORD_HISTORY_H_
