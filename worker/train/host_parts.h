#ifndef MUSTER_WORKER_TRAIN_HOST_PARTS_H_
#define MUSTER_WORKER_TRAIN_HOST_PARTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/parallel/part_store.h"

namespace muster {

// Parts of a device's parameters, or of their gradients, in the host's memory, which is pinned: a
// copy is queued on the current stream, and the host continues. Copies of one place are ordered on
// whatever streams they run: copies from it come after the last copy to it, and a copy to it comes
// after all earlier ones.
//
// If memory cannot be pinned, the host waits for its copies, and one line of the log says so. The
// streams that have copied must outlive this object. Thread-safe, for different places.
class HostParts : public PartStore {
 public:
  // For error messages: from offload_parameters, with the gradients, or from offload_gradients.
  enum class Contents { kParameters, kGradients };
  // Pins memory for a GPU. `ranks`: the number of ranks on this machine, which reserve at the same
  // time.
  HostParts(c10::Device device, int ranks, Contents contents = Contents::kParameters);
  // `pinning`: borrowed; null if memory is not pinned.
  HostParts(c10::Device device, int ranks, const HostPinning* pinning,
            Contents contents = Contents::kParameters);
  HostParts(const HostParts&) = delete;
  HostParts& operator=(const HostParts&) = delete;
  // Waits for the copies.
  ~HostParts() override;

  bool Takes(const c10::Device& device) const override { return device == device_; }
  bool on_streams() const override { return true; }

  // Allocates no memory yet, but throws if the reservations exceed this rank's share of the host's
  // remaining memory.
  uint64_t Reserve(uint64_t bytes) override;
  // Allocates the memory in one piece. The first use of a place without memory does the same.
  void Take() override;
  // For the host: these wait for the copies of the place.
  void Read(uint64_t place, void* to, uint64_t bytes) override;
  void Write(uint64_t place, const void* from, uint64_t bytes) override;
  void ReadTo(uint64_t place, const at::Tensor& to) override;
  void WriteFrom(uint64_t place, const at::Tensor& from) override;

  // The memory of a place.
  char* DataOf(uint64_t place);

 private:
  // The places that were reserved together.
  struct Block {
    uint64_t first = 0, last = 0;  // the first place, and past the last one
    AlignedMemory memory;
    bool pinned = false;
  };
  struct Place {
    char* data = nullptr;
    bool pinned = false;
    // The last copy to the place, and on each stream the last copy from it since.
    std::unique_ptr<c10::Event> written;
    std::vector<std::pair<c10::Stream, std::unique_ptr<c10::Event>>> read;
  };

  Place& PlaceAt(uint64_t place);
  void TakeMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns whether the memory is pinned now.
  bool Pin(AlignedMemory* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  c10::Stream Current() const;
  void Wait(const Place& place) const;
  // The name of the option that asks for these parts.
  const char* option() const {
    return contents_ == Contents::kParameters ? "offload_parameters" : "offload_gradients";
  }
  static at::Tensor HostTensor(const Place& place, const at::Tensor& like);

  const c10::Device device_;
  const int ranks_;
  const Contents contents_;
  const bool pins_;
  // Pinned memory borrows it. Whether the last attempt to pin has succeeded is in pinned_.
  HostPinning pinning_;
  bool pinned_ = false;
  Mutex mu_;
  uint64_t reserved_ ABSL_GUARDED_BY(mu_) = 0, taken_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Block> blocks_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Place> places_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_HOST_PARTS_H_
