#ifndef MUSTER_BASE_TEST_FAILING_DISK_H_
#define MUSTER_BASE_TEST_FAILING_DISK_H_

#include <atomic>

namespace muster {

// A disk that fails at any moment: a program that links this has open, write, pwrite, fallocate,
// ftruncate, fsync, fdatasync, mkdir, rename, renameat2, unlink, unlinkat and rmdir of its own,
// which fail below a folder named "failing_disk" when `disk_fault` says so. For tests.
struct DiskFault {
  // The call number `at` from now on fails, from 1.
  void Arm(long at);
  void Disarm();

  std::atomic<int> error{0};               // errno of a call that fails
  std::atomic<bool> lasts{false};          // so do the calls after it,
  std::atomic<bool> also_removals{false};  // those that remove files too
  std::atomic<bool> open_files{false};     // only those on files that are open count
  std::atomic<bool> fired{false};          // since Arm()

  std::atomic<long> calls{0};
  std::atomic<long> at{0};  // 0: none
};
extern DiskFault disk_fault;

}  // namespace muster

#endif  // MUSTER_BASE_TEST_FAILING_DISK_H_
