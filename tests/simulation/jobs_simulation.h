#ifndef MUSTER_TESTS_SIMULATION_JOBS_SIMULATION_H_
#define MUSTER_TESTS_SIMULATION_JOBS_SIMULATION_H_

#include <cstdint>
#include <string>

#include "coordinator/jobs/jobs_core.h"

namespace muster::simulation {

struct JobsSimulationResult {
  std::string violation;  // empty: none
  int events = 0;
  int attempts = 0;
  int restarts = 0;  // of the coordinator
  int lost_nodes = 0;
  int stepped = 0;  // attempts that have reported a step
  int resizes = 0;  // attempts that follow one that was stopped for another size
  int hangs = 0;    // hangs that were followed by a restart
  int restarts_in_place = 0;
  int counted = 0;     // counted restarts of jobs
  int free = 0;        // attempts that follow another one without being counted
  int promotions = 0;  // nodes of attempts that were spares of the attempt before
};

// Simulates a few nodes and jobs with one seed: replies and calls are lost, nodes restart, lose
// their records or fall silent, the coordinator crashes between any two records, and jobs are
// cancelled, suspended, retried, resized and grow. In the end there are no more faults until all
// jobs have ended.
//
// Rules that always hold: An attempt starts at most once on a node. An attempt starts only when the
// groups of all earlier ones are closed and nothing of them is left on nodes that were not lost. It
// has as many processes as the job requests. No node gets more than it has room for, and no other
// job uses the room of a spare. An attempt that must not be retried is not; each restart that
// counts is counted, also within an attempt that continues, and no failure is counted twice; a
// start that is not counted follows only what the program could not prevent. The stages of attempts
// are in the order of their times. A core made from the journal knows what the former one has
// reported. In the end every job has ended, and each job that succeeded had an attempt all of whose
// processes succeeded.
JobsSimulationResult RunJobsSimulation(uint64_t seed, coordinator::JobsMutants mutants);

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_JOBS_SIMULATION_H_
