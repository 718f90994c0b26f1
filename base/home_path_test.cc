#include "base/home_path.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(WithHome, Tilde_IsTheHome) {
  EXPECT_EQ(WithHome("~", "/home/me"), "/home/me");
  EXPECT_EQ(WithHome("~/run", "/home/me"), "/home/me/run");
  EXPECT_EQ(WithHome("~/", "/home/me"), "/home/me/");
}

TEST(WithHome, OtherPaths_AreAsTheyAre) {
  for (const char* path : {"", "run", "/run", "./~/run", "~other/run", "run/~", "a~"}) {
    EXPECT_EQ(WithHome(path, "/home/me"), path);
    EXPECT_FALSE(BeginsAtHome(path)) << path;
  }
  EXPECT_EQ(WithHome("~/run", ""), "~/run");
}

TEST(WithHome, WithoutOneGiven_IsThatOfThisProcess) {
  ASSERT_EQ(setenv("HOME", "/home/mine", 1), 0);
  EXPECT_EQ(WithHome("~/run"), "/home/mine/run");
  EXPECT_EQ(WithHome("run"), "run");
  // The system knows one of every user, or none: then the path stays.
  ASSERT_EQ(unsetenv("HOME"), 0);
  EXPECT_NE(WithHome("~/run"), "/run");
}

}  // namespace
}  // namespace muster
