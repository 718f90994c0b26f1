#include "rpc/frame_bytes.h"

#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::rpc {
namespace {

TEST(FrameBytes, ToByteBuffer_IsThePiecesInOrderAndKeepsLargeOnesAlive) {
  for (const size_t size : {size_t{1}, size_t{100'000}}) {
    FrameBytes frame;
    std::string wanted;
    for (const char letter : {'a', 'b', 'c'}) {
      const auto piece = std::make_shared<const std::string>(size, letter);
      frame.push_back({piece, absl::string_view(*piece)});
      wanted += *piece;
    }
    const std::weak_ptr<const void> owner = frame[1].owner;
    {
      const grpc::ByteBuffer buffer = ToByteBuffer(frame);
      frame.clear();
      std::vector<grpc::Slice> slices;
      ASSERT_TRUE(buffer.Dump(&slices).ok());
      std::string found;
      for (const grpc::Slice& slice : slices)
        found.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      EXPECT_EQ(found, wanted);
    }
    EXPECT_TRUE(owner.expired());
  }
}

}  // namespace
}  // namespace muster::rpc
