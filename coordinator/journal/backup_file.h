#ifndef MUSTER_COORDINATOR_JOURNAL_BACKUP_FILE_H_
#define MUSTER_COORDINATOR_JOURNAL_BACKUP_FILE_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::coordinator {

// A backup in a file: a header of three lines,
//
//   muster-backup 1
//   {"cluster_id":"...","term":3,"revision":...,"seq":...,"parts":2,"bytes":70123,"made":176405}
//   5f2e61aa (CRC-32C of the lines above, hexadecimal)
//
// and a snapshot of the state, byte for byte as snapshot_file.h has it, so that every part has a
// checksum. All functions block on the disk.
struct BackupHeader {
  std::string cluster_id = {};
  uint64_t term = 0;      // in which it was made
  uint64_t revision = 0;  // the state's
  uint64_t seq = 0;       // the number of the last record in it
  uint64_t parts = 0;
  uint64_t bytes = 0;  // the snapshot's
  int64_t made = 0;    // seconds since 1970
};

std::string EncodeBackupHeader(const BackupHeader& header);

struct BackupFile {
  BackupHeader header;
  uint64_t snapshot_at = 0;  // the byte of the file at which the snapshot begins
};
// Reads the header. Errors: INVALID_ARGUMENT the file is no backup; DATA_LOSS its header is
// damaged, or it is longer or shorter than that says; those of the disk.
absl::StatusOr<BackupFile> OpenBackup(const std::string& path);

// Hands over every part of the state, in order. Errors: DATA_LOSS naming the file and the place.
absl::Status ReadBackupState(const std::string& path, const BackupFile& backup,
                             absl::FunctionRef<absl::Status(absl::string_view)> part);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_BACKUP_FILE_H_
