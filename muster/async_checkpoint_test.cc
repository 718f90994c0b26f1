// save_state() beside training: what it writes, and where its errors appear.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/test_threads.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "torch/nn/modules/linear.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

AcceleratorOptions Asynchronous(const std::string& name) {
  AcceleratorOptions options;
  options.project.directory = TestDir(name);
  options.data_loader.data_seed = 3;
  options.checkpoint.asynchronous = true;
  return options;
}

class AsyncCheckpoint : public testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(ArmFailpoints("", "", "").ok()); }
};

std::vector<std::string> Saved(const AcceleratorOptions& options) {
  const auto names = ListDirectory(options.project.directory + "/checkpoints");
  return names.ok() ? *names : std::vector<std::string>();
}

// Trains from the newest checkpoint, if any, until optimizer step `until`, saving every five steps.
// Returns the weights of rank 0.
at::Tensor TrainUntil(int ranks, const AcceleratorOptions& options, int64_t until) {
  at::Tensor weights;
  RunAccelerators(ranks, options, [&](Accelerator& a) {
    torch::nn::Linear net(4, 4);
    {
      // Fixed values, not random ones, because the ranks are threads and share one generator.
      const at::NoGradGuard no_grad;
      net->weight.copy_(at::arange(16, at::kFloat).view({4, 4}).div(16));
      net->bias.zero_();
    }
    FusedAdamW adamw(net->parameters(), {.lr = 0.1});
    const at::Tensor rows =
        at::arange(160, at::kFloat).view({40, 4}).remainder(7);  // 20 or 10 batches
    auto [model, optimizer, loader] =
        a.prepare(net, adamw, batches(TensorDataset(rows), 2).shuffle(true));
    ASSERT_TRUE(a.load_state_if_present().ok());
    for (int64_t epoch : a.epochs(3)) {
      (void)epoch;
      for (auto& batch : loader) {
        auto scope = a.accumulate();
        a.backward(Loss(model(batch.value())));
        optimizer.step();
        optimizer.zero_grad();
        if (a.global_step() % 5 == 0) {
          const absl::Status saved = a.save_state();
          ASSERT_TRUE(saved.ok()) << saved;
        }
        if (a.global_step() == until) break;
      }
      if (a.global_step() == until) break;
    }
    EXPECT_EQ(a.global_step(), until);
    if (a.is_main_process()) weights = net->weight.detach().clone();
  });
  return weights;
}

TEST_F(AsyncCheckpoint, TenAndTenSteps_AreTwentyBitForBit) {
  for (const int ranks : {1, 2}) {
    const std::string name = std::to_string(ranks);
    const at::Tensor whole = TrainUntil(ranks, Asynchronous("whole" + name), 20);
    TrainUntil(ranks, Asynchronous("parts" + name), 10);
    const at::Tensor parts = TrainUntil(ranks, Asynchronous("parts" + name), 20);
    EXPECT_TRUE(parts.equal(whole)) << ranks << " ranks";
    // Compare with a state that was saved in the foreground.
    AcceleratorOptions synchronous = Asynchronous("synchronous" + name);
    synchronous.checkpoint.asynchronous = false;
    TrainUntil(ranks, synchronous, 10);
    EXPECT_TRUE(TrainUntil(ranks, synchronous, 20).equal(whole)) << ranks << " ranks";
    EXPECT_THAT(Saved(Asynchronous("parts" + name)),
                ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"));
  }
}

TEST_F(AsyncCheckpoint, StateThatChangesRightAfterTheCall_IsNotInTheCheckpoint) {
  RunAccelerators(2, Asynchronous("change"), [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    at::NoGradGuard no_grad;
    for (int i = 0; i < 5; ++i) {
      model->weight.fill_(i);
      ASSERT_TRUE(a.save_state().ok());
      model->weight.fill_(-1);
    }
    // The load waits for the save under way.
    ASSERT_TRUE(a.load_state().ok());
    EXPECT_EQ(model->weight.item<double>(), 4);
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(
          a.load_state(TestDir("change") + "/checkpoints/checkpoint_" + std::to_string(i)).ok());
      EXPECT_EQ(model->weight.item<double>(), i);
    }
  });
}

// A model whose parameters are large enough to be copied later, with a buffer.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    const at::NoGradGuard no_grad;
    net = register_module("net", torch::nn::Linear(64, 64));
    net->weight.copy_(at::arange(4096, at::kFloat).view({64, 64}).div(4096));
    net->bias.zero_();
    calls = register_buffer("calls", at::zeros({2000}));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls.add_(1);
    return net(x);
  }
  torch::nn::Linear net = nullptr;
  at::Tensor calls;
};
TORCH_MODULE(Wide);

std::vector<std::string> BytesOf(const std::string& dir) {
  std::vector<std::string> files;
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "scheduler.json"}) {
    const auto bytes = ReadFile(dir + "/" + name);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    files.push_back(bytes.ok() ? *bytes : "");
  }
  return files;
}

// Trains four steps of two micro-steps, and saves after each to PROJECT/0 to 3 by `a`, while
// training continues immediately.
void TrainWide(Accelerator& a, const std::function<void(AcceleratedModel<Wide>&)>& after_save) {
  Wide net;
  FusedAdamW adamw(net->parameters(), {.lr = 0.1});
  auto [model, optimizer, schedule] = a.prepare(net, adamw, StepLR(1, 0.5));
  for (int i = 0; i < 8; ++i) {
    auto scope = a.accumulate();
    a.backward(Loss(model(at::full({2, 64}, i + a.process_index(), at::kFloat))));
    optimizer.step();
    schedule.step();
    optimizer.zero_grad();
    if (i % 2 == 0) continue;
    const absl::Status saved = a.save_state(a.project_dir() + "/" + std::to_string(i / 2));
    ASSERT_TRUE(saved.ok()) << saved;
    after_save(model);
  }
  const absl::Status waited = a.wait_for_checkpoint();
  EXPECT_TRUE(waited.ok()) << waited;
}

TEST_F(AsyncCheckpoint, LazySaves_AreTheBytesOfSynchronousOnesWhileTrainingGoesOn) {
  // The copying thread is delayed: without the wait in step() it would copy other weights.
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_copy=delay:100ms", "", "").ok());
  for (const int ranks : {1, 2}) {
    std::vector<std::string> dirs;
    for (const bool asynchronous : {true, false}) {
      AcceleratorOptions options = Asynchronous(absl::StrCat("lazy", asynchronous, ranks));
      options.gradient_accumulation_steps = 2;
      options.checkpoint.asynchronous = asynchronous;
      dirs.push_back(options.project.directory);
      RunAccelerators(ranks, options, [](Accelerator& a) { TrainWide(a, [](auto&) {}); });
    }
    for (const char* number : {"/0", "/1", "/2", "/3"}) {
      EXPECT_TRUE(BytesOf(dirs[0] + number) == BytesOf(dirs[1] + number)) << number;
    }
  }
}

TEST_F(AsyncCheckpoint, LazySave_IsCopiedBeforeMusterChangesTheWeights) {
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_copy=delay:100ms", "", "").ok());
  AcceleratorOptions options = Asynchronous("writers");
  RunAccelerators(2, options, [&](Accelerator& a) {
    Wide net;
    FusedAdamW adamw(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, adamw);
    Ema ema(a, model, {.decay = 0.5});
    const at::Tensor before = model->net->weight.detach().clone();
    a.backward(Loss(model(at::ones({2, 64}))));
    optimizer.step();
    optimizer.zero_grad();
    ema.update();
    const at::Tensor trained = model->net->weight.detach().clone();
    const std::string dir = options.project.directory;
    const auto saved = [&](const char* name) {
      EXPECT_TRUE(a.wait_for_checkpoint().ok());
      a.wait_for_everyone();
      return LoadTensors(dir + "/" + name + "/model.safetensors").at("net.weight");
    };

    ASSERT_TRUE(a.save_state(dir + "/ema").ok());
    {
      auto averaged = ema.apply();
      EXPECT_FALSE(model->net->weight.equal(trained));
    }
    EXPECT_TRUE(saved("ema").equal(trained));

    ASSERT_TRUE(a.save_state(dir + "/copy").ok());
    ema.copy_to(*model);
    EXPECT_TRUE(saved("copy").equal(trained));

    const at::Tensor averages = model->net->weight.detach().clone();
    {
      LocalSGD local(a, model, 1);
      ASSERT_TRUE(a.save_state(dir + "/local").ok());
      local.step();
    }
    EXPECT_TRUE(saved("local").equal(averages));

    ASSERT_TRUE(a.save_state(dir + "/load").ok());
    ASSERT_TRUE(a.load_state(dir + "/ema").ok());
    EXPECT_TRUE(model->net->weight.equal(trained));
    EXPECT_TRUE(saved("load").equal(averages));
  });
}

TEST_F(AsyncCheckpoint, WeightsThatTheProgramChanges_FailTheLazySaveByName) {
  for (const bool lazy : {true, false}) {
    AcceleratorOptions options = Asynchronous(absl::StrCat("changed", lazy));
    options.checkpoint.lazy = lazy;
    RunAccelerators(1, options, [&](Accelerator& a) {
      Wide net;
      FusedAdamW adamw(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, adamw);
      // Called after the model was collected: it acts like a program that changes its weights
      // before they are copied.
      bool change = true;
      auto weight = model->net->weight;
      a.register_for_checkpointing(
          [&, weight]() mutable {
            const at::NoGradGuard no_grad;
            if (change) weight.mul_(2);
            return PlainState();
          },
          [](const PlainState&) {});
      ASSERT_TRUE(a.save_state().ok());
      const absl::Status status = a.wait_for_checkpoint();
      EXPECT_EQ(status.ok(), !lazy) << status;
      if (lazy) {
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr("\"net.weight\" of model.safetensors was changed"),
                          HasSubstr("options.checkpoint.lazy = false")));
      }
      change = false;
      ASSERT_TRUE(a.save_state().ok());
      EXPECT_TRUE(a.wait_for_checkpoint().ok());
    });
  }
}

TEST_F(AsyncCheckpoint, LazySave_IsWholeWhenTheProgramEnds) {
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_copy=delay:50ms", "", "").ok());
  for (const bool end : {true, false}) {
    const AcceleratorOptions options = Asynchronous(absl::StrCat("ends", end));
    RunAccelerators(2, options, [&](Accelerator& a) {
      {
        Wide net;
        FusedAdamW adamw(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, adamw);
        ASSERT_TRUE(a.save_state(options.project.directory + "/last").ok());
      }
      if (end) a.end_training();
    });
    const auto tensors = LoadTensors(options.project.directory + "/last/model.safetensors");
    EXPECT_TRUE(
        tensors.at("net.weight").equal(at::arange(4096, at::kFloat).view({64, 64}).div(4096)));
  }
}

TEST_F(AsyncCheckpoint, TotalLimit_HoldsOnceAllAreWritten) {
  AcceleratorOptions options = Asynchronous("limit");
  options.project.total_limit = 2;
  RunAccelerators(2, options, [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(a.save_state().ok());
    ASSERT_TRUE(a.wait_for_checkpoint().ok());
    a.wait_for_everyone();
    EXPECT_THAT(Saved(options), ElementsAre("checkpoint_2", "checkpoint_3"));
    a.end_training();
  });
}

TEST_F(AsyncCheckpoint, FailedSave_IsReportedByTheNextOneWhichGoesOn) {
  const AcceleratorOptions options = Asynchronous("failed");
  const std::string dir = TestDir("failed") + "/one";
  RunAccelerators(2, options, [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    at::NoGradGuard no_grad;
    if (a.is_main_process()) {
      ASSERT_TRUE(ArmFailpoints("worker.checkpoint_sync=error:RESOURCE_EXHAUSTED", "", "").ok());
    }
    a.wait_for_everyone();
    ASSERT_TRUE(a.save_state(dir).ok());
    const absl::Status failed = a.wait_for_checkpoint();
    EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(failed.message()),
                AllOf(HasSubstr("the asynchronous save of " + dir + " failed: rank "),
                      HasSubstr("worker.checkpoint_sync")));
    EXPECT_TRUE(a.wait_for_checkpoint().ok());

    a.wait_for_everyone();
    if (a.is_main_process()) {
      ASSERT_TRUE(ArmFailpoints("worker.checkpoint_publish=error:RESOURCE_EXHAUSTED", "", "").ok());
    }
    a.wait_for_everyone();
    ASSERT_TRUE(a.save_state(dir).ok());
    // There is memory for two saves: by the third call the first one has ended.
    absl::Status reported = a.save_state(dir);
    model->weight.fill_(5);
    if (reported.ok()) reported = a.save_state(dir);
    EXPECT_THAT(std::string(reported.message()),
                AllOf(HasSubstr("the asynchronous save of " + dir + " failed: "),
                      HasSubstr("; " + dir + " is being written")));
    a.wait_for_everyone();
    model->weight.fill_(6);
    ASSERT_TRUE(a.save_state(dir).ok());
    ASSERT_TRUE(a.load_state(dir).ok());
    EXPECT_EQ(model->weight.item<double>(), 6);
  });
}

TEST_F(AsyncCheckpoint, LastSaveThatFails_FailsTheEndOfTraining) {
  RunAccelerators(1, Asynchronous("end"), [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    ASSERT_TRUE(ArmFailpoints("worker.checkpoint_publish=error:RESOURCE_EXHAUSTED", "", "").ok());
    ASSERT_TRUE(a.save_state().ok());
    EXPECT_THROW(a.end_training(), c10::Error);
  });
}

TEST_F(AsyncCheckpoint, SaveAfterStop_IsThereWhenTheCallReturns) {
  const AcceleratorOptions options = Asynchronous("stop");
  RunAccelerators(2, options, [&](Accelerator& a) {
    auto model = a.prepare(OneWeight());
    if (a.is_main_process()) {
      ASSERT_TRUE(ArmFailpoints("worker.checkpoint_publish=delay:100ms", "", "").ok());
      ASSERT_TRUE(a.set_trigger("stop").ok());
    }
    a.wait_for_everyone();
    ASSERT_TRUE(a.should_stop());
    ASSERT_TRUE(a.save_state().ok());
    EXPECT_TRUE(PathExists(TestDir("stop") + "/checkpoints/checkpoint_0/manifest.json"));
  });
}

// One process may have no thread left while another has some.
TEST_F(AsyncCheckpoint, RankWithoutAThread_IsAnErrorOnEveryRankAndTheNextSaveBegins) {
  int threads = 0;  // started by a rank for saves; the last of them writes
  for (const bool fails : {false, true}) {
    const AcceleratorOptions options = Asynchronous(absl::StrCat("threads ", fails));
    std::vector<std::string> errors(2);
    RunAccelerators(2, options, [&](Accelerator& a) {
      auto model = a.prepare(OneWeight());
      const int before = ThreadsLeft::Started();
      {
        std::optional<ThreadsLeft> left;
        if (fails && a.process_index() == 1) left.emplace(threads - 1);
        errors[a.process_index()] = a.save_state().ToString();
      }
      if (a.process_index() == 1) threads = ThreadsLeft::Started() - before;
      EXPECT_EQ(ThreadsLeft::Refused() > 0, fails && a.process_index() == 1);
      const absl::Status saved = a.save_state();
      EXPECT_TRUE(saved.ok()) << saved;
      a.end_training();
    });
    if (!fails) {
      EXPECT_THAT(errors, ElementsAre("OK", "OK"));
      ASSERT_GT(threads, 0);
      continue;
    }
    for (const std::string& error : errors) {
      EXPECT_THAT(error, HasSubstr("rank 1: cannot begin to save beside training: "));
    }
    EXPECT_THAT(Saved(options), ElementsAre("checkpoint_0"));
  }
}

}  // namespace
}  // namespace muster
