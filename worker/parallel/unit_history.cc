#include "worker/parallel/unit_history.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

constexpr char kDifferent[] = "the ranks used the units of the sharded model in different orders";
constexpr char kAdvice[] = "; run the same submodules in the same order on every rank";

}  // namespace

void UnitHistory::Add(uint32_t event) {
  digest_.Add(event);
  ++size_;
  if (events_.size() < kListed) events_.push_back(event);
}

std::string UnitHistory::Difference(const std::vector<std::vector<uint32_t>>& of_ranks,
                                    const std::function<std::string(uint32_t unit)>& name) {
  const auto text = [&](const std::vector<uint32_t>& events, size_t i) {
    if (i >= events.size()) return std::string("nothing more");
    return absl::StrCat(events[i] % 2 == 1 ? "reduced" : "gathered", " unit '", name(events[i] / 2),
                        "'");
  };
  const std::vector<uint32_t>& first = of_ranks.front();
  for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
    const std::vector<uint32_t>& other = of_ranks[rank];
    const auto [at, end] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    if (at == first.end() && end == other.end()) continue;
    const auto place = static_cast<size_t>(at - first.begin());
    return absl::StrCat(kDifferent, ": as number ", place, " in this step rank 0 ",
                        text(first, place), " and rank ", rank, " ", text(other, place), kAdvice);
  }
  return absl::StrCat(kDifferent, ", after ", first.size(), " uses without a backward pass",
                      kAdvice);
}

}  // namespace muster
