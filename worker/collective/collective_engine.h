#ifndef MUSTER_WORKER_COLLECTIVE_COLLECTIVE_ENGINE_H_
#define MUSTER_WORKER_COLLECTIVE_COLLECTIVE_ENGINE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/shm_reduce.h"
#include "worker/collective/shm_segment.h"

namespace muster {

enum class Operation : uint8_t { kAllReduce = 1, kBroadcast, kAllGather, kReduceScatter, kBarrier };

// Returns a text such as "all_reduce #7 of 4096 bytes".
std::string DescribeCall(const ShmCall& call);

// Returns "ranks disagree about a collective: rank 0 called ...; rank 1 called ...". `ranks` and
// `calls` are of equal length.
std::string DescribeDisagreement(const std::vector<int>& ranks, const std::vector<ShmCall>& calls);

// How the ranks of a group move the bytes of a collective. One operation at a time, in the same
// order on every rank; it returns when this rank's results are there and its inputs are no longer
// read. Errors: c10::Error on every rank if they called different operations, after which the
// engine stays usable; c10::DistBackendError, naming the rank at fault, if one died, left or did
// not arrive by `deadline`, after which the engine stays broken. `call` has dtype, reduction and
// root, and in `bytes` the size of the smaller of input and output.
class CollectiveEngine {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  virtual ~CollectiveEngine() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The name of the c10d backend.
  virtual std::string name() const = 0;
  // For operations of up to this many bytes that are not waited for yet, handing them to another
  // thread costs more than it hides.
  virtual int64_t at_once_bytes() const = 0;

  virtual void AllReduce(char* data, const ShmCall& call, Deadline deadline) = 0;
  virtual void Broadcast(char* data, const ShmCall& call, Deadline deadline) = 0;
  // outputs[r] gets rank r's input; `input` may be one of them.
  virtual void AllGather(char* input, const std::vector<char*>& outputs, const ShmCall& call,
                         Deadline deadline) = 0;
  // `input` has a part for every rank; `output` may be this rank's part.
  virtual void ReduceScatter(char* input, char* output, const ShmCall& call, Deadline deadline) = 0;
  virtual void Barrier(const ShmCall& call, Deadline deadline) = 0;

  // Makes all current and future operations of all ranks fail. From any thread.
  virtual void Break(const std::string& why) = 0;

  // Whether Allocate() makes tensors that other ranks use in place. From any thread.
  virtual bool allocates() const = 0;
  // Returns an undefined tensor if there is no such memory.
  virtual at::Tensor Allocate(int64_t numel, const at::TensorOptions& options) = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COLLECTIVE_ENGINE_H_
