#include "worker/collective/nested_collectives.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/core/Dict.h"
#include "ATen/core/List.h"
#include "ATen/ops/_neg_view.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/complex.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Batch {
  at::Tensor ids;
  std::map<std::string, at::Tensor> more;
};

// Users write their results like this: no list of members, no constructor.
struct Result {
  std::string file;
  std::vector<float> scores;
  at::Tensor box;
  std::optional<int> label;
};

TEST(Gather, NestedStructure_EveryTensorGathered) {
  RunRanks(2, [](Comm& comm) {
    const int r = comm.rank();
    const Batch mine{at::full({2}, r), {{"a", at::full({}, r)}, {"b", at::full({1, 2}, r)}}};
    const Batch all = Gather(comm, mine);
    EXPECT_TRUE(at::equal(all.ids, at::tensor({0, 0, 1, 1}, at::kLong)));
    EXPECT_TRUE(at::equal(all.more.at("a"), at::tensor({0, 1}, at::kLong)));
    EXPECT_EQ(all.more.at("b").sizes(), (at::IntArrayRef{2, 2}));
    EXPECT_EQ(mine.ids.size(0), 2);
  });
}

TEST(Gather, UndefinedTensorInAStruct_StaysUndefined) {
  RunRanks(2, [](Comm& comm) {
    const Result all = Gather(comm, Result{"x", {}, at::Tensor(), 1});
    EXPECT_FALSE(all.box.defined());
  });
}

TEST(GatherObject, PlainStructs_Travel) {
  RunRanks(2, [](Comm& comm) {
    const int r = comm.rank();
    const std::vector<Result> mine(
        r + 1, {"file " + std::to_string(r), {0.5F, 1.0F}, at::full({4}, r), std::nullopt});
    const std::vector<Result> all = GatherObject(comm, mine);
    ASSERT_EQ(all.size(), 3U);
    EXPECT_EQ(all[2].file, "file 1");
    EXPECT_EQ(all[2].scores.size(), 2U);
    EXPECT_TRUE(at::equal(all[2].box, at::full({4}, 1)));
    EXPECT_FALSE(all[2].label.has_value());
    EXPECT_EQ(BroadcastObject(comm, mine.front(), 1).file, "file 1");
  });
}

TEST(GatherObject, TorchDictAndList_Travel) {
  RunRanks(2, [](Comm& comm) {
    c10::Dict<std::string, at::Tensor> mine;
    mine.insert("b", at::full({1}, comm.rank()));
    mine.insert("a", at::full({1}, 10 + comm.rank()));
    const auto all = GatherObject(comm, mine);
    EXPECT_EQ(all[1].at("a").item<int64_t>(), 11);
    const auto gathered = Gather(comm, mine);
    EXPECT_TRUE(at::equal(gathered.at("b"), at::tensor({0, 1}, at::kLong)));
    const c10::List<int64_t> list({1, comm.rank()});
    EXPECT_EQ(GatherObject(comm, list)[1].get(1), 1);
  });
}

TEST(GatherObject, VectorsAreJoined_OtherThingsOnePerRank) {
  for (int n : {1, 3}) {
    RunRanks(n, [&](Comm& comm) {
      const int r = comm.rank();
      const auto joined = GatherObject(comm, std::vector<int>(r + 1, r));
      EXPECT_EQ(joined.size(), static_cast<size_t>(n * (n + 1) / 2));
      EXPECT_EQ(joined.back(), n - 1);
      const std::vector<std::string> texts = GatherObject(comm, "rank " + std::to_string(r));
      ASSERT_EQ(texts.size(), static_cast<size_t>(n));
      EXPECT_EQ(texts.back(), "rank " + std::to_string(n - 1));
      const auto maps = GatherObject(comm, std::map<std::string, double>{{"loss", r * 0.5}});
      EXPECT_EQ(maps.back().at("loss"), (n - 1) * 0.5);
      EXPECT_THAT(GatherObject(comm, std::vector<std::string>()), IsEmpty());
    });
  }
}

TEST(ObjectCodec, EveryKindOfObject_ComesBack) {
  enum class Colour { kRed = 7 };
  using Object = std::tuple<bool, int64_t, double, std::string, std::vector<bool>, std::set<int>,
                            std::optional<float>, std::optional<float>, Colour,
                            std::map<std::string, std::pair<int, std::vector<std::string>>>>;
  const Object object{true,   -1,   0.5,          std::string("a\0b", 3), {true, false},
                      {3, 4}, 1.5F, std::nullopt, Colour::kRed,           {{"k", {1, {"x", ""}}}}};
  EXPECT_EQ(DecodeObject<Object>(EncodeObject(object)), object);
  const Batch batch{at::arange(6).view({2, 3}).t(),
                    {{"empty", at::empty({0, 2}, at::kBFloat16)}, {"none", at::Tensor()}}};
  const auto back = DecodeObject<Batch>(EncodeObject(batch));
  EXPECT_TRUE(at::equal(back.ids, batch.ids));
  EXPECT_EQ(back.more.at("empty").sizes(), (at::IntArrayRef{0, 2}));
  EXPECT_EQ(back.more.at("empty").scalar_type(), at::kBFloat16);
  EXPECT_FALSE(back.more.at("none").defined());
}

TEST(ObjectCodec, ViewThatConjugatesOrNegates_TravelsAsItsValues) {
  const at::Tensor numbers = at::complex(at::arange(3, at::kFloat), at::ones({3}));
  const at::Tensor negative = at::_neg_view(at::ones({3}));
  const auto back = DecodeObject<std::vector<at::Tensor>>(
      EncodeObject(std::vector<at::Tensor>{numbers.conj(), negative}));
  EXPECT_TRUE(at::equal(back[0], numbers.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(back[1], at::full({3}, -1.0)));
}

TEST(ObjectCodec, CutOrTooLong_IsAnError) {
  const std::string bytes = EncodeObject(std::vector<std::string>{"abc", "de"});
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_THROW(DecodeObject<std::vector<std::string>>(bytes.substr(0, n)), c10::Error) << n;
  }
  EXPECT_THROW(DecodeObject<std::vector<std::string>>(bytes + "x"), c10::Error);
  EXPECT_THROW(DecodeObject<at::Tensor>(std::string(3, '\1')), c10::Error);
}

TEST(BroadcastObjectList, InPlace_TakesTheRootsLength) {
  RunRanks(2, [](Comm& comm) {
    std::vector<std::string> list(comm.rank() == 1 ? 3 : 1, std::to_string(comm.rank()));
    BroadcastObjectList(comm, list, 1);
    EXPECT_THAT(list, ElementsAre("1", "1", "1"));
    EXPECT_EQ(BroadcastObject(comm, comm.rank() * 10, 1), 10);
  });
}

TEST(ReduceAndBroadcast, NestedStructures) {
  RunRanks(2, [](Comm& comm) {
    const std::vector<at::Tensor> x = {at::full({2}, comm.rank() + 1.0F), at::full({}, 4.0F)};
    EXPECT_EQ(Reduce(comm, x, "mean")[0][0].item<float>(), 1.5);
    EXPECT_EQ(Reduce(comm, x, "sum", 2.0)[1].item<float>(), 16);
    EXPECT_EQ(Reduce(comm, x, "min")[0][1].item<float>(), 1);
    EXPECT_THROW(Reduce(comm, x, "product"), c10::Error);
    Broadcast(comm, x, 1);
    EXPECT_EQ(x[0][0].item<float>(), 2);
  });
}

TEST(Reduce, Number_IsReduced) {
  RunRanks(2, [](Comm& comm) {
    EXPECT_EQ(Reduce(comm, 1.5 + comm.rank(), "mean"), 2);
    EXPECT_EQ(Reduce(comm, 0.5F, "sum", 3), 3);
    EXPECT_EQ(Reduce(comm, comm.rank() + 7, "max"), 8);
    EXPECT_EQ(Reduce(comm, size_t{3}), size_t{6});
    EXPECT_EQ(Reduce(comm, int64_t{1} << 60), int64_t{1} << 61);
    EXPECT_THROW(Reduce(comm, 3, "mean"), c10::Error);
    EXPECT_THROW(Reduce(comm, 1'500'000'000), c10::Error) << "no int holds it";
    EXPECT_THROW(Reduce(comm, uint64_t{1} << 63, "max"), c10::Error);
    EXPECT_EQ(Reduce(comm, int64_t{1'500'000'000}), 3'000'000'000);
  });
}

TEST(Broadcast, PlainValues_AreThoseOfTheRoot) {
  RunRanks(2, [](Comm& comm) {
    const int r = comm.rank();
    EXPECT_EQ(Broadcast(comm, r + 5, 1), 6);
    EXPECT_EQ(Broadcast(comm, std::string(1, static_cast<char>('a' + r))), "a");
    const Result mine{std::to_string(r), std::vector<float>(r + 1, 0.5F), at::full({2}, r),
                      r == 1 ? std::optional<int>(7) : std::nullopt};
    const Result root = Broadcast(comm, mine, 1);
    EXPECT_EQ(root.file, "1");
    EXPECT_THAT(root.scores, ElementsAre(0.5F, 0.5F));
    EXPECT_EQ(root.label, 7);
    EXPECT_TRUE(root.box.equal(at::full({2}, 1)));
    EXPECT_TRUE(root.box.is_same(mine.box)) << "in place";
    const Result none = Broadcast(comm, Result{std::to_string(r), {}, at::Tensor(), {}});
    EXPECT_EQ(none.file, "0");
    EXPECT_FALSE(none.box.defined());
  });
}

TEST(PadInputTensors, D08_NestedStructure_DividesEvenly) {
  const auto padded = PadInputTensors(
      std::make_pair(at::ones({7, 2}), std::vector<at::Tensor>{at::ones({7})}), 7, 3);
  EXPECT_EQ(padded.first.size(0), 9);
  EXPECT_EQ(padded.second[0].size(0), 9);
}

TEST(SplitBetweenProcesses, D02_InputIsNeverChanged) {
  const std::map<std::string, std::vector<int>> lists = {{"a", {1, 2, 3}}, {"b", {4, 5, 6}}};
  const auto copy = lists;
  const std::map<std::string, at::Tensor> tensors = {{"x", at::arange(3)}};
  for (int r = 0; r < 2; ++r) {
    for (const bool pad : {false, true}) {
      SplitBetweenProcesses(2, r, lists, pad);
      SplitBetweenProcesses(2, r, tensors, pad);
    }
  }
  EXPECT_EQ(lists, copy);
  EXPECT_TRUE(at::equal(tensors.at("x"), at::arange(3)));
}

TEST(SplitBetweenProcesses, StructuresListsOfTensorsAndTexts) {
  const std::tuple<at::Tensor, std::vector<std::string>, std::string> value{
      at::arange(5), {"a", "b", "c", "d", "e"}, "kept"};
  const auto part = SplitBetweenProcesses(2, 1, value, /*apply_padding=*/true);
  EXPECT_TRUE(at::equal(std::get<0>(part), at::tensor({3, 4, 4}, at::kLong)));
  EXPECT_THAT(std::get<1>(part), ElementsAre("d", "e", "e"));
  EXPECT_EQ(std::get<2>(part), "kept");
  const std::vector<at::Tensor> list = {at::zeros({4}), at::zeros({6}), at::zeros({8})};
  EXPECT_EQ(SplitBetweenProcesses(2, 1, list)[0].size(0), 8) << "a list is split by its elements";
  EXPECT_EQ(SplitBetweenProcesses(2, 1, std::string("text")), "text");
  EXPECT_THROW(SplitBetweenProcesses(2, 0, at::zeros({})), c10::Error);
}

// Has no constructor that could make another one.
struct Source {
  explicit Source(std::string name) : name(std::move(name)) {}
  std::string name;
};
auto MusterFields(const Source&) { return std::tie(); }

struct Inputs {
  at::Tensor ids;
  std::optional<at::Tensor> mask;
  std::optional<std::vector<int>> places, none;
  Source source;
};

TEST(SplitBetweenProcesses, OptionalsAreSplit_ClassesWithoutTensorsAreCopied) {
  const Inputs inputs = {
      at::arange(3), at::arange(5, 8), std::vector<int>{7, 8, 9}, {}, Source("file")};
  const Inputs part = SplitBetweenProcesses(2, 1, inputs);
  EXPECT_TRUE(at::equal(part.ids, at::full({1}, 2)));
  ASSERT_TRUE(part.mask.has_value());
  EXPECT_TRUE(at::equal(*part.mask, at::full({1}, 7)));
  EXPECT_THAT(part.places, testing::Optional(ElementsAre(9)));
  EXPECT_FALSE(part.none.has_value());
  EXPECT_EQ(part.source.name, "file");
  const std::pair<at::Tensor, std::optional<at::Tensor>> unequal = {at::zeros({3}), at::zeros({2})};
  EXPECT_THROW(SplitBetweenProcesses(2, 0, unequal), c10::Error);
}

TEST(SplitBetweenProcesses, EmptyWithPadding_EveryProcessGetsNothing) {
  for (int r = 0; r < 2; ++r) {
    EXPECT_THAT(SplitBetweenProcesses(2, r, std::vector<int>(), true), IsEmpty());
    EXPECT_EQ(SplitBetweenProcesses(2, r, at::empty({0}), true).size(0), 0);
  }
}

}  // namespace
}  // namespace muster
