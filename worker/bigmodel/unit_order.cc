#include "worker/bigmodel/unit_order.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace muster {

std::string UnitOf(absl::string_view tensor) {
  const std::vector<absl::string_view> parts = absl::StrSplit(tensor, '.');
  size_t length = parts.size() - 1;
  for (size_t i = parts.size() - 1; i > 0; --i) {
    const absl::string_view part = parts[i - 1];
    if (part.empty() || !std::all_of(part.begin(), part.end(), absl::ascii_isdigit)) continue;
    length = i;
    break;
  }
  return absl::StrJoin(parts.begin(), parts.begin() + static_cast<int64_t>(length), ".");
}

UnitOrder::UnitOrder(size_t num_units) : units_(num_units) {}

void UnitOrder::Use(size_t unit) {
  Unit& used = units_[unit];
  if (!used.place.has_value()) {
    used.place = order_.size();
    order_.push_back(unit);
  } else if (*used.place < current_) {
    ++pass_;
  }
  current_ = *used.place;
  used.last_pass = pass_;
}

size_t UnitOrder::Distance(size_t unit) const {
  const std::optional<size_t> place = units_[unit].place;
  if (!place.has_value()) return units_.size();
  return (*place + order_.size() - current_) % order_.size();
}

std::optional<size_t> UnitOrder::Next(size_t ahead) const {
  if (order_.empty() || ahead == 0 || ahead >= order_.size()) return std::nullopt;
  const size_t place = current_ + ahead;
  const bool wraps = place >= order_.size();
  const size_t unit = order_[place % order_.size()];
  // Experts that the last pass did not use are not worth reading; the first pass says nothing.
  const int64_t expected = wraps ? pass_ : pass_ - 1;
  if (units_[unit].last_pass < expected) return std::nullopt;
  return unit;
}

}  // namespace muster
