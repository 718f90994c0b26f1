#ifndef MUSTER_BASE_TEST_HELD_REPORT_H_
#define MUSTER_BASE_TEST_HELD_REPORT_H_

#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "base/owned_fd.h"
#include "gtest/gtest.h"

namespace muster {

// A file for the action `report` of failpoints (base/failpoint.h) that blocks each thread that
// passes one, in this process or others, until Release(): a full pipe.
class HeldReport {
 public:
  explicit HeldReport(const std::string& path) {
    EXPECT_EQ(mkfifo(path.c_str(), 0600), 0) << path;
    pipe_ = OwnedFd(open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
    const std::string page(4096, '.');
    while (write(pipe_.get(), page.data(), page.size()) > 0) {
    }
    opens_ = OwnedFd(inotify_init1(IN_CLOEXEC));
    EXPECT_GE(inotify_add_watch(opens_.get(), path.c_str(), IN_OPEN), 0) << path;
  }

  // Blocks until a thread is held up. Call it once: the events of several threads may be merged.
  void WaitUntilHeld() {
    char event[sizeof(inotify_event)];
    EXPECT_GT(read(opens_.get(), event, sizeof(event)), 0);
  }

  // Lets all threads continue, for good: the pipe has room for what is left to report.
  void Release() {
    char page[4096];
    while (read(pipe_.get(), page, sizeof(page)) > 0) {
    }
  }

 private:
  OwnedFd pipe_, opens_;
};

}  // namespace muster

#endif  // MUSTER_BASE_TEST_HELD_REPORT_H_
