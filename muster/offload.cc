#include "muster/offload.h"

#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/models/pretrained.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

absl::Status CheckMemory(const std::string& path, const models::TextModelImpl& model,
                         const OffloadOptions& options) {
  std::string largest;
  uint64_t most = 0;
  for (const auto& item : model.named_parameters()) {
    const std::string* const device = FindDevice(options.device_map, item.key());
    if (device == nullptr || *device != "disk" || item.value().nbytes() <= most) continue;
    largest = item.key();
    most = item.value().nbytes();
  }
  if (most <= options.memory_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", largest, " is ", HumanBytes(static_cast<int64_t>(most)),
                   " and memory_bytes is ", HumanBytes(static_cast<int64_t>(options.memory_bytes)),
                   ": a tensor is never divided, and the memory must hold the largest one; "
                   "raise it, or place ",
                   largest, " on \"cpu\""));
}

}  // namespace

absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const OffloadOptions& options, c10::ScalarType dtype,
    const models::ReadConfigOptions& config) {
  MUSTER_ASSIGN_OR_RETURN(const models::ModelConfig read, models::ReadModelConfig(path, config));
  if (std::holds_alternative<models::BertConfig>(read)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a ", models::ArchitectureName(models::Common(read).architecture),
                     " does not predict the next token"));
  }
  OffloadedCausalLm loaded;
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    loaded.model = models::CausalLm(
        std::dynamic_pointer_cast<models::CausalLmImpl>(models::MakeEmptyModel(read, dtype).ptr()));
  }));
  MUSTER_RETURN_IF_ERROR(CheckMemory(path, *loaded.model, options));
  LoadCheckpointOptions load;
  load.weights.rename = [&](const std::string& name) { return loaded.model->ParameterName(name); };
  load.dispatch.ring_bytes = options.memory_bytes;
  load.dispatch.prefetch = options.prefetch;
  MUSTER_ASSIGN_OR_RETURN(loaded.weights,
                          LoadCheckpointAndDispatch(*loaded.model, path, options.device_map, load));
  return loaded;
}

}  // namespace muster
