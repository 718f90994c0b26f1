#ifndef MUSTER_AGENT_NODE_UPLINK_H_
#define MUSTER_AGENT_NODE_UPLINK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "agent/grpc_outgoing_stream.h"
#include "agent/hub_core.h"
#include "agent/hub_server.h"
#include "agent/relay.h"
#include "agent/relay_core.h"
#include "agent/session_client.h"
#include "agent/stack_source.h"
#include "base/defaults.h"
#include "base/mutex.h"
#include "base/timer_thread.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/channel.h"

namespace muster::agent {

// This node's connection to the coordinator: the stream, the relay for the workers, the hub for
// other agents if the node offers one, and the threads that drive them. Thread-safe.
class NodeUplink {
 public:
  struct Options {
    std::string coordinator;  // "10.0.0.1:29400"
    rpc::ChannelOptions channel = {};
    absl::Duration outage_tolerance = kDefaultOutageTolerance;
    // The address at which other agents reach this one as their hub (see HubListenOptions); empty:
    // it does not offer itself.
    std::string hub_listen = {};
    std::string relay_parent = {};  // see Relay::Options
    StackSource* stacks = nullptr;  // borrowed; null: stacks are answered without frames
    absl::Duration stack_budget = absl::Milliseconds(1500);
    // See RelayCore::Options. Null: the process ids that workers report are believed.
    std::function<int64_t(const std::string& job, const std::string& worker_id,
                          uint64_t incarnation, int64_t claimed)>
        process_of = nullptr;
    std::function<std::vector<LocalProcess>()> processes = nullptr;  // see RelayCore::Options
    std::function<void(v1::WorkerBeat*)> refresh = nullptr;          // see RelayCore::Options
    absl::Duration quarantine_timeout = absl::Seconds(1);            // of IsQuarantined
    // Called when ranks of this node wait in a barrier for which others are late. Runs on threads
    // of the session, must not block.
    std::function<void(const v1::BarrierLate&)> on_barrier_late = nullptr;
  };
  // Receives messages from the coordinator. Called on threads of the session, must not block.
  struct Listener {
    std::function<void(const v1::GenerationEnded&)> on_generation_ended = nullptr;
    // Called if the coordinator has been away for too long, or refuses this agent.
    std::function<void(const absl::Status&)> on_lost = nullptr;
  };

  // Begins to connect and serves the relay. Does not wait for the coordinator. Errors: those of
  // rpc::Connect, Relay::Start, HubListenOptions and HubServer::Start.
  static absl::StatusOr<std::unique_ptr<NodeUplink>> Start(Options options);
  // Closes the stream and drops held operations.
  ~NodeUplink();
  NodeUplink(const NodeUplink&) = delete;
  NodeUplink& operator=(const NodeUplink&) = delete;

  // The address at which other agents reach this one as their hub, with the bound port; empty: it
  // is no hub.
  std::string hub_address() const { return hub_server_ == nullptr ? "" : hub_server_->address(); }
  // The coordinator's address that workers are given.
  const std::string& relay_address() const { return relay_->address(); }
  // Takes operations of this node, as the relay does.
  OpSender& sender() { return *core_; }
  SessionClient& stream() { return *stream_; }

  // Replaces the listener. Once it returns, the old one is no longer called. Do not call it from a
  // callback.
  void SetListener(Listener listener);
  // Does the same for the directive that a worker's process must end.
  void SetOnKillWorker(std::function<void(const v1::KillWorker&)> on_kill_worker);

  // Reports that the process is gone: its lease is no longer renewed.
  void WorkerEnded(const std::string& job_id, const std::string& worker_id, uint64_t incarnation) {
    core_->WorkerEnded(job_id, worker_id, incarnation);
  }

  // Returns what keeps this node from the coordinator, by one attempt now: "Connection refused", a
  // certificate that is not trusted. Empty: nothing that shows within a second. Blocks until then.
  std::string WhyNotConnected();
  // Returns whether `host` is in quarantine for this job; nullopt: the coordinator does not say.
  // Blocks for at most Options::quarantine_timeout.
  std::optional<bool> IsQuarantined(const std::string& job, const std::string& host);
  // See SessionClient::Finish.
  void Finish(absl::Duration within);

 private:
  NodeUplink() = default;
  // Returns the options of the parts of this connection, with callbacks into this object. Those of
  // the relay take the callbacks of `options`.
  SessionClient::Options StreamOptions(const Options& options);
  RelayCore::Options RelayOptions(const SessionClient::Options& stream, Options& options);
  void MakeHub(const std::string& node, uint64_t incarnation);
  v1::Beat MakeBeat();
  void OnDirective(const v1::Directive& directive);
  void OnLost(const absl::Status& status);
  void StackLoop();

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<TimerThread> stream_timer_;
  std::unique_ptr<TimerThread> core_timer_;
  std::unique_ptr<TimerThread> hub_timer_;
  std::unique_ptr<RelayCore> core_;
  std::unique_ptr<HubCore> hub_;  // null: it offers no hub
  std::unique_ptr<GrpcStreamOpener> transport_;
  std::unique_ptr<SessionClient> stream_;
  std::unique_ptr<HubServer> hub_server_;
  std::unique_ptr<Relay> relay_;
  StackSource* stacks_ = nullptr;
  absl::Duration stack_budget_;
  absl::Duration quarantine_timeout_;
  std::function<void(const v1::BarrierLate&)> on_barrier_late_;

  Mutex listener_mu_;  // held while the listener is called
  Listener listener_ ABSL_GUARDED_BY(listener_mu_);
  std::function<void(const v1::KillWorker&)> on_kill_worker_ ABSL_GUARDED_BY(listener_mu_);

  Mutex mu_;
  CondVar changed_;
  std::deque<v1::CollectStack> wanted_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread stack_thread_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NODE_UPLINK_H_
