#ifndef MUSTER_WORKER_CHECKPOINT_TEST_SYNCED_FOLDERS_H_
#define MUSTER_WORKER_CHECKPOINT_TEST_SYNCED_FOLDERS_H_

#include <unistd.h>

#include <string>
#include <vector>

#include "base/test_system_calls.h"

// While not null, gets the paths that are synced. For a test program of one file.
inline std::vector<std::string>* synced = nullptr;

extern "C" int fsync(int fd) {
  static const auto real = muster::RealCall<int (*)(int)>("fsync");
  char path[4096] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (synced != nullptr && readlink(link.c_str(), path, sizeof(path) - 1) > 0) {
    synced->push_back(path);
  }
  return real(fd);
}

#endif  // MUSTER_WORKER_CHECKPOINT_TEST_SYNCED_FOLDERS_H_
