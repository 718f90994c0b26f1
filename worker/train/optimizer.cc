#include "worker/train/optimizer.h"

#include <algorithm>
#include <map>
#include <type_traits>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_fused_adagrad.h"
#include "ATen/ops/_fused_adam.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/parallel/weight_changes.h"
#include "worker/train/guard.h"
#include "worker/train/offloaded_state.h"
#include "worker/train/slot_layout.h"
#include "worker/train/slot_memory.h"
#include "worker/train/tensor_ranges.h"

namespace muster {
namespace {

using Slot = FusedOptimizer::Slot;
using Lists = FusedOptimizer::Lists;
using Scalar = std::optional<at::Tensor>;

// The options of Adam and AdamW differ only in their defaults.
template <typename Options>
concept AdamLike = std::is_same_v<Options, AdamWOptions> || std::is_same_v<Options, AdamOptions>;

// Calls visit(name, field) for every option, with its name in a saved state.
template <typename Options, typename Visit>
void ForOptions(Options& o, const Visit& visit) {
  using O = std::remove_const_t<Options>;
  visit("lr", o.lr);
  visit("weight_decay", o.weight_decay);
  visit("maximize", o.maximize);
  if constexpr (AdamLike<O>) {
    visit("betas", o.betas);
    visit("eps", o.eps);
    visit("amsgrad", o.amsgrad);
  } else if constexpr (std::is_same_v<O, SGDOptions>) {
    visit("momentum", o.momentum);
    visit("dampening", o.dampening);
    visit("nesterov", o.nesterov);
  } else {
    visit("lr_decay", o.lr_decay);
    visit("initial_accumulator_value", o.initial_accumulator_value);
    visit("eps", o.eps);
  }
}

void Check(const AdamLike auto& o) {
  TORCH_CHECK(o.eps >= 0, "eps must not be negative, got ", o.eps);
  for (const double beta : o.betas) {
    TORCH_CHECK(beta >= 0 && beta < 1, "betas must be in [0, 1), got ", beta);
  }
}
void Check(const SGDOptions& o) {
  TORCH_CHECK(o.momentum >= 0, "momentum must not be negative, got ", o.momentum);
  TORCH_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0),
              "nesterov needs a momentum above 0 and no dampening");
}
void Check(const AdagradOptions& o) {
  TORCH_CHECK(o.lr_decay >= 0, "lr_decay must not be negative, got ", o.lr_decay);
  TORCH_CHECK(o.initial_accumulator_value >= 0,
              "initial_accumulator_value must not be negative, got ", o.initial_accumulator_value);
  TORCH_CHECK(o.eps >= 0, "eps must not be negative, got ", o.eps);
}

template <typename Options>
void CheckOptions(const Options& o) {
  TORCH_CHECK(o.lr >= 0, "lr must not be negative, got ", o.lr);
  TORCH_CHECK(o.weight_decay >= 0, "weight_decay must not be negative, got ", o.weight_decay);
  Check(o);
}

// A state of one kind is of no use to an optimizer of another.
void CheckSameState(const AdamLike auto& saved, const AdamLike auto& here, int64_t group) {
  TORCH_CHECK(saved.amsgrad == here.amsgrad, "parameter group ", group, " was saved with amsgrad ",
              saved.amsgrad ? "on" : "off", " and this optimizer has it ",
              here.amsgrad ? "on" : "off");
}
void CheckSameState(const SGDOptions& saved, const SGDOptions& here, int64_t group) {
  TORCH_CHECK((saved.momentum != 0) == (here.momentum != 0), "parameter group ", group,
              " was saved with momentum ", saved.momentum, " and this optimizer has ",
              here.momentum);
}
void CheckSameState(const AdagradOptions&, const AdagradOptions&, int64_t) {}

std::vector<Slot> SlotsOf(const AdamLike auto& o) {
  std::vector<Slot> slots = {{"exp_avg", 0}, {"exp_avg_sq", 0}};
  if (o.amsgrad) slots.push_back({"max_exp_avg_sq", 0});
  return slots;
}
std::vector<Slot> SlotsOf(const SGDOptions& o) {
  if (o.momentum == 0) return {};
  return {{"momentum_buffer", 0}};
}
std::vector<Slot> SlotsOf(const AdagradOptions& o) {
  return {{"sum", o.initial_accumulator_value}};
}

void CallKernel(const AdamLike auto& o, const Lists& lists, const Scalar& grad_scale,
                const Scalar& found_inf) {
  const auto call = [&](auto kernel) {
    kernel(lists.params, lists.grads, lists.slots[0], lists.slots[1], lists.slots[2], lists.steps,
           o.lr, o.betas[0], o.betas[1], o.weight_decay, o.eps, o.amsgrad, o.maximize, grad_scale,
           found_inf);
  };
  // A lambda, because the kernels are overloaded.
  if constexpr (std::is_same_v<decltype(o), const AdamWOptions&>) {
    call([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    call([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}
void CallKernel(const SGDOptions& o, const Lists& lists, const Scalar& grad_scale,
                const Scalar& found_inf) {
  // From a buffer of zeros the first step is right, except that it must not apply dampening.
  const bool is_first_step = lists.fresh && o.momentum != 0 && o.dampening != 0;
  at::_fused_sgd_(lists.params, lists.grads, lists.slots[0], o.weight_decay, o.momentum, o.lr,
                  o.dampening, o.nesterov, o.maximize, is_first_step, grad_scale, found_inf);
}
void CallKernel(const AdagradOptions& o, const Lists& lists, const Scalar& grad_scale,
                const Scalar& found_inf) {
  at::_fused_adagrad_(lists.params, lists.grads, lists.slots[0], lists.steps, o.lr, o.lr_decay,
                      o.weight_decay, o.eps, o.maximize, grad_scale, found_inf);
}

void CheckGradient(const at::Tensor& param, const at::Tensor& grad, const std::string& name) {
  TORCH_CHECK(grad.layout() == at::kStrided, "parameter ", name,
              " has a sparse gradient, which fused optimizers do not take: use a torch::optim one");
  TORCH_CHECK(grad.scalar_type() == param.scalar_type(), "parameter ", name, " is ",
              param.scalar_type(), " and its gradient ", grad.scalar_type());
  TORCH_CHECK(grad.device() == param.device(), "parameter ", name, " is on ", param.device(),
              " and its gradient on ", grad.device());
}

// Returns the chunk for parameters like `param`; a new one gets room for `room` of them with
// `slots` tensors of state each. `Chunk` is FusedOptimizer's.
template <typename Chunk>
Chunk& FindChunk(std::vector<Chunk>* chunks, const at::Tensor& param, bool fresh, bool small,
                 size_t room, size_t slots, bool counts_steps) {
  for (Chunk& chunk : *chunks) {
    if (chunk.fresh == fresh && chunk.small == small &&
        chunk.params[0].scalar_type() == param.scalar_type() &&
        chunk.params[0].device() == param.device()) {
      return chunk;
    }
  }
  Chunk& chunk = chunks->emplace_back();
  chunk.fresh = fresh;
  chunk.small = small;
  chunk.indices.reserve(room);
  chunk.params.reserve(room);
  chunk.grads.reserve(room);
  if (counts_steps) chunk.steps.reserve(room);
  for (size_t s = 0; s < slots; ++s) chunk.slots[s].reserve(room);
  return chunk;
}

// Counts each shared step tensor of a chunk once. The states of its cohort and this chunk refer to
// it; if some of the cohort are not in the chunk, those in the chunk get a copy, and `left` is set.
// Returns the tensors that were counted: old, new.
std::vector<std::pair<at::Tensor, at::Tensor>> CountSteps(std::vector<at::Tensor>* steps,
                                                          bool* left) {
  std::vector<std::pair<at::Tensor, at::Tensor>> counted;  // old, new
  for (size_t k = 0; k < steps->size(); ++k) {
    at::Tensor& step = (*steps)[k];
    if (!counted.empty() && counted.back().first.is_same(step)) {
      step = counted.back().second;
      continue;
    }
    size_t known = 0;
    while (known < counted.size() && !counted[known].first.is_same(step)) ++known;
    if (known == counted.size()) {
      size_t in_chunk = 0;
      for (size_t m = k; m < steps->size(); ++m) in_chunk += (*steps)[m].is_same(step);
      const bool whole_cohort = step.use_count() == 2 * in_chunk;
      *left = *left || !whole_cohort;
      counted.emplace_back(step, whole_cohort ? step : step.clone());
      counted.back().second.add_(1);
    }
    step = counted[known].second;
  }
  return counted;
}

// A model spread over several devices has its scale and its flag on one of them.
Scalar OnDevice(const Scalar& scalar, at::Device device) {
  if (!scalar.has_value()) return std::nullopt;
  return scalar->to(device);
}

// Returns the lists for parameters `first` up to `last` of a chunk.
template <typename Chunk>
Lists ListsOf(const Chunk& chunk, int64_t first, int64_t last) {
  const auto range = [&](const std::vector<at::Tensor>& list) {
    return list.empty() ? at::TensorList() : at::TensorList(list).slice(first, last - first);
  };
  Lists lists{.fresh = chunk.fresh,
              .params = range(chunk.params),
              .grads = range(chunk.grads),
              .steps = range(chunk.steps),
              .slots = {}};
  for (int s = 0; s < FusedOptimizer::kMaxSlots; ++s) lists.slots[s] = range(chunk.slots[s]);
  return lists;
}

}  // namespace

void FusedOptimizer::AddGroup(std::vector<at::Tensor> group) {
  std::vector<at::Tensor> all = seen_parameters();
  const size_t begin = all.size();
  for (at::Tensor& parameter : group) {
    TORCH_CHECK(parameter.defined() && parameter.is_floating_point(), "parameter ", all.size(),
                " of the optimizer is not a floating-point tensor");
    all.push_back(std::move(parameter));
  }
  const size_t end = all.size();
  SetParameters(std::move(all));
  groups_.emplace_back(begin, end);
  state_.resize(end);
}

void FusedOptimizer::StepScaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  TORCH_CHECK(
      supports_scaled_step(),
      "SGD with momentum and dampening cannot step on scaled gradients: unscale them first");
  Run(grad_scale, found_inf);
}

void FusedOptimizer::StepOnly(const std::vector<size_t>& which) {
  struct Only {
    explicit Only(std::vector<bool>& flags, size_t size) : flags(flags) {
      flags.assign(size, false);
    }
    ~Only() { flags.clear(); }
    std::vector<bool>& flags;
  } only(only_, state_.size());
  for (const size_t i : which) only_.at(i) = true;
  if (!which.empty()) Run(at::Tensor(), at::Tensor());
}

void FusedOptimizer::Run(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  at::NoGradGuard no_grad;
  std::optional<at::Tensor> scale;
  if (grad_scale.defined()) scale = grad_scale;
  std::optional<at::Tensor> inf;
  if (found_inf.defined()) inf = found_inf;

  if (offloaded_ != nullptr) {
    ThrowIfError(offloaded_->failed());
    // Refuse everything before anything has changed.
    MakeRoom();
    for (size_t i = 0; i < state_.size(); ++i) {
      const at::Tensor& param = seen_parameters()[i];
      if (!Steps(i) || !param.grad().defined()) continue;
      CheckGradient(param, param.grad(), parameter_names()[i]);
      TORCH_CHECK(!offloaded_->Has(i) || offloaded_->Fits(i, param), "parameter ",
                  parameter_names()[i], " has become ", param.scalar_type(), " of shape ",
                  param.sizes(),
                  ", which its offloaded state is not: change it before the first "
                  "step");
    }
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // parameters with holes, and their dense
                                                          // copies
  if (offloaded_ != nullptr) StepOffloaded(scale, inf, &copies);
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (IsOffloaded(static_cast<int64_t>(g))) continue;
    const auto [begin, end] = groups_[g];
    const std::vector<Slot> slots_of_group = slots(static_cast<int64_t>(g));
    const SlotOf slot_of = [&](size_t i, size_t s, const at::Tensor& target) {
      at::Tensor& slot = state_[i].slots[s];
      if (!slot.defined()) {
        slot = at::full_like(target, slots_of_group[s].initial).detach();
      } else if (!Fits(slot, target)) {
        slot = Refit(slot, target);
      }
      return slot;
    };
    StepRange(static_cast<int64_t>(g), begin, end, slot_of, scale, inf, &copies);
  }
  for (auto& [param, copy] : copies) param.copy_(copy);
  std::vector<at::Tensor> stepped;
  for (size_t i = 0; i < state_.size(); ++i) {
    const at::Tensor& param = seen_parameters()[i];
    if (Steps(i) && param.grad().defined()) stepped.push_back(param);
  }
  // Inside a backward pass the model counts the change, because it knows the graph.
  if (only_.empty()) {
    NoteStep(stepped);
  } else {
    NoteWeightChange(stepped);
  }
}

void FusedOptimizer::StepRange(int64_t group, size_t first, size_t last, const SlotOf& slot,
                               const std::optional<at::Tensor>& grad_scale,
                               const std::optional<at::Tensor>& found_inf,
                               std::vector<std::pair<at::Tensor, at::Tensor>>* copies) {
  const size_t slot_count = slots(group).size();
  std::vector<Chunk> chunks;
  for (size_t i = first; i < last; ++i) {
    if (!Steps(i)) continue;
    const at::Tensor& param = seen_parameters()[i];
    at::Tensor grad = param.grad();
    if (!grad.defined()) continue;
    // With offload, all gradients have been checked.
    if (offloaded_ == nullptr) CheckGradient(param, grad, parameter_names()[i]);
    // The kernel's parameter: a dense copy if this one has holes.
    const bool dense = IsDense(param);
    at::Tensor target = dense ? param : at::empty_like(param).copy_(param);
    if (!SameLayout(grad, target)) grad = at::empty_like(target).copy_(grad);

    ParamState& state = state_[i];
    // Or the first step with a momentum, which may be set later.
    const bool fresh = !state.exists || (slot_count > 0 && !HasSlots(i));
    Chunk& chunk =
        FindChunk(&chunks, param, fresh, IsSmall(param), last - i, slot_count, counts_steps());
    if (counts_steps()) {
      if (!state.step.defined()) {
        state.step =
            chunk.steps.empty()
                ? at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(param.device()))
                : chunk.steps[0];
      } else if (state.step.device() != param.device()) {
        state.step = state.step.to(param.device());
      }
      chunk.steps.push_back(state.step);
    }
    for (size_t s = 0; s < slot_count; ++s) chunk.slots[s].push_back(slot(i, s, target));
    state.exists = true;
    chunk.indices.push_back(i);
    if (!dense) copies->emplace_back(param, target);
    chunk.params.push_back(std::move(target));
    chunk.grads.push_back(std::move(grad));
  }

  for (Chunk& chunk : chunks) {
    bool left = false;
    const auto counted = CountSteps(&chunk.steps, &left);
    if (left) {
      for (size_t k = 0; k < chunk.indices.size(); ++k) {
        state_[chunk.indices[k]].step = chunk.steps[k];
      }
    }
    const at::Device device = chunk.params[0].device();
    const std::optional<at::Tensor> inf_here = OnDevice(found_inf, device);
    const std::optional<at::Tensor> scale_here = OnDevice(grad_scale, device);
    ForTensorRanges(chunk.params, chunk.grads, [&](int64_t begin, int64_t end) {
      Update(group, ListsOf(chunk, begin, end), scale_here, inf_here);
    });
    if (inf_here.has_value()) {
      for (const auto& [old_step, new_step] : counted) new_step.sub_(*inf_here);
    }
  }
}

void FusedOptimizer::StepOffloaded(const std::optional<at::Tensor>& grad_scale,
                                   const std::optional<at::Tensor>& found_inf,
                                   std::vector<std::pair<at::Tensor, at::Tensor>>* copies) {
  // A group whose momentum has become 0 has windows, but no states.
  std::vector<bool> has_states(state_.size());
  for (int64_t g = 0; g < num_groups(); ++g) {
    const auto [begin, end] = groups_[g];
    std::fill(has_states.begin() + begin, has_states.begin() + end, IsOffloaded(g));
  }
  const auto has_gradient = [&](size_t i) {
    return has_states[i] && Steps(i) && seen_parameters()[i].grad().defined();
  };
  offloaded_->ForWindows(0, state_.size(), has_gradient, [&](size_t first, size_t last) {
    int64_t group = 0;
    while (groups_[group].second <= first) ++group;
    const std::vector<Slot> slots_of_group = slots(group);
    // Tensors that were made because the kept ones do not fit the kernel.
    std::vector<std::pair<at::Tensor, at::Tensor>> fitted;
    const SlotOf slot_of = [&](size_t i, size_t s, const at::Tensor& target) {
      at::Tensor kept = offloaded_->Slot(i, s);
      if (!offloaded_->IsFilled(i)) kept.fill_(slots_of_group[s].initial);
      if (s + 1 == slots_of_group.size()) offloaded_->Fill(i);
      if (Fits(kept, target)) return kept;
      at::Tensor slot = Refit(kept, target);
      fitted.emplace_back(kept, slot);
      return slot;
    };
    StepRange(group, first, last, slot_of, grad_scale, found_inf, copies);
    for (auto& [kept, slot] : fitted) kept.copy_(slot);
  });
}

void FusedOptimizer::MakeRoom() {
  for (int64_t g = 0; g < num_groups(); ++g) {
    const auto [begin, end] = groups_[g];
    if (begin == end || !IsOffloaded(g) || offloaded_->Has(begin)) continue;
    std::vector<at::Tensor> likes;
    std::vector<c10::Device> devices;
    for (size_t i = begin; i < end; ++i) {
      const at::Tensor& param = seen_parameters()[i];
      devices.push_back(param.device());
      // Without memory, but with the strides of the states.
      likes.push_back(IsDense(param)
                          ? param.detach()
                          : at::empty_like(param, at::TensorOptions().device(at::kMeta)));
    }
    offloaded_->Add(begin, likes, slots(g).size(), devices, offloads_by_memory_);
  }
}

void FusedOptimizer::OffloadState(std::shared_ptr<ScratchFile> file) {
  if (offloaded_ != nullptr) return;
  for (size_t i = 0; i < state_.size(); ++i) {
    TORCH_CHECK(!state_[i].exists, "parameter ", parameter_names()[i],
                " of the optimizer has been stepped on already: prepare() the optimizer before its "
                "first step to have its state offloaded");
  }
  offloaded_ = std::make_shared<OffloadedState>(std::move(file));
}

uint64_t FusedOptimizer::HostBytesToTake(
    const std::function<bool(const at::Tensor& parameter)>& counted) const {
  uint64_t bytes = 0;
  if (offloaded_ == nullptr || offloaded_->in_file()) return bytes;
  const std::vector<at::Tensor>& all = parameters();
  for (int64_t g = 0; g < num_groups(); ++g) {
    if (!IsOffloaded(g)) continue;
    for (size_t i = groups_[g].first; i < groups_[g].second; ++i) {
      if (!offloaded_->Has(i) && counted(all[i])) bytes += slots(g).size() * all[i].nbytes();
    }
  }
  return bytes;
}

void FusedOptimizer::OffloadByMemory() { offloads_by_memory_ = true; }

void FusedOptimizer::ReplaceParameters(
    const std::function<at::Tensor(const at::Tensor&)>& replacement) {
  std::vector<at::Tensor> replaced = seen_parameters();
  for (size_t i = 0; i < replaced.size(); ++i) {
    const at::Tensor other = replacement(replaced[i]);
    if (!other.defined()) continue;
    const bool has_state = state_[i].exists || (offloaded_ != nullptr && offloaded_->Has(i));
    TORCH_CHECK(!has_state, "parameter ", parameter_names()[i],
                " of the optimizer has been stepped on already: shard the model (prepare() it) "
                "before the optimizer's first step");
    replaced[i] = other;
  }
  ExchangeParameters(std::move(replaced));
}

bool FusedOptimizer::HasSlots(size_t i) const {
  if (offloaded_ != nullptr && offloaded_->Has(i)) return offloaded_->IsFilled(i);
  return state_[i].slots[0].defined();
}

std::vector<size_t> FusedOptimizer::GroupSizes() const {
  std::vector<size_t> sizes;
  for (const auto& [begin, end] : groups_) sizes.push_back(end - begin);
  return sizes;
}

std::string FusedOptimizer::CannotSave() const {
  if (offloaded_ == nullptr || offloaded_->failed().ok()) return "";
  return std::string(offloaded_->failed().message());
}

PlainState FusedOptimizer::SaveGroups() const {
  PlainState groups;
  PutGroupSizes(GroupSizes(), &groups);
  for (int64_t g = 0; g < num_groups(); ++g) {
    for (auto& [name, row] : SaveGroup(g)) groups[std::to_string(g) + "." + name] = row;
  }
  return groups;
}

OptimizerState FusedOptimizer::SaveState() const {
  if (offloaded_ != nullptr) ThrowIfError(offloaded_->failed());
  OptimizerState saved;
  saved.groups = SaveGroups();
  OffloadedState::Maps maps;
  for (int64_t g = 0; g < num_groups(); ++g) {
    const auto [begin, end] = groups_[g];
    const std::vector<Slot> names = slots(g);
    for (size_t i = begin; i < end; ++i) {
      if (!state_[i].exists) continue;
      // A failed step has counted it, although it has no state.
      if (!names.empty() && offloaded_ != nullptr && offloaded_->Has(i) && !offloaded_->IsFilled(i))
        continue;
      const std::string& parameter = parameter_names()[i];
      if (counts_steps()) saved.tensors[parameter + ".step"] = state_[i].step.clone();
      for (size_t s = 0; s < names.size(); ++s) {
        at::Tensor slot = state_[i].slots[s];
        if (offloaded_ != nullptr && offloaded_->IsFilled(i)) {
          slot = offloaded_->Mapped(i, s, &maps);
        }
        if (slot.defined()) saved.tensors[parameter + "." + names[s].name] = slot;
      }
    }
  }
  return saved;
}

std::vector<std::map<std::string, at::Tensor>> FusedOptimizer::CheckedSlots(
    const OptimizerState& state) const {
  CheckGroupSizes(state.groups, GroupSizes());
  for (int64_t g = 0; g < num_groups(); ++g) CheckGroup(state.groups, g);
  std::vector<std::string> known;
  if (counts_steps()) known.push_back("step");
  for (int64_t g = 0; g < num_groups(); ++g) {
    for (const Slot& slot : slots(g)) known.push_back(slot.name);
  }
  std::vector<std::map<std::string, at::Tensor>> by_parameter = Slots(state, known);
  for (int64_t g = 0; g < num_groups(); ++g) {
    std::vector<std::string> needed;
    if (counts_steps()) needed.push_back("step");
    for (const Slot& slot : slots(g)) needed.push_back(slot.name);
    for (size_t i = groups_[g].first; i < groups_[g].second; ++i) {
      for (const std::string& name : needed) {
        TORCH_CHECK(by_parameter[i].empty() || by_parameter[i].count(name) > 0, "optimizer state '",
                    parameter_names()[i], ".", name, "' is missing");
      }
    }
  }
  return by_parameter;
}

void FusedOptimizer::LoadState(const OptimizerState& state) {
  at::NoGradGuard no_grad;
  const auto by_parameter = CheckedSlots(state);
  std::vector<ParamState> loaded(state_.size());
  // `first` goes to new memory; `copies` to existing memory, only when nothing can fail any more.
  std::vector<std::pair<at::Tensor, at::Tensor>> first, copies;
  std::map<std::pair<c10::Device, float>, at::Tensor,
           bool (*)(const std::pair<c10::Device, float>&, const std::pair<c10::Device, float>&)>
      steps([](const auto& a, const auto& b) {
        return std::make_tuple(a.first.type(), a.first.index(), a.second) <
               std::make_tuple(b.first.type(), b.first.index(), b.second);
      });
  for (int64_t g = 0; g < num_groups(); ++g) {
    const auto [begin, end] = groups_[g];
    const std::vector<Slot> names = slots(g);
    for (size_t i = begin; i < end; ++i) {
      if (by_parameter[i].empty()) continue;
      const at::Tensor& param = seen_parameters()[i];
      if (counts_steps()) {
        const float count = by_parameter[i].at("step").to(at::kCPU, at::kFloat).item<float>();
        at::Tensor& shared = steps[{param.device(), count}];
        if (!shared.defined()) {
          shared =
              at::full({}, count, at::TensorOptions().dtype(at::kFloat).device(param.device()));
        }
        loaded[i].step = shared;
      }
      for (size_t s = 0; s < names.size() && offloaded_ == nullptr; ++s) {
        const at::Tensor& saved = by_parameter[i].at(names[s].name);
        at::Tensor& slot = loaded[i].slots[s];
        slot = SlotToReuse(state_[i].slots[s], 1, param, saved);
        const bool reused = slot.defined();
        if (!reused) slot = NewSlot(param);
        (reused ? copies : first).emplace_back(slot, saved);
      }
      loaded[i].exists = true;
    }
  }
  ThrowIfError(CopyTensors(first));
  if (offloaded_ != nullptr) MakeRoom();
  for (int64_t g = 0; g < num_groups(); ++g) LoadGroup(state.groups, g);
  steps.clear();
  ThrowIfError(CopyTensors(copies));
  state_ = std::move(loaded);
  if (offloaded_ == nullptr) return;
  offloaded_->Renew();
  for (int64_t g = 0; g < num_groups(); ++g) {
    const auto [begin, end] = groups_[g];
    const std::vector<Slot> names = slots(g);
    if (names.empty()) continue;
    const auto is_loaded = [&](size_t i) { return state_[i].exists; };
    const auto load = [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        if (!state_[i].exists) continue;
        for (size_t s = 0; s < names.size(); ++s) {
          offloaded_->Slot(i, s).copy_(by_parameter[i].at(names[s].name));
        }
        offloaded_->Fill(i);
      }
    };
    offloaded_->ForWindows(begin, end, is_loaded, load, OffloadedState::Place::kOnTheHost);
  }
}

template <typename Options>
Fused<Options>::Fused(std::vector<at::Tensor> params, const Options& options)
    : Fused(std::vector<ParamGroup<Options>>{{std::move(params), options}}) {}

template <typename Options>
Fused<Options>::Fused(const std::vector<ParamGroup<Options>>& groups) {
  TORCH_CHECK(!groups.empty(), "an optimizer needs at least one parameter group");
  for (const auto& group : groups) add_param_group(group);
  TORCH_CHECK(!seen_parameters().empty(), "the optimizer got an empty list of parameters");
}

template <typename Options>
void Fused<Options>::add_param_group(const ParamGroup<Options>& group) {
  CheckOptions(group.options);
  AddGroup(group.params);
  options_.push_back(group.options);
}

template <typename Options>
std::optional<double> Fused<Options>::momentum(int64_t group) const {
  if constexpr (AdamLike<Options>) {
    return options_[group].betas[0];
  } else if constexpr (std::is_same_v<Options, SGDOptions>) {
    return options_[group].momentum;
  } else {
    return FusedOptimizer::momentum(group);
  }
}

template <typename Options>
void Fused<Options>::set_momentum(int64_t group, double momentum) {
  if constexpr (AdamLike<Options>) {
    options_[group].betas[0] = momentum;
  } else if constexpr (std::is_same_v<Options, SGDOptions>) {
    options_[group].momentum = momentum;
  } else {
    FusedOptimizer::set_momentum(group, momentum);
  }
}

template <typename Options>
bool Fused<Options>::supports_scaled_step() const {
  if constexpr (std::is_same_v<Options, SGDOptions>) {
    // With dampening the first buffer is the gradient itself, which a step that is skipped on the
    // device would leave unset.
    for (const SGDOptions& o : options_) {
      if (o.momentum != 0 && o.dampening != 0) return false;
    }
  }
  return true;
}

template <typename Options>
bool Fused<Options>::counts_steps() const {
  return !std::is_same_v<Options, SGDOptions>;
}

template <typename Options>
std::vector<Slot> Fused<Options>::slots(int64_t group) const {
  return SlotsOf(options_[group]);
}

template <typename Options>
void Fused<Options>::Update(int64_t group, const Lists& lists, const Scalar& grad_scale,
                            const Scalar& found_inf) const {
  CallKernel(options_[group], lists, grad_scale, found_inf);
}

template <typename Options>
PlainState Fused<Options>::SaveGroup(int64_t group) const {
  PlainState rows;
  ForOptions(options_[group], [&](const char* name, const auto& field) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(field)>>) {
      rows[name] = {static_cast<double>(field)};
    } else {
      rows[name].assign(field.begin(), field.end());
    }
  });
  return rows;
}

template <typename Options>
Options Fused<Options>::ReadGroup(const PlainState& groups, int64_t group) const {
  Options saved;
  ForOptions(saved, [&](const char* name, auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, bool>) {
      field = GroupRow(groups, group, name, 1)[0] != 0;
    } else if constexpr (std::is_arithmetic_v<Field>) {
      field = GroupRow(groups, group, name, 1)[0];
    } else {
      const std::vector<double>& row = GroupRow(groups, group, name, field.size());
      std::copy(row.begin(), row.end(), field.begin());
    }
  });
  CheckOptions(saved);
  CheckSameState(saved, options_[group], group);
  return saved;
}

template class Fused<AdamWOptions>;
template class Fused<AdamOptions>;
template class Fused<SGDOptions>;
template class Fused<AdagradOptions>;

}  // namespace muster
