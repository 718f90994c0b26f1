#ifndef MUSTER_AGENT_UPSTREAM_H_
#define MUSTER_AGENT_UPSTREAM_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace muster::agent {

// The peer of this node's stream at one moment.
struct Upstream {
  bool connected = false;
  uint64_t session = 0;  // counts the sessions: a new one keeps no state of earlier ones
  uint64_t term = 0;
  std::string cluster_id = {};
  absl::Duration lease;  // from the last welcome
  std::string hub = {};  // the node that speaks for this one; empty: the coordinator itself
  std::string why_away = {};
  bool ended = false;  // the coordinator does not return; `why_away` says why
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_UPSTREAM_H_
