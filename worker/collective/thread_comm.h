#ifndef MUSTER_WORKER_COLLECTIVE_THREAD_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_THREAD_COMM_H_

#include <functional>
#include <memory>
#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// `n` ranks as threads of one process: for tests, the conformance runner and anything that must
// compute what every rank of a job would. Element i is rank i and is to be used by one thread at a
// time.
//
// Reductions add in rank order, so results are the same bits on every rank and in every run.
// Collectives copy through shared memory, need no network, and are checked: if ranks call different
// operations, or with shapes or dtypes that do not fit, every rank throws the same c10::Error,
// which lists each rank's call (the group stays usable).
//
// No rank is left waiting for one that is gone: when a Comm is destroyed, ranks that wait for it in
// a collective, now or later, throw c10::DistBackendError naming it. CPU tensors and tensors of one
// device.
std::vector<std::unique_ptr<Comm>> MakeThreadComms(int n);

// Runs `fn` once per rank, each on its own thread, and joins them. If some throw, the others leave
// their collectives with an error, and the exception of the rank that failed first is rethrown.
// Ranks that return while others still wait for them in a collective count as a failure of the
// waiting ones.
void RunRanks(int n, const std::function<void(Comm&)>& fn);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_THREAD_COMM_H_
