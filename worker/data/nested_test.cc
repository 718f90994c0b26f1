#include "worker/data/nested.h"

#include <array>
#include <map>
#include <string>
#include <unordered_map>

#include "ATen/ops/arange.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/batch.h"

namespace user {
struct Sample {
  at::Tensor ids, mask;
  std::string note;
};
inline auto MusterFields(const Sample& s) { return std::tie(s.ids, s.mask, s.note); }
// Shaped as LibTorch's Example.
struct Example {
  Example(at::Tensor d, at::Tensor t) : data(std::move(d)), target(std::move(t)) {}
  at::Tensor data, target;
};
}  // namespace user

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

at::Tensor Range(int64_t begin, int64_t end) { return at::arange(begin, end, at::kLong); }
std::vector<int64_t> Values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

using Deep = std::tuple<std::map<std::string, at::Tensor>, std::vector<std::pair<at::Tensor, int>>,
                        std::array<at::Tensor, 2>, std::optional<at::Tensor>, std::string>;

Deep MakeDeep() {
  return {{{"b", Range(2, 4)}, {"a", Range(0, 2)}},
          {{Range(4, 6), 7}},
          {Range(6, 8), Range(8, 10)},
          std::nullopt,
          "text"};
}

TEST(MapTensors, DeepStructure_MapsEveryTensorAndKeepsTheRest) {
  const Deep before = MakeDeep();
  const Deep after = MapTensors(before, [](const at::Tensor& t) { return t.add(100); });
  EXPECT_THAT(Values(std::get<0>(after).at("a")), ElementsAre(100, 101));
  EXPECT_THAT(Values(std::get<1>(after)[0].first), ElementsAre(104, 105));
  EXPECT_EQ(std::get<1>(after)[0].second, 7);
  EXPECT_THAT(Values(std::get<2>(after)[1]), ElementsAre(108, 109));
  EXPECT_FALSE(std::get<3>(after).has_value());
  EXPECT_EQ(std::get<4>(after), "text");
  EXPECT_THAT(Values(std::get<0>(before).at("a")), ElementsAre(0, 1));
}

TEST(ForEachTensor, UnorderedMap_VisitsInKeyOrder) {
  std::unordered_map<std::string, at::Tensor> map;
  for (int i = 9; i >= 0; --i) map["key" + std::to_string(i)] = Range(i, i + 1);
  std::vector<int64_t> seen;
  ForEachTensor(map, [&](const at::Tensor& t) { seen.push_back(t.item<int64_t>()); });
  EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(FindBatchSize, FirstTensorWithADimension) {
  EXPECT_EQ(FindBatchSize(MakeDeep()), 2);
  EXPECT_EQ(FindBatchSize(std::make_pair(at::zeros({}), at::zeros({5, 2}))), 5);
  EXPECT_EQ(FindBatchSize(std::string("x")), std::nullopt);
}

TEST(SliceTensors, TensorsAndPlainLists_AreCutAlike) {
  const std::pair<at::Tensor, std::vector<std::string>> value{Range(0, 4), {"a", "b", "c", "d"}};
  const auto part = SliceTensors(value, 1, 3);
  EXPECT_THAT(Values(part.first), ElementsAre(1, 2));
  EXPECT_THAT(part.second, ElementsAre("b", "c"));
  EXPECT_EQ(SliceTensors(value, 3, 9).second.size(), 1U);
  EXPECT_ANY_THROW(SliceTensors(at::zeros({}), 0, 1));
}

TEST(Concatenate, DeepStructures_JoinTensorByTensor) {
  const auto joined = Concatenate(std::vector<Deep>{MakeDeep(), MakeDeep()});
  EXPECT_THAT(Values(std::get<0>(joined).at("b")), ElementsAre(2, 3, 2, 3));
  EXPECT_THAT(Values(std::get<1>(joined)[0].first), ElementsAre(4, 5, 4, 5));
  EXPECT_EQ(std::get<1>(joined).size(), 1U);
}

TEST(Concatenate, DifferentStructures_AreAnError) {
  using Map = std::map<std::string, at::Tensor>;
  EXPECT_ANY_THROW(Concatenate(std::vector<Map>{{{"a", Range(0, 1)}}, {{"b", Range(0, 1)}}}));
  EXPECT_ANY_THROW(Concatenate(std::vector<at::Tensor>{}));
  EXPECT_ANY_THROW(
      Concatenate(std::vector<std::pair<at::Tensor, int>>{{Range(0, 1), 1}, {Range(0, 1), 2}}));
}

TEST(Nested, UserStructs_OptInByFieldsOrByShape) {
  const user::Sample sample{Range(0, 4), at::ones({4}), "n"};
  const user::Sample part = SliceTensors(sample, 2, 4);
  EXPECT_THAT(Values(part.ids), ElementsAre(2, 3));
  EXPECT_EQ(part.note, "n");
  const user::Example example(Range(0, 2), Range(5, 7));
  EXPECT_THAT(Values(Concatenate(std::vector<user::Example>{example, example}).target),
              ElementsAre(5, 6, 5, 6));
  EXPECT_EQ(SendToDevice(example, at::kCPU).data.size(0), 2);
}

TEST(Batch, StructuredBinding_GivesTheFieldsByReference) {
  BatchInfo info;
  info.real_samples = 3;
  Batch<std::tuple<at::Tensor, at::Tensor>> batch({Range(0, 3), Range(3, 6)}, info);
  auto& [images, labels] = batch;
  labels = labels.add(1);
  EXPECT_THAT(Values(std::get<1>(batch.value())), ElementsAre(4, 5, 6));
  EXPECT_EQ(images.size(0), 3);
  EXPECT_EQ(batch.info().real_samples, 3);

  Batch<user::Example> example(user::Example(Range(0, 1), Range(1, 2)), {});
  auto& [data, target] = example;
  target = Range(8, 9);
  EXPECT_EQ(data.item<int64_t>(), 0);
  EXPECT_EQ(example->target.item<int64_t>(), 8);

  Batch<user::Sample> sample({Range(0, 1), Range(1, 2), "note"}, {});
  auto& [ids, mask, note] = sample;
  EXPECT_EQ(note, "note");
  EXPECT_EQ(ids.size(0) + mask.size(0), 2);

  Batch<at::Tensor> single(Range(0, 2), {});
  auto& [tensor] = single;
  EXPECT_EQ(tensor.size(0), 2);
  Batch<std::map<std::string, at::Tensor>> map({{"x", Range(0, 2)}}, {});
  EXPECT_EQ(map["x"].size(0), 2);
}

}  // namespace
}  // namespace muster
