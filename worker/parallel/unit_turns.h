#ifndef MUSTER_WORKER_PARALLEL_UNIT_TURNS_H_
#define MUSTER_WORKER_PARALLEL_UNIT_TURNS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace muster {

// Foretells in which order a pass turns to its units, by the pass before. One of these is for the
// forward passes of a step, another one for its backward pass. Pure; not thread-safe.
//
// What it foretells is what was kept, and nothing else: ranks that keep the same passes, and turn
// to the same units, are told the same.
class UnitTurns {
 public:
  // A pass begins. What was noted and not kept is forgotten.
  void Begin();
  // The pass turns to `unit`. One that was not expected now is looked for later in the pass, then
  // from its beginning; until one is found, nothing is foretold. `note`: the turn counts for what
  // is foretold later.
  void Turn(uint32_t unit, bool note);
  // The turns that are expected after the last one until the end of the pass, the next one first.
  absl::Span<const uint32_t> Coming() const;

  // What was noted is foretold from now on, unless nothing was; the next pass begins.
  void Keep();
  // Nothing is foretold until the next Keep().
  void Forget();
  // Of what was noted.
  const std::vector<uint32_t>& noted() const { return noted_; }

 private:
  // No step is that long; a program that never goes backward would note for ever.
  static constexpr size_t kMostTurns = size_t{1} << 20;

  std::vector<uint32_t> kept_, noted_;
  size_t next_ = 0;  // in kept_
  bool lost_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_UNIT_TURNS_H_
