#include "muster/internal/save_writer.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "muster/internal/failures.h"
#include "muster/internal/full_state.h"
#include "muster/internal/parameter_sets.h"
#include "muster/internal/plain_rows.h"
#include "muster/internal/slots.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/given_directory.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/shared_files.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/collective/nested_collectives.h"
#include "worker/parallel/ddp.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"

namespace muster::internal {
namespace {

// The most bytes that the tensor lists of all ranks but rank 0 may take together: the coordinator
// has room for this much of one save.
constexpr size_t kMaxListedOfOthers = 4 << 20;

// Whether hyper-parameters mean the same training: machines may round a schedule's cosine in
// different ways, which near its end is much of what is left of it.
bool AreAlike(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    if (x == y || (std::isnan(x) && std::isnan(y))) return true;
    if (!std::isfinite(x) || !std::isfinite(y)) return false;
    return std::abs(x - y) <= std::max(1e-6 * std::max(std::abs(x), std::abs(y)), 1e-12);
  });
}

// Returns the name of the first row in which the groups of an optimizer differ; empty if there is
// none.
std::string FirstDifference(const PlainState& a, const PlainState& b) {
  for (const auto& [name, row] : a) {
    const auto found = b.find(name);
    if (found == b.end() || !AreAlike(row, found->second)) return name;
  }
  for (const auto& [name, row] : b) {
    if (!a.contains(name)) return name;
  }
  return "";
}

}  // namespace

SaveWriter::SaveWriter(const Process& process, Registry& registry, LoopTracker& loops,
                       StepController& steps, const StateObjects& objects)
    : process_(process), registry_(registry), loops_(loops), steps_(steps), objects_(objects) {}

SaveWriter::~SaveWriter() = default;

absl::Status SaveWriter::Check() {
  if (absl::Status looked = Guard([&] { layout_ = LookAtLayout(process_, registry_); });
      !looked.ok()) {
    return looked;
  }
  if (absl::Status complete = CheckComplete(); !complete.ok()) return complete;
  return Guard([&] {
    for (size_t i = 0; i < objects_.objects().size(); ++i) {
      objects_.DividedModelOf(i, registry_.models());
    }
    made_ = StepsHere();
  });
}

absl::Status SaveWriter::CheckComplete() {
  for (const auto& optimizer : registry_.optimizers()) {
    const std::string why = optimizer->handle().CannotSave();
    if (!why.empty()) return absl::FailedPreconditionError(why);
  }
  if (registry_.models().empty() && registry_.stepped() && objects_.objects().empty() &&
      !objects_.has_save_hooks()) {
    return absl::FailedPreconditionError(
        "save_state would write no model, although optimizers have stepped: prepare() the model "
        "that is trained, and save before free_memory()");
  }
  if (!objects_.objects().empty() || objects_.has_save_hooks() || complete_ == layout_)
    return absl::OkStatus();
  std::unordered_set<const void*> written;
  for (const auto& model : registry_.models()) {
    for (const auto& [name, tensor] : model->source().parameters()) {
      written.insert(tensor.unsafeGetTensorImpl());
    }
    if (model->sharded() == nullptr) continue;
    for (const at::Tensor& shard : model->sharded()->shards()) {
      written.insert(shard.unsafeGetTensorImpl());
    }
  }
  for (const auto& optimizer : registry_.optimizers()) {
    const std::vector<at::Tensor>& parameters = optimizer->handle().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (written.count(parameters[i].unsafeGetTensorImpl()) > 0) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "save_state would leave out parameter ", optimizer->handle().parameter_names()[i],
          " of the optimizer (shape ", absl::StrJoin(parameters[i].sizes(), "x"),
          "), which belongs to no prepared model: prepare() its model, or save it by "
          "register_for_checkpointing()"));
    }
  }
  complete_ = layout_;
  return absl::OkStatus();
}

void SaveWriter::CompareShardedModels(const std::vector<std::string>& changes) {
  size_t at = 0;
  for (const auto& model : registry_.models()) {
    if (model->sharded() == nullptr) continue;
    std::vector<std::string> of_model;
    for (const std::string& of_rank : changes) {
      of_model.push_back(of_rank.substr(at, ShardedModel::kChangesBytes));
    }
    model->sharded()->CompareBeforeSave(of_model);
    at += ShardedModel::kChangesBytes;
  }
}

std::vector<size_t> SaveWriter::SharedOptimizers() const {
  std::unordered_set<const void*> shared;
  for (const auto& model : registry_.models()) {
    if (model->ddp() != nullptr) shared.merge(SetOf(model->ddp()->parameters()));
  }
  std::vector<size_t> numbers;
  for (size_t i = 0; i < registry_.optimizers().size(); ++i) {
    const OptimizerHandle& handle = registry_.optimizers()[i]->handle();
    const std::vector<at::Tensor>& parameters = handle.parameters();
    if (IsSharded(handle, registry_.models()) ||
        std::any_of(parameters.begin(), parameters.end(), [&shared](const at::Tensor& parameter) {
          return shared.contains(parameter.unsafeGetTensorImpl());
        })) {
      numbers.push_back(i);
    }
  }
  return numbers;
}

SaveWriter::StepsOnWire SaveWriter::StepsHere() const {
  StepsOnWire steps;
  for (const size_t i : SharedOptimizers()) {
    const OptimizerSlot& slot = *registry_.optimizers()[i];
    // JSON keeps enough digits for the same bits.
    const std::string groups = nlohmann::json(slot.handle().SaveGroups()).dump();
    steps.emplace_back(slot.tried_steps(), static_cast<int64_t>(DigestBlock(groups)));
  }
  return steps;
}

void SaveWriter::CompareSteps(const std::vector<StepsOnWire>& said) const {
  constexpr char kWhatToDo[] =
      "; load_state() makes the processes equal again. If they are meant to differ, train inside "
      "muster::LocalSGD or set options.allow_local_gradients: then the weights of rank 0 are saved";
  const auto same = [&said](const StepsOnWire& one) { return one == said[0]; };
  if (std::all_of(said.begin(), said.end(), same)) return;
  for (size_t r = 1; r < said.size(); ++r) {
    if (said[r].size() == said[0].size()) continue;
    ThrowIfError(absl::FailedPreconditionError(
        absl::StrCat("save_state: rank ", r, " has prepared ", said[r].size(),
                     " optimizers of models that all processes train, and rank 0 ", said[0].size(),
                     ": prepare the same ones on all processes")));
  }
  const std::vector<size_t> numbers = SharedOptimizers();
  for (size_t r = 1; r < said.size(); ++r) {
    for (size_t k = 0; k < said[0].size(); ++k) {
      const int64_t first = said[0][k].first, other = said[r][k].first;
      if (first == other) continue;
      ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
          "save_state: rank ", r, " is at step ", other, " of optimizer ", numbers[k],
          " and rank 0 at step ", first,
          ", so their weights differ: call optimizer.step() on all "
          "processes or on none, by a condition that is the same on all, such as one of "
          "accelerator.reduce(loss, \"mean\")",
          kWhatToDo)));
    }
  }
  // The hyper-parameters differ.
  std::vector<PlainState> mine;
  for (const size_t i : numbers) {
    mine.push_back(registry_.optimizers()[i]->handle().SaveGroups());
  }
  const auto groups = GatherObject(process_.comm(), std::make_tuple(mine));
  const auto text = [](const PlainState& rows, const std::string& name) {
    const auto found = rows.find(name);
    if (found == rows.end()) return std::string("none");
    const std::vector<double>& row = found->second;
    if (row.size() != 1) return nlohmann::json(row).dump();
    return std::isfinite(row[0]) ? nlohmann::json(row[0]).dump() : absl::StrCat(row[0]);
  };
  for (size_t r = 1; r < groups.size(); ++r) {
    for (size_t k = 0; k < numbers.size(); ++k) {
      const PlainState& first = std::get<0>(groups[0])[k];
      const PlainState& other = std::get<0>(groups[r])[k];
      const std::string name = FirstDifference(first, other);
      if (name.empty()) continue;
      const size_t dot = name.find('.');
      ThrowIfError(absl::FailedPreconditionError(
          absl::StrCat("save_state: parameter group ", name.substr(0, dot), " of optimizer ",
                       numbers[k], " has ", name.substr(dot + 1), " ", text(other, name),
                       " on rank ", r, " and ", text(first, name),
                       " on rank 0, so their weights differ: give all processes the same "
                       "options, and call step() of schedules on all of them",
                       kWhatToDo)));
    }
  }
}

absl::Status SaveWriter::Agree(const absl::Status& mine, const std::string& directory) {
  const bool fits = mine.ok() && plan_ != nullptr && plan_->layout == layout_;
  agreed_ = {
      .hooks = objects_.has_save_hooks(), .apart = steps_.trained_apart(), .same_plan = fits};
  std::string changes;  // those of all sharded models, concatenated
  for (const auto& model : registry_.models()) {
    if (model->sharded() != nullptr) changes += model->sharded()->ChangesHere();
  }
  const GivenDirectory given = FollowGivenDirectory(directory);
  const absl::Status all = Guard([&] {
    const auto said = GatherObject(
        process_.comm(), std::make_tuple(OnWire(mine), agreed_.hooks, agreed_.apart,
                                         agreed_.same_plan, static_cast<int64_t>(layout_.shared),
                                         changes, given.path, given.folder, made_));
    std::vector<StatusOnWire> statuses;
    std::vector<std::string> changed;
    std::vector<GivenDirectory> directories;
    std::vector<StepsOnWire> stepped;
    int other = 0;      // a rank that shares different models
    int different = 0;  // a rank with another number of sharded models
    for (size_t r = 0; r < said.size(); ++r) {
      const auto& [status, hooks, apart, same_plan, shared, of_models, path, folder, steps] =
          said[r];
      statuses.push_back(status);
      changed.push_back(of_models);
      directories.push_back({.path = path, .folder = folder});
      stepped.push_back(steps);
      agreed_.hooks |= hooks;
      agreed_.apart |= apart;
      agreed_.same_plan &= same_plan;
      if (shared != std::get<4>(said[0])) other = static_cast<int>(r);
      if (of_models.size() != changed[0].size()) different = static_cast<int>(r);
    }
    ThrowFirst(statuses);
    // On a shared disk, all ranks write into the folder of rank 0.
    ThrowIfError(CheckGivenAlike(
        "save_state()", directories,
        process_.own_node().has_value() ? GivenAlike::kByName : GivenAlike::kByFolder));
    // If there are hooks or ranks train apart, rank 0 writes everything.
    if (other != 0 && !agreed_.hooks && !agreed_.apart) {
      ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
          "save_state: the models that all processes write together have parameters of other "
          "names, shapes or types on rank ",
          other, " than on rank 0, or options.checkpoint.divide_above differs")));
    }
    if (different != 0) {
      ThrowIfError(absl::FailedPreconditionError(
          absl::StrCat("save_state: rank ", different,
                       " has prepared a different number of sharded models than rank 0")));
    }
    CompareShardedModels(changed);
    if (!agreed_.apart) CompareSteps(stepped);
  });
  if (!mine.ok()) return mine;
  if (!all.ok()) return all;
  agreed_.same_plan =
      agreed_.same_plan && plan_->hooks == agreed_.hooks && plan_->apart == agreed_.apart;
  if (agreed_.same_plan) ++saves_reused_;
  if (mine.ok()) file_plans_.BeginSave();
  return mine;
}

SaveWriter::PlanCounts SaveWriter::plan_counts() const {
  return {.saves_planned = saves_planned_,
          .saves_reused = saves_reused_,
          .files_planned = file_plans_.made(),
          .files_reused = file_plans_.reused()};
}

void SaveWriter::CopyParametersLater(StateWriter& writer) const {
  for (const auto& optimizer : registry_.optimizers()) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      writer.CopyLater(parameter);
    }
  }
}

void SaveWriter::ExpectBytes(StateWriter& writer, const std::vector<NamedTensors>& weights,
                             const std::vector<std::optional<OptimizerState>>& optimizers) const {
  uint64_t mine = 0, models = 0, states = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    uint64_t bytes = 0;
    for (const auto& [name, tensor] : weights[i]) bytes += tensor.nbytes();
    const bool divided = plan_->division.Divides(i);
    if (divided || process_.rank() == 0) mine += bytes;
    models += divided ? plan_->division.models[i].bytes : bytes;
  }
  bool whole = false;  // every process has all states of unsharded models
  for (size_t i = 0; i < optimizers.size(); ++i) {
    if (!optimizers[i].has_value()) continue;
    whole |= !IsSharded(registry_.optimizers()[i]->handle(), registry_.models());
    for (const auto& [name, tensor] : optimizers[i]->tensors) states += tensor.nbytes();
  }
  if (whole && models > 0) {
    states = static_cast<uint64_t>(static_cast<double>(states) * static_cast<double>(mine) /
                                   static_cast<double>(models));
  }
  writer.Expect(mine + states);
}

absl::Status SaveWriter::WriteModels(StateWriter& writer,
                                     const std::vector<NamedTensors>& weights) const {
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string name = ModelFileName(static_cast<int>(i));
    const std::vector<DividedFile>& files = plan_->division.models[i].files;
    if (files.empty()) {
      if (process_.rank() != 0) continue;
      for (const auto& [tensor, value] : WithoutSharedTensors(weights[i])) {
        plan_->Holds(name, name, tensor, value);
      }
      MUSTER_RETURN_IF_ERROR(writer.WriteModel(name, weights[i]));
      continue;
    }
    // All processes have agreed on the division, so rank 0 also knows what the others write.
    if (process_.rank() == 0) {
      VisitDividedModel(
          *registry_.models()[i], files,
          [&](size_t file, const std::string& tensor, at::ScalarType type, at::IntArrayRef shape) {
            plan_->Holds(name, PartFileName(name, file, files.size()), tensor, type, shape);
          });
    }
    std::map<std::string, at::Tensor> mine(weights[i].begin(), weights[i].end());
    for (size_t k = 0; k < files.size(); ++k) {
      if (files[k].rank != process_.rank()) continue;
      NamedTensors tensors;
      for (const std::string& tensor : files[k].tensors) {
        tensors.emplace_back(tensor, mine.at(tensor));
      }
      const std::string part = PartFileName(name, k, files.size());
      plan_->parts[part] = name;
      MUSTER_RETURN_IF_ERROR(writer.WriteModel(part, tensors));
    }
    if (process_.rank() != 0) continue;
    MUSTER_RETURN_IF_ERROR(writer.WriteText(IndexFileName(name), plan_->indexes[i]));
  }
  return absl::OkStatus();
}

absl::Status SaveWriter::WriteOptimizer(StateWriter& writer, size_t index,
                                        OptimizerState state) const {
  const auto& slot = registry_.optimizers()[index];
  const std::string name = OptimizerFileName(static_cast<int>(index));
  const std::vector<SavePlan::OptimizerPart>& parts = plan_->optimizers[index];
  // A state that is gathered from several processes is a copy already.
  const bool live = !IsSharded(slot->handle(), registry_.models());
  // Without states, the order of the parameters means nothing.
  const bool has_states = live ? !state.tensors.empty() : slot->steps() > 0;
  const auto put = [&](const std::string& key, const at::Tensor& tensor, StateDict& file) {
    file.SetTensor(key, tensor);
    if (live) writer.CopyLater(tensor);
  };
  // Every process has the whole state of an unsharded model; that of process 0 counts.
  for (size_t k = 0; k < parts.size(); ++k) {
    const std::string part = PartFileName(name, k, parts.size());
    StateDict file;
    for (const std::string& parameter : parts[k].known_as) {
      // Also take what another rank writes, so that it is not among the rest.
      const std::map<std::string, at::Tensor> taken = TakeStateOf(parameter, &state);
      const bool mine = parts[k].rank == process_.rank();
      for (const auto& [key, tensor] : taken) {
        // Only one rank reports it: another one might report by files where this one lists tensors.
        if (live ? process_.rank() == 0 : mine) plan_->Holds(name, part, key, tensor);
        if (mine) put(key, tensor, file);
      }
    }
    if (parts[k].rank != process_.rank()) continue;
    plan_->parts[part] = name;
    MUSTER_RETURN_IF_ERROR(writer.Write(part, file));
  }
  if (process_.rank() != 0) return absl::OkStatus();
  StateDict file;
  for (const auto& [key, tensor] : state.tensors) {
    plan_->Holds(name, name, key, tensor);
    put(key, tensor, file);
  }
  PutRows(state.groups, &file);
  file.SetInt("steps", slot->steps());
  if (has_states) {
    file.SetText(kParametersKey, DescribeParameters(slot->handle(), registry_.models()));
  }
  return writer.Write(name, file);
}

absl::Status SaveWriter::WriteShared(StateWriter& writer) const {
  for (size_t i = 0; i < registry_.schedulers().size(); ++i) {
    StateDict file;
    PutRows(registry_.schedulers()[i]->SaveState(), &file);
    MUSTER_RETURN_IF_ERROR(writer.Write(SchedulerFileName(i), file));
  }
  for (size_t i = 0; i < registry_.loaders().size(); ++i) {
    StateDict file;
    file.SetText("place", loops_.PlaceToSave(*registry_.loaders()[i]).ToString());
    for (const auto& [name, tensor] : registry_.loaders()[i]->StateTensors())
      file.SetTensor(name, tensor);
    MUSTER_RETURN_IF_ERROR(writer.Write(SamplerFileName(i), file));
  }
  if (steps_.scaler() != nullptr) {
    StateDict file;
    PutRows(steps_.scaler()->SaveState(), &file);
    MUSTER_RETURN_IF_ERROR(writer.Write(ScalerFileName(0), file));
  }
  return absl::OkStatus();
}

absl::Status SaveWriter::WriteRegistered(StateWriter& writer, const SaveDivision& division,
                                         size_t index, const StateDict& collected) const {
  const std::string name = CustomFileName(static_cast<int>(index));
  // For each file of the model, the tensors for its parameters are in a file of their own.
  const size_t model = *objects_.DividedModelOf(index, registry_.models());
  std::set<std::string> apart;
  if (division.Divides(model)) {
    const std::vector<DividedFile>& files = division.models[model].files;
    for (size_t k = 0; k < files.size(); ++k) {
      StateDict part;
      const std::string part_name = PartFileName(name, k, files.size());
      for (const std::string& tensor : files[k].tensors) {
        const std::string key = objects_.objects()[index].divided->KeyOf(tensor);
        apart.insert(key);
        const absl::StatusOr<at::Tensor> mine = collected.GetTensor(key);
        if (!mine.ok()) continue;
        part.SetTensor(key, *mine);
        if (files[k].rank == process_.rank()) plan_->Holds(name, part_name, key, *mine);
      }
      if (files[k].rank != process_.rank()) continue;
      plan_->parts[part_name] = name;
      MUSTER_RETURN_IF_ERROR(writer.Write(part_name, part));
    }
  }
  if (process_.rank() != 0) return absl::OkStatus();
  StateDict rest;
  CopyScalars(collected, &rest);
  for (const auto& [key, tensor] : collected.tensors()) {
    if (apart.count(key) == 0) rest.SetTensor(key, tensor);
  }
  return writer.Write(name, rest);
}

absl::Status SaveWriter::Write(StateWriter& writer) {
  writer.PlanWith(&file_plans_);
  CopyParametersLater(writer);
  const Models& models = registry_.models();
  const int rank = process_.rank();
  if (!agreed_.same_plan) {
    plan_.reset();
    plan_ = std::make_unique<SavePlan>(
        MakeSavePlan(process_, registry_, layout_, agreed_.hooks, agreed_.apart));
    ++saves_planned_;
    agreed_.same_plan = true;  // in case this save is written to a second place
  }
  plan_->BeginSave();
  const SaveDivision& division = plan_->division;
  // The first failure of this process alone; thrown only after all exchanges, in which the other
  // processes take part.
  std::exception_ptr failure;
  std::vector<NamedTensors> weights;
  for (size_t i = 0; i < models.size(); ++i) {
    if (division.Divides(i)) {
      const auto writes = [&](const std::string& name) { return division.Writes(rank, i, name); };
      weights.push_back(FullWeights(*models[i], writes, &failure).tensors());
    } else {
      weights.push_back(FullWeights(*models[i], rank == 0, &failure).tensors());
    }
  }
  const auto writes = [&](ModelSlot& model, const std::string& name) {
    const auto at = std::find_if(models.begin(), models.end(),
                                 [&](const auto& other) { return other.get() == &model; });
    return division.Writes(rank, static_cast<size_t>(at - models.begin()), name);
  };
  std::vector<std::optional<OptimizerState>> optimizers;
  for (size_t i = 0; i < registry_.optimizers().size(); ++i) {
    const OptimizerHandle& handle = registry_.optimizers()[i]->handle();
    optimizers.emplace_back();
    if (rank == 0 || division.DividesAny() || IsSharded(handle, models)) {
      optimizers.back() = FullState(
          handle, models, writes,
          [&](size_t model) {
            return &plan_->slots[{i, model}];
          },
          &failure);
    }
  }
  std::vector<std::optional<StateDict>> collected(objects_.objects().size());
  for (size_t i = 0; i < objects_.objects().size(); ++i) {
    const std::optional<size_t> model = objects_.DividedModelOf(i, registry_.models());
    if (!model.has_value()) continue;
    collected[i] = objects_.objects()[i].divided->Collect(
        [&](const std::string& name) { return division.Writes(rank, *model, name); }, &failure);
  }
  // There are no collectives from here on, so that a rank whose disk is full leaves no other
  // waiting.
  if (failure != nullptr) std::rethrow_exception(failure);
  const std::vector<int64_t> registered = objects_.Numbers();
  objects_.RunSaveHooks(weights, writer);
  objects_.CheckUnchanged(registered, "save_state()");
  ExpectBytes(writer, weights, optimizers);
  MUSTER_RETURN_IF_ERROR(WriteModels(writer, weights));
  for (size_t i = 0; i < optimizers.size(); ++i) {
    if (!optimizers[i].has_value()) continue;
    MUSTER_RETURN_IF_ERROR(WriteOptimizer(writer, i, *std::move(optimizers[i])));
  }
  if (rank == 0) MUSTER_RETURN_IF_ERROR(WriteShared(writer));
  for (size_t i = 0; i < objects_.objects().size(); ++i) {
    if (!collected[i].has_value()) continue;
    MUSTER_RETURN_IF_ERROR(WriteRegistered(writer, division, i, *collected[i]));
  }
  // Objects of the program come last: their functions may register and remove objects, also
  // themselves.
  const std::vector<StateObjects::Object> objects = objects_.objects();
  for (size_t i = 0; i < objects.size() && rank == 0; ++i) {
    if (collected[i].has_value()) continue;
    TORCH_CHECK(objects_.Has(objects[i]), "save_state(): the save function of a registered ",
                "object has removed object ", i, " before it was saved: do so before or after it");
    MUSTER_RETURN_IF_ERROR(writer.Write(CustomFileName(static_cast<int>(i)), objects[i].save()));
  }
  StateDict random;
  for (const auto& [name, tensor] : SaveRngState()) random.SetTensor(name, tensor);
  const at::Tensor before_batch = loops_.GeneratorToSave();
  if (before_batch.defined()) random.SetTensor("cpu", before_batch);
  // This is the last file of every rank. By now the rank knows which tensors the checkpoint has to
  // hold.
  {
    // Without a coordinator, or with a disk in every node, rank 0 proves that they are there from
    // what the ranks tell it about their files.
    const size_t most =
        process_.coordinator() == nullptr || process_.own_node().has_value() ? 0
        : rank == 0
            ? kMaxListedBytes
            : std::min(kMaxListedBytes, kMaxListedOfOthers / static_cast<size_t>(process_.size()));
    random.SetMetadata(kPlanKey, plan_->TakeReport(most));
  }
  return writer.Write(RandomStatesFileName(process_.rank()), random);
}

}  // namespace muster::internal
