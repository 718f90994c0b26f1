#ifndef MUSTER_BASE_TEST_WAIT_H_
#define MUSTER_BASE_TEST_WAIT_H_

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

namespace muster {

// Waits until `condition` returns true, for conditions that nothing reports. If it never does, the
// test runner's time limit ends the test. A condition that takes longer than a moment is checked
// once a millisecond, because what it waits for needs the core, too.
template <class Condition>
void WaitUntil(const Condition& condition) {
  constexpr int kMoment = 100;
  for (int looks = 0; !condition(); ++looks) {
    if (looks < kMoment) {
      std::this_thread::yield();
    } else {
      poll(nullptr, 0, 1);
    }
  }
}

// Waits until `pid` has ended (it may still be a zombie of another process). Returns false after a
// minute.
inline bool WaitUntilEnded(pid_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return errno == ESRCH;
  pollfd event = {fd, POLLIN, 0};
  const bool ended = poll(&event, 1, 60'000) == 1;
  close(fd);
  return ended;
}

}  // namespace muster

#endif  // MUSTER_BASE_TEST_WAIT_H_
