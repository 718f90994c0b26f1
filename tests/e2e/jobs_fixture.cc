#include "tests/e2e/jobs_fixture.h"

#include <signal.h>

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "base/file.h"
#include "base/test_wait.h"

namespace muster {

using Json = nlohmann::json;

void JobsFixture::SetUp() {
  ClusterFixture::SetUp();
  coordinator_ = StartCoordinator();
}

std::string JobsFixture::Run(std::vector<std::string> args, int code) {
  args.insert(args.begin() + 1, {"--coordinator", address_});
  const std::unique_ptr<Command> command = Muster(args);
  EXPECT_EQ(command->Wait(), code) << command->err_text();
  return code == 0 ? command->out_text() : command->err_text();
}

std::string JobsFixture::OneLine(std::vector<std::string> args, int code) {
  std::string text = Run(std::move(args), code);
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  return text;
}

std::unique_ptr<Command> JobsFixture::StartAgent(const std::string& name,
                                                 const std::vector<std::string>& options) {
  std::vector<std::string> args = {Runfile("agent/cmd/muster-agent"),
                                   "--serve",
                                   "--coordinator",
                                   address_,
                                   "--state_dir",
                                   Temp(name),
                                   "--node",
                                   name,
                                   "--cpus",
                                   "2"};
  args.insert(args.end(), options.begin(), options.end());
  return std::make_unique<Command>(*host_, std::move(args), env_);
}

std::unique_ptr<Command> JobsFixture::StartNode(const std::string& name,
                                                const std::vector<std::string>& options) {
  std::unique_ptr<Command> node = StartAgent(name, options);
  WaitUntil([&] { return NodeState(name) == "READY"; });
  return node;
}

std::string JobsFixture::NodeState(const std::string& name) {
  for (const Json& node : Json::parse(Run({"nodes", "-o", "json"}))) {
    if (node["node"] == name) return node["state"];
  }
  return "";
}

std::string JobsFixture::Submit(std::vector<std::string> options, const std::string& script) {
  options.insert(options.begin(), "submit");
  options.insert(options.end(), {"--name", "job", "--", "/bin/sh", "-c", script});
  return Run(options);
}

Json JobsFixture::Get(const std::string& job) {
  return Json::parse(Run({"describe", job, "-o", "json"}));
}

void JobsFixture::WaitForState(const std::string& job, const std::string& state) {
  std::string last;
  WaitUntil([&] {
    last = StateOf(job);
    return last == state || HasEnded(last);
  });
  EXPECT_EQ(last, state) << Run({"describe", job});
}

bool JobsFixture::HasEnded(const std::string& state) {
  return state == "SUCCEEDED" || state == "FAILED" || state == "CANCELLED";
}

void JobsFixture::ShortenNodeLease() {
  coordinator_->Signal(SIGTERM);
  coordinator_->Wait();
  coordinator_ = StartCoordinator({"--log_level", "warning", "--node_lease", "5"});
}

void JobsFixture::WaitForText(const std::string& path, const std::string& text) {
  WaitUntil([&] { return ReadFile(path).value_or("") == text; });
}

std::vector<pid_t> JobsFixture::RunnersOn(const std::string& node, const std::string& job) {
  const std::string folder = absl::StrCat(Temp(node), "/attempts");
  std::vector<pid_t> runners;
  for (const std::string& name : ListDirectory(folder).value_or(std::vector<std::string>())) {
    int pid = 0;
    if (!job.empty() && !absl::StartsWith(name, job + ".")) continue;
    const std::string file = absl::StrCat(folder, "/", name, "/runner.pid");
    if (absl::SimpleAtoi(ReadFile(file).value_or(""), &pid)) runners.push_back(pid);
  }
  return runners;
}

pid_t JobsFixture::RunnerOn(const std::string& node, const std::string& job) {
  const std::vector<pid_t> runners = RunnersOn(node, job);
  EXPECT_EQ(runners.size(), 1u);
  return runners.size() == 1 ? runners[0] : 0;
}

pid_t JobsFixture::PidIn(const std::string& file) {
  int pid = 0;
  WaitUntil([&] {
    const absl::StatusOr<std::string> text = ReadFile(Temp(file));
    return text.ok() && absl::EndsWith(*text, "\n") &&
           absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &pid);
  });
  return pid;
}

}  // namespace muster
