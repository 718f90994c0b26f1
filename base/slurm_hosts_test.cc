#include "base/slurm_hosts.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(FirstSlurmHost, EveryForm) {
  EXPECT_EQ(FirstSlurmHost("gpu[03-05,9],login"), "gpu03");
  EXPECT_EQ(FirstSlurmHost("rack[2,4]n[1-8]"), "rack2n1");
  EXPECT_EQ(FirstSlurmHost("a,b"), "a");
  EXPECT_EQ(FirstSlurmHost("a"), "a");
  EXPECT_EQ(FirstSlurmHost("a[1-"), "");
  EXPECT_EQ(FirstSlurmHost(""), "");
}

}  // namespace
}  // namespace muster
