#ifndef MUSTER_INTERNAL_LOOP_TRACKER_H_
#define MUSTER_INTERNAL_LOOP_TRACKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "muster/internal/registry.h"
#include "worker/checkpoint/manifest.h"
#include "worker/data/batch.h"
#include "worker/data/loader.h"

namespace muster::internal {

// Which loops over prepared loaders are under way, and how much of an epoch is done. Loaders report
// their batches through observer(). Not thread-safe.
class LoopTracker {
 public:
  // Borrows `registry`. `on_start` is called when a pass over a loader begins.
  LoopTracker(Registry& registry, std::function<void()> on_start);
  ~LoopTracker();
  LoopTracker(const LoopTracker&) = delete;
  LoopTracker& operator=(const LoopTracker&) = delete;

  // The observer for loaders, which may outlive this object.
  std::shared_ptr<LoaderObserver> observer() const;

  // Marks the current batch of each active loop as trained on by a micro-step.
  void MarkTrained();
  // The facts of the innermost live loop's batch; null outside any loop.
  const BatchInfo* current_batch() const {
    return live_.empty() ? nullptr : live_.back().info.get();
  }
  // Call it when accumulate() was given a batch of this pass.
  void NoteDecides(uint64_t iteration);
  // The batch of the loop that micro-steps belong to. Throws if loops that run side by side
  // disagree about the end of the window.
  const BatchInfo* BatchOfMicroStep() const;
  // As current_batch(), but throws if batches of loops that run side by side differ in size.
  const BatchInfo* BatchOfMetrics() const;
  // The number of batches that prepared loaders have yielded.
  int64_t batches() const { return batches_; }
  // The state that `loader` is saved with.
  LoaderState PlaceToSave(const LoaderStateHandle& loader) const;
  // What LibTorch's default generator on the CPU is saved as where that is not what it is now:
  // where the only loop has got a batch and not trained on it, which a run that continues here
  // reads again. Else undefined.
  at::Tensor GeneratorToSave() const;

  int64_t epoch() const { return epoch_; }
  // The epoch in whose body the program is; -1: in none.
  int64_t open_epoch() const { return epoch_open_ ? epoch_ : -1; }
  // `open`: the epoch's body begins; otherwise it is over.
  void SetEpoch(int64_t epoch, bool open);
  // The first of `count` epochs to run. Logs a message if a loaded state left some out, unless
  // `resumed_from` is empty.
  int64_t FirstEpoch(int64_t count, const std::string& resumed_from);
  // Whether the epoch's training has ended, as far as can be known.
  bool EpochIsDone() const;

  // Writes the places of epochs and passes to a checkpoint, and reads them; `loaders`: how many the
  // checkpoint holds.
  void SavePlace(CheckpointInfo* info) const;
  void LoadPlace(const CheckpointInfo& info, size_t loaders);
  // Call it when the state at `path` was saved; `done`: EpochIsDone() was true.
  void NoteSaved(const std::string& path, bool done);

  // Call it when the registry has more loaders; LoadersCleared(): when it was cleared.
  void LoadersAdded();
  // See Registry::SettleLoaders().
  void SettleLoaders();
  void LoadersCleared();

 private:
  class Observer;
  struct LiveLoop {
    uint64_t id;
    std::shared_ptr<const BatchInfo> info;
    std::optional<size_t> loader = std::nullopt;  // its index in the registry
    int64_t trained = -1;                         // index of the last batch with a micro-step
    int64_t trained_as_innermost = -1;            // the same, while no other loop was inside it
    int64_t batches = 1;                          // the batches that it has received
    bool beside_another = false;  // this one or an inner one moved on while both were under way
    int64_t inner_ended = -1;     // index of its last batch in which an inner training loop ended
    bool decides = false;         // accumulate() was given its batch
    bool outlived = false;        // the training pass beside which it was read has ended
    bool spans_epochs = false;    // it was under way when the epoch's body began
  };

  bool SkipsPass(const LoaderStateHandle& loader);
  void OnBatch(uint64_t iteration, const std::shared_ptr<const BatchInfo>& info);
  bool CountsAsTrained(uint64_t iteration);
  void OnEnd(uint64_t iteration);
  const LiveLoop* FindLoop(uint64_t pass) const;
  static bool TrainedToTheEnd(const LiveLoop& loop);
  // Whether `loop` is inside another one, each batch of which brings such loops with it.
  bool IsInside(const LiveLoop& loop) const;
  // Whether `loop`, when it ends, is beside one that continues, so that its loader may begin again
  // there.
  bool GoesOnBeside(const LiveLoop& loop) const;
  // As GoesOnBeside(), but false if its loader did not begin again in earlier epochs.
  bool BeginsAgainAfter(const LiveLoop& loop) const;
  static bool Has(const std::vector<bool>& what, const LiveLoop& loop) {
    return loop.loader.has_value() && *loop.loader < what.size() && what[*loop.loader];
  }
  // Call it when `loop` is read beside the loops inside it.
  void WarnIfInOneOrder(const LiveLoop& loop);
  // Call it when `loop` begins: provisional passes of its loader no longer count.
  void TakeBackPasses(const LiveLoop& loop);
  // Whether a loop inside `loop` trains, or has trained, for the current batch of `loop`, which a
  // run that resumes there gets again.
  bool TrainsInside(const LiveLoop& loop) const;
  // finished_passes_, plus the passes whose last batch has been trained on while the loop still
  // lives.
  std::vector<int64_t> FinishedPasses() const;
  // Call it when the epoch of a loaded state is over: then the rest of its passes is, too.
  void GiveUpLoadedPlaces();
  // The innermost loop's batch; throws `why` if another loop is active at the same time and `same`
  // does not hold for the two batches.
  const BatchInfo* BatchBesideOthers(
      absl::FunctionRef<bool(const BatchInfo&, const BatchInfo&)> same,
      absl::FunctionRef<std::string(const BatchInfo&, const BatchInfo&)> why) const;

  Registry& registry_;
  const std::function<void()> on_start_;
  const std::shared_ptr<Observer> observer_;

  std::vector<LiveLoop> live_;  // outermost first
  uint64_t left_early_ = 0;     // the pass that was left before its end
  int64_t batches_ = 0;
  int64_t epoch_ = 0;
  int64_t first_epoch_ = 0;
  bool epoch_open_ = false;   // inside the body of a loop over epochs()
  bool interrupted_ = false;  // a training loop of this epoch was left before its last batch
  // By the loader's place: training passes that this epoch has finished, how many an epoch has as
  // far as seen, and how many are left out of the epoch that a loaded state is in. Passes inside
  // another loop count only if they belong to its current batch, and passes next to an active one
  // only if the loader has not begun again since: a resumed run makes the others. `provisional_`:
  // how many of the finished passes are of these two kinds.
  std::vector<int64_t> finished_passes_, passes_per_epoch_, passes_to_skip_, provisional_;
  // By the loader's place. begins_again_, inside_: it has begun again beside a loop that continued,
  // or trained inside another one, in this epoch (including the part before a state that was loaded
  // in it). left_beside_: its last pass was left when the loop beside it had ended. began_: a pass
  // over it began in this epoch. began_before_: one began in the epoch of a loaded state, before
  // that was saved.
  std::vector<bool> begins_again_, inside_, left_beside_, began_, began_before_;
  bool trained_in_epoch_ = false;  // a training loop over a prepared loader has ended in this epoch
  bool trained_outside_ = false;   // a micro-step was made in this epoch outside of such loops
  bool resumed_ = false;           // a state was loaded
  bool resume_told_ = false;
  // Loops over epochs(): the last epoch that any loop has begun, and whether a later loop started
  // over.
  int64_t furthest_epoch_ = -1;
  bool epochs_began_anew_ = false;
  bool anew_told_ = false;
  std::string claimed_done_;      // the state saved in this epoch that counts it as finished
  std::string saved_left_early_;  // the state saved after a training loop was left early
  bool left_early_told_ = false;
  // The state saved between loops, for as long as nothing has trained since.
  std::string saved_undone_;
  bool undone_told_ = false;
  bool one_order_told_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_LOOP_TRACKER_H_
