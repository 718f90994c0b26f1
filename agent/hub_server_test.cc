#include "agent/hub_server.h"

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/slice.h>

#include <memory>
#include <string>
#include <utility>

#include "agent/fake_op_sender.h"
#include "agent/hub_core.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

// A core that records the events of streams.
class Hub final : public IncomingStreamEvents {
 public:
  Hub()
      : core_({.node = "hub",
               .incarnation = 9,
               .upstream =
                   [] {
                     Upstream upstream;
                     upstream.connected = true;
                     upstream.session = 1;
                     upstream.term = 5;
                     upstream.cluster_id = "c1";
                     upstream.lease = absl::Seconds(6);
                     return upstream;
                   }},
              &upstream_) {}

  void OnFrame(const std::shared_ptr<IncomingStream>& link, const v1::AgentFrame& frame,
               size_t bytes) override {
    core_.OnFrame(link, frame, bytes);
  }
  void OnWritten(const std::shared_ptr<IncomingStream>& link) override { core_.OnWritten(link); }
  void OnClosed(const std::shared_ptr<IncomingStream>& link) override {
    core_.OnClosed(link);
    MutexLock lock(&mu_);
    ++closed_;
    changed_.SignalAll();
  }
  void WaitUntilClosed(int streams) {
    MutexLock lock(&mu_);
    while (closed_ < streams) changed_.Wait(&mu_);
  }
  int closed() {
    MutexLock lock(&mu_);
    return closed_;
  }

  FakeOpSender upstream_;
  HubCore core_;

 private:
  Mutex mu_;
  CondVar changed_;
  int closed_ ABSL_GUARDED_BY(mu_) = 0;
};

v1::AgentFrame Hello(const std::string& node) {
  v1::AgentFrame frame;
  frame.mutable_hello()->set_protocol_min(1);
  frame.mutable_hello()->set_protocol_max(1);
  frame.mutable_hello()->set_node(node);
  frame.mutable_hello()->set_agent_incarnation(7);
  return frame;
}

class HubServerTest : public ::testing::Test {
 protected:
  void Start(HubServer::Options options = {}) {
    options.server.insecure = options.token.empty();
    auto server = HubServer::Start(options, &hub_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = *rpc::Connect(server_->address());
    stub_ = v1::Session::NewStub(channel_);
  }
  using Stream = grpc::ClientReaderWriter<v1::AgentFrame, v1::CoordinatorFrame>;
  std::unique_ptr<Stream> Attach(grpc::ClientContext* context) {
    context->set_wait_for_ready(true);
    return stub_->Attach(context);
  }
  // Says hello and reads the frames that follow.
  static void Greet(Stream* stream, const std::string& node) {
    ASSERT_TRUE(stream->Write(Hello(node)));
    v1::CoordinatorFrame frame;
    ASSERT_TRUE(stream->Read(&frame));
    EXPECT_EQ(frame.welcome().term(), 5u);
    ASSERT_TRUE(stream->Read(&frame));
    ASSERT_TRUE(frame.has_hub_state());
  }

  Hub hub_;
  std::unique_ptr<HubServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Session::Stub> stub_;
};

TEST_F(HubServerTest, Stream_CarriesOperationsAndAnswers) {
  Start();
  grpc::ClientContext context;
  const auto stream = Attach(&context);
  Greet(stream.get(), "a");
  std::string payload(100'000, 'x');  // is sent in pieces
  for (uint64_t i = 1; i <= 3; ++i) {
    v1::AgentFrame frame;
    frame.set_seq(i);
    v1::Op& op = *frame.mutable_ops()->add_ops();
    op.set_op_id(10 + i);
    op.mutable_txn()->mutable_fence()->set_job_id(payload);
    ASSERT_TRUE(stream->Write(frame));
    EXPECT_EQ(hub_.upstream_.WaitForOp().txn().fence().job_id(), payload);
    v1::OpResult result;
    result.mutable_txn()->mutable_header()->set_cluster_id(payload);
    hub_.upstream_.Answer(result);
    v1::CoordinatorFrame answer;
    ASSERT_TRUE(stream->Read(&answer));
    ASSERT_EQ(answer.results().results_size(), 1);
    EXPECT_EQ(answer.results().results(0).op_id(), 10 + i);
    EXPECT_EQ(answer.results().results(0).txn().header().cluster_id(), payload);
  }
  v1::AgentFrame bye;
  bye.mutable_bye();
  ASSERT_TRUE(stream->Write(bye));
  v1::CoordinatorFrame frame;
  EXPECT_FALSE(stream->Read(&frame));
  EXPECT_TRUE(stream->Finish().ok());
  hub_.WaitUntilClosed(1);
  EXPECT_EQ(hub_.core_.agents(), 0u);
}

TEST_F(HubServerTest, AgentThatGoesAway_IsHeardOf) {
  Start();
  grpc::ClientContext cancelled, half_closed;
  const auto a = Attach(&cancelled);
  Greet(a.get(), "a");
  cancelled.TryCancel();
  hub_.WaitUntilClosed(1);
  const auto b = Attach(&half_closed);
  Greet(b.get(), "b");
  b->WritesDone();
  EXPECT_TRUE(b->Finish().ok());
  hub_.WaitUntilClosed(2);
  EXPECT_EQ(hub_.core_.agents(), 2u) << "their sessions go on for a while";
}

TEST_F(HubServerTest, WithoutTheToken_IsRefused) {
  Start({.token = "0123456789abcdef"});
  grpc::ClientContext without, with;
  auto stream = Attach(&without);
  v1::CoordinatorFrame frame;
  EXPECT_FALSE(stream->Read(&frame));
  const absl::Status refused = rpc::FromGrpc(stream->Finish());
  EXPECT_EQ(rpc::GetReason(refused), v1::ERROR_REASON_BAD_TOKEN);
  // The coordinator's token may be a newer one.
  EXPECT_THAT(std::string(refused.message()),
              ::testing::StartsWith("this hub does not know the token"));
  with.AddMetadata("authorization", "Bearer 0123456789abcdef");
  stream = Attach(&with);
  Greet(stream.get(), "a");
  EXPECT_EQ(hub_.closed(), 0);
  with.TryCancel();
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(HubServerTest, NoTokenOffTheLoopbackInterface_DoesNotStart) {
  HubServer::Options options;
  options.server.listen = "0.0.0.0:0";
  EXPECT_EQ(HubServer::Start(options, &hub_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(HubServerTest, StreamThatSendsNothing_Ends) {
  Start({.first_message = absl::Milliseconds(1)});
  grpc::ClientContext context;
  const auto stream = Attach(&context);
  v1::CoordinatorFrame frame;
  EXPECT_FALSE(stream->Read(&frame));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(hub_.closed(), 0) << "the core has not heard of it at all";
}

TEST_F(HubServerTest, TooManyStreamsThatSendNothing_AreRefused) {
  Start({.silent_streams = 0});
  grpc::ClientContext context;
  const auto stream = Attach(&context);
  v1::CoordinatorFrame frame;
  EXPECT_FALSE(stream->Read(&frame));
  EXPECT_EQ(rpc::GetReason(rpc::FromGrpc(stream->Finish())), v1::ERROR_REASON_OVERLOADED);
}

TEST_F(HubServerTest, BytesThatAreNoFrame_EndTheStream) {
  Start();
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel_);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const grpc::Slice slice("\xff\xff\xff");
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer reply;
  Mutex mu;
  CondVar changed;
  std::optional<grpc::Status> status;
  stub.UnaryCall(&context, "/muster.v1.Session/Attach", {}, &request, &reply,
                 [&](const grpc::Status& why) {
                   MutexLock lock(&mu);
                   status = why;
                   changed.SignalAll();
                 });
  MutexLock lock(&mu);
  while (!status.has_value()) changed.Wait(&mu);
  EXPECT_EQ(rpc::GetReason(rpc::FromGrpc(*status)), v1::ERROR_REASON_BAD_FIELD);
}

TEST_F(HubServerTest, Refusal_ReachesTheAgent) {
  Start();
  grpc::ClientContext context;
  const auto stream = Attach(&context);
  ASSERT_TRUE(stream->Write(Hello("hub")));
  v1::CoordinatorFrame frame;
  EXPECT_FALSE(stream->Read(&frame));
  EXPECT_THAT(stream->Finish().error_message(), HasSubstr("differ from the hub's own name"));
}

TEST_F(HubServerTest, Shutdown_SaysGoodbyeFirstAndWaitsForAllStreams) {
  Start();
  grpc::ClientContext context;
  const auto stream = Attach(&context);
  Greet(stream.get(), "a");
  hub_.core_.Finish();
  v1::CoordinatorFrame frame;
  ASSERT_TRUE(stream->Read(&frame));
  EXPECT_TRUE(frame.has_goodbye());
  EXPECT_FALSE(stream->Read(&frame));
  EXPECT_TRUE(stream->Finish().ok());
  grpc::ClientContext open;
  const auto silent = Attach(&open);  // never sends anything
  server_.reset();
  EXPECT_EQ(hub_.closed(), 1);
  EXPECT_FALSE(silent->Finish().ok());
}

}  // namespace
}  // namespace muster::agent
