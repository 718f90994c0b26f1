#include "muster/internal/save_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "muster/internal/slots.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/optimizer_handle.h"

namespace muster::internal {
namespace {

// Hashes a tensor without its values; equal for two names of one tensor.
size_t HashOfTensor(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const void* const storage = impl.has_storage() ? impl.storage().unsafeGetStorageImpl() : nullptr;
  const at::IntArrayRef sizes = tensor.sizes();
  size_t hash =
      absl::HashOf(static_cast<const void*>(&impl), storage, static_cast<int>(tensor.scalar_type()),
                   tensor.device().index(), std::vector<int64_t>(sizes.begin(), sizes.end()));
  if (tensor.layout() != at::kStrided) return hash;
  const at::IntArrayRef strides = tensor.strides();
  return absl::HashOf(hash, tensor.storage_offset(),
                      std::vector<int64_t>(strides.begin(), strides.end()));
}

// Whether every rank may write a part of this model, which has these parameters.
bool IsDivisible(const Process& process, ModelSlot& model, const NamedTensors& parameters) {
  if (model.sharded() != nullptr) return true;
  if (model.ddp() == nullptr) return false;
  int64_t bytes = 0;
  for (const auto& [name, parameter] : parameters) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes > process.options().checkpoint.divide_above;
}

}  // namespace

void SaveDivision::Add(DividedModel model) {
  std::map<std::string, int>& ranks = writers.emplace_back();
  for (const DividedFile& file : model.files) {
    for (const std::string& tensor : file.tensors) ranks.emplace(tensor, file.rank);
  }
  models.push_back(std::move(model));
}

bool SaveDivision::DividesAny() const {
  return std::any_of(models.begin(), models.end(),
                     [](const DividedModel& model) { return !model.files.empty(); });
}

bool SaveDivision::Writes(int rank, size_t model, const std::string& name) const {
  if (!Divides(model)) return rank == 0;
  const auto found = writers[model].find(name);
  return found != writers[model].end() && found->second == rank;
}

void SavePlan::BeginSave() {
  tensors = nlohmann::json::array();
  parts = nlohmann::json::object();
  files.clear();
  listed_bytes = 0;
}

void SavePlan::Holds(const std::string& group, const std::string& file, const std::string& name,
                     at::ScalarType type, at::IntArrayRef shape) {
  // A tensor of another type is refused when it is written.
  const absl::StatusOr<SafetensorsType> known = ToSafetensorsType(type);
  if (!known.ok()) return;
  files[file].Add(name, SafetensorsTypeName(*known), shape);
  listed_bytes += group.size() + name.size() + 16 * shape.size() + 40;
  // Above the limit the list is not needed.
  if (listed_bytes > kMaxListedBytes) return;
  tensors.push_back({group, name, std::string(SafetensorsTypeName(*known)), shape.vec()});
}

void SavePlan::Holds(const std::string& group, const std::string& file, const std::string& name,
                     const at::Tensor& tensor) {
  Holds(group, file, name, tensor.scalar_type(), tensor.sizes());
}

std::string SavePlan::TakeReport(size_t most) {
  nlohmann::json report = {{"tensors", nlohmann::json::array()}, {"parts", std::move(parts)}};
  if (listed_bytes <= most) {
    report["tensors"] = std::move(tensors);
  } else {
    nlohmann::json& lists = report["files"] = nlohmann::json::object();
    for (const auto& [file, list] : files) lists[file] = list.Summary();
  }
  return report.dump();
}

SaveLayout LookAtLayout(const Process& process, const Registry& registry) {
  BlockDigester shared;
  size_t here = absl::HashOf(process.options().checkpoint.divide_above);
  for (size_t i = 0; i < registry.models().size(); ++i) {
    ModelSlot& model = *registry.models()[i];
    here = absl::HashOf(here, static_cast<const void*>(&model),
                        static_cast<const void*>(model.sharded()),
                        static_cast<const void*>(model.ddp()));
    if (model.sharded() != nullptr) {
      for (const at::Tensor& shard : model.sharded()->shards()) {
        here = absl::HashOf(here, static_cast<const void*>(shard.unsafeGetTensorImpl()));
      }
    }
    const auto parameters = model.source().parameters();
    const bool together = IsDivisible(process, model, parameters);
    if (together) shared.Update(absl::StrCat("model ", i, "\n"));
    for (const auto& [name, tensor] : parameters) {
      here = absl::HashOf(here, name, HashOfTensor(tensor));
      if (!together) continue;
      shared.Update(absl::StrCat(name, "\n", c10::toString(tensor.scalar_type()), " ",
                                 absl::StrJoin(tensor.sizes(), ","), "\n"));
    }
    for (const auto& [name, tensor] : model.source().buffers()) {
      here = absl::HashOf(here, name, HashOfTensor(tensor));
    }
  }
  for (const auto& optimizer : registry.optimizers()) {
    const OptimizerHandle& handle = optimizer->handle();
    here = absl::HashOf(here, static_cast<const void*>(optimizer.get()), handle.id(),
                        handle.parameters_version(), handle.parameter_names());
    for (const at::Tensor& parameter : handle.parameters()) {
      here = absl::HashOf(here, static_cast<const void*>(parameter.unsafeGetTensorImpl()));
    }
  }
  return {.here = here, .shared = shared.Finish()};
}

SavePlan MakeSavePlan(const Process& process, const Registry& registry, const SaveLayout& layout,
                      bool hooks, bool apart) {
  SavePlan plan{.layout = layout,
                .hooks = hooks,
                .apart = apart,
                .division = {},
                .indexes = {},
                .optimizers = {},
                .slots = {}};
  const Models& models = registry.models();
  for (size_t i = 0; i < models.size(); ++i) {
    // Hooks get whole models, on rank 0. If processes have trained apart, each has weights and
    // states of its own, and those of rank 0 count.
    ModelSlot& model = *models[i];
    const bool divide = IsDivisible(process, model, model.source().parameters()) && !plan.hooks &&
                        (model.sharded() != nullptr || !plan.apart);
    plan.division.Add(divide ? DivideModel(model, process.size()) : DividedModel());
    plan.indexes.emplace_back();
    const std::vector<DividedFile>& files = plan.division.models[i].files;
    if (files.empty()) continue;
    ShardPlan index{.files = {}, .total_bytes = plan.division.models[i].bytes, .index_name = {}};
    for (size_t k = 0; k < files.size(); ++k) {
      index.files.push_back(
          {PartFileName(ModelFileName(static_cast<int>(i)), k, files.size()), files[k].tensors});
    }
    if (process.rank() == 0) plan.indexes.back() = EncodeShardIndex(index);
  }
  for (const auto& optimizer : registry.optimizers()) {
    std::vector<SavePlan::OptimizerPart>& parts = plan.optimizers.emplace_back();
    for (size_t m = 0; m < models.size(); ++m) {
      if (!plan.division.Divides(m)) continue;
      const std::map<std::string, std::string> names = NamesIn(optimizer->handle(), *models[m]);
      if (names.empty()) continue;
      for (const DividedFile& file : plan.division.models[m].files) {
        SavePlan::OptimizerPart& part = parts.emplace_back();
        part.rank = file.rank;
        for (const std::string& tensor : file.tensors) {
          const auto found = names.find(tensor);
          if (found != names.end()) part.known_as.push_back(found->second);
        }
      }
    }
  }
  return plan;
}

void VisitDividedModel(ModelSlot& model, const std::vector<DividedFile>& files,
                       const std::function<void(size_t file, const std::string& name,
                                                at::ScalarType type, at::IntArrayRef shape)>& add) {
  std::map<std::string, std::pair<at::ScalarType, std::vector<int64_t>>> known;
  for (const auto& [name, parameter] : model.source().parameters()) {
    // The shard has the type that is saved.
    const at::Tensor& typed =
        model.sharded() == nullptr ? parameter : model.sharded()->ShardOf(parameter);
    known.try_emplace(name, typed.scalar_type(), parameter.sizes().vec());
  }
  for (const auto& [name, buffer] : model.source().buffers()) {
    known.try_emplace(name, buffer.scalar_type(), buffer.sizes().vec());
  }
  for (size_t k = 0; k < files.size(); ++k) {
    for (const std::string& name : files[k].tensors) {
      const auto& [type, shape] = known.at(name);
      add(k, name, type, shape);
    }
  }
}

}  // namespace muster::internal
