#ifndef MUSTER_WORKER_CHECKPOINT_SEAL_H_
#define MUSTER_WORKER_CHECKPOINT_SEAL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/registrar.h"

namespace muster {

// seal.json: the coordinator's record of a checkpoint, beside its manifest
// (docs/checkpoint_format.md). It ties the folder to the record, and is what is checked where no
// coordinator is.

// Not durable until the folder is synced.
absl::Status WriteSeal(const std::string& dir, const RegisteredCheckpoint& record);

// Errors: NOT_FOUND if the folder has none; DATA_LOSS if it cannot be read.
absl::StatusOr<RegisteredCheckpoint> ReadSeal(const std::string& dir);

// The text whose SHA-256 is `record.sha256`.
std::string SealText(const RegisteredCheckpoint& record);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEAL_H_
