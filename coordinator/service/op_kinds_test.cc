#include "coordinator/service/op_kinds.h"

#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

TEST(OpKinds, Reads_ChangeNothingAndDoNotWait) {
  v1::Op op;
  op.mutable_get_members();
  EXPECT_TRUE(OnlyReads(op));
  EXPECT_FALSE(MayChange(op));
  EXPECT_FALSE(MayBeHeld(op));
}

TEST(OpKinds, CaptureStacks_ReadsAndIsHeld) {
  v1::Op op;
  op.mutable_capture_stacks();
  EXPECT_FALSE(MayChange(op));
  EXPECT_TRUE(MayBeHeld(op));
}

TEST(OpKinds, Transaction_ChangesIfItWrites) {
  v1::Op op;
  op.mutable_txn()->add_then()->mutable_get()->set_key("k");
  EXPECT_FALSE(OnlyReads(op));
  EXPECT_FALSE(MayChange(op));
  op.mutable_txn()->add_then()->mutable_put()->set_key("k");
  EXPECT_TRUE(MayChange(op));
}

TEST(OpKinds, Wait_IsHeldAndCountsItsKeys) {
  v1::Op op;
  op.mutable_wait()->add_keys("a");
  op.mutable_wait()->add_keys("b");
  EXPECT_TRUE(MayBeHeld(op));
  EXPECT_FALSE(MayChange(op));
  EXPECT_GT(HeldBytes(op, 10), 10u);
  v1::Op join;
  join.mutable_join();
  EXPECT_TRUE(MayBeHeld(join));
  EXPECT_EQ(HeldBytes(join, 10), 10u);
}

}  // namespace
}  // namespace muster::coordinator
