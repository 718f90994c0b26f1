#include "agent/end_watch.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "agent/coordination_values.h"
#include "agent/generation_end.h"
#include "base/backoff.h"
#include "base/clock.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

constexpr absl::Duration kWaitAgain = absl::Seconds(1);

}  // namespace

EndWatch::EndWatch(std::shared_ptr<AttemptState> attempt, OpSender* sender, bool elastic)
    : attempt_(std::move(attempt)), sender_(sender), elastic_(elastic) {
  timer_->Start();
}

EndWatch::~EndWatch() {
  Stop();
  timer_->Stop();
}

void EndWatch::Start(v1::Op wait) {
  {
    MutexLock lock(&state_->mu);
    state_->wait = std::move(wait);
    state_->wait_at = absl::InfinitePast();
    state_->generation_gone = false;
  }
  timer_->Wake();
}

void EndWatch::Stop() {
  uint64_t op_id;
  {
    MutexLock lock(&state_->mu);
    ++state_->watch;
    state_->wait_at = absl::InfiniteFuture();
    op_id = std::exchange(state_->op_id, 0);
  }
  if (op_id != 0) sender_->Forget(op_id);
}

absl::Time EndWatch::Tick() {
  v1::Op op;
  uint64_t watch;
  {
    MutexLock lock(&state_->mu);
    if (state_->wait_at > Clock::Real().Now()) return state_->wait_at;
    state_->wait_at = absl::InfiniteFuture();
    op = state_->wait;
    watch = state_->watch;
  }
  const uint64_t op_id =
      sender_->Submit(std::move(op), [state = state_, attempt = attempt_, timer = timer_, watch,
                                      elastic = elastic_](const v1::OpResult& result) {
        Answered(state.get(), attempt.get(), timer.get(), watch, elastic, result);
      });
  bool stale;
  absl::Time next;
  {
    MutexLock lock(&state_->mu);
    stale = state_->watch != watch;
    if (!stale) state_->op_id = op_id;
    next = state_->wait_at;
  }
  if (stale) sender_->Forget(op_id);
  return next;
}

void EndWatch::Answered(State* state, AttemptState* attempt, TimerThread* timer, uint64_t watch,
                        bool elastic, const v1::OpResult& result) {
  const auto again = [&](absl::Duration after) {
    if (attempt->ended().has_value()) return;
    {
      MutexLock lock(&state->mu);
      if (state->watch != watch) return;
      state->wait_at = Clock::Real().Now() + after;
    }
    timer->Wake();
  };
  {
    MutexLock lock(&state->mu);
    if (state->watch != watch) return;
  }
  if (!result.has_error()) {
    if (result.wait().kvs_size() == 1) attempt->End(EndFromValue(result.wait().kvs(0).value()));
    return;
  }
  switch (result.error().detail().reason()) {
    case v1::ERROR_REASON_WAIT_TIMEOUT:
      again(absl::ZeroDuration());
      break;
    case v1::ERROR_REASON_GENERATION_ENDED: {
      // A directive has better words, unless it came before anything listened.
      bool before;
      {
        MutexLock lock(&state->mu);
        before = std::exchange(state->generation_gone, true);
      }
      if (before) {
        attempt->End(*EndOfRefused(elastic, rpc::FromOpError(result.error())));
      } else {
        again(kWaitAgain);
      }
      break;
    }
    default:
      // The coordinator is overloaded, or away: then on_lost ends the attempt, if it must end.
      if (result.error().code() == static_cast<int>(absl::StatusCode::kUnavailable)) {
        again(Backoff(kWaitAgain, kWaitAgain)
                  .Next(RandomShare(), rpc::RetryAfter(rpc::FromOpError(result.error()))));
      } else {
        attempt->End(EndOfRefused(elastic, rpc::FromOpError(result.error()))
                         .value_or(AttemptEnd{result.error().message(), {}}));
      }
  }
}

}  // namespace muster::agent
