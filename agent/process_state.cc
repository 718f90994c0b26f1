#include "agent/process_state.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/log.h"

namespace muster::agent {
namespace {

constexpr int kDeepest = 64;

// Files of /proc have no size; these are short.
std::string ReadProc(const std::string& path) {
  std::string text(1024, '\0');
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  const ssize_t size = read(fd, text.data(), text.size());
  close(fd);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

const char* StateName(char letter) {
  switch (letter) {
    case 'R':
      return "running";
    case 'S':
    case 'I':
      return "sleeping";
    case 'D':
      return "uninterruptible";
    case 'T':
      return "stopped";
    case 't':
      return "traced";
    case 'Z':
      return "zombie";
    case 'X':
    case 'x':
      return "gone";
    default:
      return "unknown";
  }
}

// Returns the names in a folder that are numbers, in order.
std::vector<int64_t> Numbers(const std::string& folder) {
  std::vector<int64_t> numbers;
  DIR* const dir = opendir(folder.c_str());
  if (dir == nullptr) return numbers;
  while (const dirent* entry = readdir(dir)) {
    int64_t number = 0;
    if (absl::SimpleAtoi(entry->d_name, &number)) numbers.push_back(number);
  }
  closedir(dir);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Whether /proc belongs to this process's own pid namespace.
bool SeesOwnNumbers() {
  char self[32] = "";
  return readlink("/proc/self", self, sizeof(self) - 1) >= 0 && absl::StrCat(getpid()) == self;
}

ProcessState Read(const std::string& folder) {
  return ParseProcessState(ReadProc(folder + "/stat"), ReadProc(folder + "/wchan"),
                           ReadProc(folder + "/syscall"));
}

// Returns the process that traces the one with this status file; empty: none that can be seen.
std::string TracerOf(const std::string& status_path) {
  for (const absl::string_view line : absl::StrSplit(ReadProc(status_path), '\n')) {
    absl::string_view rest = line;
    int64_t tracer = 0;
    if (!absl::ConsumePrefix(&rest, "TracerPid:") ||
        !absl::SimpleAtoi(absl::StripAsciiWhitespace(rest), &tracer) || tracer == 0) {
      continue;
    }
    return absl::StrCat("process ", tracer, " (", ReadProcessStat(tracer).command, ")");
  }
  return "";
}

}  // namespace

std::string SyscallName(int64_t number) {
  switch (number) {
#define MUSTER_SYSCALL(name) \
  case SYS_##name:           \
    return #name
    MUSTER_SYSCALL(read);
    MUSTER_SYSCALL(write);
    MUSTER_SYSCALL(pread64);
    MUSTER_SYSCALL(pwrite64);
    MUSTER_SYSCALL(readv);
    MUSTER_SYSCALL(writev);
    MUSTER_SYSCALL(openat);
    MUSTER_SYSCALL(close);
    MUSTER_SYSCALL(fsync);
    MUSTER_SYSCALL(fdatasync);
    MUSTER_SYSCALL(ftruncate);
    MUSTER_SYSCALL(ioctl);
    MUSTER_SYSCALL(flock);
    MUSTER_SYSCALL(fcntl);
    MUSTER_SYSCALL(poll);
    MUSTER_SYSCALL(ppoll);
    MUSTER_SYSCALL(select);
    MUSTER_SYSCALL(pselect6);
    MUSTER_SYSCALL(epoll_wait);
    MUSTER_SYSCALL(epoll_pwait);
    MUSTER_SYSCALL(connect);
    MUSTER_SYSCALL(accept);
    MUSTER_SYSCALL(accept4);
    MUSTER_SYSCALL(sendto);
    MUSTER_SYSCALL(recvfrom);
    MUSTER_SYSCALL(sendmsg);
    MUSTER_SYSCALL(recvmsg);
    MUSTER_SYSCALL(futex);
    MUSTER_SYSCALL(nanosleep);
    MUSTER_SYSCALL(clock_nanosleep);
    MUSTER_SYSCALL(pause);
    MUSTER_SYSCALL(rt_sigtimedwait);
    MUSTER_SYSCALL(rt_sigsuspend);
    MUSTER_SYSCALL(newfstatat);
    MUSTER_SYSCALL(getdents64);
    MUSTER_SYSCALL(unlink);
    MUSTER_SYSCALL(rename);
    MUSTER_SYSCALL(mkdir);
    MUSTER_SYSCALL(execve);
    MUSTER_SYSCALL(clone);
    MUSTER_SYSCALL(vfork);
    MUSTER_SYSCALL(exit_group);
    MUSTER_SYSCALL(wait4);
    MUSTER_SYSCALL(waitid);
    MUSTER_SYSCALL(mmap);
    MUSTER_SYSCALL(munmap);
    MUSTER_SYSCALL(madvise);
    MUSTER_SYSCALL(mprotect);
    MUSTER_SYSCALL(sched_yield);
    MUSTER_SYSCALL(io_uring_enter);
#undef MUSTER_SYSCALL
    default:
      return absl::StrCat("system call ", number);
  }
}

std::string ProcessState::ToString() const {
  return absl::StrCat(name, held_by.empty() ? "" : " by ", held_by, syscall.empty() ? "" : " in ",
                      syscall, wchan.empty() ? "" : " (", wchan, wchan.empty() ? "" : ")");
}

ProcessState ParseProcessState(const std::string& stat, const std::string& wchan,
                               const std::string& syscall) {
  ProcessState state;
  // "PID (COMMAND) STATE ...": the command may hold anything, also ')'.
  const size_t open = stat.find('('), close = stat.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return state;
  const std::vector<std::string> fields = absl::StrSplit(stat.substr(close + 1), ' ');
  if (fields.size() < 2 || fields[1].empty()) return state;
  state.name = StateName(fields[1][0]);
  // It may have any bytes, and the kernel cuts it at the 15th.
  state.command = OneLine(absl::string_view(stat).substr(open + 1, close - open - 1));
  // Field 20 of stat; `fields` begins before field 3.
  if (fields.size() > 18 && !absl::SimpleAtoi(fields[18], &state.threads)) state.threads = 0;
  // Fields 4 and 6.
  if (fields.size() > 2 && !absl::SimpleAtoi(fields[2], &state.parent)) state.parent = 0;
  if (fields.size() > 4 && !absl::SimpleAtoi(fields[4], &state.session)) state.session = 0;
  // Field 22.
  if (fields.size() > 20 &&
      !absl::SimpleAtoi(absl::StripAsciiWhitespace(fields[20]), &state.started)) {
    state.started = 0;
  }
  // Field 52.
  if (state.name == "zombie" && fields.size() > 50 &&
      !absl::SimpleAtoi(absl::StripAsciiWhitespace(fields[50]), &state.wait_status)) {
    state.wait_status = -1;
  }
  if (wchan != "0") state.wchan = wchan;
  // "NUMBER ARGUMENTS...", "-1 ..." outside of any, or "running".
  int64_t number = -1;
  if (absl::SimpleAtoi(syscall.substr(0, syscall.find(' ')), &number) && number >= 0) {
    state.syscall = SyscallName(number);
  }
  return state;
}

ProcessState ReadProcessState(int64_t pid) { return Read(absl::StrCat("/proc/", pid)); }

ProcessState ReadProcessStat(int64_t pid) {
  return ParseProcessState(ReadProc(absl::StrCat("/proc/", pid, "/stat")), "", "");
}

ProcessState ReadThreadState(int64_t pid, int64_t tid) {
  ProcessState state = Read(absl::StrCat("/proc/", pid, "/task/", tid));
  state.threads = 0;
  return state;
}

ProcessState ReadStuckState(int64_t pid) {
  ProcessState stuck = ReadProcessState(pid);
  for (const int64_t tid : Numbers(absl::StrCat("/proc/", pid, "/task"))) {
    ProcessState state = ReadThreadState(pid, tid);
    if (state.name == "uninterruptible") return state;
    if (state.name != "traced") continue;
    state.held_by = TracerOf(absl::StrCat("/proc/", pid, "/task/", tid, "/status"));
    stuck = std::move(state);
  }
  return stuck;
}

HeldEnd ReadHeldEnd(int64_t pid) {
  const std::string folder = absl::StrCat("/proc/", pid);
  HeldEnd end;
  end.tracer = TracerOf(folder + "/status");
  struct stat owner;
  const ProcessState state = ReadProcessStat(pid);
  if (state.wait_status >= 0 && stat(folder.c_str(), &owner) == 0 &&
      (geteuid() == 0 || owner.st_uid == geteuid())) {
    end.wait_status = state.wait_status;
  }
  return end;
}

std::vector<int64_t> ListProcesses() {
  if (!SeesOwnNumbers()) return {};
  return Numbers("/proc");
}

bool Descends(int64_t pid, int64_t ancestor) {
  for (int depth = 0; depth < kDeepest && pid > 1; ++depth) {
    if (pid == ancestor) return true;
    pid = ReadProcessStat(pid).parent;
  }
  return false;
}

std::optional<std::vector<int64_t>> ListChildren(int64_t pid) {
  std::vector<int64_t> children;
  if (!SeesOwnNumbers()) return children;
  const auto file_of = [](int64_t process, int64_t thread) {
    return absl::StrCat("/proc/", process, "/task/", thread, "/children");
  };
  // Checked for a thread that certainly exists: that of `pid` may have ended.
  if (access(file_of(getpid(), getpid()).c_str(), R_OK) != 0) return std::nullopt;
  for (const int64_t tid : Numbers(absl::StrCat("/proc/", pid, "/task"))) {
    std::ifstream file(file_of(pid, tid));
    for (int64_t child; file >> child;) children.push_back(child);
  }
  return children;
}

}  // namespace muster::agent
