#include "agent/machines.h"

#include <string>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/membership.pb.h"
#include "rpc/session/duration.h"

namespace muster::agent {
namespace {

constexpr absl::Duration kSilentAfter = absl::Seconds(90);

v1::Member Machine(const std::string& worker_id, int rank, v1::WorkerState state,
                   absl::Duration heard_ago = absl::Seconds(1)) {
  v1::Member machine;
  machine.set_worker_id(worker_id);
  machine.set_incarnation(7);
  machine.set_rank(rank);
  machine.set_state(state);
  *machine.mutable_heartbeat_age() = rpc::ToProto(heard_ago);
  return machine;
}

TEST(CoordinatorsLaunchTest, HasCome_OnceItIsNamedOrOthersRun) {
  EXPECT_FALSE(CoordinatorsLaunchHasCome({}));
  EXPECT_FALSE(CoordinatorsLaunchHasCome({Machine("node-h-1", -1, v1::WORKER_STATE_JOINING)}));
  EXPECT_FALSE(CoordinatorsLaunchHasCome({Machine("node-h-1", 0, v1::WORKER_STATE_LOST)}));
  EXPECT_TRUE(CoordinatorsLaunchHasCome({Machine("node-h-1", -1, v1::WORKER_STATE_JOINING),
                                         Machine("node0", -1, v1::WORKER_STATE_JOINING)}));
  EXPECT_TRUE(CoordinatorsLaunchHasCome({Machine("node-h-1", 0, v1::WORKER_STATE_RUNNING)}));
}

TEST(DiedBeforeItLeftTest, LastStart_CountsIfItIsRecentHasNotLeftAndNobodyWaits) {
  const v1::Member other = Machine("node0", 0, v1::WORKER_STATE_LEFT);
  const auto died = [&](const v1::Member& self) {
    return DiedBeforeItLeft({other, self}, "node1", absl::Minutes(10));
  };
  for (const v1::WorkerState state :
       {v1::WORKER_STATE_RUNNING, v1::WORKER_STATE_LOST, v1::WORKER_STATE_EXITED}) {
    EXPECT_TRUE(died(Machine("node1", 1, state)));
    EXPECT_FALSE(died(Machine("node1", 1, state, absl::Minutes(10))));
    EXPECT_FALSE(died(Machine("node2", 2, state))) << "another one";
  }
  EXPECT_FALSE(died(Machine("node1", 1, v1::WORKER_STATE_LEFT)));
  EXPECT_FALSE(DiedBeforeItLeft(
      {Machine("node1", 1, v1::WORKER_STATE_LOST), Machine("node0", -1, v1::WORKER_STATE_JOINING)},
      "node1", absl::Minutes(10)));
}

TEST(OthersTest, SilentLostAndLeftMachines_DoNotRun) {
  const Others others =
      LookAtOthers({Machine("a", 0, v1::WORKER_STATE_RUNNING, kSilentAfter),
                    Machine("b", 1, v1::WORKER_STATE_RUNNING, kSilentAfter + absl::Seconds(1)),
                    Machine("c", 2, v1::WORKER_STATE_LOST), Machine("d", 3, v1::WORKER_STATE_LEFT)},
                   kSilentAfter);
  EXPECT_EQ(others.running, 1);
  EXPECT_FALSE(others.any_waits);
  EXPECT_FALSE(others.meet_again);
}

TEST(OthersTest, NewcomerWaits_OthersMeetAgainOnlyIfOneOfThemDoesToo) {
  v1::Member waits = Machine("b", -1, v1::WORKER_STATE_JOINING);
  Others others = LookAtOthers({Machine("a", 0, v1::WORKER_STATE_RUNNING), waits}, kSilentAfter);
  EXPECT_EQ(others.running, 1);
  EXPECT_TRUE(others.any_waits);
  EXPECT_FALSE(others.meet_again);
  waits.set_worker_id("a");
  others = LookAtOthers({Machine("a", 0, v1::WORKER_STATE_RUNNING), waits}, kSilentAfter);
  EXPECT_TRUE(others.meet_again);
  // Its launch was started again: the old process may still have the seat.
  waits.set_incarnation(8);
  others = LookAtOthers({Machine("a", 0, v1::WORKER_STATE_RUNNING), waits}, kSilentAfter);
  EXPECT_FALSE(others.meet_again);
}

TEST(SignsTest, OneThatDoesNotRun_IsTheLoss) {
  const Signs signs = SignsOfOthers(
      {Machine("a", 0, v1::WORKER_STATE_RUNNING, absl::Hours(1)),
       Machine("b", 1, v1::WORKER_STATE_LOST), Machine("c", 2, v1::WORKER_STATE_LOST)},
      "self", absl::Seconds(3));
  ASSERT_TRUE(signs.lost.has_value());
  EXPECT_EQ(signs.lost->worker_id(), "b");
  EXPECT_FALSE(signs.all_heard);
}

TEST(SignsTest, OnlyASignAfterThatMoment_ShowsThatAMachineLives) {
  const auto all_heard = [](absl::Duration heard_ago) {
    const Signs signs = SignsOfOthers({Machine("a", 0, v1::WORKER_STATE_RUNNING, heard_ago),
                                       Machine("self", 1, v1::WORKER_STATE_LOST, absl::Hours(1)),
                                       Machine("b", -1, v1::WORKER_STATE_JOINING, absl::Hours(1))},
                                      "self", absl::Seconds(3));
    EXPECT_FALSE(signs.lost.has_value());
    return signs.all_heard;
  };
  EXPECT_TRUE(all_heard(absl::Seconds(2)));
  EXPECT_FALSE(all_heard(absl::Seconds(3)));
  EXPECT_FALSE(all_heard(absl::Seconds(4)));
}

}  // namespace
}  // namespace muster::agent
