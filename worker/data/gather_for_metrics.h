#ifndef MUSTER_WORKER_DATA_GATHER_FOR_METRICS_H_
#define MUSTER_WORKER_DATA_GATHER_FOR_METRICS_H_

#include <cstdint>
#include <source_location>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/collective/nested_collectives.h"
#include "worker/data/batch.h"
#include "worker/nested/nested.h"

namespace muster {

// The meaning of the rows of a gathered value.
enum class MetricRows {
  // Per sample if there are as many rows as the batch has samples, otherwise per process. A
  // per-process value that happens to have the batch's size (a histogram of 32 bins in batches of
  // 32) is taken for samples: use kPerProcess then.
  kAuto,
  kPerSample,   // one row per sample of the batch; another number of rows is an error
  kPerProcess,  // gathered whole
};

// (collective) Returns `tensor` of all ranks joined along dimension 0 in rank order, without rows
// of samples that only pad the batch. A tensor with one row per sample (see `rows`; its first
// dimension is `info.size`) is cut to each rank's real samples, whose number may differ between
// ranks. Any other tensor, such as a loss or a count per rank, is gathered whole: nothing is ever
// cut by its position in the result. Throws c10::Error like Gather, and for kPerSample on this rank
// if the tensor has another number of rows.
at::Tensor GatherForMetrics(Comm& comm, const at::Tensor& tensor, const BatchInfo& info,
                            MetricRows rows = MetricRows::kAuto);
// (collective) The same for each tensor of a structure, of which all ranks need as many.
std::vector<at::Tensor> GatherForMetrics(Comm& comm, const std::vector<at::Tensor>& tensors,
                                         const BatchInfo& info,
                                         MetricRows rows = MetricRows::kAuto);

// Whether a value with `size` rows has one per sample. Throws c10::Error for kPerSample if it does
// not.
bool HasRowPerSample(int64_t size, const BatchInfo& info, MetricRows rows);

// (collective) Returns the objects of all ranks in rank order. A list with one object per sample of
// the batch is cut in the same way.
template <class E>
std::vector<E> GatherObjectForMetrics(
    Comm& comm, std::vector<E> objects, const BatchInfo& info, MetricRows rows = MetricRows::kAuto,
    std::source_location where = std::source_location::current()) {
  // Not resize(): objects need no default constructor.
  if (HasRowPerSample(static_cast<int64_t>(objects.size()), info, rows)) {
    objects.erase(objects.begin() + info.real_samples, objects.end());
  }
  return GatherObject(comm, objects, where);
}

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_GATHER_FOR_METRICS_H_
