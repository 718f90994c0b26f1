#include "tests/simulation/simulator.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/errors.h"
#include "tests/simulation/linearizability.h"
#include "tests/simulation/sim_disk.h"

namespace muster::simulation {
namespace {

using coordinator::CallId;
using coordinator::Core;
using coordinator::FromProto;
using coordinator::Output;
using coordinator::ToProto;

constexpr char kJob[] = "job";
const absl::Time kStart = absl::FromUnixSeconds(1'000'000);
const absl::Duration kLease = absl::Seconds(2);
const char* const kDurableKeys[] = {"d0", "d1", "count"};
const char* const kEphemeralKeys[] = {"e0", "e1"};

using InstanceId =
    std::pair<std::pair<uint64_t, std::string>, uint64_t>;  // ((generation, barrier_id), counter)

// What a barrier's result says, for comparing results of one instance; empty: it says nothing about
// the instance.
std::string Verdict(const v1::OpResult& result) {
  if (result.has_arrive()) {
    return v1::BarrierState_Name(result.arrive().report().state()) + "|" +
           absl::StrJoin(result.arrive().payloads(), ",");
  }
  switch (result.error().detail().reason()) {
    case v1::ERROR_REASON_BARRIER_TIMEOUT:
    case v1::ERROR_REASON_RANK_FAILED:
    case v1::ERROR_REASON_CANCELLED_BY_PEER:
    case v1::ERROR_REASON_DESYNC:
      return v1::ErrorReason_Name(result.error().detail().reason());
    default:
      return "";
  }
}

class Sim;

// One process of a worker: joins, then runs the same program of collectives as its peers, with
// key-value operations of its own in between.
class Process {
 public:
  Process(Sim* sim, int slot, uint64_t incarnation);
  void Start();
  void Receive(uint64_t tag, const std::shared_ptr<const v1::OpResult>& result);

  std::string worker_id() const { return absl::StrCat("w", slot_); }
  bool seated() const { return alive_ && rank_ >= 0; }

  Sim* const sim_;
  const int slot_;
  const uint64_t incarnation_;
  bool alive_ = true;
  absl::Time paused_until_ = absl::InfinitePast();

  uint64_t generation_ = 0;
  int rank_ = -1;
  int world_size_ = 0;
  uint64_t term_ = 0;
  int64_t step_ = 1;     // the next one to begin
  int passed_here_ = 0;  // barriers passed since the last (re)join

 private:
  struct Call {
    std::shared_ptr<v1::Op> op;
    std::function<void(const v1::OpResult&)> done;
    absl::Duration retry;
    int attempts = 0;
    CallId last_attempt = 0;
  };
  // Runs `f` at `when` unless the process is dead, or has rejoined meanwhile (`session`).
  void At(absl::Time when, std::function<void()> f, bool any_session = false);
  void Begin(std::shared_ptr<v1::Op> op, absl::Duration retry,
             std::function<void(const v1::OpResult&)> done);
  void Send(uint64_t tag);
  void SendAgain(uint64_t tag, absl::Duration after);
  void FillFence(v1::Fence* fence, bool request);
  void Join();
  void Rejoin();
  // Acts on an error that ends what the process was doing. False: the error is about this call
  // only.
  bool Leaves(const v1::OpError& error);
  void SawTerm(const v1::OpResult& result);
  void Heartbeat();
  void Step();
  void KvThen(std::function<void()> next);
  void PollTriggers();
  void GateThen(std::function<void()> next);
  void Collective();
  void AfterCollective();

  uint64_t session_ = 0;
  uint64_t next_tag_ = 1;
  uint64_t next_request_ = 1;
  std::map<uint64_t, Call> calls_;
  std::map<std::string, uint64_t> counters_;            // next counter of each barrier
  std::map<std::string, v1::BarrierState> previous_;    // how the last one ended
  std::vector<std::pair<uint64_t, int64_t>> triggers_;  // (id, effective step) to act upon
  std::set<uint64_t> acted_;
  std::map<uint64_t, int64_t> pending_;  // undecided trigger -> the step that it keeps us from
  int64_t begun_ = 0;                    // the last step begun
  bool polled_ = false;                  // knows what was decided before it came
  friend class Sim;
};

class Sim {
 public:
  explicit Sim(const SimulationOptions& options);
  SimulationResult Run();

  uint64_t Draw(uint64_t n) { return random_() % n; }
  bool Chance(double p) { return static_cast<double>(random_() >> 11) * 0x1.0p-53 < p; }
  absl::Duration Between(absl::Duration low, absl::Duration high) {
    return low +
           absl::Nanoseconds(static_cast<int64_t>(Draw(1 + absl::ToInt64Nanoseconds(high - low))));
  }
  absl::Time now() const { return now_; }
  void At(absl::Time when, std::function<void()> f) {
    queue_.push({std::max(when, now_), next_event_++, std::move(f)});
  }
  void Trace(const std::string& text) {
    if (options_.trace) {
      result_.trace.push_back(absl::StrCat(absl::FormatDuration(now_ - kStart), " ", text));
    }
  }
  void Violation(const std::string& text) {
    Trace("VIOLATION " + text);
    if (result_.violation.empty()) result_.violation = text;
  }

  // `slot` is whose link; -1: the operator and watchers, whose link is only slow.
  void Transfer(int slot, bool to_server, bool may_repeat, std::function<void()> deliver);
  void ToServer(const std::shared_ptr<Process>& process, uint64_t tag,
                const std::shared_ptr<const v1::Op>& op, CallId* attempt);
  void FromOperator(const v1::Op& op, std::function<void(const v1::OpResult&)> done);

  void StartServer();
  void CrashServer(bool by_disk_error);
  void WhenServerRuns(std::function<void()> f);  // at once, after its pause, or never if it is down
  void Handle(CallId call, const v1::Op& op);
  void Absorb(const v1::Op* op, CallId call);
  void Flush();
  void SyncDone(uint64_t life, size_t bytes, uint64_t revision);
  void ReleaseReplies();
  void ScheduleTick();
  void TakeSnapshot();
  void Release(const coordinator::Reply& reply);

  void Chaos();
  void Heal();
  void StartWorker(int slot);
  void Kill(const std::shared_ptr<Process>& process, bool told);
  void Watch();
  void OperatorKv();
  void CheckProgress();

  void CheckHandled(const v1::Op& op, const std::optional<v1::OpResult>& immediate);
  void CheckPassed(const v1::OpResult& result);
  void CheckRecovered();
  void CheckAtEnd();
  void SawBarrier(const Process& process, const InstanceId& id, const v1::OpResult& result,
                  uint64_t term);
  size_t KvBegin(const std::string& key, KvEvent event);
  void KvEnd(const std::string& key, size_t index, const v1::OpResult& result);
  void Saw(const std::string& key, uint64_t mod_revision) {
    uint64_t& seen = visible_mod_[key];
    seen = std::max(seen, mod_revision);
  }
  void Digest(const std::string& bytes) {
    for (const char c : bytes)
      result_.digest = (result_.digest ^ static_cast<uint8_t>(c)) * 1099511628211ull;
  }

  const SimulationOptions options_;
  SimulationResult result_;
  std::mt19937_64 random_;
  struct Event {
    absl::Time when;
    uint64_t order;
    std::function<void()> f;
    bool operator<(const Event& other) const {
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  std::priority_queue<Event> queue_;
  uint64_t next_event_ = 0;
  absl::Time now_ = kStart;

  // The world of this seed.
  int slots_ = 0;
  v1::RendezvousSpec spec_;
  double drop_ = 0;
  double repeat_ = 0;
  absl::Duration slow_;
  bool healed_ = false;
  absl::Time healed_at_;
  std::vector<std::pair<absl::Time, absl::Time>> cut_;  // by slot: to server, from server
  std::vector<std::shared_ptr<Process>> current_;       // by slot
  std::vector<std::shared_ptr<Process>> all_;
  uint64_t next_incarnation_ = 1000;

  // The server's process.
  SimDisk disk_;
  std::unique_ptr<Core> core_;
  coordinator::CoreOptions core_options_;
  bool up_ = false;
  bool serving_ = false;
  uint64_t life_ = 0;
  absl::Time server_paused_until_ = absl::InfinitePast();
  CallId next_call_ = 1;
  struct Origin {
    std::shared_ptr<Process> process;  // null: an operator
    uint64_t tag = 0;
    std::shared_ptr<const v1::Op> op;
    std::function<void(const v1::OpResult&)> done;
  };
  std::map<CallId, Origin> origins_;
  std::vector<coordinator::Record> unwritten_;  // not yet accepted by the disk
  std::vector<coordinator::Reply> held_;        // wait for durability
  uint64_t written_ = 0;
  uint64_t durable_ = 0;
  uint64_t term_revision_ = 0;  // of the record that begins the term
  bool syncing_ = false;
  bool journal_failed_ = false;
  absl::Time next_tick_ = absl::InfiniteFuture();
  Output out_;

  // What the checks know.
  std::map<std::string, std::vector<KvEvent>> history_;
  std::map<std::string, std::vector<uint64_t>> history_terms_;  // of the answers; 0: none
  std::map<std::string, uint64_t> visible_mod_;  // durable keys: largest revision anyone has seen
  std::set<std::string> deleted_;                // durable keys that someone has tried to delete
  uint64_t visible_generation_ = 0;
  uint64_t visible_end_ = 0;
  uint64_t current_generation_ = 0;  // of the running core
  std::map<std::string, uint64_t> seat_of_, visible_seat_of_;
  std::set<uint64_t> superseded_, visible_superseded_;
  std::set<std::pair<uint64_t, uint64_t>> answered_;  // (incarnation, request_id) with an OK answer
  std::map<InstanceId, std::set<int>> arrived_;
  std::map<InstanceId, std::vector<int>> participants_;
  struct SeenResult {
    std::string verdict;
    uint64_t term = 0;
    uint64_t incarnation = 0;
  };
  std::map<InstanceId, std::vector<SeenResult>> results_;
  std::map<InstanceId, int64_t> failed_at_;  // event number
  std::map<std::pair<uint64_t, uint64_t>, int64_t>
      recalled_at_;  // (incarnation, term) -> event number
  std::map<InstanceId, std::map<int, std::string>> payloads_;
  std::map<std::pair<uint64_t, uint64_t>, std::string> agreements_;  // (generation, counter)
  std::map<std::pair<uint64_t, int>, uint64_t> seats_;   // (generation, rank) -> incarnation
  std::map<uint64_t, std::pair<int, uint64_t>> tables_;  // generation -> (world size, digest)
  std::map<std::pair<uint64_t, uint64_t>, int64_t> trigger_steps_;  // (generation, trigger) -> step
  struct Write {
    uint64_t revision = 0;
    std::string key;
    std::string value;
  };
  std::vector<Write> acked_writes_;
  struct Watcher {
    uint64_t next = 0;
    uint64_t poll = 0;
    std::vector<std::pair<uint64_t, uint64_t>> covered;  // [from, next)
    std::set<std::pair<uint64_t, std::string>> seen;     // (revision, key)
  };
  std::vector<Watcher> watchers_;
  int64_t next_value_ = 1;
  friend class Process;
};

Process::Process(Sim* sim, int slot, uint64_t incarnation)
    : sim_(sim), slot_(slot), incarnation_(incarnation) {}

void Process::At(absl::Time when, std::function<void()> f, bool any_session) {
  const std::shared_ptr<Process> self = sim_->all_[incarnation_ - 1000];
  const uint64_t session = session_;
  sim_->At(when, [self, session, any_session, f = std::move(f)] {
    if (!self->alive_ || (!any_session && session != self->session_)) return;
    if (self->sim_->now() < self->paused_until_) {
      self->At(self->paused_until_, f, any_session);
      return;
    }
    f();
  });
}

void Process::FillFence(v1::Fence* fence, bool request) {
  fence->set_job_id(kJob);
  fence->set_worker_id(worker_id());
  fence->set_incarnation(incarnation_);
  fence->set_generation(generation_);
  if (request) fence->set_request_id(next_request_++);
}

void Process::Begin(std::shared_ptr<v1::Op> op, absl::Duration retry,
                    std::function<void(const v1::OpResult&)> done) {
  const uint64_t tag = next_tag_++;
  calls_[tag] = {std::move(op), std::move(done), retry};
  Send(tag);
}

void Process::Send(uint64_t tag) {
  const auto it = calls_.find(tag);
  if (it == calls_.end()) return;
  Call& call = it->second;
  if (call.attempts++ > 0 && call.last_attempt != 0 && sim_->Chance(0.5)) {
    // The transport tells the server that the former attempt was given up.
    const CallId old = call.last_attempt;
    Sim* const sim = sim_;
    sim->Transfer(slot_, true, false, [sim, old] {
      sim->WhenServerRuns([sim, old] {
        if (!sim->serving_) return;
        sim->core_->Abandon(old, sim->now(), &sim->out_);
        sim->Absorb(nullptr, 0);
      });
    });
  }
  sim_->ToServer(sim_->all_[incarnation_ - 1000], tag, call.op, &call.last_attempt);
  SendAgain(tag, call.retry);
}

void Process::SendAgain(uint64_t tag, absl::Duration after) {
  // Unless it was sent again meanwhile: each attempt has one successor.
  At(sim_->now() + after, [this, tag, attempt = calls_[tag].attempts] {
    const auto it = calls_.find(tag);
    if (it != calls_.end() && it->second.attempts == attempt) Send(tag);
  });
}

void Process::Receive(uint64_t tag, const std::shared_ptr<const v1::OpResult>& result) {
  if (!alive_) return;
  if (sim_->now() < paused_until_) {
    At(
        paused_until_, [this, tag, result] { Receive(tag, result); }, true);
    return;
  }
  const auto it = calls_.find(tag);
  if (it == calls_.end()) return;
  if (result->error().detail().retryable()) {
    SendAgain(tag, absl::Milliseconds(50));
    return;
  }
  const Call call = std::move(it->second);
  calls_.erase(it);
  SawTerm(*result);
  call.done(*result);
}

void Process::SawTerm(const v1::OpResult& result) {
  uint64_t term = 0;
  if (result.has_heartbeat()) term = result.heartbeat().header().term();
  if (result.has_txn()) term = result.txn().header().term();
  if (result.has_join()) term = result.join().header().term();
  if (term <= term_) return;
  const bool first = term_ == 0;
  term_ = term;
  if (first || rank_ < 0) return;
  auto op = std::make_shared<v1::Op>();
  FillFence(op->mutable_recall_barriers()->mutable_fence(), false);
  for (const auto& [id, counter] : counters_) {
    if (counter == 0 || previous_[id] == v1::BARRIER_STATE_UNSPECIFIED) continue;
    v1::SeenBarrier* seen = op->mutable_recall_barriers()->add_seen();
    seen->set_barrier_id(id);
    seen->set_counter(counter - 1);
    seen->set_state(previous_[id]);
  }
  Begin(op, absl::Milliseconds(300), [](const v1::OpResult&) {});
}

void Process::Start() { Join(); }

void Process::Join() {
  auto op = std::make_shared<v1::Op>();
  v1::JoinRequest* join = op->mutable_join();
  FillFence(join->mutable_fence(), false);
  *join->mutable_spec() = sim_->spec_;
  join->mutable_topology()->set_host(absl::StrCat("h", slot_ / 2));
  join->mutable_topology()->set_local_rank(slot_ % 2);
  join->set_preferred_rank(-1);
  Begin(op, absl::Seconds(1), [this](const v1::OpResult& result) {
    if (result.has_error()) {
      const v1::ErrorReason reason = result.error().detail().reason();
      if (reason == v1::ERROR_REASON_SUPERSEDED || reason == v1::ERROR_REASON_NOT_MEMBER) {
        sim_->Trace(
            absl::StrCat(worker_id(), "/", incarnation_, " ends: ", result.error().message()));
        sim_->Kill(sim_->all_[incarnation_ - 1000], false);
        return;
      }
      if (reason != v1::ERROR_REASON_RENDEZVOUS_TIMEOUT) {
        sim_->Violation("a join was refused: " + result.error().ShortDebugString());
      }
      At(sim_->now() + absl::Milliseconds(100), [this] { Join(); });
      return;
    }
    const v1::JoinReply& reply = result.join();
    generation_ = reply.generation();
    rank_ = reply.rank();
    world_size_ = reply.world_size();
    term_ = std::max(term_, reply.header().term());
    step_ = 1;
    passed_here_ = 0;
    counters_.clear();
    previous_.clear();
    triggers_.clear();
    pending_.clear();
    acted_.clear();
    begun_ = 0;
    polled_ = false;
    sim_->Trace(absl::StrCat(worker_id(), "/", incarnation_, " sits at rank ", rank_, " of ",
                             world_size_, " in generation ", generation_));
    if (reply.generation() < 1 || rank_ < 0 || rank_ >= world_size_) {
      sim_->Violation("a seat that cannot be: " + reply.ShortDebugString());
    }
    uint64_t& owner = sim_->seats_[{generation_, rank_}];
    // Only a seat that its own worker takes again may change hands within a generation.
    if (owner != 0 && owner != incarnation_ &&
        (sim_->spec_.end_generation_on_failure() || sim_->all_[owner - 1000]->slot_ != slot_)) {
      sim_->Violation(absl::StrCat("rank ", rank_, " of generation ", generation_,
                                   " was given to incarnations ", owner, " and ", incarnation_));
    }
    owner = incarnation_;
    auto& table = sim_->tables_[generation_];
    if (table.first != 0 && table.first != world_size_) {
      sim_->Violation(absl::StrCat("generation ", generation_, " has world sizes ", table.first,
                                   " and ", world_size_));
    }
    if (table.second != 0 && table.second != reply.table_digest() &&
        sim_->spec_.end_generation_on_failure()) {
      sim_->Violation(absl::StrCat("generation ", generation_, " has two rank tables"));
    }
    table = {world_size_, reply.table_digest()};
    Heartbeat();
    PollTriggers();
    Step();
  });
}

void Process::Rejoin() {
  ++session_;
  calls_.clear();
  rank_ = -1;
  passed_here_ = 0;
  At(sim_->now() + absl::Milliseconds(5), [this] { Join(); });
}

bool Process::Leaves(const v1::OpError& error) {
  switch (error.detail().reason()) {
    case v1::ERROR_REASON_SUPERSEDED:
      sim_->Trace(absl::StrCat(worker_id(), "/", incarnation_, " ends: ", error.message()));
      sim_->Kill(sim_->all_[incarnation_ - 1000], false);
      return true;
    case v1::ERROR_REASON_STALE_GENERATION:
    case v1::ERROR_REASON_GENERATION_ENDED:
    case v1::ERROR_REASON_LEASE_EXPIRED:
    case v1::ERROR_REASON_NOT_MEMBER:
      sim_->Trace(absl::StrCat(worker_id(), "/", incarnation_, " rejoins: ", error.message()));
      Rejoin();
      return true;
    default:
      return false;
  }
}

void Process::Heartbeat() {
  auto op = std::make_shared<v1::Op>();
  FillFence(op->mutable_heartbeat()->mutable_fence(), false);
  op->mutable_heartbeat()->set_step(step_);
  Begin(op, absl::Milliseconds(400), [this](const v1::OpResult& result) {
    if (result.has_error()) {
      if (Leaves(result.error())) return;
    } else if (result.heartbeat().generation_ended()) {
      Rejoin();
      return;
    }
    At(sim_->now() + absl::Milliseconds(500), [this] { Heartbeat(); });
  });
}

void Process::Step() {
  const absl::Duration think =
      sim_->Between(absl::Milliseconds(1), absl::Milliseconds(sim_->Chance(0.1) ? 400 : 40));
  At(sim_->now() + think, [this] { KvThen([this] { GateThen([this] { Collective(); }); }); });
}

void Process::KvThen(std::function<void()> next) {
  if (!sim_->Chance(0.7)) return next();
  auto op = std::make_shared<v1::Op>();
  v1::TxnRequest* txn = op->mutable_txn();
  FillFence(txn->mutable_fence(), true);
  KvEvent event;
  event.start = sim_->now();
  std::string key;
  const bool durable = sim_->Chance(0.6);
  key = durable ? kDurableKeys[sim_->Draw(3)] : kEphemeralKeys[sim_->Draw(2)];
  const v1::KvClass klass = durable ? v1::KV_CLASS_DURABLE : v1::KV_CLASS_EPHEMERAL;
  const uint64_t kind = key == "count" ? (sim_->Chance(0.7) ? 3 : 1) : sim_->Draw(10);
  if (sim_->Chance(0.1)) {
    // Two keys at once: nobody may ever see them differ.
    const std::string value = absl::StrCat(sim_->next_value_++);
    for (const char* name : {"pair/a", "pair/b"}) {
      v1::PutOp* put = txn->add_then()->mutable_put();
      put->set_key(name);
      put->set_value(value);
      put->set_klass(v1::KV_CLASS_DURABLE);
    }
    key.clear();
  } else if (kind == 3) {
    event.kind = key == "count" ? KvEvent::kAdd : KvEvent::kPut;
    event.arg = key == "count" ? 1 : sim_->next_value_++;
    if (event.kind == KvEvent::kAdd) {
      v1::AddOp* add = txn->add_then()->mutable_add();
      add->set_key(key);
      add->set_delta(1);
      add->set_klass(klass);
    } else {
      v1::PutOp* put = txn->add_then()->mutable_put();
      put->set_key(key);
      put->set_value(absl::StrCat(event.arg));
      put->set_klass(klass);
    }
  } else if (kind < 3) {
    event.kind = KvEvent::kGet;
    txn->add_then()->mutable_get()->set_key(key);
  } else if (kind < 7) {
    event.kind = KvEvent::kPut;
    event.arg = sim_->next_value_++;
    v1::PutOp* put = txn->add_then()->mutable_put();
    put->set_key(key);
    put->set_value(absl::StrCat(event.arg));
    put->set_klass(klass);
  } else if (kind < 9) {
    event.kind = KvEvent::kCas;
    event.arg = sim_->next_value_++;
    v1::Compare* compare = txn->add_compares();
    compare->set_key(key);
    const bool absent = sim_->Chance(0.4);
    event.expect =
        absent ? KvEvent::kAbsent
               : std::max<int64_t>(1, sim_->next_value_ - 1 - static_cast<int64_t>(sim_->Draw(6)));
    compare->set_target(absent ? v1::Compare::EXISTS : v1::Compare::VALUE);
    if (!absent) compare->set_value(absl::StrCat(event.expect));
    v1::PutOp* put = txn->add_then()->mutable_put();
    put->set_key(key);
    put->set_value(absl::StrCat(event.arg));
    put->set_klass(klass);
  } else {
    event.kind = KvEvent::kDelete;
    txn->add_then()->mutable_delete_()->set_key(key);
    if (durable) sim_->deleted_.insert(key);
  }
  const size_t index = key.empty() ? 0 : sim_->KvBegin(key, event);
  Begin(op, absl::Milliseconds(250), [this, key, index, next](const v1::OpResult& result) {
    if (result.has_error()) {
      if (Leaves(result.error())) return;
      sim_->Violation("a transaction was refused: " + result.error().ShortDebugString());
      return;
    }
    if (!key.empty()) sim_->KvEnd(key, index, result);
    next();
  });
}

void Process::GateThen(std::function<void()> next) {
  bool may_begin = polled_;
  for (const auto& [id, horizon] : pending_) may_begin = may_begin && horizon > step_;
  if (!may_begin) {
    return At(sim_->now() + absl::Milliseconds(5), [this, next] { GateThen(next); });
  }
  begun_ = step_;
  next();
}

void Process::PollTriggers() {
  auto op = std::make_shared<v1::Op>();
  v1::PollTriggersRequest* poll = op->mutable_poll_triggers();
  FillFence(poll->mutable_fence(), false);
  poll->set_rank(rank_);
  poll->set_step(step_ - 1);
  // One promise for all: the latest of those already made, or the next step.
  int64_t horizon = begun_ + 1 + static_cast<int64_t>(sim_->Draw(2));
  for (const auto& [id, promised] : pending_) {
    if (promised != INT64_MAX) horizon = promised;
  }
  for (auto& [id, promised] : pending_) {
    poll->add_pending(id);
    promised = horizon;
  }
  poll->set_horizon(horizon);
  for (const auto& [id, step] : triggers_) {
    if (step < step_) {
      acted_.insert(id);
      poll->add_acked(id);
    }
  }
  Begin(op, absl::Milliseconds(250), [this](const v1::OpResult& result) {
    if (result.has_error()) {
      if (Leaves(result.error())) return;
      sim_->Violation("a poll was refused: " + result.error().ShortDebugString());
      return;
    }
    polled_ = true;
    const std::map<uint64_t, int64_t> promised = std::move(pending_);
    pending_.clear();
    for (const v1::TriggerEvent& event : result.poll_triggers().triggers()) {
      if (event.effective_step() < 0) {
        const auto it = promised.find(event.trigger_id());
        pending_[event.trigger_id()] = it == promised.end() ? INT64_MAX : it->second;
        continue;
      }
      if (acted_.contains(event.trigger_id())) continue;
      const auto known = std::find_if(triggers_.begin(), triggers_.end(), [&](const auto& one) {
        return one.first == event.trigger_id();
      });
      if (known != triggers_.end()) continue;
      const auto [it, is_new] = sim_->trigger_steps_.try_emplace({generation_, event.trigger_id()},
                                                                 event.effective_step());
      if (!is_new && it->second != event.effective_step()) {
        sim_->Violation(absl::StrCat("trigger ", event.trigger_id(), " takes effect at steps ",
                                     it->second, " and ", event.effective_step()));
      }
      if (event.effective_step() <= begun_) {
        sim_->Violation(absl::StrCat(worker_id(), " has begun step ", begun_,
                                     " and learns only now that trigger ", event.trigger_id(),
                                     " takes effect at step ", event.effective_step()));
      }
      triggers_.emplace_back(event.trigger_id(), event.effective_step());
    }
    if (sim_->Chance(0.02)) {
      auto raise = std::make_shared<v1::Op>();
      FillFence(raise->mutable_raise_trigger()->mutable_fence(), true);
      raise->mutable_raise_trigger()->set_name("checkpoint");
      Begin(raise, absl::Milliseconds(250), [this](const v1::OpResult& raised) {
        if (raised.has_error()) Leaves(raised.error());
      });
    }
    const absl::Duration period = absl::Milliseconds(pending_.empty() ? 150 : 20);
    At(sim_->now() + period, [this] { PollTriggers(); });
  });
}

void Process::Collective() {
  if (!sim_->spec_.end_generation_on_failure() && step_ % 7 == 6) {
    auto op = std::make_shared<v1::Op>();
    v1::AgreeAliveRequest* agree = op->mutable_agree_alive();
    FillFence(agree->mutable_fence(), false);
    agree->set_rank(rank_);
    agree->set_counter(counters_["agree"]);
    *agree->mutable_timeout() = ToProto(absl::Seconds(3));
    const uint64_t counter = counters_["agree"]++;
    previous_["agree"] = v1::BARRIER_STATE_UNSPECIFIED;
    Begin(op, absl::Seconds(1), [this, counter](const v1::OpResult& result) {
      if (result.has_error() && Leaves(result.error())) return;
      std::string text;
      if (result.has_agree_alive()) {
        for (int i = 0; i < result.agree_alive().alive_size(); ++i) {
          absl::StrAppend(&text, result.agree_alive().alive(i), ":",
                          result.agree_alive().incarnations(i), " ");
        }
      } else if (result.error().detail().reason() == v1::ERROR_REASON_BARRIER_TIMEOUT) {
        text = "timeout";
      }
      if (!text.empty()) {
        const auto [it, is_new] = sim_->agreements_.try_emplace({generation_, counter}, text);
        if (!is_new && it->second != text) {
          sim_->Violation(absl::StrCat("agreement ", counter, " of generation ", generation_,
                                       " gave \"", it->second, "\" and \"", text, "\""));
        }
      }
      AfterCollective();
    });
    return;
  }
  const std::string id = step_ % 5 == 3                      ? "gather"
                         : step_ % 5 == 4 && world_size_ > 2 ? "sub"
                                                             : "step";
  const int members = id == "sub" ? world_size_ / 2 + 1 : world_size_;
  if (rank_ >= members) return AfterCollective();
  const uint64_t counter = counters_[id];
  const InstanceId instance = {{generation_, id}, counter};
  auto op = std::make_shared<v1::Op>();
  v1::ArriveRequest* arrive = op->mutable_arrive();
  FillFence(arrive->mutable_fence(), false);
  arrive->set_barrier_id(id);
  arrive->set_counter(counter);
  arrive->set_rank(rank_);
  arrive->set_call_site(id == "sub" ? 2 : 1);
  arrive->set_step(step_);
  arrive->set_previous_state(previous_[id]);
  *arrive->mutable_timeout() = ToProto(absl::Seconds(4));
  std::vector<int> participants;
  for (int rank = 0; rank < members; ++rank) {
    participants.push_back(rank);
    if (members < world_size_) arrive->add_participants(rank);
  }
  if (id == "gather") {
    arrive->set_payload(absl::StrCat("g", generation_, ".", rank_, ".", counter));
    sim_->payloads_[instance][rank_] = arrive->payload();
  }
  sim_->arrived_[instance].insert(rank_);
  sim_->participants_[instance] = participants;
  Begin(op, absl::Seconds(1), [this, id, instance](const v1::OpResult& result) {
    const v1::ErrorReason reason = result.error().detail().reason();
    if (result.has_error() && Leaves(result.error())) return;
    sim_->SawBarrier(*this, instance, result,
                     result.has_arrive() ? result.arrive().header().term()
                                         : result.error().detail().current_term());
    counters_[id] = instance.second + 1;
    if (result.has_arrive()) {
      previous_[id] = v1::BARRIER_STATE_PASSED;
      ++passed_here_;
      ++sim_->result_.barriers;
    } else {
      previous_[id] = reason == v1::ERROR_REASON_BARRIER_TIMEOUT ? v1::BARRIER_STATE_TIMED_OUT
                      : reason == v1::ERROR_REASON_RANK_FAILED   ? v1::BARRIER_STATE_FAILED
                                                                 : v1::BARRIER_STATE_CANCELLED;
      if (reason != v1::ERROR_REASON_BARRIER_TIMEOUT && reason != v1::ERROR_REASON_RANK_FAILED &&
          reason != v1::ERROR_REASON_CANCELLED_BY_PEER) {
        sim_->Violation(absl::StrCat("all ranks run one program, but ", worker_id(), " at barrier ",
                                     id, " counter ", instance.second,
                                     " was told: ", result.error().message()));
      }
    }
    AfterCollective();
  });
}

void Process::AfterCollective() {
  ++step_;
  Step();
}

Sim::Sim(const SimulationOptions& options)
    : options_(options), random_(options.seed * 0x9E3779B97F4A7C15ull + 1) {
  slots_ = 2 + static_cast<int>(Draw(4));
  const bool elastic = Chance(0.3);
  spec_.set_min_workers(elastic ? std::max(1, slots_ - 1) : slots_);
  spec_.set_max_workers(slots_);
  *spec_.mutable_last_call() = ToProto(absl::Milliseconds(300));
  *spec_.mutable_lease() = ToProto(kLease);
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(20));
  spec_.set_end_generation_on_failure(Chance(0.7));
  drop_ = Chance(0.3) ? 0 : 0.05 * static_cast<double>(Draw(4));
  repeat_ = Chance(0.5) ? 0 : 0.05;
  slow_ = absl::Milliseconds(1 + Draw(30));
  cut_.assign(slots_, {absl::InfinitePast(), absl::InfinitePast()});
  current_.resize(slots_);
  core_options_.cluster_id = "sim";
  core_options_.mutants = options.mutants;
  core_options_.strikes_to_quarantine = 0;
  core_options_.kept_answers = 64;
  core_options_.watch_events = Chance(0.3) ? 60 : 2000;
  core_options_.kept_barrier_results = 1000;
  watchers_.resize(2);
}

void Sim::Transfer(int slot, bool to_server, bool may_repeat, std::function<void()> deliver) {
  if (slot >= 0 && !healed_) {
    const absl::Time cut_until = to_server ? cut_[slot].first : cut_[slot].second;
    if (now_ < cut_until || Chance(drop_)) return;
  }
  const auto delay = [&] {
    if (healed_) return Between(absl::Microseconds(100), absl::Milliseconds(2));
    return Chance(0.03) ? Between(slow_, 20 * slow_) : Between(absl::Microseconds(100), slow_);
  };
  if (may_repeat && !healed_ && Chance(repeat_)) At(now_ + 3 * delay(), deliver);
  At(now_ + delay(), std::move(deliver));
}

void Sim::WhenServerRuns(std::function<void()> f) {
  if (!up_) return;
  if (now_ >= server_paused_until_) return f();
  const uint64_t life = life_;
  At(server_paused_until_, [this, life, f = std::move(f)] {
    if (life == life_ && up_) WhenServerRuns(f);
  });
}

void Sim::ToServer(const std::shared_ptr<Process>& process, uint64_t tag,
                   const std::shared_ptr<const v1::Op>& op, CallId* attempt) {
  const CallId call = next_call_++;
  *attempt = call;
  // A repeated delivery is another call to the server.
  auto first = std::make_shared<bool>(true);
  Transfer(process->slot_, true, true, [this, call, first, process, tag, op, life = life_] {
    // A connection ends with the process it led to: what was under way never reaches the next one.
    if (life != life_) return;
    const CallId id = std::exchange(*first, false) ? call : next_call_++;
    WhenServerRuns([this, id, process, tag, op] {
      origins_[id] = {process, tag, op, nullptr};
      Handle(id, *op);
    });
  });
}

void Sim::FromOperator(const v1::Op& op, std::function<void(const v1::OpResult&)> done) {
  const CallId call = next_call_++;
  auto shared = std::make_shared<v1::Op>(op);
  Transfer(-1, true, false, [this, call, shared, done = std::move(done), life = life_] {
    if (life != life_) return;
    WhenServerRuns([this, call, shared, done] {
      origins_[call] = {nullptr, 0, shared, done};
      Handle(call, *shared);
    });
  });
}

void Sim::StartServer() {
  if (up_) return;
  up_ = true;
  serving_ = false;
  ++life_;
  server_paused_until_ = absl::InfinitePast();
  core_ = std::make_unique<Core>(core_options_);
  syncing_ = journal_failed_ = false;
  unwritten_.clear();
  held_.clear();
  origins_.clear();
  out_.Clear();
  next_tick_ = absl::InfiniteFuture();
  std::string snapshot;
  std::vector<std::string> records;
  disk_.Recover(&snapshot, &records);
  absl::Status status = snapshot.empty() ? absl::OkStatus() : core_->Restore(snapshot);
  for (const std::string& record : records) {
    if (status.ok()) status = core_->Replay(record);
  }
  if (!status.ok())
    return Violation(absl::StrCat("the journal cannot be replayed: ", status.ToString()));
  written_ = durable_ = core_->last_record_revision();
  core_->StartTerm(core_->last_term() + 1, now_, &out_);
  CheckRecovered();
  // Nothing is served before the record of the term is durable, or a crash could give out one term
  // twice.
  term_revision_ = core_->last_record_revision();
  Absorb(nullptr, 0);
  Trace(absl::StrCat("coordinator starts, term ", core_->last_term(), ", ", records.size(),
                     " records replayed"));
}

void Sim::CrashServer(bool by_disk_error) {
  if (!up_) return;
  Trace(by_disk_error ? "coordinator ends: the disk failed" : "coordinator crashes");
  ++result_.restarts;
  up_ = serving_ = false;
  ++life_;
  core_.reset();
  disk_.Crash(&random_);
  origins_.clear();
  held_.clear();
  unwritten_.clear();
  superseded_ = visible_superseded_;
  seat_of_ = visible_seat_of_;
  current_generation_ = visible_generation_;
  At(now_ + Between(absl::Milliseconds(10), absl::Milliseconds(1500)), [this] { StartServer(); });
}

void Sim::Handle(CallId call, const v1::Op& op) {
  if (!serving_) return;
  if (journal_failed_) {
    v1::OpResult result;
    *result.mutable_error() =
        coordinator::MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_JOURNAL_FAILED,
                               "the journal cannot be written");
    Release({call, std::make_shared<coordinator::Answer>(result, false), 0});
    return;
  }
  ++result_.operations;
  core_->Handle(call, op, {"", "sim"}, now_, &out_);
  Absorb(&op, call);
}

void Sim::Absorb(const v1::Op* op, CallId call) {
  std::optional<v1::OpResult> immediate;
  for (coordinator::Reply& reply : out_.replies) {
    const v1::OpResult& result = reply.answer->result();
    if (reply.call == call) immediate = result;
    const auto origin = origins_.find(reply.call);
    if (result.has_join() && origin != origins_.end()) {
      const v1::Fence& fence = origin->second.op->join().fence();
      uint64_t& seat = seat_of_[fence.worker_id()];
      if (seat != 0 && seat != fence.incarnation()) superseded_.insert(seat);
      seat = fence.incarnation();
      current_generation_ = std::max(current_generation_, result.join().generation());
    }
    if (result.has_arrive()) CheckPassed(result);
    if (result.has_error() && !Verdict(result).empty() && origin != origins_.end() &&
        origin->second.op->has_arrive()) {
      const v1::ArriveRequest& arrive = origin->second.op->arrive();
      failed_at_.try_emplace({{arrive.fence().generation(), arrive.barrier_id()}, arrive.counter()},
                             result_.events);
    }
    held_.push_back(std::move(reply));
  }
  if (op != nullptr) CheckHandled(*op, immediate);
  for (coordinator::Record& record : out_.records) unwritten_.push_back(std::move(record));
  if (out_.deposed) Violation("the only coordinator believes that it is deposed");
  out_.Clear();
  Flush();
  ReleaseReplies();
  ScheduleTick();
}

void Sim::Flush() {
  while (!unwritten_.empty()) {
    if (!disk_.Append(unwritten_.front().payload, &random_)) {
      if (!journal_failed_) Trace("the disk is full");
      journal_failed_ = true;
      // Nothing that waits may be acknowledged; it is written when there is room again.
      std::vector<coordinator::Reply> waiting;
      waiting.swap(held_);
      for (coordinator::Reply& reply : waiting) {
        if (reply.durable_revision > durable_) {
          v1::OpResult result;
          *result.mutable_error() = coordinator::MakeError(absl::StatusCode::kUnavailable,
                                                           v1::ERROR_REASON_JOURNAL_FAILED,
                                                           "the journal cannot be written");
          reply.answer = std::make_shared<coordinator::Answer>(result, false);
          reply.durable_revision = 0;
        }
        held_.push_back(std::move(reply));
      }
      const uint64_t life = life_;
      At(now_ + absl::Milliseconds(100), [this, life] {
        if (life != life_ || !up_) return;
        Flush();
        ReleaseReplies();
      });
      return;
    }
    written_ = unwritten_.front().revision;
    unwritten_.erase(unwritten_.begin());
  }
  if (journal_failed_) Trace("the disk has room again");
  journal_failed_ = false;
  if (!syncing_ && written_ > durable_) {
    syncing_ = true;
    const absl::Duration latency = healed_ ? absl::Milliseconds(1)
                                   : Chance(0.03)
                                       ? Between(absl::Milliseconds(50), absl::Milliseconds(1500))
                                       : Between(absl::Microseconds(200), absl::Milliseconds(8));
    At(now_ + latency, [this, life = life_, bytes = disk_.size(), revision = written_] {
      SyncDone(life, bytes, revision);
    });
  }
}

void Sim::SyncDone(uint64_t life, size_t bytes, uint64_t revision) {
  if (life != life_ || !up_) return;
  if (!healed_ && Chance(0.002))
    return CrashServer(true);  // EIO: what is on the disk is unknown, so start over
  disk_.Synced(bytes);
  syncing_ = false;
  durable_ = revision;
  if (!serving_ && durable_ >= term_revision_) {
    serving_ = true;
    ScheduleTick();
  }
  Flush();
  ReleaseReplies();
}

void Sim::ReleaseReplies() {
  std::vector<coordinator::Reply> later;
  std::vector<coordinator::Reply> ready;
  for (coordinator::Reply& reply : held_) {
    (reply.durable_revision <= durable_ ? ready : later).push_back(std::move(reply));
  }
  held_ = std::move(later);
  for (const coordinator::Reply& reply : ready) Release(reply);
}

void Sim::Release(const coordinator::Reply& reply) {
  const auto it = origins_.find(reply.call);
  if (it == origins_.end()) return;
  const Origin origin = std::move(it->second);
  origins_.erase(it);
  const v1::OpResult& result = reply.answer->result();
  Digest(absl::StrCat(absl::ToUnixNanos(now_), ":", reply.call, ":", result.kind_case(), ":",
                      result.error().message()));
  if (result.has_join()) {
    const v1::Fence& fence = origin.op->join().fence();
    visible_generation_ = std::max(visible_generation_, result.join().generation());
    uint64_t& seat = visible_seat_of_[fence.worker_id()];
    if (seat != 0 && seat != fence.incarnation()) visible_superseded_.insert(seat);
    seat = fence.incarnation();
  }
  if (result.error().detail().reason() == v1::ERROR_REASON_GENERATION_ENDED) {
    visible_end_ = std::max(visible_end_, result.error().detail().current_generation());
  }
  const std::shared_ptr<const v1::OpResult> shared(reply.answer, &result);
  if (origin.process == nullptr) {
    if (origin.done) Transfer(-1, false, false, [done = origin.done, shared] { done(*shared); });
    return;
  }
  Transfer(origin.process->slot_, false, true,
           [process = origin.process, tag = origin.tag, shared] { process->Receive(tag, shared); });
}

void Sim::ScheduleTick() {
  if (!serving_) return;
  const absl::Time next = core_->NextDeadline();
  if (next == absl::InfiniteFuture() || next >= next_tick_) return;
  next_tick_ = next;
  At(next, [this, life = life_, next] {
    if (life != life_ || !serving_ || next_tick_ != next) return;
    next_tick_ = absl::InfiniteFuture();
    WhenServerRuns([this] {
      core_->Tick(now_, &out_);
      Absorb(nullptr, 0);
    });
  });
}

void Sim::TakeSnapshot() {
  if (!serving_ || journal_failed_ || !unwritten_.empty()) return;
  const std::string image = core_->Snapshot();
  const uint64_t revision = core_->last_record_revision();
  Trace(absl::StrCat("snapshot of ", image.size(), " bytes"));
  // Written beside, synced, renamed: it exists whole or not at all. Records it holds go only
  // afterwards.
  At(now_ + Between(absl::Milliseconds(1), absl::Milliseconds(100)),
     [this, life = life_, image, revision] {
       if (life != life_ || !up_ || durable_ < revision) return;
       disk_.PublishSnapshot(image, revision);
     });
}

void Sim::StartWorker(int slot) {
  const uint64_t incarnation = next_incarnation_++;
  auto process = std::make_shared<Process>(this, slot, incarnation);
  all_.push_back(process);
  current_[slot] = process;
  Trace(absl::StrCat(process->worker_id(), "/", incarnation, " starts"));
  process->Start();
}

void Sim::Kill(const std::shared_ptr<Process>& process, bool told) {
  if (!process->alive_) return;
  process->alive_ = false;
  Trace(absl::StrCat(process->worker_id(), "/", process->incarnation_, " ends",
                     told ? ", told by its agent" : ""));
  // Its connections close: held calls are abandoned, unless the link is cut.
  const int slot = process->slot_;
  Transfer(slot, true, false, [this, process] {
    WhenServerRuns([this, process] {
      if (!serving_) return;
      std::vector<CallId> calls;
      for (const auto& [call, origin] : origins_) {
        if (origin.process == process) calls.push_back(call);
      }
      for (const CallId call : calls) core_->Abandon(call, now_, &out_);
      Absorb(nullptr, 0);
    });
  });
  if (told) {
    v1::Op op;
    v1::ReportExitRequest* report = op.mutable_report_exit();
    report->mutable_fence()->set_job_id(kJob);
    report->mutable_fence()->set_worker_id("agent");
    report->set_worker_id(process->worker_id());
    report->set_incarnation(process->incarnation_);
    report->mutable_cause()->set_signal(9);
    FromOperator(op, nullptr);
  }
  if (current_[slot] == process) {
    At(now_ + Between(absl::Milliseconds(10),
                      healed_ ? absl::Milliseconds(50) : absl::Milliseconds(2500)),
       [this, slot, process] {
         if (current_[slot] == process) StartWorker(slot);
       });
  }
}

void Sim::Chaos() {
  if (healed_) return;
  const int slot = static_cast<int>(Draw(slots_));
  const std::shared_ptr<Process> process = current_[slot];
  switch (Draw(13)) {
    case 0:
    case 1:
      if (process != nullptr) Kill(process, Chance(0.7));
      break;
    case 2:
      if (process != nullptr) {
        process->paused_until_ = now_ + Between(absl::Milliseconds(200), 3 * kLease);
        Trace(absl::StrCat(process->worker_id(), "/", process->incarnation_, " is stopped until ",
                           absl::FormatDuration(process->paused_until_ - kStart)));
        // Someone believes it dead and starts another: the old one wakes up as a zombie.
        if (Chance(0.5)) StartWorker(slot);
      }
      break;
    case 3:
      // The old process lives on beside the new one.
      if (process != nullptr) StartWorker(slot);
      break;
    case 4:
    case 5: {
      const absl::Time until = now_ + Between(absl::Milliseconds(300), absl::Seconds(4));
      const uint64_t way = Draw(3);  // both, or half-open
      if (way != 1) cut_[slot].first = until;
      if (way != 2) cut_[slot].second = until;
      Trace(absl::StrCat("w", slot, " is cut off", way == 0 ? "" : " one way", " until ",
                         absl::FormatDuration(until - kStart)));
      break;
    }
    case 6:
    case 7:
      CrashServer(false);
      break;
    case 8:
      if (up_) {
        server_paused_until_ = now_ + Between(absl::Milliseconds(100), absl::Seconds(5));
        Trace(absl::StrCat("coordinator is stopped until ",
                           absl::FormatDuration(server_paused_until_ - kStart)));
      }
      break;
    case 9: {
      disk_.set_full(true);
      At(now_ + Between(absl::Milliseconds(50), absl::Milliseconds(1500)),
         [this] { disk_.set_full(false); });
      break;
    }
    case 10:
      TakeSnapshot();
      break;
    case 11: {
      v1::Op op;
      op.mutable_end_generation()->mutable_fence()->set_job_id(kJob);
      FromOperator(op, nullptr);
      break;
    }
    default: {
      v1::Op op;
      op.mutable_raise_trigger()->mutable_fence()->set_job_id(kJob);
      op.mutable_raise_trigger()->set_name("stop");
      op.mutable_raise_trigger()->set_min_lead_steps(static_cast<int64_t>(Draw(3)));
      FromOperator(op, nullptr);
    }
  }
  At(now_ + Between(absl::Milliseconds(20), absl::Milliseconds(1200)), [this] { Chaos(); });
}

void Sim::Watch() {
  for (size_t i = 0; i < watchers_.size(); ++i) {
    const uint64_t poll = ++watchers_[i].poll;
    const uint64_t from = watchers_[i].next;
    Transfer(-1, true, false, [this, i, poll, from] {
      WhenServerRuns([this, i, poll, from] {
        if (!serving_) return;
        v1::WatchRequest request;
        request.set_job_id(kJob);
        request.set_keys(true);
        request.set_members(i == 1);
        auto batch = std::make_shared<v1::WatchBatch>();
        const auto error = core_->ReadWatch(request, from, durable_, 2000, batch.get());
        Transfer(-1, false, false, [this, i, poll, from, batch, error] {
          Watcher& watcher = watchers_[i];
          if (poll != watcher.poll) return;
          if (error.has_value()) {
            if (error->detail().reason() == v1::ERROR_REASON_COMPACTED) {
              watcher.next = error->detail().compacted_revision() + 1;
            }
            return;
          }
          uint64_t last = from;
          for (const v1::WatchEvent& event : batch->events()) {
            ++result_.watch_events;
            if (event.revision() < last || event.revision() >= batch->next_revision()) {
              Violation(absl::StrCat("a watch from ", from, " to ", batch->next_revision(),
                                     " brought revision ", event.revision(), " after ", last));
            }
            last = event.revision();
            if (!event.has_put()) continue;
            if (!watcher.seen.insert({event.revision(), event.put().key()}).second) {
              Violation(absl::StrCat("a watch brought revision ", event.revision(), " of ",
                                     event.put().key(), " twice"));
            }
            if (event.put().klass() == v1::KV_CLASS_DURABLE)
              Saw(event.put().key(), event.revision());
          }
          if (from != 0) watcher.covered.push_back({from, batch->next_revision()});
          watcher.next = batch->next_revision();
        });
      });
    });
  }
  At(now_ + Between(absl::Milliseconds(30), absl::Milliseconds(300)), [this] { Watch(); });
}

void Sim::OperatorKv() {
  v1::Op op;
  op.mutable_txn()->mutable_fence()->set_job_id(kJob);
  op.mutable_txn()->add_then()->mutable_get()->set_key("pair/a");
  op.mutable_txn()->add_then()->mutable_get()->set_key("pair/b");
  const std::string key = kDurableKeys[Draw(3)];
  op.mutable_txn()->add_then()->mutable_get()->set_key(key);
  KvEvent event;
  event.kind = KvEvent::kGet;
  event.start = now_;
  const size_t index = KvBegin(key, event);
  FromOperator(op, [this, key, index](const v1::OpResult& result) {
    if (!result.has_txn()) return;
    const auto value = [&](int i) {
      return result.txn().results(i).kvs_size() == 0 ? "" : result.txn().results(i).kvs(0).value();
    };
    if (value(0) != value(1)) {
      Violation(absl::StrCat("half of a transaction: pair/a is \"", value(0), "\", pair/b is \"",
                             value(1), "\""));
    }
    v1::OpResult one;
    *one.mutable_txn()->mutable_header() = result.txn().header();
    one.mutable_txn()->set_succeeded(true);
    *one.mutable_txn()->add_results() = result.txn().results(2);
    KvEnd(key, index, one);
  });
  At(now_ + Between(absl::Milliseconds(50), absl::Milliseconds(600)), [this] { OperatorKv(); });
}

void Sim::Heal() {
  healed_ = true;
  healed_at_ = now_;
  Trace("everything is healed");
  disk_.set_full(false);
  server_paused_until_ = std::min(server_paused_until_, now_);
  for (const std::shared_ptr<Process>& process : all_) {
    process->paused_until_ = std::min(process->paused_until_, now_);
    process->passed_here_ = 0;
  }
  // What was drawn before, restarts and the like, still comes within its time.
  At(now_ + absl::Seconds(3), [this] {
    if (!up_) StartServer();
    for (int slot = 0; slot < slots_; ++slot) {
      if (current_[slot] == nullptr || !current_[slot]->alive_) StartWorker(slot);
    }
  });
}

// Progress: all slots sit in one generation and have passed barriers in it.
void Sim::CheckProgress() {
  bool all = true;
  for (int slot = 0; slot < slots_; ++slot) {
    const Process& process = *current_[slot];
    all = all && process.seated() && process.passed_here_ >= 3 &&
          process.generation_ == current_[0]->generation_ && process.world_size_ == slots_;
  }
  if (all && now_ > healed_at_ + absl::Seconds(4)) {
    healed_at_ = absl::InfinitePast();  // done
    return;
  }
  // An elastic generation that some had to miss is ended so that all can join.
  if (spec_.min_workers() < slots_ && now_ > healed_at_ + absl::Seconds(8)) {
    bool waits = false;
    for (int slot = 0; slot < slots_; ++slot) waits = waits || !current_[slot]->seated();
    if (waits) {
      v1::Op op;
      op.mutable_end_generation()->mutable_fence()->set_job_id(kJob);
      FromOperator(op, nullptr);
    }
  }
  At(now_ + absl::Milliseconds(500), [this] { CheckProgress(); });
}

size_t Sim::KvBegin(const std::string& key, KvEvent event) {
  history_[key].push_back(event);
  history_terms_[key].push_back(0);
  return history_[key].size() - 1;
}

void Sim::KvEnd(const std::string& key, size_t index, const v1::OpResult& result) {
  KvEvent& event = history_[key][index];
  const v1::TxnReply& reply = result.txn();
  event.answered = true;
  event.end = now_;
  history_terms_[key][index] = reply.header().term();
  const bool durable = key[0] != 'e';
  uint64_t written = 0;
  switch (event.kind) {
    case KvEvent::kGet:
      event.result = KvEvent::kAbsent;
      if (reply.results(0).kvs_size() > 0) {
        event.result = std::stoll(reply.results(0).kvs(0).value());
        if (durable) Saw(key, reply.results(0).kvs(0).mod_revision());
      }
      break;
    case KvEvent::kAdd:
      event.result = reply.results(0).number();
      written = reply.results(0).mod_revision();
      break;
    case KvEvent::kCas:
      event.result = reply.succeeded() ? 1 : 0;
      if (reply.succeeded()) written = reply.results(0).mod_revision();
      break;
    case KvEvent::kPut:
      written = reply.results(0).mod_revision();
      break;
    case KvEvent::kDelete:
      break;
  }
  if (written == 0) return;
  if (durable) Saw(key, written);
  acked_writes_.push_back({written, key, ""});
}

// An operation from a process that has been replaced, or from a generation that is over, must have
// no effect.
void Sim::CheckHandled(const v1::Op& op, const std::optional<v1::OpResult>& immediate) {
  if (op.has_recall_barriers() && immediate.has_value() && !immediate->has_error()) {
    recalled_at_.try_emplace({op.recall_barriers().fence().incarnation(), core_->last_term()},
                             result_.events);
  }
  const v1::Fence* fence = nullptr;
  bool informs_only = false;
  switch (op.kind_case()) {
    case v1::Op::kTxn:
      fence = &op.txn().fence();
      break;
    case v1::Op::kArrive:
      fence = &op.arrive().fence();
      break;
    case v1::Op::kHeartbeat:
      fence = &op.heartbeat().fence();
      informs_only = true;
      break;
    case v1::Op::kPollTriggers:
      fence = &op.poll_triggers().fence();
      break;
    case v1::Op::kRaiseTrigger:
      fence = &op.raise_trigger().fence();
      break;
    case v1::Op::kAgreeAlive:
      fence = &op.agree_alive().fence();
      break;
    default:
      return;
  }
  if (fence->worker_id().empty()) return;
  const bool refused = immediate.has_value() && immediate->has_error();
  const std::pair<uint64_t, uint64_t> request = {fence->incarnation(), fence->request_id()};
  const bool repeated = fence->request_id() != 0 && answered_.contains(request);
  if (!refused && superseded_.contains(fence->incarnation())) {
    Violation(absl::StrCat(
        "an operation of ", fence->worker_id(), "/", fence->incarnation(),
        " was accepted although a newer incarnation sits in its place: ", op.ShortDebugString()));
  }
  if (!refused && !repeated && !informs_only && fence->generation() < current_generation_) {
    Violation(absl::StrCat("an operation of generation ", fence->generation(),
                           " was accepted in generation ", current_generation_, ": ",
                           op.ShortDebugString()));
  }
  if (!refused && fence->request_id() != 0) answered_.insert(request);
}

// Everyone must have called before anyone passes.
void Sim::CheckPassed(const v1::OpResult& result) {
  const v1::BarrierReport& report = result.arrive().report();
  const InstanceId id = {{report.generation(), report.barrier_id()}, report.counter()};
  for (const int rank : participants_[id]) {
    if (arrived_[id].contains(rank)) continue;
    Violation(absl::StrCat("barrier ", report.barrier_id(), " counter ", report.counter(),
                           " of generation ", report.generation(), " was released before rank ",
                           rank, " came"));
  }
}

void Sim::SawBarrier(const Process& process, const InstanceId& id, const v1::OpResult& result,
                     uint64_t term) {
  const std::string verdict = Verdict(result);
  if (verdict.empty()) return;
  if (result.has_arrive() && result.arrive().payloads_size() > 0) {
    for (int i = 0; i < result.arrive().payloads_size(); ++i) {
      if (result.arrive().payloads(i) != payloads_[id][i]) {
        Violation(absl::StrCat("barrier ", id.first.second, " counter ", id.second, " gathered \"",
                               result.arrive().payloads(i), "\" from rank ", i));
      }
    }
  }
  std::vector<SeenResult>& seen = results_[id];
  for (const SeenResult& other : seen) {
    if (other.verdict == verdict) continue;
    // A plain pass is not journaled. Across a crash another result is possible only while nobody
    // who saw the pass could say so: its reply was still under way, or it died or was cut off until
    // the barrier failed for the others. Whatever did not pass is journaled before anyone is told,
    // so no pass can follow it.
    const bool passed = verdict.rfind("BARRIER_STATE_PASSED", 0) == 0;
    const bool other_passed = other.verdict.rfind("BARRIER_STATE_PASSED", 0) == 0;
    const SeenResult pass = passed ? SeenResult{verdict, term, process.incarnation_} : other;
    const uint64_t failed_in = passed ? other.term : term;
    if (passed != other_passed && pass.term < failed_in && id.first.second != "gather") {
      const Process& witness = *all_[pass.incarnation - 1000];
      const auto told = recalled_at_.find({witness.incarnation_, failed_in});
      if (passed || told == recalled_at_.end() || told->second > failed_at_[id]) continue;
    }
    Violation(absl::StrCat("barrier ", id.first.second, " counter ", id.second, " of generation ",
                           id.first.first, " ended as ", other.verdict, " (term ", other.term,
                           ") and as ", verdict, " (term ", term, ")"));
  }
  seen.push_back({verdict, term, process.incarnation_});
}

// After a crash: whatever anyone was shown as durable is still there.
void Sim::CheckRecovered() {
  v1::StatusReply status;
  core_->FillStatus(&status);
  const uint64_t generation = status.jobs_size() > 0 ? status.jobs(0).generation() : 0;
  if (generation < visible_generation_) {
    Violation(absl::StrCat("workers sit in generation ", visible_generation_,
                           ", but the journal knows only ", generation));
  }
  if (generation == visible_end_ && generation != 0 &&
      status.jobs(0).rendezvous_state() == "SEALED") {
    Violation(absl::StrCat("workers were told that generation ", generation,
                           " had ended, but it is running again"));
  }
  current_generation_ = std::max(current_generation_, generation);
  if (generation == 0) return;
  v1::Op op;
  op.mutable_txn()->mutable_fence()->set_job_id(kJob);
  std::vector<std::string> keys(std::begin(kDurableKeys), std::end(kDurableKeys));
  for (const std::string& key : keys) op.mutable_txn()->add_then()->mutable_get()->set_key(key);
  Output out;
  core_->Handle(next_call_++, op, {"", "check"}, now_, &out);
  const v1::TxnReply& reply = out.replies[0].answer->result().txn();
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto& result = reply.results(static_cast<int>(i));
    const uint64_t mod = result.kvs_size() > 0 ? result.kvs(0).mod_revision() : 0;
    if (mod == 0 && deleted_.contains(keys[i])) continue;
    if (mod < visible_mod_[keys[i]]) {
      Violation(absl::StrCat("key ", keys[i], " was seen at revision ", visible_mod_[keys[i]],
                             ", but after the crash it is at ", mod));
    }
  }
}

void Sim::CheckAtEnd() {
  for (const auto& [key, events] : history_) {
    if (key[0] != 'e') {
      if (!IsLinearizable(events)) {
        Violation(absl::StrCat("the history of durable key ", key, " is not linearizable:\n",
                               ToText(events)));
      }
      continue;
    }
    // Ephemeral keys begin anew with each term. What was answered in another term may have happened
    // in this one too, its reply lost.
    const std::vector<uint64_t>& terms = history_terms_[key];
    const std::set<uint64_t> all(terms.begin(), terms.end());
    for (const uint64_t term : all) {
      if (term == 0) continue;
      absl::Time first = absl::InfiniteFuture();
      absl::Time last = absl::InfinitePast();
      for (size_t i = 0; i < events.size(); ++i) {
        if (terms[i] != term) continue;
        first = std::min(first, events[i].start);
        last = std::max(last, events[i].end);
      }
      std::vector<KvEvent> part;
      for (size_t i = 0; i < events.size(); ++i) {
        KvEvent event = events[i];
        if (event.start > last) continue;
        if (terms[i] != term) {
          // A copy of the request may have been on its way for as long as this (see Transfer), and
          // have met a paused server.
          if (event.answered && event.end + 60 * slow_ + absl::Seconds(5) < first) continue;
          event.answered = false;
          event.end = absl::InfiniteFuture();
        }
        part.push_back(event);
      }
      if (!IsLinearizable(part)) {
        Violation(absl::StrCat("the history of ephemeral key ", key, " in term ", term,
                               " is not linearizable:\n", ToText(part)));
      }
    }
  }
  for (const Watcher& watcher : watchers_) {
    for (const auto& [from, next] : watcher.covered) {
      for (const Write& write : acked_writes_) {
        if (write.revision < from || write.revision >= next) continue;
        if (!watcher.seen.contains({write.revision, write.key})) {
          Violation(absl::StrCat("a watch went from ", from, " to ", next, " without revision ",
                                 write.revision, " of ", write.key));
        }
      }
    }
  }
}

SimulationResult Sim::Run() {
  StartServer();
  for (int slot = 0; slot < slots_; ++slot) {
    At(now_ + Between(absl::ZeroDuration(), absl::Milliseconds(300)),
       [this, slot] { StartWorker(slot); });
  }
  At(now_ + absl::Milliseconds(500), [this] { Watch(); });
  At(now_ + absl::Milliseconds(600), [this] { OperatorKv(); });
  At(now_ + absl::Milliseconds(800), [this] { Chaos(); });
  At(kStart + options_.chaos, [this] { Heal(); });
  At(kStart + options_.chaos + absl::Seconds(4), [this] { CheckProgress(); });
  const absl::Time limit = kStart + options_.chaos + absl::Seconds(60);
  while (!queue_.empty() && result_.violation.empty()) {
    // The top is about to be popped: moving out of it is safe.
    Event event = std::move(const_cast<Event&>(queue_.top()));
    queue_.pop();
    if (event.when > limit) {
      Violation("no progress within 60 s after everything was healed");
      break;
    }
    now_ = event.when;
    ++result_.events;
    event.f();
    if (healed_ && healed_at_ == absl::InfinitePast()) break;
  }
  result_.generations = static_cast<int64_t>(tables_.size());
  if (result_.violation.empty()) CheckAtEnd();
  return std::move(result_);
}

}  // namespace

SimulationResult Simulate(const SimulationOptions& options) { return Sim(options).Run(); }

}  // namespace muster::simulation
