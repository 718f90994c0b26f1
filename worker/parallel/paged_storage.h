#ifndef MUSTER_WORKER_PARALLEL_PAGED_STORAGE_H_
#define MUSTER_WORKER_PARALLEL_PAGED_STORAGE_H_

#include <atomic>
#include <cstddef>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

// Memory of tensors whose contents are not always present. LibTorch's C++ modules have no hooks
// around forward(); this replaces them one level below: each operator that reads or writes a tensor
// of such memory, in the forward or in the backward pass, asks its page for the contents first. So
// any module works unchanged, whether its submodules are called by forward(), by another method or
// not at all, and tensors that autograd saved find their contents as well.
//
// Operators ask through a boxed fallback of a dispatch key that the tensors carry, above autograd
// and autocast (docs/decisions/0028). It costs about a microsecond for each operator that takes
// such a tensor. Views (t(), detach(), view()) do not ask. Code that uses data_ptr() itself
// bypasses it: while the contents are absent, LibTorch throws ("data is not allocated yet").
class Page {
 public:
  virtual ~Page() = default;

  // Called before operator `op` uses the contents, and writes them if `write`; on the operator's
  // thread. Returns when the contents are present, or throws c10::Error.
  virtual void Require(bool write, const char* op) = 0;

  // Called before Require(), and once more after it, for each such tensor that the operator takes:
  // a page that does not allow the use throws c10::Error.
  virtual void Allow(const at::Tensor& /*tensor*/, bool /*write*/, const char* /*op*/) {}

  // Whether it holds weights that stay elsewhere between their uses (disk_offload(),
  // dispatch_model()), not a part of a sharded model.
  virtual bool holds_offloaded_weights() const { return false; }

  // While above 0, operators use the contents. May be called from any thread; a thread that has
  // called Require() has pinned the page before.
  int pins() const { return pins_.load(std::memory_order_acquire); }

 private:
  friend class Pins;
  std::atomic<int> pins_ = 0;
};

// While it lives, `page` is responsible for the memory of `flat`; afterwards every use of a tensor
// in that memory throws. Thread-safe.
class PageRegistration {
 public:
  PageRegistration(at::Tensor flat, Page* page);
  ~PageRegistration();
  PageRegistration(const PageRegistration&) = delete;
  PageRegistration& operator=(const PageRegistration&) = delete;

 private:
  const at::Tensor flat_;
};

// A tensor in the memory of `flat` whose uses ask its page; not a view to autograd.
at::Tensor PagedView(const at::Tensor& flat, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset);
// The same with another type than that of `flat`: `offset` counts elements of that type.
at::Tensor PagedView(const at::Tensor& flat, at::ScalarType type, at::IntArrayRef sizes,
                     at::IntArrayRef strides, int64_t offset);

// Whether uses of `tensor` ask a page.
bool IsPaged(const at::Tensor& tensor);
// And one that is there and says so (Page::holds_offloaded_weights).
bool IsOffloadedWeight(const at::Tensor& tensor);

// Indexes of `tensors` in groups: those whose uses ask one page, and those that ask none. Groups
// are in the order of their first tensors, and each of them is in order.
std::vector<std::vector<size_t>> GroupsByPage(const std::vector<at::Tensor>& tensors);

// Calls fn(group, indexes) for each group of `tensors` in turn, because an operator that takes a
// list needs the pages of the whole list in memory at once.
template <typename Fn>
void ForEachPage(const std::vector<at::Tensor>& tensors, const Fn& fn) {
  for (const std::vector<size_t>& indexes : GroupsByPage(tensors)) {
    if (indexes.size() == tensors.size()) return fn(tensors, indexes);
    std::vector<at::Tensor> group;
    group.reserve(indexes.size());
    for (const size_t i : indexes) group.push_back(tensors[i]);
    fn(group, indexes);
  }
}

// Free the memory of `flat`, and allocate it again, uninitialized. Its tensors keep their shapes;
// no version counter changes.
void FreeMemory(const at::Tensor& flat);
void AllocateMemory(const at::Tensor& flat);
// Gives `flat` the memory of `from`, a tensor of as many bytes that is no longer used.
void TakeMemory(const at::Tensor& flat, const at::Tensor& from);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_PAGED_STORAGE_H_
