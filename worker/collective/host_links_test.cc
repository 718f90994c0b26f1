#include "worker/collective/host_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/test_error.h"
#include "worker/collective/test_lost_memory.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::chrono::steady_clock::time_point InFiveMinutes() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(5);
}

std::unique_ptr<HostLinks> Links(Comm& comm) {
  std::vector<int> peers;
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (rank != comm.rank()) peers.push_back(rank);
  }
  return std::make_unique<HostLinks>(comm.process_group()->getBackend(c10::DeviceType::CPU),
                                     comm.rank(), peers);
}

// Runs `loser` and `other`, whose connection is lost while messages in both directions are under
// way.
class MiddleOfMessages {
 public:
  MiddleOfMessages(HostLinks& links, Comm& comm, int loser, int other, std::latch& under_way)
      : links_(links) {
    const bool loses = comm.rank() == loser;
    const bool takes_part = loses || comm.rank() == other;
    const int peer = loses ? other : loser;
    if (takes_part) {
      received_ = links.Receive(peer, 0, loses ? short_.data() : long_.data(), LongMemory::kBytes,
                                "a test");
    }
    comm.Barrier();
    if (!takes_part) return;
    if (!loses) under_way.wait();
    sent_ = links.Send(peer, 0, long_.data(), LongMemory::kBytes, "a test");
    if (loses) under_way.count_down();
  }
  void Wait(bool send) { links_.Wait(send ? sent_ : received_, InFiveMinutes(), "a test"); }

 private:
  HostLinks& links_;
  const ShortMemory short_;
  const LongMemory long_;
  HostLinks::Message received_, sent_;
};

TEST(HostLinks, PeerLostInTheMiddleOfMessages_IsNamedAtOnce) {
  for (const bool waits_for_send : {false, true}) {
    std::latch under_way(1);
    RunGlooRanks(2, [&](Comm& comm) {
      const auto links = Links(comm);
      MiddleOfMessages messages(*links, comm, /*loser=*/1, /*other=*/0, under_way);
      const std::string error = ErrorOf([&] { messages.Wait(waits_for_send); });
      EXPECT_THAT(
          error,
          AllOf(HasSubstr(c10::str("a test on rank ", comm.rank(), ": rank ", 1 - comm.rank())),
                HasSubstr(" has died or has left the group (")));
    });
  }
}

TEST(HostLinks, Break_EndsWhatRanksWaitFor_WithTheReason) {
  RunGlooRanks(2, [](Comm& comm) {
    const auto links = Links(comm);
    char never;
    HostLinks::Message message = links->Receive(1 - comm.rank(), 0, &never, 1, "a test");
    comm.Barrier();
    if (comm.rank() == 1) links->Break("rank 1 has no more data");
    const std::string error = ErrorOf([&] { links->Wait(message, InFiveMinutes(), "a test"); });
    EXPECT_EQ(error, c10::str("a test on rank ", comm.rank(), ": rank 1 has no more data"));
  });
}

// Rank 0 waits for rank 1, which waits for rank 2. Each sends the others the reason why it gives
// up, as the engine does.
TEST(HostLinks, RankThatWaitsForALostOne_IsNotBlamedItself) {
  for (const bool in_the_middle : {false, true}) {
    std::latch under_way(1);
    RunGlooRanks(3, [&](Comm& comm) {
      const int rank = comm.rank();
      const auto links = Links(comm);
      char never;
      HostLinks::Message message;
      if (rank < 2) message = links->Receive(rank + 1, 1, &never, 1, "a test");
      std::optional<MiddleOfMessages> messages;
      if (in_the_middle) {
        messages.emplace(*links, comm, /*loser=*/2, /*other=*/1, under_way);
      } else {
        comm.Barrier();
      }
      const std::string error = ErrorOf([&] {
        if (rank == 2 && !in_the_middle) TORCH_CHECK(false, "rank 2 has no more data");
        if (rank > 0 && in_the_middle) return messages->Wait(/*send=*/false);
        links->Wait(message, InFiveMinutes(), "a test");
      });
      links->Break(error);
      if (rank == 2) return;
      EXPECT_THAT(error, HasSubstr(in_the_middle ? "rank 2 on another host has died or has left"
                                                 : "rank 2 has no more data"));
    });
  }
}

TEST(HostLinks, EmptyMessage_IsThereAtOnce) {
  RunGlooRanks(2, [](Comm& comm) {
    const auto links = Links(comm);
    HostLinks::Message message = links->Receive(1 - comm.rank(), 0, nullptr, 0, "a test");
    links->Wait(message, InFiveMinutes(), "a test");
    comm.Barrier();
  });
}

}  // namespace
}  // namespace muster
