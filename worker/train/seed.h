#ifndef MUSTER_WORKER_TRAIN_SEED_H_
#define MUSTER_WORKER_TRAIN_SEED_H_

#include <cstdint>
#include <map>
#include <string>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

struct SeedOptions {
  // Adds the rank to the seed, so that dropout differs between ranks. Anything that must be equal
  // on all ranks (initial weights, the order of samples) then needs its own generator; the loaders
  // have one.
  bool device_specific = false;
  // Uses only deterministic kernels; an operation that has none throws. If false, the setting stays
  // unchanged.
  bool deterministic = false;
};

// Seeds LibTorch's default generators, CPU and, where there are any, GPUs. Returns the seed used on
// this rank.
uint64_t SetSeed(uint64_t seed, int rank = 0, const SeedOptions& options = {});

// Returns the states of the default generators as tensors for a checkpoint: "cpu", "cuda.0", ...
std::map<std::string, at::Tensor> SaveRngState();

// Throws c10::Error for a tensor that is not a valid state of its generator here.
void CheckRngState(const std::map<std::string, at::Tensor>& states);

// Restores the states, after CheckRngState(). A device that is missing in `states` or here is
// skipped and named in the result ("cuda.1 is not in the saved state"); empty if all were restored.
std::string RestoreRngState(const std::map<std::string, at::Tensor>& states);

// Copies the state of rank `root`'s default CPU generator to every rank (and, with `gpu`, that of
// root's current GPU device to each rank's current one). A collective.
void SynchronizeRng(Comm& comm, int root = 0, bool gpu = false);

// The same for one generator on a CPU.
void SynchronizeGenerator(Comm& comm, at::Generator& generator, int root = 0);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_SEED_H_
