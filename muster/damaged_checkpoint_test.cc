// Checkpoints that are damaged after they were complete: who loads finds it, and all ranks take the
// one before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "ATen/Functions.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/test_ranks.h"
#include "torch/nn/modules/linear.h"

namespace muster {
namespace {

using ::testing::AllOf;
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
  // Weights are the number of the checkpoint that has them. They are larger than a block.
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

  // Another byte, and the same size.
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

  // What each rank gets.
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
  // Also its header, and a file of one rank alone.
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

}  // namespace
}  // namespace muster
