#ifndef MUSTER_WORKER_COLLECTIVE_HOST_LANES_H_
#define MUSTER_WORKER_COLLECTIVE_HOST_LANES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace muster {

// The hosts of the ranks of a group. Hosts are in the order of their lowest ranks, and the ranks of
// a host in ascending order.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  // ranks
  std::vector<int> host_of;             // by rank
  std::vector<int> local_of;            // by rank: its place on its host

  int size() const { return static_cast<int>(host_of.size()); }
  int ranks_on(int host) const { return static_cast<int>(hosts[host].size()); }
};

// identities[r]: a text that rank r has in common with the ranks of its host, and with no other.
HostLayout GroupIntoHosts(const std::vector<std::string>& identities);

// A share of the data that hosts send each other, carried by one rank of each host. Every rank of
// every host carries the same amount, even if hosts have unequal numbers of ranks.
struct Lane {
  // The share of a payload: from begin to end of its length, as fractions.
  int64_t begin = 0, begin_of = 1;
  int64_t end = 1, end_of = 1;
  std::vector<int> ranks;  // by host

  // The range [first, last) of `count` elements. A payload of n equal parts for the n ranks of a
  // host is cut at the parts: each lane lies in the part of the rank that carries it there.
  std::pair<int64_t, int64_t> Of(int64_t count) const {
    return {count * begin / begin_of, count * end / end_of};
  }
};

// Returns all lanes, in order; together they are the whole payload.
std::vector<Lane> MakeLanes(const HostLayout& layout);

// Returns the share of host `host` of `hosts`: [first, last) of `count` elements.
inline std::pair<int64_t, int64_t> ShareOf(int64_t count, int host, int hosts) {
  return {count * host / hosts, count * (host + 1) / hosts};
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_HOST_LANES_H_
