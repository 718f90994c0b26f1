#ifndef MUSTER_WORKER_PARALLEL_PART_STORE_H_
#define MUSTER_WORKER_PARALLEL_PART_STORE_H_

#include <cstdint>

namespace muster {

// Where a rank's parts of the parameters are while nothing uses them: a file. Errors are
// c10::Error. Read and Write may be called from two threads at a time, for different places.
class PartStore {
 public:
  virtual ~PartStore() = default;

  // Room for so many bytes more: its place.
  virtual uint64_t Reserve(uint64_t bytes) = 0;
  virtual void Read(uint64_t place, void* to, uint64_t bytes) = 0;
  virtual void Write(uint64_t place, const void* from, uint64_t bytes) = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_PART_STORE_H_
