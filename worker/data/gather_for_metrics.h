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
  // Samples if there are as many as the batch has, else of the process. A value per process that
  // happens to have the batch's size (a histogram of 32 bins in batches of 32) is taken for
  // samples: then say kPerProcess.
  kAuto,
  kPerSample,   // one row per sample of the batch; another number of rows is an error
  kPerProcess,  // gathered whole
};

// (collective) `tensor` of all ranks joined along dimension 0 in rank order, without what belongs
// to samples that only fill up the batch. A tensor with a row per sample (see `rows`; its first
// dimension is `info.size`) is cut to the real ones of each rank; ranks may have different numbers
// of them. Any other tensor, such as a loss or a count per rank, is gathered whole: nothing is ever
// cut by its position in the result. Throws c10::Error as Gather, and for kPerSample on this rank
// if the tensor has another number of rows.
at::Tensor GatherForMetrics(Comm& comm, const at::Tensor& tensor, const BatchInfo& info,
                            MetricRows rows = MetricRows::kAuto);

// Whether a value with `size` rows has one per sample. Throws c10::Error for kPerSample if it has
// not.
bool HasRowPerSample(int64_t size, const BatchInfo& info, MetricRows rows);

// (collective) The objects of all ranks in rank order. A list with one object per sample of the
// batch is cut like that.
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
