#include "worker/checkpoint/seal_chain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "worker/checkpoint/seal.h"

namespace {

std::atomic<int> seals_opened{0};

// Counts the opens of seal.json; never makes them fail.
bool CountSeals(const char* path, int /*flags*/) {
  if (muster::PathHas(path, "seal.json")) ++seals_opened;
  return false;
}

}  // namespace

MUSTER_REPLACE_OPEN(open, CountSeals)
MUSTER_REPLACE_OPEN(open64, CountSeals)

namespace muster {
namespace {

constexpr int64_t kNow = 1'000'000;  // microseconds
const absl::Time now = absl::FromUnixMicros(kNow);

std::string Sha(int of) { return std::string(60, 'a') + absl::StrCat(1000 + of); }

RegisteredCheckpoint Record(uint64_t id, int64_t created_us, int previous = 0,
                            const std::string& job = "") {
  RegisteredCheckpoint record;
  record.job = job;
  record.id = id;
  record.created_us = static_cast<uint64_t>(created_us);
  record.sha256 = Sha(static_cast<int>(id));
  if (previous > 0) record.previous_sha256 = Sha(previous);
  return record;
}

uint64_t LastOf(const std::vector<RegisteredCheckpoint>& records) {
  const ChainEnd end = EndOfChain(records, now);
  return end.last.has_value() ? end.last->id : 0;
}

TEST(EndOfChain, NoRecord_IsNone) {
  const ChainEnd end = EndOfChain({}, now);
  EXPECT_FALSE(end.last.has_value());
  EXPECT_EQ(end.highest_id, 0u);
}

TEST(EndOfChain, NewestThatNothingFollows_IsTheLast) {
  EXPECT_EQ(LastOf({Record(1, 10), Record(3, 30, 2), Record(2, 20, 1)}), 3u);
  // The clock was set back in between.
  EXPECT_EQ(LastOf({Record(1, 500), Record(3, 30, 2), Record(2, 20, 1)}), 3u);
  // A chain whose end is missing.
  EXPECT_EQ(LastOf({Record(1, 10), Record(4, 40, 3), Record(2, 20, 1)}), 4u);
}

TEST(EndOfChain, PinnedRecordOfTheFuture_IsNotTheLastAndItsIdsDoNotRepeat) {
  // The records in between are gone.
  const std::vector<RegisteredCheckpoint> records = {Record(5, kNow + 100), Record(8, 40, 7),
                                                     Record(9, 50, 8)};
  EXPECT_EQ(LastOf(records), 9u);
  EXPECT_EQ(EndOfChain(records, now).highest_id, 9u);
  // The same when that time has come.
  const ChainEnd later = EndOfChain(records, now + absl::Seconds(1));
  EXPECT_EQ(later.last->id, 9u);
  // If all are in the future, the newest of them counts.
  EXPECT_EQ(LastOf({Record(5, kNow + 100), Record(6, kNow + 200)}), 6u);
}

TEST(EndOfChain, RecordsOfCoordinators_AreInOrderOfTheirTime) {
  // The second coordinator's ids began lower.
  const std::vector<RegisteredCheckpoint> records = {Record(1000, 10, 0, "j"),
                                                     Record(20, 20, 0, "j")};
  EXPECT_EQ(LastOf(records), 20u);
  EXPECT_EQ(EndOfChain(records, now).highest_id, 1000u);
  EXPECT_EQ(LastOf({Record(1001, 15), Record(20, 20, 0, "j")}), 20u);
}

TEST(EndOfChain, Circle_Ends) { EXPECT_NE(LastOf({Record(1, 10, 2), Record(2, 20, 1)}), 0u); }

class ReadChainEndTest : public testing::Test {
 protected:
  void Save(const std::string& name, const RegisteredCheckpoint& record) {
    const std::string dir = folder_.Path(name);
    ASSERT_TRUE(MakeDirectories(dir).ok());
    ASSERT_TRUE(WriteSeal(dir, record).ok());
  }
  // The records that a search for the end opens.
  int OpenedBy(uint64_t last) {
    seals_opened = 0;
    const ChainEnd end = ReadChainEnd(folder_.path(), now);
    EXPECT_TRUE(end.last.has_value());
    EXPECT_EQ(end.last->id, last);
    return seals_opened;
  }

  const TestFolder folder_;
};

TEST_F(ReadChainEndTest, EachRecord_IsReadOnceAndAgainWhenItChanges) {
  EXPECT_FALSE(ReadChainEnd(folder_.path(), now).last.has_value());
  for (int i = 1; i <= 50; ++i) Save(absl::StrCat("checkpoint_", i), Record(i, i, i - 1));
  EXPECT_EQ(OpenedBy(50), 50);
  EXPECT_EQ(OpenedBy(50), 0);
  Save("best", Record(51, 51, 50));
  EXPECT_EQ(OpenedBy(51), 1);
  // It replaces another one.
  Save("best", Record(52, 52, 50));
  EXPECT_EQ(OpenedBy(52), 1);
  ASSERT_TRUE(RemoveTree(folder_.Path("best")).ok());
  EXPECT_EQ(OpenedBy(50), 0);
  Save("best", Record(53, 53, 50));
  EXPECT_EQ(OpenedBy(53), 1) << "it was forgotten";
}

TEST_F(ReadChainEndTest, WhatIsNoRecord_IsLeftOut) {
  Save("checkpoint_1", Record(1, 1));
  ASSERT_TRUE(MakeDirectories(folder_.Path("checkpoint_2")).ok());
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("checkpoint_2/seal.json"), "{").ok());
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("notes"), "").ok());
  OpenedBy(1);
}

}  // namespace
}  // namespace muster
