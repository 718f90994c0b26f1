#ifndef MUSTER_WORKER_NESTED_NESTED_H_
#define MUSTER_WORKER_NESTED_NESTED_H_

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/cat.h"
#include "c10/util/FunctionRef.h"
#include "worker/nested/aggregate.h"

// Recognized without their headers, which are heavy.
namespace c10 {
struct IValue;
template <class K, class V>
class Dict;
template <class T>
class List;
}  // namespace c10
namespace torch::data {
template <typename Data, typename Target>
struct Example;
}  // namespace torch::data

namespace muster {

// Structures of tensors: the types of batches, model outputs and metrics. A structure is
//  - a tensor;
//  - a std::pair, tuple, array, vector, map, unordered_map or optional of structures;
//  - a plain struct of structures (aggregate.h: at most 16 members, no base class, no C array, no
//    reference), LibTorch's Example, or a class that consists only of members `data` and `target`
//    with a constructor that takes them;
//  - c10::List, c10::Dict and c10::IValue, which TorchScript modules return;
//  - a class that opts in with a function in its own namespace that lists all its members in the
//    order of its constructor:
//
//      class Sample { public: Sample(at::Tensor ids, at::Tensor mask); at::Tensor ids, mask; ... };
//      inline auto MusterFields(const Sample& s) { return std::tie(s.ids, s.mask); }
//
//    An empty list, std::tie(), says that the class holds no tensors: it is copied whole.
// Numbers, texts, and containers and trivially copyable types without tensors are plain values and
// pass through unchanged. Any other class is opaque: tensors inside it could not be found, so the
// functions here do not compile for it. See IsTransparent<T>().
//
// Functions here never change their argument; tensors in a result may share storage with the
// argument's. Tensors are visited in the order of members, keys of maps sorted (of std::map by its
// own order), so the order is the same on every rank. Errors are thrown as c10::Error.

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
struct IsTorchExampleImpl : std::false_type {};
template <class D, class G>
struct IsTorchExampleImpl<torch::data::Example<D, G>> : std::true_type {};

template <class T>
concept HasData = std::is_class_v<T> && requires {
  requires std::is_member_object_pointer_v<decltype(&T::data)>;
};
template <class T>
concept HasTarget = std::is_class_v<T> && requires {
  requires std::is_member_object_pointer_v<decltype(&T::target)>;
};

// Whether `data` (and `target`) are T's only members: there is no room for another one.
template <class T>
constexpr bool IsNoMoreThanAnExample() {
  if constexpr (std::is_aggregate_v<T> || std::is_polymorphic_v<T>) {
    return false;
  } else if constexpr (HasData<T> && HasTarget<T>) {
    using Data = decltype(T::data);
    using Target = decltype(T::target);
    return sizeof(T) == sizeof(Data) + sizeof(Target) && std::is_constructible_v<T, Data, Target>;
  } else if constexpr (HasData<T>) {
    return sizeof(T) == sizeof(decltype(T::data)) && std::is_constructible_v<T, decltype(T::data)>;
  } else {
    return false;
  }
}

// LibTorch's Example, and classes like it without other members, which would be lost.
template <class T>
concept IsExample = !HasFields<T> && (IsTorchExampleImpl<T>::value || IsNoMoreThanAnExample<T>());

template <class T>
concept IsIValue = std::is_same_v<T, c10::IValue>;

template <class T>
struct IsTorchListImpl : std::false_type {};
template <class E>
struct IsTorchListImpl<c10::List<E>> : std::true_type {
  using Element = E;
};
template <class T>
concept IsTorchList = IsTorchListImpl<T>::value;

template <class T>
struct IsTorchDictImpl : std::false_type {};
template <class K, class V>
struct IsTorchDictImpl<c10::Dict<K, V>> : std::true_type {
  using Key = K;
  using Value = V;
};
template <class T>
concept IsTorchDict = IsTorchDictImpl<T>::value;

template <class T>
concept IsMap =
    !HasFields<T> && !IsTorchDict<T> && requires(const T& map, const typename T::key_type& key) {
  typename T::mapped_type;
  map.at(key);
  map.find(key) == map.end();
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

// A plain struct.
template <class T>
concept IsStruct = !HasFields<T> && !IsExample<T> && !IsTuple<T> && !IsMap<T> && !IsVector<T> &&
                   !IsOptional<T> && IsDecomposable<T>;

// The members of a product type (tuple, struct, Example, class with MusterFields) as a tuple of
// const references.
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
  } else if constexpr (IsStruct<T>) {
    return MembersOf(value);
  } else {
    return std::apply([](const auto&... fields) { return std::tie(fields...); }, value);
  }
}
template <class T>
concept IsProduct = HasFields<T> || IsExample<T> || IsTuple<T> || IsStruct<T>;

// A class whose MusterFields says that it has no tensors.
template <class T>
concept IsDeclaredPlain = HasFields<T> && requires(const T& value) {
  requires std::tuple_size_v<std::remove_cvref_t<decltype(MusterFields(value))>>
  == 0;
};

template <class T, class... Fs>
T MakeProduct(Fs&&... fields) {
  if constexpr (std::is_aggregate_v<T>) {
    return T{std::forward<Fs>(fields)...};
  } else {
    return T(std::forward<Fs>(fields)...);
  }
}

// `Path`: the types that T is a part of, so that the recursion ends for a struct with a vector of
// itself.
template <class T, class... Path>
constexpr bool HoldsTensorWithin();

template <class Tuple, class... Path>
struct AnyHoldsTensor;
template <class... Fs, class... Path>
struct AnyHoldsTensor<std::tuple<Fs...>, Path...> {
  static constexpr bool value =
      (HoldsTensorWithin<std::remove_cvref_t<Fs>, Path...>() || ... || false);
};

template <class T, class... Path>
constexpr bool HoldsTensorWithin() {
  if constexpr ((std::is_same_v<T, Path> || ... || false)) {
    return false;
  } else if constexpr (IsTensor<T> || IsIValue<T>) {
    return true;
  } else if constexpr (IsProduct<T>) {
    return AnyHoldsTensor<decltype(Fields(std::declval<const T&>())), T, Path...>::value;
  } else if constexpr (IsMap<T>) {
    return HoldsTensorWithin<typename T::mapped_type, T, Path...>();
  } else if constexpr (IsVector<T> || IsOptional<T>) {
    return HoldsTensorWithin<typename T::value_type, T, Path...>();
  } else if constexpr (IsTorchList<T>) {
    return HoldsTensorWithin<typename IsTorchListImpl<T>::Element, T, Path...>();
  } else if constexpr (IsTorchDict<T>) {
    return HoldsTensorWithin<typename IsTorchDictImpl<T>::Value, T, Path...>();
  } else {
    return false;
  }
}

// Whether a T can hold visible tensors; other types are copied whole.
template <class T>
constexpr bool HoldsTensor() {
  return HoldsTensorWithin<T>();
}

// --- What cannot be seen through ---

template <class T>
struct IsVariantImpl : std::false_type {};
template <class... Ts>
struct IsVariantImpl<std::variant<Ts...>> : std::true_type {};
template <class T>
struct IsReferenceWrapperImpl : std::false_type {};
template <class E>
struct IsReferenceWrapperImpl<std::reference_wrapper<E>> : std::true_type {};

// Texts, sets, deques, views, ...
template <class T>
concept IsOtherRange = requires(const T& range) {
  typename T::value_type;
  range.begin();
  range.end();
};
template <class T>
concept IsSmartPointer = requires(const T& pointer) {
  typename T::element_type;
  pointer.get();
  *pointer;
};

template <class T, class... Path>
constexpr auto OpaquePartWithin();

// The first of the types that is not void.
template <class First, class... Rest>
constexpr auto FirstOpaque() {
  if constexpr (!std::is_void_v<typename First::type> || sizeof...(Rest) == 0) {
    return First();
  } else {
    return FirstOpaque<Rest...>();
  }
}

template <class Tuple, class... Path>
struct OpaquePartOfFields;
template <class... Fs, class... Path>
struct OpaquePartOfFields<std::tuple<Fs...>, Path...> {
  using type = typename decltype(FirstOpaque<
                                 decltype(OpaquePartWithin<std::remove_cvref_t<Fs>, Path...>())...,
                                 std::type_identity<void>>())::type;
};
template <class Variant, class... Path>
struct OpaquePartOfAlternatives;
template <class... Ts, class... Path>
struct OpaquePartOfAlternatives<std::variant<Ts...>, Path...>
    : OpaquePartOfFields<std::tuple<Ts...>, Path...> {
  static constexpr bool kHoldsTensor = (HoldsTensor<Ts>() || ...);
};

// std::type_identity of the first part of T, or of T itself, that may hold tensors and is opaque;
// of void if there is none.
template <class T, class... Path>
constexpr auto OpaquePartWithin() {
  using Opaque = std::type_identity<T>;
  using None = std::type_identity<void>;
  if constexpr ((std::is_same_v<T, Path> || ... || false)) {
    return None();
  } else if constexpr (IsTensor<T> || IsIValue<T> || std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                       std::is_null_pointer_v<T>) {
    return None();
  } else if constexpr (std::is_pointer_v<T>) {
    using Pointee = std::remove_cv_t<std::remove_pointer_t<T>>;
    return std::conditional_t < std::is_arithmetic_v<Pointee> || std::is_function_v<Pointee>, None,
           Opaque > ();
  } else if constexpr (IsProduct<T>) {
    return std::type_identity<typename OpaquePartOfFields<
        decltype(Fields(std::declval<const T&>())), T, Path...>::type>();
  } else if constexpr (IsMap<T>) {
    return OpaquePartWithin<typename T::mapped_type, T, Path...>();
  } else if constexpr (IsVector<T> || IsOptional<T>) {
    return OpaquePartWithin<typename T::value_type, T, Path...>();
  } else if constexpr (IsTorchList<T>) {
    return OpaquePartWithin<typename IsTorchListImpl<T>::Element, T, Path...>();
  } else if constexpr (IsTorchDict<T>) {
    return OpaquePartWithin<typename IsTorchDictImpl<T>::Value, T, Path...>();
  } else if constexpr (IsVariantImpl<T>::value) {
    if constexpr (OpaquePartOfAlternatives<T, T, Path...>::kHoldsTensor) {
      return Opaque();
    } else {
      return std::type_identity<typename OpaquePartOfAlternatives<T, T, Path...>::type>();
    }
  } else if constexpr (IsOtherRange<T>) {
    using Element = std::remove_cv_t<typename T::value_type>;
    if constexpr (std::is_same_v<Element, T>) {
      return None();
    } else if constexpr (HoldsTensor<Element>()) {
      return Opaque();
    } else {
      return OpaquePartWithin<Element, T, Path...>();
    }
  } else if constexpr (IsReferenceWrapperImpl<T>::value) {
    return Opaque();
  } else if constexpr (std::is_empty_v<T> ||
                       (std::is_trivially_copyable_v<T> && std::is_copy_assignable_v<T>)) {
    // There is no room for a tensor, which is not trivially copyable, nor for a reference to one,
    // which could not be assigned.
    return None();
  } else if constexpr (IsSmartPointer<T>) {
    using Element = std::remove_cv_t<typename T::element_type>;
    if constexpr (std::is_array_v<Element> || std::is_void_v<Element>) {
      return Opaque();
    } else if constexpr (std::is_polymorphic_v<Element> || HoldsTensor<Element>()) {
      return Opaque();
    } else {
      return OpaquePartWithin<Element, T, Path...>();
    }
  } else {
    return Opaque();
  }
}

template <class T>
using OpaquePart = typename decltype(OpaquePartWithin<T>())::type;

// A variable, because compilers print its argument when an assertion on it fails.
template <class Part>
inline constexpr bool can_be_seen_through = std::is_void_v<Part>;

// Names the type of the offending part in the compiler's error.
template <class T>
constexpr void RequireTransparent() {
  static_assert(can_be_seen_through<OpaquePart<T>>,
                "this type cannot be seen through, its tensors would be missed: make it a struct "
                "of at most 16 members (no base class, C array or reference), or give it "
                "MusterFields()");
}

// --- Keys ---

// An order of the keys of TorchScript dictionaries, by type and then by value.
bool KeyLess(const c10::IValue& a, const c10::IValue& b);

// The keys of a map in sorted order.
template <class M>
std::vector<const typename M::key_type*> SortedKeys(const M& map) {
  std::vector<const typename M::key_type*> keys;
  keys.reserve(map.size());
  for (const auto& entry : map) keys.push_back(&entry.first);
  std::sort(keys.begin(), keys.end(), [](const auto* a, const auto* b) { return *a < *b; });
  return keys;
}

// The same for a c10::Dict; keys without an order stay in insertion order.
template <class D>
auto SortedDictKeys(const D& dict) {
  using K = typename IsTorchDictImpl<D>::Key;
  std::vector<K> keys;
  keys.reserve(dict.size());
  for (const auto& entry : dict) keys.push_back(entry.key());
  if constexpr (IsIValue<K>) {
    std::stable_sort(keys.begin(), keys.end(), KeyLess);
  } else if constexpr (requires(const K& key) { key < key; } && !IsTensor<K>) {
    std::sort(keys.begin(), keys.end());
  }
  return keys;
}

// --- c10::IValue: tensors inside tuples, lists and dictionaries. Errors: a TorchScript object,
// future or the like, which cannot be seen through. ---

using MapFunction = c10::function_ref<at::Tensor(const at::Tensor&)>;
using VisitFunction = c10::function_ref<void(const at::Tensor&)>;
c10::IValue MapIValue(const c10::IValue& value, MapFunction function);
void VisitIValue(const c10::IValue& value, VisitFunction function);
// Concatenates the tensors; other parts must be equal.
c10::IValue ConcatenateIValues(const std::vector<const c10::IValue*>& parts, int64_t dim);

template <class T, class FTensor, class FPlainList>
T MapBoth(const T& value, FTensor& on_tensor, FPlainList& on_list) {
  if constexpr (IsTensor<T>) {
    return on_tensor(value);
  } else if constexpr (IsIValue<T>) {
    return MapIValue(value, on_tensor);
  } else if constexpr (IsDeclaredPlain<T>) {
    return value;
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
  } else if constexpr (IsTorchList<T> && HoldsTensor<T>()) {
    using E = typename IsTorchListImpl<T>::Element;
    T result = value.copy();
    for (size_t i = 0; i < value.size(); ++i) {
      result.set(i, MapBoth<E>(value.get(i), on_tensor, on_list));
    }
    return result;
  } else if constexpr (IsTorchDict<T> && HoldsTensor<T>()) {
    using V = typename IsTorchDictImpl<T>::Value;
    T result = value.copy();
    for (const auto& key : SortedDictKeys(value)) {
      result.insert_or_assign(key, MapBoth<V>(value.at(key), on_tensor, on_list));
    }
    return result;
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
    for (const T* part : parts) {
      TORCH_CHECK(part->defined() == first.defined(),
                  "Concatenate: a tensor is undefined in some parts and defined in others");
      tensors.push_back(*part);
    }
    return first.defined() ? at::cat(tensors, dim) : at::Tensor();
  } else if constexpr (IsIValue<T>) {
    return ConcatenateIValues(parts, dim);
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
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
  } else if constexpr (IsTorchList<T> && HoldsTensor<T>()) {
    using E = typename IsTorchListImpl<T>::Element;
    T result = first.copy();
    for (size_t i = 0; i < first.size(); ++i) {
      std::vector<E> elements;
      for (const T* part : parts) {
        TORCH_CHECK(part->size() == first.size(), "Concatenate: lists of tensors have ",
                    first.size(), " and ", part->size(), " elements");
        elements.push_back(part->get(i));
      }
      std::vector<const E*> pointers;
      for (const E& element : elements) pointers.push_back(&element);
      result.set(i, ConcatenateParts<E>(pointers, dim));
    }
    return result;
  } else if constexpr (IsTorchDict<T> && HoldsTensor<T>()) {
    using V = typename IsTorchDictImpl<T>::Value;
    T result = first.copy();
    for (const auto& key : SortedDictKeys(first)) {
      std::vector<V> values;
      for (const T* part : parts) {
        TORCH_CHECK(part->contains(key) && part->size() == first.size(),
                    "Concatenate: the dictionaries have different keys");
        values.push_back(part->at(key));
      }
      std::vector<const V*> pointers;
      for (const V& value : values) pointers.push_back(&value);
      result.insert_or_assign(key, ConcatenateParts<V>(pointers, dim));
    }
    return result;
  } else {
    for (const T* part : parts) {
      bool same = part == &first;
      if constexpr (requires { static_cast<bool>(*part == first); }) same = same || *part == first;
      TORCH_CHECK(same,
                  "Concatenate: a plain value differs between the parts; put it into a tensor");
    }
    return first;
  }
}

}  // namespace nested_internal

// Whether every tensor in a T is visible: true for structures and plain values, false for classes
// that are opaque or have an opaque part. For a static_assert on users' types.
template <class T>
constexpr bool IsTransparent() {
  return std::is_void_v<nested_internal::OpaquePart<T>>;
}

// Returns the structure with f(tensor) in place of every tensor. f: at::Tensor(const at::Tensor&).
template <class T, class F>
T MapTensors(const T& value, F&& f) {
  nested_internal::RequireTransparent<T>();
  const auto keep = [](const auto& list) { return list; };
  return nested_internal::MapBoth(value, f, keep);
}

// Calls f(tensor) for every tensor, in order.
template <class T, class F>
void ForEachTensor(const T& value, F&& f) {
  using namespace nested_internal;  // NOLINT: names of this header only
  RequireTransparent<T>();
  if constexpr (IsTensor<T>) {
    f(value);
  } else if constexpr (IsIValue<T>) {
    VisitIValue(value, f);
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
  } else if constexpr (IsTorchList<T>) {
    using E = typename IsTorchListImpl<T>::Element;
    for (size_t i = 0; i < value.size(); ++i) ForEachTensor<E>(value.get(i), f);
  } else if constexpr (IsTorchDict<T>) {
    using V = typename IsTorchDictImpl<T>::Value;
    for (const auto& key : SortedDictKeys(value)) ForEachTensor<V>(value.at(key), f);
  }
}

// Returns the structure with the tensors that f(tensors) returns, one for each of its own, in
// order. f: std::vector<at::Tensor>(std::vector<at::Tensor>).
template <class T, class F>
T MapAllTensors(const T& value, F&& f) {
  std::vector<at::Tensor> tensors;
  ForEachTensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  const std::vector<at::Tensor> mapped = f(std::move(tensors));
  size_t next = 0;
  return MapTensors(value, [&](const at::Tensor&) { return mapped[next++]; });
}

// Returns the first dimension of the first tensor that has one; nullopt if there is none.
template <class T>
std::optional<int64_t> FindBatchSize(const T& value) {
  std::optional<int64_t> size;
  ForEachTensor(value, [&](const at::Tensor& tensor) {
    if (!size.has_value() && tensor.defined() && tensor.dim() > 0) size = tensor.size(0);
  });
  return size;
}

// Returns rows [begin, end) of every tensor (views) and of every vector of plain values. Bounds
// past the end are clamped; undefined tensors stay undefined. Error: a tensor without dimensions.
template <class T>
T SliceTensors(const T& value, int64_t begin, int64_t end) {
  const auto on_tensor = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
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

// Returns the parts joined along `dim`, tensor by tensor; vectors of plain values are appended.
// Errors: no parts; structures that differ (keys, lengths), plain values that differ.
template <class T>
T Concatenate(const std::vector<T>& parts, int64_t dim = 0) {
  nested_internal::RequireTransparent<T>();
  TORCH_CHECK(!parts.empty(), "Concatenate: nothing to concatenate");
  std::vector<const T*> pointers;
  pointers.reserve(parts.size());
  for (const T& part : parts) pointers.push_back(&part);
  return nested_internal::ConcatenateParts<T>(pointers, dim);
}

// Returns every tensor on `device`; those already there, and undefined ones, are kept. With
// non_blocking, copies from pinned memory to a GPU do not block: they are ordered before later work
// on the current stream. Copies to the CPU always block, since nothing orders the reads that
// follow.
template <class T>
T SendToDevice(const T& value, c10::Device device, bool non_blocking = false) {
  non_blocking = non_blocking && !device.is_cpu();
  return MapTensors(value, [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device, tensor.scalar_type(), non_blocking) : tensor;
  });
}

// Returns every tensor in page-locked memory, which fast copies to a GPU need. Error: no GPU
// backend is loaded.
template <class T>
T PinMemory(const T& value) {
  return MapTensors(value, [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.pin_memory() : tensor;
  });
}

}  // namespace muster

#endif  // MUSTER_WORKER_NESTED_NESTED_H_
