#ifndef MUSTER_OFFLOADED_MODELS_H_
#define MUSTER_OFFLOADED_MODELS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "c10/core/ScalarType.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/models/model_config.h"
#include "worker/models/text_model.h"

// Models of text that are larger than memory: their weights stay in the files of their folder.
//
//   auto loaded = muster::load_causal_lm_offloaded("Llama-3.1-8B", {.budget_bytes = 4ull << 30});
//   if (!loaded.ok()) return loaded.status();
//   auto out = muster::generate(loaded->model, ids);
//
// See docs/bigmodel.md.
namespace muster {

struct OffloadedLmOptions {
  // Most bytes of offloaded weights that are in memory at once. The largest tensor must fit; room
  // for two blocks lets one be read while the other computes.
  uint64_t budget_bytes = uint64_t{1} << 30;
  // The weights become this type, as with load_causal_lm.
  c10::ScalarType dtype = c10::kFloat;
  // "cpu": loaded as a whole, besides the budget; "disk": offloaded. By default all is offloaded.
  DeviceEntries device_map = {{"", "disk"}};
  // Reads weights before they are used.
  bool prefetch = true;
  // How config.json is read.
  models::ReadConfigOptions config = {};
};

struct OffloadedCausalLm {
  models::CausalLm model = nullptr;
  // Keep it as long as the model is used: without it, uses of the model throw.
  DispatchedModel weights = {};
};

// A model that predicts the next token, never whole in memory, not while it is loaded either. It
// says what the model that is loaded whole says, to the last bit. For inference: an operator that
// would need a gradient of an offloaded weight throws. Reads no weights that are offloaded; blocks
// on the disk for the others. Keep the files as they are while the model is in use.
//
// Errors: those of load_causal_lm; INVALID_ARGUMENT that names the largest tensor if it is larger
// than the budget.
absl::StatusOr<OffloadedCausalLm> load_causal_lm_offloaded(const std::string& path,
                                                           const OffloadedLmOptions& options = {});

}  // namespace muster

#endif  // MUSTER_OFFLOADED_MODELS_H_
