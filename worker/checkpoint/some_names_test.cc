#include "worker/checkpoint/some_names.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(SomeNames, MoreThanAreShown_AreCounted) {
  EXPECT_EQ(SomeNames({}, 2), "");
  EXPECT_EQ(SomeNames({"a", "b"}, 2), "a, b");
  EXPECT_EQ(SomeNames({"a", "b", "c", "d"}, 2), "a, b and 2 more");
}

}  // namespace
}  // namespace muster
