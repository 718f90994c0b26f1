#ifndef MUSTER_RPC_TEST_LISTENER_H_
#define MUSTER_RPC_TEST_LISTENER_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

#include "base/log.h"

namespace muster::rpc {

// A socket that listens on a port of 127.0.0.1 and answers nothing, unless the test accepts from
// it. Ends the process if it cannot get the port.
class TestListener {
 public:
  // 0: a free port.
  explicit TestListener(int port = 0) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    MUSTER_CHECK(bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                 listen(fd_, 64) == 0 &&
                 getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0)
        << port;
    port_ = ntohs(address.sin_port);
  }
  ~TestListener() { close(fd_); }
  TestListener(const TestListener&) = delete;
  TestListener& operator=(const TestListener&) = delete;

  int fd() const { return fd_; }
  int port() const { return port_; }

 private:
  const int fd_;
  int port_ = 0;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_TEST_LISTENER_H_
