#include "worker/checkpoint/cached_pages.h"

#include <fcntl.h>
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

TEST(CachedPages, NothingMapped_HasNothing) {
  EXPECT_FALSE(CachedPages(-1, 100).Has(0, 1));
  EXPECT_FALSE(CachedPages(-1, 0).Has(0, 0));
}

}  // namespace
}  // namespace muster
