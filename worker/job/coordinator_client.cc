#include "worker/job/coordinator_client.h"

#include <grpcpp/client_context.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/backoff.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"
#include "rpc/utf8_check.h"
#include "worker/collective/address.h"

namespace muster {
namespace {

// The server's own verdict, with names in it, should arrive before the transport gives up.
constexpr absl::Duration kGrace = absl::Seconds(5);
constexpr size_t kMostPathBytes = 4000;
constexpr int kCompareTries = 1000;
constexpr int kTableChanges = 100;
constexpr absl::Duration kFirstBackoff = absl::Milliseconds(50);
constexpr absl::Duration kLastBackoff = absl::Seconds(2);

// Converts a duration; more than a year becomes a year.
void SetDuration(absl::Duration duration, google::protobuf::Duration* out) {
  *out = rpc::ToProto(std::min(duration, absl::Hours(24 * 365)));
}

// The last number of all clients of this process: one that joins again is the same worker to the
// coordinator, which expects growing request numbers from a worker.
std::atomic<uint64_t>& LastRequestId() {
  static std::atomic<uint64_t> last{0};
  return last;
}

// FNV-1a: the same on every rank and in every run, unlike std::hash.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

absl::Status Prefixed(const std::string& what, const absl::Status& status) {
  absl::Status result(status.code(), absl::StrCat(what, ": ", status.message()));
  if (const auto detail = rpc::GetDetail(status)) result = rpc::WithDetail(result, *detail);
  return result;
}

}  // namespace

class CoordinatorClient::Impl {
 public:
  Impl(Options options, std::shared_ptr<grpc::Channel> channel)
      : options_(std::move(options)),
        rendezvous_(v1::Rendezvous::NewStub(channel)),
        kv_(v1::KeyValueStore::NewStub(channel)),
        barrier_(v1::Barrier::NewStub(channel)),
        triggers_(v1::Triggers::NewStub(channel)),
        membership_(v1::Membership::NewStub(channel)),
        checkpoints_(v1::Checkpoints::NewStub(channel)) {}

  ~Impl() {
    stop_.Notify();
    EndWithin(absl::ZeroDuration());
    if (pulse_.joinable()) pulse_.join();
  }

  uint64_t incarnation() const { return options_.incarnation; }
  const std::string& job() const { return options_.job; }

  std::optional<Seat> seat() const {
    MutexLock lock(&mu_);
    return seat_;
  }

  absl::StatusOr<Seat> Join(const JoinOptions& join) {
    v1::JoinRequest request;
    FillFence(request.mutable_fence());
    request.mutable_fence()->set_generation(0);
    v1::RendezvousSpec& spec = *request.mutable_spec();
    spec.set_min_workers(join.min_workers);
    spec.set_max_workers(join.max_workers);
    SetDuration(join.timeout, spec.mutable_join_timeout());
    SetDuration(join.last_call, spec.mutable_last_call());
    spec.set_divisible_by(join.divisible_by);
    spec.set_end_generation_on_failure(join.end_generation_on_failure);
    SetDuration(join.lease, spec.mutable_lease());
    SetDuration(options_.outage_tolerance, spec.mutable_outage_tolerance());
    v1::Topology& topology = *request.mutable_topology();
    topology.set_host(join.host.empty() ? HostName() : join.host);
    topology.set_rack(join.rack);
    topology.set_nvlink_domain(join.nvlink_domain);
    topology.set_local_rank(join.local_rank);
    topology.set_local_world_size(join.local_world_size);
    request.set_endpoint(join.endpoint);
    request.set_pid(getpid());
    request.set_preferred_rank(join.preferred_rank);
    request.set_spare(join.spare);
    v1::JoinReply reply;
    MUSTER_FAILPOINT_STATUS("worker.join");
    MUSTER_RETURN_IF_ERROR(Call("rendezvous", join.timeout, *rendezvous_,
                                &v1::Rendezvous::Stub::Join, &request, &reply));
    MUSTER_FAILPOINT_STATUS("worker.joined");
    Seat seat;
    seat.generation = reply.generation();
    seat.rank = reply.rank();
    seat.world_size = reply.world_size();
    seat.local_rank = join.local_rank;
    seat.local_world_size = join.local_world_size;
    seat.node_rank = reply.node_rank();
    seat.num_nodes = reply.num_nodes();
    seat.key_prefix = reply.generation_prefix();
    MutexLock lock(&mu_);
    seat_ = seat;
    end_reported_ = false;
    counters_.clear();
    agreements_ = 0;
    if (!pulse_.joinable() && options_.heartbeat_period > absl::ZeroDuration()) {
      pulse_ = std::thread([this] { Pulse(); });
    }
    return seat;
  }

  absl::Status Leave(const std::string& reason) {
    v1::LeaveRequest request;
    FillFence(request.mutable_fence());
    request.set_reason(OneLine(reason));
    v1::LeaveReply reply;
    MUSTER_FAILPOINT("worker.leave");
    const absl::Time begun = Clock::Real().Now();
    bool beats;
    {
      // The beats of a worker that has left would only be refused.
      MutexLock lock(&mu_);
      end_reported_ = true;
      beats = seat_.has_value() && options_.heartbeat_period > absl::ZeroDuration();
    }
    // Report what the job has reached since the last beat, which its status shows from now on.
    if (beats) {
      // Do not fail, because the goodbye matters more.
      if (const auto beat = Beat(kGrace / 4); !beat.ok()) {
        MUSTER_LOG(Debug) << "the last beat: " << beat.status().message();
      }
    }
    // A coordinator that is away learns of it from the exit.
    return CallWithin("leave", begun + kGrace - Clock::Real().Now(), *rendezvous_,
                      &v1::Rendezvous::Stub::Leave, &request, &reply, AtExit::kCutShort);
  }

  void BeginExit() { EndWithin(options_.exit_patience); }

  absl::StatusOr<std::vector<PeerInfo>> Peers() {
    std::vector<PeerInfo> peers;
    uint64_t digest = 0;
    v1::GetRankTableRequest request;
    request.set_job_id(options_.job);
    int world_size;
    int changes = 0;
    {
      MutexLock lock(&mu_);
      if (!seat_) return absl::FailedPreconditionError("peers: join the rendezvous first");
      request.set_generation(seat_->generation);
      request.set_if_digest_differs(table_digest_);
      world_size = seat_->world_size;
    }
    for (int next = 0; next >= 0;) {
      request.set_first_rank(next);
      v1::GetRankTableReply reply;
      MUSTER_RETURN_IF_ERROR(Call("rank table", options_.call_timeout, *rendezvous_,
                                  &v1::Rendezvous::Stub::GetRankTable, &request, &reply));
      const bool same = reply.rows_size() == 0 && request.if_digest_differs() != 0 &&
                        reply.table_digest() == request.if_digest_differs();
      if (same) {
        MutexLock lock(&mu_);
        if (table_digest_ == reply.table_digest()) return peers_;
      }
      // Another thread has fetched a later table meanwhile, or a rank was taken over between two
      // pages.
      if (same || (next > 0 && reply.table_digest() != digest)) {
        if (++changes > kTableChanges) {
          return absl::UnavailableError(absl::StrCat("rank table: it has changed ", changes,
                                                     " times while it was read: try again later"));
        }
        peers.clear();
        request.set_if_digest_differs(0);
        digest = 0;
        next = 0;
        continue;
      }
      digest = reply.table_digest();
      for (const v1::RankRow& row : reply.rows()) {
        PeerInfo peer;
        peer.rank = row.rank();
        peer.worker_id = row.worker_id();
        peer.incarnation = row.incarnation();
        peer.host = row.host();
        peer.endpoint = row.endpoint();
        peer.local_rank = row.local_rank();
        peer.node_rank = row.node_rank();
        peer.pid = row.pid();
        peers.push_back(std::move(peer));
      }
      next = reply.next_rank() > next ? reply.next_rank() : -1;
      if (next >= world_size) {
        return absl::InternalError(absl::StrCat("rank table: rank ", next, " is to come next, but ",
                                                "there are ", world_size));
      }
    }
    MutexLock lock(&mu_);
    table_digest_ = digest;
    peers_ = peers;
    return peers;
  }

  absl::StatusOr<v1::TxnReply> Txn(const std::string& what, v1::TxnRequest request) {
    FillFence(request.mutable_fence());
    v1::TxnReply reply;
    MUSTER_FAILPOINT_STATUS("worker.txn");
    MUSTER_RETURN_IF_ERROR(
        Call(what, options_.call_timeout, *kv_, &v1::KeyValueStore::Stub::Txn, &request, &reply));
    MUSTER_FAILPOINT("worker.txn_done");
    return reply;
  }

  absl::StatusOr<std::vector<std::string>> Wait(const std::vector<std::string>& keys,
                                                absl::Duration timeout) {
    v1::WaitRequest request;
    FillFence(request.mutable_fence());
    for (const std::string& key : keys) request.add_keys(key);
    SetDuration(timeout, request.mutable_timeout());
    v1::WaitReply reply;
    MUSTER_FAILPOINT_STATUS("worker.wait");
    MUSTER_RETURN_IF_ERROR(
        Call("wait for keys", timeout, *kv_, &v1::KeyValueStore::Stub::Wait, &request, &reply));
    std::vector<std::string> values;
    for (const v1::KeyValue& kv : reply.kvs()) values.push_back(kv.value());
    if (values.size() != keys.size()) {
      return absl::InternalError(
          absl::StrCat("wait for keys: ", values.size(), " values for ", keys.size(), " keys"));
    }
    return values;
  }

  absl::StatusOr<BarrierResult> Barrier(const std::string& name, absl::Duration timeout,
                                        const BarrierCall& call, const std::string& call_site) {
    v1::ArriveRequest request;
    request.set_barrier_id(name);
    SetDuration(timeout, request.mutable_timeout());
    if (call.soft_timeout > absl::ZeroDuration()) {
      SetDuration(call.soft_timeout, request.mutable_soft_timeout());
    }
    request.set_payload(call.payload);
    for (const int rank : call.participants) request.add_participants(rank);
    // Set even if lines may differ, because it makes the barrier one of the sequence on which ranks
    // must agree.
    request.set_call_site(Hash(call.same_line ? call_site : name));
    request.set_call_site_text(OneLine(call_site));
    {
      MutexLock lock(&mu_);
      if (!seat_) {
        return absl::FailedPreconditionError(
            absl::StrCat("barrier '", name, "': join the rendezvous first"));
      }
      FillFenceLocked(request.mutable_fence());
      request.set_rank(seat_->rank);
      const Counter& counter = counters_[name];
      request.set_counter(counter.next);
      request.set_previous_state(static_cast<v1::BarrierState>(counter.previous_state));
    }
    request.set_step(Facts().step);
    v1::ArriveReply reply;
    MUSTER_FAILPOINT_STATUS("worker.barrier");
    const absl::Status status = Call(absl::StrCat("barrier '", name, "'"), timeout, *barrier_,
                                     &v1::Barrier::Stub::Arrive, &request, &reply);
    MUSTER_FAILPOINT("worker.barrier_done");
    // A verdict of the coordinator closes the instance for all ranks; without one, the next call
    // asks for the same instance again.
    const v1::BarrierState state = VerdictOf(status);
    if (state != v1::BARRIER_STATE_UNSPECIFIED) {
      MutexLock lock(&mu_);
      if (Generation() == request.fence().generation()) {
        counters_[name] = {request.counter() + 1, static_cast<int>(state)};
      }
    }
    MUSTER_RETURN_IF_ERROR(status);
    BarrierResult result;
    result.payloads.assign(reply.payloads().begin(), reply.payloads().end());
    result.last_rank = reply.report().last_rank();
    result.open_for = rpc::FromProto(reply.report().open_for());
    return result;
  }

  absl::Status CancelBarrier(const std::string& name, const std::string& reason) {
    v1::CancelBarrierRequest request;
    request.set_barrier_id(name);
    request.set_reason(OneLine(reason));
    {
      MutexLock lock(&mu_);
      FillFenceLocked(request.mutable_fence());
      request.set_counter(counters_[name].next);
    }
    v1::CancelBarrierReply reply;
    MUSTER_RETURN_IF_ERROR(Call(absl::StrCat("cancelling barrier '", name, "'"),
                                options_.call_timeout, *barrier_, &v1::Barrier::Stub::Cancel,
                                &request, &reply));
    MutexLock lock(&mu_);
    if (Generation() == request.fence().generation() && counters_[name].next == request.counter()) {
      counters_[name] = {request.counter() + 1, v1::BARRIER_STATE_CANCELLED};
    }
    return absl::OkStatus();
  }

  absl::StatusOr<BarrierReport> DescribeBarrier(const std::string& name) {
    v1::DescribeBarrierRequest request;
    request.set_job_id(options_.job);
    request.set_barrier_id(name);
    {
      MutexLock lock(&mu_);
      const uint64_t next = counters_[name].next;
      if (next == 0) {
        return absl::NotFoundError(absl::StrCat("barrier '", name, "' has not ended yet"));
      }
      request.set_counter(next - 1);
    }
    v1::DescribeBarrierReply reply;
    // The caller has failed already, so do not wait long.
    MUSTER_RETURN_IF_ERROR(CallWithin(absl::StrCat("describing barrier '", name, "'"), kGrace,
                                      *barrier_, &v1::Barrier::Stub::Describe, &request, &reply,
                                      AtExit::kCutShort));
    BarrierReport report;
    report.message = reply.report().message();
    report.first_rank = reply.report().first_rank();
    for (const v1::Culprit& culprit : reply.report().culprits()) {
      report.absent.push_back({.rank = culprit.rank(),
                               .host = culprit.host(),
                               .pid = culprit.pid(),
                               .process_state = culprit.process_state(),
                               .heartbeat_age = rpc::FromProto(culprit.heartbeat_age()),
                               .last_step = culprit.last_step(),
                               .last_collective = culprit.last_collective(),
                               .native_stack = culprit.native_stack()});
    }
    return report;
  }

  absl::StatusOr<std::vector<MemberInfo>> Members() {
    v1::GetMembersRequest request;
    request.set_job_id(options_.job);
    v1::GetMembersReply reply;
    do {
      v1::GetMembersReply page;
      MUSTER_RETURN_IF_ERROR(CallWithin("members", kGrace, *membership_,
                                        &v1::Membership::Stub::GetMembers, &request, &page,
                                        AtExit::kCutShort));
      request.set_first(page.next());
      reply.MergeFrom(page);
    } while (request.first() > 0);
    std::vector<MemberInfo> members;
    for (const v1::Member& member : reply.members()) {
      if (member.rank() < 0) continue;
      MemberInfo& info = members.emplace_back();
      info.rank = member.rank();
      info.worker_id = member.worker_id();
      info.host = member.host();
      info.pid = member.pid();
      info.step = member.last_step();
      info.phase = member.phase();
      info.last_collective = member.last_collective();
      info.heartbeat_age = rpc::FromProto(member.heartbeat_age());
      switch (member.state()) {
        case v1::WORKER_STATE_EXITED:
          info.gone = member.exit().signal() != 0
                          ? absl::StrCat("it was killed by signal ", member.exit().signal())
                          : absl::StrCat("it has exited with code ", member.exit().exit_code());
          break;
        case v1::WORKER_STATE_LOST:
          info.gone = "it gives no sign of life";
          break;
        case v1::WORKER_STATE_LEFT:
          info.gone = "it has left the job";
          break;
        case v1::WORKER_STATE_FENCED:
          info.gone = "another process has taken its place";
          break;
        default:
          break;
      }
    }
    std::sort(members.begin(), members.end(),
              [](const MemberInfo& a, const MemberInfo& b) { return a.rank < b.rank; });
    return members;
  }

  absl::StatusOr<std::vector<LivingRank>> AgreeAlive(absl::Duration timeout,
                                                     const std::vector<int>& set) {
    v1::AgreeAliveRequest request;
    for (const int rank : set) request.add_set(rank);
    SetDuration(timeout, request.mutable_timeout());
    {
      MutexLock lock(&mu_);
      if (!seat_) return absl::FailedPreconditionError("agree alive: join the rendezvous first");
      FillFenceLocked(request.mutable_fence());
      request.set_rank(seat_->rank);
      request.set_counter(agreements_);
    }
    v1::AgreeAliveReply reply;
    const absl::Status status = Call("agree alive", timeout, *membership_,
                                     &v1::Membership::Stub::AgreeAlive, &request, &reply);
    if (status.ok() || rpc::GetReason(status) == v1::ERROR_REASON_BARRIER_TIMEOUT) {
      MutexLock lock(&mu_);
      if (Generation() == request.fence().generation()) agreements_ = request.counter() + 1;
    }
    MUSTER_RETURN_IF_ERROR(status);
    if (reply.alive_size() != reply.incarnations_size()) {
      return absl::InternalError(absl::StrCat("agree alive: ", reply.alive_size(), " ranks but ",
                                              reply.incarnations_size(), " incarnations"));
    }
    std::vector<LivingRank> living;
    for (int i = 0; i < reply.alive_size(); ++i)
      living.push_back({reply.alive(i), reply.incarnations(i)});
    return living;
  }

  absl::StatusOr<uint64_t> RaiseTrigger(const std::string& name, const std::string& payload) {
    v1::RaiseTriggerRequest request;
    FillFence(request.mutable_fence());
    request.set_name(name);
    request.set_payload(payload);
    request.set_align(v1::TRIGGER_ALIGN_NEXT_STEP);
    v1::RaiseTriggerReply reply;
    MUSTER_FAILPOINT_STATUS("worker.raise_trigger");
    MUSTER_RETURN_IF_ERROR(Call(absl::StrCat("trigger '", name, "'"), options_.call_timeout,
                                *triggers_, &v1::Triggers::Stub::Raise, &request, &reply,
                                AtExit::kCutShort));
    return reply.trigger_id();
  }

  absl::StatusOr<std::vector<TriggerInfo>> PollTriggers(const TriggerPoll& poll,
                                                        absl::Duration timeout) {
    v1::PollTriggersRequest request;
    {
      MutexLock lock(&mu_);
      if (!seat_) return absl::FailedPreconditionError("triggers: join the rendezvous first");
      FillFenceLocked(request.mutable_fence());
      request.set_rank(seat_->rank);
      step_ = std::max(step_, poll.step);
    }
    request.set_step(poll.step);
    request.set_horizon(poll.horizon);
    for (const uint64_t id : poll.pending) request.add_pending(id);
    for (const uint64_t id : poll.acknowledged) request.add_acked(id);
    v1::PollTriggersReply reply;
    MUSTER_FAILPOINT_STATUS("worker.poll_triggers");
    // Do not wait through an outage: the next poll carries newer facts anyway.
    MUSTER_RETURN_IF_ERROR(
        CallWithin("triggers", timeout > absl::ZeroDuration() ? timeout : options_.call_timeout,
                   *triggers_, &v1::Triggers::Stub::Poll, &request, &reply, AtExit::kCutShort));
    std::vector<TriggerInfo> triggers;
    for (const v1::TriggerEvent& event : reply.triggers()) {
      TriggerInfo info;
      info.id = event.trigger_id();
      info.name = event.name();
      info.payload = event.payload();
      info.decided = event.effective_step() >= 0 || event.align() == v1::TRIGGER_ALIGN_NOW;
      info.effective_step = event.effective_step();
      info.raised_by_rank = event.raised_by_rank();
      triggers.push_back(std::move(info));
    }
    return triggers;
  }

  template <class Request, class Reply>
  absl::Status Checkpoints(const std::string& what,
                           grpc::Status (v1::Checkpoints::Stub::*method)(grpc::ClientContext*,
                                                                         const Request&, Reply*),
                           Request* request, Reply* reply) {
    FillFence(request->mutable_fence());
    // These requests do not delay an exit: what was begun is forgotten when its generation is over,
    // and a verdict can be found again.
    bool may_be_lost = std::is_same_v<Request, v1::AbortCheckpointRequest> ||
                       std::is_same_v<Request, v1::VerifyCheckpointRequest>;
    // Nor do requests that are only counted.
    if constexpr (std::is_same_v<Request, v1::PublishCheckpointRequest>) {
      may_be_lost = request->checkpoint_id() == 0;
    }
    return may_be_lost
               ? CallWithin(what, kGrace, *checkpoints_, method, request, reply, AtExit::kCutShort)
               : Call(what, options_.call_timeout, *checkpoints_, method, request, reply);
  }

  void ReportProgress(int64_t step, const std::string& phase, const std::string& last_collective) {
    MutexLock lock(&mu_);
    const std::string& collective = last_collective.empty() ? last_collective_ : last_collective;
    // A program that reports the same again has made no progress.
    if (step_ != step || phase_ != phase || last_collective_ != collective) ++progress_;
    step_ = step;
    phase_ = phase;
    if (!last_collective.empty()) last_collective_ = last_collective;
  }

  absl::StatusOr<Heartbeat> Beat(absl::Duration patience) {
    v1::HeartbeatRequest request;
    FillFence(request.mutable_fence());
    const ProgressBoard::Facts facts = Facts();
    request.set_step(facts.step);
    request.set_phase(facts.phase);
    request.set_last_collective(facts.last_collective);
    const std::optional<Seat> place = seat();
    const bool main = place.has_value() && place->rank == 0;
    uint64_t signs = 0;
    if (options_.saves != nullptr) {
      signs = options_.saves->signs();
      if (const auto running = options_.saves->Read(); running.has_value()) {
        v1::SaveProgress& save = *request.mutable_save();
        // A message can contain only UTF-8.
        if (main) save.set_path(Printable(running->path, kMostPathBytes));
        save.set_step(running->step);
        save.set_written_bytes(running->written);
        save.set_bytes(running->bytes);
        *save.mutable_elapsed() = rpc::ToProto(running->elapsed);
        save.set_asynchronous(running->asynchronous);
      }
    }
    request.set_progress(facts.progress + signs);
    if (main) {
      const absl::Time now = Clock::Real().Now();
      if (facts.restored != absl::InfinitePast()) {
        *request.mutable_restored_ago() = rpc::ToProto(now - facts.restored);
      }
      if (facts.first_step != absl::InfinitePast()) {
        *request.mutable_first_step_ago() = rpc::ToProto(now - facts.first_step);
      }
    }
    v1::HeartbeatReply reply;
    MUSTER_FAILPOINT("worker.beat");
    MUSTER_RETURN_IF_ERROR(CallWithin("heartbeat", patience, *membership_,
                                      &v1::Membership::Stub::Heartbeat, &request, &reply,
                                      AtExit::kCutShort));
    Heartbeat beat;
    beat.generation = reply.generation();
    beat.generation_ended = reply.generation_ended();
    beat.why = reply.why();
    return beat;
  }

  absl::Duration call_timeout() const { return options_.call_timeout; }

 private:
  // Whether BeginExit limits a call.
  enum class AtExit { kGoesOn, kCutShort };
  struct Counter {
    uint64_t next = 0;
    int previous_state = 0;  // v1::BarrierState
  };

  ProgressBoard::Facts Facts() const {
    if (options_.progress != nullptr) return options_.progress->Read();
    MutexLock lock(&mu_);
    return {
        .step = step_, .phase = phase_, .last_collective = last_collective_, .progress = progress_};
  }

  // Returns 0 if there is no seat yet.
  uint64_t Generation() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return seat_ ? seat_->generation : 0;
  }

  void FillFence(v1::Fence* fence) {
    MutexLock lock(&mu_);
    FillFenceLocked(fence);
  }
  // For requests with more facts about the seat, because another thread may join meanwhile.
  void FillFenceLocked(v1::Fence* fence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    fence->set_job_id(options_.job);
    fence->set_worker_id(options_.worker_id);
    fence->set_incarnation(options_.incarnation);
    fence->set_term_seen(term_);
    fence->set_cluster(cluster_);
    fence->set_revision_seen(revision_);
    fence->set_generation(Generation());
    fence->set_request_id(++LastRequestId());
  }

  static v1::BarrierState VerdictOf(const absl::Status& status) {
    return status.ok() ? v1::BARRIER_STATE_PASSED : rpc::BarrierVerdict(rpc::GetReason(status));
  }

  template <class Stub, class Request, class Reply>
  absl::Status Call(const std::string& what, absl::Duration timeout, Stub& stub,
                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request* request, Reply* reply, AtExit at_exit = AtExit::kGoesOn) {
    return CallWithin(what, timeout + kGrace + options_.outage_tolerance, stub, method, request,
                      reply, at_exit);
  }

  // Sends `request` until there is an answer or `patience` has run out. Sends the same bytes each
  // time, so that the coordinator recognises a repeat by its request id; only a request with a
  // timeout also says how long it has waited.
  template <class Stub, class Request, class Reply>
  absl::Status CallWithin(const std::string& what, absl::Duration patience, Stub& stub,
                          grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                       Reply*),
                          const Request* request, Reply* reply, AtExit at_exit = AtExit::kGoesOn) {
    // Check the program's own names here, because its agent would only report that it cannot read
    // the message.
    if (const absl::Status sound = rpc::CheckUtf8(*request); !sound.ok()) {
      return Prefixed(what, sound);
    }
    const Clock& clock = Clock::Real();
    const absl::Time begun = clock.Now();
    Backoff backoff(kFirstBackoff, kLastBackoff);
    Request repeat;
    for (bool first = true;; first = false) {
      if constexpr (requires(Request & timed) { timed.mutable_waited(); }) {
        if (!first) {
          if (request != &repeat) repeat = *request;
          SetDuration(clock.Now() - begun, repeat.mutable_waited());
          request = &repeat;
        }
      }
      grpc::ClientContext context;
      // Wait for a coordinator that is away or starting.
      context.set_wait_for_ready(true);
      absl::Time deadline = begun + patience;
      {
        MutexLock lock(&mu_);
        if (at_exit == AtExit::kCutShort) {
          deadline = std::min(deadline, exit_);
          cut_short_.insert(&context);
        }
      }
      rpc::SetTimeout(context, std::max(deadline - clock.Now(), absl::Milliseconds(1)));
      const absl::Status status = rpc::FromGrpc((stub.*method)(&context, *request, reply));
      bool exit_began = false;
      {
        MutexLock lock(&mu_);
        if (cut_short_.erase(&context) > 0 && exit_ < deadline) {
          deadline = exit_;
          exit_began = true;
        }
      }
      if (status.ok()) {
        See(reply->header());
        return status;
      }
      const bool lost = rpc::IsLost(status);
      if (lost && exit_began && clock.Now() < deadline) continue;
      const absl::Duration wait = backoff.Next(RandomShare(), rpc::RetryAfter(status));
      if (!lost || clock.Now() + wait >= deadline) {
        if (rpc::GetReason(status) == v1::ERROR_REASON_UNSPECIFIED &&
            (lost || status.code() == absl::StatusCode::kDeadlineExceeded)) {
          return absl::UnavailableError(
              absl::StrCat(what, ": no answer from the coordinator at ", options_.address,
                           " within ", absl::FormatDuration(std::min(patience, deadline - begun)),
                           " (", status.message(), ")"));
        }
        return Prefixed(what, status);
      }
      if (stop_.WaitForNotificationWithTimeout(wait)) {
        return absl::CancelledError(absl::StrCat(what, ": the client is closing"));
      }
    }
  }

  void EndWithin(absl::Duration patience) {
    MutexLock lock(&mu_);
    exit_ = std::min(exit_, Clock::Real().Now() + patience);
    // Calls that continue are sent again, with the rest of it.
    for (grpc::ClientContext* const context : cut_short_) context->TryCancel();
  }

  void See(const v1::ReplyHeader& header) {
    uint64_t cluster = 0;
    if (!absl::SimpleHexAtoi(header.cluster_id().substr(0, 16), &cluster)) cluster = 0;
    MutexLock lock(&mu_);
    // Terms and revisions of one cluster say nothing about another.
    if (cluster != 0 && std::exchange(cluster_, cluster) != cluster) term_ = revision_ = 0;
    term_ = std::max(term_, header.term());
    revision_ = std::max(revision_, header.revision());
  }

  void Pulse() {
    while (!stop_.WaitForNotificationWithTimeout(options_.heartbeat_period)) {
      uint64_t generation = 0;
      {
        MutexLock lock(&mu_);
        if (end_reported_) continue;
        generation = Generation();
      }
      // Wait no longer than a period and its grace: the next beat carries newer facts anyway.
      const absl::StatusOr<Heartbeat> beat = Beat(options_.heartbeat_period + kGrace);
      absl::Status ended;
      if (beat.ok() && beat->generation_ended) {
        ended = absl::AbortedError(absl::StrCat("the generation has ended: ", beat->why));
      } else if (!beat.ok() && (beat.status().code() == absl::StatusCode::kAborted ||
                                beat.status().code() == absl::StatusCode::kFailedPrecondition)) {
        ended = beat.status();
      }
      if (ended.ok()) continue;
      {
        MutexLock lock(&mu_);
        // The answer may come when the worker has a seat in the next generation.
        if (end_reported_ || Generation() != generation) continue;
        end_reported_ = true;
      }
      if (options_.on_generation_ended) {
        options_.on_generation_ended(generation, ended);
      } else {
        MUSTER_LOG(Warning) << ended.message();
      }
    }
  }

  // Constant after construction.
  const Options options_;
  const std::unique_ptr<v1::Rendezvous::Stub> rendezvous_;
  const std::unique_ptr<v1::KeyValueStore::Stub> kv_;
  const std::unique_ptr<v1::Barrier::Stub> barrier_;
  const std::unique_ptr<v1::Triggers::Stub> triggers_;
  const std::unique_ptr<v1::Membership::Stub> membership_;
  const std::unique_ptr<v1::Checkpoints::Stub> checkpoints_;

  mutable Mutex mu_;
  std::optional<Seat> seat_ ABSL_GUARDED_BY(mu_);
  uint64_t table_digest_ ABSL_GUARDED_BY(mu_) = 0;  // digest of peers_; 0: not fetched yet
  std::vector<PeerInfo> peers_ ABSL_GUARDED_BY(mu_);
  uint64_t agreements_ ABSL_GUARDED_BY(mu_) = 0;  // agreements that ended in the seat's generation
  uint64_t term_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t revision_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t cluster_ ABSL_GUARDED_BY(mu_) = 0;  // as in Fence
  std::map<std::string, Counter> counters_ ABSL_GUARDED_BY(mu_);
  int64_t step_ ABSL_GUARDED_BY(mu_) = 0;
  std::string phase_ ABSL_GUARDED_BY(mu_);
  std::string last_collective_ ABSL_GUARDED_BY(mu_);
  uint64_t progress_ ABSL_GUARDED_BY(mu_) = 1;
  // Whether the end of the seat's generation was reported.
  bool end_reported_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time exit_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::set<grpc::ClientContext*> cut_short_ ABSL_GUARDED_BY(mu_);  // in flight

  Notification stop_;
  std::thread pulse_;  // started by the first Join; last member
};

CoordinatorClient::CoordinatorClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CoordinatorClient::~CoordinatorClient() = default;

absl::StatusOr<std::unique_ptr<CoordinatorClient>> CoordinatorClient::Connect(Options options) {
  MUSTER_RETURN_IF_ERROR(ArmFailpointsFromEnvironment());
  if (options.job.empty() || options.worker_id.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("coordinator client: ", options.job.empty() ? "job" : "worker_id",
                     " is empty (MUSTER_JOB and MUSTER_WORKER_ID are set by the launcher)"));
  }
  if (options.incarnation == 0) options.incarnation = RandomId();
  MUSTER_ASSIGN_OR_RETURN(const std::string address, NumericAddress(options.address));
  rpc::ChannelOptions channel_options;
  channel_options.tls = options.tls;
  channel_options.token_file = options.token_file;
  MUSTER_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel,
                          rpc::Connect(address, channel_options));
  MUSTER_RETURN_IF_ERROR(
      rpc::WaitUntilConnected(*channel, options.address, options.connect_timeout));
  MUSTER_FAILPOINT_STATUS("worker.connected");
  return std::unique_ptr<CoordinatorClient>(
      new CoordinatorClient(std::make_unique<Impl>(std::move(options), std::move(channel))));
}

absl::StatusOr<Seat> CoordinatorClient::Join(const JoinOptions& options) {
  return impl_->Join(options);
}
void CoordinatorClient::BeginExit() { impl_->BeginExit(); }
std::optional<Seat> CoordinatorClient::seat() const { return impl_->seat(); }
absl::Status CoordinatorClient::Leave(const std::string& reason) { return impl_->Leave(reason); }
absl::StatusOr<std::vector<PeerInfo>> CoordinatorClient::Peers() { return impl_->Peers(); }
bool IsBarrierVerdict(const absl::Status& status) {
  switch (rpc::GetReason(status)) {
    case v1::ERROR_REASON_BARRIER_TIMEOUT:
    case v1::ERROR_REASON_RANK_FAILED:
    case v1::ERROR_REASON_DESYNC:
      return true;
    default:
      return false;
  }
}

const std::string& CoordinatorClient::job() const { return impl_->job(); }
uint64_t CoordinatorClient::incarnation() const { return impl_->incarnation(); }

absl::Status CoordinatorClient::Set(const std::string& key, const std::string& value) {
  return SetAll({{key, value}});
}

absl::Status CoordinatorClient::SetAll(
    const std::vector<std::pair<std::string, std::string>>& entries) {
  v1::TxnRequest request;
  for (const auto& [key, value] : entries) {
    v1::PutOp& put = *request.add_then()->mutable_put();
    put.set_key(key);
    put.set_value(value);
    put.set_klass(v1::KV_CLASS_DURABLE);
  }
  return impl_->Txn("set", std::move(request)).status();
}

absl::StatusOr<std::optional<std::string>> CoordinatorClient::Find(const std::string& key) {
  v1::TxnRequest request;
  request.add_then()->mutable_get()->set_key(key);
  MUSTER_ASSIGN_OR_RETURN(const v1::TxnReply reply, impl_->Txn("get", std::move(request)));
  if (reply.results_size() == 0 || reply.results(0).kvs_size() == 0) {
    return std::optional<std::string>();
  }
  return std::optional<std::string>(reply.results(0).kvs(0).value());
}

absl::StatusOr<std::vector<std::string>> CoordinatorClient::Wait(
    const std::vector<std::string>& keys, absl::Duration timeout) {
  if (keys.empty()) return std::vector<std::string>();
  return impl_->Wait(keys, timeout);
}

absl::StatusOr<int64_t> CoordinatorClient::Add(const std::string& key, int64_t delta) {
  v1::TxnRequest request;
  v1::AddOp& add = *request.add_then()->mutable_add();
  add.set_key(key);
  add.set_delta(delta);
  add.set_klass(v1::KV_CLASS_DURABLE);
  MUSTER_ASSIGN_OR_RETURN(const v1::TxnReply reply, impl_->Txn("add", std::move(request)));
  if (reply.results_size() == 0) return absl::InternalError("add: an answer without a result");
  return reply.results(0).number();
}

absl::Status CoordinatorClient::Append(const std::string& key, const std::string& value) {
  v1::TxnRequest request;
  v1::AppendOp& append = *request.add_then()->mutable_append();
  append.set_key(key);
  append.set_value(value);
  append.set_klass(v1::KV_CLASS_DURABLE);
  return impl_->Txn("append", std::move(request)).status();
}

absl::StatusOr<bool> CoordinatorClient::Delete(const std::string& key) {
  v1::TxnRequest request;
  request.add_then()->mutable_delete_()->set_key(key);
  MUSTER_ASSIGN_OR_RETURN(const v1::TxnReply reply, impl_->Txn("delete", std::move(request)));
  return reply.results_size() > 0 && reply.results(0).number() > 0;
}

absl::StatusOr<bool> CoordinatorClient::AllExist(const std::vector<std::string>& keys) {
  if (keys.empty()) return true;
  v1::TxnRequest request;
  for (const std::string& key : keys) {
    v1::Compare& compare = *request.add_compares();
    compare.set_key(key);
    compare.set_target(v1::Compare::EXISTS);
    compare.set_number(1);
  }
  MUSTER_ASSIGN_OR_RETURN(const v1::TxnReply reply, impl_->Txn("check", std::move(request)));
  return reply.succeeded();
}

absl::StatusOr<std::string> CoordinatorClient::CompareSet(const std::string& key,
                                                          const std::string& expected,
                                                          const std::string& desired) {
  // An empty `expected` means absent or empty, which are tried in turn until no other change comes
  // in between.
  bool must_be_absent = expected.empty();
  for (int tries = 0; tries < kCompareTries; ++tries) {
    v1::TxnRequest request;
    v1::Compare& compare = *request.add_compares();
    compare.set_key(key);
    if (must_be_absent) {
      compare.set_target(v1::Compare::EXISTS);
      compare.set_number(0);
    } else {
      compare.set_target(v1::Compare::VALUE);
      compare.set_value(expected);
    }
    v1::PutOp& put = *request.add_then()->mutable_put();
    put.set_key(key);
    put.set_value(desired);
    put.set_klass(v1::KV_CLASS_DURABLE);
    request.add_otherwise()->mutable_get()->set_key(key);
    MUSTER_ASSIGN_OR_RETURN(const v1::TxnReply reply,
                            impl_->Txn("compare and set", std::move(request)));
    if (reply.succeeded()) return desired;
    const bool exists = reply.results_size() > 0 && reply.results(0).kvs_size() > 0;
    if (exists && reply.results(0).kvs(0).value() != expected) {
      return reply.results(0).kvs(0).value();
    }
    if (!exists && !expected.empty()) return expected;
    must_be_absent = !exists;
  }
  return absl::UnavailableError(absl::StrCat("compare and set of '", key, "': overtaken by others ",
                                             kCompareTries, " times"));
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> CoordinatorClient::List(
    const std::string& prefix, bool keys_only) {
  std::vector<std::pair<std::string, std::string>> entries;
  while (true) {
    v1::TxnRequest request;
    v1::GetOp& get = *request.add_then()->mutable_get();
    get.set_key(prefix);
    get.set_prefix(true);
    get.set_keys_only(keys_only);
    if (!entries.empty()) get.set_after(entries.back().first);
    MUSTER_ASSIGN_OR_RETURN(const v1::TxnReply reply, impl_->Txn("list", std::move(request)));
    if (reply.results_size() == 0) return absl::InternalError("list: an answer without a result");
    const v1::KvOpResult& page = reply.results(0);
    for (const v1::KeyValue& kv : page.kvs()) {
      // An older coordinator does not support pages and starts over.
      if (!entries.empty() && kv.key() <= entries.back().first) {
        return absl::ResourceExhaustedError(
            absl::StrCat("list '", prefix, "': more than ", entries.size(),
                         " keys, and the coordinator is too old to list them in pages"));
      }
      entries.emplace_back(kv.key(), kv.value());
    }
    if (!page.more() || page.kvs_size() == 0) return entries;
  }
}

absl::StatusOr<BarrierResult> CoordinatorClient::Barrier(const std::string& name,
                                                         absl::Duration timeout,
                                                         const std::string& payload,
                                                         std::source_location where) {
  return Barrier(name, timeout, BarrierCall{.payload = payload}, where);
}

absl::StatusOr<BarrierResult> CoordinatorClient::Barrier(const std::string& name,
                                                         absl::Duration timeout,
                                                         const BarrierCall& call,
                                                         std::source_location where) {
  const std::string path = where.file_name();
  const size_t slash = path.rfind('/');
  return impl_->Barrier(
      name, timeout, call,
      absl::StrCat(slash == std::string::npos ? path : path.substr(slash + 1), ":", where.line()));
}

absl::Status CoordinatorClient::CancelBarrier(const std::string& name, const std::string& reason) {
  return impl_->CancelBarrier(name, reason);
}

absl::StatusOr<BarrierReport> CoordinatorClient::DescribeBarrier(const std::string& name) {
  return impl_->DescribeBarrier(name);
}

absl::StatusOr<std::vector<MemberInfo>> CoordinatorClient::Members() { return impl_->Members(); }

absl::StatusOr<std::vector<LivingRank>> CoordinatorClient::AgreeAlive(absl::Duration timeout,
                                                                      const std::vector<int>& set) {
  return impl_->AgreeAlive(timeout, set);
}

absl::StatusOr<uint64_t> CoordinatorClient::RaiseTrigger(const std::string& name,
                                                         const std::string& payload) {
  return impl_->RaiseTrigger(name, payload);
}

absl::StatusOr<std::vector<TriggerInfo>> CoordinatorClient::PollTriggers(const TriggerPoll& poll,
                                                                         absl::Duration timeout) {
  return impl_->PollTriggers(poll, timeout);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::BeginCheckpointRequest* request,
                                                v1::BeginCheckpointReply* reply) {
  return impl_->Checkpoints("begin a checkpoint", &v1::Checkpoints::Stub::Begin, request, reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::ReportShardsRequest* request,
                                                v1::ReportShardsReply* reply) {
  return impl_->Checkpoints("report shards", &v1::Checkpoints::Stub::ReportShards, request, reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::SealCheckpointRequest* request,
                                                v1::SealCheckpointReply* reply) {
  return impl_->Checkpoints("seal a checkpoint", &v1::Checkpoints::Stub::Seal, request, reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::PublishCheckpointRequest* request,
                                                v1::PublishCheckpointReply* reply) {
  return impl_->Checkpoints("publish a checkpoint", &v1::Checkpoints::Stub::Publish, request,
                            reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::AbortCheckpointRequest* request,
                                                v1::AbortCheckpointReply* reply) {
  return impl_->Checkpoints("abort a checkpoint", &v1::Checkpoints::Stub::Abort, request, reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::CheckpointDeletedRequest* request,
                                                v1::CheckpointDeletedReply* reply) {
  return impl_->Checkpoints("tell of deleted checkpoints", &v1::Checkpoints::Stub::Deleted, request,
                            reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::ListCheckpointsRequest* request,
                                                v1::ListCheckpointsReply* reply) {
  return impl_->Checkpoints("list checkpoints", &v1::Checkpoints::Stub::List, request, reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::MarkCheckpointRequest* request,
                                                v1::MarkCheckpointReply* reply) {
  return impl_->Checkpoints("mark a checkpoint", &v1::Checkpoints::Stub::Mark, request, reply);
}

absl::Status CoordinatorClient::CallCheckpoints(v1::VerifyCheckpointRequest* request,
                                                v1::VerifyCheckpointReply* reply) {
  return impl_->Checkpoints("report a verified checkpoint", &v1::Checkpoints::Stub::Verify, request,
                            reply);
}

void CoordinatorClient::ReportProgress(int64_t step, const std::string& phase,
                                       const std::string& last_collective) {
  impl_->ReportProgress(step, phase, last_collective);
}

absl::StatusOr<Heartbeat> CoordinatorClient::Beat() { return impl_->Beat(impl_->call_timeout()); }

}  // namespace muster
