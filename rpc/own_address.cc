#include "rpc/own_address.h"

#include <netdb.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "base/owned_fd.h"

namespace muster::rpc {
namespace {

// Returns a UDP socket that has done `what` with a numeric address: bind or connect, which sends
// nothing. The socket is not open if that failed.
template <class What>
OwnedFd SocketFor(const std::string& ip, int port, What what) {
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(ip.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) return OwnedFd();
  OwnedFd fd(socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (fd.open() && what(fd.get(), found->ai_addr, found->ai_addrlen) != 0) fd = OwnedFd();
  freeaddrinfo(found);
  return fd;
}

}  // namespace

std::string OwnAddressTowards(const Address& peer) {
  if (peer.is_unix()) return "127.0.0.1";
  const OwnedFd fd = SocketFor(peer.host, peer.port, connect);
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  char text[NI_MAXHOST] = "";
  if (!fd.open() || getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof(text), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "";
  }
  return text;
}

bool IsOwnAddress(const std::string& ip) { return SocketFor(ip, 0, bind).open(); }

}  // namespace muster::rpc
