#include "base/descriptor_limit.h"

#include <sys/resource.h>

#include <atomic>

namespace muster {
namespace {

// The soft limit from before; RLIM_INFINITY: nothing was raised. A child may look at it right after
// fork, so it is no lock's.
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
