#include "worker/models/kv_cache.h"

#include "ATen/ops/empty.h"

namespace muster::models {

KvCache::KvCache(int64_t num_layers, int64_t batch, int64_t num_heads, int64_t capacity,
                 int64_t head_dim, const at::TensorOptions& options)
    : batch_(batch), capacity_(capacity) {
  for (int64_t i = 0; i < num_layers; ++i) {
    keys_.push_back(at::empty({batch, num_heads, capacity, head_dim}, options));
    values_.push_back(at::empty({batch, num_heads, capacity, head_dim}, options));
  }
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
  KvCache copy(static_cast<int64_t>(keys_.size()), batch_ * times, first.size(1), capacity_,
               first.size(3), first.options());
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
  for (std::vector<at::Tensor>* const tensors : {&keys_, &values_}) {
    for (at::Tensor& tensor : *tensors) {
      const at::Tensor later = tensor.narrow(2, from, length_ - from);
      later.copy_(later.index_select(0, rows));
    }
  }
}

}  // namespace muster::models
