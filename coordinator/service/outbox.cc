#include "coordinator/service/outbox.h"

#include <grpcpp/support/slice.h>

#include <algorithm>

namespace muster::coordinator {
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

grpc::Slice SharedSlice(std::shared_ptr<const Answer> answer) {
  const std::string& bytes = answer->bytes();
  auto* holder = new std::shared_ptr<const Answer>(std::move(answer));
  return grpc::Slice(
      const_cast<char*>(bytes.data()), bytes.size(),
      [](void* data) { delete static_cast<std::shared_ptr<const Answer>*>(data); }, holder);
}

}  // namespace

void Outbox::AddResult(uint64_t op_id, std::shared_ptr<const Answer> answer) {
  pending_.push_back({.op_id = op_id, .answer = std::move(answer), .directive = nullptr});
}

void Outbox::AddDirective(std::shared_ptr<const v1::Directive> directive) {
  pending_.push_back({.op_id = 0, .answer = nullptr, .directive = std::move(directive)});
}

void Outbox::AddFirst(const v1::CoordinatorFrame& frame) {
  const grpc::Slice slice(frame.SerializeAsString());
  first_.emplace_back(&slice, 1);
}

void Outbox::Acknowledged(uint64_t seq) {
  while (!unacked_.empty() && unacked_.front().first <= seq) {
    unacked_.pop_front();
    if (resend_ > 0) --resend_;
  }
}

bool Outbox::Resume(uint64_t seq) {
  const uint64_t oldest = unacked_.empty() ? next_seq_ : unacked_.front().first;
  if (seq >= next_seq_ || seq + 1 < oldest) return false;
  first_.clear();
  Acknowledged(seq);
  resend_ = 0;
  told_ = 0;
  return true;
}

grpc::ByteBuffer Outbox::Next() {
  if (!first_.empty()) {
    grpc::ByteBuffer frame = std::move(first_.front());
    first_.pop_front();
    return frame;
  }
  if (resend_ < unacked_.size()) return unacked_[resend_++].second;

  std::string head;
  told_ = received_;
  ack_wanted_ = false;
  if (pending_.empty()) {  // only an acknowledgement: no seq, it is not repeated
    head.push_back(0x10);
    PutVarint(head, received_);
    const grpc::Slice slice(head);
    return grpc::ByteBuffer(&slice, 1);
  }
  const uint64_t seq = next_seq_++;
  head.push_back(0x08);
  PutVarint(head, seq);
  if (received_ > 0) {
    head.push_back(0x10);
    PutVarint(head, received_);
  }
  std::vector<grpc::Slice> slices;
  if (pending_.front().directive != nullptr) {
    const std::string directive = pending_.front().directive->SerializeAsString();
    pending_.pop_front();
    head.push_back(0x2A);
    PutVarint(head, directive.size());
    head += directive;
    slices.emplace_back(head);
  } else {
    // Two passes: the batch's length stands before its results.
    struct Part {
      std::string own;  // of an answer without bytes
      size_t result_bytes;
    };
    std::vector<Part> parts;
    size_t batch_bytes = 0;
    for (const Item& item : pending_) {
      if (item.answer == nullptr || (batch_bytes > kFrameBytes)) break;
      Part part;
      if (!item.answer->shared()) part.own = item.answer->result().SerializeAsString();
      const size_t body = item.answer->shared() ? item.answer->bytes().size() : part.own.size();
      part.result_bytes = 1 + VarintBytes(item.op_id) + body;
      batch_bytes += 1 + VarintBytes(part.result_bytes) + part.result_bytes;
      parts.push_back(std::move(part));
    }
    head.push_back(0x22);
    PutVarint(head, batch_bytes);
    for (Part& part : parts) {
      Item& item = pending_.front();
      head.push_back(0x0A);
      PutVarint(head, part.result_bytes);
      head.push_back(0x08);
      PutVarint(head, item.op_id);
      if (!item.answer->shared()) {
        head += part.own;
      } else if (item.answer->bytes().size() < kShareBytes) {
        head += item.answer->bytes();
      } else {
        slices.emplace_back(head);
        head.clear();
        slices.push_back(SharedSlice(std::move(item.answer)));
      }
      pending_.pop_front();
    }
    if (!head.empty()) slices.emplace_back(head);
  }
  grpc::ByteBuffer frame(slices.data(), slices.size());
  unacked_.emplace_back(seq, frame);
  resend_ = unacked_.size();
  return frame;
}

}  // namespace muster::coordinator
