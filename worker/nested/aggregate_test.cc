#include "worker/nested/aggregate.h"

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "gtest/gtest.h"

namespace muster {
namespace {

using aggregate_internal::CountMembers;

struct Three {
  std::vector<int> ids, mask;
  std::string name;
};
static_assert(CountMembers<Three>() == 3);

// Members that can be made from many types, and members that are structs themselves.
struct Greedy {
  std::optional<std::string> a;
  std::vector<std::string> b;
  std::map<std::string, int> c;
  std::variant<int, std::string> d;
  std::function<void()> e;
  std::shared_ptr<int> f;
};
static_assert(CountMembers<Greedy>() == 6);
struct Outer {
  Three three;
  std::array<float, 4> four;
  const int number;
  std::pair<int, Three> pair;
  struct {
    float array[3];
  } inner;
};
static_assert(CountMembers<Outer>() == 5);
struct Defaults {
  int number = 3;
  std::string text = "x";
};
static_assert(CountMembers<Defaults>() == 2);
struct Recursive {
  std::vector<Recursive> children;
  int value;
};
static_assert(CountMembers<Recursive>() == 2);

class NoDefault {
 public:
  explicit NoDefault(int value) : value_(value) {}
  int value() const { return value_; }

 private:
  int value_;
};
struct WithNoDefault {
  NoDefault first;
  int second;
};
static_assert(CountMembers<WithNoDefault>() == 2);

struct Sixteen {
  int a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p;
};
static_assert(CountMembers<Sixteen>() == 16);
struct Seventeen {
  int a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q;
};
static_assert(!IsDecomposable<Seventeen>);

// C arrays, whatever comes before and after them.
struct ArrayFirst {
  float array[3];
  int number;
};
struct ArrayLast {
  int number;
  std::string array[2];
};
struct ArrayOfOne {
  float array[1];
};
struct ArrayOfArrays {
  int array[2][2];
};
struct ArrayAmongNoDefaults {
  NoDefault first;
  std::string array[2];
  NoDefault last;
};
static_assert(!IsDecomposable<ArrayFirst> && !IsDecomposable<ArrayLast>);
static_assert(!IsDecomposable<ArrayOfOne> && !IsDecomposable<ArrayOfArrays>);
static_assert(!IsDecomposable<ArrayAmongNoDefaults>);

struct Empty {};
struct Derived : Three {
  int number;
};
struct DerivedFromEmpty : Empty {
  int number;
};
struct DerivedAlone : Defaults {};
static_assert(!IsDecomposable<Empty> && !IsDecomposable<Derived>);
static_assert(!IsDecomposable<DerivedFromEmpty> && !IsDecomposable<DerivedAlone>);

struct Reference {
  const int& number;
  int other;
};
struct MoveOnly {
  std::unique_ptr<int> pointer;
};
union Either {
  int number;
  float other;
};
static_assert(!IsDecomposable<Reference> && !IsDecomposable<MoveOnly> && !IsDecomposable<Either>);
static_assert(!IsDecomposable<NoDefault> && !IsDecomposable<std::string> && !IsDecomposable<int>);

TEST(MembersOf, PlainStruct_GivesItsMembersInOrder) {
  const Three three{{1}, {2, 3}, "name"};
  const auto members = MembersOf(three);
  EXPECT_EQ(std::tuple_size_v<decltype(members)>, 3U);
  EXPECT_EQ(&std::get<0>(members), &three.ids);
  EXPECT_EQ(&std::get<1>(members), &three.mask);
  EXPECT_EQ(&std::get<2>(members), &three.name);
  EXPECT_EQ(std::get<0>(MembersOf(WithNoDefault{NoDefault(4), 5})).value(), 4);
}

}  // namespace
}  // namespace muster
