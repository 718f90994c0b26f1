#include "rpc/frame_bytes.h"

#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace muster::rpc {
namespace {

// Up to this size a frame is copied into one piece, which is cheaper than sending several.
constexpr size_t kCopyBytes = 8 << 10;

// Keeps a shared answer alive until gRPC has sent it. gRPC's threads are not instrumented: the
// atomic shows ThreadSanitizer that they come after.
struct SliceOwner {
  explicit SliceOwner(std::shared_ptr<const void> bytes) : owner(std::move(bytes)), made(true) {}
  static void Delete(void* self) {
    auto* slice = static_cast<SliceOwner*>(self);
    if (slice->made.load(std::memory_order_acquire)) delete slice;
  }
  const std::shared_ptr<const void> owner;
  std::atomic<bool> made;
};

}  // namespace

grpc::ByteBuffer ToByteBuffer(const FrameBytes& frame) {
  size_t total = 0;
  for (const FramePiece& piece : frame) total += piece.bytes.size();
  if (total <= kCopyBytes) {
    grpc::Slice slice(total);
    // A slice is read-only for its users, but this one is new and not shared yet.
    auto* out = const_cast<uint8_t*>(slice.begin());
    for (const FramePiece& piece : frame) {
      std::memcpy(out, piece.bytes.data(), piece.bytes.size());
      out += piece.bytes.size();
    }
    return grpc::ByteBuffer(&slice, 1);
  }
  std::vector<grpc::Slice> slices;
  slices.reserve(frame.size());
  for (const FramePiece& piece : frame) {
    slices.emplace_back(const_cast<char*>(piece.bytes.data()), piece.bytes.size(),
                        SliceOwner::Delete, new SliceOwner(piece.owner));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace muster::rpc
