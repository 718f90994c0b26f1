#include "examples/mnist/idx.h"

#include <errno.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace {

constexpr char kWayOut[] = "; run tools/fetch_mnist to get the right file";
// MNIST has 47 MB; a file near this limit is too large for an example.
constexpr uint64_t kMaxBytes = uint64_t{1} << 32;

absl::Status Bad(absl::StatusCode code, const std::string& path, const std::string& why) {
  return absl::Status(code, absl::StrCat(path, ": ", why, kWayOut));
}

}  // namespace

absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, "");
    return Bad(status.code(), path, "cannot be opened");
  }
  if (!S_ISREG(info.st_mode)) {
    return Bad(absl::StatusCode::kInvalidArgument, path, "is not a file");
  }
  std::ifstream file(path, std::ios::binary);
  const uint64_t header_bytes = 4 + 4 * static_cast<uint64_t>(dimensions);
  std::vector<uint8_t> header(header_bytes);
  file.read(reinterpret_cast<char*>(header.data()), static_cast<std::streamsize>(header_bytes));
  const uint64_t found = static_cast<uint64_t>(info.st_size);
  const bool whole_header = file.gcount() == static_cast<std::streamsize>(header_bytes);
  if (!whole_header && found >= header_bytes) {
    return Bad(absl::StatusCode::kUnavailable, path, "cannot be read");
  }
  if (!whole_header && found < 4) {
    return Bad(absl::StatusCode::kDataLoss, path,
               absl::StrCat("expected at least ", header_bytes, " bytes, found ", found));
  }
  if (header[0] != 0 || header[1] != 0) {
    return Bad(absl::StatusCode::kInvalidArgument, path,
               header[0] == 0x1f && header[1] == 0x8b
                   ? "expected an IDX file, found a compressed one (gunzip it)"
                   : "expected an IDX file, which begins with two zero bytes");
  }
  if (header[2] != 8) {
    return Bad(absl::StatusCode::kInvalidArgument, path,
               absl::StrCat("expected element type 8 (unsigned byte), found ", header[2]));
  }
  if (header[3] != dimensions) {
    return Bad(absl::StatusCode::kInvalidArgument, path,
               absl::StrCat("expected ", dimensions, " dimensions, found ", header[3]));
  }
  if (!whole_header) {
    return Bad(absl::StatusCode::kDataLoss, path,
               absl::StrCat("expected at least ", header_bytes, " bytes, found ", found));
  }
  IdxArray array;
  uint64_t count = 1;
  bool absurd = false;
  for (int i = 0; i < dimensions; ++i) {
    uint32_t size = 0;
    for (int k = 0; k < 4; ++k) size = size << 8 | header[4 + 4 * i + k];
    array.sizes.push_back(size);
    absurd = absurd || __builtin_mul_overflow(count, uint64_t{size}, &count);
  }
  if (absurd || count > kMaxBytes) {
    return Bad(absl::StatusCode::kInvalidArgument, path,
               "its dimensions are larger than any MNIST file's");
  }
  if (found != header_bytes + count) {
    return Bad(absl::StatusCode::kDataLoss, path,
               absl::StrCat("expected ", header_bytes + count, " bytes, found ", found));
  }
  array.values.resize(count);
  file.read(reinterpret_cast<char*>(array.values.data()), static_cast<std::streamsize>(count));
  if (file.gcount() != static_cast<std::streamsize>(count)) {
    return Bad(absl::StatusCode::kDataLoss, path,
               absl::StrCat("expected ", header_bytes + count, " bytes, found ",
                            header_bytes + static_cast<uint64_t>(file.gcount())));
  }
  return array;
}
