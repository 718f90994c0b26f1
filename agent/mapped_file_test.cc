#include "agent/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <string>

#include "absl/functional/function_ref.h"
#include "base/file.h"
#include "base/test_folder.h"

namespace muster::agent {
namespace {

std::string Read(pid_t pid, const std::string& path) {
  const int fd = OpenMappedFile(pid, path);
  if (fd < 0) return "none";
  EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  char text[16];
  const ssize_t size = read(fd, text, sizeof(text));
  close(fd);
  return std::string(text, size < 0 ? 0 : static_cast<size_t>(size));
}

TEST(OpenMappedFile, OtherThanRegularFiles_AreNotOpened) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("file"), "text").ok());
  ASSERT_EQ(mkfifo(folder.Path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(Read(getpid(), folder.Path("file")), "text");
  EXPECT_EQ(Read(getpid(), folder.Path("fifo")), "none");
  EXPECT_EQ(Read(getpid(), folder.Path("nothing")), "none");
  EXPECT_EQ(Read(getpid(), "/dev/zero"), "none");
}

// A process with its own mounts, which `prepare`, run in it, has changed.
class Elsewhere {
 public:
  explicit Elsewhere(absl::FunctionRef<bool()> prepare) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const bool prepared = unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && prepare();
      const char byte = prepared ? 'x' : '-';
      if (write(ready[1], &byte, 1) != 1) _exit(1);
      for (;;) pause();
    }
    close(ready[1]);
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    prepared_ = byte == 'x';
  }
  ~Elsewhere() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Elsewhere(const Elsewhere&) = delete;
  Elsewhere& operator=(const Elsewhere&) = delete;

  bool prepared() const { return prepared_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  bool prepared_ = false;
};

void NotTested() { std::cerr << "not tested: no user and mount namespaces are to be had here\n"; }

TEST(OpenMappedFile, OtherMounts_HaveTheirOwnFiles) {
  const TestFolder ours, its;
  ASSERT_TRUE(WriteFileAtomically(ours.Path("both"), "ours").ok());
  ASSERT_TRUE(WriteFileAtomically(ours.Path("only"), "ours").ok());
  ASSERT_TRUE(WriteFileAtomically(its.Path("both"), "its").ok());
  const Elsewhere other([&] {
    return mount(its.path().c_str(), ours.path().c_str(), nullptr, MS_BIND, nullptr) == 0;
  });
  if (!other.prepared()) return NotTested();
  EXPECT_EQ(Read(other.pid(), ours.Path("both")), "its");
  EXPECT_EQ(Read(other.pid(), ours.Path("only")), "none");
  EXPECT_EQ(Read(getpid(), ours.Path("both")), "ours");
}

// Like `unshare -rm chroot`.
TEST(OpenMappedFile, ChrootAmongMountsOfItsOwn_IsFoundByThePathOutsideOfIt) {
  const TestFolder root;
  ASSERT_TRUE(WriteFileAtomically(root.Path("file"), "inside").ok());
  const Elsewhere other([&] { return chroot(root.path().c_str()) == 0; });
  if (!other.prepared()) return NotTested();
  EXPECT_EQ(Read(other.pid(), root.Path("file")), "inside");
  EXPECT_EQ(Read(other.pid(), root.path() + "-other/file"), "none");
}

TEST(OpenMappedFile, LinkOfAChroot_DoesNotLeadOutOfIt) {
  const TestFolder root, outside;
  ASSERT_TRUE(WriteFileAtomically(outside.Path("file"), "outside").ok());
  ASSERT_TRUE(WriteFileAtomically(root.Path("file"), "inside").ok());
  ASSERT_EQ(symlink("/file", root.Path("link").c_str()), 0);
  ASSERT_EQ(symlink(outside.Path("file").c_str(), root.Path("out").c_str()), 0);
  const Elsewhere other([&] { return chroot(root.path().c_str()) == 0; });
  if (!other.prepared()) return NotTested();
  EXPECT_EQ(Read(other.pid(), root.Path("link")), "inside");
  EXPECT_EQ(Read(other.pid(), root.Path("out")), "none");
}

}  // namespace
}  // namespace muster::agent
