#include "worker/train/guard.h"

#include <new>
#include <stdexcept>
#include <string>

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(Guard, EachException_HasItsCode) {
  EXPECT_TRUE(Guard([] {}).ok());
  EXPECT_TRUE(
      absl::IsUnavailable(Guard([] { TORCH_CHECK_WITH(DistBackendError, false, "peer"); })));
  EXPECT_TRUE(
      absl::IsUnavailable(Guard([] { TORCH_CHECK_WITH(DistNetworkError, false, "peer"); })));
  EXPECT_TRUE(
      absl::IsResourceExhausted(Guard([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "full"); })));
  EXPECT_TRUE(absl::IsResourceExhausted(Guard([] { throw std::bad_alloc(); })));
  EXPECT_TRUE(absl::IsInvalidArgument(Guard([] { TORCH_CHECK_VALUE(false, "bad"); })));
  EXPECT_TRUE(absl::IsInvalidArgument(Guard([] { TORCH_CHECK_INDEX(false, "bad"); })));
  EXPECT_TRUE(absl::IsInvalidArgument(Guard([] { TORCH_CHECK_TYPE(false, "bad"); })));
  EXPECT_TRUE(absl::IsUnimplemented(Guard([] { TORCH_CHECK_NOT_IMPLEMENTED(false, "no"); })));
  EXPECT_TRUE(absl::IsInternal(Guard([] { throw std::runtime_error("x"); })));
  EXPECT_TRUE(absl::IsInternal(Guard([] { throw 5; })));
  EXPECT_EQ(Guard([] { throw std::string("x"); })
                .message()
                .find("an exception that is not derived from std::exception, of type std::"),
            0u);
  const absl::Status status = Guard([] { TORCH_CHECK(false, "what ", 3); });
  EXPECT_TRUE(absl::IsInternal(status));
  EXPECT_EQ(status.message(), "what 3");
}

TEST(Guard, StatusThroughAnException_ComesBackTheSame) {
  absl::Status status = absl::AbortedError("generation 4 is stale");
  status.SetPayload("detail", absl::Cord("x"));
  EXPECT_EQ(Guard([&] { ThrowIfError(status); }), status);
  EXPECT_TRUE(Guard([] { ThrowIfError(absl::OkStatus()); }).ok());
  try {
    ThrowIfError(status);
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("generation 4 is stale"), std::string::npos);
  }
}

}  // namespace
}  // namespace muster
