#ifndef MUSTER_STATE_H_
#define MUSTER_STATE_H_

#include <functional>
#include <utility>
#include <vector>

#include "worker/checkpoint/state.h"
#include "worker/checkpoint/state_dict.h"

// What save_state() and load_state() can be given beside the prepared objects.
namespace muster {

// An object that register_for_checkpointing() takes as it is.
template <class T>
concept Checkpointable = requires(T& object, const StateDict& state) {
  { object.state_dict() } -> std::convertible_to<StateDict>;
  object.load_state_dict(state);
};

// Called in save_state() before models are written. `weights`: the tensors of each prepared model,
// in the order of prepare(), which are what is written (by process 0): take names out, or all of
// them to save that model by other means. Files of the hook's own go through `writer`, one name per
// process. Called on every process; what it throws is the error of save_state() on all.
using SaveStateHook = std::function<void(std::vector<NamedTensors>& weights, StateWriter& writer)>;

// Called in load_state() before anything has changed. `weights`: what the files hold for each
// prepared model. What is taken out is not loaded; a model for which nothing is left keeps what it
// has.
using LoadStateHook =
    std::function<void(std::vector<NamedTensors>& weights, const StateReader& reader)>;

// Removes a hook. A value; copies are the same handle. Destroying the handle keeps the hook.
class HookHandle {
 public:
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  // Does nothing when called again.
  void remove() { remove_(); }

 private:
  std::function<void()> remove_;
};

}  // namespace muster

#endif  // MUSTER_STATE_H_
