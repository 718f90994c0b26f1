#ifndef MUSTER_WORKER_TRAIN_EMA_H_
#define MUSTER_WORKER_TRAIN_EMA_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/checkpoint/state_dict.h"

namespace muster {

struct EmaOptions {
  // What the average keeps of itself at an update; the weights bring the rest.
  double decay = 0.999;
  // Starts with a smaller decay, so that the first weights are soon forgotten: the n-th update has
  // min(decay, (1 + n) / (10 + n)), counted from 0.
  bool warmup = false;
  // Before this many calls of Update(), the average equals the weights.
  int64_t update_after_step = 0;
  // Only every so-many-th call of Update() is an update.
  int64_t update_every = 1;
};

// The exponential moving average of a model's weights, of which evaluation often gives better
// numbers. fp16 and bf16 weights are averaged in fp32 (a thousandth of a change is nothing in
// bf16), integers are copied. Buffers, such as BatchNorm's running statistics, are averages
// already: the model's own ones serve.
//
//   EmaWeights ema(parameters, {.decay = 0.999});
//   for (...) { ...; optimizer.Step(); ema.Update(); }
//   { EmaWeights::Scope averaged(ema); evaluate the model; }
//
// In a job all ranks have equal weights, and so equal averages without a word between them; where
// ranks train apart (local SGD), the averages are of no use. Of a sharded model each rank averages
// its shards, element by element. Parameters may move to another device or dtype. Not thread-safe.
// Errors are c10::Error.
class EmaWeights {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  // A tensor whose version tells that the parameter `name` has been changed.
  using Witness = std::function<at::Tensor(const std::string& name)>;

  // The parameters by name; a tensor with several names counts once, under the first. They are the
  // average to begin with. `witness`: null if it is the parameter itself.
  explicit EmaWeights(const Named& parameters, const EmaOptions& options = {},
                      Witness witness = nullptr);
  EmaWeights(const EmaWeights&) = delete;
  EmaWeights& operator=(const EmaWeights&) = delete;

  // After each step of the optimizer. One pass over the weights; does not wait for a device. Throws
  // inside a Scope, where the weights are the average.
  void Update();
  int64_t updates() const { return updates_; }

  // While it lives, the model's weights are the average. Costs a copy of the weights. Its
  // destructor restores them, also after an exception; if the weights were changed in between (a
  // step, a load), which would be lost, it throws. Do not save the model's training state in it.
  class Scope {
   public:
    // `changed` is called whenever the weights have been exchanged.
    explicit Scope(EmaWeights& ema, std::function<void()> changed = nullptr);
    ~Scope() noexcept(false);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    EmaWeights& ema_;
    const std::function<void()> changed_;
    const int exceptions_;
    std::vector<at::Tensor> weights_;  // as they were
    std::vector<uint32_t> versions_;
  };

  // Writes the average into `parameters`: those of this model, permanently, or of another one with
  // the same names and shapes. Nothing is changed unless all fit.
  void CopyTo(const Named& parameters) const { CopyAverages(averages(), parameters); }
  // The same of averages by the parameters' first names.
  static void CopyAverages(const Named& averages, const Named& parameters);
  // By the parameters' names; not copied.
  Named averages() const;

  // The averages under KeyOf(parameter) (not copied) and the counters. Loading refuses what does
  // not fit, with nothing changed.
  StateDict SaveState() const;
  void LoadState(const StateDict& state);
  static std::string KeyOf(const std::string& parameter) { return "average." + parameter; }

 private:
  struct Entry {
    std::string name;
    at::Tensor parameter;
    at::Tensor average;
  };
  uint32_t VersionOf(const Entry& entry) const;

  const EmaOptions options_;
  const Witness witness_;
  std::vector<Entry> entries_;
  int64_t calls_ = 0;
  int64_t updates_ = 0;  // that averaged
  bool applied_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_EMA_H_
