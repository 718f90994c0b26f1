#include "worker/track/profile.h"

#include <stdio.h>

#include <exception>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/profiler_kineto.h"

namespace muster {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

absl::StatusOr<std::string> Save(profiler::ProfilerResult& result, const ProfileOptions& options) {
  MUSTER_RETURN_IF_ERROR(MakeDirectories(options.output_dir));
  const std::string path =
      JoinPath(options.output_dir, absl::StrCat("profile_", options.rank, ".json"));
  // Kineto writes in place; a name beside it keeps a half trace from being seen.
  const std::string temporary = absl::StrCat(path, ".tmp-", RandomHex(), ".json");
  result.save(temporary);
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  }
  return path;
}

}  // namespace

Profile::Profile(ProfileOptions options)
    : options_(std::move(options)), result_(absl::FailedPreconditionError("still running")) {
  TORCH_CHECK(!torch::profiler::impl::profilerEnabled(), "another profiler is running");
  const ProfilerConfig config(ProfilerState::KINETO, options_.record_shapes,
                              options_.profile_memory, /*with_stack=*/false, options_.with_flops);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (options_.cuda) activities.insert(ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

Profile::~Profile() {
  if (!running_) return;
  if (const absl::StatusOr<std::string> path = Stop(); !path.ok()) {
    MUSTER_LOG(Warning) << "no profile was written: " << path.status().message();
  }
}

absl::StatusOr<std::string> Profile::Stop() {
  if (!std::exchange(running_, false)) return result_;
  try {
    const std::unique_ptr<profiler::ProfilerResult> result = profiler::disableProfiler();
    result_ = Save(*result, options_);
  } catch (const std::exception& error) {
    result_ = absl::InternalError(error.what());
  }
  return result_;
}

}  // namespace muster
