#ifndef MUSTER_COORDINATOR_SERVICE_AGENT_STREAM_H_
#define MUSTER_COORDINATOR_SERVICE_AGENT_STREAM_H_

#include <grpcpp/support/byte_buffer.h>

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "coordinator/access.h"

namespace muster::coordinator {

// A source of frames to write. Thread-safe.
class FrameSource {
 public:
  virtual ~FrameSource() = default;
  // Hands the stream the next frame, if there is one. Called when the stream has no write in
  // flight.
  virtual void Writable() = 0;
};

// One stream of an agent, as the runner sees it. Thread-safe.
class AgentStream {
 public:
  virtual ~AgentStream() = default;

  // Sets what is called when a write has ended. Called once.
  virtual void Bind(std::shared_ptr<FrameSource> source) = 0;

  // If the stream is open and no write is in flight, asks `next` for a frame and starts to write
  // it. Returns whether `next` was called.
  virtual bool TryWrite(absl::FunctionRef<grpc::ByteBuffer()> next) = 0;

  // Reads the next frame, since the one that was read last has been dealt with. A stream has at
  // most one frame on its way to the runner, so an agent that sends faster than it is served is
  // slowed down by TCP. Called after the frame's answers were handed to TryWrite. With
  // `answer_follows` more answers are pending: if one arrives before other agents' frames have been
  // handled, the stream sends the agent its new window with it instead of separately.
  virtual void ReadNext(bool answer_follows) = 0;

  // The caller that opened it; null: the process of the coordinator itself.
  virtual std::shared_ptr<const Identity> identity() const { return nullptr; }

  // Ends the stream, once; later calls do nothing.
  virtual void Close(const absl::Status& status) = 0;
  // The same, after writing `last`, which waits for a write that is in flight.
  virtual void CloseAfter(grpc::ByteBuffer last, const absl::Status& status) = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_AGENT_STREAM_H_
