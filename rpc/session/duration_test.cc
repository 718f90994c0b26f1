#include "rpc/session/duration.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace muster::rpc {
namespace {

TEST(Duration, AnyBytes_RoundTripsOrSaturates) {
  for (const absl::Duration duration : {absl::ZeroDuration(), absl::Milliseconds(1500),
                                        -absl::Milliseconds(1500), absl::Hours(9)}) {
    EXPECT_EQ(FromProto(ToProto(duration)), duration);
  }
  google::protobuf::Duration wild;
  wild.set_seconds(std::numeric_limits<int64_t>::max());
  wild.set_nanos(std::numeric_limits<int32_t>::min());
  EXPECT_GT(FromProto(wild), absl::Hours(1));
  ToProto(absl::InfiniteDuration());
}

TEST(RestOf, WhatHasWaited_HasLess_ButTimeForOthersToComeBack) {
  const auto rest = [](absl::Duration timeout, absl::Duration waited) {
    return RestOf(timeout, ToProto(waited));
  };
  EXPECT_EQ(rest(absl::Seconds(100), absl::ZeroDuration()), absl::Seconds(100));
  EXPECT_EQ(rest(absl::Seconds(100), absl::Seconds(60)), absl::Seconds(40));
  EXPECT_EQ(rest(absl::Seconds(100), absl::Hours(9)), absl::Seconds(3));
  EXPECT_EQ(rest(absl::Seconds(100), -absl::Hours(9)), absl::Seconds(100));
  EXPECT_EQ(rest(absl::Seconds(1), absl::Hours(9)), absl::Seconds(1));
  EXPECT_EQ(rest(absl::InfiniteDuration(), absl::Hours(9)), absl::InfiniteDuration());
  const auto hours = ToProto(absl::Hours(9));
  EXPECT_EQ(RestOf(absl::Seconds(100), hours, absl::Seconds(9)), absl::Seconds(9));
  EXPECT_EQ(RestOf(absl::Seconds(5), hours, absl::Seconds(9)), absl::Seconds(5));
}

}  // namespace
}  // namespace muster::rpc
