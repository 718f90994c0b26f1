#include "agent/hub_core.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/text.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

constexpr uint32_t kProtocol = 1;
constexpr size_t kNameBytes = 256;

// Makes the times in `beat`, which count back from when it was sent, longer by `by`.
void Age(absl::Duration by, v1::WorkerBeat* beat) {
  if (beat->has_restored_ago()) {
    *beat->mutable_restored_ago() = rpc::ToProto(rpc::FromProto(beat->restored_ago()) + by);
  }
  if (beat->has_first_step_ago()) {
    *beat->mutable_first_step_ago() = rpc::ToProto(rpc::FromProto(beat->first_step_ago()) + by);
  }
}

v1::OpResult Overloaded(absl::string_view what) {
  v1::OpResult result;
  *result.mutable_error() = rpc::ToOpError(rpc::ErrorWithReason(absl::StatusCode::kUnavailable,
                                                                what, v1::ERROR_REASON_OVERLOADED,
                                                                /*retryable=*/true));
  return result;
}

// Whether the stream has given up: only the stream answers UNAVAILABLE without a reason.
bool IsLost(const v1::OpResult& result) {
  return result.error().code() == static_cast<int>(absl::StatusCode::kUnavailable) &&
         result.error().detail().reason() == v1::ERROR_REASON_UNSPECIFIED;
}

rpc::FrameBytes Bytes(const v1::CoordinatorFrame& frame) {
  auto owner = std::make_shared<const std::string>(frame.SerializeAsString());
  const absl::string_view bytes = *owner;
  return {{std::move(owner), bytes}};
}

}  // namespace

struct HubCore::Stream {
  explicit Stream(std::shared_ptr<IncomingStream> to) : link(std::move(to)) {}
  const std::shared_ptr<IncomingStream> link;
  std::shared_ptr<Agent> agent;  // set once it has said hello
  bool writing = false;
  bool paused = false;  // reading resumes when there is room again
  bool ended = false;   // its frames no longer count; only the Goodbye follows
  bool closed = false;  // the hub has asked for the end
  std::optional<rpc::FrameBytes> last;
  absl::Time close_by = absl::InfiniteFuture();
};

struct HubCore::Agent {
  Agent(const v1::Hello& hello, std::string session_id)
      : node(hello.node()),
        host(Utf8Prefix(hello.host(), kNameBytes)),
        session(hello.node(), hello.agent_incarnation(), std::move(session_id)) {}

  using WorkerKey = std::pair<std::string, std::string>;  // job, worker
  struct Said {
    v1::WorkerBeat beat;
    absl::Time at;
    size_t bytes = 0;
  };

  bool Has(const std::string& job_id) const {
    const auto it = workers.lower_bound({job_id, ""});
    return forgot_workers || (it != workers.end() && it->first.first == job_id) ||
           ranks.contains(job_id);
  }

  const std::string node;
  const std::string host;
  rpc::AgentSession session;
  std::shared_ptr<Stream> stream;
  absl::Time expires = absl::InfiniteFuture();  // while it has no stream
  bool ended = false;
  bool state_due = false;  // a HubState must be sent
  absl::flat_hash_set<uint64_t> calls;
  size_t held_bytes = 0;           // the size of the requests
  std::map<WorkerKey, Said> said;  // in beats since the hub's last one
  size_t said_bytes = 0;
  std::map<WorkerKey, uint64_t> workers;  // with their incarnations
  bool forgot_workers = false;            // there were too many
  Ranks ranks;
  std::set<uint64_t> stacks;  // requested
};

struct HubCore::Call {
  std::shared_ptr<Agent> agent;
  uint64_t op_id = 0;  // the agent's
  size_t bytes = 0;
  uint64_t upstream_id = 0;  // once it is known; arrivals have none
  std::string join_job;      // for a join
};

// What to do after the lock is released.
struct HubCore::Todo {
  std::vector<std::tuple<uint64_t, v1::Op, size_t>> submits;
  std::vector<std::pair<std::shared_ptr<IncomingStream>, rpc::FrameBytes>> writes;
  std::vector<std::shared_ptr<IncomingStream>> reads;
  std::vector<std::pair<std::shared_ptr<IncomingStream>, absl::Status>> closes;
  std::vector<uint64_t> forgotten;  // to be forgotten by the upstream
  absl::flat_hash_set<uint64_t> dropped;
  std::optional<v1::StackReply> stack;
  bool wake = false;
};

HubCore::HubCore(Options options, OpSender* upstream)
    : options_(std::move(options)),
      upstream_(upstream),
      arrivals_({.node = options_.node,
                 .incarnation = options_.incarnation,
                 .window = options_.arrival_window,
                 .answer =
                     [this](const std::vector<ArrivalMerger::Arrival>& arrivals,
                            const v1::OpResult& result) {
                       std::vector<uint64_t> calls;
                       for (const ArrivalMerger::Arrival& arrival : arrivals) {
                         if (arrival.tag != 0) {
                           calls.push_back(arrival.tag);
                         } else {
                           arrival.done(result);
                         }
                       }
                       if (!calls.empty()) Answered(calls, result);
                     },
                 .wake = options_.wake,
                 .clock = options_.clock},
                upstream) {}

HubCore::~HubCore() {
  MutexLock lock(&mu_);
  // An agent and its stream own each other.
  for (const auto& [node, agent] : agents_) agent->stream = nullptr;
}

uint64_t HubCore::Submit(v1::Op op, Done done) {
  if (op.has_join()) {
    const std::string job_id = op.join().fence().job_id();
    return upstream_->Submit(
        std::move(op), [this, job_id, done = std::move(done)](const v1::OpResult& result) {
          if (result.has_join()) {
            MutexLock lock(&mu_);
            LearnRank(&own_, job_id, result.join().generation(), result.join().rank());
          }
          done(result);
        });
  }
  if (!op.has_arrive() && !op.has_arrive_many()) {
    return upstream_->Submit(std::move(op), std::move(done));
  }
  bool alone;
  size_t expected;
  {
    MutexLock lock(&mu_);
    LearnArrival(&own_, op);
    alone = agents_.empty();
    expected = Expected(op);
  }
  if (alone) return upstream_->Submit(std::move(op), std::move(done));
  arrivals_.Add(std::move(op), std::move(done), expected);
  return 0;
}

void HubCore::Forget(uint64_t op_id) {
  if (op_id != 0) upstream_->Forget(op_id);
}

void HubCore::Submit(uint64_t call_id, v1::Op op, size_t expected) {
  const bool arrival = op.has_arrive() || op.has_arrive_many();
  uint64_t upstream_id = 0;
  if (arrival) {
    arrivals_.Add(std::move(op), nullptr, expected, call_id);
  } else {
    upstream_id = upstream_->Submit(std::move(op), [this, call_id](const v1::OpResult& result) {
      Answered({call_id}, result);
    });
  }
  {
    MutexLock lock(&mu_);
    const auto it = calls_.find(call_id);
    if (it != calls_.end()) {
      it->second.upstream_id = upstream_id;
      return;
    }
  }
  // Answered already, or its session has ended meanwhile.
  if (arrival) {
    arrivals_.Drop({call_id});
  } else {
    upstream_->Forget(upstream_id);
  }
}

absl::Time HubCore::Tick() {
  absl::Time next = arrivals_.Tick();
  Todo todo;
  {
    MutexLock lock(&mu_);
    const absl::Time now = options_.clock->Now();
    std::vector<std::shared_ptr<Agent>> expired;
    for (const auto& [node, agent] : agents_) {
      if (agent->expires <= now) {
        expired.push_back(agent);
      } else {
        next = std::min(next, agent->expires);
      }
    }
    for (const auto& agent : expired) EndSession(agent, absl::OkStatus(), &todo);
    for (const auto& [link, stream] : streams_) {
      if (stream->closed) continue;
      if (stream->close_by <= now) {
        CloseStream(stream, absl::UnavailableError("the agent does not read the hub's goodbye"),
                    &todo);
      } else {
        next = std::min(next, stream->close_by);
      }
    }
  }
  Run(std::move(todo));
  return next;
}

void HubCore::AddToBeat(v1::Beat* beat) {
  MutexLock lock(&mu_);
  const absl::Time now = options_.clock->Now();
  heard_.clear();
  beat_made_ = now;
  size_t bytes = 0;
  // The agents take turns, so that each one finds room.
  auto it = agents_.upper_bound(beat_after_);
  for (size_t i = 0; i < agents_.size() && bytes < options_.limits.beat_bytes; ++i, ++it) {
    if (it == agents_.end()) it = agents_.begin();
    Agent& agent = *it->second;
    beat_after_ = agent.node;
    bytes += agent.said_bytes;
    for (auto& [key, said] : agent.said) {
      // The process may have died since. A stall is logged only once.
      const bool stands_still =
          said.beat.process_state() == "stopped" || said.beat.process_state() == "zombie";
      if (said.at + options_.beat_fresh < now && !stands_still) continue;
      v1::WorkerBeat& told = *beat->add_workers();
      told = std::move(said.beat);
      Age(now - said.at, &told);
      heard_[key] = said.at;
    }
    agent.said.clear();
    agent.said_bytes = 0;
  }
  if (!std::exchange(roster_due_, false)) return;
  v1::HubRoster roster;
  for (const auto& [node, agent] : agents_) {
    if (agent->stream == nullptr) continue;
    v1::HubAgent& row = *roster.add_agents();
    row.set_node(node);
    row.set_host(agent->host);
  }
  if (roster.agents_size() == 0 && !roster_told_) return;
  roster_told_ = true;
  *beat->mutable_hub() = std::move(roster);
}

void HubCore::TakeBack(const v1::Beat& beat) {
  MutexLock lock(&mu_);
  if (beat.has_hub()) roster_due_ = true;
  for (const v1::WorkerBeat& worker : beat.workers()) {
    const Agent::WorkerKey key(worker.job_id(), worker.worker_id());
    const auto heard = heard_.find(key);
    if (heard == heard_.end()) continue;  // of this node itself
    for (const auto& [node, agent] : agents_) {
      const auto it = agent->workers.find(key);
      if (it == agent->workers.end() || it->second != worker.incarnation()) continue;
      const auto [said, fresh] = agent->said.try_emplace(key);
      if (!fresh) continue;
      said->second = {.beat = worker, .at = heard->second, .bytes = worker.ByteSizeLong()};
      Age(heard->second - beat_made_, &said->second.beat);
      agent->said_bytes += said->second.bytes;
    }
  }
}

void HubCore::OnUpstream() {
  Todo todo;
  {
    MutexLock lock(&mu_);
    DoUpstream(&todo);
    roster_due_ = true;  // the stream may be a new one
  }
  Run(std::move(todo));
}

void HubCore::DoUpstream(Todo* todo) {
  const Upstream before = std::exchange(now_, options_.upstream ? options_.upstream() : Upstream());
  if (before.session != now_.session) {
    roster_told_ = false;
    EndAll("this hub has a new session with the coordinator", /*come_back=*/true, todo);
  }
  if (!now_.hub.empty()) {
    EndAll(absl::StrCat("this node is behind hub ", now_.hub, " itself"), /*come_back=*/false,
           todo);
  }
  if (now_.ended) EndAll(now_.why_away, /*come_back=*/false, todo);
  if (before.connected == now_.connected) return;
  // Iterates over a copy, because agents that accept nothing are ended.
  const auto agents = agents_;
  for (const auto& [node, agent] : agents) {
    agent->state_due = true;
    Pump(agent, todo);
  }
}

void HubCore::OnDirective(const v1::Directive& directive) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    const std::vector<std::shared_ptr<Agent>> concerned = Concerned(directive);
    if (directive.has_generation_ended()) {
      const v1::GenerationEnded& ended = directive.generation_ended();
      const auto forget = [&](Ranks* ranks) {
        const auto it = ranks->find(ended.job_id());
        if (it != ranks->end() && it->second.generation <= ended.generation()) ranks->erase(it);
      };
      forget(&own_);
      for (const auto& agent : concerned) forget(&agent->ranks);
    }
    const auto shared = std::make_shared<const v1::Directive>(directive);
    for (const auto& agent : concerned) {
      if (directive.has_collect_stack()) {
        // The oldest query makes room: one that no process of the agent matches stays unanswered.
        if (agent->stacks.size() >= options_.limits.stacks_of_agent)
          agent->stacks.erase(agent->stacks.begin());
        agent->stacks.insert(directive.collect_stack().query_id());
      }
      agent->session.outbox().AddDirective(shared);
      Pump(agent, &todo);
    }
  }
  Run(std::move(todo));
}

std::vector<std::shared_ptr<HubCore::Agent>> HubCore::Concerned(
    const v1::Directive& directive) const {
  const auto concerns = [&](const Agent& agent) {
    switch (directive.kind_case()) {
      case v1::Directive::kGenerationEnded:
        return agent.Has(directive.generation_ended().job_id());
      case v1::Directive::kBarrierLate:
        return agent.Has(directive.barrier_late().job_id());
      case v1::Directive::kKillWorker: {
        const v1::KillWorker& kill = directive.kill_worker();
        const auto it = agent.workers.find({kill.job_id(), kill.worker_id()});
        return agent.forgot_workers ||
               (it != agent.workers.end() && it->second == kill.incarnation());
      }
      case v1::Directive::kCollectStack:
        return agent.forgot_workers ||
               std::any_of(agent.workers.begin(), agent.workers.end(), [&](const auto& worker) {
                 const v1::CollectStack& ask = directive.collect_stack();
                 return worker.first.second == ask.worker_id() &&
                        (ask.job_id().empty() || worker.first.first == ask.job_id());
               });
      default:  // for this node itself
        return false;
    }
  };
  std::vector<std::shared_ptr<Agent>> found;
  for (const auto& [node, agent] : agents_) {
    if (concerns(*agent)) found.push_back(agent);
  }
  // An agent may have restarted a worker under the same name, and the older start must end.
  if (found.empty() && directive.has_kill_worker()) {
    for (const auto& [node, agent] : agents_) {
      if (agent->Has(directive.kill_worker().job_id())) found.push_back(agent);
    }
  }
  return found;
}

void HubCore::Finish() {
  Todo todo;
  {
    MutexLock lock(&mu_);
    finished_ = true;
    EndAll("this hub ends", /*come_back=*/false, &todo);
  }
  Run(std::move(todo));
}

void HubCore::OnFrame(const std::shared_ptr<IncomingStream>& link, const v1::AgentFrame& frame,
                      size_t) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    std::shared_ptr<Stream>& known = streams_[link.get()];
    if (known == nullptr) known = std::make_shared<Stream>(link);
    const std::shared_ptr<Stream> stream = known;
    if (stream->ended) return;
    DoFrame(stream, frame, &todo);
    if (!stream->ended) {
      if (stream->agent->session.outbox().unsent_bytes() > options_.limits.unsent_bytes) {
        stream->paused = true;
      } else {
        todo.reads.push_back(link);
      }
    }
  }
  Run(std::move(todo));
}

void HubCore::DoFrame(const std::shared_ptr<Stream>& stream, const v1::AgentFrame& frame,
                      Todo* todo) {
  const std::shared_ptr<Agent> agent = stream->agent;
  if (frame.has_hello()) {
    if (agent == nullptr) {
      DoHello(stream, frame.hello(), todo);
    } else {
      CloseStream(stream, absl::InvalidArgumentError("hello was sent twice on one stream"), todo);
    }
    return;
  }
  if (agent == nullptr) {
    CloseStream(stream, absl::InvalidArgumentError("the first frame of a stream must be hello"),
                todo);
    return;
  }
  if (!agent->session.Follows(frame)) {
    CloseStream(stream,
                absl::InvalidArgumentError(absl::StrCat(
                    "frame ", frame.seq(), " does not follow the last one: frames are missing")),
                todo);
    return;
  }
  // Otherwise it was applied when it arrived on an earlier stream.
  if (!agent->session.Receive(frame)) return;
  switch (frame.kind_case()) {
    case v1::AgentFrame::kOps:
      overloaded_.reset();
      for (const v1::Op& op : frame.ops().ops()) {
        DoOp(agent, op, todo);
        // Refusals count, too: a frame has room for two million operations.
        if (agent->session.outbox().bytes() > options_.limits.unacknowledged_bytes) break;
      }
      break;
    case v1::AgentFrame::kBeat:
      if (const absl::Status taken = DoBeat(agent.get(), frame.beat()); !taken.ok()) {
        CloseStream(stream, taken, todo);
        return;
      }
      agent->session.outbox().AckAgain();
      break;
    case v1::AgentFrame::kStack:
      // Only an agent that was asked may answer.
      if (agent->stacks.erase(frame.stack().query_id()) > 0 &&
          frame.stack().ByteSizeLong() <= options_.limits.stack_bytes) {
        todo->stack = frame.stack();
      }
      break;
    case v1::AgentFrame::kBye:
      EndSession(agent, absl::OkStatus(), todo);
      return;
    case v1::AgentFrame::kHello:
    case v1::AgentFrame::KIND_NOT_SET:
      break;
  }
  Pump(agent, todo);
}

absl::Status HubCore::CheckHello(const v1::Hello& hello) {
  if (hello.node().empty() || hello.node().size() > kNameBytes || hello.node() == options_.node) {
    return rpc::ErrorWithReason(
        absl::StatusCode::kInvalidArgument,
        "hello.node must have 1 to 256 bytes and differ from the hub's own name",
        v1::ERROR_REASON_BAD_FIELD);
  }
  if (hello.protocol_min() > kProtocol || hello.protocol_max() < kProtocol) {
    return absl::FailedPreconditionError(
        absl::StrCat("agent '", hello.node(), "' (version ", hello.version(), ") speaks protocol ",
                     hello.protocol_min(), " to ", hello.protocol_max(), ", this hub speaks ",
                     kProtocol, ": use matching versions"));
  }
  if (!now_.hub.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("node ", options_.node, " is behind hub ",
                                                      now_.hub,
                                                      " itself: connect to the coordinator"));
  }
  if (finished_) {
    return absl::UnavailableError(
        absl::StrCat("hub ", options_.node, " ends: connect to the coordinator"));
  }
  if (!now_.connected) {
    return absl::UnavailableError(absl::StrCat(
        "hub ", options_.node, " has no stream to the coordinator now: ", now_.why_away));
  }
  return absl::OkStatus();
}

void HubCore::DoHello(const std::shared_ptr<Stream>& stream, const v1::Hello& hello, Todo* todo) {
  DoUpstream(todo);
  if (const absl::Status allowed = CheckHello(hello); !allowed.ok()) {
    CloseStream(stream, allowed, todo);
    return;
  }
  std::shared_ptr<Agent> agent;
  if (const auto it = agents_.find(hello.node()); it != agents_.end()) {
    agent = it->second;
    if (agent->stream != nullptr) {
      CloseStream(agent->stream, absl::AbortedError("another stream of this agent took over"),
                  todo);
    }
    if (!agent->session.Resume(hello)) {
      EndSession(agent, absl::OkStatus(), todo);
      agent = nullptr;
    }
  }
  if (agent == nullptr) {
    if (agents_.size() >= options_.limits.agents) {
      // The agent that has been away longest makes room.
      std::shared_ptr<Agent> oldest;
      for (const auto& [node, other] : agents_) {
        if (other->stream == nullptr && (oldest == nullptr || other->expires < oldest->expires))
          oldest = other;
      }
      if (oldest == nullptr) {
        CloseStream(stream,
                    rpc::ErrorWithReason(
                        absl::StatusCode::kUnavailable,
                        absl::StrCat("hub ", options_.node, " speaks for ", agents_.size(),
                                     " agents and takes no more: connect to the coordinator"),
                        v1::ERROR_REASON_OVERLOADED, /*retryable=*/true),
                    todo);
        return;
      }
      EndSession(oldest, absl::OkStatus(), todo);
    }
    // Not of another process: the incarnation is random.
    agent = std::make_shared<Agent>(
        hello, absl::StrCat(absl::Hex(options_.incarnation), "/", next_session_++));
    agents_[agent->node] = agent;
    agent_count_ = agents_.size();
  }
  stream->agent = agent;
  agent->stream = stream;
  agent->expires = absl::InfiniteFuture();
  agent->session.Welcome(kProtocol, now_.term, now_.cluster_id, now_.lease);
  agent->state_due = true;
  roster_due_ = true;
  Pump(agent, todo);
}

void HubCore::DoOp(const std::shared_ptr<Agent>& agent, const v1::Op& op, Todo* todo) {
  const Limits& limits = options_.limits;
  const size_t bytes = op.ByteSizeLong();
  if (agent->calls.size() >= limits.calls_of_agent || calls_.size() >= limits.calls ||
      agent->held_bytes + bytes > limits.held_bytes_of_agent ||
      held_bytes_ + bytes > limits.held_bytes) {
    if (overloaded_ == nullptr) {
      overloaded_ = std::make_shared<const rpc::Answer>(Overloaded(
          absl::StrCat("hub ", options_.node, " holds ", agent->calls.size(), " requests of ",
                       agent->held_bytes, " bytes for agent ", agent->node, ", and ", calls_.size(),
                       " of ", held_bytes_, " bytes together: nothing was done; try again later")));
    }
    agent->session.outbox().AddResult(op.op_id(), overloaded_);
    return;
  }
  const uint64_t call_id = next_call_++;
  Call& call = calls_[call_id];
  call.agent = agent;
  call.op_id = op.op_id();
  call.bytes = bytes;
  agent->calls.insert(call_id);
  agent->held_bytes += bytes;
  held_bytes_ += bytes;
  size_t expected = 0;
  if (op.has_join()) {
    const v1::Fence& fence = op.join().fence();
    call.join_job = fence.job_id();
    LearnWorker(agent.get(), fence.job_id(), fence.worker_id(), fence.incarnation());
  } else if (op.has_arrive() || op.has_arrive_many()) {
    if (op.has_arrive()) {
      const v1::Fence& fence = op.arrive().fence();
      LearnWorker(agent.get(), fence.job_id(), fence.worker_id(), fence.incarnation());
    }
    LearnArrival(&agent->ranks, op);
    expected = Expected(op);
  }
  todo->submits.emplace_back(call_id, op, expected);
}

absl::Status HubCore::DoBeat(Agent* agent, const v1::Beat& beat) {
  if (beat.hub().agents_size() > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("agent ", agent->node, " is a hub: a hub cannot be behind another hub"));
  }
  const absl::Time now = options_.clock->Now();
  for (const v1::WorkerBeat& worker : beat.workers()) {
    LearnWorker(agent, worker.job_id(), worker.worker_id(), worker.incarnation());
    Agent::Said& said = agent->said[{worker.job_id(), worker.worker_id()}];
    agent->said_bytes -= said.bytes;
    said = {.beat = worker, .at = now, .bytes = worker.ByteSizeLong()};
    agent->said_bytes += said.bytes;
    const bool too_many = agent->said.size() > options_.limits.beats_of_agent;
    if (too_many || agent->said_bytes > options_.limits.beat_bytes_of_agent) {
      agent->said.clear();
      agent->said_bytes = 0;
      return rpc::ErrorWithReason(
          absl::StatusCode::kInvalidArgument,
          absl::StrCat(
              "the beats of agent ", agent->node, " ",
              too_many
                  ? absl::StrCat("are of more than ", options_.limits.beats_of_agent, " workers")
                  : absl::StrCat("have more than ", options_.limits.beat_bytes_of_agent, " bytes"),
              ": a hub takes those of tens of workers"),
          v1::ERROR_REASON_LIMIT);
    }
  }
  return absl::OkStatus();
}

void HubCore::LearnWorker(Agent* agent, const std::string& job_id, const std::string& worker_id,
                          uint64_t incarnation) {
  const Agent::WorkerKey key(job_id, worker_id);
  const auto it = agent->workers.find(key);
  if (it != agent->workers.end()) {
    it->second = incarnation;
  } else if (agent->workers.size() >= options_.limits.workers_of_agent ||
             job_id.size() > kNameBytes || worker_id.size() > kNameBytes) {
    agent->forgot_workers = true;
  } else {
    agent->workers.emplace(key, incarnation);
  }
}

void HubCore::LearnRank(Ranks* ranks, const std::string& job_id, uint64_t generation,
                        int32_t rank) {
  auto it = ranks->find(job_id);
  if (it == ranks->end()) {
    if (ranks->size() >= options_.limits.jobs_of_agent || job_id.size() > kNameBytes) return;
    it = ranks->emplace(job_id, JobRanks()).first;
  }
  JobRanks& job = it->second;
  if (generation < job.generation) return;
  if (generation > job.generation) {
    job.generation = generation;
    job.ranks.clear();
  }
  if (job.ranks.size() < options_.limits.ranks_of_agent) job.ranks.insert(rank);
}

void HubCore::LearnArrival(Ranks* ranks, const v1::Op& op) {
  if (op.has_arrive()) {
    const v1::Fence& fence = op.arrive().fence();
    LearnRank(ranks, fence.job_id(), fence.generation(), op.arrive().rank());
    return;
  }
  const v1::Fence& fence = op.arrive_many().fence();
  for (const int32_t rank : op.arrive_many().ranks())
    LearnRank(ranks, fence.job_id(), fence.generation(), rank);
}

size_t HubCore::Expected(const v1::Op& op) const {
  const v1::Fence& fence = op.has_arrive() ? op.arrive().fence() : op.arrive_many().fence();
  const auto& participants =
      op.has_arrive() ? op.arrive().participants() : op.arrive_many().participants();
  size_t expected = 0;
  const auto count = [&](const Ranks& ranks) {
    const auto it = ranks.find(fence.job_id());
    if (it == ranks.end() || it->second.generation != fence.generation()) return;
    if (participants.empty()) {
      expected += it->second.ranks.size();
      return;
    }
    for (const int32_t rank : it->second.ranks)
      expected += std::binary_search(participants.begin(), participants.end(), rank);
  };
  count(own_);
  for (const auto& [node, agent] : agents_) {
    if (agent->stream != nullptr) count(agent->ranks);
  }
  return expected;
}

void HubCore::Answered(const std::vector<uint64_t>& calls, const v1::OpResult& result) {
  v1::OpResult plain = result;
  plain.clear_op_id();
  const auto answer = std::make_shared<const rpc::Answer>(plain);
  Todo todo;
  {
    MutexLock lock(&mu_);
    if (IsLost(result)) {
      DoUpstream(&todo);
      // This is not the agents' outage: they reach the coordinator without this hub.
      if (!now_.connected)
        EndAll(absl::StrCat("this hub has lost the coordinator: ", now_.why_away),
               /*come_back=*/false, &todo);
    }
    for (const uint64_t call_id : calls) {
      const auto it = calls_.find(call_id);
      if (it == calls_.end()) continue;
      const Call call = std::move(it->second);
      calls_.erase(it);
      const std::shared_ptr<Agent>& agent = call.agent;
      agent->calls.erase(call_id);
      agent->held_bytes -= call.bytes;
      held_bytes_ -= call.bytes;
      if (result.has_join() && !call.join_job.empty()) {
        LearnRank(&agent->ranks, call.join_job, result.join().generation(), result.join().rank());
      }
      agent->session.outbox().AddResult(call.op_id, answer);
      Pump(agent, &todo);
    }
  }
  Run(std::move(todo));
}

void HubCore::Pump(const std::shared_ptr<Agent>& agent, Todo* todo) {
  if (agent->ended) return;
  rpc::Outbox& outbox = agent->session.outbox();
  if (outbox.bytes() > options_.limits.unacknowledged_bytes) {
    MUSTER_LOG(Warning) << "agent '" << agent->node << "' has not acknowledged "
                        << (options_.limits.unacknowledged_bytes >> 20)
                        << " MiB of answers: its session in this hub ends";
    EndSession(agent,
               rpc::ErrorWithReason(
                   absl::StatusCode::kResourceExhausted,
                   "the agent does not acknowledge its frames: its session has ended, connect "
                   "again",
                   v1::ERROR_REASON_OVERLOADED, /*retryable=*/true),
               todo);
    return;
  }
  Stream* const stream = agent->stream.get();
  if (stream == nullptr || stream->writing) return;
  if (std::exchange(agent->state_due, false)) {
    v1::CoordinatorFrame frame;
    frame.mutable_hub_state()->set_coordinator_away(!now_.connected);
    if (!now_.connected) frame.mutable_hub_state()->set_why(now_.why_away);
    outbox.AddFirst(frame);
  }
  if (!outbox.HasWork()) return;
  stream->writing = true;
  todo->writes.emplace_back(stream->link, outbox.Next());
}

void HubCore::OnWritten(const std::shared_ptr<IncomingStream>& link) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    const auto it = streams_.find(link.get());
    if (it == streams_.end()) return;
    const std::shared_ptr<Stream> stream = it->second;
    stream->writing = false;
    if (stream->closed) return;
    if (stream->ended) {
      if (stream->last.has_value()) {
        stream->writing = true;
        todo.writes.emplace_back(link, *std::move(stream->last));
        stream->last.reset();
      } else {
        CloseStream(stream, absl::OkStatus(), &todo);
      }
    } else if (stream->agent != nullptr) {
      const std::shared_ptr<Agent> agent = stream->agent;
      Pump(agent, &todo);
      if (stream->paused && !stream->ended &&
          agent->session.outbox().unsent_bytes() <= options_.limits.unsent_bytes / 2) {
        stream->paused = false;
        todo.reads.push_back(link);
      }
    }
  }
  Run(std::move(todo));
}

void HubCore::OnClosed(const std::shared_ptr<IncomingStream>& link) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    const auto it = streams_.find(link.get());
    if (it == streams_.end()) return;
    const std::shared_ptr<Stream> stream = std::move(it->second);
    streams_.erase(it);
    Detach(stream);
    todo.wake = true;
  }
  Run(std::move(todo));
}

void HubCore::Detach(std::shared_ptr<Stream> stream) {
  const std::shared_ptr<Agent> agent = std::move(stream->agent);
  stream->agent = nullptr;
  stream->ended = true;
  if (agent == nullptr || agent->stream != stream) return;
  agent->stream = nullptr;
  agent->expires = options_.clock->Now() + options_.resume_window;
  roster_due_ = true;
}

void HubCore::CloseStream(std::shared_ptr<Stream> stream, const absl::Status& status, Todo* todo) {
  Detach(stream);
  todo->wake = true;
  if (std::exchange(stream->closed, true)) return;
  todo->closes.emplace_back(stream->link, status);
}

void HubCore::EndSession(std::shared_ptr<Agent> agent, const absl::Status& status, Todo* todo) {
  if (std::exchange(agent->ended, true)) return;
  if (agent->stream != nullptr) CloseStream(agent->stream, status, todo);
  for (const uint64_t call_id : agent->calls) {
    const auto it = calls_.find(call_id);
    if (it->second.upstream_id != 0) todo->forgotten.push_back(it->second.upstream_id);
    todo->dropped.insert(call_id);
    held_bytes_ -= it->second.bytes;
    calls_.erase(it);
  }
  agent->calls.clear();
  agents_.erase(agent->node);
  agent_count_ = agents_.size();
  roster_due_ = true;
}

void HubCore::EndAll(const std::string& reason, bool come_back, Todo* todo) {
  const auto agents = agents_;
  for (const auto& [node, agent] : agents) {
    const std::shared_ptr<Stream> stream = agent->stream;
    if (stream != nullptr) Detach(stream);
    EndSession(agent, absl::OkStatus(), todo);
    if (stream == nullptr) continue;
    v1::CoordinatorFrame goodbye;
    goodbye.mutable_goodbye()->set_reason(reason);
    if (come_back) goodbye.mutable_goodbye()->mutable_retry_after();
    goodbye.mutable_goodbye()->set_final(now_.ended);
    stream->close_by = options_.clock->Now() + options_.goodbye_patience;
    todo->wake = true;
    if (stream->writing) {
      stream->last = Bytes(goodbye);
    } else {
      stream->writing = true;
      todo->writes.emplace_back(stream->link, Bytes(goodbye));
    }
  }
}

void HubCore::Run(Todo todo) {
  for (const uint64_t op_id : todo.forgotten) upstream_->Forget(op_id);
  if (!todo.dropped.empty()) arrivals_.Drop(todo.dropped);
  for (auto& [call_id, op, expected] : todo.submits) Submit(call_id, std::move(op), expected);
  if (todo.stack.has_value() && options_.send_stack) options_.send_stack(*std::move(todo.stack));
  for (auto& [link, frame] : todo.writes) link->Write(std::move(frame));
  for (const auto& link : todo.reads) link->Read();
  for (const auto& [link, status] : todo.closes) link->Close(status);
  if (todo.wake && options_.wake) options_.wake();
}

}  // namespace muster::agent
