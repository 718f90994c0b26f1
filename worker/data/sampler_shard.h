#ifndef MUSTER_WORKER_DATA_SAMPLER_SHARD_H_
#define MUSTER_WORKER_DATA_SAMPLER_SHARD_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"

namespace muster {

// Which sample goes to which rank: pure index arithmetic, no data, no torch, no communication.
//
// Everything is expressed in positions: position p is the p-th sample of the epoch's order
// (order[p] is its id). Ranks go through the order in rounds, one batch per rank and round. The
// rules, in Accelerate's terms:
//  - not split_batches: whole batches of `batch_size` are dealt out in turn; a round has
//    world_size times batch_size samples.
//  - split_batches: each batch of `batch_size` is cut into world_size equal slices; a round has
//    batch_size samples.
//  - The last round may be short. TailRule says how it is handled.

// What happens to a last round that is not full.
enum class TailRule {
  // It is left out.
  kDrop,
  // Every rank gets a full batch, filled up with the samples of the epoch's first round, in order.
  kPad,
  // Ranks get what remains: a shorter batch, or none (uneven batches).
  kShort,
  // It is cut into world_size equal slices, filled up as in kPad by fewer than world_size samples
  // (dispatch).
  kSpread,
};

struct ShardOptions {
  int world_size = 1;
  bool split_batches = false;
  bool even_batches = true;
  bool drop_last = false;
  // One rank reads and distributes slices of every round, instead of each rank reading for itself.
  bool dispatch = false;
};

TailRule TailRuleOf(const ShardOptions& options);

// One rank's part of one round. A value type.
struct BatchSlice {
  int64_t begin = 0;  // position of the first real sample
  int64_t real = 0;   // samples begin ... begin + real - 1
  // Then come `padding` repeated samples, at positions (padding_begin + i) % padding_period.
  int64_t padding = 0;
  int64_t padding_begin = 0;
  int64_t padding_period = 1;

  int64_t size() const { return real + padding; }
  // Appends the positions of this slice, real ones first.
  void AppendPositions(std::vector<int64_t>* positions) const;
};

// The size of a round and of a rank's batch, if both are fixed.
struct RoundSize {
  int64_t global = 1;    // samples in a full round, over all ranks
  int64_t per_rank = 1;  // samples of one rank in a full round
};

// INVALID_ARGUMENT: batch_size or world_size below 1; a round of more than 2^56 samples;
// split_batches with a batch_size that is not a multiple of world_size.
absl::StatusOr<RoundSize> RoundSizeOf(const ShardOptions& options, int64_t batch_size);

// Returns the part of `rank` in the round of positions [begin, end), end - begin <= round.global.
// `first_round` is the number of samples in the epoch's first round, from which padding is taken.
// With kDrop the round must be full. For a stream of unknown length this function suffices: a
// reader calls it for each round it has read.
BatchSlice SliceOfRound(const RoundSize& round, TailRule tail, int world_size, int rank,
                        int64_t begin, int64_t end, int64_t first_round);

// The batches of all ranks in one epoch over a data set of known length, or over the batches of a
// batch sampler. Immutable; thread-safe. Every query is O(1) (O(log batches) where `position` is
// not a batch's start), so starting anywhere in an epoch costs nothing. `position` is where a pass
// starts: the samples before it were already consumed, in this run or, before a restart, with any
// world size. Positions at or past the end give an empty pass.
class BatchSamplerShard {
 public:
  // A sampler of `num_samples` ids cut into batches of `batch_size`.
  // INVALID_ARGUMENT: as RoundSizeOf, or num_samples < 0.
  static absl::StatusOr<BatchSamplerShard> Create(const ShardOptions& options, int64_t num_samples,
                                                  int64_t batch_size);

  // A batch sampler that returns batches of these lengths, which may differ; `options.drop_last` is
  // its attribute. A round is world_size whole batches; missing batches are repeated from the first
  // round (kPad). If `batch_size` is set, all batches except the last must have that length, and
  // this equals Create for their samples. INVALID_ARGUMENT: as RoundSizeOf; split_batches without a
  // batch_size (unless dispatching); wrong lengths.
  static absl::StatusOr<BatchSamplerShard> CreateCustom(
      const ShardOptions& options, const std::vector<int64_t>& batch_lengths,
      std::optional<int64_t> batch_size = std::nullopt);

  int world_size() const { return options_.world_size; }
  int64_t num_samples() const { return num_samples_; }
  // Samples of a full round over all ranks; nullopt for a batch sampler without a fixed size.
  std::optional<int64_t> round_size() const;

  // The number of rounds of a pass in which some rank gets a batch.
  int64_t NumRounds(int64_t position = 0) const;
  // The number of batches that `rank` actually gets: with uneven batches fewer than NumRounds() for
  // some ranks.
  int64_t NumBatches(int rank, int64_t position = 0) const;
  // The batch of `rank` in round `round` of a pass from `position`. round < NumRounds(position).
  BatchSlice Slice(int rank, int64_t round, int64_t position = 0) const;
  // The position of the first sample of round `round` (the end of the order for round == NumRounds
  // unless samples are dropped), from which a pass that has finished the earlier rounds would
  // resume.
  int64_t RoundBegin(int64_t round, int64_t position = 0) const;
  // Real samples of a round over all ranks.
  int64_t RealSamples(int64_t round, int64_t position = 0) const;
  // Returns `position` advanced by `rounds` full rounds, at most to the end.
  int64_t Skip(int64_t rounds, int64_t position = 0) const;

 private:
  BatchSamplerShard() = default;
  int64_t FirstBatch(
      int64_t position) const;  // custom: the batch that starts at or after `position`
  int64_t batches_per_round() const;

  ShardOptions options_;
  TailRule tail_ = TailRule::kPad;
  int64_t num_samples_ = 0;
  RoundSize round_;
  // For a custom batch sampler: starts_[i] is the position of batch i, plus one more for the end.
  // Otherwise empty.
  std::vector<int64_t> starts_;
};

// Returns one rank's whole epoch as ids, for a sequential order, as Accelerate's BatchSamplerShard
// does for the same arguments. For tests, tools and the conformance runner; loaders use
// BatchSamplerShard.
absl::StatusOr<std::vector<std::vector<int64_t>>> ShardBatches(const ShardOptions& options,
                                                               int rank, int64_t num_samples,
                                                               int64_t batch_size);
// The same for the batches of a batch sampler.
absl::StatusOr<std::vector<std::vector<int64_t>>> ShardCustomBatches(
    const ShardOptions& options, int rank, const std::vector<std::vector<int64_t>>& batches);
// Returns the ids that Accelerate's IterableDatasetShard gives `rank` from a stream of
// `num_samples` ids. A stream is always padded unless drop_last is set, whatever even_batches is.
absl::StatusOr<std::vector<int64_t>> ShardStream(const ShardOptions& options, int rank,
                                                 int64_t num_samples, int64_t batch_size);

}  // namespace muster

#endif  // MUSTER_WORKER_DATA_SAMPLER_SHARD_H_
