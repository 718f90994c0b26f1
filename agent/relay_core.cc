#include "agent/relay_core.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"
#include "rpc/session/duration.h"

namespace muster::agent {
RelayCore::RelayCore(Options options, OpSender* upstream)
    : options_(std::move(options)),
      upstream_(upstream),
      arrivals_({.node = options_.node,
                 .incarnation = options_.incarnation,
                 .window = options_.arrival_window,
                 .wake = options_.wake,
                 .clock = options_.clock},
                upstream) {}

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
  // Reports name the process by its id on this machine.
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
  SendLastWords(fence.job_id(), fence.worker_id(), fence.incarnation());
  return upstream_->Submit(std::move(op),
                           [this, fence, done = std::move(done)](const v1::OpResult& result) {
                             if (!result.has_error()) {
                               Drop(fence.job_id(), fence.worker_id(), fence.incarnation());
                             }
                             done(result);
                           });
}

void RelayCore::WorkerEnded(const std::string& job_id, const std::string& worker_id,
                            uint64_t incarnation) {
  SendLastWords(job_id, worker_id, incarnation);
  Drop(job_id, worker_id, incarnation);
}

void RelayCore::SendLastWords(const std::string& job_id, const std::string& worker_id,
                              uint64_t incarnation) {
  v1::Op op;
  {
    MutexLock lock(&mu_);
    const auto it = workers_.find({job_id, worker_id});
    if (it == workers_.end() || it->second.incarnation != incarnation) return;
    Worker& worker = it->second;
    if (worker.ended || !worker.has_spoken) return;
    v1::HeartbeatRequest& request = *op.mutable_heartbeat();
    v1::Fence& fence = *request.mutable_fence();
    fence.set_job_id(job_id);
    fence.set_worker_id(worker_id);
    fence.set_incarnation(incarnation);
    fence.set_generation(worker.generation);
    fence.set_term_seen(header_.term());
    request.set_step(worker.beat.step());
    request.set_phase(worker.beat.phase());
    request.set_last_collective(worker.beat.last_collective());
    request.set_progress(worker.beat.progress());
    if (worker.beat.has_save()) *request.mutable_save() = worker.beat.save();
    const absl::Time now = options_.clock->Now();
    if (worker.restored != absl::InfinitePast()) {
      *request.mutable_restored_ago() = rpc::ToProto(now - worker.restored);
    }
    if (worker.first_step != absl::InfinitePast()) {
      *request.mutable_first_step_ago() = rpc::ToProto(now - worker.first_step);
    }
  }
  upstream_->Submit(std::move(op), [](const v1::OpResult& result) {
    if (result.has_error()) MUSTER_LOG(Debug) << "the last beat: " << result.error().message();
  });
}

void RelayCore::Drop(const std::string& job_id, const std::string& worker_id,
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
      worker.has_spoken = true;
      worker.beat.set_step(std::max(worker.beat.step(), request.step()));
      worker.beat.set_phase(request.phase());
      worker.beat.set_last_collective(request.last_collective());
      worker.beat.set_progress(request.progress());
      if (request.has_save()) {
        *worker.beat.mutable_save() = request.save();
      } else {
        worker.beat.clear_save();
      }
      if (request.has_restored_ago()) {
        worker.restored = worker.heard - rpc::FromProto(request.restored_ago());
      }
      if (request.has_first_step_ago()) {
        worker.first_step = worker.heard - rpc::FromProto(request.first_step_ago());
      }
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
  // Reading a process from the kernel may take long, so no call waits for it.
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
      // Sent once more, so that the coordinator can say why the lease expired.
      const bool news = stands_still && !worker.told_stopped;
      worker.told_stopped = stands_still;
      if (!alive && !news) continue;
      v1::WorkerBeat& told = *beat.add_workers();
      told = worker.beat;
      told.set_process_state(one.state.empty() ? "unknown" : one.state);
      if (worker.restored != absl::InfinitePast()) {
        *told.mutable_restored_ago() = rpc::ToProto(now - worker.restored);
      }
      if (worker.first_step != absl::InfinitePast()) {
        *told.mutable_first_step_ago() = rpc::ToProto(now - worker.first_step);
      }
    }
  }
  if (options_.refresh) {
    for (v1::WorkerBeat& one : *beat.mutable_workers()) options_.refresh(&one);
  }
  AddUnseated(&beat);
  return beat;
}

bool RelayCore::HasSeat(const LocalProcess& process) const {
  MutexLock lock(&mu_);
  const auto it = workers_.find({process.job, process.worker_id});
  return it != workers_.end() && it->second.incarnation == process.incarnation && !it->second.ended;
}

void RelayCore::AddUnseated(v1::Beat* beat) {
  if (!options_.processes) return;
  for (const LocalProcess& process : options_.processes()) {
    if (HasSeat(process)) continue;
    const std::string state = options_.process_state ? options_.process_state(process.pid) : "";
    if (state == "gone") continue;
    v1::WorkerBeat& told = *beat->add_workers();
    told.set_job_id(process.job);
    told.set_worker_id(process.worker_id);
    told.set_incarnation(process.incarnation);
    told.set_process_state(state.empty() ? "unknown" : state);
    told.mutable_unseated()->set_rank(process.rank);
    told.mutable_unseated()->set_pid(process.pid);
    told.mutable_unseated()->set_host(options_.host);
  }
}

int64_t RelayCore::ProcessOf(const WorkerKey& key, uint64_t incarnation, int64_t claimed) const {
  if (!options_.process_of) return claimed;
  return options_.process_of(key.first, key.second, incarnation, claimed);
}

std::optional<int64_t> RelayCore::ProcessOf(const std::string& job_id, const std::string& worker_id,
                                            int64_t pid) const {
  WorkerKey found;
  uint64_t incarnation = 0;
  int64_t claimed = 0;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, worker] : workers_) {
      if (key.second != worker_id || worker.told_pid != pid) continue;
      if (!job_id.empty() && key.first != job_id) continue;
      found = key;
      claimed = worker.claimed_pid;
      incarnation = worker.incarnation;
    }
  }
  if (found.second.empty()) return UnseatedProcessOf(job_id, worker_id);
  return ProcessOf(found, incarnation, claimed);
}

std::optional<int64_t> RelayCore::UnseatedProcessOf(const std::string& job_id,
                                                    const std::string& worker_id) const {
  if (!options_.processes) return std::nullopt;
  for (const LocalProcess& process : options_.processes()) {
    // A script may have started its program since the beat: ask about the process that runs now.
    if (process.job == job_id && process.worker_id == worker_id && !HasSeat(process)) {
      return process.pid;
    }
  }
  return std::nullopt;
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
  const v1::ArriveRequest& request = op.arrive();
  size_t local;
  {
    MutexLock lock(&mu_);
    const auto worker = workers_.find({request.fence().job_id(), request.fence().worker_id()});
    if (worker != workers_.end() && worker->second.incarnation == request.fence().incarnation()) {
      worker->second.heard = options_.clock->Now();
      // The first step is left to a heartbeat, which also knows when it happened, and when the
      // state was loaded.
      v1::WorkerBeat& beat = worker->second.beat;
      if (beat.step() > 0) beat.set_step(std::max(beat.step(), request.step()));
    }
    local = LocalRanks(request);
  }
  arrivals_.Add(std::move(op), std::move(done), local);
  return 0;
}

absl::Time RelayCore::Tick() { return arrivals_.Tick(); }

}  // namespace muster::agent
