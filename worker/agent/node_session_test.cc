#include "worker/agent/node_session.h"

#include <grpcpp/client_context.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

// A coordinator that welcomes everybody, answers each operation with an empty result of its kind,
// and says what the test wants.
class FakeSessions final : public v1::Session::Service {
 public:
  grpc::Status Attach(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CoordinatorFrame, v1::AgentFrame>* stream) override {
    v1::AgentFrame frame;
    uint64_t seq = 0;
    while (stream->Read(&frame)) {
      v1::CoordinatorFrame reply;
      if (frame.has_hello()) {
        reply.mutable_welcome()->set_protocol(1);
        reply.mutable_welcome()->set_term(1);
        reply.mutable_welcome()->set_session_id(absl::StrCat("s", frame.hello().node()));
        stream->Write(reply);
      }
      if (frame.has_ops()) {
        reply.set_seq(++seq);
        for (const v1::Op& op : frame.ops().ops()) {
          v1::OpResult& result = *reply.mutable_results()->add_results();
          result.set_op_id(op.op_id());
          if (op.has_join()) result.mutable_join()->set_generation(1);
          if (op.has_txn()) result.mutable_txn()->set_succeeded(true);
        }
        stream->Write(reply);
      }
      MutexLock lock(&mu_);
      frames_.push_back(frame);
      changed_.SignalAll();
      while (!directives_.empty()) {
        v1::CoordinatorFrame directive;
        directive.set_seq(++seq);
        *directive.mutable_directive() = directives_.front();
        directives_.pop_front();
        stream->Write(directive);
      }
    }
    return grpc::Status::OK;
  }

  // Goes out after the agent's next frame.
  void Say(v1::Directive directive) {
    MutexLock lock(&mu_);
    directives_.push_back(std::move(directive));
  }
  // Blocks until a frame is as wanted, and returns it.
  v1::AgentFrame WaitFor(const std::function<bool(const v1::AgentFrame&)>& wanted) {
    MutexLock lock(&mu_);
    for (;;) {
      for (const v1::AgentFrame& frame : frames_) {
        if (wanted(frame)) return frame;
      }
      changed_.Wait(&mu_);
    }
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::deque<v1::AgentFrame> frames_ ABSL_GUARDED_BY(mu_);
  std::deque<v1::Directive> directives_ ABSL_GUARDED_BY(mu_);
};

struct FakeStacks final : public StackSource {
  StackSnapshot Capture(int64_t pid, absl::Duration) override {
    return {"sleeping", absl::StrCat("stack of ", pid)};
  }
};

class NodeSessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_ = *rpc::Server::Start({}, {&sessions_});
    NodeSession::Options options;
    options.coordinator = server_->address();
    options.stacks = &stacks_;
    options.outage_tolerance = absl::Milliseconds(1);
    options.on_barrier_late = [this](const v1::BarrierLate& late) {
      late_message_ = late.report().message();
      late_.Notify();
    };
    auto session = NodeSession::Start(std::move(options));
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    channel_ = *rpc::Connect(session_->relay_address());
  }
  void TearDown() override {
    session_.reset();
    if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
  }

  absl::Status Join(const std::string& worker_id) {
    auto stub = v1::Rendezvous::NewStub(channel_);
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    v1::JoinRequest request;
    request.mutable_fence()->set_job_id("job");
    request.mutable_fence()->set_worker_id(worker_id);
    request.mutable_fence()->set_incarnation(5);
    request.set_pid(getpid());
    v1::JoinReply reply;
    return rpc::FromGrpc(stub->Join(&context, request, &reply));
  }
  absl::Status Put() {
    auto stub = v1::KeyValueStore::NewStub(channel_);
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    v1::TxnRequest request;
    request.add_then()->mutable_put()->set_key("k");
    v1::TxnReply reply;
    return rpc::FromGrpc(stub->Txn(&context, request, &reply));
  }

  FakeSessions sessions_;
  FakeStacks stacks_;
  Notification late_;
  std::string late_message_;  // before late_
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<NodeSession> session_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(NodeSessionTest, CallOfAWorker_GoesOverTheStream) {
  EXPECT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  EXPECT_TRUE(Put().ok());
  const v1::AgentFrame frame =
      sessions_.WaitFor([](const v1::AgentFrame& f) { return f.has_ops(); });
  EXPECT_EQ(frame.ops().ops(0).txn().then(0).put().key(), "k");
}

TEST_F(NodeSessionTest, SeatedWorker_IsInTheBeatsWithItsState) {
  ASSERT_TRUE(Join("w0").ok());
  const v1::AgentFrame frame = sessions_.WaitFor(
      [](const v1::AgentFrame& f) { return f.has_beat() && f.beat().workers_size() > 0; });
  EXPECT_EQ(frame.beat().workers(0).worker_id(), "w0");
  EXPECT_NE(frame.beat().workers(0).process_state(), "");
}

TEST_F(NodeSessionTest, CollectStack_IsAnsweredForLocalWorkersOnly) {
  ASSERT_TRUE(Join("w0").ok());
  v1::Directive directive;
  directive.mutable_collect_stack()->set_query_id(1);
  directive.mutable_collect_stack()->set_worker_id("w0");
  directive.mutable_collect_stack()->set_pid(1);  // not its process
  sessions_.Say(directive);
  directive.mutable_collect_stack()->set_query_id(2);
  directive.mutable_collect_stack()->set_pid(getpid());
  sessions_.Say(directive);
  ASSERT_TRUE(Put().ok());
  const v1::AgentFrame frame =
      sessions_.WaitFor([](const v1::AgentFrame& f) { return f.has_stack(); });
  EXPECT_EQ(frame.stack().query_id(), 2u);
  EXPECT_EQ(frame.stack().process_state(), "sleeping");
  EXPECT_EQ(frame.stack().native_stack(), absl::StrCat("stack of ", getpid()));
}

TEST_F(NodeSessionTest, Directives_ReachTheirListeners) {
  Notification killed, ended;
  session_->SetOnKillWorker([&](const v1::KillWorker& kill) {
    EXPECT_EQ(kill.worker_id(), "w3");
    killed.Notify();
  });
  NodeSession::Listener listener;
  listener.on_generation_ended = [&](const v1::GenerationEnded& generation) {
    EXPECT_EQ(generation.why(), "rank 1 died");
    ended.Notify();
  };
  session_->SetListener(std::move(listener));
  v1::Directive directive;
  directive.mutable_kill_worker()->set_worker_id("w3");
  sessions_.Say(directive);
  directive.mutable_generation_ended()->set_why("rank 1 died");
  sessions_.Say(directive);
  ASSERT_TRUE(Put().ok());
  killed.WaitForNotification();
  ended.WaitForNotification();
}

TEST_F(NodeSessionTest, LateBarrier_IsTold) {
  v1::Directive directive;
  directive.mutable_barrier_late()->mutable_report()->set_message("waits for rank 1");
  sessions_.Say(directive);
  ASSERT_TRUE(Put().ok());
  late_.WaitForNotification();
  EXPECT_EQ(late_message_, "waits for rank 1");
}

TEST_F(NodeSessionTest, CoordinatorAwayForTooLong_ListenerAndCallersAreTold) {
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  Notification lost;
  absl::Status why;
  NodeSession::Listener listener;
  listener.on_lost = [&](const absl::Status& status) {
    why = status;
    lost.Notify();
  };
  session_->SetListener(std::move(listener));
  const std::string address = server_->address();
  server_->Shutdown(absl::ZeroDuration());
  server_ = nullptr;
  lost.WaitForNotification();
  EXPECT_THAT(std::string(why.message()),
              HasSubstr(absl::StrCat("the coordinator at ", address, " has been away for ")));
  EXPECT_THAT(std::string(Put().message()), HasSubstr("has been away for"));
}

TEST_F(NodeSessionTest, CoordinatorThatCameBack_IsNotReportedAsLost) {
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  Notification lost;
  NodeSession::Listener listener;
  listener.on_lost = [&](const absl::Status&) { lost.Notify(); };
  session_->SetListener(std::move(listener));
  const std::string address = server_->address();
  server_->Shutdown(absl::ZeroDuration());
  lost.WaitForNotification();
  session_->SetListener({});
  EXPECT_FALSE(session_->stream().WaitUntilConnected(absl::ZeroDuration()).ok());

  rpc::ServerOptions again;
  again.listen = address;
  server_ = *rpc::Server::Start(again, {&sessions_});
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  ASSERT_TRUE(Put().ok());
  bool told = false;
  listener.on_lost = [&](const absl::Status&) { told = true; };
  session_->SetListener(std::move(listener));
  EXPECT_FALSE(told);
  session_->SetListener({});
}

TEST_F(NodeSessionTest, Finish_SaysGoodbye) {
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  session_->Finish(absl::Minutes(1));
  sessions_.WaitFor([](const v1::AgentFrame& f) { return f.has_bye(); });
}

TEST(NodeSession, BadAddress_IsRefused) {
  EXPECT_EQ(NodeSession::Start({.coordinator = "somewhere"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster::agent
