#include "muster/utils.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "muster/internal/core.h"
#include "muster/test_model.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/sgd.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/gloo_ranks.h"

namespace muster {
namespace {

TEST(SetSeed, DeviceSpecific_AddsTheNumberOfTheProcess) {
  const auto draw = [] { return at::rand({4}); };
  set_seed(7);
  const at::Tensor seven = draw();
  set_seed(8);
  const at::Tensor eight = draw();
  setenv("MUSTER_RANK", "1", 1);
  setenv("MUSTER_WORLD_SIZE", "2", 1);
  setenv("MUSTER_COORDINATOR", "127.0.0.1:1", 1);
  set_seed(7);
  EXPECT_TRUE(at::equal(draw(), seven));
  set_seed(7, /*device_specific=*/true);
  EXPECT_TRUE(at::equal(draw(), eight));
  unsetenv("MUSTER_RANK");
  unsetenv("MUSTER_WORLD_SIZE");
  // It gets its index only at the rendezvous.
  EXPECT_THROW(set_seed(7, true), c10::Error);
  unsetenv("MUSTER_COORDINATOR");
}

TEST(SynchronizeRngStates, UnknownKind_IsNamed) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  synchronize_rng_states(accelerator);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
  synchronize_rng_states(accelerator, generator);
  EXPECT_THROW(synchronize_rng_states(accelerator, {"numpy"}), c10::Error);
}

TEST(Structures, AcceleratesWords_DoWhatTheySay) {
  using Nest = std::tuple<at::Tensor, std::map<std::string, at::Tensor>>;
  const Nest nest(at::ones({3, 2}, at::kHalf), {{"ids", at::arange(3)}});
  EXPECT_EQ(find_batch_size(nest), 3);
  EXPECT_THROW(find_batch_size(std::vector<at::Tensor>()), c10::Error);
  EXPECT_EQ(std::get<1>(slice_tensors(nest, 1, 3)).at("ids").size(0), 2);
  EXPECT_EQ(std::get<0>(concatenate(std::vector<Nest>{nest, nest})).size(0), 6);
  EXPECT_EQ(std::get<0>(pad_input_tensors(nest, 3, 2)).size(0), 4);
  EXPECT_EQ(std::get<0>(convert_to_fp32(nest)).scalar_type(), at::kFloat);
  EXPECT_EQ(std::get<1>(convert_to_fp32(nest)).at("ids").scalar_type(), at::kLong);
  EXPECT_EQ(std::get<0>(send_to_device(nest, at::kCPU)).device().type(), at::kCPU);
  auto forward = convert_outputs_to_fp32([](const at::Tensor& x) { return x.to(at::kBFloat16); });
  EXPECT_EQ(forward(at::ones({2})).scalar_type(), at::kFloat);
}

TEST(SkipFirstBatches, Alone_LeavesTheRest) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto loader = accelerator.prepare(batches(TensorDataset(at::arange(10)), 2));
  std::vector<int64_t> first;
  for (auto& batch : skip_first_batches(loader, 3)) {
    first.push_back(batch.value()[0].template item<int64_t>());
  }
  EXPECT_EQ(first, (std::vector<int64_t>{6, 8}));
}

TEST(Tqdm, OverALoader_IsARangeOfItsBatchesAndCountsThem) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto loader = accelerator.prepare(batches(TensorDataset(at::arange(10)), 2));
  auto bar = accelerator.tqdm(loader, "train");
  std::vector<int64_t> first;
  for (auto& batch : bar) {
    EXPECT_EQ(bar.done(), batch.info().index);
    first.push_back(batch.value()[0].template item<int64_t>());
  }
  EXPECT_EQ(first, (std::vector<int64_t>{0, 2, 4, 6, 8}));
  EXPECT_EQ(bar.done(), 5);
  auto rest = accelerator.tqdm(skip_first_batches(loader, 3));
  for (auto& batch : rest) EXPECT_EQ(rest.done(), batch.info().index - 3);
  EXPECT_EQ(rest.done(), 2);
  // Batches before a loaded state count as done.
  LoaderState state;
  for (auto& batch : loader) {
    if (batch.info().index == 3) state = loader.state_dict();
  }
  loader.load_state(state);
  auto resumed = accelerator.tqdm(loader);
  for (auto& batch : resumed) EXPECT_EQ(resumed.done(), batch.info().index);
  EXPECT_EQ(resumed.done(), 5);
}

TEST(LocalSgd, OneProcess_DoesNothing) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(torch::nn::Linear(1, 1));
  LocalSGD local(accelerator, model, 1);
  EXPECT_FALSE(local.step());
}

TEST(GetLogger, Lines_CarryTheRank) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto logger = get_logger(accelerator);
  testing::internal::CaptureStderr();
  logger.Info("hello");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("[RANK 0] hello"), std::string::npos);
}

TEST(FindExecutableBatchSize, WholeTraining_StartsCleanAfterAFailureInMidWindow) {
  AcceleratorOptions options;
  options.cpu = true;
  options.gradient_accumulation_steps = 4;
  Accelerator accelerator(options);
  const at::Tensor data = at::ones({16, 1});
  int calls = 0;
  std::vector<int64_t> steps;
  std::weak_ptr<torch::nn::Module> failed;
  const int64_t found = find_executable_batch_size(
      accelerator, 4,
      [&](int64_t batch_size) {
        ++calls;
        EXPECT_TRUE(failed.expired()) << "nothing of the failed attempt is left";
        torch::nn::Linear net = OneWeight();
        torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1));
        auto [model, optimizer, scheduler, loader] =
            accelerator.prepare(net, sgd, StepLR(100), batches(TensorDataset(data), batch_size));
        int64_t batch = 0;
        for (auto& x : loader) {
          auto scope = accelerator.accumulate();
          accelerator.backward(Loss(model(x.value())));
          if (batch_size == 4 && ++batch == 2) {
            failed = net.ptr();
            throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "out of memory");
          }
          optimizer.step();
          optimizer.zero_grad();
          scheduler.step();
        }
        steps.push_back(optimizer.steps());
        // 8 batches of 2 in windows of 4, each with a gradient of -1.
        EXPECT_EQ(net->weight.item<float>(), 2);
        EXPECT_TRUE(accelerator.save_state(TestDir("after_search")).ok());
      },
      [](int64_t size) { return size / 2; });
  EXPECT_EQ(found, 2);
  EXPECT_EQ(calls, 2);
  EXPECT_THAT(steps, testing::ElementsAre(2));
}

TEST(FindExecutableBatchSize, RegisteredInAFailedAttempt_IsNotSaved) {
  // Writes to a member, which a sanitizer notices, too.
  struct Count {
    ~Count() { count = -1; }
    StateDict state_dict() const {
      StateDict state;
      state.SetInt("count", count);
      return state;
    }
    void load_state_dict(const StateDict& state) { count = state.GetInt("count").value(); }
    int64_t count = 0;
  };
  AcceleratorOptions options;
  options.cpu = true;
  const std::string dir = TestDir("attempts");
  int calls = 0, hooks = 0;
  {
    Accelerator accelerator(options);
    Count outside;
    accelerator.register_for_checkpointing(outside);
    outside.count = 5;
    find_executable_batch_size(
        accelerator, 4,
        [&](int64_t batch_size) {
          ++calls;
          torch::nn::Linear net = OneWeight();
          auto model = accelerator.prepare(net);
          Ema ema(accelerator, model);
          Count inside;
          inside.count = batch_size;
          accelerator.register_for_checkpointing(ema, inside);
          accelerator.register_save_state_pre_hook([&](auto&, auto&) { ++hooks; });
          if (batch_size == 4) {
            throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "out of memory");
          }
          const absl::Status saved = accelerator.save_state(dir);
          EXPECT_TRUE(saved.ok()) << saved;
        },
        [](int64_t size) { return size / 2; });
  }
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(hooks, 1);
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  auto model = accelerator.prepare(net);
  Count outside, inside;
  Ema ema(accelerator, model);
  accelerator.register_for_checkpointing(outside, ema, inside);
  const absl::Status loaded = accelerator.load_state(dir);
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(outside.count, 5);
  EXPECT_EQ(inside.count, 2);
}

// As in a loop over folds.
TEST(Ema, EndedOrRemoved_IsNotSaved) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  const std::string dir = TestDir("folds");
  double value = 0;
  for (int fold = 0; fold < 3; ++fold) {
    torch::nn::Linear net = OneWeight();
    auto model = accelerator.prepare(net);
    Ema ema(accelerator, model);
    accelerator.register_for_checkpointing(ema);
    HookHandle own = accelerator.register_for_checkpointing(
        [&value] {
          return PlainState{{"value", {value}}};
        },
        [&value](const PlainState& state) { value = state.at("value")[0]; });
    value = fold;
    absl::Status status = accelerator.save_state(dir + std::to_string(fold));
    EXPECT_TRUE(status.ok()) << status;
    value = -1;
    // One object of each kind: together with those of earlier folds the load would be refused.
    Accelerator other(options);
    torch::nn::Linear again = OneWeight();
    auto model_again = other.prepare(again);
    Ema ema_again(other, model_again);
    other.register_for_checkpointing(ema_again);
    other.register_for_checkpointing(
        [&value] {
          return PlainState{{"value", {value}}};
        },
        [&value](const PlainState& state) { value = state.at("value")[0]; });
    status = other.load_state(dir + std::to_string(fold));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(value, fold);
    own.remove();
  }
}

TEST(Ema, Loop_AveragesWhereTheOptimizerSteps) {
  AcceleratorOptions options;
  options.cpu = true;
  options.gradient_accumulation_steps = 2;
  Accelerator accelerator(options);
  torch::nn::Linear net = OneWeight();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1));
  auto [model, optimizer, loader] =
      accelerator.prepare(net, sgd, batches(TensorDataset(at::ones({8, 1})), 1));
  Ema ema(accelerator, model, {.decay = 0.5});
  double weight = 0, average = 0;
  int updates = 0;
  for (auto& x : loader) {
    auto scope = accelerator.accumulate();
    accelerator.backward(Loss(model(x.value())));
    optimizer.step();
    optimizer.zero_grad();
    if (!ema.update()) continue;
    ++updates;
    weight += 1;
    average = 0.5 * (average + weight);
  }
  EXPECT_EQ(updates, 4);
  {
    auto averaged = ema.apply();
    EXPECT_NEAR(model->weight.item<float>(), average, 1e-6);
  }
  EXPECT_EQ(model->weight.item<float>(), 4);
  torch::nn::Linear other = OneWeight();
  ema.copy_to(*other);
  EXPECT_NEAR(other->weight.item<float>(), average, 1e-6);
  torch::nn::Linear wider(2, 1);
  EXPECT_THROW(ema.copy_to(*wider), c10::Error);

  static_assert(Checkpointable<Ema>);
  Ema restored(accelerator, model, {.decay = 0.5});
  restored.load_state_dict(ema.state_dict());
  EXPECT_EQ(restored.updates(), 4);
  ema.copy_to(*model);
  EXPECT_NEAR(model->weight.item<float>(), average, 1e-6);
}

TEST(Ema, InLocalSgd_IsRefused) {
  RunGlooRanks(2, [](Comm& comm) {
    JoinedProcess process;
    process.environment.rank.value = process.environment.local_rank.value = comm.rank();
    process.environment.world_size.value = process.environment.local_world_size.value = comm.size();
    process.environment.mixed_precision.value = "no";
    process.comm = std::make_unique<BorrowedComm>(comm);
    Accelerator accelerator(
        std::make_shared<internal::Core>(AcceleratorOptions(), std::move(process)));
    auto model = accelerator.prepare(OneWeight());
    Ema ema(accelerator, model);
    {
      LocalSGD local(accelerator, model, 2);
      EXPECT_THROW(ema.update(), c10::Error);
    }
    EXPECT_TRUE(ema.update());
  });
}

TEST(Ema, Buffers_AreTheModelsOwn) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  torch::nn::BatchNorm1d norm(2);
  auto model = accelerator.prepare(norm);
  Ema ema(accelerator, model);
  norm->running_mean.fill_(3);
  torch::nn::BatchNorm1d other(2);
  ema.copy_to(*other);
  EXPECT_EQ(other->running_mean[0].item<float>(), 3);
}

}  // namespace
}  // namespace muster
