#include "coordinator/membership.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

v1::SeatRecord Record(const std::string& worker_id, uint64_t incarnation, const std::string& host) {
  v1::JoinRequest request;
  request.mutable_fence()->set_worker_id(worker_id);
  request.mutable_fence()->set_incarnation(incarnation);
  request.mutable_topology()->set_host(host);
  return MakeSeatRecord(request, absl::StrCat("agent of ", host));
}

std::vector<v1::SeatRecord> Four() {
  return {Record("w0", 1, "a"), Record("w1", 2, "b"), Record("w2", 3, "a"), Record("w3", 4, "b")};
}

TEST(Membership, Seal_NumbersSeatsAndNodes) {
  Membership members;
  members.Begin(7);
  EXPECT_TRUE(members.Seal(Four()).empty());
  EXPECT_EQ(members.generation(), 8u);
  EXPECT_TRUE(members.sealed());
  EXPECT_EQ(members.alive(), 4);
  EXPECT_EQ(members.num_nodes(), 2);
  EXPECT_NE(members.digest(), 0u);
  EXPECT_EQ(members.Find("w2")->rank(), 2);
  EXPECT_EQ(members.Find("w2")->record().node_rank(), 0);
  EXPECT_EQ(members.Find("w3")->record().node_rank(), 1);
  EXPECT_EQ(members.Find("w9"), nullptr);
  EXPECT_TRUE(members.HasNode("agent of a"));
  EXPECT_FALSE(members.HasNode(""));
}

TEST(Membership, NextGeneration_ForgetsThoseWithoutASeat) {
  Membership members;
  members.Seal(Four());
  members.End("w1 was lost", {}, kNow);
  EXPECT_FALSE(members.sealed());
  EXPECT_EQ(members.ended_at(), kNow);
  const std::vector<Seat> former = members.Seal({Record("w3", 4, "b"), Record("w0", 1, "a")});
  EXPECT_EQ(former.size(), 4u);
  EXPECT_EQ(members.Find("w3")->rank(), 0);
  EXPECT_EQ(members.Find("w1"), nullptr);
  EXPECT_EQ(members.alive(), 2);
  EXPECT_EQ(members.why_ended(), "");
}

TEST(Membership, Gone_CountsOnce) {
  Membership members;
  members.Seal(Four());
  v1::ExitCause failed;
  failed.set_exit_code(3);
  members.Gone(1, v1::WORKER_STATE_LOST, v1::ExitCause());
  members.Gone(1, v1::WORKER_STATE_EXITED, failed);
  members.Gone(2, v1::WORKER_STATE_LEFT, v1::ExitCause());
  EXPECT_EQ(members.alive(), 2);
  EXPECT_EQ(members.FormerWorld(), 3);  // without the one that left on purpose
}

TEST(Membership, Replace_KeepsThePlaceAndChangesTheTable) {
  Membership members;
  members.Seal(Four());
  const uint64_t digest = members.digest();
  members.mutable_at(3)->AtStep(41);
  members.Vacate(3);
  EXPECT_EQ(members.alive(), 3);
  members.Replace(3, Record("w3", 9, "b"));
  EXPECT_EQ(members.alive(), 4);
  EXPECT_EQ(members.at(3).record().node_rank(), 1);
  EXPECT_EQ(members.at(3).step(), 0);
  EXPECT_TRUE(members.Holds("w3", 9));
  EXPECT_FALSE(members.Holds("w3", 4));
  EXPECT_NE(members.digest(), digest);
}

TEST(Membership, Replace_CountsItsRowAlone) {
  Membership members;
  members.Seal(Four());
  v1::GenerationSealed sealed;
  members.Fill(&sealed);
  // Another version may compute the rest of the digest differently.
  sealed.set_table_digest(sealed.table_digest() + 1000);
  Membership restored;
  std::vector<Seat> former;
  ASSERT_TRUE(restored.Restore(sealed, &former).ok());
  for (Membership* one : {&members, &restored}) one->Replace(3, Record("w3", 9, "b"));
  EXPECT_EQ(restored.digest(), members.digest() + 1000);
  // The same table has the same digest, in whatever order it came about.
  for (Membership* one : {&members, &restored}) {
    one->Replace(1, Record("w1", 8, "b"));
    one->Replace(3, Record("w3", 4, "b"));
    one->Replace(1, Record("w1", 2, "b"));
  }
  EXPECT_EQ(restored.digest(), sealed.table_digest());
  EXPECT_EQ(members.digest(), sealed.table_digest() - 1000);
}

TEST(Membership, Records_RestoreTheSameTable) {
  Membership members;
  members.Seal(Four());
  members.Gone(2, v1::WORKER_STATE_LOST, v1::ExitCause());
  members.End("rank 2 was lost", {}, kNow);
  v1::GenerationSealed sealed;
  v1::GenerationClosed ended;
  members.Fill(&sealed);
  members.Fill(&ended);

  Membership restored;
  std::vector<Seat> former;
  ASSERT_TRUE(restored.Restore(sealed, &former).ok());
  restored.Restore(ended);
  restored.StartTerm(kNow);
  EXPECT_EQ(restored.generation(), members.generation());
  EXPECT_EQ(restored.digest(), members.digest());
  EXPECT_EQ(restored.alive(), 3);
  EXPECT_FALSE(restored.sealed());
  EXPECT_EQ(restored.why_ended(), "rank 2 was lost");
  EXPECT_EQ(restored.Find("w3")->rank(), 3);
}

TEST(Membership, RecordOfARankOutsideTheTable_IsDataLoss) {
  Membership members;
  members.Seal(Four());
  v1::SeatTaken taken;
  taken.mutable_seat()->set_rank(4);
  EXPECT_EQ(members.Restore(taken).code(), absl::StatusCode::kDataLoss);
  v1::GenerationSealed sealed;
  sealed.add_seats()->set_rank(1);
  std::vector<Seat> former;
  EXPECT_EQ(members.Restore(sealed, &former).code(), absl::StatusCode::kDataLoss);
}

TEST(Membership, EndOfAnOlderIncarnation_ChangesNothing) {
  Membership members;
  members.Seal(Four());
  v1::WorkerEnded ended;
  ended.set_worker_id("w1");
  ended.set_incarnation(99);
  ended.set_state(v1::WORKER_STATE_EXITED);
  members.Restore(ended);
  EXPECT_EQ(members.alive(), 4);
  ended.set_incarnation(2);
  members.Restore(ended);
  EXPECT_EQ(members.alive(), 3);
}

TEST(Membership, RestoredFromACopy_SkipsGenerationsAndKnowsNobody) {
  Membership members;
  members.Seal(Four());
  members.BecomeRestored(1000);
  EXPECT_EQ(members.generation(), 1001u);
  EXPECT_EQ(members.size(), 0);
  EXPECT_EQ(members.alive(), 0);
  EXPECT_FALSE(members.sealed());
  EXPECT_EQ(members.Find("w0"), nullptr);
}

TEST(Seat, LongTexts_AreCut) {
  Seat seat(Record("w0", 1, "a"));
  seat.SetPhase(std::string(1000, 'x'));
  seat.SetProcessState(std::string(1000, 'x'));
  EXPECT_LE(seat.phase().size(), 256u);
  EXPECT_LE(seat.process_state().size(), 64u);
}

}  // namespace
}  // namespace muster::coordinator
