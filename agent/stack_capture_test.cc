#include "agent/stack_capture.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <list>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "agent/process_state.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "base/text.h"

namespace muster::agent {

volatile bool g_forever = true;

// ThreadSanitizer adds a thread to each process.
#if defined(__SANITIZE_THREAD__)
constexpr int kThreadsOfRuntime = 1;
#else
constexpr int kThreadsOfRuntime = 0;
#endif

// With a linkage and names that the test must find in the stack.
__attribute__((noinline)) void AugmentForever(int ready) {
  const char byte = 'x';
  if (write(ready, &byte, 1) != 1) _exit(1);
  // A variable, so that the compiler cannot know that nothing follows.
  while (g_forever) pause();
}
struct ImageLoader {
  __attribute__((noinline)) static void LoadBatch(int ready, int index) {
    AugmentForever(ready);
    asm volatile("" ::"r"(index));  // keeps the call from becoming a jump at the end
  }
};
__attribute__((noinline)) void SpinForever(int ready) {
  const char byte = 'x';
  if (write(ready, &byte, 1) != 1) _exit(1);
  for (;;) asm volatile("" ::: "memory");
}
__attribute__((noinline)) int Recurse(int ready, int depth) {
  if (depth == 0) {
    ImageLoader::LoadBatch(ready, 1);
    return 0;
  }
  const int result = Recurse(ready, depth - 1);
  asm volatile("" ::: "memory");
  return result + 1;
}

namespace {

constexpr absl::Duration kBudget = absl::Seconds(30);

// A child that runs `body(fd)`, ready once `body` has written a byte to fd; killed at the end.
class Child {
 public:
  explicit Child(
      const std::function<void(int)>& body, const std::function<void()>& before = [] {}) {
    before();
    int pipe_fds[2];
    if (pipe(pipe_fds) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) {
      body(pipe_fds[1]);
      _exit(0);
    }
    close(pipe_fds[1]);
    char byte = 0;
    EXPECT_EQ(read(pipe_fds[0], &byte, 1), 1);
    close(pipe_fds[0]);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

// Returns a program for each Python in $MUSTER_TEST_PYTHONS (paths with colons between them), or
// for Debian's.
std::vector<std::string> Pythons() {
  const char* const given = getenv("MUSTER_TEST_PYTHONS");
  return absl::StrSplit(given == nullptr ? "/usr/bin/python3" : given, ':');
}

// A Python that runs `source` as program.py; ready when that has written a byte.
class PythonChild {
 public:
  PythonChild(const std::string& python, const std::string& source)
      : path_(folder_.Path("program.py")),
        child_(
            [&](int ready) {
              dup2(ready, STDOUT_FILENO);
              execl(python.c_str(), python.c_str(), path_.c_str(), nullptr);
              _exit(127);
            },
            [&] { EXPECT_TRUE(WriteFileAtomically(path_, source).ok()); }) {}
  pid_t pid() const { return child_.pid(); }

  // Returns the Python frames of one capture without their folder, thread after thread, with "|"
  // between them.
  std::string Frames(StackCapture& capture) const {
    std::string frames;
    bool first = true;
    for (const absl::string_view line :
         absl::StrSplit(capture.Capture(pid(), kBudget).native_stack, '\n')) {
      if (absl::StartsWith(line, "thread") && !std::exchange(first, false)) frames += "| ";
      if (!absl::StartsWith(line, "  py#")) continue;
      const std::vector<std::string> words =
          absl::StrSplit(absl::StrReplaceAll(
                             line, {{"  py#", ""}, {absl::StrCat("(", path_, ":"), ""}, {")", ""}}),
                         absl::MaxSplits(' ', 1));
      absl::StrAppend(&frames, words[1], " ");
    }
    return frames;
  }

 private:
  const TestFolder folder_;
  const std::string path_;
  const Child child_;
};

TEST(StackCapture, Python_ShowsItsFrames) {
  for (const std::string& python : Pythons()) {
    SCOPED_TRACE(python);
    const PythonChild child(python, R"(import os, time
def wait_for_data(seconds):
    os.write(1, b"x")
    time.sleep(seconds)
def train(step):
    wait_for_data(3600)
train(1)
)");
    StackCapture capture;
    // The program may still be in the previous line.
    WaitUntil([&] { return absl::StrContains(child.Frames(capture), "wait_for_data 4"); });
    const std::string text = capture.Capture(child.pid(), kBudget).native_stack;
    EXPECT_TRUE(absl::StrContains(text, ", Python 3.")) << text;
    EXPECT_EQ(child.Frames(capture), "wait_for_data 4 train 6 <module> 7 ") << text;
    // In addition to the native frames.
    EXPECT_TRUE(absl::StrContains(text, "  #0 ")) << text;
    EXPECT_TRUE(absl::StrContains(text, " _PyEval_EvalFrameDefault")) << text;
    EXPECT_NE(ReadProcessState(child.pid()).name, "traced");
  }
}

// As under `muster launch -- apptainer exec`: the agent has other files at the paths.
TEST(StackCapture, PythonWithMountsOfItsOwn_ShowsItsFrames) {
  const TestFolder ours, its;
  const std::string python = ours.Path("python3");
  const std::string program = its.Path("program.py");
  const absl::StatusOr<std::string> bytes = ReadFile("/usr/bin/python3");
  if (!bytes.ok()) {
    std::cerr << "not tested: " << bytes.status() << "\n";
    return;
  }
  ASSERT_TRUE(WriteFileAtomically(python, "no program at all").ok());
  ASSERT_TRUE(WriteFileAtomically(its.Path("python3"), *bytes).ok());
  ASSERT_EQ(chmod(its.Path("python3").c_str(), 0700), 0);
  ASSERT_TRUE(WriteFileAtomically(program, R"(import os, time
def wait_for_data():
    os.write(1, b"x")
    time.sleep(3600)
wait_for_data()
)")
                  .ok());
  const Child child([&](int ready) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
        mount(its.Path("").c_str(), ours.Path("").c_str(), nullptr, MS_BIND, nullptr) != 0) {
      const char byte = 'x';
      if (write(ready, &byte, 1) != 1) _exit(1);
      for (;;) pause();
    }
    dup2(ready, STDOUT_FILENO);
    execl(python.c_str(), python.c_str(), program.c_str(), nullptr);
    _exit(127);
  });
  if (ReadProcessState(child.pid()).command != "python3") {
    std::cerr << "not tested: no user and mount namespaces are to be had here\n";
    return;
  }
  StackCapture capture;
  std::string text;
  do {
    text = capture.Capture(child.pid(), kBudget).native_stack;
    EXPECT_TRUE(absl::StrContains(text, ", Python 3.")) << text;
  } while (!HasFailure() && !absl::StrContains(text, "py#0 wait_for_data ("));
  EXPECT_TRUE(absl::StrContains(text, " _PyEval_EvalFrameDefault (python3)")) << text;
}

TEST(StackCapture, PythonInALoop_IsCaughtInIt) {
  for (const std::string& python : Pythons()) {
    SCOPED_TRACE(python);
    const PythonChild child(python, R"(import os
def spin():
    i = 0
    while True: i += 1
os.write(1, b"x")
spin()
)");
    StackCapture capture;
    for (int i = 0; i < 20; ++i) {
      std::string frames;
      // The program may not have got there.
      do {
        frames = child.Frames(capture);
      } while (i == 0 && !absl::StrContains(frames, "spin"));
      EXPECT_EQ(frames, "spin 4 <module> 6 ");
    }
  }
}

TEST(StackCapture, ThreadsOfPython_HaveTheirOwnFrames) {
  for (const std::string& python : Pythons()) {
    SCOPED_TRACE(python);
    const PythonChild child(python, R"(import _thread, os, time
held = _thread.allocate_lock()
held.acquire()
ready = []
def in_c_extension():
    ready.append(1)
    held.acquire()
def generator():
    yield 1
    ready.append(1)
    held.acquire()
def of_generator():
    for _ in generator(): pass
_thread.start_new_thread(in_c_extension, ())
while len(ready) < 1: time.sleep(0.001)
_thread.start_new_thread(of_generator, ())
while len(ready) < 2: time.sleep(0.001)
os.write(1, b"x")
time.sleep(3600)
)");
    StackCapture capture;
    std::string frames;
    // Each of the three may still be in the previous line.
    WaitUntil([&] {
      frames = child.Frames(capture);
      return absl::StrContains(frames, "<module> 19") &&
             absl::StrContains(frames, "in_c_extension 7") &&
             absl::StrContains(frames, "generator 11");
    });
    EXPECT_EQ(frames, "<module> 19 | in_c_extension 7 | generator 11 of_generator 13 ");
  }
}

TEST(StackCapture, ForkedPython_HasFrames) {
  for (const std::string& python : Pythons()) {
    SCOPED_TRACE(python);
    // In some versions, Python's own number of the thread is the parent's.
    const PythonChild child(python, R"(import os, time
def in_child():
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(3600)
if os.fork() == 0:
    os.setsid()
    in_child()
os.wait()
)");
    std::vector<int64_t> children;
    WaitUntil([&] {
      children = ListChildren(child.pid()).value_or(std::vector<int64_t>());
      return !children.empty();
    });
    StackCapture capture;
    std::string text;
    do {
      text = capture.Capture(children[0], kBudget).native_stack;
    } while (!absl::StrContains(text, "program.py:4)"));
    EXPECT_TRUE(absl::StrContains(text, "py#0 in_child (")) << text;
    kill(static_cast<pid_t>(children[0]), SIGKILL);
  }
}

TEST(StackCapture, PythonThatRefusesPtrace_ShowsFramesWhereMemoryCanBeRead) {
  // Before 3.11, no number identifies the thread without stopping it.
  const PythonChild child("/usr/bin/python3", R"(import os, time
os.write(1, b"x")
time.sleep(3600)
)");
  StackCapture capture({.seize = [](pid_t) { return EPERM; }});
  const std::string text = capture.Capture(child.pid(), kBudget).native_stack;
  EXPECT_TRUE(absl::StrContains(text, "no stack: ptrace was refused")) << text;
  EXPECT_TRUE(absl::StrContains(text, "py#0 <module>")) << text;
}

TEST(StackCapture, DeepRecursionOfPython_IsCutWithACount) {
  for (const std::string& python : Pythons()) {
    SCOPED_TRACE(python);
    const PythonChild child(python, R"(import os, sys, time
sys.setrecursionlimit(5000)
def down(n):
    if n == 0:
        os.write(1, b"x")
        time.sleep(3600)
    down(n - 1)
down(500)
)");
    StackCapture capture({.max_frames = 8});
    const std::string text = capture.Capture(child.pid(), kBudget).native_stack;
    EXPECT_TRUE(absl::StrContains(text, "  py#7 down (")) << text;
    EXPECT_TRUE(absl::StrContains(text, "  ... 494 more Python frames\n")) << text;
  }
}

TEST(StackCapture, ProcessInUserCode_NamesTheFunctions) {
  const Child child([](int ready) { ImageLoader::LoadBatch(ready, 7); });
  StackCapture capture;
  const StackSnapshot snapshot = capture.Capture(child.pid(), kBudget);
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "muster::agent::AugmentForever(int)"))
      << snapshot.native_stack;
  EXPECT_TRUE(
      absl::StrContains(snapshot.native_stack, "muster::agent::ImageLoader::LoadBatch(int, int)"))
      << snapshot.native_stack;
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "(stack_capture_test)"))
      << snapshot.native_stack;
  // The process lives on, untraced.
  EXPECT_EQ(kill(child.pid(), 0), 0);
  EXPECT_NE(ReadProcessState(child.pid()).name, "traced");
}

// A string field must be UTF-8, but the kernel takes any bytes for the name of a file.
TEST(StackCapture, ProgramWhoseNameIsNotUtf8_HasAStackThatIs) {
  const TestFolder folder;
  const std::string program = folder.Path("caf\xe9");
  const absl::StatusOr<std::string> sleep = ReadFile("/bin/sleep");
  ASSERT_TRUE(sleep.ok()) << sleep.status();
  ASSERT_TRUE(WriteFileAtomically(program, *sleep).ok());
  ASSERT_EQ(chmod(program.c_str(), 0700), 0);
  const Child child([&](int ready) {
    const char byte = 'x';
    if (write(ready, &byte, 1) != 1) _exit(1);
    execl(program.c_str(), program.c_str(), "3600", nullptr);
    _exit(127);
  });
  StackCapture capture;
  std::string text;
  // If a look began in the middle of execl(), the text has the program's old name, no stack, or one
  // without the files that the program has since opened.
  WaitUntil([&] {
    text = capture.Capture(child.pid(), kBudget).native_stack;
    return absl::StrContains(text, "nanosleep") && !absl::StrContains(text, "no stack: ") &&
           absl::StrContains(text, " (caf\\xe9), ") &&  // of the process
           absl::StrContains(text, " (caf\\xe9)\n");    // of a frame
  });
  EXPECT_TRUE(IsValidUtf8(text)) << text;
}

TEST(StackCapture, BusyProcess_IsCaughtInItsLoop) {
  const Child child(SpinForever);
  StackCapture capture;
  const StackSnapshot snapshot = capture.Capture(child.pid(), kBudget);
  EXPECT_EQ(snapshot.process_state, "running");
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "SpinForever(int)"))
      << snapshot.native_stack;
}

TEST(StackCapture, ManyThreadsInOnePlace_AreOneEntry) {
  const Child child([](int ready) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 12; ++i) {
      threads.emplace_back([] {
        for (;;) pause();
      });
    }
    AugmentForever(ready);
  });
  StackCapture capture;
  // The threads may not have reached their places at the first look.
  std::string text;
  do {
    text = capture.Capture(child.pid(), kBudget).native_stack;
  } while (!absl::StrContains(text, "and 4 more, sleeping in pause"));
  EXPECT_TRUE(absl::StrContains(text, absl::StrCat(13 + kThreadsOfRuntime, " threads"))) << text;
  EXPECT_TRUE(absl::StrContains(text, "AugmentForever(int)")) << text;
}

TEST(StackCapture, StoppedProcess_IsReadAndStaysStopped) {
  const Child child([](int ready) { ImageLoader::LoadBatch(ready, 7); });
  kill(child.pid(), SIGSTOP);
  siginfo_t info = {};
  ASSERT_EQ(waitid(P_PID, child.pid(), &info, WSTOPPED), 0);
  StackCapture capture;
  const StackSnapshot snapshot = capture.Capture(child.pid(), kBudget);
  EXPECT_EQ(snapshot.process_state, "stopped");
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "LoadBatch")) << snapshot.native_stack;
  // On its way back from the tracer, the kernel lets the process run, to stop again at once.
  WaitUntil([&] { return ReadProcessState(child.pid()).name == "stopped"; });
  kill(child.pid(), SIGCONT);
  ASSERT_EQ(waitid(P_PID, child.pid(), &info, WCONTINUED), 0);
}

TEST(StackCapture, ProcessThatIsGone_HasNoStack) {
  pid_t pid = fork();
  if (pid == 0) _exit(0);
  siginfo_t info = {};
  ASSERT_EQ(waitid(P_PID, pid, &info, WEXITED | WNOWAIT), 0);
  StackCapture capture;
  StackSnapshot snapshot = capture.Capture(pid, kBudget);
  EXPECT_EQ(snapshot.process_state, "zombie");
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "no stack: it has exited"));
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  snapshot = capture.Capture(pid, kBudget);
  EXPECT_EQ(snapshot.process_state, "gone");
  EXPECT_EQ(snapshot.native_stack, "");
  EXPECT_EQ(capture.Capture(-5, kBudget).process_state, "gone");
}

TEST(StackCapture, PtraceRefused_SaysSoAndStillGivesTheState) {
  const Child child(AugmentForever);
  StackCapture capture({.seize = [](pid_t) { return EPERM; }});
  const StackSnapshot snapshot = capture.Capture(child.pid(), kBudget);
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "no stack: ptrace was refused"))
      << snapshot.native_stack;
  EXPECT_FALSE(snapshot.process_state.empty());
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, snapshot.process_state));
}

TEST(StackCapture, PtraceRefused_SaysWhatForbidsItAndWhatAllowsIt) {
  const TestFolder folder;
  const Child child(AugmentForever);
  const auto why = [&](const std::string& scope, pid_t pid) {
    EXPECT_TRUE(WriteFileAtomically(folder.Path("scope"), scope).ok());
    StackCapture capture(
        {.seize = [](pid_t) { return EPERM; }, .ptrace_scope_path = folder.Path("scope")});
    return capture.Capture(pid, kBudget).native_stack;
  };
  // An agent may trace its descendants.
  for (const char* const scope : {"0\n", "1\n"}) {
    const std::string text = why(scope, child.pid());
    EXPECT_TRUE(absl::StrContains(text, "or a seccomp profile with ptrace\n")) << text;
  }
  const pid_t sibling = fork();
  if (sibling == 0) {
    const std::string text = why("1\n", child.pid());
    _exit(absl::StrContains(text, "ptrace_scope is 1: give the agent CAP_SYS_PTRACE\n") ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(sibling, &status, 0), sibling);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(absl::StrContains(why("2\n", child.pid()), "ptrace_scope is 2: give the agent "));
  EXPECT_TRUE(absl::StrContains(why("3\n", child.pid()), "ptrace_scope is 3, which forbids it"));
}

TEST(StackCapture, AgentItself_SaysThatItDoesNotStop) {
  StackCapture capture;
  const std::string text = capture.Capture(getpid(), kBudget).native_stack;
  EXPECT_TRUE(absl::StrContains(text, "  no stack: this is the agent itself, ")) << text;
  EXPECT_FALSE(absl::StrContains(text, "ptrace")) << text;
}

TEST(StackCapture, TracedByAnother_NamesTheTracer) {
  const Child child(AugmentForever);
  const pid_t debugged = child.pid();
  // The tracer is another process: a separate child that seizes its sibling.
  const Child tracer([debugged](int ready) {
    if (ptrace(PTRACE_SEIZE, debugged, nullptr, nullptr) != 0) _exit(1);
    AugmentForever(ready);
  });
  StackCapture capture;
  const StackSnapshot snapshot = capture.Capture(debugged, kBudget);
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack,
                                absl::StrCat("process ", tracer.pid(), " traces it already")))
      << snapshot.native_stack;
}

TEST(StackCapture, DeepStack_IsCutWithACount) {
  const Child child([](int ready) { Recurse(ready, 100); });
  StackCapture capture({.max_frames = 10});
  const std::string text = capture.Capture(child.pid(), kBudget).native_stack;
  EXPECT_TRUE(absl::StrContains(text, "AugmentForever(int)")) << text;
  EXPECT_TRUE(absl::StrContains(text, " more frames")) << text;
}

TEST(StackCapture, Limits_HoldForThreadsAndBytes) {
  const Child child([](int ready) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 5; ++i) {
      threads.emplace_back([] {
        for (;;) pause();
      });
    }
    Recurse(ready, 40);
  });
  StackCapture few({.max_threads = 2});
  EXPECT_TRUE(absl::StrContains(few.Capture(child.pid(), kBudget).native_stack,
                                absl::StrCat("... ", 4 + kThreadsOfRuntime, " more threads")));
  StackCapture tight({.max_bytes = 600});
  const std::string text = tight.Capture(child.pid(), kBudget).native_stack;
  EXPECT_LE(text.size(), 600u);
  EXPECT_TRUE(absl::EndsWith(text, "... (cut)\n")) << text;
}

TEST(StackCapture, NoTime_StillTellsTheState) {
  const Child child(AugmentForever);
  StackCapture capture;
  const StackSnapshot snapshot = capture.Capture(child.pid(), absl::ZeroDuration());
  EXPECT_FALSE(snapshot.process_state.empty());
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack, "no stack:")) << snapshot.native_stack;
}

TEST(StackCapture, Exit_IsLeftForTheParentToCollect) {
  StackCapture capture;
  const pid_t pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  for (int i = 0; i < 20; ++i) {
    if (i == 10) kill(pid, SIGTERM);
    capture.Capture(pid, kBudget);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST(StackCapture, SeveralAtOnce_DoNotDisturbEachOther) {
  const Child child([](int ready) { ImageLoader::LoadBatch(ready, 7); });
  const Child other(SpinForever);
  StackCapture capture;
  std::vector<std::thread> threads;
  std::string texts[4];
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      texts[i] = capture.Capture(i % 2 == 0 ? child.pid() : other.pid(), kBudget).native_stack;
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Two look at the same process: one of them may find it traced.
  EXPECT_TRUE(absl::StrContains(texts[0] + texts[2], "LoadBatch")) << texts[0] << texts[2];
  EXPECT_TRUE(absl::StrContains(texts[1] + texts[3], "SpinForever")) << texts[1] << texts[3];
}

TEST(StackCapture, NoThreadToBeHad_SaysSo) {
  const Child child(AugmentForever);
  StackCapture capture({.start_thread = [](const std::function<void()>&) -> std::thread {
    throw std::system_error(EAGAIN, std::generic_category());
  }});
  const StackSnapshot snapshot = capture.Capture(child.pid(), kBudget);
  EXPECT_FALSE(snapshot.process_state.empty());
  EXPECT_TRUE(absl::StrContains(snapshot.native_stack,
                                "no stack: no thread can be started to take it (Resource "
                                "temporarily unavailable): "))
      << snapshot.native_stack;
}

// Each look that hangs costs a thread permanently.
TEST(StackCapture, LooksThatHang_AreNotRepeatedNorWithoutLimit) {
  struct Shared {
    Notification release;
    std::atomic<int> started{0};
  };
  const auto shared = std::make_shared<Shared>();
  StackCapture capture({.start_thread = [shared](const std::function<void()>& look) {
    ++shared->started;
    return std::thread([shared, look] {
      shared->release.WaitForNotification();
      look();
    });
  }});
  std::list<Child> children;
  for (int i = 0; i < 9; ++i) children.emplace_back(AugmentForever);
  const auto text = [&](const Child& child) {
    return capture.Capture(child.pid(), absl::Milliseconds(1)).native_stack;
  };
  for (const Child& child : children) {
    const std::string first = text(child);
    if (&child == &children.back()) {
      EXPECT_TRUE(absl::StrContains(first, "no stack: 8 looks at other processes have not ended"))
          << first;
      continue;
    }
    EXPECT_TRUE(absl::StrContains(first, "no stack: it took longer than 1ms")) << first;
    const std::string again = text(child);
    EXPECT_TRUE(absl::StrContains(again, "no stack: the look at it that began ")) << again;
  }
  EXPECT_EQ(shared->started, 8);
  shared->release.Notify();
  WaitUntil([] { return StackCapture::CollectLate() == 0; });
  EXPECT_FALSE(absl::StrContains(capture.Capture(children.back().pid(), kBudget).native_stack,
                                 "have not ended"));
}

TEST(StackCapture, LookThatHangs_SaysNothingOfAnotherProcessWithItsNumber) {
  const auto release = std::make_shared<Notification>();
  std::atomic<uint64_t> started = 1;
  StackCapture capture({.start_thread =
                            [release](const std::function<void()>& look) {
                              return std::thread([release, look] {
                                release->WaitForNotification();
                                look();
                              });
                            },
                        .started = [&](int64_t) { return started.load(); }});
  const Child child(AugmentForever);
  const auto text = [&] {
    return capture.Capture(child.pid(), absl::Milliseconds(1)).native_stack;
  };
  EXPECT_TRUE(absl::StrContains(text(), "it took longer than 1ms"));
  EXPECT_TRUE(absl::StrContains(text(), "the look at it that began "));
  started = 2;
  EXPECT_TRUE(absl::StrContains(text(), "it took longer than 1ms"));
  release->Notify();
  WaitUntil([] { return StackCapture::CollectLate() == 0; });
}

// A process that the kernel holds may hold a thread that looks at it.
TEST(StackCapture, LookThatHangs_KeepsNobody) {
  const Child child([](int ready) { ImageLoader::LoadBatch(ready, 7); });
  struct Look {
    Notification release, hung, done;
  };
  const auto look = std::make_shared<Look>();
  {
    StackCapture capture({.end_timeout = absl::ZeroDuration(), .seize = [look](pid_t) {
                            look->hung.Notify();
                            look->release.WaitForNotification();
                            look->done.Notify();
                            return EPERM;
                          }});
    // On a busy machine its time may be up before it looks.
    do {
      capture.Capture(child.pid(), absl::Seconds(1));
    } while (!look->hung.HasBeenNotified());
  }
  EXPECT_FALSE(look->done.HasBeenNotified());
  look->release.Notify();
  look->done.WaitForNotification();
  WaitUntil([] { return StackCapture::CollectLate() == 0; });
}

}  // namespace
}  // namespace muster::agent
