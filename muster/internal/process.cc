#include "muster/internal/process.h"

#include <utility>

#include "base/log.h"
#include "c10/util/Exception.h"
#include "muster/internal/engine_settings.h"
#include "worker/collective/ordered_comm.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

ShardingOptions ShardingOf(const AcceleratorOptions& options, const Environment& environment) {
  if (options.sharding.has_value()) return *options.sharding;
  if (environment.sharding.is_default() && !environment.engine_variables.empty()) {
    absl::StatusOr<EngineSettings> settings =
        ReadEngineSettings(environment.engine_variables, environment.mixed_precision.value,
                           environment.gradient_accumulation_steps.value,
                           environment.world_size.value, environment.local_world_size.value);
    ThrowIfError(settings.status());
    for (const std::string& note : settings->notes) {
      if (environment.rank.value == 0) MUSTER_LOG(Info) << "sharding: " << note;
    }
    if (!environment.sharding_overlap.is_default()) {
      settings->sharding.overlap = environment.sharding_overlap.value;
    }
    return settings->sharding;
  }
  ShardingOptions sharding =
      ParseSharding(environment.sharding.value, environment.local_world_size.value);
  sharding.unit_types = environment.sharding_units.value;
  sharding.overlap = environment.sharding_overlap.value;
  return sharding;
}

}  // namespace

Process::Process(const AcceleratorOptions& options, JoinedProcess joined)
    : options_(options),
      joined_(std::move(joined)),
      device_(joined_.device),
      precision_(ParseMixedPrecision(joined_.environment.mixed_precision.value)),
      sharding_(ShardingOf(options_, joined_.environment)) {
  // Streams of a GPU would have to be ordered with the thread.
  if (size() > 1 && sharding_.strategy != ShardingStrategy::kNone && sharding_.overlap &&
      device_.is_cpu()) {
    comm_thread_ = std::make_shared<CommThread>();
    joined_.comm = InOrder(std::move(joined_.comm));
  }
  CheckMixedPrecision(precision_, device_.type());
  for (const std::string& type : options.rng_types) {
    TORCH_CHECK(type == "generator" || type == "torch" || type == "cuda", "rng_types: unknown \"",
                type, "\"; use generator, torch or cuda");
  }
}

std::unique_ptr<Comm> Process::InOrder(std::unique_ptr<Comm> comm) const {
  if (comm_thread_ == nullptr || comm == nullptr) return comm;
  return MakeOrderedComm(std::move(comm), comm_thread_);
}

std::string Process::ProjectDirectory() const {
  return environment().project_dir.value.empty() ? "muster-run" : environment().project_dir.value;
}

std::string Process::LoggingDirectory() const {
  if (!options_.project.logging_directory.empty()) return options_.project.logging_directory;
  return ProjectDirectory();
}

at::Tensor Process::MeanOfAll(const at::Tensor& number) const {
  if (size() == 1) return number;
  at::Tensor mean = number.to(device_, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  comm().AllReduce(mean, ReduceOp::kMean);
  return mean;
}

}  // namespace muster::internal
