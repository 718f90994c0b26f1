// Core::SaveState and LoadState: which object goes into which file (docs/checkpoint_format.md).
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "muster/internal/core.h"
#include "worker/checkpoint/async_saver.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/nested_collectives.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"

namespace muster::internal {
namespace {

constexpr char kFirstEpoch[] = "first_epoch";
// With a loader's number after it.
constexpr char kFinishedPasses[] = "finished_passes.";
constexpr char kPassesPerEpoch[] = "passes_per_epoch.";

// "ckpt/" and "./ckpt" are "ckpt".
std::string CleanPath(const std::string& path) {
  if (path.empty()) return path;
  std::string clean = std::filesystem::path(path).lexically_normal().string();
  while (clean.size() > 1 && clean.back() == '/') clean.pop_back();
  return clean;
}

// A row of numbers "name" becomes the scalars "name.0", "name.1", ...
void PutRows(const PlainState& rows, StateDict* state) {
  for (const auto& [name, row] : rows) {
    for (size_t i = 0; i < row.size(); ++i) state->SetDouble(absl::StrCat(name, ".", i), row[i]);
  }
}

absl::StatusOr<PlainState> TakeRows(const StateDict& state) {
  PlainState rows;
  for (const auto& [key, unused] : state.scalars()) {
    const size_t dot = key.rfind('.');
    if (dot == std::string::npos) continue;
    std::vector<double>& row = rows[key.substr(0, dot)];
    // Scalars are sorted as texts, so "10" comes before "2": the row is filled by asking for its
    // places in turn.
    if (!row.empty()) continue;
    for (size_t i = 0; state.scalars().count(absl::StrCat(key.substr(0, dot), ".", i)) > 0; ++i) {
      MUSTER_ASSIGN_OR_RETURN(const double value,
                              state.GetDouble(absl::StrCat(key.substr(0, dot), ".", i)));
      row.push_back(value);
    }
  }
  return rows;
}

// After a hook has had them.
void CheckWeights(const std::vector<NamedTensors>& weights, size_t models, const char* where) {
  TORCH_CHECK(weights.size() == models, "a hook of ", where, " left ", weights.size(),
              " lists of weights for ", models, " models: it may empty a list but not remove it");
}

// Runs tensor code that throws inside of a function that returns Status.
template <class F>
absl::Status Try(const std::string& what, const F& function) {
  const absl::Status status = Guard(function);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

// Says how saves have ended; the first failure.
absl::Status Report(const std::vector<AsyncSaver::Outcome>& outcomes, int rank) {
  absl::Status first;
  for (const AsyncSaver::Outcome& outcome : outcomes) {
    if (!outcome.status.ok()) {
      const absl::Status failed(outcome.status.code(),
                                absl::StrCat("the asynchronous save of ", outcome.path,
                                             " failed: ", outcome.status.message()));
      if (!first.ok()) MUSTER_LOG(Error) << failed.message();
      first.Update(failed);
    } else if (rank == 0) {
      MUSTER_LOG(Info) << "saved " << outcome.path << ": training waited "
                       << absl::FormatDuration(absl::Trunc(outcome.stall, absl::Microseconds(100)))
                       << ", written "
                       << absl::FormatDuration(absl::Trunc(outcome.persist, absl::Milliseconds(1)))
                       << " later, " << outcome.bytes << " bytes by rank 0";
    }
  }
  return first;
}

}  // namespace

std::string Core::CheckpointRoot() const {
  return absl::StrCat(ProjectDirectory(), "/checkpoints");
}

absl::Status Core::CheckComplete() const {
  for (const auto& optimizer : optimizers_) {
    const std::string why = optimizer->handle().CannotSave();
    if (!why.empty()) return absl::FailedPreconditionError(why);
  }
  if (models_.empty() && total_steps_ > 0 && registered_.empty() && save_hooks_.empty()) {
    return absl::FailedPreconditionError(
        "save_state would write no model, although optimizers have stepped: prepare() the model "
        "that is trained, and save before free_memory()");
  }
  if (!registered_.empty() || !save_hooks_.empty()) return absl::OkStatus();
  std::unordered_set<const void*> written;
  for (const auto& model : models_) {
    for (const auto& [name, tensor] : model->source().parameters()) {
      written.insert(tensor.unsafeGetTensorImpl());
    }
  }
  for (const auto& optimizer : optimizers_) {
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
  return absl::OkStatus();
}

absl::Status Core::SaveState(const std::string& wanted_directory) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { CheckAllTakePart("save_state()"); }); !here.ok()) return here;
  if (averaged_depth_ > 0) {
    return absl::FailedPreconditionError(
        "save_state inside ema.apply() would write the average as the model's weights: save before "
        "or after that scope");
  }
  ForgetUnheld();
  if (absl::Status complete = CheckComplete(); !complete.ok()) return complete;
  if (!accumulation_.at_boundary()) {
    return absl::FailedPreconditionError(
        "save_state in the middle of an accumulation window would lose its gradients: save where "
        "accelerator.sync_gradients(), after optimizer.step()");
  }
  progress().SetPhase("save_state");
  CheckpointInfo info;
  info.world_size = size();
  info.step = global_step();
  info.epoch = epoch_;
  info.iteration = save_iteration_;
  const bool done = EpochIsDone();
  info.cursor[kFirstEpoch] = done ? epoch_ + 1 : epoch_;
  const std::vector<int64_t> finished = FinishedPasses();
  for (size_t i = 0; i < finished.size(); ++i) {
    const int64_t passes = std::max(passes_per_epoch_[i], epoch_open_ ? finished[i] : 0);
    if (passes > 0) info.cursor[absl::StrCat(kPassesPerEpoch, i)] = passes;
    // Training loops that the epoch is through with: a run that goes on in it leaves them out.
    if (!done && epoch_open_ && finished[i] > 0) {
      info.cursor[absl::StrCat(kFinishedPasses, i)] = finished[i];
    }
  }

  const auto write = [&](StateWriter& writer) -> absl::Status {
    std::vector<NamedTensors> weights;
    for (const auto& model : models_) weights.push_back(TensorsOf(model->source()));
    for (const auto& [unused, hook] : save_hooks_) {
      hook(weights, writer);
      CheckWeights(weights, models_.size(), "save_state()");
    }
    if (rank() == 0) {
      for (size_t i = 0; i < models_.size(); ++i) {
        MUSTER_RETURN_IF_ERROR(writer.WriteModel(ModelFileName(i), weights[i]));
      }
      for (size_t i = 0; i < optimizers_.size(); ++i) {
        const OptimizerState state = optimizers_[i]->handle().SaveState();
        StateDict file;
        for (const auto& [name, tensor] : state.tensors) file.SetTensor(name, tensor);
        PutRows(state.groups, &file);
        file.SetInt("steps", optimizers_[i]->steps());
        MUSTER_RETURN_IF_ERROR(writer.Write(OptimizerFileName(i), file));
      }
      for (size_t i = 0; i < schedulers_.size(); ++i) {
        StateDict file;
        PutRows(schedulers_[i]->SaveState(), &file);
        MUSTER_RETURN_IF_ERROR(writer.Write(SchedulerFileName(i), file));
      }
      for (size_t i = 0; i < loaders_.size(); ++i) {
        StateDict file;
        file.SetText("place", PlaceToSave(*loaders_[i]).ToString());
        for (const auto& [name, tensor] : loaders_[i]->StateTensors()) file.SetTensor(name, tensor);
        MUSTER_RETURN_IF_ERROR(writer.Write(SamplerFileName(i), file));
      }
      if (scaler_ != nullptr) {
        StateDict file;
        PutRows(scaler_->SaveState(), &file);
        MUSTER_RETURN_IF_ERROR(writer.Write(ScalerFileName(0), file));
      }
      for (size_t i = 0; i < registered_.size(); ++i) {
        MUSTER_RETURN_IF_ERROR(writer.Write(CustomFileName(i), registered_[i].save()));
      }
    }
    StateDict random;
    for (const auto& [name, tensor] : SaveRngState()) random.SetTensor(name, tensor);
    return writer.Write(RandomStatesFileName(rank()), random);
  };

  return Guard([&] {
    const CheckpointFolder folder(CheckpointRoot());
    if (directory.empty()) info.iteration = NextIteration();
    absl::Status earlier;
    if (options_.checkpoint.asynchronous) {
      earlier = SaveBesideTraining(directory, info, write);
    } else if (!directory.empty()) {
      ThrowIfError(SaveCheckpoint(comm(), directory, info, write));
    } else {
      ThrowIfError(SaveNumberedCheckpoint(
          comm(), folder, info, static_cast<int>(options_.project.total_limit.value_or(0)), write));
    }
    last_checkpoint_ = directory.empty() ? folder.PathOf(info.iteration) : directory;
    save_iteration_ = info.iteration + 1;
    claimed_done_ = done && trained_in_epoch_ ? last_checkpoint_ : "";
    ThrowIfError(earlier);
  });
}

int64_t Core::NextIteration() {
  int64_t iteration = 0;
  // Rank 0 looks; an error there reaches everyone.
  std::string error;
  if (rank() == 0) {
    // Asked before the folder is: a save that ends in between is seen there.
    const bool busy = saver_ != nullptr && saver_->busy();
    const absl::StatusOr<int64_t> next = CheckpointFolder(CheckpointRoot()).NextNumber();
    if (next.ok()) {
      iteration = busy ? std::max(*next, next_numbered_) : *next;
    } else {
      error = std::string(next.status().message());
    }
  }
  std::tie(iteration, error) = BroadcastObject(comm(), std::make_tuple(iteration, error), 0);
  if (!error.empty()) ThrowIfError(absl::UnavailableError(error));
  return iteration;
}

absl::Status Core::SaveBesideTraining(const std::string& directory, const CheckpointInfo& info,
                                      absl::FunctionRef<absl::Status(StateWriter&)> write) {
  if (saver_ == nullptr) {
    absl::StatusOr<std::unique_ptr<Comm>> beside = MakeBackgroundComm(process_);
    ThrowIfError(beside.status());
    saver_ = std::make_unique<AsyncSaver>(
        *std::move(beside),
        AsyncSaver::Options{.max_bytes_per_second = options_.checkpoint.max_bytes_per_second});
  }
  AsyncSaver::Request request;
  request.info = info;
  if (directory.empty()) {
    request.folder.emplace(CheckpointRoot());
    request.total_limit = static_cast<int>(options_.project.total_limit.value_or(0));
  } else {
    request.dir = directory;
  }
  std::vector<AsyncSaver::Outcome> ended;
  const absl::Status begun = saver_->Begin(comm(), request, write, &ended);
  const absl::Status earlier = Report(ended, rank());
  if (!begun.ok()) {
    if (!earlier.ok()) MUSTER_LOG(Error) << earlier.message();
    ThrowIfError(begun);
  }
  if (directory.empty()) next_numbered_ = info.iteration + 1;
  // The process is about to be ended: there may be no later call that waits.
  if (triggers_->stop().has_value()) {
    const absl::Status last = WaitForCheckpoint();
    return earlier.ok() ? last : earlier;
  }
  if (earlier.ok()) return earlier;
  return absl::Status(earlier.code(),
                      absl::StrCat(earlier.message(), "; ", request.path(), " is being written"));
}

absl::Status Core::WaitForCheckpoint() {
  return saver_ == nullptr ? absl::OkStatus() : Report(saver_->Wait(), rank());
}

absl::Status Core::SaveModel(const ModelSource& model, const std::string& wanted_directory,
                             const std::string& max_shard_size) {
  const std::string directory = CleanPath(wanted_directory);
  return Guard([&] {
    CheckAllTakePart("save_model()");
    const absl::StatusOr<int64_t> bytes = ParseShardSize(max_shard_size);
    ThrowIfError(bytes.status());
    absl::Status status;
    if (rank() == 0) {
      status = Guard([&] { ThrowIfError(SaveModelFiles(directory, TensorsOf(model), *bytes)); });
    }
    const auto [code, message] = BroadcastObject(
        comm(), std::make_tuple(static_cast<int>(status.code()), std::string(status.message())), 0);
    ThrowIfError(absl::Status(static_cast<absl::StatusCode>(code), message));
  });
}

void Core::RegisterForCheckpointing(std::function<PlainState()> save,
                                    std::function<void(const PlainState&)> load) {
  TORCH_CHECK(save != nullptr && load != nullptr,
              "register_for_checkpointing() needs both a save and a load function");
  RegisterForCheckpointing(
      [save = std::move(save)] {
        StateDict state;
        PutRows(save(), &state);
        return state;
      },
      [load = std::move(load)](const StateDict& state) {
        const absl::StatusOr<PlainState> rows = TakeRows(state);
        ThrowIfError(rows.status());
        load(*rows);
      });
}

int64_t Core::AddSaveHook(SaveStateHook hook) {
  TORCH_CHECK(hook != nullptr, "register_save_state_pre_hook() got an empty function");
  save_hooks_.emplace(next_hook_, std::move(hook));
  return next_hook_++;
}

int64_t Core::AddLoadHook(LoadStateHook hook) {
  TORCH_CHECK(hook != nullptr, "register_load_state_pre_hook() got an empty function");
  load_hooks_.emplace(next_hook_, std::move(hook));
  return next_hook_++;
}

void Core::RemoveHook(int64_t id) {
  save_hooks_.erase(id);
  load_hooks_.erase(id);
}

// What the files of a checkpoint hold.
struct Core::Loaded {
  std::vector<NamedTensors> weights;
  std::vector<StateDict> optimizers, schedulers, loaders, registered;
  std::optional<StateDict> scaler, random;
};

void Core::CheckPrepared(const StateReader& reader) const {
  const auto check = [&](const char* what, std::string (*name)(int), size_t here) {
    const int saved = reader.Count(name);
    if (saved == static_cast<int>(here)) return;
    ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
        reader.dir(), " holds ", saved, " ", what, "(s), but ", here,
        " are prepared here: prepare the same objects, in the same order, before load_state")));
  };
  check("model", ModelFileName, models_.size());
  check("optimizer", OptimizerFileName, optimizers_.size());
  check("schedule", SchedulerFileName, schedulers_.size());
  // Loaders may be prepared after this, as those in the body of an epoch are.
  const int saved_loaders = reader.Count(SamplerFileName);
  if (saved_loaders < static_cast<int>(loaders_.size())) {
    check("loader", SamplerFileName, loaders_.size());
  }
  check("registered object", CustomFileName, registered_.size());
}

Core::Loaded Core::Read(const StateReader& reader) const {
  const auto read = [&](const std::string& name) {
    absl::StatusOr<StateDict> file = reader.Read(name);
    ThrowIfError(file.status());
    return *std::move(file);
  };
  const auto read_all = [&](std::string (*name)(int), size_t count) {
    std::vector<StateDict> files;
    for (size_t i = 0; i < count; ++i) files.push_back(read(name(static_cast<int>(i))));
    return files;
  };
  Loaded loaded;
  for (StateDict& file : read_all(ModelFileName, models_.size())) {
    loaded.weights.push_back(file.tensors());
  }
  for (const auto& [unused, hook] : load_hooks_) {
    hook(loaded.weights, reader);
    CheckWeights(loaded.weights, models_.size(), "load_state()");
  }
  loaded.optimizers = read_all(OptimizerFileName, optimizers_.size());
  loaded.schedulers = read_all(SchedulerFileName, schedulers_.size());
  loaded.loaders = read_all(SamplerFileName, reader.Count(SamplerFileName));
  loaded.registered = read_all(CustomFileName, registered_.size());
  if (scaler_ != nullptr && reader.Has(ScalerFileName(0))) loaded.scaler = read(ScalerFileName(0));
  if (reader.Has(RandomStatesFileName(rank()))) loaded.random = read(RandomStatesFileName(rank()));
  return loaded;
}

void Core::Apply(const StateReader& reader, const Loaded& loaded) {
  const auto rows = [](const StateDict& file) {
    absl::StatusOr<PlainState> taken = TakeRows(file);
    ThrowIfError(taken.status());
    return *std::move(taken);
  };
  for (size_t i = 0; i < models_.size(); ++i) {
    if (loaded.weights[i].empty() && !load_hooks_.empty()) continue;
    ThrowIfError(LoadTensors(loaded.weights[i], TensorsOf(models_[i]->source()),
                             absl::StrCat(reader.dir(), "/", ModelFileName(i)),
                             {.allow_missing = !load_hooks_.empty()}));
  }
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    const StateDict& file = loaded.optimizers[i];
    OptimizerState state;
    for (const auto& [name, tensor] : file.tensors()) state.tensors.emplace(name, tensor);
    state.groups = rows(file);
    ThrowIfError(Try(OptimizerFileName(i), [&] { optimizers_[i]->handle().LoadState(state); }));
    const absl::StatusOr<int64_t> steps = file.GetInt("steps");
    ThrowIfError(steps.status());
    optimizers_[i]->set_steps(*steps);
  }
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    ThrowIfError(
        Try(SchedulerFileName(i), [&] { schedulers_[i]->LoadState(rows(loaded.schedulers[i])); }));
  }
  pending_loaders_.clear();
  for (size_t i = 0; i < loaded.loaders.size(); ++i) {
    const absl::StatusOr<std::string> place = loaded.loaders[i].GetText("place");
    ThrowIfError(place.status());
    const absl::StatusOr<LoaderState> state = LoaderState::FromString(*place);
    ThrowIfError(state.status());
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, tensor] : loaded.loaders[i].tensors()) tensors.emplace(name, tensor);
    if (i < loaders_.size()) {
      ThrowIfError(Try(SamplerFileName(i), [&] { loaders_[i]->LoadState(*state, tensors); }));
    } else {
      pending_loaders_.insert({i, {*state, std::move(tensors)}});
    }
  }
  // Gradients and scaler steps of a window that was open belong to the state that is given up.
  for (const auto& optimizer : optimizers_) {
    optimizer->handle().ZeroGrad(GradZeroing::kInPlace);
    optimizer->gradients_finished_ = false;
    optimizer->step_was_skipped_ = false;
    optimizer->zero_at_end_.reset();
    optimizer->witness_.reset();
    optimizer->consumed_ = false;
  }
  window_backwards_ = 0;
  window_factor_.reset();
  scaler_steps_ = 0;
  if (scaler_ != nullptr) {
    scaler_->Reset();
    if (loaded.scaler.has_value()) scaler_->LoadState(rows(*loaded.scaler));
  }
  for (size_t i = 0; i < registered_.size(); ++i) {
    ThrowIfError(Try(CustomFileName(i), [&] { registered_[i].load(loaded.registered[i]); }));
  }
  ForgetCastWeights();
  if (loaded.random.has_value()) {
    std::map<std::string, at::Tensor> states;
    for (const auto& [name, tensor] : loaded.random->tensors()) states.emplace(name, tensor);
    const std::string left_out = RestoreRngState(states);
    if (!left_out.empty()) MUSTER_LOG(Warning) << "random states: " << left_out;
  } else {
    MUSTER_LOG(Warning) << reader.dir() << " was saved by " << reader.info().world_size
                        << " processes and has no random state for rank " << rank()
                        << ": it keeps its own";
  }
  accumulation_ = Accumulation(accumulation_.options());
  const auto first = reader.info().cursor.find(kFirstEpoch);
  first_epoch_ = first == reader.info().cursor.end() ? reader.info().epoch : first->second;
  SetEpoch(first_epoch_, /*open=*/false);
  const auto passes = [&](const char* what, std::vector<int64_t>& list) {
    list.assign(std::max(loaders_.size(), loaded.loaders.size()), 0);
    for (size_t i = 0; i < list.size(); ++i) {
      const auto found = reader.info().cursor.find(absl::StrCat(what, i));
      if (found != reader.info().cursor.end()) list[i] = found->second;
    }
  };
  passes(kFinishedPasses, passes_to_skip_);
  passes(kPassesPerEpoch, passes_per_epoch_);
  finished_passes_.assign(passes_per_epoch_.size(), 0);
  resumed_ = true;
  last_checkpoint_ = reader.dir();
  save_iteration_ = reader.info().iteration + 1;
}

void Core::ThrowIfAnyFailed(const absl::Status& mine) {
  const std::vector<std::string> errors = comm().AllGatherBytes(mine.ok() ? "" : mine.ToString());
  ThrowIfError(mine);
  for (size_t r = 0; r < errors.size(); ++r) {
    if (errors[r].empty()) continue;
    ThrowIfError(absl::DataLossError(absl::StrCat("rank ", r, ": ", errors[r])));
  }
}

absl::Status Core::LoadState(const std::string& wanted_directory, bool may_be_missing) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { CheckAllTakePart("load_state()"); }); !here.ok()) return here;
  ForgetUnheld();
  // What is being written may be what is wanted.
  if (const absl::Status saved = WaitForCheckpoint(); !saved.ok()) {
    MUSTER_LOG(Error) << saved.message();
  }
  progress().SetPhase("load_state");
  return Guard([&] {
    const CheckpointFolder folder(CheckpointRoot());
    absl::StatusOr<StateReader> reader = OpenCheckpoint(comm(), directory, folder);
    if (may_be_missing && directory.empty()) CheckProjectWritable(/*always=*/true);
    if (may_be_missing && absl::IsNotFound(reader.status())) return;
    ThrowIfError(reader.status());
    CheckPrepared(*reader);
    // Every file is read and checked before anything changes, so that a damaged one leaves the
    // state as it was; and a process that cannot go on must not leave the others in their next
    // collective.
    Loaded loaded;
    ThrowIfAnyFailed(Guard([&] { loaded = Read(*reader); }));
    ThrowIfAnyFailed(Guard([&] { Apply(*reader, loaded); }));
  });
}

}  // namespace muster::internal
