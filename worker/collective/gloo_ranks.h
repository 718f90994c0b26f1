#ifndef MUSTER_WORKER_COLLECTIVE_GLOO_RANKS_H_
#define MUSTER_WORKER_COLLECTIVE_GLOO_RANKS_H_

#include <functional>
#include <memory>
#include <string>

#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "worker/collective/c10d_comm.h"

namespace muster {

// For tests that need real process groups (c10d::Reducer) without starting processes: like
// RunRanks, but each thread's Comm uses a Gloo group over loopback, so comm.process_group() is set.
// Rethrows the first exception; a rank that throws closes its connections, which ends the
// collectives of the others.
//
// Switches c10d's flight recorder off for this process: it is one object without a lock around its
// first use, and several groups in one process, each on its own thread, crash in it.
void RunGlooRanks(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options = {});

// The same with Muster's own collectives in front (AddShmBackend).
void RunShmRanks(int n, const std::function<void(Comm&)>& fn, const C10dCommOptions& options = {});

// The same with ranks that behave as if they were on several hosts: hosts[r] is that of rank r
// ("aabb": two ranks on each of two hosts).
void RunHostRanks(const std::string& hosts, const std::function<void(Comm&)>& fn,
                  const C10dCommOptions& options = {});

// Makes the Comm of one such rank; `name` is that of its group, and `hosts` as above. A collective
// over `store`; empty `hosts` for Gloo alone.
std::unique_ptr<Comm> MakeHostComm(const c10::intrusive_ptr<c10d::Store>& store,
                                   const std::string& name, int rank, int size,
                                   const std::string& hosts, const C10dCommOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_GLOO_RANKS_H_
