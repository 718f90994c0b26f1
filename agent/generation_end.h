#ifndef MUSTER_AGENT_GENERATION_END_H_
#define MUSTER_AGENT_GENERATION_END_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "agent/job_coordination.h"
#include "proto/muster/v1/error.pb.h"

namespace muster::agent {

// How an attempt has ended, from what the coordinator says about the end of its generation in the
// agents' job. The key "end", where an agent writes the cause, is deleted with its generation, so
// the agent that ends the generation states the cause again, in words, because logs show them.
// `elastic`: the number of machines varies. All functions are pure.

// Returns the reason for which an agent ends the generation of an attempt that has ended so.
std::string AnotherBegins(const AttemptEnd& end);

// Returns how the attempt has ended whose generation the coordinator has ended for `why`.
// `has_culprit`: because members of the generation were lost or failed; otherwise another agent has
// requested it, with the words of AnotherBegins unless it gave up.
AttemptEnd EndOfGeneration(bool elastic, std::string why, bool has_culprit);

// Returns how the attempt has ended if a call of its generation was refused with `status`; nullopt
// if the error does not say that it has.
std::optional<AttemptEnd> EndOfRefused(bool elastic, const absl::Status& status);

// Returns whether the coordinator has ended this node's place in the job, or given it to another
// one.
bool IsCutOff(v1::ErrorReason reason);

// Returns whether a call was refused because members of its generation were lost or failed.
bool HasCulprit(const absl::Status& status);

// Returns a refusal of the rendezvous in the words of a launch: the workers of the agents' job are
// machines, and min_workers is not a setting of a launch.
std::string OfMachines(absl::string_view refusal);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_GENERATION_END_H_
