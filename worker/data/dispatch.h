#ifndef MUSTER_WORKER_DATA_DISPATCH_H_
#define MUSTER_WORKER_DATA_DISPATCH_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "worker/collective/comm.h"
#include "worker/collective/plain_tensor.h"
#include "worker/nested/nested.h"

namespace muster {

// The shape of a batch as bytes, so that ranks that did not read it can receive their slices:
// structure, keys, plain values, and for every tensor its dtype and all dimensions except the
// first. Two batches that differ only in their tensors' contents and number of rows have the same
// schema.
//
// The bytes come from rank 0 of the same build, so decoding checks lengths but not meaning.
namespace dispatch_internal {

class SchemaWriter {
 public:
  void Bytes(const void* data, size_t size) { text_.append(static_cast<const char*>(data), size); }
  template <class N>
  requires std::is_trivially_copyable_v<N>
  void Number(N number) { Bytes(&number, sizeof(number)); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class SchemaReader {
 public:
  explicit SchemaReader(const std::string& text) : text_(text) {}
  template <class N>
  N Number() {
    N number;
    TORCH_CHECK(text_.size() - at_ >= sizeof(N), "dispatch: a batch's schema is cut off");
    std::memcpy(&number, text_.data() + at_, sizeof(N));
    at_ += sizeof(N);
    return number;
  }
  std::string Text(size_t size) {
    TORCH_CHECK(text_.size() - at_ >= size, "dispatch: a batch's schema is cut off");
    at_ += size;
    return text_.substr(at_ - size, size);
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

// Types sent as their bytes. Not pointers and views, which mean nothing in another process.
template <class T>
concept IsRaw =
    std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !nested_internal::IsOtherRange<T>;

template <class T>
void Write(const T& value, SchemaWriter* out) {
  using namespace nested_internal;  // NOLINT: names of nested.h
  if constexpr (IsTensor<T>) {
    out->Number<int8_t>(static_cast<int8_t>(value.scalar_type()));
    out->Number<int64_t>(value.dim());
    for (int64_t i = 1; i < value.dim(); ++i) out->Number<int64_t>(value.size(i));
  } else if constexpr (std::is_same_v<T, std::string>) {
    out->Number<int64_t>(static_cast<int64_t>(value.size()));
    out->Bytes(value.data(), value.size());
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
    std::apply([&](const auto&... fields) { (Write(fields, out), ...); }, Fields(value));
  } else if constexpr (IsMap<T>) {
    out->Number<int64_t>(static_cast<int64_t>(value.size()));
    for (const auto* key : SortedKeys(value)) {
      Write(*key, out);
      Write(value.at(*key), out);
    }
  } else if constexpr (IsVector<T>) {
    out->Number<int64_t>(static_cast<int64_t>(value.size()));
    for (const auto& element : value)
      Write<std::remove_cvref_t<typename T::value_type>>(element, out);
  } else if constexpr (IsOptional<T>) {
    out->Number<bool>(value.has_value());
    if (value.has_value()) Write(*value, out);
  } else if constexpr (IsRaw<T>) {
    out->Number(value);
  } else {
    TORCH_CHECK(false,
                "dispatch: a batch holds a value that cannot be sent to other ranks (neither "
                "tensor, number, text "
                "nor a list or map of them): use dispatch_batches=false");
  }
}

// `make`: at::Tensor(at::ScalarType, sizes with 0 for the first).
template <class T, class Make>
T Read(SchemaReader* in, Make& make) {
  using namespace nested_internal;  // NOLINT: names of nested.h
  if constexpr (IsTensor<T>) {
    const auto type = static_cast<at::ScalarType>(in->Number<int8_t>());
    std::vector<int64_t> sizes(static_cast<size_t>(in->Number<int64_t>()), 0);
    for (size_t i = 1; i < sizes.size(); ++i) sizes[i] = in->Number<int64_t>();
    return make(type, std::move(sizes));
  } else if constexpr (std::is_same_v<T, std::string>) {
    return in->Text(static_cast<size_t>(in->Number<int64_t>()));
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
    return [&]<class... Fs>(std::type_identity<std::tuple<Fs...>>) {
      // Braces, so that fields are read in order.
      std::tuple<std::remove_cvref_t<Fs>...> fields{Read<std::remove_cvref_t<Fs>>(in, make)...};
      return std::apply([](auto&... parts) { return MakeProduct<T>(std::move(parts)...); }, fields);
    }(std::type_identity<decltype(Fields(std::declval<const T&>()))>());
  } else if constexpr (IsMap<T>) {
    T result;
    for (int64_t left = in->Number<int64_t>(); left > 0; --left) {
      auto key = Read<typename T::key_type>(in, make);
      result.emplace(std::move(key), Read<typename T::mapped_type>(in, make));
    }
    return result;
  } else if constexpr (IsVector<T>) {
    T result;
    for (int64_t left = in->Number<int64_t>(); left > 0; --left) {
      result.push_back(Read<std::remove_cvref_t<typename T::value_type>>(in, make));
    }
    return result;
  } else if constexpr (IsOptional<T>) {
    if (!in->Number<bool>()) return std::nullopt;
    return T(Read<typename T::value_type>(in, make));
  } else if constexpr (IsRaw<T>) {
    return in->Number<T>();
  } else {
    TORCH_CHECK(false, "dispatch: a value that cannot be received");
  }
}

// Plain lists with one entry per row are cut like tensors; other lists are kept whole.
template <class T>
T CutLists(const T& value, int64_t rows, int64_t begin, int64_t end) {
  const auto on_tensor = [](const at::Tensor& tensor) { return tensor; };
  const auto on_list = [&]<class L>(const L& list) {
    if (static_cast<int64_t>(list.size()) != rows) return list;
    return L(list.begin() + begin, list.begin() + end);
  };
  return nested_internal::MapBoth(value, on_tensor, on_list);
}

}  // namespace dispatch_internal

template <class T>
std::string EncodeSchema(const T& value) {
  dispatch_internal::SchemaWriter out;
  dispatch_internal::Write(value, &out);
  return out.text();
}

// (collective) Returns each rank's per_rank rows of `whole`, a batch of per_rank * comm.size() rows
// on `device` that rank 0 passes. `schema` is that of `whole`, the same on every rank. One Scatter
// per tensor. Errors (c10::Error): on rank 0, before anything is sent: see CheckScatterable.
template <class T>
T ScatterBatch(const T* whole, const std::string& schema, int64_t per_rank, at::Device device,
               Comm& comm) {
  using namespace dispatch_internal;  // NOLINT: names of this header only
  const int64_t rows = per_rank * comm.size();
  const int64_t begin = per_rank * comm.rank();
  if (whole != nullptr) {
    const T mine = MapTensors(*whole, [&](const at::Tensor& tensor) {
      std::vector<at::Tensor> parts;
      parts.reserve(static_cast<size_t>(comm.size()));
      for (int r = 0; r < comm.size(); ++r)
        parts.push_back(PlainTensor(tensor.slice(0, r * per_rank, (r + 1) * per_rank)));
      at::Tensor out = at::empty_like(parts[0]);
      comm.Scatter(parts, out, 0);
      return out;
    });
    return CutLists(mine, rows, begin, begin + per_rank);
  }
  SchemaReader in(schema);
  auto make = [&](at::ScalarType type, std::vector<int64_t> sizes) {
    sizes[0] = per_rank;
    at::Tensor out = at::empty(sizes, at::TensorOptions(type).device(device));
    comm.Scatter({}, out, 0);
    return out;
  };
  return CutLists(Read<T>(&in, make), rows, begin, begin + per_rank);
}

// Throws unless every tensor of `whole` has `rows` rows that can be sent.
template <class T>
void CheckScatterable(const T& whole, int64_t rows) {
  ForEachTensor(whole, [&](const at::Tensor& tensor) {
    TORCH_CHECK(tensor.defined(),
                "dispatch: a batch holds an undefined tensor, which has no rows to send: leave it "
                "out, or use dispatch_batches=false");
    TORCH_CHECK(tensor.layout() == at::kStrided, "dispatch: a batch holds a tensor of layout ",
                tensor.layout(),
                ", whose rows cannot be sent: make it dense, or use "
                "dispatch_batches=false");
    TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) == rows, "dispatch: a tensor of shape ",
                tensor.sizes(), " in a batch of ", rows,
                " samples; its first dimension must be the samples', or use "
                "dispatch_batches=false");
  });
}

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_DISPATCH_H_
