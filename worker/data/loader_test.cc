#include "worker/data/loader.h"

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/_neg_view.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/complex.h"
#include "ATen/ops/dropout.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/index_select.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/randint.h"
#include "ATen/ops/randperm.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "base/test_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::Each;
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

// Of indexed data, also where the ranks get different numbers of them.
TEST(PreparedLoader, D09_Size_IsTheNumberOfBatchesGivenOut) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Comm& comm) {
      for (const bool split : {false, true}) {
        for (const bool even : {false, true}) {
          for (const bool drop_last : {false, true}) {
            for (int64_t length = 0; length < 14; ++length) {
              for (const int64_t each : {1, 2, 4}) {
                const int64_t size = split ? each * ranks : each;
                const auto recipe = batches(Ids{length}, size).drop_last(drop_last);
                LoaderOptions options;
                options.split_batches = split;
                options.even_batches = even;
                const auto loader = PrepareLoader(recipe, options, &comm);
                EXPECT_EQ(loader.size(), All(loader).size())
                    << "rank " << comm.rank() << " of " << ranks << split << even << drop_last
                    << ", " << length << " samples in batches of " << size;
              }
            }
          }
        }
      }
    });
  }
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

TEST(PreparedLoader, SamplerThatFailsAtALaterEpoch_LeavesTheLoaderAsItWas) {
  auto loader = Alone(batches(Ids{10}, 2).sampler([](int64_t epoch) {
    if (epoch == 1) throw std::runtime_error("no index file");
    return std::vector<int64_t>(6, epoch == 2 ? 99 : 0);
  }));
  const LoaderState before = loader.state_dict();
  for (const int64_t epoch : {1, 2}) {
    loader.set_epoch(epoch);
    EXPECT_NE(ErrorOf([&] { (void)loader.begin(); }), "no error");
    EXPECT_EQ(loader.size(), 3);
  }
  loader.set_epoch(0);
  EXPECT_EQ(loader.state_dict(), before);
}

TEST(PreparedLoader, BatchSamplerThatDoesNotFitAtALaterEpoch_LeavesTheLoaderAsItWas) {
  using Lists = std::vector<std::vector<int64_t>>;
  auto loader = Alone(batches(Ids{10}, 2).batch_sampler([](int64_t epoch) {
    return epoch == 0 ? Lists{{0, 1}, {2, 3}, {4, 5}} : Lists{{0}, {1, 2, 3}};
  }));
  loader.set_epoch(1);
  EXPECT_THAT(ErrorOf([&] { (void)loader.begin(); }), HasSubstr("batch 0 of the batch sampler"));
  EXPECT_EQ(loader.size(), 3);
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

// --- Facts of batches, and their observers ---

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
  void OnBatch(uint64_t iteration, const std::shared_ptr<const BatchInfo>& info) override {
    text += "b" + std::to_string(Number(iteration)) + "." + std::to_string(info->index) +
            (info->is_last ? "! " : " ");
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

// A plain struct as a sample, whose number and text become a tensor and a list.
struct Caption {
  at::Tensor image;
  int64_t label;
  std::string text;
};
struct Captions {
  size_t size() const { return 3; }
  Caption get(size_t index) const {
    const int64_t i = static_cast<int64_t>(index);
    return {at::full({2}, i), i, "t" + std::to_string(i)};
  }
};
struct Boxes {
  at::Tensor data, target, boxes;
};
// Opaque and not copyable: only the user's collate function can handle it.
class Handle {
 public:
  explicit Handle(int64_t id) : id_(std::make_unique<int64_t>(id)) {}
  int64_t id() const { return *id_; }

 private:
  std::unique_ptr<int64_t> id_;
};
struct Handles {
  size_t size() const { return 4; }
  Handle get(size_t index) const { return Handle(static_cast<int64_t>(index)); }
};

// Like LibTorch's data sets: get() is not const, get_batch() takes unsigned indices.
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
  const at::Tensor complex = at::complex(plain, plain.add(1));
  for (const at::Tensor& view : {complex.conj(), at::_neg_view(plain)}) {
    EXPECT_TRUE(view.is_contiguous() && (view.is_conj() || view.is_neg()));
    EXPECT_TRUE(SelectRows(view, {3, 1}).equal(at::stack({view[3], view[1]})));
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

TEST(PreparedLoader, StructOfTensors_StaysThatStructWithAllItsMembers) {
  const std::vector<Boxes> rows(3, {at::ones({2}), at::ones({}), at::full({4}, 7)});
  for (auto& batch : Alone(batches(rows, 3))) {
    EXPECT_EQ(batch->boxes.sizes(), (std::vector<int64_t>{3, 4}));
    auto& [data, target, boxes] = batch;
    EXPECT_EQ(data.dim() + target.dim() + boxes.dim(), 5);
  }
}

TEST(PreparedLoader, StructWithNumbersAndTexts_BecomesATuple) {
  int seen = 0;
  for (auto& [images, labels, texts] : Alone(batches(Captions{}, 3))) {
    EXPECT_EQ(images.dim(), 2);
    EXPECT_EQ(Values(labels), (std::vector<int64_t>{0, 1, 2}));
    EXPECT_THAT(texts, ElementsAre("t0", "t1", "t2"));
    ++seen;
  }
  EXPECT_EQ(seen, 1);
}

TEST(PreparedLoader, StructAsSampleWithOwnCollate_IsJoinedByIt) {
  struct Joined {
    at::Tensor images;
    std::string texts;
  };
  auto recipe = batches(Captions{}, 3).collate([](const std::vector<Caption>& captions) {
    Joined joined{at::zeros({0}), ""};
    for (const Caption& caption : captions) joined.texts += caption.text;
    return joined;
  });
  for (auto& batch : Alone(recipe)) EXPECT_EQ(batch->texts, "t0t1t2");
  const auto count = [](const std::vector<Handle>& handles) {
    int64_t sum = 0;
    for (const Handle& handle : handles) sum += handle.id();
    return at::full({1}, sum);
  };
  EXPECT_EQ(All(Alone(batches(Handles{}, 4).collate(count).workers(1))),
            (std::vector<std::vector<int64_t>>{{6}}));
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

// A generator, for example, that restarts or waits forever when it is asked again.
struct StreamThatEndsOnce {
  int64_t at = 0;
  bool ended = false;
  void reset() { *this = {}; }
  std::optional<int64_t> next() {
    if (ended) throw std::runtime_error("asked again after its end");
    ended = at == 10;
    return ended ? std::nullopt : std::optional<int64_t>(at++);
  }
};

TEST(PreparedLoader, StreamThatHasEnded_IsNotAskedAgain) {
  for (const int workers : {0, 1}) {
    auto loader = Alone(batches(StreamThatEndsOnce{}, 4).workers(workers));
    EXPECT_EQ(All(loader), (std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));
    EXPECT_TRUE(All(SkipFirstBatches(loader, 9)).empty());
  }
  for (const bool dispatch : {true, false}) {
    RunRanks(3, [&](Comm& comm) {
      LoaderOptions options;
      options.dispatch_batches = dispatch;
      auto loader = PrepareLoader(batches(StreamThatEndsOnce{}, 8), options, &comm);
      EXPECT_EQ(All(loader).size(), 1U);
      EXPECT_TRUE(All(SkipFirstBatches(loader, 1)).empty());
    });
  }
}

TEST(PreparedLoader, StreamWhoseSkipStopsEarly_IsReadUpToThePlace) {
  // Skips at most to the end of a file of 5 samples.
  struct InFiles : IdStream {
    int64_t skip(int64_t count) {
      const int64_t skipped = std::min({count, 5 - at % 5, length - at});
      at += skipped;
      return skipped;
    }
  };
  auto loader = Alone(batches(InFiles{{20}}, 4));
  EXPECT_EQ(All(SkipFirstBatches(loader, 3)),
            (std::vector<std::vector<int64_t>>{{12, 13, 14, 15}, {16, 17, 18, 19}}));
}

TEST(PreparedLoader, PassInsideOfAnotherOneOverAStream_EndsThatWithAnError) {
  for (const int workers : {0, 1}) {
    auto loader = Alone(batches(IdStream{40}, 4).workers(workers));
    std::vector<std::vector<int64_t>> inner;
    const std::string error = ErrorOf([&] {
      for (auto& batch : loader) {
        if (batch.info().index == 0) inner = All(loader);
      }
    });
    EXPECT_EQ(inner.size(), 10U);
    EXPECT_EQ(inner.back().back(), 39);
    EXPECT_THAT(error, HasSubstr("another pass over this stream has begun"));
  }
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    auto loader = PrepareLoader(batches(IdStream{40}, 4), {}, &comm);
    errors[static_cast<size_t>(comm.rank())] = ErrorOf([&] {
      for (auto& batch : loader) {
        if (batch.info().index == 0) {
          EXPECT_EQ(All(loader).size(), 5U);
        }
      }
    });
  });
  EXPECT_THAT(errors, Each(HasSubstr("another pass over this stream has begun")));
}

TEST(PreparedLoader, StreamThatBeginsAgainInTheMiddle_IsReadFromItsStart) {
  for (const int workers : {0, 2}) {
    auto loader = Alone(batches(IdStream{400}, 4).workers(workers));
    auto it = loader.begin();
    for (int i = 0; i < 7; ++i) ++it;
    it = loader.begin();
    int64_t expected = 0;
    for (; it != loader.end(); ++it) {
      for (const int64_t id : Values(**it)) EXPECT_EQ(id, expected++);
    }
    EXPECT_EQ(expected, 400);
  }
}

TEST(PreparedLoader, PassesOverARange_MayNest) {
  auto loader = Alone(batches(std::set<int64_t>{3, 1, 2}, 2));
  int64_t inner = 0, outer = 0;
  for (auto& batch : loader) {
    outer += batch.info().size;
    inner += static_cast<int64_t>(All(loader).size());
  }
  EXPECT_EQ(outer, 3);
  EXPECT_EQ(inner, 4);
}

TEST(PreparedLoader, BatchOfALoaderWithoutOne_IsAnError) {
  auto loader = Alone(batches(Ids{0}, 2));
  EXPECT_THAT(ErrorOf([&] { loader.begin()->info(); }), HasSubstr("there is no batch here"));
  auto it = Alone(batches(Ids{1}, 2)).begin();
  ++it;
  EXPECT_THAT(ErrorOf([&] { (*it).info(); }), HasSubstr("there is no batch here"));
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
  second.set_epoch(1);  // as in a loop over epochs: the place within epoch 1 is kept
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

TEST(PreparedLoader, WithoutABatch_IsWarnedOf) {
  const auto output = [](const auto& recipe) {
    testing::internal::CaptureStderr();
    Alone(recipe);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(output(batches(Ids{0}, 4)),
              HasSubstr("this loader gives no batch: its data set has 0 samples\n"));
  EXPECT_THAT(output(batches(Ids{3}, 4).drop_last()),
              HasSubstr("its data set has 3 samples, and drop_last is set"));
  EXPECT_EQ(output(batches(Ids{1}, 4)), "");
}

// Programs ported from Accelerate do this: they load a state and skip the batches before it.
TEST(LoaderState, SkipAfterLoadedPlace_SkipsWhatTheEpochHasHadOnce) {
  auto first = Alone(batches(Ids{20}, 2));
  LoaderState state;
  for (auto& batch : first) {
    if (batch.info().index == 3) state = first.state_dict();
  }
  for (const int64_t skip : {0, 2, 4, 6, 99}) {
    auto second = Alone(batches(Ids{20}, 2));
    second.load_state(state);
    std::vector<int64_t> seen;
    for (auto& batch : SkipFirstBatches(second, skip)) {
      EXPECT_EQ(batch.info().index, Values(*batch)[0] / 2);
      seen.push_back(batch.info().index);
    }
    const int64_t begin = std::min<int64_t>(std::max<int64_t>(skip, 4), 10);
    ASSERT_EQ(seen.size(), static_cast<size_t>(10 - begin)) << skip;
    EXPECT_TRUE(seen.empty() || seen.front() == begin) << skip;
    // In a new epoch the whole number is skipped.
    EXPECT_EQ(All(SkipFirstBatches(second, 2)).size(), 8U);
  }
}

TEST(LoaderState, StreamSavedBeforeTheFirstBatchAfterASkip_HasSkippedOnce) {
  const auto prepare = [] { return Alone(batches(IdStream{40}, 2)); };
  auto first = prepare();
  auto pass = SkipFirstBatches(first, 3);
  auto batch = pass.begin();
  EXPECT_THAT(Values(**batch), ElementsAre(6, 7));
  const LoaderState state = first.state_handle()->StateBeforeBatch();
  EXPECT_EQ(state.position, 6);
  EXPECT_EQ(state.index, 3);
  for (const int64_t skip : {0, 3, 5}) {
    auto second = prepare();
    second.load_state(state);
    auto rest = SkipFirstBatches(second, skip);
    EXPECT_EQ(Values(**rest.begin())[0], 2 * std::max<int64_t>(skip, 3)) << skip;
  }
  auto third = prepare();
  EXPECT_TRUE(All(SkipFirstBatches(third, INT64_MAX)).empty());
}

TEST(LoaderState, BadStates_AreRefused) {
  EXPECT_FALSE(LoaderState::FromString("x").ok());
  EXPECT_THAT(LoaderState::FromString("{\"epoch\":1}").status().message(),
              HasSubstr("\"position\""));
  auto loader = Alone(batches(Ids{10}, 2));
  LoaderState state = Alone(batches(Ids{11}, 2)).state_dict();
  // Between epochs the data may change.
  EXPECT_EQ(ErrorOf([&] { loader.load_state(state); }), "no error");
  state.position = 2;
  state.index = 1;
  EXPECT_THAT(ErrorOf([&] { loader.load_state(state); }),
              HasSubstr("with 11 samples, this one has 10"));
}

TEST(LoaderState, SamplerOfDataThatHaveChangedBeforeAnEpoch_GivesTheOrderOfTheseData) {
  const auto prepare = [](int64_t length) {
    return Alone(batches(Ids{length}, 2).sampler([length](int64_t) {
      std::vector<int64_t> order(static_cast<size_t>(length));
      std::iota(order.begin(), order.end(), 0);
      return order;
    }));
  };
  auto before = prepare(4);
  for (const int64_t length : {2, 4, 6}) {
    auto after = prepare(length);
    after.load_state(before.state_dict(), before.state_tensors());
    EXPECT_EQ(All(after).size(), static_cast<size_t>(length / 2));
  }
}

TEST(LoaderState, BatchSamplerStoppedInsideAnEpoch_GoesOnWithTheSavedBatches) {
  int64_t asked = 0;
  const auto prepare = [&asked] {
    // A different answer every time, like a sampler that draws.
    return Alone(batches(Ids{9}).batch_sampler([&asked](int64_t) {
      ++asked;
      if (asked % 2 == 1)
        return std::vector<std::vector<int64_t>>{{8, 7}, {6}, {5, 4, 3}, {2, 1, 0}};
      return std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {4, 5, 6, 7, 8}};
    }));
  };
  auto first = prepare();
  for (auto& batch : first) {
    if (batch.info().index == 1) break;
  }
  auto second = prepare();
  second.load_state(first.state_dict(), first.state_tensors());
  EXPECT_EQ(second.size(), 4);
  EXPECT_EQ(All(second), (std::vector<std::vector<int64_t>>{{5, 4, 3}, {2, 1, 0}}));
  auto tensors = first.state_tensors();
  tensors["lengths"] = tensors["lengths"].add(1);
  EXPECT_THAT(ErrorOf([&] { prepare().load_state(first.state_dict(), tensors); }),
              HasSubstr("the saved batches have 13 samples"));
}

TEST(LoaderState, SamplerThatIsAFunctionOfTheEpoch_NeedsNoSavedOrder) {
  const auto prepare = [] {
    return Alone(batches(Ids{8}, 2).sampler(
        [](int64_t epoch) { return Values(ShuffledOrder(8, static_cast<uint64_t>(epoch))); }));
  };
  auto first = prepare();
  All(first);
  auto it = first.begin();
  auto second = prepare();
  second.load_state(first.state_dict());
  std::vector<std::vector<int64_t>> rest = All(second);
  ++it;
  ASSERT_EQ(rest.size(), 3U);
  EXPECT_EQ(Values(**it), rest.front());
}

TEST(LoaderState, PlaceInAnotherKindOfOrder_IsRefusedInsideAnEpoch) {
  auto shuffled = Alone(batches(Ids{8}, 2).shuffle());
  auto it = shuffled.begin();
  auto plain = Alone(batches(Ids{8}, 2));
  EXPECT_THAT(ErrorOf([&] { plain.load_state(shuffled.state_dict()); }),
              HasSubstr("kind \"shuffle\", this loader has the kind \"sequential\""));
  EXPECT_EQ(All(plain).size(), 4U);
  // At an epoch's start nothing is lost.
  auto next = Alone(batches(Ids{8}, 2));
  next.load_state(Alone(batches(Ids{8}, 2).shuffle()).state_dict());
  EXPECT_EQ(All(next).size(), 4U);
}

// Decides whether a pass counts as training, as the test sets it.
class Judge : public LoaderObserver {
 public:
  void OnBatch(uint64_t iteration, const std::shared_ptr<const BatchInfo>&) override {
    last = iteration;
  }
  void OnEnd(uint64_t) override {}
  bool CountsAsTrained(uint64_t iteration) override {
    EXPECT_LE(last, iteration);
    return trained;
  }
  uint64_t last = 0;
  bool trained = false;
};

TEST(LoaderState, LookAtALoadedPlace_DoesNotUseItUp) {
  auto judge = std::make_shared<Judge>();
  auto loader = PrepareLoader(batches(Ids{12}, 2).shuffle().seed(4), {}, nullptr, judge);
  LoaderState state;
  for (auto& batch : loader) {
    if (batch.info().index == 2) state = loader.state_dict();
  }
  loader.load_state(state);
  for (int look = 0; look < 2; ++look) {
    EXPECT_EQ(loader.begin()->info().index, 3);
    EXPECT_EQ(loader.state_dict(), state);
    EXPECT_EQ(loader.epoch(), 0);
  }
  judge->trained = true;
  EXPECT_EQ(loader.begin()->info().index, 3);
  EXPECT_EQ(loader.state_dict().index, 4);
  EXPECT_EQ(loader.epoch(), 1);
}

TEST(LoaderState, EvaluationLeftByBreak_DoesNotResumeInItsMiddle) {
  auto judge = std::make_shared<Judge>();
  auto loader = PrepareLoader(batches(Ids{12}, 2), {}, nullptr, judge);
  for (auto& batch : loader) {
    if (batch.info().index == 2) break;
  }
  EXPECT_FALSE(loader.state_dict().inside_epoch());
  EXPECT_EQ(loader.state_dict().epoch, 1);
  auto again = Alone(batches(Ids{12}, 2));
  again.load_state(loader.state_dict());
  EXPECT_EQ(All(again).size(), 6U);
}

TEST(LoaderState, LoopLeftAtItsLastBatch_LeavesNoEmptyPassToResume) {
  auto loader = Alone(batches(Ids{12}, 2));
  for (auto& batch : loader) {
    if (batch.info().is_last) break;
  }
  EXPECT_EQ(loader.state_dict().epoch, 1);
  auto again = Alone(batches(Ids{12}, 2));
  again.load_state(loader.state_dict());
  EXPECT_EQ(All(again).size(), 6U);
}

TEST(LoaderState, StateBeforeBatch_IsWhereTheBatchOfTheLivePassBegan) {
  auto loader = Alone(batches(Ids{12}, 4).shuffle());
  const auto handle = loader.state_handle();
  EXPECT_EQ(handle->live_pass(), 0U);
  EXPECT_EQ(handle->StateBeforeBatch(), handle->State());
  LoaderState before = loader.state_dict();
  for (auto& batch : loader) {
    EXPECT_EQ(handle->live_pass(), batch.info().iteration);
    EXPECT_EQ(handle->StateBeforeBatch(), before);
    before = handle->State();
    EXPECT_EQ(before.position, 4 * (batch.info().index + 1));
  }
  EXPECT_EQ(handle->live_pass(), 0U);
}

struct Numbers {
  size_t size() const { return 6; }
  at::Tensor get(size_t) const { return at::rand({1}); }
};

TEST(LoaderState, GeneratorBeforeBatch_DrawsTheNumbersOfTheBatchAgain) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  auto loader = PrepareLoader(batches(Numbers{}, 2), {}, nullptr, std::make_shared<Judge>());
  const auto handle = loader.state_handle();
  EXPECT_FALSE(handle->GeneratorBeforeBatch().defined());
  for (auto& batch : loader) {
    at::rand({3});  // of the training
    const at::Tensor now = generator.get_state();
    generator.set_state(handle->GeneratorBeforeBatch());
    EXPECT_TRUE(at::equal(at::cat({at::rand({1}), at::rand({1})}), batch.value().view({2})));
    generator.set_state(now);
  }
  EXPECT_FALSE(handle->GeneratorBeforeBatch().defined());
  // Workers draw from generators of their own, and without an observer no state is kept.
  auto by_workers =
      PrepareLoader(batches(Numbers{}, 2).workers(1), {}, nullptr, std::make_shared<Judge>());
  auto unobserved = Alone(batches(Numbers{}, 2));
  for (auto* other : {&by_workers, &unobserved}) {
    const auto begun = other->begin();
    EXPECT_FALSE(other->state_handle()->GeneratorBeforeBatch().defined());
  }
}

TEST(LoaderState, LoadedInsideALoop_IsNotOverwrittenByTheLoop) {
  auto loader = Alone(batches(Ids{12}, 2).shuffle());
  LoaderState state = loader.state_dict();
  state.epoch = 5;
  state.position = 4;
  state.index = 2;
  state.order = "shuffle";
  for (auto& batch : loader) {
    if (batch.info().index == 1) loader.load_state(state);
  }
  EXPECT_EQ(loader.state_dict(), state);
  EXPECT_EQ(loader.epoch(), 5);
  EXPECT_EQ(All(loader).size(), 4U);
}

TEST(LoaderState, SetEpochInsideALoop_KeepsThePlaceOfTheLoop) {
  auto loader = Alone(batches(Ids{12}, 2));
  for (auto& batch : loader) {
    if (batch.info().index != 1) continue;
    loader.set_epoch(7);
    EXPECT_EQ(loader.state_dict().position, 4);
  }
  EXPECT_EQ(loader.state_dict().epoch, 7);
}

TEST(LoaderState, LoaderThatTakesOver_RepeatsNoPermutation) {
  const auto prepare = [] { return Alone(batches(Ids{64}, 64).shuffle().seed(1)); };
  std::set<std::vector<int64_t>> seen;
  std::shared_ptr<LoaderStateHandle> old;
  for (int epoch = 0; epoch < 3; ++epoch) {
    auto loader = prepare();
    if (old != nullptr) {
      EXPECT_EQ(old->signature(), loader.state_handle()->signature());
      loader.load_state(old->NextState(), old->StateTensors());
    }
    old = loader.state_handle();
    seen.insert(All(loader)[0]);
  }
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_NE(old->signature(),
            Alone(batches(Ids{64}, 32).shuffle().seed(1)).state_handle()->signature());
  EXPECT_NE(old->signature(),
            Alone(batches(Ids{64}, 64).shuffle().seed(2)).state_handle()->signature());
}

TEST(PreparedLoader, PassThatCannotOpen_LeavesThePlace) {
  struct OneReader {
    OneReader() = default;
    OneReader(OneReader&&) = default;
    size_t size() const { return 4; }
    int64_t get(size_t index) { return static_cast<int64_t>(index); }
    std::unique_ptr<int> file;
  };
  auto judge = std::make_shared<Judge>();
  auto loader =
      PrepareLoader(batches(std::make_shared<OneReader>(), 2).workers(2), {}, nullptr, judge);
  EXPECT_THAT(ErrorOf([&] { loader.begin(); }), HasSubstr("workers(1)"));
  EXPECT_EQ(loader.state_handle()->live_pass(), 0U);
  EXPECT_FALSE(loader.state_dict().inside_epoch());
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

TEST(Dispatch, ConjugatedView_IsSentAsItIs) {
  const at::Tensor numbers =
      at::complex(at::arange(4, at::kFloat), at::arange(4, at::kFloat)).conj();
  std::vector<at::Tensor> seen(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = true;
    auto recipe = batches(Ids{4}, 2).collate([&](const std::vector<int64_t>&) { return numbers; });
    for (auto& batch : PrepareLoader(recipe, options, &comm))
      seen[static_cast<size_t>(comm.rank())] = *batch;
  });
  EXPECT_TRUE(at::cat(seen).equal(numbers));
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

// Calls `f`, which throws something that is no std::exception, which becomes one here.
template <class F>
std::string ErrorOfNumber(const F& f) {
  return ErrorOf([&] {
    try {
      f();
    } catch (int number) {
      throw std::runtime_error("number " + std::to_string(number));
    }
  });
}

TEST(Dispatch, WhatIsNoExceptionOnRankZero_ReachesEveryRank) {
  struct Throwing {
    size_t size() const { return 8; }
    int64_t get(size_t) const { throw 42; }
  };
  std::vector<std::string> errors(2), orders(2);
  RunRanks(2, [&](Comm& comm) {
    const size_t rank = static_cast<size_t>(comm.rank());
    LoaderOptions options;
    options.dispatch_batches = true;
    auto loader = PrepareLoader(batches(Throwing{}, 2), options, &comm);
    errors[rank] = ErrorOfNumber([&] { All(loader); });
    orders[rank] = ErrorOfNumber([&] {
      PrepareLoader(batches(Ids{8}, 2).sampler([](int64_t) -> std::vector<int64_t> { throw 43; }),
                    {}, &comm);
    });
  });
  EXPECT_EQ(errors[0], "number 42");
  EXPECT_THAT(errors[1], HasSubstr("on rank 0, which reads for all ranks"));
  EXPECT_EQ(orders[0], "number 43");
  EXPECT_THAT(orders[1], HasSubstr("the sampler failed on rank 0"));
}

TEST(Dispatch, SparseTensor_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = true;
    auto recipe = batches(Ids{8}, 2).collate([](const std::vector<int64_t>&) {
      return at::ones({4, 2}).to_sparse();
    });
    errors[static_cast<size_t>(comm.rank())] =
        ErrorOf([&] { All(PrepareLoader(recipe, options, &comm)); });
  });
  EXPECT_THAT(errors, Each(HasSubstr("a tensor of layout Sparse, whose rows cannot be sent")));
}

TEST(Dispatch, DataOfRankZeroThatHaveGrown_AreAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = true;
    const auto ids = std::make_shared<Ids>(Ids{8});
    auto loader = PrepareLoader(batches(ids, 2), options, &comm);
    if (comm.rank() == 0) ids->length = 10;
    errors[static_cast<size_t>(comm.rank())] = ErrorOf([&] { All(loader); });
    ids->length = 8;
    EXPECT_EQ(All(loader).size(), 2U);
  });
  EXPECT_THAT(errors[0], HasSubstr("the data set had 8 samples"));
  EXPECT_THAT(errors[1], HasSubstr("on rank 0, which reads for all ranks: loader: the data set"));
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

// --- Random numbers while reading ---

// Augments with LibTorch's generator and with its own one, with the given seed.
struct Augmented {
  size_t size() const { return 24; }
  std::tuple<at::Tensor, int64_t> get(size_t index) const {
    at::Tensor image = at::rand({2}).add(static_cast<double>(index));
    return {at::dropout(image, 0.5, /*train=*/true), static_cast<int64_t>(data_seed() >> 1)};
  }
};

template <class Loader>
std::vector<at::Tensor> Tensors(const Loader& loader, int64_t first = 0) {
  std::vector<at::Tensor> all;
  for (auto& [images, seeds] : loader) {
    all.push_back(images.reshape(-1).to(at::kDouble));
    all.push_back(seeds.to(at::kDouble));
  }
  return {all.begin() + 2 * first, all.end()};
}

bool AreEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = a[i].equal(b[i]);
  return same;
}

TEST(DataRandom, AnyNumberOfWorkers_GivesTheSameAugmentations) {
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  const auto prepare = [](int workers) {
    return Alone(batches(Augmented{}, 4).shuffle().seed(5).workers(workers));
  };
  auto one = prepare(1);
  const std::vector<at::Tensor> first = Tensors(one);
  const std::vector<at::Tensor> second = Tensors(one);
  EXPECT_FALSE(AreEqual(first, second));
  EXPECT_FALSE(first[0].sub(first[0].floor()).equal(first[2].sub(first[2].floor())));
  for (const int workers : {2, 3}) {
    auto loader = prepare(workers);
    EXPECT_TRUE(AreEqual(first, Tensors(loader)));
    EXPECT_TRUE(AreEqual(second, Tensors(loader)));
  }
  // Training draws from the default generator, which reading has not changed.
  EXPECT_TRUE(before.equal(at::detail::getDefaultCPUGenerator().get_state()));
}

TEST(DataRandom, ResumedInsideAnEpoch_GoesOnWithTheSameAugmentations) {
  const auto prepare = [] { return Alone(batches(Augmented{}, 4).shuffle().seed(5).workers(2)); };
  auto first = prepare();
  LoaderState state;
  for (auto& batch : first) {
    if (batch.info().index == 2) state = first.state_dict();
  }
  first.set_epoch(0);
  const std::vector<at::Tensor> expected = Tensors(first, 3);
  auto second = prepare();
  second.load_state(state);
  EXPECT_TRUE(AreEqual(Tensors(second), expected));
}

TEST(DataRandom, RanksAndSamples_HaveSeedsOfTheirOwn) {
  std::vector<std::set<double>> seeds(2);
  RunRanks(2, [&](Comm& comm) {
    auto loader = PrepareLoader(batches(Augmented{}, 3).workers(1), {}, &comm);
    for (auto& [images, own] : loader) {
      for (int64_t i = 0; i < own.numel(); ++i) {
        seeds[static_cast<size_t>(comm.rank())].insert(own[i].template item<double>());
      }
    }
  });
  EXPECT_EQ(seeds[0].size(), 12U);
  seeds[0].insert(seeds[1].begin(), seeds[1].end());
  EXPECT_EQ(seeds[0].size(), 24U);
}

// Reading changes it, like LibTorch's data sets; each copy counts its reads.
struct CountingReads {
  CountingReads() = default;
  CountingReads(const CountingReads& other)
      : copies(other.copies), id(++*copies), reads(other.reads), epoch(other.epoch) {}
  CountingReads(CountingReads&&) = default;
  CountingReads& operator=(const CountingReads&) = delete;
  CountingReads& operator=(CountingReads&&) = delete;
  ~CountingReads() = default;

  size_t size() const { return 16; }
  // Returns which copy was read, how often it had been read, and in which epoch.
  std::tuple<int64_t, int64_t, int64_t> get(size_t) { return {id, reads++, epoch}; }
  void set_epoch(int64_t e) { epoch = e; }

  std::shared_ptr<std::atomic<int64_t>> copies = std::make_shared<std::atomic<int64_t>>(0);
  int64_t id = 0;
  int64_t reads = 0;
  int64_t epoch = -1;
};

TEST(DataRandom, DataSetThatReadingChanges_GoesOnOverPasses) {
  auto loader = Alone(batches(CountingReads{}, 4).workers(2));
  std::set<int64_t> readers;
  std::set<std::pair<int64_t, int64_t>> drawn;
  for (int64_t pass = 0; pass < 3; ++pass) {
    for (auto& [copies, reads, epochs] : loader) {
      for (const int64_t epoch : Values(epochs)) EXPECT_EQ(epoch, pass);
      const std::vector<int64_t> ids = Values(copies);
      const std::vector<int64_t> counts = Values(reads);
      for (size_t i = 0; i < ids.size(); ++i) {
        readers.insert(ids[i]);
        drawn.emplace(ids[i], counts[i]);
      }
    }
  }
  // However the threads shared the work, no copy returned the same twice, and no pass made new
  // copies.
  EXPECT_EQ(drawn.size(), 48U);
  EXPECT_LE(readers.size(), 2U);
  // Nested loops of one loader share no copies.
  auto outer = loader.begin();
  auto inner = loader.begin();
  EXPECT_EQ(outer->info().size + inner->info().size, 8);
}

// Every rank reads the whole stream, which draws the samples that it returns.
struct DrawingStream {
  int64_t left = 0;
  void reset() { left = 16; }
  std::optional<int64_t> next() {
    if (left-- == 0) return std::nullopt;
    return at::randint(1000000, {1}).item<int64_t>();
  }
};

TEST(DataRandom, StreamReadByEveryRank_IsTheSameStreamOnEveryRank) {
  std::vector<std::set<int64_t>> seen(2);
  std::vector<int64_t> alone;
  for (auto& batch : Alone(batches(DrawingStream{}, 4).seed(3).workers(1))) {
    for (const int64_t value : Values(*batch)) alone.push_back(value);
  }
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = false;
    auto loader =
        PrepareLoader(batches(DrawingStream{}, 4).seed(3).workers(comm.rank()), options, &comm);
    for (auto& batch : loader) {
      for (const int64_t value : Values(*batch))
        seen[static_cast<size_t>(comm.rank())].insert(value);
    }
  });
  seen[0].insert(seen[1].begin(), seen[1].end());
  EXPECT_EQ(seen[0], std::set<int64_t>(alone.begin(), alone.end()));
}

// Draws as many numbers as the samples ask for, and returns the next one as well.
std::vector<double> DrawWith(const std::vector<int64_t>& samples) {
  at::rand({samples.front() % 7 + 1});
  std::vector<double> out = {static_cast<double>(data_seed()), at::rand({1}).item<double>()};
  for (const int64_t sample : samples) out.push_back(static_cast<double>(sample));
  return out;
}

TEST(DataRandom, CollateThatDraws_LeavesTheStreamOfEveryRankAlike) {
  std::vector<std::vector<std::vector<double>>> given(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = false;
    auto recipe = batches(DrawingStream{}, 2).seed(3).workers(comm.rank()).collate(DrawWith);
    for (auto& batch : PrepareLoader(recipe, options, &comm))
      given[static_cast<size_t>(comm.rank())].push_back(*batch);
  });
  auto recipe = batches(DrawingStream{}, 2).seed(3).workers(1).collate(DrawWith);
  std::vector<double> whole;
  for (auto& batch : Alone(recipe)) whole.insert(whole.end(), batch->begin() + 2, batch->end());
  std::vector<double> both;
  ASSERT_EQ(given[0].size(), given[1].size());
  for (size_t i = 0; i < given[0].size(); ++i) {
    for (const auto& rank : given) both.insert(both.end(), rank[i].begin() + 2, rank[i].end());
    EXPECT_NE(given[0][i][0], given[1][i][0]) << "data_seed() of the batches of two ranks";
    EXPECT_NE(given[0][i][1], given[1][i][1]);
  }
  EXPECT_EQ(both, whole);
}

// Streams that every rank reads, and streams that are sharded at their source.
template <class Stream>
void ExpectCollateGoesOnAfterARestart() {
  RunRanks(2, [](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = false;
    const auto prepare = [&] {
      return PrepareLoader(batches(Stream{}, 2).seed(3).workers(1).collate(DrawWith), options,
                           &comm);
    };
    std::vector<std::vector<double>> expected, resumed;
    LoaderState state;
    auto first = prepare();
    for (auto& batch : first) {
      if (batch.info().index == 1) state = first.state_dict();
      if (batch.info().index > 1) expected.push_back(*batch);
    }
    auto second = prepare();
    second.load_state(state);
    for (auto& batch : second) resumed.push_back(*batch);
    EXPECT_FALSE(expected.empty());
    EXPECT_EQ(resumed, expected);
  });
}

struct ShardedDrawingStream : DrawingStream {
  void shard(int, int) {}
};

TEST(DataRandom, CollateOfAStreamResumedInsideAnEpoch_DrawsTheSameNumbers) {
  ExpectCollateGoesOnAfterARestart<DrawingStream>();
  ExpectCollateGoesOnAfterARestart<ShardedDrawingStream>();
}

// The training saves its generator: a batch that is read ahead draws nothing from it.
TEST(DataRandom, StreamWithoutWorkers_ResumesWithTheSameNumbers) {
  const auto prepare = [] { return Alone(batches(DrawingStream{}, 4).seed(3)); };
  std::vector<std::vector<int64_t>> whole, resumed;
  std::vector<double> draws, resumed_draws;
  LoaderState place;
  at::Tensor random;
  const auto draw = [] { return at::rand({1}).item<double>(); };
  auto loader = prepare();
  for (auto& batch : loader) {
    whole.push_back(Values(*batch));
    draws.push_back(draw());
    if (whole.size() != 2) continue;
    place = loader.state_dict();
    random = at::detail::getDefaultCPUGenerator().get_state();
  }
  ASSERT_EQ(whole.size(), 4u);
  auto next = prepare();
  next.load_state(place);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(random);
  for (auto& batch : next) {
    resumed.push_back(Values(*batch));
    resumed_draws.push_back(draw());
  }
  EXPECT_EQ(resumed, std::vector<std::vector<int64_t>>(whole.begin() + 2, whole.end()));
  EXPECT_EQ(resumed_draws, std::vector<double>(draws.begin() + 2, draws.end()));
}

// --- Streams that are sharded at their source ---

// Files of different lengths; rank r reads files r, r + n, ...
struct Files {
  std::vector<int64_t> lengths;
  bool knows_size = false;
  int64_t fails_at = -1;
  int rank = 0;
  int world_size = 1;
  size_t file = 0;
  int64_t at = 0;
  std::shared_ptr<std::atomic<int>> reads = std::make_shared<std::atomic<int>>(0);

  void shard(int new_rank, int new_world_size) {
    // A stream that was divided must not be divided again.
    EXPECT_EQ(world_size, 1);
    rank = new_rank;
    world_size = new_world_size;
  }
  void reset() {
    file = static_cast<size_t>(rank);
    at = 0;
  }
  std::optional<size_t> size() const {
    if (!knows_size) return std::nullopt;
    size_t sum = 0;
    for (size_t f = static_cast<size_t>(rank); f < lengths.size();
         f += static_cast<size_t>(world_size)) {
      sum += static_cast<size_t>(lengths[f]);
    }
    return sum;
  }
  std::optional<int64_t> next() {
    while (file < lengths.size() && at == lengths[file]) {
      file += static_cast<size_t>(world_size);
      at = 0;
    }
    if (file >= lengths.size()) return std::nullopt;
    const int64_t id = static_cast<int64_t>(100 * file) + at++;
    if (id == fails_at) throw std::runtime_error("no such block");
    ++*reads;
    return id;
  }
};

struct Seen {
  std::vector<std::vector<int64_t>> batches;
  std::vector<int64_t> real;
  std::vector<BatchInfo> infos;
};

// Returns the batches of each of two ranks.
template <class Recipe>
std::vector<Seen> OnTwoRanks(const std::function<Recipe(int)>& recipe,
                             const LoaderState* state = nullptr, int64_t stop_after = INT64_MAX,
                             LoaderState* end = nullptr) {
  std::vector<Seen> seen(2);
  RunRanks(2, [&](Comm& comm) {
    Seen& mine = seen[static_cast<size_t>(comm.rank())];
    auto loader = PrepareLoader(recipe(comm.rank()), {}, &comm);
    if (state != nullptr) loader.load_state(*state);
    for (auto& batch : loader) {
      const std::vector<int64_t> values = Values(*batch);
      EXPECT_EQ(static_cast<int64_t>(values.size()), batch.info().size);
      mine.batches.push_back(values);
      mine.real.insert(mine.real.end(), values.begin(), values.begin() + batch.info().real_samples);
      mine.infos.push_back(batch.info());
      if (static_cast<int64_t>(mine.batches.size()) == stop_after) break;
    }
    if (comm.rank() == 0 && end != nullptr) *end = loader.state_dict();
  });
  return seen;
}
using FilesRecipe = BatchRecipe<Files>;

TEST(ShardedStream, PartsOfDifferentLength_EndTogetherAndLoseNothing) {
  for (const int workers : {0, 2}) {
    Files files{{5, 2, 6}};
    const std::vector<Seen> seen =
        OnTwoRanks<FilesRecipe>([&](int) { return batches(files, 4).workers(workers); });
    EXPECT_THAT(seen[0].real, ElementsAre(0, 1, 2, 3, 4, 200, 201, 202, 203, 204, 205));
    EXPECT_THAT(seen[1].real, ElementsAre(100, 101));
    EXPECT_EQ(seen[1].batches,
              (std::vector<std::vector<int64_t>>{
                  {100, 101, 100, 101}, {100, 101, 100, 101}, {100, 101, 100, 101}}));
    ASSERT_EQ(seen[0].infos.size(), 3U);
    for (const Seen& rank : seen) {
      EXPECT_FALSE(rank.infos[1].is_last);
      EXPECT_TRUE(rank.infos[2].is_last);
      EXPECT_EQ(rank.infos[2].position, 13);
      EXPECT_THAT(rank.infos[0].rank_real_samples, ElementsAre(4, 2));
      EXPECT_THAT(rank.infos[2].rank_real_samples, ElementsAre(3, 0));
      EXPECT_EQ(rank.infos[2].global_real_samples, 3);
    }
    // Each rank reads only its own part, and nothing is read twice.
    EXPECT_EQ(*files.reads, 13);
  }
}

TEST(ShardedStream, DropLast_EndsWhereSomeRankCannotFillABatch) {
  const std::vector<Seen> seen = OnTwoRanks<FilesRecipe>([](int) {
    return batches(Files{{9, 5}}, 2).drop_last();
  });
  EXPECT_THAT(seen[0].real, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(seen[1].real, ElementsAre(100, 101, 102, 103));
  EXPECT_TRUE(seen[0].infos.back().is_last && seen[1].infos.back().is_last);
}

TEST(ShardedStream, StoppedInsideAnEpoch_GoesOnInEachPart) {
  for (const bool uneven : {false, true}) {
    const Files files{uneven ? std::vector<int64_t>{9, 3} : std::vector<int64_t>{8, 9}};
    const auto recipe = [&](int) { return batches(files, 2); };
    LoaderState state;
    std::vector<Seen> first = OnTwoRanks<FilesRecipe>(recipe, nullptr, 3, &state);
    EXPECT_EQ(state, *LoaderState::FromString(state.ToString()));
    const std::vector<Seen> whole = OnTwoRanks<FilesRecipe>(recipe);
    const std::vector<Seen> rest = OnTwoRanks<FilesRecipe>(recipe, &state);
    for (size_t rank = 0; rank < 2; ++rank) {
      first[rank].batches.insert(first[rank].batches.end(), rest[rank].batches.begin(),
                                 rest[rank].batches.end());
      EXPECT_EQ(first[rank].batches, whole[rank].batches);
      EXPECT_EQ(rest[rank].infos.back().position, whole[rank].infos.back().position);
      EXPECT_EQ(rest[rank].infos.back().index, whole[rank].infos.back().index);
    }
    EXPECT_THAT(ErrorOf([&] { Alone(batches(files, 2)).load_state(state); }),
                HasSubstr("in the order of kind \"sharded stream\""));
    state.shards = 3;
    EXPECT_THAT(ErrorOf([&] { OnTwoRanks<FilesRecipe>(recipe, &state); }),
                HasSubstr("sharded into 3 parts, now there are 2"));
  }
}

TEST(ShardedStream, EmptyPart_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    auto loader = PrepareLoader(batches(Files{{3}}, 2), {}, &comm);
    errors[static_cast<size_t>(comm.rank())] = ErrorOf([&] { All(loader); });
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("that shard() gave rank 1 is empty"));
  }
}

// The facts of a round that ranks exchange are not read from their devices, which are busy.
TEST(ShardedStream, RoundsOnADevice_AreAgreedOnByTheHosts_AsThoseThatRankZeroReads) {
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.device = at::kMeta;
    int64_t rounds = 0;
    auto sharded = PrepareLoader(batches(Files{{4, 4}}, 2), options, &comm);
    for (auto& batch : sharded) rounds += (*batch).is_meta() ? 1 : 0;
    EXPECT_EQ(rounds, 2);
    options.dispatch_batches = true;
    auto dispatched = PrepareLoader(batches(IdStream{8}, 2), options, &comm);
    for (auto& batch : dispatched) rounds += (*batch).is_meta() ? 1 : 0;
    EXPECT_EQ(rounds, 4);
  });
}

TEST(ShardedStream, ErrorOnOneRank_ReachesTheOthersInItsTurn) {
  std::vector<std::string> errors(2);
  std::vector<int> given(2, 0);
  RunRanks(2, [&](Comm& comm) {
    const size_t rank = static_cast<size_t>(comm.rank());
    Files files{{6, 6}};
    files.fails_at = 104;
    auto loader = PrepareLoader(batches(files, 2), {}, &comm);
    errors[rank] = ErrorOf([&] {
      for (auto& batch : loader) given[rank] += static_cast<int>(batch.info().size);
    });
  });
  EXPECT_THAT(given, ElementsAre(4, 4));
  EXPECT_THAT(errors[0], HasSubstr("rank 1 cannot read its part"));
  EXPECT_THAT(errors[1], HasSubstr("no such block"));
}

TEST(ShardedStream, PartThatOneRankCannotOpen_IsAnErrorOnEveryRank) {
  struct Parts {
    auto begin() { return numbers.begin(); }
    auto end() { return numbers.end(); }
    std::shared_ptr<std::set<int64_t>> shard(int rank, int) const {
      if (rank == 1) throw std::runtime_error("no such folder");
      return std::make_shared<std::set<int64_t>>(numbers);
    }
    std::set<int64_t> numbers;
  };
  std::vector<std::string> errors(3);
  RunRanks(3, [&](Comm& comm) {
    errors[static_cast<size_t>(comm.rank())] = ErrorOf([&] {
      PrepareLoader(batches(Parts{{1, 2}}, 2), {}, &comm);
    });
    // The ranks are still in step.
    comm.Barrier();
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 cannot prepare a loader: no such folder"));
  EXPECT_EQ(errors[1], "no such folder");
  EXPECT_THAT(errors[2], HasSubstr("rank 1 cannot prepare a loader"));
}

TEST(ShardedStream, RankWithoutAThreadToReadAhead_IsAnErrorOnEveryRank) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    auto loader = PrepareLoader(batches(Files{{6, 6}}, 2).workers(1), {}, &comm);
    {
      std::optional<ThreadsLeft> none;
      if (comm.rank() == 1) none.emplace(0);
      errors[static_cast<size_t>(comm.rank())] = ErrorOf([&] { All(loader); });
    }
    EXPECT_EQ(All(loader).size(), 3U);
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 cannot read its part"));
  EXPECT_THAT(errors[1], HasSubstr("Resource temporarily unavailable"));
}

TEST(ShardedStream, PartsThatKnowTheirSize_GiveTheLoadersSize) {
  RunRanks(2, [](Comm& comm) {
    Files files{{5, 2, 6}};
    files.knows_size = true;
    auto loader = PrepareLoader(batches(files, 4), {}, &comm);
    EXPECT_EQ(loader.size(), 3);
    EXPECT_EQ(loader.total_dataset_length(), 13);
    EXPECT_EQ(All(loader).size(), 3U);
    EXPECT_FALSE(PrepareLoader(batches(Files{{1, 1}}, 4), {}, &comm).has_size());
  });
}

TEST(ShardedStream, ShardThatReturnsAStream_IsAskedOnce) {
  struct Numbers {
    std::vector<int64_t> all;
    auto begin() { return all.begin(); }
    auto end() { return all.end(); }
    std::shared_ptr<std::set<int64_t>> shard(int rank, int world_size) const {
      auto part = std::make_shared<std::set<int64_t>>();
      for (size_t i = static_cast<size_t>(rank); i < all.size();
           i += static_cast<size_t>(world_size)) {
        part->insert(all[i]);
      }
      return part;
    }
  };
  const std::vector<Seen> seen = OnTwoRanks<BatchRecipe<Numbers>>([](int) {
    return batches(Numbers{{1, 2, 3, 4, 5, 6}}, 2);
  });
  EXPECT_THAT(seen[0].real, ElementsAre(1, 3, 5));
  EXPECT_THAT(seen[1].real, ElementsAre(2, 4, 6));
  EXPECT_EQ(All(Alone(batches(Numbers{{1, 2, 3}}, 2))).size(), 2U);
}

// --- Mistakes ---

TEST(PreparedLoader, MutableCollate_GoesOnOverPasses) {
  const auto numbering = [n = int64_t{0}](const std::vector<int64_t>&) mutable {
    return at::full({1}, n++);
  };
  auto loader = Alone(batches(Ids{4}, 2).collate(numbering));
  EXPECT_EQ(All(loader), (std::vector<std::vector<int64_t>>{{0}, {1}}));
  EXPECT_EQ(All(loader), (std::vector<std::vector<int64_t>>{{2}, {3}}));
  auto stream = Alone(batches(IdStream{4}, 2).collate(numbering).workers(1));
  EXPECT_EQ(All(stream), (std::vector<std::vector<int64_t>>{{0}, {1}}));
  EXPECT_EQ(All(stream), (std::vector<std::vector<int64_t>>{{2}, {3}}));
}

TEST(PreparedLoader, DataSetThatGrows_IsNamed) {
  auto rows = std::make_shared<std::vector<int64_t>>(4, 1);
  auto loader = Alone(batches(rows, 2));
  All(loader);
  rows->push_back(1);
  EXPECT_THAT(ErrorOf([&] { All(loader); }),
              HasSubstr("had 4 samples when the loader was prepared"));
  EXPECT_EQ(loader.epoch(), 1);
}

TEST(PreparedLoader, StreamOfChunksThatCanSkip_ResumesAtTheNextSample) {
  struct Chunks {
    int64_t at = 0;
    void reset() { at = 0; }
    std::vector<int64_t> get_batch(size_t count) {
      std::vector<int64_t> chunk;
      while (at < 200 && chunk.size() < count) chunk.push_back(at++);
      return chunk;
    }
    int64_t skip(int64_t count) {
      const int64_t skipped = std::min(count, 200 - at);
      at += skipped;
      return skipped;
    }
  };
  std::vector<std::vector<int64_t>> ids(2);
  RunRanks(2, [&](Comm& comm) {
    LoaderOptions options;
    options.dispatch_batches = false;
    auto loader = PrepareLoader(batches(Chunks{}, 4), options, &comm);
    for (auto& batch : SkipFirstBatches(loader, 3)) {
      for (const int64_t id : Values(*batch)) ids[static_cast<size_t>(comm.rank())].push_back(id);
    }
  });
  ASSERT_EQ(ids[0].size(), 88U);
  EXPECT_EQ(ids[0].front(), 24);
  EXPECT_EQ(ids[1].front(), 28);
  EXPECT_EQ(ids[1].back(), 199);
}

TEST(PreparedLoader, MapOfSamples_IsReadAndNotFilled) {
  const std::map<int64_t, int64_t> samples = {{10, 1}, {20, 2}};
  std::vector<int64_t> keys;
  for (auto& [key, value] : Alone(batches(samples, 2))) keys = Values(key);
  EXPECT_THAT(keys, ElementsAre(10, 20));
}

TEST(PreparedLoader, NumberTooLargeForInt64_IsAnError) {
  EXPECT_THAT(ErrorOf([] {
                Alone(batches(std::vector<uint64_t>{1, UINT64_MAX}, 2)).begin();
              }),
              HasSubstr("18446744073709551615 does not fit into int64"));
  EXPECT_EQ(All(Alone(batches(std::vector<uint64_t>{1, INT64_MAX}, 2)))[0][1], INT64_MAX);
}

TEST(PreparedLoader, UndefinedTensors_StayUndefined) {
  LoaderOptions options;
  options.device = at::kCPU;
  const std::vector<Boxes> rows(2, {at::ones({2}), at::Tensor(), at::ones({4})});
  for (auto& batch : PrepareLoader(batches(rows, 2), options, nullptr)) {
    EXPECT_FALSE(batch->target.defined());
    EXPECT_EQ(batch->boxes.size(0), 2);
  }
  std::vector<Boxes> mixed = rows;
  mixed[1].target = at::ones({});
  EXPECT_THAT(ErrorOf([&] { Alone(batches(mixed, 2)).begin(); }),
              HasSubstr("undefined in some examples"));
}

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

TEST(PrepareLoader, SamplerOnRankZeroAlone_IsNamed) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    auto recipe = batches(Ids{8}, 2);
    if (comm.rank() == 0) recipe.sampler([](int64_t) { return std::vector<int64_t>{1, 0}; });
    errors[static_cast<size_t>(comm.rank())] = ErrorOf([&] { PrepareLoader(recipe, {}, &comm); });
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("rank 1 prepares another loader than rank 0"));
    EXPECT_THAT(error, HasSubstr("order=sequential (rank 0: order=sampler)"));
  }
}

// --- Property ---

// Any configuration, stopped anywhere and resumed on any number of ranks: every sample once, except
// padding.
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
      // The epoch is over: nothing of it is left for another part of the run.
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
