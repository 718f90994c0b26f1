#ifndef MUSTER_WORKER_COLLECTIVE_ENGINE_BACKEND_H_
#define MUSTER_WORKER_COLLECTIVE_ENGINE_BACKEND_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "worker/collective/collective_engine.h"

namespace muster {

// Makes the c10d backend over an engine. Operations that the engine does not support (dtypes, send
// and receive, gather, scatter, all-to-all, lists of tensors) go to `fallback`. Operations run in
// order on a separate thread, so that they overlap with the caller's work; small ones run at once
// if none is waiting. Send and receive with a tag from `first_own_tag` on throw. Thread-safe, as
// backends are: the order of calls is that of the operations.
c10::intrusive_ptr<c10d::Backend> MakeEngineBackend(c10::intrusive_ptr<c10d::Backend> fallback,
                                                    std::unique_ptr<CollectiveEngine> engine,
                                                    std::chrono::milliseconds timeout,
                                                    int64_t first_own_tag = int64_t{1} << 31);

// Whether it is such a backend, which averages floating CPU tensors (Gloo does not). The same on
// all ranks of a group.
bool IsEngineBackend(const c10d::Backend& backend);

// Makes the next collective that the calling thread starts in such a backend run on that thread, if
// nothing is queued before it: for callers that wait for it next, so that another thread could hide
// nothing.
void StartNextHere();

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ENGINE_BACKEND_H_
