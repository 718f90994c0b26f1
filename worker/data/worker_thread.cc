#include "worker/data/worker_thread.h"

#include <dlfcn.h>

#include "ATen/Parallel.h"

namespace muster {

void BeSingleThreaded() {
  // at::set_num_threads would change every thread. OpenMP's own setting belongs to the calling
  // thread; LibTorch brings the OpenMP library along without its header. LibTorch sets it once per
  // thread on first use, hence the order.
  at::internal::lazy_init_num_threads();
  using SetNumThreads = void (*)(int);
  static const SetNumThreads set_num_threads =
      reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_num_threads != nullptr) set_num_threads(1);
}

}  // namespace muster
