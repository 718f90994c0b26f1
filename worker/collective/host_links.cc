#include "worker/collective/host_links.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "ATen/ops/from_blob.h"
#include "base/text.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "worker/collective/on_all.h"

namespace muster {
namespace {

// These tags come after those of collectives.
constexpr int kReasonTag = HostLinks::kFirstTag + HostLinks::kTags;
constexpr int kNeverTag = kReasonTag + 1;
constexpr int kWatchTag = kReasonTag + 2;
// How long a rank that gives up waits until its reason has been sent.
constexpr std::chrono::milliseconds kFarewell{200};
// How long to wait for the thread that is about to report a lost connection.
constexpr std::chrono::seconds kPatience{5};

std::vector<at::Tensor> Bytes(const void* data, int64_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {bytes}, at::kByte)};
}

// Returns the error that `body` throws; empty if it throws none.
template <class Body>
std::string ErrorOf(Body body) {
  try {
    body();
    return "";
  } catch (...) {
    return std::string(FirstLine(TextOf(std::current_exception())));
  }
}

}  // namespace

HostLinks::HostLinks(c10::intrusive_ptr<c10d::Backend> gloo, int rank, std::vector<int> peers)
    : gloo_(std::move(gloo)),
      rank_(rank),
      peers_(std::move(peers)),
      watch_(gloo_, peers_, kWatchTag) {
  for (const int peer : peers_) {
    std::vector<char>& reason = reasons_[peer];
    reason.resize(kReasonBytes);
    std::vector<at::Tensor> tensors = Bytes(reason.data(), kReasonBytes);
    reasons_to_come_.push_back(gloo_->recv(tensors, peer, kReasonTag));
  }
}

HostLinks::~HostLinks() = default;

template <class Start>
HostLinks::Message HostLinks::Begin(int peer, const void* data, int64_t bytes,
                                    const std::string& what, Start start) {
  if (bytes == 0) return Message();
  std::vector<at::Tensor> tensors = Bytes(data, bytes);
  c10::intrusive_ptr<c10d::Work> work;
  const std::string error = ErrorOf([&] { work = start(tensors); });
  if (!error.empty()) Fail(peer, /*late=*/false, error, what);
  return watch_.Add(peer, std::move(work));
}

HostLinks::Message HostLinks::Send(int peer, int tag, const void* data, int64_t bytes,
                                   const std::string& what) {
  return Begin(peer, data, bytes, what, [&](std::vector<at::Tensor>& tensors) {
    return gloo_->send(tensors, peer, kFirstTag + tag);
  });
}

HostLinks::Message HostLinks::Receive(int peer, int tag, void* data, int64_t bytes,
                                      const std::string& what) {
  return Begin(peer, data, bytes, what, [&](std::vector<at::Tensor>& tensors) {
    return gloo_->recv(tensors, peer, kFirstTag + tag);
  });
}

void HostLinks::Wait(Message& message, std::chrono::steady_clock::time_point deadline,
                     const std::string& what) {
  if (!message) return;
  // At least 1, because 0 means Gloo's own timeout.
  const auto left = std::max(
      std::chrono::milliseconds(1),
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()));
  const int peer = message.peer();
  const std::string error = ErrorOf([&] { watch_.Wait(&message, left); });
  if (error.empty()) return;
  Fail(peer, std::chrono::steady_clock::now() >= deadline, error, what);
}

void HostLinks::Fail(int peer, bool late, const std::string& error, const std::string& what) {
  ThrowIfBroken(what);
  std::string why;
  // If a lost connection has ended the message, the reason has arrived.
  if (watch_.LossOf(peer, kPatience).has_value()) {
    const std::vector<char>& reason = reasons_.at(peer);
    why = std::string(reason.data(), strnlen(reason.data(), reason.size()));
  }
  if (why.empty()) {
    why = c10::str("rank ", peer, " on another host");
    why += late ? ", or one that it waits for, did not arrive in time"
                : c10::str(" has died or has left the group (", error, ")");
  }
  C10_THROW_ERROR(DistBackendError, c10::str(what, " on rank ", rank_, ": ", why));
}

void HostLinks::ThrowIfBroken(const std::string& what) const {
  MutexLock lock(&mu_);
  if (broken_.empty()) return;
  C10_THROW_ERROR(DistBackendError, c10::str(what, " on rank ", rank_, ": ", broken_));
}

void HostLinks::Break(const std::string& why) {
  {
    MutexLock lock(&mu_);
    if (!broken_.empty()) return;
    broken_ = why;
  }
  std::vector<char> reason(kReasonBytes, '\0');
  std::memcpy(reason.data(), why.data(), std::min<size_t>(why.size(), kReasonBytes - 1));
  std::vector<c10::intrusive_ptr<c10d::Work>> farewells;
  std::vector<at::Tensor> tensors = Bytes(reason.data(), kReasonBytes);
  for (const int peer : peers_) {
    // A peer that is gone needs no reason.
    (void)ErrorOf([&] { farewells.push_back(gloo_->send(tensors, peer, kReasonTag)); });
  }
  for (const auto& farewell : farewells) (void)ErrorOf([&] { farewell->wait(kFarewell); });
  // Gloo closes all connections of a rank when an operation of it times out, which is the only way
  // to end what other ranks wait for.
  char nothing = 0;
  std::vector<at::Tensor> never = Bytes(&nothing, 1);
  for (const int peer : peers_) {
    (void)ErrorOf([&] { gloo_->recv(never, peer, kNeverTag)->wait(std::chrono::milliseconds(1)); });
  }
}

}  // namespace muster
