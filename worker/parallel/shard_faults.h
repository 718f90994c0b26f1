#ifndef MUSTER_WORKER_PARALLEL_SHARD_FAULTS_H_
#define MUSTER_WORKER_PARALLEL_SHARD_FAULTS_H_

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace muster {

// What keeps the parameters of a sharded model from being used, as one rank knows: it has failed
// where others may have gone on; ranks have found that their parts belong to different models; or
// nothing has given a parameter its values. Not thread-safe.
class ShardFaults {
 public:
  // `rank` of `ranks` ranks, for messages.
  ShardFaults(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  // What this rank alone has failed with, until the ranks meet next; empty: nothing.
  const std::string& own() const { return failures_.own; }
  // It was in a step, or came after one: this rank's parts may have changed in part.
  bool in_step() const { return failures_.in_step; }
  // NoteBeginningOfForward() keeps an earlier failure, the other two replace it.
  void NoteBeginningOfForward(const std::exception_ptr& thrown);
  void NoteEndOfBackward(const std::exception_ptr& thrown);
  void NoteStep(const std::exception_ptr& thrown);
  // All ranks know of it, and none has stepped after it.
  void ForgetOwn() { failures_.own.clear(); }

  // Why the parts of the ranks are a mixture, which all ranks know; empty: they are not. Stands
  // until all parameters are loaded.
  const std::string& mixed() const { return failures_.mixed; }
  void SetMixed(std::string why) { failures_.mixed = std::move(why); }

  // The above, for a load that may not come about.
  struct Failures {
    std::string own, mixed;
    bool in_step = false;
  };
  Failures Forget();
  // What has failed since is as bad, and is kept.
  void Restore(const Failures& failures);

  // These parameters have no values, in the order of the model.
  void SetWithoutValues(std::vector<std::string> names) { without_values_ = std::move(names); }
  // Those that `has` is true for have theirs now.
  void GiveValues(const std::function<bool(const std::string& name)>& has);

  // The following throw c10::Error.
  void CheckHasValues() const;
  // As far as all ranks know.
  void CheckNotMixed() const;
  // As far as this rank knows.
  void CheckNotMixedHere() const;

 private:
  const int rank_, ranks_;
  Failures failures_;
  std::vector<std::string> without_values_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_FAULTS_H_
