#include "worker/train/optimizer.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "ATen/Context.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/zeros.h"
#include "absl/status/statusor.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/scratch_file.h"
#include "worker/collective/test_error.h"
#include "worker/train/torch_optimizer.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
namespace optim = torch::optim;

std::vector<at::Tensor> MakeParams() {
  at::manual_seed(1);
  std::vector<at::Tensor> params = {at::randn({5, 3}), at::randn({7}), at::randn({2, 2, 2}),
                                    at::randn({3}, at::kDouble)};
  for (at::Tensor& p : params) p.requires_grad_(true);
  return params;
}

// Sets the same gradients for every list. Parameter 1 has none in every third step, 2 none before
// step 4.
void SetGrads(std::vector<at::Tensor>& params, int step) {
  at::manual_seed(100 + step);
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor grad = at::randn(params[i].sizes(), params[i].options().requires_grad(false));
    const bool none = (i == 1 && step % 3 == 1) || (i == 2 && step < 4);
    params[i].mutable_grad() = none ? at::Tensor() : grad;
  }
}

void ExpectNear(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LT((a[i] - b[i]).abs().max().item<double>(), 2e-6) << "parameter " << i;
  }
}

// Makes twelve steps of both, with a change of the rate in between; then again from saved states,
// crosswise.
template <typename MakeOurs, typename MakeTheirs>
void ExpectEqualRuns(MakeOurs make_ours, MakeTheirs make_theirs) {
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams(), c = MakeParams();
  auto ours = make_ours(a);
  auto theirs = make_theirs(b);
  auto theirs_fused = make_theirs(c);
  auto handle = WrapTorchOptimizer(*theirs, {.fused = false});
  auto fused_handle = WrapTorchOptimizer(*theirs_fused);
  const auto step_all = [&](int from, int to) {
    for (int step = from; step < to; ++step) {
      SetGrads(a, step);
      SetGrads(b, step);
      SetGrads(c, step);
      ours->Step();
      handle->Step();
      fused_handle->Step();
    }
  };
  step_all(0, 6);
  for (OptimizerHandle* h :
       {static_cast<OptimizerHandle*>(ours.get()), handle.get(), fused_handle.get()}) {
    h->set_lr(0, h->lr(0) / 2);
  }
  step_all(6, 12);
  ExpectNear(a, b);
  ExpectNear(c, b);

  const OptimizerState of_ours = ours->SaveState();
  const OptimizerState of_theirs = handle->SaveState();
  ASSERT_EQ(of_ours.tensors.size(), of_theirs.tensors.size());
  for (const auto& [name, tensor] : of_ours.tensors) {
    ASSERT_TRUE(of_theirs.tensors.count(name)) << name;
    EXPECT_LT((tensor - of_theirs.tensors.at(name)).abs().max().template item<double>(), 2e-6)
        << name;
  }
  EXPECT_EQ(of_ours.groups, of_theirs.groups);
  EXPECT_EQ(ours->SaveGroups(), of_ours.groups);
  EXPECT_EQ(handle->SaveGroups(), of_theirs.groups);

  // Fresh optimizers over the same parameters, ours from their state and theirs from ours.
  ours = make_ours(a);
  ours->LoadState(of_theirs);
  theirs = make_theirs(b);
  handle = WrapTorchOptimizer(*theirs, {.fused = false});
  handle->LoadState(of_ours);
  EXPECT_EQ(handle->lr(0), ours->lr(0));
  step_all(12, 18);
  ExpectNear(a, b);
}

TEST(FusedAdamW, Steps_EqualTorchs) {
  for (const bool amsgrad : {false, true}) {
    ExpectEqualRuns(
        [&](const auto& p) {
          return std::make_unique<FusedAdamW>(
              p, AdamWOptions{
                     .lr = 1e-2, .betas = {0.8, 0.95}, .weight_decay = 0.1, .amsgrad = amsgrad});
        },
        [&](const auto& p) {
          return std::make_unique<optim::AdamW>(
              p, optim::AdamWOptions(1e-2).betas({0.8, 0.95}).weight_decay(0.1).amsgrad(amsgrad));
        });
  }
}

TEST(FusedAdam, Steps_EqualTorchs) {
  ExpectEqualRuns(
      [](const auto& p) {
        return std::make_unique<FusedAdam>(p, AdamOptions{.lr = 1e-2, .weight_decay = 0.1});
      },
      [](const auto& p) {
        return std::make_unique<optim::Adam>(p, optim::AdamOptions(1e-2).weight_decay(0.1));
      });
}

TEST(FusedSGD, Steps_EqualTorchs) {
  for (const auto& [momentum, dampening, nesterov] :
       {std::tuple{0.9, 0.0, false}, std::tuple{0.9, 0.3, false}, std::tuple{0.9, 0.0, true}}) {
    ExpectEqualRuns(
        [m = momentum, d = dampening, n = nesterov](const auto& p) {
          return std::make_unique<FusedSGD>(
              p,
              SGDOptions{
                  .lr = 0.1, .momentum = m, .dampening = d, .weight_decay = 0.01, .nesterov = n});
        },
        [m = momentum, d = dampening, n = nesterov](const auto& p) {
          return std::make_unique<optim::SGD>(
              p, optim::SGDOptions(0.1).momentum(m).dampening(d).weight_decay(0.01).nesterov(n));
        });
  }
}

TEST(FusedSGD, WithoutMomentum_HasNoState) {
  std::vector<at::Tensor> params = MakeParams();
  FusedSGD sgd(params, {.lr = 0.5});
  const at::Tensor before = params[0].detach().clone();
  SetGrads(params, 0);
  sgd.Step();
  EXPECT_LT((before - 0.5 * params[0].grad() - params[0]).abs().max().item<double>(), 1e-7);
  EXPECT_TRUE(sgd.SaveState().tensors.empty());
}

TEST(FusedAdagrad, Steps_EqualTorchs) {
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  FusedAdagrad ours(
      a, {.lr = 0.1, .lr_decay = 0.01, .weight_decay = 0.1, .initial_accumulator_value = 0.5});
  optim::Adagrad theirs(
      b,
      optim::AdagradOptions(0.1).lr_decay(0.01).weight_decay(0.1).initial_accumulator_value(0.5));
  const auto handle = WrapTorchOptimizer(theirs);
  for (int step = 0; step < 12; ++step) {
    SetGrads(a, step);
    SetGrads(b, step);
    ours.Step();
    handle->Step();
  }
  ExpectNear(a, b);
  handle->LoadState(ours.SaveState());
  ours.LoadState(handle->SaveState());
}

TEST(TorchOptimizer, RMSprop_SavesAndLoads) {
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  const auto options = optim::RMSpropOptions(0.01).momentum(0.9).centered(true);
  optim::RMSprop first(a, options);
  const auto handle = WrapTorchOptimizer(first);
  for (int step = 0; step < 6; ++step) {
    SetGrads(a, step);
    handle->Step();
  }
  {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < a.size(); ++i) b[i].copy_(a[i]);
  }
  optim::RMSprop second(b, options);
  const auto restored = WrapTorchOptimizer(second);
  restored->LoadState(handle->SaveState());
  for (int step = 6; step < 12; ++step) {
    SetGrads(a, step);
    SetGrads(b, step);
    handle->Step();
    restored->Step();
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i]));
}

TEST(FusedAdamW, SavedWithNames_IsExactOnResume) {
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  const std::vector<std::string> names = {"net.0.weight", "net.0.bias", "net.1", "d"};
  FusedAdamW first(a), second(b);
  first.set_parameter_names(names);
  second.set_parameter_names(names);
  for (int step = 0; step < 5; ++step) {
    SetGrads(a, step);
    first.Step();
  }
  const OptimizerState state = first.SaveState();
  EXPECT_TRUE(state.tensors.count("net.0.weight.exp_avg_sq"));
  EXPECT_EQ(state.tensors.at("net.0.weight.step").item<float>(), 5);
  EXPECT_EQ(state.tensors.at("net.0.bias.step").item<float>(), 3);
  EXPECT_EQ(state.tensors.at("net.1.step").item<float>(), 1);
  {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < a.size(); ++i) b[i].copy_(a[i]);
  }
  second.LoadState(state);
  for (int step = 5; step < 9; ++step) {
    SetGrads(a, step);
    SetGrads(b, step);
    first.Step();
    second.Step();
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

// For memory that is not pinned, the device makes one copy for each tensor.
TEST(Optimizers, StateInMemoryOfTheHost_IsUploadedInBlocks) {
  constexpr int64_t kNumbers = 5'000'000;  // 20 MB
  const at::Tensor saved = at::arange(kNumbers, at::kFloat);
  const auto param = [] {
    return at::empty({kNumbers}, at::TensorOptions(FakeDevice().device()).dtype(at::kFloat));
  };
  FusedSGD fused({param()}, SGDOptions{.momentum = 0.9});
  optim::SGD plain({param()}, optim::SGDOptions(0.1).momentum(0.9));
  const auto handle = WrapTorchOptimizer(plain);
  for (OptimizerHandle* const optimizer : {static_cast<OptimizerHandle*>(&fused), handle.get()}) {
    OptimizerState state = optimizer->SaveState();
    state.tensors["0.momentum_buffer"] = saved;
    // First into new memory, then into that of the previous load.
    for (int load = 0; load < 2; ++load) {
      const size_t before = CopiesToFakeDevice().size();
      optimizer->LoadState(state);
      EXPECT_GE(CopiesToFakeDevice().size() - before, 10u) << load;
      const at::Tensor loaded = optimizer->SaveState().tensors.at("0.momentum_buffer");
      EXPECT_EQ(loaded.device(), FakeDevice().device());
      EXPECT_EQ(std::memcmp(loaded.const_data_ptr(), saved.const_data_ptr(), saved.nbytes()), 0);
    }
  }
}

TEST(FusedAdamW, StateThatDoesNotFit_IsRefusedAndChangesNothing) {
  std::vector<at::Tensor> params = MakeParams();
  FusedAdamW optimizer(params, {.lr = 0.25});
  SetGrads(params, 0);
  optimizer.Step();
  const OptimizerState good = optimizer.SaveState();
  OptimizerState bad = good;
  bad.groups["0.lr"] = {0.5};
  bad.tensors["9.exp_avg"] = at::zeros({1});
  EXPECT_THAT(ErrorOf([&] { optimizer.LoadState(bad); }), HasSubstr("'9.exp_avg'"));
  bad = good;
  bad.groups["0.lr"] = {0.5};
  bad.tensors["0.exp_avg"] = at::zeros({4});
  EXPECT_THAT(ErrorOf([&] { optimizer.LoadState(bad); }), HasSubstr("has shape [4]"));
  bad = good;
  bad.groups["0.lr"] = {0.5};
  bad.tensors.erase("0.exp_avg_sq");
  EXPECT_THAT(ErrorOf([&] { optimizer.LoadState(bad); }), HasSubstr("'0.exp_avg_sq' is missing"));
  EXPECT_EQ(optimizer.lr(0), 0.25);
  optimizer.LoadState(good);
}

// States are identified by number: if one group has become longer and the next one shorter, states
// of equal shapes would go to other parameters.
TEST(Optimizers, StateOfGroupsOfOtherSizes_IsRefused) {
  const auto parameters = [] {
    std::vector<at::Tensor> list;
    for (int i = 0; i < 3; ++i) {
      list.push_back(at::ones({4}).requires_grad_(true));
      list.back().mutable_grad() = at::full({4}, 1.0 + i);
    }
    return list;
  };
  const std::vector<at::Tensor> a = parameters(), b = parameters();
  FusedAdamW saved({{{a[0]}, {}}, {{a[1], a[2]}, {.weight_decay = 0}}});
  FusedAdamW other({{{b[0], b[1]}, {}}, {{b[2]}, {.weight_decay = 0}}});
  const auto torchs = [](std::vector<at::Tensor> first, std::vector<at::Tensor> second) {
    return optim::AdamW(
        std::vector<optim::OptimizerParamGroup>{optim::OptimizerParamGroup(std::move(first)),
                                                optim::OptimizerParamGroup(std::move(second))});
  };
  optim::AdamW saved_torch = torchs({a[0]}, {a[1], a[2]});
  optim::AdamW other_torch = torchs({b[0], b[1]}, {b[2]});
  const auto saved_handle = WrapTorchOptimizer(saved_torch);
  const auto other_handle = WrapTorchOptimizer(other_torch);
  saved.Step();
  saved_handle->Step();
  for (const OptimizerState& state : {saved.SaveState(), saved_handle->SaveState()}) {
    for (OptimizerHandle* into : {static_cast<OptimizerHandle*>(&other), other_handle.get()}) {
      EXPECT_THAT(ErrorOf([&] { into->LoadState(state); }),
                  HasSubstr("parameter group 0 of the optimizer was saved with 1 parameters and "
                            "has 2 here"));
      EXPECT_TRUE(into->SaveState().tensors.empty());
      // Older states do not contain the sizes.
      OptimizerState old = state;
      for (const char* row : {"0.params", "1.params"}) EXPECT_EQ(old.groups.erase(row), 1u);
      EXPECT_NO_THROW(into->CheckState(old));
    }
  }
}

// It would minimize from then on.
TEST(TorchOptimizer, StateOfOneThatMaximizes_IsRefused) {
  const auto refused = [](OptimizerHandle& into, const OptimizerState& state) {
    EXPECT_THAT(ErrorOf([&] { into.LoadState(state); }), HasSubstr("saved with maximize"));
  };
  const at::Tensor p = at::ones({2}).requires_grad_(true);
  optim::AdamW adamw({p});
  optim::Adam adam({p});
  optim::SGD sgd({p}, 0.1);
  optim::Adagrad adagrad({p});
  refused(*WrapTorchOptimizer(adamw), FusedAdamW({p}, {.maximize = true}).SaveState());
  refused(*WrapTorchOptimizer(adam), FusedAdam({p}, {.maximize = true}).SaveState());
  refused(*WrapTorchOptimizer(sgd), FusedSGD({p}, {.maximize = true}).SaveState());
  refused(*WrapTorchOptimizer(adagrad), FusedAdagrad({p}, {.maximize = true}).SaveState());
}

TEST(FusedSGD, MomentumThatComesLater_StepsAsInTorch) {
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  FusedSGD ours(a, {.lr = 0.1, .dampening = 0.5});
  optim::SGD theirs(b, optim::SGDOptions(0.1).dampening(0.5));
  const auto handle = WrapTorchOptimizer(theirs, {.fused = false});
  for (int step = 4; step < 9; ++step) {
    if (step == 6) {
      for (OptimizerHandle* h : {static_cast<OptimizerHandle*>(&ours), handle.get()}) {
        h->set_momentum(0, 0.9);
      }
    }
    SetGrads(a, step);
    SetGrads(b, step);
    ours.Step();
    handle->Step();
  }
  ExpectNear(a, b);
}

TEST(FusedAdamW, Groups_HaveTheirOwnOptions) {
  std::vector<at::Tensor> params = MakeParams();
  FusedAdamW optimizer({{{params[0]}, {.lr = 0.1, .weight_decay = 0}}, {{params[1]}, {.lr = 0}}});
  const at::Tensor still = params[1].detach().clone();
  SetGrads(params, 0);
  optimizer.Step();
  EXPECT_TRUE(params[1].equal(still));
  EXPECT_EQ(optimizer.num_groups(), 2);
  EXPECT_EQ(optimizer.parameters().size(), 2u);
}

TEST(FusedAdamW, GroupAddedLater_StepsAndIsSaved) {
  std::vector<at::Tensor> params = MakeParams();
  FusedAdamW optimizer({params[0]});
  SetGrads(params, 0);
  optimizer.Step();
  const at::Tensor before = params[1].detach().clone();
  optimizer.add_param_group({{params[1]}, {.lr = 0.5}});
  EXPECT_EQ(optimizer.num_groups(), 2);
  EXPECT_EQ(optimizer.lr(1), 0.5);
  optimizer.Step();
  EXPECT_FALSE(params[1].equal(before));
  const OptimizerState state = optimizer.SaveState();
  EXPECT_EQ(state.tensors.at("0.step").item<float>(), 2);
  EXPECT_EQ(state.tensors.at("1.step").item<float>(), 1);
  EXPECT_THAT(ErrorOf([&] {
                optimizer.add_param_group({{params[0]}, {}});
              }),
              HasSubstr("in the optimizer twice"));
  EXPECT_EQ(optimizer.num_groups(), 2);
  FusedAdamW one_group({params[0], params[1]});
  EXPECT_THAT(ErrorOf([&] { one_group.LoadState(state); }), HasSubstr("has 2 parameter groups"));
}

TEST(FusedAdamW, BadArguments_AreNamed) {
  const at::Tensor p = at::zeros({2}).requires_grad_(true);
  EXPECT_THAT(ErrorOf([&] { FusedAdamW o({p}, {.lr = -1}); }),
              HasSubstr("lr must not be negative"));
  EXPECT_THAT(ErrorOf([&] { FusedAdamW o({p, p}); }), HasSubstr("in the optimizer twice"));
  EXPECT_THAT(ErrorOf([&] { FusedAdamW o({p * 2}); }), HasSubstr("not a leaf"));
  EXPECT_THAT(ErrorOf([&] { FusedAdamW o(std::vector<at::Tensor>{}); }), HasSubstr("empty list"));
  EXPECT_THAT(ErrorOf([&] { FusedSGD o({p}, {.nesterov = true}); }), HasSubstr("nesterov"));
  EXPECT_THAT(ErrorOf([&] { FusedAdagrad o({p}, {.initial_accumulator_value = -1}); }),
              HasSubstr("initial_accumulator_value must not be negative"));
  EXPECT_THAT(ErrorOf([&] { FusedAdagrad o({p}, {.eps = -1}); }),
              HasSubstr("eps must not be negative"));
}

TEST(FusedAdamW, StepScaled_DividesByScaleAndSkipsOnInf) {
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  FusedAdamW plain(a), scaled(b);
  const at::Tensor scale = at::full({}, 8.0), fine = at::zeros({}), inf = at::full({}, 1.0);
  SetGrads(a, 5);
  plain.Step();
  for (const at::Tensor& found_inf : {inf, fine, inf}) {
    SetGrads(b, 5);
    for (at::Tensor& p : b) {
      if (p.grad().defined()) p.mutable_grad().mul_(8);
    }
    scaled.StepScaled(scale, found_inf);
  }
  ExpectNear(a, b);
  EXPECT_EQ(scaled.SaveState().tensors.at("0.step").item<float>(), 1);
}

std::shared_ptr<ScratchFile> FileIn(const TestFolder& folder) {
  absl::StatusOr<std::shared_ptr<ScratchFile>> file = ScratchFile::Create(folder.path());
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

void ExpectSameState(const OptimizerHandle& a, const OptimizerHandle& b) {
  const OptimizerState of_a = a.SaveState(), of_b = b.SaveState();
  EXPECT_EQ(of_a.groups, of_b.groups);
  ASSERT_EQ(of_a.tensors.size(), of_b.tensors.size());
  for (const auto& [name, tensor] : of_a.tensors) {
    ASSERT_TRUE(of_b.tensors.count(name)) << name;
    EXPECT_TRUE(tensor.equal(of_b.tensors.at(name))) << name;
  }
}

// Makes some steps of two optimizers of one kind, where `b`'s state is offloaded: equal to the last
// bit, even after the states have been exchanged.
template <typename Make>
void ExpectSameOffloaded(Make make) {
  const TestFolder folder;
  for (const bool on_disk : {true, false}) {
    std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
    auto plain = make(a);
    auto offloaded = make(b);
    offloaded->OffloadState(on_disk ? FileIn(folder) : nullptr);
    for (int step = 0; step < 6; ++step) {
      SetGrads(a, step);
      SetGrads(b, step);
      plain->Step();
      offloaded->Step();
    }
    ExpectSameState(*plain, *offloaded);

    auto other = make(b);
    other->OffloadState(on_disk ? FileIn(folder) : nullptr);
    other->LoadState(plain->SaveState());
    plain->LoadState(offloaded->SaveState());
    for (int step = 6; step < 9; ++step) {
      SetGrads(a, step);
      SetGrads(b, step);
      plain->Step();
      other->Step();
    }
    ExpectSameState(*plain, *other);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
  }
}

TEST(OffloadedOptimizer, Steps_EqualThoseWithoutOffload) {
  ExpectSameOffloaded(
      [](const auto& p) { return std::make_unique<FusedAdamW>(p, AdamWOptions{.amsgrad = true}); });
  ExpectSameOffloaded([](const auto& p) { return std::make_unique<FusedAdam>(p); });
  ExpectSameOffloaded([](const auto& p) {
    return std::make_unique<FusedSGD>(p, SGDOptions{.momentum = 0.9, .dampening = 0.1});
  });
  ExpectSameOffloaded([](const auto& p) { return std::make_unique<FusedSGD>(p); });
  ExpectSameOffloaded([](const auto& p) {
    return std::make_unique<FusedAdagrad>(p, AdagradOptions{.initial_accumulator_value = 0.5});
  });
  ExpectSameOffloaded([](const auto& p) {
    return std::make_unique<FusedAdamW>(
        std::vector<ParamGroup<AdamWOptions>>{{{p[0], p[2]}, {}}, {{p[1], p[3]}, {.lr = 0.1}}});
  });
}

TEST(OffloadedOptimizer, StatesOfSeveralWindows_EqualThoseWithoutOffload) {
  const TestFolder folder;
  const auto make = [] {
    at::manual_seed(1);
    std::vector<at::Tensor> params;
    for (int i = 0; i < 3; ++i) params.push_back(at::randn({5'000'000}).requires_grad_(true));
    return params;
  };
  std::vector<at::Tensor> a = make(), b = make();
  FusedAdamW plain(a), offloaded(b);
  offloaded.OffloadState(FileIn(folder));
  for (int step = 0; step < 3; ++step) {
    SetGrads(a, step);
    for (size_t i = 0; i < a.size(); ++i) b[i].mutable_grad() = a[i].grad();
    plain.Step();
    offloaded.Step();
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
  ExpectSameState(plain, offloaded);
}

TEST(OffloadedOptimizer, ParametersThatLieOtherwise_EqualThoseWithoutOffload) {
  const TestFolder folder;
  const auto make = [] {
    at::manual_seed(1);
    // A parameter with holes; and one whose memory format changes after the first step.
    return std::vector<at::Tensor>{
        at::randn({6, 8}).slice(1, 0, 8, 2).detach().requires_grad_(true),
        at::randn({2, 3, 4, 5}).requires_grad_(true)};
  };
  std::vector<at::Tensor> a = make(), b = make();
  FusedAdamW plain(a), offloaded(b);
  offloaded.OffloadState(FileIn(folder));
  for (int step = 0; step < 4; ++step) {
    SetGrads(a, step);
    SetGrads(b, step);
    plain.Step();
    offloaded.Step();
    for (auto* params : {&a, &b}) {
      (*params)[1].set_data((*params)[1].detach().contiguous(
          step % 2 == 0 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous));
    }
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

TEST(OffloadedOptimizer, GroupAddedLater_IsOffloadedToo) {
  const TestFolder folder;
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  FusedAdamW plain({a[0]}), offloaded({b[0]});
  offloaded.OffloadState(FileIn(folder));
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      plain.add_param_group({{a[3]}, {}});
      offloaded.add_param_group({{b[3]}, {}});
    }
    SetGrads(a, step);
    SetGrads(b, step);
    plain.Step();
    offloaded.Step();
  }
  ExpectSameState(plain, offloaded);
}

// A disk whose system calls fail when the test asks for it.
class FailingDisk {
 public:
  std::shared_ptr<ScratchFile> File() {
    absl::StatusOr<std::shared_ptr<ScratchFile>> file =
        ScratchFile::Create(folder_.path(), &system);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  static int Fail(int error) {
    errno = error;
    return -1;
  }

  DirectFileSystem system;

 private:
  const TestFolder folder_;
};

TEST(OffloadedOptimizer, DiskThatFailsInAStep_SavesNothingUntilAStateIsLoaded) {
  FailingDisk disk;
  std::vector<at::Tensor> params = MakeParams();
  FusedAdamW optimizer(params);
  optimizer.OffloadState(disk.File());
  SetGrads(params, 5);
  optimizer.Step();
  OptimizerState good = optimizer.SaveState();
  for (auto& [name, tensor] : good.tensors) tensor = tensor.clone();
  disk.system.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    return FailingDisk::Fail(EIO);
  };
  EXPECT_THAT(ErrorOf([&] { optimizer.Step(); }), HasSubstr("cannot write"));
  disk.system.pwrite = ::pwrite;
  EXPECT_THAT(ErrorOf([&] { optimizer.Step(); }), HasSubstr("state was lost"));
  EXPECT_THAT(ErrorOf([&] { optimizer.SaveState(); }), HasSubstr("state was lost"));
  EXPECT_THAT(optimizer.CannotSave(), HasSubstr("state was lost"));
  // Lost states are not read again.
  disk.system.pread = [](int, void*, size_t, off_t) -> ssize_t { return FailingDisk::Fail(EIO); };
  optimizer.LoadState(good);
  disk.system.pread = ::pread;
  EXPECT_EQ(optimizer.CannotSave(), "");
  const OptimizerState loaded = optimizer.SaveState();
  for (const auto& [name, tensor] : good.tensors) {
    EXPECT_TRUE(tensor.equal(loaded.tensors.at(name))) << name;
  }
  optimizer.Step();
}

TEST(OffloadedOptimizer, DiskThatIsFull_ChangesNothing) {
  FailingDisk disk;
  std::vector<at::Tensor> params = MakeParams();
  FusedAdamW optimizer({{{params[0]}, {}}, {{params[1]}, {}}});
  optimizer.OffloadState(disk.File());
  SetGrads(params, 5);
  const std::vector<at::Tensor> before = {params[0].detach().clone(), params[1].detach().clone()};
  int reserved = 0;
  disk.system.allocate = [&](int fd, off_t size) {
    // The second group finds no room.
    return ++reserved == 2 ? FailingDisk::Fail(ENOSPC) : ::fallocate(fd, 0, 0, size);
  };
  EXPECT_THAT(ErrorOf([&] { optimizer.Step(); }), HasSubstr("cannot reserve"));
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(params[i].equal(before[i])) << i;
  EXPECT_TRUE(optimizer.SaveState().tensors.empty());
  optimizer.Step();
  EXPECT_EQ(optimizer.SaveState().tensors.at("1.step").item<float>(), 1);
}

TEST(OffloadedOptimizer, MomentumThatComesLater_BeginsAtZero) {
  for (const bool on_disk : {true, false}) {
    const TestFolder folder;
    std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
    FusedSGD plain(a, {.lr = 0.1}), offloaded(b, {.lr = 0.1});
    offloaded.OffloadState(on_disk ? FileIn(folder) : nullptr);
    for (int step = 4; step < 8; ++step) {
      if (step == 5) {
        plain.set_momentum(0, 0.9);
        offloaded.set_momentum(0, 0.9);
      }
      SetGrads(a, step);
      SetGrads(b, step);
      plain.Step();
      offloaded.Step();
    }
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
    ExpectSameState(plain, offloaded);
  }
}

TEST(OffloadedOptimizer, MomentumThatGoesAndComesBack_StepsOnce) {
  for (const bool on_disk : {true, false}) {
    const TestFolder folder;
    std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
    FusedSGD plain(a, {.lr = 0.1, .momentum = 0.9}), offloaded(b, {.lr = 0.1, .momentum = 0.9});
    offloaded.OffloadState(on_disk ? FileIn(folder) : nullptr);
    for (int step = 4; step < 10; ++step) {
      const double momentum = step == 6 || step == 7 ? 0 : 0.9;
      plain.set_momentum(0, momentum);
      offloaded.set_momentum(0, momentum);
      SetGrads(a, step);
      SetGrads(b, step);
      plain.Step();
      offloaded.Step();
      for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << step << " " << i;
      ExpectSameState(plain, offloaded);
    }
  }
}

TEST(OffloadedOptimizer, StepScaled_SkipsOnInf) {
  const TestFolder folder;
  std::vector<at::Tensor> a = MakeParams(), b = MakeParams();
  FusedAdamW plain(a), offloaded(b);
  offloaded.OffloadState(FileIn(folder));
  for (const float found_inf : {0.0f, 1.0f, 0.0f}) {
    SetGrads(a, 5);
    SetGrads(b, 5);
    plain.StepScaled(at::full({}, 8.0), at::full({}, found_inf));
    offloaded.StepScaled(at::full({}, 8.0), at::full({}, found_inf));
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
  ExpectSameState(plain, offloaded);
}

TEST(OffloadedOptimizer, WhatCannotBe_IsRefused) {
  const TestFolder folder;
  std::vector<at::Tensor> params = MakeParams();
  optim::AdamW torchs(params);
  EXPECT_THAT(ErrorOf([&] { WrapTorchOptimizer(torchs)->OffloadState(nullptr); }),
              HasSubstr("use muster::FusedAdamW"));
  FusedAdamW optimizer(params);
  SetGrads(params, 5);
  optimizer.Step();
  EXPECT_THAT(ErrorOf([&] { optimizer.OffloadState(FileIn(folder)); }),
              HasSubstr("has been stepped on already"));
  FusedAdamW offloaded(params);
  offloaded.OffloadState(FileIn(folder));
  offloaded.Step();
  offloaded.OffloadState(FileIn(folder));  // no effect
  offloaded.Step();
  EXPECT_EQ(offloaded.SaveState().tensors.at("0.step").item<float>(), 2);
  EXPECT_THAT(ErrorOf([&] {
                offloaded.ReplaceParameters([](const at::Tensor& p) { return p.detach().clone(); });
              }),
              HasSubstr("has been stepped on already"));
  params[0].set_data(params[0].detach().to(at::kBFloat16));
  params[0].mutable_grad() = at::zeros_like(params[0]);
  EXPECT_THAT(ErrorOf([&] { offloaded.Step(); }), HasSubstr("has become BFloat16"));
  EXPECT_EQ(offloaded.CannotSave(), "") << "nothing has changed";
}

TEST(OptimizerHandle, ZeroGrad_InPlaceKeepsBucketViews) {
  std::vector<at::Tensor> params = MakeParams();
  FusedAdamW optimizer(params);
  at::Tensor bucket = at::full({15}, 3.0f);
  params[0].mutable_grad() = bucket.view({5, 3});
  optimizer.ZeroGrad(GradZeroing::kInPlace);
  EXPECT_EQ(bucket.abs().sum().item<float>(), 0);
  EXPECT_TRUE(params[0].grad().is_alias_of(bucket));
  optimizer.ZeroGrad();
  EXPECT_FALSE(params[0].grad().defined());
}

// New memory costs more than the copy.
void ExpectLoadUsesMomentsAgain(const at::Tensor& parameter, OptimizerHandle* handle) {
  const auto step = [&] {
    parameter.mutable_grad() = at::full({4}, 1.0);
    handle->Step();
  };
  const auto moment = [&] { return handle->SaveState().tensors.at("0.exp_avg"); };
  step();
  OptimizerState state;
  for (const auto& [name, tensor] : handle->SaveState().tensors) {
    state.tensors[name] = tensor.clone();
  }
  state.groups = handle->SaveState().groups;
  const at::Tensor saved = state.tensors["0.exp_avg"];

  step();
  const void* const memory = moment().data_ptr();
  handle->LoadState(state);
  EXPECT_EQ(moment().data_ptr(), memory);
  EXPECT_TRUE(moment().equal(saved));

  // Tensors that other code holds stay unchanged, and so does the loaded state.
  step();
  const at::Tensor held = moment();
  const at::Tensor values = held.clone();
  handle->LoadState(state);
  EXPECT_TRUE(held.equal(values));
  EXPECT_TRUE(moment().equal(saved));
  step();
  EXPECT_FALSE(moment().equal(saved));
  EXPECT_TRUE(state.tensors["0.exp_avg"].is_same(saved));
  const at::Tensor alias = moment().detach();
  const at::Tensor before = alias.clone();
  handle->LoadState(state);
  EXPECT_TRUE(alias.equal(before));

  // An error changes nothing.
  step();
  const at::Tensor now = moment().clone();
  state.tensors.erase("0.exp_avg_sq");
  EXPECT_THAT(ErrorOf([&] { handle->LoadState(state); }), HasSubstr("0.exp_avg_sq"));
  EXPECT_TRUE(moment().equal(now));
}

TEST(FusedAdamW, LoadState_UsesMomentsAgainThatNobodyElseHas) {
  const at::Tensor parameter = at::full({4}, 1.0).requires_grad_(true);
  FusedAdamW fused({parameter});
  ExpectLoadUsesMomentsAgain(parameter, &fused);
}

TEST(TorchOptimizer, LoadState_UsesMomentsAgainThatNobodyElseHas) {
  const at::Tensor parameter = at::full({4}, 1.0).requires_grad_(true);
  optim::AdamW adamw(std::vector<at::Tensor>{parameter}, optim::AdamWOptions());
  const auto handle = WrapTorchOptimizer(adamw);
  ExpectLoadUsesMomentsAgain(parameter, handle.get());
}

}  // namespace
}  // namespace muster
