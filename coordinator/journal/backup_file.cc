#include "coordinator/journal/backup_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/crc32c.h"
#include "base/owned_fd.h"
#include "coordinator/journal/snapshot_file.h"

namespace muster::coordinator {
namespace {

constexpr absl::string_view kMagic = "muster-backup 1\n";
constexpr size_t kLongestHeader = 4096;

}  // namespace

std::string EncodeBackupHeader(const BackupHeader& header) {
  const nlohmann::ordered_json facts = {{"cluster_id", header.cluster_id},
                                        {"term", header.term},
                                        {"revision", header.revision},
                                        {"seq", header.seq},
                                        {"parts", header.parts},
                                        {"bytes", header.bytes},
                                        {"made", header.made}};
  const std::string text = absl::StrCat(
      kMagic, facts.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), "\n");
  return absl::StrFormat("%s%08x\n", text, Crc32c(text));
}

absl::StatusOr<BackupFile> OpenBackup(const std::string& path) {
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info;
  if (!file.open() || fstat(file.get(), &info) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open '", path, "'"));
  std::string bytes(kLongestHeader, '\0');
  const ssize_t got = pread(file.get(), bytes.data(), bytes.size(), 0);
  if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read '", path, "'"));
  bytes.resize(static_cast<size_t>(got));
  if (!absl::StartsWith(bytes, kMagic)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", path,
        "' is not a backup written by muster backup, or was written by a newer version"));
  }
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat("backup '", path, "' is damaged: ", what));
  };
  const size_t facts_end = bytes.find('\n', kMagic.size());
  const size_t end = facts_end == std::string::npos ? facts_end : bytes.find('\n', facts_end + 1);
  if (end == std::string::npos) return damaged("its header is truncated");
  const std::string checked = bytes.substr(0, facts_end + 1);
  if (bytes.substr(facts_end + 1, end - facts_end - 1) !=
      absl::StrFormat("%08x", Crc32c(checked))) {
    return damaged("its header has a wrong checksum");
  }
  const auto facts = nlohmann::json::parse(checked.substr(kMagic.size()), nullptr, false);
  const auto number = [&](const char* name) -> uint64_t {
    return facts.is_object() && facts.contains(name) && facts[name].is_number_unsigned()
               ? facts[name].get<uint64_t>()
               : 0;
  };
  BackupFile backup;
  if (facts.is_object() && facts.contains("cluster_id") && facts["cluster_id"].is_string())
    backup.header.cluster_id = facts["cluster_id"].get<std::string>();
  backup.header.term = number("term");
  backup.header.revision = number("revision");
  backup.header.seq = number("seq");
  backup.header.parts = number("parts");
  backup.header.bytes = number("bytes");
  backup.header.made = static_cast<int64_t>(number("made"));
  backup.snapshot_at = end + 1;
  const bool is_id =
      !backup.header.cluster_id.empty() &&
      backup.header.cluster_id.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (!is_id || backup.header.term == 0) return damaged("its header is not whole");
  const uint64_t size = static_cast<uint64_t>(info.st_size) - backup.snapshot_at;
  if (size != backup.header.bytes) {
    return damaged(
        absl::StrCat("it has ", size, " bytes behind its header instead of ", backup.header.bytes));
  }
  return backup;
}

absl::Status ReadBackupState(const std::string& path, const BackupFile& backup,
                             absl::FunctionRef<absl::Status(absl::string_view)> part) {
  return ReadSnapshotFile(path, backup.header.revision, backup.header.parts, backup.header.bytes,
                          part, backup.snapshot_at);
}

}  // namespace muster::coordinator
