#ifndef MUSTER_WORKER_PARALLEL_PASS_REPORT_H_
#define MUSTER_WORKER_PARALLEL_PASS_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

// What a rank is going to do in a backward pass of a sharded model, as far as it knows before the
// pass.
struct PassIntention {
  bool reduces = false, step_follows = false;

  uint32_t Packed() const;
};
// Throws c10::Error, the same on every rank, if the intentions in `packed`, by rank, differ.
void CheckIntentions(const std::vector<uint32_t>& packed);

// Throws c10::Error, the same on every rank, if ranks have announced changes of their parameters
// differently often since the last comparison; `announced`: how often, by rank.
void CheckAnnouncements(const std::vector<uint32_t>& announced);

// A rank's report at the end of a backward pass that reduces. Units and parameters are numbers in
// the order of the model, which is the same on all ranks.
struct PassReport {
  uint32_t history = 0, events = 0;  // digest and number of the gathers and reductions
  uint32_t trained = 0;              // digest of which parameters require gradients
  uint32_t turns = 0;                // digest of the order in which passes have used the units
  uint32_t intention = 0;
  uint32_t announced = 0;
  bool written = false;  // an operator has written a shard after others have gathered it
  bool failed = false;   // in something that the rank does alone
  // Units with gradients that came after their reduction, and parameters for which this rank had no
  // gradient; both ascending.
  std::vector<uint32_t> late, unused;

  std::string Packed() const;
};

// The combined reports of all ranks: the same on every rank.
struct PassReports {
  // Each element of `packed` is the result of PassReport::Packed() on one rank.
  explicit PassReports(const std::vector<std::string>& packed);

  bool same_history = true, same_trained = true, same_turns = true;
  bool any_written = false, any_failed = false;
  std::vector<uint32_t> intentions, announced;  // by rank
  std::vector<uint32_t> late;                   // on some rank; ascending
  std::vector<uint32_t> unused;                 // on all ranks; ascending
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_PASS_REPORT_H_
