#ifndef MUSTER_WORKER_BIGMODEL_UNIT_PLAN_H_
#define MUSTER_WORKER_BIGMODEL_UNIT_PLAN_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace muster {

// Tensors that come and go together.
struct UnitPlan {
  std::string name;           // of the module; of a part of a module's own tensors the first one's
  std::vector<size_t> parts;  // places in the list that was given
};

// Divides tensors, by dotted names with their sizes and in the order of the model, into units of at
// most `most` bytes where tensors are not larger by themselves: whole modules where they fit, else
// their submodules and their own tensors. Pure.
std::vector<UnitPlan> PlanOffloadUnits(const std::vector<std::pair<std::string, uint64_t>>& tensors,
                                       uint64_t most);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_UNIT_PLAN_H_
