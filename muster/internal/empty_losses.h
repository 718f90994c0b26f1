#ifndef MUSTER_INTERNAL_EMPTY_LOSSES_H_
#define MUSTER_INTERNAL_EMPTY_LOSSES_H_

#include <memory>
#include <unordered_map>

#include "ATen/core/Tensor.h"
#include "c10/core/TensorImpl.h"
#include "c10/core/UndefinedTensorImpl.h"
#include "c10/util/intrusive_ptr.h"
#include "muster/internal/registry.h"

namespace muster::internal {

// Makes losses harmless that are means over no items, such as the tokens of a batch that consists
// only of prompts. Their backward pass runs like any other, since other processes exchange
// gradients in it, but it may compute NaN: a sum that is divided by 0 has the gradient 0 / 0. Not
// thread-safe.
class EmptyLosses {
 public:
  // `registry` is borrowed.
  explicit EmptyLosses(const Registry& registry) : registry_(registry) {}
  EmptyLosses(const EmptyLosses&) = delete;
  EmptyLosses& operator=(const EmptyLosses&) = delete;

  // While it lives, backward passes add zeros to the gradients of prepared objects.
  class Scope {
   public:
    explicit Scope(EmptyLosses& losses) : empty_(losses.empty_) {
      losses.Hook();
      *empty_ = true;
    }
    ~Scope() { *empty_ = false; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<bool> empty_;
  };

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  void Hook();
  void Hook(const at::Tensor& parameter);

  const Registry& registry_;
  // Shared with the hooks, which are never removed, because LibTorch keeps a place for each removed
  // one.
  const std::shared_ptr<bool> empty_ = std::make_shared<bool>(false);
  // The parameters that have a hook; weak, so that no other tensor is at the address of one.
  std::unordered_map<const void*, Weak> hooked_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_EMPTY_LOSSES_H_
