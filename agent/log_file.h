#ifndef MUSTER_AGENT_LOG_FILE_H_
#define MUSTER_AGENT_LOG_FILE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace muster::agent {

struct LogLimits {
  // A file that would grow beyond becomes FILE.1, what was FILE.1 becomes FILE.2, and so on. One
  // that cannot be renamed grows on, and is tried again after as many bytes. 0: no limit.
  int64_t max_bytes = int64_t{128} << 20;
  // How many there are at most, with the one that is written.
  int files = 8;
};

// Where a process's log is counted from, in a file beside it: how many bytes of it were in parts
// that are gone, and the inode of the first part after them (0: not known), which tells it from one
// that is about to go.
std::string LogGonePath(const std::string& path);

// When its lines were written, in a file beside it: a LogTime at the first line of every second
// that has some.
std::string LogTimesPath(const std::string& path);
struct LogTime {
  int64_t unix_ms;
  int64_t offset;  // of that line, since the start of the process
};

// The lines of one process in a file. Lines that cannot be written (a full disk) are lost, and the
// file says how many are missing where it resumes. Not thread-safe; blocks on the disk.
class LogFile {
 public:
  using WriteCall = ssize_t (*)(int fd, const void* data, size_t size);

  // Begins an empty file and removes what an earlier one of this name was split into. Errors: the
  // system's words and the path. `write`: replaces the system call in tests.
  static absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path,
                                                       const LogLimits& limits = {},
                                                       WriteCall write = nullptr,
                                                       const Clock* clock = &Clock::Real());
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Returns one line for the user when writing begins to fail, or works again; else "".
  std::string Append(absl::string_view line);

 private:
  LogFile(std::string path, const LogLimits& limits, WriteCall write, const Clock* clock, int fd);
  void Rotate();
  // For readers, see LogGonePath.
  void NoteGone(uint64_t first_inode);
  void NoteTime();
  // Drops the times of lines that are gone.
  void TrimTimes();

  const std::string path_;
  const LogLimits limits_;
  const WriteCall write_;
  int fd_;
  const Clock& clock_;
  int times_fd_ = -1;                        // -1: could not be written the last time
  absl::Time timed_ = absl::InfinitePast();  // the last LogTime
  int64_t written_ = 0;                      // bytes, since the start
  int64_t size_ = 0;
  int64_t gone_ = 0;   // bytes of parts that are gone
  int64_t lost_ = 0;   // lines since writing began to fail
  bool torn_ = false;  // the file ends within a line
  int error_ = 0;      // the last one
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_LOG_FILE_H_
