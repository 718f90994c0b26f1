#include "coordinator/watch_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

KvEntry::Ptr Kv(const std::string& key, size_t size = 1) {
  return KvEntry::Make({.key = key, .value = std::string(size, 'x')});
}

struct Read {
  std::vector<std::string> keys;
  uint64_t next = 0;
  v1::ErrorReason error = v1::ERROR_REASON_UNSPECIFIED;
};

Read ReadFrom(const WatchLog& log, uint64_t from, uint64_t durable, uint64_t last,
              size_t bytes = 1 << 20, const std::string& prefix = "") {
  v1::WatchRequest request;
  request.set_keys(true);
  request.set_key_prefix(prefix);
  v1::WatchBatch batch;
  Read read;
  if (auto error = log.Read(request, from, durable, last, bytes, &batch))
    read.error = error->detail().reason();
  for (const v1::WatchEvent& event : batch.events()) {
    read.keys.push_back(event.has_put() ? event.put().key() : "-" + event.deleted_key());
  }
  read.next = batch.next_revision();
  return read;
}

TEST(WatchLog, Read_InOrder_AndSaysWhereToGoOn) {
  WatchLog log(100, 1 << 20, 10);
  log.Put(11, Kv("a"));
  log.Put(13, Kv("b"));
  log.Deleted(14, "a");
  const Read all = ReadFrom(log, 11, 0, 20);
  EXPECT_THAT(all.keys, ElementsAre("a", "b", "-a"));
  EXPECT_EQ(all.next, 21u);
  EXPECT_THAT(ReadFrom(log, 12, 0, 20).keys, ElementsAre("b", "-a"));
  EXPECT_THAT(ReadFrom(log, 21, 0, 20).keys, IsEmpty());
  EXPECT_EQ(ReadFrom(log, 30, 0, 20).next, 30u);
}

TEST(WatchLog, Read_StopsBeforeWhatIsNotDurable) {
  WatchLog log(100, 1 << 20, 10);
  log.Put(11, Kv("a"));
  log.Put(12, Kv("b"));
  log.MarkDurable(12);
  log.Put(13, Kv("c"));
  EXPECT_THAT(ReadFrom(log, 11, 11, 13).keys, ElementsAre("a"));
  EXPECT_EQ(ReadFrom(log, 11, 11, 13).next, 12u);
  EXPECT_THAT(ReadFrom(log, 12, 12, 13).keys, ElementsAre("b", "c"));
}

TEST(WatchLog, Read_SmallBatches_HoldWholeRevisions) {
  WatchLog log(100, 1 << 20, 10);
  log.Put(11, Kv("a", 1000));
  log.Put(11, Kv("b", 1000));
  log.Put(12, Kv("c", 1000));
  const Read first = ReadFrom(log, 11, 0, 12, 1);
  EXPECT_THAT(first.keys, ElementsAre("a", "b"));
  EXPECT_EQ(first.next, 12u);
  EXPECT_THAT(ReadFrom(log, first.next, 0, 12, 1).keys, ElementsAre("c"));
}

TEST(WatchLog, Read_Filtered_SkipsOthersButMovesOn) {
  WatchLog log(100, 1 << 20, 10);
  log.Put(11, Kv("a/1"));
  log.Put(12, Kv("b/1"));
  const Read read = ReadFrom(log, 11, 0, 12, 1 << 20, "b/");
  EXPECT_THAT(read.keys, ElementsAre("b/1"));
  EXPECT_EQ(read.next, 13u);
}

TEST(WatchLog, Add_BeyondTheLimits_DropsWholeRevisions) {
  WatchLog log(3, 1 << 20, 10);
  log.Put(11, Kv("a"));
  log.Put(11, Kv("b"));
  log.Put(12, Kv("c"));
  log.Put(13, Kv("d"));
  EXPECT_EQ(log.compacted(), 11u);
  EXPECT_EQ(log.size(), 2u);
  EXPECT_EQ(ReadFrom(log, 11, 0, 13).error, v1::ERROR_REASON_COMPACTED);
  EXPECT_THAT(ReadFrom(log, 12, 0, 13).keys, ElementsAre("c", "d"));
}

TEST(WatchLog, Add_LargeValues_AreBoundedByBytes) {
  WatchLog log(1000, 10'000, 0);
  for (uint64_t revision = 1; revision <= 100; ++revision) log.Put(revision, Kv("k", 1000));
  EXPECT_LT(log.size(), 11u);
  EXPECT_GE(log.size(), 1u);
}

TEST(WatchLog, Members_AreTheirOwnKind) {
  WatchLog log(100, 1 << 20, 0);
  v1::WatchEvent event;
  event.set_generation_sealed(3);
  log.Other(1, event);
  log.Put(2, Kv("k"));
  v1::WatchRequest request;
  request.set_members(true);
  v1::WatchBatch batch;
  ASSERT_FALSE(log.Read(request, 1, 0, 2, 1 << 20, &batch).has_value());
  ASSERT_EQ(batch.events_size(), 1);
  EXPECT_EQ(batch.events(0).generation_sealed(), 3u);
  EXPECT_EQ(batch.events(0).revision(), 1u);
}

}  // namespace
}  // namespace muster::coordinator
