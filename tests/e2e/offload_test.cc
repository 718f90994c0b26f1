// A model larger than the memory that its process may have: real processes under a limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/test_folder.h"
#include "tests/support/command.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using testing_support::CommandResult;
using testing_support::RunCommand;

constexpr int64_t kMiB = int64_t{1} << 20;

// Runs the worker. `limit`: KiB of writable memory; 0: none.
CommandResult Worker(const std::string& arguments, int64_t limit = 0) {
  const std::string ulimit = limit == 0 ? "" : absl::StrCat("ulimit -d ", limit, "; ");
  return RunCommand(
      absl::StrCat(ulimit, "OMP_NUM_THREADS=2 tests/e2e/offload_worker ", arguments, " 2>&1"));
}

TEST(Offload, ModelThatDoesNotFit_RunsFromTheDiskAndSaysTheSame) {
  const TestFolder folder;
  const CommandResult made = Worker(absl::StrCat("make ", folder.path()));
  ASSERT_EQ(made.exit_code, 0) << made.output;
  const CommandResult whole = Worker(absl::StrCat("whole ", folder.path()));
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  const Json want = Json::parse(whole.last_line());

  constexpr int64_t kLimit = 600'000;
  const CommandResult refused = Worker(absl::StrCat("whole ", folder.path()), kLimit);
  EXPECT_NE(refused.exit_code, 0) << "the limit means nothing";
  const CommandResult offloaded = Worker(absl::StrCat("offloaded ", folder.path(), " 200"), kLimit);
  ASSERT_EQ(offloaded.exit_code, 0) << offloaded.output;
  const Json got = Json::parse(offloaded.last_line());
  std::cout << "whole: " << want << "\noffloaded: " << got << "\n";
  EXPECT_EQ(got.at("tokens"), want.at("tokens"));
  EXPECT_GT(got.at("offloaded_bytes"), 1024 * kMiB);
  EXPECT_LE(got.at("ring_bytes"), 200 * kMiB);
  EXPECT_EQ(got.at("overflow_bytes"), 0);
  // Memory that is not weights is the same for both: LibTorch itself, and activations.
  EXPECT_LT(got.at("peak_rss_mib").get<int64_t>(), want.at("peak_rss_mib").get<int64_t>() - 800);
}

// The memory that the state takes shows: 160 MiB of parameters, 320 MiB of moments.
TEST(Offload, StateOnTheDisk_IsSavedAndLoadedInTheMemoryOfTraining) {
  for (const std::string strategy : {"zero3", "none", "zero3 beside", "none beside"}) {
    SCOPED_TRACE(strategy);
    const TestFolder folder;
    const std::vector<std::string> words = absl::StrSplit(strategy, ' ');
    const CommandResult run =
        RunCommand(absl::StrCat("OMP_NUM_THREADS=2 tests/e2e/disk_state_worker ", words[0], " ",
                                folder.path(), words.size() > 1 ? " beside" : "", " 2>&1"));
    ASSERT_EQ(run.exit_code, 0) << run.output;
    const Json got = Json::parse(run.last_line());
    std::cout << strategy << ": " << got << "\n";
    EXPECT_EQ(got.at("weights_off"), 0);
    EXPECT_EQ(got.at("states_off"), 0);
    const auto held = [&](const char* when) { return got.at(when).get<int64_t>(); };
    if (words[0] == "zero3") {
      EXPECT_LT(held("training_mib"), 200);
    }
    EXPECT_LT(held("save_mib"), held("training_mib") + 60);
    EXPECT_LT(held("load_mib"), held("training_mib") + 60);
  }
}

}  // namespace
}  // namespace muster
