#ifndef MUSTER_COORDINATOR_CORE_IMPL_H_
#define MUSTER_COORDINATOR_CORE_IMPL_H_

#include <google/protobuf/arena.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "coordinator/agents.h"
#include "coordinator/agree.h"
#include "coordinator/barrier.h"
#include "coordinator/checkpoint/checkpoint_set.h"
#include "coordinator/core.h"
#include "coordinator/errors.h"
#include "coordinator/free_if_large.h"
#include "coordinator/hubs.h"
#include "coordinator/incarnations.h"
#include "coordinator/jobs/jobs_core.h"
#include "coordinator/kv.h"
#include "coordinator/leases.h"
#include "coordinator/membership.h"
#include "coordinator/quarantine.h"
#include "coordinator/remembered_answers.h"
#include "coordinator/rendezvous.h"
#include "coordinator/seating.h"
#include "coordinator/stack_calls.h"
#include "coordinator/trigger.h"
#include "coordinator/unseated.h"
#include "coordinator/watch_log.h"
#include "proto/muster/v1/admin.pb.h"
#include "proto/muster/v1/journal.pb.h"

// The inside of Core, for its own files only:
//   core.cc          events come in, records and answers go out
//   core_fence.cc    who may change something: term, generation, incarnation
//   core_ops.cc      repeated requests, and one method for each kind of operation; their table
//   core_job.cc      one job: the beginning and the end of a generation, and what follows from them
//   core_checkpoint.cc  the operations on checkpoints
//   core_submitted.cc   submitted jobs and the nodes that run them
//   core_journal.cc  snapshot, replay, the start of a term

namespace muster::coordinator {

constexpr size_t kMaxName = 256;
// The bits of a revision within one term; the term is above them, so that a restarted coordinator
// never gives a number out twice.
constexpr int kRevisionBits = 40;
static_assert(Core::kMaxTerm << kRevisionBits >> kRevisionBits == Core::kMaxTerm);
// How many terms a coordinator can have fallen behind a later one: a million starts, or sixteen
// with --restored (65,537 terms each) on the way.
constexpr uint64_t kMaxTermsAhead = 1 << 20;

class Core::Impl {
 public:
  explicit Impl(CoreOptions options) : options_(std::move(options)) {
    if (!absl::SimpleHexAtoi(options_.cluster_id.substr(0, 16), &cluster_)) cluster_ = 0;
    submitted_ = std::make_unique<JobsCore>(options_.jobs);
  }

 private:
  friend class Core;
  class Job;
  class SnapshotParts;

  void Begin(absl::Time now, Output* out);
  // Ends the part of an event that concerns `job` (null: none): writes its record and lets replies
  // wait for it.
  void End(Job* job);
  // Returns the revision of this event.
  uint64_t Rev() {
    if (event_revision_ == 0) event_revision_ = ++revision_;
    return event_revision_;
  }
  v1::JournalChange* Change() {
    if (record_ == nullptr) {
      record_ = google::protobuf::Arena::CreateMessage<v1::JournalRecord>(&arena_);
    }
    return record_->add_changes();
  }

  void Send(CallId call, std::shared_ptr<const Answer> answer, uint64_t durable) {
    out_->replies.push_back({call, std::move(answer), durable});
  }
  void Send(CallId call, const v1::OpResult& result, uint64_t durable) {
    Send(call, std::make_shared<Answer>(result), durable);
  }
  void SendError(CallId call, v1::OpError error, uint64_t durable) {
    v1::OpResult result;
    *result.mutable_error() = std::move(error);
    Send(call, result, durable);
  }
  v1::ReplyHeader Header() const {
    v1::ReplyHeader header;
    header.set_cluster_id(options_.cluster_id);
    header.set_term(term_);
    header.set_revision(revision_);
    header.set_restore_id(options_.restore_id);
    return header;
  }
  // Called after a write to the keys of `job_id`: warns once when all jobs use four fifths of their
  // budget.
  void WatchKeys(const std::string& job_id) {
    const size_t used = kv_budget_.used, most = kv_budget_.of_all;
    if (used < most / 4 * 3) kv_warned_ = false;
    if (used < most / 5 * 4 || kv_warned_) return;
    kv_warned_ = true;
    Note(job_id, true,
         absl::StrCat(
             "the keys of all jobs have ", used >> 20, " of at most ", most >> 20,
             " MiB: writes beyond that are refused; delete keys or remove jobs that have ended"));
  }
  void Note(const std::string& job_id, bool warning, std::string text) {
    out_->notices.push_back({warning, job_id, std::move(text)});
  }
  void Direct(const std::string& node, std::shared_ptr<const v1::Directive> directive,
              uint64_t durable) {
    if (!node.empty()) out_->directives.push_back({node, std::move(directive), durable});
  }

  struct Query {
    std::string job_id;
    std::string worker_id;
    bool unseated = false;
  };
  // Asks the agent of `node` for a stack and returns the number of the question.
  uint64_t AskForStack(Query query, int64_t pid, const std::string& node, uint64_t durable);
  void UnseatedDone(const std::string& job_id, std::vector<StackCalls::Done> done);

  // Sends directives to the agents that move. Called after each event of hubs_.
  void MoveAgents();

  struct Who {
    Job* job = nullptr;
    Seat* seat = nullptr;  // null: an operator
  };
  struct Incoming;
  // Checks whether the caller may change something. Renews a worker's lease.
  std::optional<v1::OpError> CheckFence(const v1::Fence& fence, bool operators, Who* who);
  // The same for a worker that says its rank; answers the call and returns false if either is
  // wrong.
  bool CheckRank(Incoming* in, const v1::Fence& fence, int32_t rank, Who* who);
  // Checks what is the same for all callers: the job exists, the coordinator is not deposed.
  std::optional<v1::OpError> CheckJob(const v1::Fence& fence, Job** job);
  // Returns whether the caller has seen more of this cluster than this coordinator.
  bool IsAhead(const v1::Fence& fence) const {
    return fence.term_seen() > term_ || fence.revision_seen() > revision_;
  }
  // A caller that is ahead deposes this coordinator if it belongs to `job` and to this cluster, and
  // is refused otherwise: a single packet from anywhere must not end all jobs.
  v1::OpError Ahead(const v1::Fence& fence, const Job* job);
  // Returns why no caller can have seen this; empty: one can.
  std::string Impossible(const v1::Fence& fence) const;
  // Checks an agent that comes in the same way: it belongs to every job that has a seat on its
  // node.
  void CheckAgent(absl::string_view node, const v1::Hello& hello);
  Job* FindJob(absl::string_view job_id) {
    const auto it = jobs_.find(job_id);
    return it == jobs_.end() ? nullptr : it->second.get();
  }
  const Job* FindJob(absl::string_view job_id) const {
    const auto it = jobs_.find(job_id);
    return it == jobs_.end() ? nullptr : it->second.get();
  }
  std::vector<const Job*> JobsById() const;
  static v1::OpError UnknownJob(absl::string_view job_id) {
    return MakeError(
        absl::StatusCode::kNotFound, v1::ERROR_REASON_UNSPECIFIED,
        absl::StrCat("job ", Quoted(job_id),
                     " is not known here: no worker of it has joined, or it was removed, as jobs "
                     "are some time after their end"));
  }

  // An operation that is being applied.
  struct Incoming {
    const CallId call;
    const v1::Op& op;
    const Caller& caller;
    Job* touched = nullptr;  // the job that it concerns, for End; null: it changes nothing
  };
  // Whether an operation is refused while the journal cannot be written.
  enum class Journal { kNotNeeded, kNeeded, kForDurableKeys };
  struct Operation {
    v1::Op::KindCase kind;
    void (Impl::*run)(Incoming*);
    Journal journal;
  };
  static const Operation kOperations[];
  // Returns null if this coordinator does not know the kind.
  static const Operation* FindOperation(const v1::Op& op);
  Job* HandleOp(CallId call, const v1::Op& op, const Caller& caller);

  // One method for each kind of operation: answers it, now or later.
  void AgreeAlive(Incoming* in);
  void Arrive(Incoming* in);
  void ArriveMany(Incoming* in);
  void CancelBarrier(Incoming* in);
  void CaptureStacks(Incoming* in);
  void CaptureUnseated(Incoming* in);  // stacks of processes without a seat
  void DescribeBarrier(Incoming* in);
  void EndGeneration(Incoming* in);
  void GetMembers(Incoming* in);
  void GetRankTable(Incoming* in);
  void Heartbeat(Incoming* in);
  void Join(Incoming* in);
  void Leave(Incoming* in);
  void ListBarriers(Incoming* in);
  void PollTriggers(Incoming* in);
  void QuarantineHost(Incoming* in);
  void RaiseTrigger(Incoming* in);
  void RecallBarriers(Incoming* in);
  void RemoveJob(Incoming* in);
  void ReportExit(Incoming* in);
  void StragglerReport(Incoming* in);
  void Checkpoint(Incoming* in);  // all operations on checkpoints
  void Submitted(Incoming* in);   // all on submitted jobs and nodes
  void Txn(Incoming* in);
  void WaitKeys(Incoming* in);

  // JobsEvent() makes an event of submitted_. EndJobs() after each takes what follows, ends the
  // event, and closes the groups of attempts that are over, each in a record of its own. What a
  // crash leaves open, the next term closes.
  JobsCore::Event JobsEvent() const;
  std::string OwnerOf(absl::string_view job) const;
  // Checks whether the token of an attempt still opens something: it is the current one of a job
  // that has not ended. Errors: RENDEZVOUS_CLOSED.
  std::optional<v1::OpError> CheckAttempt(absl::string_view group) const;
  // Checks whether this caller may do this now.
  std::optional<v1::OpError> CheckIdentity(const Identity& who, const v1::Op& op);
  void EndJobs(JobsOutput out);
  // Hands what became of groups in this event to submitted_, each in an event of its own.
  void TellJobs();
  using EndedGroup = std::pair<std::string, std::string>;  // a group, and why it ended
  void CloseGroups(const std::vector<EndedGroup>& ended);
  // Ends the event. Returns the groups that are to be closed once their jobs have started the term.
  std::vector<EndedGroup> StartJobsTerm(uint64_t lost_terms);
  // Returns why workers may no longer join this group, if so: its attempt is over.
  std::optional<std::string> WhyGroupEnded(absl::string_view group) const;
  // Returns the group of an earlier attempt of the same job, which has checkpoints; null: there is
  // none.
  Job* FormerAttempt(absl::string_view group);
  // Returns the last of the job's attempts up to `number` whose group has checkpoints.
  Job* LastWithCheckpoints(const std::string& job_id, int number);
  // Fills in from where the job of a dry run would continue.
  void PlanCheckpoint(v1::SubmitJobReply* reply);

  // Returns the job that a worker joins, which may begin with it; null: its join was refused.
  Job* JobToJoin(Incoming* in);
  // Pass a job's checkpoints to the job of the same name that begins in the same record.
  void LeaveCheckpoints(Job* former);
  void AdoptCheckpoints(Job* job);
  // Returns whether the agents of the job, whose number varies, have met again and run its workers:
  // they stop all of them before they meet, and so decide how many it has from then on.
  bool IsResizedByItsAgents(const Job& job, const Caller& caller) const;
  // `former`: the ended job of that name, or null.
  Job* BeginJob(Incoming* in, Job* former);
  // Runs f(who, result) -> error once for each (worker_id, incarnation, request_id). `operators`:
  // not only a seated worker may call. `reads`: the answer reveals earlier durable changes.
  // `writes`: it may change something; else it may as well be run again, and is not remembered.
  struct Rules {
    bool operators = false;
    bool reads = false;
    bool writes = true;
  };
  template <typename Request, typename F>
  void Once(Incoming* in, const Request& request, Rules rules, F f);

  absl::Status ApplyChange(const v1::JournalChange& change);
  template <typename Message>
  absl::Status ApplyToJob(const Message& change);
  // Called both at replay and at the start of `term`, so that the record of the term need not hold
  // its effects.
  void BecomeRestored(uint64_t term);
  // `replaced`: the same event makes another job of its name.
  void Remove(Job* job, const std::string& why, bool replaced = false);

  CoreOptions options_;
  uint64_t cluster_ = 0;  // as Fence has it; 0: unknown, not checked
  CoreStats stats_;
  ReportBudget report_budget_;
  // The checkpoints of the job left_by_, until the job that replaces it begins.
  std::unique_ptr<CheckpointSet> left_checkpoints_;
  std::string left_by_;
  KvBudget kv_budget_{.of_job = options_.job_kv_bytes, .of_all = options_.kv_bytes};
  bool kv_warned_ = false;
  uint64_t term_ = 0;  // the journal's until StartTerm
  uint64_t restored_term_ = 0;
  bool serving_ = false;
  bool restoring_ = false;  // a part of a snapshot was read, and no record
  uint64_t revision_ = 0;
  uint64_t last_record_ = 0;
  absl::flat_hash_map<std::string, std::unique_ptr<Job>> jobs_;
  std::vector<std::string> warnings_;                              // for FillStatus
  absl::btree_set<std::pair<absl::Time, std::string>> deadlines_;  // the jobs' deadlines
  // Jobs with living workers in a sealed generation: while there are any, ticks come regularly.
  absl::btree_set<std::pair<absl::Duration, std::string>> leases_;
  absl::Time caught_up_ = absl::InfinitePast();  // the argument of CaughtUp
  std::vector<std::string> unread_jobs_;         // jobs whose unread_ is not empty
  std::unique_ptr<JobsCore> submitted_;
  uint64_t jobs_record_ = 0;                     // the last one with a change of submitted_
  std::vector<JobsCore::GroupNews> group_news_;  // from this event, for submitted_
  Agents agents_;
  GroupedHubs hubs_{options_.hubs};
  absl::btree_map<uint64_t, Query> queries_;  // stacks that agents were asked for
  uint64_t next_query_ = 1;
  Unseated unseated_;
  struct Held {
    std::string job_id;
    enum { kJoin, kBarrier, kWait, kStacks } kind;
    std::string worker_id;  // of a join
  };
  absl::flat_hash_map<CallId, Held> held_;

  // The current event. Objects that it makes in the arena are gone when the next one begins.
  alignas(8) char arena_block_[16 << 10];
  google::protobuf::Arena arena_{arena_block_, sizeof(arena_block_)};
  absl::Time now_ = absl::InfinitePast();
  absl::string_view caller_node_;  // as Caller has it
  bool caller_may_depose_ = true;
  Output* out_ = nullptr;
  uint64_t event_revision_ = 0;
  v1::JournalRecord* record_ = nullptr;  // in the arena; null: nothing to write
  size_t first_reply_ = 0;
  size_t first_directive_ = 0;
};

// One job: its current generation, and the parts that belong to it.
class Core::Impl::Job : public BarrierHost {
 public:
  Job(Impl* impl, std::string id)
      : impl_(impl),
        id_(std::move(id)),
        leases_(&members_, &impl->agents_),
        log_(std::make_unique<WatchLog>(impl->options_.watch_events, impl->options_.watch_bytes,
                                        impl->revision_)),
        quarantine_({.strikes = impl->options_.strikes_to_quarantine,
                     .window = impl->options_.strike_window,
                     .length = impl->options_.quarantine_for}),
        answers_(impl->options_.kept_answers, impl->options_.kept_answer_bytes),
        triggers_(impl->options_.mutants.trigger_below_a_horizon),
        checkpoints_(id_, &impl->report_budget_,
                     {.seals_before_coverage = impl->options_.mutants.seals_before_coverage,
                      .deletes_last_resumable = impl->options_.mutants.deletes_last_resumable,
                      .resumes_from_damaged = impl->options_.mutants.resumes_from_damaged,
                      .resumes_from_held_back = impl->options_.mutants.resumes_from_held_back,
                      .deletes_before_seal = impl->options_.mutants.deletes_before_seal,
                      .deletes_pinned = impl->options_.mutants.deletes_pinned,
                      .forgets_damage = impl->options_.mutants.forgets_damage,
                      .sizes_clear_damage = impl->options_.mutants.sizes_clear_damage,
                      .sizes_count_as_contents = impl->options_.mutants.sizes_count_as_contents},
                     impl->options_.sign_checkpoint) {}

  // Called once, before anything else.
  void Begin(const v1::RendezvousSpec& spec, uint64_t generation) {
    spec_ = spec;
    members_.Begin(generation);
    leases_.Begin(Terms());
  }

  const std::string& id() const { return id_; }
  const v1::RendezvousSpec& spec() const { return spec_; }
  uint64_t generation() const { return members_.generation(); }  // the last sealed
  bool sealed() const { return members_.sealed(); }              // and not ended
  bool expired() const { return expired_; }                      // to be removed
  const std::vector<Seat>& seats() const { return members_.seats(); }
  Seat* seat(int rank) { return members_.mutable_at(rank); }
  Seat* FindSeat(absl::string_view worker_id) { return members_.Find(worker_id); }
  // The parts. There are no barriers and agreements until the first generation is sealed.
  const Membership& members() const { return members_; }
  const Rendezvous& rendezvous() const { return rendezvous_; }
  const Incarnations& incarnations() const { return incarnations_; }
  const Quarantine& quarantine() const { return quarantine_; }
  const WatchLog& log() const { return *log_; }
  KvStore& kv() { return kv_; }
  CheckpointSet& checkpoints() { return checkpoints_; }
  const CheckpointSet& checkpoints() const { return checkpoints_; }
  // Returns how long the job is kept when nothing of it is alive.
  absl::Duration Retention() const {
    return checkpoints_.size() > 0 ? impl_->options_.checkpoint_retention
                                   : impl_->options_.job_retention;
  }
  RememberedAnswers& answers() { return answers_; }
  TriggerSet& triggers() { return triggers_; }
  BarrierSet* barriers() const { return barriers_.get(); }
  AgreeSet* agree() const { return agree_.get(); }

  // The latest records with changes of these kinds: outputs that reveal them wait for these.
  uint64_t membership_record() const { return membership_record_; }
  uint64_t kv_record() const { return kv_record_; }
  uint64_t AllRecords() const {
    return std::max({membership_record_, kv_record_, barrier_record_});
  }
  // Notes that this event changes something of this kind, in addition to the changes that the
  // methods below record.
  void TouchMembership() { membership_touched_ = true; }
  void TouchWatch() { watch_touched_ = true; }
  // Notes that the job is in use: its removal time restarts.
  void Touch() {
    touched_ = impl_->now_;
    rests_ = false;
  }
  // Notes that the event has ended and that its record is `revision`.
  void Recorded(uint64_t revision);
  void AfterEvent();
  // Removes the job from the deadlines: no tick is for it any longer.
  void Unschedule();

  absl::Duration Lease() const { return leases_.length(); }
  void Tick();
  // See Core::CaughtUp.
  void CaughtUp() { leases_.CaughtUp(impl_->now_); }
  // Restarts every lease after a pause of this process, and lets no deadline pass before there was
  // time to read the messages that came meanwhile.
  void Resume() {
    leases_.Resume(impl_->now_);
    hold_until_ = impl_->now_ + std::min(absl::Seconds(1), Lease() / 4);
  }

  // Returns whether the caller holds a seat here, waits for one or held one last; or is the agent
  // that speaks for such a worker.
  bool IsMember(const v1::Fence& fence, absl::string_view node) const;
  // Returns the incarnation that waits for a seat under this name, or holds one; 0: neither.
  uint64_t NewestOf(absl::string_view worker_id) const;
  // See Core::StartTerm.
  void BecomeRestored();
  // Returns whether a generation was sealed since the job began, or since it was restored.
  bool HasSealed() const { return barriers_ != nullptr; }
  // Returns whether nothing of the job is alive, nor can any of its workers come back: each has
  // ended or was silent for its lease. Between two generations survivors live.
  bool Over() const;
  // Returns the agent that may start this job's workers again, in words; empty: none will. A worker
  // has failed in a way that allows a restart, and its agent is attached or has a lease to come
  // back to a restarted coordinator.
  std::string RestartedBy() const;
  // Handles a worker that its agent lists but that has no seat: resends the directive it must have
  // missed, unless `told` (which this sets) says that this beat's agent already got the end of the
  // generation.
  void TellAgain(const std::string& node, const v1::WorkerBeat& worker, bool* told);
  void Kill(const std::string& node, const std::string& worker_id, uint64_t incarnation);
  void FenceIncarnation(const std::string& worker_id, uint64_t incarnation);
  v1::OpError Superseded(const std::string& worker_id, uint64_t newer) const;
  v1::OpError Ended() const;
  std::optional<v1::OpError> CheckGeneration(const v1::Fence& fence) const;

  void Enqueue(CallId call, const v1::JoinRequest& request, const Caller& caller);
  void DropWaiting(const std::string& worker_id, const v1::OpError& error);
  // Abandons a held join whose caller is gone.
  void AbandonJoin(const std::string& worker_id, CallId call);
  // Seals the next generation if Rendezvous decides so.
  void Evaluate();
  void Reseat(int rank, CallId call, const v1::JoinRequest& request, const Caller& caller);
  void SendSeat(CallId call, const Seat& seat);
  void EndGeneration(const std::string& why, std::vector<v1::Culprit> culprits);
  void WorkerGone(int rank, v1::WorkerState state, const v1::ExitCause& cause);
  // Ends the claim of a worker that had a seat in the generation that has ended.
  void LeaveBetween(const std::string& worker_id, const v1::ExitCause& cause);
  std::string GoneText(const Seat& seat) const;
  void QuarantineHost(const std::string& host, absl::Duration length, const std::string& reason,
                      bool automatic);
  void Close(const std::string& why);
  v1::WorkerState StateOf(const Seat& seat) const;
  bool watch_touched() const { return watch_touched_; }  // by this event
  bool Waits(const Seat& seat) const { return rendezvous_.Waits(seat.record().worker_id()); }
  v1::Member MakeMember(const Seat& seat) const;
  v1::Member MakeMember(const Waiter& waiter) const;
  void RenewLease(const Seat& seat) {
    const bool was_lost = !sealed() && StateOf(seat) == v1::WORKER_STATE_LOST;
    if (leases_.Renew(seat.rank(), impl_->now_)) NoteAllHeard();
    if (was_lost) EmitMember(seat);
  }
  // Notes what a heartbeat, or a beat of its agent, says of a worker.
  template <typename Report>
  void NoteProgress(Seat* seat, const Report& report) {
    seat->AtStep(report.step());
    seat->SetPhase(report.phase());
    seat->SetLastCollective(report.last_collective());
    seat->SetProgress(report.progress());
    seat->SetSave(report.has_save() ? &report.save() : nullptr);
    if (seat->rank() != 0) return;
    if (report.has_restored_ago() && !std::exchange(restored_told_, true)) {
      TellJobs(AttemptStage::kRestored, impl_->now_ - FromProto(report.restored_ago()));
    }
    // A program that reports its own progress sends only the step. The step that the seat has from
    // arrivals at barriers does not count: they come before the beat that has the times.
    if ((report.has_first_step_ago() || report.step() > 0) && !std::exchange(stepped_told_, true)) {
      TellJobs(AttemptStage::kStepped, impl_->now_ - FromProto(report.first_step_ago()));
    }
  }
  // Ends a generation whose leases have all expired and that is kept only in case its workers
  // return, because the name of the job is needed. `for_what` says for what.
  void EndIfNobodyIsHeard(absl::string_view for_what);

  std::optional<v1::OpError> Txn(const v1::TxnRequest& request, const Seat* seat,
                                 v1::OpResult* result);
  void TriggersChanged(std::vector<v1::TriggerChanged> changes);
  // Runs one of the operations on checkpoints; `seat` is null for an operator.
  std::optional<v1::OpError> CheckpointOp(const v1::Op& op, const Seat* seat, v1::OpResult* result);
  void AgreeDone(std::vector<AgreeSet::Done> done);
  // Answers the call now or later, unless this returns an error.
  std::optional<v1::OpError> CaptureStacks(CallId call, const v1::CaptureStacksRequest& request);
  void StackTaken(uint64_t query) { StacksDone(stack_calls_.Answered(query)); }
  void AbandonStacks(CallId call) { stack_calls_.Abandon(call); }

  const char* StateName() const;
  void FillStatus(v1::JobStatus* status) const;

  // Applies a change of this kind, at replay. Errors: DATA_LOSS.
  absl::Status Apply(const v1::JobClosed& change);
  absl::Status Apply(const v1::GenerationSealed& change);
  absl::Status Apply(const v1::GenerationClosed& change);
  absl::Status Apply(const v1::SeatTaken& change);
  absl::Status Apply(const v1::WorkerEnded& change);
  absl::Status Apply(const v1::IncarnationFenced& change);
  absl::Status Apply(const v1::WorkerDeparted& change);
  absl::Status Apply(const v1::KvChanged& change);
  absl::Status Apply(const v1::TriggerChanged& change);
  absl::Status Apply(const v1::TriggerAcked& change);
  absl::Status Apply(const v1::BarrierEnded& change);
  absl::Status Apply(const v1::HostStruck& change);
  absl::Status Apply(const v1::HostQuarantined& change);
  absl::Status Apply(const v1::RequestAnswered& change);
  absl::Status Apply(const v1::RequestsForgotten& change);
  absl::Status Apply(const v1::CheckpointChanged& change);
  void SnapshotTo(SnapshotParts* parts) const;
  void SnapshotHostsTo(SnapshotParts* parts) const;
  static void SetStrikes(const std::vector<absl::Time>& strikes, v1::HostStruck* struck);
  void ForgetHosts() { quarantine_.Clear(); }
  // See Core::StartTerm.
  void StartTerm();

  v1::ReplyHeader Header() const override { return impl_->Header(); }
  v1::Culprit DescribeRank(int rank) const override;
  void AskStack(int rank) override;
  void Deliver(const std::vector<CallId>& calls, std::shared_ptr<const Answer> answer) override;
  void JournalEnd(const std::string& barrier_id, uint64_t counter, const Answer& answer) override;
  void Report(const v1::BarrierReport& report, absl::Span<const int32_t> members) override;
  void Blame(absl::Span<const int32_t> ranks) override;

 private:
  void TellJobs(AttemptStage stage, absl::Time at) {
    impl_->group_news_.push_back({id_, stage, at});
  }
  LeaseTerms Terms() const;
  absl::Duration JoinTimeout() const {
    return Or(spec_.has_join_timeout(), spec_.join_timeout(), impl_->options_.default_join_timeout);
  }
  static absl::Duration Or(bool has, const google::protobuf::Duration& value,
                           absl::Duration otherwise) {
    const absl::Duration duration = FromProto(value);
    return has && duration > absl::ZeroDuration() ? duration : otherwise;
  }
  absl::Time NextDeadline() const {
    absl::Time next =
        std::min({rendezvous_.NextDeadline(), kv_.NextDeadline(), stack_calls_.NextDeadline()});
    if (barriers_ != nullptr) next = std::min(next, barriers_->NextDeadline());
    if (agree_ != nullptr) next = std::min(next, agree_->NextDeadline());
    next = std::min(next, leases_.NextDeadline());
    if (Idle()) next = std::min({next, touched_ + Retention(), KeysExpire(), RestsAt()});
    return std::max(next, hold_until_);
  }
  // Returns when it is too late for another generation to follow at once. Then what only the last
  // generation, and its watchers, have used goes, and so do the answers to workers: a worker that
  // repeats a request without a seat is refused, so the request has no second effect.
  absl::Time RestsAt() const {
    return Idle() && !rests_ ? touched_ + JoinTimeout() : absl::InfiniteFuture();
  }
  void Rest();
  // Returns when the job's keys go; InfiniteFuture: it has none.
  absl::Time KeysExpire() const {
    return Idle() && kv_.size() > 0 ? touched_ + impl_->options_.job_retention
                                    : absl::InfiniteFuture();
  }
  // Returns whether nothing of the job is alive: it is kept for status queries.
  bool Idle() const { return !members_.sealed() && rendezvous_.empty(); }

  // Remembers a fence; FenceIncarnation writes it down too.
  void RememberFenced(const std::string& worker_id, uint64_t incarnation);
  // Called after a seal: remembers the workers of `old_seats` without a new seat, and forgets those
  // with one.
  void NoteDeparted(const std::vector<Seat>& old_seats);
  v1::OpError Stale(const v1::Fence& fence) const;

  // Takes a worker out of the queue: its calls are no longer held.
  Waiter Unqueue(absl::string_view worker_id);
  WaiterKind KindOf(const v1::JoinRequest& request) const;
  bool SurvivorsWait() const;
  // See SealQuestion::claims_end.
  absl::Time ClaimsEnd() const;
  // Classifies the waiting workers again, because a host may have become free, or no longer be.
  void Recount();
  std::vector<Candidate> Candidates() const;
  // Gives `world_size` of the candidates their seats. Returns the calls that wait for each.
  std::vector<std::vector<CallId>> TakeSeats(int world_size, std::vector<Seat>* former_seats);
  void Seal(int world_size);
  void BeginGeneration(bool counters_known);
  // Fails the joins whose time is over. All that waited at the same time get the same answer, and
  // workers that gave up before the others count as arrived.
  void TickTimeouts();
  v1::OpError RendezvousTimeout() const;
  void ForgetTimeouts() {
    timeout_ = nullptr;
    gave_up_.clear();
  }
  void Strike(const std::string& host, const std::string& what);
  void EmitMember(const Seat& seat);

  // Asks the agent of `rank`; returns the number of the query, or 0 if there is none to ask.
  uint64_t QueryStack(int rank);
  void StacksDone(std::vector<StackCalls::Done> done);
  void TickLeases();
  void NoteFirstSilent(int rank, const std::string& why);
  void NoteAllHeard();
  // Returns whether a worker that waits for a seat is there now and proves that the coordinator is
  // not cut off: it has been heard all along, or for long enough that the workers of the generation
  // would be back too.
  bool IsAwaited() const;

  void KvChanged(const std::vector<KvChange>& changes);
  void DropTriggers(const std::string& why);
  void CheckpointsChanged(std::vector<v1::CheckpointChanged> changes);
  // Counts for the metrics page.
  void CountCheckpoint(const v1::Op& op, const CheckpointSet::Changes& changes);
  void CountPublished(uint64_t bytes, int64_t stall_us, int64_t save_us);
  void SnapshotGenerationTo(SnapshotParts* parts) const;
  void SnapshotAnswersTo(SnapshotParts* parts) const;
  // Returns the record that requests of this incarnation up to `up_to` have no remembered answers.
  v1::RequestsForgotten Forgotten(const std::string& worker_id, uint64_t incarnation,
                                  uint64_t up_to) const;

  Impl* const impl_;
  const std::string id_;
  v1::RendezvousSpec spec_;

  Membership members_;
  Leases leases_;
  Rendezvous rendezvous_;
  // The answer to joins that time out; null: not made yet. It is made again if workers have joined
  // or left since, but at most once a second: workers that time out and join again at once would
  // otherwise have it made each time, from all workers.
  std::shared_ptr<const Answer> timeout_;
  absl::Time timeout_made_ = absl::InfinitePast();
  bool timeout_changed_ = false;
  // Workers whose join has timed out within the time that one may take, while others wait.
  struct GaveUp {
    absl::Time at;
    int preferred_rank = -1;
  };
  absl::flat_hash_map<std::string, GaveUp> gave_up_;
  absl::Time hold_until_ = absl::InfinitePast();
  Incarnations incarnations_;

  KvStore kv_{&impl_->kv_budget_};
  std::unique_ptr<WatchLog> log_;
  Quarantine quarantine_;
  RememberedAnswers answers_;
  TriggerSet triggers_;
  CheckpointSet checkpoints_;
  std::unique_ptr<BarrierSet> barriers_;
  std::unique_ptr<AgreeSet> agree_;
  StackCalls stack_calls_;

  // The latest records with changes of these kinds: outputs that reveal them wait for these.
  uint64_t membership_record_ = 0;
  uint64_t kv_record_ = 0;
  uint64_t barrier_record_ = 0;
  bool membership_touched_ = false;
  bool kv_touched_ = false;
  bool barrier_touched_ = false;
  bool watch_touched_ = false;
  // Whether submitted_ has recorded that rank 0 of this generation has restored, and stepped, in
  // this term.
  bool restored_told_ = false, stepped_told_ = false;
  BarrierCounts seen_counts_;
  absl::Time scheduled_ = absl::InfiniteFuture();
  absl::Duration running_lease_ = absl::InfiniteDuration();  // in leases_; infinite: it is not
  // When the job was last not idle or changed, or one of its workers last spoke.
  absl::Time touched_ = absl::InfinitePast();
  bool was_idle_ = false;  // after the last event
  bool rests_ = false;     // since touched_
  bool expired_ = false;   // to be removed
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_IMPL_H_
