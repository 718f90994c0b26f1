#ifndef MUSTER_WORKER_CHECKPOINT_TORCH_FILE_H_
#define MUSTER_WORKER_CHECKPOINT_TORCH_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/byte_source.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster {

// The place of a tensor in a file.
struct StoredTensor {
  std::string name = "";
  SafetensorsType type = SafetensorsType::kU8;
  std::vector<uint64_t> shape = {};
  // In elements, one for each dimension; empty for a contiguous tensor.
  std::vector<uint64_t> strides = {};
  // Range in the file, from the first element to the end of the last one.
  uint64_t begin = 0;
  uint64_t extent_bytes = 0;
};

// Whether a file that begins with these bytes (16 are enough) was written by torch.save, in any of
// its formats, rather than by safetensors.
bool LooksLikeTorchFile(absl::string_view beginning);

// Returns the tensors of a file that torch.save wrote (pytorch_model.bin, *.pt, *.pth), in its
// order, without executing anything (pickled_tensors.h). Files from before PyTorch 1.6, TorchScript
// archives and big-endian files are refused with an error that names the kind. Blocks on the disk.
// Errors: INVALID_ARGUMENT naming the file; DATA_LOSS naming the tensor whose bytes are missing.
absl::StatusOr<std::vector<StoredTensor>> ReadTorchFile(const ByteSource& file);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TORCH_FILE_H_
