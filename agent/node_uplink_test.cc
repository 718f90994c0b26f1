#include "agent/node_uplink.h"

#include <grpcpp/client_context.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_sessions.h"
#include "agent/grpc_outgoing_stream.h"
#include "base/mutate.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "proto/random_message.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

struct FakeStacks final : public StackSource {
  StackSnapshot Capture(int64_t pid, absl::Duration) override {
    return {"sleeping", absl::StrCat("stack of ", pid)};
  }
};

class NodeUplinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_ = *rpc::Server::Start({.insecure = true}, {&sessions_});
    NodeUplink::Options options;
    options.coordinator = server_->address();
    options.stacks = &stacks_;
    options.outage_tolerance = tolerance();
    options.on_barrier_late = [this](const v1::BarrierLate& late) {
      late_message_ = late.report().message();
      late_.Notify();
    };
    auto session = NodeUplink::Start(std::move(options));
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    channel_ = *rpc::Connect(session_->relay_address());
  }
  void TearDown() override {
    session_.reset();
    if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
  }

  virtual absl::Duration tolerance() const { return absl::Milliseconds(1); }
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
  // With a request id the operation can be repeated.
  absl::Status Put(uint64_t request_id = 0) {
    auto stub = v1::KeyValueStore::NewStub(channel_);
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    v1::TxnRequest request;
    if (request_id != 0) request.mutable_fence()->set_worker_id("w0");
    request.mutable_fence()->set_request_id(request_id);
    request.add_then()->mutable_put()->set_key("k");
    v1::TxnReply reply;
    return rpc::FromGrpc(stub->Txn(&context, request, &reply));
  }

  FakeSessions sessions_;
  FakeStacks stacks_;
  Notification late_;
  std::string late_message_;  // before late_
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<NodeUplink> session_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(NodeUplinkTest, CallOfAWorker_GoesOverTheStream) {
  EXPECT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  EXPECT_TRUE(Put().ok());
  const v1::AgentFrame frame =
      sessions_.WaitFor([](const v1::AgentFrame& f) { return f.has_ops(); });
  EXPECT_EQ(frame.ops().ops(0).txn().then(0).put().key(), "k");
}

TEST_F(NodeUplinkTest, SeatedWorker_IsInTheBeatsWithItsState) {
  ASSERT_TRUE(Join("w0").ok());
  const v1::AgentFrame frame = sessions_.WaitFor(
      [](const v1::AgentFrame& f) { return f.has_beat() && f.beat().workers_size() > 0; });
  EXPECT_EQ(frame.beat().workers(0).worker_id(), "w0");
  EXPECT_NE(frame.beat().workers(0).process_state(), "");
}

TEST_F(NodeUplinkTest, CollectStack_IsAnsweredForLocalWorkersOnly) {
  ASSERT_TRUE(Join("w0").ok());
  v1::Directive directive;
  directive.mutable_collect_stack()->set_query_id(1);
  directive.mutable_collect_stack()->set_worker_id("w0");
  directive.mutable_collect_stack()->set_pid(1);  // not a worker's process
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

TEST_F(NodeUplinkTest, Directives_ReachTheirListeners) {
  Notification killed, ended;
  session_->SetOnKillWorker([&](const v1::KillWorker& kill) {
    EXPECT_EQ(kill.worker_id(), "w3");
    killed.Notify();
  });
  NodeUplink::Listener listener;
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

TEST_F(NodeUplinkTest, LateBarrier_IsTold) {
  v1::Directive directive;
  directive.mutable_barrier_late()->mutable_report()->set_message("waits for rank 1");
  sessions_.Say(directive);
  ASSERT_TRUE(Put().ok());
  late_.WaitForNotification();
  EXPECT_EQ(late_message_, "waits for rank 1");
}

TEST_F(NodeUplinkTest, CoordinatorAwayForTooLong_ListenerAndCallersAreTold) {
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  Notification lost;
  absl::Status why;
  NodeUplink::Listener listener;
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

TEST_F(NodeUplinkTest, CoordinatorThatCameBack_IsNotReportedAsLost) {
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  Notification lost;
  NodeUplink::Listener listener;
  listener.on_lost = [&](const absl::Status&) { lost.Notify(); };
  session_->SetListener(std::move(listener));
  const std::string address = server_->address();
  server_->Shutdown(absl::ZeroDuration());
  lost.WaitForNotification();
  session_->SetListener({});
  EXPECT_FALSE(session_->stream().WaitUntilConnected(absl::ZeroDuration()).ok());

  rpc::ServerOptions again;
  again.listen = address;
  again.insecure = true;
  server_ = *rpc::Server::Start(again, {&sessions_});
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  ASSERT_TRUE(Put().ok());
  bool told = false;
  listener.on_lost = [&](const absl::Status&) { told = true; };
  session_->SetListener(std::move(listener));
  EXPECT_FALSE(told);
  session_->SetListener({});
}

class PatientNodeUplinkTest : public NodeUplinkTest {
  absl::Duration tolerance() const override { return absl::Minutes(10); }
};

TEST_F(PatientNodeUplinkTest, HubThatGoes_IsLeftForTheCoordinatorAndNothingFails) {
  FakeSessions hub;
  std::unique_ptr<rpc::Server> hub_server = *rpc::Server::Start({.insecure = true}, {&hub});
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  hub.SetAnswer([](const v1::Op& op, v1::OpResult*) { return !op.has_txn(); });
  v1::Directive directive;
  directive.mutable_use_hub()->set_node("the hub");
  directive.mutable_use_hub()->set_address(hub_server->address());
  sessions_.Say(directive);
  ASSERT_TRUE(Join("w0").ok());
  sessions_.WaitFor([](const v1::AgentFrame& f) { return f.has_bye(); });
  std::thread held([this] { EXPECT_TRUE(Put(1).ok()); });
  hub.WaitFor([](const v1::AgentFrame& f) { return f.has_beat() && f.beat().workers_size() > 0; });
  hub.WaitFor([](const v1::AgentFrame& f) {
    return f.has_ops() && f.ops().ops(f.ops().ops_size() - 1).has_txn();
  });
  EXPECT_EQ(session_->stream().upstream().hub, "the hub");
  hub_server->Shutdown(absl::ZeroDuration());
  held.join();
  sessions_.WaitFor(
      [](const v1::AgentFrame& f) { return f.has_hello() && f.hello().failed_hub() == "the hub"; });
  EXPECT_EQ(session_->stream().upstream().hub, "");
}

TEST_F(NodeUplinkTest, Finish_SaysGoodbye) {
  ASSERT_TRUE(session_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
  session_->Finish(absl::Minutes(1));
  sessions_.WaitFor([](const v1::AgentFrame& f) { return f.has_bye(); });
}

// A coordinator whose frames are random, mutated, or no frames at all.
class WildSessions final : public v1::Session::WithRawCallbackMethod_Attach<v1::Session::Service> {
 public:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Attach(
      grpc::CallbackServerContext*) override {
    MutexLock lock(&mu_);
    ++streams_;
    changed_.SignalAll();
    return new Stream(random_.Draw(UINT64_MAX), /*first=*/streams_ == 1);
  }
  void WaitForStreams(int count) {
    MutexLock lock(&mu_);
    while (streams_ < count) changed_.Wait(&mu_);
  }

 private:
  class Stream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    // The first stream welcomes correctly, because an agent that is refused at once does not come
    // again.
    Stream(uint64_t seed, bool first) : random_(seed), sound_(first) {
      MutexLock lock(&mu_);
      StartRead(&in_);
    }
    void OnReadDone(bool ok) override {
      MutexLock lock(&mu_);
      if (!ok) {
        Finish(grpc::Status::OK);
        return;
      }
      ++reads_;
      frames_ = 1 + random_.Draw(10);
      WriteNext();
    }
    void OnWriteDone(bool ok) override {
      MutexLock lock(&mu_);
      if (ok && --frames_ > 0) {
        WriteNext();
      } else if (ok && reads_ < 2) {  // hello, and the beat that comes at once
        StartRead(&in_);
      } else {
        Finish(grpc::Status(static_cast<grpc::StatusCode>(random_.Draw(17)), "so be it"));
      }
    }
    void OnDone() override {
      { MutexLock lock(&mu_); }  // waits for the last of the others
      delete this;
    }

   private:
    void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      v1::CoordinatorFrame frame;
      if (!std::exchange(welcomed_, true)) {
        frame.mutable_welcome()->set_protocol(1);
        frame.mutable_welcome()->set_session_id("s");
        frame.mutable_welcome()->mutable_lease()->set_nanos(1);  // it returns soon
      } else {
        random_.FillKind(&frame);
        // Otherwise the agent would not come again.
        if (frame.has_goodbye()) frame.mutable_goodbye()->clear_final();
        frame.set_seq(random_.Draw(4) == 0 ? 0 : ++seq_);
        if (frame.has_goodbye()) frame.mutable_goodbye()->clear_retry_after();
      }
      std::string bytes = frame.SerializeAsString();
      if (!std::exchange(sound_, false) && random_.Draw(4) == 0)
        bytes = Mutate(std::move(bytes), random_.generator());
      const grpc::Slice slice(bytes);
      out_ = grpc::ByteBuffer(&slice, 1);
      StartWrite(&out_);
    }

    Mutex mu_;
    int reads_ ABSL_GUARDED_BY(mu_) = 0;
    uint64_t frames_ ABSL_GUARDED_BY(mu_) = 0;  // to write before the next read
    RandomMessage random_ ABSL_GUARDED_BY(mu_);
    bool sound_ ABSL_GUARDED_BY(mu_);  // applies to the next frame
    bool welcomed_ ABSL_GUARDED_BY(mu_) = false;
    uint64_t seq_ ABSL_GUARDED_BY(mu_) = 0;
    grpc::ByteBuffer in_ ABSL_GUARDED_BY(mu_), out_ ABSL_GUARDED_BY(mu_);
  };

  Mutex mu_;
  CondVar changed_;
  RandomMessage random_ ABSL_GUARDED_BY(mu_){42};
  int streams_ ABSL_GUARDED_BY(mu_) = 0;
};

TEST(NodeUplink, MutatedFrames_NeverBreakIt) {
  WildSessions sessions;
  auto server = *rpc::Server::Start({.insecure = true}, {&sessions});
  FakeStacks stacks;
  NodeUplink::Options options;
  options.coordinator = server->address();
  options.stacks = &stacks;
  auto session = *NodeUplink::Start(std::move(options));
  session->SetListener({.on_generation_ended = [](const v1::GenerationEnded&) {},
                        .on_lost = [](const absl::Status&) {}});
  session->SetOnKillWorker([](const v1::KillWorker&) {});
  RandomMessage random(1);
  std::atomic<int> answered{0};
  int sent = 0;
  // Operations to be answered while streams come and go.
  for (int streams = 1; streams <= 12; ++streams) {
    sessions.WaitForStreams(streams);
    for (int i = 0; i < 40; ++i) {
      v1::Op op;
      random.FillKind(&op);
      ++sent;
      session->sender().Submit(std::move(op), [&](const v1::OpResult&) { ++answered; });
    }
  }
  server->Shutdown(absl::ZeroDuration());
  session->Finish(absl::ZeroDuration());
  session.reset();
  EXPECT_LE(answered, sent);
}

// Two agents that another coordinator has sent to the hub under test, each with the workers of a
// job.
class HubSessionTest : public ::testing::Test {
 protected:
  struct Node {
    std::unique_ptr<NodeUplink> session;
    std::shared_ptr<grpc::Channel> channel;
  };
  HubSessionTest() {
    of_hub_.SetAnswer([](const v1::Op& op, v1::OpResult* result) {
      if (op.has_join()) {
        result->mutable_join()->set_generation(1);
        result->mutable_join()->set_rank(op.join().fence().worker_id() == "w1" ? 1 : 0);
      }
      return true;
    });
    NodeUplink::Options options;
    options.coordinator = hub_server_->address();
    options.hub_listen = "127.0.0.1:0";
    options.outage_tolerance = absl::Minutes(10);
    hub_ = *NodeUplink::Start(std::move(options));
    EXPECT_TRUE(hub_->stream().WaitUntilConnected(absl::Minutes(1)).ok());
    int agents = 0;
    for (Node& node : nodes_) {
      node = StartNode();
      ++agents;
      // One after the other, so that each agent gets its directive.
      of_hub_.WaitFor([agents](const v1::AgentFrame& frame) {
        return frame.beat().hub().agents_size() == agents;
      });
    }
  }
  ~HubSessionTest() override {
    for (Node& node : nodes_) node.session.reset();
    hub_.reset();
    hub_server_->Shutdown(absl::ZeroDuration());
    agents_server_->Shutdown(absl::ZeroDuration());
  }
  Node StartNode() {
    v1::Directive directive;
    directive.mutable_use_hub()->set_node("the hub");
    directive.mutable_use_hub()->set_address(hub_->hub_address());
    of_agents_.Say(directive);
    NodeUplink::Options options;
    options.coordinator = agents_server_->address();
    options.outage_tolerance = absl::Minutes(10);
    auto session = *NodeUplink::Start(std::move(options));
    // A frame of the agent, which the directive follows.
    v1::Op op;
    op.mutable_get_members()->set_job_id("job");
    Notification answered;
    session->sender().Submit(std::move(op), [&](const v1::OpResult&) { answered.Notify(); });
    answered.WaitForNotification();
    const std::shared_ptr<grpc::Channel> channel = *rpc::Connect(session->relay_address());
    return {std::move(session), channel};
  }
  static v1::Fence Fence(const std::string& worker_id) {
    v1::Fence fence;
    fence.set_job_id("job");
    fence.set_worker_id(worker_id);
    fence.set_incarnation(5);
    return fence;
  }
  static void Join(const Node& node, const std::string& worker_id) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(5));
    v1::JoinRequest request;
    *request.mutable_fence() = Fence(worker_id);
    request.set_pid(getpid());
    v1::JoinReply reply;
    const grpc::Status status =
        v1::Rendezvous::NewStub(node.channel)->Join(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  static void Arrive(const Node& node, const std::string& worker_id, int rank, uint64_t counter) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(5));
    v1::ArriveRequest request;
    *request.mutable_fence() = Fence(worker_id);
    request.mutable_fence()->set_generation(1);
    request.set_barrier_id("b");
    request.set_counter(counter);
    request.set_rank(rank);
    v1::ArriveReply reply;
    const grpc::Status status =
        v1::Barrier::NewStub(node.channel)->Arrive(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  FakeSessions of_agents_, of_hub_;
  std::unique_ptr<rpc::Server> agents_server_ =
      *rpc::Server::Start({.insecure = true}, {&of_agents_});
  std::unique_ptr<rpc::Server> hub_server_ = *rpc::Server::Start({.insecure = true}, {&of_hub_});
  std::unique_ptr<NodeUplink> hub_;
  Node nodes_[2];
};

TEST_F(HubSessionTest, TwoAgentsBehindOneHub_PassABarrierAndAreSpokenFor) {
  const v1::AgentFrame told = of_hub_.WaitFor(
      [](const v1::AgentFrame& frame) { return frame.beat().hub().agents_size() == 2; });
  EXPECT_NE(told.beat().hub().agents(0).node(), told.beat().hub().agents(1).node());
  Join(nodes_[0], "w0");
  Join(nodes_[1], "w1");
  for (uint64_t counter = 0; counter < 3; ++counter) {
    std::thread other([&] { Arrive(nodes_[1], "w1", 1, counter); });
    Arrive(nodes_[0], "w0", 0, counter);
    other.join();
  }
  for (const std::string worker : {"w0", "w1"}) {
    of_hub_.WaitFor([&](const v1::AgentFrame& frame) {
      return std::any_of(frame.beat().workers().begin(), frame.beat().workers().end(),
                         [&](const v1::WorkerBeat& beat) { return beat.worker_id() == worker; });
    });
  }
  // A directive for a worker finds its agent.
  Notification killed;
  nodes_[1].session->SetOnKillWorker([&](const v1::KillWorker& kill) {
    EXPECT_EQ(kill.worker_id(), "w1");
    killed.Notify();
  });
  v1::Directive kill;
  kill.mutable_kill_worker()->set_job_id("job");
  kill.mutable_kill_worker()->set_worker_id("w1");
  kill.mutable_kill_worker()->set_incarnation(5);
  of_hub_.Say(kill);
  killed.WaitForNotification();
  nodes_[1].session->SetOnKillWorker(nullptr);
}

TEST_F(HubSessionTest, HubThatEnds_ItsAgentsGoOnWithTheCoordinator) {
  hub_->Finish(absl::Minutes(1));
  hub_.reset();
  Join(nodes_[0], "w0");
  Join(nodes_[1], "w1");
  of_agents_.WaitFor([](const v1::AgentFrame& frame) {
    return frame.has_ops() && frame.ops().ops(0).has_join() &&
           frame.ops().ops(0).join().fence().worker_id() == "w1";
  });
}

// Blocks until the coordinator has welcomed, or the stream has closed.
struct Greeted final : public OutgoingStreamEvents {
  void OnWritten() override {}
  void OnFrame(const v1::CoordinatorFrame&) override { welcomed.Notify(); }
  void OnClosed(const absl::Status&) override { closed.Notify(); }
  Notification welcomed, closed;
};

TEST(GrpcStreamOpener, Reconnect_NextStreamHasAConnectionOfItsOwn) {
  FakeSessions sessions;
  const auto server = *rpc::Server::Start({.insecure = true}, {&sessions});
  {
    const rpc::ChannelOptions options = {.own_connection = true};
    GrpcStreamOpener transport(*rpc::Connect(server->address(), options), server->address(),
                               options);
    for (int i = 0; i < 3; ++i) {
      if (i == 2) transport.Reconnect();
      const auto greeted = std::make_shared<Greeted>();
      const auto link = *transport.Open("", greeted);
      v1::AgentFrame hello;
      hello.mutable_hello()->set_node("n");
      link->Write(hello);
      greeted->welcomed.WaitForNotification();
      link->Close();
      greeted->closed.WaitForNotification();
    }
  }
  const std::vector<std::string> peers = sessions.peers();
  ASSERT_EQ(peers.size(), 3u);
  EXPECT_EQ(peers[1], peers[0]);
  EXPECT_NE(peers[2], peers[0]);
  server->Shutdown(absl::ZeroDuration());
}

TEST(NodeUplink, BadAddress_IsRefused) {
  EXPECT_EQ(NodeUplink::Start({.coordinator = "somewhere"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster::agent
