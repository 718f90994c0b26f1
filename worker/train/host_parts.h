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

// Parts of the parameters of a device, or of their gradients, in memory of the host, which is
// pinned: a copy is queued on the stream that is current, and the host goes on. Copies of one place
// are in order on whatever streams they are: those from it come after the last one to it, and one
// to it comes after all before.
//
// Memory that cannot be pinned does as well: the host waits for its copies then, and a line of the
// log says so once. Streams that have copied must outlive it. Thread-safe, for different places.
class HostParts : public PartStore {
 public:
  // For its errors: of offload_parameters, with the gradients, or of offload_gradients.
  enum class Of { kParameters, kGradients };
  // Pins memory for a GPU. `ranks`: those of this machine, which reserve at the same time.
  HostParts(c10::Device device, int ranks, Of of = Of::kParameters);
  // `pinning`: borrowed; null if memory is not pinned.
  HostParts(c10::Device device, int ranks, const HostPinning* pinning, Of of = Of::kParameters);
  HostParts(const HostParts&) = delete;
  HostParts& operator=(const HostParts&) = delete;
  // Waits for the copies.
  ~HostParts() override;

  bool Takes(const c10::Device& device) const override { return device == device_; }
  bool on_streams() const override { return true; }

  // Takes no memory yet, but throws if what is reserved is more than this rank's share of what the
  // host has left.
  uint64_t Reserve(uint64_t bytes) override;
  // Takes it in one piece. The first use of a place that has no memory does the same.
  void Take() override;
  // Of the host: they wait for the copies of the place.
  void Read(uint64_t place, void* to, uint64_t bytes) override;
  void Write(uint64_t place, const void* from, uint64_t bytes) override;
  void ReadTo(uint64_t place, const at::Tensor& to) override;
  void WriteFrom(uint64_t place, const at::Tensor& from) override;

  // Of a place.
  char* DataOf(uint64_t place);

 private:
  // What was reserved together.
  struct Block {
    uint64_t first = 0, last = 0;  // place, and past the last one
    AlignedMemory memory;
    bool pinned = false;
  };
  struct Place {
    char* data = nullptr;
    bool pinned = false;
    // The last copy to it, and on each stream the last copy from it since.
    std::unique_ptr<c10::Event> written;
    std::vector<std::pair<c10::Stream, std::unique_ptr<c10::Event>>> read;
  };

  Place& PlaceAt(uint64_t place);
  void TakeMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether it is pinned now.
  bool Pin(AlignedMemory* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  c10::Stream Current() const;
  void Wait(const Place& place) const;
  // The option that asks for it.
  const char* option() const {
    return of_ == Of::kParameters ? "offload_parameters" : "offload_gradients";
  }
  static at::Tensor HostTensor(const Place& place, const at::Tensor& like);

  const c10::Device device_;
  const int ranks_;
  const Of of_;
  const bool pins_;
  // What is pinned borrows it. The last try is noted.
  HostPinning pinning_;
  bool pinned_ = false;
  Mutex mu_;
  uint64_t reserved_ ABSL_GUARDED_BY(mu_) = 0, taken_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Block> blocks_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Place> places_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_HOST_PARTS_H_
