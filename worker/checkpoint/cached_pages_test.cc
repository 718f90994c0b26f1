#include "worker/checkpoint/cached_pages.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(CachedPages, FileThatWasJustWritten_IsThereUpToItsEnd) {
  const TestFolder folder;
  const std::string path = folder.Path("file");
  std::ofstream(path) << std::string(100'000, 'x');
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const CachedPages pages(fd, 100'000);
  close(fd);
  EXPECT_TRUE(pages.Has(0, 100'000));
  EXPECT_TRUE(pages.Has(4'097, 10));
  EXPECT_TRUE(pages.Has(99'999, 1 << 20));
  EXPECT_FALSE(pages.Has(100'000, 1));
}

// The kernel reports that all of it is cached: it would be read through the cache, and fill that.
TEST(CachedPages, FileOfSomebodyElse_IsNotKnownToBeThere) {
  const TestFolder folder;
  const std::string path = folder.Path("file");
  std::ofstream(path) << std::string(100'000, 'x');
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_EXIT(
      {
        // Files of this user if it may become another one, otherwise those of root.
        const int fd = open(geteuid() == 0 ? path.c_str() : "/etc/passwd", O_RDONLY | O_CLOEXEC);
        if (geteuid() == 0) {
          ASSERT_EQ(seteuid(65534), 0);
        }
        const bool mine = CachedPages(fd, 100).Has(0, 1);
        _exit(fd >= 0 && !mine ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(CachedPages, FileOfSomebodyElseThatMayBeWritten_IsKnown) {
  const TestFolder folder;
  const std::string path = folder.Path("file");
  std::ofstream(path) << std::string(100'000, 'x');
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_EXIT(
      {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (geteuid() == 0) {
          ASSERT_EQ(seteuid(65534), 0);
        }
        _exit(CachedPages(fd, 100'000).Has(0, 100'000) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(CachedPages, NothingMapped_HasNothing) {
  EXPECT_FALSE(CachedPages(-1, 100).Has(0, 1));
  EXPECT_FALSE(CachedPages(-1, 0).Has(0, 0));
}

}  // namespace
}  // namespace muster
