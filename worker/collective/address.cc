#include "worker/collective/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster {
namespace {

struct AddressInfoDeleter {
  void operator()(addrinfo* info) const { freeaddrinfo(info); }
};
using AddressInfo = std::unique_ptr<addrinfo, AddressInfoDeleter>;

absl::StatusOr<AddressInfo> LookUp(const std::string& host_port) {
  const size_t colon = host_port.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == host_port.size()) {
    return absl::InvalidArgumentError(absl::StrCat("'", host_port, "' is not host:port"));
  }
  std::string host = host_port.substr(0, colon);
  const std::string port = host_port.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  if (code != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot look up '", host, "': ", gai_strerror(code)));
  }
  return AddressInfo(list);
}

// Returns an empty text if the address cannot be written.
std::string NumericHost(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = {};
  if (getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text;
}

}  // namespace

absl::StatusOr<std::string> AddressTowards(const std::string& host_port) {
  MUSTER_ASSIGN_OR_RETURN(const AddressInfo list, LookUp(host_port));
  std::string why;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    // Connecting a datagram socket only picks a route.
    const int fd = socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage address = {};
    socklen_t length = sizeof(address);
    std::string host;
    if (connect(fd, info->ai_addr, info->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
      host = NumericHost(reinterpret_cast<sockaddr*>(&address), length);
    }
    if (host.empty()) why = std::strerror(errno);
    close(fd);
    if (!host.empty()) return host;
  }
  return absl::UnavailableError(absl::StrCat("no route towards '", host_port, "': ", why));
}

absl::StatusOr<std::string> NumericAddress(const std::string& host_port) {
  if (host_port.rfind("unix:", 0) == 0) return host_port;
  MUSTER_ASSIGN_OR_RETURN(const AddressInfo list, LookUp(host_port));
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    const std::string host = NumericHost(info->ai_addr, info->ai_addrlen);
    if (host.empty()) continue;
    const std::string port = host_port.substr(host_port.rfind(':'));
    return info->ai_family == AF_INET6 ? absl::StrCat("[", host, "]", port)
                                       : absl::StrCat(host, port);
  }
  return absl::UnavailableError(absl::StrCat("'", host_port, "' has no address"));
}

}  // namespace muster
