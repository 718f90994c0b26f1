#include "worker/collective/peer_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <iterator>
#include <latch>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/from_blob.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/on_all.h"
#include "worker/collective/test_lost_memory.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

enum Tag : int { kWatch = 1, kData, kLateWatch };

// One of two ranks, with a watch.
class Watched {
 public:
  explicit Watched(Comm& comm)
      : peer_(1 - comm.rank()),
        gloo_(comm.process_group()->getBackend(c10::DeviceType::CPU)),
        watch_(gloo_, {peer_, peer_}, kWatch) {}

  PeerWatch::Message Send(const void* data, int64_t bytes) {
    std::vector<at::Tensor> tensors = Tensors(const_cast<void*>(data), bytes);
    return watch_.Add(peer_, gloo_->send(tensors, peer_, kData));
  }
  PeerWatch::Message Receive(void* data, int64_t bytes) {
    std::vector<at::Tensor> tensors = Tensors(data, bytes);
    return watch_.Add(peer_, gloo_->recv(tensors, peer_, kData));
  }
  std::string ErrorOfWait(PeerWatch::Message* message) {
    try {
      watch_.Wait(message, minutes(5));
      return "";
    } catch (...) {
      return TextOf(std::current_exception());
    }
  }
  std::optional<std::string> Loss() { return watch_.LossOf(peer_, minutes(5)); }
  PeerWatch& watch() { return watch_; }

 private:
  static std::vector<at::Tensor> Tensors(void* data, int64_t bytes) {
    return {at::from_blob(data, {bytes}, at::kByte)};
  }

  const int peer_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  PeerWatch watch_;
};

TEST(PeerWatch, ConnectionLostInTheMiddleOfMessages_EndsThemOnBothSides) {
  std::latch under_way(1);
  RunGlooRanks(2, [&](Comm& comm) {
    const ShortMemory shorter;
    const LongMemory longer;
    Watched rank(comm);
    std::vector<PeerWatch::Message> messages;
    messages.push_back(
        rank.Receive(comm.rank() == 0 ? longer.data() : shorter.data(), LongMemory::kBytes));
    comm.Barrier();
    if (comm.rank() == 0) under_way.wait();
    messages.push_back(rank.Send(longer.data(), LongMemory::kBytes));
    if (comm.rank() == 1) under_way.count_down();
    for (PeerWatch::Message& message : messages) {
      EXPECT_NE(rank.ErrorOfWait(&message), "");
      EXPECT_FALSE(message);
    }
  });
}

// The peer needs nothing more from this rank.
TEST(PeerWatch, MessageThatCameBeforeItsPeerLeft_IsComplete) {
  RunGlooRanks(2, [](Comm& comm) {
    Watched rank(comm);
    int64_t value = 7 * comm.rank();
    PeerWatch::Message sent, to_come, never;
    if (comm.rank() == 0) to_come = rank.Receive(&value, sizeof(value));
    if (comm.rank() == 0) never = rank.Receive(&value, sizeof(value));
    comm.Barrier();
    if (comm.rank() == 1) {
      sent = rank.Send(&value, sizeof(value));
      EXPECT_EQ(rank.ErrorOfWait(&sent), "");
      return;
    }
    EXPECT_TRUE(rank.Loss().has_value());
    EXPECT_EQ(rank.ErrorOfWait(&to_come), "");
    EXPECT_EQ(value, 7);
    EXPECT_NE(rank.ErrorOfWait(&never), "");
  });
}

TEST(PeerWatch, PeerThatLeftBeforeItIsWatched_IsLostButNotItsMessages) {
  RunGlooRanks(2, [](Comm& comm) {
    const auto gloo = comm.process_group()->getBackend(c10::DeviceType::CPU);
    int64_t value = 7 * comm.rank();
    std::vector<at::Tensor> tensors = {at::from_blob(&value, {sizeof(value)}, at::kByte)};
    if (comm.rank() == 1) {
      gloo->send(tensors, 0, kData)->wait();
      return;
    }
    Watched rank(comm);
    c10::intrusive_ptr<c10d::Work> received = gloo->recv(tensors, 1, kData);
    ASSERT_NE(rank.Loss(), std::nullopt);

    PeerWatch late(gloo, {1}, kLateWatch);
    EXPECT_NE(late.LossOf(1, milliseconds(0)), std::nullopt);
    PeerWatch::Message message = late.Add(1, std::move(received));
    late.Wait(&message, minutes(5));
    EXPECT_EQ(value, 7);
  });
}

TEST(PeerWatch, PeerThatTakesItsTime_IsNotLost) {
  RunGlooRanks(2, [](Comm& comm) {
    Watched rank(comm);
    int64_t value = 7 * comm.rank();
    if (comm.rank() == 0) {
      PeerWatch::Message message = rank.Receive(&value, sizeof(value));
      EXPECT_EQ(rank.ErrorOfWait(&message), "");
      EXPECT_EQ(value, 7);
    } else {
      // Enough time for some looks of the other rank's thread.
      EXPECT_EQ(rank.watch().LossOf(0, milliseconds(200)), std::nullopt);
      PeerWatch::Message message = rank.Send(&value, sizeof(value));
      EXPECT_EQ(rank.ErrorOfWait(&message), "");
    }
    // No rank has left before this point.
    comm.Barrier();
  });
}

TEST(PeerWatch, SeveralPeers_TakeOneThread) {
  const auto threads = [] {
    const std::filesystem::directory_iterator all("/proc/self/task");
    return std::distance(begin(all), end(all));
  };
  RunGlooRanks(4, [&](Comm& comm) {
    comm.Barrier();
    const auto before = threads();
    comm.Barrier();
    const auto gloo = comm.process_group()->getBackend(c10::DeviceType::CPU);
    std::vector<int> peers;
    for (int peer = 0; peer < comm.size(); ++peer) {
      if (peer != comm.rank()) peers.push_back(peer);
    }
    const PeerWatch watch(gloo, peers, kWatch);
    comm.Barrier();
    EXPECT_EQ(threads() - before, comm.size());  // all ranks are in one process
    comm.Barrier();
  });
}

TEST(PeerWatch, MessageOfAPeerThatIsNotWatched_IsRefused) {
  RunGlooRanks(2, [](Comm& comm) {
    const auto gloo = comm.process_group()->getBackend(c10::DeviceType::CPU);
    PeerWatch none(gloo, {}, kWatch);
    char never;
    std::vector<at::Tensor> tensors = {at::from_blob(&never, {1}, at::kByte)};
    EXPECT_THROW(none.Add(1 - comm.rank(), gloo->recv(tensors, 1 - comm.rank(), kData)),
                 c10::Error);
    comm.Barrier();
  });
}

TEST(PeerWatch, Abort_EndsMessagesUnderWayAndLaterOnes) {
  RunGlooRanks(2, [](Comm& comm) {
    Watched rank(comm);
    EXPECT_EQ(rank.watch().LossOf(1 - comm.rank(), milliseconds(1)), std::nullopt);
    char never;
    PeerWatch::Message before = rank.Receive(&never, 1);
    PeerWatch::Message dropped = rank.Receive(&never, 1);
    dropped = PeerWatch::Message();
    comm.Barrier();
    rank.watch().Abort();
    PeerWatch::Message after = rank.Receive(&never, 1);
    for (PeerWatch::Message* const message : {&before, &after}) {
      EXPECT_EQ(rank.ErrorOfWait(message), "the operation was aborted");
    }
    // Before this point no rank has left, or closed a connection.
    comm.Barrier();
  });
}

}  // namespace
}  // namespace muster
