#ifndef MUSTER_INTERNAL_MODEL_SLOT_H_
#define MUSTER_INTERNAL_MODEL_SLOT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/model_source.h"
#include "worker/nested/nested.h"
#include "worker/train/autocast.h"
#include "worker/train/output_dtypes.h"

namespace muster {
class ActivationPolicy;
class Comm;
class DataParallel;
class ShardedModel;
}  // namespace muster

namespace muster::internal {

class BackwardWatch;
class StepController;

// The ranks among which models are sharded. Null: all ranks, or no copies. `reshard`: the ranks
// that share a copy kept from the forward pass to the backward pass; null: none is kept.
struct ShardingGroups {
  std::shared_ptr<Comm> shard, replicas, reshard;
};

// A prepared model: its tensors and, in a job of several processes, its gradient exchange.
class ModelSlot {
 public:
  // With `evaluation`, no gradients are exchanged.
  ModelSlot(StepController* steps, std::unique_ptr<ModelSource> source, bool evaluation,
            const ShardingGroups& groups);
  ~ModelSlot();

  // Runs one forward pass: see AcceleratedModel.
  template <class F>
  auto Run(F&& forward) {
    BeforeForward();
    const ForwardEnd end{this};
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      RunUnderAutocast(std::forward<F>(forward));
      if (ddp_ != nullptr) PassNoOutputs();
    } else {
      if (ddp_ == nullptr) return RunUnderAutocast(std::forward<F>(forward));
      return MapAllTensors(RunUnderAutocast(std::forward<F>(forward)),
                           [this](std::vector<at::Tensor> t) { return PassOutputs(std::move(t)); });
    }
  }

  ModelSource& source() { return *source_; }
  // At most one of ddp() and sharded() is not null.
  DataParallel* ddp() { return ddp_.get(); }
  ShardedModel* sharded() { return sharded_.get(); }
  // Null without activation checkpointing.
  ActivationPolicy* activation_policy() { return activation_policy_.get(); }
  // Null for evaluation.
  BackwardWatch* watch() { return watch_.get(); }
  // See Accelerator::trigger_sync_in_backward.
  void SyncInBackward();
  bool evaluation() const { return evaluation_; }
  bool on_main_process() const;

 private:
  friend class StepController;
  friend class GradientOrigins;

  // Calls AfterForward on every way out of forward(), also by an exception.
  struct ForwardEnd {
    ModelSlot* slot;
    ~ForwardEnd() { slot->AfterForward(); }
  };

  template <class F>
  auto RunUnderAutocast(F&& forward);

  void MakeReady();
  void MakeParallel();
  // (collective) Converts buffers as ShardingOptions say.
  void ConvertBuffers();
  // Converts the outputs of all later passes.
  void ConvertOutputs();
  void BeforeForward();
  void AfterForward();
  std::vector<at::Tensor> PassOutputs(std::vector<at::Tensor> outputs);
  // Ends a pass whose results the program has stored elsewhere.
  void PassNoOutputs();
  bool autocast_on() const;
  AutocastGuard Autocast() const;

  StepController* const controller_;
  const std::unique_ptr<ModelSource> source_;
  const bool evaluation_;
  const ShardingGroups groups_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<ShardedModel> sharded_;
  std::unique_ptr<ActivationPolicy> activation_policy_;
  // Absent: the type that autocast gives.
  std::optional<c10::ScalarType> output_dtype_;
  std::unique_ptr<OutputDtypes> unit_outputs_;
  std::unique_ptr<BackwardWatch> watch_;
  // Passes with gradients so far.
  int64_t forwards_ = 0;
  // A forward pass arms the exchange; a backward pass uses it up.
  enum class Armed { kNo, kYes, kUsed };
  Armed armed_ = Armed::kNo;
};

template <class F>
auto ModelSlot::RunUnderAutocast(F&& forward) {
  if (!autocast_on() && !output_dtype_.has_value()) return std::forward<F>(forward)();
  if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
    if (!autocast_on()) return std::forward<F>(forward)();
    AutocastGuard guard = Autocast();
    std::forward<F>(forward)();
  } else {
    auto out = [&] {
      if (!autocast_on()) return std::forward<F>(forward)();
      AutocastGuard guard = Autocast();
      return std::forward<F>(forward)();
    }();
    return output_dtype_.has_value() ? ConvertFloats(out, *output_dtype_) : ConvertToFp32(out);
  }
}

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_MODEL_SLOT_H_
