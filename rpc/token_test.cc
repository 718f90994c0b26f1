#include "rpc/token.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rpc/status.h"

namespace muster::rpc {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Write(const std::string& text, mode_t mode = 0600) {
  const std::string path = TestPath("token");
  EXPECT_TRUE(WriteFileAtomically(path, text).ok());
  EXPECT_EQ(chmod(path.c_str(), mode), 0);
  return path;
}

absl::Status Check(const std::string& header, const std::string& token) {
  std::multimap<grpc::string_ref, grpc::string_ref> metadata;
  if (!header.empty()) metadata.emplace("authorization", header);
  return CheckToken(metadata, token);
}

TEST(ReadToken, WhiteSpaceAroundIt_IsNoPartOfIt) {
  for (const char* text : {"s3cret", "s3cret\n", "  s3cret\r\n\n"}) {
    const auto token = ReadToken(Write(text), "token_file");
    ASSERT_TRUE(token.ok()) << token.status();
    EXPECT_EQ(*token, "s3cret");
  }
  EXPECT_TRUE(ReadToken(Write("s3cret", 0400), "token_file").ok());
}

// Like a service's token that its group may read; root, the owner, may read it as well.
TEST(ReadToken, FileOfRootThatAGroupMayRead_IsTaken) {
  for (const mode_t mode : {0640, 0440}) {
    // Only root can make such a file, so for other users the read fails.
    EXPECT_EQ(ReadToken(Write("s3cret", mode), "token_file").ok(), geteuid() == 0) << mode;
  }
}

TEST(ReadToken, FileThatOthersCanReach_IsRefusedWithItsModeAndTheWayOut) {
  for (const mode_t mode : {0604, 0620, 0602, 0644, 0610, 0660}) {
    const absl::Status status = ReadToken(Write("s3cret", mode), "--token_file").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << mode;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("--token_file: "), HasSubstr("/token'"), HasSubstr("(mode 6"),
                      HasSubstr("chmod 600")));
  }
}

TEST(ReadToken, WhatIsNoToken_IsRefused) {
  for (const std::string& text :
       {std::string(), std::string("\n \n"), std::string("two words"), std::string("a\nb"),
        std::string("nul\0nul", 7), std::string("\xc3\xa4"), std::string(2000, 'x')}) {
    const absl::Status status = ReadToken(Write(text), "token_file").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("/token'"));
  }
  EXPECT_TRUE(ReadToken(Write(std::string(1024, 'x')), "token_file").ok());
  EXPECT_EQ(ReadToken("/nowhere/token", "token_file").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadToken("/dev", "token_file").status().code(), absl::StatusCode::kInvalidArgument);
  // The pipe has no writer: waiting for one would take forever.
  const std::string pipe = TestPath("pipe");
  unlink(pipe.c_str());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(ReadToken(pipe, "token_file").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(NewToken, Two_AreLongAndDiffer) {
  EXPECT_EQ(NewToken().size(), 64u);
  EXPECT_NE(NewToken(), NewToken());
}

TEST(CheckToken, OnlyTheWholeToken_IsTaken) {
  EXPECT_TRUE(Check("Bearer s3cret", "s3cret").ok());
  for (const char* header : {"", "Bearer ", "Bearer s3cre", "Bearer s3cret ", "Bearer s3crets",
                             "Bearer t3cret", "s3cret", "bearer s3cret", "Basic s3cret"}) {
    const absl::Status status = Check(header, "s3cret");
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << header;
    EXPECT_EQ(GetReason(status), v1::ERROR_REASON_BAD_TOKEN);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("--token_file"), HasSubstr("MUSTER_TOKEN_FILE"),
                      testing::Not(HasSubstr("s3cret"))));
  }
}

}  // namespace
}  // namespace muster::rpc
