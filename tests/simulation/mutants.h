#ifndef MUSTER_TESTS_SIMULATION_MUTANTS_H_
#define MUSTER_TESTS_SIMULATION_MUTANTS_H_

#include "absl/strings/string_view.h"
#include "coordinator/core.h"

namespace muster::simulation {

inline constexpr const char* kMutants[] = {
    "barrier_releases_one_early", "acknowledges_before_durable", "accepts_stale_generation",
    "watch_skips_a_revision", "dead_incarnation_renews_lease"};

// Switches the fault of this name on; false: there is none.
inline bool SetMutant(absl::string_view name, coordinator::Mutants* mutants) {
  if (name == kMutants[0])
    mutants->barrier_releases_one_early = true;
  else if (name == kMutants[1])
    mutants->acknowledges_before_durable = true;
  else if (name == kMutants[2])
    mutants->accepts_stale_generation = true;
  else if (name == kMutants[3])
    mutants->watch_skips_a_revision = true;
  else if (name == kMutants[4])
    mutants->dead_incarnation_renews_lease = true;
  else
    return false;
  return true;
}

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_MUTANTS_H_
