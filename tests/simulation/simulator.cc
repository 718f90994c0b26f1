#include "tests/simulation/simulator.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "agent/hub_core.h"
#include "agent/incoming_stream.h"
#include "agent/op_sender.h"
#include "agent/upstream.h"
#include "base/clock.h"
#include "coordinator/errors.h"
#include "proto/muster/v1/journal.pb.h"
#include "rpc/session/agent_session.h"
#include "tests/simulation/agent_client.h"
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
constexpr int kKept = 2;             // checkpoints
constexpr uint64_t kCluster = 0x51;  // as Fence has it
const absl::Time kStart = absl::FromUnixSeconds(1'000'000);
const absl::Duration kLease = absl::Seconds(2);
const char* const kDurableKeys[] = {"d0", "d1", "count"};
const char* const kEphemeralKeys[] = {"e0", "e1"};

using InstanceId =
    std::pair<std::pair<uint64_t, std::string>, uint64_t>;  // ((generation, barrier_id), counter)

// Returns what a barrier's result says, for comparing results of one instance; empty: it says
// nothing about the instance.
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

// Returns the ranks that an arrival speaks for; false if `op` is no arrival.
bool ArrivalOf(const v1::Op& op, InstanceId* id) {
  if (op.has_arrive()) {
    *id = {{op.arrive().fence().generation(), op.arrive().barrier_id()}, op.arrive().counter()};
    return true;
  }
  if (!op.has_arrive_many()) return false;
  const v1::ArriveManyRequest& many = op.arrive_many();
  *id = {{many.fence().generation(), many.barrier_id()}, many.counter()};
  return true;
}

class Process;
class Sim;

constexpr int kNoHub = -1;

// One stream of an agent, to the coordinator or a hub. Each way frames arrive in order, up to where
// it breaks; the two ends learn of that at different times.
struct Stream {
  uint64_t id = 0;
  int host = 0;
  int hub = kNoHub;        // the host whose agent it leads to
  uint64_t life = 0;       // of the process it leads to
  bool agent_open = true;  // the agent still believes in it
  bool up_works = true;    // false: nothing more arrives
  bool down_works = true;
  absl::Time last_up = absl::InfinitePast();  // arrival of the latest frame
  absl::Time last_down = absl::InfinitePast();
  std::shared_ptr<agent::IncomingStream> link;  // the hub's end
  bool hub_open = true;                         // the hub still believes in it
};

class SimClock final : public Clock {
 public:
  explicit SimClock(const absl::Time* now) : now_(now) {}
  absl::Time Now() const override { return *now_; }
  absl::Time WallNow() const override { return *now_; }

 private:
  const absl::Time* const now_;
};

// Passes operations from the hub in an agent to that agent's session.
class HubSender final : public agent::OpSender {
 public:
  HubSender(Sim* sim, int host) : sim_(sim), host_(host) {}
  uint64_t Submit(v1::Op op, Done done) override;
  void Forget(uint64_t op_id) override;

 private:
  Sim* const sim_;
  const int host_;
};

class SimIncomingStream final : public agent::IncomingStream {
 public:
  SimIncomingStream(Sim* sim, std::weak_ptr<Stream> stream)
      : sim_(sim), stream_(std::move(stream)) {}
  void Write(rpc::FrameBytes frame) override;
  void Read() override {}
  void Close(const absl::Status& status) override;

 private:
  Sim* const sim_;
  const std::weak_ptr<Stream> stream_;
};

// The agent of a host: speaks for its processes on one stream.
struct Agent {
  struct Target {
    std::shared_ptr<Process> process;
    uint64_t tag = 0;
    std::shared_ptr<const v1::Op> op;
  };
  std::unique_ptr<AgentClient> client;  // null: it is not running
  uint64_t life = 0;                    // counts its processes
  std::shared_ptr<Stream> stream;
  absl::Time last_heard = absl::InfinitePast();
  std::map<uint64_t, std::vector<Target>> waiting;  // by op_id: the receiver of the result
  std::vector<Target> arrivals;                     // to be sent together
  bool pump_scheduled = false;
  bool flush_scheduled = false;
  std::map<std::pair<uint64_t, std::string>, std::pair<uint64_t, v1::BarrierState>>
      seen;                // (generation, barrier_id) -> the latest (counter, state)
  int route = kNoHub;      // its peer
  std::string failed_hub;  // it tells the coordinator
  absl::Time away_since;   // its hub has lost the coordinator
  // The state of a hub.
  absl::Time stopped_until = absl::InfinitePast();
  std::unique_ptr<HubSender> sender;
  std::unique_ptr<agent::HubCore> hub;
  absl::Time next_tick = absl::InfiniteFuture();
  std::map<uint64_t, agent::OpSender::Done> hub_calls;  // by op_id
  std::map<uint64_t, absl::Time>
      said;  // when an agent listed it, by incarnation; until the next beat
  std::vector<v1::WorkerBeat> said_before;
};

// The coordinator's side of an agent, as coordinator/service/core_runner.cc keeps it.
struct ServerSession {
  explicit ServerSession(const v1::Hello& hello, std::string id)
      : agent(hello.node(), hello.agent_incarnation(), std::move(id)) {}
  rpc::AgentSession agent;
  std::set<CallId> calls;
  std::shared_ptr<Stream> stream;
  bool ended = false;
  absl::Time expires = absl::InfiniteFuture();
  bool flush_scheduled = false;
  std::set<uint64_t> applied;  // op_ids
};

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
  uint64_t agent_ = 0;  // incarnation of the agent that handed on what it knows

  uint64_t generation_ = 0;
  int rank_ = -1;
  int world_size_ = 0;
  uint64_t term_ = 0;
  uint64_t revision_ = 0;
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
  // Acts on an error that ends what the process was doing. Returns false if the error is about this
  // call only.
  bool Leaves(const v1::OpError& error);
  void SawTerm(const v1::OpResult& result);
  void Heartbeat();
  void Step();
  void KvThen(std::function<void()> next);
  void PollTriggers();
  void GateThen(std::function<void()> next);
  // Makes all ranks write a checkpoint together every few steps; rank 0 seals and publishes it.
  void CheckpointThen(std::function<void()> next);
  std::shared_ptr<v1::Op> ReportOp(uint64_t id);
  void ReportShards(uint64_t id, std::function<void()> next);
  void Seal(uint64_t id, int tries, std::function<void()> next);
  void Publish(uint64_t id, std::function<void()> next);
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
  void Fault(const char* name) { ++result_.faults[name]; }
  void Violation(const std::string& text) {
    Trace("VIOLATION " + text);
    if (result_.violation.empty()) result_.violation = text;
  }

  // `slot` is the one whose link is used; -1: the operator and watchers, whose link is only slow.
  void Transfer(int slot, bool to_server, bool may_repeat, std::function<void()> deliver);
  void ToServer(const std::shared_ptr<Process>& process, uint64_t tag,
                const std::shared_ptr<const v1::Op>& op, CallId* attempt);
  void FromOperator(const v1::Op& op, std::function<void(const v1::OpResult&)> done);

  void StartServer();
  void CrashServer(bool by_disk_error);
  void WhenServerRuns(std::function<void()> f);  // at once, after its pause, or never if it is down
  void Handle(CallId call, const v1::Op& op, const std::string& node = "");
  void Absorb(const v1::Op* op, CallId call);
  void Flush();
  void SyncDone(uint64_t life, size_t bytes, uint64_t revision);
  static void FailReply(coordinator::Reply* reply);
  void ReleaseReplies();
  void ScheduleTick();
  void TakeSnapshot();
  void Release(const coordinator::Reply& reply);

  // Agents.
  bool HasAgent(int slot) const { return has_agent_[slot / 2]; }
  void StartAgent(int host);
  void CrashAgent(int host);
  void SubmitToAgent(Agent::Target target);
  void FlushArrivals(int host);
  void Pump(int host);
  void Connect(int host);
  void AgentBeat(int host, uint64_t life);
  void SubmitOf(int host, const v1::Op& op, std::vector<Agent::Target> targets);
  void Deliver(int host, const std::vector<Agent::Target>& targets, const v1::OpResult& result);
  // Hubs. Calls `f` at once, or after the pause of the agent, or never if its process ends before.
  void WhenAgentRuns(int host, uint64_t life, std::function<void()> f);
  void StartHub(int host);
  void TickHub(int host);
  void AddAgentsTo(v1::Beat* beat, int host);
  void AtHub(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame);
  void ClosedAtHub(const std::shared_ptr<Stream>& stream);
  void Written(const std::shared_ptr<Stream>& stream);
  void MoveTo(int host, int hub, bool in_order);
  void HubChaos();
  absl::Time CutUntil(const Stream& stream, bool up) const {
    const auto until = [&](int host) { return up ? cut_[2 * host].first : cut_[2 * host].second; };
    return stream.hub == kNoHub ? until(stream.host)
                                : std::max(until(stream.host), until(stream.hub));
  }
  uint64_t LifeAt(const Stream& stream) const {
    return stream.hub == kNoHub ? life_ : agents_[stream.hub].life;
  }
  void LoseStream(std::shared_ptr<Stream> stream);
  void SendUp(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame);
  void SendDown(const std::shared_ptr<Stream>& stream, const v1::CoordinatorFrame& frame);
  void AtAgent(const std::shared_ptr<Stream>& stream, const v1::CoordinatorFrame& frame);
  void ToLocal(const Agent::Target& target, const v1::OpResult& result);
  void RecallAt(int host);
  // The coordinator's end, after coordinator/service/core_runner.cc.
  void AtServer(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame);
  void HelloAtServer(const std::shared_ptr<Stream>& stream, const v1::Hello& hello);
  void ClosedAtServer(uint64_t stream);
  void EndSession(const std::shared_ptr<ServerSession>& session);
  void FlushSession(const std::shared_ptr<ServerSession>& session);
  absl::Duration Delay() {
    if (healed_) return Between(absl::Microseconds(100), absl::Milliseconds(2));
    if (!Chance(0.03)) return Between(absl::Microseconds(100), slow_);
    Fault("delayed");
    return Between(slow_, 20 * slow_);
  }

  void Chaos();
  void CutAll();
  void Heal();
  void StartWorker(int slot);
  void Kill(const std::shared_ptr<Process>& process, bool told);
  void Watch();
  void OperatorKv();
  void OperatorCheckpoints();
  void CheckProgress();

  void SawSealed(const v1::CheckpointRecord& record, int ranks);
  // `begun`: when the process first asked for it.
  void SawPublished(const v1::CheckpointRecord& record, absl::Time begun);
  // Notes that a checkpoint is to be deleted.
  void SawDoomed(const v1::CheckpointRecord& record);
  // An operator pins a checkpoint, holds it back, or undoes that.
  void MarkOne(const v1::ListCheckpointsReply& listed);
  // An operator has retention applied, and may carry out what it orders.
  void CollectNow();
  void ResolveNow(v1::VerifyDepth depth);
  // An operator compares the files of a checkpoint with its record, and reports what was found.
  void VerifyOne(const v1::ListCheckpointsReply& listed);
  // Returns whether the coordinator has reported damage of this checkpoint and no caller has
  // verified it as whole since.
  bool KnownDamaged(uint64_t id) const;

  void CheckHandled(const v1::Op& op, const std::optional<v1::OpResult>& immediate);
  void CheckRecord(const coordinator::Record& record);
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
  int spare_slot_ = -1;  // whose worker only takes a seat if needed
  v1::RendezvousSpec spec_;
  double drop_ = 0;
  double repeat_ = 0;
  absl::Duration slow_;
  bool healed_ = false;
  absl::Time healed_at_;
  std::vector<std::pair<absl::Time, absl::Time>> cut_;  // by slot: to server, from server
  std::map<std::pair<int, bool>, absl::Time> latest_;   // arrival: slot, to server
  std::vector<std::shared_ptr<Process>> current_;       // by slot
  std::vector<std::shared_ptr<Process>> all_;
  uint64_t next_incarnation_ = 1000;
  std::vector<bool> has_agent_;  // by host: two slots each
  std::vector<Agent> agents_;
  std::vector<int> hubs_;  // hosts whose agents can be hubs
  const SimClock clock_{&now_};
  uint64_t next_stream_ = 1;
  uint64_t next_agent_ = 1;

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
    std::shared_ptr<ServerSession> session;  // it came on an agent's stream, as
    uint64_t op_id = 0;
  };
  std::map<CallId, Origin> origins_;
  std::map<std::string, std::shared_ptr<ServerSession>> sessions_;  // by node
  std::map<uint64_t, std::shared_ptr<ServerSession>> by_stream_;
  uint64_t next_session_ = 1;
  std::vector<coordinator::NodeDirective> held_directives_;
  std::vector<coordinator::Record> unwritten_;  // not yet accepted by the disk
  std::vector<coordinator::Reply> held_;        // wait for durability
  uint64_t written_ = 0;
  uint64_t durable_ = 0;
  uint64_t term_revision_ = 0;  // of the record that begins the term
  bool syncing_ = false;
  bool journal_failed_ = false;
  absl::Time next_tick_ = absl::InfiniteFuture();
  Output out_;

  // The state of the checks.
  std::map<std::string, std::vector<KvEvent>> history_;
  std::map<std::string, std::vector<uint64_t>> history_terms_;  // of the answers; 0: none
  std::map<uint64_t, absl::Time> term_began_;
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
    uint64_t session = 0;  // of the process: a new one knows nothing of the barriers before it
  };
  std::map<InstanceId, std::vector<SeenResult>> results_;
  std::map<InstanceId, int64_t> failed_at_;  // event number of the newest record of it
  struct Recall {
    int64_t event = 0;     // its number
    uint64_t session = 0;  // of the process
  };
  std::map<std::pair<uint64_t, uint64_t>, Recall> recalled_;  // by incarnation and term
  std::map<InstanceId, std::map<int, std::string>> payloads_;
  std::map<std::pair<uint64_t, uint64_t>, std::string> agreements_;  // (generation, counter)
  std::map<std::pair<uint64_t, int>, uint64_t> seats_;     // (generation, rank) -> incarnation
  std::map<uint64_t, std::map<std::string, int>> sealed_;  // generation -> worker -> rank
  std::map<uint64_t, std::pair<int, uint64_t>> tables_;    // generation -> (world size, digest)
  // Checkpoints: by (generation, step); the ranks that have written; the reported digest.
  std::map<std::pair<uint64_t, int64_t>, uint64_t> checkpoint_of_;
  std::map<uint64_t, std::set<int>> shards_;
  std::map<uint64_t, std::string> sealed_digests_;
  std::set<uint64_t> deleted_checkpoints_;
  std::set<uint64_t> publications_;  // that were asked for
  // The marks that operators have acknowledgements of, while no other mark is on its way.
  struct Marks {
    bool known() const { return !asked; }
    bool asked = false;
    bool pinned = false;
    bool held_back = false;
    int changes = 0;
  };
  std::map<uint64_t, Marks> marks_;
  // Whether a promoted checkpoint was published since the last of these was damaged or held back.
  bool resumable_ = false;
  // The files that are damaged, and what was reported of them, newest last.
  std::set<uint64_t> damaged_files_;
  std::set<uint64_t> short_files_;  // those whose sizes alone say it
  struct Verification {
    v1::VerifyDepth depth;
    bool damaged = false;
    bool acknowledged = false;
  };
  std::map<uint64_t, std::vector<Verification>> verifications_;
  absl::Time verified_at_ = absl::InfinitePast();
  absl::Time withdrawn_at_ = absl::InfinitePast();  // damage to a promoted one, or its hold
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
  friend class HubSender;
  friend class SimIncomingStream;
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
  fence->set_cluster(kCluster);
  fence->set_term_seen(term_);
  fence->set_revision_seen(revision_);
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
  if (sim_->HasAgent(slot_)) {
    sim_->SubmitToAgent({sim_->all_[incarnation_ - 1000], tag, call.op});
    return;
  }
  if (call.attempts++ > 0 && call.last_attempt != 0 && sim_->Chance(0.5)) {
    // The transport reports to the server that the former attempt was cancelled.
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
  // Does nothing if it was sent again meanwhile: each attempt has one successor.
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
  v1::ReplyHeader header;
  if (result.has_heartbeat()) header = result.heartbeat().header();
  if (result.has_txn()) header = result.txn().header();
  if (result.has_join()) header = result.join().header();
  if (result.error().detail().reason() == v1::ERROR_REASON_STALE_TERM)
    sim_->Violation(absl::StrCat("the only coordinator is behind: ", result.error().message()));
  revision_ = std::max(revision_, header.revision());
  const uint64_t term = header.term();
  if (term <= term_) return;
  const bool first = term_ == 0;
  term_ = term;
  if (first || rank_ < 0 || sim_->HasAgent(slot_)) return;
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
  join->set_spare(slot_ == sim_->spare_slot_);
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
    if (!sim_->HasAgent(slot_)) Heartbeat();
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
  At(sim_->now() + think, [this] {
    KvThen([this] { GateThen([this] { CheckpointThen([this] { Collective(); }); }); });
  });
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
    // Two keys at once: no reader may ever see them differ.
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

void Process::CheckpointThen(std::function<void()> next) {
  // If workers take their seats again, each is at a step of its own.
  if (step_ % 6 != 4 || !sim_->spec_.end_generation_on_failure()) return next();
  // The id arrives as if rank 0 had broadcast it.
  const uint64_t id = sim_->checkpoint_of_[{generation_, step_}];
  if (rank_ != 0) {
    if (id != 0) return ReportShards(id, next);
    return At(sim_->now() + absl::Milliseconds(10), [this, next] { CheckpointThen(next); });
  }
  auto op = std::make_shared<v1::Op>();
  v1::BeginCheckpointRequest* const begin = op->mutable_begin_checkpoint();
  FillFence(begin->mutable_fence(), true);
  begin->set_path(absl::StrCat("g", generation_, ".s", step_));
  begin->set_staging(absl::StrCat("g", generation_, ".s", step_, ".tmp"));
  begin->set_step(step_);
  begin->set_ranks(world_size_);
  begin->set_keep(kKept);
  begin->set_hold_back(step_ % 18 != 4);
  Begin(op, absl::Milliseconds(250), [this, next](const v1::OpResult& result) {
    if (result.has_error()) {
      if (Leaves(result.error())) return;
      sim_->Violation("a checkpoint did not begin: " + result.error().ShortDebugString());
      return;
    }
    const uint64_t id = result.begin_checkpoint().checkpoint_id();
    sim_->checkpoint_of_[{generation_, step_}] = id;
    ReportShards(id, next);
  });
}

std::shared_ptr<v1::Op> Process::ReportOp(uint64_t id) {
  auto op = std::make_shared<v1::Op>();
  v1::ReportShardsRequest* const report = op->mutable_report_shards();
  FillFence(report->mutable_fence(), false);
  report->set_checkpoint_id(id);
  report->set_rank(rank_);
  report->set_last(true);
  v1::ShardFile* const file = report->add_files();
  file->set_name(absl::StrCat("rank", rank_));
  file->set_bytes(rank_ + 1);
  file->set_xxh3(std::string(32, 'a'));
  v1::TensorSlice* const slice = file->add_slices();
  slice->set_tensor("w");
  slice->add_global_shape(world_size_);
  slice->add_offset(rank_);
  slice->add_extent(1);
  return op;
}

void Process::ReportShards(uint64_t id, std::function<void()> next) {
  // A rank's file is on the disk when the rank says so.
  sim_->shards_[id].insert(rank_);
  Begin(ReportOp(id), absl::Milliseconds(250), [this, id, next](const v1::OpResult& result) {
    if (result.has_error()) {
      if (Leaves(result.error())) return;
      // Rank 0 abandoned it, because a rank was late.
      if (result.error().detail().reason() != v1::ERROR_REASON_NO_CHECKPOINT) {
        sim_->Violation("shards were refused: " + result.error().ShortDebugString());
        return;
      }
    }
    if (rank_ != 0) return next();
    Seal(id, 0, next);
  });
}

void Process::Seal(uint64_t id, int tries, std::function<void()> next) {
  auto op = std::make_shared<v1::Op>();
  FillFence(op->mutable_seal_checkpoint()->mutable_fence(), true);
  op->mutable_seal_checkpoint()->set_checkpoint_id(id);
  Begin(op, absl::Milliseconds(250), [this, id, tries, next](const v1::OpResult& result) {
    if (!result.has_error()) {
      sim_->SawSealed(result.seal_checkpoint().checkpoint(), world_size_);
      return Publish(id, next);
    }
    if (Leaves(result.error())) return;
    if (result.error().detail().reason() != v1::ERROR_REASON_SHARDS_MISSING) {
      sim_->Violation("a checkpoint was not sealed: " + result.error().ShortDebugString());
      return;
    }
    if (tries < 8) {
      return At(sim_->now() + absl::Milliseconds(60), [this, id, tries, next] {
        // A new coordinator knows nothing of this rank's report.
        if (tries % 2 == 0) return Seal(id, tries + 1, next);
        Begin(ReportOp(id), absl::Milliseconds(250), [this, id, tries, next](const auto& told) {
          if (told.has_error() && Leaves(told.error())) return;
          Seal(id, tries + 1, next);
        });
      });
    }
    auto abort = std::make_shared<v1::Op>();
    FillFence(abort->mutable_abort_checkpoint()->mutable_fence(), true);
    abort->mutable_abort_checkpoint()->set_checkpoint_id(id);
    Begin(abort, absl::Milliseconds(250), [this, next](const v1::OpResult& aborted) {
      if (aborted.has_error()) {
        if (Leaves(aborted.error())) return;
        sim_->Violation("an abort was refused: " + aborted.error().ShortDebugString());
        return;
      }
      next();
    });
  });
}

void Process::Publish(uint64_t id, std::function<void()> next) {
  auto op = std::make_shared<v1::Op>();
  FillFence(op->mutable_publish_checkpoint()->mutable_fence(), true);
  op->mutable_publish_checkpoint()->set_checkpoint_id(id);
  sim_->publications_.insert(id);
  Begin(op, absl::Milliseconds(250), [this, next, begun = sim_->now()](const v1::OpResult& result) {
    if (result.has_error()) {
      if (Leaves(result.error())) return;
      sim_->Violation("a checkpoint was not published: " + result.error().ShortDebugString());
      return;
    }
    const v1::PublishCheckpointReply& reply = result.publish_checkpoint();
    sim_->SawPublished(reply.checkpoint(), begun);
    if (reply.to_delete_size() == 0) return next();
    auto op = std::make_shared<v1::Op>();
    v1::CheckpointDeletedRequest* const deleted = op->mutable_checkpoint_deleted();
    FillFence(deleted->mutable_fence(), true);
    for (const v1::CheckpointRecord& record : reply.to_delete()) {
      sim_->SawDoomed(record);
      deleted->add_checkpoint_ids(record.checkpoint_id());
    }
    Begin(op, absl::Milliseconds(250), [this, next](const v1::OpResult& told) {
      if (told.has_error()) {
        if (Leaves(told.error())) return;
        sim_->Violation("a deletion was refused: " + told.error().ShortDebugString());
        return;
      }
      next();
    });
  });
}

void Process::PollTriggers() {
  auto op = std::make_shared<v1::Op>();
  v1::PollTriggersRequest* poll = op->mutable_poll_triggers();
  FillFence(poll->mutable_fence(), false);
  poll->set_rank(rank_);
  poll->set_step(step_ - 1);
  // Makes one promise for all: the latest of those already made, or the next step.
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
  if (!elastic && slots_ > 2 && Chance(0.3)) {
    spare_slot_ = static_cast<int>(Draw(slots_));
    spec_.set_min_workers(slots_ - 1);
    spec_.set_max_workers(slots_ - 1);
  }
  *spec_.mutable_last_call() = ToProto(absl::Milliseconds(300));
  *spec_.mutable_lease() = ToProto(kLease);
  // Most seeds find the dead soon; the others wait for workers that may only be disconnected.
  *spec_.mutable_outage_tolerance() =
      ToProto(options.one_cut || options.seed % 4 == 0 ? absl::Seconds(8) : absl::ZeroDuration());
  *spec_.mutable_join_timeout() = ToProto(absl::Seconds(20));
  spec_.set_end_generation_on_failure(Chance(0.7));
  drop_ = Chance(0.3) ? 0 : 0.05 * static_cast<double>(Draw(4));
  repeat_ = Chance(0.5) ? 0 : 0.05;
  slow_ = absl::Milliseconds(1 + Draw(30));
  if (options.one_cut) drop_ = repeat_ = 0;
  cut_.assign(slots_, {absl::InfinitePast(), absl::InfinitePast()});
  current_.resize(slots_);
  core_options_.cluster_id = absl::StrCat(absl::Hex(kCluster, absl::kZeroPad16));
  core_options_.mutants = options.mutants;
  core_options_.strikes_to_quarantine = Chance(0.3) ? 3 : 0;
  core_options_.quarantine_for = absl::Seconds(2);
  core_options_.kept_answers = 64;
  core_options_.watch_events = Chance(0.3) ? 60 : 2000;
  core_options_.kept_barrier_results = 1000;
  watchers_.resize(2);
  const uint64_t agents = Draw(10);  // none, all, or some hosts have one
  for (int host = 0; host < (slots_ + 1) / 2; ++host)
    has_agent_.push_back(agents >= 3 && (agents < 8 || Chance(0.5)));
  // One seed in three has hubs; the others are what they were without. All hosts have agents then,
  // and up to two more without workers; the first one's can be a hub too.
  if (options.seed % 3 == 0) {
    has_agent_.assign(has_agent_.size(), true);
    if (Chance(0.5)) hubs_.push_back(0);
    for (uint64_t more = 1 + Draw(2); more > 0; --more) {
      hubs_.push_back(static_cast<int>(has_agent_.size()));
      has_agent_.push_back(true);
    }
    core_options_.hubs.direct_agents = 0;
    cut_.resize(2 * has_agent_.size(), {absl::InfinitePast(), absl::InfinitePast()});
  }
  agents_.resize(has_agent_.size());
}

void Sim::Transfer(int slot, bool to_server, bool may_repeat, std::function<void()> deliver) {
  if (slot >= 0 && !healed_) {
    const absl::Time cut_until = to_server ? cut_[slot].first : cut_[slot].second;
    if (now_ < cut_until) return;
    if (Chance(drop_)) return Fault("dropped");
  }
  if (may_repeat && !healed_ && Chance(repeat_)) {
    Fault("repeated");
    At(now_ + 3 * Delay(), deliver);
  }
  const absl::Time arrives = now_ + Delay();
  absl::Time& latest = latest_[{slot, to_server}];
  if (arrives < latest) Fault("overtaken");
  latest = std::max(latest, arrives);
  At(arrives, std::move(deliver));
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
      origins_[id] = {process, tag, op, nullptr, nullptr, 0};
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
      origins_[call] = {nullptr, 0, shared, done, nullptr, 0};
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
  held_directives_.clear();
  origins_.clear();
  sessions_.clear();
  by_stream_.clear();
  out_.Clear();
  next_tick_ = absl::InfiniteFuture();
  std::string snapshot;
  std::vector<std::string> records;
  if (disk_.Recover(&snapshot, &records)) Fault("torn tail");
  absl::Status status = snapshot.empty() ? absl::OkStatus() : core_->Restore(snapshot);
  for (const std::string& record : records) {
    if (status.ok()) status = core_->Replay(record);
  }
  if (!status.ok())
    return Violation(absl::StrCat("the journal cannot be replayed: ", status.ToString()));
  written_ = durable_ = core_->last_record_revision();
  core_->StartTerm(core_->last_term() + 1, now_, &out_);
  term_began_[core_->last_term()] = now_;
  CheckRecovered();
  // Nothing is served before the record of the term is durable; otherwise a crash could give out
  // one term twice.
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
  result_.lost += static_cast<int64_t>(core_->stats().workers_lost);
  core_.reset();
  if (disk_.Crash(&random_)) Fault("lost tail");
  origins_.clear();
  held_.clear();
  held_directives_.clear();
  unwritten_.clear();
  sessions_.clear();
  by_stream_.clear();
  for (const Agent& agent : agents_) {
    if (agent.stream == nullptr || agent.stream->hub != kNoHub) continue;
    At(now_ + Between(absl::Milliseconds(1), absl::Milliseconds(100)),
       [this, stream = agent.stream] { LoseStream(stream); });
  }
  superseded_ = visible_superseded_;
  seat_of_ = visible_seat_of_;
  current_generation_ = visible_generation_;
  At(now_ + Between(absl::Milliseconds(10), absl::Milliseconds(1500)), [this] { StartServer(); });
}

void Sim::Handle(CallId call, const v1::Op& op, const std::string& node) {
  if (!serving_) return;
  if (journal_failed_ && Core::NeedsJournal(op)) {
    coordinator::Reply reply{call, nullptr, 0};
    FailReply(&reply);
    Release(reply);
    return;
  }
  ++result_.operations;
  core_->Handle(call, op, {node}, now_, &out_);
  Absorb(&op, call);
}

void Sim::Absorb(const v1::Op* op, CallId call) {
  std::optional<v1::OpResult> immediate;
  for (coordinator::Reply& reply : out_.replies) {
    const v1::OpResult result = reply.answer->Parse();
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
    // This is as in the runner: while the journal fails, whatever waits for it is refused.
    if (journal_failed_ && reply.durable_revision > durable_) FailReply(&reply);
    held_.push_back(std::move(reply));
  }
  for (coordinator::NodeDirective& directive : out_.directives)
    held_directives_.push_back(std::move(directive));
  if (op != nullptr) CheckHandled(*op, immediate);
  for (coordinator::Record& record : out_.records) {
    CheckRecord(record);
    unwritten_.push_back(std::move(record));
  }
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
      if (!journal_failed_) Fault("disk full");
      if (disk_.torn()) Fault("torn by full disk");
      journal_failed_ = true;
      // Nothing that waits may be acknowledged; it is written when there is room again.
      std::vector<coordinator::Reply> waiting;
      waiting.swap(held_);
      for (coordinator::Reply& reply : waiting) {
        if (reply.durable_revision > durable_) FailReply(&reply);
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
    const bool slow = !healed_ && Chance(0.03);
    if (slow) Fault("slow fsync");
    const absl::Duration latency = healed_ ? absl::Milliseconds(1)
                                   : slow
                                       ? Between(absl::Milliseconds(50), absl::Milliseconds(1500))
                                       : Between(absl::Microseconds(200), absl::Milliseconds(8));
    At(now_ + latency, [this, life = life_, bytes = disk_.size(), revision = written_] {
      SyncDone(life, bytes, revision);
    });
  }
}

void Sim::FailReply(coordinator::Reply* reply) {
  v1::OpResult result;
  *result.mutable_error() =
      coordinator::MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_JOURNAL_FAILED,
                             "the journal cannot be written");
  reply->answer = std::make_shared<coordinator::Answer>(result);
  reply->durable_revision = 0;
}

void Sim::SyncDone(uint64_t life, size_t bytes, uint64_t revision) {
  if (life != life_ || !up_) return;
  if (!healed_ && Chance(0.002)) {
    Fault("disk failed");
    return CrashServer(true);  // EIO: what is on the disk is unknown, so start over
  }
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
  for (coordinator::NodeDirective& directive : std::exchange(held_directives_, {})) {
    if (directive.durable_revision > durable_) {
      held_directives_.push_back(std::move(directive));
      continue;
    }
    const auto it = sessions_.find(directive.node);
    if (it == sessions_.end()) continue;
    it->second->agent.outbox().AddDirective(directive.directive);
    FlushSession(it->second);
  }
}

void Sim::Release(const coordinator::Reply& reply) {
  const auto it = origins_.find(reply.call);
  if (it == origins_.end()) return;
  const Origin origin = std::move(it->second);
  origins_.erase(it);
  const auto shared = std::make_shared<const v1::OpResult>(reply.answer->Parse());
  const v1::OpResult& result = *shared;
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
  if (origin.session != nullptr) {
    origin.session->calls.erase(reply.call);
    origin.session->agent.outbox().AddResult(origin.op_id, reply.answer);
    FlushSession(origin.session);
    return;
  }
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
  const uint64_t revision = core_->last_record_revision();
  Trace(absl::StrCat("snapshot of revision ", revision));
  // The snapshot is built from the disk while the core continues; written under a temporary name,
  // synced, renamed: it exists whole or not at all. The records that it holds are deleted only
  // afterwards.
  At(now_ + Between(absl::Milliseconds(1), absl::Milliseconds(100)),
     [this, life = life_, hosts = core_->SnapshotHosts(), revision] {
       if (life != life_ || !up_ || durable_ < revision) return;
       std::string snapshot;
       std::vector<std::string> records;
       if (!disk_.Read(revision, &snapshot, &records)) return;
       Core replica(core_options_);
       absl::Status status = snapshot.empty() ? absl::OkStatus() : replica.Restore(snapshot);
       for (const std::string& record : records) {
         if (status.ok()) status = replica.Replay(record);
       }
       if (status.ok()) status = replica.RestoreHosts(hosts);
       if (!status.ok())
         return Violation(absl::StrCat("a snapshot cannot be built: ", status.ToString()));
       disk_.PublishSnapshot(replica.Snapshot(), revision);
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
  const int slot = process->slot_;
  // Its connections close: held calls are abandoned, unless the link is cut.
  if (!HasAgent(slot))
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
    if (HasAgent(slot)) {
      SubmitToAgent({nullptr, 0, std::make_shared<v1::Op>(op)});
    } else {
      FromOperator(op, nullptr);
    }
  }
  if (current_[slot] == process) {
    At(now_ + Between(absl::Milliseconds(10),
                      healed_ ? absl::Milliseconds(50) : absl::Milliseconds(2500)),
       [this, slot, process] {
         if (current_[slot] == process) StartWorker(slot);
       });
  }
}

// Cuts the coordinator off alone, for longer than a lease.
void Sim::CutAll() {
  if (healed_) return;
  const absl::Time until = now_ + 5 * kLease / 2;
  Fault("partitioned");
  for (auto& [to_server, from_server] : cut_) to_server = from_server = until;
  Trace(absl::StrCat("all are cut off until ", absl::FormatDuration(until - kStart)));
}

void Sim::Chaos() {
  if (healed_) return;
  if (!hubs_.empty() && Chance(0.4)) {
    HubChaos();
    return At(now_ + Between(absl::Milliseconds(20), absl::Milliseconds(800)), [this] { Chaos(); });
  }
  const int slot = static_cast<int>(Draw(slots_));
  const std::shared_ptr<Process> process = current_[slot];
  switch (Draw(16)) {
    case 0:
    case 1:
      if (process != nullptr) Kill(process, Chance(0.7));
      break;
    case 2:
      if (process != nullptr) {
        process->paused_until_ = now_ + Between(absl::Milliseconds(200), 3 * kLease);
        Trace(absl::StrCat(process->worker_id(), "/", process->incarnation_, " is stopped until ",
                           absl::FormatDuration(process->paused_until_ - kStart)));
        // A launcher believes it dead and starts another: the old one wakes up as a zombie.
        if (Chance(0.5)) StartWorker(slot);
      }
      break;
    case 3:
      // The old process lives on next to the new one.
      if (process != nullptr) StartWorker(slot);
      break;
    case 4:
    case 5: {
      const absl::Time until = now_ + Between(absl::Milliseconds(300), absl::Seconds(4));
      const uint64_t way = Draw(3);  // both, or half-open
      Fault(way == 0 ? "partitioned" : "half-open");
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
      // It is not paused twice: the events that wait for it to resume must stay in order.
      if (up_ && now_ >= server_paused_until_) {
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
    case 12:
    case 13:
      if (agents_[slot / 2].stream != nullptr) {
        Trace(absl::StrCat("the stream of h", slot / 2, " breaks"));
        LoseStream(agents_[slot / 2].stream);
      }
      break;
    case 14:
      if (has_agent_[slot / 2] && Chance(0.5)) CrashAgent(slot / 2);
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

void Sim::HubChaos() {
  const int hub = hubs_[Draw(hubs_.size())];
  switch (Draw(8)) {
    case 0:
      if (agents_[hub].client == nullptr) break;
      Fault("hub killed");
      CrashAgent(hub);
      break;
    case 1:
      // It is not paused twice, like the coordinator.
      if (agents_[hub].client == nullptr || now_ < agents_[hub].stopped_until) break;
      Fault("hub stopped");
      agents_[hub].stopped_until = now_ + Between(absl::Milliseconds(100), absl::Seconds(5));
      Trace(absl::StrCat("hub h", hub, " is stopped until ",
                         absl::FormatDuration(agents_[hub].stopped_until - kStart)));
      break;
    case 2:
      cut_[2 * hub].first = cut_[2 * hub].second =
          now_ + Between(absl::Milliseconds(300), absl::Seconds(4));
      break;
    case 3:
      if (agents_[hub].stream != nullptr) LoseStream(agents_[hub].stream);
      break;
    default: {
      // Chosen without regard to what the coordinator has decided.
      const int host = static_cast<int>(Draw((slots_ + 1) / 2));
      MoveTo(host, Chance(0.2) ? kNoHub : hub, Chance(0.5));
    }
  }
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

void Sim::SawSealed(const v1::CheckpointRecord& record, int ranks) {
  const uint64_t id = record.checkpoint_id();
  ++result_.checkpoints;
  if (static_cast<int>(shards_[id].size()) != ranks) {
    Violation(absl::StrCat("checkpoint ", id, " is sealed, but only ", shards_[id].size(), " of ",
                           ranks, " ranks had written their shards"));
  }
  const auto [it, is_new] = sealed_digests_.try_emplace(id, record.sha256());
  if (!is_new && it->second != record.sha256()) {
    Violation(absl::StrCat("checkpoint ", id, " was sealed with two digests"));
  }
}

void Sim::SawPublished(const v1::CheckpointRecord& record, absl::Time begun) {
  if (record.promoted() && begun > withdrawn_at_) resumable_ = true;
}

void Sim::SawDoomed(const v1::CheckpointRecord& record) {
  const uint64_t id = record.checkpoint_id();
  if (!deleted_checkpoints_.insert(id).second) return;
  const auto marks = marks_.find(id);
  if (marks != marks_.end() && marks->second.known() && marks->second.pinned) {
    Violation(absl::StrCat("checkpoint ", id, " is pinned and is to be deleted"));
  }
  if (!record.published() || !record.damage().empty()) return;
  const auto newer = std::distance(publications_.upper_bound(id), publications_.end());
  if (newer < kKept) {
    Violation(absl::StrCat("checkpoint ", id, " is to be deleted, but only ", newer, " of ", kKept,
                           " newer ones are sealed"));
  }
}

void Sim::MarkOne(const v1::ListCheckpointsReply& listed) {
  std::vector<const v1::CheckpointRecord*> whole;
  for (const v1::CheckpointRecord& record : listed.checkpoints()) {
    // The answer to an earlier mark is not known: the mark may still arrive.
    if (record.state() == v1::CHECKPOINT_STATE_PUBLISHED &&
        marks_[record.checkpoint_id()].known()) {
      whole.push_back(&record);
    }
  }
  if (whole.empty()) return;
  const v1::CheckpointRecord& record = *whole[Draw(whole.size())];
  const uint64_t id = record.checkpoint_id();
  constexpr v1::MarkCheckpointRequest::Mark kMarks[] = {
      v1::MarkCheckpointRequest::PIN, v1::MarkCheckpointRequest::UNPIN,
      v1::MarkCheckpointRequest::HOLD_BACK, v1::MarkCheckpointRequest::PROMOTE};
  const v1::MarkCheckpointRequest::Mark mark = kMarks[Draw(std::size(kMarks))];
  v1::Op op;
  op.mutable_mark_checkpoint()->mutable_fence()->set_job_id(kJob);
  op.mutable_mark_checkpoint()->set_checkpoint_id(id);
  op.mutable_mark_checkpoint()->set_mark(mark);
  // The list may be older than a promotion that another mark led to.
  if (mark == v1::MarkCheckpointRequest::HOLD_BACK) {
    withdrawn_at_ = now_;
    resumable_ = false;
  }
  marks_[id].asked = true;
  ++marks_[id].changes;
  FromOperator(op, [this, id, mark](const v1::OpResult& result) {
    Marks& marks = marks_[id];
    if (result.has_mark_checkpoint()) {
      marks.asked = false;
      if (mark == v1::MarkCheckpointRequest::PIN) marks.pinned = true;
      if (mark == v1::MarkCheckpointRequest::UNPIN) marks.pinned = false;
      if (mark == v1::MarkCheckpointRequest::HOLD_BACK) marks.held_back = true;
      if (mark == v1::MarkCheckpointRequest::PROMOTE) marks.held_back = false;
    } else if (result.error().detail().reason() == v1::ERROR_REASON_CHECKPOINT_CONFLICT ||
               result.error().detail().reason() == v1::ERROR_REASON_NO_CHECKPOINT) {
      marks.asked = false;  // it is being deleted
    }
  });
}

void Sim::CollectNow() {
  v1::Op op;
  op.mutable_collect_checkpoints()->mutable_fence()->set_job_id(kJob);
  op.mutable_collect_checkpoints()->set_keep(kKept);
  const bool dry_run = Draw(3) == 0;
  op.mutable_collect_checkpoints()->set_dry_run(dry_run);
  FromOperator(op, [this, dry_run](const v1::OpResult& result) {
    if (!result.has_collect_checkpoints() || dry_run) return;
    v1::Op done;
    done.mutable_checkpoint_deleted()->mutable_fence()->set_job_id(kJob);
    for (const v1::CheckpointRecord& record : result.collect_checkpoints().to_delete()) {
      SawDoomed(record);
      done.mutable_checkpoint_deleted()->add_checkpoint_ids(record.checkpoint_id());
    }
    // Otherwise it ends before it has deleted them: the order is given again.
    if (Draw(2) == 0) return;
    FromOperator(done, [this](const v1::OpResult& told) {
      if (told.error().detail().reason() == v1::ERROR_REASON_CHECKPOINT_CONFLICT) {
        Violation("a deletion was refused: " + told.error().ShortDebugString());
      }
    });
  });
}

bool Sim::KnownDamaged(uint64_t id) const {
  const auto it = verifications_.find(id);
  if (it == verifications_.end()) return false;
  // A later verification that is still on its way may have arrived, or not.
  v1::VerifyDepth known = v1::VERIFY_DEPTH_UNSPECIFIED;  // the deepest look that found it
  for (const Verification& one : it->second) {
    if (!one.damaged && one.depth >= known) known = v1::VERIFY_DEPTH_UNSPECIFIED;
    if (one.damaged && one.acknowledged) known = std::max(known, one.depth);
  }
  return known != v1::VERIFY_DEPTH_UNSPECIFIED;
}

void Sim::VerifyOne(const v1::ListCheckpointsReply& listed) {
  std::vector<const v1::CheckpointRecord*> whole;
  for (const v1::CheckpointRecord& record : listed.checkpoints()) {
    if (record.state() == v1::CHECKPOINT_STATE_PUBLISHED) whole.push_back(&record);
  }
  if (whole.empty()) return;
  const v1::CheckpointRecord& record = *whole[Draw(whole.size())];
  const uint64_t id = record.checkpoint_id();
  if (damaged_files_.contains(id)) {
    if (Draw(4) == 0) {  // from a copy
      damaged_files_.erase(id);
      short_files_.erase(id);
    } else if (Draw(4) == 0) {
      short_files_.insert(id);
    }
  } else if (Draw(6) == 0) {
    damaged_files_.insert(id);
    if (Draw(3) == 0) short_files_.insert(id);
    Fault("checkpoint damaged");
  }
  v1::Op op;
  v1::VerifyCheckpointRequest* const verify = op.mutable_verify_checkpoint();
  verify->mutable_fence()->set_job_id(kJob);
  verify->set_checkpoint_id(id);
  verify->set_sha256(record.sha256());
  verified_at_ = std::max(now_, verified_at_ + absl::Microseconds(1));
  verify->set_verified_unix_us(static_cast<uint64_t>(absl::ToUnixMicros(verified_at_)));
  const bool deep = Draw(3) != 0;
  verify->set_depth(deep ? v1::VERIFY_CONTENTS : v1::VERIFY_SIZES);
  const bool damaged = (deep ? damaged_files_ : short_files_).contains(id);
  if (damaged) verify->set_damage(deep ? "rank0: block 0 is damaged" : "rank0: 3 of 4 bytes");
  if (damaged) {
    withdrawn_at_ = now_;
    resumable_ = false;
  }
  std::vector<Verification>& verifications = verifications_[id];
  const size_t index = verifications.size();
  verifications.push_back({.depth = verify->depth(), .damaged = damaged});
  FromOperator(op, [this, id, index](const v1::OpResult& result) {
    if (result.has_verify_checkpoint()) verifications_[id][index].acknowledged = true;
  });
}

// Asks what a resume would ask.
void Sim::ResolveNow(v1::VerifyDepth depth) {
  v1::Op op;
  op.mutable_resolve_checkpoint()->mutable_fence()->set_job_id(kJob);
  op.mutable_resolve_checkpoint()->set_verified(depth);
  const bool resumable = resumable_ && depth == v1::VERIFY_DEPTH_UNSPECIFIED;
  const std::set<uint64_t> gone = deleted_checkpoints_;
  const std::map<uint64_t, Marks> marks = marks_;
  std::set<uint64_t> damaged;
  for (const auto& [id, verifications] : verifications_) {
    if (KnownDamaged(id)) damaged.insert(id);
  }
  FromOperator(op, [this, depth, resumable, gone, marks, damaged,
                    asked = now_](const v1::OpResult& result) {
    const v1::CheckpointRecord& record = result.resolve_checkpoint().checkpoint();
    const uint64_t id = record.checkpoint_id();
    if (result.error().detail().reason() == v1::ERROR_REASON_NO_CHECKPOINT ||
        (result.has_resolve_checkpoint() && id == 0)) {
      if (resumable && withdrawn_at_ < asked) {
        Violation("a resume finds no checkpoint, although one was published");
      }
      return;
    }
    if (!result.has_resolve_checkpoint()) return;
    const auto before = marks.find(id);
    if (before != marks.end() && before->second.known() && before->second.held_back &&
        marks_[id].changes == before->second.changes) {
      Violation("a resume is given a checkpoint that is held back: " + record.ShortDebugString());
    }
    if (record.state() != v1::CHECKPOINT_STATE_PUBLISHED || !record.promoted() ||
        gone.contains(id) || static_cast<int>(shards_[id].size()) != record.ranks()) {
      Violation("a resume is given a checkpoint that is not whole: " + record.ShortDebugString());
    }
    if (damaged.contains(id) && KnownDamaged(id)) {
      Violation("a resume is given a checkpoint that is known to be damaged: " +
                record.ShortDebugString());
    }
    const std::vector<Verification>& looks = verifications_[id];
    if (depth != v1::VERIFY_DEPTH_UNSPECIFIED &&
        std::none_of(looks.begin(), looks.end(), [depth](const Verification& one) {
          return !one.damaged && one.depth >= depth;
        })) {
      Violation("a resume that wants a verified checkpoint is given one that nobody has read: " +
                record.ShortDebugString());
    }
  });
}

// Asks what a resume would ask, does what people do with checkpoints, and checks that what was
// sealed is still known.
void Sim::OperatorCheckpoints() {
  ResolveNow(v1::VERIFY_DEPTH_UNSPECIFIED);
  if (Draw(2) == 0) ResolveNow(v1::VERIFY_CONTENTS);
  if (Draw(6) == 0) CollectNow();
  std::set<uint64_t> damaged;
  for (const auto& [id, verifications] : verifications_) {
    if (KnownDamaged(id)) damaged.insert(id);
  }
  v1::Op op;
  op.mutable_list_checkpoints()->mutable_fence()->set_job_id(kJob);
  const std::map<uint64_t, std::string> sealed = sealed_digests_;
  FromOperator(op, [this, sealed, damaged](const v1::OpResult& result) {
    if (!result.has_list_checkpoints()) return;
    std::map<uint64_t, std::string> listed;
    for (const v1::CheckpointRecord& record : result.list_checkpoints().checkpoints()) {
      const uint64_t id = record.checkpoint_id();
      listed[id] = record.sha256();
      if (record.damage().empty() && damaged.contains(id) && KnownDamaged(id)) {
        Violation(absl::StrCat("damage to checkpoint ", id, " was reported and is forgotten"));
      }
    }
    if (Draw(2) == 0) VerifyOne(result.list_checkpoints());
    if (Draw(3) == 0) MarkOne(result.list_checkpoints());
    for (const auto& [id, sha256] : sealed) {
      // Retention has let it go meanwhile.
      if (deleted_checkpoints_.contains(id)) continue;
      const auto it = listed.find(id);
      if (it == listed.end() || it->second != sha256) {
        Violation(absl::StrCat("checkpoint ", id, " was sealed and is not listed"));
      }
    }
  });
  At(now_ + Between(absl::Milliseconds(100), absl::Milliseconds(900)),
     [this] { OperatorCheckpoints(); });
}

void Sim::Heal() {
  healed_ = true;
  healed_at_ = now_;
  Trace("everything is healed");
  disk_.set_full(false);
  for (const std::shared_ptr<Process>& process : all_) {
    process->paused_until_ = std::min(process->paused_until_, now_);
    process->passed_here_ = 0;
  }
  // Events that were drawn before, such as restarts, still come within their time.
  At(now_ + absl::Seconds(3), [this] {
    if (!up_) StartServer();
    for (int host = 0; host < static_cast<int>(agents_.size()); ++host) StartAgent(host);
    for (int slot = 0; slot < slots_; ++slot) {
      if (current_[slot] == nullptr || !current_[slot]->alive_) StartWorker(slot);
    }
  });
}

// Checks progress: all seats of one generation are taken, and its workers have passed barriers in
// it.
void Sim::CheckProgress() {
  uint64_t generation = 0;
  for (int slot = 0; slot < slots_; ++slot) {
    if (current_[slot]->seated()) generation = std::max(generation, current_[slot]->generation_);
  }
  int going = 0;
  for (int slot = 0; slot < slots_; ++slot) {
    const Process& process = *current_[slot];
    going += process.seated() && process.passed_here_ >= 3 && process.generation_ == generation &&
                     process.world_size_ == spec_.max_workers()
                 ? 1
                 : 0;
  }
  const bool all = going == spec_.max_workers();
  if (all && now_ > healed_at_ + absl::Seconds(4)) {
    healed_at_ = absl::InfinitePast();  // done
    return;
  }
  // An elastic generation that some workers had to miss is ended so that all can join.
  if (spec_.min_workers() < spec_.max_workers() && now_ > healed_at_ + absl::Seconds(8)) {
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

// Checks that an operation from a process that has been replaced, or from a generation that has
// ended, has no effect.
void Sim::CheckHandled(const v1::Op& op, const std::optional<v1::OpResult>& immediate) {
  if (op.has_recall_barriers() && immediate.has_value() && !immediate->has_error()) {
    const v1::Fence& caller = op.recall_barriers().fence();
    // An agent speaks for all processes whose results it has handed on.
    for (const std::shared_ptr<Process>& process : all_) {
      if (process->incarnation_ != caller.incarnation() &&
          process->agent_ != caller.incarnation()) {
        continue;
      }
      recalled_.try_emplace({process->incarnation_, core_->last_term()},
                            Recall{result_.events, process->session_});
    }
  }
  if (op.has_arrive_many()) {
    const v1::ArriveManyRequest& many = op.arrive_many();
    if (immediate.has_value() && immediate->has_error()) return;
    for (const uint64_t incarnation : many.incarnations()) {
      if (superseded_.contains(incarnation)) {
        Violation(absl::StrCat(
            "an arrival of incarnation ", incarnation,
            " was accepted although a newer one sits in its place: ", op.ShortDebugString()));
      }
    }
    if (many.fence().generation() < current_generation_) {
      Violation(absl::StrCat("an arrival of generation ", many.fence().generation(),
                             " was accepted in generation ", current_generation_, ": ",
                             op.ShortDebugString()));
    }
    return;
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

// Checks that a generation is one more than the last, and that a worker that had a seat in that one
// keeps its rank.
void Sim::CheckRecord(const coordinator::Record& record) {
  v1::JournalRecord parsed;
  parsed.ParseFromString(record.payload);
  for (const v1::JournalChange& change : parsed.changes()) {
    if (change.has_barrier_ended() && change.barrier_ended().answer().has_error()) {
      // This counts whether or not any caller still waits for it. It happens again if this record
      // is lost.
      const v1::BarrierEnded& ended = change.barrier_ended();
      failed_at_[{{ended.generation(), ended.barrier_id()}, ended.counter()}] = result_.events;
    }
    if (!change.has_generation_sealed()) continue;
    const v1::GenerationSealed& sealed = change.generation_sealed();
    const std::map<std::string, int>& before = sealed_[sealed.generation() - 1];
    if (sealed.generation() > 1 && before.empty()) {
      Violation(absl::StrCat("generation ", sealed.generation(), " follows on none"));
    }
    std::map<std::string, int> seats;
    for (const v1::SeatRecord& seat : sealed.seats()) {
      seats[seat.worker_id()] = seat.rank();
      const auto former = before.find(seat.worker_id());
      if (former == before.end() || former->second >= sealed.seats_size()) continue;
      if (former->second != seat.rank()) {
        Violation(absl::StrCat(seat.worker_id(), " had rank ", former->second, " in generation ",
                               sealed.generation() - 1, " and has rank ", seat.rank(),
                               " in the next"));
      }
    }
    if (static_cast<int>(seats.size()) != sealed.seats_size() ||
        sealed.seats_size() < spec_.min_workers() || sealed.seats_size() > spec_.max_workers()) {
      Violation(absl::StrCat("generation ", sealed.generation(), " has ", sealed.seats_size(),
                             " seats for ", seats.size(), " workers"));
    }
    sealed_[sealed.generation()] = std::move(seats);
  }
}

// Checks that every rank has called before any passes.
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
  const SeenResult seen_now = {verdict, term, process.incarnation_, process.session_};
  std::vector<SeenResult>& seen = results_[id];
  for (const SeenResult& other : seen) {
    if (other.verdict == verdict) continue;
    // A plain pass is not journaled. Across a crash another result is possible only while no
    // process that saw the pass could report it: its reply was still under way, or it died, was
    // cut off until the barrier failed for the others, or had to join again and forgot what it
    // saw. A failure is journaled before it is reported, so no pass can follow it.
    const bool passed = verdict.rfind("BARRIER_STATE_PASSED", 0) == 0;
    const bool other_passed = other.verdict.rfind("BARRIER_STATE_PASSED", 0) == 0;
    const SeenResult pass = passed ? seen_now : other;
    const uint64_t failed_in = passed ? other.term : term;
    if (passed != other_passed && pass.term < failed_in && id.first.second != "gather") {
      const auto told = recalled_.find({pass.incarnation, failed_in});
      if (passed || told == recalled_.end() || told->second.session != pass.session ||
          told->second.event > failed_at_[id]) {
        continue;
      }
    }
    Violation(absl::StrCat("barrier ", id.first.second, " counter ", id.second, " of generation ",
                           id.first.first, " ended as ", other.verdict, " (term ", other.term,
                           ") and as ", verdict, " (term ", term, ")"));
  }
  seen.push_back(seen_now);
}

// Checks, after a crash, that whatever any caller was shown as durable is still there.
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
  core_->Handle(next_call_++, op, {""}, now_, &out);
  const v1::TxnReply reply = out.replies[0].answer->Parse().txn();
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
    // Ephemeral keys start empty with each term. An operation that was answered in another term may
    // have happened in this one too, its reply lost.
    const std::vector<uint64_t>& terms = history_terms_[key];
    const std::set<uint64_t> all(terms.begin(), terms.end());
    for (const uint64_t term : all) {
      if (term == 0) continue;
      const absl::Time first = term_began_[term];
      absl::Time last = absl::InfinitePast();
      for (size_t i = 0; i < events.size(); ++i) {
        if (terms[i] != term) continue;
        last = std::max(last, events[i].end);
      }
      std::vector<KvEvent> part;
      for (size_t i = 0; i < events.size(); ++i) {
        KvEvent event = events[i];
        if (event.start > last) continue;
        if (terms[i] != term) {
          if (event.answered && event.end < first) continue;
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

void Sim::StartAgent(int host) {
  Agent& agent = agents_[host];
  if (!has_agent_[host] || agent.client != nullptr) return;
  agent.client =
      std::make_unique<AgentClient>(absl::StrCat("h", host), 500 + next_agent_++, Chance(0.5));
  ++agent.life;
  Trace(absl::StrCat("agent h", host, "/", agent.client->incarnation(), " starts"));
  // Its workers find the next agent: they tell it what they still wait for, and how their barriers
  // ended.
  for (const std::shared_ptr<Process>& process : all_) {
    if (!process->alive_ || process->slot_ / 2 != host) continue;
    process->agent_ = agent.client->incarnation();
    for (const auto& [id, counter] : process->counters_) {
      if (counter == 0 || process->previous_[id] == v1::BARRIER_STATE_UNSPECIFIED) continue;
      auto& seen = agent.seen[{process->generation_, id}];
      if (counter - 1 >= seen.first) seen = {counter - 1, process->previous_[id]};
    }
    // A stopped process notices when it resumes.
    process->At(
        std::max(now_, process->paused_until_),
        [process] {
          std::vector<uint64_t> tags;
          for (const auto& [tag, call] : process->calls_) tags.push_back(tag);
          for (const uint64_t tag : tags) process->Send(tag);
        },
        true);
  }
  if (std::find(hubs_.begin(), hubs_.end(), host) != hubs_.end()) StartHub(host);
  Connect(host);
  AgentBeat(host, agent.life);
}

void Sim::CrashAgent(int host) {
  Agent& agent = agents_[host];
  if (agent.client == nullptr) return;
  Trace(absl::StrCat("agent h", host, " is killed"));
  const uint64_t life = agent.life;
  if (agent.stream != nullptr) LoseStream(agent.stream);
  agent.hub.reset();
  agent = Agent();
  // No stream that led to this process leads to the next.
  agent.life = life + 1;
  for (const Agent& other : agents_) {
    if (other.stream == nullptr || other.stream->hub != host) continue;
    At(now_ + Between(absl::Milliseconds(1), absl::Milliseconds(100)),
       [this, stream = other.stream] { LoseStream(stream); });
  }
  // Its workers die with it, or find the next one.
  const bool all = Chance(0.5);
  for (int slot = 2 * host; all && slot < std::min(slots_, 2 * host + 2); ++slot) {
    if (current_[slot] != nullptr) Kill(current_[slot], false);
  }
  At(now_ + Between(absl::Milliseconds(10), absl::Milliseconds(1500)),
     [this, host] { StartAgent(host); });
}

void Sim::SubmitToAgent(Agent::Target target) {
  const int host = target.process != nullptr ? target.process->slot_ / 2
                                             : (target.op->report_exit().worker_id()[1] - '0') / 2;
  Agent& agent = agents_[host];
  if (agent.client == nullptr) return;  // sent again to the next one
  if (target.process != nullptr) target.process->agent_ = agent.client->incarnation();
  if (target.op->has_arrive()) {
    agent.arrivals.push_back(std::move(target));
    if (agent.flush_scheduled) return;
    agent.flush_scheduled = true;
    At(now_ + Between(absl::ZeroDuration(), absl::Milliseconds(4)),
       [this, host, life = agent.life] {
         if (agents_[host].life == life && agents_[host].client != nullptr) FlushArrivals(host);
       });
    return;
  }
  const std::shared_ptr<const v1::Op> op = target.op;
  SubmitOf(
      host, *op,
      target.process == nullptr ? std::vector<Agent::Target>() : std::vector{std::move(target)});
  Pump(host);
}

void Sim::FlushArrivals(int host) {
  Agent& agent = agents_[host];
  agent.flush_scheduled = false;
  std::vector<Agent::Target> arrivals = std::exchange(agent.arrivals, {});
  while (!arrivals.empty()) {
    const v1::ArriveRequest first = arrivals.front().op->arrive();
    std::vector<Agent::Target> same, rest;
    for (Agent::Target& target : arrivals) {
      const v1::ArriveRequest& one = target.op->arrive();
      const bool fits = one.fence().generation() == first.fence().generation() &&
                        one.barrier_id() == first.barrier_id() &&
                        one.counter() == first.counter() &&
                        one.previous_state() == first.previous_state() && target.process->alive_;
      if (fits || same.empty()) {
        same.push_back(std::move(target));
      } else {
        rest.push_back(std::move(target));
      }
    }
    arrivals = std::move(rest);
    v1::Op op;
    if (same.size() == 1 && Chance(0.5)) {
      op = *same[0].op;
    } else {
      v1::ArriveManyRequest* many = op.mutable_arrive_many();
      many->mutable_fence()->set_job_id(kJob);
      many->mutable_fence()->set_worker_id(absl::StrCat("agent:h", host));
      many->mutable_fence()->set_incarnation(agent.client->incarnation());
      many->mutable_fence()->set_generation(first.fence().generation());
      many->set_barrier_id(first.barrier_id());
      many->set_counter(first.counter());
      many->set_call_site(first.call_site());
      many->set_previous_state(first.previous_state());
      *many->mutable_timeout() = first.timeout();
      *many->mutable_participants() = first.participants();
      for (const Agent::Target& target : same) {
        const v1::ArriveRequest& one = target.op->arrive();
        many->add_ranks(one.rank());
        many->add_incarnations(one.fence().incarnation());
        if (!one.payload().empty()) many->add_payloads(one.payload());
        many->set_step(std::max(many->step(), one.step()));
      }
    }
    SubmitOf(host, op, std::move(same));
  }
  Pump(host);
}

void Sim::SubmitOf(int host, const v1::Op& op, std::vector<Agent::Target> targets) {
  Agent& agent = agents_[host];
  if (agent.hub == nullptr) {
    const uint64_t id = agent.client->Submit(op);
    if (!targets.empty()) agent.waiting[id] = std::move(targets);
    return;
  }
  // Operations of this node itself go through its hub too.
  agent.hub->Submit(op, [this, host, life = agent.life,
                         targets = std::move(targets)](const v1::OpResult& result) {
    if (agents_[host].life == life && !targets.empty()) Deliver(host, targets, result);
  });
}

void Sim::Pump(int host) {
  Agent& agent = agents_[host];
  if (agent.pump_scheduled || agent.client == nullptr) return;
  agent.pump_scheduled = true;
  At(now_ + Between(absl::ZeroDuration(), absl::Microseconds(400)),
     [this, host, life = agent.life] {
       Agent& one = agents_[host];
       if (one.life != life || one.client == nullptr) return;
       one.pump_scheduled = false;
       if (one.stream == nullptr) return;
       if (now_ < one.stopped_until) {
         return WhenAgentRuns(host, one.life, [this, host] { Pump(host); });
       }
       for (const v1::AgentFrame& frame : one.client->TakeFrames()) SendUp(one.stream, frame);
     });
}

void Sim::Connect(int host) {
  Agent& agent = agents_[host];
  if (agent.client == nullptr || agent.stream != nullptr) return;
  if (now_ < agent.stopped_until) {
    return WhenAgentRuns(host, agent.life, [this, host] { Connect(host); });
  }
  auto stream = std::make_shared<Stream>();
  stream->id = next_stream_++;
  stream->host = host;
  stream->hub = agent.route;
  stream->life = LifeAt(*stream);
  if (stream->hub != kNoHub) stream->link = std::make_shared<SimIncomingStream>(this, stream);
  agent.stream = stream;
  agent.last_heard = now_;
  SendUp(stream,
         agent.client->Hello(agent.hub == nullptr ? "" : absl::StrCat(host),
                             stream->hub == kNoHub ? std::exchange(agent.failed_hub, "") : ""));
  At(now_ + absl::Milliseconds(700), [this, host, stream] {
    const Agent& one = agents_[host];
    if (one.stream == stream && !one.client->welcomed()) LoseStream(stream);
  });
}

void Sim::AgentBeat(int host, uint64_t life) {
  Agent& agent = agents_[host];
  if (agent.life != life || agent.client == nullptr) return;
  if (now_ < agent.stopped_until) {
    return WhenAgentRuns(host, life, [this, host, life] { AgentBeat(host, life); });
  }
  if (agent.stream != nullptr && agent.client->welcomed()) {
    const bool away =
        agent.client->coordinator_away() && now_ > agent.away_since + absl::Milliseconds(700);
    if (now_ > agent.last_heard + absl::Milliseconds(1300) || away) {
      LoseStream(agent.stream);
    } else {
      v1::Beat beat;
      for (const std::shared_ptr<Process>& process : all_) {
        if (!process->alive_ || process->slot_ / 2 != host) continue;
        v1::WorkerBeat* worker = beat.add_workers();
        worker->set_job_id(kJob);
        worker->set_worker_id(process->worker_id());
        worker->set_incarnation(process->incarnation_);
        worker->set_step(process->step_);
        worker->set_process_state(now_ < process->paused_until_ ? "stopped" : "running");
      }
      if (agent.hub != nullptr) AddAgentsTo(&beat, host);
      SendUp(agent.stream, agent.client->Beat(beat));
    }
  }
  At(now_ + absl::Milliseconds(500), [this, host, life] { AgentBeat(host, life); });
}

// The stream is broken, and its agent knows. The coordinator learns it now, later, or from the next
// stream.
void Sim::LoseStream(std::shared_ptr<Stream> stream) {
  if (!stream->agent_open) return;
  Fault("broke stream");
  stream->agent_open = false;
  stream->down_works = false;
  if (Chance(0.5)) stream->up_works = false;  // else what is under way still arrives
  Agent& agent = agents_[stream->host];
  if (agent.stream == stream) {
    agent.stream = nullptr;
    if (agent.client != nullptr) agent.client->StreamLost();
    if (agent.hub != nullptr) agent.hub->OnUpstream();
    if (stream->hub != kNoHub && agent.route == stream->hub && Chance(0.5)) {
      agent.failed_hub = absl::StrCat("h", stream->hub);
      agent.route = kNoHub;
    }
    At(now_ + Between(absl::Milliseconds(1), absl::Milliseconds(300)),
       [this, host = stream->host] { Connect(host); });
  }
  At(now_ + (Chance(0.5) ? Delay() : Between(absl::Milliseconds(1), absl::Seconds(5))),
     [this, stream] {
       if (stream->life != LifeAt(*stream)) return;
       stream->up_works = false;
       if (stream->hub != kNoHub) return ClosedAtHub(stream);
       WhenServerRuns([this, stream] { ClosedAtServer(stream->id); });
     });
}

void Sim::SendUp(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame) {
  if (!healed_ && (now_ < CutUntil(*stream, true) || Chance(drop_ / 20))) stream->up_works = false;
  if (!stream->up_works) return;
  stream->last_up = std::max(stream->last_up, now_ + Delay());
  At(stream->last_up, [this, stream, frame] {
    if (!stream->up_works || stream->life != LifeAt(*stream)) return;
    if (stream->hub != kNoHub) return AtHub(stream, frame);
    WhenServerRuns([this, stream, frame] { AtServer(stream, frame); });
  });
}

void Sim::SendDown(const std::shared_ptr<Stream>& stream, const v1::CoordinatorFrame& frame) {
  if (!healed_ && (now_ < CutUntil(*stream, false) || Chance(drop_ / 20)))
    stream->down_works = false;
  if (!stream->down_works) return;
  stream->last_down = std::max(stream->last_down, now_ + Delay());
  At(stream->last_down, [this, stream, frame] {
    if (stream->down_works && stream->agent_open) AtAgent(stream, frame);
  });
}

void Sim::ToLocal(const Agent::Target& target, const v1::OpResult& result) {
  auto shared = std::make_shared<const v1::OpResult>(result);
  At(now_ + Between(absl::Microseconds(10), absl::Microseconds(500)),
     [target, shared] { target.process->Receive(target.tag, shared); });
}

void Sim::RecallAt(int host) {
  Agent& agent = agents_[host];
  if (agent.seen.empty()) return;
  const uint64_t generation = agent.seen.rbegin()->first.first;
  v1::Op op;
  v1::RecallBarriersRequest* recall = op.mutable_recall_barriers();
  recall->mutable_fence()->set_job_id(kJob);
  recall->mutable_fence()->set_worker_id(absl::StrCat("agent:h", host));
  recall->mutable_fence()->set_incarnation(agent.client->incarnation());
  recall->mutable_fence()->set_generation(generation);
  for (const auto& [barrier, last] : agent.seen) {
    if (barrier.first != generation) continue;
    v1::SeenBarrier* seen = recall->add_seen();
    seen->set_barrier_id(barrier.second);
    seen->set_counter(last.first);
    seen->set_state(last.second);
  }
  agent.client->SubmitFirst(op);
}

void Sim::Deliver(int host, const std::vector<Agent::Target>& targets, const v1::OpResult& result) {
  Agent& agent = agents_[host];
  InstanceId instance;
  const bool arrival = ArrivalOf(*targets[0].op, &instance);
  const v1::ErrorReason reason = result.error().detail().reason();
  if (arrival && !Verdict(result).empty()) {
    auto& seen = agent.seen[instance.first];
    if (instance.second >= seen.first) {
      seen = {instance.second,
              result.has_arrive()                          ? v1::BARRIER_STATE_PASSED
              : reason == v1::ERROR_REASON_BARRIER_TIMEOUT ? v1::BARRIER_STATE_TIMED_OUT
              : reason == v1::ERROR_REASON_RANK_FAILED     ? v1::BARRIER_STATE_FAILED
                                                           : v1::BARRIER_STATE_CANCELLED};
    }
  }
  if (arrival && targets.size() > 1 &&
      (reason == v1::ERROR_REASON_SUPERSEDED || reason == v1::ERROR_REASON_LEASE_EXPIRED ||
       reason == v1::ERROR_REASON_NOT_MEMBER)) {
    // One of them is at fault: each is sent on its own.
    for (const Agent::Target& target : targets) SubmitOf(host, *target.op, {target});
    return;
  }
  for (const Agent::Target& target : targets) ToLocal(target, result);
}

void Sim::AtAgent(const std::shared_ptr<Stream>& stream, const v1::CoordinatorFrame& frame) {
  Agent& agent = agents_[stream->host];
  if (agent.stream != stream) return;
  if (now_ < agent.stopped_until) {
    return WhenAgentRuns(stream->host, agent.life,
                         [this, stream, frame] { AtAgent(stream, frame); });
  }
  // Beats are acknowledged; what a hub says of itself proves only that one way works.
  if (!frame.has_hub_state()) agent.last_heard = now_;
  if (stream->hub != kNoHub &&
      (frame.has_goodbye() ||
       (frame.has_welcome() && frame.welcome().term() < agent.client->term()))) {
    // An agent leaves a hub that does not know the newest term.
    if (!frame.goodbye().has_retry_after()) agent.route = kNoHub;
    return LoseStream(stream);
  }
  const bool was_away = agent.client->coordinator_away();
  const AgentClient::Received received = agent.client->OnFrame(frame);
  if (agent.client->coordinator_away() && !was_away) agent.away_since = now_;
  if (!received.violation.empty()) Violation(received.violation);
  if (received.new_term) RecallAt(stream->host);
  if (frame.has_welcome() && agent.hub != nullptr) agent.hub->OnUpstream();
  for (const v1::OpResult& result : received.results) {
    if (const auto call = agent.hub_calls.find(result.op_id()); call != agent.hub_calls.end()) {
      const agent::OpSender::Done done = std::move(call->second);
      agent.hub_calls.erase(call);
      done(result);
      continue;
    }
    const auto it = agent.waiting.find(result.op_id());
    if (it == agent.waiting.end()) continue;
    const std::vector<Agent::Target> targets = std::move(it->second);
    agent.waiting.erase(it);
    Deliver(stream->host, targets, result);
  }
  for (const v1::Directive& directive : received.directives) {
    if (agent.hub != nullptr) agent.hub->OnDirective(directive);
    if (directive.has_use_hub()) {
      MoveTo(stream->host, std::stoi(directive.use_hub().address()), true);
      continue;
    }
    if (directive.has_collect_stack()) {
      v1::StackReply stack;
      stack.set_query_id(directive.collect_stack().query_id());
      stack.set_native_stack("main()");
      agent.client->ReplyStack(stack);
    }
    for (const std::shared_ptr<Process>& process : std::vector<std::shared_ptr<Process>>(all_)) {
      if (!process->alive_ || process->slot_ / 2 != stream->host) continue;
      if (directive.has_kill_worker() &&
          directive.kill_worker().incarnation() == process->incarnation_) {
        Kill(process, true);
      }
      if (directive.has_generation_ended() && process->rank_ >= 0 &&
          process->generation_ <= directive.generation_ended().generation() &&
          now_ >= process->paused_until_) {
        Trace(absl::StrCat(process->worker_id(), " hears from its agent that generation ",
                           directive.generation_ended().generation(), " has ended"));
        process->Rejoin();
      }
    }
  }
  Pump(stream->host);
}

void Sim::AtServer(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame) {
  if (!serving_) {
    // No process listens yet.
    stream->up_works = false;
    At(now_ + Delay(), [this, stream] { LoseStream(stream); });
    return;
  }
  const auto it = by_stream_.find(stream->id);
  if (it == by_stream_.end()) {
    if (frame.has_hello()) return HelloAtServer(stream, frame.hello());
    // Another stream took over, or the session has ended.
    At(now_ + Delay(), [this, stream] { LoseStream(stream); });
    return;
  }
  const std::shared_ptr<ServerSession> session = it->second;
  if (frame.has_bye()) {
    by_stream_.erase(it);
    EndSession(session);
    Absorb(nullptr, 0);
    return At(now_ + Delay(), [this, stream] { LoseStream(stream); });
  }
  if (!session->agent.Receive(frame) && !options_.applies_frames_again) return;
  FlushSession(session);
  if (frame.has_beat()) {
    core_->HandleBeat(session->agent.node(), frame.beat(), now_, &out_);
    Absorb(nullptr, 0);
  } else if (frame.has_stack()) {
    core_->HandleStack(session->agent.node(), frame.stack(), now_, &out_);
    Absorb(nullptr, 0);
  }
  for (const v1::Op& op : frame.ops().ops()) {
    if (!session->applied.insert(op.op_id()).second) {
      Violation(absl::StrCat("operation ", op.op_id(),
                             " of one session was applied twice: ", op.ShortDebugString()));
    }
    const CallId call = next_call_++;
    auto shared = std::make_shared<v1::Op>(op);
    origins_[call] = {nullptr, 0, shared, nullptr, session, op.op_id()};
    session->calls.insert(call);
    Handle(call, *shared, session->agent.node());
    if (!serving_) return;
  }
}

void Sim::HelloAtServer(const std::shared_ptr<Stream>& stream, const v1::Hello& hello) {
  std::shared_ptr<ServerSession> session;
  if (const auto it = sessions_.find(hello.node()); it != sessions_.end()) {
    session = it->second;
    if (session->stream != nullptr) {
      by_stream_.erase(session->stream->id);
      At(now_ + Delay(), [this, old = session->stream] { LoseStream(old); });
      session->stream = nullptr;
    }
    if (!session->agent.Resume(hello)) {
      EndSession(session);
      session = nullptr;
    }
  }
  if (session == nullptr) {
    session = std::make_shared<ServerSession>(hello, absl::StrCat("s", next_session_++));
    sessions_[hello.node()] = session;
  } else {
    ++result_.resumed;
  }
  by_stream_[stream->id] = session;
  session->expires = absl::InfiniteFuture();
  session->stream = stream;
  session->agent.Welcome(1, core_->last_term(), core_options_.cluster_id, kLease);
  core_->AttachAgent(session->agent.node(), hello, now_, &out_);
  Absorb(nullptr, 0);
  FlushSession(session);
}

void Sim::ClosedAtServer(uint64_t stream) {
  const auto it = by_stream_.find(stream);
  if (it == by_stream_.end()) return;
  const std::shared_ptr<ServerSession> session = it->second;
  by_stream_.erase(it);
  if (session->stream != nullptr && session->stream->id == stream) session->stream = nullptr;
  if (session->ended) return;
  const absl::Time expires = now_ + absl::Seconds(3);
  session->expires = expires;
  At(expires, [this, session, expires, life = life_] {
    if (life != life_ || !up_ || session->ended || session->expires != expires) return;
    EndSession(session);
    Absorb(nullptr, 0);
  });
}

void Sim::EndSession(const std::shared_ptr<ServerSession>& session) {
  if (session->ended) return;
  session->ended = true;
  Trace(absl::StrCat("the session of ", session->agent.node(), " ends"));
  for (const CallId call : session->calls) {
    core_->Abandon(call, now_, &out_);
    origins_.erase(call);
  }
  session->calls.clear();
  const auto it = sessions_.find(session->agent.node());
  if (it != sessions_.end() && it->second == session) sessions_.erase(it);
  core_->DetachAgent(session->agent.node(), now_, &out_);
}

void Sim::FlushSession(const std::shared_ptr<ServerSession>& session) {
  if (session->flush_scheduled) return;
  session->flush_scheduled = true;
  At(now_ + Between(absl::ZeroDuration(), absl::Microseconds(200)), [this, session, life = life_] {
    session->flush_scheduled = false;
    if (life != life_ || session->stream == nullptr) return;
    while (session->agent.outbox().HasWork()) {
      std::string bytes;
      for (const rpc::FramePiece& piece : session->agent.outbox().Next())
        bytes.append(piece.bytes.data(), piece.bytes.size());
      v1::CoordinatorFrame frame;
      if (!frame.ParseFromString(bytes)) Violation("a frame that cannot be read");
      SendDown(session->stream, frame);
    }
  });
}

uint64_t HubSender::Submit(v1::Op op, Done done) {
  Agent& agent = sim_->agents_[host_];
  const uint64_t id = agent.client->Submit(op);
  agent.hub_calls[id] = std::move(done);
  ++sim_->result_.through_hubs;
  sim_->Pump(host_);
  return id;
}

void HubSender::Forget(uint64_t op_id) {
  Agent& agent = sim_->agents_[host_];
  agent.hub_calls.erase(op_id);
  agent.client->Forget(op_id);
}

void SimIncomingStream::Write(rpc::FrameBytes frame) {
  const std::shared_ptr<Stream> stream = stream_.lock();
  if (stream == nullptr) return;
  std::string bytes;
  for (const rpc::FramePiece& piece : frame) bytes.append(piece.bytes.data(), piece.bytes.size());
  v1::CoordinatorFrame parsed;
  if (!parsed.ParseFromString(bytes)) sim_->Violation("a frame of a hub that cannot be read");
  sim_->SendDown(stream, parsed);
  sim_->At(sim_->now() + sim_->Between(absl::Microseconds(1), absl::Microseconds(200)),
           [sim = sim_, stream] { sim->Written(stream); });
}

void SimIncomingStream::Close(const absl::Status&) {
  const std::shared_ptr<Stream> stream = stream_.lock();
  if (stream == nullptr) return;
  // The hub's last messages still arrive, and then the end does.
  stream->up_works = false;
  stream->last_down = std::max(stream->last_down, sim_->now() + sim_->Delay());
  sim_->At(stream->last_down, [sim = sim_, stream] { sim->LoseStream(stream); });
  sim_->At(sim_->now() + absl::Microseconds(1), [sim = sim_, stream] { sim->ClosedAtHub(stream); });
}

void Sim::WhenAgentRuns(int host, uint64_t life, std::function<void()> f) {
  if (agents_[host].life != life || agents_[host].client == nullptr) return;
  if (now_ >= agents_[host].stopped_until) return f();
  At(agents_[host].stopped_until,
     [this, host, life, f = std::move(f)] { WhenAgentRuns(host, life, f); });
}

void Sim::StartHub(int host) {
  Agent& agent = agents_[host];
  agent::HubCore::Options options;
  options.node = absl::StrCat("h", host);
  options.incarnation = agent.client->incarnation();
  options.resume_window = absl::Seconds(3);
  options.beat_fresh = absl::Seconds(1);
  options.upstream = [this, host] {
    const Agent& one = agents_[host];
    agent::Upstream upstream;
    upstream.connected = one.stream != nullptr && one.client->welcomed();
    upstream.session = one.client->sessions();
    upstream.term = one.client->term();
    upstream.cluster_id = one.client->cluster_id();
    upstream.lease = kLease;
    upstream.why_away = "the stream broke";
    return upstream;
  };
  options.send_stack = [this, host](v1::StackReply stack) {
    agents_[host].client->ReplyStack(std::move(stack));
    Pump(host);
  };
  options.wake = [this, host, life = agent.life] {
    At(now_, [this, host, life] { WhenAgentRuns(host, life, [this, host] { TickHub(host); }); });
  };
  options.clock = &clock_;
  agent.sender = std::make_unique<HubSender>(this, host);
  agent.hub = std::make_unique<agent::HubCore>(std::move(options), agent.sender.get());
}

void Sim::TickHub(int host) {
  Agent& agent = agents_[host];
  if (agent.next_tick <= now_) agent.next_tick = absl::InfiniteFuture();
  const absl::Time next = agent.hub->Tick();
  if (next >= agent.next_tick) return;
  agent.next_tick = next;
  At(next, [this, host, next, life = agent.life] {
    WhenAgentRuns(host, life, [this, host, next] {
      if (agents_[host].next_tick == next) TickHub(host);
    });
  });
}

// A hub does not speak for agents that were silent since its last beat, and repeats no old facts.
void Sim::AddAgentsTo(v1::Beat* beat, int host) {
  Agent& agent = agents_[host];
  const int own = beat->workers_size();
  agent.hub->AddToBeat(beat);
  if (options_.hub_speaks_for_the_silent) {
    for (const v1::WorkerBeat& worker : agent.said_before) *beat->add_workers() = worker;
  }
  agent.said_before.assign(beat->workers().begin() + own, beat->workers().end());
  for (const v1::WorkerBeat& worker : agent.said_before) {
    const auto said = agent.said.find(worker.incarnation());
    if (said == agent.said.end() ||
        (said->second + absl::Seconds(1) < now_ && worker.process_state() == "running")) {
      Violation(absl::StrCat("hub h", host, " speaks for ", worker.worker_id(), "/",
                             worker.incarnation(), ", whose agent has said nothing since ",
                             said == agent.said.end() ? "its last beat" : "long ago"));
    }
  }
  agent.said.clear();
}

void Sim::AtHub(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame) {
  WhenAgentRuns(stream->hub, stream->life, [this, stream, frame] {
    if (!stream->hub_open || !stream->up_works) return;
    Agent& agent = agents_[stream->hub];
    for (const v1::WorkerBeat& worker : frame.beat().workers())
      agent.said[worker.incarnation()] = now_;
    agent.hub->OnFrame(stream->link, frame, frame.ByteSizeLong());
  });
}

void Sim::Written(const std::shared_ptr<Stream>& stream) {
  WhenAgentRuns(stream->hub, stream->life, [this, stream] {
    if (stream->hub_open) agents_[stream->hub].hub->OnWritten(stream->link);
  });
}

void Sim::ClosedAtHub(const std::shared_ptr<Stream>& stream) {
  WhenAgentRuns(stream->hub, stream->life, [this, stream] {
    if (std::exchange(stream->hub_open, false)) agents_[stream->hub].hub->OnClosed(stream->link);
  });
}

// Moves in order (with a Bye, and to the hub when the other side has ended the stream) or at once,
// while what is under way may still arrive.
void Sim::MoveTo(int host, int hub, bool in_order) {
  Agent& agent = agents_[host];
  if (agent.client == nullptr || agent.hub != nullptr || agent.route == hub) return;
  Fault("moved");
  Trace(absl::StrCat("agent h", host, " moves to ",
                     hub == kNoHub ? "the coordinator" : absl::StrCat("hub h", hub)));
  agent.route = hub;
  if (agent.stream == nullptr) return;
  if (!in_order || !agent.client->welcomed()) return LoseStream(agent.stream);
  v1::AgentFrame bye;
  bye.mutable_bye()->set_reason("moves");
  SendUp(agent.stream, bye);
  At(now_ + absl::Seconds(1), [this, stream = agent.stream] { LoseStream(stream); });
}

SimulationResult Sim::Run() {
  StartServer();
  for (int host = 0; host < static_cast<int>(agents_.size()); ++host) {
    At(now_ + Between(absl::ZeroDuration(), absl::Milliseconds(200)),
       [this, host] { StartAgent(host); });
  }
  for (int slot = 0; slot < slots_; ++slot) {
    At(now_ + Between(absl::ZeroDuration(), absl::Milliseconds(300)),
       [this, slot] { StartWorker(slot); });
  }
  At(now_ + absl::Milliseconds(500), [this] { Watch(); });
  At(now_ + absl::Milliseconds(600), [this] { OperatorKv(); });
  At(now_ + absl::Milliseconds(700), [this] { OperatorCheckpoints(); });
  if (!options_.one_cut) {
    At(now_ + absl::Milliseconds(800), [this] { Chaos(); });
  }
  if (options_.one_cut || options_.seed % 4 == 0) {
    At(now_ + absl::Seconds(2) + absl::Milliseconds(options_.seed % 1000), [this] { CutAll(); });
  }
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
  if (core_ != nullptr) result_.lost += static_cast<int64_t>(core_->stats().workers_lost);
  if (result_.violation.empty()) CheckAtEnd();
  return std::move(result_);
}

}  // namespace

SimulationResult Simulate(const SimulationOptions& options) { return Sim(options).Run(); }

}  // namespace muster::simulation
