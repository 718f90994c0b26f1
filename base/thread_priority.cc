#include "base/thread_priority.h"

#include <sys/resource.h>

namespace muster {

void LowerThreadPriority(int nice) {
  // Linux takes 0 for the calling thread, not for its process.
  (void)setpriority(PRIO_PROCESS, 0, nice);
}

}  // namespace muster
