#ifndef MUSTER_WORKER_TRAIN_OPTIMIZER_H_
#define MUSTER_WORKER_TRAIN_OPTIMIZER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/train/optimizer_handle.h"

namespace muster {

class OffloadedState;

// Optimizers on LibTorch's fused kernels (one pass over a parameter and its state instead of a
// dozen). Results equal torch::optim's within float rounding; hyper-parameters have torch's names
// and defaults. Parameters are floating-point tensors on CPU or CUDA with any strides that do not
// overlap; gradients have the parameter's dtype and are not sparse. State is created in a
// parameter's first step, in its dtype and memory format, and follows it to another device, dtype
// or memory format. A parameter with holes (every other column of a matrix) costs a copy in each
// step.

struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
};

struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
};

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
};

template <typename Options>
struct ParamGroup {
  std::vector<at::Tensor> params;
  Options options;
};

// The common part of the fused optimizers: state per parameter, and lists of parameters that one
// kernel call can take.
class FusedOptimizer : public OptimizerHandle {
 public:
  void Step() override { Run(at::Tensor(), at::Tensor()); }
  void StepScaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  bool supports_scaled_step() const override { return true; }
  // Like Step(), but only for these parameters, given as indices in parameters(). A step may
  // consist of several such calls, with each parameter in one of them; the results are the same to
  // the last bit. Does not touch other parameters, whose gradients may change meanwhile.
  void StepOnly(const std::vector<size_t>& which);
  // Gives offloaded states of parameters in different memory (units of sharded models) separate
  // windows, so that StepOnly() of one unit loads no state of others, and a step takes offloaded
  // gradients of one unit at a time. Call it before the first step.
  void OffloadByMemory();
  int64_t num_groups() const override { return static_cast<int64_t>(groups_.size()); }
  void ReplaceParameters(const std::function<at::Tensor(const at::Tensor&)>& replacement) override;
  void OffloadState(std::shared_ptr<ScratchFile> file) override;
  uint64_t HostBytesToTake(
      const std::function<bool(const at::Tensor& parameter)>& counted) const override;
  std::string CannotSave() const override;
  OptimizerState SaveState() const override;
  PlainState SaveGroups() const override;
  void CheckState(const OptimizerState& state) const override { CheckedSlots(state); }
  void LoadState(const OptimizerState& state) override;

  static constexpr int kMaxSlots = 3;
  // A state tensor that each parameter has.
  struct Slot {
    const char* name;
    double initial;
  };
  // The input of one kernel call: similar parameters of one group.
  struct Lists {
    bool fresh = false;  // this is the first step of all of them, or the first with state
    at::TensorList params, grads, steps;
    std::array<at::TensorList, kMaxSlots> slots;
  };

 protected:
  // Parameters of one group, device, dtype, age and size class, with their gradients and state.
  struct Chunk {
    bool fresh = false;  // as in Lists
    bool small = false;
    std::vector<size_t> indices;  // in parameters()
    std::vector<at::Tensor> params, grads, steps;
    std::array<std::vector<at::Tensor>, kMaxSlots> slots;
  };

  void AddGroup(std::vector<at::Tensor> group);

  virtual bool counts_steps() const = 0;
  virtual std::vector<Slot> slots(int64_t group) const = 0;
  // Makes one kernel call; may run on several threads at the same time.
  virtual void Update(int64_t group, const Lists& lists,
                      const std::optional<at::Tensor>& grad_scale,
                      const std::optional<at::Tensor>& found_inf) const = 0;
  virtual PlainState SaveGroup(int64_t group) const = 0;
  // Throws unless LoadGroup() can take it.
  virtual void CheckGroup(const PlainState& groups, int64_t group) const = 0;
  virtual void LoadGroup(const PlainState& groups, int64_t group) = 0;

 private:
  struct ParamState {
    // The step count (0-d F32). Parameters that have always stepped together share one tensor, so
    // counting costs one operation per step, not one per parameter; a parameter that misses a step
    // keeps the old tensor.
    at::Tensor step;
    std::array<at::Tensor, kMaxSlots> slots;
    bool exists = false;
  };
  std::vector<std::pair<size_t, size_t>> groups_;  // [begin, end) in parameters()
  std::vector<ParamState> state_;
  // Holds the slots of all states if they are offloaded; null otherwise. Copies share it.
  std::shared_ptr<OffloadedState> offloaded_;
  bool offloads_by_memory_ = false;
  std::vector<size_t> GroupSizes() const;
  // Whether a parameter has had a step with state tensors.
  bool HasSlots(size_t i) const;
  // The parameters that StepOnly() updates, by number; empty: all.
  std::vector<bool> only_;
  bool Steps(size_t i) const { return only_.empty() || only_[i]; }
  // Returns each parameter's slots in a state; throws unless LoadState() can take all of them.
  std::vector<std::map<std::string, at::Tensor>> CheckedSlots(const OptimizerState& state) const;

  // Returns the state tensor `slot` of a parameter, for a kernel on `target`, which is the
  // parameter or a dense copy of it.
  using SlotOf = std::function<at::Tensor(size_t parameter, size_t slot, const at::Tensor& target)>;
  // Steps the parameters [first, last) of `group`. Adds those with holes to `copies`, with the
  // dense copies that were stepped in their place.
  void StepRange(int64_t group, size_t first, size_t last, const SlotOf& slot,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf,
                 std::vector<std::pair<at::Tensor, at::Tensor>>* copies);
  // The same for all groups with offloaded states, one window after another.
  void StepOffloaded(const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf,
                     std::vector<std::pair<at::Tensor, at::Tensor>>* copies);
  // Allocates the offloaded states of all groups that have none yet.
  void MakeRoom();
  // Whether the states of a group are offloaded; false for a group without states.
  bool IsOffloaded(int64_t group) const { return offloaded_ != nullptr && !slots(group).empty(); }
  void Run(const at::Tensor& grad_scale, const at::Tensor& found_inf);
};

// The fused optimizer with these options per group: FusedAdamW, FusedAdam, FusedSGD, FusedAdagrad.
template <typename Options>
class Fused : public FusedOptimizer {
 public:
  explicit Fused(std::vector<at::Tensor> params, const Options& options = {});
  explicit Fused(const std::vector<ParamGroup<Options>>& groups);

  // Adds a group, at any time, as in torch. Its parameters have no state yet.
  void add_param_group(const ParamGroup<Options>& group);

  double lr(int64_t group) const override { return options_[group].lr; }
  void set_lr(int64_t group, double lr) override { options_[group].lr = lr; }
  // For Adam this is its first beta; Adagrad has none.
  std::optional<double> momentum(int64_t group) const override;
  void set_momentum(int64_t group, double momentum) override;
  bool supports_scaled_step() const override;

 protected:
  bool counts_steps() const override;
  std::vector<Slot> slots(int64_t group) const override;
  void Update(int64_t group, const Lists& lists, const std::optional<at::Tensor>& grad_scale,
              const std::optional<at::Tensor>& found_inf) const override;
  PlainState SaveGroup(int64_t group) const override;
  void CheckGroup(const PlainState& groups, int64_t group) const override {
    ReadGroup(groups, group);
  }
  void LoadGroup(const PlainState& groups, int64_t group) override {
    options_[group] = ReadGroup(groups, group);
  }

 private:
  std::vector<Options> options_;

  Options ReadGroup(const PlainState& groups, int64_t group) const;
};

extern template class Fused<AdamWOptions>;
extern template class Fused<AdamOptions>;
extern template class Fused<SGDOptions>;
extern template class Fused<AdagradOptions>;

using FusedAdamW = Fused<AdamWOptions>;
using FusedAdam = Fused<AdamOptions>;
using FusedSGD = Fused<SGDOptions>;
using FusedAdagrad = Fused<AdagradOptions>;

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIMIZER_H_
