#include "muster/internal/full_state.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/model_folder_writer.h"
#include "worker/checkpoint/optional_tensors.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/some_names.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/collective/nested_collectives.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

// Returns the slot of a key "<parameter>.<slot>" if it is one of `parameter`.
std::string SlotOf(const std::string& key, const std::string& parameter) {
  if (key.size() <= parameter.size() + 1 || key.compare(0, parameter.size(), parameter) != 0 ||
      key[parameter.size()] != '.') {
    return "";
  }
  const std::string slot = key.substr(parameter.size() + 1);
  return slot.find('.') == std::string::npos ? slot : "";
}

constexpr size_t kShownNames = 8;
constexpr char kStep[] = "step";  // a single number, whatever the shape of the parameter

}  // namespace

const std::string& FirstName(const ShardedModel& model, const std::string& name,
                             const at::Tensor& parameter) {
  const at::Tensor shard = model.ShardOf(parameter);
  const std::string* const first = shard.defined() ? model.NameOf(shard) : nullptr;
  TORCH_CHECK(first != nullptr, "parameter '", name,
              "' was added to a sharded model after prepare(): complete the model first");
  return *first;
}

at::Tensor ShapeOf(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::empty({}, at::TensorOptions().dtype(dtype)).expand(tensor.sizes());
}

FullWeights::FullWeights(ModelSlot& model, bool keep, std::exception_ptr* failure) : model_(model) {
  if (model_.sharded() == nullptr) {
    tensors_ = TensorsOf(model_.source());
    return;
  }
  std::map<std::string, at::Tensor> full;
  for (auto& [name, tensor] :
       model_.sharded()->FullParameters([&](const std::string&) { return keep; }, failure)) {
    full[name] = tensor;
  }
  if (!keep || (failure != nullptr && *failure != nullptr)) return;
  // In the module's order; tied weights appear under each of their names, as one tensor.
  for (const auto& [name, parameter] : model_.source().parameters()) {
    tensors_.emplace_back(name, full.at(FirstName(*model_.sharded(), name, parameter)));
  }
  for (const auto& [name, buffer] : model_.source().buffers()) {
    tensors_.emplace_back(name, buffer.detach());
  }
}

FullWeights::FullWeights(ModelSlot& model, const std::function<bool(const std::string&)>& keep,
                         std::exception_ptr* failure)
    : model_(model) {
  if (model.sharded() != nullptr) {
    tensors_ = model.sharded()->FullParameters(keep, failure);
  } else {
    for (const auto& [name, parameter] : WithoutSharedTensors(model.source().parameters())) {
      if (keep(name)) tensors_.emplace_back(name, parameter.detach());
    }
  }
  for (const auto& [name, buffer] : model_.source().buffers()) {
    if (keep(name)) tensors_.emplace_back(name, buffer.detach());
  }
}

std::map<std::string, at::Tensor> SomeWeights(
    ModelSlot& model, const std::function<bool(const std::string& name)>& wanted, bool keep) {
  std::map<std::string, at::Tensor> tensors;
  if (model.sharded() == nullptr) {
    for (const auto& [name, tensor] : TensorsOf(model.source())) {
      if (wanted(name)) tensors.emplace(name, tensor);
    }
    return tensors;
  }
  // Tied weights have several names; the sharded model knows only the first.
  std::map<std::string, std::vector<std::string>> names;
  for (const auto& [name, parameter] : model.source().parameters()) {
    names[FirstName(*model.sharded(), name, parameter)].push_back(name);
  }
  const auto any_wanted = [&](const std::string& first) {
    const auto of_first = names.find(first);
    return of_first != names.end() &&
           std::any_of(of_first->second.begin(), of_first->second.end(), wanted);
  };
  for (const auto& [first, tensor] : model.sharded()->SomeParameters(any_wanted, keep)) {
    for (const std::string& name : names.at(first)) {
      if (wanted(name)) tensors.emplace(name, tensor);
    }
  }
  if (!keep) return tensors;
  for (const auto& [name, buffer] : model.source().buffers()) {
    if (wanted(name)) tensors.emplace(name, buffer.detach());
  }
  return tensors;
}

namespace {

absl::StatusOr<SafetensorsEntry> EntryOf(const std::string& name, at::IntArrayRef shape,
                                         at::ScalarType dtype) {
  const absl::StatusOr<SafetensorsType> type = ToSafetensorsType(dtype);
  if (!type.ok()) {
    return absl::Status(type.status().code(),
                        absl::StrCat("tensor \"", name, "\": ", type.status().message()));
  }
  return SafetensorsEntry{.name = name, .type = *type, .shape = {shape.begin(), shape.end()}};
}

// The tensors in the files of a sharded model, in its order.
absl::StatusOr<std::vector<SafetensorsEntry>> EntriesOf(ModelSlot& model) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, parameter] : model.source().parameters()) {
    if (FirstName(*model.sharded(), name, parameter) != name) continue;
    const at::Tensor shard = model.sharded()->ShardOf(parameter);
    MUSTER_ASSIGN_OR_RETURN(SafetensorsEntry entry,
                            EntryOf(name, parameter.sizes(), shard.scalar_type()));
    entries.push_back(std::move(entry));
  }
  for (const auto& [name, buffer] : WithoutSharedTensors(model.source().buffers())) {
    MUSTER_ASSIGN_OR_RETURN(SafetensorsEntry entry,
                            EntryOf(name, buffer.sizes(), buffer.scalar_type()));
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace

absl::Status SaveWholeModel(ModelSlot& model, bool writes, const std::string& directory,
                            int64_t max_shard_bytes) {
  if (model.sharded() == nullptr) {
    if (!writes) return absl::OkStatus();
    return Guard([&] {
      ThrowIfError(SaveModelFiles(directory, TensorsOf(model.source()), max_shard_bytes));
    });
  }
  // A process that cannot write continues: the others are in the same exchange.
  std::unique_ptr<ModelFolderWriter> writer;
  absl::Status status;
  if (writes) {
    status = Guard([&] {
      const absl::StatusOr<std::vector<SafetensorsEntry>> entries = EntriesOf(model);
      ThrowIfError(entries.status());
      auto begun = ModelFolderWriter::Begin(directory, *entries, max_shard_bytes);
      ThrowIfError(begun.status());
      writer = *std::move(begun);
    });
  }
  const auto write = [&](const std::string& name, const at::Tensor& value) {
    if (!writes || !status.ok()) return;
    status = Guard([&] { ThrowIfError(WriteTensor(*writer, name, value)); });
  };
  model.sharded()->VisitFullParameters(write);
  for (const auto& [name, buffer] : WithoutSharedTensors(model.source().buffers())) {
    write(name, buffer);
  }
  if (writes && status.ok()) status = writer->Finish();
  return status;
}

DividedModel DivideModel(ModelSlot& model, int ranks) {
  DividedModel divided;
  std::vector<SizedTensor> sizes;
  const auto parameters = model.source().parameters();
  if (model.sharded() == nullptr) {
    for (const auto& [name, parameter] : WithoutSharedTensors(parameters)) {
      sizes.push_back({name, static_cast<int64_t>(parameter.nbytes())});
    }
  } else {
    for (const auto& [name, parameter] : parameters) {
      if (FirstName(*model.sharded(), name, parameter) != name) continue;
      const at::Tensor shard = model.sharded()->ShardOf(parameter);
      sizes.push_back({name, static_cast<int64_t>(shard.element_size()) * parameter.numel()});
    }
  }
  for (const SizedTensor& tensor : sizes) divided.bytes += static_cast<uint64_t>(tensor.bytes);
  divided.files = DivideTensors(sizes, ranks);
  // A tensor with several names is written under the first, which may be a parameter's.
  std::set<std::string> firsts;
  if (model.sharded() == nullptr) {
    for (const auto& [name, tensor] : WithoutSharedTensors(TensorsOf(model.source()))) {
      firsts.insert(name);
    }
  }
  for (const auto& [name, buffer] : WithoutSharedTensors(model.source().buffers())) {
    if (model.sharded() == nullptr && firsts.count(name) == 0) continue;
    // The first file is that of rank 0, if there is one.
    if (divided.files.empty()) divided.files.emplace_back();
    divided.files[0].tensors.push_back(name);
    divided.bytes += static_cast<uint64_t>(buffer.nbytes());
  }
  return divided;
}

bool IsSharded(const OptimizerHandle& optimizer, const Models& models) {
  for (const auto& model : models) {
    if (model->sharded() != nullptr && !NamesIn(optimizer, *model).empty()) return true;
  }
  return false;
}

std::map<std::string, std::string> NamesIn(const OptimizerHandle& optimizer, ModelSlot& model) {
  std::map<const void*, std::string> known;  // of an unsharded model
  if (model.sharded() == nullptr) {
    for (const auto& [name, parameter] : WithoutSharedTensors(model.source().parameters())) {
      known.emplace(parameter.unsafeGetTensorImpl(), name);
    }
  }
  std::map<std::string, std::string> names;
  const std::vector<at::Tensor>& parameters = optimizer.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string* name = nullptr;
    if (model.sharded() != nullptr) {
      name = model.sharded()->NameOf(parameters[i]);
    } else if (const auto it = known.find(parameters[i].unsafeGetTensorImpl()); it != known.end()) {
      name = &it->second;
    }
    if (name != nullptr) names[*name] = optimizer.parameter_names()[i];
  }
  return names;
}

std::string DescribeParameters(const OptimizerHandle& optimizer, const Models& models) {
  std::string lines;
  for (size_t m = 0; m < models.size(); ++m) {
    for (const auto& [name, known_as] : NamesIn(optimizer, *models[m])) {
      absl::StrAppend(&lines, known_as, "\t", m, "\t", name, "\n");
    }
  }
  return lines;
}

void CheckParameters(const std::string& description, const std::string& file,
                     const OptimizerHandle& optimizer, const Models& models) {
  // By all names, because the first name of a tied parameter may have been another one.
  std::vector<std::unordered_map<std::string, const void*>> by_name;
  std::map<std::string, std::pair<const void*, std::string>> here;  // by names in the state
  for (const auto& model : models) {
    auto& tensors = by_name.emplace_back();
    for (const auto& [name, parameter] : model->source().parameters()) {
      tensors.emplace(name, parameter.unsafeGetTensorImpl());
    }
    for (const auto& [name, known_as] : NamesIn(optimizer, *model)) {
      if (const auto it = tensors.find(name); it != tensors.end()) {
        here[known_as] = {it->second, name};
      }
    }
  }
  for (const absl::string_view line : absl::StrSplit(description, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> fields = absl::StrSplit(line, '\t');
    size_t model = 0;
    if (fields.size() != 3 || !absl::SimpleAtoi(fields[1], &model) || model >= by_name.size()) {
      continue;
    }
    const auto saved = by_name[model].find(fields[2]);
    const auto now = here.find(fields[0]);
    if (saved == by_name[model].end() || now == here.end()) continue;
    TORCH_CHECK(saved->second == now->second.first, file, " has the state of parameter ", fields[0],
                " of the optimizer, which was '", fields[2], "' of model ", model, " and is '",
                now->second.second,
                "' here: give the optimizer its parameters in the order of the run that saved it, "
                "e.g. that of model->parameters(), not that of a hash table");
  }
}

std::map<std::string, at::Tensor> TakeStateOf(const std::string& parameter, OptimizerState* state) {
  std::map<std::string, at::Tensor> taken;
  const std::string prefix = parameter + ".";
  for (auto it = state->tensors.lower_bound(prefix); it != state->tensors.end();) {
    if (it->first.compare(0, prefix.size(), prefix) != 0) break;
    if (SlotOf(it->first, parameter).empty()) {
      ++it;
      continue;
    }
    taken.emplace(it->first, it->second);
    it = state->tensors.erase(it);
  }
  return taken;
}

namespace {

// (collective) What the ranks that have shards agree on: the steps of the parameters, in the order
// of `names` (-1: no rank has one), and in `slots` the slots that any rank has.
std::vector<double> AgreeOnState(Comm& comm, const std::vector<double>& steps,
                                 const std::set<std::string>& mine, StateSlots* slots) {
  // A rank whose shards are empty has no slots, so a slot counts if any rank has it, or has one
  // that is not known yet.
  const size_t known = slots->names.size();
  at::Tensor facts = at::full({static_cast<int64_t>(steps.size() + known + 1)}, 0.0,
                              at::TensorOptions().dtype(at::kDouble));
  double* const fact = facts.mutable_data_ptr<double>();
  std::copy(steps.begin(), steps.end(), fact);
  double* at = fact + steps.size();
  for (const std::string& name : slots->names) *at++ = static_cast<double>(mine.count(name));
  *at = slots->known &&
                std::includes(slots->names.begin(), slots->names.end(), mine.begin(), mine.end())
            ? 0
            : 1;
  comm.AllReduce(facts, ReduceOp::kMax);
  const double* const agreed = facts.const_data_ptr<double>();
  std::vector<double> all(agreed, agreed + steps.size());
  const double* const flags = agreed + steps.size();
  const bool right =
      flags[known] == 0 && std::all_of(flags, flags + known, [](double has) { return has != 0; });
  if (!right) {
    slots->names.clear();
    for (const std::string& name :
         GatherObject(comm, std::vector<std::string>(mine.begin(), mine.end()))) {
      slots->names.insert(name);
    }
    slots->known = true;
  }
  return all;
}

}  // namespace

OptimizerState FullState(const OptimizerHandle& optimizer, const Models& models,
                         const std::function<bool(ModelSlot& model, const std::string& name)>& keep,
                         const std::function<StateSlots*(size_t model)>& slots,
                         std::exception_ptr* failure) {
  OptimizerState state;
  try {
    state = optimizer.SaveState();
  } catch (...) {
    // This process continues, because the others are in the same exchanges.
    if (*failure == nullptr) *failure = std::current_exception();
  }
  for (size_t m = 0; m < models.size(); ++m) {
    ModelSlot& model = *models[m];
    ShardedModel* const sharded = model.sharded();
    if (sharded == nullptr) continue;
    const std::map<std::string, std::string> names = NamesIn(optimizer, model);
    if (names.empty()) continue;
    // A process whose shard of a parameter is empty knows nothing of its state.
    std::set<std::string> mine;
    std::vector<double> steps;  // by the model's names
    std::map<std::string, at::Tensor> shards;
    for (const auto& [name, known_as] : names) {
      steps.push_back(-1);
      for (const auto& [key, tensor] : TakeStateOf(known_as, &state)) {
        const std::string slot = SlotOf(key, known_as);
        if (slot == kStep) {
          steps.back() = tensor.item<double>();
        } else {
          mine.insert(slot);
          shards.emplace(key, tensor);
        }
      }
    }
    StateSlots* const all = slots(m);
    steps = AgreeOnState(sharded->shard_comm(), steps, mine, all);
    size_t at = 0;
    for (const auto& [name, known_as] : names) {
      const double step = steps[at++];
      if (step < 0 || !keep(model, name)) continue;
      state.tensors[absl::StrCat(known_as, ".", kStep)] =
          at::full({}, step, at::TensorOptions().dtype(at::kFloat));
    }
    for (const std::string& slot : all->names) {
      const std::map<std::string, at::Tensor> full = sharded->Assemble(
          [&](const std::string& name) {
            const auto known_as = names.find(name);
            if (known_as == names.end()) return at::Tensor();
            const auto it = shards.find(absl::StrCat(known_as->second, ".", slot));
            return it == shards.end() ? at::Tensor() : it->second;
          },
          [&](const std::string& name) { return keep(model, name); }, failure);
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
    for (const auto& [name, known_as] : NamesIn(optimizer, *model)) {
      for (auto it = full.tensors.lower_bound(known_as + "."); it != full.tensors.end();) {
        if (it->first.compare(0, known_as.size() + 1, known_as + ".") != 0) break;
        const std::string slot = SlotOf(it->first, known_as);
        if (slot.empty()) {
          ++it;
          continue;
        }
        // Give it memory of its own, because the mapping of the file ends.
        const bool empty = sharded->PartSize(name) == 0;
        if (!empty)
          it->second = slot == kStep ? it->second.clone() : sharded->KeptPartOf(name, it->second);
        it = empty ? full.tensors.erase(it) : std::next(it);
      }
    }
  }
  return full;
}

namespace {

uint64_t CountOf(const SafetensorsEntry& entry) {
  uint64_t count = 1;
  for (const uint64_t size : entry.shape) count *= size;
  return count;
}

}  // namespace

FileRange RangeOf(const SafetensorsHeader& header, const SafetensorsEntry& entry,
                  std::pair<int64_t, int64_t> elements) {
  const uint64_t data = 8 + header.header_bytes + entry.begin;
  const uint64_t all = entry.end - entry.begin;
  const uint64_t count = CountOf(entry);
  const uint64_t each = count == 0 ? 0 : all / count;
  return {.begin = data + each * static_cast<uint64_t>(elements.first),
          .end = data + each * static_cast<uint64_t>(elements.second)};
}

FileRange AllOf(const SafetensorsHeader& header, const SafetensorsEntry& entry) {
  return RangeOf(header, entry, {0, static_cast<int64_t>(CountOf(entry))});
}

std::function<std::vector<FileRange>(const SafetensorsHeader&)> LocalRanges(
    const OptimizerHandle& optimizer, const Models& models) {
  std::map<std::string, std::pair<ShardedModel*, std::string>> known;
  for (const auto& model : models) {
    if (model->sharded() == nullptr) continue;
    for (auto& [name, known_as] : NamesIn(optimizer, *model)) {
      known[known_as] = {model->sharded(), name};
    }
  }
  return [known = std::move(known)](const SafetensorsHeader& header) {
    std::vector<FileRange> ranges = {{.begin = 0, .end = 8 + header.header_bytes}};
    for (const SafetensorsEntry& entry : header.tensors) {
      const size_t dot = entry.name.rfind('.');
      const auto it =
          dot == std::string::npos ? known.end() : known.find(entry.name.substr(0, dot));
      if (it == known.end() || entry.name.substr(dot + 1) == kStep) {
        ranges.push_back(AllOf(header, entry));
        continue;
      }
      const auto& [model, name] = it->second;
      ranges.push_back(RangeOf(header, entry, model->PartRange(name)));
    }
    return ranges;
  };
}

std::map<std::string, std::string> KeysOf(const DividedObject& object, ModelSlot& model) {
  std::map<std::string, std::string> keys;
  for (const auto& unit : model.sharded()->units()) {
    for (const ShardUnit::Slice& slice : unit->slices()) {
      keys.emplace(object.KeyOf(slice.name), slice.name);
    }
  }
  return keys;
}

std::function<std::vector<FileRange>(const SafetensorsHeader&)> RangesOfParts(
    ModelSlot& model, std::map<std::string, std::string> keys) {
  const ShardedModel* const sharded = model.sharded();
  return [sharded, keys = std::move(keys)](const SafetensorsHeader& header) {
    std::vector<FileRange> ranges = {{.begin = 0, .end = 8 + header.header_bytes}};
    for (const SafetensorsEntry& entry : header.tensors) {
      const auto it = keys.find(entry.name);
      if (it == keys.end()) {
        ranges.push_back(AllOf(header, entry));
        continue;
      }
      // Tensors that do not fit are refused later, because of their shape.
      const auto count = static_cast<int64_t>(CountOf(entry));
      const auto [first, last] = sharded->PartRange(it->second);
      ranges.push_back(RangeOf(header, entry, {std::min(first, count), std::min(last, count)}));
    }
    return ranges;
  };
}

void CopyScalars(const StateDict& from, StateDict* to) {
  for (const auto& [name, scalar] : from.scalars()) {
    if (const auto* const flag = std::get_if<bool>(&scalar)) to->SetBool(name, *flag);
    if (const auto* const number = std::get_if<int64_t>(&scalar)) to->SetInt(name, *number);
    if (const auto* const number = std::get_if<double>(&scalar)) to->SetDouble(name, *number);
    if (const auto* const text = std::get_if<std::string>(&scalar)) to->SetText(name, *text);
  }
}

void TakeParts(ModelSlot& model, const std::map<std::string, std::string>& keys,
               const StateDict& file, StateDict* parts) {
  std::map<std::string, std::vector<int64_t>> sizes;
  for (const auto& unit : model.sharded()->units()) {
    for (const ShardUnit::Slice& slice : unit->slices()) sizes.emplace(slice.name, slice.sizes);
  }
  CopyScalars(file, parts);
  for (const auto& [key, tensor] : file.tensors()) {
    const auto it = keys.find(key);
    if (it == keys.end()) {
      parts->SetTensor(key, tensor.clone());
      continue;
    }
    TORCH_CHECK(tensor.sizes() == at::IntArrayRef(sizes.at(it->second)), "'", key, "' has shape ",
                tensor.sizes(), ", and parameter '", it->second, "' has shape ",
                at::IntArrayRef(sizes.at(it->second)));
    parts->SetTensor(key, model.sharded()->KeptPartOf(it->second, tensor));
  }
}

NamedTensors WantedOf(ModelSlot& model, const NamedTensors& weights, NamedTensors tensors,
                      const LoadWeightsOptions& options) {
  const torch::nn::Module* const module = model.source().module();
  if (module == nullptr) return tensors;
  std::vector<std::string> names;
  for (const auto& [name, unused] : weights) names.push_back(name);
  RemoveOptional(*module, NamesInModel(names, options.prefix, options.rename), &tensors);
  return tensors;
}

void CheckWholeWeights(ModelSlot& model,
                       const std::vector<std::pair<std::string, at::Tensor>>& weights,
                       const std::string& what, bool allow_missing) {
  std::map<std::string, at::Tensor> shapes;  // tied weights are one tensor
  NamedTensors wanted;
  for (const auto& [name, parameter] : model.source().parameters()) {
    const std::string& first = FirstName(*model.sharded(), name, parameter);
    const at::Tensor shard = model.sharded()->ShardOf(parameter);
    wanted.emplace_back(
        name, shapes.emplace(first, ShapeOf(parameter, shard.scalar_type())).first->second);
  }
  for (const auto& [name, buffer] : model.source().buffers()) {
    wanted.emplace_back(name, buffer.detach());
  }
  ThrowIfError(LoadTensors(weights, WantedOf(model, weights, std::move(wanted)), what,
                           {.allow_missing = allow_missing, .shapes_only = true}));
}

LoadedShards::LoadedShards(ModelSlot& model) : model_(model), buffers_(model.source().buffers()) {
  for (const auto& [name, parameter] : model.source().parameters()) parameters_[name] = parameter;
}

std::vector<FileRange> LoadedShards::Ranges(const SafetensorsHeader& header) const {
  std::vector<FileRange> ranges = {{.begin = 0, .end = 8 + header.header_bytes}};
  for (const SafetensorsEntry& entry : header.tensors) {
    const auto parameter = parameters_.find(entry.name);
    if (parameter == parameters_.end()) {
      ranges.push_back(AllOf(header, entry));
    } else if (const at::IntArrayRef sizes = parameter->second.sizes();
               std::equal(entry.shape.begin(), entry.shape.end(), sizes.begin(), sizes.end(),
                          [](uint64_t a, int64_t b) { return a == static_cast<uint64_t>(b); })) {
      const std::string& first = FirstName(*model_.sharded(), entry.name, parameter->second);
      ranges.push_back(RangeOf(header, entry, model_.sharded()->PartRange(first)));
    }
  }
  return ranges;
}

void LoadedShards::Take(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    found_.emplace_back(name, ShapeOf(tensor, tensor.scalar_type()));
    const auto parameter = parameters_.find(name);
    if (parameter == parameters_.end()) {
      // Buffers, and tensors that Check() refuses.
      for (const auto& [own, buffer] : buffers_) {
        if (own == name) loaded_buffers_.emplace_back(name, tensor.clone());
      }
    } else if (tensor.sizes() == parameter->second.sizes()) {
      const std::string& first = FirstName(*model_.sharded(), name, parameter->second);
      at::Tensor part = model_.sharded()->KeptPartOf(first, tensor);
      const auto [known, is_new] = parts_.try_emplace(first, part);
      if (is_new) {
        names_of_parts_[first] = name;
        continue;
      }
      const absl::StatusOr<bool> is_same = AreSameWeights(
          absl::StrCat("tensor \"", Printable(name), "\": "), names_of_parts_.at(first),
          known->second, part, model_.sharded()->ShardOf(parameter->second).scalar_type());
      ThrowIfError(is_same.status());
      if (!*is_same) {
        tied_differently_.push_back(absl::StrCat(name, " (the same tensor as ",
                                                 names_of_parts_.at(first),
                                                 " here, but another one in the file)"));
      }
    }
  }
}

void LoadedShards::Check(const std::string& what) const {
  CheckWholeWeights(model_, found_, what, /*allow_missing=*/false);
  NamedTensors buffers;
  for (const auto& [name, buffer] : buffers_) buffers.emplace_back(name, buffer.detach());
  ThrowIfError(
      LoadTensors(loaded_buffers_, buffers, what, {.allow_missing = true, .check_only = true}));
  if (tied_differently_.empty()) return;
  ThrowIfError(absl::InvalidArgumentError(
      absl::StrCat(what, ": the tensors do not fit this model: different: ",
                   SomeNames(tied_differently_, kShownNames))));
}

void LoadedShards::Store() const {
  model_.sharded()->LoadParts(parts_,
                              [](const auto& copies) { ThrowIfError(CopyTensors(copies)); });
  NamedTensors targets;
  for (const auto& [name, buffer] : buffers_) targets.emplace_back(name, buffer.detach());
  ThrowIfError(LoadTensors(loaded_buffers_, targets, "buffers",
                           {.allow_missing = true, .values_checked = true}));
}

}  // namespace muster::internal
