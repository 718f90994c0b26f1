#include "base/secret_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace muster {
namespace {

// Negative if the file cannot be read.
ssize_t ReadAll(int fd, std::string* text) {
  size_t size = 0;
  while (size < text->size()) {
    const ssize_t got = read(fd, text->data() + size, text->size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return got;
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(size);
}

}  // namespace

absl::StatusOr<std::string> ReadSecretFile(const std::string& path, absl::string_view what,
                                           absl::string_view secret, size_t max_bytes) {
  // Because `path` may not be a regular file: opening a pipe, say, must not block the caller.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(what, ": cannot open '", path, "'"));
  }
  struct stat info {};
  std::string text(max_bytes, '\0');
  ssize_t size = -1;
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) size = ReadAll(fd, &text);
  close(fd);
  if (!S_ISREG(info.st_mode) || size < 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": '", path, "' is not a readable file"));
  }
  const uid_t user = geteuid();
  if (info.st_uid != user && info.st_uid != 0 && user != 0) {
    return absl::PermissionDeniedError(absl::StrCat(what, ": '", path, "' belongs to user ",
                                                    info.st_uid, ": use a file of your own"));
  }
  const mode_t closed = info.st_uid == 0 ? 037 : 077;
  if ((info.st_mode & closed) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, ": other users can access the ", secret, " in '", path, "' (mode ",
                     absl::StrFormat("%03o", info.st_mode & 0777),
                     "): restrict it with chmod 600, and replace the ", secret));
  }
  text.resize(static_cast<size_t>(size));
  return text;
}

absl::Status WriteSecretFile(const std::string& path, absl::string_view contents) {
  MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, 0600));
  MUSTER_RETURN_IF_ERROR(file.Append(contents));
  return file.Commit();
}

}  // namespace muster
