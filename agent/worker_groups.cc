#include "agent/worker_groups.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace muster::agent {
namespace {

constexpr char kRankPrefix[] = "rank_";
// For processes that the kernel does not end at once.
constexpr absl::Duration kPatience = absl::Seconds(5);
constexpr int kPeriodUs = 100'000;  // for cpu.max

}  // namespace

WorkerGroups::WorkerGroups(Options options)
    : options_(std::move(options)), attempt_(options_.folder, options_.calls) {}

ControlGroup WorkerGroups::OfRank(int rank) const {
  return attempt_.Below(absl::StrCat(kRankPrefix, rank));
}

absl::Status WorkerGroups::Enter() const {
  const ControlGroup group = attempt_.Below("runner");
  // A move takes the kernel milliseconds, even to the group where the process already is.
  const std::vector<int64_t> there = group.Processes();
  if (std::find(there.begin(), there.end(), getpid()) != there.end()) return absl::OkStatus();
  return group.Enter();
}

void WorkerGroups::TakeRunner(const ControlGroup& attempt, int64_t pid) {
  attempt.Below("runner").Write("cgroup.procs", absl::StrCat(pid)).IgnoreError();
}

absl::StatusOr<OwnedFd> WorkerGroups::Make(int rank) const {
  const ControlGroup group = OfRank(rank);
  if (group.Exists()) {
    group.Kill();
    MUSTER_RETURN_IF_ERROR(group.AwaitEmpty(kPatience));
    // Remove it with its counts.
    MUSTER_RETURN_IF_ERROR(group.Remove());
  }
  MUSTER_RETURN_IF_ERROR(group.Make());
  if (options_.memory_bytes > 0) {
    MUSTER_RETURN_IF_ERROR(group.Write("memory.max", absl::StrCat(options_.memory_bytes)));
    // With swap, a worker at its limit would become slow instead of being killed.
    if (group.Has("memory.swap.max")) {
      MUSTER_RETURN_IF_ERROR(group.Write("memory.swap.max", "0"));
    }
  }
  // A worker without its data processes is of no use.
  if (group.Has("memory.oom.group")) MUSTER_RETURN_IF_ERROR(group.Write("memory.oom.group", "1"));
  if (options_.cpus > 0) {
    MUSTER_RETURN_IF_ERROR(
        group.Write("cpu.max", absl::StrCat(int64_t{options_.cpus} * kPeriodUs, " ", kPeriodUs)));
  }
  return group.Open();
}

std::optional<std::string> WorkerGroups::MemoryKill(int rank) const {
  const ControlGroup group = OfRank(rank);
  if (!group.Has("memory.events")) return std::nullopt;
  return DescribeMemoryKill(group.Memory());
}

void WorkerGroups::End() const {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(attempt_.folder());
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (absl::StartsWith(name, kRankPrefix)) attempt_.Below(name).Kill();
  }
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, kRankPrefix)) continue;
    const ControlGroup group = attempt_.Below(name);
    absl::Status status = group.AwaitEmpty(kPatience);
    if (status.ok()) status = group.Remove();
    if (!status.ok()) MUSTER_LOG(Warning) << status.message();
  }
}

}  // namespace muster::agent
