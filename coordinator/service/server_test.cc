#include "coordinator/service/server.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mutate.h"
#include "base/mutex.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "base/test_keys.h"
#include "base/test_wait.h"
#include "coordinator/journal/memory_journal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/backup.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/job.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/operations.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "proto/muster/v1/watch.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);

std::unique_ptr<CoordinatorServer> StartServer(CoordinatorServer::Options options = {}) {
  options.rpc.insecure = options.token_file.empty() && options.users_file.empty();
  auto server = CoordinatorServer::Start(std::move(options));
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

// A journal that is durable when the test says so, and fails when it says so.
class HeldJournal final : public Journal {
 public:
  const std::string& cluster_id() const override { return cluster_id_; }
  uint64_t term() const override { return 1; }
  const std::string& description() const override { return description_; }
  absl::Status Replay(const std::function<absl::Status(uint64_t, absl::string_view)>&,
                      const std::function<absl::Status(uint64_t, absl::string_view)>&) override {
    return absl::OkStatus();
  }
  void Start(std::function<void(const Progress&)> progress) override {
    progress_ = std::move(progress);
  }
  void Append(uint64_t revision, std::string) override {
    bool held;
    {
      MutexLock lock(&mu_);
      appended_ = revision;
      held = held_;
      changed_.SignalAll();
    }
    if (!held) Tell(revision, absl::OkStatus());
  }
  void WriteSnapshot(uint64_t, std::unique_ptr<Replica>,
                     std::function<void(absl::Status)> done) override {
    done(absl::ResourceExhaustedError("no room"));
  }
  uint64_t records_since_snapshot() const override { return 0; }
  uint64_t bytes_since_snapshot() const override { return 0; }
  void Stop() override {}

  // Makes nothing durable from now on.
  void Hold() {
    MutexLock lock(&mu_);
    held_ = true;
    seen_ = appended_;
  }
  // Blocks until something was appended since Hold.
  void WaitAppended() {
    MutexLock lock(&mu_);
    while (appended_ == seen_) changed_.Wait(&mu_);
  }
  void Fail() { Tell(seen(), absl::ResourceExhaustedError("disk full")); }
  void Release() {
    uint64_t revision;
    {
      MutexLock lock(&mu_);
      held_ = false;
      revision = appended_;
    }
    Tell(revision, absl::OkStatus());
  }

 private:
  uint64_t seen() {
    MutexLock lock(&mu_);
    return seen_;
  }
  void Tell(uint64_t revision, absl::Status status) {
    progress_({.durable_revision = revision,
               .status = std::move(status),
               .took = absl::ZeroDuration(),
               .records = 1,
               .bytes = 1});
  }

  const std::string cluster_id_ = NewClusterId();
  const std::string description_ = "held";
  std::function<void(const Progress&)> progress_;
  Mutex mu_;
  CondVar changed_;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t appended_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t seen_ ABSL_GUARDED_BY(mu_) = 0;
};

v1::JoinRequest JoinOf(const std::string& job, int rank, int world) {
  v1::JoinRequest join;
  join.mutable_fence()->set_job_id(job);
  join.mutable_fence()->set_worker_id(absl::StrCat("w", rank));
  join.mutable_fence()->set_incarnation(100 + rank);
  join.mutable_spec()->set_min_workers(world);
  join.mutable_spec()->set_max_workers(world);
  join.mutable_spec()->mutable_lease()->set_seconds(3600);
  join.mutable_spec()->set_end_generation_on_failure(true);
  join.mutable_topology()->set_host("h");
  join.mutable_topology()->set_local_rank(rank);
  join.mutable_topology()->set_local_world_size(world);
  join.set_preferred_rank(rank);
  return join;
}

v1::Fence FenceOf(const std::string& job, int rank, uint64_t generation, uint64_t request = 0) {
  v1::Fence fence;
  fence.set_job_id(job);
  fence.set_worker_id(absl::StrCat("w", rank));
  fence.set_incarnation(100 + rank);
  fence.set_generation(generation);
  fence.set_request_id(request);
  return fence;
}

// The unary calls of one client, each with a deadline.
class Client {
 public:
  explicit Client(const std::string& address, const std::string& token_file = "")
      : channel_(*rpc::Connect(address, {.token_file = token_file, .own_connection = true})) {}

  template <typename Service, typename Request, typename Reply>
  absl::Status Call(grpc::Status (Service::Stub::*method)(grpc::ClientContext*, const Request&,
                                                          Reply*),
                    const Request& request, Reply* reply, absl::Duration timeout = kPatience) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, timeout);
    context.set_wait_for_ready(true);
    auto stub = Service::NewStub(channel_);
    return rpc::FromGrpc((stub.get()->*method)(&context, request, reply));
  }

  absl::Status Join(const v1::JoinRequest& join, v1::JoinReply* reply) {
    return Call<v1::Rendezvous>(&v1::Rendezvous::Stub::Join, join, reply);
  }
  absl::Status Put(const v1::Fence& fence, const std::string& key, const std::string& value,
                   bool durable, v1::TxnReply* reply = nullptr) {
    v1::TxnRequest txn;
    *txn.mutable_fence() = fence;
    v1::PutOp& put = *txn.add_then()->mutable_put();
    put.set_key(key);
    put.set_value(value);
    put.set_klass(durable ? v1::KV_CLASS_DURABLE : v1::KV_CLASS_EPHEMERAL);
    v1::TxnReply unused;
    return Call<v1::KeyValueStore>(&v1::KeyValueStore::Stub::Txn, txn,
                                   reply == nullptr ? &unused : reply);
  }
  absl::StatusOr<std::string> Get(const v1::Fence& fence, const std::string& key) {
    v1::TxnRequest txn;
    *txn.mutable_fence() = fence;
    txn.add_then()->mutable_get()->set_key(key);
    v1::TxnReply reply;
    const absl::Status status = Call<v1::KeyValueStore>(&v1::KeyValueStore::Stub::Txn, txn, &reply);
    if (!status.ok()) return status;
    if (reply.results(0).kvs_size() == 0) return absl::NotFoundError(key);
    return reply.results(0).kvs(0).value();
  }
  absl::Status Wait(const v1::Fence& fence, const std::string& key,
                    absl::Duration timeout = kPatience) {
    v1::WaitRequest wait;
    *wait.mutable_fence() = fence;
    wait.add_keys(key);
    wait.mutable_timeout()->set_seconds(3000);
    v1::WaitReply reply;
    return Call<v1::KeyValueStore>(&v1::KeyValueStore::Stub::Wait, wait, &reply, timeout);
  }
  absl::StatusOr<v1::StatusReply> Status() {
    v1::StatusReply reply;
    const absl::Status status =
        Call<v1::Admin>(&v1::Admin::Stub::Status, v1::StatusRequest(), &reply);
    if (!status.ok()) return status;
    return reply;
  }
  const std::shared_ptr<grpc::Channel>& channel() { return channel_; }

 private:
  std::shared_ptr<grpc::Channel> channel_;
};

// Seats one worker alone in `job`; returns its generation.
uint64_t SeatOne(Client& client, const std::string& job) {
  v1::JoinReply reply;
  const absl::Status status = client.Join(JoinOf(job, 0, 1), &reply);
  EXPECT_TRUE(status.ok()) << status;
  return reply.generation();
}

// An agent's stream, as an agent would use it.
class AgentClient {
 public:
  AgentClient(const std::string& address, const std::string& node, uint64_t incarnation,
              const std::string& token_file = "")
      : channel_(*rpc::Connect(address, {.token_file = token_file, .own_connection = true})),
        node_(node),
        incarnation_(incarnation) {}
  ~AgentClient() { Break(); }

  // Sets what its Hello has besides its identity.
  void SetHello(const v1::Hello& hello) { more_ = hello; }
  v1::Welcome Attach() {
    Break();
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_wait_for_ready(true);
    stream_ = v1::Session::NewStub(channel_)->Attach(context_.get());
    v1::AgentFrame hello;
    *hello.mutable_hello() = more_;
    hello.mutable_hello()->set_protocol_min(1);
    hello.mutable_hello()->set_protocol_max(1);
    hello.mutable_hello()->set_node(node_);
    hello.mutable_hello()->set_host(node_);
    hello.mutable_hello()->set_agent_incarnation(incarnation_);
    hello.mutable_hello()->set_last_received_seq(received_);
    hello.mutable_hello()->set_session_id(session_);
    EXPECT_TRUE(stream_->Write(hello));
    v1::CoordinatorFrame frame;
    EXPECT_TRUE(stream_->Read(&frame));
    EXPECT_TRUE(frame.has_welcome()) << frame.ShortDebugString();
    if (frame.welcome().session_id() != session_) received_ = seq_ = 0;
    session_ = frame.welcome().session_id();
    return frame.welcome();
  }
  // Breaks the connection.
  void Break() {
    if (stream_ == nullptr) return;
    context_->TryCancel();
    stream_->Finish();
    stream_.reset();
  }
  uint64_t Send(std::vector<v1::Op> ops) {
    v1::AgentFrame frame;
    frame.set_seq(++seq_);
    frame.set_ack(received_);
    for (v1::Op& op : ops) *frame.mutable_ops()->add_ops() = std::move(op);
    last_ = frame;
    EXPECT_TRUE(stream_->Write(frame));
    return seq_;
  }
  void SendAgain() {
    if (last_.seq() > seq_) last_.set_seq(++seq_);  // in a new session
    EXPECT_TRUE(stream_->Write(last_));
  }
  void SendRaw(const v1::AgentFrame& frame) { EXPECT_TRUE(stream_->Write(frame)); }
  // Reads the next frame that is more than an acknowledgement; false when the stream has ended.
  bool Read(v1::CoordinatorFrame* frame) {
    while (stream_->Read(frame)) {
      if (frame->ack() > acked_) acked_ = frame->ack();
      if (frame->seq() != 0) {
        EXPECT_GT(frame->seq(), received_) << "a frame came twice on one stream";
        received_ = frame->seq();
      }
      if (frame->kind_case() != v1::CoordinatorFrame::KIND_NOT_SET) return true;
    }
    return false;
  }
  // Reads until the op has its result.
  v1::OpResult Result(uint64_t op_id) {
    while (!results_.contains(op_id)) {
      v1::CoordinatorFrame frame;
      if (!Read(&frame)) {
        ADD_FAILURE() << "the stream ended before the result of op " << op_id;
        return {};
      }
      for (const v1::OpResult& result : frame.results().results()) {
        EXPECT_FALSE(results_.contains(result.op_id())) << "two results";
        results_[result.op_id()] = result;
      }
      if (frame.has_directive()) directives_.push_back(frame.directive());
    }
    return results_[op_id];
  }
  v1::Directive NextDirective() {
    while (directives_.empty()) {
      v1::CoordinatorFrame frame;
      if (!Read(&frame)) {
        ADD_FAILURE() << "the stream ended before a directive";
        return {};
      }
      for (const v1::OpResult& result : frame.results().results())
        results_[result.op_id()] = result;
      if (frame.has_directive()) directives_.push_back(frame.directive());
    }
    v1::Directive directive = directives_.front();
    directives_.pop_front();
    return directive;
  }
  absl::Status Finish() {
    v1::CoordinatorFrame frame;
    while (stream_->Read(&frame)) {
    }
    const absl::Status status = rpc::FromGrpc(stream_->Finish());
    stream_.reset();
    return status;
  }
  grpc::ClientReaderWriter<v1::AgentFrame, v1::CoordinatorFrame>& stream() { return *stream_; }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const std::string node_;
  const uint64_t incarnation_;
  v1::Hello more_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AgentFrame, v1::CoordinatorFrame>> stream_;
  uint64_t seq_ = 0;
  uint64_t received_ = 0;
  uint64_t acked_ = 0;
  std::string session_;
  v1::AgentFrame last_;
  std::map<uint64_t, v1::OpResult> results_;
  std::deque<v1::Directive> directives_;
};

v1::Op JoinOp(uint64_t op_id, const std::string& job, int rank, int world) {
  v1::Op op;
  op.set_op_id(op_id);
  *op.mutable_join() = JoinOf(job, rank, world);
  return op;
}

v1::Op ArriveOp(uint64_t op_id, const std::string& job, int rank, uint64_t generation,
                uint64_t counter = 0) {
  v1::Op op;
  op.set_op_id(op_id);
  v1::ArriveRequest& arrive = *op.mutable_arrive();
  *arrive.mutable_fence() = FenceOf(job, rank, generation);
  arrive.set_barrier_id("b");
  arrive.set_counter(counter);
  arrive.set_rank(rank);
  return op;
}

TEST(CoordinatorServer, UnaryWithoutDeadline_IsRefused) {
  auto server = StartServer();
  Client client(server->address());
  grpc::ClientContext context;
  v1::TxnReply reply;
  const absl::Status status = rpc::FromGrpc(
      v1::KeyValueStore::NewStub(client.channel())->Txn(&context, v1::TxnRequest(), &reply));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_DEADLINE_REQUIRED);
}

// A stream of raw messages, for services whose messages are not ours.
class RawStream {
 public:
  RawStream(Client& client, const std::string& path, const std::string& request)
      : stub_(client.channel()) {
    rpc::SetTimeout(context_, kPatience);
    stream_ = stub_.PrepareCall(&context_, path, &queue_);
    stream_->StartCall(nullptr);
    EXPECT_TRUE(Next());
    const grpc::Slice slice(request);
    stream_->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    EXPECT_TRUE(Next());
  }
  ~RawStream() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  // Returns the next message, or "end".
  std::string Read() {
    grpc::ByteBuffer message;
    stream_->Read(&message, nullptr);
    if (!Next()) return "end";
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(message.Dump(&slices).ok());
    std::string bytes;
    for (const grpc::Slice& slice : slices)
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    return bytes;
  }

 private:
  bool Next() {
    void* tag;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
    return ok;
  }
  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

// Returns "/muster.v1.Barrier/Arrive" and all the others.
std::vector<const google::protobuf::MethodDescriptor*> MethodsOfTheContract() {
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const google::protobuf::Descriptor* message :
       {v1::StatusReply::descriptor(), v1::ArriveRequest::descriptor(),
        v1::TxnRequest::descriptor(), v1::Member::descriptor(), v1::JoinRequest::descriptor(),
        v1::AgentFrame::descriptor(), v1::PollTriggersRequest::descriptor(),
        v1::WatchRequest::descriptor(), v1::JobSpec::descriptor()}) {
    const google::protobuf::FileDescriptor* file = message->file();
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.push_back(file->service(s)->method(m));
      }
    }
  }
  return methods;
}

std::string PathOf(const google::protobuf::MethodDescriptor& method) {
  return absl::StrCat("/", method.service()->full_name(), "/", method.name());
}

// Calls with bytes that parse as no message, and returns the status of the call.
absl::Status CallWithGarbage(Client& client, const std::string& path) {
  grpc::GenericStub stub(client.channel());
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  rpc::SetTimeout(context, kPatience);
  context.set_wait_for_ready(true);
  const grpc::Slice garbage("\xff\xff\xff");
  auto reader = stub.PrepareUnaryCall(&context, path, grpc::ByteBuffer(&garbage, 1), &queue);
  grpc::ByteBuffer reply;
  grpc::Status status;
  reader->StartCall();
  reader->Finish(&reply, &status, nullptr);
  void* tag;
  bool ok;
  EXPECT_TRUE(queue.Next(&tag, &ok));
  return rpc::FromGrpc(status);
}

// Every method of the contract has its row in the table of methods.
TEST(CoordinatorServer, EveryMethodOfTheContract_IsServed) {
  auto server = StartServer();
  Client client(server->address());
  for (const auto* method : MethodsOfTheContract()) {
    const absl::Status status = CallWithGarbage(client, PathOf(*method));
    const bool no_input = method->input_type()->field_count() == 0;
    EXPECT_EQ(status.code(), no_input ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
        << PathOf(*method) << ": " << status;
  }
  EXPECT_EQ(MethodsOfTheContract().size(), 30u);
  EXPECT_EQ(CallWithGarbage(client, "/muster.v1.Barrier/Levitate").code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(CallWithGarbage(client, "/grpc.health.v1.Health/Check").code(),
            absl::StatusCode::kInvalidArgument);
}

std::string WriteToken(const std::string& name, const std::string& token) {
  const std::string path = TestPath(name);
  std::ofstream(path) << token;
  EXPECT_EQ(chmod(path.c_str(), 0600), 0);
  return path;
}

TEST(CoordinatorServer, Token_EveryCallAndStreamWithoutIt_IsRefused) {
  const std::string token = WriteToken("token", "s3cret"), wrong = WriteToken("wrong", "s3creT");
  CoordinatorServer::Options options;
  options.token_file = token;
  auto server = StartServer(std::move(options));
  Client nobody(server->address()), somebody(server->address(), wrong);
  for (Client* client : {&nobody, &somebody}) {
    std::vector<std::string> paths = {"/muster.v1.Barrier/Levitate", "/nothing"};
    for (const auto* method : MethodsOfTheContract()) paths.push_back(PathOf(*method));
    for (const std::string& path : paths) {
      const absl::Status status = CallWithGarbage(*client, path);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << path << ": " << status;
      EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_BAD_TOKEN) << path;
      EXPECT_THAT(std::string(status.message()), HasSubstr("--token_file")) << path;
    }
  }
  // None of these calls has reached the core.
  Client friendly(server->address(), token);
  const auto status = friendly.Status();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->jobs_size(), 0);
  EXPECT_EQ(status->agents(), 0);
  // The health service is for callers without a token.
  EXPECT_EQ(RawStream(nobody, "/grpc.health.v1.Health/Check", "").Read(), "\x08\x01");
  EXPECT_EQ(RawStream(nobody, "/grpc.health.v1.Health/Watch", "").Read(), "\x08\x01");
}

TEST(CoordinatorServer, Token_CallsAndStreamsWithIt_AreServed) {
  const std::string token = WriteToken("token", "s3cret");
  CoordinatorServer::Options options;
  options.token_file = token;
  auto server = StartServer(std::move(options));
  Client client(server->address(), token);
  EXPECT_GT(SeatOne(client, "j"), 0u);
  AgentClient agent(server->address(), "n", 1, token);
  EXPECT_NE(agent.Attach().session_id(), "");
  EXPECT_EQ(client.Status()->agents(), 1);
}

std::string UserLine(const std::string& name, const std::string& role, const std::string& token) {
  return absl::StrCat(name, " ", role, " sha256:", absl::BytesToHexString(Sha256(token)), "\n");
}

TEST(CoordinatorServer, Users_MayDoWhatTheirRoleSays) {
  const TestFolder folder;
  CoordinatorServer::Options options;
  options.users_file = folder.Path("users");
  options.audit_log = folder.Path("audit");
  ASSERT_TRUE(WriteSecretFile(options.users_file, UserLine("ann", "submit", "ann's") +
                                                      UserLine("bob", "view", "bob's") +
                                                      UserLine("nodes", "node", "nodes'") +
                                                      UserLine("root", "admin", "root's"))
                  .ok());
  const std::string audit = options.audit_log;
  auto server = StartServer(std::move(options));
  const auto client = [&](const std::string& token) {
    return std::make_unique<Client>(server->address(), WriteToken("token-of-a-user", token));
  };
  const auto ann = client("ann's"), bob = client("bob's"), nodes = client("nodes'"),
             root = client("root's"), eve = client("eve's");
  EXPECT_EQ(rpc::GetReason(eve->Status().status()), v1::ERROR_REASON_BAD_TOKEN);
  EXPECT_TRUE(ann->Status().ok());
  EXPECT_TRUE(bob->Status().ok());
  EXPECT_EQ(rpc::GetReason(nodes->Status().status()), v1::ERROR_REASON_SCOPE);

  const auto submit = [&](const std::unique_ptr<Client>& client) {
    v1::SubmitJobRequest request;
    request.mutable_spec()->set_name("mnist");
    request.mutable_spec()->add_argv("./train");
    request.mutable_spec()->set_max_processes(1);
    request.mutable_spec()->set_wait_for_nodes(true);
    request.set_owner("somebody else");
    v1::SubmitJobReply reply;
    const absl::Status status = client->Call<v1::Jobs>(&v1::Jobs::Stub::Submit, request, &reply);
    if (status.ok()) {
      EXPECT_EQ(reply.job().owner(), client == ann ? "ann" : "root");
    }
    return status;
  };
  const auto cancel = [](const std::unique_ptr<Client>& client, const std::string& job) {
    v1::ControlJobRequest request;
    request.set_job_id(job);
    request.set_action(v1::JOB_ACTION_CANCEL);
    v1::ControlJobReply reply;
    return client->Call<v1::Jobs>(&v1::Jobs::Stub::Control, request, &reply);
  };
  EXPECT_TRUE(submit(ann).ok());
  EXPECT_TRUE(submit(root).ok());
  for (const auto* client : {&bob, &nodes}) {
    const absl::Status refused = submit(*client);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_EQ(rpc::GetReason(refused), v1::ERROR_REASON_SCOPE);
  }
  EXPECT_EQ(rpc::GetReason(cancel(ann, "mnist-2")), v1::ERROR_REASON_SCOPE);
  EXPECT_EQ(rpc::GetReason(cancel(bob, "mnist-1")), v1::ERROR_REASON_SCOPE);
  // A caller that may list jobs may watch them, and sees the same.
  const auto watch = [&](const std::unique_ptr<Client>& client, v1::WatchJobsBatch* batch) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, kPatience);
    const auto reader = v1::Jobs::NewStub(client->channel())->Watch(&context, {});
    const bool told = reader->Read(batch);
    context.TryCancel();
    const absl::Status status = rpc::FromGrpc(reader->Finish());
    return told ? absl::OkStatus() : status;
  };
  for (const auto* client : {&ann, &bob, &root}) {
    v1::WatchJobsBatch batch;
    EXPECT_TRUE(watch(*client, &batch).ok());
    EXPECT_EQ(batch.jobs_size(), 2);
  }
  for (const auto* client : {&nodes, &eve}) {
    v1::WatchJobsBatch batch;
    EXPECT_FALSE(watch(*client, &batch).ok());
  }
  EXPECT_TRUE(cancel(ann, "mnist-1").ok());
  EXPECT_TRUE(cancel(root, "mnist-2").ok());
  // The log may have what others must not see.
  v1::SetLogLevelRequest quiet;
  quiet.set_level(v1::LOG_LEVEL_WARNING);
  quiet.mutable_for_()->set_seconds(600);
  v1::SetLogLevelReply level;
  for (const auto* client : {&ann, &bob, &nodes}) {
    for (const v1::SetLogLevelRequest& request : {quiet, v1::SetLogLevelRequest()}) {
      EXPECT_EQ(rpc::GetReason((*client)->Call<v1::Operations>(&v1::Operations::Stub::SetLogLevel,
                                                               request, &level)),
                v1::ERROR_REASON_SCOPE);
    }
  }
  EXPECT_TRUE(root->Call<v1::Operations>(&v1::Operations::Stub::SetLogLevel, quiet, &level).ok());
  // A person may not attach as an agent.
  EXPECT_EQ(rpc::GetReason(CallWithGarbage(*ann, "/muster.v1.Session/Attach")),
            v1::ERROR_REASON_SCOPE);

  const std::string lines = *ReadFile(audit);
  EXPECT_THAT(lines, HasSubstr("\"user\":\"ann\",\"role\":\"submit\""));
  EXPECT_THAT(lines, HasSubstr("\"call\":\"control_job\",\"job\":\"mnist-2\",\"action\":"
                               "\"JOB_ACTION_CANCEL\",\"result\":\"PERMISSION_DENIED\""));
  EXPECT_THAT(lines, HasSubstr("\"call\":\"submit_job\",\"job\":\"mnist-1\""));
  EXPECT_THAT(lines, HasSubstr("\"call\":\"set the log level\",\"result\":\"PERMISSION_DENIED\""));
  EXPECT_THAT(lines, HasSubstr("\"call\":\"set the log level to warning for 10m00s\",\"result\":"
                               "\"OK\""));
  EXPECT_EQ(lines.find("get_job"), std::string::npos);
}

TEST(CoordinatorServer, LogLevel_IsReadSetAndReturnsAtTheEnd) {
  const LogLevel before = GetLogLevel();
  auto server = StartServer();
  Client client(server->address());
  v1::SetLogLevelReply reply;
  const auto call = [&](int level, int64_t seconds, bool timed) {
    v1::SetLogLevelRequest request;
    request.set_level(static_cast<v1::LogLevel>(level));
    if (timed) request.mutable_for_()->set_seconds(seconds);
    return client.Call<v1::Operations>(&v1::Operations::Stub::SetLogLevel, request, &reply);
  };
  ASSERT_TRUE(call(v1::LOG_LEVEL_UNSPECIFIED, 0, false).ok());
  EXPECT_EQ(static_cast<int>(reply.level()), static_cast<int>(before) + 1);
  EXPECT_FALSE(reply.has_left());

  ASSERT_TRUE(call(v1::LOG_LEVEL_ERROR, 600, true).ok());
  EXPECT_EQ(GetLogLevel(), LogLevel::kError);
  ASSERT_TRUE(call(v1::LOG_LEVEL_UNSPECIFIED, 0, false).ok());
  EXPECT_EQ(reply.level(), v1::LOG_LEVEL_ERROR);
  EXPECT_EQ(static_cast<int>(reply.next()), static_cast<int>(before) + 1);
  EXPECT_GT(reply.left().seconds(), 500);

  // A meaningless value changes nothing.
  for (const auto& [level, seconds] :
       std::vector<std::pair<int, int64_t>>{{v1::LOG_LEVEL_DEBUG, 0},
                                            {v1::LOG_LEVEL_DEBUG, -600},
                                            {v1::LOG_LEVEL_DEBUG, 24 * 3600 + 1},
                                            {v1::LOG_LEVEL_DEBUG, INT64_MAX},
                                            {v1::LOG_LEVEL_UNSPECIFIED, 600},
                                            {5, 600},
                                            {-1, 600}}) {
    const absl::Status status = call(level, seconds, true);
    EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_BAD_FIELD) << level << " " << seconds;
    EXPECT_EQ(GetLogLevel(), LogLevel::kError);
  }
  server.reset();
  EXPECT_EQ(GetLogLevel(), before);
}

TEST(CoordinatorServer, DiskThatIsNearlyFull_RefusesSubmissionsUntilThereIsRoom) {
  const TestFolder folder;
  std::atomic<int64_t> left{int64_t{1} << 40};
  CoordinatorServer::Options options;
  options.data_dir = folder.Path("journal");
  options.measure_disk = [&] { return DiskSizes{.used = 5, .free = left}; };
  auto server = StartServer(std::move(options));
  Client client(server->address());
  const auto submit = [&] {
    v1::SubmitJobRequest request;
    request.mutable_spec()->set_name("mnist");
    request.mutable_spec()->add_argv("./train");
    request.mutable_spec()->set_max_processes(1);
    request.mutable_spec()->set_wait_for_nodes(true);
    v1::SubmitJobReply reply;
    return client.Call<v1::Jobs>(&v1::Jobs::Stub::Submit, request, &reply);
  };
  EXPECT_TRUE(submit().ok());
  EXPECT_TRUE(client.Status()->warnings().empty());
  left = 1000;
  server->disk()->Tick();
  EXPECT_TRUE(absl::IsResourceExhausted(submit()));
  ASSERT_EQ(client.Status()->warnings_size(), 1);
  EXPECT_THAT(client.Status()->warnings(0), HasSubstr("no job can be submitted"));
  EXPECT_THAT(server->Metrics(), HasSubstr("\nmuster_submissions_open 0\n"));
  EXPECT_THAT(server->Metrics(), HasSubstr("\nmuster_data_dir_free_bytes 1000\n"));
  // Changes that are not submissions are written too.
  v1::Fence fence;
  fence.set_job_id("j");
  fence.set_worker_id("w0");
  fence.set_incarnation(100);
  fence.set_generation(SeatOne(client, "j"));
  EXPECT_TRUE(client.Put(fence, "k", "v", true).ok());
  left = int64_t{1} << 40;
  server->disk()->Tick();
  EXPECT_TRUE(submit().ok());
  EXPECT_TRUE(client.Status()->warnings().empty());
  EXPECT_THAT(server->Metrics(), HasSubstr("\nmuster_submissions_open 1\n"));
}

TEST(CoordinatorServer, TokenFileThatCannotBeUsed_IsRefusedBeforeTheJournalIsTouched) {
  const TestFolder folder;
  const std::string dir = folder.Path("journal");
  const std::string open = WriteToken("open", "s3cret");
  ASSERT_EQ(chmod(open.c_str(), 0644), 0);
  const struct {
    std::string token_file;
    absl::StatusCode code;
  } kCases[] = {{"/nowhere/token", absl::StatusCode::kNotFound},
                {open, absl::StatusCode::kPermissionDenied},
                {"", absl::StatusCode::kInvalidArgument}};  // every user of the machine
  for (const auto& c : kCases) {
    CoordinatorServer::Options options;
    options.data_dir = dir;
    options.token_file = c.token_file;
    EXPECT_EQ(CoordinatorServer::Start(std::move(options)).status().code(), c.code);
    EXPECT_FALSE(std::filesystem::exists(dir));
  }
}

TEST(CoordinatorServer, CheckpointKeyThatCannotBeUsed_IsRefusedBeforeTheJournalIsTouched) {
  const TestFolder folder;
  const std::string dir = folder.Path("journal"), key = folder.Path("checkpoint_key.pem");
  ASSERT_TRUE(WriteFileAtomically(key, kTestPrivateKey).ok());
  const std::string no_key = WriteToken("no_key", "s3cret");
  const struct {
    std::string file;
    mode_t mode;
    std::string words;
  } kCases[] = {
      {key, 0644, "checkpoint_key: other users can access the private key in '" + key + "'"},
      {no_key, 0600, "checkpoint_key: '" + no_key + "' holds no private Ed25519 key"}};
  for (const auto& c : kCases) {
    ASSERT_EQ(chmod(c.file.c_str(), c.mode), 0);
    CoordinatorServer::Options options;
    options.data_dir = dir;
    options.rpc.insecure = true;
    options.checkpoint_key = c.file;
    EXPECT_THAT(std::string(CoordinatorServer::Start(std::move(options)).status().message()),
                HasSubstr(c.words));
    EXPECT_FALSE(std::filesystem::exists(dir));
  }
  ASSERT_EQ(chmod(key.c_str(), 0600), 0);
  CoordinatorServer::Options options;
  options.checkpoint_key = key;
  StartServer(std::move(options));
}

TEST(CoordinatorServer, Reflection_ListsAndDescribesTheContract) {
  CoordinatorServer::Options options;
  options.rpc.reflection = true;
  auto server = StartServer(std::move(options));
  Client client(server->address());
  const std::string path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  const std::string services = RawStream(client, path, "\x3A\x01*").Read();  // list_services
  for (const char* name : {"muster.v1.Barrier", "muster.v1.KeyValueStore", "muster.v1.Session",
                           "muster.v1.Admin", "grpc.health.v1.Health"})
    EXPECT_THAT(services, HasSubstr(name));
  // file_containing_symbol
  EXPECT_THAT(RawStream(client, path, "\x22\x11muster.v1.Barrier").Read(),
              HasSubstr("ArriveManyRequest"));
}

TEST(CoordinatorServer, Health_IsCheckedAndWatched) {
  auto journal = std::make_unique<HeldJournal>();
  HeldJournal* raw = journal.get();
  CoordinatorServer::Options options;
  options.journal = std::move(journal);
  auto server = StartServer(std::move(options));
  Client client(server->address()), other(server->address());
  const uint64_t generation = SeatOne(client, "j");
  const std::string check = "/grpc.health.v1.Health/Check", watch = "/grpc.health.v1.Health/Watch";
  const std::string serving = "\x08\x01", not_serving = "\x08\x02", unknown = "\x08\x03";
  EXPECT_EQ(RawStream(client, check, "").Read(), serving);
  EXPECT_EQ(RawStream(client, check, "\x0A\x11muster.v1.Barrier").Read(), serving);
  EXPECT_EQ(RawStream(client, check, "\x0A\x03moo").Read(), "end");  // NOT_FOUND
  EXPECT_EQ(RawStream(client, watch, "\x0A\x03moo").Read(), unknown);
  RawStream all(client, watch, "");
  EXPECT_EQ(all.Read(), serving);
  raw->Hold();
  std::thread writer([&] { (void)other.Put(FenceOf("j", 0, generation), "k", "v", true); });
  raw->WaitAppended();
  raw->Fail();
  writer.join();
  EXPECT_EQ(all.Read(), not_serving);
  EXPECT_EQ(RawStream(client, check, "").Read(), not_serving);
  raw->Release();
  EXPECT_EQ(all.Read(), serving);
  server->Shutdown();
  std::string last = all.Read();
  if (last == not_serving) last = all.Read();
  EXPECT_EQ(last, "end");
}

TEST(CoordinatorServer, LargeRequest_IsRefusedAtTheLimit) {
  CoordinatorServer::Options options;
  options.rpc.max_message_bytes = 64 << 10;
  auto server = StartServer(std::move(options));
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  const v1::Fence fence = FenceOf("j", 0, generation);
  v1::TxnRequest txn;
  *txn.mutable_fence() = fence;
  txn.add_then()->mutable_put()->set_key("k");
  txn.mutable_then(0)->mutable_put()->set_klass(v1::KV_CLASS_EPHEMERAL);
  size_t value = 65'000;
  const auto size_with = [&](size_t bytes) {
    txn.mutable_then(0)->mutable_put()->set_value(std::string(bytes, 'x'));
    return txn.ByteSizeLong();
  };
  while (size_with(value) < (64 << 10)) ++value;
  ASSERT_EQ(txn.ByteSizeLong(), 64u << 10);
  EXPECT_TRUE(client.Put(fence, "k", std::string(value, 'x'), false).ok());
  EXPECT_EQ(client.Put(fence, "k", std::string(value + 1, 'x'), false).code(),
            absl::StatusCode::kResourceExhausted);
  // The key is there, but an answer with it would be larger than a message.
  EXPECT_EQ(rpc::GetReason(client.Get(fence, "k").status()), v1::ERROR_REASON_LIMIT);
  EXPECT_TRUE(client.Status().ok());
}

// Hundreds of missing ranks do not fit the trailers of a unary call: it names the first ones, and
// Describe all of them.
TEST(CoordinatorServer, LongBarrierReport_IsCutInTheErrorAndWholeInDescribe) {
  constexpr int kRanks = 600;
  auto server = StartServer();
  Client client(server->address());
  AgentClient agent(server->address(), "node", 1);
  agent.Attach();
  std::vector<v1::Op> joins;
  for (int rank = 0; rank < kRanks; ++rank) joins.push_back(JoinOp(rank + 1, "j", rank, kRanks));
  agent.Send(std::move(joins));
  const uint64_t generation = agent.Result(1).join().generation();
  v1::ArriveRequest arrive = ArriveOp(1, "j", 0, generation).arrive();
  arrive.mutable_timeout()->set_nanos(50'000'000);
  v1::ArriveReply reply;
  const absl::Status status = client.Call<v1::Barrier>(&v1::Barrier::Stub::Arrive, arrive, &reply);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_BARRIER_TIMEOUT);
  EXPECT_LE(rpc::GetDetail(status)->ByteSizeLong(), 4096u);
  EXPECT_GT(rpc::GetDetail(status)->culprits_size(), 0);
  v1::DescribeBarrierRequest describe;
  describe.set_job_id("j");
  describe.set_barrier_id("b");
  v1::DescribeBarrierReply described;
  ASSERT_TRUE(client.Call<v1::Barrier>(&v1::Barrier::Stub::Describe, describe, &described).ok());
  EXPECT_EQ(described.report().missing_ranks_size(), kRanks - 1);
  EXPECT_GT(described.report().ByteSizeLong(), 8192u);
}

TEST(CoordinatorServer, LateWorker_IsWaitedFor) {
  auto server = StartServer();
  Client first(server->address()), late(server->address());
  v1::JoinReply first_reply, late_reply;
  std::thread waiting([&] { EXPECT_TRUE(first.Join(JoinOf("j", 0, 2), &first_reply).ok()); });
  WaitUntil([&] { return server->runner().open_calls() != 0; });
  EXPECT_TRUE(late.Join(JoinOf("j", 1, 2), &late_reply).ok());
  waiting.join();
  EXPECT_EQ(first_reply.rank(), 0);
  EXPECT_EQ(late_reply.rank(), 1);
  EXPECT_EQ(first_reply.generation(), late_reply.generation());
  EXPECT_EQ(first_reply.header().term(), 1u);
  EXPECT_EQ(first_reply.header().cluster_id().size(), 32u);
}

TEST(CoordinatorServer, WaitingGet_EndsWhenTheKeyIsPut) {
  auto server = StartServer();
  Client client(server->address()), other(server->address());
  const uint64_t generation = SeatOne(client, "j");
  std::thread waiting([&] {
    const absl::Status status = other.Wait(FenceOf("j", 0, generation), "k");
    EXPECT_TRUE(status.ok()) << status;
  });
  WaitUntil([&] { return server->runner().open_calls() != 0; });
  EXPECT_TRUE(client.Put(FenceOf("j", 0, generation), "k", "v", false).ok());
  waiting.join();
  EXPECT_EQ(*client.Get(FenceOf("j", 0, generation), "k"), "v");
}

TEST(CoordinatorServer, CallerGone_IsForgotten) {
  auto server = StartServer();
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  const absl::Status status =
      client.Wait(FenceOf("j", 0, generation), "never", absl::Milliseconds(50));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  WaitUntil([&] { return server->runner().open_calls() == 0; });
  EXPECT_TRUE(client.Put(FenceOf("j", 0, generation), "never", "v", false).ok());
}

TEST(CoordinatorServer, Shutdown_AnswersThoseWhoWait) {
  auto server = StartServer();
  Client client(server->address()), other(server->address());
  AgentClient agent(server->address(), "node", 1);
  agent.Attach();
  const uint64_t generation = SeatOne(client, "j");
  std::thread waiting([&] {
    const absl::Status status = other.Wait(FenceOf("j", 0, generation), "never");
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_STOPPING);
  });
  WaitUntil([&] { return server->runner().open_calls() != 0; });
  server->Shutdown();
  waiting.join();
  EXPECT_EQ(agent.Finish().code(), absl::StatusCode::kUnavailable);
  server->Shutdown();  // repeatable
}

// Calls that begin while the frontend goes down are answered or refused; nothing hangs, nothing is
// used after it is gone.
TEST(CoordinatorServer, ShutdownWhileCallsBegin_EndsEachTime) {
  for (int round = 0; round < 20; ++round) {
    auto server = StartServer();
    const std::string address = server->address();
    std::atomic<bool> stop{false};
    std::atomic<int> answered{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) {
      callers.emplace_back([&] {
        Client client(address);
        grpc::CompletionQueue queue;
        const auto stub = v1::Admin::NewStub(client.channel());
        struct Pending {
          grpc::ClientContext context;
          v1::StatusReply reply;
          grpc::Status status;
          std::unique_ptr<grpc::ClientAsyncResponseReader<v1::StatusReply>> reader;
        };
        int open = 0;
        while (!stop || open > 0) {
          for (; !stop && open < 16; ++open) {
            auto* const call = new Pending;
            rpc::SetTimeout(call->context, kPatience);
            call->reader = stub->AsyncStatus(&call->context, v1::StatusRequest(), &queue);
            call->reader->Finish(&call->reply, &call->status, call);
          }
          void* tag;
          bool ok;
          if (open > 0 && queue.Next(&tag, &ok)) {
            --open;
            const std::unique_ptr<Pending> call(static_cast<Pending*>(tag));
            if (call->status.ok()) ++answered;
            EXPECT_NE(call->status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
          }
        }
      });
    }
    WaitUntil([&] { return answered >= 50; });
    server->Shutdown();
    server.reset();
    stop = true;
    for (std::thread& caller : callers) caller.join();
  }
}

TEST(AgentStream, Operations_OfAllRanksGoInOneFrame) {
  auto server = StartServer();
  AgentClient agent(server->address(), "node", 1);
  const v1::Welcome welcome = agent.Attach();
  EXPECT_EQ(welcome.term(), 1u);
  EXPECT_EQ(welcome.protocol(), 1u);
  EXPECT_FALSE(welcome.session_id().empty());
  agent.Send({JoinOp(1, "j", 0, 2), JoinOp(2, "j", 1, 2)});
  const v1::OpResult first = agent.Result(1), second = agent.Result(2);
  ASSERT_TRUE(first.has_join()) << first.ShortDebugString();
  EXPECT_EQ(first.join().rank(), 0);
  EXPECT_EQ(second.join().rank(), 1);
  const uint64_t generation = first.join().generation();
  agent.Send({ArriveOp(3, "j", 0, generation), ArriveOp(4, "j", 1, generation)});
  EXPECT_EQ(agent.Result(3).arrive().report().state(), v1::BARRIER_STATE_PASSED);
  EXPECT_EQ(agent.Result(3).arrive().report().SerializeAsString(),
            agent.Result(4).arrive().report().SerializeAsString());
}

struct Started {
  std::string session;  // of `a`
  uint64_t generation = 0;
};

// Attaches two agents and seats a worker of each; `a`'s is in a barrier that `b`'s has not reached.
Started FirstInABarrier(CoordinatorServer& server, AgentClient& a, AgentClient& b) {
  Started started = {.session = a.Attach().session_id()};
  b.Attach();
  a.Send({JoinOp(1, "j", 0, 2)});
  b.Send({JoinOp(1, "j", 1, 2)});
  started.generation = a.Result(1).join().generation();
  b.Result(1);
  a.Send({ArriveOp(2, "j", 0, started.generation)});
  WaitUntil([&] { return server.runner().open_calls() != 0; });
  return started;
}

TEST(AgentStream, BrokenInABarrier_ResumesAndGetsTheResultOnce) {
  auto server = StartServer();
  AgentClient a(server->address(), "node-a", 1), b(server->address(), "node-b", 2);
  const auto [session, generation] = FirstInABarrier(*server, a, b);
  a.Break();
  b.Send({ArriveOp(2, "j", 1, generation)});
  EXPECT_EQ(b.Result(2).arrive().report().state(), v1::BARRIER_STATE_PASSED);
  const v1::Welcome welcome = a.Attach();
  EXPECT_EQ(welcome.session_id(), session);
  EXPECT_EQ(welcome.last_received_seq(), 2u);
  a.SendAgain();  // the coordinator has seen it: no second effect, no second result
  EXPECT_EQ(a.Result(2).arrive().report().state(), v1::BARRIER_STATE_PASSED);
  a.Send({ArriveOp(3, "j", 0, generation, 1)});
  b.Send({ArriveOp(3, "j", 1, generation, 1)});
  EXPECT_EQ(a.Result(3).arrive().report().counter(), 1u);
}

v1::Op GetOp(uint64_t op_id, const std::string& job, int rank, uint64_t generation) {
  v1::Op op;
  op.set_op_id(op_id);
  *op.mutable_txn()->mutable_fence() = FenceOf(job, rank, generation);
  op.mutable_txn()->add_then()->mutable_get()->set_key("k");
  return op;
}

TEST(AgentStream, WhileABarrierWaits_OtherFramesAreServed) {
  auto server = StartServer();
  AgentClient agent(server->address(), "node", 1);
  agent.Attach();
  agent.Send({JoinOp(1, "j", 0, 2), JoinOp(2, "j", 1, 2)});
  const uint64_t generation = agent.Result(1).join().generation();
  for (uint64_t i = 0; i < 50; ++i) {
    const uint64_t op = 10 + 3 * i;
    agent.Send({ArriveOp(op, "j", 0, generation, i)});
    agent.Send({GetOp(op + 1, "j", 1, generation)});
    EXPECT_TRUE(agent.Result(op + 1).has_txn());
    agent.Send({ArriveOp(op + 2, "j", 1, generation, i)});
    EXPECT_EQ(agent.Result(op).arrive().report().state(), v1::BARRIER_STATE_PASSED);
  }
}

TEST(AgentStream, FramesBehindAnArrival_AreAllServedInOrder) {
  auto server = StartServer();
  AgentClient a(server->address(), "node-a", 1), b(server->address(), "node-b", 2);
  const uint64_t generation = FirstInABarrier(*server, a, b).generation;
  constexpr uint64_t kFirst = 3, kFrames = 200;
  for (uint64_t i = 0; i < kFrames; ++i) {
    v1::Op put;
    put.set_op_id(kFirst + i);
    *put.mutable_txn()->mutable_fence() = FenceOf("j", 0, generation);
    put.mutable_txn()->add_then()->mutable_put()->set_key("k");
    a.Send({put});
  }
  int64_t revision = 0;
  for (uint64_t i = 0; i < kFrames; ++i) {
    const v1::OpResult result = a.Result(kFirst + i);
    ASSERT_TRUE(result.has_txn()) << result.ShortDebugString();
    EXPECT_GT(static_cast<int64_t>(result.txn().header().revision()), revision);
    revision = static_cast<int64_t>(result.txn().header().revision());
  }
  b.Send({ArriveOp(2, "j", 1, generation)});
  EXPECT_EQ(a.Result(2).arrive().report().state(), v1::BARRIER_STATE_PASSED);
}

// The read behind an arrival waits for a quiet moment, but not forever.
TEST(AgentStream, WhileOthersNeverPause_FramesBehindAnArrivalAreServed) {
  auto server = StartServer();
  AgentClient a(server->address(), "node-a", 1), b(server->address(), "node-b", 2);
  const uint64_t generation = FirstInABarrier(*server, a, b).generation;
  std::atomic<bool> served{false};
  std::thread busy([&] {
    constexpr uint64_t kAhead = 64;
    for (uint64_t op = 10; !served; ++op) {
      b.Send({GetOp(op, "j", 1, generation)});
      if (op >= 10 + kAhead) {
        EXPECT_TRUE(b.Result(op - kAhead).has_txn());
      }
    }
  });
  for (uint64_t i = 0; i < 20; ++i) {
    a.Send({ArriveOp(10 + 2 * i, "j", 0, generation)});  // the same arrival: it waits too
    a.Send({GetOp(11 + 2 * i, "j", 0, generation)});
    EXPECT_TRUE(a.Result(11 + 2 * i).has_txn());
  }
  served = true;
  busy.join();
}

TEST(AgentStream, UnacknowledgedResults_AreSentAgainAfterEveryBreak) {
  auto server = StartServer();
  AgentClient agent(server->address(), "node", 1);
  agent.Attach();
  agent.Send({JoinOp(1, "j", 0, 1)});
  const uint64_t generation = agent.Result(1).join().generation();
  for (uint64_t i = 0; i < 20; ++i) {
    const uint64_t seq = agent.Send({ArriveOp(2 + i, "j", 0, generation, i)});
    // Sometimes before, sometimes after the result has come.
    if (i % 3 == 0) agent.Result(2 + i);
    if (agent.Attach().last_received_seq() < seq) agent.SendAgain();
    EXPECT_EQ(agent.Result(2 + i).arrive().report().counter(), i);
  }
}

TEST(AgentStream, BeyondTheLimit_IsSentToAHubThatTellsWhomItSpeaksFor) {
  CoordinatorServer::Options options;
  options.runner.core.hubs.direct_agents = 1;
  auto server = StartServer(std::move(options));
  Client client(server->address());
  v1::Hello hello;
  hello.add_features("hub");
  AgentClient leaf(server->address(), "leaf", 2);
  AgentClient hub(server->address(), "hub", 1);
  leaf.SetHello(hello);
  leaf.Attach();
  hello.set_hub_address("10.0.0.1:29401");
  hub.SetHello(hello);
  hub.Attach();
  const v1::Directive directive = leaf.NextDirective();
  EXPECT_EQ(directive.use_hub().node(), "hub");
  EXPECT_EQ(directive.use_hub().address(), "10.0.0.1:29401");
  v1::AgentFrame bye;
  bye.mutable_bye()->set_reason("goes to a hub");
  leaf.SendRaw(bye);
  EXPECT_TRUE(leaf.Finish().ok());
  v1::AgentFrame beat;
  beat.mutable_beat()->mutable_hub()->add_agents()->set_node("leaf");
  hub.SendRaw(beat);
  // Sends another frame after it: once that is answered, the beat has been applied.
  v1::Op op;
  op.set_op_id(1);
  op.mutable_get_members()->set_job_id("j");
  hub.Send({op});
  hub.Result(1);
  const auto status = client.Status();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->agents(), 2);
  EXPECT_EQ(status->agents_behind_hubs(), 1);
  EXPECT_EQ(status->hubs(), 1);
  EXPECT_THAT(server->Metrics(), HasSubstr("\nmuster_agents_behind_hubs 1\n"));
}

TEST(AgentStream, NewIncarnation_StartsANewSession) {
  auto server = StartServer();
  AgentClient old_agent(server->address(), "node", 1);
  const std::string session = old_agent.Attach().session_id();
  AgentClient new_agent(server->address(), "node", 2);
  const v1::Welcome welcome = new_agent.Attach();
  EXPECT_NE(welcome.session_id(), session);
  EXPECT_EQ(welcome.last_received_seq(), 0u);
  EXPECT_EQ(old_agent.Finish().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(server->runner().agents(), 1u);
}

TEST(AgentStream, ResumeWindowOver_AbandonsItsCalls) {
  CoordinatorServer::Options options;
  options.runner.resume_window = absl::ZeroDuration();
  auto server = StartServer(std::move(options));
  AgentClient agent(server->address(), "node", 1);
  agent.Attach();
  agent.Send({JoinOp(1, "j", 0, 2)});
  WaitUntil([&] { return server->runner().open_calls() != 0; });
  agent.Break();
  WaitUntil([&] { return server->runner().open_calls() == 0 && server->runner().agents() == 0; });
  Client client(server->address());
  EXPECT_EQ(client.Status()->jobs(0).waiting(), 0);
}

TEST(AgentStream, WorkerKilled_EveryAgentIsTold) {
  auto server = StartServer();
  AgentClient a(server->address(), "node-a", 1), b(server->address(), "node-b", 2);
  a.Attach();
  b.Attach();
  a.Send({JoinOp(1, "j", 0, 2)});
  b.Send({JoinOp(1, "j", 1, 2)});
  const uint64_t generation = a.Result(1).join().generation();
  b.Result(1);
  v1::Op op;
  op.set_op_id(2);
  v1::ReportExitRequest& report = *op.mutable_report_exit();
  *report.mutable_fence() = FenceOf("j", 0, generation);
  report.set_worker_id("w0");
  report.set_incarnation(100);
  report.mutable_cause()->set_signal(9);
  a.Send({op});
  for (AgentClient* agent : {&a, &b}) {
    const v1::Directive directive = agent->NextDirective();
    ASSERT_TRUE(directive.has_generation_ended()) << directive.ShortDebugString();
    EXPECT_EQ(directive.generation_ended().generation(), generation);
    EXPECT_EQ(directive.generation_ended().job_id(), "j");
  }
}

TEST(AgentStream, WrongFirstFrames_EndTheStreamWithAReason) {
  auto server = StartServer();
  const auto first = [&](const v1::AgentFrame& frame) {
    auto channel = *rpc::Connect(server->address());
    auto stub = v1::Session::NewStub(channel);
    grpc::ClientContext context;
    auto stream = stub->Attach(&context);
    stream->Write(frame);
    v1::CoordinatorFrame answer;
    while (stream->Read(&answer)) {
    }
    return rpc::FromGrpc(stream->Finish());
  };
  v1::AgentFrame frame;
  frame.mutable_beat();
  EXPECT_EQ(first(frame).code(), absl::StatusCode::kInvalidArgument);
  frame.mutable_hello()->set_protocol_max(1);
  EXPECT_THAT(std::string(first(frame).message()), HasSubstr("hello.node"));
  frame.mutable_hello()->set_node("n");
  frame.mutable_hello()->set_protocol_min(7);
  frame.mutable_hello()->set_protocol_max(9);
  const absl::Status status = first(frame);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("protocol 7 to 9"));
}

TEST(AgentStream, Bye_EndsTheSession) {
  auto server = StartServer();
  AgentClient agent(server->address(), "node", 1);
  agent.Attach();
  v1::AgentFrame bye;
  bye.mutable_bye()->set_reason("done");
  agent.SendRaw(bye);
  EXPECT_TRUE(agent.Finish().ok());
  EXPECT_EQ(server->runner().agents(), 0u);
}

// Its stream is reset: the status alone would wait behind answers that it never takes.
TEST(AgentStream, AgentThatReadsNothing_LosesItsStreamAllTheSame) {
  CoordinatorServer::Options options;
  options.runner.limits.unacknowledged_bytes = 1 << 20;
  auto server = StartServer(std::move(options));
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  const std::string large(512 << 10, 'x');
  ASSERT_TRUE(client.Put(FenceOf("j", 0, generation), "large", large, false).ok());
  grpc::ClientContext context;
  rpc::SetTimeout(context, kPatience);
  const auto channel = *rpc::Connect(server->address(), {.own_connection = true});
  const auto stream = v1::Session::NewStub(channel)->Attach(&context);
  v1::AgentFrame frame;
  frame.mutable_hello()->set_protocol_min(1);
  frame.mutable_hello()->set_protocol_max(1);
  frame.mutable_hello()->set_node("node");
  frame.mutable_hello()->set_agent_incarnation(1);
  ASSERT_TRUE(stream->Write(frame));
  for (uint64_t seq = 1; stream->Write(frame); ++seq) {
    frame.Clear();
    frame.set_seq(seq);
    // The first answer is on its way, and fills the window, when the others are too much.
    for (uint64_t i = 0; i < (seq == 1 ? 1 : 4); ++i) {
      v1::Op& op = *frame.mutable_ops()->add_ops();
      op.set_op_id(4 * seq + i);
      *op.mutable_txn()->mutable_fence() = FenceOf("j", 0, generation);
      op.mutable_txn()->add_then()->mutable_get()->set_key("large");
    }
  }
  // It reads only now; without that it gets nothing.
  v1::CoordinatorFrame unread;
  while (stream->Read(&unread)) {
  }
  EXPECT_NE(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(client.Put(FenceOf("j", 0, generation), "k", "v", false).ok());
}

TEST(Journal, Restart_KeepsSeatsKeysAndAnswers) {
  const TestFolder folder;
  const std::string dir = folder.Path("journal");
  uint64_t generation;
  std::string first_answer;
  CoordinatorServer::Options options;
  options.data_dir = dir;
  {
    auto server = StartServer(std::move(options));
    Client client(server->address());
    generation = SeatOne(client, "j");
    v1::TxnReply reply;
    ASSERT_TRUE(client.Put(FenceOf("j", 0, generation, 7), "k", "v1", true, &reply).ok());
    first_answer = reply.results(0).SerializeAsString();
  }
  CoordinatorServer::Options again;
  again.data_dir = dir;
  auto server = StartServer(std::move(again));
  Client client(server->address());
  EXPECT_EQ(client.Status()->header().term(), 2u);
  EXPECT_EQ(*client.Get(FenceOf("j", 0, generation), "k"), "v1");
  v1::TxnReply reply;
  ASSERT_TRUE(client.Put(FenceOf("j", 0, generation, 7), "k", "v1", true, &reply).ok());
  EXPECT_EQ(reply.results(0).SerializeAsString(), first_answer);
  // The seat is still held: the same generation continues.
  v1::ArriveReply arrive;
  const absl::Status status = client.Call<v1::Barrier>(
      &v1::Barrier::Stub::Arrive, ArriveOp(1, "j", 0, generation).arrive(), &arrive);
  EXPECT_TRUE(status.ok()) << status;
  std::filesystem::remove_all(dir);
}

TEST(Journal, AgentOverARestart_JoinsInAgainAndFinishesItsBarrier) {
  const TestFolder folder;
  const std::string dir = folder.Path("journal");
  CoordinatorServer::Options options;
  options.data_dir = dir;
  auto server = StartServer(std::move(options));
  const std::string address = server->address();
  AgentClient a(address, "node-a", 1), b(address, "node-b", 2);
  const auto [session, generation] = FirstInABarrier(*server, a, b);
  server.reset();
  CoordinatorServer::Options again;
  again.data_dir = dir;
  again.rpc.listen = address;
  server = StartServer(std::move(again));
  ASSERT_NE(server, nullptr);
  const v1::Welcome welcome = a.Attach();
  EXPECT_EQ(welcome.term(), 2u);
  EXPECT_NE(welcome.session_id(), session);  // so the agent sends again every op that has no result
  b.Attach();
  a.SendAgain();
  b.Send({ArriveOp(2, "j", 1, generation)});
  EXPECT_EQ(a.Result(2).arrive().report().state(), v1::BARRIER_STATE_PASSED);
  EXPECT_EQ(b.Result(2).arrive().report().state(), v1::BARRIER_STATE_PASSED);
  server.reset();
  std::filesystem::remove_all(dir);
}

TEST(Journal, SecondCoordinatorOnTheDirectory_IsRefused) {
  const TestFolder folder;
  const std::string dir = folder.Path("journal");
  CoordinatorServer::Options options;
  options.data_dir = dir;
  auto server = StartServer(std::move(options));
  CoordinatorServer::Options second;
  second.data_dir = dir;
  second.rpc.insecure = true;
  const absl::Status status = CoordinatorServer::Start(std::move(second)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("process ", getpid())));
  server.reset();
  std::filesystem::remove_all(dir);
}

TEST(Journal, DurablePut_IsAnsweredOnlyWhenItIsOnDisk) {
  auto journal = std::make_unique<HeldJournal>();
  HeldJournal* raw = journal.get();
  CoordinatorServer::Options options;
  options.journal = std::move(journal);
  auto server = StartServer(std::move(options));
  Client client(server->address()), other(server->address());
  const uint64_t generation = SeatOne(client, "j");
  raw->Hold();
  std::atomic<bool> answered{false};
  std::thread writer([&] {
    EXPECT_TRUE(other.Put(FenceOf("j", 0, generation), "durable", "v", true).ok());
    answered = true;
  });
  raw->WaitAppended();
  // A volatile write does not wait behind it.
  EXPECT_TRUE(client.Put(FenceOf("j", 0, generation), "volatile", "v", false).ok());
  EXPECT_FALSE(answered);
  raw->Release();
  writer.join();
}

TEST(Journal, DiskFull_AcknowledgesNothingAndRecovers) {
  auto journal = std::make_unique<HeldJournal>();
  HeldJournal* raw = journal.get();
  CoordinatorServer::Options options;
  options.journal = std::move(journal);
  auto server = StartServer(std::move(options));
  Client client(server->address()), other(server->address());
  const uint64_t generation = SeatOne(client, "j");
  raw->Hold();
  std::thread writer([&] {
    const absl::Status status = other.Put(FenceOf("j", 0, generation), "durable", "v", true);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_JOURNAL_FAILED);
  });
  raw->WaitAppended();
  raw->Fail();
  writer.join();
  // Now it is refused before it changes anything; calls that need no journal continue.
  const absl::Status status = client.Put(FenceOf("j", 0, generation), "second", "v", true);
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_JOURNAL_FAILED);
  EXPECT_TRUE(client.Put(FenceOf("j", 0, generation), "volatile", "v", false).ok());
  EXPECT_THAT(server->Metrics(), HasSubstr("muster_journal_up 0\n"));
  raw->Release();
  // The write is finished at last, and readable.
  EXPECT_EQ(*client.Get(FenceOf("j", 0, generation), "durable"), "v");
  EXPECT_EQ(client.Get(FenceOf("j", 0, generation), "second").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(client.Put(FenceOf("j", 0, generation), "third", "v", true).ok());
  EXPECT_THAT(server->Metrics(), HasSubstr("muster_journal_up 1\n"));
}

// If a disk is slower than the writes, calls that need it are refused, then all calls that change
// something, until it has caught up.
TEST(Journal, SlowDisk_BoundsWhatWaitsForIt) {
  for (const size_t value : {1500, 5000}) {
    auto journal = std::make_unique<HeldJournal>();
    HeldJournal* raw = journal.get();
    CoordinatorServer::Options options;
    options.journal = std::move(journal);
    options.runner.limits.journal_backlog_bytes = 1000;
    auto server = StartServer(std::move(options));
    Client client(server->address()), other(server->address());
    const uint64_t generation = SeatOne(client, "j");
    const v1::Fence fence = FenceOf("j", 0, generation);
    raw->Hold();
    std::thread writer(
        [&] { EXPECT_TRUE(other.Put(fence, "durable", std::string(value, 'x'), true).ok()); });
    raw->WaitAppended();
    EXPECT_EQ(rpc::GetReason(client.Put(fence, "second", "v", true)), v1::ERROR_REASON_OVERLOADED);
    EXPECT_EQ(client.Put(fence, "volatile", "v", false).ok(), value < 2000);
    EXPECT_TRUE(client.Status().ok());
    raw->Release();
    writer.join();
    EXPECT_TRUE(client.Put(fence, "third", "v", true).ok());
    EXPECT_TRUE(client.Put(fence, "volatile", "v", false).ok());
  }
}

TEST(Journal, SnapshotThatFails_IsReported) {
  CoordinatorServer::Options options;
  options.journal = std::make_unique<HeldJournal>();
  auto server = StartServer(std::move(options));
  Client client(server->address());
  v1::SnapshotReply reply;
  const absl::Status status =
      client.Call<v1::Admin>(&v1::Admin::Stub::Snapshot, v1::SnapshotRequest(), &reply);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  // The server continues, and the metrics say that it has failed.
  EXPECT_THAT(server->Metrics(), HasSubstr("\nmuster_snapshot_up 0\n"));
  EXPECT_THAT(server->Metrics(), HasSubstr("muster_snapshots_total{result=\"failed\"} 1\n"));
  EXPECT_THAT(server->Metrics(), HasSubstr("\nmuster_journal_up 1\n"));
  EXPECT_EQ(server->Health().status, 200);
  EXPECT_THAT(server->Health().body, HasSubstr("the last snapshot could not be written"));
}

// A watch, read to the end of what the test asks for.
class Watcher {
 public:
  Watcher(Client& client, const std::string& job, uint64_t from, const std::string& prefix = "") {
    v1::WatchRequest request;
    request.set_job_id(job);
    request.set_key_prefix(prefix);
    request.set_keys(true);
    request.set_from_revision(from);
    rpc::SetTimeout(context_, kPatience);
    reader_ = v1::Watch::NewStub(client.channel())->Watch(&context_, request);
  }
  ~Watcher() {
    if (reader_ == nullptr) return;
    context_.TryCancel();
    reader_->Finish();
  }
  bool Read(v1::WatchBatch* batch) { return reader_->Read(batch); }
  absl::Status Finish() {
    v1::WatchBatch batch;
    while (reader_->Read(&batch)) {
    }
    const absl::Status status = rpc::FromGrpc(reader_->Finish());
    reader_.reset();
    return status;
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::WatchBatch>> reader_;
};

TEST(Watch, Resumed_SeesEveryWriteOnceInOrder) {
  auto server = StartServer();
  Client client(server->address()), writer(server->address());
  const uint64_t generation = SeatOne(client, "j");
  constexpr int kWrites = 300;
  uint64_t next = client.Status()->header().revision() + 1;
  std::thread writing([&] {
    for (int i = 0; i < kWrites; ++i) {
      EXPECT_TRUE(writer.Put(FenceOf("j", 0, generation), "k", absl::StrCat(i), i % 2 == 0).ok());
    }
  });
  int seen = 0;
  uint64_t last_revision = 0;
  while (seen < kWrites) {
    Watcher watcher(client, "j", next);
    // A few batches, then the connection is lost and the watch resumed.
    for (int batches = 0; batches < 3 && seen < kWrites; ++batches) {
      v1::WatchBatch batch;
      ASSERT_TRUE(watcher.Read(&batch));
      for (const v1::WatchEvent& event : batch.events()) {
        if (!event.has_put()) continue;
        EXPECT_GT(event.revision(), last_revision);
        last_revision = event.revision();
        EXPECT_EQ(event.put().value(), absl::StrCat(seen));
        ++seen;
      }
      next = batch.next_revision();
    }
  }
  writing.join();
}

TEST(Watch, Compacted_SaysFromWhereToGoOn) {
  CoordinatorServer::Options options;
  options.runner.core.watch_events = 8;
  auto server = StartServer(std::move(options));
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  for (int i = 0; i < 50; ++i)
    ASSERT_TRUE(client.Put(FenceOf("j", 0, generation), "k", absl::StrCat(i), false).ok());
  Watcher watcher(client, "j", 1);
  const absl::Status status = watcher.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(rpc::GetDetail(status).has_value());
  EXPECT_EQ(rpc::GetReason(status), v1::ERROR_REASON_COMPACTED);
  EXPECT_GT(rpc::GetDetail(status)->compacted_revision(), 1u);
}

TEST(Watch, QuietPrefix_IsToldHowFarItHasSeen) {
  auto server = StartServer();
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  Watcher watcher(client, "j", 0, "quiet/");
  v1::WatchBatch batch;
  ASSERT_TRUE(watcher.Read(&batch));
  const uint64_t first = batch.next_revision();
  for (int i = 0; i < 1100; ++i)
    ASSERT_TRUE(client.Put(FenceOf("j", 0, generation), "busy/k", absl::StrCat(i), false).ok());
  ASSERT_TRUE(watcher.Read(&batch));
  EXPECT_EQ(batch.events_size(), 0);
  EXPECT_GE(batch.next_revision(), first + 1024);
  ASSERT_TRUE(client.Put(FenceOf("j", 0, generation), "quiet/k", "v", false).ok());
  while (batch.events_size() == 0) ASSERT_TRUE(watcher.Read(&batch));
  EXPECT_EQ(batch.events(0).put().key(), "quiet/k");
}

TEST(Watch, UnknownJob_IsNotFound) {
  auto server = StartServer();
  Client client(server->address());
  Watcher watcher(client, "nobody", 0);
  EXPECT_EQ(watcher.Finish().code(), absl::StatusCode::kNotFound);
}

TEST(Watch, WatcherGone_IsForgotten) {
  auto server = StartServer();
  Client client(server->address());
  SeatOne(client, "j");
  {
    Watcher watcher(client, "j", 0);
    v1::WatchBatch batch;
    ASSERT_TRUE(watcher.Read(&batch));
    EXPECT_EQ(server->runner().watchers(), 1u);
  }
  WaitUntil([&] { return server->runner().watchers() == 0; });
}

TEST(Metrics, Page_HasTheStandardFamilies) {
  auto server = StartServer();
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  ASSERT_TRUE(client.Put(FenceOf("j", 0, generation), "k", "v", false).ok());
  const std::string text = server->Metrics();
  for (const char* line :
       {"# TYPE grpc_server_handling_seconds histogram",
        "grpc_server_handled_total{grpc_type=\"unary\",grpc_service=\"muster.v1.KeyValueStore\","
        "grpc_method=\"Txn\","
        "grpc_code=\"OK\"} 1\n",
        "muster_members{state=\"running\"} 1\n",
        "muster_generation_changes_total{change=\"sealed\"} 1\n",
        "# TYPE muster_barrier_wait_seconds histogram",
        "# TYPE muster_journal_fsync_seconds histogram", "muster_apply_queue_depth ",
        "process_resident_memory_bytes ", "process_open_fds "}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  const google::protobuf::Descriptor& op = *v1::Op::descriptor();
  for (int i = 0; i < op.oneof_decl(0)->field_count(); ++i) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("muster_op_seconds_count{op=\"",
                                             op.oneof_decl(0)->field(i)->name(), "\"}")));
  }
}

TEST(Metrics, OperationsOfAStream_AreTimedByTheirKind) {
  auto server = StartServer();
  AgentClient a(server->address(), "node-a", 1), b(server->address(), "node-b", 2);
  const uint64_t generation = FirstInABarrier(*server, a, b).generation;
  EXPECT_THAT(server->Metrics(), HasSubstr("muster_op_seconds_count{op=\"arrive\"} 0\n"));
  b.Send({ArriveOp(2, "j", 1, generation)});
  EXPECT_TRUE(b.Result(2).has_arrive());
  EXPECT_TRUE(a.Result(2).has_arrive());
  EXPECT_THAT(server->Metrics(), HasSubstr("muster_op_seconds_count{op=\"arrive\"} 2\n"));
}

// Well-formed requests with some bytes changed, cut or added go to every method: an answer comes,
// nothing breaks.
TEST(Mutated, Requests_NeverBreakTheServer) {
  auto server = StartServer();
  Client client(server->address());
  const uint64_t generation = SeatOne(client, "j");
  std::vector<std::pair<std::string, std::string>> samples;
  const auto add = [&](const char* method, const google::protobuf::Message& message) {
    samples.emplace_back(absl::StrCat("/muster.v1.", method), message.SerializeAsString());
  };
  const v1::Fence fence = FenceOf("j", 0, generation, 3);
  {
    add("Rendezvous/Join", JoinOf("j2", 0, 2));
    v1::GetRankTableRequest table;
    table.set_job_id("j");
    table.set_max_rows(5);
    add("Rendezvous/GetRankTable", table);
    v1::LeaveRequest leave;
    *leave.mutable_fence() = fence;
    leave.set_reason("why");
    add("Rendezvous/Leave", leave);
    v1::EndGenerationRequest end;
    *end.mutable_fence() = fence;
    add("Rendezvous/EndGeneration", end);
    v1::ArriveRequest arrive = ArriveOp(1, "j", 0, generation).arrive();
    arrive.add_participants(0);
    arrive.set_payload("payload");
    arrive.mutable_timeout()->set_seconds(5);
    arrive.set_call_site_text("a.cc:1");
    add("Barrier/Arrive", arrive);
    v1::CancelBarrierRequest cancel;
    *cancel.mutable_fence() = fence;
    cancel.set_barrier_id("b");
    add("Barrier/Cancel", cancel);
    v1::DescribeBarrierRequest describe;
    describe.set_job_id("j");
    describe.set_barrier_id("b");
    add("Barrier/Describe", describe);
    v1::ListBarriersRequest list;
    list.set_job_id("j");
    add("Barrier/List", list);
    v1::StragglerReportRequest straggler;
    straggler.set_job_id("j");
    add("Barrier/StragglerReport", straggler);
    v1::TxnRequest txn;
    *txn.mutable_fence() = fence;
    txn.add_compares()->set_key("k");
    txn.add_then()->mutable_put()->set_key("k");
    txn.add_then()->mutable_get()->set_prefix(true);
    txn.add_then()->mutable_add()->set_key("n");
    txn.add_then()->mutable_append()->set_key("a");
    txn.add_otherwise()->mutable_delete_()->set_key("k");
    add("KeyValueStore/Txn", txn);
    v1::WaitRequest wait;
    *wait.mutable_fence() = fence;
    wait.add_keys("zz");
    wait.mutable_timeout()->set_nanos(1000);
    add("KeyValueStore/Wait", wait);
    v1::RaiseTriggerRequest raise;
    *raise.mutable_fence() = fence;
    raise.set_name("stop");
    raise.set_step(4);
    add("Triggers/Raise", raise);
    v1::PollTriggersRequest poll;
    *poll.mutable_fence() = fence;
    poll.add_acked(1);
    add("Triggers/Poll", poll);
    v1::HeartbeatRequest beat;
    *beat.mutable_fence() = fence;
    beat.set_phase("x");
    add("Membership/Heartbeat", beat);
    v1::ReportExitRequest exit;
    *exit.mutable_fence() = fence;
    exit.set_worker_id("w0");
    exit.set_incarnation(100);
    exit.mutable_cause()->add_last_log_lines("line");
    add("Membership/ReportExit", exit);
    v1::GetMembersRequest members;
    members.set_job_id("j");
    add("Membership/GetMembers", members);
    v1::AgreeAliveRequest agree;
    *agree.mutable_fence() = fence;
    agree.add_set(0);
    agree.mutable_timeout()->set_nanos(1000);
    add("Membership/AgreeAlive", agree);
    v1::QuarantineRequest quarantine;
    *quarantine.mutable_fence() = fence;
    quarantine.set_host("h9");
    quarantine.mutable_for_()->set_seconds(1);
    add("Membership/Quarantine", quarantine);
    v1::WatchRequest watch;
    watch.set_job_id("j");
    watch.set_key_prefix("k");
    watch.set_from_revision(1);
    watch.set_keys(true);
    add("Watch/Watch", watch);
    v1::WatchJobsRequest jobs;
    jobs.add_states(v1::JOB_STATE_QUEUED);
    jobs.set_owner("ann");
    jobs.set_name_prefix("mnist");
    jobs.set_seen_revision(1);
    add("Jobs/Watch", jobs);
    v1::WatchJobsRequest one;
    one.set_job_id("mnist-1");
    add("Jobs/Watch", one);
    v1::SubmitJobRequest submit;
    submit.mutable_spec()->set_name("mnist");
    submit.mutable_spec()->add_argv("./train");
    submit.mutable_spec()->set_max_processes(1);
    submit.mutable_spec()->set_wait_for_nodes(true);
    add("Jobs/Submit", submit);
    add("Jobs/Watch", jobs);
    add("Admin/Status", v1::StatusRequest());
    add("Admin/Snapshot", v1::SnapshotRequest());
    v1::ReadBackupRequest backup;
    backup.set_revision(1);
    backup.set_offset(1);
    add("Backup/Read", backup);
    v1::SetLogLevelRequest log_level;
    log_level.set_level(v1::LOG_LEVEL_INFO);
    log_level.mutable_for_()->set_seconds(1);
    add("Operations/SetLogLevel", log_level);
  }
  std::mt19937 random(20240607);
  const auto mutate = [&](std::string bytes) { return Mutate(std::move(bytes), random); };
  // One queue has many calls at a time: those that wait by design end at their own deadline.
  struct Pending {
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    grpc::Status status;
    bool unchanged = false;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
  };
  grpc::GenericStub stub(client.channel());
  grpc::CompletionQueue queue;
  int in_flight = 0, answered = 0;
  const auto finish_one = [&] {
    void* tag;
    bool ok;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    const std::unique_ptr<Pending> call(static_cast<Pending*>(tag));
    --in_flight;
    ++answered;
    // The unchanged one shows that the method's name is right; gRPC says "unimplemented" to what
    // does not parse.
    if (call->unchanged) {
      EXPECT_NE(call->status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    }
  };
  for (const auto& [method, sample] : samples) {
    for (int i = 0; i < 256; ++i) {
      auto* call = new Pending;
      // A stream without a message looks unimplemented to this unary caller.
      call->unchanged = i == 0 && !absl::EndsWith(method, "/Watch");
      rpc::SetTimeout(call->context, absl::Milliseconds(200));
      const grpc::Slice slice(i == 0 ? sample : mutate(sample));
      call->reader =
          stub.PrepareUnaryCall(&call->context, method, grpc::ByteBuffer(&slice, 1), &queue);
      call->reader->StartCall();
      call->reader->Finish(&call->reply, &call->status, call);
      if (++in_flight >= 128) finish_one();
    }
  }
  while (in_flight > 0) finish_one();
  queue.Shutdown();
  EXPECT_EQ(answered, static_cast<int>(samples.size()) * 256);

  // Sends the same to streams: frames of every kind.
  std::vector<std::string> frames;
  {
    v1::AgentFrame frame;
    frame.set_seq(1);
    for (int i = 0; i < 3; ++i)
      *frame.mutable_ops()->add_ops() = ArriveOp(i, "j", 0, generation, i);
    v1::ArriveManyRequest& many = *frame.mutable_ops()->add_ops()->mutable_arrive_many();
    *many.mutable_fence() = fence;
    many.set_barrier_id("m");
    many.add_ranks(0);
    many.add_incarnations(100);
    many.add_lateness_us(5);
    frames.push_back(frame.SerializeAsString());
    v1::WorkerBeat& beat = *frame.mutable_beat()->add_workers();
    beat.set_job_id("j");
    beat.set_worker_id("w0");
    beat.set_incarnation(100);
    frames.push_back(frame.SerializeAsString());
    frame.mutable_stack()->set_query_id(1);
    frame.mutable_stack()->set_native_stack("#0 main");
    frames.push_back(frame.SerializeAsString());
    frame.mutable_hello()->set_node("n");
    frames.push_back(frame.SerializeAsString());
  }
  for (int i = 0; i < 256; ++i) {
    grpc::GenericStub session(client.channel());
    grpc::ClientContext context;
    rpc::SetTimeout(context, kPatience);
    grpc::CompletionQueue stream_queue;
    auto stream = session.PrepareCall(&context, "/muster.v1.Session/Attach", &stream_queue);
    const auto next = [&] {
      void* tag;
      bool ok = false;
      EXPECT_TRUE(stream_queue.Next(&tag, &ok));
      return ok;
    };
    stream->StartCall(nullptr);
    bool ok = next();
    v1::AgentFrame hello;
    hello.mutable_hello()->set_protocol_min(1);
    hello.mutable_hello()->set_protocol_max(1);
    hello.mutable_hello()->set_node(absl::StrCat("fuzz-", i % 7));
    hello.mutable_hello()->set_agent_incarnation(i % 3);
    for (int f = 0; ok && f < 4; ++f) {
      const grpc::Slice slice(f == 0 && i % 4 != 0 ? hello.SerializeAsString()
                                                   : mutate(frames[random() % frames.size()]));
      stream->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      ok = next();
    }
    if (ok) {
      stream->WritesDone(nullptr);
      next();
    }
    grpc::ByteBuffer frame;
    do {
      stream->Read(&frame, nullptr);
    } while (next());
    grpc::Status status;
    stream->Finish(&status, nullptr);
    next();
    stream_queue.Shutdown();
    void* tag;
    while (stream_queue.Next(&tag, &ok)) {
    }
  }
  EXPECT_TRUE(client.Status().ok());
}

}  // namespace
}  // namespace muster::coordinator
