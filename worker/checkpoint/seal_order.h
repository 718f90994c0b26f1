#ifndef MUSTER_WORKER_CHECKPOINT_SEAL_ORDER_H_
#define MUSTER_WORKER_CHECKPOINT_SEAL_ORDER_H_

#include <optional>
#include <string>

namespace muster {

// Whether the checkpoint in the folder `dir` was sealed after the one in `than`, by their records
// alone, whatever the clocks of their writers said: of two that rank 0 sealed, the one with the
// higher id (ids count all checkpoints in the parent folder); of two of one chain, the later one,
// if the records between them are in their parent folders. A process reads each of these once
// (RecordCache). nullopt: the records do not say, or cannot be read. Blocks on the disk;
// thread-safe.
std::optional<bool> IsSealedAfter(const std::string& dir, const std::string& than);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEAL_ORDER_H_
