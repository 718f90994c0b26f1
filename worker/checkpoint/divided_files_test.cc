#include "worker/checkpoint/divided_files.h"

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Manifest Holding(const std::vector<std::string>& names) {
  Manifest manifest;
  for (const std::string& name : names) manifest.files.emplace_back().name = name;
  return manifest;
}

TEST(DivideTensors, FewTensors_AreSpreadWholeAndInOrder) {
  const auto files =
      DivideTensors({{"a", 10}, {"b", 40}, {"c", 10}, {"d", 20}, {"e", 0}}, /*ranks=*/2);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].rank, 0);
  EXPECT_THAT(files[0].tensors, ElementsAre("b", "e"));
  EXPECT_EQ(files[1].rank, 1);
  EXPECT_THAT(files[1].tensors, ElementsAre("a", "c", "d"));
}

TEST(DivideTensors, BeyondTheLimit_ARankWritesSeveralFiles) {
  const auto files = DivideTensors({{"a", 6}, {"b", 6}, {"c", 20}, {"d", 1}}, /*ranks=*/1, 12);
  ASSERT_EQ(files.size(), 3u);
  EXPECT_THAT(files[0].tensors, ElementsAre("a", "b"));
  EXPECT_THAT(files[1].tensors, ElementsAre("c"));
  EXPECT_THAT(files[2].tensors, ElementsAre("d"));
}

// A Llama of 405 billion parameters in fp32 on 2,816 ranks: 126 blocks of 53248 x 16384.
TEST(DivideTensors, 2816Ranks_NoRankHasMoreThanTheAverageAndOneTensor) {
  std::vector<SizedTensor> tensors = {{"embed", 4ll * 128256 * 16384},
                                      {"head", 4ll * 128256 * 16384}};
  int64_t total = 2 * tensors[0].bytes;
  for (int block = 0; block < 126; ++block) {
    const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
      tensors.push_back({absl::StrCat("layers.", block, ".", name), 4 * rows * columns});
      total += 4 * rows * columns;
    };
    for (const char* name : {"gate", "up", "down"}) add(name, 53248, 16384);
    for (const char* name : {"q", "o"}) add(name, 16384, 16384);
    for (const char* name : {"k", "v"}) add(name, 1024, 16384);
    for (const char* name : {"norm1", "norm2"}) add(name, 16384, 1);
  }
  for (const int ranks : {1, 8, 100, 2816}) {
    const auto files = DivideTensors(tensors, ranks);
    std::map<std::string, int64_t> bytes;
    for (const SizedTensor& tensor : tensors) bytes[tensor.name] = tensor.bytes;
    std::map<int, int64_t> of_rank;
    std::set<std::string> seen;
    for (const DividedFile& file : files) {
      int64_t in_file = 0;
      for (const std::string& name : file.tensors) {
        EXPECT_TRUE(seen.insert(name).second) << name;
        in_file += bytes[name];
      }
      of_rank[file.rank] += in_file;
      EXPECT_TRUE(in_file <= kMaxDividedBytes || file.tensors.size() == 1);
    }
    EXPECT_EQ(seen.size(), tensors.size());
    EXPECT_EQ(files[0].rank, 0);
    for (const auto& [rank, sum] : of_rank) {
      EXPECT_LE(sum, total / ranks + tensors[0].bytes) << rank << " of " << ranks;
    }
  }
}

TEST(PartFileName, IsThatOfHuggingFacesShards) {
  EXPECT_EQ(PartFileName("model.safetensors", 0, 4), "model-00001-of-00004.safetensors");
  EXPECT_EQ(PartFileName("model_1.safetensors", 11, 12), "model_1-00012-of-00012.safetensors");
}

TEST(PartsOf, AllParts_AreInOrder) {
  const Manifest manifest =
      Holding({"model-00002-of-00002.safetensors", "model.safetensors.x", "model_1.safetensors",
               "model-00001-of-00002.safetensors", "model-abcde-of-00009.safetensors",
               "model-1-of-9.safetensors", "optimizer.safetensors"});
  EXPECT_THAT(*PartsOf(manifest, "model.safetensors"),
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"));
  EXPECT_THAT(*PartsOf(manifest, "optimizer.safetensors"), IsEmpty());
  EXPECT_THAT(*FilesOfModel(manifest, "model_1.safetensors"), ElementsAre("model_1.safetensors"));
  EXPECT_THAT(*FilesOfModel(manifest, "model_2.safetensors"), IsEmpty());
}

TEST(PartsOf, MissingPart_IsNamed) {
  EXPECT_THAT(
      std::string(PartsOf(Holding({"m-00001-of-00002.st", "x"}), "m.st").status().message()),
      HasSubstr("m-00002-of-00002.st"));
  EXPECT_EQ(PartsOf(Holding({"m-00001-of-99999.st"}), "m.st").status().code(),
            absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace muster
