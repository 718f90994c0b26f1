#ifndef MUSTER_WORKER_TRAIN_ACTIVATION_STORE_H_
#define MUSTER_WORKER_TRAIN_ACTIVATION_STORE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/Device.h"
#include "worker/parallel/part_store.h"
#include "worker/train/device_windows.h"

namespace muster {

// Keeps the inputs of checkpointed blocks between the forward pass and the backward pass: in a
// file, or, for a GPU's, in the memory of the CPU.
//
//   forward    block 0    | block 1     | block 2    | ...
//   thread                | writes 0's  | writes 1's | ...
//   backward                    ... block 2     | block 1     | block 0
//   thread                      ... | reads 1's | reads 0's   |
//
// A thread writes behind the forward pass and reads ahead of the backward pass, always the group
// before the one that is used. Copies of at most kPendingBytes, or of one tensor, wait to be
// written: Park() waits before it makes one more. Get() throws the errors of the disk.
//
// For a device: the device itself copies to the host's pinned memory and back, on separate streams
// (DeviceWindows), from a copy on the device, since the program may write to the tensor. Copies of
// two groups are on the device while they are transferred, and in the backward pass the tensors of
// one group ahead; the device waits for data that has not arrived, and the host only for a file.
// Thread-safe.
class ActivationStore {
 public:
  static constexpr uint64_t kPendingBytes = uint64_t{64} << 20;

  // A tensor in the store. It is forgotten when nothing refers to it any more.
  class Parked;

  // `file`: null: in the memory of the CPU, pinned; tensors on the CPU stay where they are.
  explicit ActivationStore(std::unique_ptr<PartStore> file);
  // Ends the thread; parked tensors can no longer be retrieved.
  ~ActivationStore();
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;

  // Groups are read ahead in the opposite order.
  uint64_t NewGroup();

  // Copies `tensor`, or returns null for one that stays where it is: integers, less than a page, a
  // view with gaps, or one with the negative bit. The same tensor is parked only once.
  std::shared_ptr<Parked> Park(const at::Tensor& tensor, uint64_t group);

  // Returns the tensor: the same values, strides, type and device. Do not write to it. Throws
  // c10::Error if the disk failed.
  at::Tensor Get(const std::shared_ptr<Parked>& parked);

  // Begins to read, or to copy to its device, the group before this one. Call it when the backward
  // pass of this group has begun.
  void ReadAhead(uint64_t group);

  // For tests: waits until the thread has nothing to do; and the bytes of the file, the number of
  // tensors in memory, because they are not written yet or are read ahead, and the number of
  // entries by which the store remembers them.
  void WaitUntilIdle();
  uint64_t bytes_reserved() const;
  int64_t tensors_in_memory() const;
  size_t records() const;

 private:
  struct Shared;
  static constexpr size_t kLeastRecords = 128;  // fewer are not worth a search

  // A tensor that is being copied from a device.
  struct Leaving {
    uint64_t group;
    std::unique_ptr<DeviceWindows::Window> window;
  };

  std::shared_ptr<Parked> Copy(const at::Tensor& tensor, uint64_t group);
  DeviceWindows& CopiesOf(const c10::Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes the device copy `values` back to the original device.
  std::unique_ptr<DeviceWindows::Window> Fetch(const Parked& parked, const at::Tensor& values)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetWhatIsGone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Enqueue(std::shared_ptr<Parked> parked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();

  const std::shared_ptr<Shared> shared_;
  mutable Mutex mu_;
  CondVar changed_;
  // The tensors to be written or, if written already, to be read. The first one is under way.
  std::deque<std::shared_ptr<Parked>> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t pending_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, std::vector<std::weak_ptr<Parked>>> groups_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<Parked>> ahead_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<const void*, std::weak_ptr<Parked>> by_tensor_ ABSL_GUARDED_BY(mu_);
  size_t forget_at_ ABSL_GUARDED_BY(mu_) = kLeastRecords;  // the number of records
  uint64_t next_group_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<DeviceWindows>> copies_ ABSL_GUARDED_BY(mu_);  // one for each device
  std::deque<Leaving> leaving_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool frees_ ABSL_GUARDED_BY(mu_) = false;  // the thread is freeing what it has written
  std::thread thread_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACTIVATION_STORE_H_
