#ifndef MUSTER_WORKER_TRAIN_AUTOCAST_H_
#define MUSTER_WORKER_TRAIN_AUTOCAST_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "worker/nested/nested.h"

namespace muster {

enum class MixedPrecision { kNo, kFp16, kBf16 };

// Parses "no", "fp16" or "bf16". Throws c10::Error for anything else; fp8 is refused by name.
MixedPrecision ParseMixedPrecision(absl::string_view text);
const char* MixedPrecisionName(MixedPrecision precision);

// Throws c10::Error unless forward passes on `device` can run in `precision`. CPU and CUDA support
// all of them. fp16 on a CPU really runs in fp16, with loss scaling, although it is slow there; it
// never silently becomes fp32.
void CheckMixedPrecision(MixedPrecision precision, c10::DeviceType device);

// Whether gradients need a GradScaler: the range of fp16 is too small for them.
inline bool NeedsGradScaler(MixedPrecision precision) { return precision == MixedPrecision::kFp16; }

struct AutocastOptions {
  bool enabled = true;
  // Keep the low-precision copies of weights until the outermost guard ends.
  bool cache_enabled = true;
};

// While it lives, runs this thread's operations in low precision where LibTorch's lists call that
// safe; with kNo or `enabled` false it switches autocast off. Put it around the forward pass and
// the loss, not around the backward pass. Guards nest; each restores what it found. Not movable.
class AutocastGuard {
 public:
  AutocastGuard(MixedPrecision precision, c10::DeviceType device,
                const AutocastOptions& options = {});
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const c10::DeviceType device_;
  const bool was_enabled_;
  const at::ScalarType old_dtype_;
  const bool old_cache_;
};

// Returns `output` with its fp16 and bf16 tensors converted to fp32 (differentiable), as a prepared
// model does under mixed precision.
template <typename T>
T ConvertToFp32(const T& output) {
  return MapTensors(output, [](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const at::ScalarType type = tensor.scalar_type();
    return type == at::kHalf || type == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
  });
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_AUTOCAST_H_
