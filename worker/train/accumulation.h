#ifndef MUSTER_WORKER_TRAIN_ACCUMULATION_H_
#define MUSTER_WORKER_TRAIN_ACCUMULATION_H_

#include <cstdint>
#include <optional>

#include "worker/train/options.h"
#include "worker/train/plain_state.h"

namespace muster {

// The facts of a micro-step's batch, from the innermost live loader iteration.
struct BatchFacts {
  bool is_last = false;  // the last batch of this epoch on this rank
  // Batches that come after this one in the epoch, the same on every rank; -1: unknown.
  int64_t batches_left = -1;
};

// What one micro-step has to do.
struct MicroStep {
  bool sync = true;  // the window ends here: reduce, clip, step, zero
  // Gradients are exchanged in this backward pass (matters with several ranks only).
  bool communicate = true;
  double divisor = 1;  // the loss of this micro-step is divided by it
  // If not 1: multiply the gradients by it after they are reduced and unscaled and before they are
  // clipped. Differs from 1 only if `sync` is true and the window turned out shorter than was known
  // at its start.
  double gradient_factor = 1;
  int64_t window_length = 1;  // micro-steps in the window so far, this one included
};

// Counts micro-steps into windows that end in an optimizer step.
//
//   0 in the window
//     -- micro-step, window not full --------------------> 1 .. num_steps-1 in the window
//   1 .. num_steps-1 in the window
//     -- window full, or the last batch of a loader -----> 0 in the window, sync
//
// A window outlives the loader it began in when `sync_with_dataloader` is off, when a loop is left
// early, and when micro-steps are made outside any loader. It remembers nothing about a loader
// except the facts passed in, so leaving a loop cannot change what later micro-steps do.
//
// Divisors: the first micro-step of a window fixes the divisor of the whole window, so that
// gradients of all its micro-steps are on one scale. With kRescale it is the number of micro-steps
// that the window is going to have, according to `batches_left`; if the window ends elsewhere after
// all, gradient_factor corrects for it exactly.
//
// Token-weighted losses: with WeightedDivisor() each micro-step's loss is a mean over `weight`
// items (tokens), and the window's gradient becomes the mean over all items of all micro-steps and
// ranks. See WeightedFactor().
//
// A pure state machine: no tensors, no clock, no threads, not thread-safe. Errors are thrown as
// c10::Error.
class Accumulation {
 public:
  explicit Accumulation(const AccumulationOptions& options = {});

  // Begins a micro-step. `batch`: the facts of the innermost live loader iteration; nullopt outside
  // of any loader. Must be called before the forward pass, since data parallelism decides there
  // whether it will reduce. `agreed_sync`: what the ranks have agreed on if they may differ
  // (join_uneven_inputs). It replaces this rank's own answer; divisors are then not predicted,
  // because ranks would predict different ones.
  MicroStep Begin(const std::optional<BatchFacts>& batch);
  MicroStep Begin(const std::optional<BatchFacts>& batch, bool agreed_sync);

  // Begins a micro-step outside any accumulation: a window of its own, whose loss is divided by
  // num_steps. An open window stays open.
  void BeginAlone();

  // Returns what Begin() would return as `sync`. Changes nothing.
  bool WouldSync(const std::optional<BatchFacts>& batch) const;

  // Returns the current micro-step; before the first one, a micro-step that syncs, so that a loop
  // without accumulation just works.
  const MicroStep& current() const { return current_; }
  bool sync_gradients() const { return current_.sync; }

  // Returns the divisor of the loss, current().divisor. May be called any number of times in a
  // micro-step of a window whose losses have no weights.
  double PlainDivisor();
  // The same for a loss that is a mean over `weight` items. Call it once per micro-step, in all
  // micro-steps of a window or in none, without PlainDivisor() in any of them. `weight` must be
  // finite and not negative.
  double WeightedDivisor(double weight);

  // Whether this window's losses are weighted, and the weights of this rank so far.
  bool weighted() const { return weighted_steps_ > 0; }
  double local_weight() const { return weight_; }

  // Returns, at the sync of a weighted window, the factor by which to multiply the gradients
  // averaged over `world_size` ranks (instead of gradient_factor). `total_weight`: the sum of
  // local_weight() over all ranks; if it is 0, so is the factor.
  double WeightedFactor(double total_weight, int world_size) const;

  // Whether no gradients of an unfinished window are pending, so that a checkpoint needs none.
  bool at_boundary() const { return position_ == 0; }

  const AccumulationOptions& options() const { return options_; }
  int64_t num_steps() const { return options_.num_steps.value_or(1); }
  // May be called at any time; an unfinished window ends as soon as it has `num_steps` micro-steps.
  void set_num_steps(int64_t num_steps);

  PlainState SaveState() const;
  void LoadState(const PlainState& state);

 private:
  AccumulationOptions options_;
  MicroStep current_;
  int64_t position_ = 0;  // micro-steps done in the open window; 0 after a sync
  double window_divisor_ = 1;
  int64_t weighted_steps_ = 0;
  double weight_ = 0;
  bool plain_ = false;  // a loss of this micro-step had no weight

  MicroStep BeginWith(bool sync, double divisor_of_new_window);
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACCUMULATION_H_
