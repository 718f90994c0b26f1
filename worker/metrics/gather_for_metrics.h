#ifndef MUSTER_WORKER_METRICS_GATHER_FOR_METRICS_H_
#define MUSTER_WORKER_METRICS_GATHER_FOR_METRICS_H_

#include <source_location>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/data/batch.h"
#include "worker/data/nested.h"
#include "worker/process/comm.h"
#include "worker/process/nested_collectives.h"

namespace muster {

// (collective) `tensor` of all ranks joined along dimension 0 in rank order, without what belongs
// to samples that only fill up the batch. A tensor whose first dimension is the batch's
// (`info.size`) has a row per sample and is cut to the real ones of each rank; ranks may have
// different numbers of them. Any other tensor, such as a loss or a count per rank, is gathered
// whole: nothing is ever cut by its position in the result. Throws c10::Error as Gather.
at::Tensor GatherForMetrics(Comm& comm, const at::Tensor& tensor, const BatchInfo& info);

// (collective) The objects of all ranks in rank order. A list with one object per sample of the
// batch is cut like that.
template <class E>
std::vector<E> GatherObjectForMetrics(
    Comm& comm, std::vector<E> objects, const BatchInfo& info,
    std::source_location where = std::source_location::current()) {
  if (static_cast<int64_t>(objects.size()) == info.size) objects.resize(info.real_samples);
  return GatherObject(comm, objects, where);
}

}  // namespace muster

#endif  // MUSTER_WORKER_METRICS_GATHER_FOR_METRICS_H_
