#ifndef MUSTER_BENCH_COORDINATOR_ETCD_PEER_H_
#define MUSTER_BENCH_COORDINATOR_ETCD_PEER_H_

#include <string>

#include "absl/status/statusor.h"

namespace muster::bench {

// The content of one request, and how many requests there are at a time, over one connection.
struct EtcdLoad {
  int requests = 0;
  int puts = 1;  // in a request, at most 64: a Put, or from 2 on a Txn of as many
  int in_flight = 1;
};

// Measures the puts of 32-byte values per second into a single-node etcd (fsync on): the program
// `etcd`, started in `directory` on ports of its own. Errors: NOT_FOUND if `etcd` is no program.
absl::StatusOr<double> EtcdPutsPerSecond(const std::string& etcd, const std::string& directory,
                                         const EtcdLoad& load);

}  // namespace muster::bench

#endif  // MUSTER_BENCH_COORDINATOR_ETCD_PEER_H_
