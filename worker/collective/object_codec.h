#ifndef MUSTER_WORKER_COLLECTIVE_OBJECT_CODEC_H_
#define MUSTER_WORKER_COLLECTIVE_OBJECT_CODEC_H_

#include <complex>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/BFloat16.h"
#include "c10/util/Exception.h"
#include "c10/util/Half.h"
#include "c10/util/complex.h"
#include "worker/nested/nested.h"

namespace muster {

// Encodes objects as bytes, for gather_object and related functions: numbers, bool, enums,
// std::string, at::Tensor, and vector, array, set, map, unordered_map, optional, pair, tuple,
// c10::List, c10::Dict and structs (nested.h) of these. Both ends run the same program, so no type
// information is sent; reading executes nothing. Tensors arrive on the CPU.

namespace codec_internal {

void PutTensor(const at::Tensor& tensor, std::string* out);

template <class T>
concept IsSet = std::is_same_v<T, std::set<typename T::key_type>>;

// Numbers are sent as their bytes.
template <class T>
struct IsNumberImpl : std::bool_constant<std::is_arithmetic_v<T> || std::is_enum_v<T>> {};
template <class N>
struct IsNumberImpl<std::complex<N>> : std::true_type {};
template <class N>
struct IsNumberImpl<c10::complex<N>> : std::true_type {};
template <>
struct IsNumberImpl<c10::Half> : std::true_type {};
template <>
struct IsNumberImpl<c10::BFloat16> : std::true_type {};
template <class T>
concept IsNumber = IsNumberImpl<T>::value;

// A variable, because compilers print its argument, the user's type, when an assertion on it fails.
template <class T>
inline constexpr bool can_travel_between_ranks = false;

// Bounds-checked view of received bytes.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  const char* Take(uint64_t n) {
    TORCH_CHECK(n <= bytes_.size() - at_, "an object of ", bytes_.size(),
                " bytes from another rank is cut off: do all ranks run the same program?");
    const char* data = bytes_.data() + at_;
    at_ += n;
    return data;
  }
  template <class N>
  N Number() {
    N value;
    std::memcpy(&value, Take(sizeof(N)), sizeof(N));
    return value;
  }
  at::Tensor TakeTensor();
  bool done() const { return at_ == bytes_.size(); }

 private:
  const std::string& bytes_;
  uint64_t at_ = 0;
};

template <class N>
void PutNumber(N value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class T>
void Put(const T& value, std::string* out) {
  using namespace nested_internal;  // NOLINT: names of nested.h only
  if constexpr (IsNumber<T>) {
    PutNumber(value, out);
  } else if constexpr (std::is_same_v<T, std::string>) {
    PutNumber<uint64_t>(value.size(), out);
    out->append(value);
  } else if constexpr (IsTensor<T>) {
    PutTensor(value, out);
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
    std::apply([&](const auto&... fields) { (Put(fields, out), ...); }, Fields(value));
  } else if constexpr (IsMap<T>) {
    PutNumber<uint64_t>(value.size(), out);
    for (const auto* key : SortedKeys(value)) {
      Put(*key, out);
      Put(value.at(*key), out);
    }
  } else if constexpr (IsOptional<T>) {
    PutNumber<uint8_t>(value.has_value(), out);
    if (value.has_value()) Put(*value, out);
  } else if constexpr (IsVector<T>) {
    PutNumber<uint64_t>(value.size(), out);
    for (const typename T::value_type& element : value) Put(element, out);
  } else if constexpr (IsSet<T>) {
    PutNumber<uint64_t>(value.size(), out);
    for (const auto& element : value) Put(element, out);
  } else if constexpr (IsTorchList<T>) {
    PutNumber<uint64_t>(value.size(), out);
    for (size_t i = 0; i < value.size(); ++i) {
      Put<typename IsTorchListImpl<T>::Element>(value.get(i), out);
    }
  } else if constexpr (IsTorchDict<T>) {
    PutNumber<uint64_t>(value.size(), out);
    for (const auto& key : SortedDictKeys(value)) {
      Put(key, out);
      Put<typename IsTorchDictImpl<T>::Value>(value.at(key), out);
    }
  } else {
    static_assert(can_travel_between_ranks<T>,
                  "this type cannot travel between ranks: make it a struct of at most 16 members "
                  "(no base class, C array or reference) or give it MusterFields(); what travels "
                  "are numbers, texts, tensors, and standard containers and structs of them");
  }
}

template <class T>
T Get(Reader* in) {
  using namespace nested_internal;  // NOLINT: names of nested.h only
  if constexpr (IsNumber<T>) {
    return in->Number<T>();
  } else if constexpr (std::is_same_v<T, std::string>) {
    const uint64_t n = in->Number<uint64_t>();
    return std::string(in->Take(n), n);
  } else if constexpr (IsTensor<T>) {
    return in->TakeTensor();
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
    using FieldRefs = decltype(Fields(std::declval<const T&>()));
    return [&]<size_t... I>(std::index_sequence<I...>) {
      // Braces, so that fields are read in order.
      std::tuple<std::remove_cvref_t<std::tuple_element_t<I, FieldRefs>>...> fields{
          Get<std::remove_cvref_t<std::tuple_element_t<I, FieldRefs>>>(in)...};
      return MakeProduct<T>(std::move(std::get<I>(fields))...);
    }
    (std::make_index_sequence<std::tuple_size_v<FieldRefs>>());
  } else if constexpr (IsMap<T>) {
    T map;
    for (uint64_t n = in->Number<uint64_t>(); n > 0; --n) {
      auto key = Get<typename T::key_type>(in);
      map.emplace(std::move(key), Get<typename T::mapped_type>(in));
    }
    return map;
  } else if constexpr (IsOptional<T>) {
    if (in->Number<uint8_t>() == 0) return std::nullopt;
    return T(Get<typename T::value_type>(in));
  } else if constexpr (IsVector<T>) {
    T list;
    for (uint64_t n = in->Number<uint64_t>(); n > 0; --n) {
      list.push_back(Get<typename T::value_type>(in));
    }
    return list;
  } else if constexpr (IsSet<T>) {
    T set;
    for (uint64_t n = in->Number<uint64_t>(); n > 0; --n) set.insert(Get<typename T::key_type>(in));
    return set;
  } else if constexpr (IsTorchList<T>) {
    T list;
    for (uint64_t n = in->Number<uint64_t>(); n > 0; --n) {
      list.push_back(Get<typename IsTorchListImpl<T>::Element>(in));
    }
    return list;
  } else if constexpr (IsTorchDict<T>) {
    T dict;
    for (uint64_t n = in->Number<uint64_t>(); n > 0; --n) {
      auto key = Get<typename IsTorchDictImpl<T>::Key>(in);
      dict.insert(std::move(key), Get<typename IsTorchDictImpl<T>::Value>(in));
    }
    return dict;
  } else {
    static_assert(can_travel_between_ranks<T>,
                  "this type cannot travel between ranks: make it a struct of at most 16 members "
                  "(no base class, C array or reference) or give it MusterFields(); what travels "
                  "are numbers, texts, tensors, and standard containers and structs of them");
  }
}

}  // namespace codec_internal

template <class T>
std::string EncodeObject(const T& value) {
  std::string bytes;
  codec_internal::Put(value, &bytes);
  return bytes;
}

// Errors: c10::Error for bytes that do not end where a T ends.
template <class T>
T DecodeObject(const std::string& bytes) {
  codec_internal::Reader reader(bytes);
  T value = codec_internal::Get<T>(&reader);
  TORCH_CHECK(
      reader.done(), "an object of ", bytes.size(),
      " bytes from another rank is longer than its type: do all ranks run the same program?");
  return value;
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_OBJECT_CODEC_H_
