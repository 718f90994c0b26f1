#ifndef MUSTER_UTILS_H_
#define MUSTER_UTILS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Generator.h"
#include "muster/accelerator.h"
#include "muster/internal/averaged_scope.h"
#include "muster/internal/divided_object.h"
#include "worker/collective/nested_collectives.h"
#include "worker/nested/nested.h"
#include "worker/track/logger.h"
#include "worker/train/autocast.h"
#include "worker/train/batch_size_finder.h"
#include "worker/train/ema.h"
#include "worker/train/local_sgd.h"
#include "worker/train/seed.h"

namespace muster {

// Random numbers.

// Seeds LibTorch's generators. Call it before creating weights, with the same seed on every
// process. `device_specific` adds the process index, so that each process draws different numbers
// (for dropout, for example). The index comes from the environment, as for Accelerator; in a
// process that gets its index only at the rendezvous it throws: use the other overload there.
// `deterministic`: use only kernels with bitwise reproducible results. Throws c10::Error.
void set_seed(uint64_t seed, bool device_specific = false, bool deterministic = false);
void set_seed(const Accelerator& accelerator, uint64_t seed, bool device_specific = false,
              bool deterministic = false);

// (collective) Copies the random states of process 0 to every process: "torch" (the CPU's), "cuda"
// (the GPU's). Throws c10::Error for another name.
void synchronize_rng_states(Accelerator& accelerator,
                            const std::vector<std::string>& rng_types = {"torch", "cuda"});
// (collective) The same for one generator on the CPU.
void synchronize_rng_states(Accelerator& accelerator, at::Generator& generator);

// Memory.

// (collective) Returns the largest batch size tried that fits into memory on every process. Calls
// `attempt` with `starting_batch_size` and, as long as memory runs out, with smaller sizes;
// `reduce_batch_size` computes the next one (default: nine tenths). `attempt` may be the whole
// training run.
//
//   muster::find_executable_batch_size(accelerator, 128, [&](int64_t batch_size) {
//     Net net;
//     torch::optim::AdamW adamw(net->parameters());
//     auto [model, optimizer, loader] =
//         accelerator.prepare(net, adamw, muster::batches(data, batch_size));
//     for (int64_t epoch : accelerator.epochs(3)) { ... }
//   });
//
// Create models, optimizers and loaders inside `attempt`: after a failed call this Accelerator
// forgets everything prepared in it or before, and the accumulation window, like free_memory(), and
// the objects and hooks registered in it.
// Objects of the last call end with it, so call save_state() and save_model() inside. With equal
// models and batches all processes run out of memory at the same place; a process that runs out
// alone leaves the others waiting in their next exchange until it times out. To try a single step
// during training, use FindExecutableBatchSize. Throws c10::Error if no size fits.
int64_t find_executable_batch_size(
    Accelerator& accelerator, int64_t starting_batch_size,
    const std::function<void(int64_t)>& attempt,
    const std::function<int64_t(int64_t)>& reduce_batch_size = nullptr);

// Structures of tensors (defined in worker/nested/nested.h), under Accelerate's names.

// Copies every tensor to `device`. With non_blocking, copies from pinned memory to a GPU do not
// block.
template <class T>
T send_to_device(const T& value, at::Device device, bool non_blocking = false) {
  return SendToDevice(value, device, non_blocking);
}
// Concatenates the parts along `dim`, tensor by tensor.
template <class T>
T concatenate(const std::vector<T>& parts, int64_t dim = 0) {
  return Concatenate(parts, dim);
}
// Returns rows [begin, end) of every tensor, as views.
template <class T>
T slice_tensors(const T& value, int64_t begin, int64_t end) {
  return SliceTensors(value, begin, end);
}
// Returns the first dimension of the first tensor. Throws c10::Error if there is none.
template <class T>
int64_t find_batch_size(const T& value) {
  const std::optional<int64_t> size = FindBatchSize(value);
  TORCH_CHECK(size.has_value(), "find_batch_size: there is no tensor with a dimension");
  return *size;
}
// Converts fp16 and bf16 tensors to fp32.
template <class T>
T convert_to_fp32(const T& value) {
  return ConvertToFp32(value);
}
// Wraps `forward` to convert its outputs: convert_outputs_to_fp32(f)(x) is convert_to_fp32(f(x)).
template <class F>
auto convert_outputs_to_fp32(F forward) {
  return [forward = std::move(forward)]<class... Args>(Args&&... args) mutable {
    return ConvertToFp32(forward(std::forward<Args>(args)...));
  };
}
// Appends rows of zeros to every tensor (first dimension `batch_size`) until it divides evenly
// among `num_processes`.
template <class T>
T pad_input_tensors(const T& value, int64_t batch_size, int num_processes) {
  return PadInputTensors(value, batch_size, num_processes);
}

// Loaders and models.

// Returns `loader` without its epoch's first `num_batches` batches, for one pass: see
// Accelerator::skip_first_batches().
template <class Loader>
auto skip_first_batches(Loader& loader, int64_t num_batches = 0) {
  return SkipFirstBatches(loader, num_batches);
}
// Returns the model as it was before prepare().
template <class M>
M& extract_model_from_parallel(AcceleratedModel<M>& model) {
  return model.unwrap();
}

// Whether prepare() shards the models of this Accelerator. Then it accepts models of
// init_empty_weights(), and accelerator.load_weights() loads each process's part of the weights.
bool shards_models(Accelerator& accelerator);

// Returns a logger that prefixes lines with this process's index: "[RANK 1] ...". See RankLogger;
// the Accelerator must outlive it. A call with in_order throws c10::Error inside
// join_uneven_inputs(), where processes that have run out of batches do not make it.
RankLogger get_logger(Accelerator& accelerator);

// Local SGD: in this scope every process trains alone. After every `local_sgd_steps` calls of
// step() and at the end of the scope, the parameters of all processes are averaged. Optimizers and
// schedules step as usual.
//
//   muster::LocalSGD local_sgd(accelerator, model, 8);
//   for (auto& [x, y] : loader) { ...; optimizer.step(); optimizer.zero_grad(); local_sgd.step(); }
//
// Every process must call step() equally often (even_batches). With one process or with `enabled`
// false it does nothing. Throws c10::Error inside join_uneven_inputs().
class LocalSGD {
 public:
  template <class M>
  LocalSGD(Accelerator& accelerator, const AcceleratedModel<M>& model, int64_t local_sgd_steps,
           bool enabled = true)
      : LocalSGD(accelerator, Averaged(model.slot()->source()), local_sgd_steps, enabled) {}
  // (collective) Averages, unless an exception is leaving the scope.
  ~LocalSGD() noexcept(false);
  LocalSGD(const LocalSGD&) = delete;
  LocalSGD& operator=(const LocalSGD&) = delete;

  // Call it after each step of the optimizer. Every `local_sgd_steps`-th call is a collective;
  // returns whether this one was.
  bool step();

 private:
  // Parameters and floating-point buffers, so that running statistics are equal as well.
  static std::vector<at::Tensor> Averaged(const internal::ModelSource& model);
  LocalSGD(Accelerator& accelerator, std::vector<at::Tensor> parameters, int64_t local_sgd_steps,
           bool enabled);

  internal::Core* const core_;
  std::optional<internal::LocalScope> scope_;
  LocalSgd local_;
  const int exceptions_;
};

// The exponential moving average of a prepared model's weights (see EmaOptions; fp16 and bf16
// weights are averaged in fp32).
//
//   muster::Ema ema(accelerator, model, {.decay = 0.999});
//   accelerator.register_for_checkpointing(ema);
//   for (auto& [x, y] : loader) { ...; optimizer.step(); ema.update(); }
//   {
//     auto averaged = ema.apply();
//     ... evaluate `model` ...
//   }
//   ema.copy_to(*model);  // for good, or into another module, to save it
//
// All processes have the same weights, so the averages are the same without an exchange. For a
// sharded model each process has the averages of its part, with the same values to the last bit,
// and apply(), copy_to() and state_dict() are collective. Create it after prepare(), which moves
// and broadcasts the weights. Errors are c10::Error.
class Ema {
 public:
  template <class M>
  Ema(Accelerator& accelerator, const AcceleratedModel<M>& model, const EmaOptions& options = {})
      : Ema(accelerator, model.slot(), options) {}
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  // Updates the average at the end of an accumulation window, even if fp16 has skipped the
  // optimizer's step; does nothing inside a window. Call it after optimizer.step(). Returns whether
  // it updated. Throws inside LocalSGD, where processes have different weights.
  bool update();

  // Replaces the model's weights with the average for the lifetime of the result, whose destructor
  // restores them. Buffers (such as BatchNorm's statistics) stay the model's own throughout. The
  // destructor throws if the weights were changed in between. save_state() and step() are refused
  // in the scope; save_model() and get_state_dict() use the average.
  [[nodiscard]] internal::AveragedScope apply() { return {core_, *weights_, Sharded()}; }

  // Writes the average and the model's buffers into `module`: permanently into the model itself, or
  // into another one of the same class. Throws for different names or shapes before it changes
  // anything.
  template <class Module>
  void copy_to(Module& module) const {
    CopyTo(Names(module.named_parameters()), Names(module.named_buffers()));
  }

  // Updates so far.
  int64_t updates() const { return weights_->updates(); }

  // For register_for_checkpointing(), with which the processes write the averages of a sharded
  // model together and each reads its part. These methods themselves handle whole averages: for a
  // sharded model, state_dict() returns them on process 0 and only the counters elsewhere, and
  // load_state_dict() needs all of them on every process.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);
  std::shared_ptr<internal::DividedObject> divided_object() const { return divided_; }
  // Expires with this object, which is then no longer registered.
  std::weak_ptr<const void> lifetime() const { return alive_; }

 private:
  using Named = EmaWeights::Named;
  Ema(Accelerator& accelerator, const std::shared_ptr<internal::ModelSlot>& model,
      const EmaOptions& options);
  // Null unless the model is sharded. Throws if it is sharded and no longer exists.
  std::shared_ptr<internal::ModelSlot> Sharded() const;
  // For LibTorch's OrderedDict.
  template <class Dict>
  static Named Names(const Dict& dict) {
    Named named;
    for (const auto& item : dict) {
      if constexpr (requires { item.key(); }) {
        named.emplace_back(item.key(), item.value());
      } else {
        named.emplace_back(item.name, item.value);  // torch::jit's lists
      }
    }
    return named;
  }
  void CopyTo(const Named& parameters, const Named& buffers) const;

  internal::Core* core_;
  std::shared_ptr<EmaWeights> weights_;
  std::shared_ptr<internal::DividedObject> divided_;  // null unless the model is sharded
  Named buffers_;
  const std::shared_ptr<const void> alive_ = std::make_shared<char>();
};

}  // namespace muster

#endif  // MUSTER_UTILS_H_
