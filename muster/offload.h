#ifndef MUSTER_OFFLOAD_H_
#define MUSTER_OFFLOAD_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "muster/bigmodel.h"
#include "worker/models/model_config.h"
#include "worker/models/text_model.h"

// Models of the Hub that are larger than memory. See docs/bigmodel.md.
namespace muster {

struct OffloadedCausalLm {
  models::CausalLm model = nullptr;
  // Where its weights are. The model must not be used without it.
  std::shared_ptr<DispatchedModel> weights = nullptr;
};

// A model from its folder that never has all of its weights in memory, not while it is loaded
// either: load_checkpoint_and_dispatch for models::LoadCausalLm. In evaluation mode, its weights in
// options.dtype (float32 by default). With {{"", "disk"}} the weights stay in their files, and at
// most options.ring_bytes of them are in memory. options.prefix, options.rename and options.parts
// are the model's.
absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const DeviceMapChoice& device_map = DeviceEntries{{"", "disk"}},
    const BigModelOptions& options = {}, const models::ReadConfigOptions& config = {});

}  // namespace muster

#endif  // MUSTER_OFFLOAD_H_
