#include "worker/collective/peer_watch.h"

#include <exception>
#include <utility>

#include "ATen/ops/from_blob.h"
#include "absl/time/time.h"
#include "base/text.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "worker/collective/on_all.h"

namespace muster {
namespace {

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// One that waits for a message that is complete is through with it by then. There is no other way
// to tell it from one that never will be: Gloo has no poll, and a wait that is late closes all
// connections.
constexpr std::chrono::milliseconds kComplete{20};

}  // namespace

PeerWatch::Message::Message() = default;

PeerWatch::Message::Message(Message&& other) noexcept { *this = std::move(other); }

PeerWatch::Message& PeerWatch::Message::operator=(Message&& other) noexcept {
  if (this == &other) return *this;
  std::swap(watch_, other.watch_);
  std::swap(peer_, other.peer_);
  std::swap(work_, other.work_);
  std::swap(place_, other.place_);
  return *this;
}

PeerWatch::Message::~Message() {
  if (watch_ == nullptr) return;
  MutexLock lock(&watch_->mu_);
  watch_->under_way_.erase(place_);
}

PeerWatch::PeerWatch(const c10::intrusive_ptr<c10d::Backend>& gloo, const std::vector<int>& peers,
                     int tag) {
  try {
    for (const int rank : peers) {
      const auto [place, is_new] = peers_.try_emplace(rank);
      if (!is_new) continue;
      Peer& peer = place->second;
      std::vector<at::Tensor> tensors = {at::from_blob(&peer.nothing, {1}, at::kByte)};
      peer.never = gloo->recv(tensors, rank, tag);
    }
    for (auto& [rank, peer] : peers_) {
      peer.thread = std::thread([this, rank = rank, peer = &peer] { Watch(rank, peer); });
    }
  } catch (...) {
    Release();
    throw;
  }
}

PeerWatch::~PeerWatch() { Release(); }

void PeerWatch::Abort() {
  MutexLock lock(&mu_);
  aborted_ = true;
  for (auto& [rank, peer] : peers_) {
    if (peer.never != nullptr) peer.never->abort();
  }
}

void PeerWatch::Release() {
  Abort();
  {
    MutexLock lock(&mu_);
    released_ = true;
    changed_.SignalAll();
  }
  for (auto& [rank, peer] : peers_) {
    if (peer.thread.joinable()) peer.thread.join();
  }
  MutexLock lock(&mu_);
  for (auto& [rank, peer] : peers_) peer.never.reset();
}

void PeerWatch::Watch(int rank, Peer* peer) {
  std::string error;
  try {
    peer->never->wait(kForever);
  } catch (...) {
    error = std::string(FirstLine(TextOf(std::current_exception())));
  }
  MutexLock lock(&mu_);
  if (!aborted_) peer->loss = error;
  ++ending_;
  changed_.SignalAll();
  while (!released_) {
    const auto now = std::chrono::steady_clock::now();
    bool is_waited_for = false;
    for (Registered& message : under_way_) {
      if (message.peer != rank || !message.waited_for_since.has_value()) continue;
      is_waited_for = true;
      if (now - *message.waited_for_since < kComplete) continue;
      // Once for each look: the next one may have begun.
      message.work->abort();
      message.waited_for_since.reset();
    }
    changed_.WaitWithTimeout(
        &mu_, is_waited_for ? absl::FromChrono(kComplete) : absl::InfiniteDuration());
  }
}

PeerWatch::Message PeerWatch::Add(int peer, c10::intrusive_ptr<c10d::Work> work) {
  Message message;
  message.peer_ = peer;
  message.work_ = std::move(work);
  MutexLock lock(&mu_);
  message.place_ = under_way_.insert(under_way_.end(), {peer, message.work_.get(), std::nullopt});
  message.watch_ = this;
  return message;
}

void PeerWatch::Wait(Message* message, std::chrono::milliseconds timeout) {
  const Message taken = std::move(*message);
  // A thread that did not run for kComplete takes one that is complete for aborted; not twice.
  for (int look = 0; look < 2; ++look) {
    {
      MutexLock lock(&mu_);
      taken.place_->waited_for_since = std::chrono::steady_clock::now();
      if (ending_ > 0) changed_.SignalAll();
    }
    if (taken.work_->wait(timeout)) return;
  }
  const std::optional<std::string> loss = LossOf(taken.peer_, std::chrono::milliseconds(0));
  TORCH_CHECK(!loss.has_value(), "the connection to rank ", taken.peer_, " is lost: ", *loss);
  TORCH_CHECK(false, "the operation was aborted");
}

std::optional<std::string> PeerWatch::LossOf(int peer, std::chrono::milliseconds patience) const {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(&mu_);
  const std::optional<std::string>& loss = peers_.at(peer).loss;
  while (!loss.has_value()) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0) break;
    changed_.WaitWithTimeout(&mu_, absl::FromChrono(left));
  }
  return loss;
}

}  // namespace muster
