#include "agent/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

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

TEST(OpenMappedFile, FilesOnly) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("file"), "text").ok());
  ASSERT_EQ(mkfifo(folder.Path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(Read(getpid(), folder.Path("file")), "text");
  EXPECT_EQ(Read(getpid(), folder.Path("fifo")), "none");
  EXPECT_EQ(Read(getpid(), folder.Path("nothing")), "none");
  EXPECT_EQ(Read(getpid(), "/dev/zero"), "none");
}

TEST(OpenMappedFile, OtherMounts_HaveTheirOwnFiles) {
  const TestFolder ours, its;
  ASSERT_TRUE(WriteFileAtomically(ours.Path("both"), "ours").ok());
  ASSERT_TRUE(WriteFileAtomically(ours.Path("only"), "ours").ok());
  ASSERT_TRUE(WriteFileAtomically(its.Path("both"), "its").ok());
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const bool moved =
        unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
        mount(its.Path("").c_str(), ours.Path("").c_str(), nullptr, MS_BIND, nullptr) == 0;
    const char byte = moved ? 'x' : '-';
    if (write(ready[1], &byte, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  if (byte == 'x') {  // else there are no namespaces to be had here
    EXPECT_EQ(Read(pid, ours.Path("both")), "its");
    EXPECT_EQ(Read(pid, ours.Path("only")), "none");
    EXPECT_EQ(Read(getpid(), ours.Path("both")), "ours");
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

}  // namespace
}  // namespace muster::agent
