#include "coordinator/service/agent_sessions.h"

#include <gtest/gtest.h>

namespace muster::coordinator {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);
constexpr absl::Duration kWindow = absl::Seconds(60);

class FakeStream final : public AgentStream {
 public:
  void Bind(std::shared_ptr<FrameSource>) override {}
  bool TryWrite(absl::FunctionRef<grpc::ByteBuffer()>) override { return false; }
  void ReadNext(bool) override { ++reads; }
  void Close(const absl::Status&) override {}
  void CloseAfter(grpc::ByteBuffer, const absl::Status&) override {}

  int reads = 0;
};

v1::Hello HelloOf(const std::string& node, uint64_t incarnation) {
  v1::Hello hello;
  hello.set_node(node);
  hello.set_agent_incarnation(incarnation);
  return hello;
}

// An agent with a session and a stream, as after its first Hello.
class AgentSessionsTest : public testing::Test {
 protected:
  AgentSessionsTest() {
    MutexLock lock(&session_->mu);
    session_->stream = stream_;
    sessions_.Attach(stream_, session_);
  }

  AgentSessions sessions_{1 << 20, kWindow};
  std::shared_ptr<FakeStream> stream_ = std::make_shared<FakeStream>();
  std::shared_ptr<AttachedAgent> session_ = sessions_.Begin(HelloOf("n1", 7));
};

TEST_F(AgentSessionsTest, AttachedSession_IsFoundByNodeAndStream) {
  EXPECT_EQ(sessions_.OfNode("n1"), session_);
  EXPECT_EQ(sessions_.OfStream(stream_), session_);
  EXPECT_EQ(sessions_.OfNode("n2"), nullptr);
  EXPECT_EQ(sessions_.size(), 1u);
  EXPECT_EQ(sessions_.NextExpiry(), absl::InfiniteFuture());
}

TEST_F(AgentSessionsTest, StreamCloses_SessionExpiresAfterTheWindow) {
  sessions_.Detach(stream_, kNow);
  EXPECT_EQ(sessions_.OfStream(stream_), nullptr);
  EXPECT_EQ(sessions_.OfNode("n1"), session_);
  EXPECT_EQ(sessions_.NextExpiry(), kNow + kWindow);
  EXPECT_EQ(sessions_.TakeExpired(kNow + kWindow - absl::Milliseconds(1)), nullptr);
  EXPECT_EQ(sessions_.TakeExpired(kNow + kWindow), session_);
  EXPECT_EQ(sessions_.TakeExpired(kNow + kWindow), nullptr);
}

TEST_F(AgentSessionsTest, AnotherStreamInTime_SessionStays) {
  sessions_.Detach(stream_, kNow);
  const auto next = std::make_shared<FakeStream>();
  sessions_.Attach(next, session_);
  EXPECT_EQ(sessions_.TakeExpired(kNow + kWindow), nullptr);
  sessions_.Detach(stream_, kNow);  // the old one, which has no session any longer
  EXPECT_EQ(sessions_.OfStream(next), session_);
}

TEST_F(AgentSessionsTest, OtherProcessOfTheNode_TakesTheStreamAndDoesNotResume) {
  const AgentSessions::Former former = sessions_.Resume(HelloOf("n1", 8));
  EXPECT_EQ(former.session, session_);
  EXPECT_EQ(former.stream, stream_);
  EXPECT_FALSE(former.resumes);
  EXPECT_EQ(sessions_.OfStream(stream_), nullptr);
  sessions_.Remove(session_);
  EXPECT_EQ(sessions_.OfNode("n1"), nullptr);
  EXPECT_EQ(sessions_.size(), 0u);
}

TEST_F(AgentSessionsTest, RemovedLate_DoesNotTakeItsSuccessorAlong) {
  const auto next = sessions_.Begin(HelloOf("n1", 8));
  sessions_.Remove(session_);
  EXPECT_EQ(sessions_.OfNode("n1"), next);
  EXPECT_EQ(sessions_.size(), 1u);
}

TEST_F(AgentSessionsTest, MarkedTwice_IsWrittenToOnce) {
  sessions_.MarkDirty(session_);
  sessions_.MarkDirty(session_);
  EXPECT_EQ(sessions_.TakeDirty().size(), 1u);
  EXPECT_TRUE(sessions_.TakeDirty().empty());
  sessions_.MarkDirty(session_);
  EXPECT_EQ(sessions_.TakeDirty().size(), 1u);
}

TEST_F(AgentSessionsTest, FrameApplied_NextOneIsReadOnce) {
  sessions_.ReadLater(stream_);
  EXPECT_EQ(stream_->reads, 0);
  sessions_.ReadNext();
  sessions_.ReadNext();
  EXPECT_EQ(stream_->reads, 1);
}

TEST_F(AgentSessionsTest, RemoveAll_ReturnsTheOpenStreams) {
  sessions_.Begin(HelloOf("n2", 1));  // has no stream
  EXPECT_EQ(sessions_.RemoveAll().size(), 1u);
  EXPECT_EQ(sessions_.OfNode("n1"), nullptr);
  EXPECT_EQ(sessions_.OfStream(stream_), nullptr);
  EXPECT_EQ(sessions_.size(), 0u);
}

}  // namespace
}  // namespace muster::coordinator
