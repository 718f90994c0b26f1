#include "coordinator/service/audit_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/fake_clock.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class AuditLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto log = AuditLog::Open(path_, &clock_);
    ASSERT_TRUE(log.ok()) << log.status();
    log_ = *std::move(log);
  }
  std::vector<json> Lines() {
    std::vector<json> lines;
    const std::string text = *ReadFile(path_);
    for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      lines.push_back(json::parse(line));
    }
    return lines;
  }

  const TestFolder folder_;
  const std::string path_ = folder_.Path("audit.jsonl");
  FakeClock clock_{absl::FromUnixMillis(1'764'000'000'125)};
  std::unique_ptr<AuditLog> log_;
  const Identity ann_{.name = "ann", .role = Role::kSubmit};
};

TEST_F(AuditLogTest, Submission_IsALineWithTheJobItMade) {
  v1::Op op;
  op.mutable_submit_job()->mutable_spec()->set_name("mnist");
  v1::OpResult result;
  result.mutable_submit_job()->mutable_job()->set_job_id("mnist-3");
  log_->End(AuditLog::Begin(&ann_, "ipv4:10.0.0.7:4711", op), Answer(result));
  ASSERT_EQ(Lines().size(), 1u);
  EXPECT_EQ(Lines()[0], json({{"time", "2025-11-24T16:00:00.125Z"},
                              {"user", "ann"},
                              {"role", "submit"},
                              {"from", "ipv4:10.0.0.7:4711"},
                              {"call", "submit_job"},
                              {"job", "mnist-3"},
                              {"name", "mnist"},
                              {"result", "OK"}}));
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(AuditLogTest, LogLevelOfANode_IsALineWithTheLevel) {
  v1::Op op;
  op.mutable_control_node()->set_node("n7");
  op.mutable_control_node()->set_action(v1::NODE_ACTION_LOG_LEVEL);
  op.mutable_control_node()->set_log_level(1);
  op.mutable_control_node()->mutable_for_()->set_seconds(600);
  v1::OpResult result;
  result.mutable_control_node();
  log_->End(AuditLog::Begin(&ann_, "", op), Answer(result));
  op.mutable_control_node()->set_log_level(9);
  op.mutable_control_node()->clear_for_();
  log_->End(AuditLog::Begin(&ann_, "", op), Answer(result));
  ASSERT_EQ(Lines().size(), 2u);
  EXPECT_EQ(Lines()[0]["node"], "n7");
  EXPECT_EQ(Lines()[0]["action"], "NODE_ACTION_LOG_LEVEL");
  EXPECT_EQ(Lines()[0]["name"], "debug for 10m");
  EXPECT_EQ(Lines()[1]["name"], "level 9");
}

TEST_F(AuditLogTest, Refusals_AreLinesWithTheirCode) {
  v1::Op op;
  op.mutable_control_job()->set_job_id("mnist-3");
  op.mutable_control_job()->set_action(v1::JOB_ACTION_CANCEL);
  v1::OpResult result;
  *result.mutable_error() = MakeError(absl::StatusCode::kPermissionDenied, v1::ERROR_REASON_SCOPE,
                                      "user \"ann\" may not");
  log_->End(AuditLog::Begin(&ann_, "", op), Answer(result));
  log_->Refused({.role = Role::kAttempt, .group = "a-1.1"}, "", "write a snapshot");
  ASSERT_EQ(Lines().size(), 2u);
  EXPECT_EQ(Lines()[0]["job"], "mnist-3");
  EXPECT_EQ(Lines()[0]["action"], "JOB_ACTION_CANCEL");
  EXPECT_EQ(Lines()[0]["result"], "PERMISSION_DENIED");
  EXPECT_EQ(Lines()[0]["error"], "user \"ann\" may not");
  EXPECT_EQ(Lines()[1]["user"], "attempt a-1.1");
  EXPECT_EQ(Lines()[1]["call"], "write a snapshot");
}

TEST_F(AuditLogTest, CallersText_ForgesNoLine) {
  v1::Op op;
  op.mutable_submit_job()->mutable_spec()->set_name("a\n{\"user\":\"root\"}\n");
  log_->End(AuditLog::Begin(nullptr, "", op), Answer(v1::OpResult()));
  op.mutable_control_job()->set_job_id(std::string(1 << 20, '\xff'));
  log_->End(AuditLog::Begin(nullptr, "", op), Answer(v1::OpResult()));
  ASSERT_EQ(Lines().size(), 2u);
  EXPECT_LT(ReadFile(path_)->size(), 4096u);
}

TEST_F(AuditLogTest, FileThatWasMovedAway_IsReplacedByANewOne) {
  log_->Refused(ann_, "", "first");
  ASSERT_EQ(rename(path_.c_str(), folder_.Path("audit.1").c_str()), 0);
  log_->Refused(ann_, "", "second");
  ASSERT_EQ(Lines().size(), 1u);
  EXPECT_EQ(Lines()[0]["call"], "second");
  EXPECT_THAT(*ReadFile(folder_.Path("audit.1")), HasSubstr("first"));
}

TEST_F(AuditLogTest, PlaceThatCannotBeWritten_IsAnErrorAtTheStart) {
  const auto log = AuditLog::Open(folder_.Path("none/audit"));
  EXPECT_THAT(std::string(log.status().message()), HasSubstr("none/audit"));
  EXPECT_FALSE(AuditLog::Open(folder_.path()).ok());
}

}  // namespace
}  // namespace muster::coordinator
