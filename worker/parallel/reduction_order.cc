#include "worker/parallel/reduction_order.h"

#include <algorithm>
#include <limits>

namespace muster {
namespace {

constexpr uint32_t kAtTheEnd = std::numeric_limits<uint32_t>::max();

}  // namespace

ReductionOrder::ReductionOrder(size_t units) : units_(units) {}

std::vector<uint32_t> ReductionOrder::FirstProposal(const std::vector<uint32_t>& used) const {
  std::vector<uint32_t> order;
  std::vector<bool> listed(units_.size());
  for (const uint32_t unit : used) {
    if (!listed[unit]) order.push_back(unit);
    listed[unit] = true;
  }
  std::reverse(order.begin(), order.end());
  for (size_t i = units_.size(); i-- > 0;) {
    if (!listed[i]) order.push_back(static_cast<uint32_t>(i));
  }
  return order;
}

void ReductionOrder::TakeFirst(const std::vector<uint32_t>& order) {
  order_.assign(order.begin(), order.end());
  due_.assign(order_.size(), kAtTheEnd);
  next_ = 0;
}

std::vector<uint32_t> ReductionOrder::Proposal(bool once) const {
  std::vector<uint32_t> order;
  const auto at_the_end = [&](const Unit& unit) {
    return !unit.complete || (once && unit.arrived > unit.expected);
  };
  for (const Completed& completed : completed_) {
    if (at_the_end(units_[completed.unit])) continue;
    order.push_back(static_cast<uint32_t>(completed.unit));
    order.push_back(completed.turn);
  }
  for (size_t i = units_.size(); i-- > 0;) {
    if (!at_the_end(units_[i])) continue;
    order.push_back(static_cast<uint32_t>(i));
    order.push_back(kAtTheEnd);
  }
  return order;
}

void ReductionOrder::Take(const std::vector<uint32_t>& order) {
  order_.clear();
  due_.clear();
  for (size_t i = 0; i + 1 < order.size(); i += 2) {
    order_.push_back(order[i]);
    due_.push_back(order[i + 1]);
  }
  next_ = order_.size();
  known_ = true;
}

void ReductionOrder::MoveToTheEnd(size_t unit) {
  const auto at = std::find(order_.begin(), order_.end(), unit) - order_.begin();
  order_.erase(order_.begin() + at);
  due_.erase(due_.begin() + at);
  order_.push_back(unit);
  due_.push_back(kAtTheEnd);
}

void ReductionOrder::BeginPass() {
  completed_.clear();
  next_ = 0;
  for (Unit& unit : units_) {
    unit.arrived = 0;
    unit.complete = unit.taken = unit.late = false;
  }
}

bool ReductionOrder::Arrive(size_t unit) {
  if (++units_[unit].arrived != units_[unit].expected) return false;
  units_[unit].complete = true;
  completed_.push_back({unit, turns_});
  return true;
}

bool ReductionOrder::NoteUsed(size_t unit) {
  units_[unit].late = units_[unit].late || units_[unit].taken;
  return units_[unit].taken;
}

std::vector<uint32_t> ReductionOrder::Late() const {
  std::vector<uint32_t> late;
  for (size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].late) late.push_back(static_cast<uint32_t>(i));
  }
  return late;
}

void ReductionOrder::TurnTo(size_t unit) {
  units_[unit].turned_to = true;
  ++turns_;
}

void ReductionOrder::ForgetTurns() {
  turns_ = 0;
  for (Unit& unit : units_) unit.turned_to = false;
}

bool ReductionOrder::NextIsComplete() const {
  if (next_ == order_.size()) return false;
  const Unit& next = units_[order_[next_]];
  return next.complete || next.expected == 0;
}

size_t ReductionOrder::Complete() const {
  size_t end = next_;
  for (; end < order_.size(); ++end) {
    const Unit& unit = units_[order_[end]];
    if (unit.complete || unit.expected == 0) continue;
    // A unit that this rank leaves out gets no gradients; gradients of the next one show that.
    const auto next = std::find_if(order_.begin() + static_cast<ptrdiff_t>(end) + 1, order_.end(),
                                   [this](size_t i) { return ExpectsAny(i); });
    if (unit.arrived == 0 || next == order_.end() || units_[*next].arrived == 0) break;
  }
  return end;
}

size_t ReductionOrder::Next() {
  const size_t unit = order_[next_++];
  units_[unit].taken = true;
  return unit;
}

}  // namespace muster
