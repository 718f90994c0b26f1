#include "worker/models/pretrained.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/shape_text.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_fills.h"
#include "worker/collective/nccl.h"
#include "worker/models/bert.h"
#include "worker/models/decoder.h"
#include "worker/models/file_names.h"
#include "worker/models/gpt2.h"
#include "worker/models/layers.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

// The most names that lists in messages show.
constexpr size_t kNamesShown = 8;

std::shared_ptr<TextModelImpl> Construct(const ModelConfig& config, c10::ScalarType dtype,
                                         c10::Device device) {
  const ScopedWeights weights(device, dtype);
  if (const auto* const decoder = std::get_if<DecoderConfig>(&config)) {
    return std::make_shared<DecoderForCausalLMImpl>(*decoder);
  }
  if (const auto* const gpt2 = std::get_if<Gpt2Config>(&config)) {
    return std::make_shared<Gpt2LMHeadModelImpl>(*gpt2);
  }
  const auto& bert = std::get<BertConfig>(config);
  if (bert.architecture == Architecture::kBertForSequenceClassification) {
    return std::make_shared<BertForSequenceClassificationImpl>(bert);
  }
  return std::make_shared<BertForMaskedLMImpl>(bert);
}

// Returns the model's tensors in files: parameters, and a buffer that exists only for files.
NamedTensors TensorsOf(const TextModelImpl& model) {
  NamedTensors all;
  for (const auto& tensors : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& item : tensors) all.emplace_back(item.key(), item.value());
  }
  return all;
}

std::string Names(const std::vector<std::string>& names) {
  if (names.size() <= kNamesShown) return absl::StrJoin(names, ", ");
  return absl::StrCat(
      absl::StrJoin(names.begin(), names.begin() + static_cast<int64_t>(kNamesShown), ", "),
      " and ", names.size() - kNamesShown, " more");
}

absl::StatusOr<WeightFiles> OpenFor(const std::string& path, const TextModelImpl& model) {
  MUSTER_ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::Open(path));
  MUSTER_RETURN_IF_ERROR(
      files.Divide([&model](const std::string& name) { return model.PartsOf(name); }));
  return files;
}

NameInModel NamesIn(const WeightFiles& files, const TextModelImpl& model) {
  std::set<std::string> names;
  for (const WeightEntry& entry : files.entries()) names.insert(entry.tensor.name);
  return NamesOfFiles(model.config(), names);
}

// Compares files with the model that the config describes, before it takes any memory. Sets
// `*is_missing` if the files leave a tensor without a value.
absl::Status Compare(const std::string& path, const WeightFiles& files, const TextModelImpl& model,
                     bool strict, bool* is_missing) {
  const NameInModel names = NamesIn(files, model);
  std::map<std::string, at::Tensor> wanted;
  for (auto& [name, tensor] : TensorsOf(model)) wanted.emplace(name, tensor);
  std::vector<std::string> unexpected, different;
  for (const WeightEntry& entry : files.entries()) {
    const std::string& in_file = entry.tensor.name;
    const std::string name = names(in_file);
    if (name.empty()) continue;
    const auto found = wanted.find(name);
    if (found == wanted.end()) {
      unexpected.push_back(in_file);
      continue;
    }
    const std::vector<int64_t> shape(entry.tensor.shape.begin(), entry.tensor.shape.end());
    if (found->second.defined() && found->second.sizes() != at::IntArrayRef(shape)) {
      different.push_back(
          absl::StrCat(in_file, " (", ShapeText(entry.tensor.shape), " in the file, [",
                       absl::StrJoin(found->second.sizes(), ", "), "] by the config)"));
    }
    found->second = at::Tensor();
  }
  std::vector<std::string> missing;
  for (const auto& [name, tensor] : wanted) {
    if (tensor.defined() && !IsUnused(model.config(), name)) missing.push_back(name);
  }
  *is_missing = !missing.empty();
  const absl::string_view architecture = ArchitectureName(Common(model.config()).architecture);
  if (!different.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": config.json and the weights differ: ", Names(different),
                     ": take the config.json that belongs to the weights"));
  }
  if (!strict || (missing.empty() && unexpected.empty())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": not the weights of a ", architecture,
                   missing.empty() ? "" : absl::StrCat("; missing: ", Names(missing)),
                   unexpected.empty() ? "" : absl::StrCat("; unexpected: ", Names(unexpected)),
                   ". With strict = false, what is missing gets random weights"));
}

// Whether two tensors of the files have the same values. Holds one of them in memory.
absl::StatusOr<bool> AreEqual(const WeightFiles& files, const WeightEntry& a,
                              const WeightEntry& b) {
  if (files.StorageOf(a) == files.StorageOf(b)) return true;
  if (a.tensor.type != b.tensor.type || a.tensor.shape != b.tensor.shape) return false;
  std::string bytes;
  try {
    bytes.reserve(WeightFiles::BytesOf(a));
  } catch (const std::exception&) {
    return absl::ResourceExhaustedError(
        absl::StrCat(files.FileOf(a), ": tensor \"", Printable(a.tensor.name), "\": needs ",
                     WeightFiles::BytesOf(a), " bytes of memory to be compared with ",
                     Printable(b.tensor.name), ", which this process does not get"));
  }
  MUSTER_RETURN_IF_ERROR(files.Stream(a, [&bytes](absl::string_view part) {
    bytes.append(part.data(), part.size());
    return absl::OkStatus();
  }));
  absl::string_view rest = bytes;
  bool equal = true;
  MUSTER_RETURN_IF_ERROR(files.Stream(b, [&](absl::string_view part) {
    equal = equal && absl::ConsumePrefix(&rest, part);
    return absl::OkStatus();
  }));
  return equal;
}

absl::Status CheckTiedHead(const std::string& path, const WeightFiles& files,
                           const TextModelImpl& model) {
  for (const auto& [head_name, tied_to] : TiedHeads(model.config())) {
    const WeightEntry* const head = files.Find(head_name);
    if (head == nullptr) continue;
    for (const WeightEntry& entry : files.entries()) {
      if (model.ParameterName(entry.tensor.name) != tied_to) continue;
      MUSTER_ASSIGN_OR_RETURN(const bool equal, AreEqual(files, *head, entry));
      if (equal) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": config.json ties ", head_name, " to ", entry.tensor.name,
          ", but the files hold different values: set \"tie_word_embeddings\" to false "
          "to use both, or remove the former"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDeviceIsThere(const c10::Device& device) {
  if (device.is_cpu() || device.is_meta()) return absl::OkStatus();
  // CUDA is loaded only when a program uses it.
  if (device.is_cuda() && VisibleGpus() > 0) MUSTER_RETURN_IF_ERROR(LoadCuda());
  const int count = c10::impl::hasDeviceGuardImpl(device.type())
                        ? c10::impl::VirtualGuardImpl(device.type()).deviceCount()
                        : 0;
  if (std::max<int>(device.index(), 0) < count) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("device ", device.str(), " does not exist: this process sees ",
                   count == 0 ? "none" : absl::StrCat(count), " of its kind; use the CPU"));
}

// Runs `code`, which allocates memory for all tensors of `model`.
absl::Status OnHost(const std::string& path, const TextModelImpl& model, c10::ScalarType dtype,
                    absl::FunctionRef<void()> code) {
  uint64_t bytes = 0, most = 0;
  std::string largest;
  for (const auto& item : model.named_parameters()) {
    const uint64_t its = item.value().nbytes();
    bytes += its;
    if (its > most) largest = item.key();
    most = std::max(most, its);
  }
  return WithMemory(absl::StrCat(path, ": the model as ", c10::toString(dtype), " "), bytes,
                    absl::StrCat("the largest tensor is ", largest, " of ", most,
                                 " bytes. A smaller dtype, weights that stay in their files "
                                 "(load_offloaded_causal_lm), or a machine with more memory"),
                    code);
}

absl::StatusOr<TextModel> Load(const std::string& path, const LoadPretrainedOptions& options,
                               LoadedWeights* report) {
  MUSTER_RETURN_IF_ERROR(CheckDeviceIsThere(options.device));
  if (options.device.is_meta()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": a model on the meta device has no memory for the weights: make an empty one"));
  }
  MUSTER_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(path, options.config));
  bool is_missing = false;
  const auto empty = Construct(config, options.dtype, c10::kMeta);
  MUSTER_ASSIGN_OR_RETURN(const WeightFiles files, OpenFor(path, *empty));
  MUSTER_RETURN_IF_ERROR(Compare(path, files, *empty, options.strict, &is_missing));
  MUSTER_RETURN_IF_ERROR(CheckTiedHead(path, files, *empty));
  std::shared_ptr<TextModelImpl> constructed;
  MUSTER_RETURN_IF_ERROR(OnHost(path, *empty, options.dtype, [&] {
    constructed = Construct(config, options.dtype, options.device);
  }));
  TextModel model(std::move(constructed));
  if (is_missing) model->InitWeights();
  const NamedTensors tensors = TensorsOf(*model);
  MUSTER_ASSIGN_OR_RETURN(
      MatchedEntries matched,
      MatchEntries(files, tensors, {.strict = false, .rename = NamesIn(files, *model)}));
  const at::NoGradGuard no_grad;
  WeightFills fills(files);
  for (const MatchedWeight& match : matched.matches) {
    const WeightEntry& entry = files.entries()[match.from];
    at::Tensor target = tensors[match.target].second;
    if (IsFillable(entry, target)) {
      fills.Add({.from = &entry, .to = target});
      continue;
    }
    MUSTER_RETURN_IF_ERROR(fills.MakeBefore(target));
    MUSTER_ASSIGN_OR_RETURN(const at::Tensor weight, ReadWeight(files, entry));
    target.copy_(weight);
  }
  MUSTER_RETURN_IF_ERROR(fills.Make());
  // An unused tensor has a value anyway.
  std::erase_if(matched.report.missing,
                [&config](const std::string& name) { return IsUnused(config, name); });
  if (report != nullptr) *report = std::move(matched.report);
  model->eval();
  return model;
}

// Returns torch's name of a type, as in config.json.
std::string TypeName(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kBFloat16:
      return "bfloat16";
    case c10::kHalf:
      return "float16";
    case c10::kDouble:
      return "float64";
    default:
      return "float32";
  }
}

// A program that loads a whole model ignores tensors that config.json does not describe, and would
// compute the model as it was before its adapters were trained.
absl::Status CheckNoAdapters(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (!absl::StrContains(name, ".lora_")) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the model has adapters (", name,
        "), which are no part of a whole model: merge them (MergeLora), or save them alone "
        "(SaveLora)"));
  }
  return absl::OkStatus();
}

}  // namespace

TextModel MakeModel(const ModelConfig& config, c10::ScalarType dtype, c10::Device device) {
  ThrowIfError(ValidateConfig(config));
  TextModel model(Construct(config, dtype, device));
  model->InitWeights();
  return model;
}

TextModel MakeEmptyModel(const ModelConfig& config, c10::ScalarType dtype) {
  ThrowIfError(ValidateConfig(config));
  TextModel model(Construct(config, dtype, c10::Device(c10::kMeta)));
  model->eval();
  return model;
}

absl::StatusOr<TextModel> LoadPretrained(const std::string& path,
                                         const LoadPretrainedOptions& options,
                                         LoadedWeights* report) {
  absl::StatusOr<TextModel> model = absl::UnknownError("");
  MUSTER_RETURN_IF_ERROR(Guard([&] { model = Load(path, options, report); }));
  return model;
}

absl::StatusOr<CausalLm> LoadCausalLm(const std::string& path, const LoadPretrainedOptions& options,
                                      LoadedWeights* report) {
  MUSTER_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(path, options.config));
  if (std::holds_alternative<BertConfig>(config)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a ",
                                                   ArchitectureName(Common(config).architecture),
                                                   " does not predict the next token"));
  }
  MUSTER_ASSIGN_OR_RETURN(const TextModel model, LoadPretrained(path, options, report));
  return CausalLm(std::dynamic_pointer_cast<CausalLmImpl>(model.ptr()));
}

absl::StatusOr<NameInModel> NamesInFiles(const std::string& path, const TextModelImpl& model) {
  MUSTER_ASSIGN_OR_RETURN(const WeightFiles files, OpenFor(path, model));
  bool is_missing = false;
  MUSTER_RETURN_IF_ERROR(Compare(path, files, model, /*strict=*/false, &is_missing));
  MUSTER_RETURN_IF_ERROR(CheckTiedHead(path, files, model));
  return NamesIn(files, model);
}

absl::Status SaveConfig(const TextModelImpl& model, const std::string& dir) {
  const NamedTensors tensors = TensorsOf(model);
  MUSTER_RETURN_IF_ERROR(CheckNoAdapters(tensors));
  MUSTER_RETURN_IF_ERROR(MakeDirectories(dir));
  ModelConfig config = model.config();
  if (!tensors.empty()) Common(config).dtype = TypeName(tensors[0].second.scalar_type());
  return WriteFileAtomically(absl::StrCat(dir, "/config.json"), ToJson(config));
}

absl::Status SavePretrained(const TextModelImpl& model, const std::string& dir,
                            int64_t max_shard_bytes) {
  // Weights are written first: a folder without config.json is no model.
  return Guard([&] {
    const NamedTensors tensors = TensorsOf(model);
    ThrowIfError(CheckNoAdapters(tensors));
    ThrowIfError(SaveModelFiles(dir, tensors, max_shard_bytes));
    ThrowIfError(SaveConfig(model, dir));
  });
}

}  // namespace muster::models
