#ifndef MUSTER_WORKER_CHECKPOINT_DEVICE_UPLOADS_H_
#define MUSTER_WORKER_CHECKPOINT_DEVICE_UPLOADS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"
#include "worker/checkpoint/aligned_memory.h"

namespace muster {

// Returns how much more of a device's memory a process can allocate, in bytes, including what its
// allocator has cached; 0 if that is not known.
size_t DeviceMemoryLeft(const c10::Device& device);

// Copies of what threads read, from memory of the host to a device, which makes them on a stream of
// its own while the threads read on. The threads read into a few blocks of memory (pinned if the
// device is a GPU), each of which is used again once the copies from it are made.
//
// Thread-safe, except for Follow() and Wait(), which must run while no thread has a block.
class DeviceUploads {
 public:
  // `bytes` bytes at `offset` of a block, to be copied to `to`, memory of the device.
  struct Piece {
    size_t offset = 0;
    size_t bytes = 0;
    char* to = nullptr;
  };
  // Queues a copy on the current stream.
  using QueueCopy = std::function<void(char* to, const char* from, size_t bytes)>;

  struct Room {
    size_t block_bytes = 0;
    // The number of threads that have a block each at a time.
    int threads = 1;
    // Memory for a block is allocated when it is needed. At least one more than there are threads:
    // the blocks of threads that fail are not free before Wait(), so that others would wait for
    // them forever.
    int blocks = 2;
  };

  // The constructors throw c10::Error for fewer blocks than that.
  DeviceUploads(const c10::Device& device, const Room& room);
  // `pinning`: null if memory is not pinned. Borrowed.
  DeviceUploads(const c10::Device& device, const Room& room, QueueCopy queue,
                const HostPinning* pinning);
  DeviceUploads(const DeviceUploads&) = delete;
  DeviceUploads& operator=(const DeviceUploads&) = delete;
  // Waits as Wait() does.
  ~DeviceUploads();

  const c10::Device& device() const { return device_; }
  size_t block_bytes() const { return room_.block_bytes; }
  // How many threads may call Take() and Queue().
  int threads() const { return room_.threads; }

  // Makes later copies begin after the work that the current stream of the calling thread has now,
  // and so after the last use of memory that was freed and is written again. Throws c10::Error if
  // the device has failed.
  void Follow();

  // Take() and Queue() make the device the current one of the calling thread, for good: if they
  // restored the previous device after each call, a library would allocate its memory on that one.

  // Returns a block to read into, aligned for direct I/O, which belongs to the calling thread until
  // it is queued. Waits for the device while all blocks are queued. Errors: RESOURCE_EXHAUSTED
  // without memory; INTERNAL if the device has failed.
  absl::StatusOr<char*> Take();

  // Queues the copies from a block of Take(), which no longer belongs to the caller. Errors:
  // INTERNAL if the device has failed; Wait() then returns it, too.
  absl::Status Queue(const char* block, absl::Span<const Piece> pieces);

  // Returns when all queued copies are made: their source and target may be freed then. All blocks
  // are free, also those of threads that failed. INTERNAL if the device has failed since the last
  // call.
  absl::Status Wait();

 private:
  struct Block {
    AlignedMemory memory;
    std::unique_ptr<c10::Event> copied;  // null: nothing was queued
  };

  void SetDeviceOfThisThread() const;
  // Returns a new block, with memory.
  absl::StatusOr<Block*> Make();
  static bool IsCopied(const Block& block);

  const c10::Device device_;
  const Room room_;
  const QueueCopy queue_;
  const HostPinning* const pinning_;
  const c10::Stream stream_;
  Mutex mu_;
  CondVar changed_;
  std::vector<std::unique_ptr<Block>> blocks_ ABSL_GUARDED_BY(mu_);
  size_t being_made_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Block*> idle_ ABSL_GUARDED_BY(mu_);
  std::deque<Block*> queued_ ABSL_GUARDED_BY(mu_);  // in the order in which they are copied
  std::map<const char*, Block*> taken_ ABSL_GUARDED_BY(mu_);
  // Copies were queued whose end no event reports.
  bool untold_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DEVICE_UPLOADS_H_
