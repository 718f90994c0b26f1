#ifndef MUSTER_WORKER_CHECKPOINT_SEAL_CHAIN_H_
#define MUSTER_WORKER_CHECKPOINT_SEAL_CHAIN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "worker/checkpoint/registrar.h"

namespace muster {

// The end of the chain of records (docs/checkpoint_format.md, "The chain") that rank 0 continues if
// there is no coordinator.
struct ChainEnd {
  // The record that the next one follows; absent: the next one is the first.
  std::optional<RegisteredCheckpoint> last = std::nullopt;
  // The highest id of all records; the next record gets a higher one.
  uint64_t highest_id = 0;
};

// Returns the end of the chain among the records of a folder. Because clocks get set, a record
// whose time is after `now` counts as old, unless there are no others. A record that follows
// another one in the chain is newer; of two that no coordinator has made, the one with the higher
// id is newer. Pure.
ChainEnd EndOfChain(const std::vector<RegisteredCheckpoint>& records, absl::Time now);

// The same for the records in the folders in `parent`: numbered checkpoints, those that a program
// has named, and those that lack their names. A process reads each record once, as long as its file
// stays as it is, and then only checks that. Records that cannot be read are left out. Blocks on
// the disk. Thread-safe.
ChainEnd ReadChainEnd(const std::string& parent, absl::Time now);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEAL_CHAIN_H_
