#include "agent/relay.h"

#include <dirent.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/fake_op_sender.h"
#include "agent/relay_core.h"
#include "base/mutate.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "proto/random_message.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

class RelayTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto relay = Relay::Start({.parent = parent_}, &upstream_);
    ASSERT_TRUE(relay.ok()) << relay.status();
    relay_ = *std::move(relay);
    channel_ = *rpc::Connect(relay_->address());
  }
  void TearDown() override {
    relay_.reset();
    EXPECT_EQ(rmdir(parent_.c_str()), 0) << "the relay leaves nothing behind";
  }

  const TestFolder folder_ = TestFolder::ForSockets();
  const std::string parent_ = folder_.path();
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

TEST_F(RelayTest, SocketOfAKilledAgent_IsRemovedByTheNext_OneInUseStays) {
  const std::string folder = parent_ + "/muster-killed";
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string empty = parent_ + "/muster-others";
  ASSERT_EQ(mkdir(empty.c_str(), 0700), 0);
  const std::string socket_path = folder + "/relay";
  ASSERT_LT(socket_path.size(), sizeof(address.sun_path));
  std::copy(socket_path.begin(), socket_path.end(), address.sun_path);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
  FakeOpSender upstream;
  auto next = Relay::Start({.parent = parent_}, &upstream);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_NE(access(folder.c_str(), F_OK), 0);
  EXPECT_EQ(access(relay_->address().substr(5).c_str(), F_OK), 0);
  EXPECT_EQ(rmdir(empty.c_str()), 0) << "a folder without a socket stays";
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
    v1::TxnRequest request;
    request.add_then()->mutable_put()->set_key("k");
    v1::TxnReply reply;
    EXPECT_EQ(stub->Txn(&context, request, &reply).error_code(), grpc::StatusCode::CANCELLED);
  });
  upstream_.WaitForOp();
  context.TryCancel();
  caller.join();
  EXPECT_EQ(upstream_.ops().size(), 1u);
  upstream_.Answer({});  // no caller waits for it
}

// During an outage such operations would pile up, until there is no room for important ones.
TEST_F(RelayTest, CallerOfAPollOrAReadGivesUp_TheOperationIsForgotten) {
  const auto give_up = [&](auto& stub, auto method, const auto& request, auto reply) {
    const size_t others = upstream_.ops().size();
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(1));
    std::thread caller([&] {
      EXPECT_EQ((stub.*method)(&context, request, &reply).error_code(),
                grpc::StatusCode::CANCELLED);
    });
    WaitUntil([&] { return upstream_.ops().size() > others; });
    context.TryCancel();
    caller.join();
  };
  const auto keys = v1::KeyValueStore::NewStub(channel_);
  const auto triggers = v1::Triggers::NewStub(channel_);
  // The first one, so that the relay knows of its end once it knows of the others'.
  v1::PollTriggersRequest acknowledging;
  acknowledging.add_acked(7);
  give_up(*triggers, &v1::Triggers::Stub::Poll, acknowledging, v1::PollTriggersReply());
  v1::TxnRequest read;
  read.add_then()->mutable_get()->set_key("k");
  give_up(*keys, &v1::KeyValueStore::Stub::Txn, read, v1::TxnReply());
  WaitUntil([&] { return upstream_.ops().size() < 2; });
  give_up(*keys, &v1::KeyValueStore::Stub::Wait, v1::WaitRequest(), v1::WaitReply());
  WaitUntil([&] { return upstream_.ops().size() < 2; });
  give_up(*triggers, &v1::Triggers::Stub::Poll, v1::PollTriggersRequest(), v1::PollTriggersReply());
  WaitUntil([&] { return upstream_.ops().size() < 2; });
  ASSERT_EQ(upstream_.ops().size(), 1u);
  EXPECT_EQ(upstream_.ops()[0].poll_triggers().acked_size(), 1);
  upstream_.Answer({});
}

// Answers at once, later or never, with results that match the operation or do not.
class WildUpstream final : public OpSender {
 public:
  uint64_t Submit(v1::Op op, Done done) override {
    v1::OpResult result;
    bool now;
    {
      MutexLock lock(&mu_);
      if (random_.Draw(8) == 0) {
        random_.Fill(result.mutable_error());
      } else if (random_.Draw(8) == 0) {
        random_.FillKind(&result);
      } else {
        const auto* const kind = v1::OpResult::descriptor()->FindFieldByNumber(
            op.has_arrive_many() ? v1::Op::kArrive : op.kind_case());
        random_.FillKind(&result, kind->name());
      }
      now = random_.Draw(2) == 0;
      if (!now) {
        late_.emplace_back(std::move(done), std::move(result));
        if (late_.size() < 20) return 1;
        std::swap(late_.back(), late_[random_.Draw(late_.size())]);
        std::tie(done, result) = std::move(late_.back());
        late_.pop_back();
      }
    }
    done(result);
    return 1;
  }
  void Forget(uint64_t) override {}
  void AnswerTheRest() {
    for (auto& [done, result] : late_) done(result);
  }

 private:
  Mutex mu_;
  RandomMessage random_ ABSL_GUARDED_BY(mu_){20261121};
  std::vector<std::pair<Done, v1::OpResult>> late_;
};

// Every method of every service, with random and mutated requests.
TEST(Mutated, Requests_NeverBreakTheRelay) {
  WildUpstream wild;
  RelayCore::Options options;
  options.process_state = [](int64_t) { return "running"; };
  RelayCore core(std::move(options), &wild);
  auto relay = Relay::Start({.parent = "/tmp"}, &core);
  ASSERT_TRUE(relay.ok()) << relay.status();
  const auto channel = *rpc::Connect((*relay)->address());

  struct Pending {
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    grpc::Status status;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
  };
  RandomMessage random(7);
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  int in_flight = 0, answered = 0, sent = 0, methods = 0;
  std::map<grpc::StatusCode, int> codes;
  const auto finish_one = [&] {
    void* tag;
    bool ok;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    const std::unique_ptr<Pending> call(static_cast<Pending*>(tag));
    ++codes[call->status.error_code()];
    --in_flight;
    ++answered;
  };
  const auto* const pool = google::protobuf::DescriptorPool::generated_pool();
  for (const char* const name :
       {"Rendezvous", "Barrier", "KeyValueStore", "Triggers", "Checkpoints", "Membership"}) {
    const auto* const service = pool->FindServiceByName(absl::StrCat("muster.v1.", name));
    ASSERT_NE(service, nullptr) << name;
    for (int m = 0; m < service->method_count(); ++m) {
      ++methods;
      const auto* const type = service->method(m)->input_type();
      const std::unique_ptr<google::protobuf::Message> request(
          google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
      for (int i = 0; i < 200; ++i) {
        request->Clear();
        random.Fill(request.get());
        std::string bytes = request->SerializeAsString();
        if (i % 2 == 1) bytes = Mutate(std::move(bytes), random.generator());
        auto* const call = new Pending;
        // Calls that wait by design end at their own deadline.
        rpc::SetTimeout(call->context, absl::Milliseconds(random.Draw(20) == 0 ? 1 : 2000));
        const grpc::Slice slice(bytes);
        call->reader = stub.PrepareUnaryCall(
            &call->context,
            absl::StrCat("/", service->full_name(), "/", service->method(m)->name()),
            grpc::ByteBuffer(&slice, 1), &queue);
        call->reader->StartCall();
        call->reader->Finish(&call->reply, &call->status, call);
        if (random.Draw(20) == 0) call->context.TryCancel();
        ++sent;
        core.Tick();
        if (++in_flight >= 64) finish_one();
      }
    }
  }
  while (in_flight > 0) {
    core.Tick();
    core.MakeBeat();
    finish_one();
  }
  queue.Shutdown();
  EXPECT_EQ(answered, sent);
  EXPECT_GE(methods, 28);
  EXPECT_GT(codes[grpc::StatusCode::OK], sent / 10);
  relay->reset();
  wild.AnswerTheRest();  // no caller waits for it
}

// A coordinator that holds Admin.Status.
class SlowAdmin final : public v1::Admin::CallbackService {
 public:
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext*, const v1::StatusRequest*,
                                   v1::StatusReply*) override {
    class Waits final : public grpc::ServerUnaryReactor {
     public:
      explicit Waits(SlowAdmin* admin) {
        MutexLock lock(&mu_);
        admin_ = admin;
        admin_->came.Notify();
      }
      void OnCancel() override {
        MutexLock lock(&mu_);
        admin_->cancelled.Notify();
        Finish(grpc::Status::CANCELLED);
      }
      void OnDone() override {
        { MutexLock lock(&mu_); }
        delete this;
      }

     private:
      Mutex mu_;
      SlowAdmin* admin_ ABSL_GUARDED_BY(mu_);
    };
    return new Waits(this);
  }
  Notification came, cancelled;
};

TEST(Relay, StatusWhoseCallerGoesAway_IsGivenUpAtTheCoordinatorToo) {
  for (const bool relay_ends : {false, true}) {
    SlowAdmin admin;
    auto coordinator = *rpc::Server::Start({.insecure = true}, {&admin});
    FakeOpSender upstream;
    auto relay = *Relay::Start(
        {.parent = "/tmp", .coordinator = *rpc::Connect(coordinator->address())}, &upstream);
    auto stub = v1::Admin::NewStub(*rpc::Connect(relay->address()));
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Hours(1));
    std::thread caller([&] {
      v1::StatusReply reply;
      EXPECT_FALSE(stub->Status(&context, v1::StatusRequest(), &reply).ok());
    });
    admin.came.WaitForNotification();
    if (relay_ends) {
      relay.reset();
    } else {
      context.TryCancel();
    }
    admin.cancelled.WaitForNotification();
    caller.join();
  }
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

TEST(Relay, FolderOfTheEnvironmentWillNotDo_TakesTmp) {
  const char* const before = getenv("TMPDIR");
  const std::string kept = before == nullptr ? "" : before;
  for (const std::string& folder : {std::string("/nowhere"), std::string("/proc"),
                                    "/tmp/" + std::string(100, 'x'), std::string("relative")}) {
    setenv("TMPDIR", folder.c_str(), 1);
    FakeOpSender upstream;
    auto relay = Relay::Start({}, &upstream);
    ASSERT_TRUE(relay.ok()) << relay.status();
    EXPECT_TRUE(absl::StartsWith((*relay)->address(), "unix:/tmp/muster-")) << folder;
  }
  before == nullptr ? unsetenv("TMPDIR") : setenv("TMPDIR", kept.c_str(), 1);
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
