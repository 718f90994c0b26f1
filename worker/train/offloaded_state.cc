#include "worker/train/offloaded_state.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/for_each.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/guard.h"
#include "worker/train/pin_memory.h"

namespace muster {
namespace {

// The alignment of tensors in a window: vector instructions need no more.
constexpr uint64_t kTensorAlignment = 64;

std::atomic<uint64_t> default_window_bytes = OffloadedState::kWindowBytes;

uint64_t RoundedBytes(const at::Tensor& like) {
  return (like.nbytes() + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

absl::Status WaitFor(const std::shared_ptr<DeviceWindows::Ticket>& ticket) {
  if (ticket == nullptr) return absl::OkStatus();
  try {
    ticket->Wait();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(
        "a device failed while an optimizer's state was copied from it: ", error.what()));
  }
}

}  // namespace

// Windows on their devices. They arrive in the order in which they are updated, each while the
// previous one is updated, and leave while the next one is. Windows on the CPU stay in place.
class OffloadedState::OnDevices {
 public:
  OnDevices(OffloadedState& state, Place place) : state_(state), place_(place) {}

  // Whether the window is updated elsewhere than in the host's memory.
  bool Moves(size_t window) const {
    return place_ == Place::kOnTheirDevices && !DeviceOf(window).is_cpu();
  }

  // Makes the device copy `window` from `host`, if it has room for one more. At most one window
  // that is not updated yet is announced.
  void Announce(size_t window, const char* host) {
    if (!Moves(window) || announced_ != nullptr || tight_) return;
    // Together with the current window and the previous one: three.
    while (leaving_.size() > 1) leaving_.pop_front();
    try {
      announced_ = Fetch(window, host);
    } catch (const c10::OutOfMemoryError&) {
      // It is fetched when the others have gone, and so are all later windows: another attempt
      // would make LibTorch free all the memory that it has cached.
      tight_ = true;
    }
  }

  // Updates one window. `host` has the result when the ticket is reached; null: it has it now.
  std::shared_ptr<DeviceWindows::Ticket> Update(size_t window, char* host,
                                                const UpdateRange& update,
                                                const std::function<void()>& announce_next) {
    const c10::Device device = DeviceOf(window);
    if (!Moves(window)) {
      state_.Update(window, host, c10::Device(c10::DeviceType::CPU), update);
      return nullptr;
    }
    std::unique_ptr<DeviceWindows::Window> there = std::move(announced_);
    if (there == nullptr) {
      leaving_.clear();
      there = Fetch(window, host);
    }
    announce_next();
    DeviceWindows& copies = state_.CopiesOf(device);
    copies.Use(*there);
    const std::vector<bool> filled = state_.FilledIn(window);
    try {
      state_.Update(window, static_cast<char*>(there->tensor().data_ptr()), device, update);
    } catch (...) {
      // The host's data are unchanged.
      state_.SetFilledIn(window, filled);
      throw;
    }
    std::shared_ptr<DeviceWindows::Ticket> ticket = copies.Return(*there, HostBytes(window, host));
    leaving_.push_back(std::move(there));
    return ticket;
  }

 private:
  const c10::Device& DeviceOf(size_t window) const { return state_.windows_[window].device; }

  std::unique_ptr<DeviceWindows::Window> Fetch(size_t window, const char* host) {
    const Window& fetched = state_.windows_[window];
    const at::Tensor room = at::empty({static_cast<int64_t>(fetched.bytes)},
                                      at::TensorOptions().dtype(at::kByte).device(fetched.device));
    return state_.CopiesOf(fetched.device)
        .Fetch(room, fetched.written ? HostBytes(window, host) : at::Tensor());
  }
  at::Tensor HostBytes(size_t window, const char* host) const {
    // from_blob() accepts no const pointer; a source is only read.
    return at::from_blob(const_cast<char*>(host),
                         {static_cast<int64_t>(state_.windows_[window].bytes)},
                         at::TensorOptions().dtype(at::kByte));
  }

  OffloadedState& state_;
  const Place place_;
  bool tight_ = false;
  std::unique_ptr<DeviceWindows::Window> announced_;
  std::deque<std::unique_ptr<DeviceWindows::Window>> leaving_;
};

OffloadedState::OffloadedState(std::shared_ptr<ScratchFile> file, uint64_t window_bytes)
    : file_(std::move(file)),
      window_bytes_(window_bytes == 0 ? default_window_bytes.load() : window_bytes) {}

void OffloadedState::SetDefaultWindowBytes(uint64_t bytes) { default_window_bytes = bytes; }

bool OffloadedState::Fits(size_t i, const at::Tensor& tensor) const {
  const Kept& kept = places_[i];
  return kept.dtype == tensor.scalar_type() && tensor.sizes() == at::IntArrayRef(kept.sizes);
}

void OffloadedState::Renew() {
  failed_ = absl::OkStatus();
  for (Kept& kept : places_) kept.filled = false;
  for (Window& window : windows_) window.written = false;
}

void OffloadedState::Add(size_t first, const std::vector<at::Tensor>& likes, size_t slots,
                         const std::vector<c10::Device>& devices, bool by_memory) {
  std::vector<Window> added;
  std::vector<Kept> places(likes.size());
  for (size_t k = 0; k < likes.size(); ++k) {
    const at::Tensor& like = likes[k];
    const uint64_t bytes = slots * RoundedBytes(like);
    const bool by_page = by_memory || IsPaged(like);
    const bool apart = k > 0 && by_page && !like.is_alias_of(likes[k - 1]);
    const c10::Device device = devices.empty() ? c10::Device(c10::DeviceType::CPU) : devices[k];
    if (added.empty() || apart || added.back().device != device ||
        added.back().bytes + bytes > window_bytes_) {
      added.push_back(
          {.first = first + k, .last = first + k, .bytes = 0, .device = device, .memory = nullptr});
      if (by_page && like.has_storage()) added.back().page = like.storage().unsafeGetStorageImpl();
    }
    Window& window = added.back();
    Kept& kept = places[k];
    kept.window = static_cast<int64_t>(windows_.size() + added.size()) - 1;
    for (size_t s = 0; s < slots; ++s) {
      kept.offsets.push_back(window.bytes);
      window.bytes += RoundedBytes(like);
    }
    kept.sizes = like.sizes().vec();
    kept.strides = like.strides().vec();
    kept.dtype = like.scalar_type();
    window.last = first + k + 1;
  }
  uint64_t total = 0;
  for (Window& window : added) {
    window.at = total;
    total += DirectAlignedUp(window.bytes);
  }
  if (file_ != nullptr) {
    const absl::StatusOr<uint64_t> at = file_->Reserve(total);
    ThrowIfError(at.status());
    for (Window& window : added) window.at += *at;
  } else {
    const auto memory = std::make_shared<AlignedMemory>();
    ThrowIfError(memory->Grow(total));
    for (Window& window : added) {
      PinFor(window.device, memory.get());
      window.memory = std::shared_ptr<char>(memory, memory->data() + window.at);
    }
  }
  if (places_.size() < first + likes.size()) places_.resize(first + likes.size());
  std::move(places.begin(), places.end(), places_.begin() + static_cast<int64_t>(first));
  std::move(added.begin(), added.end(), std::back_inserter(windows_));
}

at::Tensor OffloadedState::TensorIn(char* window, const c10::Device& device, const Kept& kept,
                                    size_t slot, const std::shared_ptr<char>& keep) const {
  const auto options = at::TensorOptions().dtype(kept.dtype).device(device);
  if (std::find(kept.sizes.begin(), kept.sizes.end(), 0) != kept.sizes.end()) {
    return at::empty(kept.sizes, options);
  }
  return at::for_blob(window + kept.offsets[slot], kept.sizes)
      .strides(kept.strides)
      .deleter([keep](void*) {})
      .options(options)
      .target_device(device)
      .make_tensor();
}

at::Tensor OffloadedState::Slot(size_t i, size_t slot) const {
  const Kept& kept = places_[i];
  TORCH_INTERNAL_ASSERT(kept.window == open_, "the state of parameter ", i, " is not there");
  return TensorIn(open_memory_, open_device_, kept, slot, nullptr);
}

at::Tensor OffloadedState::Mapped(size_t i, size_t slot, Maps* maps) const {
  ThrowIfError(failed_);
  const Kept& kept = places_[i];
  const Window& window = windows_[kept.window];
  const c10::Device cpu(c10::DeviceType::CPU);
  if (file_ == nullptr) {
    WaitForCopies();
    // The tensor keeps its window's memory alive.
    return TensorIn(window.memory.get(), cpu, kept, slot, window.memory);
  }
  std::shared_ptr<char>& mapped = (*maps)[kept.window];
  if (mapped == nullptr && window.bytes > 0) {
    absl::StatusOr<std::shared_ptr<char>> memory = file_->Map(window.at, window.bytes);
    ThrowIfError(memory.status());
    mapped = *std::move(memory);
  }
  return TensorIn(mapped.get(), cpu, kept, slot, mapped);
}

DeviceWindows& OffloadedState::CopiesOf(const c10::Device& device) {
  for (const auto& copies : copies_) {
    if (copies->device() == device) return *copies;
  }
  return *copies_.emplace_back(std::make_unique<DeviceWindows>(device));
}

void OffloadedState::WaitForCopies() const {
  for (const auto& copies : copies_) copies->Wait();
}

void OffloadedState::ForWindows(size_t first, size_t last,
                                const std::function<bool(size_t i)>& wanted,
                                const UpdateRange& update, Place place) {
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
  // A page is read and written once, even if several groups have parameters in it.
  std::map<const void*, size_t> first_of_page;
  for (const size_t w : windows) {
    if (windows_[w].page != nullptr) first_of_page.emplace(windows_[w].page, w);
  }
  const auto turn = [&](size_t w) {
    return windows_[w].page == nullptr ? w : first_of_page.at(windows_[w].page);
  };
  std::stable_sort(windows.begin(), windows.end(),
                   [&](size_t a, size_t b) { return turn(a) < turn(b); });
  if (place == Place::kOnTheHost) WaitForCopies();
  // The previous step may have been on another stream.
  for (const auto& copies : copies_) copies->Follow();
  OnDevices there(*this, place);
  if (file_ == nullptr) {
    for (size_t k = 0; k < windows.size(); ++k) {
      Window& window = windows_[windows[k]];
      there.Update(windows[k], window.memory.get(), update, [&] {
        if (k + 1 == windows.size()) return;
        there.Announce(windows[k + 1], windows_[windows[k + 1]].memory.get());
      });
      window.written = true;
    }
    return;
  }
  failed_ = absl::DataLossError(
      "an offloaded state was lost when its update failed: call load_state(), or run the program "
      "again");
  ThrowIfError(Stream(windows, there, update));
  failed_ = absl::OkStatus();
}

void OffloadedState::Update(size_t window, char* memory, const c10::Device& device,
                            const UpdateRange& update) {
  struct Closes {
    OffloadedState& state;
    ~Closes() { state.open_ = -1; }
  } closes{*this};
  open_ = static_cast<int64_t>(window);
  open_memory_ = memory;
  open_device_ = device;
  update(windows_[window].first, windows_[window].last);
}

std::vector<bool> OffloadedState::FilledIn(size_t window) const {
  std::vector<bool> filled;
  for (size_t i = windows_[window].first; i < windows_[window].last; ++i) {
    filled.push_back(places_[i].filled);
  }
  return filled;
}

void OffloadedState::SetFilledIn(size_t window, const std::vector<bool>& filled) {
  for (size_t k = 0; k < filled.size(); ++k) {
    places_[windows_[window].first + k].filled = filled[k];
  }
}

absl::Status OffloadedState::Read(size_t window, size_t buffer) {
  const Window& from = windows_[window];
  AlignedMemory& to = buffers_[buffer];
  const uint64_t bytes = DirectAlignedUp(from.bytes);
  MUSTER_RETURN_IF_ERROR(to.Grow(bytes));
  PinFor(from.device, &to);
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

absl::Status OffloadedState::TakeInTurn(const std::vector<size_t>& windows, OnDevices& there,
                                        const UpdateRange& update) {
  for (const size_t window : windows) {
    MUSTER_RETURN_IF_ERROR(Read(window, 0));
    const auto ticket = there.Update(window, buffers_[0].data(), update, [] {});
    if (ticket != nullptr) ticket->Wait();
    MUSTER_RETURN_IF_ERROR(Write(window, 0));
  }
  return absl::OkStatus();
}

absl::Status OffloadedState::Stream(const std::vector<size_t>& windows, OnDevices& there,
                                    const UpdateRange& update) {
  const size_t count = windows.size();
  const auto buffer_of = [&](size_t k) { return k % buffers_.size(); };
  if (count == 1) return TakeInTurn(windows, there, update);  // nothing would overlap

  Mutex mu;
  CondVar changed;
  // The number of windows that were read, updated and written; in order.
  size_t read = 0, updated = 0, written = 0;
  std::vector<std::shared_ptr<DeviceWindows::Ticket>> tickets(count);  // of updated ones
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
      const std::shared_ptr<DeviceWindows::Ticket> ticket = reads ? nullptr : tickets[k];
      mu.Unlock();
      absl::Status done = WaitFor(ticket);
      if (done.ok())
        done = reads ? Read(windows[k], buffer_of(k)) : Write(windows[k], buffer_of(k));
      mu.Lock();
      status.Update(done);
      ++(reads ? read : written);
      changed.SignalAll();
    }
  };
  std::optional<std::thread> thread = TryStartThread(transfer);
  if (!thread.has_value()) return TakeInTurn(windows, there, update);
  struct Joins {
    std::thread& thread;
    ~Joins() { thread.join(); }
  };
  {
    const Joins joins{*thread};
    for (size_t k = 0; k < count; ++k) {
      {
        MutexLock lock(&mu);
        while (read <= k && status.ok()) changed.Wait(&mu);
        if (!status.ok()) break;
      }
      std::shared_ptr<DeviceWindows::Ticket> ticket;
      try {
        ticket = there.Update(windows[k], buffers_[buffer_of(k)].data(), update, [&] {
          {
            MutexLock lock(&mu);
            if (read <= k + 1 || !status.ok()) return;
          }
          there.Announce(windows[k + 1], buffers_[buffer_of(k + 1)].data());
        });
      } catch (...) {
        MutexLock lock(&mu);
        stopped = true;
        changed.SignalAll();
        throw;
      }
      MutexLock lock(&mu);
      tickets[k] = std::move(ticket);
      ++updated;
      changed.SignalAll();
    }
  }
  return status;
}

}  // namespace muster
