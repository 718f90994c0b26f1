#include "worker/collective/shm_backend.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/engine_backend.h"
#include "worker/collective/host_lanes.h"
#include "worker/collective/host_links.h"
#include "worker/collective/hosts_engine.h"
#include "worker/collective/shm_engine.h"
#include "worker/collective/shm_pool.h"
#include "worker/collective/shm_segment.h"

namespace muster {
namespace {

constexpr int64_t kLineBytes = 256;
constexpr char kNotWanted[] = "not wanted";

// Returns the lines of all ranks, cut to kLineBytes. Uses Gloo, because a store would have to
// answer each rank for each other rank.
std::vector<std::string> GatherLines(c10d::Backend& gloo, const std::string& mine) {
  at::Tensor line = at::zeros({kLineBytes}, at::kByte);
  at::Tensor lines = at::zeros({kLineBytes * gloo.getSize()}, at::kByte);
  std::copy_n(mine.data(), std::min<size_t>(mine.size(), kLineBytes), line.data_ptr<uint8_t>());
  gloo._allgather_base(lines, line)->wait();
  std::vector<std::string> all;
  for (int r = 0; r < gloo.getSize(); ++r) {
    const char* const text =
        reinterpret_cast<const char*>(lines.const_data_ptr<uint8_t>()) + r * kLineBytes;
    all.emplace_back(text, strnlen(text, kLineBytes));
  }
  return all;
}

// Makes the engine for ranks that are all on one host.
std::unique_ptr<CollectiveEngine> OneHost(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, std::string* why) {
  std::shared_ptr<ShmPool> pool = ShmPool::Create();  // null: data are copied
  std::unique_ptr<ShmSegment> segment = ShmSegment::Open(store, rank, size, pool.get(), why);
  if (segment == nullptr) return nullptr;
  return MakeShmEngine(std::move(segment), std::move(pool));
}

// Returns the memory of this rank's host, if it has other ranks. `why` stays empty on success.
HostMemory MemoryOf(const c10::intrusive_ptr<c10d::Store>& store, const HostLayout& layout,
                    int rank, std::string* why) {
  HostMemory memory;
  const int host = layout.host_of[rank];
  if (layout.ranks_on(host) == 1) return memory;
  memory.pool = ShmPool::Create();
  memory.segment = ShmSegment::Open(
      c10::make_intrusive<c10d::PrefixStore>(c10::str("host_", host), store), layout.local_of[rank],
      layout.ranks_on(host), memory.pool.get(), why, layout.hosts[host]);
  if (memory.segment == nullptr) return memory;
  if (memory.segment->reaches_pools()) {
    memory.stage = memory.pool->Allocate(kHostStageBytes, at::kByte);
  }
  if (!memory.stage.defined()) *why = "no shared memory for tensors";
  return memory;
}

}  // namespace

bool AddShmBackend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout,
                   std::string* why, const std::string& host, bool wanted) {
  auto prefixed =
      c10::make_intrusive<c10d::PrefixStore>("muster/shm/" + group->getGroupName(), store);
  const c10::intrusive_ptr<c10d::Backend> gloo = group->getBackend(c10::DeviceType::CPU);
  const int rank = group->getRank();
  std::string problem;
  const std::string identity = HostIdentity();
  const std::vector<std::string> identities =
      GatherLines(*gloo, !wanted            ? kNotWanted
                         : identity.empty() ? ""
                                            : identity + " " + host);
  for (size_t r = 0; r < identities.size() && problem.empty(); ++r) {
    if (identities[r] == kNotWanted) problem = c10::str("rank ", r, " has MUSTER_SHM=no");
    if (identities[r].empty()) problem = c10::str("rank ", r, " cannot tell which host it is on");
  }
  std::unique_ptr<CollectiveEngine> engine;
  int64_t first_own_tag = int64_t{1} << 31;
  const HostLayout layout = GroupIntoHosts(identities);
  if (problem.empty() && layout.hosts.size() == 1) {
    engine = OneHost(prefixed, rank, group->getSize(), &problem);
  } else if (problem.empty()) {
    HostMemory memory = MemoryOf(prefixed, layout, rank, &problem);
    const std::vector<std::string> problems = GatherLines(*gloo, problem);
    problem = "";
    for (size_t r = 0; r < problems.size() && problem.empty(); ++r) {
      if (!problems[r].empty()) problem = c10::str("rank ", r, ": ", problems[r]);
    }
    if (problem.empty()) {
      engine = MakeHostsEngine(layout, rank, gloo, std::move(memory),
                               std::chrono::steady_clock::now() + timeout);
      first_own_tag = HostLinks::kFirstTag;
    }
  }
  if (engine == nullptr) {
    if (why != nullptr) *why = problem;
    return false;
  }
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    MakeEngineBackend(gloo, std::move(engine), timeout, first_own_tag));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return true;
}

}  // namespace muster
