#ifndef MUSTER_OFFLOAD_H_
#define MUSTER_OFFLOAD_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "muster/bigmodel.h"
#include "worker/models/model_config.h"
#include "worker/models/text_model.h"

// Hub models larger than memory. See docs/bigmodel.md.
namespace muster {

struct OffloadedCausalLm {
  models::CausalLm model = nullptr;
  // Holds the model's weights. Do not use the model without it.
  std::shared_ptr<DispatchedModel> weights = nullptr;
};

// Loads a model from its folder without ever having all of its weights in memory, not even during
// loading: load_checkpoint_and_dispatch for models::LoadCausalLm. The model is in evaluation mode,
// with weights in options.dtype (float32 by default). With {{"", "disk"}} the weights stay in their
// files, and at most options.ring_bytes of them are in memory. The model's own values replace
// options.prefix, options.rename and options.parts.
absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const DeviceMapChoice& device_map = DeviceEntries{{"", "disk"}},
    const BigModelOptions& options = {}, const models::ReadConfigOptions& config = {});

}  // namespace muster

#endif  // MUSTER_OFFLOAD_H_
