#ifndef MUSTER_COORDINATOR_CHECKPOINT_COVERAGE_H_
#define MUSTER_COORDINATOR_CHECKPOINT_COVERAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "proto/muster/v1/checkpoint.pb.h"
#include "proto/muster/v1/error.pb.h"

namespace muster::coordinator {

// Proves that the slices that all ranks report are every tensor, each element exactly once. Slices
// are boxes; a flat range is a box of one dimension. Not thread-safe.
//
// The proof: no two boxes of a tensor share an element, and their sizes add up to the tensor's.
class Coverage {
 public:
  static constexpr int kMaxRank = 8;  // dimensions of a tensor
  static constexpr size_t kMaxName = 1024;

  Coverage() = default;
  Coverage(const Coverage&) = delete;
  Coverage& operator=(const Coverage&) = delete;

  // Checks whether Add would take the slice. Errors: BAD_FIELD for a box that is not inside its
  // tensor, and for a tensor whose shape or dtype differs from what was added before.
  std::optional<v1::OpError> Check(const v1::TensorSlice& slice, const std::string& file) const;
  // Adds a slice that is in `file`. Keeps nothing of one that it refuses. Errors: as Check.
  std::optional<v1::OpError> Add(const v1::TensorSlice& slice, const std::string& file);

  // Returns the error of the first tensor, by name, that is not covered exactly once, in words
  // ("tensor "w" of [4, 8]: ... "). Empty: all are. O(n log n) for n slices that cut a tensor along
  // one dimension. A tensor whose slices would take millions of comparisons is a problem too.
  std::string FirstProblem() const;

  size_t tensors() const { return tensors_.size(); }
  // Approximate size in memory.
  size_t bytes() const { return bytes_; }

 private:
  using Numbers = absl::InlinedVector<int64_t, 2>;
  struct Box {
    Numbers offset, extent;
    const std::string* file = nullptr;  // in files_
  };
  struct Tensor {
    std::string dtype;
    Numbers shape;
    std::vector<Box> boxes;
  };
  // Returns an empty string if the tensor is covered. Adds to `*comparisons`.
  static std::string Problem(const Tensor& tensor, size_t* comparisons);

  absl::flat_hash_map<std::string, Tensor> tensors_;
  absl::flat_hash_map<std::string, std::unique_ptr<const std::string>> files_;
  size_t bytes_ = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CHECKPOINT_COVERAGE_H_
