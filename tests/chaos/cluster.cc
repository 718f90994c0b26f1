#include "tests/chaos/cluster.h"

#include <grpcpp/client_context.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/test_folder.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/chaos/weights.h"

namespace muster::chaos {
namespace {

constexpr char kJob[] = "chaos";
constexpr size_t kMaxStarts = 8;

std::string MakeFolder(const std::string& name) {
  std::string dir = TestPath(absl::StrCat(name, "-", RandomHex().substr(0, 6)));
  MUSTER_CHECK(MakeDirectories(dir).ok()) << dir;
  return dir;
}

// Returns the names in "a=kill@3,b=stop".
std::vector<std::string> NamesIn(const std::string& failpoints) {
  std::vector<std::string> names;
  for (const absl::string_view part : absl::StrSplit(failpoints, ',', absl::SkipEmpty())) {
    names.emplace_back(part.substr(0, part.find('=')));
  }
  return names;
}

std::string At(const std::vector<std::string>& list, size_t index) {
  return index < list.size() ? list[index] : "";
}

bool OfWorker(const std::string& failpoints) { return absl::StartsWith(failpoints, "worker."); }

std::string FiresText(const std::string& name) {
  return absl::StrCat("failpoint ", name, " fires");
}

}  // namespace

Cluster::Cluster(Plan plan)
    : plan_(std::move(plan)),
      dir_(MakeFolder(plan_.name)),
      data_dir_(plan_.data_dir.empty() ? absl::StrCat(dir_, "/data") : plan_.data_dir),
      socket_dir_(absl::StrCat("/tmp/muster-chaos-", RandomHex().substr(0, 8))),
      port_(PickPort()),
      address_(absl::StrCat("127.0.0.1:", port_)),
      workers_(plan_.agents == 0 ? plan_.workers : 0),
      agents_(plan_.agents),
      hubs_(plan_.hubs),
      sent_(plan_.signals.size()),
      host_(*agent::ProcessHost::Start()) {}

Cluster::~Cluster() {
  watcher_.reset();
  host_.reset();
  (void)RemoveTree(socket_dir_);
  if (wrong_.empty()) (void)RemoveTree(dir_);
}

void Cluster::StartCoordinator() {
  std::map<std::string, std::string> env = plan_.coordinator_env;
  const std::string failpoints = At(plan_.coordinator_failpoints, coordinators_.size());
  if (!failpoints.empty()) env["MUSTER_FAILPOINTS"] = failpoints;
  std::vector<std::string> argv = plan_.coordinator_prefix;
  argv.insert(argv.end(),
              {ProgramPath("coordinator/cmd/muster-coordinator"), "--insecure", "--listen",
               address_, "--data_dir", data_dir_, "--snapshot_records", "25"});
  argv.insert(argv.end(), plan_.coordinator_flags.begin(), plan_.coordinator_flags.end());
  const auto changed = [this] {
    MutexLock lock(&mu_);
    ++changes_;
    changed_.SignalAll();
  };
  coordinators_.push_back(std::make_unique<Child>(*host_, std::move(argv), env, changed));
}

void Cluster::StartWorker(int index) {
  std::vector<std::unique_ptr<Child>>& starts = workers_[index];
  std::map<std::string, std::string> env = plan_.worker_env;
  if (const auto it = plan_.worker_failpoints.find(index); it != plan_.worker_failpoints.end()) {
    const std::string failpoints = At(it->second, starts.size());
    if (!failpoints.empty()) env["MUSTER_FAILPOINTS"] = failpoints;
  }
  const auto changed = [this] {
    MutexLock lock(&mu_);
    ++changes_;
    changed_.SignalAll();
  };
  starts.push_back(std::make_unique<Child>(
      *host_,
      std::vector<std::string>{
          ProgramPath("tests/chaos/chaos_worker"), "--address", address_, "--dir", dir_, "--index",
          absl::StrCat(index), "--world", absl::StrCat(plan_.workers), "--rounds",
          absl::StrCat(plan_.rounds), "--lease", absl::StrCat(absl::ToDoubleSeconds(plan_.lease)),
          "--outage_tolerance", absl::StrCat(absl::ToDoubleSeconds(plan_.outage_tolerance)),
          "--watch", plan_.workers_watch ? address_ : ""},
      env, changed));
}

void Cluster::StartAgent(int index) {
  std::vector<std::unique_ptr<Child>>& starts = agents_[index];
  std::map<std::string, std::string> env = {
      {"PATH", "/usr/bin:/bin"}, {"HOME", dir_},
      {"TMPDIR", socket_dir_},   {"CUDA_VISIBLE_DEVICES", ""},
      {"OMP_NUM_THREADS", "1"},  {"MUSTER_PROJECT_DIR", dir_ + "/run"}};
  for (const auto* map : {&plan_.agent_failpoints, &plan_.worker_failpoints}) {
    const auto it = map->find(index);
    const std::string failpoints = it == map->end() ? "" : At(it->second, starts.size());
    if (failpoints.empty()) continue;
    env["MUSTER_FAILPOINTS"] = failpoints;
    // Workers inherit the variable, and so do their replacements.
    if (OfWorker(failpoints)) {
      env["MUSTER_FAILPOINTS_ONCE"] = absl::StrCat(dir_, "/fired", index, ".", starts.size());
    }
  }
  for (const auto& [name, value] : plan_.worker_env) env[name] = value;
  const auto changed = [this] {
    MutexLock lock(&mu_);
    ++changes_;
    changed_.SignalAll();
  };
  std::vector<std::string> argv = {ProgramPath("agent/cmd/muster-agent"),
                                   "--coordinator",
                                   address_,
                                   "--job_name",
                                   kJob,
                                   "--cpu",
                                   "--num_machines",
                                   absl::StrCat(plan_.agents),
                                   "--num_processes",
                                   absl::StrCat(plan_.workers),
                                   "--machine_rank",
                                   absl::StrCat(index),
                                   "--max_restarts",
                                   "5",
                                   "--stop_grace",
                                   "2s"};
  if (plan_.first_agent_is_hub && index == 0) {
    argv.insert(argv.end(), {"--hub_listen", "127.0.0.1:0"});
  }
  argv.push_back("--");
  if (plan_.trains) {
    argv.insert(argv.end(), {ProgramPath("tests/chaos/training"), absl::StrCat(plan_.rounds)});
  } else {
    argv.insert(argv.end(), {ProgramPath("tests/chaos/chaos_worker"), "--dir", dir_, "--rounds",
                             absl::StrCat(plan_.rounds), "--lease",
                             absl::StrCat(absl::ToDoubleSeconds(plan_.lease)), "--watch",
                             plan_.workers_watch ? address_ : ""});
  }
  starts.push_back(std::make_unique<Child>(*host_, std::move(argv), env, changed));
}

void Cluster::StartHub(int index) {
  const auto changed = [this] {
    MutexLock lock(&mu_);
    ++changes_;
    changed_.SignalAll();
  };
  hubs_[index].push_back(std::make_unique<Child>(
      *host_,
      std::vector<std::string>{ProgramPath("agent/cmd/muster-agent"),
                               "--coordinator",
                               address_,
                               "--job_name",
                               absl::StrCat("hub", index),
                               "--cpu",
                               "--num_machines",
                               "1",
                               "--num_processes",
                               "1",
                               "--machine_rank",
                               "0",
                               "--hub_listen",
                               "127.0.0.1:0",
                               "--stop_grace",
                               "2s",
                               "--",
                               "/usr/bin/tail",
                               "-f",
                               "/dev/null"},
      std::map<std::string, std::string>{{"PATH", "/usr/bin:/bin"},
                                         {"HOME", dir_},
                                         {"TMPDIR", socket_dir_},
                                         {"CUDA_VISIBLE_DEVICES", ""},
                                         {"MUSTER_PROJECT_DIR", absl::StrCat(dir_, "/hub", index)}},
      changed));
}

const Child& Cluster::Speaker(int worker, std::string* prefix) const {
  *prefix = plan_.agents == 0 ? "" : absl::StrCat("[", worker, "]: ");
  if (plan_.agents == 0) return *workers_[worker].back();
  const auto& starts = agents_[AgentOf(worker)];
  // A start that found the job at its end ran no worker: the start before it did.
  const bool ran_none = starts.back()->Says("the job has already succeeded on all machines");
  return starts.size() > 1 && ran_none ? *starts[starts.size() - 2] : *starts.back();
}

std::string Cluster::SaidByFirst(const std::string& prefix) const {
  std::string start;
  const Child& speaker = Speaker(0, &start);
  return speaker.Newest(start + prefix).value_or("");
}

std::optional<pid_t> Cluster::PidOf(int target) const {
  if (target == kCoordinator) return coordinators_.back()->pid();
  if (target <= TargetOfHub(0)) return hubs_[TargetOfHub(0) - target].back()->pid();
  if (target < 0) return agents_[-2 - target].back()->pid();
  std::string prefix;
  const Child& speaker = Speaker(target, &prefix);
  if (plan_.agents == 0) return speaker.pid();
  pid_t pid = 0;
  if (!absl::SimpleAtoi(speaker.Newest(prefix + "pid ").value_or(""), &pid)) return std::nullopt;
  return pid;
}

bool Cluster::AllEnded() const {
  const auto well = [](const auto& starts) { return starts.back()->ended() == 0; };
  // An agent that dies when another has ended well dies after the job.
  const bool agents = std::any_of(agents_.begin(), agents_.end(), well) &&
                      std::all_of(agents_.begin(), agents_.end(), [](const auto& starts) {
                        return starts.back()->ended().has_value();
                      });
  return (agents_.empty() || agents) && std::all_of(workers_.begin(), workers_.end(), well);
}

void Cluster::WaitForChange(absl::Time deadline) {
  if (!to_continue_.empty()) deadline = std::min(deadline, to_continue_.begin()->first);
  if (coordinator_due_ > Clock::Real().Now()) deadline = std::min(deadline, coordinator_due_);
  MutexLock lock(&mu_);
  while (changes_ == seen_changes_) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return;
    changed_.WaitWithTimeout(&mu_, left);
  }
  seen_changes_ = changes_;
}

void Cluster::SendDueSignals() {
  for (size_t i = 0; i < plan_.signals.size(); ++i) {
    const SignalAt& signal = plan_.signals[i];
    if (sent_[i]) continue;
    std::string said;
    const Child& speaker = Speaker(signal.worker, &said);
    absl::StrAppend(&said, "round ", signal.round);
    if (!speaker.Says(said)) continue;
    const auto first = agents_.begin() + (plan_.first_agent_is_hub ? 1 : 0);
    if (!signal.once_agents_say.empty() &&
        !std::all_of(first, agents_.end(), [&](const auto& starts) {
          return starts.back()->Says(signal.once_agents_say);
        })) {
      continue;
    }
    const std::optional<pid_t> target = PidOf(signal.target);
    if (!target.has_value()) continue;
    sent_[i] = true;
    if (signal.action) signal.action();
    if (signal.signal == 0) continue;
    kill(*target, signal.signal);
    if (signal.signal == SIGSTOP) {
      to_continue_.emplace(Clock::Real().Now() + signal.stopped_for, *target);
    }
  }
}

void Cluster::ContinueStopped() {
  // Continues the processes that a failpoint has stopped, once their lease is over.
  const auto look = [&](const Child& child, const std::string& failpoints) {
    if (!absl::StrContains(failpoints, "=stop") || stop_seen_[child.pid()]) return;
    for (const std::string& name : NamesIn(failpoints)) {
      if (!child.Says(FiresText(name))) continue;
      stop_seen_[child.pid()] = true;
      to_continue_.emplace(Clock::Real().Now() + plan_.lease * 1.5, child.pid());
    }
  };
  for (size_t i = 0; i < coordinators_.size(); ++i) {
    look(*coordinators_[i], At(plan_.coordinator_failpoints, i));
  }
  if (plan_.agents == 0) {
    for (const auto& [index, list] : plan_.worker_failpoints) {
      for (size_t i = 0; i < workers_[index].size(); ++i) look(*workers_[index][i], At(list, i));
    }
  }
  for (const auto& [index, list] : plan_.agent_failpoints) {
    for (size_t i = 0; i < agents_[index].size(); ++i) look(*agents_[index][i], At(list, i));
  }
  while (!to_continue_.empty() && to_continue_.begin()->first <= Clock::Real().Now()) {
    kill(to_continue_.begin()->second, SIGCONT);
    to_continue_.erase(to_continue_.begin());
  }
}

bool Cluster::RestartWhatEnded() {
  return RestartCoordinator() &&
         (plan_.agents == 0 ? RestartWorkers() : RestartAgents() && RestartHubs());
}

bool Cluster::RestartCoordinator() {
  Child& coordinator = *coordinators_.back();
  const std::string failpoints = At(plan_.coordinator_failpoints, coordinators_.size() - 1);
  if (const std::optional<int> code = coordinator.ended()) {
    const bool refused_port = *code == 3 && coordinator.Says("another process has the port");
    const bool meant = *code < 0 || *code == 0 || (thief_ != nullptr && refused_port) ||
                       (absl::StrContains(failpoints, "=error") && coordinator.Says("failpoint "));
    if (!meant || coordinators_.size() >= kMaxStarts) {
      Wrong(absl::StrCat("the coordinator ended with ", *code));
      return false;
    }
    const auto said = [&] {
      size_t count = 0;
      for (const auto& starts : agents_) count += starts.back()->Count(plan_.said_in_outage);
      return count;
    };
    if (coordinator_due_ == absl::InfinitePast()) {
      coordinator_due_ = Clock::Real().Now() + plan_.outage;
    }
    if (coordinator_due_ > Clock::Real().Now()) return true;
    // On a busy machine the workers may have said it before the coordinator's end was seen here.
    if (!plan_.said_in_outage.empty() && said() == 0 && !AllEnded()) return true;
    coordinator_due_ = absl::InfinitePast();
    if (plan_.port_is_stolen && coordinators_.size() == 1) {
      thief_ = std::make_unique<rpc::TestListener>(port_);
    }
    if (refused_port) thief_.reset();
    if (plan_.journal_is_lost) (void)RemoveTree(data_dir_);
    StartCoordinator();
  }
  return true;
}

bool Cluster::JobHasEnded() const {
  if (std::any_of(agents_.begin(), agents_.end(),
                  [](const auto& starts) { return starts.back()->ended() == 0; })) {
    return true;
  }
  // An agent that has left and starts again means another run of the job, as when a user starts it.
  const std::string said = coordinators_.back()->text();
  for (const absl::string_view line : absl::StrSplit(said, '\n')) {
    if (absl::StrContains(line, absl::StrCat("job ", kJob, ".agents: generation ")) &&
        absl::StrContains(line, " ended: every worker has left")) {
      return true;
    }
  }
  return false;
}

bool Cluster::RestartAgents() {
  for (int i = 0; i < plan_.agents; ++i) {
    const std::optional<int> code = agents_[i].back()->ended();
    if (!code.has_value() || *code == 0) continue;
    if (*code != -SIGKILL || agents_[i].size() >= kMaxStarts) {
      Wrong(absl::StrCat("agent ", i, " ended with ", *code));
      return false;
    }
    if (!JobHasEnded()) StartAgent(i);
  }
  return true;
}

bool Cluster::RestartHubs() {
  for (int i = 0; i < plan_.hubs && !hubs_may_end_; ++i) {
    if (hubs_[i].empty()) continue;
    const std::optional<int> code = hubs_[i].back()->ended();
    if (!code.has_value()) continue;
    if (*code != -SIGKILL || hubs_[i].size() >= kMaxStarts) {
      Wrong(absl::StrCat("hub ", i, " ended with ", *code));
      return false;
    }
    StartHub(i);
  }
  return true;
}

void Cluster::EndHubs() {
  hubs_may_end_ = true;
  for (const auto& starts : hubs_) {
    starts.back()->Signal(SIGCONT);
    starts.back()->Signal(SIGTERM);
  }
  for (auto& starts : hubs_) {
    if (const int code = starts.back()->Wait(); code < 0) {
      Wrong(absl::StrCat("a hub ended with ", code, " after SIGTERM"));
    }
  }
}

bool Cluster::WaitForAgents(int agents, absl::Time deadline) {
  const auto stub = v1::Admin::NewStub(*rpc::Connect(address_));
  while (Clock::Real().Now() < deadline) {
    v1::StatusReply reply;
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Seconds(20));
    context.set_wait_for_ready(true);
    if (stub->Status(&context, {}, &reply).ok() && reply.agents() >= agents) return true;
    WaitForChange(Clock::Real().Now() + absl::Milliseconds(20));
  }
  return false;
}

bool Cluster::RestartWorkers() {
  for (int i = 0; i < plan_.workers; ++i) {
    Child& worker = *workers_[i].back();
    const std::optional<int> code = worker.ended();
    if (!code.has_value() || *code == 0) continue;
    if (*code != -SIGKILL || workers_[i].size() >= kMaxStarts) {
      Wrong(absl::StrCat("worker ", i, " ended with ", *code));
      return false;
    }
    StartWorker(i);
  }
  return true;
}

absl::StatusOr<std::map<std::string, int64_t>> Cluster::ReadCounters() {
  absl::Status status;
  const absl::Time deadline = Clock::Real().Now() + absl::Seconds(20);
  while (Clock::Real().Now() < deadline && RestartWhatEnded()) {
    ContinueStopped();
    v1::TxnRequest request;
    request.mutable_fence()->set_job_id(kJob);
    v1::GetOp& counts = *request.add_then()->mutable_get();
    counts.set_key("count/");
    counts.set_prefix(true);
    request.add_then()->mutable_get()->set_key("sum");
    v1::TxnReply reply;
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Seconds(5));
    context.set_wait_for_ready(true);
    const auto stub = v1::KeyValueStore::NewStub(*rpc::Connect(address_));
    status = rpc::FromGrpc(stub->Txn(&context, request, &reply));
    if (!status.ok()) {
      WaitForChange(Clock::Real().Now() + absl::Milliseconds(50));
      continue;
    }
    std::map<std::string, int64_t> values;
    for (const v1::KvOpResult& result : reply.results()) {
      for (const v1::KeyValue& kv : result.kvs()) {
        if (!absl::SimpleAtoi(kv.value(), &values[kv.key()])) {
          return absl::DataLossError(absl::StrCat(kv.key(), " is ", kv.value()));
        }
      }
    }
    return values;
  }
  return status;
}

void Cluster::CallAndGoAway() {
  v1::JoinRequest request;
  request.mutable_fence()->set_job_id("another");
  request.mutable_fence()->set_worker_id("alone");
  request.mutable_fence()->set_incarnation(1);
  request.mutable_spec()->set_min_workers(2);
  request.mutable_spec()->set_max_workers(2);
  v1::JoinReply reply;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  rpc::SetTimeout(context, absl::Milliseconds(300));
  (void)v1::Rendezvous::NewStub(*rpc::Connect(address_))->Join(&context, request, &reply);
}

void Cluster::CheckFired() {
  const auto check = [&](const std::string& who, const Child* child,
                         const std::string& failpoints) {
    for (const std::string& name : NamesIn(failpoints)) {
      if (child == nullptr || !child->Says(FiresText(name))) {
        Wrong(absl::StrCat(who, ": failpoint ", name, " was never reached"));
      }
    }
  };
  for (size_t i = 0; i < plan_.coordinator_failpoints.size(); ++i) {
    check(absl::StrCat("coordinator start ", i),
          i < coordinators_.size() ? coordinators_[i].get() : nullptr,
          plan_.coordinator_failpoints[i]);
  }
  const auto check_all = [&](const std::string& who, const auto& lists, const auto& children) {
    for (const auto& [index, list] : lists) {
      for (size_t i = 0; i < list.size(); ++i) {
        check(absl::StrCat(who, index, " start ", i),
              i < children[index].size() ? children[index][i].get() : nullptr, list[i]);
      }
    }
  };
  check_all("worker ", plan_.worker_failpoints, plan_.agents == 0 ? workers_ : agents_);
  check_all("agent ", plan_.agent_failpoints, agents_);
  for (size_t i = 0; i < sent_.size(); ++i) {
    if (!sent_[i]) Wrong(absl::StrCat("signal ", i, " was never due"));
  }
}

void Cluster::CheckHistories(const std::map<std::string, int64_t>& values) {
  std::map<std::string, std::string> barriers;       // instance -> payloads
  std::map<std::string, std::string> trigger_steps;  // id -> effective step
  int64_t sum = 0;
  int generations = 0;
  for (int i = 0; i < plan_.workers; ++i) {
    const std::string id = absl::StrCat("w", i);
    const auto text = ReadFile(absl::StrCat(dir_, "/", id, ".history"));
    if (!text.ok()) return Wrong(std::string(text.status().message()));
    History history;
    bool ended = false;
    for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      int generation = 0;
      if (words[0] == "seat" && absl::SimpleAtoi(words[1], &generation)) {
        generations = std::max(generations, generation);
      } else if (words[0] == "start") {
        ++history.starts;
      } else if (words[0] == "add-begin") {
        ++history.begun;
      } else if (words[0] == "add-refused") {
        ++history.refused;
      } else if (words[0] == "add-ack") {
        ++history.acked;
        int64_t value = 0;
        if (!absl::SimpleAtoi(words[1], &value) || value <= history.last_value ||
            value > history.begun - history.refused) {
          Wrong(absl::StrCat(id, ": an addition was answered ", words[1], " after ",
                             history.last_value, ", the ", history.begun, "th begun"));
        }
        history.last_value = value;
      } else if (words[0] == "barrier") {
        const std::string instance = absl::StrJoin(words.begin() + 1, words.begin() + 4, " ");
        const std::string result = absl::StrJoin(words.begin() + 4, words.end(), " ");
        const auto [it, is_new] = barriers.emplace(instance, result);
        if (!is_new && it->second != result) {
          Wrong(absl::StrCat("barrier ", instance, " ended with '", it->second, "' and for ", id,
                             " with '", result, "'"));
        }
      } else if (words[0] == "act") {
        const auto [it, is_new] = trigger_steps.emplace(words[2], words[4]);
        if (!is_new && it->second != words[4]) {
          Wrong(absl::StrCat("trigger ", words[2], " had steps ", it->second, " and ", words[4]));
        }
        if (history.starts == 1 && words[3] != words[4]) {
          Wrong(absl::StrCat(id, " acted on trigger ", words[2], " at step ", words[3], ", not ",
                             words[4]));
        }
      } else if (words[0] == "end") {
        ended = true;
      }
    }
    const auto it = values.find("count/" + id);
    const int64_t value = it == values.end() ? 0 : it->second;
    const int unknown = history.begun - history.acked - history.refused;
    if (value < history.acked || value > history.acked + unknown) {
      Wrong(absl::StrCat(id, ": ", history.acked, " additions acknowledged, ", unknown,
                         " without an answer, but the counter is ", value));
    }
    // A worker that lived through everything knows the outcome of each addition.
    if (history.starts == 1 && unknown > 0) {
      Wrong(absl::StrCat(id, ": ", unknown, " additions never got an answer"));
    }
    if (!ended) Wrong(absl::StrCat(id, " never came to its end"));
    sum += value * (i + 1);
  }
  if (plan_.expected_generations > 0 && generations != plan_.expected_generations) {
    Wrong(absl::StrCat(generations, " generations, ", plan_.expected_generations, " expected"));
  }
  const auto it = values.find("sum");
  if (it == values.end() || it->second != sum) {
    Wrong(absl::StrCat("half a transaction: the counters make ", sum, ", the sum is ",
                       it == values.end() ? 0 : it->second));
  }
}

void Cluster::CheckWeights() {
  for (int i = 0; i < plan_.workers; ++i) {
    std::string prefix;
    const Child& speaker = Speaker(i, &prefix);
    std::optional<std::string> said = speaker.Newest(prefix + "weights ");
    // The agent of a worker that died after the job took the worker's last line along.
    if (plan_.agents > 0 && !said && speaker.ended() == -SIGKILL) continue;
    if (!said) {
      Wrong(absl::StrCat("worker ", i, " said nothing of its weights"));
    } else if (weights_.empty()) {
      weights_ = *said;
    } else if (*said != weights_) {
      Wrong(absl::StrCat("worker ", i, " ended with weights ", *said, ", another with ", weights_));
    }
  }
  if (plan_.trains) return;
  if (const std::string expected = ChaosWeights(plan_.workers, plan_.rounds);
      weights_ != expected) {
    Wrong(absl::StrCat("the weights are ", weights_, ", not ", expected));
  }
}

// All processes below the agents carry the run's folder in their environment.
std::vector<pid_t> Cluster::AgentPids() const {
  std::vector<pid_t> pids;
  for (const auto& starts : agents_) {
    if (!starts.empty()) pids.push_back(starts.back()->pid());
  }
  return pids;
}

void Cluster::CheckNothingIsLeft() {
  if (plan_.agents == 0) return;
  const std::string mark = "TMPDIR=" + socket_dir_;
  const absl::Time deadline = Clock::Real().Now() + absl::Seconds(20);
  std::string left;
  do {
    if (!left.empty()) WaitForChange(Clock::Real().Now() + absl::Milliseconds(10));
    left.clear();
    const auto processes = ListDirectory("/proc");
    for (const std::string& pid : *processes) {
      const auto environment = ReadFile(absl::StrCat("/proc/", pid, "/environ"));
      if (environment.ok() && absl::StrContains(*environment, mark))
        absl::StrAppend(&left, " ", pid);
    }
  } while (!left.empty() && Clock::Real().Now() < deadline);
  if (!left.empty()) Wrong(absl::StrCat("processes are left:", left));
  const bool agents_lived = std::all_of(agents_.begin(), agents_.end(), [](const auto& starts) {
    return starts.back()->ended() == 0;
  });
  const auto sockets = ListDirectory(socket_dir_);
  if (agents_lived && sockets.ok() && !sockets->empty()) {
    Wrong(absl::StrCat("left in ", socket_dir_, ": ", absl::StrJoin(*sockets, " ")));
  }
}

void Cluster::CheckStops() {
  Child& coordinator = *coordinators_.back();
  const std::string failpoints = At(plan_.coordinator_failpoints, coordinators_.size() - 1);
  coordinator.Signal(SIGTERM);
  if (absl::StrContains(failpoints, "=stop")) {
    const absl::Time deadline = Clock::Real().Now() + absl::Seconds(20);
    while (!coordinator.ended() && Clock::Real().Now() < deadline) {
      ContinueStopped();
      WaitForChange(Clock::Real().Now() + absl::Milliseconds(100));
    }
  }
  const int code = coordinator.Wait();
  if (code != 0 && !(code == -SIGKILL && absl::StrContains(failpoints, "=kill"))) {
    Wrong(absl::StrCat("the coordinator ended with ", code, " after SIGTERM"));
  }
  const auto verify = [&] {
    Child check(*host_,
                {ProgramPath("coordinator/cmd/muster-coordinator"), "--verify_journal", data_dir_},
                {}, [] {});
    if (const int result = check.Wait(); result != 0) {
      Wrong(absl::StrCat("the journal does not verify (", result, "):\n", check.text()));
    }
  };
  verify();
}

std::vector<std::string> Cluster::Run() {
  const absl::Time deadline = Clock::Real().Now() + plan_.timeout;
  StartCoordinator();
  if (plan_.agents == 0) {
    for (int i = 0; i < plan_.workers; ++i) StartWorker(i);
  } else {
    MUSTER_CHECK(plan_.workers % plan_.agents == 0 && MakeDirectories(socket_dir_).ok());
    for (int i = 0; i < plan_.hubs; ++i) StartHub(i);
    if (plan_.hubs > 0 && !WaitForAgents(plan_.hubs, deadline)) Wrong("the hubs never came");
    for (int i = 0; i < plan_.agents; ++i) {
      StartAgent(i);
      if (i > 0 || !plan_.first_agent_is_hub) continue;
      if (!WaitForAgents(plan_.hubs + 1, deadline)) Wrong("the hubs never came");
    }
  }
  if (plan_.watch && !plan_.trains) watcher_ = std::make_unique<Watcher>(address_, kJob, "count/");
  if (plan_.abandons) CallAndGoAway();
  while (!AllEnded()) {
    WaitForChange(deadline);
    SendDueSignals();
    ContinueStopped();
    if (!RestartWhatEnded()) return wrong_;
    if (Clock::Real().Now() >= deadline) {
      Wrong(absl::StrCat("not at its end after ", absl::FormatDuration(plan_.timeout)));
      return wrong_;
    }
  }
  EndHubs();
  CheckWeights();
  CheckNothingIsLeft();
  const auto values = ReadCounters();
  if (!values.ok()) {
    Wrong(absl::StrCat("counters: ", values.status().ToString()));
    return wrong_;
  }
  if (!plan_.trains) CheckHistories(*values);
  if (watcher_ != nullptr) {
    for (const auto& [key, value] : *values) {
      if (key != "sum" && !watcher_->WaitFor(key, value, absl::Seconds(20))) {
        Wrong(absl::StrCat("the watch never came to ", value, " of ", key));
      }
    }
    if (!watcher_->violation().empty()) Wrong(watcher_->violation());
    watcher_.reset();
  }
  CheckStops();
  StartCoordinator();
  const auto again = ReadCounters();
  if (!again.ok() || *again != *values) {
    Wrong(absl::StrCat("after a restart the counters are others: ", again.status().ToString()));
  }
  CheckStops();
  CheckFired();
  return wrong_;
}

std::string Cluster::Logs() const {
  std::string text;
  for (size_t i = 0; i < coordinators_.size(); ++i) {
    absl::StrAppend(&text, "coordinator, start ", i, ":\n", coordinators_[i]->text());
  }
  for (size_t w = 0; w < workers_.size(); ++w) {
    for (size_t i = 0; i < workers_[w].size(); ++i) {
      absl::StrAppend(&text, "worker ", w, ", start ", i, ":\n", workers_[w][i]->text());
    }
  }
  for (size_t a = 0; a < agents_.size(); ++a) {
    for (size_t i = 0; i < agents_[a].size(); ++i) {
      absl::StrAppend(&text, "agent ", a, ", start ", i, ":\n", agents_[a][i]->text());
    }
  }
  for (size_t h = 0; h < hubs_.size(); ++h) {
    for (size_t i = 0; i < hubs_[h].size(); ++i) {
      absl::StrAppend(&text, "hub ", h, ", start ", i, ":\n", hubs_[h][i]->text());
    }
  }
  for (int w = 0; w < plan_.workers; ++w) {
    if (auto history = ReadFile(absl::StrCat(dir_, "/w", w, ".history")); history.ok()) {
      absl::StrAppend(&text, "history of w", w, ":\n", *history);
    }
  }
  return text;
}

}  // namespace muster::chaos
