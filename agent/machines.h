#ifndef MUSTER_AGENT_MACHINES_H_
#define MUSTER_AGENT_MACHINES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::agent {

// What follows from the machines of a job: the agents that have a place in it (rank >= 0), and
// those that wait for one. Between two generations a machine may be both: it keeps its seat in the
// ended one until the next one is sealed. All functions are pure.

// Returns whether the launch that hosts the coordinator has a place, or waits for one, or has had
// one: then others have it now.
bool CoordinatorsLaunchHasCome(const std::vector<v1::Member>& machines);

// For an agent that starts again after all machines had arrived at the end of the job: returns
// whether its last start, heard less than `within` ago, died before it could leave. Not if a
// machine waits: it waits for others, perhaps for this one.
bool DiedBeforeItLeft(const std::vector<v1::Member>& machines, const std::string& worker_id,
                      absl::Duration within);

// The machines that have the places of a job, as one without a place sees them.
struct Others {
  int running = 0;
  bool any_waits = false;
  bool meet_again = false;  // their generation has ended, and one of them waits for the next one
};
// A machine that was last heard more than `silent_after` ago does not run: between two generations
// the seat of a lost machine stays taken, so only its silence shows the loss.
Others LookAtOthers(const std::vector<v1::Member>& machines, absl::Duration silent_after);

// Whether other machines of an attempt live, at a moment `elapsed` ago or later.
struct Signs {
  std::optional<v1::Member> lost;  // the first one that does not run
  bool all_heard = false;          // since that moment, if none is lost
};
Signs SignsOfOthers(const std::vector<v1::Member>& machines, const std::string& self,
                    absl::Duration elapsed);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_MACHINES_H_
