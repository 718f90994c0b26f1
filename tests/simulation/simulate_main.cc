// simulate [--seed=N] [--seeds=N] [--mutant=NAME] [--one_cut]: runs seeds N, N+1, ... of the
// simulation; with one seed it prints the whole trace. Exit code 1: a violation was found.
#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "tests/simulation/mutants.h"
#include "tests/simulation/simulator.h"

int main(int argc, char** argv) {
  muster::simulation::SimulationOptions options;
  uint64_t seeds = 1;
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg = argv[i];
    bool ok = true;
    if (absl::ConsumePrefix(&arg, "--seed=")) {
      ok = absl::SimpleAtoi(arg, &options.seed);
    } else if (absl::ConsumePrefix(&arg, "--seeds=")) {
      ok = absl::SimpleAtoi(arg, &seeds);
    } else if (absl::ConsumePrefix(&arg, "--mutant=")) {
      ok = muster::simulation::SetMutant(arg, &options);
    } else if (arg == "--one_cut") {
      options.one_cut = true;
    } else {
      ok = false;
    }
    if (!ok) {
      std::fprintf(stderr,
                   "simulate: %s is not understood; usage: simulate [--seed=N] [--seeds=N] "
                   "[--mutant=NAME] [--one_cut]\n",
                   argv[i]);
      return 2;
    }
  }
  options.trace = seeds == 1;
  const absl::Time begin = absl::Now();
  int64_t events = 0, operations = 0, restarts = 0, generations = 0, barriers = 0, watched = 0,
          resumed = 0, lost = 0, failed = 0;
  for (uint64_t i = 0; i < seeds; ++i, ++options.seed) {
    const muster::simulation::SimulationResult result = muster::simulation::Simulate(options);
    for (const std::string& line : result.trace) std::printf("%s\n", line.c_str());
    if (!result.violation.empty()) {
      ++failed;
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(options.seed),
                  result.violation.c_str());
    }
    events += result.events;
    operations += result.operations;
    restarts += result.restarts;
    generations += result.generations;
    barriers += result.barriers;
    watched += result.watch_events;
    resumed += result.resumed;
    lost += result.lost;
  }
  std::printf(
      "%llu seeds, %lld violations, %lld events, %lld operations, %lld restarts, %lld generations, "
      "%lld barriers passed, %lld watch events, %lld sessions resumed, %lld workers lost, "
      "%.1f s\n",
      static_cast<unsigned long long>(seeds), static_cast<long long>(failed),
      static_cast<long long>(events), static_cast<long long>(operations),
      static_cast<long long>(restarts), static_cast<long long>(generations),
      static_cast<long long>(barriers), static_cast<long long>(watched),
      static_cast<long long>(resumed), static_cast<long long>(lost),
      absl::ToDoubleSeconds(absl::Now() - begin));
  return failed == 0 ? 0 : 1;
}
