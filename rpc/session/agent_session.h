#ifndef MUSTER_RPC_SESSION_AGENT_SESSION_H_
#define MUSTER_RPC_SESSION_AGENT_SESSION_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/session/outbox.h"

namespace muster::rpc {

// A feature in Welcome.features: the server of the session answers each beat that asks for it.
inline constexpr absl::string_view kAnswersBeats = "answers_beats";

// The serving half of an agent session, the coordinator's or a hub's: the state of one agent
// process across its streams, so that every frame with a seq takes effect at most once and every
// result arrives, however often the stream breaks.
//
// The rules both halves keep:
// - Frames with a seq are numbered 1, 2, ... by their sender within the session, kept until they
//   are acknowledged, and sent again, in order, on the next stream. A frame whose seq is not above
//   the last one received is dropped. Frames without a seq (hello, welcome, beats, bare
//   acknowledgements) are sent once.
// - Hello and Welcome say where the other side must resume sending, and name the session whose
//   frames they count. If Welcome names another session than the agent was in, nothing is left of
//   the old one. The agent then counts the coordinator's frames from 0 again, and resends every
//   operation without a result in new frames; the request_id and the barrier's counter, not this
//   class, decide whether it was applied before.
//
// Not thread-safe; pure: used by servers and by tests/simulation.
class AgentSession {
 public:
  AgentSession(std::string node, uint64_t incarnation, std::string id);

  const std::string& node() const { return node_; }
  const std::string& id() const { return id_; }
  Outbox& outbox() { return outbox_; }

  // The agent has opened another stream: the frames that it has not acknowledged are sent again.
  // Returns false if the session cannot continue, because this is another process of the agent, or
  // it asks for frames that are no longer kept or never existed: end this session and begin a new
  // one.
  bool Resume(const v1::Hello& hello);
  // Queues the first frame of a stream, which goes out before all others.
  void Welcome(uint32_t protocol, uint64_t term, absl::string_view cluster_id,
               absl::Duration lease);
  // Returns false if frames before this one are missing, which no correct agent can cause: end the
  // stream.
  bool Follows(const v1::AgentFrame& frame) const { return frame.seq() <= received_ + 1; }
  // Receives a frame other than hello that Follows(). Returns true if it must be applied, false if
  // it was applied when it arrived on an earlier stream.
  bool Receive(const v1::AgentFrame& frame);

 private:
  const std::string node_;
  const uint64_t incarnation_;
  const std::string id_;
  uint64_t received_ = 0;
  int frames_since_ack_ = 0;
  Outbox outbox_;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_AGENT_SESSION_H_
