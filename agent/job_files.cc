#include "agent/job_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/signature.h"
#include "base/text.h"
#include "proto/job_limits.h"

namespace muster::agent {
namespace {

absl::Status Write(const v1::JobFile& file, const std::string& path) {
  const auto failed = [&] {
    return absl::ErrnoToStatus(errno, absl::StrCat("file ", Printable(file.path()), " of the job"));
  };
  for (size_t end = path.find('/', path.size() - file.path().size()); end != std::string::npos;
       end = path.find('/', end + 1)) {
    if (mkdir(path.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST) return failed();
  }
  // The file cannot exist yet: if it does, this agent did not write it.
  const OwnedFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                        file.executable() ? 0700 : 0600));
  if (!fd.open()) return failed();
  const std::string& content = file.content();
  for (size_t done = 0; done < content.size();) {
    const ssize_t n = write(fd.get(), content.data() + done, content.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed();
    done += n;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteJobFiles(const v1::JobSpec& spec, const std::string& folder) {
  for (const v1::JobFile& file : spec.files()) {
    if (!IsJobFilePath(file.path())) {
      return absl::InvalidArgumentError(
          absl::StrCat("file ", Printable(file.path()), " of the job leads out of its folder"));
    }
    if (Sha256(file.content()) != file.sha256()) {
      return absl::DataLossError(
          absl::StrCat("file ", Printable(file.path()), " of the job is not what was submitted"));
    }
    const absl::Status status = Write(file, JoinPath(folder, file.path()));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace muster::agent
