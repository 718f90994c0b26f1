#ifndef MUSTER_AGENT_FAKE_INCOMING_STREAM_H_
#define MUSTER_AGENT_FAKE_INCOMING_STREAM_H_

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/incoming_stream.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// The hub's end of a stream whose agent is played by the test. A written frame stays in flight
// until the test takes it.
struct FakeIncomingStream final : public IncomingStream {
  void Write(rpc::FrameBytes frame) override {
    EXPECT_FALSE(in_flight.has_value()) << "two writes in flight";
    EXPECT_FALSE(status.has_value()) << "a write after the end";
    std::string bytes;
    for (const rpc::FramePiece& piece : frame) bytes.append(piece.bytes.data(), piece.bytes.size());
    EXPECT_TRUE(in_flight.emplace().ParseFromString(bytes));
  }
  void Read() override {
    EXPECT_FALSE(reading) << "two reads in flight";
    reading = true;
  }
  void Close(const absl::Status& why) override {
    EXPECT_FALSE(status.has_value()) << "closed twice";
    status = why;
  }

  std::optional<v1::CoordinatorFrame> in_flight;
  std::optional<absl::Status> status;  // the hub asked for the end
  bool reading = true;                 // the hub is ready for the next frame
};

// Sends frames on one stream after the other, as an agent does.
class FakeHubAgent {
 public:
  FakeHubAgent(IncomingStreamEvents* hub, std::string node) : hub_(hub), node_(std::move(node)) {}

  // Opens a stream; a stream that was open before is left as it is.
  void Open() {
    incoming_ = std::make_shared<FakeIncomingStream>();
    v1::AgentFrame frame;
    v1::Hello& hello = *frame.mutable_hello();
    hello.set_protocol_min(1);
    hello.set_protocol_max(1);
    hello.set_node(node_);
    hello.set_host(node_ + "-host");
    hello.set_agent_incarnation(incarnation);
    hello.set_session_id(session);
    hello.set_last_received_seq(received);
    Send(frame);
  }
  void Send(const v1::AgentFrame& frame) {
    EXPECT_TRUE(incoming_->reading) << "a frame that the hub did not read";
    incoming_->reading = false;
    hub_->OnFrame(incoming_, frame, frame.ByteSizeLong());
  }
  // Sends an operation in its own frame.
  void Op(v1::Op op) {
    v1::AgentFrame frame;
    frame.set_seq(++seq);
    frame.set_ack(received);
    *frame.mutable_ops()->add_ops() = std::move(op);
    Send(frame);
  }
  void Beat(v1::Beat beat) {
    v1::AgentFrame frame;
    frame.set_ack(received);
    *frame.mutable_beat() = std::move(beat);
    Send(frame);
  }
  // Returns what the hub has written, until it has nothing more.
  std::vector<v1::CoordinatorFrame> Take() {
    std::vector<v1::CoordinatorFrame> frames;
    while (incoming_->in_flight.has_value()) {
      frames.push_back(*std::exchange(incoming_->in_flight, std::nullopt));
      if (frames.back().has_welcome()) {
        if (session != frames.back().welcome().session_id()) seq = received = 0;
        session = frames.back().welcome().session_id();
      }
      if (frames.back().seq() != 0) {
        EXPECT_EQ(frames.back().seq(), received + 1);
        received = frames.back().seq();
      }
      hub_->OnWritten(incoming_);
    }
    return frames;
  }
  // The stream breaks, or ends because the hub asked for it.
  void Close() { hub_->OnClosed(incoming_); }
  FakeIncomingStream& incoming() { return *incoming_; }

  uint64_t incarnation = 77;
  std::string session;
  uint64_t seq = 0;
  uint64_t received = 0;

 private:
  IncomingStreamEvents* const hub_;
  const std::string node_;
  std::shared_ptr<FakeIncomingStream> incoming_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_INCOMING_STREAM_H_
