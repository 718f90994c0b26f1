#include "worker/train/torch_optimizer.h"

#include <functional>
#include <typeinfo>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_fused_adam.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros_like.h"
#include "c10/util/Exception.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"
#include "worker/train/tensor_ranges.h"

namespace muster {
namespace {

namespace optim = torch::optim;

using Row = std::vector<double>;

double Bit(bool b) { return b ? 1 : 0; }
double One(const PlainState& groups, int64_t group, const char* name) {
  return GroupRow(groups, group, name, 1)[0];
}

// What differs between the kinds: names and access. A slot is undefined if the optimizer has not
// made it.
struct Kind {
  const char* name;
  std::vector<std::string> slots;  // without "step"
  bool counts_steps;
  std::function<PlainState(const optim::OptimizerOptions&)> save_group;
  // Checks, and with the last argument true sets.
  std::function<void(optim::OptimizerOptions&, const PlainState&, int64_t, bool)> load_group;
  std::function<int64_t(const optim::OptimizerParamState&)> step;
  std::function<at::Tensor(const optim::OptimizerParamState&, size_t)> slot;
  std::function<std::unique_ptr<optim::OptimizerParamState>(int64_t, std::vector<at::Tensor>)> make;
  std::function<double(const optim::OptimizerOptions&)> momentum;
  std::function<void(optim::OptimizerOptions&, double)> set_momentum;
  // Whether slot `i` must be there in a saved state of this group.
  std::function<bool(const optim::OptimizerOptions&, size_t)> needs;
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
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g, bool commit) {
            Options o = options(any);
            const Row& betas = GroupRow(state, g, "betas", 2);
            o.lr(One(state, g, "lr")).betas({betas[0], betas[1]}).eps(One(state, g, "eps"));
            o.weight_decay(One(state, g, "weight_decay")).amsgrad(One(state, g, "amsgrad") != 0);
            if (commit) static_cast<Options&>(any) = o;
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
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g, bool commit) {
            optim::SGDOptions o = options(any);
            o.lr(One(state, g, "lr")).momentum(One(state, g, "momentum"));
            o.dampening(One(state, g, "dampening")).weight_decay(One(state, g, "weight_decay"));
            o.nesterov(One(state, g, "nesterov") != 0);
            if (commit) static_cast<optim::SGDOptions&>(any) = o;
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
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g, bool commit) {
            optim::AdagradOptions o = options(any);
            o.lr(One(state, g, "lr")).lr_decay(One(state, g, "lr_decay"));
            o.weight_decay(One(state, g, "weight_decay")).eps(One(state, g, "eps"));
            o.initial_accumulator_value(One(state, g, "initial_accumulator_value"));
            if (commit) static_cast<optim::AdagradOptions&>(any) = o;
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
          [options](optim::OptimizerOptions& any, const PlainState& state, int64_t g, bool commit) {
            optim::RMSpropOptions o = options(any);
            o.lr(One(state, g, "lr")).alpha(One(state, g, "alpha")).eps(One(state, g, "eps"));
            o.weight_decay(One(state, g, "weight_decay")).momentum(One(state, g, "momentum"));
            o.centered(One(state, g, "centered") != 0);
            if (commit) static_cast<optim::RMSpropOptions&>(any) = o;
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
      : optimizer_(optimizer) {
    std::vector<at::Tensor> parameters;
    for (const auto& group : optimizer.param_groups()) {
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    }
    SetParameters(std::move(parameters));
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
    if (options.fused) {
      const std::type_info& type = typeid(optimizer);
      if (type == typeid(optim::AdamW)) fused_ = Fused::kAdamW;
      if (type == typeid(optim::Adam)) fused_ = Fused::kAdam;
      if (type == typeid(optim::SGD)) fused_ = Fused::kSgd;
    }
  }

  void Step() override {
    TORCH_CHECK(dynamic_cast<optim::LBFGS*>(&optimizer_) == nullptr,
                "LBFGS evaluates the loss several times in a step and cannot be prepared");
    if (!StepFused()) optimizer_.step();
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

  OptimizerState SaveState() const override {
    CheckKnown();
    OptimizerState saved;
    size_t i = 0;
    for (int64_t g = 0; g < num_groups(); ++g) {
      for (auto& [name, row] : kind_->save_group(group_options(g))) {
        saved.groups[std::to_string(g) + "." + name] = row;
      }
      for (const at::Tensor& param : optimizer_.param_groups()[g].params()) {
        const std::string& name = parameter_names()[i++];
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

  void LoadState(const OptimizerState& state) override {
    CheckKnown();
    at::NoGradGuard no_grad;
    std::vector<std::string> known = kind_->slots;
    if (kind_->counts_steps) known.push_back("step");
    const auto by_parameter = Slots(state, known);
    std::vector<std::unique_ptr<optim::OptimizerParamState>> loaded(parameters().size());
    size_t i = 0;
    for (int64_t g = 0; g < num_groups(); ++g) {
      kind_->load_group(group_options(g), state.groups, g, /*commit=*/false);
      for (const at::Tensor& param : optimizer_.param_groups()[g].params()) {
        const auto& slots = by_parameter[i];
        const std::string& name = parameter_names()[i];
        if (!slots.empty()) {
          int64_t step = 0;
          if (kind_->counts_steps) {
            TORCH_CHECK(slots.count("step"), "optimizer state '", name, ".step' is missing");
            step = static_cast<int64_t>(slots.at("step").to(at::kCPU, at::kDouble).item<double>());
          }
          std::vector<at::Tensor> tensors(kind_->slots.size());
          for (size_t s = 0; s < kind_->slots.size(); ++s) {
            const auto it = slots.find(kind_->slots[s]);
            if (it != slots.end()) {
              tensors[s] = at::empty_like(param).detach().copy_(it->second);
            } else {
              TORCH_CHECK(!kind_->needs(group_options(g), s), "optimizer state '", name, ".",
                          kind_->slots[s], "' is missing");
            }
          }
          loaded[i] = kind_->make(step, std::move(tensors));
        }
        ++i;
      }
    }
    for (int64_t g = 0; g < num_groups(); ++g) {
      kind_->load_group(group_options(g), state.groups, g, /*commit=*/true);
    }
    for (size_t k = 0; k < loaded.size(); ++k) {
      void* key = parameters()[k].unsafeGetTensorImpl();
      if (loaded[k] != nullptr) {
        optimizer_.state()[key] = std::move(loaded[k]);
      } else {
        optimizer_.state().erase(key);
      }
    }
  }

 private:
  enum class Fused { kNo, kAdamW, kAdam, kSgd };

  optim::Optimizer& optimizer_;
  std::optional<Kind> kind_;
  Fused fused_ = Fused::kNo;

  const optim::OptimizerOptions& group_options(int64_t g) const {
    return std::as_const(optimizer_).param_groups()[g].options();
  }
  optim::OptimizerOptions& group_options(int64_t g) {
    return optimizer_.param_groups()[g].options();
  }

  void CheckKnown() const {
    TORCH_CHECK(
        kind_.has_value(),
        "the state of this optimizer is not known to Muster, so it cannot be saved or loaded: "
        "AdamW, Adam, SGD, Adagrad and RMSprop can");
  }

  // Takes the step by fused kernels; false if some parameter is not of the kind that they take.
  bool StepFused() {
    if (fused_ == Fused::kNo) return false;
    for (const at::Tensor& param : parameters()) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) continue;
      if (grad.layout() != at::kStrided || grad.scalar_type() != param.scalar_type() ||
          !param.is_floating_point() || grad.strides() != param.strides()) {
        return false;
      }
    }
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
      if (entry == nullptr) {
        auto fresh = std::make_unique<ParamState>();
        fresh->exp_avg(at::zeros_like(param).detach());
        fresh->exp_avg_sq(at::zeros_like(param).detach());
        if (o.amsgrad()) fresh->max_exp_avg_sq(at::zeros_like(param).detach());
        entry = std::move(fresh);
      }
      auto& state = static_cast<ParamState&>(*entry);
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
      ForTensorRanges(chunk.params, [&](int64_t first, int64_t last) {
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
        if (fresh) state.momentum_buffer(at::zeros_like(param).detach());
        buffer = state.momentum_buffer();
      }
      Chunk& chunk = ChunkFor(chunks, param, fresh ? 0 : 1);
      chunk.params.push_back(param);
      chunk.grads.push_back(param.grad());
      if (buffer.defined()) chunk.first.push_back(buffer);
    }
    for (Chunk& chunk : chunks) {
      const bool is_first_step = chunk.step == 0 && o.momentum() != 0;
      ForTensorRanges(chunk.params, [&](int64_t first, int64_t last) {
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

}  // namespace muster
