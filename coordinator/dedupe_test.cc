#include "coordinator/dedupe.h"

#include <gtest/gtest.h>

#include <string>

namespace muster::coordinator {
namespace {

using State = Dedupe<std::string>::State;

TEST(Dedupe, Find_SameRequest_GivesTheFirstAnswer) {
  Dedupe<std::string> dedupe(4, 100);
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 7, 100, &value), State::kNew);
  dedupe.Store("w", 1, 7, 100, "first", 1);
  EXPECT_EQ(dedupe.Find("w", 1, 7, 100, &value), State::kKnown);
  EXPECT_EQ(value, "first");
}

TEST(Dedupe, Find_SameIdOtherRequest_IsReused) {
  Dedupe<std::string> dedupe(4, 100);
  dedupe.Store("w", 1, 7, 100, "first", 1);
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 7, 101, &value), State::kReused);
}

TEST(Dedupe, Find_OtherWorkerOrIncarnation_IsNew) {
  Dedupe<std::string> dedupe(4, 100);
  dedupe.Store("w", 1, 7, 100, "first", 1);
  std::string value;
  EXPECT_EQ(dedupe.Find("v", 1, 7, 100, &value), State::kNew);
  EXPECT_EQ(dedupe.Find("w", 2, 7, 100, &value), State::kNew);
  dedupe.Store("w", 2, 7, 100, "second", 1);
  EXPECT_EQ(dedupe.Find("w", 1, 7, 100, &value), State::kNew);
}

TEST(Dedupe, Store_BeyondTheWindow_OldIdsAreKnownToBeForgotten) {
  Dedupe<std::string> dedupe(2, 100);
  for (uint64_t id = 1; id <= 4; ++id) dedupe.Store("w", 1, id, id, "x", 1);
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 2, 2, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 3, 3, &value), State::kKnown);
  EXPECT_EQ(dedupe.Find("w", 1, 5, 5, &value), State::kNew);
}

TEST(Dedupe, Store_SameIdAgain_DoesNotPushOthersOut) {
  Dedupe<std::string> dedupe(2, 100);
  dedupe.Store("w", 1, 1, 1, "a", 1);
  for (int i = 0; i < 5; ++i) dedupe.Store("w", 1, 2, 2, "b", 1);
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 1, 1, &value), State::kKnown);
}

TEST(Dedupe, Store_BeyondTheBytes_TheOldestAreForgottenButNeverTheLast) {
  Dedupe<std::string> dedupe(10, 100);
  std::string value;
  for (uint64_t id = 1; id <= 4; ++id) dedupe.Store("w", 1, id, id, "x", 40);
  EXPECT_EQ(dedupe.Find("w", 1, 2, 2, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 3, 3, &value), State::kKnown);
  dedupe.Store("w", 1, 5, 5, "large", 1000);
  EXPECT_EQ(dedupe.Find("w", 1, 4, 4, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 5, 5, &value), State::kKnown);
  dedupe.Store("w", 1, 6, 6, "x", 40);
  EXPECT_EQ(dedupe.Find("w", 1, 5, 5, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 6, 6, &value), State::kKnown);
}

}  // namespace
}  // namespace muster::coordinator
