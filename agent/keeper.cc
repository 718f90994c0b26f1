#include "agent/keeper.h"

#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "agent/numbered_entries.h"
#include "agent/orphans.h"
#include "base/clock.h"
#include "base/descriptor_limit.h"

namespace muster::agent {
namespace {

constexpr int kChildErrorFd = 3;  // its number in the child
constexpr int kMaxChildren = 16384;
constexpr int kMaxStuck = 64;
// For processes that the kernel cannot end, or that were given up before.
constexpr int kEndMilliseconds = 3000;
constexpr int kStuckMilliseconds = 200;
constexpr int kLookAgainMilliseconds = 2;
constexpr int kCollectMilliseconds = 500;
constexpr int kContinueMilliseconds = 1000;
// The descriptors of a request: input, output, errors, report, strings, and the control group if
// there is one.
constexpr size_t kDescriptors = 6;
constexpr size_t kGroupDescriptor = 5;

// Signals that stay ignored in a child if this process ignores them.
constexpr std::array<int, 3> kInheritedSignals = {SIGHUP, SIGINT, SIGQUIT};

struct Request {
  enum Kind : int32_t { kFork, kCollect, kRelease };
  int32_t kind;
  int32_t pid;
  int32_t argc, envc;
  int32_t has_directory;
  int32_t has_group;
  uint32_t ignored;  // one bit for each of kInheritedSignals
  uint64_t bytes;    // of the strings: path, directory, argv, env, each with its NUL
};

struct Reply {
  int32_t pid;
  int32_t error;
  ChildEnd end;
};

// --- The child between fork and exec, and the keeper: forked from a process with threads, they may
// only do what a signal handler may. No allocation. ---

struct ChildStart {
  const char* path;
  char* const* argv;
  char* const* envp;
  const char* directory;  // null: unchanged
  const int* fds;         // input, output, errors, report
  int group_fd;           // -1: unchanged, or it is there already
  uint32_t ignored;
  pid_t parent;
  CloseRangeCall close_range;
};

[[noreturn]] void ChildFails(int error_fd, StartError::Stage stage) {
  const StartError report = {stage, errno};
  ssize_t ignored = write(error_fd, &report, sizeof(report));
  static_cast<void>(ignored);
  _exit(127);
}

bool EnterGroup(int group_fd) {
  const int processes = openat(group_fd, "cgroup.procs", O_WRONLY | O_CLOEXEC);
  return processes >= 0 && write(processes, "0", 1) == 1 && close(processes) == 0;
}

// Forks a child that is in a control group from the beginning; returns -1 and sets errno on
// failure. To move a running process, the kernel waits until every processor has scheduled: some
// ten milliseconds, for each worker.
pid_t ForkInto(int group_fd) {
  clone_args args = {};
  args.flags = CLONE_INTO_CGROUP;
  args.exit_signal = SIGCHLD;
  args.cgroup = static_cast<uint64_t>(group_fd);
  return static_cast<pid_t>(syscall(SYS_clone3, &args, sizeof(args)));
}

[[noreturn]] void ChildMain(const ChildStart& start) {
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the line above.
  if (getppid() != start.parent) _exit(127);
  // First, so that everything that the child uses counts there.
  if (start.group_fd >= 0 && !EnterGroup(start.group_fd)) {
    ChildFails(start.fds[3], StartError::kGroup);
  }
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action = {};
    action.sa_handler = SIG_DFL;
    for (size_t i = 0; i < kInheritedSignals.size(); ++i) {
      if (kInheritedSignals[i] == signal && (start.ignored & (1U << i)) != 0) {
        action.sa_handler = SIG_IGN;
      }
    }
    sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // Moved above the targets first: a source may itself be one of them.
  std::array<int, 4> moved;
  for (size_t i = 0; i < moved.size(); ++i) {
    moved[i] = fcntl(start.fds[i], F_DUPFD_CLOEXEC, kChildErrorFd + 1);
    if (moved[i] < 0) ChildFails(start.fds[3], StartError::kSetUp);
  }
  if (dup2(moved[0], 0) < 0 || dup2(moved[1], 1) < 0 || dup2(moved[2], 2) < 0 ||
      dup3(moved[3], kChildErrorFd, O_CLOEXEC) < 0) {
    ChildFails(moved[3], StartError::kSetUp);
  }
  // Close them now, not by exec, which may never get that far on a dead file server: the child
  // would hold the descriptors of a keeper that is gone.
  CloseFrom(kChildErrorFd + 1, start.close_range);
  RestoreDescriptorLimit();
  if (start.directory != nullptr && chdir(start.directory) != 0) {
    ChildFails(kChildErrorFd, StartError::kDirectory);
  }
  execve(start.path, start.argv, start.envp);
  ChildFails(kChildErrorFd, StartError::kExec);
}

// Returns the parent of `pid`; 0: unknown.
int ParentOf(const char* pid) {
  char path[32] = "/proc/";
  if (strlen(pid) > 10) return 0;
  strcpy(path + 6, pid);                    // NOLINT: it fits
  strcpy(path + 6 + strlen(pid), "/stat");  // NOLINT
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[512];
  const ssize_t size = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (size <= 0) return 0;
  text[size] = '\0';
  // "PID (NAME) STATE PARENT ...", where the name may be anything.
  char* at = strrchr(text, ')');
  if (at == nullptr || strlen(at) < 5) return 0;
  at += 4;
  char* const end = strchr(at, ' ');
  if (end == nullptr) return 0;
  *end = '\0';
  return NumberOf(at);
}

// The state of the keeper process.
struct State {
  int children[kMaxChildren];
  int used;
  int stuck[kMaxStuck];  // given up
  int stuck_used;
  pid_t self;
  int signals;  // a signalfd for SIGCHLD
  int parent_end;
  CloseRangeCall close_range;
  int (*kill)(pid_t, int);
};

bool IsKnown(const State& state, pid_t pid) {
  for (int i = 0; i < state.used; ++i) {
    if (state.children[i] == pid) return true;
  }
  return false;
}

bool IsStuck(const State& state, pid_t pid) {
  for (int i = 0; i < state.stuck_used; ++i) {
    if (state.stuck[i] == pid) return true;
  }
  return false;
}

void Forget(State* state, pid_t pid) {
  for (int i = 0; i < state->used; ++i) {
    if (state->children[i] == pid) {
      state->children[i] = state->children[--state->used];
      return;
    }
  }
}

// Collects the processes that the children have left behind. One whose end the host still has to
// ask for delays the rest until then.
void CollectStrays(const State& state) {
  for (;;) {
    siginfo_t info = {};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    if (IsKnown(state, info.si_pid)) return;
    waitpid(info.si_pid, nullptr, WNOHANG);
  }
}

// Sends SIGKILL to every child; returns how many milliseconds, in total, it is worth waiting for
// those that it may kill.
int KillChildren(const State& state) {
  const int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return 0;
  int patience = 0;
  if (IsOwnProc(dir, state.self)) {
    ForEachNumber(dir, [&](int pid, const char* name) {
      // A child's pid stays its own until it is collected here.
      if (pid <= 1 || ParentOf(name) != state.self || state.kill(pid, SIGKILL) != 0) return;
      patience = std::max(patience, IsStuck(state, pid) ? kStuckMilliseconds : kEndMilliseconds);
    });
  }
  close(dir);
  return patience;
}

void DrainSignals(const State& state) {
  signalfd_siginfo info;
  while (read(state.signals, &info, sizeof(info)) > 0) {
  }
}

int64_t MonotonicMilliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

[[noreturn]] void EndAll(const State& state) {
  for (int i = 0; i < state.used; ++i) kill(-state.children[i], SIGKILL);
  // Repeat until there are none: their children become children of this process when they end.
  const int64_t begun = MonotonicMilliseconds();
  for (;;) {
    pid_t collected;
    do {
      collected = waitpid(-1, nullptr, WNOHANG);
    } while (collected > 0);
    if (collected < 0) break;
    const int patience = KillChildren(state);
    if (MonotonicMilliseconds() - begun >= patience) break;
    // Even without an end of a child: processes that a child leaves behind become children of this
    // one without notice.
    pollfd ended = {state.signals, POLLIN, 0};
    poll(&ended, 1, kLookAgainMilliseconds);
    DrainSignals(state);
  }
  _exit(0);
}

// Returns the child's id; on failure returns -1 and sets errno.
pid_t ForkChild(const Request& request, const int* fds, State* state) {
  if (state->used == kMaxChildren) {
    errno = EAGAIN;
    return -1;
  }
  const size_t pointers_size = (request.argc + request.envc + 2) * sizeof(char*);
  void* const strings =
      mmap(nullptr, request.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fds[4], 0);
  if (strings == MAP_FAILED) return -1;
  void* const memory =
      mmap(nullptr, pointers_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    munmap(strings, request.bytes);
    return -1;
  }
  auto** const pointers = static_cast<char**>(memory);
  char* text = static_cast<char*>(strings);
  const auto next = [&text] {
    char* const word = text;
    text += strlen(text) + 1;
    return word;
  };
  const char* const path = next();
  const char* const directory = next();
  char** const argv = pointers;
  char** const envp = pointers + request.argc + 1;
  for (int i = 0; i < request.argc; ++i) argv[i] = next();
  for (int i = 0; i < request.envc; ++i) envp[i] = next();
  ChildStart start = {
      .path = path,
      .argv = argv,
      .envp = envp,
      .directory = request.has_directory != 0 ? directory : nullptr,
      .fds = fds,
      .group_fd = request.has_group != 0 ? fds[kGroupDescriptor] : -1,
      .ignored = request.ignored,
      .parent = state->self,
      .close_range = state->close_range,
  };
  pid_t pid = -1;
  if (start.group_fd >= 0) {
    pid = ForkInto(start.group_fd);
    if (pid == 0) {
      start.group_fd = -1;
      ChildMain(start);
    }
  }
  // An older kernel cannot do it, and a container may forbid it; any other error of the group is
  // reported by the child. Not fork(), whose handlers belong to the libraries of the process from
  // which this one was forked.
  if (pid < 0) {
    pid = _Fork();
    if (pid == 0) ChildMain(start);
  }
  const int error = errno;
  munmap(memory, pointers_size);
  munmap(strings, request.bytes);
  if (pid > 0) state->children[state->used++] = pid;
  errno = error;
  return pid;
}

Reply Serve(const Request& request, const int* fds, bool complete, State* state) {
  Reply reply = {};
  switch (request.kind) {
    case Request::kFork:
      if (!complete) {
        // The kernel has no descriptors left for this process.
        reply.error = EMFILE;
        break;
      }
      reply.pid = ForkChild(request, fds, state);
      if (reply.pid < 0) reply.error = errno;
      break;
    case Request::kCollect: {
      // Without blocking: a tracer may withhold the end, and this process is what remains if the
      // parent is killed meanwhile.
      siginfo_t info = {};
      const int64_t begun = MonotonicMilliseconds();
      for (;;) {
        info = {};
        if (waitid(P_PID, request.pid, &info, WEXITED | WNOHANG) != 0) {
          if (errno == EINTR) continue;
          reply.error = errno;
          break;
        }
        if (info.si_pid != 0) break;
        if (MonotonicMilliseconds() - begun >= kCollectMilliseconds) {
          reply.error = ETIMEDOUT;
          if (state->stuck_used < kMaxStuck) state->stuck[state->stuck_used++] = request.pid;
          break;
        }
        pollfd ready[3] = {{state->signals, POLLIN, 0}, {state->parent_end, POLLIN, 0}, {0, 0, 0}};
        poll(ready, 3, kLookAgainMilliseconds);
        DrainSignals(*state);
        if (ready[1].revents != 0 || (ready[2].revents & POLLHUP) != 0) EndAll(*state);
      }
      reply.end = {info.si_code, info.si_status};
      Forget(state, request.pid);
      CollectStrays(*state);
      break;
    }
    case Request::kRelease:
      Forget(state, request.pid);
      if (state->stuck_used < kMaxStuck) state->stuck[state->stuck_used++] = request.pid;
      CollectStrays(*state);
      break;
    default:
      reply.error = EINVAL;
  }
  return reply;
}

[[noreturn]] void KeeperMain(pid_t parent, int socket, int other_end, CloseRangeCall close_range,
                             int (*kill)(pid_t, int)) {
  setsid();
  prctl(PR_SET_NAME, "worker-keeper");
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  // Only SIGKILL ends the keeper.
  sigset_t all, ended;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, nullptr);
  if (dup2(socket, 0) < 0) _exit(1);
  // First of all: its own copy of that end would keep it from seeing the connection close.
  close(other_end);
  CloseFrom(1, close_range);
  static State state;
  sigemptyset(&ended);
  sigaddset(&ended, SIGCHLD);
  state.signals = signalfd(-1, &ended, SFD_CLOEXEC | SFD_NONBLOCK);
  state.self = getpid();
  state.close_range = close_range;
  state.kill = kill;
  // In addition to the connection, of which a careless fork of the parent may hold a copy. -1: poll
  // skips it.
  state.parent_end = static_cast<int>(syscall(SYS_pidfd_open, parent, 0));
  if (getppid() != parent) _exit(0);
  for (;;) {
    pollfd ready[3] = {{0, POLLIN, 0}, {state.signals, POLLIN, 0}, {state.parent_end, POLLIN, 0}};
    if (poll(ready, 3, -1) < 0) continue;
    if (ready[2].revents != 0) EndAll(state);
    if (ready[1].revents != 0) {
      DrainSignals(state);
      CollectStrays(state);
    }
    if (ready[0].revents == 0) continue;
    Request request = {};
    iovec data = {&request, sizeof(request)};
    alignas(cmsghdr) char control[CMSG_SPACE(kDescriptors * sizeof(int))];
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(0, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof(request)) EndAll(state);
    int fds[kDescriptors];
    size_t count = 0;
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      memcpy(fds, CMSG_DATA(header), count * sizeof(int));
    }
    const size_t wanted = request.has_group != 0 ? kDescriptors : kGroupDescriptor;
    const Reply reply = Serve(request, fds, count == wanted, &state);
    for (size_t i = 0; i < count; ++i) close(fds[i]);
    if (send(0, &reply, sizeof(reply), MSG_NOSIGNAL) != sizeof(reply)) EndAll(state);
  }
}

// Returns a descriptor of a file in memory that contains `text`; on failure returns -1 and sets
// errno.
int FileOf(absl::string_view text) {
  const int fd = memfd_create("muster-program", MFD_CLOEXEC);
  while (fd >= 0 && !text.empty()) {
    const ssize_t put = write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const int error = errno;
      close(fd);
      errno = error;
      return -1;
    }
    text.remove_prefix(put);
  }
  return fd;
}

void AppendWord(absl::string_view word, std::string* text) {
  text->append(word.data(), word.size());
  text->push_back('\0');
}

// Returns 0, or an errno if there is no reply; EPIPE: the keeper has ended.
int Ask(int socket, pid_t keeper, const Request& request, const int* fds, Reply* reply) {
  iovec data = {const_cast<Request*>(&request), sizeof(request)};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptors * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fds != nullptr) {
    const size_t count = request.has_group != 0 ? kDescriptors : kGroupDescriptor;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(header), fds, count * sizeof(int));
  }
  ssize_t done;
  do {
    done = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (done < 0 && errno == EINTR);
  if (done < 0) return errno == ECONNRESET ? EPIPE : errno;
  for (;;) {
    // A stopped keeper would delay the host.
    kill(keeper, SIGCONT);
    pollfd ready = {socket, POLLIN, 0};
    if (poll(&ready, 1, kContinueMilliseconds) == 1) break;
  }
  return recv(socket, reply, sizeof(*reply), 0) == sizeof(*reply) ? 0 : EPIPE;
}

}  // namespace

absl::Status ErrnoStatus(absl::string_view what, int error) {
  const std::string text = absl::StrCat(what, ": ", strerror(error));
  switch (error) {
    case EAGAIN:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case ENOSPC:  // fs.epoll.max_user_watches
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::StatusOr<std::unique_ptr<Keeper>> Keeper::Start(const std::string& mark,
                                                      CloseRangeCall close_range,
                                                      int (*kill)(pid_t, int)) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus("socketpair", errno);
  }
  const pid_t parent = getpid();
  const pid_t pid = Orphans::Get().Fork(mark);
  if (pid == 0) KeeperMain(parent, ends[1], ends[0], close_range, kill != nullptr ? kill : ::kill);
  const int error = errno;
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return ErrnoStatus("fork", error);
  }
  auto keeper = std::unique_ptr<Keeper>(new Keeper(mark, pid, ends[0]));
  if (keeper->pidfd_ < 0) return ErrnoStatus("pidfd_open", errno);
  return keeper;
}

Keeper::Keeper(std::string mark, pid_t pid, int socket)
    : mark_(std::move(mark)),
      pid_(pid),
      socket_(socket),
      pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

Keeper::~Keeper() {
  if (socket_ >= 0) close(socket_);
  kill(pid_, SIGCONT);
  pollfd ended = {pidfd_, POLLIN, 0};
  const absl::Time deadline = Clock::Real().Now() + absl::Milliseconds(2 * kEndMilliseconds);
  int ready;
  do {
    const int64_t left = absl::ToInt64Milliseconds(deadline - Clock::Real().Now());
    ready = pidfd_ < 0 ? 1 : poll(&ended, 1, static_cast<int>(std::max<int64_t>(left, 0)));
  } while (ready < 0 && errno == EINTR);
  if (ready != 1) kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  Orphans::Get().Forget(pid_);
  if (pidfd_ >= 0) close(pidfd_);
}

absl::Status Keeper::Gone() {
  if (socket_ >= 0) {
    close(std::exchange(socket_, -1));
    pollfd ended = {pidfd_, POLLIN, 0};
    while (poll(&ended, 1, -1) < 0 && errno == EINTR) {
    }
  }
  return absl::UnavailableError(
      absl::StrCat("process ", pid_, ", the parent of the workers, has ended"));
}

absl::StatusOr<pid_t> Keeper::Fork(const ChildPlan& plan) {
  Request request = {};
  request.kind = Request::kFork;
  request.argc = static_cast<int32_t>(plan.argv.size());
  request.envc = static_cast<int32_t>(plan.env.size());
  request.has_directory = plan.directory.empty() ? 0 : 1;
  request.has_group = plan.group_fd >= 0 ? 1 : 0;
  for (size_t i = 0; i < kInheritedSignals.size(); ++i) {
    struct sigaction action = {};
    if (sigaction(kInheritedSignals[i], nullptr, &action) == 0 && action.sa_handler == SIG_IGN) {
      request.ignored |= 1U << i;
    }
  }
  std::string strings;
  AppendWord(plan.path, &strings);
  AppendWord(plan.directory, &strings);
  for (const std::string& word : plan.argv) AppendWord(word, &strings);
  for (const std::string& entry : plan.env) AppendWord(entry, &strings);
  request.bytes = strings.size();
  const int file = FileOf(strings);
  if (file < 0) return ErrnoStatus("memfd_create", errno);
  const int fds[kDescriptors] = {plan.stdin_fd, plan.stdout_fd, plan.stderr_fd,
                                 plan.error_fd, file,           plan.group_fd};
  Reply reply = {};
  const int error = socket_ >= 0 ? Ask(socket_, pid_, request, fds, &reply) : EPIPE;
  close(file);
  if (error == EPIPE) return Gone();
  if (error != 0) return ErrnoStatus("cannot pass the descriptors of the process on", error);
  if (reply.error != 0) return ErrnoStatus("fork", reply.error);
  Orphans::Get().Note(mark_, reply.pid);
  return reply.pid;
}

absl::StatusOr<ChildEnd> Keeper::Collect(pid_t child) {
  Request request = {};
  request.kind = Request::kCollect;
  request.pid = child;
  Reply reply = {};
  const int error = socket_ >= 0 ? Ask(socket_, pid_, request, nullptr, &reply) : EPIPE;
  if (error == EPIPE) return Gone();
  if (error != 0) return ErrnoStatus("waitid", error);
  Orphans::Get().Forget(child);
  if (reply.error == ETIMEDOUT) return absl::DeadlineExceededError("a tracer keeps its end");
  if (reply.error != 0) return ErrnoStatus("waitid", reply.error);
  return reply.end;
}

void Keeper::Release(pid_t child) {
  Request request = {};
  request.kind = Request::kRelease;
  request.pid = child;
  Reply reply = {};
  if (socket_ < 0 || Ask(socket_, pid_, request, nullptr, &reply) == EPIPE) Gone().IgnoreError();
}

}  // namespace muster::agent
