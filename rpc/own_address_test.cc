#include "rpc/own_address.h"

#include "gtest/gtest.h"

namespace muster::rpc {
namespace {

TEST(OwnAddressTest, WayToThisMachine_IsLoopback) {
  EXPECT_EQ(OwnAddressTowards({.host = "127.0.0.1", .port = 29400, .path = ""}), "127.0.0.1");
  EXPECT_EQ(OwnAddressTowards({.host = "", .port = 0, .path = "/run/muster.sock"}), "127.0.0.1");
}

// A link-local address without its interface has no route on any machine.
TEST(OwnAddressTest, NoRoute_IsEmptyAndNotThePeersAddress) {
  EXPECT_EQ(OwnAddressTowards({.host = "fe80::1", .port = 29400, .path = ""}), "");
  EXPECT_EQ(OwnAddressTowards({.host = "no number", .port = 29400, .path = ""}), "");
}

TEST(OwnAddressTest, IsOwnAddress_OfThisMachineOnly) {
  EXPECT_TRUE(IsOwnAddress("127.0.0.1"));
  EXPECT_FALSE(IsOwnAddress("192.0.2.1"));  // reserved for documentation
  EXPECT_FALSE(IsOwnAddress("no number"));
}

}  // namespace
}  // namespace muster::rpc
