#ifndef MUSTER_WORKER_DATA_BATCH_H_
#define MUSTER_WORKER_DATA_BATCH_H_

#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "worker/nested/nested.h"

namespace muster {

// The facts about a batch. Code that needs them receives the batch: there is no global "active
// loader".
struct BatchInfo {
  uint64_t iteration = 0;  // which pass over a loader, unique in this process
  int64_t epoch = 0;
  int64_t index = 0;  // number of the batch in its epoch, counting those that were skipped or seen
                      // before a restart
  bool is_last = false;  // this rank's last batch in this pass
  // Batches after this one in the pass, if equal on all ranks; -1: unknown or not equal.
  int64_t batches_left = -1;
  // This rank's samples: the first `real_samples` of `size` are its own, the rest are repeated to
  // fill up the batch.
  int64_t size = 0;
  int64_t real_samples = 0;
  int64_t global_real_samples = 0;  // over all ranks
  int64_t global_size = 0;          // over all ranks, including repeated samples
  // Per rank, only if ranks differ (in a last round); empty: every rank has `size` samples, all
  // real.
  std::vector<int64_t> rank_sizes;
  std::vector<int64_t> rank_real_samples;
  // How many samples of the epoch's order all ranks together have consumed after this batch, which
  // is where a restart continues.
  int64_t position = 0;
};

// One batch: the collated data (a tensor, tuple, map, struct ...) together with its facts. `auto&
// [images, labels] : loader` binds the fields of its value. The iterator that returned it owns it:
// it is valid until the iterator advances; copy the tensors (handles) to keep them.
template <class T>
class Batch {
 public:
  Batch(T value, BatchInfo info)
      : value_(std::move(value)), info_(std::make_shared<const BatchInfo>(std::move(info))) {}
  Batch(const Batch&) = default;
  Batch& operator=(const Batch&) = default;
  // A moved-from batch keeps its facts: they are shared, not moved.
  Batch(Batch&& other) noexcept(std::is_nothrow_move_constructible_v<T>)
      : value_(std::move(other.value_)), info_(other.info_) {}
  Batch& operator=(Batch&& other) noexcept(std::is_nothrow_move_assignable_v<T>) {
    value_ = std::move(other.value_);
    info_ = other.info_;
    return *this;
  }

  T& value() { return value_; }
  const T& value() const { return value_; }
  T& operator*() { return value_; }
  const T& operator*() const { return value_; }
  T* operator->() { return &value_; }
  const T* operator->() const { return &value_; }
  const BatchInfo& info() const { return *info_; }
  // For code that needs the facts after the batch is gone.
  const std::shared_ptr<const BatchInfo>& shared_info() const { return info_; }

  // batch["ids"] for maps, batch[0] for vectors.
  template <class K>
  auto& operator[](const K& key) requires(nested_internal::IsMap<T>) {
    return value_.at(key);
  }
  auto& operator[](size_t index) requires(nested_internal::IsVector<T>) { return value_.at(index); }

  // Structured bindings.
  template <size_t I>
  auto& get() {
    if constexpr (nested_internal::IsProduct<T>) {
      using Field = std::tuple_element_t<I, decltype(nested_internal::Fields(value_))>;
      // Fields() gives const references into value_, which is not const here.
      return const_cast<std::remove_cvref_t<Field>&>(std::get<I>(nested_internal::Fields(value_)));
    } else {
      static_assert(I == 0);
      return value_;
    }
  }
  template <size_t I>
  const auto& get() const {
    return const_cast<Batch*>(this)->template get<I>();
  }

 private:
  T value_;
  std::shared_ptr<const BatchInfo> info_;  // never null
};

namespace batch_internal {
template <class T>
struct FieldTypes {
  using type = std::tuple<T>;
};
template <nested_internal::IsProduct T>
struct FieldTypes<T> {
  template <class... Fs>
  static std::tuple<std::remove_cvref_t<Fs>...> Decayed(const std::tuple<Fs...>&);
  using type = decltype(Decayed(nested_internal::Fields(std::declval<const T&>())));
};
}  // namespace batch_internal

}  // namespace muster

template <class T>
struct std::tuple_size<muster::Batch<T>>
    : std::tuple_size<typename muster::batch_internal::FieldTypes<T>::type> {};
template <size_t I, class T>
struct std::tuple_element<I, muster::Batch<T>> {
  using type = std::tuple_element_t<I, typename muster::batch_internal::FieldTypes<T>::type>;
};

#endif  // MUSTER_WORKER_DATA_BATCH_H_
