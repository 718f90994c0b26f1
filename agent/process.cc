#include "agent/process.h"

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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "agent/keeper.h"
#include "agent/line_splitter.h"
#include "agent/numbered_entries.h"
#include "agent/orphans.h"
#include "agent/process_state.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster::agent {
namespace {

constexpr char kMarkVariable[] = "MUSTER_PROCESS_TREE=";
// Between collections of orphans that have ended, while processes run.
constexpr absl::Duration kCollectPeriod = absl::Seconds(10);
// The longest time for which the destructor of the host waits for orphans that the kernel does not
// end.
constexpr absl::Duration kOrphansTimeout = absl::Seconds(5);
constexpr absl::Duration kGuardPeriod = absl::Seconds(1);  // the least time between two guards
constexpr absl::Duration kWatchAgain = absl::Milliseconds(100);
constexpr size_t kKeptLineBytes = 4096;
// The most that is read from an ended process: its pipes hold 64 KiB, but a child that it left
// behind may keep writing.
constexpr size_t kDrainBytes = 4 << 20;

// Blocks until it can be read or all writers have closed it. Returns false after `timeout`.
bool BecomesReadable(int fd, absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  for (;;) {
    const absl::Duration left = std::clamp(deadline - Clock::Real().Now(), absl::ZeroDuration(),
                                           absl::Duration(absl::Hours(24)));
    pollfd event = {fd, POLLIN, 0};
    const int ready = poll(&event, 1, static_cast<int>(absl::ToInt64Milliseconds(left)));
    if (ready > 0) return true;
    if (ready == 0 && left <= absl::Milliseconds(1)) return false;
  }
}

absl::Status MakePipe(OwnedFd* read_end, OwnedFd* write_end) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
  *read_end = OwnedFd(fds[0]);
  *write_end = OwnedFd(fds[1]);
  return absl::OkStatus();
}

// A pseudo-terminal with the size of the terminal on `like_fd`, if it is one.
absl::Status MakeTerminal(int like_fd, OwnedFd* read_end, OwnedFd* write_end) {
  OwnedFd master(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  char name[64];
  if (!master.open() || grantpt(master.get()) != 0 || unlockpt(master.get()) != 0 ||
      ptsname_r(master.get(), name, sizeof(name)) != 0) {
    return ErrnoStatus("pseudo-terminal", errno);
  }
  OwnedFd slave(open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
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

// --- The guard. Forked from a process with threads, so it may only do what a signal handler may:
// no allocation. ---

struct GuardNote {
  enum Kind : int32_t { kRemoved, kAdded, kKeeper };
  int32_t pid;
  int32_t kind;
};
constexpr int kGuardSlots = 16384;
constexpr time_t kGuardSeconds = 3;

// Kills all processes that carry the mark; returns how many it found.
int KillMarked(const char* mark, size_t mark_size) {
  const int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return 0;
  const int self = getpid();
  int found = 0;
  if (IsOwnProc(dir, self)) {
    ForEachNumber(dir, [&](int pid, const char* /*name*/) {
      if (pid <= 1 || pid == self || !StartedWith(pid, mark, mark_size)) return;
      // Checked again through a descriptor: the pid may belong to another process by now.
      const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
      if (pidfd < 0) return;
      if (StartedWith(pid, mark, mark_size)) {
        syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0);
        ++found;
      }
      close(pidfd);
    });
  }
  close(dir);
  return found;
}

[[noreturn]] void GuardMain(int pipe_fd, int write_end, const char* mark, size_t mark_size,
                            CloseRangeCall close_range) {
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
  // First of all: its own copy of that end would keep it from seeing the pipe close.
  close(write_end);
  CloseFrom(1, close_range);
  static int32_t groups[kGuardSlots];
  int used = 0;
  pid_t keeper = 0;
  for (;;) {
    GuardNote note;
    const ssize_t got = read(0, &note, sizeof(note));
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof(note)) break;
    if (note.kind == GuardNote::kKeeper) {
      keeper = note.pid;
    } else if (note.kind == GuardNote::kAdded) {
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
  // A stopped keeper would not see that this is the end.
  if (keeper > 0) kill(keeper, SIGCONT);
  for (int i = 0; i < used; ++i) kill(-groups[i], SIGKILL);
  // Repeat until nothing is found, because a process may fork while it is being looked for. Only
  // for a few seconds, because of processes that the kernel cannot end.
  timespec begun, now;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  do {
    if (KillMarked(mark, mark_size) == 0) break;
    const timespec pause = {0, 2'000'000};
    nanosleep(&pause, nullptr);
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while (now.tv_sec - begun.tv_sec < kGuardSeconds);
  _exit(0);
}

ChildEnd EndOf(int wait_status) {
  if (WIFEXITED(wait_status)) return {CLD_EXITED, WEXITSTATUS(wait_status)};
  return {WCOREDUMP(wait_status) ? CLD_DUMPED : CLD_KILLED, WTERMSIG(wait_status)};
}

absl::string_view Variable(const std::vector<std::string>& env, absl::string_view name) {
  for (const std::string& entry : env) {
    if (entry.size() > name.size() && absl::StartsWith(entry, name) && entry[name.size()] == '=') {
      return absl::string_view(entry).substr(name.size() + 1);
    }
  }
  return "";
}

// The interpreter of a script with that name; empty: none is known.
absl::string_view InterpreterOf(absl::string_view path) {
  if (absl::EndsWith(path, ".py")) return "python3";
  if (absl::EndsWith(path, ".sh")) return "bash";
  return "";
}

// A command that runs a file that cannot run itself, for messages.
std::string WithInterpreter(absl::string_view path) {
  const absl::string_view interpreter = InterpreterOf(path);
  return interpreter.empty() ? "put its interpreter before it"
                             : absl::StrCat("write ", interpreter, " ", path);
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
                         " is not a program: it is not a binary for this machine and has no #! "
                         "line; ",
                         WithInterpreter(path)));
      }
      if (report.error == ENOENT) {
        return absl::NotFoundError(
            absl::StrCat(path, ": its interpreter (#! line or dynamic loader) does not exist"));
      }
      if (report.error == EACCES || report.error == EPERM) {
        return absl::PermissionDeniedError(absl::StrCat(path, ": ", why));
      }
      return ErrnoStatus(path, report.error);
    case StartError::kGroup:
      return absl::InternalError(
          absl::StrCat("cannot start ", path, " in its control group: ", why));
    default:
      return ErrnoStatus(absl::StrCat("cannot start ", path), report.error);
  }
}

// Wakes the host's thread. Shared with the processes, which may outlive the host.
struct Waker {
  OwnedFd fd{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
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
    OwnedFd fd;
    std::unique_ptr<LineSplitter> splitter;
    bool watched = false;  // in the epoll set
  };

  Child(ProcessOptions options, std::shared_ptr<Waker> waker, const ProcessHostOptions& host)
      : options_(std::move(options)),
        waker_(std::move(waker)),
        deaf_after_(host.deaf_after),
        give_up_after_(host.give_up_after),
        kill_(host.kill != nullptr ? host.kill : ::kill) {}

  pid_t pid() const override { return pid_; }

  void Signal(int signal) override {
    MutexLock lock(&mu_);
    if (!reaped_) kill_(-pid_, signal);
  }

  void Stop(absl::Duration grace) override {
    {
      MutexLock lock(&mu_);
      if (reaped_) return;
      if (grace > absl::ZeroDuration()) {
        MUSTER_FAILPOINT("agent.stop_worker");
        kill_(-pid_, SIGTERM);
        kill_(-pid_, SIGCONT);
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

  // --- Used only by the host's thread. ---

  const ProcessOptions& options() const { return options_; }

  void Attach(pid_t pid, OwnedFd pidfd, OwnedFd out, OwnedFd err) {
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

  // Reads once. Returns false at the end of the stream or if no data are available.
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

  // Does the work that is due at `now`; returns when to call again, and whether to give up the
  // process.
  absl::Time Tick(absl::Time now, bool* give_up) {
    bool deaf = false;
    absl::Time next;
    {
      MutexLock lock(&mu_);
      if (reaped_) return absl::InfiniteFuture();
      if (kill_at_ <= now) SendKill(now);
      *give_up = killed_at_ + give_up_after_ <= now;
      deaf = !told_deaf_ && killed_at_ + deaf_after_ <= now;
      told_deaf_ |= deaf;
      next = std::min(kill_at_, killed_at_ + (told_deaf_ ? give_up_after_
                                                         : std::min(deaf_after_, give_up_after_)));
    }
    if (deaf && options_.on_deaf) options_.on_deaf(ReadStuckState(pid_).ToString());
    return next;
  }

  // The process is a zombie: kills the rest of its group, takes its last output, and releases its
  // id.
  void Reap(Keeper* keeper) {
    ProcessExit result;
    result.at = Clock::Real().WallNow();
    {
      MutexLock lock(&mu_);
      SendKill(Clock::Real().Now());
    }
    Drain();
    {
      MutexLock lock(&mu_);
      // Tell this process first: while it traces the child for its stacks, the kernel reports the
      // end to the tracer before it reports it to the keeper.
      siginfo_t info = {};
      waitid(P_PIDFD, pidfd_.get(), &info, WEXITED | WNOHANG);
      absl::StatusOr<ChildEnd> end = keeper != nullptr
                                         ? keeper->Collect(pid_)
                                         : absl::StatusOr<ChildEnd>(absl::UnavailableError(""));
      if (absl::IsUnavailable(end.status()) && info.si_pid == 0) {
        waitid(P_PIDFD, pidfd_.get(), &info, WEXITED | WNOHANG);
      }
      if (!end.ok() && info.si_pid != 0) end = ChildEnd{info.si_code, info.si_status};
      if (!end.ok()) {
        const HeldEnd held = ReadHeldEnd(pid_);
        if (held.wait_status.has_value()) end = EndOf(*held.wait_status);
        if (!held.tracer.empty()) {
          MUSTER_LOG(Warning) << "process " << pid_ << " has ended, but " << held.tracer
                              << " traces it and keeps its entry; the job continues without it";
        }
      }
      if (!end.ok()) {
        // Other code has collected the child. That must not count as a success.
        result.exit_code = 255;
      } else if (end->code == CLD_EXITED) {
        result.exit_code = end->status;
      } else {
        result.signal = end->status;
        result.core_dumped = end->code == CLD_DUMPED;
      }
      reaped_ = true;
      exit_ = result;
    }
    MUSTER_FAILPOINT("agent.reaped");
    End(result);
  }

  // The kernel does not end the process: it is left behind.
  void GiveUp() {
    ProcessExit result;
    result.at = Clock::Real().WallNow();
    result.stuck = ReadStuckState(pid_).ToString();
    Drain();
    {
      MutexLock lock(&mu_);
      reaped_ = true;
      exit_ = result;
    }
    End(result);
  }

 private:
  void SendKill(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    kill_at_ = absl::InfiniteFuture();
    killed_at_ = std::min(killed_at_, now);
    if (!reaped_) kill_(-pid_, SIGKILL);
  }

  void Drain() {
    for (Stream& stream : streams_) {
      bool at_end = false;
      size_t bytes = 0;
      for (size_t total = 0; stream.fd.open() && total < kDrainBytes; total += bytes) {
        if (!ReadSome(stream, &bytes, &at_end)) break;
      }
      stream.fd.Close();
      stream.splitter->Finish();
    }
  }

  void End(const ProcessExit& result) {
    pidfd_.Close();
    if (options_.on_exit) options_.on_exit(result);
    done_.Notify();
  }

  void OnLine(OutputStream which, absl::string_view line) {
    if (options_.kept_lines > 0) {
      MutexLock lock(&mu_);
      if (last_lines_.size() == static_cast<size_t>(options_.kept_lines)) last_lines_.pop_front();
      last_lines_.emplace_back(Utf8Prefix(line, kKeptLineBytes));
    }
    if (options_.on_line) options_.on_line(which, line);
  }

  const ProcessOptions options_;
  const std::shared_ptr<Waker> waker_;
  const absl::Duration deaf_after_;
  const absl::Duration give_up_after_;
  int (*const kill_)(pid_t, int);
  pid_t pid_ = -1;  // set before the handle is returned
  OwnedFd pidfd_;
  std::array<Stream, 2> streams_;

  Notification done_;
  mutable Mutex mu_;
  bool reaped_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time kill_at_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  absl::Time killed_at_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // time of the first SIGKILL
  bool told_deaf_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<ProcessExit> exit_ ABSL_GUARDED_BY(mu_);
  std::deque<std::string> last_lines_ ABSL_GUARDED_BY(mu_);
};

class HostImpl final : public ProcessHost {
 public:
  explicit HostImpl(ProcessHostOptions options)
      : options_(std::move(options)),
        epoll_ctl_(options_.epoll_ctl != nullptr ? options_.epoll_ctl : ::epoll_ctl),
        waker_(std::make_shared<Waker>()),
        mark_(absl::StrCat(RandomHex(), RandomHex())) {
    Orphans::Get().AddHost(mark_);
  }

  ~HostImpl() override {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
    }
    waker_->Wake();
    if (thread_.joinable()) thread_.join();
    // Kills everything that is below the keeper, or was left to this process.
    keeper_ = nullptr;
    EndOrphans();
    EndGuard();
    // Collects the processes that the guard has killed.
    Orphans::Get().Collect(mark_);
    Orphans::Get().RemoveHost(mark_);
  }

  absl::Status Init() {
    epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_.open() || !waker_->fd.open()) return ErrnoStatus("event loop", errno);
    MUSTER_RETURN_IF_ERROR(Watch(waker_->fd.get(), {0, 0}));
    MUSTER_RETURN_IF_ERROR(EnsureKeeper());
    MUSTER_RETURN_IF_ERROR(StartGuard());
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
  // The subject of an epoll event. pid 0: the waker; -1: the guard; -2: the keeper. channel 0, 1:
  // the streams; 2: the pidfd.
  struct Tag {
    int32_t pid;
    int32_t channel;
  };

  absl::Status Watch(int fd, Tag tag) {
    epoll_event event = {};
    event.events = EPOLLIN;
    memcpy(&event.data, &tag, sizeof(tag));
    if (epoll_ctl_(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
    return ErrnoStatus("epoll_ctl", errno);
  }
  void Unwatch(int fd) { epoll_ctl_(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

  absl::Status EnsureKeeper() {
    if (keeper_ != nullptr) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(keeper_, Keeper::Start(mark_, options_.close_range, options_.kill));
    const absl::Status watched = Watch(keeper_->pidfd(), {-2, 2});
    if (!watched.ok()) {
      keeper_ = nullptr;
    } else if (guard_ > 0) {
      TellGuard(keeper_->pid(), GuardNote::kKeeper);
    }
    return watched;
  }

  // The keeper was killed, and its processes with it. The next process starts another keeper.
  void OnKeeperEnded() {
    if (keeper_ == nullptr) return;
    MUSTER_LOG(Warning) << "process " << keeper_->pid()
                        << ", the parent of the workers, was killed: the workers end with it";
    Unwatch(keeper_->pidfd());
    keeper_ = nullptr;
    TellGuard(0, GuardNote::kKeeper);
  }

  absl::Status StartGuard() {
    OwnedFd read_end, write_end;
    MUSTER_RETURN_IF_ERROR(MakePipe(&read_end, &write_end));
    const pid_t pid = Orphans::Get().Fork(mark_);
    if (pid < 0) return ErrnoStatus("fork", errno);
    if (pid == 0) {
      GuardMain(read_end.get(), write_end.get(), mark_.data(), mark_.size(), options_.close_range);
    }
    guard_ = pid;
    guard_pipe_ = std::move(write_end);
    guard_started_ = Clock::Real().Now();
    if (keeper_ != nullptr) TellGuard(keeper_->pid(), GuardNote::kKeeper);
    for (const auto& [child, handle] : children_) TellGuard(child, GuardNote::kAdded);
    guard_pidfd_ = OwnedFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!guard_pidfd_.open()) return absl::OkStatus();  // its end goes unnoticed
    return Watch(guard_pidfd_.get(), {-1, 2});
  }

  void EndGuard() {
    guard_pipe_.Close();
    if (guard_ < 0) return;
    // If the guard reads a process that the kernel holds, the kernel may hold the guard, too.
    const absl::Duration patience = absl::Seconds(2 * kGuardSeconds);
    if (guard_pidfd_.open() && !BecomesReadable(guard_pidfd_.get(), patience)) {
      MUSTER_LOG(Warning) << "the guard process " << guard_
                          << " does not end: " << ReadStuckState(guard_).ToString()
                          << "; it is left behind";
      kill(guard_, SIGKILL);
      return;
    }
    while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
    }
    Orphans::Get().Forget(guard_);
  }

  // A user has killed the guard, or the kernel has when it was out of memory.
  void OnGuardEnded() {
    siginfo_t info = {};
    waitid(P_PID, guard_, &info, WEXITED | WNOHANG);
    Unwatch(guard_pidfd_.get());
    guard_pidfd_.Close();
    guard_pipe_.Close();
    Orphans::Get().Forget(guard_);
    MUSTER_LOG(Warning)
        << "the guard process " << guard_
        << (info.si_code == CLD_EXITED
                ? absl::StrCat(" ended with code ", info.si_status)
                : absl::StrCat(" was killed by ", SignalName(info.si_status)))
        << ": starting another one; without it, processes of the job may survive the launcher";
    guard_ = -1;
    guard_due_ = std::max(Clock::Real().Now(), guard_started_ + kGuardPeriod);
  }

  void StartGuardIfDue(absl::Time now) {
    if (guard_due_ > now) return;
    guard_due_ = absl::InfiniteFuture();
    const absl::Status status = StartGuard();
    if (guard_ < 0) {
      MUSTER_LOG(Warning) << "cannot start a guard process, retrying: " << status.message();
      guard_due_ = now + kGuardPeriod;
    } else if (options_.on_new_guard) {
      options_.on_new_guard(guard_);
    }
  }

  // Leaves a process that does not end to the keeper, which collects it once it ends. The guard
  // tracks it until then and no longer, because its pid may belong to another process afterwards.
  void Abandon(pid_t pid) {
    OwnedFd ended(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (ended.open()) {
      abandoned_.push_back({pid, std::move(ended)});
    } else {
      TellGuard(pid, GuardNote::kRemoved);
    }
    if (keeper_ != nullptr) keeper_->Release(pid);
  }

  void ForgetAbandoned() {
    std::erase_if(abandoned_, [this](const Abandoned& process) {
      if (!BecomesReadable(process.ended.get(), absl::ZeroDuration())) return false;
      TellGuard(process.pid, GuardNote::kRemoved);
      Orphans::Get().Forget(process.pid);
      return true;
    });
  }

  void TellGuard(pid_t pid, GuardNote::Kind kind) {
    const GuardNote note = {pid, kind};
    // SIGPIPE is blocked on this thread, because the guard may have been killed.
    if (write(guard_pipe_.get(), &note, sizeof(note)) != sizeof(note)) {
      MUSTER_LOG(Debug) << "the guard process no longer exists";  // its pidfd reports it, too
    }
  }

  static absl::Status CheckOptions(const ProcessOptions& options) {
    if (options.argv.empty() || options.argv[0].empty()) {
      return absl::InvalidArgumentError("no program to start");
    }
    const auto has_nul = [](const std::string& text) {
      return text.find('\0') != std::string::npos;
    };
    if (std::any_of(options.argv.begin(), options.argv.end(), has_nul) ||
        std::any_of(options.env.begin(), options.env.end(), has_nul) ||
        has_nul(options.working_directory)) {
      return absl::InvalidArgumentError(
          absl::StrCat("an argument, variable or folder of ", absl::CHexEscape(options.argv[0]),
                       " contains a NUL byte, which no program can be given"));
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<std::string> PathOfProgram(const ProcessOptions& options) {
    std::string program = options.argv[0];
    if (!options.working_directory.empty() && absl::StrContains(program, '/') &&
        program[0] != '/') {
      program = absl::StrCat(options.working_directory, "/", program);
    }
    return FindProgram(program, Variable(options.env, "PATH"));
  }

  // Returns the environment of a child, with the mark by which its orphans are found.
  std::vector<std::string> MarkedEnvironment(const ProcessOptions& options) const {
    std::vector<std::string> env;
    std::string outer;
    for (const std::string& entry : options.env) {
      if (absl::StartsWith(entry, kMarkVariable)) {
        outer = entry.substr(sizeof(kMarkVariable) - 1) + "/";
      } else {
        env.push_back(entry);
      }
    }
    // A host inside a process of another host carries both marks, so that the outer one can end it,
    // too.
    env.push_back(absl::StrCat(kMarkVariable, outer, mark_));
    return env;
  }

  absl::StatusOr<pid_t> Fork(const ChildPlan& plan) {
    MUSTER_FAILPOINT_STATUS("agent.before_fork");
    MUSTER_RETURN_IF_ERROR(EnsureKeeper());
    absl::StatusOr<pid_t> forked = keeper_->Fork(plan);
    if (absl::IsUnavailable(forked.status())) {
      // It was killed since the last check.
      OnKeeperEnded();
      MUSTER_RETURN_IF_ERROR(EnsureKeeper());
      forked = keeper_->Fork(plan);
    }
    MUSTER_RETURN_IF_ERROR(forked.status());
    MUSTER_FAILPOINT("agent.after_fork");
    return forked;
  }

  // Waits until child `pid` runs its program, or has reported in the pipe `errors` why it cannot.
  absl::Status AwaitExec(pid_t pid, int errors, const ProcessOptions& options,
                         const std::string& path) {
    if (!BecomesReadable(errors, options_.start_timeout)) {
      const std::string state = ReadStuckState(pid).ToString();
      kill(pid, SIGKILL);
      TellGuard(pid, GuardNote::kAdded);
      Abandon(pid);
      return absl::FailedPreconditionError(absl::StrCat(
          path, " does not start: process ", pid, " is ", state, " for more than ",
          absl::FormatDuration(options_.start_timeout), "; look at the file server that holds it"));
    }
    StartError report;
    ssize_t got;
    do {
      got = read(errors, &report, sizeof(report));
    } while (got < 0 && errno == EINTR);
    if (got != sizeof(report)) return absl::OkStatus();
    keeper_->Collect(pid).IgnoreError();
    return StartErrorStatus(report, options, path);
  }

  absl::StatusOr<std::shared_ptr<Process>> Start(ProcessOptions& options) {
    MUSTER_RETURN_IF_ERROR(CheckOptions(options));
    MUSTER_ASSIGN_OR_RETURN(const std::string path, PathOfProgram(options));
    OwnedFd out_read, out_write, err_read, err_write, error_read, error_write;
    MUSTER_RETURN_IF_ERROR(options.stdout_terminal
                               ? MakeTerminal(STDOUT_FILENO, &out_read, &out_write)
                               : MakePipe(&out_read, &out_write));
    MUSTER_RETURN_IF_ERROR(options.stderr_terminal
                               ? MakeTerminal(STDERR_FILENO, &err_read, &err_write)
                               : MakePipe(&err_read, &err_write));
    MUSTER_RETURN_IF_ERROR(MakePipe(&error_read, &error_write));
    OwnedFd null;
    int stdin_fd = options.stdin_fd;
    if (stdin_fd < 0) {
      null = OwnedFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!null.open()) return ErrnoStatus("/dev/null", errno);
      stdin_fd = null.get();
    }

    const ChildPlan plan = {
        .path = path,
        .argv = options.argv,
        .env = MarkedEnvironment(options),
        .directory = options.working_directory,
        .stdin_fd = stdin_fd,
        .stdout_fd = out_write.get(),
        .stderr_fd = err_write.get(),
        .error_fd = error_write.get(),
        .group_fd = options.group_fd,
    };
    MUSTER_ASSIGN_OR_RETURN(const pid_t pid, Fork(plan));
    error_write.Close();
    MUSTER_RETURN_IF_ERROR(AwaitExec(pid, error_read.get(), options, path));
    TellGuard(pid, GuardNote::kAdded);
    MUSTER_FAILPOINT("agent.spawned");
    OwnedFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    const absl::Status watched =
        pidfd.open() ? Watch(pidfd.get(), {pid, 2}) : ErrnoStatus("pidfd_open", errno);
    if (!watched.ok()) {
      kill(-pid, SIGKILL);
      keeper_->Collect(pid).IgnoreError();
      TellGuard(pid, GuardNote::kRemoved);
      return watched;
    }
    auto child = std::make_shared<Child>(std::move(options), waker_, options_);
    child->Attach(pid, std::move(pidfd), std::move(out_read), std::move(err_read));
    children_[pid] = child;
    return std::shared_ptr<Process>(child);
  }

  // Makes the epoll set match `paused`. Returns false if the kernel refuses: try again.
  bool WatchStreams(Child& child, bool paused) {
    bool done = true;
    for (int i = 0; i < 2; ++i) {
      Child::Stream& stream = child.streams()[i];
      const bool wanted = !paused && stream.fd.open();
      if (wanted == stream.watched) continue;
      if (wanted) {
        const absl::Status status = Watch(stream.fd.get(), {child.pid(), i});
        if (!status.ok()) {
          if (!std::exchange(told_watch_, true)) {
            MUSTER_LOG(Warning) << "output of process " << child.pid()
                                << " waits: " << status.message() << "; retrying";
          }
          done = false;
          continue;
        }
      } else {
        Unwatch(stream.fd.get());
      }
      stream.watched = wanted;
    }
    return done;
  }

  void OnReadable(Child& child, int channel) {
    Child::Stream& stream = child.streams()[channel];
    if (!stream.fd.open() || !stream.watched) return;
    size_t bytes = 0;
    bool at_end = false;
    child.ReadSome(stream, &bytes, &at_end);
    if (!at_end) return;
    Unwatch(stream.fd.get());
    stream.watched = false;
    stream.fd.Close();
    stream.splitter->Finish();
  }

  std::shared_ptr<Child> Release(pid_t pid) {
    std::shared_ptr<Child> child = children_[pid];
    WatchStreams(*child, /*paused=*/true);
    Unwatch(child->pidfd());
    children_.erase(pid);
    return child;
  }

  void OnExit(pid_t pid) {
    Release(pid)->Reap(keeper_.get());
    Orphans::Get().Forget(pid);
    TellGuard(pid, GuardNote::kRemoved);
  }

  void EndOrphans() {
    const absl::Time give_up = Clock::Real().Now() + kOrphansTimeout;
    std::vector<pid_t> left;
    std::set<pid_t> foreign;
    while (!(left = Orphans::Get().Kill(mark_, &foreign, options_.kill)).empty()) {
      for (const pid_t pid : left) {
        const OwnedFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
        BecomesReadable(pidfd.get(), give_up - Clock::Real().Now());
      }
      Orphans::Get().Collect(mark_);
      if (Clock::Real().Now() >= give_up) break;
    }
    Orphans::Get().Collect(mark_);
    for (const pid_t pid : foreign) {
      MUSTER_LOG(Warning) << "process " << pid << " belongs to another user; it is left behind";
    }
    for (const pid_t pid : left) {
      MUSTER_LOG(Warning) << "process " << pid << " of the job does not end after SIGKILL: "
                          << ReadStuckState(pid).ToString() << "; it is left behind";
    }
  }

  // Starts the processes that callers have requested. Returns whether the host is being destroyed.
  bool TakeRequests(bool stopping, bool* paused) {
    std::vector<Request*> requests;
    {
      MutexLock lock(&mu_);
      requests.swap(requests_);
      *paused = paused_;
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
    return stopping;
  }

  // Does the work that is due. Returns when to call again; InfinitePast(): at once.
  absl::Time TickChildren(absl::Time now, bool paused) {
    absl::Time next = guard_due_;
    if (!abandoned_.empty()) next = std::min(next, now + kCollectPeriod);
    std::vector<pid_t> given_up;
    for (auto& [pid, child] : children_) {
      if (!WatchStreams(*child, paused)) next = std::min(next, now + kWatchAgain);
      bool give_up = false;
      next = std::min(next, child->Tick(now, &give_up));
      if (give_up) given_up.push_back(pid);
    }
    for (const pid_t pid : given_up) {
      const std::shared_ptr<Child> child = Release(pid);
      child->GiveUp();
      Abandon(pid);
    }
    if (!given_up.empty()) return absl::InfinitePast();
    if (!children_.empty()) {
      if (collect_at_ <= now) {
        Orphans::Get().Collect(mark_);
        collect_at_ = now + kCollectPeriod;
      }
      next = std::min(next, collect_at_);
    }
    return next;
  }

  void WaitForEvents(absl::Duration at_most) {
    const int timeout = at_most == absl::InfiniteDuration()
                            ? -1
                            : static_cast<int>(std::min<int64_t>(
                                  absl::ToInt64Milliseconds(at_most) + 1, 1'000'000));
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), timeout);
    // Exits come first, in the order of the kernel's list, so that the reader sees the cause
    // before its consequences.
    std::vector<pid_t> ended;
    for (int i = 0; i < count; ++i) {
      Tag tag;
      memcpy(&tag, &events[i].data, sizeof(tag));
      if (tag.pid == 0) {
        uint64_t ignored;
        ssize_t got = read(waker_->fd.get(), &ignored, sizeof(ignored));
        static_cast<void>(got);
      } else if (tag.pid == -2) {
        OnKeeperEnded();
      } else if (tag.pid < 0) {
        OnGuardEnded();
      } else if (tag.channel == 2) {
        ended.push_back(tag.pid);
      }
    }
    for (const pid_t pid : ended) OnExit(pid);
    // Once, and last: it may read every process of the machine, and the ends of other processes
    // must not appear later because of that.
    if (!ended.empty()) Orphans::Get().Collect(mark_);
    for (int i = 0; i < count; ++i) {
      Tag tag;
      memcpy(&tag, &events[i].data, sizeof(tag));
      if (tag.pid <= 0 || tag.channel == 2) continue;
      const auto child = children_.find(tag.pid);
      if (child != children_.end()) OnReadable(*child->second, tag.channel);
    }
  }

  void Loop() {
    prctl(PR_SET_NAME, "process-host");
    // Signals are for other threads; and a write to a dead guard must not end the process.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    bool stopping = false;
    while (true) {
      bool paused = false;
      stopping = TakeRequests(stopping, &paused);
      ForgetAbandoned();
      if (stopping && children_.empty()) return;
      const absl::Time now = Clock::Real().Now();
      StartGuardIfDue(now);
      const absl::Time next = TickChildren(now, paused);
      if (next != absl::InfinitePast()) WaitForEvents(next - now);
    }
  }

  // Constant after Init.
  const ProcessHostOptions options_;
  int (*const epoll_ctl_)(int, int, int, epoll_event*);
  const std::shared_ptr<Waker> waker_;
  const std::string mark_;
  OwnedFd epoll_;

  std::atomic<pid_t> guard_{-1};
  // Used only by the host's thread.
  OwnedFd guard_pipe_;
  OwnedFd guard_pidfd_;
  absl::Time guard_started_;
  absl::Time guard_due_ = absl::InfiniteFuture();  // when to start another guard
  absl::Time collect_at_ = absl::InfinitePast();
  bool told_watch_ = false;
  std::unique_ptr<Keeper> keeper_;
  std::map<pid_t, std::shared_ptr<Child>> children_;
  // Processes that SIGKILL did not end in time.
  struct Abandoned {
    pid_t pid;
    OwnedFd ended;  // a pidfd
  };
  std::vector<Abandoned> abandoned_;

  Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool paused_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Request*> requests_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

// Returns OK, or why `path` cannot be run.
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
    return absl::PermissionDeniedError(
        absl::StrCat(path, " is not executable: run chmod +x on it, or ", WithInterpreter(path)));
  }
  return absl::OkStatus();
}

}  // namespace

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? absl::StrCat("SIG", name) : absl::StrCat("signal ", signal);
}

std::string ProcessExit::ToString() const {
  if (!stuck.empty()) return absl::StrCat("does not end after SIGKILL: ", stuck);
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
  const std::string here = absl::StrCat("./", program);
  return absl::NotFoundError(
      absl::StrCat("program ", program, " not found in PATH; ",
                   absl::IsNotFound(CheckExecutable(here)) ? "give the path to it"
                   : !InterpreterOf(program).empty()
                       ? absl::StrCat("for the script in this folder ", WithInterpreter(program))
                       : absl::StrCat("for the file in this folder write ", here)));
}

absl::StatusOr<std::unique_ptr<ProcessHost>> ProcessHost::Start(ProcessHostOptions options) {
  OpenStandardDescriptors();
  // An ignored SIGCHLD is inherited from careless programs, and the kernel then forgets how
  // children ended.
  struct sigaction action = {};
  if (sigaction(SIGCHLD, nullptr, &action) == 0 &&
      (action.sa_handler == SIG_IGN || (action.sa_flags & SA_NOCLDWAIT) != 0)) {
    action = {};
    action.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &action, nullptr);
  }
  auto host = std::make_unique<HostImpl>(std::move(options));
  MUSTER_RETURN_IF_ERROR(host->Init());
  return std::unique_ptr<ProcessHost>(std::move(host));
}

}  // namespace muster::agent
