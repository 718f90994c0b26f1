#include "worker/checkpoint/byte_source.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/streamed_file.h"

namespace muster {
namespace {

absl::Status Beyond(const std::string& name, uint64_t offset, size_t bytes, uint64_t size) {
  return absl::DataLossError(absl::StrCat(name, ": ", bytes, " bytes at ", offset,
                                          " lie beyond its end (", size,
                                          " bytes): it was cut short or is damaged"));
}

class File final : public ByteSource {
 public:
  File(std::string path, int fd, uint64_t size) : path_(std::move(path)), fd_(fd), size_(size) {}
  ~File() override { close(fd_); }

  const std::string& name() const override { return path_; }
  uint64_t size() const override { return size_; }
  const StreamedFile* streamed() const override {
    std::call_once(once_, [this] { streamed_ = std::make_unique<StreamedFile>(fd_, size_); });
    return streamed_.get();
  }
  absl::Status Read(uint64_t offset, char* to, size_t bytes) const override {
    if (offset > size_ || bytes > size_ - offset) return Beyond(path_, offset, bytes, size_);
    while (bytes > 0) {
      const ssize_t n = pread(fd_, to, std::min(bytes, size_t{1} << 30), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ReadError(errno, absl::StrCat("cannot read ", path_));
      if (n == 0) {
        return absl::DataLossError(
            absl::StrCat(path_, ": the file became shorter while it was read"));
      }
      to += n;
      offset += n;
      bytes -= n;
    }
    return absl::OkStatus();
  }

 private:
  const std::string path_;
  const int fd_;
  const uint64_t size_;
  mutable std::once_flag once_;
  mutable std::unique_ptr<StreamedFile> streamed_;
};

class Memory final : public ByteSource {
 public:
  Memory(std::string bytes, std::string name) : bytes_(std::move(bytes)), name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  uint64_t size() const override { return bytes_.size(); }
  absl::Status Read(uint64_t offset, char* to, size_t bytes) const override {
    if (offset > bytes_.size() || bytes > bytes_.size() - offset) {
      return Beyond(name_, offset, bytes, bytes_.size());
    }
    if (bytes > 0) memcpy(to, bytes_.data() + offset, bytes);
    return absl::OkStatus();
  }

 private:
  const std::string bytes_;
  const std::string name_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ByteSource>> OpenFileSource(const std::string& path) {
  // A pipe may have the name of a file of weights, and open() would wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ReadError(errno, absl::StrCat("cannot open ", path));
  struct stat info;
  if (fstat(fd, &info) != 0) {
    const absl::Status status = ReadError(errno, absl::StrCat("cannot examine ", path));
    close(fd);
    return status;
  }
  if (!S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": is not a file"));
  }
  return std::unique_ptr<ByteSource>(
      std::make_unique<File>(path, fd, static_cast<uint64_t>(info.st_size)));
}

std::unique_ptr<ByteSource> MemorySource(std::string bytes, std::string name) {
  return std::make_unique<Memory>(std::move(bytes), std::move(name));
}

}  // namespace muster
