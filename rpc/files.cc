#include "rpc/files.h"

#include <cerrno>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace muster::rpc {

absl::StatusOr<std::string> ReadPem(const std::string& path, absl::string_view what) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::ErrnoToStatus(errno == 0 ? ENOENT : errno,
                               absl::StrCat(what, ": cannot open '", path, "'"));
  }
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return absl::ErrnoToStatus(EIO, absl::StrCat(what, ": cannot read '", path, "'"));
  if (content.find("-----BEGIN ") == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": '", path, "' is not a PEM file"));
  }
  return content;
}

}  // namespace muster::rpc
