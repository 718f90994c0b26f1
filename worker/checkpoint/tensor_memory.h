#ifndef MUSTER_WORKER_CHECKPOINT_TENSOR_MEMORY_H_
#define MUSTER_WORKER_CHECKPOINT_TENSOR_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "c10/core/ScalarType.h"

namespace muster {

// Makes tensors for the contents of files. A file may claim any size: a sparse one of some
// kilobytes on the disk may claim terabytes.

// Converts the sizes (or strides) of a file to LibTorch's. INVALID_ARGUMENT if no tensor can have
// so many or so large ones; `place` begins the message, see PlaceOfTensor().
absl::StatusOr<std::vector<int64_t>> TensorSizes(const std::vector<uint64_t>& shape,
                                                 const std::string& place);

// Makes a tensor of this type on the CPU with undefined values. INVALID_ARGUMENT if the number of
// bytes overflows, RESOURCE_EXHAUSTED if this process does not get the memory.
absl::StatusOr<at::Tensor> NewTensor(const std::vector<int64_t>& sizes, at::ScalarType type,
                                     const std::string& place);

// Runs `code`, which takes `bytes` bytes of memory on the host. RESOURCE_EXHAUSTED if this process
// does not get them, "`place`needs ... `way_out`"; other exceptions of `code` pass through.
absl::Status WithMemory(const std::string& place, uint64_t bytes, absl::string_view way_out,
                        absl::FunctionRef<void()> code);

// Whether the bytes of both would be the same if both had the type `type`. They may be on a device.
bool SameBytes(const at::Tensor& first, const at::Tensor& second, at::ScalarType type);

// The same for two tensors that are to go into one tensor of a model. RESOURCE_EXHAUSTED if this
// process does not get the memory to compare them: `place` begins the message, and `other` is its
// name for `second`.
absl::StatusOr<bool> AreSameWeights(const std::string& place, absl::string_view other,
                                    const at::Tensor& first, const at::Tensor& second,
                                    at::ScalarType type);

// Returns the beginning of messages about a tensor of a file.
std::string PlaceOfTensor(absl::string_view path, absl::string_view name);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TENSOR_MEMORY_H_
