#include "tests/simulation/agent_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster::simulation {
namespace {
constexpr int kOpsInFrame = 16;
}  // namespace

AgentClient::AgentClient(std::string node, uint64_t incarnation, bool eager)
    : node_(std::move(node)), incarnation_(incarnation), eager_(eager) {}

uint64_t AgentClient::Submit(const v1::Op& op) {
  const uint64_t id = next_op_++;
  v1::Op& kept = pending_[id] = op;
  kept.set_op_id(id);
  queue_.push_back(id);
  return id;
}

uint64_t AgentClient::SubmitFirst(const v1::Op& op) {
  const uint64_t id = Submit(op);
  queue_.pop_back();
  queue_.push_front(id);
  first_.insert(id);
  return id;
}

void AgentClient::Forget(uint64_t op_id) {
  pending_.erase(op_id);
  first_.erase(op_id);
  queue_.erase(std::remove(queue_.begin(), queue_.end(), op_id), queue_.end());
}

v1::AgentFrame AgentClient::Hello(const std::string& hub_address, const std::string& failed_hub) {
  v1::AgentFrame frame;
  v1::Hello* hello = frame.mutable_hello();
  hello->set_protocol_min(1);
  hello->set_protocol_max(1);
  hello->set_node(node_);
  hello->set_host(node_);
  hello->set_agent_incarnation(incarnation_);
  hello->set_last_received_seq(received_);
  hello->set_session_id(session_id_);
  hello->set_term_seen(term_);
  hello->set_cluster_id(cluster_id_);
  hello->add_features("hub");
  hello->set_hub_address(hub_address);
  hello->set_failed_hub(failed_hub);
  return frame;
}

AgentClient::Received AgentClient::OnFrame(const v1::CoordinatorFrame& frame) {
  Received received;
  if (frame.has_welcome()) {
    const v1::Welcome& welcome = frame.welcome();
    welcomed_ = true;
    coordinator_away_ = false;
    resend_ = 0;
    if (welcome.session_id() != session_id_) {
      session_id_ = welcome.session_id();
      ++sessions_;
      received_ = 0;
      next_seq_ = welcome.last_received_seq() + 1;
      unacked_.clear();
      queue_.clear();
      for (const bool first : {true, false}) {
        for (const auto& [id, op] : pending_) {
          if (first_.contains(id) == first) queue_.push_back(id);
        }
      }
    } else if (!eager_) {
      while (!unacked_.empty() && unacked_.front().seq() <= welcome.last_received_seq())
        unacked_.pop_front();
    }
    received.new_term = term_ != 0 && welcome.term() > term_;
    if (welcome.term() < term_) {
      received.violation = absl::StrCat("term ", welcome.term(), " came after term ", term_);
    }
    term_ = std::max(term_, welcome.term());
    cluster_id_ = welcome.cluster_id();
    return received;
  }
  if (!welcomed_) {
    received.violation = "a stream did not begin with a welcome";
    return received;
  }
  if (frame.has_hub_state()) {
    coordinator_away_ = frame.hub_state().coordinator_away();
    return received;
  }
  while (!unacked_.empty() && unacked_.front().seq() <= frame.ack()) {
    unacked_.pop_front();
    if (resend_ > 0) --resend_;
  }
  if (frame.seq() == 0) return received;
  if (frame.seq() <= received_) return received;  // had it on an earlier stream
  if (frame.seq() != received_ + 1) {
    received.violation =
        absl::StrCat("frame ", frame.seq(), " of the coordinator came after ", received_);
  }
  received_ = frame.seq();
  for (const v1::OpResult& result : frame.results().results()) {
    // The result of an op that was sent in two sessions may come in both.
    if (pending_.erase(result.op_id()) == 0) continue;
    first_.erase(result.op_id());
    queue_.erase(std::remove(queue_.begin(), queue_.end(), result.op_id()), queue_.end());
    received.results.push_back(result);
  }
  if (frame.has_directive()) received.directives.push_back(frame.directive());
  return received;
}

std::vector<v1::AgentFrame> AgentClient::TakeFrames() {
  std::vector<v1::AgentFrame> frames;
  if (!welcomed_ || coordinator_away_) return frames;
  for (; resend_ < unacked_.size(); ++resend_) frames.push_back(unacked_[resend_]);
  const auto add = [&](v1::AgentFrame frame) {
    frame.set_seq(next_seq_++);
    unacked_.push_back(std::move(frame));
    resend_ = unacked_.size();
    frames.push_back(unacked_.back());
  };
  while (!queue_.empty()) {
    v1::AgentFrame frame;
    for (int i = 0; i < kOpsInFrame && !queue_.empty(); ++i) {
      *frame.mutable_ops()->add_ops() = pending_.at(queue_.front());
      queue_.pop_front();
    }
    add(std::move(frame));
  }
  for (v1::StackReply& stack : stacks_) {
    v1::AgentFrame frame;
    *frame.mutable_stack() = std::move(stack);
    add(std::move(frame));
  }
  stacks_.clear();
  for (v1::AgentFrame& frame : frames) frame.set_ack(received_);
  return frames;
}

v1::AgentFrame AgentClient::Beat(const v1::Beat& beat) const {
  v1::AgentFrame frame;
  frame.set_ack(received_);
  *frame.mutable_beat() = beat;
  return frame;
}

}  // namespace muster::simulation
