#include "worker/process/observed_comm.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ATen/ops/ones.h"
#include "worker/process/local_comm.h"

namespace muster {
namespace {

// Looks at the board from within a collective, as a heartbeat of a hanging worker does.
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

TEST(ProgressBoard, StepAndPhase_AreRead) {
  ProgressBoard board;
  board.SetStep(7);
  board.SetPhase("backward");
  EXPECT_EQ(board.Read().step, 7);
  EXPECT_EQ(board.Read().phase, "backward");
}

}  // namespace
}  // namespace muster
