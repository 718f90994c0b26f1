#ifndef MUSTER_INTERNAL_DIVIDED_OBJECT_H_
#define MUSTER_INTERNAL_DIVIDED_OBJECT_H_

#include <concepts>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "worker/checkpoint/state_dict.h"

namespace muster::internal {

class ModelSlot;

// A registered object with a tensor for each parameter of a sharded model, divided among the
// processes as the parameters are. Checkpoints hold whole tensors, as for any object.
class DividedObject {
 public:
  virtual ~DividedObject() = default;

  // The model; null if it no longer exists.
  virtual std::shared_ptr<ModelSlot> model() const = 0;
  // The name of a parameter's tensor in the state.
  virtual std::string KeyOf(const std::string& parameter) const = 0;
  // (collective) Returns the state of the parameters for which keep(name) is true, as whole tensors
  // on the CPU. `failure`: as of ShardedModel::FullParameters().
  virtual StateDict Collect(const std::function<bool(const std::string& name)>& keep,
                            std::exception_ptr* failure) const = 0;
  // Loads a state that holds this process's parts of the tensors.
  virtual void LoadParts(const StateDict& parts) = 0;
};

// Returns null for other objects.
template <class T>
std::shared_ptr<DividedObject> DividedIn(const T& object) {
  if constexpr (requires {
                  { object.divided_object() } -> std::same_as<std::shared_ptr<DividedObject>>;
                }) {
    return object.divided_object();
  } else {
    return nullptr;
  }
}

// Returns the lifetime of an object that declares one; nothing: it lives until it is removed.
template <class T>
std::optional<std::weak_ptr<const void>> LifetimeOf(const T& object) {
  if constexpr (requires {
                  { object.lifetime() } -> std::same_as<std::weak_ptr<const void>>;
                }) {
    return object.lifetime();
  } else {
    return std::nullopt;
  }
}

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_DIVIDED_OBJECT_H_
