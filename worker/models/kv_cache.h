#ifndef MUSTER_WORKER_MODELS_KV_CACHE_H_
#define MUSTER_WORKER_MODELS_KV_CACHE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster::models {

// The keys and values of the positions that a model has processed, for all layers, in memory that
// is allocated once. Rows of different lengths are padded on the left, so that all end at the same
// position. Not thread-safe.
class KvCache {
 public:
  // Allocates room for `capacity` positions of `batch` rows. Throws a RESOURCE_EXHAUSTED status
  // that names the size if the host refuses the memory.
  KvCache(int64_t num_layers, int64_t batch, int64_t num_heads, int64_t capacity, int64_t head_dim,
          const at::TensorOptions& options);
  // The same with one device per layer.
  KvCache(const std::vector<at::TensorOptions>& layers, int64_t batch, int64_t num_heads,
          int64_t capacity, int64_t head_dim);

  int64_t batch() const { return batch_; }
  int64_t capacity() const { return capacity_; }
  // The number of positions that all layers have.
  int64_t length() const { return length_; }

  // Adds `keys` and `values` [batch, heads, T, head_dim] of the positions after length(), and
  // returns those of all positions as views [batch, heads, length() + T, head_dim]. Throws
  // c10::Error beyond the capacity.
  std::pair<at::Tensor, at::Tensor> Append(int64_t layer, const at::Tensor& keys,
                                           const at::Tensor& values);
  // Makes the next positions follow these `count`; call it after the last layer.
  void Advance(int64_t count) { length_ += count; }
  // Forgets the positions from `length` on.
  void Truncate(int64_t length) { length_ = length; }

  // Returns a copy with each row repeated `times` times, consecutively.
  KvCache Repeated(int64_t times) const;
  // Makes row i continue the previous row `rows[i]` (int64 [batch], on any device) from position
  // `from` on; before that position, all exchanged rows are equal.
  void Reorder(const at::Tensor& rows, int64_t from);

 private:
  int64_t batch_;
  int64_t capacity_;
  int64_t length_ = 0;
  std::vector<at::Tensor> keys_;
  std::vector<at::Tensor> values_;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_KV_CACHE_H_
