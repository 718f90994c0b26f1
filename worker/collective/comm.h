#ifndef MUSTER_WORKER_COLLECTIVE_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_COMM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace c10d {
class ProcessGroup;
}

namespace muster {

class ProgressBoard;

enum class ReduceOp { kSum, kMean, kMax, kMin };

// One process's handle on the ranks of its generation: the collectives that all higher layers use.
// Every method except rank() and size() is a collective: all ranks must call it, in the same order,
// and it blocks until the result is available. Not thread-safe: one collective at a time per Comm.
// Errors are thrown as c10::Error (or its DistBackendError) and name the operation; after an error
// the group is unusable.
//
// Implementations: LocalComm (one process, every collective is the identity), ThreadComm (ranks are
// threads of one process; tests and the conformance runner), C10dComm (a c10d process group: Gloo
// or NCCL).
class Comm {
 public:
  virtual ~Comm() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Reduces `tensor` in place over all ranks. Same shape and dtype everywhere. kMean needs a
  // floating dtype.
  virtual void AllReduce(at::Tensor& tensor, ReduceOp op) = 0;

  // Returns the tensors of all ranks, in rank order, as contiguous copies. Same shape and dtype
  // everywhere.
  virtual std::vector<at::Tensor> AllGather(const at::Tensor& tensor) = 0;

  // Fills `flat` (1-D, contiguous), which consists of size() equal parts, one for each rank, in
  // rank order. On entry part rank() holds this rank's data; on return each part holds its rank's
  // data. Same size and dtype everywhere.
  virtual void AllGatherParts(at::Tensor& flat) = 0;

  // Returns the reduction over all ranks of part rank() of `flat` (as above, floating dtype,
  // unchanged), a new tensor of flat.numel() / size() elements. `op` is kSum or kMean. If no
  // backend reduces in transit, the reduction is done in rank order.
  virtual at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) = 0;

  // Overwrites `tensor` with that of rank `root`. Same shape and dtype everywhere.
  virtual void Broadcast(at::Tensor& tensor, int root) = 0;

  // Puts parts[i] of rank `root` into `out` on rank i (allocated by the caller with the right shape
  // and dtype, which may differ between ranks). `parts` is read only on `root`, where it has size()
  // entries.
  virtual void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) = 0;

  // Returns the byte strings of all ranks, in rank order; lengths may differ.
  virtual std::vector<std::string> AllGatherBytes(const std::string& bytes) = 0;

  // Returns the byte string of rank `root`.
  virtual std::string BroadcastBytes(const std::string& bytes, int root) = 0;

  // Returns when every rank has called it.
  virtual void Barrier() = 0;

  // The underlying c10d group, for c10d::Reducer; null if there is none (LocalComm, ThreadComm).
  virtual c10d::ProcessGroup* process_group() { return nullptr; }

  // Shows each collective while it runs; null if nothing observes it. Code that uses
  // process_group() must show its collectives here itself.
  virtual ProgressBoard* board() { return nullptr; }
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COMM_H_
