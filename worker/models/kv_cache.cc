#include "worker/models/kv_cache.h"

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "worker/checkpoint/tensor_memory.h"
#include "worker/train/guard.h"

namespace muster::models {

KvCache::KvCache(int64_t num_layers, int64_t batch, int64_t num_heads, int64_t capacity,
                 int64_t head_dim, const at::TensorOptions& options)
    : KvCache(std::vector<at::TensorOptions>(num_layers, options), batch, num_heads, capacity,
              head_dim) {}

KvCache::KvCache(const std::vector<at::TensorOptions>& layers, int64_t batch, int64_t num_heads,
                 int64_t capacity, int64_t head_dim)
    : batch_(batch), capacity_(capacity) {
  uint64_t bytes = 0;
  for (const at::TensorOptions& options : layers) {
    bytes += 2 * static_cast<uint64_t>(batch * num_heads * capacity * head_dim) *
             options.dtype().itemsize();
  }
  ThrowIfError(
      WithMemory(absl::StrCat("the cache of keys and values of ", batch,
                              batch == 1 ? " row" : " rows", " of up to ", capacity, " tokens: "),
                 bytes,
                 "shorten the prompt, lower max_new_tokens, num_beams or the number of rows, or "
                 "take a machine "
                 "with more memory",
                 [&] {
                   for (const at::TensorOptions& options : layers) {
                     keys_.push_back(at::empty({batch, num_heads, capacity, head_dim}, options));
                     values_.push_back(at::empty({batch, num_heads, capacity, head_dim}, options));
                   }
                 }));
}

std::pair<at::Tensor, at::Tensor> KvCache::Append(int64_t layer, const at::Tensor& keys,
                                                  const at::Tensor& values) {
  const int64_t count = keys.size(2);
  TORCH_CHECK(length_ + count <= capacity_, "the key-value cache has room for ", capacity_,
              " positions; ", length_ + count, " are needed");
  keys_[layer].narrow(2, length_, count).copy_(keys);
  values_[layer].narrow(2, length_, count).copy_(values);
  return {keys_[layer].narrow(2, 0, length_ + count), values_[layer].narrow(2, 0, length_ + count)};
}

KvCache KvCache::Repeated(int64_t times) const {
  const at::Tensor& first = keys_.at(0);
  std::vector<at::TensorOptions> layers;
  for (const at::Tensor& keys : keys_) layers.push_back(keys.options());
  KvCache copy(layers, batch_ * times, first.size(1), capacity_, first.size(3));
  for (size_t i = 0; i < keys_.size(); ++i) {
    for (const auto& [to, from] :
         {std::make_pair(copy.keys_[i], keys_[i]), std::make_pair(copy.values_[i], values_[i])}) {
      to.narrow(2, 0, length_).copy_(from.narrow(2, 0, length_).repeat_interleave(times, 0));
    }
  }
  copy.length_ = length_;
  return copy;
}

void KvCache::Reorder(const at::Tensor& rows, int64_t from) {
  if (from >= length_) return;
  at::Tensor here = rows;
  for (std::vector<at::Tensor>* const tensors : {&keys_, &values_}) {
    for (at::Tensor& tensor : *tensors) {
      const at::Tensor later = tensor.narrow(2, from, length_ - from);
      if (here.device() != later.device()) here = rows.to(later.device());
      later.copy_(later.index_select(0, here));
    }
  }
}

}  // namespace muster::models
