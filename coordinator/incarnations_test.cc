#include "coordinator/incarnations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> Departed(const Incarnations& incarnations) {
  std::vector<std::string> all;
  incarnations.ForEachDeparted([&](const std::string& worker_id, uint64_t incarnation) {
    all.push_back(absl::StrCat(worker_id, "/", incarnation));
  });
  return all;
}

TEST(Incarnations, Fenced_OnlyThisOneOfThisWorker) {
  Incarnations incarnations;
  incarnations.Fence("w0", 7, 2);
  EXPECT_TRUE(incarnations.IsFenced("w0", 7));
  EXPECT_FALSE(incarnations.IsFenced("w0", 8));
  EXPECT_FALSE(incarnations.IsFenced("w1", 7));
}

TEST(Incarnations, ManyOfOneWorker_TheOldestAreForgotten) {
  Incarnations incarnations;
  for (uint64_t i = 0; i <= Incarnations::kOfAWorker; ++i) incarnations.Fence("w0", i, 2);
  EXPECT_FALSE(incarnations.IsFenced("w0", 0));
  EXPECT_TRUE(incarnations.IsFenced("w0", 1));
}

TEST(Incarnations, ManyWorkers_TheOldestIsForgotten) {
  Incarnations incarnations;
  const size_t kept = Incarnations::kWorkers + 4 * 10;
  for (size_t i = 0; i <= kept; ++i) incarnations.Fence(absl::StrCat("w", i), 7, 10);
  EXPECT_FALSE(incarnations.IsFenced("w0", 7));
  EXPECT_TRUE(incarnations.IsFenced("w1", 7));
  int count = 0;
  incarnations.ForEachFenced([&](const std::string&, uint64_t) { ++count; });
  EXPECT_EQ(count, static_cast<int>(kept));
}

TEST(Incarnations, Departed_UntilItReturns) {
  Incarnations incarnations;
  EXPECT_EQ(incarnations.Departed("w0"), std::nullopt);
  incarnations.Depart("w0", 7);
  incarnations.Depart("w1", 8);
  EXPECT_EQ(incarnations.Departed("w0"), 7u);
  incarnations.Return("w0");
  EXPECT_EQ(incarnations.Departed("w0"), std::nullopt);
  EXPECT_THAT(Departed(incarnations), ElementsAre("w1/8"));
  EXPECT_THAT(incarnations.ForgetOldest(2), IsEmpty());
}

TEST(Incarnations, LeftAgain_CountsFromTheLastTime) {
  Incarnations incarnations;
  incarnations.Depart("w0", 7);
  incarnations.Depart("w1", 8);
  incarnations.Return("w0");
  incarnations.Depart("w0", 9);
  EXPECT_THAT(incarnations.ForgetOldest(2), IsEmpty());
  EXPECT_THAT(Departed(incarnations), ElementsAre("w1/8", "w0/9"));
}

TEST(Incarnations, ManyDeparted_TheOldestAreForgottenAndNamed) {
  Incarnations incarnations;
  const size_t kept = Incarnations::kWorkers + 2 * 3;
  for (size_t i = 0; i < kept + 2; ++i) incarnations.Depart(absl::StrCat("w", i), 7);
  EXPECT_THAT(incarnations.ForgetOldest(3), ElementsAre("w0", "w1"));
  EXPECT_EQ(incarnations.Departed("w1"), std::nullopt);
  EXPECT_EQ(incarnations.Departed("w2"), 7u);
}

}  // namespace
}  // namespace muster::coordinator
