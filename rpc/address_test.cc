#include "rpc/address.h"

#include <random>
#include <string>

#include "base/mutate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::rpc {
namespace {

using ::testing::HasSubstr;

TEST(ParseAddress, NumericForms_AreReadAndWrittenTheSame) {
  for (const char* text :
       {"127.0.0.1:29400", "[::1]:0", "10.1.2.3:65535", "unix:/tmp/x.sock", "0.0.0.0:1"}) {
    const auto address = ParseAddress(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), text);
  }
  EXPECT_EQ(ParseAddress("localhost:7")->ToString(), "127.0.0.1:7");
}

TEST(ParseAddress, Bad_NamesTheFault) {
  EXPECT_THAT(std::string(ParseAddress("127.0.0.1").status().message()), HasSubstr("no port"));
  EXPECT_THAT(std::string(ParseAddress("127.0.0.1:70000").status().message()), HasSubstr("70000"));
  EXPECT_THAT(std::string(ParseAddress("127.0.0.1:-1").status().message()), HasSubstr("'-1'"));
  EXPECT_THAT(std::string(ParseAddress("127.0.0.1:").status().message()), HasSubstr("port"));
  EXPECT_THAT(std::string(ParseAddress("node7:29400").status().message()),
              HasSubstr("'node7' is not numeric"));
  EXPECT_THAT(std::string(ParseAddress("::1:29400").status().message()), HasSubstr("not numeric"));
  EXPECT_FALSE(ParseAddress("").ok());
  EXPECT_FALSE(ParseAddress("unix:").ok());
  EXPECT_FALSE(ParseAddress("unix:" + std::string(200, 'a')).ok());
}

TEST(ParseAddress, MutatedTexts_AreReadOrRefused) {
  const char* const samples[] = {"127.0.0.1:29400", "[fe80::1]:29400", "localhost:1",
                                 "unix:/run/muster.sock"};
  std::mt19937_64 random(20261121);
  int read = 0;
  for (int round = 0; round < 20'000; ++round) {
    const auto address = ParseAddress(Mutate(samples[round % 4], random));
    if (!address.ok()) continue;
    ++read;
    ASSERT_EQ(ParseAddress(address->ToString())->ToString(), address->ToString());
  }
  EXPECT_GT(read, 1000);
}

TEST(Address, Loopback_IsKnown) {
  EXPECT_TRUE(ParseAddress("127.8.9.1:1")->is_loopback());
  EXPECT_TRUE(ParseAddress("[::1]:1")->is_loopback());
  EXPECT_TRUE(ParseAddress("unix:/a")->is_loopback());
  EXPECT_FALSE(ParseAddress("0.0.0.0:1")->is_loopback());
  EXPECT_FALSE(ParseAddress("[::]:1")->is_loopback());
  EXPECT_FALSE(ParseAddress("10.0.0.1:1")->is_loopback());
}

}  // namespace
}  // namespace muster::rpc
