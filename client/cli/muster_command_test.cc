#include "client/cli/muster_command.h"

#include <algorithm>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

class MusterCommandTest : public ::testing::Test {
 protected:
  int Run(const std::vector<std::string>& args) {
    out_.str("");
    err_.str("");
    started_.clear();
    const LaunchBackend backend = {
        .find_program = [this](absl::string_view program,
                               absl::string_view) -> absl::StatusOr<std::string> {
          if (!in_path_) return absl::NotFoundError(absl::StrCat("no ", program));
          return absl::StrCat("/path/", program);
        },
        .run = [](const LaunchPlan&) { return LaunchOutcome(); },
        .replace_process =
            [this](const std::vector<std::string>& argv) {
              started_ = argv;
              return absl::InternalError("this process goes on");
            }};
    return RunMuster(args, {{}, out_, err_}, backend, folder_.Path("muster"));
  }
  std::string Output(const std::vector<std::string>& args) {
    EXPECT_EQ(Run(args), kExitOk) << err_.str();
    return out_.str();
  }

  // Returns the words after "muster" of every command, including those in groups.
  std::vector<std::vector<std::string>> Commands() {
    std::vector<std::vector<std::string>> commands;
    for (const std::string& help : {Output({"--help"}), Output({"checkpoints", "--help"})}) {
      const bool of_group = !commands.empty();
      for (const absl::string_view line : absl::StrSplit(help, '\n')) {
        const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
        if (!absl::StartsWith(line, "  ") || words.empty()) continue;
        if (of_group) {
          commands.push_back({"checkpoints", words[0]});
        } else {
          commands.push_back({words[0]});
        }
      }
    }
    for (const char* verb : {"registered", "pin", "unpin", "promote", "hold-back"}) {
      commands.push_back({"checkpoints", verb});
    }
    return commands;
  }
  // Returns the options of a command from its help: "num_processes".
  std::vector<std::string> Options(std::vector<std::string> command) {
    command.push_back("--help");
    std::vector<std::string> options;
    for (const absl::string_view line : absl::StrSplit(Output(command), '\n')) {
      const size_t dashes = line.find("--");
      if (!absl::StartsWith(line, "  -") || dashes == absl::string_view::npos) continue;
      const absl::string_view name = line.substr(dashes + 2);
      options.emplace_back(name.substr(0, name.find(' ')));
    }
    return options;
  }

  TestFolder folder_;
  bool in_path_ = true;
  std::vector<std::string> started_;
  std::ostringstream out_, err_;
};

bool IsProgramOrGroup(const std::vector<std::string>& command) {
  return command.back() == "coordinator" || command.back() == "agent" ||
         command.back() == "generate" || command.back() == "checkpoints";
}

TEST_F(MusterCommandTest, Completion_HasEveryCommandAndFlagOfTheHelp) {
  const std::string bash = Output({"completion", "bash"});
  const std::string zsh = Output({"completion", "zsh"});
  const std::string fish = Output({"completion", "fish"});
  const auto commands = Commands();
  EXPECT_GT(commands.size(), 38u);
  int options = 0;
  for (const std::vector<std::string>& command : commands) {
    const std::string path = absl::StrJoin(command, " ");
    const size_t in_bash = bash.find("\n    '" + path + "')\n");
    ASSERT_NE(in_bash, std::string::npos) << path;
    EXPECT_THAT(zsh, HasSubstr("'" + command.back() + ":"));
    EXPECT_THAT(fish, HasSubstr("-f -a " + command.back() + " -d "));
    if (IsProgramOrGroup(command)) continue;
    const std::string flags = bash.substr(in_bash, bash.find(";;", in_bash) - in_bash);
    for (const std::string& option : Options(command)) {
      ++options;
      EXPECT_THAT(flags, ::testing::ContainsRegex("--" + option + "[ ']")) << path;
      EXPECT_THAT(zsh, HasSubstr("--" + option)) << path;
      EXPECT_THAT(fish, ::testing::ContainsRegex("__muster_is " + path + "'.* -l " + option + " "));
    }
  }
  EXPECT_GT(options, 200);
}

TEST_F(MusterCommandTest, Completion_OfNoOrAnUnknownShell_IsRefused) {
  EXPECT_EQ(Run({"completion"}), kExitUsage);
  EXPECT_EQ(err_.str(), "muster completion: name a shell: bash|zsh|fish\n");
  EXPECT_EQ(Run({"completion", "tcsh"}), kExitUsage);
  EXPECT_EQ(err_.str(), "muster completion: unknown shell tcsh: write one of bash, zsh, fish\n");
}

TEST_F(MusterCommandTest, Man_HasEveryCommandAndFlagOfTheHelp) {
  const std::string main = Output({"man"});
  EXPECT_THAT(main, StartsWith(".TH MUSTER 1 "));
  for (const std::vector<std::string>& command : Commands()) {
    std::vector<std::string> words = command;
    words.insert(words.begin(), "man");
    const std::string page = Output(words);
    const std::string name =
        absl::StrReplaceAll(absl::StrCat("muster-", absl::StrJoin(command, "-")), {{"-", "\\-"}});
    EXPECT_THAT(main, HasSubstr("\\fB" + name + "\\fR(1)\n"));
    EXPECT_THAT(page, HasSubstr(".SH NAME\n" + name + " \\- "));
    if (IsProgramOrGroup(command)) continue;
    for (const std::string& option : Options(command)) {
      EXPECT_THAT(page,
                  HasSubstr("\\fB" + absl::StrReplaceAll("--" + option, {{"-", "\\-"}}) + "\\fR"));
    }
  }
}

TEST_F(MusterCommandTest, ManIntoAFolder_WritesEveryPage) {
  const std::string folder = folder_.Path("man1");
  EXPECT_EQ(Output({"man", "--folder", folder}), "");
  const absl::StatusOr<std::string> page = ReadFile(JoinPath(folder, "muster-launch.1"));
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(*page, Output({"man", "launch"}));
  for (const char* name : {"muster.1", "muster-checkpoints.1", "muster-checkpoints-hold-back.1"}) {
    EXPECT_TRUE(PathExists(JoinPath(folder, name))) << name;
  }
}

TEST_F(MusterCommandTest, Man_Mistakes_AreOneLineWithTheWayOut) {
  EXPECT_EQ(Run({"man", "lunch"}), kExitNotFound);
  EXPECT_EQ(err_.str(),
            "muster man: unknown command muster lunch; did you mean muster launch?; see muster "
            "--help\n");
  EXPECT_EQ(Run({"man", "launch", "--folder", "x"}), kExitUsage);
  EXPECT_EQ(err_.str(),
            "muster man: --folder writes the pages of all commands: leave launch out\n");
}

TEST_F(MusterCommandTest, HelpOfACommand_IsItsHelp) {
  const std::string help = Output({"checkpoints", "verify", "--help"});
  EXPECT_EQ(Output({"help", "checkpoints", "verify"}), help);
}

TEST_F(MusterCommandTest, CoordinatorAndAgent_RunTheProgramBesideMusterWithItsArguments) {
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("muster-coordinator"), "").ok());
  Run({"coordinator", "--listen", "unix:/x", "--help"});
  EXPECT_THAT(started_,
              ElementsAre(folder_.Path("muster-coordinator"), "--listen", "unix:/x", "--help"));
  Run({"agent", "--serve"});
  EXPECT_THAT(started_, ElementsAre("/path/muster-agent", "--serve"));
}

TEST_F(MusterCommandTest, CoordinatorThatIsNotInstalled_IsOneLineWithTheWayOut) {
  in_path_ = false;
  EXPECT_EQ(Run({"coordinator"}), kExitProgramMissing);
  EXPECT_EQ(err_.str(), "muster coordinator: muster-coordinator is not installed: it is neither " +
                            folder_.Path("muster-coordinator") +
                            " nor in PATH; tools/install puts both into one folder\n");
  EXPECT_THAT(started_, SizeIs(0));
}

}  // namespace
}  // namespace muster::client
