#include "muster/internal/parameter_sets.h"

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "c10/util/StringUtil.h"
#include "muster/internal/backward_watch.h"
#include "worker/parallel/sharded_model.h"

namespace muster::internal {

std::unordered_set<const void*> SetOf(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> set;
  for (const at::Tensor& tensor : tensors) set.insert(tensor.unsafeGetTensorImpl());
  return set;
}

std::string NameOf(const at::Tensor& parameter, size_t index,
                   const std::vector<std::shared_ptr<ModelSlot>>& models) {
  for (const auto& model : models) {
    const std::string* const sharded =
        model->sharded() == nullptr ? nullptr : model->sharded()->NameOf(parameter);
    if (sharded != nullptr) return absl::StrCat("'", *sharded, "'");
    for (const auto& [name, tensor] : model->source().parameters()) {
      if (tensor.is_same(parameter)) return absl::StrCat("'", name, "'");
    }
  }
  return c10::str("number ", index, " of the optimizer, of shape ", parameter.sizes(), ",");
}

at::Tensor AtOptimizer(ModelSlot& model, const at::Tensor& parameter) {
  const at::Tensor shard =
      model.sharded() == nullptr ? at::Tensor() : model.sharded()->ShardOf(parameter);
  return shard.defined() ? shard : parameter;
}

bool HoldsNothing(const at::Tensor& grad) {
  // A gradient that was zeroed in place counts as gone, too.
  return !grad.defined() || (grad.layout() == at::kStrided && !grad.any().item<bool>());
}

std::unordered_map<const void*, bool> AddedTo(const std::vector<std::shared_ptr<ModelSlot>>& models,
                                              int64_t since) {
  std::unordered_map<const void*, bool> added;
  for (const auto& model : models) {
    if (model->watch() == nullptr) continue;
    for (const auto& seen : model->watch()->all()) {
      bool& one = added[AtOptimizer(*model, seen->parameter).unsafeGetTensorImpl()];
      one = one || seen->pass > since || seen->plain;
    }
  }
  return added;
}

}  // namespace muster::internal
