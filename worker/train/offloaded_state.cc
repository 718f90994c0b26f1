#include "worker/train/offloaded_state.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "c10/util/Exception.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// Of tensors in a window: vector instructions want no more.
constexpr uint64_t kTensorAlignment = 64;

std::atomic<uint64_t> default_window_bytes = OffloadedState::kWindowBytes;

uint64_t RoundedBytes(const at::Tensor& like) {
  return (like.nbytes() + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

}  // namespace

OffloadedState::OffloadedState(std::shared_ptr<ScratchFile> file, uint64_t window_bytes)
    : file_(std::move(file)),
      window_bytes_(window_bytes == 0 ? default_window_bytes.load() : window_bytes) {}

void OffloadedState::SetDefaultWindowBytes(uint64_t bytes) { default_window_bytes = bytes; }

bool OffloadedState::Fits(size_t i, const at::Tensor& tensor) const {
  const Place& place = places_[i];
  return place.dtype == tensor.scalar_type() && tensor.sizes() == at::IntArrayRef(place.sizes);
}

void OffloadedState::Renew() {
  failed_ = absl::OkStatus();
  for (Place& place : places_) place.filled = false;
  for (Window& window : windows_) window.written = false;
}

void OffloadedState::Add(size_t first, const std::vector<at::Tensor>& likes, size_t slots,
                         bool pinned, bool by_memory) {
  std::vector<Window> added;
  std::vector<Place> places(likes.size());
  for (size_t k = 0; k < likes.size(); ++k) {
    const at::Tensor& like = likes[k];
    const uint64_t bytes = slots * RoundedBytes(like);
    const bool by_page = by_memory || IsPaged(like);
    const bool apart = k > 0 && by_page && !like.is_alias_of(likes[k - 1]);
    if (added.empty() || apart || added.back().bytes + bytes > window_bytes_) {
      added.push_back({.first = first + k, .last = first + k, .bytes = 0, .memory = {}});
      if (by_page && like.has_storage()) added.back().page = like.storage().unsafeGetStorageImpl();
    }
    Window& window = added.back();
    Place& place = places[k];
    place.window = static_cast<int64_t>(windows_.size() + added.size()) - 1;
    for (size_t s = 0; s < slots; ++s) {
      place.offsets.push_back(window.bytes);
      window.bytes += RoundedBytes(like);
    }
    place.sizes = like.sizes().vec();
    place.strides = like.strides().vec();
    place.dtype = like.scalar_type();
    window.last = first + k + 1;
  }
  uint64_t total = 0;
  for (Window& window : added) {
    window.at = total;
    total += DirectAlignedUp(window.bytes);
    if (file_ != nullptr) continue;
    window.memory = at::empty({static_cast<int64_t>(window.bytes)},
                              at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
  }
  if (file_ != nullptr) {
    const absl::StatusOr<uint64_t> at = file_->Reserve(total);
    ThrowIfError(at.status());
    for (Window& window : added) window.at += *at;
  }
  if (places_.size() < first + likes.size()) places_.resize(first + likes.size());
  std::move(places.begin(), places.end(), places_.begin() + static_cast<int64_t>(first));
  std::move(added.begin(), added.end(), std::back_inserter(windows_));
}

at::Tensor OffloadedState::TensorIn(char* window, const Place& place, size_t slot,
                                    const std::shared_ptr<char>& keep) const {
  const auto options = at::TensorOptions().dtype(place.dtype);
  if (std::find(place.sizes.begin(), place.sizes.end(), 0) != place.sizes.end()) {
    return at::empty(place.sizes, options);
  }
  return at::from_blob(
      window + place.offsets[slot], place.sizes, place.strides, [keep](void*) {}, options);
}

at::Tensor OffloadedState::Slot(size_t i, size_t slot) const {
  const Place& place = places_[i];
  TORCH_INTERNAL_ASSERT(place.window == open_, "the state of parameter ", i, " is not there");
  return TensorIn(open_memory_, place, slot, nullptr);
}

at::Tensor OffloadedState::Mapped(size_t i, size_t slot, Maps* maps) const {
  ThrowIfError(failed_);
  const Place& place = places_[i];
  const Window& window = windows_[place.window];
  if (file_ == nullptr) {
    // The tensor keeps the memory of its window.
    const auto memory = std::shared_ptr<char>(static_cast<char*>(window.memory.data_ptr()),
                                              [keep = window.memory](char*) {});
    return TensorIn(memory.get(), place, slot, memory);
  }
  std::shared_ptr<char>& mapped = (*maps)[place.window];
  if (mapped == nullptr && window.bytes > 0) {
    absl::StatusOr<std::shared_ptr<char>> memory = file_->Map(window.at, window.bytes);
    ThrowIfError(memory.status());
    mapped = *std::move(memory);
  }
  return TensorIn(mapped.get(), place, slot, mapped);
}

void OffloadedState::ForWindows(size_t first, size_t last,
                                const std::function<bool(size_t i)>& wanted,
                                const std::function<void(size_t first, size_t last)>& update) {
  ThrowIfError(failed_);
  std::vector<size_t> windows;
  for (size_t w = 0; w < windows_.size(); ++w) {
    const Window& window = windows_[w];
    if (window.first < first || window.last > last) continue;
    for (size_t i = window.first; i < window.last; ++i) {
      if (!wanted(i)) continue;
      windows.push_back(w);
      break;
    }
  }
  // A page is read and written once, though several groups have parameters in it.
  std::map<const void*, size_t> first_of_page;
  for (const size_t w : windows) {
    if (windows_[w].page != nullptr) first_of_page.emplace(windows_[w].page, w);
  }
  const auto place = [&](size_t w) {
    return windows_[w].page == nullptr ? w : first_of_page.at(windows_[w].page);
  };
  std::stable_sort(windows.begin(), windows.end(),
                   [&](size_t a, size_t b) { return place(a) < place(b); });
  if (file_ == nullptr) {
    for (const size_t w : windows) {
      Update(w, static_cast<char*>(windows_[w].memory.data_ptr()), update);
    }
    return;
  }
  failed_ = absl::DataLossError(
      "an offloaded state was lost when its update failed: call load_state(), or run the program "
      "again");
  ThrowIfError(Stream(windows, update));
  failed_ = absl::OkStatus();
}

void OffloadedState::Update(size_t window, char* memory,
                            const std::function<void(size_t, size_t)>& update) {
  struct Closes {
    OffloadedState& state;
    ~Closes() { state.open_ = -1; }
  } closes{*this};
  open_ = static_cast<int64_t>(window);
  open_memory_ = memory;
  update(windows_[window].first, windows_[window].last);
}

absl::Status OffloadedState::Read(size_t window, size_t buffer) {
  const Window& from = windows_[window];
  AlignedMemory& to = buffers_[buffer];
  const uint64_t bytes = DirectAlignedUp(from.bytes);
  MUSTER_RETURN_IF_ERROR(to.Grow(bytes));
  if (!from.written) return absl::OkStatus();
  return file_->Read(from.at, to.data(), bytes);
}

absl::Status OffloadedState::Write(size_t window, size_t buffer) {
  Window& to = windows_[window];
  MUSTER_RETURN_IF_ERROR(
      file_->Write(to.at, absl::string_view(buffers_[buffer].data(), DirectAlignedUp(to.bytes))));
  to.written = true;
  return absl::OkStatus();
}

absl::Status OffloadedState::TakeInTurn(
    const std::vector<size_t>& windows,
    const std::function<void(size_t first, size_t last)>& update) {
  for (const size_t window : windows) {
    MUSTER_RETURN_IF_ERROR(Read(window, 0));
    Update(window, buffers_[0].data(), update);
    MUSTER_RETURN_IF_ERROR(Write(window, 0));
  }
  return absl::OkStatus();
}

absl::Status OffloadedState::Stream(const std::vector<size_t>& windows,
                                    const std::function<void(size_t first, size_t last)>& update) {
  const size_t count = windows.size();
  const auto buffer_of = [&](size_t k) { return k % buffers_.size(); };
  if (count == 1) return TakeInTurn(windows, update);  // nothing would run beside anything

  Mutex mu;
  CondVar changed;
  // How many windows were read, updated, written; in order.
  size_t read = 0, updated = 0, written = 0;
  bool stopped = false;  // by an update that has thrown
  absl::Status status;
  const auto transfer = [&] {
    MutexLock lock(&mu);
    while (written < count && status.ok() && !stopped) {
      const bool reads = read < count && read < written + buffers_.size();
      if (!reads && written == updated) {
        changed.Wait(&mu);
        continue;
      }
      const size_t k = reads ? read : written;
      mu.Unlock();
      const absl::Status done =
          reads ? Read(windows[k], buffer_of(k)) : Write(windows[k], buffer_of(k));
      mu.Lock();
      status.Update(done);
      ++(reads ? read : written);
      changed.SignalAll();
    }
  };
  std::thread thread;
  try {
    thread = std::thread(transfer);
  } catch (const std::system_error&) {  // the system gives no more threads
    return TakeInTurn(windows, update);
  }
  struct Joins {
    std::thread& thread;
    ~Joins() { thread.join(); }
  };
  {
    const Joins joins{thread};
    for (size_t k = 0; k < count; ++k) {
      {
        MutexLock lock(&mu);
        while (read <= k && status.ok()) changed.Wait(&mu);
        if (!status.ok()) break;
      }
      try {
        Update(windows[k], buffers_[buffer_of(k)].data(), update);
      } catch (...) {
        MutexLock lock(&mu);
        stopped = true;
        changed.SignalAll();
        throw;
      }
      MutexLock lock(&mu);
      ++updated;
      changed.SignalAll();
    }
  }
  return status;
}

}  // namespace muster
