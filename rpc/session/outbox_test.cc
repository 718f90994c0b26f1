#include "rpc/session/outbox.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace muster::rpc {
namespace {

std::shared_ptr<const Answer> MakeAnswer(const std::string& payload) {
  v1::OpResult result;
  result.mutable_arrive()->add_payloads(payload);
  return std::make_shared<Answer>(result);
}

v1::CoordinatorFrame Parse(const FrameBytes& pieces) {
  std::string bytes;
  for (const FramePiece& piece : pieces) bytes.append(piece.bytes.data(), piece.bytes.size());
  v1::CoordinatorFrame frame;
  EXPECT_TRUE(frame.ParseFromString(bytes));
  return frame;
}

TEST(Outbox, WaitingResults_GoOutInOneFrame) {
  Outbox outbox;
  EXPECT_FALSE(outbox.HasWork());
  outbox.set_received(17);
  outbox.AddResult(1, MakeAnswer("own"));
  outbox.AddResult(300, MakeAnswer("shared"));
  outbox.AddResult(70'000, MakeAnswer(std::string(5000, 'x')));
  outbox.AddResult(0, MakeAnswer("last"));
  ASSERT_TRUE(outbox.HasWork());
  const v1::CoordinatorFrame frame = Parse(outbox.Next());
  EXPECT_FALSE(outbox.HasWork());
  EXPECT_EQ(frame.seq(), 1u);
  EXPECT_EQ(frame.ack(), 17u);
  ASSERT_EQ(frame.results().results_size(), 4);
  EXPECT_EQ(frame.results().results(0).op_id(), 1u);
  EXPECT_EQ(frame.results().results(0).arrive().payloads(0), "own");
  EXPECT_EQ(frame.results().results(1).op_id(), 300u);
  EXPECT_EQ(frame.results().results(1).arrive().payloads(0), "shared");
  EXPECT_EQ(frame.results().results(2).op_id(), 70'000u);
  EXPECT_EQ(frame.results().results(2).arrive().payloads(0), std::string(5000, 'x'));
  EXPECT_EQ(frame.results().results(3).op_id(), 0u);
  EXPECT_EQ(frame.results().results(3).arrive().payloads(0), "last");
}

TEST(Outbox, Directive_HasItsOwnFrameInOrder) {
  Outbox outbox;
  auto directive = std::make_shared<v1::Directive>();
  directive->mutable_kill_worker()->set_worker_id("w");
  outbox.AddResult(1, MakeAnswer("a"));
  outbox.AddDirective(directive);
  outbox.AddResult(2, MakeAnswer("b"));
  EXPECT_EQ(Parse(outbox.Next()).results().results(0).op_id(), 1u);
  const v1::CoordinatorFrame middle = Parse(outbox.Next());
  EXPECT_EQ(middle.seq(), 2u);
  EXPECT_EQ(middle.directive().kill_worker().worker_id(), "w");
  EXPECT_EQ(Parse(outbox.Next()).results().results(0).op_id(), 2u);
  EXPECT_FALSE(outbox.HasWork());
}

TEST(Outbox, LargeResults_AreSplitIntoFrames) {
  Outbox outbox;
  for (int i = 0; i < 5; ++i) outbox.AddResult(i, MakeAnswer(std::string(900'000, 'x')));
  int results = 0;
  while (outbox.HasWork()) {
    const v1::CoordinatorFrame frame = Parse(outbox.Next());
    EXPECT_LT(frame.ByteSizeLong(), 3u << 20);
    results += frame.results().results_size();
  }
  EXPECT_EQ(results, 5);
}

TEST(Outbox, Resume_SendsAgainWhatWasNotAcknowledged) {
  Outbox outbox;
  for (uint64_t i = 1; i <= 4; ++i) {
    outbox.AddResult(i, MakeAnswer("x"));
    outbox.Next();
  }
  outbox.Acknowledged(1);
  EXPECT_EQ(outbox.unacknowledged(), 3u);
  v1::CoordinatorFrame welcome;
  welcome.mutable_welcome()->set_protocol(1);
  ASSERT_TRUE(outbox.Resume(2));
  outbox.AddFirst(welcome);
  outbox.AddResult(5, MakeAnswer("y"));
  EXPECT_TRUE(Parse(outbox.Next()).has_welcome());
  for (uint64_t seq = 3; seq <= 5; ++seq) {
    const v1::CoordinatorFrame frame = Parse(outbox.Next());
    EXPECT_EQ(frame.seq(), seq);
    EXPECT_EQ(frame.results().results(0).op_id(), seq);
  }
  EXPECT_FALSE(outbox.HasWork());
}

TEST(Outbox, ResumeBeyondWhatIsKept_IsRefused) {
  Outbox outbox;
  EXPECT_FALSE(outbox.Resume(1));  // never made
  EXPECT_TRUE(outbox.Resume(0));
  for (uint64_t i = 1; i <= 3; ++i) {
    outbox.AddResult(i, MakeAnswer("x"));
    outbox.Next();
  }
  outbox.Acknowledged(2);
  EXPECT_FALSE(outbox.Resume(1));  // 2 is forgotten
  EXPECT_FALSE(outbox.Resume(4));
  EXPECT_TRUE(outbox.Resume(3));
  EXPECT_FALSE(outbox.HasWork());
}

TEST(Outbox, AckWanted_GoesOutAloneOnce) {
  Outbox outbox;
  outbox.AckSoon();
  EXPECT_FALSE(outbox.HasWork());  // nothing received yet
  outbox.set_received(5);
  outbox.AckSoon();
  ASSERT_TRUE(outbox.HasWork());
  const v1::CoordinatorFrame frame = Parse(outbox.Next());
  EXPECT_EQ(frame.seq(), 0u);
  EXPECT_EQ(frame.ack(), 5u);
  EXPECT_FALSE(outbox.HasWork());
  EXPECT_EQ(outbox.unacknowledged(), 0u);
}

}  // namespace
}  // namespace muster::rpc
