#include "coordinator/journal/wal_check.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

constexpr size_t kHeaderBytes = 32;
constexpr size_t kFrameHeaderBytes = 24;

uint32_t Big32(const unsigned char* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

struct Checksum {
  uint32_t s0 = 0, s1 = 0;
  void Add(const unsigned char* p, size_t bytes, bool big_endian) {
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      uint32_t x, y;
      if (big_endian) {
        x = Big32(p + i);
        y = Big32(p + i + 4);
      } else {
        std::memcpy(&x, p + i, 4);
        std::memcpy(&y, p + i + 4, 4);
      }
      s0 += x + s1;
      s1 += y + s0;
    }
  }
};

}  // namespace

absl::StatusOr<WalReport> CheckWal(const std::string& path) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  WalReport report;
  if (file == nullptr) {
    if (errno == ENOENT) return report;
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open '", path, "'"));
  }
  unsigned char header[kHeaderBytes];
  const size_t got = std::fread(header, 1, kHeaderBytes, file.get());
  if (got < kHeaderBytes) {
    report.torn_tail_bytes = got;
    return report;
  }
  const uint32_t magic = Big32(header);
  const uint32_t page_bytes = Big32(header + 8);
  const bool big_endian = magic == 0x377f0683;
  Checksum sum;
  sum.Add(header, 24, big_endian);
  const bool header_ok = (big_endian || magic == 0x377f0682) && page_bytes >= 512 &&
                         page_bytes <= 65536 && (page_bytes & (page_bytes - 1)) == 0 &&
                         sum.s0 == Big32(header + 24) && sum.s1 == Big32(header + 28);
  const size_t frame_bytes = kFrameHeaderBytes + (header_ok ? page_bytes : 4096);
  std::vector<unsigned char> frame(frame_bytes);
  if (!header_ok) {
    // A header is written and synced before the first transaction of its log is acknowledged.
    // Frames behind a bad one that carry its salts show that it was whole once.
    bool frames_behind = false;
    while (std::fread(frame.data(), 1, frame_bytes, file.get()) == frame_bytes) {
      frames_behind = frames_behind || std::memcmp(frame.data() + 8, header + 16, 8) == 0;
    }
    if (frames_behind) {
      return absl::DataLossError(
          absl::StrCat("'", path, "' is corrupt at offset 0: its header has a wrong checksum"));
    }
    report.torn_tail_bytes = kHeaderBytes;
    return report;
  }
  uint64_t offset = kHeaderBytes;
  uint64_t uncommitted = 0;
  while (std::fread(frame.data(), 1, frame_bytes, file.get()) == frame_bytes) {
    const bool same_log = std::memcmp(frame.data() + 8, header + 16, 8) == 0;
    sum.Add(frame.data(), 8, big_endian);
    sum.Add(frame.data() + kFrameHeaderBytes, page_bytes, big_endian);
    const bool good =
        same_log && sum.s0 == Big32(frame.data() + 16) && sum.s1 == Big32(frame.data() + 20);
    if (!good) {
      // If a commit of this log follows and then more of the log, the bad frame's transaction was
      // synced.
      const uint64_t bad_offset = offset;
      bool commit_seen = same_log && Big32(frame.data() + 4) != 0;
      uint64_t rest = same_log ? frame_bytes : 0;
      while (std::fread(frame.data(), 1, frame_bytes, file.get()) == frame_bytes) {
        if (std::memcmp(frame.data() + 8, header + 16, 8) != 0) continue;
        rest += frame_bytes;
        if (commit_seen) {
          return absl::DataLossError(
              absl::StrCat("'", path, "' is corrupt at offset ", bad_offset,
                           ": a frame with a wrong checksum is followed by later transactions"));
        }
        commit_seen = Big32(frame.data() + 4) != 0;
      }
      report.torn_tail_bytes = rest + uncommitted * frame_bytes;
      return report;
    }
    ++uncommitted;
    if (Big32(frame.data() + 4) != 0) {
      report.frames += uncommitted;
      ++report.commits;
      uncommitted = 0;
    }
    offset += frame_bytes;
  }
  if (std::ferror(file.get()))
    return absl::UnavailableError(absl::StrCat("cannot read '", path, "'"));
  report.torn_tail_bytes = uncommitted * frame_bytes;
  return report;
}

}  // namespace muster::coordinator
