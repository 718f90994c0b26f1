#include "muster/internal/process.h"

#include <utility>

#include "base/log.h"
#include "c10/util/Exception.h"
#include "muster/internal/engine_settings.h"
#include "worker/train/guard.h"

namespace muster::internal {
namespace {

ShardingOptions ShardingOf(const AcceleratorOptions& options, const Environment& environment) {
  if (options.sharding.has_value()) return *options.sharding;
  if (environment.sharding.is_default() && !environment.engine_variables.empty()) {
    const absl::StatusOr<EngineSettings> settings =
        ReadEngineSettings(environment.engine_variables, environment.mixed_precision.value,
                           environment.gradient_accumulation_steps.value,
                           environment.world_size.value, environment.local_world_size.value);
    ThrowIfError(settings.status());
    for (const std::string& note : settings->notes) {
      if (environment.rank.value == 0) MUSTER_LOG(Info) << "sharding: " << note;
    }
    return settings->sharding;
  }
  ShardingOptions sharding =
      ParseSharding(environment.sharding.value, environment.local_world_size.value);
  sharding.unit_types = environment.sharding_units.value;
  return sharding;
}

}  // namespace

Process::Process(const AcceleratorOptions& options, JoinedProcess joined)
    : options_(options),
      joined_(std::move(joined)),
      device_(joined_.device),
      precision_(ParseMixedPrecision(joined_.environment.mixed_precision.value)),
      sharding_(ShardingOf(options_, joined_.environment)) {
  CheckMixedPrecision(precision_, device_.type());
  for (const std::string& type : options.rng_types) {
    TORCH_CHECK(type == "generator" || type == "torch" || type == "cuda", "rng_types: unknown \"",
                type, "\"; use generator, torch or cuda");
  }
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
