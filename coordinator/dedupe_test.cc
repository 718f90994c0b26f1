#include "coordinator/dedupe.h"

#include <gtest/gtest.h>

#include <string>

namespace muster::coordinator {
namespace {

using State = Dedupe<std::string>::State;

TEST(Dedupe, Find_SameRequest_GivesTheFirstAnswer) {
  Dedupe<std::string> dedupe(4);
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 7, 100, &value), State::kNew);
  dedupe.Store("w", 1, 7, 100, "first");
  EXPECT_EQ(dedupe.Find("w", 1, 7, 100, &value), State::kKnown);
  EXPECT_EQ(value, "first");
}

TEST(Dedupe, Find_SameIdOtherRequest_IsReused) {
  Dedupe<std::string> dedupe(4);
  dedupe.Store("w", 1, 7, 100, "first");
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 7, 101, &value), State::kReused);
}

TEST(Dedupe, Find_OtherWorkerOrIncarnation_IsNew) {
  Dedupe<std::string> dedupe(4);
  dedupe.Store("w", 1, 7, 100, "first");
  std::string value;
  EXPECT_EQ(dedupe.Find("v", 1, 7, 100, &value), State::kNew);
  EXPECT_EQ(dedupe.Find("w", 2, 7, 100, &value), State::kNew);
  dedupe.Store("w", 2, 7, 100, "second");
  EXPECT_EQ(dedupe.Find("w", 1, 7, 100, &value), State::kNew);
}

TEST(Dedupe, Store_BeyondTheWindow_OldIdsAreKnownToBeForgotten) {
  Dedupe<std::string> dedupe(2);
  for (uint64_t id = 1; id <= 4; ++id) dedupe.Store("w", 1, id, id, "x");
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 2, 2, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 3, 3, &value), State::kKnown);
  EXPECT_EQ(dedupe.Find("w", 1, 5, 5, &value), State::kNew);
}

TEST(Dedupe, Store_SameIdAgain_DoesNotPushOthersOut) {
  Dedupe<std::string> dedupe(2);
  dedupe.Store("w", 1, 1, 1, "a");
  for (int i = 0; i < 5; ++i) dedupe.Store("w", 1, 2, 2, "b");
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 1, 1, &value), State::kKnown);
}

}  // namespace
}  // namespace muster::coordinator
