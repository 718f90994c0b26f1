#include "muster/internal/checkpoint_state.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
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
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory_left.h"
#include "base/size_option.h"
#include "muster/internal/failures.h"
#include "muster/internal/full_state.h"
#include "muster/internal/incoming_weights.h"
#include "muster/internal/slots.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/async_saver.h"
#include "worker/checkpoint/checkpoint_search.h"
#include "worker/checkpoint/clean_path.h"
#include "worker/checkpoint/disposal.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/foreign_state.h"
#include "worker/checkpoint/given_directory.h"
#include "worker/checkpoint/memory_tier.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/run_folder.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/collective/nested_collectives.h"
#include "worker/job/checkpoint_client.h"
#include "worker/parallel/meeting.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/disk_copies.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

constexpr int64_t kMaxKept = 1 << 30;

// Whether a save in memory is lost because memory or an answer is missing, which is no error: later
// saves follow.
bool IsLost(const absl::Status& status, int rank) {
  if (!absl::IsUnavailable(status) && !absl::IsResourceExhausted(status)) return false;
  if (rank == 0) {
    MUSTER_LOG(Warning) << "a checkpoint in memory was lost, the next one is tried: "
                        << status.message();
  }
  return true;
}

// The error of the previous save in memory, which ended with this status.
absl::Status LastInMemory(const absl::Status& ended, int rank) {
  if (ended.ok() || IsLost(ended, rank)) return absl::OkStatus();
  return absl::Status(ended.code(),
                      absl::StrCat("the last save in memory failed: ", ended.message()));
}

// The first failure. Each has been in the log since its save ended.
absl::Status FirstFailure(const std::vector<AsyncSaver::Outcome>& outcomes) {
  for (const AsyncSaver::Outcome& outcome : outcomes) {
    if (outcome.status.ok()) continue;
    return absl::Status(outcome.status.code(),
                        absl::StrCat("the asynchronous save of ", outcome.path,
                                     " failed: ", outcome.status.message()));
  }
  return absl::OkStatus();
}

// Shows on the board what this process waits in while the others may still do something else, and
// then `after`: what hangs from there on is not the call.
class InCall {
 public:
  // All of them literals.
  InCall(ProgressBoard& board, const char* entering, const char* after)
      : board_(board), after_(after) {
    board_.SetPhase(entering);
  }
  ~InCall() { board_.SetPhase(after_); }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  ProgressBoard& board_;
  const char* const after_;
};

// For the error of the first exchange of `call`, to which some process may not have come: a
// program that saves on its main process alone, as one saves without an Accelerator.
absl::Status CalledByAll(const absl::Status& met, absl::string_view call) {
  if (!absl::StrContains(met.message(), "ranks disagree")) return met;
  // Shared memory gives the same advice, without the name of the call.
  const absl::string_view facts =
      met.message().substr(0, met.message().find("; every process has to make"));
  return absl::Status(met.code(),
                      absl::StrCat(call, ": ", facts, "; every process has to call ", call,
                                   ", which is a collective: not only where is_main_process()"));
}

}  // namespace

CheckpointState::CheckpointState(Process& process, Registry& registry, LoopTracker& loops,
                                 StepController& steps, std::function<bool()> stopping)
    : process_(process),
      registry_(registry),
      loops_(loops),
      steps_(steps),
      writer_(process, registry, loops, steps, objects_),
      loader_(process, registry, loops, steps, objects_),
      stopping_(std::move(stopping)),
      registrar_(process.coordinator() == nullptr
                     ? nullptr
                     : MakeCoordinatorRegistrar(process.coordinator())) {
  steps_.SetBeforeChange([this] {
    if (saver_ != nullptr) saver_->WaitForCopy();
    if (memory_ != nullptr) memory_->WaitForCopy();
  });
}

CheckpointState::~CheckpointState() {
  saver_.reset();
  Disposal::OfProcess().Wait();
}

std::string CheckpointState::Root() const {
  return absl::StrCat(process_.ProjectDirectory(), "/checkpoints");
}

namespace {

// The variable has the meaning of the coordinator's option --checkpoint_key, for jobs without a
// coordinator.
std::string KeyFile() {
  const char* const file = std::getenv("MUSTER_CHECKPOINT_KEY");
  return file == nullptr ? "" : file;
}

}  // namespace

PublishOptions CheckpointState::Publishing() const {
  const CheckpointOptions& options = process_.options().checkpoint;
  int64_t keep = options.keep.value_or(0);  // 0: all
  if (const std::optional<int64_t> limit = process_.options().project.total_limit;
      !options.keep.has_value() && limit.has_value()) {
    // As in Accelerate, where 0 leaves the newest one.
    keep = *limit == 0 ? 1 : *limit;
  }
  return {.registrar = registrar_.get(),
          .keep = static_cast<int>(std::clamp<int64_t>(keep, -1, kMaxKept)),
          .keep_every = options.keep_every,
          .promote = options.promote,
          .key_file = KeyFile(),
          .progress = process_.joined().saves.get(),
          .disposal = &Disposal::OfProcess()};
}

absl::Status CheckpointState::CheckOptions() const {
  const CheckpointOptions& options = process_.options().checkpoint;
  if (options.keep_every < 0) {
    return absl::InvalidArgumentError(absl::StrCat("options.checkpoint.keep_every is ",
                                                   options.keep_every, "; it must be 0 or more"));
  }
  if (options.divide_above < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.checkpoint.divide_above is ", options.divide_above,
                     "; it must be a number of bytes, or 0 to divide every model"));
  }
  if (!options.promote && registrar_ == nullptr) {
    return absl::FailedPreconditionError(
        "options.checkpoint.promote is false, which needs a coordinator to record it: start the "
        "program with muster launch, or leave the option out");
  }
  if (options.disk_every < 1 || (options.disk_every > 1 && !options.memory)) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.checkpoint.disk_every is ", options.disk_every,
                     "; it must be 1 or, with options.checkpoint.memory, more"));
  }
  if (options.memory && !options.promote) {
    return absl::InvalidArgumentError(
        "options.checkpoint.memory cannot hold checkpoints back: leave out promote = false");
  }
  return absl::OkStatus();
}

void CheckpointState::OpenMemory(bool has_to_answer) {
  if (!process_.options().checkpoint.memory) return;
  if (memory_opened_ && !(has_to_answer && memory_unreachable_)) return;
  const Environment& environment = process_.environment();
  MemoryTier::MirrorOptions mirror;
  if (process_.options().checkpoint.mirror) {
    mirror.connect = [this] { return MakeBackgroundComm(process_.joined()); };
  }
  absl::StatusOr<std::unique_ptr<MemoryTier>> opened = MemoryTier::Open(
      process_.comm(), environment.memory_socket.value, environment.worker_id.value, mirror);
  memory_unreachable_ = !opened.ok() && !absl::IsFailedPrecondition(opened.status());
  // Without an answer it is unknown which state the agent has.
  if (has_to_answer && memory_unreachable_) ThrowIfError(opened.status());
  memory_opened_ = true;
  if (opened.ok()) {
    memory_ = *std::move(opened);
  } else if (process_.rank() == 0) {
    MUSTER_LOG(Warning) << "checkpoints go to the disk only, every "
                        << process_.options().checkpoint.disk_every
                        << ". save_state(): " << opened.status().message();
  }
}

bool CheckpointState::GoesToDisk(const std::string& directory) {
  const int64_t every = process_.options().checkpoint.disk_every;
  const bool failed = disk_failed_ || (saver_ != nullptr && saver_->failed());
  bool disk = !directory.empty() || since_disk_ + 1 >= every;
  if (every > 1 && directory.empty()) {
    // After an asynchronous save that has failed, the newest checkpoint on the disk is too old. A
    // process may learn of that, or of the stop, before the others do.
    disk |= OnAnyProcess(process_.comm(), stopping_() || failed);
  }
  return disk;
}

absl::Status CheckpointState::SaveToMemory(const CheckpointInfo& info, int64_t since_disk,
                                           absl::FunctionRef<absl::Status(StateWriter&)> write,
                                           absl::Status* earlier) {
  const CheckpointOptions& options = process_.options().checkpoint;
  absl::Status before;
  const absl::Status saved =
      memory_->Save(process_.comm(), info, since_disk, options.lazy, write, &before);
  *earlier = LastInMemory(before, process_.rank());
  if (absl::IsResourceExhausted(saved)) {
    if (process_.rank() == 0) {
      MUSTER_LOG(Warning) << "no more checkpoints in memory; those on the disk continue, every "
                          << options.disk_every << ". save_state(): " << saved.message();
    }
    // The last complete save stays with the agent, and is valid until training continues from
    // another state.
    saves_to_memory_ = false;
    return absl::OkStatus();
  }
  return IsLost(saved, process_.rank()) ? absl::OkStatus() : saved;
}

int64_t CheckpointState::AgreeOnNumber(const CheckpointFolder& folder, int64_t number) const {
  // Rank 0 looks, or one process of each node does; an error there reaches every process.
  std::string error;
  if (process_.rank() == 0 || process_.own_node().has_value()) {
    // `busy` is read before the folder: a save that ends in between is then seen in the folder.
    const bool busy = saver_ != nullptr && saver_->busy();
    const absl::StatusOr<int64_t> next = folder.NextNumber();
    if (next.ok()) {
      number = busy ? std::max(*next, next_numbered_) : *next;
    } else {
      error = std::string(next.status().message());
    }
  }
  if (process_.own_node().has_value()) {
    for (const auto& [other, why] : GatherObject(process_.comm(), std::make_tuple(number, error))) {
      number = std::max(number, other);
      if (error.empty()) error = why;
    }
  } else {
    std::tie(number, error) = BroadcastObject(process_.comm(), std::make_tuple(number, error), 0);
  }
  if (!error.empty()) ThrowIfError(absl::UnavailableError(error));
  return number;
}

absl::Status CheckpointState::Save(const std::string& wanted_directory) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { steps_.CheckAllTakePart("save_state()"); }); !here.ok()) {
    return here;
  }
  const InCall in_call(process_.progress(), "entering save_state", "after save_state");
  // Every rank reports whether it can save before any of them writes, so that none waits for a rank
  // that left.
  absl::Status mine = Guard([&] {
    for (const auto& model : registry_.models()) {
      if (model->sharded() != nullptr) model->sharded()->CheckNotMixedHere();
    }
  });
  if (mine.ok()) {
    mine = Guard([&] {
      steps_.CheckStepped("save_state()");
      steps_.CheckNoStepFailed("save_state()");
    });
  }
  for (const auto& model : registry_.models()) {
    // If others may be waiting for this rank inside the pass, they do not come here.
    const bool interrupted = model->sharded() != nullptr && model->sharded()->Interrupted();
    if (!mine.ok() && interrupted) return mine;
  }
  if (mine.ok()) mine = CheckSavable();
  // MeetAt throws instead of waiting if some rank of the group that divides a model is still in a
  // pass. All ranks of a job have such groups, also those that have no model any more.
  if (const std::shared_ptr<Comm> comm = shard_comm_.lock()) {
    std::string before;
    for (const auto& model : registry_.models()) {
      if (before.empty() && model->sharded() != nullptr) before = model->sharded()->Before();
    }
    const absl::Status met = Guard([&] { MeetAt(*comm, "save_state()", "", before); });
    if (!met.ok()) return mine.ok() ? met : mine;
  }
  if (absl::Status all = writer_.Agree(mine, directory); !all.ok()) {
    return CalledByAll(all, "save_state()");
  }
  process_.progress().SetPhase("save_state");
  CheckpointInfo info;
  info.world_size = process_.size();
  info.step = registry_.global_step();
  info.iteration = save_iteration_;
  loops_.SavePlace(&info);
  const bool done = loops_.EpochIsDone();
  const auto write = [this](StateWriter& writer) { return writer_.Write(writer); };
  return Guard([&] {
    const CheckpointFolder folder(Root());
    OpenMemory(/*has_to_answer=*/false);
    bool to_disk = GoesToDisk(directory);
    if (to_disk && directory.empty()) info.iteration = AgreeOnNumber(folder, info.iteration);
    // A save to a directory that the program names is not counted.
    const int64_t since_disk = !directory.empty() ? since_disk_ : to_disk ? 0 : since_disk_ + 1;
    absl::Status in_memory, earlier_in_memory;
    if (memory_ != nullptr && saves_to_memory_) {
      in_memory = SaveToMemory(info, since_disk, write, &earlier_in_memory);
      if (!saves_to_memory_ && !to_disk) {
        // The state must be saved somewhere.
        to_disk = true;
        info.iteration = AgreeOnNumber(folder, info.iteration);
      }
    }
    if (!to_disk) {
      ThrowIfError(in_memory);
      since_disk_ = since_disk;
      loops_.NoteSaved(absl::StrCat("the checkpoint of step ", info.step, " in memory"), done);
      ThrowIfError(earlier_in_memory);
      return;
    }
    absl::Status earlier;
    if (process_.options().checkpoint.asynchronous) {
      earlier = SaveBesideTraining(directory, info, write);
    } else if (!directory.empty()) {
      ThrowIfError(SaveCheckpoint(process_.comm(), directory, info, Publishing(), write,
                                  process_.own_node()));
    } else {
      ThrowIfError(SaveNumberedCheckpoint(process_.comm(), folder, info, Publishing(), write,
                                          process_.own_node()));
    }
    // After a failed save this line is not reached, so that the next save goes to the disk, too.
    if (directory.empty()) since_disk_ = 0;
    last_checkpoint_ = directory.empty() ? folder.PathOf(info.iteration) : directory;
    loaded_without_name_.reset();
    save_iteration_ = info.iteration + 1;
    loops_.NoteSaved(last_checkpoint_, done);
    ThrowIfError(earlier);
    ThrowIfError(in_memory);
    ThrowIfError(earlier_in_memory);
  });
}

absl::Status CheckpointState::CheckSavable() {
  if (steps_.averaged()) {
    return absl::FailedPreconditionError(
        "save_state inside ema.apply() would write the average as the model's weights: save before "
        "or after that scope");
  }
  if (steps_.between_windows()) registry_.ForgetUnheld();
  objects_.ForgetExpired();
  if (absl::Status here = Guard([&] { loops_.SettleLoaders(); }); !here.ok()) return here;
  if (absl::Status complete = writer_.Check(); !complete.ok()) return complete;
  if (!steps_.at_boundary()) {
    return absl::FailedPreconditionError(
        "save_state in the middle of an accumulation window would lose its gradients: save where "
        "accelerator.sync_gradients(), after optimizer.step()");
  }
  // A program that does this may have to stop here, and a checkpoint without a few gradients is
  // better than none.
  if (steps_.holds_back() && process_.rank() == 0) {
    MUSTER_LOG(Warning) << "save_state between backward() under no_sync() and the step that uses "
                           "its gradients: a checkpoint holds no gradients, so a run that resumes "
                           "from it trains without them; save after optimizer.step()";
  }
  return CheckOptions();
}

absl::Status CheckpointState::SaveBesideTraining(
    const std::string& directory, const CheckpointInfo& info,
    absl::FunctionRef<absl::Status(StateWriter&)> write) {
  const CheckpointOptions& options = process_.options().checkpoint;
  if (saver_ == nullptr) {
    std::unique_ptr<AsyncSaver> saver;
    // A single process may have no thread or connection left: then no process has a saver.
    ThrowIfAnyFailed(
        process_.comm(), GuardNamed("cannot begin to save beside training", [&] {
          absl::StatusOr<std::unique_ptr<Comm>> beside = MakeBackgroundComm(process_.joined());
          ThrowIfError(beside.status());
          saver = std::make_unique<AsyncSaver>(
              *std::move(beside),
              AsyncSaver::Options{.max_bytes_per_second = options.max_bytes_per_second,
                                  .local_ranks = process_.environment().local_world_size.value,
                                  .lazy = options.lazy});
        }));
    saver_ = std::move(saver);
  }
  AsyncSaver::Request request;
  request.info = info;
  request.node = process_.own_node();
  request.publish = Publishing();
  // The writing thread itself deletes old checkpoints: training does not wait for that thread, and
  // the next save, which may have begun already, has room on the disk once they are deleted.
  request.publish.disposal = nullptr;
  // If there is no memory to keep it for training, there is none for a copy either. The tensors
  // that this save gathers are on the disk already.
  if (const std::string disk = FolderOfOffload(process_.sharding()); !disk.empty()) {
    request.keep = [copies = std::make_shared<DiskCopies>(disk),
                    since = DiskCopies::Made()](const at::Tensor& tensor) {
      at::Tensor kept;
      const absl::Status done = Guard([&] { kept = copies->Keep(tensor, since); });
      return done.ok() ? absl::StatusOr<at::Tensor>(std::move(kept)) : done;
    };
  }
  if (directory.empty()) {
    request.folder.emplace(Root());
    request.total_limit = Publishing().keep;
  } else {
    request.dir = directory;
  }
  std::vector<AsyncSaver::Outcome> ended;
  const absl::Status begun = saver_->Begin(process_.comm(), request, write, &ended);
  const absl::Status earlier = FirstFailure(ended);
  // A save to a directory that the program names is not found by a load without a directory.
  disk_failed_ = directory.empty() ? !begun.ok() : disk_failed_ || !earlier.ok();
  ThrowIfError(begun);
  if (directory.empty()) next_numbered_ = info.iteration + 1;
  // The process is about to be ended: there may be no later call that waits.
  if (stopping_()) {
    const absl::Status last = Wait();
    return earlier.ok() ? last : earlier;
  }
  if (earlier.ok()) return earlier;
  return absl::Status(earlier.code(),
                      absl::StrCat(earlier.message(), "; ", request.path(), " is being written"));
}

absl::Status CheckpointState::WaitForSaver() {
  if (saver_ == nullptr) return absl::OkStatus();
  absl::Status failure = FirstFailure(saver_->Wait());
  disk_failed_ |= !failure.ok();
  return failure;
}

absl::Status CheckpointState::WaitForAll() {
  const absl::Status saved = Wait();
  // All processes agree on whether they save to memory.
  if (memory_ == nullptr) return saved;
  const absl::Status in_memory = Guard([&] {
    steps_.CheckAllTakePart("wait_for_checkpoint()");
    ThrowIfError(LastInMemory(memory_->Settle(process_.comm()), process_.rank()));
  });
  return saved.ok() ? in_memory : saved;
}

absl::Status CheckpointState::Wait() {
  // A save that takes many minutes is no hang.
  const bool busy = Disposal::OfProcess().busy() || (saver_ != nullptr && saver_->busy());
  if (busy) process_.progress().SetPhase("save_state");
  const absl::Status saved = WaitForSaver();
  Disposal::OfProcess().Wait();
  if (busy) process_.progress().SetPhase("after save_state");
  return saved;
}

absl::Status CheckpointState::Abandon() {
  if (saver_ != nullptr) saver_->Abandon();
  return WaitForSaver();
}

void CheckpointState::CheckProjectWritable(bool always) {
  // A program that names no folder may never save.
  if (project_checked_ || (!always && process_.environment().project_dir.value.empty())) return;
  project_checked_ = true;
  absl::Status writable;
  if (process_.rank() == 0) {
    const std::string folder = process_.ProjectDirectory();
    absl::Status made = MakeDirectories(folder);
    if (made.ok() && access(folder.c_str(), W_OK | X_OK) != 0) {
      made = absl::PermissionDeniedError(absl::StrCat(folder, " is not writable"));
    }
    if (!made.ok()) {
      writable = absl::Status(
          made.code(),
          absl::StrCat("the project folder cannot hold checkpoints: ", made.message(),
                       "; name another one (MUSTER_PROJECT_DIR, or options.project.directory). ",
                       "A program that saves nothing names none, and loads a checkpoint by its "
                       "path"));
    }
  }
  ThrowIfError(StatusOfMain(process_.comm(), writable));
}

absl::Status CheckpointState::SaveModel(ModelSlot& model, const std::string& wanted_directory,
                                        const std::string& max_shard_size) const {
  const std::string directory = CleanPath(wanted_directory);
  return Guard([&] {
    steps_.CheckAllTakePart("save_model()");
    const absl::StatusOr<int64_t> bytes = ParseSizeOption(max_shard_size);
    ThrowIfError(bytes.status());
    const absl::StatusOr<NodeGroups> groups =
        GroupsOf(process_.comm(), directory, process_.own_node());
    ThrowIfError(groups.status());
    // The disk may have no room for both, the old files and the new.
    Disposal::OfProcess().Wait();
    const absl::Status status = SaveWholeModel(model, groups->leads(), directory, *bytes);
    if (groups->nodes.size() > 1) return ThrowIfAnyFailed(process_.comm(), status);
    ThrowIfError(StatusOfMain(process_.comm(), status));
  });
}

absl::StatusOr<StateReader> CheckpointState::OpenAndRead(
    const std::string& directory, const std::function<void(StateReader&)>& read) {
  const CheckpointFolder folder(Root());
  absl::StatusOr<NodeGroups> groups = GroupsOf(
      process_.comm(), directory.empty() ? folder.PathOf(0) : directory, process_.own_node());
  ThrowIfError(groups.status());
  const bool in_parts = groups->nodes.size() > 1 && loader_.ReadsByFile();
  absl::Status of_read;
  absl::StatusOr<StateReader> reader = OpenAndReadCheckpoint(process_.comm(),
                                                             {.dir = directory,
                                                              .folder = folder,
                                                              .groups = *std::move(groups),
                                                              .registrar = registrar_.get(),
                                                              .in_parts = in_parts},
                                                             [&](StateReader& opened) {
                                                               of_read =
                                                                   Guard([&] { read(opened); });
                                                               return of_read;
                                                             });
  // An existing checkpoint lacks a file, which is different from having no checkpoint.
  if (absl::IsNotFound(of_read) && reader.status() == of_read) ThrowIfError(of_read);
  if (absl::IsNotFound(reader.status())) {
    ThrowIfAnyFailed(process_.comm(), CheckNoStateOfAccelerate(directory, folder));
  }
  if (!directory.empty() && absl::IsNotFound(reader.status())) {
    return absl::NotFoundError(
        absl::StrCat(reader.status().message(), CheckpointsInPlaceOfWeights(directory)));
  }
  return reader;
}

namespace {

// Whether load_weights() was given the weights of a model, of any library, and not a checkpoint of
// save_state(), which has several files and is checked by its manifest.
bool HoldsWeightsAlone(const std::string& path) {
  if (path.empty()) return false;
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return false;
  if (S_ISREG(info.st_mode)) return true;
  const std::string name = BaseName(path);
  // An unfinished save.
  if (HasMark(name, StemOf(name, kStagingMark), kStagingMark)) return false;
  for (const std::string& file : {std::string(kManifestName), OptimizerFileName(0),
                                  SamplerFileName(0), RandomStatesFileName(0)}) {
    if (PathExists(JoinPath(path, file))) return false;
  }
  return !absl::IsNotFound(WeightFiles::Open(path).status());
}

// (collective) The same error on every rank if one of them cannot load (`mine`), or if they were
// asked for different things: otherwise some would wait in an exchange of a search, or take another
// checkpoint for their copy of this one.
absl::Status AgreeOnLoad(Comm& comm, const absl::Status& mine, const std::string& call,
                         const GivenDirectory& directory, GivenAlike alike) {
  return Guard([&] {
    std::vector<StatusOnWire> statuses;
    std::vector<GivenDirectory> directories;
    const auto said =
        GatherObject(comm, std::make_tuple(OnWire(mine), call, directory.path, directory.folder));
    for (const auto& [status, unused, path, folder] : said) {
      statuses.push_back(status);
      directories.push_back({.path = path, .folder = folder});
    }
    ThrowFirst(statuses);
    for (size_t r = 1; r < said.size(); ++r) {
      const std::string &here = std::get<1>(said[r]), &there = std::get<1>(said[0]);
      if (here == there) continue;
      ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
          "rank ", r, " calls ", here, ", and rank 0 ", there, ": all processes load alike")));
    }
    ThrowIfError(CheckGivenAlike(call, directories, alike));
  });
}

// (collective) For a load that has found no checkpoint in `directory` (`missing`) and may begin
// from scratch: throws if something else is there, such as a checkpoint without its manifest, or a
// model.
void CheckFree(Comm& comm, const std::string& directory, const absl::Status& missing) {
  ThrowIfAnyFailed(
      comm, !IsOccupied(directory)
                ? absl::OkStatus()
                : absl::FailedPreconditionError(absl::StrCat(
                      missing.message(), "; training would begin from scratch, and could not save ",
                      "there: name a folder that is empty or does not exist, or take weights from ",
                      "this one with load_weights()")));
}

// On one disk the ranks may load from copies of one checkpoint, which are compared when they are
// open.
GivenAlike AlikeForLoad(const Process& process) {
  return process.own_node().has_value() ? GivenAlike::kByName : GivenAlike::kOrNone;
}

void CheckHoldOneModel(const std::string& path, size_t models) {
  if (models == 1) return;
  ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
      path, " holds the weights of one model, and ", models,
      " are prepared: load_weights() takes a checkpoint of save_state() for several; load each "
      "model with muster::load_model() before prepare()")));
}

// (collective) Each rank opens the files that it sees, and has hooks and options of its own. The
// same error on every rank if their fingerprints of all models say that they are about to load
// different weights.
void CheckSameWeights(Comm& comm, const std::string& path, const std::string& tensors,
                      const std::string& values) {
  if (comm.size() == 1) return;
  const auto all = GatherObject(comm, std::make_tuple(path, tensors, values));
  std::vector<size_t> others;
  bool same_tensors = true;
  for (size_t r = 1; r < all.size(); ++r) {
    const auto& [unused, of_tensors, of_values] = all[r];
    const bool same = of_tensors == std::get<1>(all[0]);
    if (same && of_values == std::get<2>(all[0])) continue;
    others.push_back(r);
    same_tensors = same_tensors && same;
  }
  if (others.empty()) return;
  ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
      "load_weights(): rank", others.size() == 1 ? " " : "s ", absl::StrJoin(others, ", "),
      " would load ", same_tensors ? "other values" : "other tensors", " than rank 0, which reads ",
      std::get<0>(all[0]),
      ": nothing is loaded; give all ranks the same files, hooks and options")));
}

}  // namespace

absl::Status CheckpointState::CheckWeightsLoadable(const LoadWeightsOptions& options) const {
  if (options.dtype.has_value()) {
    return absl::InvalidArgumentError(
        "load_weights cannot change the type of prepared models (options.dtype): their optimizers "
        "and gradients have it too; convert a model before prepare()");
  }
  if (steps_.averaged()) {
    return absl::FailedPreconditionError(
        "load_weights inside ema.apply() would lose the weights when that scope ends: load before "
        "or after it");
  }
  if (!steps_.at_boundary()) {
    return absl::FailedPreconditionError(
        "load_weights in the middle of an accumulation window would apply gradients of other "
        "weights: load where accelerator.sync_gradients(), after optimizer.step()");
  }
  if (steps_.holds_back()) {
    return absl::FailedPreconditionError(
        "load_weights between backward() under no_sync() and the step that uses its gradients "
        "would apply gradients of other weights: load after optimizer.step() or zero_grad()");
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadedState> CheckpointState::LoadWeights(const std::string& wanted_directory,
                                                         const LoadWeightsOptions& options) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { steps_.CheckAllTakePart("load_weights()"); }); !here.ok()) {
    return here;
  }
  const InCall in_call(process_.progress(), "entering load_weights", "after load_weights");
  // Updates may have failed on one process only, and the others would wait for it.
  const absl::Status mine = Guard([&] {
    steps_.CheckStepped("load_weights()");
    steps_.CheckNoLoadFailed("load_weights()");
    ThrowIfError(CheckWeightsLoadable(options));
  });
  GivenDirectory given = FollowGivenDirectory(directory);
  // Weights that no save has written may have any name: their contents are compared.
  if (HoldsWeightsAlone(directory)) given.folder.clear();
  if (absl::Status all =
          AgreeOnLoad(process_.comm(), mine, "load_weights()", given, AlikeForLoad(process_));
      !all.ok()) {
    return CalledByAll(all, "load_weights()");
  }
  if (steps_.between_windows()) registry_.ForgetUnheld();
  Wait().IgnoreError();  // a failure is in the log
  process_.progress().SetPhase("load_weights");
  LoadedState report;
  const absl::Status status = Guard([&] {
    const Models& models = registry_.models();
    std::vector<std::unique_ptr<IncomingWeights>> incoming;  // of the first models
    std::unordered_set<std::string> read;
    std::optional<StateReader> checkpoint;
    // All ranks read the same kind, even if each has a folder of its own.
    const bool of_files = BroadcastObject(process_.comm(), HoldsWeightsAlone(directory));
    if (of_files) {
      report.directory = directory;
      RunOnAll(process_.comm(), [&] {
        CheckHoldOneModel(directory, models.size());
        incoming.push_back(IncomingFiles(*models[0], directory, options));
      });
    } else {
      absl::StatusOr<StateReader> reader = OpenAndRead(directory, [&](StateReader& opened) {
        read.clear();
        incoming = loader_.ReadWeightsAlone(opened, options, &read);
      });
      ThrowIfError(reader.status());
      report.directory = reader->dir();
      checkpoint = *std::move(reader);
    }
    // Optimizers keep their states, which may belong to different steps on different ranks.
    for (const auto& model : models) {
      if (model->sharded() != nullptr) model->sharded()->CheckNotMixed();
    }
    RunOnAll(process_.comm(), [&] { GiveModelsOwnMemory(models); });
    std::vector<std::string> equal;
    std::string tensors, values;
    RunOnAll(process_.comm(), [&] {
      for (const auto& one : incoming) {
        equal.push_back(one->Compare());
        if (process_.size() == 1) continue;
        const IncomingWeights::Fingerprint fingerprint = one->FingerprintHere();
        absl::StrAppend(&tensors, fingerprint.tensors, " ");
        absl::StrAppend(&values, fingerprint.values, " ");
      }
    });
    CheckSameWeights(process_.comm(), report.directory, tensors, values);
    for (size_t i = 0; i < incoming.size(); ++i) {
      const std::vector<std::string> all = process_.comm().AllGatherBytes(equal[i]);
      RunOnAll(process_.comm(), [&] { incoming[i]->Decide(all); });
    }
    RunOnAll(process_.comm(), [&] { steps_.AboutToChange(); });
    const absl::Status stored = Guard([&] {
      RunOnAll(process_.comm(), [&] {
        for (const auto& one : incoming) one->Store();
      });
    });
    if (!stored.ok()) {
      for (const auto& model : models) {
        if (model->sharded() == nullptr) continue;
        model->sharded()->NoteFailedLoad(
            "load_weights() has failed on its way: parameters are a mixture of old and new values: "
            "call load_state(), or end the program");
      }
      steps_.NoteFailedLoad("load_weights()");
      ThrowIfError(stored);
    }
    ForgetCastWeights();
    for (size_t i = 0; i < models.size(); ++i) {
      if (i < incoming.size()) {
        report.models.push_back(incoming[i]->report());
        continue;
      }
      LoadedWeights& none = report.models.emplace_back();
      for (const auto& [name, unused] : TensorsOf(models[i]->source())) {
        none.missing.push_back(name);
      }
    }
    if (!checkpoint.has_value()) return;
    for (const ManifestFile& file : checkpoint->manifest().files) {
      if (read.count(file.name) == 0) report.left_out.push_back(file.name);
    }
  });
  if (!status.ok()) return status;
  return report;
}

void CheckpointState::LetGo(StateReader reader, LoadedFiles loaded) {
  // A GPU's memory is freed at once, because the first steps may need it.
  if (!process_.device().is_cpu()) {
    loaded.weights.clear();
    loaded.optimizers.clear();
  }
  uint64_t bytes = 0;
  for (const ManifestFile& file : reader.manifest().files) bytes += file.digest.bytes;
  // The first step may need memory before this is free: use the thread only if there is enough for
  // both.
  if (reader.in_memory() || MemoryLeft() / 2 < bytes) return;
  Disposal::OfProcess().Free(
      std::make_shared<std::pair<StateReader, LoadedFiles>>(std::move(reader), std::move(loaded)));
}

absl::Status CheckpointState::Load(const std::string& wanted_directory, bool may_be_missing) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { steps_.CheckAllTakePart("load_state()"); }); !here.ok()) {
    return here;
  }
  if (steps_.between_windows()) registry_.ForgetUnheld();
  objects_.ForgetExpired();
  const InCall in_call(process_.progress(), "entering load_state", "after load_state");
  const std::string call = may_be_missing ? "load_state_if_present()" : "load_state()";
  const absl::Status mine = Guard([&] { loops_.SettleLoaders(); });
  if (absl::Status all = AgreeOnLoad(process_.comm(), mine, call, FollowGivenDirectory(directory),
                                     AlikeForLoad(process_));
      !all.ok()) {
    return CalledByAll(all, call);
  }
  // The wanted checkpoint may be the one being written. A failure is in the log.
  Wait().IgnoreError();
  process_.progress().SetPhase("load_state");
  // Hooks may use the weights, even those that a failed step has changed in part.
  std::optional<StateLoader::Scope> scope(std::in_place, loader_);
  const absl::Status status = Guard([&] {
    OpenMemory(/*has_to_answer=*/true);
    const bool memory = directory.empty() && memory_ != nullptr;
    const int64_t newest = memory ? NewestStepOnDisk(CheckpointFolder(Root())) : -1;
    if (memory && LoadFromMemory(newest)) return;
    if (may_be_missing && directory.empty()) CheckProjectWritable(/*always=*/true);
    LoadedFiles loaded;
    bool from_memory = false;
    absl::Status in_memory;
    absl::StatusOr<StateReader> reader = OpenAndRead(directory, [&](StateReader& opened) {
      // Newer checkpoints were damaged: the state in memory was older than these, but may be newer
      // than this one.
      const int64_t step = opened.info().step;
      // Errors of the memory must not count as errors of the disk.
      in_memory = Guard([&] { from_memory = memory && step < newest && LoadFromMemory(step); });
      if (in_memory.ok() && !from_memory) loaded = loader_.CheckAndReadAll(opened);
    });
    ThrowIfError(in_memory);
    // All checkpoints on the disk are damaged or held back.
    if (memory && (absl::IsDataLoss(reader.status()) || absl::IsNotFound(reader.status()))) {
      from_memory = LoadFromMemory(-1);
    }
    if (from_memory) return;
    if (!may_be_missing || !absl::IsNotFound(reader.status())) ThrowIfError(reader.status());
    if (!reader.ok() && !directory.empty()) {
      CheckFree(process_.comm(), directory, reader.status());
    }
    // The state in memory belongs to another past than the training that begins here. Discard it
    // before training begins: if that fails, a later load would go back to it.
    if (memory_ != nullptr) ThrowIfError(memory_->Forget(process_.comm()));
    if (!reader.ok()) return;
    loader_.Apply(*reader, loaded);
    NoteLoaded(*reader);
    since_disk_ = 0;
    LetGo(*std::move(reader), std::move(loaded));
  });
  scope.reset();
  if (status.ok()) process_.progress().SetRestored();
  return status;
}

void CheckpointState::NoteLoaded(const StateReader& reader) {
  save_iteration_ = reader.info().iteration;
  if (reader.in_memory()) return;
  last_checkpoint_ = reader.dir();
  loaded_without_name_.reset();
  const std::string name = BaseName(reader.dir());
  if (HasMark(name, StemOf(name, kStagingMark), kStagingMark)) {
    loaded_without_name_ = reader.manifest();
  }
  ++save_iteration_;
}

const std::string& CheckpointState::last_checkpoint() {
  if (!loaded_without_name_.has_value() || PathExists(last_checkpoint_)) return last_checkpoint_;
  // It was renamed, unless another checkpoint has that name.
  const std::string name(StemOf(BaseName(last_checkpoint_), kStagingMark));
  const std::string named = JoinPath(ParentPath(last_checkpoint_), name);
  const absl::StatusOr<Manifest> manifest = ReadManifest(named);
  if (manifest.ok() && EncodeManifest(*manifest) == EncodeManifest(*loaded_without_name_)) {
    last_checkpoint_ = named;
    loaded_without_name_.reset();
  }
  return last_checkpoint_;
}

int64_t CheckpointState::NewestStepOnDisk(const CheckpointFolder& folder) const {
  absl::StatusOr<int64_t> mine = -1;
  // Each node may have different checkpoints on its own disk.
  if (process_.rank() == 0 || process_.own_node().has_value()) mine = folder.NewestStep();
  int64_t newest = -1;
  std::vector<StatusOnWire> statuses;
  for (const auto& [step, status] :
       GatherObject(process_.comm(), std::make_tuple(mine.value_or(-1), OnWire(mine.status())))) {
    newest = std::max(newest, step);
    statuses.push_back(status);
  }
  ThrowFirst(statuses);
  return newest;
}

bool CheckpointState::LoadFromMemory(int64_t on_disk) {
  const absl::Time start = Clock::Real().Now();
  absl::StatusOr<std::optional<MemoryTier::Found>> found =
      memory_->Find(process_.comm(), {.create = nullptr, .from_step = on_disk});
  ThrowIfError(found.status());
  if (!found->has_value()) return false;
  MemoryTier::Found& newest = **found;
  const LoadedFiles loaded = loader_.CheckAndReadAll(newest.reader);
  loader_.Apply(newest.reader, loaded);
  NoteLoaded(newest.reader);
  memory_->Keep(newest);
  since_disk_ = newest.since_disk;
  if (process_.rank() == 0) {
    MUSTER_LOG(Info) << "loaded " << newest.reader.dir() << " in "
                     << absl::FormatDuration(
                            absl::Trunc(Clock::Real().Now() - start, absl::Microseconds(100)));
  }
  return true;
}

}  // namespace muster::internal
