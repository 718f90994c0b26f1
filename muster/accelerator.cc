#include "muster/accelerator.h"

#include <unistd.h>

#include <cstdio>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "muster/checkpoint.h"
#include "worker/job/agent_tells.h"
#include "worker/job/environment.h"
#include "worker/job/stop_signal.h"
#include "worker/train/guard.h"

namespace muster {

namespace internal {

std::map<std::string, at::Tensor> StateDictOf(const ModelSource& model) {
  std::map<std::string, at::Tensor> tensors;
  for (auto& [name, tensor] : TensorsOf(model)) tensors.emplace(name, tensor);
  return tensors;
}

}  // namespace internal

Accelerator::Accelerator() : Accelerator(Options{}) {}
Accelerator::Accelerator(const Options& options)
    : core_(std::make_shared<internal::Core>(options)) {}
Accelerator::Accelerator(std::shared_ptr<internal::Core> core) : core_(std::move(core)) {}
// Handles keep the core alive; the job ends with the Accelerator all the same. A process that
// leaves by an exception has not ended its training: the others learn that from its exit.
Accelerator::~Accelerator() {
  if (std::uncaught_exceptions() > 0) {
    core_->FinishTrackers();
  } else {
    core_->EndTraining();
  }
}

internal::AccumulateScope Accelerator::accumulate() { return core_->Accumulate(); }

void Accelerator::print(const char* format, ...) {
  if (!is_local_main_process()) return;
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::fflush(stdout);
}

absl::Status Accelerator::save_state(const std::string& directory) {
  return core_->SaveState(directory);
}
absl::Status Accelerator::load_state(const std::string& directory) {
  return core_->LoadState(directory, /*may_be_missing=*/false);
}
absl::Status Accelerator::load_state_if_present(const std::string& directory) {
  return core_->LoadState(directory, /*may_be_missing=*/true);
}

absl::Status Accelerator::save(const std::map<std::string, at::Tensor>& tensors,
                               const std::string& path) {
  return is_main_process() ? SaveTensors(path, tensors) : absl::OkStatus();
}

HookHandle Accelerator::HandleOf(int64_t hook) {
  return HookHandle([core = std::weak_ptr<internal::Core>(core_), hook] {
    if (const auto alive = core.lock()) alive->RemoveHook(hook);
  });
}

absl::StatusOr<GeneralTracker*> Accelerator::get_tracker(const std::string& name) {
  if (core_->trackers() == nullptr) {
    return absl::FailedPreconditionError("get_tracker() before init_trackers()");
  }
  return core_->trackers()->Get(name);
}

Progress Accelerator::progress(int64_t total, const std::string& description) {
  ProgressOptions options;
  options.description = description;
  options.total = total;
  options.enabled = is_local_main_process();
  return Progress(std::move(options));
}

Profile Accelerator::profile(const std::string& output_dir) {
  ProfileOptions options;
  options.output_dir = output_dir;
  return profile(std::move(options));
}

Profile Accelerator::profile(ProfileOptions options) {
  options.rank = process_index();
  options.cuda = device().is_cuda();
  return Profile(std::move(options));
}

namespace {

// Of a process that another one's failure ends. Its agent stops it within milliseconds.
constexpr absl::Duration kStopPatience = absl::Seconds(30);

// Where SIGTERM is not noted it ends the process.
bool WaitForStop(absl::Duration timeout) {
  const absl::Time give_up = Clock::Real().Now() + timeout;
  while (!StopSignal::Received()) {
    if (Clock::Real().Now() >= give_up) return false;
    Notification().WaitForNotificationWithTimeout(absl::Milliseconds(10));
  }
  return true;
}

}  // namespace

int internal::Run(int argc, char** argv, const AcceleratorOptions& options,
                  const std::function<absl::Status(Accelerator&, const Arguments&)>& train) {
  const Arguments arguments(argv + std::min(argc, 1), argv + argc);
  std::string who = absl::StrCat("pid ", getpid());
  bool told = false;
  const absl::Status status = Guard([&] {
    Accelerator accelerator(options);
    if (accelerator.use_distributed()) {
      who = absl::StrCat("rank ", accelerator.process_index(), " (", who, ")");
    }
    const absl::Status trained = Guard([&] {
      ThrowIfError(train(accelerator, arguments));
      accelerator.end_training();
    });
    // Before this process lets go of the others.
    const absl::Status named = accelerator.core().NameCulprit(trained);
    told = AgentTells(named, ProcessVariables());
    ThrowIfError(named);
  });
  std::fflush(stdout);
  if (status.ok()) return 0;
  // The agent knows who failed first and stops the others. One that went before that might be taken
  // for the culprit.
  if (told && WaitForStop(kStopPatience)) return 1;
  const absl::string_view program = argc > 0 ? argv[0] : "muster";
  std::fprintf(stderr, "%s: %s: %s\n", std::string(program.substr(program.rfind('/') + 1)).c_str(),
               who.c_str(), status.ToString().c_str());
  return 1;
}

}  // namespace muster
