#ifndef MUSTER_WORKER_COLLECTIVE_C10D_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_C10D_COMM_H_

#include <chrono>
#include <memory>

#include "c10/util/intrusive_ptr.h"
#include "worker/collective/comm.h"

namespace c10d {
class ProcessGroup;
}

namespace muster {

struct C10dCommOptions {
  // The timeout of every collective, used exactly as given.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // Exchanges each rank's call before it runs (below). If false, wrong use is left to the backend:
  // Gloo ends the process, NCCL hangs.
  bool check = true;
};

// Makes a Comm over the ranks of a c10d process group. The group needs a backend for CPU tensors,
// which is Gloo or sends and receives by Gloo (see MakeGlooGroup), and one for each other device
// whose tensors are passed.
//
// Every collective starts with an all-gather of one 512-byte frame per rank over the CPU backend:
// the operation, its sequence number, dtype and shape. If ranks disagree, all throw the same
// c10::Error that lists each rank's call; nothing was sent, and the group stays usable. A small CPU
// tensor or byte string travels inside the frame, so that scalars cost one round and are reduced in
// rank order; larger ones cost a second collective. A barrier exchanges only the frame. Tensors on
// a device are not read by the host for this.
//
// Any dtype can be gathered, broadcast and scattered (bytes travel). The dtypes that ReduceArrays
// knows can be reduced; of complex numbers, sums and means can be computed. Reductions give the
// same bits on every rank.
//
// Errors of the transport (a peer that died, a timeout) throw c10::DistBackendError with operation,
// sequence number, rank and the transport's own words; after one, every call throws at once. Not
// thread-safe.
std::unique_ptr<Comm> MakeC10dComm(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   const C10dCommOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_C10D_COMM_H_
