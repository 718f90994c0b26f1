#include "base/disk_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace muster {
namespace {

TEST(DiskError, WhatIsGone_IsNotTheSameAsWhatDoesNotExist) {
  for (const int error : {ENODEV, ENOTCONN, ESHUTDOWN}) {
    const absl::Status status = DiskError(error, "cannot read /data/x");
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::StartsWith("cannot read /data/x: "));
  }
  EXPECT_TRUE(absl::IsNotFound(DiskError(ENOENT, "")));
  EXPECT_TRUE(absl::IsPermissionDenied(DiskError(EACCES, "")));
}

}  // namespace
}  // namespace muster
