#include "worker/checkpoint/safetensors_format.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;
using testing_support::GoldenCases;
using testing_support::GoldenPath;

std::string Sha256(absl::string_view bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<char*>(digest), sizeof(digest)));
}

std::string Error(absl::string_view json, uint64_t data_bytes) {
  const auto header = ParseSafetensorsHeader(json, data_bytes, "m.safetensors");
  return header.ok() ? "accepted" : std::string(header.status().message());
}

TEST(ReadSafetensorsHeader, GoldenFiles_AreListedOrRejected) {
  int accepted = 0;
  int rejected = 0;
  for (const Json& item : GoldenCases("safetensors_files")) {
    const std::string path = GoldenPath(item["in"]["file"]);
    const auto header = ReadSafetensorsHeader(path);
    if (item.contains("error")) {
      ++rejected;
      ASSERT_FALSE(header.ok()) << path << " must be rejected: " << item["error"]["reason"];
      const std::string message(header.status().message());
      EXPECT_THAT(message, AllOf(HasSubstr(path), Not(HasSubstr("\n")))) << path;
      continue;
    }
    ++accepted;
    ASSERT_TRUE(header.ok()) << header.status();
    const Json& out = item["out"];
    EXPECT_EQ(header->header_bytes, out["header_bytes"].get<uint64_t>()) << path;
    EXPECT_EQ(header->metadata.has_value(), !out["metadata"].is_null()) << path;
    if (header->metadata.has_value()) {
      EXPECT_EQ(Json(*header->metadata), out["metadata"]);
    }
    ASSERT_EQ(header->tensors.size(), out["tensors"].size()) << path;
    const std::string contents = *ReadFile(path);
    for (size_t i = 0; i < header->tensors.size(); ++i) {
      const SafetensorsEntry& entry = header->tensors[i];
      const Json got = {
          {"name", entry.name},
          {"dtype", std::string(SafetensorsTypeName(entry.type))},
          {"shape", entry.shape},
          {"begin", entry.begin},
          {"end", entry.end},
          {"sha256", Sha256(absl::string_view(contents).substr(
                         8 + header->header_bytes + entry.begin, entry.end - entry.begin))}};
      EXPECT_EQ(got, out["tensors"][i]) << path;
    }
  }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(rejected, 30);
}

TEST(EncodeSafetensors, GoldenFiles_ComeOutByteForByte) {
  for (const Json& item : GoldenCases("safetensors_write")) {
    std::vector<SafetensorsEntry> tensors;
    std::vector<std::string> data;
    for (const Json& tensor : item["in"]["tensors"]) {
      tensors.push_back({.name = tensor["name"],
                         .type = *ParseSafetensorsType(tensor["dtype"].get<std::string>()),
                         .shape = tensor["shape"]});
      data.push_back(absl::HexStringToBytes(tensor["data_hex"].get<std::string>()));
    }
    std::optional<SafetensorsMetadata> metadata;
    if (!item["in"]["metadata"].is_null())
      metadata = item["in"]["metadata"].get<SafetensorsMetadata>();
    const auto file = EncodeSafetensors(tensors, data, metadata);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(absl::BytesToHexString(*file), item["out"]["file_hex"].get<std::string>())
        << item["id"];
  }
}

TEST(ParseSafetensorsHeader, Quirks_AreDecidedOnPurpose) {
  const auto read = [](const std::string& name) {
    return ReadSafetensorsHeader(GoldenPath("safetensors_files/odd_" + name + ".safetensors")).ok();
  };
  // Harmless and found in real files.
  EXPECT_TRUE(read("leading_blank"));
  EXPECT_TRUE(read("trailing_newline"));
  EXPECT_TRUE(read("metadata_null"));
  // Ambiguous: two readers could see two different models.
  EXPECT_FALSE(read("duplicate_name_same_range"));
  EXPECT_FALSE(read("duplicate_metadata_key"));
  EXPECT_FALSE(read("unknown_field"));
  EXPECT_FALSE(read("zero_before_overflow"));
}

TEST(ParseSafetensorsHeader, EachMistake_NamesFileTensorAndField) {
  const std::string w = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ(Error(w, 8), "accepted");
  EXPECT_EQ(Error(w, 9), "m.safetensors: the tensors need 8 bytes of data, but the file has 9");
  EXPECT_EQ(
      Error(w, 7),
      "m.safetensors: the tensors need 8 bytes of data, but the file has 7: it was cut short");
  EXPECT_EQ(Error(R"({"w":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8),
            "m.safetensors: tensor \"w\": dtype: \"F33\" is unknown");
  EXPECT_EQ(Error(R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
            "m.safetensors: tensor \"w\": data_offsets: 8 bytes, but shape [3] of F32 needs 12");
  EXPECT_EQ(Error(R"({"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8),
            "m.safetensors: tensor \"w\": shape: 2.0 is not an unsigned 64-bit integer");
  EXPECT_EQ(Error(R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
            "m.safetensors: tensor \"w\": shape: -2 is negative");
  EXPECT_EQ(Error(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"dtype":"F32"}})", 8),
            "m.safetensors: tensor \"w\": dtype: occurs twice");
  EXPECT_EQ(Error(R"({"w":{"dtype":"F32","data_offsets":[0,8]}})", 8),
            "m.safetensors: tensor \"w\": the field shape is missing");
  EXPECT_EQ(Error(R"({"__metadata__":{"a":1}})", 0),
            "m.safetensors: __metadata__: the value of \"a\" is the number 1, not text");
  EXPECT_EQ(Error("[]", 0), "m.safetensors: the header is a list, not an object");
  EXPECT_EQ(Error(R"({"w":[]})", 0), "m.safetensors: tensor \"w\": is a list, not an object");
  EXPECT_EQ(Error(R"({"w":{"dtype":["F32"]}})", 0),
            "m.safetensors: tensor \"w\": dtype: is a list, not text");
  EXPECT_EQ(
      Error(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
            5),
      "m.safetensors: tensor \"b\": data_offsets: begins at 3, after a hole that begins at 2");
  EXPECT_THAT(Error(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296,4294967296],)"
                    R"("data_offsets":[0,0]}})",
                    0),
              HasSubstr("is too large"));
}

TEST(ParseSafetensorsHeader, ShapeOfThousandsOfDimensions_IsNotListedInTheError) {
  std::string ones = "1";
  for (int i = 1; i < 5000; ++i) ones += ",1";
  const auto header = ParseSafetensorsHeader(
      R"({"w":{"dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,2]}})", 2, "f");
  EXPECT_EQ(header.status().message(),
            "f: tensor \"w\": data_offsets: 2 bytes, but shape [1, 1, 1, 1, 1, 1, 1, 1, ... (5000 "
            "dimensions)] of U8 needs 1");
}

TEST(LayOutSafetensors, LargerAlignment_OnlyAddsBlanksToTheHeader) {
  for (size_t length = 1; length < 20; ++length) {
    const std::vector<SafetensorsEntry> tensors = {
        {.name = std::string(length, 'a'), .type = SafetensorsType::kF32, .shape = {3}}};
    const auto plain = LayOutSafetensors(tensors, std::nullopt);
    const auto aligned = LayOutSafetensors(tensors, std::nullopt, 4096);
    ASSERT_TRUE(plain.ok() && aligned.ok());
    EXPECT_EQ(plain->prefix.size() % 8, 0u);
    EXPECT_EQ(aligned->prefix.size(), 4096u);
    const absl::string_view json = absl::string_view(aligned->prefix).substr(8);
    EXPECT_EQ(absl::StripTrailingAsciiWhitespace(json),
              absl::StripTrailingAsciiWhitespace(absl::string_view(plain->prefix).substr(8)));
    const auto header = ParseSafetensorsHeader(json, aligned->data_bytes, "aligned");
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->header_bytes, 4088u);
  }
}

TEST(LayOutSafetensors, BadNames_AreRefused) {
  const SafetensorsEntry one{.name = "a", .shape = {1}};
  EXPECT_FALSE(LayOutSafetensors({one, one}, std::nullopt).ok());
  EXPECT_FALSE(LayOutSafetensors({{.name = "__metadata__", .shape = {1}}}, std::nullopt).ok());
  EXPECT_FALSE(LayOutSafetensors({{.name = "\xff", .shape = {1}}}, std::nullopt).ok());
  EXPECT_FALSE(
      LayOutSafetensors({{.name = "a", .type = SafetensorsType::kF4, .shape = {3}}}, std::nullopt)
          .ok());
  EXPECT_FALSE(LayOutSafetensors({one}, SafetensorsMetadata{{"k", "\xff"}}).ok());
  EXPECT_FALSE(EncodeSafetensors({one}, {"xy"}, std::nullopt).ok());
}

TEST(LayOutSafetensors, Prefix_KeepsDataAligned) {
  for (int length = 0; length < 20; ++length) {
    const auto layout =
        LayOutSafetensors({{.name = std::string(length, 'n'), .shape = {1}}}, std::nullopt);
    ASSERT_TRUE(layout.ok());
    EXPECT_EQ(layout->prefix.size() % 8, 0u);
  }
}

// Whatever the input is, nothing crashes (memory errors show in the asan build), and what parses
// can be written and parses again to the same.
TEST(ParseSafetensorsHeader, MutatedHeaders_NeverCrashAndRoundTrip) {
  std::vector<std::pair<std::string, uint64_t>> seeds;
  for (const Json& item : GoldenCases("safetensors_files")) {
    const std::string contents = *ReadFile(GoldenPath(item["in"]["file"]));
    if (contents.size() < 8) continue;
    uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(contents[i]);
    if (length > contents.size() - 8) continue;
    seeds.emplace_back(contents.substr(8, length), contents.size() - 8 - length);
  }
  std::mt19937_64 random(20260701);
  const absl::string_view interesting = "{}[]\",:0123456789-+.eE\\ut nulltrue\x00\xff\xc3\x20\n";
  int survivors = 0;
  for (int round = 0; round < 60'000; ++round) {
    auto [json, data_bytes] = seeds[random() % seeds.size()];
    const int edits = random() % 4;
    for (int i = 0; i < edits && !json.empty(); ++i) {
      const size_t at = random() % json.size();
      switch (random() % 5) {
        case 0:
          json[at] = interesting[random() % interesting.size()];
          break;
        case 1:
          json.erase(at, 1 + random() % 8);
          break;
        case 2:
          json.insert(at, json.substr(random() % json.size(), random() % 30));
          break;
        case 3:
          json[at] = static_cast<char>(random());
          break;
        default:
          data_bytes += random() % 3 - 1;
      }
    }
    const auto header = ParseSafetensorsHeader(json, data_bytes, "fuzz");
    if (!header.ok()) continue;
    ++survivors;
    const auto layout = LayOutSafetensors(header->tensors, header->metadata);
    ASSERT_TRUE(layout.ok()) << layout.status() << " of " << json;
    const auto again = ParseSafetensorsHeader(absl::string_view(layout->prefix).substr(8),
                                              layout->data_bytes, "again");
    ASSERT_TRUE(again.ok()) << again.status() << " of " << json;
    EXPECT_EQ(again->tensors.size(), header->tensors.size());
    EXPECT_EQ(again->metadata, header->metadata);
  }
  EXPECT_GT(survivors, 1000);
}

TEST(ReadSafetensorsHeader, OfAnOpenFile_IsNotOfTheOneThatReplacedIt) {
  const TestFolder folder;
  const std::string path = folder.Path("f.safetensors");
  const std::string first = *ReadFile(GoldenPath("safetensors_files/valid_mixed0.safetensors"));
  const std::string later = *ReadFile(GoldenPath("safetensors_files/valid_mixed1.safetensors"));
  ASSERT_TRUE(WriteFileAtomically(path, first).ok());
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const uint64_t bytes = ReadSafetensorsHeader(path)->header_bytes;
  ASSERT_TRUE(WriteFileAtomically(path, later).ok());
  ASSERT_NE(ReadSafetensorsHeader(path)->header_bytes, bytes);
  EXPECT_EQ(ReadSafetensorsHeader(file.get(), path)->header_bytes, bytes);
}

TEST(ReadSafetensorsHeader, MutatedFiles_NeverCrash) {
  const TestFolder folder;
  const std::string path = folder.Path("f.safetensors");
  const std::string seed = *ReadFile(GoldenPath("safetensors_files/valid_mixed0.safetensors"));
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    std::string contents = seed;
    for (int i = 0; i < 3; ++i) contents[random() % 16] = static_cast<char>(random());
    if (random() % 2 == 0) contents.resize(random() % contents.size());
    std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
    (void)ReadSafetensorsHeader(path).ok();
  }
}

}  // namespace
}  // namespace muster
