#include "worker/track/profile.h"

#include <stdio.h>
#include <unistd.h>

#include <atomic>
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
  // Kineto uses a temporary name of its own, which it leaves behind if it could not write
  // everything.
  const std::string part = absl::StrCat(temporary, ".tmp");
  result.save(temporary);
  // Kineto does not report whether it could write.
  if (!PathExists(temporary)) {
    unlink(part.c_str());
    return absl::UnavailableError(absl::StrCat(
        "cannot write ", path, ": the profiler could not write its trace (is the disk full?)"));
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status failed = absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
    unlink(temporary.c_str());
    return failed;
  }
  return path;
}

std::atomic<bool>& Claimed() {
  static std::atomic<bool> claimed{false};
  return claimed;
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

Profile::Claim::Claim() {
  TORCH_CHECK(!Claimed().exchange(true),
              "another profile is running in this process: end it first (its Stop(), or the end of "
              "its scope)");
}

Profile::Claim::~Claim() { Release(); }

void Profile::Claim::Release() {
  if (std::exchange(held_, false)) Claimed() = false;
}

Profile::Profile(ProfileOptions options) : options_(std::move(options)) {
  const ProfileSchedule& s = options_.schedule;
  TORCH_CHECK(s.wait >= 0 && s.warmup >= 0 && s.active >= 0 && s.repeat >= 0 && s.skip_first >= 0,
              "profile: the numbers of a schedule must not be negative");
  TORCH_CHECK(s.active > 0 || (s.wait == 0 && s.warmup == 0 && s.repeat == 0 && s.skip_first == 0),
              "profile: the schedule has no active step");
  TORCH_CHECK(!torch::profiler::impl::profilerEnabled(),
              "LibTorch's profiler is running: end it first");
  if (scheduled()) action_ = ProfileActionAt(s, 0);
  Enter(action_);
}

Profile::~Profile() {
  if (!running_) return;
  if (const absl::StatusOr<std::string> path = Stop(); !path.ok()) {
    MUSTER_LOG(Warning) << "profile: " << path.status().message();
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
    // A profiler that was only warmed up must be started before it can be ended.
    const bool recorded = stage_ == Stage::kRecording;
    if (!recorded) profiler::enableProfiler(ConfigOf(options_), ActivitiesOf(options_));
    stage_ = Stage::kIdle;
    const std::unique_ptr<profiler::ProfilerResult> result = profiler::disableProfiler();
    if (!recorded) return;
    const absl::StatusOr<std::string> path = Save(*result, options_, traces_++);
    if (!path.ok()) return Fail(path.status());
    path_ = *path;
    if (options_.on_trace_ready) options_.on_trace_ready(path_);
  } catch (const std::exception& error) {
    stage_ = Stage::kIdle;
    Fail(absl::InternalError(error.what()));
  } catch (...) {
    stage_ = Stage::kIdle;
    Fail(absl::InternalError("what on_trace_ready threw is no exception"));
  }
}

void Profile::Fail(const absl::Status& status) {
  if (!error_.ok()) MUSTER_LOG(Warning) << "profile: " << status.message();
  error_.Update(status);
}

void Profile::step() {
  if (!running_ || !scheduled()) return;
  if (action_ == ProfileAction::kRecordAndSave) Finish();
  action_ = ProfileActionAt(options_.schedule, ++step_);
  Enter(action_);
}

absl::StatusOr<std::string> Profile::Stop() {
  if (std::exchange(running_, false)) {
    Finish();
    claim_.Release();
    if (path_.empty()) {
      // Keeps an earlier error.
      error_.Update(absl::FailedPreconditionError(
          absl::StrCat("the schedule recorded none of the ", step_, " step(s) that have ended")));
    }
  }
  if (!error_.ok()) return error_;
  return path_;
}

}  // namespace muster
