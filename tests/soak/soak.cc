#include "tests/soak/soak.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "tests/chaos/cluster.h"
#include "tests/chaos/plans.h"
#include "tests/soak/hostile.h"

namespace muster::soak {
namespace {

using chaos::Plan;

// Draws the target of a signal, and the signal, sent when the first worker prints that round.
chaos::SignalAt DrawSignal(std::mt19937& random, int round) {
  const auto draw = [&](int below) {
    return std::uniform_int_distribution<int>(0, below - 1)(random);
  };
  const int targets[] = {chaos::kCoordinator, chaos::TargetOfAgent(draw(2)), draw(4)};
  chaos::SignalAt signal = {.worker = 0, .round = round, .target = targets[draw(3)]};
  signal.signal = draw(3) == 0 ? SIGKILL : SIGSTOP;
  signal.stopped_for = absl::Milliseconds(100 + draw(2400));
  return signal;
}

Plan DrawPlan(uint32_t seed) {
  std::mt19937 random(seed);
  const auto draw = [&](size_t below) {
    return std::uniform_int_distribution<size_t>(0, below - 1)(random);
  };
  const std::vector<std::string> failpoints = chaos::AgentsFailpoints();
  Plan plan = chaos::AgentsPlan(failpoints[draw(failpoints.size())]);
  if (draw(3) == 0) {  // a full disk, which is waited out, instead
    plan.coordinator_failpoints = {
        absl::StrCat("journal.before_append=error:RESOURCE_EXHAUSTED@", 10 + draw(60))};
  }
  plan.name = absl::StrCat("soak", seed);
  plan.rounds = 40;
  plan.lease = absl::Seconds(10);
  plan.timeout = absl::Minutes(5);
  for (int round = 8; round <= 32; round += 12) plan.signals.push_back(DrawSignal(random, round));
  return plan;
}

// Returns the resident bytes of a process; 0: it is gone.
int64_t Memory(pid_t pid) {
  const absl::StatusOr<std::string> text = ReadFile(absl::StrCat("/proc/", pid, "/statm"));
  if (!text.ok()) return 0;
  const std::vector<std::string> fields = absl::StrSplit(*text, ' ');
  int64_t pages = 0;
  return fields.size() > 1 && absl::SimpleAtoi(fields[1], &pages) ? pages * sysconf(_SC_PAGESIZE)
                                                                  : 0;
}

}  // namespace

std::vector<std::string> Soak(const SoakOptions& options) {
  std::vector<std::string> wrong;
  std::string logs;
  const absl::Time end = absl::Now() + options.duration;
  for (uint32_t seed = options.seed; absl::Now() < end; ++seed) {
    Plan plan = DrawPlan(seed);
    int64_t most = 0, most_agent = 0;
    chaos::Cluster* running = nullptr;
    for (int round = 1; round < plan.rounds; ++round) {
      plan.signals.push_back({.worker = 0, .round = round, .action = [&] {
                                most = std::max(most, Memory(running->coordinator().pid()));
                                for (const pid_t agent : running->AgentPids()) {
                                  most_agent = std::max(most_agent, Memory(agent));
                                }
                              }});
    }
    const std::string name = plan.name;
    chaos::Cluster cluster(std::move(plan));
    running = &cluster;
    std::vector<std::string> of_job;
    std::string counts;
    {
      Hostile hostile(cluster.address(), "chaos", seed);
      of_job = cluster.Run();
      for (const auto& [what, count] : hostile.counts())
        absl::StrAppend(&counts, ", ", what, " ", count);
    }
    // A drawn pass of a failpoint may lie behind the end of the run.
    std::erase_if(of_job,
                  [](const std::string& line) { return absl::StrContains(line, "was never"); });
    if (most > options.memory_bytes) {
      of_job.push_back(absl::StrCat("the coordinator held ", most >> 20, " MiB, more than ",
                                    options.memory_bytes >> 20));
    }
    // Hostile clients do not reach the agent: all its memory is for the job.
    if (most_agent > options.memory_bytes / 4) {
      of_job.push_back(absl::StrCat("an agent held ", most_agent >> 20, " MiB, more than ",
                                    options.memory_bytes >> 22));
    }
    options.report(absl::StrCat(name, ": ", of_job.empty() ? "good" : "WRONG", ", coordinator ",
                                cluster.coordinator_starts(), " starts, at most ", most >> 20,
                                " MiB, an agent ", most_agent >> 20, " MiB", counts));
    if (!of_job.empty() && logs.empty()) logs = cluster.Logs();
    for (const std::string& line : of_job) wrong.push_back(absl::StrCat(name, ": ", line));
  }
  if (!wrong.empty()) wrong.push_back(std::move(logs));
  return wrong;
}

}  // namespace muster::soak
