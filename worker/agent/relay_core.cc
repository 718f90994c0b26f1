#include "worker/agent/relay_core.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "base/failpoint.h"

namespace muster::agent {
namespace {

// Whether two arrivals at one barrier differ in nothing but who comes and with what.
bool SameCall(const v1::ArriveRequest& a, const v1::ArriveRequest& b) {
  const auto same_time = [](const google::protobuf::Duration& x,
                            const google::protobuf::Duration& y) {
    return x.seconds() == y.seconds() && x.nanos() == y.nanos();
  };
  return same_time(a.timeout(), b.timeout()) && same_time(a.soft_timeout(), b.soft_timeout()) &&
         a.payload().empty() == b.payload().empty() && a.call_site() == b.call_site() &&
         a.call_site_text() == b.call_site_text() && a.step() == b.step() &&
         a.previous_state() == b.previous_state() &&
         std::equal(a.participants().begin(), a.participants().end(), b.participants().begin(),
                    b.participants().end());
}

template <typename Request>
std::pair<int64_t, int32_t> Waited(const Request& request) {
  return {request.waited().seconds(), request.waited().nanos()};
}

template <typename Request>
int64_t WaitedUs(const Request& request) {
  return request.waited().seconds() * 1'000'000 + request.waited().nanos() / 1000;
}

// An error of a message of several ranks that may be about one of them only.
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

}  // namespace

RelayCore::RelayCore(Options options, OpSender* upstream)
    : options_(std::move(options)), upstream_(upstream) {}

uint64_t RelayCore::Submit(v1::Op op, Done done) {
  switch (op.kind_case()) {
    case v1::Op::kJoin:
      return Join(std::move(op), std::move(done));
    case v1::Op::kLeave:
      return Leave(std::move(op), std::move(done));
    case v1::Op::kHeartbeat:
      return Heartbeat(std::move(op), std::move(done));
    case v1::Op::kArrive:
      return Arrive(std::move(op), std::move(done));
    default:
      return upstream_->Submit(std::move(op), std::move(done));
  }
}

void RelayCore::Forget(uint64_t op_id) {
  if (op_id != 0) upstream_->Forget(op_id);
}

uint64_t RelayCore::Join(v1::Op op, Done done) {
  auto request = std::make_shared<v1::JoinRequest>(op.join());
  // Reports name the process by the number that it has on this machine.
  const v1::Fence& fence = request->fence();
  const int64_t pid =
      ProcessOf({fence.job_id(), fence.worker_id()}, fence.incarnation(), request->pid());
  if (pid != 0) op.mutable_join()->set_pid(pid);
  const int64_t told = op.join().pid();
  return upstream_->Submit(
      std::move(op), [this, request, told, done = std::move(done)](const v1::OpResult& result) {
        if (!result.has_error()) Seated(*request, told, result.join());
        done(result);
      });
}

void RelayCore::Seated(const v1::JoinRequest& request, int64_t told_pid,
                       const v1::JoinReply& reply) {
  const v1::Fence& fence = request.fence();
  MUSTER_FAILPOINT("agent.seated");
  MutexLock lock(&mu_);
  Worker& worker = workers_[{fence.job_id(), fence.worker_id()}];
  worker = Worker();
  worker.incarnation = fence.incarnation();
  worker.generation = reply.generation();
  worker.rank = reply.rank();
  worker.claimed_pid = request.pid();
  worker.told_pid = told_pid;
  worker.heard = options_.clock->Now();
  worker.checked = true;
  worker.beat.set_job_id(fence.job_id());
  worker.beat.set_worker_id(fence.worker_id());
  worker.beat.set_incarnation(fence.incarnation());
  if (reply.header().term() >= header_.term()) header_ = reply.header();
}

uint64_t RelayCore::Leave(v1::Op op, Done done) {
  const v1::Fence fence = op.leave().fence();
  return upstream_->Submit(std::move(op),
                           [this, fence, done = std::move(done)](const v1::OpResult& result) {
                             if (!result.has_error()) {
                               WorkerEnded(fence.job_id(), fence.worker_id(), fence.incarnation());
                             }
                             done(result);
                           });
}

void RelayCore::WorkerEnded(const std::string& job_id, const std::string& worker_id,
                            uint64_t incarnation) {
  MutexLock lock(&mu_);
  const auto it = workers_.find({job_id, worker_id});
  if (it != workers_.end() && it->second.incarnation == incarnation) workers_.erase(it);
}

uint64_t RelayCore::Heartbeat(v1::Op op, Done done) {
  const v1::HeartbeatRequest& request = op.heartbeat();
  const v1::Fence fence = request.fence();
  const bool connected = !options_.connected || options_.connected();
  v1::OpResult result;
  {
    MutexLock lock(&mu_);
    const auto it = workers_.find({fence.job_id(), fence.worker_id()});
    if (it != workers_.end() && it->second.incarnation == fence.incarnation()) {
      Worker& worker = it->second;
      worker.heard = options_.clock->Now();
      worker.beat.set_step(std::max(worker.beat.step(), request.step()));
      worker.beat.set_phase(request.phase());
      worker.beat.set_last_collective(request.last_collective());
      const bool known = worker.ended || worker.checked || !connected;
      if (known && fence.generation() == worker.generation) {
        v1::HeartbeatReply& reply = *result.mutable_heartbeat();
        *reply.mutable_header() = header_;
        reply.set_generation(worker.generation);
        reply.set_generation_ended(worker.ended);
        reply.set_why(worker.why_ended);
      }
    }
  }
  if (result.has_heartbeat()) {
    done(result);
    return 0;
  }
  return upstream_->Submit(
      std::move(op), [this, fence, done = std::move(done)](const v1::OpResult& answer) {
        if (!answer.has_error()) {
          MutexLock lock(&mu_);
          const auto it = workers_.find({fence.job_id(), fence.worker_id()});
          if (it != workers_.end() && it->second.incarnation == fence.incarnation() &&
              it->second.generation == fence.generation()) {
            it->second.checked = true;
            if (answer.heartbeat().generation_ended()) {
              it->second.ended = true;
              it->second.why_ended = answer.heartbeat().why();
            }
          }
        }
        done(answer);
      });
}

void RelayCore::Connected(uint64_t term) {
  MutexLock lock(&mu_);
  header_.set_term(std::max(header_.term(), term));
  for (auto& [key, worker] : workers_) {
    worker.checked = false;
    worker.told_stopped = false;
  }
}

void RelayCore::GenerationEnded(const v1::GenerationEnded& ended) {
  MutexLock lock(&mu_);
  for (auto it = workers_.lower_bound({ended.job_id(), ""});
       it != workers_.end() && it->first.first == ended.job_id(); ++it) {
    Worker& worker = it->second;
    if (worker.ended || worker.generation > ended.generation()) continue;
    worker.ended = true;
    worker.why_ended = ended.why();
  }
}

v1::Beat RelayCore::MakeBeat() {
  struct Seen {
    WorkerKey key;
    uint64_t incarnation;
    int64_t claimed_pid;
    std::string state;
  };
  std::vector<Seen> seen;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, worker] : workers_) {
      if (!worker.ended) seen.push_back({key, worker.incarnation, worker.claimed_pid, ""});
    }
  }
  // The kernel may take its time to tell of a process: no call waits for it.
  for (Seen& one : seen) {
    const int64_t pid = ProcessOf(one.key, one.incarnation, one.claimed_pid);
    if (options_.process_state && pid != 0) one.state = options_.process_state(pid);
    if (one.state == "gone") one.state.clear();
  }
  const absl::Time now = options_.clock->Now();
  v1::Beat beat;
  {
    MutexLock lock(&mu_);
    for (const Seen& one : seen) {
      const auto it = workers_.find(one.key);
      if (it == workers_.end() || it->second.incarnation != one.incarnation) continue;
      Worker& worker = it->second;
      if (worker.ended) continue;
      const bool stands_still = one.state == "stopped" || one.state == "zombie";
      const bool alive =
          !stands_still && (!one.state.empty() || worker.heard + options_.heard_within > now);
      // Once more, so that the coordinator can say why the lease ran out.
      const bool news = stands_still && !worker.told_stopped;
      worker.told_stopped = stands_still;
      if (!alive && !news) continue;
      v1::WorkerBeat& told = *beat.add_workers();
      told = worker.beat;
      told.set_process_state(one.state.empty() ? "unknown" : one.state);
    }
  }
  if (options_.refresh) {
    for (v1::WorkerBeat& one : *beat.mutable_workers()) options_.refresh(&one);
  }
  return beat;
}

int64_t RelayCore::ProcessOf(const WorkerKey& key, uint64_t incarnation, int64_t claimed) const {
  if (!options_.process_of) return claimed;
  return options_.process_of(key.first, key.second, incarnation, claimed);
}

std::optional<int64_t> RelayCore::ProcessOf(const std::string& worker_id, int64_t pid) const {
  WorkerKey found;
  uint64_t incarnation = 0;
  int64_t claimed = 0;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, worker] : workers_) {
      if (key.second != worker_id || worker.told_pid != pid) continue;
      found = key;
      claimed = worker.claimed_pid;
      incarnation = worker.incarnation;
    }
  }
  if (found.second.empty()) return std::nullopt;
  return ProcessOf(found, incarnation, claimed);
}

size_t RelayCore::LocalRanks(const v1::ArriveRequest& request) const {
  const std::string& job_id = request.fence().job_id();
  size_t count = 0;
  for (auto it = workers_.lower_bound({job_id, ""});
       it != workers_.end() && it->first.first == job_id; ++it) {
    const Worker& worker = it->second;
    if (worker.ended || worker.generation != request.fence().generation()) continue;
    count += request.participants_size() == 0 ||
             std::binary_search(request.participants().begin(), request.participants().end(),
                                worker.rank);
  }
  return count;
}

uint64_t RelayCore::Arrive(v1::Op op, Done done) {
  v1::ArriveRequest request = std::move(*op.mutable_arrive());
  BarrierKey key(request.fence().job_id(), request.fence().generation(), request.barrier_id(),
                 request.counter());
  const absl::Time now = options_.clock->Now();
  std::vector<Arrival> ready;
  {
    MutexLock lock(&mu_);
    const auto worker = workers_.find({request.fence().job_id(), request.fence().worker_id()});
    if (worker != workers_.end() && worker->second.incarnation == request.fence().incarnation()) {
      worker->second.heard = now;
      worker->second.beat.set_step(std::max(worker->second.beat.step(), request.step()));
    }
    const size_t local = LocalRanks(request);
    Group& group = groups_[key];
    if (group.arrivals.empty()) group.due = now + options_.arrival_window;
    group.arrivals.push_back({std::move(request), std::move(done), now});
    std::set<int32_t> ranks;
    for (const Arrival& arrival : group.arrivals) ranks.insert(arrival.request.rank());
    if (ranks.size() >= local) {
      ready = std::move(group.arrivals);
      groups_.erase(key);
    }
  }
  if (ready.empty()) {
    if (options_.wake) options_.wake();
  } else {
    Send(std::move(ready));
  }
  return 0;
}

absl::Time RelayCore::Tick() {
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

void RelayCore::Send(std::vector<Arrival> arrivals) {
  while (!arrivals.empty()) {
    const auto rest = std::stable_partition(
        arrivals.begin(), arrivals.end(), [&, first = arrivals[0].request](const Arrival& arrival) {
          return SameCall(arrival.request, first);
        });
    std::vector<Arrival> same(std::make_move_iterator(arrivals.begin()),
                              std::make_move_iterator(rest));
    arrivals.erase(arrivals.begin(), rest);
    if (same.size() == 1) {
      SendAlone(std::move(same[0]));
    } else {
      SendTogether(std::move(same));
    }
  }
}

void RelayCore::SendAlone(Arrival arrival) {
  v1::Op op;
  *op.mutable_arrive() = std::move(arrival.request);
  upstream_->Submit(std::move(op), std::move(arrival.done));
}

void RelayCore::SendTogether(std::vector<Arrival> arrivals) {
  const absl::Time now = options_.clock->Now();
  const v1::ArriveRequest& first = arrivals[0].request;
  v1::Op op;
  v1::ArriveManyRequest& many = *op.mutable_arrive_many();
  v1::Fence& fence = *many.mutable_fence();
  fence.set_job_id(first.fence().job_id());
  fence.set_generation(first.fence().generation());
  fence.set_worker_id(options_.node);
  fence.set_incarnation(options_.incarnation);
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
  std::vector<int64_t> waited_us;
  std::set<int32_t> ranks;  // a call that was repeated stands here twice
  for (const Arrival& arrival : arrivals) {
    fence.set_term_seen(std::max(fence.term_seen(), arrival.request.fence().term_seen()));
    fence.set_revision_seen(
        std::max(fence.revision_seen(), arrival.request.fence().revision_seen()));
    if (Waited(arrival.request) > Waited(many)) *many.mutable_waited() = arrival.request.waited();
    if (!ranks.insert(arrival.request.rank()).second) continue;
    many.add_ranks(arrival.request.rank());
    many.add_incarnations(arrival.request.fence().incarnation());
    waited_us.push_back(WaitedUs(arrival.request));
    many.add_lateness_us(static_cast<int32_t>(
        std::min<int64_t>(absl::ToInt64Microseconds(now - arrival.at), INT32_MAX)));
    if (!first.payload().empty()) many.add_payloads(arrival.request.payload());
  }
  // How it grows while the message waits to be sent, it grows for all.
  for (size_t i = 0; many.has_waited() && i < waited_us.size(); ++i)
    many.add_waited_less_us(WaitedUs(many) - waited_us[i]);
  auto waiting = std::make_shared<std::vector<Arrival>>(std::move(arrivals));
  MUSTER_FAILPOINT("agent.send_together");
  upstream_->Submit(std::move(op), [this, waiting](const v1::OpResult& result) {
    MUSTER_FAILPOINT("agent.answer_together");
    if (result.has_error() && ConcernsOneRank(result)) {
      for (Arrival& arrival : *waiting) SendAlone(std::move(arrival));
      return;
    }
    for (const Arrival& arrival : *waiting) arrival.done(result);
  });
}

}  // namespace muster::agent
