#ifndef MUSTER_STATE_H_
#define MUSTER_STATE_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "worker/checkpoint/save_progress.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/checkpoint/weight_loader.h"

// State in addition to the prepared objects, for save_state() and load_state().
namespace muster {

// An object that register_for_checkpointing() accepts directly.
template <class T>
concept Checkpointable = requires(T& object, const StateDict& state) {
  { object.state_dict() } -> std::convertible_to<StateDict>;
  object.load_state_dict(state);
};

// Called in save_state() before models are written. `weights`: the tensors of each prepared model
// that process 0 writes, in the order of prepare(). Remove entries to omit them, or all entries to
// save that model by other means. The hook writes its own files through `writer`, with one name per
// process. Called on every process; an exception becomes the error of save_state() on all. A save
// that goes to memory and to the disk calls it twice, as it does the save functions of registered
// objects.
using SaveStateHook = std::function<void(std::vector<NamedTensors>& weights, StateWriter& writer)>;

// Called in load_state() before anything has changed. `weights`: the files' tensors for each
// prepared model. Removed entries are not loaded; a model without remaining entries keeps its
// weights.
using LoadStateHook =
    std::function<void(std::vector<NamedTensors>& weights, const StateReader& reader)>;

// What load_weights() took from a checkpoint.
struct LoadedState {
  // The checkpoint's folder.
  std::string directory = "";
  // For each prepared model, in the order of prepare(): which of its tensors were loaded, and which
  // were not and why.
  std::vector<LoadedWeights> models = {};
  // The files of the checkpoint that were not read.
  std::vector<std::string> left_out = {};
};

// Removes a hook, or registered objects from the state. A value type: copies are the same handle.
// Destroying the handle keeps them.
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
