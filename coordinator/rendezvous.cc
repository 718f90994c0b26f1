#include "coordinator/rendezvous.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/free_if_large.h"
#include "coordinator/seating.h"

namespace muster::coordinator {
namespace {

std::string Workers(int count, absl::string_view of, int all) {
  return absl::StrCat(count, " of ", of, all, all == 1 ? " worker" : " workers");
}

std::string WhoIsMissing(const SealQuestion& question) {
  const int step = std::max(1, question.divisible_by);
  const int needed = (question.min_workers + step - 1) / step * step;
  const bool fixed = question.min_workers == question.max_workers;
  std::string text =
      Workers(std::max(1, needed - question.ordinary), fixed ? "" : "at least ", needed);
  if (step > 1) absl::StrAppend(&text, " (a multiple of ", step, ")");
  if (question.spares > 0) absl::StrAppend(&text, "; spares here: ", question.spares);
  if (question.last_resorts + question.blocked > 0) {
    absl::StrAppend(&text,
                    "; here on quarantined hosts: ", question.last_resorts + question.blocked);
  }
  return text;
}

}  // namespace

SealDecision DecideSeal(const SealQuestion& question) {
  SealDecision decision;
  v1::RendezvousSpec spec;
  spec.set_min_workers(question.min_workers);
  spec.set_max_workers(question.max_workers);
  spec.set_divisible_by(question.divisible_by);
  const std::optional<int> world = FeasibleWorld(spec, question.former_world, question.ordinary,
                                                 question.spares, question.last_resorts);
  if (!world.has_value()) {
    decision.why = WhoIsMissing(question);
    return decision;
  }
  decision.world_size = *world;
  const int step = std::max(1, question.divisible_by);
  if (question.ordinary >= question.max_workers / step * step) {
    decision.seal = true;
    decision.why = absl::StrCat("the maximum number of workers has joined: ", *world);
  } else if (question.last_call_ends <= question.now) {
    decision.seal = true;
    decision.why = absl::StrCat("the last call has ended with ",
                                Workers(*world, "at most ", question.max_workers));
  } else if (question.former_world > 0 && *world >= question.former_world / step * step &&
             question.survivors_wait) {
    decision.seal = true;
    decision.why = absl::StrCat("spares replace the lost workers: ", *world, " workers, as before");
  } else {
    decision.last_call_ends = question.last_call_ends;
    if (decision.last_call_ends == absl::InfiniteFuture()) {
      decision.last_call_ends = question.now + question.last_call;
    }
    decision.why =
        absl::StrCat("more workers until the last call ends: ",
                     Workers(question.ordinary, "at most ", question.max_workers), " are here");
  }
  if (decision.seal && question.claims_end > question.now) {
    decision.seal = false;
    decision.last_call_ends =
        question.last_call_ends <= question.now ? question.claims_end : question.last_call_ends;
    decision.why = "workers that had a seat, live and are not back yet";
  }
  return decision;
}

Waiter* Rendezvous::Place(const std::string& worker_id, std::optional<uint64_t> order) {
  const auto [it, is_new] = waiting_.try_emplace(worker_id);
  if (is_new) {
    it->second.order = order.has_value() ? *order : next_order_++;
    ++counts_[static_cast<int>(it->second.kind)];
  }
  return &it->second;
}

void Rendezvous::SetKind(Waiter* waiter, WaiterKind kind) {
  --counts_[static_cast<int>(waiter->kind)];
  waiter->kind = kind;
  ++counts_[static_cast<int>(kind)];
}

void Rendezvous::SetDeadline(const std::string& worker_id, Waiter* waiter, absl::Time deadline) {
  if (waiter->deadline == deadline) return;
  deadlines_.erase({waiter->deadline, worker_id});
  waiter->deadline = deadline;
  if (deadline != absl::InfiniteFuture()) deadlines_.insert({deadline, worker_id});
}

Waiter Rendezvous::Remove(absl::string_view worker_id) {
  const auto it = waiting_.find(worker_id);
  --counts_[static_cast<int>(it->second.kind)];
  SetDeadline(it->first, &it->second, absl::InfiniteFuture());
  Waiter waiter = std::move(it->second);
  waiting_.erase(it);
  if (waiting_.empty()) {
    FreeIfLarge(&waiting_);
    decision_ = SealDecision();
    check_at_ = absl::InfiniteFuture();
  }
  return waiter;
}

std::vector<const Waiter*> Rendezvous::ByArrival() const {
  std::vector<const Waiter*> waiters;
  waiters.reserve(waiting_.size());
  for (const auto& [worker_id, waiter] : waiting_) waiters.push_back(&waiter);
  // The hash map's order is not reproducible; the order of arrival is.
  std::sort(waiters.begin(), waiters.end(),
            [](const Waiter* a, const Waiter* b) { return a->order < b->order; });
  return waiters;
}

std::vector<std::string> Rendezvous::ByName() const {
  std::vector<std::string> names;
  names.reserve(waiting_.size());
  for (const auto& [worker_id, waiter] : waiting_) names.push_back(worker_id);
  std::sort(names.begin(), names.end());
  return names;
}

const SealDecision& Rendezvous::Decide(SealQuestion question) {
  question.ordinary = Count(WaiterKind::kOrdinary);
  question.spares = Count(WaiterKind::kSpare);
  question.last_resorts = Count(WaiterKind::kLastResort);
  question.blocked = Count(WaiterKind::kBlocked);
  question.last_call_ends = decision_.last_call_ends;
  decision_ = DecideSeal(question);
  return decision_;
}

void Rendezvous::Hold(std::string why) {
  decision_ = SealDecision();
  if (!waiting_.empty()) decision_.why = std::move(why);
}

absl::Time Rendezvous::waits_until() const {
  if (in_last_call()) return decision_.last_call_ends;
  return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
}

std::optional<std::string> Rendezvous::FirstExpired(absl::Time now) const {
  if (deadlines_.empty() || deadlines_.begin()->first > now) return std::nullopt;
  return deadlines_.begin()->second;
}

absl::Time Rendezvous::NextDeadline() const {
  const absl::Time next = std::min(decision_.last_call_ends, check_at_);
  return deadlines_.empty() ? next : std::min(next, deadlines_.begin()->first);
}

}  // namespace muster::coordinator
