// Sharded training through the Accelerator, on several ranks: threads of this process over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "base/file.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_net.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "muster/weights.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/folder.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/sharded_model.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr int kSamples = 12;  // in a step, on all ranks

AcceleratorOptions Sharded(const std::string& name) {
  AcceleratorOptions options;
  options.sharding = ParseSharding(name, 2);
  return options;
}

using Weights = std::map<std::string, at::Tensor>;

// Trains steps `first` up to `last`, in windows of `micro_steps`; the loss of all ranks together is
// that of one process over all samples.
template <class Model, class Optimizer>
void Train(Accelerator& a, Model& model, Optimizer& optimizer, int first, int last,
           int micro_steps = 1) {
  for (int step = first; step < last; ++step) {
    const at::Tensor x = Random({kSamples, 5}, 100 + step), y = Random({kSamples, 3}, 200 + step);
    for (int m = 0; m < micro_steps; ++m) {
      const auto mine = [&](const at::Tensor& t) {
        return t.chunk(a.num_processes())[a.process_index()].chunk(micro_steps)[m];
      };
      auto scope = a.accumulate();
      a.backward(at::mse_loss(model(mine(x)), mine(y)));
      if (a.sync_gradients()) a.clip_grad_norm_(model.parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
}

Weights OneProcess(int steps, double lr = 0.1) {
  Weights weights;
  RunAccelerators(1, {}, [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedSGD sgd(net->parameters(), {.lr = lr, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    Train(a, model, optimizer, 0, steps);
    for (const auto& [name, tensor] : a.get_state_dict(model)) weights[name] = tensor.clone();
  });
  return weights;
}

double Distance(const Weights& a, const Weights& b) {
  double off = 0, moved = 0;
  const torch::nn::Sequential start = MakeNet();
  for (const auto& item : start->named_parameters()) {
    const at::Tensor& want = b.at(item.key());
    off += (a.at(item.key()) - want).to(at::kDouble).square().sum().item<double>();
    moved += (want - item.value()).to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(off / moved);
}

TEST(Sharding, EveryStrategy_TrainsAsOneProcess) {
  const Weights want = OneProcess(10);
  for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
    for (const int micro_steps : {1, 2}) {
      AcceleratorOptions options = Sharded(strategy);
      options.gradient_accumulation_steps = micro_steps;
      RunAccelerators(2, options, [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
        auto [model, optimizer] = a.prepare(net, sgd);
        Train(a, model, optimizer, 0, 10, micro_steps);
        const Weights got = a.get_state_dict(model);
        if (a.is_main_process()) {
          EXPECT_LE(Distance(got, want), 1e-6) << strategy << " " << micro_steps;
        }
      });
    }
  }
}

TEST(Sharding, OptimizerOfLibTorch_IsGivenTheShards) {
  Weights want;
  for (const char* strategy : {"no_shard", "zero3"}) {
    RunAccelerators(2, Sharded(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      const std::vector<at::Tensor> all = net->parameters();
      torch::optim::AdamW adam(
          {torch::optim::OptimizerParamGroup({all[0], all[2], all[4]}),
           torch::optim::OptimizerParamGroup(
               {all[1], all[3], all[5]}, std::make_unique<torch::optim::AdamWOptions>(
                                             torch::optim::AdamWOptions(1e-2).weight_decay(0)))},
          torch::optim::AdamWOptions(1e-2));
      // Prepared in either order.
      auto optimizer = a.prepare(adam);
      auto model = a.prepare(net);
      Train(a, model, optimizer, 0, 3);
      const Weights got = a.get_state_dict(model);
      if (!a.is_main_process()) return;
      if (want.empty()) {
        for (const auto& [name, tensor] : got) want[name] = tensor.clone();
      }
      // Adam amplifies the rounding of small gradients.
      EXPECT_LE(Distance(got, want), 1e-4);
    });
  }
}

// Its constructor makes the state for the parameters as they are at that time.
TEST(Sharding, AdagradOfLibTorch_IsMadeBeforePrepareWhereParametersAreDivided) {
  std::vector<Weights> runs;
  for (const char* strategy : {"no_shard", "zero2", "zero3"}) {
    const bool divided = std::string(strategy) != "no_shard";  // else made by one process
    for (const bool before : {true, false}) {
      if (!divided && !before) continue;
      std::string error;
      RunAccelerators(divided ? 2 : 1, Sharded(strategy), [&](Accelerator& a) {
        torch::nn::Sequential net = MakeNet();
        if (before) {
          torch::optim::Adagrad adagrad(net->parameters(), 0.1);
          auto [model, optimizer] = a.prepare(net, adagrad);
          Train(a, model, optimizer, 0, 3);
          const Weights got = WeightsOf(a, model);
          if (a.is_main_process()) runs.push_back(got);
          return;
        }
        auto model = a.prepare(net);
        const std::string mine =
            ErrorOf([&] { const torch::optim::Adagrad adagrad(net->parameters(), 0.1); });
        if (a.is_main_process()) error = mine;
      });
      if (before) continue;
      EXPECT_THAT(error,
                  AllOf(HasSubstr("torch::optim::Adagrad"), HasSubstr("make it before prepare()")));
    }
  }
  ASSERT_EQ(runs.size(), 3U);
  for (const size_t run : {1, 2}) EXPECT_LE(Distance(runs[run], runs[0]), 1e-4);
}

// Lists the exchanges.
class ListingComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    calls.push_back(c10::str("AllReduce of ", tensor.numel()));
    BorrowedComm::AllReduce(tensor, op);
  }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    calls.push_back(c10::str("AllGather of ", tensor.numel()));
    return BorrowedComm::AllGather(tensor);
  }
  void AllGatherParts(at::Tensor& flat) override {
    calls.push_back("AllGatherParts");
    BorrowedComm::AllGatherParts(flat);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    calls.push_back("ReduceScatter");
    return BorrowedComm::ReduceScatter(flat, op);
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    calls.push_back("AllGatherBytes");
    return BorrowedComm::AllGatherBytes(bytes);
  }
  std::vector<std::string> calls;
};

TEST(Sharding, Clipping_IsOneExchangeOfANumber) {
  for (const char* strategy : {"zero2", "zero3"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    RunGlooRanks(2, [&](Comm& gloo) {
      ListingComm comm(gloo);
      Accelerator a(CoreOn(comm, Sharded(strategy), store));
      torch::nn::Sequential net = MakeNet();
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      for (const double norm : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
        a.backward(model(Random({2, 5}, 8)).square().mean());
        comm.calls.clear();
        a.clip_grad_norm_(model.parameters(), 0.5, norm);
        EXPECT_THAT(comm.calls, testing::ElementsAre("AllReduce of 1")) << strategy << " " << norm;
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  }
}

// Counts gathers of units.
class CountingGathers : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  void AllGatherParts(at::Tensor& flat) override {
    ++gathers;
    BorrowedComm::AllGatherParts(flat);
  }
  int gathers = 0;
};

// Of three models that keep their gathered parameters, one is frozen and two have optimizers.
TEST(Sharding, StepOfOneModel_LeavesWhatIsGatheredOfOthers) {
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    SCOPED_TRACE(strategy);
    AcceleratorOptions options = Sharded(strategy);
    options.sharding->reshard_after_forward = false;
    const auto store = c10::make_intrusive<c10d::HashStore>();
    RunGlooRanks(2, [&](Comm& gloo) {
      CountingGathers comm(gloo);
      Accelerator a(CoreOn(comm, options, store));
      torch::nn::Sequential teacher_net = MakeNet(), student_net = MakeNet(),
                            critic_net = MakeNet();
      for (at::Tensor& parameter : teacher_net->parameters()) parameter.set_requires_grad(false);
      FusedSGD sgd(student_net->parameters(), {.lr = 0.1});
      torch::optim::AdamW adamw(critic_net->parameters());
      auto teacher = a.prepare(teacher_net);
      auto [student, of_student] = a.prepare(student_net, sgd);
      auto [critic, of_critic] = a.prepare(critic_net, adamw);
      const auto evaluate = [&](auto& model, int* gathers) {
        const at::NoGradGuard no_grad;
        const int before = comm.gathers;
        const at::Tensor y = model(Random({2, 5}, 7));
        *gathers = comm.gathers - before;
        return y;
      };
      const auto step = [&](auto& model, auto& optimizer) {
        a.backward(model(Random({2, 5}, 8)).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      };
      int of_teacher = 0, gathered = 0;
      step(critic, of_critic);
      evaluate(teacher, &of_teacher);
      const at::Tensor before = evaluate(critic, &gathered);
      EXPECT_GT(of_teacher + gathered, 0);
      for (int i = 0; i < 3; ++i) {
        step(student, of_student);
        evaluate(teacher, &of_teacher);
        EXPECT_EQ(of_teacher, 0) << "of the frozen model";
        EXPECT_TRUE(at::equal(evaluate(critic, &gathered), before));
        EXPECT_EQ(gathered, 0) << "of another model that is trained";
      }
      // Reading the parameters of one model does not change that, either.
      a.summon_full_params(student, [] {});
      evaluate(teacher, &of_teacher);
      EXPECT_EQ(of_teacher, 0);
      step(critic, of_critic);
      const at::Tensor after = evaluate(critic, &gathered);
      EXPECT_FALSE(at::equal(after, before));
      const at::Tensor of_rank_0 = a.broadcast(after.clone(), 0);
      EXPECT_TRUE(at::equal(after, of_rank_0));
      EXPECT_GT(gathered, 0);
      evaluate(teacher, &of_teacher);
      EXPECT_EQ(of_teacher, 0);
    });
  }
}

// A judge in the backward pass of a generator, whose optimizer alone steps.
TEST(Sharding, ModelInThePassOfAnother_IsGatheredAgainUnlessItIsFrozenThere) {
  for (const bool frozen : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    RunGlooRanks(2, [&](Comm& gloo) {
      CountingGathers comm(gloo);
      Accelerator a(CoreOn(comm, Sharded("zero2"), store));
      torch::nn::Linear generator_net(5, 5);
      torch::nn::Sequential judge_net = MakeNet();
      FusedSGD of_generator(generator_net->parameters(), {.lr = 0.1});
      FusedSGD of_judge(judge_net->parameters(), {.lr = 0.1});
      auto [generator, first] = a.prepare(generator_net, of_generator);
      auto [judge, second] = a.prepare(judge_net, of_judge);
      const at::Tensor x = Random({2, 5}, 8);
      a.backward(judge(x).square().mean());
      second.step();
      second.zero_grad();
      const auto look = [&, &judge = judge] {
        const at::NoGradGuard no_grad;
        const int before = comm.gathers;
        judge(x);
        return comm.gathers - before;
      };
      EXPECT_EQ(look(), 3);
      for (at::Tensor& parameter : judge_net->parameters()) parameter.set_requires_grad(!frozen);
      a.backward(judge(generator(x)).square().mean());
      for (at::Tensor& parameter : judge_net->parameters()) parameter.set_requires_grad(true);
      first.step();
      first.zero_grad();
      second.zero_grad();
      EXPECT_EQ(look(), frozen ? 0 : 3);
    });
  }
}

// Rank 0 has only elements of the frozen weight, rank 1 the bias.
TEST(Sharding, StepOfARankWhosePartIsFrozen_IsNotWarnedOf) {
  for (const char* const strategy : {"zero1", "zero2", "zero3"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    testing::internal::CaptureStderr();
    RunGlooRanks(2, [&](Comm& comm) {
      Accelerator a(CoreOn(comm, Sharded(strategy), store));
      torch::nn::Linear net(5, 5);
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      net->weight.set_requires_grad(false);
      a.backward(model(Random({2, 5}, 8)).square().mean());
      optimizer.step();
    });
    EXPECT_THAT(testing::internal::GetCapturedStderr(), Not(HasSubstr("has a gradient")))
        << strategy;
  }
}

struct HalfUsedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * used; }
  at::Tensor unused = register_parameter("unused", at::ones({4}));
  at::Tensor used = register_parameter("used", at::ones({4}));
};
TORCH_MODULE(HalfUsed);

// Rank 0 has all elements of the weight that no loss reaches, rank 1 those of the other weight.
TEST(Sharding, StepOfARankWhosePartIsUnused_IsNotWarnedOf) {
  for (const char* const strategy : {"zero1", "zero2", "zero3"}) {
    for (const bool backward : {true, false}) {
      const auto store = c10::make_intrusive<c10d::HashStore>();
      testing::internal::CaptureStderr();
      RunGlooRanks(2, [&](Comm& comm) {
        Accelerator a(CoreOn(comm, Sharded(strategy), store));
        HalfUsed net;
        FusedSGD sgd(net->parameters(), {.lr = 0.1});
        auto [model, optimizer] = a.prepare(net, sgd);
        if (backward) a.backward(model(at::ones({4})).mean());
        optimizer.step();
      });
      const std::string text = testing::internal::GetCapturedStderr();
      EXPECT_EQ(text.find("no parameter of this optimizer has a gradient where this process has a "
                          "part of it") == std::string::npos,
                backward)
          << strategy << ": " << text;
    }
  }
}

// A part of a model is frozen below the trained part. The program may write parameters that an
// optimizer has.
TEST(Sharding, FrozenPartOfAModel_IsGatheredOnceUntilSomethingWritesItUnlessAnOptimizerHasIt) {
  for (const char* strategy : {"zero1", "zero2"}) {
    for (const bool held : {false, true}) {
      for (const bool torchs : {false, true}) {
        SCOPED_TRACE(testing::Message() << strategy << held << torchs);
        std::vector<at::Tensor> runs[2];
        for (const int ranks : {1, 2}) {
          std::vector<at::Tensor>& seen = runs[ranks - 1];
          const std::string dir = TestDir(c10::str("frozen", strategy, held, torchs, ranks));
          const auto store = c10::make_intrusive<c10d::HashStore>();
          RunGlooRanks(ranks, [&](Comm& gloo) {
            CountingGathers comm(gloo);
            Accelerator a(
                CoreOn(comm, ranks == 1 ? AcceleratorOptions() : Sharded(strategy), store));
            torch::nn::Sequential net = MakeNet();
            const at::Tensor frozen = net->parameters()[0];
            std::vector<at::Tensor> parameters;
            for (at::Tensor& parameter : net->parameters()) {
              parameter.set_requires_grad(parameter.size(0) == 3);  // the last layer
              if (held || parameter.requires_grad()) parameters.push_back(parameter);
            }
            FusedAdamW fused(parameters, {.lr = 0.1, .eps = 1e-2});
            torch::optim::AdamW other(parameters, torch::optim::AdamWOptions(0.1).eps(1e-2));
            auto model = a.prepare(net);
            AcceleratedOptimizer optimizer = torchs ? a.prepare(other) : a.prepare(fused);
            const auto gathers = [&](const std::function<void()>& body) {
              const int before = comm.gathers;
              body();
              return comm.gathers - before;
            };
            const auto step = [&] {
              a.backward(model(Random({2, 5}, 8)).square().mean());
              optimizer.step();
              optimizer.zero_grad();
            };
            const auto look = [&] {
              const at::NoGradGuard no_grad;
              const at::Tensor y = model(Random({2, 5}, 7));
              if (a.is_main_process()) seen.push_back(y.clone());
            };
            const int all = ranks == 1 ? 0 : 3;  // units
            const int trained = held ? all : all / 3;
            EXPECT_EQ(gathers(step), all);
            EXPECT_EQ(gathers(step), trained);
            EXPECT_EQ(gathers(look), trained);
            EXPECT_EQ(gathers(look), 0);
            EXPECT_EQ(gathers(step), 0);
            EXPECT_EQ(gathers(step), trained);
            const at::NoGradGuard no_grad;
            a.summon_full_params(model, [&] { at::Tensor(frozen).mul_(1.5); });
            EXPECT_EQ(gathers(look), all);
            ASSERT_TRUE(a.save_state(dir).ok());
            Ema ema(a, model, {.decay = 0.5});
            a.summon_full_params(model, [&] { at::Tensor(frozen).mul_(0.5); });
            {
              const at::AutoGradMode grad_mode(true);
              EXPECT_EQ(gathers(step), all);
            }
            ema.update();
            {
              const auto averaged = ema.apply();
              EXPECT_EQ(gathers(look), all);
            }
            EXPECT_EQ(gathers(look), all);
            ASSERT_TRUE(a.load_state(dir).ok());
            EXPECT_EQ(gathers(look), all);
            // By an operator on the optimizer's tensors.
            if (!held) return;
            at::Tensor(optimizer.handle().parameters()[0]).mul_(2);
            EXPECT_EQ(gathers(look), all);
          });
        }
        ASSERT_EQ(runs[0].size(), runs[1].size());
        for (size_t i = 0; i < runs[0].size(); ++i) {
          EXPECT_TRUE(at::allclose(runs[1][i], runs[0][i], 1e-4, 1e-5)) << i;
        }
      }
    }
  }
}

// A program may bypass the versions of tensors, as LibTorch's own optimizers do, even for another
// optimizer than the one that steps.
TEST(Sharding, DataThatIsWrittenBehindAStep_IsWhatTheNextPassUses) {
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    for (const bool of_other : {false, true}) {
      SCOPED_TRACE(testing::Message() << strategy << of_other);
      std::vector<at::Tensor> runs[2];
      for (const int ranks : {1, 2}) {
        RunAccelerators(
            ranks, ranks == 1 ? AcceleratorOptions() : Sharded(strategy), [&](Accelerator& a) {
              torch::nn::Sequential net = MakeNet();
              std::vector<at::Tensor> frozen, trained;
              for (at::Tensor& parameter : net->parameters()) {
                parameter.set_requires_grad(parameter.size(0) == 3);
                (parameter.requires_grad() || !of_other ? trained : frozen).push_back(parameter);
              }
              if (!of_other) frozen = trained;
              FusedAdamW adam(trained, {.lr = 0.01, .eps = 1e-2});
              auto [model, optimizer] = a.prepare(net, adam);
              FusedAdamW other(frozen, {.lr = 0.01});
              std::optional<AcceleratedOptimizer> second;
              if (of_other) second.emplace(a.prepare(other));
              for (int i = 0; i < 3; ++i) {
                a.backward(model(Random({4, 5}, 1)).square().mean());
                optimizer.step();
                optimizer.zero_grad();
                const at::NoGradGuard no_grad;
                AcceleratedOptimizer& writes = of_other ? *second : optimizer;
                for (const at::Tensor& p : writes.handle().parameters()) p.data().mul_(0.5);
                const at::Tensor y = model(Random({4, 5}, 1));
                if (a.is_main_process()) runs[ranks - 1].push_back(y.clone());
              }
            });
      }
      ASSERT_EQ(runs[0].size(), runs[1].size());
      for (size_t i = 0; i < runs[0].size(); ++i) {
        EXPECT_TRUE(at::allclose(runs[1][i], runs[0][i], 1e-4, 1e-5)) << i;
      }
    }
  }
}

TEST(Sharding, CheckpointOfOneStrategyAndSize_ContinuesUnderAnother) {
  constexpr int kSteps = 10;  // on each
  const std::string dir = TestDir("strategies");
  const struct {
    const char* strategy;
    int ranks;
  } runs[] = {{"zero3", 2}, {"zero1", 3}, {"hybrid", 4}, {"no_shard", 1}, {"zero2", 4}};
  int step = 0;
  for (const auto& run : runs) {
    SCOPED_TRACE(run.strategy);
    const Weights want = OneProcess(step + kSteps);
    RunAccelerators(run.ranks, Sharded(run.strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
      auto [model, optimizer] = a.prepare(net, sgd);
      if (step > 0) {
        const absl::Status loaded = a.load_state(dir + std::to_string(step));
        ASSERT_TRUE(loaded.ok()) << loaded;
        EXPECT_EQ(optimizer.steps(), step);
      }
      Train(a, model, optimizer, step, step + kSteps);
      const absl::Status saved = a.save_state(dir + std::to_string(step + kSteps));
      ASSERT_TRUE(saved.ok()) << saved;
      const Weights got = a.get_state_dict(model);
      if (a.is_main_process()) {
        EXPECT_LE(Distance(got, want), 1e-6);
      }
    });
    step += kSteps;
  }
}

// The tensors in a file of a checkpoint, including its parts.
Weights TensorsIn(const std::string& dir, const std::string& file) {
  Weights all;
  const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  std::vector<std::string> names = PartsOf(*manifest, file).value();
  if (manifest->Find(file) != nullptr) names.push_back(file);
  for (const std::string& name : names) all.merge(LoadTensors(dir + "/" + name));
  return all;
}

TEST(Sharding, Checkpoint_IsWrittenByAllRanksAndIsAModelInShards) {
  for (const char* strategy : {"zero1", "zero3"}) {
    const std::string dir = TestDir(std::string("divided_") + strategy);
    Weights want;
    RunAccelerators(3, Sharded(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters(), {.lr = 1e-3});
      auto [model, optimizer] = a.prepare(net, adam);
      Train(a, model, optimizer, 0, 2);
      ASSERT_TRUE(a.save_state(dir).ok());
      const Weights all = a.get_state_dict(model);
      if (a.is_main_process()) want = all;
    });
    const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
    ASSERT_TRUE(manifest.ok());
    const auto rank_of = [&](const std::string& name) {
      const ManifestFile* const file = manifest->Find(name);
      return file == nullptr ? -1 : file->rank;
    };
    EXPECT_EQ(rank_of("model.safetensors"), -1);
    EXPECT_EQ(rank_of("model.safetensors.index.json"), 0);
    for (const std::string file : {"model", "optimizer"}) {
      EXPECT_EQ(rank_of(file + "-00001-of-00003.safetensors"), 0);
      EXPECT_EQ(rank_of(file + "-00002-of-00003.safetensors"), 1);
      EXPECT_EQ(rank_of(file + "-00003-of-00003.safetensors"), 2);
    }
    // Two states and a count for each parameter, each only once.
    EXPECT_EQ(TensorsIn(dir, "optimizer.safetensors").size(), 3 * want.size());
    EXPECT_EQ(LoadTensors(dir + "/optimizer.safetensors").size(), 0u);
    torch::nn::Sequential whole = MakeNet();
    const auto loaded = load_model(whole, dir);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    for (const auto& item : whole->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value(), want.at(item.key()))) << item.key();
    }
  }
}

TEST(Sharding, DamagedOrUnfittingCheckpoint_LeavesTheModelAsItWas) {
  const std::string dir = TestDir("unfitting");
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    auto model = a.prepare(net);
    ASSERT_TRUE(a.save_state(dir).ok());
  });
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    torch::nn::Sequential net(torch::nn::Linear(5, 9), torch::nn::Tanh(), torch::nn::Linear(9, 8),
                              torch::nn::Tanh(), torch::nn::Linear(9, 3), torch::nn::Linear(3, 3));
    auto model = a.prepare(net);
    const Weights before = a.get_state_dict(model);
    const absl::Status loaded = a.load_state(dir);
    EXPECT_THAT(std::string(loaded.message()),
                AllOf(HasSubstr("model.safetensors"), HasSubstr("missing: 5.weight, 5.bias"),
                      HasSubstr("2.weight ([9, 9] Float in the file, [8, 9] Float here)")));
    for (const auto& [name, tensor] : a.get_state_dict(model)) {
      EXPECT_TRUE(at::equal(tensor, before.at(name))) << name;
    }
  });
}

TEST(Sharding, Hooks_GetWholeModels) {
  const std::string dir = TestDir("hooks");
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    Train(a, model, optimizer, 0, 2);
    const Weights want = a.get_state_dict(model);
    a.register_save_state_pre_hook([&](std::vector<NamedTensors>& weights, StateWriter&) {
      EXPECT_EQ(weights[0].size(), a.is_main_process() ? 6u : 0u);
    });
    int loads = 0;
    a.register_load_state_pre_hook([&](std::vector<NamedTensors>& weights, const StateReader&) {
      EXPECT_EQ(weights[0].size(), 6u);
      ++loads;
    });
    ASSERT_TRUE(a.save_state(dir).ok());
    Train(a, model, optimizer, 2, 3);
    const absl::Status loaded = a.load_state(dir);
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ(loads, 1);
    for (const auto& [name, tensor] : a.get_state_dict(model)) {
      EXPECT_TRUE(at::equal(tensor, want.at(name))) << name;
    }
  });
  EXPECT_TRUE(ReadManifest(dir)->Find("model.safetensors") != nullptr);
}

TEST(Sharding, HooksOnOneRank_AndBuffersOfSeveralNames_AreSavedWhole) {
  struct NetImpl : torch::nn::Module {
    NetImpl() : first(MakeNet()), second(MakeNet()) {
      register_module("first", first);
      register_module("second", second);
      first->register_buffer("rope", at::arange(4, at::kFloat));
      second->register_buffer("rope", first->named_buffers()["rope"]);
    }
    at::Tensor forward(const at::Tensor& x) { return first->forward(x) + second->forward(x); }
    torch::nn::Sequential first, second;
  };
  const std::string dir = TestDir("one_hook");
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    auto net = std::make_shared<NetImpl>();
    FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    Train(a, model, optimizer, 0, 2);
    const Weights want = a.get_state_dict(model);
    ASSERT_TRUE(a.save_state(dir + "-parts").ok());
    if (a.is_main_process()) {
      a.register_save_state_pre_hook([](std::vector<NamedTensors>&, StateWriter&) {});
      a.register_load_state_pre_hook([](std::vector<NamedTensors>&, const StateReader&) {});
    }
    ASSERT_TRUE(a.save_state(dir).ok());
    for (const std::string& from : {dir, dir + "-parts"}) {
      Train(a, model, optimizer, 2, 3);
      const absl::Status loaded = a.load_state(from);
      ASSERT_TRUE(loaded.ok()) << loaded;
      for (const auto& [name, tensor] : a.get_state_dict(model)) {
        EXPECT_TRUE(at::equal(tensor, want.at(name))) << name;
      }
    }
  });
  // The index lists what its files hold.
  auto whole = std::make_shared<NetImpl>();
  const auto loaded = load_model(whole, dir + "-parts");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
}

TEST(Sharding, AdamStateOfAnEmptyShard_ComesFromTheOthers) {
  const std::string dir = TestDir("adam");
  Weights want;
  for (const char* strategy : {"no_shard", "zero3"}) {
    RunAccelerators(3, Sharded(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedAdamW adam(net->parameters(), {.lr = 1e-3});
      auto [model, optimizer] = a.prepare(net, adam);
      if (std::string(strategy) == "no_shard") {
        Train(a, model, optimizer, 0, 2);
        ASSERT_TRUE(a.save_state(dir).ok());
      } else {
        ASSERT_TRUE(a.load_state(dir).ok());
        // And back: a loaded state is saved unchanged.
        ASSERT_TRUE(a.save_state(dir + "-again").ok());
      }
      a.wait_for_everyone();
      if (a.is_main_process() && std::string(strategy) == "zero3") {
        const Weights first = TensorsIn(dir, "optimizer.safetensors");
        const Weights second = TensorsIn(dir + "-again", "optimizer.safetensors");
        ASSERT_EQ(first.size(), second.size());
        for (const auto& [name, tensor] : first) {
          EXPECT_TRUE(at::equal(tensor, second.at(name))) << name;
        }
      }
      Train(a, model, optimizer, 2, 4);
      const Weights got = a.get_state_dict(model);
      if (!a.is_main_process()) return;
      if (want.empty()) {
        for (const auto& [name, tensor] : got) want[name] = tensor.clone();
      }
      EXPECT_LE(Distance(got, want), 1e-4);
    });
  }
}

TEST(Sharding, SaveModel_WritesTheWholeModel) {
  const std::string dir = TestDir("model");
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    auto model = a.prepare(net);
    const absl::Status saved = a.save_model(model, dir);
    ASSERT_TRUE(saved.ok()) << saved;
    a.summon_full_params(model, [&] {
      at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(net->parameters()[0], MakeNet()->parameters()[0]));
    });
  });
  const Weights saved = LoadTensors(dir + "/model.safetensors");
  for (const auto& item : MakeNet()->named_parameters()) {
    EXPECT_TRUE(at::equal(saved.at(item.key()), item.value())) << item.key();
  }
}

TEST(Sharding, DeferredModel_TrainsAsAnOrdinaryOne) {
  const Weights want = OneProcess(4);
  for (const char* strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
    RunAccelerators(2, Sharded(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = deferred_init([] { return MakeNet(); });
      FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
      auto [model, optimizer] = a.prepare(net, sgd);
      Train(a, model, optimizer, 0, 4);
      const Weights got = a.get_state_dict(model);
      if (a.is_main_process()) {
        EXPECT_LE(Distance(got, want), 1e-6) << strategy;
      }
    });
  }
}

TEST(Sharding, SaveModel_WritesTheFilesOfAnUnshardedModel) {
  std::map<std::string, std::string> want;
  for (const char* strategy : {"no_shard", "zero3"}) {
    const std::string dir = TestDir(std::string("shards_") + strategy);
    RunAccelerators(2, Sharded(strategy), [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      auto model = a.prepare(net);
      const absl::Status saved = a.save_model(model, dir, "0.1KB");
      ASSERT_TRUE(saved.ok()) << saved;
    });
    std::map<std::string, std::string> files;
    const auto names = ListDirectory(dir);
    ASSERT_TRUE(names.ok()) << names.status();
    for (const std::string& name : *names) files[name] = *ReadFile(dir + "/" + name);
    EXPECT_GT(files.size(), 2u);
    if (want.empty()) want = files;
    EXPECT_EQ(files, want);
  }
}

TEST(Sharding, SaveModel_ThatCannotWrite_FailsOnEveryProcess) {
  RunAccelerators(2, Sharded("zero3"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    auto model = a.prepare(net);
    EXPECT_FALSE(a.save_model(model, "/proc/nowhere").ok());
    // Training continues.
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    EXPECT_TRUE(a.save_model(model, TestDir("after")).ok());
  });
}

TEST(Sharding, ParametersInBfloat16_TrainAsUnderAutocast) {
  Weights want;
  for (const char* strategy : {"no_shard", "zero1", "zero3"}) {
    AcceleratorOptions options = Sharded(strategy);
    options.mixed_precision = "bf16";
    if (std::string(strategy) != "no_shard") options.sharding->parameter_dtype = at::kBFloat16;
    RunAccelerators(2, options, [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      EXPECT_EQ(model(Random({1, 5}, 1)).scalar_type(), at::kFloat);
      Train(a, model, optimizer, 0, 5);
      const Weights got = a.get_state_dict(model);
      if (!a.is_main_process()) return;
      if (want.empty()) {
        for (const auto& [name, tensor] : got) want[name] = tensor.clone();
      }
      for (const auto& [name, tensor] : got) EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
      // Gradients of weights are rounded to bfloat16 once more.
      EXPECT_LE(Distance(got, want), 1e-2) << strategy;
    });
  }
  AcceleratorOptions options = Sharded("zero3");
  options.sharding->parameter_dtype = at::kBFloat16;
  EXPECT_THAT(ErrorsOf(2, options,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                       }),
              Each(AllOf(HasSubstr("parameter_dtype"), HasSubstr("mixed_precision is \"no\""))));
}

TEST(Sharding, OverflowOnOneRank_SkipsTheStepOnAll) {
  AcceleratorOptions options = Sharded("zero3");
  options.mixed_precision = "fp16";
  options.grad_scaler.init_scale = 8;
  RunAccelerators(2, options, [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedSGD sgd(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] = a.prepare(net, sgd);
    // Only in the shard of one rank: the bias of the last layer.
    for (const bool overflow : {true, false}) {
      const double far = overflow && a.process_index() == 1 ? 1e30 : 1;
      a.backward((model(Random({2, 5}, 1)).select(1, 2) * far).mean());
      optimizer.step();
      EXPECT_EQ(optimizer.step_was_skipped(), overflow);
      optimizer.zero_grad();
    }
  });
}

// Parts of the parameters, one clipping after the other: each gradient is divided by the loss scale
// once.
TEST(Sharding, D32_ClippingPartsOfTheParameters_UnscalesOnce) {
  const auto train = [](int ranks, AcceleratorOptions options, const char* precision) {
    options.mixed_precision = precision;
    options.grad_scaler.init_scale = 64;
    Weights weights;
    RunAccelerators(ranks, options, [&](Accelerator& a) {
      torch::nn::Sequential net = MakeNet();
      FusedSGD sgd(net->parameters(), {.lr = 0.1});
      auto [model, optimizer] = a.prepare(net, sgd);
      const std::vector<at::Tensor> all = net->parameters();
      const std::vector<at::Tensor> head = {all[0], all[1]}, rest(all.begin() + 2, all.end());
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = Random({kSamples, 5}, 100 + step);
        auto scope = a.accumulate();
        a.backward(model(x.chunk(a.num_processes())[a.process_index()]).square().mean());
        // A threshold that none reaches: only unscaling could change what they are.
        for (const auto& part : {head, rest, head}) a.clip_grad_norm_(part, 1e4);
        optimizer.step();
        EXPECT_FALSE(optimizer.step_was_skipped());
        optimizer.zero_grad();
      }
      Weights got = WeightsOf(a, model);
      if (a.is_main_process()) weights = std::move(got);
    });
    return weights;
  };
  const Weights want = train(1, {}, "no");
  for (const char* const strategy : {"no_shard", "zero1", "zero2", "zero3"}) {
    EXPECT_LE(Distance(train(2, Sharded(strategy), "fp16"), want), 1e-2) << strategy;
  }
}

TEST(Sharding, WhatCannotBeSharded_IsRefusedOnEveryRank) {
  EXPECT_THAT(ErrorsOf(2, Sharded("zero3"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         torch::optim::LBFGS lbfgs(net->parameters());
                         auto prepared = a.prepare(net, lbfgs);
                       }),
              Each(HasSubstr("cannot update parts of parameters")));
  EXPECT_THAT(ErrorsOf(2, Sharded("zero3"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                         a.backward(model(Random({2, 5}, 1)).mean());
                       }),
              Each(HasSubstr("pass the optimizer to prepare()")));
  EXPECT_THAT(ErrorsOf(2, Sharded("zero3"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                         auto join = a.join_uneven_inputs();
                       }),
              Each(HasSubstr("join_uneven_inputs() with a sharded model")));
  EXPECT_THAT(ErrorsOf(2, Sharded("zero2"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         const std::vector<at::Tensor> all = net->parameters();
                         FusedSGD sgd({all[0]}, {.lr = 0.1});
                         auto [model, optimizer] = a.prepare(net, sgd);
                         sgd.add_param_group({.params = {all[1]}, .options = {}});
                         a.backward(model(Random({2, 5}, 1)).mean());
                         optimizer.step();
                       }),
              Each(AllOf(HasSubstr("'0.bias'"), HasSubstr("before prepare()"))));
  EXPECT_THAT(ErrorsOf(2, Sharded("zero3"),
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                         LocalSGD local(a, model, 2);
                       }),
              Each(HasSubstr("LocalSGD with a sharded model")));
  AcceleratorOptions hooked = Sharded("zero1");
  hooked.data_parallel.comm_hook = CommHook::kFp16;
  EXPECT_THAT(ErrorsOf(2, hooked,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                       }),
              Each(HasSubstr("options.sharding reduces gradients by itself")));
  AcceleratorOptions odd = Sharded("zero3");
  odd.sharding->group_size = 2;
  EXPECT_THAT(ErrorsOf(3, odd,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                       }),
              Each(AllOf(HasSubstr("group_size is 2, and 3 processes cannot be divided"),
                         HasSubstr("set a number that divides 3"))));
  AcceleratorOptions alone = Sharded("zero3");
  alone.sharding->group_size = 1;
  EXPECT_THAT(ErrorsOf(2, alone,
                       [](Accelerator& a) {
                         torch::nn::Sequential net = MakeNet();
                         auto model = a.prepare(net);
                       }),
              Each(AllOf(HasSubstr("group_size is 1: each process would hold a whole copy"),
                         HasSubstr("use zero3"))));
}

TEST(Sharding, Environment_CountsWhereTheProgramSaysNothing) {
  RunGlooRanks(2, [](Comm& comm) {
    for (const bool explicitly : {false, true}) {
      AcceleratorOptions options;
      if (explicitly) options.sharding.emplace();
      JoinedProcess process;
      process.environment.world_size.value = process.environment.local_world_size.value = 2;
      process.environment.sharding = {"hybrid", "MUSTER_SHARDING"};
      process.environment.sharding_units = {{"Linear"}, "MUSTER_SHARDING_UNITS"};
      process.environment.sharding_no_split = {{"0"}, "MUSTER_SHARDING_NO_SPLIT"};
      process.environment.sharding_ignored_modules = {"0", "MUSTER_SHARDING_IGNORED_MODULES"};
      process.environment.sharding_ignored_parameters = {".*\\.bias",
                                                         "MUSTER_SHARDING_IGNORED_PARAMETERS"};
      process.comm = std::make_unique<BorrowedComm>(comm);
      Accelerator a(std::make_shared<internal::Core>(options, std::move(process)));
      EXPECT_EQ(a.core().process().sharding().strategy,
                explicitly ? ShardingStrategy::kNone : ShardingStrategy::kFull);
      torch::nn::Sequential net = MakeNet();
      auto model = a.prepare(net);
      const ShardedModel* const sharded = model.slot()->sharded();
      ASSERT_EQ(sharded != nullptr, !explicitly);
      if (explicitly) continue;
      EXPECT_EQ(a.core().process().sharding().no_split, std::vector<std::string>{"0"});
      std::vector<std::string> whole;
      for (const at::Tensor& shard : sharded->shards()) {
        if (sharded->IsWhole(shard)) whole.push_back(*sharded->NameOf(shard));
      }
      EXPECT_THAT(whole, testing::ElementsAre("0.weight", "0.bias", "2.bias", "4.bias"));
    }
  });
}

// Set together with FSDP's settings, over which Muster's own variables win.
TEST(Sharding, EverySettingOfTheEnvironment_IsAnOption) {
  for (const bool fsdp : {false, true}) {
    JoinedProcess process;
    Environment& environment = process.environment;
    environment.mixed_precision.value = "bf16";
    if (fsdp) {
      environment.engine_variables = {{"ACCELERATE_USE_FSDP", "true"},
                                      {"FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"},
                                      {"FSDP_MIN_NUM_PARAMS", "7"}};
    } else {
      environment.sharding = {"zero3", "MUSTER_SHARDING"};
    }
    environment.sharding_unit_names = {{"0", "2"}, "MUSTER_SHARDING_UNIT_NAMES"};
    environment.sharding_group_size = {4, "MUSTER_SHARDING_GROUP_SIZE"};
    environment.sharding_reshard_group_size = {2, "MUSTER_SHARDING_RESHARD_GROUP_SIZE"};
    environment.sharding_parameter_dtype = {"bf16", "MUSTER_SHARDING_PARAMETER_DTYPE"};
    environment.sharding_reduce_dtype = {fsdp ? "fp32" : "fp16", "MUSTER_SHARDING_REDUCE_DTYPE"};
    environment.sharding_output_dtype = {"fp32", "MUSTER_SHARDING_OUTPUT_DTYPE"};
    if (!fsdp) environment.sharding_buffer_dtype = {"fp16", "MUSTER_SHARDING_BUFFER_DTYPE"};
    process.comm = std::make_unique<LocalComm>();
    Accelerator a(std::make_shared<internal::Core>(AcceleratorOptions(), std::move(process)));
    const ShardingOptions& sharding = a.core().process().sharding();
    EXPECT_EQ(sharding.strategy, ShardingStrategy::kFull);
    EXPECT_THAT(sharding.unit_names, testing::ElementsAre("0", "2"));
    EXPECT_THAT(sharding.unit_types, testing::IsEmpty());
    EXPECT_EQ(sharding.min_unit_parameters, 0);
    EXPECT_EQ(sharding.group_size, 4);
    EXPECT_EQ(sharding.reshard_group_size, 2);
    EXPECT_EQ(sharding.parameter_dtype, at::kBFloat16);
    EXPECT_EQ(sharding.reduce_dtype, fsdp ? at::kFloat : at::kHalf);
    EXPECT_EQ(sharding.output_dtype, at::kFloat);
    EXPECT_EQ(sharding.buffer_dtype, fsdp ? at::kBFloat16 : at::kHalf);
  }
  JoinedProcess process;
  process.environment.sharding = {"zero3", "MUSTER_SHARDING"};
  process.environment.sharding_min_unit_parameters = {9, "MUSTER_SHARDING_MIN_UNIT_PARAMETERS"};
  process.environment.sharding_reshard_after_forward = {false,
                                                        "MUSTER_SHARDING_RESHARD_AFTER_FORWARD"};
  process.comm = std::make_unique<LocalComm>();
  Accelerator a(std::make_shared<internal::Core>(AcceleratorOptions(), std::move(process)));
  EXPECT_EQ(a.core().process().sharding().min_unit_parameters, 9);
  EXPECT_FALSE(a.core().process().sharding().reshard_after_forward);
}

TEST(Sharding, EnvironmentSaysHowAndNothingAsks_IsRefusedByName) {
  const auto make = [](bool asks, bool program) {
    AcceleratorOptions options;
    if (program) options.sharding.emplace();
    JoinedProcess process;
    process.environment.sharding_units = {{"Linear"}, "MUSTER_SHARDING_UNITS"};
    if (asks) process.environment.sharding = {"no_shard", "MUSTER_SHARDING"};
    process.comm = std::make_unique<LocalComm>();
    Accelerator(std::make_shared<internal::Core>(options, std::move(process)));
  };
  EXPECT_THAT(
      [&] { make(false, false); },
      testing::ThrowsMessage<c10::Error>(HasSubstr(
          "MUSTER_SHARDING_UNITS refines sharding, but nothing enables it: set MUSTER_SHARDING")));
  // These settings mean that nothing is divided.
  EXPECT_NO_THROW(make(true, false));
  EXPECT_NO_THROW(make(false, true));
}

TEST(Sharding, OneProcess_DividesNothing) {
  RunAccelerators(1, Sharded("zero3"), [&](Accelerator& a) {
    torch::nn::Sequential net = MakeNet();
    FusedSGD sgd(net->parameters(), {.lr = 0.1, .momentum = 0.9});
    auto [model, optimizer] = a.prepare(net, sgd);
    Train(a, model, optimizer, 0, 2);
    EXPECT_LE(Distance(a.get_state_dict(model), OneProcess(2)), 1e-6);
  });
}

}  // namespace
}  // namespace muster
