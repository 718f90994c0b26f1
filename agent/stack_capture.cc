#include "agent/stack_capture.h"

#include <cxxabi.h>
#include <dirent.h>
#include <elfutils/libdwfl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "agent/faulthandler.h"
#include "agent/mapped_file.h"
#include "agent/memory_reader.h"
#include "agent/process_state.h"
#include "agent/python_layout.h"
#include "agent/python_stack.h"
#include "agent/python_symbols.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"

namespace muster::agent {
namespace {

constexpr int kNamedThreads = 8;  // in a group at the same place
// libdw never stops on an endless stack (a broken one may be circular).
constexpr int kWalkedFrames = 512;
constexpr size_t kMaxName = 256;
// A late capture has a thread and the tables of a process until it ends, which may be never.
constexpr size_t kMaxLate = 8;

struct Frame {
  uint64_t pc = 0;  // address of the call, not of the return
  bool operator==(const Frame& other) const { return pc == other.pc; }
};

struct ThreadStack {
  pid_t tid = 0;
  ProcessState state;
  PythonStack python;
  std::vector<Frame> frames;
  int more_frames = 0;
  std::string why;  // why there are no frames

  bool SamePlace(const ThreadStack& other) const {
    return frames == other.frames && python == other.python && why == other.why &&
           state.ToString() == other.state.ToString();
  }
};

// A thread that this process has stopped; the destructor resumes it.
class StoppedThread {
 public:
  StoppedThread() = default;
  ~StoppedThread() {
    if (tid_ != 0) ptrace(PTRACE_DETACH, tid_, nullptr, reinterpret_cast<void*>(signal_));
  }
  StoppedThread(const StoppedThread&) = delete;
  StoppedThread& operator=(const StoppedThread&) = delete;

  // Returns an empty text if the thread is stopped, else why not. The kernel releases a thread that
  // was seized and did not stop when the calling thread ends.
  std::string Stop(pid_t tid, absl::Time deadline, const Notification& given_up) {
    if (ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr) != 0) {
      return errno == ESRCH ? "it has ended" : strerror(errno);
    }
    const Clock& clock = Clock::Real();
    // No event reports that a thread has stopped, so poll it.
    absl::Duration wait = absl::Microseconds(20);
    for (;; wait = std::min(wait * 2, absl::Milliseconds(2))) {
      siginfo_t info = {};
      // Not WEXITED: the parent collects the exit of the process.
      if (waitid(P_PID, tid, &info, WSTOPPED | WNOHANG | __WALL) != 0) {
        return errno == ECHILD ? "it has ended" : strerror(errno);
      }
      if (info.si_pid == tid) {
        tid_ = tid;
        // The detach delivers a pending signal.
        const bool interrupted = info.si_status >> 8 == PTRACE_EVENT_STOP;
        signal_ = interrupted ? 0 : info.si_status & 0x7f;
        return "";
      }
      if (clock.Now() >= deadline || given_up.WaitForNotificationWithTimeout(wait)) {
        return "it does not stop (blocked in the kernel?)";
      }
    }
  }

 private:
  pid_t tid_ = 0;
  intptr_t signal_ = 0;
};

std::vector<pid_t> ThreadsOf(pid_t pid) {
  std::vector<pid_t> tids;
  DIR* const folder = opendir(absl::StrCat("/proc/", pid, "/task").c_str());
  if (folder == nullptr) return tids;
  while (const dirent* entry = readdir(folder)) {
    pid_t tid = 0;
    if (absl::SimpleAtoi(entry->d_name, &tid)) tids.push_back(tid);
  }
  closedir(folder);
  std::sort(tids.begin(), tids.end(),
            [pid](pid_t a, pid_t b) { return std::pair(a != pid, a) < std::pair(b != pid, b); });
  return tids;
}

// Returns the current tracer of `pid`; 0: none.
int64_t TracerOf(pid_t pid) {
  FILE* const file = fopen(absl::StrCat("/proc/", pid, "/status").c_str(), "re");
  if (file == nullptr) return 0;
  char line[256];
  long tracer = 0;  // NOLINT: what %ld reads
  while (fgets(line, sizeof(line), file) != nullptr) {
    if (sscanf(line, "TracerPid: %ld", &tracer) == 1) break;
  }
  fclose(file);
  return tracer;
}

// Returns Yama's setting, '0' to '3'; '0' if there is no Yama.
char PtraceScope(const std::string& path) {
  FILE* const file = fopen(path.c_str(), "re");
  if (file == nullptr) return '0';
  const int scope = fgetc(file);
  fclose(file);
  return scope == EOF ? '0' : static_cast<char>(scope);
}

std::string Refusal(pid_t pid, int error, const std::string& ptrace_scope_path) {
  if (error == ESRCH) return "it has ended";
  std::string text = absl::StrCat("ptrace was refused (", strerror(error), ")");
  if (const int64_t tracer = TracerOf(pid); tracer != 0 && tracer != getpid()) {
    return absl::StrCat(text, ": process ", tracer, " traces it already");
  }
  const char scope = PtraceScope(ptrace_scope_path);
  absl::StrAppend(&text, ": ");
  if (scope == '3') {
    absl::StrAppend(&text, "kernel.yama.ptrace_scope is 3, which forbids it to all");
  } else if (scope == '2' || (scope == '1' && !Descends(pid, getpid()))) {
    absl::StrAppend(&text, "kernel.yama.ptrace_scope is ", std::string(1, scope),
                    ": give the agent CAP_SYS_PTRACE");
  } else {
    absl::StrAppend(&text,
                    "another user's process, one that has made itself undumpable, or a container "
                    "that forbids it: give the agent CAP_SYS_PTRACE, or a seccomp profile with "
                    "ptrace");
  }
  return text;
}

// Returns the id of a thread in the pid namespace of its process. 0: unknown.
uint64_t OwnNumber(pid_t pid, pid_t tid) {
  FILE* const file = fopen(absl::StrCat("/proc/", pid, "/task/", tid, "/status").c_str(), "re");
  if (file == nullptr) return 0;
  char line[256];
  uint64_t number = 0;
  while (fgets(line, sizeof(line), file) != nullptr) {
    if (strncmp(line, "NSpid:", 6) != 0) continue;
    // The ids are listed from the outermost namespace to its own.
    const char* const last = strrchr(line, '\t');
    number = last == nullptr ? 0 : strtoull(last, nullptr, 10);
    break;
  }
  fclose(file);
  return number;
}

// Returns the value of pthread_self() in a stopped thread. 0: unknown on this architecture.
uint64_t PthreadOf(pid_t tid) {
#if defined(__x86_64__)
  user_regs_struct registers;
  if (ptrace(PTRACE_GETREGS, tid, nullptr, &registers) == 0) return registers.fs_base;
#else
  static_cast<void>(tid);
#endif
  return 0;
}

// Finds no separate debug files, because the search may ask servers.
int NoDebugFile(Dwfl_Module*, void**, const char*, Dwarf_Addr, const char*, const char*, GElf_Word,
                char**) {
  return -1;
}

// Does the same as dwfl_linux_proc_find_elf, but with the files that the process sees: outside of
// its container, an agent may have others at the same paths, whose tables would give wrong frames
// and names.
int FindElf(Dwfl_Module* module, void** userdata, const char* name, Dwarf_Addr base,
            char** file_name, Elf** elf) {
  const pid_t pid = static_cast<pid_t>(reinterpret_cast<intptr_t>(*userdata));
  if (pid == 0 || name[0] != '/') {  // "[vdso]": read from its memory
    return dwfl_linux_proc_find_elf(module, userdata, name, base, file_name, elf);
  }
  const int fd = OpenMappedFile(pid, name);
  if (fd >= 0) *file_name = strdup(name);
  return fd;
}

// Tells FindElf the process, to which libdw gives no other way.
int TellProcess(Dwfl_Module*, void** userdata, const char*, Dwarf_Addr, void* pid) {
  *userdata = pid;
  return DWARF_CB_OK;
}

const Dwfl_Callbacks kCallbacks = {
    .find_elf = FindElf,
    .find_debuginfo = NoDebugFile,
    .section_address = nullptr,
    .debuginfo_path = nullptr,
};

struct DwflEnd {
  void operator()(Dwfl* dwfl) const { dwfl_end(dwfl); }
};

std::string Demangled(const char* name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 && text != nullptr ? text : name;
  free(text);
  if (result.size() > kMaxName) result = result.substr(0, kMaxName) + "...";
  return result;
}

std::string FileName(const char* path) { return path == nullptr ? "?" : BaseName(path); }

// Names of places in one process.
class Symbols {
 public:
  explicit Symbols(Dwfl* dwfl) : dwfl_(dwfl) {}

  const std::string& At(uint64_t pc) {
    const auto [it, is_new] = known_.try_emplace(pc);
    if (is_new) it->second = LookUp(pc);
    return it->second;
  }

 private:
  std::string LookUp(uint64_t pc) {
    Dwfl_Module* const module = dwfl_addrmodule(dwfl_, pc);
    if (module == nullptr) return absl::StrFormat("%#x (no module)", pc);
    const char* file = nullptr;
    dwfl_module_info(module, nullptr, nullptr, nullptr, nullptr, nullptr, &file, nullptr);
    if (file == nullptr) {
      file =
          dwfl_module_info(module, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
    }
    GElf_Off offset = 0;
    GElf_Sym symbol;
    const char* const name =
        dwfl_module_addrinfo(module, pc, &offset, &symbol, nullptr, nullptr, nullptr);
    std::string text = name == nullptr ? absl::StrFormat("%#x", pc) : Demangled(name);
    if (Dwfl_Line* const line = dwfl_module_getsrc(module, pc); line != nullptr) {
      int number = 0;
      const char* const source = dwfl_lineinfo(line, nullptr, &number, nullptr, nullptr, nullptr);
      if (source != nullptr) absl::StrAppend(&text, " ", FileName(source), ":", number);
    }
    return absl::StrCat(text, " (", FileName(file), ")");
  }

  Dwfl* const dwfl_;
  std::map<uint64_t, std::string> known_;
};

struct Walk {
  ThreadStack* stack;
  int max_frames;
  int seen = 0;
  absl::Time deadline;
};

int OnFrame(Dwfl_Frame* frame, void* argument) {
  Walk& walk = *static_cast<Walk*>(argument);
  Dwarf_Addr pc = 0;
  bool is_activation = false;
  if (!dwfl_frame_pc(frame, &pc, &is_activation)) return DWARF_CB_ABORT;
  if (++walk.seen > walk.max_frames) {
    ++walk.stack->more_frames;
  } else {
    walk.stack->frames.push_back({is_activation ? pc : pc - 1});
  }
  return walk.seen >= kWalkedFrames || Clock::Real().Now() >= walk.deadline ? DWARF_CB_ABORT
                                                                            : DWARF_CB_OK;
}

// Text that grows up to a limit, by whole lines.
class Text {
 public:
  explicit Text(size_t max_bytes) : max_bytes_(max_bytes) {}
  // Returns false if the line does not fit; after that nothing does.
  bool Line(absl::string_view foreign) {
    const std::string line = OneLine(foreign);  // names of symbols and files have any bytes
    constexpr absl::string_view kCut = "... (cut)\n";
    if (full_ || text_.size() + line.size() + 1 + kCut.size() > max_bytes_) {
      if (!full_) absl::StrAppend(&text_, kCut);
      full_ = true;
      return false;
    }
    absl::StrAppend(&text_, line, "\n");
    return true;
  }
  std::string Take() { return std::move(text_); }

 private:
  const size_t max_bytes_;
  std::string text_;
  bool full_ = false;
};

StackSnapshot WithoutStack(int64_t pid, absl::string_view why) {
  const ProcessState state = ReadProcessState(pid);
  if (!state.exists()) return {.process_state = state.name, .native_stack = ""};
  return {.process_state = state.name,
          .native_stack = absl::StrCat("pid ", pid, " (", OneLine(state.command), "), ",
                                       state.ToString(), "\nno stack: ", why, "\n")};
}

// A whole capture, on its own thread: the kernel releases whatever it traces when the thread ends.
class Capturer {
 public:
  Capturer(pid_t pid, const StackCaptureOptions& options, absl::Time deadline,
           const Notification& given_up)
      : pid_(pid), options_(options), deadline_(deadline), given_up_(given_up) {}

  StackSnapshot Run() {
    StackSnapshot snapshot;
    const ProcessState state = ReadProcessState(pid_);
    snapshot.process_state = state.name;
    if (!state.exists()) return snapshot;
    Text text(options_.max_bytes);
    const std::string title =
        absl::StrCat("pid ", pid_, " (", state.command, "), ", state.ToString(), ", ",
                     state.threads, state.threads == 1 ? " thread" : " threads");
    if (state.name == "zombie") {
      text.Line(title);
      text.Line("no stack: it has exited and waits to be reaped");
      snapshot.native_stack = text.Take();
      return snapshot;
    }
    Collect();
    text.Line(python_.has_value() ? absl::StrCat(title, ", Python ", python_->layout().version)
                                  : title);
    if (!no_python_.empty()) {
      text.Line(absl::StrCat("no Python frames: ", no_python_));
      text.Line(AskFaulthandler(pid_));
    }
    Print(&text);
    snapshot.native_stack = text.Take();
    return snapshot;
  }

 private:
  bool OutOfTime() const { return Clock::Real().Now() >= deadline_; }

  void Collect() {
    // Everything that needs no stopped process comes first.
    dwfl_.reset(dwfl_begin(&kCallbacks));
    std::string why;
    if (dwfl_ == nullptr || dwfl_linux_proc_report(dwfl_.get(), pid_) != 0 ||
        dwfl_report_end(dwfl_.get(), nullptr, nullptr) != 0) {
      why = "its memory map cannot be read";
    }
    if (dwfl_ != nullptr) {
      dwfl_getmodules(dwfl_.get(), TellProcess,
                      reinterpret_cast<void*>(static_cast<intptr_t>(pid_)), 0);
    }
    if (pid_ == getpid()) why = "this is the agent itself, which does not stop for its own stack";
    if (!why.empty()) {
      // There is no need to attach.
    } else if (const int error = dwfl_linux_proc_attach(dwfl_.get(), pid_, true); error != 0) {
      why = error > 0 ? strerror(error) : dwfl_errmsg(-1);
    }
    if (dwfl_ != nullptr) OpenPython();
    std::vector<pid_t> tids = ThreadsOf(pid_);
    if (tids.size() > static_cast<size_t>(options_.max_threads)) {
      more_threads_ = static_cast<int>(tids.size()) - options_.max_threads;
      tids.resize(options_.max_threads);
    }
    for (const pid_t tid : tids) {
      ThreadStack stack;
      stack.tid = tid;
      stack.state = ReadThreadState(pid_, tid);
      if (!stack.state.exists()) continue;
      stack.why = OutOfTime() ? "timed out" : why.empty() ? WalkThread(&stack) : why;
      // Also for a thread that cannot be stopped: while it is blocked in the kernel, its Python
      // frames do not change.
      if (!stack.why.empty() && !OutOfTime()) {
        const uint64_t number = OwnNumber(pid_, tid);
        ReadPython(&stack, [number](const PythonThread& thread) {
          return number != 0 && thread.native_id == number;
        });
      }
      threads_.push_back(std::move(stack));
    }
  }

  // Returns an empty text, or why there are no frames.
  std::string WalkThread(ThreadStack* stack) {
    const int refused = options_.seize ? options_.seize(stack->tid)
                        : ptrace(PTRACE_SEIZE, stack->tid, nullptr, nullptr) == 0 ? 0
                                                                                  : errno;
    if (refused != 0) return Refusal(pid_, refused, options_.ptrace_scope_path);
    StoppedThread stopped;
    const absl::Time patience = Clock::Real().Now() + options_.stop_timeout;
    std::string why = stopped.Stop(stack->tid, std::min(deadline_, patience), given_up_);
    if (!why.empty()) return why;
    Walk walk = {.stack = stack, .max_frames = options_.max_frames, .deadline = deadline_};
    // The walk ends with an error if no unwind table continues it; the frames found so far are
    // valid.
    dwfl_getthread_frames(dwfl_.get(), stack->tid, OnFrame, &walk);
    // The id of pthreads is valid in any pid namespace, and in a forked child.
    const uint64_t pthread = PthreadOf(stack->tid);
    const uint64_t number = pthread == 0 ? OwnNumber(pid_, stack->tid) : 0;
    ReadPython(stack, [pthread, number](const PythonThread& thread) {
      return pthread != 0 ? thread.thread_id == pthread : number != 0 && thread.native_id == number;
    });
    return stack->frames.empty() ? absl::StrCat("no frame could be read: ", dwfl_errmsg(-1)) : "";
  }

  // Finds the interpreter and its threads. Leaves `python_` empty for a process without one.
  void OpenPython() {
    const std::optional<PythonSymbols> symbols = FindPython(dwfl_.get(), pid_);
    if (!symbols.has_value()) return;
    absl::StatusOr<PythonLayout> layout = ReadPythonLayout(memory_, *symbols);
    if (!layout.ok()) {
      no_python_ = std::string(layout.status().message());
      return;
    }
    python_.emplace(memory_, *std::move(layout), symbols->runtime);
    python_threads_ = python_->Threads();
  }

  void ReadPython(ThreadStack* stack, absl::FunctionRef<bool(const PythonThread&)> is_it) const {
    // A thread has a state in each interpreter that it has been in.
    for (const PythonThread& thread : python_threads_) {
      if (!is_it(thread)) continue;
      stack->python = python_->Stack(thread, options_.max_frames);
      if (!stack->python.empty()) return;
    }
  }

  // Returns false if it does not fit.
  bool PrintPython(const ThreadStack& stack, Text* text) const {
    const PythonStack& python = stack.python;
    for (size_t i = 0; i < python.frames.size(); ++i) {
      if (!text->Line(absl::StrCat("  py#", i, " ", python.frames[i].ToString()))) return false;
    }
    if (python.more_frames > 0 &&
        !text->Line(absl::StrCat("  ... ", python.more_than_that ? "at least " : "",
                                 python.more_frames, " more Python frames"))) {
      return false;
    }
    return python.torn.empty() ||
           text->Line(absl::StrCat("  ... no further Python frames: ", python.torn));
  }

  void Print(Text* text) {
    Symbols symbols(dwfl_.get());
    std::vector<bool> printed(threads_.size(), false);
    for (size_t i = 0; i < threads_.size(); ++i) {
      if (printed[i]) continue;
      const ThreadStack& first = threads_[i];
      std::vector<const ThreadStack*> group;
      for (size_t j = i; j < threads_.size(); ++j) {
        const ThreadStack& other = threads_[j];
        // The main thread is never grouped: it is the one of interest.
        const bool same = j == i || (first.tid != pid_ && other.SamePlace(first));
        if (!same) continue;
        printed[j] = true;
        group.push_back(&other);
      }
      std::string title = group.size() == 1 ? "thread " : "threads ";
      for (size_t j = 0; j < std::min<size_t>(group.size(), kNamedThreads); ++j) {
        absl::StrAppend(&title, j == 0 ? "" : ", ", group[j]->tid, " (", group[j]->state.command,
                        ")");
      }
      if (group.size() > kNamedThreads) {
        absl::StrAppend(&title, " and ", group.size() - kNamedThreads, " more");
      }
      absl::StrAppend(&title, ", ", first.state.ToString(), ":");
      if (!text->Line(title) || !PrintPython(first, text)) return;
      if (first.frames.empty()) {
        if (!text->Line(absl::StrCat("  no stack: ", first.why))) return;
        continue;
      }
      for (size_t f = 0; f < first.frames.size(); ++f) {
        const std::string place = OutOfTime() ? absl::StrFormat("%#x", first.frames[f].pc)
                                              : symbols.At(first.frames[f].pc);
        if (!text->Line(absl::StrCat("  #", f, " ", place))) return;
      }
      if (first.more_frames > 0 &&
          !text->Line(absl::StrCat("  ... ", first.more_frames, " more frames"))) {
        return;
      }
    }
    if (more_threads_ > 0) text->Line(absl::StrCat("... ", more_threads_, " more threads"));
  }

  const pid_t pid_;
  const StackCaptureOptions& options_;
  const absl::Time deadline_;
  const Notification& given_up_;
  std::unique_ptr<Dwfl, DwflEnd> dwfl_;
  std::vector<ThreadStack> threads_;
  int more_threads_ = 0;
  const ProcessMemory memory_{pid_};
  std::optional<PythonStackReader> python_;
  std::vector<PythonThread> python_threads_;
  std::string no_python_;  // why `python_` is empty although there is a Python
};

}  // namespace

struct StackCapture::Job {
  StackSnapshot snapshot;
  Notification done;
  Notification given_up;
};

StackCapture::StackCapture(StackCaptureOptions options)
    : options_(std::make_shared<const StackCaptureOptions>(std::move(options))) {}

// Shared by all captures of the process, because a thread may outlive the capture that started it.
struct StackCapture::Late {
  struct One {
    int64_t pid;
    uint64_t started;  // start time of the process: another one may have its pid by now
    absl::Time since;
    std::shared_ptr<Job> job;
    std::thread thread;
  };
  static Late& Get() {
    static Late* const late = new Late;
    return *late;
  }
  // Returns why another look at `pid`, which started then, would not end either. Empty: it may.
  std::string Refusal(int64_t pid, uint64_t started) {
    MutexLock lock(&mu);
    for (const One& one : threads) {
      if (one.pid != pid || one.started != started) continue;
      const absl::Duration age = Clock::Real().Now() - one.since;
      return absl::StrCat("the look at it that began ",
                          absl::FormatDuration(absl::Trunc(age, absl::Milliseconds(100))),
                          " ago has not ended (blocked in the kernel?)");
    }
    if (threads.size() < kMaxLate) return "";
    return absl::StrCat(threads.size(),
                        " looks at other processes have not ended (blocked in the kernel?)");
  }

  Mutex mu;
  std::list<One> threads ABSL_GUARDED_BY(mu);
};

int StackCapture::CollectLate() {
  Late& late = Late::Get();
  MutexLock lock(&late.mu);
  late.threads.remove_if([](Late::One& one) {
    if (!one.job->done.HasBeenNotified()) return false;
    one.thread.join();
    return true;
  });
  return static_cast<int>(late.threads.size());
}

StackCapture::~StackCapture() {
  const absl::Time give_up = Clock::Real().Now() + options_->end_timeout;
  MutexLock lock(&mu_);
  for (const auto& job : late_jobs_) {
    job->done.WaitForNotificationWithTimeout(give_up - Clock::Real().Now());
  }
  CollectLate();
}

StackSnapshot StackCapture::Capture(int64_t pid, absl::Duration budget) {
  CollectLate();
  if (pid <= 0 || pid > INT32_MAX) return {.process_state = "gone", .native_stack = ""};
  Late& late = Late::Get();
  const uint64_t started =
      options_->started ? options_->started(pid) : ReadProcessStat(pid).started;
  if (const std::string refused = late.Refusal(pid, started); !refused.empty()) {
    return WithoutStack(pid, refused);
  }
  const auto job = std::make_shared<Job>();
  const absl::Time begun = Clock::Real().Now();
  // The rest is kept for operations that cannot be interrupted.
  const absl::Time deadline = begun + budget * 3 / 4;
  const auto look = [options = options_, job, pid, deadline] {
    job->snapshot = Capturer(static_cast<pid_t>(pid), *options, deadline, job->given_up).Run();
    job->done.Notify();
  };
  std::thread thread;
  try {
    thread = options_->start_thread ? options_->start_thread(look) : std::thread(look);
  } catch (const std::system_error& error) {
    return WithoutStack(
        pid, absl::StrCat("no thread can be started to take it (", error.code().message(),
                          "): this machine, user or container has no room for more processes and "
                          "threads (ulimit -u, pids.max)"));
  }
  if (job->done.WaitForNotificationWithTimeout(budget)) {
    thread.join();
    return std::move(job->snapshot);
  }
  job->given_up.Notify();
  {
    MutexLock lock(&late.mu);
    late.threads.push_back({pid, started, begun, job, std::move(thread)});
  }
  {
    MutexLock lock(&mu_);
    late_jobs_.remove_if([](const auto& one) { return one->done.HasBeenNotified(); });
    late_jobs_.push_back(job);
  }
  return WithoutStack(pid, absl::StrCat("it took longer than ", absl::FormatDuration(budget)));
}

}  // namespace muster::agent
