#ifndef MUSTER_WORKER_PARALLEL_SHARD_PLAN_H_
#define MUSTER_WORKER_PARALLEL_SHARD_PLAN_H_

#include <set>
#include <string>
#include <vector>

#include "worker/parallel/shard_unit.h"
#include "worker/parallel/sharding_options.h"

namespace torch::nn {
class Module;
}

namespace muster {

// The parameters of one unit.
struct PlannedUnit {
  std::string name;  // of its module; "(rest)" for the parameters that are in no other unit
  std::vector<NamedParameter> parameters;
  bool whole = false;  // for ignored modules and parameters: it is not divided
};

// Returns the full names of the modules that `options` make units, nested or not.
std::set<std::string> UnitModules(const torch::nn::Module& module, const ShardingOptions& options);
// Returns the full names of the modules of the classes `types`. Throws c10::Error for a class that
// the model does not have, naming `option` and the classes that it has.
std::set<std::string> ModulesOfTypes(const torch::nn::Module& module,
                                     const std::vector<std::string>& types,
                                     const std::string& option);

// Returns the `names` of buffers or parameters that are inside a module that
// `options.ignored_modules` matches. Throws c10::Error for a pattern that matches no module.
std::set<std::string> InIgnoredModules(const torch::nn::Module& module,
                                       const std::vector<std::string>& names,
                                       const ShardingOptions& options);

// Divides `parameters` (full names, those of `module`) into units according to `options`: in the
// order of the modules, the rest at the end, parameters of different dtype or device apart. A
// tensor that occurs twice (tied weights) counts where it occurs first. Parameters that
// `ignored_parameters` matches, or of modules that `ignored_modules` matches, under any of their
// names, are separate units at the end. `module` null (TorchScript): one unit. Throws c10::Error
// for a rule that matches nothing, naming what it could match.
std::vector<PlannedUnit> PlanUnits(torch::nn::Module* module,
                                   const std::vector<NamedParameter>& parameters,
                                   const ShardingOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_PLAN_H_
