#include "coordinator/journal/record_format.h"

#include "absl/status/status.h"
#include "base/crc32c.h"

namespace muster::coordinator {
namespace {

template <typename T>
void PutLittle(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

template <typename T>
T GetLittle(const char* p) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<T>(static_cast<unsigned char>(p[i])) << (8 * i);
  return value;
}

}  // namespace

void EncodeRecord(std::string& out, uint64_t seq, uint64_t revision, uint64_t term,
                  absl::string_view payload) {
  PutLittle<uint32_t>(out, static_cast<uint32_t>(payload.size()));
  const size_t crc_at = out.size();
  PutLittle<uint32_t>(out, 0);
  PutLittle<uint64_t>(out, seq);
  PutLittle<uint64_t>(out, revision);
  PutLittle<uint64_t>(out, term);
  out.append(payload.data(), payload.size());
  const uint32_t crc = Crc32c(absl::string_view(out).substr(crc_at + 4));
  for (size_t i = 0; i < 4; ++i) out[crc_at + i] = static_cast<char>(crc >> (8 * i));
}

uint32_t PayloadBytes(const char* header) { return GetLittle<uint32_t>(header); }

absl::StatusOr<DecodedRecord> DecodeRecord(absl::string_view bytes, uint64_t seq) {
  if (bytes.size() < kRecordHeaderBytes) return absl::DataLossError("its header is truncated");
  const char* const p = bytes.data();
  const uint32_t length = PayloadBytes(p);
  if (bytes.size() - kRecordHeaderBytes < length) return absl::DataLossError("it is truncated");
  if (Crc32c({p + 8, kRecordHeaderBytes - 8 + length}) != GetLittle<uint32_t>(p + 4))
    return absl::DataLossError("its checksum is wrong");
  if (GetLittle<uint64_t>(p + 8) != seq) return absl::DataLossError("it has the wrong number");
  return DecodedRecord{.revision = GetLittle<uint64_t>(p + 16),
                       .payload = {p + kRecordHeaderBytes, length},
                       .bytes = kRecordHeaderBytes + length};
}

}  // namespace muster::coordinator
