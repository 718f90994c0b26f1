#ifndef MUSTER_WORKER_TRAIN_TENSOR_RANGES_H_
#define MUSTER_WORKER_TRAIN_TENSOR_RANGES_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "worker/parallel/paged_storage.h"

namespace muster {

// Whether an operation on this tensor is so short that LibTorch's threads cost more than they save:
// they meet at a barrier for every tensor, which takes a few microseconds.
inline bool IsSmall(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.numel() < (1 << 15);
}

// While it lives, LibTorch's operations on this thread use no other threads. Does nothing if
// LibTorch is built without OpenMP.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int threads_;
};

namespace tensor_ranges_internal {

// Calls fn(begin, end) for ranges of the tensors from `first` up to `last`.
template <typename Fn>
void ForRangesOf(const std::vector<at::Tensor>& tensors, int64_t first, int64_t last,
                 const Fn& fn) {
  const int64_t size = last - first;
  const int64_t threads = at::get_num_threads();
  if (threads < 2 || size == 0 || !IsSmall(tensors[first])) {
    fn(first, last);
    return;
  }
  // A tensor costs about as much as 256 elements, in addition to its own elements.
  constexpr int64_t kTensorCost = 256;
  constexpr int64_t kShort = 1 << 17;
  int64_t total = 0;
  for (int64_t i = first; i < last; ++i) total += tensors[i].numel() + kTensorCost;
  if (total < kShort) {
    const OneThread one_thread;
    fn(first, last);
    return;
  }
  const int64_t parts = std::min(threads, size);
  std::vector<int64_t> bounds = {first};
  int64_t sum = 0;
  for (int64_t i = first; i < last; ++i) {
    if (sum * parts >= total * static_cast<int64_t>(bounds.size())) bounds.push_back(i);
    sum += tensors[i].numel() + kTensorCost;
  }
  bounds.push_back(last);
  at::parallel_for(0, static_cast<int64_t>(bounds.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    at::NoGradGuard no_grad_here;  // grad mode belongs to a thread
    for (int64_t part = begin; part < end; ++part) {
      if (bounds[part] < bounds[part + 1]) fn(bounds[part], bounds[part + 1]);
    }
  });
}

}  // namespace tensor_ranges_internal

// Calls fn(begin, end) for ranges that together cover `tensors`. A list of only small ones (see
// IsSmall) is one range on this thread if it is short, else one for each of LibTorch's threads, so
// that these meet once for the whole list and not for each tensor. Other lists are one range, left
// to LibTorch. Tensors in different pages (paged_storage.h), and those whose `gradients` are in
// different pages, are in different ranges, one page after the other. `gradients`: empty, or as
// many as `tensors`. `fn` runs without grad mode and may run on several threads at a time.
template <typename Fn>
void ForTensorRanges(const std::vector<at::Tensor>& tensors,
                     const std::vector<at::Tensor>& gradients, const Fn& fn) {
  const auto size = static_cast<int64_t>(tensors.size());
  at::NoGradGuard no_grad;
  if (size == 0) return fn(int64_t{0}, size);
  const auto page_of = [](const at::Tensor& tensor) -> const void* {
    return IsPaged(tensor) ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  };
  const auto page = [&](int64_t i) {
    return std::pair(page_of(tensors[i]), gradients.empty() ? nullptr : page_of(gradients[i]));
  };
  for (int64_t first = 0, last = 1; first < size; first = last++) {
    while (last < size && page(last) == page(first)) ++last;
    tensor_ranges_internal::ForRangesOf(tensors, first, last, fn);
  }
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_TENSOR_RANGES_H_
