#include "coordinator/service/grpc_frontend.h"

#include <google/protobuf/arena.h>
#include <grpc/support/time.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/method_handler.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "base/version.h"
#include "coordinator/errors.h"
#include "coordinator/service/agent_stream.h"
#include "coordinator/service/op_kinds.h"
#include "coordinator/service/open_calls.h"
#include "coordinator/service/watch_source.h"
#include "proto/muster/v1/admin.pb.h"
#include "proto/muster/v1/backup.pb.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/operations.pb.h"
#include "proto/muster/v1/session.pb.h"
#include "proto/muster/v1/watch.pb.h"
#include "rpc/log_level.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

// The calls that wait to begin: a burst of connections is taken up without a round trip for each.
constexpr int kAcceptors = 64;
// Reads are deferred for this many events, and for twice their number: a burst of arrivals at a
// barrier keeps deferring, anything else does not.
constexpr size_t kPutOffEvents = 64;
constexpr size_t kPutOffReads = 4096;
// Silent calls are checked once in this many events.
constexpr size_t kSilentEvents = 1024;
// If an event came within kSoon, the thread polls for the next one for kAwhile before it sleeps.
constexpr absl::Duration kSoon = absl::Microseconds(150);
constexpr absl::Duration kAwhile = absl::Microseconds(100);
// After this many polls without an event, everything that had arrived has been handled: one poll
// may read only a part of a message of one connection.
constexpr int kEmptyLooks = 64;
// If the queue is never empty, this many events, and a few more for each open call, count as
// everything that had arrived.
constexpr uint64_t kLooks = 4096;
// The bytes of a backup in one reply.
constexpr size_t kBackupPartBytes = 1 << 20;
// The frontend whose queue this thread serves.
thread_local const void* serving_queue_of = nullptr;
constexpr uintptr_t kEventMask = 7;

template <typename Message>
bool Parse(grpc::ByteBuffer& bytes, Message* message) {
  return grpc::SerializationTraits<Message>::Deserialize(&bytes, message).ok();
}

// A frame of small operations takes about four times its bytes, which is one block then.
google::protobuf::ArenaOptions FrameArena(size_t bytes) {
  google::protobuf::ArenaOptions options;
  options.start_block_size = std::clamp<size_t>(4 * bytes, 512, 32 << 10);
  options.max_block_size = 32 << 10;
  return options;
}

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message) {
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

// OK if the caller set a deadline, else INVALID_ARGUMENT / DEADLINE_REQUIRED.
absl::Status CheckDeadline(const RpcCall& call) {
  // gRPC says "no deadline" with the end of time.
  if (call.deadline() < std::chrono::system_clock::now() + std::chrono::hours(24 * 365 * 5)) {
    return absl::OkStatus();
  }
  return rpc::ErrorWithReason(absl::StatusCode::kInvalidArgument,
                              "the call has no deadline: set one, so that it cannot wait forever",
                              v1::ERROR_REASON_DEADLINE_REQUIRED);
}

// grpc.health.v1, written by hand because Debian ships no messages for it.
constexpr char kHealth[] = "grpc.health.v1.Health";
enum Health { kServing = 1, kNotServing = 2, kUnknownService = 3 };

// HealthCheckResponse{status = 1}.
grpc::ByteBuffer HealthReply(Health health) {
  const char bytes[] = {0x08, static_cast<char>(health)};
  const grpc::Slice slice(bytes, sizeof(bytes));
  return grpc::ByteBuffer(&slice, 1);
}

// HealthCheckRequest{service = 1}; false for other bytes.
bool ParseHealthRequest(grpc::ByteBuffer& bytes, std::string* service) {
  std::vector<grpc::Slice> slices;
  if (!bytes.Dump(&slices).ok()) return false;
  std::string text;
  for (const grpc::Slice& slice : slices)
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  if (text.empty()) return true;
  if (text.size() < 2 || text[0] != 0x0A || static_cast<unsigned char>(text[1]) >= 0x80 ||
      text.size() != 2u + static_cast<unsigned char>(text[1]))
    return false;
  *service = text.substr(2);
  return true;
}

absl::Status Stopping() {
  return rpc::ErrorWithReason(absl::StatusCode::kUnavailable, "the coordinator is stopping",
                              v1::ERROR_REASON_STOPPING, /*retryable=*/true);
}

absl::Status NotAMessage(absl::string_view what) {
  return rpc::ErrorWithReason(
      absl::StatusCode::kInvalidArgument,
      absl::StrCat("the bytes sent are no ", what, ", or a string in it is not UTF-8"),
      v1::ERROR_REASON_BAD_FIELD);
}

// Returns how long `request` sets a level; infinite: until it is set again. Errors:
// INVALID_ARGUMENT / BAD_FIELD.
absl::StatusOr<absl::Duration> SpanOf(const v1::SetLogLevelRequest& request) {
  const auto bad = [](absl::string_view text) {
    return rpc::ErrorWithReason(absl::StatusCode::kInvalidArgument, std::string(text),
                                v1::ERROR_REASON_BAD_FIELD);
  };
  if (!v1::LogLevel_IsValid(request.level())) {
    return bad(absl::StrCat("level ", static_cast<int>(request.level()),
                            " is none that this coordinator (", kVersion, ") knows"));
  }
  if (!request.has_for_()) return absl::InfiniteDuration();
  if (request.level() == v1::LOG_LEVEL_UNSPECIFIED)
    return bad("`for` is given without a level: say which, or leave it out");
  const absl::Duration span = rpc::FromProto(request.for_());
  if (span < absl::Seconds(1) || span > absl::Hours(24)) {
    return bad(absl::StrCat("`for` is ", absl::FormatDuration(span),
                            ": a log level is set for 1 s to 24 h, or without `for`"));
  }
  return span;
}

}  // namespace

// A call of gRPC's own. Its address is the tag of everything that happens to it, with the event in
// the low bits.
class alignas(16) GrpcFrontend::GrpcCall final : public RpcCall {
 public:
  const std::string& method() const override { return context_.method(); }
  std::chrono::system_clock::time_point deadline() const override { return context_.deadline(); }
  const std::multimap<grpc::string_ref, grpc::string_ref>& metadata() const override {
    return context_.client_metadata();
  }
  std::string peer() const override { return context_.peer(); }
  std::string certificate() const override {
    const std::shared_ptr<const grpc::AuthContext> auth = context_.auth_context();
    if (auth == nullptr || !auth->IsPeerAuthenticated()) return "";
    const std::vector<grpc::string_ref> names = auth->GetPeerIdentity();
    return names.empty() ? "" : std::string(names[0].data(), names[0].size());
  }

  void Request(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue* queue) {
    context_.AsyncNotifyWhenDone(Tag(RpcEvent::kGone));
    service.RequestCall(&context_, &stream_, queue, queue, Tag(RpcEvent::kBegun));
  }

 private:
  void* Tag(RpcEvent event) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(this) +
                                   static_cast<uintptr_t>(event));
  }
  void StartRead(grpc::ByteBuffer* message) override {
    stream_.Read(message, Tag(RpcEvent::kRead));
  }
  void StartWrite(const grpc::ByteBuffer& message) override {
    stream_.Write(message, Tag(RpcEvent::kWritten));
  }
  void StartFinish(const grpc::Status& status) override {
    stream_.Finish(status, Tag(RpcEvent::kFinished));
  }
  void StartWriteAndFinish(const grpc::ByteBuffer& message) override {
    stream_.WriteAndFinish(message, grpc::WriteOptions(), grpc::Status::OK,
                           Tag(RpcEvent::kFinished));
  }
  void Cancel() override { context_.TryCancel(); }

  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
};

// Our half of a call. Events come one after another on the queue's thread; the runner may call from
// any thread. At most one read and one write are in flight.
class GrpcFrontend::Handler : public RpcHandler {
 public:
  Handler(RpcCall* rpc, MethodMetrics* metrics) : metrics_(metrics), rpc_(rpc) {
    metrics->Started();
  }

  virtual void OnBegun() { Read(); }
  // Not called once the call has been finished: a message that was read while its caller went away
  // (their events come in either order) begins nothing.
  virtual void OnRead(bool ok, grpc::ByteBuffer& bytes) = 0;
  virtual void OnWritten(bool ok) = 0;
  // The client has gone away, or knows the end. Finish() must have been called when it returns, or
  // follow from it.
  virtual void OnGone() = 0;
  // The call has sent nothing for too long.
  virtual void OnSilent(const absl::Status& status) { Finish(status); }

 protected:
  friend class GrpcFrontend;
  void Read() {
    MutexLock lock(&mu_);
    if (done_) return;
    ++rpc_->in_flight_;
    rpc_->StartRead(&in_);
  }
  bool done() {
    MutexLock lock(&mu_);
    return done_;
  }
  // Valid while an event of the call is being handled.
  RpcCall* rpc() { return rpc_; }
  bool StartWrite(const grpc::ByteBuffer& bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (done_) return false;
    ++rpc_->in_flight_;
    rpc_->StartWrite(bytes);
    return true;
  }
  // With a `reply`, requires an OK status.
  void Finish(const absl::Status& status, const grpc::ByteBuffer* reply = nullptr) {
    MutexLock lock(&mu_);
    FinishLocked(status, reply);
  }
  void FinishLocked(const absl::Status& status, const grpc::ByteBuffer* reply = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (done_) return;
    done_ = true;
    metrics_->Handled(static_cast<int>(status.code()), Clock::Real().Now() - start_);
    ++rpc_->in_flight_;
    if (reply != nullptr) {
      rpc_->StartWriteAndFinish(*reply);
    } else {
      rpc_->StartFinish(rpc::ToGrpc(status));
    }
  }

  // Ends at once what FinishLocked began under the same lock, even if the client takes nothing.
  void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { rpc_->Cancel(); }

  Mutex mu_;

 private:
  MethodMetrics* const metrics_;
  const absl::Time start_ = Clock::Real().Now();
  RpcCall* const rpc_;  // valid until done_ and everything in flight has come back
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ByteBuffer in_;  // gRPC's while a read is in flight
};

// One row of the table of methods: how its call is made, and for those that the core answers how a
// request becomes an Op.
struct GrpcFrontend::Method {
  const char* service;
  const char* name;
  const char* type;
  std::shared_ptr<Handler> (*handle)(GrpcFrontend& frontend, RpcCall* rpc, const Method& method,
                                     MethodMetrics* metrics);
  bool (*parse)(grpc::ByteBuffer& bytes, v1::Op* op) = nullptr;
  using Run = void (*)(GrpcFrontend& frontend, const std::shared_ptr<UnaryCall>& call,
                       grpc::ByteBuffer& request);
  Run run = nullptr;

  // Makes the row of a method that the core answers.
  template <auto put>
  static constexpr Method Core(const char* service, const char* name);
  // Makes the row of another unary method.
  static constexpr Method Other(const char* service, const char* name, Run run);
  template <typename Stream>
  static constexpr Method Streaming(const char* service, const char* name, const char* type);
};

class GrpcFrontend::UnaryCall final : public Handler,
                                      public CallSink,
                                      public std::enable_shared_from_this<UnaryCall> {
 public:
  UnaryCall(GrpcFrontend& frontend, RpcCall* rpc, const Method& method, MethodMetrics* metrics)
      : Handler(rpc, metrics),
        frontend_(frontend),
        method_(method),
        id_(frontend.runner_.NewCallId()),
        deadline_(method.service == kHealth ? absl::OkStatus() : CheckDeadline(*rpc)) {}

  void OnBegun() override {
    if (deadline_.ok()) {
      Read();
    } else {
      Finish(deadline_);
    }
  }
  void OnRead(bool ok, grpc::ByteBuffer& bytes) override {
    if (!ok) {
      Finish(NotAMessage("request: there are none"));
      return;
    }
    if (method_.run != nullptr) {
      method_.run(frontend_, shared_from_this(), bytes);
      return;
    }
    const size_t size = bytes.Length();
    auto op = std::make_unique<v1::Op>();
    if (!method_.parse(bytes, op.get())) {
      Finish(NotAMessage(absl::StrCat("request of ", method_.service, "/", method_.name)));
      return;
    }
    bytes.Clear();
    if (MayBeHeld(*op)) {
      const absl::Status allowed = frontend_.TakeBytes(rpc(), HeldBytes(*op, size));
      if (!allowed.ok()) {
        Finish(allowed);
        return;
      }
    }
    calling_ = true;
    if (frontend_.audit_ != nullptr && IsAudited(*op)) {
      audit_ = AuditLog::Begin(rpc()->who_.get(), rpc()->peer(), *op);
    }
    frontend_.runner_.Call(id_, std::move(op), size, shared_from_this(), rpc()->who_);
  }
  void OnWritten(bool) override {}
  void OnGone() override {
    if (calling_) {
      frontend_.runner_.Abandon(id_);  // answers, unless it has
    } else {
      Finish(absl::CancelledError("the caller disconnected"));
    }
  }

  void OnAnswer(const std::shared_ptr<const Answer>& answer) override {
    if (audit_.has_value()) frontend_.audit_->End(*audit_, *answer);
    if (answer->kind() == v1::OpResult::KIND_NOT_SET) {
      Finish(rpc::FromOpError(answer->Parse().error()));
    } else {
      const grpc::Slice slice(answer->reply().data(), answer->reply().size());
      const grpc::ByteBuffer reply(&slice, 1);
      Finish(absl::OkStatus(), &reply);
    }
  }
  // Returns whether the caller may do this, which is no operation; answers the call if not. Called
  // in an event of the call.
  bool Allowed(Role needs, absl::string_view what) {
    const absl::Status allowed = frontend_.CheckAccess(rpc(), needs, /*job=*/"", what);
    if (!allowed.ok()) Finish(allowed);
    return allowed.ok();
  }
  // Notes in the audit log that the caller does this.
  void Audit(absl::string_view what) { AuditLater(what)(); }
  // Returns a function that notes it, on any thread. Called in an event of the call.
  std::function<void()> AuditLater(absl::string_view what) {
    return [audit = frontend_.audit_.get(), who = rpc()->who_, peer = rpc()->peer(),
            what = std::string(what)] {
      if (audit != nullptr) audit->Done(who.get(), peer, what);
    };
  }
  bool Over() { return done(); }
  void Done(const absl::Status& status) { Finish(status); }
  void Done(const google::protobuf::MessageLite& message) {
    const grpc::ByteBuffer reply = Serialize(message);
    Finish(absl::OkStatus(), &reply);
  }
  void Done(const grpc::ByteBuffer& reply) { Finish(absl::OkStatus(), &reply); }

 private:
  GrpcFrontend& frontend_;
  const Method& method_;
  const CallId id_;
  const absl::Status deadline_;
  bool calling_ = false;
  std::optional<AuditLog::Entry> audit_;  // of an operation that is audited
};

// Does what waits for the disk, one task after the other: on the queue's thread all calls would
// wait.
class GrpcFrontend::DiskThread {
 public:
  ~DiskThread() {
    {
      MutexLock lock(&mu_);
      stop_ = true;
    }
    wake_.SignalAll();
    thread_.join();
  }
  // Thread-safe. `work` answers its call, unless that is over; at the end some tasks are left
  // undone.
  void Do(std::function<void()> work) {
    MutexLock lock(&mu_);
    work_.push_back(std::move(work));
    wake_.SignalAll();
  }

 private:
  void Run() {
    while (true) {
      std::function<void()> work;
      {
        MutexLock lock(&mu_);
        while (work_.empty() && !stop_) wake_.Wait(&mu_);
        if (stop_) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
    }
  }

  Mutex mu_;
  CondVar wake_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_{[this] { Run(); }};
};

// A watch: one request, then messages until the client goes away.
template <typename Request>
class GrpcFrontend::GrpcWatchStream final
    : public Handler,
      public WatchStream,
      public std::enable_shared_from_this<GrpcWatchStream<Request>> {
 public:
  GrpcWatchStream(GrpcFrontend& frontend, RpcCall* rpc, const Method&, MethodMetrics* metrics)
      : Handler(rpc, metrics), frontend_(frontend), runner_(frontend.runner_) {}

  void Write(const google::protobuf::MessageLite& message) override {
    MutexLock lock(&mu_);
    StartWrite(Serialize(message));
  }
  void Close(const absl::Status& status) override { Finish(status); }

 private:
  // Returns what `request` asks for, if the caller may see it.
  absl::StatusOr<std::unique_ptr<WatchSource>> Source(v1::WatchRequest request) {
    // Keys hold what workers tell one another, which may include secrets.
    const bool keys = request.keys() || !request.members();
    const absl::Status allowed =
        frontend_.CheckAccess(rpc(), keys ? Role::kAttempt : Role::kView, request.job_id(),
                              absl::StrCat("watch the ", keys ? "keys" : "members", " of job ",
                                           Quoted(request.job_id())));
    if (!allowed.ok()) return allowed;
    return WatchEvents(std::move(request));
  }
  absl::StatusOr<std::unique_ptr<WatchSource>> Source(v1::WatchJobsRequest request) {
    // The same rule as for Get and List: no attempt of a job may watch.
    const absl::Status allowed =
        frontend_.CheckAccess(rpc(), Role::kView, /*job=*/"", "watch submitted jobs");
    if (!allowed.ok()) return allowed;
    return WatchJobs(std::move(request), rpc()->who_);
  }
  void OnRead(bool ok, grpc::ByteBuffer& bytes) override {
    Request request;
    if (!ok || !Parse(bytes, &request)) {
      Finish(NotAMessage(Request::descriptor()->name()));
      return;
    }
    bytes.Clear();
    absl::StatusOr<std::unique_ptr<WatchSource>> source = Source(std::move(request));
    if (source.ok()) {
      runner_.WatchOpen(this->shared_from_this(), *std::move(source));
    } else {
      Finish(source.status());
    }
  }
  void OnWritten(bool ok) override {
    if (ok) {
      runner_.WatchWritable(this->shared_from_this());
    } else {
      Finish(absl::CancelledError("the watcher disconnected"));
    }
  }
  void OnGone() override {
    runner_.WatchClosed(this->shared_from_this());
    Finish(absl::CancelledError("the watcher disconnected"));
  }

  GrpcFrontend& frontend_;
  CoreRunner& runner_;
};

// An agent's stream: frames go out as the bytes that the runner made.
class GrpcFrontend::GrpcAgentStream final : public Handler,
                                            public AgentStream,
                                            public std::enable_shared_from_this<GrpcAgentStream> {
 public:
  GrpcAgentStream(GrpcFrontend& frontend, RpcCall* rpc, const Method&, MethodMetrics* metrics)
      : Handler(rpc, metrics),
        frontend_(frontend),
        runner_(frontend.runner_),
        identity_(rpc->who_) {}

  void OnBegun() override {
    const absl::Status allowed =
        identity_ == nullptr ? absl::OkStatus()
                             : frontend_.CheckAccess(rpc(), Role::kAttempt, identity_->group,
                                                     "attach as the agent of workers");
    if (allowed.ok()) {
      Read();
    } else {
      Close(allowed);
    }
  }
  std::shared_ptr<const Identity> identity() const override { return identity_; }
  void Bind(std::shared_ptr<FrameSource> source) override {
    MutexLock lock(&mu_);
    if (!closed_) source_ = std::move(source);
  }
  bool TryWrite(absl::FunctionRef<grpc::ByteBuffer()> next) override {
    MutexLock lock(&mu_);
    if (writing_ || closed_) return false;
    writing_ = true;
    window_told_ = true;
    StartWrite(next());
    return true;
  }
  // gRPC sends the client its new window in a separate packet as soon as a read begins, unless a
  // write since the last frame has carried it. A frame that is not answered at once (an arrival at
  // a barrier) often is a moment later: the read waits until the queue has nothing at hand.
  void ReadNext(bool answer_follows) override {
    bool now = !answer_follows || serving_queue_of != &frontend_;
    if (!now) {
      MutexLock lock(&mu_);
      now = window_told_;
    }
    if (now) {
      Read();
    } else {
      frontend_.put_off_.push_back(shared_from_this());
    }
  }
  void Close(const absl::Status& status) override {
    std::shared_ptr<FrameSource> source;  // released after the lock
    MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    source.swap(source_);
    FinishLocked(status);
    // The status waits behind the write, which waits for an agent that may take nothing. When the
    // server stops, it has its own patience.
    if (writing_ && !status.ok() && !absl::IsUnavailable(status)) Cancel();
  }
  void CloseAfter(grpc::ByteBuffer last, const absl::Status& status) override {
    std::shared_ptr<FrameSource> source;  // released after the lock
    MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    source.swap(source_);
    last_ = std::move(last);
    last_status_ = status;
    if (!writing_) WriteLast();
  }

 private:
  void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    writing_ = true;
    StartWrite(*last_);
    last_.reset();
    FinishLocked(last_status_);
  }
  void OnRead(bool ok, grpc::ByteBuffer& bytes) override {
    {
      MutexLock lock(&mu_);
      if (closed_) return;
      window_told_ = false;
    }
    if (!ok) {
      runner_.AgentClosed(shared_from_this());
      Close(absl::OkStatus());
      return;
    }
    // Parsed in an arena: a frame of many small operations is made and freed in a few pieces.
    const size_t size = bytes.Length();
    auto arena = std::make_shared<google::protobuf::Arena>(FrameArena(size));
    auto* frame = google::protobuf::Arena::CreateMessage<v1::AgentFrame>(arena.get());
    if (!Parse(bytes, frame)) {
      runner_.AgentClosed(shared_from_this());
      Close(NotAMessage("AgentFrame"));
      return;
    }
    bytes.Clear();
    runner_.AgentFrame(shared_from_this(),
                       std::shared_ptr<const v1::AgentFrame>(std::move(arena), frame), size);
  }
  void OnWritten(bool ok) override {
    std::shared_ptr<FrameSource> source;
    {
      MutexLock lock(&mu_);
      writing_ = false;
      if (ok) source = source_;
      if (last_.has_value()) {
        if (ok) {
          WriteLast();
        } else {
          last_.reset();
          FinishLocked(last_status_);
        }
      }
    }
    // Called without the lock, because it comes back through TryWrite.
    if (source != nullptr) source->Writable();
  }
  void OnGone() override {
    runner_.AgentClosed(shared_from_this());
    const absl::Status status = absl::CancelledError("the agent disconnected");
    Close(status);
    MutexLock lock(&mu_);
    if (!last_.has_value()) return;
    last_.reset();
    FinishLocked(status);
  }

  void OnSilent(const absl::Status& status) override { Close(status); }

  friend class GrpcFrontend;
  GrpcFrontend& frontend_;
  CoreRunner& runner_;
  const std::shared_ptr<const Identity> identity_;
  bool window_told_ ABSL_GUARDED_BY(mu_) = false;  // by a write since the last frame
  std::shared_ptr<FrameSource> source_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<grpc::ByteBuffer> last_ ABSL_GUARDED_BY(mu_);  // when the write in flight has ended
  absl::Status last_status_ ABSL_GUARDED_BY(mu_);              // and then this
};

// A watcher of the health service.
class GrpcFrontend::HealthWatch final : public Handler,
                                        public std::enable_shared_from_this<HealthWatch> {
 public:
  HealthWatch(GrpcFrontend& frontend, RpcCall* rpc, const Method&, MethodMetrics* metrics)
      : Handler(rpc, metrics), frontend_(frontend) {}

  // Sends the current state if it differs from the last one sent.
  void Tell() {
    MutexLock lock(&mu_);
    const Health health = !known_ ? kUnknownService : frontend_.serving_ ? kServing : kNotServing;
    if (!asked_ || writing_ || health == told_) return;
    told_ = health;
    writing_ = StartWrite(HealthReply(health));
  }
  void End() { Finish(Stopping()); }

 private:
  void OnRead(bool ok, grpc::ByteBuffer& bytes) override {
    std::string service;
    if (!ok || !ParseHealthRequest(bytes, &service)) {
      Finish(NotAMessage("HealthCheckRequest"));
      return;
    }
    {
      MutexLock lock(&mu_);
      asked_ = true;
      known_ = frontend_.Knows(service);
    }
    if (const absl::Status added = frontend_.AddHealthWatch(shared_from_this()); added.ok()) {
      Tell();
    } else {
      Finish(added);
    }
  }
  void OnWritten(bool ok) override {
    {
      MutexLock lock(&mu_);
      writing_ = false;
    }
    if (ok) Tell();
  }
  void OnGone() override { Finish(absl::CancelledError("the watcher disconnected")); }

  GrpcFrontend& frontend_;
  bool asked_ ABSL_GUARDED_BY(mu_) = false;
  bool known_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  int told_ ABSL_GUARDED_BY(mu_) = 0;
};

// Registers a name without a callable method: the generic service answers the calls.
class GrpcFrontend::NamedService final : public grpc::Service {
 public:
  explicit NamedService(absl::string_view name) : path_(absl::StrCat("/", name, "/")) {
    AddMethod(new grpc::internal::RpcServiceMethod(
        path_.c_str(), grpc::internal::RpcMethod::NORMAL_RPC,
        new grpc::internal::UnknownMethodHandler("no method was named")));
  }

 private:
  const std::string path_;
};

// Each is defined before its first use, where clang needs it.
template <typename Stream>
constexpr GrpcFrontend::Method GrpcFrontend::Method::Streaming(const char* service,
                                                               const char* name, const char* type) {
  return {.service = service,
          .name = name,
          .type = type,
          .handle = [](GrpcFrontend& frontend, RpcCall* rpc, const Method& method,
                       MethodMetrics* metrics) -> std::shared_ptr<Handler> {
            return std::make_shared<Stream>(frontend, rpc, method, metrics);
          }};
}

constexpr GrpcFrontend::Method GrpcFrontend::Method::Other(const char* service, const char* name,
                                                           Run run) {
  Method method = Streaming<UnaryCall>(service, name, "unary");
  method.run = run;
  return method;
}

template <auto put>
constexpr GrpcFrontend::Method GrpcFrontend::Method::Core(const char* service, const char* name) {
  Method method = Other(service, name, nullptr);
  method.parse = [](grpc::ByteBuffer& bytes, v1::Op* op) { return Parse(bytes, (op->*put)()); };
  return method;
}

#define MUSTER_CORE_METHOD(service, name, member) \
  Method::Core<&v1::Op::mutable_##member>("muster.v1." service, name)

constexpr GrpcFrontend::Method GrpcFrontend::kMethods[] = {
    Method::Streaming<GrpcAgentStream>("muster.v1.Session", "Attach", "bidi_stream"),
    Method::Streaming<GrpcWatchStream<v1::WatchRequest>>("muster.v1.Watch", "Watch",
                                                         "server_stream"),
    MUSTER_CORE_METHOD("Rendezvous", "Join", join),
    MUSTER_CORE_METHOD("Rendezvous", "GetRankTable", get_rank_table),
    MUSTER_CORE_METHOD("Rendezvous", "Leave", leave),
    MUSTER_CORE_METHOD("Rendezvous", "EndGeneration", end_generation),
    MUSTER_CORE_METHOD("Barrier", "Arrive", arrive),
    MUSTER_CORE_METHOD("Barrier", "Cancel", cancel_barrier),
    MUSTER_CORE_METHOD("Barrier", "Describe", describe_barrier),
    MUSTER_CORE_METHOD("Barrier", "List", list_barriers),
    MUSTER_CORE_METHOD("Barrier", "StragglerReport", straggler_report),
    MUSTER_CORE_METHOD("KeyValueStore", "Txn", txn),
    MUSTER_CORE_METHOD("KeyValueStore", "Wait", wait),
    MUSTER_CORE_METHOD("Triggers", "Raise", raise_trigger),
    MUSTER_CORE_METHOD("Triggers", "Poll", poll_triggers),
    MUSTER_CORE_METHOD("Checkpoints", "Begin", begin_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "ReportShards", report_shards),
    MUSTER_CORE_METHOD("Checkpoints", "Seal", seal_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "Publish", publish_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "Abort", abort_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "Deleted", checkpoint_deleted),
    MUSTER_CORE_METHOD("Checkpoints", "Resolve", resolve_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "List", list_checkpoints),
    MUSTER_CORE_METHOD("Checkpoints", "Mark", mark_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "Verify", verify_checkpoint),
    MUSTER_CORE_METHOD("Checkpoints", "Collect", collect_checkpoints),
    MUSTER_CORE_METHOD("Jobs", "Submit", submit_job),
    MUSTER_CORE_METHOD("Jobs", "Get", get_job),
    Method::Streaming<GrpcWatchStream<v1::WatchJobsRequest>>("muster.v1.Jobs", "Watch",
                                                             "server_stream"),
    MUSTER_CORE_METHOD("Jobs", "List", list_jobs),
    MUSTER_CORE_METHOD("Jobs", "Control", control_job),
    MUSTER_CORE_METHOD("Jobs", "ReadLog", read_job_log),
    MUSTER_CORE_METHOD("Nodes", "Sync", sync_node),
    MUSTER_CORE_METHOD("Nodes", "AnswerLog", answer_log),
    MUSTER_CORE_METHOD("Nodes", "List", list_nodes),
    MUSTER_CORE_METHOD("Nodes", "Control", control_node),
    MUSTER_CORE_METHOD("Membership", "Heartbeat", heartbeat),
    MUSTER_CORE_METHOD("Membership", "ReportExit", report_exit),
    MUSTER_CORE_METHOD("Membership", "GetMembers", get_members),
    MUSTER_CORE_METHOD("Membership", "AgreeAlive", agree_alive),
    MUSTER_CORE_METHOD("Membership", "CaptureStacks", capture_stacks),
    MUSTER_CORE_METHOD("Membership", "Quarantine", quarantine),
    Method::Other(
        "muster.v1.Admin", "Status",
        [](GrpcFrontend& frontend, const std::shared_ptr<UnaryCall>& call, grpc::ByteBuffer&) {
          if (!call->Allowed(Role::kView, "read the status")) return;
          frontend.runner_.WithCore([&frontend, call](class Core* core) {
            if (core == nullptr) {
              call->Done(Stopping());
              return;
            }
            v1::StatusReply reply;
            core->FillStatus(&reply);
            reply.set_version(kVersion);
            reply.mutable_uptime()->set_seconds(
                absl::ToInt64Seconds(Clock::Real().Now() - frontend.started_));
            reply.set_journal(OneLine(frontend.runner_.journal().description()));
            call->Done(reply);
          });
        }),
    MUSTER_CORE_METHOD("Admin", "RemoveJob", remove_job),
    Method::Other(
        "muster.v1.Admin", "Snapshot",
        [](GrpcFrontend& frontend, const std::shared_ptr<UnaryCall>& call, grpc::ByteBuffer&) {
          if (!call->Allowed(Role::kAdmin, "write a snapshot")) return;
          frontend.runner_.Snapshot([call](absl::StatusOr<uint64_t> revision) {
            if (!revision.ok()) {
              call->Done(revision.status());
              return;
            }
            v1::SnapshotReply reply;
            reply.set_revision(*revision);
            call->Done(reply);
          });
        }),
    Method::Other("muster.v1.Backup", "Read",
                  [](GrpcFrontend& frontend, const std::shared_ptr<UnaryCall>& call,
                     grpc::ByteBuffer& bytes) {
                    v1::ReadBackupRequest request;
                    if (!Parse(bytes, &request)) {
                      call->Done(NotAMessage("ReadBackupRequest"));
                      return;
                    }
                    constexpr char kWhat[] = "back up the journal";
                    if (!call->Allowed(Role::kAdmin, kWhat)) return;
                    frontend.disk_thread_->Do([&journal = frontend.runner_.journal(), call, request,
                                               audit = call->AuditLater(kWhat)] {
                      if (call->Over()) return;
                      absl::StatusOr<Journal::BackupPart> part = journal.ReadBackup(
                          request.revision(), request.offset(), kBackupPartBytes);
                      if (!part.ok()) {
                        call->Done(part.status());
                        return;
                      }
                      if (request.offset() == 0) audit();
                      v1::ReadBackupReply reply;
                      reply.set_bytes(part->bytes);
                      reply.set_data(std::move(part->data));
                      call->Done(reply);
                    });
                  }),
    Method::Other(
        "muster.v1.Operations", "SetLogLevel",
        [](GrpcFrontend& frontend, const std::shared_ptr<UnaryCall>& call,
           grpc::ByteBuffer& bytes) {
          v1::SetLogLevelRequest request;
          if (!Parse(bytes, &request)) {
            call->Done(NotAMessage("SetLogLevelRequest"));
            return;
          }
          const bool sets = request.level() != v1::LOG_LEVEL_UNSPECIFIED;
          if (!call->Allowed(Role::kAdmin, sets ? "set the log level" : "read the log level")) {
            return;
          }
          const absl::StatusOr<absl::Duration> span = SpanOf(request);
          if (!span.ok()) {
            call->Done(span.status());
            return;
          }
          LogLevelControl::State state = frontend.log_level_.Get();
          if (sets) {
            const std::string what = absl::StrCat(
                "set the log level to ", rpc::LogLevelName(request.level()),
                *span == absl::InfiniteDuration() ? std::string()
                                                  : absl::StrCat(" for ", HumanDuration(*span)));
            call->Audit(what);
            state = frontend.log_level_.Set(rpc::FromProto(request.level()), *span);
            MUSTER_LOG(Info) << "an admin has " << what;
          }
          v1::SetLogLevelReply reply;
          reply.set_level(rpc::ToProto(state.level));
          reply.set_next(rpc::ToProto(state.next));
          if (state.left != absl::InfiniteDuration()) {
            *reply.mutable_left() = rpc::ToProto(state.left);
          }
          call->Done(reply);
        }),
    Method::Other(kHealth, "Check",
                  [](GrpcFrontend& frontend, const std::shared_ptr<UnaryCall>& call,
                     grpc::ByteBuffer& request) {
                    std::string service;
                    if (!ParseHealthRequest(request, &service)) {
                      call->Done(NotAMessage("HealthCheckRequest"));
                    } else if (!frontend.Knows(service)) {
                      call->Done(absl::NotFoundError("no such service"));
                    } else {
                      call->Done(HealthReply(frontend.serving_ ? kServing : kNotServing));
                    }
                  }),
    Method::Streaming<HealthWatch>(kHealth, "Watch", "server_stream"),
};
#undef MUSTER_CORE_METHOD

GrpcFrontend::GrpcFrontend(CoreRunner* runner, RpcMetrics* metrics, absl::Time started,
                           const Limits& limits, std::unique_ptr<Callers> callers,
                           std::unique_ptr<AuditLog> audit)
    : runner_(*runner),
      metrics_(*metrics),
      started_(started),
      limits_(limits),
      callers_(std::move(callers)),
      audit_(std::move(audit)),
      disk_thread_(std::make_unique<DiskThread>()) {
  for (const Method& method : kMethods) {
    methods_[absl::StrCat("/", method.service, "/", method.name)] = {
        &method, metrics_.Add(method.service, method.name, method.type)};
  }
}

GrpcFrontend::~GrpcFrontend() { Shutdown(); }

bool GrpcFrontend::Knows(absl::string_view service) const {
  if (service.empty()) return true;
  for (const Method& method : kMethods)
    if (service == method.service) return true;
  return false;
}

absl::Status GrpcFrontend::AddHealthWatch(const std::shared_ptr<HealthWatch>& watch) {
  MutexLock lock(&mu_);
  if (health_ended_) return Stopping();
  health_watches_.erase(
      std::remove_if(health_watches_.begin(), health_watches_.end(),
                     [](const std::weak_ptr<HealthWatch>& other) { return other.expired(); }),
      health_watches_.end());
  if (health_watches_.size() >= limits_.health_watches) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return rpc::ErrorWithReason(absl::StatusCode::kUnavailable,
                                "too many watches of the health service: use Check, end watches "
                                "that are not needed, or try again "
                                "later",
                                v1::ERROR_REASON_OVERLOADED, /*retryable=*/true);
  }
  health_watches_.push_back(watch);
  return absl::OkStatus();
}

void GrpcFrontend::SetServing(bool serving) {
  serving_ = serving;
  std::vector<std::weak_ptr<HealthWatch>> watches;
  {
    MutexLock lock(&mu_);
    watches = health_watches_;
  }
  for (const auto& watch : watches)
    if (const auto alive = watch.lock()) alive->Tell();
}

void GrpcFrontend::EndHealthWatches() {
  std::vector<std::weak_ptr<HealthWatch>> watches;
  {
    MutexLock lock(&mu_);
    health_ended_ = true;
    watches.swap(health_watches_);
  }
  for (const auto& watch : watches)
    if (const auto alive = watch.lock()) alive->End();
}

void GrpcFrontend::Register(grpc::ServerBuilder& builder) {
  std::string last;
  for (const Method& method : kMethods) {  // grouped by service
    if (std::exchange(last, method.service) == method.service) continue;
    names_.push_back(std::make_unique<NamedService>(method.service));
    builder.RegisterService(names_.back().get());
  }
  builder.RegisterAsyncGenericService(&service_);
  queue_ = builder.AddCompletionQueue();
}

void GrpcFrontend::Serve() {
  for (int i = 0; i < kAcceptors; ++i) Accept();
  {
    MutexLock lock(&mu_);
    running_ = true;
  }
  thread_ = std::thread([this] { Run(); });
}

void GrpcFrontend::Shutdown() {
  if (queue_ == nullptr) return;
  {
    MutexLock lock(&mu_);
    while (open_ > 0) ended_.Wait(&mu_);
    if (stopping_) return;
    stopping_ = true;
    running_ = false;
    queue_->Shutdown();
  }
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Run();
  }
}

void GrpcFrontend::Accept() {
  MutexLock lock(&mu_);
  if (stopping_) return;
  ++open_;
  (new GrpcCall)->Request(service_, queue_.get());
}

void GrpcFrontend::Adopt(std::unique_ptr<RpcCall> rpc) {
  {
    MutexLock lock(&mu_);
    ++open_;
  }
  Begin(rpc.release());
}

void GrpcFrontend::CatchUp(absl::Time asked) {
  {
    MutexLock lock(&mu_);
    if (running_) {
      ++open_;
      catch_up_asked_ = asked;
      catch_up_alarm_.Set(queue_.get(), gpr_now(GPR_CLOCK_MONOTONIC), &catch_up_alarm_);
      return;
    }
  }
  runner_.CaughtUp(asked);
}

template <typename OnEvent>
bool GrpcFrontend::LookFurther(const OnEvent& handle) {
  void* tag;
  bool ok;
  switch (queue_->AsyncNext(&tag, &ok, std::chrono::system_clock::time_point())) {
    case grpc::CompletionQueue::GOT_EVENT:
      empty_looks_ = 0;
      handle(tag, ok);
      if (++events_since_put_off_ > kPutOffEvents + 2 * put_off_.size()) ReadOn();
      // If the queue is never empty, all calls that were open have had their turn by now.
      if (++looks_ < kLooks + 4 * (runner_.open_calls() + runner_.agents())) return true;
      break;
    case grpc::CompletionQueue::TIMEOUT:
      ReadOn();
      if (++empty_looks_ < kEmptyLooks) return true;
      break;
    case grpc::CompletionQueue::SHUTDOWN:
      return false;
  }
  runner_.CaughtUp(*catching_up_);
  catching_up_.reset();
  Closed();
  return true;
}

bool GrpcFrontend::Next(void** tag, bool* ok) {
  const absl::Time begun = Clock::Real().Now();
  while (soon_) {
    switch (queue_->AsyncNext(tag, ok, std::chrono::system_clock::time_point())) {
      case grpc::CompletionQueue::GOT_EVENT:
        return true;
      case grpc::CompletionQueue::SHUTDOWN:
        return false;
      case grpc::CompletionQueue::TIMEOUT:
        soon_ = Clock::Real().Now() - begun < kAwhile;
        break;
    }
  }
  if (!Wait(tag, ok)) return false;
  soon_ = Clock::Real().Now() - begun < kSoon;
  return true;
}

bool GrpcFrontend::Wait(void** tag, bool* ok) {
  while (!silent_.empty()) {
    const absl::Duration left =
        silent_.front()->begun_ + limits_.first_message - Clock::Real().Now();
    const gpr_timespec until =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                     gpr_time_from_nanos(absl::ToInt64Nanoseconds(left), GPR_TIMESPAN));
    switch (queue_->AsyncNext(tag, ok, until)) {
      case grpc::CompletionQueue::GOT_EVENT:
        return true;
      case grpc::CompletionQueue::SHUTDOWN:
        return false;
      case grpc::CompletionQueue::TIMEOUT:
        EndSilent(Clock::Real().Now());
        break;
    }
  }
  return queue_->Next(tag, ok);
}

void GrpcFrontend::EndSilent(absl::Time now) {
  while (!silent_.empty() && silent_.front()->begun_ + limits_.first_message <= now) {
    RpcCall* const rpc = silent_.front();
    Heard(rpc);
    std::static_pointer_cast<Handler>(rpc->handler_)
        ->OnSilent(absl::DeadlineExceededError(absl::StrCat(
            "no message of this call arrived within ", absl::FormatDuration(limits_.first_message),
            " of its start: send the request, or a stream's first frame, with it")));
  }
}

void GrpcFrontend::Heard(RpcCall* rpc) {
  if (!std::exchange(rpc->is_silent_, false)) return;
  silent_.erase(rpc->silent_);
  silent_health_ -= rpc->is_health_ ? 1 : 0;
  if (rpc->caller_ != nullptr) {
    --rpc->caller_->silent;
    --rpc->caller_->user->silent;
  }
  silent_count_.store(silent_.size(), std::memory_order_relaxed);
}

void GrpcFrontend::Run() {
  serving_queue_of = this;
  void* tag;
  bool ok;
  const auto handle = [&](void* tag, bool ok) {
    if (tag == &catch_up_alarm_) {
      MutexLock lock(&mu_);
      catching_up_ = catch_up_asked_;
      empty_looks_ = 0;
      looks_ = 0;
      return;
    }
    if (++events_since_silent_ >= kSilentEvents) {  // if no time is left to wait
      events_since_silent_ = 0;
      EndSilent(Clock::Real().Now());
    }
    const uintptr_t bits = reinterpret_cast<uintptr_t>(tag);
    Handle(reinterpret_cast<GrpcCall*>(bits & ~kEventMask),
           static_cast<RpcEvent>(bits & kEventMask), ok);
  };
  while (true) {
    if (catching_up_.has_value()) {
      if (!LookFurther(handle)) return;
      continue;
    }
    if (put_off_.empty()) {
      if (!Next(&tag, &ok)) return;
      handle(tag, ok);
      events_since_put_off_ = 0;
      continue;
    }
    switch (queue_->AsyncNext(&tag, &ok, std::chrono::system_clock::time_point())) {
      case grpc::CompletionQueue::GOT_EVENT:
        handle(tag, ok);
        if (++events_since_put_off_ > kPutOffEvents + 2 * put_off_.size() ||
            put_off_.size() > kPutOffReads) {
          ReadOn();
        }
        break;
      case grpc::CompletionQueue::TIMEOUT:
        ReadOn();
        break;
      case grpc::CompletionQueue::SHUTDOWN:
        put_off_.clear();
        return;
    }
  }
}

void GrpcFrontend::ReadOn() {
  for (const auto& stream : put_off_) stream->Read();
  put_off_.clear();
}

void GrpcFrontend::Begin(RpcCall* rpc) {
  static MethodMetrics unknown_metrics;
  const auto it = methods_.find(rpc->method());
  const Method* const method = it == methods_.end() ? nullptr : it->second.method;
  MethodMetrics* const metrics = method == nullptr ? &unknown_metrics : it->second.metrics;
  if (const absl::Status allowed = CheckCaller(rpc, method); !allowed.ok()) {
    Refuse(rpc, metrics, allowed);
    return;
  }
  if (method == nullptr) {
    Refuse(rpc, metrics,
           absl::UnimplementedError(
               absl::StrCat("this coordinator (", kVersion, ") has no method ", rpc->method())));
    return;
  }
  const bool health = method->service == kHealth;
  if (health ? silent_health_ >= limits_.silent_health_calls
             : silent_.size() - silent_health_ >= limits_.silent_calls) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    Refuse(rpc, metrics,
           rpc::ErrorWithReason(
               absl::StatusCode::kUnavailable,
               "too many calls have sent no message: nothing was done; try again later",
               v1::ERROR_REASON_OVERLOADED, /*retryable=*/true));
    return;
  }
  rpc->is_stream_ = absl::string_view(method->type) != "unary";
  if (const absl::Status allowed = health ? absl::OkStatus() : TakeShare(rpc); !allowed.ok()) {
    Refuse(rpc, metrics, allowed);
    return;
  }
  const std::shared_ptr<Handler> handler = method->handle(*this, rpc, *method, metrics);
  rpc->handler_ = handler;
  rpc->begun_ = Clock::Real().Now();
  rpc->silent_ = silent_.insert(silent_.end(), rpc);
  rpc->is_silent_ = true;
  rpc->is_health_ = health;
  silent_health_ += health ? 1 : 0;
  silent_count_.store(silent_.size(), std::memory_order_relaxed);
  handler->OnBegun();
}

absl::Status GrpcFrontend::CheckCaller(RpcCall* rpc, const Method* method) {
  // Monitors of the process, such as a load balancer, have no token.
  if (callers_ == nullptr || (method != nullptr && method->service == kHealth)) {
    return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<const Identity>> who =
      callers_->Identify(rpc->metadata(), rpc->certificate());
  if (!who.ok()) return who.status();
  rpc->who_ = *std::move(who);
  return absl::OkStatus();
}

absl::Status GrpcFrontend::CheckAccess(RpcCall* rpc, Role needs, absl::string_view job,
                                       absl::string_view what) {
  if (rpc->who_ == nullptr) return absl::OkStatus();
  const auto error = coordinator::CheckAccess(*rpc->who_, needs, job, what);
  if (!error.has_value()) return absl::OkStatus();
  if (audit_ != nullptr) audit_->Refused(*rpc->who_, rpc->peer(), what);
  return rpc::FromOpError(*error);
}

CallerShare* GrpcFrontend::FindCaller(const RpcCall& rpc) {
  const std::string peer = rpc.peer();
  if (peer.empty() || absl::StartsWith(peer, "unix")) return nullptr;
  std::unique_ptr<CallerShare>& connection = connections_[peer];
  if (connection == nullptr) {
    std::string name = rpc.who_ == nullptr ? "" : rpc.who_->name;
    if (name.empty() && rpc.who_ != nullptr) name = rpc.who_->group;
    if (name.empty()) name = rpc.certificate();
    if (name.empty()) name = peer.substr(0, peer.rfind(':'));
    std::unique_ptr<CallerShare>& user = users_[name];
    if (user == nullptr) user = std::make_unique<CallerShare>(CallerShare{.name = name});
    connection = std::make_unique<CallerShare>(CallerShare{.name = peer, .user = user.get()});
  }
  return connection.get();
}

absl::Status GrpcFrontend::BeyondQuota(const CallerShare& caller, absl::string_view what,
                                       size_t most) {
  const bool user = caller.user == nullptr;
  quota_refused_[user ? 1 : 0].fetch_add(1, std::memory_order_relaxed);
  refused_.fetch_add(1, std::memory_order_relaxed);
  return rpc::ErrorWithReason(
      absl::StatusCode::kUnavailable,
      absl::StrCat(user ? "user " : "connection ", caller.name, " is at its quota of ", most, " ",
                   what, ": nothing was done; end some, or try again later"),
      v1::ERROR_REASON_OVERLOADED, /*retryable=*/true);
}

absl::Status GrpcFrontend::TakeShare(RpcCall* rpc) {
  CallerShare* const connection = FindCaller(*rpc);
  if (connection == nullptr) return absl::OkStatus();
  const std::pair<CallerShare*, const CallerQuota*> both[] = {{connection, &limits_.connection},
                                                              {connection->user, &limits_.user}};
  absl::Status refusal;
  for (const auto& [caller, quota] : both) {
    if (caller->calls >= quota->calls) {
      refusal = BeyondQuota(*caller, "open calls and streams", quota->calls);
    } else if (rpc->is_stream_ && caller->streams >= quota->streams) {
      refusal = BeyondQuota(*caller, "open streams and watches", quota->streams);
    } else if (caller->silent >= quota->silent) {
      refusal = BeyondQuota(*caller, "calls and streams that have sent nothing", quota->silent);
    }
    if (refusal.ok()) continue;
    ForgetCaller(connection);
    return refusal;
  }
  for (const auto& [caller, quota] : both) {
    ++caller->calls;
    ++caller->silent;  // until its first message
    caller->streams += rpc->is_stream_ ? 1 : 0;
  }
  rpc->caller_ = connection;
  return absl::OkStatus();
}

absl::Status GrpcFrontend::TakeBytes(RpcCall* rpc, size_t bytes) {
  if (rpc->caller_ == nullptr) return absl::OkStatus();
  const size_t share = bytes <= OpenCalls::kSmallCall ? 2 : 1;
  const std::pair<CallerShare*, size_t> both[] = {{rpc->caller_, limits_.connection.held_bytes},
                                                  {rpc->caller_->user, limits_.user.held_bytes}};
  for (const auto& [caller, most] : both) {
    if (caller->held_bytes + bytes > share * most)
      return BeyondQuota(*caller, "bytes in waiting calls", share * most);
  }
  for (const auto& [caller, most] : both) caller->held_bytes += bytes;
  rpc->held_bytes_ = bytes;
  return absl::OkStatus();
}

void GrpcFrontend::GiveShareBack(RpcCall* rpc) {
  CallerShare* const connection = std::exchange(rpc->caller_, nullptr);
  if (connection == nullptr) return;
  CallerShare* const user = connection->user;
  for (CallerShare* const caller : {connection, user}) {
    --caller->calls;
    caller->streams -= rpc->is_stream_ ? 1 : 0;
    caller->held_bytes -= rpc->held_bytes_;
  }
  ForgetCaller(connection);
}

void GrpcFrontend::ForgetCaller(CallerShare* connection) {
  CallerShare* const user = connection->user;
  if (connection->calls == 0) connections_.erase(std::string(connection->name));
  if (user->calls == 0) users_.erase(std::string(user->name));
}

void GrpcFrontend::Refuse(RpcCall* rpc, MethodMetrics* metrics, const absl::Status& status) {
  static constexpr Method none = Method::Other("", "", nullptr);
  auto call = std::make_shared<UnaryCall>(*this, rpc, none, metrics);
  rpc->handler_ = call;
  call->Done(status);
}

void GrpcFrontend::Handle(RpcCall* rpc, RpcEvent event, bool ok) {
  if (event == RpcEvent::kBegun) {
    if (ok) {
      Accept();
      Begin(rpc);
    } else {
      delete rpc;  // the server ends: this call never began
      Closed();
    }
    return;
  }
  const std::shared_ptr<Handler> handler = std::static_pointer_cast<Handler>(rpc->handler_);
  Heard(rpc);  // heard, or over
  switch (event) {
    case RpcEvent::kBegun:
      break;
    case RpcEvent::kRead:
      if (!handler->done()) handler->OnRead(ok, handler->in_);
      break;
    case RpcEvent::kWritten:
      handler->OnWritten(ok);
      break;
    case RpcEvent::kFinished:
      rpc->finished_ = true;
      break;
    case RpcEvent::kGone:
      rpc->gone_ = true;
      handler->OnGone();
      break;
  }
  {
    MutexLock lock(&handler->mu_);
    if (event != RpcEvent::kGone) --rpc->in_flight_;
    if (!rpc->gone_ || !rpc->finished_ || rpc->in_flight_ > 0) return;
  }
  GiveShareBack(rpc);
  delete rpc;
  Closed();
}

void GrpcFrontend::Closed() {
  MutexLock lock(&mu_);
  if (--open_ == 0) ended_.SignalAll();
}

}  // namespace muster::coordinator
