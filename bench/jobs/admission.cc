// What the schedule of submitted jobs costs with many jobs in the queue and many nodes.
//
// Runs the core alone: no network, no journal. Measures the CPU time of one event, which is all
// that other events of the coordinator wait for.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "bench/load_average.h"
#include "coordinator/jobs/jobs_core.h"

namespace muster::coordinator {
namespace {

double CpuMs() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(int nodes, int gpus) : core_(JobsOptions()), gpus_(gpus) {
    JobsOutput out;
    core_.StartTerm(Event(), 0, &out);
    now_ += absl::Minutes(1);  // all nodes have had the time to come
    for (int i = 0; i < nodes; ++i) Sync(i, {});
  }

  // Returns milliseconds of CPU.
  double Handle(const v1::Op& op) {
    JobsOutput out;
    const double begin = CpuMs();
    core_.Handle(++calls_, op, Event(), &out);
    const double ms = CpuMs() - begin;
    for (const auto& [call, result] : out.replies) {
      MUSTER_CHECK(!result.has_error()) << result.error().message();
    }
    return ms;
  }
  double Submit(int processes, int shape, int priority = 0) {
    v1::Op op;
    v1::JobSpec* const spec = op.mutable_submit_job()->mutable_spec();
    spec->set_name("job");
    *spec->add_argv() = "./train";
    spec->set_max_processes(processes);
    spec->mutable_per_process()->set_gpus(1);
    spec->mutable_per_process()->set_memory_bytes(1 + shape);  // jobs of many shapes
    spec->set_wait_for_nodes(true);
    spec->set_priority(priority);
    spec->set_preemptible(true);
    return Handle(op);
  }
  double Sync(int node, const std::vector<v1::AttemptReport>& reports) {
    v1::Op op;
    v1::SyncNodeRequest* const request = op.mutable_sync_node();
    request->set_node(absl::StrCat("node-", node));
    request->set_node_uid(1);
    request->mutable_info()->set_cpus(256);
    request->mutable_info()->set_memory_bytes(int64_t{1} << 40);
    for (int i = 0; i < gpus_; ++i) request->mutable_info()->add_gpus("H200");
    request->mutable_info()->set_rack(absl::StrCat("rack-", node / 32));
    for (const v1::AttemptReport& report : reports) *request->add_attempts() = report;
    return Handle(op);
  }
  double End(int node, const std::string& job_id, int attempt) {
    v1::AttemptReport report;
    report.set_job_id(job_id);
    report.set_attempt(attempt);
    report.set_state(v1::PLACEMENT_STATE_ENDED);
    report.mutable_end()->set_end_class(v1::END_CLASS_SUCCEEDED);
    return Sync(node, {report});
  }
  // Half a second passes, in which what was put off takes place.
  double Wait() {
    now_ += absl::Milliseconds(500);
    JobsOutput out;
    const double begin = CpuMs();
    core_.Tick(Event(), &out);
    return CpuMs() - begin;
  }
  const v1::JobRecord* Find(const std::string& job_id) const { return core_.Find(job_id); }

 private:
  JobsCore::Event Event() {
    now_ += absl::Microseconds(10);
    return {now_, revision_ += 2, "c"};
  }

  JobsCore core_;
  const int gpus_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  uint64_t revision_ = 100;
  CallId calls_ = 0;
};

int Run(int argc, char** argv) {
  int nodes = 1000, jobs = 1000, gpus = 8;
  CLI::App app("CPU of the schedule with many queued jobs and nodes", "admission");
  app.add_option("--nodes", nodes, "nodes")->capture_default_str();
  app.add_option("--jobs", jobs, "queued jobs")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  for (const int shapes : {1, 100}) {
    Bench bench(nodes, gpus);
    std::vector<double> starts, queued, ends;
    // One job a node fills the cluster.
    for (int i = 0; i < nodes; ++i) starts.push_back(bench.Submit(gpus, 0));
    for (int i = 0; i < jobs; ++i) queued.push_back(bench.Submit(gpus, i % shapes));
    // Each end frees a node, which the first of the queue gets.
    for (int i = 1; i <= std::min(nodes, 200); ++i) {
      const std::string id = absl::StrCat("job-", i);
      const std::string node = bench.Find(id)->history(0).placements(0).node();
      ends.push_back(bench.End(std::stoi(node.substr(5)), id, 1));
    }
    std::printf(
        "{\"bench\": \"jobs/admission\", \"nodes\": %d, \"queued\": %d, \"shapes\": %d, "
        "\"submit_and_start_ms\": %.3f, \"submit_to_full_queue_ms\": %.3f, "
        "\"end_and_start_next_ms\": %.3f, \"worst_ms\": %.3f, \"load\": %.2f}\n",
        nodes, jobs, shapes, Median(starts), Median(queued), Median(ends),
        std::max({*std::max_element(starts.begin(), starts.end()),
                  *std::max_element(queued.begin(), queued.end()),
                  *std::max_element(ends.begin(), ends.end())}),
        bench::LoadAverage());
  }
  // A job of all nodes ends, one node after the other, while others wait.
  Bench wide(nodes, gpus);
  wide.Submit(nodes * gpus, 0);
  for (int i = 0; i < std::min(jobs, 100); ++i) wide.Submit(gpus, i);
  double ends_ms = 0, worst_ms = 0;
  for (int i = 0; i < nodes; ++i) {
    const double ms = wide.End(i, "job-1", 1);
    ends_ms += ms;
    worst_ms = std::max(worst_ms, ms);
    if (i % 100 == 0) worst_ms = std::max(worst_ms, wide.Wait());
  }
  // One that needs all nodes preempts a job on each of them.
  Bench urgent(nodes, gpus);
  for (int i = 0; i < nodes; ++i) urgent.Submit(gpus, 0);
  const double preempt_ms = urgent.Submit(nodes * gpus, 0, /*priority=*/5);
  std::printf(
      "{\"bench\": \"jobs/admission\", \"nodes\": %d, \"wide_job_ends_ms\": %.3f, "
      "\"worst_of_these_ms\": %.3f, \"preempt_all_ms\": %.3f, \"load\": %.2f}\n",
      nodes, ends_ms, worst_ms, preempt_ms, bench::LoadAverage());
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Run(argc, argv); }
