#include "muster/internal/process.h"

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/home_path.h"
#include "base/log.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"
#include "muster/internal/engine_settings.h"
#include "worker/collective/comm_stream.h"
#include "worker/collective/comm_thread.h"
#include "worker/collective/nccl.h"
#include "worker/collective/ordered_comm.h"
#include "worker/train/autograd_engine.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

// Returns the settings that Accelerate's launcher asks for; all off without it.
EngineSettings EngineOf(const AcceleratorOptions& options, const Environment& environment) {
  if (environment.engine_variables.empty()) return {};
  absl::StatusOr<EngineSettings> settings =
      ReadEngineSettings(environment.engine_variables, environment.mixed_precision.value,
                         AccumulationSteps(options, environment), environment.world_size.value,
                         environment.local_world_size.value);
  ThrowIfError(settings.status());
  for (const std::string& note : settings->notes) {
    if (environment.rank.value == 0) MUSTER_LOG(Info) << "sharding: " << note;
  }
  return *std::move(settings);
}

// Parses "fp32", "bf16" and "fp16".
c10::ScalarType DtypeOf(const std::string& name) {
  if (name == "bf16") return c10::ScalarType::BFloat16;
  if (name == "fp16") return c10::ScalarType::Half;
  return c10::ScalarType::Float;
}

// Throws if the environment has settings of sharding but nothing asks for sharding, since they
// would be ignored silently. `muster launch` refuses the same.
void CheckNothingSaysHow(const Environment& environment) {
  for (const std::string& source :
       {environment.sharding_units.source, environment.sharding_unit_names.source,
        environment.sharding_min_unit_parameters.source, environment.sharding_group_size.source,
        environment.sharding_reshard_group_size.source,
        environment.sharding_reshard_after_forward.source,
        environment.sharding_parameter_dtype.source, environment.sharding_reduce_dtype.source,
        environment.sharding_output_dtype.source, environment.sharding_buffer_dtype.source,
        environment.sharding_no_split.source, environment.sharding_ignored_modules.source,
        environment.sharding_ignored_parameters.source, environment.sharding_overlap.source}) {
    TORCH_CHECK(!absl::StartsWith(source, "MUSTER_"), source,
                " refines sharding, but nothing enables it: set MUSTER_SHARDING (zero3, for "
                "example) or options.sharding, or unset it");
  }
}

// The settings for a program that has not set options.sharding.
ShardingOptions ShardingFrom(const Environment& environment, const EngineSettings& engine) {
  ShardingOptions sharding;
  if (environment.sharding.is_default() && !environment.engine_variables.empty()) {
    sharding = engine.sharding;
  } else {
    if (environment.sharding.is_default()) CheckNothingSaysHow(environment);
    sharding = ParseSharding(environment.sharding.value, environment.local_world_size.value);
  }
  // Muster's own variables win over those of FSDP and DeepSpeed.
  if (!environment.sharding_units.is_default() || !environment.sharding_unit_names.is_default() ||
      !environment.sharding_min_unit_parameters.is_default()) {
    // If more than one of these is set, prepare() reports that they exclude each other.
    sharding.unit_types = environment.sharding_units.value;
    sharding.unit_names = environment.sharding_unit_names.value;
    sharding.min_unit_parameters = environment.sharding_min_unit_parameters.value;
  }
  if (!environment.sharding_group_size.is_default()) {
    sharding.group_size = environment.sharding_group_size.value;
  }
  if (!environment.sharding_reshard_group_size.is_default()) {
    sharding.reshard_group_size = environment.sharding_reshard_group_size.value;
  }
  if (!environment.sharding_reshard_after_forward.is_default()) {
    sharding.reshard_after_forward = environment.sharding_reshard_after_forward.value;
  }
  if (!environment.sharding_parameter_dtype.is_default()) {
    // Absent: fp32.
    const c10::ScalarType dtype = DtypeOf(environment.sharding_parameter_dtype.value);
    sharding.parameter_dtype =
        dtype == c10::ScalarType::Float ? std::nullopt : std::optional(dtype);
  }
  if (!environment.sharding_reduce_dtype.is_default()) {
    sharding.reduce_dtype = DtypeOf(environment.sharding_reduce_dtype.value);
  }
  if (!environment.sharding_output_dtype.is_default()) {
    sharding.output_dtype = DtypeOf(environment.sharding_output_dtype.value);
  }
  if (!environment.sharding_buffer_dtype.is_default()) {
    sharding.buffer_dtype = DtypeOf(environment.sharding_buffer_dtype.value);
  }
  if (!environment.sharding_no_split.is_default()) {
    sharding.no_split = environment.sharding_no_split.value;
  }
  if (!environment.sharding_ignored_modules.is_default()) {
    sharding.ignored_modules = environment.sharding_ignored_modules.value;
  }
  if (!environment.sharding_ignored_parameters.is_default()) {
    sharding.ignored_parameters = environment.sharding_ignored_parameters.value;
  }
  if (!environment.sharding_overlap.is_default()) {
    sharding.overlap = environment.sharding_overlap.value;
  }
  if (!environment.optimizer_in_backward.is_default()) {
    sharding.optimizer_in_backward = environment.optimizer_in_backward.value;
  }
  if (!environment.offload_optimizer.is_default()) {
    std::tie(sharding.offload_optimizer, sharding.offload_optimizer_path) =
        ParseOffload(environment.offload_optimizer.value);
    // Settings of FSDP and DeepSpeed move the gradients along with the states.
    if (sharding.offload_gradients != Offload::kNone) {
      sharding.offload_gradients = sharding.offload_optimizer;
      sharding.offload_gradients_path = sharding.offload_optimizer_path;
    }
  }
  if (!environment.offload_gradients.is_default()) {
    std::tie(sharding.offload_gradients, sharding.offload_gradients_path) =
        ParseOffload(environment.offload_gradients.value);
  }
  if (!environment.offload_parameters.is_default()) {
    std::tie(sharding.offload_parameters, sharding.offload_parameters_path) =
        ParseOffload(environment.offload_parameters.value);
  }
  return sharding;
}

// Throws unless a place to offload to is complete.
void CheckOffload(const char* name, Offload place, const std::string& path) {
  TORCH_CHECK(place != Offload::kDisk || !path.empty(), "options.sharding.", name,
              " is kDisk and options.sharding.", name,
              "_path is empty: name a folder on a disk of each machine");
}

void CheckDtype(const char* name, const std::optional<c10::ScalarType>& dtype) {
  using c10::ScalarType;
  TORCH_CHECK(!dtype.has_value() || *dtype == ScalarType::Float || *dtype == ScalarType::Double ||
                  *dtype == ScalarType::Half || *dtype == ScalarType::BFloat16,
              "options.sharding.", name, " is ", c10::toString(*dtype),
              ": it must be at::kFloat, at::kBFloat16, at::kHalf or at::kDouble");
}

ShardingOptions ShardingOf(const AcceleratorOptions& options, const Environment& environment,
                           const EngineSettings& engine) {
  ShardingOptions sharding =
      options.sharding.has_value() ? *options.sharding : ShardingFrom(environment, engine);
  CheckDtype("parameter_dtype", sharding.parameter_dtype);
  CheckDtype("reduce_dtype", sharding.reduce_dtype);
  CheckDtype("output_dtype", sharding.output_dtype);
  CheckDtype("buffer_dtype", sharding.buffer_dtype);
  CheckOffload("offload_optimizer", sharding.offload_optimizer, sharding.offload_optimizer_path);
  CheckOffload("offload_gradients", sharding.offload_gradients, sharding.offload_gradients_path);
  CheckOffload("offload_parameters", sharding.offload_parameters, sharding.offload_parameters_path);
  TORCH_CHECK(sharding.reshard_group_size == 0 ||
                  (sharding.strategy == ShardingStrategy::kFull && sharding.reshard_after_forward),
              "options.sharding.reshard_group_size needs the strategy kFull and "
              "reshard_after_forward: set them, or leave it out");
  TORCH_CHECK(!sharding.optimizer_in_backward || sharding.strategy != ShardingStrategy::kNone,
              "options.sharding.optimizer_in_backward (MUSTER_OPTIMIZER_IN_BACKWARD) needs a "
              "strategy that divides the work of the optimizer by units: set kGradients or kFull "
              "(zero2, zero3), with one process as well");
  TORCH_CHECK(
      sharding.offload_gradients == Offload::kNone || sharding.strategy != ShardingStrategy::kNone,
      "offload_gradients needs a strategy that divides the work of the optimizer by units: set "
      "kGradients or kFull (zero2, zero3), with one process as well, or leave offload_gradients "
      "out");
  TORCH_CHECK(
      sharding.offload_parameters == Offload::kNone || sharding.strategy == ShardingStrategy::kFull,
      "offload_parameters needs the strategy kFull (zero3, hybrid), because other strategies keep "
      "parameters whole: set it, or leave offload_parameters out");
  return sharding;
}

Process::Settings SettingsOf(const AcceleratorOptions& options, const Environment& environment) {
  // Read the environment even if the program sets everything, to refuse what would be ignored
  // silently.
  const EngineSettings engine = EngineOf(options, environment);
  Process::Settings settings{.sharding = ShardingOf(options, environment, engine),
                             .grad_scaler = options.grad_scaler,
                             .configured = engine.configured};
  ActivationCheckpointingOptions& activations = settings.activation_checkpointing;
  if (options.activation_checkpointing.has_value()) {
    activations = *options.activation_checkpointing;
  } else {
    activations.enabled = environment.activation_checkpointing.is_default()
                              ? engine.activation_checkpointing
                              : environment.activation_checkpointing.value;
    activations.block_types = environment.activation_blocks.value;
    activations.offload = engine.activation_offload ? Offload::kCpu : Offload::kNone;
    if (!environment.offload_activations.is_default()) {
      std::tie(activations.offload, activations.offload_path) =
          ParseOffload(environment.offload_activations.value);
    }
  }
  TORCH_CHECK(
      activations.offload != Offload::kDisk || !activations.offload_path.empty(),
      "options.activation_checkpointing->offload is kDisk and offload_path is empty: name a "
      "folder on a disk of each machine");
  settings.gradient_clipping =
      options.gradient_clipping.value_or(engine.gradient_clipping.value_or(0));
  TORCH_CHECK(settings.gradient_clipping >= 0,
              "options.gradient_clipping must not be negative, got ", settings.gradient_clipping);
  if (engine.grad_scaler.has_value() && options.grad_scaler == GradScalerOptions()) {
    settings.grad_scaler = *engine.grad_scaler;
  }
  return settings;
}

// Replaces a Comm whose generation has ended.
class LostComm final : public Comm {
 public:
  LostComm(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void AllReduce(at::Tensor&, ReduceOp) override { Refuse(); }
  std::vector<at::Tensor> AllGather(const at::Tensor&) override { Refuse(); }
  void AllGatherParts(at::Tensor&) override { Refuse(); }
  at::Tensor ReduceScatter(const at::Tensor&, ReduceOp) override { Refuse(); }
  void Broadcast(at::Tensor&, int) override { Refuse(); }
  void Scatter(const std::vector<at::Tensor>&, at::Tensor&, int) override { Refuse(); }
  std::vector<std::string> AllGatherBytes(const std::string&) override { Refuse(); }
  std::string BroadcastBytes(const std::string&, int) override { Refuse(); }
  void Barrier() override { Refuse(); }

 private:
  [[noreturn]] static void Refuse() {
    C10_THROW_ERROR(DistBackendError,
                    "this object belongs to a generation of the job that has ended: use what the "
                    "new Accelerator prepares");
  }

  const int rank_;
  const int size_;
};

}  // namespace

std::optional<int64_t> AccumulationStepsOfProgram(const AcceleratorOptions& options) {
  const std::optional<int64_t>& steps = options.gradient_accumulation_steps;
  const std::optional<int64_t>& num_steps = options.accumulation.num_steps;
  TORCH_CHECK_VALUE(!steps || !num_steps || *steps == *num_steps,
                    "options.gradient_accumulation_steps=", *steps,
                    " and options.accumulation.num_steps=", *num_steps,
                    " are two names for the same setting: set only one of them");
  return steps ? steps : num_steps;
}

int64_t AccumulationSteps(const AcceleratorOptions& options, const Environment& environment) {
  return AccumulationStepsOfProgram(options).value_or(
      environment.gradient_accumulation_steps.value);
}

Process::Process(const AcceleratorOptions& options, JoinedProcess joined)
    : options_(options),
      joined_(std::move(joined)),
      device_(joined_.device),
      precision_(ParseMixedPrecision(joined_.environment.mixed_precision.value)),
      settings_(SettingsOf(options_, joined_.environment)) {
  // A single process gathers parameters that are on another device.
  const bool elsewhere = GoesElsewhere(sharding().offload_parameters, device_);
  if ((size() > 1 || elsewhere) && sharding().strategy != ShardingStrategy::kNone &&
      sharding().overlap) {
    if (device_.is_cpu()) comm_queue_ = std::make_shared<CommThread>();
    if (device_.is_cuda()) comm_queue_ = std::make_shared<CommStream>(device_);
    joined_.comm = InOrder(std::move(joined_.comm));
  }
  // The program may have run a backward pass before this, when no GPU was loaded.
  if (device_.is_cuda()) InstallAutogradEngine();
  FlushNcclAtEnd(false);
  CheckMixedPrecision(precision_, device_.type());
  for (const std::string& type : options.rng_types) {
    TORCH_CHECK(type == "generator" || type == "torch" || type == "cuda", "rng_types: unknown \"",
                type, "\"; use generator, torch or cuda");
  }
}

std::unique_ptr<Comm> Process::InOrder(std::unique_ptr<Comm> comm) const {
  if (comm_queue_ == nullptr || comm == nullptr) return comm;
  return MakeOrderedComm(std::move(comm), comm_queue_);
}

void Process::LoseComm() {
  FlushNcclAtEnd(false);
  joined_.comm = std::make_unique<LostComm>(rank(), size());
}

std::optional<int> Process::own_node() const {
  // Not the number of nodes: those are counted by host name, and machines from one image share one.
  if (!options_.project.save_on_each_node || joined_.environment.world_size.value < 2) {
    return std::nullopt;
  }
  return joined_.environment.node_rank.value;
}

std::string Process::ProjectDirectory() const {
  const std::string& given = environment().project_dir.value;
  return given.empty() ? "muster-run" : WithHome(given);
}

std::string Process::LoggingDirectory() const {
  const std::string& given = options_.project.logging_directory;
  if (!given.empty()) return WithHome(given);
  return ProjectDirectory();
}

at::Tensor Process::MeanOfAll(const at::Tensor& number) const {
  if (size() == 1) return number;
  at::Tensor mean = number.to(device_, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  comm().AllReduce(mean, ReduceOp::kMean);
  return mean;
}

}  // namespace muster::internal
