#include "base/held_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>

namespace muster {
namespace {

struct Pair {
  Pair() {
    int fds[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    here = OwnedFd(fds[0]);
    there = OwnedFd(fds[1]);
  }
  OwnedFd here, there;
};

TEST(HeldMemory, NewMemory_GrowsAndDoesNotShrink) {
  const auto fd = CreateHoldableMemory("test");
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_TRUE(CheckHoldableMemory(fd->get()).ok());
  EXPECT_EQ(ftruncate(fd->get(), 8192), 0);
  EXPECT_NE(ftruncate(fd->get(), 4096), 0);
}

TEST(HeldMemory, OtherFiles_AreRefused) {
  const OwnedFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckHoldableMemory(unsealed.get())));
  Pair pair;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckHoldableMemory(pair.here.get())));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckHoldableMemory(-1)));
}

TEST(HeldMemory, Message_ArrivesWithItsDescriptor) {
  Pair pair;
  const auto fd = CreateHoldableMemory("test");
  ASSERT_TRUE(fd.ok());
  HeldMemoryMessage message;
  message.kind = HeldMemoryMessage::kHold;
  message.slot = 1;
  message.set_text(std::string(1000, 'x'));
  ASSERT_TRUE(SendHeldMemoryMessage(pair.here.get(), message, fd->get()).ok());
  OwnedFd received;
  const auto got = ReceiveHeldMemoryMessage(pair.there.get(), &received);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->slot, 1);
  EXPECT_EQ(std::string(got->text), std::string(sizeof(message.text) - 1, 'x'));
  EXPECT_TRUE(CheckHoldableMemory(received.get()).ok());
}

TEST(HeldMemory, PacketsThatAreNoMessages_AreRefused) {
  std::mt19937 random(1);
  HeldMemoryMessage good;
  good.kind = HeldMemoryMessage::kTake;
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    Pair pair;
    std::string bytes(reinterpret_cast<const char*>(&good), sizeof(good));
    bytes[random() % 16] = static_cast<char>(random());
    if (i % 3 == 0) bytes.resize(1 + random() % bytes.size());
    if (i % 5 == 0) bytes.append(random() % 9, 'y');
    ASSERT_EQ(send(pair.here.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    OwnedFd fd;
    const auto got = ReceiveHeldMemoryMessage(pair.there.get(), &fd);
    if (got.ok()) {
      EXPECT_TRUE(IsWellFormed(*got));
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(got.status())) << got.status();
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(HeldMemory, NobodyListens_IsUnavailable) {
  EXPECT_TRUE(absl::IsUnavailable(TakeHeldMemory("muster-memory-nobody").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TakeHeldMemory(std::string(200, 'x')).status()));
}

}  // namespace
}  // namespace muster
