#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "worker/data/loader.h"
#include "worker/process/thread_comm.h"

// The golden cases that need whole loaders: one thread per rank, the real loader, the real
// collectives of ThreadComm.

namespace muster {
namespace {

using nlohmann::json;

std::vector<json> GoldenCases(const std::string& file, const std::string& kind) {
  const char* dir = std::getenv("MUSTER_GOLDEN");
  EXPECT_NE(dir, nullptr) << "set MUSTER_GOLDEN to the folder of golden cases";
  std::vector<json> cases;
  if (dir == nullptr) return cases;
  std::ifstream in(absl::StrCat(dir, "/", file));
  for (std::string line; std::getline(in, line);) {
    json parsed = json::parse(line);
    if (parsed["kind"] == kind) cases.push_back(std::move(parsed));
  }
  EXPECT_FALSE(cases.empty()) << "no cases in " << file;
  return cases;
}

struct Ids {
  int64_t length;
  size_t size() const { return static_cast<size_t>(length); }
  int64_t get(size_t index) const { return static_cast<int64_t>(index); }
};

struct IdStream {
  int64_t length;
  bool has_size = true;
  int64_t at = 0;
  std::optional<size_t> size() const {
    return has_size ? std::optional<size_t>(static_cast<size_t>(length)) : std::nullopt;
  }
  void reset() { at = 0; }
  std::optional<int64_t> next() {
    return at < length ? std::optional<int64_t>(at++) : std::nullopt;
  }
};

std::vector<int64_t> Values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

template <class Loader>
json Epoch(const Loader& loader, Comm& comm, json* gathered) {
  json batches = json::array();
  for (auto& batch : loader) {
    batches.push_back(Values(*batch));
    if (gathered == nullptr) continue;
    const BatchInfo& info = batch.info();
    std::vector<int64_t> ids;
    const std::vector<at::Tensor> all = comm.AllGather(*batch);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const std::vector<int64_t> values = Values(all[rank]);
      const int64_t real =
          info.rank_real_samples.empty() ? info.size : info.rank_real_samples[rank];
      ids.insert(ids.end(), values.begin(), values.begin() + real);
    }
    EXPECT_EQ(static_cast<int64_t>(ids.size()), info.global_real_samples);
    if (comm.rank() == 0) gathered->push_back(ids);
  }
  return batches;
}

struct Outcome {
  json batches = json::array();
  json full_epoch_after = json::array();
  json gathered = json::array();
  json sizes = json::array();
};

Outcome RunCase(const json& in, bool gather) {
  const int n = in["num_processes"];
  Outcome outcome;
  outcome.batches = outcome.full_epoch_after = outcome.sizes =
      std::vector<json>(static_cast<size_t>(n));
  RunRanks(n, [&](Comm& comm) {
    LoaderOptions options;
    options.split_batches = in["split_batches"];
    options.even_batches = in.value("even_batches", true);
    if (!in.contains("dispatch_batches")) {
      options.dispatch_batches = false;
    } else if (!in["dispatch_batches"].is_null()) {
      options.dispatch_batches = in["dispatch_batches"].get<bool>();
    }
    const auto run = [&](auto recipe) {
      recipe.drop_last(in["drop_last"].get<bool>());
      auto loader = PrepareLoader(recipe, options, &comm);
      const auto skipped = SkipFirstBatches(loader, in.value("skip", 0));
      const size_t rank = static_cast<size_t>(comm.rank());
      if (loader.has_size()) outcome.sizes[rank] = skipped.size();
      outcome.batches[rank] = Epoch(skipped, comm, gather ? &outcome.gathered : nullptr);
      if (loader.has_size()) {
        EXPECT_EQ(outcome.sizes[rank], outcome.batches[rank].size());
      }
      outcome.full_epoch_after[rank] = Epoch(loader, comm, nullptr);
    };
    if (in.value("dataset", "iterable") == "map") {
      run(batches(Ids{in["dataset_len"]}, in["batch_size"].get<int64_t>()));
    } else {
      run(batches(IdStream{in["dataset_len"], !gather}, in["batch_size"].get<int64_t>()));
    }
  });
  return outcome;
}

TEST(PreparedLoader, GoldenGatherForMetrics_AllMatch) {
  for (const json& test_case : GoldenCases("gather_for_metrics.jsonl", "gather_for_metrics")) {
    SCOPED_TRACE(test_case["id"].get<std::string>());
    const Outcome outcome = RunCase(test_case["in"], true);
    EXPECT_EQ(outcome.batches, test_case["out"]["batches"]);
    EXPECT_EQ(outcome.gathered, test_case["out"]["gathered"]);
  }
}

TEST(PreparedLoader, GoldenSkipFirstBatches_AllMatch) {
  for (const json& test_case : GoldenCases("skip_first_batches.jsonl", "skip_first_batches")) {
    SCOPED_TRACE(test_case["id"].get<std::string>());
    const Outcome outcome = RunCase(test_case["in"], false);
    EXPECT_EQ(outcome.batches, test_case["out"]["batches"]);
    EXPECT_EQ(outcome.full_epoch_after, test_case["out"]["full_epoch_after"]);
  }
}

TEST(PreparedLoader, GoldenIterableBatches_AllMatch) {
  for (const json& test_case :
       GoldenCases("iterable_dataset_shard.jsonl", "iterable_dataset_shard")) {
    if (test_case.contains("error")) continue;
    SCOPED_TRACE(test_case["id"].get<std::string>());
    EXPECT_EQ(RunCase(test_case["in"], false).batches, test_case["out"]["batches"]);
  }
}

TEST(PreparedLoader, D07_QuirksOfGathering_LeaveNoRepeatedSample) {
  for (const json& quirk : GoldenCases("quirks.jsonl", "gather_for_metrics")) {
    SCOPED_TRACE(quirk["id"].get<std::string>());
    const Outcome outcome = RunCase(quirk["in"], true);
    const json& recommended = quirk["recommended"];
    if (recommended.contains("ids_in_order")) {
      json ids = json::array();
      for (const json& round : outcome.gathered) ids.insert(ids.end(), round.begin(), round.end());
      EXPECT_EQ(ids, recommended["ids_in_order"]);
    } else {
      EXPECT_EQ(outcome.batches, recommended["batches"]);
      EXPECT_EQ(outcome.gathered, recommended["gathered"]);
    }
  }
}

TEST(PreparedLoader, D09_QuirksOfSkipping_SizeIsTheNumberOfBatches) {
  for (const json& quirk : GoldenCases("quirks.jsonl", "skip_first_batches")) {
    SCOPED_TRACE(quirk["id"].get<std::string>());
    const Outcome outcome = RunCase(quirk["in"], false);
    EXPECT_EQ(outcome.sizes, quirk["recommended"]["len"]);
  }
}

}  // namespace
}  // namespace muster
