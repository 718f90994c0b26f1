// A model of 1.5 GB computes in a process that has room for a fourth of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/command.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing_support::CommandResult;
using testing_support::RunCommand;

constexpr int64_t kMiB = 1 << 20;

class BigModelTest : public ::testing::Test {
 protected:
  // `limit`: bytes of writable memory of the process; 0: no limit.
  CommandResult Worker(const std::string& flags, int64_t limit = 0) {
    const std::string ulimit = limit == 0 ? "" : "ulimit -d " + std::to_string(limit / 1024) + "; ";
    return RunCommand(ulimit + "OMP_NUM_THREADS=2 tests/e2e/bigmodel_worker " + flags + " 2>&1");
  }

  const std::string folder_ = testing_support::MakeTestDir("bigmodel");
  const std::string file_ = folder_ + "/model.safetensors";
};

TEST_F(BigModelTest, ModelFourTimesTheMemory_ComputesTheSameBits_InThePlannedMemory) {
  ASSERT_EQ(Worker("--make " + file_).exit_code, 0);
  const CommandResult empty = Worker("");
  ASSERT_EQ(empty.exit_code, 0) << empty.output;
  // What the process takes without a model, and 400 MiB, some of them for activations and threads.
  const int64_t limit =
      Json::parse(empty.last_line()).at("data_before").get<int64_t>() + 400 * kMiB;
  const std::string run = "--run " + file_;
  const CommandResult whole = Worker(run + " --map cpu", limit);
  EXPECT_NE(whole.exit_code, 0) << whole.output;
  EXPECT_THAT(whole.output, AnyOf(HasSubstr("allocate memory"), HasSubstr("memory")));

  const CommandResult bounded = Worker(run + " --max_memory cpu=330MiB", limit);
  ASSERT_EQ(bounded.exit_code, 0) << bounded.output;
  const Json result = Json::parse(bounded.last_line());
  std::cout << bounded.last_line() << "\n";
  const auto planned = result.at("planned").get<double>(), peak = result.at("peak").get<double>();
  EXPECT_GT(result.at("weights").get<int64_t>(), 1400 * kMiB);
  EXPECT_LE(planned, 330 * kMiB);
  EXPECT_LE(peak, 1.1 * planned);
  EXPECT_EQ(result.at("overflow"), 0);

  // Without limits, all is in memory, or all on the disk.
  for (const char* const map : {"cpu", "disk"}) {
    const CommandResult other = Worker(run + " --map " + map);
    ASSERT_EQ(other.exit_code, 0) << other.output;
    EXPECT_EQ(Json::parse(other.last_line()).at("digest"), result.at("digest")) << map;
  }
}

// There is never a second copy of the model, even if the type changes on the way.
TEST_F(BigModelTest, ModelThatIsLoadedWhole_TakesItsOwnSizeAndOneTensor) {
  const std::string size = " --width 1024 --blocks 8";
  ASSERT_EQ(Worker("--make " + file_ + size).exit_code, 0);
  // The largest tensor, and pieces of a few MiB for each of the threads that read.
  constexpr int64_t kTensor = 4 * 1024 * 4096, kPieces = 48 * kMiB;
  int64_t whole = 0;
  for (const char* const type : {"", " --bfloat16"}) {
    SCOPED_TRACE(type);
    const CommandResult loaded = Worker("--run " + file_ + size + " --map cpu" + type);
    ASSERT_EQ(loaded.exit_code, 0) << loaded.output;
    const Json result = Json::parse(loaded.last_line());
    std::cout << loaded.last_line() << "\n";
    const auto weights = result.at("weights").get<int64_t>();
    EXPECT_GE(result.at("loaded").get<int64_t>(), weights);
    EXPECT_LE(result.at("loaded").get<int64_t>(), weights + kTensor + kPieces);
    if (whole == 0) whole = weights;
    // The tables of the blocks, which are not in the file, keep their type.
    constexpr int64_t kTables = 8 * 1024 * 4;
    EXPECT_EQ(weights, *type == '\0' ? whole : (whole + kTables) / 2);
  }
}

TEST_F(BigModelTest, BadInput_EndsWithOneLine) {
  const std::string small = " --width 64 --blocks 2";
  ASSERT_EQ(Worker("--make " + file_ + small).exit_code, 0);
  const auto fails_with = [&](const std::string& flags, const std::string& text) {
    const CommandResult result = Worker(flags);
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_THAT(result.output, HasSubstr(text));
  };
  fails_with("--run " + file_ + " --width 64 --blocks 3", "missing: layers.2.norm.weight");
  fails_with("--run " + file_ + " --width 32 --blocks 2", "mismatched: ");
  fails_with("--run " + folder_ + "/none" + small, "none");
  fails_with("--run " + file_ + small + " --map 7", "device 7 does not exist");
  fails_with("--run " + file_ + small + " --max_memory cpu=10KB", "is not to be divided");
}

}  // namespace
}  // namespace muster
