#include "worker/data/gather_for_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

// The last batch of 9 samples on 2 ranks of 4: rank 0 has 1 real sample, rank 1 none, and both are
// padded.
BatchInfo LastOfNine(int rank) {
  BatchInfo info;
  info.size = 4;
  info.rank_sizes = {4, 4};
  info.rank_real_samples = {1, 0};
  info.real_samples = info.rank_real_samples[rank];
  return info;
}

TEST(GatherForMetrics, ShortLastBatch_KeepsEachRanksRealSamples) {
  RunRanks(3, [](Comm& comm) {
    BatchInfo info;
    info.size = 4;
    info.rank_sizes = {4, 4, 4};
    info.rank_real_samples = {4, 2, 0};
    info.real_samples = info.rank_real_samples[comm.rank()];
    const at::Tensor mine = at::arange(4) + 10 * comm.rank();
    const at::Tensor all = GatherForMetrics(comm, mine, info);
    EXPECT_TRUE(at::equal(all, at::tensor({0, 1, 2, 3, 10, 11}, at::kLong))) << all;
  });
}

TEST(GatherForMetrics, D06_ValuePerRankOnTheLastBatch_IsNotCutByPosition) {
  RunRanks(2, [](Comm& comm) {
    const at::Tensor loss = at::full({}, 1.0);
    EXPECT_EQ(GatherForMetrics(comm, loss, LastOfNine(comm.rank())).numel(), 2);
    const at::Tensor pair = at::full({1}, 1.0);
    EXPECT_EQ(GatherForMetrics(comm, pair, LastOfNine(comm.rank())).numel(), 2);
  });
}

TEST(GatherForMetrics, D06_ListOfObjectsPerBatch_KeepsAllRanks) {
  RunRanks(2, [](Comm& comm) {
    const std::vector<std::string> one = {"rank " + std::to_string(comm.rank())};
    EXPECT_EQ(GatherObjectForMetrics(comm, one, LastOfNine(comm.rank())).size(), 2u);
    const std::vector<std::string> per_sample(4, "x");
    EXPECT_EQ(GatherObjectForMetrics(comm, per_sample, LastOfNine(comm.rank())).size(), 1u);
  });
}

TEST(GatherForMetrics, FullBatch_IsGatheredWhole) {
  RunRanks(2, [](Comm& comm) {
    BatchInfo info;
    info.size = info.real_samples = 3;
    EXPECT_EQ(GatherForMetrics(comm, at::ones({3, 2}), info).size(0), 6);
  });
}

std::string ErrorOf(const std::function<void()>& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(GatherForMetrics, RanksWithDifferentNumbersOfTensors_AllThrowAndCanGoOn) {
  RunRanks(2, [](Comm& comm) {
    const BatchInfo info = LastOfNine(comm.rank());
    const at::Tensor rows = at::arange(4), loss = at::full({}, 1.0);
    const std::vector<at::Tensor> one = {rows}, two = {rows, loss};
    const std::string error =
        ErrorOf([&] { GatherForMetrics(comm, comm.rank() == 0 ? two : one, info); });
    EXPECT_NE(error.find("tensor 1 of 2"), std::string::npos) << error;
    const std::vector<at::Tensor> all = GatherForMetrics(comm, two, info);
    EXPECT_EQ(all[0].numel(), 1);
    EXPECT_EQ(all[1].numel(), 2);
  });
}

TEST(GatherForMetrics, HistogramOfTheBatchsSize_IsWholeWherePerProcessIsSaid) {
  RunRanks(2, [](Comm& comm) {
    const BatchInfo info = LastOfNine(comm.rank());
    const at::Tensor histogram = at::ones({4});
    EXPECT_EQ(GatherForMetrics(comm, histogram, info, MetricRows::kPerProcess).numel(), 8);
    EXPECT_EQ(GatherForMetrics(comm, histogram, info, MetricRows::kPerSample).numel(), 1);
    const std::vector<int> bins(4, 7);
    EXPECT_EQ(GatherObjectForMetrics(comm, bins, info, MetricRows::kPerProcess).size(), 8u);
    EXPECT_EQ(GatherObjectForMetrics(comm, bins, info, MetricRows::kPerSample).size(), 1u);
  });
}

TEST(GatherForMetrics, PerSampleWithOtherRows_IsAnErrorThatNamesBothSizes) {
  RunRanks(2, [](Comm& comm) {
    const BatchInfo info = LastOfNine(comm.rank());
    const std::string error =
        ErrorOf([&] { GatherForMetrics(comm, at::ones({3}), info, MetricRows::kPerSample); });
    EXPECT_NE(error.find("3 rows, but the batch has 4 samples"), std::string::npos) << error;
    const std::string scalar =
        ErrorOf([&] { GatherForMetrics(comm, at::ones({}), info, MetricRows::kPerSample); });
    EXPECT_NE(scalar.find("without dimensions"), std::string::npos) << scalar;
    const std::string objects = ErrorOf(
        [&] { GatherObjectForMetrics(comm, std::vector<int>(5), info, MetricRows::kPerSample); });
    EXPECT_NE(objects.find("5 rows, but the batch has 4 samples"), std::string::npos) << objects;
  });
}

// Two samples per process with a text and a number, as a plain struct.
struct Prediction {
  std::string name;
  int64_t label;
};

TEST(GatherForMetrics, PlainStructs_AreGatheredPerSample) {
  RunRanks(2, [](Comm& comm) {
    std::vector<Prediction> mine(4, {"rank " + std::to_string(comm.rank()), comm.rank()});
    const auto all = GatherObjectForMetrics(comm, mine, LastOfNine(comm.rank()));
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].name, "rank 0");
  });
}

// A last round without padding (even_batches = false): 4 samples on rank 0, 2 on rank 1.
BatchInfo UnevenRound(int rank) {
  BatchInfo info;
  info.rank_sizes = info.rank_real_samples = {4, 2};
  info.size = info.real_samples = info.rank_sizes[static_cast<size_t>(rank)];
  return info;
}

TEST(GatherForMetrics, RowsOfUnevenBatches_AreSamplesOnAllRanksOrNone) {
  RunRanks(2, [](Comm& comm) {
    const BatchInfo info = UnevenRound(comm.rank());
    EXPECT_EQ(GatherForMetrics(comm, at::ones({info.size}), info).numel(), 6);
    EXPECT_EQ(GatherForMetrics(comm, at::ones({3}), info).numel(), 6);
    EXPECT_EQ(GatherObjectForMetrics(comm, std::vector<int>(info.size), info).size(), 6u);
    const char* const same =
        "of 1 has as many rows as its batch has samples on rank 0, but not "
        "on rank 1";
    const at::Tensor bins = at::ones({4});
    const std::string error = ErrorOf([&] { GatherForMetrics(comm, bins, info); });
    EXPECT_NE(error.find(same), std::string::npos) << error;
    const std::string list =
        ErrorOf([&] { GatherObjectForMetrics(comm, std::vector<int>(4), info); });
    EXPECT_NE(list.find(same), std::string::npos) << list;
    EXPECT_EQ(GatherForMetrics(comm, bins, info, MetricRows::kPerProcess).numel(), 8);
  });
}

struct Named {
  at::Tensor logits;
  std::vector<std::string> names;
  std::map<std::string, std::vector<int64_t>> more;
};

TEST(GatherValueForMetrics, ListsBesideTensors_AreGatheredAndCutToo) {
  RunRanks(2, [](Comm& comm) {
    const int64_t r = comm.rank();
    BatchInfo info;
    info.size = 2;
    info.rank_sizes = {2, 2};
    info.rank_real_samples = {2, 1};
    info.real_samples = 2 - r;
    const std::string name = "r" + std::to_string(r);
    const Named mine{at::full({2}, r), {name + "a", name + "b"}, {{"counts", {r, 5, 6}}}};
    const Named all = GatherValueForMetrics(comm, mine, &info);
    EXPECT_EQ(all.logits.numel(), 3);
    EXPECT_THAT(all.names, testing::ElementsAre("r0a", "r0b", "r1a"));
    EXPECT_THAT(all.more.at("counts"), testing::ElementsAre(0, 5, 6, 1, 5, 6));
    const Named whole = GatherValueForMetrics(comm, mine, nullptr);
    EXPECT_EQ(whole.logits.numel(), 4);
    EXPECT_EQ(whole.names.size(), 4u);
    EXPECT_THAT(GatherValueForMetrics(comm, mine.names, &info), testing::SizeIs(3));
    EXPECT_THAT(GatherValueForMetrics(comm, r, &info), testing::ElementsAre(0, 1));
  });
}

// For example scores by class, where one rank has seen one more class. Without a comparison the
// additional list would meet the next collective of the other rank.
TEST(GatherValueForMetrics, ListsThatOneRankLacks_AreAnErrorOnAll) {
  RunRanks(2, [](Comm& comm) {
    for (const bool lacks_all : {false, true}) {
      std::map<std::string, std::vector<int64_t>> more;
      if (!lacks_all) more["a"] = {1};
      if (comm.rank() == 1) more["b"] = {2};
      const std::pair<at::Tensor, std::map<std::string, std::vector<int64_t>>> mine(at::ones({2}),
                                                                                    more);
      EXPECT_THROW(GatherValueForMetrics(comm, mine, nullptr), c10::Error) << lacks_all;
    }
  });
}

}  // namespace
}  // namespace muster
