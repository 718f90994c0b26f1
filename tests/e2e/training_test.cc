// The MNIST example as a user runs it: real processes under `muster launch`, on a small data set of
// the same format.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/command.h"
#include "tests/support/mnist_images.h"

namespace muster {
namespace {

using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;
using testing_support::WriteMnistImages;

class Training : public testing::Test {
 protected:
  void SetUp() override {
    data_ = MakeTestDir("data");
    WriteMnistImages(data_, "train", 640);
    WriteMnistImages(data_, "t10k", 101);
  }

  CommandResult Train(int processes, const std::string& output, const std::string& flags) {
    return RunCommand("client/cli/muster launch --cpu --num_processes " +
                      std::to_string(processes) + " -- examples/mnist/mnist --data_root " + data_ +
                      " --output_dir " + output + " --loss_file " + output + ".loss " + flags +
                      " 2>&1");
  }

  // Returns step and loss of each line of a loss file.
  static std::vector<std::pair<int64_t, double>> Losses(const std::string& output) {
    std::ifstream file(output + ".loss");
    std::vector<std::pair<int64_t, double>> losses;
    int64_t step;
    double loss;
    while (file >> step >> loss) losses.emplace_back(step, loss);
    return losses;
  }

  std::string data_;
};

TEST_F(Training, OneAndTwoProcesses_SameGlobalBatch_GiveTheSameLossCurve) {
  const std::string one = MakeTestDir("one"), two = MakeTestDir("two");
  const CommandResult a = Train(1, one, "--no_shuffle --epochs 2 --batch_size 32");
  ASSERT_EQ(a.exit_code, 0) << a.output;
  const CommandResult b = Train(2, two, "--no_shuffle --epochs 2 --batch_size 16");
  ASSERT_EQ(b.exit_code, 0) << b.output;
  const auto x = Losses(one), y = Losses(two);
  ASSERT_EQ(x.size(), 40u);
  ASSERT_EQ(y.size(), x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(x[i].first, y[i].first);
    EXPECT_NEAR(x[i].second, y[i].second, 1e-5) << "at step " << x[i].first;
  }
  EXPECT_NE(a.output.find("test accuracy"), std::string::npos) << a.output;
  EXPECT_NE(b.output.find("on 101 images"), std::string::npos) << b.output;
}

TEST_F(Training, StoppedInMidEpoch_Resumed_ContinuesAtTheExactNextStep) {
  const std::string whole = MakeTestDir("whole"), parts = MakeTestDir("parts");
  const std::string flags = "--epochs 2 --batch_size 16 --checkpoint_steps 7 ";
  const CommandResult a = Train(2, whole, flags);
  ASSERT_EQ(a.exit_code, 0) << a.output;
  const CommandResult b = Train(2, parts, flags + "--stop_after_steps 14");
  ASSERT_EQ(b.exit_code, 0) << b.output;
  const auto first = Losses(parts);
  ASSERT_EQ(first.size(), 14u);
  const CommandResult c = Train(2, parts, flags + "--resume");
  ASSERT_EQ(c.exit_code, 0) << c.output;
  EXPECT_NE(c.output.find("at step 14"), std::string::npos) << c.output;

  auto resumed = first;
  const auto rest = Losses(parts);
  resumed.insert(resumed.end(), rest.begin(), rest.end());
  EXPECT_EQ(resumed, Losses(whole));  // the same bits, step for step
}

TEST_F(Training, TwoProcesses_FinalWeights_AreBitEqual) {
  const std::string output = MakeTestDir("equal");
  const CommandResult run = Train(2, output, "--epochs 1 --batch_size 16 --check_weights");
  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_NE(run.output.find("weights of all 2 processes are bit-equal"), std::string::npos)
      << run.output;
}

TEST_F(Training, TruncatedImageFile_IsNamedInOneLine) {
  std::ofstream(data_ + "/train-images-idx3-ubyte", std::ios::binary | std::ios::trunc) << "short";
  const CommandResult run = Train(1, MakeTestDir("truncated"), "");
  EXPECT_NE(run.exit_code, 0);
  EXPECT_NE(run.output.find("train-images-idx3-ubyte"), std::string::npos) << run.output;
  EXPECT_NE(run.output.find("fetch_mnist"), std::string::npos) << run.output;
}

}  // namespace
}  // namespace muster
