#include "muster/offload.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/models/pretrained.h"
#include "worker/train/guard.h"

namespace muster {

absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const DeviceMapChoice& device_map, const BigModelOptions& options,
    const models::ReadConfigOptions& config) {
  MUSTER_ASSIGN_OR_RETURN(const models::ModelConfig read, models::ReadModelConfig(path, config));
  if (std::holds_alternative<models::BertConfig>(read)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a ", models::ArchitectureName(models::Common(read).architecture),
                     " does not predict the next token"));
  }
  OffloadedCausalLm out;
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    out.model = models::CausalLm(std::dynamic_pointer_cast<models::CausalLmImpl>(
        models::MakeEmptyModel(read, options.dtype.value_or(at::kFloat)).ptr()));
  }));
  BigModelOptions named = options;
  MUSTER_ASSIGN_OR_RETURN(named.rename, models::NamesInFiles(path, *out.model));
  named.prefix = "";
  named.parts = [&model = *out.model](const std::string& name) { return model.PartsOf(name); };
  MUSTER_ASSIGN_OR_RETURN(DispatchedModel weights,
                          load_checkpoint_and_dispatch(out.model, path, device_map, named));
  out.weights = std::make_shared<DispatchedModel>(std::move(weights));
  return out;
}

}  // namespace muster
