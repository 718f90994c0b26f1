#ifndef MUSTER_WORKER_DATA_DATASET_H_
#define MUSTER_WORKER_DATA_DATASET_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/ArrayRef.h"
#include "worker/data/collate.h"
#include "worker/data/data_error.h"
#include "worker/data/data_random.h"
#include "worker/nested/nested.h"

namespace torch::data::datasets {
template <typename Self, typename SingleExample>
class Dataset;
}  // namespace torch::data::datasets

namespace muster {

// The requirements on a data set. There is no base class: a type is used through the functions that
// it has.
//
// Map style (random access): `size()` (an integer, or an optional of one) and at least one of
//  - get_batch(indices), where indices is a const std::vector<int64_t>&, c10::ArrayRef<int64_t> or
//    c10::ArrayRef<size_t>. It returns a finished batch, or a std::vector of examples (pairs,
//    tuples, structs, or what get() returns) that are then collated. Fastest: one call per batch.
//  - get(index): one example.
//  - operator[](index): one example, so a std::vector of examples is a data set.
//
// Stream (in order only; `size()` may be missing): one of
//  - next(): std::optional of an example, empty at the end; and `reset()`, which starts a new pass.
//  - get_batch(n), as in LibTorch's stateful data sets: up to n examples, or an empty optional (or
//    vector) at the end; and `reset()`.
//  - begin()/end(): any range; begin() starts a new pass.
// and optionally skip(n), which skips up to n examples without making them and returns how many it
// skipped; after a shorter skip, the stream is asked for the next example, which must be empty if
// skip() has reached the end. Otherwise nothing is requested from a stream after its end. One pass
// at a time reads it, the one that began last; only ranges may be read by several at once.
//
// and optionally shard(rank, world_size) (integers), for streams that can be divided at their
// source (by files, by a query, ...). It is called once, when the loader is prepared, and either
// restricts the stream to this rank's part or returns (by value or std::shared_ptr) a stream of
// that part. Then every rank reads only its own part. If shard() returns nothing, it is called on a
// copy of the stream if that can be copied. Parts may differ in length: ranks still end together,
// see batches().
//
// Any: `set_epoch(int64_t)`, called before each pass.
//
// Random numbers, for augmentation: in reading threads LibTorch's random functions draw from the
// reader's generator, seeded for every batch (for a stream: for every pass, and for every batch
// that is collated) from the loader's seed, the epoch, the rank and the batch's index. So they do
// not depend on the number of workers, continue identically after a restart (in a stream with
// skip() if it skips the numbers, too, or draws from data_seed()), and do not disturb the generator
// that dropout draws from. Without workers the training thread reads a map-style data set with its
// own generator, and a stream, of which it reads a batch ahead, with the reader's. For your own
// random engines use data_seed() (data_random.h).
//
// torch::data::datasets::Dataset, MapDataset (transforms) and stateful data sets meet these
// requirements as they are.
//
// Threads: workers share a map-style data set whose reading functions are const; these must be safe
// to call from several threads at once. A data set with non-const reading functions (such as
// LibTorch's) is copied once for each worker; the copies live as long as the loader and get each
// epoch through set_epoch(). They do not see other changes to the data set after the first pass. A
// copied random engine gives the same numbers in each copy, so results depend on which worker reads
// what: seed such engines with data_seed().

// Returns the rows of `tensor` with these indices, like at::index_select(tensor, 0, indices) but
// several times faster for small batches of CPU tensors. Error (c10::Error): an index out of range.
at::Tensor SelectRows(const at::Tensor& tensor, const std::vector<int64_t>& indices);

// Tensors that share their first dimension: a sample is a row of each. A batch is one tensor for
// TensorDataset(x), otherwise a tuple of tensors, made without a copy per sample. Thread-safe.
// Errors (c10::Error): different lengths, no dimension.
template <class... Tensors>
class TensorDataset {
 public:
  static_assert(sizeof...(Tensors) >= 1 && (std::is_same_v<Tensors, at::Tensor> && ...));

  explicit TensorDataset(Tensors... tensors) : tensors_(std::move(tensors)...) {
    const auto check = [&](const at::Tensor& tensor) {
      TORCH_CHECK(tensor.defined() && tensor.dim() > 0,
                  "TensorDataset: a tensor without a first dimension");
      TORCH_CHECK(tensor.size(0) == static_cast<int64_t>(size()), "TensorDataset: tensors have ",
                  size(), " and ", tensor.size(0), " rows");
    };
    std::apply([&](const auto&... tensor) { (check(tensor), ...); }, tensors_);
  }

  size_t size() const {
    const at::Tensor& first = std::get<0>(tensors_);
    return first.defined() && first.dim() > 0 ? static_cast<size_t>(first.size(0)) : 0;
  }

  auto get_batch(const std::vector<int64_t>& indices) const {
    if constexpr (sizeof...(Tensors) == 1) {
      return SelectRows(std::get<0>(tensors_), indices);
    } else {
      return std::apply(
          [&](const auto&... tensor) { return std::make_tuple(SelectRows(tensor, indices)...); },
          tensors_);
    }
  }

 private:
  std::tuple<Tensors...> tensors_;
};

namespace dataset_internal {

using Indices = std::vector<int64_t>;

template <class D>
concept HasGetBatch = requires(D& d, const Indices& indices) {
  d.get_batch(indices);
};
template <class D>
concept HasGetBatchUnsigned = !HasGetBatch<D> && requires(D & d, c10::ArrayRef<size_t> indices) {
  d.get_batch(indices);
};
template <class D>
concept HasGet = requires(D& d, size_t index) {
  d.get(index);
};
template <class D>
concept IsIndexable = !HasGet<D> && requires(D & d, size_t index) {
  d[index];
  d.size();
}
&&!requires { typename D::mapped_type; };  // a map would create samples that it lacks
template <class D>
concept IsMapStyle = HasGetBatch<D> || HasGetBatchUnsigned<D> || HasGet<D> || IsIndexable<D>;

// Whether D's get_batch() is that of LibTorch's Dataset, which calls get() for each index; then
// this library calls get() itself, to know which sample is being read.
template <class M>
struct IsTorchGetBatchImpl : std::false_type {};
template <class R, class Self, class Example, class Indices>
struct IsTorchGetBatchImpl<R (torch::data::datasets::Dataset<Self, Example>::*)(Indices)>
    : std::true_type {};
template <class D>
concept HasTorchGetBatch = HasGet<D> && requires {
  requires IsTorchGetBatchImpl<decltype(&D::get_batch)>::value;
};

template <class D>
concept HasNext = !IsMapStyle<D> && requires(D & d) {
  *d.next();
  d.next().has_value();
};
template <class D>
concept HasStreamBatch = !IsMapStyle<D> && !HasNext<D> && requires(D & d, size_t count) {
  d.get_batch(count);
};
template <class D>
concept IsRange = !IsMapStyle<D> && !HasNext<D> && !HasStreamBatch<D> && requires(D & d) {
  *d.begin();
  d.end();
};
template <class D>
concept IsStream = HasNext<D> || HasStreamBatch<D> || IsRange<D>;

template <class D>
concept HasShard = IsStream<D> && requires(D& d, int rank, int world_size) {
  d.shard(rank, world_size);
};

// Returns this rank's part of a stream, as a std::shared_ptr.
template <HasShard D>
auto ShardOf(const std::shared_ptr<D>& stream, int rank, int world_size) {
  using Part = decltype(stream->shard(rank, world_size));
  if constexpr (std::is_void_v<Part>) {
    std::shared_ptr<D> part = stream;
    // Loaders prepared later from the same stream must not divide this part.
    if constexpr (std::is_copy_constructible_v<D>) part = std::make_shared<D>(*stream);
    part->shard(rank, world_size);
    return part;
  } else if constexpr (requires(Part part) { std::shared_ptr(std::move(part)); }) {
    return std::shared_ptr(stream->shard(rank, world_size));
  } else {
    return std::make_shared<std::remove_cvref_t<Part>>(stream->shard(rank, world_size));
  }
}

// Whether reading leaves the data set unchanged, so that workers can share it.
template <class D>
concept IsConstReadable = (HasGetBatch<D> && HasGetBatch<const D>) ||
                          (HasGetBatchUnsigned<D> && HasGetBatchUnsigned<const D>) ||
                          (!HasGetBatch<D> && !HasGetBatchUnsigned<D> &&
                           (HasGet<const D> || (!HasGet<D> && IsIndexable<const D>)));

template <class D>
std::optional<int64_t> SizeOf(const D& dataset) {
  if constexpr (requires { dataset.size().has_value(); }) {
    const auto size = dataset.size();
    if (!size.has_value()) return std::nullopt;
    return static_cast<int64_t>(*size);
  } else if constexpr (requires { static_cast<int64_t>(dataset.size()); }) {
    return static_cast<int64_t>(dataset.size());
  } else {
    return std::nullopt;
  }
}

template <class D>
void SetEpoch(D& dataset, int64_t epoch) {
  if constexpr (requires { dataset.set_epoch(epoch); }) dataset.set_epoch(epoch);
}

// Returns the data set's result for a list of indices: a finished batch, or examples.
template <class D>
auto Fetch(D& dataset, const Indices& indices) {
  if constexpr (HasGetBatch<D>) {
    return dataset.get_batch(indices);
  } else if constexpr (HasGetBatchUnsigned<D> && !HasTorchGetBatch<D>) {
    static_assert(sizeof(size_t) == sizeof(int64_t));
    // Indices are not negative, and signed and unsigned types of one size may alias.
    return dataset.get_batch(
        c10::ArrayRef<size_t>(reinterpret_cast<const size_t*>(indices.data()), indices.size()));
  } else {
    const auto one = [&](int64_t index) {
      if constexpr (HasGet<D>) {
        return dataset.get(static_cast<size_t>(index));
      } else {
        return dataset[static_cast<size_t>(index)];
      }
    };
    std::vector<std::remove_cvref_t<decltype(one(0))>> examples;
    examples.reserve(indices.size());
    for (const int64_t index : indices) {
      SetDataSample(static_cast<int64_t>(examples.size()));
      try {
        examples.push_back(one(index));
      } catch (const std::exception& error) {
        throw DataError("sample " + std::to_string(index) + ": " + ErrorText(error));
      }
    }
    SetDataSample(-1);
    return examples;
  }
}

template <class D, class R>
constexpr bool IsExampleList() {
  if constexpr (!nested_internal::IsVector<R>) {
    return false;
  } else {
    using E = typename R::value_type;
    if constexpr (HasGet<D>) {
      return std::is_same_v<E, std::remove_cvref_t<decltype(std::declval<D&>().get(size_t{0}))>>;
    } else if constexpr (!HasGetBatch<D> && !HasGetBatchUnsigned<D>) {
      return true;
    } else {
      return nested_internal::IsProduct<E>;
    }
  }
}

// Finished batches go through `collate` only if it is the user's.
template <class D, class C>
auto ReadBatch(D& dataset, C& collate, const Indices& indices) {
  using Fetched = decltype(Fetch(dataset, indices));
  if constexpr (!IsExampleList<D, Fetched>() && std::is_same_v<C, DefaultCollate>) {
    return Fetch(dataset, indices);
  } else {
    return collate(Fetch(dataset, indices));
  }
}

// One pass over a stream, example by example.
template <class D>
class StreamCursor {
  static auto ExampleOf(D& d) {
    if constexpr (HasNext<D>) {
      return *d.next();
    } else if constexpr (HasStreamBatch<D>) {
      if constexpr (requires { d.get_batch(size_t{1}).value(); }) {
        static_assert(
            nested_internal::IsVector<std::remove_cvref_t<decltype(*d.get_batch(size_t{1}))>>,
            "a stream must give examples, not finished batches: leave the Stack transform out");
        return d.get_batch(size_t{1})->front();
      } else {
        return d.get_batch(size_t{1}).front();
      }
    } else {
      return *d.begin();
    }
  }

 public:
  using Example = std::remove_cvref_t<decltype(ExampleOf(std::declval<D&>()))>;

  // Starts a pass. `first`: the data set has not been read before.
  StreamCursor(D& dataset, int64_t epoch, bool first) : dataset_(dataset) {
    SetEpoch(dataset, epoch);
    if constexpr (requires { dataset.reset(); }) {
      dataset.reset();
    } else if constexpr (!IsRange<D>) {
      if (!first && !requires { dataset.set_epoch(epoch); }) {
        throw DataError(
            "the stream has been read and cannot start again: give it a reset() function");
      }
    }
    if constexpr (IsRange<D>) range_.emplace(dataset);
  }

  // Empty at the end; the stream is not asked again after that.
  std::optional<Example> Next() {
    if (ended_) return std::nullopt;
    std::optional<Example> example = Ask();
    ended_ = !example.has_value();
    return example;
  }

  // Skips up to `count` examples; returns how many there were.
  int64_t Skip(int64_t count) {
    int64_t skipped = 0;
    if constexpr (requires {
                    { dataset_.skip(count) } -> std::convertible_to<int64_t>;
                  }) {
      if (ended_) return 0;
      // Examples that were read ahead come first.
      skipped = std::min(count, static_cast<int64_t>(buffer_.size()) - static_cast<int64_t>(used_));
      used_ += static_cast<size_t>(skipped);
      if (skipped < count) skipped += static_cast<int64_t>(dataset_.skip(count - skipped));
      next_ += skipped;
    }
    // A skip() that stops early, for example at the end of a file, does not mean that the stream
    // ends.
    while (skipped < count && Next().has_value()) ++skipped;
    return skipped;
  }

 private:
  std::optional<Example> Ask() {
    SetDataSample(next_++);
    if constexpr (HasNext<D>) {
      return dataset_.next();
    } else if constexpr (HasStreamBatch<D>) {
      if (used_ == buffer_.size()) {
        Refill();
        if (buffer_.empty()) return std::nullopt;
      }
      return std::move(buffer_[used_++]);
    } else {
      if (range_->at == range_->end) return std::nullopt;
      std::optional<Example> example(*range_->at);
      ++range_->at;
      return example;
    }
  }

  struct Range {
    explicit Range(D& dataset) : at(dataset.begin()), end(dataset.end()) {}
    decltype(std::declval<D&>().begin()) at;
    decltype(std::declval<D&>().end()) end;
  };
  struct NoRange {
    explicit NoRange(D&) {}
  };
  template <class X, bool kIsRange>
  struct RangeOf {
    using type = NoRange;
  };
  template <class X>
  struct RangeOf<X, true> {
    using type = Range;
  };

  void Refill() {
    constexpr size_t kChunk = 64;
    used_ = 0;
    buffer_.clear();
    if constexpr (HasStreamBatch<D>) {
      auto chunk = dataset_.get_batch(kChunk);
      if constexpr (requires { chunk.has_value(); }) {
        if (chunk.has_value()) buffer_ = std::move(*chunk);
      } else {
        buffer_ = std::move(chunk);
      }
    }
  }

  D& dataset_;
  int64_t next_ = 0;
  bool ended_ = false;
  std::vector<Example> buffer_;
  size_t used_ = 0;
  std::optional<typename RangeOf<D, IsRange<D>>::type> range_;
};

// The argument of a user's collate function.
template <class D>
auto CollateInputOf() {
  if constexpr (IsMapStyle<D>) {
    return std::type_identity<
        std::remove_cvref_t<decltype(Fetch(std::declval<D&>(), std::declval<const Indices&>()))>>();
  } else {
    return std::type_identity<std::vector<typename StreamCursor<D>::Example>>();
  }
}

template <class D, class C>
auto BatchOf() {
  if constexpr (IsMapStyle<D>) {
    return std::type_identity<std::remove_cvref_t<decltype(ReadBatch(
        std::declval<D&>(), std::declval<C&>(), std::declval<const Indices&>()))>>();
  } else {
    using E = typename StreamCursor<D>::Example;
    return std::type_identity<
        std::remove_cvref_t<decltype(std::declval<C&>()(std::declval<std::vector<E>>()))>>();
  }
}

}  // namespace dataset_internal

// The type of the batches that a data set and a collate function make.
template <class D, class C = DefaultCollate>
using CollatedBatch = typename decltype(dataset_internal::BatchOf<D, C>())::type;

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_DATASET_H_
