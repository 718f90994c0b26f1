#include "rpc/session/agent_session.h"

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "rpc/session/answer.h"

namespace muster::rpc {
namespace {

v1::CoordinatorFrame Next(AgentSession* session) {
  std::string bytes;
  for (const FramePiece& piece : session->outbox().Next())
    bytes.append(piece.bytes.data(), piece.bytes.size());
  v1::CoordinatorFrame frame;
  EXPECT_TRUE(frame.ParseFromString(bytes));
  return frame;
}

v1::AgentFrame Frame(uint64_t seq, uint64_t ack = 0) {
  v1::AgentFrame frame;
  frame.set_seq(seq);
  frame.set_ack(ack);
  frame.mutable_ops();
  return frame;
}

void AddResult(AgentSession* session, uint64_t op_id) {
  v1::OpResult result;
  result.mutable_heartbeat();
  session->outbox().AddResult(op_id, std::make_shared<Answer>(result));
}

v1::Hello Hello(uint64_t incarnation, uint64_t last_received) {
  v1::Hello hello;
  hello.set_node("n");
  hello.set_agent_incarnation(incarnation);
  hello.set_session_id("s");
  hello.set_last_received_seq(last_received);
  return hello;
}

TEST(AgentSession, FrameSentAgain_IsAppliedOnce) {
  AgentSession session("n", 7, "s");
  EXPECT_TRUE(session.Receive(Frame(1)));
  EXPECT_TRUE(session.Receive(Frame(2)));
  ASSERT_TRUE(session.Resume(Hello(7, 0)));
  session.Welcome(1, 5, "cluster", absl::Seconds(6));
  const v1::CoordinatorFrame welcome = Next(&session);
  EXPECT_EQ(welcome.welcome().last_received_seq(), 2u);
  EXPECT_EQ(welcome.welcome().session_id(), "s");
  EXPECT_EQ(welcome.welcome().term(), 5u);
  EXPECT_EQ(welcome.welcome().lease().seconds(), 6);
  EXPECT_FALSE(session.Receive(Frame(1)));
  EXPECT_FALSE(session.Receive(Frame(2)));
  EXPECT_TRUE(session.Receive(Frame(3)));
}

TEST(AgentSession, FrameAfterAGap_DoesNotFollow) {
  AgentSession session("n", 7, "s");
  EXPECT_FALSE(session.Follows(Frame(2)));
  EXPECT_TRUE(session.Follows(Frame(1)));
  session.Receive(Frame(1));
  EXPECT_TRUE(session.Follows(Frame(1)));  // again
  EXPECT_TRUE(session.Follows(Frame(2)));
  EXPECT_TRUE(session.Follows(Frame(0)));
  EXPECT_FALSE(session.Follows(Frame(3)));
}

TEST(AgentSession, FramesWithoutSeq_AreAlwaysApplied) {
  AgentSession session("n", 7, "s");
  EXPECT_TRUE(session.Receive(Frame(4)));
  v1::AgentFrame beat;
  beat.mutable_beat();
  EXPECT_TRUE(session.Receive(beat));
  EXPECT_TRUE(session.Receive(beat));
  // A beat is answered with the last frame received, so that the agent can drop the acknowledged
  // ones.
  ASSERT_TRUE(session.outbox().HasWork());
  EXPECT_EQ(Next(&session).ack(), 4u);
}

TEST(AgentSession, BeatThatWantsAnAnswer_GetsAFrameEachTime) {
  AgentSession session("n", 7, "s");
  session.Welcome(1, 1, "", absl::Seconds(6));
  EXPECT_EQ(Next(&session).welcome().features(0), kAnswersBeats);
  v1::AgentFrame beat;
  beat.mutable_beat();
  EXPECT_TRUE(session.Receive(beat));
  EXPECT_FALSE(session.outbox().HasWork());  // most agents see a broken connection by themselves
  beat.mutable_beat()->set_wants_answer(true);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(session.Receive(beat));
    ASSERT_TRUE(session.outbox().HasWork());
    EXPECT_EQ(Next(&session).seq(), 0u);
    EXPECT_FALSE(session.outbox().HasWork());
  }
}

TEST(AgentSession, Resume_ResultsNotAcknowledged_AreSentAgainAfterTheWelcome) {
  AgentSession session("n", 7, "s");
  for (uint64_t op = 1; op <= 3; ++op) {
    AddResult(&session, op);
    Next(&session);
  }
  session.Receive(Frame(1, /*ack=*/1));
  AddResult(&session, 4);  // while there is no stream
  ASSERT_TRUE(session.Resume(Hello(7, 2)));
  session.Welcome(1, 1, "", absl::Seconds(6));
  EXPECT_TRUE(Next(&session).has_welcome());
  EXPECT_EQ(Next(&session).results().results(0).op_id(), 3u);
  EXPECT_EQ(Next(&session).results().results(0).op_id(), 4u);
  EXPECT_FALSE(session.outbox().HasWork());
}

TEST(AgentSession, Resume_OtherProcessOfTheAgent_IsRefused) {
  AgentSession session("n", 7, "s");
  EXPECT_FALSE(session.Resume(Hello(8, 0)));
}

TEST(AgentSession, Resume_FramesThatWereNeverMade_IsRefused) {
  AgentSession session("n", 7, "s");
  EXPECT_FALSE(session.Resume(Hello(7, 12)));
}

TEST(AgentSession, Resume_AgentThatNeverGotTheWelcome_GetsEveryFrame) {
  AgentSession session("n", 7, "s");
  AddResult(&session, 1);
  Next(&session);
  v1::Hello hello = Hello(7, 1);  // one frame of the session it was in before
  hello.set_session_id("of an earlier coordinator");
  ASSERT_TRUE(session.Resume(hello));
  EXPECT_EQ(Next(&session).results().results(0).op_id(), 1u);
  // Once it has acknowledged something, it must know which session it is in.
  session.Receive(Frame(1, /*ack=*/1));
  EXPECT_FALSE(session.Resume(hello));
}

TEST(AgentSession, Resume_AgentThatWasInAnotherSessionSince_IsRefused) {
  AgentSession session("n", 7, "s");
  EXPECT_TRUE(session.Receive(Frame(1)));
  v1::Hello hello = Hello(7, 0);
  hello.set_session_id("of a hub");
  // It counts its frames from 1 again: they would be taken for those that were received here.
  EXPECT_FALSE(session.Resume(hello));
}

TEST(AgentSession, ManyFrames_AreAcknowledgedNowAndThen) {
  AgentSession session("n", 7, "s");
  uint64_t seq = 0;
  while (!session.outbox().HasWork() && seq < 100) session.Receive(Frame(++seq));
  EXPECT_EQ(seq, 32u);
  EXPECT_EQ(Next(&session).ack(), 32u);
}

}  // namespace
}  // namespace muster::rpc
