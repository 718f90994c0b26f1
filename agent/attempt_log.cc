#include "agent/attempt_log.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "agent/log_file.h"
#include "base/file.h"
#include "base/last_lines.h"
#include "base/owned_fd.h"

namespace muster::agent {
namespace {

// Lines written within this time after a LogTime have none of their own.
constexpr int64_t kLogTimeSpan = 1000;  // milliseconds
// How often to read again while the log rotates.
constexpr int kTries = 10;

// The content of the file at LogGonePath.
struct Gone {
  int64_t bytes = 0;
  ino_t first_inode = 0;

  bool operator==(const Gone&) const = default;
};

// The open parts of a log, oldest first.
struct Parts {
  struct Part {
    OwnedFd fd;
    int64_t begin = 0;
    int64_t size = 0;
    ino_t inode = 0;
  };
  std::deque<Part> parts;
  Gone gone;
  int64_t begin = 0;
  int64_t end = 0;
};

absl::StatusOr<Gone> ReadGone(const std::string& path) {
  Gone gone;
  const absl::StatusOr<std::string> text = ReadFile(LogGonePath(path), 64);
  if (absl::IsNotFound(text.status())) return gone;
  if (!text.ok()) return text.status();
  // An older runner wrote no inode.
  const std::pair<absl::string_view, absl::string_view> words = absl::StrSplit(*text, ' ');
  int64_t bytes = 0;
  uint64_t inode = 0;
  if (absl::SimpleAtoi(words.first, &bytes)) gone.bytes = std::max<int64_t>(bytes, 0);
  if (absl::SimpleAtoi(words.second, &inode)) gone.first_inode = static_cast<ino_t>(inode);
  return gone;
}

// Whether no rotation came between the opens of its parts.
bool IsConsistent(const Parts& log, const std::string& path) {
  struct stat newest;
  // In the middle of a rotation there is no newest file, and the other parts are the whole log.
  if (stat(path.c_str(), &newest) == 0 && newest.st_ino != log.parts.back().inode) return false;
  for (size_t i = 1; i < log.parts.size(); ++i) {
    if (log.parts[i].inode == log.parts[i - 1].inode) return false;
  }
  const absl::StatusOr<Gone> gone = ReadGone(path);
  return gone.ok() && *gone == log.gone;
}

absl::StatusOr<Parts> OpenOnce(const std::string& path) {
  Parts log;
  const absl::StatusOr<Gone> gone = ReadGone(path);
  if (!gone.ok()) return gone.status();
  log.gone = *gone;
  int missing = 0;  // consecutive
  for (int number = 0;; ++number) {
    const std::string name = number == 0 ? path : absl::StrCat(path, ".", number);
    Parts::Part part;
    part.fd = OwnedFd(open(name.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat info;
    if (!part.fd.open() || fstat(part.fd.get(), &info) != 0) {
      // Too many open files, for example. Without this part the others would be at wrong offsets.
      if (errno != ENOENT) return absl::ErrnoToStatus(errno, name);
      // A rotation leaves out only one number at a time.
      if (++missing < 2) continue;
      if (log.parts.empty()) return absl::ErrnoToStatus(ENOENT, path);
      break;
    }
    missing = 0;
    part.size = info.st_size;
    part.inode = info.st_ino;
    log.parts.push_front(std::move(part));
  }
  // A part that is about to be removed counts as gone.
  const auto first = std::find_if(log.parts.begin(), log.parts.end(), [&](const Parts::Part& part) {
    return part.inode == log.gone.first_inode;
  });
  if (first != log.parts.end()) log.parts.erase(log.parts.begin(), first);
  log.begin = log.end = log.gone.bytes;
  for (Parts::Part& part : log.parts) {
    part.begin = log.end;
    log.end += part.size;
  }
  return log;
}

absl::StatusOr<Parts> Open(const std::string& path) {
  absl::StatusOr<Parts> log = OpenOnce(path);
  for (int tries = 0; tries < kTries && log.ok() && !IsConsistent(*log, path); ++tries) {
    log = OpenOnce(path);
  }
  return log;
}

absl::Status Read(const Parts& log, int64_t offset, size_t bytes, std::string* data) {
  for (const Parts::Part& part : log.parts) {
    while (data->size() < bytes) {
      const int64_t at = offset + static_cast<int64_t>(data->size()) - part.begin;
      if (at < 0 || at >= part.size) break;
      const size_t had = data->size();
      data->resize(had + std::min<size_t>(bytes - had, part.size - at));
      const ssize_t n = pread(part.fd.get(), data->data() + had, data->size() - had, at);
      data->resize(had + std::max<ssize_t>(n, 0));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return absl::ErrnoToStatus(errno, "cannot read the log");
      if (n == 0) return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<LogPiece> ReadOnce(const Parts& log, int64_t offset, int tail_lines,
                                  size_t max_bytes) {
  LogPiece piece;
  if (offset < 0) {
    const absl::StatusOr<int64_t> tail =
        FindLastLines(log.begin, log.end, tail_lines,
                      [&](int64_t from, int64_t bytes) -> absl::StatusOr<std::string> {
                        std::string block;
                        absl::Status status = Read(log, from, static_cast<size_t>(bytes), &block);
                        if (!status.ok()) return status;
                        return block;
                      });
    if (!tail.ok()) return tail.status();
    offset = *tail;
  }
  piece.offset = std::max(offset, log.begin);
  if (piece.offset < log.end) {
    if (absl::Status status = Read(log, piece.offset, max_bytes, &piece.data); !status.ok()) {
      return status;
    }
  }
  return piece;
}

// Whether the bytes that were read are those of the file that was opened. If the log is a single
// file, a rotation empties it, and notes that before anything else is written to it.
bool IsStillThere(const Parts& log, const std::string& path) {
  if (log.parts.size() > 1) return true;
  const absl::StatusOr<Gone> gone = ReadGone(path);
  return gone.ok() && *gone == log.gone;
}

}  // namespace

absl::StatusOr<LogPiece> ReadLogPiece(const std::string& path, int64_t offset, int tail_lines,
                                      size_t max_bytes) {
  LogPiece piece;
  bool whole = false;
  for (int tries = 0; tries < kTries && !whole; ++tries) {
    const absl::StatusOr<Parts> log = Open(path);
    if (!log.ok()) return log.status();
    absl::StatusOr<LogPiece> read = ReadOnce(*log, offset, tail_lines, max_bytes);
    if (!read.ok()) return read.status();
    piece = *std::move(read);
    whole = IsStillThere(*log, path);
  }
  if (const size_t newline = piece.data.rfind('\n'); newline != std::string::npos) {
    piece.data.resize(newline + 1);
  }
  piece.next_offset = piece.offset + static_cast<int64_t>(piece.data.size());
  return piece;
}

absl::StatusOr<int64_t> LogOffsetAt(const std::string& path, absl::Time since) {
  absl::StatusOr<Parts> log = Open(path);
  if (!log.ok()) return log.status();
  const OwnedFd times(open(LogTimesPath(path).c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info;
  if (!times.open() || fstat(times.get(), &info) != 0) return 0;
  const int64_t wanted = absl::ToUnixMillis(since);
  const auto at = [&](int64_t index) {
    LogTime entry = {};
    const ssize_t n = pread(times.get(), &entry, sizeof(entry), index * sizeof(entry));
    // Cut off: treat it as an entry at the end of the log.
    return n == sizeof(entry) ? entry : LogTime{wanted, log->end};
  };
  // The first entry of a later second than `since`. The entry before it may have lines of that
  // second.
  int64_t low = 0, high = info.st_size / static_cast<int64_t>(sizeof(LogTime));
  const int64_t count = high;
  if (count == 0) return 0;  // the file of times has just begun again
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (at(middle).unix_ms <= wanted - kLogTimeSpan) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low == count ? log->end : at(low).offset;
}

}  // namespace muster::agent
