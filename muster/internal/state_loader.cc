#include "muster/internal/state_loader.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory_left.h"
#include "base/units.h"
#include "muster/internal/backward_updates.h"
#include "muster/internal/failures.h"
#include "muster/internal/model_source.h"
#include "muster/internal/parts_reader.h"
#include "muster/internal/plain_rows.h"
#include "muster/internal/save_plan.h"
#include "muster/internal/slots.h"
#include "worker/checkpoint/device_uploads.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/read_to_device.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"

namespace muster::internal {
namespace {

void CheckCount(const std::string& dir, int saved, const char* what, size_t here,
                const char* advice) {
  if (saved == static_cast<int>(here)) return;
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      dir, " holds ", saved, " ", what, "(s), but ", here, " are prepared here: ", advice)));
}

// Return the files of the i-th model, and of the i-th optimizer.
std::vector<std::string> ModelFilesIn(const StateReader& reader, size_t i) {
  absl::StatusOr<std::vector<std::string>> files =
      FilesOfModel(reader.manifest(), ModelFileName(static_cast<int>(i)));
  ThrowIfError(files.status());
  return *std::move(files);
}

std::vector<std::string> OptimizerFilesIn(const StateReader& reader, size_t i) {
  const std::string name = OptimizerFileName(static_cast<int>(i));
  absl::StatusOr<std::vector<std::string>> files = PartsOf(reader.manifest(), name);
  ThrowIfError(files.status());
  files->insert(files->begin(), name);
  return *std::move(files);
}

std::vector<std::string> RegisteredFilesIn(const StateReader& reader, size_t i) {
  const std::string name = CustomFileName(static_cast<int>(i));
  absl::StatusOr<std::vector<std::string>> files = PartsOf(reader.manifest(), name);
  ThrowIfError(files.status());
  files->insert(files->begin(), name);
  return *std::move(files);
}

int CountModels(const StateReader& reader) {
  int count = 0;
  while (!ModelFilesIn(reader, static_cast<size_t>(count)).empty()) ++count;
  return count;
}

// `uploads`: takes large tensors to the device; may be null.
StateDict ReadFile(const StateReader& reader, const std::string& name,
                   DeviceUploads* uploads = nullptr) {
  absl::StatusOr<StateDict> file =
      uploads == nullptr ? reader.Read(name) : ReadToDevice(reader, name, *uploads);
  ThrowIfError(file.status());
  return *std::move(file);
}

// A tensor that a hook has added under an existing name replaces the earlier one.
NamedTensors LastOfEach(const NamedTensors& weights) {
  std::map<std::string, at::Tensor> last;
  for (const auto& [name, tensor] : weights) last.insert_or_assign(name, tensor);
  return {last.begin(), last.end()};
}

// Loads the weights of `file`, after CheckModel(). `hooks`: they may have left tensors out, or all.
// Returns the names of tensors that are left out of a model that is loaded; "": none.
std::string LoadModel(ModelSlot& model, const NamedTensors& weights, const std::string& file,
                      bool hooks) {
  std::string missing;
  if (weights.empty() && hooks) return missing;
  if (model.sharded() != nullptr) {
    // Nothing is gathered, because the model may have no values yet. CheckModel() has looked at the
    // parts of all ranks.
    CheckpointShards shards(model, file, {.strict = !hooks});
    shards.Take(LastOfEach(weights));
    shards.SetValuesChecked();
    shards.Compare();
    shards.Store();
    return absl::StrJoin(shards.report().missing, ", ");
  }
  ThrowIfError(LoadTensors(weights, WantedOf(model, weights, TensorsOf(model.source())), file,
                           {.allow_missing = hooks, .values_checked = true, .missing = &missing}));
  return missing;
}

// Checks what LoadModel would check, without changes and without collectives.
void CheckModel(ModelSlot& model, const NamedTensors& weights, const std::string& file,
                bool hooks) {
  if (weights.empty() && hooks) return;
  if (model.sharded() != nullptr) {
    CheckWholeWeights(model, weights, file, hooks);
    // By the rules of LoadModel(), including the values of tied names in this rank's parts.
    CheckpointShards shards(model, file, {.strict = !hooks});
    shards.Take(LastOfEach(weights));
    shards.Decide({shards.Compare()});
    return;
  }
  ThrowIfError(LoadTensors(weights, WantedOf(model, weights, TensorsOf(model.source())), file,
                           {.allow_missing = hooks, .check_only = true}));
}

LoaderState PlaceOf(const StateDict& file) {
  const absl::StatusOr<std::string> place = file.GetText("place");
  ThrowIfError(place.status());
  absl::StatusOr<LoaderState> state = LoaderState::FromString(*place);
  ThrowIfError(state.status());
  return *std::move(state);
}

std::map<std::string, at::Tensor> TensorsIn(const StateDict& file) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : file.tensors()) tensors.emplace(name, tensor);
  return tensors;
}

}  // namespace

void GiveModelsOwnMemory(const Models& models) {
  for (const auto& model : models) {
    ModelSource::Named tensors = model->source().buffers();
    // A sharded model keeps parts of its parameters.
    if (model->sharded() == nullptr) {
      const ModelSource::Named parameters = model->source().parameters();
      tensors.insert(tensors.end(), parameters.begin(), parameters.end());
    }
    GiveOwnMemory(tensors);
  }
}

StateLoader::StateLoader(const Process& process, Registry& registry, LoopTracker& loops,
                         StepController& steps, const StateObjects& objects)
    : process_(process), registry_(registry), loops_(loops), steps_(steps), objects_(objects) {}

StateLoader::Scope::Scope(StateLoader& loader) : loader_(loader), replaced_(loader.replaced_) {
  ++loader_.loads_;
  for (const auto& model : loader_.registry_.models()) {
    if (model->sharded() == nullptr) continue;
    forgotten_.push_back({model, model->sharded()->ForgetFailures()});
  }
  BackwardUpdates* const updates = loader_.steps_.updates().get();
  if (updates != nullptr) updates->SetReplacing(true);
}

StateLoader::Scope::~Scope() {
  if (loader_.replaced_ == replaced_) {
    for (const Forgotten& one : forgotten_) one.model->sharded()->RestoreFailures(one.failures);
  }
  --loader_.loads_;
  BackwardUpdates* const updates = loader_.steps_.updates().get();
  if (updates != nullptr) updates->SetReplacing(loader_.loads_ > 0);
}

void StateLoader::CheckPrepared(const StateReader& reader) const {
  const auto check = [&reader](const char* what, std::string (*name)(int), size_t here) {
    CheckCount(reader.dir(), reader.Count(name), what, here,
               "prepare the same objects, in the same order, before load_state");
  };
  CheckCount(reader.dir(), CountModels(reader), "model", registry_.models().size(),
             "prepare the same objects, in the same order, before load_state");
  check("optimizer", OptimizerFileName, registry_.optimizers().size());
  check("schedule", SchedulerFileName, registry_.schedulers().size());
  // Loaders may be prepared later, as those in the body of an epoch are.
  const int saved_loaders = reader.Count(SamplerFileName);
  if (saved_loaders < static_cast<int>(registry_.loaders().size())) {
    check("loader", SamplerFileName, registry_.loaders().size());
  }
  check("registered object", CustomFileName, objects_.objects().size());
}

std::vector<NamedTensors> StateLoader::ReadWeights(const StateReader& reader, size_t models,
                                                   const std::vector<bool>& without,
                                                   DeviceUploads* uploads) const {
  std::vector<NamedTensors> weights;
  for (size_t i = 0; i < models; ++i) {
    NamedTensors& all = weights.emplace_back();
    if (without[i]) continue;
    for (const std::string& name : ModelFilesIn(reader, i)) {
      const StateDict file = ReadFile(reader, name, uploads);
      all.insert(all.end(), file.tensors().begin(), file.tensors().end());
    }
  }
  objects_.RunLoadHooks(weights, reader);
  return weights;
}

std::unique_ptr<DeviceUploads> StateLoader::UploadsFor(
    const StateReader& reader, const std::vector<std::string>& files) const {
  const c10::Device device = process_.device();
  // Hooks expect the weights on the host, where they have always been.
  if (device.is_cpu() || objects_.has_load_hooks()) return nullptr;
  const Models& models = registry_.models();
  const bool on_device = std::any_of(models.begin(), models.end(), [&](const auto& model) {
    const NamedTensors parameters = model->source().parameters();
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const auto& parameter) { return parameter.second.device() == device; });
  });
  // Sharded models take their parts, or whole weights one after the other, from the host.
  const bool sharded = std::any_of(models.begin(), models.end(),
                                   [](const auto& model) { return model->sharded() != nullptr; });
  if (!on_device || sharded) return nullptr;
  uint64_t bytes = 0;
  for (const std::string& name : files) bytes += BytesToDevice(reader, name);
  // The new state is on the device beside the state that it replaces, until all of it is read. The
  // program needs memory, too.
  if (bytes == 0 || DeviceMemoryLeft(device) / 2 < bytes) return nullptr;
  return UploadsTo(device);
}

void StateLoader::CheckIndexes(const StateReader& reader, size_t models) const {
  if (reader.in_memory() || (process_.rank() != 0 && !process_.own_node().has_value())) return;
  for (size_t i = 0; i < models; ++i) {
    const std::string name = IndexFileName(ModelFileName(static_cast<int>(i)));
    const ManifestFile* const file = reader.manifest().Find(name);
    if (file == nullptr || !reader.IsHere(name)) continue;
    const absl::Status status = VerifyCheckpointFile(reader.dir(), *file, VerifyLevel::kContents);
    if (status.ok()) continue;
    // The digests of the files that hold the tensors are right.
    MUSTER_LOG(Warning) << status.message() << "; the tensors are loaded nevertheless, but other "
                        << "programs find them by this index: save once more";
  }
}

void StateLoader::TakeOptimizerFile(const StateReader& reader, size_t index,
                                    const std::string& name, DeviceUploads* uploads,
                                    LoadedFiles* loaded) const {
  const OptimizerHandle& handle = registry_.optimizers()[index]->handle();
  const StateDict file = ReadFile(reader, name, uploads);
  OptimizerState part;
  for (const auto& [key, tensor] : file.tensors()) part.tensors.emplace(key, tensor);
  LoadedFiles::Optimizer& to = loaded->optimizers[index];
  to.state.tensors.merge(LocalState(std::move(part), handle, registry_.models()).tensors);
  if (name != OptimizerFileName(static_cast<int>(index))) return;
  to.state.groups = Rows(file);
  // Older checkpoints lack this text. A hook may have given weights the names of others.
  if (const absl::StatusOr<std::string> parameters = file.GetText(kParametersKey);
      parameters.ok() && !objects_.has_load_hooks()) {
    CheckParameters(*parameters, name, handle, registry_.models());
  }
  const absl::StatusOr<int64_t> steps = file.GetInt("steps");
  ThrowIfError(steps.status());
  to.steps = *steps;
}

std::vector<std::string> StateLoader::OthersIn(const StateReader& reader,
                                               const LoadedFiles& loaded) const {
  std::vector<std::string> names = {ScalerFileName(0), RandomStatesFileName(process_.rank())};
  const auto add = [&](std::string (*name)(int), size_t count) {
    for (size_t i = 0; i < count; ++i) names.push_back(name(static_cast<int>(i)));
  };
  add(SchedulerFileName, registry_.schedulers().size());
  add(SamplerFileName, reader.Count(SamplerFileName));
  for (size_t i = 0; i < objects_.objects().size(); ++i) {
    // The objects in several files are read together.
    const std::vector<std::string> files = RegisteredFilesIn(reader, i);
    if (files.size() == 1 && !loaded.registered_in_parts[i]) names.push_back(files[0]);
  }
  return names;
}

void StateLoader::ReadOthers(const StateReader& reader, LoadedFiles* loaded) const {
  const auto read_all = [&](std::string (*name)(int), size_t count) {
    std::vector<StateDict> files;
    for (size_t i = 0; i < count; ++i) {
      files.push_back(ReadFile(reader, name(static_cast<int>(i))));
    }
    return files;
  };
  loaded->schedulers = read_all(SchedulerFileName, registry_.schedulers().size());
  loaded->loaders = read_all(SamplerFileName, reader.Count(SamplerFileName));
  for (size_t i = 0; i < objects_.objects().size(); ++i) {
    StateDict& state = loaded->registered.emplace_back();
    if (loaded->registered_in_parts[i]) continue;
    const std::vector<std::string> files = RegisteredFilesIn(reader, i);
    state = ReadFile(reader, files[0]);
    for (size_t k = 1; k < files.size(); ++k) {
      const StateDict part = ReadFile(reader, files[k]);
      for (const auto& [key, tensor] : part.tensors()) state.SetTensor(key, tensor);
    }
  }
  if (steps_.scaler() != nullptr && reader.Has(ScalerFileName(0))) {
    loaded->scaler = ReadFile(reader, ScalerFileName(0));
  }
  if (reader.Has(RandomStatesFileName(process_.rank()))) {
    loaded->random = ReadFile(reader, RandomStatesFileName(process_.rank()));
  }
}

bool StateLoader::ReadsByFile() const {
  const Models& models = registry_.models();
  return std::any_of(models.begin(), models.end(),
                     [](const auto& model) { return model->sharded() != nullptr; }) &&
         !OnAnyProcess(process_.comm(), objects_.has_load_hooks());
}

bool StateLoader::HasNoRoomFor(const StateReader& reader,
                               const std::vector<std::string>& files) const {
  if (reader.in_memory()) return false;
  if (!FolderOfOffload(process_.sharding()).empty()) return true;
  // Files go to a GPU through a few blocks.
  if (!process_.device().is_cpu()) return false;
  uint64_t bytes = 0;
  for (const std::string& name : files) {
    if (const ManifestFile* const file = reader.manifest().Find(name)) bytes += file->digest.bytes;
  }
  // One copy for the host, and one that each of its processes makes.
  const uint64_t left = MemoryLeft(), copies = 1 + process_.environment().local_world_size.value;
  if (!OnAnyProcess(process_.comm(), bytes > left / copies)) return false;
  if (process_.rank() == 0) {
    MUSTER_LOG(Info) << "loading " << HumanBytes(bytes) << " from " << reader.dir()
                     << " takes two passes: a host has no memory for a second copy of the state ("
                     << HumanBytes(left) << " are left on that of rank 0)";
  }
  return true;
}

void StateLoader::ReadTogether(StateReader& reader, const std::vector<std::string>& files) const {
  if (HasNoRoomFor(reader, files)) reader.UseInPlace(FolderOfOffload(process_.sharding()));
  ThrowIfError(reader.ReadTogether(process_.comm(), files));
}

LoadedFiles StateLoader::ReadAll(StateReader& reader) const {
  const Models& models = registry_.models();
  LoadedFiles loaded;
  // Sharded models and their optimizers are read file by file: no rank needs memory for all of it.
  const bool any_sharded = std::any_of(
      models.begin(), models.end(), [](const auto& model) { return model->sharded() != nullptr; });
  const bool hooks = loaded.hooks = objects_.has_load_hooks();
  const bool by_file = !(any_sharded ? OnAnyProcess(process_.comm(), hooks) : hooks);
  std::vector<std::string> together, to_device;
  const auto add = [](const std::vector<std::string>& names, std::vector<std::string>* to) {
    to->insert(to->end(), names.begin(), names.end());
  };
  std::vector<bool> by_itself(models.size());
  loaded.shards.resize(models.size());
  loaded.optimizers.resize(registry_.optimizers().size());
  std::vector<size_t> optimizers_by_file;
  loaded.registered_in_parts.resize(objects_.objects().size());
  RunOnAll(process_.comm(), [&] {
    for (size_t i = 0; i < objects_.objects().size(); ++i) {
      loaded.registered_in_parts[i] =
          by_file && objects_.DividedModelOf(i, registry_.models()).has_value();
      if (!loaded.registered_in_parts[i]) {
        const std::vector<std::string> files = RegisteredFilesIn(reader, i);
        if (files.size() > 1) add(files, &together);
      }
    }
    for (size_t i = 0; i < models.size(); ++i) {
      if (by_file && models[i]->sharded() != nullptr) {
        loaded.shards[i].emplace(*models[i]);
        by_itself[i] = true;
      } else {
        add(ModelFilesIn(reader, i), &to_device);
      }
    }
    for (size_t i = 0; i < loaded.optimizers.size(); ++i) {
      if (by_file && IsSharded(registry_.optimizers()[i]->handle(), models)) {
        optimizers_by_file.push_back(i);
      } else {
        add(OptimizerFilesIn(reader, i), &to_device);
      }
    }
    add(to_device, &together);
  });
  ReadTogether(reader, together);
  if (reader.in_parts()) {
    std::vector<std::string> others;
    RunOnAll(process_.comm(), [&] { others = OthersIn(reader, loaded); });
    ThrowIfError(reader.Fetch(process_.comm(), others));
  }
  // An error of this rank must not leave the others in their next collective.
  absl::Status mine = Guard([&] {
    const std::unique_ptr<DeviceUploads> uploads = UploadsFor(reader, to_device);
    const bool states_there = process_.sharding().offload_optimizer == Offload::kNone;
    const std::vector<int64_t> registered = objects_.Numbers();
    loaded.weights = ReadWeights(reader, models.size(), by_itself, uploads.get());
    objects_.CheckUnchanged(registered, "load_state()");
    for (size_t i = 0; i < loaded.optimizers.size(); ++i) {
      if (std::count(optimizers_by_file.begin(), optimizers_by_file.end(), i) > 0) continue;
      for (const std::string& name : OptimizerFilesIn(reader, i)) {
        TakeOptimizerFile(reader, i, name, states_there ? uploads.get() : nullptr, &loaded);
      }
    }
    ReadOthers(reader, &loaded);
    CheckIndexes(reader, models.size());
  });
  PartsReader parts(process_.comm(), reader, models);
  for (size_t i = 0; i < models.size(); ++i) {
    if (!loaded.shards[i].has_value()) continue;
    parts.Read(
        ModelFilesIn(reader, i),
        [&](const SafetensorsHeader& header) { return loaded.shards[i]->Ranges(header); },
        [&](const std::string& name) { loaded.shards[i]->Take(ReadFile(reader, name).tensors()); },
        &mine);
    if (mine.ok()) {
      mine = Guard([&] {
        loaded.shards[i]->Check(
            absl::StrCat(reader.dir(), "/", ModelFileName(static_cast<int>(i))));
      });
    }
  }
  for (const size_t i : optimizers_by_file) {
    parts.Read(
        OptimizerFilesIn(reader, i), LocalRanges(registry_.optimizers()[i]->handle(), models),
        [&](const std::string& name) { TakeOptimizerFile(reader, i, name, nullptr, &loaded); },
        &mine);
  }
  // Hooks may have changed the number of objects: that is an error of this rank.
  for (size_t i = 0; i < loaded.registered_in_parts.size(); ++i) {
    if (!loaded.registered_in_parts[i]) continue;
    const DividedObject& object = *objects_.objects()[i].divided;
    ModelSlot& model = *models[*objects_.DividedModelOf(i, registry_.models())];
    const std::map<std::string, std::string> keys = KeysOf(object, model);
    parts.Read(
        RegisteredFilesIn(reader, i), RangesOfParts(model, keys),
        [&](const std::string& name) {
          TakeParts(model, keys, ReadFile(reader, name), &loaded.registered[i]);
        },
        &mine);
  }
  if (process_.rank() == 0 && parts.bytes_read() + parts.bytes_received() > 0) {
    MUSTER_LOG(Info) << "this host has read " << HumanBytes(parts.bytes_read())
                     << (reader.in_parts()
                             ? absl::StrCat(" and received ", HumanBytes(parts.bytes_received()))
                             : "")
                     << " of the " << HumanBytes(parts.bytes()) << " of models and optimizers in "
                     << reader.dir();
  }
  ThrowIfAnyFailed(process_.comm(), mine);
  return loaded;
}

LoadedFiles StateLoader::CheckAndReadAll(StateReader& reader) const {
  // Every file is read, and its digest checked, before anything changes, so that a damaged one
  // leaves the state as it was; and a process that cannot continue must not leave the others in
  // their next collective.
  RunOnAll(process_.comm(), [&] { CheckPrepared(reader); });
  LoadedFiles loaded = ReadAll(reader);
  // Nor does anything change if a prepared object does not fit, here or on another process.
  std::string left_out;  // of whole sharded models, the tensors that a hook of this process left
                         // out
  absl::Status mine = Guard([&] {
    for (size_t i = 0; i < registry_.models().size(); ++i) {
      if (loaded.shards[i].has_value()) continue;  // checked as they were read
      CheckModel(*registry_.models()[i], loaded.weights[i],
                 JoinPath(reader.dir(), ModelFileName(static_cast<int>(i))), loaded.hooks);
      if (registry_.models()[i]->sharded() == nullptr) continue;
      left_out += loaded.weights[i].empty() && loaded.hooks ? "y" : "n";
    }
    for (size_t i = 0; i < registry_.optimizers().size(); ++i) {
      ThrowIfError(GuardNamed(OptimizerFileName(static_cast<int>(i)), [&] {
        registry_.optimizers()[i]->handle().CheckState(loaded.optimizers[i].state);
      }));
    }
    for (size_t i = 0; i < loaded.schedulers.size(); ++i) {
      ThrowIfError(GuardNamed(SchedulerFileName(static_cast<int>(i)), [&] {
        registry_.schedulers()[i]->CheckState(Rows(loaded.schedulers[i]));
      }));
    }
    for (size_t i = 0; i < loaded.loaders.size(); ++i) {
      ThrowIfError(GuardNamed(SamplerFileName(static_cast<int>(i)), [&] {
        registry_.CheckLoader(i, PlaceOf(loaded.loaders[i]), TensorsIn(loaded.loaders[i]));
      }));
    }
    if (loaded.scaler.has_value()) {
      ThrowIfError(GuardNamed(ScalerFileName(0),
                              [&] { steps_.scaler()->CheckState(Rows(*loaded.scaler)); }));
    }
    if (loaded.random.has_value()) {
      ThrowIfError(GuardNamed(RandomStatesFileName(process_.rank()),
                              [&] { CheckRngState(TensorsIn(*loaded.random)); }));
    }
  });
  ThrowIfAnyFailed(process_.comm(), mine);
  // All ranks load these models together.
  const std::vector<std::string> all = process_.comm().AllGatherBytes(left_out);
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    ThrowIfError(absl::FailedPreconditionError(
        absl::StrCat("a hook of load_state() on rank ", r,
                     " loads other sharded models than rank 0: it must "
                     "empty the weights of a sharded model on all ranks or on none")));
  }
  return loaded;
}

void StateLoader::ApplyRegistered(const LoadedFiles& loaded) {
  // The program's functions may register and remove objects, also themselves.
  const std::vector<StateObjects::Object> objects = objects_.objects();
  for (size_t i = 0; i < objects.size(); ++i) {
    // An earlier object's load may have removed this one.
    if (!objects_.Has(objects[i])) continue;
    ThrowIfError(GuardNamed(CustomFileName(i), [&] {
      if (loaded.registered_in_parts[i]) {
        objects[i].divided->LoadParts(loaded.registered[i]);
      } else {
        objects[i].load(loaded.registered[i]);
      }
    }));
  }
}

void StateLoader::ApplyOptimizers(const LoadedFiles& loaded) {
  for (size_t i = 0; i < registry_.optimizers().size(); ++i) {
    ThrowIfError(GuardNamed(OptimizerFileName(i), [&] {
      registry_.optimizers()[i]->handle().LoadState(loaded.optimizers[i].state);
    }));
    registry_.optimizers()[i]->set_steps(loaded.optimizers[i].steps);
  }
  for (size_t i = 0; i < registry_.schedulers().size(); ++i) {
    ThrowIfError(GuardNamed(SchedulerFileName(i), [&] {
      registry_.schedulers()[i]->LoadState(Rows(loaded.schedulers[i]));
    }));
  }
}

void StateLoader::ApplyModels(const StateReader& reader, const LoadedFiles& loaded) {
  for (size_t i = 0; i < registry_.models().size(); ++i) {
    if (loaded.shards[i].has_value()) {
      loaded.shards[i]->Store();
      continue;
    }
    const std::string file = JoinPath(reader.dir(), ModelFileName(static_cast<int>(i)));
    const std::string missing =
        LoadModel(*registry_.models()[i], loaded.weights[i], file, loaded.hooks);
    if (missing.empty() || process_.rank() != 0) continue;
    MUSTER_LOG(Warning) << "load_state() with a hook: tensors that " << file
                        << " lacks, or that the hook has removed, keep their values: " << missing;
  }
  // Gradients and scaler steps of an open window belong to the state that is given up.
  for (const auto& model : registry_.models()) {
    ShardedModel* const sharded = model->sharded();
    if (sharded != nullptr) sharded->ForgetPending(sharded->shards());
  }
  steps_.Reset();
  for (const auto& optimizer : registry_.optimizers()) {
    // No zeros, for which offloaded gradients would be read: their disk may have failed.
    optimizer->handle().ZeroGrad(GradZeroing::kSetToNone);
  }
  ForgetCastWeights();
}

void StateLoader::ApplyPlaces(const StateReader& reader, const LoadedFiles& loaded) {
  registry_.ForgetLoadedPlaces();
  for (size_t i = 0; i < loaded.loaders.size(); ++i) {
    ThrowIfError(GuardNamed(SamplerFileName(i), [&] {
      registry_.LoadLoader(i, PlaceOf(loaded.loaders[i]), TensorsIn(loaded.loaders[i]));
    }));
  }
  if (steps_.scaler() != nullptr && loaded.scaler.has_value()) {
    steps_.scaler()->LoadState(Rows(*loaded.scaler));
  }
  ApplyRandom(reader, loaded);
  loops_.LoadPlace(reader.info(), loaded.loaders.size());
}

void StateLoader::ApplyRandom(const StateReader& reader, const LoadedFiles& loaded) const {
  if (loaded.random.has_value()) {
    const std::string left_out = RestoreRngState(TensorsIn(*loaded.random));
    if (!left_out.empty()) MUSTER_LOG(Warning) << "random states: " << left_out;
  } else {
    MUSTER_LOG(Warning) << reader.dir() << " was saved by " << reader.info().world_size
                        << " processes and has no random state for rank " << process_.rank()
                        << ": it keeps its own";
  }
}

void StateLoader::Apply(const StateReader& reader, const LoadedFiles& loaded) {
  // The program's code runs first, because only running it shows what it refuses.
  RunOnAll(
      process_.comm(),
      [&] {
        GiveModelsOwnMemory(registry_.models());
        ApplyRegistered(loaded);
      },
      "registered objects may have changed, and nothing else has");
  ++replaced_;
  // Then the objects that need memory, or room in offload files, or have a load() of their own.
  constexpr char kMixture[] =
      "the state is a mixture of two now: call load_state() again, or end the program";
  try {
    RunOnAll(
        process_.comm(),
        [&] {
          if (steps_.updates() != nullptr) steps_.updates()->Reset();
          ApplyOptimizers(loaded);
        },
        kMixture);
    RunOnAll(
        process_.comm(),
        [&] {
          ApplyModels(reader, loaded);
          ApplyPlaces(reader, loaded);
        },
        kMixture);
  } catch (...) {
    for (const auto& model : registry_.models()) {
      if (model->sharded() == nullptr) continue;
      model->sharded()->NoteFailedLoad(absl::StrCat("load_state() has failed: ", kMixture));
    }
    steps_.NoteFailedLoad("load_state()");
    throw;
  }
}

std::vector<std::unique_ptr<IncomingWeights>> StateLoader::ReadWeightsAlone(
    StateReader& reader, const LoadWeightsOptions& options,
    std::unordered_set<std::string>* read) const {
  const Models& models = registry_.models();
  RunOnAll(process_.comm(), [&] {
    if (!options.strict) return;
    CheckCount(reader.dir(), CountModels(reader), "model", models.size(),
               "prepare the same models, in the same order, or set strict to false");
  });
  const bool hooks = objects_.has_load_hooks();  // one may remove itself
  // Hooks need whole models.
  const bool by_file = ReadsByFile();
  size_t files = 0;
  std::vector<bool> by_itself;
  std::vector<std::string> together;
  RunOnAll(process_.comm(), [&] {
    files = std::min<size_t>(CountModels(reader), models.size());
    by_itself.resize(files);
    for (size_t i = 0; i < files; ++i) {
      by_itself[i] = by_file && models[i]->sharded() != nullptr;
      read->insert(IndexFileName(ModelFileName(static_cast<int>(i))));
      for (const std::string& name : ModelFilesIn(reader, i)) {
        read->insert(name);
        if (!by_itself[i]) together.push_back(name);
      }
    }
  });
  ReadTogether(reader, together);
  std::vector<NamedTensors> weights;
  RunOnAll(process_.comm(), [&] {
    const std::unique_ptr<DeviceUploads> uploads = UploadsFor(reader, together);
    weights = ReadWeights(reader, files, by_itself, uploads.get());
    CheckIndexes(reader, files);
  });
  LoadWeightsOptions rules = options;
  // As in load_state: hooks decide which tensors are loaded.
  if (hooks) rules.strict = false;
  PartsReader parts(process_.comm(), reader, models);
  // An error of this rank must not leave the others in their next collective.
  absl::Status mine;
  std::vector<std::unique_ptr<IncomingWeights>> incoming;
  for (size_t i = 0; i < std::min(files, weights.size()); ++i) {
    const std::string where = absl::StrCat(reader.dir(), "/", ModelFileName(static_cast<int>(i)));
    if (models[i]->sharded() == nullptr) {
      incoming.push_back(IncomingTensors(*models[i], where, std::move(weights[i]), rules));
      continue;
    }
    auto shards = std::make_unique<CheckpointShards>(*models[i], where, rules);
    if (by_itself[i]) {
      parts.Read(
          ModelFilesIn(reader, i),
          [&](const SafetensorsHeader& header) { return shards->Ranges(header); },
          [&](const std::string& name) { shards->Take(ReadFile(reader, name).tensors()); }, &mine);
    } else if (mine.ok()) {
      mine = Guard([&] { shards->Take(weights[i]); });
    }
    incoming.push_back(std::move(shards));
  }
  ThrowIfAnyFailed(process_.comm(), mine);
  return incoming;
}

}  // namespace muster::internal
