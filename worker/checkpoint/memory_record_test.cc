#include "worker/checkpoint/memory_record.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "base/held_memory.h"
#include "base/mutate.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/manifest.h"

namespace muster {
namespace {

constexpr char kText[] = "the contents";

MemoryRecord Example() {
  MemoryRecord record;
  record.save = {7, 99};
  record.rank = 1;
  record.since_disk = 3;
  record.manifest.info.world_size = 2;
  record.manifest.info.step = 40;
  record.manifest.files.push_back({.name = "a.json", .rank = 1, .digest = DigestBytes(kText)});
  record.offsets.push_back(kMemoryHeaderBytes);
  return record;
}

AlignedMemory Written(const MemoryRecord& record) {
  AlignedMemory memory;
  const size_t end = kMemoryHeaderBytes + sizeof(kText) - 1;
  EXPECT_TRUE(memory.Grow(end).ok());
  std::memcpy(memory.data() + kMemoryHeaderBytes, kText, sizeof(kText) - 1);
  const absl::Status written = WriteMemoryRecord(memory, end, record);
  EXPECT_TRUE(written.ok()) << written;
  return memory;
}

absl::string_view BytesOf(const AlignedMemory& memory) {
  return absl::string_view(memory.data(), memory.size());
}

TEST(MemoryRecord, WhatIsWritten_IsRead) {
  const AlignedMemory memory = Written(Example());
  const auto read = ReadMemoryRecord(BytesOf(memory));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->save, (MemorySaveId{7, 99}));
  EXPECT_EQ(read->rank, 1);
  EXPECT_EQ(read->since_disk, 3);
  EXPECT_EQ(read->manifest.info.step, 40);
  ASSERT_EQ(read->manifest.files.size(), 1u);
  EXPECT_EQ(read->manifest.files[0].digest, DigestBytes(kText));
  EXPECT_EQ(read->offsets, std::vector<uint64_t>{kMemoryHeaderBytes});
}

TEST(MemoryRecord, ContentsOfAFile_AreWholeIfEachBlockIs) {
  const std::string contents(10'000, 'c');
  const absl::string_view text = contents;
  ManifestFile file{.name = "f", .digest = {.bytes = contents.size(), .xxh3 = ""}};
  EXPECT_FALSE(IsWhole(text, file));
  file.blocks = {.block_bytes = 4096,
                 .xxh3 = {DigestBlock(text.substr(0, 4096)), DigestBlock(text.substr(0, 4096)),
                          DigestBlock(text.substr(8192))}};
  EXPECT_TRUE(IsWhole(text, file));
  for (const size_t at : {0, 4095, 4096, 9999}) {
    std::string flipped = contents;
    flipped[at] ^= 1;
    EXPECT_FALSE(IsWhole(flipped, file)) << at;
  }
  EXPECT_FALSE(IsWhole(text.substr(1), file));
  file.blocks.xxh3.push_back(0);
  EXPECT_FALSE(IsWhole(text, file));
  EXPECT_TRUE(IsWhole("", ManifestFile()));
}

TEST(MemoryRecord, EmptyOrForgottenMemory_HoldsNothing) {
  EXPECT_TRUE(absl::IsNotFound(ReadMemoryRecord("").status()));
  AlignedMemory memory = Written(Example());
  ForgetMemoryRecord(memory);
  EXPECT_TRUE(absl::IsNotFound(ReadMemoryRecord(BytesOf(memory)).status()));
}

TEST(MemoryRecord, CopyWithItsHeaderLast_IsTheSameCheckpoint) {
  const AlignedMemory memory = Written(Example());
  const size_t end = MemoryRecordEnd(BytesOf(memory));
  ASSERT_GT(end, kMemoryHeaderBytes);
  const absl::string_view whole = BytesOf(memory).substr(0, end);
  AlignedMemory copy;
  ASSERT_TRUE(copy.Grow(end).ok());
  std::memcpy(copy.data() + kMemoryHeaderBytes, whole.data() + kMemoryHeaderBytes,
              end - kMemoryHeaderBytes);
  EXPECT_EQ(MemoryRecordEnd(BytesOf(copy)), 0u);
  EXPECT_TRUE(absl::IsNotFound(ReadMemoryRecord(BytesOf(copy)).status()));
  const absl::string_view page = whole.substr(0, kMemoryHeaderBytes);
  const auto coming = ReadMemoryRecord(page, BytesOf(copy).substr(0, end));
  ASSERT_TRUE(coming.ok()) << coming.status();
  EXPECT_EQ(MemoryFile(BytesOf(copy), *coming, 0), kText);
  // Fails with less memory than the header says.
  EXPECT_TRUE(absl::IsDataLoss(ReadMemoryRecord(page, BytesOf(copy).substr(0, end - 1)).status()));
  PutMemoryHeader(page, copy);
  EXPECT_TRUE(ReadMemoryRecord(BytesOf(copy)).ok());
}

TEST(MemoryRecord, FilesOutsideOfTheMemory_AreDamage) {
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1} << 40, ~uint64_t{0}}) {
    MemoryRecord record = Example();
    record.offsets[0] = offset;
    EXPECT_TRUE(absl::IsDataLoss(ReadMemoryRecord(BytesOf(Written(record))).status()));
  }
  MemoryRecord record = Example();
  record.offsets.push_back(kMemoryHeaderBytes);
  EXPECT_TRUE(absl::IsDataLoss(ReadMemoryRecord(BytesOf(Written(record))).status()));
}

TEST(MemoryRecord, ChangedBytes_AreFoundAndNothingIsReadOutside) {
  const AlignedMemory memory = Written(Example());
  const std::string whole(BytesOf(memory).substr(0, kMemoryHeaderBytes + 1024));
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    // Only the header and the record are parsed; the files have digests of their own.
    std::string bytes = whole.substr(0, 80);
    if (i % 2 == 0) {
      bytes = Mutate(bytes, random);
      bytes.resize(80);
      bytes += whole.substr(80);
    } else {
      bytes = whole.substr(0, kMemoryHeaderBytes + sizeof(kText)) +
              Mutate(whole.substr(kMemoryHeaderBytes + sizeof(kText)), random);
    }
    const auto read = ReadMemoryRecord(bytes);
    if (read.ok()) {
      EXPECT_EQ(read->manifest.info.step, 40);
    }
  }
}

TEST(AlignedMemory, OfAFile_IsSharedAndKeepsWhatItHolds) {
  const auto fd = CreateHoldableMemory("test");
  ASSERT_TRUE(fd.ok()) << fd.status();
  auto memory = AlignedMemory::OfFile(fd->get());
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->size(), 0u);
  ASSERT_TRUE(memory->Grow(5).ok());
  memory->data()[4] = 'x';
  ASSERT_TRUE(memory->Grow(memory->size() + 1).ok());
  const auto again = AlignedMemory::OfFile(fd->get());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->size(), memory->size());
  EXPECT_EQ(again->data()[4], 'x');
  // More than any machine has: an error, and no signal when it is touched.
  EXPECT_TRUE(absl::IsResourceExhausted(memory->Grow(size_t{1} << 52)));
  EXPECT_EQ(memory->data()[4], 'x');
}

}  // namespace
}  // namespace muster
