#ifndef MUSTER_WORKER_DATA_NESTED_H_
#define MUSTER_WORKER_DATA_NESTED_H_

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/cat.h"

namespace muster {

// Structures of tensors: what a batch, a model's output or a metric may be. A structure is a
// tensor, or a std::pair, tuple, array, vector, map, unordered_map or optional of structures, or a
// struct that opts in with a function in its own namespace that lists all its members in the order
// of initialisation:
//
//   struct Sample { at::Tensor ids, mask; };
//   inline auto MusterFields(const Sample& s) { return std::tie(s.ids, s.mask); }
//
// Structs with members `data` and `target` (LibTorch's Example) need no such function. Anything
// else (numbers, texts) is a plain value and goes through unchanged. Functions here never change
// their argument; tensors in a result may share storage with the argument's. Tensors are visited in
// the order of members, keys of unordered maps sorted, so the order is the same on every rank.
// Errors are thrown as c10::Error.

namespace nested_internal {

template <class T>
concept IsTensor = std::is_same_v<T, at::Tensor>;

template <class T>
concept HasFields = requires(const T& value) {
  MusterFields(value);
};

template <class T>
concept IsTuple = !HasFields<T> && requires {
  std::tuple_size<T>::value;
  typename std::tuple_element<0, T>::type;
};

template <class T>
concept HasData = std::is_class_v<T> && requires {
  requires std::is_member_object_pointer_v<decltype(&T::data)>;
};
template <class T>
concept HasTarget = std::is_class_v<T> && requires {
  requires std::is_member_object_pointer_v<decltype(&T::target)>;
};
template <class T>
concept IsExample = !HasFields<T> && HasData<T>;

template <class T>
concept IsMap = requires {
  typename T::key_type;
  typename T::mapped_type;
};

template <class T>
struct IsVectorImpl : std::false_type {};
template <class E, class A>
struct IsVectorImpl<std::vector<E, A>> : std::true_type {};
template <class T>
concept IsVector = IsVectorImpl<T>::value;

template <class T>
struct IsOptionalImpl : std::false_type {};
template <class E>
struct IsOptionalImpl<std::optional<E>> : std::true_type {};
template <class T>
concept IsOptional = IsOptionalImpl<T>::value;

// The members of a product type (tuple, Example, struct with MusterFields) as a tuple of const
// references.
template <class T>
auto Fields(const T& value) {
  if constexpr (HasFields<T>) {
    return MusterFields(value);
  } else if constexpr (IsExample<T>) {
    if constexpr (HasTarget<T>) {
      return std::tie(value.data, value.target);
    } else {
      return std::tie(value.data);
    }
  } else {
    return std::apply([](const auto&... fields) { return std::tie(fields...); }, value);
  }
}
template <class T>
concept IsProduct = HasFields<T> || IsExample<T> || IsTuple<T>;

template <class T, class... Fs>
T MakeProduct(Fs&&... fields) {
  if constexpr (std::is_aggregate_v<T>) {
    return T{std::forward<Fs>(fields)...};
  } else {
    return T(std::forward<Fs>(fields)...);
  }
}

template <class T>
constexpr bool HoldsTensor();

template <class Tuple>
struct AnyHoldsTensor;
template <class... Fs>
struct AnyHoldsTensor<std::tuple<Fs...>> {
  static constexpr bool value = (HoldsTensor<std::remove_cvref_t<Fs>>() || ... || false);
};

// Whether a T can hold tensors: the others are copied whole.
template <class T>
constexpr bool HoldsTensor() {
  if constexpr (IsTensor<T>) {
    return true;
  } else if constexpr (IsProduct<T>) {
    return AnyHoldsTensor<decltype(Fields(std::declval<const T&>()))>::value;
  } else if constexpr (IsMap<T>) {
    return HoldsTensor<typename T::mapped_type>();
  } else if constexpr (IsVector<T> || IsOptional<T>) {
    return HoldsTensor<typename T::value_type>();
  } else {
    return false;
  }
}

// The keys of a map in sorted order.
template <class M>
std::vector<const typename M::key_type*> SortedKeys(const M& map) {
  std::vector<const typename M::key_type*> keys;
  keys.reserve(map.size());
  for (const auto& entry : map) keys.push_back(&entry.first);
  std::sort(keys.begin(), keys.end(), [](const auto* a, const auto* b) { return *a < *b; });
  return keys;
}

template <class T, class FTensor, class FPlainList>
T MapBoth(const T& value, FTensor& on_tensor, FPlainList& on_list) {
  if constexpr (IsTensor<T>) {
    return on_tensor(value);
  } else if constexpr (IsVector<T> && !HoldsTensor<T>()) {
    return on_list(value);
  } else if constexpr (IsProduct<T>) {
    // Braces, so that fields are visited in order.
    return std::apply(
        [&](const auto&... fields) {
          std::tuple<std::remove_cvref_t<decltype(fields)>...> mapped{
              MapBoth(fields, on_tensor, on_list)...};
          return std::apply([](auto&... parts) { return MakeProduct<T>(std::move(parts)...); },
                            mapped);
        },
        Fields(value));
  } else if constexpr (IsMap<T>) {
    T result;
    for (const auto* key : SortedKeys(value)) {
      result.emplace(*key, MapBoth(value.at(*key), on_tensor, on_list));
    }
    return result;
  } else if constexpr (IsVector<T>) {
    T result;
    result.reserve(value.size());
    for (const auto& element : value) result.push_back(MapBoth(element, on_tensor, on_list));
    return result;
  } else if constexpr (IsOptional<T>) {
    if (!value.has_value()) return std::nullopt;
    return T(MapBoth(*value, on_tensor, on_list));
  } else {
    return value;
  }
}

template <class T>
T ConcatenateParts(const std::vector<const T*>& parts, int64_t dim) {
  const T& first = *parts.front();
  if constexpr (IsTensor<T>) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(parts.size());
    for (const T* part : parts) tensors.push_back(*part);
    return at::cat(tensors, dim);
  } else if constexpr (IsProduct<T>) {
    constexpr size_t kFields = std::tuple_size_v<decltype(Fields(first))>;
    return [&]<size_t... I>(std::index_sequence<I...>) {
      const auto field = [&](auto index) {
        using F = std::remove_cvref_t<std::tuple_element_t<index.value, decltype(Fields(first))>>;
        std::vector<const F*> fields;
        fields.reserve(parts.size());
        for (const T* part : parts) fields.push_back(&std::get<index.value>(Fields(*part)));
        return ConcatenateParts<F>(fields, dim);
      };
      return MakeProduct<T>(field(std::integral_constant<size_t, I>())...);
    }
    (std::make_index_sequence<kFields>());
  } else if constexpr (IsMap<T>) {
    T result;
    for (const auto* key : SortedKeys(first)) {
      std::vector<const typename T::mapped_type*> values;
      for (const T* part : parts) {
        const auto found = part->find(*key);
        TORCH_CHECK(found != part->end() && part->size() == first.size(),
                    "Concatenate: the maps have different keys");
        values.push_back(&found->second);
      }
      result.emplace(*key, ConcatenateParts<typename T::mapped_type>(values, dim));
    }
    return result;
  } else if constexpr (IsVector<T>) {
    T result;
    if constexpr (!HoldsTensor<T>()) {
      for (const T* part : parts) result.insert(result.end(), part->begin(), part->end());
    } else {
      for (size_t i = 0; i < first.size(); ++i) {
        std::vector<const typename T::value_type*> elements;
        for (const T* part : parts) {
          TORCH_CHECK(part->size() == first.size(), "Concatenate: vectors of tensors have ",
                      first.size(), " and ", part->size(), " elements");
          elements.push_back(&(*part)[i]);
        }
        result.push_back(ConcatenateParts<typename T::value_type>(elements, dim));
      }
    }
    return result;
  } else if constexpr (IsOptional<T>) {
    std::vector<const typename T::value_type*> values;
    for (const T* part : parts) {
      TORCH_CHECK(part->has_value() == first.has_value(),
                  "Concatenate: an optional part is missing in some");
      if (part->has_value()) values.push_back(&**part);
    }
    if (values.empty()) return std::nullopt;
    return T(ConcatenateParts<typename T::value_type>(values, dim));
  } else {
    for (const T* part : parts) {
      TORCH_CHECK(*part == first,
                  "Concatenate: a plain value differs between the parts; put it into a tensor");
    }
    return first;
  }
}

}  // namespace nested_internal

// The structure with f(tensor) in place of every tensor. f: at::Tensor(const at::Tensor&).
template <class T, class F>
T MapTensors(const T& value, F&& f) {
  const auto keep = [](const auto& list) { return list; };
  return nested_internal::MapBoth(value, f, keep);
}

// Calls f(tensor) for every tensor, in order.
template <class T, class F>
void ForEachTensor(const T& value, F&& f) {
  using namespace nested_internal;  // NOLINT: names of this header only
  if constexpr (IsTensor<T>) {
    f(value);
  } else if constexpr (!HoldsTensor<T>()) {
    return;
  } else if constexpr (IsProduct<T>) {
    std::apply([&](const auto&... fields) { (ForEachTensor(fields, f), ...); }, Fields(value));
  } else if constexpr (IsMap<T>) {
    for (const auto* key : SortedKeys(value)) ForEachTensor(value.at(*key), f);
  } else if constexpr (IsVector<T>) {
    for (const auto& element : value) ForEachTensor(element, f);
  } else if constexpr (IsOptional<T>) {
    if (value.has_value()) ForEachTensor(*value, f);
  }
}

// The first dimension of the first tensor that has one; nullopt if there is none.
template <class T>
std::optional<int64_t> FindBatchSize(const T& value) {
  std::optional<int64_t> size;
  ForEachTensor(value, [&](const at::Tensor& tensor) {
    if (!size.has_value() && tensor.defined() && tensor.dim() > 0) size = tensor.size(0);
  });
  return size;
}

// Rows [begin, end) of every tensor (views) and of every vector of plain values. Bounds past the
// end are cut to it. Error: a tensor without dimensions.
template <class T>
T SliceTensors(const T& value, int64_t begin, int64_t end) {
  const auto on_tensor = [&](const at::Tensor& tensor) {
    TORCH_CHECK(tensor.dim() > 0, "SliceTensors: a tensor without dimensions cannot be sliced");
    return tensor.slice(0, begin, end);
  };
  const auto on_list = [&]<class L>(const L& list) {
    const int64_t size = static_cast<int64_t>(list.size());
    const int64_t low = std::clamp<int64_t>(begin, 0, size);
    return L(list.begin() + low, list.begin() + std::clamp(end, low, size));
  };
  return nested_internal::MapBoth(value, on_tensor, on_list);
}

// The parts joined along `dim`, tensor by tensor; vectors of plain values are appended. Errors: no
// parts; structures that differ (keys, lengths), plain values that differ.
template <class T>
T Concatenate(const std::vector<T>& parts, int64_t dim = 0) {
  TORCH_CHECK(!parts.empty(), "Concatenate: nothing to concatenate");
  std::vector<const T*> pointers;
  pointers.reserve(parts.size());
  for (const T& part : parts) pointers.push_back(&part);
  return nested_internal::ConcatenateParts<T>(pointers, dim);
}

// Every tensor on `device`; those already there are kept. With non_blocking, copies from pinned
// memory to a GPU do not wait: they are ordered before later work on the current stream. Copies to
// the CPU always wait, since nothing orders the reads that follow.
template <class T>
T SendToDevice(const T& value, c10::Device device, bool non_blocking = false) {
  non_blocking = non_blocking && !device.is_cpu();
  return MapTensors(value, [&](const at::Tensor& tensor) {
    return tensor.to(device, tensor.scalar_type(), non_blocking);
  });
}

// Every tensor in page-locked memory, as fast copies to a GPU need. Error: no GPU backend is
// loaded.
template <class T>
T PinMemory(const T& value) {
  return MapTensors(value, [](const at::Tensor& tensor) { return tensor.pin_memory(); });
}

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_NESTED_H_
