#include "coordinator/journal/snapshot_file.h"

#include <cerrno>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/journal/record_format.h"

namespace muster::coordinator {

absl::StatusOr<SnapshotWriter> SnapshotWriter::Create(const std::string& path, uint64_t revision,
                                                      uint64_t term) {
  MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, 0600));
  return SnapshotWriter(std::move(file), revision, term);
}

absl::Status SnapshotWriter::Append(absl::string_view part) {
  std::string framed;
  framed.reserve(kRecordHeaderBytes + part.size());
  EncodeRecord(framed, parts_ + 1, revision_, term_, part);
  MUSTER_RETURN_IF_ERROR(file_.Append(framed));
  ++parts_;
  bytes_ += framed.size();
  return absl::OkStatus();
}

absl::Status ReadSnapshotFile(const std::string& path, uint64_t revision, uint64_t parts,
                              uint64_t bytes,
                              absl::FunctionRef<absl::Status(absl::string_view)> part,
                              uint64_t from) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rbe"), std::fclose);
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open '", path, "'"));
  if (from != 0 && fseeko(file.get(), static_cast<off_t>(from), SEEK_SET) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read '", path, "'"));
  uint64_t offset = 0;
  const auto damaged = [&](uint64_t number, absl::string_view what) {
    // If it cannot be read now, it may still be whole.
    if (std::ferror(file.get()) != 0)
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot read '", path, "'"));
    return absl::DataLossError(absl::StrCat("snapshot '", path, "' is damaged in part ", number,
                                            " (offset ", offset, "): ", what));
  };
  std::string record;
  for (uint64_t number = 1; number <= parts; ++number) {
    record.resize(kRecordHeaderBytes);
    if (bytes - offset < kRecordHeaderBytes ||
        std::fread(record.data(), 1, kRecordHeaderBytes, file.get()) < kRecordHeaderBytes)
      return damaged(number, "its header is truncated");
    const uint32_t length = PayloadBytes(record.data());
    // Checked before memory is taken for a length that may be damaged.
    if (bytes - offset - kRecordHeaderBytes < length) return damaged(number, "it is truncated");
    record.resize(kRecordHeaderBytes + length);
    if (std::fread(record.data() + kRecordHeaderBytes, 1, length, file.get()) < length)
      return damaged(number, "it is truncated");
    const absl::StatusOr<DecodedRecord> decoded = DecodeRecord(record, number);
    if (!decoded.ok()) return damaged(number, decoded.status().message());
    if (decoded->revision != revision) return damaged(number, "it belongs to another snapshot");
    MUSTER_RETURN_IF_ERROR(part(decoded->payload));
    offset += decoded->bytes;
  }
  if (offset != bytes) return damaged(parts, "it is not the last");
  return absl::OkStatus();
}

}  // namespace muster::coordinator
