#ifndef MUSTER_AGENT_FAKE_OUTGOING_STREAM_H_
#define MUSTER_AGENT_FAKE_OUTGOING_STREAM_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/outgoing_stream.h"

namespace muster::agent {

// A stream whose coordinator is played by the test.
struct FakeOutgoingStream final : public OutgoingStream {
  explicit FakeOutgoingStream(std::shared_ptr<OutgoingStreamEvents> to, std::string at = "")
      : events(std::move(to)), hub(std::move(at)) {}
  void Write(v1::AgentFrame frame) override {
    EXPECT_FALSE(writing) << "two writes in flight";
    writing = true;
    written.push_back(std::move(frame));
  }
  void Close() override { closing = true; }
  // Completes the write.
  void Done() {
    ASSERT_TRUE(writing);
    writing = false;
    events->OnWritten();
  }
  // Completes all writes, including those that follow from each other.
  void Drain() {
    while (writing) Done();
  }

  const std::shared_ptr<OutgoingStreamEvents> events;
  const std::string hub;  // the hub to which it was opened; empty: the coordinator
  std::vector<v1::AgentFrame> written;
  bool writing = false;
  bool closing = false;  // the client asked for the end
  bool closed = false;   // set by the test
};

struct FakeStreamOpener final : public StreamOpener {
  absl::StatusOr<std::shared_ptr<OutgoingStream>> Open(
      const std::string& hub, std::shared_ptr<OutgoingStreamEvents> events) override {
    if (hub == refuses) return absl::InvalidArgumentError("it is not for us");
    streams.push_back(std::make_shared<FakeOutgoingStream>(std::move(events), hub));
    return streams.back();
  }
  void Reconnect() override { ++reconnects; }
  std::vector<std::shared_ptr<FakeOutgoingStream>> streams;
  int reconnects = 0;
  std::string refuses = "-";  // a hub to which Open() returns an error
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_OUTGOING_STREAM_H_
