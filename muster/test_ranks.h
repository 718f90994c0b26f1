#ifndef MUSTER_MUSTER_TEST_RANKS_H_
#define MUSTER_MUSTER_TEST_RANKS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/accelerator.h"
#include "muster/internal/core.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/gloo_ranks.h"

// Accelerators on several ranks: threads of one process over Gloo.
namespace muster {

// `store`: through which the ranks build further groups; may be null.
inline std::shared_ptr<internal::Core> CoreOn(Comm& comm, const AcceleratorOptions& options,
                                              c10::intrusive_ptr<c10d::Store> store = nullptr,
                                              c10::Device device = c10::kCPU) {
  JoinedProcess process;
  process.device = device;
  process.environment.rank.value = process.environment.local_rank.value = comm.rank();
  process.environment.world_size.value = process.environment.local_world_size.value = comm.size();
  process.environment.mixed_precision.value = options.mixed_precision.value_or("no");
  process.environment.gradient_accumulation_steps = {
      static_cast<int>(options.gradient_accumulation_steps.value_or(1)), "argument"};
  process.environment.project_dir.value = options.project.directory;
  process.store = std::move(store);
  process.comm = std::make_unique<BorrowedComm>(comm);
  return std::make_shared<internal::Core>(options, std::move(process));
}

inline void RunAccelerators(int n, const AcceleratorOptions& options,
                            const std::function<void(Accelerator&)>& function) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(n, [&](Comm& comm) {
    Accelerator accelerator(CoreOn(comm, options, store));
    function(accelerator);
  });
}

// Returns copies of the whole weights of a prepared model: on rank 0 (AcceleratorOptions::sharding)
// or on all. Collective.
template <class Model>
std::map<std::string, at::Tensor> WeightsOf(Accelerator& accelerator, const Model& model) {
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, tensor] : accelerator.get_state_dict(model)) {
    weights[name] = tensor.clone();
  }
  return weights;
}

// Returns what each rank threw, or "".
inline std::vector<std::string> ErrorsOf(int n, const AcceleratorOptions& options,
                                         const std::function<void(Accelerator&)>& function) {
  std::vector<std::string> errors(n);
  RunAccelerators(n, options, [&](Accelerator& accelerator) {
    try {
      function(accelerator);
    } catch (const c10::Error& error) {
      errors[accelerator.process_index()] = error.what_without_backtrace();
    }
    // The ranks are still in step, whatever happened.
    accelerator.wait_for_everyone();
  });
  return errors;
}

}  // namespace muster

#endif  // MUSTER_MUSTER_TEST_RANKS_H_
