#ifndef MUSTER_COORDINATOR_SERVICE_ATTACHED_AGENT_H_
#define MUSTER_COORDINATOR_SERVICE_ATTACHED_AGENT_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "coordinator/answer.h"
#include "coordinator/service/agent_stream.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/session/agent_session.h"

namespace muster::coordinator {

// An agent with a session: its pending frames, its current stream if any, and its open calls.
struct AttachedAgent final : public FrameSource {
  // If more than `unsent_bytes` of answers are unsent, no frame of the agent is read.
  AttachedAgent(const v1::Hello& hello, std::shared_ptr<const Identity> opened_by,
                size_t unsent_bytes);

  // May be called by any thread.
  void Writable() override;
  // Reads the agent's next frame, since the last one has been dealt with: now, or when the agent
  // has taken its answers. Called in the runner's turn.
  void ReadNext(const std::shared_ptr<AgentStream>& from);

  // For the agent of an attempt, the only rendezvous job that it may refer to; otherwise empty.
  absl::string_view group() const {
    return identity == nullptr ? absl::string_view() : identity->group;
  }

  const std::string node;
  const std::shared_ptr<const Identity> identity;  // null: as in AgentStream::identity
  const size_t pause_bytes;

  // Used in the runner's turn.
  absl::flat_hash_set<CallId> calls;
  size_t held_bytes = 0;  // bytes of the requests of `calls`
  bool dirty = false;
  bool ended = false;
  absl::Time expires = absl::InfiniteFuture();  // while it has no stream

  Mutex mu;
  rpc::AgentSession agent ABSL_GUARDED_BY(mu);
  std::shared_ptr<AgentStream> stream ABSL_GUARDED_BY(mu);
  std::shared_ptr<AgentStream> paused ABSL_GUARDED_BY(mu);  // is read from when there is room again
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_ATTACHED_AGENT_H_
