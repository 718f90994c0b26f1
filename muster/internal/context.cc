#include "muster/internal/context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "worker/process/join_job.h"

namespace muster::internal {

absl::StatusOr<std::unique_ptr<ProcessContext>> OpenProcessContext(
    const EnvironmentArguments& arguments) {
  MUSTER_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment(ProcessVariables(), arguments));
  // Every process sees the same warnings; one of them is enough.
  if (environment.rank.value != 0) environment.warnings.clear();
  JoinJobOptions options;
  options.on_generation_ended = [](const absl::Status& why) {
    MUSTER_LOG(Error) << "this generation of the job is over: " << why.message();
  };
  MUSTER_ASSIGN_OR_RETURN(JoinedProcess joined, JoinJob(environment, options));
  auto context = std::make_unique<ProcessContext>();
  context->environment = std::move(joined.environment);
  context->device = joined.device;
  context->coordinator = std::move(joined.coordinator);
  context->comm = std::move(joined.comm);
  if (context->comm->size() > 1) {
    SetLogIdentity(absl::StrCat("rank ", context->environment.rank.value));
  }
  return context;
}

}  // namespace muster::internal
