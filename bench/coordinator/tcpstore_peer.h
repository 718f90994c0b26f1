#ifndef MUSTER_BENCH_COORDINATOR_TCPSTORE_PEER_H_
#define MUSTER_BENCH_COORDINATOR_TCPSTORE_PEER_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::bench {

struct TcpStoreResult {
  std::vector<absl::Duration> barriers;
  double connect_seconds = 0;  // of all clients, at once
  double adds_per_second = 0;  // one client, one at a time, acknowledged
};

// Measures c10d::TCPStore (libuv backend) with a server in its own process and `ranks` clients, one
// thread and one connection each: every rank adds 1 to a counter, and the one that makes it full
// sets a key that all wait for.
absl::StatusOr<TcpStoreResult> TcpStoreBarriers(int ranks, int rounds);

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_TCPSTORE_PEER_H_
