#include "muster/internal/elastic_join.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/held_memory.h"
#include "base/log.h"
#include "base/variable_list.h"
#include "c10/util/Exception.h"
#include "worker/job/agent_tells.h"
#include "worker/job/environment.h"
#include "worker/job/generation_end.h"
#include "worker/job/join_job.h"
#include "worker/job/peer_loss.h"
#include "worker/job/stop_signal.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"

namespace muster::internal {

namespace {

// As many re-entries as the agent's restarts account for: one for each restart, and one more if
// another survivor had to be started again. Any further ones follow no loss that is counted, but
// for example leases that expire again and again.
int LargestNumberOfReentries() {
  const std::map<std::string, std::string> variables = ProcessVariables();
  const auto number = [&](const std::string& name, int* value) {
    const auto it = variables.find(name);
    return it != variables.end() && absl::SimpleAtoi(it->second, value);
  };
  int most = 0, done = 0;
  if (!number("TORCHELASTIC_MAX_RESTARTS", &most)) return std::numeric_limits<int>::max();
  number("MUSTER_RESTART_COUNT", &done);
  return 2 * std::clamp(most - done, 0, 1 << 20) + 1;
}

}  // namespace

ElasticJoin::ElasticJoin(const AcceleratorOptions& options, bool elastic)
    : options_(options),
      elastic_(elastic),
      reentries_left_(elastic ? LargestNumberOfReentries() : 0),
      random_(elastic ? SaveRngState() : std::map<std::string, at::Tensor>()) {}

void ElasticJoin::Offer(const JoinedProcess& process) {
  const Environment& environment = process.environment;
  *able_ = false;
  // If the only process is lost, none is left to re-enter.
  if (environment.world_size.value == 1) return;
  std::string why;
  if (process.device.is_cuda()) {
    why = "the collectives of GPUs do not notice the loss by themselves";
  } else if (environment.memory_socket.value.empty()) {
    why = "it was not started by an agent that supports that (MUSTER_MEMORY_SOCKET)";
  } else {
    agent_ = environment.memory_socket.value;
    const absl::Status told = TellReentry(agent_, Reentry::kAble);
    *able_ = told.ok();
    why = std::string(told.message());
  }
  if (!*able_ && !std::exchange(logged_unable_, true) && environment.rank.value == 0) {
    MUSTER_LOG(Warning) << "if a process of this job is lost, all start again: " << why;
  }
}

std::shared_ptr<Core> ElasticJoin::Join() {
  if (!elastic_) return std::make_shared<Core>(options_);
  if (returns_) CheckHeld();
  while (true) {
    if (returns_) {
      // Start with the same random state as a new process.
      RestoreRngState(random_);
      at::ThreadLocalState::setThreadLocalState(thread_);
    }
    if (returns_) ThrowIfError(TellReentry(agent_, Reentry::kReturned));
    bool seated = false;
    JoinJobOptions join;
    join.reenters = true;
    join.on_seated = [&](const JoinedProcess& process) {
      seated = true;
      Offer(process);
    };
    join.on_generation_ended = [able = able_](const absl::Status& why) {
      if (*able || AgentTells(why, ProcessVariables())) return;
      MUSTER_LOG(Error) << "this generation of the job ended: " << why.message();
    };
    absl::StatusOr<JoinedProcess> process = Core::Join(options_, join);
    absl::Status status = process.status();
    bool lost = seated && *able_ && absl::IsAborted(status) && --reentries_left_ >= 0;
    if (process.ok()) {
      const std::shared_ptr<CoordinatorClient> coordinator = process->coordinator;
      const Environment environment = process->environment;
      std::shared_ptr<Core> core;
      status = Guard([&] { core = std::make_shared<Core>(options_, *std::move(process)); });
      if (status.ok()) return core;
      lost = Lost(status, coordinator, environment);
    }
    if (!lost) ThrowIfError(status);
    MUSTER_LOG(Info) << "joins the next generation: " << status.message();
    returns_ = true;
  }
}

bool ElasticJoin::Lost(const absl::Status& error,
                       const std::shared_ptr<CoordinatorClient>& coordinator,
                       const Environment& environment) {
  if (!*able_ || !IsLossOfPeer(error) ||
      !AwaitGenerationEnd(*coordinator, PatienceForEnd(environment)).ok()) {
    return false;
  }
  if (--reentries_left_ >= 0) return true;
  MUSTER_LOG(Error) << "this process has joined again more often than the job may be restarted";
  return false;
}

bool ElasticJoin::Leaves(Core& core, const absl::Status& error) {
  if (!Lost(error, core.process().coordinator(), core.process().environment())) return false;
  // From here to the next call of should_stop(), a stop signal ends the process.
  if (!StopSignal::Release()) return false;
  // Log the error: if this process caused it, it is reported nowhere else.
  MUSTER_LOG(Warning) << "joins the next generation: " << error.message();
  returns_ = true;
  handed_ = core.Abandon();
  former_ = core.weak_from_this();
  return true;
}

void ElasticJoin::Finished() {
  if (able_->exchange(false)) (void)TellReentry(agent_, Reentry::kNone);
}

void ElasticJoin::CheckHeld() const {
  const bool held =
      !former_.expired() ||
      std::any_of(handed_.objects.begin(), handed_.objects.end(),
                  [](const std::weak_ptr<void>& object) { return !object.expired(); }) ||
      std::any_of(handed_.parameters.begin(), handed_.parameters.end(),
                  [](const Handed::Parameter& parameter) { return !parameter.expired(); });
  TORCH_CHECK(!held,
              "another process is lost, and this one cannot join the others again: something that "
              "the Accelerator has prepared (a model, its parameters, an optimizer, a loader, a "
              "group) outlives the function given to run_elastic(); make it in that function");
}

}  // namespace muster::internal
