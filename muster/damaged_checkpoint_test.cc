// Checkpoints that are damaged after they were complete: a load finds the damage, and all ranks
// take the previous checkpoint.
#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "muster/accelerator.h"
#include "muster/test_ranks.h"
#include "torch/data/samplers/random.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"

namespace {

// The file whose reads fail; empty: none. Set it while no thread reads.
char unreadable[4096];
int read_error = 0;

void SetUnreadable(const std::string& path, int error) {
  snprintf(unreadable, sizeof(unreadable), "%s", path.c_str());
  read_error = error;
}

bool CannotRead(int fd) {
  if (unreadable[0] == 0 || !muster::PathHas(fd, unreadable)) return false;
  errno = read_error;
  return true;
}

}  // namespace

MUSTER_REPLACE_READS(CannotRead)

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int kRanks = 2;

// The weights of a model, which are all the same number.
struct Weight {
  std::function<void(const std::function<void(at::Tensor&)>&)> with;

  void Set(double value) const {
    with([&](at::Tensor& weight) {
      const at::NoGradGuard no_grad;
      weight.fill_(value);
    });
  }
  double Get() const {
    double value = -1;
    with([&](at::Tensor& weight) {
      EXPECT_EQ(weight.min().item<double>(), weight.max().item<double>());
      value = weight.max().item<double>();
    });
    return value;
  }
};

class DamagedCheckpointTest : public testing::TestWithParam<bool> {
 protected:
  // Weights equal the number of the checkpoint that has them. They are larger than a block.
  void SetUp() override {
    options_.project.directory = folder_.Path("run");
    if (GetParam()) options_.sharding.emplace().strategy = ShardingStrategy::kFull;
    OnRanks([](Accelerator& a, const Weight& weight) {
      for (int number = 0; number < 3; ++number) {
        weight.Set(number);
        const absl::Status saved = a.save_state();
        ASSERT_TRUE(saved.ok()) << saved;
      }
    });
  }

  template <class F>
  void OnRanks(const F& function) {
    RunAccelerators(kRanks, options_, [&](Accelerator& a) {
      torch::nn::Linear net(torch::nn::LinearOptions(1600, 1600).bias(false));
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      const Weight weight{[&a, &net, &model = model](const std::function<void(at::Tensor&)>& use) {
        a.summon_full_params(model, [&] { use(net->weight); });
      }};
      function(a, weight);
    });
  }

  // Changes a byte, but not the size.
  void Damage(int number, const std::string& name, size_t at) {
    const std::string path = JoinPath(
        folder_.Path("run"), "checkpoints/checkpoint_" + std::to_string(number) + "/" + name);
    std::string bytes = *ReadFile(path);
    ASSERT_LT(at, bytes.size()) << path;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  }
  // The first file of a model, whole or divided.
  std::string ModelFile(int number) {
    const auto names = *ListDirectory(
        JoinPath(folder_.Path("run"), "checkpoints/checkpoint_" + std::to_string(number)));
    for (const std::string& name : names) {
      if (name.rfind("model", 0) == 0 && name.find(".safetensors") == name.size() - 12) return name;
    }
    return "";
  }

  // Expects that each rank loads `value`.
  void ExpectLoaded(double value) {
    OnRanks([&](Accelerator& a, const Weight& weight) {
      weight.Set(7);
      const absl::Status loaded = a.load_state_if_present();
      EXPECT_TRUE(loaded.ok()) << loaded;
      EXPECT_EQ(weight.Get(), value) << a.process_index();
    });
  }

  const TestFolder folder_;
  AcceleratorOptions options_;
};

TEST_P(DamagedCheckpointTest, NewestHasAnotherByte_TheOneBeforeIsTakenOnAllRanks) {
  ExpectLoaded(2);
  Damage(2, ModelFile(2), 9'000'000);
  ExpectLoaded(1);
  OnRanks([&](Accelerator& a, const Weight& weight) {
    const auto loaded = a.load_weights("");
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_THAT(loaded->directory, HasSubstr("checkpoint_1"));
    EXPECT_EQ(weight.Get(), 1);
  });
  // Also damage in the header, and in a file of one rank only.
  Damage(1, ModelFile(1), 20);
  ExpectLoaded(0);
}

TEST_P(DamagedCheckpointTest, FileOfOneRank_IsEnough) {
  Damage(2, "random_states_1.safetensors", 200);
  ExpectLoaded(1);
}

TEST_P(DamagedCheckpointTest, NamedOrAllThereIs_IsAnErrorAndChangesNothing) {
  for (int number = 0; number < 3; ++number) Damage(number, ModelFile(number), 9'000'000);
  OnRanks([&](Accelerator& a, const Weight& weight) {
    weight.Set(7);
    for (const absl::Status& loaded :
         {a.load_state_if_present(), a.load_state(),
          a.load_state(JoinPath(folder_.Path("run"), "checkpoints/checkpoint_2"))}) {
      EXPECT_TRUE(absl::IsDataLoss(loaded)) << loaded;
      EXPECT_THAT(std::string(loaded.message()),
                  AllOf(HasSubstr("checkpoint_2/model"), HasSubstr("is damaged")));
      EXPECT_EQ(weight.Get(), 7);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sharding, DamagedCheckpointTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Sharded" : "Whole"; });

constexpr char kIndex[] = "model.safetensors.index.json";

// Two small checkpoints with every kind of file that a save writes.
class DamagedFileTest : public testing::Test {
 protected:
  void SetUp() override {
    OnRanks([](Accelerator& a, double& number, const auto& step) {
      for (number = 0; number < 2; ++number) {
        step();
        const absl::Status saved = a.save_state();
        ASSERT_TRUE(saved.ok()) << saved;
      }
    });
    names_ = *ListDirectory(newest_);
    // The files and the manifest are intact, whatever the seal says: see
    // worker/checkpoint/seal_test.cc.
    names_.erase(std::remove(names_.begin(), names_.end(), kSealName), names_.end());
    for (const char* name :
         {"custom_checkpoint_0.safetensors", "manifest.json", "model-00001-of-00002.safetensors",
          "model.safetensors.index.json", "optimizer.safetensors",
          "optimizer-00002-of-00002.safetensors", "random_states_0.safetensors",
          "random_states_1.safetensors", "sampler.safetensors", "scaler.json", "scheduler.json"}) {
      EXPECT_THAT(names_, Contains(name));
    }
  }

  // `function` gets a number that is part of the state, and a function that trains a step.
  template <class F>
  void OnRanks(const F& function) {
    AcceleratorOptions options;
    options.project.directory = folder_.Path("run");
    options.mixed_precision = "fp16";
    options.autocast.enabled = false;  // not on every CPU; there is still a scaler
    options.checkpoint.divide_above = 0;
    RunAccelerators(kRanks, options, [&](Accelerator& a) {
      torch::nn::Linear net(3, 5);
      FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
      auto [model, optimizer, schedule, loader] =
          a.prepare(net, sgd, StepLR(1, 0.5),
                    batches(TensorDataset(at::arange(96, at::kFloat).view({32, 3})), 2)
                        .sampler(torch::data::samplers::RandomSampler(32)));
      double number = -1;
      a.register_for_checkpointing(
          [&] {
            return PlainState{{"number", {number}}};
          },
          [&](const PlainState& state) { number = state.at("number").at(0); });
      const auto step = [&, &model = model, &optimizer = optimizer, &schedule = schedule,
                         &loader = loader] {
        for (auto& batch : loader) {
          auto scope = a.accumulate();
          a.backward(model(batch.value()).square().mean());
          optimizer.step();
          schedule.step();
          optimizer.zero_grad();
          break;
        }
      };
      function(a, number, step);
    });
  }

  std::string PathOf(const std::string& name) const { return JoinPath(newest_, name); }

  // Calls `look` with one bit flipped at each position, `every` apart.
  void TurnBits(const std::string& name, off_t every, const std::function<void()>& look) {
    const OwnedFd file(open(PathOf(name).c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(file.open()) << name;
    const off_t end = lseek(file.get(), 0, SEEK_END);
    ASSERT_GT(end, 0) << name;
    for (off_t at = every == 1 ? 0 : end / 2; at < end && !HasFailure(); at += every) {
      SCOPED_TRACE(name + " at " + std::to_string(at));
      char byte;
      ASSERT_EQ(pread(file.get(), &byte, 1, at), 1);
      const char turned = static_cast<char>(byte ^ (1 << (at % 8)));
      ASSERT_EQ(pwrite(file.get(), &turned, 1, at), 1);
      look();
      ASSERT_EQ(pwrite(file.get(), &byte, 1, at), 1);
    }
  }

  const TestFolder folder_;
  const std::string newest_ = folder_.Path("run/checkpoints/checkpoint_1");
  std::vector<std::string> names_;
};

TEST_F(DamagedFileTest, AnyByteOfAnyFile_IsFoundAndNamed) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(newest_);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  for (const std::string& name : names_) {
    const ManifestFile* const file = manifest->Find(name);
    EXPECT_TRUE(file != nullptr || name == kManifestName) << name;
    TurnBits(name, 1, [&] {
      const absl::Status found = file == nullptr
                                     ? ReadManifest(newest_).status()
                                     : VerifyCheckpointFile(newest_, *file, VerifyLevel::kContents);
      EXPECT_FALSE(found.ok());
      EXPECT_THAT(std::string(found.message()), HasSubstr(PathOf(name)));
    });
    TurnBits(name, 1 << 30, [&] {
      EXPECT_THAT(std::string(VerifyCheckpoint(newest_, VerifyLevel::kContents).status().message()),
                  HasSubstr(PathOf(name)));
    });
  }
  EXPECT_TRUE(VerifyCheckpoint(newest_, VerifyLevel::kContents).ok());
}

TEST_F(DamagedFileTest, ALoad_TakesTheOneBeforeForAnyFileThatItReads_AndSaysSo) {
  for (const std::string& name : names_) {
    // The tensors that the index names are intact.
    const bool is_index = name == kIndex;
    TurnBits(name, 1 << 30, [&] {
      testing::internal::CaptureStderr();
      OnRanks([&](Accelerator& a, double& number, const auto&) {
        const absl::Status loaded = a.load_state();
        EXPECT_TRUE(loaded.ok()) << loaded;
        EXPECT_EQ(number, is_index ? 1 : 0);
      });
      const std::string log = testing::internal::GetCapturedStderr();
      EXPECT_THAT(log, HasSubstr((is_index ? "save once more" : "passing over " + newest_)));
      EXPECT_THAT(log, HasSubstr(PathOf(name)));
    });
  }
}

TEST_F(DamagedFileTest, WeightsOfADamagedIndex_AreLoaded) {
  TurnBits(kIndex, 1 << 30, [&] {
    OnRanks([&](Accelerator& a, double&, const auto&) {
      const auto loaded = a.load_weights();
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_THAT(loaded->directory, HasSubstr("checkpoint_1"));
    });
  });
}

// A file server that does not answer for a moment must not make training continue from an older
// state.
TEST_F(DamagedFileTest, FileThatCannotBeReadNow_IsAnErrorThatNamesIt_AndNoOlderOneIsTaken) {
  for (const std::string& name : names_) {
    if (name == kIndex) continue;
    SCOPED_TRACE(name);
    OnRanks([&](Accelerator& a, double& number, const auto&) {
      a.wait_for_everyone();
      if (a.is_main_process()) SetUnreadable(PathOf(name), EIO);
      a.wait_for_everyone();
      const absl::Status loaded = a.load_state_if_present();
      EXPECT_FALSE(loaded.ok() || absl::IsNotFound(loaded) || StaysUnreadable(loaded)) << loaded;
      EXPECT_THAT(std::string(loaded.message()), HasSubstr(PathOf(name)));
      EXPECT_EQ(number, -1);
      a.wait_for_everyone();
      if (a.is_main_process()) SetUnreadable("", 0);
      a.wait_for_everyone();
      EXPECT_TRUE(a.load_state_if_present().ok());
      EXPECT_EQ(number, 1);
    });
  }
}

}  // namespace
}  // namespace muster
