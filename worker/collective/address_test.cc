#include "worker/collective/address.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(AddressTowards, NumericAddresses_GiveTheInterfaceThatRoutesThere) {
  EXPECT_EQ(AddressTowards("127.0.0.1:29400").value(), "127.0.0.1");
  EXPECT_EQ(AddressTowards("127.9.8.7:1").value(), "127.0.0.1");
}

TEST(AddressTowards, BadAddresses_NameThemselves) {
  EXPECT_EQ(AddressTowards("nowhere").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AddressTowards(":5").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(AddressTowards("host.invalid:5").status().message()),
              HasSubstr("host.invalid"));
}

TEST(NumericAddress, NumbersAndUnixSocketsStay) {
  EXPECT_EQ(NumericAddress("127.0.0.1:29400").value(), "127.0.0.1:29400");
  EXPECT_EQ(NumericAddress("[::1]:5").value(), "[::1]:5");
  EXPECT_EQ(NumericAddress("unix:/run/muster.sock").value(), "unix:/run/muster.sock");
  EXPECT_FALSE(NumericAddress("127.0.0.1").ok());
  EXPECT_THAT(std::string(NumericAddress("host.invalid:5").status().message()),
              HasSubstr("host.invalid"));
}

}  // namespace
}  // namespace muster
