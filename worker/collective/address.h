#ifndef MUSTER_WORKER_COLLECTIVE_ADDRESS_H_
#define MUSTER_WORKER_COLLECTIVE_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"

namespace muster {

// Returns the numeric address of this machine's interface that routes towards `host_port`
// ("10.0.0.7:29400", "[fe80::1]:5", "name:5"). Sends nothing; a name is looked up forwards,
// addresses never backwards. Errors: INVALID_ARGUMENT (no host:port), UNAVAILABLE (unknown name or
// no route).
absl::StatusOr<std::string> AddressTowards(const std::string& host_port);

// Returns `host_port` with its host as a number: "[::1]:5", "10.0.0.7:29400". Unix sockets
// ("unix:PATH") stay unchanged. Blocks while a name is looked up. Errors as above.
absl::StatusOr<std::string> NumericAddress(const std::string& host_port);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ADDRESS_H_
