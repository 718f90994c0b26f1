#include "agent/node_service.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "agent/attempt_end.h"
#include "agent/attempt_files.h"
#include "agent/attempt_log.h"
#include "agent/attempt_restarts.h"
#include "agent/control_group.h"
#include "agent/job_files.h"
#include "agent/job_signals.h"
#include "agent/lock_holders.h"
#include "agent/memory_holder.h"
#include "agent/memory_terms.h"
#include "agent/node_attempts.h"
#include "agent/node_groups.h"
#include "agent/worker_groups.h"
#include "base/backoff.h"
#include "base/clock.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/log_level_control.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "proto/job_limits.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "proto/name_value.h"
#include "rpc/address.h"
#include "rpc/log_level.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"
#include "rpc/utf8_check.h"

namespace muster::agent {
namespace {

using json = nlohmann::json;

// The coordinator holds a call for a third of a lease.
constexpr absl::Duration kSyncTimeout = absl::Seconds(40);
// A call that has not ended this long after its timeout is considered hung.
constexpr absl::Duration kSyncSlack = absl::Seconds(20);
// The bounds of the delay between failing calls; each delay is a random part of it.
constexpr absl::Duration kAwayLeast = absl::Milliseconds(200);
constexpr absl::Duration kAwayMost = absl::Seconds(5);
// The delay between attempts to connect to a coordinator that does not answer. After its start, the
// coordinator has no nodes for at most this long, if its host answers. One attempt at a host that
// drops packets takes 10 s. gRPC makes each delay up to a fifth longer or shorter.
constexpr absl::Duration kConnectAgain = absl::Seconds(2);
// How often to look for the end of the service.
constexpr absl::Duration kConnectedPoll = absl::Milliseconds(200);
// A connection that was lost silently (for example because a firewall has dropped its state) is
// noticed within this time plus the wait for the keepalive's answer and the time of a held call,
// and is replaced before the node's lease (30 s by default) ends, with which its jobs would be
// lost.
constexpr absl::Duration kKeepalive = absl::Seconds(5);
constexpr absl::Duration kAnswerTimeout = absl::Seconds(10);
// How often a log with a waiting reader is polled.
constexpr absl::Duration kLogPoll = absl::Milliseconds(100);
// The polling interval between the end of a runner and that of the last process that holds its
// lock.
constexpr absl::Duration kLockPoll = absl::Milliseconds(50);
// The polling interval of attempts' folders, if the system does not report new files or one could
// not be read, and of a full disk.
constexpr absl::Duration kLookAgain = absl::Seconds(1);
// How long to retry reading the report of a runner that has ended, if it cannot be read at the
// moment.
constexpr absl::Duration kReportPatience = absl::Minutes(1);
constexpr absl::Duration kSweepEvery = absl::Hours(1);
constexpr size_t kMaxWhy = 300;
constexpr absl::Duration kOutageTolerance = absl::Hours(24);  // for attempts

int64_t UnixMs() { return absl::ToUnixMillis(absl::Now()); }

// The folder of an attempt under STATE_DIR/attempts:
//   record.json  what was assigned; exists before the runner starts, and is on the disk before the
//                program starts
//   lock         held by the runner and by all processes that must end with it
//   runner.pid   written by the runner
//   end.json     written by the runner when the attempt has ended
//   restart_K.json, restarts_allowed   see attempt_restarts.h
//   logs/, work/, runner.log
struct AttemptFolder {
  std::string path;
  std::string Of(absl::string_view name) const { return JoinPath(path, name); }
};

struct Runner {
  AttemptFolder folder;
  pid_t pid = -1;  // our child process; -1: the runner was adopted
  OwnedFd pidfd;
  pid_t watched = -1;  // the process of pidfd
  bool gone = false;   // it was adopted, and its process no longer exists
  OwnedFd lock;        // open but not locked: used to test the lock
  int first_rank = 0;
  int folder_watch = -1;                         // the watch in folder_events_
  std::string unread = {};                       // why its requests could not be read
  std::string unread_end = {};                   // why its report could not be read
  std::string group = {};                        // the folder of its control group; empty: none
  int status = -1;                               // from waitpid; -1: unknown
  absl::Time empty_by = absl::InfiniteFuture();  // deadline for its control group to become empty
  absl::Time read_by = absl::InfiniteFuture();   // deadline for reading its report, after a failure
  // Set once the runner has ended, if another process holds the lock.
  std::optional<LockBreaker> breaker = {};
  bool left_behind = false;  // the lock breaker could not end some processes
};

// How an attempt has ended, and the restart that was requested for this end before; 0: none.
struct AttemptResult {
  v1::AttemptEnd end;
  int asked = 0;
};

// Returns when a file was written; now if that is unknown.
absl::Time WrittenAt(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 ? absl::TimeFromTimespec(info.st_mtim)
                                        : Clock::Real().WallNow();
}

// Returns whether no process has locked the file. Does not keep the lock.
bool IsUnlocked(int fd) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) return false;
  flock(fd, LOCK_UN);
  return true;
}

// Returns an error that may be temporary, such as a lack of descriptors or memory or an unavailable
// disk; such an error says nothing about the attempt. Returns OK for all other results of reading
// an attempt's file: success, no such file, or not a valid file.
absl::Status MayPass(const absl::Status& read) {
  const bool says_something = read.ok() || absl::IsNotFound(read) ||
                              absl::IsFailedPrecondition(read) || absl::IsDataLoss(read);
  return says_something ? absl::OkStatus() : read;
}

// Opens the lock file of an attempt; not open if there is none.
absl::StatusOr<OwnedFd> OpenLock(const std::string& path) {
  int fd;
  do {
    fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  } while (fd < 0 && errno == EINTR);
  if (fd >= 0 || errno == ENOENT) return OwnedFd(fd);
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
}

v1::AttemptEnd NodeFailure(const std::string& why) {
  v1::AttemptEnd end;
  end.set_end_class(v1::END_CLASS_NODE_FAILED);
  end.set_why(OneLine(why));  // may contain names of files
  end.set_rank(-1);
  return end;
}

class NodeService {
 public:
  explicit NodeService(const NodeServiceOptions& options)
      : options_(options),
        notifier_(options.notify),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        folder_events_(WatchFolders()),
        info_(options.info) {
    info_.set_restarts_in_place(true);
    info_.set_takes_files(true);
  }

  absl::Status Run() {
    const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(options_.coordinator);
    if (!address.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("coordinator: ", address.status().message()));
    }
    v1::SyncNodeRequest facts;
    facts.set_node(options_.node);
    *facts.mutable_info() = options_.info;
    MUSTER_RETURN_IF_ERROR(rpc::CheckUtf8(facts));
    MUSTER_RETURN_IF_ERROR(Open());
    address_ = *address;
    rpc::ChannelOptions channel = options_.channel;
    channel.max_backoff = kConnectAgain;
    channel.keepalive = kKeepalive;
    MUSTER_ASSIGN_OR_RETURN(channel_, rpc::Connect(options_.coordinator, channel));
    MUSTER_LOG(Info) << "node " << options_.node << " waits for jobs of " << options_.coordinator
                     << ": " << options_.info.cpus() << " CPUs, " << options_.info.gpus_size()
                     << " GPUs";
    const SignalWatcher signals([this](int signal) {
      MutexLock lock(&mu_);
      stopped_ = signal;
      Wake();
    });
    HoldMemory();
    {
      MutexLock lock(&mu_);
      sync_turn_ = Clock::Real().Now();
      notifier_.Ready(StatusLine());
    }
    std::thread sync([this] { SyncLoop(); });
    std::thread logs([this] { LogLoop(); });
    std::thread sweep([this] { SweepLoop(); });
    Loop();
    notifier_.Stopping("attempts continue, the next agent adopts them");
    {
      MutexLock lock(&mu_);
      sweep_ends_ = true;
      changed_.SignalAll();
    }
    // The thread may be in the middle of a large folder: until it ends, the node remains connected.
    sweep.join();
    {
      MutexLock lock(&mu_);
      ended_ = true;
      if (call_ != nullptr) call_->TryCancel();
      changed_.SignalAll();
    }
    sync.join();
    logs.join();
    // Its thread takes the lock, so it must not be held here. Runners also hold what it held, and
    // hand it to the next agent.
    memory_.reset();
    MutexLock lock(&mu_);
    int running = 0;
    for (const auto& [key, runner] : runners_) running += attempts_.IsRunning(key) ? 1 : 0;
    if (running > 0) {
      MUSTER_LOG(Info) << "node " << options_.node << " ends; " << running
                       << " attempts continue: start it again to adopt them";
    }
    return refused_;
  }

 private:
  // ---- the disk

  absl::Status Open() {
    MUSTER_RETURN_IF_ERROR(MakeDirectories(options_.state_dir));
    if (chmod(options_.state_dir.c_str(), 0700) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot protect ", options_.state_dir));
    }
    const std::string lock = JoinPath(options_.state_dir, "lock");
    lock_ = OwnedFd(open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock_.open()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", lock));
    if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
      return absl::AlreadyExistsError(absl::StrCat("another agent uses ", options_.state_dir,
                                                   ": stop it, or use another --state_dir"));
    }
    MUSTER_RETURN_IF_ERROR(ReadIdentity());
    MUSTER_RETURN_IF_ERROR(OpenGroups());
    MUSTER_RETURN_IF_ERROR(MakeDirectories(Attempts()));
    return Adopt();
  }

  std::string Attempts() const { return JoinPath(options_.state_dir, "attempts"); }
  // Another cluster may have jobs with the same names.
  std::string FolderName(const AttemptKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return absl::StrCat(key.first, ".", key.second, "-", attempts_.cluster().substr(0, 8));
  }

  absl::Status ReadIdentity() {
    const std::string path = JoinPath(options_.state_dir, "node_uid");
    const absl::StatusOr<std::string> text = ReadFile(path, 64);
    if (text.ok() && absl::SimpleHexAtoi(*text, &uid_) && uid_ != 0) return absl::OkStatus();
    if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
    const std::string made = RandomHex();
    if (!absl::SimpleHexAtoi(made, &uid_)) return absl::InternalError("no random number");
    return WriteFileAtomically(path, made);
  }

  absl::Status OpenGroups() {
    MutexLock lock(&mu_);
    absl::StatusOr<NodeGroups> groups =
        NodeGroups::Open({.where = options_.control_groups,
                          .node_uid = absl::StrCat(absl::Hex(uid_, absl::kZeroPad16)),
                          .limit_cpus = options_.limit_cpus});
    if (!groups.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--control_groups: ", groups.status().message()));
    }
    groups_ = *std::move(groups);
    MUSTER_LOG(Info) << groups_->ToString();
    TellLimits();
    return absl::OkStatus();
  }

  // Adds the limits to the node's facts. Returns whether these have changed.
  bool TellLimits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const bool same = info_.limits_memory() == groups_->limits_memory() &&
                      info_.limits_cpus() == groups_->limits_cpus() &&
                      info_.limits_why() == groups_->why();
    info_.set_limits_memory(groups_->limits_memory());
    info_.set_limits_cpus(groups_->limits_cpus());
    info_.set_limits_why(Printable(groups_->why(), kMaxWhy));
    return !same;
  }

  // Returns the entry of CUDA_VISIBLE_DEVICES for a GPU of the coordinator's placements.
  std::string DeviceOf(int gpu) const {
    const bool named = gpu >= 0 && gpu < static_cast<int>(options_.gpus.size());
    return named ? options_.gpus[gpu] : absl::StrCat(gpu);
  }

  // Checks that the GPUs of a running attempt still have the same numbers: otherwise the
  // coordinator would also give them to another job.
  absl::Status CheckGpusOf(const std::string& attempt, const json& record) const {
    const auto gpus = record.find("gpus");
    // Older versions of the agent do not record GPUs.
    if (gpus == record.end() || !gpus->is_object()) return absl::OkStatus();
    for (const auto& [text, value] : gpus->items()) {
      int gpu = -1;
      if (!absl::SimpleAtoi(text, &gpu) || !value.is_string()) continue;
      const std::string device = value.get<std::string>();
      if (DeviceOf(gpu) == device) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "attempt ", attempt, " runs on GPU ", Printable(device), ", which was number ", gpu,
          " of this agent's; now that is ", Printable(DeviceOf(gpu)),
          ": start the agent with the CUDA_VISIBLE_DEVICES and --gpus that it had, or end the "
          "attempt first"));
    }
    return absl::OkStatus();
  }

  absl::Status Adopt() {
    MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(Attempts()));
    MutexLock lock(&mu_);
    std::set<std::string> running_groups;
    for (const std::string& name : names) {
      const AttemptFolder folder{JoinPath(Attempts(), name)};
      // The attempt's processes may run: if the agent continued without it, it would tell the
      // coordinator that the attempt has ended, and nothing would end these processes. The next
      // start of the agent looks again.
      const auto unknown = [&name](absl::string_view before, absl::string_view after,
                                   const absl::Status& why) {
        return absl::Status(why.code(), absl::StrCat("cannot tell ", before, " attempt ", name, " ",
                                                     after, ": ", why.message()));
      };
      const absl::StatusOr<std::string> text = ReadAttemptFile(folder.Of("record.json"), 1 << 20);
      if (const absl::Status status = MayPass(text.status()); !status.ok()) {
        return unknown("whether", "runs", status);
      }
      const json record =
          text.ok() ? json::parse(*text, nullptr, /*allow_exceptions=*/false) : json();
      const auto is = [&](const char* name_of, bool (json::*type)() const noexcept) {
        const auto it = record.find(name_of);
        return it != record.end() && ((*it).*type)();
      };
      // This also skips forgotten attempts.
      if (!record.is_object() || !is("job", &json::is_string) ||
          !is("attempt", &json::is_number_integer) || !is("started", &json::is_number_integer) ||
          !is("cluster", &json::is_string) || !is("first_rank", &json::is_number_integer)) {
        continue;
      }
      const AttemptKey key(record["job"].get<std::string>(), record["attempt"].get<int>());
      absl::StatusOr<OwnedFd> lock = OpenLock(folder.Of("lock"));
      if (!lock.ok()) return unknown("whether", "runs", lock.status());
      Runner runner{.folder = folder,
                    .pid = -1,
                    .pidfd = {},
                    .lock = *std::move(lock),
                    .first_rank = record["first_rank"].get<int>()};
      const bool running = runner.lock.open() && !IsUnlocked(runner.lock.get());
      if (running) MUSTER_RETURN_IF_ERROR(CheckGpusOf(name, record));
      attempts_.SetCluster(record["cluster"].get<std::string>());
      const int64_t started = record["started"].get<int64_t>();
      AttemptResult result;
      if (!running) {
        absl::StatusOr<AttemptResult> read = ResultOf(folder);
        if (!read.ok()) return unknown("how", "has ended", read.status());
        result = *std::move(read);
      }
      attempts_.Adopt(key, running, result.end, absl::FromUnixMillis(started),
                      WrittenAt(folder.Of("end.json")), Clock::Real().Now(), result.asked);
      MUSTER_LOG(Info) << "attempt " << name << (running ? " runs: adopted" : " has ended");
      if (is("group", &json::is_string)) runner.group = record["group"].get<std::string>();
      if (running) {
        running_groups.insert(runner.group);
      } else {
        RemoveVariables(runner);
        RemoveGroup(&runner);
      }
      if (running) WatchPid(&runner);
      if (running) WatchForRequests(&runner);
      runners_.emplace(key, std::move(runner));
    }
    groups_->Sweep(running_groups);
    return absl::OkStatus();
  }

  // ---- restarts within an attempt

  void WatchForRequests(Runner* runner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    look_ = true;
    if (!told_of_files_) return;
    const absl::StatusOr<int> watch = WatchFolder(folder_events_.get(), runner->folder.path);
    if (watch.ok()) {
      runner->folder_watch = *watch;
      return;
    }
    MUSTER_LOG(Warning) << watch.status().message()
                        << "; folders of attempts are looked at now and then";
    told_of_files_ = false;
  }
  // Reads the requests of runners. Returns false if not all could be read, and no event will tell
  // when they can.
  bool ReadRequests() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    bool all = true;
    for (auto& [key, runner] : runners_) {
      if (!attempts_.IsRunning(key)) continue;
      const absl::StatusOr<RestartRequest> asked = ReadRestartRequest(runner.folder.path);
      if (!asked.ok()) {
        all = false;
        const std::string why(asked.status().message());
        if (std::exchange(runner.unread, why) == why) continue;
        MUSTER_LOG(Warning) << why << "; it is tried again";
        continue;
      }
      runner.unread.clear();
      if (asked->restart == 0) continue;
      const uint64_t version = attempts_.version();
      const absl::Duration ago =
          std::max(absl::ZeroDuration(), Clock::Real().WallNow() - asked->at);
      attempts_.Ask(key, asked->restart, asked->end, absl::ToUnixMillis(asked->at),
                    Clock::Real().Now() - ago);
      if (attempts_.version() == version) continue;
      MUSTER_LOG(Info) << "attempt " << BaseName(runner.folder.path) << " asks for restart "
                       << asked->restart << ": " << asked->end.why();
      Resync();
    }
    return all;
  }
  // Tells runners which restarts may begin. If the disk is full, tries again later.
  void Allow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto it = unwritten_.begin(); it != unwritten_.end();) {
      const auto runner = runners_.find(it->first);
      absl::Status status;
      if (runner != runners_.end() && attempts_.IsRunning(it->first)) {
        status = AllowRestart(runner->second.folder.path, it->second.restart, it->second.delay);
      }
      if (!status.ok()) MUSTER_LOG(Warning) << status.message();
      it = status.ok() ? unwritten_.erase(it) : std::next(it);
    }
  }

  // Opens the pidfd of a runner that exists. Notes that an adopted one, which has written its pid,
  // does not.
  void WatchPid(Runner* runner) {
    int64_t pid = runner->pid;
    if (pid < 0) {
      const absl::StatusOr<std::string> text = ReadFile(runner->folder.Of("runner.pid"), 64);
      if (!text.ok() || !absl::SimpleAtoi(*text, &pid) || pid <= 1) return;
    }
    OwnedFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
    // Other processes hold the lock too, so the runner may be gone and its pid reused.
    const absl::StatusOr<std::string> command =
        ReadFile(absl::StrCat("/proc/", pid, "/cmdline"), 1 << 20);
    // Not the whole path: this agent may have been started with another spelling of its folder.
    const std::string name = absl::StrCat("/", BaseName(runner->folder.path));
    if (runner->pid < 0 && (!command.ok() || !absl::StrContains(*command, name))) {
      runner->gone = command.ok() || absl::IsNotFound(command.status());
      return;
    }
    runner->pidfd = std::move(pidfd);
    runner->watched = static_cast<pid_t>(pid);
  }

  // Determines the result from the files that the runner has left in its folder. `status`: as for
  // EndOf(). Errors: those that may be temporary.
  static absl::StatusOr<AttemptResult> ResultOf(const AttemptFolder& folder, int status = -1) {
    absl::StatusOr<v1::AttemptEnd> report = ReadEnd(folder.Of("end.json"));
    MUSTER_RETURN_IF_ERROR(MayPass(report.status()));
    AttemptResult result{.end = EndOf(folder, std::move(report), status)};
    const absl::StatusOr<int> asked = AskedFor(folder.path, result.end);
    MUSTER_RETURN_IF_ERROR(MayPass(asked.status()));
    result.asked = asked.value_or(0);
    return result;
  }

  // Returns how the attempt has ended. `end`: the result of ReadEnd(). `status`: from waitpid; -1:
  // unknown. If a full disk has kept the runner from writing its report, its exit code still says
  // whether its job has succeeded.
  static v1::AttemptEnd EndOf(const AttemptFolder& folder, absl::StatusOr<v1::AttemptEnd> end,
                              int status = -1) {
    if (end.ok()) return *std::move(end);
    const bool exited = status >= 0 && WIFEXITED(status);
    const std::string missing =
        absl::IsNotFound(end.status())
            ? "left no report"
            : absl::StrCat("left a report that cannot be read: ", OneLine(end.status().message()));
    if (exited && WEXITSTATUS(status) == kExitOk) {
      v1::AttemptEnd succeeded;
      succeeded.set_end_class(v1::END_CLASS_SUCCEEDED);
      succeeded.set_why(absl::StrCat("its runner has succeeded, and ", missing));
      return succeeded;
    }
    if (exited && WEXITSTATUS(status) == kExitJobFailed) {
      v1::AttemptEnd failed;
      failed.set_end_class(v1::END_CLASS_PROCESS_FAILED);
      failed.set_why(absl::StrCat("its runner says that the program has failed, and ", missing,
                                  "; runner.log in ", OneLine(folder.path), " says more"));
      failed.set_rank(-1);
      return failed;
    }
    const std::string how = exited ? absl::StrCat(" (exit ", WEXITSTATUS(status), ")")
                            : status >= 0 && WIFSIGNALED(status)
                                ? absl::StrCat(" (signal ", WTERMSIG(status), ")")
                                : ": it was killed, or the machine has restarted,";
    const std::string last = LastLine(folder.Of("runner.log"));
    return NodeFailure(absl::StrCat("its runner no longer exists", how, " and ", missing,
                                    last.empty() ? "" : "; its last line: ", last));
  }
  // Returns the last line of a log, for example what the dynamic linker says about a program that
  // it cannot start.
  static std::string LastLine(const std::string& path) {
    const OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat info;
    if (!fd.open() || fstat(fd.get(), &info) != 0) return "";
    char end[1024];
    const ssize_t got =
        pread(fd.get(), end, sizeof(end), std::max<off_t>(0, info.st_size - ssize_t{sizeof(end)}));
    if (got <= 0) return "";
    absl::string_view text =
        absl::StripAsciiWhitespace(absl::string_view(end, static_cast<size_t>(got)));
    const size_t line = text.rfind('\n');
    return OneLine(line == text.npos ? text : text.substr(line + 1));
  }

  // ---- the main loop: runners

  void Wake() {
    const uint64_t one = 1;
    ssize_t ignored = write(wake_.get(), &one, sizeof(one));
    (void)ignored;
  }

  void Loop() {
    while (true) {
      std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {folder_events_.get(), POLLIN, 0}};
      absl::Duration wait = std::min<absl::Duration>(absl::Seconds(60), notifier_.period());
      {
        MutexLock lock(&mu_);
        if (stopped_ != 0 || !refused_.ok()) return;
        const absl::Time now = Clock::Real().Now();
        // Reports that the service is alive only if neither loop hangs: without calls the node
        // would be lost, and its jobs with it.
        if (now - sync_turn_ < kSyncTimeout + kSyncSlack) notifier_.Alive(now);
        notifier_.Status(StatusLine());
        Do(attempts_.Tick(now));
        SendSignals();
        if (TakeFolderEvents(folder_events_.get())) look_ = true;
        const bool all_read = !look_ || ReadRequests();
        Allow();
        look_ = !told_of_files_ || !all_read;
        if (look_ || !unwritten_.empty()) wait = std::min(wait, kLookAgain);
        CollectEnded();
        DropMemory(now);
        wait = std::min(wait, attempts_.NextDeadline() - now);
        for (auto& [key, runner] : runners_) {
          if (runner.left_behind) wait = std::min(wait, kLookAgain);
          if (!attempts_.IsRunning(key)) continue;
          if (!runner.pidfd.open()) WatchPid(&runner);
          if (runner.pidfd.open() && !IsReadable(runner.pidfd.get())) {
            fds.push_back({runner.pidfd.get(), POLLIN, 0});
          } else {
            wait = std::min(wait, kLockPoll);
          }
        }
      }
      poll(fds.data(), fds.size(),
           static_cast<int>(std::max<int64_t>(1, absl::ToInt64Milliseconds(wait))));
      uint64_t drained;
      ssize_t ignored = read(wake_.get(), &drained, sizeof(drained));
      (void)ignored;
    }
  }
  // Returns a line for users of the service manager.
  std::string StatusLine() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    int running = 0;
    for (const auto& [key, runner] : runners_) running += attempts_.IsRunning(key) ? 1 : 0;
    return absl::StrCat("node ", options_.node, ": ", running,
                        running == 1 ? " attempt runs" : " attempts run", "; the coordinator at ",
                        options_.coordinator,
                        answers_ ? " answers" : " has not answered the last call");
  }
  static bool IsReadable(int fd) {
    pollfd event = {fd, POLLIN, 0};
    return poll(&event, 1, 0) == 1;
  }

  // ---- what attempts leave in memory

  void HoldMemory() {
    MemoryHolder::Options options;
    options.client_of = [this](pid_t pid) { return RunnerAt(pid); };
    // Runners find the next agent of this folder at this address.
    options.address = absl::StrCat("muster-node-memory-", absl::Hex(uid_, absl::kZeroPad16));
    absl::StatusOr<std::unique_ptr<MemoryHolder>> memory = MemoryHolder::Start(std::move(options));
    if (memory.ok()) {
      memory_ = *std::move(memory);
    } else {
      MUSTER_LOG(Warning) << "attempts of jobs find nothing in memory of earlier ones: "
                          << memory.status().message();
    }
  }
  // The key includes the cluster, because other clusters may have jobs with the same names.
  static std::string MemoryOf(absl::string_view cluster, absl::string_view job) {
    return absl::StrCat(cluster, "/", job);
  }
  std::string MemoryOf(const std::string& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return MemoryOf(attempts_.cluster(), job);
  }
  // Adds the jobs whose end this node must learn of.
  void FillHeldJobs(v1::SyncNodeRequest* request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (memory_ == nullptr) return;
    const std::string ours = MemoryOf("");
    for (const std::string& held : memory_->Jobs()) {
      absl::string_view job = held;
      if (!absl::ConsumePrefix(&job, ours)) continue;
      if (request->held_jobs_size() < kMaxHeldJobs) request->add_held_jobs(std::string(job));
    }
  }
  std::optional<MemoryHolder::Client> RunnerAt(pid_t pid) {
    MutexLock lock(&mu_);
    for (const auto& [key, runner] : runners_) {
      // After a process has ended, its pid may be that of another one.
      if (runner.watched != pid || !runner.pidfd.open() || IsReadable(runner.pidfd.get())) continue;
      return MemoryHolder::Client{.job = MemoryOf(key.first), .worker = ""};
    }
    return std::nullopt;
  }
  void DropMemory(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (memory_ == nullptr) return;
    std::set<std::string> running;
    for (const auto& [key, runner] : runners_) {
      if (attempts_.IsRunning(key)) running.insert(MemoryOf(key.first));
    }
    for (const std::string& job : memory_terms_.Expired(memory_->Jobs(), running, now)) {
      MUSTER_LOG(Info) << "job " << job.substr(job.find('/') + 1)
                       << " has no attempt here any more: its checkpoints in memory are dropped";
      memory_->Drop(job);
    }
  }

  void CollectEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto& [key, runner] : runners_) {
      if (runner.left_behind) {
        CollectLeft(key, &runner);
        continue;
      }
      if (!attempts_.IsRunning(key) || !runner.lock.open()) continue;
      bool left_behind = false;
      if (!IsUnlocked(runner.lock.get())) {
        if (!HasEnded(runner)) continue;
        // The runner has left processes that no runner controls any more.
        KillGroup(runner);
        if (!runner.breaker.has_value()) runner.breaker.emplace(options_.patience);
        left_behind = runner.breaker->IsBeyondKilling(runner.lock.get(), Clock::Real().Now());
        if (!left_behind) continue;
      }
      // The runner has closed its files, so it has ended or is about to.
      while (runner.pid > 0 && waitpid(runner.pid, &runner.status, 0) < 0 && errno == EINTR) {
      }
      runner.pid = -1;
      if (!RemoveGroup(&runner)) continue;
      const std::optional<AttemptResult> result = TakeResult(&runner);
      if (!result.has_value()) continue;
      const v1::AttemptEnd& end = result->end;
      MUSTER_LOG(Info) << "attempt " << BaseName(runner.folder.path) << " has ended: "
                       << (end.end_class() == v1::END_CLASS_SUCCEEDED ? "succeeded" : end.why());
      RemoveVariables(runner);
      if (left_behind) {
        MUSTER_LOG(Warning) << "attempt " << BaseName(runner.folder.path)
                            << " has left behind what SIGKILL does not end: "
                            << runner.breaker->ToString()
                            << "; nothing starts here until that is gone: remove the cause, or "
                               "restart the machine";
        runner.left_behind = true;
        attempts_.LeftBehind(key, end, UnixMs(), Clock::Real().Now(), result->asked);
      } else {
        attempts_.Ended(key, end, UnixMs(), Clock::Real().Now(), result->asked);
      }
      if (end.end_class() == v1::END_CLASS_SUCCEEDED && memory_ != nullptr) {
        memory_->Drop(MemoryOf(key.first));
      }
      Resync();
    }
  }

  // Returns whether the runner itself has ended, as far as is known.
  static bool HasEnded(const Runner& runner) {
    if (runner.pidfd.open()) return IsReadable(runner.pidfd.get());
    return runner.pid < 0 && (runner.gone || PathExists(runner.folder.Of("end.json")));
  }
  void CollectLeft(const AttemptKey& key, Runner* runner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!IsUnlocked(runner->lock.get())) return;
    MUSTER_LOG(Info) << "what attempt " << BaseName(runner->folder.path)
                     << " has left behind is gone";
    runner->left_behind = false;
    attempts_.Gone(key);
    Resync();
  }

  // Returns the result; nullopt if it cannot be read at the moment, which says nothing about the
  // attempt. After kReportPatience the attempt ends without it.
  static std::optional<AttemptResult> TakeResult(Runner* runner) {
    absl::StatusOr<AttemptResult> result = ResultOf(runner->folder, runner->status);
    if (result.ok()) return *std::move(result);
    const absl::Time now = Clock::Real().Now();
    runner->read_by = std::min(runner->read_by, now + kReportPatience);
    if (now >= runner->read_by) {
      return AttemptResult{
          .end = EndOf(runner->folder, ReadEnd(runner->folder.Of("end.json")), runner->status)};
    }
    const std::string why(result.status().message());
    if (std::exchange(runner->unread_end, why) != why) {
      MUSTER_LOG(Warning) << "attempt " << BaseName(runner->folder.path)
                          << " has ended, but not how: " << why << "; it is tried again for "
                          << absl::FormatDuration(kReportPatience);
    }
    return std::nullopt;
  }

  void KillGroup(const Runner& runner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!runner.group.empty()) groups_->At(runner.group).Kill();
  }

  // Removes the file with the job's variables, which may be secrets. A runner removes it itself;
  // this is for attempts whose runner has not.
  static void RemoveVariables(const Runner& runner) { unlink(runner.folder.Of("env").c_str()); }

  // Ends processes that no longer hold the attempt's lock, such as a server that a worker has
  // started, and removes the control group. Returns false if they have not ended yet.
  bool RemoveGroup(Runner* runner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (runner->group.empty()) return true;
    const ControlGroup group = groups_->At(runner->group);
    const absl::Time now = Clock::Real().Now();
    if (group.IsPopulated()) {
      group.Kill();
      runner->empty_by = std::min(runner->empty_by, now + options_.patience);
      if (now < runner->empty_by) return false;
    }
    if (const absl::Status status = group.Remove(); !status.ok()) {
      MUSTER_LOG(Warning) << status.message() << "; they are left behind";
    }
    runner->group.clear();
    return true;
  }

  void Do(const NodeAttempts::Orders& orders) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!orders.notice.empty()) MUSTER_LOG(Warning) << orders.notice;
    for (const v1::NodeAssignment& assignment : orders.start) {
      const AttemptKey key(assignment.job_id(), assignment.attempt());
      if (const std::optional<v1::AttemptEnd> failed = Start(assignment)) {
        MUSTER_LOG(Warning) << "attempt " << key.first << "." << key.second
                            << " cannot start: " << failed->why();
        attempts_.Ended(key, *failed, UnixMs(), Clock::Real().Now());
      }
      Resync();
    }
    for (const NodeAttempts::Orders::Restart& restart : orders.restarts) {
      unwritten_.insert_or_assign(restart.key, restart);
    }
    Allow();
    for (const AttemptKey& key : orders.stop) Signal(key, SIGTERM);
    for (const AttemptKey& key : orders.kill) Signal(key, SIGKILL);
    for (const AttemptKey& key : orders.forget) {
      const auto it = runners_.find(key);
      if (it == runners_.end()) continue;
      // The logs stay until they expire.
      if (it->second.folder_watch >= 0) {
        UnwatchFolder(folder_events_.get(), it->second.folder_watch);
      }
      const std::string record = it->second.folder.Of("record.json");
      const absl::Status status = WriteFileAtomically(record, json{{"forgotten", true}}.dump());
      if (!status.ok()) MUSTER_LOG(Warning) << status.message();
      runners_.erase(it);
    }
  }

  void Signal(const AttemptKey& key, int signal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    MUSTER_LOG(Info) << "attempt " << key.first << "." << key.second
                     << " is to end: " << (signal == SIGKILL ? "SIGKILL" : "SIGTERM");
    unsent_[key] = signal;
    SendSignals();
    const auto runner = runners_.find(key);
    if (signal == SIGKILL && runner != runners_.end()) KillGroup(runner->second);
  }
  // Sends signals as soon as possible: a runner that has just started may not have written its pid
  // yet.
  void SendSignals() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto it = unsent_.begin(); it != unsent_.end();) {
      const auto runner = runners_.find(it->first);
      bool done = runner == runners_.end() || !attempts_.IsRunning(it->first);
      if (!done) {
        if (!runner->second.pidfd.open()) WatchPid(&runner->second);
        done =
            runner->second.pidfd.open() &&
            syscall(SYS_pidfd_send_signal, runner->second.pidfd.get(), it->second, nullptr, 0) == 0;
      }
      it = done ? unsent_.erase(it) : std::next(it);
    }
  }

  // ---- the start of a runner

  // Starts a runner. Returns nullopt if it runs.
  std::optional<v1::AttemptEnd> Start(const v1::NodeAssignment& assignment)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const AttemptKey key(assignment.job_id(), assignment.attempt());
    const std::string name = FolderName(key);
    Runner runner;
    runner.folder = {JoinPath(Attempts(), name)};
    runner.first_rank = assignment.node_rank() * assignment.processes();
    // The coordinator checks job names, but a path must not depend on that alone.
    if (absl::StrContains(name, "/") || name[0] == '.') {
      return NodeFailure(absl::StrCat("\"", name, "\" cannot name a folder"));
    }
    for (const int gpu : assignment.gpus()) {
      if (gpu >= 0 && gpu < options_.info.gpus_size()) continue;
      // The GPU belongs to another attempt, or is not one of those that the agent may use.
      return NodeFailure(absl::StrCat("GPU ", gpu, " is not among the ", options_.info.gpus_size(),
                                      " of this node: it had more before"));
    }
    if (mkdir(runner.folder.path.c_str(), 0700) != 0) {
      return NodeFailure(errno == EEXIST ? "this node has a record of it already"
                                         : absl::StrCat("cannot make ", runner.folder.path, ": ",
                                                        strerror(errno)));
    }
    // Removes the folder if the start fails early. Nothing else would, because the folder has no
    // record, and there is nothing to read in it.
    const auto remove = [&runner] {
      const absl::Status removed = RemoveTree(runner.folder.path);
      if (!removed.ok()) MUSTER_LOG(Warning) << removed.message();
    };
    runner.lock = OwnedFd(
        open(runner.folder.Of("lock").c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!runner.lock.open()) {
      const int error = errno;
      remove();
      return NodeFailure(absl::StrCat("cannot make its lock: ", strerror(error)));
    }
    runner.group = MakeGroup(name, assignment);
    json gpus = json::object();
    for (const int gpu : assignment.gpus()) gpus[absl::StrCat(gpu)] = DeviceOf(gpu);
    const json record = {{"job", key.first},
                         {"attempt", key.second},
                         {"cluster", attempts_.cluster()},
                         {"started", UnixMs()},
                         {"first_rank", runner.first_rank},
                         {"group", runner.group},
                         {"gpus", std::move(gpus)}};
    // The runner syncs these files to the disk while it prepares the start of the program.
    absl::Status status = PutFile(runner.folder.Of("record.json"), record.dump());
    if (status.ok()) status = MakeDirectories(runner.folder.Of("work"));
    if (status.ok()) status = WriteJobFiles(assignment.spec(), runner.folder.Of("work"));
    if (status.ok() && !assignment.token().empty()) {
      status = PutFile(runner.folder.Of("token"), assignment.token(), 0600);
    }
    if (status.ok()) {
      status = PutVariables(runner.folder.Of("env"), VariablesOf(assignment, runner.folder));
    }
    if (!status.ok()) {
      RemoveGroup(&runner);
      remove();
      return NodeFailure(std::string(status.message()));
    }
    WatchForRequests(&runner);
    std::optional<v1::AttemptEnd> failed = Spawn(assignment, &runner);
    if (failed.has_value()) RemoveGroup(&runner);
    // Leaves the end to the next agent, if this one ends before it has reported it.
    if (failed.has_value()) {
      RemoveVariables(runner);
      (void)WriteEnd(runner.folder.Of("end.json"), *failed);
    }
    runners_.insert_or_assign(key, std::move(runner));
    return failed;
  }

  // Makes the control group of an attempt and returns its folder; empty: the attempt has none.
  std::string MakeGroup(const std::string& name, const v1::NodeAssignment& assignment)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int cpus = std::max(1, assignment.spec().per_process().cpus()) * assignment.processes();
    const absl::StatusOr<std::string> group = groups_->MakeAttempt(name, cpus);
    if (TellLimits()) {
      MUSTER_LOG(Info) << groups_->ToString();
      Resync();
    }
    if (group.ok()) return *group;
    MUSTER_LOG(Warning) << "attempt " << name
                        << " runs without a control group: " << group.status().message();
    return "";
  }

  std::vector<std::string> RunnerArguments(const v1::NodeAssignment& assignment,
                                           const Runner& runner, const std::string& host) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const AttemptFolder& folder = runner.folder;
    const v1::JobSpec& spec = assignment.spec();
    std::vector<std::string> args = options_.runner;
    const auto add = [&](absl::string_view flag, const auto& value) {
      args.push_back(absl::StrCat("--", flag, "=", value));
    };
    add("job_name", absl::StrCat(assignment.job_id(), ".", assignment.attempt()));
    add("num_machines", assignment.num_nodes());
    add("num_processes", assignment.num_nodes() * assignment.processes());
    add("machine_rank", assignment.node_rank());
    add("host", host);
    add("attempt_dir", folder.path);
    add("attempt_lock", kLockDescriptor);
    if (memory_ != nullptr) add("memory_socket", memory_->address());
    add("earlier_attempts", std::max(0, assignment.attempt() - 1));
    // Not all earlier attempts have counted as restarts.
    const int left = assignment.restarts_left();
    const int64_t of_job =
        left > 0 ? std::max<int64_t>(0, assignment.attempt() - 1) + left : spec.max_restarts();
    add("restarts_of_job", std::max<int64_t>(0, of_job));
    if (left > 0) add("restarts_in_place", left);
    if (!runner.group.empty()) {
      add("control_group", runner.group);
      if (groups_->limits_memory() && spec.per_process().memory_bytes() > 0) {
        add("memory_limit", spec.per_process().memory_bytes());
      }
      if (groups_->limits_cpus()) add("cpu_limit", std::max(1, spec.per_process().cpus()));
    }
    if (!spec.working_directory().empty()) add("workdir", spec.working_directory());
    // The coordinator decides when a node is lost; its own outage must not end attempts.
    add("outage_tolerance", absl::FormatDuration(kOutageTolerance));
    add("env_file", folder.Of("env"));
    add("log_dir", folder.Of("logs"));
    add("stop_grace", absl::FormatDuration(rpc::FromProto(spec.stop_grace())));
    if (spec.has_hang_timeout()) {
      add("hang_timeout", absl::FormatDuration(rpc::FromProto(spec.hang_timeout())));
    }
    for (const int code : spec.user_error_codes()) add("user_error_code", code);
    if (!spec.mixed_precision().empty()) add("mixed_precision", spec.mixed_precision());
    if (spec.gradient_accumulation_steps() > 0) {
      add("gradient_accumulation_steps", spec.gradient_accumulation_steps());
    }
    // The attempt has no GPUs and must be told so: only then does Accelerate make one job of the
    // processes.
    if (spec.cpu() || assignment.gpus_size() == 0) args.push_back("--cpu");
    if (spec.debug()) args.push_back("--debug");
    if (!options_.info.rack().empty()) add("rack", options_.info.rack());
    if (!options_.info.nvlink_domain().empty()) add("nvlink_domain", options_.info.nvlink_domain());
    // An attempt has its own token, or else uses that of the node.
    const std::string token =
        assignment.token().empty() ? options_.channel.token_file : folder.Of("token");
    if (!token.empty()) add("token_file", token);
    args.push_back("--");
    args.insert(args.end(), spec.argv().begin(), spec.argv().end());
    return args;
  }

  // Returns the variables of the job's processes. The runner does not get them: an LD_LIBRARY_PATH,
  // for example, could keep it from starting.
  std::map<std::string, std::string> VariablesOf(const v1::NodeAssignment& assignment,
                                                 const AttemptFolder& folder) const {
    std::map<std::string, std::string> variables = ToMap(assignment.spec().env());
    if (assignment.spec().files_size() > 0) variables["MUSTER_FILES"] = folder.Of("work");
    if (options_.info.gpus_size() > 0) variables.erase("CUDA_VISIBLE_DEVICES");
    return variables;
  }

  std::optional<v1::AttemptEnd> Spawn(const v1::NodeAssignment& assignment, Runner* runner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (assignment.token().empty() && !options_.channel.token.empty()) {
      return NodeFailure(
          "the coordinator makes no tokens for attempts: it is older than this agent, whose token "
          "came by --token_file - and cannot be handed on");
    }
    std::map<std::string, std::string> environment = options_.environment;
    // These are settings of the node. The runner gets flags for those it needs, and a node must not
    // decide what all processes of a job have to agree on.
    for (const char* const name : {"MUSTER_TOKEN_FILE", "MUSTER_TLS_CA", "MUSTER_TLS_CERT",
                                   "MUSTER_TLS_KEY", "MUSTER_LEASE", "MUSTER_OUTAGE_TOLERANCE"}) {
      environment.erase(name);
    }
    // These come from the job or its defaults.
    for (const char* const name :
         {"MUSTER_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION", "MUSTER_CPU",
          "ACCELERATE_USE_CPU", "MUSTER_DEBUG", "ACCELERATE_DEBUG_MODE"}) {
      environment.erase(name);
    }
    if (options_.info.gpus_size() > 0) {
      std::vector<std::string> devices;
      for (const int gpu : assignment.gpus()) {
        devices.push_back(DeviceOf(gpu));
      }
      environment["CUDA_VISIBLE_DEVICES"] = absl::StrJoin(devices, ",");
      // The node counts its GPUs in this order; CUDA's default order begins with the fastest GPU.
      environment.try_emplace("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    }
    // Looked up for each attempt, since an agent may start before its network, and its address may
    // change.
    const std::string host = options_.host.empty() ? options_.own_address(address_) : options_.host;
    if (host.empty()) {
      return NodeFailure(absl::StrCat("this node has no address on a way to the coordinator at ",
                                      options_.coordinator,
                                      ": check its network, or start its agent with --host"));
    }
    std::vector<std::string> args = RunnerArguments(assignment, *runner, host);
    std::vector<std::string> words;
    for (const auto& [name, value] : environment) words.push_back(absl::StrCat(name, "=", value));
    std::vector<char*> argv, envp;
    for (std::string& arg : args) argv.push_back(arg.data());
    for (std::string& word : words) envp.push_back(word.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);

    // Uses a separate file description, so that the lock lives as long as the runner and the
    // processes that share it.
    const OwnedFd held(open(runner->folder.Of("lock").c_str(), O_RDWR | O_CLOEXEC));
    if (!held.open() || flock(held.get(), LOCK_EX | LOCK_NB) != 0) {
      return NodeFailure(absl::StrCat("cannot lock its folder: ", strerror(errno)));
    }
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    const std::string log = runner->folder.Of("runner.log");
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    // The copy does not have close-on-exec.
    posix_spawn_file_actions_adddup2(&actions, held.get(), kLockDescriptor);
    // The runner itself changes to the folder of the job, which may be on a file system that hangs.
    posix_spawn_file_actions_addchdir_np(&actions, runner->folder.Of("work").c_str());
    // Signals of the job are blocked in the runner from its first instruction: one that arrived
    // before its main would end it without a report.
    sigset_t kept, all;
    sigemptyset(&kept);
    for (const int signal : kJobSignals) sigaddset(&kept, signal);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes, &kept);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    const int error =
        posix_spawn(&runner->pid, args[0].c_str(), &actions, &attributes, argv.data(), envp.data());
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (error != 0) {
      runner->pid = -1;
      return NodeFailure(absl::StrCat("cannot start its runner: ", strerror(error)));
    }
    if (!runner->group.empty()) WorkerGroups::TakeRunner(groups_->At(runner->group), runner->pid);
    WatchPid(runner);
    MUSTER_LOG(Info) << "attempt " << BaseName(runner->folder.path) << " starts "
                     << assignment.processes() << " processes";
    return std::nullopt;
  }
  // The lock's descriptor in runners.
  static constexpr int kLockDescriptor = 200;

  // ---- what attempts have left

  // Runs on its own thread: an attempt may have left millions of files, and other attempts end, or
  // must be ended, meanwhile.
  void SweepLoop() {
    while (true) {
      Sweep();
      const absl::Time next = Clock::Real().Now() + kSweepEvery;
      MutexLock lock(&mu_);
      while (!sweep_ends_ && Clock::Real().Now() < next) {
        changed_.WaitWithTimeout(&mu_, next - Clock::Real().Now());
      }
      if (sweep_ends_) return;
    }
  }
  // Removes folders whose logs are no longer needed.
  void Sweep() {
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(Attempts());
    if (!names.ok()) return;
    for (const std::string& name : *names) {
      const AttemptFolder folder{JoinPath(Attempts(), name)};
      {
        MutexLock lock(&mu_);
        if (sweep_ends_) return;
        const bool known = std::any_of(runners_.begin(), runners_.end(), [&](const auto& entry) {
          return entry.second.folder.path == folder.path;
        });
        if (known) continue;
      }
      struct stat info;
      // A folder without a record is left by an agent that was killed while making it.
      if (stat(folder.Of("record.json").c_str(), &info) != 0 &&
          (errno != ENOENT || stat(folder.path.c_str(), &info) != 0)) {
        continue;
      }
      if (absl::Now() - absl::FromTimeT(info.st_mtime) < options_.keep_logs) continue;
      const absl::Status status = options_.remove_tree(folder.path);
      if (!status.ok()) MUSTER_LOG(Warning) << status.message();
    }
  }

  // ---- the calls

  // Called when the node has news: a held call is made again.
  void Resync() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (call_ != nullptr) call_->TryCancel();
    changed_.SignalAll();
  }

  // Blocks until there is a connection, which the channel makes as soon as the coordinator is
  // reachable, or this service ends.
  void AwaitConnection() {
    do {
      MutexLock lock(&mu_);
      if (ended_) return;
      sync_turn_ = Clock::Real().Now();
    } while (!channel_->WaitForConnected(std::chrono::system_clock::now() +
                                         absl::ToChronoMilliseconds(kConnectedPoll)));
  }

  void SyncLoop() {
    const std::unique_ptr<v1::Nodes::Stub> stub = v1::Nodes::NewStub(channel_);
    std::optional<Backoff> away;  // while the coordinator does not answer
    while (true) {
      // The first call that fails says why. Later calls wait for the connection before the request
      // is made, because a request says how long ago things happened.
      if (away.has_value()) AwaitConnection();
      v1::SyncNodeRequest request;
      grpc::ClientContext context;
      uint64_t sent;
      {
        MutexLock lock(&mu_);
        if (ended_) return;
        request.set_node(options_.node);
        request.set_node_uid(uid_);
        *request.mutable_info() = info_;
        request.mutable_info()->set_log_level(rpc::ToProto(GetLogLevel()));
        request.set_seen_version(seen_version_);
        sequence_ = std::max(sequence_ + 1, static_cast<uint64_t>(absl::ToUnixMicros(absl::Now())));
        request.set_sequence(sequence_);
        attempts_.FillReports(Clock::Real().Now(), &request);
        FillHeldJobs(&request);
        sent = attempts_.version();
        call_ = &context;
        sync_turn_ = Clock::Real().Now();
      }
      v1::SyncNodeReply reply;
      rpc::SetTimeout(context, kSyncTimeout);
      const absl::Status status = rpc::FromGrpc(stub->Sync(&context, request, &reply));
      MutexLock lock(&mu_);
      call_ = nullptr;
      sync_turn_ = Clock::Real().Now();
      if (ended_) return;
      // A call that was cancelled to report news says nothing about the coordinator.
      if (status.ok() || sent == attempts_.version()) {
        if (std::exchange(answers_, status.ok()) != answers_) Wake();
      }
      if (status.ok()) {
        if (away.has_value()) {
          MUSTER_LOG(Info) << "the coordinator at " << options_.coordinator << " answers again";
        }
        away.reset();
        seen_version_ = reply.version();
        for (const v1::LogQuery& query : reply.queries()) AddQuery(query);
        if (reply.has_log_level()) Obey(reply.log_level());
        Do(attempts_.Apply(reply, Clock::Real().Now()));
        for (const std::string& job : reply.ended_jobs()) {
          memory_terms_.Ended(MemoryOf(reply.header().cluster_id(), job));
        }
        Wake();
        continue;
      }
      if (sent != attempts_.version()) continue;  // cancelled to report news
      // While attempts run, keeps trying, because the coordinator must be able to end them.
      if (IsRefusal(status) && !attempts_.AnyRunning()) {
        refused_ = status;
        Wake();
        return;
      }
      if (!away.has_value()) {
        MUSTER_LOG(Warning) << "the coordinator at " << options_.coordinator
                            << " does not answer: " << status.message()
                            << "; attempts continue, and this agent keeps trying";
        seen_version_ = 0;
        away.emplace(kAwayLeast, kAwayMost);
      }
      changed_.WaitWithTimeout(&mu_, away->Next(RandomShare(), rpc::RetryAfter(status)));
    }
  }
  // Sets the log level. The next call reports the level that is in force then.
  void Obey(const v1::LogLevelOrder& order) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto level = static_cast<v1::LogLevel>(order.level());
    if (order.id() == log_level_order_ || level < v1::LOG_LEVEL_DEBUG ||
        level > v1::LOG_LEVEL_ERROR) {
      return;
    }
    log_level_order_ = order.id();
    const absl::Duration span =
        order.has_for_() ? rpc::FromProto(order.for_()) : absl::InfiniteDuration();
    log_level_.Set(rpc::FromProto(level), span);
    MUSTER_LOG(Info) << "an admin has set the log level to " << rpc::LogLevelName(level)
                     << (order.has_for_() ? absl::StrCat(" for ", absl::FormatDuration(span)) : "");
  }
  static bool IsRefusal(const absl::Status& status) {
    switch (status.code()) {
      case absl::StatusCode::kInvalidArgument:
      case absl::StatusCode::kPermissionDenied:
      case absl::StatusCode::kUnauthenticated:
      case absl::StatusCode::kAlreadyExists:
      case absl::StatusCode::kUnimplemented:
        return true;
      default:
        return false;
    }
  }

  // ---- logs

  struct OpenQuery {
    v1::LogQuery query;
    absl::Time until;
    std::optional<absl::Time> since;  // by the wall clock
  };

  void AddQuery(const v1::LogQuery& query) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    OpenQuery& open = queries_.emplace_back(
        OpenQuery{query, Clock::Real().Now() + rpc::FromProto(query.wait()), std::nullopt});
    if (query.has_since_ago()) {
      open.since = Clock::Real().WallNow() - rpc::FromProto(query.since_ago());
    }
    changed_.SignalAll();
  }

  void LogLoop() {
    const std::unique_ptr<v1::Nodes::Stub> stub = v1::Nodes::NewStub(channel_);
    while (true) {
      std::deque<OpenQuery> open;
      {
        MutexLock lock(&mu_);
        while (!ended_ && queries_.empty()) changed_.Wait(&mu_);
        if (ended_) return;
        open.swap(queries_);
      }
      std::deque<OpenQuery> later;
      for (OpenQuery& query : open) {
        std::optional<v1::AnswerLogRequest> answer = Answer(query);
        if (!answer.has_value()) {
          later.push_back(std::move(query));
          continue;
        }
        grpc::ClientContext context;
        rpc::SetTimeout(context, kAnswerTimeout);
        v1::AnswerLogReply reply;
        // If the answer is lost, the reader asks again.
        (void)stub->AnswerLog(&context, *answer, &reply);
      }
      if (later.empty()) continue;
      MutexLock lock(&mu_);
      for (OpenQuery& query : later) queries_.push_back(std::move(query));
      if (!ended_) changed_.WaitWithTimeout(&mu_, kLogPoll);
    }
  }

  // Returns nullopt if there is no answer yet.
  std::optional<v1::AnswerLogRequest> Answer(const OpenQuery& open) {
    const v1::LogQuery& query = open.query;
    const AttemptKey key(query.job_id(), query.attempt());
    v1::AnswerLogRequest answer;
    answer.set_node(options_.node);
    answer.set_query_id(query.query_id());
    std::string path;
    bool running = false;
    if (absl::StrContains(key.first, "/")) {
      answer.set_error("this names no attempt");
      return answer;
    }
    {
      MutexLock lock(&mu_);
      running = attempts_.IsRunning(key);
      path = JoinPath(Attempts(), FolderName(key));
      const auto it = runners_.find(key);
      int first_rank = 0;
      if (it != runners_.end()) {
        first_rank = it->second.first_rank;
      } else {
        // The attempt is forgotten, but its logs are kept: the lowest rank there is this node's
        // first.
        first_rank = FirstRankIn(JoinPath(path, "logs/attempt_0"));
      }
      path = JoinPath(
          path, absl::StrCat("logs/attempt_0/rank_", first_rank + query.local_rank(), ".log"));
    }
    int64_t offset = query.offset();
    if (open.since.has_value()) {
      const absl::StatusOr<int64_t> at = LogOffsetAt(path, *open.since);
      if (at.ok()) offset = *at;
    }
    const absl::StatusOr<LogPiece> piece =
        ReadLogPiece(path, offset, query.tail_lines(), query.max_bytes());
    const bool late = Clock::Real().Now() >= open.until;
    if (piece.ok() && (!piece->data.empty() || !running || late)) {
      answer.set_data(piece->data);
      answer.set_offset(piece->offset);
      answer.set_next_offset(piece->next_offset);
      answer.set_ended(!running && piece->data.empty());
      return answer;
    }
    // The file does not exist before its process starts.
    if (!piece.ok() && running && absl::IsNotFound(piece.status())) {
      if (!late) return std::nullopt;
      answer.set_next_offset(std::max<int64_t>(0, query.offset()));
      return answer;
    }
    // The process was never started, or the log was removed.
    if (!piece.ok() && absl::IsNotFound(piece.status())) {
      answer.set_ended(true);
      return answer;
    }
    if (!piece.ok()) {
      answer.set_error(OneLine(piece.status().message()));
      return answer;
    }
    return std::nullopt;
  }

  static int FirstRankIn(const std::string& folder) {
    int first = -1;
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
    if (!names.ok()) return 0;
    for (const std::string& name : *names) {
      int rank = 0;
      absl::string_view text = name;
      if (absl::ConsumePrefix(&text, "rank_") && absl::ConsumeSuffix(&text, ".log") &&
          absl::SimpleAtoi(text, &rank) && (first < 0 || rank < first)) {
        first = rank;
      }
    }
    return std::max(first, 0);
  }

  const NodeServiceOptions options_;
  ServiceNotifier notifier_;  // used by the main loop
  const OwnedFd wake_;
  const OwnedFd folder_events_;  // watches the folders of attempts
  OwnedFd lock_;
  uint64_t uid_ = 0;
  rpc::Address address_;  // the coordinator's
  std::shared_ptr<grpc::Channel> channel_;
  // Null: no socket. Must not be destroyed under mu_, which its thread takes.
  std::unique_ptr<MemoryHolder> memory_;

  Mutex mu_;
  CondVar changed_;
  v1::NodeInfo info_ ABSL_GUARDED_BY(mu_);
  std::optional<NodeGroups> groups_ ABSL_GUARDED_BY(mu_);  // set by Open
  NodeAttempts attempts_ ABSL_GUARDED_BY(mu_);
  std::map<AttemptKey, Runner> runners_ ABSL_GUARDED_BY(mu_);
  std::map<AttemptKey, int> unsent_ ABSL_GUARDED_BY(mu_);  // signals to send
  std::map<AttemptKey, NodeAttempts::Orders::Restart> unwritten_ ABSL_GUARDED_BY(mu_);
  bool look_ ABSL_GUARDED_BY(mu_) = true;  // a runner may have made a request
  // Whether folder_events_ reports every new file.
  bool told_of_files_ ABSL_GUARDED_BY(mu_) = folder_events_.open();
  MemoryTerms memory_terms_ ABSL_GUARDED_BY(mu_);
  std::deque<OpenQuery> queries_ ABSL_GUARDED_BY(mu_);
  uint64_t seen_version_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t sequence_ ABSL_GUARDED_BY(mu_) = 0;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mu_) = nullptr;
  int stopped_ ABSL_GUARDED_BY(mu_) = 0;
  bool sweep_ends_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool answers_ ABSL_GUARDED_BY(mu_) = false;                         // the coordinator answers
  absl::Time sync_turn_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();  // the time of the last call
  absl::Status refused_ ABSL_GUARDED_BY(mu_);
  uint64_t log_level_order_ ABSL_GUARDED_BY(mu_) = 0;  // the last order
  LogLevelControl log_level_;
};

}  // namespace

absl::Status RunNodeService(const NodeServiceOptions& options) {
  return NodeService(options).Run();
}

}  // namespace muster::agent
