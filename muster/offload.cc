#include "muster/offload.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/models/pretrained.h"
#include "worker/train/guard.h"

namespace muster {

absl::StatusOr<std::unique_ptr<OffloadedWeights>> disk_offload(torch::nn::Module& model,
                                                               const std::string& path,
                                                               const OffloadOptions& options) {
  NamedTensors targets;
  for (const auto& tensors : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& item : tensors) {
      if (item.value().defined()) targets.emplace_back(item.key(), item.value());
    }
  }
  return OffloadedWeights::Create(path, targets, options);
}

absl::StatusOr<OffloadedCausalLm> load_offloaded_causal_lm(
    const std::string& path, const OffloadOptions& options, c10::ScalarType dtype,
    const models::ReadConfigOptions& config) {
  MUSTER_ASSIGN_OR_RETURN(const models::ModelConfig read, models::ReadModelConfig(path, config));
  if (std::holds_alternative<models::BertConfig>(read)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a ", models::ArchitectureName(models::Common(read).architecture),
                     " does not predict the next token"));
  }
  OffloadedCausalLm out;
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    out.model = models::CausalLm(
        std::dynamic_pointer_cast<models::CausalLmImpl>(models::MakeEmptyModel(read, dtype).ptr()));
  }));
  OffloadOptions named = options;
  if (named.rename == nullptr) {
    const models::CausalLmImpl* const names = out.model.get();
    named.rename = [names](const std::string& name) { return names->ParameterName(name); };
  }
  MUSTER_ASSIGN_OR_RETURN(out.weights, disk_offload(*out.model, path, named));
  return out;
}

}  // namespace muster
