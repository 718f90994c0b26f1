#include "worker/parallel/unit_turns.h"

#include <algorithm>
#include <utility>

namespace muster {

void UnitTurns::Begin() {
  noted_.clear();
  next_ = 0;
  lost_ = false;
}

void UnitTurns::Turn(uint32_t unit, bool note) {
  if (note && noted_.size() < kMostTurns) noted_.push_back(unit);
  const auto from = kept_.begin() + static_cast<ptrdiff_t>(next_);
  auto found = std::find(from, kept_.end(), unit);
  if (found == kept_.end()) {
    found = std::find(kept_.begin(), from, unit);
    lost_ = found == from;
    if (lost_) return;
  }
  lost_ = false;
  next_ = static_cast<size_t>(found - kept_.begin()) + 1;
}

absl::Span<const uint32_t> UnitTurns::Coming() const {
  if (lost_) return {};
  return absl::MakeConstSpan(kept_).subspan(next_);
}

void UnitTurns::Keep() {
  if (!noted_.empty()) kept_ = std::move(noted_);
  Begin();
}

void UnitTurns::Forget() {
  kept_.clear();
  Begin();
}

}  // namespace muster
