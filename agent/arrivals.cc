#include "agent/arrivals.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"

namespace muster::agent {
namespace {

// Calls `f` with the request of `op`, for either kind of arrival.
template <typename F>
auto With(const v1::Op& op, F f) {
  return op.has_arrive() ? f(op.arrive()) : f(op.arrive_many());
}
bool HasPayloads(const v1::ArriveRequest& request) { return !request.payload().empty(); }
bool HasPayloads(const v1::ArriveManyRequest& request) { return request.payloads_size() > 0; }

size_t Ranks(const v1::Op& op) {
  return op.has_arrive() ? 1 : static_cast<size_t>(op.arrive_many().ranks_size());
}
int32_t Rank(const v1::Op& op, size_t i) {
  return op.has_arrive() ? op.arrive().rank() : op.arrive_many().ranks(static_cast<int>(i));
}
uint64_t Incarnation(const v1::Op& op, size_t i) {
  return op.has_arrive() ? op.arrive().fence().incarnation()
                         : op.arrive_many().incarnations(static_cast<int>(i));
}

// Whether the repeated fields of `op` have the right lengths; if not, the coordinator has to refuse
// it.
bool IsWhole(const v1::Op& op) {
  if (op.has_arrive()) return true;
  const v1::ArriveManyRequest& many = op.arrive_many();
  return many.ranks_size() > 0 && many.incarnations_size() == many.ranks_size() &&
         (many.lateness_us_size() == 0 || many.lateness_us_size() == many.ranks_size()) &&
         (many.waited_less_us_size() == 0 || many.waited_less_us_size() == many.ranks_size()) &&
         (many.payloads_size() == 0 || many.payloads_size() == many.ranks_size());
}

bool SameTime(const google::protobuf::Duration& a, const google::protobuf::Duration& b) {
  return a.seconds() == b.seconds() && a.nanos() == b.nanos();
}

// Whether two arrivals at one barrier differ only in their ranks and payloads.
bool SameCall(const v1::Op& op, const v1::Op& other) {
  return With(op, [&](const auto& a) {
    return With(other, [&](const auto& b) {
      return SameTime(a.timeout(), b.timeout()) && SameTime(a.soft_timeout(), b.soft_timeout()) &&
             a.has_soft_timeout() == b.has_soft_timeout() && HasPayloads(a) == HasPayloads(b) &&
             a.call_site() == b.call_site() && a.call_site_text() == b.call_site_text() &&
             a.step() == b.step() && a.previous_state() == b.previous_state() &&
             a.fence().cluster() == b.fence().cluster() &&
             std::equal(a.participants().begin(), a.participants().end(), b.participants().begin(),
                        b.participants().end());
    });
  });
}

std::pair<int64_t, int32_t> Waited(const google::protobuf::Duration& waited) {
  return {waited.seconds(), waited.nanos()};
}
// Cut at a century, so that no untrusted value overflows.
int64_t WaitedUs(const google::protobuf::Duration& waited) {
  constexpr int64_t kCentury = int64_t{100} * 366 * 86400;
  return std::clamp<int64_t>(waited.seconds(), 0, kCentury) * 1'000'000 +
         std::clamp(waited.nanos(), 0, 999'999'999) / 1000;
}
// How long the i-th rank of `op` had waited.
int64_t RankWaitedUs(const v1::Op& op, size_t i) {
  if (op.has_arrive()) return WaitedUs(op.arrive().waited());
  const v1::ArriveManyRequest& many = op.arrive_many();
  const int64_t waited = WaitedUs(many.waited());
  if (many.waited_less_us_size() == 0) return waited;
  return waited - std::clamp<int64_t>(many.waited_less_us(static_cast<int>(i)), 0, waited);
}

// `before`, and the time since `at`.
int32_t LatenessUs(int32_t before, absl::Time at, absl::Time now) {
  const int64_t here = std::max<int64_t>(0, absl::ToInt64Microseconds(now - at));
  return static_cast<int32_t>(
      std::min<int64_t>(std::max(before, 0) + std::min<int64_t>(here, INT32_MAX), INT32_MAX));
}

// Whether an error of a message with several ranks may concern only one of them.
bool ConcernsOneRank(const v1::OpResult& result) {
  switch (result.error().detail().reason()) {
    case v1::ERROR_REASON_SUPERSEDED:
    case v1::ERROR_REASON_LEASE_EXPIRED:
    case v1::ERROR_REASON_NOT_MEMBER:
    case v1::ERROR_REASON_BAD_FIELD:
    case v1::ERROR_REASON_LIMIT:
      return true;
    default:
      return false;
  }
}

void AddRanks(const ArrivalMerger::Arrival& arrival, absl::Time now,
              absl::flat_hash_set<int32_t>* taken, std::vector<int64_t>* waited_us,
              v1::ArriveManyRequest* many) {
  const v1::Op& op = arrival.op;
  for (size_t i = 0; i < Ranks(op); ++i) {
    if (!taken->insert(Rank(op, i)).second) continue;  // a repeated call
    many->add_ranks(Rank(op, i));
    many->add_incarnations(Incarnation(op, i));
    waited_us->push_back(RankWaitedUs(op, i));
    const bool told = op.has_arrive_many() && op.arrive_many().lateness_us_size() > 0;
    many->add_lateness_us(
        LatenessUs(told ? op.arrive_many().lateness_us(static_cast<int>(i)) : 0, arrival.at, now));
    if (op.has_arrive()) {
      if (!op.arrive().payload().empty()) many->add_payloads(op.arrive().payload());
    } else if (op.arrive_many().payloads_size() > 0) {
      many->add_payloads(op.arrive_many().payloads(static_cast<int>(i)));
    }
  }
}

v1::Op Joint(const std::vector<ArrivalMerger::Arrival>& arrivals, const std::string& node,
             uint64_t incarnation, absl::Time now) {
  v1::Op op;
  v1::ArriveManyRequest& many = *op.mutable_arrive_many();
  v1::Fence& fence = *many.mutable_fence();
  With(arrivals[0].op, [&](const auto& first) {
    fence.set_job_id(first.fence().job_id());
    fence.set_generation(first.fence().generation());
    fence.set_worker_id(node);
    fence.set_incarnation(incarnation);
    fence.set_cluster(first.fence().cluster());
    many.set_barrier_id(first.barrier_id());
    many.set_counter(first.counter());
    *many.mutable_timeout() = first.timeout();
    if (first.has_soft_timeout()) *many.mutable_soft_timeout() = first.soft_timeout();
    *many.mutable_participants() = first.participants();
    many.set_call_site(first.call_site());
    many.set_call_site_text(first.call_site_text());
    many.set_step(first.step());
    many.set_previous_state(first.previous_state());
  });
  absl::flat_hash_set<int32_t> taken;
  std::vector<int64_t> waited_us;
  for (const ArrivalMerger::Arrival& arrival : arrivals) {
    With(arrival.op, [&](const auto& one) {
      fence.set_term_seen(std::max(fence.term_seen(), one.fence().term_seen()));
      fence.set_revision_seen(std::max(fence.revision_seen(), one.fence().revision_seen()));
      if (Waited(one.waited()) > Waited(many.waited())) *many.mutable_waited() = one.waited();
    });
    AddRanks(arrival, now, &taken, &waited_us, &many);
  }
  // The time for which the message then waits to be sent is the same for all.
  for (size_t i = 0; many.has_waited() && i < waited_us.size(); ++i)
    many.add_waited_less_us(WaitedUs(many.waited()) - waited_us[i]);
  return op;
}

}  // namespace

ArrivalMerger::ArrivalMerger(Options options, OpSender* upstream)
    : options_(std::move(options)), upstream_(upstream) {}

void ArrivalMerger::Add(v1::Op op, OpSender::Done done, size_t expected, uint64_t tag) {
  const absl::Time now = options_.clock->Now();
  Arrival arrival{.op = std::move(op), .done = std::move(done), .tag = tag, .at = now};
  arrival.bytes = arrival.op.ByteSizeLong();
  std::vector<std::vector<Arrival>> ready;
  bool waits = false;
  if (arrival.bytes >= options_.max_bytes || !IsWhole(arrival.op)) {
    ready.emplace_back().push_back(std::move(arrival));
  } else {
    Instance instance = With(arrival.op, [](const auto& request) {
      return Instance(request.fence().job_id(), request.fence().generation(), request.barrier_id(),
                      request.counter());
    });
    MutexLock lock(&mu_);
    Group& group = groups_[instance];
    if (group.bytes + arrival.bytes > options_.max_bytes) {
      ready.push_back(std::move(group.arrivals));
      group = Group();
    }
    if (group.arrivals.empty()) group.due = now + options_.window;
    for (size_t i = 0; i < Ranks(arrival.op); ++i) group.ranks.insert(Rank(arrival.op, i));
    group.bytes += arrival.bytes;
    group.arrivals.push_back(std::move(arrival));
    waits = group.ranks.size() < expected;
    if (!waits) {
      ready.push_back(std::move(group.arrivals));
      groups_.erase(instance);
    }
  }
  if (waits && options_.wake) options_.wake();
  for (std::vector<Arrival>& arrivals : ready) Send(std::move(arrivals));
}

absl::Time ArrivalMerger::Tick() {
  const absl::Time now = options_.clock->Now();
  std::vector<std::vector<Arrival>> ready;
  absl::Time next = absl::InfiniteFuture();
  {
    MutexLock lock(&mu_);
    for (auto it = groups_.begin(); it != groups_.end();) {
      if (it->second.due > now) {
        next = std::min(next, it->second.due);
        ++it;
        continue;
      }
      ready.push_back(std::move(it->second.arrivals));
      it = groups_.erase(it);
    }
  }
  for (std::vector<Arrival>& arrivals : ready) Send(std::move(arrivals));
  return next;
}

void ArrivalMerger::Drop(const absl::flat_hash_set<uint64_t>& tags) {
  std::vector<Arrival> dropped;  // destroyed outside of the lock
  std::vector<uint64_t> forgotten;
  const auto take = [&](std::vector<Arrival>* from) {
    const auto rest = std::stable_partition(
        from->begin(), from->end(),
        [&](const Arrival& arrival) { return arrival.tag == 0 || !tags.contains(arrival.tag); });
    dropped.insert(dropped.end(), std::make_move_iterator(rest),
                   std::make_move_iterator(from->end()));
    from->erase(rest, from->end());
  };
  {
    MutexLock lock(&mu_);
    for (auto it = groups_.begin(); it != groups_.end();) {
      take(&it->second.arrivals);
      it = it->second.arrivals.empty() ? groups_.erase(it) : std::next(it);
    }
    for (auto it = sent_.begin(); it != sent_.end();) {
      const auto sent = it++;
      take(&sent->second.arrivals);
      if (!sent->second.arrivals.empty()) continue;
      if (sent->second.op_id == 0) {  // it is being submitted
        sent->second.dropped = true;
      } else {
        forgotten.push_back(sent->second.op_id);
        sent_.erase(sent);
      }
    }
  }
  for (const uint64_t op_id : forgotten) upstream_->Forget(op_id);
}

void ArrivalMerger::Send(std::vector<Arrival> arrivals) {
  while (!arrivals.empty()) {
    absl::flat_hash_map<int32_t, uint64_t> incarnations;
    const v1::Op first = arrivals[0].op;
    const auto goes_along = [&](const Arrival& arrival) {
      if (!SameCall(arrival.op, first)) return false;
      for (size_t i = 0; i < Ranks(arrival.op) && IsWhole(arrival.op); ++i) {
        const auto it = incarnations.find(Rank(arrival.op, i));
        if (it != incarnations.end() && it->second != Incarnation(arrival.op, i)) return false;
      }
      for (size_t i = 0; i < Ranks(arrival.op) && IsWhole(arrival.op); ++i)
        incarnations.emplace(Rank(arrival.op, i), Incarnation(arrival.op, i));
      return true;
    };
    std::vector<Arrival> same, rest;
    for (Arrival& arrival : arrivals) {
      const bool along = goes_along(arrival);
      (along ? same : rest).push_back(std::move(arrival));
    }
    SendOne(std::move(same));
    arrivals = std::move(rest);
  }
}

void ArrivalMerger::SendOne(std::vector<Arrival> arrivals) {
  const absl::Time now = options_.clock->Now();
  const bool joint = arrivals.size() > 1;
  v1::Op op;
  if (joint) {
    op = Joint(arrivals, options_.node, options_.incarnation, now);
  } else {
    op = std::move(arrivals[0].op);
    if (op.has_arrive_many()) {
      for (int32_t& late : *op.mutable_arrive_many()->mutable_lateness_us())
        late = LatenessUs(late, arrivals[0].at, now);
    }
  }
  uint64_t serial;
  {
    MutexLock lock(&mu_);
    serial = next_++;
    sent_[serial].arrivals = std::move(arrivals);
  }
  if (joint) MUSTER_FAILPOINT("agent.send_together");
  const uint64_t op_id = upstream_->Submit(
      std::move(op), [this, serial](const v1::OpResult& result) { OnAnswer(serial, result); });
  {
    MutexLock lock(&mu_);
    const auto it = sent_.find(serial);
    if (it == sent_.end()) return;  // answered
    if (!it->second.dropped) {
      it->second.op_id = op_id;
      return;
    }
    sent_.erase(it);
  }
  upstream_->Forget(op_id);
}

void ArrivalMerger::OnAnswer(uint64_t serial, const v1::OpResult& result) {
  std::vector<Arrival> arrivals;
  {
    MutexLock lock(&mu_);
    const auto it = sent_.find(serial);
    if (it == sent_.end()) return;
    arrivals = std::move(it->second.arrivals);
    sent_.erase(it);
  }
  if (arrivals.size() > 1) {
    MUSTER_FAILPOINT("agent.answer_together");
    if (result.has_error() && ConcernsOneRank(result)) {
      for (Arrival& arrival : arrivals) {
        std::vector<Arrival> alone;
        alone.push_back(std::move(arrival));
        SendOne(std::move(alone));
      }
      return;
    }
  }
  if (arrivals.empty()) return;
  if (options_.answer) {
    options_.answer(arrivals, result);
  } else {
    for (const Arrival& arrival : arrivals) arrival.done(result);
  }
}

}  // namespace muster::agent
