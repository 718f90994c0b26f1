#include "client/cli/command.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/status/status.h"
#include "base/exit_code.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/error.pb.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

class CommandTest : public ::testing::Test {
 protected:
  const CommandSpec spec_ = {.name = "muster greet",
                             .summary = "Greets.",
                             .usage = "[OPTIONS]",
                             .options = {{.name = "name", .value_name = "NAME"}}};
  std::ostringstream out_, err_;
  const CommandContext context_ = {.variables = {{"HOME", "/h"}}, .out = out_, .err = err_};
  CommandLine line_;
};

TEST_F(CommandTest, Begin_Options_GoesOn) {
  EXPECT_EQ(Begin(spec_, {"--name", "you"}, context_, &line_), -1);
  EXPECT_EQ(line_.Get("name"), "you");
  EXPECT_EQ(out_.str() + err_.str(), "");
}

TEST_F(CommandTest, Begin_Help_PrintsItAndSucceeds) {
  EXPECT_EQ(Begin(spec_, {"--help"}, context_, &line_), kExitOk);
  EXPECT_EQ(out_.str(), HelpText(spec_));
  EXPECT_EQ(err_.str(), "");
}

TEST_F(CommandTest, Begin_Describing_OnlySaysWhatTheCommandIs) {
  std::string name;
  const CommandContext describing = {
      {}, out_, err_, [&](const CommandSpec& spec) { name = spec.name; }};
  EXPECT_EQ(Begin(spec_, {"--no-such-option"}, describing, &line_), kExitOk);
  EXPECT_EQ(name, "muster greet");
  EXPECT_EQ(out_.str() + err_.str(), "");
}

TEST_F(CommandTest, Begin_UnknownOption_IsOneLineOnTheErrorStream) {
  EXPECT_EQ(Begin(spec_, {"--nam", "you"}, context_, &line_), kExitUsage);
  EXPECT_EQ(out_.str(), "");
  EXPECT_EQ(err_.str().rfind("muster greet: ", 0), 0u) << err_.str();
  EXPECT_EQ(err_.str().find('\n'), err_.str().size() - 1) << err_.str();
}

TEST_F(CommandTest, Fail_MessageOfTwoLines_IsOne) {
  EXPECT_EQ(Fail(spec_, context_, absl::NotFoundError("no\njob"), kExitNotFound), kExitNotFound);
  EXPECT_EQ(err_.str(), "muster greet: no job\n");
}

TEST_F(CommandTest, Fail_NamesOfFiles_DoNotControlTheTerminal) {
  Fail(spec_, context_, absl::NotFoundError("no \x1b[2J\xff"), kExitNotFound);
  EXPECT_EQ(err_.str(), "muster greet: no \\x1b[2J\\xff\n");
}

TEST_F(CommandTest, FullDisk_IsNoBug) {
  const auto code = [&](int error) {
    return FailCall(spec_, context_, absl::ErrnoToStatus(error, "cannot write config.yaml"));
  };
  EXPECT_EQ(code(ENOSPC), kExitLimit);
  EXPECT_EQ(code(EDQUOT), kExitLimit);
  EXPECT_EQ(code(EMFILE), kExitInternal);
  EXPECT_EQ(code(EIO), kExitInternal);
  // The user's limit of watches has the same message.
  EXPECT_FALSE(IsDiskFull(absl::ErrnoToStatus(ENOSPC, "epoll_ctl")));
  EXPECT_FALSE(IsDiskFull(absl::ErrnoToStatus(ENOSPC, "cannot watch /run/a")));
  EXPECT_EQ(Fail(spec_, context_, absl::ErrnoToStatus(ENOSPC, "x"), kExitUsage), kExitUsage);
}

TEST_F(CommandTest, FailCall_CodeFitsTheReason) {
  const auto code = [&](absl::StatusCode status, v1::ErrorReason reason) {
    return FailCall(spec_, context_, rpc::ErrorWithReason(status, "no", reason));
  };
  EXPECT_EQ(code(absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT), kExitLimit);
  EXPECT_EQ(code(absl::StatusCode::kInvalidArgument, v1::ERROR_REASON_LIMIT), kExitUsage);
  // A limit of the machine, not one that a user has set.
  EXPECT_EQ(code(absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_UNSPECIFIED),
            kExitInternal);
  EXPECT_EQ(code(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_JOB_STATE), kExitConflict);
  EXPECT_EQ(code(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_BAD_FIELD), kExitUsage);
  EXPECT_EQ(code(absl::StatusCode::kUnavailable, v1::ERROR_REASON_OVERLOADED), kExitUnreachable);
  EXPECT_EQ(code(absl::StatusCode::kUnimplemented, v1::ERROR_REASON_UNSPECIFIED), kExitUsage);
}

TEST_F(CommandTest, Variable_NotSet_IsEmpty) {
  EXPECT_EQ(Variable(context_.variables, "HOME"), "/h");
  EXPECT_EQ(Variable(context_.variables, "PATH"), "");
}

TEST(Dump, BytesThatAreNoUtf8_AreReplaced) {
  EXPECT_EQ(Dump({{"a", "\xff"}}), "{\n  \"a\": \"\xef\xbf\xbd\"\n}\n");
}

}  // namespace
}  // namespace muster::client
