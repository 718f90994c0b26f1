#include "worker/data/loader.h"

#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/index_select.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/randperm.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/process/thread_comm.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> Values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

struct Ids {
  int64_t length;
  size_t size() const { return static_cast<size_t>(length); }
  int64_t get(size_t index) const { return static_cast<int64_t>(index); }
};

struct IdStream {
  int64_t length;
  int64_t at = 0;
  void reset() { at = 0; }
  std::optional<int64_t> next() {
    return at < length ? std::optional<int64_t>(at++) : std::nullopt;
  }
};

template <class R>
auto Alone(const R& recipe) {
  return PrepareLoader(recipe, {}, nullptr);
}

template <class Loader>
std::vector<std::vector<int64_t>> All(const Loader& loader) {
  std::vector<std::vector<int64_t>> all;
  for (auto& batch : loader) all.push_back(Values(*batch));
  return all;
}

template <class F>
std::string ErrorOf(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// --- Order ---

TEST(ShuffledOrder, SeedAndEpoch_AreTorchRandperm) {
  for (int64_t epoch : {0, 1, 7}) {
    auto loader = Alone(batches(Ids{100}, 100).shuffle(true).seed(42));
    loader.set_epoch(epoch);
    const at::Tensor expected =
        at::randperm(100, at::detail::createCPUGenerator(42 + epoch), at::TensorOptions(at::kLong));
    EXPECT_EQ(All(loader)[0], Values(expected));
  }
}

TEST(PreparedLoader, D10_SkippedPassAndBrokenOffPass_RepeatNoPermutation) {
  auto loader = Alone(batches(Ids{64}, 8).shuffle(true).seed(1));
  std::set<std::vector<int64_t>> seen;
  for (auto& batch : SkipFirstBatches(loader, 7)) seen.insert(Values(*batch));
  for (int pass = 0; pass < 3; ++pass) {
    int64_t index = 0;
    for (auto& batch : loader) {
      if (++index == 8) seen.insert(Values(*batch));
      if (index == 8 && pass == 1) break;
    }
  }
  EXPECT_EQ(seen.size(), 4U);
  EXPECT_EQ(loader.epoch(), 4);
}

TEST(PreparedLoader, D11_RanksSeededApart_AgreeOnRankZerosSeed) {
  std::vector<std::vector<int64_t>> ids(4);
  RunRanks(4, [&](Comm& comm) {
    LoaderOptions options;
    options.data_seed = 100 + comm.rank();
    auto loader = PrepareLoader(batches(Ids{64}, 4).shuffle(true), options, &comm);
    for (auto& batch : loader) {
      for (int64_t id : Values(*batch)) ids[static_cast<size_t>(comm.rank())].push_back(id);
    }
    EXPECT_EQ(loader.state_dict().seed, 100);
  });
  std::set<int64_t> unique;
  for (const auto& rank : ids) unique.insert(rank.begin(), rank.end());
  EXPECT_EQ(unique.size(), 64U);
}

TEST(PreparedLoader, UserSampler_IsAskedOnRankZeroAndCountsEverywhere) {
  std::vector<std::vector<int64_t>> ids(2);
  RunRanks(2, [&](Comm& comm) {
    const int rank = comm.rank();
    auto recipe = batches(Ids{10}, 2).sampler([rank](int64_t epoch) {
      EXPECT_EQ(rank, 0);
      std::vector<int64_t> order(6);
      std::iota(order.rbegin(), order.rend(), epoch);
      return order;
    });
    auto loader = PrepareLoader(recipe, {}, &comm);
    EXPECT_EQ(loader.size(), 2);
    loader.set_epoch(1);
    for (auto& batch : loader) {
      for (int64_t id : Values(*batch)) ids[static_cast<size_t>(rank)].push_back(id);
    }
  });
  EXPECT_THAT(ids[0], ElementsAre(6, 5, 2, 1));
  EXPECT_THAT(ids[1], ElementsAre(4, 3, 6, 5));
}

TEST(PreparedLoader, FailingSampler_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    const auto sampler = [](int64_t) -> std::vector<int64_t> {
      throw std::runtime_error("no index file");
    };
    errors[static_cast<size_t>(comm.rank())] =
        ErrorOf([&] { PrepareLoader(batches(Ids{10}, 2).sampler(sampler), {}, &comm); });
  });
  EXPECT_THAT(errors[0], HasSubstr("no index file"));
  EXPECT_THAT(errors[1], HasSubstr("rank 0: no index file"));
}

TEST(PreparedLoader, BatchSamplerOfDifferentLengths_IsSharedWhole) {
  std::vector<std::vector<std::vector<int64_t>>> seen(2);
  RunRanks(2, [&](Comm& comm) {
    auto recipe = batches(Ids{10}).batch_sampler([](int64_t) {
      return std::vector<std::vector<int64_t>>{{9, 8, 7}, {6}, {5, 4}};
    });
    auto loader = PrepareLoader(recipe, {}, &comm);
    EXPECT_FALSE(loader.total_batch_size().has_value());
    for (auto& batch : loader) {
      seen[static_cast<size_t>(comm.rank())].push_back(Values(*batch));
      if (batch.info().index == 1) {
        EXPECT_THAT(batch.info().rank_real_samples, ElementsAre(2, 0));
        EXPECT_THAT(batch.info().rank_sizes, ElementsAre(2, 3));
      }
    }
  });
  EXPECT_EQ(seen[0], (std::vector<std::vector<int64_t>>{{9, 8, 7}, {5, 4}}));
  EXPECT_EQ(seen[1], (std::vector<std::vector<int64_t>>{{6}, {9, 8, 7}}));
}

// --- Facts of batches, and who is told ---

TEST(BatchInfo, OverAnEpoch_TellsIndexLastAndRealSamples) {
  RunRanks(2, [&](Comm& comm) {
    auto loader = PrepareLoader(batches(Ids{11}, 4), {}, &comm);
    EXPECT_EQ(loader.total_batch_size(), 8);
    EXPECT_EQ(loader.total_dataset_length(), 11);
    std::vector<BatchInfo> infos;
    for (auto& batch : loader) infos.push_back(batch.info());
    ASSERT_EQ(infos.size(), 2U);
    EXPECT_FALSE(infos[0].is_last);
    EXPECT_TRUE(infos[0].rank_real_samples.empty());
    EXPECT_EQ(infos[0].position, 8);
    EXPECT_EQ(infos[0].batches_left, 1);
    EXPECT_TRUE(infos[1].is_last);
    EXPECT_EQ(infos[1].index, 1);
    EXPECT_EQ(infos[1].size, 4);
    EXPECT_EQ(infos[1].global_size, 8);
    EXPECT_EQ(infos[1].real_samples, comm.rank() == 0 ? 3 : 0);
    EXPECT_EQ(infos[1].global_real_samples, 3);
    EXPECT_THAT(infos[1].rank_real_samples, ElementsAre(3, 0));
  });
}

class Recorder : public LoaderObserver {
 public:
  void OnBatch(uint64_t iteration, const BatchInfo& info) override {
    text += "b" + std::to_string(Number(iteration)) + "." + std::to_string(info.index) +
            (info.is_last ? "! " : " ");
  }
  void OnEnd(uint64_t iteration) override { text += "e" + std::to_string(Number(iteration)) + " "; }
  std::string text;

 private:
  size_t Number(uint64_t iteration) {
    return numbers_.emplace(iteration, numbers_.size()).first->second;
  }
  std::map<uint64_t, size_t> numbers_;
};

TEST(LoaderObserver, D05_BreakOnTheLastBatch_EndsThePass) {
  auto recorder = std::make_shared<Recorder>();
  auto loader = PrepareLoader(batches(Ids{4}, 2), {}, nullptr, recorder);
  for (auto& batch : loader) {
    if (batch.info().is_last) break;
  }
  EXPECT_EQ(recorder->text, "b0.0 b0.1! e0 ");
}

TEST(LoaderObserver, NestedLoopsAndExceptions_EachPassEndsOnce) {
  auto recorder = std::make_shared<Recorder>();
  auto outer = PrepareLoader(batches(Ids{4}, 2), {}, nullptr, recorder);
  auto inner = PrepareLoader(batches(Ids{2}, 2).workers(1), {}, nullptr, recorder);
  try {
    for (auto& batch : outer) {
      for (auto& evaluation : inner) EXPECT_EQ(evaluation.info().size, 2);
      if (batch.info().index == 1) throw std::runtime_error("loop");
    }
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(recorder->text, "b0.0 b1.0! e1 b0.1! b2.0! e2 e0 ");
}

// --- Data sets and collation ---

struct Example {
  at::Tensor data, target;
};

// Shaped as LibTorch's data sets: get() is not const, get_batch() takes unsigned indices.
struct TorchStyle {
  using ExampleType = Example;
  Example get(size_t index) {
    const int64_t i = static_cast<int64_t>(index);
    return {at::full({2, 2}, i, at::kFloat), at::full({}, 10 * i, at::kLong)};
  }
  std::vector<Example> get_batch(c10::ArrayRef<size_t> indices) {
    std::vector<Example> batch;
    for (size_t index : indices) batch.push_back(get(index));
    return batch;
  }
  std::optional<size_t> size() const { return 5; }
};

TEST(PreparedLoader, TorchStyleDataSet_StacksDataAndTarget) {
  for (int workers : {0, 3}) {
    auto loader = Alone(batches(TorchStyle{}, 2).workers(workers));
    std::vector<int64_t> targets;
    for (auto& [images, labels] : loader) {
      EXPECT_EQ(images.dim(), 3);
      EXPECT_EQ(labels.scalar_type(), at::kLong);
      for (int64_t label : Values(labels)) targets.push_back(label);
    }
    EXPECT_THAT(targets, ElementsAre(0, 10, 20, 30, 40));
  }
}

TEST(PreparedLoader, TensorDataset_GivesRowsOfEachTensor) {
  const at::Tensor x = at::arange(12, at::kFloat).view({6, 2});
  auto loader = Alone(batches(TensorDataset(x, at::arange(6, at::kLong)), 4));
  std::vector<int64_t> labels;
  for (auto& [features, label] : loader) {
    EXPECT_EQ(features.size(1), 2);
    for (int64_t value : Values(label)) labels.push_back(value);
  }
  EXPECT_THAT(labels, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(All(Alone(batches(at::arange(3, at::kLong), 2))).size(), 2U);
  EXPECT_THAT(ErrorOf([&] { TensorDataset(x, at::ones({5})); }), HasSubstr("6 and 5 rows"));
}

TEST(SelectRows, AnyLayout_IsIndexSelect) {
  const at::Tensor plain = at::arange(24, at::kFloat).view({4, 3, 2});
  for (const at::Tensor& tensor :
       {plain, plain.transpose(1, 2), plain.slice(1, 0, 0), at::arange(4, at::kByte)}) {
    const at::Tensor rows = SelectRows(tensor, {3, 0, 3});
    EXPECT_TRUE(rows.equal(
        at::index_select(tensor, 0, at::arange(3, -1, -3, at::kLong).repeat({2}).slice(0, 0, 3))));
  }
  EXPECT_THAT(ErrorOf([&] { SelectRows(plain, {4}); }), HasSubstr("row 4 of a tensor with 4 rows"));
  EXPECT_EQ(SelectRows(plain, {}).size(0), 0);
}

TEST(PreparedLoader, VectorOfMaps_CollatesNumbersTextsAndLists) {
  using E = std::tuple<std::map<std::string, at::Tensor>, int, std::string, std::vector<float>>;
  std::vector<E> rows;
  for (int i = 0; i < 3; ++i)
    rows.push_back({{{"x", at::full({2}, i)}}, i, "t" + std::to_string(i), {1.5F, 2.5F}});
  for (auto& [tensors, labels, texts, scores] : Alone(batches(rows, 3))) {
    EXPECT_EQ(tensors.at("x").sizes(), (std::vector<int64_t>{3, 2}));
    EXPECT_EQ(Values(labels), (std::vector<int64_t>{0, 1, 2}));
    EXPECT_THAT(texts, ElementsAre("t0", "t1", "t2"));
    EXPECT_EQ(scores.sizes(), (std::vector<int64_t>{3, 2}));
    EXPECT_EQ(scores.scalar_type(), at::kFloat);
  }
}

TEST(PreparedLoader, UserCollate_MakesTheBatch) {
  auto recipe = batches(Ids{5}, 2).collate([](const std::vector<int64_t>& ids) {
    return std::make_pair(at::full({1}, static_cast<int64_t>(ids.size())), std::string("mine"));
  });
  std::vector<int64_t> sizes;
  for (auto& [size, name] : Alone(recipe)) {
    sizes.push_back(size.item<int64_t>());
    EXPECT_EQ(name, "mine");
  }
  EXPECT_THAT(sizes, ElementsAre(2, 2, 1));
}

TEST(PreparedLoader, RangeAndChunkStreams_AreRead) {
  struct Chunks {
    size_t left = 0;
    void reset() { left = 5; }
    std::optional<std::vector<int64_t>> get_batch(size_t count) {
      if (left == 0) return std::nullopt;
      const size_t given = std::min<size_t>({count, left, 2});
      left -= given;
      return std::vector<int64_t>(given, 7);
    }
  };
  auto chunks = Alone(batches(Chunks{}, 3));
  EXPECT_FALSE(chunks.has_size());
  EXPECT_EQ(All(chunks), (std::vector<std::vector<int64_t>>{{7, 7, 7}, {7, 7}}));
  EXPECT_EQ(All(chunks).size(), 2U);
  EXPECT_EQ(All(Alone(batches(std::set<int64_t>{3, 1, 2}, 2))),
            (std::vector<std::vector<int64_t>>{{1, 2}, {3}}));
  EXPECT_THAT(ErrorOf([&] { chunks.size(); }), HasSubstr("size()"));
}

TEST(PreparedLoader, PinnedMemory_IsAskedForOnTheWayToAGpuOnly) {
  LoaderOptions options;
  options.device = at::kCPU;
  options.non_blocking = true;
  auto loader = PrepareLoader(batches(Ids{4}, 2).pin_memory(), options, nullptr);
  std::vector<int64_t> ids;
  for (auto& batch : loader) {
    for (const int64_t id : Values(*batch)) ids.push_back(id);
  }
  EXPECT_THAT(ids, ElementsAre(0, 1, 2, 3));
}

TEST(PreparedLoader, EmptyDataSet_HasNoBatches) {
  EXPECT_TRUE(All(Alone(batches(Ids{0}, 4).shuffle(true).workers(2))).empty());
  EXPECT_TRUE(All(Alone(batches(IdStream{0}, 4).workers(2))).empty());
}

// --- Threads ---

TEST(Workers, ManyThreads_KeepTheOrder) {
  for (int workers : {1, 2, 5}) {
    auto loader = Alone(batches(Ids{1000}, 7).workers(workers).prefetch(3));
    int64_t next = 0;
    for (auto& batch : loader) {
      for (int64_t id : Values(*batch)) EXPECT_EQ(id, next++);
    }
    EXPECT_EQ(next, 1000);
  }
}

TEST(Workers, StreamReadAhead_GivesTheSameBatches) {
  const auto expected = All(Alone(batches(IdStream{23}, 4)));
  EXPECT_EQ(All(Alone(batches(IdStream{23}, 4).workers(2))), expected);
}

struct Failing {
  size_t size() const { return 40; }
  int64_t get(size_t index) const {
    if (index == 13) throw std::runtime_error("cannot decode");
    return static_cast<int64_t>(index);
  }
};

TEST(Workers, ExceptionInAThread_IsRethrownInItsPlaceNamingBatchAndSample) {
  for (int workers : {0, 1, 4}) {
    auto loader = Alone(batches(Failing{}, 4).workers(workers));
    int seen = 0;
    const std::string error = ErrorOf([&] {
      for (auto& batch : loader) seen += static_cast<int>(batch.info().size);
    });
    EXPECT_EQ(seen, 12);
    EXPECT_THAT(error, HasSubstr("batch 3 of epoch 0"));
    EXPECT_THAT(error, HasSubstr("sample 13: cannot decode"));
  }
}

TEST(Workers, FailingStream_GivesTheBatchesBeforeTheError) {
  struct FailingStream {
    int64_t at = 0;
    void reset() { at = 0; }
    std::optional<int64_t> next() {
      if (at == 9) throw std::runtime_error("connection lost");
      return at++;
    }
  };
  for (int workers : {0, 1}) {
    auto loader = Alone(batches(FailingStream{}, 4).workers(workers));
    int seen = 0;
    const std::string error = ErrorOf([&] {
      for (auto& batch : loader) {
        ++seen;
        EXPECT_FALSE(batch.info().is_last);
      }
    });
    EXPECT_EQ(seen, 2);
    EXPECT_THAT(error, HasSubstr("sample 9 of the stream: connection lost"));
  }
}

TEST(Workers, LeavingTheLoopEarly_StopsTheThreads) {
  auto loader = Alone(batches(Ids{100000}, 1).workers(4).prefetch(2));
  for (int pass = 0; pass < 20; ++pass) {
    for (auto& batch : loader) {
      if (batch.info().index == pass) break;
    }
  }
  EXPECT_EQ(loader.epoch(), 20);
}

// --- State ---

TEST(LoaderState, D24_SavedInsideTheLoop_GoesOnAtTheNextSampleInTheSameOrder) {
  auto first = Alone(batches(Ids{50}, 4).shuffle(true).seed(3));
  All(first);
  std::vector<std::vector<int64_t>> rest;
  LoaderState state;
  for (auto& batch : first) {
    if (batch.info().index == 4) state = first.state_dict();
    if (batch.info().index > 4) rest.push_back(Values(*batch));
  }
  EXPECT_EQ(state, *LoaderState::FromString(state.ToString()));
  auto second = Alone(batches(Ids{50}, 4).shuffle(true).seed(999));
  second.load_state(state);
  second.set_epoch(1);  // as a loop over epochs does: the place within epoch 1 is kept
  std::vector<std::vector<int64_t>> resumed;
  for (auto& batch : second) {
    EXPECT_EQ(batch.info().epoch, 1);
    EXPECT_EQ(batch.info().index, static_cast<int64_t>(5 + resumed.size()));
    resumed.push_back(Values(*batch));
  }
  EXPECT_EQ(resumed, rest);
  EXPECT_EQ(All(first), All(second));
  EXPECT_EQ(first.state_dict(), second.state_dict());
}

TEST(LoaderState, BadStates_AreRefused) {
  EXPECT_FALSE(LoaderState::FromString("x").ok());
  EXPECT_THAT(LoaderState::FromString("{\"epoch\":1}").status().message(),
              HasSubstr("\"position\""));
  auto loader = Alone(batches(Ids{10}, 2));
  LoaderState state = Alone(batches(Ids{11}, 2)).state_dict();
  EXPECT_THAT(ErrorOf([&] { loader.load_state(state); }),
              HasSubstr("with 11 samples, this one has 10"));
}

TEST(LoaderState, OverrideEvenBatches_HoldsForLaterPasses) {
  RunRanks(2, [&](Comm& comm) {
    auto loader = PrepareLoader(batches(Ids{10}, 4), {}, &comm);
    loader.state_handle()->OverrideEvenBatches(false);
    EXPECT_EQ(All(loader).size(), comm.rank() == 0 ? 2U : 1U);
    loader.state_handle()->OverrideEvenBatches(std::nullopt);
    EXPECT_EQ(All(loader).size(), 2U);
  });
}

// --- Dispatch ---

TEST(Dispatch, NestedBatches_EachRankGetsItsSlice) {
  using E = std::tuple<std::map<std::string, at::Tensor>, int64_t, std::string>;
  std::vector<std::vector<int64_t>> labels(3);
  std::vector<std::vector<std::string>> texts(3);
  RunRanks(3, [&](Comm& comm) {
    std::vector<E> rows;
    // Only rank 0 has the data.
    for (int64_t i = 0; i < (comm.rank() == 0 ? 7 : 0); ++i) {
      rows.push_back(
          {{{"x", at::full({2}, i, at::kFloat)}, {"y", at::ones({})}}, i, "t" + std::to_string(i)});
    }
    LoaderOptions options;
    options.dispatch_batches = true;
    auto loader = PrepareLoader(batches(rows, 2).shuffle(false).workers(comm.rank() == 0 ? 1 : 0),
                                options, &comm);
    EXPECT_EQ(loader.size(), 2);
    const size_t rank = static_cast<size_t>(comm.rank());
    for (auto& batch : loader) {
      EXPECT_EQ(batch.info().batches_left, 1 - batch.info().index);
      auto& [tensors, label, text] = batch;
      EXPECT_EQ(Values(tensors.at("x").select(1, 1)), Values(label));
      for (int64_t value : Values(label)) labels[rank].push_back(value);
      texts[rank].insert(texts[rank].end(), text.begin(), text.end());
    }
  });
  EXPECT_THAT(labels[0], ElementsAre(0, 1, 6));
  EXPECT_THAT(labels[1], ElementsAre(2, 3, 0));
  EXPECT_THAT(labels[2], ElementsAre(4, 5, 1));
  EXPECT_THAT(texts[2], ElementsAre("t4", "t5", "t1"));
}

TEST(Dispatch, ErrorOnRankZero_ReachesEveryRank) {
  std::vector<std::string> errors(3);
  std::vector<int> seen(3, 0);
  RunRanks(3, [&](Comm& comm) {
    const size_t rank = static_cast<size_t>(comm.rank());
    LoaderOptions options;
    options.dispatch_batches = true;
    auto loader = PrepareLoader(batches(Failing{}, 2), options, &comm);
    errors[rank] = ErrorOf([&] {
      for (auto& batch : loader) seen[rank] += static_cast<int>(batch.info().size);
    });
  });
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(seen[rank], 4);
    EXPECT_THAT(errors[rank], HasSubstr("sample 13: cannot decode"));
  }
  EXPECT_THAT(errors[2], HasSubstr("on rank 0"));
}

TEST(Dispatch, TensorWithoutTheSamplesDimension_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = true;
    auto recipe =
        batches(Ids{8}, 2).collate([](const std::vector<int64_t>&) { return at::ones({}); });
    errors[static_cast<size_t>(comm.rank())] =
        ErrorOf([&] { All(PrepareLoader(recipe, options, &comm)); });
  });
  EXPECT_THAT(errors[0], HasSubstr("in a batch of 4 samples"));
  EXPECT_THAT(errors[1], HasSubstr("in a batch of 4 samples"));
}

TEST(Dispatch, ShapesThatChange_AreRenegotiated) {
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = true;
    auto recipe = batches(Ids{8}, 2).collate([](const std::vector<int64_t>& ids) {
      const int64_t rows = static_cast<int64_t>(ids.size());
      return at::full({rows, ids.front() + 1}, ids.front());
    });
    std::vector<int64_t> widths;
    for (auto& batch : PrepareLoader(recipe, options, &comm)) widths.push_back(batch->size(1));
    EXPECT_THAT(widths, ElementsAre(1, 5));
  });
}

// --- Mistakes ---

TEST(PrepareLoader, SettingsThatDoNotFit_AreNamed) {
  EXPECT_THAT(ErrorOf([] { Alone(batches(Ids{4}, 0)); }), HasSubstr("batch size is 0"));
  EXPECT_THAT(ErrorOf([] { Alone(batches(Ids{4})); }), HasSubstr("give a batch size"));
  EXPECT_THAT(ErrorOf([] { Alone(batches(Ids{4}, 2).workers(-1)); }), HasSubstr("workers is -1"));
  EXPECT_THAT(ErrorOf([] { Alone(batches(IdStream{4}, 2).shuffle()); }), HasSubstr("a stream"));
  EXPECT_THAT(
      ErrorOf([] {
        Alone(batches(Ids{4}, 2).shuffle().sampler([](int64_t) { return std::vector<int64_t>(); }));
      }),
      HasSubstr("exclude each other"));
  EXPECT_THAT(ErrorOf([] {
                Alone(batches(Ids{4}, 2).sampler([](int64_t) { return std::vector<int64_t>{9}; }));
              }),
              HasSubstr("gave sample 9, the data set has 4"));
}

TEST(PrepareLoader, BatchSizeThatCannotBeSplit_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.split_batches = true;
    errors[static_cast<size_t>(comm.rank())] =
        ErrorOf([&] { PrepareLoader(batches(Ids{9}, 3), options, &comm); });
  });
  for (const std::string& error : errors)
    EXPECT_THAT(error, HasSubstr("round multiple of the number of processes (2)"));
}

TEST(PrepareLoader, RanksWithDifferentLoaders_AreNamed) {
  std::vector<std::string> errors(3);
  RunRanks(3, [&](Comm& comm) {
    errors[static_cast<size_t>(comm.rank())] =
        ErrorOf([&] { PrepareLoader(batches(Ids{comm.rank() == 2 ? 8 : 9}, 3), {}, &comm); });
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("rank 2"));
    EXPECT_THAT(error, HasSubstr("num_samples=8 (rank 0: num_samples=9)"));
  }
}

// --- Property ---

// Any configuration, stopped anywhere and resumed on any other number of ranks: every sample once,
// padding apart.
TEST(PreparedLoader, ThousandRandomConfigurations_EverySampleExactlyOncePerEpoch) {
  std::mt19937_64 random(20261121);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 1000; ++trial) {
    const int64_t length = draw(0, 70);
    const bool stream = draw(0, 3) == 0;
    const bool shuffle = !stream && draw(0, 1) == 1;
    const bool drop_last = draw(0, 3) == 0;
    LoaderState state;
    std::vector<int> seen(static_cast<size_t>(length), 0);
    int64_t dropped_at_most = 0;
    const int legs = static_cast<int>(draw(1, 3));
    std::string trace = "length " + std::to_string(length) + (stream ? " stream" : "") +
                        (drop_last ? " drop_last" : "");
    for (int leg = 0; leg < legs; ++leg) {
      const int n = static_cast<int>(draw(1, 4));
      LoaderOptions options;
      options.split_batches = draw(0, 1) == 1;
      options.even_batches = draw(0, 1) == 1;
      if (draw(0, 1) == 1) options.dispatch_batches = draw(0, 1) == 1;
      options.data_seed = leg == 0 ? 5 : 77;
      const int64_t batch_size = draw(1, 6) * (options.split_batches ? n : 1);
      const int workers = static_cast<int>(draw(0, 2));
      const bool last_leg = leg + 1 == legs;
      const int64_t stop_after = last_leg ? INT64_MAX : draw(1, 4);
      trace += " | ranks " + std::to_string(n) + " batch " + std::to_string(batch_size) +
               (options.split_batches ? " split" : "") + (options.even_batches ? " even" : "") +
               " stop " + std::to_string(stop_after);
      SCOPED_TRACE(trace);
      std::vector<std::vector<int64_t>> ids(static_cast<size_t>(n));
      std::vector<LoaderState> states(static_cast<size_t>(n));
      RunRanks(n, [&](Comm& comm) {
        const size_t rank = static_cast<size_t>(comm.rank());
        const auto run = [&](auto recipe) {
          auto loader = PrepareLoader(recipe.drop_last(drop_last).workers(workers), options, &comm);
          if (leg > 0) loader.load_state(state);
          int64_t given = 0;
          for (auto& batch : loader) {
            const std::vector<int64_t> values = Values(*batch);
            EXPECT_EQ(static_cast<int64_t>(values.size()), batch.info().size);
            ids[rank].insert(ids[rank].end(), values.begin(),
                             values.begin() + batch.info().real_samples);
            if (++given == stop_after) break;
          }
          states[rank] = loader.state_dict();
        };
        if (stream) {
          run(batches(IdStream{length}, batch_size));
        } else {
          run(batches(Ids{length}, batch_size).shuffle(shuffle));
        }
      });
      state = states[0];
      for (const auto& rank : ids) {
        for (int64_t id : rank) ++seen[static_cast<size_t>(id)];
      }
      dropped_at_most = std::max(dropped_at_most, batch_size * (options.split_batches ? 1 : n) - 1);
      // The epoch is over: nothing of it is left for another leg.
      if (state.epoch > 0) break;
    }
    SCOPED_TRACE(trace);
    int64_t missing = 0;
    for (int count : seen) {
      EXPECT_LE(count, 1);
      missing += count == 0 ? 1 : 0;
    }
    EXPECT_LE(missing, drop_last ? dropped_at_most : 0);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace muster
