#include "coordinator/core.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <limits>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "coordinator/agree.h"
#include "coordinator/barrier.h"
#include "coordinator/dedupe.h"
#include "coordinator/errors.h"
#include "coordinator/kv.h"
#include "coordinator/seating.h"
#include "coordinator/trigger.h"
#include "coordinator/watch_log.h"
#include "proto/muster/v1/journal.pb.h"

namespace muster::coordinator {
namespace {

// Revisions of one term; the term is above them, so that a restarted coordinator never gives a
// number out twice.
constexpr int kRevisionBits = 40;
constexpr size_t kMaxName = 256;
constexpr size_t kMaxFenced = 16;  // remembered incarnations of one worker
constexpr size_t kMaxCallsOfJoin = 8;
constexpr size_t kMaxDeparted = 1024;
constexpr size_t kMaxOperators = 1024;  // whose answers are remembered
constexpr size_t kMaxHosts = 65536;     // of one job: struck or quarantined
constexpr int kMaxWorkers = 1 << 20;
constexpr size_t kMaxStack = 16 << 10;
constexpr size_t kMaxQueries = 4096;
constexpr int kNamed = 4;

void FillRow(const v1::SeatRecord& seat, v1::RankRow* row) {
  row->set_rank(seat.rank());
  row->set_worker_id(seat.worker_id());
  row->set_incarnation(seat.incarnation());
  row->set_host(seat.topology().host());
  row->set_endpoint(seat.endpoint());
  row->set_local_rank(seat.topology().local_rank());
  row->set_node_rank(seat.node_rank());
  row->set_pid(seat.pid());
}

// One worker's place in the current generation. What must survive a crash is in `record`.
struct Seat {
  v1::SeatRecord record;
  absl::Time last_seen;
  int64_t step = 0;
  std::string phase;
  std::string last_collective;
  std::string process_state;
  std::string stack;

  int rank() const { return record.rank(); }
  bool alive() const { return record.state() == v1::WORKER_STATE_RUNNING; }
};

enum class Kind { kOrdinary, kSpare, kLastResort, kBlocked };

struct Waiting {
  v1::JoinRequest request;
  std::vector<CallId> calls;
  std::string node;
  uint64_t order = 0;
  Kind kind = Kind::kOrdinary;
};

struct HostState {
  std::deque<absl::Time> strikes;  // those that count, oldest first
  int replayed_strikes = 0;        // at replay: as if all were made at the start of the term
  absl::Time until = absl::InfinitePast();
  absl::Duration left;  // at replay: counted from the start of the term
  std::string reason;
  bool automatic = false;
};

struct StoredAnswer {
  std::shared_ptr<const Answer> answer;
  uint64_t durable_revision = 0;  // 0: not in the journal
};

// Whose answers are remembered together: a worker, or one process of an operator's.
std::string ClientOf(const std::string& worker_id, uint64_t incarnation) {
  return worker_id.empty() ? absl::StrCat("\n", incarnation) : worker_id;
}

uint64_t FingerprintTable(const std::vector<Seat>& seats) {
  XXH3_state_t* const state = XXH3_createState();
  XXH3_64bits_reset(state);
  std::string row;
  for (const Seat& seat : seats) {
    v1::RankRow message;
    FillRow(seat.record, &message);
    row.clear();
    message.SerializeToString(&row);
    const uint32_t size = static_cast<uint32_t>(row.size());
    XXH3_64bits_update(state, &size, sizeof(size));
    XXH3_64bits_update(state, row.data(), row.size());
  }
  const uint64_t digest = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return digest == 0 ? 1 : digest;
}

// Of everything but the fence, which a retry may bring newer.
template <typename Request>
uint64_t HashRequest(const Request& request, int kind) {
  const std::string bytes = request.SerializeAsString();
  // The fence is field 1 and written first: tag, length, body.
  const size_t fence = request.fence().ByteSizeLong();
  size_t skip = 0;
  if (request.has_fence()) {
    skip = 2 + fence;
    for (size_t rest = fence; rest >= 128; rest >>= 7) ++skip;
  }
  return XXH3_64bits_withSeed(bytes.data() + skip, bytes.size() - skip, kind);
}

std::optional<v1::OpError> CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty())
    return BadField(field, absl::StrCat(field, " is empty: it has 1 to ", kMaxName, " bytes"));
  if (name.size() > kMaxName) {
    return TooLarge(field, absl::StrCat(field, " ", Quoted(name), " has ", name.size(),
                                        " bytes: at most ", kMaxName));
  }
  return std::nullopt;
}

std::optional<v1::OpError> CheckSpec(const v1::RendezvousSpec& spec) {
  if (spec.min_workers() < 1 || spec.max_workers() < spec.min_workers() ||
      spec.max_workers() > kMaxWorkers) {
    return BadField("spec",
                    absl::StrCat("a job needs 1 <= min_workers <= max_workers <= ", kMaxWorkers,
                                 ", not ", spec.min_workers(), ":", spec.max_workers()));
  }
  if (spec.divisible_by() < 0) {
    return BadField("spec.divisible_by",
                    absl::StrCat("divisible_by is ", spec.divisible_by(), ": give 1 or more"));
  }
  const int64_t step = std::max(1, spec.divisible_by());
  if ((spec.min_workers() + step - 1) / step * step > spec.max_workers()) {
    return BadField("spec.divisible_by",
                    absl::StrCat("no world size from ", spec.min_workers(), " to ",
                                 spec.max_workers(), " is a multiple of ", step));
  }
  const std::pair<const char*, const google::protobuf::Duration*> durations[] = {
      {"spec.join_timeout", &spec.join_timeout()},
      {"spec.last_call", &spec.last_call()},
      {"spec.lease", &spec.lease()}};
  for (const auto& [field, duration] : durations) {
    if (FromProto(*duration) < absl::ZeroDuration()) {
      return BadField(
          field, absl::StrCat(field, " is negative: give a duration, or none for the default"));
    }
  }
  return std::nullopt;
}

}  // namespace

void Output::Clear() {
  replies.clear();
  records.clear();
  directives.clear();
  changed_jobs.clear();
  reports.clear();
  notices.clear();
  deposed = false;
}

class Core::Impl {
 public:
  class Job;
  friend class Core;

  explicit Impl(CoreOptions options) : options_(std::move(options)) {}

  void Begin(absl::Time now, Output* out);
  // Ends the part of an event that concerns `job` (null: none): writes its record and lets replies
  // wait for it.
  void End(Job* job);
  // The revision of this event.
  uint64_t Rev() {
    if (event_revision_ == 0) event_revision_ = ++revision_;
    return event_revision_;
  }
  v1::JournalChange* Change() { return record_.add_changes(); }

  void Send(CallId call, std::shared_ptr<const Answer> answer, uint64_t durable) {
    out_->replies.push_back({call, std::move(answer), durable});
  }
  void Send(CallId call, v1::OpResult result, uint64_t durable) {
    Send(call, std::make_shared<Answer>(std::move(result), false), durable);
  }
  void SendError(CallId call, v1::OpError error, uint64_t durable) {
    v1::OpResult result;
    *result.mutable_error() = std::move(error);
    Send(call, std::move(result), durable);
  }
  v1::ReplyHeader Header() const {
    v1::ReplyHeader header;
    header.set_cluster_id(options_.cluster_id);
    header.set_term(term_);
    header.set_revision(revision_);
    return header;
  }
  void Note(const std::string& job_id, bool warning, std::string text) {
    out_->notices.push_back({warning, job_id, std::move(text)});
  }
  void Direct(const std::string& node, std::shared_ptr<const v1::Directive> directive,
              uint64_t durable) {
    if (!node.empty()) out_->directives.push_back({node, std::move(directive), durable});
  }

  struct Who {
    Job* job = nullptr;
    Seat* seat = nullptr;  // null: an operator
  };
  // Whether the caller may change something. A worker's lease is renewed.
  std::optional<v1::OpError> CheckFence(const v1::Fence& fence, bool operators, Who* who);
  // The part that is the same for all: the job exists, the coordinator is not deposed.
  std::optional<v1::OpError> CheckJob(const v1::Fence& fence, Job** job);
  Job* FindJob(absl::string_view job_id) {
    const auto it = jobs_.find(job_id);
    return it == jobs_.end() ? nullptr : it->second.get();
  }
  const Job* FindJob(absl::string_view job_id) const {
    const auto it = jobs_.find(job_id);
    return it == jobs_.end() ? nullptr : it->second.get();
  }
  static v1::OpError UnknownJob(absl::string_view job_id) {
    return MakeError(
        absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
        absl::StrCat("job ", Quoted(job_id), " is not known here: no worker of it has joined yet"));
  }

  Job* HandleOp(CallId call, const v1::Op& op, const Caller& caller);
  void Join(CallId call, const v1::JoinRequest& request, const Caller& caller, Job** touched);
  void Arrive(CallId call, const v1::ArriveRequest& request, Job** touched);
  void ArriveMany(CallId call, const v1::ArriveManyRequest& request, const Caller& caller,
                  Job** touched);
  void Heartbeat(CallId call, const v1::HeartbeatRequest& request, Job** touched);
  void ReportExit(CallId call, const v1::ReportExitRequest& request, Job** touched);
  void WaitKeys(CallId call, const v1::WaitRequest& request, Job** touched);
  void AgreeAlive(CallId call, const v1::AgreeAliveRequest& request, Job** touched);
  void PollTriggers(CallId call, const v1::PollTriggersRequest& request, Job** touched);
  void GetRankTable(CallId call, const v1::GetRankTableRequest& request);
  // Runs f(who, result) -> error once for each (worker_id, incarnation, request_id). `reads`: the
  // answer tells of earlier durable changes.
  template <typename Request, typename F>
  void Once(CallId call, const Request& request, int kind, bool operators, bool reads,
            Job** touched, F f);

  absl::Status ApplyChange(const v1::JournalChange& change);
  void Remove(Job* job);

  CoreOptions options_;
  CoreStats stats_;
  uint64_t term_ = 0;  // of the journal until StartTerm
  bool serving_ = false;
  uint64_t revision_ = 0;
  uint64_t last_record_ = 0;
  absl::flat_hash_map<std::string, std::unique_ptr<Job>> jobs_;
  absl::btree_set<std::pair<absl::Time, std::string>> deadlines_;  // of jobs
  absl::flat_hash_map<std::string, std::string> agents_;           // node -> host
  absl::flat_hash_map<uint64_t, std::pair<std::string, std::string>>
      queries_;  // -> (job_id, worker_id)
  uint64_t next_query_ = 1;
  struct Held {
    std::string job_id;
    enum { kJoin, kBarrier, kWait } kind;
    std::string worker_id;  // of a join
  };
  absl::flat_hash_map<CallId, Held> held_;

  // This event.
  absl::Time now_ = absl::InfinitePast();
  Output* out_ = nullptr;
  uint64_t event_revision_ = 0;
  v1::JournalRecord record_;
  size_t first_reply_ = 0;
  size_t first_directive_ = 0;
};

// One job: its rendezvous, its current generation and everything that belongs to it.
class Core::Impl::Job : public BarrierHost {
 public:
  Job(Impl* impl, std::string id)
      : impl_(impl),
        id_(std::move(id)),
        log_(std::make_unique<WatchLog>(impl->options_.watch_events, impl->options_.watch_bytes,
                                        impl->revision_)),
        dedupe_(impl->options_.kept_answers),
        triggers_(impl->options_.mutants.trigger_below_a_horizon) {}

  absl::Duration Lease() const {
    return Or(spec_.has_lease(), spec_.lease(), impl_->options_.default_lease);
  }
  absl::Duration JoinTimeout() const {
    return Or(spec_.has_join_timeout(), spec_.join_timeout(), impl_->options_.default_join_timeout);
  }
  static absl::Duration Or(bool has, const google::protobuf::Duration& value,
                           absl::Duration otherwise) {
    const absl::Duration duration = FromProto(value);
    return has && duration > absl::ZeroDuration() ? duration : otherwise;
  }
  absl::Time NextDeadline() const {
    absl::Time next = std::min({attempt_deadline_, last_call_at_, quarantine_check_});
    next = std::min(next, kv_.NextDeadline());
    if (barriers_ != nullptr) next = std::min(next, barriers_->NextDeadline());
    if (agree_ != nullptr) next = std::min(next, agree_->NextDeadline());
    if (!lease_checks_.empty()) next = std::min(next, lease_checks_.begin()->first);
    if (Idle()) next = std::min(next, touched_ + impl_->options_.job_retention);
    return std::max(next, hold_until_);
  }
  void Tick();
  // After a pause of this process: every lease begins anew, and no deadline passes before what came
  // meanwhile has had a moment to be read.
  void Resume() {
    lease_floor_ = impl_->now_;
    hold_until_ = impl_->now_ + std::min(absl::Seconds(1), Lease() / 4);
  }

  Seat* FindSeat(absl::string_view worker_id) {
    const auto it = rank_of_.find(worker_id);
    return it == rank_of_.end() ? nullptr : &seats_[it->second];
  }
  bool IsFenced(absl::string_view worker_id, uint64_t incarnation) const {
    const auto it = fenced_.find(worker_id);
    return it != fenced_.end() &&
           std::find(it->second.begin(), it->second.end(), incarnation) != it->second.end();
  }
  void RememberFenced(absl::string_view worker_id, uint64_t incarnation);
  void RememberDeparted(const std::string& worker_id, uint64_t incarnation);
  void RememberAnswer(const std::string& worker_id, uint64_t incarnation, uint64_t request_id,
                      uint64_t hash, StoredAnswer answer);
  // Nothing of the job is alive: it is kept for those who ask what became of it.
  bool Idle() const { return !sealed_ && waiting_.empty(); }
  // A worker that is listed by its agent without a seat: tells it again what it must have missed.
  void TellAgain(const std::string& node, const v1::WorkerBeat& worker);
  void Kill(const std::string& node, const std::string& worker_id, uint64_t incarnation);
  void FenceIncarnation(const std::string& worker_id, uint64_t incarnation);
  // After a seal: who of `old_seats` has no seat now is remembered, who has one is not.
  void NoteDeparted(const std::vector<Seat>& old_seats);
  v1::OpError Superseded(const std::string& worker_id, uint64_t newer) const;
  v1::OpError Stale(const v1::Fence& fence) const;
  v1::OpError Ended() const;
  std::optional<v1::OpError> CheckGeneration(const v1::Fence& fence) const;

  void Enqueue(CallId call, const v1::JoinRequest& request, const Caller& caller);
  void DropWaiting(const std::string& worker_id, const v1::OpError& error);
  void Unqueue(absl::flat_hash_map<std::string, Waiting>::iterator it);
  Kind KindOf(const v1::JoinRequest& request) const;
  void Recount();
  void Evaluate();
  void Seal(int world_size);
  void BeginGeneration(bool counters_known);
  void FillSeat(const v1::JoinRequest& request, const std::string& node,
                v1::SeatRecord* record) const;
  void Reseat(Seat* seat, CallId call, const v1::JoinRequest& request, const Caller& caller);
  void SendSeat(CallId call, const Seat& seat);
  void EndGeneration(const std::string& why, std::vector<v1::Culprit> culprits);
  void WorkerGone(Seat* seat, v1::WorkerState state, const v1::ExitCause& cause);
  std::string GoneText(const Seat& seat) const;
  v1::OpError RendezvousTimeout() const;
  void Strike(const std::string& host, const std::string& what);
  void QuarantineHost(const std::string& host, absl::Duration length, const std::string& reason,
                      bool automatic);
  void Close(const std::string& why);
  void EmitMember(const Seat& seat);
  v1::Member MakeMember(const Seat& seat) const;
  void RenewLease(Seat* seat) { seat->last_seen = impl_->now_; }

  std::optional<v1::OpError> Txn(const v1::TxnRequest& request, const Seat* seat,
                                 v1::OpResult* result);
  void KvChanged(const std::vector<KvChange>& changes);
  void TriggersChanged(std::vector<v1::TriggerChanged> changes);
  void AgreeDone(std::vector<AgreeSet::Done> done);
  uint64_t AllRecords() const {
    return std::max({membership_record_, kv_record_, barrier_record_});
  }
  void SnapshotTo(v1::CoordinatorSnapshot* snapshot) const;
  const char* StateName() const;

  v1::ReplyHeader Header() const override { return impl_->Header(); }
  v1::Culprit DescribeRank(int rank) const override;
  void AskStack(int rank) override;
  void Deliver(const std::vector<CallId>& calls, std::shared_ptr<const Answer> answer) override;
  void JournalEnd(const std::string& barrier_id, uint64_t counter, const Answer& answer) override;
  void Report(const v1::BarrierReport& report) override;
  void Blame(absl::Span<const int32_t> ranks) override;

  Impl* const impl_;
  const std::string id_;
  v1::RendezvousSpec spec_;

  uint64_t generation_ = 0;  // the last sealed
  bool sealed_ = false;      // and not ended
  bool closed_ = false;
  std::string why_ended_;
  std::vector<v1::Culprit> end_culprits_;
  std::vector<Seat> seats_;  // by rank
  absl::flat_hash_map<std::string, int> rank_of_;
  int alive_ = 0;
  uint64_t digest_ = 0;
  int num_nodes_ = 0;
  absl::btree_set<std::pair<absl::Time, int>>
      lease_checks_;  // when to look at a rank again: lazy, never too late
  absl::Time lease_floor_ = absl::InfinitePast();  // every lease counts at least from here

  absl::flat_hash_map<std::string, Waiting> waiting_;
  std::array<int, 4> waiting_kinds_ = {};
  uint64_t next_order_ = 1;
  absl::Time attempt_deadline_ = absl::InfiniteFuture();
  absl::Time last_call_at_ = absl::InfiniteFuture();
  absl::Time quarantine_check_ =
      absl::InfiniteFuture();  // when the next host may be used again, if anyone waits
  absl::Time hold_until_ = absl::InfinitePast();
  absl::flat_hash_map<std::string, std::vector<uint64_t>> fenced_;
  std::deque<std::string> fenced_order_;  // its keys, oldest first
  // The last incarnation of workers without a seat in the current generation.
  absl::flat_hash_map<std::string, uint64_t> departed_;
  std::deque<std::string> departed_order_;  // oldest first; may name some that came back
  std::deque<std::string> operators_;       // clients in dedupe_ that are no workers, oldest first
  absl::btree_map<std::string, HostState> hosts_;

  KvStore kv_;
  std::unique_ptr<WatchLog> log_;
  Dedupe<StoredAnswer> dedupe_;
  TriggerSet triggers_;
  std::unique_ptr<BarrierSet> barriers_;
  std::unique_ptr<AgreeSet> agree_;

  // The latest records that hold changes of these kinds: who is told of them waits for those.
  uint64_t membership_record_ = 0;
  uint64_t kv_record_ = 0;
  uint64_t barrier_record_ = 0;
  bool membership_touched_ = false;
  bool kv_touched_ = false;
  bool barrier_touched_ = false;
  bool watch_touched_ = false;
  BarrierCounts seen_counts_;
  absl::Time scheduled_ = absl::InfiniteFuture();
  absl::Time touched_ = absl::InfinitePast();  // by an event, or by a beat of one of its workers
  bool expired_ = false;                       // to be removed
};

void Core::Impl::Begin(absl::Time now, Output* out) {
  // A gap much longer than the ticks in it shows that this process stood still (stopped, swapped,
  // suspended): its workers' beats may be waiting unread, so nobody is expired for what happened
  // meanwhile.
  if (now_ != absl::InfinitePast() && now > now_) {
    const absl::Duration gap = now - now_;
    now_ = now;
    if (gap > absl::Milliseconds(20)) {
      for (auto& [id, job] : jobs_) {
        if (job->sealed_ && gap > job->Lease() / 2) job->Resume();
      }
    }
  }
  now_ = std::max(now_, now);
  out_ = out;
  event_revision_ = 0;
  record_.Clear();
  first_reply_ = out->replies.size();
  first_directive_ = out->directives.size();
}

void Core::Impl::End(Job* job) {
  if (record_.changes_size() > 0) {
    const uint64_t revision = Rev();
    record_.set_revision(revision);
    record_.set_term(term_);
    last_record_ = revision;
    out_->records.push_back({revision, record_.SerializeAsString()});
    for (size_t i = first_reply_; i < out_->replies.size(); ++i)
      out_->replies[i].durable_revision = revision;
    for (size_t i = first_directive_; i < out_->directives.size(); ++i) {
      out_->directives[i].durable_revision = revision;
    }
    if (job != nullptr) {
      if (job->membership_touched_) job->membership_record_ = revision;
      if (job->kv_touched_) job->kv_record_ = revision;
      if (job->barrier_touched_) job->barrier_record_ = revision;
      if (job->watch_touched_) job->log_->MarkDurable(revision);
    }
    record_.Clear();
  }
  if (options_.mutants.acknowledges_before_durable) {
    for (size_t i = first_reply_; i < out_->replies.size(); ++i)
      out_->replies[i].durable_revision = 0;
  }
  event_revision_ = 0;
  first_reply_ = out_->replies.size();
  first_directive_ = out_->directives.size();
  if (job == nullptr) return;
  if (job->watch_touched_) out_->changed_jobs.push_back(job->id_);
  job->membership_touched_ = job->kv_touched_ = job->barrier_touched_ = job->watch_touched_ = false;
  if (job->barriers_ != nullptr) {
    const BarrierCounts& counts = job->barriers_->counts();
    if (counts.passed > job->seen_counts_.passed) {
      stats_.barriers_passed += counts.passed - job->seen_counts_.passed;
      const double seconds = absl::ToDoubleSeconds(counts.last_wait);
      stats_.barrier_wait_sum_seconds += seconds;
      int bucket = 0;
      for (double bound = 1e-4; bucket < CoreStats::kWaitBuckets - 1 && seconds > bound; bound *= 2)
        ++bucket;
      ++stats_.barrier_wait_buckets[bucket];
    }
    stats_.barriers_failed += counts.failed - job->seen_counts_.failed;
    job->seen_counts_ = counts;
  }
  job->touched_ = now_;
  const absl::Time next = job->NextDeadline();
  if (next != job->scheduled_) {
    deadlines_.erase({job->scheduled_, job->id_});
    job->scheduled_ = next;
    if (next != absl::InfiniteFuture()) deadlines_.insert({next, job->id_});
  }
}

std::optional<v1::OpError> Core::Impl::CheckJob(const v1::Fence& fence, Job** job) {
  if (fence.term_seen() > term_) {
    out_->deposed = true;
    v1::OpError error =
        MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_STOPPING,
                  absl::StrCat("this coordinator serves term ", term_, ", but term ",
                               fence.term_seen(), " has begun elsewhere: ask the newer one"));
    error.mutable_detail()->set_current_term(term_);
    return error;
  }
  *job = FindJob(fence.job_id());
  if (*job == nullptr) return UnknownJob(fence.job_id());
  return std::nullopt;
}

v1::OpError Core::Impl::Job::Superseded(const std::string& worker_id, uint64_t newer) const {
  v1::OpError error =
      MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_SUPERSEDED,
                absl::StrCat("worker ", Quoted(worker_id), " has been started anew (incarnation ",
                             absl::Hex(newer), "): this older process must end"));
  error.mutable_detail()->set_current_incarnation(newer);
  error.mutable_detail()->set_current_generation(generation_);
  error.mutable_detail()->set_current_term(impl_->term_);
  return error;
}

v1::OpError Core::Impl::Job::Stale(const v1::Fence& fence) const {
  v1::OpError error =
      MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_STALE_GENERATION,
                absl::StrCat("generation ", fence.generation(), " of job ", Quoted(id_),
                             " is over, generation ", generation_, " is current: join again"));
  error.mutable_detail()->set_current_generation(generation_);
  error.mutable_detail()->set_current_term(impl_->term_);
  return error;
}

v1::OpError Core::Impl::Job::Ended() const {
  v1::OpError error = MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_GENERATION_ENDED,
                                absl::StrCat("generation ", generation_, " of job ", Quoted(id_),
                                             " has ended: ", why_ended_, "; join the next one"));
  error.mutable_detail()->set_current_generation(generation_);
  error.mutable_detail()->set_current_term(impl_->term_);
  for (const v1::Culprit& culprit : end_culprits_)
    *error.mutable_detail()->add_culprits() = culprit;
  return error;
}

std::optional<v1::OpError> Core::Impl::Job::CheckGeneration(const v1::Fence& fence) const {
  if (fence.generation() < generation_ && !impl_->options_.mutants.accepts_stale_generation)
    return Stale(fence);
  if (fence.generation() > generation_) {
    v1::OpError error =
        MakeError(absl::StatusCode::kInternal, v1::ERROR_REASON_FUTURE_GENERATION,
                  absl::StrCat("generation ", fence.generation(), " of job ", Quoted(id_),
                               " was never sealed (", generation_,
                               " is the last): the caller or the journal is broken"));
    error.mutable_detail()->set_current_generation(generation_);
    error.mutable_detail()->set_current_term(impl_->term_);
    return error;
  }
  return std::nullopt;
}

std::optional<v1::OpError> Core::Impl::CheckFence(const v1::Fence& fence, bool operators,
                                                  Who* who) {
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return error;
  who->job = job;
  const auto refuse = [&](v1::OpError error) {
    ++stats_.fenced_calls;
    error.mutable_detail()->set_current_generation(job->generation_);
    error.mutable_detail()->set_current_term(term_);
    return error;
  };
  if (fence.worker_id().empty()) {
    if (!operators) {
      return BadField("fence.worker_id",
                      "only a seated worker may call this: fence.worker_id is empty");
    }
    if (fence.generation() != 0) {
      if (auto error = job->CheckGeneration(fence)) return refuse(*std::move(error));
    }
    return std::nullopt;
  }
  Seat* const seat = job->FindSeat(fence.worker_id());
  const auto waiting = job->waiting_.find(fence.worker_id());
  const bool waits = waiting != job->waiting_.end();
  const uint64_t newest = waits ? waiting->second.request.fence().incarnation()
                                : (seat != nullptr ? seat->record.incarnation() : 0);
  if (job->IsFenced(fence.worker_id(), fence.incarnation())) {
    return refuse(job->Superseded(fence.worker_id(), newest));
  }
  if (seat != nullptr && seat->record.incarnation() != fence.incarnation() &&
      !(waits && newest == fence.incarnation())) {
    return refuse(job->Superseded(fence.worker_id(), newest));
  }
  if (auto error = job->CheckGeneration(fence)) return refuse(*std::move(error));
  if (!job->sealed_ && job->generation_ > 0 && seat != nullptr) return refuse(job->Ended());
  if (seat == nullptr || seat->record.incarnation() != fence.incarnation()) {
    return refuse(
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                  absl::StrCat("worker ", Quoted(fence.worker_id()), " has no seat in generation ",
                               job->generation_, " of job ", Quoted(job->id_), ": join first")));
  }
  switch (seat->record.state()) {
    case v1::WORKER_STATE_RUNNING:
      break;
    case v1::WORKER_STATE_LOST:
      return refuse(MakeError(
          absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_LEASE_EXPIRED,
          absl::StrCat("the lease of worker ", Quoted(fence.worker_id()), " (rank ", seat->rank(),
                       ") ran out after ", absl::FormatDuration(job->Lease()),
                       " without a sign of life: join again")));
    default:
      return refuse(
          MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                    absl::StrCat("worker ", Quoted(fence.worker_id()), " (rank ", seat->rank(),
                                 ") ", job->GoneText(*seat), ": join again if it lives")));
  }
  job->RenewLease(seat);
  who->seat = seat;
  return std::nullopt;
}

template <typename Request, typename F>
void Core::Impl::Once(CallId call, const Request& request, int kind, bool operators, bool reads,
                      Job** touched, F f) {
  const v1::Fence& fence = request.fence();
  const bool dedupe =
      fence.request_id() != 0 && (!fence.worker_id().empty() || fence.incarnation() != 0);
  const std::string client = ClientOf(fence.worker_id(), fence.incarnation());
  uint64_t hash = 0;
  if (dedupe) {
    if (Job* const job = FindJob(fence.job_id()); job != nullptr && fence.term_seen() <= term_) {
      hash = HashRequest(request, kind);
      StoredAnswer stored;
      switch (job->dedupe_.Find(client, fence.incarnation(), fence.request_id(), hash, &stored)) {
        case Dedupe<StoredAnswer>::State::kKnown:
          ++stats_.repeated_requests;
          Send(call, stored.answer, std::max(stored.durable_revision, reads ? job->kv_record_ : 0));
          return;
        case Dedupe<StoredAnswer>::State::kReused:
          SendError(
              call,
              MakeError(
                  absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_KEY_REUSED,
                  absl::StrCat(
                      "request_id ", fence.request_id(), " of worker ", Quoted(fence.worker_id()),
                      " was used for another request: count on by one for each new request")),
              0);
          return;
        case Dedupe<StoredAnswer>::State::kForgotten:
          SendError(
              call,
              MakeError(absl::StatusCode::kOutOfRange, v1::ERROR_REASON_RESULT_FORGOTTEN,
                        absl::StrCat("request_id ", fence.request_id(), " of worker ",
                                     Quoted(fence.worker_id()), " is older than the last ",
                                     options_.kept_answers,
                                     " answers that are kept: whether it was done cannot be told")),
              0);
          return;
        case Dedupe<StoredAnswer>::State::kNew:
          break;
      }
    }
  }
  Who who;
  if (auto error = CheckFence(fence, operators, &who)) {
    SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
    return;
  }
  *touched = who.job;
  v1::OpResult result;
  if (auto error = f(who, &result)) {
    SendError(call, *std::move(error), reads ? who.job->AllRecords() : who.job->membership_record_);
    return;
  }
  auto answer = std::make_shared<Answer>(std::move(result), false);
  if (dedupe) {
    uint64_t durable = 0;
    if (record_.changes_size() > 0) {
      durable = Rev();
      v1::RequestAnswered* answered = Change()->mutable_request_answered();
      answered->set_job_id(who.job->id_);
      answered->set_worker_id(fence.worker_id());
      answered->set_incarnation(fence.incarnation());
      answered->set_request_id(fence.request_id());
      answered->set_request_hash(hash);
      *answered->mutable_answer() = answer->result();
    }
    who.job->RememberAnswer(fence.worker_id(), fence.incarnation(), fence.request_id(), hash,
                            {answer, durable});
  }
  Send(call, std::move(answer), reads ? who.job->AllRecords() : who.job->membership_record_);
}

v1::Culprit Core::Impl::Job::DescribeRank(int rank) const {
  v1::Culprit culprit;
  culprit.set_rank(rank);
  culprit.set_generation(generation_);
  if (rank < 0 || static_cast<size_t>(rank) >= seats_.size()) return culprit;
  const Seat& seat = seats_[rank];
  culprit.set_worker_id(seat.record.worker_id());
  culprit.set_host(seat.record.topology().host());
  culprit.set_pid(seat.record.pid());
  culprit.set_last_step(seat.step);
  culprit.set_last_collective(seat.last_collective);
  culprit.set_native_stack(seat.stack);
  *culprit.mutable_heartbeat_age() = ToProto(impl_->now_ - seat.last_seen);
  const v1::ExitCause& exit = seat.record.exit();
  switch (seat.record.state()) {
    case v1::WORKER_STATE_EXITED:
      culprit.set_process_state(exit.signal() != 0
                                    ? absl::StrCat("killed(", exit.signal(), ")")
                                    : absl::StrCat("exited(", exit.exit_code(), ")"));
      break;
    case v1::WORKER_STATE_LEFT:
      culprit.set_process_state("left");
      break;
    case v1::WORKER_STATE_LOST:
      culprit.set_process_state(seat.process_state.empty() ? "lost" : seat.process_state);
      break;
    default:
      culprit.set_process_state(seat.process_state.empty() ? "unknown" : seat.process_state);
  }
  return culprit;
}

std::string Core::Impl::Job::GoneText(const Seat& seat) const {
  const v1::ExitCause& exit = seat.record.exit();
  switch (seat.record.state()) {
    case v1::WORKER_STATE_EXITED:
      return exit.signal() != 0 ? absl::StrCat("was killed by signal ", exit.signal())
                                : absl::StrCat("exited with code ", exit.exit_code());
    case v1::WORKER_STATE_LOST:
      return absl::StrCat("gave no sign of life for ", absl::FormatDuration(Lease()));
    case v1::WORKER_STATE_LEFT:
      return "left the job";
    case v1::WORKER_STATE_FENCED:
      return "was started anew";
    default:
      return "is gone";
  }
}

v1::Member Core::Impl::Job::MakeMember(const Seat& seat) const {
  v1::Member member;
  member.set_rank(seat.rank());
  member.set_worker_id(seat.record.worker_id());
  member.set_incarnation(seat.record.incarnation());
  member.set_state(seat.record.state());
  member.set_host(seat.record.topology().host());
  member.set_pid(seat.record.pid());
  member.set_last_step(seat.step);
  *member.mutable_heartbeat_age() =
      ToProto(std::max(impl_->now_ - seat.last_seen, absl::ZeroDuration()));
  member.set_phase(seat.phase);
  member.set_last_collective(seat.last_collective);
  if (seat.record.has_exit()) *member.mutable_exit() = seat.record.exit();
  return member;
}

void Core::Impl::Job::EmitMember(const Seat& seat) {
  v1::WatchEvent event;
  *event.mutable_member() = MakeMember(seat);
  log_->Other(impl_->Rev(), std::move(event));
  watch_touched_ = true;
}

void Core::Impl::Job::FenceIncarnation(const std::string& worker_id, uint64_t incarnation) {
  RememberFenced(worker_id, incarnation);
  v1::IncarnationFenced* fenced = impl_->Change()->mutable_incarnation_fenced();
  fenced->set_job_id(id_);
  fenced->set_worker_id(worker_id);
  fenced->set_incarnation(incarnation);
  membership_touched_ = true;
  dedupe_.Forget(worker_id);
}

void Core::Impl::Job::RememberFenced(absl::string_view worker_id, uint64_t incarnation) {
  const auto [it, is_new] = fenced_.try_emplace(worker_id);
  it->second.push_back(incarnation);
  if (it->second.size() > kMaxFenced) it->second.erase(it->second.begin());
  if (!is_new) return;
  fenced_order_.emplace_back(worker_id);
  if (fenced_order_.size() <= kMaxDeparted + 4 * seats_.size()) return;
  fenced_.erase(fenced_order_.front());
  fenced_order_.pop_front();
}

void Core::Impl::Job::RememberDeparted(const std::string& worker_id, uint64_t incarnation) {
  departed_[worker_id] = incarnation;
  departed_order_.push_back(worker_id);
}

void Core::Impl::Job::NoteDeparted(const std::vector<Seat>& old_seats) {
  for (const Seat& seat : seats_) departed_.erase(seat.record.worker_id());
  for (const Seat& seat : old_seats) {
    if (!rank_of_.contains(seat.record.worker_id()) && !impl_->options_.mutants.forgets_departed)
      RememberDeparted(seat.record.worker_id(), seat.record.incarnation());
  }
  // Those that came back leave the order; of those that left again, the last time counts.
  absl::flat_hash_set<absl::string_view> listed;
  std::deque<std::string> order;
  for (auto it = departed_order_.rbegin(); it != departed_order_.rend(); ++it) {
    if (departed_.contains(*it) && listed.insert(*it).second) order.push_front(*it);
  }
  departed_order_ = std::move(order);
  for (; departed_order_.size() > kMaxDeparted + 2 * seats_.size(); departed_order_.pop_front()) {
    departed_.erase(departed_order_.front());
    dedupe_.Forget(departed_order_.front());
  }
}

void Core::Impl::Job::RememberAnswer(const std::string& worker_id, uint64_t incarnation,
                                     uint64_t request_id, uint64_t hash, StoredAnswer answer) {
  const std::string client = ClientOf(worker_id, incarnation);
  if (worker_id.empty() && !dedupe_.Knows(client)) {
    operators_.push_back(client);
    if (operators_.size() > kMaxOperators) {
      dedupe_.Forget(operators_.front());
      operators_.pop_front();
    }
  }
  dedupe_.Store(client, incarnation, request_id, hash, std::move(answer));
}

void Core::Impl::Job::Kill(const std::string& node, const std::string& worker_id,
                           uint64_t incarnation) {
  auto directive = std::make_shared<v1::Directive>();
  v1::KillWorker* kill = directive->mutable_kill_worker();
  kill->set_job_id(id_);
  kill->set_worker_id(worker_id);
  kill->set_incarnation(incarnation);
  kill->set_why("a newer incarnation took its seat");
  impl_->Direct(node, std::move(directive), membership_record_);
}

void Core::Impl::Job::TellAgain(const std::string& node, const v1::WorkerBeat& worker) {
  if (IsFenced(worker.worker_id(), worker.incarnation()))
    return Kill(node, worker.worker_id(), worker.incarnation());
  const auto waiting = waiting_.find(worker.worker_id());
  if (waiting != waiting_.end() &&
      waiting->second.request.fence().incarnation() == worker.incarnation())
    return;
  const Seat* const seat = FindSeat(worker.worker_id());
  const auto departed = departed_.find(worker.worker_id());
  const bool sat = seat != nullptr
                       ? seat->record.incarnation() == worker.incarnation() && !sealed_ &&
                             seat->record.state() != v1::WORKER_STATE_LEFT &&
                             seat->record.state() != v1::WORKER_STATE_EXITED
                       : departed != departed_.end() && departed->second == worker.incarnation();
  if (!sat) return;
  auto directive = std::make_shared<v1::Directive>();
  v1::GenerationEnded* told = directive->mutable_generation_ended();
  told->set_job_id(id_);
  told->set_generation(sealed_ ? generation_ - 1 : generation_);
  told->set_why(sealed_ ? absl::StrCat("generation ", generation_, " has been sealed")
                        : why_ended_);
  if (!sealed_) {
    for (const v1::Culprit& culprit : end_culprits_) *told->add_culprits() = culprit;
  }
  impl_->Direct(node, std::move(directive), membership_record_);
}

Kind Core::Impl::Job::KindOf(const v1::JoinRequest& request) const {
  const auto it = hosts_.find(request.topology().host());
  if (it != hosts_.end() && it->second.until > impl_->now_) {
    return it->second.automatic ? Kind::kLastResort : Kind::kBlocked;
  }
  return request.spare() ? Kind::kSpare : Kind::kOrdinary;
}

void Core::Impl::Job::Recount() {
  waiting_kinds_ = {};
  quarantine_check_ = absl::InfiniteFuture();
  for (const auto& [host, state] : hosts_) {
    if (state.until > impl_->now_ && !waiting_.empty())
      quarantine_check_ = std::min(quarantine_check_, state.until);
  }
  for (auto& [worker_id, waiting] : waiting_) {
    waiting.kind = KindOf(waiting.request);
    ++waiting_kinds_[static_cast<int>(waiting.kind)];
  }
}

void Core::Impl::Job::Unqueue(absl::flat_hash_map<std::string, Waiting>::iterator it) {
  --waiting_kinds_[static_cast<int>(it->second.kind)];
  for (const CallId call : it->second.calls) impl_->held_.erase(call);
  waiting_.erase(it);
  if (waiting_.empty())
    attempt_deadline_ = last_call_at_ = quarantine_check_ = absl::InfiniteFuture();
}

void Core::Impl::Job::DropWaiting(const std::string& worker_id, const v1::OpError& error) {
  const auto it = waiting_.find(worker_id);
  if (it == waiting_.end()) return;
  for (const CallId call : it->second.calls) impl_->SendError(call, error, membership_record_);
  Unqueue(it);
}

void Core::Impl::Job::Enqueue(CallId call, const v1::JoinRequest& request, const Caller& caller) {
  const std::string& worker_id = request.fence().worker_id();
  const uint64_t incarnation = request.fence().incarnation();
  auto it = waiting_.find(worker_id);
  uint64_t order = next_order_;
  if (it != waiting_.end() && it->second.request.fence().incarnation() != incarnation) {
    FenceIncarnation(worker_id, it->second.request.fence().incarnation());
    order = it->second.order;
    const v1::OpError error = Superseded(worker_id, incarnation);
    for (const CallId old : it->second.calls) impl_->SendError(old, error, membership_record_);
    Unqueue(it);
    it = waiting_.end();
  }
  if (it == waiting_.end()) {
    it = waiting_.try_emplace(worker_id).first;
    it->second.order = order;
    if (order == next_order_) ++next_order_;
    it->second.kind = KindOf(request);
    ++waiting_kinds_[static_cast<int>(it->second.kind)];
    const auto host = hosts_.find(request.topology().host());
    if (host != hosts_.end() && host->second.until > impl_->now_) {
      quarantine_check_ = std::min(quarantine_check_, host->second.until);
    }
  }
  Waiting& waiting = it->second;
  waiting.request = request;
  waiting.node = std::string(caller.node);
  if (waiting.calls.size() >= kMaxCallsOfJoin) {
    impl_->SendError(
        waiting.calls.front(),
        MakeError(absl::StatusCode::kCancelled, v1::ERROR_REASON_SUPERSEDED,
                  absl::StrCat("worker ", Quoted(worker_id), " asked for its seat again")),
        0);
    impl_->held_.erase(waiting.calls.front());
    waiting.calls.erase(waiting.calls.begin());
  }
  waiting.calls.push_back(call);
  impl_->held_[call] = {id_, Held::kJoin, worker_id};
  if (attempt_deadline_ == absl::InfiniteFuture() && !request.spare()) {
    attempt_deadline_ = impl_->now_ + JoinTimeout();
  }
  // A kind may have changed with its request.
  const Kind kind = KindOf(request);
  if (kind != waiting.kind) {
    --waiting_kinds_[static_cast<int>(waiting.kind)];
    waiting.kind = kind;
    ++waiting_kinds_[static_cast<int>(kind)];
  }
  Evaluate();
}

void Core::Impl::Job::Evaluate() {
  if (sealed_ || closed_ || waiting_.empty()) {
    last_call_at_ = absl::InfiniteFuture();
    return;
  }
  const int ordinary = waiting_kinds_[static_cast<int>(Kind::kOrdinary)];
  const int spares = waiting_kinds_[static_cast<int>(Kind::kSpare)];
  const int last_resorts = waiting_kinds_[static_cast<int>(Kind::kLastResort)];
  const std::optional<int> world = FeasibleWorld(spec_, ordinary, spares, last_resorts);
  if (!world.has_value()) {
    last_call_at_ = absl::InfiniteFuture();
    return;
  }
  const int step = std::max(1, spec_.divisible_by());
  if (ordinary >= spec_.max_workers() / step * step || last_call_at_ <= impl_->now_) {
    Seal(*world);
    return;
  }
  if (last_call_at_ == absl::InfiniteFuture()) {
    absl::Duration last_call =
        spec_.has_last_call() ? FromProto(spec_.last_call()) : impl_->options_.default_last_call;
    if (generation_ > 0 && spares > 0)
      last_call = std::min(last_call, impl_->options_.recovery_last_call);
    last_call_at_ = impl_->now_ + last_call;
  }
}

void Core::Impl::Job::FillSeat(const v1::JoinRequest& request, const std::string& node,
                               v1::SeatRecord* record) const {
  record->set_worker_id(request.fence().worker_id());
  record->set_incarnation(request.fence().incarnation());
  *record->mutable_topology() = request.topology();
  record->set_endpoint(request.endpoint());
  record->set_pid(request.pid());
  record->set_node(node);
  record->set_state(v1::WORKER_STATE_RUNNING);
}

void Core::Impl::Job::Seal(int world_size) {
  std::vector<const std::string*> ids;
  ids.reserve(waiting_.size());
  for (const auto& [worker_id, waiting] : waiting_) {
    if (waiting.kind != Kind::kBlocked) ids.push_back(&worker_id);
  }
  // The hash map's order is not reproducible; the order of arrival is.
  std::sort(ids.begin(), ids.end(), [&](const std::string* a, const std::string* b) {
    return waiting_.find(*a)->second.order < waiting_.find(*b)->second.order;
  });
  std::vector<Candidate> candidates;
  candidates.reserve(ids.size());
  for (const std::string* worker_id : ids) {
    const Waiting& waiting = waiting_.find(*worker_id)->second;
    Candidate candidate;
    candidate.worker_id = *worker_id;
    candidate.topology = waiting.request.topology();
    candidate.preferred_rank = waiting.request.preferred_rank();
    const Seat* const seat = FindSeat(*worker_id);
    if (seat != nullptr && !(impl_->options_.mutants.spare_moves_survivors &&
                             waiting_kinds_[static_cast<int>(Kind::kSpare)] > 0)) {
      candidate.previous_rank = seat->rank();
    }
    candidate.spare = waiting.kind == Kind::kSpare;
    candidate.last_resort = waiting.kind == Kind::kLastResort;
    candidate.order = waiting.order;
    candidates.push_back(std::move(candidate));
  }
  std::vector<FormerSeat> former;
  former.reserve(seats_.size());
  for (const Seat& seat : seats_) {
    const v1::Topology& t = seat.record.topology();
    former.push_back({t.host(), t.rack(), t.nvlink_domain()});
  }
  const std::vector<int> order = AssignRanks(candidates, world_size, former);

  const std::vector<Seat> old_seats = std::move(seats_);
  seats_.assign(world_size, Seat());
  std::vector<std::vector<CallId>> calls(world_size);
  absl::flat_hash_map<std::string, int> nodes;
  for (int rank = 0; rank < world_size; ++rank) {
    const auto it = waiting_.find(candidates[order[rank]].worker_id);
    Seat& seat = seats_[rank];
    FillSeat(it->second.request, it->second.node, &seat.record);
    seat.record.set_rank(rank);
    const std::string& host = seat.record.topology().host();
    const auto [node, is_new] = nodes.try_emplace(host, static_cast<int>(nodes.size()));
    seat.record.set_node_rank(node->second);
    seat.last_seen = impl_->now_;
    calls[rank] = it->second.calls;
    Unqueue(it);
  }
  num_nodes_ = static_cast<int>(nodes.size());
  ++generation_;
  sealed_ = true;
  why_ended_.clear();
  end_culprits_.clear();
  digest_ = FingerprintTable(seats_);
  last_call_at_ = attempt_deadline_ = absl::InfiniteFuture();
  for (const auto& [worker_id, waiting] : waiting_) {
    if (!waiting.request.spare()) attempt_deadline_ = impl_->now_ + JoinTimeout();
  }

  v1::GenerationSealed* sealed = impl_->Change()->mutable_generation_sealed();
  sealed->set_job_id(id_);
  sealed->set_generation(generation_);
  sealed->set_table_digest(digest_);
  sealed->set_num_nodes(num_nodes_);
  for (const Seat& seat : seats_) *sealed->add_seats() = seat.record;
  membership_touched_ = true;
  ++impl_->stats_.generations_sealed;

  BeginGeneration(true);
  NoteDeparted(old_seats);
  std::vector<KvChange> changes;
  for (const Seat& seat : old_seats) {
    if (!rank_of_.contains(seat.record.worker_id()))
      kv_.DropLease(seat.record.worker_id(), &changes);
  }
  KvChanged(changes);
  std::vector<v1::TriggerChanged> triggers;
  triggers_.StartGeneration(world_size, &triggers);
  TriggersChanged(std::move(triggers));
  v1::WatchEvent event;
  event.set_generation_sealed(generation_);
  log_->Other(impl_->Rev(), std::move(event));
  watch_touched_ = true;
  for (int rank = 0; rank < world_size; ++rank) {
    for (const CallId call : calls[rank]) SendSeat(call, seats_[rank]);
  }
  impl_->Note(id_, false,
              absl::StrCat("generation ", generation_, " sealed with ", world_size, " workers on ",
                           num_nodes_, " hosts"));
}

void Core::Impl::Job::BeginGeneration(bool counters_known) {
  rank_of_.clear();
  lease_checks_.clear();
  alive_ = 0;
  const int world_size = static_cast<int>(seats_.size());
  const absl::Time check =
      impl_->now_ == absl::InfinitePast() ? absl::InfinitePast() : impl_->now_ + Lease();
  for (const Seat& seat : seats_) {
    rank_of_[seat.record.worker_id()] = seat.rank();
    alive_ += seat.alive() ? 1 : 0;
    if (seat.alive()) lease_checks_.insert({check, seat.rank()});
  }
  BarrierOptions options;
  options.default_timeout = impl_->options_.default_barrier_timeout;
  options.default_soft_timeout = impl_->options_.default_soft_timeout;
  options.diag_budget = impl_->options_.diag_budget;
  options.diag_max_stacks = impl_->options_.diag_max_stacks;
  options.kept_results = impl_->options_.kept_barrier_results;
  options.kept_bytes = impl_->options_.kept_barrier_bytes;
  options.release_one_early = impl_->options_.mutants.barrier_releases_one_early;
  barriers_ = std::make_unique<BarrierSet>(options, generation_, world_size, counters_known, this);
  seen_counts_ = {};
  agree_ = std::make_unique<AgreeSet>(
      world_size, counters_known,
      [this](int rank) -> std::optional<uint64_t> {
        if (!seats_[rank].alive()) return std::nullopt;
        return seats_[rank].record.incarnation();
      },
      [this](int rank) { return CulpritText(DescribeRank(rank)); });
}

void Core::Impl::Job::SendSeat(CallId call, const Seat& seat) {
  v1::OpResult result;
  v1::JoinReply* reply = result.mutable_join();
  *reply->mutable_header() = impl_->Header();
  reply->set_generation(generation_);
  reply->set_rank(seat.rank());
  reply->set_world_size(static_cast<int>(seats_.size()));
  reply->set_table_digest(digest_);
  reply->set_generation_prefix(absl::StrCat("gen/", generation_, "/"));
  reply->set_node_rank(seat.record.node_rank());
  reply->set_num_nodes(num_nodes_);
  impl_->Send(call, std::move(result), membership_record_);
}

void Core::Impl::Job::Reseat(Seat* seat, CallId call, const v1::JoinRequest& request,
                             const Caller& caller) {
  const int rank = seat->rank();
  const int node_rank = seat->record.node_rank();
  const bool was_alive = seat->alive();
  const std::string& worker_id = request.fence().worker_id();
  if (seat->record.incarnation() != request.fence().incarnation()) {
    FenceIncarnation(worker_id, seat->record.incarnation());
    if (was_alive) {
      Kill(seat->record.node(), worker_id, seat->record.incarnation());
    }
    std::vector<KvChange> changes;
    kv_.DropLease(worker_id, &changes);
    KvChanged(changes);
  }
  if (was_alive) {
    // Nobody may see both incarnations in one agreement: the old one leaves first.
    seat->record.set_state(v1::WORKER_STATE_FENCED);
    std::vector<AgreeSet::Done> done;
    agree_->RankGone(rank, impl_->Header(), &done);
    AgreeDone(std::move(done));
  } else {
    ++alive_;
  }
  *seat = Seat();
  FillSeat(request, std::string(caller.node), &seat->record);
  seat->record.set_rank(rank);
  seat->record.set_node_rank(node_rank);
  seat->last_seen = impl_->now_;
  lease_checks_.insert({impl_->now_ + Lease(), rank});
  digest_ = FingerprintTable(seats_);
  barriers_->RankReplaced(rank, impl_->now_);
  agree_->RankReplaced(rank);
  triggers_.RankReplaced(rank);
  v1::SeatTaken* taken = impl_->Change()->mutable_seat_taken();
  taken->set_job_id(id_);
  taken->set_generation(generation_);
  *taken->mutable_seat() = seat->record;
  taken->set_table_digest(digest_);
  membership_touched_ = true;
  EmitMember(*seat);
  SendSeat(call, *seat);
}

void Core::Impl::Job::EndGeneration(const std::string& why, std::vector<v1::Culprit> culprits) {
  if (!sealed_) return;
  sealed_ = false;
  why_ended_ = why;
  end_culprits_ = std::move(culprits);
  ++impl_->stats_.generations_ended;
  v1::GenerationClosed* ended = impl_->Change()->mutable_generation_closed();
  ended->set_job_id(id_);
  ended->set_generation(generation_);
  ended->set_why(why);
  for (const v1::Culprit& culprit : end_culprits_) *ended->add_culprits() = culprit;
  membership_touched_ = true;

  const v1::OpError error = Ended();
  barriers_->EndAll(error);
  std::vector<AgreeSet::Done> done;
  agree_->EndAll(error, &done);
  AgreeDone(std::move(done));
  const std::vector<CallId> waits = kv_.TakeWorkerWaits();
  if (!waits.empty()) {
    v1::OpResult result;
    *result.mutable_error() = error;
    Deliver(waits, std::make_shared<Answer>(std::move(result), true));
  }
  std::vector<KvChange> changes;
  kv_.DropPrefix(absl::StrCat("gen/", generation_, "/"), &changes);
  KvChanged(changes);
  // Keys that are tied to a lease outlive the generation with their worker, not without it.
  lease_checks_.clear();
  for (const Seat& seat : seats_) {
    if (seat.alive() && kv_.HasLease(seat.record.worker_id()))
      lease_checks_.insert({std::max(seat.last_seen, lease_floor_) + Lease(), seat.rank()});
  }

  v1::WatchEvent event;
  event.set_generation_ended(generation_);
  log_->Other(impl_->Rev(), std::move(event));
  watch_touched_ = true;
  auto directive = std::make_shared<v1::Directive>();
  v1::GenerationEnded* told = directive->mutable_generation_ended();
  told->set_job_id(id_);
  told->set_generation(generation_);
  told->set_why(why);
  for (const v1::Culprit& culprit : end_culprits_) *told->add_culprits() = culprit;
  absl::flat_hash_set<absl::string_view> nodes;
  for (const Seat& seat : seats_) {
    if (!nodes.insert(seat.record.node()).second) continue;
    impl_->Direct(seat.record.node(), directive, membership_record_);
  }
  impl_->Note(id_, !end_culprits_.empty(),
              absl::StrCat("generation ", generation_, " ended: ", why));

  attempt_deadline_ = last_call_at_ = absl::InfiniteFuture();
  if (closed_) return;
  for (const auto& [worker_id, waiting] : waiting_) {
    if (!waiting.request.spare()) attempt_deadline_ = impl_->now_ + JoinTimeout();
  }
  Recount();
  Evaluate();
}

void Core::Impl::Job::WorkerGone(Seat* seat, v1::WorkerState state, const v1::ExitCause& cause) {
  const bool was_alive = seat->alive();
  seat->record.set_state(state);
  *seat->record.mutable_exit() = cause;
  const int rank = seat->rank();
  const std::string worker_id = seat->record.worker_id();
  v1::WorkerEnded* ended = impl_->Change()->mutable_worker_ended();
  ended->set_job_id(id_);
  ended->set_worker_id(worker_id);
  ended->set_incarnation(seat->record.incarnation());
  ended->set_state(state);
  *ended->mutable_exit() = cause;
  membership_touched_ = true;
  EmitMember(*seat);
  std::vector<KvChange> changes;
  kv_.DropLease(worker_id, &changes);
  KvChanged(changes);
  if (!was_alive) return;
  --alive_;
  const bool failed =
      state == v1::WORKER_STATE_LOST ||
      (state == v1::WORKER_STATE_EXITED && (cause.exit_code() != 0 || cause.signal() != 0)) ||
      state == v1::WORKER_STATE_FENCED;
  if (state == v1::WORKER_STATE_LOST) ++impl_->stats_.workers_lost;
  if (state == v1::WORKER_STATE_EXITED && failed) ++impl_->stats_.workers_failed;
  if (!sealed_) return;
  const std::string what = GoneText(*seat);
  if (failed && state != v1::WORKER_STATE_FENCED) Strike(seat->record.topology().host(), what);
  const v1::Culprit culprit = DescribeRank(rank);
  const std::string why =
      absl::StrCat(CulpritText(culprit), " ", what,
                   cause.message().empty() ? "" : absl::StrCat(": ", cause.message()));
  if (failed && spec_.end_generation_on_failure()) {
    EndGeneration(why, {culprit});
    return;
  }
  if (failed) impl_->Note(id_, true, why);
  barriers_->RankGone(rank, what, impl_->now_);
  std::vector<AgreeSet::Done> done;
  agree_->RankGone(rank, impl_->Header(), &done);
  AgreeDone(std::move(done));
  std::vector<v1::TriggerChanged> triggers;
  triggers_.RankGone(rank, &triggers);
  TriggersChanged(std::move(triggers));
  if (alive_ == 0) EndGeneration("every worker has left", {});
}

void Core::Impl::Job::Strike(const std::string& host, const std::string& what) {
  const int limit = impl_->options_.strikes_to_quarantine;
  if (limit <= 0 || host.empty()) return;
  const absl::Time now = impl_->now_;
  for (auto it = hosts_.begin(); it != hosts_.end();) {
    std::deque<absl::Time>& strikes = it->second.strikes;
    while (!strikes.empty() && strikes.front() + impl_->options_.strike_window <= now)
      strikes.pop_front();
    it = strikes.empty() && it->second.until <= now ? hosts_.erase(it) : std::next(it);
  }
  if (hosts_.size() >= kMaxHosts && !hosts_.contains(host)) return;
  HostState& state = hosts_[host];
  state.strikes.push_back(now);
  // A job on one host has nowhere else to go.
  if (state.strikes.size() >= static_cast<size_t>(limit) && num_nodes_ > 1) {
    state.strikes.clear();
    QuarantineHost(host, impl_->options_.quarantine_for,
                   absl::StrCat("named ", limit, " times within ",
                                absl::FormatDuration(impl_->options_.strike_window),
                                ", last because a worker ", what),
                   true);
  } else if (state.strikes.size() > static_cast<size_t>(limit)) {
    state.strikes.pop_front();
  }
  v1::HostStruck* struck = impl_->Change()->mutable_host_struck();
  struck->set_job_id(id_);
  struck->set_host(host);
  struck->set_strikes(static_cast<int>(state.strikes.size()));
}

void Core::Impl::Job::QuarantineHost(const std::string& host, absl::Duration length,
                                     const std::string& reason, bool automatic) {
  HostState& state = hosts_[host];
  state.until = length > absl::ZeroDuration() ? impl_->now_ + length : absl::InfinitePast();
  state.reason = reason;
  state.automatic = automatic;
  v1::HostQuarantined* quarantined = impl_->Change()->mutable_host_quarantined();
  quarantined->set_job_id(id_);
  quarantined->set_host(host);
  *quarantined->mutable_for_() = ToProto(length);
  quarantined->set_reason(reason);
  quarantined->set_automatic(automatic);
  impl_->Note(id_, true,
              length > absl::ZeroDuration()
                  ? absl::StrCat("host ", Quoted(host), " is quarantined for ",
                                 absl::FormatDuration(length), ": ", reason)
                  : absl::StrCat("host ", Quoted(host), " is no longer quarantined"));
  Recount();
}

void Core::Impl::Job::Blame(absl::Span<const int32_t> ranks) {
  absl::btree_set<std::string> hosts;
  for (const int rank : ranks) hosts.insert(seats_[rank].record.topology().host());
  for (const std::string& host : hosts) Strike(host, "kept a barrier waiting until its deadline");
}

v1::OpError Core::Impl::Job::RendezvousTimeout() const {
  const int here = static_cast<int>(waiting_.size());
  std::string text = absl::StrCat("job ", Quoted(id_), ": ", here, " of ",
                                  spec_.min_workers() == spec_.max_workers() ? "" : "at least ",
                                  spec_.min_workers(), " workers joined within ",
                                  absl::FormatDuration(JoinTimeout()));
  v1::OpError error =
      MakeError(absl::StatusCode::kDeadlineExceeded, v1::ERROR_REASON_RENDEZVOUS_TIMEOUT, "");
  if (sealed_) {
    text = absl::StrCat("job ", Quoted(id_), ": generation ", generation_, " runs with ",
                        seats_.size(), " workers and no seat came free within ",
                        absl::FormatDuration(JoinTimeout()),
                        ": end the generation to let new workers in");
  } else {
    std::string missing;
    int count = 0;
    for (const Seat& seat : seats_) {
      if (waiting_.contains(seat.record.worker_id())) continue;
      const v1::Culprit culprit = DescribeRank(seat.rank());
      if (count++ < kNamed)
        absl::StrAppend(&missing, missing.empty() ? "" : ", ", CulpritText(culprit));
      if (count <= 64) *error.mutable_detail()->add_culprits() = culprit;
      error.mutable_detail()->add_missing_ranks(seat.rank());
    }
    if (seats_.empty()) {
      absl::flat_hash_set<int> claimed;
      for (const auto& [worker_id, waiting] : waiting_)
        claimed.insert(waiting.request.preferred_rank());
      claimed.erase(-1);
      for (int rank = 0; !claimed.empty() && rank < std::min(spec_.min_workers(), 4096); ++rank) {
        if (claimed.contains(rank)) continue;
        if (count++ < 16) absl::StrAppend(&missing, missing.empty() ? "rank " : ", rank ", rank);
        error.mutable_detail()->add_missing_ranks(rank);
      }
    }
    if (!missing.empty())
      absl::StrAppend(&text, "; missing: ", missing, count > kNamed ? " and more" : "");
    const int blocked = waiting_kinds_[static_cast<int>(Kind::kBlocked)];
    if (blocked > 0)
      absl::StrAppend(&text, "; ", blocked, " of those that came are on quarantined hosts");
    absl::StrAppend(&text, ": start the missing workers or lower min_workers");
  }
  error.set_message(std::move(text));
  return error;
}

void Core::Impl::Job::Close(const std::string& why) {
  if (closed_) return;
  closed_ = true;
  EndGeneration(why, {});
  v1::JobClosed* closed = impl_->Change()->mutable_job_closed();
  closed->set_job_id(id_);
  closed->set_why(why);
  why_ended_ = why;
  membership_touched_ = true;
  const v1::OpError error =
      MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
                absl::StrCat("job ", Quoted(id_), " is over: ", why));
  std::vector<std::string> waiting;
  for (const auto& [worker_id, one] : waiting_) waiting.push_back(worker_id);
  std::sort(waiting.begin(), waiting.end());
  for (const std::string& worker_id : waiting) DropWaiting(worker_id, error);
}

void Core::Impl::Job::Tick() {
  const absl::Time now = impl_->now_;
  if (now < hold_until_) return;
  if (Idle() && touched_ + impl_->options_.job_retention <= now) {
    expired_ = true;
    return;
  }
  if (barriers_ != nullptr) barriers_->Tick(now);
  if (agree_ != nullptr) {
    std::vector<AgreeSet::Done> done;
    agree_->Tick(now, &done);
    AgreeDone(std::move(done));
  }
  std::vector<KvStore::Ready> expired;
  kv_.TakeExpired(now, &expired);
  for (KvStore::Ready& ready : expired) {
    impl_->held_.erase(ready.call);
    impl_->SendError(ready.call, std::move(ready.error), AllRecords());
  }
  // A loss may end the generation, and with it change the checks.
  while (!lease_checks_.empty() && lease_checks_.begin()->first <= now) {
    const int rank = lease_checks_.begin()->second;
    lease_checks_.erase(lease_checks_.begin());
    Seat& seat = seats_[rank];
    if (!seat.alive()) continue;
    absl::Time expiry = std::max(seat.last_seen, lease_floor_) + Lease();
    // Who waits for its next seat is there.
    if (!sealed_ && waiting_.contains(seat.record.worker_id())) expiry = now + Lease();
    if (expiry > now) {
      lease_checks_.insert({expiry, rank});
      continue;
    }
    if (!sealed_) {
      std::vector<KvChange> changes;
      kv_.DropLease(seat.record.worker_id(), &changes);
      KvChanged(changes);
      continue;
    }
    v1::ExitCause cause;
    cause.set_lease_expired(true);
    WorkerGone(&seat, v1::WORKER_STATE_LOST, cause);
  }
  if (attempt_deadline_ <= now) {
    const v1::OpError error = RendezvousTimeout();
    std::vector<std::string> late;
    for (const auto& [worker_id, waiting] : waiting_) {
      if (!waiting.request.spare()) late.push_back(worker_id);
    }
    std::sort(late.begin(), late.end());
    for (const std::string& worker_id : late) DropWaiting(worker_id, error);
    attempt_deadline_ = last_call_at_ = absl::InfiniteFuture();
    impl_->Note(id_, true, error.message());
  }
  if (last_call_at_ <= now || quarantine_check_ <= now) {
    Recount();
    Evaluate();
  }
}

void Core::Impl::Job::AskStack(int rank) {
  const Seat& seat = seats_[rank];
  if (seat.record.node().empty() || !seat.alive()) return;
  if (impl_->queries_.size() >= kMaxQueries) impl_->queries_.clear();
  const uint64_t query = impl_->next_query_++;
  impl_->queries_[query] = {id_, seat.record.worker_id()};
  auto directive = std::make_shared<v1::Directive>();
  v1::CollectStack* ask = directive->mutable_collect_stack();
  ask->set_query_id(query);
  ask->set_worker_id(seat.record.worker_id());
  ask->set_pid(seat.record.pid());
  impl_->Direct(seat.record.node(), std::move(directive), membership_record_);
}

void Core::Impl::Job::Deliver(const std::vector<CallId>& calls,
                              std::shared_ptr<const Answer> answer) {
  const uint64_t durable = std::max(membership_record_, barrier_record_);
  for (const CallId call : calls) {
    // Whoever hung up meanwhile is no longer held.
    if (impl_->held_.erase(call) > 0) impl_->Send(call, answer, durable);
  }
}

void Core::Impl::Job::JournalEnd(const std::string& barrier_id, uint64_t counter,
                                 const Answer& answer) {
  v1::BarrierEnded* ended = impl_->Change()->mutable_barrier_ended();
  ended->set_job_id(id_);
  ended->set_generation(generation_);
  ended->set_barrier_id(barrier_id);
  ended->set_counter(counter);
  *ended->mutable_answer() = answer.result();
  barrier_touched_ = true;
}

void Core::Impl::Job::Report(const v1::BarrierReport& report) {
  impl_->out_->reports.push_back(report);
  impl_->Note(id_, true, report.message());
}

void Core::Impl::Job::AgreeDone(std::vector<AgreeSet::Done> done) {
  for (AgreeSet::Done& one : done) {
    // The empty barrier name stands for agreements in the journal.
    if (one.journal) JournalEnd("", one.counter, *one.answer);
    Deliver(one.calls, one.answer);
  }
}

void Core::Impl::Job::KvChanged(const std::vector<KvChange>& changes) {
  if (changes.empty()) return;
  const uint64_t revision = impl_->Rev();
  v1::KvChanged* record = nullptr;
  for (const KvChange& change : changes) {
    const bool was_durable =
        change.before != nullptr && change.before->klass() == v1::KV_CLASS_DURABLE;
    const bool is_durable =
        change.after != nullptr && change.after->klass() == v1::KV_CLASS_DURABLE;
    if ((was_durable || is_durable) && record == nullptr) {
      record = impl_->Change()->mutable_kv_changed();
      record->set_job_id(id_);
      kv_touched_ = true;
    }
    if (is_durable) {
      *record->add_puts() = *change.after;
    } else if (was_durable) {
      record->add_deletes(change.key);
    }
    if (change.after != nullptr) {
      log_->Put(revision, change.after);
    } else {
      log_->Deleted(revision, change.key);
    }
  }
  watch_touched_ = true;
  impl_->stats_.kv_writes += changes.size();
  std::vector<KvStore::Ready> ready;
  kv_.TakeReady(changes, &ready);
  std::shared_ptr<const v1::WaitReply> last;
  std::shared_ptr<const Answer> answer;
  for (KvStore::Ready& one : ready) {
    if (one.reply != last) {
      last = one.reply;
      v1::OpResult result;
      *result.mutable_wait() = *one.reply;
      *result.mutable_wait()->mutable_header() = impl_->Header();
      answer = std::make_shared<Answer>(std::move(result), true);
    }
    impl_->held_.erase(one.call);
    impl_->Send(one.call, answer, AllRecords());
  }
}

void Core::Impl::Job::TriggersChanged(std::vector<v1::TriggerChanged> changes) {
  for (v1::TriggerChanged& change : changes) {
    change.set_job_id(id_);
    *impl_->Change()->mutable_trigger_changed() = std::move(change);
    membership_touched_ = true;
  }
}

std::optional<v1::OpError> Core::Impl::Job::Txn(const v1::TxnRequest& request, const Seat* seat,
                                                v1::OpResult* result) {
  const absl::string_view lease =
      seat != nullptr ? absl::string_view(seat->record.worker_id()) : "";
  const uint64_t revision =
      impl_->event_revision_ != 0 ? impl_->event_revision_ : impl_->revision_ + 1;
  std::vector<KvChange> changes;
  v1::TxnReply* reply = result->mutable_txn();
  if (auto error = kv_.Txn(request, lease, revision, reply, &changes)) return error;
  if (!changes.empty()) {
    impl_->Rev();
    KvChanged(changes);
  }
  *reply->mutable_header() = impl_->Header();
  return std::nullopt;
}

const char* Core::Impl::Job::StateName() const {
  if (closed_) return "CLOSED";
  if (sealed_) return "SEALED";
  if (last_call_at_ != absl::InfiniteFuture()) return "LAST_CALL";
  if (!waiting_.empty() || generation_ == 0) return "COLLECTING";
  return "ENDED";
}

void Core::Impl::Job::SnapshotTo(v1::CoordinatorSnapshot* snapshot) const {
  const auto add = [&] { return snapshot->add_changes(); };
  v1::JobCreated* created = add()->mutable_job_created();
  created->set_job_id(id_);
  *created->mutable_spec() = spec_;
  for (const std::string& worker_id : fenced_order_) {
    for (const uint64_t incarnation : fenced_.find(worker_id)->second) {
      v1::IncarnationFenced* fenced = add()->mutable_incarnation_fenced();
      fenced->set_job_id(id_);
      fenced->set_worker_id(worker_id);
      fenced->set_incarnation(incarnation);
    }
  }
  if (generation_ > 0) {
    v1::GenerationSealed* sealed = add()->mutable_generation_sealed();
    sealed->set_job_id(id_);
    sealed->set_generation(generation_);
    sealed->set_table_digest(digest_);
    sealed->set_num_nodes(num_nodes_);
    for (const Seat& seat : seats_) *sealed->add_seats() = seat.record;
    if (!sealed_) {
      v1::GenerationClosed* ended = add()->mutable_generation_closed();
      ended->set_job_id(id_);
      ended->set_generation(generation_);
      ended->set_why(why_ended_);
      for (const v1::Culprit& culprit : end_culprits_) *ended->add_culprits() = culprit;
    }
    for (const std::string& worker_id : departed_order_) {
      const auto it = departed_.find(worker_id);
      if (it == departed_.end()) continue;
      v1::WorkerDeparted* departed = add()->mutable_worker_departed();
      departed->set_job_id(id_);
      departed->set_worker_id(worker_id);
      departed->set_incarnation(it->second);
    }
    const auto end = [&](const std::string& id, uint64_t counter, const Answer& answer) {
      v1::BarrierEnded* ended = add()->mutable_barrier_ended();
      ended->set_job_id(id_);
      ended->set_generation(generation_);
      ended->set_barrier_id(id);
      ended->set_counter(counter);
      *ended->mutable_answer() = answer.result();
    };
    barriers_->ForEachJournaled(end);
    agree_->ForEachKept([&](uint64_t counter, const Answer& answer) { end("", counter, answer); });
  }
  if (closed_) {
    v1::JobClosed* closed = add()->mutable_job_closed();
    closed->set_job_id(id_);
    closed->set_why(why_ended_);
  }
  v1::KvChanged* kv = nullptr;
  kv_.ForEachDurable([&](const v1::KeyValue& entry) {
    if (kv == nullptr || kv->puts_size() >= 1000) {
      kv = add()->mutable_kv_changed();
      kv->set_job_id(id_);
    }
    *kv->add_puts() = entry;
  });
  triggers_.ForEach([&](const v1::TriggerRecord& record) {
    v1::TriggerChanged* trigger = add()->mutable_trigger_changed();
    trigger->set_job_id(id_);
    *trigger->mutable_trigger() = record;
  });
  for (const auto& [host, state] : hosts_) {
    const int strikes =
        impl_->serving_ ? static_cast<int>(state.strikes.size()) : state.replayed_strikes;
    if (strikes > 0) {
      v1::HostStruck* struck = add()->mutable_host_struck();
      struck->set_job_id(id_);
      struck->set_host(host);
      struck->set_strikes(strikes);
    }
    const absl::Duration left = impl_->serving_ ? state.until - impl_->now_ : state.left;
    if (left > absl::ZeroDuration()) {
      v1::HostQuarantined* quarantined = add()->mutable_host_quarantined();
      quarantined->set_job_id(id_);
      quarantined->set_host(host);
      *quarantined->mutable_for_() = ToProto(left);
      quarantined->set_reason(state.reason);
      quarantined->set_automatic(state.automatic);
    }
  }
  dedupe_.ForEach([&](const std::string& client, uint64_t incarnation, uint64_t request_id,
                      uint64_t hash, const StoredAnswer& stored, uint64_t forgotten) {
    if (stored.durable_revision == 0) return;
    v1::RequestAnswered* answered = add()->mutable_request_answered();
    answered->set_job_id(id_);
    if (client[0] != '\n') answered->set_worker_id(client);
    answered->set_incarnation(incarnation);
    answered->set_request_id(request_id);
    answered->set_request_hash(hash);
    answered->set_forgotten(forgotten);
    *answered->mutable_answer() = stored.answer->result();
  });
}

void Core::Impl::Join(CallId call, const v1::JoinRequest& request, const Caller& caller,
                      Job** touched) {
  const v1::Fence& fence = request.fence();
  const auto fail = [&](v1::OpError error, uint64_t durable = 0) {
    SendError(call, std::move(error), durable);
  };
  if (auto error = CheckName("fence.job_id", fence.job_id())) return fail(*std::move(error));
  if (auto error = CheckName("fence.worker_id", fence.worker_id())) return fail(*std::move(error));
  if (fence.incarnation() == 0) {
    return fail(BadField("fence.incarnation",
                         absl::StrCat("worker ", Quoted(fence.worker_id()),
                                      " has incarnation 0: draw a random one at process start")));
  }
  const std::pair<const char*, const std::string*> texts[] = {
      {"topology.host", &request.topology().host()},
      {"topology.rack", &request.topology().rack()},
      {"topology.nvlink_domain", &request.topology().nvlink_domain()},
      {"endpoint", &request.endpoint()}};
  for (const auto& [field, text] : texts) {
    if (text->size() > kMaxName) {
      return fail(
          TooLarge(field, absl::StrCat(field, " of worker ", Quoted(fence.worker_id()), " has ",
                                       text->size(), " bytes: at most ", kMaxName)));
    }
  }
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) {
    // That the job is unknown is no error here: this is how it begins.
    if (error->detail().reason() == v1::ERROR_REASON_STOPPING) return fail(*std::move(error));
  }
  if (request.has_spec()) {
    if (auto error = CheckSpec(request.spec())) return fail(*std::move(error));
  }
  const int max_workers = job != nullptr ? job->spec_.max_workers() : request.spec().max_workers();
  if (job == nullptr && !request.has_spec()) {
    return fail(
        BadField("spec", absl::StrCat("job ", Quoted(fence.job_id()), " is new and worker ",
                                      Quoted(fence.worker_id()),
                                      " brings no rendezvous spec: the first worker must")));
  }
  if (request.preferred_rank() < -1 || request.preferred_rank() >= max_workers) {
    return fail(
        BadField("preferred_rank",
                 absl::StrCat("worker ", Quoted(fence.worker_id()), " prefers rank ",
                              request.preferred_rank(), " in a job of at most ", max_workers,
                              " workers: use 0 to ", max_workers - 1, ", or -1 for any")));
  }
  if (job == nullptr) {
    auto owned = std::make_unique<Job>(this, fence.job_id());
    job = owned.get();
    job->spec_ = request.spec();
    jobs_[fence.job_id()] = std::move(owned);
    v1::JobCreated* created = Change()->mutable_job_created();
    created->set_job_id(job->id_);
    *created->mutable_spec() = job->spec_;
    job->membership_touched_ = true;
  } else if (job->closed_) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_RENDEZVOUS_CLOSED,
                          absl::StrCat("job ", Quoted(job->id_), " is over: ", job->why_ended_)),
                job->membership_record_);
  } else if (request.has_spec() &&
             request.spec().SerializeAsString() != job->spec_.SerializeAsString()) {
    return fail(BadField(
        "spec",
        absl::StrCat("worker ", Quoted(fence.worker_id()), " brings another rendezvous spec (",
                     request.spec().min_workers(), ":", request.spec().max_workers(), ") than job ",
                     Quoted(job->id_), " was begun with (", job->spec_.min_workers(), ":",
                     job->spec_.max_workers(), "): use the same, or another job id")));
  }
  *touched = job;
  Seat* const seat = job->FindSeat(fence.worker_id());
  const auto departed = job->departed_.find(fence.worker_id());
  if (departed != job->departed_.end() && departed->second != fence.incarnation() &&
      !job->IsFenced(fence.worker_id(), departed->second) &&
      !job->IsFenced(fence.worker_id(), fence.incarnation())) {
    job->FenceIncarnation(fence.worker_id(), departed->second);
  }
  if (job->IsFenced(fence.worker_id(), fence.incarnation())) {
    ++stats_.fenced_calls;
    const auto waiting = job->waiting_.find(fence.worker_id());
    return fail(job->Superseded(fence.worker_id(),
                                waiting != job->waiting_.end()
                                    ? waiting->second.request.fence().incarnation()
                                    : (seat != nullptr ? seat->record.incarnation() : 0)),
                job->membership_record_);
  }
  if (seat != nullptr && seat->record.incarnation() == fence.incarnation() &&
      seat->record.state() == v1::WORKER_STATE_EXITED) {
    return fail(MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                          absl::StrCat("this incarnation of worker ", Quoted(fence.worker_id()),
                                       " ", job->GoneText(*seat),
                                       " according to its agent: start a new process")),
                job->membership_record_);
  }
  if (seat != nullptr && job->sealed_) {
    const bool same = seat->record.incarnation() == fence.incarnation();
    if (same && seat->alive()) {
      // A retry: its first answer was lost.
      job->RenewLease(seat);
      job->SendSeat(call, *seat);
      return;
    }
    if (!job->spec_.end_generation_on_failure() && seat->record.state() != v1::WORKER_STATE_LEFT) {
      job->Reseat(seat, call, request, caller);
      return;
    }
    if (!same) {
      const uint64_t old = seat->record.incarnation();
      if (seat->alive()) {
        job->Kill(seat->record.node(), fence.worker_id(), old);
        job->WorkerGone(seat, v1::WORKER_STATE_FENCED, v1::ExitCause());
      }
      job->FenceIncarnation(fence.worker_id(), old);
    }
  } else if (seat != nullptr && seat->record.incarnation() != fence.incarnation()) {
    job->FenceIncarnation(fence.worker_id(), seat->record.incarnation());
    if (seat->alive()) job->WorkerGone(seat, v1::WORKER_STATE_FENCED, v1::ExitCause());
  }
  job->Enqueue(call, request, caller);
}

void Core::Impl::Arrive(CallId call, const v1::ArriveRequest& request, Job** touched) {
  Who who;
  if (auto error = CheckFence(request.fence(), false, &who)) {
    SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
    return;
  }
  *touched = who.job;
  if (request.rank() != who.seat->rank()) {
    SendError(call,
              BadField("rank", absl::StrCat("worker ", Quoted(request.fence().worker_id()),
                                            " holds rank ", who.seat->rank(), ", not ",
                                            request.rank(), ": use the rank of the join reply")),
              who.job->membership_record_);
    return;
  }
  who.seat->step = std::max(who.seat->step, request.step());
  const int32_t rank = request.rank();
  Arrival arrival;
  arrival.call = call;
  arrival.barrier_id = request.barrier_id();
  arrival.counter = request.counter();
  arrival.ranks = absl::MakeConstSpan(&rank, 1);
  arrival.timeout = FromProto(request.timeout());
  arrival.soft_timeout = FromProto(request.soft_timeout());
  arrival.participants =
      absl::MakeConstSpan(request.participants().data(), request.participants_size());
  if (!request.payload().empty()) arrival.payloads.push_back(request.payload());
  arrival.call_site = request.call_site();
  arrival.call_site_text = request.call_site_text();
  arrival.previous_state = request.previous_state();
  held_[call] = {who.job->id_, Held::kBarrier, ""};
  if (auto error = who.job->barriers_->Arrive(arrival, now_)) {
    held_.erase(call);
    SendError(call, *std::move(error), who.job->AllRecords());
  }
}

void Core::Impl::ArriveMany(CallId call, const v1::ArriveManyRequest& request, const Caller& caller,
                            Job** touched) {
  const v1::Fence& fence = request.fence();
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return SendError(call, *std::move(error), 0);
  const auto fail = [&](v1::OpError error) {
    ++stats_.fenced_calls;
    error.mutable_detail()->set_current_generation(job->generation_);
    error.mutable_detail()->set_current_term(term_);
    SendError(call, std::move(error), job->membership_record_);
  };
  if (auto error = job->CheckGeneration(fence)) return fail(*std::move(error));
  if (!job->sealed_) return fail(job->Ended());
  *touched = job;
  if (request.incarnations_size() != request.ranks_size()) {
    return fail(BadField(
        "incarnations",
        absl::StrCat("barrier ", Quoted(request.barrier_id()), " got ", request.incarnations_size(),
                     " incarnations for ", request.ranks_size(), " ranks: give one for each")));
  }
  const int world_size = static_cast<int>(job->seats_.size());
  for (int i = 0; i < request.ranks_size(); ++i) {
    const int rank = request.ranks(i);
    if (rank < 0 || rank >= world_size) {
      return fail(BadField(
          "ranks", absl::StrCat("rank ", rank, " does not exist in a world of ", world_size)));
    }
    const Seat& seat = job->seats_[rank];
    if (seat.record.incarnation() != request.incarnations(i)) {
      return fail(job->Superseded(seat.record.worker_id(), seat.record.incarnation()));
    }
    if (!seat.alive()) {
      return fail(
          MakeError(absl::StatusCode::kFailedPrecondition,
                    seat.record.state() == v1::WORKER_STATE_LOST ? v1::ERROR_REASON_LEASE_EXPIRED
                                                                 : v1::ERROR_REASON_NOT_MEMBER,
                    absl::StrCat("rank ", rank, " (worker ", Quoted(seat.record.worker_id()), ") ",
                                 job->GoneText(seat), ": it cannot arrive at a barrier")));
    }
  }
  for (const int rank : request.ranks()) {
    Seat& seat = job->seats_[rank];
    job->RenewLease(&seat);
    seat.step = std::max(seat.step, request.step());
    if (seat.record.node() != caller.node && !caller.node.empty())
      seat.record.set_node(std::string(caller.node));
  }
  Arrival arrival;
  arrival.call = call;
  arrival.barrier_id = request.barrier_id();
  arrival.counter = request.counter();
  arrival.ranks = absl::MakeConstSpan(request.ranks().data(), request.ranks_size());
  arrival.lateness_us =
      absl::MakeConstSpan(request.lateness_us().data(), request.lateness_us_size());
  arrival.timeout = FromProto(request.timeout());
  arrival.soft_timeout = FromProto(request.soft_timeout());
  arrival.participants =
      absl::MakeConstSpan(request.participants().data(), request.participants_size());
  arrival.payloads.assign(request.payloads().begin(), request.payloads().end());
  arrival.call_site = request.call_site();
  arrival.call_site_text = request.call_site_text();
  arrival.previous_state = request.previous_state();
  held_[call] = {job->id_, Held::kBarrier, ""};
  if (auto error = job->barriers_->Arrive(arrival, now_)) {
    held_.erase(call);
    SendError(call, *std::move(error), job->AllRecords());
  }
}

void Core::Impl::Heartbeat(CallId call, const v1::HeartbeatRequest& request, Job** touched) {
  const v1::Fence& fence = request.fence();
  Job* job = nullptr;
  if (auto error = CheckJob(fence, &job)) return SendError(call, *std::move(error), 0);
  *touched = job;
  const auto answer = [&] {
    v1::OpResult result;
    v1::HeartbeatReply* reply = result.mutable_heartbeat();
    *reply->mutable_header() = Header();
    reply->set_generation(job->generation_);
    reply->set_generation_ended(!job->sealed_ || fence.generation() < job->generation_);
    if (reply->generation_ended()) {
      reply->set_why(!job->sealed_
                         ? job->why_ended_
                         : absl::StrCat("generation ", job->generation_, " has been sealed"));
    }
    Send(call, std::move(result), job->membership_record_);
  };
  Seat* const seat = job->FindSeat(fence.worker_id());
  if (options_.mutants.dead_incarnation_renews_lease && seat != nullptr) {
    job->RenewLease(seat);
    return answer();
  }
  Who who;
  if (auto error = CheckFence(fence, false, &who)) {
    const v1::ErrorReason reason = error->detail().reason();
    // Behind, but not dead: what it must know is in the reply.
    if (reason == v1::ERROR_REASON_STALE_GENERATION) return answer();
    if (reason == v1::ERROR_REASON_GENERATION_ENDED) {
      if (seat != nullptr && seat->record.incarnation() == fence.incarnation())
        job->RenewLease(seat);
      return answer();
    }
    return SendError(call, *std::move(error), job->membership_record_);
  }
  seat->step = std::max(seat->step, request.step());
  seat->phase = Cut(request.phase(), kMaxName);
  seat->last_collective = Cut(request.last_collective(), kMaxName);
  answer();
}

void Core::Impl::ReportExit(CallId call, const v1::ReportExitRequest& request, Job** touched) {
  Job* job = nullptr;
  if (auto error = CheckJob(request.fence(), &job)) return SendError(call, *std::move(error), 0);
  *touched = job;
  Seat* const seat = job->FindSeat(request.worker_id());
  const auto waiting = job->waiting_.find(request.worker_id());
  v1::ExitCause cause = request.cause();
  cause.set_message(Cut(cause.message(), 1024));
  while (cause.last_log_lines_size() > 64) cause.mutable_last_log_lines()->RemoveLast();
  for (std::string& line : *cause.mutable_last_log_lines()) line = Cut(line, 1024);
  if (waiting != job->waiting_.end() &&
      waiting->second.request.fence().incarnation() == request.incarnation()) {
    job->FenceIncarnation(request.worker_id(), request.incarnation());
    job->DropWaiting(
        request.worker_id(),
        MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_NOT_MEMBER,
                  absl::StrCat("worker ", Quoted(request.worker_id()),
                               " has ended according to its agent: start a new process")));
    job->Evaluate();
  }
  // A report about any other incarnation is old news.
  if (seat != nullptr && seat->record.incarnation() == request.incarnation() &&
      seat->record.state() != v1::WORKER_STATE_EXITED &&
      seat->record.state() != v1::WORKER_STATE_FENCED) {
    job->WorkerGone(seat, v1::WORKER_STATE_EXITED, cause);
  }
  v1::OpResult result;
  *result.mutable_report_exit()->mutable_header() = Header();
  Send(call, std::move(result), job->membership_record_);
}

void Core::Impl::WaitKeys(CallId call, const v1::WaitRequest& request, Job** touched) {
  Who who;
  if (auto error = CheckFence(request.fence(), true, &who)) {
    return SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
  }
  *touched = who.job;
  if (auto error = who.job->kv_.CheckWait(request)) return SendError(call, *std::move(error), 0);
  v1::OpResult result;
  if (who.job->kv_.StartWait(call, request, now_, result.mutable_wait())) {
    *result.mutable_wait()->mutable_header() = Header();
    Send(call, std::move(result), who.job->AllRecords());
    return;
  }
  held_[call] = {who.job->id_, Held::kWait, ""};
}

void Core::Impl::AgreeAlive(CallId call, const v1::AgreeAliveRequest& request, Job** touched) {
  Who who;
  if (auto error = CheckFence(request.fence(), false, &who)) {
    return SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
  }
  *touched = who.job;
  if (request.rank() != who.seat->rank()) {
    return SendError(
        call,
        BadField("rank", absl::StrCat("worker ", Quoted(request.fence().worker_id()),
                                      " holds rank ", who.seat->rank(), ", not ", request.rank())),
        0);
  }
  held_[call] = {who.job->id_, Held::kBarrier, ""};
  std::vector<AgreeSet::Done> done;
  if (auto error = who.job->agree_->Enter(call, request, request.rank(), now_, Header(), &done)) {
    held_.erase(call);
    return SendError(call, *std::move(error), who.job->membership_record_);
  }
  who.job->AgreeDone(std::move(done));
}

void Core::Impl::PollTriggers(CallId call, const v1::PollTriggersRequest& request, Job** touched) {
  Who who;
  if (auto error = CheckFence(request.fence(), false, &who)) {
    return SendError(call, *std::move(error), who.job != nullptr ? who.job->membership_record_ : 0);
  }
  *touched = who.job;
  if (request.rank() != who.seat->rank()) {
    return SendError(
        call,
        BadField("rank", absl::StrCat("worker ", Quoted(request.fence().worker_id()),
                                      " holds rank ", who.seat->rank(), ", not ", request.rank())),
        0);
  }
  v1::OpResult result;
  std::vector<v1::TriggerChanged> changes;
  if (auto error = who.job->triggers_.Poll(request, request.rank(), result.mutable_poll_triggers(),
                                           &changes)) {
    return SendError(call, *std::move(error), 0);
  }
  who.seat->step = std::max(who.seat->step, request.step());
  who.job->TriggersChanged(std::move(changes));
  *result.mutable_poll_triggers()->mutable_header() = Header();
  Send(call, std::move(result), who.job->membership_record_);
}

void Core::Impl::GetRankTable(CallId call, const v1::GetRankTableRequest& request) {
  const Job* const job = FindJob(request.job_id());
  if (job == nullptr) return SendError(call, UnknownJob(request.job_id()), 0);
  if (job->generation_ == 0 ||
      (request.generation() != 0 && request.generation() != job->generation_)) {
    v1::OpError error = MakeError(
        absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
        absl::StrCat("the rank table of generation ", request.generation(), " of job ",
                     Quoted(job->id_), " is not kept: ",
                     job->generation_ == 0 ? "none has been sealed yet"
                                           : absl::StrCat(job->generation_, " is current")));
    error.mutable_detail()->set_current_generation(job->generation_);
    return SendError(call, std::move(error), job->membership_record_);
  }
  const int world_size = static_cast<int>(job->seats_.size());
  if (request.first_rank() < 0 || request.first_rank() > world_size || request.max_rows() < 0) {
    return SendError(
        call,
        BadField("first_rank",
                 absl::StrCat("a page of ", request.max_rows(), " rows from rank ",
                              request.first_rank(), " does not exist in a world of ", world_size)),
        0);
  }
  v1::OpResult result;
  v1::GetRankTableReply* reply = result.mutable_get_rank_table();
  *reply->mutable_header() = Header();
  reply->set_generation(job->generation_);
  reply->set_table_digest(job->digest_);
  reply->set_world_size(world_size);
  reply->set_next_rank(-1);
  if (request.if_digest_differs() != job->digest_) {
    const int rows = request.max_rows() == 0
                         ? options_.rank_table_page
                         : std::min(request.max_rows(), 10 * options_.rank_table_page);
    const int end =
        static_cast<int>(std::min<int64_t>(world_size, int64_t{request.first_rank()} + rows));
    for (int rank = request.first_rank(); rank < end; ++rank)
      FillRow(job->seats_[rank].record, reply->add_rows());
    if (end < world_size) reply->set_next_rank(end);
  }
  Send(call, std::move(result), job->membership_record_);
}

Core::Impl::Job* Core::Impl::HandleOp(CallId call, const v1::Op& op, const Caller& caller) {
  Job* touched = nullptr;
  const int kind = op.kind_case();
  switch (op.kind_case()) {
    case v1::Op::kJoin:
      Join(call, op.join(), caller, &touched);
      break;
    case v1::Op::kLeave:
      Once(call, op.leave(), kind, false, false, &touched, [&](Who who, v1::OpResult* result) {
        v1::ExitCause cause;
        cause.set_message(Cut(op.leave().reason(), 1024));
        who.job->WorkerGone(who.seat, v1::WORKER_STATE_LEFT, cause);
        *result->mutable_leave()->mutable_header() = Header();
        return std::optional<v1::OpError>();
      });
      // A worker that waits for a seat gives up its place.
      if (Job* const job = FindJob(op.leave().fence().job_id())) {
        const auto it = job->waiting_.find(op.leave().fence().worker_id());
        if (it != job->waiting_.end() &&
            it->second.request.fence().incarnation() == op.leave().fence().incarnation()) {
          out_->replies.resize(first_reply_);
          job->DropWaiting(std::string(it->first),
                           MakeError(absl::StatusCode::kCancelled, v1::ERROR_REASON_NOT_MEMBER,
                                     absl::StrCat("worker ", Quoted(op.leave().fence().worker_id()),
                                                  " left while it waited for a seat")));
          job->Evaluate();
          v1::OpResult result;
          *result.mutable_leave()->mutable_header() = Header();
          Send(call, std::move(result), 0);
          touched = job;
        }
      }
      break;
    case v1::Op::kEndGeneration:
      Once(call, op.end_generation(), kind, true, false, &touched,
           [&](Who who, v1::OpResult* result) {
             who.job->EndGeneration(
                 absl::StrCat(
                     "ended on request of ",
                     who.seat != nullptr ? absl::StrCat("rank ", who.seat->rank()) : "an operator",
                     op.end_generation().reason().empty() ? "" : ": ",
                     Cut(op.end_generation().reason(), 1024)),
                 {});
             v1::EndGenerationReply* reply = result->mutable_end_generation();
             *reply->mutable_header() = Header();
             // The waiting may have been enough for the next one at once.
             reply->set_next_generation(who.job->sealed_ ? who.job->generation_
                                                         : who.job->generation_ + 1);
             return std::optional<v1::OpError>();
           });
      break;
    case v1::Op::kArrive:
      Arrive(call, op.arrive(), &touched);
      break;
    case v1::Op::kArriveMany:
      ArriveMany(call, op.arrive_many(), caller, &touched);
      break;
    case v1::Op::kCancelBarrier:
      Once(call, op.cancel_barrier(), kind, true, false, &touched,
           [&](Who who, v1::OpResult* result) {
             if (who.job->sealed_) {
               if (auto error = who.job->barriers_->Cancel(
                       op.cancel_barrier().barrier_id(), op.cancel_barrier().counter(),
                       Cut(op.cancel_barrier().reason(), 1024), now_)) {
                 return error;
               }
             }
             *result->mutable_cancel_barrier()->mutable_header() = Header();
             return std::optional<v1::OpError>();
           });
      break;
    case v1::Op::kRecallBarriers: {
      // Rows speak of what their caller saw; a caller that is behind has nothing to tell.
      Job* job = nullptr;
      const v1::RecallBarriersRequest& request = op.recall_barriers();
      std::optional<v1::OpError> error = CheckJob(request.fence(), &job);
      if (!error.has_value()) error = job->CheckGeneration(request.fence());
      if (!error.has_value() && !job->sealed_) error = job->Ended();
      if (!error.has_value()) {
        // It may be an agent, which has no seat.
        const Seat* const seat = job->FindSeat(request.fence().worker_id());
        const uint64_t newest = seat != nullptr ? seat->record.incarnation() : 0;
        if (job->IsFenced(request.fence().worker_id(), request.fence().incarnation()) ||
            (newest != 0 && newest != request.fence().incarnation())) {
          error = job->Superseded(request.fence().worker_id(), newest);
        }
      }
      if (error.has_value()) {
        SendError(call, *std::move(error), job != nullptr ? job->membership_record_ : 0);
        break;
      }
      touched = job;
      for (const v1::SeenBarrier& seen : request.seen()) {
        if (options_.mutants.ignores_recall) break;
        job->barriers_->Recall(seen.barrier_id(), seen.counter(), seen.state());
      }
      v1::OpResult result;
      *result.mutable_recall_barriers()->mutable_header() = Header();
      Send(call, std::move(result), job->membership_record_);
      break;
    }
    case v1::Op::kTxn:
      Once(call, op.txn(), kind, true, KvStore::Reads(op.txn()), &touched,
           [&](Who who, v1::OpResult* result) { return who.job->Txn(op.txn(), who.seat, result); });
      break;
    case v1::Op::kWait:
      WaitKeys(call, op.wait(), &touched);
      break;
    case v1::Op::kRaiseTrigger:
      Once(call, op.raise_trigger(), kind, true, false, &touched,
           [&](Who who, v1::OpResult* result) {
             std::vector<v1::TriggerChanged> changes;
             v1::RaiseTriggerReply* reply = result->mutable_raise_trigger();
             if (auto error = who.job->triggers_.Raise(
                     op.raise_trigger(), who.seat != nullptr ? who.seat->rank() : -1,
                     event_revision_ != 0 ? event_revision_ : revision_ + 1, reply, &changes)) {
               return error;
             }
             Rev();
             ++stats_.triggers_raised;
             who.job->TriggersChanged(std::move(changes));
             *reply->mutable_header() = Header();
             return std::optional<v1::OpError>();
           });
      break;
    case v1::Op::kPollTriggers:
      PollTriggers(call, op.poll_triggers(), &touched);
      break;
    case v1::Op::kHeartbeat:
      Heartbeat(call, op.heartbeat(), &touched);
      break;
    case v1::Op::kReportExit:
      ReportExit(call, op.report_exit(), &touched);
      break;
    case v1::Op::kAgreeAlive:
      AgreeAlive(call, op.agree_alive(), &touched);
      break;
    case v1::Op::kQuarantine:
      Once(call, op.quarantine(), kind, true, false, &touched, [&](Who who, v1::OpResult* result) {
        if (auto error = CheckName("host", op.quarantine().host())) return error;
        if (who.job->hosts_.size() >= kMaxHosts &&
            !who.job->hosts_.contains(op.quarantine().host())) {
          return std::optional<v1::OpError>(TooLarge(
              "host", absl::StrCat("job ", Quoted(who.job->id_), " has ", kMaxHosts,
                                   " hosts in quarantine or struck: lift some of them first")));
        }
        const absl::Duration length = FromProto(op.quarantine().for_());
        if (length < absl::ZeroDuration()) {
          return std::optional<v1::OpError>(
              BadField("for", "the length of a quarantine is negative: 0 lifts it"));
        }
        who.job->QuarantineHost(op.quarantine().host(), std::min(length, absl::Hours(24 * 365)),
                                Cut(op.quarantine().reason(), 1024), false);
        who.job->Evaluate();
        *result->mutable_quarantine()->mutable_header() = Header();
        return std::optional<v1::OpError>();
      });
      break;
    case v1::Op::kGetRankTable:
      GetRankTable(call, op.get_rank_table());
      break;
    case v1::Op::kDescribeBarrier:
    case v1::Op::kListBarriers:
    case v1::Op::kStragglerReport: {
      const std::string& job_id = op.has_describe_barrier() ? op.describe_barrier().job_id()
                                  : op.has_list_barriers()  ? op.list_barriers().job_id()
                                                            : op.straggler_report().job_id();
      const Job* const job = FindJob(job_id);
      if (job == nullptr) {
        SendError(call, UnknownJob(job_id), 0);
        break;
      }
      v1::OpResult result;
      if (op.has_describe_barrier()) {
        *result.mutable_describe_barrier()->mutable_header() = Header();
        std::optional<v1::OpError> error;
        if (job->barriers_ != nullptr) {
          error = job->barriers_->Describe(op.describe_barrier().barrier_id(),
                                           op.describe_barrier().counter(), now_,
                                           result.mutable_describe_barrier()->mutable_report());
        } else {
          error = MakeError(
              absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
              absl::StrCat("job ", Quoted(job_id), " has had no generation yet, so no barriers"));
        }
        if (error.has_value()) {
          SendError(call, *std::move(error), job->AllRecords());
          break;
        }
      } else if (op.has_list_barriers()) {
        *result.mutable_list_barriers()->mutable_header() = Header();
        if (job->barriers_ != nullptr) {
          job->barriers_->List(op.list_barriers().only_open(), now_,
                               result.mutable_list_barriers());
        }
      } else {
        *result.mutable_straggler_report()->mutable_header() = Header();
        if (job->barriers_ != nullptr)
          job->barriers_->Stragglers(result.mutable_straggler_report());
      }
      Send(call, std::move(result), job->AllRecords());
      break;
    }
    case v1::Op::kGetMembers: {
      const Job* const job = FindJob(op.get_members().job_id());
      if (job == nullptr) {
        SendError(call, UnknownJob(op.get_members().job_id()), 0);
        break;
      }
      v1::OpResult result;
      v1::GetMembersReply* reply = result.mutable_get_members();
      *reply->mutable_header() = Header();
      reply->set_generation(job->generation_);
      for (const Seat& seat : job->seats_) *reply->add_members() = job->MakeMember(seat);
      std::vector<const Waiting*> waiting;
      for (const auto& [worker_id, one] : job->waiting_) waiting.push_back(&one);
      std::sort(waiting.begin(), waiting.end(),
                [](const Waiting* a, const Waiting* b) { return a->order < b->order; });
      for (const Waiting* one : waiting) {
        v1::Member* member = reply->add_members();
        member->set_rank(-1);
        member->set_worker_id(one->request.fence().worker_id());
        member->set_incarnation(one->request.fence().incarnation());
        member->set_state(v1::WORKER_STATE_JOINING);
        member->set_host(one->request.topology().host());
        member->set_pid(one->request.pid());
      }
      Send(call, std::move(result), job->membership_record_);
      break;
    }
    case v1::Op::KIND_NOT_SET:
      SendError(
          call,
          BadField("kind",
                   "the operation has no kind this server knows: use a client of its version"),
          0);
      break;
  }
  return touched;
}

absl::Status Core::Impl::ApplyChange(const v1::JournalChange& change) {
  const auto find = [&](const std::string& job_id) -> absl::StatusOr<Job*> {
    Job* const job = FindJob(job_id);
    if (job == nullptr) {
      return absl::DataLossError(
          absl::StrCat("the journal speaks of job ", Quoted(job_id), " before it was created"));
    }
    return job;
  };
  const auto bad_rank = [](const Job& job, int rank) {
    return absl::DataLossError(absl::StrCat("the journal seats a worker of job ", Quoted(job.id_),
                                            " at rank ", rank, ", which its table does not have"));
  };
  switch (change.kind_case()) {
    case v1::JournalChange::kTermStarted:
      if (change.term_started().term() <= term_) {
        return absl::DataLossError(absl::StrCat(
            "the journal begins term ", change.term_started().term(), " after term ", term_));
      }
      term_ = change.term_started().term();
      return absl::OkStatus();
    case v1::JournalChange::kJobCreated: {
      const v1::JobCreated& created = change.job_created();
      auto job = std::make_unique<Job>(this, created.job_id());
      job->spec_ = created.spec();
      jobs_[created.job_id()] = std::move(job);
      return absl::OkStatus();
    }
    case v1::JournalChange::kJobClosed: {
      const auto job = find(change.job_closed().job_id());
      if (!job.ok()) return job.status();
      (*job)->closed_ = true;
      (*job)->why_ended_ = change.job_closed().why();
      return absl::OkStatus();
    }
    case v1::JournalChange::kJobRemoved:
      jobs_.erase(change.job_removed().job_id());
      return absl::OkStatus();
    case v1::JournalChange::kGenerationSealed: {
      const v1::GenerationSealed& sealed = change.generation_sealed();
      const auto job = find(sealed.job_id());
      if (!job.ok()) return job.status();
      (*job)->generation_ = sealed.generation();
      (*job)->sealed_ = true;
      (*job)->why_ended_.clear();
      (*job)->end_culprits_.clear();
      (*job)->digest_ = sealed.table_digest();
      (*job)->num_nodes_ = sealed.num_nodes();
      const std::vector<Seat> old_seats = std::exchange((*job)->seats_, {});
      for (const v1::SeatRecord& record : sealed.seats()) {
        if (record.rank() != static_cast<int>((*job)->seats_.size()))
          return bad_rank(**job, record.rank());
        Seat seat;
        seat.record = record;
        (*job)->seats_.push_back(std::move(seat));
      }
      (*job)->BeginGeneration(false);
      (*job)->NoteDeparted(old_seats);
      return absl::OkStatus();
    }
    case v1::JournalChange::kGenerationClosed: {
      const v1::GenerationClosed& ended = change.generation_closed();
      const auto job = find(ended.job_id());
      if (!job.ok()) return job.status();
      (*job)->sealed_ = false;
      (*job)->why_ended_ = ended.why();
      (*job)->end_culprits_.assign(ended.culprits().begin(), ended.culprits().end());
      (*job)->lease_checks_.clear();
      return absl::OkStatus();
    }
    case v1::JournalChange::kSeatTaken: {
      const v1::SeatTaken& taken = change.seat_taken();
      const auto job = find(taken.job_id());
      if (!job.ok()) return job.status();
      const int rank = taken.seat().rank();
      if (rank < 0 || static_cast<size_t>(rank) >= (*job)->seats_.size())
        return bad_rank(**job, rank);
      (*job)->seats_[rank] = Seat();
      (*job)->seats_[rank].record = taken.seat();
      (*job)->digest_ = taken.table_digest();
      return absl::OkStatus();
    }
    case v1::JournalChange::kWorkerEnded: {
      const v1::WorkerEnded& ended = change.worker_ended();
      const auto job = find(ended.job_id());
      if (!job.ok()) return job.status();
      Seat* const seat = (*job)->FindSeat(ended.worker_id());
      if (seat == nullptr || seat->record.incarnation() != ended.incarnation())
        return absl::OkStatus();
      seat->record.set_state(ended.state());
      *seat->record.mutable_exit() = ended.exit();
      return absl::OkStatus();
    }
    case v1::JournalChange::kIncarnationFenced: {
      const v1::IncarnationFenced& fenced = change.incarnation_fenced();
      const auto job = find(fenced.job_id());
      if (!job.ok()) return job.status();
      (*job)->RememberFenced(fenced.worker_id(), fenced.incarnation());
      (*job)->dedupe_.Forget(fenced.worker_id());
      return absl::OkStatus();
    }
    case v1::JournalChange::kWorkerDeparted: {
      const v1::WorkerDeparted& departed = change.worker_departed();
      const auto job = find(departed.job_id());
      if (!job.ok()) return job.status();
      (*job)->RememberDeparted(departed.worker_id(), departed.incarnation());
      return absl::OkStatus();
    }
    case v1::JournalChange::kKvChanged: {
      const v1::KvChanged& kv = change.kv_changed();
      const auto job = find(kv.job_id());
      if (!job.ok()) return job.status();
      for (const v1::KeyValue& put : kv.puts()) (*job)->kv_.RestorePut(put);
      for (const std::string& key : kv.deletes()) (*job)->kv_.RestoreDelete(key);
      return absl::OkStatus();
    }
    case v1::JournalChange::kTriggerChanged: {
      const auto job = find(change.trigger_changed().job_id());
      if (!job.ok()) return job.status();
      (*job)->triggers_.Restore(change.trigger_changed());
      return absl::OkStatus();
    }
    case v1::JournalChange::kBarrierEnded: {
      const v1::BarrierEnded& ended = change.barrier_ended();
      const auto job = find(ended.job_id());
      if (!job.ok()) return job.status();
      if ((*job)->barriers_ == nullptr || ended.generation() != (*job)->generation_)
        return absl::OkStatus();
      if (ended.barrier_id().empty()) {
        (*job)->agree_->Restore(ended.counter(), ended.answer());
      } else {
        (*job)->barriers_->RestoreEnd(ended.barrier_id(), ended.counter(), ended.answer());
      }
      return absl::OkStatus();
    }
    case v1::JournalChange::kHostStruck: {
      const auto job = find(change.host_struck().job_id());
      if (!job.ok()) return job.status();
      (*job)->hosts_[change.host_struck().host()].replayed_strikes =
          std::min(change.host_struck().strikes(), 1024);
      return absl::OkStatus();
    }
    case v1::JournalChange::kHostQuarantined: {
      const v1::HostQuarantined& quarantined = change.host_quarantined();
      const auto job = find(quarantined.job_id());
      if (!job.ok()) return job.status();
      HostState& host = (*job)->hosts_[quarantined.host()];
      host.left = FromProto(quarantined.for_());
      host.reason = quarantined.reason();
      host.automatic = quarantined.automatic();
      return absl::OkStatus();
    }
    case v1::JournalChange::kRequestAnswered: {
      const v1::RequestAnswered& answered = change.request_answered();
      const auto job = find(answered.job_id());
      if (!job.ok()) return job.status();
      (*job)->RememberAnswer(answered.worker_id(), answered.incarnation(), answered.request_id(),
                             answered.request_hash(),
                             {std::make_shared<Answer>(answered.answer(), false),
                              std::max<uint64_t>(1, last_record_)});
      (*job)->dedupe_.ForgetUpTo(ClientOf(answered.worker_id(), answered.incarnation()),
                                 answered.forgotten());
      return absl::OkStatus();
    }
    case v1::JournalChange::KIND_NOT_SET:
      break;
  }
  return absl::DataLossError(
      "the journal holds a change of a kind this version does not know: use a newer coordinator");
}

bool Core::NeedsJournal(const v1::Op& op) {
  const auto durable = [](const google::protobuf::RepeatedPtrField<v1::KvOp>& ops) {
    return std::any_of(ops.begin(), ops.end(), [](const v1::KvOp& one) {
      return one.put().klass() == v1::KV_CLASS_DURABLE ||
             one.add().klass() == v1::KV_CLASS_DURABLE ||
             one.append().klass() == v1::KV_CLASS_DURABLE;
    });
  };
  switch (op.kind_case()) {
    case v1::Op::kJoin:
    case v1::Op::kEndGeneration:
    case v1::Op::kRaiseTrigger:
    case v1::Op::kQuarantine:
      return true;
    case v1::Op::kTxn:
      return durable(op.txn().then()) || durable(op.txn().otherwise());
    default:
      return false;
  }
}

Core::Core(CoreOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Core::~Core() = default;

void Core::Handle(CallId call, const v1::Op& op, const Caller& caller, absl::Time now,
                  Output* out) {
  impl_->Begin(now, out);
  if (!impl_->serving_) {
    impl_->SendError(call,
                     MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_STARTING,
                               "the coordinator still reads its journal: try again"),
                     0);
    return;
  }
  impl_->End(impl_->HandleOp(call, op, caller));
}

void Core::Abandon(CallId call, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  const auto it = impl_->held_.find(call);
  if (it == impl_->held_.end()) return;
  const Impl::Held held = std::move(it->second);
  impl_->held_.erase(it);
  Impl::Job* const job = impl_->FindJob(held.job_id);
  if (job == nullptr) return;
  if (held.kind == Impl::Held::kWait) job->kv_.AbandonWait(call);
  if (held.kind == Impl::Held::kJoin) {
    const auto waiting = job->waiting_.find(held.worker_id);
    if (waiting != job->waiting_.end()) {
      std::vector<CallId>& calls = waiting->second.calls;
      calls.erase(std::remove(calls.begin(), calls.end(), call), calls.end());
      if (calls.empty()) {
        job->Unqueue(waiting);
        job->Evaluate();
      }
    }
  }
  impl_->End(job);
}

void Core::AttachAgent(absl::string_view node, const v1::Hello& hello, absl::Time now,
                       Output* out) {
  impl_->Begin(now, out);
  impl_->agents_[node] = hello.host();
}

void Core::DetachAgent(absl::string_view node, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  impl_->agents_.erase(node);
}

void Core::HandleBeat(absl::string_view node, const v1::Beat& beat, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  Impl::Job* job = nullptr;
  for (const v1::WorkerBeat& worker : beat.workers()) {
    if (job == nullptr || job->id_ != worker.job_id()) job = impl_->FindJob(worker.job_id());
    if (job == nullptr) continue;
    Seat* const seat = job->FindSeat(worker.worker_id());
    const bool same = seat != nullptr && (seat->record.incarnation() == worker.incarnation() ||
                                          impl_->options_.mutants.dead_incarnation_renews_lease);
    if (!job->sealed_ || !same) {
      job->TellAgain(std::string(node), worker);
      job->touched_ = impl_->now_;
    }
    if (!same || !seat->alive()) continue;
    job->RenewLease(seat);
    seat->step = std::max(seat->step, worker.step());
    if (seat->process_state != worker.process_state())
      seat->process_state = Cut(worker.process_state(), 64);
    if (seat->phase != worker.phase()) seat->phase = Cut(worker.phase(), kMaxName);
    if (seat->last_collective != worker.last_collective()) {
      seat->last_collective = Cut(worker.last_collective(), kMaxName);
    }
    if (seat->record.node() != node) seat->record.set_node(std::string(node));
  }
}

void Core::HandleStack(absl::string_view, const v1::StackReply& stack, absl::Time now,
                       Output* out) {
  impl_->Begin(now, out);
  const auto it = impl_->queries_.find(stack.query_id());
  if (it == impl_->queries_.end()) return;
  const auto [job_id, worker_id] = it->second;
  impl_->queries_.erase(it);
  Impl::Job* const job = impl_->FindJob(job_id);
  Seat* const seat = job != nullptr ? job->FindSeat(worker_id) : nullptr;
  if (seat == nullptr ||
      (stack.pid() != 0 && seat->record.pid() != 0 && stack.pid() != seat->record.pid()))
    return;
  seat->stack = Cut(stack.native_stack(), kMaxStack);
  if (!stack.process_state().empty()) seat->process_state = Cut(stack.process_state(), 64);
}

void Core::Tick(absl::Time now, Output* out) {
  impl_->Begin(now, out);
  while (impl_->serving_ && !impl_->deadlines_.empty() &&
         impl_->deadlines_.begin()->first <= impl_->now_) {
    const std::string job_id = impl_->deadlines_.begin()->second;
    Impl::Job* const job = impl_->FindJob(job_id);
    MUSTER_CHECK(job != nullptr) << "a deadline of no job: " << job_id;
    job->Tick();
    if (job->expired_) {
      impl_->Note(job_id, false,
                  absl::StrCat("removed: no worker of it for ",
                               absl::FormatDuration(impl_->options_.job_retention)));
      impl_->Remove(job);
    } else {
      impl_->End(job);
    }
  }
}

absl::Time Core::NextDeadline() const {
  absl::Time next =
      impl_->deadlines_.empty() ? absl::InfiniteFuture() : impl_->deadlines_.begin()->first;
  // Regular ticks while leases run: their absence shows that this process was paused.
  for (const auto& [id, job] : impl_->jobs_) {
    if (!job->sealed_ || job->alive_ == 0) continue;
    next = std::min(next, impl_->now_ + std::min(absl::Seconds(1), job->Lease() / 4));
  }
  return next;
}

absl::Status Core::Restore(absl::string_view bytes) {
  v1::CoordinatorSnapshot snapshot;
  if (impl_->serving_ || impl_->revision_ != 0) {
    return absl::FailedPreconditionError("a snapshot can only be restored into a new core");
  }
  if (!snapshot.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::DataLossError(
        absl::StrCat("the snapshot of ", bytes.size(), " bytes cannot be read: it is not one"));
  }
  impl_->revision_ = impl_->last_record_ = snapshot.revision();
  impl_->term_ = snapshot.term();
  for (const v1::JournalChange& change : snapshot.changes()) {
    if (absl::Status status = impl_->ApplyChange(change); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Core::Replay(absl::string_view payload) {
  v1::JournalRecord record;
  if (impl_->serving_)
    return absl::FailedPreconditionError("the core already serves: replay before StartTerm");
  if (!record.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return absl::DataLossError(
        absl::StrCat("the record after revision ", impl_->last_record_, " cannot be read"));
  }
  if (record.revision() <= impl_->last_record_) {
    return absl::DataLossError(absl::StrCat("the journal holds revision ", record.revision(),
                                            " after revision ", impl_->last_record_));
  }
  impl_->revision_ = impl_->last_record_ = record.revision();
  for (const v1::JournalChange& change : record.changes()) {
    if (absl::Status status = impl_->ApplyChange(change); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string Core::Snapshot() const {
  v1::CoordinatorSnapshot snapshot;
  snapshot.set_revision(impl_->last_record_);
  snapshot.set_term(impl_->term_);
  std::vector<const Impl::Job*> jobs;
  for (const auto& [id, job] : impl_->jobs_) jobs.push_back(job.get());
  std::sort(jobs.begin(), jobs.end(),
            [](const Impl::Job* a, const Impl::Job* b) { return a->id_ < b->id_; });
  for (const Impl::Job* job : jobs) job->SnapshotTo(&snapshot);
  return snapshot.SerializeAsString();
}

void Core::StartTerm(uint64_t term, absl::Time now, Output* out) {
  MUSTER_CHECK(!impl_->serving_ && term > impl_->term_)
      << "term " << term << " cannot begin after term " << impl_->term_;
  impl_->Begin(now, out);
  impl_->term_ = term;
  impl_->serving_ = true;
  impl_->revision_ = std::max(impl_->revision_, term << kRevisionBits);
  impl_->Change()->mutable_term_started()->set_term(term);
  impl_->End(nullptr);
  for (auto& [id, job] : impl_->jobs_) {
    job->log_ = std::make_unique<WatchLog>(impl_->options_.watch_events,
                                           impl_->options_.watch_bytes, impl_->revision_);
    job->membership_record_ = job->kv_record_ = job->barrier_record_ = impl_->last_record_;
    for (auto& [host, state] : job->hosts_) {
      if (state.left > absl::ZeroDuration()) state.until = now + state.left;
      state.strikes.assign(std::max(0, state.replayed_strikes), now);
    }
    job->lease_floor_ = now;
    job->rank_of_.clear();
    job->lease_checks_.clear();
    job->alive_ = 0;
    for (Seat& seat : job->seats_) {
      seat.last_seen = now;
      job->rank_of_[seat.record.worker_id()] = seat.rank();
      if (!seat.alive()) continue;
      ++job->alive_;
      if (job->sealed_) job->lease_checks_.insert({now + job->Lease(), seat.rank()});
    }
    if (job->barriers_ != nullptr) job->barriers_->HoldFailuresUntil(now + job->Lease());
    job->triggers_.ResumeGeneration(static_cast<int>(job->seats_.size()));
    if (job->sealed_) {
      for (const Seat& seat : job->seats_) {
        if (seat.alive()) continue;
        job->barriers_->RankGone(seat.rank(), job->GoneText(seat), now);
        std::vector<v1::TriggerChanged> changes;
        job->triggers_.RankGone(seat.rank(), &changes);
        job->TriggersChanged(std::move(changes));
      }
    }
    impl_->End(job.get());
  }
}

uint64_t Core::last_term() const { return impl_->term_; }
uint64_t Core::revision() const { return impl_->revision_; }
uint64_t Core::last_record_revision() const { return impl_->last_record_; }

void Core::CloseJob(absl::string_view job_id, absl::string_view why, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  Impl::Job* const job = impl_->FindJob(job_id);
  if (job == nullptr) return;
  job->Close(std::string(why));
  impl_->End(job);
}

void Core::RemoveJob(absl::string_view job_id, absl::Time now, Output* out) {
  impl_->Begin(now, out);
  if (Impl::Job* const job = impl_->FindJob(job_id)) impl_->Remove(job);
}

void Core::Impl::Remove(Job* job) {
  job->Close("removed");
  Change()->mutable_job_removed()->set_job_id(job->id_);
  job->watch_touched_ = true;  // its watchers must learn that it is gone
  End(job);
  ++stats_.jobs_removed;
  deadlines_.erase({job->scheduled_, job->id_});
  // What operators still wait for will never come.
  std::vector<CallId> orphans;
  for (const auto& [call, held] : held_) {
    if (held.job_id == job->id_) orphans.push_back(call);
  }
  std::sort(orphans.begin(), orphans.end());
  for (const CallId call : orphans) {
    held_.erase(call);
    SendError(call, UnknownJob(job->id_), last_record_);
  }
  jobs_.erase(job->id_);
}

std::optional<v1::OpError> Core::ReadWatch(const v1::WatchRequest& request, uint64_t from,
                                           uint64_t durable_revision, size_t max_bytes,
                                           v1::WatchBatch* batch) const {
  const Impl::Job* const job = impl_->FindJob(request.job_id());
  if (job == nullptr) return Impl::UnknownJob(request.job_id());
  *batch->mutable_header() = impl_->Header();
  if (from == 0) from = impl_->revision_ + 1;
  if (impl_->options_.mutants.watch_skips_a_revision && from % 5 == 0) ++from;
  return job->log_->Read(request, from, durable_revision, impl_->revision_, max_bytes, batch);
}

void Core::FillStatus(v1::StatusReply* status) const {
  *status->mutable_header() = impl_->Header();
  status->set_agents(static_cast<int>(impl_->agents_.size()));
  std::vector<const Impl::Job*> jobs;
  for (const auto& [id, job] : impl_->jobs_) jobs.push_back(job.get());
  std::sort(jobs.begin(), jobs.end(),
            [](const Impl::Job* a, const Impl::Job* b) { return a->id_ < b->id_; });
  for (const Impl::Job* job : jobs) {
    v1::JobStatus* one = status->add_jobs();
    one->set_job_id(job->id_);
    one->set_generation(job->generation_);
    one->set_rendezvous_state(job->StateName());
    one->set_world_size(static_cast<int>(job->seats_.size()));
    one->set_waiting(static_cast<int>(job->waiting_.size()));
    int64_t min_step = std::numeric_limits<int64_t>::max();
    int64_t max_step = 0;
    for (const Seat& seat : job->seats_) {
      min_step = std::min(min_step, seat.step);
      max_step = std::max(max_step, seat.step);
    }
    one->set_min_step(job->seats_.empty() ? 0 : min_step);
    one->set_max_step(max_step);
  }
}

v1::ReplyHeader Core::Header() const { return impl_->Header(); }
const CoreStats& Core::stats() const { return impl_->stats_; }

std::map<v1::WorkerState, int64_t> Core::MembersByState() const {
  std::map<v1::WorkerState, int64_t> counts;
  for (const auto& [id, job] : impl_->jobs_) {
    for (const Seat& seat : job->seats_) ++counts[seat.record.state()];
    if (!job->waiting_.empty())
      counts[v1::WORKER_STATE_JOINING] += static_cast<int64_t>(job->waiting_.size());
  }
  return counts;
}

}  // namespace muster::coordinator
