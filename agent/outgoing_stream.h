#ifndef MUSTER_AGENT_OUTGOING_STREAM_H_
#define MUSTER_AGENT_OUTGOING_STREAM_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// What happens on one attempt at a stream to the coordinator or a hub. One call at a time, but
// OnWritten may run concurrently with OnFrame. None comes from within a call of OutgoingStream.
class OutgoingStreamEvents {
 public:
  virtual ~OutgoingStreamEvents() = default;
  // The write is done: the next one may begin.
  virtual void OnWritten() = 0;
  virtual void OnFrame(const v1::CoordinatorFrame& frame) = 0;
  // Last, also of a link that was never connected.
  virtual void OnClosed(const absl::Status& status) = 0;
};

// One attempt at a stream. It connects by itself; what is written before waits. Thread-safe.
class OutgoingStream {
 public:
  virtual ~OutgoingStream() = default;
  // Not while a write is in flight. A link that is closed drops it.
  virtual void Write(v1::AgentFrame frame) = 0;
  // Ends it soon; OnClosed follows, unless it has been called.
  virtual void Close() = 0;
};

// Opens links. Thread-safe.
class StreamOpener {
 public:
  virtual ~StreamOpener() = default;
  // A stream to the hub at `hub`, "10.0.0.2:29500"; empty: to the coordinator. A stream to a hub
  // fails if the hub does not answer at once; one to the coordinator keeps trying to connect.
  // Errors: nothing can be opened there, and no event comes.
  virtual absl::StatusOr<std::shared_ptr<OutgoingStream>> Open(
      const std::string& hub, std::shared_ptr<OutgoingStreamEvents> events) = 0;
  // The connection to the coordinator has gone silent: the next stream there gets a new one. Until
  // the operating system finds it broken, streams on it would only wait.
  virtual void Reconnect() {}
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_OUTGOING_STREAM_H_
