#include "base/identity.h"

#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include "base/test_system_calls.h"
#include "gtest/gtest.h"

namespace {
const char* g_name = nullptr;  // instead of the kernel's
}  // namespace

extern "C" int gethostname(char* name, size_t size) noexcept {
  if (g_name != nullptr) return std::snprintf(name, size, "%s", g_name) < 0;
  static const auto real = muster::RealCall<int (*)(char*, size_t)>("gethostname");
  return real(name, size);
}
// The function that a compiler calls under _FORTIFY_SOURCE if it cannot prove the size right.
extern "C" int __gethostname_chk(char* name, size_t size, size_t) noexcept {
  return gethostname(name, size);
}

namespace muster {
namespace {

TEST(Identity, HostName_IsThatOfTheKernel) {
  std::ifstream file("/proc/sys/kernel/hostname");
  std::string name;
  ASSERT_TRUE(std::getline(file, name));
  EXPECT_EQ(HostName(), name);
}

// The kernel takes any bytes, but the messages that say where a process runs take only UTF-8.
TEST(Identity, HostNameThatIsNotUtf8_IsWrittenInAscii) {
  g_name = "caf\xe9-7";
  EXPECT_EQ(HostName(), "caf\\xe9-7");
  g_name = nullptr;
}

TEST(Identity, RandomIds_Differ) {
  std::set<uint64_t> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(RandomId());
  EXPECT_EQ(ids.size(), 1000u);
  EXPECT_EQ(ids.count(0), 0u);
}

}  // namespace
}  // namespace muster
