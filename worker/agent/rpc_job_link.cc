#include "worker/agent/rpc_job_link.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "rpc/callback_threads.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

using nlohmann::json;

constexpr absl::Duration kShortCall = absl::Seconds(5);

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration out;
  out.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  out.set_nanos(static_cast<int32_t>(duration / absl::Nanoseconds(1)));
  return out;
}

uint64_t RandomNumber() {
  uint64_t number = 0;
  while (number == 0) {
    MUSTER_CHECK(getrandom(&number, sizeof(number), 0) == sizeof(number));
  }
  return number;
}

std::string ToJson(const AttemptEnd& end) {
  return json{{"why", end.why}, {"last_lines", end.last_lines}}.dump(
      -1, ' ', false, json::error_handler_t::replace);
}

AttemptEnd EndFromJson(const std::string& text) {
  const json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  AttemptEnd end;
  if (!value.is_object()) return {text, {}};
  end.why = value.value("why", "");
  if (const auto lines = value.find("last_lines"); lines != value.end() && lines->is_array()) {
    for (const json& line : *lines) {
      if (line.is_string()) end.last_lines.push_back(line.get<std::string>());
    }
  }
  return end;
}

class RpcJobLink final : public JobLink {
 public:
  RpcJobLink(const RpcJobLinkOptions& options, const std::shared_ptr<grpc::Channel>& channel)
      : options_(options),
        agents_job_(options.job + ".agents"),
        incarnation_(RandomNumber()),
        channel_(channel),
        rendezvous_(v1::Rendezvous::NewStub(channel)),
        barrier_(v1::Barrier::NewStub(channel)),
        kv_(v1::KeyValueStore::NewStub(channel)),
        membership_(v1::Membership::NewStub(channel)) {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    hostname_ = name;
    // Two launches with the same machine rank are the same worker: the coordinator tells the first
    // one.
    worker_id_ = options.node_rank >= 0 ? absl::StrCat("node", options.node_rank)
                                        : absl::StrCat("node-", hostname_, "-", incarnation_);
  }

  ~RpcJobLink() override {
    StopWatching();
    if (generation_ != 0) {
      v1::LeaveRequest request;
      *request.mutable_fence() = AgentFence();
      request.set_reason("the agent ends");
      v1::LeaveReply reply;
      grpc::ClientContext context;
      rpc::SetTimeout(context, absl::Seconds(1));
      static_cast<void>(rendezvous_->Leave(&context, request, &reply));
    }
    MutexLock lock(&mu_);
    while (reports_in_flight_ > 0) changed_.Wait(&mu_);
  }

  absl::StatusOr<Meeting> Meet(int attempt) override {
    StopWatching();
    Meeting meeting;
    if (options_.num_nodes == 1) {
      if (cancelled()) return absl::CancelledError("stopped");
      MUSTER_ASSIGN_OR_RETURN(meeting.master_port, FindFreePort());
      return meeting;
    }
    if (attempt > 0) EndGeneration("another attempt begins");
    MUSTER_RETURN_IF_ERROR(Join());
    meeting.node_rank = node_rank_;
    meeting.num_nodes = options_.num_nodes;
    absl::Status agreed = Agree(&meeting);
    if (!agreed.ok()) {
      EndGeneration(absl::StrCat("machine ", node_rank_, " gave up: ", agreed.message()));
      return agreed;
    }
    return meeting;
  }

  void Watch(std::function<void(AttemptEnd)> on_ended) override {
    if (options_.num_nodes == 1) return;
    stop_watching_ = std::make_unique<Notification>();
    watcher_ = std::thread([this, on_ended = std::move(on_ended)] { WatchLoop(on_ended); });
  }

  void ReportEnd(const WorkerEnd& end) override {
    struct Call {
      grpc::ClientContext context;
      v1::ReportExitRequest request;
      v1::ReportExitReply reply;
    };
    auto call = std::make_shared<Call>();
    v1::Fence* const fence = call->request.mutable_fence();
    fence->set_job_id(options_.job);
    fence->set_worker_id(end.worker_id);
    fence->set_incarnation(end.incarnation);
    call->request.set_worker_id(end.worker_id);
    call->request.set_incarnation(end.incarnation);
    v1::ExitCause* const cause = call->request.mutable_cause();
    cause->set_exit_code(end.exit.exit_code);
    cause->set_signal(end.exit.signal);
    cause->set_message(end.ToString());
    for (const std::string& line : end.last_lines) cause->add_last_log_lines(line);
    rpc::SetTimeout(call->context, absl::Seconds(2));
    {
      MutexLock lock(&mu_);
      ++reports_in_flight_;
    }
    rpc::KeepCallbackThreads(channel_);
    // Kept alive by the callback. A program that never joined is unknown to the coordinator: no
    // matter.
    membership_->async()->ReportExit(
        &call->context, &call->request, &call->reply, [this, call](const grpc::Status& status) {
          if (!status.ok()) {
            MUSTER_LOG(Debug) << "ReportExit: " << status.error_message();
          }
          MutexLock lock(&mu_);
          --reports_in_flight_;
          changed_.SignalAll();
        });
  }

  AttemptEnd Fail(const AttemptEnd& end) override {
    if (options_.num_nodes == 1) return end;
    v1::TxnRequest request;
    *request.mutable_fence() = AgentFence();
    v1::Compare* const absent = request.add_compares();
    absent->set_key(EndKey());
    absent->set_target(v1::Compare::EXISTS);
    absent->set_number(0);
    v1::PutOp* const put = request.add_then()->mutable_put();
    put->set_key(EndKey());
    put->set_value(ToJson(end));
    request.add_otherwise()->mutable_get()->set_key(EndKey());
    v1::TxnReply reply;
    grpc::ClientContext context;
    rpc::SetTimeout(context, kShortCall);
    const grpc::Status status = kv_->Txn(&context, request, &reply);
    if (!status.ok()) {
      MUSTER_LOG(Debug) << "cannot tell the other machines: " << status.error_message();
      return end;
    }
    if (!reply.succeeded() && reply.results_size() == 1 && reply.results(0).kvs_size() == 1) {
      return EndFromJson(reply.results(0).kvs(0).value());
    }
    return end;
  }

  absl::Status Finish() override {
    if (options_.num_nodes == 1) return absl::OkStatus();
    v1::ArriveRequest request;
    *request.mutable_fence() = AgentFence();
    request.set_barrier_id("finish");
    request.set_counter(0);
    request.set_rank(node_rank_);
    // The slowest machine may take as long as it likes.
    *request.mutable_timeout() = ToProto(absl::Seconds(-1));
    const absl::Time give_up = Clock::Real().Now() + options_.outage_tolerance;
    for (;;) {
      v1::ArriveReply reply;
      const absl::Status status = Call([&](grpc::ClientContext* context) {
        rpc::SetTimeout(*context, absl::Hours(24));
        return barrier_->Arrive(context, request, &reply);
      });
      if (!absl::IsUnavailable(status) || Clock::Real().Now() > give_up) return status;
      if (AwaitCoordinator(cancel_)) return absl::CancelledError("stopped");
    }
  }

  void Cancel() override {
    // Before the lock: a call that begins now sees it, one that has begun is in the set.
    cancel_.Notify();
    MutexLock lock(&mu_);
    for (grpc::ClientContext* context : blocking_) context->TryCancel();
  }

 private:
  bool cancelled() const { return cancel_.HasBeenNotified(); }

  v1::Fence AgentFence() {
    v1::Fence fence;
    fence.set_job_id(agents_job_);
    fence.set_worker_id(worker_id_);
    fence.set_incarnation(incarnation_);
    fence.set_generation(generation_);
    fence.set_request_id(++last_request_);
    return fence;
  }
  std::string EndKey() const { return prefix_ + "end"; }
  std::string SettingsKey() const { return prefix_ + "settings"; }

  // After a call failed with UNAVAILABLE: gives the channel time to connect again. Returns whether
  // `stop` came. A channel without a call in progress is looked after only every few seconds, so
  // somebody must wait on it.
  bool AwaitCoordinator(const Notification& stop) {
    if (stop.WaitForNotificationWithTimeout(absl::Milliseconds(50))) return true;
    static_cast<void>(
        rpc::WaitUntilConnected(*channel_, options_.coordinator, absl::Milliseconds(200)));
    return stop.HasBeenNotified();
  }

  // A call that Cancel() interrupts.
  template <typename F>
  absl::Status Call(F call) {
    grpc::ClientContext context;
    {
      MutexLock lock(&mu_);
      blocking_.insert(&context);
      if (cancel_.HasBeenNotified()) context.TryCancel();
    }
    const grpc::Status status = call(&context);
    {
      MutexLock lock(&mu_);
      blocking_.erase(&context);
    }
    if (cancelled()) return absl::CancelledError("stopped");
    return rpc::FromGrpc(status);
  }

  absl::Status Join() {
    v1::JoinRequest request;
    v1::RendezvousSpec* const spec = request.mutable_spec();
    spec->set_min_workers(options_.num_nodes);
    spec->set_max_workers(options_.num_nodes);
    *spec->mutable_join_timeout() = ToProto(options_.join_timeout);
    spec->set_end_generation_on_failure(true);
    *spec->mutable_lease() = ToProto(options_.lease);
    request.mutable_topology()->set_host(hostname_);
    request.mutable_topology()->set_local_world_size(1);
    request.set_endpoint(options_.host);
    request.set_pid(getpid());
    request.set_preferred_rank(node_rank_ >= 0 ? node_rank_ : options_.node_rank);
    *request.mutable_fence() = AgentFence();
    request.mutable_fence()->set_generation(0);
    // Machine 0 may come up last: until then nobody answers.
    const absl::Time give_up = Clock::Real().Now() + options_.join_timeout;
    for (;;) {
      const absl::Duration left = give_up - Clock::Real().Now();
      if (left <= absl::ZeroDuration()) {
        return absl::UnavailableError(
            absl::StrCat("no coordinator answers at ", options_.coordinator, " after ",
                         absl::FormatDuration(options_.join_timeout),
                         ": is machine 0 launched, and is the address right?"));
      }
      v1::JoinReply reply;
      const absl::Status status = Call([&](grpc::ClientContext* context) {
        rpc::SetTimeout(*context, left + kShortCall);
        return rendezvous_->Join(context, request, &reply);
      });
      if (status.ok()) {
        node_rank_ = reply.rank();
        generation_ = reply.generation();
        prefix_ = reply.generation_prefix();
        return absl::OkStatus();
      }
      if (absl::IsUnavailable(status)) {
        if (AwaitCoordinator(cancel_)) return absl::CancelledError("stopped");
        continue;
      }
      if (rpc::GetReason(status) == v1::ERROR_REASON_SUPERSEDED) {
        return absl::InvalidArgumentError(
            absl::StrCat("another launch with machine_rank ", options_.node_rank,
                         " took this one's place in job ", options_.job));
      }
      if (absl::IsInvalidArgument(status)) {
        return absl::InvalidArgumentError(
            absl::StrCat("the machines of job ", options_.job,
                         " were launched differently: ", status.message()));
      }
      if (absl::IsDeadlineExceeded(status)) {
        return absl::DeadlineExceededError(
            absl::StrCat("not all ", options_.num_nodes, " machines came within ",
                         absl::FormatDuration(options_.join_timeout), ": ", status.message()));
      }
      return status;
    }
  }

  // Machine 0 writes what must be the same everywhere, the others compare.
  absl::Status Agree(Meeting* meeting) {
    if (node_rank_ == 0) {
      MUSTER_ASSIGN_OR_RETURN(meeting->master_port, FindFreePort());
      meeting->master_addr = options_.host;
      v1::TxnRequest request;
      *request.mutable_fence() = AgentFence();
      v1::PutOp* const put = request.add_then()->mutable_put();
      put->set_key(SettingsKey());
      put->set_value(json{{"settings", options_.settings},
                          {"master_addr", meeting->master_addr},
                          {"master_port", meeting->master_port}}
                         .dump());
      v1::TxnReply reply;
      return Call([&](grpc::ClientContext* context) {
        rpc::SetTimeout(*context, kShortCall);
        return kv_->Txn(context, request, &reply);
      });
    }
    v1::WaitRequest request;
    *request.mutable_fence() = AgentFence();
    request.add_keys(SettingsKey());
    *request.mutable_timeout() = ToProto(absl::Seconds(30));
    v1::WaitReply reply;
    MUSTER_RETURN_IF_ERROR(Call([&](grpc::ClientContext* context) {
      rpc::SetTimeout(*context, absl::Seconds(30) + kShortCall);
      return kv_->Wait(context, request, &reply);
    }));
    const json value = reply.kvs_size() == 1
                           ? json::parse(reply.kvs(0).value(), nullptr, /*allow_exceptions=*/false)
                           : json();
    if (!value.is_object())
      return absl::InternalError("machine 0 wrote settings that cannot be read");
    const std::string theirs = value.value("settings", "");
    if (theirs != options_.settings) {
      return absl::InvalidArgumentError(absl::StrCat(
          "machine ", node_rank_, " was launched with ", options_.settings, ", but machine 0 with ",
          theirs, ": launch all machines with the same settings"));
    }
    meeting->master_addr = value.value("master_addr", "");
    meeting->master_port = value.value("master_port", 0);
    return absl::OkStatus();
  }

  void EndGeneration(absl::string_view reason) {
    v1::EndGenerationRequest request;
    *request.mutable_fence() = AgentFence();
    request.set_reason(std::string(reason));
    v1::EndGenerationReply reply;
    grpc::ClientContext context;
    rpc::SetTimeout(context, kShortCall);
    // Another machine may have done it already.
    static_cast<void>(rendezvous_->EndGeneration(&context, request, &reply));
  }

  void StopWatching() {
    if (!watcher_.joinable()) return;
    stop_watching_->Notify();
    {
      MutexLock lock(&mu_);
      if (watch_call_ != nullptr) watch_call_->TryCancel();
    }
    watcher_.join();
  }

  // Keeps the lease and waits for the end, in turns.
  void WatchLoop(const std::function<void(AttemptEnd)>& on_ended) {
    const absl::Duration turn = options_.lease / 3;
    absl::Time away_since = absl::InfiniteFuture();
    while (!stop_watching_->HasBeenNotified()) {
      v1::HeartbeatRequest beat;
      *beat.mutable_fence() = AgentFence();
      v1::HeartbeatReply beat_reply;
      absl::Status status = WatchCall(kShortCall, [&](grpc::ClientContext* context) {
        return membership_->Heartbeat(context, beat, &beat_reply);
      });
      if (status.ok() && beat_reply.generation_ended()) {
        return Ended(on_ended, {beat_reply.why(), {}});
      }
      if (status.ok()) {
        v1::WaitRequest wait;
        *wait.mutable_fence() = AgentFence();
        wait.add_keys(EndKey());
        *wait.mutable_timeout() = ToProto(turn);
        v1::WaitReply wait_reply;
        status = WatchCall(turn + kShortCall, [&](grpc::ClientContext* context) {
          return kv_->Wait(context, wait, &wait_reply);
        });
        if (status.ok() && wait_reply.kvs_size() == 1) {
          return Ended(on_ended, EndFromJson(wait_reply.kvs(0).value()));
        }
      }
      if (stop_watching_->HasBeenNotified()) return;
      if (status.ok() || rpc::GetReason(status) == v1::ERROR_REASON_WAIT_TIMEOUT) {
        away_since = absl::InfiniteFuture();
        continue;
      }
      if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) {
        return Ended(on_ended, {std::string(status.message()), {}});
      }
      away_since = std::min(away_since, Clock::Real().Now());
      if (Clock::Real().Now() - away_since > options_.outage_tolerance) {
        return Ended(on_ended, {absl::StrCat("the coordinator at ", options_.coordinator,
                                             " has been away for more than ",
                                             absl::FormatDuration(options_.outage_tolerance),
                                             " (machine 0 may be down)"),
                                {}});
      }
      AwaitCoordinator(*stop_watching_);
    }
  }

  void Ended(const std::function<void(AttemptEnd)>& on_ended, AttemptEnd end) {
    on_ended(std::move(end));
    // Finish() may be waiting for machines that will not come.
    MutexLock lock(&mu_);
    for (grpc::ClientContext* context : blocking_) context->TryCancel();
  }

  template <typename F>
  absl::Status WatchCall(absl::Duration timeout, F call) {
    grpc::ClientContext context;
    rpc::SetTimeout(context, timeout);
    {
      MutexLock lock(&mu_);
      watch_call_ = &context;
      if (stop_watching_->HasBeenNotified()) context.TryCancel();
    }
    const grpc::Status status = call(&context);
    MutexLock lock(&mu_);
    watch_call_ = nullptr;
    return rpc::FromGrpc(status);
  }

  // Constant after construction.
  const RpcJobLinkOptions options_;
  const std::string agents_job_;
  const uint64_t incarnation_;
  std::string hostname_;
  std::string worker_id_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Rendezvous::Stub> rendezvous_;
  const std::unique_ptr<v1::Barrier::Stub> barrier_;
  const std::unique_ptr<v1::KeyValueStore::Stub> kv_;
  const std::unique_ptr<v1::Membership::Stub> membership_;

  // Written by Join, while no watcher runs.
  int node_rank_ = -1;
  uint64_t generation_ = 0;
  std::string prefix_;

  std::atomic<uint64_t> last_request_{0};
  Notification cancel_;
  Mutex mu_;
  CondVar changed_;
  int reports_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<grpc::ClientContext*> blocking_ ABSL_GUARDED_BY(mu_);
  grpc::ClientContext* watch_call_ ABSL_GUARDED_BY(mu_) = nullptr;

  std::unique_ptr<Notification> stop_watching_;
  std::thread watcher_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<JobLink>> MakeRpcJobLink(const RpcJobLinkOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          rpc::Connect(options.coordinator, options.channel));
  return std::unique_ptr<JobLink>(std::make_unique<RpcJobLink>(options, channel));
}

}  // namespace muster::agent
