#include "worker/checkpoint/memory_record.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/checkpoint/digest.h"

namespace muster {
namespace {

constexpr uint64_t kMagic = 0x324d52455453554d;      // "MUSTERM2"
constexpr uint64_t kMagicName = 0x00ffffffffffffff;  // all but the version
constexpr char kSource[] = "the checkpoint in memory";

// Little-endian, like the machines of the job, which the header never leaves.
struct Header {
  uint64_t magic = 0;
  uint64_t sequence = 0;
  uint64_t nonce = 0;
  int64_t since_disk = 0;
  int64_t rank = 0;
  // The record has this many offsets, and the manifest's text.
  uint64_t files = 0;
  uint64_t record_offset = 0;
  uint64_t record_bytes = 0;
  uint64_t record_xxh3 = 0;
  uint64_t header_xxh3 = 0;  // digest of all fields above
};
static_assert(sizeof(Header) <= kMemoryHeaderBytes);

uint64_t DigestOf(const Header& header) {
  return DigestBlock(
      absl::string_view(reinterpret_cast<const char*>(&header), offsetof(Header, header_xxh3)));
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(kSource, " is damaged: ", what));
}

}  // namespace

void ForgetMemoryRecord(AlignedMemory& memory) {
  if (memory.size() < sizeof(Header)) return;
  std::memset(memory.data(), 0, sizeof(Header));
  // The record must go before anything of the files changes. A process that is killed has executed
  // all stores up to one point of its program, so only the compiler could change the order.
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

absl::Status WriteMemoryRecord(AlignedMemory& memory, size_t end, const MemoryRecord& record) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, EncodeManifest(record.manifest));
  const size_t offsets = record.offsets.size() * sizeof(uint64_t);
  const size_t begin = (end + sizeof(uint64_t) - 1) / sizeof(uint64_t) * sizeof(uint64_t);
  Header header{.magic = kMagic,
                .sequence = record.save.sequence,
                .nonce = record.save.nonce,
                .since_disk = record.since_disk,
                .rank = record.rank,
                .files = record.offsets.size(),
                .record_offset = begin,
                .record_bytes = offsets + text.size()};
  MUSTER_RETURN_IF_ERROR(memory.Grow(begin + header.record_bytes));
  char* const to = memory.data() + begin;
  if (offsets > 0) std::memcpy(to, record.offsets.data(), offsets);
  std::memcpy(to + offsets, text.data(), text.size());
  header.record_xxh3 = DigestBlock(absl::string_view(to, header.record_bytes));
  header.header_xxh3 = DigestOf(header);
  PutMemoryHeader(absl::string_view(reinterpret_cast<const char*>(&header), sizeof(header)),
                  memory);
  return absl::OkStatus();
}

void PutMemoryHeader(absl::string_view page, AlignedMemory& memory) {
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the header must be written last
  std::memcpy(memory.data(), page.data(), std::min(page.size(), kMemoryHeaderBytes));
}

absl::string_view MemoryFile(absl::string_view memory, const MemoryRecord& record, size_t file) {
  return memory.substr(record.offsets[file], record.manifest.files[file].digest.bytes);
}

bool IsWhole(absl::string_view contents, const ManifestFile& file) {
  if (contents.size() != file.digest.bytes) return false;
  size_t block = 0;
  for (; !contents.empty(); ++block) {
    const absl::string_view first = contents.substr(0, file.blocks.block_bytes);
    if (block >= file.blocks.xxh3.size() || DigestBlock(first) != file.blocks.xxh3[block]) {
      return false;
    }
    contents.remove_prefix(first.size());
  }
  return block == file.blocks.xxh3.size();
}

size_t MemoryRecordEnd(absl::string_view memory) {
  Header header;
  if (memory.size() >= kMemoryHeaderBytes) std::memcpy(&header, memory.data(), sizeof(header));
  if (header.magic != kMagic || header.header_xxh3 != DigestOf(header) ||
      header.record_offset > memory.size() ||
      header.record_bytes > memory.size() - header.record_offset) {
    return 0;
  }
  return header.record_offset + header.record_bytes;
}

absl::StatusOr<MemoryRecord> ReadMemoryRecord(absl::string_view memory) {
  return ReadMemoryRecord(memory.substr(0, kMemoryHeaderBytes), memory);
}

absl::StatusOr<MemoryRecord> ReadMemoryRecord(absl::string_view page, absl::string_view memory) {
  Header header;
  if (page.size() >= sizeof(header) && memory.size() >= kMemoryHeaderBytes) {
    std::memcpy(&header, page.data(), sizeof(header));
  }
  if (header.magic != kMagic && ((header.magic ^ kMagic) & kMagicName) == 0) {
    return absl::UnimplementedError("it is of another version of Muster");
  }
  if (header.magic != kMagic) return absl::NotFoundError("the memory holds no checkpoint");
  if (header.header_xxh3 != DigestOf(header)) return Damaged("its header has another digest");
  if (header.record_offset < kMemoryHeaderBytes || header.record_offset > memory.size() ||
      header.record_bytes > memory.size() - header.record_offset ||
      header.files > header.record_bytes / sizeof(uint64_t) || header.rank < 0 ||
      header.rank > INT32_MAX || header.since_disk < 0) {
    return Damaged("its header has a number that cannot be");
  }
  const absl::string_view text = memory.substr(header.record_offset, header.record_bytes);
  if (DigestBlock(text) != header.record_xxh3) return Damaged("its record has another digest");
  MemoryRecord record;
  record.save = {header.sequence, header.nonce};
  record.rank = static_cast<int>(header.rank);
  record.since_disk = header.since_disk;
  record.offsets.resize(header.files);
  const size_t offsets = header.files * sizeof(uint64_t);
  if (offsets > 0) std::memcpy(record.offsets.data(), text.data(), offsets);
  MUSTER_ASSIGN_OR_RETURN(record.manifest, ParseManifest(text.substr(offsets), kSource));
  if (record.manifest.files.size() != record.offsets.size()) return Damaged("files without places");
  for (size_t i = 0; i < record.offsets.size(); ++i) {
    const ManifestFile& file = record.manifest.files[i];
    if (file.rank != record.rank || record.offsets[i] < kMemoryHeaderBytes ||
        record.offsets[i] > header.record_offset ||
        file.digest.bytes > header.record_offset - record.offsets[i]) {
      return Damaged(absl::StrCat(file.name, " is not where it should be"));
    }
  }
  return record;
}

}  // namespace muster
