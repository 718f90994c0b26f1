#ifndef MUSTER_WORKER_DATA_LOADER_H_
#define MUSTER_WORKER_DATA_LOADER_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/zeros.h"
#include "worker/collective/comm.h"
#include "worker/data/batch.h"
#include "worker/data/collate.h"
#include "worker/data/data_error.h"
#include "worker/data/data_random.h"
#include "worker/data/dataset.h"
#include "worker/data/dispatch.h"
#include "worker/data/loader_core.h"
#include "worker/data/prefetcher.h"
#include "worker/data/stream_turns.h"
#include "worker/nested/nested.h"

namespace torch::data::samplers {
template <typename BatchRequest>
class DistributedSampler;
}  // namespace torch::data::samplers

namespace muster {

std::string TextOf(const std::exception_ptr& thrown);  // worker/collective/on_all.h

namespace loader_internal {

// A batch on its way to the loop. For a stream, `info` is made when the batch is handed out, since
// only then is it known whether it is the last one.
template <class T>
struct Fetched {
  T value;
  BatchInfo info;
  int64_t first_round = 0;  // streams and dispatching: samples of the epoch's first round
  int64_t begin = 0;        // and the positions of this round
  int64_t end = 0;
};

// The batches of one pass, in order. One thread at a time.
template <class T>
class Feed {
 public:
  virtual ~Feed() = default;
  virtual std::optional<Fetched<T>> Next() = 0;
};

// Runs `make`; an exception becomes a DataError that names the batch.
template <class F>
auto NamingBatch(const LoaderPass& pass, int64_t number, const F& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    throw DataError("loader: batch " + std::to_string(pass.first_index + number) + " of epoch " +
                    std::to_string(pass.epoch) + " on rank " + std::to_string(pass.rank) + ": " +
                    ErrorText(error));
  }
}

template <class T>
T Prepared(T value, const RecipeSettings& settings, const LoaderOptions& options) {
  // Pinned memory is useful only on the way to a GPU.
  if (settings.pin_memory && options.device.has_value() && options.device->is_cuda())
    return PinMemory(value);
  return value;
}

template <class P>
struct IsSharedPtr : std::false_type {};
template <class D>
struct IsSharedPtr<std::shared_ptr<D>> : std::true_type {};

template <class Request>
void TakeDistributedSampler(const torch::data::samplers::DistributedSampler<Request>*);
template <class S>
concept IsDistributedSampler = requires(const S* sampler) {
  TakeDistributedSampler(sampler);
};

// A prepared loader's access to the data: how to start reading for a pass.
template <class T>
class Source {
 public:
  virtual ~Source() = default;
  virtual std::optional<int64_t> Size() const = 0;
  // Starts reading. With `whole`, each batch joins those of all ranks.
  virtual std::unique_ptr<Feed<T>> Open(std::shared_ptr<const LoaderPass> pass,
                                        const RecipeSettings& settings,
                                        const LoaderOptions& options) = 0;
};

// A data set and its collate function.
template <class D, class C>
class DatasetSource : public Source<CollatedBatch<D, C>> {
 public:
  DatasetSource(std::shared_ptr<D> dataset, C collate)
      : dataset_(std::move(dataset)), collate_(std::move(collate)) {}

  std::optional<int64_t> Size() const override {
    return dataset_internal::SizeOf(std::as_const(*dataset_));
  }

 protected:
  const std::shared_ptr<D> dataset_;
  const C collate_;
};

// Streams have one reader, which keeps its collate function across passes.
template <class D, class C>
class StreamSourceBase : public DatasetSource<D, C> {
 public:
  StreamSourceBase(std::shared_ptr<D> dataset, C collate)
      : DatasetSource<D, C>(std::move(dataset), std::move(collate)),
        shared_collate_(std::make_shared<C>(this->collate_)) {}

 protected:
  const std::shared_ptr<C> shared_collate_;
  const std::shared_ptr<StreamTurns> turns_ = std::make_shared<StreamTurns>();
  bool first_ = true;  // the stream has not been read
};

// A pass's right to read a stream of type D.
template <class D>
class StreamReader {
 public:
  explicit StreamReader(std::shared_ptr<StreamTurns> turns)
      : turns_(std::move(turns)), number_(turns_->Begin()) {}

  // Calls `read`, which reads the stream.
  template <class F>
  auto InTurn(const F& read) const {
    // Each iterator of a range has a position of its own.
    if constexpr (dataset_internal::IsRange<D>) {
      return read();
    } else {
      const StreamTurns::Turn turn(*turns_, number_);
      return read();
    }
  }

 private:
  const std::shared_ptr<StreamTurns> turns_;
  const int64_t number_;
};

// --- Map style ---

template <class T>
using ReadFunction = std::function<T(const std::vector<int64_t>&)>;

template <class T>
class IndexedFeed : public Feed<T> {
 public:
  IndexedFeed(std::shared_ptr<const LoaderPass> pass, std::vector<ReadFunction<T>> readers,
              const RecipeSettings& settings, const LoaderOptions& options)
      : pass_(std::move(pass)) {
    std::vector<typename Prefetcher<Fetched<T>>::Produce> produce;
    for (ReadFunction<T>& read : readers) {
      produce.push_back(
          [pass = pass_, read = std::move(read), settings, options, generator = DataGenerator(),
           indices = std::vector<int64_t>()](int64_t number) mutable -> std::optional<Fetched<T>> {
            if (number >= pass->num_batches) return std::nullopt;
            generator.Reseed(pass->BatchSeed(number));
            const DataRandomScope scope(&generator, settings.workers > 0);
            return NamingBatch(*pass, number, [&] {
              pass->Indices(number, &indices);
              return Fetched<T>{Prepared(ReadNamed(read, indices), settings, options), {}, 0, 0, 0};
            });
          });
    }
    if (settings.workers == 0) {
      inline_ = std::move(produce.front());
    } else {
      prefetcher_.emplace(std::move(produce), int64_t{settings.workers} * settings.prefetch);
    }
  }

  std::optional<Fetched<T>> Next() override {
    std::optional<Fetched<T>> fetched =
        prefetcher_.has_value() ? prefetcher_->Next() : inline_(given_);
    if (!fetched.has_value()) return std::nullopt;
    fetched->info = pass_->Info(given_);
    fetched->begin = pass_->shard->RoundBegin(given_, pass_->position);
    fetched->end = fetched->info.position;
    fetched->first_round = pass_->shard->RoundBegin(1);
    ++given_;
    return fetched;
  }

 private:
  static T ReadNamed(const ReadFunction<T>& read, const std::vector<int64_t>& indices) {
    try {
      return read(indices);
    } catch (const DataError&) {
      throw;
    } catch (const std::exception& error) {
      std::string ids;
      for (size_t i = 0; i < std::min<size_t>(indices.size(), 8); ++i) {
        ids += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
      }
      throw DataError("samples " + ids + (indices.size() > 8 ? ", ..." : "") + ": " +
                      ErrorText(error));
    }
  }

  const std::shared_ptr<const LoaderPass> pass_;
  int64_t given_ = 0;
  typename Prefetcher<Fetched<T>>::Produce inline_;
  std::optional<Prefetcher<Fetched<T>>> prefetcher_;  // last: its threads use the members above
};

template <class D, class C>
class IndexedSource : public DatasetSource<D, C> {
 public:
  using T = CollatedBatch<D, C>;
  using DatasetSource<D, C>::DatasetSource;

  std::unique_ptr<Feed<T>> Open(std::shared_ptr<const LoaderPass> pass,
                                const RecipeSettings& settings,
                                const LoaderOptions& options) override {
    dataset_internal::SetEpoch(*this->dataset_, pass->epoch);
    std::vector<ReadFunction<T>> readers;
    for (int worker = 0; worker < std::max(settings.workers, 1); ++worker) {
      readers.push_back(
          [reader = FreeReader(settings, pass->epoch)](const std::vector<int64_t>& indices) {
            return dataset_internal::ReadBatch(*reader->dataset, reader->collate, indices);
          });
    }
    return std::make_unique<IndexedFeed<T>>(std::move(pass), std::move(readers), settings, options);
  }

 private:
  // The state of one worker's reading. Kept across passes, so that private random numbers of the
  // data set or the collate function continue.
  struct Reader {
    std::shared_ptr<D> dataset;
    C collate;
  };

  // Returns a reader that no worker of another pass holds.
  std::shared_ptr<Reader> FreeReader(const RecipeSettings& settings, int64_t epoch) {
    for (const std::shared_ptr<Reader>& reader : readers_) {
      if (reader.use_count() > 1) continue;
      if (reader->dataset != this->dataset_) dataset_internal::SetEpoch(*reader->dataset, epoch);
      return reader;
    }
    readers_.push_back(std::make_shared<Reader>(Reader{DatasetFor(settings), this->collate_}));
    return readers_.back();
  }

  std::shared_ptr<D> DatasetFor(const RecipeSettings& settings) const {
    if constexpr (!dataset_internal::IsConstReadable<D>) {
      if constexpr (std::is_copy_constructible_v<D>) {
        if (settings.workers > 0) {
          if (settings.shares_dataset) {
            TORCH_WARN_ONCE(
                "loader: reading changes this data set, so each worker reads a copy of its own, "
                "made at the first pass; later changes to the data set itself are not seen but for "
                "set_epoch(): make its get() or get_batch() const to let workers share it");
          }
          return std::make_shared<D>(*this->dataset_);
        }
      } else {
        TORCH_CHECK(settings.workers <= 1,
                    "loader: this data set can be neither copied nor read as const, so only one "
                    "worker can use it: make its get() const, or set workers(1)");
      }
    }
    return this->dataset_;
  }

  std::vector<std::shared_ptr<Reader>> readers_;
};

// --- Streams ---

// Collates a batch of a stream with separate random numbers: however many it draws, the numbers
// that next() draws stay the same, on all ranks and after a restart.
template <class C, class E>
auto CollateRound(C& collate, std::vector<E> samples, const LoaderPass& pass, int64_t number,
                  DataGenerator* generator) {
  generator->Reseed(pass.CollateSeed(number));
  const DataRandomScope scope(generator, /*for_torch=*/true);
  return collate(std::move(samples));
}

// Reads the rounds of a stream and keeps this rank's part of each (dispatching: all of it).
template <class D, class C>
class RoundReader {
 public:
  using E = typename dataset_internal::StreamCursor<D>::Example;
  using T = CollatedBatch<D, C>;

  RoundReader(std::shared_ptr<D> dataset, std::shared_ptr<C> collate,
              std::shared_ptr<StreamTurns> turns, std::shared_ptr<const LoaderPass> pass,
              bool first, const RecipeSettings& settings, const LoaderOptions& options)
      : pass_(std::move(pass)),
        reader_(std::move(turns)),
        dataset_(std::move(dataset)),
        collate_(std::move(collate)),
        first_pass_(first),
        settings_(settings),
        options_(options) {}

  // The next round, or nullopt after the last. An exception ends the pass.
  std::optional<Fetched<T>> Read(int64_t number) {
    // Ranks that all read the whole stream must draw the same numbers, and the training, whose
    // generator is saved, is a round behind.
    const DataRandomScope scope(&generator_, /*for_torch=*/true);
    return NamingBatch(*pass_, number, [&] {
      return reader_.InTurn([&] {
        if (!cursor_.has_value()) {
          generator_.Reseed(pass_->BatchSeed(0));
          Start();
        }
        return ReadRound(number);
      });
    });
  }

 private:
  bool may_pad() const { return pass_->tail == TailRule::kPad || pass_->tail == TailRule::kSpread; }

  void Start() {
    cursor_.emplace(*dataset_, pass_->epoch, first_pass_);
    const int64_t to_skip = pass_->position;
    // A pass that starts later still pads its last round with the epoch's first samples.
    while (may_pad() && position_ < std::min(to_skip, pass_->round.global)) {
      std::optional<E> example = Next();
      if (!example.has_value()) return;
      first_round_.push_back(std::move(*example));
      ++position_;
    }
    if (position_ < to_skip) position_ += cursor_->Skip(to_skip - position_);
  }

  std::optional<E> Next() {
    try {
      return cursor_->Next();
    } catch (const std::exception& error) {
      throw DataError("sample " + std::to_string(position_) +
                      " of the stream: " + ErrorText(error));
    }
  }

  std::optional<Fetched<T>> ReadRound(int64_t number) {
    const LoaderPass& pass = *pass_;
    const int64_t begin = position_;
    const int64_t low = pass.dispatch() ? 0 : pass.rank * pass.round.per_rank;
    const int64_t high = pass.dispatch() ? pass.round.global : low + pass.round.per_rank;
    std::vector<E> mine;
    mine.reserve(static_cast<size_t>(high - low));
    while (position_ < begin + pass.round.global) {
      std::optional<E> example = Next();
      if (!example.has_value()) break;
      const int64_t at = position_++ - begin;
      if (may_pad() && position_ == static_cast<int64_t>(first_round_.size()) + 1 &&
          position_ <= pass.round.global) {
        first_round_.push_back(*example);
      }
      if (at >= low && at < high) mine.push_back(std::move(*example));
    }
    const int64_t count = position_ - begin;
    if (count == 0 || (pass.tail == TailRule::kDrop && count < pass.round.global))
      return std::nullopt;
    const int64_t first_round = may_pad() ? static_cast<int64_t>(first_round_.size()) : count;
    const auto pad = [&](int rank) {
      const BatchSlice slice = pass.SliceOf(rank, begin, position_, first_round);
      for (int64_t i = 0; i < slice.padding; ++i) {
        mine.push_back(
            first_round_[static_cast<size_t>((slice.padding_begin + i) % slice.padding_period)]);
      }
    };
    if (pass.dispatch()) {
      for (int rank = 0; rank < pass.sharding.world_size; ++rank) pad(rank);
    } else {
      pad(pass.rank);
    }
    T batch(CollateRound(*collate_, std::move(mine), pass, number, &collate_generator_));
    return Fetched<T>{
        Prepared(std::move(batch), settings_, options_), {}, first_round, begin, position_};
  }

  const std::shared_ptr<const LoaderPass> pass_;
  const StreamReader<D> reader_;
  const std::shared_ptr<D> dataset_;
  const std::shared_ptr<C> collate_;
  const bool first_pass_;
  const RecipeSettings settings_;
  const LoaderOptions options_;
  DataGenerator generator_;  // of the whole pass, since a stream is read in one piece
  DataGenerator collate_generator_;
  std::optional<dataset_internal::StreamCursor<D>> cursor_;
  int64_t position_ = 0;
  std::vector<E> first_round_;  // the epoch's first samples, where padding may be needed
};

// Reads one round ahead, so that a batch is known to be the last one when it is handed out.
template <class D, class C>
class StreamFeed : public Feed<CollatedBatch<D, C>> {
 public:
  using T = CollatedBatch<D, C>;
  StreamFeed(std::shared_ptr<const LoaderPass> pass, std::shared_ptr<RoundReader<D, C>> reader,
             const RecipeSettings& settings)
      : pass_(std::move(pass)) {
    read_ = [reader = std::move(reader)](int64_t number) { return reader->Read(number); };
    if (settings.workers > 0) {
      // A stream has one reader, regardless of the number of workers.
      prefetcher_.emplace(std::vector<typename Prefetcher<Fetched<T>>::Produce>{read_},
                          int64_t{settings.workers} * settings.prefetch);
    }
  }

  std::optional<Fetched<T>> Next() override {
    if (!started_) {
      started_ = true;
      ahead_ = Pull();
    }
    if (error_ && !ahead_.has_value()) std::rethrow_exception(std::exchange(error_, nullptr));
    std::optional<Fetched<T>> current = std::move(ahead_);
    ahead_.reset();
    if (!current.has_value()) return std::nullopt;
    // An error of the next round is reported when its turn comes.
    ahead_ = Pull();
    current->info = pass_->InfoOfRound(given_, current->begin, current->end, current->first_round);
    current->info.is_last = !ahead_.has_value() && !error_;
    if (current->info.is_last) current->info.batches_left = 0;
    ++given_;
    return current;
  }

 private:
  std::optional<Fetched<T>> Pull() {
    if (finished_) return std::nullopt;
    std::optional<Fetched<T>> fetched;
    try {
      fetched = prefetcher_.has_value() ? prefetcher_->Next() : read_(pulled_++);
    } catch (...) {
      error_ = std::current_exception();
    }
    finished_ = !fetched.has_value();
    return fetched;
  }

  const std::shared_ptr<const LoaderPass> pass_;
  std::function<std::optional<Fetched<T>>(int64_t)> read_;
  bool started_ = false;
  bool finished_ = false;
  int64_t pulled_ = 0;
  int64_t given_ = 0;
  std::optional<Fetched<T>> ahead_;
  std::exception_ptr error_;
  std::optional<Prefetcher<Fetched<T>>> prefetcher_;  // last: its threads use the members above
};

template <class D, class C>
class StreamSource : public StreamSourceBase<D, C> {
 public:
  using T = CollatedBatch<D, C>;
  using StreamSourceBase<D, C>::StreamSourceBase;

  std::unique_ptr<Feed<T>> Open(std::shared_ptr<const LoaderPass> pass,
                                const RecipeSettings& settings,
                                const LoaderOptions& options) override {
    auto reader = std::make_shared<RoundReader<D, C>>(
        this->dataset_, this->shared_collate_, this->turns_, pass,
        std::exchange(this->first_, false), settings, options);
    return std::make_unique<StreamFeed<D, C>>(std::move(pass), std::move(reader), settings);
  }
};

// --- Streams that are sharded at their source ---

// A rank's part of a round.
template <class T>
struct ShardPart {
  T value;
  int64_t real = 0;  // samples; the others fill up the batch
};

// Reads the batches of this rank's own part of a stream. If batches are padded, it continues after
// the end with batches of repeated samples, because other ranks' parts may be longer.
template <class D, class C>
class ShardReader {
 public:
  using E = typename dataset_internal::StreamCursor<D>::Example;
  using T = CollatedBatch<D, C>;

  ShardReader(std::shared_ptr<D> part, std::shared_ptr<C> collate,
              std::shared_ptr<StreamTurns> turns, std::shared_ptr<const LoaderPass> pass,
              bool first, const RecipeSettings& settings, const LoaderOptions& options)
      : pass_(std::move(pass)),
        reader_(std::move(turns)),
        part_(std::move(part)),
        collate_(std::move(collate)),
        first_pass_(first),
        settings_(settings),
        options_(options) {}

  // Returns nullopt if there is no full batch, or nothing to fill one up with.
  std::optional<ShardPart<T>> Read(int64_t number) {
    const DataRandomScope scope(&generator_, /*for_torch=*/true);
    return NamingBatch(*pass_, number, [&] {
      return reader_.InTurn([&] {
        if (!cursor_.has_value()) {
          generator_.Reseed(pass_->BatchSeed(0));
          Start();
        }
        return ReadPart(number);
      });
    });
  }

 private:
  bool drop() const { return pass_->tail == TailRule::kDrop; }

  void Start() {
    cursor_.emplace(*part_, pass_->epoch, first_pass_);
    // A pass that starts later still pads with the epoch's first samples.
    while (!drop() && position_ < std::min(pass_->rank_position, pass_->round.per_rank)) {
      std::optional<E> example = Next();
      if (!example.has_value()) return;
      first_round_.push_back(std::move(*example));
    }
    if (position_ < pass_->rank_position) {
      position_ += cursor_->Skip(pass_->rank_position - position_);
    }
  }

  std::optional<E> Next() {
    try {
      std::optional<E> example = cursor_->Next();
      if (example.has_value()) ++position_;
      return example;
    } catch (const std::exception& error) {
      throw DataError("sample " + std::to_string(position_) +
                      " of this rank's part of the stream: " + ErrorText(error));
    }
  }

  std::optional<ShardPart<T>> ReadPart(int64_t number) {
    const int64_t size = pass_->round.per_rank;
    std::vector<E> mine;
    mine.reserve(static_cast<size_t>(size));
    while (static_cast<int64_t>(mine.size()) < size) {
      std::optional<E> example = Next();
      if (!example.has_value()) break;
      if (!drop() && position_ <= size) first_round_.push_back(*example);
      mine.push_back(std::move(*example));
    }
    const int64_t real = static_cast<int64_t>(mine.size());
    if (real < size && (drop() || first_round_.empty())) return std::nullopt;
    for (int64_t i = 0; static_cast<int64_t>(mine.size()) < size; ++i) {
      mine.push_back(first_round_[static_cast<size_t>(i) % first_round_.size()]);
    }
    T batch(CollateRound(*collate_, std::move(mine), *pass_, number, &collate_generator_));
    return ShardPart<T>{Prepared(std::move(batch), settings_, options_), real};
  }

  const std::shared_ptr<const LoaderPass> pass_;
  const StreamReader<D> reader_;
  const std::shared_ptr<D> part_;
  const std::shared_ptr<C> collate_;
  const bool first_pass_;
  const RecipeSettings settings_;
  const LoaderOptions options_;
  DataGenerator generator_, collate_generator_;
  std::optional<dataset_internal::StreamCursor<D>> cursor_;
  int64_t position_ = 0;  // in this rank's part
  std::vector<E> first_round_;
};

// Each rank reads its own part, and all ranks agree on every round before it is handed out, so that
// they end together. Every Next() is a collective: a gather of one number per rank. An error on one
// rank is thrown on every rank, in its turn.
template <class T>
class ShardFeed : public Feed<T> {
 public:
  using Read = std::function<std::optional<ShardPart<T>>(int64_t)>;

  ShardFeed(std::shared_ptr<const LoaderPass> pass, Read read, Comm* comm,
            const RecipeSettings& settings)
      : pass_(std::move(pass)),
        read_(std::move(read)),
        comm_(*comm),
        ahead_most_(int64_t{settings.workers} * settings.prefetch),
        position_(pass_->position) {}

  std::optional<Fetched<T>> Next() override {
    if (!started_) {
      started_ = true;
      ahead_ = Agree();
    }
    if (error_ && !ahead_.has_value()) std::rethrow_exception(std::exchange(error_, nullptr));
    std::optional<Fetched<T>> current = std::move(ahead_);
    ahead_.reset();
    if (!current.has_value()) return std::nullopt;
    ahead_ = Agree();
    current->info.is_last = !ahead_.has_value() && !error_;
    if (current->info.is_last) current->info.batches_left = 0;
    return current;
  }

 private:
  // Codes used instead of a number of samples.
  enum : int64_t { kNothing = -1, kFailed = -2 };

  std::optional<Fetched<T>> Agree() {
    if (finished_) return std::nullopt;
    std::optional<ShardPart<T>> part;
    int64_t mine = kNothing;
    try {
      if (ahead_most_ > 0 && !prefetcher_.has_value()) {
        prefetcher_.emplace(std::vector<typename Prefetcher<ShardPart<T>>::Produce>{read_},
                            ahead_most_);
      }
      part = prefetcher_.has_value() ? prefetcher_->Next() : read_(round_);
      if (part.has_value()) mine = part->real;
    } catch (...) {
      error_ = std::current_exception();
      mine = kFailed;
    }
    const std::vector<int64_t> counts = Gather(mine);
    finished_ = true;
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      if (counts[rank] != kFailed) continue;
      if (!error_) {
        error_ = std::make_exception_ptr(
            DataError("loader: rank " + std::to_string(rank) +
                      " cannot read its part of the stream: its own message says why"));
      }
      return std::nullopt;
    }
    const bool some = std::any_of(counts.begin(), counts.end(), [](int64_t n) { return n > 0; });
    const auto nothing = std::find(counts.begin(), counts.end(), int64_t{kNothing});
    if (!some || (nothing != counts.end() && pass_->tail == TailRule::kDrop)) return std::nullopt;
    if (nothing != counts.end()) {
      error_ = std::make_exception_ptr(DataError(
          "loader: the part of the stream that shard() gave rank " +
          std::to_string(nothing - counts.begin()) +
          " is empty while others are not, so it has nothing to fill its batches with: give every "
          "rank samples, or use drop_last()"));
      return std::nullopt;
    }
    finished_ = false;
    Fetched<T> fetched{std::move(part->value), {}, 0, position_, 0};
    for (const int64_t count : counts) position_ += count;
    fetched.end = position_;
    fetched.info = pass_->InfoOfCounts(round_++, counts, position_);
    return fetched;
  }

  std::vector<int64_t> Gather(int64_t mine) {
    at::Tensor number = at::zeros({1}, at::kLong);
    *number.template data_ptr<int64_t>() = mine;
    std::vector<int64_t> counts;
    // On the host: a number from a GPU would wait for all of its queued work.
    const at::Tensor all = at::cat(comm_.AllGather(number));
    for (int64_t rank = 0; rank < all.numel(); ++rank) {
      counts.push_back(all.template data_ptr<int64_t>()[rank]);
    }
    return counts;
  }

  const std::shared_ptr<const LoaderPass> pass_;
  const Read read_;
  Comm& comm_;
  const int64_t ahead_most_;  // 0: the caller reads
  bool started_ = false;
  bool finished_ = false;
  int64_t round_ = 0;
  int64_t position_;  // after the rounds agreed on
  std::optional<Fetched<T>> ahead_;
  std::exception_ptr error_;
  std::optional<Prefetcher<ShardPart<T>>> prefetcher_;  // last: its threads use the members above
};

template <class D, class C>
class ShardedSource : public StreamSourceBase<D, C> {
 public:
  using T = CollatedBatch<D, C>;

  // `part`: this rank's part of the stream.
  ShardedSource(std::shared_ptr<D> part, C collate, Comm* comm)
      : StreamSourceBase<D, C>(std::move(part), std::move(collate)), comm_(comm) {}

  std::unique_ptr<Feed<T>> Open(std::shared_ptr<const LoaderPass> pass,
                                const RecipeSettings& settings,
                                const LoaderOptions& options) override {
    auto reader = std::make_shared<ShardReader<D, C>>(
        this->dataset_, this->shared_collate_, this->turns_, pass,
        std::exchange(this->first_, false), settings, options);
    return std::make_unique<ShardFeed<T>>(
        std::move(pass),
        [reader = std::move(reader)](int64_t number) { return reader->Read(number); }, comm_,
        settings);
  }

 private:
  Comm* const comm_;
};

// --- Dispatch ---

// Rank 0 reads whole rounds and each rank receives its slice. Every Next() is a collective: one
// small broadcast, then a Scatter per tensor; the schema is sent only when it changes. An error on
// rank 0 is thrown on every rank.
template <class T>
class DispatchFeed : public Feed<T> {
 public:
  // `open` is called on rank 0 only.
  DispatchFeed(std::shared_ptr<const LoaderPass> pass,
               std::function<std::unique_ptr<Feed<T>>()> open, Comm* comm,
               const LoaderOptions& options)
      : pass_(std::move(pass)),
        open_(std::move(open)),
        comm_(*comm),
        device_(options.device.value_or(at::kCPU)),
        non_blocking_(options.non_blocking) {}

  std::optional<Fetched<T>> Next() override {
    std::optional<Fetched<T>> whole;
    std::exception_ptr error;
    std::string text;  // schema or error message
    enum : int64_t { kEnd, kSameSchema, kNewSchema, kError };
    // kind, begin, end, first_round, is_last, rows per rank, batches_left
    at::Tensor header = at::zeros({7}, at::kLong);
    int64_t* head = header.data_ptr<int64_t>();
    if (comm_.rank() == 0) {
      try {
        whole = ReadWhole(head, &text);
        head[0] = !whole.has_value() ? kEnd : text == schema_ ? kSameSchema : kNewSchema;
      } catch (...) {
        error = std::current_exception();
        text = TextOf(error);
        head[0] = kError;
      }
    }
    // On the host: from a GPU it would wait for all of its queued work.
    comm_.Broadcast(header, 0);
    if (head[0] == kEnd) return std::nullopt;
    if (head[0] != kSameSchema) text = comm_.BroadcastBytes(text, 0);
    if (head[0] == kError) {
      if (error) std::rethrow_exception(error);
      throw DataError("on rank 0, which reads for all ranks: " + text);
    }
    if (head[0] == kNewSchema) schema_ = text;
    Fetched<T> mine{ScatterBatch<T>(whole.has_value() ? &whole->value : nullptr, schema_, head[5],
                                    device_, comm_),
                    {},
                    0,
                    0,
                    0};
    mine.begin = head[1];
    mine.end = head[2];
    mine.first_round = head[3];
    mine.info = pass_->InfoOfRound(given_++, mine.begin, mine.end, mine.first_round);
    mine.info.is_last = head[4] != 0;
    mine.info.batches_left = head[6];
    return mine;
  }

 private:
  std::optional<Fetched<T>> ReadWhole(int64_t* head, std::string* schema) {
    if (inner_ == nullptr) inner_ = open_();
    std::optional<Fetched<T>> whole = inner_->Next();
    if (!whole.has_value()) return whole;
    const BatchInfo info = pass_->InfoOfRound(given_, whole->begin, whole->end, whole->first_round);
    CheckScatterable(whole->value, info.global_size);
    head[1] = whole->begin;
    head[2] = whole->end;
    head[3] = whole->first_round;
    head[4] = whole->info.is_last ? 1 : 0;
    head[5] = info.size;
    head[6] = whole->info.batches_left;
    *schema = EncodeSchema(whole->value);
    whole->value = SendToDevice(whole->value, device_, non_blocking_);
    return whole;
  }

  const std::shared_ptr<const LoaderPass> pass_;
  const std::function<std::unique_ptr<Feed<T>>()> open_;
  Comm& comm_;
  const at::Device device_;
  const bool non_blocking_;
  int64_t given_ = 0;
  std::string schema_;
  std::unique_ptr<Feed<T>> inner_;
};

}  // namespace loader_internal

// Iterates over one pass of a loader. Returned by PreparedLoader::begin(); move-only. Destroying
// it, at the end of the loop or when the loop is left, ends the pass and stops its reading threads.
template <class T>
class LoaderIterator {
 public:
  using value_type = Batch<T>;
  using difference_type = std::ptrdiff_t;
  using iterator_category = std::input_iterator_tag;

  LoaderIterator(std::shared_ptr<LoaderCore> core,
                 std::shared_ptr<loader_internal::Source<T>> source, int64_t skip)
      : pass_(std::make_unique<Pass>(std::move(core), std::move(source), skip)) {
    pass_->Advance();
  }

  // Throw c10::Error at the end, which is also the beginning of a pass without batches.
  Batch<T>& operator*() const {
    TORCH_CHECK(pass_->current.has_value(),
                "loader: there is no batch here: this pass has ended, or it has none; compare the "
                "iterator with end() first");
    return *pass_->current;
  }
  Batch<T>* operator->() const { return &**this; }
  // Advances to the next batch; blocks until it is ready. Throws DataError if it could not be read,
  // which ends the pass.
  LoaderIterator& operator++() {
    pass_->Advance();
    return *this;
  }
  friend bool operator==(const LoaderIterator& it, std::default_sentinel_t) {
    return !it.pass_->current.has_value();
  }

 private:
  struct Pass {
    Pass(std::shared_ptr<LoaderCore> c, std::shared_ptr<loader_internal::Source<T>> s, int64_t skip)
        : core(std::move(c)), source(std::move(s)), facts(Start(skip)) {
      if (facts == nullptr) return;
      const auto open = [this] {
        // All ranks get this error, because they wait for rank 0.
        if (core->dispatch()) core->CheckSize(source->Size());
        return source->Open(facts, core->settings(), core->options());
      };
      try {
        if (core->dispatch()) {
          feed = std::make_unique<loader_internal::DispatchFeed<T>>(facts, open, core->comm(),
                                                                    core->options());
        } else {
          feed = open();
        }
      } catch (...) {
        core->EndPass(*facts, false);
        throw;
      }
    }
    ~Pass() { Finish(false); }

    // Null for a pass that is skipped.
    std::shared_ptr<const LoaderPass> Start(int64_t skip) {
      if (core->SkipsPass()) return nullptr;
      if (!core->dispatch()) core->CheckSize(source->Size());
      return core->StartPass(skip);
    }

    void Advance() {
      if (feed == nullptr) return;
      std::optional<loader_internal::Fetched<T>> next;
      try {
        core->ReadBegins(*facts);
        next = feed->Next();
        if (next.has_value() && core->options().device.has_value()) {
          next->value =
              SendToDevice(next->value, *core->options().device, core->options().non_blocking);
        }
      } catch (...) {
        current.reset();
        Finish(false);
        throw;
      }
      if (!next.has_value()) {
        current.reset();
        Finish(true);
        return;
      }
      current.emplace(std::move(next->value), std::move(next->info));
      core->BatchGiven(*facts, current->shared_info());
    }

    void Finish(bool exhausted) {
      if (feed == nullptr) return;
      feed.reset();
      core->EndPass(*facts, exhausted);
    }

    const std::shared_ptr<LoaderCore> core;
    const std::shared_ptr<loader_internal::Source<T>> source;
    const std::shared_ptr<const LoaderPass> facts;   // null for a pass that is skipped
    std::unique_ptr<loader_internal::Feed<T>> feed;  // null once the pass has ended
    std::optional<Batch<T>> current;
  };

  std::unique_ptr<Pass> pass_;
};

// A loader of this rank's batches of T. A handle: copies share the position in the data. begin()
// starts a pass over the next epoch, with the next permutation; leaving a loop early does not
// repeat an epoch. Not thread-safe; iterate on one thread. Collective, so required on every rank:
// each step of a dispatching loader, and begin() with a user's sampler.
//
//   for (auto& [images, labels] : loader) Step(images, labels);
//   for (auto& batch : loader) if (batch.info().is_last) Report(batch["ids"]);
template <class T>
class PreparedLoader {
 public:
  using BatchType = T;

  // Makes an empty loader, to be assigned what prepare() returns. Its begin() throws c10::Error.
  PreparedLoader() = default;
  PreparedLoader(std::shared_ptr<LoaderCore> core,
                 std::shared_ptr<loader_internal::Source<T>> source, int64_t skip = 0)
      : core_(std::move(core)), source_(std::move(source)), skip_(skip) {}

  LoaderIterator<T> begin() const {
    TORCH_CHECK(
        core_ != nullptr,
        "this loader handle is empty: assign what accelerator.prepare(batches(...)) returns "
        "to it");
    return LoaderIterator<T>(core_, source_, skip_);
  }
  std::default_sentinel_t end() const { return {}; }

  // The number of batches that this rank gets in an epoch. Error (c10::Error): a stream without a
  // known length.
  int64_t size() const {
    const std::optional<int64_t> batches = core_->NumBatches(skip_);
    TORCH_CHECK(batches.has_value(),
                "loader: the stream does not know its length: give the data set a size()");
    return *batches;
  }
  bool has_size() const { return core_->NumBatches(skip_).has_value(); }

  // Makes the next pass use this epoch: its permutation, and set_epoch() of the data set.
  void set_epoch(int64_t epoch) { core_->SetEpoch(epoch); }
  int64_t epoch() const { return core_->epoch(); }
  // The samples of a full round over all ranks; nullopt: batches differ in length.
  std::optional<int64_t> total_batch_size() const { return core_->total_batch_size(); }
  std::optional<int64_t> total_dataset_length() const { return core_->num_samples(); }

  // Returns the position, see LoaderState; inside the loop, that after the current batch. With a
  // sampler whose order is not a function of the epoch, such as LibTorch's RandomSampler, the
  // position is not enough: save state_tensors() with it.
  LoaderState state_dict() const { return core_->State(); }
  std::map<std::string, at::Tensor> state_tensors() const { return core_->StateTensors(); }
  void load_state(const LoaderState& state, const std::map<std::string, at::Tensor>& tensors = {}) {
    core_->LoadState(state, tensors);
  }

  // Returns this loader without the first `batches` batches of each epoch. It shares epochs and
  // position with this one.
  PreparedLoader Skip(int64_t batches) const {
    return PreparedLoader(core_, source_, skip_ + batches);
  }
  int64_t skipped() const { return skip_; }
  std::shared_ptr<LoaderStateHandle> state_handle() const { return core_; }

 private:
  std::shared_ptr<LoaderCore> core_;
  std::shared_ptr<loader_internal::Source<T>> source_;
  int64_t skip_ = 0;
};

// Returns `loader` without the first `batches` batches: free for map-style data; streams are read
// up to there. The facts of the batches (index, real samples) are those of the full epoch. Iterate
// it once, then continue with `loader`. In an epoch that a loaded state continues, the batches
// before its position count as skipped: skipping that many skips nothing more.
template <class T>
PreparedLoader<T> SkipFirstBatches(const PreparedLoader<T>& loader, int64_t batches) {
  TORCH_CHECK(batches >= 0, "skip_first_batches: cannot skip ", batches, " batches");
  return loader.Skip(batches);
}

// A recipe for a loader: what to read and how; prepare() decides which rank reads what. Returned by
// batches(). A value type: copies share the data set.
//
//   muster::batches(dataset, 32).shuffle(true).workers(2)
template <class D, class C = DefaultCollate>
class BatchRecipe {
 public:
  BatchRecipe(std::shared_ptr<D> dataset, C collate, RecipeSettings settings)
      : dataset_(std::move(dataset)),
        collate_(std::move(collate)),
        settings_(std::move(settings)) {}

  // Uses a new random order each epoch: randperm of a generator seeded with seed + epoch.
  BatchRecipe& shuffle(bool on = true) {
    return Set([&](auto& s) { s.shuffle = on; });
  }
  // Drops the last batches if they are not full.
  BatchRecipe& drop_last(bool on = true) {
    return Set([&](auto& s) { s.drop_last = on; });
  }
  // The number of threads that read ahead (a stream uses one). 0: the iterating thread reads.
  BatchRecipe& workers(int count) {
    return Set([&](auto& s) { s.workers = count; });
  }
  // How many batches each worker may be ahead.
  BatchRecipe& prefetch(int batches) {
    return Set([&](auto& s) { s.prefetch = batches; });
  }
  BatchRecipe& seed(int64_t value) {
    return Set([&](auto& s) { s.seed = value; });
  }
  // Moves batches bound for a GPU through page-locked memory.
  BatchRecipe& pin_memory(bool on = true) {
    return Set([&](auto& s) { s.pin_memory = on; });
  }

  // The order of samples: a function of the epoch that returns ids, or a LibTorch sampler (reset(),
  // next(n)). Called on rank 0 only; its result applies to every rank. If a sampler draws from
  // LibTorch's default generator, as RandomSampler does, only rank 0's generator advances.
  template <class S>
  BatchRecipe& sampler(S order) {
    static_assert(
        !loader_internal::IsDistributedSampler<S>,
        "a distributed sampler of LibTorch divides the samples among processes, which the "
        "loader does too, so most would never be read: use RandomSampler or "
        "SequentialSampler");
    constexpr bool kIsSampler = requires(S & sampler) {
      sampler.reset();
      sampler.next(size_t{1})->begin();
    };
    static_assert(
        std::is_invocable_v<S&, int64_t> || kIsSampler,
        "sampler() takes a function of the epoch that gives ids, or a sampler of LibTorch "
        "that gives them by reset() and next(n)");
    if constexpr (std::is_invocable_v<S&, int64_t>) {
      settings_.sampler = [order = std::move(order)](int64_t epoch) mutable {
        const auto ids = order(epoch);
        return std::vector<int64_t>(ids.begin(), ids.end());
      };
    } else {
      settings_.sampler = [order = std::make_shared<S>(std::move(order))](int64_t) {
        std::vector<int64_t> ids;
        order->reset();
        while (auto some = order->next(1024)) ids.insert(ids.end(), some->begin(), some->end());
        return ids;
      };
    }
    return *this;
  }
  // The batches: a function of the epoch that returns lists of ids. If batches differ in length,
  // make the recipe with batches(dataset), without a batch size.
  BatchRecipe& batch_sampler(BatchSamplerFunction function) {
    return Set([&](auto& s) { s.batch_sampler = std::move(function); });
  }
  // How examples become a batch: a function of std::vector<example> (or of the batch, if the data
  // set returns finished batches). It is copied once for each worker and keeps its state across
  // passes.
  template <class F>
  BatchRecipe<D, F> collate(F function) const {
    using Input = typename decltype(dataset_internal::CollateInputOf<D>())::type;
    static_assert(std::is_invocable_v<F&, Input>,
                  "collate() takes a function of a std::vector of samples, as get() gives them (of "
                  "the batch, where get_batch() gives a finished one)");
    if constexpr (std::is_invocable_v<F&, Input>) {
      static_assert(!std::is_void_v<std::invoke_result_t<F&, Input>>,
                    "a collate() function returns the batch");
    }
    return BatchRecipe<D, F>(dataset_, std::move(function), settings_);
  }

  const std::shared_ptr<D>& dataset() const { return dataset_; }
  const C& collate_function() const { return collate_; }
  const RecipeSettings& settings() const { return settings_; }

 private:
  template <class F>
  BatchRecipe& Set(const F& change) {
    change(settings_);
    return *this;
  }

  std::shared_ptr<D> dataset_;
  C collate_;
  RecipeSettings settings_;
};

template <class R>
struct IsBatchRecipe : std::false_type {};
template <class D, class C>
struct IsBatchRecipe<BatchRecipe<D, C>> : std::true_type {};

// Returns a recipe for batches of `batch_size` samples of a data set (see dataset.h for the
// requirements). The data set is moved in, or shared if it is a std::shared_ptr; a tensor is a data
// set of its rows.
//
// Every rank reads its own part of a stream with shard(), and iterating the loader is a collective.
// If parts differ in length, ranks whose part has ended fill their batches with their first samples
// until the longest part has ended (BatchInfo distinguishes real from repeated samples); with
// drop_last(), all ranks end at the first batch that some rank cannot fill. Inside an epoch such a
// loader resumes only on the same number of ranks.
template <class D>
auto batches(D dataset, std::optional<int64_t> batch_size = std::nullopt) {
  RecipeSettings settings;
  settings.batch_size = batch_size;
  if constexpr (std::is_same_v<D, at::Tensor>) {
    using Rows = TensorDataset<at::Tensor>;
    return BatchRecipe<Rows>(std::make_shared<Rows>(std::move(dataset)), {}, std::move(settings));
  } else if constexpr (loader_internal::IsSharedPtr<D>::value) {
    using Shared = typename D::element_type;
    static_assert(dataset_internal::IsMapStyle<Shared> || dataset_internal::IsStream<Shared>,
                  "not a data set: it has neither get_batch(), get() nor operator[] with size(), "
                  "nor next(), nor begin()");
    settings.shares_dataset = true;
    return BatchRecipe<typename D::element_type>(std::move(dataset), {}, std::move(settings));
  } else {
    static_assert(dataset_internal::IsMapStyle<D> || dataset_internal::IsStream<D>,
                  "not a data set: it has neither get_batch(), get() nor operator[] with size(), "
                  "nor next(), nor begin()");
    return BatchRecipe<D>(std::make_shared<D>(std::move(dataset)), {}, std::move(settings));
  }
}

// (collective) Makes this rank's loader. `comm` (null: a job of one process) must outlive it;
// `observer`, which may be null, is called for every batch. Errors (c10::Error): invalid
// combinations of settings; ranks that prepare different loaders.
template <class D, class C>
PreparedLoader<CollatedBatch<D, C>> PrepareLoader(
    const BatchRecipe<D, C>& recipe, const LoaderOptions& options, Comm* comm,
    std::shared_ptr<LoaderObserver> observer = nullptr) {
  using T = CollatedBatch<D, C>;
  static_assert(nested_internal::can_be_seen_through<nested_internal::OpaquePart<T>>,
                "the loader's batches cannot be seen through, their tensors would miss the device: "
                "make samples structs of at most 16 members (no base class, C array or reference), "
                "give them MusterFields(), or give the recipe a collate() function");
  if constexpr (dataset_internal::HasShard<D>) {
    const int size = comm == nullptr ? 1 : comm->size();
    // If rank 0 reads for all ranks, there is nothing to divide.
    if (size == 1 || !options.dispatch_batches.value_or(false)) {
      std::shared_ptr<loader_internal::Source<T>> source;
      const auto open = [&] {
        auto part =
            dataset_internal::ShardOf(recipe.dataset(), comm == nullptr ? 0 : comm->rank(), size);
        using Part = typename decltype(part)::element_type;
        static_assert(std::is_same_v<CollatedBatch<Part, C>, T>,
                      "shard() must give a stream of the same samples");
        if (size == 1) {
          source = std::make_shared<loader_internal::StreamSource<Part, C>>(
              std::move(part), recipe.collate_function());
        } else {
          source = std::make_shared<loader_internal::ShardedSource<Part, C>>(
              std::move(part), recipe.collate_function(), comm);
        }
        return source->Size();
      };
      std::shared_ptr<LoaderCore> core =
          LoaderCore::Create(recipe.settings(), options, open, /*is_stream=*/true, comm,
                             std::move(observer), /*sharded=*/true);
      return PreparedLoader<T>(std::move(core), std::move(source));
    }
  }
  constexpr bool kMapStyle = dataset_internal::IsMapStyle<D>;
  using SourceType = std::conditional_t<kMapStyle, loader_internal::IndexedSource<D, C>,
                                        loader_internal::StreamSource<D, C>>;
  std::shared_ptr<loader_internal::Source<T>> source =
      std::make_shared<SourceType>(recipe.dataset(), recipe.collate_function());
  std::shared_ptr<LoaderCore> core = LoaderCore::Create(
      recipe.settings(), options, [&] { return source->Size(); }, !kMapStyle, comm,
      std::move(observer));
  return PreparedLoader<T>(std::move(core), std::move(source));
}

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_LOADER_H_
