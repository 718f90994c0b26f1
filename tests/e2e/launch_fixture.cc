#include "tests/e2e/launch_fixture.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace muster {

std::vector<int> Numbers(absl::string_view text) {
  std::vector<int> numbers;
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    int number = 0;
    if (absl::SimpleAtoi(word, &number)) numbers.push_back(number);
  }
  return numbers;
}

Command::Command(agent::ProcessHost& host, std::vector<std::string> argv,
                 std::map<std::string, std::string> env, bool terminal) {
  agent::ProcessOptions options;
  options.argv = std::move(argv);
  for (const auto& [name, value] : env) options.env.push_back(absl::StrCat(name, "=", value));
  options.stdout_terminal = terminal;
  options.stderr_terminal = terminal;
  options.on_line = [this](agent::OutputStream stream, absl::string_view line) {
    MutexLock lock(&mu_);
    lines_.emplace_back(stream, std::string(line));
    changed_.SignalAll();
  };
  options.on_exit = [this](const agent::ProcessExit&) {
    MutexLock lock(&mu_);
    ended_ = true;
    changed_.SignalAll();
  };
  auto process = host.Spawn(std::move(options));
  EXPECT_TRUE(process.ok()) << process.status();
  process_ = *std::move(process);
}

Command::~Command() {
  if (process_ == nullptr) return;
  process_->Signal(SIGKILL);
  process_->Wait();  // it calls back
}

std::string Command::WaitForLine(absl::string_view prefix, int count) {
  MutexLock lock(&mu_);
  for (;;) {
    int seen = 0;
    for (const auto& [stream, line] : lines_) {
      if (absl::StartsWith(line, prefix) && ++seen == count) return line.substr(prefix.size());
    }
    if (ended_) {
      ADD_FAILURE() << "the command ended without a line that begins with " << prefix;
      for (const auto& [stream, line] : lines_) ADD_FAILURE() << line;
      return "";
    }
    changed_.Wait(&mu_);
  }
}

int Command::Wait() {
  const agent::ProcessExit exit = process_->Wait();
  return exit.signal != 0 ? -exit.signal : exit.exit_code;
}

std::vector<std::string> Command::Lines(agent::OutputStream stream) const {
  MutexLock lock(&mu_);
  std::vector<std::string> lines;
  for (const auto& [which, line] : lines_) {
    if (which == stream) lines.push_back(line);
  }
  return lines;
}

std::string LaunchFixture::Runfile(const std::string& path) {
  const char* const root = getenv("TEST_SRCDIR");
  if (root != nullptr) return absl::StrCat(root, "/muster/", path);
  // Absolute: a job's programs start in other folders.
  return std::filesystem::absolute(absl::StrCat("bazel-bin/", path)).string();
}

void LaunchFixture::SetUp() {
  env_ = {{"PATH", "/usr/bin:/bin"},
          {"HOME", temp_},
          {"CUDA_VISIBLE_DEVICES", ""},
          {"MUSTER_PREFIX", "true"}};
  // Commands inherit what is ignored, and these tests may run in the background of a shell.
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT}) ::signal(signal, SIG_DFL);
  env_["MUSTER_RUNTIME_DIR"] = runtime_;
  auto host = agent::ProcessHost::Start();
  ASSERT_TRUE(host.ok()) << host.status();
  host_ = *std::move(host);
}

std::string LaunchFixture::TokenFile(const std::string& token) {
  // Written elsewhere and renamed, with its mode set: a command that got the path earlier may be
  // reading it.
  const std::string path = Temp("token"), made = Temp("token.new");
  EXPECT_TRUE(WriteFileAtomically(made, token).ok());
  EXPECT_EQ(chmod(made.c_str(), 0600), 0);
  EXPECT_EQ(rename(made.c_str(), path.c_str()), 0);
  return path;
}

std::unique_ptr<Command> LaunchFixture::Muster(std::vector<std::string> args, bool terminal) {
  args.insert(args.begin(), Runfile("client/cli/muster"));
  return std::make_unique<Command>(*host_, std::move(args), env_, terminal);
}

std::unique_ptr<Command> LaunchFixture::Launch(std::vector<std::string> args,
                                               const std::string& script, bool terminal) {
  args.insert(args.begin(), "launch");
  args.insert(args.end(), {"--", "/bin/sh", "-c", script});
  return Muster(std::move(args), terminal);
}

std::unique_ptr<Command> ClusterFixture::StartCoordinator(std::vector<std::string> more,
                                                          std::vector<std::string> callers) {
  std::vector<std::string> args = {Runfile("coordinator/cmd/muster-coordinator"), "--data_dir",
                                   Temp("journal"), "--listen",
                                   address_.empty() ? "127.0.0.1:0" : address_};
  args.insert(args.end(), more.begin(), more.end());
  args.insert(args.end(), callers.begin(), callers.end());
  auto coordinator = std::make_unique<Command>(*host_, std::move(args), env_);
  address_ = absl::StrCat("127.0.0.1:", coordinator->WaitForLine("127.0.0.1:"));
  return coordinator;
}

std::unique_ptr<Command> ClusterFixture::Agent(const std::string& job, int num_machines,
                                               int num_processes, std::vector<std::string> program,
                                               std::vector<std::string> more) {
  std::vector<std::string> args = {Runfile("agent/cmd/muster-agent"),
                                   "--coordinator",
                                   address_,
                                   "--job_name",
                                   job,
                                   "--num_machines",
                                   absl::StrCat(num_machines),
                                   "--num_processes",
                                   absl::StrCat(num_processes),
                                   "--cpu"};
  args.insert(args.end(), more.begin(), more.end());
  args.push_back("--");
  args.insert(args.end(), program.begin(), program.end());
  return std::make_unique<Command>(*host_, std::move(args), env_);
}

}  // namespace muster
