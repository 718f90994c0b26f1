#ifndef MUSTER_COORDINATOR_SEATING_H_
#define MUSTER_COORDINATOR_SEATING_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/rendezvous.pb.h"

namespace muster::coordinator {

// A candidate for a seat in the next generation.
struct Candidate {
  std::string worker_id;
  v1::Topology topology;
  int preferred_rank = -1;  // -1: none
  int previous_rank = -1;   // a survivor's rank in the last generation; -1: it had none
  bool spare = false;       // takes a seat only if needed
  // Whether the host is quarantined automatically: takes a seat only if nothing else helps.
  bool last_resort = false;
  uint64_t order = 0;  // place in the order of arrival
};

// The worker of a rank in the last generation, and its location: its replacement should be nearby.
struct FormerSeat {
  std::string worker_id;
  std::string host;
  std::string rack;
  std::string nvlink_domain;
};

// Returns how large a world these workers can form; nullopt: none yet. It is the largest multiple
// of divisible_by within [min_workers, max_workers] that ordinary workers fill, or that they and
// spares fill up to `former_world`, the last generation's size without the workers that left on
// purpose (0: none); if that does not reach min_workers, it is the smallest that last resorts make
// possible.
std::optional<int> FeasibleWorld(const v1::RendezvousSpec& spec, int former_world, int ordinary,
                                 int spares, int last_resorts);

// The ranks that candidates get, and why.
struct Seating {
  std::vector<int> seats;  // at index `rank`, the index of the candidate
  // At the index of a candidate: why it has its rank, or why it has none, in words.
  std::vector<std::string> why;
};

// Seats `world_size` of `candidates`.
// Rules, in order: survivors are chosen first, then ordinary workers, spares, last resorts, each by
// arrival; a survivor keeps its rank if it is below world_size; a free preferred_rank is granted,
// first come first served; other free ranks go to the candidate nearest to the former holder (same
// NVLink domain, else rack, else any), in the order of (rack, NVLink domain, host, local_rank,
// worker_id), where numbers within names compare as numbers, so that neighbours get neighbouring
// ranks. Needs at least `world_size` candidates. O(n log n).
Seating AssignRanks(const std::vector<Candidate>& candidates, int world_size,
                    const std::vector<FormerSeat>& former);

// Returns -1, 0 or 1: "node9" comes before "node10".
int CompareNatural(absl::string_view a, absl::string_view b);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SEATING_H_
