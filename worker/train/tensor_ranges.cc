#include "worker/train/tensor_ranges.h"

// LibTorch has its own copy of the OpenMP runtime, and at::set_num_threads affects the whole
// process. These two functions affect only the calling thread; they are found in LibTorch's copy
// when the program is loaded.
extern "C" {
int omp_get_max_threads() __attribute__((weak));
void omp_set_num_threads(int threads) __attribute__((weak));
}

namespace muster {
namespace {

bool HasOpenMp() { return omp_get_max_threads != nullptr && omp_set_num_threads != nullptr; }

}  // namespace

OneThread::OneThread() : threads_(HasOpenMp() ? omp_get_max_threads() : 0) {
  if (threads_ > 1) omp_set_num_threads(1);
}

OneThread::~OneThread() {
  if (threads_ > 1) omp_set_num_threads(threads_);
}

}  // namespace muster
