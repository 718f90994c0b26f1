// What one event costs a coordinator that holds one job, and one that holds many.
//
// The runner runs in this process with its journal in memory and without a network: what is
// measured is CPU of its core, its calls and its watches. Each job has one seated worker and one
// watcher. The clock of the runner moves by 25 ms from event to event, as on a coordinator that
// has little to do, so that looking for a pause is part of the cost.
#include <google/protobuf/message_lite.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/fake_clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bench/load_average.h"
#include "coordinator/hubs.h"
#include "coordinator/journal/memory_journal.h"
#include "coordinator/service/core_runner.h"
#include "coordinator/service/watch_source.h"

namespace muster::coordinator {
namespace {

class Sink final : public CallSink {
 public:
  void OnAnswer(const std::shared_ptr<const Answer>& answer) override {
    ok = answer->kind() != v1::OpResult::KIND_NOT_SET;
    answered.Notify();
  }
  bool ok = false;
  Notification answered;
};

// Takes every batch at once.
class Watch final : public WatchStream, public std::enable_shared_from_this<Watch> {
 public:
  explicit Watch(CoreRunner* runner) : runner_(runner) {}
  void Write(const google::protobuf::MessageLite&) override {
    runner_->WatchWritable(shared_from_this());
  }
  void Close(const absl::Status&) override {}

 private:
  CoreRunner* const runner_;
};

void Do(CoreRunner& runner, v1::Op op) {
  const auto sink = std::make_shared<Sink>();
  const size_t bytes = op.ByteSizeLong();
  runner.Call(runner.NewCallId(), std::make_unique<v1::Op>(std::move(op)), bytes, sink);
  sink->answered.WaitForNotification();
  MUSTER_CHECK(sink->ok) << "an event was refused";
}

void FillFence(v1::Fence* fence, int job, uint64_t generation) {
  fence->set_job_id(absl::StrCat("job-", job));
  fence->set_worker_id("w0");
  fence->set_incarnation(1);
  fence->set_generation(generation);
}

double CpuMicroseconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

uint64_t JobsVisited(CoreRunner& runner) {
  uint64_t visited = 0;
  Notification done;
  runner.WithCore([&](Core* core) {
    visited = core->stats().jobs_visited;
    done.Notify();
  });
  done.WaitForNotification();
  return visited;
}

void Measure(int jobs, int events) {
  FakeClock clock;
  CoreRunner::Options options;
  options.clock = &clock;
  CoreRunner runner(options, std::make_unique<MemoryJournal>());
  MUSTER_CHECK(runner.Start().ok());
  std::vector<std::shared_ptr<Watch>> watches;
  for (int i = 0; i < jobs; ++i) {
    v1::Op join;
    FillFence(join.mutable_join()->mutable_fence(), i, 0);
    v1::RendezvousSpec& spec = *join.mutable_join()->mutable_spec();
    spec.set_min_workers(1);
    spec.set_max_workers(1);
    spec.mutable_lease()->set_seconds(24 * 3600);
    Do(runner, std::move(join));
    v1::WatchRequest request;
    request.set_job_id(absl::StrCat("job-", i));
    request.set_keys(true);
    watches.push_back(std::make_shared<Watch>(&runner));
    runner.WatchOpen(watches.back(), WatchEvents(request));
  }
  const auto heartbeat = [] {
    v1::Op op;
    FillFence(op.mutable_heartbeat()->mutable_fence(), 0, 1);
    return op;
  };
  const auto put = [] {
    v1::Op op;
    FillFence(op.mutable_txn()->mutable_fence(), 0, 1);
    op.mutable_txn()->add_then()->mutable_put()->set_key("k");
    return op;
  };
  const std::pair<const char*, v1::Op (*)()> kinds[] = {{"heartbeat", heartbeat}, {"put", put}};
  for (const auto& [name, make] : kinds) {
    const uint64_t jobs_before = JobsVisited(runner);
    const uint64_t watchers_before = runner.watchers_visited();
    const double before = CpuMicroseconds();
    for (int i = 0; i < events; ++i) {
      clock.Advance(absl::Milliseconds(25));
      Do(runner, make());
    }
    const double cpu = CpuMicroseconds() - before;
    std::printf(
        "{\"event\": \"%s\", \"jobs\": %d, \"cpu_us\": %.2f, \"jobs_visited\": %.3f, "
        "\"watchers_visited\": %.3f, \"load\": %.2f}\n",
        name, jobs, cpu / events, static_cast<double>(JobsVisited(runner) - jobs_before) / events,
        static_cast<double>(runner.watchers_visited() - watchers_before) / events,
        bench::LoadAverage());
    std::fflush(stdout);
  }
  runner.Stop();
}

// An agent that comes, is sent to a hub, is listed there and ends its session, while `agents`
// others are there, those beyond --direct_agents behind hubs.
void MeasureHubs(int agents, int events) {
  const HubOptions options;
  Hubs hubs(options);
  absl::Time now = absl::UnixEpoch();
  std::map<std::string, v1::HubRoster> rosters;
  int moves = 0;
  const auto come = [&](const std::string& node) {
    now += absl::Milliseconds(1);
    v1::Hello hello;
    hello.add_features("hub");
    hello.set_hub_address(absl::StrCat(node, ":29401"));
    hubs.Attach(node, hello, now);
    for (const HubMove& move : hubs.Decide()) {
      ++moves;
      v1::HubRoster& roster = rosters[move.hub];
      roster.add_agents()->set_node(move.node);
      hubs.Detach(move.node, now);
      hubs.Roster(move.hub, roster, now);
      MUSTER_CHECK(hubs.Decide().empty()) << "one agent too many was moved";
    }
  };
  for (int i = 0; i < agents; ++i) come(absl::StrCat("node-", i));
  const double before = CpuMicroseconds();
  const int moves_before = moves;
  for (int i = 0; i < events; ++i) come(absl::StrCat("node-", agents + i));
  const double cpu = CpuMicroseconds() - before;
  std::printf(
      "{\"event\": \"agent comes\", \"agents\": %d, \"cpu_us\": %.2f, \"moved\": %.2f, "
      "\"hubs\": %d, \"load\": %.2f}\n",
      agents, cpu / events, static_cast<double>(moves - moves_before) / events, hubs.hubs(),
      bench::LoadAverage());
  std::fflush(stdout);
}

int Run(int argc, char** argv) {
  std::vector<int> jobs = {1, 20000};
  std::vector<int> agents = {1000, 12500, 100000};
  int events = 5000;
  CLI::App app(
      "Measures what one event costs a coordinator, by the number of its jobs and of its agents; "
      "one JSON object a line.",
      "event_cost");
  app.add_option("--jobs", jobs, "numbers of jobs")->delimiter(',')->capture_default_str();
  app.add_option("--agents", agents, "numbers of agents")->delimiter(',')->capture_default_str();
  app.add_option("--events", events, "events of each kind")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  SetLogLevel(LogLevel::kError);
  for (const int count : agents) MeasureHubs(count, events);
  for (const int count : jobs) Measure(count, events);
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Run(argc, argv); }
