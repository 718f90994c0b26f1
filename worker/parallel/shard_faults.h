#ifndef MUSTER_WORKER_PARALLEL_SHARD_FAULTS_H_
#define MUSTER_WORKER_PARALLEL_SHARD_FAULTS_H_

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace muster {

// Why the parameters of a sharded model cannot be used, as far as one rank knows: it has failed
// where others may have gone on; the ranks have found that their parts belong to different models;
// or some parameters were never given values. Not thread-safe.
class ShardFaults {
 public:
  // `rank` of `ranks` ranks, for messages.
  ShardFaults(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  // The failure of this rank alone, until the ranks meet next; empty: none.
  const std::string& own() const { return failures_.own; }
  // Whether that failure was in a step or after one, so that this rank's parts may be partly
  // updated.
  bool in_step() const { return failures_.in_step; }
  // NoteBeginningOfForward() keeps an earlier failure, the other two replace it.
  void NoteBeginningOfForward(const std::exception_ptr& thrown);
  void NoteEndOfBackward(const std::exception_ptr& thrown);
  void NoteStep(const std::exception_ptr& thrown);
  // Call it when all ranks know of the failure and none has stepped after it.
  void ForgetOwn() { failures_.own.clear(); }

  // Why the parts of the ranks are a mixture, which all ranks know; empty: they are not. Kept until
  // all parameters are loaded.
  const std::string& mixed() const { return failures_.mixed; }
  void SetMixed(std::string why) { failures_.mixed = std::move(why); }

  // These failures, to be restored if a load does not happen.
  struct Failures {
    std::string own, mixed;
    bool in_step = false;
  };
  Failures Forget();
  // Restores them, but keeps failures that were added since, which are as bad.
  void Restore(const Failures& failures);

  // Marks these parameters, in the order of the model, as having no values.
  void SetWithoutValues(std::vector<std::string> names) { without_values_ = std::move(names); }
  // The parameters for which `has` is true have values now.
  void GiveValues(const std::function<bool(const std::string& name)>& has);

  // The following throw c10::Error.
  void CheckHasValues() const;
  // Throws if all ranks know that the parts are a mixture.
  void CheckNotMixed() const;
  // Throws if this rank knows of a failure or a mixture.
  void CheckNotMixedHere() const;

 private:
  const int rank_, ranks_;
  Failures failures_;
  std::vector<std::string> without_values_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_FAULTS_H_
