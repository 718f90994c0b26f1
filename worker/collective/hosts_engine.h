#ifndef MUSTER_WORKER_COLLECTIVE_HOSTS_ENGINE_H_
#define MUSTER_WORKER_COLLECTIVE_HOSTS_ENGINE_H_

#include <chrono>
#include <memory>

#include "ATen/core/Tensor.h"
#include "c10/util/intrusive_ptr.h"
#include "worker/collective/collective_engine.h"
#include "worker/collective/host_lanes.h"
#include "worker/collective/shm_pool.h"
#include "worker/collective/shm_segment.h"

namespace c10d {
class Backend;
}

namespace muster {

// The memory that a rank shares with the others of its host; empty for a rank that is alone there.
struct HostMemory {
  std::unique_ptr<ShmSegment> segment;  // ranks in the order of HostLayout
  std::shared_ptr<ShmPool> pool;
  at::Tensor stage;  // kHostStageBytes in the pool
};
inline constexpr int64_t kHostStageBytes = 8 << 20;

// Makes the engine for ranks of several hosts: inside a host through shared memory, between hosts
// by messages of `gloo`, each rank those of its lanes (host_lanes.h).
//
// A reduction is the sum over the ranks of each host in their order, and then over the hosts in
// theirs, all in WideType(dtype), rounded once: the order of additions depends only on which ranks
// are on which host. Each host sends its sum of a range straight to the host that adds up that
// range, and complete ranges go around the ring of hosts.
//
// Collective, blocks up to `deadline`. Errors: those of the engine.
std::unique_ptr<CollectiveEngine> MakeHostsEngine(const HostLayout& layout, int rank,
                                                  c10::intrusive_ptr<c10d::Backend> gloo,
                                                  HostMemory memory,
                                                  CollectiveEngine::Deadline deadline);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_HOSTS_ENGINE_H_
