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
  // A file that would exceed this becomes FILE.1, the previous FILE.1 becomes FILE.2, and so on.
  // One that cannot be renamed continues to grow, and is tried again after as many bytes. 0: no
  // limit.
  int64_t max_bytes = int64_t{128} << 20;
  // The most files, including the one that is written.
  int files = 8;
};

// Returns the path of a file beside a process's log that says where its offsets begin: how many
// bytes were in parts that are gone, and the inode of the first part after them (0: not known),
// which distinguishes it from a part that is about to be removed.
std::string LogGonePath(const std::string& path);

// Returns the path of a file beside the log with the times of its lines: a LogTime at the first
// line of every second that has lines.
std::string LogTimesPath(const std::string& path);
struct LogTime {
  int64_t unix_ms;
  int64_t offset;  // of that line, since the start of the process
};

// Writes the lines of one process to a file. Lines that cannot be written (a full disk) are lost,
// and the file says how many are missing where it resumes. Not thread-safe; blocks on the disk.
class LogFile {
 public:
  using WriteCall = ssize_t (*)(int fd, const void* data, size_t size);

  // Begins an empty file and removes the files into which an earlier log of this name was split.
  // Errors: the system's message and the path. `write`: replaces the system call in tests.
  static absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path,
                                                       const LogLimits& limits = {},
                                                       WriteCall write = nullptr,
                                                       const Clock* clock = &Clock::Real());
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Returns one line for the user when writing begins to fail, or works again; otherwise "".
  std::string Append(absl::string_view line);

 private:
  LogFile(std::string path, const LogLimits& limits, WriteCall write, const Clock* clock, int fd);
  void Rotate();
  // Writes the file of LogGonePath, for readers.
  void NoteGone(uint64_t first_inode);
  void NoteTime();
  // Drops the times of lines in parts that are gone.
  void TrimTimes();

  const std::string path_;
  const LogLimits limits_;
  const WriteCall write_;
  int fd_;
  const Clock& clock_;
  int times_fd_ = -1;                        // -1: could not be opened or written the last time
  absl::Time timed_ = absl::InfinitePast();  // when the last LogTime was written
  int64_t written_ = 0;                      // bytes, since the start
  int64_t size_ = 0;
  int64_t gone_ = 0;   // bytes of parts that are gone
  int64_t lost_ = 0;   // lines lost since writing began to fail
  bool torn_ = false;  // the file ends within a line
  int error_ = 0;      // the errno of the last failure
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_LOG_FILE_H_
