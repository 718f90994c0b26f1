#include "worker/collective/observed_comm.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ATen/ops/ones.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/checked_comm.h"
#include "worker/collective/local_comm.h"

namespace muster {
namespace {

// Reads the board inside a collective, as the heartbeat of a hanging worker does.
class LookingComm : public LocalComm {
 public:
  LookingComm(const ProgressBoard& board, std::string* seen) : board_(board), seen_(seen) {}
  void Barrier() override { *seen_ = board_.Read().last_collective; }

 private:
  const ProgressBoard& board_;
  std::string* const seen_;
};

TEST(ObservedComm, LastCollective_IsNamedWhileItGoesOnAndAfter) {
  const auto board = std::make_shared<ProgressBoard>();
  std::string seen;
  const auto comm = MakeObservedComm(std::make_unique<LookingComm>(*board, &seen), board);
  EXPECT_EQ(board->Read().last_collective, "");
  at::Tensor tensor = at::ones({4, 2});
  comm->AllReduce(tensor, ReduceOp::kSum);
  EXPECT_EQ(board->Read().last_collective, "AllReduce #1 (8 Float), done");
  EXPECT_EQ(comm->AllGatherBytes("abc").front(), "abc");
  EXPECT_EQ(board->Read().last_collective, "AllGatherBytes #2 (3 bytes), done");
  comm->Barrier();
  EXPECT_EQ(seen, "Barrier #3 (0 bytes)");
  EXPECT_EQ(comm->size(), 1);
}

class LosingComm : public LocalComm {
 public:
  void Barrier() override {
    C10_THROW_ERROR(DistBackendError, "Barrier #1: Timed out waiting 10ms for recv");
  }
  std::string BroadcastBytes(const std::string&, int) override { TORCH_CHECK(false, "no root"); }
};

TEST(ObservedComm, LostCollective_IsExplainedWhileItStands) {
  const auto board = std::make_shared<ProgressBoard>();
  const auto comm =
      MakeObservedComm(std::make_unique<LosingComm>(), board, [&](absl::string_view error) {
        return c10::str("stands in ", board->Read().last_collective, ": ", std::string(error));
      });
  const auto error_of = [](const std::function<void()>& fn) -> std::string {
    try {
      fn();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  EXPECT_EQ(error_of([&] { comm->Barrier(); }),
            "stands in Barrier #1 (0 bytes): Barrier #1: Timed out waiting 10ms for recv");
  EXPECT_THAT(error_of([&] { comm->BroadcastBytes("", 0); }), ::testing::HasSubstr("no root"));
  EXPECT_EQ(board->Read().last_collective, "BroadcastBytes #2 (0 bytes), done");
}

TEST(ObservedComm, Board_IsFoundThroughOtherComms) {
  const auto board = std::make_shared<ProgressBoard>();
  const auto comm = MakeCheckedComm(MakeObservedComm(std::make_unique<LocalComm>(), board));
  EXPECT_EQ(BorrowedComm(*comm).board(), board.get());
  EXPECT_EQ(LocalComm().board(), nullptr);
}

TEST(ProgressBoard, Buckets_AreNamedUntilTheNextCollective) {
  ProgressBoard board;
  board.BeginCollective("AllReduce", 0, "");
  board.SetBucket(2, 5, 1048576, "Float");
  EXPECT_EQ(board.Read().last_collective, "AllReduce #1 bucket 2 of 5 (1,048,576 Float)");
  board.EndCollective();
  EXPECT_EQ(board.Read().last_collective, "AllReduce #1 bucket 2 of 5 (1,048,576 Float), done");
  board.BeginCollective("Broadcast", 100, "Float");
  EXPECT_EQ(board.Read().last_collective, "Broadcast #2 (100 Float)");
}

TEST(ProgressBoard, LoadAndFirstStep_HaveTheirTimes) {
  ProgressBoard board;
  board.SetStep(0);
  EXPECT_EQ(board.Read().restored, absl::InfinitePast());
  EXPECT_EQ(board.Read().first_step, absl::InfinitePast());
  const absl::Time before = Clock::Real().Now();
  board.SetRestored();
  const absl::Time restored = board.Read().restored;
  EXPECT_GE(restored, before - absl::Nanoseconds(1));
  board.SetRestored();
  EXPECT_EQ(board.Read().restored, restored) << "the first counts";
  EXPECT_EQ(board.Read().first_step, absl::InfinitePast());
  board.SetStep(41);
  const absl::Time stepped = board.Read().first_step;
  EXPECT_GE(stepped, restored);
  EXPECT_LE(stepped, Clock::Real().Now());
  board.SetStep(42);
  EXPECT_EQ(board.Read().first_step, stepped);
}

TEST(ProgressBoard, Progress_ChangesWithEachSignOfIt) {
  ProgressBoard board;
  uint64_t before = board.Read().progress;
  EXPECT_NE(before, 0u) << "0 is a program that does not count";
  const auto changes = [&] { return std::exchange(before, board.Read().progress) != before; };
  EXPECT_FALSE(changes());
  board.SetPhase("backward");
  EXPECT_TRUE(changes());
  board.SetPhase("forward");
  board.SetPhase("backward");
  EXPECT_TRUE(changes()) << "it has come back to what it was";
  board.SetStep(0);
  EXPECT_TRUE(changes());
  board.BeginCollective("AllReduce", 0, "undefined");
  EXPECT_TRUE(changes());
  board.SetBucket(1, 5, 100, "Float");
  EXPECT_TRUE(changes());
  board.EndCollective();
  EXPECT_TRUE(changes());
  board.SetRestored();
  EXPECT_FALSE(changes());
}

// A rank that waits there alone is named with it where the others wait in a barrier.
TEST(ProgressBoard, CollectiveOfACallThatIsEntered_NamesIt) {
  ProgressBoard board;
  board.SetPhase("entering save_state");
  board.BeginCollective("AllGatherBytes", 86, "bytes");
  EXPECT_EQ(board.Read().last_collective, "AllGatherBytes #1 (86 bytes) of save_state()");
  board.EndCollective();
  EXPECT_EQ(board.Read().last_collective, "AllGatherBytes #1 (86 bytes), done");
}

TEST(ProgressBoard, StepAndPhase_AreRead) {
  ProgressBoard board;
  board.SetStep(7);
  board.SetPhase("backward");
  EXPECT_EQ(board.Read().step, 7);
  EXPECT_EQ(board.Read().phase, "backward");
}

}  // namespace
}  // namespace muster
