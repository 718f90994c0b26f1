#include "worker/checkpoint/zip_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace muster {
namespace {

using ::testing::HasSubstr;

std::string Little(uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i, value >>= 8) bytes += static_cast<char>(value & 0xff);
  return bytes;
}

struct Options {
  bool zip64 = false;
  int flags = 0;
  int method = 0;
  std::string comment = "";
};

// Returns an archive of the members, with the oddities that a test wants.
std::string Zip(const std::vector<std::pair<std::string, std::string>>& members,
                const Options& options = {}) {
  std::string file, directory;
  for (const auto& [name, data] : members) {
    const uint64_t local = file.size();
    const std::string extra = options.zip64 ? Little(7, 2) + Little(1, 2) + "x" + Little(1, 2) +
                                                  Little(24, 2) + Little(data.size(), 8) +
                                                  Little(data.size(), 8) + Little(local, 8)
                                            : "";
    const uint64_t shown = options.zip64 ? 0xffffffff : data.size();
    file += "PK\x03\x04" + Little(20, 2) + Little(options.flags, 2) + Little(options.method, 2) +
            Little(0, 8) + Little(shown, 4) + Little(shown, 4) + Little(name.size(), 2) +
            Little(3, 2) + name + "pad" + data;
    directory += "PK\x01\x02" + Little(20, 2) + Little(20, 2) + Little(options.flags, 2) +
                 Little(options.method, 2) + Little(0, 8) + Little(shown, 4) + Little(shown, 4) +
                 Little(name.size(), 2) + Little(extra.size(), 2) + Little(0, 10) +
                 Little(options.zip64 ? 0xffffffff : local, 4) + name + extra;
  }
  const uint64_t begin = file.size();
  file += directory;
  if (options.zip64) {
    const uint64_t end64 = file.size();
    file += "PK\x06\x06" + Little(44, 8) + Little(45, 2) + Little(45, 2) + Little(0, 8) +
            Little(members.size(), 8) + Little(members.size(), 8) + Little(directory.size(), 8) +
            Little(begin, 8);
    file += "PK\x06\x07" + Little(0, 4) + Little(end64, 8) + Little(1, 4);
  }
  const uint64_t count = options.zip64 ? 0xffff : members.size();
  file += "PK\x05\x06" + Little(0, 4) + Little(count, 2) + Little(count, 2) +
          Little(options.zip64 ? 0xffffffff : directory.size(), 4) +
          Little(options.zip64 ? 0xffffffff : begin, 4) + Little(options.comment.size(), 2) +
          options.comment;
  return file;
}

absl::StatusOr<std::vector<ZipMember>> Read(std::string bytes) {
  return ReadZipDirectory(*MemorySource(std::move(bytes), "model.bin"));
}

std::string ErrorOf(std::string bytes) {
  return std::string(Read(std::move(bytes)).status().message());
}

void ExpectMembers(const std::string& file,
                   const std::vector<std::pair<std::string, std::string>>& wanted) {
  const auto members = Read(file);
  ASSERT_TRUE(members.ok()) << members.status();
  ASSERT_EQ(members->size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ((*members)[i].name, wanted[i].first);
    EXPECT_EQ(file.substr((*members)[i].begin, (*members)[i].bytes), wanted[i].second);
  }
}

const std::vector<std::pair<std::string, std::string>> kMembers = {
    {"a/data.pkl", "pickle"}, {"a/data/0", "0123"}, {"a/empty", ""}};

TEST(ZipDirectory, StoredMembers_HaveTheirRanges) {
  ExpectMembers(Zip(kMembers), kMembers);
  ExpectMembers(Zip(kMembers, {.comment = "a remark PK\x05\x06 in it"}), kMembers);
  ExpectMembers(Zip({}), {});
}

TEST(ZipDirectory, Zip64_IsReadLikeTheSmallForm) {
  ExpectMembers(Zip(kMembers, {.zip64 = true}), kMembers);
}

TEST(ZipDirectory, CompressedMembers_AreMarked) {
  const auto members = Read(Zip(kMembers, {.method = 8}));
  ASSERT_TRUE(members.ok()) << members.status();
  for (const ZipMember& member : *members) EXPECT_TRUE(member.compressed);
  const auto plain = Read(Zip(kMembers));
  for (const ZipMember& member : *plain) EXPECT_FALSE(member.compressed);
}

TEST(ZipDirectory, EncryptedMembersAndNamesTwice_AreRefused) {
  EXPECT_THAT(ErrorOf(Zip(kMembers, {.flags = 1})), HasSubstr("is encrypted"));
  EXPECT_THAT(ErrorOf(Zip({{"a", "1"}, {"a", "2"}})), HasSubstr("occurs twice"));
}

TEST(ZipDirectory, RangesThatLeaveTheFileOrOverlap_AreRefused) {
  std::string file = Zip(kMembers);
  const size_t first = file.find("PK\x01\x02");
  std::string longer = file;
  longer.replace(first + 20, 8, Little(1 << 20, 4) + Little(1 << 20, 4));
  EXPECT_THAT(ErrorOf(longer), HasSubstr("lies outside of the file"));
  std::string over = file;
  over.replace(first + 20, 8, Little(60, 4) + Little(60, 4));
  EXPECT_THAT(ErrorOf(over), HasSubstr("lies inside another one"));
  std::string away = file;
  away.replace(first + 42, 4, Little(0x7fffffff, 4));
  EXPECT_THAT(ErrorOf(away), HasSubstr("begins outside of the file"));
}

// A member that one reader ignores may be the byte order for the others.
TEST(ZipDirectory, MembersThatAreNotCounted_AreRefused) {
  std::string fewer = Zip(kMembers);
  fewer.replace(fewer.size() - 14, 4, Little(2, 2) + Little(2, 2));
  EXPECT_THAT(ErrorOf(fewer), HasSubstr("has more than the 2 members that it says it has"));
}

TEST(ZipDirectory, CutAnywhere_IsRefused) {
  for (const bool zip64 : {false, true}) {
    const std::string file = Zip(kMembers, {.zip64 = zip64});
    for (size_t length = 0; length < file.size(); ++length) {
      EXPECT_FALSE(Read(file.substr(0, length)).ok()) << length;
    }
  }
}

}  // namespace
}  // namespace muster
