#ifndef MUSTER_BASE_TEST_HIDDEN_PATH_H_
#define MUSTER_BASE_TEST_HIDDEN_PATH_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "base/file.h"

namespace muster {

// Makes a file or folder unreadable while this object lives, as after EIO: it may be readable
// later. (A link to itself is an error of that kind even for root.) For tests.
class HiddenPath {
 public:
  explicit HiddenPath(const std::string& path) : path_(path) {
    EXPECT_EQ(rename(path_.c_str(), aside().c_str()), 0);
    EXPECT_EQ(symlink(BaseName(path_).c_str(), path_.c_str()), 0);
  }
  ~HiddenPath() {
    // The file returns in one step, so that a concurrent reader never finds it missing.
    if (rename(aside().c_str(), path_.c_str()) == 0) return;
    EXPECT_EQ(unlink(path_.c_str()), 0);
    EXPECT_EQ(rename(aside().c_str(), path_.c_str()), 0);
  }
  HiddenPath(const HiddenPath&) = delete;
  HiddenPath& operator=(const HiddenPath&) = delete;

 private:
  std::string aside() const { return path_ + "_"; }

  const std::string path_;
};

}  // namespace muster

#endif  // MUSTER_BASE_TEST_HIDDEN_PATH_H_
