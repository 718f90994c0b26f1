#ifndef MUSTER_WORKER_CHECKPOINT_AGREEMENT_H_
#define MUSTER_WORKER_CHECKPOINT_AGREEMENT_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "worker/checkpoint/manifest.h"
#include "worker/collective/comm.h"

namespace muster {

// The exchanges among ranks that save or open a checkpoint together. Each returns the same on every
// rank, so that either all continue or none does.

// Runs `work`, whose exceptions must not keep this rank from telling the others: they become
// INTERNAL with their first line.
absl::Status GuardRank(absl::FunctionRef<absl::Status()> work);

// Collective. One status for all ranks: OK, or the first failure with its rank. `files`, if not
// null, gets those of all ranks.
absl::Status AgreeOnFiles(Comm& comm, const absl::Status& mine,
                          const std::vector<ManifestFile>& my_files,
                          std::vector<ManifestFile>* files);

// Collective. Rank 0's status, on every rank.
absl::Status StatusOfMain(Comm& comm, const absl::Status& mine);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_AGREEMENT_H_
