#ifndef MUSTER_TESTS_SIMULATION_SIMULATOR_H_
#define MUSTER_TESTS_SIMULATION_SIMULATOR_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/core.h"

namespace muster::simulation {

struct SimulationOptions {
  uint64_t seed = 1;
  coordinator::Mutants mutants;
  bool applies_frames_again = false;       // a fault too: repeated frames of an agent are applied
                                           // again
  bool hub_speaks_for_the_silent = false;  // repeats what agents said with earlier beats
  // Nothing happens but one cut between the coordinator and all others, longer than the lease and
  // shorter than the outage_tolerance.
  bool one_cut = false;
  absl::Duration chaos = absl::Seconds(12);  // virtual; after it everything is healed
  bool trace = false;
};

// The faults, which docs/simulation.md describes.
inline constexpr const char* kFaults[] = {
    "delayed",      "dropped",    "repeated",    "overtaken", "partitioned",       "half-open",
    "broke stream", "lost tail",  "torn tail",   "disk full", "torn by full disk", "disk failed",
    "slow fsync",   "hub killed", "hub stopped", "moved",     "checkpoint damaged"};

struct SimulationResult {
  std::string violation;           // empty: none
  std::vector<std::string> trace;  // with `trace`
  uint64_t digest = 0;  // of everything that was answered, in order: equal for equal seeds
  int64_t events = 0;
  int64_t operations = 0;  // handled by the core
  int64_t restarts = 0;
  int64_t generations = 0;
  int64_t barriers = 0;     // passed
  int64_t checkpoints = 0;  // sealed
  int64_t lost = 0;         // workers that were given up
  int64_t watch_events = 0;
  int64_t through_hubs = 0;  // operations that hubs sent for other agents
  int64_t resumed = 0;       // agents' sessions that went on with another stream
  // How often each fault of network, disk and files happened; has all of kFaults.
  std::map<std::string, int64_t> faults;
};

// Runs one coordinator core with its journal, several workers, agents and hubs, an operator and
// watchers under virtual time, with a network that delays, drops, duplicates, reorders and
// partitions, a disk that loses, tears, fills and stalls, and processes that crash, pause and come
// back as zombies, all drawn from the seed. Checks while it runs and at the end (docs/simulation.md
// lists the rules). Stops at the first violation.
SimulationResult Simulate(const SimulationOptions& options);

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_SIMULATOR_H_
