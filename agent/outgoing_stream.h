#ifndef MUSTER_AGENT_OUTGOING_STREAM_H_
#define MUSTER_AGENT_OUTGOING_STREAM_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// Receives the events of one attempt at a stream to the coordinator or a hub. One call at a time,
// but OnWritten may run concurrently with OnFrame. None comes from within a call of OutgoingStream.
class OutgoingStreamEvents {
 public:
  virtual ~OutgoingStreamEvents() = default;
  // The write is done: the next one may begin.
  virtual void OnWritten() = 0;
  virtual void OnFrame(const v1::CoordinatorFrame& frame) = 0;
  // The last event, even of a stream that never connected.
  virtual void OnClosed(const absl::Status& status) = 0;
};

// One attempt at a stream. It connects on its own; what is written earlier waits. Thread-safe.
class OutgoingStream {
 public:
  virtual ~OutgoingStream() = default;
  // Must not be called while a write is in flight. A closed stream drops the frame.
  virtual void Write(v1::AgentFrame frame) = 0;
  // Ends the stream soon; OnClosed follows, unless it has been called.
  virtual void Close() = 0;
};

// Opens streams. Thread-safe.
class StreamOpener {
 public:
  virtual ~StreamOpener() = default;
  // Opens a stream to the hub at `hub`, "10.0.0.2:29500"; empty: to the coordinator. A stream to a
  // hub fails if the hub does not answer at once; one to the coordinator keeps trying to connect.
  // On an error nothing can be opened there, and no event comes.
  virtual absl::StatusOr<std::shared_ptr<OutgoingStream>> Open(
      const std::string& hub, std::shared_ptr<OutgoingStreamEvents> events) = 0;
  // The connection to the coordinator has gone silent: the next stream there gets a new one. On the
  // old one, streams would only wait until the operating system finds it broken.
  virtual void Reconnect() {}
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_OUTGOING_STREAM_H_
