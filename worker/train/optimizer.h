#ifndef MUSTER_WORKER_TRAIN_OPTIMIZER_H_
#define MUSTER_WORKER_TRAIN_OPTIMIZER_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/train/optimizer_handle.h"

namespace muster {

// Optimizers on LibTorch's fused kernels (one pass over a parameter and its state instead of a
// dozen). Numbers are torch::optim's within float rounding; hyper-parameters have torch's names and
// defaults. Floating parameters on CPU or CUDA, dense gradients of the parameter's dtype. State is
// made in the first step of a parameter, in its dtype and memory format, and follows it if it is
// moved to another device.

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

// What the fused optimizers share: state per parameter, and lists of parameters that one kernel
// call can take.
class FusedOptimizer : public OptimizerHandle {
 public:
  void Step() override { Run(at::Tensor(), at::Tensor()); }
  void StepScaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  bool supports_scaled_step() const override { return true; }
  int64_t num_groups() const override { return static_cast<int64_t>(groups_.size()); }
  OptimizerState SaveState() const override;
  void LoadState(const OptimizerState& state) override;

 protected:
  static constexpr int kMaxSlots = 3;

  // Parameters of one group, device, dtype, age and size class, with their gradients and state.
  struct Chunk {
    bool fresh = false;  // this is the first step of all of them
    bool small = false;
    std::vector<at::Tensor> params, grads, steps;
    std::array<std::vector<at::Tensor>, kMaxSlots> slots;
  };
  struct Slot {
    const char* name;
    double initial;
  };
  // A range of a chunk: what one kernel call takes.
  struct Lists {
    bool fresh = false;
    at::TensorList params, grads, steps;
    std::array<at::TensorList, kMaxSlots> slots;
  };

  // Called by the constructor of a subclass.
  void SetGroups(std::vector<std::vector<at::Tensor>> groups);

  virtual bool counts_steps() const = 0;
  virtual std::vector<Slot> slots(int64_t group) const = 0;
  // One kernel call; may run on several threads at a time.
  virtual void Update(int64_t group, const Lists& lists,
                      const std::optional<at::Tensor>& grad_scale,
                      const std::optional<at::Tensor>& found_inf) const = 0;
  virtual PlainState SaveGroup(int64_t group) const = 0;
  // Two passes: first with commit = false for all groups, then with true.
  virtual void LoadGroup(const PlainState& groups, int64_t group, bool commit) = 0;

 private:
  struct ParamState {
    // A 0-d F32 count of steps. Parameters that have always stepped together share one tensor, so
    // that counting costs one operation a step and not one a parameter; whoever misses a step keeps
    // the old tensor.
    at::Tensor step;
    std::array<at::Tensor, kMaxSlots> slots;
    bool exists = false;
  };
  std::vector<std::pair<size_t, size_t>> groups_;  // [begin, end) in parameters()
  std::vector<ParamState> state_;

  void Run(const at::Tensor& grad_scale, const at::Tensor& found_inf);
};

// Adam and AdamW: decoupled weight decay or not, and nothing else.
class FusedAdamFamily : public FusedOptimizer {
 public:
  double lr(int64_t group) const override { return options_[group].lr; }
  void set_lr(int64_t group, double lr) override { options_[group].lr = lr; }
  std::optional<double> momentum(int64_t group) const override { return options_[group].betas[0]; }
  void set_momentum(int64_t group, double beta) override { options_[group].betas[0] = beta; }

 protected:
  FusedAdamFamily(std::vector<ParamGroup<AdamWOptions>> groups, bool decoupled);

  bool counts_steps() const override { return true; }
  std::vector<Slot> slots(int64_t group) const override;
  void Update(int64_t group, const Lists& lists, const std::optional<at::Tensor>& grad_scale,
              const std::optional<at::Tensor>& found_inf) const override;
  PlainState SaveGroup(int64_t group) const override;
  void LoadGroup(const PlainState& groups, int64_t group, bool commit) override;

 private:
  const bool decoupled_;
  std::vector<AdamWOptions> options_;
};

class FusedAdamW : public FusedAdamFamily {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> params, const AdamWOptions& options = {});
  explicit FusedAdamW(std::vector<ParamGroup<AdamWOptions>> groups);
};

class FusedAdam : public FusedAdamFamily {
 public:
  explicit FusedAdam(std::vector<at::Tensor> params, const AdamOptions& options = {});
  explicit FusedAdam(const std::vector<ParamGroup<AdamOptions>>& groups);
};

class FusedSGD : public FusedOptimizer {
 public:
  explicit FusedSGD(std::vector<at::Tensor> params, const SGDOptions& options = {});
  explicit FusedSGD(std::vector<ParamGroup<SGDOptions>> groups);

  // With dampening the first buffer is the gradient itself, which a step skipped on the device
  // would leave unset.
  bool supports_scaled_step() const override;
  double lr(int64_t group) const override { return options_[group].lr; }
  void set_lr(int64_t group, double lr) override { options_[group].lr = lr; }
  std::optional<double> momentum(int64_t group) const override { return options_[group].momentum; }
  void set_momentum(int64_t group, double m) override { options_[group].momentum = m; }

 protected:
  bool counts_steps() const override { return false; }
  std::vector<Slot> slots(int64_t group) const override;
  void Update(int64_t group, const Lists& lists, const std::optional<at::Tensor>& grad_scale,
              const std::optional<at::Tensor>& found_inf) const override;
  PlainState SaveGroup(int64_t group) const override;
  void LoadGroup(const PlainState& groups, int64_t group, bool commit) override;

 private:
  std::vector<SGDOptions> options_;
};

class FusedAdagrad : public FusedOptimizer {
 public:
  explicit FusedAdagrad(std::vector<at::Tensor> params, const AdagradOptions& options = {});
  explicit FusedAdagrad(std::vector<ParamGroup<AdagradOptions>> groups);

  double lr(int64_t group) const override { return options_[group].lr; }
  void set_lr(int64_t group, double lr) override { options_[group].lr = lr; }

 protected:
  bool counts_steps() const override { return true; }
  std::vector<Slot> slots(int64_t group) const override;
  void Update(int64_t group, const Lists& lists, const std::optional<at::Tensor>& grad_scale,
              const std::optional<at::Tensor>& found_inf) const override;
  PlainState SaveGroup(int64_t group) const override;
  void LoadGroup(const PlainState& groups, int64_t group, bool commit) override;

 private:
  std::vector<AdagradOptions> options_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_OPTIMIZER_H_
