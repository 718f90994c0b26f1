// The long set of the chaos tests: every failpoint with every action at drawn passes, with workers
// and the coordinator killed at drawn moments besides. See docs/failpoints.md.
#include <csignal>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "tests/chaos/cluster.h"
#include "tests/chaos/plans.h"

namespace muster::chaos {
namespace {

int Between(std::mt19937& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

// One plan for each failpoint and action, drawn from `seed`.
std::vector<Plan> DrawPlans(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Plan> plans;
  const auto draw = [&](const std::string& name, bool of_coordinator) {
    std::vector<std::string> actions = {"kill", "stop", "delay:100ms"};
    if (of_coordinator && FindFailpoint(name)->fails) {
      for (const char* action : {"error", "error:RESOURCE_EXHAUSTED", "error:DATA_LOSS"}) {
        actions.push_back(action);
      }
    }
    for (const std::string& action : actions) {
      const int at = Between(random, 0, 3) == 0 ? 0 : Between(random, 1, 40);
      Plan plan = of_coordinator ? CoordinatorPlan(name, action, at) : WorkerPlan(name, action, at);
      plan.name = absl::StrCat(name, "=", action, "@", at);
      plan.workers = Between(random, 2, 4);
      plan.timeout = absl::Seconds(120);
      // What else happens in the meantime.
      for (int more = Between(random, 0, 2); more > 0; --more) {
        const int target = Between(random, -1, plan.workers - 1);
        plan.signals.push_back({.worker = Between(random, 0, plan.workers - 1),
                                .round = Between(random, 0, plan.rounds - 1),
                                .target = target,
                                .signal = SIGKILL});
      }
      plans.push_back(std::move(plan));
    }
  };
  for (const std::string& name : CoordinatorFailpoints()) draw(name, true);
  for (const std::string& name : WorkerFailpoints()) draw(name, false);
  return plans;
}

int Main(int argc, char** argv) {
  uint32_t seed = 1;
  int rounds = 1;
  std::string only;
  CLI::App app("Runs the long set of the chaos tests.");
  app.add_option("--seed", seed, "of the first round; each further one has the next")
      ->capture_default_str();
  app.add_option("--rounds", rounds, "how many")->capture_default_str();
  app.add_option("--only", only, "only plans with this in their name");
  CLI11_PARSE(app, argc, argv);
  int runs = 0, failed = 0, unreached = 0;
  for (int i = 0; i < rounds; ++i, ++seed) {
    for (const Plan& plan : DrawPlans(seed)) {
      if (!absl::StrContains(plan.name, only)) continue;
      Cluster cluster(plan);
      bool bad = false;
      for (const std::string& wrong : cluster.Run()) {
        // A drawn pass may lie behind the end of the run.
        if (absl::StrContains(wrong, "was never")) {
          ++unreached;
          continue;
        }
        std::printf("seed %u, %s: %s\n", seed, plan.name.c_str(), wrong.c_str());
        bad = true;
      }
      ++runs;
      if (bad) {
        ++failed;
        std::printf("%s\n", cluster.Logs().c_str());
      }
      std::fflush(stdout);
    }
    std::printf("seed %u: %d runs, %d failed, %d failpoints or signals not reached\n", seed, runs,
                failed, unreached);
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace muster::chaos

int main(int argc, char** argv) { return muster::chaos::Main(argc, argv); }
