#ifndef MUSTER_WORKER_PARALLEL_PART_STORE_H_
#define MUSTER_WORKER_PARALLEL_PART_STORE_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/util/Exception.h"

namespace muster {

// Where a rank's parts of the parameters or gradients are kept while they are not used: a file or,
// for those of a device, the host's memory. Errors are c10::Error. The functions that read and
// write may be called from two threads at a time, for different places.
class PartStore {
 public:
  virtual ~PartStore() = default;

  // Whether the store accepts tensors on `device`.
  virtual bool Takes(const c10::Device& device) const { return device.is_cpu(); }
  // Whether ReadTo() and WriteFrom() only queue copies, for the CPU too (in tests, which give it
  // streams). On a device the copies always come after what the current stream has queued, and
  // before what it gets next.
  virtual bool on_streams() const { return false; }

  // Reserves room for `bytes` more bytes and returns its place.
  virtual uint64_t Reserve(uint64_t bytes) = 0;
  // Allocates the reserved room, so that no later use of a place fails for lack of it. No rank of a
  // machine allocates before all have reserved.
  virtual void Take() {}
  virtual void Read(uint64_t place, void* to, uint64_t bytes) = 0;
  virtual void Write(uint64_t place, const void* from, uint64_t bytes) = 0;

  // The same for a contiguous tensor on a device that the store accepts.
  virtual void ReadTo(uint64_t place, const at::Tensor& to) {
    TORCH_INTERNAL_ASSERT(to.is_cpu());
    Read(place, to.mutable_data_ptr(), to.nbytes());
  }
  virtual void WriteFrom(uint64_t place, const at::Tensor& from) {
    TORCH_INTERNAL_ASSERT(from.is_cpu());
    Write(place, from.const_data_ptr(), from.nbytes());
  }
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_PART_STORE_H_
