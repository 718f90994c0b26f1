#include "worker/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace muster {
namespace {

using ::testing::HasSubstr;

Manifest Sample() {
  return {.info = {.world_size = 2,
                   .iteration = 3,
                   .step = 40,
                   .micro_step = 80,
                   .epoch = 1,
                   .cursor = {{"samples", int64_t{1} << 60}}},
          .created = "2001-02-03T04:05:06Z",
          .files = {{.name = "model.safetensors", .rank = 0, .digest = {.bytes = 7, .xxh3 = "aa"}},
                    {.name = "a.json", .rank = 1, .digest = {.bytes = 8, .xxh3 = "bb"}}}};
}

TEST(Manifest, RoundTrip_KeepsEverything) {
  const auto text = EncodeManifest(Sample());
  ASSERT_TRUE(text.ok());
  const auto back = ParseManifest(*text, "m");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->info.world_size, 2);
  EXPECT_EQ(back->info.iteration, 3);
  EXPECT_EQ(back->info.step, 40);
  EXPECT_EQ(back->info.micro_step, 80);
  EXPECT_EQ(back->info.epoch, 1);
  EXPECT_EQ(back->info.cursor.at("samples"), int64_t{1} << 60);
  ASSERT_EQ(back->files.size(), 2u);
  EXPECT_EQ(back->files[0].name, "a.json");
  EXPECT_EQ(back->Find("model.safetensors")->digest.bytes, 7u);
  EXPECT_EQ(back->Find("b"), nullptr);
}

TEST(Manifest, BlocksOfAFile_ComeBack) {
  Manifest manifest = Sample();
  manifest.files[0].digest.bytes = 8193;
  manifest.files[0].blocks = {.block_bytes = 4096, .xxh3 = {0, 0xfedcba9876543210u, 5}};
  const auto back = ParseManifest(*EncodeManifest(manifest), "m");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->Find("model.safetensors")->blocks, manifest.files[0].blocks);
  EXPECT_TRUE(back->Find("a.json")->blocks.empty());
}

TEST(Manifest, BlocksThatDoNotFitTheFile_AreDataLoss) {
  for (const BlockDigests& blocks : {BlockDigests{.block_bytes = 4096, .xxh3 = {1, 2}},
                                     BlockDigests{.block_bytes = 4096, .xxh3 = {1, 2, 3, 4}},
                                     BlockDigests{.block_bytes = 0, .xxh3 = {1, 2, 3}},
                                     BlockDigests{.block_bytes = 4097, .xxh3 = {1, 2}}}) {
    Manifest manifest = Sample();
    manifest.files[0].digest.bytes = 8193;
    manifest.files[0].blocks = blocks;
    const auto back = ParseManifest(*EncodeManifest(manifest), "m");
    EXPECT_EQ(back.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(back.status().message()),
                HasSubstr("the blocks of \"model.safetensors\" do not fit its size"));
  }
}

TEST(Manifest, AnyFlippedBitOrCut_IsNoticed) {
  const std::string text = *EncodeManifest(Sample());
  for (size_t at = 0; at + 1 < text.size(); ++at) {
    if (text[at] == ' ' || text[at] == '\n') continue;
    std::string bad = text;
    bad[at] ^= 1;
    EXPECT_FALSE(ParseManifest(bad, "m").ok()) << bad;
    EXPECT_FALSE(ParseManifest(text.substr(0, at), "m").ok());
  }
}

// In a time proportional to their number; otherwise this exceeds the test's time.
TEST(Manifest, ManyFiles_AreRead) {
  Manifest manifest;
  for (int i = 0; i < 300'000; ++i) {
    manifest.files.emplace_back().name = "f" + std::to_string(i);
  }
  const auto back = ParseManifest(*EncodeManifest(manifest), "m");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->files.size(), manifest.files.size());
}

TEST(Manifest, D21_FileOfTwoRanks_IsRefused) {
  Manifest manifest = Sample();
  manifest.files.push_back({.name = "model.safetensors", .rank = 1, .digest = {}});
  EXPECT_THAT(std::string(EncodeManifest(manifest).status().message()),
              HasSubstr("model.safetensors was written by rank 0 and by rank 1"));
}

TEST(Manifest, NamesOutsideTheFolder_AreRefused) {
  for (const char* name : {"", ".", "..", "../x", "/x", "a/b", "manifest.json", "\xff"}) {
    Manifest manifest = Sample();
    manifest.files.push_back({.name = name, .rank = 0, .digest = {}});
    EXPECT_FALSE(EncodeManifest(manifest).ok()) << name;
  }
}

TEST(Manifest, NodesWithDisksOfTheirOwn_ComeBack) {
  Manifest manifest = Sample();
  manifest.nodes = {{.host = "gpu-1", .ranks = {0, 1}}, {.host = "gpu-2", .ranks = {2}}};
  const auto back = ParseManifest(*EncodeManifest(manifest), "m");
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->nodes.size(), 2u);
  EXPECT_EQ(back->nodes[1].host, "gpu-2");
  EXPECT_EQ(back->nodes[0].ranks, (std::vector<int>{0, 1}));
}

// The digest matches, so the manifest was written that way.
TEST(Manifest, NumbersThatAreNoIntegers_AreDataLoss) {
  for (const char* field : {"version", "world_size", "iteration", "step"}) {
    for (const double value : {1e300, -1e300, 0.5}) {
      nlohmann::json json = nlohmann::json::parse(*EncodeManifest(Sample()));
      json[field] = value;
      json.erase("digest");
      json["digest"] = DigestBytes(json.dump()).xxh3;
      EXPECT_EQ(ParseManifest(json.dump(), "m").status().code(), absl::StatusCode::kDataLoss)
          << field << " " << value;
    }
  }
}

TEST(Manifest, OtherJson_IsNoManifest) {
  EXPECT_EQ(ParseManifest("{}", "m").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseManifest("[]", "m").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster
