#ifndef MUSTER_WORKER_CHECKPOINT_SEAL_CHAIN_H_
#define MUSTER_WORKER_CHECKPOINT_SEAL_CHAIN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "worker/checkpoint/registrar.h"

namespace muster {

// Where the chain of records (docs/checkpoint_format.md, "The chain") ends that rank 0 continues
// where no coordinator does.
struct ChainEnd {
  // The record that the next one follows; absent: that is the first.
  std::optional<RegisteredCheckpoint> last = std::nullopt;
  // Of all records: the next one has another.
  uint64_t highest_id = 0;
};

// Of the records of a folder. Clocks are set: one that says that it is newer than `now` counts as
// old, unless there are no others; what follows a record in the chain is newer; and so is the
// higher id of two that no coordinator has made. Pure.
ChainEnd EndOfChain(const std::vector<RegisteredCheckpoint>& records, absl::Time now);

// The same of the records in the folders in `parent`: numbered checkpoints, those that a program
// has named, and those that lack their names. A process reads each record once, as long as its file
// stays as it is, and looks only for that afterwards. What cannot be read is left out. Blocks on
// the disk. Thread-safe.
ChainEnd ReadChainEnd(const std::string& parent, absl::Time now);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEAL_CHAIN_H_
