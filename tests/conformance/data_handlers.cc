#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "ATen/core/Tensor.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/case_loader.h"
#include "tests/conformance/handlers.h"
#include "worker/data/gather_for_metrics.h"
#include "worker/data/loader.h"
#include "worker/data/sampler_shard.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int64_t>;
using IdBatches = std::vector<Ids>;

Ids IdsOf(const at::Tensor& tensor) {
  return Ids(tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel());
}

template <class Loader>
IdBatches LocalBatches(Loader& loader) {
  IdBatches batches;
  for (auto& batch : loader) batches.push_back(IdsOf(batch.value()));
  return batches;
}

int64_t LengthOf(const Json& in) { return IntOf(in, "dataset_len"); }
int64_t BatchSizeOf(const Json& in) { return IntOf(in, "batch_size", 1); }

Json BatchSamplerShardCase(const Json& in) {
  const ShardOptions options = ShardOptionsOf(in);
  Json per_process = Json::array();
  for (int rank = 0; rank < options.world_size; ++rank) {
    per_process.push_back(
        in.contains("custom_batches") && !in.at("custom_batches").is_null()
            ? ValueOf(ShardCustomBatches(options, rank, in.at("custom_batches").get<IdBatches>()))
            : ValueOf(ShardBatches(options, rank, LengthOf(in), BatchSizeOf(in))));
  }
  return {{"batches", per_process}};
}

Json IterableDatasetShardCase(const Json& in) {
  const ShardOptions options = ShardOptionsOf(in);
  Json samples = Json::array();
  for (int rank = 0; rank < options.world_size; ++rank) {
    samples.push_back(ValueOf(ShardStream(options, rank, LengthOf(in), BatchSizeOf(in))));
  }
  std::vector<IdBatches> batches(options.world_size);
  OnEveryRank(in, "iterable", false, false,
              [&](auto loader, Comm& comm) { batches[comm.rank()] = LocalBatches(loader); });
  return {{"samples", samples}, {"batches", batches}};
}

Json SkipFirstBatchesCase(const Json& in) {
  const int ranks = RanksOf(in);
  std::vector<IdBatches> rest(ranks), full(ranks);
  OnEveryRank(in, in.at("dataset"), true, false, [&](auto loader, Comm& comm) {
    auto skipping = SkipFirstBatches(loader, IntOf(in, "skip"));
    rest[comm.rank()] = LocalBatches(skipping);
    full[comm.rank()] = LocalBatches(loader);
  });
  return {{"batches", rest}, {"full_epoch_after", full}};
}

Json GatherForMetricsCase(const Json& in) {
  const int ranks = RanksOf(in);
  const bool objects = in.at("use_gather_object");
  const Json& dispatch = in.at("dispatch_batches");
  std::vector<IdBatches> local(ranks), gathered(ranks);
  OnEveryRank(in, in.at("dataset"), false,
              dispatch.is_null() ? std::nullopt : std::optional<bool>(dispatch.get<bool>()),
              [&](auto loader, Comm& comm) {
                auto rest = SkipFirstBatches(loader, in.contains("skip") && !in.at("skip").is_null()
                                                         ? IntOf(in, "skip")
                                                         : 0);
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
