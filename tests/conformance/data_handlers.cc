#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "tests/conformance/handlers.h"
#include "tests/conformance/value_of.h"
#include "worker/data/loader.h"
#include "worker/data/sampler_shard.h"
#include "worker/metrics/gather_for_metrics.h"
#include "worker/process/thread_comm.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int64_t>;
using IdBatches = std::vector<Ids>;

Ids IdsOf(const at::Tensor& tensor) {
  return Ids(tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel());
}

// A stream of the ids 0, 1, ... with or without a length.
class CountingStream {
 public:
  explicit CountingStream(int64_t length) : length_(length) {}
  std::optional<at::Tensor> next() {
    if (at_ == length_) return std::nullopt;
    return at::full({}, at_++, at::kLong);
  }
  void reset() { at_ = 0; }

 private:
  const int64_t length_;
  int64_t at_ = 0;
};

class SizedCountingStream : public CountingStream {
 public:
  explicit SizedCountingStream(int64_t length) : CountingStream(length), length_(length) {}
  size_t size() const { return length_; }

 private:
  const int64_t length_;
};

ShardOptions ShardOptionsOf(const Json& in) {
  return {.world_size = in.at("num_processes"),
          .split_batches = in.at("split_batches"),
          .even_batches = in.value("even_batches", true),
          .drop_last = in.at("drop_last")};
}

LoaderOptions LoaderOptionsOf(const Json& in, std::optional<bool> dispatch) {
  LoaderOptions options;
  options.split_batches = in.at("split_batches");
  options.even_batches = in.value("even_batches", true);
  options.dispatch_batches = dispatch;
  return options;
}

// Calls `use(loader, comm)` on every rank with the prepared loader that the case describes.
template <class Use>
void OnEveryRank(const Json& in, const std::string& dataset, bool stream_has_length,
                 std::optional<bool> dispatch, const Use& use) {
  const int64_t length = in.at("dataset_len"), batch_size = in.at("batch_size");
  const LoaderOptions options = LoaderOptionsOf(in, dispatch);
  RunRanks(in.at("num_processes").get<int>(), [&](Comm& comm) {
    const auto with = [&](auto data) {
      auto recipe = batches(std::move(data), batch_size);
      recipe.drop_last(in.at("drop_last").get<bool>());
      use(PrepareLoader(recipe, options, &comm), comm);
    };
    if (dataset == "map") {
      with(at::arange(length));
    } else if (stream_has_length) {
      with(SizedCountingStream(length));
    } else {
      with(CountingStream(length));
    }
  });
}

template <class Loader>
IdBatches LocalBatches(Loader& loader) {
  IdBatches batches;
  for (auto& batch : loader) batches.push_back(IdsOf(batch.value()));
  return batches;
}

Json BatchSamplerShardCase(const Json& in) {
  const ShardOptions options = ShardOptionsOf(in);
  Json per_process = Json::array();
  for (int rank = 0; rank < options.world_size; ++rank) {
    per_process.push_back(
        in.contains("custom_batches") && !in.at("custom_batches").is_null()
            ? ValueOf(ShardCustomBatches(options, rank, in.at("custom_batches").get<IdBatches>()))
            : ValueOf(ShardBatches(options, rank, in.at("dataset_len"), in.at("batch_size"))));
  }
  return {{"batches", per_process}};
}

Json IterableDatasetShardCase(const Json& in) {
  const ShardOptions options = ShardOptionsOf(in);
  Json samples = Json::array();
  for (int rank = 0; rank < options.world_size; ++rank) {
    samples.push_back(
        ValueOf(ShardStream(options, rank, in.at("dataset_len"), in.at("batch_size"))));
  }
  std::vector<IdBatches> batches(options.world_size);
  OnEveryRank(in, "iterable", false, false,
              [&](auto loader, Comm& comm) { batches[comm.rank()] = LocalBatches(loader); });
  return {{"samples", samples}, {"batches", batches}};
}

Json SkipFirstBatchesCase(const Json& in) {
  const int ranks = in.at("num_processes");
  std::vector<IdBatches> rest(ranks), full(ranks);
  OnEveryRank(in, in.at("dataset"), true, false, [&](auto loader, Comm& comm) {
    auto skipping = SkipFirstBatches(loader, in.at("skip").get<int64_t>());
    rest[comm.rank()] = LocalBatches(skipping);
    full[comm.rank()] = LocalBatches(loader);
  });
  return {{"batches", rest}, {"full_epoch_after", full}};
}

Json GatherForMetricsCase(const Json& in) {
  const int ranks = in.at("num_processes");
  const bool objects = in.at("use_gather_object");
  const Json& dispatch = in.at("dispatch_batches");
  std::vector<IdBatches> local(ranks), gathered(ranks);
  OnEveryRank(in, in.at("dataset"), false,
              dispatch.is_null() ? std::nullopt : std::optional<bool>(dispatch.get<bool>()),
              [&](auto loader, Comm& comm) {
                auto rest = SkipFirstBatches(loader, in.value("skip", int64_t{0}));
                for (auto& batch : rest) {
                  const Ids ids = IdsOf(batch.value());
                  local[comm.rank()].push_back(ids);
                  gathered[comm.rank()].push_back(
                      objects ? GatherObjectForMetrics(comm, ids, batch.info())
                              : IdsOf(GatherForMetrics(comm, batch.value(), batch.info())));
                }
              });
  for (const IdBatches& other : gathered) {
    if (other != gathered.front()) throw std::runtime_error("ranks gathered different ids");
  }
  return {{"batches", local}, {"gathered", gathered.front()}};
}

}  // namespace

std::map<std::string, Handler> DataHandlers() {
  return {{"batch_sampler_shard", BatchSamplerShardCase},
          {"iterable_dataset_shard", IterableDatasetShardCase},
          {"skip_first_batches", SkipFirstBatchesCase},
          {"gather_for_metrics", GatherForMetricsCase}};
}

}  // namespace muster::conformance
