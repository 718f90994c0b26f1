#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_WRITER_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_WRITER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {

struct CopiedWeights {
  // Plain names; the index is last if there is one.
  std::vector<std::string> files;
  uint64_t tensors = 0;
  uint64_t bytes = 0;
  // Further names of tensors that are written under another name (tied weights).
  std::vector<std::string> left_out;
};

// Copies weights into safetensors files as save_model writes them: `to` is a file *.safetensors, or
// a folder, which gets model.safetensors or, beyond `max_shard_bytes`, shards with an index. Of
// several names of a tensor the first is kept. Removes the files of an earlier copy in the folder;
// other files stay. Each file is whole or absent; at most one tensor is in memory. Blocks on the
// disk. Errors: ALREADY_EXISTS if one of the files that are read would be replaced; those of
// reading and writing.
absl::StatusOr<CopiedWeights> CopyWeights(const WeightFiles& weights, const std::string& to,
                                          int64_t max_shard_bytes = 10'000'000'000);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_WRITER_H_
