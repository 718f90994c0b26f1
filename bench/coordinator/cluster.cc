#include "bench/coordinator/cluster.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/address.h"
#include "rpc/status.h"

namespace muster::bench {
namespace {

constexpr size_t kPrefix = 5;  // of a gRPC message: a flag and the length
constexpr uint32_t kWindow = 4 << 20;
constexpr absl::Duration kReopen = absl::Milliseconds(20);

uint32_t LengthOf(const char* prefix) {
  uint32_t length;
  std::memcpy(&length, prefix + 1, sizeof(length));
  return ntohl(length);
}

nghttp2_nv Header(absl::string_view name, absl::string_view value) {
  return {reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
          reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())), name.size(), value.size(),
          NGHTTP2_NV_FLAG_NONE};
}

}  // namespace

struct Cluster::Agent {
  ~Agent() { Disconnect(); }
  void Disconnect() {
    nghttp2_session_del(h2);
    h2 = nullptr;
    if (fd >= 0) close(fd);
    fd = -1;
    open = false;
    ended = false;
    out.clear();
    taken = 0;
    wire.clear();
    in.clear();
    wrong.clear();
  }

  Cluster* cluster = nullptr;
  int index = 0;
  int first_node = 0;  // of those it speaks for, itself
  int nodes = 1;
  std::string node;
  uint64_t incarnation = 0;

  int fd = -1;
  nghttp2_session* h2 = nullptr;  // its user data is this
  int32_t stream = -1;
  bool open = false;   // connected, and the stream begun
  bool ended = false;  // the stream was closed by the server
  std::string out;     // messages with their prefixes, for nghttp2 to take from `taken` on
  size_t taken = 0;
  std::string wire;   // what the socket has not taken
  std::string in;     // the beginning of a message
  std::string wrong;  // the server's grpc-message

  bool welcome = false;
  uint64_t seq = 0;
  uint64_t received = 0;
  std::string session;
  uint64_t generation = 0;
  // The workers of its nodes, one node after the other.
  std::vector<std::string> workers;
  std::vector<int> ranks;
  std::vector<uint64_t> incarnations;
  int frames_left = 0;
};

// The callbacks of nghttp2.
struct Cluster::Callbacks {
  static ssize_t Take(nghttp2_session*, int32_t, uint8_t* to, size_t size, uint32_t*,
                      nghttp2_data_source*, void* user) {
    Agent& agent = *static_cast<Agent*>(user);
    const size_t n = std::min(size, agent.out.size() - agent.taken);
    if (n == 0) return NGHTTP2_ERR_DEFERRED;
    std::memcpy(to, agent.out.data() + agent.taken, n);
    agent.taken += n;
    if (agent.taken == agent.out.size()) {
      agent.out.clear();
      agent.taken = 0;
    }
    return static_cast<ssize_t>(n);
  }
  static int OnData(nghttp2_session*, uint8_t, int32_t, const uint8_t* data, size_t size,
                    void* user) {
    Agent& agent = *static_cast<Agent*>(user);
    const char* bytes = reinterpret_cast<const char*>(data);
    const bool kept = !agent.in.empty();
    if (kept) {
      agent.in.append(bytes, size);
      bytes = agent.in.data();
      size = agent.in.size();
    }
    size_t at = 0;
    while (size - at >= kPrefix && size - at >= kPrefix + LengthOf(bytes + at)) {
      const size_t length = LengthOf(bytes + at);
      agent.cluster->Received(agent, bytes + at + kPrefix, length);
      at += kPrefix + length;
    }
    if (kept) {
      agent.in.erase(0, at);
    } else {
      agent.in.assign(bytes + at, size - at);
    }
    return 0;
  }
  static int OnHeader(nghttp2_session*, const nghttp2_frame*, const uint8_t* name, size_t name_size,
                      const uint8_t* value, size_t value_size, uint8_t, void* user) {
    if (absl::string_view(reinterpret_cast<const char*>(name), name_size) == "grpc-message")
      static_cast<Agent*>(user)->wrong.assign(reinterpret_cast<const char*>(value), value_size);
    return 0;
  }
  static int OnClose(nghttp2_session*, int32_t, uint32_t, void* user) {
    static_cast<Agent*>(user)->ended = true;
    return 0;
  }
  static const nghttp2_session_callbacks* Get() {
    static nghttp2_session_callbacks* const callbacks = [] {
      nghttp2_session_callbacks* made = nullptr;
      MUSTER_CHECK(nghttp2_session_callbacks_new(&made) == 0);
      nghttp2_session_callbacks_set_on_data_chunk_recv_callback(made, OnData);
      nghttp2_session_callbacks_set_on_header_callback(made, OnHeader);
      nghttp2_session_callbacks_set_on_stream_close_callback(made, OnClose);
      return made;
    }();
    return callbacks;
  }
};

Cluster::Cluster(const Options& options)
    : options_(options),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      frame_(std::make_unique<v1::CoordinatorFrame>()) {
  int node = 0;
  for (int i = 0; i < streams(); ++i) {
    auto agent = std::make_unique<Agent>();
    agent->cluster = this;
    agent->index = i;
    agent->first_node = node;
    agent->nodes = i < options.hubs ? options.agents_per_hub : 1;
    agent->node = absl::StrCat("node-", node);
    agent->incarnation = 1'000'000 + i;
    for (const int end = node + agent->nodes; node < end; ++node) {
      for (int r = 0; r < options.ranks_per_agent; ++r) {
        agent->workers.push_back(absl::StrCat("node-", node, "/", r));
        agent->ranks.push_back(node * options.ranks_per_agent + r);
        agent->incarnations.push_back(0x1234567800000000u + node * 64 + r);
      }
    }
    agents_.push_back(std::move(agent));
  }
}

Cluster::~Cluster() {
  agents_.clear();
  close(epoll_);
}

int Cluster::streams() const { return options_.hubs + options_.agents; }
int Cluster::ranks() const {
  return (options_.hubs * options_.agents_per_hub + options_.agents) * options_.ranks_per_agent;
}

void Cluster::Watch(Agent& agent, bool writable) {
  epoll_event event{};
  event.events = EPOLLIN | (writable ? EPOLLOUT : 0u);
  event.data.ptr = &agent;
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, agent.fd, &event) != 0)
    epoll_ctl(epoll_, EPOLL_CTL_ADD, agent.fd, &event);
}

void Cluster::Open(Agent& agent) {
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(options_.address);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  if (!address.ok() || inet_pton(AF_INET, address->host.c_str(), &to.sin_addr) != 1) {
    error_ = absl::InvalidArgumentError(
        absl::StrCat("'", options_.address, "' is no IPv4 address with a port"));
    return;
  }
  to.sin_port = htons(static_cast<uint16_t>(address->port));
  agent.Disconnect();
  agent.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (agent.fd < 0) {
    error_ = absl::ErrnoToStatus(errno, "a socket");
    return;
  }
  const int on = 1;
  setsockopt(agent.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (connect(agent.fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0 &&
      errno != EINPROGRESS) {
    Ended(agent, std::strerror(errno));
    return;
  }
  Watch(agent, /*writable=*/true);
}

void Cluster::Connected(Agent& agent) {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(agent.fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) {
    Ended(agent, std::strerror(error));
    return;
  }
  Watch(agent, /*writable=*/false);
  MUSTER_CHECK(nghttp2_session_client_new(&agent.h2, Callbacks::Get(), &agent) == 0);
  const nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
                                             {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kWindow}};
  nghttp2_submit_settings(agent.h2, NGHTTP2_FLAG_NONE, settings, std::size(settings));
  nghttp2_session_set_local_window_size(agent.h2, NGHTTP2_FLAG_NONE, 0, kWindow);
  const nghttp2_nv headers[] = {Header(":method", "POST"),
                                Header(":scheme", "http"),
                                Header(":path", "/muster.v1.Session/Attach"),
                                Header(":authority", options_.address),
                                Header("te", "trailers"),
                                Header("content-type", "application/grpc")};
  nghttp2_data_provider provider{};
  provider.read_callback = Callbacks::Take;
  v1::AgentFrame frame;
  v1::Hello& hello = *frame.mutable_hello();
  hello.set_protocol_min(1);
  hello.set_protocol_max(1);
  hello.set_node(agent.node);
  hello.set_host(agent.node);
  hello.set_agent_incarnation(agent.incarnation);
  hello.set_session_id(agent.session);
  hello.set_last_received_seq(agent.received);
  Send(agent, frame);  // goes out with the request
  agent.stream =
      nghttp2_submit_request(agent.h2, nullptr, headers, std::size(headers), &provider, nullptr);
  agent.open = true;
  Write(agent);
}

void Cluster::Send(Agent& agent, v1::AgentFrame& frame) {
  frame.set_ack(agent.received);
  const size_t size = frame.ByteSizeLong(), at = agent.out.size();
  agent.out.resize(at + kPrefix + size);
  const uint32_t length = htonl(static_cast<uint32_t>(size));
  agent.out[at] = 0;
  std::memcpy(&agent.out[at + 1], &length, sizeof(length));
  frame.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(&agent.out[at + kPrefix]));
  if (agent.open && !reading_) Write(agent);
}

void Cluster::Write(Agent& agent) {
  if (!agent.out.empty()) nghttp2_session_resume_data(agent.h2, agent.stream);
  const bool waiting = !agent.wire.empty();  // for epoll
  const uint8_t* bytes = nullptr;
  for (ssize_t n; (n = nghttp2_session_mem_send(agent.h2, &bytes)) > 0;)
    agent.wire.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(n));
  if (agent.wire.empty()) return;
  const ssize_t sent = send(agent.fd, agent.wire.data(), agent.wire.size(), MSG_NOSIGNAL);
  // A broken connection is noticed when it is read.
  if (sent > 0) agent.wire.erase(0, static_cast<size_t>(sent));
  if (agent.wire.empty() == waiting) Watch(agent, !agent.wire.empty());
}

void Cluster::Readable(Agent& agent) {
  static char buffer[256 << 10];
  const ssize_t n = recv(agent.fd, buffer, sizeof(buffer), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    Ended(agent, n == 0 ? "the connection was closed" : std::strerror(errno));
    return;
  }
  reading_ = true;
  const ssize_t read = nghttp2_session_mem_recv(agent.h2, reinterpret_cast<uint8_t*>(buffer),
                                                static_cast<size_t>(n));
  reading_ = false;
  if (read < 0) {
    Ended(agent, nghttp2_strerror(static_cast<int>(read)));
  } else if (agent.ended) {
    Ended(agent, agent.wrong);
  } else if (!agent.out.empty() || nghttp2_session_want_write(agent.h2)) {
    Write(agent);
  }
}

void Cluster::SendRoster(Agent& agent) {
  v1::AgentFrame frame;
  for (int node = agent.first_node + 1; node < agent.first_node + agent.nodes; ++node) {
    v1::HubAgent& one = *frame.mutable_beat()->mutable_hub()->add_agents();
    one.set_node(absl::StrCat("node-", node));
    one.set_host(one.node());
  }
  Send(agent, frame);
}

void Cluster::Received(Agent& agent, const char* bytes, size_t size) {
  v1::CoordinatorFrame& frame = *frame_;
  if (!frame.ParseFromArray(bytes, static_cast<int>(size))) {
    error_ = absl::DataLossError("a frame of the coordinator does not parse");
    return;
  }
  if (frame.seq() != 0) agent.received = frame.seq();
  switch (frame.kind_case()) {
    case v1::CoordinatorFrame::kWelcome:
      if (frame.welcome().session_id() != agent.session) agent.received = agent.seq = 0;
      agent.session = frame.welcome().session_id();
      if (!agent.welcome) {
        agent.welcome = true;
        ++welcome_;
      }
      if (agent.nodes > 1) SendRoster(agent);
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
    case v1::CoordinatorFrame::kHubState:
    case v1::CoordinatorFrame::KIND_NOT_SET:
      break;
  }
}

void Cluster::Ended(Agent& agent, const std::string& why) {
  if (agent.welcome) {
    agent.welcome = false;
    --welcome_;
  }
  if (reconnect_) {
    reopen_.emplace_back(absl::Now() + kReopen, &agent);
  } else if (error_.ok()) {
    error_ = absl::UnavailableError(absl::StrCat("a stream ended: ", why, " (", agent.node, ")"));
  }
  agent.Disconnect();
}

bool Cluster::HandleSome(absl::Time deadline) {
  while (!reopen_.empty() && reopen_.front().first <= absl::Now()) {
    Agent& agent = *reopen_.front().second;
    reopen_.pop_front();
    Open(agent);
  }
  const absl::Time until = reopen_.empty() ? deadline : std::min(deadline, reopen_.front().first);
  const int64_t wait =
      absl::ToInt64Milliseconds(absl::Ceil(until - absl::Now(), absl::Milliseconds(1)));
  epoll_event events[256];
  const int n = epoll_wait(epoll_, events, std::size(events),
                           static_cast<int>(std::clamp<int64_t>(wait, 0, 1000)));
  for (int i = 0; i < n; ++i) {
    Agent& agent = *static_cast<Agent*>(events[i].data.ptr);
    if (agent.fd < 0) continue;  // ended while another event was handled
    if (!agent.open) {
      Connected(agent);
      continue;
    }
    if ((events[i].events & EPOLLOUT) != 0) Write(agent);
    if ((events[i].events & ~EPOLLOUT) != 0) Readable(agent);
  }
  return n > 0 || absl::Now() < deadline;
}

absl::Status Cluster::RunUntil(const std::function<bool()>& done, absl::Duration timeout,
                               const char* what) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!done()) {
    if (!error_.ok()) return error_;
    if (!HandleSome(deadline))
      return absl::DeadlineExceededError(absl::StrCat(what, " took too long"));
  }
  return error_;
}

absl::Status Cluster::Attach(absl::Duration timeout) {
  for (auto& agent : agents_) Open(*agent);
  return RunUntil([this] { return welcome_ == streams(); }, timeout, "attaching");
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
      RunUntil([this] { return welcome_ == streams(); }, timeout, "attaching again");
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
    for (size_t i = 0; i < agent->workers.size(); ++i) {
      const int node = agent->first_node + static_cast<int>(i) / options_.ranks_per_agent;
      const int r = static_cast<int>(i) % options_.ranks_per_agent;
      v1::Op& op = *frame.mutable_ops()->add_ops();
      op.set_op_id(i + 1);
      v1::JoinRequest& join = *op.mutable_join();
      join.mutable_fence()->set_job_id(options_.job);
      join.mutable_fence()->set_worker_id(agent->workers[i]);
      join.mutable_fence()->set_incarnation(agent->incarnations[i]);
      join.mutable_spec()->set_min_workers(ranks());
      join.mutable_spec()->set_max_workers(ranks());
      join.mutable_spec()->mutable_join_timeout()->set_seconds(600);
      join.mutable_spec()->mutable_lease()->set_seconds(absl::ToInt64Seconds(options_.lease));
      join.mutable_spec()->set_end_generation_on_failure(true);
      join.mutable_topology()->set_host(absl::StrCat("node-", node));
      join.mutable_topology()->set_local_rank(r);
      join.mutable_topology()->set_local_world_size(options_.ranks_per_agent);
      join.set_endpoint(absl::StrCat("10.", node / 250, ".", node % 250, ".1:", 20000 + r));
      join.set_pid(1000 + r);
      join.set_preferred_rank(node * options_.ranks_per_agent + r);
    }
    Send(*agent, frame);
  }
  return RunUntil([this] { return results_wanted_ <= 0; }, timeout, "the rendezvous");
}

absl::StatusOr<absl::Duration> Cluster::Barrier(const std::string& id, uint64_t counter,
                                                absl::Duration timeout) {
  results_wanted_ = streams();
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
      if (agent->nodes > 1) arrive.add_lateness_us(static_cast<int>(r));
    }
    arrive.set_step(static_cast<int64_t>(counter));
    arrive.mutable_timeout()->set_seconds(60);
    Send(*agent, frame);
  }
  const absl::Status status =
      RunUntil([this] { return results_wanted_ <= 0; }, timeout, "a barrier");
  if (!status.ok()) return status;
  return absl::Now() - start;
}

absl::StatusOr<absl::Duration> Cluster::Puts(int frames, int puts, int in_flight, bool durable,
                                             absl::Duration timeout) {
  results_wanted_ = frames * streams();
  // The op's bytes but for its fence's request_id are the same each time: the benchmark measures
  // the coordinator.
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
    Send(agent, frame);
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
  told_wanted_ = streams();
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
  Send(agent, frame);
  const absl::Status status = RunUntil([this] { return results_wanted_ <= 0 && told_wanted_ <= 0; },
                                       timeout, "telling of the kill");
  on_ended_ = nullptr;
  // The next round of the benchmark needs a new process in that seat.
  agent.incarnations[0] += 0x100000;
  if (!status.ok()) return status;
  return told;
}

absl::Status Cluster::Beat(absl::Duration period, absl::Duration total) {
  const absl::Time start = absl::Now();
  struct One {
    Agent* agent;
    int part;
  };
  std::vector<One> beats;  // of one period
  for (const int part : {0, 1}) {
    for (const auto& agent : agents_)
      if (agent->nodes > 1 || agent->index % 2 == part) beats.push_back({agent.get(), part});
  }
  const absl::Duration gap = period / static_cast<int64_t>(beats.size());
  int64_t sent = 0;
  while (absl::Now() < start + total) {
    while (start + gap * sent <= absl::Now()) {
      const auto [agent, part] = beats[static_cast<size_t>(sent) % beats.size()];
      v1::AgentFrame frame;
      for (size_t r = 0; r < agent->ranks.size(); ++r) {
        const int node = static_cast<int>(r) / options_.ranks_per_agent;
        if (agent->nodes > 1 && node % 2 != part) continue;
        v1::WorkerBeat& beat = *frame.mutable_beat()->add_workers();
        beat.set_job_id(options_.job);
        beat.set_worker_id(agent->workers[r]);
        beat.set_incarnation(agent->incarnations[r]);
        beat.set_step(sent / static_cast<int64_t>(beats.size()));
        beat.set_process_state("running");
      }
      Send(*agent, frame);
      ++sent;
    }
    if (!error_.ok()) return error_;
    HandleSome(start + gap * sent);
  }
  return error_;
}

}  // namespace muster::bench
