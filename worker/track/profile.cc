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

ProfilerConfig ConfigOf(const ProfileOptions& options) {
  return ProfilerConfig(ProfilerState::KINETO, options.record_shapes, options.profile_memory,
                        /*with_stack=*/false, options.with_flops);
}

std::set<ActivityType> ActivitiesOf(const ProfileOptions& options) {
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (options.cuda) activities.insert(ActivityType::CUDA);
  return activities;
}

absl::StatusOr<std::string> Save(profiler::ProfilerResult& result, const ProfileOptions& options,
                                 int64_t number) {
  MUSTER_RETURN_IF_ERROR(MakeDirectories(options.output_dir));
  const std::string name = absl::StrCat(
      "profile_", options.rank, number == 0 ? std::string() : absl::StrCat("_", number), ".json");
  const std::string path = JoinPath(options.output_dir, name);
  // Kineto writes in place; a temporary name hides a half-written trace.
  const std::string temporary = absl::StrCat(path, ".tmp-", RandomHex(), ".json");
  result.save(temporary);
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  }
  return path;
}

}  // namespace

ProfileAction ProfileActionAt(const ProfileSchedule& schedule, int64_t step) {
  if (step < schedule.skip_first) return ProfileAction::kNone;
  step -= schedule.skip_first;
  const int64_t round = schedule.wait + schedule.warmup + schedule.active;
  if (schedule.repeat > 0 && step / round >= schedule.repeat) return ProfileAction::kNone;
  const int64_t in_round = step % round;
  if (in_round < schedule.wait) return ProfileAction::kNone;
  if (in_round < schedule.wait + schedule.warmup) return ProfileAction::kWarmup;
  return in_round + 1 < round ? ProfileAction::kRecord : ProfileAction::kRecordAndSave;
}

Profile::Profile(ProfileOptions options)
    : options_(std::move(options)), result_(absl::FailedPreconditionError("still running")) {
  const ProfileSchedule& s = options_.schedule;
  TORCH_CHECK(s.wait >= 0 && s.warmup >= 0 && s.active >= 0 && s.repeat >= 0 && s.skip_first >= 0,
              "profile: the numbers of a schedule must not be negative");
  TORCH_CHECK(s.active > 0 || (s.wait == 0 && s.warmup == 0 && s.repeat == 0 && s.skip_first == 0),
              "profile: the schedule has no active step");
  TORCH_CHECK(!torch::profiler::impl::profilerEnabled(), "another profiler is running");
  if (scheduled()) action_ = ProfileActionAt(s, 0);
  Enter(action_);
}

Profile::~Profile() {
  if (!running_) return;
  if (const absl::StatusOr<std::string> path = Stop(); !path.ok()) {
    MUSTER_LOG(Warning) << "no profile was written: " << path.status().message();
  }
}

void Profile::Enter(ProfileAction action) {
  if (action == ProfileAction::kNone) return;
  if (stage_ == Stage::kIdle) {
    profiler::prepareProfiler(ConfigOf(options_), ActivitiesOf(options_));
    stage_ = Stage::kPrepared;
  }
  if (action == ProfileAction::kWarmup || stage_ == Stage::kRecording) return;
  profiler::enableProfiler(ConfigOf(options_), ActivitiesOf(options_));
  stage_ = Stage::kRecording;
}

void Profile::Finish() {
  if (stage_ == Stage::kIdle) return;
  try {
    // A profiler that was only warmed up has to be started to be ended.
    const bool recorded = stage_ == Stage::kRecording;
    if (!recorded) profiler::enableProfiler(ConfigOf(options_), ActivitiesOf(options_));
    stage_ = Stage::kIdle;
    const std::unique_ptr<profiler::ProfilerResult> result = profiler::disableProfiler();
    if (!recorded) return;
    result_ = Save(*result, options_, traces_++);
  } catch (const std::exception& error) {
    stage_ = Stage::kIdle;
    result_ = absl::InternalError(error.what());
  }
  if (result_.ok() && options_.on_trace_ready) options_.on_trace_ready(*result_);
}

void Profile::step() {
  if (!running_ || !scheduled()) return;
  if (action_ == ProfileAction::kRecordAndSave) Finish();
  action_ = ProfileActionAt(options_.schedule, ++step_);
  Enter(action_);
}

absl::StatusOr<std::string> Profile::Stop() {
  if (!std::exchange(running_, false)) return result_;
  if (traces_ == 0) {
    result_ = absl::FailedPreconditionError(
        absl::StrCat("the schedule recorded none of the ", step_ + 1, " step(s)"));
  }
  Finish();
  return result_;
}

}  // namespace muster
