#ifndef MUSTER_INTERNAL_STATE_OBJECTS_H_
#define MUSTER_INTERNAL_STATE_OBJECTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "muster/internal/divided_object.h"
#include "muster/internal/full_state.h"
#include "muster/state.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/train/plain_state.h"

namespace muster::internal {

// The objects of the state and the hooks of saves and loads that the program has registered. They
// may be removed while they run, also by themselves. Not thread-safe.
class StateObjects {
 public:
  struct Object {
    int64_t number = 0;
    std::function<StateDict()> save;
    std::function<void(const StateDict&)> load;
    std::shared_ptr<DividedObject> divided;  // may be null
    std::optional<std::weak_ptr<const void>> lifetime;
  };

  // `divided`: the object as a divided one; if it is null, `save` and `load` are used. `lifetime`:
  // expires with the object, which is then left out; nothing: it lives until it is removed. Returns
  // the object's number.
  int64_t Register(std::function<StateDict()> save, std::function<void(const StateDict&)> load,
                   std::shared_ptr<DividedObject> divided = nullptr,
                   std::optional<std::weak_ptr<const void>> lifetime = std::nullopt);
  int64_t Register(std::function<PlainState()> save, std::function<void(const PlainState&)> load);
  // Return the hook's number.
  int64_t AddSaveHook(SaveStateHook hook);
  int64_t AddLoadHook(LoadStateHook hook);
  // Removes the object or hook of this number, if it is still there.
  void Remove(int64_t id);
  // Numbers grow: RemoveSince() removes what was registered after next_number() was `number`.
  int64_t next_number() const { return next_; }
  void RemoveSince(int64_t number);
  // Leaves out objects whose lifetime has ended.
  void ForgetExpired();

  const std::vector<Object>& objects() const { return objects_; }
  // Whether `object` has not been removed.
  bool Has(const Object& object) const;
  std::vector<int64_t> Numbers() const;
  // Throws if a hook of `call` has changed the registered objects or hooks.
  void CheckUnchanged(const std::vector<int64_t>& numbers, const char* call) const;
  // The index in `models` of the model of object `index`; nothing unless the object is divided.
  // Throws if its model is not there.
  std::optional<size_t> DividedModelOf(size_t index, const Models& models) const;

  bool has_save_hooks() const { return !save_hooks_.empty(); }
  bool has_load_hooks() const { return !load_hooks_.empty(); }
  // `weights`: a list for each model. Throws if a hook has removed a list.
  void RunSaveHooks(std::vector<NamedTensors>& weights, StateWriter& writer) const;
  void RunLoadHooks(std::vector<NamedTensors>& weights, const StateReader& reader) const;

 private:
  std::vector<Object> objects_;
  // By number, which is the order of registration.
  std::map<int64_t, std::shared_ptr<const SaveStateHook>> save_hooks_;
  std::map<int64_t, std::shared_ptr<const LoadStateHook>> load_hooks_;
  int64_t next_ = 0;  // the number of the next object or hook
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STATE_OBJECTS_H_
