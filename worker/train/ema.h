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
  // The share of the old average that each update keeps; the weights contribute the rest.
  double decay = 0.999;
  // Starts with a smaller decay, so that the first weights are soon forgotten: update n, counted
  // from 0, uses min(decay, (1 + n) / (10 + n)).
  bool warmup = false;
  // Before this many calls of Update(), the average equals the weights.
  int64_t update_after_step = 0;
  // Only one in this many calls of Update() updates the average.
  int64_t update_every = 1;
};

// The exponential moving average of a model's weights, which often evaluates better than the
// weights themselves. fp16 and bf16 weights are averaged in fp32 (a thousandth of a change would
// vanish in bf16); integers are copied. Buffers, such as BatchNorm's running statistics, are
// averages already: the model's own are used.
//
//   EmaWeights ema(parameters, {.decay = 0.999});
//   for (...) { ...; optimizer.Step(); ema.Update(); }
//   { EmaWeights::Scope averaged(ema); evaluate the model; }
//
// In a job all ranks have equal weights, and therefore equal averages without communication; if
// ranks train apart (local SGD), the averages are useless. For a sharded model each rank averages
// its shards, element by element. Parameters may move to another device or dtype. Not thread-safe.
// Errors are c10::Error.
class EmaWeights {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  // Returns a tensor whose version shows that the parameter `name` has changed.
  using Witness = std::function<at::Tensor(const std::string& name)>;

  // Takes the parameters by name; a tensor with several names counts once, under the first. The
  // average starts as their values. `witness`: null if it is the parameter itself.
  explicit EmaWeights(const Named& parameters, const EmaOptions& options = {},
                      Witness witness = nullptr);
  EmaWeights(const EmaWeights&) = delete;
  EmaWeights& operator=(const EmaWeights&) = delete;

  // Updates the average; call it after each step of the optimizer. One pass over the weights, which
  // takes the memory of the largest fp16 or bf16 parameter in fp32; does not wait for a device.
  // Throws inside a Scope, where the weights are the average.
  void Update();
  int64_t updates() const { return updates_; }

  // While it lives, the model's weights are the average. Costs a copy of the weights. Its
  // destructor restores them, even after an exception; it throws if the weights were changed in
  // between (by a step or a load), because that change would be lost. Do not save the model's
  // training state inside the scope.
  class Scope {
   public:
    // `changed` is called each time the weights have been swapped.
    explicit Scope(EmaWeights& ema, std::function<void()> changed = nullptr);
    ~Scope() noexcept(false);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    EmaWeights& ema_;
    void GiveBack() const;

    const std::function<void()> changed_;
    const int exceptions_;
    std::vector<at::Tensor> weights_;  // as they were
    std::vector<uint32_t> versions_;
  };

  // Writes the average into `parameters`: permanently into those of this model, or into those of
  // another one with the same names and shapes. Changes nothing unless all fit.
  void CopyTo(const Named& parameters) const { CopyAverages(averages(), parameters); }
  // The same for averages by the parameters' first names.
  static void CopyAverages(const Named& averages, const Named& parameters);
  // Returns the averages by the parameters' names, without copying them.
  Named averages() const;

  // Saves the averages under KeyOf(parameter) (not copied) and the counters. Loading refuses a
  // state that does not fit and then changes nothing.
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
  int64_t updates_ = 0;  // calls that averaged
  bool applied_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_EMA_H_
