#include "agent/lock_holders.h"

#include <limits.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "agent/process_state.h"
#include "base/file.h"
#include "base/log.h"
#include "base/owned_fd.h"

namespace muster::agent {
namespace {

constexpr absl::Duration kLookEvery = absl::Seconds(5);

// What a descriptor is open on; empty: none. Asks no file system, which may hang.
std::string TargetOf(const std::string& descriptor) {
  char target[PATH_MAX];
  const ssize_t size = readlink(descriptor.c_str(), target, sizeof(target));
  return size > 0 ? std::string(target, static_cast<size_t>(size)) : "";
}

bool HoldsLock(int64_t pid, const std::string& path) {
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  const absl::StatusOr<std::vector<std::string>> threads = ListDirectory(tasks);
  if (!threads.ok()) return false;
  for (const std::string& thread : *threads) {
    const std::string task = absl::StrCat(tasks, "/", thread);
    const absl::StatusOr<std::vector<std::string>> fds = ListDirectory(task + "/fd");
    // A thread that has ended has none, while the others of its process keep them.
    if (!fds.ok() || fds->empty()) continue;
    for (const std::string& fd : *fds) {
      if (TargetOf(absl::StrCat(task, "/fd/", fd)) != path) continue;
      // It may have the file open without its lock.
      const absl::StatusOr<std::string> text =
          ReadFile(absl::StrCat(task, "/fdinfo/", fd), 1 << 16);
      if (text.ok() && absl::StrContains(*text, "FLOCK")) return true;
    }
    return false;
  }
  return false;
}

// False: it may not, or the process has ended.
bool Kill(const LockHolder& holder) {
  const OwnedFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(holder.pid), 0)));
  // Its number may have become another process's before it was opened.
  return pidfd.open() && holder.started != 0 &&
         ReadProcessStat(holder.pid).started == holder.started &&
         syscall(SYS_pidfd_send_signal, pidfd.get(), SIGKILL, nullptr, 0) == 0;
}

}  // namespace

std::vector<LockHolder> FindLockHolders(int fd) {
  std::vector<LockHolder> holders;
  const std::string path = TargetOf(absl::StrCat("/proc/self/fd/", fd));
  if (path.empty()) return holders;
  for (const int64_t pid : ListProcesses()) {
    if (pid == getpid()) continue;
    // Read first: if the number becomes another process's meanwhile, Kill() notices that.
    const uint64_t started = ReadProcessStat(pid).started;
    if (HoldsLock(pid, path)) holders.push_back({pid, started});
  }
  return holders;
}

bool LockBreaker::IsBeyondKilling(int fd, absl::Time now) {
  first_look_ = std::min(first_look_, now);
  if (now < std::max(next_look_, first_look_ + patience_)) return beyond_killing_;
  next_look_ = now + std::min(kLookEvery, patience_);
  std::map<LockHolder, absl::Time> killed;
  bool all = true;
  for (const LockHolder& holder : FindLockHolders(fd)) {
    const auto before = killed_.find(holder);
    if (before == killed_.end() && !Kill(holder)) {
      all = false;
      continue;
    }
    const absl::Time at = before == killed_.end() ? now : before->second;
    killed.emplace(holder, at);
    all = all && now - at >= patience_;
  }
  // A killed process that hangs while it closes its files no longer shows descriptors.
  for (const auto& [holder, at] : killed_) {
    const ProcessState state = ReadProcessStat(holder.pid);
    if (killed.count(holder) != 0 || state.started != holder.started || state.name == "zombie") {
      continue;
    }
    killed.emplace(holder, at);
    all = all && now - at >= patience_;
  }
  killed_ = std::move(killed);
  beyond_killing_ = all && !killed_.empty();
  if (!beyond_killing_ && !warned_ && now - first_look_ >= 4 * patience_) {
    warned_ = true;
    MUSTER_LOG(Warning) << "the lock of an attempt whose runner has ended is still held, and what "
                           "holds it cannot be ended: "
                        << (killed_.empty() ? "it belongs to another user, or is not visible here"
                                            : ToString())
                        << "; the attempt is over when that process is gone";
  }
  return beyond_killing_;
}

std::string LockBreaker::ToString() const {
  std::vector<std::string> holders;
  for (const auto& [holder, at] : killed_) {
    holders.push_back(
        absl::StrCat("process ", holder.pid, ", ", ReadStuckState(holder.pid).ToString()));
  }
  return absl::StrJoin(holders, "; ");
}

}  // namespace muster::agent
