#include "worker/checkpoint/node_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/digest.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kBlock = 4096;

// Two nodes of two ranks. Node 0 has "a" and "small"; node 2 has "b", "tiny" and "small".
class NodeExchangeTest : public testing::Test {
 protected:
  NodeExchangeTest() {
    for (const char* name : {"a", "b", "small", "tiny"}) Add(name);
    nodes_ = {.leader_of = {0, 0, 2, 2},
              .holders = {{"a", {0}}, {"b", {2}}, {"small", {0, 2}}, {"tiny", {2}}}};
  }

  void Add(const std::string& name) {
    const bool large = name.size() == 1;
    std::string header = absl::StrCat("{\"__metadata__\":{\"name\":\"", name, "\"}}");
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    bytes += header;
    // A safetensors file has no bytes without a tensor; the bytes that follow are never parsed
    // here.
    if (large) {
      const size_t data = 5 * kBlock + 100 - bytes.size() - 80;
      const std::string tensor = absl::StrCat("{\"t\":{\"dtype\":\"U8\",\"shape\":[", data,
                                              "],\"data_offsets\":[0,", data, "]}}");
      bytes = std::string(8, '\0') + tensor;
      bytes[0] = static_cast<char>(tensor.size());
      for (size_t i = 0; i < data; ++i) bytes += static_cast<char>(i * 31 + i / kBlock + name[0]);
    }
    ManifestFile file{.name = name, .rank = 0, .digest = DigestBytes(bytes)};
    if (large) {
      file.blocks.block_bytes = kBlock;
      for (size_t at = 0; at < bytes.size(); at += kBlock) {
        file.blocks.xxh3.push_back(DigestBlock(absl::string_view(bytes).substr(at, kBlock)));
      }
    }
    contents_[name] = bytes;
    manifest_.files.push_back(file);
  }

  void SetUp() override {
    for (const auto& [name, leaders] : nodes_.holders) {
      for (const int leader : leaders) {
        ASSERT_TRUE(MakeDirectories(Disk(leader)).ok());
        ASSERT_TRUE(WriteFileAtomically(JoinPath(Disk(leader), name), contents_[name]).ok());
      }
    }
  }

  std::string Disk(int rank) const {
    return folder_.Path(absl::StrCat("node_", nodes_.leader_of[rank]));
  }

  std::vector<ManifestFile> Large() const { return {*manifest_.Find("a"), *manifest_.Find("b")}; }

  void Damage(int leader, const std::string& name, size_t at) {
    std::string bytes = contents_[name];
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    ASSERT_TRUE(WriteFileAtomically(JoinPath(Disk(leader), name), bytes).ok());
  }

  // Returns what comes to this rank, by file and offset, if every rank needs all of "a" and "b".
  // `mine`: this rank's error.
  std::map<std::pair<std::string, uint64_t>, std::string> MoveAll(Comm& comm, absl::Status* mine) {
    const std::vector<ManifestFile> files = {*manifest_.Find("a"), *manifest_.Find("b"),
                                             *manifest_.Find("tiny")};
    BlockSet all(files);
    for (size_t i = 0; i < files.size(); ++i) all.AddRange(files, i, {.begin = 0, .end = 1 << 20});
    const BlockNeeds needs{.host_of = {0, 0, 2, 2},
                           .needed = std::vector<std::string>(4, all.text())};
    std::map<std::pair<std::string, uint64_t>, std::string> came;
    const auto moved = MoveBlocks(
        comm, Disk(comm.rank()), files, nodes_, needs, {.block_bytes = kBlock},
        [&](size_t file, uint64_t offset, absl::string_view block) {
          came[{files[file].name, offset}] = std::string(block);
          return absl::OkStatus();
        },
        mine);
    EXPECT_TRUE(moved.ok()) << moved.status();
    if (mine->ok()) {
      EXPECT_EQ(*moved, comm.rank() < 2 ? contents_["b"].size() + contents_["tiny"].size()
                                        : contents_["a"].size());
    }
    return came;
  }

  const TestFolder folder_;
  std::map<std::string, std::string> contents_;
  Manifest manifest_;  // sorted by name
  FilesOnNodes nodes_;
};

TEST_F(NodeExchangeTest, Blocks_ComeToTheNodesThatLackThem) {
  for (const bool gloo : {false, true}) {
    std::vector<std::map<std::pair<std::string, uint64_t>, std::string>> came(4);
    const auto move = [&](Comm& comm) {
      absl::Status mine;
      came[comm.rank()] = MoveAll(comm, &mine);
      EXPECT_TRUE(mine.ok()) << mine;
    };
    if (gloo) {
      RunGlooRanks(4, move);
    } else {
      RunRanks(4, move);
    }
    for (const int leader : {0, 2}) {
      std::map<std::string, std::string> files;
      for (const int rank : {leader, leader + 1}) {
        EXPECT_GE(came[rank].size(), 3u) << "both take a share";
        for (const auto& [at, block] : came[rank]) {
          std::string& bytes = files[at.first];
          bytes.resize(contents_[at.first].size());
          bytes.replace(at.second, block.size(), block);
        }
      }
      if (leader == 0) {
        EXPECT_EQ(files.at("b"), contents_["b"]);
        EXPECT_EQ(files.at("tiny"), contents_["tiny"]);
      } else {
        EXPECT_EQ(files.at("a"), contents_["a"]);
      }
      EXPECT_EQ(files.size(), leader == 0 ? 2u : 1u);
    }
  }
}

TEST_F(NodeExchangeTest, DamagedBlock_IsNamedByItsSender_AndTheOthersGoOn) {
  Damage(2, "b", 3 * kBlock + 1);
  std::atomic<int> named = 0;
  RunRanks(4, [&](Comm& comm) {
    absl::Status mine;
    MoveAll(comm, &mine);
    // Blocks 0, 2 and 4 come from one rank, 1, 3 and 5 from the other.
    if (mine.ok()) return;
    ++named;
    EXPECT_GE(comm.rank(), 2);
    EXPECT_TRUE(absl::IsDataLoss(mine)) << mine;
    EXPECT_THAT(std::string(mine.message()), HasSubstr(JoinPath(Disk(2), "b")));
  });
  EXPECT_EQ(named, 1);
}

TEST_F(NodeExchangeTest, FileThatIsGone_IsAnErrorOfItsSender) {
  ASSERT_EQ(unlink(JoinPath(Disk(2), "b").c_str()), 0);
  RunRanks(4, [&](Comm& comm) {
    absl::Status mine;
    MoveAll(comm, &mine);
    EXPECT_EQ(mine.ok(), comm.rank() < 2) << mine;
    EXPECT_EQ(absl::IsNotFound(mine), comm.rank() >= 2) << mine;
  });
}

TEST_F(NodeExchangeTest, RankThatCannotTakeABlock_KeepsUp) {
  RunRanks(4, [&](Comm& comm) {
    absl::Status mine = comm.rank() == 3 ? absl::ResourceExhaustedError("full") : absl::OkStatus();
    const auto came = MoveAll(comm, &mine);
    EXPECT_EQ(came.empty(), comm.rank() == 3);
    EXPECT_EQ(absl::IsResourceExhausted(mine), comm.rank() == 3);
  });
}

TEST_F(NodeExchangeTest, Files_ComeToTheRanksThatWantThem) {
  RunRanks(4, [&](Comm& comm) {
    const std::vector<std::string> wanted =
        comm.rank() == 1 ? std::vector<std::string>{"tiny", "small", "none", "b"}
                         : std::vector<std::string>{"small"};
    const auto files = GatherFiles(comm, Disk(comm.rank()), manifest_, nodes_, wanted);
    ASSERT_TRUE(files.ok()) << files.status();
    if (comm.rank() != 1) {
      EXPECT_THAT(*files, IsEmpty());
      return;
    }
    EXPECT_THAT(*files,
                UnorderedElementsAre(Pair("tiny", contents_["tiny"]), Pair("b", contents_["b"])));
  });
}

TEST_F(NodeExchangeTest, FileThatArrivesAsAnother_OrIsGone_IsTheSameErrorOnAllRanks) {
  const auto gather = [&](const std::function<void(const absl::Status&)>& see) {
    RunRanks(4, [&](Comm& comm) {
      see(GatherFiles(comm, Disk(comm.rank()), manifest_, nodes_, {"tiny"}).status());
    });
  };
  Damage(2, "tiny", 3);
  gather([&](const absl::Status& status) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 0: "), HasSubstr("tiny"), HasSubstr("rank 2 sent")));
  });
  ASSERT_EQ(unlink(JoinPath(Disk(2), "tiny").c_str()), 0);
  gather([&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnknown) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 2: "), HasSubstr(JoinPath(Disk(2), "tiny"))));
  });
}

TEST_F(NodeExchangeTest, Headers_ComeToEveryRank) {
  RunRanks(4, [&](Comm& comm) {
    const auto headers = GatherHeaders(comm, Disk(comm.rank()), Large(), nodes_);
    ASSERT_TRUE(headers.ok()) << headers.status();
    EXPECT_THAT(*headers, ElementsAre(Key("a"), Key("b")));
    for (const auto& [name, header] : *headers) {
      ASSERT_GT(header.size(), 20u);
      EXPECT_EQ(header, contents_[name].substr(0, header.size()));
      EXPECT_EQ(header.back(), '}');
    }
    EXPECT_THAT(*GatherHeaders(comm, Disk(comm.rank()), {}, nodes_), IsEmpty());
  });
}

TEST_F(NodeExchangeTest, DamagedHeader_IsTheSameErrorOnAllRanks) {
  for (const size_t at : {size_t{12}, size_t{2000}}) {
    Damage(0, "a", at);
    RunRanks(4, [&](Comm& comm) {
      const absl::Status status = GatherHeaders(comm, Disk(comm.rank()), Large(), nodes_).status();
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(JoinPath(Disk(0), "a")));
    });
  }
}

}  // namespace
}  // namespace muster
