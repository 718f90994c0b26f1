#include "base/file_identity.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

TEST(FileIdentityAt, WhatTakesThePlace_HasAnotherOne) {
  const TestFolder folder;
  const std::string path = folder.Path("file");
  EXPECT_EQ(FileIdentityAt(path), std::nullopt);
  ASSERT_TRUE(WriteFileAtomically(path, "a").ok());
  const std::optional<std::string> first = FileIdentityAt(path);
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(FileIdentityAt(path), first);
  ASSERT_EQ(symlink(path.c_str(), folder.Path("link").c_str()), 0);
  EXPECT_EQ(FileIdentityAt(folder.Path("link")), first);
  std::filesystem::resize_file(path, 100);
  EXPECT_EQ(FileIdentityAt(path), first) << "it is the same file";
  ASSERT_TRUE(WriteFileAtomically(path, "a").ok());
  EXPECT_NE(FileIdentityAt(path), first);
  EXPECT_NE(FileIdentityAt(folder.path()), std::nullopt);
}

TEST(RetryUntilUnchanged, EndsWhenItDoesOrAfterThreeLooks) {
  for (const int stays : {1, 3, 4}) {
    int looks = 0;
    EXPECT_EQ(RetryUntilUnchanged([&] { return ++looks == stays; }), stays <= 3);
    EXPECT_EQ(looks, stays == 1 ? 1 : 3);
  }
}

}  // namespace
}  // namespace muster
