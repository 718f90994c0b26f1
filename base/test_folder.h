#ifndef MUSTER_BASE_TEST_FOLDER_H_
#define MUSTER_BASE_TEST_FOLDER_H_

#include <stdlib.h>

#include <string>

#include "base/file.h"
#include "base/log.h"
#include "gtest/gtest.h"

namespace muster {

// A new, empty folder for a test, closed to other users. The destructor removes it. Ends the
// process if the folder cannot be made.
class TestFolder {
 public:
  TestFolder() : TestFolder(testing::TempDir()) {}
  // In /tmp, because the path of a socket has at most 107 bytes.
  static TestFolder ForSockets() { return TestFolder("/tmp"); }
  ~TestFolder() { EXPECT_TRUE(RemoveTree(path_).ok()) << path_; }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string Path(const std::string& name) const { return JoinPath(path_, name); }

 private:
  explicit TestFolder(const std::string& parent) : path_(JoinPath(parent, "muster-test-XXXXXX")) {
    MUSTER_CHECK(mkdtemp(path_.data()) != nullptr) << path_;
  }

  std::string path_;
};

// Returns a path in a folder that all tests of this process share, for files that only need a name
// of their own. They are not removed: the folder is that of the test run (TEST_TMPDIR), or in /tmp.
inline std::string TestPath(const std::string& name) {
  static const TestFolder* const folder = new TestFolder;
  return folder->Path(name);
}

}  // namespace muster

#endif  // MUSTER_BASE_TEST_FOLDER_H_
