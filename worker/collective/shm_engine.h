#ifndef MUSTER_WORKER_COLLECTIVE_SHM_ENGINE_H_
#define MUSTER_WORKER_COLLECTIVE_SHM_ENGINE_H_

#include <memory>

#include "worker/collective/collective_engine.h"
#include "worker/collective/shm_pool.h"
#include "worker/collective/shm_segment.h"

namespace muster {

// Makes the engine for ranks that are all on one host: through the slots of `segment`, or in place
// if the data of all ranks are in their pools. Reductions add in rank order. `pool`: this rank's;
// null: it has none.
std::unique_ptr<CollectiveEngine> MakeShmEngine(std::unique_ptr<ShmSegment> segment,
                                                std::shared_ptr<ShmPool> pool);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHM_ENGINE_H_
