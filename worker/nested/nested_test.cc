#include "worker/nested/nested.h"

#include <any>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>

#include "ATen/core/Dict.h"
#include "ATen/core/List.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/data/example.h"
#include "worker/data/batch.h"

namespace user {
struct Sample {
  at::Tensor ids, mask;
  std::string note;
};
// A class that must list its members.
class Private {
 public:
  Private(at::Tensor ids, int length) : ids_(std::move(ids)), length_(length) {}
  const at::Tensor& ids() const { return ids_; }

 private:
  friend auto MusterFields(const Private& p) { return std::tie(p.ids_, p.length_); }
  at::Tensor ids_;
  int length_;
};
// The same without such a list.
class Closed {
 public:
  explicit Closed(at::Tensor ids) : ids_(std::move(ids)) {}

 private:
  at::Tensor ids_;
};
// Declares that it has no tensors.
class Tokenizer {
 public:
  explicit Tokenizer(std::string words) : words(std::move(words)) {}
  std::string words;
};
inline auto MusterFields(const Tokenizer&) { return std::tie(); }
// Has `data` and `target`, and another member.
struct Detection {
  at::Tensor data, target, boxes;
  std::string file;
};
struct Weighted : public torch::data::Example<> {
  using torch::data::Example<>::Example;
  at::Tensor weight;
};
struct Tree {
  at::Tensor value;
  std::vector<Tree> children;
};
struct Array {
  at::Tensor tensors[2];
};
struct ArrayOfOne {
  float scale[1];
  at::Tensor tensor;
};
// A plain struct, except for one member without a default constructor.
struct Outer {
  int number;
  Closed closed;
};
struct View {
  const at::Tensor& tensor;
};
// Like LibTorch's Example.
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

TEST(MapAllTensors, TensorsOfAStructure_AreReplacedInOrder) {
  const std::tuple<at::Tensor, std::vector<at::Tensor>, int> before(at::full({1}, 1),
                                                                    {at::full({1}, 2)}, 7);
  const auto after = MapAllTensors(before, [](std::vector<at::Tensor> tensors) {
    EXPECT_EQ(tensors.size(), 2u);
    return std::vector<at::Tensor>{tensors[0].add(10), tensors[1].add(20)};
  });
  EXPECT_EQ(std::get<0>(after).item<int>(), 11);
  EXPECT_EQ(std::get<1>(after)[0].item<int>(), 22);
  EXPECT_EQ(std::get<2>(after), 7);
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

TEST(Nested, PlainStruct_IsSeenThroughWithoutAList) {
  const user::Sample sample{Range(0, 4), at::ones({4}), "n"};
  const user::Sample part = SliceTensors(sample, 2, 4);
  EXPECT_THAT(Values(part.ids), ElementsAre(2, 3));
  EXPECT_EQ(part.note, "n");
  const user::Tree tree{Range(0, 1), {{Range(1, 2), {}}, {Range(2, 3), {{Range(3, 4), {}}}}}};
  std::vector<int64_t> seen;
  ForEachTensor(tree, [&](const at::Tensor& t) { seen.push_back(t.item<int64_t>()); });
  EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3));
}

TEST(Nested, ClassWithAList_IsSeenThrough) {
  const user::Private part = SliceTensors(user::Private(Range(0, 4), 9), 1, 3);
  EXPECT_THAT(Values(part.ids()), ElementsAre(1, 2));
  const user::Tokenizer words =
      MapTensors(user::Tokenizer("a b"), [](const at::Tensor& t) { return t; });
  EXPECT_EQ(words.words, "a b");
}

TEST(Nested, ClassOfDataAndTarget_IsAnExample) {
  const user::Example example(Range(0, 2), Range(5, 7));
  EXPECT_THAT(Values(Concatenate(std::vector<user::Example>{example, example}).target),
              ElementsAre(5, 6, 5, 6));
  EXPECT_EQ(SendToDevice(example, at::kCPU).data.size(0), 2);
  const torch::data::Example<at::Tensor, int> torch_example{Range(0, 2), 3};
  EXPECT_EQ(SliceTensors(torch_example, 0, 1).target, 3);
}

TEST(Nested, MembersBesidesDataAndTarget_AreKept) {
  const user::Detection before{Range(0, 1), Range(1, 2), Range(2, 3), "a.png"};
  const user::Detection after = MapTensors(before, [](const at::Tensor& t) { return t.add(10); });
  EXPECT_EQ(after.boxes.item<int64_t>(), 12);
  EXPECT_EQ(after.file, "a.png");
}

static_assert(IsTransparent<Deep>() && IsTransparent<user::Detection>());
static_assert(IsTransparent<user::Tree>() && IsTransparent<user::Private>());
static_assert(IsTransparent<std::variant<int, std::string>>() && IsTransparent<std::set<int>>());
static_assert(IsTransparent<c10::IValue>() && IsTransparent<c10::Dict<std::string, at::Tensor>>());
static_assert(IsTransparent<std::shared_ptr<std::string>>() && IsTransparent<const char*>());
static_assert(!IsTransparent<user::Closed>() && !IsTransparent<std::vector<user::Closed>>());
static_assert(!IsTransparent<user::Weighted>() && !IsTransparent<user::Array>());
static_assert(!IsTransparent<user::ArrayOfOne>() && !IsTransparent<user::View>());
static_assert(std::is_same_v<nested_internal::OpaquePart<user::Outer>, user::Closed>);
static_assert(!IsTransparent<std::shared_ptr<at::Tensor>>() && !IsTransparent<at::Tensor*>());
static_assert(!IsTransparent<std::deque<at::Tensor>>() && !IsTransparent<at::TensorList>());
static_assert(!IsTransparent<std::variant<int, at::Tensor>>() && !IsTransparent<std::any>());
static_assert(!IsTransparent<std::map<int, std::function<void()>>>());
static_assert(!IsTransparent<std::reference_wrapper<at::Tensor>>());
static_assert(
    std::is_same_v<nested_internal::OpaquePart<std::pair<int, user::Closed>>, user::Closed>);

// --- TorchScript ---

TEST(IValue, TupleListAndDict_AreMappedInTheOrderOfKeys) {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("z", Range(2, 3));
  dict.insert("a", Range(1, 2));
  const c10::IValue value =
      c10::ivalue::Tuple::create({c10::IValue(Range(0, 1)), c10::IValue(dict),
                                  c10::IValue(c10::List<at::Tensor>({Range(3, 4), Range(4, 5)})),
                                  c10::IValue("text"), c10::IValue(int64_t{7}), c10::IValue()});
  std::vector<int64_t> seen;
  ForEachTensor(value, [&](const at::Tensor& t) { seen.push_back(t.item<int64_t>()); });
  EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3, 4));
  const c10::IValue after = MapTensors(value, [](const at::Tensor& t) { return t.add(10); });
  const std::vector<c10::IValue> parts = after.toTupleRef().elements().vec();
  EXPECT_EQ(parts[1].toGenericDict().at("z").toTensor().item<int64_t>(), 12);
  EXPECT_EQ(parts[2].toTensorVector()[1].item<int64_t>(), 14);
  EXPECT_EQ(parts[3].toStringRef(), "text");
  EXPECT_EQ(parts[4].toInt(), 7);
  EXPECT_EQ(dict.at("z").item<int64_t>(), 2);
  const c10::IValue twice = Concatenate(std::vector<c10::IValue>{value, value});
  EXPECT_THAT(Values(twice.toTupleRef().elements()[1].toGenericDict().at("a").toTensor()),
              ElementsAre(1, 1));
  EXPECT_EQ(FindBatchSize(value), 1);
}

TEST(IValue, ObjectThatCannotBeSeenThrough_IsAnError) {
  const c10::IValue future(c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get()));
  EXPECT_ANY_THROW(MapTensors(future, [](const at::Tensor& t) { return t; }));
}

TEST(TorchDict, InsertedInAnyOrder_IsVisitedInTheOrderOfKeys) {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("b", Range(2, 4));
  dict.insert("a", Range(0, 2));
  std::vector<int64_t> seen;
  ForEachTensor(dict, [&](const at::Tensor& t) { seen.push_back(t[0].item<int64_t>()); });
  EXPECT_THAT(seen, ElementsAre(0, 2));
  EXPECT_THAT(Values(SliceTensors(dict, 1, 2).at("b")), ElementsAre(3));
  EXPECT_THAT(Values(Concatenate(std::vector{dict, dict}).at("a")), ElementsAre(0, 1, 0, 1));
  const c10::List<at::Tensor> list({Range(0, 2), Range(2, 4)});
  EXPECT_THAT(Values(Concatenate(std::vector{list, list}).get(1)), ElementsAre(2, 3, 2, 3));
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
  const auto moved = std::move(batch);
  EXPECT_EQ(&batch.info(), &moved.info());

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
