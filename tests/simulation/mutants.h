#ifndef MUSTER_TESTS_SIMULATION_MUTANTS_H_
#define MUSTER_TESTS_SIMULATION_MUTANTS_H_

#include "absl/strings/string_view.h"
#include "tests/simulation/simulator.h"

namespace muster::simulation {

struct Mutant {
  const char* name;
  void (*set)(SimulationOptions* options);
};

inline constexpr Mutant kMutants[] = {
    {"barrier_releases_one_early",
     [](SimulationOptions* options) { options->mutants.barrier_releases_one_early = true; }},
    {"acknowledges_before_durable",
     [](SimulationOptions* options) { options->mutants.acknowledges_before_durable = true; }},
    {"accepts_stale_generation",
     [](SimulationOptions* options) { options->mutants.accepts_stale_generation = true; }},
    {"watch_skips_a_revision",
     [](SimulationOptions* options) { options->mutants.watch_skips_a_revision = true; }},
    {"dead_incarnation_renews_lease",
     [](SimulationOptions* options) { options->mutants.dead_incarnation_renews_lease = true; }},
    {"trigger_below_a_horizon",
     [](SimulationOptions* options) { options->mutants.trigger_below_a_horizon = true; }},
    {"ignores_recall", [](SimulationOptions* options) { options->mutants.ignores_recall = true; }},
    {"spare_moves_survivors",
     [](SimulationOptions* options) { options->mutants.spare_moves_survivors = true; }},
    {"forgets_departed",
     [](SimulationOptions* options) { options->mutants.forgets_departed = true; }},
    {"applies_frames_again",
     [](SimulationOptions* options) { options->applies_frames_again = true; }},
};

// Switches the fault of this name on; false: there is none.
inline bool SetMutant(absl::string_view name, SimulationOptions* options) {
  for (const Mutant& mutant : kMutants) {
    if (name != mutant.name) continue;
    mutant.set(options);
    return true;
  }
  return false;
}

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_MUTANTS_H_
