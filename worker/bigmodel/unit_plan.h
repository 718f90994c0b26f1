#ifndef MUSTER_WORKER_BIGMODEL_UNIT_PLAN_H_
#define MUSTER_WORKER_BIGMODEL_UNIT_PLAN_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace muster {

// Tensors that are loaded and evicted together.
struct UnitPlan {
  // The name of the module, or, for a part of a module's own tensors, of the first tensor.
  std::string name;
  std::vector<size_t> parts;  // positions in the list that was given
};

// Divides tensors, by dotted names with their sizes and in the order of the model, into units of at
// most `most` bytes (a larger tensor is a unit of its own): whole modules if they fit, otherwise
// their submodules and their own tensors. Pure.
std::vector<UnitPlan> PlanOffloadUnits(const std::vector<std::pair<std::string, uint64_t>>& tensors,
                                       uint64_t most);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_UNIT_PLAN_H_
