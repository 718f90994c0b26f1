#ifndef MUSTER_WORKER_DATA_TOKEN_DATASET_H_
#define MUSTER_WORKER_DATA_TOKEN_DATASET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace muster {

// A file of token ids (raw little-endian integers, as nanoGPT-style preparation writes them) as a
// data set of windows: sample i is (inputs, targets), tokens [i * stride, i * stride + context) and
// the same window shifted by one token. A batch is a pair of int64 tensors [batch, context],
// contiguous.
//
// The file is mapped, not read: opening is instant, and ranks and workers share the page cache. A
// value type, cheap to copy. Thread-safe. The file must not shrink while it is in use.
class TokenDataset {
 public:
  struct Options {
    int64_t context = 1024;  // tokens of a sample
    // Tokens between the starts of samples; 0: context, so that every token is used once.
    int64_t stride = 0;
    int bytes_per_token = 2;  // 1, 2 or 4 (unsigned)
  };

  // Maps a file. NOT_FOUND: no such file. INVALID_ARGUMENT: options out of range, a length that is
  // not a multiple of the token size, or a file too short for one sample.
  static absl::StatusOr<TokenDataset> Open(const std::string& path, const Options& options);

  size_t size() const { return static_cast<size_t>(num_samples_); }
  int64_t num_tokens() const { return num_tokens_; }

  // Error (c10::Error): an index out of range.
  std::pair<at::Tensor, at::Tensor> get_batch(const std::vector<int64_t>& indices) const;

 private:
  class Mapping;
  TokenDataset() = default;

  std::shared_ptr<const Mapping> mapping_;
  Options options_;
  int64_t num_tokens_ = 0;
  int64_t num_samples_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_TOKEN_DATASET_H_
