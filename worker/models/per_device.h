#ifndef MUSTER_WORKER_MODELS_PER_DEVICE_H_
#define MUSTER_WORKER_MODELS_PER_DEVICE_H_

#include <unordered_map>
#include <utility>

#include "ATen/core/Tensor.h"

namespace muster::models {

// Tensors that all layers of a pass need, such as masks, for layers on several GPUs: each GPU gets
// one copy per pass. (Operators would copy them once for each layer under c10::InferenceMode; see
// worker/bigmodel/divided_model.h.) `Move` is a function of a T and a device that returns the T on
// that device.
template <typename T, typename Move>
class PerDevice {
 public:
  // `value` is on `device`.
  PerDevice(T value, const at::Device& device, Move move)
      : device_(device), value_(std::move(value)), move_(std::move(move)) {}

  const T& On(const at::Device& device) {
    if (device == device_) return value_;
    const auto found = copies_.find(device);
    if (found != copies_.end()) return found->second;
    return copies_.emplace(device, move_(value_, device)).first->second;
  }

 private:
  const at::Device device_;
  const T value_;
  const Move move_;
  std::unordered_map<at::Device, T> copies_;
};

// Returns the tensor on `device`, undefined if it is undefined. The host waits for the copy only
// when it reads it, on the CPU.
inline at::Tensor MovedTo(const at::Tensor& tensor, const at::Device& device) {
  if (!tensor.defined() || tensor.device() == device) return tensor;
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_PER_DEVICE_H_
