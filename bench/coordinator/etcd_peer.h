#ifndef MUSTER_BENCH_COORDINATOR_ETCD_PEER_H_
#define MUSTER_BENCH_COORDINATOR_ETCD_PEER_H_

#include <string>

#include "absl/status/statusor.h"

namespace muster::bench {

// Puts per second into a single-node etcd (fsync on) that is started in `directory` on ports of its
// own: `in_flight` unary puts of a 32-byte value at a time. Errors: NOT_FOUND there is no
// /usr/bin/etcd.
absl::StatusOr<double> EtcdPutsPerSecond(const std::string& directory, int puts, int in_flight);

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_ETCD_PEER_H_
