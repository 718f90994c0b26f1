#ifndef MUSTER_OFFLOAD_H_
#define MUSTER_OFFLOAD_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "c10/core/ScalarType.h"
#include "torch/nn/module.h"
#include "worker/bigmodel/offloaded_weights.h"
#include "worker/models/model_config.h"
#include "worker/models/text_model.h"

// Models that are larger than memory: their weights stay in their files. See docs/bigmodel.md.
namespace muster {

// The parameters and buffers of a module on the CPU get their values from the files at `path`,
// whenever an operator uses them; whatever memory they had is freed. The rules and errors are those
// of OffloadedWeights in worker/bigmodel/offloaded_weights.h. Keep the result as long as the model.
absl::StatusOr<std::unique_ptr<OffloadedWeights>> disk_offload(torch::nn::Module& model,
                                                               const std::string& path,
                                                               const OffloadOptions& options = {});

// A model of the Hub that never has all of its weights in memory, not while it is loaded either.
struct OffloadedCausalLm {
  models::CausalLm model = nullptr;
  std::shared_ptr<OffloadedWeights> weights = nullptr;
};
absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const OffloadOptions& options = {},
    c10::ScalarType dtype = c10::kFloat, const models::ReadConfigOptions& config = {});

}  // namespace muster

#endif  // MUSTER_OFFLOAD_H_
