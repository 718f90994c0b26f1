#include "rpc/utf8_check.h"

#include <gtest/gtest.h>

#include <string>

#include "proto/muster/v1/session.pb.h"
#include "rpc/status.h"

namespace muster::rpc {
namespace {

TEST(CheckUtf8, FieldInsideARepeatedField_IsNamedWithItsText) {
  v1::Op op;
  v1::ExitCause& cause = *op.mutable_report_exit()->mutable_cause();
  cause.add_last_log_lines("caf\xc3\xa9");
  EXPECT_TRUE(CheckUtf8(op).ok());
  cause.add_last_log_lines("caf\xe9");
  const absl::Status status = CheckUtf8(op);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "report_exit.cause.last_log_lines[1] is not UTF-8: \"caf\\xe9\"");
  EXPECT_EQ(GetDetail(status)->reason(), v1::ERROR_REASON_BAD_FIELD);
  EXPECT_EQ(GetDetail(status)->field(), "report_exit.cause.last_log_lines[1]");
}

TEST(CheckUtf8, FieldInsideARepeatedMessage_IsNamedWithItsPlace) {
  v1::Op op;
  op.mutable_sync_node()->mutable_info()->add_labels()->set_name("a");
  op.mutable_sync_node()->mutable_info()->add_labels()->set_value("\xff");
  EXPECT_EQ(GetDetail(CheckUtf8(op))->field(), "sync_node.info.labels[1].value");
}

TEST(CheckUtf8, FieldOfBytes_MayHaveAny) {
  v1::Op op;
  op.mutable_arrive()->set_payload("\xff");
  EXPECT_TRUE(CheckUtf8(op).ok());
}

// The check and the parser must agree on what is valid.
TEST(CheckUtf8, WhatItRefuses_TheParserRefuses) {
  for (const std::string text : {"plain", "\xc3\xa9", "\xf0\x9f\x99\x82", "\xff", "\xc3",
                                 "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80"}) {
    v1::StackReply reply;
    reply.set_native_stack(text);
    EXPECT_EQ(CheckUtf8(reply).ok(), v1::StackReply().ParseFromString(reply.SerializeAsString()))
        << testing::PrintToString(text);
  }
}

}  // namespace
}  // namespace muster::rpc
