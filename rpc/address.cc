#include "rpc/address.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace muster::rpc {

bool Address::is_loopback() const {
  if (is_unix()) return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::string Address::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", path);
  if (host.find(':') != std::string::npos) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  Address address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    absl::ConsumePrefix(&rest, "//");
    if (rest.empty() || rest.size() >= sizeof(sockaddr_un::sun_path)) {
      return absl::InvalidArgumentError(absl::StrCat("address '", text,
                                                     "': the path of a unix socket has 1 to ",
                                                     sizeof(sockaddr_un::sun_path) - 1, " bytes"));
    }
    address.path = std::string(rest);
    return address;
  }
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "address '", text, "' has no port: write IP:PORT, for example 10.0.0.5:29400"));
  }
  absl::string_view host = rest.substr(0, colon);
  const absl::string_view port = rest.substr(colon + 1);
  bool digits = !port.empty();
  for (const char c : port) digits = digits && absl::ascii_isdigit(c);
  if (!digits || !absl::SimpleAtoi(port, &address.port) || address.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", text, "': port '", port, "' is not a number from 0 to 65535"));
  }
  const bool brackets = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  if (brackets) host = host.substr(1, host.size() - 2);
  address.host = host == "localhost" ? "127.0.0.1" : std::string(host);
  in_addr v4;
  in6_addr v6;
  const bool is_v4 = !brackets && inet_pton(AF_INET, address.host.c_str(), &v4) == 1;
  const bool is_v6 = brackets && inet_pton(AF_INET6, address.host.c_str(), &v6) == 1;
  if (!is_v4 && !is_v6) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", text, "': host '", host,
                     "' is not numeric: write its IP address, 10.0.0.5:29400 or [fd00::5]:29400"));
  }
  return address;
}

}  // namespace muster::rpc
