#include "coordinator/dedupe.h"

#include <gtest/gtest.h>

#include <map>
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

// A try of id 10 was refused, and another thread's requests overtake it.
TEST(Dedupe, Find_IdThatNeverCame_IsNewThoughALaterAnswerWasDroppedForItsBytes) {
  Dedupe<std::string> dedupe(3, 100);
  dedupe.Store("w", 1, 9, 9, "a", 1);
  dedupe.Store("w", 1, 11, 11, "large", 300);
  dedupe.Store("w", 1, 12, 12, "b", 1);
  std::string value;
  EXPECT_EQ(dedupe.Find("w", 1, 10, 10, &value), State::kNew);
  EXPECT_EQ(dedupe.Find("w", 1, 9, 9, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 11, 11, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 11, 7, &value), State::kReused);
  EXPECT_EQ(dedupe.Find("w", 1, 12, 12, &value), State::kKnown);
  // A snapshot does not have that.
  std::map<uint64_t, std::string> kept;
  uint64_t forgotten = 0;
  const auto look = [&] {
    kept.clear();
    dedupe.ForEach([&](const std::string&, uint64_t, uint64_t id, uint64_t,
                       const std::string& answer) { kept[id] = answer; });
    dedupe.ForEachForgotten([&](const std::string&, uint64_t, uint64_t id) { forgotten = id; });
  };
  look();
  EXPECT_EQ(kept, (std::map<uint64_t, std::string>{{12, "b"}}));
  EXPECT_EQ(forgotten, 11u);
  // Once it has been answered, and `keep` later ones have been, too.
  dedupe.Store("w", 1, 10, 10, "late", 1);
  EXPECT_EQ(dedupe.Find("w", 1, 10, 10, &value), State::kKnown);
  for (uint64_t id = 13; id <= 15; ++id) dedupe.Store("w", 1, id, id, "c", 1);
  for (uint64_t id = 8; id <= 12; ++id) {
    EXPECT_EQ(dedupe.Find("w", 1, id, id, &value), State::kForgotten) << id;
  }
  look();
  EXPECT_EQ(kept, (std::map<uint64_t, std::string>{{13, "c"}, {14, "c"}, {15, "c"}}));
  EXPECT_EQ(forgotten, 12u);
}

TEST(Dedupe, NoteForgotten_InEitherOrder_KeepsSmallerIds) {
  for (const bool first : {false, true}) {
    Dedupe<std::string> dedupe(4, 100);
    if (first) dedupe.NoteForgotten("w", 1, 9);
    dedupe.Store("w", 1, 7, 7, "seven", 1);
    if (!first) dedupe.NoteForgotten("w", 1, 9);
    std::string value;
    EXPECT_EQ(dedupe.Find("w", 1, 7, 7, &value), State::kKnown);
    EXPECT_EQ(value, "seven");
    EXPECT_EQ(dedupe.Find("w", 1, 8, 8, &value), State::kForgotten);
    dedupe.ForgetUpTo("w", 1, 8);
    EXPECT_EQ(dedupe.Find("w", 1, 7, 7, &value), State::kForgotten);
  }
}

TEST(Dedupe, ForgetUpTo_OfAnswersDroppedForTheirBytes_LeavesNoneOfThem) {
  Dedupe<std::string> dedupe(10, 100);
  for (uint64_t id = 1; id <= 4; ++id) dedupe.Store("w", 1, id, id, "x", 90);
  dedupe.ForgetUpTo("w", 1, 4);
  uint64_t forgotten = 0;
  dedupe.ForEachForgotten([&](const std::string&, uint64_t, uint64_t id) { forgotten = id; });
  EXPECT_EQ(forgotten, 4u);
  std::string value;
  for (uint64_t id = 5; id <= 6; ++id) dedupe.Store("w", 1, id, id, "x", 90);
  EXPECT_EQ(dedupe.Find("w", 1, 5, 5, &value), State::kForgotten);
  EXPECT_EQ(dedupe.Find("w", 1, 6, 6, &value), State::kKnown);
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
