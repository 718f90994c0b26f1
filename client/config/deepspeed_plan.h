#ifndef MUSTER_CLIENT_CONFIG_DEEPSPEED_PLAN_H_
#define MUSTER_CLIENT_CONFIG_DEEPSPEED_PLAN_H_

#include <map>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "client/config/deepspeed_config.h"
#include "client/config/sharding_settings.h"

namespace muster::client {

struct DeepSpeedPlan {
  ShardingPlan plan;
  // Dotted keys of the sections "optimizer" and "scheduler" that are "auto", for the program to
  // fill in.
  std::set<std::string> autos;
};

// Returns what a program that is written with Muster makes of the variables of Accelerate's
// launcher for DeepSpeed (ACCELERATE_DEEPSPEED_...), in a process that has `process`. Used by the
// program to read its settings, and by commands that check them beforehand. Pure, except that it
// reads the file that ACCELERATE_DEEPSPEED_CONFIG_FILE names. Errors: those of
// DeepSpeedConfig::Resolve and MapDeepSpeed; INVALID_ARGUMENT if the file differs from `process`,
// or from the variables, in precision or accumulation.
absl::StatusOr<DeepSpeedPlan> PlanDeepSpeed(const std::map<std::string, std::string>& variables,
                                            const DeepSpeedContext& process);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_DEEPSPEED_PLAN_H_
