#include "muster/accelerator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "muster/internal/core.h"
#include "muster/test_model.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

AcceleratorOptions OnCpu() {
  AcceleratorOptions options;
  options.cpu = true;
  return options;
}

TEST(Accelerator, Alone_IsAJobOfOneProcess) {
  Accelerator accelerator(OnCpu());
  EXPECT_EQ(accelerator.num_processes(), 1);
  EXPECT_TRUE(accelerator.is_main_process());
  EXPECT_TRUE(accelerator.is_last_process());
  EXPECT_TRUE(accelerator.device().is_cpu());
  EXPECT_EQ(accelerator.gather(at::full({}, 3.0)).numel(), 1);
  accelerator.wait_for_everyone();
}

TEST(Accelerator, LogLevelDebug_SaysWhereEachValueComesFrom) {
  setenv("MUSTER_GRADIENT_ACCUMULATION_STEPS", "7", 1);
  SetLogLevel(LogLevel::kDebug);
  testing::internal::CaptureStderr();
  { Accelerator accelerator(OnCpu()); }
  const std::string log = testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);
  unsetenv("MUSTER_GRADIENT_ACCUMULATION_STEPS");
  EXPECT_THAT(
      log, HasSubstr("gradient_accumulation_steps 7 (from MUSTER_GRADIENT_ACCUMULATION_STEPS)\n"));
}

// At its own barriers the coordinator blames no process.
TEST(Accelerator, BarrierWithANameOfMusters_IsRefused) {
  Accelerator accelerator(OnCpu());
  try {
    accelerator.wait_for_everyone(absl::ZeroDuration(), "muster/after a lost collective");
    FAIL() << "accepted";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("names that begin with \"muster/\""),
              std::string::npos);
  }
  accelerator.wait_for_everyone(absl::ZeroDuration(), "after a lost collective");
}

TEST(Accelerator, TwoInOneProcess_DoNotMeet) {
  AcceleratorOptions four = OnCpu();
  four.gradient_accumulation_steps = 4;
  Accelerator a(OnCpu()), b(four);
  EXPECT_EQ(a.gradient_accumulation_steps(), 1);
  EXPECT_EQ(b.gradient_accumulation_steps(), 4);
  b.set_trigger();
  EXPECT_FALSE(a.check_trigger());
  EXPECT_TRUE(b.check_trigger());
}

TEST(Accelerator, D01_ExceptionInMainProcessFirst_LeavesTheScopeReleased) {
  Accelerator accelerator(OnCpu());
  EXPECT_THROW(
      {
        auto first = accelerator.main_process_first();
        TORCH_CHECK(false, "in the block");
      },
      c10::Error);
  auto again = accelerator.main_process_first();
}

TEST(Accelerator, D03_PreparingAModelTwice_SavesItOnce) {
  Accelerator accelerator(OnCpu());
  auto model = accelerator.prepare(OneWeight());
  auto again = accelerator.prepare(model);
  auto third = accelerator.prepare(model.unwrap());
  EXPECT_EQ(again.slot(), model.slot());
  EXPECT_EQ(third.slot(), model.slot());
  ASSERT_TRUE(accelerator.save_state(TestDir("twice")).ok());
  EXPECT_TRUE(std::ifstream(TestDir("twice") + "/model.safetensors").good());
  EXPECT_FALSE(std::ifstream(TestDir("twice") + "/model_1.safetensors").good());
}

TEST(Accelerator, D04_ShortLastWindow_WeighsItsMicroStepsFully) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 4;
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  auto [model, optimizer, loader] =
      accelerator.prepare(net, sgd, batches(TensorDataset(at::ones({5, 1})), 1));
  std::vector<double> weights;
  for (auto& batch : loader) {
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(batch.value())));
    optimizer.step();
    optimizer.zero_grad();
    weights.push_back(net->weight.item<double>());
  }
  // Accelerate's second update is 0.25: 1 micro-step divided by 4.
  EXPECT_EQ(weights, (std::vector<double>{0, 0, 0, 1, 2}));
}

TEST(Accelerator, D05_BreakOnTheLastBatch_DoesNotMakeLaterStepsSync) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 4;
  Accelerator accelerator(options);
  auto loader = accelerator.prepare(batches(TensorDataset(at::ones({3, 1})), 1));
  for (auto& batch : loader) {
    if (batch.info().is_last) break;
  }
  std::vector<bool> syncs;
  for (int i = 0; i < 5; ++i) {
    auto scope = accelerator.accumulate();
    syncs.push_back(accelerator.sync_gradients());
  }
  EXPECT_EQ(syncs, (std::vector<bool>{false, false, false, true, false}));
}

TEST(Accelerator, D23_SavingInTheMiddleOfAWindow_IsRefused) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 2;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(OneWeight());
  auto scope = accelerator.accumulate();
  const absl::Status status = accelerator.save_state(TestDir("middle"));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST(Accelerator, D37_ExplicitAccumulationSteps_BeatTheEnvironment) {
  setenv("MUSTER_GRADIENT_ACCUMULATION_STEPS", "7", 1);
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 3;
  EXPECT_EQ(Accelerator(options).gradient_accumulation_steps(), 3);
  EXPECT_EQ(Accelerator(OnCpu()).gradient_accumulation_steps(), 7);
  unsetenv("MUSTER_GRADIENT_ACCUMULATION_STEPS");
}

TEST(Accelerator, D37_AccumulationOfThePlugin_BeatsTheEnvironmentToo) {
  setenv("MUSTER_GRADIENT_ACCUMULATION_STEPS", "7", 1);
  AcceleratorOptions options = OnCpu();
  EXPECT_EQ(Accelerator(options).gradient_accumulation_steps(), 7);
  for (const int64_t steps : {4, 1}) {
    options.accumulation.num_steps = steps;
    EXPECT_EQ(Accelerator(options).gradient_accumulation_steps(), steps);
  }
  options.gradient_accumulation_steps = 1;
  EXPECT_EQ(Accelerator(options).gradient_accumulation_steps(), 1);
  unsetenv("MUSTER_GRADIENT_ACCUMULATION_STEPS");
  options.gradient_accumulation_steps = 2;
  EXPECT_THAT([&] { Accelerator{options}; },
              testing::ThrowsMessage<c10::Error>(
                  HasSubstr("options.gradient_accumulation_steps=2 and "
                            "options.accumulation.num_steps=1 are two names")));
}

TEST(Accelerator, NestedLoops_InnerOneIsTheCurrentBatch) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 10;
  Accelerator accelerator(options);
  auto [outer, inner] = accelerator.prepare(batches(TensorDataset(at::ones({2, 1})), 1),
                                            batches(TensorDataset(at::ones({2, 1})), 1));
  for (auto& batch : outer) {
    for (auto& other : inner) (void)other;
    auto scope = accelerator.accumulate();
    EXPECT_EQ(accelerator.sync_gradients(), batch.info().is_last);
  }
}

TEST(Accelerator, TokenWeightedLosses_GiveTheMeanOverAllTokens) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 2;
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  // Means over 1 and 3 tokens: the update is the mean over the 4.
  for (const auto& [value, tokens] : std::vector<std::pair<double, double>>{{8, 1}, {4, 3}}) {
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(at::full({1, 1}, value))), tokens);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_NEAR(net->weight.item<double>(), (8 * 1 + 4 * 3) / 4.0, 1e-6);
}

TEST(Accelerator, WeightedAndPlainLossBeforeOneStep_AreRefusedInEveryOrder) {
  using Losses = std::vector<std::optional<double>>;
  for (const bool scoped : {true, false}) {
    for (const Losses& losses : {Losses{4, std::nullopt}, Losses{std::nullopt, 4}, Losses{4, 4}}) {
      Accelerator accelerator(OnCpu());
      torch::nn::Linear net = OneWeight();
      FusedSGD sgd(net->parameters(), {.lr = 1.0});
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      std::optional<internal::AccumulateScope> scope;
      if (scoped) scope.emplace(accelerator.accumulate());
      const auto backward = [&](const std::optional<double>& weight) {
        const at::Tensor loss = Loss(model(at::full({1, 1}, 8.0)));
        weight.has_value() ? accelerator.backward(loss, *weight) : accelerator.backward(loss);
      };
      backward(losses[0]);
      EXPECT_THAT(ErrorOf([&] { backward(losses[1]); }), HasSubstr("add ")) << scoped;
      // The first model's gradient is unchanged.
      optimizer.step();
      EXPECT_NEAR(net->weight.item<double>(), 8, 1e-6);
    }
  }
}

TEST(Accelerator, WeightedAndPlainLossOfTwoOptimizers_TakeTurns) {
  Accelerator accelerator(OnCpu());
  torch::nn::Linear one = OneWeight(), two = OneWeight();
  FusedSGD sgd_one(one->parameters(), {.lr = 1.0}), sgd_two(two->parameters(), {.lr = 1.0});
  auto [first, second, step_first, step_second] = accelerator.prepare(one, two, sgd_one, sgd_two);
  for (int i = 0; i < 3; ++i) {
    step_first.zero_grad();
    accelerator.backward(Loss(first(at::full({1, 1}, 8.0))), 4.0);
    step_first.step();
    // Goes through both models: the gradient of the first one is zeroed before its next loss.
    step_second.zero_grad();
    accelerator.backward(Loss(second(at::full({1, 1}, 2.0))) + Loss(first(at::ones({1, 1}))));
    step_second.step();
    EXPECT_NEAR(one->weight.item<double>(), 8 * (i + 1), 1e-6);
    EXPECT_NEAR(two->weight.item<double>(), 2 * (i + 1), 1e-6);
    // A loss that is dropped leaves no gradient.
    step_first.zero_grad();
    accelerator.backward(Loss(first(at::ones({1, 1}))), 3.0);
    one->zero_grad();
    two->zero_grad(/*set_to_none=*/false);
  }
}

// A critic, for example, steps several times for each step of the generator, whose gradients stay
// until its next zero_grad().
TEST(Accelerator, WeightedLossesOfOneOptimizer_LeaveTheUsedGradientsOfAnotherAlone) {
  Accelerator accelerator(OnCpu());
  torch::nn::Linear one = OneWeight(), two = OneWeight();
  FusedSGD sgd_one(one->parameters(), {.lr = 1.0}), sgd_two(two->parameters(), {.lr = 1.0});
  auto [first, second, step_first, step_second] = accelerator.prepare(one, two, sgd_one, sgd_two);
  for (int i = 0; i < 3; ++i) {
    for (int critic = 0; critic < 3; ++critic) {
      step_first.zero_grad();
      accelerator.backward(Loss(first(at::full({1, 1}, 8.0))), 4.0);
      step_first.step();
    }
    step_second.zero_grad();
    accelerator.backward(Loss(second(at::full({1, 1}, 2.0))), 3.0);
    step_second.step();
    EXPECT_NEAR(one->weight.item<double>(), 8 * 3 * (i + 1), 1e-6);
    EXPECT_NEAR(two->weight.item<double>(), 2 * (i + 1), 1e-6);
  }
  // Gradients to which a loss has been added since are not used up.
  accelerator.backward(Loss(second(at::ones({1, 1}))), 3.0);
  step_first.zero_grad();
  EXPECT_THAT(ErrorOf([&] {
                accelerator.backward(Loss(first(at::full({1, 1}, 8.0))), 4.0);
              }),
              HasSubstr("has a gradient from an earlier loss"));
}

TEST(Accelerator, ClippingInTheMiddleOfAWindow_IsRefused) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 2;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(OneWeight());
  auto scope = accelerator.accumulate();
  EXPECT_THROW(accelerator.clip_grad_norm_(model->parameters(), 1.0), c10::Error);
}

TEST(Accelerator, TorchOptimizer_IsAcceptedAsItIs) {
  Accelerator accelerator(OnCpu());
  torch::nn::Linear net = OneWeight();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.5));
  auto [model, optimizer, schedule] = accelerator.prepare(net, sgd, StepLR(1, 0.1));
  auto scope = accelerator.accumulate();
  accelerator.backward(Loss(model(at::ones({1, 1}))));
  optimizer.step();
  schedule.step();
  optimizer.zero_grad();
  EXPECT_NEAR(net->weight.item<double>(), 0.5, 1e-6);
  EXPECT_NEAR(schedule.last_lr(), 0.05, 1e-12);
  EXPECT_EQ(schedule.get_last_lr(), std::vector<double>{schedule.last_lr()});
}

TEST(Accelerator, ScheduleWithoutOptimizer_IsRefusedInOneLine) {
  Accelerator accelerator(OnCpu());
  EXPECT_THROW(accelerator.prepare(StepLR(1)), c10::Error);
}

TEST(Accelerator, BadLosses_AreRefused) {
  Accelerator accelerator(OnCpu());
  EXPECT_THROW(accelerator.backward(at::ones({2}).requires_grad_()), c10::Error);
  EXPECT_THROW(accelerator.backward(at::ones({})), c10::Error);
  AcceleratorOptions options = OnCpu();
  options.check_finite_loss = true;
  Accelerator checking(options);
  const at::Tensor nan = at::full({}, std::numeric_limits<double>::quiet_NaN()).requires_grad_();
  EXPECT_THROW(checking.backward(nan), c10::Error);
}

TEST(Accelerator, MixedPrecisionBf16_RunsLowAndReturnsFloat32) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "bf16";
  Accelerator accelerator(options);
  torch::nn::Linear net(4, 4);
  auto model = accelerator.prepare(net);
  const at::Tensor x = at::randn({2, 4});
  const at::Tensor out = model(x);
  EXPECT_EQ(out.scalar_type(), at::kFloat);
  EXPECT_FALSE(at::equal(out, net->forward(x)));
}

TEST(Accelerator, D33_Fp16OnCpu_ScalesAndSkipsOverflowingSteps) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "fp16";
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  auto [model, optimizer, schedule] = accelerator.prepare(net, sgd, StepLR(1, 0.5));
  for (const double value : {std::numeric_limits<double>::infinity(), 1.0}) {
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(at::full({1, 1}, 1.0)) * value));
    optimizer.step();
    schedule.step();
    optimizer.zero_grad();
    EXPECT_EQ(accelerator.optimizer_step_was_skipped(), std::isinf(value));
    EXPECT_EQ(schedule.step_count(), std::isinf(value) ? 0 : 1);
  }
  EXPECT_NEAR(net->weight.item<double>(), 1.0, 1e-3);
}

TEST(Accelerator, D24_ResumedRun_ContinuesOrderEpochAndCounters) {
  const auto train = [](const std::string& root, int stop_after, bool resume) {
    AcceleratorOptions options = OnCpu();
    options.project.directory = root;
    options.data_loader.data_seed = 3;
    Accelerator accelerator(options);
    torch::nn::Linear net = OneWeight();
    FusedAdamW adamw(net->parameters());
    auto [model, optimizer, loader] = accelerator.prepare(
        net, adamw,
        batches(TensorDataset(at::arange(10, at::kFloat).unsqueeze(1)), 2).shuffle(true));
    if (resume) {
      EXPECT_TRUE(accelerator.load_state().ok());
    }
    std::vector<float> seen;
    for (int64_t epoch : accelerator.epochs(2)) {
      (void)epoch;
      for (auto& batch : loader) {
        auto scope = accelerator.accumulate();
        seen.push_back(batch.value()[0].template item<float>());
        accelerator.backward(Loss(model(batch.value())));
        optimizer.step();
        optimizer.zero_grad();
        if (accelerator.global_step() == stop_after) {
          EXPECT_TRUE(accelerator.save_state().ok());
          return seen;
        }
      }
    }
    return seen;
  };
  const std::vector<float> whole = train(TestDir("whole"), -1, false);
  std::vector<float> parts = train(TestDir("parts"), 7, false);
  const std::vector<float> rest = train(TestDir("parts"), -1, true);
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, whole);
  EXPECT_EQ(whole.size(), 10u);
}

TEST(Accelerator, D19_SaveAfterResume_TakesTheNextNumber) {
  AcceleratorOptions options = OnCpu();
  options.project.directory = TestDir("numbers");
  std::string first;
  {
    Accelerator accelerator(options);
    auto model = accelerator.prepare(OneWeight());
    ASSERT_TRUE(accelerator.save_state().ok());
    first = accelerator.last_checkpoint();
  }
  Accelerator accelerator(options);
  auto model = accelerator.prepare(OneWeight());
  ASSERT_TRUE(accelerator.load_state().ok());
  EXPECT_EQ(accelerator.last_checkpoint(), first);
  ASSERT_TRUE(accelerator.save_state().ok());
  EXPECT_NE(accelerator.last_checkpoint(), first);
}

TEST(Accelerator, CheckpointKeep_BeatsTotalLimitAndSparesItsMultiples) {
  AcceleratorOptions options = OnCpu();
  options.project.directory = TestDir("kept");
  options.project.total_limit = 5;
  options.checkpoint.keep = 1;
  options.checkpoint.keep_every = 2;
  const auto is_there = [](int number) {
    return std::filesystem::exists(TestDir("kept") + "/checkpoints/checkpoint_" +
                                   std::to_string(number));
  };
  {
    Accelerator accelerator(options);
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(accelerator.save_state().ok());
      accelerator.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  EXPECT_FALSE(is_there(0)) << "0 is no multiple: programs without an optimizer stay at it";
  EXPECT_FALSE(is_there(1));
  EXPECT_TRUE(is_there(2));
  options.checkpoint.keep_every = 0;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(OneWeight());
  ASSERT_TRUE(accelerator.save_state().ok());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(is_there(i), i == 4) << i;
}

TEST(Accelerator, HoldingBackWithoutACoordinator_IsRefused) {
  AcceleratorOptions options = OnCpu();
  options.project.directory = TestDir("held_back");
  options.checkpoint.promote = false;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(OneWeight());
  const absl::Status saved = accelerator.save_state();
  EXPECT_TRUE(absl::IsFailedPrecondition(saved)) << saved;
  EXPECT_NE(saved.message().find("needs a coordinator"), absl::string_view::npos) << saved;
}

TEST(Accelerator, TotalLimit_KeepsTheNewestAndLoadsIt) {
  AcceleratorOptions options = OnCpu();
  options.project.directory = TestDir("limited");
  options.project.total_limit = 2;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(OneWeight());
  const std::string root = TestDir("limited") + "/checkpoints";
  // An unrelated folder is not an error.
  std::filesystem::create_directories(root + "/tmp");
  for (int i = 0; i < 11; ++i) {
    EXPECT_EQ(accelerator.save_iteration(), i);
    {
      at::NoGradGuard no_grad;
      model->weight.fill_(i);
    }
    ASSERT_TRUE(accelerator.save_state().ok());
  }
  // save_state() does not wait for the removal of old checkpoints.
  ASSERT_TRUE(accelerator.wait_for_checkpoint().ok());
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    left.insert(entry.path().filename());
  }
  EXPECT_EQ(left, (std::set<std::string>{"checkpoint_10", "checkpoint_9", "tmp"}));
  {
    at::NoGradGuard no_grad;
    model->weight.zero_();
  }
  ASSERT_TRUE(accelerator.load_state().ok());
  EXPECT_EQ(model->weight.item<double>(), 10);
  EXPECT_EQ(accelerator.save_iteration(), 11);
}

TEST(Accelerator, LoadState_WithOtherObjectsPrepared_SaysWhich) {
  Accelerator accelerator(OnCpu());
  auto model = accelerator.prepare(OneWeight());
  ASSERT_TRUE(accelerator.save_state(TestDir("one_model")).ok());
  auto other = accelerator.prepare(OneWeight());
  const absl::Status status = accelerator.load_state(TestDir("one_model"));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("1 model(s), but 2"), absl::string_view::npos) << status;
  EXPECT_TRUE(accelerator.load_state_if_present(TestDir("nothing here")).ok());
}

struct TwoWeights : torch::nn::Module {
  TwoWeights()
      : body(register_module("body", OneWeight())), head(register_module("head", OneWeight())) {}
  at::Tensor forward(at::Tensor x) { return head(body(x)); }
  torch::nn::Linear body, head;
};

TEST(Accelerator, LoadState_WithTheOptimizersParametersInAnotherOrder_SaysWhich) {
  const std::string dir = TestDir("order");
  const auto train = [&dir](bool reversed, bool resume) {
    Accelerator accelerator(OnCpu());
    const auto net = std::make_shared<TwoWeights>();
    std::vector<at::Tensor> parameters = net->parameters();
    if (reversed) std::reverse(parameters.begin(), parameters.end());
    FusedAdamW adamw(parameters, {.lr = 0.1});
    auto [model, optimizer] = accelerator.prepare(net, adamw);
    if (resume) return accelerator.load_state(dir);
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    optimizer.step();
    return accelerator.save_state(dir);
  };
  ASSERT_TRUE(train(/*reversed=*/false, /*resume=*/false).ok());
  EXPECT_TRUE(train(/*reversed=*/false, /*resume=*/true).ok());
  const absl::Status status = train(/*reversed=*/true, /*resume=*/true);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.message(), HasSubstr("parameter 0 of the optimizer, which was 'body.weight' "
                                          "of model 0 and is 'head.weight' here"));
}

TEST(Accelerator, LoadWeights_ByPrefixAndNotStrict_LeavesTheRestOfTheStateAlone) {
  const std::string dir = TestDir("pretrained");
  {
    Accelerator accelerator(OnCpu());
    const auto net = std::make_shared<TwoWeights>();
    {
      at::NoGradGuard no_grad;
      net->body->weight.fill_(3);
      net->head->weight.fill_(4);
    }
    auto model = accelerator.prepare(net);
    ASSERT_TRUE(accelerator.save_state(dir).ok());
  }
  Accelerator accelerator(OnCpu());
  torch::nn::Linear body = OneWeight();
  FusedAdamW adamw(body->parameters(), {.lr = 1.0});
  auto [model, optimizer] = accelerator.prepare(body, adamw);
  accelerator.backward(Loss(model(at::ones({1, 1}))));
  optimizer.step();
  optimizer.zero_grad();

  const double before = body->weight.item<double>();
  const absl::Status strict = accelerator.load_weights(dir).status();
  EXPECT_EQ(strict.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(strict.message(), HasSubstr("missing: weight; unexpected: body.weight, head.weight"));
  EXPECT_EQ(body->weight.item<double>(), before);

  const auto loaded = accelerator.load_weights(dir, {.prefix = "body."});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(body->weight.item<double>(), 3);
  EXPECT_EQ(loaded->directory, dir);
  ASSERT_EQ(loaded->models.size(), 1u);
  EXPECT_THAT(loaded->models[0].loaded, ElementsAre("weight"));
  EXPECT_THAT(loaded->models[0].ignored, ElementsAre("head.weight"));
  EXPECT_THAT(loaded->left_out, ElementsAre("random_states_0.safetensors"));
  EXPECT_EQ(accelerator.global_step(), 1) << "training goes on where it was";

  const auto renamed =
      accelerator.load_weights(dir, {.strict = false, .rename = [](const std::string& name) {
                                       return name == "head.weight" ? std::string("weight") : name;
                                     }});
  ASSERT_TRUE(renamed.ok()) << renamed.status();
  EXPECT_EQ(body->weight.item<double>(), 4);
  EXPECT_THAT(renamed->models[0].unexpected, ElementsAre("body.weight"));

  EXPECT_EQ(
      accelerator.load_weights(dir, {.prefix = "body.", .dtype = at::kDouble}).status().code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(body->weight.scalar_type(), at::kFloat);

  // A model that the checkpoint lacks.
  auto other = accelerator.prepare(OneWeight());
  EXPECT_THAT(accelerator.load_weights(dir, {.prefix = "body."}).status().message(),
              HasSubstr("holds 1 model(s), but 2 are prepared here: prepare the same models"));
  const auto first = accelerator.load_weights(dir, {.strict = false, .prefix = "body."});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(first->models.size(), 2u);
  EXPECT_THAT(first->models[1].missing, ElementsAre("weight"));
}

TEST(Accelerator, SaveModel_IntoACheckpoint_IsRefusedAndLeavesIt) {
  Accelerator accelerator(OnCpu());
  auto model = accelerator.prepare(OneWeight());
  const std::string dir = TestDir("state_and_model");
  ASSERT_TRUE(accelerator.save_state(dir).ok());
  for (const char* const limit : {"10GB", "1KB"}) {
    const absl::Status saved = accelerator.save_model(model, dir, limit);
    EXPECT_EQ(saved.code(), absl::StatusCode::kAlreadyExists) << saved;
    EXPECT_THAT(saved.message(), HasSubstr(dir + " is a checkpoint"));
  }
  const absl::Status loaded = accelerator.load_state(dir);
  EXPECT_TRUE(loaded.ok()) << loaded;
}

TEST(Accelerator, TensorsThatALoadHookRemoves_KeepTheirValuesAndAreNamed) {
  Accelerator accelerator(OnCpu());
  torch::nn::Linear net(1, 1);
  auto model = accelerator.prepare(net);
  const at::NoGradGuard no_grad;
  net->weight.fill_(1);
  net->bias.fill_(1);
  const std::string dir = TestDir("without_bias");
  ASSERT_TRUE(accelerator.save_state(dir).ok());
  const auto load = [&] {
    net->weight.fill_(2);
    net->bias.fill_(2);
    testing::internal::CaptureStderr();
    const absl::Status loaded = accelerator.load_state(dir);
    EXPECT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ(net->weight.item<double>(), 1);
    return testing::internal::GetCapturedStderr();
  };
  // Also if the hook is gone when the model is loaded.
  for (const bool once : {false, true}) {
    std::optional<HookHandle> hook;
    hook = accelerator.register_load_state_pre_hook(
        [&](std::vector<NamedTensors>& weights, const StateReader&) {
          std::erase_if(weights[0], [](const auto& item) { return item.first == "bias"; });
          if (once) hook->remove();
        });
    EXPECT_THAT(load(), HasSubstr("model.safetensors lacks, or that the hook has removed, keep "
                                  "their values: bias"));
    EXPECT_EQ(net->bias.item<double>(), 2);
    hook->remove();
  }
  EXPECT_THAT(load(), testing::Not(HasSubstr("keep their values")));
  EXPECT_EQ(net->bias.item<double>(), 1);
}

// Masks are made like this. No value can be written to a single element.
TEST(Accelerator, BuffersWhoseElementsShareMemory_AreLoaded) {
  struct Net : torch::nn::Module {
    Net() : body(register_module("body", OneWeight())) {
      mask = register_buffer("mask", Row(0));
      same = register_buffer("same", mask.detach());
    }
    static at::Tensor Row(double value) { return at::full({1}, value).expand({3}); }
    at::Tensor forward(at::Tensor x) { return body(x); }
    void Set(double value) {
      mask.set_data(Row(value));
      same.set_data(mask.detach());
    }
    torch::nn::Linear body = nullptr;
    at::Tensor mask, same;
  };
  for (const bool shards : {false, true}) {
    SCOPED_TRACE(shards ? "sharded" : "whole");
    AcceleratorOptions options = OnCpu();
    if (shards) {
      options.sharding = ParseSharding("zero3", 1);
      options.sharding->offload_parameters = Offload::kDisk;
      options.sharding->offload_parameters_path = TestDir("mask_parameters");
      options.sharding->offload_optimizer = Offload::kDisk;
      options.sharding->offload_optimizer_path = TestDir("mask_states");
    }
    Accelerator accelerator(options);
    const auto net = std::make_shared<Net>();
    auto model = accelerator.prepare(net);
    net->Set(1);
    const std::string dir = TestDir(shards ? "masks_of_shards" : "masks");
    ASSERT_TRUE(accelerator.save_state(dir).ok());
    net->Set(0);
    const auto loaded = accelerator.load_weights(dir);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(net->mask.equal(at::ones({3}))) << net->mask;
    EXPECT_TRUE(net->same.equal(at::ones({3}))) << net->same;
    net->Set(0);
    const absl::Status state = accelerator.load_state(dir);
    ASSERT_TRUE(state.ok()) << state;
    EXPECT_TRUE(net->mask.equal(at::ones({3}))) << net->mask;
    net->mask.fill_(2);
    EXPECT_TRUE(net->same.equal(net->mask)) << "they are one, as they were";
  }
}

TEST(Accelerator, LoadWeights_InAWindow_IsRefused) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 2;
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedAdamW adamw(net->parameters());
  auto [model, optimizer] = accelerator.prepare(net, adamw);
  const std::string dir = TestDir("window_weights");
  ASSERT_TRUE(accelerator.save_state(dir).ok());
  {
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_EQ(accelerator.load_weights(dir).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Accelerator, Fp16ClipWithoutAStep_DoesNotSpoilTheNextWindow) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;  // a gradient of 1 fits into fp16
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int i = 0; i < 2; ++i) {
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    EXPECT_NEAR(accelerator.clip_grad_norm_(model->parameters(), 10.0).item<double>(), 1.0, 1e-3);
    if (i == 1) optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_NEAR(net->weight.item<double>(), 1.0, 1e-3);
}

TEST(Accelerator, Fp16TwoOptimizersInOneStep_AreUnscaledOnceEach) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;  // a gradient of 1 fits into fp16
  Accelerator accelerator(options);
  torch::nn::Linear d = OneWeight(), g = OneWeight();
  FusedSGD sgd_d(d->parameters(), {.lr = 1.0}), sgd_g(g->parameters(), {.lr = 1.0});
  auto [model_d, model_g, optimizer_d, optimizer_g] = accelerator.prepare(d, g, sgd_d, sgd_g);
  auto scope = accelerator.accumulate();
  accelerator.backward(Loss(model_d(at::ones({1, 1}))));
  accelerator.clip_grad_norm_(model_d->parameters(), 10.0);
  optimizer_d.step();
  accelerator.backward(Loss(model_g(at::ones({1, 1}))));
  accelerator.clip_grad_norm_(model_g->parameters(), 10.0);
  optimizer_g.step();
  EXPECT_NEAR(d->weight.item<double>(), 1.0, 1e-3);
  EXPECT_NEAR(g->weight.item<double>(), 1.0, 1e-3);
}

// Gradients of 1 fit into fp16 with this scale, and gradients of 100 do not.
AcceleratorOptions Fp16() {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  return options;
}

TEST(Accelerator, Fp16BackwardAfterUnscaleGradients_IsUnscaledAndCheckedToo) {
  for (const double factor : {1.0, 100.0}) {
    Accelerator accelerator(Fp16());
    torch::nn::Linear d = OneWeight(), g = OneWeight();
    FusedSGD sgd_d(d->parameters(), {.lr = 1.0}), sgd_g(g->parameters(), {.lr = 1.0});
    auto [model_d, model_g, optimizer_d, optimizer_g] = accelerator.prepare(d, g, sgd_d, sgd_g);
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model_d(at::ones({1, 1}))));
    accelerator.unscale_gradients();
    EXPECT_NEAR(std::abs(d->weight.grad().item<double>()), 1.0, 1e-3);
    optimizer_d.step();
    accelerator.backward(Loss(model_g(at::ones({1, 1}))) * factor);
    accelerator.unscale_gradients();  // only of the generator
    EXPECT_NEAR(std::abs(d->weight.grad().item<double>()), 1.0, 1e-3);
    optimizer_g.step();
    EXPECT_NEAR(d->weight.item<double>(), 1.0, 1e-3);
    EXPECT_EQ(optimizer_g.step_was_skipped(), factor > 1);
    EXPECT_NEAR(g->weight.item<double>(), factor > 1 ? 0.0 : 1.0, 1e-3);
  }
}

TEST(Accelerator, Fp16TwoOptimizersOfOneParameter_AreRefusedWhereItWouldBeUnscaledTwice) {
  for (const bool clip : {true, false}) {
    Accelerator accelerator(Fp16());
    torch::nn::Linear net = OneWeight();
    FusedSGD first(net->parameters(), {.lr = 1.0}), second(net->parameters(), {.lr = 1.0});
    auto [model, optimizer_1, optimizer_2] = accelerator.prepare(net, first, second);
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    const auto finish_both = [&, &model = model, &optimizer_1 = optimizer_1,
                              &optimizer_2 = optimizer_2] {
      if (clip) {
        accelerator.clip_grad_norm_(model->parameters(), 10.0);
      } else {
        optimizer_1.step();
        optimizer_2.step();
      }
    };
    EXPECT_THAT([&] { finish_both(); }, testing::ThrowsMessage<c10::Error>(
                                            HasSubstr("two prepared optimizers have the same")));
  }
}

TEST(Accelerator, WeightedLossTwoOptimizersOfOneParameter_AreRefusedWhereItWouldBeDividedTwice) {
  Accelerator accelerator(OnCpu());
  torch::nn::Linear net = OneWeight();
  FusedSGD first(net->parameters(), {.lr = 1.0}), second(net->parameters(), {.lr = 1.0});
  auto [model, optimizer_1, optimizer_2] = accelerator.prepare(net, first, second);
  auto scope = accelerator.accumulate();
  accelerator.backward(Loss(model(at::ones({1, 1}))), 4);
  optimizer_1.step();
  EXPECT_THAT(
      ([&, &optimizer_2 = optimizer_2] { optimizer_2.step(); }),
      testing::ThrowsMessage<c10::Error>(HasSubstr("corrected for its accumulation window")));
}

TEST(Accelerator, Fp16TwoOptimizersOfOneParameterWithLossesOfTheirOwn_AreUnscaledOnceEach) {
  Accelerator accelerator(Fp16());
  torch::nn::Linear net = OneWeight();
  FusedSGD first(net->parameters(), {.lr = 1.0}), second(net->parameters(), {.lr = 0.5});
  auto [model, optimizer_1, optimizer_2] = accelerator.prepare(net, first, second);
  auto scope = accelerator.accumulate();
  accelerator.backward(Loss(model(at::ones({1, 1}))));
  optimizer_1.step();
  optimizer_1.zero_grad();
  accelerator.backward(Loss(model(at::ones({1, 1}))));
  optimizer_2.step();
  optimizer_2.zero_grad();
  EXPECT_NEAR(net->weight.item<double>(), 1.5, 1e-3);
}

// Sharpness-aware minimization (SAM) does this.
TEST(Accelerator, Fp16TwoBackwardPassesWithZeroGradBetween_AreUnscaledOnceEach) {
  for (const bool set_to_none : {true, false}) {
    Accelerator accelerator(Fp16());
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    accelerator.unscale_gradients();
    optimizer.zero_grad(set_to_none);
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    optimizer.step();
    EXPECT_NEAR(net->weight.item<double>(), 1.0, 1e-3);
  }
}

TEST(Accelerator, Fp16LossesOfOneOptimizerClippedOneByOne_AreAddedAsInFp32) {
  for (const char* precision : {"no", "fp16"}) {
    for (const bool in_accumulate : {true, false}) {
      AcceleratorOptions options = Fp16();
      options.mixed_precision = precision;
      Accelerator accelerator(options);
      torch::nn::Linear actor = OneWeight(), critic = OneWeight();
      std::vector<at::Tensor> parameters = actor->parameters();
      parameters.push_back(critic->weight);
      FusedSGD sgd(parameters, {.lr = 1.0});
      auto [model_a, model_c, optimizer] = accelerator.prepare(actor, critic, sgd);
      std::optional<internal::AccumulateScope> scope;
      if (in_accumulate) scope.emplace(accelerator.accumulate());
      accelerator.backward(Loss(model_a(at::ones({1, 1}))));
      accelerator.clip_grad_norm_(model_a->parameters(), 0.5);
      accelerator.backward(Loss(model_a(at::ones({1, 1}))) + Loss(model_c(at::ones({1, 1}))));
      EXPECT_NEAR(accelerator.clip_grad_norm_(model_c->parameters(), 10).item<double>(), 1, 1e-3);
      optimizer.step();
      EXPECT_NEAR(actor->weight.item<double>(), 0.5 + 1, 1e-3) << precision << in_accumulate;
      EXPECT_NEAR(critic->weight.item<double>(), 1.0, 1e-3) << precision << in_accumulate;
    }
  }
}

TEST(Accelerator, Fp16SeveralStepsOfOneOptimizerInABlock_UpdateTheScaleOnce) {
  AcceleratorOptions options = Fp16();
  options.grad_scaler.growth_interval = 2;
  Accelerator accelerator(options);
  torch::nn::Linear d = OneWeight(), g = OneWeight();
  FusedSGD sgd_d(d->parameters(), {.lr = 1.0}), sgd_g(g->parameters(), {.lr = 1.0});
  auto [model_d, model_g, optimizer_d, optimizer_g] = accelerator.prepare(d, g, sgd_d, sgd_g);
  {
    auto scope = accelerator.accumulate();
    for (const double factor : {1.0, 100.0, 1.0}) {
      accelerator.backward(Loss(model_d(at::ones({1, 1}))) * factor);
      optimizer_d.step();
      EXPECT_EQ(optimizer_d.step_was_skipped(), factor > 1);
      optimizer_d.zero_grad();
    }
    accelerator.backward(Loss(model_g(at::ones({1, 1}))));
    optimizer_g.step();
  }
  EXPECT_NEAR(d->weight.item<double>(), 2.0, 1e-3);
  EXPECT_NEAR(g->weight.item<double>(), 1.0, 1e-3);
  EXPECT_EQ(accelerator.core().steps().scaler()->scale(), 512);
}

TEST(Accelerator, Fp16StateSavedWhileOneOptimizerHasStepped_HoldsTheNextScale) {
  const std::string dir = TestDir("next_scale");
  for (const bool load : {false, true}) {
    Accelerator accelerator(Fp16());
    torch::nn::Linear d = OneWeight(), g = OneWeight();
    FusedSGD sgd_d(d->parameters(), {.lr = 1.0}), sgd_g(g->parameters(), {.lr = 1.0});
    auto [model_d, model_g, optimizer_d, optimizer_g] = accelerator.prepare(d, g, sgd_d, sgd_g);
    if (load) {
      ASSERT_TRUE(accelerator.load_state(dir).ok());
    } else {
      auto scope = accelerator.accumulate();
      accelerator.backward(Loss(model_d(at::ones({1, 1}))) * 100);
      optimizer_d.step();
    }
    if (!load) {
      ASSERT_TRUE(accelerator.save_state(dir).ok());
    }
    // The same in both runs.
    accelerator.backward(Loss(model_g(at::ones({1, 1}))));
    EXPECT_EQ(accelerator.core().steps().scaler()->scale(), 512) << load;
  }
}

TEST(Accelerator, StepsOutsideOfAccumulate_AreWindowsOfTheirOwn) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 4;
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  { auto scope = accelerator.accumulate(); }  // a window left open
  for (int i = 0; i < 2; ++i) {
    accelerator.backward(Loss(model(at::ones({1, 1}))));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_NEAR(net->weight.item<double>(), 2 * 0.25, 1e-6);
}

TEST(Accelerator, StateSavedAfterABreak_ResumesInTheSameEpoch) {
  const auto epochs_after = [](const std::string& root, bool leave_early) {
    AcceleratorOptions options = OnCpu();
    options.project.directory = root;
    {
      Accelerator accelerator(options);
      auto loader = accelerator.prepare(batches(TensorDataset(at::ones({4, 1})), 1));
      for (int64_t epoch : accelerator.epochs(2)) {
        for (auto& batch : loader) {
          auto scope = accelerator.accumulate();
          if (leave_early && batch.info().index == 1) break;
        }
        if (leave_early || epoch == 1) {
          EXPECT_TRUE(accelerator.save_state().ok());
          break;
        }
      }
    }
    Accelerator accelerator(options);
    auto loader = accelerator.prepare(batches(TensorDataset(at::ones({4, 1})), 1));
    EXPECT_TRUE(accelerator.load_state().ok());
    std::vector<int64_t> sizes;
    for (int64_t epoch : accelerator.epochs(4)) {
      (void)epoch;
      int64_t size = 0;
      for (auto& batch : loader) size += batch.info().size;
      sizes.push_back(size);
    }
    return sizes;
  };
  EXPECT_EQ(epochs_after(TestDir("left"), true), (std::vector<int64_t>{2, 4, 4, 4}));
  EXPECT_EQ(epochs_after(TestDir("done"), false), (std::vector<int64_t>{4, 4}));
}

TEST(Accelerator, AccumulateInsideAccumulate_IsRefused) {
  Accelerator accelerator(OnCpu());
  {
    auto scope = accelerator.accumulate();
    EXPECT_THROW((void)accelerator.accumulate(), c10::Error);
  }
  auto next = accelerator.accumulate();
}

TEST(Accelerator, UnpreparedOptimizer_IsRefusedWhereItWouldTrainWrongly) {
  AcceleratorOptions accumulating = OnCpu();
  accumulating.gradient_accumulation_steps = 2;
  AcceleratorOptions fp16 = OnCpu();
  fp16.mixed_precision = "fp16";
  for (const AcceleratorOptions& options : {accumulating, fp16}) {
    Accelerator accelerator(options);
    auto model = accelerator.prepare(OneWeight());
    auto scope = accelerator.accumulate();
    try {
      accelerator.backward(Loss(model(at::ones({1, 1}))));
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("prepare()"), std::string::npos) << error.what();
    }
  }
  // The clipped parameters belong to another optimizer.
  Accelerator accelerator(fp16);
  torch::nn::Linear net = OneWeight(), other = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  accelerator.backward(Loss(model(at::ones({1, 1}))));
  EXPECT_THROW(accelerator.clip_grad_norm_(other->parameters(), 1.0), c10::Error);
}

TEST(Accelerator, Options_AreSeenAsProperties) {
  AcceleratorOptions options = OnCpu();
  options.data_loader.split_batches = true;
  options.project.directory = TestDir("project");
  Accelerator accelerator(options);
  EXPECT_TRUE(accelerator.split_batches());
  EXPECT_TRUE(accelerator.even_batches());
  EXPECT_EQ(accelerator.dispatch_batches(), std::nullopt);
  EXPECT_EQ(accelerator.project_dir(), TestDir("project"));
  EXPECT_EQ(accelerator.logging_dir(), TestDir("project"));
  EXPECT_STREQ(accelerator.distributed_type(), "NO");
  EXPECT_FALSE(accelerator.multi_device());
  EXPECT_EQ(accelerator.save_iteration(), 0);
  options.rng_types = {"dice"};
  EXPECT_THROW(Accelerator{options}, c10::Error);
}

// Of 14 batches in windows of 4 a schedule of 14 steps is at its end; without the option it has
// made a step for each window, as many as there are.
TEST(Accelerator, D12_AdjustScheduler_ReachesThePreparedSchedule) {
  for (const bool adjust : {false, true}) {
    AcceleratorOptions options = OnCpu();
    options.gradient_accumulation_steps = 4;
    options.accumulation.adjust_scheduler = adjust;
    Accelerator accelerator(options);
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer, loader, schedule] =
        accelerator.prepare(net, sgd, batches(TensorDataset(at::ones({14, 1})), 1), StepLR(1, 0.5));
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate();
      accelerator.backward(Loss(model(batch.value())));
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();
    }
    EXPECT_NEAR(schedule.last_lr(), std::pow(0.5, adjust ? 14 : 4), 1e-12);
  }
}

TEST(Accelerator, DevicePlacementOff_LeavesThingsWhereTheyAre) {
  AcceleratorOptions options = OnCpu();
  options.device_placement = false;
  Accelerator accelerator(options);
  EXPECT_FALSE(accelerator.core().loader_options().device.has_value());
}

TEST(Accelerator, AutocastOptions_SwitchItOff) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "bf16";
  options.autocast.enabled = false;
  Accelerator accelerator(options);
  torch::nn::Linear net(4, 4);
  auto model = accelerator.prepare(net);
  const at::Tensor x = at::randn({2, 4});
  EXPECT_TRUE(at::equal(model(x), net->forward(x)));
  auto on = accelerator.autocast({});
  EXPECT_EQ(net->forward(x).scalar_type(), at::kBFloat16);
}

TEST(Accelerator, UnscaleGradients_OfOneOptimizer) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  Accelerator accelerator(options);
  torch::nn::Linear a = OneWeight(), b = OneWeight();
  FusedSGD sgd_a(a->parameters(), {.lr = 1.0}), sgd_b(b->parameters(), {.lr = 1.0});
  auto [model_a, model_b, optimizer_a, optimizer_b] = accelerator.prepare(a, b, sgd_a, sgd_b);
  accelerator.backward(Loss(model_a(at::ones({1, 1}))) + Loss(model_b(at::ones({1, 1}))));
  accelerator.unscale_gradients(optimizer_a);
  EXPECT_EQ(a->weight.grad().item<double>(), -1);
  EXPECT_EQ(b->weight.grad().item<double>(), -1024);
  accelerator.unscale_gradients();
  EXPECT_EQ(a->weight.grad().item<double>(), -1);
  EXPECT_EQ(b->weight.grad().item<double>(), -1);
}

TEST(Accelerator, FreeMemory_StartsAfresh) {
  AcceleratorOptions options = OnCpu();
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  options.gradient_accumulation_steps = 2;
  Accelerator accelerator(options);
  for (int round = 0; round < 2; ++round) {
    torch::nn::Linear net = OneWeight();
    FusedSGD sgd(net->parameters(), {.lr = 1.0});
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    {
      auto scope = accelerator.accumulate();
      EXPECT_FALSE(accelerator.sync_gradients()) << "the window begins anew";
      accelerator.backward(Loss(model(at::ones({1, 1}))));
    }
    accelerator.unscale_gradients();
    accelerator.free_memory();
    EXPECT_TRUE(accelerator.save_state(TestDir("freed")).ok());
    EXPECT_FALSE(std::ifstream(TestDir("freed") + "/model.safetensors").good());
  }
}

TEST(Accelerator, StepAfterFreeMemory_IsRefusedUntilThePartsArePreparedAgain) {
  AcceleratorOptions options = OnCpu();
  options.gradient_accumulation_steps = 4;
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  AcceleratedModel<torch::nn::Linear> model;
  AcceleratedOptimizer optimizer;
  std::tie(model, optimizer) = accelerator.prepare(net, sgd);
  const auto train = [&] {
    // The end of a stream is not known: the step corrects the divisor of its short window.
    auto loader = accelerator.prepare(batches(std::set<int64_t>{1}, 1));
    for (auto& batch : loader) {
      (void)batch;
      auto scope = accelerator.accumulate();
      accelerator.backward(Loss(model(at::ones({1, 1}))));
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  train();
  const double step = net->weight.item<double>();
  accelerator.free_memory();
  EXPECT_THAT(ErrorOf(train), HasSubstr("has forgotten the optimizer"));
  EXPECT_EQ(net->weight.item<double>(), step);
  std::tie(model, optimizer) = accelerator.prepare(net, sgd);
  optimizer.zero_grad();
  train();
  EXPECT_NE(net->weight.item<double>(), step);
}

TEST(Accelerator, PlainRegisteredObject_ComesBack) {
  Accelerator accelerator(OnCpu());
  std::vector<double> values = {1.5, -2};
  accelerator.register_for_checkpointing(
      [&] {
        return PlainState{{"values", values}};
      },
      [&](const PlainState& state) { values = state.at("values"); });
  ASSERT_TRUE(accelerator.save_state(TestDir("plain")).ok());
  values = {};
  ASSERT_TRUE(accelerator.load_state(TestDir("plain")).ok());
  EXPECT_EQ(values, (std::vector<double>{1.5, -2}));
}

TEST(Accelerator, Profile_TakesASchedule) {
  Accelerator accelerator(OnCpu());
  {
    auto profile = accelerator.profile(
        {.output_dir = TestDir("profile"), .schedule = {.wait = 1, .active = 1, .repeat = 1}});
    for (int i = 0; i < 3; ++i) {
      at::ones({2, 2}).mm(at::ones({2, 2}));
      profile.step();
    }
  }
  EXPECT_TRUE(std::ifstream(TestDir("profile") + "/profile_0.json").good());
}

TEST(Accelerator, HandlesOutliveIt) {
  torch::nn::Linear net = OneWeight();
  FusedSGD sgd(net->parameters(), {.lr = 1.0});
  const auto make = [&] {
    Accelerator accelerator(OnCpu());
    return accelerator.prepare(net, sgd, StepLR(1));
  };
  auto [model, optimizer, schedule] = make();
  model(at::ones({1, 1})).sum().backward();
  optimizer.step();
  schedule.step();
  EXPECT_EQ(optimizer.steps(), 1);
}

TEST(Accelerator, RefusedSchedule_LeavesNothingBehind) {
  Accelerator accelerator(OnCpu());
  EXPECT_THROW(accelerator.prepare(StepLR(1)), c10::Error);
  EXPECT_TRUE(accelerator.save_state(TestDir("refused")).ok());
}

TEST(Accelerator, TorchOptimizerPreparedTwice_IsOne) {
  Accelerator accelerator(OnCpu());
  torch::nn::Linear net = OneWeight();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.5));
  auto first = accelerator.prepare(sgd);
  auto [second, schedule] = accelerator.prepare(sgd, StepLR(1));
  EXPECT_EQ(first.slot(), second.slot());
}

TEST(Accelerator, NoSyncInsideJoin_IsRefused) {
  Accelerator accelerator(OnCpu());
  auto join = accelerator.join_uneven_inputs();
  EXPECT_THROW((void)accelerator.no_sync(), c10::Error);
}

TEST(Accelerator, Trackers_WriteWhatIsLogged) {
  AcceleratorOptions options = OnCpu();
  options.project.logging_directory = TestDir("logs");
  Accelerator accelerator(options);
  ASSERT_TRUE(accelerator.init_trackers("run", {{"lr", 0.1}}, {"jsonl"}).ok());
  accelerator.log({{"loss", 0.5}}, 3);
  accelerator.end_training();
  EXPECT_EQ(accelerator.init_trackers("again", {}, {"no such kind"}).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Accelerator, Trackers_OfOneNameOrNull_AreRefused) {
  AcceleratorOptions options = OnCpu();
  options.project.logging_directory = TestDir("logs_refused");
  Accelerator accelerator(options);
  EXPECT_EQ(accelerator.init_trackers("run", {}, {"jsonl", "jsonl"}).code(),
            absl::StatusCode::kInvalidArgument);
  std::vector<std::unique_ptr<GeneralTracker>> own;
  own.push_back(nullptr);
  EXPECT_EQ(accelerator.init_trackers("run", {}, {}, std::move(own)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Accelerator, TqdmOfASecondPass_CountsItAlone) {
  Accelerator accelerator(OnCpu());
  auto loader = accelerator.prepare(batches(TensorDataset(at::ones({6, 1})), 2));
  auto bar = accelerator.tqdm(loader);
  for (int pass = 0; pass < 2; ++pass) {
    int64_t batches_seen = 0;
    for (auto& batch : bar) {
      (void)batch;
      EXPECT_EQ(bar.done(), batches_seen++);
    }
    EXPECT_EQ(bar.done(), 3);
  }
}

// A program does this for each fold.
TEST(Accelerator, TrackersAgain_FinishTheFirstOnesAndStartOthers) {
  AcceleratorOptions options = OnCpu();
  options.project.logging_directory = TestDir("logs_of_folds");
  Accelerator accelerator(options);
  const auto written = [&](const char* run) {
    std::ifstream file(absl::StrCat(options.project.logging_directory, "/", run, "/metrics.jsonl"));
    return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  };
  ASSERT_TRUE(accelerator.init_trackers("fold0", {}, {"jsonl"}).ok());
  accelerator.log({{"loss", 0.5}}, 3);
  const absl::Status again = accelerator.init_trackers("fold1", {}, {"jsonl"});
  ASSERT_TRUE(again.ok()) << again;
  EXPECT_THAT(written("fold0"), HasSubstr("loss"));
  accelerator.log({{"accuracy", 0.5}}, 3);
  accelerator.end_training();
  EXPECT_THAT(written("fold0"), testing::Not(HasSubstr("accuracy")));
  EXPECT_THAT(written("fold1"), HasSubstr("accuracy"));
}

}  // namespace
}  // namespace muster
