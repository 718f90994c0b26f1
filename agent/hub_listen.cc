#include "agent/hub_listen.h"

#include <arpa/inet.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "rpc/address.h"
#include "rpc/server.h"
#include "rpc/token.h"

namespace muster::agent {
namespace {

bool IsWildcard(const rpc::Address& address) {
  in6_addr v6;
  return address.host == "0.0.0.0" ||
         (inet_pton(AF_INET6, address.host.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6));
}

absl::Status Refused(const std::string& hub_listen, const char* why) {
  return absl::InvalidArgumentError(absl::StrCat("hub_listen ", hub_listen, ": ", why));
}

}  // namespace

absl::StatusOr<HubServer::Options> HubListenOptions(const std::string& hub_listen,
                                                    const std::string& coordinator,
                                                    const rpc::ChannelOptions& channel) {
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(hub_listen);
  if (!address.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("hub_listen: ", address.status().message()));
  }
  MUSTER_ASSIGN_OR_RETURN(const rpc::Address upstream, rpc::ParseAddress(coordinator));
  if (IsWildcard(*address)) {
    return Refused(hub_listen,
                   "other agents connect to this address as given; name an address of this machine "
                   "that they can reach; port 0 selects a free port");
  }
  if (address->is_loopback() && !upstream.is_loopback()) {
    return Refused(hub_listen,
                   "the coordinator is on another address, and so may be the agents that would "
                   "use this hub; name an address of this machine that they reach");
  }
  HubServer::Options hub;
  rpc::ServerOptions& options = hub.server;
  options.listen = hub_listen;
  options.tls.cert = channel.tls.cert;
  options.tls.key = channel.tls.key;
  options.checks_token = !channel.token_file.empty();
  if (!options.checks_token && !options.tls.cert.empty()) options.tls.ca = channel.tls.ca;
  options.health = false;
  if (address->is_unix()) {
    options.only_user = geteuid();
  } else if (!address->is_loopback() && options.tls.cert.empty()) {
    return Refused(hub_listen,
                   "off the loopback interface a hub must authenticate itself: give --tls_cert and "
                   "--tls_key, valid for this address");
  } else if (!options.checks_token && options.tls.ca.empty()) {
    if (upstream.is_unix()) {
      return Refused(hub_listen,
                     "every user of this machine could act for its workers, which the "
                     "coordinator's socket does not let them: listen on unix:PATH");
    }
    // As on the coordinator, which accepts this agent without credentials.
    options.insecure = true;
  }
  if (options.checks_token) {
    MUSTER_ASSIGN_OR_RETURN(hub.token, rpc::ReadToken(channel.token_file, "token_file"));
  }
  return hub;
}

}  // namespace muster::agent
