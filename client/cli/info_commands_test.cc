#include "client/cli/info_commands.h"

#include <grpcpp/grpcpp.h>

#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "client/cli/node_commands.h"
#include "client/jobs/fake_job_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/job.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "rpc/server.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Clears the screen of the terminal to which it is written.
constexpr char kClears[] = "x\x1b[2J\xc2\x9b";

// A coordinator with one job whose program puts that sequence into all of its texts.
class RudeAdmin final : public v1::Admin::Service {
  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest*,
                      v1::StatusReply* reply) override {
    v1::JobStatus* const job = reply->add_jobs();
    job->set_job_id(absl::StrCat("job", kClears));
    job->set_silent(1);
    job->set_silent_why(kClears);
    job->set_waits_for(kClears);
    job->mutable_save()->set_path(kClears);
    v1::QuarantinedHost* const host = job->add_quarantined();
    host->set_host(kClears);
    host->set_reason(kClears);
    return grpc::Status::OK;
  }
};

class RudeMembership final : public v1::Membership::Service {
  grpc::Status GetMembers(grpc::ServerContext*, const v1::GetMembersRequest*,
                          v1::GetMembersReply* reply) override {
    for (const int rank : {0, -1}) {
      v1::Member* const member = reply->add_members();
      member->set_rank(rank);
      for (std::string* const text : {member->mutable_worker_id(), member->mutable_host(),
                                      member->mutable_phase(), member->mutable_why_rank()}) {
        *text = kClears;
      }
      if (rank < 0) member->mutable_exit()->set_message(kClears);
    }
    return grpc::Status::OK;
  }
};

class RudeBarrier final : public v1::Barrier::Service {
  grpc::Status List(grpc::ServerContext*, const v1::ListBarriersRequest* request,
                    v1::ListBarriersReply* reply) override {
    *reply->add_reports() = Report(v1::BARRIER_STATE_OPEN);
    if (!request->only_open()) *reply->add_reports() = Report(v1::BARRIER_STATE_TIMED_OUT);
    return grpc::Status::OK;
  }
  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeBarrierRequest*,
                        v1::DescribeBarrierReply* reply) override {
    *reply->mutable_report() = Report(v1::BARRIER_STATE_OPEN);
    return grpc::Status::OK;
  }
  grpc::Status StragglerReport(grpc::ServerContext*, const v1::StragglerReportRequest*,
                               v1::StragglerReportReply*) override {
    return grpc::Status::OK;
  }

  static v1::BarrierReport Report(v1::BarrierState state) {
    v1::BarrierReport report;
    report.set_barrier_id(kClears);
    report.set_state(state);
    report.set_message(kClears);
    v1::Culprit* const culprit = report.add_culprits();
    culprit->set_native_stack(absl::StrCat("#0 main\n#1 ", kClears));
    return report;
  }
};

class NoJobs final : public v1::Jobs::Service {
  grpc::Status Get(grpc::ServerContext*, const v1::GetJobRequest*, v1::GetJobReply*) override {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, "no such job");
  }
};

class InfoCommandsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server =
        rpc::Server::Start({.insecure = true}, {&admin_, &membership_, &barrier_, &jobs_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  CommandContext Context() {
    return {.variables = {{"MUSTER_COORDINATOR", server_->address()}}, .out = out_, .err = err_};
  }

  RudeAdmin admin_;
  RudeMembership membership_;
  RudeBarrier barrier_;
  NoJobs jobs_;
  std::unique_ptr<rpc::Server> server_;
  std::ostringstream out_, err_;
};

// The form that people read: printable characters in lines.
constexpr auto IsForATerminal = [] {
  return AllOf(HasSubstr("x\\x1b[2J\\xc2\\x9b"), Not(HasSubstr("\x1b")),
               Not(HasSubstr("\xc2\x9b")));
};

TEST_F(InfoCommandsTest, Status_OfARudeProgram_DoesNotControlTheTerminal) {
  EXPECT_EQ(RunStatusCommand({}, Context()), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), IsForATerminal());
}

class IdleAdmin final : public v1::Admin::Service {
  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest*, v1::StatusReply*) override {
    return grpc::Status::OK;
  }
};

TEST_F(InfoCommandsTest, Status_WithoutProcesses_NamesTheListOfSubmittedJobs) {
  IdleAdmin idle;
  auto server = rpc::Server::Start({.insecure = true}, {&idle});
  ASSERT_TRUE(server.ok()) << server.status();
  CommandContext context = Context();
  context.variables["MUSTER_COORDINATOR"] = (*server)->address();
  EXPECT_EQ(RunStatusCommand({}, context), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr(", 0 jobs\n"));
  EXPECT_THAT(err_.str(), HasSubstr("muster list shows"));
  out_.str("");
  EXPECT_EQ(RunStatusCommand({"-o", "name"}, context), kExitOk) << err_.str();
  EXPECT_EQ(out_.str(), "");
}

TEST_F(InfoCommandsTest, Barriers_OfARudeProgram_DoNotControlTheTerminal) {
  const std::string name = kClears;
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"job", "--all"}, {"job", name}}) {
    out_.str("");
    EXPECT_EQ(RunBarrierCommand(words, Context()), kExitOk) << err_.str();
    EXPECT_THAT(out_.str(), IsForATerminal());
  }
  EXPECT_THAT(out_.str(), HasSubstr("is at\n#0 main\n#1 x"));
}

TEST_F(InfoCommandsTest, TlsFilesOfTheEnvironment_CountAsTheTokenDoes) {
  for (const auto& [name, words] : {std::pair{"MUSTER_TLS_CA", "/nowhere"},
                                    {"MUSTER_TLS_CERT", "without tls_ca"},
                                    {"MUSTER_TLS_KEY", "without tls_ca"},
                                    {"MUSTER_TOKEN_FILE", "/nowhere"}}) {
    err_.str("");
    CommandContext context = Context();
    context.variables[name] = "/nowhere";
    EXPECT_EQ(RunStatusCommand({}, context), kExitUsage) << name << out_.str();
    EXPECT_THAT(err_.str(), HasSubstr(words)) << name;
  }
}

TEST(NodeNames, OfARudeAgent_DoNotControlTheTerminal) {
  FakeJobService fake;
  v1::NodeRecord node;
  node.set_node(kClears);
  fake.AddNode(node);
  for (const char* const format : {"name", "table"}) {
    std::ostringstream out, err;
    const CommandContext context = {
        .variables = {{"MUSTER_COORDINATOR", fake.address()}}, .out = out, .err = err};
    EXPECT_EQ(RunNodesCommand({"-o", format}, context), kExitOk) << err.str();
    EXPECT_THAT(out.str(), IsForATerminal());
  }
}

}  // namespace
}  // namespace muster::client
