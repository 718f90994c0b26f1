#ifndef MUSTER_CLIENT_CHECKPOINTS_WEIGHT_DIFF_H_
#define MUSTER_CLIENT_CHECKPOINTS_WEIGHT_DIFF_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "worker/checkpoint/weight_files.h"

namespace muster::client {

// The difference of two tensors of one name.
struct TensorDifference {
  bool equal = true;  // shape, type and bytes
  // The difference in type or shape, if there is one: "F32 [2] and F32 [3]".
  std::string shape = "";
  // Why the values were not compared, if they were not, so that it is not known whether they are
  // equal: the tensor is a view that repeats a few bytes of its file excessively often.
  std::string not_compared = "";
  uint64_t elements = 0;
  uint64_t differing = 0;
  // The largest |a - b|, for F64, F32, F16 and BF16; infinite if only one of the two is finite.
  std::optional<double> largest = std::nullopt;
};

// Reads both tensors in parts; keeps the whole extent of one that is not contiguous in memory.
// Blocks on the disk. Errors: those of reading.
absl::StatusOr<TensorDifference> CompareTensors(const WeightFiles& a,
                                                const WeightFiles::Entry& in_a,
                                                const WeightFiles& b,
                                                const WeightFiles::Entry& in_b);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_WEIGHT_DIFF_H_
