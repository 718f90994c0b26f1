#include "agent/orphans.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "agent/process_state.h"

namespace muster::agent {
namespace {

// Whether a child has ended that was not collected.
bool AnyChildEnded() {
  siginfo_t info = {};
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

bool HasChildren() {
  siginfo_t info = {};
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno != ECHILD;
}

}  // namespace

bool StartedWith(pid_t pid, const char* text, size_t size) {
  char path[32] = "/proc/";
  char digits[16];
  int n = 0;
  for (int rest = pid; rest > 0; rest /= 10) digits[n++] = static_cast<char>('0' + rest % 10);
  char* out = path + 6;
  while (n > 0) *out++ = digits[--n];
  memcpy(out, "/environ", 9);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  static char buffer[65536];
  size_t held = 0;
  bool found = false;
  while (!found) {
    const ssize_t got = read(fd, buffer + held, sizeof(buffer) - held);
    if (got <= 0) break;
    held += got;
    found = memmem(buffer, held, text, size) != nullptr;
    const size_t keep = std::min(held, size - 1);
    memmove(buffer, buffer + held - keep, keep);
    held = keep;
  }
  close(fd);
  return found;
}

Orphans& Orphans::Get() {
  static Orphans* const orphans = new Orphans;
  return *orphans;
}

void Orphans::AddHost(const std::string& mark) {
  MutexLock lock(&mu_);
  if (process_ != getpid()) {
    // A fork of a process with hosts owns none of their processes.
    process_ = getpid();
    hosts_.clear();
    children_.clear();
  }
  if (hosts_.empty()) had_children_ = HasChildren();
  hosts_[mark];
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

void Orphans::RemoveHost(const std::string& mark) {
  MutexLock lock(&mu_);
  hosts_.erase(mark);
}

pid_t Orphans::Fork(const std::string& mark) {
  // Under the lock: no thread may see the child before it is recorded.
  MutexLock lock(&mu_);
  const pid_t pid = fork();
  if (pid > 0) {
    children_.insert(pid);
    hosts_[mark].insert(pid);
  }
  return pid;
}

void Orphans::Note(const std::string& mark, pid_t child) {
  MutexLock lock(&mu_);
  children_.insert(child);
  hosts_[mark].insert(child);
}

void Orphans::Forget(pid_t child) {
  MutexLock lock(&mu_);
  children_.erase(child);
}

bool Orphans::Belongs(const std::string& mark, pid_t pid, pid_t session) const {
  for (const auto& [host, sessions] : hosts_) {
    if (sessions.count(session) != 0) return host == mark;
  }
  // Before any environment is read, because that may wait for a process that the kernel holds.
  if (hosts_.size() == 1 && !had_children_) return true;
  for (const auto& [host, sessions] : hosts_) {
    if (StartedWith(pid, host.data(), host.size())) return host == mark;
  }
  return false;
}

std::vector<pid_t> Orphans::Find(const std::string& mark, bool ended) {
  const pid_t self = getpid();
  const pid_t own_session = getsid(0);
  std::vector<pid_t> found;
  for (const int64_t pid : ListProcesses()) {
    if (children_.count(static_cast<pid_t>(pid)) != 0) continue;
    const ProcessState state = ReadProcessStat(pid);
    // If only the first thread has ended, the process continues.
    const bool has_ended = state.name == "zombie" && state.threads <= 1;
    if (state.parent != self || state.session == own_session || has_ended != ended) continue;
    if (Belongs(mark, static_cast<pid_t>(pid), static_cast<pid_t>(state.session))) {
      found.push_back(static_cast<pid_t>(pid));
    }
  }
  return found;
}

void Orphans::Collect(const std::string& mark) {
  MutexLock lock(&mu_);
  if (!AnyChildEnded()) return;
  for (const pid_t pid : Find(mark, /*ended=*/true)) waitpid(pid, nullptr, WNOHANG);
}

std::vector<pid_t> Orphans::Kill(const std::string& mark, std::set<pid_t>* foreign,
                                 int (*kill)(pid_t, int)) {
  MutexLock lock(&mu_);
  std::vector<pid_t> killed;
  for (const pid_t pid : Find(mark, /*ended=*/false)) {
    if ((kill != nullptr ? kill : ::kill)(pid, SIGKILL) != 0 && errno == EPERM) {
      foreign->insert(pid);
    } else {
      killed.push_back(pid);
    }
  }
  return killed;
}

}  // namespace muster::agent
