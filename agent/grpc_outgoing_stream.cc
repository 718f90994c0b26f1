#include "agent/grpc_outgoing_stream.h"

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/client_callback.h>

#include <atomic>
#include <utility>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "rpc/callback_threads.h"
#include "rpc/status.h"

namespace muster::agent {

// Kept alive by gRPC until OnDone.
class GrpcStreamOpener::Link final
    : public grpc::ClientBidiReactor<v1::AgentFrame, grpc::ByteBuffer>,
      public OutgoingStream,
      public std::enable_shared_from_this<Link> {
 public:
  // `at_once`: fails if the server does not answer now.
  Link(GrpcStreamOpener* transport, const std::shared_ptr<grpc::Channel>& channel, bool at_once,
       std::shared_ptr<OutgoingStreamEvents> events)
      : transport_(transport), stub_(channel), at_once_(at_once), events_(std::move(events)) {}

  // gRPC orders its calls of a link; the lock in each shows that order to ThreadSanitizer, which
  // does not see into gRPC.
  void Start() {
    MutexLock lock(&mu_);
    self_ = shared_from_this();
    // The channel reports failures only after connecting, with its own backoff.
    context_.set_wait_for_ready(!at_once_);
    stub_.PrepareBidiStreamingCall(&context_, "/muster.v1.Session/Attach", {}, this);
    AddHold();  // for writes that begin outside of gRPC's callbacks
    StartRead(&in_);
    StartCall();
  }

  void Write(v1::AgentFrame frame) override {
    MutexLock lock(&mu_);
    if (closed_) return;
    out_ = std::move(frame);
    StartWrite(&out_);
  }
  void Close() override { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      {
        MutexLock lock(&mu_);
        closed_ = true;
      }
      RemoveHold();
      return;
    }
    v1::CoordinatorFrame frame;
    grpc::Status parsed;
    {
      MutexLock lock(&mu_);
      parsed = grpc::SerializationTraits<v1::CoordinatorFrame>::Deserialize(&in_, &frame);
    }
    if (parsed.ok()) {
      events_->OnFrame(frame);
    } else {
      unreadable_ = true;
      context_.TryCancel();  // makes the next read fail
    }
    MutexLock lock(&mu_);
    StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    { MutexLock lock(&mu_); }
    if (ok) events_->OnWritten();
  }
  void OnDone(const grpc::Status& status) override {
    { MutexLock lock(&mu_); }
    events_->OnClosed(unreadable_ ? absl::DataLossError("the coordinator sent a malformed frame")
                                  : rpc::FromGrpc(status));
    { MutexLock lock(&mu_); }  // waits for the last Write
    GrpcStreamOpener* const transport = transport_;
    // Before the transport, and perhaps the process, may end: `this` ends here.
    std::exchange(self_, nullptr).reset();
    transport->Ended();
  }

 private:
  GrpcStreamOpener* const transport_;
  // gRPC's own stub would stop reading at bytes that it cannot parse, and leave the stream open.
  grpc::TemplatedGenericStub<v1::AgentFrame, grpc::ByteBuffer> stub_;
  const bool at_once_;
  const std::shared_ptr<OutgoingStreamEvents> events_;
  std::shared_ptr<Link> self_;
  grpc::ClientContext context_;
  grpc::ByteBuffer in_;  // used by gRPC while a read is in flight
  std::atomic<bool> unreadable_{false};
  Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  v1::AgentFrame out_ ABSL_GUARDED_BY(mu_);
};

GrpcStreamOpener::GrpcStreamOpener(std::shared_ptr<grpc::Channel> channel, std::string coordinator,
                                   rpc::ChannelOptions options)
    : coordinator_(std::move(coordinator)),
      options_(std::move(options)),
      channel_(std::move(channel)) {
  rpc::KeepCallbackThreads(channel_);
}

GrpcStreamOpener::~GrpcStreamOpener() {
  MutexLock lock(&mu_);
  while (open_ > 0) changed_.Wait(&mu_);
}

absl::StatusOr<std::shared_ptr<OutgoingStream>> GrpcStreamOpener::Open(
    const std::string& hub, std::shared_ptr<OutgoingStreamEvents> events) {
  std::shared_ptr<grpc::Channel> channel;
  if (!hub.empty()) {
    MUSTER_ASSIGN_OR_RETURN(channel, rpc::Connect(hub, options_));
  }
  {
    MutexLock lock(&mu_);
    if (hub.empty()) channel = channel_;
    ++open_;
  }
  auto link = std::make_shared<Link>(this, channel, !hub.empty(), std::move(events));
  link->Start();
  return link;
}

void GrpcStreamOpener::Reconnect() {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = rpc::Connect(coordinator_, options_);
  // If the certificates cannot be read at the moment, the existing connection must do.
  if (!channel.ok()) return;
  rpc::KeepCallbackThreads(*channel);
  MutexLock lock(&mu_);
  channel_ = *std::move(channel);
}

void GrpcStreamOpener::Ended() {
  MutexLock lock(&mu_);
  --open_;
  changed_.SignalAll();
}

}  // namespace muster::agent
