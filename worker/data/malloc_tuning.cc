#include "worker/data/malloc_tuning.h"

#include <malloc.h>

#include <cstdlib>
#include <initializer_list>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace muster {

namespace {

bool UserHasTuned() {
  for (const char* name :
       {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

// Setting one switches off glibc's own adaptation of both, so both are set.
void SetThresholds(int mmap, int trim) {
  mallopt(M_MMAP_THRESHOLD, mmap);
  mallopt(M_TRIM_THRESHOLD, trim);
}

Mutex tuning;
bool tuned ABSL_GUARDED_BY(tuning) = false;

}  // namespace

void KeepFreedBatchMemory() {
  const MutexLock lock(&tuning);
  if (tuned || UserHasTuned()) return;
  tuned = true;
  SetThresholds(32 << 20, 256 << 20);
}

void GiveBackFreedMemory() {
  const MutexLock lock(&tuning);
  if (UserHasTuned()) return;
  tuned = true;
  SetThresholds(1 << 20, 16 << 20);
}

}  // namespace muster
