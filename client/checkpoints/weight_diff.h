#ifndef MUSTER_CLIENT_CHECKPOINTS_WEIGHT_DIFF_H_
#define MUSTER_CLIENT_CHECKPOINTS_WEIGHT_DIFF_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "worker/checkpoint/weight_files.h"

namespace muster::client {

// How two tensors of one name differ.
struct TensorDifference {
  bool equal = true;  // shape, type and bytes
  // What differs, if it is not the values: "F32 [2] and F32 [3]".
  std::string shape = "";
  // Why the values were not compared, if they were not; then it is not known whether they are
  // equal: the tensor is a view that repeats a few bytes of its file beyond all measure.
  std::string not_compared = "";
  uint64_t elements = 0;
  uint64_t differing = 0;
  // The largest |a - b| over floats of F64, F32, F16 and BF16; infinite if only one is not finite.
  std::optional<double> largest = std::nullopt;
};

// Reads both tensors part by part; holds the extent of one that is not contiguous in memory. Blocks
// on the disk. Errors: those of reading.
absl::StatusOr<TensorDifference> CompareTensors(const WeightFiles& a,
                                                const WeightFiles::Entry& in_a,
                                                const WeightFiles& b,
                                                const WeightFiles::Entry& in_b);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_WEIGHT_DIFF_H_
