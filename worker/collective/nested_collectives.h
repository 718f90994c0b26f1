#ifndef MUSTER_WORKER_COLLECTIVE_NESTED_COLLECTIVES_H_
#define MUSTER_WORKER_COLLECTIVE_NESTED_COLLECTIVES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "worker/collective/call_site.h"
#include "worker/collective/collectives.h"
#include "worker/collective/comm.h"
#include "worker/collective/object_codec.h"
#include "worker/nested/nested.h"
#include "worker/nested/plain_parts.h"

// The collectives over structures of tensors (nested.h defines structures). The structure must be
// the same on all ranks; arguments are never changed unless the function says so. Plain values
// beside tensors stay this rank's own in Gather and PadAcrossProcesses; a value without a tensor,
// which they would return as it is, does not compile. `where` is the caller's line, for debug mode
// (checked_comm.h).
namespace muster {

namespace nested_internal {

// Members without a tensor (on any rank, since the structure is the same) stay as they are.
template <class T>
std::vector<at::Tensor> TensorsOf(const T& value) {
  std::vector<at::Tensor> tensors;
  ForEachTensor(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
  });
  return tensors;
}

template <class T>
T WithTensors(const T& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  return MapTensors(
      value, [&](const at::Tensor& tensor) { return tensor.defined() ? tensors[next++] : tensor; });
}

}  // namespace nested_internal

// Returns every tensor joined along dimension 0 in rank order: see GatherTensors.
template <class T>
T Gather(Comm& comm, const T& value, std::source_location where = std::source_location::current()) {
  nested_internal::RequireTransparent<T>();
  static_assert(!IsTransparent<T>() || nested_internal::HoldsTensor<T>(),
                "no tensor to gather: use gather_object()");
  const CallSite site(where);
  return nested_internal::WithTensors(value,
                                      GatherTensors(comm, nested_internal::TensorsOf(value)));
}

// Returns the objects of all ranks in rank order (object_codec.h lists the supported types). A
// std::vector<E> on each rank gives one std::vector<E> with all elements; any other T gives a
// std::vector<T> with one element per rank (a text is not split into characters, nor a map into its
// keys). One process behaves the same.
template <class T>
auto GatherObject(Comm& comm, const T& value,
                  std::source_location where = std::source_location::current()) {
  const CallSite site(where);
  const std::vector<std::string> all = comm.AllGatherBytes(EncodeObject(value));
  if constexpr (nested_internal::IsVector<T>) {
    T result;
    for (const std::string& bytes : all) {
      for (auto&& element : DecodeObject<T>(bytes)) result.push_back(std::move(element));
    }
    return result;
  } else {
    std::vector<T> result;
    for (const std::string& bytes : all) result.push_back(DecodeObject<T>(bytes));
    return result;
  }
}

// Returns every tensor, or a number, reduced over the ranks and multiplied by `scale`: see
// ReduceTensors. Whole numbers are below 2^63; a result that the number's type cannot hold is an
// error on all ranks. `reduction` is one of sum, mean, max, min; anything else is an error. Numbers
// beside tensors do not compile: they would not be reduced.
template <class T>
T Reduce(Comm& comm, const T& value, const std::string& reduction = "sum", double scale = 1,
         std::source_location where = std::source_location::current()) {
  const CallSite site(where);
  if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    using Wide = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;
    const Wide all = ReduceNumber(comm, static_cast<Wide>(value), ParseReduceOp(reduction), scale);
    const auto result = static_cast<T>(all);
    if constexpr (std::is_integral_v<T>) {
      TORCH_CHECK(static_cast<Wide>(result) == all && (all >= 0 || std::is_signed_v<T>),
                  "reduce(): ", all, " does not fit the type of the number: pass it as int64_t or ",
                  "double");
    }
    return result;
  } else {
    static_assert(!IsTransparent<T>() || (nested_internal::HoldsTensor<T>() &&
                                          !nested_internal::PlainPartsOf<T>().numbers),
                  "reduce() takes tensors, structures of tensors, or one number: of a structure it "
                  "would leave a number as it is, so make that a tensor, torch::tensor(x)");
    return nested_internal::WithTensors(
        value,
        ReduceTensors(comm, nested_internal::TensorsOf(value), ParseReduceOp(reduction), scale));
  }
}

// Returns the object of rank `from` on every rank.
template <class T>
T BroadcastObject(Comm& comm, const T& value, int from = 0,
                  std::source_location where = std::source_location::current()) {
  const CallSite site(where);
  return DecodeObject<T>(
      comm.BroadcastBytes(comm.rank() == from ? EncodeObject(value) : std::string(), from));
}

// Overwrites every tensor in place with that of rank `from`. Returns the structure with these
// tensors and with the plain values of rank `from`.
template <class T>
T Broadcast(Comm& comm, const T& value, int from = 0,
            std::source_location where = std::source_location::current()) {
  using namespace nested_internal;  // NOLINT: names of nested.h and of this header
  RequireTransparent<T>();
  if constexpr (!HoldsTensor<T>()) {
    return BroadcastObject(comm, value, from, where);
  } else {
    const CallSite site(where);
    const std::vector<at::Tensor> tensors = TensorsOf(value);
    BroadcastTensors(comm, tensors, from);
    if constexpr (PlainPartsOf<T>().any) {
      // Tensors are sent separately, so that they stay on their device: here only their places are
      // sent.
      const at::TensorOptions empty(at::kCPU);
      const T places = MapTensors(value, [&](const at::Tensor& tensor) {
        return tensor.defined() ? tensor.new_empty({0}, empty) : tensor;
      });
      return WithTensors(BroadcastObject(comm, places, from, where), tensors);
    } else {
      return value;
    }
  }
}

// Overwrites `list` in place with that of rank `from`, which may have another length.
template <class E>
void BroadcastObjectList(Comm& comm, std::vector<E>& list, int from = 0,
                         std::source_location where = std::source_location::current()) {
  list = BroadcastObject(comm, list, from, where);
}

// Returns every tensor padded along `dim` to the longest on any rank: see
// PadTensorsAcrossProcesses.
template <class T>
T PadAcrossProcesses(Comm& comm, const T& value, int64_t dim = 0, const at::Scalar& pad_value = 0,
                     bool pad_first = false,
                     std::source_location where = std::source_location::current()) {
  nested_internal::RequireTransparent<T>();
  static_assert(!IsTransparent<T>() || nested_internal::HoldsTensor<T>(),
                "no tensor to pad: pad_across_processes() leaves lists as they are, so make it a "
                "tensor, or use gather_object(), for which lists may differ in length");
  const CallSite site(where);
  return nested_internal::WithTensors(
      value, PadTensorsAcrossProcesses(comm, nested_internal::TensorsOf(value), dim, pad_value,
                                       pad_first));
}

// Returns every tensor with zero rows appended until its batch divides evenly: see PadInputTensor.
// Not a collective.
template <class T>
T PadInputTensors(const T& value, int64_t batch_size, int num_processes) {
  return MapTensors(value, [&](const at::Tensor& tensor) {
    return PadInputTensor(tensor, batch_size, num_processes);
  });
}

namespace nested_internal {

template <class T>
void SplitLength(const T& value, std::optional<int64_t>* length) {
  const auto meet = [&](int64_t n) {
    TORCH_CHECK(!length->has_value() || **length == n,
                "split_between_processes: all values must have the same length, not ", **length,
                " and ", n);
    *length = n;
  };
  if constexpr (IsTensor<T>) {
    TORCH_CHECK(value.defined() && value.dim() > 0,
                "split_between_processes: a tensor without dimensions cannot be split");
    meet(value.size(0));
  } else if constexpr (IsVector<T>) {
    meet(static_cast<int64_t>(value.size()));
  } else if constexpr (IsMap<T>) {
    for (const auto* key : SortedKeys(value)) SplitLength(value.at(*key), length);
  } else if constexpr (IsOptional<T>) {
    if (value.has_value()) SplitLength(*value, length);
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
    std::apply([&](const auto&... fields) { (SplitLength(fields, length), ...); }, Fields(value));
  }
}

// Whether T is a std::array, whose length is part of its type, of elements that are not split
// themselves.
template <class T>
inline constexpr bool kIsArrayOfPlain = false;
template <class E, size_t N>
inline constexpr bool kIsArrayOfPlain<std::array<E, N>> =
    !IsTensor<E> && !IsVector<E> && !IsMap<E> && !IsProduct<E> && !HoldsTensor<E>();

template <class T>
T SplitValue(const T& value, const SplitRange& range) {
  if constexpr (IsTensor<T>) {
    return SplitTensor(value, range);
  } else if constexpr (IsVector<T>) {
    T part(value.begin() + range.begin, value.begin() + range.end);
    for (int64_t i = 0; i < range.padding; ++i) part.push_back(value.back());
    return part;
  } else if constexpr (IsMap<T>) {
    T part;
    for (const auto& entry : value) part.emplace(entry.first, SplitValue(entry.second, range));
    return part;
  } else if constexpr (IsOptional<T>) {
    return value.has_value() ? T(SplitValue(*value, range)) : T();
  } else if constexpr (IsProduct<T> && !IsDeclaredPlain<T>) {
    static_assert(!kIsArrayOfPlain<T>,
                  "split_between_processes() would give all of this std::array to every process: "
                  "make it a std::vector or a tensor");
    return std::apply(
        [&](const auto&... fields) { return MakeProduct<T>(SplitValue(fields, range)...); },
        Fields(value));
  } else {
    static_assert(!IsOtherRange<T> || std::is_convertible_v<const T&, std::string_view>,
                  "split_between_processes() would give all of this list to every process: make it "
                  "a std::vector or a tensor");
    static_assert(!IsIValue<T> && !IsTorchList<T> && !IsTorchDict<T>,
                  "split_between_processes() would give all of this value of TorchScript to every "
                  "process: make it a tensor, a std::vector or a std::map");
    return value;
  }
}

}  // namespace nested_internal

// Returns this process's contiguous part of `inputs`: a std::vector is split by elements (of any
// type), a tensor by rows, and a map, a tuple, a struct or an optional by splitting every value in
// it in the same way.
// If the length does not divide evenly, the first ranks get one more; with apply_padding the others
// repeat the last element of the whole, so that all parts are equally long. Anything else (texts,
// numbers, classes whose MusterFields() are none) and the input of a single process are returned
// whole; lists of other types, such as std::deque and TorchScript's, do not compile. Needs no
// communication and never changes `inputs` (tensors of the result are views unless padded). Errors:
// values of different length.
template <class T>
T SplitBetweenProcesses(int num_processes, int rank, const T& inputs, bool apply_padding = false) {
  if (num_processes == 1) return inputs;
  std::optional<int64_t> length;
  nested_internal::SplitLength(inputs, &length);
  if (!length.has_value()) return inputs;
  return nested_internal::SplitValue(inputs,
                                     SplitRangeOf(*length, num_processes, rank, apply_padding));
}

template <class T>
T SplitBetweenProcesses(const Comm& comm, const T& inputs, bool apply_padding = false) {
  return SplitBetweenProcesses(comm.size(), comm.rank(), inputs, apply_padding);
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_NESTED_COLLECTIVES_H_
