#include "muster/utils.h"

#include <exception>
#include <map>

#include "ATen/core/grad_mode.h"
#include "muster/internal/core.h"
#include "worker/job/environment.h"
#include "worker/train/guard.h"

namespace muster {

void set_seed(uint64_t seed, bool device_specific, bool deterministic) {
  int rank = 0;
  if (device_specific) {
    const absl::StatusOr<Environment> environment = ReadEnvironment(ProcessVariables());
    ThrowIfError(environment.status());
    TORCH_CHECK(environment->seated,
                "set_seed(device_specific) before this process has a rank: make the Accelerator "
                "first and use set_seed(accelerator, seed, true)");
    rank = environment->rank.value;
  }
  SetSeed(seed, rank, {.device_specific = device_specific, .deterministic = deterministic});
}

void set_seed(const Accelerator& accelerator, uint64_t seed, bool device_specific,
              bool deterministic) {
  SetSeed(seed, accelerator.process_index(),
          {.device_specific = device_specific, .deterministic = deterministic});
}

void synchronize_rng_states(Accelerator& accelerator, const std::vector<std::string>& rng_types) {
  bool gpu = false;
  for (const std::string& type : rng_types) {
    TORCH_CHECK(type == "torch" || type == "cuda", "synchronize_rng_states: unknown \"", type,
                "\"; use torch or cuda, or pass a generator");
    gpu = gpu || type == "cuda";
  }
  if (rng_types.empty()) return;
  SynchronizeRng(accelerator.comm(), 0, gpu && accelerator.device().is_cuda());
}

void synchronize_rng_states(Accelerator& accelerator, at::Generator& generator) {
  SynchronizeGenerator(accelerator.comm(), generator);
}

int64_t find_executable_batch_size(Accelerator& accelerator, int64_t starting_batch_size,
                                   const std::function<void(int64_t)>& attempt,
                                   const std::function<int64_t(int64_t)>& reduce_batch_size) {
  return FindExecutableBatchSize(accelerator.comm(),
                                 {.starting_batch_size = starting_batch_size,
                                  .reduce = reduce_batch_size,
                                  .forget = [&accelerator] { accelerator.free_memory(); }},
                                 attempt);
}

bool Ema::update() {
  if (!core_->steps().sync_gradients()) return false;
  TORCH_CHECK(core_->steps().communicate(),
              "an average of weights is updated inside LocalSGD, where every process has its own "
              "weights: update it after the scope, or without LocalSGD");
  weights_->Update();
  return true;
}

void Ema::CopyTo(const Named& parameters, const Named& buffers) const {
  std::map<std::string, at::Tensor> own(buffers_.begin(), buffers_.end());
  for (const auto& [name, buffer] : buffers) {
    const auto it = own.find(name);
    TORCH_CHECK(it != own.end() && it->second.sizes() == buffer.sizes(),
                "the averaged model has no "
                "buffer '",
                name, "' of shape ", buffer.sizes());
  }
  core_->steps().AboutToChange();
  weights_->CopyTo(parameters);
  const at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers) {
    if (!buffer.is_same(own.at(name))) at::Tensor(buffer).copy_(own.at(name));
  }
}

std::vector<at::Tensor> LocalSGD::Averaged(const internal::ModelSource& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, parameter] : model.parameters()) tensors.push_back(parameter);
  for (const auto& [name, buffer] : model.buffers()) {
    if (buffer.is_floating_point()) tensors.push_back(buffer);
  }
  return tensors;
}

LocalSGD::LocalSGD(Accelerator& accelerator, std::vector<at::Tensor> parameters,
                   int64_t local_sgd_steps, bool enabled)
    : core_(&accelerator.core()),
      local_(accelerator.comm(), std::move(parameters), local_sgd_steps, enabled),
      exceptions_(std::uncaught_exceptions()) {
  if (local_.enabled()) scope_.emplace(core_);
}

LocalSGD::~LocalSGD() noexcept(false) {
  if (std::uncaught_exceptions() != exceptions_) return;
  core_->steps().AboutToChange();
  local_.Finish();
}

bool LocalSGD::step() {
  core_->steps().AboutToChange();
  return local_.Step();
}

}  // namespace muster
