// The programs other than `muster`, called with mistakes: each mistake is one line that names the
// thing, and an exit code that is not 0.
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

class CommandsTest : public LaunchFixture {
 protected:
  std::unique_ptr<Command> Program(const std::string& path, std::vector<std::string> args) {
    args.insert(args.begin(), Runfile(path));
    return std::make_unique<Command>(*host_, std::move(args), env_);
  }
  std::unique_ptr<Command> Coordinator(std::vector<std::string> args) {
    args.insert(args.begin(), {"--log_level", "error"});
    return Program("coordinator/cmd/muster-coordinator", std::move(args));
  }
};

// Each option of a help text has a description next to it, or below it if its name is long.
void ExpectEveryOptionExplained(const std::vector<std::string>& lines, const std::string& program) {
  int options = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (!absl::StartsWith(lines[i], "  -")) continue;
    ++options;
    const std::vector<std::string> words = absl::StrSplit(lines[i], ' ', absl::SkipEmpty());
    const bool beside = words.size() > 2;
    const bool below = i + 1 < lines.size() && absl::StartsWith(lines[i + 1], "          ");
    EXPECT_TRUE(beside || below) << program << ": " << lines[i];
  }
  EXPECT_GT(options, 0) << program;
}

TEST_F(CommandsTest, Help_IsEverywhere) {
  for (const char* path :
       {"coordinator/cmd/muster-coordinator", "agent/cmd/muster-agent", "examples/mnist/mnist"}) {
    auto help = Program(path, {"--help"});
    EXPECT_EQ(help->Wait(), 0) << path;
    const std::string name = std::string(path).substr(std::string(path).rfind('/') + 1);
    EXPECT_THAT(help->out_text(), HasSubstr("\nUsage: " + name + " ")) << path;
    EXPECT_THAT(help->err(), IsEmpty()) << path;
    ExpectEveryOptionExplained(help->out(), path);
  }
  for (const char* command :
       {"launch", "test", "config", "env", "status", "trigger", "barrier", "quarantine", "remove",
        "completion", "man", "version", "merge-weights", "estimate-memory", "plan"}) {
    auto help = Muster({command, "--help"});
    EXPECT_EQ(help->Wait(), 0) << command;
    EXPECT_THAT(help->out_text(), HasSubstr(absl::StrCat("\nUsage: muster ", command)));
    ExpectEveryOptionExplained(help->out(), command);
  }
}

TEST_F(CommandsTest, UnknownLogLevelOrFormat_IsRefusedByEachProgram) {
  const std::pair<const char*, const char*> kWrong[] = {{"MUSTER_LOG_LEVEL", "verbose"},
                                                        {"MUSTER_LOG_FORMAT", "xml"}};
  for (const auto& [name, value] : kWrong) {
    env_[name] = value;
    // Calls that end, whatever they do.
    const std::pair<const char*, std::vector<std::string>> kCalls[] = {
        {"client/cli/muster", {"list"}},
        {"coordinator/cmd/muster-coordinator", {"--verify", Temp("none")}},
        {"agent/cmd/muster-agent", {}}};
    for (const auto& [path, args] : kCalls) {
      auto program = Program(path, args);
      EXPECT_EQ(program->Wait(), 2) << path;
      EXPECT_THAT(program->err(), ElementsAre(HasSubstr(absl::StrCat(name, "='", value, "'"))))
          << path;
    }
    env_.erase(name);
  }
}

TEST_F(CommandsTest, Help_OfLaunch_ShowsTheDefaults) {
  auto help = Muster({"launch", "--help"});
  EXPECT_EQ(help->Wait(), 0);
  int settings = 0;
  for (const std::string& line : help->out()) {
    // The flags of other launchers have the defaults of what they become.
    if (absl::StartsWith(line, "Accelerate's flags")) break;
    if (!absl::StartsWith(line, "  --")) continue;
    ++settings;
    // An option without a default is empty, or said to be worked out.
    for (const char* name : {"--gpu_ids", "--log_dir", "--tls_", "--token_file", "--checkpoint_key",
                             "--env", "--coordinator", "--dry_run"}) {
      if (absl::StartsWith(line, absl::StrCat("  ", name))) --settings;
    }
    if (absl::StrContains(line, "efault")) --settings;
  }
  EXPECT_EQ(settings, 0) << help->out_text();
}

TEST_F(CommandsTest, Coordinator_PortZero_TellsTheAddressAndStopsOnSigterm) {
  auto coordinator = Coordinator({"--insecure"});
  const std::string port = coordinator->WaitForLine("127.0.0.1:");
  EXPECT_THAT(port, Not("0"));
  auto second = Coordinator({"--insecure", "--listen", "127.0.0.1:" + port});
  EXPECT_EQ(second->Wait(), kExitCannotServe);
  EXPECT_THAT(second->err(), ElementsAre(AllOf(StartsWith("muster-coordinator: "),
                                               HasSubstr("127.0.0.1:" + port))));
  auto status = Muster({"status", "--coordinator", "127.0.0.1:" + port});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  coordinator->Signal(SIGTERM);
  EXPECT_EQ(coordinator->Wait(), 0);
}

TEST_F(CommandsTest, Coordinator_SignalsThatItUsesInside_SayNothingWhenOthersSendThem) {
  auto coordinator = Coordinator({"--insecure"});
  coordinator->WaitForLine("127.0.0.1:");
  coordinator->Signal(SIGUSR1);  // not "deposed"
  coordinator->Signal(SIGUSR2);  // not "the journal has failed"
  coordinator->Signal(SIGTERM);
  EXPECT_EQ(coordinator->Wait(), 0);
}

TEST_F(CommandsTest, Coordinator_OnACopyThatWasPutBack_BeginsALaterTerm) {
  const std::string directory = Temp("journal");
  const auto serve = [&](const std::string& text) {
    auto coordinator = Program("coordinator/cmd/muster-coordinator",
                               {"--insecure", "--log_level", "info", "--data_dir", directory});
    coordinator->WaitForLine("127.0.0.1:");
    coordinator->Signal(SIGTERM);
    EXPECT_EQ(coordinator->Wait(), 0);
    EXPECT_THAT(coordinator->err_text(), HasSubstr(text));
  };
  serve("serving on");
  auto restored = Coordinator({"--restored", directory});
  EXPECT_EQ(restored->Wait(), 0) << restored->err_text();
  EXPECT_THAT(restored->out_text(), HasSubstr("the next start begins term 65538"));
  serve("term 65538 from");
  serve("term 65539 from");
}

TEST_F(CommandsTest, Mistakes_AreOneLineEach) {
  const std::string coordinator = "coordinator/cmd/muster-coordinator";
  const std::string agent = "agent/cmd/muster-agent";
  const std::string mnist = "examples/mnist/mnist";
  const struct {
    std::string path;
    std::vector<std::string> args;
    std::string text;
  } kCases[] = {
      {coordinator, {"--bogus"}, "--bogus"},
      {coordinator, {"--insecure", "--listen", "nonsense"}, "listen: address 'nonsense'"},
      {coordinator,
       {"--insecure", "--metrics_listen", "nonsense"},
       "metrics_listen: address 'nonsense'"},
      {coordinator, {"--insecure=maybe"}, "--insecure: maybe is neither true nor false"},
      {coordinator, {"--listen", "0.0.0.0:0"}, "without TLS"},
      {coordinator, {"--listen", "0.0.0.0:0", "--insecure"}, "without TLS"},
      {coordinator, {}, "--insecure"},
      {coordinator,
       {"--tls_cert", "/nowhere.pem", "--tls_key", "/nowhere.pem", "--tls_ca", "/nowhere.pem"},
       "/nowhere.pem"},
      {coordinator, {"--token_file", "/nowhere"}, "/nowhere"},
      {coordinator, {"--insecure", "--data_dir", "/proc/nowhere"}, "/proc/nowhere"},
      {coordinator, {"--lease", "0"}, "--lease"},
      {coordinator, {"--lease", "nan"}, "--lease"},
      {coordinator, {"--direct_agents", "-1"}, "--direct_agents"},
      {coordinator, {"--agents_per_hub", "many"}, "--agents_per_hub"},
      {coordinator, {"--agents_per_hub", "1025"}, "--agents_per_hub"},
      {coordinator, {"--data_dir", ""}, "--data_dir"},
      {coordinator, {"--data_dir="}, "--data_dir"},
      {coordinator, {"--verify_journal", ""}, "--verify"},
      {coordinator, {"--restored", ""}, "--restored"},
      {coordinator, {"--restored", "/nowhere"}, "no journal at '/nowhere"},
      {coordinator, {"--snapshot_records", "0"}, "--snapshot_records"},
      {coordinator, {"--snapshot_records", "-1"}, "--snapshot_records"},
      {agent, {"--bogus"}, "--bogus"},
      {agent, {"--serve", "--node=", "--state_dir", "x"}, "--node: nothing follows the ="},
      {agent,
       {"--serve", "--coordinator", "nonsense", "--state_dir", "/proc/nowhere"},
       "coordinator: address 'nonsense'"},
      {agent, {"--", "true"}, "--coordinator"},
      {agent, {"--coordinator", "127.0.0.1:1", "--num_processes", "0", "--", "true"}, "Value 0"},
      {mnist, {"--bogus"}, "--bogus"},
      {mnist, {}, "--data_root"},
      {mnist, {"--data_root", "/nowhere"}, "/nowhere/train-images-idx3-ubyte"},
      {mnist, {"--data_root", "/nowhere", "--epochs", "0"}, "--epochs"},
  };
  for (const auto& c : kCases) {
    auto args = c.args;
    if (c.path == coordinator) args.insert(args.begin(), {"--log_level", "error"});
    auto command = Program(c.path, args);
    EXPECT_GT(command->Wait(), 0) << c.path << " " << absl::StrJoin(args, " ");
    EXPECT_THAT(command->err(), SizeIs(1)) << command->err_text();
    EXPECT_THAT(command->err_text(), HasSubstr(c.text));
    EXPECT_THAT(command->out(), IsEmpty());
  }
}

}  // namespace
}  // namespace muster
