#include "muster/internal/full_state.h"

#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "worker/collective/nested_collectives.h"
#include "worker/parallel/sharded_model.h"

namespace muster::internal {
namespace {

// The parameters of `model` that `optimizer` has: their names there by their names in the model.
std::map<std::string, std::string> NamesIn(const OptimizerHandle& optimizer,
                                           const ShardedModel& model) {
  std::map<std::string, std::string> names;
  const std::vector<at::Tensor>& parameters = optimizer.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string* const name = model.NameOf(parameters[i]);
    if (name != nullptr) names[*name] = optimizer.parameter_names()[i];
  }
  return names;
}

// "<parameter>.<slot>" is that of `parameter`, and which slot.
std::string SlotOf(const std::string& key, const std::string& parameter) {
  if (key.size() <= parameter.size() + 1 || key.compare(0, parameter.size(), parameter) != 0 ||
      key[parameter.size()] != '.') {
    return "";
  }
  const std::string slot = key.substr(parameter.size() + 1);
  return slot.find('.') == std::string::npos ? slot : "";
}

constexpr char kStep[] = "step";  // a single number, whatever the shape of the parameter

}  // namespace

FullWeights::FullWeights(ModelSlot& model, bool keep) : model_(model) {
  if (model_.sharded() == nullptr) {
    tensors_ = TensorsOf(model_.source());
    return;
  }
  std::map<std::string, at::Tensor> full;
  for (auto& [name, tensor] : model_.sharded()->FullParameters(keep)) full[name] = tensor;
  if (!keep) return;
  // In the module's order; tied weights under each of their names, as one tensor.
  for (const auto& [name, parameter] : model_.source().parameters()) {
    const at::Tensor shard = model_.sharded()->ShardOf(parameter);
    const std::string* const first = shard.defined() ? model_.sharded()->NameOf(shard) : nullptr;
    TORCH_CHECK(first != nullptr, "parameter '", name,
                "' was added to a sharded model after prepare(): complete the model first");
    tensors_.emplace_back(name, full.at(*first));
  }
  for (const auto& [name, buffer] : model_.source().buffers()) {
    tensors_.emplace_back(name, buffer.detach());
  }
}

void FullWeights::Store() const {
  if (model_.sharded() == nullptr) return;
  std::map<std::string, at::Tensor> values(tensors_.begin(), tensors_.end());
  model_.sharded()->LoadParameters(values);
}

bool IsSharded(const OptimizerHandle& optimizer, const Models& models) {
  for (const auto& model : models) {
    if (model->sharded() != nullptr && !NamesIn(optimizer, *model->sharded()).empty()) return true;
  }
  return false;
}

OptimizerState FullState(const OptimizerHandle& optimizer, const Models& models, bool keep) {
  OptimizerState state = optimizer.SaveState();
  for (const auto& model : models) {
    ShardedModel* const sharded = model->sharded();
    if (sharded == nullptr) continue;
    const std::map<std::string, std::string> names = NamesIn(optimizer, *sharded);
    if (names.empty()) continue;
    // A process whose shard of a parameter is empty knows nothing of its state.
    std::set<std::string> slots;
    std::vector<std::pair<std::string, double>> steps;
    std::map<std::string, at::Tensor> shards;
    for (const auto& [name, known_as] : names) {
      for (auto it = state.tensors.lower_bound(known_as + "."); it != state.tensors.end();) {
        if (it->first.compare(0, known_as.size() + 1, known_as + ".") != 0) break;
        const std::string slot = SlotOf(it->first, known_as);
        if (slot.empty()) {
          ++it;
          continue;
        }
        if (slot == kStep) {
          steps.emplace_back(known_as, it->second.item<double>());
        } else {
          slots.insert(slot);
          shards.emplace(it->first, it->second);
        }
        it = state.tensors.erase(it);
      }
    }
    Comm& comm = sharded->shard_comm();
    for (const auto& [known_as, step] : GatherObject(comm, steps)) {
      if (keep) {
        state.tensors[absl::StrCat(known_as, ".", kStep)] =
            at::full({}, step, at::TensorOptions().dtype(at::kFloat));
      }
    }
    std::set<std::string> all;
    for (const std::string& slot :
         GatherObject(comm, std::vector<std::string>(slots.begin(), slots.end()))) {
      all.insert(slot);
    }
    for (const std::string& slot : all) {
      const std::map<std::string, at::Tensor> full = sharded->Assemble(
          [&](const std::string& name) {
            const auto known_as = names.find(name);
            if (known_as == names.end()) return at::Tensor();
            const auto it = shards.find(absl::StrCat(known_as->second, ".", slot));
            return it == shards.end() ? at::Tensor() : it->second;
          },
          keep);
      for (const auto& [name, tensor] : full) {
        state.tensors[absl::StrCat(names.at(name), ".", slot)] = tensor;
      }
    }
  }
  return state;
}

OptimizerState LocalState(OptimizerState full, const OptimizerHandle& optimizer,
                          const Models& models) {
  for (const auto& model : models) {
    ShardedModel* const sharded = model->sharded();
    if (sharded == nullptr) continue;
    for (const auto& [name, known_as] : NamesIn(optimizer, *sharded)) {
      for (auto it = full.tensors.lower_bound(known_as + "."); it != full.tensors.end();) {
        if (it->first.compare(0, known_as.size() + 1, known_as + ".") != 0) break;
        const std::string slot = SlotOf(it->first, known_as);
        if (slot.empty()) {
          ++it;
          continue;
        }
        const bool empty = sharded->PartSize(name) == 0;
        if (slot != kStep && !empty) it->second = sharded->PartOf(name, it->second);
        it = empty ? full.tensors.erase(it) : std::next(it);
      }
    }
  }
  return full;
}

}  // namespace muster::internal
