#ifndef MUSTER_WORKER_CHECKPOINT_PICKLED_TENSORS_H_
#define MUSTER_WORKER_CHECKPOINT_PICKLED_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/safetensors_format.h"

namespace muster {

// A tensor that a pickle of torch.save describes: a view of a storage, whose bytes are elsewhere.
struct PickledTensor {
  // The keys of nested dictionaries and positions in lists, joined by dots.
  std::string name = "";
  // The name of the storage, and its length.
  std::string storage = "";
  uint64_t storage_bytes = 0;
  SafetensorsType type = SafetensorsType::kU8;
  // The offset of the first element, in elements.
  uint64_t offset = 0;
  std::vector<uint64_t> shape = {};
  // In elements; one for each dimension.
  std::vector<uint64_t> strides = {};
  // From the first element to the end of the last one; 0 for a tensor without elements.
  uint64_t extent_bytes = 0;
};

// Reads the pickle of a torch.save file (data.pkl in it) without running anything that it names.
//
// A pickle is a program: it may name any function of Python and have it called. This reader builds
// dictionaries, lists, tuples, sets, numbers, texts and views of dense tensors, and knows only the
// names that torch.save writes for those; it refuses a file with any other name, which the error
// gives. Supports protocols 2 to 5. The value must be a dictionary, a list or a tuple; items that
// are not tensors are left out.
//
// Tensors come in the order of the file; each lies inside its storage. Pure, without recursion;
// memory is bounded by the pickle's size and by fixed limits. Errors: INVALID_ARGUMENT "SOURCE:
// byte N: why".
absl::StatusOr<std::vector<PickledTensor>> ParsePickledTensors(absl::string_view pickle,
                                                               absl::string_view source);

// Larger pickles are refused; a model of 100,000 tensors needs some 15 MB.
inline constexpr uint64_t kMaxPickleBytes = uint64_t{128} << 20;

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_PICKLED_TENSORS_H_
