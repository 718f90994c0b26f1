#include "worker/parallel/stored_page.h"

#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "base/log.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// The page that is used, and the one before it.
constexpr size_t kPresentPages = 2;

// Adds the page's name to the errors that `transfer` throws.
template <typename Fn>
void Named(const char* doing, const std::string& what, Fn transfer) {
  try {
    transfer();
  } catch (c10::Error& error) {
    error.add_context(c10::str("while ", doing, " ", what));
    throw;
  }
}

}  // namespace

void StoredPages::Came(const std::shared_ptr<StoredPage>& page) {
  std::vector<std::shared_ptr<StoredPage>> others;
  {
    MutexLock lock(&mu_);
    std::erase_if(present_, [&](const std::weak_ptr<StoredPage>& other) {
      const std::shared_ptr<StoredPage> there = other.lock();
      return there == nullptr || there == page;
    });
    present_.push_back(page);
    for (size_t i = 0; i + kPresentPages < present_.size(); ++i) {
      if (std::shared_ptr<StoredPage> other = present_[i].lock()) {
        others.push_back(std::move(other));
      }
    }
  }
  for (const std::shared_ptr<StoredPage>& other : others) {
    // A page in use is tried again when the next one arrives.
    if (!other->Free()) continue;
    MutexLock lock(&mu_);
    // Meanwhile it may have come back to memory.
    std::erase_if(present_, [&](const std::weak_ptr<StoredPage>& entry) {
      return entry.lock() == other && !other->present();
    });
  }
}

StoredPage::StoredPage(at::Tensor flat, PartStore& store, uint64_t place, StoredPages& among,
                       std::string what)
    : flat_(std::move(flat)),
      store_(store),
      place_(place),
      among_(among),
      what_(std::move(what)),
      registration_(flat_, this) {
  if (flat_.is_cpu() && !store_.on_streams()) return;
  order_.emplace(flat_.device());
  order_->Begin();
}

StoredPage::~StoredPage() {
  if (!order_.has_value() || !present()) return;
  try {
    // The memory is freed with the last tensor that has it.
    order_->End([] {});
  } catch (const std::exception& error) {
    // The next operation on the device reports the failure, too.
    MUSTER_LOG(Error) << "the device " << flat_.device().str() << " has failed: " << error.what();
  }
}

StoredPage::Access::Access(StoredPage& page) : page_(page) {
  MutexLock lock(&page_.mu_);
  while (page_.taken_) page_.released_.Wait(&page_.mu_);
  page_.taken_ = true;
}

StoredPage::Access::~Access() {
  MutexLock lock(&page_.mu_);
  page_.taken_ = false;
  page_.released_.SignalAll();
}

void StoredPage::Require(bool write, const char* /*op*/) {
  {
    const at::NoGradGuard no_grad;
    const Access access(*this);
    bool present = false;
    {
      MutexLock lock(&mu_);
      changed_ = changed_ || write;
      present = present_;
    }
    if (present) {
      if (order_.has_value()) order_->Use();
      return;
    }
    Named("reading", what_, [&] {
      AllocateMemory(flat_);
      try {
        if (order_.has_value()) order_->Begin();
        store_.ReadTo(place_, flat_);
      } catch (...) {
        FreeMemory(flat_);
        throw;
      }
    });
    MutexLock lock(&mu_);
    present_ = true;
  }
  among_.Came(shared_from_this());
}

bool StoredPage::Free() {
  const at::NoGradGuard no_grad;
  const Access access(*this);
  bool changed = false;
  {
    MutexLock lock(&mu_);
    if (!present_) return true;
    // An operator that comes now waits until this has ended, and reads the contents again.
    if (pins() > 0) return false;
    changed = changed_;
  }
  const auto write = [&] {
    // If no tensor refers to the memory, nothing will read it.
    if (changed && used()) store_.WriteFrom(place_, flat_);
  };
  Named("writing", what_, [&] {
    if (order_.has_value()) {
      order_->End(write);
    } else {
      write();
    }
  });
  FreeMemory(flat_);
  MutexLock lock(&mu_);
  present_ = changed_ = false;
  return true;
}

bool StoredPage::present() const {
  MutexLock lock(&mu_);
  return present_;
}

void StoredPage::CopyTo(const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  const Access access(*this);
  if (present()) {
    const auto copy = [&] { to.copy_(flat_); };
    if (order_.has_value()) return order_->Copy(copy);
    return copy();
  }
  Named("reading", what_, [&] {
    const bool as_it_is = to.scalar_type() == flat_.scalar_type();
    const at::Tensor values = as_it_is ? to : at::empty(flat_.sizes(), flat_.options());
    store_.ReadTo(place_, values);
    if (!as_it_is) to.copy_(values);
  });
}

}  // namespace muster
