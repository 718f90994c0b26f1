#include "agent/node_service.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/test_failing_disk.h"
#include "base/test_folder.h"
#include "base/test_hidden_path.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "rpc/server.h"
#include "rpc/test_listener.h"

namespace muster::agent {
namespace {

// Refuses the node at each call, after `first`, which ends its service unless an attempt runs.
class RefusingNodes final : public v1::Nodes::Service {
 public:
  explicit RefusingNodes(std::function<void()> first = [] {}) : first_(std::move(first)) {}

  grpc::Status Sync(grpc::ServerContext*, const v1::SyncNodeRequest* request,
                    v1::SyncNodeReply*) override {
    MutexLock lock(&mu_);
    first_();
    request_ = *request;
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "not this node");
  }
  v1::SyncNodeRequest request() {
    MutexLock lock(&mu_);
    return request_;
  }

 private:
  const std::function<void()> first_;
  Mutex mu_;
  v1::SyncNodeRequest request_ ABSL_GUARDED_BY(mu_);
};

// Returns the options of a node with one CPU.
NodeServiceOptions OptionsOf(const std::string& state_dir) {
  NodeServiceOptions options;
  options.state_dir = state_dir;
  options.node = "n";
  options.info.set_cpus(1);
  options.control_groups = "off";
  return options;
}

// A request says how long attempts have run: one that was made while the coordinator was away would
// add that time again.
TEST(NodeServiceTest, CoordinatorWasAway_TheRequestIsMadeWhenItIsThere) {
  const TestFolder folder;
  auto before = std::make_unique<rpc::TestListener>();
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  options.coordinator = absl::StrCat("127.0.0.1:", before->port());
  absl::Status ended;
  std::thread service([&] { ended = RunNodeService(options); });
  // The first call fails with the first connection, and after these the next call has begun.
  constexpr int kConnections = 6;
  for (int i = 0; i < kConnections; ++i) close(accept(before->fd(), nullptr, nullptr));
  before.reset();
  const int64_t back = absl::ToUnixMicros(absl::Now());
  RefusingNodes nodes;
  const auto server =
      rpc::Server::Start({.listen = options.coordinator, .insecure = true}, {&nodes});
  EXPECT_TRUE(server.ok()) << server.status();
  service.join();
  EXPECT_EQ(ended.code(), absl::StatusCode::kPermissionDenied) << ended;
  EXPECT_EQ(nodes.request().node(), "n");
  // The number of a request is the time when it is made, in microseconds.
  EXPECT_GE(nodes.request().sequence(), static_cast<uint64_t>(back));
}

// Returns whether an HTTP/2 PING comes before `deadline`, after anything else that the peer sends.
bool PingComes(int fd, absl::Time deadline) {
  constexpr size_t kPreface = 24, kFrameHeader = 9;
  constexpr char kPing = 6;
  std::string bytes;
  size_t at = kPreface;  // the next frame
  while (true) {
    while (bytes.size() >= at + kFrameHeader) {
      if (bytes[at + 3] == kPing) return true;
      const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[at + i]); };
      at += kFrameHeader + (byte(0) << 16 | byte(1) << 8 | byte(2));
    }
    pollfd event = {fd, POLLIN, 0};
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration() ||
        poll(&event, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) {
      return false;
    }
    char buffer[4096];
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got <= 0) return false;
    bytes.append(buffer, static_cast<size_t>(got));
  }
}

// A connection may be gone without notice: a node that waits for an answer on it for longer than a
// lease is lost, and its jobs with it. The hold of a third of the lease, the ping, and 10 s for its
// answer must fit.
TEST(NodeServiceTest, ConnectionIsSilent_ItIsPingedWellBeforeALeaseEnds) {
  const TestFolder folder;
  auto silent = std::make_unique<rpc::TestListener>();
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  options.coordinator = absl::StrCat("127.0.0.1:", silent->port());
  absl::Status ended;
  std::thread service([&] { ended = RunNodeService(options); });
  OwnedFd connection(accept(silent->fd(), nullptr, nullptr));
  const std::string settings("\0\0\0\4\0\0\0\0\0", 9);
  EXPECT_EQ(write(connection.get(), settings.data(), settings.size()), ssize_t{9});
  EXPECT_TRUE(PingComes(connection.get(), Clock::Real().Now() + absl::Seconds(9)));
  connection.Close();
  silent.reset();
  RefusingNodes nodes;
  const auto server =
      rpc::Server::Start({.listen = options.coordinator, .insecure = true}, {&nodes});
  EXPECT_TRUE(server.ok()) << server.status();
  service.join();
  EXPECT_EQ(ended.code(), absl::StatusCode::kPermissionDenied) << ended;
}

// Gives the node one attempt after the other, on a disk that fails at the next call of each.
class FailingStarts final : public v1::Nodes::Service {
 public:
  FailingStarts(std::string attempts, int starts)
      : attempts_(std::move(attempts)), starts_(starts) {}

  grpc::Status Sync(grpc::ServerContext*, const v1::SyncNodeRequest* request,
                    v1::SyncNodeReply* reply) override {
    MutexLock lock(&mu_);
    disk_fault.Disarm();
    for (const v1::AttemptReport& report : request->attempts()) {
      if (report.attempt() != attempt_ || report.state() != v1::PLACEMENT_STATE_ENDED) continue;
      EXPECT_EQ(report.end().end_class(), v1::END_CLASS_NODE_FAILED);
      why_ = report.end().why();
      EXPECT_EQ(*ListDirectory(attempts_), std::vector<std::string>{}) << "attempt " << attempt_;
      ++attempt_;
    }
    if (attempt_ > starts_) return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "all seen");
    reply->set_version(++version_);
    v1::NodeAssignment* const assignment = reply->add_assignments();
    assignment->set_job_id("mnist-1");
    assignment->set_attempt(attempt_);
    assignment->set_processes(1);
    assignment->mutable_spec()->add_argv("true");
    disk_fault.error = ENOSPC;
    disk_fault.lasts = true;
    disk_fault.Arm(attempt_ + 1);  // the first call makes the folder
    return grpc::Status::OK;
  }
  std::string why() {
    MutexLock lock(&mu_);
    return why_;
  }

 private:
  const std::string attempts_;
  const int starts_;
  Mutex mu_;
  int attempt_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t version_ ABSL_GUARDED_BY(mu_) = 0;
  std::string why_ ABSL_GUARDED_BY(mu_);
};

TEST(NodeServiceTest, StartFailsOnAFullDisk_NoFolderOfTheAttemptIsLeft) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("failing_disk")).ok());
  // A name that is not UTF-8 must not keep the node from reporting the failure.
  NodeServiceOptions options = OptionsOf(folder.Path("failing_disk/caf\xe9"));
  FailingStarts nodes(JoinPath(options.state_dir, "attempts"), /*starts=*/4);
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  const absl::Status ended = RunNodeService(options);
  EXPECT_EQ(ended.message(), "all seen");
  EXPECT_THAT(nodes.why(), testing::HasSubstr("caf\\xe9"));
}

// Left by an agent that was killed while it made the folder.
TEST(NodeServiceTest, OldFolderWithoutARecord_IsRemoved) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  const std::string old = JoinPath(options.state_dir, "attempts/mnist-1.1");
  const std::string fresh = JoinPath(options.state_dir, "attempts/mnist-1.2");
  ASSERT_TRUE(MakeDirectories(old).ok());
  ASSERT_TRUE(MakeDirectories(fresh).ok());
  const timespec long_ago[2] = {{.tv_sec = 1000, .tv_nsec = 0}, {.tv_sec = 1000, .tv_nsec = 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, old.c_str(), long_ago, 0), 0);
  RefusingNodes nodes([&] { WaitUntil([&] { return !PathExists(old); }); });
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_TRUE(PathExists(fresh));
}

// Returns the options of a node whose folder has an attempt of the job mnist-1.
NodeServiceOptions OptionsWithAttempt(const std::string& state_dir) {
  NodeServiceOptions options = OptionsOf(state_dir);
  const std::string attempt = JoinPath(state_dir, "attempts/mnist-1.1");
  EXPECT_TRUE(MakeDirectories(attempt).ok());
  const std::string record =
      R"({"job": "mnist-1", "attempt": 1, "cluster": "c", "started": 1, "first_rank": 0})";
  EXPECT_TRUE(WriteFileAtomically(JoinPath(attempt, "record.json"), record).ok());
  EXPECT_TRUE(WriteFileAtomically(JoinPath(attempt, "lock"), "").ok());
  return options;
}

// A lack of descriptors or memory, or a disk that is away, says nothing about an attempt. A loop of
// links stands for these errors.
TEST(NodeServiceTest, FileOfAnAttemptCannotBeOpened_TheAgentEndsRatherThanTellOfItsEnd) {
  RefusingNodes nodes;
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* name : {"record.json", "lock", "end.json"}) {
    const TestFolder folder;
    NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
    options.coordinator = (*server)->address();
    const std::string path = JoinPath(options.state_dir, absl::StrCat("attempts/mnist-1.1/", name));
    unlink(path.c_str());
    ASSERT_EQ(symlink(name, path.c_str()), 0);
    const absl::Status ended = RunNodeService(options);
    EXPECT_THAT(ended.message(), testing::HasSubstr("attempt mnist-1.1")) << name;
    EXPECT_THAT(ended.message(), testing::HasSubstr(path)) << name;
    EXPECT_THAT(ended.message(), testing::HasSubstr("symbolic links")) << name;
    // The next start finds the file unchanged.
    unlink(path.c_str());
    if (path.ends_with("lock")) {
      ASSERT_TRUE(WriteFileAtomically(path, "").ok());
    }
    EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options))) << name;
  }
}

// Whether the variables of a job, which may be secrets, are on the disk.
bool HasVariables(const NodeServiceOptions& options) {
  const std::string attempts = JoinPath(options.state_dir, "attempts");
  const auto names = ListDirectory(attempts);
  EXPECT_TRUE(names.ok() && names->size() == 1) << names.status();
  return names.ok() && std::any_of(names->begin(), names->end(), [&](const std::string& name) {
           return access(JoinPath(JoinPath(attempts, name), "env").c_str(), F_OK) == 0;
         });
}

// Left by an agent that was killed before it started the runner.
TEST(NodeServiceTest, AttemptWithoutARunner_ItsVariablesAreRemoved) {
  RefusingNodes nodes;
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  const TestFolder folder;
  NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
  options.coordinator = (*server)->address();
  const std::string variables = JoinPath(options.state_dir, "attempts/mnist-1.1/env");
  ASSERT_TRUE(WriteFileAtomically(variables, "KEY=secret").ok());
  ASSERT_TRUE(HasVariables(options));
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_FALSE(HasVariables(options));
}

// Larger than any file of a runner: a later start cannot read it, either.
TEST(NodeServiceTest, FileOfAnAttemptIsTooLarge_TheAgentStarts) {
  RefusingNodes nodes;
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* name : {"record.json", "end.json"}) {
    const TestFolder folder;
    NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
    options.coordinator = (*server)->address();
    const std::string path = JoinPath(options.state_dir, absl::StrCat("attempts/mnist-1.1/", name));
    ASSERT_TRUE(WriteFileAtomically(path, std::string((1 << 20) + 1, ' ')).ok());
    EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options))) << name;
  }
}

// Runs one attempt, and receives its end.
class AdoptingNodes final : public v1::Nodes::Service {
 public:
  explicit AdoptingNodes(std::function<void(grpc::ServerContext*)> first,
                         std::vector<int> gpus = {})
      : gpus_(std::move(gpus)), first_(std::move(first)) {}

  grpc::Status Sync(grpc::ServerContext* context, const v1::SyncNodeRequest* request,
                    v1::SyncNodeReply* reply) override {
    for (const v1::AttemptReport& report : request->attempts()) {
      if (report.state() != v1::PLACEMENT_STATE_ENDED) continue;
      MutexLock lock(&mu_);
      end_ = report.end();
      return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "it has ended");
    }
    if (first_) std::exchange(first_, nullptr)(context);
    reply->mutable_header()->set_cluster_id("c");
    reply->set_version(1);
    v1::NodeAssignment* const assignment = reply->add_assignments();
    assignment->set_job_id("mnist-1");
    assignment->set_attempt(1);
    assignment->set_num_nodes(1);
    assignment->set_processes(1);
    assignment->mutable_gpus()->Add(gpus_.begin(), gpus_.end());
    assignment->mutable_spec()->add_argv("true");
    return grpc::Status::OK;
  }
  v1::AttemptEnd end() {
    MutexLock lock(&mu_);
    return end_;
  }

 private:
  const std::vector<int> gpus_;
  std::function<void(grpc::ServerContext*)> first_;
  Mutex mu_;
  v1::AttemptEnd end_ ABSL_GUARDED_BY(mu_);
};

TEST(NodeServiceTest, ReportCannotBeReadWhenTheRunnerEnds_ItIsTriedAgain) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
  const std::string attempt = JoinPath(options.state_dir, "attempts/mnist-1.1");
  const std::string end = JoinPath(attempt, "end.json");
  ASSERT_TRUE(WriteFileAtomically(end, R"({"endClass": "END_CLASS_USER_ERROR", "rank": 3})").ok());
  // The agent reads the file once in each turn that finds a runner that it cannot watch.
  const std::string pid = JoinPath(attempt, "runner.pid");
  ASSERT_TRUE(WriteFileAtomically(pid, "none").ok());
  const OwnedFd turns(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  ASSERT_GE(inotify_add_watch(turns.get(), pid.c_str(), IN_OPEN), 0);
  OwnedFd runs(open(JoinPath(attempt, "lock").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(runs.get(), LOCK_EX), 0);
  AdoptingNodes nodes([&](grpc::ServerContext* context) {
    const HiddenPath hidden(end);
    runs.Close();
    // Between the second and the third read it has looked for the report. A call that it cancels
    // shows that it has decided.
    char events[4096];
    int seen = 0;
    WaitUntil([&] {
      if (read(turns.get(), events, sizeof(events)) > 0) ++seen;
      return seen >= 3 || context->IsCancelled();
    });
  });
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_EQ(nodes.end().end_class(), v1::END_CLASS_USER_ERROR) << nodes.end().why();
  EXPECT_EQ(nodes.end().rank(), 3);
}

TEST(NodeServiceTest, RunnerCannotStart_ItsLastLineIsTold) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  options.runner = {"/bin/sh", "-c",
                    "echo first >&2; echo 'libx.so: file too short' >&2; exit 127"};
  AdoptingNodes nodes([](grpc::ServerContext*) {});
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_EQ(nodes.end().end_class(), v1::END_CLASS_NODE_FAILED);
  EXPECT_EQ(nodes.end().why(),
            "its runner no longer exists (exit 127) and left no report; its last line: libx.so: "
            "file too short");
  EXPECT_FALSE(HasVariables(options));
}

// Hears of the end, and then only of processes that are left, until those are gone.
class LeftNodes final : public v1::Nodes::Service {
 public:
  explicit LeftNodes(std::function<void()> free) : free_(std::move(free)) {}

  grpc::Status Sync(grpc::ServerContext*, const v1::SyncNodeRequest* request,
                    v1::SyncNodeReply* reply) override {
    std::string states;
    for (const v1::AttemptReport& report : request->attempts()) {
      absl::StrAppend(&states, v1::PlacementState_Name(report.state()).substr(16), " ");
    }
    MutexLock lock(&mu_);
    if (states_.empty() || states_.back() != states) states_.push_back(states);
    if (states.empty()) return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "all gone");
    reply->mutable_header()->set_cluster_id("c");
    reply->set_version(states_.size());
    if (states == "RUNNING " && states_.size() > 1) std::exchange(free_, [] {})();
    if (states == "RUNNING " && states_.size() == 1) {
      v1::NodeAssignment* const assignment = reply->add_assignments();
      assignment->set_job_id("mnist-1");
      assignment->set_attempt(1);
    }
    return grpc::Status::OK;
  }
  std::vector<std::string> states() {
    MutexLock lock(&mu_);
    return states_;
  }

 private:
  Mutex mu_;
  std::function<void()> free_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> states_ ABSL_GUARDED_BY(mu_);
};

// Starts a process that holds the lock of an attempt, as its workers do.
pid_t StartHolderOfLock(const std::string& attempt) {
  OwnedFd held(open(JoinPath(attempt, "lock").c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_EQ(flock(held.get(), LOCK_EX), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    while (true) pause();
  }
  return holder;
}

// A debugger that stands still at the end of a process of the attempt stands for a disk or a driver
// that hangs: the process takes SIGKILL and does not end. Its runner has left a report.
TEST(NodeServiceTest, ProcessThatSigkillDoesNotEnd_AttemptEnds_AndTheNodeSaysThatItIsThere) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
  options.patience = absl::Milliseconds(50);
  const std::string attempt = JoinPath(options.state_dir, "attempts/mnist-1.1");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(attempt, "end.json"),
                                  R"({"endClass": "END_CLASS_PROCESS_FAILED", "why": "stuck"})")
                  .ok());
  const pid_t stuck = StartHolderOfLock(attempt);
  ASSERT_EQ(ptrace(PTRACE_SEIZE, stuck, nullptr, PTRACE_O_TRACEEXIT), 0) << strerror(errno);
  // Only this thread may let it go.
  std::promise<void> seen;
  LeftNodes nodes([&] { seen.set_value(); });
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  absl::Status ended;
  std::thread service([&] { ended = RunNodeService(options); });
  seen.get_future().wait();
  siginfo_t info = {};
  EXPECT_EQ(waitid(P_PID, stuck, &info, WSTOPPED), 0) << strerror(errno);
  EXPECT_EQ(ptrace(PTRACE_DETACH, stuck, nullptr, nullptr), 0);
  waitpid(stuck, nullptr, 0);
  service.join();
  EXPECT_TRUE(absl::IsPermissionDenied(ended)) << ended;
  EXPECT_THAT(nodes.states(), testing::ElementsAre("RUNNING ", "ENDED RUNNING ", "RUNNING ", ""));
}

// Killed while no agent ran, on a node without control groups: a worker of its holds the lock.
TEST(NodeServiceTest, RunnerThatIsGoneWithoutAReport_ItsWorkersAreKilled_AndTheAttemptEnds) {
  for (const bool reused : {false, true}) {
    const TestFolder folder;
    NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
    options.patience = absl::Milliseconds(50);
    const std::string attempt = JoinPath(options.state_dir, "attempts/mnist-1.1");
    const pid_t runner = fork();
    if (runner == 0) _exit(0);
    ASSERT_EQ(waitpid(runner, nullptr, 0), runner);
    ASSERT_TRUE(WriteFileAtomically(JoinPath(attempt, "runner.pid"),
                                    absl::StrCat(reused ? getpid() : runner))
                    .ok());
    const pid_t worker = StartHolderOfLock(attempt);
    AdoptingNodes nodes(nullptr);
    const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
    ASSERT_TRUE(server.ok()) << server.status();
    options.coordinator = (*server)->address();
    EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
    EXPECT_EQ(nodes.end().end_class(), v1::END_CLASS_NODE_FAILED);
    EXPECT_THAT(nodes.end().why(), testing::HasSubstr("its runner no longer exists"));
    int status = 0;
    EXPECT_EQ(waitpid(worker, &status, 0), worker);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  }
}

TEST(NodeServiceTest, RunnerOfAnAgentWithAnotherSpellingOfItsFolder_IsThere) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
  options.patience = absl::ZeroDuration();
  const std::string attempt = JoinPath(options.state_dir, "attempts/mnist-1.1");
  OwnedFd held(open(JoinPath(attempt, "lock").c_str(), O_RDWR));
  ASSERT_EQ(flock(held.get(), LOCK_EX), 0);
  int started[2], input[2];
  ASSERT_EQ(pipe(started), 0);
  ASSERT_EQ(pipe(input), 0);
  const std::string option = absl::StrCat("--attempt_dir=", attempt);
  const pid_t runner = fork();
  if (runner == 0) {
    dup2(started[1], STDOUT_FILENO);
    dup2(input[0], STDIN_FILENO);
    execl("/bin/sh", "sh", "-c", "echo r; read line; exit 3", option.c_str(), nullptr);
    _exit(127);
  }
  held.Close();
  char byte = 0;
  ASSERT_EQ(read(started[0], &byte, 1), 1);
  ASSERT_TRUE(WriteFileAtomically(JoinPath(attempt, "runner.pid"), absl::StrCat(runner)).ok());
  options.state_dir = folder.Path("./state");
  AdoptingNodes nodes(
      [&](grpc::ServerContext*) { EXPECT_EQ(write(input[1], "\n", 1), ssize_t{1}); });
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  int status = 0;
  EXPECT_EQ(waitpid(runner, &status, 0), runner);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << "it was killed";
  for (const int fd : {started[0], started[1], input[0], input[1]}) close(fd);
}

// All machines of a job must have one lease.
TEST(NodeServiceTest, VariablesOfTheNode_AreNotItsRunners) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  for (const char* const name : {"MUSTER_LEASE", "MUSTER_OUTAGE_TOLERANCE", "MUSTER_TLS_CA",
                                 "MUSTER_TLS_CERT", "MUSTER_TLS_KEY", "MUSTER_TOKEN_FILE"}) {
    options.environment[name] = "60s";
  }
  options.environment["OTHER"] = "stays";
  options.runner = {"/bin/sh", "-c", "echo $OTHER $(env | grep -c 60s); exit 3"};
  AdoptingNodes nodes([](grpc::ServerContext*) {});
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_THAT(nodes.end().why(), testing::HasSubstr("its last line: stays 0"));
}

TEST(NodeServiceTest, AgentOfSomeGpus_GivesJobsTheirNames) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  options.environment["CUDA_VISIBLE_DEVICES"] = "2,GPU-6f2a,5";
  options.gpus = {"2", "GPU-6f2a", "5"};
  for (int i = 0; i < 3; ++i) options.info.add_gpus("");
  options.runner = {"/bin/sh", "-c", "echo devices $CUDA_VISIBLE_DEVICES; exit 3"};
  AdoptingNodes nodes([](grpc::ServerContext*) {}, /*gpus=*/{1, 2});
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_THAT(nodes.end().why(), testing::HasSubstr("its last line: devices GPU-6f2a,5"));
  const std::string attempts = JoinPath(options.state_dir, "attempts");
  const auto names = ListDirectory(attempts);
  ASSERT_TRUE(names.ok() && names->size() == 1) << names.status();
  EXPECT_THAT(*ReadFile(JoinPath(JoinPath(attempts, names->at(0)), "record.json")),
              testing::HasSubstr(R"("gpus":{"1":"GPU-6f2a","2":"5"})"));
}

TEST(NodeServiceTest, GpuThatTheNodeDoesNotHave_IsRefused) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsOf(folder.Path("state"));
  options.gpus = {"4", "5"};
  for (int i = 0; i < 2; ++i) options.info.add_gpus("");
  options.runner = {"/bin/sh", "-c", "exit 0"};
  AdoptingNodes nodes([](grpc::ServerContext*) {}, /*gpus=*/{1, 4});
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_EQ(nodes.end().end_class(), v1::END_CLASS_NODE_FAILED);
  EXPECT_EQ(nodes.end().why(), "GPU 4 is not among the 2 of this node: it had more before");
}

// Their numbers are known to the coordinator, which would give them to another job, too.
TEST(NodeServiceTest, GpusOfAnAttemptThatRuns_KeepTheirNumbers) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
  const std::string attempt = JoinPath(options.state_dir, "attempts/mnist-1.1");
  std::string record = *ReadFile(JoinPath(attempt, "record.json"));
  record.insert(record.find('{') + 1, R"("gpus": {"0": "2"}, )");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(attempt, "record.json"), record).ok());
  OwnedFd runs(open(JoinPath(attempt, "lock").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(runs.get(), LOCK_EX), 0);
  // The agent has adopted it: it ends, and so does the agent.
  RefusingNodes nodes([&] { runs.Close(); });
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  options.gpus = {"3", "2"};
  const absl::Status refused = RunNodeService(options);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(),
              testing::HasSubstr("attempt mnist-1.1 runs on GPU 2, which was number 0 of this "
                                 "agent's; now that is 3: "));
  options.gpus = {"2", "3"};
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_EQ(nodes.request().node(), "n");  // its lock orders the end of `runs` before what follows
  EXPECT_FALSE(runs.open());
  options.gpus = {"3", "2"};
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_EQ(nodes.request().node(), "n");
}

// The agent starts before its network: the next attempt has the address.
TEST(NodeServiceTest, NodeWithoutAnAddress_StartsNothingUntilItHasOne) {
  const TestFolder folder;
  std::string address;
  const auto end_of_an_attempt = [&](const std::string& state) {
    NodeServiceOptions options = OptionsOf(folder.Path(state));
    options.runner = {"/bin/sh", "-c", "for w; do case $w in --host*) echo $w; esac; done; exit 3",
                      "sh"};
    options.own_address = [&](const rpc::Address&) { return address; };
    AdoptingNodes nodes([&](grpc::ServerContext*) {});
    const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
    EXPECT_TRUE(server.ok()) << server.status();
    options.coordinator = (*server)->address();
    EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
    EXPECT_EQ(nodes.end().end_class(), v1::END_CLASS_NODE_FAILED);
    EXPECT_FALSE(HasVariables(options));
    return nodes.end().why();
  };
  EXPECT_THAT(end_of_an_attempt("without"), testing::HasSubstr("this node has no address"));
  address = "10.9.8.7";
  EXPECT_THAT(end_of_an_attempt("with"), testing::HasSubstr("its last line: --host=10.9.8.7"));
}

// The attempt has left millions of files.
TEST(NodeServiceTest, OldFilesTakeLongToRemove_AnEndIsToldMeanwhile) {
  const TestFolder folder;
  NodeServiceOptions options = OptionsWithAttempt(folder.Path("state"));
  OwnedFd runs(
      open(JoinPath(options.state_dir, "attempts/mnist-1.1/lock").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(runs.get(), LOCK_EX), 0);
  const std::string old = JoinPath(options.state_dir, "attempts/old-1.1");
  ASSERT_TRUE(MakeDirectories(old).ok());
  const timespec long_ago[2] = {{.tv_sec = 1000, .tv_nsec = 0}, {.tv_sec = 1000, .tv_nsec = 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, old.c_str(), long_ago, 0), 0);
  Notification removes;
  AdoptingNodes nodes([&](grpc::ServerContext*) {
    removes.WaitForNotification();
    runs.Close();
  });
  options.remove_tree = [&](const std::string& path) {
    removes.Notify();
    WaitUntil([&] { return nodes.end().end_class() != v1::END_CLASS_UNSPECIFIED; });
    return RemoveTree(path);
  };
  const auto server = rpc::Server::Start({.insecure = true}, {&nodes});
  ASSERT_TRUE(server.ok()) << server.status();
  options.coordinator = (*server)->address();
  EXPECT_TRUE(absl::IsPermissionDenied(RunNodeService(options)));
  EXPECT_FALSE(PathExists(old));
}

TEST(NodeServiceTest, FactsThatAreNotUtf8_AreRefusedBeforeTheFirstCall) {
  const TestFolder folder;
  NodeServiceOptions options;
  options.coordinator = "127.0.0.1:1";
  options.state_dir = folder.Path("state");
  options.node = "n";
  options.control_groups = "off";
  options.info.add_labels()->set_value("caf\xe9");
  EXPECT_EQ(RunNodeService(options).message(), "info.labels[0].value is not UTF-8: \"caf\\xe9\"");
}

}  // namespace
}  // namespace muster::agent
