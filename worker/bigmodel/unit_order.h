#ifndef MUSTER_WORKER_BIGMODEL_UNIT_ORDER_H_
#define MUSTER_WORKER_BIGMODEL_UNIT_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster {

// The unit that a tensor belongs to, by its name: up to the last number in it
// ("model.layers.3.mlp.up_proj.weight" is in "model.layers.3"), else its module.
std::string UnitOf(absl::string_view tensor);

// The order in which the units of a model are used, pass after pass, learned from the passes so
// far. Pure. Not thread-safe.
class UnitOrder {
 public:
  explicit UnitOrder(size_t num_units);

  // The program uses this unit. Uses in a row count once.
  void Use(size_t unit);

  // How many units the program is expected to use before this one: 0 for the unit in use. One that
  // has not been used yet is farthest.
  size_t Distance(size_t unit) const;
  // What is used after the unit in use, `ahead` places on, if the last pass used it as well.
  std::optional<size_t> Next(size_t ahead) const;

 private:
  struct Unit {
    std::optional<size_t> place = std::nullopt;  // in order_
    int64_t last_pass = -1;
  };
  std::vector<Unit> units_;
  std::vector<size_t> order_;
  size_t current_ = 0;  // place
  int64_t pass_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_UNIT_ORDER_H_
