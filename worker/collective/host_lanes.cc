#include "worker/collective/host_lanes.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace muster {

HostLayout GroupIntoHosts(const std::vector<std::string>& identities) {
  HostLayout layout;
  std::map<std::string, int> known;
  for (size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [place, fresh] =
        known.emplace(identities[rank], static_cast<int>(layout.hosts.size()));
    if (fresh) layout.hosts.emplace_back();
    std::vector<int>& ranks = layout.hosts[place->second];
    layout.host_of.push_back(place->second);
    layout.local_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
  return layout;
}

std::vector<Lane> MakeLanes(const HostLayout& layout) {
  // Cut wherever the part of a rank of some host ends. In lowest terms, so that equal cuts compare
  // equal.
  std::vector<std::pair<int64_t, int64_t>> cuts;
  for (size_t host = 0; host < layout.hosts.size(); ++host) {
    const int64_t ranks = layout.ranks_on(static_cast<int>(host));
    for (int64_t part = 0; part <= ranks; ++part) {
      const int64_t common = std::gcd(part, ranks);
      cuts.emplace_back(part / common, ranks / common);
    }
  }
  std::sort(cuts.begin(), cuts.end(),
            [](const auto& a, const auto& b) { return a.first * b.second < b.first * a.second; });
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<Lane> lanes;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Lane lane;
    std::tie(lane.begin, lane.begin_of) = cuts[i];
    std::tie(lane.end, lane.end_of) = cuts[i + 1];
    for (size_t host = 0; host < layout.hosts.size(); ++host) {
      const int64_t ranks = layout.ranks_on(static_cast<int>(host));
      lane.ranks.push_back(layout.hosts[host][lane.begin * ranks / lane.begin_of]);
    }
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

}  // namespace muster
