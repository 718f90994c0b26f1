#ifndef MUSTER_WORKER_TRAIN_OFFLOADED_STATE_H_
#define MUSTER_WORKER_TRAIN_OFFLOADED_STATE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/train/device_windows.h"

namespace muster {

// The tensors of an optimizer's state, in a file or in the memory of the CPU, in windows: the
// states of consecutive parameters, which are read, updated and written together. While one window
// is updated, a thread reads the next ones and writes the previous ones.
//
//   file   [ p0.exp_avg p0.exp_avg_sq p1.exp_avg ... | p7.exp_avg ... | ... ]
//            window 0                                  window 1
//
// Windows of parameters on a device are updated there: they are copied whole from the host's pinned
// memory to the device and back while the device updates the one between (DeviceWindows). Three of
// them are on the device then, or one, if it has no room for more.
//
// Not thread-safe. Errors are c10::Error.
class OffloadedState {
 public:
  static constexpr uint64_t kWindowBytes = uint64_t{64} << 20;

  // `file`: null: in the CPU's memory. Windows have at least one parameter and, if they have more,
  // at most `window_bytes` bytes; 0: kWindowBytes.
  explicit OffloadedState(std::shared_ptr<ScratchFile> file, uint64_t window_bytes = 0);

  // For tests: sets the window size of states that are made later without a size.
  static void SetDefaultWindowBytes(uint64_t bytes);

  bool in_file() const { return file_ != nullptr; }

  // Whether parameter `i` has room: Add() was called for it.
  bool Has(size_t i) const { return i < places_.size() && places_[i].window >= 0; }
  // Whether parameter `i` has values: Fill() was called for it.
  bool IsFilled(size_t i) const { return Has(i) && places_[i].filled; }
  void Fill(size_t i) { places_[i].filled = true; }
  // Whether the state kept for parameter `i` has the type of `tensor`, and as many elements.
  bool Fits(size_t i, const at::Tensor& tensor) const;

  // Makes room for `slots` tensors like each of the parameters [first, first + likes.size()), all
  // of one group. `likes` are dense. `devices`: where they are updated, one for each of them;
  // empty: on the CPU. For parameters in pages (paged_storage.h), a window holds those of one page.
  // `by_memory`: a window holds only parameters in the same memory. Throws, with nothing changed,
  // if the disk is full or the memory cannot be allocated.
  void Add(size_t first, const std::vector<at::Tensor>& likes, size_t slots,
           const std::vector<c10::Device>& devices = {}, bool by_memory = false);

  // Where ForWindows puts the states.
  enum class Place { kOnTheirDevices, kOnTheHost };

  // Calls `update(first, last)` for the windows in [first, last) with a parameter for which
  // `wanted(i)`, in order, except that those of one page come after each other; the tensors of
  // their states are at `place`. On a device, `update` queues operations on the current stream, and
  // later operations on that stream come after all copies; the host waits for none of them, except
  // with a file. Throws what `update` throws, the error of the file, and an error if a device has
  // no room for a window. With a file the states are lost then, and every further call throws until
  // Renew().
  void ForWindows(size_t first, size_t last, const std::function<bool(size_t i)>& wanted,
                  const std::function<void(size_t first, size_t last)>& update,
                  Place place = Place::kOnTheirDevices);

  // Inside ForWindows: tensor `slot` of the state of parameter `i`, which is in the window. Its
  // shape and strides are those of the parameter in Add().
  at::Tensor Slot(size_t i, size_t slot) const;

  // At any time, on the host: the same, in memory that is read from the file on access; without a
  // file, the state itself, after a wait for the copies from devices. `maps` keeps the mappings,
  // for further calls before the next step.
  using Maps = std::map<int64_t, std::shared_ptr<char>>;
  at::Tensor Mapped(size_t i, size_t slot, Maps* maps) const;

  // All states are about to be written again: forgets their values, and the failure of the file.
  void Renew();
  // Why the states are lost; OK if they are not.
  const absl::Status& failed() const { return failed_; }

 private:
  struct Kept {
    int64_t window = -1;
    std::vector<uint64_t> offsets;  // in the window, one for each slot
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;
    bool filled = false;
  };
  struct Window {
    size_t first, last;  // parameters
    uint64_t bytes;
    c10::Device device;            // on which the window is updated
    uint64_t at = 0;               // in the file, or in the memory of all windows that were added
                                   // together
    const void* page = nullptr;    // that the parameters are in; null: none
    std::shared_ptr<char> memory;  // without a file
    bool written = false;          // the window has values
  };
  // The windows of a call of ForWindows that are on their devices.
  class OnDevices;
  using UpdateRange = std::function<void(size_t first, size_t last)>;

  at::Tensor TensorIn(char* window, const c10::Device& device, const Kept& kept, size_t slot,
                      const std::shared_ptr<char>& keep) const;
  DeviceWindows& CopiesOf(const c10::Device& device);
  void WaitForCopies() const;
  // Updates a window that is in `memory`, on `device`.
  void Update(size_t window, char* memory, const c10::Device& device, const UpdateRange& update);
  // Which parameters of the window have states.
  std::vector<bool> FilledIn(size_t window) const;
  void SetFilledIn(size_t window, const std::vector<bool>& filled);
  absl::Status Read(size_t window, size_t buffer);
  absl::Status Write(size_t window, size_t buffer);
  // Processes the windows, of a file, one after the other: with a thread for the transfers, or
  // without.
  absl::Status Stream(const std::vector<size_t>& windows, OnDevices& there,
                      const UpdateRange& update);
  absl::Status TakeInTurn(const std::vector<size_t>& windows, OnDevices& there,
                          const UpdateRange& update);

  const std::shared_ptr<ScratchFile> file_;
  const uint64_t window_bytes_;
  std::vector<Kept> places_;  // by parameter
  std::vector<Window> windows_;
  // The window that is being updated, and its memory.
  int64_t open_ = -1;
  char* open_memory_ = nullptr;
  c10::Device open_device_{c10::DeviceType::CPU};
  std::array<AlignedMemory, 3> buffers_;
  absl::Status failed_;
  // For the devices that have windows. The last member: it waits for copies to and from the memory.
  std::vector<std::unique_ptr<DeviceWindows>> copies_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OFFLOADED_STATE_H_
