#include "coordinator/seating.h"

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "coordinator/errors.h"

namespace muster::coordinator {

std::optional<int> FeasibleWorld(const v1::RendezvousSpec& spec, int former_world, int ordinary,
                                 int spares, int last_resorts) {
  const int step = std::max(1, spec.divisible_by());
  const int filled = std::max(ordinary, std::min(former_world, ordinary + spares));
  const int largest = std::min(spec.max_workers(), filled) / step * step;
  if (largest >= spec.min_workers() && largest > 0) return largest;
  const int smallest = (spec.min_workers() + step - 1) / step * step;
  if (smallest <= 0 || smallest > spec.max_workers()) return std::nullopt;
  if (smallest <= ordinary + spares + last_resorts) return smallest;
  return std::nullopt;
}

int CompareNatural(absl::string_view a, absl::string_view b) {
  while (!a.empty() && !b.empty()) {
    if (absl::ascii_isdigit(a[0]) && absl::ascii_isdigit(b[0])) {
      const auto number = [](absl::string_view* text) {
        size_t size = 0;
        while (size < text->size() && absl::ascii_isdigit((*text)[size])) ++size;
        absl::string_view digits = text->substr(0, size);
        text->remove_prefix(size);
        while (digits.size() > 1 && digits[0] == '0') digits.remove_prefix(1);
        return digits;
      };
      const absl::string_view x = number(&a);
      const absl::string_view y = number(&b);
      if (x.size() != y.size()) return x.size() < y.size() ? -1 : 1;
      if (const int order = x.compare(y); order != 0) return order < 0 ? -1 : 1;
    } else {
      if (a[0] != b[0]) return static_cast<uint8_t>(a[0]) < static_cast<uint8_t>(b[0]) ? -1 : 1;
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.empty() ? (b.empty() ? 0 : -1) : 1;
}

namespace {

// Returns all candidates in the order in which they get seats: survivors, ordinary workers, spares,
// last resorts.
std::vector<int> ByClaim(const std::vector<Candidate>& candidates) {
  std::vector<int> order(candidates.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const auto claim = [&](int i) {
    const Candidate& c = candidates[i];
    return std::make_tuple(c.last_resort, c.previous_rank < 0, c.spare, c.order);
  };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return claim(a) < claim(b); });
  return order;
}

std::string WhyNoSeat(const Candidate& candidate, int world_size) {
  const std::string taken = absl::StrCat(
      world_size == 1 ? "the only seat is" : absl::StrCat("all ", world_size, " seats are"),
      " taken");
  if (candidate.last_resort) {
    return absl::StrCat("waits: its host is quarantined, and ", taken, " without it");
  }
  if (candidate.spare) return absl::StrCat("waits as a spare: ", taken);
  return absl::StrCat("waits: ", taken, " by workers that had one or came earlier");
}

// Returns why a candidate gets a free rank that it has not asked for.
std::string WhyFreeRank(const Candidate& candidate, const FormerSeat* former,
                        absl::string_view nearness) {
  std::string why;
  if (candidate.previous_rank >= 0) {
    why = absl::StrCat("had rank ", candidate.previous_rank, "; ");
  } else if (candidate.last_resort) {
    why = "is needed although its host is quarantined; ";
  } else if (candidate.spare) {
    why = "was a spare; ";
  }
  if (former == nullptr) return absl::StrCat(why, "by order of racks and hosts");
  return absl::StrCat(why, "takes the rank of ", Quoted(former->worker_id), nearness);
}

// Seats each of `waiting` on the rank it names, if that is free, because of `why`. Returns the
// others.
template <class RankOf>
std::vector<int> SeatNamed(const std::vector<int>& waiting, const RankOf& rank_of,
                           absl::string_view why, Seating* seating) {
  std::vector<int> rest;
  for (const int i : waiting) {
    const int rank = rank_of(i);
    if (rank >= 0 && rank < static_cast<int>(seating->seats.size()) && seating->seats[rank] < 0) {
      seating->seats[rank] = i;
      seating->why[i] = std::string(why);
    } else {
      rest.push_back(i);
    }
  }
  return rest;
}

// Orders candidates so that neighbours in the network are neighbours in the order.
bool IsBefore(const Candidate& a, const Candidate& b) {
  const v1::Topology& x = a.topology;
  const v1::Topology& y = b.topology;
  if (const int order = CompareNatural(x.rack(), y.rack()); order != 0) return order < 0;
  if (const int order = CompareNatural(x.nvlink_domain(), y.nvlink_domain()); order != 0)
    return order < 0;
  if (const int order = CompareNatural(x.host(), y.host()); order != 0) return order < 0;
  if (x.local_rank() != y.local_rank()) return x.local_rank() < y.local_rank();
  if (const int order = CompareNatural(a.worker_id, b.worker_id); order != 0) return order < 0;
  return a.order < b.order;
}

// Queues of candidates without a seat, by what they are near to, in topology order; a candidate
// that was taken from another queue is skipped when met.
class Neighbours {
 public:
  // Borrows `candidates`; `waiting` in topology order.
  Neighbours(const std::vector<Candidate>& candidates, const std::vector<int>& waiting)
      : any_(waiting.begin(), waiting.end()) {
    for (const int i : waiting) {
      const v1::Topology& t = candidates[i].topology;
      if (!t.host().empty()) by_host_[t.host()].push_back(i);
      if (!t.nvlink_domain().empty()) by_domain_[t.nvlink_domain()].push_back(i);
      if (!t.rack().empty()) by_rack_[t.rack()].push_back(i);
    }
  }

  // Returns -1 if there is none; else sets `nearness` to how near it is.
  int TakeNear(const FormerSeat& seat, absl::string_view* nearness) {
    *nearness = " on the same host";
    int i = TakeFrom(&by_host_, seat.host);
    if (i >= 0) return i;
    *nearness = " in the same NVLink domain";
    i = TakeFrom(&by_domain_, seat.nvlink_domain);
    if (i >= 0) return i;
    *nearness = " in the same rack";
    return TakeFrom(&by_rack_, seat.rack);
  }
  int TakeAny() { return Take(&any_); }

 private:
  using Queues = std::map<absl::string_view, std::deque<int>>;

  int Take(std::deque<int>* queue) {
    while (!queue->empty()) {
      const int i = queue->front();
      queue->pop_front();
      if (used_.insert(i).second) return i;
    }
    return -1;
  }
  int TakeFrom(Queues* queues, const std::string& name) {
    const auto it = name.empty() ? queues->end() : queues->find(name);
    return it == queues->end() ? -1 : Take(&it->second);
  }

  Queues by_host_, by_domain_, by_rack_;
  std::deque<int> any_;
  absl::flat_hash_set<int> used_;
};

}  // namespace

Seating AssignRanks(const std::vector<Candidate>& candidates, int world_size,
                    const std::vector<FormerSeat>& former) {
  MUSTER_CHECK(world_size >= 0 && static_cast<size_t>(world_size) <= candidates.size())
      << "a world of " << world_size << " needs as many candidates, not " << candidates.size();
  Seating seating;
  seating.seats.assign(world_size, -1);
  seating.why.resize(candidates.size());
  std::vector<int> waiting = ByClaim(candidates);
  for (size_t i = world_size; i < waiting.size(); ++i) {
    seating.why[waiting[i]] = WhyNoSeat(candidates[waiting[i]], world_size);
  }
  waiting.resize(world_size);
  waiting = SeatNamed(
      waiting, [&](int i) { return candidates[i].previous_rank; }, "keeps its rank", &seating);
  std::sort(waiting.begin(), waiting.end(),
            [&](int a, int b) { return candidates[a].order < candidates[b].order; });
  waiting = SeatNamed(
      waiting, [&](int i) { return candidates[i].preferred_rank; }, "asked for this rank",
      &seating);
  std::sort(waiting.begin(), waiting.end(),
            [&](int a, int b) { return IsBefore(candidates[a], candidates[b]); });

  Neighbours neighbours(candidates, waiting);
  const auto former_of = [&](int rank) {
    return static_cast<size_t>(rank) < former.size() ? &former[rank] : nullptr;
  };
  const auto seat = [&](int rank, int i, absl::string_view nearness) {
    seating.seats[rank] = i;
    seating.why[i] = WhyFreeRank(candidates[i], former_of(rank), nearness);
  };
  std::vector<int> far;  // free ranks without a nearby candidate
  for (int rank = 0; rank < world_size; ++rank) {
    if (seating.seats[rank] >= 0) continue;
    absl::string_view nearness;
    const FormerSeat* const lost = former_of(rank);
    const int i = lost == nullptr ? -1 : neighbours.TakeNear(*lost, &nearness);
    if (i < 0) {
      far.push_back(rank);
    } else {
      seat(rank, i, nearness);
    }
  }
  for (const int rank : far) seat(rank, neighbours.TakeAny(), "");
  return seating;
}

}  // namespace muster::coordinator
