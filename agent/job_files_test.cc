#include "agent/job_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

v1::JobSpec With(const std::string& path, const std::string& content, bool executable = false) {
  v1::JobSpec spec;
  v1::JobFile* const file = spec.add_files();
  file->set_path(path);
  file->set_content(content);
  file->set_sha256(Sha256(content));
  file->set_executable(executable);
  return spec;
}

TEST(WriteJobFiles, FilesAndFolders_AreThisUsersAlone) {
  const TestFolder folder;
  v1::JobSpec spec = With("a/b/run.sh", "#!/bin/sh\n", /*executable=*/true);
  spec.MergeFrom(With("a/config", std::string("\0\xff", 2)));
  ASSERT_TRUE(WriteJobFiles(spec, folder.path()).ok());
  EXPECT_EQ(*ReadFile(folder.path() + "/a/config"), std::string("\0\xff", 2));
  struct stat info;
  ASSERT_EQ(stat((folder.path() + "/a/b/run.sh").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  ASSERT_EQ(stat((folder.path() + "/a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

// A coordinator has already refused such paths.
TEST(WriteJobFiles, PathsThatLeadOut_AreRefused) {
  const TestFolder folder;
  for (const char* path : {"../x", "/tmp/x", "a/../../x", ""}) {
    EXPECT_TRUE(absl::IsInvalidArgument(WriteJobFiles(With(path, "x"), folder.path()))) << path;
  }
  const TestFolder other;
  ASSERT_EQ(symlink((other.path() + "/target").c_str(), (folder.path() + "/link").c_str()), 0);
  EXPECT_FALSE(WriteJobFiles(With("link", "x"), folder.path()).ok());
  EXPECT_FALSE(PathExists(other.path() + "/target"));
}

TEST(WriteJobFiles, OtherContent_IsNotWritten) {
  const TestFolder folder;
  v1::JobSpec spec = With("a", "x");
  spec.mutable_files(0)->set_content("y");
  EXPECT_TRUE(absl::IsDataLoss(WriteJobFiles(spec, folder.path())));
  EXPECT_FALSE(PathExists(folder.path() + "/a"));
}

}  // namespace
}  // namespace muster::agent
