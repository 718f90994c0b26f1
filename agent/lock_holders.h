#ifndef MUSTER_AGENT_LOCK_HOLDERS_H_
#define MUSTER_AGENT_LOCK_HOLDERS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace muster::agent {

// A process, also after its number has become another one's.
struct LockHolder {
  int64_t pid = 0;
  uint64_t started = 0;  // as ProcessState
  bool operator<(const LockHolder& other) const {
    return pid != other.pid ? pid < other.pid : started < other.started;
  }
};

// The processes that hold a lock (flock) of the file that `fd` is open on, as far as this user may
// look into them. Reads the descriptors of all processes: milliseconds.
std::vector<LockHolder> FindLockHolders(int fd);

// Ends what still holds the lock of an attempt whose runner has ended, and finds out what the
// kernel does not end: a process in a driver or at a disk that hangs keeps its files although it
// was killed. Not thread-safe.
class LockBreaker {
 public:
  // `patience`: from the first look to the first SIGKILL, and from that to the verdict.
  explicit LockBreaker(absl::Duration patience) : patience_(patience) {}

  // Call it now and then while `fd` is locked and the runner has ended: it looks every few seconds.
  // True: all that holds the lock was killed `patience` before the last look, so that none of it
  // runs another instruction of its program.
  bool IsBeyondKilling(int fd, absl::Time now);
  // The processes of the last look with what they do, one line.
  std::string ToString() const;

 private:
  absl::Duration patience_;
  absl::Time first_look_ = absl::InfiniteFuture();
  absl::Time next_look_ = absl::InfinitePast();
  std::map<LockHolder, absl::Time> killed_;  // and still there at the last look
  bool beyond_killing_ = false;
  bool warned_ = false;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_LOCK_HOLDERS_H_
