// What `muster` generates from the definitions of its commands, read by the programs that it is
// made for, and the programs that it starts in its own place.
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

class ReferenceTest : public LaunchFixture {
 protected:
  // Runs `script` with $MUSTER as the command.
  std::unique_ptr<Command> Bash(const std::string& script, std::vector<std::string> args = {}) {
    env_["MUSTER"] = Runfile("client/cli/muster");
    args.insert(args.begin(), {"/bin/bash", "--norc", "-c", script, "bash"});
    return std::make_unique<Command>(*host_, std::move(args), env_);
  }
  // Returns what bash offers after `muster WORDS...`, for the last word.
  std::vector<std::string> Offers(const std::vector<std::string>& words) {
    auto bash = Bash(
        "eval \"$($MUSTER completion bash)\"; COMP_WORDS=(muster \"$@\"); COMP_CWORD=$#; _muster; "
        "printf '%s\\n' \"${COMPREPLY[@]}\"",
        words);
    EXPECT_EQ(bash->Wait(), 0);
    EXPECT_THAT(bash->err(), IsEmpty());
    return bash->out();
  }
};

TEST_F(ReferenceTest, CompletionOfBash_IsValid) {
  auto bash = Bash("$MUSTER completion bash | bash -n");
  EXPECT_EQ(bash->Wait(), 0);
  EXPECT_THAT(bash->err(), IsEmpty());
}

TEST_F(ReferenceTest, CompletionOfBash_OffersCommandsFlagsAndValues) {
  EXPECT_THAT(Offers({"la"}), ElementsAre("launch"));
  EXPECT_THAT(Offers({"checkpoints", "pr"}), ElementsAre("prune", "promote"));
  EXPECT_THAT(Offers({"config", "s"}), ElementsAre("show"));
  EXPECT_THAT(Offers({"launch", "--mixed"}), ElementsAre("--mixed_precision"));
  EXPECT_THAT(Offers({"launch", "--num-proc"}), ElementsAre("--num_processes"));
  EXPECT_THAT(Offers({"launch", "--mixed_precision", ""}), ElementsAre("no", "bf16", "fp16"));
  EXPECT_THAT(Offers({"launch", "--mixed-precision", "=", "b"}), ElementsAre("bf16"));
  EXPECT_THAT(Offers({"checkpoints", "list", "-o", "j"}), ElementsAre("json"));
  EXPECT_THAT(Offers({"launch", "--cpu", "bas"}), IsSupersetOf({"bash"}));
}

// After the program, the words are its own: bash offers files.
TEST_F(ReferenceTest, CompletionOfBash_AfterTheProgram_OffersNoFlags) {
  EXPECT_THAT(Offers({"launch", "--num_processes", "2", "./train", "--num"}), ElementsAre(""));
  EXPECT_THAT(Offers({"launch", "--", "--num"}), ElementsAre(""));
  EXPECT_THAT(Offers({"launch", "--log_dir", ""}), ElementsAre(""));
}

TEST_F(ReferenceTest, CompletionOfBash_OfAProgram_OffersTheFlagsOfItsHelp) {
  const std::string coordinator = ParentPath(Runfile("coordinator/cmd/muster-coordinator"));
  const std::string muster = ParentPath(Runfile("client/cli/muster"));
  env_["PATH"] = absl::StrCat(coordinator, ":", muster, ":", env_["PATH"]);
  EXPECT_THAT(Offers({"coordinator", "--li"}), ElementsAre("--list_failpoints", "--listen"));
}

// groff is not everywhere; if it is there, it must print nothing.
TEST_F(ReferenceTest, ManPages_AreTroffWithoutWarnings) {
  auto bash = Bash(
      "set -e; $MUSTER man --folder \"$1/man1\"; cd \"$1/man1\"; test -s muster.1; test -s "
      "muster-launch.1; "
      "if command -v groff; then groff -man -ww -Tascii *.1 >/dev/null; fi; "
      "grep -L '^\\.SH NAME$' *.1",
      {temp_});
  bash->Wait();
  EXPECT_THAT(bash->err(), IsEmpty());
  for (const std::string& line : bash->out()) EXPECT_THAT(line, HasSubstr("/groff"));
}

TEST_F(ReferenceTest, CoordinatorAndAgent_RunTheProgramInPath) {
  env_["PATH"] = absl::StrCat(ParentPath(Runfile("coordinator/cmd/muster-coordinator")), ":",
                              ParentPath(Runfile("agent/cmd/muster-agent")), ":", env_["PATH"]);
  auto coordinator = Muster({"coordinator", "--version"});
  EXPECT_EQ(coordinator->Wait(), 0) << coordinator->err_text();
  EXPECT_THAT(coordinator->out_text(), HasSubstr("muster-coordinator "));
  auto wrong = Muster({"agent", "--no-such-flag"});
  EXPECT_EQ(wrong->Wait(), 2);
  EXPECT_THAT(wrong->err_text(), HasSubstr("muster-agent: "));
}

TEST_F(ReferenceTest, ProgramThatIsNotInstalled_IsOneLine) {
  auto agent = Muster({"agent", "--help"});
  EXPECT_EQ(agent->Wait(), 127);
  EXPECT_THAT(agent->err(), ElementsAre(HasSubstr("muster-agent is not installed: it is neither")));
}

}  // namespace
}  // namespace muster
