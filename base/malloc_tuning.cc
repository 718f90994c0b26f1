#include "base/malloc_tuning.h"

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

void KeepFreed() { SetThresholds(32 << 20, 256 << 20); }
void GiveBackFreed() { SetThresholds(1 << 20, 16 << 20); }

Mutex tuning;
bool tuned ABSL_GUARDED_BY(tuning) = false;
bool gives_back ABSL_GUARDED_BY(tuning) = false;
int scopes ABSL_GUARDED_BY(tuning) = 0;

}  // namespace

void KeepFreedBatchMemory() {
  const MutexLock lock(&tuning);
  if (tuned || UserHasTuned()) return;
  tuned = true;
  if (scopes == 0) KeepFreed();
}

void GiveBackFreedMemory() {
  const MutexLock lock(&tuning);
  if (UserHasTuned()) return;
  tuned = gives_back = true;
  GiveBackFreed();
}

ScopedGiveBackFreedMemory::ScopedGiveBackFreedMemory() {
  const MutexLock lock(&tuning);
  ++scopes;
  if (!UserHasTuned()) GiveBackFreed();
}

ScopedGiveBackFreedMemory::~ScopedGiveBackFreedMemory() {
  const MutexLock lock(&tuning);
  if (--scopes > 0 || UserHasTuned()) return;
  malloc_trim(0);
  if (!gives_back) KeepFreed();
}

}  // namespace muster
