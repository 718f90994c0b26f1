#include "client/jobs/job_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/job_limits.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;

class JobFilesTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& content) {
    const std::string path = JoinPath(folder_.path(), name);
    EXPECT_TRUE(MakeDirectories(ParentPath(path)).ok());
    EXPECT_TRUE(WriteFileAtomically(path, content).ok());
    return path;
  }
  absl::Status Read(const std::vector<std::string>& paths) { return ReadJobFiles(paths, &files_); }

  const TestFolder folder_;
  std::vector<JobFile> files_;
};

TEST_F(JobFilesTest, FilesAndFolders_HaveTheirLastNames) {
  const std::string config = Write("deep/config.yaml", "lr: 1");
  const std::string run = Write("scripts/run.sh", "#!/bin/sh");
  Write("scripts/lib/.hidden", "");
  ASSERT_EQ(chmod(run.c_str(), 0755), 0);
  ASSERT_TRUE(Read({config, absl::StrCat(ParentPath(run), "/")}).ok());
  ASSERT_EQ(files_.size(), 3u);
  EXPECT_EQ(files_[0].path, "config.yaml");
  EXPECT_EQ(files_[0].content, "lr: 1");
  EXPECT_FALSE(files_[0].executable);
  EXPECT_EQ(files_[1].path, "scripts/lib/.hidden");
  EXPECT_EQ(files_[2].path, "scripts/run.sh");
  EXPECT_TRUE(files_[2].executable);
}

TEST_F(JobFilesTest, WhatIsNoFile_IsRefusedByItsPath) {
  const std::string file = Write("a", "x");
  const std::string link = JoinPath(folder_.path(), "link");
  ASSERT_EQ(symlink(file.c_str(), link.c_str()), 0);
  EXPECT_THAT(std::string(Read({link}).message()), HasSubstr("link is a symbolic link"));
  EXPECT_THAT(std::string(Read({folder_.path()}).message()), HasSubstr("link is a symbolic link"))
      << "in a folder, too";
  const std::string pipe = JoinPath(folder_.path(), "pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(std::string(Read({pipe}).message()), HasSubstr("is neither a file nor a folder"));
  EXPECT_TRUE(absl::IsNotFound(Read({JoinPath(folder_.path(), "none")})));
  EXPECT_THAT(std::string(Read({"."}).message()), HasSubstr("no name of its own"));
  files_.clear();
  EXPECT_THAT(std::string(Read({file, file}).message()), HasSubstr("same name as another file"));
}

TEST_F(JobFilesTest, Limits_AreRefusedAndSaid) {
  const std::string large = Write("large", std::string(kMaxFileBytes, 'x'));
  EXPECT_TRUE(Read({large}).ok());
  const absl::Status status = Read({Write("more", "y")});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(kMaxFileBytes, " bytes")));
  files_.clear();
  for (int i = 0; i <= kMaxFiles; ++i) Write(absl::StrCat("many/", i), "");
  EXPECT_THAT(std::string(Read({JoinPath(folder_.path(), "many")}).message()),
              HasSubstr(absl::StrCat("at most ", kMaxFiles)));
}

}  // namespace
}  // namespace muster::client
