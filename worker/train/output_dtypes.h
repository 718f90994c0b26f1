#ifndef MUSTER_WORKER_TRAIN_OUTPUT_DTYPES_H_
#define MUSTER_WORKER_TRAIN_OUTPUT_DTYPES_H_

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/ScalarType.h"
#include "worker/nested/nested.h"

namespace torch::nn {
class Module;
}

namespace muster {

// While it lives, muster::call() of `modules` converts their results to `dtype` if autocast is on,
// as in a pass of the prepared model: in a pass of the bare module, the next module would refuse a
// dtype that its weights do not have. If several OutputDtypes name a module, the newest one counts.
// Thread-safe.
class OutputDtypes {
 public:
  OutputDtypes(std::vector<std::shared_ptr<torch::nn::Module>> modules, c10::ScalarType dtype);
  ~OutputDtypes();
  OutputDtypes(const OutputDtypes&) = delete;
  OutputDtypes& operator=(const OutputDtypes&) = delete;

 private:
  // They are kept alive, because another module at the same address would be mistaken for one of
  // them.
  const std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

// Returns the output dtype for a call of `module`, which may be null, by this thread now.
std::optional<c10::ScalarType> OutputDtypeOf(const torch::nn::Module* module);

// Returns `output` with its floating-point tensors converted to `dtype` (differentiable).
template <typename T>
T ConvertFloats(const T& output, c10::ScalarType dtype) {
  return MapTensors(output, [dtype](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype) : tensor;
  });
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OUTPUT_DTYPES_H_
