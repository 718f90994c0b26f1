#ifndef MUSTER_CHECKPOINT_H_
#define MUSTER_CHECKPOINT_H_

#include <map>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace muster {

// Returns the tensors of a safetensors file by name, on the CPU. Throws a c10::Error that names the
// file, the tensor and the error.
std::map<std::string, at::Tensor> LoadTensors(const std::string& path);

// Writes a safetensors file that other libraries can read, completely or not at all. Blocks on the
// disk. Errors: INVALID_ARGUMENT naming the tensor, ALREADY_EXISTS (`path` is a file of a
// checkpoint), RESOURCE_EXHAUSTED, PERMISSION_DENIED.
absl::Status SaveTensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

}  // namespace muster

#endif  // MUSTER_CHECKPOINT_H_
