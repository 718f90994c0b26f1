#include "rpc/session/outbox.h"

namespace muster::rpc {
namespace {

// A frame stays below the message limit of 4 MiB unless a single result is larger.
constexpr size_t kFrameBytes = 1 << 20;
// Below this a copy is cheaper than a reference.
constexpr size_t kShareBytes = 2048;

void PutVarint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

size_t VarintBytes(uint64_t value) {
  size_t bytes = 1;
  while (value >= 0x80) {
    value >>= 7;
    ++bytes;
  }
  return bytes;
}

FramePiece Own(std::string text) {
  auto owner = std::make_shared<const std::string>(std::move(text));
  const absl::string_view bytes = *owner;
  return {std::move(owner), bytes};
}

}  // namespace

void Outbox::AddResult(uint64_t op_id, std::shared_ptr<const Answer> answer) {
  const size_t bytes = answer->bytes().size();
  pending_bytes_ += bytes;
  pending_.push_back(
      {.op_id = op_id, .bytes = bytes, .answer = std::move(answer), .directive = nullptr});
}

void Outbox::AddDirective(std::shared_ptr<const v1::Directive> directive) {
  const size_t bytes = directive->ByteSizeLong();
  pending_bytes_ += bytes;
  pending_.push_back(
      {.op_id = 0, .bytes = bytes, .answer = nullptr, .directive = std::move(directive)});
}

void Outbox::AddFirst(const v1::CoordinatorFrame& frame) {
  first_.push_back({Own(frame.SerializeAsString())});
}

void Outbox::Acknowledged(uint64_t seq) {
  while (!unacked_.empty() && unacked_.front().seq <= seq) {
    unacked_bytes_ -= unacked_.front().bytes;
    if (resend_ > 0) {
      --resend_;
    } else {
      resend_bytes_ -= unacked_.front().bytes;
    }
    unacked_.pop_front();
  }
}

bool Outbox::Resume(uint64_t seq) {
  const uint64_t oldest = unacked_.empty() ? next_seq_ : unacked_.front().seq;
  if (seq >= next_seq_ || seq + 1 < oldest) return false;
  first_.clear();
  Acknowledged(seq);
  resend_ = 0;
  resend_bytes_ = unacked_bytes_;
  told_ = 0;
  return true;
}

FrameBytes Outbox::Next() {
  if (!first_.empty()) {
    FrameBytes frame = std::move(first_.front());
    first_.erase(first_.begin());
    return frame;
  }
  if (resend_ < unacked_.size()) {
    const Sent& again = unacked_[resend_++];
    resend_bytes_ -= again.bytes;
    return again.frame;
  }

  std::string head;
  told_ = received_;
  ack_wanted_ = ack_again_ = false;
  if (pending_.empty()) {  // only an acknowledgement: no seq, it is not repeated
    head.push_back(0x10);
    PutVarint(head, received_);
    return {Own(std::move(head))};
  }
  const uint64_t seq = next_seq_++;
  head.push_back(0x08);
  PutVarint(head, seq);
  if (received_ > 0) {
    head.push_back(0x10);
    PutVarint(head, received_);
  }
  FrameBytes frame;
  size_t frame_bytes = 0;
  if (pending_.front().directive != nullptr) {
    const std::string directive = pending_.front().directive->SerializeAsString();
    frame_bytes = pending_.front().bytes;
    pending_.erase(pending_.begin());
    head.push_back(0x2A);
    PutVarint(head, directive.size());
    head += directive;
    frame.push_back(Own(std::move(head)));
  } else {
    // Two passes: the batch's length precedes its results.
    std::vector<size_t> result_bytes;
    size_t batch_bytes = 0;
    for (const Item& item : pending_) {
      const size_t result = 1 + VarintBytes(item.op_id) + item.bytes;
      const size_t entry = 1 + VarintBytes(result) + result;
      if (item.answer == nullptr || (batch_bytes > 0 && batch_bytes + entry > kFrameBytes)) break;
      batch_bytes += entry;
      frame_bytes += item.bytes;
      result_bytes.push_back(result);
    }
    head.push_back(0x22);
    PutVarint(head, batch_bytes);
    for (size_t i = 0; i < result_bytes.size(); ++i) {
      Item& item = pending_[i];
      head.push_back(0x0A);
      PutVarint(head, result_bytes[i]);
      head.push_back(0x08);
      PutVarint(head, item.op_id);
      if (item.answer->bytes().size() < kShareBytes) {
        head += item.answer->bytes();
      } else {
        frame.push_back(Own(std::exchange(head, std::string())));
        const absl::string_view bytes = item.answer->bytes();
        frame.push_back({std::move(item.answer), bytes});
      }
    }
    pending_.erase(pending_.begin(), pending_.begin() + result_bytes.size());
    if (!head.empty()) frame.push_back(Own(std::move(head)));
  }
  pending_bytes_ -= frame_bytes;
  unacked_bytes_ += frame_bytes;
  unacked_.push_back({.seq = seq, .bytes = frame_bytes, .frame = frame});
  resend_ = unacked_.size();
  return frame;
}

}  // namespace muster::rpc
