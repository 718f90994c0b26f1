// Users' mistakes, with real processes: every process ends with a line that names the mistake and
// its place, and none waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing_support::RunCommand;

struct Outcome {
  int exit_code;
  std::string output;
  // The ranks' last words.
  std::string rank[2];
};

Outcome RunCase(const std::string& name) {
  const auto run = RunCommand(absl::StrCat(
      "client/cli/muster launch --cpu --num_processes 2 -- tests/e2e/bad_input ", name, " 2>&1"));
  Outcome outcome{run.exit_code, run.output, {}};
  for (const absl::string_view line : absl::StrSplit(run.output, '\n')) {
    for (int r = 0; r < 2; ++r) {
      if (absl::StrContains(line, absl::StrCat("bad_input: rank ", r, " (pid"))) {
        outcome.rank[r] = std::string(line);
      }
    }
  }
  return outcome;
}

// The mistake is the same everywhere: both ranks report it.
class Everywhere : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(Everywhere, EveryRankSaysWhatIsWrong) {
  const Outcome outcome = RunCase(GetParam()[0]);
  EXPECT_NE(outcome.exit_code, 0) << outcome.output;
  for (const std::string& line : outcome.rank) {
    for (size_t i = 1; i < GetParam().size(); ++i) {
      EXPECT_THAT(line, HasSubstr(GetParam()[i])) << outcome.output;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    BadInput, Everywhere,
    testing::Values(std::vector<std::string>{"shapes", "[2]", "[3]", "pad_across_processes"},
                    std::vector<std::string>{"objects", "AllGatherBytes", "rank 0", "rank 1"},
                    std::vector<std::string>{"models", "rank 1", "weight"},
                    std::vector<std::string>{"divide", "batch size", "number of processes (2)"},
                    std::vector<std::string>{"nan", "NaN or infinite on rank 1 at step 3"},
                    std::vector<std::string>{"order", "middle of an accumulation window",
                                             "sync_gradients()"},
                    std::vector<std::string>{"unprepared", "no prepared optimizer", "prepare()"},
                    std::vector<std::string>{"dispatch", "cannot decode image 13", "batch"}),
    [](const auto& info) { return info.param[0]; });

// One rank fails: it reports the error, and the other learns which rank is gone instead of waiting.
class OneRank : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(OneRank, SaysWhatAndTheOtherLearnsWho) {
  const Outcome outcome = RunCase(GetParam()[0]);
  EXPECT_NE(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.rank[1], HasSubstr(GetParam()[1])) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("muster launch: rank 1 (pid"));
  // Empty if the rank was stopped before it noticed.
  if (!outcome.rank[0].empty()) {
    EXPECT_THAT(outcome.rank[0], HasSubstr("lost another process")) << outcome.output;
    EXPECT_THAT(outcome.rank[0], HasSubstr("rank 1")) << outcome.output;
  }
}

INSTANTIATE_TEST_SUITE_P(
    BadInput, OneRank,
    testing::Values(std::vector<std::string>{"exception", "the user's own trouble"},
                    std::vector<std::string>{"thread", "cannot decode image 13"}),
    [](const auto& info) { return info.param[0]; });

// Every process gets the same error, and continues to train.
TEST(BadInput, WhatCannotBeSavedToOrLoaded_IsAnErrorOnEveryRank_AndTrainingGoesOn) {
  const std::string folder = testing_support::MakeTestDir("checkpoints");
  const auto run = RunCommand(absl::StrCat(
      "BAD_INPUT_DIR=", folder,
      " client/cli/muster launch --cpu --num_processes 2 -- tests/e2e/bad_input checkpoints 2>&1"));
  EXPECT_EQ(run.exit_code, 0) << run.output;
  const std::string file = folder + "/file";
  for (const auto& [what, code, part] : std::vector<std::array<std::string, 3>>{
           {"saves to a file", "FAILED_PRECONDITION", file + ": it exists and is not a folder"},
           {"saves below a file", "FAILED_PRECONDITION", file},
           {"loads a file", "FAILED_PRECONDITION", file},
           {"loads a newer one", "UNIMPLEMENTED", folder + "/newer/manifest.json"},
           {"loads a part", "DATA_LOSS", folder + "/lacking/model.safetensors: is missing"},
           {"loads what is whole", "OK", ""}}) {
    for (const int rank : {0, 1}) {
      EXPECT_THAT(run.after(absl::StrCat("rank ", rank, " ", what, ": ")),
                  ElementsAre(AllOf(StartsWith(code), HasSubstr(part))))
          << run.output;
    }
  }
}

// Three survivors need not repeat what the launcher reports.
TEST(BadInput, OneRankOfFourFails_IsToldOnce) {
  for (const char* name : {"exception", "exit"}) {
    const auto run = RunCommand(absl::StrCat(
        "client/cli/muster launch --cpu --num_processes 4 -- tests/e2e/bad_input ", name, " 2>&1"));
    EXPECT_EQ(run.exit_code, 1) << run.output;
    EXPECT_THAT(run.output, HasSubstr("muster launch: rank 1 (pid")) << run.output;
    EXPECT_THAT(run.output, Not(HasSubstr("lost another process"))) << run.output;
    EXPECT_THAT(run.output, Not(HasSubstr("did not take part"))) << run.output;
    EXPECT_THAT(run.output, Not(HasSubstr("has ended"))) << run.output;
  }
}

TEST(BadInput, RankThatEndsEarly_IsNamedByThoseThatNeedIt) {
  const Outcome outcome = RunCase("leaves");
  EXPECT_NE(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.rank[0],
              AllOf(HasSubstr("lost another process at step 3"), HasSubstr("rank 1")))
      << outcome.output;
}

// Accelerate's best-known deadlock: save_state() under `if (is_main_process())`.
TEST(BadInput, SaveOnTheMainProcessAlone_IsNamed) {
  const Outcome training = RunCase("saves_beside_training");
  EXPECT_NE(training.exit_code, 0) << training.output;
  EXPECT_THAT(training.rank[1], AllOf(HasSubstr("ranks disagree about a collective"),
                                      HasSubstr("same calls, save_state()")))
      << training.output;
  const Outcome barrier = RunCase("saves_beside_barrier");
  EXPECT_NE(barrier.exit_code, 0) << barrier.output;
  EXPECT_THAT(barrier.rank[1], AllOf(HasSubstr("wait_for_everyone"), HasSubstr("rank 0 ("),
                                     HasSubstr(" of save_state()")))
      << barrier.output;
}

TEST(BadInput, RankThatSkipsABatch_IsNamedWithWhereItStands) {
  const Outcome outcome = RunCase("skips");
  EXPECT_NE(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("rank 1"), HasSubstr("did not take part in AllReduce #"),
                    HasSubstr(" bucket 1 of 1 ("), HasSubstr("wait_for_everyone")));
}

// A peer that is killed inside of a sharded model's pass.
struct Killed {
  std::string name;       // of the case
  std::string variables;  // "NAME=VALUE "
  std::string sharding;
  int processes;
  std::string where;
};

// The end of a launch, with what each rank has written.
struct LostPeer {
  testing_support::CommandResult run;
  std::vector<std::string> errors;
};

LostPeer RunLosingPeer(const Killed& killed) {
  const std::string folder = testing_support::MakeTestDir("killed_" + killed.name);
  LostPeer lost;
  lost.run = RunCommand(absl::StrCat(killed.variables,
                                     "timeout 120 client/cli/muster launch --cpu "
                                     "--num_cpu_threads_per_process 1 --num_processes ",
                                     killed.processes, " --sharding ", killed.sharding,
                                     " -- tests/e2e/bad_input killed_in_", killed.where, " ",
                                     folder, " 2>&1"));
  for (int rank = 0; rank < killed.processes; ++rank) {
    std::ifstream file(absl::StrCat(folder, "/rank_", rank));
    lost.errors.emplace_back(std::istreambuf_iterator<char>(file),
                             std::istreambuf_iterator<char>());
  }
  return lost;
}

class KilledPeer : public testing::TestWithParam<Killed> {};

TEST_P(KilledPeer, IsNamedByEveryOtherRankAndByTheLaunch) {
  const LostPeer lost = RunLosingPeer(GetParam());
  EXPECT_EQ(lost.run.exit_code, 1) << "124: it hangs\n" << lost.run.output;
  EXPECT_THAT(lost.run.output,
              testing::ContainsRegex(
                  "muster launch: rank 1 \\(pid [0-9]+ on .*was killed by signal 9 \\(SIGKILL\\)"));
  for (size_t rank = 0; rank < lost.errors.size(); ++rank) {
    if (rank == 1) {
      EXPECT_EQ(lost.errors[rank], "");
    } else {
      EXPECT_THAT(lost.errors[rank], AllOf(HasSubstr("rank 1 ("), HasSubstr("pid ")))
          << "rank " << rank << "\n"
          << lost.run.output;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sharding, KilledPeer,
    testing::Values(Killed{"gather", "MUSTER_SHM=no ", "zero3", 3, "forward"},
                    Killed{"reduction", "MUSTER_SHM=no ", "zero3", 3, "backward"},
                    Killed{"shared_parts", "", "zero3", 3, "forward"},
                    Killed{"shared_reduction", "", "zero2", 3, "backward"},
                    Killed{"group", "", "hybrid --sharding_group_size 2", 4, "backward"}),
    [](const auto& info) { return info.param.name; });

TEST(BadInput, RankWithoutMemoryForAGather_SaysSoAndIsNamedByTheOthers) {
  const LostPeer lost = RunLosingPeer({"no_memory", "MUSTER_SHM=no ", "zero3", 3, "no_memory"});
  EXPECT_EQ(lost.run.exit_code, 1) << "124: it hangs\n" << lost.run.output;
  const auto cause =
      AllOf(HasSubstr("can't allocate memory"), HasSubstr("while allocating memory for unit '2'"));
  EXPECT_THAT(lost.errors[1], cause);
  EXPECT_THAT(lost.run.output, AllOf(cause, HasSubstr("muster launch: rank 1 (pid ")));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(lost.errors[rank], AllOf(HasSubstr("rank 1 ("), HasSubstr("exited with code 1")))
        << lost.run.output;
  }
}

}  // namespace
}  // namespace muster
