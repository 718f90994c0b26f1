#ifndef MUSTER_RPC_FRAME_BYTES_H_
#define MUSTER_RPC_FRAME_BYTES_H_

#include <grpcpp/support/byte_buffer.h>

#include "rpc/session/outbox.h"

namespace muster::rpc {

// Converts a frame to gRPC's form. Large pieces are referred to until gRPC has sent them.
// Thread-safe.
grpc::ByteBuffer ToByteBuffer(const FrameBytes& frame);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_FRAME_BYTES_H_
