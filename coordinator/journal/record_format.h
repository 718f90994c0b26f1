#ifndef MUSTER_COORDINATOR_JOURNAL_RECORD_FORMAT_H_
#define MUSTER_COORDINATOR_JOURNAL_RECORD_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::coordinator {

// How the journal frames a record, and a snapshot its parts:
//   length of the payload  u32   little-endian, as all numbers here
//   crc32c                 u32   of everything behind it
//   seq                    u64   1, 2, 3, ... without a gap
//   revision               u64
//   term                   u64
//   payload
constexpr size_t kRecordHeaderBytes = 4 + 4 + 8 + 8 + 8;

// Appends a record to `out`. The payload has less than 4 GiB.
void EncodeRecord(std::string& out, uint64_t seq, uint64_t revision, uint64_t term,
                  absl::string_view payload);

// Returns the size of the payload, from the first kRecordHeaderBytes of a record.
uint32_t PayloadBytes(const char* header);

struct DecodedRecord {
  uint64_t revision = 0;
  absl::string_view payload;  // a view into the decoded bytes
  size_t bytes = 0;           // size of the record, with its header
};

// Decodes the record at the beginning of `bytes`, which must have this `seq`. Errors: DATA_LOSS
// with what is wrong, for a message that says where.
absl::StatusOr<DecodedRecord> DecodeRecord(absl::string_view bytes, uint64_t seq);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_RECORD_FORMAT_H_
