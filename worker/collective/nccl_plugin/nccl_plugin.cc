#include "worker/collective/nccl_plugin/nccl_plugin.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

#include "c10/cuda/CUDAFunctions.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
#include "torch/headeronly/version.h"

namespace {

void Report(const std::string& text, char* error, size_t error_size) {
  // Only the first line, because what() of c10::Error ends in a stack.
  const std::string line = text.substr(0, text.find('\n'));
  if (error != nullptr && error_size > 0) std::snprintf(error, error_size, "%s", line.c_str());
}

std::atomic<bool> flush_at_end{false};

// LibTorch's own destructor aborts as well, but warns that a function of Python
// (destroy_process_group) was not called.
class Backend : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;
  ~Backend() override {
    try {
      if (flush_at_end.load()) {
        shutdown();
      } else {
        abort();
      }
    } catch (const std::exception& e) {
      char line[512];
      Report(e.what(), line, sizeof(line));
      std::fprintf(stderr, "NCCL did not shut down: %s\n", line);
    }
  }
};

}  // namespace

extern "C" {

int muster_nccl_abi(void) { return MUSTER_NCCL_ABI; }

const char* muster_nccl_torch_version(void) { return TORCH_VERSION; }

void muster_nccl_version(char* version, size_t version_size) {
  try {
    Report(c10d::getNcclVersion(), version, version_size);
  } catch (const std::exception& e) {
    Report(e.what(), version, version_size);
  }
}

void muster_nccl_flush_at_end(int flush) { flush_at_end.store(flush != 0); }

void* muster_nccl_make_backend(const MusterNcclOptions* options, char* error, size_t error_size) {
  try {
    const int gpus = c10::cuda::device_count();
    TORCH_CHECK(options->device >= 0 && options->device < gpus, "there is no GPU ", options->device,
                " among the ", gpus, " visible ones");
    auto store =
        c10::intrusive_ptr<c10d::Store>::reclaim_copy(static_cast<c10d::Store*>(options->store));
    auto nccl_options = c10d::ProcessGroupNCCL::Options::create();
    nccl_options->timeout = std::chrono::milliseconds(options->timeout_ms);
    nccl_options->group_name = options->name;
    auto backend = c10::make_intrusive<Backend>(store, options->rank, options->size, nccl_options);
    // Connect now rather than in the first step, so that a GPU used twice or a missing link is
    // found at the start.
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(options->device));
    backend->setBoundDeviceId(device);
    backend->eagerConnectSingleDevice(device);
    return static_cast<c10d::Backend*>(backend.release());
  } catch (const c10::Error& e) {
    Report(e.what_without_backtrace(), error, error_size);
  } catch (const std::exception& e) {
    Report(e.what(), error, error_size);
  } catch (...) {
    Report("an unknown exception", error, error_size);
  }
  return nullptr;
}

}  // extern "C"
