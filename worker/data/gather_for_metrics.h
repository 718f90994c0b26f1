#ifndef MUSTER_WORKER_DATA_GATHER_FOR_METRICS_H_
#define MUSTER_WORKER_DATA_GATHER_FOR_METRICS_H_

#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/call_site.h"
#include "worker/collective/collectives.h"
#include "worker/collective/comm.h"
#include "worker/collective/comm_checks.h"
#include "worker/collective/nested_collectives.h"
#include "worker/data/batch.h"
#include "worker/nested/nested.h"
#include "worker/nested/plain_parts.h"

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
// cut by its position in the result. Throws c10::Error like Gather; for kPerSample on this rank if
// the tensor has another number of rows; and on all ranks if, in a round whose batches differ in
// length, kAuto takes the rows for samples on some of them only.
at::Tensor GatherForMetrics(Comm& comm, const at::Tensor& tensor, const BatchInfo& info,
                            MetricRows rows = MetricRows::kAuto);
// (collective) The same for each tensor of a structure; all ranks need the same number of tensors.
std::vector<at::Tensor> GatherForMetrics(Comm& comm, const std::vector<at::Tensor>& tensors,
                                         const BatchInfo& info,
                                         MetricRows rows = MetricRows::kAuto);

// (collective) If batches of the ranks differ in length (kAuto), throws on all of them, unless they
// agree about which of their values have a row per sample: '1' in `per_sample`, one character for
// each value. `what`: a tensor, a list.
void AgreeOnRows(Comm& comm, const std::string& per_sample, const BatchInfo& info,
                 const char* what);

// Whether a value with `size` rows has one per sample. Throws c10::Error for kPerSample if it does
// not.
bool HasRowPerSample(int64_t size, const BatchInfo& info, MetricRows rows);

// (collective) Returns the objects of all ranks in rank order. A list with one object per sample of
// the batch is cut in the same way.
template <class E>
std::vector<E> GatherObjectForMetrics(
    Comm& comm, std::vector<E> objects, const BatchInfo& info, MetricRows rows = MetricRows::kAuto,
    std::source_location where = std::source_location::current()) {
  const bool per_sample = HasRowPerSample(static_cast<int64_t>(objects.size()), info, rows);
  if (rows == MetricRows::kAuto) AgreeOnRows(comm, per_sample ? "1" : "0", info, "list");
  // Not resize(): objects need no default constructor.
  if (per_sample) objects.erase(objects.begin() + info.real_samples, objects.end());
  return GatherObject(comm, objects, where);
}

// (collective) The same for a value of any type. In a structure with tensors, lists of objects are
// gathered and cut, too; a number or text beside them does not compile, since it would stay this
// rank's own. A list without tensors gives that of all ranks, and any other value without tensors a
// std::vector with one per rank. `info` null: nothing is cut.
template <class T>
auto GatherValueForMetrics(Comm& comm, const T& value, const BatchInfo* info,
                           MetricRows rows = MetricRows::kAuto,
                           std::source_location where = std::source_location::current()) {
  using namespace nested_internal;  // NOLINT: names of nested.h only
  const auto on_list = [&]<class L>(const L& list) {
    return info == nullptr ? GatherObject(comm, list, where)
                           : GatherObjectForMetrics(comm, list, *info, rows, where);
  };
  if constexpr (HoldsTensor<T>()) {
    RequireTransparent<T>();
    static_assert(!PlainPartsOf<T>().alone,
                  "gather_for_metrics() would leave the number or text beside the tensors as it "
                  "is: make it a tensor, or give each value as an argument of its own");
    const std::vector<at::Tensor> tensors = TensorsOf(value);
    const CallSite site(where);
    const std::vector<at::Tensor> all = info == nullptr
                                            ? GatherTensors(comm, tensors)
                                            : GatherForMetrics(comm, tensors, *info, rows);
    size_t next = 0;
    const auto on_tensor = [&](const at::Tensor& tensor) {
      return tensor.defined() ? all[next++] : tensor;
    };
    if constexpr (!PlainPartsOf<T>().any) {
      return MapBoth(value, on_tensor, on_list);
    } else {
      // Ranks compare which list it is, and how many there are, as they do with tensors, even if a
      // rank has none, as in an empty map.
      size_t lists = 0;
      size_t at = 0;
      const auto as_it_is = [](const at::Tensor& tensor) { return tensor; };
      const auto count = [&]<class L>(const L& list) {
        ++lists;
        return list;
      };
      MapBoth(value, as_it_is, count);
      if (lists == 0) {
        const comm_checks::PlaceScope none(0, 0);
        comm.AllGatherBytes("");
      }
      const auto in_place = [&]<class L>(const L& list) {
        const comm_checks::PlaceScope place(at++, lists);
        return on_list(list);
      };
      return MapBoth(value, on_tensor, in_place);
    }
  } else if constexpr (IsVector<T>) {
    return on_list(value);
  } else {
    return GatherObject(comm, value, where);
  }
}

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_GATHER_FOR_METRICS_H_
