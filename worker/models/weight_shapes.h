#ifndef MUSTER_WORKER_MODELS_WEIGHT_SHAPES_H_
#define MUSTER_WORKER_MODELS_WEIGHT_SHAPES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/models/model_config.h"

namespace muster::models {

// A parameter of a model that is not constructed: its name, as in the Hub's files, and its shape.
struct WeightShape {
  std::string name = "";
  std::vector<int64_t> shape = {};
};

// Returns the parameters of MakeModel(config), in the order of registration, without a tied head.
// Without torch, for tools. Pure.
//
// Errors: those of ValidateConfig.
absl::StatusOr<std::vector<WeightShape>> WeightShapes(const ModelConfig& config);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_WEIGHT_SHAPES_H_
