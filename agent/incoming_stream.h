#ifndef MUSTER_AGENT_INCOMING_STREAM_H_
#define MUSTER_AGENT_INCOMING_STREAM_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/session/outbox.h"

namespace muster::agent {

// The hub's end of one stream of an agent. Thread-safe; no event is delivered from within a call.
class IncomingStream {
 public:
  virtual ~IncomingStream() = default;
  // Writes a frame. Must not be called while a write is in flight.
  virtual void Write(rpc::FrameBytes frame) = 0;
  // Asks for the next frame, once the last one has been handled. A stream has at most one frame on
  // its way, so TCP slows down an agent that sends faster than it is served.
  virtual void Read() = 0;
  // Ends the stream. Later calls of any function do nothing.
  virtual void Close(const absl::Status& status) = 0;
};

// Receives the events on the streams of agents to this hub. The events of one stream come one after
// another, but OnWritten may run concurrently with OnFrame.
class IncomingStreamEvents {
 public:
  virtual ~IncomingStreamEvents() = default;
  // `bytes` is the size of the frame. Read follows, unless the stream ends.
  virtual void OnFrame(const std::shared_ptr<IncomingStream>& link, const v1::AgentFrame& frame,
                       size_t bytes) = 0;
  // The last Write has ended.
  virtual void OnWritten(const std::shared_ptr<IncomingStream>& link) = 0;
  // The last event. Once for each stream that had a frame, no matter which side ended it.
  virtual void OnClosed(const std::shared_ptr<IncomingStream>& link) = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_INCOMING_STREAM_H_
