#include "agent/worker_processes.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "agent/process_state.h"
#include "base/defaults.h"

namespace muster::agent {
namespace {

constexpr int kDeepest = 64;
constexpr size_t kMostProcesses = 1 << 16;

// Returns the id that `pid` has in its own pid namespace. 0: unknown.
int64_t OwnNumber(int64_t pid) {
  FILE* const file = fopen(absl::StrCat("/proc/", pid, "/status").c_str(), "re");
  if (file == nullptr) return 0;
  char line[512];
  int64_t number = 0;
  while (fgets(line, sizeof(line), file) != nullptr) {
    absl::string_view text = absl::StripAsciiWhitespace(line);
    if (!absl::StartsWith(text, "NSpid:")) continue;
    // The ids are listed from the outermost namespace to its own.
    text.remove_prefix(text.find_last_of("\t ") + 1);
    if (!absl::SimpleAtoi(text, &number)) number = 0;
    break;
  }
  fclose(file);
  return number;
}

// Returns the descendant of `child` that has the id `claimed` in its own pid namespace. 0: none.
int64_t FindSpeaker(int64_t child, int64_t claimed) {
  // Searches downwards: reading every process of the machine, for each worker, would delay a beat.
  std::vector<int64_t> family = {child};
  for (size_t i = 0; i < family.size() && family.size() < kMostProcesses; ++i) {
    const std::optional<std::vector<int64_t>> children = ListChildren(family[i]);
    if (!children.has_value()) {
      for (const int64_t pid : ListProcesses()) {
        if (OwnNumber(pid) == claimed && Descends(pid, child)) return pid;
      }
      return 0;
    }
    for (const int64_t pid : *children) {
      if (OwnNumber(pid) == claimed) return pid;
      family.push_back(pid);
    }
  }
  return 0;
}

// Follows the line of processes that only wait for their only child.
int64_t ProgramOf(int64_t pid) {
  for (int depth = 0; depth < kDeepest; ++depth) {
    const std::string syscall = ReadProcessState(pid).syscall;
    if (syscall != "wait4" && syscall != "waitid") break;
    const std::optional<std::vector<int64_t>> children = ListChildren(pid);
    if (!children.has_value() || children->size() != 1) break;
    pid = children->front();
  }
  return pid;
}

}  // namespace

void WorkerProcesses::Started(const std::string& worker_id, uint64_t incarnation, int rank,
                              int64_t child) {
  MutexLock lock(&mu_);
  entries_[{worker_id, incarnation}] = {.rank = rank, .child = child};
}

void WorkerProcesses::Ended(const std::string& worker_id, uint64_t incarnation) {
  MutexLock lock(&mu_);
  entries_.erase({worker_id, incarnation});
}

std::vector<WorkerProcesses::Running> WorkerProcesses::All() {
  std::vector<Running> all;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, entry] : entries_) {
      all.push_back({key.first, key.second, entry.rank, entry.child});
    }
  }
  for (Running& one : all) one.program = ProgramOf(one.program);
  return all;
}

std::string WorkerProcesses::WorkerOf(int64_t pid) {
  std::map<Key, Entry> entries;
  {
    MutexLock lock(&mu_);
    entries = entries_;
  }
  for (const auto& [key, entry] : entries) {
    if (Descends(pid, entry.child)) return key.first;
  }
  return "";
}

int64_t WorkerProcesses::Find(const std::string& job, const std::string& worker_id,
                              uint64_t incarnation, int64_t claimed) {
  // The agents of a job have their own rendezvous, and the member that joins it through this agent
  // is this agent itself.
  if (job == job_ + kAgentsSuffix) return getpid();
  if (job != job_) return 0;
  Entry entry;
  {
    MutexLock lock(&mu_);
    const auto it = entries_.find({worker_id, incarnation});
    if (it == entries_.end()) return 0;
    entry = it->second;
  }
  if (claimed <= 0 || OwnNumber(entry.child) == claimed) return entry.child;
  if (entry.claimed == claimed) {
    return entry.speaker != 0 && Descends(entry.speaker, entry.child) ? entry.speaker : entry.child;
  }
  entry.claimed = claimed;
  if (const int64_t pid = FindSpeaker(entry.child, claimed); pid != 0) entry.speaker = pid;
  MutexLock lock(&mu_);
  const auto it = entries_.find({worker_id, incarnation});
  if (it == entries_.end()) return 0;
  it->second = entry;
  return entry.speaker != 0 ? entry.speaker : entry.child;
}

}  // namespace muster::agent
