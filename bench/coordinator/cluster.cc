#include "bench/coordinator/cluster.h"

#include <grpcpp/alarm.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <deque>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::bench {
namespace {

enum Event : uintptr_t {
  kOpened = 0,
  kRead = 1,
  kWritten = 2,
  kFinished = 3,
  kAgain = 4,
  kEvents = 8
};

grpc::ByteBuffer ToBuffer(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

struct alignas(16) Cluster::Agent {
  int index = 0;
  std::string node;
  uint64_t incarnation = 0;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<grpc::GenericStub> stub;
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
  grpc::ByteBuffer in;
  std::deque<grpc::ByteBuffer> out;
  grpc::ByteBuffer writing_buffer;
  grpc::Status finish_status;
  grpc::Alarm alarm;
  bool open = false;
  bool welcome = false;
  bool writing = false;
  bool reading = false;
  bool finishing = false;
  uint64_t seq = 0;
  uint64_t received = 0;
  std::string session;
  uint64_t generation = 0;
  uint64_t next_request = 1;
  std::vector<int> ranks;
  std::vector<uint64_t> incarnations;
  int frames_left = 0;

  void* Tag(Event event) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(this) + event);
  }
};

Cluster::Cluster(const Options& options) : options_(options) {
  for (int i = 0; i < options.agents; ++i) {
    auto agent = std::make_unique<Agent>();
    agent->index = i;
    agent->node = absl::StrCat("node-", i);
    agent->incarnation = 1'000'000 + i;
    for (int r = 0; r < options.ranks_per_agent; ++r) {
      agent->ranks.push_back(i * options.ranks_per_agent + r);
      agent->incarnations.push_back(0x1234567800000000u + i * 64 + r);
    }
    agents_.push_back(std::move(agent));
  }
}

Cluster::~Cluster() {
  reconnect_ = false;
  for (auto& agent : agents_) {
    if (agent->context != nullptr) agent->context->TryCancel();
  }
  queue_.Shutdown();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

int Cluster::agents() const { return options_.agents; }
int Cluster::ranks() const { return options_.agents * options_.ranks_per_agent; }

void Cluster::Open(Agent& agent) {
  if (agent.channel == nullptr) {
    auto channel = rpc::Connect(options_.address, {.own_connection = true});
    if (!channel.ok()) {
      error_ = channel.status();
      return;
    }
    agent.channel = *std::move(channel);
    agent.stub = std::make_unique<grpc::GenericStub>(agent.channel);
  }
  agent.stream.reset();
  agent.context = std::make_unique<grpc::ClientContext>();
  agent.context->set_wait_for_ready(true);
  agent.stream = agent.stub->PrepareCall(agent.context.get(), "/muster.v1.Session/Attach", &queue_);
  agent.stream->StartCall(agent.Tag(kOpened));
}

void Cluster::Send(Agent& agent, v1::AgentFrame frame) {
  frame.set_ack(agent.received);
  agent.out.push_back(ToBuffer(frame));
  Pump(agent);
}

void Cluster::Pump(Agent& agent) {
  if (!agent.open || agent.writing || agent.out.empty()) return;
  agent.writing = true;
  agent.writing_buffer = std::move(agent.out.front());
  agent.out.pop_front();
  agent.stream->Write(agent.writing_buffer, agent.Tag(kWritten));
}

void Cluster::Received(Agent& agent) {
  v1::CoordinatorFrame frame;
  const grpc::Status parsed =
      grpc::SerializationTraits<v1::CoordinatorFrame>::Deserialize(&agent.in, &frame);
  if (!parsed.ok()) {
    error_ = absl::DataLossError("a frame of the coordinator does not parse");
    return;
  }
  if (frame.seq() != 0) agent.received = frame.seq();
  switch (frame.kind_case()) {
    case v1::CoordinatorFrame::kWelcome:
      if (frame.welcome().session_id() != agent.session) agent.received = 0;
      agent.session = frame.welcome().session_id();
      if (!agent.welcome) {
        agent.welcome = true;
        ++welcome_;
      }
      break;
    case v1::CoordinatorFrame::kResults:
      for (const v1::OpResult& result : frame.results().results()) {
        if (result.has_error() && error_.ok()) error_ = rpc::FromOpError(result.error());
        if (on_result_) on_result_(agent, result);
        --results_wanted_;
      }
      break;
    case v1::CoordinatorFrame::kDirective:
      if (frame.directive().has_generation_ended() && on_ended_) on_ended_(agent);
      break;
    case v1::CoordinatorFrame::kGoodbye:
    case v1::CoordinatorFrame::KIND_NOT_SET:
      break;
  }
}

void Cluster::Restart(Agent& agent) {
  agent.open = false;
  if (agent.welcome) {
    agent.welcome = false;
    --welcome_;
  }
  if (agent.finishing || agent.writing || agent.reading) return;
  agent.finishing = true;
  agent.stream->Finish(&agent.finish_status, agent.Tag(kFinished));
}

bool Cluster::HandleOne(absl::Time deadline) {
  void* tag;
  bool ok;
  if (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(deadline)) != grpc::CompletionQueue::GOT_EVENT)
    return false;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(tag);
  Agent& agent = *reinterpret_cast<Agent*>(bits & ~uintptr_t{kEvents - 1});
  switch (static_cast<Event>(bits & (kEvents - 1))) {
    case kOpened: {
      if (!ok) {
        Restart(agent);
        break;
      }
      agent.open = true;
      v1::AgentFrame hello;
      hello.mutable_hello()->set_protocol_min(1);
      hello.mutable_hello()->set_protocol_max(1);
      hello.mutable_hello()->set_node(agent.node);
      hello.mutable_hello()->set_host(agent.node);
      hello.mutable_hello()->set_agent_incarnation(agent.incarnation);
      hello.mutable_hello()->set_session_id(agent.session);
      hello.mutable_hello()->set_last_received_seq(agent.received);
      agent.out.push_front(ToBuffer(hello));
      Pump(agent);
      agent.reading = true;
      agent.stream->Read(&agent.in, agent.Tag(kRead));
      break;
    }
    case kRead:
      agent.reading = false;
      if (!ok) {
        Restart(agent);
        break;
      }
      Received(agent);
      agent.reading = true;
      agent.stream->Read(&agent.in, agent.Tag(kRead));
      break;
    case kWritten:
      agent.writing = false;
      if (!ok || !agent.open) {
        Restart(agent);
      } else {
        Pump(agent);
      }
      break;
    case kFinished:
      agent.finishing = false;
      if (!reconnect_) {
        if (error_.ok()) {
          error_ = absl::UnavailableError(absl::StrCat(
              "a stream ended: ", agent.finish_status.error_message(), " (", agent.node, ")"));
        }
        break;
      }
      agent.out.clear();
      agent.alarm.Set(&queue_, absl::ToChronoTime(absl::Now() + absl::Milliseconds(20)),
                      agent.Tag(kAgain));
      break;
    case kAgain:
      Open(agent);
      break;
    case kEvents:
      break;
  }
  return true;
}

absl::Status Cluster::RunUntil(const std::function<bool()>& done, absl::Duration timeout,
                               const char* what) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!done()) {
    if (!error_.ok()) return error_;
    if (!HandleOne(deadline))
      return absl::DeadlineExceededError(absl::StrCat(what, " took too long"));
  }
  return error_;
}

absl::Status Cluster::Attach(absl::Duration timeout) {
  for (auto& agent : agents_) Open(*agent);
  return RunUntil([this] { return welcome_ == agents(); }, timeout, "attaching");
}

absl::Status Cluster::Reattach(absl::Duration timeout) {
  reconnect_ = true;
  // None of the streams lives, though not all have been seen to end.
  welcome_ = 0;
  for (auto& agent : agents_) {
    agent->welcome = false;
    agent->session.clear();
    agent->received = 0;
  }
  const absl::Status status =
      RunUntil([this] { return welcome_ == agents(); }, timeout, "attaching again");
  reconnect_ = false;
  return status;
}

absl::Status Cluster::Join(absl::Duration timeout) {
  results_wanted_ = ranks();
  on_result_ = [](Agent& agent, const v1::OpResult& result) {
    agent.generation = result.join().generation();
    agent.ranks[result.op_id() - 1] = result.join().rank();
  };
  for (auto& agent : agents_) {
    v1::AgentFrame frame;
    frame.set_seq(++agent->seq);
    for (int r = 0; r < options_.ranks_per_agent; ++r) {
      v1::Op& op = *frame.mutable_ops()->add_ops();
      op.set_op_id(r + 1);
      v1::JoinRequest& join = *op.mutable_join();
      join.mutable_fence()->set_job_id(options_.job);
      join.mutable_fence()->set_worker_id(absl::StrCat(agent->node, "/", r));
      join.mutable_fence()->set_incarnation(agent->incarnations[r]);
      join.mutable_spec()->set_min_workers(ranks());
      join.mutable_spec()->set_max_workers(ranks());
      join.mutable_spec()->mutable_join_timeout()->set_seconds(600);
      join.mutable_spec()->mutable_lease()->set_seconds(absl::ToInt64Seconds(options_.lease));
      join.mutable_spec()->set_end_generation_on_failure(true);
      join.mutable_topology()->set_host(agent->node);
      join.mutable_topology()->set_local_rank(r);
      join.mutable_topology()->set_local_world_size(options_.ranks_per_agent);
      join.set_endpoint(
          absl::StrCat("10.", agent->index / 250, ".", agent->index % 250, ".1:", 20000 + r));
      join.set_pid(1000 + r);
      join.set_preferred_rank(agent->index * options_.ranks_per_agent + r);
    }
    Send(*agent, std::move(frame));
  }
  return RunUntil([this] { return results_wanted_ <= 0; }, timeout, "the rendezvous");
}

absl::StatusOr<absl::Duration> Cluster::Barrier(const std::string& id, uint64_t counter,
                                                absl::Duration timeout) {
  results_wanted_ = agents();
  on_result_ = nullptr;
  const absl::Time start = absl::Now();
  for (auto& agent : agents_) {
    v1::AgentFrame frame;
    frame.set_seq(++agent->seq);
    v1::Op& op = *frame.mutable_ops()->add_ops();
    op.set_op_id(agent->seq);
    v1::ArriveManyRequest& arrive = *op.mutable_arrive_many();
    arrive.mutable_fence()->set_job_id(options_.job);
    arrive.mutable_fence()->set_generation(agent->generation);
    arrive.mutable_fence()->set_worker_id(agent->node);
    arrive.mutable_fence()->set_incarnation(agent->incarnation);
    arrive.set_barrier_id(id);
    arrive.set_counter(counter);
    for (size_t r = 0; r < agent->ranks.size(); ++r) {
      arrive.add_ranks(agent->ranks[r]);
      arrive.add_incarnations(agent->incarnations[r]);
    }
    arrive.set_step(static_cast<int64_t>(counter));
    arrive.mutable_timeout()->set_seconds(60);
    Send(*agent, std::move(frame));
  }
  const absl::Status status =
      RunUntil([this] { return results_wanted_ <= 0; }, timeout, "a barrier");
  if (!status.ok()) return status;
  return absl::Now() - start;
}

absl::StatusOr<absl::Duration> Cluster::Puts(int frames, int puts, int in_flight, bool durable,
                                             absl::Duration timeout) {
  results_wanted_ = frames * agents();
  // The op's bytes but for its fence's request_id are the same each time: what is measured is the
  // coordinator.
  const auto send = [&](Agent& agent) {
    if (agent.frames_left == 0) return;
    --agent.frames_left;
    v1::AgentFrame frame;
    frame.set_seq(++agent.seq);
    v1::Op& op = *frame.mutable_ops()->add_ops();
    op.set_op_id(agent.seq);
    v1::TxnRequest& txn = *op.mutable_txn();
    txn.mutable_fence()->set_job_id(options_.job);
    txn.mutable_fence()->set_generation(agent.generation);
    txn.mutable_fence()->set_worker_id(absl::StrCat(agent.node, "/0"));
    txn.mutable_fence()->set_incarnation(agent.incarnations[0]);
    for (int i = 0; i < puts; ++i) {
      v1::PutOp& put = *txn.add_then()->mutable_put();
      put.set_key(absl::StrCat("bench/", agent.index, "/", (agent.frames_left * puts + i) % 4096));
      put.set_value("0123456789abcdef0123456789abcdef");
      put.set_klass(durable ? v1::KV_CLASS_DURABLE : v1::KV_CLASS_EPHEMERAL);
    }
    Send(agent, std::move(frame));
  };
  on_result_ = [&](Agent& agent, const v1::OpResult&) { send(agent); };
  const absl::Time start = absl::Now();
  for (auto& agent : agents_) {
    agent->frames_left = frames;
    for (int i = 0; i < in_flight; ++i) send(*agent);
  }
  const absl::Status status = RunUntil([this] { return results_wanted_ <= 0; }, timeout, "puts");
  on_result_ = nullptr;
  if (!status.ok()) return status;
  return absl::Now() - start;
}

absl::StatusOr<std::vector<absl::Duration>> Cluster::ReportKill(absl::Time killed,
                                                                absl::Duration timeout) {
  std::vector<absl::Duration> told;
  results_wanted_ = 1;
  told_wanted_ = agents();
  on_result_ = nullptr;
  on_ended_ = [&](Agent&) {
    told.push_back(absl::Now() - killed);
    --told_wanted_;
  };
  Agent& agent = *agents_[0];
  v1::AgentFrame frame;
  frame.set_seq(++agent.seq);
  v1::Op& op = *frame.mutable_ops()->add_ops();
  op.set_op_id(1);
  v1::ReportExitRequest& report = *op.mutable_report_exit();
  report.mutable_fence()->set_job_id(options_.job);
  report.mutable_fence()->set_generation(agent.generation);
  report.mutable_fence()->set_worker_id(agent.node);
  report.mutable_fence()->set_incarnation(agent.incarnation);
  report.set_worker_id(absl::StrCat(agent.node, "/0"));
  report.set_incarnation(agent.incarnations[0]);
  report.mutable_cause()->set_signal(9);
  report.mutable_cause()->set_message("killed by signal 9");
  Send(agent, std::move(frame));
  const absl::Status status = RunUntil([this] { return results_wanted_ <= 0 && told_wanted_ <= 0; },
                                       timeout, "telling of the kill");
  on_ended_ = nullptr;
  // The next attempt needs a new process in that seat.
  agent.incarnations[0] += 0x100000;
  if (!status.ok()) return status;
  return told;
}

absl::Status Cluster::Beat(absl::Duration period, absl::Duration total) {
  const absl::Time start = absl::Now();
  const absl::Duration gap = period / agents();
  int64_t sent = 0;
  while (absl::Now() < start + total) {
    while (start + gap * sent <= absl::Now()) {
      Agent& agent = *agents_[sent % agents()];
      v1::AgentFrame frame;
      for (size_t r = 0; r < agent.ranks.size(); ++r) {
        v1::WorkerBeat& beat = *frame.mutable_beat()->add_workers();
        beat.set_job_id(options_.job);
        beat.set_worker_id(absl::StrCat(agent.node, "/", r));
        beat.set_incarnation(agent.incarnations[r]);
        beat.set_step(sent / agents());
        beat.set_process_state("running");
      }
      Send(agent, std::move(frame));
      ++sent;
    }
    if (!error_.ok()) return error_;
    HandleOne(start + gap * sent);
  }
  return error_;
}

}  // namespace muster::bench
