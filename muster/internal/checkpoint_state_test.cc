#include "muster/internal/checkpoint_state.h"

#include <string>
#include <vector>

#include "base/test_folder.h"
#include "gtest/gtest.h"
#include "muster/internal/test_parts.h"

namespace muster::internal {
namespace {

class CheckpointStateTest : public testing::Test {
 protected:
  std::string Dir(const std::string& name) const { return TestPath(name); }
  void RegisterNumber() {
    checkpoints_.Register(
        [this] {
          return PlainState{{"number", {number_}}};
        },
        [this](const PlainState& state) { number_ = state.at("number").at(0); });
  }

  double number_ = 0;
  Parts parts_;
  CheckpointState checkpoints_{parts_.process, parts_.registry, parts_.loops, parts_.steps,
                               [] { return false; }};
};

TEST_F(CheckpointStateTest, RegisteredObject_ComesBack) {
  RegisterNumber();
  number_ = 7;
  ASSERT_TRUE(checkpoints_.Save(Dir("object")).ok());
  EXPECT_EQ(checkpoints_.last_checkpoint(), Dir("object"));
  EXPECT_EQ(checkpoints_.save_iteration(), 1);
  number_ = 0;
  ASSERT_TRUE(checkpoints_.Load(Dir("object"), /*may_be_missing=*/false).ok());
  EXPECT_EQ(number_, 7);
}

TEST_F(CheckpointStateTest, OtherObjectsThanSaved_AreRefused) {
  ASSERT_TRUE(checkpoints_.Save(Dir("other")).ok());
  RegisterNumber();
  const absl::Status loaded = checkpoints_.Load(Dir("other"), false);
  EXPECT_EQ(loaded.code(), absl::StatusCode::kFailedPrecondition) << loaded;
}

TEST_F(CheckpointStateTest, Hook_RunsUntilItIsRemoved) {
  int calls = 0;
  const int64_t hook =
      checkpoints_.AddSaveHook([&](std::vector<NamedTensors>&, StateWriter&) { ++calls; });
  ASSERT_TRUE(checkpoints_.Save(Dir("hook1")).ok());
  checkpoints_.RemoveHook(hook);
  ASSERT_TRUE(checkpoints_.Save(Dir("hook2")).ok());
  EXPECT_EQ(calls, 1);
}

TEST_F(CheckpointStateTest, MissingCheckpoint_IsAnErrorUnlessItMayBeMissing) {
  EXPECT_EQ(checkpoints_.Load(Dir("none"), false).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(checkpoints_.Load(Dir("none"), true).ok());
}

}  // namespace
}  // namespace muster::internal
