#include "rpc/status.h"

#include <string>

#include "gtest/gtest.h"

namespace muster::rpc {
namespace {

v1::ErrorDetail Detail() {
  v1::ErrorDetail detail;
  detail.set_reason(v1::ERROR_REASON_STALE_GENERATION);
  detail.set_current_generation(7);
  detail.add_missing_ranks(3);
  detail.add_culprits()->set_host("node-3");
  return detail;
}

TEST(Status, EveryCode_SurvivesBothWays) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "what happened");
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status) << code;
    if (status.ok()) continue;
    EXPECT_EQ(FromOpError(ToOpError(status)), status) << code;
  }
}

TEST(Status, Detail_TravelsInGrpcAndOpError) {
  const absl::Status status = WithDetail(absl::FailedPreconditionError("stale"), Detail());
  for (const absl::Status& back : {FromGrpc(ToGrpc(status)), FromOpError(ToOpError(status)),
                                   FromGrpc(OpErrorToGrpc(ToOpError(status)))}) {
    EXPECT_EQ(back.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(back.message(), "stale");
    EXPECT_EQ(GetReason(back), v1::ERROR_REASON_STALE_GENERATION);
    EXPECT_EQ(GetDetail(back)->current_generation(), 7);
    EXPECT_EQ(GetDetail(back)->culprits(0).host(), "node-3");
  }
}

TEST(Status, NoDetail_HasNoReason) {
  EXPECT_FALSE(GetDetail(absl::InternalError("x")).has_value());
  EXPECT_EQ(GetReason(absl::InternalError("x")), v1::ERROR_REASON_UNSPECIFIED);
}

TEST(Status, BareCancelledOrUnavailable_IsLost) {
  EXPECT_TRUE(IsLost(absl::UnavailableError("x")));
  EXPECT_TRUE(IsLost(absl::CancelledError("CANCELLED")));
  EXPECT_FALSE(IsLost(WithDetail(absl::CancelledError("x"), Detail())));
  EXPECT_FALSE(IsLost(absl::InternalError("x")));
  EXPECT_FALSE(IsLost(absl::OkStatus()));
}

TEST(BarrierVerdict, ReasonsOfABarriersEnd_AreTold) {
  EXPECT_EQ(BarrierVerdict(v1::ERROR_REASON_BARRIER_TIMEOUT), v1::BARRIER_STATE_TIMED_OUT);
  EXPECT_EQ(BarrierVerdict(v1::ERROR_REASON_RANK_FAILED), v1::BARRIER_STATE_FAILED);
  EXPECT_EQ(BarrierVerdict(v1::ERROR_REASON_CANCELLED_BY_PEER), v1::BARRIER_STATE_CANCELLED);
  EXPECT_EQ(BarrierVerdict(v1::ERROR_REASON_DESYNC), v1::BARRIER_STATE_DESYNC);
  EXPECT_EQ(BarrierVerdict(v1::ERROR_REASON_RESULT_TOO_LARGE), v1::BARRIER_STATE_PASSED);
  EXPECT_EQ(BarrierVerdict(v1::ERROR_REASON_OVERLOADED), v1::BARRIER_STATE_UNSPECIFIED);
}

TEST(Status, OkWithDetail_StaysOk) { EXPECT_TRUE(WithDetail(absl::OkStatus(), Detail()).ok()); }

TEST(Status, UnknownCodeOfPeer_BecomesUnknown) {
  v1::OpError error;
  error.set_code(4711);
  EXPECT_EQ(FromOpError(error).code(), absl::StatusCode::kUnknown);
  error.set_code(-1);
  EXPECT_EQ(FromOpError(error).code(), absl::StatusCode::kUnknown);
  error.set_code(0);  // although the operation failed
  EXPECT_EQ(FromOpError(error).code(), absl::StatusCode::kUnknown);
}

TEST(Status, GarbageDetails_AreIgnored) {
  const absl::Status status =
      FromGrpc(grpc::Status(grpc::StatusCode::ABORTED, "m", std::string("\xff\xff\x01", 3)));
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(GetDetail(status).has_value());
}

TEST(ToOpError, MessageThatIsNotUtf8_CanBeParsed) {
  const v1::OpError error = ToOpError(absl::NotFoundError("caf\xe9:\nno such file"));
  v1::OpError received;
  ASSERT_TRUE(received.ParseFromString(error.SerializeAsString()));
  EXPECT_EQ(received.message(), "caf\\xe9:\\nno such file");
  EXPECT_EQ(ToOpError(absl::NotFoundError("caf\xc3\xa9:\nno")).message(), "caf\xc3\xa9:\nno");
}

TEST(Status, HugeDetail_FitsTrailersAndKeepsTheReason) {
  v1::ErrorDetail detail = Detail();
  for (int i = 0; i < 10'000; ++i) {
    detail.add_missing_ranks(i);
    v1::Culprit* culprit = detail.add_culprits();
    culprit->set_rank(i);
    culprit->set_native_stack(std::string(2000, 's'));
  }
  const std::string message(10'000, 'm');
  const grpc::Status grpc_status = ToGrpc(WithDetail(absl::DeadlineExceededError(message), detail));
  EXPECT_LE(grpc_status.error_details().size() + grpc_status.error_message().size(), 7000u);
  const absl::Status back = FromGrpc(grpc_status);
  EXPECT_EQ(GetReason(back), v1::ERROR_REASON_STALE_GENERATION);
  EXPECT_GE(GetDetail(back)->culprits_size(), 1);
  EXPECT_EQ(GetDetail(back)->culprits(0).host(), "node-3");
}

// gRPC writes bytes that are not plain text as three: what counts is the size of the trailer.
TEST(ToGrpc, MessageOfAnyBytes_FitsItsTrailer) {
  const auto trailer_bytes = [](absl::string_view message) {
    const grpc::Status status = ToGrpc(absl::UnavailableError(message));
    size_t bytes = 0;
    for (const char c : status.error_message()) bytes += c >= ' ' && c <= '~' && c != '%' ? 1 : 3;
    return bytes;
  };
  EXPECT_EQ(trailer_bytes(std::string(2048, 'x')), 2048u);
  EXPECT_EQ(trailer_bytes(std::string(2049, 'x')), 2048u);
  EXPECT_EQ(trailer_bytes(std::string(682, '%')), 2046u);
  EXPECT_LE(trailer_bytes(std::string(683, '%')), 2048u);
  std::string umlauts;
  for (int i = 0; i < 3000; ++i) umlauts += "\xC3\xBC";
  EXPECT_LE(trailer_bytes(umlauts), 2048u);
  const std::string cut(ToGrpc(absl::UnavailableError(umlauts)).error_message());
  EXPECT_EQ((cut.size() - 3) % 2, 0u);  // no half character before the dots
  EXPECT_EQ(cut.substr(cut.size() - 3), "...");
}

TEST(RetryAfter, WhatIsAsked_WithinReason) {
  const auto asking = [](int64_t seconds) {
    v1::ErrorDetail detail;
    detail.mutable_retry_after()->set_seconds(seconds);
    return RetryAfter(WithDetail(absl::UnavailableError("later"), detail));
  };
  EXPECT_EQ(asking(3), absl::Seconds(3));
  EXPECT_EQ(asking(-3), absl::ZeroDuration());
  EXPECT_EQ(asking(INT64_MAX), absl::Minutes(1));
  EXPECT_EQ(RetryAfter(absl::UnavailableError("later")), absl::ZeroDuration());
}

}  // namespace
}  // namespace muster::rpc
