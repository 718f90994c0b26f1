#ifndef MUSTER_BASE_OWNED_FD_H_
#define MUSTER_BASE_OWNED_FD_H_

#include <unistd.h>

#include <utility>

namespace muster {

// A file descriptor that is closed by the destructor.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd() { Close(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace muster

#endif  // MUSTER_BASE_OWNED_FD_H_
