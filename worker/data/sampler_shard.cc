#include "worker/data/sampler_shard.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster {
namespace {

constexpr int64_t kLargestRound = int64_t{1} << 56;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

absl::Status CheckLength(int64_t num_samples) {
  if (num_samples >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the data set's length is ", num_samples, ", it must not be negative"));
}

absl::Status CheckWorldSize(const ShardOptions& options) {
  if (options.world_size >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("world_size is ", options.world_size, ", it must be at least 1"));
}

}  // namespace

TailRule TailRuleOf(const ShardOptions& options) {
  if (options.drop_last) return TailRule::kDrop;
  if (options.dispatch) return TailRule::kSpread;
  return options.even_batches ? TailRule::kPad : TailRule::kShort;
}

void BatchSlice::AppendPositions(std::vector<int64_t>* positions) const {
  const size_t old_size = positions->size();
  positions->resize(old_size + static_cast<size_t>(size()));
  int64_t* out = positions->data() + old_size;
  for (int64_t i = 0; i < real; ++i) *out++ = begin + i;
  for (int64_t i = 0; i < padding; ++i) *out++ = (padding_begin + i) % padding_period;
}

absl::StatusOr<RoundSize> RoundSizeOf(const ShardOptions& options, int64_t batch_size) {
  MUSTER_RETURN_IF_ERROR(CheckWorldSize(options));
  if (batch_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch_size is ", batch_size, ", it must be at least 1"));
  }
  const int64_t n = options.world_size;
  // Positions are sums of a few rounds and a data set's length: leave room for these without
  // overflow.
  if (batch_size > kLargestRound / n) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch_size is ", batch_size, ", too large for ", n, " processes"));
  }
  if (!options.split_batches) return RoundSize{batch_size * n, batch_size};
  if (batch_size % n != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("with split_batches the batch size (", batch_size,
                     ") needs to be a round multiple of the number of processes (", n, "): use ",
                     CeilDiv(batch_size, n) * n, ", or leave split_batches out"));
  }
  return RoundSize{batch_size, batch_size / n};
}

BatchSlice SliceOfRound(const RoundSize& round, TailRule tail, int world_size, int rank,
                        int64_t begin, int64_t end, int64_t first_round) {
  const int64_t observed = end - begin;
  const int64_t per_rank =
      tail == TailRule::kSpread ? CeilDiv(observed, world_size) : round.per_rank;
  const int64_t low = rank * per_rank;
  BatchSlice slice;
  slice.begin = begin + std::min(low, observed);
  slice.real = std::clamp<int64_t>(observed - low, 0, per_rank);
  if (tail != TailRule::kShort) {
    slice.padding = per_rank - slice.real;
    slice.padding_begin = std::max(low, observed) - observed;
    slice.padding_period = std::max<int64_t>(first_round, 1);
  }
  return slice;
}

absl::StatusOr<BatchSamplerShard> BatchSamplerShard::Create(const ShardOptions& options,
                                                            int64_t num_samples,
                                                            int64_t batch_size) {
  MUSTER_RETURN_IF_ERROR(CheckLength(num_samples));
  BatchSamplerShard shard;
  MUSTER_ASSIGN_OR_RETURN(shard.round_, RoundSizeOf(options, batch_size));
  shard.options_ = options;
  shard.tail_ = TailRuleOf(options);
  shard.num_samples_ = num_samples;
  return shard;
}

absl::StatusOr<BatchSamplerShard> BatchSamplerShard::CreateCustom(
    const ShardOptions& options, const std::vector<int64_t>& batch_lengths,
    std::optional<int64_t> batch_size) {
  MUSTER_RETURN_IF_ERROR(CheckWorldSize(options));
  if (!batch_size.has_value() && options.split_batches && !options.dispatch) {
    return absl::InvalidArgumentError(absl::StrCat(
        "with split_batches the batch size needs to be a round multiple of the number of processes "
        "(",
        options.world_size, "), but the batch sampler has no batch size: leave split_batches out"));
  }
  std::vector<int64_t> starts = {0};
  starts.reserve(batch_lengths.size() + 1);
  for (size_t i = 0; i < batch_lengths.size(); ++i) {
    const int64_t length = batch_lengths[i];
    const bool last = i + 1 == batch_lengths.size();
    if (length < 0 ||
        (batch_size.has_value() && (length > *batch_size || (!last && length != *batch_size)))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "batch ", i, " of the batch sampler has ", length, " samples, its batch size is ",
          batch_size.value_or(0), ": give no batch size if batches differ in length"));
    }
    starts.push_back(starts.back() + length);
  }
  if (batch_size.has_value()) return Create(options, starts.back(), *batch_size);
  BatchSamplerShard shard;
  shard.options_ = options;
  shard.tail_ = TailRuleOf(options);
  shard.num_samples_ = starts.back();
  shard.starts_ = std::move(starts);
  return shard;
}

std::optional<int64_t> BatchSamplerShard::round_size() const {
  if (!starts_.empty()) return std::nullopt;
  return round_.global;
}

int64_t BatchSamplerShard::batches_per_round() const {
  return options_.split_batches ? 1 : options_.world_size;
}

int64_t BatchSamplerShard::FirstBatch(int64_t position) const {
  const int64_t batches = static_cast<int64_t>(starts_.size()) - 1;
  // The end counts as the end even if empty batches start there.
  if (position >= num_samples_ && position > 0) return batches;
  return std::lower_bound(starts_.begin(), starts_.end(), position) - starts_.begin();
}

int64_t BatchSamplerShard::NumRounds(int64_t position) const {
  int64_t left;
  int64_t per_round;
  if (starts_.empty()) {
    left = std::max<int64_t>(num_samples_ - position, 0);
    per_round = round_.global;
  } else {
    left = static_cast<int64_t>(starts_.size()) - 1 - FirstBatch(position);
    per_round = batches_per_round();
  }
  return tail_ == TailRule::kDrop ? left / per_round : CeilDiv(left, per_round);
}

int64_t BatchSamplerShard::NumBatches(int rank, int64_t position) const {
  const int64_t rounds = NumRounds(position);
  if (tail_ != TailRule::kShort || rounds == 0) return rounds;
  if (!starts_.empty()) {
    const int64_t left = static_cast<int64_t>(starts_.size()) - 1 - FirstBatch(position);
    return left / options_.world_size + (rank < left % options_.world_size ? 1 : 0);
  }
  return rounds - (Slice(rank, rounds - 1, position).size() == 0 ? 1 : 0);
}

BatchSlice BatchSamplerShard::Slice(int rank, int64_t round, int64_t position) const {
  const int n = options_.world_size;
  if (starts_.empty()) {
    const int64_t begin = position + round * round_.global;
    const int64_t end = std::min(begin + round_.global, num_samples_);
    return SliceOfRound(round_, tail_, n, rank, begin, end, std::min(round_.global, num_samples_));
  }
  const int64_t batches = static_cast<int64_t>(starts_.size()) - 1;
  const int64_t first = FirstBatch(position) + round * batches_per_round();
  const int64_t first_round = std::min(batches, batches_per_round());
  if (options_.dispatch) {
    const int64_t end = std::min(first + batches_per_round(), batches);
    return SliceOfRound({}, TailRule::kSpread, n, rank, starts_[first], starts_[end],
                        starts_[first_round]);
  }
  BatchSlice slice;
  const int64_t mine = first + rank;
  if (mine < batches) {
    slice.begin = starts_[mine];
    slice.real = starts_[mine + 1] - slice.begin;
  } else {
    slice.begin = num_samples_;
    if (tail_ == TailRule::kPad) {
      const int64_t repeated = (mine - batches) % first_round;
      slice.padding = starts_[repeated + 1] - starts_[repeated];
      slice.padding_begin = starts_[repeated];
      slice.padding_period = std::max<int64_t>(num_samples_, 1);
    }
  }
  return slice;
}

int64_t BatchSamplerShard::RoundBegin(int64_t round, int64_t position) const {
  if (starts_.empty()) return std::min(position + round * round_.global, num_samples_);
  const int64_t batches = static_cast<int64_t>(starts_.size()) - 1;
  return starts_[std::min(FirstBatch(position) + round * batches_per_round(), batches)];
}

int64_t BatchSamplerShard::RealSamples(int64_t round, int64_t position) const {
  return RoundBegin(round + 1, position) - RoundBegin(round, position);
}

int64_t BatchSamplerShard::Skip(int64_t rounds, int64_t position) const {
  // Clamped first, so that any number of rounds is safe from overflow.
  return RoundBegin(std::min(rounds, CeilDiv(num_samples_, std::max<int64_t>(round_.global, 1)) +
                                         static_cast<int64_t>(starts_.size())),
                    position);
}

absl::StatusOr<std::vector<std::vector<int64_t>>> ShardBatches(const ShardOptions& options,
                                                               int rank, int64_t num_samples,
                                                               int64_t batch_size) {
  MUSTER_ASSIGN_OR_RETURN(const BatchSamplerShard shard,
                          BatchSamplerShard::Create(options, num_samples, batch_size));
  std::vector<std::vector<int64_t>> batches(static_cast<size_t>(shard.NumBatches(rank)));
  for (size_t i = 0; i < batches.size(); ++i) {
    shard.Slice(rank, static_cast<int64_t>(i)).AppendPositions(&batches[i]);
  }
  return batches;
}

absl::StatusOr<std::vector<std::vector<int64_t>>> ShardCustomBatches(
    const ShardOptions& options, int rank, const std::vector<std::vector<int64_t>>& batches) {
  std::vector<int64_t> lengths;
  std::vector<int64_t> order;
  for (const std::vector<int64_t>& batch : batches) {
    lengths.push_back(static_cast<int64_t>(batch.size()));
    order.insert(order.end(), batch.begin(), batch.end());
  }
  MUSTER_ASSIGN_OR_RETURN(const BatchSamplerShard shard,
                          BatchSamplerShard::CreateCustom(options, lengths));
  std::vector<std::vector<int64_t>> mine(static_cast<size_t>(shard.NumBatches(rank)));
  for (size_t i = 0; i < mine.size(); ++i) {
    shard.Slice(rank, static_cast<int64_t>(i)).AppendPositions(&mine[i]);
    for (int64_t& position : mine[i]) position = order[static_cast<size_t>(position)];
  }
  return mine;
}

absl::StatusOr<std::vector<int64_t>> ShardStream(const ShardOptions& options, int rank,
                                                 int64_t num_samples, int64_t batch_size) {
  MUSTER_RETURN_IF_ERROR(CheckLength(num_samples));
  MUSTER_ASSIGN_OR_RETURN(const RoundSize round, RoundSizeOf(options, batch_size));
  const TailRule tail = options.drop_last ? TailRule::kDrop : TailRule::kPad;
  const int64_t first_round = std::min(round.global, num_samples);
  std::vector<int64_t> samples;
  for (int64_t begin = 0; begin < num_samples; begin += round.global) {
    const int64_t end = std::min(begin + round.global, num_samples);
    if (tail == TailRule::kDrop && end - begin < round.global) break;
    SliceOfRound(round, tail, options.world_size, rank, begin, end, first_round)
        .AppendPositions(&samples);
  }
  return samples;
}

}  // namespace muster
