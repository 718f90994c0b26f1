#include "agent/node_uplink.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/hub_listen.h"
#include "agent/process_state.h"
#include "base/failpoint.h"
#include "base/identity.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "proto/muster/v1/admin.grpc.pb.h"

namespace muster::agent {
namespace {

constexpr size_t kStacksWanted = 256;
constexpr absl::Duration kBeatPeriod = absl::Seconds(2);
// The facts that agents send to their hub wait for its beat.
constexpr absl::Duration kHubBeatPeriod = absl::Seconds(1);
// How long streams to the hub have to take its goodbye.
constexpr absl::Duration kHubGrace = absl::Milliseconds(200);

}  // namespace

SessionClient::Options NodeUplink::StreamOptions(const Options& options) {
  SessionClient::Options stream;
  stream.address = options.coordinator;
  stream.incarnation = RandomId();
  stream.host = HostName();
  // Several agents of one host must not take each other's sessions.
  stream.node = absl::StrCat(stream.host.substr(0, 64), "/", absl::Hex(stream.incarnation));
  stream.version = kVersion;
  stream.outage_tolerance = options.outage_tolerance;
  stream.beat_period = kBeatPeriod;
  stream.beat = [this] { return MakeBeat(); };
  stream.on_directive = [this](const v1::Directive& directive) { OnDirective(directive); };
  stream.on_connected = [this](uint64_t term, bool) { core_->Connected(term); };
  stream.on_lost = [this](const absl::Status& status) { OnLost(status); };
  if (!options.hub_listen.empty()) {
    stream.is_hub = [this] { return hub_ != nullptr && hub_->agents() > 0; };
    stream.on_upstream = [this] { hub_->OnUpstream(); };
    stream.on_unsent_beat = [this](const v1::Beat& beat) { hub_->TakeBack(beat); };
  }
  stream.wake = [this] { stream_timer_->Wake(); };
  return stream;
}

RelayCore::Options NodeUplink::RelayOptions(const SessionClient::Options& stream,
                                            Options& options) {
  RelayCore::Options core;
  core.node = stream.node;
  core.incarnation = stream.incarnation;
  core.process_of = std::move(options.process_of);
  core.processes = std::move(options.processes);
  core.host = stream.host;
  core.process_state = [](int64_t pid) { return ReadProcessState(pid).name; };
  core.refresh = std::move(options.refresh);
  core.connected = [this] { return stream_->connected(); };
  core.wake = [this] { core_timer_->Wake(); };
  return core;
}

void NodeUplink::MakeHub(const std::string& node, uint64_t incarnation) {
  HubCore::Options hub;
  hub.node = node;
  hub.incarnation = incarnation;
  hub.wake = [this] { hub_timer_->Wake(); };
  // Not stream_, which is null already while the destructor of the stream waits for its last
  // callback.
  SessionClient* const to_coordinator = stream_.get();
  hub.upstream = [to_coordinator] { return to_coordinator->upstream(); };
  hub.send_stack = [to_coordinator](v1::StackReply reply) {
    to_coordinator->SendStack(std::move(reply));
  };
  hub_ = std::make_unique<HubCore>(std::move(hub), stream_.get());
  hub_timer_ = std::make_unique<TimerThread>([this] { return hub_->Tick(); });
}

absl::StatusOr<std::unique_ptr<NodeUplink>> NodeUplink::Start(Options options) {
  std::unique_ptr<NodeUplink> session(new NodeUplink());
  NodeUplink* const raw = session.get();
  // A dead connection is found sooner than for a worker's call; the agent reconnects within a
  // lease; and large answers of the coordinator are not refused here.
  options.channel.own_connection = true;
  options.channel.keepalive = absl::Seconds(10);
  options.channel.max_backoff = absl::Seconds(2);
  options.channel.max_message_bytes = 64 << 20;
  // While a hub speaks for this node, the coordinator has no connection from it.
  options.channel.idle_timeout = absl::Seconds(5);
  MUSTER_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          rpc::Connect(options.coordinator, options.channel));
  HubServer::Options hub_server;
  if (!options.hub_listen.empty()) {
    MUSTER_ASSIGN_OR_RETURN(
        hub_server, HubListenOptions(options.hub_listen, options.coordinator, options.channel));
  }
  raw->channel_ = channel;
  raw->stacks_ = options.stacks;
  raw->stack_budget_ = options.stack_budget;
  raw->quarantine_timeout_ = options.quarantine_timeout;
  raw->on_barrier_late_ = std::move(options.on_barrier_late);
  raw->transport_ =
      std::make_unique<GrpcStreamOpener>(channel, options.coordinator, options.channel);

  SessionClient::Options stream = raw->StreamOptions(options);
  RelayCore::Options core = raw->RelayOptions(stream, options);
  const std::string node = stream.node;
  const uint64_t incarnation = stream.incarnation;
  raw->stream_ = std::make_unique<SessionClient>(std::move(stream), raw->transport_.get());
  OpSender* upstream = raw->stream_.get();
  if (!options.hub_listen.empty()) {
    raw->MakeHub(node, incarnation);
    upstream = raw->hub_.get();
  }
  raw->core_ = std::make_unique<RelayCore>(std::move(core), upstream);
  raw->core_timer_ = std::make_unique<TimerThread>([raw] { return raw->core_->Tick(); });
  raw->stream_timer_ = std::make_unique<TimerThread>([raw] { return raw->stream_->Tick(); });
  MUSTER_ASSIGN_OR_RETURN(
      raw->relay_,
      Relay::Start({.parent = options.relay_parent, .coordinator = channel}, raw->core_.get()));
  if (raw->hub_ != nullptr) {
    MUSTER_ASSIGN_OR_RETURN(raw->hub_server_, HubServer::Start(hub_server, raw->hub_.get()));
    raw->stream_->OfferHub(raw->hub_server_->address());
    raw->hub_timer_->Start();
  }
  raw->stack_thread_ = std::thread([raw] { raw->StackLoop(); });
  raw->core_timer_->Start();
  raw->stream_timer_->Start();
  return session;
}

NodeUplink::~NodeUplink() {
  relay_.reset();
  hub_server_.reset();
  // The thread sends on the stream.
  if (stack_thread_.joinable()) {
    {
      MutexLock lock(&mu_);
      stop_ = true;
      changed_.SignalAll();
    }
    stack_thread_.join();
  }
  if (hub_timer_ != nullptr) hub_timer_->Stop();
  if (core_timer_ != nullptr) core_timer_->Stop();
  if (stream_timer_ != nullptr) stream_timer_->Stop();
  stream_.reset();
}

void NodeUplink::SetListener(Listener listener) {
  MutexLock lock(&listener_mu_);
  listener_ = std::move(listener);
  const absl::Status lost = stream_->lost();
  if (!lost.ok() && listener_.on_lost) listener_.on_lost(lost);
}

void NodeUplink::SetOnKillWorker(std::function<void(const v1::KillWorker&)> on_kill_worker) {
  MutexLock lock(&listener_mu_);
  on_kill_worker_ = std::move(on_kill_worker);
}

void NodeUplink::OnLost(const absl::Status& status) {
  MutexLock lock(&listener_mu_);
  if (listener_.on_lost) listener_.on_lost(status);
}

v1::Beat NodeUplink::MakeBeat() {
  v1::Beat beat = core_->MakeBeat();
  if (hub_ != nullptr) {
    hub_->AddToBeat(&beat);
    stream_->SetBeatPeriod(hub_->agents() > 0 ? kHubBeatPeriod : kBeatPeriod);
  }
  return beat;
}

// The stream waits for a connection and does not learn why it fails.
std::string NodeUplink::WhyNotConnected() { return rpc::WhyNotConnected(channel_); }

std::optional<bool> NodeUplink::IsQuarantined(const std::string& job, const std::string& host) {
  grpc::ClientContext context;
  rpc::SetTimeout(context, quarantine_timeout_);
  v1::StatusReply reply;
  if (!v1::Admin::NewStub(channel_)->Status(&context, {}, &reply).ok()) return std::nullopt;
  for (const v1::JobStatus& one : reply.jobs()) {
    if (one.job_id() != job) continue;
    return std::any_of(one.quarantined().begin(), one.quarantined().end(),
                       [&](const v1::QuarantinedHost& other) { return other.host() == host; });
  }
  return std::nullopt;
}

void NodeUplink::OnDirective(const v1::Directive& directive) {
  MUSTER_FAILPOINT("agent.directive");
  if (hub_ != nullptr) hub_->OnDirective(directive);
  switch (directive.kind_case()) {
    case v1::Directive::kGenerationEnded: {
      core_->GenerationEnded(directive.generation_ended());
      MutexLock lock(&listener_mu_);
      if (listener_.on_generation_ended) {
        listener_.on_generation_ended(directive.generation_ended());
      }
      break;
    }
    case v1::Directive::kKillWorker: {
      MutexLock lock(&listener_mu_);
      if (on_kill_worker_) on_kill_worker_(directive.kill_worker());
      break;
    }
    case v1::Directive::kCollectStack: {
      MutexLock lock(&mu_);
      if (wanted_.size() < kStacksWanted) wanted_.push_back(directive.collect_stack());
      changed_.SignalAll();
      break;
    }
    case v1::Directive::kBarrierLate:
      if (on_barrier_late_) on_barrier_late_(directive.barrier_late());
      break;
    case v1::Directive::kUseHub:  // handled by the stream
    case v1::Directive::KIND_NOT_SET:
      break;
  }
}

void NodeUplink::StackLoop() {
  while (true) {
    v1::CollectStack wanted;
    {
      MutexLock lock(&mu_);
      while (!stop_ && wanted_.empty()) changed_.Wait(&mu_);
      if (stop_) return;
      wanted = std::move(wanted_.front());
      wanted_.pop_front();
    }
    // No caller may make the agent inspect processes other than its workers.
    const std::optional<int64_t> pid =
        core_->ProcessOf(wanted.job_id(), wanted.worker_id(), wanted.pid());
    if (!pid.has_value()) continue;
    v1::StackReply reply;
    reply.set_query_id(wanted.query_id());
    reply.set_worker_id(wanted.worker_id());
    reply.set_pid(wanted.pid());
    if (*pid == 0) {
      reply.set_process_state("unknown");
    } else if (stacks_ != nullptr) {
      StackSnapshot snapshot = stacks_->Capture(*pid, stack_budget_);
      reply.set_process_state(std::move(snapshot.process_state));
      reply.set_native_stack(std::move(snapshot.native_stack));
    } else {
      reply.set_process_state(ReadProcessState(*pid).name);
    }
    stream_->SendStack(std::move(reply));
  }
}

void NodeUplink::Finish(absl::Duration within) {
  const absl::Time deadline = Clock::Real().Now() + within;
  if (hub_ != nullptr) {
    hub_->Finish();
    hub_server_->Shutdown(std::min(kHubGrace, within));
  }
  stream_->Finish(deadline);
}

}  // namespace muster::agent
