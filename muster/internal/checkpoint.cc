// Core::SaveState and LoadState: which object goes into which file (docs/checkpoint_format.md).
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "muster/internal/core.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/state.h"
#include "worker/process/nested_collectives.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"

namespace muster::internal {
namespace {

constexpr char kFirstEpoch[] = "first_epoch";

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

NamedTensors TensorsOf(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& parameter : module.named_parameters()) {
    tensors.emplace_back(parameter.key(), parameter.value().detach());
  }
  for (const auto& buffer : module.named_buffers()) {
    tensors.emplace_back(buffer.key(), buffer.value().detach());
  }
  return tensors;
}

// Runs tensor code that throws inside of a function that returns Status.
template <class F>
absl::Status Try(const std::string& what, const F& function) {
  const absl::Status status = Guard(function);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

}  // namespace

std::string Core::CheckpointRoot() const {
  return absl::StrCat(ProjectDirectory(), "/checkpoints");
}

absl::Status Core::SaveState(const std::string& directory) {
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
  // The epoch is over once its body is past the loop over the data, and that loop got to its end.
  info.cursor[kFirstEpoch] = epoch_open_ && live_.empty() && !interrupted_ ? epoch_ + 1 : epoch_;

  const auto write = [&](StateWriter& writer) -> absl::Status {
    if (rank() == 0) {
      for (size_t i = 0; i < models_.size(); ++i) {
        MUSTER_RETURN_IF_ERROR(
            writer.WriteModel(ModelFileName(i), TensorsOf(models_[i]->module())));
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
        PutRows(schedulers_[i]->scheduler().SaveState(), &file);
        MUSTER_RETURN_IF_ERROR(writer.Write(SchedulerFileName(i), file));
      }
      for (size_t i = 0; i < loaders_.size(); ++i) {
        StateDict file;
        file.SetText("place", loaders_[i]->State().ToString());
        MUSTER_RETURN_IF_ERROR(writer.Write(SamplerFileName(i), file));
      }
      if (scaler_ != nullptr) {
        StateDict file;
        PutRows(scaler_->SaveState(), &file);
        MUSTER_RETURN_IF_ERROR(writer.Write(ScalerFileName(0), file));
      }
      for (size_t i = 0; i < registered_.size(); ++i) {
        StateDict file;
        PutRows(registered_[i].save(), &file);
        MUSTER_RETURN_IF_ERROR(writer.Write(CustomFileName(i), file));
      }
    }
    StateDict random;
    for (const auto& [name, tensor] : SaveRngState()) random.SetTensor(name, tensor);
    return writer.Write(RandomStatesFileName(rank()), random);
  };

  return Guard([&] {
    std::string path = directory;
    if (!directory.empty()) {
      ThrowIfError(SaveCheckpoint(comm(), directory, info, write));
    } else {
      const CheckpointFolder folder(CheckpointRoot());
      // Rank 0 looks; an error there reaches everyone.
      std::string error;
      if (rank() == 0) {
        const absl::StatusOr<int64_t> next = folder.NextNumber();
        if (next.ok()) {
          info.iteration = *next;
        } else {
          error = std::string(next.status().message());
        }
      }
      std::tie(info.iteration, error) =
          BroadcastObject(comm(), std::make_tuple(info.iteration, error), 0);
      if (!error.empty()) ThrowIfError(absl::UnavailableError(error));
      ThrowIfError(SaveNumberedCheckpoint(
          comm(), folder, info, static_cast<int>(options_.project.total_limit.value_or(0)), write));
      path = folder.PathOf(info.iteration);
    }
    last_checkpoint_ = path;
  });
}

absl::Status Core::LoadState(const std::string& directory, bool may_be_missing) {
  progress().SetPhase("load_state");
  return Guard([&] {
    const CheckpointFolder folder(CheckpointRoot());
    absl::StatusOr<StateReader> opened = OpenCheckpoint(comm(), directory, folder);
    if (may_be_missing && absl::IsNotFound(opened.status())) return;
    ThrowIfError(opened.status());
    const StateReader& reader = *opened;

    const auto check_count = [&](const char* what, std::string (*name)(int), size_t here) {
      const int saved = reader.Count(name);
      if (saved == static_cast<int>(here)) return;
      ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
          reader.dir(), " holds ", saved, " ", what, "(s), but ", here,
          " are prepared here: prepare the same objects, in the same order, before load_state")));
    };
    check_count("model", ModelFileName, models_.size());
    check_count("optimizer", OptimizerFileName, optimizers_.size());
    check_count("schedule", SchedulerFileName, schedulers_.size());
    check_count("loader", SamplerFileName, loaders_.size());
    check_count("registered object", CustomFileName, registered_.size());

    // Every file is read and checked before anything changes, so that a damaged one leaves the
    // state as it was.
    const auto read = [&](const std::string& name) {
      absl::StatusOr<StateDict> file = reader.Read(name);
      ThrowIfError(file.status());
      return *std::move(file);
    };
    std::vector<StateDict> models, optimizers, schedulers, loaders, registered;
    std::optional<StateDict> scaler, random;
    const absl::Status mine = Guard([&] {
      for (size_t i = 0; i < models_.size(); ++i) models.push_back(read(ModelFileName(i)));
      for (size_t i = 0; i < optimizers_.size(); ++i) {
        optimizers.push_back(read(OptimizerFileName(i)));
      }
      for (size_t i = 0; i < schedulers_.size(); ++i) {
        schedulers.push_back(read(SchedulerFileName(i)));
      }
      for (size_t i = 0; i < loaders_.size(); ++i) loaders.push_back(read(SamplerFileName(i)));
      for (size_t i = 0; i < registered_.size(); ++i) registered.push_back(read(CustomFileName(i)));
      if (scaler_ != nullptr && reader.Has(ScalerFileName(0))) scaler = read(ScalerFileName(0));
      if (reader.Has(RandomStatesFileName(rank()))) random = read(RandomStatesFileName(rank()));
    });
    // All or none: a process that cannot read its files must not leave the others in their next collective.
    const std::vector<std::string> errors = comm().AllGatherBytes(mine.ok() ? "" : mine.ToString());
    ThrowIfError(mine);
    for (size_t r = 0; r < errors.size(); ++r) {
      if (!errors[r].empty()) {
        ThrowIfError(absl::DataLossError(absl::StrCat("rank ", r, ": ", errors[r])));
      }
    }

    const auto rows = [](const StateDict& file) {
      absl::StatusOr<PlainState> taken = TakeRows(file);
      ThrowIfError(taken.status());
      return *std::move(taken);
    };
    for (size_t i = 0; i < models_.size(); ++i) {
      ThrowIfError(LoadTensors(models[i].tensors(), TensorsOf(models_[i]->module()),
                               absl::StrCat(reader.dir(), "/", ModelFileName(i))));
    }
    for (size_t i = 0; i < optimizers_.size(); ++i) {
      OptimizerState state;
      for (const auto& [name, tensor] : optimizers[i].tensors())
        state.tensors.emplace(name, tensor);
      state.groups = rows(optimizers[i]);
      ThrowIfError(Try(OptimizerFileName(i), [&] { optimizers_[i]->handle().LoadState(state); }));
      const absl::StatusOr<int64_t> steps = optimizers[i].GetInt("steps");
      ThrowIfError(steps.status());
      optimizers_[i]->set_steps(*steps);
    }
    for (size_t i = 0; i < schedulers_.size(); ++i) {
      ThrowIfError(Try(SchedulerFileName(i),
                       [&] { schedulers_[i]->scheduler().LoadState(rows(schedulers[i])); }));
    }
    for (size_t i = 0; i < loaders_.size(); ++i) {
      const absl::StatusOr<std::string> place = loaders[i].GetText("place");
      ThrowIfError(place.status());
      const absl::StatusOr<LoaderState> state = LoaderState::FromString(*place);
      ThrowIfError(state.status());
      ThrowIfError(Try(SamplerFileName(i), [&] { loaders_[i]->LoadState(*state); }));
    }
    // Gradients and scaler steps of a window that was open belong to the state that is given up.
    for (const auto& optimizer : optimizers_) {
      optimizer->handle().ZeroGrad(GradZeroing::kInPlace);
      optimizer->gradients_finished_ = false;
      optimizer->step_was_skipped_ = false;
    }
    window_factor_.reset();
    scaler_steps_ = 0;
    if (scaler_ != nullptr) {
      scaler_->Reset();
      if (scaler.has_value()) scaler_->LoadState(rows(*scaler));
    }
    for (size_t i = 0; i < registered_.size(); ++i) registered_[i].load(rows(registered[i]));

    if (random.has_value()) {
      std::map<std::string, at::Tensor> states;
      for (const auto& [name, tensor] : random->tensors()) states.emplace(name, tensor);
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
    last_checkpoint_ = reader.dir();
  });
}

}  // namespace muster::internal
