#ifndef MUSTER_WORKER_BIGMODEL_OFFLOAD_STATS_H_
#define MUSTER_WORKER_BIGMODEL_OFFLOAD_STATS_H_

#include <cstdint>

namespace muster {

// Counts of what an offloaded model has done so far.
struct OffloadStats {
  uint64_t ring_bytes = 0;
  uint64_t offloaded_bytes = 0;  // in the type in which they are used
  uint64_t mapped_bytes = 0;     // of these: used where their files are mapped
  uint64_t read_bytes = 0;       // into the ring so far
  int64_t uses = 0;              // of a unit after another one
  int64_t waits = 0;             // for a unit that nothing had asked for before
  // The most memory that was allocated in addition to the ring, because an operator used more units
  // at once than the ring holds.
  uint64_t overflow_bytes = 0;

  OffloadStats& operator+=(const OffloadStats& other) {
    ring_bytes += other.ring_bytes;
    offloaded_bytes += other.offloaded_bytes;
    mapped_bytes += other.mapped_bytes;
    read_bytes += other.read_bytes;
    uses += other.uses;
    waits += other.waits;
    overflow_bytes += other.overflow_bytes;
    return *this;
  }
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_OFFLOAD_STATS_H_
