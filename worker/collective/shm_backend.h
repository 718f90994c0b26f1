#ifndef MUSTER_WORKER_COLLECTIVE_SHM_BACKEND_H_
#define MUSTER_WORKER_COLLECTIVE_SHM_BACKEND_H_

#include <chrono>
#include <string>

#include "c10/util/intrusive_ptr.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace muster {

// Puts Muster's collectives in front of Gloo in `group` for CPU tensors: all-reduce, broadcast,
// all-gather, reduce-scatter and barrier go through shared memory between ranks of one host, and
// between hosts by a ring over Gloo's send and receive (hosts_engine.h). Everything else (send and
// receive, gather, scatter, unsupported dtypes) is passed on to the existing Gloo backend.
// c10d::Reducer works on it.
//
// Tensors made by Backend::allocateTensor are in memory that the other ranks of the host can
// access: collectives work on them in place, without copies, if all ranks pass such tensors.
//
// Reductions add in rank order, over several hosts first in each host: the same bits on every rank,
// for every split into buckets and in every run; half and bfloat16 are summed in float. Operations
// run in order on a helper thread, so that they overlap with the caller's work; small ones at once.
// If ranks call different operations, all throw; a rank that died, left or did not arrive in time
// is named by all others (c10::DistBackendError) and the backend is unusable.
//
// Collective, also for ranks that do not want it (`wanted`). Returns false, on every rank alike and
// with the reason in `*why`, if one does not or ranks of one host cannot share memory: then `group`
// is unchanged. Throws like the store and Gloo. `host`: ranks with different texts count as ranks
// of different hosts, which tests use on one host.
bool AddShmBackend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout,
                   std::string* why = nullptr, const std::string& host = "", bool wanted = true);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHM_BACKEND_H_
