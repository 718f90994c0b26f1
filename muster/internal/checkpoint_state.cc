#include "muster/internal/checkpoint_state.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory_left.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "muster/internal/backward_updates.h"
#include "muster/internal/full_state.h"
#include "muster/internal/incoming_weights.h"
#include "muster/internal/model_source.h"
#include "muster/internal/slots.h"
#include "worker/checkpoint/async_saver.h"
#include "worker/checkpoint/checkpoint_search.h"
#include "worker/checkpoint/clean_path.h"
#include "worker/checkpoint/device_uploads.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/disposal.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/memory_tier.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/planned_files.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/read_to_device.h"
#include "worker/checkpoint/run_folder.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/shared_files.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/collective/nested_collectives.h"
#include "worker/collective/shm_segment.h"
#include "worker/job/checkpoint_client.h"
#include "worker/parallel/meeting.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/disk_copies.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"

namespace muster::internal {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxKept = 1 << 30;

// What the list of the tensors of a plan may have, of one rank and of all ranks but rank 0: a
// report to the coordinator has room for it, and the coordinator for those of all. The plan of a
// larger model is one of files.
constexpr size_t kMaxListedBytes = 512 << 10;
constexpr size_t kMaxListedOfOthers = 4 << 20;

// In an optimizer's file: which parameters its states are of.
constexpr char kParameters[] = "parameters";

// A row of numbers "name" becomes the scalars "name.0", "name.1", ...; without numbers it is
// "name.empty" alone, by which TakeRows() knows its name.
void PutRows(const PlainState& rows, StateDict* state) {
  for (const auto& [name, row] : rows) {
    if (row.empty()) state->SetDouble(absl::StrCat(name, ".empty"), 0);
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

PlainState Rows(const StateDict& file) {
  absl::StatusOr<PlainState> taken = TakeRows(file);
  ThrowIfError(taken.status());
  return *std::move(taken);
}

// After a hook has had them.
void CheckWeights(const std::vector<NamedTensors>& weights, size_t models, const char* where) {
  TORCH_CHECK(weights.size() == models, "a hook of ", where, " left ", weights.size(),
              " lists of weights for ", models, " models: it may empty a list but not remove it");
}

// A hook may remove itself or others while it runs; those that are removed run no more.
template <class Hook, class... Args>
void RunHooks(const std::map<int64_t, std::shared_ptr<const Hook>>& hooks, const char* where,
              std::vector<NamedTensors>& weights, Args&... args) {
  const size_t models = weights.size();
  const auto all = hooks;
  for (const auto& [id, hook] : all) {
    if (hooks.count(id) == 0) continue;
    (*hook)(weights, args...);
    CheckWeights(weights, models, where);
  }
}

// Whether it has not been removed.
template <class Registered>
bool IsIn(const std::vector<Registered>& all, const Registered& object) {
  return std::any_of(all.begin(), all.end(),
                     [&](const Registered& one) { return one.number == object.number; });
}

// Whether a save in memory is lost for lack of memory or of an answer, which is no error: others
// follow.
bool IsLost(const absl::Status& status, int rank) {
  if (!absl::IsUnavailable(status) && !absl::IsResourceExhausted(status)) return false;
  if (rank == 0) {
    MUSTER_LOG(Warning) << "a checkpoint in memory was lost, the next one is tried: "
                        << status.message();
  }
  return true;
}

// The message about the previous save in memory, which ended with this status.
absl::Status LastInMemory(const absl::Status& ended, int rank) {
  if (ended.ok() || IsLost(ended, rank)) return absl::OkStatus();
  return absl::Status(ended.code(),
                      absl::StrCat("the last save in memory failed: ", ended.message()));
}

// Runs tensor code that throws inside of a function that returns Status.
template <class F>
absl::Status Try(const std::string& what, const F& function) {
  const absl::Status status = Guard(function);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

void CheckCount(const std::string& dir, int saved, const char* what, size_t here,
                const char* advice) {
  if (saved == static_cast<int>(here)) return;
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      dir, " holds ", saved, " ", what, "(s), but ", here, " are prepared here: ", advice)));
}

// The files of the i-th model, and those of the i-th optimizer.
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

// `uploads`: null, or what takes large tensors to the device.
StateDict ReadFile(const StateReader& reader, const std::string& name,
                   DeviceUploads* uploads = nullptr) {
  absl::StatusOr<StateDict> file =
      uploads == nullptr ? reader.Read(name) : ReadToDevice(reader, name, *uploads);
  ThrowIfError(file.status());
  return *std::move(file);
}

// Of all ranks, code and message of each. The same on every process; it names the rank.
void ThrowFirst(const std::vector<std::tuple<int, std::string>>& statuses) {
  const bool alike = std::all_of(statuses.begin(), statuses.end(),
                                 [&](const auto& status) { return status == statuses[0]; });
  for (size_t r = 0; r < statuses.size(); ++r) {
    const auto& [code, message] = statuses[r];
    if (code == 0) continue;
    ThrowIfError(absl::Status(static_cast<absl::StatusCode>(code),
                              alike ? message : absl::StrCat("rank ", r, ": ", message)));
  }
}

// Before values are loaded into them.
void GiveModelsOwnMemory(const Models& models) {
  for (const auto& model : models) {
    ModelSource::Named tensors = model->source().buffers();
    // What a sharded model keeps are parts of its parameters.
    if (model->sharded() == nullptr) {
      const ModelSource::Named parameters = model->source().parameters();
      tensors.insert(tensors.end(), parameters.begin(), parameters.end());
    }
    GiveOwnMemory(tensors);
  }
}

// (collective)
bool OnAnyProcess(Comm& comm, bool here) {
  bool anywhere = false;
  for (const std::string& one : comm.AllGatherBytes(here ? "1" : "0")) anywhere |= one == "1";
  return anywhere;
}

// What hooks have added under a name that is there replaces it.
NamedTensors LastOfEach(const NamedTensors& weights) {
  std::map<std::string, at::Tensor> last;
  for (const auto& [name, tensor] : weights) last.insert_or_assign(name, tensor);
  return {last.begin(), last.end()};
}

// Of `file`. `hooks`: they may have left tensors out, or all. Returns the names of those that are
// left out of a model that is loaded; "": none.
std::string LoadModel(ModelSlot& model, const NamedTensors& weights, const std::string& file,
                      bool hooks) {
  std::string missing;
  if (weights.empty() && hooks) return missing;
  if (model.sharded() != nullptr) {
    // Nothing is gathered: it may have no values so far. CheckModel() has looked at all ranks'
    // parts.
    CheckpointShards shards(model, file, {.strict = !hooks});
    shards.Take(LastOfEach(weights));
    shards.Compare();
    shards.Store();
    return absl::StrJoin(shards.report().missing, ", ");
  }
  ThrowIfError(LoadTensors(weights, WantedOf(model, weights, TensorsOf(model.source())), file,
                           {.allow_missing = hooks, .missing = &missing}));
  return missing;
}

// As LoadModel, without changes and without collectives.
void CheckModel(ModelSlot& model, const NamedTensors& weights, const std::string& file,
                bool hooks) {
  if (weights.empty() && hooks) return;
  if (model.sharded() != nullptr) {
    CheckWholeWeights(model, weights, file, hooks);
    // By the rules of LoadModel(), also for what tied names have in this rank's parts.
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

// With what has happened to the state until then.
absl::Status WithOutcome(const absl::Status& status, const char* outcome) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), "; ", outcome));
}

// The first failure. Each is in the log since the save ended.
absl::Status FirstFailure(const std::vector<AsyncSaver::Outcome>& outcomes) {
  for (const AsyncSaver::Outcome& outcome : outcomes) {
    if (outcome.status.ok()) continue;
    return absl::Status(outcome.status.code(),
                        absl::StrCat("the asynchronous save of ", outcome.path,
                                     " failed: ", outcome.status.message()));
  }
  return absl::OkStatus();
}

}  // namespace

// The files that the ranks write together, for each divided model; none for the others, which rank
// 0 writes.
struct CheckpointState::Division {
  std::vector<DividedModel> models;
  std::vector<std::map<std::string, int>> writers;  // rank by tensor, of each model

  void Add(DividedModel model) {
    std::map<std::string, int>& ranks = writers.emplace_back();
    for (const DividedFile& file : model.files) {
      for (const std::string& tensor : file.tensors) ranks.emplace(tensor, file.rank);
    }
    models.push_back(std::move(model));
  }

  bool Divides(size_t model) const { return !models[model].files.empty(); }
  bool DividesAny() const {
    return std::any_of(models.begin(), models.end(),
                       [](const DividedModel& model) { return !model.files.empty(); });
  }
  // Whether rank `rank` writes tensor `name` of model `model`.
  bool Writes(int rank, size_t model, const std::string& name) const {
    if (!Divides(model)) return rank == 0;
    const auto found = writers[model].find(name);
    return found != writers[model].end() && found->second == rank;
  }
};

// What a sharded model has failed with.
struct CheckpointState::Forgotten {
  std::shared_ptr<ModelSlot> model;
  ShardedModel::Failures failures;
};

struct CheckpointState::Plan {
  // The states of the parameters in one file of a model are a file, too.
  struct OptimizerPart {
    int rank = 0;                       // its writer
    std::vector<std::string> known_as;  // the optimizer's names
  };

  // What it was made for.
  Layout layout;
  bool hooks = false, apart = false;

  Division division;
  std::vector<std::string> indexes;                       // of each model; empty: it is one file
  std::vector<std::vector<OptimizerPart>> optimizers;     // of each optimizer, files of states
  std::map<std::pair<size_t, size_t>, StateSlots> slots;  // of each optimizer's part of a model

  // The tensors that the checkpoint must hold, as far as this process knows, and the parts that it
  // writes: see kPlanKey. Of the save that is made.
  Json tensors = Json::array();
  Json parts = Json::object();
  size_t listed_bytes = 0;                       // of `tensors`, at least as many as in a report
  std::map<std::string, TensorList> files = {};  // the same tensors, by file

  void BeginSave() {
    tensors = Json::array();
    parts = Json::object();
    files.clear();
    listed_bytes = 0;
  }
  // `group`: the file that holds it, or of which a part does, `file`.
  void Holds(const std::string& group, const std::string& file, const std::string& name,
             at::ScalarType type, at::IntArrayRef shape) {
    // Another type is refused when it is written.
    const absl::StatusOr<SafetensorsType> known = ToSafetensorsType(type);
    if (!known.ok()) return;
    files[file].Add(name, SafetensorsTypeName(*known), shape);
    listed_bytes += group.size() + name.size() + 16 * shape.size() + 40;
    // It is not needed then.
    if (listed_bytes > kMaxListedBytes) return;
    tensors.push_back({group, name, std::string(SafetensorsTypeName(*known)), shape.vec()});
  }
  void Holds(const std::string& group, const std::string& file, const std::string& name,
             const at::Tensor& tensor) {
    Holds(group, file, name, tensor.scalar_type(), tensor.sizes());
  }
};

CheckpointState::CheckpointState(Process& process, Registry& registry, LoopTracker& loops,
                                 StepController& steps, std::function<bool()> stopping)
    : process_(process),
      registry_(registry),
      loops_(loops),
      steps_(steps),
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

std::optional<int> CheckpointState::OwnNode() const {
  const Environment& environment = process_.environment();
  // Not by the number of nodes: those are hosts by name, and machines from one image share one.
  if (!process_.options().project.save_on_each_node || environment.world_size.value < 2)
    return std::nullopt;
  return environment.node_rank.value;
}

namespace {

// As the coordinator's option --checkpoint_key, for jobs that have none.
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
  // Nobody knows what it has.
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
  bool disk = !directory.empty() || since_disk_ + 1 >= every;
  if (every > 1 && directory.empty()) {
    // A process may hear of the end before the others do.
    for (const std::string& stopping : process_.comm().AllGatherBytes(stopping_() ? "1" : "0")) {
      disk |= stopping == "1";
    }
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
    // The last whole save stays with the agent, and counts until training begins elsewhere.
    saves_to_memory_ = false;
    return absl::OkStatus();
  }
  return IsLost(saved, process_.rank()) ? absl::OkStatus() : saved;
}

absl::Status CheckpointState::CheckComplete(const Layout& layout) {
  for (const auto& optimizer : registry_.optimizers()) {
    const std::string why = optimizer->handle().CannotSave();
    if (!why.empty()) return absl::FailedPreconditionError(why);
  }
  if (registry_.models().empty() && registry_.stepped() && registered_.empty() &&
      save_hooks_.empty()) {
    return absl::FailedPreconditionError(
        "save_state would write no model, although optimizers have stepped: prepare() the model "
        "that is trained, and save before free_memory()");
  }
  if (!registered_.empty() || !save_hooks_.empty() || complete_ == layout) return absl::OkStatus();
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
  complete_ = layout;
  return absl::OkStatus();
}

namespace {

// Of a tensor, without its values; equal for two names of one.
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

}  // namespace

CheckpointState::Layout CheckpointState::LookAtLayout() const {
  BlockDigester shared;
  size_t here = absl::HashOf(process_.options().checkpoint.divide_above);
  for (size_t i = 0; i < registry_.models().size(); ++i) {
    ModelSlot& model = *registry_.models()[i];
    here = absl::HashOf(here, static_cast<const void*>(&model),
                        static_cast<const void*>(model.sharded()),
                        static_cast<const void*>(model.ddp()));
    if (model.sharded() != nullptr) {
      for (const at::Tensor& shard : model.sharded()->shards()) {
        here = absl::HashOf(here, static_cast<const void*>(shard.unsafeGetTensorImpl()));
      }
    }
    const auto parameters = model.source().parameters();
    const bool together = IsDivisible(model, parameters);
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
  for (const auto& optimizer : registry_.optimizers()) {
    const OptimizerHandle& handle = optimizer->handle();
    here = absl::HashOf(here, static_cast<const void*>(optimizer.get()), handle.id(),
                        handle.parameters_version(), handle.parameter_names());
    for (const at::Tensor& parameter : handle.parameters()) {
      here = absl::HashOf(here, static_cast<const void*>(parameter.unsafeGetTensorImpl()));
    }
  }
  return {.here = here, .shared = shared.Finish()};
}

CheckpointState::Plan CheckpointState::MakePlan() const {
  Plan plan{.layout = layout_,
            .hooks = agreed_.hooks,
            .apart = agreed_.apart,
            .division = {},
            .indexes = {},
            .optimizers = {},
            .slots = {}};
  const Models& models = registry_.models();
  for (size_t i = 0; i < models.size(); ++i) {
    // Hooks get whole models, on rank 0. Processes that have trained apart have weights and states
    // of their own: those of rank 0 count.
    ModelSlot& model = *models[i];
    const bool divide = IsDivisible(model, model.source().parameters()) && !plan.hooks &&
                        (model.sharded() != nullptr || !plan.apart);
    plan.division.Add(divide ? DivideModel(model, process_.size()) : DividedModel());
    plan.indexes.emplace_back();
    const std::vector<DividedFile>& files = plan.division.models[i].files;
    if (files.empty()) continue;
    ShardPlan index{.files = {}, .total_bytes = plan.division.models[i].bytes, .index_name = {}};
    for (size_t k = 0; k < files.size(); ++k) {
      index.files.push_back(
          {PartFileName(ModelFileName(static_cast<int>(i)), k, files.size()), files[k].tensors});
    }
    if (process_.rank() == 0) plan.indexes.back() = EncodeShardIndex(index);
  }
  for (const auto& optimizer : registry_.optimizers()) {
    std::vector<Plan::OptimizerPart>& parts = plan.optimizers.emplace_back();
    for (size_t m = 0; m < models.size(); ++m) {
      if (!plan.division.Divides(m)) continue;
      const std::map<std::string, std::string> names = NamesIn(optimizer->handle(), *models[m]);
      if (names.empty()) continue;
      for (const DividedFile& file : plan.division.models[m].files) {
        Plan::OptimizerPart& part = parts.emplace_back();
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

namespace {

// The tensors of a divided model, those in the files of other processes included.
void AddWholeModel(ModelSlot& model, const std::vector<DividedFile>& files,
                   const std::function<void(size_t file, const std::string& name,
                                            at::ScalarType type, at::IntArrayRef shape)>& add) {
  std::map<std::string, std::pair<at::ScalarType, std::vector<int64_t>>> known;
  for (const auto& [name, parameter] : model.source().parameters()) {
    // A shard has the type of what is saved.
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

}  // namespace

CheckpointState::PlanCounts CheckpointState::plan_counts() const {
  return {.saves_planned = saves_planned_,
          .saves_reused = saves_reused_,
          .files_planned = file_plans_.made(),
          .files_reused = file_plans_.reused()};
}

absl::Status CheckpointState::WriteModels(StateWriter& writer,
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
    // All processes have agreed on it: what another one writes, too.
    if (process_.rank() == 0) {
      AddWholeModel(
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

absl::Status CheckpointState::WriteOptimizer(StateWriter& writer, size_t index,
                                             OptimizerState state) const {
  const auto& slot = registry_.optimizers()[index];
  const std::string name = OptimizerFileName(static_cast<int>(index));
  const std::vector<Plan::OptimizerPart>& parts = plan_->optimizers[index];
  // What is gathered from several processes is a copy already.
  const bool live = !IsSharded(slot->handle(), registry_.models());
  // Without states their order means nothing.
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
      // What another rank writes is not to be among the rest.
      const std::map<std::string, at::Tensor> taken = TakeStateOf(parameter, &state);
      const bool mine = parts[k].rank == process_.rank();
      for (const auto& [key, tensor] : taken) {
        // One rank alone: the other might plan by files where that one lists tensors.
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
    file.SetText(kParameters, DescribeParameters(slot->handle(), registry_.models()));
  }
  return writer.Write(name, file);
}

absl::Status CheckpointState::WriteShared(StateWriter& writer) const {
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

std::optional<size_t> CheckpointState::DividedModelOf(size_t index) const {
  if (registered_[index].divided == nullptr) return std::nullopt;
  const std::shared_ptr<ModelSlot> model = registered_[index].divided->model();
  const auto& models = registry_.models();
  const auto at = std::find(models.begin(), models.end(), model);
  TORCH_CHECK(model != nullptr && at != models.end(), "registered object ", index,
              " belongs to a sharded model that is not prepared any more: keep the prepared model "
              "for as long as its average is registered");
  return static_cast<size_t>(at - models.begin());
}

absl::Status CheckpointState::WriteRegistered(StateWriter& writer, const Division& division,
                                              size_t index, const StateDict& collected) const {
  const std::string name = CustomFileName(static_cast<int>(index));
  // The tensors for the parameters in each file of the model are a file, too.
  const size_t model = *DividedModelOf(index);
  std::set<std::string> apart;
  if (division.Divides(model)) {
    const std::vector<DividedFile>& files = division.models[model].files;
    for (size_t k = 0; k < files.size(); ++k) {
      StateDict part;
      const std::string part_name = PartFileName(name, k, files.size());
      for (const std::string& tensor : files[k].tensors) {
        const std::string key = registered_[index].divided->KeyOf(tensor);
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

void CheckpointState::CopyParametersLater(StateWriter& writer) const {
  for (const auto& optimizer : registry_.optimizers()) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      writer.CopyLater(parameter);
    }
  }
}

bool CheckpointState::IsDivisible(ModelSlot& model, const NamedTensors& parameters) const {
  if (model.sharded() != nullptr) return true;
  if (model.ddp() == nullptr) return false;
  int64_t bytes = 0;
  for (const auto& [name, parameter] : parameters) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes > process_.options().checkpoint.divide_above;
}

void CheckpointState::ExpectBytes(
    StateWriter& writer, const std::vector<NamedTensors>& weights,
    const std::vector<std::optional<OptimizerState>>& optimizers) const {
  uint64_t mine = 0, models = 0, states = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    uint64_t bytes = 0;
    for (const auto& [name, tensor] : weights[i]) bytes += tensor.nbytes();
    const bool divided = plan_->division.Divides(i);
    if (divided || process_.rank() == 0) mine += bytes;
    models += divided ? plan_->division.models[i].bytes : bytes;
  }
  bool whole = false;  // of unsharded models every process has all of the states
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

absl::Status CheckpointState::Write(StateWriter& writer) {
  writer.PlanWith(&file_plans_);
  CopyParametersLater(writer);
  const Models& models = registry_.models();
  const int rank = process_.rank();
  if (!agreed_.same_plan) {
    plan_.reset();
    plan_ = std::make_unique<Plan>(MakePlan());
    ++saves_planned_;
    agreed_.same_plan = true;  // if this save is written to a second place
  }
  plan_->BeginSave();
  const Division& division = plan_->division;
  // What this process alone fails at until all exchanges are over.
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
  std::vector<std::optional<StateDict>> collected(registered_.size());
  for (size_t i = 0; i < registered_.size(); ++i) {
    const std::optional<size_t> model = DividedModelOf(i);
    if (!model.has_value()) continue;
    collected[i] = registered_[i].divided->Collect(
        [&](const std::string& name) { return division.Writes(rank, *model, name); }, &failure);
  }
  // No collectives from here on: a rank whose disk is full leaves no other waiting.
  if (failure != nullptr) std::rethrow_exception(failure);
  const std::vector<int64_t> registered = NumbersOfRegistered();
  RunHooks(save_hooks_, "save_state()", weights, writer);
  CheckStillRegistered(registered, "save_state()");
  ExpectBytes(writer, weights, optimizers);
  MUSTER_RETURN_IF_ERROR(WriteModels(writer, weights));
  for (size_t i = 0; i < optimizers.size(); ++i) {
    if (!optimizers[i].has_value()) continue;
    MUSTER_RETURN_IF_ERROR(WriteOptimizer(writer, i, *std::move(optimizers[i])));
  }
  if (rank == 0) MUSTER_RETURN_IF_ERROR(WriteShared(writer));
  for (size_t i = 0; i < registered_.size(); ++i) {
    if (!collected[i].has_value()) continue;
    MUSTER_RETURN_IF_ERROR(WriteRegistered(writer, division, i, *collected[i]));
  }
  // Last, since they are the program's: they may register and remove objects, also themselves.
  const std::vector<Registered> objects = registered_;
  for (size_t i = 0; i < objects.size() && rank == 0; ++i) {
    if (collected[i].has_value()) continue;
    TORCH_CHECK(IsIn(registered_, objects[i]), "save_state(): the save function of a registered ",
                "object has removed object ", i, " before it was saved: do so before or after it");
    MUSTER_RETURN_IF_ERROR(writer.Write(CustomFileName(static_cast<int>(i)), objects[i].save()));
  }
  StateDict random;
  for (const auto& [name, tensor] : SaveRngState()) random.SetTensor(name, tensor);
  // The last file of every rank. What is proven to be there is known from here.
  {
    // Without a coordinator, and with a disk in every node, rank 0 proves it from what ranks tell
    // it of their files.
    const size_t most =
        registrar_ == nullptr || OwnNode().has_value() ? 0
        : rank == 0
            ? kMaxListedBytes
            : std::min(kMaxListedBytes, kMaxListedOfOthers / static_cast<size_t>(process_.size()));
    Json plan = {{"tensors", Json::array()}, {"parts", std::move(plan_->parts)}};
    if (plan_->listed_bytes <= most) {
      plan["tensors"] = std::move(plan_->tensors);
    } else {
      Json& files = plan["files"] = Json::object();
      for (const auto& [file, list] : plan_->files) files[file] = list.Summary();
    }
    random.SetMetadata(kPlanKey, plan.dump());
  }
  return writer.Write(RandomStatesFileName(process_.rank()), random);
}

int64_t CheckpointState::AgreeOnNumber(const CheckpointFolder& folder, int64_t number) const {
  // Rank 0 looks, or one process of each node does; an error there reaches every process.
  std::string error;
  if (process_.rank() == 0 || OwnNode().has_value()) {
    // Asked before the folder is: a save that ends in between is seen there.
    const bool busy = saver_ != nullptr && saver_->busy();
    const absl::StatusOr<int64_t> next = folder.NextNumber();
    if (next.ok()) {
      number = busy ? std::max(*next, next_numbered_) : *next;
    } else {
      error = std::string(next.status().message());
    }
  }
  if (OwnNode().has_value()) {
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
  // Every rank says whether it can save before any of them writes: none waits for one that left.
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
    // Where others may wait for this rank in the pass, they do not come here.
    const bool interrupted = model->sharded() != nullptr && model->sharded()->Interrupted();
    if (!mine.ok() && interrupted) return mine;
  }
  if (mine.ok()) mine = CheckSavable();
  // Throws in place of waiting where some of those that divide a model are still in a pass. All of
  // one job have such groups, also those that have no model any more.
  if (const std::shared_ptr<Comm> comm = shard_comm_.lock()) {
    std::string before;
    for (const auto& model : registry_.models()) {
      if (before.empty() && model->sharded() != nullptr) before = model->sharded()->Before();
    }
    const absl::Status met = Guard([&] { MeetAt(*comm, "save_state()", "", before); });
    if (!met.ok()) return mine.ok() ? met : mine;
  }
  if (absl::Status all = AgreeToSave(mine); !all.ok()) return all;
  process_.progress().SetPhase("save_state");
  CheckpointInfo info;
  info.world_size = process_.size();
  info.step = registry_.global_step();
  info.iteration = save_iteration_;
  loops_.SavePlace(&info);
  const bool done = loops_.EpochIsDone();
  const auto write = [this](StateWriter& writer) { return Write(writer); };
  const absl::Status saved = Guard([&] {
    const CheckpointFolder folder(Root());
    OpenMemory(/*has_to_answer=*/false);
    bool to_disk = GoesToDisk(directory);
    if (to_disk && directory.empty()) info.iteration = AgreeOnNumber(folder, info.iteration);
    // A save with a name of its own is none of those that are counted.
    const int64_t since_disk = !directory.empty() ? since_disk_ : to_disk ? 0 : since_disk_ + 1;
    absl::Status in_memory, earlier_in_memory;
    if (memory_ != nullptr && saves_to_memory_) {
      in_memory = SaveToMemory(info, since_disk, write, &earlier_in_memory);
      if (!saves_to_memory_ && !to_disk) {
        // It must be somewhere.
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
      ThrowIfError(
          SaveCheckpoint(process_.comm(), directory, info, Publishing(), write, OwnNode()));
    } else {
      ThrowIfError(
          SaveNumberedCheckpoint(process_.comm(), folder, info, Publishing(), write, OwnNode()));
    }
    // After one that failed, the next goes to the disk, too.
    if (directory.empty()) since_disk_ = 0;
    last_checkpoint_ = directory.empty() ? folder.PathOf(info.iteration) : directory;
    loaded_without_name_.reset();
    save_iteration_ = info.iteration + 1;
    loops_.NoteSaved(last_checkpoint_, done);
    ThrowIfError(earlier);
    ThrowIfError(in_memory);
    ThrowIfError(earlier_in_memory);
  });
  // What hangs from here on is not the save.
  process_.progress().SetPhase("after save_state");
  return saved;
}

absl::Status CheckpointState::CheckSavable() {
  if (steps_.averaged()) {
    return absl::FailedPreconditionError(
        "save_state inside ema.apply() would write the average as the model's weights: save before "
        "or after that scope");
  }
  if (steps_.between_windows()) registry_.ForgetUnheld();
  ForgetExpired();
  if (absl::Status here = Guard([&] { loops_.SettleLoaders(); }); !here.ok()) return here;
  if (absl::Status looked = Guard([&] { layout_ = LookAtLayout(); }); !looked.ok()) return looked;
  if (absl::Status complete = CheckComplete(layout_); !complete.ok()) return complete;
  const absl::Status registered = Guard([&] {
    for (size_t i = 0; i < registered_.size(); ++i) DividedModelOf(i);
  });
  if (!registered.ok()) return registered;
  if (!steps_.at_boundary()) {
    return absl::FailedPreconditionError(
        "save_state in the middle of an accumulation window would lose its gradients: save where "
        "accelerator.sync_gradients(), after optimizer.step()");
  }
  return CheckOptions();
}

void CheckpointState::CompareShardedModels(const std::vector<std::string>& changes) {
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

absl::Status CheckpointState::AgreeToSave(const absl::Status& mine) {
  const bool fits = mine.ok() && plan_ != nullptr && plan_->layout == layout_;
  agreed_ = {.hooks = !save_hooks_.empty(), .apart = steps_.trained_apart(), .same_plan = fits};
  std::string changes;  // of sharded models, one after the other
  for (const auto& model : registry_.models()) {
    if (model->sharded() != nullptr) changes += model->sharded()->ChangesHere();
  }
  const absl::Status all = Guard([&] {
    const auto said = GatherObject(
        process_.comm(), std::make_tuple(static_cast<int>(mine.code()), std::string(mine.message()),
                                         agreed_.hooks, agreed_.apart, agreed_.same_plan,
                                         static_cast<int64_t>(layout_.shared), changes));
    std::vector<std::tuple<int, std::string>> statuses;
    std::vector<std::string> changed;
    int other = 0;      // a rank that shares other models
    int different = 0;  // one with another number of sharded models
    for (size_t r = 0; r < said.size(); ++r) {
      const auto& [code, message, hooks, apart, same_plan, shared, of_models] = said[r];
      statuses.emplace_back(code, message);
      changed.push_back(of_models);
      agreed_.hooks |= hooks;
      agreed_.apart |= apart;
      agreed_.same_plan &= same_plan;
      if (shared != std::get<5>(said[0])) other = static_cast<int>(r);
      if (of_models.size() != changed[0].size()) different = static_cast<int>(r);
    }
    ThrowFirst(statuses);
    // Rank 0 writes everything then.
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
  });
  if (!mine.ok()) return mine;
  if (!all.ok()) return all;
  agreed_.same_plan =
      agreed_.same_plan && plan_->hooks == agreed_.hooks && plan_->apart == agreed_.apart;
  if (agreed_.same_plan) ++saves_reused_;
  if (mine.ok()) file_plans_.BeginSave();
  return mine;
}

absl::Status CheckpointState::SaveBesideTraining(
    const std::string& directory, const CheckpointInfo& info,
    absl::FunctionRef<absl::Status(StateWriter&)> write) {
  const CheckpointOptions& options = process_.options().checkpoint;
  if (saver_ == nullptr) {
    std::unique_ptr<AsyncSaver> saver;
    // One process alone may have no thread or connection left: then none has a saver.
    ThrowIfAnyFailed(Try("cannot begin to save beside training", [&] {
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
  request.node = OwnNode();
  request.publish = Publishing();
  // Training does not wait for the thread that writes, and the next save may have begun already: it
  // has its place on the disk when that thread has removed what goes for it.
  request.publish.disposal = nullptr;
  // If there is no memory to keep it for training, there is none for a copy either. What this save
  // gathers is on the disk already.
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
  return saver_ == nullptr ? absl::OkStatus() : FirstFailure(saver_->Wait());
}

absl::Status CheckpointState::WaitForAll() {
  const absl::Status saved = Wait();
  // All processes know alike whether they save there.
  if (memory_ == nullptr) return saved;
  const absl::Status in_memory = Guard([&] {
    steps_.CheckAllTakePart("wait_for_checkpoint()");
    ThrowIfError(LastInMemory(memory_->Settle(process_.comm()), process_.rank()));
  });
  return saved.ok() ? in_memory : saved;
}

absl::Status CheckpointState::Wait() {
  // A save of many minutes is no hang.
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
  const auto [code, message] = BroadcastObject(
      process_.comm(),
      std::make_tuple(static_cast<int>(writable.code()), std::string(writable.message())), 0);
  ThrowIfError(absl::Status(static_cast<absl::StatusCode>(code), message));
}

absl::Status CheckpointState::SaveModel(ModelSlot& model, const std::string& wanted_directory,
                                        const std::string& max_shard_size) const {
  const std::string directory = CleanPath(wanted_directory);
  return Guard([&] {
    steps_.CheckAllTakePart("save_model()");
    const absl::StatusOr<int64_t> bytes = ParseShardSize(max_shard_size);
    ThrowIfError(bytes.status());
    const absl::StatusOr<NodeGroups> groups = GroupsOf(process_.comm(), directory, OwnNode());
    ThrowIfError(groups.status());
    // The disk may have no room for both.
    Disposal::OfProcess().Wait();
    const absl::Status status = SaveWholeModel(model, groups->leads(), directory, *bytes);
    if (groups->nodes.size() > 1) return ThrowIfAnyFailed(status);
    const auto [code, message] = BroadcastObject(
        process_.comm(),
        std::make_tuple(static_cast<int>(status.code()), std::string(status.message())), 0);
    ThrowIfError(absl::Status(static_cast<absl::StatusCode>(code), message));
  });
}

int64_t CheckpointState::Register(std::function<StateDict()> save,
                                  std::function<void(const StateDict&)> load,
                                  std::shared_ptr<DividedObject> divided,
                                  std::optional<std::weak_ptr<const void>> lifetime) {
  TORCH_CHECK(save != nullptr && load != nullptr,
              "register_for_checkpointing() needs both a save and a load function");
  registered_.push_back(
      {next_hook_, std::move(save), std::move(load), std::move(divided), std::move(lifetime)});
  return next_hook_++;
}

int64_t CheckpointState::Register(std::function<PlainState()> save,
                                  std::function<void(const PlainState&)> load) {
  TORCH_CHECK(save != nullptr && load != nullptr,
              "register_for_checkpointing() needs both a save and a load function");
  return Register(
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

int64_t CheckpointState::AddSaveHook(SaveStateHook hook) {
  TORCH_CHECK(hook != nullptr, "register_save_state_pre_hook() got an empty function");
  save_hooks_.emplace(next_hook_, std::make_shared<const SaveStateHook>(std::move(hook)));
  return next_hook_++;
}

int64_t CheckpointState::AddLoadHook(LoadStateHook hook) {
  TORCH_CHECK(hook != nullptr, "register_load_state_pre_hook() got an empty function");
  load_hooks_.emplace(next_hook_, std::make_shared<const LoadStateHook>(std::move(hook)));
  return next_hook_++;
}

void CheckpointState::RemoveHook(int64_t id) {
  // What they own may remove them once more when it ends, which is when they are in no list.
  const auto save_hook = save_hooks_.extract(id);
  const auto load_hook = load_hooks_.extract(id);
  const auto at = std::find_if(registered_.begin(), registered_.end(),
                               [&](const Registered& object) { return object.number == id; });
  if (at == registered_.end()) return;
  const Registered object = std::move(*at);
  registered_.erase(at);
}

void CheckpointState::RemoveSince(int64_t number) {
  for (int64_t id = number; id < next_hook_; ++id) RemoveHook(id);
}

std::vector<int64_t> CheckpointState::NumbersOfRegistered() const {
  std::vector<int64_t> numbers;
  for (const Registered& object : registered_) numbers.push_back(object.number);
  return numbers;
}

void CheckpointState::CheckStillRegistered(const std::vector<int64_t>& numbers,
                                           const char* call) const {
  TORCH_CHECK(
      NumbersOfRegistered() == numbers, call,
      ": a hook has registered or removed an object of the state: do so before or after it");
}

void CheckpointState::ForgetExpired() {
  std::erase_if(registered_, [](const Registered& object) {
    return object.lifetime.has_value() && object.lifetime->expired();
  });
}

// What the files of a checkpoint hold.
struct CheckpointState::Loaded {
  struct Optimizer {
    OptimizerState state;  // what its handle takes on this rank
    int64_t steps = 0;
  };

  bool hooks = false;                 // have had the weights, and may have left some out
  std::vector<NamedTensors> weights;  // of sharded models empty, unless hooks want them
  std::vector<std::optional<LoadedShards>> shards;
  std::vector<Optimizer> optimizers;
  // For divided objects only this process's parts, unless hooks need whole models.
  std::vector<StateDict> schedulers, loaders, registered;
  std::vector<bool> registered_in_parts;
  std::optional<StateDict> scaler, random;
};

void CheckpointState::CheckPrepared(const StateReader& reader) const {
  const auto check = [&reader](const char* what, std::string (*name)(int), size_t here) {
    CheckCount(reader.dir(), reader.Count(name), what, here,
               "prepare the same objects, in the same order, before load_state");
  };
  CheckCount(reader.dir(), CountModels(reader), "model", registry_.models().size(),
             "prepare the same objects, in the same order, before load_state");
  check("optimizer", OptimizerFileName, registry_.optimizers().size());
  check("schedule", SchedulerFileName, registry_.schedulers().size());
  // Loaders may be prepared after this, as those in the body of an epoch are.
  const int saved_loaders = reader.Count(SamplerFileName);
  if (saved_loaders < static_cast<int>(registry_.loaders().size())) {
    check("loader", SamplerFileName, registry_.loaders().size());
  }
  check("registered object", CustomFileName, registered_.size());
}

std::vector<NamedTensors> CheckpointState::ReadWeights(const StateReader& reader, size_t models,
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
  RunHooks(load_hooks_, "load_state()", weights, reader);
  return weights;
}

std::unique_ptr<DeviceUploads> CheckpointState::UploadsFor(
    const StateReader& reader, const std::vector<std::string>& files) const {
  const c10::Device device = process_.device();
  // Hooks find the weights where they have always been: on the host.
  if (device.is_cpu() || !load_hooks_.empty()) return nullptr;
  const Models& models = registry_.models();
  const bool on_device = std::any_of(models.begin(), models.end(), [&](const auto& model) {
    const NamedTensors parameters = model->source().parameters();
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const auto& parameter) { return parameter.second.device() == device; });
  });
  // Sharded ones take their parts, or whole weights one after the other, from the host.
  const bool sharded = std::any_of(models.begin(), models.end(),
                                   [](const auto& model) { return model->sharded() != nullptr; });
  if (!on_device || sharded) return nullptr;
  uint64_t bytes = 0;
  for (const std::string& name : files) bytes += BytesToDevice(reader, name);
  // It is beside the state that it replaces, until all of it is read. The program needs memory,
  // too.
  if (bytes == 0 || DeviceMemoryLeft(device) / 2 < bytes) return nullptr;
  return UploadsTo(device);
}

void CheckpointState::CheckIndexes(const StateReader& reader, size_t models) const {
  if (reader.in_memory() || (process_.rank() != 0 && !OwnNode().has_value())) return;
  for (size_t i = 0; i < models; ++i) {
    const std::string name = IndexFileName(ModelFileName(static_cast<int>(i)));
    const ManifestFile* const file = reader.manifest().Find(name);
    if (file == nullptr || !reader.IsHere(name)) continue;
    const absl::Status status = VerifyCheckpointFile(reader.dir(), *file, VerifyLevel::kContents);
    if (status.ok()) continue;
    // The tensors are in files with digests of their own.
    MUSTER_LOG(Warning) << status.message() << "; the tensors are loaded nevertheless, but other "
                        << "programs find them by this index: save once more";
  }
}

void CheckpointState::TakeOptimizerFile(const StateReader& reader, size_t index,
                                        const std::string& name, DeviceUploads* uploads,
                                        Loaded* loaded) const {
  const OptimizerHandle& handle = registry_.optimizers()[index]->handle();
  const StateDict file = ReadFile(reader, name, uploads);
  OptimizerState part;
  for (const auto& [key, tensor] : file.tensors()) part.tensors.emplace(key, tensor);
  Loaded::Optimizer& to = loaded->optimizers[index];
  to.state.tensors.merge(LocalState(std::move(part), handle, registry_.models()).tensors);
  if (name != OptimizerFileName(static_cast<int>(index))) return;
  to.state.groups = Rows(file);
  // Older checkpoints have none. A hook may rename weights to names that others had.
  if (const absl::StatusOr<std::string> parameters = file.GetText(kParameters);
      parameters.ok() && load_hooks_.empty()) {
    CheckParameters(*parameters, name, handle, registry_.models());
  }
  const absl::StatusOr<int64_t> steps = file.GetInt("steps");
  ThrowIfError(steps.status());
  to.steps = *steps;
}

std::vector<std::string> CheckpointState::OthersIn(const StateReader& reader,
                                                   const Loaded& loaded) const {
  std::vector<std::string> names = {ScalerFileName(0), RandomStatesFileName(process_.rank())};
  const auto add = [&](std::string (*name)(int), size_t count) {
    for (size_t i = 0; i < count; ++i) names.push_back(name(static_cast<int>(i)));
  };
  add(SchedulerFileName, registry_.schedulers().size());
  add(SamplerFileName, reader.Count(SamplerFileName));
  for (size_t i = 0; i < registered_.size(); ++i) {
    // Those in several files are read together.
    const std::vector<std::string> files = RegisteredFilesIn(reader, i);
    if (files.size() == 1 && !loaded.registered_in_parts[i]) names.push_back(files[0]);
  }
  return names;
}

void CheckpointState::ReadOthers(const StateReader& reader, Loaded* loaded) const {
  const auto read_all = [&](std::string (*name)(int), size_t count) {
    std::vector<StateDict> files;
    for (size_t i = 0; i < count; ++i) {
      files.push_back(ReadFile(reader, name(static_cast<int>(i))));
    }
    return files;
  };
  loaded->schedulers = read_all(SchedulerFileName, registry_.schedulers().size());
  loaded->loaders = read_all(SamplerFileName, reader.Count(SamplerFileName));
  for (size_t i = 0; i < registered_.size(); ++i) {
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

namespace {

// Reads files of which each rank needs a part, several at a time.
class PartsReader {
 public:
  // Collective, if a model is sharded.
  PartsReader(Comm& comm, StateReader& reader, const Models& models)
      : comm_(comm), reader_(reader) {
    int copies = 0;  // of the model that has the most, each divided among ranks of its own
    for (const auto& model : models) {
      if (model->sharded() == nullptr) continue;
      copies = std::max(copies, comm.size() / model->sharded()->shard_comm().size());
    }
    if (copies == 0) return;
    const std::vector<std::string> all = comm.AllGatherBytes(HostIdentity());
    const size_t hosts = std::set<std::string>(all.begin(), all.end()).size();
    hosts_of_copy_ = std::max<uint64_t>(hosts / static_cast<size_t>(copies), 1);
  }

  // Of the files so far, all of them, and what this rank's host has read of them and got from
  // other nodes.
  uint64_t bytes() const { return bytes_; }
  uint64_t bytes_read() const { return bytes_read_; }
  uint64_t bytes_received() const { return bytes_received_; }

  // Collective. `ranges(header)`: what this rank needs of a file; `take(name)` reads it. An error
  // of this rank goes to `mine`, after which it takes nothing more; throws those of all ranks.
  void Read(const std::vector<std::string>& names,
            const std::function<std::vector<FileRange>(const SafetensorsHeader&)>& ranges,
            const std::function<void(const std::string&)>& take, absl::Status* mine) {
    for (size_t first = 0; first < names.size();) {
      size_t last = first;
      // What a host may have in memory of them, if its ranks need an equal share.
      for (uint64_t bytes = 0; last < names.size(); ++last) {
        const ManifestFile* const file = reader_.manifest().Find(names[last]);
        if (file == nullptr) continue;
        bytes += file->digest.bytes / (file->blocks.empty() ? 1 : hosts_of_copy_);
        if (last > first && bytes > kBytesAtATime) break;
        if (!file->blocks.empty() || reader_.in_parts()) bytes_ += file->digest.bytes;
      }
      const std::vector<std::string> some(names.begin() + first, names.begin() + last);
      first = last;
      Ranges wanted;  // after an error nothing
      for (const std::string& name : some) wanted[name];
      ThrowIfError(reader_.FetchHeaders(comm_, some));
      if (mine->ok() && !reader_.in_memory()) {
        *mine = Guard([&] {
          for (const std::string& name : some) {
            wanted[name] = IsReadWhole(name)
                               ? std::vector<FileRange>{{.begin = 0, .end = UINT64_MAX}}
                               : ranges(HeaderOf(name));
          }
        });
      }
      ThrowIfError(reader_.ReadTogether(comm_, some, wanted));
      bytes_read_ += reader_.bytes_read_together();
      bytes_received_ += reader_.bytes_received_together();
      for (const std::string& name : some) {
        if (mine->ok()) *mine = Guard([&] { CheckHeader(name, wanted[name], ranges); });
        if (mine->ok()) *mine = Guard([&] { take(name); });
      }
    }
  }

 private:
  using Ranges = std::map<std::string, std::vector<FileRange>>;
  static constexpr uint64_t kBytesAtATime = uint64_t{512} << 20;

  bool IsReadWhole(const std::string& name) const {
    const ManifestFile* const file = reader_.manifest().Find(name);
    return file == nullptr || file->blocks.empty();
  }

  // Of a file on the disk, from the page cache. What cannot be parsed is damaged if its digests say
  // so.
  SafetensorsHeader HeaderOf(const std::string& name) const {
    absl::StatusOr<SafetensorsHeader> header =
        reader_.in_parts() ? reader_.Header(name)
                           : ReadSafetensorsHeader(JoinPath(reader_.dir(), name));
    if (!reader_.in_parts() && absl::IsInvalidArgument(header.status())) {
      ThrowIfError(VerifyCheckpointFile(reader_.dir(), *reader_.manifest().Find(name),
                                        VerifyLevel::kContents));
    }
    ThrowIfError(header.status());
    return *std::move(header);
  }

  // The header that was read with the blocks, and checked, asks for what was read.
  void CheckHeader(
      const std::string& name, const std::vector<FileRange>& wanted,
      const std::function<std::vector<FileRange>(const SafetensorsHeader&)>& ranges) const {
    const std::string path = reader_.PathOfShared(name);
    if (path.empty() || IsReadWhole(name)) return;
    const auto header = ReadSafetensorsHeader(path);
    ThrowIfError(Renamed(header.status(), path, NameOfShared(JoinPath(reader_.dir(), name))));
    const std::vector<FileRange> now = ranges(*header);
    if (std::equal(now.begin(), now.end(), wanted.begin(), wanted.end(),
                   [](const FileRange& a, const FileRange& b) {
                     return a.begin == b.begin && a.end == b.end;
                   })) {
      return;
    }
    ThrowIfError(absl::DataLossError(
        absl::StrCat(JoinPath(reader_.dir(), name), ": changed while it was read")));
  }

  Comm& comm_;
  StateReader& reader_;
  uint64_t hosts_of_copy_ = 1;  // that divide a file
  uint64_t bytes_ = 0, bytes_read_ = 0, bytes_received_ = 0;
};

}  // namespace

bool CheckpointState::ReadsByFile() const {
  const Models& models = registry_.models();
  return std::any_of(models.begin(), models.end(),
                     [](const auto& model) { return model->sharded() != nullptr; }) &&
         !OnAnyProcess(process_.comm(), !load_hooks_.empty());
}

bool CheckpointState::HasNoRoomFor(const StateReader& reader,
                                   const std::vector<std::string>& files) const {
  if (reader.in_memory()) return false;
  if (!FolderOfOffload(process_.sharding()).empty()) return true;
  // To a GPU files go through a few blocks.
  if (!process_.device().is_cpu()) return false;
  uint64_t bytes = 0;
  for (const std::string& name : files) {
    if (const ManifestFile* const file = reader.manifest().Find(name)) bytes += file->digest.bytes;
  }
  // A copy for the host, and what each of its processes makes of it.
  const uint64_t left = MemoryLeft(), copies = 1 + process_.environment().local_world_size.value;
  if (!OnAnyProcess(process_.comm(), bytes > left / copies)) return false;
  if (process_.rank() == 0) {
    MUSTER_LOG(Info) << "loading " << HumanBytes(bytes) << " from " << reader.dir()
                     << " takes two passes: a host has no memory for a second copy of the state ("
                     << HumanBytes(left) << " are left on that of rank 0)";
  }
  return true;
}

void CheckpointState::ReadTogether(StateReader& reader,
                                   const std::vector<std::string>& files) const {
  if (HasNoRoomFor(reader, files)) reader.UseInPlace(FolderOfOffload(process_.sharding()));
  ThrowIfError(reader.ReadTogether(process_.comm(), files));
}

CheckpointState::Loaded CheckpointState::ReadAll(StateReader& reader) const {
  const Models& models = registry_.models();
  Loaded loaded;
  // A sharded model and its optimizer are read file by file: no rank needs memory for all of it.
  const bool any_sharded = std::any_of(
      models.begin(), models.end(), [](const auto& model) { return model->sharded() != nullptr; });
  const bool hooks = loaded.hooks = !load_hooks_.empty();
  const bool by_file = !(any_sharded ? OnAnyProcess(process_.comm(), hooks) : hooks);
  std::vector<std::string> together, to_device;
  const auto add = [](const std::vector<std::string>& names, std::vector<std::string>* to) {
    to->insert(to->end(), names.begin(), names.end());
  };
  std::vector<bool> by_itself(models.size());
  loaded.shards.resize(models.size());
  loaded.optimizers.resize(registry_.optimizers().size());
  std::vector<size_t> optimizers_by_file;
  loaded.registered_in_parts.resize(registered_.size());
  ThrowIfAnyFailed(Guard([&] {
    for (size_t i = 0; i < registered_.size(); ++i) {
      loaded.registered_in_parts[i] = by_file && DividedModelOf(i).has_value();
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
  }));
  ReadTogether(reader, together);
  if (reader.in_parts()) {
    std::vector<std::string> others;
    ThrowIfAnyFailed(Guard([&] { others = OthersIn(reader, loaded); }));
    ThrowIfError(reader.Fetch(process_.comm(), others));
  }
  // An error of this rank must not leave the others in their next collective.
  absl::Status mine = Guard([&] {
    const std::unique_ptr<DeviceUploads> uploads = UploadsFor(reader, to_device);
    const bool states_there = process_.sharding().offload_optimizer == Offload::kNone;
    const std::vector<int64_t> registered = NumbersOfRegistered();
    loaded.weights = ReadWeights(reader, models.size(), by_itself, uploads.get());
    CheckStillRegistered(registered, "load_state()");
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
  // Hooks may have changed how many there are: then that is this rank's error.
  for (size_t i = 0; i < loaded.registered_in_parts.size(); ++i) {
    if (!loaded.registered_in_parts[i]) continue;
    const DividedObject& object = *registered_[i].divided;
    ModelSlot& model = *models[*DividedModelOf(i)];
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
  ThrowIfAnyFailed(mine);
  return loaded;
}

void CheckpointState::ApplyRegistered(const Loaded& loaded) {
  // The program's functions may register and remove objects, also themselves.
  const std::vector<Registered> objects = registered_;
  for (size_t i = 0; i < objects.size(); ++i) {
    // It may live no more.
    if (!IsIn(registered_, objects[i])) continue;
    ThrowIfError(Try(CustomFileName(i), [&] {
      if (loaded.registered_in_parts[i]) {
        objects[i].divided->LoadParts(loaded.registered[i]);
      } else {
        objects[i].load(loaded.registered[i]);
      }
    }));
  }
}

void CheckpointState::ApplyOptimizers(const Loaded& loaded) {
  for (size_t i = 0; i < registry_.optimizers().size(); ++i) {
    ThrowIfError(Try(OptimizerFileName(i), [&] {
      registry_.optimizers()[i]->handle().LoadState(loaded.optimizers[i].state);
    }));
    registry_.optimizers()[i]->set_steps(loaded.optimizers[i].steps);
  }
  for (size_t i = 0; i < registry_.schedulers().size(); ++i) {
    ThrowIfError(Try(SchedulerFileName(i),
                     [&] { registry_.schedulers()[i]->LoadState(Rows(loaded.schedulers[i])); }));
  }
}

void CheckpointState::ApplyModels(const StateReader& reader, const Loaded& loaded) {
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
  // Gradients and scaler steps of a window that was open belong to the state that is given up.
  for (const auto& model : registry_.models()) {
    ShardedModel* const sharded = model->sharded();
    if (sharded != nullptr) sharded->ForgetPending(sharded->shards());
  }
  steps_.Reset();
  for (const auto& optimizer : registry_.optimizers()) {
    // Not zeros, for which those that are offloaded would be read: their disk may have failed.
    optimizer->handle().ZeroGrad(GradZeroing::kSetToNone);
  }
  ForgetCastWeights();
}

void CheckpointState::ApplyPlaces(const StateReader& reader, const Loaded& loaded) {
  registry_.ForgetLoadedPlaces();
  for (size_t i = 0; i < loaded.loaders.size(); ++i) {
    ThrowIfError(Try(SamplerFileName(i), [&] {
      registry_.LoadLoader(i, PlaceOf(loaded.loaders[i]), TensorsIn(loaded.loaders[i]));
    }));
  }
  if (steps_.scaler() != nullptr && loaded.scaler.has_value()) {
    steps_.scaler()->LoadState(Rows(*loaded.scaler));
  }
  ApplyRandom(reader, loaded);
  loops_.LoadPlace(reader.info(), loaded.loaders.size());
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

void CheckpointState::ApplyRandom(const StateReader& reader, const Loaded& loaded) const {
  if (loaded.random.has_value()) {
    const std::string left_out = RestoreRngState(TensorsIn(*loaded.random));
    if (!left_out.empty()) MUSTER_LOG(Warning) << "random states: " << left_out;
  } else {
    MUSTER_LOG(Warning) << reader.dir() << " was saved by " << reader.info().world_size
                        << " processes and has no random state for rank " << process_.rank()
                        << ": it keeps its own";
  }
}

std::vector<CheckpointState::Forgotten> CheckpointState::ForgetFailures() {
  ++loads_;
  std::vector<Forgotten> forgotten;
  for (const auto& model : registry_.models()) {
    if (model->sharded() == nullptr) continue;
    forgotten.push_back({model, model->sharded()->ForgetFailures()});
  }
  if (steps_.updates() != nullptr) steps_.updates()->SetReplacing(true);
  return forgotten;
}

void CheckpointState::RestoreFailures(const std::vector<Forgotten>& forgotten) {
  for (const Forgotten& one : forgotten) one.model->sharded()->RestoreFailures(one.failures);
}

void CheckpointState::Apply(const StateReader& reader, const Loaded& loaded) {
  // The program's code first, because only running it shows what it refuses.
  ThrowIfAnyFailed(WithOutcome(Guard([&] {
                                 GiveModelsOwnMemory(registry_.models());
                                 ApplyRegistered(loaded);
                               }),
                               "registered objects may have changed, and nothing else has"));
  ++replaced_;
  // Then what needs memory, or room in the files of an offload, or has a load() of its own.
  constexpr char kMixture[] =
      "the state is a mixture of two now: call load_state() again, or end the program";
  try {
    ThrowIfAnyFailed(WithOutcome(Guard([&] {
                                   if (steps_.updates() != nullptr) steps_.updates()->Reset();
                                   ApplyOptimizers(loaded);
                                 }),
                                 kMixture));
    ThrowIfAnyFailed(WithOutcome(Guard([&] {
                                   ApplyModels(reader, loaded);
                                   ApplyPlaces(reader, loaded);
                                 }),
                                 kMixture));
  } catch (...) {
    for (const auto& model : registry_.models()) {
      if (model->sharded() == nullptr) continue;
      model->sharded()->NoteFailedLoad(absl::StrCat("load_state() has failed: ", kMixture));
    }
    steps_.NoteFailedLoad("load_state()");
    throw;
  }
}

void CheckpointState::ThrowIfAnyFailed(const absl::Status& mine) const {
  ThrowFirst(GatherObject(process_.comm(), std::make_tuple(static_cast<int>(mine.code()),
                                                           std::string(mine.message()))));
}

absl::StatusOr<StateReader> CheckpointState::OpenAndRead(
    const std::string& directory, const std::function<void(StateReader&)>& read) {
  const CheckpointFolder folder(Root());
  absl::StatusOr<NodeGroups> groups =
      GroupsOf(process_.comm(), directory.empty() ? folder.PathOf(0) : directory, OwnNode());
  ThrowIfError(groups.status());
  const bool in_parts = groups->nodes.size() > 1 && ReadsByFile();
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
  // What is there lacks something: not the same as no checkpoint.
  if (absl::IsNotFound(of_read) && reader.status() == of_read) ThrowIfError(of_read);
  if (!directory.empty() && absl::IsNotFound(reader.status())) {
    return absl::NotFoundError(
        absl::StrCat(reader.status().message(), CheckpointsInPlaceOfWeights(directory)));
  }
  return reader;
}

namespace {

// Whether load_weights() is given the weights of a model, of any library, and not a checkpoint of
// save_state(): that is one of several files, and is checked by its manifest.
bool HoldsWeightsAlone(const std::string& path) {
  if (path.empty()) return false;
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return false;
  if (S_ISREG(info.st_mode)) return true;
  const std::string name = BaseName(path);
  // What a save has left before it was whole.
  if (HasMark(name, StemOf(name, kStagingMark), kStagingMark)) return false;
  for (const std::string& file : {std::string(kManifestName), OptimizerFileName(0),
                                  SamplerFileName(0), RandomStatesFileName(0)}) {
    if (PathExists(JoinPath(path, file))) return false;
  }
  return !absl::IsNotFound(WeightFiles::Open(path).status());
}

void CheckHoldOneModel(const std::string& path, size_t models) {
  if (models == 1) return;
  ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
      path, " holds the weights of one model, and ", models,
      " are prepared: load_weights() takes a checkpoint of save_state() for several; load each "
      "model with muster::load_model() before prepare()")));
}

// (collective) Each rank opens the files that it sees, and its hooks and options are its own. The
// same error on every rank, if they are about to load different weights: fingerprints of all
// models.
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

std::vector<std::unique_ptr<IncomingWeights>> CheckpointState::ReadWeightsAlone(
    StateReader& reader, const LoadWeightsOptions& options,
    std::unordered_set<std::string>* read) const {
  const Models& models = registry_.models();
  ThrowIfAnyFailed(Guard([&] {
    if (!options.strict) return;
    CheckCount(reader.dir(), CountModels(reader), "model", models.size(),
               "prepare the same models, in the same order, or set strict to false");
  }));
  const bool hooks = !load_hooks_.empty();  // one may remove itself
  // Hooks want whole models.
  const bool by_file = ReadsByFile();
  size_t files = 0;
  std::vector<bool> by_itself;
  std::vector<std::string> together;
  ThrowIfAnyFailed(Guard([&] {
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
  }));
  ReadTogether(reader, together);
  std::vector<NamedTensors> weights;
  ThrowIfAnyFailed(Guard([&] {
    const std::unique_ptr<DeviceUploads> uploads = UploadsFor(reader, together);
    weights = ReadWeights(reader, files, by_itself, uploads.get());
    CheckIndexes(reader, files);
  }));
  LoadWeightsOptions rules = options;
  // As in load_state: hooks decide what is loaded.
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
  ThrowIfAnyFailed(mine);
  return incoming;
}

absl::StatusOr<LoadedState> CheckpointState::LoadWeights(const std::string& wanted_directory,
                                                         const LoadWeightsOptions& options) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { steps_.CheckAllTakePart("load_weights()"); }); !here.ok()) {
    return here;
  }
  // Updates may have failed on one process alone, which the others would wait for.
  if (absl::Status all = Guard([&] {
        ThrowIfAnyFailed(Guard([&] {
          steps_.CheckStepped("load_weights()");
          steps_.CheckNoLoadFailed("load_weights()");
        }));
      });
      !all.ok()) {
    return all;
  }
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
  if (steps_.between_windows()) registry_.ForgetUnheld();
  Wait().IgnoreError();  // a failure is in the log
  process_.progress().SetPhase("load_weights");
  LoadedState report;
  const absl::Status status = Guard([&] {
    const Models& models = registry_.models();
    std::vector<std::unique_ptr<IncomingWeights>> incoming;  // of the first models
    std::unordered_set<std::string> read;
    std::optional<StateReader> checkpoint;
    // All ranks read the same kind, also where each has a folder of its own.
    const bool of_files = BroadcastObject(process_.comm(), HoldsWeightsAlone(directory));
    if (of_files) {
      report.directory = directory;
      ThrowIfAnyFailed(Guard([&] {
        CheckHoldOneModel(directory, models.size());
        incoming.push_back(IncomingFiles(*models[0], directory, options));
      }));
    } else {
      absl::StatusOr<StateReader> reader = OpenAndRead(directory, [&](StateReader& opened) {
        read.clear();
        incoming = ReadWeightsAlone(opened, options, &read);
      });
      ThrowIfError(reader.status());
      report.directory = reader->dir();
      checkpoint = *std::move(reader);
    }
    // Optimizers keep their states, which may be of another step on another rank.
    for (const auto& model : models) {
      if (model->sharded() != nullptr) model->sharded()->CheckNotMixed();
    }
    ThrowIfAnyFailed(Guard([&] { GiveModelsOwnMemory(models); }));
    std::vector<std::string> equal;
    std::string tensors, values;
    ThrowIfAnyFailed(Guard([&] {
      for (const auto& one : incoming) {
        equal.push_back(one->Compare());
        if (process_.size() == 1) continue;
        const IncomingWeights::Fingerprint fingerprint = one->FingerprintHere();
        absl::StrAppend(&tensors, fingerprint.tensors, " ");
        absl::StrAppend(&values, fingerprint.values, " ");
      }
    }));
    CheckSameWeights(process_.comm(), report.directory, tensors, values);
    for (size_t i = 0; i < incoming.size(); ++i) {
      const std::vector<std::string> all = process_.comm().AllGatherBytes(equal[i]);
      ThrowIfAnyFailed(Guard([&] { incoming[i]->Decide(all); }));
    }
    ThrowIfAnyFailed(Guard([&] { steps_.AboutToChange(); }));
    const absl::Status stored = Guard([&] {
      ThrowIfAnyFailed(Guard([&] {
        for (const auto& one : incoming) one->Store();
      }));
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
  process_.progress().SetPhase("after load_weights");
  if (!status.ok()) return status;
  return report;
}

void CheckpointState::LetGo(StateReader reader, Loaded loaded) {
  // A GPU's memory is free at once, and the first steps may need it.
  if (!process_.device().is_cpu()) {
    loaded.weights.clear();
    loaded.optimizers.clear();
  }
  uint64_t bytes = 0;
  for (const ManifestFile& file : reader.manifest().files) bytes += file.digest.bytes;
  // The first step may need memory before it is free: only where there is enough for both.
  if (reader.in_memory() || MemoryLeft() / 2 < bytes) return;
  Disposal::OfProcess().Free(
      std::make_shared<std::pair<StateReader, Loaded>>(std::move(reader), std::move(loaded)));
}

absl::Status CheckpointState::Load(const std::string& wanted_directory, bool may_be_missing) {
  const std::string directory = CleanPath(wanted_directory);
  if (absl::Status here = Guard([&] { steps_.CheckAllTakePart("load_state()"); }); !here.ok())
    return here;
  if (steps_.between_windows()) registry_.ForgetUnheld();
  ForgetExpired();
  if (absl::Status here = Guard([&] { loops_.SettleLoaders(); }); !here.ok()) return here;
  // What is being written may be what is wanted. A failure is in the log.
  Wait().IgnoreError();
  process_.progress().SetPhase("load_state");
  // Hooks may use the weights, also those that a failed step has changed in part.
  const uint64_t replaced = replaced_;
  const std::vector<Forgotten> forgotten = ForgetFailures();
  absl::Status status = Guard([&] {
    OpenMemory(/*has_to_answer=*/true);
    const bool memory = directory.empty() && memory_ != nullptr;
    const int64_t newest = memory ? NewestStepOnDisk(CheckpointFolder(Root())) : -1;
    if (memory && LoadFromMemory(newest)) return;
    if (may_be_missing && directory.empty()) CheckProjectWritable(/*always=*/true);
    Loaded loaded;
    bool from_memory = false;
    absl::Status in_memory;
    absl::StatusOr<StateReader> reader = OpenAndRead(directory, [&](StateReader& opened) {
      // Newer ones were damaged: what memory has was older than these, and may be newer than this.
      const int64_t step = opened.info().step;
      // Its errors are not those of the disk.
      in_memory = Guard([&] { from_memory = memory && step < newest && LoadFromMemory(step); });
      if (in_memory.ok() && !from_memory) loaded = CheckAndReadAll(opened);
    });
    ThrowIfError(in_memory);
    // All on the disk are damaged or held back.
    if (memory && (absl::IsDataLoss(reader.status()) || absl::IsNotFound(reader.status()))) {
      from_memory = LoadFromMemory(-1);
    }
    if (from_memory) return;
    if (!may_be_missing || !absl::IsNotFound(reader.status())) ThrowIfError(reader.status());
    // What it holds is of another past than the training that begins here. Before that does: where
    // it cannot be discarded, a later load would go back to it.
    if (memory_ != nullptr) ThrowIfError(memory_->Forget(process_.comm()));
    if (!reader.ok()) return;
    Apply(*reader, loaded);
    since_disk_ = 0;
    LetGo(*std::move(reader), std::move(loaded));
  });
  if (replaced_ == replaced) RestoreFailures(forgotten);
  --loads_;
  if (steps_.updates() != nullptr) steps_.updates()->SetReplacing(loads_ > 0);
  process_.progress().SetPhase("after load_state");
  if (status.ok()) process_.progress().SetRestored();
  return status;
}

CheckpointState::Loaded CheckpointState::CheckAndReadAll(StateReader& reader) const {
  // Every file is read, and its digest checked, before anything changes, so that a damaged one
  // leaves the state as it was; and a process that cannot go on must not leave the others in their
  // next collective.
  ThrowIfAnyFailed(Guard([&] { CheckPrepared(reader); }));
  Loaded loaded = ReadAll(reader);
  // Nor does anything change if what is prepared does not fit, here or on another process.
  std::string left_out;  // of whole sharded models, those that a hook of this process loads not
  absl::Status mine = Guard([&] {
    for (size_t i = 0; i < registry_.models().size(); ++i) {
      if (loaded.shards[i].has_value()) continue;  // checked as they were read
      CheckModel(*registry_.models()[i], loaded.weights[i],
                 JoinPath(reader.dir(), ModelFileName(static_cast<int>(i))), loaded.hooks);
      if (registry_.models()[i]->sharded() == nullptr) continue;
      left_out += loaded.weights[i].empty() && loaded.hooks ? "y" : "n";
    }
    for (size_t i = 0; i < registry_.optimizers().size(); ++i) {
      ThrowIfError(Try(OptimizerFileName(static_cast<int>(i)), [&] {
        registry_.optimizers()[i]->handle().CheckState(loaded.optimizers[i].state);
      }));
    }
    for (size_t i = 0; i < loaded.schedulers.size(); ++i) {
      ThrowIfError(Try(SchedulerFileName(static_cast<int>(i)),
                       [&] { registry_.schedulers()[i]->CheckState(Rows(loaded.schedulers[i])); }));
    }
    for (size_t i = 0; i < loaded.loaders.size(); ++i) {
      ThrowIfError(Try(SamplerFileName(static_cast<int>(i)), [&] {
        registry_.CheckLoader(i, PlaceOf(loaded.loaders[i]), TensorsIn(loaded.loaders[i]));
      }));
    }
    if (loaded.scaler.has_value()) {
      ThrowIfError(
          Try(ScalerFileName(0), [&] { steps_.scaler()->CheckState(Rows(*loaded.scaler)); }));
    }
    if (loaded.random.has_value()) {
      ThrowIfError(Try(RandomStatesFileName(process_.rank()),
                       [&] { CheckRngState(TensorsIn(*loaded.random)); }));
    }
  });
  ThrowIfAnyFailed(mine);
  // They are loaded by all ranks together.
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

const std::string& CheckpointState::last_checkpoint() {
  if (!loaded_without_name_.has_value() || PathExists(last_checkpoint_)) return last_checkpoint_;
  // It has got its name, unless another one has that.
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
  // Nodes with disks of their own may have other checkpoints each.
  if (process_.rank() == 0 || OwnNode().has_value()) mine = folder.NewestStep();
  const auto all = GatherObject(
      process_.comm(), std::make_tuple(mine.value_or(-1), static_cast<int>(mine.status().code()),
                                       std::string(mine.status().message())));
  int64_t newest = -1;
  std::vector<std::tuple<int, std::string>> statuses;
  for (const auto& [step, code, message] : all) {
    newest = std::max(newest, step);
    statuses.emplace_back(code, message);
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
  const Loaded loaded = CheckAndReadAll(newest.reader);
  Apply(newest.reader, loaded);
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
