#include "rpc/session/agent_session.h"

#include <utility>

#include "rpc/session/duration.h"

namespace muster::rpc {
namespace {
// Received frames are acknowledged at least this often.
constexpr int kFramesBetweenAcks = 32;
}  // namespace

AgentSession::AgentSession(std::string node, uint64_t incarnation, std::string id)
    : node_(std::move(node)), incarnation_(incarnation), id_(std::move(id)) {}

bool AgentSession::Resume(const v1::Hello& hello) {
  if (hello.agent_incarnation() != incarnation_) return false;
  if (hello.session_id() == id_) return outbox_.Resume(hello.last_received_seq());
  // An agent that never got the welcome still counts the frames of an earlier session, and has sent
  // nothing in this one. One that has was in another session since (with a hub, say) and numbers
  // its frames from 1 again.
  return received_ == 0 && outbox_.Resume(0);
}

void AgentSession::Welcome(uint32_t protocol, uint64_t term, absl::string_view cluster_id,
                           absl::Duration lease) {
  v1::CoordinatorFrame frame;
  v1::Welcome& welcome = *frame.mutable_welcome();
  welcome.set_protocol(protocol);
  welcome.set_term(term);
  welcome.set_session_id(id_);
  *welcome.mutable_lease() = ToProto(lease);
  welcome.set_last_received_seq(received_);
  welcome.set_cluster_id(std::string(cluster_id));
  welcome.add_features(std::string(kAnswersBeats));
  outbox_.AddFirst(frame);
}

bool AgentSession::Receive(const v1::AgentFrame& frame) {
  outbox_.Acknowledged(frame.ack());
  if (frame.beat().wants_answer()) outbox_.AckAgain();
  if (frame.seq() == 0) {
    outbox_.AckSoon();
    return true;
  }
  if (frame.seq() <= received_) return false;
  received_ = frame.seq();
  outbox_.set_received(received_);
  if (++frames_since_ack_ >= kFramesBetweenAcks || frame.has_beat()) {
    outbox_.AckSoon();
    frames_since_ack_ = 0;
  }
  return true;
}

}  // namespace muster::rpc
