#include "worker/process/process_group.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"

namespace muster {
namespace {

struct AddressInfoDeleter {
  void operator()(addrinfo* info) const { freeaddrinfo(info); }
};

}  // namespace

absl::StatusOr<std::string> AddressTowards(const std::string& host_port) {
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
  addrinfo* raw = nullptr;
  const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &raw);
  if (code != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot look up '", host, "': ", gai_strerror(code)));
  }
  const std::unique_ptr<addrinfo, AddressInfoDeleter> list(raw);
  std::string why;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    // Connecting a datagram socket only picks a route.
    const int fd = socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage address = {};
    socklen_t length = sizeof(address);
    char text[NI_MAXHOST] = {};
    const bool found = connect(fd, info->ai_addr, info->ai_addrlen) == 0 &&
                       getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
                       getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text,
                                   sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0;
    if (!found) why = std::strerror(errno);
    close(fd);
    if (found) return std::string(text);
  }
  return absl::UnavailableError(absl::StrCat("no route towards '", host_port, "': ", why));
}

c10::intrusive_ptr<c10d::ProcessGroup> MakeGlooGroup(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const GlooOptions& options) {
  TORCH_CHECK(store, "MakeGlooGroup '", options.name, "': no store");
  TORCH_CHECK(options.size > 0 && options.rank >= 0 && options.rank < options.size,
              "MakeGlooGroup '", options.name, "': there is no rank ", options.rank, " among ",
              options.size);
  TORCH_CHECK(options.timeout.count() > 0, "MakeGlooGroup '", options.name,
              "': the timeout must be positive, not ", options.timeout.count(), " ms");
  std::string where = options.interface.empty() ? "127.0.0.1" : options.interface;
  if (options.interface.empty() && !options.single_host && options.size > 1) {
    TORCH_CHECK(!options.towards.empty(), "MakeGlooGroup '", options.name,
                "': ranks are on several hosts, but neither an interface nor an address to route "
                "towards is given");
    absl::StatusOr<std::string> address = AddressTowards(options.towards);
    TORCH_CHECK(address.ok(), "MakeGlooGroup '", options.name, "' on rank ", options.rank, ": ",
                std::string(address.status().message()));
    where = *address;
  }
  auto prefixed = c10::make_intrusive<c10d::PrefixStore>("muster/group/" + options.name, store);
  try {
    auto gloo_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
    gloo_options->group_name = options.name;
    gloo_options->devices.push_back(
        options.interface.empty()
            ? c10d::ProcessGroupGloo::createDeviceForHostname(where)
            : c10d::ProcessGroupGloo::createDeviceForInterface(options.interface));
    auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, options.rank, options.size,
                                                               gloo_options);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, options.rank, options.size);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                      c10::static_intrusive_pointer_cast<c10d::Backend>(backend));
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    group->setGroupName(options.name);
    return group;
  } catch (const c10::Error& e) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("Gloo group '", options.name, "': rank ", options.rank, " of ",
                             options.size, " at ", where, " could not meet the others within ",
                             options.timeout.count(), " ms: ", e.what_without_backtrace()));
  } catch (const std::exception& e) {
    C10_THROW_ERROR(DistBackendError, c10::str("Gloo group '", options.name, "': rank ",
                                               options.rank, " of ", options.size, " at ", where,
                                               " could not connect to the others: ", e.what()));
  }
}

}  // namespace muster
