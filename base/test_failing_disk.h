#ifndef MUSTER_BASE_TEST_FAILING_DISK_H_
#define MUSTER_BASE_TEST_FAILING_DISK_H_

#include <atomic>

namespace muster {

// A disk that fails at a chosen moment: a program that links this library replaces open, write,
// pwrite, fallocate, ftruncate, fsync, fdatasync, mkdir, rename, renameat2, unlink, unlinkat and
// rmdir by functions that fail below a folder named "failing_disk" as `disk_fault` says. For tests.
struct DiskFault {
  // Makes call number `at` from now on fail; the first call is 1.
  void Arm(long at);
  void Disarm();

  std::atomic<int> error{0};               // the errno of a call that fails
  std::atomic<bool> lasts{false};          // the calls after it fail, too
  std::atomic<bool> also_removals{false};  // calls that remove files count and fail, too
  std::atomic<bool> open_files{false};     // only calls on open files count
  std::atomic<bool> fired{false};          // whether a call has failed since Arm()

  std::atomic<long> calls{0};
  std::atomic<long> at{0};  // 0: none
};
extern DiskFault disk_fault;

}  // namespace muster

#endif  // MUSTER_BASE_TEST_FAILING_DISK_H_
