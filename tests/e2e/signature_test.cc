// `muster launch --checkpoint_key`: what a job saves is signed, and readers can tell.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;

// Saves after 5 and 10 steps.
CommandResult Train(const std::string& project, const std::string& variables,
                    const std::string& options) {
  return RunCommand(absl::StrCat("MUSTER_PROJECT_DIR=", project, " ", variables,
                                 " client/cli/muster launch --cpu --num_processes 2 ", options,
                                 " -- tests/e2e/memory_worker none 10 0 5 2>&1"));
}

CommandResult Verify(const std::string& project, const std::string& public_key) {
  return RunCommand(absl::StrCat("client/cli/muster checkpoints verify ", project,
                                 "/checkpoints --public_key ", public_key, " 2>&1"));
}

// FOLDER/NAME.pem and FOLDER/NAME.public.pem.
void MakeKey(const std::string& folder, const std::string& name) {
  const std::string key = absl::StrCat(folder, "/", name);
  const CommandResult made = testing_support::MakeSigningKey(key + ".pem", key + ".public.pem");
  ASSERT_EQ(made.exit_code, 0) << made.output;
}

TEST(Signature, LaunchWithKey_SignsWhatEveryReaderCanCheck) {
  const std::string keys = MakeTestDir("keys");
  MakeKey(keys, "ours");
  MakeKey(keys, "theirs");
  const std::string key = keys + "/ours.pem";
  for (const bool by_option : {true, false}) {
    const std::string project = MakeTestDir(by_option ? "by_option" : "by_variable");
    const CommandResult run = Train(project, by_option ? "" : "MUSTER_CHECKPOINT_KEY=" + key,
                                    by_option ? "--checkpoint_key " + key : "");
    ASSERT_EQ(run.exit_code, 0) << run.output;
    const CommandResult good = Verify(project, keys + "/ours.public.pem");
    EXPECT_EQ(good.exit_code, 0) << good.output;
    const CommandResult other = Verify(project, keys + "/theirs.public.pem");
    EXPECT_EQ(other.exit_code, 1) << other.output;
    EXPECT_THAT(other.output, AllOf(HasSubstr("checkpoint_0"), HasSubstr("checkpoint_1")));
  }
}

TEST(Signature, LaunchWithoutKey_IsNotSignedAndVerifyNamesTheOption) {
  const std::string keys = MakeTestDir("keys");
  MakeKey(keys, "ours");
  const std::string project = MakeTestDir("unsigned");
  const CommandResult run = Train(project, "", "");
  ASSERT_EQ(run.exit_code, 0) << run.output;
  const CommandResult verified = Verify(project, keys + "/ours.public.pem");
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.output, HasSubstr("is not signed: the coordinator that sealed it had no key "
                                         "(--checkpoint_key)"));
}

TEST(Signature, KeyThatCannotBeUsed_IsRefusedBeforeAProcessStarts) {
  const std::string keys = MakeTestDir("keys");
  MakeKey(keys, "open");
  ASSERT_EQ(RunCommand("chmod 644 " + keys + "/open.pem").exit_code, 0);
  ASSERT_TRUE(WriteFileAtomically(keys + "/text.pem", "no key").ok());
  ASSERT_EQ(RunCommand("chmod 600 " + keys + "/text.pem").exit_code, 0);
  for (const char* const name : {"absent", "open", "text"}) {
    const std::string key = absl::StrCat(keys, "/", name, ".pem");
    const std::string project = MakeTestDir(name);
    const CommandResult run = Train(project, "", "--checkpoint_key " + key);
    EXPECT_NE(run.exit_code, 0) << run.output;
    EXPECT_THAT(run.output, HasSubstr(key));
    EXPECT_FALSE(PathExists(project + "/checkpoints")) << run.output;
  }
}

}  // namespace
}  // namespace muster
