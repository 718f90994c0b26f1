#include "worker/collective/all_to_all.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "c10/util/Exception.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

// The number of bytes that one rank sends to another, and also their value. Some ranks send
// nothing.
int64_t BytesFrom(int from, int to) { return from == 1 ? 0 : 1000 * from + to; }
int64_t ValueFrom(int from, int to) { return 16 * from + to + 1; }

void Exchange(Comm& comm) {
  const int size = comm.size(), rank = comm.rank();
  std::vector<int64_t> to, from;
  std::vector<at::Tensor> parts = {at::empty({0}, at::kByte)};
  std::vector<at::Tensor> expected = parts;
  for (int peer = 0; peer < size; ++peer) {
    to.push_back(BytesFrom(rank, peer));
    from.push_back(BytesFrom(peer, rank));
    parts.push_back(at::full({to.back()}, ValueFrom(rank, peer), at::kByte));
    expected.push_back(at::full({from.back()}, ValueFrom(peer, rank), at::kByte));
  }
  // Room beyond what is needed stays unchanged.
  expected.push_back(at::full({3}, 255, at::kByte));
  at::Tensor received = at::full_like(at::cat(expected), 255);
  AllToAllBytes(comm, at::cat(parts), to, received, from);
  EXPECT_TRUE(received.equal(at::cat(expected))) << "rank " << rank;
}

TEST(AllToAll, EveryRank_GetsFromEachWhatThatHasForIt) {
  RunRanks(3, Exchange);
  RunGlooRanks(3, Exchange);
  LocalComm alone;
  Exchange(alone);
}

TEST(AllToAll, NobodySendsAnything_IsNoError) {
  const auto nothing = [](Comm& comm) {
    at::Tensor received = at::empty({0}, at::kByte);
    const std::vector<int64_t> none(static_cast<size_t>(comm.size()), 0);
    AllToAllBytes(comm, at::empty({0}, at::kByte), none, received, none);
  };
  RunRanks(2, nothing);
  RunGlooRanks(2, nothing);
}

TEST(AllToAll, TooLittleMemory_IsRefusedBeforeAnythingIsSent) {
  LocalComm alone;
  at::Tensor received = at::empty({4}, at::kByte);
  EXPECT_THROW(AllToAllBytes(alone, at::empty({5}, at::kByte), {5}, received, {5}), c10::Error);
  EXPECT_THROW(AllToAllBytes(alone, at::empty({4}, at::kByte), {4}, received, {4, 0}), c10::Error);
  received = at::empty({4}, at::kFloat);
  EXPECT_THROW(AllToAllBytes(alone, at::empty({4}, at::kByte), {4}, received, {4}), c10::Error);
}

TEST(AllToAll, PeerThatIsGone_IsAnErrorThatSaysWhere) {
  EXPECT_THROW(
      RunGlooRanks(2,
                   [](Comm& comm) {
                     if (comm.rank() == 1) throw std::runtime_error("it ends");
                     at::Tensor received = at::empty({8}, at::kByte);
                     std::string why;
                     try {
                       AllToAllBytes(comm, at::empty({8}, at::kByte), {0, 8}, received, {0, 8});
                     } catch (const c10::Error& e) {
                       why = e.what_without_backtrace();
                     }
                     EXPECT_THAT(why, HasSubstr("AllToAll on rank 0 of 2: "));
                   }),
      std::runtime_error);
}

}  // namespace
}  // namespace muster
