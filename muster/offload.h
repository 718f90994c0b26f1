#ifndef MUSTER_OFFLOAD_H_
#define MUSTER_OFFLOAD_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "c10/core/ScalarType.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/models/model_config.h"
#include "worker/models/text_model.h"

// Models of text that are larger than memory: their weights stay in the files of their folder. For
// any other module see muster/bigmodel.h, and docs/bigmodel.md for both.
//
//   auto loaded = muster::load_offloaded_causal_lm("Llama-3.1-8B", {.memory_bytes = 4ull << 30});
//   if (!loaded.ok()) return loaded.status();
//   auto out = muster::generate(loaded->model, ids);
namespace muster {

struct OffloadOptions {
  // Most bytes of offloaded weights that are in memory at once. The largest tensor must fit; room
  // for several lets the next ones be read while one computes.
  uint64_t memory_bytes = uint64_t{2} << 30;
  // Reads weights before they are used.
  bool prefetch = true;
  // "cpu": loaded as a whole, besides `memory_bytes`; "disk": offloaded. By default all is.
  DeviceEntries device_map = {{"", "disk"}};
};

struct OffloadedCausalLm {
  models::CausalLm model = nullptr;
  // Keep it as long as the model is used: without it, uses of the model throw.
  DispatchedModel weights = {};
};

// A model that predicts the next token, never whole in memory, not while it is loaded either. It
// says what the model that is loaded whole as `dtype` says, to the last bit. For inference: an
// operator that would need a gradient of an offloaded weight throws. Blocks on the disk for the
// headers, and for weights that are not offloaded. Keep the files as they are while the model is in
// use.
//
// Errors: those of load_causal_lm; INVALID_ARGUMENT that names the largest tensor if it is larger
// than `memory_bytes`.
absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const OffloadOptions& options = {},
    c10::ScalarType dtype = c10::kFloat, const models::ReadConfigOptions& config = {});

}  // namespace muster

#endif  // MUSTER_OFFLOAD_H_
