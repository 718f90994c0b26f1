#ifndef MUSTER_WORKER_COLLECTIVE_HOST_LANES_H_
#define MUSTER_WORKER_COLLECTIVE_HOST_LANES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace muster {

// Which ranks of a group are on which host. Hosts are in the order of their lowest ranks, ranks of
// a host in theirs.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  // ranks
  std::vector<int> host_of;             // by rank
  std::vector<int> local_of;            // by rank: its place on its host

  int size() const { return static_cast<int>(host_of.size()); }
  int ranks_on(int host) const { return static_cast<int>(hosts[host].size()); }
};

// identities[r]: what rank r has in common with the ranks of its host, and with no other.
HostLayout GroupIntoHosts(const std::vector<std::string>& identities);

// A share of what hosts send each other, which one rank of each host carries, so that every rank
// of every host has the same amount to carry, also where hosts have unequal numbers of ranks.
struct Lane {
  // The share of a payload: from begin to end of its length, as fractions.
  int64_t begin = 0, begin_of = 1;
  int64_t end = 1, end_of = 1;
  std::vector<int> ranks;  // by host

  // [first, last) of `count` elements. A payload that is n equal parts for the n ranks of a host is
  // cut at the parts: each lane lies in that of the rank that carries it there.
  std::pair<int64_t, int64_t> Of(int64_t count) const {
    return {count * begin / begin_of, count * end / end_of};
  }
};

// All lanes, in order; together they are the whole payload.
std::vector<Lane> MakeLanes(const HostLayout& layout);

// [first, last) of `count` elements: the share of host `host` of `hosts`.
inline std::pair<int64_t, int64_t> ShareOf(int64_t count, int host, int hosts) {
  return {count * host / hosts, count * (host + 1) / hosts};
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_HOST_LANES_H_
