#ifndef MUSTER_TESTS_SIMULATION_MUTANTS_H_
#define MUSTER_TESTS_SIMULATION_MUTANTS_H_

#include "absl/strings/string_view.h"
#include "tests/simulation/simulator.h"

namespace muster::simulation {

struct Mutant {
  const char* name;
  const char* caught_by;  // a part of what the responsible checker says
  void (*set)(SimulationOptions* options);
};

inline constexpr Mutant kMutants[] = {
    {"barrier_releases_one_early", "was released before rank",
     [](SimulationOptions* options) { options->mutants.barrier_releases_one_early = true; }},
    {"acknowledges_before_durable", "but after the crash it is at",
     [](SimulationOptions* options) { options->mutants.acknowledges_before_durable = true; }},
    {"accepts_stale_generation", "was accepted in generation",
     [](SimulationOptions* options) { options->mutants.accepts_stale_generation = true; }},
    {"watch_skips_a_revision", "without revision",
     [](SimulationOptions* options) { options->mutants.watch_skips_a_revision = true; }},
    {"dead_incarnation_renews_lease", "although a newer incarnation sits in its place",
     [](SimulationOptions* options) { options->mutants.dead_incarnation_renews_lease = true; }},
    {"trigger_below_a_horizon", "learns only now that trigger",
     [](SimulationOptions* options) { options->mutants.trigger_below_a_horizon = true; }},
    {"ignores_recall", " and as ERROR_REASON_",
     [](SimulationOptions* options) { options->mutants.ignores_recall = true; }},
    {"spare_moves_survivors", "in the next",
     [](SimulationOptions* options) { options->mutants.spare_moves_survivors = true; }},
    {"forgets_departed", "although a newer incarnation sits in its place",
     [](SimulationOptions* options) { options->mutants.forgets_departed = true; }},
    {"seals_before_coverage", "ranks had written their shards",
     [](SimulationOptions* options) { options->mutants.seals_before_coverage = true; }},
    {"deletes_last_resumable", "a resume finds no checkpoint",
     [](SimulationOptions* options) { options->mutants.deletes_last_resumable = true; }},
    {"resumes_from_damaged", "that is known to be damaged",
     [](SimulationOptions* options) { options->mutants.resumes_from_damaged = true; }},
    {"resumes_from_held_back", "that is held back",
     [](SimulationOptions* options) { options->mutants.resumes_from_held_back = true; }},
    {"deletes_before_seal", "newer ones are",
     [](SimulationOptions* options) { options->mutants.deletes_before_seal = true; }},
    {"deletes_pinned", "is pinned and is to be deleted",
     [](SimulationOptions* options) { options->mutants.deletes_pinned = true; }},
    {"forgets_damage", "was reported and is forgotten",
     [](SimulationOptions* options) { options->mutants.forgets_damage = true; }},
    {"sizes_clear_damage", "was reported and is forgotten",
     [](SimulationOptions* options) { options->mutants.sizes_clear_damage = true; }},
    {"sizes_count_as_contents", "that nobody has read",
     [](SimulationOptions* options) { options->mutants.sizes_count_as_contents = true; }},
    {"applies_frames_again", "was applied twice",
     [](SimulationOptions* options) { options->applies_frames_again = true; }},
    {"hub_speaks_for_the_silent", "has said nothing since",
     [](SimulationOptions* options) { options->hub_speaks_for_the_silent = true; }},
};

// Switches the fault of this name on. Returns false if there is none.
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
