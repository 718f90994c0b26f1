#ifndef MUSTER_WORKER_CHECKPOINT_SAFETENSORS_FORMAT_H_
#define MUSTER_WORKER_CHECKPOINT_SAFETENSORS_FORMAT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// The safetensors file format, without tensors: 8 bytes (little-endian) with the length N of the
// header, N bytes of JSON, then one data block in which every tensor has its range. safetensors.h
// reads and writes at::Tensor.
//
//   {"__metadata__": {"format": "pt"}, "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets":
//   [0, 24]}}
//
// Everything except ReadSafetensorsHeader is pure; everything is thread-safe.

// A safetensors element type. The numeric order is the format's rank: files hold higher ranks
// first.
enum class SafetensorsType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

// "F32", "BF16", ... as written in files.
absl::string_view SafetensorsTypeName(SafetensorsType type);
std::optional<SafetensorsType> ParseSafetensorsType(absl::string_view name);
// 32 for kF32; 4 and 6 for the two kinds of elements smaller than a byte.
int SafetensorsTypeBits(SafetensorsType type);

// The size of a tensor in bytes. INVALID_ARGUMENT if it overflows 64 bits or is not a whole number
// of bytes.
absl::StatusOr<uint64_t> SafetensorsBytes(SafetensorsType type, const std::vector<uint64_t>& shape);

struct SafetensorsEntry {
  std::string name = "";
  SafetensorsType type = SafetensorsType::kU8;
  std::vector<uint64_t> shape = {};
  // Range inside the data block.
  uint64_t begin = 0;
  uint64_t end = 0;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::optional<SafetensorsMetadata> metadata;
  // Sorted by name.
  std::vector<SafetensorsEntry> tensors;
  // N: the data block begins at byte 8 + N.
  uint64_t header_bytes = 0;
  uint64_t data_bytes = 0;

  // Null if there is no tensor of that name.
  const SafetensorsEntry* Find(absl::string_view name) const;
};

// The largest N that is read: the limit of the reference library.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// Parses the N bytes of JSON of a file whose data block has `data_bytes` bytes.
//
// Strict: RFC 8259 JSON with only white space around it; only the fields dtype, shape,
// data_offsets; no duplicate name or key; offsets and dimensions written as unsigned 64-bit
// integers; metadata from text to text (null counts as none); known dtypes; sizes that match shape
// and dtype; ranges that cover the data block without overlap or hole. Memory stays proportional to
// the header. Errors: INVALID_ARGUMENT "SOURCE: tensor "NAME": field: why".
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_bytes,
                                                         absl::string_view source);

// Opens `path` and reads only its header. Blocks on the disk. Errors: as ParseSafetensorsHeader,
// and those of files.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path);
// The same for an open file. The header and the data have to come from one file, and `path`, which
// is for errors, may name another file by then.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(int fd, const std::string& path);
// The same for a source of `file_bytes` bytes. `read` reads exactly `bytes` bytes.
using ReadBytes = std::function<absl::Status(uint64_t offset, char* to, size_t bytes)>;
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(uint64_t file_bytes, const ReadBytes& read,
                                                        const std::string& path);

// The bytes before the data, and the offset of each tensor's data.
struct SafetensorsLayout {
  // The length, the JSON and its padding; its size is a multiple of the data's alignment.
  std::string prefix;
  // The part of the JSON for the tensors: equal for files with the same tensors and other metadata.
  std::string entries;
  // In the order of the file: decreasing type rank, then name. Ranges are filled in.
  std::vector<SafetensorsEntry> tensors;
  uint64_t data_bytes = 0;
};

// In files of the reference library, data begin at a multiple of this.
inline constexpr uint64_t kSafetensorsAlignment = 8;

// Lays out a file, byte for byte as the reference library writes it (metadata sorted by key);
// ignores the ranges of `tensors`. A larger `data_alignment`, a multiple of 8, pads the JSON with
// more blanks, so that the data begin at a multiple of it; every reader accepts such a file.
// Errors: INVALID_ARGUMENT for a duplicate name, the name "__metadata__", text that is not UTF-8, a
// bad size, a header beyond the limit.
absl::StatusOr<SafetensorsLayout> LayOutSafetensors(
    std::vector<SafetensorsEntry> tensors, const std::optional<SafetensorsMetadata>& metadata,
    uint64_t data_alignment = kSafetensorsAlignment);

// Returns the prefix of a file with these SafetensorsLayout::entries. Errors: as LayOutSafetensors,
// for metadata and the limit.
absl::StatusOr<std::string> SafetensorsPrefix(const std::optional<SafetensorsMetadata>& metadata,
                                              absl::string_view entries, uint64_t data_alignment);

// Returns a whole file in memory: `data[i]` are the bytes of `tensors[i]`. For tests, tools and
// small files. Errors: as LayOutSafetensors, and INVALID_ARGUMENT if bytes do not match shape and
// dtype.
absl::StatusOr<std::string> EncodeSafetensors(const std::vector<SafetensorsEntry>& tensors,
                                              const std::vector<std::string>& data,
                                              const std::optional<SafetensorsMetadata>& metadata);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SAFETENSORS_FORMAT_H_
