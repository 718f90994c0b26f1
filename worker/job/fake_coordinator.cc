#include "worker/job/fake_coordinator.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster {
namespace {

struct FakeTrigger {
  v1::TriggerEvent event;
  std::map<int, int64_t> promised;  // by rank
};

grpc::Status Error(absl::StatusCode code, const std::string& text, v1::ErrorReason reason) {
  return rpc::ToGrpc(rpc::ErrorWithReason(code, text, reason));
}

grpc::Status ErrorOf(absl::StatusCode code, const std::string& message, v1::ErrorReason reason,
                     const std::string& field = "") {
  v1::ErrorDetail detail;
  detail.set_reason(reason);
  detail.set_field(field);
  return rpc::ToGrpc(rpc::WithDetail(absl::Status(code, message), detail));
}

// The checkpoints of the job, as coordinator/checkpoint/checkpoint_set.h specifies them, without
// proof of coverage, chain and retention.
class FakeCheckpoints : public v1::Checkpoints::Service {
 public:
  void SetGeneration(uint64_t generation) {
    MutexLock lock(&mu_);
    generation_ = generation;
  }
  void LoseAnswers() {
    MutexLock lock(&mu_);
    loses_ = true;
  }
  void ForgetReports(int n) {
    MutexLock lock(&mu_);
    forget_in_ = n;
  }
  void BecomeRestored(uint64_t restore_id) {
    MutexLock lock(&mu_);
    restore_id_ = restore_id;
  }
  std::vector<std::string> reports() const {
    MutexLock lock(&mu_);
    return taken_;
  }

  grpc::Status Begin(grpc::ServerContext*, const v1::BeginCheckpointRequest* request,
                     v1::BeginCheckpointReply* reply) override {
    reply->mutable_header()->set_term(1);
    reply->mutable_header()->set_cluster_id("0000000000000051");
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> grpc::Status {
      reply->mutable_header()->set_restore_id(restore_id_);
      for (auto& [id, entry] : entries_) {
        const v1::CheckpointState state = entry.record.state();
        if (entry.record.path() != request->path() ||
            (state != v1::CHECKPOINT_STATE_PREPARING && state != v1::CHECKPOINT_STATE_DELETING)) {
          continue;
        }
        if (state == v1::CHECKPOINT_STATE_DELETING || entry.record.step() != request->step()) {
          return ErrorOf(absl::StatusCode::kFailedPrecondition, "another one is there",
                         v1::ERROR_REASON_CHECKPOINT_CONFLICT);
        }
        reply->set_checkpoint_id(id);
        return grpc::Status::OK;
      }
      Entry& entry = entries_[++last_id_];
      entry.record.set_checkpoint_id(last_id_);
      entry.record.set_path(request->path());
      entry.record.set_step(request->step());
      entry.record.set_ranks(request->ranks());
      entry.record.set_state(v1::CHECKPOINT_STATE_PREPARING);
      entry.record.set_promoted(!request->hold_back());
      reply->set_checkpoint_id(last_id_);
      return grpc::Status::OK;
    });
  }
  grpc::Status ReportShards(grpc::ServerContext*, const v1::ReportShardsRequest* request,
                            v1::ReportShardsReply*) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> grpc::Status {
      if (forget_in_ > 0 && --forget_in_ == 0) {
        for (auto& [id, entry] : entries_) entry.parts.clear();
      }
      const auto found = entries_.find(request->checkpoint_id());
      if (found == entries_.end()) return NoCheckpoint();
      auto& [next, last] = found->second.parts[request->rank()];
      if (request->part() < next || last) return grpc::Status::OK;
      if (request->part() > next) {
        return ErrorOf(absl::StatusCode::kInvalidArgument, "an earlier part has not come",
                       v1::ERROR_REASON_BAD_FIELD, "part");
      }
      ++next;
      last = request->last();
      taken_.push_back(absl::StrCat("rank ", request->rank(), " part ", request->part(),
                                    request->last() ? " last" : ""));
      return grpc::Status::OK;
    });
  }
  grpc::Status Seal(grpc::ServerContext*, const v1::SealCheckpointRequest* request,
                    v1::SealCheckpointReply* reply) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> grpc::Status {
      const auto found = entries_.find(request->checkpoint_id());
      if (found == entries_.end()) return NoCheckpoint();
      Entry& entry = found->second;
      if (entry.record.state() == v1::CHECKPOINT_STATE_PREPARING) {
        for (int rank = 0; rank < entry.record.ranks(); ++rank) {
          if (entry.parts[rank].second) continue;
          return ErrorOf(absl::StatusCode::kFailedPrecondition, "a rank has not reported",
                         v1::ERROR_REASON_SHARDS_MISSING);
        }
        entry.record.set_state(v1::CHECKPOINT_STATE_SEALED);
        entry.record.set_sha256(absl::StrCat("seal ", ++seals_));
      }
      *reply->mutable_checkpoint() = entry.record;
      return grpc::Status::OK;
    });
  }
  grpc::Status Publish(grpc::ServerContext*, const v1::PublishCheckpointRequest* request,
                       v1::PublishCheckpointReply* reply) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> grpc::Status {
      if (request->checkpoint_id() == 0) {
        taken_.push_back(absl::StrCat("unrecorded: ", request->bytes(), " bytes, ",
                                      request->stall_us(), " of ", request->save_us(), " us"));
        return grpc::Status::OK;
      }
      const auto found = entries_.find(request->checkpoint_id());
      if (found == entries_.end()) return NoCheckpoint();
      for (auto& [id, entry] : entries_) {
        if (id >= request->checkpoint_id() || !entry.record.published()) continue;
        entry.record.set_state(v1::CHECKPOINT_STATE_DELETING);
        *reply->add_to_delete() = entry.record;
      }
      found->second.record.set_state(v1::CHECKPOINT_STATE_PUBLISHED);
      found->second.record.set_published(true);
      *reply->mutable_checkpoint() = found->second.record;
      return grpc::Status::OK;
    });
  }
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortCheckpointRequest* request,
                     v1::AbortCheckpointReply*) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      entries_.erase(request->checkpoint_id());
      return grpc::Status::OK;
    });
  }
  grpc::Status Deleted(grpc::ServerContext*, const v1::CheckpointDeletedRequest* request,
                       v1::CheckpointDeletedReply*) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      for (const uint64_t id : request->checkpoint_ids()) entries_.erase(id);
      return grpc::Status::OK;
    });
  }
  // One record a page, so that paging is tested.
  grpc::Status List(grpc::ServerContext*, const v1::ListCheckpointsRequest* request,
                    v1::ListCheckpointsReply* reply) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      auto found = entries_.upper_bound(request->after());
      if (found == entries_.end()) return grpc::Status::OK;
      *reply->add_checkpoints() = found->second.record;
      reply->set_more(++found != entries_.end());
      return grpc::Status::OK;
    });
  }
  grpc::Status Mark(grpc::ServerContext*, const v1::MarkCheckpointRequest* request,
                    v1::MarkCheckpointReply* reply) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> grpc::Status {
      const auto found = entries_.find(request->checkpoint_id());
      if (found == entries_.end()) return NoCheckpoint();
      found->second.record.set_pinned(request->mark() == v1::MarkCheckpointRequest::PIN);
      *reply->mutable_checkpoint() = found->second.record;
      return grpc::Status::OK;
    });
  }
  grpc::Status Verify(grpc::ServerContext*, const v1::VerifyCheckpointRequest* request,
                      v1::VerifyCheckpointReply* reply) override {
    return Answer(request->fence(), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> grpc::Status {
      const auto found = entries_.find(request->checkpoint_id());
      if (found == entries_.end()) return NoCheckpoint();
      v1::CheckpointRecord& record = found->second.record;
      if (record.sha256() != request->sha256()) {
        return ErrorOf(absl::StatusCode::kFailedPrecondition, "another record",
                       v1::ERROR_REASON_CHECKPOINT_CONFLICT);
      }
      record.set_damage(request->damage());
      record.set_verified(request->depth());
      *reply->mutable_checkpoint() = record;
      return grpc::Status::OK;
    });
  }

 private:
  struct Entry {
    v1::CheckpointRecord record;
    std::map<int, std::pair<int, bool>> parts;  // by rank: the next one; whether it was the last
  };

  static grpc::Status NoCheckpoint() {
    return ErrorOf(absl::StatusCode::kNotFound, "no such checkpoint",
                   v1::ERROR_REASON_NO_CHECKPOINT);
  }

  template <typename F>
  grpc::Status Answer(const v1::Fence& fence, F f) {
    MutexLock lock(&mu_);
    if (fence.generation() != generation_) {
      return ErrorOf(absl::StatusCode::kFailedPrecondition, "this generation is over",
                     v1::ERROR_REASON_STALE_GENERATION);
    }
    const grpc::Status status = f();
    lost_ = loses_ && !lost_;
    return lost_ ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost") : status;
  }

  mutable Mutex mu_;
  uint64_t generation_ ABSL_GUARDED_BY(mu_) = 0;
  bool loses_ ABSL_GUARDED_BY(mu_) = false;
  bool lost_ ABSL_GUARDED_BY(mu_) = false;  // whether the last answer was lost
  int forget_in_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t restore_id_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  int seals_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> taken_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

class FakeCoordinator::Impl : public v1::KeyValueStore::Service,
                              public v1::Rendezvous::Service,
                              public v1::Barrier::Service,
                              public v1::Triggers::Service,
                              public v1::Membership::Service {
 public:
  Impl() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(static_cast<v1::KeyValueStore::Service*>(this));
    builder.RegisterService(static_cast<v1::Rendezvous::Service*>(this));
    builder.RegisterService(static_cast<v1::Barrier::Service*>(this));
    builder.RegisterService(static_cast<v1::Triggers::Service*>(this));
    builder.RegisterService(static_cast<v1::Membership::Service*>(this));
    builder.RegisterService(&checkpoints_);
    server_ = builder.BuildAndStart();
  }
  ~Impl() override { server_->Shutdown(std::chrono::system_clock::now()); }

  int port() const { return port_; }
  FakeCheckpoints& checkpoints() { return checkpoints_; }

  void LoseAnswers(int n) {
    MutexLock lock(&mu_);
    lose_ = n;
  }
  void Overload(absl::Duration retry_after) {
    MutexLock lock(&mu_);
    overload_ = retry_after;
  }
  void LoseArrivals(int n) {
    MutexLock lock(&mu_);
    lose_arrivals_ = n;
  }
  int64_t waited_us() const {
    MutexLock lock(&mu_);
    return waited_us_;
  }
  uint64_t revision_seen() const {
    MutexLock lock(&mu_);
    return revision_seen_;
  }
  void BeforeAnswer(std::function<void()> meanwhile) {
    MutexLock lock(&mu_);
    meanwhile_ = std::move(meanwhile);
  }
  void EndGeneration(const std::string& why) {
    MutexLock lock(&mu_);
    ended_ = why;
    ++generation_;
    checkpoints_.SetGeneration(generation_);
    cv_.SignalAll();
  }
  int64_t writes() const {
    MutexLock lock(&mu_);
    return writes_;
  }
  int64_t rows_sent() const {
    MutexLock lock(&mu_);
    return rows_sent_;
  }
  uint64_t last_progress() const {
    MutexLock lock(&mu_);
    return last_progress_;
  }
  std::string last_heartbeat() const {
    MutexLock lock(&mu_);
    return last_beat_;
  }
  std::string WaitForHeartbeat() {
    MutexLock lock(&mu_);
    const int64_t seen = beats_;
    while (beats_ == seen) cv_.Wait(&mu_);
    return last_beat_;
  }

  grpc::Status Txn(grpc::ServerContext*, const v1::TxnRequest* request,
                   v1::TxnReply* reply) override {
    MutexLock lock(&mu_);
    if (const grpc::Status fence = Check(request->fence()); !fence.ok()) return fence;
    if (overload_ > absl::ZeroDuration()) {
      v1::ErrorDetail detail;
      detail.set_reason(v1::ERROR_REASON_OVERLOADED);
      *detail.mutable_retry_after() = rpc::ToProto(overload_);
      overload_ = absl::ZeroDuration();
      return rpc::ToGrpc(rpc::WithDetail(absl::UnavailableError("too much to do"), detail));
    }
    bool lost = false;
    if (lose_ > 0) {
      lost = true;
      if (lose_-- % 2 == 1) return Lost();
    }
    const auto key = std::make_pair(request->fence().worker_id(), request->fence().request_id());
    const auto known = answers_.find(key);
    if (known != answers_.end()) {
      *reply = known->second;
    } else {
      if (const grpc::Status status = Apply(*request, reply); !status.ok()) return status;
      answers_[key] = *reply;
      cv_.SignalAll();
    }
    return lost ? Lost() : grpc::Status::OK;
  }

  grpc::Status Wait(grpc::ServerContext*, const v1::WaitRequest* request,
                    v1::WaitReply* reply) override {
    MutexLock lock(&mu_);
    if (IsLost(*request)) return Lost();
    const absl::Time deadline = absl::Now() + rpc::FromProto(request->timeout());
    while (true) {
      if (const grpc::Status fence = Check(request->fence()); !fence.ok()) return fence;
      std::string missing;
      for (const std::string& key : request->keys()) {
        if (!values_.contains(key)) missing = key;
      }
      if (missing.empty()) break;
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) {
        return Error(absl::StatusCode::kDeadlineExceeded,
                     absl::StrCat("key '", missing, "' was not set in time"),
                     v1::ERROR_REASON_WAIT_TIMEOUT);
      }
      cv_.WaitWithTimeout(&mu_, left);
    }
    for (const std::string& key : request->keys()) {
      v1::KeyValue& kv = *reply->add_kvs();
      kv.set_key(key);
      kv.set_value(values_[key]);
    }
    return grpc::Status::OK;
  }

  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest* request,
                    v1::JoinReply* reply) override {
    MutexLock lock(&mu_);
    if (IsLost(*request)) return Lost();
    const size_t size = request->spec().min_workers();
    const uint64_t joining = generation_ + 1;
    auto& members = members_[joining];
    members[request->preferred_rank() >= 0 ? request->preferred_rank()
                                           : static_cast<int>(members.size())] = *request;
    cv_.SignalAll();
    const absl::Time deadline = absl::Now() + rpc::FromProto(request->spec().join_timeout());
    while (members.size() < size) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) {
        return Error(absl::StatusCode::kDeadlineExceeded,
                     absl::StrCat(members.size(), " of ", size, " workers came"),
                     v1::ERROR_REASON_RENDEZVOUS_TIMEOUT);
      }
      cv_.WaitWithTimeout(&mu_, left);
    }
    if (generation_ < joining) {
      generation_ = joining;
      checkpoints_.SetGeneration(generation_);
      world_ = static_cast<int>(size);
      ended_.clear();
    }
    reply->set_generation(joining);
    reply->set_world_size(world_);
    reply->set_num_nodes(1);
    reply->set_generation_prefix(absl::StrCat("gen/", joining, "/"));
    for (const auto& [rank, member] : members) {
      if (member.fence().worker_id() == request->fence().worker_id()) reply->set_rank(rank);
    }
    reply->mutable_header()->set_term(1);
    reply->mutable_header()->set_cluster_id("0000000000000051");
    reply->mutable_header()->set_revision(FakeCoordinator::kRevision);
    return grpc::Status::OK;
  }

  grpc::Status GetRankTable(grpc::ServerContext*, const v1::GetRankTableRequest* request,
                            v1::GetRankTableReply* reply) override {
    MutexLock lock(&mu_);
    // One row a page, so that paging is tested.
    const auto& members = members_[request->generation()];
    reply->set_table_digest(1000 + request->generation());
    reply->set_next_rank(-1);
    if (request->if_digest_differs() == reply->table_digest()) return grpc::Status::OK;
    ++rows_sent_;
    const auto row = members.find(request->first_rank());
    if (row == members.end()) return {grpc::StatusCode::NOT_FOUND, "no such rank"};
    v1::RankRow& out = *reply->add_rows();
    out.set_rank(row->first);
    out.set_worker_id(row->second.fence().worker_id());
    out.set_incarnation(row->second.fence().incarnation());
    out.set_host(row->second.topology().host());
    out.set_pid(row->second.pid());
    reply->set_next_rank(members.contains(row->first + 1) ? row->first + 1 : -1);
    return grpc::Status::OK;
  }

  grpc::Status Leave(grpc::ServerContext*, const v1::LeaveRequest*, v1::LeaveReply*) override {
    return grpc::Status::OK;
  }

  grpc::Status Arrive(grpc::ServerContext*, const v1::ArriveRequest* request,
                      v1::ArriveReply* reply) override {
    MutexLock lock(&mu_);
    if (const grpc::Status fence = Check(request->fence()); !fence.ok()) return fence;
    if (IsLost(*request)) return Lost();
    revision_seen_ = request->fence().revision_seen();
    const std::string& id = request->barrier_id();
    if (request->counter() > 0 &&
        !barriers_.contains({request->fence().generation(), id, request->counter() - 1})) {
      return Error(absl::StatusCode::kFailedPrecondition, "not the next counter",
                   v1::ERROR_REASON_BARRIER_COUNTER);
    }
    Instance& barrier = barriers_[{request->fence().generation(), id, request->counter()}];
    if (barrier.arrived.empty())
      barrier.deadline = absl::Now() + rpc::FromProto(request->timeout());
    barrier.arrived[request->rank()] = request->payload();
    cv_.SignalAll();
    const int expected = request->participants_size() > 0 ? request->participants_size() : world_;
    while (!barrier.failed && static_cast<int>(barrier.arrived.size()) < expected) {
      const absl::Duration left = barrier.deadline - absl::Now();
      if (left <= absl::ZeroDuration()) {
        barrier.failed = true;
        cv_.SignalAll();
        break;
      }
      cv_.WaitWithTimeout(&mu_, left);
    }
    if (barrier.failed) {
      v1::ErrorDetail detail;
      detail.set_reason(v1::ERROR_REASON_BARRIER_TIMEOUT);
      std::string text =
          absl::StrCat(barrier.arrived.size(), " of ", world_, " ranks came; missing:");
      for (int rank = 0; rank < world_; ++rank) {
        if (barrier.arrived.contains(rank)) continue;
        detail.add_missing_ranks(rank);
        absl::StrAppend(&text, " rank ", rank);
      }
      return rpc::ToGrpc(rpc::WithDetail(absl::DeadlineExceededError(text), detail));
    }
    reply->mutable_report()->set_last_rank(request->rank());
    for (const auto& [rank, payload] : barrier.arrived) reply->add_payloads(payload);
    return grpc::Status::OK;
  }

  grpc::Status Raise(grpc::ServerContext*, const v1::RaiseTriggerRequest* request,
                     v1::RaiseTriggerReply* reply) override {
    MutexLock lock(&mu_);
    if (const grpc::Status fence = Check(request->fence()); !fence.ok()) return fence;
    FakeTrigger& trigger = triggers_.emplace_back();
    trigger.event.set_trigger_id(triggers_.size());
    trigger.event.set_name(request->name());
    trigger.event.set_payload(request->payload());
    trigger.event.set_align(v1::TRIGGER_ALIGN_NEXT_STEP);
    trigger.event.set_effective_step(-1);
    reply->set_trigger_id(trigger.event.trigger_id());
    return grpc::Status::OK;
  }

  // Follows the coordinator's rule: decided once all ranks have promised, as the largest horizon.
  grpc::Status Poll(grpc::ServerContext*, const v1::PollTriggersRequest* request,
                    v1::PollTriggersReply* reply) override {
    MutexLock lock(&mu_);
    if (const grpc::Status fence = Check(request->fence()); !fence.ok()) return fence;
    const int64_t horizon = request->horizon() == 0 ? request->step() + 1 : request->horizon();
    for (const uint64_t id : request->pending()) {
      if (id == 0 || id > triggers_.size()) continue;
      FakeTrigger& trigger = triggers_[id - 1];
      if (trigger.event.effective_step() >= 0) continue;
      int64_t& promised = trigger.promised[request->rank()];
      promised = std::max(promised, horizon);
      if (static_cast<int>(trigger.promised.size()) < world_) continue;
      int64_t largest = 0;
      for (const auto& [rank, one] : trigger.promised) largest = std::max(largest, one);
      trigger.event.set_effective_step(largest);
    }
    for (const uint64_t id : request->acked()) acked_.insert({request->rank(), id});
    for (const FakeTrigger& trigger : triggers_) {
      if (!acked_.contains({request->rank(), trigger.event.trigger_id()})) {
        *reply->add_triggers() = trigger.event;
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status GetMembers(grpc::ServerContext*, const v1::GetMembersRequest*,
                          v1::GetMembersReply* reply) override {
    MutexLock lock(&mu_);
    reply->set_generation(generation_);
    for (const auto& [rank, member] : members_[generation_]) {
      v1::Member& out = *reply->add_members();
      out.set_rank(rank);
      out.set_worker_id(member.fence().worker_id());
      out.set_state(v1::WORKER_STATE_RUNNING);
      out.set_host(member.topology().host());
      out.set_pid(member.pid());
      const v1::HeartbeatRequest& facts = facts_[member.fence().worker_id()];
      out.set_last_step(facts.step());
      out.set_phase(facts.phase());
      out.set_last_collective(facts.last_collective());
      out.set_progress(facts.progress());
      if (facts.has_save()) *out.mutable_save() = facts.save();
    }
    return grpc::Status::OK;
  }

  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatReply* reply) override {
    std::function<void()> meanwhile;
    {
      MutexLock lock(&mu_);
      Hear(*request, reply);
      if (reply->generation_ended()) meanwhile = std::exchange(meanwhile_, nullptr);
    }
    if (meanwhile) meanwhile();
    return grpc::Status::OK;
  }

  grpc::Status Cancel(grpc::ServerContext*, const v1::CancelBarrierRequest* request,
                      v1::CancelBarrierReply*) override {
    std::function<void()> meanwhile;
    {
      MutexLock lock(&mu_);
      if (const grpc::Status fence = Check(request->fence()); !fence.ok()) return fence;
      meanwhile = std::exchange(meanwhile_, nullptr);
    }
    if (meanwhile) meanwhile();
    return grpc::Status::OK;
  }

 private:
  void Hear(const v1::HeartbeatRequest& request, v1::HeartbeatReply* reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    last_beat_ = absl::StrCat(request.step(), " ", request.phase(), " ", request.last_collective(),
                              request.has_restored_ago() ? " restored" : "",
                              request.has_first_step_ago() ? " stepped" : "");
    if (const v1::SaveProgress& save = request.save(); request.has_save()) {
      absl::StrAppend(&last_beat_, " saving ", save.path(), " of step ", save.step(), ", ",
                      save.written_bytes(), " of ", save.bytes());
    }
    last_progress_ = request.progress();
    ++beats_;
    facts_[request.fence().worker_id()] = request;
    cv_.SignalAll();
    reply->set_generation(generation_);
    reply->set_generation_ended(!ended_.empty());
    reply->set_why(ended_);
  }

  struct Instance {
    absl::Time deadline;
    std::map<int, std::string> arrived;
    bool failed = false;
  };

  template <class Request>
  bool IsLost(const Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (lose_arrivals_ > 0) return lose_arrivals_-- > 0;
    waited_us_ = absl::ToInt64Microseconds(rpc::FromProto(request.waited()));
    return false;
  }

  static grpc::Status Lost() { return {grpc::StatusCode::UNAVAILABLE, "connection reset"}; }

  grpc::Status Check(const v1::Fence& fence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (fence.generation() != 0 && fence.generation() < generation_) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("generation ", fence.generation(), " is over; the current one is ",
                                generation_),
                   v1::ERROR_REASON_STALE_GENERATION);
    }
    return grpc::Status::OK;
  }

  bool Holds(const v1::Compare& compare) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto value = values_.find(compare.key());
    if (compare.target() == v1::Compare::EXISTS) {
      return (value != values_.end()) == (compare.number() == 1);
    }
    return value != values_.end() && value->second == compare.value();
  }

  grpc::Status Apply(const v1::TxnRequest& request, v1::TxnReply* reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    bool holds = true;
    for (const v1::Compare& compare : request.compares()) holds = holds && Holds(compare);
    reply->set_succeeded(holds);
    reply->mutable_header()->set_term(1);
    for (const v1::KvOp& op : holds ? request.then() : request.otherwise()) {
      v1::KvOpResult& result = *reply->add_results();
      if (op.has_put()) {
        values_[op.put().key()] = op.put().value();
        ++writes_;
      } else if (op.has_get()) {
        for (const auto& [key, value] : values_) {
          if (key != op.get().key() && !(op.get().prefix() && key.rfind(op.get().key(), 0) == 0)) {
            continue;
          }
          v1::KeyValue& kv = *result.add_kvs();
          kv.set_key(key);
          if (!op.get().keys_only()) kv.set_value(value);
        }
      } else if (op.has_delete_()) {
        result.set_number(static_cast<int64_t>(values_.erase(op.delete_().key())));
        ++writes_;
      } else if (op.has_add()) {
        int64_t number = 0;
        std::string& value = values_[op.add().key()];
        if (!value.empty() && !absl::SimpleAtoi(value, &number)) {
          return {grpc::StatusCode::INVALID_ARGUMENT, "not a number"};
        }
        number += op.add().delta();
        value = absl::StrCat(number);
        result.set_number(number);
        ++writes_;
      } else if (op.has_append()) {
        std::string& value = values_[op.append().key()];
        value += op.append().value();
        result.set_number(static_cast<int64_t>(value.size()));
        ++writes_;
      }
    }
    return grpc::Status::OK;
  }

  int port_ = 0;
  FakeCheckpoints checkpoints_;
  mutable Mutex mu_;
  CondVar cv_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, uint64_t>, v1::TxnReply> answers_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::map<int, v1::JoinRequest>> members_ ABSL_GUARDED_BY(mu_);
  std::map<std::tuple<uint64_t, std::string, uint64_t>, Instance> barriers_ ABSL_GUARDED_BY(mu_);
  std::vector<FakeTrigger> triggers_ ABSL_GUARDED_BY(mu_);
  std::set<std::pair<int, uint64_t>> acked_ ABSL_GUARDED_BY(mu_);
  uint64_t generation_ ABSL_GUARDED_BY(mu_) = 0;
  int world_ ABSL_GUARDED_BY(mu_) = 0;
  std::string ended_ ABSL_GUARDED_BY(mu_);
  int lose_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Duration overload_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();
  int lose_arrivals_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t waited_us_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t revision_seen_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t writes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t rows_sent_ ABSL_GUARDED_BY(mu_) = 0;
  std::function<void()> meanwhile_ ABSL_GUARDED_BY(mu_);
  int64_t beats_ ABSL_GUARDED_BY(mu_) = 0;
  std::string last_beat_ ABSL_GUARDED_BY(mu_);
  uint64_t last_progress_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, v1::HeartbeatRequest> facts_ ABSL_GUARDED_BY(mu_);  // by worker
  std::unique_ptr<grpc::Server> server_;
};

FakeCoordinator::FakeCoordinator() : impl_(std::make_unique<Impl>()) {}
FakeCoordinator::~FakeCoordinator() = default;
std::string FakeCoordinator::address() const { return absl::StrCat("127.0.0.1:", impl_->port()); }
void FakeCoordinator::LoseAnswers(int n) { impl_->LoseAnswers(n); }
void FakeCoordinator::Overload(absl::Duration retry_after) { impl_->Overload(retry_after); }
void FakeCoordinator::LoseArrivals(int n) { impl_->LoseArrivals(n); }
int64_t FakeCoordinator::waited_us() const { return impl_->waited_us(); }
uint64_t FakeCoordinator::revision_seen() const { return impl_->revision_seen(); }
void FakeCoordinator::BeforeAnswer(std::function<void()> meanwhile) {
  impl_->BeforeAnswer(std::move(meanwhile));
}
void FakeCoordinator::EndGeneration(const std::string& why) { impl_->EndGeneration(why); }
void FakeCoordinator::LoseCheckpointAnswers() { impl_->checkpoints().LoseAnswers(); }
void FakeCoordinator::ForgetReports(int n) { impl_->checkpoints().ForgetReports(n); }
void FakeCoordinator::BecomeRestored(uint64_t restore_id) {
  impl_->checkpoints().BecomeRestored(restore_id);
}
std::vector<std::string> FakeCoordinator::reports() const { return impl_->checkpoints().reports(); }
int64_t FakeCoordinator::writes() const { return impl_->writes(); }
int64_t FakeCoordinator::rows_sent() const { return impl_->rows_sent(); }
std::string FakeCoordinator::last_heartbeat() const { return impl_->last_heartbeat(); }
uint64_t FakeCoordinator::last_progress() const { return impl_->last_progress(); }
std::string FakeCoordinator::WaitForHeartbeat() { return impl_->WaitForHeartbeat(); }

}  // namespace muster
