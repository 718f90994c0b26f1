#ifndef MUSTER_AGENT_HUB_LISTEN_H_
#define MUSTER_AGENT_HUB_LISTEN_H_

#include <string>

#include "absl/status/statusor.h"
#include "agent/hub_server.h"
#include "rpc/channel.h"

namespace muster::agent {

// Returns the options with which an agent serves others as their hub at `hub_listen`
// ("10.0.0.6:29500", port 0 for a free one, or "unix:PATH"), if it reaches the coordinator at
// `coordinator` with `channel`. It authenticates them as the coordinator authenticates it: by the
// token if it has one, else by a certificate; on the loopback interface not at all if it has
// neither.
//
// Errors: INVALID_ARGUMENT, one line that names `hub_listen`, for an address to which others cannot
// connect (a wildcard; the loopback interface while the coordinator is elsewhere), or at which the
// hub would not know its callers; those of rpc::ReadToken.
absl::StatusOr<HubServer::Options> HubListenOptions(const std::string& hub_listen,
                                                    const std::string& coordinator,
                                                    const rpc::ChannelOptions& channel);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_HUB_LISTEN_H_
