#ifndef MUSTER_TESTS_E2E_LAUNCH_FIXTURE_H_
#define MUSTER_TESTS_E2E_LAUNCH_FIXTURE_H_

#include <signal.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "agent/process.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {

// Returns the numbers in `text`.
std::vector<int> Numbers(absl::string_view text);

// One `muster` command as a process of its own, with its lines.
class Command {
 public:
  Command(agent::ProcessHost& host, std::vector<std::string> argv,
          std::map<std::string, std::string> env, bool terminal = false);
  // Kills it if it still runs.
  ~Command();

  // Blocks until a line of either stream begins with `prefix` (the `count`th such line); returns
  // the rest of it.
  std::string WaitForLine(absl::string_view prefix, int count = 1);
  // Blocks until the command has ended; -N if signal N ended it.
  int Wait();
  // Returns whether it has ended, after waiting for at most `timeout`.
  bool EndsWithin(absl::Duration timeout) { return process_->WaitFor(timeout).has_value(); }
  void Signal(int signal) { process_->Signal(signal); }
  pid_t pid() const { return process_->pid(); }
  std::vector<std::string> out() const { return Lines(agent::OutputStream::kStdout); }
  std::vector<std::string> err() const { return Lines(agent::OutputStream::kStderr); }
  std::string out_text() const { return absl::StrJoin(out(), "\n"); }
  std::string err_text() const { return absl::StrJoin(err(), "\n"); }

 private:
  std::vector<std::string> Lines(agent::OutputStream stream) const;

  mutable Mutex mu_;
  CondVar changed_;
  std::vector<std::pair<agent::OutputStream, std::string>> lines_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<agent::Process> process_;
};

// Runs the real binaries.
class LaunchFixture : public ::testing::Test {
 protected:
  void SetUp() override;

  // Starts `muster ARGS...`.
  std::unique_ptr<Command> Muster(std::vector<std::string> args, bool terminal = false);
  // Starts `muster launch ARGS... -- /bin/sh -c SCRIPT`.
  std::unique_ptr<Command> Launch(std::vector<std::string> args, const std::string& script,
                                  bool terminal = false);

  // Returns an absolute path of something that the test depends on.
  static std::string Runfile(const std::string& path);
  std::string Temp(const std::string& name) const { return absl::StrCat(temp_, "/", name); }

  // Writes a file with a token, as --token_file wants it.
  std::string TokenFile(const std::string& token = "of-this-test");

  std::map<std::string, std::string> env_;
  const TestFolder test_folder_;
  const std::string temp_ = test_folder_.path();
  // The folder of the launches' sockets, which hides those of other tests.
  const TestFolder sockets_ = TestFolder::ForSockets();
  const std::string runtime_ = sockets_.path();
  std::unique_ptr<agent::ProcessHost> host_;
};

// A coordinator and agents as processes of their own. The test depends on both programs.
class ClusterFixture : public LaunchFixture {
 protected:
  // Starts a coordinator that keeps its journal over restarts, and learns its address. `callers`:
  // the callers that it admits.
  std::unique_ptr<Command> StartCoordinator(std::vector<std::string> more = {"--log_level",
                                                                             "warning"},
                                            std::vector<std::string> callers = {"--insecure"});
  // Starts one node of `num_machines` of `job`, whose `num_processes` run `program`.
  std::unique_ptr<Command> Agent(const std::string& job, int num_machines, int num_processes,
                                 std::vector<std::string> program,
                                 std::vector<std::string> more = {});

  std::string address_;
};

}  // namespace muster

#endif  // MUSTER_TESTS_E2E_LAUNCH_FIXTURE_H_
