#include "worker/agent/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/agent/line_splitter.h"

namespace muster::agent {
namespace {

constexpr char kMarkVariable[] = "MUSTER_PROCESS_TREE=";
constexpr size_t kKeptLineBytes = 4096;
// What is read from a process that has ended: its pipes hold 64 KiB, but a child it left behind may
// go on writing.
constexpr size_t kDrainBytes = 4 << 20;

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { Close(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

absl::Status ErrnoStatus(absl::string_view what, int error) {
  const std::string text = absl::StrCat(what, ": ", strerror(error));
  switch (error) {
    case EAGAIN:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::Status MakePipe(Fd* read_end, Fd* write_end) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
  *read_end = Fd(fds[0]);
  *write_end = Fd(fds[1]);
  return absl::OkStatus();
}

// A pseudo-terminal with the size of the terminal on `like_fd`, if it is one.
absl::Status MakeTerminal(int like_fd, Fd* read_end, Fd* write_end) {
  Fd master(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  char name[64];
  if (!master.open() || grantpt(master.get()) != 0 || unlockpt(master.get()) != 0 ||
      ptsname_r(master.get(), name, sizeof(name)) != 0) {
    return ErrnoStatus("pseudo-terminal", errno);
  }
  Fd slave(open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!slave.open()) return ErrnoStatus(name, errno);
  termios mode;
  if (tcgetattr(slave.get(), &mode) == 0) {
    mode.c_oflag &= ~OPOST;
    mode.c_lflag &= ~(ECHO | ICANON | ISIG);
    tcsetattr(slave.get(), TCSANOW, &mode);
  }
  winsize size;
  if (ioctl(like_fd, TIOCGWINSZ, &size) == 0) ioctl(slave.get(), TIOCSWINSZ, &size);
  *read_end = std::move(master);
  *write_end = std::move(slave);
  return absl::OkStatus();
}

std::string RandomMark() {
  unsigned char bytes[16];
  MUSTER_CHECK(getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes));
  std::string text;
  for (const unsigned char byte : bytes) absl::StrAppendFormat(&text, "%02x", byte);
  return text;
}

// --- The guard. Forked from a process with threads, so it may only do what a signal handler may:
// no allocation. ---

struct GuardNote {
  int32_t pid;
  int32_t added;  // else removed
};
constexpr int kGuardSlots = 16384;

struct LinuxDirent {
  uint64_t ino;
  int64_t off;
  unsigned short reclen;
  unsigned char type;
  char name[1];
};

// Whether the environment that `pid` started with contains `mark`.
bool CarriesMark(int pid, const char* mark, size_t mark_size) {
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
    found = memmem(buffer, held, mark, mark_size) != nullptr;
    const size_t keep = std::min(held, mark_size - 1);
    memmove(buffer, buffer + held - keep, keep);
    held = keep;
  }
  close(fd);
  return found;
}

// Kills all processes that carry the mark; returns how many it found.
int KillMarked(const char* mark, size_t mark_size) {
  const int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return 0;
  const int self = getpid();
  int found = 0;
  alignas(LinuxDirent) static char entries[32768];
  for (;;) {
    const long size = syscall(SYS_getdents64, dir, entries, sizeof(entries));
    if (size <= 0) break;
    for (long at = 0; at < size;) {
      const auto* entry = reinterpret_cast<const LinuxDirent*>(entries + at);
      at += entry->reclen;
      int pid = 0;
      const char* c = entry->name;
      while (*c >= '0' && *c <= '9') pid = pid * 10 + (*c++ - '0');
      if (*c != '\0' || pid <= 1 || pid == self) continue;
      if (CarriesMark(pid, mark, mark_size)) {
        kill(pid, SIGKILL);
        ++found;
      }
    }
  }
  close(dir);
  return found;
}

[[noreturn]] void GuardMain(int pipe_fd, const char* mark, size_t mark_size) {
  setsid();
  prctl(PR_SET_NAME, "muster-guard");
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action = {};
    action.sa_handler = SIG_IGN;
    if (signal == SIGSEGV || signal == SIGBUS || signal == SIGABRT) action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // Holding the host's standard output open would keep its reader waiting; holding its sockets, its
  // ports taken.
  if (dup2(pipe_fd, 0) < 0) _exit(1);
  close_range(1, ~0U, 0);
  static int32_t groups[kGuardSlots];
  int used = 0;
  for (;;) {
    GuardNote note;
    const ssize_t got = read(0, &note, sizeof(note));
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof(note)) break;
    if (note.added != 0) {
      if (used < kGuardSlots) groups[used++] = note.pid;
    } else {
      for (int i = 0; i < used; ++i) {
        if (groups[i] == note.pid) {
          groups[i] = groups[--used];
          break;
        }
      }
    }
  }
  for (int i = 0; i < used; ++i) kill(-groups[i], SIGKILL);
  // Again until nothing is found: a process may fork while it is being looked for. 2 s at most, for
  // one that the kernel cannot end.
  for (int round = 0; round < 1000 && KillMarked(mark, mark_size) > 0; ++round) {
    const timespec pause = {0, 2'000'000};
    nanosleep(&pause, nullptr);
  }
  _exit(0);
}

// --- The child between fork and exec: same rule. ---

struct StartError {
  enum Stage : int32_t { kSetUp, kDirectory, kExec };
  int32_t stage;
  int32_t error;
};

struct ChildPlan {
  const char* path;
  char* const* argv;
  char* const* envp;
  const char* directory;  // null: stay
  int stdin_fd, stdout_fd, stderr_fd, error_fd;
  pid_t parent;
};

[[noreturn]] void ChildFails(int error_fd, StartError::Stage stage) {
  const StartError report = {stage, errno};
  ssize_t ignored = write(error_fd, &report, sizeof(report));
  static_cast<void>(ignored);
  _exit(127);
}

[[noreturn]] void ChildMain(const ChildPlan& plan) {
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the line above.
  if (getppid() != plan.parent) _exit(127);
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action = {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // Moved above 2 first: a source may itself be one of the targets.
  const int in = fcntl(plan.stdin_fd, F_DUPFD_CLOEXEC, 3);
  const int out = fcntl(plan.stdout_fd, F_DUPFD_CLOEXEC, 3);
  const int err = fcntl(plan.stderr_fd, F_DUPFD_CLOEXEC, 3);
  if (in < 0 || out < 0 || err < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) {
    ChildFails(plan.error_fd, StartError::kSetUp);
  }
  close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  if (plan.directory != nullptr && chdir(plan.directory) != 0) {
    ChildFails(plan.error_fd, StartError::kDirectory);
  }
  execve(plan.path, plan.argv, plan.envp);
  ChildFails(plan.error_fd, StartError::kExec);
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

absl::string_view Variable(const std::vector<std::string>& env, absl::string_view name) {
  for (const std::string& entry : env) {
    if (entry.size() > name.size() && absl::StartsWith(entry, name) && entry[name.size()] == '=') {
      return absl::string_view(entry).substr(name.size() + 1);
    }
  }
  return "";
}

absl::Status StartErrorStatus(const StartError& report, const ProcessOptions& options,
                              const std::string& path) {
  const char* why = strerror(report.error);
  switch (report.stage) {
    case StartError::kDirectory:
      return absl::NotFoundError(
          absl::StrCat("working directory ", options.working_directory, ": ", why));
    case StartError::kExec:
      if (report.error == ENOEXEC) {
        return absl::FailedPreconditionError(
            absl::StrCat(path,
                         " is not a program: it is no binary of this machine and has no #! line; "
                         "name its interpreter "
                         "before it"));
      }
      if (report.error == ENOENT) {
        return absl::NotFoundError(
            absl::StrCat(path, ": its interpreter (#! line or dynamic loader) does not exist"));
      }
      if (report.error == EACCES || report.error == EPERM) {
        return absl::PermissionDeniedError(absl::StrCat(path, ": ", why));
      }
      return ErrnoStatus(path, report.error);
    default:
      return ErrnoStatus(absl::StrCat("cannot start ", path), report.error);
  }
}

// Wakes the host's thread. Shared with the processes, which may outlive the host.
struct Waker {
  Fd fd{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  void Wake() {
    const uint64_t one = 1;
    ssize_t ignored = write(fd.get(), &one, sizeof(one));
    static_cast<void>(ignored);
  }
};

class Child final : public Process {
 public:
  struct Stream {
    OutputStream which;
    Fd fd;
    std::unique_ptr<LineSplitter> splitter;
    bool watched = false;  // in the epoll set
  };

  Child(ProcessOptions options, std::shared_ptr<Waker> waker)
      : options_(std::move(options)), waker_(std::move(waker)) {}

  pid_t pid() const override { return pid_; }

  void Signal(int signal) override {
    MutexLock lock(&mu_);
    if (!reaped_) kill(-pid_, signal);
  }

  void Stop(absl::Duration grace) override {
    {
      MutexLock lock(&mu_);
      if (reaped_) return;
      if (grace > absl::ZeroDuration()) {
        MUSTER_FAILPOINT("agent.stop_worker");
        kill(-pid_, SIGTERM);
        kill(-pid_, SIGCONT);
      }
      kill_at_ = std::min(kill_at_, Clock::Real().Now() + grace);
    }
    waker_->Wake();
  }

  ProcessExit Wait() override { return *WaitFor(absl::InfiniteDuration()); }

  std::optional<ProcessExit> WaitFor(absl::Duration timeout) override {
    if (!done_.WaitForNotificationWithTimeout(timeout)) {
      if (timeout != absl::InfiniteDuration()) return std::nullopt;
      done_.WaitForNotification();
    }
    MutexLock lock(&mu_);
    return exit_;
  }

  std::vector<std::string> LastLines() const override {
    MutexLock lock(&mu_);
    return {last_lines_.begin(), last_lines_.end()};
  }

  // --- The rest is for the host's thread only. ---

  const ProcessOptions& options() const { return options_; }

  void Attach(pid_t pid, Fd pidfd, Fd out, Fd err) {
    pid_ = pid;
    pidfd_ = std::move(pidfd);
    streams_[0].which = OutputStream::kStdout;
    streams_[0].fd = std::move(out);
    streams_[1].which = OutputStream::kStderr;
    streams_[1].fd = std::move(err);
    for (Stream& stream : streams_) {
      const OutputStream which = stream.which;
      fcntl(stream.fd.get(), F_SETFL, O_NONBLOCK);
      LineSplitter::Callback partial;
      if (options_.on_partial) {
        partial = [this, which](absl::string_view text) { options_.on_partial(which, text); };
      }
      stream.splitter = std::make_unique<LineSplitter>(
          [this, which](absl::string_view line) { OnLine(which, line); }, std::move(partial));
    }
  }

  std::array<Stream, 2>& streams() { return streams_; }
  int pidfd() const { return pidfd_.get(); }

  // One read. Returns false at the end of the stream or if nothing is there.
  bool ReadSome(Stream& stream, size_t* bytes, bool* at_end) {
    char buffer[65536];
    ssize_t got;
    do {
      MUSTER_FAILPOINT("agent.output");
      got = read(stream.fd.get(), buffer, sizeof(buffer));
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
      // EIO: every holder of the pseudo-terminal has closed it.
      *at_end = got == 0 || errno != EAGAIN;
      return false;
    }
    *at_end = false;
    *bytes = got;
    stream.splitter->Append(absl::string_view(buffer, got));
    return true;
  }

  // When to kill it, or InfiniteFuture.
  absl::Time kill_at() const {
    MutexLock lock(&mu_);
    return reaped_ ? absl::InfiniteFuture() : kill_at_;
  }
  void Kill() {
    MutexLock lock(&mu_);
    kill_at_ = absl::InfiniteFuture();
    if (!reaped_) kill(-pid_, SIGKILL);
  }

  // The process is a zombie: ends the rest of its group, takes what it wrote last, and lets go of
  // its id.
  void Reap() {
    Kill();
    for (Stream& stream : streams_) {
      bool at_end = false;
      size_t bytes = 0;
      for (size_t total = 0; stream.fd.open() && total < kDrainBytes; total += bytes) {
        if (!ReadSome(stream, &bytes, &at_end)) break;
      }
      stream.fd.Close();
      stream.splitter->Finish();
    }
    ProcessExit result;
    {
      MutexLock lock(&mu_);
      siginfo_t info = {};
      while (waitid(P_PIDFD, pidfd_.get(), &info, WEXITED) != 0 && errno == EINTR) {
      }
      reaped_ = true;
      if (info.si_code == CLD_EXITED) {
        result.exit_code = info.si_status;
      } else {
        result.signal = info.si_status;
        result.core_dumped = info.si_code == CLD_DUMPED;
      }
      exit_ = result;
    }
    pidfd_.Close();
    MUSTER_FAILPOINT("agent.reaped");
    if (options_.on_exit) options_.on_exit(result);
    done_.Notify();
  }

 private:
  void OnLine(OutputStream which, absl::string_view line) {
    if (options_.kept_lines > 0) {
      MutexLock lock(&mu_);
      if (last_lines_.size() == static_cast<size_t>(options_.kept_lines)) last_lines_.pop_front();
      last_lines_.emplace_back(line.substr(0, kKeptLineBytes));
    }
    if (options_.on_line) options_.on_line(which, line);
  }

  const ProcessOptions options_;
  const std::shared_ptr<Waker> waker_;
  pid_t pid_ = -1;  // set before the handle is given out
  Fd pidfd_;
  std::array<Stream, 2> streams_;

  Notification done_;
  mutable Mutex mu_;
  bool reaped_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time kill_at_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::optional<ProcessExit> exit_ ABSL_GUARDED_BY(mu_);
  std::deque<std::string> last_lines_ ABSL_GUARDED_BY(mu_);
};

class HostImpl final : public ProcessHost {
 public:
  HostImpl() : waker_(std::make_shared<Waker>()), mark_(RandomMark()) {}

  ~HostImpl() override {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
    }
    waker_->Wake();
    if (thread_.joinable()) thread_.join();
    guard_pipe_.Close();
    if (guard_ > 0) {
      while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
  }

  absl::Status Init() {
    epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_.open() || !waker_->fd.open()) return ErrnoStatus("event loop", errno);
    MUSTER_RETURN_IF_ERROR(StartGuard());
    Watch(waker_->fd.get(), {0, 0});
    thread_ = std::thread([this] { Loop(); });
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<Process>> Spawn(ProcessOptions options) override {
    Request request(&options);
    {
      MutexLock lock(&mu_);
      if (stopping_) return absl::FailedPreconditionError("the process host is being destroyed");
      requests_.push_back(&request);
    }
    waker_->Wake();
    request.done.WaitForNotification();
    return std::move(request.result);
  }

  void PauseOutput(bool paused) override {
    {
      MutexLock lock(&mu_);
      paused_ = paused;
    }
    waker_->Wake();
  }

  pid_t guard_pid() const override { return guard_; }
  const std::string& mark() const override { return mark_; }

 private:
  struct Request {
    explicit Request(ProcessOptions* o) : options(o) {}
    ProcessOptions* const options;
    absl::StatusOr<std::shared_ptr<Process>> result = absl::InternalError("not started");
    Notification done;
  };
  // What an epoll event is about. pid 0: the waker. channel 0, 1: the streams; 2: the pidfd.
  struct Tag {
    int32_t pid;
    int32_t channel;
  };

  void Watch(int fd, Tag tag) {
    epoll_event event = {};
    event.events = EPOLLIN;
    memcpy(&event.data, &tag, sizeof(tag));
    MUSTER_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) << strerror(errno);
  }

  absl::Status StartGuard() {
    Fd read_end;
    MUSTER_RETURN_IF_ERROR(MakePipe(&read_end, &guard_pipe_));
    guard_ = fork();
    if (guard_ < 0) return ErrnoStatus("fork", errno);
    if (guard_ == 0) GuardMain(read_end.get(), mark_.data(), mark_.size());
    return absl::OkStatus();
  }

  void TellGuard(pid_t pid, bool added) {
    const GuardNote note = {pid, added ? 1 : 0};
    // SIGPIPE is blocked on this thread: the guard may have been killed by somebody.
    if (write(guard_pipe_.get(), &note, sizeof(note)) != sizeof(note)) {
      MUSTER_LOG(Debug) << "the guard process is gone";
    }
  }

  absl::StatusOr<std::shared_ptr<Process>> Start(ProcessOptions& options) {
    if (options.argv.empty() || options.argv[0].empty()) {
      return absl::InvalidArgumentError("no program to start");
    }
    std::string program = options.argv[0];
    if (!options.working_directory.empty() && absl::StrContains(program, '/') &&
        program[0] != '/') {
      program = absl::StrCat(options.working_directory, "/", program);
    }
    MUSTER_ASSIGN_OR_RETURN(const std::string path,
                            FindProgram(program, Variable(options.env, "PATH")));

    std::vector<std::string> argv = options.argv;
    std::vector<std::string> env;
    std::string outer;
    for (const std::string& entry : options.env) {
      if (absl::StartsWith(entry, kMarkVariable)) {
        outer = entry.substr(sizeof(kMarkVariable) - 1) + "/";
      } else {
        env.push_back(entry);
      }
    }
    // A host inside a process of another host carries both marks, so that the outer one can end it
    // too.
    env.push_back(absl::StrCat(kMarkVariable, outer, mark_));
    const std::vector<char*> argv_pointers = Pointers(argv);
    const std::vector<char*> env_pointers = Pointers(env);

    Fd out_read, out_write, err_read, err_write, error_read, error_write;
    MUSTER_RETURN_IF_ERROR(options.stdout_terminal
                               ? MakeTerminal(STDOUT_FILENO, &out_read, &out_write)
                               : MakePipe(&out_read, &out_write));
    MUSTER_RETURN_IF_ERROR(options.stderr_terminal
                               ? MakeTerminal(STDERR_FILENO, &err_read, &err_write)
                               : MakePipe(&err_read, &err_write));
    MUSTER_RETURN_IF_ERROR(MakePipe(&error_read, &error_write));
    Fd null;
    int stdin_fd = options.stdin_fd;
    if (stdin_fd < 0) {
      null = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!null.open()) return ErrnoStatus("/dev/null", errno);
      stdin_fd = null.get();
    }

    const ChildPlan plan = {
        .path = path.c_str(),
        .argv = argv_pointers.data(),
        .envp = env_pointers.data(),
        .directory =
            options.working_directory.empty() ? nullptr : options.working_directory.c_str(),
        .stdin_fd = stdin_fd,
        .stdout_fd = out_write.get(),
        .stderr_fd = err_write.get(),
        .error_fd = error_write.get(),
        .parent = getpid(),
    };
    MUSTER_FAILPOINT_STATUS("agent.before_fork");
    const pid_t pid = fork();
    if (pid < 0) return ErrnoStatus("fork", errno);
    if (pid == 0) ChildMain(plan);
    MUSTER_FAILPOINT("agent.after_fork");

    error_write.Close();
    StartError report;
    ssize_t got;
    do {
      got = read(error_read.get(), &report, sizeof(report));
    } while (got < 0 && errno == EINTR);
    if (got == sizeof(report)) {
      waitpid(pid, nullptr, 0);
      return StartErrorStatus(report, options, path);
    }
    TellGuard(pid, true);
    MUSTER_FAILPOINT("agent.spawned");
    Fd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!pidfd.open()) {
      const int error = errno;
      kill(-pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      TellGuard(pid, false);
      return ErrnoStatus("pidfd_open", error);
    }
    auto child = std::make_shared<Child>(std::move(options), waker_);
    Watch(pidfd.get(), {pid, 2});
    child->Attach(pid, std::move(pidfd), std::move(out_read), std::move(err_read));
    children_[pid] = child;
    return std::shared_ptr<Process>(child);
  }

  // Brings the epoll set in line with `paused`.
  void WatchStreams(Child& child, bool paused) {
    for (int i = 0; i < 2; ++i) {
      Child::Stream& stream = child.streams()[i];
      const bool wanted = !paused && stream.fd.open();
      if (wanted == stream.watched) continue;
      if (wanted) {
        Watch(stream.fd.get(), {child.pid(), i});
      } else {
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stream.fd.get(), nullptr);
      }
      stream.watched = wanted;
    }
  }

  void OnReadable(Child& child, int channel) {
    Child::Stream& stream = child.streams()[channel];
    if (!stream.fd.open() || !stream.watched) return;
    size_t bytes = 0;
    bool at_end = false;
    child.ReadSome(stream, &bytes, &at_end);
    if (!at_end) return;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stream.fd.get(), nullptr);
    stream.watched = false;
    stream.fd.Close();
    stream.splitter->Finish();
  }

  void OnExit(pid_t pid) {
    const std::shared_ptr<Child> child = children_[pid];
    WatchStreams(*child, /*paused=*/true);
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, child->pidfd(), nullptr);
    children_.erase(pid);
    child->Reap();
    TellGuard(pid, false);
  }

  void Loop() {
    prctl(PR_SET_NAME, "process-host");
    // Signals are the business of other threads; and a write to a dead guard must not end the
    // process.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    bool stopping = false;
    while (true) {
      bool paused;
      std::vector<Request*> requests;
      {
        MutexLock lock(&mu_);
        requests.swap(requests_);
        paused = paused_;
        if (stopping_ && !stopping) {
          stopping = true;
          for (auto& [pid, child] : children_) child->Stop(absl::ZeroDuration());
        }
      }
      for (Request* request : requests) {
        request->result = stopping
                              ? absl::FailedPreconditionError("the process host is being destroyed")
                              : Start(*request->options);
        request->done.Notify();
      }
      if (stopping && children_.empty()) return;

      absl::Time next = absl::InfiniteFuture();
      const absl::Time now = Clock::Real().Now();
      for (auto& [pid, child] : children_) {
        WatchStreams(*child, paused);
        const absl::Time kill_at = child->kill_at();
        if (kill_at <= now) {
          child->Kill();
        } else {
          next = std::min(next, kill_at);
        }
      }
      const int timeout = next == absl::InfiniteFuture()
                              ? -1
                              : static_cast<int>(std::min<int64_t>(
                                    absl::ToInt64Milliseconds(next - now) + 1, 1'000'000));
      std::array<epoll_event, 64> events;
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), timeout);
      // Ends come first, in the order of the kernel's list, so that who reads them knows the cause
      // before its echo.
      std::vector<pid_t> ended;
      for (int i = 0; i < count; ++i) {
        Tag tag;
        memcpy(&tag, &events[i].data, sizeof(tag));
        if (tag.pid == 0) {
          uint64_t ignored;
          ssize_t got = read(waker_->fd.get(), &ignored, sizeof(ignored));
          static_cast<void>(got);
        } else if (tag.channel == 2) {
          ended.push_back(tag.pid);
        }
      }
      for (const pid_t pid : ended) OnExit(pid);
      for (int i = 0; i < count; ++i) {
        Tag tag;
        memcpy(&tag, &events[i].data, sizeof(tag));
        if (tag.pid == 0 || tag.channel == 2) continue;
        const auto child = children_.find(tag.pid);
        if (child != children_.end()) OnReadable(*child->second, tag.channel);
      }
    }
  }

  // Constant after Init.
  const std::shared_ptr<Waker> waker_;
  const std::string mark_;
  Fd epoll_;
  Fd guard_pipe_;
  pid_t guard_ = -1;

  // The host's thread only.
  std::map<pid_t, std::shared_ptr<Child>> children_;

  Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool paused_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Request*> requests_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

// OK, or why `path` cannot be run.
absl::Status CheckExecutable(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    if (errno == EACCES)
      return absl::PermissionDeniedError(absl::StrCat(path, ": ", strerror(errno)));
    return absl::NotFoundError(absl::StrCat("program ", path, " not found"));
  }
  if (S_ISDIR(info.st_mode)) {
    return absl::PermissionDeniedError(absl::StrCat(path, " is a directory, not a program"));
  }
  if (access(path.c_str(), X_OK) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        path, " is not executable: run chmod +x on it, or name its interpreter before it"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? absl::StrCat("SIG", name) : absl::StrCat("signal ", signal);
}

std::string ProcessExit::ToString() const {
  if (signal == 0) return absl::StrCat("exited with code ", exit_code);
  return absl::StrCat("was killed by signal ", signal, " (", SignalName(signal), ")",
                      core_dumped ? ", core dumped" : "");
}

absl::StatusOr<std::string> FindProgram(absl::string_view program, absl::string_view path) {
  if (program.empty()) return absl::NotFoundError("the program's name is empty");
  if (absl::StrContains(program, '/')) {
    MUSTER_RETURN_IF_ERROR(CheckExecutable(std::string(program)));
    return std::string(program);
  }
  absl::Status denied;
  for (const absl::string_view dir : absl::StrSplit(path, ':')) {
    const std::string candidate = absl::StrCat(dir.empty() ? "." : dir, "/", program);
    const absl::Status status = CheckExecutable(candidate);
    if (status.ok()) return candidate;
    if (absl::IsPermissionDenied(status)) denied.Update(status);
  }
  if (!denied.ok()) return denied;
  const bool here =
      CheckExecutable(absl::StrCat("./", program)).code() != absl::StatusCode::kNotFound;
  return absl::NotFoundError(
      absl::StrCat("program ", program, " not found in PATH",
                   here ? absl::StrCat("; for the file in this folder write ./", program)
                        : "; give the path to it"));
}

absl::StatusOr<std::unique_ptr<ProcessHost>> ProcessHost::Start() {
  auto host = std::make_unique<HostImpl>();
  MUSTER_RETURN_IF_ERROR(host->Init());
  return std::unique_ptr<ProcessHost>(std::move(host));
}

}  // namespace muster::agent
