#include "client/jobs/job_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "proto/job_limits.h"

namespace muster::client {
namespace {

absl::Status Refused(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(Printable(path), " ", why));
}

class Reader {
 public:
  explicit Reader(std::vector<JobFile>* files) : files_(*files) {
    for (const JobFile& file : files_) bytes_ += file.content.size();
  }

  // `name`: the path below the folder of an attempt.
  absl::Status Add(const std::string& path, const std::string& name) {
    if (!IsJobFilePath(name)) {
      return Refused(
          path,
          absl::StrCat("has no name that can be used below the folder of an attempt, of at most ",
                       kMaxFilePath, " bytes"));
    }
    // The path is opened only once, so that the file that is read is the one that was checked.
    const OwnedFd fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!fd.open() && errno == ELOOP) {
      return Refused(path, "is a symbolic link: name its target instead");
    }
    struct stat info;
    if (!fd.open() || fstat(fd.get(), &info) != 0) {
      return absl::Status(absl::ErrnoToStatusCode(errno),
                          absl::StrCat(Printable(path), ": ", strerror(errno),
                                       ": write the path of a file or a folder"));
    }
    if (S_ISDIR(info.st_mode)) return AddFolder(path, name);
    if (!S_ISREG(info.st_mode)) return Refused(path, "is neither a file nor a folder");
    return AddFile(fd.get(), path, name, (info.st_mode & S_IXUSR) != 0);
  }

 private:
  absl::Status AddFolder(const std::string& path, const std::string& name) {
    MUSTER_ASSIGN_OR_RETURN(std::vector<std::string> entries, ListDirectory(path));
    std::sort(entries.begin(), entries.end());
    for (const std::string& entry : entries) {
      MUSTER_RETURN_IF_ERROR(Add(JoinPath(path, entry), absl::StrCat(name, "/", entry)));
    }
    return absl::OkStatus();
  }

  absl::Status AddFile(int fd, const std::string& path, const std::string& name, bool executable) {
    for (const JobFile& file : files_) {
      if (file.path == name)
        return Refused(path, "has the same name as another file: rename one of them");
    }
    if (files_.size() >= static_cast<size_t>(kMaxFiles)) {
      return absl::ResourceExhaustedError(
          absl::StrCat(Printable(path), " is one too many: a job has at most ", kMaxFiles,
                       "; put them into a folder that the nodes share"));
    }
    JobFile file = {.path = name, .executable = executable};
    char buffer[1 << 14];
    for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) != 0;) {
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return absl::ErrnoToStatus(errno, std::string(Printable(path)));
      file.content.append(buffer, n);
      if (bytes_ + file.content.size() > kMaxFileBytes) {
        return absl::ResourceExhaustedError(
            absl::StrCat("with ", Printable(path), " they have more than ", kMaxFileBytes,
                         " bytes: put large ones into a folder that the nodes share"));
      }
    }
    bytes_ += file.content.size();
    files_.push_back(std::move(file));
    return absl::OkStatus();
  }

  std::vector<JobFile>& files_;
  size_t bytes_ = 0;
};

}  // namespace

absl::Status ReadJobFiles(const std::vector<std::string>& paths, std::vector<JobFile>* files) {
  Reader reader(files);
  for (std::string path : paths) {
    while (path.size() > 1 && absl::EndsWith(path, "/")) path.pop_back();
    std::string name = BaseName(path);
    if (name == "." || name == "..") {
      return Refused(path, "has no name of its own: pass its full name, or the names of its files");
    }
    MUSTER_RETURN_IF_ERROR(reader.Add(path, name));
  }
  return absl::OkStatus();
}

}  // namespace muster::client
