#include "base/secret_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::string Write(const std::string& name, const std::string& text, mode_t mode) {
  const std::string path = TestPath(name);
  EXPECT_TRUE(WriteFileAtomically(path, text).ok());
  EXPECT_EQ(chmod(path.c_str(), mode), 0);
  return path;
}

TEST(SecretFile, ClosedToOthers_IsRead) {
  const auto text = ReadSecretFile(Write("closed", "a secret", 0600), "key", "key", 100);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "a secret");
  EXPECT_EQ(*ReadSecretFile(Write("closed", "a secret", 0600), "key", "key", 3), "a s");
}

TEST(SecretFile, OthersCanAccess_IsRefusedWithTheRemedy) {
  for (const mode_t mode : {0604, 0602, 0644, 0606}) {
    const std::string path = Write("open", "a secret", mode);
    const auto text = ReadSecretFile(path, "checkpoint_key", "private key", 100);
    EXPECT_TRUE(absl::IsPermissionDenied(text.status())) << mode;
    EXPECT_THAT(std::string(text.status().message()),
                HasSubstr("checkpoint_key: other users can access the private key in '" + path));
    EXPECT_THAT(std::string(text.status().message()), HasSubstr("chmod 600"));
  }
}

TEST(SecretFile, NoFile_IsAnErrorThatNamesIt) {
  const std::string path = TestPath("nowhere");
  EXPECT_TRUE(absl::IsNotFound(ReadSecretFile(path, "key", "key", 100).status()));
  const TestFolder of_test;
  const auto folder = ReadSecretFile(of_test.path(), "key", "key", 100);
  EXPECT_TRUE(absl::IsInvalidArgument(folder.status())) << folder.status();
}

TEST(SecretFile, Written_IsClosedToOthersAndReplacesWhatWasThere) {
  const std::string path = Write("written", "old and longer", 0644);
  ASSERT_TRUE(WriteSecretFile(path, "new").ok());
  EXPECT_EQ(*ReadSecretFile(path, "key", "key", 100), "new");
  EXPECT_THAT(std::string(WriteSecretFile("/no/such/place", "x").message()),
              HasSubstr("/no/such/place"));
}

}  // namespace
}  // namespace muster
