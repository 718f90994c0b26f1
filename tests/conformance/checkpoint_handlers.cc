#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/test_ranks.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/state.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

// The most prepared objects of a kind: each costs memory and time on each rank.
constexpr int64_t kMaxObjects = 8;
constexpr int64_t kMaxRanks = 8;
constexpr int64_t kMaxSaves = 16;

// An object of the program in the state.
struct Counter {
  int64_t value = 0;
  StateDict state_dict() const {
    StateDict state;
    state.SetInt("value", value);
    return state;
  }
  void load_state_dict(const StateDict& state) { value = ValueOf(state.GetInt("value")); }
};

struct Loader {
  bool shuffle = false;
  bool iterable = false;
};

// Rows 0 to 7, one after the other.
struct Rows {
  std::optional<at::Tensor> next() {
    if (at_ == 8) return std::nullopt;
    return at::full({3}, static_cast<double>(at_++));
  }
  void reset() { at_ = 0; }
  int64_t at_ = 0;
};

struct Plan {
  int64_t models = 0, optimizers = 0, schedulers = 0, registered = 0, saves = 0;
  std::string optimizer;
  std::vector<Loader> loaders;
  bool numbered = false;
  std::string folder;
};

torch::nn::Sequential Model() {
  return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4),
                               torch::nn::Linear(4, 2));
}

void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

// Runs what one rank does.
void TrainAndSave(Accelerator& accelerator, const Plan& plan) {
  using Model = AcceleratedModel<torch::nn::Sequential>;
  std::vector<Model> models;
  for (int64_t i = 0; i < plan.models; ++i) {
    models.push_back(accelerator.prepare_model(conformance::Model()));
  }
  std::deque<FusedAdamW> adamw;
  std::deque<FusedSGD> sgd;
  std::vector<AcceleratedOptimizer> optimizers;
  for (int64_t i = 0; i < plan.optimizers; ++i) {
    const std::vector<at::Tensor> parameters = models.at(i % plan.models)->parameters();
    if (plan.optimizer == "adamw") {
      FusedAdamW& fused = adamw.emplace_back(parameters, AdamWOptions{.lr = 1e-3});
      optimizers.push_back(accelerator.prepare_optimizer(fused));
    } else {
      FusedSGD& fused = sgd.emplace_back(parameters, SGDOptions{.lr = 1e-3, .momentum = 0.9});
      optimizers.push_back(accelerator.prepare_optimizer(fused));
    }
  }
  // A prepared object counts as long as it is held.
  std::vector<std::shared_ptr<void>> held;
  const auto hold = [&held](auto prepared) {
    held.push_back(std::make_shared<decltype(prepared)>(std::move(prepared)));
  };
  for (int64_t i = 0; i < plan.schedulers; ++i) {
    hold(accelerator.prepare_scheduler(optimizers.at(i % plan.optimizers), StepLR(1)));
  }
  for (const Loader& loader : plan.loaders) {
    if (loader.iterable) {
      hold(accelerator.prepare(batches(Rows(), 2)));
    } else {
      const TensorDataset rows(at::arange(24, at::kFloat).view({8, 3}));
      hold(accelerator.prepare(batches(rows, 2).shuffle(loader.shuffle)));
    }
  }
  std::vector<Counter> counters(plan.registered);
  for (Counter& counter : counters) accelerator.register_for_checkpointing(counter);

  const at::Tensor input = at::arange(12, at::kFloat).view({4, 3}).div(12);
  for (int64_t save = 0; save < plan.saves; ++save) {
    // Without an optimizer nothing is trained.
    if (plan.optimizers > 0) {
      auto scope = accelerator.accumulate();
      at::Tensor loss = at::zeros({});
      for (Model& model : models) loss = loss + model(input).mean();
      accelerator.backward(loss);
      // Two may have the same parameters.
      for (AcceleratedOptimizer& optimizer : optimizers) optimizer.step();
      for (AcceleratedOptimizer& optimizer : optimizers) optimizer.zero_grad();
    }
    Check(accelerator.save_state(plan.numbered ? "" : JoinPath(plan.folder, "ckpt")));
  }
}

// Returns what Accelerate calls the file that Muster calls `name`; nullopt for one that Accelerate
// has no file for (docs/accelerate.md). A name that is neither stays: the case fails then.
std::optional<std::string> AccelerateName(absl::string_view name, bool safe) {
  if (name == kManifestName || name == kSealName || absl::StartsWith(name, "sampler") ||
      absl::StartsWith(name, "dl_state_dict")) {
    return std::nullopt;
  }
  absl::string_view stem = name;
  if (!absl::ConsumeSuffix(&stem, ".safetensors") && !absl::ConsumeSuffix(&stem, ".json")) {
    return std::string(name);
  }
  if (absl::StartsWith(stem, "model")) {
    return safe ? std::string(name) : absl::StrCat("pytorch_", stem, ".bin");
  }
  if (absl::StartsWith(stem, "optimizer") || absl::StartsWith(stem, "scheduler")) {
    return absl::StrCat(stem, ".bin");
  }
  if (absl::StartsWith(stem, "scaler")) return absl::StrCat(stem, ".pt");
  if (absl::StartsWith(stem, "random_states_") || absl::StartsWith(stem, "custom_checkpoint_")) {
    return absl::StrCat(stem, ".pkl");
  }
  return std::string(name);
}

// Returns a text such as "tensor float32 [4, 3]".
std::string TensorText(SafetensorsType type, const std::vector<int64_t>& shape) {
  const auto name = [type]() -> std::string {
    switch (type) {
      case SafetensorsType::kF32:
        return "float32";
      case SafetensorsType::kF64:
        return "float64";
      case SafetensorsType::kF16:
        return "float16";
      case SafetensorsType::kBF16:
        return "bfloat16";
      case SafetensorsType::kI64:
        return "int64";
      case SafetensorsType::kI32:
        return "int32";
      case SafetensorsType::kU8:
        return "uint8";
      case SafetensorsType::kBool:
        return "bool";
      default:
        return std::string(SafetensorsTypeName(type));
    }
  }();
  return absl::StrCat("tensor ", name, " [", absl::StrJoin(shape, ", "), "]");
}

Json TensorsIn(const SafetensorsHeader& header) {
  Json tensors = Json::object();
  for (const SafetensorsEntry& entry : header.tensors) {
    tensors[entry.name] = TensorText(entry.type, {entry.shape.begin(), entry.shape.end()});
  }
  return tensors;
}

// Returns the names and types of what a file on the disk holds.
Json ContentsOf(const StateReader& reader, const std::string& name, bool model) {
  const std::string path = JoinPath(reader.dir(), name);
  Json tensors = Json::object();
  if (absl::EndsWith(name, ".safetensors")) {
    const SafetensorsHeader header = ValueOf(ReadSafetensorsHeader(path));
    tensors = TensorsIn(header);
    if (model) {
      return {{"format", "safetensors"},
              {"metadata", header.metadata.has_value() ? Json(*header.metadata) : Json()},
              {"tensors", std::move(tensors)}};
    }
  }
  Json scalars = Json::object();
  const StateDict state = ValueOf(reader.Read(name));
  for (const auto& [key, value] : state.scalars()) {
    static constexpr const char* kTypes[] = {"bool", "int", "float", "str"};
    scalars[key] = kTypes[value.index()];
  }
  return {{"format", absl::EndsWith(name, ".json") ? "muster-json" : "muster-safetensors"},
          {"content", {{"tensors", std::move(tensors)}, {"scalars", std::move(scalars)}}}};
}

Json SaveStateLayoutCase(const Json& in) {
  Plan plan;
  const int ranks = static_cast<int>(IntOf(in, "num_processes", 1, kMaxRanks));
  plan.models = IntOf(in, "models", 0, kMaxObjects);
  plan.optimizers = IntOf(in, "optimizers", 0, plan.models == 0 ? 0 : kMaxObjects);
  plan.schedulers = IntOf(in, "schedulers", 0, plan.optimizers == 0 ? 0 : kMaxObjects);
  plan.registered = IntOf(in, "registered", 0, kMaxObjects);
  plan.saves = IntOf(in, "saves", 0, kMaxSaves);
  plan.optimizer = in.at("optimizer").get<std::string>();
  if (plan.optimizer != "adamw" && plan.optimizer != "sgd") {
    throw std::invalid_argument("optimizer must be adamw or sgd, not " + plan.optimizer);
  }
  const Json& loaders = in.at("dataloaders");
  if (!loaders.is_array() || loaders.size() > kMaxObjects) {
    throw std::invalid_argument("dataloaders must be a list of at most 8");
  }
  AcceleratorOptions options;
  options.data_loader.data_seed = 3;
  for (const Json& loader : loaders) {
    plan.loaders.push_back(
        {.shuffle = loader.at("shuffle").get<bool>(), .iterable = loader.at("iterable")});
    if (!loader.at("seedable").get<bool>()) options.data_loader.use_seedable_sampler = false;
  }
  const bool safe = in.at("safe_serialization");
  plan.numbered = in.at("automatic_checkpoint_naming");
  if (in.at("scaler").get<bool>()) {
    options.mixed_precision = "fp16";
    // The scaler's state does not depend on it.
    options.autocast.enabled = false;
  }
  if (!in.at("total_limit").is_null()) {
    options.project.total_limit = IntOf(in, "total_limit", 0, kMaxSaves);
  }
  const TestFolder scratch;
  plan.folder = options.project.directory = scratch.path();
  RunAccelerators(ranks, options,
                  [&plan](Accelerator& accelerator) { TrainAndSave(accelerator, plan); });

  Json files = Json::array(), contents = Json::object();
  std::vector<std::string> folders;  // below scratch
  if (plan.numbered) {
    const CheckpointFolder folder(JoinPath(scratch.path(), "checkpoints"));
    for (const int64_t number : ValueOf(folder.Numbers())) {
      folders.push_back(absl::StrCat("checkpoints/checkpoint_", number));
    }
  } else if (plan.saves > 0) {
    folders.push_back("ckpt");
  }
  std::vector<std::string> names;
  for (const std::string& folder : folders) {
    const StateReader reader = ValueOf(StateReader::Open(JoinPath(scratch.path(), folder)));
    for (const std::string& name : ValueOf(ListDirectory(reader.dir()))) {
      const std::optional<std::string> theirs = AccelerateName(name, safe);
      if (!theirs.has_value()) continue;
      names.push_back(JoinPath(folder, *theirs));
      if (folder != folders.back() || !reader.Has(name)) continue;
      contents[names.back()] = ContentsOf(reader, name, absl::StartsWith(name, "model"));
    }
  }
  std::sort(names.begin(), names.end());
  return {{"files", names}, {"contents", std::move(contents)}};
}

}  // namespace

std::map<std::string, Handler> CheckpointHandlers() {
  return {{"save_state_layout", SaveStateLayoutCase}};
}

}  // namespace muster::conformance
