#include "base/descriptor_limit.h"

#include <sys/resource.h>

#include <atomic>

namespace muster {
namespace {

// The soft limit before it was raised; RLIM_INFINITY: it was not raised. Atomic instead of guarded
// by a lock, because a child may read it right after fork.
std::atomic<rlim_t> before{RLIM_INFINITY};

}  // namespace

uint64_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  if (limit.rlim_cur < limit.rlim_max) {
    rlim_t none = RLIM_INFINITY;
    before.compare_exchange_strong(none, limit.rlim_cur);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
  }
  return limit.rlim_cur;
}

void RestoreDescriptorLimit() {
  const rlim_t soft = before.load();
  rlimit limit{};
  if (soft == RLIM_INFINITY || getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = soft;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace muster
