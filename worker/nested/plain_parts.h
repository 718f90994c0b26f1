#ifndef MUSTER_WORKER_NESTED_PLAIN_PARTS_H_
#define MUSTER_WORKER_NESTED_PLAIN_PARTS_H_

#include <tuple>
#include <type_traits>
#include <utility>

#include "worker/nested/nested.h"

namespace muster::nested_internal {

// The contents of a structure besides tensors. Keys of maps, the contents of a c10::IValue, and
// classes whose MusterFields declares no tensors do not count.
struct PlainParts {
  bool any = false;
  bool numbers = false;  // any number, also in a list
  bool alone = false;    // a number, a text or the like that is in no std::vector without tensors

  friend constexpr PlainParts operator|(PlainParts a, PlainParts b) {
    return {a.any || b.any, a.numbers || b.numbers, a.alone || b.alone};
  }
};

template <class T, class... Path>
constexpr PlainParts PlainPartsWithin();

template <class Tuple, class... Path>
struct PlainPartsOfFields;
template <class... Fs, class... Path>
struct PlainPartsOfFields<std::tuple<Fs...>, Path...> {
  static constexpr PlainParts value =
      (PlainPartsWithin<std::remove_cvref_t<Fs>, Path...>() | ... | PlainParts());
};

template <class T, class... Path>
constexpr PlainParts PlainPartsWithin() {
  if constexpr ((std::is_same_v<T, Path> || ... || false)) {
    return {};
  } else if constexpr (IsTensor<T> || IsIValue<T> || IsDeclaredPlain<T>) {
    return {};
  } else if constexpr (IsProduct<T>) {
    return PlainPartsOfFields<decltype(Fields(std::declval<const T&>())), T, Path...>::value;
  } else if constexpr (IsMap<T>) {
    return PlainPartsWithin<typename T::mapped_type, T, Path...>();
  } else if constexpr (IsVector<T>) {
    PlainParts parts = PlainPartsWithin<typename T::value_type, T, Path...>();
    parts.alone = parts.alone && HoldsTensor<T>();
    return parts;
  } else if constexpr (IsOptional<T>) {
    return PlainPartsWithin<typename T::value_type, T, Path...>();
  } else if constexpr (IsTorchList<T>) {
    return PlainPartsWithin<typename IsTorchListImpl<T>::Element, T, Path...>();
  } else if constexpr (IsTorchDict<T>) {
    return PlainPartsWithin<typename IsTorchDictImpl<T>::Value, T, Path...>();
  } else {
    return {.any = true,
            .numbers = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>,
            .alone = !std::is_empty_v<T>};
  }
}

template <class T>
constexpr PlainParts PlainPartsOf() {
  return PlainPartsWithin<T>();
}

}  // namespace muster::nested_internal

#endif  // MUSTER_WORKER_NESTED_PLAIN_PARTS_H_
