#include "agent/job_signals.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace muster::agent {
namespace {

// A blocked signal is delivered to a signalfd even if it is ignored.
sigset_t JobSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kJobSignals) {
    struct sigaction action = {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    sigaddset(&signals, signal);
  }
  return signals;
}

}  // namespace

void BlockJobSignals() {
  const sigset_t signals = JobSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  // A reader of our output that goes away must not end the job; the workers get the default back.
  signal(SIGPIPE, SIG_IGN);
}

void EndByJobSignals() {
  const sigset_t signals = JobSignals();
  for (const int signal : kJobSignals) {
    if (sigismember(&signals, signal) == 0) continue;
    struct sigaction action = {};
    // Instead of the default action, so that the parent process sees the same exit code however
    // late a signal came.
    action.sa_handler = [](int number) { _exit(128 + number); };
    sigaction(signal, &action, nullptr);
  }
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

SignalWatcher::SignalWatcher(std::function<void(int)> on_signal)
    : stop_fd_(eventfd(0, EFD_CLOEXEC)),
      thread_([this, on_signal = std::move(on_signal)] { Loop(on_signal); }) {}

SignalWatcher::~SignalWatcher() {
  const uint64_t one = 1;
  ssize_t ignored = write(stop_fd_, &one, sizeof(one));
  static_cast<void>(ignored);
  thread_.join();
  close(stop_fd_);
}

void SignalWatcher::Loop(const std::function<void(int)>& on_signal) {
  const sigset_t signals = JobSignals();
  const int fd = signalfd(-1, &signals, SFD_CLOEXEC);
  for (;;) {
    pollfd fds[2] = {{fd, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
    poll(fds, 2, -1);
    if (fds[1].revents != 0) break;
    signalfd_siginfo info;
    if (fds[0].revents != 0 && read(fd, &info, sizeof(info)) == sizeof(info)) {
      on_signal(static_cast<int>(info.ssi_signo));
    }
  }
  close(fd);
}

StopRequests::Request StopRequests::Take(absl::Time now) {
  if (!first_.has_value()) {
    first_ = now;
    return Request::kStop;
  }
  return now - *first_ < kSameRequest ? Request::kRepeated : Request::kKill;
}

}  // namespace muster::agent
