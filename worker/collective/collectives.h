#ifndef MUSTER_WORKER_COLLECTIVE_COLLECTIVES_H_
#define MUSTER_WORKER_COLLECTIVE_COLLECTIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "c10/core/Scalar.h"
#include "worker/collective/comm.h"

// The implementation of users' collectives, on lists of tensors;
// worker/collective/nested_collectives.h lifts them to structures. Every function that takes a Comm
// is a collective: call it on every rank in the same order. Results never require grad. Errors are
// c10::Error and the same on every rank where ranks disagree.
namespace muster {

// "sum", "mean", "max" or "min". Any other text is an error that lists these (it never silently
// means sum).
ReduceOp ParseReduceOp(const std::string& name);

// Each tensor joined along dimension 0 in rank order; tensors without dimensions count as one
// element, so the result of n ranks has shape [n]. Need not be contiguous. Shapes must be equal on
// all ranks (see PadTensorsAcrossProcesses).
std::vector<at::Tensor> GatherTensors(Comm& comm, const std::vector<at::Tensor>& tensors);

// Each tensor reduced over the ranks and multiplied by `scale`; new tensors. An integer tensor
// takes a whole scale and no mean.
std::vector<at::Tensor> ReduceTensors(Comm& comm, const std::vector<at::Tensor>& tensors,
                                      ReduceOp op, double scale = 1);

// Overwrites each tensor with that of rank `from`.
void BroadcastTensors(Comm& comm, const std::vector<at::Tensor>& tensors, int from);

// Each tensor padded along `dim` with `pad_value` to the longest of any rank, after the data or
// before it (`pad_first`). A negative dim counts from the end; a tensor without that dimension, or
// already of the largest size, is returned unchanged. Ranks need the same dtype and number of
// dimensions; lengths of other dimensions may differ and stay. One round for all tensors.
std::vector<at::Tensor> PadTensorsAcrossProcesses(Comm& comm,
                                                  const std::vector<at::Tensor>& tensors,
                                                  int64_t dim = 0, const at::Scalar& pad_value = 0,
                                                  bool pad_first = false);

// `tensor` with zero rows appended until its first dimension, which must be `batch_size`, is a
// multiple of `num_processes`. Not a collective.
at::Tensor PadInputTensor(const at::Tensor& tensor, int64_t batch_size, int num_processes);

// What rank `rank` of `num_processes` gets of `length` items: [begin, end), then `padding` times
// the last item of all. The first length % num_processes ranks get one more. With apply_padding
// every rank ends up with ceil(length / num_processes) items; an empty input gives every rank an
// empty part.
struct SplitRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t padding = 0;
};
SplitRange SplitRangeOf(int64_t length, int num_processes, int rank, bool apply_padding);

// Rows of `tensor` as `range` says.
at::Tensor SplitTensor(const at::Tensor& tensor, const SplitRange& range);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COLLECTIVES_H_
