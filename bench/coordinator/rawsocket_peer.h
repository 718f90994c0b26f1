#ifndef MUSTER_BENCH_COORDINATOR_RAWSOCKET_PEER_H_
#define MUSTER_BENCH_COORDINATOR_RAWSOCKET_PEER_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::bench {

// A barrier of `ranks` over bare TCP and epoll, one socket a rank: each sends 8 bytes to a server
// in another process, which answers all when the last has come. No barrier service can be faster.
// Returns the time of each of `rounds`.
absl::StatusOr<std::vector<absl::Duration>> RawSocketBarriers(int ranks, int rounds);

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_RAWSOCKET_PEER_H_
