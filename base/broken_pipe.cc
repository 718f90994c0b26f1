#include "base/broken_pipe.h"

#include <signal.h>

namespace muster {

void SurviveBrokenPipes() {
  struct sigaction now = {};
  if (sigaction(SIGPIPE, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 ||
      now.sa_handler != SIG_DFL) {
    return;
  }
  struct sigaction ours = {};
  ours.sa_handler = [](int) {};
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGPIPE, &ours, nullptr);
}

}  // namespace muster
