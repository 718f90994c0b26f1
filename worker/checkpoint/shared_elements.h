#ifndef MUSTER_WORKER_CHECKPOINT_SHARED_ELEMENTS_H_
#define MUSTER_WORKER_CHECKPOINT_SHARED_ELEMENTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

// How a message continues after the name of such a tensor.
inline constexpr absl::string_view kElementsReplaced =
    "shares memory here with a tensor that has other values of the same elements in the file";

// Whether a tensor of a model has memory for its elements: parameters of sharded and offloaded
// models have it only while they are used.
bool HasMemory(const at::Tensor& tensor);

// Returns a text that is equal for names of one tensor (the same memory, type, sizes, strides and
// conj/neg bits), and different for all other tensors that exist.
std::string TensorIdentity(const at::Tensor& tensor);

// Returns those of `targets`, tensors of a model on any device, that would not keep their values if
// each got the values that `read` returns for its place, because other targets, which share
// elements with them by views of any strides, get other values. Reads only targets whose memory
// overlaps, each twice, and writes to none. No two targets may be the same view. Memory: one group
// of overlapping targets, and one value. Errors: those of `read`; RESOURCE_EXHAUSTED, which begins
// with `what`.
absl::StatusOr<std::vector<size_t>> ElementsReplaced(
    absl::string_view what, const NamedTensors& targets,
    absl::FunctionRef<absl::StatusOr<at::Tensor>(size_t place)> read);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SHARED_ELEMENTS_H_
