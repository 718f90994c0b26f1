#include "worker/process/stop_signal.h"

#include <signal.h>

#include <atomic>

#include "base/mutex.h"

namespace muster {
namespace {

std::atomic<bool> g_received{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void OnSignal(int) { g_received.store(true); }

}  // namespace

bool StopSignal::Install() {
  static Mutex* const mu = new Mutex;
  static bool installed = false;
  MutexLock lock(mu);
  if (installed) return true;
  struct sigaction now = {};
  if (sigaction(SIGTERM, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return false;
  struct sigaction ours = {};
  ours.sa_handler = OnSignal;
  // SA_RESETHAND: the next one finds the default again. SA_RESTART: no call fails because of us.
  ours.sa_flags = SA_RESETHAND | SA_RESTART;
  sigemptyset(&ours.sa_mask);
  installed = sigaction(SIGTERM, &ours, nullptr) == 0;
  return installed;
}

bool StopSignal::Received() { return g_received.load(); }

}  // namespace muster
