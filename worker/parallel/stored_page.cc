#include "worker/parallel/stored_page.h"

#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// The one that is used, and the one before it.
constexpr size_t kPresentPages = 2;

// Names the page in what `transfer` throws.
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
    // One in use is tried again when the next page comes.
    if (!other->Free()) continue;
    MutexLock lock(&mu_);
    // It may have come again.
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
      registration_(flat_, this) {}

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

void StoredPage::Read(void* to) { store_.Read(place_, to, flat_.nbytes()); }

void StoredPage::Require(bool write, const char* /*op*/) {
  {
    const Access access(*this);
    {
      MutexLock lock(&mu_);
      changed_ = changed_ || write;
      if (present_) return;
    }
    Named("reading", what_, [&] {
      AllocateMemory(flat_);
      try {
        Read(flat_.data_ptr());
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
  const Access access(*this);
  bool changed = false;
  {
    MutexLock lock(&mu_);
    if (!present_) return true;
    // An operator that comes now waits for this to end, and reads.
    if (pins() > 0) return false;
    changed = changed_;
  }
  // What no tensor has nobody reads.
  if (changed && used()) {
    Named("writing", what_, [&] { store_.Write(place_, flat_.data_ptr(), flat_.nbytes()); });
  }
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
    to.copy_(flat_);
    return;
  }
  Named("reading", what_, [&] {
    const bool as_it_is = to.scalar_type() == flat_.scalar_type();
    const at::Tensor values = as_it_is ? to : at::empty(flat_.sizes(), flat_.options());
    Read(values.data_ptr());
    if (!as_it_is) to.copy_(values);
  });
}

}  // namespace muster
