#include "worker/bigmodel/unit_plan.h"

#include <algorithm>
#include <map>

namespace muster {
namespace {

class Divider {
 public:
  Divider(const std::vector<std::pair<std::string, uint64_t>>& tensors, uint64_t most)
      : tensors_(tensors), most_(most) {}

  // `path`: that of the module that contains all of `parts`; empty, or with a dot at its end.
  void Divide(const std::string& path, const std::vector<size_t>& parts) {
    uint64_t bytes = 0;
    for (const size_t part : parts) bytes += tensors_[part].second;
    if (bytes <= most_) return Add(path, parts);
    std::vector<size_t> own;
    std::vector<std::string> names;  // names of submodules, in order
    std::map<std::string, std::vector<size_t>> below;
    for (const size_t part : parts) {
      const std::string& name = tensors_[part].first;
      const size_t dot = name.find('.', path.size());
      if (dot == std::string::npos) {
        own.push_back(part);
        continue;
      }
      const std::string child = name.substr(0, dot + 1);
      if (below[child].empty()) names.push_back(child);
      below[child].push_back(part);
    }
    Pack(own);
    for (const std::string& child : names) Divide(child, below[child]);
  }

  std::vector<UnitPlan> Take() {
    // Sort by the order of the model, as far as units are not inside of each other.
    std::stable_sort(units_.begin(), units_.end(), [](const UnitPlan& a, const UnitPlan& b) {
      return a.parts.front() < b.parts.front();
    });
    return std::move(units_);
  }

 private:
  void Add(const std::string& path, const std::vector<size_t>& parts) {
    if (parts.empty()) return;
    units_.push_back(
        {path.empty() ? tensors_[parts[0]].first : path.substr(0, path.size() - 1), parts});
  }

  void Pack(const std::vector<size_t>& parts) {
    uint64_t bytes = 0;
    std::vector<size_t> unit;
    for (const size_t part : parts) {
      if (!unit.empty() && bytes + tensors_[part].second > most_) {
        Add("", unit);
        unit.clear();
        bytes = 0;
      }
      unit.push_back(part);
      bytes += tensors_[part].second;
    }
    Add("", unit);
  }

  const std::vector<std::pair<std::string, uint64_t>>& tensors_;
  const uint64_t most_;
  std::vector<UnitPlan> units_;
};

}  // namespace

std::vector<UnitPlan> PlanOffloadUnits(const std::vector<std::pair<std::string, uint64_t>>& tensors,
                                       uint64_t most) {
  std::vector<size_t> all(tensors.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  Divider divider(tensors, most);
  divider.Divide("", all);
  return divider.Take();
}

}  // namespace muster
