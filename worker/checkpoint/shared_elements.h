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

// How a message goes on behind the name of such a tensor.
inline constexpr absl::string_view kElementsReplaced =
    "shares memory here with a tensor that has other values of the same elements in the file";

// Whether a tensor of a model has memory for its elements: parameters of sharded and offloaded
// models have it only while they are used.
bool HasMemory(const at::Tensor& tensor);

// Equal for names of one tensor (the same memory, type, sizes, strides and conj/neg bits), and
// different for all other tensors that live.
std::string TensorIdentity(const at::Tensor& tensor);

// Which of `targets`, tensors of a model on any device, would not keep their values if each got
// those that `read` returns for its place: others, with which they share elements by views of any
// strides, get other ones. Reads those alone whose memory overlaps, each twice, and writes to no
// target. No two targets may be the same view. Memory: that of one group of overlapping targets,
// and of one value. Errors: those of `read`; RESOURCE_EXHAUSTED, which `what` begins.
absl::StatusOr<std::vector<size_t>> ElementsReplaced(
    absl::string_view what, const NamedTensors& targets,
    absl::FunctionRef<absl::StatusOr<at::Tensor>(size_t place)> read);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SHARED_ELEMENTS_H_
