#ifndef MUSTER_WORKER_PARALLEL_PASS_REPORT_H_
#define MUSTER_WORKER_PARALLEL_PASS_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

// What a rank does in a backward pass of a sharded model, as it knows before the pass.
struct PassIntention {
  bool reduces = false, step_follows = false;

  uint32_t Packed() const;
};
// `packed`: those of all ranks, by rank. Throws c10::Error, the same on every rank, if they do not
// do the same.
void CheckIntentions(const std::vector<uint32_t>& packed);

// `announced`: how often each rank has announced a change of its parameters since the ranks have
// compared last. Throws c10::Error, the same on every rank, if they have not done so equally often.
void CheckAnnouncements(const std::vector<uint32_t>& announced);

// What a rank reports at the end of a backward pass that reduces. Units and parameters are numbers
// in the order of the model, which all ranks have alike.
struct PassReport {
  uint32_t history = 0, events = 0;  // digest and number of the gathers and reductions
  uint32_t trained = 0;              // digest of which parameters require gradients
  uint32_t turns = 0;                // digest of the order in which passes have used the units
  uint32_t intention = 0;
  uint32_t announced = 0;
  bool written = false;  // an operator has written a shard behind what others have gathered
  bool failed = false;   // something that the rank does by itself
  // Units with gradients that came after their reduction, and parameters that this rank had no
  // gradient for; both ascending.
  std::vector<uint32_t> late, unused;

  std::string Packed() const;
};

// What the reports of all ranks come to: the same on every rank.
struct PassReports {
  // Each of `packed` is of PassReport::Packed().
  explicit PassReports(const std::vector<std::string>& packed);

  bool same_history = true, same_trained = true, same_turns = true;
  bool any_written = false, any_failed = false;
  std::vector<uint32_t> intentions, announced;  // by rank
  std::vector<uint32_t> late;                   // on some rank; ascending
  std::vector<uint32_t> unused;                 // on all ranks; ascending
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_PASS_REPORT_H_
