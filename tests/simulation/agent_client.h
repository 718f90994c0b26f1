#ifndef MUSTER_TESTS_SIMULATION_AGENT_CLIENT_H_
#define MUSTER_TESTS_SIMULATION_AGENT_CLIENT_H_

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/muster/v1/session.pb.h"

namespace muster::simulation {

// An agent's half of a session (rpc/session/agent_session.h is the other one), without any
// transport: numbers frames, keeps them until they are acknowledged, drops duplicates, and resends
// every operation without a result when the coordinator has lost the session.
class AgentClient {
 public:
  // `eager`: on a new stream of a session, the client also repeats the frames that the coordinator
  // has had, as an agent may that does not look at the welcome.
  AgentClient(std::string node, uint64_t incarnation, bool eager);

  // Queues an operation. Returns the op_id that its result will carry.
  uint64_t Submit(const v1::Op& op);
  // The same, ahead of all that is queued.
  uint64_t SubmitFirst(const v1::Op& op);
  // Forgets an operation whose caller no longer waits for it: it is not sent in another session.
  void Forget(uint64_t op_id);
  void ReplyStack(v1::StackReply stack) { stacks_.push_back(std::move(stack)); }

  // Returns the first frame of a new stream. Nothing else is sent on it before it was answered.
  v1::AgentFrame Hello(const std::string& hub_address, const std::string& failed_hub);
  void StreamLost() { welcomed_ = false; }
  bool welcomed() const { return welcomed_; }
  uint64_t incarnation() const { return incarnation_; }
  uint64_t term() const { return term_; }
  // Counts the sessions.
  uint64_t sessions() const { return sessions_; }
  const std::string& cluster_id() const { return cluster_id_; }
  // Whether its hub has lost the coordinator: then nothing but beats is sent.
  bool coordinator_away() const { return coordinator_away_; }

  struct Received {
    std::vector<v1::OpResult> results;
    std::vector<v1::Directive> directives;
    bool new_term = false;  // report what was seen (RecallBarriers), by SubmitFirst
    std::string violation;  // what the coordinator must never do
  };
  Received OnFrame(const v1::CoordinatorFrame& frame);

  // Returns what can be sent now, in order.
  std::vector<v1::AgentFrame> TakeFrames();
  v1::AgentFrame Beat(const v1::Beat& beat) const;

 private:
  const std::string node_;
  const uint64_t incarnation_;
  const bool eager_;
  uint64_t next_op_ = 1;
  std::map<uint64_t, v1::Op> pending_;  // without a result, by op_id
  std::deque<uint64_t> queue_;          // of pending_, not yet in a frame of this session
  std::set<uint64_t> first_;            // those of pending_ that go before all others
  std::vector<v1::StackReply> stacks_;
  std::deque<v1::AgentFrame> unacked_;
  size_t resend_ = 0;  // the first of unacked_ not yet sent on this stream
  uint64_t next_seq_ = 1;
  uint64_t received_ = 0;
  bool welcomed_ = false;
  bool coordinator_away_ = false;
  uint64_t sessions_ = 0;
  std::string session_id_;
  uint64_t term_ = 0;
  std::string cluster_id_;
};

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_AGENT_CLIENT_H_
