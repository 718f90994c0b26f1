// Checkpoints in memory as a user sees them: processes under `muster launch` that are killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::ElementsAre;
using testing::Eq;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;
using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;

constexpr char kWorker[] = "tests/e2e/memory_worker ";

CommandResult Launch(const std::string& project, const std::string& arguments,
                     const std::string& prefix = "") {
  return RunCommand(
      absl::StrCat(prefix, "MUSTER_PROJECT_DIR=", project,
                   " client/cli/muster launch --cpu --num_processes 2 --max_restarts 1 "
                   "-- ",
                   kWorker, arguments, " 2>&1"));
}

// Returns the weights of a run that nothing disturbs.
std::string Weights() {
  static const auto* const weights = new std::string([] {
    const CommandResult whole = Launch(MakeTestDir("whole"), "none 20 0 1000");
    EXPECT_EQ(whole.exit_code, 0) << whole.output;
    const std::vector<std::string> found = whole.after("weights ");
    return found.empty() ? "" : found[0];
  }());
  return *weights;
}

TEST(Memory, WorkerIsKilledBetweenOrInSteps_TheJobContinuesFromMemoryBitForBit) {
  for (const std::string name : {"after_save", "in_step"}) {
    const std::string project = MakeTestDir(name);
    const CommandResult result = Launch(project, name + " 20 13 1000");
    ASSERT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("signal 9"));
    const std::vector<std::string> begins = result.after("begins at ");
    ASSERT_EQ(begins.size(), 2u) << result.output;
    EXPECT_EQ(begins[0], "0");
    // The copy of the last save may have been under way.
    EXPECT_THAT(begins[1], AnyOf(Eq("13"), Eq("12"))) << result.output;
    EXPECT_THAT(result.output,
                HasSubstr(absl::StrCat("loaded the checkpoint of step ", begins[1], " in memory")));
    EXPECT_THAT(result.after("weights "), ElementsAre(Weights()));
    EXPECT_FALSE(PathExists(project + "/checkpoints/checkpoint_0"));
  }
}

TEST(Memory, WorkerIsKilledInASave_TheOneBeforeIsTaken) {
  const CommandResult result = Launch(MakeTestDir("in_save"), "in_save 20 13 1000");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.after("begins at "), ElementsAre("0", "12")) << result.output;
  EXPECT_THAT(result.after("weights "), ElementsAre(Weights()));
}

TEST(Memory, HookThatThrowsOnOneRank_FailsThatSaveOnAllAndNoOther) {
  const CommandResult result = Launch(MakeTestDir("bad_hook"), "bad_hook 20 13 1000");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const std::string refused = "13: rank 1: the hook says so";
  EXPECT_THAT(result.after("refused at "), ElementsAre(refused, refused)) << result.output;
  EXPECT_THAT(result.after("weights "), ElementsAre(Weights()));
}

// Otherwise only memory would hold, for five more saves, what was promised to the disk.
TEST(Memory, AsynchronousSaveToTheDiskFails_TheNextSaveGoesThere) {
  const std::string project = MakeTestDir("disk_error");
  const CommandResult result =
      Launch(project, "disk_error 9 0 5",
             "MUSTER_FAILPOINTS=worker.checkpoint_sync=error:RESOURCE_EXHAUSTED@1 ");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.after("refused at "),
              AllOf(SizeIs(2), Each(AllOf(HasSubstr("5: the asynchronous save of "),
                                          HasSubstr("worker.checkpoint_sync")))))
      << result.output;
  const absl::StatusOr<std::string> manifest =
      ReadFile(project + "/checkpoints/checkpoint_0/manifest.json");
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_THAT(*manifest, HasSubstr("\"step\": 6"));
}

// A rank that has run out of batches does not come to the wait.
TEST(Memory, WaitInsideJoinUnevenInputs_IsRefusedOnEveryRank) {
  const CommandResult result = Launch(MakeTestDir("join"), "join 5 0 1000");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.after("refused at "),
      AllOf(SizeIs(2), Each(HasSubstr("5: wait_for_checkpoint() inside join_uneven_inputs()"))))
      << result.output;
}

TEST(Memory, DamageInMemory_IsFoundAndTheDiskIsTaken) {
  const CommandResult result = Launch(MakeTestDir("damage"), "damage 20 13 5");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.after("damaged "), ElementsAre("4 pieces"));
  EXPECT_THAT(result.output, HasSubstr("in memory has another digest"));
  EXPECT_THAT(result.after("begins at "), ElementsAre("0", "10")) << result.output;
  EXPECT_THAT(result.after("weights "), ElementsAre(Weights()));
}

TEST(Memory, NewerOneOnTheDiskIsDamaged_MemoryIsTaken) {
  const std::string other = MakeTestDir("other");
  ASSERT_EQ(Launch(other, "none 20 0 5").exit_code, 0);
  const std::string project = MakeTestDir("newer");
  std::filesystem::rename(other + "/checkpoints/checkpoint_3", project + "/newer");
  const std::string weights = project + "/newer/model.safetensors";
  std::string bytes = *ReadFile(weights);
  bytes.back() ^= 1;
  ASSERT_TRUE(WriteFileAtomically(weights, bytes).ok());
  const CommandResult result = Launch(project, "newer_on_disk 20 13 1000");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("checkpoint_3 of step 20: "));
  EXPECT_THAT(result.after("begins at "), ElementsAre("0", AnyOf(Eq("13"), Eq("12"))))
      << result.output;
  EXPECT_THAT(result.after("weights "), ElementsAre(Weights()));
}

// A link to itself is an error like that of a file server that does not answer, also for root.
TEST(Memory, NewerOneOnTheDiskCannotBeReadNow_IsAnErrorAndNothingOlderIsTaken) {
  const std::string other = MakeTestDir("unreadable_other");
  ASSERT_EQ(Launch(other, "none 20 0 5").exit_code, 0);
  const std::string project = MakeTestDir("unreadable");
  std::filesystem::rename(other + "/checkpoints/checkpoint_3", project + "/newer");
  std::filesystem::remove(project + "/newer/model.safetensors");
  std::filesystem::create_symlink("model.safetensors", project + "/newer/model.safetensors");
  const CommandResult result = Launch(project, "newer_on_disk 20 13 1000");
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.output,
              HasSubstr("cannot examine " + project + "/checkpoints/checkpoint_3/model"));
  EXPECT_THAT(result.after("begins at "), ElementsAre("0")) << result.output;
}

TEST(Memory, OtherJobAfterOneThatEnded_FindsTheDiskAlone) {
  const std::string project = MakeTestDir("later");
  const CommandResult first = Launch(project, "none 13 0 5");
  ASSERT_EQ(first.exit_code, 0) << first.output;
  // A launch can be asked for the plan before it starts.
  const CommandResult plan =
      RunCommand(absl::StrCat("MUSTER_PROJECT_DIR=", project,
                              " client/cli/muster launch --cpu --dry_run -- /bin/true 2>&1"));
  EXPECT_THAT(plan.output,
              HasSubstr(absl::StrCat("resumes  ", project, "/checkpoints/checkpoint_1 in ", project,
                                     "/checkpoints: ")));
  const CommandResult second = Launch(project, "none 20 0 5");
  ASSERT_EQ(second.exit_code, 0) << second.output;
  EXPECT_THAT(second.after("begins at "), ElementsAre("10")) << second.output;
  EXPECT_THAT(second.after("weights "), ElementsAre(Weights()));
}

TEST(Memory, NoAgent_IsSaidOnceAndTheDiskGoesOn) {
  const std::string project = MakeTestDir("alone");
  const CommandResult result =
      RunCommand(absl::StrCat("MUSTER_PROJECT_DIR=", project, " ", kWorker, "none 20 0 5 2>&1"));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(result.after("no agent holds memory").size(), 1u) << result.output;
  EXPECT_TRUE(PathExists(project + "/checkpoints/checkpoint_3"));
}

TEST(Memory, NoRoomForIt_IsSaidOnceAndTheDiskGoesOn) {
  const std::string project = MakeTestDir("full");
  // 512-byte or 1 KiB blocks: less than a piece of memory, more than a file of the checkpoint.
  const CommandResult result = Launch(project, "none 20 0 5", "ulimit -S -f 1000; ");
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(result.after("no more checkpoints in memory").size(), 1u) << result.output;
  EXPECT_THAT(result.after("weights "), ElementsAre(Weights()));
  EXPECT_TRUE(PathExists(project + "/checkpoints/checkpoint_3"));
}

}  // namespace
}  // namespace muster
