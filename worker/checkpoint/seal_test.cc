#include "worker/checkpoint/seal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/file.h"
#include "worker/checkpoint/folder.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

RegisteredCheckpoint Record() {
  RegisteredCheckpoint record;
  record.job = "job \n\xff";
  record.id = uint64_t{1} << 63;
  record.path = "/c/checkpoint_7";
  record.iteration = 7;
  record.step = 70;
  record.ranks = 2;
  record.plan = 0xabc;
  record.created_us = 1'700'000'000'000'000;
  record.files = 5;
  record.bytes = 1234;
  record.files_sha256 = std::string(64, 'a');
  record.previous_sha256 = "";
  record.sha256 = std::string(64, 'b');
  record.signature = std::string(128, 'c');
  return record;
}

TEST(Seal, WrittenAndRead_IsTheSame) {
  const std::string dir = testing::TempDir() + "/seal";
  ASSERT_TRUE(MakeDirectories(dir).ok());
  ASSERT_TRUE(WriteSeal(dir, Record()).ok());
  const auto read = ReadSeal(dir);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(SealText(*read), SealText(Record()));
  EXPECT_EQ(read->sha256, Record().sha256);
  EXPECT_EQ(read->signature, Record().signature);
  EXPECT_EQ(read->job, Record().job);
}

TEST(Seal, Text_IsThatOfTheChain) {
  EXPECT_THAT(SealText(Record()),
              HasSubstr("muster checkpoint 1\njob job \\n\\xff\nid 9223372036854775808\n"
                        "path /c/checkpoint_7\niteration 7\nstep 70\nranks 2\n"
                        "plan 0000000000000abc\n"));
}

TEST(Seal, Damaged_IsAnErrorThatNamesTheFile) {
  const std::string dir = testing::TempDir() + "/damaged";
  ASSERT_TRUE(MakeDirectories(dir).ok());
  EXPECT_TRUE(absl::IsNotFound(ReadSeal(dir).status()));
  ASSERT_TRUE(WriteSeal(dir, Record()).ok());
  const std::string path = JoinPath(dir, kSealName);
  const std::string whole = *ReadFile(path);
  for (size_t size = 0; size + 2 < whole.size(); ++size) {
    ASSERT_TRUE(WriteFileAtomically(path, whole.substr(0, size)).ok());
    const auto read = ReadSeal(dir);
    ASSERT_FALSE(read.ok()) << size;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("seal.json"));
  }
}

}  // namespace
}  // namespace muster
