// The long set of checkpoint_crash_test: ranks, agents and the coordinator killed at drawn moments
// of saves. See docs/failpoints.md.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "tests/chaos/crash_plans.h"

namespace muster::chaos {
namespace {

int Main(int argc, char** argv) {
  uint32_t seed = 1;
  int runs = 1000;
  CLI::App app("Kills ranks, agents and the coordinator at drawn moments of saves.");
  app.add_option("--seed", seed, "of the moments")->capture_default_str();
  app.add_option("--runs", runs, "how many")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  int failed = 0, unreached = 0, done = 0;
  for (const CrashPlan& plan : DrawnCrashPlans(seed, runs)) {
    bool reached = false;
    std::string logs;
    const std::vector<std::string> wrong = RunCrashPlan(plan, &reached, &logs);
    for (const std::string& what : wrong) {
      std::printf("%s: %s\n", plan.plan.name.c_str(), what.c_str());
    }
    if (!wrong.empty()) std::printf("%s\n", logs.c_str());
    if (!reached) std::printf("%s: this moment never came\n", plan.plan.name.c_str());
    failed += wrong.empty() ? 0 : 1;
    unreached += reached ? 0 : 1;
    if (++done % 20 == 0 || done == runs) {
      std::printf("%d runs, %d failed, %d moments not reached\n", done, failed, unreached);
    }
    std::fflush(stdout);
  }
  // Crashes that were not reached have tested nothing.
  return failed == 0 && unreached == 0 ? 0 : 1;
}

}  // namespace
}  // namespace muster::chaos

int main(int argc, char** argv) { return muster::chaos::Main(argc, argv); }
