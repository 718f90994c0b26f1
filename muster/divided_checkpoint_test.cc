// Checkpoints of unsharded models that all ranks write together: threads of this process over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "ATen/core/ivalue.h"
#include "base/file.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "muster/test_model.h"
#include "muster/test_ranks.h"
#include "muster/utils.h"
#include "muster/weights.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adam.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/folder.h"

namespace muster {
namespace {

using testing::HasSubstr;
using Weights = std::map<std::string, at::Tensor>;

// A model whose first and last layers share a weight, and which has buffers.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    in = register_module("in", torch::nn::Linear(8, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    middle = register_module("middle", torch::nn::Linear(8, 8));
    const at::NoGradGuard no_grad;
    uint64_t seed = 7;
    for (at::Tensor& parameter : parameters()) parameter.copy_(Random(parameter.sizes(), ++seed));
    head = register_parameter("head", in->weight);
  }
  static at::Tensor Random(at::IntArrayRef sizes, uint64_t seed) {
    return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat).div_(3);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(middle(norm(in(x))).tanh(), head); }

  // The parameters, without the tied weight's second name.
  std::vector<at::Tensor> distinct() const {
    std::vector<at::Tensor> all = parameters();
    all.erase(all.begin());
    return all;
  }

  torch::nn::Linear in = nullptr, middle = nullptr;
  at::Tensor head;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(TiedNet);

// The loss of all ranks together is the same for any number of them, except that BatchNorm depends
// on each rank's batch: therefore ranks get equal batches.
template <class Model, class Optimizer>
void Train(Accelerator& a, Model& model, Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    const at::Tensor x = TiedNetImpl::Random({6, 8}, 100 + step);
    a.backward(at::mse_loss(model(x), x.sin()));
    optimizer.step();
    optimizer.zero_grad();
  }
}

AcceleratorOptions Dividing(bool asynchronous = false) {
  AcceleratorOptions options;
  options.checkpoint.divide_above = 0;
  options.checkpoint.asynchronous = asynchronous;
  return options;
}

void Keep(Accelerator& a, const Weights& all, Weights* kept) {
  if (!a.is_main_process()) return;
  for (const auto& [name, tensor] : all) (*kept)[name] = tensor.clone();
}

void ExpectEqual(const Weights& got, const Weights& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
}

int WriterOf(const std::string& dir, const std::string& file) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  if (!manifest.ok()) return -1;
  const ManifestFile* const found = manifest->Find(file);
  return found == nullptr ? -1 : found->rank;
}

TEST(DividedCheckpoint, UnshardedModel_IsWrittenByAllRanks_AndContinuesOnOtherNumbersOfThem) {
  Weights want;
  RunAccelerators(1, {}, [&](Accelerator& a) {
    TiedNet net;
    FusedAdamW adam(net->distinct(), {.lr = 1e-2});
    auto [model, optimizer] = a.prepare(net, adam);
    Train(a, model, optimizer, 0, 8);
    Keep(a, a.get_state_dict(model), &want);
  });
  for (const bool asynchronous : {false, true}) {
    const std::string dir = TestDir(asynchronous ? "beside" : "at_once");
    // Sums of equal gradients of 2 and 4 ranks, divided by their number, are exact.
    int step = 0;
    Weights got;
    for (const int ranks : {2, 4, 1, 2}) {
      RunAccelerators(ranks, Dividing(asynchronous), [&](Accelerator& a) {
        TiedNet net;
        FusedAdamW adam(net->distinct(), {.lr = 1e-2});
        auto [model, optimizer] = a.prepare(net, adam);
        if (step > 0) {
          const absl::Status loaded = a.load_state(dir + std::to_string(step));
          ASSERT_TRUE(loaded.ok()) << loaded;
          EXPECT_EQ(optimizer.steps(), step);
        }
        Train(a, model, optimizer, step, step + 2);
        const absl::Status saved = a.save_state(dir + std::to_string(step + 2));
        ASSERT_TRUE(saved.ok()) << saved;
        // Training after the call does not change what is saved.
        if (asynchronous) Train(a, model, optimizer, 50, 52);
        ASSERT_TRUE(a.wait_for_checkpoint().ok());
        if (step == 6 && !asynchronous) Keep(a, a.get_state_dict(model), &got);
      });
      step += 2;
    }
    if (!asynchronous) ExpectEqual(got, want);
    const std::string two = dir + "2";
    EXPECT_EQ(WriterOf(two, "model.safetensors"), -1);
    EXPECT_EQ(WriterOf(two, "model-00001-of-00002.safetensors"), 0);
    EXPECT_EQ(WriterOf(two, "model-00002-of-00002.safetensors"), 1);
    EXPECT_EQ(WriterOf(two, "optimizer-00002-of-00002.safetensors"), 1);
    EXPECT_EQ(LoadTensors(two + "/optimizer.safetensors").size(), 0u);
    EXPECT_EQ(WriterOf(dir + "6", "model.safetensors"), 0);  // there is only one process
    // Every reader of Hugging Face's shards can read it.
    TiedNet whole;
    const auto loaded = load_model(whole, dir + "8");
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(at::equal(whole->middle->weight, want.at("middle.weight")));
    EXPECT_TRUE(at::equal(whole->norm->running_mean, want.at("norm.running_mean")));
  }
}

TEST(DividedCheckpoint, EachTensorAndState_IsInOneFile) {
  const std::string dir = TestDir("once");
  RunAccelerators(3, Dividing(), [&](Accelerator& a) {
    TiedNet net;
    torch::optim::Adam adam(net->distinct(), torch::optim::AdamOptions(1e-2));
    auto [model, optimizer] = a.prepare(net, adam);
    Train(a, model, optimizer, 0, 1);
    ASSERT_TRUE(a.save_state(dir).ok());
  });
  const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
  ASSERT_TRUE(manifest.ok());
  const TiedNet net;
  for (const auto& [file, count] : std::vector<std::pair<std::string, size_t>>{
           // Counts the tied weight once.
           {"model.safetensors", net->named_parameters().size() + net->named_buffers().size()},
           {"optimizer.safetensors", 3 * net->parameters().size()}}) {
    std::map<std::string, int> seen;
    const std::vector<std::string> parts = PartsOf(*manifest, file).value();
    for (const std::string& part : parts) {
      for (const auto& [name, tensor] : LoadTensors(dir + "/" + part)) ++seen[name];
    }
    EXPECT_EQ(seen.size(), count - (file == "model.safetensors" ? 1 : 3)) << file;
    for (const auto& [name, times] : seen) EXPECT_EQ(times, 1) << name;
  }
}

// Rank 0 has all states and plans all of them. If another rank's plan contained its part, too, that
// part would be listed by tensor in one plan and by file in the other, and a coordinator would find
// no file with the tensors.
TEST(DividedCheckpoint, StatesThatAllRanksHave_AreInThePlanOfRank0Alone) {
  const std::string dir = TestDir("planned_once");
  RunAccelerators(2, Dividing(), [&](Accelerator& a) {
    TiedNet net;
    torch::optim::Adam adam(net->distinct(), torch::optim::AdamOptions(1e-2));
    auto [model, optimizer] = a.prepare(net, adam);
    Train(a, model, optimizer, 0, 1);
    ASSERT_TRUE(a.save_state(dir).ok());
  });
  EXPECT_EQ(WriterOf(dir, "optimizer-00002-of-00002.safetensors"), 1);
  const auto header_of = [&](int rank) {
    const std::string text = *ReadFile(dir + "/" + RandomStatesFileName(rank));
    return text.substr(8, text.find('\0', 8) - 8);
  };
  EXPECT_THAT(header_of(0), HasSubstr(R"(\"optimizer-00002-of-00002.safetensors\":\"9 tensors, )"));
  EXPECT_THAT(header_of(1), HasSubstr(R"(\"optimizer-00002-of-00002.safetensors\":\"optimizer)"));
  EXPECT_THAT(header_of(1), testing::Not(HasSubstr(R"(\"files\")")));
}

TEST(DividedCheckpoint, SmallModelHooksAndRanksThatTrainApart_AreWrittenByRank0) {
  const std::string dir = TestDir("whole");
  const auto save = [&](const AcceleratorOptions& options, const std::string& name, auto before) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      TiedNet net;
      FusedAdamW adam(net->distinct(), {.lr = 1e-2});
      auto [model, optimizer] = a.prepare(net, adam);
      [[maybe_unused]] const auto held = before(a, model, optimizer);
      ASSERT_TRUE(a.save_state(dir + name).ok());
    });
    return WriterOf(dir + name, "model.safetensors");
  };
  const auto nothing = [](auto&...) { return 0; };
  EXPECT_EQ(save(Dividing(), "divided", nothing), -1);
  AcceleratorOptions usual;
  EXPECT_EQ(save(usual, "small", nothing), 0);
  // A hook on one process is enough.
  EXPECT_EQ(save(Dividing(), "hook",
                 [](Accelerator& a, auto&...) {
                   std::vector<HookHandle> hooks;
                   if (a.is_main_process()) {
                     hooks.push_back(a.register_save_state_pre_hook(
                         [](std::vector<NamedTensors>& weights, StateWriter&) {
                           EXPECT_FALSE(weights[0].empty());
                         }));
                   }
                   return hooks;
                 }),
            0);
  EXPECT_EQ(save(Dividing(), "apart",
                 [](Accelerator& a, auto& model, auto& optimizer) {
                   LocalSGD local(a, model, 2);
                   Train(a, model, optimizer, 0, 2);
                   local.step();
                   return 0;
                 }),
            0);
  AcceleratorOptions own = Dividing();
  own.allow_local_gradients = true;
  EXPECT_EQ(save(own, "own", nothing), 0);
}

// Gradients are exchanged as ever, so that nothing fails in the training.
TEST(DividedCheckpoint, RankThatHasLeftOutAStep_IsNamed_UntilALoad) {
  const std::string dir = TestDir("left_out");
  // Of a model that rank 0 writes alone, too: the training is wrong, however large the model is.
  for (const AcceleratorOptions& options : {Dividing(), AcceleratorOptions()}) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      TiedNet net;
      FusedAdamW adam(net->distinct(), {.lr = 1e-2});
      auto [model, optimizer] = a.prepare(net, adam);
      Train(a, model, optimizer, 0, 1);
      ASSERT_TRUE(a.save_state(dir).ok());
      a.backward(model(TiedNetImpl::Random({6, 8}, 1)).mean());
      if (a.is_main_process()) optimizer.step();
      optimizer.zero_grad();
      const absl::Status saved = a.save_state(dir + "_wrong");
      EXPECT_EQ(saved.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(saved.message()),
                  HasSubstr("rank 1 is at step 1 of optimizer 0 and rank 0 at step 2"));
      ASSERT_TRUE(a.load_state(dir).ok());
      Train(a, model, optimizer, 1, 2);
      const absl::Status healed = a.save_state(dir + "_healed");
      EXPECT_TRUE(healed.ok()) << healed;
    });
  }
}

TEST(DividedCheckpoint, HyperParametersThatDiffer_AreNamed) {
  const auto error = [&](const AdamWOptions& first, const AdamWOptions& other) {
    std::vector<std::string> errors(2);
    RunAccelerators(2, Dividing(), [&](Accelerator& a) {
      TiedNet net;
      FusedAdamW adam(net->distinct(), a.is_main_process() ? first : other);
      auto [model, optimizer] = a.prepare(net, adam);
      Train(a, model, optimizer, 0, 1);
      errors[a.process_index()] = std::string(a.save_state(TestDir("hyper")).message());
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  };
  EXPECT_THAT(error({.lr = 0.25}, {.lr = 0.125}),
              HasSubstr("parameter group 0 of optimizer 0 has lr 0.125 on rank 1 and 0.25 on "
                        "rank 0"));
  EXPECT_THAT(error({.betas = {0.5, 0.75}}, {.betas = {0.5, 0.25}}),
              HasSubstr("has betas [0.5,0.25] on rank 1 and [0.5,0.75] on rank 0"));
  // As machines round the same schedule.
  EXPECT_EQ(error({.lr = 0.25}, {.lr = std::nextafter(0.25, 1)}), "");
}

TEST(DividedCheckpoint, RanksThatMayDiffer_AreNotCompared_AndRank0WritesItsOwn) {
  AcceleratorOptions local = Dividing(), hooked = Dividing();
  local.allow_local_gradients = true;
  // Each rank keeps its own gradients.
  hooked.data_parallel.gradient_hook = [](c10d::ProcessGroup&, c10d::GradBucket& bucket) {
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    done->markCompleted(bucket.getBuffer());
    return done;
  };
  const std::string dir = TestDir("may_differ");
  for (const AcceleratorOptions& options : {local, hooked}) {
    RunAccelerators(2, options, [&](Accelerator& a) {
      TiedNet net;
      FusedAdamW adam(net->distinct(), {.lr = 1e-2});
      auto [model, optimizer] = a.prepare(net, adam);
      Train(a, model, optimizer, 0, 1);
      a.backward(model(TiedNetImpl::Random({6, 8}, 1)).mean());
      if (a.is_main_process()) optimizer.step();
      optimizer.zero_grad();
      const absl::Status saved = a.save_state(dir);
      ASSERT_TRUE(saved.ok()) << saved;
    });
    EXPECT_EQ(WriterOf(dir, "model.safetensors"), 0);
  }
}

// Counts the exchanges of a rank.
class CountingComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    ++exchanges;
    if (bytes.find("save_state()") != std::string::npos) ++meetings;
    return BorrowedComm::AllGatherBytes(bytes);
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    ++exchanges;
    return BorrowedComm::BroadcastBytes(bytes, root);
  }
  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    ++exchanges;
    BorrowedComm::AllReduce(tensor, op);
  }

  int64_t exchanges = 0;
  int64_t meetings = 0;  // meetings of a sharded model before a save
};

// The plans and exchanges of a save, and what it could take from the previous one.
struct SaveCost {
  int64_t saves_planned = 0, saves_reused = 0, files_planned = 0, exchanges = 0;
};

SaveCost CostOfSave(Accelerator& a, CountingComm& comm, const std::string& dir) {
  const auto before = a.core().checkpoints().plan_counts();
  const int64_t exchanged = comm.exchanges;
  const absl::Status saved = a.save_state(dir);
  EXPECT_TRUE(saved.ok()) << saved;
  const int64_t exchanges = comm.exchanges - exchanged;
  const auto after = a.core().checkpoints().plan_counts();
  EXPECT_TRUE(VerifyCheckpoint(dir, VerifyLevel::kContents).ok());
  comm.Barrier();
  return {.saves_planned = after.saves_planned - before.saves_planned,
          .saves_reused = after.saves_reused - before.saves_reused,
          .files_planned = after.files_planned - before.files_planned,
          .exchanges = exchanges};
}

TEST(DividedCheckpoint, SecondSave_PlansNothing_UntilTheLayoutChangesOnAnyRank) {
  const std::string root = TestDir("plans");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(2, [&](Comm& gloo) {
    CountingComm comm(gloo);
    Accelerator a(CoreOn(comm, Dividing(), store));
    TiedNet net;
    FusedAdamW adam(net->distinct(), {.lr = 1e-2});
    auto [model, optimizer] = a.prepare(net, adam);
    int saves = 0;
    const auto save = [&] { return CostOfSave(a, comm, root + std::to_string(saves++)); };
    const auto planned = [&](const std::string& why, bool plan, bool files) {
      const SaveCost cost = save();
      EXPECT_EQ(cost.saves_planned, plan ? 1 : 0) << why;
      EXPECT_EQ(cost.saves_reused, plan ? 0 : 1) << why;
      EXPECT_EQ(cost.files_planned > 0, files) << why;
    };
    planned("the first", true, true);
    planned("the same again", false, false);
    Train(a, model, optimizer, 0, 1);
    planned("states are there after a step, in the files as they are divided", false, true);
    Train(a, model, optimizer, 1, 2);
    planned("other values alone", false, false);
    std::optional<HookHandle> hook;
    if (a.process_index() == 1) {
      hook = a.register_save_state_pre_hook([](std::vector<NamedTensors>&, StateWriter&) {});
    }
    // Then rank 0 writes everything.
    EXPECT_EQ(save().saves_planned, 1) << "a hook of the other rank";
    if (hook.has_value()) hook->remove();
    EXPECT_EQ(save().saves_planned, 1) << "without it";
    planned("as before", false, false);
    torch::nn::Linear more(3, 3);
    auto second = a.prepare(more);
    EXPECT_EQ(save().saves_planned, 1) << "another model";
    planned("the same two", false, false);
    // The values read are those that were there.
    TiedNet whole;
    ASSERT_TRUE(load_model(whole, root + std::to_string(saves - 1)).ok());
    for (const auto& item : whole->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value(), net->named_parameters()[item.key()])) << item.key();
    }
  });
}

TEST(DividedCheckpoint, SecondSaveOfAShardedModel_ExchangesLess) {
  const std::string root = TestDir("sharded_plans");
  AcceleratorOptions options;
  options.sharding = ParseSharding("zero3", 2);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(2, [&](Comm& gloo) {
    CountingComm comm(gloo);
    Accelerator a(CoreOn(comm, options, store));
    TiedNet net;
    FusedAdamW adam(net->distinct(), {.lr = 1e-2});
    auto [model, optimizer] = a.prepare(net, adam);
    const SaveCost without_state = CostOfSave(a, comm, root + "0");
    Train(a, model, optimizer, 0, 1);
    const SaveCost first = CostOfSave(a, comm, root + "1");
    Train(a, model, optimizer, 1, 2);
    const SaveCost second = CostOfSave(a, comm, root + "2");
    EXPECT_EQ(without_state.saves_planned, 1);
    EXPECT_EQ(first.saves_planned, 0);
    EXPECT_GT(first.files_planned, 0);
    EXPECT_EQ(second.saves_planned, 0);
    EXPECT_EQ(second.files_planned, 0);
    // The slots of the states are known.
    EXPECT_LT(second.exchanges, first.exchanges);
    // The model's comparison is part of the exchange about whether all ranks can save.
    EXPECT_EQ(comm.meetings, 0);
    const Weights all = a.get_state_dict(model);
    if (a.is_main_process()) {
      TiedNet whole;
      ASSERT_TRUE(load_model(whole, root + "2").ok());
      EXPECT_TRUE(at::equal(whole->middle->weight, all.at("middle.weight")));
      const absl::StatusOr<Manifest> manifest = ReadManifest(root + "2");
      std::map<std::string, int> states;
      const std::vector<std::string> parts = PartsOf(*manifest, "optimizer.safetensors").value();
      for (const std::string& part : parts) {
        for (const auto& [name, tensor] : LoadTensors(root + "2/" + part)) ++states[name];
      }
      EXPECT_EQ(states.size(), 3 * net->distinct().size());
    }
    comm.Barrier();
  });
}

TEST(DividedCheckpoint, NegativeBytes_AreRefused) {
  AcceleratorOptions options;
  options.checkpoint.divide_above = -1;
  RunAccelerators(1, options, [&](Accelerator& a) {
    TiedNet net;
    auto model = a.prepare(net);
    EXPECT_THAT(std::string(a.save_state(TestDir("negative")).message()),
                HasSubstr("options.checkpoint.divide_above is -1"));
  });
}

}  // namespace
}  // namespace muster
