#include "agent/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/owned_fd.h"

namespace muster::agent {
namespace {

int Begin(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
}

constexpr absl::Duration kBetweenTimes = absl::Seconds(1);

std::string Part(const std::string& path, int number) { return absl::StrCat(path, ".", number); }

}  // namespace

absl::StatusOr<std::unique_ptr<LogFile>> LogFile::Open(const std::string& path,
                                                       const LogLimits& limits, WriteCall write,
                                                       const Clock* clock) {
  const int fd = Begin(path);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  for (int number = 1; unlink(Part(path, number).c_str()) == 0; ++number) {
  }
  unlink(LogGonePath(path).c_str());
  return std::unique_ptr<LogFile>(
      new LogFile(path, limits, write != nullptr ? write : ::write, clock, fd));
}

LogFile::LogFile(std::string path, const LogLimits& limits, WriteCall write, const Clock* clock,
                 int fd)
    : path_(std::move(path)), limits_(limits), write_(write), fd_(fd), clock_(*clock) {
  // Without this file the log is complete, but a reader that asks for a time gets the whole log.
  times_fd_ = Begin(LogTimesPath(path_));
}

LogFile::~LogFile() {
  close(fd_);
  if (times_fd_ >= 0) close(times_fd_);
}

std::string LogTimesPath(const std::string& path) { return absl::StrCat(path, ".times"); }

void LogFile::NoteTime() {
  const absl::Time now = clock_.WallNow();
  // A clock that goes back would put entries out of order.
  if (now < timed_ + kBetweenTimes) return;
  timed_ = now;
  // After a full disk the file begins again, and all lines so far count as written now.
  const bool again = times_fd_ < 0;
  if (again) times_fd_ = Begin(LogTimesPath(path_));
  const LogTime entry = {absl::ToUnixMillis(now), again ? 0 : written_};
  if (times_fd_ >= 0 && ::write(times_fd_, &entry, sizeof(entry)) == sizeof(entry)) return;
  // An incomplete entry would misplace all that follow, and a reader would take a file of times
  // that ends early for a log that does.
  unlink(LogTimesPath(path_).c_str());
  if (times_fd_ >= 0) close(std::exchange(times_fd_, -1));
}

void LogFile::TrimTimes() {
  if (times_fd_ < 0) return;
  const std::string path = LogTimesPath(path_), kept_path = absl::StrCat(path, ".new");
  const OwnedFd from(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info;
  if (!from.open() || fstat(from.get(), &info) != 0) return;
  const auto at = [&](int64_t index) {
    LogTime entry = {};
    const ssize_t n = pread(from.get(), &entry, sizeof(entry), index * sizeof(entry));
    return n == sizeof(entry) ? entry : LogTime{0, written_};
  };
  // The first entry whose lines all exist; some of the lines of the entry before it may remain,
  // too.
  int64_t low = 0, high = info.st_size / static_cast<int64_t>(sizeof(LogTime));
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (at(middle).offset <= gone_) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low < 2) return;
  // A reader that has the old file open continues with it.
  const int fd = Begin(kept_path);
  bool whole = fd >= 0;
  std::string piece(64 << 10, '\0');
  for (off_t offset = (low - 1) * static_cast<off_t>(sizeof(LogTime)); whole;) {
    const ssize_t n = pread(from.get(), piece.data(), piece.size(), offset);
    if (n == 0) break;
    whole = n > 0 && ::write(fd, piece.data(), n) == n;
    offset += n;
  }
  if (whole && rename(kept_path.c_str(), path.c_str()) == 0) {
    close(std::exchange(times_fd_, fd));
    return;
  }
  // The file continues to grow, and is tried again when more parts are gone.
  if (fd >= 0) close(fd);
  unlink(kept_path.c_str());
}

std::string LogGonePath(const std::string& path) { return absl::StrCat(path, ".gone"); }

void LogFile::NoteGone(uint64_t first_inode) {
  const OwnedFd fd(open(LogGonePath(path_).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  // Has a fixed width and overwrites the previous value, so that a reader never sees a part of it
  // and a full disk has room for it.
  const std::string text = absl::StrFormat("%020d %020d", gone_, first_inode);
  // A reader that does not see the file counts from the oldest part, and reads later bytes than it
  // asked for.
  const ssize_t ignored = fd.open() ? pwrite(fd.get(), text.data(), text.size(), 0) : -1;
  static_cast<void>(ignored);
}

void LogFile::Rotate() {
  size_ = 0;
  const bool one_file = limits_.files <= 1;
  // The part that is removed now, if there are as many parts as allowed.
  struct stat last = {}, next = {};
  const std::string oldest = one_file ? path_ : Part(path_, limits_.files - 1);
  const bool goes = stat(oldest.c_str(), &last) == 0;
  if (goes) {
    gone_ += last.st_size;
    if (!one_file) {
      const int after = limits_.files - 2;
      const bool known = stat((after == 0 ? path_ : Part(path_, after)).c_str(), &next) == 0;
      // Before removing the part: until it is removed, a reader learns from this that it no longer
      // counts.
      NoteGone(known ? next.st_ino : 0);
    }
    TrimTimes();
  }
  for (int number = limits_.files - 1; number > 1; --number) {
    rename(Part(path_, number - 1).c_str(), Part(path_, number).c_str());
  }
  // A file that cannot be rotated is not discarded: writing continues in it, and rotation is
  // retried after as many bytes again. The file may have been removed.
  if (!one_file && rename(path_.c_str(), Part(path_, 1).c_str()) != 0 && errno != ENOENT) {
    if (goes && stat(oldest.c_str(), &next) == 0 && next.st_ino == last.st_ino) {
      gone_ -= last.st_size;
      NoteGone(last.st_ino);
    }
    return;
  }
  // If no new file can be made, writing continues in the old one, too.
  if (const int fd = Begin(path_); fd >= 0) close(std::exchange(fd_, fd));
  // Afterwards: until then a reader finds an empty file, and waits.
  if (one_file && goes) NoteGone(0);
}

std::string LogFile::Append(absl::string_view line) {
  const int64_t line_size = static_cast<int64_t>(line.size()) + 1;
  if (limits_.max_bytes > 0 && size_ > 0 && size_ + line_size > limits_.max_bytes) Rotate();
  NoteTime();
  const std::string text = absl::StrCat(
      torn_ ? "\n" : "",
      lost_ > 0 ? absl::StrCat("[muster: ", lost_, lost_ == 1 ? " line is" : " lines are",
                               " missing here: ", strerror(error_), "]\n")
                : "",
      line, "\n");
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t n = write_(fd_, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      error_ = errno;
      break;
    }
    written += static_cast<size_t>(n);
  }
  size_ += static_cast<int64_t>(written);
  written_ += static_cast<int64_t>(written);
  if (written == text.size()) {
    torn_ = false;
    const int64_t lost = std::exchange(lost_, 0);
    return lost == 0 ? ""
                     : absl::StrCat("the log ", path_, " is written again; ", lost,
                                    lost == 1 ? " line is" : " lines are", " missing in it");
  }
  if (written > 0) torn_ = text[written - 1] != '\n';
  return ++lost_ > 1
             ? ""
             : absl::StrCat("the log ", path_, " cannot be written: ", strerror(error_),
                            "; its lines are lost until it can be written, the job continues");
}

}  // namespace muster::agent
