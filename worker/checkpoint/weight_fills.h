#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_FILLS_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_FILLS_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "worker/checkpoint/memory_ranges.h"
#include "worker/checkpoint/tensor_uploads.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {

// A tensor of files, and the tensor that gets its values.
struct WeightFill {
  const WeightEntry* from = nullptr;
  at::Tensor to;
};

// Whether FillWeights() takes it: contiguous there and here, with memory, and not empty. Its type
// may be another one here, floating as in the file.
bool IsFillable(const WeightEntry& from, const at::Tensor& to);

// Reads weights in several threads, past the page cache unless they are there: on the host where
// they go, if they come from the cache or are aligned as in the file (see StreamedFile::Read), else
// by way of the memory of a thread; for a device into pinned blocks, whose copies are left to it.
// Where two targets overlap, the later one wins. The values are there when it returns; after an
// error some of them may be, and nothing is under way. Needs memory for a block of each thread (two
// for a device), and of a device for values of another type, `options.converted_bytes` or one
// tensor. Errors: those of WeightFiles::ReadAll and DeviceUploads. Throws c10::Error for memory
// that a device has not.
absl::Status FillWeights(const WeightFiles& files, const std::vector<WeightFill>& weights,
                         const TensorUploadOptions& options = {});

// Fills that are left to be made together, beside copies that are made one after the other.
class WeightFills {
 public:
  // `files`: borrowed.
  explicit WeightFills(const WeightFiles& files) : files_(files) {}

  void Add(WeightFill weight);
  // Before a copy to a tensor: makes those that are left if one of them has memory in common with
  // it, since the later of two targets wins. Errors: those of FillWeights().
  absl::Status MakeBefore(const at::Tensor& copied);
  // Makes those that are left. Errors: those of FillWeights().
  absl::Status Make();

 private:
  const WeightFiles& files_;
  std::vector<WeightFill> left_;
  MemoryRanges targets_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_FILLS_H_
