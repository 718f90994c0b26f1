// The long set of the chaos tests: every failpoint with every action at drawn passes, plus workers,
// agents and the coordinator killed at drawn moments, and outages of a minute. See
// docs/failpoints.md.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "tests/chaos/cluster.h"
#include "tests/chaos/plans.h"

namespace muster::chaos {
namespace {

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
    std::vector<Plan> plans = LongPlans(seed);
    if (i == 0) {
      for (Plan& plan : OutagePlans(absl::Seconds(60))) plans.push_back(std::move(plan));
    }
    for (const Plan& plan : plans) {
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
