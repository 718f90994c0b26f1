#include "coordinator/incarnations.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace muster::coordinator {

bool Incarnations::IsFenced(absl::string_view worker_id, uint64_t incarnation) const {
  const auto it = fenced_.find(worker_id);
  return it != fenced_.end() &&
         std::find(it->second.begin(), it->second.end(), incarnation) != it->second.end();
}

void Incarnations::Fence(absl::string_view worker_id, uint64_t incarnation, size_t seats) {
  const auto [it, is_new] = fenced_.try_emplace(worker_id);
  it->second.push_back(incarnation);
  if (it->second.size() > kOfAWorker) it->second.erase(it->second.begin());
  if (!is_new) return;
  fenced_order_.emplace_back(worker_id);
  if (fenced_order_.size() <= kWorkers + 4 * seats) return;
  fenced_.erase(fenced_order_.front());
  fenced_order_.pop_front();
}

std::optional<uint64_t> Incarnations::Departed(absl::string_view worker_id) const {
  const auto it = departed_.find(worker_id);
  if (it == departed_.end()) return std::nullopt;
  return it->second;
}

void Incarnations::Depart(const std::string& worker_id, uint64_t incarnation) {
  departed_[worker_id] = incarnation;
  departed_order_.push_back(worker_id);
}

std::vector<std::string> Incarnations::ForgetOldest(size_t seats) {
  // Workers that came back leave the order; for one that left again, the last time counts.
  absl::flat_hash_set<absl::string_view> listed;
  std::deque<std::string> order;
  for (auto it = departed_order_.rbegin(); it != departed_order_.rend(); ++it) {
    if (departed_.contains(*it) && listed.insert(*it).second) order.push_front(*it);
  }
  departed_order_ = std::move(order);
  std::vector<std::string> forgotten;
  while (departed_order_.size() > kWorkers + 2 * seats) {
    departed_.erase(departed_order_.front());
    forgotten.push_back(std::move(departed_order_.front()));
    departed_order_.pop_front();
  }
  return forgotten;
}

}  // namespace muster::coordinator
