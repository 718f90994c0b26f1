#ifndef MUSTER_WORKER_PARALLEL_STORED_PAGE_H_
#define MUSTER_WORKER_PARALLEL_STORED_PAGE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "worker/parallel/memory_order.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/part_store.h"

namespace muster {

class StoredPage;

// Pages of which the last two to arrive stay in memory: one may be used together with the one
// before it. Thread-safe. It outlives the pages.
class StoredPages {
 public:
  StoredPages() = default;
  StoredPages(const StoredPages&) = delete;
  StoredPages& operator=(const StoredPages&) = delete;

  // The contents of `page` are in memory now: those of others are freed. Errors: the store's, as
  // c10::Error; the others are in memory then, and are freed later.
  void Came(const std::shared_ptr<StoredPage>& page);

 private:
  Mutex mu_;
  std::vector<std::weak_ptr<StoredPage>> present_ ABSL_GUARDED_BY(mu_);  // the newest is the last
};

// Memory of tensors that is in a PartStore while nothing uses them: an operator that takes one
// reads all of it into memory, where it stays until Free(), or until two others of `among` have
// arrived. Thread-safe.
//
// On a device the copies are operations of streams: the page's reads and writes are in order with
// all that its streams do with the memory (MemoryOrder), and with all reads and writes of its place
// (PartStore).
class StoredPage : public Page, public std::enable_shared_from_this<StoredPage> {
 public:
  // `flat`: has the whole of its memory, from LibTorch's allocator, which others use only by
  // PagedView(); on a device, what the current stream does with it is in order. `store`: borrowed;
  // `place`: of flat.nbytes() bytes in it. `what`: for errors: "this process's part of unit '0'".
  StoredPage(at::Tensor flat, PartStore& store, uint64_t place, StoredPages& among,
             std::string what);
  ~StoredPage() override;

  void Require(bool write, const char* op) override;
  // Writes the contents to the store if they have changed, and frees the memory, unless an operator
  // uses it. Returns whether it is free now.
  bool Free();
  // Whether the contents are in memory.
  bool present() const;
  // Whether a tensor uses the memory, in addition to this object.
  bool used() const { return flat_.storage().use_count() > 1; }
  // Overwrites `to`, which has as many elements on the same device; the page stays where it is.
  void CopyTo(const at::Tensor& to);
  uint64_t place() const { return place_; }

 private:
  // While an Access lives, no other code uses the memory or the place in the store.
  class Access {
   public:
    explicit Access(StoredPage& page);
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

   private:
    StoredPage& page_;
  };

  const at::Tensor flat_;  // without memory while it is in the store
  PartStore& store_;
  const uint64_t place_;
  StoredPages& among_;
  const std::string what_;
  const PageRegistration registration_;
  // For memory that streams use; used only by an Access.
  std::optional<MemoryOrder> order_;
  mutable Mutex mu_;
  CondVar released_;
  bool taken_ ABSL_GUARDED_BY(mu_) = false;  // by an Access
  bool present_ ABSL_GUARDED_BY(mu_) = true;
  bool changed_ ABSL_GUARDED_BY(mu_) = true;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_STORED_PAGE_H_
