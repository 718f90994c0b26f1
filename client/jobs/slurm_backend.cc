#include "client/jobs/slurm_backend.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/home_path.h"
#include "base/last_lines.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "client/jobs/follow_log.h"
#include "client/jobs/job_file.h"
#include "client/jobs/slurm_script.h"
#include "proto/end_class.h"
#include "proto/job_limits.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

constexpr int64_t kMaxRecord = 1 << 20;
constexpr int64_t kMaxChunk = 256 << 10;
constexpr int64_t kEndOfScriptLog = 64 << 10;  // read for each job that has failed

// SLURM's facts about a job that it still knows.
struct Queued {
  std::string state;  // "RUNNING"
  std::string nodes;
  std::string reason;
};

// A start that the script has recorded.
struct Start {
  int restart = 0;
  absl::Time started = absl::InfinitePast();
  std::vector<std::string> nodes = {};
  absl::Time ended = absl::InfinitePast();
  std::optional<int> code = {};
  std::string why = {};
};

struct Records {
  int64_t id = 0;
  JobSpec spec = {};
  std::string key = {};
  int processes_per_node = 0;
  absl::Time submitted = absl::InfinitePast();
  std::vector<Start> starts = {};
};

absl::Status WrongState(const Job& job, absl::string_view what) {
  return rpc::ErrorWithReason(absl::StatusCode::kFailedPrecondition,
                              absl::StrCat("job ", job.id, " ", what), v1::ERROR_REASON_JOB_STATE);
}

absl::Status KeyReused(const std::string& key, const std::string& job) {
  return rpc::ErrorWithReason(absl::StatusCode::kFailedPrecondition,
                              absl::StrCat("the idempotency_key ", key, " was used for job ", job,
                                           ", which is another one: use a new key"),
                              v1::ERROR_REASON_KEY_REUSED);
}

// Appends without a temporary name, because others append to the file, too. Syncs it: a file system
// of other machines reports only then that it has no room.
absl::Status AppendLine(const std::string& path, absl::string_view line) {
  const OwnedFd file(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  const auto failed = [&](const char* what) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
  };
  if (!file.open()) return failed("open");
  while (!line.empty()) {
    const ssize_t n = write(file.get(), line.data(), line.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("write");
    line.remove_prefix(static_cast<size_t>(n));
  }
  return TEMP_FAILURE_RETRY(fsync(file.get())) == 0 ? absl::OkStatus() : failed("sync");
}

std::string LastLine(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  return Printable(text.substr(text.rfind('\n') + 1), 1000);
}

// Returns the line of muster launch about the end or, without one, the last line, which is often
// srun's.
std::string LineAboutTheEnd(const std::string& log) {
  constexpr absl::string_view kLaunch = "muster launch: ";
  const size_t at = log.rfind(absl::StrCat("\n", kLaunch));
  if (at != std::string::npos) return Printable(FirstLine(absl::string_view(log).substr(at)), 1000);
  return absl::StartsWith(log, kLaunch) ? Printable(FirstLine(log), 1000) : LastLine(log);
}

// Returns the state while SLURM knows the job.
JobState StateOf(const Queued& queued) {
  const std::string& state = queued.state;
  if (state == "PENDING" || absl::StartsWith(state, "REQUEUE")) {
    // "JobHeldUser", "JobHeldAdmin" and "job requeued in held state".
    return absl::StrContains(absl::AsciiStrToLower(queued.reason), "held") ||
                   state == "REQUEUE_HOLD"
               ? JobState::kSuspended
               : JobState::kQueued;
  }
  if (state == "CONFIGURING") return JobState::kStarting;
  if (state == "RUNNING") return JobState::kRunning;
  if (state == "COMPLETING" || state == "STAGE_OUT" || state == "SIGNALING") {
    return JobState::kStopping;
  }
  if (state == "SUSPENDED" || state == "STOPPED" || state == "SPECIAL_EXIT") {
    return JobState::kSuspended;
  }
  if (state == "COMPLETED") return JobState::kSucceeded;
  // sacct adds "by UID".
  if (absl::StartsWith(state, "CANCELLED")) return JobState::kCancelled;
  return JobState::kFailed;
}

v1::EndClass EndClassOf(const Start& start) {
  switch (*start.code) {
    case kExitOk:
      return v1::END_CLASS_SUCCEEDED;
    case kExitJobFailed:
      return v1::END_CLASS_PROCESS_FAILED;
    case kExitUsage:
    case kExitNotExecutable:
    case kExitProgramMissing:
      return v1::END_CLASS_USER_ERROR;
    default:
      return v1::END_CLASS_NODE_FAILED;
  }
}

bool WasStopped(const Start& start) { return absl::StartsWith(start.why, "stopped"); }

// Whether the script has ended for good: it has not put the job back into the queue.
bool IsFinal(const Start& start) {
  return start.code.has_value() && !WasStopped(start) &&
         !absl::StartsWith(start.why, "failed with ");
}

// Files that are read as one, with the lengths that they had when the object was made.
class Log {
 public:
  explicit Log(std::vector<std::string> paths) : paths_(std::move(paths)) {
    for (const std::string& path : paths_) {
      struct stat file {};
      sizes_.push_back(stat(path.c_str(), &file) == 0 ? int64_t{file.st_size} : 0);
      size_ += sizes_.back();
    }
  }
  int64_t size() const { return size_; }

  // Reads at most `max_bytes` from `offset` on.
  std::string Read(int64_t offset, int64_t max_bytes) const {
    std::string text;
    for (size_t i = 0; i < paths_.size() && max_bytes > 0; ++i) {
      const int64_t count = std::min(max_bytes, sizes_[i] - offset);
      if (count <= 0) {
        offset -= sizes_[i];
        continue;
      }
      std::string part(static_cast<size_t>(count), '\0');
      std::ifstream file(paths_[i], std::ios::binary);
      file.seekg(offset);
      file.read(part.data(), count);
      part.resize(static_cast<size_t>(file.gcount()));
      text += part;
      max_bytes -= count;
      offset = 0;
    }
    return text;
  }

  // Returns the offset at which the last `lines` lines begin.
  int64_t Tail(int lines) const {
    return *FindLastLines(0, size_, lines,
                          [this](int64_t from, int64_t bytes) -> absl::StatusOr<std::string> {
                            return Read(from, bytes);
                          });
  }

 private:
  const std::vector<std::string> paths_;
  std::vector<int64_t> sizes_;
  int64_t size_ = 0;
};

class Slurm final : public JobBackend {
 public:
  explicit Slurm(SlurmOptions options) : options_(std::move(options)) {}

  absl::StatusOr<Submission> submit(const JobSpec& spec, const SubmitOptions& given) override {
    MUSTER_RETURN_IF_ERROR(CheckSlurmJob(spec));
    MUSTER_RETURN_IF_ERROR(CheckSbatchOptions(options_.sbatch_options));
    MUSTER_RETURN_IF_ERROR(CheckRecord(spec));
    const std::string key = given.idempotency_key.empty() ? RandomHex() : given.idempotency_key;
    // The key is part of a comment, of which squeue prints a line.
    if (key.size() > 128 || key.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"
                                                  "WXYZ0123456789-_.") != std::string::npos) {
      return absl::InvalidArgumentError(
          "idempotency_key: use at most 128 letters, digits, '-', '_' and '.'");
    }
    MUSTER_RETURN_IF_ERROR(MakeFolder());
    // Two calls with one key make one job. Held until the record exists.
    OwnedFd lock;
    if (!given.idempotency_key.empty()) {
      lock = OwnedFd(open(Path("lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
      if (!lock.open() || flock(lock.get(), LOCK_EX) != 0) {
        return absl::ErrnoToStatus(errno, absl::StrCat("cannot lock ", Path("lock")));
      }
    }
    if (!given.idempotency_key.empty() && !given.dry_run) {
      MUSTER_ASSIGN_OR_RETURN(std::optional<Submission> former, Former(spec, key));
      if (former.has_value()) return *std::move(former);
    }
    MUSTER_ASSIGN_OR_RETURN(const SlurmLayout layout, Layout(spec));
    MUSTER_ASSIGN_OR_RETURN(
        const std::string script,
        RenderSlurmScript(
            spec, layout,
            {.muster = options_.muster, .folder = options_.folder, .key = Comment(spec, key)}));
    const std::string path = Path(absl::StrCat("submit-", RandomHex(), ".sbatch"));
    MUSTER_RETURN_IF_ERROR(WriteSecretFile(path, script));
    const absl::StatusOr<Submission> made =
        given.dry_run ? Plan(spec, layout, path, script) : Submit(spec, layout, path, key);
    unlink(path.c_str());
    return made;
  }

  absl::StatusOr<Job> get(const std::string& job) override { return Get(job, Ask::kAlways); }

  absl::StatusOr<std::vector<Job>> list(const ListOptions& filter) override {
    std::vector<Job> jobs;
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> ids, Ids());
    if (ids.empty() || (!filter.owner.empty() && filter.owner != options_.user)) return jobs;
    MUSTER_ASSIGN_OR_RETURN(const auto queue, Queue());
    for (const int64_t id : ids) {
      // A record that is just being removed, or is damaged, hides no other.
      const absl::StatusOr<Records> records = Load(id);
      if (!records.ok()) continue;
      MUSTER_ASSIGN_OR_RETURN(Job job, View(*records, queue));
      if (!absl::StartsWith(job.id, filter.id_prefix)) continue;
      if (!filter.states.empty() &&
          std::find(filter.states.begin(), filter.states.end(), job.state) == filter.states.end()) {
        continue;
      }
      jobs.push_back(std::move(job));
    }
    return jobs;
  }

  absl::StatusOr<Job> watch(const std::string& job, const std::function<bool(const Job&)>& changed,
                            absl::Duration timeout) override {
    return Watch(job, changed, timeout, Ask::kAlways);
  }

  absl::Status watch_all(const ListOptions& options,
                         const std::function<bool(const JobUpdate&)>& changed) override {
    std::map<std::string, std::string> shown;
    absl::Time give_up = options_.clock->Now() + options_.patience;
    while (true) {
      const absl::StatusOr<std::vector<Job>> jobs = list(options);
      if (!jobs.ok()) {
        if (!absl::IsUnavailable(jobs.status()) || options_.clock->Now() >= give_up)
          return jobs.status();
        Pause();
        continue;
      }
      give_up = options_.clock->Now() + options_.patience;
      std::map<std::string, std::string> now;
      for (const Job& job : *jobs) {
        std::string& text = now[job.id];
        text = absl::StrCat(JobStateName(job.state), job.why, job.attempts);
        const auto before = shown.find(job.id);
        if (before != shown.end() && before->second == text) continue;
        if (!changed({.id = job.id, .job = job})) return absl::OkStatus();
      }
      for (const auto& [id, text] : shown) {
        if (now.count(id) == 0 && !changed({.id = id})) return absl::OkStatus();
      }
      shown = std::move(now);
      Pause();
    }
  }

  absl::StatusOr<Job> cancel(const std::string& name, const std::string& why) override {
    MUSTER_ASSIGN_OR_RETURN(const Job job, get(name));
    if (job.state == JobState::kCancelled) {
      RemoveRunFolder(job);
      return job;
    }
    if (HasEnded(job.state)) return WrongState(job, "has ended");
    MUSTER_RETURN_IF_ERROR(Marked(job, "cancel", why, {"scancel", Number(job)}));
    unlink(MarkPath(job, "suspend").c_str());
    absl::StatusOr<Job> cancelled = get(name);
    if (cancelled.ok() && HasEnded(cancelled->state)) RemoveRunFolder(job);
    return cancelled;
  }

  absl::StatusOr<Job> suspend(const std::string& name, const std::string& why) override {
    MUSTER_ASSIGN_OR_RETURN(const Job job, get(name));
    if (HasEnded(job.state)) return WrongState(job, "has ended");
    if (job.state == JobState::kSuspended) return job;
    if (job.state == JobState::kQueued &&
        Marked(job, "suspend", why, {"scontrol", "hold", Number(job)}).ok()) {
      return get(name);
    }
    // The job's script saves and puts it back into the queue, where it is held. A job that was
    // queued may have started.
    MUSTER_RETURN_IF_ERROR(
        Marked(job, "suspend", why, {"scancel", "--batch", "--signal=TERM", Number(job)}));
    return get(name);
  }

  absl::StatusOr<Job> resume(const std::string& name) override {
    MUSTER_ASSIGN_OR_RETURN(const Job job, get(name));
    if (job.state == JobState::kSucceeded) {
      return WrongState(job, "has succeeded: submit it again to run it again");
    }
    if (HasEnded(job.state)) return WrongState(job, "has ended: retry it to run it again");
    unlink(MarkPath(job, "suspend").c_str());
    if (job.state == JobState::kSuspended) {
      MUSTER_RETURN_IF_ERROR(Command({"scontrol", "release", Number(job)}).status());
    }
    return get(name);
  }

  absl::StatusOr<Job> retry(const std::string& name) override {
    MUSTER_ASSIGN_OR_RETURN(const Job job, get(name));
    if (job.state == JobState::kSucceeded) {
      return WrongState(job, "has succeeded: submit it again to run it again");
    }
    if (!HasEnded(job.state)) return job;
    unlink(MarkPath(job, "suspend").c_str());
    if (const absl::Status queued = Command({"scontrol", "requeue", Number(job)}).status();
        !queued.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat(queued.message(),
                       "; SLURM keeps jobs for minutes after their end: submit it again with "
                       "muster submit --on slurm ",
                       Path(absl::StrCat(Number(job), ".job"))));
    }
    unlink(MarkPath(job, "cancel").c_str());
    // The job may have been held when it was cancelled.
    (void)Command({"scontrol", "release", Number(job)});
    return get(name);
  }

  absl::StatusOr<Job> resize(const std::string& name, int, int, const std::string&) override {
    MUSTER_RETURN_IF_ERROR(Find(name).status());
    return absl::UnimplementedError(
        "SLURM does not change the size of a job: cancel it and submit it again with another "
        "number of processes, or submit it with a range, of which it gets what is free");
  }

  absl::Status remove(const std::string& name) override {
    MUSTER_ASSIGN_OR_RETURN(const Job job, get(name));
    if (!HasEnded(job.state) && job.state != JobState::kUnknown) {
      return WrongState(job, "has not ended: cancel it first");
    }
    const std::string number = Number(job);
    MUSTER_RETURN_IF_ERROR(RemoveTree(Path(number + ".logs")));
    // A script that was killed leaves its key and token.
    MUSTER_RETURN_IF_ERROR(RemoveTree(Path("run/" + number)));
    // The record is removed last.
    for (const char* const kind : {".log", ".events", ".cancel", ".suspend", ".job"}) {
      if (unlink(Path(number + kind).c_str()) != 0 && errno != ENOENT) {
        return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove ", Path(number + kind)));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<LogChunk> read_log(const std::string& name, const LogOptions& options) override {
    MUSTER_ASSIGN_OR_RETURN(const Job job, Get(name, Ask::kUnlessItRuns));
    return ReadLog(job, options);
  }

  absl::Status follow_log(const std::string& name, const LogOptions& given,
                          const std::function<bool(const LogChunk&)>& chunk) override {
    const auto watch_it = [&](const std::function<bool(const Job&)>& changed) {
      return Watch(name, changed, absl::InfiniteDuration(), Ask::kSeldom);
    };
    if (given.attempt != 0) {
      // If the first attempt has yet to begin, waits for it.
      MUSTER_ASSIGN_OR_RETURN(const Job begun,
                              watch_it([](const Job& now) { return now.attempts == 0; }));
      if (begun.attempts == 0) return absl::OkStatus();
    }
    const auto read = [&](const LogOptions& options) -> absl::StatusOr<LogChunk> {
      MUSTER_ASSIGN_OR_RETURN(const Job job, GetPatiently(name, Ask::kUnlessItRuns));
      absl::StatusOr<LogChunk> part = ReadLog(job, options);
      if (part.ok() && part->data.empty() && !part->ended) Pause();
      return part;
    };
    // Its calls have their own patience.
    const auto never = [](absl::Duration) { return false; };
    return FollowLog(
        given, {.watch = watch_it, .read = read, .patience = absl::ZeroDuration(), .pause = never},
        chunk);
  }
  void stop() override { stopped_.Notify(); }

 private:
  std::string Path(const std::string& name) const { return JoinPath(options_.folder, name); }
  static std::string Number(const Job& job) { return job.id.substr(job.id.rfind('-') + 1); }
  std::string MarkPath(const Job& job, const std::string& verb) const {
    return Path(absl::StrCat(Number(job), ".", verb));
  }
  // For a job whose script has ended. The script removes the folder, with the job's variables, key
  // and token; but a script that was killed, and waited in the queue to start again, does not.
  // `remove` finds what is left.
  void RemoveRunFolder(const Job& job) { (void)RemoveTree(Path("run/" + Number(job))); }
  // Records what a person wants, which the script reads, and runs the command; the record stays
  // only if the command succeeded.
  absl::Status Marked(const Job& job, const std::string& verb, const std::string& why,
                      const std::vector<std::string>& command) const {
    const std::string mark = MarkPath(job, verb);
    const bool new_one = !PathExists(mark);
    MUSTER_RETURN_IF_ERROR(WriteFileAtomically(mark, absl::StrCat(why, "\n")));
    absl::Status done = Command(command).status();
    if (!done.ok() && new_one) unlink(mark.c_str());
    return done;
  }

  // The logs of a job are followed by one thread per rank, possibly thousands: they share SLURM's
  // answers, of which there is one per `poll`.
  enum class Ask {
    kAlways,
    kSeldom,
    // For facts about a start that SLURM's last answer may not have known.
    kUnlessItRuns,
  };
  absl::StatusOr<Job> Get(const std::string& name, Ask ask) {
    if (stopped_.HasBeenNotified()) return absl::CancelledError("the call was cancelled");
    MUSTER_ASSIGN_OR_RETURN(const Records records, Find(name));
    if (ask == Ask::kAlways) {
      MUSTER_ASSIGN_OR_RETURN(const auto queue, Queue());
      return View(records, queue);
    }
    MUSTER_ASSIGN_OR_RETURN(const auto queue, RecentQueue(records.id, ask));
    return View(records, *queue);
  }
  using QueueAnswer = std::shared_ptr<const std::map<int64_t, Queued>>;
  absl::StatusOr<QueueAnswer> RecentQueue(int64_t id, Ask ask) {
    // While one thread asks, the others wait for the answer. An answer that was requested since
    // they came is as new as their own would be.
    const absl::Time came = options_.clock->Now();
    MutexLock lock(&mu_);
    if (asked_ > came) return recent_;
    if (recent_.ok() && options_.clock->Now() < asked_ + options_.poll) {
      const std::map<int64_t, Queued>& known = **recent_;
      const auto job = known.find(id);
      const bool runs = job != known.end() && job->second.state == "RUNNING";
      if (runs || ask == Ask::kSeldom) return recent_;
    }
    asked_ = options_.clock->Now();
    absl::StatusOr<std::map<int64_t, Queued>> queue = Queue();
    // An error is shared, too: otherwise thousands of ranks, one after the other, would each wait
    // for a controller that is away, for hours in total.
    if (queue.ok()) {
      recent_ = std::make_shared<const std::map<int64_t, Queued>>(*std::move(queue));
    } else {
      recent_ = queue.status();
    }
    return recent_;
  }

  absl::StatusOr<Job> Watch(const std::string& job, const std::function<bool(const Job&)>& changed,
                            absl::Duration timeout, Ask ask) {
    const absl::Time deadline = options_.clock->Now() + timeout;
    std::string shown;
    while (true) {
      MUSTER_ASSIGN_OR_RETURN(Job now, GetPatiently(job, ask));
      const std::string text = absl::StrCat(JobStateName(now.state), now.why, now.attempts);
      if (text != shown && !changed(now)) return now;
      shown = text;
      if (HasEnded(now.state)) return now;
      if (now.state == JobState::kUnknown) return absl::UnavailableError(now.why);
      if (options_.clock->Now() >= deadline) {
        return absl::DeadlineExceededError(absl::StrCat("job ", job, " is ",
                                                        JobStateName(now.state), " after ",
                                                        absl::FormatDuration(timeout)));
      }
      Pause();
    }
  }

  // A restart of the controller does not end a watch.
  absl::StatusOr<Job> GetPatiently(const std::string& name, Ask ask) {
    const absl::Time give_up = options_.clock->Now() + options_.patience;
    while (true) {
      absl::StatusOr<Job> job = Get(name, ask);
      if (!absl::IsUnavailable(job.status()) || options_.clock->Now() >= give_up) return job;
      Pause();
    }
  }

  // Returns OK if the record of this job can be read again.
  static absl::Status CheckRecord(const JobSpec& spec) {
    const std::string text = JobFileText(spec);
    if (text.size() > kMaxSpecBytes) {
      return absl::InvalidArgumentError(absl::StrCat("the specification has ", text.size(),
                                                     " bytes: at most ", kMaxSpecBytes,
                                                     "; put large values into a file"));
    }
    const absl::StatusOr<ResolvedJob> read = ResolveJob(text, "the job", {}, {});
    if (!read.ok()) return read.status();
    // Bytes that are not text do not survive.
    if (JobFileText(read->spec) == text && read->spec.command == spec.command &&
        read->spec.env == spec.env && read->spec.workdir == spec.workdir) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        "the job has text that a job file cannot hold: use UTF-8 without control characters");
  }
  // Identifies a submission: its key, and a digest of its content.
  static std::string Comment(const JobSpec& spec, const std::string& key) {
    return absl::StrCat(key, ":", absl::BytesToHexString(Sha256(JobFileText(spec))).substr(0, 16));
  }
  void Pause() const { stopped_.WaitForNotificationWithTimeout(options_.poll); }

  absl::Status MakeFolder() const {
    MUSTER_RETURN_IF_ERROR(MakeDirectories(ParentPath(options_.folder)));
    // Variables and logs are private to the user.
    if (mkdir(options_.folder.c_str(), 0700) != 0 && errno != EEXIST) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", options_.folder));
    }
    return absl::OkStatus();
  }

  // Returns the output of a SLURM command that has to succeed.
  absl::StatusOr<ProgramOutput> Command(const std::vector<std::string>& argv,
                                        std::vector<std::string> without = {}) const {
    // All commands must ask the same controller: this machine's.
    without.emplace_back("SLURM_CLUSTERS");
    const absl::StatusOr<ProgramOutput> output = options_.run(argv, without);
    if (absl::IsNotFound(output.status()) || absl::IsPermissionDenied(output.status())) {
      return absl::UnavailableError(absl::StrCat(
          argv[0], " of SLURM is not on this machine: use a login node of the cluster"));
    }
    if (!output.ok() || output->exit_code == 0) return output;
    const std::string said(FirstLine(output->err.empty() ? output->out : output->err));
    const std::string message =
        said.empty() ? absl::StrCat(argv[0], " ended with exit code ", output->exit_code)
                     : absl::StrCat("SLURM: ", Printable(said, 1000));
    // SLURM's messages for a controller that does not answer.
    for (const char* const away : {"Unable to contact", "Socket timed out", "Connection refused",
                                   "configuration source", "Zero Bytes were transmitted"}) {
      if (absl::StrContains(output->err, away)) return absl::UnavailableError(message);
    }
    return absl::FailedPreconditionError(message);
  }

  absl::StatusOr<SlurmLayout> Layout(const JobSpec& spec) const {
    std::vector<std::string> argv = {"sinfo", "-h", "-N", "-o", "%N|%c|%m|%G|%P|%t"};
    const size_t without = argv.size();
    const std::vector<std::string>& options = options_.sbatch_options;
    for (const std::string& option : options) {
      if (absl::StartsWith(option, "--partition=") ||
          (absl::StartsWith(option, "-p") && option.size() > 2)) {
        argv.push_back(option);
      }
    }
    if (argv.size() == without && !options_.partition.empty()) {
      argv.push_back(absl::StrCat("--partition=", options_.partition));
    }
    MUSTER_ASSIGN_OR_RETURN(const ProgramOutput output, Command(argv));
    MUSTER_ASSIGN_OR_RETURN(std::vector<SlurmNode> nodes, ParseSlurmNodes(output.out));
    const auto is_default = [](const SlurmNode& node) { return node.in_default_partition; };
    if (argv.size() == without && std::any_of(nodes.begin(), nodes.end(), is_default)) {
      std::erase_if(nodes, std::not_fn(is_default));
    }
    if (nodes.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("SLURM has no nodes here: ", absl::StrJoin(argv, " "), " lists none"));
    }
    std::vector<SlurmNode> up = nodes;
    std::erase_if(up, [](const SlurmNode& node) { return !node.takes_jobs; });
    const absl::StatusOr<SlurmLayout> now = ChooseSlurmLayout(spec, up);
    absl::StatusOr<SlurmLayout> later = ChooseSlurmLayout(spec, nodes);
    // If too few nodes are up now, the job waits in the queue until the others are back; even a job
    // that could do with fewer processes may by then get as many as it asks for.
    const auto most = [](const SlurmLayout& layout) {
      return layout.processes_per_node * layout.max_nodes;
    };
    return now.ok() && (!later.ok() || most(*now) >= most(*later)) ? now : later;
  }

  std::vector<std::string> Sbatch(std::vector<std::string> argv, const std::string& script) const {
    argv.insert(argv.end(), options_.sbatch_options.begin(), options_.sbatch_options.end());
    argv.push_back(script);
    return argv;
  }

  absl::StatusOr<Submission> Plan(const JobSpec& spec, const SlurmLayout& layout,
                                  const std::string& path, const std::string& script) const {
    // SLURM's own answer: when, and on which nodes.
    MUSTER_ASSIGN_OR_RETURN(
        const ProgramOutput output,
        Command(Sbatch({"sbatch", "--test-only"}, path), SbatchVariablesOfScript(spec)));
    Submission planned;
    planned.job.spec = spec;
    planned.job.owner = options_.user;
    planned.plan.why = LastLine(output.err);
    planned.plan.processes = layout.processes_per_node * layout.max_nodes;
    planned.plan.script = script;
    planned.plan.checkpoint = CheckpointOf(spec);
    return planned;
  }

  // The folder is visible to this machine, too. The coordinator of a job ends with each start.
  PlannedCheckpoint CheckpointOf(const JobSpec& spec) const {
    PlannedCheckpoint checkpoint = {.decided_by = "program"};
    std::string project = options_.project;
    if (const auto own = spec.env.find("MUSTER_PROJECT_DIR"); own != spec.env.end()) {
      project = own->second;
    }
    project = project.empty() ? kDefaultProjectFolder : muster::WithHome(project);
    project = JoinPath(spec.workdir.empty() ? options_.here : spec.workdir, project);
    checkpoint.folder = JoinPath(project, kCheckpointsFolder);
    checkpoint.why = "rank 0 takes the newest one in the folder whose files are whole";
    if (options_.find_checkpoint) options_.find_checkpoint(checkpoint.folder, &checkpoint);
    return checkpoint;
  }

  absl::StatusOr<Submission> Submit(const JobSpec& spec, const SlurmLayout& layout,
                                    const std::string& path, const std::string& key) const {
    const absl::StatusOr<ProgramOutput> output =
        Command(Sbatch({"sbatch", "--parsable"}, path), SbatchVariablesOfScript(spec));
    int64_t id = 0;
    if (output.ok()) {
      // "12" or "12;cluster"
      const absl::string_view first = FirstLine(output->out);
      if (!absl::SimpleAtoi(first.substr(0, first.find(';')), &id)) {
        return absl::InternalError(
            absl::StrCat("sbatch printed ", Printable(first), " instead of the number of a job"));
      }
    } else if (absl::IsUnavailable(output.status())) {
      // The answer may be lost although the job exists.
      const absl::StatusOr<int64_t> found = WithComment(spec, key);
      if (!found.ok()) return output.status();
      id = *found;
    } else {
      return output.status();
    }
    return Record(id, spec, layout.processes_per_node, key);
  }

  absl::StatusOr<Submission> Record(int64_t id, const JobSpec& spec, int processes_per_node,
                                    const std::string& key) const {
    absl::Status written =
        AppendLine(Path(absl::StrCat(id, ".events")),
                   absl::StrCat("submit\t", absl::ToUnixSeconds(options_.clock->WallNow()), "\t0\t",
                                key, " ", processes_per_node, "\n"));
    if (written.ok()) {
      written = WriteSecretFile(Path(absl::StrCat(id, ".job")), JobFileText(spec) + "\n");
    }
    if (!written.ok()) {
      return absl::Status(written.code(),
                          absl::StrCat("SLURM has job ", id, ", but its record cannot be kept: ",
                                       written.message(), "; scancel ", id, " ends it"));
    }
    MUSTER_ASSIGN_OR_RETURN(const Records records, Load(id));
    MUSTER_ASSIGN_OR_RETURN(const auto queue, Queue());
    Submission made;
    MUSTER_ASSIGN_OR_RETURN(made.job, View(records, queue));
    made.plan.why = made.job.why;
    return made;
  }

  // Returns SLURM's number of the waiting or running job with this key. NOT_FOUND: there is none;
  // FAILED_PRECONDITION: it is another job.
  absl::StatusOr<int64_t> WithComment(const JobSpec& spec, const std::string& key) const {
    MUSTER_ASSIGN_OR_RETURN(const ProgramOutput output,
                            Command({"squeue", "-h", "--me", "-o", "%A|%k"}));
    for (absl::string_view line : absl::StrSplit(output.out, '\n', absl::SkipWhitespace())) {
      const std::pair<absl::string_view, absl::string_view> fields =
          absl::StrSplit(line, absl::MaxSplits('|', 1));
      int64_t id = 0;
      if (!absl::StartsWith(fields.second, absl::StrCat("muster:", key, ":")) ||
          !absl::SimpleAtoi(fields.first, &id)) {
        continue;
      }
      if (fields.second == absl::StrCat("muster:", Comment(spec, key))) return id;
      return KeyReused(key, absl::StrCat(id));
    }
    return absl::NotFoundError("no job has this key");
  }

  // Returns the job of an earlier call with this key.
  absl::StatusOr<std::optional<Submission>> Former(const JobSpec& spec, const std::string& key) {
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> ids, Ids());
    for (const int64_t id : ids) {
      const absl::StatusOr<Records> records = Load(id);
      if (!records.ok() || records->key != key) continue;
      if (JobFileText(records->spec) != JobFileText(spec)) {
        return KeyReused(key, absl::StrCat(records->spec.name, "-", id));
      }
      MUSTER_ASSIGN_OR_RETURN(const auto queue, Queue());
      Submission former;
      MUSTER_ASSIGN_OR_RETURN(former.job, View(*records, queue));
      former.existed = true;
      return former;
    }
    // The earlier call could not write the job's record.
    const absl::StatusOr<int64_t> id = WithComment(spec, key);
    if (absl::IsNotFound(id.status())) return std::nullopt;
    if (!id.ok()) return id.status();
    MUSTER_ASSIGN_OR_RETURN(const SlurmLayout layout, Layout(spec));
    MUSTER_ASSIGN_OR_RETURN(Submission former, Record(*id, spec, layout.processes_per_node, key));
    former.existed = true;
    return former;
  }

  absl::StatusOr<std::map<int64_t, Queued>> Queue() const {
    MUSTER_ASSIGN_OR_RETURN(const ProgramOutput output,
                            Command({"squeue", "-h", "--me", "-t", "all", "-o", "%A|%T|%N|%r"}));
    std::map<int64_t, Queued> queue;
    for (absl::string_view line : absl::StrSplit(output.out, '\n', absl::SkipWhitespace())) {
      const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits('|', 3));
      int64_t id = 0;
      if (fields.size() != 4 || !absl::SimpleAtoi(fields[0], &id)) {
        return absl::InternalError(
            absl::StrCat("squeue printed ", Printable(line), " instead of JOB|STATE|NODES|REASON"));
      }
      queue[id] = {fields[1], fields[2], fields[3]};
    }
    return queue;
  }

  // If the cluster keeps accounts, returns what they say about a job that the queue has forgotten.
  std::optional<Queued> Account(int64_t id) const {
    const absl::StatusOr<ProgramOutput> output =
        Command({"sacct", "-n", "-X", "-P", "-j", absl::StrCat(id), "-o", "State,NodeList"});
    if (!output.ok()) return std::nullopt;
    const std::vector<std::string> fields = absl::StrSplit(FirstLine(output->out), '|');
    if (fields.size() != 2 || fields[0].empty()) return std::nullopt;
    return Queued{fields[0], fields[1], ""};
  }

  // Returns the ids of all records, in the order of submission.
  absl::StatusOr<std::vector<int64_t>> Ids() const {
    std::vector<int64_t> ids;
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(options_.folder);
    if (absl::IsNotFound(names.status())) return ids;
    if (!names.ok()) return names.status();
    for (absl::string_view name : *names) {
      int64_t id = 0;
      if (absl::ConsumeSuffix(&name, ".job") && absl::SimpleAtoi(name, &id)) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  absl::StatusOr<Records> Load(int64_t id) const {
    const std::string path = Path(absl::StrCat(id, ".job"));
    MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxRecord));
    MUSTER_ASSIGN_OR_RETURN(const ResolvedJob job, ResolveRecord(text, path));
    Records records{.id = id, .spec = job.spec};
    // The file grows with each start, by the names of its nodes.
    const absl::StatusOr<std::string> events = ReadFile(Path(absl::StrCat(id, ".events")));
    if (!events.ok() && !absl::IsNotFound(events.status())) return events.status();
    const std::string lines = events.value_or("");
    for (absl::string_view line : absl::StrSplit(lines, '\n', absl::SkipWhitespace())) {
      AddEvent(line, &records);
    }
    return records;
  }

  // Skips lines that are cut off or were edited.
  static void AddEvent(absl::string_view line, Records* records) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits('\t', 3));
    int64_t unix_s = 0;
    int restart = 0;
    if (fields.size() != 4 || !absl::SimpleAtoi(fields[1], &unix_s) ||
        !absl::SimpleAtoi(fields[2], &restart) || restart < 0) {
      return;
    }
    const absl::Time time = absl::FromUnixSeconds(unix_s);
    const std::pair<std::string, std::string> words =
        absl::StrSplit(fields[3], absl::MaxSplits(' ', 1));
    std::vector<Start>& starts = records->starts;
    if (fields[0] == "submit") {
      records->submitted = time;
      records->key = words.first;
      if (!absl::SimpleAtoi(words.second, &records->processes_per_node)) {
        records->processes_per_node = 0;
      }
    } else if (fields[0] == "start") {
      starts.push_back({.restart = restart,
                        .started = time,
                        .nodes = absl::StrSplit(fields[3], ',', absl::SkipEmpty())});
    } else if (int code = 0; fields[0] == "end" && !starts.empty() &&
                             starts.back().restart == restart &&
                             absl::SimpleAtoi(words.first, &code)) {
      starts.back().ended = time;
      starts.back().code = code;
      starts.back().why = words.second;
    }
  }

  // Finds "train-12", or SLURM's "12".
  absl::StatusOr<Records> Find(const std::string& job) const {
    const size_t dash = job.rfind('-');
    int64_t id = 0;
    if (absl::SimpleAtoi(dash == std::string::npos ? job : job.substr(dash + 1), &id) && id > 0) {
      absl::StatusOr<Records> records = Load(id);
      if (records.ok() &&
          (dash == std::string::npos || job.substr(0, dash) == records->spec.name)) {
        return records;
      }
      if (!records.ok() && !absl::IsNotFound(records.status())) return records.status();
    }
    return absl::NotFoundError(absl::StrCat(
        "no job \"", Printable(job), "\" was submitted to SLURM from here: ", options_.folder,
        " has no record of it"));
  }

  absl::StatusOr<Job> View(const Records& records, const std::map<int64_t, Queued>& queue) const {
    Job job;
    job.id = absl::StrCat(records.spec.name, "-", records.id);
    job.spec = records.spec;
    job.owner = options_.user;
    job.sequence = static_cast<uint64_t>(records.id);
    job.submitted = records.submitted;
    for (const Start& start : records.starts) job.history.push_back(AttemptOf(start, records));
    if (!records.starts.empty()) {
      job.attempts = records.starts.back().restart + 1;
      job.restarts = records.starts.back().restart;
    }
    SetState(records, queue, &job);
    for (size_t i = 0; i < job.history.size(); ++i) {
      Attempt& attempt = job.history[i];
      const bool last = i + 1 == job.history.size();
      if (attempt.has_end || (last && !HasEnded(job.state) && job.state != JobState::kQueued &&
                              job.state != JobState::kSuspended)) {
        continue;
      }
      // Its script could not report how it ended.
      attempt.has_end = true;
      const bool cancelled = last && job.state == JobState::kCancelled;
      attempt.end_class =
          EndClassName(cancelled ? v1::END_CLASS_CANCELLED : v1::END_CLASS_NODE_LOST);
      attempt.why = last ? job.why : "SLURM has ended it, or its node was lost";
    }
    return job;
  }

  static Attempt AttemptOf(const Start& start, const Records& records) {
    Attempt attempt;
    attempt.number = start.restart + 1;
    attempt.started = start.started;
    attempt.ended = start.ended;
    attempt.has_end = start.code.has_value();
    if (attempt.has_end) {
      attempt.end_class =
          EndClassName(WasStopped(start) ? v1::END_CLASS_PREEMPTED : EndClassOf(start));
      attempt.exit_code = *start.code;
      attempt.why = start.why == "over" && *start.code == 0 ? "all processes have succeeded"
                    : start.why == "over" ? absl::StrCat("exit code ", *start.code)
                                          : start.why;
    }
    for (size_t i = 0; i < start.nodes.size(); ++i) {
      attempt.placements.push_back({.node = start.nodes[i],
                                    .node_rank = static_cast<int>(i),
                                    .processes = records.processes_per_node,
                                    .state = attempt.has_end ? "ENDED" : "RUNNING"});
    }
    return attempt;
  }

  void SetState(const Records& records, const std::map<int64_t, Queued>& queue, Job* job) const {
    const auto marked = [&](const char* verb) { return PathExists(MarkPath(*job, verb)); };
    std::optional<Queued> queued;
    if (const auto it = queue.find(records.id); it != queue.end()) queued = it->second;
    const Start* const last = records.starts.empty() ? nullptr : &records.starts.back();
    if (!queued.has_value() && last != nullptr && IsFinal(*last)) {
      // "ended": by SLURM, and the job is not in the queue again.
      job->state = last->why == "ended" || (*last->code != 0 && marked("cancel"))
                       ? JobState::kCancelled
                   : *last->code == 0 ? JobState::kSucceeded
                                      : JobState::kFailed;
    } else {
      if (!queued.has_value()) queued = Account(records.id);
      if (!queued.has_value()) {
        job->state = marked("cancel") ? JobState::kCancelled : JobState::kUnknown;
        job->why = "SLURM no longer knows it, and its script has noted no end";
        return;
      }
      job->state = StateOf(*queued);
    }
    switch (job->state) {
      case JobState::kQueued:
        job->why = absl::StrCat("SLURM: ", Printable(queued->reason));
        break;
      case JobState::kSuspended:
        job->why = "it is held in SLURM's queue";
        break;
      case JobState::kRunning:
        if (marked("cancel") || marked("suspend")) job->state = JobState::kStopping;
        job->why = absl::StrCat("SLURM runs it on ", Printable(queued->nodes));
        break;
      case JobState::kSucceeded:
        job->why = "all processes have succeeded";
        break;
      case JobState::kFailed:
        job->why = absl::StrCat(
            queued.has_value() ? absl::StrCat("SLURM: ", Printable(queued->state)) : "",
            queued.has_value() && last != nullptr && last->code.has_value() ? ", " : "",
            last != nullptr && last->code.has_value() ? absl::StrCat("exit code ", *last->code)
                                                      : "");
        if (const std::string line = LineAboutTheEnd(ScriptLog(records.id)); !line.empty()) {
          absl::StrAppend(&job->why, ": ", line);
        }
        break;
      default:
        break;
    }
  }

  // Returns the end of the output of the script and srun.
  std::string ScriptLog(int64_t id) const {
    const Log log({Path(absl::StrCat(id, ".log"))});
    return log.Read(std::max<int64_t>(0, log.size() - kEndOfScriptLog), kEndOfScriptLog);
  }

  // Returns the files of a rank after this many requeues, by the number of the restart in place.
  std::vector<std::string> LogFiles(const Job& job, int restart, int rank) const {
    const std::string folder = Path(absl::StrCat(Number(job), ".logs/", restart));
    std::map<int, std::string> files;
    for (absl::string_view name : ListDirectory(folder).value_or(std::vector<std::string>())) {
      absl::string_view number = name;
      int attempt = 0;
      if (!absl::ConsumePrefix(&number, "attempt_") || !absl::SimpleAtoi(number, &attempt)) {
        continue;
      }
      const std::string file = absl::StrCat(folder, "/", name, "/rank_", rank, ".log");
      if (PathExists(file)) files[attempt] = file;
    }
    std::vector<std::string> paths;
    for (auto& [attempt, path] : files) paths.push_back(std::move(path));
    return paths;
  }

  absl::StatusOr<LogChunk> ReadLog(const Job& job, const LogOptions& options) const {
    if (options.since != absl::InfiniteDuration()) {
      return absl::UnimplementedError(
          "--since: logs under SLURM are files, which do not say when a line was written: use "
          "--tail "
          "or --grep");
    }
    const int attempt = options.attempt == 0 ? job.attempts : options.attempt;
    if (attempt == 0) {
      return absl::NotFoundError(absl::StrCat("job ", job.id, " has not started: ", job.why));
    }
    const int processes = ProcessesOfAttempt(job, attempt).value_or(0);
    if (attempt > job.attempts || processes == 0) {
      return absl::NotFoundError(absl::StrCat("job ", job.id, " has no attempt ", attempt,
                                              ": the last is ", job.attempts));
    }
    if (options.rank >= processes) {
      return absl::NotFoundError(
          absl::StrCat("attempt ", attempt, " of job ", job.id, " has no rank ", options.rank));
    }
    const bool over =
        attempt < job.attempts || job.history.back().has_end || job.state == JobState::kUnknown;
    // Read after checking that no more output comes.
    const Log log(LogFiles(job, attempt - 1, options.rank));
    LogChunk chunk;
    chunk.attempt = attempt;
    chunk.offset =
        options.offset < 0 ? log.Tail(options.tail_lines) : std::min(options.offset, log.size());
    chunk.data = log.Read(chunk.offset, kMaxChunk);
    chunk.next_offset = chunk.offset + static_cast<int64_t>(chunk.data.size());
    chunk.ended = over && chunk.next_offset == log.size();
    return chunk;
  }

  const SlurmOptions options_;
  Notification stopped_;
  Mutex mu_;
  absl::StatusOr<QueueAnswer> recent_ ABSL_GUARDED_BY(mu_);  // an error before the first answer
  absl::Time asked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace

std::unique_ptr<JobBackend> SlurmBackend(SlurmOptions options) {
  return std::make_unique<Slurm>(std::move(options));
}

}  // namespace muster::client
