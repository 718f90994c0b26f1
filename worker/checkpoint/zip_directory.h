#ifndef MUSTER_WORKER_CHECKPOINT_ZIP_DIRECTORY_H_
#define MUSTER_WORKER_CHECKPOINT_ZIP_DIRECTORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/byte_source.h"

namespace muster {

// A member of a zip archive.
struct ZipMember {
  std::string name = "";
  // Range in the archive's file.
  uint64_t begin = 0;
  uint64_t bytes = 0;
  // Whether these bytes have to be decompressed, which nothing here does.
  bool compressed = false;
};

// Returns the members of a zip archive in the order of its directory, also with the 64-bit records
// (zip64) of large files.
//
// Every range lies inside the file and outside every other member's; memory stays proportional to
// the directory, which is at most kMaxZipDirectoryBytes long. Checksums of members are not
// compared, because torch.save can omit them. Errors: INVALID_ARGUMENT "FILE: why" for a file that
// is not a zip archive, a damaged one, an encrypted member, or a repeated name.
absl::StatusOr<std::vector<ZipMember>> ReadZipDirectory(const ByteSource& file);

inline constexpr uint64_t kMaxZipDirectoryBytes = uint64_t{256} << 20;

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_ZIP_DIRECTORY_H_
