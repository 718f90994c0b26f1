#include "muster/internal/scopes.h"

#include <exception>
#include <memory>
#include <utility>

#include "base/log.h"
#include "c10/util/Exception.h"
#include "muster/internal/averaged_scope.h"
#include "muster/internal/core.h"
#include "muster/internal/model_slot.h"
#include "worker/parallel/sharded_model.h"

namespace muster::internal {

AccumulateScope::~AccumulateScope() noexcept(false) {
  if (steps_ != nullptr) steps_->EndMicroStep();
}

NoSyncScope::NoSyncScope(Core* core) : core_(core) {
  TORCH_CHECK(!core_->steps().joining(),
              "no_sync() inside join_uneven_inputs() would leave the processes without batches "
              "waiting: use "
              "gradient_accumulation_steps");
  core_->steps().ChangeNoSync(+1);
}
NoSyncScope::~NoSyncScope() { core_->steps().ChangeNoSync(-1); }

LocalScope::LocalScope(Core* core) : core_(core) {
  TORCH_CHECK(!core_->steps().joining(),
              "LocalSGD inside join_uneven_inputs(): there is no exchange to take part in");
  core_->steps().ChangeLocal(+1);
}
LocalScope::~LocalScope() { core_->steps().ChangeLocal(-1); }

AveragedScope::AveragedScope(Core* core, EmaWeights& ema, std::shared_ptr<ModelSlot> sharded)
    : core_(core),
      sharded_(std::move(sharded)),
      exceptions_(std::uncaught_exceptions()),
      // The average is about to take the place of the weights.
      scope_((Announce(), ema), [this] { MarkChanged(); }) {
  core_->steps().ChangeAveraged(+1);
}

AveragedScope::~AveragedScope() noexcept(false) {
  core_->steps().ChangeAveraged(-1);
  if (sharded_ == nullptr) return;
  if (std::uncaught_exceptions() == exceptions_) {
    Announce();
    return;
  }
  // After an exception, other ranks may not reach this point.
  try {
    sharded_->sharded()->Expire();
  } catch (const c10::Error& error) {
    MUSTER_LOG(Error) << "at the end of ema.apply(): " << error.what_without_backtrace();
  }
}

void AveragedScope::Announce() const {
  core_->steps().CheckStepped("ema.apply()");
  if (sharded_ != nullptr) sharded_->sharded()->AwaitReaders();
  core_->steps().AboutToChange(sharded_.get());
}

void AveragedScope::MarkChanged() const {
  if (sharded_ != nullptr) sharded_->sharded()->MarkChanged(sharded_->sharded()->shards());
}

JoinScope::JoinScope(Core* core, bool even_batches)
    : core_(core), exceptions_(std::uncaught_exceptions()) {
  core_->steps().BeginJoin(even_batches);
}
JoinScope::~JoinScope() noexcept(false) {
  core_->steps().EndJoin(/*finish=*/std::uncaught_exceptions() == exceptions_);
}

FirstScope::FirstScope(Core* core, bool per_host)
    : core_(core),
      per_host_(per_host),
      first_(per_host ? core->process().local_rank() == 0 : core->process().rank() == 0) {
  core_->steps().CheckAllTakePart(Name());
  if (first_) return;
  Comm& comm = core_->process().comm();
  try {
    comm.Barrier();
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const c10::Error&) {
    // Most likely the first process has made another call in its scope and fails there as well,
    // which ends the scope with its barrier: without this second barrier, the ranks would be out of
    // step from here on.
    try {
      comm.Barrier();
    } catch (const c10::Error& error) {
      MUSTER_LOG(Debug) << "after a failure in " << Name() << ": "
                        << error.what_without_backtrace();
    }
    throw;
  }
}
const char* FirstScope::Name() const {
  return per_host_ ? "local_main_process_first()" : "main_process_first()";
}
FirstScope::~FirstScope() {
  if (!first_) return;
  // Even if an exception is leaving the scope, the others wait for this barrier.
  try {
    core_->process().comm().Barrier();
  } catch (const c10::Error& e) {
    MUSTER_LOG(Error) << Name() << ": " << e.what_without_backtrace();
  }
}

int64_t EpochRange::Iterator::operator*() const {
  core_->loops().SetEpoch(epoch_, /*open=*/true);
  return epoch_;
}
EpochRange::Iterator& EpochRange::Iterator::operator++() {
  ++epoch_;
  core_->loops().SetEpoch(epoch_, /*open=*/false);
  return *this;
}
EpochRange::Iterator EpochRange::begin() const {
  return Iterator(core_, core_->FirstEpoch(count_));
}

PrepareCall::PrepareCall(Core* core) : core_(core), exceptions_(std::uncaught_exceptions()) {
  core_->steps().CheckAllTakePart("prepare()");
  if (core_->registry().BeginCall()) core_->ForgetUnheld();
}

PrepareCall::~PrepareCall() noexcept(false) {
  core_->registry().EndCall(/*failed=*/std::uncaught_exceptions() > exceptions_);
}

}  // namespace muster::internal
