#ifndef MUSTER_TESTS_PARITY_CASE_TRAINING_H_
#define MUSTER_TESTS_PARITY_CASE_TRAINING_H_

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "ATen/core/Tensor.h"
#include "muster/accelerator.h"

namespace muster::parity {

// Returns the options that `in` of a golden `training` case asks for. `sharding`: no_shard, zero1,
// zero2, zero3 or hybrid.
AcceleratorOptions TrainingOptions(const nlohmann::json& in, const std::string& sharding);

struct Trained {
  nlohmann::json out;                         // the case's fields without `final_weights`
  std::map<std::string, at::Tensor> weights;  // on the main process
};

// (collective) Rebuilds the run that `in` describes and trains through the public API. Its paths
// start from `data_root`, unless they are absolute. Throws if something does not fit.
Trained TrainCase(Accelerator& accelerator, const nlohmann::json& in, const std::string& data_root);

}  // namespace muster::parity

#endif  // MUSTER_TESTS_PARITY_CASE_TRAINING_H_
