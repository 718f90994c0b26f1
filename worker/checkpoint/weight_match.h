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

// The shapes, without values, of weights that a caller reads, perhaps only in part.
struct WeightShapes {
  std::string where;  // for messages
  std::vector<StoredTensor> tensors;
  // Whether the bytes of two of them would be the same if both had the type `type`. Called for two
  // that the model has as one tensor, in an order that depends on nothing else.
  std::function<absl::StatusOr<bool>(size_t first, size_t second, at::ScalarType type)> are_equal;
};

// Determines what LoadWeights would copy where, by numbers in weights.tensors. Targets may be on
// the meta device. Errors: those of LoadWeights and of are_equal.
absl::StatusOr<MatchedEntries> MatchShapes(const WeightShapes& weights, const NamedTensors& targets,
                                           const LoadWeightsOptions& options = {});

bool SameShape(const std::vector<uint64_t>& stored, at::IntArrayRef sizes);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_MATCH_H_
