#ifndef MUSTER_WORKER_TRAIN_MAP_TENSORS_H_
#define MUSTER_WORKER_TRAIN_MAP_TENSORS_H_

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

// `value` with `fn` (at::Tensor -> at::Tensor) applied to every tensor in it: a tensor, or a nest
// of vector, array, tuple, pair, optional, map and unordered_map (values only). Anything else comes
// back as it is. Undefined tensors are left alone.
template <typename Fn>
at::Tensor MapTensors(const at::Tensor& value, Fn&& fn) {
  return value.defined() ? fn(value) : value;
}
template <typename T, typename Fn>
T MapTensors(const T& value, Fn&& fn);

namespace map_tensors_internal {
template <typename T>
struct Walk {
  template <typename Fn>
  static T Map(const T& value, Fn&) {
    return value;
  }
};
template <typename T>
struct Walk<std::vector<T>> {
  template <typename Fn>
  static std::vector<T> Map(const std::vector<T>& value, Fn& fn) {
    std::vector<T> out;
    out.reserve(value.size());
    for (const T& item : value) out.push_back(MapTensors(item, fn));
    return out;
  }
};
template <typename T, size_t n>
struct Walk<std::array<T, n>> {
  template <typename Fn>
  static std::array<T, n> Map(const std::array<T, n>& value, Fn& fn) {
    std::array<T, n> out = value;
    for (T& item : out) item = MapTensors(std::as_const(item), fn);
    return out;
  }
};
template <typename... Ts>
struct Walk<std::tuple<Ts...>> {
  template <typename Fn>
  static std::tuple<Ts...> Map(const std::tuple<Ts...>& value, Fn& fn) {
    return std::apply(
        [&fn](const Ts&... items) { return std::tuple<Ts...>{MapTensors(items, fn)...}; }, value);
  }
};
template <typename A, typename B>
struct Walk<std::pair<A, B>> {
  template <typename Fn>
  static std::pair<A, B> Map(const std::pair<A, B>& value, Fn& fn) {
    return {MapTensors(value.first, fn), MapTensors(value.second, fn)};
  }
};
template <typename T>
struct Walk<std::optional<T>> {
  template <typename Fn>
  static std::optional<T> Map(const std::optional<T>& value, Fn& fn) {
    if (!value.has_value()) return std::nullopt;
    return MapTensors(*value, fn);
  }
};
template <typename K, typename T>
struct Walk<std::map<K, T>> {
  template <typename Fn>
  static std::map<K, T> Map(const std::map<K, T>& value, Fn& fn) {
    std::map<K, T> out;
    for (const auto& [key, item] : value) out.emplace(key, MapTensors(item, fn));
    return out;
  }
};
template <typename K, typename T>
struct Walk<std::unordered_map<K, T>> {
  template <typename Fn>
  static std::unordered_map<K, T> Map(const std::unordered_map<K, T>& value, Fn& fn) {
    std::unordered_map<K, T> out;
    for (const auto& [key, item] : value) out.emplace(key, MapTensors(item, fn));
    return out;
  }
};
}  // namespace map_tensors_internal

template <typename T, typename Fn>
T MapTensors(const T& value, Fn&& fn) {
  return map_tensors_internal::Walk<T>::Map(value, fn);
}

// The tensors in `value`, in order.
template <typename T>
std::vector<at::Tensor> CollectTensors(const T& value) {
  std::vector<at::Tensor> tensors;
  MapTensors(value, [&tensors](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_MAP_TENSORS_H_
