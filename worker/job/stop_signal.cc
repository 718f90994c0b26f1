#include "worker/job/stop_signal.h"

#include <signal.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/mutex.h"

namespace muster {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

std::atomic<int64_t> g_first{0};  // time of the monotonic clock; 0: none came
std::atomic<int64_t (*)()> g_clock{nullptr};
static_assert(std::atomic<int64_t>::is_always_lock_free);
bool g_installed = false;  // under InstallMutex()

Mutex& InstallMutex() {
  static auto* const mu = new Mutex;
  return *mu;
}

int64_t MonotonicNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void OnSignal(int signal) {
  const int saved = errno;
  const int64_t now = g_clock.load()();
  int64_t first = 0;
  if (!g_first.compare_exchange_strong(first, now) && now - first >= StopSignal::kSameRequest) {
    struct sigaction ours = {};
    ours.sa_handler = SIG_DFL;
    sigaction(signal, &ours, nullptr);
    raise(signal);  // takes effect when this handler returns
  }
  errno = saved;
}

}  // namespace

bool StopSignal::Install(int64_t (*monotonic_ns)()) {
  MutexLock lock(&InstallMutex());
  if (g_installed) return true;
  g_clock.store(monotonic_ns != nullptr ? monotonic_ns : MonotonicNanoseconds);
  struct sigaction now = {};
  if (sigaction(SIGTERM, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return false;
  struct sigaction ours = {};
  ours.sa_handler = OnSignal;
  ours.sa_flags = SA_RESTART;  // no call fails because of this handler
  sigemptyset(&ours.sa_mask);
  g_installed = sigaction(SIGTERM, &ours, nullptr) == 0;
  return g_installed;
}

bool StopSignal::Release() {
  MutexLock lock(&InstallMutex());
  struct sigaction now = {};
  if (g_installed && sigaction(SIGTERM, nullptr, &now) == 0 && now.sa_handler == OnSignal) {
    struct sigaction ours = {};
    ours.sa_handler = SIG_DFL;
    sigaction(SIGTERM, &ours, nullptr);
    g_installed = false;
  }
  // Signals from here on end the process.
  return !Received();
}

bool StopSignal::Received() { return g_first.load() != 0; }

}  // namespace muster
