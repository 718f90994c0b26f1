#include "worker/checkpoint/block_transfers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/checkpoint/digest.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kBlock = uint64_t{8} << 20;

ManifestFile FileOfBytes(const std::string& name, uint64_t bytes) {
  ManifestFile file{.name = name, .rank = 0, .digest = {.bytes = bytes, .xxh3 = "x"}};
  if (bytes <= kBlock) return file;
  file.blocks.block_bytes = kBlock;
  file.blocks.xxh3.resize((bytes + kBlock - 1) / kBlock);
  return file;
}

std::string Needs(const std::vector<ManifestFile>& files,
                  const std::vector<std::pair<size_t, FileRange>>& ranges) {
  BlockSet needed(files);
  for (const auto& [file, range] : ranges) needed.AddRange(files, file, range);
  return needed.text();
}

std::vector<std::tuple<size_t, uint64_t, int, int>> Moves(const std::vector<BlockTransfer>& plan) {
  std::vector<std::tuple<size_t, uint64_t, int, int>> moves;
  for (const BlockTransfer& one : plan) moves.emplace_back(one.file, one.block, one.from, one.to);
  std::sort(moves.begin(), moves.end());
  return moves;
}

uint64_t BytesOf(const std::vector<ManifestFile>& files, const BlockTransfer& one) {
  const FileRange range = RangeOfBlock(files[one.file], one.block);
  return range.end - range.begin;
}

TEST(BlockTransfers, BlocksOfAFile_AreThoseOfItsDigestsOrAllOfIt) {
  const ManifestFile large = FileOfBytes("a", 2 * kBlock + 5), small = FileOfBytes("b", 7);
  EXPECT_EQ(CountBlocks(large), 3u);
  EXPECT_EQ(CountBlocks(small), 1u);
  EXPECT_EQ(CountBlocks(FileOfBytes("c", 0)), 0u);
  EXPECT_EQ(RangeOfBlock(large, 2).begin, 2 * kBlock);
  EXPECT_EQ(RangeOfBlock(large, 2).end, 2 * kBlock + 5);
  EXPECT_EQ(RangeOfBlock(small, 0).end, 7u);
}

TEST(BlockTransfers, BlockWithAnotherDigest_IsNamed) {
  ManifestFile whole{.name = "a", .rank = 0, .digest = DigestBytes("seven b")};
  EXPECT_TRUE(CheckBlockOf(whole, 0, "seven b", "/d/a").ok());
  const absl::Status other = CheckBlockOf(whole, 0, "seven c", "/d/a");
  EXPECT_TRUE(absl::IsDataLoss(other));
  EXPECT_THAT(std::string(other.message()), AllOf(HasSubstr("/d/a"), HasSubstr("bytes 0 to 7")));
  whole.blocks = {.block_bytes = 4, .xxh3 = {DigestBlock("seve"), DigestBlock("n b")}};
  EXPECT_TRUE(CheckBlockOf(whole, 1, "n b", "").ok());
  EXPECT_FALSE(CheckBlockOf(whole, 1, "n c", "").ok());
  EXPECT_FALSE(CheckBlockOf(whole, 1, "n", "").ok());
}

TEST(BlockTransfers, Node_GetsTheBlocksThatItLacksAndNeedsEachOnce) {
  // Two nodes of two ranks; node 0 has "a", node 2 has "b", both have "c".
  const std::vector<ManifestFile> files = {FileOfBytes("a", 3 * kBlock), FileOfBytes("b", 9),
                                           FileOfBytes("c", 2 * kBlock)};
  const FilesOnNodes nodes{.leader_of = {0, 0, 2, 2},
                           .holders = {{"a", {0}}, {"b", {2}}, {"c", {0, 2}}}};
  EXPECT_TRUE(nodes.Has(1, "a") && nodes.Has(2, "b") && !nodes.Has(3, "a") && !nodes.Has(0, "x"));
  const std::vector<std::string> needed = {
      Needs(files, {{1, {.begin = 0, .end = 9}}}),
      Needs(files, {{0, {.begin = 0, .end = 3 * kBlock}}, {2, {.begin = 0, .end = 5}}}),
      Needs(files, {{0, {.begin = kBlock, .end = kBlock + 1}}, {2, {.begin = 0, .end = 5}}}),
      Needs(files, {{0, {.begin = kBlock - 1, .end = kBlock + 1}}})};
  const auto plan = PlanTransfers(files, nodes, {0, 0, 2, 2}, needed);
  EXPECT_THAT(Moves(plan),
              ElementsAre(std::tuple(0, 0, 0, 2), std::tuple(0, 1, 1, 3), std::tuple(1, 0, 3, 1)));
  // Ranks that do not share memory each get what they need.
  EXPECT_THAT(Moves(PlanTransfers(files, nodes, {0, 1, 2, 3}, needed)),
              ElementsAre(std::tuple(0, 0, 0, 3), std::tuple(0, 1, 1, 2), std::tuple(0, 1, 1, 3),
                          std::tuple(1, 0, 3, 0)));
}

TEST(BlockTransfers, NobodyLacksAnything_NothingMoves) {
  const std::vector<ManifestFile> files = {FileOfBytes("a", 3 * kBlock)};
  const FilesOnNodes nodes{.leader_of = {0, 1}, .holders = {{"a", {0, 1}}}};
  const std::string all = Needs(files, {{0, {.begin = 0, .end = 3 * kBlock}}});
  EXPECT_THAT(PlanTransfers(files, nodes, {0, 1}, {all, all}), IsEmpty());
  const FilesOnNodes one{.leader_of = {0, 1}, .holders = {{"a", {0}}}};
  EXPECT_THAT(PlanTransfers(files, one, {0, 1}, {all, Needs(files, {})}), IsEmpty());
}

TEST(BlockTransfers, NodesThatHaveAFile_TakeTurns) {
  const std::vector<ManifestFile> files = {FileOfBytes("a", 8 * kBlock)};
  const FilesOnNodes nodes{.leader_of = {0, 1, 2}, .holders = {{"a", {0, 1}}}};
  const std::string all = Needs(files, {{0, {.begin = 0, .end = 8 * kBlock}}});
  std::map<int, int> sent;
  for (const BlockTransfer& one : PlanTransfers(files, nodes, {0, 1, 2}, {all, all, all})) {
    EXPECT_EQ(one.to, 2);
    ++sent[one.from];
  }
  EXPECT_EQ(sent[0], 4);
  EXPECT_EQ(sent[1], 4);
}

TEST(BlockTransfers, BlockThatIsLargerThanARound_MovesAlone) {
  const std::vector<ManifestFile> files = {FileOfBytes("a", 3 * kBlock)};
  const FilesOnNodes nodes{.leader_of = {0, 1}, .holders = {{"a", {0}}}};
  const std::string all = Needs(files, {{0, {.begin = 0, .end = 3 * kBlock}}});
  const auto plan = PlanTransfers(files, nodes, {0, 1}, {all, all}, /*round_bytes=*/1);
  EXPECT_THAT(plan, ElementsAre(Field(&BlockTransfer::round, 0), Field(&BlockTransfer::round, 1),
                                Field(&BlockTransfer::round, 2)));
}

// A part of a model of 405 billion parameters in 126 layers: the files of some layers, for one of
// three kinds of tensors (parameters and both moments), as the ranks of 352 nodes have written
// them. A rank needs a 2,816th of each layer.
TEST(BlockTransfers, EachOf352Nodes_GetsItsPartAlone_FromAllAtTheSameTime) {
  constexpr int kRanks = 2816, kPerNode = 8, kLayers = 12, kFilesOfLayer = 25;
  constexpr uint64_t kLayerBytes = uint64_t{405'000'000'000} / 126 * 4;
  constexpr uint64_t kFileBytes = kLayerBytes / kFilesOfLayer + 1;
  FilesOnNodes nodes;
  std::vector<int> host_of;
  for (int rank = 0; rank < kRanks; ++rank) {
    nodes.leader_of.push_back(rank / kPerNode * kPerNode);
    host_of.push_back(nodes.leader_of.back());
  }
  std::vector<ManifestFile> files;
  for (int i = 0; i < kLayers * kFilesOfLayer; ++i) {
    files.push_back(FileOfBytes(absl::StrCat("file_", i), kFileBytes));
    files.back().rank = i * kPerNode + i % kPerNode;
    nodes.holders[files.back().name] = {nodes.leader_of[files.back().rank]};
  }
  // Before the change, each node received the whole checkpoint.
  const uint64_t whole = files.size() * kFileBytes;
  std::vector<std::string> needed;
  for (int rank = 0; rank < kRanks; ++rank) {
    BlockSet mine(files);
    for (int layer = 0; layer < kLayers; ++layer) {
      const uint64_t begin = kLayerBytes / kRanks * rank, end = kLayerBytes / kRanks * (rank + 1);
      for (int i = 0; i < kFilesOfLayer; ++i) {
        const uint64_t from = kFileBytes * i, to = kFileBytes * (i + 1);
        if (end <= from || begin >= to) continue;
        mine.AddRange(files, layer * kFilesOfLayer + i,
                      {.begin = std::max(begin, from) - from, .end = std::min(end, to) - from});
      }
    }
    needed.push_back(mine.text());
  }
  const auto plan = PlanTransfers(files, nodes, host_of, needed);

  std::map<int, uint64_t> received, sent;                // by node
  std::map<std::pair<int, int>, uint64_t> in, out;       // by rank and round
  std::set<std::tuple<int, size_t, uint64_t>> of_nodes;  // node, file and block
  for (const BlockTransfer& one : plan) {
    const uint64_t bytes = BytesOf(files, one);
    const int node = nodes.leader_of[one.to];
    EXPECT_TRUE(of_nodes.emplace(node, one.file, one.block).second) << "twice to one node";
    EXPECT_NE(nodes.leader_of[one.from], node);
    received[node] += bytes;
    sent[nodes.leader_of[one.from]] += bytes;
    in[{one.to, one.round}] += bytes;
    out[{one.from, one.round}] += bytes;
  }
  // A block that two nodes need goes to both: up to two more for each layer, and as many where a
  // file ends and the next one begins.
  const uint64_t share = kLayers * (kLayerBytes / kRanks * kPerNode + 4 * kBlock);
  for (const auto& [node, bytes] : received) {
    EXPECT_LE(bytes, share) << node;
    EXPECT_LT(bytes, whole / 150) << node;
    // The node may already have what it needs of a few layers.
    EXPECT_GE(bytes, (kLayers - 3) * (kLayerBytes / kRanks * kPerNode)) << node;
  }
  EXPECT_EQ(received.size(), 352u);
  for (const auto& [at, bytes] : in) EXPECT_LE(bytes, kRoundBytes);
  for (const auto& [at, bytes] : out) EXPECT_LE(bytes, kRoundBytes);
  // A node sends its file once, and some blocks again that two nodes need.
  for (const auto& [node, bytes] : sent) EXPECT_LE(bytes, kFileBytes * 3 / 2) << node;
  // If the nodes took turns, it would take as many rounds as all of them have blocks to send.
  uint64_t all = 0;
  for (const auto& [node, bytes] : sent) all += bytes;
  const uint64_t one_by_one = all / kRoundBytes;
  EXPECT_LT(static_cast<uint64_t>(plan.back().round), one_by_one / 100);
}

TEST(BlockTransfers, TextOfOtherFiles_NeedsNothing) {
  const std::vector<ManifestFile> files = {FileOfBytes("a", 30 * kBlock)};
  BlockSet other(files, "x");
  for (uint64_t block = 0; block < 30; ++block) EXPECT_FALSE(other.Has(0, block));
  other.AddRange(files, 0, {.begin = 0, .end = UINT64_MAX});
  for (uint64_t block = 0; block < 30; ++block) EXPECT_TRUE(other.Has(0, block));
}

}  // namespace
}  // namespace muster
