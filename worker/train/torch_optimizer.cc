#include "worker/train/torch_optimizer.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <typeindex>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_fused_adam.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/stack.h"
#include "c10/util/Exception.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "torch/serialize/archive.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/parallel/weight_changes.h"
#include "worker/train/guard.h"
#include "worker/train/slot_layout.h"
#include "worker/train/slot_memory.h"
#include "worker/train/tensor_ranges.h"

namespace muster {
namespace {

namespace optim = torch::optim;

using Row = std::vector<double>;

double Bit(bool b) { return b ? 1 : 0; }
double One(const PlainState& groups, int64_t group, const char* name) {
  return GroupRow(groups, group, name, 1)[0];
}

// LibTorch's optimizers cannot maximize, and would minimize instead.
void CheckMinimizes(const PlainState& groups, int64_t group) {
  TORCH_CHECK(One(groups, group, "maximize") == 0, "parameter group ", group,
              " was saved with maximize, which LibTorch's optimizers do not have: load it into "
              "muster::FusedAdamW, FusedAdam, FusedSGD or FusedAdagrad");
}

// The differences between the kinds: names and access. A slot is undefined if the optimizer has not
// made it.
struct Kind {
  const char* name;
  std::vector<std::string> slots;  // without "step"
  bool counts_steps;
  std::function<PlainState(const optim::OptimizerOptions&)> save_group;
  // Throws before it changes anything.
  std::function<void(optim::OptimizerOptions&, const PlainState&, int64_t)> load_group;
  std::function<int64_t(const optim::OptimizerParamState&)> step;
  std::function<at::Tensor(const optim::OptimizerParamState&, size_t)> slot;
  std::function<std::unique_ptr<optim::OptimizerParamState>(int64_t, std::vector<at::Tensor>)> make;
  std::function<double(const optim::OptimizerOptions&)> momentum;
  std::function<void(optim::OptimizerOptions&, double)> set_momentum;
  // Whether slot `i` must be present in a saved state of this group.
  std::function<bool(const optim::OptimizerOptions&, size_t)> needs;
  // Whether torch's step is right for sparse gradients; null: never.
  std::function<bool(const optim::OptimizerOptions&)> takes_sparse = nullptr;
};

template <typename Options, typename ParamState>
Kind AdamKind(const char* name) {
  const auto options = [](const optim::OptimizerOptions& o) -> const Options& {
    return static_cast<const Options&>(o);
  };
  return Kind{
      .name = name,
      .slots = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
      .counts_steps = true,
      .save_group = [options](const optim::OptimizerOptions& any) -> PlainState {
        const Options& o = options(any);
        return {{"lr", {o.lr()}},
                {"betas", {std::get<0>(o.betas()), std::get<1>(o.betas())}},
                {"eps", {o.eps()}},
                {"weight_decay", {o.weight_decay()}},
                {"amsgrad", {Bit(o.amsgrad())}},
                {"maximize", {0}}};
      },
      .load_group =
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g) {
            CheckMinimizes(state, g);
            Options o = options(any);
            const Row& betas = GroupRow(state, g, "betas", 2);
            o.lr(One(state, g, "lr")).betas({betas[0], betas[1]}).eps(One(state, g, "eps"));
            o.weight_decay(One(state, g, "weight_decay")).amsgrad(One(state, g, "amsgrad") != 0);
            static_cast<Options&>(any) = o;
          },
      .step =
          [](const optim::OptimizerParamState& s) {
            return static_cast<const ParamState&>(s).step();
          },
      .slot =
          [](const optim::OptimizerParamState& any, size_t i) {
            const auto& s = static_cast<const ParamState&>(any);
            return i == 0 ? s.exp_avg() : i == 1 ? s.exp_avg_sq() : s.max_exp_avg_sq();
          },
      .make =
          [](int64_t step, std::vector<at::Tensor> t) {
            auto s = std::make_unique<ParamState>();
            s->step(step).exp_avg(t[0]).exp_avg_sq(t[1]).max_exp_avg_sq(t[2]);
            return s;
          },
      .momentum =
          [options](const optim::OptimizerOptions& o) { return std::get<0>(options(o).betas()); },
      .set_momentum =
          [](optim::OptimizerOptions& any, double beta) {
            auto& o = static_cast<Options&>(any);
            o.betas({beta, std::get<1>(o.betas())});
          },
      .needs = [options](const optim::OptimizerOptions& o,
                         size_t i) { return i < 2 || options(o).amsgrad(); },
  };
}

Kind SgdKind() {
  const auto options = [](const optim::OptimizerOptions& o) -> const optim::SGDOptions& {
    return static_cast<const optim::SGDOptions&>(o);
  };
  return Kind{
      .name = "SGD",
      .slots = {"momentum_buffer"},
      .counts_steps = false,
      .save_group = [options](const optim::OptimizerOptions& any) -> PlainState {
        const optim::SGDOptions& o = options(any);
        return {{"lr", {o.lr()}},
                {"momentum", {o.momentum()}},
                {"dampening", {o.dampening()}},
                {"weight_decay", {o.weight_decay()}},
                {"nesterov", {Bit(o.nesterov())}},
                {"maximize", {0}}};
      },
      .load_group =
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g) {
            CheckMinimizes(state, g);
            optim::SGDOptions o = options(any);
            o.lr(One(state, g, "lr")).momentum(One(state, g, "momentum"));
            o.dampening(One(state, g, "dampening")).weight_decay(One(state, g, "weight_decay"));
            o.nesterov(One(state, g, "nesterov") != 0);
            static_cast<optim::SGDOptions&>(any) = o;
          },
      .step = [](const optim::OptimizerParamState&) -> int64_t { return 0; },
      .slot = [](const optim::OptimizerParamState& s,
                 size_t) { return static_cast<const optim::SGDParamState&>(s).momentum_buffer(); },
      .make =
          [](int64_t, std::vector<at::Tensor> t) {
            auto s = std::make_unique<optim::SGDParamState>();
            s->momentum_buffer(t[0]);
            return s;
          },
      .momentum = [options](const optim::OptimizerOptions& o) { return options(o).momentum(); },
      .set_momentum = [](optim::OptimizerOptions& o,
                         double m) { static_cast<optim::SGDOptions&>(o).momentum(m); },
      .needs = [](const optim::OptimizerOptions&, size_t) { return true; },
      .takes_sparse =
          [options](const optim::OptimizerOptions& o) {
            return options(o).momentum() == 0 && options(o).weight_decay() == 0;
          },
  };
}

Kind AdagradKind() {
  const auto options = [](const optim::OptimizerOptions& o) -> const optim::AdagradOptions& {
    return static_cast<const optim::AdagradOptions&>(o);
  };
  return Kind{
      .name = "Adagrad",
      .slots = {"sum"},
      .counts_steps = true,
      .save_group = [options](const optim::OptimizerOptions& any) -> PlainState {
        const optim::AdagradOptions& o = options(any);
        return {{"lr", {o.lr()}},
                {"lr_decay", {o.lr_decay()}},
                {"weight_decay", {o.weight_decay()}},
                {"initial_accumulator_value", {o.initial_accumulator_value()}},
                {"eps", {o.eps()}},
                {"maximize", {0}}};
      },
      .load_group =
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g) {
            CheckMinimizes(state, g);
            optim::AdagradOptions o = options(any);
            o.lr(One(state, g, "lr")).lr_decay(One(state, g, "lr_decay"));
            o.weight_decay(One(state, g, "weight_decay")).eps(One(state, g, "eps"));
            o.initial_accumulator_value(One(state, g, "initial_accumulator_value"));
            static_cast<optim::AdagradOptions&>(any) = o;
          },
      .step =
          [](const optim::OptimizerParamState& s) {
            return static_cast<const optim::AdagradParamState&>(s).step();
          },
      .slot = [](const optim::OptimizerParamState& s,
                 size_t) { return static_cast<const optim::AdagradParamState&>(s).sum(); },
      .make =
          [](int64_t step, std::vector<at::Tensor> t) {
            auto s = std::make_unique<optim::AdagradParamState>();
            s->step(step).sum(t[0]);
            return s;
          },
      .momentum = nullptr,
      .set_momentum = nullptr,
      .needs = [](const optim::OptimizerOptions&, size_t) { return true; },
      .takes_sparse =
          [options](const optim::OptimizerOptions& o) { return options(o).weight_decay() == 0; },
  };
}

Kind RmspropKind() {
  const auto options = [](const optim::OptimizerOptions& o) -> const optim::RMSpropOptions& {
    return static_cast<const optim::RMSpropOptions&>(o);
  };
  return Kind{
      .name = "RMSprop",
      .slots = {"square_avg", "momentum_buffer", "grad_avg"},
      .counts_steps = true,
      .save_group = [options](const optim::OptimizerOptions& any) -> PlainState {
        const optim::RMSpropOptions& o = options(any);
        return {{"lr", {o.lr()}},
                {"alpha", {o.alpha()}},
                {"eps", {o.eps()}},
                {"weight_decay", {o.weight_decay()}},
                {"momentum", {o.momentum()}},
                {"centered", {Bit(o.centered())}}};
      },
      .load_group =
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g) {
            optim::RMSpropOptions o = options(any);
            o.lr(One(state, g, "lr")).alpha(One(state, g, "alpha")).eps(One(state, g, "eps"));
            o.weight_decay(One(state, g, "weight_decay")).momentum(One(state, g, "momentum"));
            o.centered(One(state, g, "centered") != 0);
            static_cast<optim::RMSpropOptions&>(any) = o;
          },
      .step =
          [](const optim::OptimizerParamState& s) {
            return static_cast<const optim::RMSpropParamState&>(s).step();
          },
      .slot =
          [](const optim::OptimizerParamState& any, size_t i) {
            const auto& s = static_cast<const optim::RMSpropParamState&>(any);
            return i == 0 ? s.square_avg() : i == 1 ? s.momentum_buffer() : s.grad_avg();
          },
      .make =
          [](int64_t step, std::vector<at::Tensor> t) {
            auto s = std::make_unique<optim::RMSpropParamState>();
            s->step(step).square_avg(t[0]).momentum_buffer(t[1]).grad_avg(t[2]);
            return s;
          },
      .momentum = [options](const optim::OptimizerOptions& o) { return options(o).momentum(); },
      .set_momentum = [](optim::OptimizerOptions& o,
                         double m) { static_cast<optim::RMSpropOptions&>(o).momentum(m); },
      .needs =
          [options](const optim::OptimizerOptions& o, size_t i) {
            return i == 0 || (i == 1 ? options(o).momentum() > 0 : options(o).centered());
          },
  };
}

// LBFGS has one state for all its parameters, which it treats as one long vector: tensors under the
// name of the first parameter, numbers next to the options. Its own save() fails on the undefined
// entries of `al`, which is scratch and not needed.
constexpr const char* kLbfgsVectors[] = {"d", "prev_flat_grad"};   // [n]
constexpr const char* kLbfgsHistory[] = {"old_dirs", "old_stps"};  // [history, n]

void SaveLbfgs(const optim::LBFGS& lbfgs, const std::string& parameter, OptimizerState* saved) {
  const auto& o = static_cast<const optim::LBFGSOptions&>(lbfgs.param_groups()[0].options());
  const auto number = [](auto value) { return Row{static_cast<double>(value)}; };
  PlainState& rows = saved->groups;
  rows["0.lr"] = {o.lr()};
  rows["0.max_iter"] = number(o.max_iter());
  rows["0.max_eval"] = o.max_eval().has_value() ? number(*o.max_eval()) : Row{};
  rows["0.tolerance_grad"] = {o.tolerance_grad()};
  rows["0.tolerance_change"] = {o.tolerance_change()};
  rows["0.history_size"] = number(o.history_size());
  rows["0.strong_wolfe"] = {Bit(o.line_search_fn().has_value())};
  if (lbfgs.state().empty()) return;
  const auto& s = static_cast<const optim::LBFGSParamState&>(*lbfgs.state().begin()->second);
  rows["0.func_evals"] = number(s.func_evals());
  rows["0.n_iter"] = number(s.n_iter());
  rows["0.t"] = {s.t()};
  rows["0.prev_loss"] = {s.prev_loss()};
  const auto put = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) saved->tensors[parameter + "." + name] = tensor;
  };
  put("d", s.d());
  put("prev_flat_grad", s.prev_flat_grad());
  put("H_diag", s.H_diag());
  const auto put_list = [&](const char* name, const std::deque<at::Tensor>& list) {
    if (!list.empty()) put(name, at::stack(std::vector<at::Tensor>(list.begin(), list.end())));
  };
  put_list("old_dirs", s.old_dirs());
  put_list("old_stps", s.old_stps());
  put_list("ro", s.ro());
}

struct LoadedLbfgs {
  optim::LBFGSOptions options;
  std::unique_ptr<optim::LBFGSParamState> state;  // null: the optimizer has not stepped
};

// Reads a state, with copies of the tensors.
LoadedLbfgs ReadLbfgs(const OptimizerState& saved, const std::string& parameter,
                      const optim::LBFGS& lbfgs) {
  const auto& group = lbfgs.param_groups()[0];
  optim::LBFGSOptions o = static_cast<const optim::LBFGSOptions&>(group.options());
  o.lr(One(saved.groups, 0, "lr")).max_iter(static_cast<int64_t>(One(saved.groups, 0, "max_iter")));
  o.tolerance_grad(One(saved.groups, 0, "tolerance_grad"));
  o.tolerance_change(One(saved.groups, 0, "tolerance_change"));
  o.history_size(static_cast<int64_t>(One(saved.groups, 0, "history_size")));
  const auto max_eval = saved.groups.find("0.max_eval");
  o.max_eval(std::nullopt);
  if (max_eval != saved.groups.end() && !max_eval->second.empty()) {
    o.max_eval(static_cast<int64_t>(max_eval->second[0]));
  }
  o.line_search_fn(std::nullopt);
  if (One(saved.groups, 0, "strong_wolfe") != 0) o.line_search_fn("strong_wolfe");

  std::unique_ptr<optim::LBFGSParamState> state;
  if (saved.groups.count("0.n_iter") > 0) {
    state = std::make_unique<optim::LBFGSParamState>();
    state->func_evals(static_cast<int64_t>(One(saved.groups, 0, "func_evals")));
    state->n_iter(static_cast<int64_t>(One(saved.groups, 0, "n_iter")));
    state->t(One(saved.groups, 0, "t")).prev_loss(One(saved.groups, 0, "prev_loss"));
  }
  TORCH_CHECK(!group.params().empty(), "LBFGS has no parameters");
  const at::Tensor& first = group.params()[0];
  int64_t n = 0;
  for (const at::Tensor& param : group.params()) n += param.numel();
  int64_t history = -1;
  for (const auto& [name, tensor] : saved.tensors) {
    const bool ours =
        state != nullptr && name.compare(0, parameter.size() + 1, parameter + ".") == 0;
    const std::string slot = ours ? name.substr(parameter.size() + 1) : "";
    const auto among = [&slot](const auto& names) {
      return std::find(std::begin(names), std::end(names), slot) != std::end(names);
    };
    const bool is_list = among(kLbfgsHistory) || slot == "ro";
    TORCH_CHECK(is_list || among(kLbfgsVectors) || slot == "H_diag", "optimizer state '", name,
                "' is of no use to LBFGS: was it saved by another optimizer?");
    const bool long_ones = among(kLbfgsHistory) || among(kLbfgsVectors);
    TORCH_CHECK(!long_ones || (tensor.dim() > 0 && tensor.size(-1) == n), "optimizer state '", name,
                "' has shape ", tensor.sizes(), " and the parameters ", n, " elements");
    const at::Tensor copy = tensor.to(first.device(), first.scalar_type(), false, /*copy=*/true);
    if (slot == "d") state->d(copy);
    if (slot == "prev_flat_grad") state->prev_flat_grad(copy);
    if (slot == "H_diag") state->H_diag(copy);
    if (!is_list) continue;
    TORCH_CHECK(history == -1 || history == tensor.size(0), "optimizer state '", name, "' holds ",
                tensor.size(0), " steps and others hold ", history);
    history = tensor.size(0);
    std::deque<at::Tensor> list;
    for (const at::Tensor& entry : copy.unbind()) list.push_back(entry.clone());
    if (slot == "old_dirs") state->old_dirs(std::move(list));
    if (slot == "old_stps") state->old_stps(std::move(list));
    if (slot == "ro") state->ro(std::move(list));
  }
  return {.options = std::move(o), .state = std::move(state)};
}

void LoadLbfgs(const OptimizerState& saved, const std::string& parameter, optim::LBFGS* lbfgs) {
  LoadedLbfgs loaded = ReadLbfgs(saved, parameter, *lbfgs);
  auto& group = lbfgs->param_groups()[0];
  static_cast<optim::LBFGSOptions&>(group.options()) = loaded.options;
  lbfgs->state().clear();
  if (loaded.state == nullptr) return;
  lbfgs->state()[group.params()[0].unsafeGetTensorImpl()] = std::move(loaded.state);
}

// Lists for one kernel call.
struct Chunk {
  int64_t step = 0;  // before this update
  bool small = false;
  std::vector<at::Tensor> params, grads, first, second, third;
};

at::TensorList Range(const std::vector<at::Tensor>& list, int64_t first, int64_t last) {
  return list.empty() ? at::TensorList() : at::TensorList(list).slice(first, last - first);
}

class TorchOptimizerHandle : public OptimizerHandle {
 public:
  TorchOptimizerHandle(optim::Optimizer& optimizer, const TorchOptimizerOptions& options)
      : optimizer_(optimizer), type_(typeid(optimizer)), is_lbfgs_(IsLbfgs(optimizer)) {
    SetParameters(CurrentParameters(optimizer));
    if (dynamic_cast<optim::AdamW*>(&optimizer)) {
      kind_ = AdamKind<optim::AdamWOptions, optim::AdamWParamState>("AdamW");
    } else if (dynamic_cast<optim::Adam*>(&optimizer)) {
      kind_ = AdamKind<optim::AdamOptions, optim::AdamParamState>("Adam");
    } else if (dynamic_cast<optim::SGD*>(&optimizer)) {
      kind_ = SgdKind();
    } else if (dynamic_cast<optim::Adagrad*>(&optimizer)) {
      kind_ = AdagradKind();
    } else if (dynamic_cast<optim::RMSprop*>(&optimizer)) {
      kind_ = RmspropKind();
    }
    is_torchs_own_ = type_ == typeid(optim::AdamW) || type_ == typeid(optim::Adam) ||
                     type_ == typeid(optim::SGD) || type_ == typeid(optim::Adagrad) ||
                     type_ == typeid(optim::RMSprop);
    if (options.fused) {
      if (type_ == typeid(optim::AdamW)) fused_ = Fused::kAdamW;
      if (type_ == typeid(optim::Adam)) fused_ = Fused::kAdam;
      if (type_ == typeid(optim::SGD)) fused_ = Fused::kSgd;
    }
  }

  bool Wraps(const optim::Optimizer& optimizer) const override {
    if (&optimizer != &optimizer_ || type_ != typeid(optimizer)) return false;
    if (made_state_ && optimizer.state().empty()) return false;
    std::unordered_set<const void*> held;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& param : group.params()) held.insert(param.unsafeGetTensorImpl());
    }
    for (const at::Tensor& param : seen_parameters()) {
      if (held.count(param.unsafeGetTensorImpl()) == 0) return false;
    }
    return true;
  }

  void Step() override {
    TORCH_CHECK(!is_lbfgs_,
                "LBFGS evaluates the loss several times in a step: pass a closure that zeroes the "
                "gradients, runs forward and backward and returns the loss to step(closure)");
    Refresh();
    if (!StepFused()) {
      MakeAdagradState();
      optimizer_.step();
    }
    std::vector<at::Tensor> stepped;
    for (const at::Tensor& param : seen_parameters()) {
      // A user's class may change parameters without gradients, too.
      if (!is_torchs_own_ || param.grad().defined()) stepped.push_back(param);
    }
    NoteStep(stepped);
    made_state_ = made_state_ || !optimizer_.state().empty();
  }

  // SGD writes `.data()`; a user's classes may do so as well.
  bool leaves_no_version() const { return !is_torchs_own_ || type_ == typeid(optim::SGD); }

  bool needs_closure() const override { return is_lbfgs_; }
  at::Tensor StepWithClosure(const std::function<at::Tensor()>& closure) override {
    // LibTorch's optimizers evaluate once; Step() checks the gradients and uses the fused kernels.
    if (is_torchs_own_) return OptimizerHandle::StepWithClosure(closure);
    Refresh();
    TORCH_CHECK(!is_lbfgs_ || num_groups() == 1,
                "LBFGS steps its first parameter group only and has ", num_groups(),
                ": pass all parameters to its constructor");
    MakeAdagradState();
    bool evaluated = false;
    at::Tensor loss = optimizer_.step([&] {
      // Before the first evaluation nothing has changed the values.
      if (std::exchange(evaluated, true)) NoteStep(seen_parameters());
      return closure();
    });
    NoteStep(seen_parameters());
    made_state_ = made_state_ || !optimizer_.state().empty();
    return loss;
  }

  int64_t num_groups() const override {
    return static_cast<int64_t>(optimizer_.param_groups().size());
  }
  double lr(int64_t g) const override { return group_options(g).get_lr(); }
  void set_lr(int64_t g, double lr) override { group_options(g).set_lr(lr); }
  std::optional<double> momentum(int64_t g) const override {
    if (!kind_.has_value() || kind_->momentum == nullptr) return std::nullopt;
    return kind_->momentum(group_options(g));
  }
  void set_momentum(int64_t g, double m) override {
    if (kind_.has_value() && kind_->set_momentum != nullptr)
      kind_->set_momentum(group_options(g), m);
  }

  void ReplaceParameters(const std::function<at::Tensor(const at::Tensor&)>& replacement) override {
    if (!is_torchs_own_) return OptimizerHandle::ReplaceParameters(replacement);
    Refresh();
    // Adagrad makes its state in the constructor.
    const bool stepped =
        made_state_ || (type_ != typeid(optim::Adagrad) && !optimizer_.state().empty());
    std::vector<std::vector<at::Tensor>> groups;
    std::vector<void*> left;
    for (const auto& group : std::as_const(optimizer_).param_groups()) {
      groups.push_back(group.params());
      for (at::Tensor& param : groups.back()) {
        const at::Tensor other = replacement(param);
        if (!other.defined()) continue;
        TORCH_CHECK(!stepped,
                    "the optimizer has state already: shard the model (prepare() it) "
                    "before the optimizer's first step");
        left.push_back(param.unsafeGetTensorImpl());
        param = other;
      }
    }
    for (void* param : left) optimizer_.state().erase(param);
    for (size_t g = 0; g < groups.size(); ++g) {
      optimizer_.param_groups()[g].params() = std::move(groups[g]);
    }
    ExchangeParameters(CurrentParameters(optimizer_));
  }

  std::string CannotSave() const override {
    if (is_torchs_own_ || is_plain_lbfgs()) return "";
    if (!archives_.has_value()) {
      // Optimizer::save() writes nothing if a class does not override it.
      try {
        const at::Tensor bytes = SaveArchive();
        torch::serialize::InputArchive archive;
        LoadArchive(bytes, &archive);
        archives_ = !archive.keys().empty();
      } catch (const c10::Error& e) {
        return std::string("the save() of this optimizer's class throws: ") +
               e.what_without_backtrace();
      }
    }
    if (*archives_) return "";
    return "this optimizer's class does not override save() and load(), so its state cannot be "
           "saved: override both, or use LibTorch's AdamW, Adam, SGD, Adagrad, RMSprop or LBFGS";
  }

  PlainState SaveGroups() const override {
    PlainState groups;
    PutGroupSizes(GroupSizes(), &groups);
    for (int64_t g = 0; g < num_groups(); ++g) {
      const std::string group = std::to_string(g) + ".";
      if (!is_torchs_own_) {
        Row& row = groups[group + "lr"];
        if (HasLr(g)) row = {lr(g)};
        continue;
      }
      for (auto& [name, row] : kind_->save_group(group_options(g))) groups[group + name] = row;
    }
    return groups;
  }

  OptimizerState SaveState() const override {
    Refresh();
    const std::string problem = CannotSave();
    TORCH_CHECK(problem.empty(), problem);
    OptimizerState saved;
    saved.groups = SaveGroups();
    if (is_plain_lbfgs()) {
      SaveLbfgs(static_cast<const optim::LBFGS&>(optimizer_), parameter_names().at(0), &saved);
      return saved;
    }
    if (!is_torchs_own_) {
      saved.tensors[kArchive] = SaveArchive();
      return saved;
    }
    const std::vector<std::string>& names = parameter_names();
    size_t i = 0;
    for (int64_t g = 0; g < num_groups(); ++g) {
      for (const at::Tensor& param : optimizer_.param_groups()[g].params()) {
        const std::string& name = names[i++];
        const auto it = optimizer_.state().find(param.unsafeGetTensorImpl());
        if (it == optimizer_.state().end()) continue;
        if (kind_->counts_steps) {
          saved.tensors[name + ".step"] =
              at::full({}, static_cast<double>(kind_->step(*it->second)), at::kFloat);
        }
        for (size_t s = 0; s < kind_->slots.size(); ++s) {
          const at::Tensor slot = kind_->slot(*it->second, s);
          if (slot.defined()) saved.tensors[name + "." + kind_->slots[s]] = slot;
        }
      }
    }
    return saved;
  }

  void CheckState(const OptimizerState& state) const override {
    Refresh();
    CheckGroupSizes(state.groups, GroupSizes());
    at::NoGradGuard no_grad;
    if (is_plain_lbfgs()) {
      ReadLbfgs(state, parameter_names().at(0), static_cast<const optim::LBFGS&>(optimizer_));
    } else if (const at::Tensor* const bytes = ArchiveIn(state); bytes != nullptr) {
      torch::serialize::InputArchive archive;
      LoadArchive(*bytes, &archive);
    } else {
      CheckedSlots(state);
    }
  }

  void LoadState(const OptimizerState& state) override {
    Refresh();
    CheckGroupSizes(state.groups, GroupSizes());
    at::NoGradGuard no_grad;
    if (is_plain_lbfgs()) {
      LoadLbfgs(state, parameter_names().at(0), &static_cast<optim::LBFGS&>(optimizer_));
      return;
    }
    if (const at::Tensor* const bytes = ArchiveIn(state); bytes != nullptr) {
      LoadFromArchive(*bytes, state.groups);
      return;
    }
    const auto by_parameter = CheckedSlots(state);
    std::vector<std::unique_ptr<optim::OptimizerParamState>> loaded(seen_parameters().size());
    // `first` goes to new memory; `copies` to existing memory, only when nothing can fail any more.
    std::vector<std::pair<at::Tensor, at::Tensor>> first, copies;
    for (size_t i = 0; i < by_parameter.size(); ++i) {
      const auto& slots = by_parameter[i];
      if (slots.empty()) continue;
      const at::Tensor& param = seen_parameters()[i];
      int64_t step = 0;
      if (kind_->counts_steps) {
        step = static_cast<int64_t>(slots.at("step").to(at::kCPU, at::kDouble).item<double>());
      }
      std::vector<at::Tensor> tensors(kind_->slots.size());
      for (size_t s = 0; s < kind_->slots.size(); ++s) {
        const auto it = slots.find(kind_->slots[s]);
        if (it == slots.end()) continue;
        // The two references are the state's own and that of the tensor that slot() returns.
        tensors[s] = SlotToReuse(CurrentSlot(param, s), 2, param, it->second);
        const bool reused = tensors[s].defined();
        if (!reused) tensors[s] = NewSlot(param);
        (reused ? copies : first).emplace_back(tensors[s], it->second);
      }
      loaded[i] = kind_->make(step, std::move(tensors));
    }
    ThrowIfError(CopyTensors(first));
    for (int64_t g = 0; g < num_groups(); ++g) {
      kind_->load_group(group_options(g), state.groups, g);
    }
    ThrowIfError(CopyTensors(copies));
    for (size_t k = 0; k < loaded.size(); ++k) {
      void* key = seen_parameters()[k].unsafeGetTensorImpl();
      if (loaded[k] != nullptr) {
        optimizer_.state()[key] = std::move(loaded[k]);
      } else {
        optimizer_.state().erase(key);
      }
    }
  }

 private:
  enum class Fused { kNo, kAdamW, kAdam, kSgd };

  static constexpr const char* kArchive = "archive";

  optim::Optimizer& optimizer_;
  const std::type_index type_;
  const bool is_lbfgs_;
  bool is_torchs_own_ = false;  // exactly a kind of LibTorch's, not a class derived from one
  std::optional<Kind> kind_;
  Fused fused_ = Fused::kNo;
  bool made_state_ = false;               // in a step through this handle
  mutable std::optional<bool> archives_;  // whether save() writes something

  // The archive in the state of a class with its own save(); null: there is none.
  const at::Tensor* ArchiveIn(const OptimizerState& state) const {
    const auto archive = state.tensors.find(kArchive);
    if (archive == state.tensors.end() || is_torchs_own_) return nullptr;
    TORCH_CHECK(archive->second.scalar_type() == at::kByte,
                "optimizer state 'archive' is not bytes");
    return &archive->second;
  }

  // Returns the slots of each parameter in a state; throws unless LoadState() can take all of them.
  std::vector<std::map<std::string, at::Tensor>> CheckedSlots(const OptimizerState& state) const {
    // Derived classes were once saved as their base class.
    TORCH_CHECK(kind_.has_value(), "optimizer state 'archive' is missing");
    std::vector<std::string> known = kind_->slots;
    if (kind_->counts_steps) known.push_back("step");
    std::vector<std::map<std::string, at::Tensor>> by_parameter = Slots(state, known);
    size_t i = 0;
    for (int64_t g = 0; g < num_groups(); ++g) {
      const std::unique_ptr<optim::OptimizerOptions> copy = group_options(g).clone();
      kind_->load_group(*copy, state.groups, g);
      const size_t end = i + std::as_const(optimizer_).param_groups()[g].params().size();
      for (; i < end; ++i) {
        const auto& slots = by_parameter[i];
        if (slots.empty()) continue;
        const auto check = [&](const std::string& slot) {
          TORCH_CHECK(slots.count(slot) > 0, "optimizer state '", parameter_names()[i], ".", slot,
                      "' is missing");
        };
        if (kind_->counts_steps) check("step");
        for (size_t s = 0; s < kind_->slots.size(); ++s) {
          if (kind_->needs(group_options(g), s)) check(kind_->slots[s]);
        }
      }
    }
    return by_parameter;
  }

  at::Tensor CurrentSlot(const at::Tensor& param, size_t s) const {
    const auto it = optimizer_.state().find(param.unsafeGetTensorImpl());
    return it == optimizer_.state().end() ? at::Tensor() : kind_->slot(*it->second, s);
  }

  bool is_plain_lbfgs() const { return type_ == typeid(optim::LBFGS); }
  static bool IsLbfgs(const optim::Optimizer& optimizer) {
    return dynamic_cast<const optim::LBFGS*>(&optimizer) != nullptr;
  }

  static std::vector<at::Tensor> CurrentParameters(const optim::Optimizer& optimizer) {
    std::vector<at::Tensor> parameters;
    for (const auto& group : optimizer.param_groups()) {
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    }
    return parameters;
  }

  void Refresh() const override {
    const std::vector<at::Tensor>& seen = seen_parameters();
    size_t i = 0;
    bool same = true;
    for (const auto& group : std::as_const(optimizer_).param_groups()) {
      for (const at::Tensor& param : group.params()) {
        same = same && i < seen.size() && seen[i].is_same(param);
        ++i;
      }
    }
    if (!same || i != seen.size()) SetParameters(CurrentParameters(optimizer_));
  }

  std::vector<size_t> GroupSizes() const {
    std::vector<size_t> sizes;
    for (const auto& group : std::as_const(optimizer_).param_groups()) {
      sizes.push_back(group.params().size());
    }
    return sizes;
  }

  const optim::OptimizerOptions& group_options(int64_t g) const {
    return std::as_const(optimizer_).param_groups()[g].options();
  }
  optim::OptimizerOptions& group_options(int64_t g) {
    return optimizer_.param_groups()[g].options();
  }

  // The options of a user's class may have no get_lr().
  bool HasLr(int64_t g) const {
    try {
      lr(g);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  at::Tensor SaveArchive() const {
    torch::serialize::OutputArchive archive;
    optimizer_.save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    const std::string bytes = stream.str();
    at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr<uint8_t>(), bytes.data(), bytes.size());
    return tensor;
  }

  void LoadArchive(const at::Tensor& tensor, torch::serialize::InputArchive* archive) const {
    const at::Tensor bytes = tensor.to(at::kCPU).contiguous();
    // Saved tensors are loaded to the parameters' device, if that is the same for all, else to
    // their original devices.
    std::optional<at::Device> device;
    for (const at::Tensor& param : seen_parameters()) {
      if (device.has_value() && *device != param.device()) {
        device.reset();
        break;
      }
      device = param.device();
    }
    archive->load_from(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()),
                       static_cast<size_t>(bytes.numel()), device);
  }

  void LoadFromArchive(const at::Tensor& bytes, const PlainState& groups) {
    const auto saves_lr = [&groups](int64_t g) {
      const auto it = groups.find(std::to_string(g) + ".lr");
      return it != groups.end() && it->second.size() == 1;
    };
    torch::serialize::InputArchive archive;
    LoadArchive(bytes, &archive);
    auto old = std::move(optimizer_.state());
    optimizer_.state().clear();
    try {
      optimizer_.load(archive);
    } catch (...) {
      optimizer_.state() = std::move(old);
      throw;
    }
    for (int64_t g = 0; g < num_groups(); ++g) {
      if (saves_lr(g)) set_lr(g, One(groups, g, "lr"));
    }
  }

  // torch's Adagrad, and users' classes derived from it, make their state in the constructor and
  // have none for parameters added later.
  void MakeAdagradState() {
    if (dynamic_cast<optim::Adagrad*>(&optimizer_) == nullptr) return;
    for (auto& group : optimizer_.param_groups()) {
      const auto& o = static_cast<const optim::AdagradOptions&>(group.options());
      for (const at::Tensor& param : group.params()) {
        auto& entry = optimizer_.state()[param.unsafeGetTensorImpl()];
        if (entry != nullptr) continue;
        auto fresh = std::make_unique<optim::AdagradParamState>();
        fresh->step(0).sum(at::full_like(param, o.initial_accumulator_value()).detach());
        entry = std::move(fresh);
      }
    }
  }

  void RefuseSparse() const {
    size_t i = 0;
    for (const auto& group : std::as_const(optimizer_).param_groups()) {
      const bool takes = kind_->takes_sparse != nullptr && kind_->takes_sparse(group.options());
      for (const at::Tensor& param : group.params()) {
        const size_t number = i++;
        if (takes || !param.grad().defined() || param.grad().layout() == at::kStrided) continue;
        TORCH_CHECK(false, "parameter ", parameter_names()[number],
                    " has a sparse gradient, which ", kind_->name,
                    " does not take: use SGD without momentum and weight decay, or Adagrad without "
                    "weight decay, or make the embedding with sparse(false)");
      }
    }
  }

  // Steps by fused kernels; returns false if they do not take some parameter.
  bool StepFused() {
    if (!is_torchs_own_) return false;
    bool fits = fused_ != Fused::kNo;
    for (const at::Tensor& param : seen_parameters()) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) continue;
      if (grad.layout() != at::kStrided) {
        RefuseSparse();
        return false;
      }
      fits = fits && grad.scalar_type() == param.scalar_type() && grad.device() == param.device() &&
             param.is_floating_point() && IsDense(param) && SameLayout(grad, param);
    }
    if (!fits) return false;
    at::NoGradGuard no_grad;
    for (auto& group : optimizer_.param_groups()) {
      switch (fused_) {
        case Fused::kAdamW:
          StepAdam<optim::AdamWOptions, optim::AdamWParamState>(group, at::_fused_adamw_);
          break;
        case Fused::kAdam:
          StepAdam<optim::AdamOptions, optim::AdamParamState>(group, at::_fused_adam_);
          break;
        case Fused::kSgd:
          StepSgd(group);
          break;
        case Fused::kNo:
          break;
      }
    }
    return true;
  }

  static Chunk& ChunkFor(std::vector<Chunk>& chunks, const at::Tensor& param, int64_t step) {
    for (Chunk& chunk : chunks) {
      if (chunk.step == step && chunk.small == IsSmall(param) &&
          chunk.params[0].scalar_type() == param.scalar_type() &&
          chunk.params[0].device() == param.device()) {
        return chunk;
      }
    }
    chunks.emplace_back();
    chunks.back().step = step;
    chunks.back().small = IsSmall(param);
    return chunks.back();
  }

  using AdamKernel = void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                              at::TensorList, at::TensorList, double, double, double, double,
                              double, bool, bool, const std::optional<at::Tensor>&,
                              const std::optional<at::Tensor>&);

  template <typename Options, typename ParamState>
  void StepAdam(optim::OptimizerParamGroup& group, AdamKernel kernel) {
    const auto& o = static_cast<const Options&>(group.options());
    std::vector<Chunk> chunks;
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      auto& entry = optimizer_.state()[param.unsafeGetTensorImpl()];
      if (entry == nullptr) entry = std::make_unique<ParamState>();
      auto& state = static_cast<ParamState&>(*entry);
      if (!Fits(state.exp_avg(), param)) state.exp_avg(Refit(state.exp_avg(), param));
      if (!Fits(state.exp_avg_sq(), param)) state.exp_avg_sq(Refit(state.exp_avg_sq(), param));
      if (o.amsgrad() && !Fits(state.max_exp_avg_sq(), param)) {
        state.max_exp_avg_sq(Refit(state.max_exp_avg_sq(), param));
      }
      Chunk& chunk = ChunkFor(chunks, param, state.step());
      state.step(state.step() + 1);
      chunk.params.push_back(param);
      chunk.grads.push_back(param.grad());
      chunk.first.push_back(state.exp_avg());
      chunk.second.push_back(state.exp_avg_sq());
      if (o.amsgrad()) chunk.third.push_back(state.max_exp_avg_sq());
    }
    for (Chunk& chunk : chunks) {
      const at::Tensor step =
          at::full({}, static_cast<double>(chunk.step + 1),
                   at::TensorOptions().dtype(at::kFloat).device(chunk.params[0].device()));
      const std::vector<at::Tensor> steps(chunk.params.size(), step);
      ForTensorRanges(chunk.params, chunk.grads, [&](int64_t first, int64_t last) {
        kernel(Range(chunk.params, first, last), Range(chunk.grads, first, last),
               Range(chunk.first, first, last), Range(chunk.second, first, last),
               Range(chunk.third, first, last), Range(steps, first, last), o.lr(),
               std::get<0>(o.betas()), std::get<1>(o.betas()), o.weight_decay(), o.eps(),
               o.amsgrad(), /*maximize=*/false, std::nullopt, std::nullopt);
      });
    }
  }

  void StepSgd(optim::OptimizerParamGroup& group) {
    const auto& o = static_cast<const optim::SGDOptions&>(group.options());
    std::vector<Chunk> chunks;
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      at::Tensor buffer;
      bool fresh = false;
      if (o.momentum() != 0) {
        auto& entry = optimizer_.state()[param.unsafeGetTensorImpl()];
        if (entry == nullptr) entry = std::make_unique<optim::SGDParamState>();
        auto& state = static_cast<optim::SGDParamState&>(*entry);
        fresh = !state.momentum_buffer().defined();
        if (!Fits(state.momentum_buffer(), param)) {
          state.momentum_buffer(Refit(state.momentum_buffer(), param));
        }
        buffer = state.momentum_buffer();
      }
      Chunk& chunk = ChunkFor(chunks, param, fresh ? 0 : 1);
      chunk.params.push_back(param);
      chunk.grads.push_back(param.grad());
      if (buffer.defined()) chunk.first.push_back(buffer);
    }
    for (Chunk& chunk : chunks) {
      const bool is_first_step = chunk.step == 0 && o.momentum() != 0;
      ForTensorRanges(chunk.params, chunk.grads, [&](int64_t first, int64_t last) {
        at::_fused_sgd_(Range(chunk.params, first, last), Range(chunk.grads, first, last),
                        Range(chunk.first, first, last), o.weight_decay(), o.momentum(), o.lr(),
                        o.dampening(), o.nesterov(), /*maximize=*/false, is_first_step,
                        std::nullopt, std::nullopt);
      });
    }
  }
};

}  // namespace

std::unique_ptr<OptimizerHandle> WrapTorchOptimizer(torch::optim::Optimizer& optimizer,
                                                    const TorchOptimizerOptions& options) {
  return std::make_unique<TorchOptimizerHandle>(optimizer, options);
}

bool StepsLeaveNoVersion(const OptimizerHandle& handle) {
  const auto* const of_torch = dynamic_cast<const TorchOptimizerHandle*>(&handle);
  return of_torch != nullptr && of_torch->leaves_no_version();
}

}  // namespace muster
