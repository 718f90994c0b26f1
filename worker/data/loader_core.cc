#include "worker/data/loader_core.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/randperm.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "base/malloc_tuning.h"
#include "nlohmann/json.hpp"
#include "worker/collective/on_all.h"
#include "worker/data/data_error.h"
#include "worker/data/data_random.h"

namespace muster {
namespace {

// At the border between index logic (Status) and tensor code (exceptions).
template <class T>
T ValueOrThrow(absl::StatusOr<T> result) {
  TORCH_CHECK(result.ok(), "loader: ", std::string(result.status().message()));
  return *std::move(result);
}

uint64_t NextIteration() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

int64_t DefaultSeed(bool seedable) {
  const at::Generator& generator = at::detail::getDefaultCPUGenerator();
  if (seedable) return static_cast<int64_t>(generator.current_seed());
  return at::empty({}, at::kLong).random_(generator).item<int64_t>();
}

// Fails unless the texts of all ranks are equal. A text consists of fields "name=value".
void CheckSame(const std::vector<std::string>& texts) {
  const std::vector<std::string> main = absl::StrSplit(texts[0], ' ');
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const std::vector<std::string> other = absl::StrSplit(texts[rank], ' ');
    std::vector<std::string> differences;
    for (size_t i = 0; i < std::min(main.size(), other.size()); ++i) {
      if (main[i] != other[i])
        differences.push_back(absl::StrCat(other[i], " (rank 0: ", main[i], ")"));
    }
    TORCH_CHECK(false, "loader: rank ", rank,
                " prepares another loader than rank 0: ", absl::StrJoin(differences, ", "),
                "; every rank must prepare the same loaders in the same order");
  }
}

}  // namespace

std::string LoaderState::ToString() const {
  nlohmann::json json = {{"epoch", epoch},
                         {"position", position},
                         {"index", index},
                         {"seed", seed},
                         {"num_samples", num_samples}};
  if (!order.empty()) json["order"] = order;
  if (!order_digest.empty()) json["order_digest"] = order_digest;
  if (shards != 0) {
    json["shards"] = shards;
    json["rank_position"] = rank_position;
  }
  return json.dump();
}

absl::StatusOr<LoaderState> LoaderState::FromString(const std::string& text) {
  const nlohmann::json parsed = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return absl::InvalidArgumentError("loader state: not a JSON object");
  LoaderState state;
  struct Field {
    const char* name;
    int64_t* value;
    bool required;
  };
  const Field fields[] = {{"epoch", &state.epoch, true},
                          {"position", &state.position, true},
                          {"index", &state.index, true},
                          {"seed", &state.seed, true},
                          {"num_samples", &state.num_samples, true},
                          {"shards", &state.shards, false},
                          {"rank_position", &state.rank_position, false}};
  for (const Field& field : fields) {
    const auto found = parsed.find(field.name);
    if (found == parsed.end() && !field.required) continue;
    if (found == parsed.end() || !found->is_number_integer()) {
      return absl::InvalidArgumentError(
          absl::StrCat("loader state: no whole number \"", field.name, "\""));
    }
    *field.value = found->get<int64_t>();
  }
  const std::pair<const char*, std::string*> texts[] = {{"order", &state.order},
                                                        {"order_digest", &state.order_digest}};
  for (const auto& [name, value] : texts) {
    const auto found = parsed.find(name);
    if (found == parsed.end()) continue;
    if (!found->is_string()) {
      return absl::InvalidArgumentError(absl::StrCat("loader state: no text \"", name, "\""));
    }
    *value = found->get<std::string>();
  }
  if (state.epoch < 0 || state.position < 0 || state.index < 0 || state.shards < 0 ||
      state.rank_position < 0) {
    return absl::InvalidArgumentError(
        "loader state: epoch, position and index must not be negative");
  }
  return state;
}

at::Tensor ShuffledOrder(int64_t n, uint64_t seed) {
  return at::randperm(n, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
}

// --- LoaderPass ---

void LoaderPass::Indices(int64_t number, std::vector<int64_t>* indices) const {
  indices->clear();
  if (dispatch()) {
    for (int r = 0; r < sharding.world_size; ++r)
      shard->Slice(r, number, position).AppendPositions(indices);
  } else {
    shard->Slice(rank, number, position).AppendPositions(indices);
  }
  if (!order.defined()) return;
  const int64_t* ids = order.const_data_ptr<int64_t>();
  for (int64_t& index : *indices) index = ids[index];
}

BatchSlice LoaderPass::SliceOf(int slice_rank, int64_t begin, int64_t end,
                               int64_t first_round) const {
  return SliceOfRound(round, dispatch() ? TailRule::kSpread : tail, sharding.world_size, slice_rank,
                      begin, end, first_round);
}

namespace {

// `slices`: one per rank.
BatchInfo MakeInfo(const LoaderPass& pass, int64_t number, const std::vector<BatchSlice>& slices,
                   int64_t position) {
  BatchInfo info;
  info.iteration = pass.iteration;
  info.epoch = pass.epoch;
  info.index = pass.first_index + number;
  info.size = slices[static_cast<size_t>(pass.rank)].size();
  info.real_samples = slices[static_cast<size_t>(pass.rank)].real;
  info.position = position;
  bool uniform = true;
  for (const BatchSlice& slice : slices) {
    info.global_real_samples += slice.real;
    info.global_size += slice.size();
    uniform = uniform && slice.size() == info.size && slice.real == info.size;
  }
  if (!uniform) {
    for (const BatchSlice& slice : slices) {
      info.rank_sizes.push_back(slice.size());
      info.rank_real_samples.push_back(slice.real);
    }
  }
  return info;
}

// The usual round: no work per rank, so that a batch costs the same on 10,000 ranks.
BatchInfo FullRoundInfo(const LoaderPass& pass, int64_t number, int64_t position) {
  BatchInfo info;
  info.iteration = pass.iteration;
  info.epoch = pass.epoch;
  info.index = pass.first_index + number;
  info.size = info.real_samples = pass.round.per_rank;
  info.global_size = info.global_real_samples = pass.round.global;
  info.position = position;
  return info;
}

}  // namespace

BatchInfo LoaderPass::Info(int64_t number) const {
  const int64_t end = shard->RoundBegin(number + 1, position);
  BatchInfo info;
  if (fixed_size && end - shard->RoundBegin(number, position) == round.global) {
    info = FullRoundInfo(*this, number, end);
  } else {
    std::vector<BatchSlice> slices;
    for (int r = 0; r < sharding.world_size; ++r)
      slices.push_back(shard->Slice(r, number, position));
    info = MakeInfo(*this, number, slices, end);
  }
  info.is_last = number + 1 == num_batches;
  if (sharding.world_size == 1 || tail != TailRule::kShort) {
    info.batches_left = num_batches - 1 - number;
  }
  return info;
}

BatchInfo LoaderPass::InfoOfRound(int64_t number, int64_t begin, int64_t end,
                                  int64_t first_round) const {
  if (fixed_size && end - begin == round.global) return FullRoundInfo(*this, number, end);
  std::vector<BatchSlice> slices;
  for (int r = 0; r < sharding.world_size; ++r)
    slices.push_back(SliceOf(r, begin, end, first_round));
  return MakeInfo(*this, number, slices, end);
}

BatchInfo LoaderPass::InfoOfCounts(int64_t number, const std::vector<int64_t>& counts,
                                   int64_t after) const {
  if (std::all_of(counts.begin(), counts.end(),
                  [this](int64_t count) { return count == round.per_rank; })) {
    return FullRoundInfo(*this, number, after);
  }
  std::vector<BatchSlice> slices(counts.size());
  for (size_t r = 0; r < counts.size(); ++r) {
    slices[r].real = counts[r];
    slices[r].padding = round.per_rank - counts[r];
  }
  return MakeInfo(*this, number, slices, after);
}

namespace {

// A step of SplitMix64, so that seeds of neighbours are unrelated.
uint64_t Mix(uint64_t state, int64_t value) {
  state += 0x9e3779b97f4a7c15U + static_cast<uint64_t>(value);
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9U;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebU;
  return state ^ (state >> 31);
}

}  // namespace

uint64_t LoaderPass::BatchSeed(int64_t number) const {
  const bool stream = !shard.has_value();
  // Ranks that all read the whole of a stream must see the same one.
  const int reader = dispatch() || (stream && !sharded) ? 0 : rank;
  const uint64_t mixed = Mix(Mix(seed, epoch), reader);
  return stream ? mixed : Mix(mixed, first_index + number);
}

uint64_t LoaderPass::CollateSeed(int64_t number) const {
  // The final 1 makes it different from the seeds of the samples.
  return Mix(Mix(Mix(Mix(seed, epoch), dispatch() ? 0 : rank), first_index + number), 1);
}

// --- LoaderCore ---

namespace {

// Beyond the end of any stream if the result does not fit into an int64.
int64_t AfterRounds(int64_t position, int64_t rounds, int64_t size) {
  return rounds <= (INT64_MAX - position) / size ? position + rounds * size : INT64_MAX;
}

void CheckSettings(const RecipeSettings& settings, std::optional<int64_t> num_samples,
                   bool is_stream) {
  TORCH_CHECK(!settings.batch_size.has_value() || *settings.batch_size >= 1,
              "loader: the batch size is ", settings.batch_size.value_or(0),
              ", it must be at least 1");
  TORCH_CHECK(settings.batch_size.has_value() || settings.batch_sampler != nullptr,
              "loader: give a batch size, or a batch_sampler()");
  TORCH_CHECK(settings.workers >= 0, "loader: workers is ", settings.workers,
              ", it must not be negative");
  TORCH_CHECK(settings.prefetch >= 1, "loader: prefetch is ", settings.prefetch,
              ", it must be at least 1");
  TORCH_CHECK(!is_stream || (!settings.shuffle && !settings.sampler && !settings.batch_sampler),
              "loader: a stream is read in its own order: no shuffle, sampler or batch_sampler");
  TORCH_CHECK(
      (settings.shuffle ? 1 : 0) + (settings.sampler ? 1 : 0) + (settings.batch_sampler ? 1 : 0) <=
          1,
      "loader: shuffle, sampler and batch_sampler exclude each other");
  TORCH_CHECK(is_stream || num_samples.has_value(), "loader: the data set does not know its size");
}

}  // namespace

std::shared_ptr<LoaderCore> LoaderCore::Create(const RecipeSettings& settings,
                                               const LoaderOptions& options,
                                               const std::function<std::optional<int64_t>()>& open,
                                               bool is_stream, Comm* comm,
                                               std::shared_ptr<LoaderObserver> observer,
                                               bool sharded) {
  KeepFreedBatchMemory();
  std::shared_ptr<LoaderCore> core(new LoaderCore());
  core->settings_ = settings;
  core->options_ = options;
  core->is_stream_ = is_stream;
  core->comm_ = comm;
  core->observer_ = std::move(observer);
  if (comm != nullptr) {
    core->rank_ = comm->rank();
    core->world_size_ = comm->size();
  }
  core->sharded_ = sharded && core->world_size_ > 1;
  core->dispatch_ =
      core->world_size_ > 1 && options.dispatch_batches.value_or(is_stream && !core->sharded_);

  std::optional<int64_t> num_samples;
  const auto begin = [&] {
    num_samples = open();
    CheckSettings(settings, num_samples, is_stream);
    if (settings.batch_size.has_value()) {
      ValueOrThrow(RoundSizeOf(core->Sharding(), *settings.batch_size));
    }
  };
  if (core->world_size_ > 1) {
    OnAll(*comm, "prepare a loader", begin);
  } else {
    begin();
  }
  core->num_samples_ = num_samples;

  if (settings.workers > 0 || is_stream) RegisterDataRandom();

  core->seed_ = settings.seed.has_value()       ? *settings.seed
                : options.data_seed.has_value() ? *options.data_seed
                                                : DefaultSeed(options.use_seedable_sampler);
  if (core->world_size_ > 1) {
    // The seed may differ (ranks seeded apart): rank 0's is used. With dispatching the data of
    // other ranks may be empty.
    const std::string mine =
        core->SettingsText(core->dispatch_ || core->sharded_ ? -1 : num_samples.value_or(-1));
    std::vector<std::string> all =
        comm->AllGatherBytes(absl::StrCat(mine, "|", core->seed_, "|", num_samples.value_or(-1)));
    std::vector<std::vector<std::string>> parts;
    std::vector<std::string> texts;
    for (const std::string& text : all) {
      parts.push_back(absl::StrSplit(text, '|'));
      texts.push_back(parts.back()[0]);
    }
    CheckSame(texts);
    TORCH_CHECK(absl::SimpleAtoi(parts[0][1], &core->seed_));
    if (core->dispatch_) {
      int64_t samples = -1;
      TORCH_CHECK(absl::SimpleAtoi(parts[0][2], &samples));
      core->num_samples_ = samples < 0 ? std::nullopt : std::optional<int64_t>(samples);
    }
    if (core->sharded_) {
      core->num_samples_ = 0;
      for (const std::vector<std::string>& part : parts) {
        int64_t samples = -1;
        TORCH_CHECK(absl::SimpleAtoi(part[2], &samples));
        core->shard_sizes_.push_back(samples < 0 ? std::nullopt : std::optional<int64_t>(samples));
        if (samples < 0) core->num_samples_.reset();
        if (core->num_samples_.has_value()) *core->num_samples_ += samples;
      }
    }
  }
  // Read the order now, because size() depends on it.
  if (settings.sampler || settings.batch_sampler) core->ReadUserOrder(0);
  // A wrong path often looks like an empty data set. All ranks check, since a batch sampler that
  // does not fit is an error on all of them.
  if (!is_stream && core->num_samples_.has_value() && core->NumBatches(0) == 0 && core->is_main()) {
    MUSTER_LOG(Warning) << "this loader gives no batch: its data set has " << *core->num_samples_
                        << " samples" << (settings.drop_last ? ", and drop_last is set" : "");
  }
  return core;
}

std::string LoaderCore::OrderName() const {
  if (sharded_) return "sharded stream";
  if (is_stream_) return "stream";
  if (settings_.batch_sampler) return "batch_sampler";
  if (settings_.sampler) return "sampler";
  return settings_.shuffle ? "shuffle" : "sequential";
}

std::string LoaderCore::SettingsText(int64_t num_samples) const {
  return absl::StrCat(
      "num_samples=", num_samples, " batch_size=", settings_.batch_size.value_or(-1),
      " drop_last=", settings_.drop_last, " shuffle=", settings_.shuffle, " stream=", is_stream_,
      " split_batches=", options_.split_batches, " even_batches=", options_.even_batches,
      " dispatch_batches=", dispatch_, " sharded=", sharded_,
      " order=", absl::StrReplaceAll(OrderName(), {{" ", "_"}}));
}

std::string LoaderCore::signature() const {
  std::string text = SettingsText(num_samples_.value_or(-1));
  // A seed in the recipe is part of the signature: a program that gives each epoch's loader a seed
  // wants that one.
  if (settings_.seed.has_value()) absl::StrAppend(&text, " seed=", *settings_.seed);
  return text;
}

ShardOptions LoaderCore::Sharding() const {
  ShardOptions sharding;
  sharding.world_size = world_size_;
  sharding.drop_last = settings_.drop_last;
  // A single process does not shard: its last batch is just short.
  sharding.split_batches = options_.split_batches && world_size_ > 1;
  sharding.even_batches =
      world_size_ > 1 && (is_stream_ || even_override_.value_or(options_.even_batches));
  sharding.dispatch = dispatch_;
  return sharding;
}

at::Tensor LoaderCore::OrderFromMain(const std::function<std::vector<int64_t>()>& read) const {
  std::vector<int64_t> order;
  std::string error;
  std::exception_ptr thrown;
  if (rank_ == 0) {
    try {
      order = read();
    } catch (...) {
      thrown = std::current_exception();
      error = TextOf(thrown);
    }
  }
  if (world_size_ > 1) {
    // One byte distinguishes an order from an error, which must reach the ranks that wait for it.
    std::string bytes(1, thrown ? 'E' : 'O');
    if (thrown) {
      bytes += error;
    } else if (!order.empty()) {
      bytes.append(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int64_t));
    }
    bytes = comm_->BroadcastBytes(rank_ == 0 ? bytes : std::string(), 0);
    if (rank_ != 0 && bytes[0] == 'E')
      throw DataError("the sampler failed on rank 0: " + bytes.substr(1));
    order.resize((bytes.size() - 1) / sizeof(int64_t));
    if (!order.empty() && !thrown) std::memcpy(order.data(), bytes.data() + 1, bytes.size() - 1);
  }
  if (thrown) std::rethrow_exception(thrown);
  at::Tensor tensor = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), tensor.data_ptr<int64_t>());
  return tensor;
}

namespace {

// Check ids now: they are read later without a check, on other threads.
void CheckIds(const at::Tensor& order, int64_t num_samples, const char* whose) {
  const int64_t* ids = order.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < order.numel(); ++i) {
    TORCH_CHECK(ids[i] >= 0 && ids[i] < num_samples, "loader: the ", whose, " gave sample ", ids[i],
                ", the data set has ", num_samples);
  }
}

// FNV-1a over whole numbers.
std::string Digest(const at::Tensor& ids, const std::vector<int64_t>& lengths) {
  uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&hash](int64_t number) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3U;
    hash ^= hash >> 29;
  };
  const int64_t* numbers = ids.const_data_ptr<int64_t>();
  add(ids.numel());
  for (int64_t i = 0; i < ids.numel(); ++i) add(numbers[i]);
  for (const int64_t length : lengths) add(length);
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

}  // namespace

void LoaderCore::ReadUserOrder(int64_t epoch) {
  if (user_order_.has_value() && user_order_->epoch == epoch) return;
  UserOrder read;
  read.epoch = epoch;
  if (settings_.sampler) {
    read.ids = OrderFromMain([&] { return settings_.sampler(epoch); });
    CheckIds(read.ids, *num_samples_, "sampler");
  } else {
    // Packed as: number of batches, their lengths, their ids.
    const at::Tensor packed = OrderFromMain([&] {
      const std::vector<std::vector<int64_t>> batches = settings_.batch_sampler(epoch);
      std::vector<int64_t> numbers = {static_cast<int64_t>(batches.size())};
      for (const auto& batch : batches) numbers.push_back(static_cast<int64_t>(batch.size()));
      for (const auto& batch : batches) numbers.insert(numbers.end(), batch.begin(), batch.end());
      return numbers;
    });
    const int64_t* numbers = packed.const_data_ptr<int64_t>();
    read.lengths.assign(numbers + 1, numbers + 1 + numbers[0]);
    read.ids = packed.slice(0, 1 + numbers[0]).clone();
    CheckIds(read.ids, *num_samples_, "batch sampler");
  }
  read.digest = Digest(read.ids, read.lengths);
  // If this one fails, the loader keeps the order that it has.
  Shard(&read);
  user_order_ = std::move(read);
}

LoaderCore::UserOrder LoaderCore::LoadedOrder(
    const LoaderState& state, const std::map<std::string, at::Tensor>& tensors) const {
  const auto numbers = [&tensors](const char* name) {
    const auto found = tensors.find(name);
    TORCH_CHECK(found != tensors.end(), "loader: the saved state has no \"", name, "\"");
    TORCH_CHECK(found->second.defined() && found->second.scalar_type() == at::kLong &&
                    found->second.dim() == 1,
                "loader: \"", name, "\" of the saved state is not a row of int64");
    return found->second.cpu().contiguous();
  };
  UserOrder order;
  order.epoch = state.epoch;
  order.ids = numbers("order").clone();
  CheckIds(order.ids, *num_samples_, "saved order");
  if (settings_.batch_sampler) {
    const at::Tensor lengths = numbers("lengths");
    int64_t sum = 0;
    for (int64_t i = 0; i < lengths.numel(); ++i) {
      order.lengths.push_back(lengths.const_data_ptr<int64_t>()[i]);
      TORCH_CHECK(order.lengths.back() >= 0, "loader: a saved batch has a negative length");
      sum += order.lengths.back();
    }
    TORCH_CHECK(sum == order.ids.numel(), "loader: the saved batches have ", sum,
                " samples, their order has ", order.ids.numel());
  }
  order.digest = Digest(order.ids, order.lengths);
  TORCH_CHECK(order.digest == state.order_digest,
              "loader: the saved order is not the one of the saved place (digest ", order.digest,
              ", expected ", state.order_digest, "): the checkpoint is damaged");
  return order;
}

BatchSamplerShard LoaderCore::Shard(const UserOrder* order) const {
  if (settings_.batch_sampler) {
    return ValueOrThrow(
        BatchSamplerShard::CreateCustom(Sharding(), order->lengths, settings_.batch_size));
  }
  const int64_t length = settings_.sampler ? order->ids.numel() : *num_samples_;
  return ValueOrThrow(BatchSamplerShard::Create(Sharding(), length, *settings_.batch_size));
}

void LoaderCore::CheckSize(std::optional<int64_t> num_samples) const {
  TORCH_CHECK(is_stream_ || num_samples == num_samples_, "loader: the data set had ",
              num_samples_.value_or(-1), " samples when the loader was prepared and has ",
              num_samples.value_or(-1), " now: prepare a new loader for it");
}

std::shared_ptr<const LoaderPass> LoaderCore::StartPass(int64_t skip) {
  TORCH_CHECK(skip >= 0, "loader: cannot skip ", skip, " batches");
  if (observer_ != nullptr) observer_->OnStart();
  auto pass = std::make_shared<LoaderPass>();
  pass->iteration = NextIteration();
  pass->rank = rank_;
  pass->sharding = Sharding();
  pass->tail = TailRuleOf(pass->sharding);
  pass->epoch = next_epoch_;
  if (resuming_ && skip > 0 && place_.index > 0) {
    // A program that computed its own position means the batches of the epoch.
    const int64_t more = std::max<int64_t>(skip - place_.index, 0);
    if (is_main()) {
      MUSTER_LOG(Info) << "skip_first_batches(" << skip << "): load_state() has this epoch continue"
                       << " at batch " << place_.index << " (from 0), so "
                       << (more == 0 ? "no" : std::to_string(more)) << " more are skipped";
    }
    skip = more;
  }
  pass->first_index = skip;
  pass->seed = static_cast<uint64_t>(seed_);
  pass->sharded = sharded_;
  if (resuming_) {
    pass->position = place_.position;
    pass->first_index += place_.index;
    pass->resumed_from = place_;
    pass->rank_position = place_.rank_position;
  }
  pass->fixed_size = settings_.batch_size.has_value();
  if (pass->fixed_size) {
    pass->round = ValueOrThrow(RoundSizeOf(pass->sharding, *settings_.batch_size));
  }
  if (is_stream_) {
    // For a sharded stream, only the ends of its parts show how many samples the skipped rounds
    // have.
    if (sharded_) {
      pass->rank_position = AfterRounds(pass->rank_position, skip, pass->round.per_rank);
    } else {
      pass->position = AfterRounds(pass->position, skip, pass->round.global);
    }
  } else {
    if (has_sampler()) {
      ReadUserOrder(pass->epoch);
      TORCH_CHECK(!resuming_ || expected_digest_.empty() || expected_digest_ == user_order_->digest,
                  "loader: the sampler gives another order for epoch ", pass->epoch,
                  " than the one in the middle of which the state was saved, so samples would be "
                  "repeated and others left out: load the saved order too, or make the sampler a "
                  "function of the epoch");
      pass->order = user_order_->ids;
    } else if (settings_.shuffle && (!dispatch_ || rank_ == 0)) {
      pass->order = ShuffledOrder(
          *num_samples_, static_cast<uint64_t>(seed_) + static_cast<uint64_t>(pass->epoch));
    }
    pass->shard = Shard(user_order());
    pass->position = pass->shard->Skip(skip, pass->position);
    pass->num_batches = pass->shard->NumBatches(rank_, pass->position);
  }
  // These change last, so that a sampler that throws leaves the loader unchanged.
  ++passes_;
  resuming_ = false;
  expected_digest_.clear();
  next_epoch_ = pass->epoch + 1;
  place_ = {.epoch = pass->epoch,
            .position = pass->position,
            .index = pass->first_index,
            .rank_position = pass->rank_position};
  live_.push_back({.iteration = pass->iteration, .place = place_, .before = place_});
  owner_ = pass->iteration;
  return pass;
}

LoaderCore::LivePass* LoaderCore::FindLive(uint64_t iteration) {
  for (LivePass& live : live_) {
    if (live.iteration == iteration) return &live;
  }
  return nullptr;
}

void LoaderCore::ReadBegins(const LoaderPass& pass) {
  // Others read with generators of their own; without an observer nobody asks.
  if (observer_ == nullptr || settings_.workers > 0 || is_stream_) return;
  LivePass* const live = FindLive(pass.iteration);
  if (live == nullptr) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  live->generator = generator.get_state();
}

void LoaderCore::BatchGiven(const LoaderPass& pass, const std::shared_ptr<const BatchInfo>& info) {
  // A loop that continues after LoadState is no longer tracked: it does not change the new
  // position.
  if (LivePass* live = FindLive(pass.iteration)) {
    live->before = live->place;
    live->place.position = info->position;
    live->place.index = info->index + 1;
    if (sharded_) {
      live->place.rank_position =
          pass.rank_position + (info->index + 1 - pass.first_index) * pass.round.per_rank;
    }
    live->at_end = info->is_last;
    place_ = live->place;
    owner_ = pass.iteration;
  }
  if (observer_ != nullptr) observer_->OnBatch(pass.iteration, info);
}

void LoaderCore::EndPass(const LoaderPass& pass, bool exhausted) {
  const bool counts =
      exhausted || observer_ == nullptr || observer_->CountsAsTrained(pass.iteration);
  if (LivePass* live = FindLive(pass.iteration)) {
    const bool at_end = exhausted || live->at_end;
    live_.erase(live_.begin() + (live - live_.data()));
    if (owner_ == pass.iteration) {
      if (!counts && pass.resumed_from.has_value() && next_epoch_ == pass.epoch + 1) {
        // A pass that only looks at a loaded place does not use it up.
        place_ = *pass.resumed_from;
        resuming_ = true;
        next_epoch_ = pass.epoch;
      } else if (at_end || !counts) {
        place_ = {.epoch = next_epoch_};
      }
    }
  }
  if (observer_ != nullptr) observer_->OnEnd(pass.iteration);
}

LoaderState LoaderCore::Completed(LoaderState place) const {
  place.seed = seed_;
  place.num_samples = num_samples_.value_or(-1);
  place.order = OrderName();
  place.shards = sharded_ ? world_size_ : 0;
  if (!sharded_) place.rank_position = 0;
  place.order_digest.clear();
  if (!expected_digest_.empty()) {
    place.order_digest = expected_digest_;
  } else if (user_order_.has_value() && user_order_->epoch == place.epoch) {
    place.order_digest = user_order_->digest;
  }
  return place;
}

LoaderState LoaderCore::State() const { return Completed(place_); }

std::map<std::string, at::Tensor> LoaderCore::StateTensors() const {
  std::map<std::string, at::Tensor> tensors;
  if (!user_order_.has_value() || user_order_->epoch != place_.epoch || !expected_digest_.empty()) {
    return tensors;
  }
  tensors["order"] = user_order_->ids;
  if (settings_.batch_sampler) {
    at::Tensor lengths = at::empty({static_cast<int64_t>(user_order_->lengths.size())}, at::kLong);
    std::copy(user_order_->lengths.begin(), user_order_->lengths.end(),
              lengths.data_ptr<int64_t>());
    tensors["lengths"] = lengths;
  }
  return tensors;
}

uint64_t LoaderCore::live_pass() const {
  if (live_.empty()) return 0;
  for (const LivePass& live : live_) {
    if (live.iteration == owner_) return owner_;
  }
  return live_.back().iteration;
}

LoaderState LoaderCore::StateBeforeBatch() const {
  const uint64_t pass = live_pass();
  for (const LivePass& live : live_) {
    if (live.iteration == pass) return Completed(live.before);
  }
  return State();
}

at::Tensor LoaderCore::GeneratorBeforeBatch() const {
  const uint64_t pass = live_pass();
  for (const LivePass& live : live_) {
    if (live.iteration == pass) return live.generator;
  }
  return {};
}

LoaderState LoaderCore::NextState() const {
  return resuming_ ? State() : Completed({.epoch = next_epoch_});
}

std::optional<LoaderCore::UserOrder> LoaderCore::CheckedOrder(
    const LoaderState& state, const std::map<std::string, at::Tensor>& tensors) const {
  TORCH_CHECK(state.epoch >= 0 && state.position >= 0 && state.index >= 0,
              "loader: a saved state with negative numbers: ", state.ToString());
  const bool other_data =
      state.num_samples >= 0 && num_samples_.has_value() && state.num_samples != *num_samples_;
  // Between epochs the data may change.
  TORCH_CHECK(!state.inside_epoch() || !other_data,
              "loader: the saved state is of a data set with ", state.num_samples,
              " samples, this one has ", num_samples_.value_or(-1),
              ": load the state of the same data, or call set_epoch() to begin an epoch");
  std::optional<UserOrder> order;
  // An order of other data would leave out new samples: use the one that the sampler has returned.
  if (has_sampler() && !other_data && !state.order_digest.empty() && tensors.count("order") > 0) {
    order = LoadedOrder(state, tensors);
  }
  if (state.inside_epoch()) {
    const auto refuse_unless = [&](bool good, const auto&... why) {
      TORCH_CHECK(good, "loader: the state was saved in the middle of epoch ", state.epoch, ", ",
                  why...,
                  ": samples would be repeated and others left out; prepare the loader as "
                  "it was, or continue with the next epoch by set_epoch()");
    };
    refuse_unless(state.order.empty() || state.order == OrderName(), "in the order of kind \"",
                  state.order, "\", this loader has the kind \"", OrderName(), "\"");
    refuse_unless(!sharded_ || state.shards == world_size_, "of a stream sharded into ",
                  state.shards, " parts, now there are ", world_size_);
    refuse_unless(!has_sampler() || !state.order_digest.empty(),
                  "without the order that its sampler gave");
  }
  return order;
}

void LoaderCore::CheckState(const LoaderState& state,
                            const std::map<std::string, at::Tensor>& tensors) const {
  CheckedOrder(state, tensors);
}

void LoaderCore::LoadState(const LoaderState& state,
                           const std::map<std::string, at::Tensor>& tensors) {
  std::optional<UserOrder> order = CheckedOrder(state, tensors);
  if (order.has_value()) {
    user_order_ = std::move(order);
    expected_digest_.clear();
  } else {
    expected_digest_ = has_sampler() && state.inside_epoch() ? state.order_digest : "";
  }
  // If the order has not begun, the seed that the program has set is used.
  if (state.inside_epoch() || !settings_.seed.has_value()) seed_ = state.seed;
  next_epoch_ = state.epoch;
  place_ = state;
  resuming_ = true;
  live_.clear();
  owner_ = 0;
}

void LoaderCore::SetEpoch(int64_t epoch) {
  TORCH_CHECK(epoch >= 0, "loader: set_epoch(", epoch, "): epochs count from 0");
  // A loop that sets each epoch by number must not lose the place that was loaded within that
  // epoch.
  if (resuming_ && epoch == next_epoch_) return;
  resuming_ = false;
  expected_digest_.clear();
  next_epoch_ = epoch;
  // An active pass keeps its position until it ends.
  if (live_.empty()) place_ = {.epoch = epoch};
}

std::optional<int64_t> LoaderCore::NumBatches(int64_t skip) const {
  if (!num_samples_.has_value()) return std::nullopt;
  if (sharded_) {
    const int64_t per_rank = ValueOrThrow(RoundSizeOf(Sharding(), *settings_.batch_size)).per_rank;
    int64_t rounds = settings_.drop_last ? INT64_MAX : 0;
    for (const std::optional<int64_t>& size : shard_sizes_) {
      rounds = settings_.drop_last ? std::min(rounds, *size / per_rank)
                                   : std::max(rounds, (*size + per_rank - 1) / per_rank);
    }
    return std::max<int64_t>(rounds - skip, 0);
  }
  const BatchSamplerShard shard = Shard(user_order());
  return shard.NumBatches(rank_, shard.Skip(skip));
}

std::optional<int64_t> LoaderCore::total_batch_size() const {
  if (!settings_.batch_size.has_value()) return std::nullopt;
  return ValueOrThrow(RoundSizeOf(Sharding(), *settings_.batch_size)).global;
}

}  // namespace muster
