#include "worker/train/seed.h"

#include <cstdlib>
#include <mutex>
#include <vector>

#include "ATen/Context.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

at::Tensor StateOf(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void SetState(at::Generator generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

at::Generator CopyOf(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

int64_t NumGpus() { return at::hasCUDA() ? static_cast<int64_t>(at::getNumGPUs()) : 0; }

// Index -1 is the CPU.
at::Generator DefaultGenerator(int64_t gpu) {
  if (gpu < 0) return at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  return at::globalContext().defaultGenerator(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
}

std::string NameOf(int64_t gpu) { return gpu < 0 ? "cpu" : "cuda." + std::to_string(gpu); }

void Synchronize(Comm& comm, const at::Generator& generator, int root) {
  if (comm.size() == 1) return;
  at::Tensor state = StateOf(generator);
  comm.Broadcast(state, root);
  if (comm.rank() != root) SetState(generator, state);
}

}  // namespace

uint64_t SetSeed(uint64_t seed, int rank, const SeedOptions& options) {
  if (options.device_specific) seed += static_cast<uint64_t>(rank);
  at::manual_seed(seed);
  if (options.deterministic) {
    // Read when cuBLAS makes its first handle; deterministic products need it.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setBenchmarkCuDNN(false);
  }
  return seed;
}

std::map<std::string, at::Tensor> SaveRngState() {
  std::map<std::string, at::Tensor> states;
  for (int64_t gpu = -1; gpu < NumGpus(); ++gpu)
    states[NameOf(gpu)] = StateOf(DefaultGenerator(gpu));
  return states;
}

void CheckRngState(const std::map<std::string, at::Tensor>& states) {
  for (int64_t gpu = -1; gpu < NumGpus(); ++gpu) {
    const auto it = states.find(NameOf(gpu));
    if (it == states.end()) continue;
    TORCH_CHECK(it->second.scalar_type() == at::kByte && it->second.is_cpu(),
                "the random state of ", NameOf(gpu), " is not a byte tensor on the CPU");
    SetState(CopyOf(DefaultGenerator(gpu)), it->second);
  }
}

std::string RestoreRngState(const std::map<std::string, at::Tensor>& states) {
  CheckRngState(states);
  std::string left_out;
  const auto note = [&left_out](const std::string& text) {
    left_out += (left_out.empty() ? "" : "; ") + text;
  };
  size_t used = 0;
  for (int64_t gpu = -1; gpu < NumGpus(); ++gpu) {
    const auto it = states.find(NameOf(gpu));
    if (it == states.end()) {
      note(NameOf(gpu) + " is not in the saved state");
      continue;
    }
    SetState(DefaultGenerator(gpu), it->second);
    ++used;
  }
  if (used < states.size()) {
    for (const auto& [name, state] : states) {
      bool here = false;
      for (int64_t gpu = -1; gpu < NumGpus(); ++gpu) here = here || name == NameOf(gpu);
      if (!here) note(name + " is not on this machine");
    }
  }
  return left_out;
}

void SynchronizeRng(Comm& comm, int root, bool gpu) {
  Synchronize(comm, DefaultGenerator(-1), root);
  if (gpu) {
    TORCH_CHECK(NumGpus() > 0, "there is no GPU whose random state could be synchronised");
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    Synchronize(comm, DefaultGenerator(guard.getDevice().index()), root);
  }
}

void SynchronizeGenerator(Comm& comm, at::Generator& generator, int root) {
  Synchronize(comm, generator, root);
}

}  // namespace muster
