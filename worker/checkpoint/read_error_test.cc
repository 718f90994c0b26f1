#include "worker/checkpoint/read_error.h"

#include <errno.h>
#include <gtest/gtest.h>

#include <cstring>

namespace muster {
namespace {

TEST(ReadErrorTest, WhatDoesNotExist_IsNotFound) {
  const absl::Status status = ReadError(ENOENT, "cannot open a");
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(status.message(), "cannot open a: No such file or directory");
}

// Otherwise a load would skip a checkpoint that may be whole, or begin from scratch.
TEST(ReadErrorTest, AnyOtherError_IsNoVerdictAboutTheFile) {
  for (int error = 1; error < 134; ++error) {
    if (error == ENOENT || error == ENAMETOOLONG) continue;
    SCOPED_TRACE(strerror(error));
    const absl::Status status = ReadError(error, "cannot read a");
    EXPECT_FALSE(status.ok() || absl::IsNotFound(status) || absl::IsDataLoss(status) ||
                 absl::IsUnimplemented(status) || absl::IsInvalidArgument(status))
        << status;
  }
}

TEST(ReadErrorTest, ErrorsOfOneDisk_AreReadErrors) {
  for (const int error : {EIO, ESTALE, EACCES, EPERM, ENODEV, ENXIO, ENOTCONN, ESHUTDOWN, EHOSTDOWN,
                          ETIMEDOUT, EOPNOTSUPP, EINVAL, ELOOP}) {
    SCOPED_TRACE(strerror(error));
    EXPECT_TRUE(IsReadError(ReadError(error, "cannot read a")));
  }
  EXPECT_FALSE(IsReadError(absl::OkStatus()));
  EXPECT_FALSE(IsReadError(absl::DataLossError("a: is damaged")));
  EXPECT_FALSE(IsReadError(absl::InvalidArgumentError("another model")));
  EXPECT_FALSE(IsReadError(ReadError(ENOMEM, "cannot map a")));
}

TEST(ReadErrorTest, FileWithoutAName_GetsThatOfTheFileItStandsFor) {
  const absl::Status status = absl::DataLossError("/proc/self/fd/7: is damaged; see /proc/self/fd");
  EXPECT_EQ(Renamed(status, "/proc/self/fd/7", "dir/model.safetensors"),
            absl::DataLossError("dir/model.safetensors: is damaged; see /proc/self/fd"));
  EXPECT_EQ(Renamed(status, "", "dir/model.safetensors"), status);
  EXPECT_TRUE(Renamed(absl::OkStatus(), "a", "b").ok());
}

}  // namespace
}  // namespace muster
