#include "muster/internal/process.h"

#include <utility>

#include "c10/util/Exception.h"

namespace muster::internal {

Process::Process(const AcceleratorOptions& options, JoinedProcess joined)
    : options_(options),
      joined_(std::move(joined)),
      device_(joined_.device),
      precision_(ParseMixedPrecision(joined_.environment.mixed_precision.value)) {
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
