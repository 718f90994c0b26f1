#ifndef MUSTER_WORKER_COLLECTIVE_COLLECTIVES_H_
#define MUSTER_WORKER_COLLECTIVE_COLLECTIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "c10/core/Scalar.h"
#include "worker/collective/comm.h"

// The implementation of users' collectives, on lists of tensors;
// worker/collective/nested_collectives.h extends them to structures. Every function that takes a
// Comm is a collective: call it on every rank in the same order. Results never require grad. Errors
// are c10::Error; if ranks disagree, every rank gets the same error.
namespace muster {

// Parses "sum", "mean", "max" or "min". Any other text is an error that lists these (it never
// silently means sum).
ReduceOp ParseReduceOp(const std::string& name);

// Returns each tensor joined along dimension 0 in rank order. Tensors without dimensions count as
// one element, so that n ranks give shape [n]. Inputs need not be contiguous. Shapes must be equal
// on all ranks (see PadTensorsAcrossProcesses).
std::vector<at::Tensor> GatherTensors(Comm& comm, const std::vector<at::Tensor>& tensors);

// Returns each tensor reduced over the ranks and multiplied by `scale`, in new tensors. Integer
// tensors need a whole scale and do not support the mean.
std::vector<at::Tensor> ReduceTensors(Comm& comm, const std::vector<at::Tensor>& tensors,
                                      ReduceOp op, double scale = 1);

// The same for a number.
double ReduceNumber(Comm& comm, double number, ReduceOp op, double scale = 1);
int64_t ReduceNumber(Comm& comm, int64_t number, ReduceOp op, double scale = 1);

// Overwrites each tensor with that of rank `from`.
void BroadcastTensors(Comm& comm, const std::vector<at::Tensor>& tensors, int from);

// Returns each tensor padded along `dim` with `pad_value` to the longest on any rank, after the
// data or before it (`pad_first`). A negative dim counts from the end; a tensor without that
// dimension, or already of the largest size, is returned unchanged. Ranks need the same dtype and
// number of dimensions; lengths of other dimensions may differ and are kept. One round for all
// tensors.
std::vector<at::Tensor> PadTensorsAcrossProcesses(Comm& comm,
                                                  const std::vector<at::Tensor>& tensors,
                                                  int64_t dim = 0, const at::Scalar& pad_value = 0,
                                                  bool pad_first = false);

// Returns `tensor` with zero rows appended until its first dimension, which must be `batch_size`,
// is a multiple of `num_processes`. Not a collective.
at::Tensor PadInputTensor(const at::Tensor& tensor, int64_t batch_size, int num_processes);

// The items that rank `rank` of `num_processes` gets from `length` items: [begin, end), then the
// last item of all, `padding` times. The first length % num_processes ranks get one more. With
// apply_padding every rank ends up with ceil(length / num_processes) items; an empty input gives
// every rank an empty part.
struct SplitRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t padding = 0;
};
SplitRange SplitRangeOf(int64_t length, int num_processes, int rank, bool apply_padding);

// Returns the rows of `tensor` in `range`, with its padding.
at::Tensor SplitTensor(const at::Tensor& tensor, const SplitRange& range);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COLLECTIVES_H_
