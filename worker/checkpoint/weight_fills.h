#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_FILLS_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_FILLS_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "worker/checkpoint/memory_ranges.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {

// A tensor in files, and the tensor that gets its values.
struct WeightFill {
  const WeightEntry* from = nullptr;
  at::Tensor to;
};

// Whether FillWeights() can fill `to`: both are contiguous and not empty, and `to` has memory. The
// types may differ if both are floating-point types.
bool IsFillable(const WeightEntry& from, const at::Tensor& to);

// Reads weights in several threads, past the page cache unless they are cached. On the host, they
// are read directly to their place if they come from the cache or the place is aligned as in the
// file (see StreamedFile::Read), otherwise through the memory of a thread; for a device, they are
// read into pinned blocks, from which the device copies. If two targets overlap, the later one
// wins. The values are there when it returns; after an error some of them may be, and nothing is
// under way. Needs memory for a block of each thread (two for a device), and on a device, for
// values of another type, `options.converted_bytes` or one tensor. Errors: those of
// WeightFiles::ReadAll and DeviceUploads. Throws c10::Error for memory that a device does not have.
absl::Status FillWeights(const WeightFiles& files, const std::vector<WeightFill>& weights,
                         const TensorUploadOptions& options = {});

// Fills that are postponed so that they are made together, beside copies that are made one after
// the other.
class WeightFills {
 public:
  // `files`: borrowed.
  explicit WeightFills(const WeightFiles& files) : files_(files) {}

  void Add(WeightFill weight);
  // Must be called before a copy to a tensor: makes the fills that are left if one of them shares
  // memory with it, since the later of two targets wins. Errors: those of FillWeights().
  absl::Status MakeBefore(const at::Tensor& copied);
  // Makes the fills that are left. Errors: those of FillWeights().
  absl::Status Make();

 private:
  const WeightFiles& files_;
  std::vector<WeightFill> left_;
  MemoryRanges targets_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_FILLS_H_
