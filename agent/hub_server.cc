#include "agent/hub_server.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/timer_thread.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "rpc/frame_bytes.h"
#include "rpc/status.h"
#include "rpc/token.h"

namespace muster::agent {
namespace {

// The streams that have sent nothing yet, in the order in which they began.
class SilentStreams {
 public:
  using End = std::function<void()>;
  using Place = std::list<std::pair<absl::Time, End>>::iterator;

  SilentStreams(absl::Duration patience, size_t most) : patience_(patience), most_(most) {
    timer_.Start();
  }

  // Returns false if there are too many. `end` is called when the time has passed, unless Remove
  // comes first.
  bool Add(End end, Place* place) {
    {
      MutexLock lock(&mu_);
      if (streams_.size() >= most_) return false;
      *place = streams_.insert(streams_.end(), {Clock::Real().Now() + patience_, std::move(end)});
    }
    timer_.Wake();
    return true;
  }
  void Remove(Place place) {
    End gone;  // destroyed outside of the lock
    MutexLock lock(&mu_);
    gone = std::move(place->second);
    streams_.erase(place);
  }

 private:
  absl::Time Tick() {
    std::vector<End> over;
    absl::Time next = absl::InfiniteFuture();
    {
      MutexLock lock(&mu_);
      for (auto& [when, end] : streams_) {
        if (when > Clock::Real().Now()) {
          next = when;
          break;
        }
        if (end) over.push_back(std::exchange(end, nullptr));
      }
    }
    for (const End& end : over) end();
    return next;
  }

  const absl::Duration patience_;
  const size_t most_;
  Mutex mu_;
  std::list<std::pair<absl::Time, End>> streams_ ABSL_GUARDED_BY(mu_);
  TimerThread timer_{[this] { return Tick(); }};
};

}  // namespace

// Connects gRPC and the core. Either side may be first to end the stream: an agent that goes away,
// the core, the deadline. gRPC keeps a reference until OnDone, the core as long as it wants; its
// requests after the end do nothing. gRPC orders its calls of a stream; the lock in each shows that
// order to ThreadSanitizer, which does not see into gRPC.
class HubServer::Stream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                                public IncomingStream,
                                public std::enable_shared_from_this<Stream> {
 public:
  Stream(IncomingStreamEvents* hub, SilentStreams* silent, grpc::CallbackServerContext* context)
      : hub_(*hub), silent_(*silent), context_(*context) {}

  // `allowed`: the result of checking the caller's credentials.
  void Begin(const absl::Status& allowed, absl::Duration patience) {
    {
      MutexLock lock(&mu_);
      self_ = shared_from_this();
    }
    if (!allowed.ok()) {
      Close(allowed);
      return;
    }
    SilentStreams::Place place;
    const bool added = silent_.Add(
        [weak = weak_from_this(), patience] {
          const std::shared_ptr<Stream> stream = weak.lock();
          if (stream == nullptr) return;
          stream->Close(absl::DeadlineExceededError(
              absl::StrCat("no message of this stream arrived within ",
                           absl::FormatDuration(patience), " of its start: send hello with it")));
        },
        &place);
    if (!added) {
      Close(rpc::ErrorWithReason(
          absl::StatusCode::kUnavailable,
          "too many streams to this hub have sent no message: connect to the coordinator",
          v1::ERROR_REASON_OVERLOADED, /*retryable=*/true));
      return;
    }
    {
      MutexLock lock(&mu_);
      place_ = place;
    }
    Read();
  }

  void Write(rpc::FrameBytes frame) override {
    MutexLock lock(&mu_);
    if (ended_) return;
    writing_ = true;
    out_ = rpc::ToByteBuffer(frame);
    StartWrite(&out_);
  }
  void Read() override {
    MutexLock lock(&mu_);
    if (ended_) return;
    StartRead(&in_);
  }
  void Close(const absl::Status& status) override {
    MutexLock lock(&mu_);
    if (std::exchange(ended_, true)) return;
    Finish(rpc::ToGrpc(status));
    if (!writing_) return;
    // The status is sent after the write in flight, which waits for an agent that may take nothing.
    // An agent that has said goodbye takes it, or is cut off like a silent stream.
    SilentStreams::Place place;
    if (status.ok() && silent_.Add(
                           [weak = weak_from_this()] {
                             if (const std::shared_ptr<Stream> stream = weak.lock()) stream->Cut();
                           },
                           &place)) {
      place_ = place;
    } else {
      context_.TryCancel();
    }
  }

  void OnReadDone(bool ok) override {
    Heard();
    if (!ok) {
      Close(absl::OkStatus());
      return;
    }
    v1::AgentFrame frame;
    size_t bytes;
    bool parsed;
    {
      MutexLock lock(&mu_);
      if (ended_) return;
      bytes = in_.Length();
      parsed = grpc::SerializationTraits<v1::AgentFrame>::Deserialize(&in_, &frame).ok();
      in_.Clear();
      known_ = known_ || parsed;
    }
    if (parsed) {
      hub_.OnFrame(shared_from_this(), frame, bytes);
    } else {
      Close(rpc::ErrorWithReason(absl::StatusCode::kInvalidArgument,
                                 "the message is not an AgentFrame", v1::ERROR_REASON_BAD_FIELD));
    }
  }
  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(&mu_);
      writing_ = false;
    }
    if (ok) {
      hub_.OnWritten(shared_from_this());
    } else {
      Close(absl::CancelledError("the agent disconnected"));
    }
  }
  void OnCancel() override { Close(absl::CancelledError("the agent disconnected")); }
  void OnDone() override {
    Heard();
    std::shared_ptr<Stream> self;
    bool known;
    {
      MutexLock lock(&mu_);
      self = std::move(self_);
      known = known_;
      done_ = true;
    }
    if (known) hub_.OnClosed(self);
  }

 private:
  void Cut() {
    MutexLock lock(&mu_);
    if (!done_) context_.TryCancel();
  }
  void Heard() {
    std::optional<SilentStreams::Place> place;
    {
      MutexLock lock(&mu_);
      place.swap(place_);
    }
    if (place.has_value()) silent_.Remove(*place);
  }

  IncomingStreamEvents& hub_;
  SilentStreams& silent_;
  grpc::CallbackServerContext& context_;  // valid until OnDone

  Mutex mu_;
  std::shared_ptr<Stream> self_ ABSL_GUARDED_BY(mu_);
  std::optional<SilentStreams::Place> place_ ABSL_GUARDED_BY(mu_);  // while it is silent
  bool known_ ABSL_GUARDED_BY(mu_) = false;                         // to the core
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;     // context_ is gone
  grpc::ByteBuffer in_ ABSL_GUARDED_BY(mu_);   // used by gRPC while a read is in flight
  grpc::ByteBuffer out_ ABSL_GUARDED_BY(mu_);  // used by gRPC while a write is in flight
};

// Bytes, not messages: gRPC's own code would stop reading at bytes that it cannot parse, and leave
// the stream open.
class HubServer::Service final
    : public v1::Session::WithRawCallbackMethod_Attach<v1::Session::Service> {
 public:
  Service(const Options& options, IncomingStreamEvents* hub)
      : token_(options.token),
        patience_(options.first_message),
        hub_(hub),
        silent_(options.first_message, options.silent_streams) {}

 private:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Attach(
      grpc::CallbackServerContext* context) override {
    const auto stream = std::make_shared<Stream>(hub_, &silent_, context);
    stream->Begin(CheckToken(*context), patience_);
    return stream.get();
  }

  // Compares with the hub's own token, because the coordinator's may have changed by now.
  absl::Status CheckToken(const grpc::CallbackServerContext& context) const {
    const absl::Status status =
        token_.empty() ? absl::OkStatus() : rpc::CheckToken(context.client_metadata(), token_);
    if (status.ok()) return status;
    return rpc::ErrorWithReason(
        status.code(),
        "this hub does not know the token of this call, or it has none: a hub has the token with "
        "which its agent was started; start that again with the file of now, or use the "
        "coordinator itself",
        v1::ERROR_REASON_BAD_TOKEN);
  }

  const std::string token_;
  const absl::Duration patience_;
  IncomingStreamEvents* const hub_;
  SilentStreams silent_;
};

HubServer::HubServer() = default;

absl::StatusOr<std::unique_ptr<HubServer>> HubServer::Start(const Options& options,
                                                            IncomingStreamEvents* hub) {
  std::unique_ptr<HubServer> server(new HubServer());
  server->service_ = std::make_unique<Service>(options, hub);
  rpc::ServerOptions of_server = options.server;
  of_server.checks_token = !options.token.empty();
  MUSTER_ASSIGN_OR_RETURN(server->server_, rpc::Server::Start(of_server, {server->service_.get()}));
  return server;
}

HubServer::~HubServer() {
  if (server_ != nullptr) Shutdown(absl::ZeroDuration());
}

void HubServer::Shutdown(absl::Duration grace) { server_->Shutdown(grace); }

}  // namespace muster::agent
