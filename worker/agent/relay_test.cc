#include "worker/agent/relay.h"

#include <dirent.h>
#include <grpcpp/client_context.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "worker/agent/fake_op_sender.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

class RelayTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/relay-test-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    parent_ = folder;
    auto relay = Relay::Start({.parent = parent_}, &upstream_);
    ASSERT_TRUE(relay.ok()) << relay.status();
    relay_ = *std::move(relay);
    channel_ = *rpc::Connect(relay_->address());
  }
  void TearDown() override {
    relay_.reset();
    EXPECT_EQ(rmdir(parent_.c_str()), 0) << "the relay leaves nothing behind";
  }

  std::string parent_;
  FakeOpSender upstream_;
  std::unique_ptr<Relay> relay_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(RelayTest, Socket_LiesInAFolderOfThisUserOnly) {
  ASSERT_TRUE(absl::StartsWith(relay_->address(), "unix:" + parent_ + "/muster-"));
  const std::string path = relay_->address().substr(5);
  struct stat info;
  ASSERT_EQ(stat(path.substr(0, path.rfind('/')).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
  EXPECT_EQ(info.st_uid, geteuid());
}

TEST_F(RelayTest, Call_BecomesAnOperationAndItsResultTheAnswer) {
  std::thread coordinator([this] {
    EXPECT_EQ(upstream_.WaitForOp().txn().then(0).put().key(), "k");
    v1::OpResult result;
    result.mutable_txn()->set_succeeded(true);
    upstream_.Answer(result);
  });
  auto stub = v1::KeyValueStore::NewStub(channel_);
  grpc::ClientContext context;
  rpc::SetTimeout(context, absl::Minutes(1));
  v1::TxnRequest request;
  request.add_then()->mutable_put()->set_key("k");
  v1::TxnReply reply;
  const grpc::Status status = stub->Txn(&context, request, &reply);
  coordinator.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(reply.succeeded());
}

TEST_F(RelayTest, Error_ArrivesWithItsDetail) {
  std::thread coordinator([this] {
    EXPECT_TRUE(upstream_.WaitForOp().has_arrive());
    v1::ErrorDetail detail;
    detail.set_reason(v1::ERROR_REASON_BARRIER_TIMEOUT);
    detail.add_missing_ranks(3);
    v1::OpResult result;
    *result.mutable_error() =
        rpc::ToOpError(rpc::WithDetail(absl::DeadlineExceededError("rank 3 is missing"), detail));
    upstream_.Answer(result);
  });
  auto stub = v1::Barrier::NewStub(channel_);
  grpc::ClientContext context;
  rpc::SetTimeout(context, absl::Minutes(1));
  v1::ArriveReply reply;
  const absl::Status status =
      rpc::FromGrpc(stub->Arrive(&context, v1::ArriveRequest::default_instance(), &reply));
  coordinator.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "rank 3 is missing");
  EXPECT_EQ(rpc::GetDetail(status)->missing_ranks(0), 3);
}

TEST_F(RelayTest, CallerGivesUp_TheOperationGoesOn) {
  auto stub = v1::KeyValueStore::NewStub(channel_);
  grpc::ClientContext context;
  rpc::SetTimeout(context, absl::Minutes(1));
  std::thread caller([&] {
    v1::TxnReply reply;
    EXPECT_EQ(stub->Txn(&context, v1::TxnRequest::default_instance(), &reply).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  upstream_.WaitForOp();
  context.TryCancel();
  caller.join();
  EXPECT_EQ(upstream_.ops().size(), 1u);
  upstream_.Answer({});  // reaches nobody
}

TEST_F(RelayTest, Shutdown_EndsWaitingCalls) {
  auto stub = v1::KeyValueStore::NewStub(channel_);
  std::thread caller([&] {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    v1::WaitReply reply;
    EXPECT_FALSE(stub->Wait(&context, v1::WaitRequest::default_instance(), &reply).ok());
  });
  upstream_.WaitForOp();
  relay_.reset();
  caller.join();
  upstream_.Answer({});
}

TEST(Relay, NoFolder_SaysWhichWereTried) {
  FakeOpSender upstream;
  const absl::Status status = Relay::Start({.parent = "/nowhere"}, &upstream).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere: No such file or directory"));
  const std::string deep = "/tmp/" + std::string(100, 'x');
  EXPECT_THAT(std::string(Relay::Start({.parent = deep}, &upstream).status().message()),
              HasSubstr("too long for a socket"));
}

}  // namespace
}  // namespace muster::agent
