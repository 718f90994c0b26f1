#ifndef MUSTER_WORKER_AGENT_FAKE_FRAME_LINK_H_
#define MUSTER_WORKER_AGENT_FAKE_FRAME_LINK_H_

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "worker/agent/frame_link.h"

namespace muster::agent {

// A stream that the test plays the coordinator of.
struct FakeLink final : public FrameLink {
  explicit FakeLink(std::shared_ptr<FrameEvents> to) : events(std::move(to)) {}
  void Write(v1::AgentFrame frame) override {
    EXPECT_FALSE(writing) << "two writes in flight";
    writing = true;
    written.push_back(std::move(frame));
  }
  void Close() override { closing = true; }
  // The write is done.
  void Done() {
    ASSERT_TRUE(writing);
    writing = false;
    events->OnWritten();
  }
  // Lets all writes be done that follow from each other.
  void Drain() {
    while (writing) Done();
  }

  const std::shared_ptr<FrameEvents> events;
  std::vector<v1::AgentFrame> written;
  bool writing = false;
  bool closing = false;  // we asked for the end
  bool closed = false;   // the test has told it
};

struct FakeTransport final : public FrameTransport {
  std::shared_ptr<FrameLink> Open(std::shared_ptr<FrameEvents> events) override {
    links.push_back(std::make_shared<FakeLink>(std::move(events)));
    return links.back();
  }
  std::vector<std::shared_ptr<FakeLink>> links;
};

}  // namespace muster::agent

#endif  // MUSTER_WORKER_AGENT_FAKE_FRAME_LINK_H_
