#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_MATCH_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_MATCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "c10/core/ScalarType.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_loader.h"

namespace muster {

// Weights that a caller reads, of which it may need only a part: what is known without values.
struct WeightShapes {
  std::string where;  // for messages
  std::vector<StoredTensor> tensors;
  // Whether the bytes of two of them are the same, were they of type `type`. Asked for two that the
  // model has as one tensor, in an order that depends on nothing else.
  std::function<absl::StatusOr<bool>(size_t first, size_t second, at::ScalarType type)> are_equal;
};

// What LoadWeights would copy where, by numbers in weights.tensors. Targets may be on the meta
// device. Errors: as LoadWeights, and those of are_equal.
absl::StatusOr<MatchedEntries> MatchShapes(const WeightShapes& weights, const NamedTensors& targets,
                                           const LoadWeightsOptions& options = {});

bool SameShape(const std::vector<uint64_t>& stored, at::IntArrayRef sizes);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_MATCH_H_
