#include "client/jobs/job_client.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/backoff.h"
#include "base/clock.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/follow_log.h"
#include "client/jobs/job_messages.h"
#include "proto/muster/v1/job.grpc.pb.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/log_level.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"
#include "rpc/utf8_check.h"

namespace muster {
namespace {

// How long the coordinator holds a call; below its limits of 60 s and 30 s.
constexpr absl::Duration kHold = absl::Seconds(30);
constexpr absl::Duration kLogWait = absl::Seconds(10);
// The least time that a watch that has begun waits for a coordinator that is away, because it
// restarts.
constexpr absl::Duration kResume = absl::Minutes(1);

}  // namespace

struct Client::Impl {
  // Calls in progress, so that another thread can end them.
  struct InFlight {
    Notification stopped;
    Mutex mu;
    std::set<grpc::ClientContext*> contexts ABSL_GUARDED_BY(mu);

    void Stop() {
      stopped.Notify();
      MutexLock lock(&mu);
      for (grpc::ClientContext* const context : contexts) context->TryCancel();
    }
  };
  // One call in progress, for as long as it lives.
  class OneInFlight {
   public:
    OneInFlight(InFlight* all, grpc::ClientContext* context) : all_(all), context_(context) {
      MutexLock lock(&all_->mu);
      all_->contexts.insert(context_);
      if (all_->stopped.HasBeenNotified()) context_->TryCancel();
    }
    ~OneInFlight() {
      MutexLock lock(&all_->mu);
      all_->contexts.erase(context_);
    }
    OneInFlight(const OneInFlight&) = delete;
    OneInFlight& operator=(const OneInFlight&) = delete;

   private:
    InFlight* const all_;
    grpc::ClientContext* const context_;
  };

  // Waits before a call is repeated; returns false if it must not be.
  bool Pause(absl::Duration pause) {
    return !in_flight->stopped.WaitForNotificationWithTimeout(pause);
  }
  absl::Status Stopped() const { return absl::CancelledError("the call was cancelled"); }

  const std::shared_ptr<InFlight> in_flight = std::make_shared<InFlight>();
  std::shared_ptr<grpc::Channel> channel;
  absl::Duration timeout;
  absl::Duration retry_for;
  std::unique_ptr<v1::Jobs::Stub> jobs;
  std::unique_ptr<v1::Nodes::Stub> nodes;

  // Repeats the call until it is answered, or `retry_for` has passed. `method(context)` makes one
  // call.
  template <typename Method>
  absl::Status Call(Method method, absl::Duration held = absl::ZeroDuration()) {
    const absl::Time give_up = Clock::Real().Now() + retry_for;
    Backoff backoff(absl::Milliseconds(50), absl::Seconds(2));
    while (true) {
      grpc::ClientContext context;
      const OneInFlight one(in_flight.get(), &context);
      rpc::SetTimeout(context, timeout + held);
      absl::Status status = rpc::FromGrpc(method(&context));
      if (in_flight->stopped.HasBeenNotified()) return Stopped();
      if (!rpc::IsLost(status)) return status;
      const absl::Duration pause = backoff.Next(RandomShare(), rpc::RetryAfter(status));
      if (Clock::Real().Now() + pause >= give_up) return status;
      if (!Pause(pause)) return Stopped();
    }
  }

  absl::StatusOr<Job> Get(const std::string& job, uint64_t seen_revision, absl::Duration hold) {
    v1::GetJobRequest request;
    request.set_job_id(job);
    request.set_seen_revision(seen_revision);
    *request.mutable_hold() = rpc::ToProto(hold);
    v1::GetJobReply reply;
    MUSTER_RETURN_IF_ERROR(
        Call([&](auto* context) { return jobs->Get(context, request, &reply); }, hold));
    return client::FromProto(reply.job());
  }

  // Calls `batch` with each message of a watch until it returns false; after an outage of the
  // coordinator, continues from where it was.
  absl::Status Watch(v1::WatchJobsRequest request, absl::Time deadline,
                     const std::function<bool(const v1::WatchJobsBatch&)>& batch) {
    std::optional<Backoff> backoff;
    absl::Time give_up;
    bool begun = request.seen_revision() != 0;
    while (true) {
      grpc::ClientContext context;
      if (deadline != absl::InfiniteFuture()) {
        rpc::SetTimeout(context, deadline - Clock::Real().Now());
      }
      const OneInFlight one(in_flight.get(), &context);
      const auto reader = jobs->Watch(&context, request);
      v1::WatchJobsBatch message;
      while (reader->Read(&message)) {
        backoff.reset();
        begun = true;
        request.set_seen_revision(message.seen_revision());
        if (batch(message)) continue;
        context.TryCancel();
        (void)reader->Finish();
        return absl::OkStatus();
      }
      absl::Status status = rpc::FromGrpc(reader->Finish());
      if (in_flight->stopped.HasBeenNotified()) return Stopped();
      if (!rpc::IsLost(status)) return status;
      if (!backoff.has_value()) {
        backoff.emplace(absl::Milliseconds(50), absl::Seconds(2));
        give_up = Clock::Real().Now() + (begun ? std::max(retry_for, kResume) : retry_for);
      }
      const absl::Duration pause = backoff->Next(RandomShare(), rpc::RetryAfter(status));
      if (Clock::Real().Now() + pause >= give_up) return status;
      if (!Pause(pause)) return Stopped();
    }
  }

  // Does the same as Watch for one job, if the coordinator has no Watch: from `now` on.
  absl::StatusOr<Job> WatchByGet(Job now, absl::Time deadline,
                                 const std::function<bool(const Job&)>& changed) {
    while (Clock::Real().Now() < deadline) {
      MUSTER_ASSIGN_OR_RETURN(
          Job next, Get(now.id, now.revision,
                        std::clamp(deadline - Clock::Real().Now(), absl::ZeroDuration(), kHold)));
      if (next.revision == now.revision) continue;
      now = std::move(next);
      if (!changed(now) || HasEnded(now.state)) return now;
    }
    return absl::DeadlineExceededError(StillIs(now));
  }
  static std::string StillIs(const Job& job) {
    return absl::StrCat("job ", job.id, " is still ", JobStateName(job.state));
  }

  absl::StatusOr<Job> Control(const std::string& job, v1::JobAction action, const std::string& why,
                              v1::ControlJobRequest request = {}) {
    request.set_job_id(job);
    request.set_action(action);
    request.set_why(why);
    v1::ControlJobReply reply;
    MUSTER_RETURN_IF_ERROR(
        Call([&](auto* context) { return jobs->Control(context, request, &reply); }));
    return client::FromProto(reply.job());
  }

  absl::Status ControlNode(const std::string& node, v1::NodeAction action, const std::string& why,
                           v1::ControlNodeRequest request = {}) {
    request.set_node(node);
    request.set_action(action);
    request.set_why(why);
    v1::ControlNodeReply reply;
    return Call([&](auto* context) { return nodes->Control(context, request, &reply); });
  }
};

Client client::ClientOn(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout,
                        absl::Duration retry_for) {
  return StoppableOn(std::move(channel), timeout, retry_for).client;
}

client::StoppableClient client::StoppableOn(std::shared_ptr<grpc::Channel> channel,
                                            absl::Duration timeout, absl::Duration retry_for) {
  auto impl = std::make_unique<Client::Impl>();
  impl->jobs = v1::Jobs::NewStub(channel);
  impl->nodes = v1::Nodes::NewStub(channel);
  impl->channel = std::move(channel);
  impl->timeout = timeout;
  impl->retry_for = retry_for;
  std::function<void()> stop = [in_flight = impl->in_flight] { in_flight->Stop(); };
  return {Client(std::move(impl)), std::move(stop)};
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> client::ConnectChannel(
    const ClientOptions& options) {
  if (options.timeout <= absl::ZeroDuration())
    return absl::InvalidArgumentError("timeout must be positive");
  MUSTER_ASSIGN_OR_RETURN(
      auto channel,
      rpc::Connect(options.address, {.tls = {options.tls_ca, options.tls_cert, options.tls_key},
                                     .token_file = options.token_file}));
  MUSTER_RETURN_IF_ERROR(rpc::WaitUntilConnected(*channel, options.address, options.timeout));
  return channel;
}

absl::StatusOr<Client> Client::Connect(const ClientOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(auto channel, client::ConnectChannel(options));
  return client::ClientOn(std::move(channel), options.timeout, options.retry_for);
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

absl::StatusOr<Submission> Client::submit(const JobSpec& spec, const SubmitOptions& options) {
  v1::SubmitJobRequest request;
  *request.mutable_spec() = client::ToProto(spec);
  request.set_idempotency_key(!options.idempotency_key.empty() || options.dry_run
                                  ? options.idempotency_key
                                  : absl::StrCat(absl::Hex(RandomId(), absl::kZeroPad16),
                                                 absl::Hex(RandomId(), absl::kZeroPad16)));
  request.set_dry_run(options.dry_run);
  request.set_owner(options.owner);
  request.set_unix_ms(absl::ToUnixMillis(absl::Now()));
  MUSTER_RETURN_IF_ERROR(rpc::CheckUtf8(request));  // arguments and variables have any bytes
  v1::SubmitJobReply reply;
  MUSTER_RETURN_IF_ERROR(
      impl_->Call([&](auto* context) { return impl_->jobs->Submit(context, request, &reply); }));
  return Submission{.job = client::FromProto(reply.job()),
                    .plan = client::FromProto(reply.plan()),
                    .existed = reply.existed()};
}

absl::StatusOr<Job> Client::get(const std::string& job) {
  return impl_->Get(job, 0, absl::ZeroDuration());
}

absl::StatusOr<std::vector<Job>> Client::list(const ListOptions& options) {
  std::vector<Job> jobs;
  v1::ListJobsReply reply;
  do {
    v1::ListJobsRequest request;
    for (const JobState state : options.states) request.add_states(client::ToProto(state));
    request.set_owner(options.owner);
    request.set_name_prefix(options.id_prefix);
    request.set_after_sequence(jobs.empty() ? 0 : jobs.back().sequence);
    reply.Clear();
    MUSTER_RETURN_IF_ERROR(
        impl_->Call([&](auto* context) { return impl_->jobs->List(context, request, &reply); }));
    for (const v1::JobRecord& record : reply.jobs()) jobs.push_back(client::FromProto(record));
  } while (reply.more() && reply.jobs_size() > 0);
  return jobs;
}

absl::StatusOr<Job> Client::watch(const std::string& job,
                                  const std::function<bool(const Job&)>& changed,
                                  absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  MUSTER_ASSIGN_OR_RETURN(Job now, get(job));
  if (!changed(now) || HasEnded(now.state)) return now;
  v1::WatchJobsRequest request;
  request.set_job_id(job);
  request.set_seen_revision(now.revision);
  bool done = false;
  absl::Status status = absl::DeadlineExceededError("");
  if (Clock::Real().Now() < deadline) {
    status = impl_->Watch(request, deadline, [&](const v1::WatchJobsBatch& batch) {
      for (const v1::JobRecord& record : batch.jobs()) {
        now = client::FromProto(record);
        done = !changed(now) || HasEnded(now.state);
        if (done) return false;
      }
      return true;
    });
  }
  if (done) return now;
  if (absl::IsUnimplemented(status)) {
    return impl_->WatchByGet(std::move(now), deadline, changed);
  }
  if (absl::IsDeadlineExceeded(status)) return absl::DeadlineExceededError(Impl::StillIs(now));
  return status;
}

absl::Status Client::watch_all(const ListOptions& options,
                               const std::function<bool(const JobUpdate&)>& changed) {
  v1::WatchJobsRequest request;
  for (const JobState state : options.states) request.add_states(client::ToProto(state));
  request.set_owner(options.owner);
  request.set_name_prefix(options.id_prefix);
  // The jobs that the caller already knows, in case they are gone: job_id, and the revision that it
  // has.
  std::map<std::string, uint64_t> known;
  const auto gone = [&](const std::string& id) {
    return known.erase(id) == 0 || changed({.id = id});
  };
  return impl_->Watch(request, absl::InfiniteFuture(), [&](const v1::WatchJobsBatch& batch) {
    if (batch.lists_kept()) {
      const std::set<std::string> kept(batch.kept().begin(), batch.kept().end());
      std::vector<std::string> missing;
      for (const auto& [id, revision] : known) {
        if (kept.count(id) == 0) missing.push_back(id);
      }
      for (const std::string& id : missing) {
        if (!gone(id)) return false;
      }
    }
    for (const std::string& id : batch.gone()) {
      if (!gone(id)) return false;
    }
    for (const v1::JobRecord& record : batch.jobs()) {
      uint64_t& revision = known[record.job_id()];
      if (revision == record.revision()) continue;
      revision = record.revision();
      if (!changed({.id = record.job_id(), .job = client::FromProto(record)})) return false;
    }
    return true;
  });
}

absl::StatusOr<Job> Client::wait(const std::string& job, absl::Duration timeout) {
  return watch(
      job, [](const Job&) { return true; }, timeout);
}

absl::StatusOr<Job> Client::cancel(const std::string& job, const std::string& why) {
  return impl_->Control(job, v1::JOB_ACTION_CANCEL, why);
}
absl::StatusOr<Job> Client::suspend(const std::string& job, const std::string& why) {
  return impl_->Control(job, v1::JOB_ACTION_SUSPEND, why);
}
absl::StatusOr<Job> Client::resume(const std::string& job) {
  return impl_->Control(job, v1::JOB_ACTION_RESUME, "");
}
absl::StatusOr<Job> Client::retry(const std::string& job) {
  // A repeat of the call whose answer got lost must not queue the job again.
  MUSTER_ASSIGN_OR_RETURN(const Job now, get(job));
  v1::ControlJobRequest request;
  request.set_after_attempt(now.attempts);
  absl::StatusOr<Job> retried = impl_->Control(job, v1::JOB_ACTION_RETRY, "", std::move(request));
  if (now.attempts == 0 && absl::IsInvalidArgument(retried.status())) {
    // A first call whose answer got lost has begun an attempt, which has ended since.
    const absl::StatusOr<Job> later = get(job);
    if (later.ok() && later->attempts > 0) return later;
  }
  return retried;
}
absl::StatusOr<Job> Client::resize(const std::string& job, int min_processes, int max_processes,
                                   const std::string& why) {
  v1::ControlJobRequest request;
  request.set_min_processes(min_processes);
  request.set_max_processes(max_processes);
  return impl_->Control(job, v1::JOB_ACTION_RESIZE, why, std::move(request));
}
absl::Status Client::remove(const std::string& job) {
  v1::ControlJobRequest request;
  request.set_job_id(job);
  request.set_action(v1::JOB_ACTION_REMOVE);
  v1::ControlJobReply reply;
  int calls = 0;
  const absl::Status status = impl_->Call([&](auto* context) {
    ++calls;
    return impl_->jobs->Control(context, request, &reply);
  });
  // An earlier call has removed the job, and only its answer was lost.
  return absl::IsNotFound(status) && calls > 1 ? absl::OkStatus() : status;
}

absl::StatusOr<LogChunk> Client::read_log(const std::string& job, const LogOptions& options) {
  v1::ReadJobLogRequest request;
  request.set_job_id(job);
  request.set_attempt(options.attempt);
  request.set_rank(options.rank);
  request.set_offset(options.offset);
  request.set_tail_lines(options.tail_lines);
  if (options.since != absl::InfiniteDuration()) {
    *request.mutable_since_ago() = rpc::ToProto(options.since);
  }
  *request.mutable_wait() = rpc::ToProto(options.wait);
  v1::ReadJobLogReply reply;
  MUSTER_RETURN_IF_ERROR(impl_->Call(
      [&](auto* context) { return impl_->jobs->ReadLog(context, request, &reply); }, options.wait));
  return LogChunk{.data = std::move(*reply.mutable_data()),
                  .offset = reply.offset(),
                  .next_offset = reply.next_offset(),
                  .ended = reply.ended(),
                  .attempt = reply.attempt(),
                  .node = reply.node()};
}

absl::Status Client::follow_log(const std::string& job, LogOptions options,
                                const std::function<bool(const LogChunk&)>& chunk) {
  options.wait = kLogWait;
  return client::FollowLog(options,
                           {.watch = [&](const auto& changed) { return watch(job, changed); },
                            .read = [&](const LogOptions& part) { return read_log(job, part); },
                            .patience = std::max(impl_->retry_for, kResume),
                            .pause = [&](absl::Duration pause) { return impl_->Pause(pause); }},
                           chunk);
}

absl::StatusOr<std::vector<Node>> Client::nodes() {
  std::vector<Node> nodes;
  v1::ListNodesReply reply;
  do {
    v1::ListNodesRequest request;
    if (!nodes.empty()) request.set_after_node(nodes.back().name);
    reply.Clear();
    MUSTER_RETURN_IF_ERROR(
        impl_->Call([&](auto* context) { return impl_->nodes->List(context, request, &reply); }));
    for (const v1::NodeRecord& record : reply.nodes()) nodes.push_back(client::FromProto(record));
  } while (reply.more() && reply.nodes_size() > 0);
  return nodes;
}

absl::Status Client::cordon(const std::string& node, const std::string& why) {
  return impl_->ControlNode(node, v1::NODE_ACTION_CORDON, why);
}
absl::Status Client::drain(const std::string& node, const std::string& why) {
  return impl_->ControlNode(node, v1::NODE_ACTION_DRAIN, why);
}
absl::Status Client::uncordon(const std::string& node) {
  return impl_->ControlNode(node, v1::NODE_ACTION_UNCORDON, "");
}
absl::Status Client::set_log_level(const std::string& node, const std::string& level,
                                   absl::Duration span) {
  LogLevel known;
  if (!ParseLogLevel(level, &known)) {
    return absl::InvalidArgumentError(
        absl::StrCat("level ", level, ": debug, info, warning or error"));
  }
  v1::ControlNodeRequest request;
  request.set_log_level(rpc::ToProto(known));
  if (span != absl::InfiniteDuration()) *request.mutable_for_() = rpc::ToProto(span);
  return impl_->ControlNode(node, v1::NODE_ACTION_LOG_LEVEL, "", std::move(request));
}

}  // namespace muster
