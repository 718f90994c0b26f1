#ifndef MUSTER_TESTS_CONFORMANCE_CASE_LOADER_H_
#define MUSTER_TESTS_CONFORMANCE_CASE_LOADER_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "tests/conformance/case_fields.h"
#include "worker/collective/thread_comm.h"
#include "worker/data/loader.h"
#include "worker/data/sampler_shard.h"

// The loaders that data cases describe. Fields are read as tests/testdata/README.md names them.
namespace muster::conformance {

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

inline ShardOptions ShardOptionsOf(const nlohmann::json& in) {
  return {.world_size = RanksOf(in),
          .split_batches = in.at("split_batches"),
          .even_batches = in.value("even_batches", true),
          .drop_last = in.at("drop_last")};
}

inline LoaderOptions LoaderOptionsOf(const nlohmann::json& in, std::optional<bool> dispatch) {
  LoaderOptions options;
  options.split_batches = in.at("split_batches");
  options.even_batches = in.value("even_batches", true);
  options.dispatch_batches = dispatch;
  return options;
}

// Calls `use(loader, comm)` on every rank with the prepared loader that the case describes.
template <class Use>
void OnEveryRank(const nlohmann::json& in, const std::string& dataset, bool stream_has_length,
                 std::optional<bool> dispatch, const Use& use) {
  const int64_t length = IntOf(in, "dataset_len"), batch_size = IntOf(in, "batch_size", 1);
  const LoaderOptions options = LoaderOptionsOf(in, dispatch);
  if (dataset != "map" && dataset != "iterable") {
    throw std::invalid_argument("dataset must be map or iterable, not " + dataset);
  }
  RunRanks(RanksOf(in), [&](Comm& comm) {
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

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_CASE_LOADER_H_
