#ifndef MUSTER_WORKER_PARALLEL_UNIT_TURNS_H_
#define MUSTER_WORKER_PARALLEL_UNIT_TURNS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace muster {

// Predicts from the previous pass the order in which a pass turns to its units. One object is for
// the forward passes of a step, another one for its backward pass. Pure; not thread-safe.
//
// The prediction depends only on what was kept: ranks that keep the same passes, and turn to the
// same units, get the same prediction.
class UnitTurns {
 public:
  // A pass begins. Turns that were noted and not kept are forgotten.
  void Begin();
  // The pass turns to `unit`. An unexpected unit is looked for later in the pass, then from its
  // beginning; until one is found, nothing is predicted. `note`: the turn counts for later
  // predictions.
  void Turn(uint32_t unit, bool note);
  // The turns that are expected after the last one until the end of the pass, the next one first.
  absl::Span<const uint32_t> Coming() const;

  // The noted turns are the prediction from now on, unless there are none; the next pass begins.
  void Keep();
  // Nothing is predicted until the next Keep().
  void Forget();
  // The noted turns.
  const std::vector<uint32_t>& noted() const { return noted_; }

 private:
  // No step is that long; a program without backward passes would note more and more.
  static constexpr size_t kMostTurns = size_t{1} << 20;

  std::vector<uint32_t> kept_, noted_;
  size_t next_ = 0;  // in kept_
  bool lost_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_UNIT_TURNS_H_
