#ifndef MUSTER_WORKER_CHECKPOINT_MEMORY_RECORD_H_
#define MUSTER_WORKER_CHECKPOINT_MEMORY_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/manifest.h"

namespace muster {

// One rank's part of a checkpoint in memory (docs/checkpoint_format.md, "In memory"): a page with
// the header, the files, and after them the record, which says what they are. The header is written
// last. Not thread-safe.

// The offset at which files begin.
inline constexpr size_t kMemoryHeaderBytes = 4096;

// Identifies a save: the same for its parts on every rank, and different for any two saves of a
// job.
struct MemorySaveId {
  uint64_t sequence = 0;  // later saves have higher ones
  uint64_t nonce = 0;

  friend auto operator<=>(const MemorySaveId&, const MemorySaveId&) = default;
};

struct MemoryRecord {
  MemorySaveId save;
  int rank = 0;
  // The number of saves since the last one that went to the disk.
  int64_t since_disk = 0;
  // Covers only this rank's files, with digests of their blocks but not of whole files.
  Manifest manifest;
  // The offsets of manifest.files, in their order, from the beginning of the memory.
  std::vector<uint64_t> offsets;
};

// Marks the contents of the memory as no checkpoint.
void ForgetMemoryRecord(AlignedMemory& memory);

// Makes the contents of the memory up to `end` a checkpoint. Errors: RESOURCE_EXHAUSTED; those of
// EncodeManifest.
absl::Status WriteMemoryRecord(AlignedMemory& memory, size_t end, const MemoryRecord& record);

// Reads the record of a checkpoint and checks everything except the contents of the files, which
// stay in the memory. NOT_FOUND if the memory holds no checkpoint; DATA_LOSS if the record is
// damaged.
absl::StatusOr<MemoryRecord> ReadMemoryRecord(absl::string_view memory);

// Returns the contents of record.manifest.files[file].
absl::string_view MemoryFile(absl::string_view memory, const MemoryRecord& record, size_t file);

// Whether a file's contents are those that were saved: they have its size and the digests of its
// blocks.
bool IsWhole(absl::string_view contents, const ManifestFile& file);

// --- For a copy of a checkpoint in other memory. The header, which begins the memory, is written
// last.

// Returns how many bytes the checkpoint takes, from the beginning of the memory; 0 if it holds
// none.
size_t MemoryRecordEnd(absl::string_view memory);
// Like ReadMemoryRecord(memory), for memory that has everything but its header; `page` begins with
// the header.
absl::StatusOr<MemoryRecord> ReadMemoryRecord(absl::string_view page, absl::string_view memory);
// Makes such memory, of kMemoryHeaderBytes or more, the checkpoint that the header describes.
void PutMemoryHeader(absl::string_view page, AlignedMemory& memory);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_RECORD_H_
