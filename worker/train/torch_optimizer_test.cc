#include "worker/train/torch_optimizer.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/embedding.h"
#include "ATen/ops/full.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "torch/serialize/archive.h"
#include "worker/collective/test_error.h"
#include "worker/train/autocast.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
namespace optim = torch::optim;

at::Tensor Parameter(at::Tensor values) { return values.detach().requires_grad_(true); }

std::unique_ptr<optim::Optimizer> Make(const std::string& kind, std::vector<at::Tensor> params) {
  if (kind == "AdamW") return std::make_unique<optim::AdamW>(params, optim::AdamWOptions(0.1));
  if (kind == "Adam") return std::make_unique<optim::Adam>(params, optim::AdamOptions(0.1));
  if (kind == "Adagrad")
    return std::make_unique<optim::Adagrad>(params, optim::AdagradOptions(0.1));
  if (kind == "RMSprop")
    return std::make_unique<optim::RMSprop>(params, optim::RMSpropOptions(0.1));
  const double momentum = kind == "SGD with momentum" ? 0.9 : 0;
  return std::make_unique<optim::SGD>(params, optim::SGDOptions(0.1).momentum(momentum));
}

TEST(TorchOptimizer, GroupAddedLater_IsZeroedSteppedSavedAndLoaded) {
  for (const char* kind : {"AdamW", "Adam", "SGD", "SGD with momentum", "Adagrad", "RMSprop"}) {
    SCOPED_TRACE(kind);
    const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({3}));
    const auto optimizer = Make(kind, {a});
    const auto handle = WrapTorchOptimizer(*optimizer);
    handle->set_parameter_names({"head.weight"});
    const int64_t version = handle->parameters_version();
    a.mutable_grad() = at::ones({2});
    handle->Step();
    EXPECT_EQ(handle->parameters_version(), version);

    optim::OptimizerParamGroup group({b});
    optimizer->add_param_group(group);
    ASSERT_EQ(handle->parameters().size(), 2u);
    EXPECT_TRUE(handle->parameters()[1].is_same(b));
    EXPECT_GT(handle->parameters_version(), version);
    EXPECT_EQ(handle->parameter_names(), (std::vector<std::string>{"head.weight", "1"}));
    b.mutable_grad() = at::ones({3});
    handle->Step();
    EXPECT_LT(b[0].item<double>(), 1);
    handle->ZeroGrad();
    EXPECT_FALSE(b.grad().defined());

    const OptimizerState state = handle->SaveState();
    EXPECT_TRUE(state.groups.count("1.lr"));
    const auto other = Make(kind, {Parameter(a.detach().clone())});
    const auto restored = WrapTorchOptimizer(*other);
    restored->set_parameter_names({"head.weight"});
    EXPECT_THAT(ErrorOf([&] { restored->LoadState(state); }), HasSubstr("2 parameter groups"));
    other->add_param_group(optim::OptimizerParamGroup({Parameter(b.detach().clone())}));
    restored->LoadState(state);
    for (const auto& h : {handle.get(), restored.get()}) {
      for (const at::Tensor& p : h->parameters()) p.mutable_grad() = at::full(p.sizes(), 0.5);
      h->Step();
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(handle->parameters()[i].equal(restored->parameters()[i]));
    }
  }
}

class UsersAdagrad : public optim::Adagrad {
 public:
  using optim::Adagrad::Adagrad;
};

// LibTorch's step() asserts that each parameter has had its state since the constructor.
TEST(TorchOptimizer, GroupAddedLaterToAnAdagradOfTheUsers_IsStepped) {
  for (const bool closure : {false, true}) {
    SCOPED_TRACE(closure);
    const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({3}));
    UsersAdagrad adagrad({a}, optim::AdagradOptions(0.1));
    const auto handle = WrapTorchOptimizer(adagrad);
    adagrad.add_param_group(optim::OptimizerParamGroup({b}));
    b.mutable_grad() = at::ones({3});
    if (closure) {
      handle->StepWithClosure([] { return at::zeros({}); });
    } else {
      handle->Step();
    }
    EXPECT_LT(b[0].item<double>(), 1);
  }
}

TEST(TorchOptimizer, StepsOfItsOwn_LeaveAVersionWhereTheHandleSaysSo) {
  for (const char* kind : {"AdamW", "Adam", "SGD", "SGD with momentum", "Adagrad", "RMSprop"}) {
    SCOPED_TRACE(kind);
    const at::Tensor parameter = Parameter(at::ones({2}));
    const auto optimizer = Make(kind, {parameter});
    const auto handle = WrapTorchOptimizer(*optimizer);
    parameter.mutable_grad() = at::ones({2});
    const auto version = parameter._version();
    optimizer->step();
    EXPECT_NE(parameter[0].item<float>(), 1);
    EXPECT_EQ(parameter._version() == version, StepsLeaveNoVersion(*handle));
  }
  const at::Tensor parameter = Parameter(at::ones({2}));
  parameter.mutable_grad() = at::ones({2});
  const auto version = parameter._version();
  optim::RMSprop({parameter}, optim::RMSpropOptions(0.1).momentum(0.9)).step();
  EXPECT_NE(parameter._version(), version);
  FusedSGD fused({parameter}, {.lr = 0.1});
  EXPECT_FALSE(StepsLeaveNoVersion(fused));
}

// LibTorch notices by the version that a graph has old values.
TEST(TorchOptimizer, StepsThroughTheHandle_LeaveAVersion) {
  for (const char* kind : {"AdamW", "Adam", "SGD", "SGD with momentum", "Adagrad", "RMSprop"}) {
    SCOPED_TRACE(kind);
    const at::Tensor stepped = Parameter(at::ones({2})), other = Parameter(at::ones({2}));
    const auto optimizer = Make(kind, {stepped, other});
    const auto handle = WrapTorchOptimizer(*optimizer);
    stepped.mutable_grad() = at::ones({2});
    const auto version = stepped._version(), of_other = other._version();
    handle->Step();
    EXPECT_GT(stepped._version(), version);
    EXPECT_EQ(other._version(), of_other);
  }
  const at::Tensor parameter = Parameter(at::ones({2}));
  optim::LBFGS lbfgs({parameter}, optim::LBFGSOptions().max_iter(1));
  const auto version = parameter._version();
  bool same = false;
  WrapTorchOptimizer(lbfgs)->StepWithClosure([&] {
    same = parameter._version() == version;
    parameter.mutable_grad() = at::ones({2});
    return at::ones({});
  });
  // A graph from before the step can be used in its first evaluation.
  EXPECT_TRUE(same);
  EXPECT_GT(parameter._version(), version);
}

TEST(TorchOptimizer, ParameterReplacedInItsGroup_IsSeen) {
  const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({2}));
  optim::SGD sgd(std::vector<at::Tensor>{a}, optim::SGDOptions(0.1));
  const auto handle = WrapTorchOptimizer(sgd);
  sgd.param_groups()[0].params()[0] = b;
  EXPECT_TRUE(handle->parameters()[0].is_same(b));
  sgd.add_param_group(optim::OptimizerParamGroup({a}));
  sgd.param_groups()[1].params()[0] = b;
  EXPECT_THAT(ErrorOf([&] { handle->Step(); }), HasSubstr("in the optimizer twice"));
}

TEST(TorchOptimizer, AnotherOptimizerAtItsAddress_IsToldApart) {
  const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({2}));
  std::optional<optim::SGD> fold;
  const auto options = optim::SGDOptions(0.1).momentum(0.9);
  fold.emplace(std::vector<at::Tensor>{a}, options);
  const auto handle = WrapTorchOptimizer(*fold);
  EXPECT_TRUE(handle->Wraps(*fold));
  fold->add_param_group(optim::OptimizerParamGroup({b}));
  EXPECT_TRUE(handle->Wraps(*fold)) << "it is the same one, with more to do";
  a.mutable_grad() = at::ones({2});
  handle->Step();
  EXPECT_TRUE(handle->Wraps(*fold));

  fold.emplace(std::vector<at::Tensor>{a, b}, options);
  EXPECT_FALSE(handle->Wraps(*fold)) << "it has no momentum";
  fold.emplace(std::vector<at::Tensor>{b}, options);
  EXPECT_FALSE(handle->Wraps(*fold)) << "it lacks a parameter";
  optim::SGD elsewhere(std::vector<at::Tensor>{a, b}, options);
  EXPECT_FALSE(handle->Wraps(elsewhere));
}

TEST(OptimizerHandle, SecondAtTheSameAddress_HasAnotherId) {
  const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({2}));
  std::optional<FusedSGD> fold;
  fold.emplace(std::vector<at::Tensor>{a});
  const uint64_t first = fold->id();
  FusedSGD same({a}), different({b});
  EXPECT_TRUE(fold->SameParameters(same));
  EXPECT_FALSE(fold->SameParameters(different));
  const FusedSGD copy = *fold;
  EXPECT_NE(copy.id(), first);
  fold.emplace(std::vector<at::Tensor>{a});
  EXPECT_NE(fold->id(), first);
}

// Returns a parameter of each layout that a program may have, with the same values at every call.
std::vector<at::Tensor> OddParameters() {
  at::manual_seed(3);
  return {Parameter(at::randn({4, 6}).t()),
          Parameter(at::randn({4, 12}).slice(1, 0, 12, 2)),
          Parameter(at::randn({6, 5}).slice(0, 1, 6, 3)),
          Parameter(at::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)),
          Parameter(at::randn({2, 3, 4, 4})),
          Parameter(at::randn({5, 1}).as_strided({5, 1}, {1, 7}))};
}

// Sets gradients in the layouts that a step may find: that of the parameter, contiguous, or
// transposed.
void SetOddGrads(const std::vector<at::Tensor>& params, int step) {
  at::manual_seed(50 + step);
  for (const at::Tensor& p : params) {
    at::Tensor grad = at::randn(p.sizes());
    if (step % 3 == 0) {
      int64_t reach = 1;
      for (int64_t d = 0; d < p.dim(); ++d) reach += (p.size(d) - 1) * p.stride(d);
      grad = at::randn({reach}).as_strided(p.sizes(), p.strides()).copy_(grad);
    } else if (step % 3 == 1) {
      grad = grad.transpose(0, 1).contiguous().transpose(0, 1);
    }
    p.mutable_grad() = grad;
  }
}

void ExpectNear(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LT((a[i] - b[i]).abs().max().item<double>(), 5e-6) << "parameter " << i;
  }
}

// Changes the parameters' memory format midway, as model->to(...) does after some steps.
void ChangeFormat(const std::vector<at::Tensor>& params) {
  params[3].set_data(params[3].detach().contiguous());
  params[4].set_data(params[4].detach().contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(TorchOptimizer, ParametersThatAreNotDense_StepAsInTorch) {
  for (const char* kind : {"AdamW", "Adam", "SGD", "SGD with momentum"}) {
    SCOPED_TRACE(kind);
    // One optimizer per parameter, so that one that uses torch's own step for its group does not
    // affect the others.
    for (size_t i = 0; i < OddParameters().size(); ++i) {
      const std::vector<at::Tensor> ours = {OddParameters()[i]}, theirs = {OddParameters()[i]};
      const auto a = Make(kind, ours), b = Make(kind, theirs);
      const auto handle = WrapTorchOptimizer(*a);
      for (int step = 0; step < 7; ++step) {
        SetOddGrads(ours, step);
        SetOddGrads(theirs, step);
        handle->Step();
        b->step();
      }
      ExpectNear(ours, theirs);
    }
    const std::vector<at::Tensor> ours = OddParameters(), theirs = OddParameters();
    const auto a = Make(kind, ours), b = Make(kind, theirs);
    const auto handle = WrapTorchOptimizer(*a);
    for (int step = 0; step < 9; ++step) {
      if (step == 4) {
        ChangeFormat(ours);
        ChangeFormat(theirs);
      }
      SetOddGrads(ours, step);
      SetOddGrads(theirs, step);
      handle->Step();
      b->step();
    }
    ExpectNear(ours, theirs);
  }
}

TEST(TorchOptimizer, MemoryFormatChangedAfterAStep_StateFollows) {
  for (const char* kind : {"AdamW", "SGD with momentum"}) {
    SCOPED_TRACE(kind);
    const auto formats = [] {
      const std::vector<at::Tensor> all = OddParameters();
      return std::vector<at::Tensor>{all[3], all[4]};
    };
    const std::vector<at::Tensor> ours = formats(), theirs = formats();
    const auto a = Make(kind, ours), b = Make(kind, theirs);
    const auto handle = WrapTorchOptimizer(*a);
    for (int step = 0; step < 9; ++step) {
      if (step == 4) {
        for (const auto& params : {ours, theirs}) {
          params[0].set_data(params[0].detach().contiguous());
          params[1].set_data(params[1].detach().contiguous(at::MemoryFormat::ChannelsLast));
        }
      }
      SetOddGrads(ours, 3 * step);
      SetOddGrads(theirs, 3 * step);
      handle->Step();
      b->step();
    }
    ExpectNear(ours, theirs);
  }
}

template <typename Options, typename TorchOptions>
void ExpectFusedEqualsTorchs(const char* kind, const Options& options) {
  SCOPED_TRACE(kind);
  const std::vector<at::Tensor> ours = OddParameters(), theirs = OddParameters();
  Fused<Options> a(ours, options);
  const auto b = Make(kind, theirs);
  for (int step = 0; step < 9; ++step) {
    if (step == 4) {
      ChangeFormat(ours);
      ChangeFormat(theirs);
    }
    SetOddGrads(ours, step);
    SetOddGrads(theirs, step);
    a.Step();
    b->step();
  }
  ExpectNear(ours, theirs);
}

TEST(FusedOptimizer, ParametersThatAreNotDense_StepAsInTorch) {
  ExpectFusedEqualsTorchs<AdamWOptions, optim::AdamWOptions>("AdamW", {.lr = 0.1});
  ExpectFusedEqualsTorchs<AdamOptions, optim::AdamOptions>("Adam", {.lr = 0.1});
  ExpectFusedEqualsTorchs<SGDOptions, optim::SGDOptions>("SGD", {.lr = 0.1});
  ExpectFusedEqualsTorchs<SGDOptions, optim::SGDOptions>("SGD with momentum",
                                                         {.lr = 0.1, .momentum = 0.9});
  ExpectFusedEqualsTorchs<AdagradOptions, optim::AdagradOptions>("Adagrad", {.lr = 0.1});
}

TEST(OptimizerHandle, ParameterWhoseElementsShareMemory_IsRefused) {
  const at::Tensor expanded = Parameter(at::zeros({1, 3}).expand({4, 3}));
  const at::Tensor windows = Parameter(at::zeros({5}).as_strided({4, 2}, {1, 1}));
  for (const at::Tensor& p : {expanded, windows}) {
    optim::SGD sgd(std::vector<at::Tensor>{p}, optim::SGDOptions(0.1));
    EXPECT_THAT(ErrorOf([&] { WrapTorchOptimizer(sgd); }), HasSubstr("share memory"));
    EXPECT_THAT(ErrorOf([&] { FusedSGD o({p}); }), HasSubstr("parameter 0"));
  }
}

// Rows 1 (twice) and 3 of `weight` get gradients.
void SetSparseGrad(const at::Tensor& weight, bool sparse) {
  weight.mutable_grad() = at::Tensor();
  const at::Tensor rows = at::tensor({1, 3, 1}, at::kLong);
  at::embedding(weight, rows, -1, false, sparse).pow(2).sum().backward();
  ASSERT_EQ(weight.grad().is_sparse(), sparse);
}

TEST(TorchOptimizer, SparseGradients_StepWhereTorchIsRightAndAreRefusedElsewhere) {
  for (const char* kind : {"SGD", "Adagrad"}) {
    const at::Tensor sparse = Parameter(at::ones({4, 2})), dense = Parameter(at::ones({4, 2}));
    const auto a = Make(kind, {sparse}), b = Make(kind, {dense});
    const auto handle = WrapTorchOptimizer(*a);
    for (int step = 0; step < 3; ++step) {
      SetSparseGrad(sparse, true);
      SetSparseGrad(dense, false);
      handle->Step();
      b->step();
    }
    ExpectNear({sparse}, {dense});
    SetSparseGrad(sparse, true);
    handle->ZeroGrad(GradZeroing::kInPlace);
    EXPECT_FALSE(sparse.grad().defined());
  }
  for (const char* kind : {"AdamW", "Adam", "SGD with momentum", "RMSprop"}) {
    SCOPED_TRACE(kind);
    const at::Tensor bias = Parameter(at::ones({2})), weight = Parameter(at::ones({4, 2}));
    const auto optimizer = Make(kind, {bias, weight});
    const auto handle = WrapTorchOptimizer(*optimizer);
    handle->set_parameter_names({"bias", "words.weight"});
    SetSparseGrad(weight, true);
    bias.mutable_grad() = at::ones({2});
    EXPECT_THAT(ErrorOf([&] { handle->Step(); }),
                HasSubstr("parameter words.weight has a sparse gradient"));
    EXPECT_TRUE(bias.equal(at::ones({2}))) << "nothing is stepped before the refusal";
  }
}

// (x - 3)^2 summed over unequal curvatures.
struct Valley {
  at::Tensor x = Parameter(at::zeros({3}));
  at::Tensor Loss() const { return (at::tensor({1.0f, 5.0f, 20.0f}) * (x - 3).pow(2)).sum(); }
};

at::Tensor StepBy(OptimizerHandle& handle, const Valley& valley, int* calls = nullptr) {
  return handle.StepWithClosure([&] {
    if (calls != nullptr) ++*calls;
    handle.ZeroGrad();
    at::Tensor loss = valley.Loss();
    loss.backward();
    return loss;
  });
}

TEST(TorchOptimizer, Lbfgs_StepsByItsClosureAndResumesExactly) {
  const auto options = optim::LBFGSOptions(0.5).max_iter(3).line_search_fn("strong_wolfe");
  Valley first, second;
  optim::LBFGS a({first.x}, options), b({second.x}, options);
  const auto handle = WrapTorchOptimizer(a), restored = WrapTorchOptimizer(b);
  EXPECT_TRUE(handle->needs_closure());
  EXPECT_THAT(ErrorOf([&] { handle->Step(); }), HasSubstr("step(closure)"));
  EXPECT_EQ(handle->CannotSave(), "");
  int calls = 0;
  const at::NoGradGuard no_grad;  // the closure has grad mode anyway
  const double at_first = StepBy(*handle, first, &calls).item<double>();
  EXPECT_GT(calls, 1);
  StepBy(*handle, first);
  EXPECT_LT(first.Loss().item<double>(), at_first / 10);

  second.x.copy_(first.x);
  restored->set_lr(0, 7);
  restored->LoadState(handle->SaveState());
  EXPECT_EQ(restored->lr(0), 0.5);
  for (int step = 0; step < 3; ++step) {
    StepBy(*handle, first);
    StepBy(*restored, second);
    EXPECT_TRUE(first.x.equal(second.x)) << step;
  }
  a.add_param_group(optim::OptimizerParamGroup({Parameter(at::zeros({1}))}));
  EXPECT_THAT(ErrorOf([&] { StepBy(*handle, first); }), HasSubstr("first parameter group only"));
}

TEST(TorchOptimizer, OthersWithAClosure_EvaluateOnceAndStep) {
  for (const char* kind : {"AdamW", "SGD", "RMSprop"}) {
    Valley ours, theirs;
    const auto a = Make(kind, {ours.x}), b = Make(kind, {theirs.x});
    const auto handle = WrapTorchOptimizer(*a);
    EXPECT_FALSE(handle->needs_closure());
    int calls = 0;
    EXPECT_EQ(StepBy(*handle, ours, &calls).item<float>(), 26 * 9);
    EXPECT_EQ(calls, 1);
    theirs.Loss().backward();
    b->step();
    ExpectNear({ours.x}, {theirs.x});
  }
}

TEST(OptimizerHandle, StepInsideAnAutocastScope_IsSeenByTheNextForward) {
  const auto train = [](const at::Tensor& weight, OptimizerHandle& handle) {
    const AutocastGuard whole_loop(MixedPrecision::kBf16, c10::kCPU, AutocastOptions());
    const auto forward = [&] { return at::linear(at::ones({1, 2}), weight).sum(); };
    const double before = forward().item<double>();
    forward().backward();
    handle.Step();
    return before - forward().item<double>();
  };
  const at::Tensor a = Parameter(at::ones({1, 2})), b = Parameter(at::ones({1, 2}));
  optim::SGD sgd(std::vector<at::Tensor>{a}, optim::SGDOptions(0.5));
  FusedSGD fused({b}, {.lr = 0.5});
  EXPECT_EQ(train(a, *WrapTorchOptimizer(sgd)), 1);
  EXPECT_EQ(train(b, fused), 1);
}

// A user's optimizer: steps by the sign, and counts the steps.
struct SignOptions : optim::OptimizerCloneableOptions<SignOptions> {
  double lr = 0.1;
  double get_lr() const override { return lr; }
  void set_lr(const double value) override { lr = value; }
};

class SignDescent : public optim::Optimizer {
 public:
  explicit SignDescent(std::vector<at::Tensor> params)
      : Optimizer(std::move(params), std::make_unique<SignOptions>()) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    ++steps;
    for (const auto& group : param_groups()) {
      for (const at::Tensor& p : group.params()) {
        p.sub_(p.grad().sign(), group.options().get_lr() / static_cast<double>(steps));
      }
    }
    return {};
  }
  int64_t steps = 0;
};

class SavedSignDescent : public SignDescent {
 public:
  using SignDescent::SignDescent;
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("steps", at::full({}, steps, at::kLong));
  }
  void load(torch::serialize::InputArchive& archive) override {
    at::Tensor read;
    archive.read("steps", read);
    steps = read.item<int64_t>();
  }
};

TEST(TorchOptimizer, UsersClass_IsSavedByItsOwnSaveOrSaysThatItCannotBe) {
  const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({2}));
  SignDescent forgetful({a});
  const auto cannot = WrapTorchOptimizer(forgetful);
  EXPECT_THAT(cannot->CannotSave(), HasSubstr("override both"));
  EXPECT_THAT(ErrorOf([&] { cannot->SaveState(); }), HasSubstr("override both"));

  SavedSignDescent first({a}), second({b});
  const auto handle = WrapTorchOptimizer(first), restored = WrapTorchOptimizer(second);
  EXPECT_EQ(handle->CannotSave(), "");
  a.mutable_grad() = at::ones({2});
  handle->Step();
  handle->Step();
  handle->set_lr(0, 0.025);
  restored->LoadState(handle->SaveState());
  EXPECT_EQ(second.steps, 2);
  EXPECT_EQ(restored->lr(0), 0.025);

  // Without a rate that could be asked for.
  for (SavedSignDescent* optimizer : {&first, &second}) {
    optimizer->param_groups()[0].set_options(std::make_unique<optim::OptimizerOptions>());
  }
  second.steps = 0;
  restored->LoadState(handle->SaveState());
  EXPECT_EQ(second.steps, 2);
}

// A user's Adam with additional state.
class CountingAdam : public optim::Adam {
 public:
  using Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override {
    ++steps;
    return Adam::step(std::move(closure));
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    Adam::save(archive);
    archive.write("steps", at::full({}, steps, at::kLong));
  }
  void load(torch::serialize::InputArchive& archive) override {
    Adam::load(archive);
    at::Tensor read;
    archive.read("steps", read);
    steps = read.item<int64_t>();
  }
  int64_t steps = 0;
};

TEST(TorchOptimizer, ClassDerivedFromAdam_KeepsWhatItAdds) {
  const at::Tensor a = Parameter(at::ones({2})), b = Parameter(at::ones({2}));
  CountingAdam first({a}), second({b});
  const auto handle = WrapTorchOptimizer(first), restored = WrapTorchOptimizer(second);
  const auto step = [](OptimizerHandle& h, double gradient) {
    h.parameters()[0].mutable_grad() = at::full({2}, gradient);
    h.Step();
  };
  for (int i = 0; i < 3; ++i) step(*handle, i);
  {
    const at::NoGradGuard no_grad;
    b.copy_(a);
  }
  restored->LoadState(handle->SaveState());
  EXPECT_EQ(second.steps, 3);
  step(*handle, 5);
  step(*restored, 5);
  EXPECT_TRUE(a.equal(b));
}

}  // namespace
}  // namespace muster
