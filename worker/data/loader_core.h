#ifndef MUSTER_WORKER_DATA_LOADER_CORE_H_
#define MUSTER_WORKER_DATA_LOADER_CORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "worker/collective/comm.h"
#include "worker/data/batch.h"
#include "worker/data/sampler_shard.h"

namespace muster {

// The parts of loading that do not depend on the data type: which rank reads which samples in which
// order, the position of a pass, and its observer. worker/data/loader.h adds the typed part.

// Settings of the job rather than of one loader.
struct LoaderOptions {
  // The batch size is that of the whole job and is split over the ranks; otherwise it is that of
  // each rank.
  bool split_batches = false;
  // Fill up the last round with repeated samples, so that every rank gets the same number of full
  // batches.
  bool even_batches = true;
  // Rank 0 reads and each rank receives its slice. Default: only for streams, which every rank
  // would otherwise read whole.
  std::optional<bool> dispatch_batches;
  // Seed of the order: data_seed, else LibTorch's initial seed (what manual_seed set) if
  // use_seedable_sampler, else a number drawn from LibTorch's default generator. A recipe's own
  // seed takes precedence. Rank 0's seed applies to all ranks.
  bool use_seedable_sampler = true;
  std::optional<int64_t> data_seed;
  // Batches are moved to this device before they are handed out; nullopt: left where they are. With
  // non_blocking, copies from pinned memory to a GPU do not block.
  std::optional<c10::Device> device;
  bool non_blocking = false;
};

// The order of an epoch: ids in reading order.
using SamplerFunction = std::function<std::vector<int64_t>(int64_t epoch)>;
// The batches of an epoch.
using BatchSamplerFunction = std::function<std::vector<std::vector<int64_t>>(int64_t epoch)>;

// The settings of one loader from its recipe.
struct RecipeSettings {
  std::optional<int64_t> batch_size;  // nullopt: the batch sampler's batches differ in length
  bool shuffle = false;
  bool drop_last = false;
  int workers = 0;   // reading threads; 0: the iterating thread reads
  int prefetch = 2;  // batches that each worker may be ahead
  std::optional<int64_t> seed;
  bool shares_dataset = false;  // the program keeps a handle on the data set
  bool pin_memory = false;
  SamplerFunction sampler;
  BatchSamplerFunction batch_sampler;
};

// A loader's position in its data: enough to continue at the exact next sample, even with another
// number of ranks or another batch size. The same on every rank. A value type.
struct LoaderState {
  int64_t epoch = 0;
  // Samples of this epoch's order that all ranks together have consumed, without padding.
  int64_t position = 0;
  int64_t index = 0;  // batches of this epoch handed out so far
  int64_t seed = 0;
  int64_t num_samples = -1;  // of the data set; -1: unknown
  // The kind of order: "sequential", "shuffle", "sampler", "batch_sampler", "stream" or "sharded
  // stream"; empty: unknown.
  std::string order{};
  // Digest of a sampler's order for this epoch, if that is known; else empty.
  std::string order_digest{};
  // For a stream that is sharded at its source: the number of parts, and how many samples of its
  // own part each rank has consumed.
  int64_t shards = 0;
  int64_t rank_position = 0;

  // Whether the epoch has begun.
  bool inside_epoch() const { return position > 0 || index > 0; }
  // Convert to one line of JSON and back; fields that an older version did not write may be
  // missing. INVALID_ARGUMENT: not such a line.
  std::string ToString() const;
  static absl::StatusOr<LoaderState> FromString(const std::string& text);
  bool operator==(const LoaderState&) const = default;
};

class LoaderStateHandle;

// Observes loops over a loader, on the iterating thread.
class LoaderObserver {
 public:
  virtual ~LoaderObserver() = default;
  // Called when a pass is about to begin, which it does on every rank. May be a collective.
  virtual void OnStart() {}
  // Called where a pass would begin. True skips it: the pass has no batch and the loader keeps its
  // position, because that pass was finished before the resumed state was saved.
  virtual bool SkipsPass(const LoaderStateHandle& loader) {
    static_cast<void>(loader);
    return false;
  }
  // Called when pass `iteration` is about to hand this batch to the loop.
  virtual void OnBatch(uint64_t iteration, const std::shared_ptr<const BatchInfo>& info) = 0;
  // Called when pass `iteration` has ended, at its end or because its iterator was destroyed
  // (break, return, exception). Exactly once for every pass that handed out a batch (and possibly
  // for one that did not). Must not throw.
  virtual void OnEnd(uint64_t iteration) = 0;
  // Called before OnEnd for a pass that was left before its end. False: its batches were not
  // trained on (a peek, an evaluation left by break), and the loader does not resume in its middle.
  // Must not throw.
  virtual bool CountsAsTrained(uint64_t iteration) {
    static_cast<void>(iteration);
    return true;
  }
};

// A loader's position, independent of its type, for checkpoints and uneven inputs. Not thread-safe.
class LoaderStateHandle {
 public:
  virtual ~LoaderStateHandle() = default;
  // Returns the position after the batch handed out last, or where the next pass starts.
  virtual LoaderState State() const = 0;
  // Returns what State() needs in addition to resume a sampler's order: "order", the ids of the
  // epoch (int64, [n]), and "lengths" of a batch sampler's batches (int64, [batches]). Empty if the
  // order follows from State(). Handles, not copies.
  virtual std::map<std::string, at::Tensor> StateTensors() const = 0;
  // Throws unless LoadState() can take the state. Errors (c10::Error): another data set's length;
  // tensors that do not belong to the state; a position inside an epoch of another kind of order,
  // of a sampler's order that was not saved, or of a stream sharded into another number of parts.
  virtual void CheckState(const LoaderState& state,
                          const std::map<std::string, at::Tensor>& tensors) const = 0;
  // Makes the next pass, over that epoch, continue from that position in the saved order. `tensors`
  // is what StateTensors() returned. Errors: those of CheckState(), which leave the loader
  // unchanged. With a state but no tensors, the next pass compares the sampler's order with the
  // state's digest and throws if they differ.
  virtual void LoadState(const LoaderState& state,
                         const std::map<std::string, at::Tensor>& tensors) = 0;
  void LoadState(const LoaderState& state) { LoadState(state, {}); }
  // The number of the active pass (BatchInfo::iteration) that handed out a batch last; 0 if there
  // is none.
  virtual uint64_t live_pass() const = 0;
  // The position before the last batch that the active pass has returned, to continue from if that
  // batch has not been trained on. State() if there is no such pass.
  virtual LoaderState StateBeforeBatch() const = 0;
  // The state of LibTorch's default generator on the CPU before that batch was read: with it, a run
  // that continues there reads what the data set drew for that batch. Undefined if reading draws
  // from another generator, as that of workers and streams does, or if there is no such batch.
  virtual at::Tensor GeneratorBeforeBatch() const { return {}; }
  // The loader's settings, as "name=value ..."; a loader with the same text can take over this
  // one's position.
  virtual std::string signature() const = 0;
  // The position where a successor continues: the loaded one if no pass has begun there yet, else
  // the start of the next epoch. For LoadState, with StateTensors().
  virtual LoaderState NextState() const = 0;
  // Passes begun so far.
  virtual int64_t passes() const = 0;
  // Whether the order of samples is not sequential: shuffled, from a sampler, or from a stream.
  virtual bool shuffles() const = 0;
  // Overrides even_batches for passes that begin while it is set. nullopt: as prepared.
  virtual void OverrideEvenBatches(std::optional<bool> even_batches) = 0;
};

// Returns randperm(n) of an MT19937 generator with this seed, bit for bit the result of PyTorch's
// torch.randperm(n, generator=torch.Generator().manual_seed(seed)).
at::Tensor ShuffledOrder(int64_t n, uint64_t seed);

// One pass over an epoch as one rank sees it. Immutable; shared with reading threads.
struct LoaderPass {
  uint64_t iteration = 0;
  int64_t epoch = 0;
  int64_t position = 0;       // where it starts
  int64_t first_index = 0;    // index of its first batch
  bool sharded = false;       // every rank reads its own part of a stream
  int64_t rank_position = 0;  // sharded: samples of this rank's part to skip
  uint64_t seed = 0;          // of the loader
  // If it continues from a loaded position, that position.
  std::optional<LoaderState> resumed_from;
  int rank = 0;
  ShardOptions sharding;
  RoundSize round;         // for a fixed batch size
  bool fixed_size = true;  // false: a batch sampler whose batches may differ
  TailRule tail = TailRule::kPad;
  at::Tensor order;  // int64 ids by position; undefined: the order is 0, 1, 2, ...
  std::optional<BatchSamplerShard> shard;  // nullopt: a stream
  int64_t num_batches = 0;                 // of this rank in this pass; 0 for a stream

  bool dispatch() const { return sharding.dispatch; }
  // Writes the ids of this rank's batch `number` of this pass to `indices` (dispatching: those of
  // all ranks' batches, in rank order).
  void Indices(int64_t number, std::vector<int64_t>* indices) const;
  // The facts of batch `number` of this pass; not for streams.
  BatchInfo Info(int64_t number) const;
  // The facts of the round that holds positions [begin, end), which is batch `number` of this pass.
  BatchInfo InfoOfRound(int64_t number, int64_t begin, int64_t end, int64_t first_round) const;
  // The facts of batch `number` of a sharded stream, of which rank r has counts[r] real samples;
  // `position` is the position after it.
  BatchInfo InfoOfCounts(int64_t number, const std::vector<int64_t>& counts,
                         int64_t position) const;
  // The seed for random numbers while batch `number` of this pass is read, computed from the
  // loader's seed, the epoch, the reading rank and the batch's index. For a stream (number 0) the
  // seed of the whole pass, the same on every rank if every rank reads the same samples.
  uint64_t BatchSeed(int64_t number) const;
  // The seed for random numbers while batch `number` of a stream is collated, which each rank does
  // for the samples of its own.
  uint64_t CollateSeed(int64_t number) const;
  // Like SliceOfRound, with this pass's rules.
  BatchSlice SliceOf(int slice_rank, int64_t begin, int64_t end, int64_t first_round) const;
};

// One loader's settings and position. For one thread at a time; begin a pass and iterate over it on
// one thread. Create is a collective, and so is StartPass if the order comes from a user's sampler;
// all other functions are local.
class LoaderCore : public LoaderStateHandle {
 public:
  // (collective) Checks the settings, takes the seed from rank 0 and checks that all ranks prepare
  // the same loader. `comm` may be null for a job of one process, and must outlive the loader.
  // Errors (c10::Error): settings that contradict each other; ranks that differ, named. `open`
  // makes this rank's data ready, and returns the number of its samples; if it throws on one rank,
  // all ranks throw. `sharded`: a stream of which this rank has its own part.
  static std::shared_ptr<LoaderCore> Create(const RecipeSettings& settings,
                                            const LoaderOptions& options,
                                            const std::function<std::optional<int64_t>()>& open,
                                            bool is_stream, Comm* comm,
                                            std::shared_ptr<LoaderObserver> observer,
                                            bool sharded = false);

  // Throws c10::Error if a map-style data set, of `num_samples` now, has grown or shrunk since the
  // loader was prepared.
  void CheckSize(std::optional<int64_t> num_samples) const;
  // Starts a pass over the next epoch, or over the rest of one after LoadState, without the epoch's
  // first `skip` batches.
  std::shared_ptr<const LoaderPass> StartPass(int64_t skip);
  // The next batch of `pass` is about to be read on this thread.
  void ReadBegins(const LoaderPass& pass);
  void BatchGiven(const LoaderPass& pass, const std::shared_ptr<const BatchInfo>& info);
  // Ends the loop over `pass`; `exhausted`: it reached the end. If it did not and the observer does
  // not count it as trained, the position that the pass resumed from is restored, or the next
  // epoch's start becomes the position. A loop that was left at the last batch has completed the
  // epoch.
  void EndPass(const LoaderPass& pass, bool exhausted);

  LoaderState State() const override;
  std::map<std::string, at::Tensor> StateTensors() const override;
  void CheckState(const LoaderState& state,
                  const std::map<std::string, at::Tensor>& tensors) const override;
  using LoaderStateHandle::LoadState;
  void LoadState(const LoaderState& state,
                 const std::map<std::string, at::Tensor>& tensors) override;
  uint64_t live_pass() const override;
  LoaderState StateBeforeBatch() const override;
  at::Tensor GeneratorBeforeBatch() const override;
  std::string signature() const override;
  LoaderState NextState() const override;
  int64_t passes() const override { return passes_; }
  bool shuffles() const override { return settings_.shuffle || has_sampler() || is_stream_; }
  // See LoaderObserver::SkipsPass.
  bool SkipsPass() const { return observer_ != nullptr && observer_->SkipsPass(*this); }
  void OverrideEvenBatches(std::optional<bool> even_batches) override {
    even_override_ = even_batches;
  }

  // Makes the next pass use this epoch (and later passes the following ones).
  void SetEpoch(int64_t epoch);
  // The epoch of the next pass.
  int64_t epoch() const { return next_epoch_; }
  int64_t seed() const { return seed_; }
  // The number of this rank's batches in a whole epoch without the first `skip`; nullopt: a stream
  // without a length. With a user's sampler, that of the epoch it was called for last.
  std::optional<int64_t> NumBatches(int64_t skip) const;
  // The samples of a full round over all ranks; nullopt: batches differ.
  std::optional<int64_t> total_batch_size() const;
  std::optional<int64_t> num_samples() const { return num_samples_; }

  const RecipeSettings& settings() const { return settings_; }
  const LoaderOptions& options() const { return options_; }
  Comm* comm() const { return comm_; }
  bool is_main() const { return comm_ == nullptr || comm_->rank() == 0; }
  bool dispatch() const { return dispatch_; }

 private:
  LoaderCore() = default;
  ShardOptions Sharding() const;
  // Sets user_order_ on every rank to what rank 0's sampler returns for `epoch`.
  void ReadUserOrder(int64_t epoch);
  at::Tensor OrderFromMain(const std::function<std::vector<int64_t>()>& read) const;
  bool has_sampler() const { return settings_.sampler || settings_.batch_sampler; }
  std::string OrderName() const;
  std::string SettingsText(int64_t num_samples) const;
  // Returns `place` with the fields that do not depend on the position.
  LoaderState Completed(LoaderState place) const;

  // The output of the user's sampler or batch sampler for an epoch.
  struct UserOrder {
    int64_t epoch = 0;
    at::Tensor ids;
    std::vector<int64_t> lengths;  // of a batch sampler
    std::string digest;
  };
  const UserOrder* user_order() const { return user_order_.has_value() ? &*user_order_ : nullptr; }
  // `order`: that of the epoch, if there is a sampler.
  BatchSamplerShard Shard(const UserOrder* order) const;
  // Returns the order in saved tensors, checked.
  UserOrder LoadedOrder(const LoaderState& state,
                        const std::map<std::string, at::Tensor>& tensors) const;
  // Returns the order of a checked state, if it has one.
  std::optional<UserOrder> CheckedOrder(const LoaderState& state,
                                        const std::map<std::string, at::Tensor>& tensors) const;

  // A pass that has begun since the last LoadState and not ended.
  struct LivePass {
    uint64_t iteration = 0;
    LoaderState place;    // after its last batch
    LoaderState before;   // before that batch
    bool at_end = false;  // that batch was the last one
    // See GeneratorBeforeBatch(); of the next batch while that is being read.
    at::Tensor generator{};
  };
  LivePass* FindLive(uint64_t iteration);

  RecipeSettings settings_;
  LoaderOptions options_;
  std::optional<int64_t> num_samples_;
  bool is_stream_ = false;
  bool sharded_ = false;
  std::vector<std::optional<int64_t>> shard_sizes_;  // sharded: of each rank's part
  bool dispatch_ = false;
  int rank_ = 0;
  int world_size_ = 1;
  int64_t seed_ = 0;
  Comm* comm_ = nullptr;
  std::shared_ptr<LoaderObserver> observer_;

  std::optional<bool> even_override_;
  int64_t passes_ = 0;
  int64_t next_epoch_ = 0;
  LoaderState place_;      // what State() returns
  bool resuming_ = false;  // the next pass starts at place_
  std::optional<UserOrder> user_order_;
  std::string expected_digest_;  // the digest of the order that the resuming pass must have; or
                                 // empty
  std::vector<LivePass> live_;   // in the order in which they began
  uint64_t owner_ = 0;           // the pass that place_ belongs to
};

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_LOADER_CORE_H_
