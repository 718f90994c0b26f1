// Mutated headers, indexes and manifests of checkpoints and models: whatever the input is, nothing
// crashes (memory errors show in the asan build), nothing that is accepted reaches beyond its file,
// and what is accepted can be written and accepted again. MUSTER_FUZZ_CASES sets the number of
// cases of each kind.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "base/json.h"
#include "base/mutate.h"
#include "base/peak_growth.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using Random = std::mt19937_64;

constexpr int64_t kMostMemory = int64_t{256} << 20;

int64_t Cases() {
  int64_t cases = 5'000;
  const char* const wanted = std::getenv("MUSTER_FUZZ_CASES");
  EXPECT_TRUE(wanted == nullptr || absl::SimpleAtoi(wanted, &cases)) << wanted;
  return cases;
}

// Returns a value that some reader may mistake for a number, a name or a list.
Json AnyValue(Random& random) {
  const Json values[] = {nullptr,
                         true,
                         -1,
                         0,
                         1,
                         std::numeric_limits<uint64_t>::max(),
                         std::numeric_limits<int64_t>::min(),
                         int64_t{1} << 53,
                         0.5,
                         1e300,
                         "",
                         "..",
                         "../x",
                         "a/b",
                         "nan",
                         std::string("a\0b", 3),
                         Json::array(),
                         Json::array({0, std::numeric_limits<uint64_t>::max()}),
                         Json::object(),
                         Json{{"bytes", 4096}, {"xxh3", Json::array({"00", 1})}}};
  return values[random() % std::size(values)];
}

// Replaces a value somewhere in the tree, removes a part, or repeats it elsewhere.
void MutateTree(Json& json, Random& random) {
  Json* at = &json;
  while (at->is_structured() && !at->empty() && random() % 4 != 0) {
    at = &*std::next(at->begin(), static_cast<int64_t>(random() % at->size()));
  }
  switch (at->is_structured() ? random() % 4 : 0) {
    case 0:
      *at = AnyValue(random);
      break;
    case 1:
      if (!at->empty()) {
        at->erase(std::next(at->begin(), static_cast<int64_t>(random() % at->size())));
      }
      break;
    case 2:
      if (at->is_array()) {
        at->push_back(at->empty() ? AnyValue(random) : Json(at->front()));
      } else {
        (*at)["added"] = AnyValue(random);
      }
      break;
    default:
      *at = Json(json);
  }
}

// Returns `text` with changes of its bytes, of its values, or of both.
std::string Changed(const std::string& text, Random& random) {
  std::string changed = text;
  if (random() % 3 != 0) {
    Json json = Json::parse(text);
    for (uint64_t i = random() % 3 + 1; i > 0; --i) MutateTree(json, random);
    changed = json.dump();
  }
  return random() % 3 == 0 ? Mutate(std::move(changed), random) : changed;
}

TEST(CheckpointFuzz, Headers_ReachNothingBeyondTheirFile) {
  const std::string seeds[] = {
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}})",
      R"({"x":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"e":{"dtype":"U8","shape":[0,7],)"
      R"("data_offsets":[8,8]},"y":{"dtype":"F4","shape":[2,24],"data_offsets":[8,32]}})",
      R"({"__metadata__":{"muster.scalars":"{\"steps\":7}"},"s":{"dtype":"BOOL","shape":[32],)"
      R"("data_offsets":[0,32]}})",
  };
  Random random(1);
  const PeakGrowth growth;
  int64_t taken = 0;
  const int64_t cases = Cases();
  for (int64_t i = 0; i < cases; ++i) {
    const std::string text = Changed(seeds[random() % std::size(seeds)], random);
    const uint64_t bytes = random() % 8 == 0 ? random() >> (random() % 64) : 32;
    const auto header = ParseSafetensorsHeader(text, bytes, "fuzz");
    ASSERT_TRUE(growth.IsAtMost(kMostMemory)) << text;
    if (!header.ok()) continue;
    ++taken;
    for (const SafetensorsEntry& entry : header->tensors) {
      ASSERT_LE(entry.begin, entry.end) << text;
      ASSERT_LE(entry.end, bytes) << text;
    }
    const auto layout = LayOutSafetensors(header->tensors, header->metadata, 4096);
    ASSERT_TRUE(layout.ok()) << layout.status() << " of " << text;
    const auto again = ParseSafetensorsHeader(absl::string_view(layout->prefix).substr(8),
                                              layout->data_bytes, "again");
    ASSERT_TRUE(again.ok()) << again.status() << " of " << text;
    ASSERT_EQ(again->tensors.size(), header->tensors.size()) << text;
  }
  EXPECT_GT(taken, cases / 100);
}

TEST(CheckpointFuzz, Indexes_NameNoFileOutsideOfTheirFolder) {
  const std::string seeds[] = {
      R"({"metadata":{"total_size":32},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
      R"("b":"model-00002-of-00002.safetensors"}})",
      R"({"a":"pytorch_model.bin","b":"pytorch_model.bin"})",
  };
  Random random(2);
  const PeakGrowth growth;
  int64_t taken = 0;
  const int64_t cases = Cases();
  for (int64_t i = 0; i < cases; ++i) {
    const std::string text = Changed(seeds[random() % std::size(seeds)], random);
    const auto index = ParseShardIndex(text, "fuzz");
    ASSERT_TRUE(growth.IsAtMost(kMostMemory)) << text;
    if (!index.ok()) continue;
    ++taken;
    for (const auto& [name, file] : *index) {
      ASSERT_EQ(file.find('/'), std::string::npos) << text;
      ASSERT_EQ(file.find('\0'), std::string::npos) << text;
      ASSERT_FALSE(file.empty() || file == "." || file == "..") << text;
    }
  }
  EXPECT_GT(taken, cases / 100);
}

// Gives a changed manifest a matching digest, because a program may write such a manifest, while
// the digest detects every accident.
std::string WithDigest(const std::string& text) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return text;
  json.erase("digest");
  // Names that are not UTF-8 are replaced.
  const std::string plain = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  json["digest"] = DigestBytes(plain).xxh3;
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

TEST(CheckpointFuzz, Manifests_NameNoFileOutsideOfTheirFolderAndRoundTrip) {
  Manifest manifest;
  manifest.info = {.world_size = 2, .iteration = 3, .step = 40, .cursor = {{"samples", 4096}}};
  manifest.created = "2001-02-03T04:05:06+00:00";
  manifest.files = {{.name = "model.safetensors",
                     .digest = DigestBytes("model"),
                     .blocks = {.block_bytes = 4096, .xxh3 = {1}}},
                    {.name = "random_states_1.safetensors", .rank = 1, .digest = DigestBytes("")}};
  const auto seed = EncodeManifest(manifest);
  ASSERT_TRUE(seed.ok()) << seed.status();
  Random random(3);
  int64_t taken = 0;
  const int64_t cases = Cases();
  for (int64_t i = 0; i < cases; ++i) {
    std::string text = Changed(*seed, random);
    if (random() % 8 != 0) text = WithDigest(text);
    const auto parsed = ParseManifest(text, "fuzz");
    if (!parsed.ok()) continue;
    ++taken;
    for (const ManifestFile& file : parsed->files) {
      ASSERT_EQ(file.name.find('/'), std::string::npos) << text;
      ASSERT_FALSE(file.name.empty() || file.name == "." || file.name == "..") << text;
      ASSERT_TRUE(file.blocks.empty() || file.blocks.block_bytes % 4096 == 0) << text;
    }
    const auto again = EncodeManifest(*parsed);
    ASSERT_TRUE(again.ok()) << again.status() << " of " << text;
    ASSERT_TRUE(ParseManifest(*again, "again").ok()) << text;
  }
  EXPECT_GT(taken, cases / 100);
}

}  // namespace
}  // namespace muster
