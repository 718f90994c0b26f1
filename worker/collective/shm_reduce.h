#ifndef MUSTER_WORKER_COLLECTIVE_SHM_REDUCE_H_
#define MUSTER_WORKER_COLLECTIVE_SHM_REDUCE_H_

#include <cstdint>
#include <vector>

#include "c10/core/ScalarType.h"

namespace muster {

enum class ShmReduceOp : uint8_t { kSum, kAverage, kMax, kMin, kProduct };

// Whether ReduceArrays supports it: float, double, half, bfloat16, the integers and bool, but no
// average of the last two.
bool CanReduce(c10::ScalarType dtype, ShmReduceOp op);

// The elements of one rank, or the reduced elements of several ranks.
struct ReduceSource {
  const void* data = nullptr;
  bool wide = false;  // of WideType(dtype)
};

// The type in which ReduceSources adds up: float for half and bfloat16, else `dtype` itself.
c10::ScalarType WideType(c10::ScalarType dtype);

// Computes outs[k][i] = sources[0][i] op sources[1][i] op ..., from left to right in
// WideType(dtype), which is also the type of the outs if `wide_outs`; else they are rounded to
// `dtype` once. An average is the sum divided by `ranks`, or the sum itself if that is 0. Each of
// `outs` may be one of the sources of its type. `count` elements; at least one source.
void ReduceSources(c10::ScalarType dtype, ShmReduceOp op, const std::vector<ReduceSource>& sources,
                   const std::vector<void*>& outs, bool wide_outs, int64_t ranks, int64_t count);

// ReduceSources with one rank each: outs[k][i] = sources[0][i] op sources[1][i] op ..., from left
// to right, so equal inputs give equal bits. half and bfloat16 are added up in float and rounded
// once. max and min keep a NaN; sums of bool are "any". Each of `outs` may be one of the sources.
// `count` elements of `dtype`; at least one source.
void ReduceArrays(c10::ScalarType dtype, ShmReduceOp op, const std::vector<const void*>& sources,
                  const std::vector<void*>& outs, int64_t count);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHM_REDUCE_H_
