// Admission with many nodes over real connections: a coordinator in its own process, with its
// journal on the disk, and in this process as many agents as asked for, each with a connection of
// its own and a held call, as muster-agent --serve has them. Processes are not started: an agent
// says at once that they run. Latencies are those that a user and a node see; CPU is the
// coordinator's.
#include <grpcpp/grpcpp.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/descriptor_limit.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bench/coordinator/server_process.h"
#include "bench/load_average.h"
#include "proto/muster/v1/job.grpc.pb.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "rpc/channel.h"

namespace muster::bench {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(40);
constexpr absl::Duration kPatience = absl::Minutes(2);

double Ms(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

double Quantile(std::vector<double> values, double quantile) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(quantile * static_cast<double>(values.size())))];
}

// All agents; one thread handles their answers.
class Agents {
 public:
  Agents(const std::string& address, int count, int gpus) : nodes_(count) {
    for (int i = 0; i < count; ++i) {
      auto channel = rpc::Connect(address, {.own_connection = true});
      MUSTER_CHECK(channel.ok()) << channel.status();
      Node& node = nodes_[i];
      node.stub = v1::Nodes::NewStub(*std::move(channel));
      node.base.set_node(absl::StrCat("node-", i));
      node.base.set_node_uid(i + 1);
      node.base.mutable_info()->set_cpus(256);
      node.base.mutable_info()->set_memory_bytes(int64_t{1} << 40);
      for (int gpu = 0; gpu < gpus; ++gpu) node.base.mutable_info()->add_gpus("H200");
      node.base.mutable_info()->set_rack(absl::StrCat("rack-", i / 32));
    }
    thread_ = std::thread([this] { Loop(); });
    MutexLock lock(&mu_);
    for (Node& node : nodes_) Call(&node);
  }
  ~Agents() {
    {
      MutexLock lock(&mu_);
      ended_ = true;
      for (OpenCall* const call : calls_) call->context.TryCancel();
    }
    queue_.Shutdown();
    thread_.join();
  }

  // Blocks until each agent has been answered once.
  void WaitForAll() {
    MutexLock lock(&mu_);
    const absl::Time deadline = absl::Now() + kPatience;
    while (answered_ < static_cast<int>(nodes_.size())) {
      MUSTER_CHECK(absl::Now() < deadline) << answered_ << " agents are connected";
      changed_.WaitWithTimeout(&mu_, absl::Seconds(1));
    }
  }

  // Returns when a node learned that it is to run the job.
  absl::Time WaitForStart(const std::string& job) {
    MutexLock lock(&mu_);
    const absl::Time deadline = absl::Now() + kPatience;
    while (started_.count(job) == 0) {
      MUSTER_CHECK(absl::Now() < deadline) << job << " does not start";
      changed_.WaitWithTimeout(&mu_, absl::Seconds(1));
    }
    return started_[job].second;
  }

  // Ends the job: its processes have succeeded. Returns when the next job has started there.
  absl::Time End(const std::string& job) {
    MutexLock lock(&mu_);
    Node* const node = started_.at(job).first;
    for (v1::AttemptReport& report : node->reports) {
      if (report.job_id() != job) continue;
      report.set_state(v1::PLACEMENT_STATE_ENDED);
      report.mutable_end()->set_end_class(v1::END_CLASS_SUCCEEDED);
    }
    const int starts = node->starts;
    Call(node);
    const absl::Time deadline = absl::Now() + kPatience;
    while (node->starts == starts) {
      MUSTER_CHECK(absl::Now() < deadline) << "nothing follows " << job;
      changed_.WaitWithTimeout(&mu_, absl::Seconds(1));
    }
    return node->last_start;
  }

  void Rest(absl::Duration time) {
    MutexLock lock(&mu_);
    const absl::Time end = absl::Now() + time;
    while (absl::Now() < end) changed_.WaitWithTimeout(&mu_, end - absl::Now());
  }

 private:
  struct Node {
    std::unique_ptr<v1::Nodes::Stub> stub;
    v1::SyncNodeRequest base;  // what is the same in each call
    std::vector<v1::AttemptReport> reports;
    uint64_t version = 0;
    uint64_t sequence = 0;  // of its last call
    bool answered = false;
    int starts = 0;
    absl::Time last_start = absl::InfinitePast();
  };
  struct OpenCall {
    Node* node;
    uint64_t sequence;
    grpc::ClientContext context{};
    v1::SyncNodeReply reply{};
    grpc::Status status{};
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::SyncNodeReply>> reader{};
  };

  void Call(Node* node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    v1::SyncNodeRequest request = node->base;
    for (const v1::AttemptReport& report : node->reports) *request.add_attempts() = report;
    request.set_seen_version(node->version);
    request.set_sequence(++node->sequence);
    auto* const call = new OpenCall{.node = node, .sequence = node->sequence};
    rpc::SetTimeout(call->context, kCallTimeout);
    calls_.insert(call);
    call->reader = node->stub->AsyncSync(&call->context, request, &queue_);
    call->reader->Finish(&call->reply, &call->status, call);
  }

  void Loop() {
    void* tag = nullptr;
    for (bool ok = false; queue_.Next(&tag, &ok);) {
      const std::unique_ptr<OpenCall> call(static_cast<OpenCall*>(tag));
      MutexLock lock(&mu_);
      calls_.erase(call.get());
      if (ended_) continue;
      MUSTER_CHECK(call->status.ok()) << call->status.error_message();
      Take(call->node, call->reply);
      if (call->sequence == call->node->sequence) Call(call->node);
    }
  }

  void Take(Node* node, const v1::SyncNodeReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    answered_ += node->answered ? 0 : 1;
    node->answered = true;
    node->version = reply.version();
    const auto is = [](const auto& a, const auto& b) {
      return a.job_id() == b.job_id() && a.attempt() == b.attempt();
    };
    const auto& assigned = reply.assignments();
    std::erase_if(node->reports, [&](const v1::AttemptReport& report) {
      return report.state() == v1::PLACEMENT_STATE_ENDED &&
             std::none_of(assigned.begin(), assigned.end(),
                          [&](const v1::NodeAssignment& one) { return is(one, report); });
    });
    for (const v1::NodeAssignment& one : assigned) {
      if (std::any_of(node->reports.begin(), node->reports.end(),
                      [&](const v1::AttemptReport& report) { return is(report, one); })) {
        continue;
      }
      v1::AttemptReport& report = node->reports.emplace_back();
      report.set_job_id(one.job_id());
      report.set_attempt(one.attempt());
      report.set_state(v1::PLACEMENT_STATE_RUNNING);
      node->last_start = absl::Now();
      ++node->starts;
      started_[one.job_id()] = {node, node->last_start};
    }
    changed_.SignalAll();
  }

  grpc::CompletionQueue queue_;
  Mutex mu_;
  CondVar changed_;
  std::vector<Node> nodes_ ABSL_GUARDED_BY(mu_);
  std::set<OpenCall*> calls_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::pair<Node*, absl::Time>> started_ ABSL_GUARDED_BY(mu_);
  int answered_ ABSL_GUARDED_BY(mu_) = 0;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

std::string Submit(v1::Jobs::Stub* jobs, int gpus) {
  v1::SubmitJobRequest request;
  v1::JobSpec* const spec = request.mutable_spec();
  spec->set_name("job");
  spec->add_argv("./train");
  spec->set_max_processes(std::max(1, gpus));
  spec->mutable_per_process()->set_gpus(gpus > 0 ? 1 : 0);
  spec->mutable_per_process()->set_memory_bytes(1 << 20);
  spec->set_wait_for_nodes(true);
  v1::SubmitJobReply reply;
  grpc::ClientContext context;
  rpc::SetTimeout(context, kCallTimeout);
  const grpc::Status status = jobs->Submit(&context, request, &reply);
  MUSTER_CHECK(status.ok()) << status.error_message();
  return reply.job().job_id();
}

int Run(int argc, char** argv) {
  int nodes = 1000, queued = 1000, gpus = 8, samples = 200, idle_seconds = 20;
  std::string server = "bazel-bin/coordinator/cmd/muster-coordinator";
  CLI::App app("Admission of submitted jobs with many agents over real connections", "streams");
  app.add_option("--nodes", nodes, "agents")->capture_default_str();
  app.add_option("--jobs", queued, "queued jobs")->capture_default_str();
  app.add_option("--samples", samples, "starts of each kind that are timed")->capture_default_str();
  app.add_option("--idle_seconds", idle_seconds, "how long idle CPU is measured")
      ->capture_default_str();
  app.add_option("--server", server, "muster-coordinator")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  RaiseDescriptorLimit();
  char scratch[] = "/var/tmp/muster-bench-XXXXXX";  // not in memory
  MUSTER_CHECK(mkdtemp(scratch) != nullptr);
  {
    auto process = ServerProcess::Start(
        {server, "--log_level", "error", "--insecure", "--data_dir", scratch}, true);
    MUSTER_CHECK(process.ok()) << process.status().message();
    const std::string address = (*process)->line();
    auto channel = rpc::Connect(address);
    MUSTER_CHECK(channel.ok()) << channel.status();
    const auto jobs = v1::Jobs::NewStub(*channel);

    absl::Time begin = absl::Now();
    Agents agents(address, nodes, gpus);
    agents.WaitForAll();
    const absl::Duration connected = absl::Now() - begin;

    // A job for each node: each starts at once, until the cluster is full.
    std::vector<double> answers, starts, queueing, small, ends;
    std::vector<std::string> running;
    absl::Duration cpu = (*process)->CpuTime();
    for (int i = 0; i < nodes; ++i) {
      begin = absl::Now();
      running.push_back(Submit(jobs.get(), gpus));
      answers.push_back(Ms(absl::Now() - begin));
      starts.push_back(Ms(agents.WaitForStart(running.back()) - begin));
    }
    const absl::Duration start_cpu = (*process)->CpuTime() - cpu;
    cpu = (*process)->CpuTime();
    for (int i = 0; i < queued; ++i) {
      begin = absl::Now();
      Submit(jobs.get(), gpus);
      queueing.push_back(Ms(absl::Now() - begin));
    }
    const absl::Duration queue_cpu = (*process)->CpuTime() - cpu;
    // A small job that delays no job before it, because it needs no GPU, passes the whole queue.
    for (int i = 0; i < samples; ++i) {
      begin = absl::Now();
      const std::string job = Submit(jobs.get(), 0);
      small.push_back(Ms(agents.WaitForStart(job) - begin));
    }
    cpu = (*process)->CpuTime();
    const int count = std::min({samples, nodes, queued});
    for (int i = 0; i < count; ++i) {
      begin = absl::Now();
      ends.push_back(Ms(agents.End(running[i]) - begin));
    }
    const absl::Duration end_cpu = (*process)->CpuTime() - cpu;
    cpu = (*process)->CpuTime();
    agents.Rest(absl::Seconds(idle_seconds));
    const absl::Duration idle_cpu = (*process)->CpuTime() - cpu;
    std::printf(
        "{\"bench\": \"jobs/streams\", \"nodes\": %d, \"queued\": %d, \"load\": %.2f, "
        "\"connected_s\": %.2f, \"submit_answer_ms\": %.2f, \"submit_to_start_ms\": %.2f, "
        "\"submit_to_start_p99_ms\": %.2f, \"submit_to_full_queue_ms\": %.2f, "
        "\"submit_to_full_queue_p99_ms\": %.2f, \"pass_the_queue_ms\": %.2f, "
        "\"pass_the_queue_p99_ms\": %.2f, \"end_to_next_start_ms\": %.2f, "
        "\"end_to_next_start_p99_ms\": %.2f, \"cpu_of_a_start_ms\": %.2f, "
        "\"cpu_of_queueing_ms\": %.2f, \"cpu_of_an_end_ms\": %.2f, \"idle_cpu_percent\": %.2f, "
        "\"memory_mb\": %.0f}\n",
        nodes, queued, LoadAverage(), absl::ToDoubleSeconds(connected), Quantile(answers, 0.5),
        Quantile(starts, 0.5), Quantile(starts, 0.99), Quantile(queueing, 0.5),
        Quantile(queueing, 0.99), Quantile(small, 0.5), Quantile(small, 0.99), Quantile(ends, 0.5),
        Quantile(ends, 0.99), Ms(start_cpu) / nodes, Ms(queue_cpu) / queued, Ms(end_cpu) / count,
        100 * absl::FDivDuration(idle_cpu, absl::Seconds(idle_seconds)), (*process)->RssMb());
  }
  std::filesystem::remove_all(scratch);
  return 0;
}

}  // namespace
}  // namespace muster::bench

int main(int argc, char** argv) { return muster::bench::Run(argc, argv); }
