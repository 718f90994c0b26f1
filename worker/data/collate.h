#ifndef MUSTER_WORKER_DATA_COLLATE_H_
#define MUSTER_WORKER_DATA_COLLATE_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/stack.h"
#include "worker/nested/nested.h"

namespace muster {

namespace collate_internal {

template <class N>
constexpr at::ScalarType NumberType() {
  if constexpr (std::is_same_v<N, bool>) {
    return at::kBool;
  } else if constexpr (std::is_same_v<N, float>) {
    return at::kFloat;
  } else if constexpr (std::is_floating_point_v<N>) {
    return at::kDouble;
  } else {
    return at::kLong;
  }
}
template <class N>
using Stored = std::conditional_t<
    std::is_same_v<N, bool>, bool,
    std::conditional_t<std::is_same_v<N, float>, float,
                       std::conditional_t<std::is_floating_point_v<N>, double, int64_t>>>;

// Returns the number as the tensor holds it. Error: an unsigned number too large for int64.
template <class N>
Stored<N> Store(N number) {
  if constexpr (std::is_same_v<N, uint64_t> || std::is_same_v<N, unsigned long long>) {
    TORCH_CHECK(number <= static_cast<N>(INT64_MAX), "collate: ", number,
                " does not fit into int64");
  }
  return static_cast<Stored<N>>(number);
}

template <class E>
auto CollateAll(const std::vector<const E*>& examples);

template <class E, size_t I>
auto CollateField(const std::vector<const E*>& examples) {
  using F = std::remove_cvref_t<
      std::tuple_element_t<I, decltype(nested_internal::Fields(std::declval<const E&>()))>>;
  std::vector<const F*> fields;
  fields.reserve(examples.size());
  for (const E* example : examples)
    fields.push_back(&std::get<I>(nested_internal::Fields(*example)));
  return CollateAll<F>(fields);
}

template <class E>
concept IsNumberList = nested_internal::IsVector<E> && std::is_arithmetic_v<typename E::value_type>;

template <class E>
auto CollateAll(const std::vector<const E*>& examples) {
  using namespace nested_internal;  // NOLINT: names of nested.h
  if constexpr (IsTensor<E>) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(examples.size());
    const bool defined = examples.front()->defined();
    for (const E* example : examples) {
      TORCH_CHECK(example->defined() == defined,
                  "collate: a tensor is undefined in some examples and defined in others");
      tensors.push_back(*example);
    }
    return defined ? at::stack(tensors) : at::Tensor();
  } else if constexpr (std::is_arithmetic_v<E> || std::is_enum_v<E>) {
    at::Tensor numbers = at::empty({static_cast<int64_t>(examples.size())}, NumberType<E>());
    auto* out = numbers.data_ptr<Stored<E>>();
    for (const E* example : examples) *out++ = Store<E>(*example);
    return numbers;
  } else if constexpr (IsProduct<E> && !IsDeclaredPlain<E>) {
    constexpr size_t kFields = std::tuple_size_v<decltype(Fields(std::declval<const E&>()))>;
    return [&]<size_t... I>(std::index_sequence<I...>) {
      using Collated = std::tuple<decltype(CollateField<E, I>(examples))...>;
      using Own = std::tuple<std::remove_cvref_t<
          std::tuple_element_t<I, decltype(Fields(std::declval<const E&>()))>>...>;
      if constexpr (std::is_same_v<Collated, Own>) {
        return MakeProduct<E>(CollateField<E, I>(examples)...);
      } else {
        // A struct whose members change type (numbers become a tensor, texts a list) cannot hold
        // them.
        if constexpr (kFields == 2) {
          return std::pair<decltype(CollateField<E, I>(examples))...>(
              CollateField<E, I>(examples)...);
        } else {
          return Collated(CollateField<E, I>(examples)...);
        }
      }
    }
    (std::make_index_sequence<kFields>());
  } else if constexpr (IsMap<E>) {
    using V = typename E::mapped_type;
    using Collated = decltype(CollateAll<V>(std::declval<const std::vector<const V*>&>()));
    std::map<typename E::key_type, Collated> result;
    for (const auto& [key, ignored] : *examples.front()) {
      std::vector<const V*> values;
      values.reserve(examples.size());
      for (const E* example : examples) {
        const auto found = example->find(key);
        TORCH_CHECK(found != example->end() && example->size() == examples.front()->size(),
                    "collate: the examples' maps have different keys");
        values.push_back(&found->second);
      }
      result.emplace(key, CollateAll<V>(values));
    }
    return result;
  } else if constexpr (IsNumberList<E>) {
    using N = typename E::value_type;
    const int64_t length = static_cast<int64_t>(examples.front()->size());
    at::Tensor numbers =
        at::empty({static_cast<int64_t>(examples.size()), length}, NumberType<N>());
    auto* out = numbers.data_ptr<Stored<N>>();
    for (const E* example : examples) {
      TORCH_CHECK(static_cast<int64_t>(example->size()) == length, "collate: examples have ",
                  length, " and ", example->size(),
                  " numbers; give the recipe a collate() function that pads them");
      for (const N number : *example) *out++ = Store<N>(number);
    }
    return numbers;
  } else if constexpr (IsVector<E> && HoldsTensor<E>()) {
    using V = typename E::value_type;
    std::vector<decltype(CollateAll<V>(std::declval<const std::vector<const V*>&>()))> result;
    for (size_t i = 0; i < examples.front()->size(); ++i) {
      std::vector<const V*> elements;
      elements.reserve(examples.size());
      for (const E* example : examples) {
        TORCH_CHECK(example->size() == examples.front()->size(), "collate: examples have ",
                    examples.front()->size(), " and ", example->size(), " tensors");
        elements.push_back(&(*example)[i]);
      }
      result.push_back(CollateAll<V>(elements));
    }
    return result;
  } else {
    std::vector<E> values;
    values.reserve(examples.size());
    for (const E* example : examples) values.push_back(*example);
    return values;
  }
}

}  // namespace collate_internal

// Joins examples into a batch, field by field. Tensors are stacked (undefined if all are
// undefined), numbers become a tensor (integers of any width int64, as labels must be), vectors of
// numbers a tensor with one row each, texts and anything else a vector. Pairs, tuples, arrays, maps
// and vectors of these keep their structure (a map becomes a std::map). A struct (nested.h), such
// as LibTorch's Example, keeps its type if all its members do, as tensors do; otherwise it becomes
// a std::tuple (for two members a std::pair) of the joined members, in order. Errors (c10::Error):
// no examples; shapes, keys or lengths that differ; a number too large for int64.
struct DefaultCollate {
  template <class E>
  auto operator()(const std::vector<E>& examples) const {
    TORCH_CHECK(!examples.empty(), "collate: no examples");
    std::vector<const E*> pointers;
    pointers.reserve(examples.size());
    for (const E& example : examples) pointers.push_back(&example);
    return collate_internal::CollateAll<E>(pointers);
  }
};

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_COLLATE_H_
