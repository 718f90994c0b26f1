#include "base/identity.h"

#include <fstream>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(Identity, HostName_IsThatOfTheKernel) {
  std::ifstream file("/proc/sys/kernel/hostname");
  std::string name;
  ASSERT_TRUE(std::getline(file, name));
  EXPECT_EQ(HostName(), name);
}

TEST(Identity, RandomIds_Differ) {
  std::set<uint64_t> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(RandomId());
  EXPECT_EQ(ids.size(), 1000u);
  EXPECT_EQ(ids.count(0), 0u);
}

}  // namespace
}  // namespace muster
