#include "worker/data/malloc_tuning.h"

#include <malloc.h>

#include <cstdlib>
#include <initializer_list>

namespace muster {

void KeepFreedBatchMemory() {
  static const bool done = [] {
    for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_",
                             "GLIBC_TUNABLES"}) {
      if (std::getenv(name) != nullptr) return false;
    }
    // Setting one switches off glibc's own adaptation of both, so both are set.
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    return true;
  }();
  (void)done;
}

}  // namespace muster
