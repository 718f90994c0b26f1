#include "agent/memory_holder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/held_memory.h"

namespace muster::agent {
namespace {

std::unique_ptr<MemoryHolder> HolderFor(const std::string& worker) {
  auto holder =
      MemoryHolder::Start([worker](pid_t pid) { return pid == getpid() ? worker : std::string(); });
  EXPECT_TRUE(holder.ok()) << holder.status();
  return *std::move(holder);
}

OwnedFd MemoryWith(const std::string& text) {
  auto fd = CreateHoldableMemory("test");
  EXPECT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(write(fd->get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return *std::move(fd);
}

std::string TextOf(int fd) {
  char text[64];
  const ssize_t size = pread(fd, text, sizeof(text), 0);
  return std::string(text, size < 0 ? 0 : size);
}

TEST(MemoryHolder, WhatAWorkerHandsOver_OutlivesItsDescriptor) {
  const auto holder = HolderFor("w0");
  ASSERT_TRUE(HoldMemory(holder->address(), 0, MemoryWith("first").get()).ok());
  ASSERT_TRUE(HoldMemory(holder->address(), 1, MemoryWith("second").get()).ok());
  ASSERT_TRUE(HoldMemory(holder->address(), 0, MemoryWith("third").get()).ok());
  const auto held = TakeHeldMemory(holder->address());
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_EQ(held->size(), 2u);
  EXPECT_EQ((*held)[0].worker_id, "w0");
  EXPECT_EQ(TextOf((*held)[0].fd.get()), "third");
  EXPECT_EQ((*held)[1].slot, 1);
  EXPECT_EQ(TextOf((*held)[1].fd.get()), "second");
}

TEST(MemoryHolder, Reentry_IsToldOfTheWorkerThatSaysIt) {
  std::vector<std::pair<std::string, Reentry>> told;
  MemoryHolder::Options options;
  options.on_reentry = [&](const std::string& worker, Reentry reentry) {
    told.emplace_back(worker, reentry);
  };
  const auto holder =
      *MemoryHolder::Start([](pid_t) { return std::string("w1"); }, std::move(options));
  EXPECT_TRUE(TellReentry(holder->address(), Reentry::kAble).ok());
  EXPECT_TRUE(TellReentry(holder->address(), Reentry::kReturned).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(TellReentry(holder->address(), static_cast<Reentry>(3))));
  const std::vector<std::pair<std::string, Reentry>> expected = {{"w1", Reentry::kAble},
                                                                 {"w1", Reentry::kReturned}};
  EXPECT_EQ(told, expected);
}

TEST(MemoryHolder, ReentryThatNobodyAsksFor_IsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(TellReentry(HolderFor("w0")->address(), Reentry::kAble)));
}

TEST(MemoryHolder, Strangers_NeitherGiveNorGet) {
  const auto holder = HolderFor("");
  EXPECT_TRUE(absl::IsPermissionDenied(TakeHeldMemory(holder->address()).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(HoldMemory(holder->address(), 0, MemoryWith("x").get())));
}

TEST(MemoryHolder, WhatCanShrinkOrIsNothing_IsNotHeld) {
  const auto holder = HolderFor("w0");
  const OwnedFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_TRUE(absl::IsInvalidArgument(HoldMemory(holder->address(), 0, unsealed.get())));
  EXPECT_TRUE(absl::IsInvalidArgument(HoldMemory(holder->address(), 0, -1)));
  EXPECT_TRUE(
      absl::IsInvalidArgument(HoldMemory(holder->address(), kHeldSlots, MemoryWith("x").get())));
  const auto held = TakeHeldMemory(holder->address());
  ASSERT_TRUE(held.ok());
  EXPECT_TRUE(held->empty());
}

TEST(MemoryHolder, APeerThatSaysNothing_DoesNotKeepOthersForLong) {
  const auto holder = HolderFor("w0");
  sockaddr_un address;
  const size_t size = AbstractAddress(holder->address(), &address);
  const OwnedFd silent(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(silent.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  EXPECT_TRUE(TakeHeldMemory(holder->address()).ok());
}

// As in the node's agent, for the agents of attempts, which come and go.
TEST(MemoryHolder, ClientsThatSpeakForWorkers_SeeTheirJobAlone) {
  std::string job = "one";
  MemoryHolder::Options options;
  options.client_of = [&](pid_t) -> std::optional<MemoryHolder::Client> {
    if (job.empty()) return std::nullopt;
    return MemoryHolder::Client{.job = job, .worker = ""};
  };
  options.address = absl::StrCat("muster-test-", getpid());
  const auto holder = MemoryHolder::Start(options);
  ASSERT_TRUE(holder.ok()) << holder.status();
  EXPECT_EQ((*holder)->address(), options.address);
  EXPECT_TRUE(absl::IsUnavailable(MemoryHolder::Start(options).status()));
  const auto hold = [&](const std::string& text, const std::string& worker) {
    return HoldMemory(options.address, 3, MemoryWith(text).get(), worker);
  };
  EXPECT_TRUE(absl::IsInvalidArgument(hold("whose", "")));
  ASSERT_TRUE(hold("of one", "w0").ok());
  ASSERT_TRUE(hold("of the other", "w1").ok());
  job = "two";
  EXPECT_TRUE(TakeHeldMemory(options.address)->empty());
  ASSERT_TRUE(hold("two's", "w0").ok());
  job = "one";
  const auto held = TakeHeldMemory(options.address);
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_EQ(held->size(), 2u);
  EXPECT_EQ((*held)[1].worker_id, "w1");
  EXPECT_EQ((*held)[1].slot, 3);
  EXPECT_EQ(TextOf((*held)[0].fd.get()), "of one");
  EXPECT_THAT((*holder)->Jobs(), testing::ElementsAre("one", "two"));
  (*holder)->Drop("one");
  EXPECT_TRUE(TakeHeldMemory(options.address)->empty());
  EXPECT_EQ((*holder)->Held("two").size(), 1u);
  job = "";
  EXPECT_TRUE(absl::IsPermissionDenied(TakeHeldMemory(options.address).status()));
}

TEST(MemoryHolder, WhatIsHeld_IsToldAndWhatIsAddedIsGiven) {
  std::vector<std::string> told;
  MemoryHolder::Options options;
  options.on_held = [&](const HeldMemory& piece) {
    told.push_back(absl::StrCat(piece.worker_id, " ", piece.slot, " ", TextOf(piece.fd.get())));
  };
  options.on_dropped = [&](const std::string& worker, int slot) {
    told.push_back(absl::StrCat(worker, " ", slot, " dropped"));
  };
  auto holder = MemoryHolder::Start([](pid_t) { return "w0"; }, options);
  ASSERT_TRUE(holder.ok()) << holder.status();
  (*holder)->Add("", {.worker_id = "w7", .slot = 1, .fd = MemoryWith("of an earlier attempt")});
  ASSERT_TRUE(HoldMemory((*holder)->address(), 0, MemoryWith("new").get()).ok());
  const auto held = TakeHeldMemory((*holder)->address());
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_EQ(held->size(), 2u);
  EXPECT_EQ((*held)[1].worker_id, "w7");
  EXPECT_EQ(TextOf((*held)[1].fd.get()), "of an earlier attempt");
  ASSERT_TRUE(DropHeldMemory((*holder)->address(), "w7", 1).ok());
  EXPECT_EQ(TakeHeldMemory((*holder)->address())->size(), 1u);
  holder->reset();
  EXPECT_THAT(told, testing::ElementsAre("w0 0 new", "w7 1 dropped"));
}

TEST(MemoryHolder, ItsEnd_FreesWhatItHeld) {
  auto holder = HolderFor("w0");
  const std::string address = holder->address();
  ASSERT_TRUE(HoldMemory(address, 0, MemoryWith("x").get()).ok());
  holder.reset();
  EXPECT_TRUE(absl::IsUnavailable(TakeHeldMemory(address).status()));
}

}  // namespace
}  // namespace muster::agent
