#include "muster/offloaded_models.h"

#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "worker/models/pretrained.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

absl::Status CheckBudget(const std::string& path, const models::TextModelImpl& model,
                         const OffloadedLmOptions& options) {
  std::string largest;
  uint64_t most = 0;
  for (const auto& item : model.named_parameters()) {
    const std::string* const device = FindDevice(options.device_map, item.key());
    if (device == nullptr || *device != "disk" || item.value().nbytes() <= most) continue;
    largest = item.key();
    most = item.value().nbytes();
  }
  if (most <= options.budget_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", largest, " is ", HumanBytes(static_cast<int64_t>(most)),
                   ", and budget_bytes is ", HumanBytes(static_cast<int64_t>(options.budget_bytes)),
                   ": a tensor is never divided, so that the budget must hold the largest one; "
                   "raise it, or place ",
                   largest, " on \"cpu\""));
}

}  // namespace

absl::StatusOr<OffloadedCausalLm> load_causal_lm_offloaded(const std::string& path,
                                                           const OffloadedLmOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const models::ModelConfig config,
                          models::ReadModelConfig(path, options.config));
  if (std::holds_alternative<models::BertConfig>(config)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a ", models::ArchitectureName(models::Common(config).architecture),
                     " does not predict the next token"));
  }
  OffloadedCausalLm loaded;
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    loaded.model = models::CausalLm(std::dynamic_pointer_cast<models::CausalLmImpl>(
        models::MakeEmptyModel(config, options.dtype).ptr()));
  }));
  MUSTER_RETURN_IF_ERROR(CheckBudget(path, *loaded.model, options));
  LoadCheckpointOptions load;
  load.weights.rename = [names = loaded.model.ptr()](const std::string& name) {
    return names->ParameterName(name);
  };
  load.dispatch.ring_bytes = options.budget_bytes;
  load.dispatch.prefetch = options.prefetch;
  MUSTER_ASSIGN_OR_RETURN(loaded.weights,
                          LoadCheckpointAndDispatch(*loaded.model, path, options.device_map, load));
  return loaded;
}

}  // namespace muster
