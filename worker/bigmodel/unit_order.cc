#include "worker/bigmodel/unit_order.h"

namespace muster {

void UnitOrder::Note(size_t unit) {
  if (unit == last_) return;
  if (last_ != kNone) {
    after_two_[{before_, last_}] = unit;
    after_one_[last_] = unit;
  }
  before_ = last_;
  last_ = unit;
}

size_t UnitOrder::After(size_t before, size_t unit) const {
  if (unit == kNone) return 0;
  if (const auto it = after_two_.find({before, unit}); it != after_two_.end()) return it->second;
  if (const auto it = after_one_.find(unit); it != after_one_.end()) return it->second;
  return (unit + 1) % units_;
}

std::vector<size_t> UnitOrder::Coming() const {
  std::vector<size_t> coming;
  std::vector<bool> seen(units_, false);
  if (last_ != kNone) seen[last_] = true;
  size_t before = before_, unit = last_;
  // Units that are used several times in a pass occur several times.
  for (size_t step = 0; step < 3 * units_ && coming.size() < units_; ++step) {
    const size_t next = After(before, unit);
    before = unit;
    unit = next;
    if (seen[unit]) continue;
    seen[unit] = true;
    coming.push_back(unit);
  }
  return coming;
}

}  // namespace muster
