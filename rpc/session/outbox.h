#ifndef MUSTER_RPC_SESSION_OUTBOX_H_
#define MUSTER_RPC_SESSION_OUTBOX_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/session/answer.h"

namespace muster::rpc {

// A piece of a v1::CoordinatorFrame to send; a frame is its pieces in order. Copies share the
// bytes.
struct FramePiece {
  std::shared_ptr<const void> owner;  // owns `bytes`
  absl::string_view bytes;
};
using FrameBytes = std::vector<FramePiece>;

// The messages for an agent, in order, as frames that can be resent on another stream until the
// agent has acknowledged them. Results that wait are merged into one frame of at most 1 MiB, unless
// a single one is larger. An answer is copied (or, if large, referred to) as the bytes it already
// has.
//
// Not thread-safe. Frames are written by hand in protobuf's wire format: CoordinatorFrame{seq = 1,
// ack = 2, results = 4 {results = 1 {op_id = 1, rest of the answer}}, directive = 5}.
class Outbox {
 public:
  void AddResult(uint64_t op_id, std::shared_ptr<const Answer> answer);
  void AddDirective(std::shared_ptr<const v1::Directive> directive);
  // Adds a frame without seq, sent before all others and only once: Welcome, Goodbye.
  void AddFirst(const v1::CoordinatorFrame& frame);
  // Sends an acknowledgement even if there is nothing else to send.
  void AckSoon() { ack_wanted_ = true; }
  // Does the same even if nothing new is acknowledged: the agent checks that its server is alive.
  void AckAgain() { ack_again_ = true; }

  // Sets the last frame received from the agent; it is sent with every frame.
  void set_received(uint64_t seq) { received_ = seq; }
  uint64_t received() const { return received_; }

  // The agent has received everything up to `seq`.
  void Acknowledged(uint64_t seq);
  // Begins a new stream, on which everything after `seq` is sent again. Returns false if frames
  // after `seq` were already dropped or never existed, so that the session cannot continue.
  bool Resume(uint64_t seq);

  bool HasWork() const {
    return !first_.empty() || resend_ < unacked_.size() || !pending_.empty() || ack_again_ ||
           (ack_wanted_ && received_ > told_);
  }
  // Returns the next frame. Requires HasWork().
  FrameBytes Next();

  size_t unacknowledged() const { return unacked_.size(); }
  size_t pending() const { return pending_.size(); }
  // About how many bytes are kept that the agent has not acknowledged, sent or not; shared answers
  // count in full.
  size_t bytes() const { return pending_bytes_ + unacked_bytes_; }
  // How many of these bytes this stream has not been given.
  size_t unsent_bytes() const { return pending_bytes_ + resend_bytes_; }

 private:
  struct Item {
    uint64_t op_id = 0;
    size_t bytes = 0;                      // serialised
    std::shared_ptr<const Answer> answer;  // or
    std::shared_ptr<const v1::Directive> directive;
  };
  struct Sent {
    uint64_t seq;
    size_t bytes;
    FrameBytes frame;
  };

  // first_ and pending_ are vectors, because a deque takes 600 bytes even when it is empty, and
  // there is an outbox per agent.
  std::vector<FrameBytes> first_;
  std::deque<Sent> unacked_;  // by seq
  size_t resend_ = 0;         // in unacked_, the first frame that this stream has not been given
  std::vector<Item> pending_;
  size_t pending_bytes_ = 0;
  size_t unacked_bytes_ = 0;
  size_t resend_bytes_ = 0;  // bytes of unacked_ from resend_ on
  uint64_t next_seq_ = 1;
  uint64_t received_ = 0;
  uint64_t told_ = 0;  // the last received_ that was sent
  bool ack_wanted_ = false;
  bool ack_again_ = false;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_OUTBOX_H_
