#include "worker/collective/peer_watch.h"

#include <algorithm>
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
// How long a thread may wait for a message whose peer is lost. A wait for a complete message
// returns within this time. There is no other way to distinguish that from a message that will
// never be complete: Gloo has no poll for messages, and a wait that times out closes all
// connections.
constexpr std::chrono::milliseconds kComplete{20};
constexpr std::chrono::milliseconds kBetweenLooks{50};

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
  {
    MutexLock lock(&mu_);
    for (const int rank : peers) {
      const auto [place, is_new] = peers_.try_emplace(rank);
      if (!is_new) continue;
      Peer& peer = place->second;
      std::vector<at::Tensor> tensors = {at::from_blob(&peer.nothing, {1}, at::kByte)};
      try {
        peer.never = gloo->recv(tensors, rank, tag);
      } catch (...) {
        // The peer has left already, perhaps after everything that it had to send and to receive.
        Lose(&peer);
      }
    }
  }
  if (!peers.empty()) thread_ = std::thread([this] { Run(); });
}

PeerWatch::~PeerWatch() { Release(); }

void PeerWatch::Abort() {
  MutexLock lock(&mu_);
  aborted_ = true;
  ending_ = true;
  changed_.SignalAll();
}

void PeerWatch::Release() {
  Abort();
  {
    MutexLock lock(&mu_);
    released_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  MutexLock lock(&mu_);
  for (auto& [rank, peer] : peers_) peer.never.reset();
}

const std::optional<std::string>& PeerWatch::Look(int rank) {
  Peer& peer = peers_.at(rank);
  if (peer.loss.has_value() || peer.never == nullptr) return peer.loss;
  try {
    // A wait that is aborted before it begins returns at once: false, or Gloo's error. It takes
    // nothing from a message, since there is none.
    peer.never->abort();
    peer.never->wait(kForever);
  } catch (...) {
    Lose(&peer);
  }
  return peer.loss;
}

void PeerWatch::Lose(Peer* peer) {
  peer->loss = std::string(FirstLine(TextOf(std::current_exception())));
  ending_ = true;
  changed_.SignalAll();
}

void PeerWatch::Run() {
  MutexLock lock(&mu_);
  while (!released_) {
    const auto now = std::chrono::steady_clock::now();
    bool look_again = std::exchange(waited_, false);
    for (Registered& message : under_way_) {
      if (!message.waited_for_since.has_value()) continue;
      look_again = true;
      if (now - *message.waited_for_since < kComplete) continue;
      if (!aborted_ && !Look(message.peer).has_value()) continue;
      // Only once for each look: the next wait may have begun.
      message.work->abort();
      message.waited_for_since.reset();
    }
    asleep_ = !look_again;
    changed_.WaitWithTimeout(&mu_, asleep_ ? absl::InfiniteDuration()
                                           : absl::FromChrono(ending_ ? kComplete : kBetweenLooks));
    asleep_ = false;
  }
}

PeerWatch::Message PeerWatch::Add(int peer, c10::intrusive_ptr<c10d::Work> work) {
  Message message;
  message.peer_ = peer;
  message.work_ = std::move(work);
  MutexLock lock(&mu_);
  TORCH_CHECK(peers_.contains(peer), "rank ", peer, " is not watched");
  message.place_ = under_way_.insert(under_way_.end(), {peer, message.work_.get(), std::nullopt});
  message.watch_ = this;
  return message;
}

void PeerWatch::Wait(Message* message, std::chrono::milliseconds timeout) {
  const Message taken = std::move(*message);
  // If this thread did not run for kComplete, a complete message looks aborted; but not twice.
  for (int look = 0; look < 2; ++look) {
    {
      MutexLock lock(&mu_);
      taken.place_->waited_for_since = std::chrono::steady_clock::now();
      waited_ = true;
      if (std::exchange(asleep_, false)) changed_.SignalAll();
    }
    if (taken.work_->wait(timeout)) return;
  }
  const std::optional<std::string> loss = LossOf(taken.peer_, std::chrono::milliseconds(0));
  TORCH_CHECK(!loss.has_value(), "the connection to rank ", taken.peer_, " is lost: ", *loss);
  TORCH_CHECK(false, "the operation was aborted");
}

std::optional<std::string> PeerWatch::LossOf(int peer, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(&mu_);
  while (!Look(peer).has_value()) {
    const std::chrono::nanoseconds left = deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0) break;
    changed_.WaitWithTimeout(&mu_,
                             absl::FromChrono(std::min<std::chrono::nanoseconds>(left, kComplete)));
  }
  return peers_.at(peer).loss;
}

}  // namespace muster
