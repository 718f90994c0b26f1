#include "coordinator/unseated.h"

#include <algorithm>
#include <utility>

#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

constexpr size_t kNameBytes = 256;
constexpr size_t kMaxStack = 16 << 10;
constexpr int32_t kMaxRank = 1 << 20;

}  // namespace

void Unseated::Forget(absl::Time now) {
  if (now < forget_at_) return;
  forget_at_ = now + kFresh;
  absl::erase_if(jobs_, [&](auto& job) {
    Row& row = job.second;
    processes_ -= std::erase_if(row.processes,
                                [now](const auto& one) { return one.second.heard + kFresh < now; });
    return row.processes.empty() && row.calls.empty();
  });
}

void Unseated::Said(absl::string_view node, const v1::WorkerBeat& beat, absl::Time now) {
  Forget(now);
  const v1::UnseatedProcess& said = beat.unseated();
  if (said.rank() < 0 || said.rank() >= kMaxRank || beat.job_id().size() > kNameBytes ||
      beat.worker_id().size() > kNameBytes || said.host().size() > kNameBytes ||
      beat.process_state().size() > kNameBytes) {
    return;
  }
  auto job = jobs_.find(beat.job_id());
  const bool known = job != jobs_.end() && job->second.processes.count(said.rank()) != 0;
  if (!known) {
    if (processes_ >= kMaxProcesses) return;
    ++processes_;
    if (job == jobs_.end()) job = jobs_.try_emplace(beat.job_id()).first;
  }
  Process& process = job->second.processes[said.rank()];
  if (process.worker_id != beat.worker_id() || process.incarnation != beat.incarnation() ||
      process.pid != said.pid()) {
    process.stack.clear();
  }
  process.worker_id = beat.worker_id();
  process.incarnation = beat.incarnation();
  process.pid = said.pid();
  process.host = said.host();
  process.node = std::string(node);
  process.process_state = beat.process_state();
  process.heard = now;
}

int32_t Unseated::Size(absl::string_view job_id, absl::Time now) const {
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return 0;
  int32_t size = 0;
  for (const auto& [rank, process] : job->second.processes) {
    if (process.heard + kFresh >= now) size = rank + 1;
  }
  return size;
}

const Unseated::Process* Unseated::Find(absl::string_view job_id, int32_t rank,
                                        absl::Time now) const {
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return nullptr;
  const auto it = job->second.processes.find(rank);
  return it == job->second.processes.end() || it->second.heard + kFresh < now ? nullptr
                                                                              : &it->second;
}

bool Unseated::SetStack(absl::string_view job_id, const std::string& worker_id,
                        const v1::StackReply& stack) {
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return false;
  for (auto& [rank, process] : job->second.processes) {
    if (process.worker_id != worker_id) continue;
    if (stack.pid() != 0 && stack.pid() != process.pid) return false;
    process.stack = Cut(stack.native_stack(), kMaxStack);
    if (!stack.process_state().empty()) {
      process.process_state = Cut(stack.process_state(), kNameBytes);
    }
    return true;
  }
  return false;
}

bool Unseated::CallsAreFull(absl::string_view job_id) const {
  const auto job = jobs_.find(job_id);
  return job != jobs_.end() && job->second.calls.full();
}

std::vector<StackCalls::Done> Unseated::AddCall(absl::string_view job_id, CallId call,
                                                absl::Time deadline, int32_t next,
                                                std::vector<StackCalls::Asked> asked) {
  return jobs_[job_id].calls.Add(call, deadline, next, std::move(asked));
}

std::vector<StackCalls::Done> Unseated::Answered(absl::string_view job_id, uint64_t query) {
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return {};
  return job->second.calls.Answered(query);
}

void Unseated::Abandon(absl::string_view job_id, CallId call) {
  const auto job = jobs_.find(job_id);
  if (job != jobs_.end()) job->second.calls.Abandon(call);
}

std::vector<std::string> Unseated::Expired(absl::Time now) const {
  std::vector<std::string> expired;
  for (const auto& [job_id, row] : jobs_) {
    if (row.calls.NextDeadline() <= now) expired.push_back(job_id);
  }
  std::sort(expired.begin(), expired.end());
  return expired;
}

std::vector<StackCalls::Done> Unseated::TakeExpired(absl::string_view job_id, absl::Time now) {
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return {};
  return job->second.calls.TakeExpired(now);
}

absl::Time Unseated::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [job_id, row] : jobs_) next = std::min(next, row.calls.NextDeadline());
  return next;
}

}  // namespace muster::coordinator
