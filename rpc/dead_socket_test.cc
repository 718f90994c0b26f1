#include "rpc/dead_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

#include "base/owned_fd.h"
#include "base/test_folder.h"

namespace muster::rpc {
namespace {

class DeadSocketTest : public ::testing::Test {
 protected:
  OwnedFd Bind() {
    OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path, path_.c_str(), path_.size() + 1);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
    return fd;
  }
  absl::Status Remove(absl::FunctionRef<void()> wait = [] {}) {
    Address address;
    address.path = path_;
    return RemoveDeadSocket(address, wait);
  }
  bool IsThere() const { return access(path_.c_str(), F_OK) == 0; }

  const TestFolder folder_ = TestFolder::ForSockets();
  const std::string path_ = folder_.Path("s");
};

TEST_F(DeadSocketTest, NothingThere_IsFine) { EXPECT_TRUE(Remove().ok()); }

TEST_F(DeadSocketTest, DeadOne_IsRemoved) {
  Bind().Close();
  EXPECT_TRUE(Remove().ok());
  EXPECT_FALSE(IsThere());
}

TEST_F(DeadSocketTest, OneThatIsAboutToListen_IsLeftAlone) {
  const OwnedFd server = Bind();
  const absl::Status status = Remove([&] { EXPECT_EQ(listen(server.get(), 1), 0); });
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_TRUE(IsThere());
}

// Some file systems give the inode number of a removed file to the next one.
TEST_F(DeadSocketTest, OneThatHasTakenThePlaceOfTheDeadOne_IsLeftAlone) {
  Bind().Close();
  OwnedFd other;
  const absl::Status status = Remove([&] {
    ASSERT_EQ(unlink(path_.c_str()), 0);
    other = Bind();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(IsThere());
}

TEST_F(DeadSocketTest, OneThatHasGoneMeanwhile_IsFine) {
  Bind().Close();
  EXPECT_TRUE(Remove([&] { unlink(path_.c_str()); }).ok());
}

TEST_F(DeadSocketTest, OtherFiles_AreLeftAlone) {
  std::ofstream(path_) << "text";
  EXPECT_EQ(Remove().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(IsThere());
}

}  // namespace
}  // namespace muster::rpc
