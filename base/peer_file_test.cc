#include "base/peer_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

OwnedFd Memory() { return OwnedFd(memfd_create("test", MFD_CLOEXEC)); }

TEST(PeerFile, FileWithoutName_IsFoundByAnotherProcess) {
  const OwnedFd file = Memory();
  ASSERT_EQ(write(file.get(), "muster", 6), 6);
  const absl::StatusOr<std::string> place = PlaceOfFile(file.get());
  ASSERT_TRUE(place.ok()) << place.status();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const absl::StatusOr<OwnedFd> opened = OpenPeerFile(*place, O_RDONLY);
    char read[6] = {};
    const bool same = opened.ok() && pread(opened->get(), read, 6, 0) == 6 &&
                      std::string(read, sizeof read) == "muster";
    _exit(same ? 0 : 1);
  }
  int status = -1;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  EXPECT_EQ(status, 0);
}

TEST(PeerFile, DescriptorThatIsAnotherFileByNow_IsUnavailable) {
  const OwnedFd file = Memory();
  const absl::StatusOr<std::string> place = PlaceOfFile(file.get());
  ASSERT_TRUE(place.ok()) << place.status();
  ASSERT_EQ(dup2(Memory().get(), file.get()), file.get());
  const absl::StatusOr<OwnedFd> opened = OpenPeerFile(*place, O_RDONLY);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kUnavailable) << opened.status();
  EXPECT_THAT(opened.status().message(), HasSubstr("is not the file that its process shared"));
}

TEST(PeerFile, ClosedDescriptor_IsNotFound) {
  OwnedFd file = Memory();
  const absl::StatusOr<std::string> place = PlaceOfFile(file.get());
  ASSERT_TRUE(place.ok()) << place.status();
  file = OwnedFd();
  const absl::StatusOr<OwnedFd> opened = OpenPeerFile(*place, O_RDONLY);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kNotFound) << opened.status();
  EXPECT_THAT(opened.status().message(), HasSubstr("cannot open another process's /proc/"));
}

TEST(PeerFile, TextThatIsNoPlace_IsRefused) {
  for (const char* text : {"", "/proc/1/fd/3", "/etc/passwd 1:2:3", "y"}) {
    EXPECT_EQ(OpenPeerFile(text, O_RDONLY).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
  EXPECT_FALSE(PlaceOfFile(-1).ok());
}

}  // namespace
}  // namespace muster
