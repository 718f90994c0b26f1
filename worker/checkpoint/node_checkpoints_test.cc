#include "worker/checkpoint/node_checkpoints.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_hidden_path.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/staged_save.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/test_eventful_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {
// For this thread, a rank: the next allocation of so many bytes throws. 0: none does.
thread_local size_t failing_bytes = 0;
}  // namespace
}  // namespace muster

void* operator new(size_t bytes) {
  if (muster::failing_bytes != 0 && bytes >= muster::failing_bytes) {
    muster::failing_bytes = 0;
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Two nodes of two ranks; the disk of node i is the folder root_/node_i.
class NodeCheckpointsTest : public testing::Test {
 protected:
  static int NodeOf(const Comm& comm) { return comm.rank() / 2; }
  std::string Disk(int node) const { return JoinPath(root_, "node_" + std::to_string(node)); }
  std::string Dir(int node) const { return JoinPath(Disk(node), "ckpt"); }

  static absl::Status WriteAll(StateWriter& writer, double value) {
    if (writer.rank() == 0) {
      const absl::Status model = writer.WriteModel(ModelFileName(0), {{"w", at::full({3}, value)}});
      if (!model.ok()) return model;
    }
    StateDict random;
    random.SetTensor("cpu", at::full({2}, 10 * value + writer.rank()));
    return writer.Write(RandomStatesFileName(writer.rank()), random);
  }

  static absl::Status Save(Comm& comm, const std::string& dir, double value, int64_t step) {
    return SaveCheckpoint(
        comm, dir, {.step = step}, [&](StateWriter& writer) { return WriteAll(writer, value); },
        NodeOf(comm));
  }
  absl::Status SaveNumbered(Comm& comm, int64_t iteration, int total_limit = 0) {
    return SaveNumberedCheckpoint(
        comm, CheckpointFolder(Disk(NodeOf(comm))), {.iteration = iteration, .step = iteration},
        total_limit,
        [&](StateWriter& writer) { return WriteAll(writer, static_cast<double>(iteration)); },
        NodeOf(comm));
  }

  static absl::StatusOr<StateReader> Open(Comm& comm, const std::string& dir,
                                          const CheckpointFolder& folder,
                                          const std::vector<std::string>& damaged = {}) {
    const std::string parent = dir.empty() ? folder.root() : ParentPath(dir);
    const auto groups = FindNodeGroups(comm, parent, NodeOf(comm));
    if (!groups.ok()) return groups.status();
    return OpenCheckpointOnNodes(comm, dir, folder, *groups, nullptr, damaged);
  }
  // `damaged`: whether a file of it was found damaged before.
  absl::StatusOr<StateReader> OpenDir(Comm& comm, bool damaged = false) {
    const std::string dir = Dir(NodeOf(comm));
    return Open(comm, dir, CheckpointFolder(""),
                damaged ? std::vector<std::string>{dir} : std::vector<std::string>());
  }
  absl::StatusOr<StateReader> OpenNewest(Comm& comm) {
    return Open(comm, "", CheckpointFolder(Disk(NodeOf(comm))));
  }

  static double ModelOf(const StateReader& reader) {
    const auto model = reader.Read(ModelFileName(0));
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? model->GetTensor("w")->mean().item<double>() : -1;
  }
  static double RandomOf(const StateReader& reader, int rank) {
    const auto random = reader.Read(RandomStatesFileName(rank));
    EXPECT_TRUE(random.ok()) << random.status();
    return random.ok() ? random->GetTensor("cpu")->mean().item<double>() : -1;
  }

  static void FlipBit(const std::string& path) {
    absl::StatusOr<std::string> bytes = ReadFile(path);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    bytes->back() ^= 1;
    ASSERT_TRUE(WriteFileAtomically(path, *bytes).ok());
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
};

TEST_F(NodeCheckpointsTest, Groups_OfDisksOfTheirOwn_HaveALeaderEach) {
  RunRanks(4, [&](Comm& comm) {
    const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), NodeOf(comm));
    ASSERT_TRUE(groups.ok()) << groups.status();
    EXPECT_THAT(groups->leader_of, ElementsAre(0, 0, 2, 2));
    EXPECT_EQ(groups->nodes.size(), 2u);
    EXPECT_EQ(groups->leads(), comm.rank() % 2 == 0);
    EXPECT_THAT(groups->Describe(2), HasSubstr("(ranks 2, 3)"));
  });
  EXPECT_THAT(*ListDirectory(Disk(0)), testing::IsEmpty());
}

TEST_F(NodeCheckpointsTest, ProbeOfARankThatDied_IsRemovedByTheNextOne) {
  const std::string left = JoinPath(root_, ".muster-node-0123456789abcdef");
  const std::string live = JoinPath(root_, ".muster-node-0123456789abcde0");
  const std::string other = JoinPath(root_, ".muster-node-of-the-user");
  // The probe of a rank on a machine whose locks are not visible here.
  const std::string young = JoinPath(root_, ".muster-node-0123456789abcde1");
  for (const std::string& path : {left, live, other, young}) {
    ASSERT_TRUE(MakeDirectories(path).ok());
    const timespec long_ago[2] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1, .tv_nsec = 0}};
    if (path != young) {
      ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), long_ago, 0), 0);
    }
  }
  const OwnedFd lock(LockFolder(live));
  ASSERT_TRUE(lock.open());
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(FindNodeGroups(comm, root_, NodeOf(comm)).ok()); });
  EXPECT_FALSE(PathExists(left));
  EXPECT_TRUE(PathExists(live));
  EXPECT_TRUE(PathExists(other));
  EXPECT_TRUE(PathExists(young));
}

TEST_F(NodeCheckpointsTest, Groups_OfNodesThatMountOneFolder_AreOne) {
  RunRanks(4, [&](Comm& comm) {
    const auto groups = FindNodeGroups(comm, root_, NodeOf(comm));
    ASSERT_TRUE(groups.ok()) << groups.status();
    EXPECT_THAT(groups->leader_of, ElementsAre(0, 0, 0, 0));
    EXPECT_EQ(groups->nodes.size(), 1u);
  });
}

// Machines from one image have one host name; launches on one host may have a folder each.
TEST_F(NodeCheckpointsTest, Groups_OfOneNodeWithTwoFolders_AreTwo) {
  RunRanks(4, [&](Comm& comm) {
    const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), /*node=*/0);
    ASSERT_TRUE(groups.ok()) << groups.status();
    EXPECT_THAT(groups->leader_of, ElementsAre(0, 0, 2, 2));
  });
}

TEST_F(NodeCheckpointsTest, FolderThatCannotBeMade_IsAnErrorOnEveryRank) {
  ASSERT_TRUE(WriteFileAtomically(Disk(1), "a file").ok());
  RunRanks(4, [&](Comm& comm) {
    const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), NodeOf(comm));
    EXPECT_THAT(std::string(groups.status().message()),
                AllOf(StartsWith("rank 2: "), HasSubstr("node_1")));
  });
}

TEST_F(NodeCheckpointsTest, Save_KeepsOnEachNodeWhatItsRanksWrote_AndLoadFetchesTheRest) {
  RunRanks(4, [&](Comm& comm) {
    const absl::Status saved = Save(comm, Dir(NodeOf(comm)), 1.5, 7);
    ASSERT_TRUE(saved.ok()) << saved;
  });
  EXPECT_THAT(*ListDirectory(Dir(0)),
              ElementsAre("manifest.json", "model.safetensors", "random_states_0.safetensors",
                          "random_states_1.safetensors", kSealName));
  EXPECT_THAT(*ListDirectory(Dir(1)), ElementsAre("manifest.json", "random_states_2.safetensors",
                                                  "random_states_3.safetensors", kSealName));
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenDir(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->dir(), Dir(NodeOf(comm)));
    EXPECT_EQ(reader->info().step, 7);
    EXPECT_EQ(reader->manifest().nodes.size(), 2u);
    EXPECT_EQ(ModelOf(*reader), 1.5);
    EXPECT_EQ(RandomOf(*reader, comm.rank()), 15 + comm.rank());
  });
  EXPECT_EQ(*ListDirectory(Dir(0)), *ListDirectory(Dir(1)));
  EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("ckpt"));
  EXPECT_TRUE(VerifyCheckpoint(Dir(1), VerifyLevel::kContents).ok());
}

// Every node has the same record of what all of them hold.
TEST_F(NodeCheckpointsTest, Saves_AreSealedOnEveryNode_InAChain) {
  RunRanks(4, [&](Comm& comm) {
    for (int number = 0; number < 2; ++number) ASSERT_TRUE(SaveNumbered(comm, number).ok());
  });
  std::string previous;
  for (int number = 0; number < 2; ++number) {
    const std::string first = CheckpointFolder(Disk(0)).PathOf(number);
    for (int node = 0; node < 2; ++node) {
      const std::string dir = CheckpointFolder(Disk(node)).PathOf(number);
      const auto seal = ReadSeal(dir);
      ASSERT_TRUE(seal.ok()) << seal.status();
      const absl::Status checked = CheckSeal(dir, *ReadManifest(dir), *seal);
      EXPECT_TRUE(checked.ok()) << checked;
      EXPECT_EQ(seal->sha256, ReadSeal(first)->sha256);
      EXPECT_EQ(seal->previous_sha256, previous);
      EXPECT_EQ(seal->ranks, 4);
    }
    previous = ReadSeal(first)->sha256;
  }
}

// Memory runs out between the exchanges of a load, in which the other ranks would wait.
TEST_F(NodeCheckpointsTest, RankWithoutMemory_TellsTheOthers) {
  constexpr size_t kLarge = 1 << 20;
  const auto save = [&](int64_t number) {
    RunRanks(4, [&](Comm& comm) {
      const absl::Status saved = SaveNumberedCheckpoint(
          comm, CheckpointFolder(Disk(NodeOf(comm))), {.iteration = number}, 0,
          [&](StateWriter& writer) {
            StateDict large;
            large.SetTensor("w", at::full({kLarge}, 1.0));
            return writer.Write(RandomStatesFileName(writer.rank()), large);
          },
          NodeOf(comm));
      ASSERT_TRUE(saved.ok()) << saved;
    });
  };
  const auto pad = [&](const std::string& path) {
    const absl::StatusOr<std::string> text = ReadFile(path);
    ASSERT_TRUE(text.ok()) << text.status();
    ASSERT_TRUE(WriteFileAtomically(path, *text + std::string(kLarge, ' ')).ok());
  };
  // Makes `rank` lack memory from its `moment`-th exchange of bytes on.
  const auto open = [&](int rank, int moment, const std::function<void(const absl::Status&)>& see) {
    RunRanks(4, [&](Comm& whole) {
      const auto groups = FindNodeGroups(whole, Disk(NodeOf(whole)), NodeOf(whole));
      ASSERT_TRUE(groups.ok()) << groups.status();
      EventfulComm comm(whole, whole.rank() == rank ? moment : -1, [] { failing_bytes = kLarge; });
      const CheckpointFolder folder(Disk(NodeOf(whole)));
      see(OpenCheckpointOnNodes(comm, "", folder, *groups).status());
      EXPECT_EQ(failing_bytes, 0u) << "nothing failed";
      failing_bytes = 0;
    });
  };
  const auto is_told = [](const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 2: "), HasSubstr("bad_alloc")));
  };
  save(0);
  {
    SCOPED_TRACE("sends a file: it is sent again, as what a disk does not give at once");
    open(0, 0, [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
  }
  save(1);
  for (const int node : {0, 1}) {
    pad(JoinPath(CheckpointFolder(Disk(node)).PathOf(1), kManifestName));
  }
  {
    SCOPED_TRACE("reads a manifest");
    open(2, 6, is_told);
  }
  const std::string sealed = CheckpointFolder(Disk(1)).PathOf(1);
  ASSERT_TRUE(WriteSeal(sealed, RegisteredCheckpoint()).ok());
  pad(JoinPath(sealed, kSealName));
  {
    SCOPED_TRACE("reads a seal");
    open(2, 0, is_told);
  }
}

TEST_F(NodeCheckpointsTest, HoldingBack_IsRefusedBeforeAnythingIsWritten) {
  std::atomic<int> writes = 0;
  RunRanks(4, [&](Comm& comm) {
    const absl::Status saved = SaveCheckpoint(
        comm, Dir(NodeOf(comm)), {.step = 1}, PublishOptions{.promote = false},
        [&](StateWriter& writer) {
          ++writes;
          return WriteAll(writer, 1);
        },
        NodeOf(comm));
    EXPECT_TRUE(absl::IsFailedPrecondition(saved)) << saved;
    EXPECT_THAT(std::string(saved.message()), HasSubstr("options.checkpoint.promote is false"));
  });
  EXPECT_EQ(writes, 0);
  EXPECT_FALSE(PathExists(Dir(0)));
}

TEST_F(NodeCheckpointsTest, FreshNode_GetsTheWholeCheckpoint) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 2, 1).ok()); });
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm).ok()); });
  ASSERT_TRUE(RemoveTree(Disk(0)).ok());
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenDir(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 2);
  });
  EXPECT_EQ(*ListDirectory(Dir(0)), *ListDirectory(Dir(1)));
}

// Like a checkpoint of another run, whose parts no other node has.
TEST_F(NodeCheckpointsTest, AnotherCheckpointOfTheName_IsNotReplacedWhereItIsPinned) {
  const std::string aside = JoinPath(root_, "aside");
  for (const int64_t step : {1, 2}) {
    RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 2, step).ok()); });
    RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm).ok()); });
    if (step == 1) std::filesystem::copy(Dir(1), aside);
  }
  ASSERT_TRUE(RemoveTree(Dir(1)).ok());
  ASSERT_EQ(rename(aside.c_str(), Dir(1).c_str()), 0);
  ASSERT_TRUE(WriteFileAtomically(JoinPath(Dir(1), kPinName), "").ok());
  RunRanks(4, [&](Comm& comm) {
    const absl::Status opened = OpenDir(comm).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(opened)) << opened;
    EXPECT_THAT(std::string(opened.message()), AllOf(HasSubstr(Dir(1) + " is pinned on "),
                                                     HasSubstr("of step 1, not that of step 2")));
  });
  EXPECT_EQ(ReadManifest(Dir(1))->info.step, 1);
  ASSERT_EQ(unlink(JoinPath(Dir(1), kPinName).c_str()), 0);
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm).ok()); });
  EXPECT_EQ(ReadManifest(Dir(1))->info.step, 2);
}

TEST_F(NodeCheckpointsTest, NodeThatIsMissing_IsNamedWithItsFiles) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 2, 1).ok()); });
  ASSERT_TRUE(RemoveTree(Disk(1)).ok());
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenDir(comm);
    EXPECT_EQ(reader.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(reader.status().message()),
                AllOf(HasSubstr("random_states_2.safetensors, random_states_3.safetensors, which "
                                "node "),
                      HasSubstr("(ranks 2, 3) wrote"), HasSubstr("start the job with that node")));
  });
}

TEST_F(NodeCheckpointsTest, NewestIsIncomplete_TheOneBeforeIsTaken) {
  RunRanks(4, [&](Comm& comm) {
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(SaveNumbered(comm, i).ok());
  });
  ASSERT_TRUE(RemoveTree(CheckpointFolder(Disk(1)).PathOf(2)).ok());
  FlipBit(JoinPath(CheckpointFolder(Disk(0)).PathOf(1), "model.safetensors"));
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenNewest(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->info().iteration, 0);
    EXPECT_EQ(RandomOf(*reader, comm.rank()), comm.rank());
  });
}

TEST_F(NodeCheckpointsTest, WhatANodeCannotReadNow_IsTakenFromAnother_AndElseIsAnError) {
  RunRanks(4, [&](Comm& comm) {
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(SaveNumbered(comm, i).ok());
  });
  for (const std::string& name : {RandomStatesFileName(2), std::string(kManifestName)}) {
    SCOPED_TRACE(name);
    const std::string path = JoinPath(CheckpointFolder(Disk(1)).PathOf(1), name);
    const HiddenPath hidden(path);
    RunRanks(4, [&](Comm& comm) {
      const absl::Status status = OpenNewest(comm).status();
      EXPECT_FALSE(status.ok() || absl::IsNotFound(status) || StaysUnreadable(status)) << status;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 2: "), HasSubstr(path)));
    });
  }
  const auto expect_newest = [&] {
    RunRanks(4, [&](Comm& comm) {
      const auto reader = OpenNewest(comm);
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ(reader->info().iteration, 1);
      EXPECT_EQ(ModelOf(*reader), 1);
      EXPECT_EQ(RandomOf(*reader, comm.rank()), 10 + comm.rank());
    });
  };
  expect_newest();
  // Both nodes have all of it now.
  const HiddenPath hidden(JoinPath(CheckpointFolder(Disk(1)).PathOf(1), RandomStatesFileName(2)));
  expect_newest();
}

// Its node has all of it, but this rank looks elsewhere, or at an older state of the disk.
TEST_F(NodeCheckpointsTest, RankThatSeesNothingOfWhatItsLeaderHas_IsAnError_NoOlderOneIsTaken) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(SaveNumbered(comm, 1).ok()); });
  const std::string elsewhere = JoinPath(root_, "elsewhere");
  ASSERT_TRUE(MakeDirectories(elsewhere).ok());
  const auto open = [&](Comm& comm, bool named) {
    const std::string disk = comm.rank() == 3 ? elsewhere : Disk(NodeOf(comm));
    const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), NodeOf(comm));
    EXPECT_TRUE(groups.ok()) << groups.status();
    const CheckpointFolder folder(disk);
    return OpenCheckpointOnNodes(comm, named ? folder.PathOf(1) : "", folder, *groups, nullptr, {})
        .status();
  };
  const auto expect_refusal = [&] {
    RunRanks(4, [&](Comm& comm) {
      for (const bool named : {false, true}) {
        const absl::Status status = open(comm, named);
        EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr("rank 3: " + elsewhere), HasSubstr("checkpoint_1"),
                          HasSubstr("all ranks of a node must see one folder")));
      }
    });
  };
  expect_refusal();
  // An older one that all ranks could read.
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(SaveNumbered(comm, 0).ok()); });
  RunRanks(4, [&](Comm& comm) {
    ASSERT_TRUE(
        Open(comm, CheckpointFolder(Disk(NodeOf(comm))).PathOf(0), CheckpointFolder("")).ok());
  });
  std::filesystem::copy(CheckpointFolder(Disk(1)).PathOf(0), CheckpointFolder(elsewhere).PathOf(0));
  expect_refusal();
  // Part of it is there.
  std::filesystem::copy(CheckpointFolder(Disk(1)).PathOf(1), CheckpointFolder(elsewhere).PathOf(1));
  ASSERT_EQ(unlink(JoinPath(CheckpointFolder(elsewhere).PathOf(1), "model.safetensors").c_str()),
            0);
  expect_refusal();
}

// The rest of a checkpoint that was being removed after it was moved aside, where folders cannot be
// exchanged.
TEST_F(NodeCheckpointsTest, RestOfAReplacedOne_IsPassedOver) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(SaveNumbered(comm, 2).ok()); });
  const std::string rest = CheckpointFolder(Disk(0)).PathOf(3) + ".old-0123456789abcdef";
  ASSERT_TRUE(MakeDirectories(rest).ok());
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenNewest(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->info().iteration, 2);
  });
}

TEST_F(NodeCheckpointsTest, NoCheckpointAnywhere_IsNotFound) {
  RunRanks(4, [&](Comm& comm) {
    EXPECT_TRUE(absl::IsNotFound(OpenNewest(comm).status()));
    EXPECT_TRUE(absl::IsNotFound(OpenDir(comm).status()));
  });
}

TEST_F(NodeCheckpointsTest, DamagedCopy_IsReplacedByThatOfAnotherNode) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 3, 1).ok()); });
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm).ok()); });
  FlipBit(JoinPath(Dir(0), "model.safetensors"));
  RunRanks(4, [&](Comm& comm) {
    const auto found = OpenDir(comm);
    ASSERT_TRUE(found.ok()) << found.status();
    // Only the rank that reads the file notices.
    EXPECT_EQ(found->Read(ModelFileName(0)).ok(), NodeOf(comm) == 1);
    EXPECT_EQ(RandomOf(*found, comm.rank()), 30 + comm.rank());
    const auto reader = OpenDir(comm, /*damaged=*/true);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 3);
  });
  EXPECT_TRUE(VerifyCheckpoint(Dir(0), VerifyLevel::kContents).ok());
}

TEST_F(NodeCheckpointsTest, OpenedInParts_NothingIsFetchedBeforeItIsAskedFor) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 1.5, 7).ok()); });
  const std::vector<std::string> first = *ListDirectory(Dir(0)), second = *ListDirectory(Dir(1));
  const auto open = [&](Comm& comm, const std::vector<std::string>& damaged) {
    const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), NodeOf(comm));
    EXPECT_TRUE(groups.ok()) << groups.status();
    return OpenCheckpointOnNodes(comm, Dir(NodeOf(comm)), CheckpointFolder(""), *groups, nullptr,
                                 damaged, nullptr, /*in_parts=*/true);
  };
  RunRanks(4, [&](Comm& comm) {
    auto reader = open(comm, {});
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_TRUE(reader->in_parts() && reader->HasAnyHere());
    EXPECT_EQ(reader->IsHere(ModelFileName(0)), NodeOf(comm) == 0);
    EXPECT_EQ(reader->info().step, 7);
    const absl::Status not_fetched = reader->Read(RandomStatesFileName(3 - comm.rank())).status();
    EXPECT_THAT(std::string(not_fetched.message()), HasSubstr("another node"));
    // The model is read together, and each rank's own file by that rank.
    ASSERT_TRUE(reader->ReadTogether(comm, {ModelFileName(0)}).ok());
    ASSERT_TRUE(reader->Fetch(comm, {RandomStatesFileName(3 - comm.rank()), "no such file"}).ok());
    EXPECT_EQ(ModelOf(*reader), 1.5);
    EXPECT_EQ(RandomOf(*reader, 3 - comm.rank()), 15 + 3 - comm.rank());
    EXPECT_EQ(RandomOf(*reader, comm.rank()), 15 + comm.rank());
  });
  EXPECT_EQ(*ListDirectory(Dir(0)), first);
  EXPECT_EQ(*ListDirectory(Dir(1)), second);
  EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("ckpt"));

  // If every node has all files, a load reads from its folder.
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm).ok()); });
  RunRanks(4, [&](Comm& comm) {
    const auto reader = open(comm, {});
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_FALSE(reader->in_parts());
  });
  // A damaged copy no longer counts once all files are verified.
  FlipBit(JoinPath(Dir(0), "model.safetensors"));
  RunRanks(4, [&](Comm& comm) {
    auto reader = open(comm, {Dir(NodeOf(comm))});
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->IsHere(ModelFileName(0)), NodeOf(comm) == 1);
    ASSERT_TRUE(reader->ReadTogether(comm, {ModelFileName(0)}).ok());
    EXPECT_EQ(ModelOf(*reader), 1.5);
  });
}

// Its node has nothing of the previous checkpoint.
TEST_F(NodeCheckpointsTest, ChainOfRecords_FollowsThatOfAnyNode) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(SaveNumbered(comm, 0).ok()); });
  const auto before = ReadSeal(CheckpointFolder(Disk(1)).PathOf(0));
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_TRUE(RemoveTree(Disk(0)).ok());
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(SaveNumbered(comm, 1).ok()); });
  const auto seal = ReadSeal(CheckpointFolder(Disk(0)).PathOf(1));
  ASSERT_TRUE(seal.ok()) << seal.status();
  EXPECT_EQ(seal->previous_sha256, before->sha256);
  EXPECT_EQ(seal->id, before->id + 1);
}

TEST_F(NodeCheckpointsTest, DamageThatIsFetched_IsNotTaken) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 3, 1).ok()); });
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm).ok()); });
  // Node 1 lacks a file, so that something is fetched; node 0 sends one that is damaged.
  FlipBit(JoinPath(Dir(0), "random_states_0.safetensors"));
  ASSERT_EQ(unlink(JoinPath(Dir(1), "random_states_0.safetensors").c_str()), 0);
  FlipBit(JoinPath(Dir(1), "model.safetensors"));
  RunRanks(4, [&](Comm& comm) {
    EXPECT_THAT(std::string(OpenDir(comm).status().message()),
                AllOf(HasSubstr("no node of this job has an intact copy of random_states_0."),
                      HasSubstr("is damaged")));
  });
  FlipBit(JoinPath(Dir(0), "random_states_0.safetensors"));
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(OpenDir(comm, /*damaged=*/true).ok()); });
  EXPECT_TRUE(VerifyCheckpoint(Dir(0), VerifyLevel::kContents).ok());
  EXPECT_TRUE(VerifyCheckpoint(Dir(1), VerifyLevel::kContents).ok());
}

TEST_F(NodeCheckpointsTest, DamageWithoutAnotherCopy_IsNamed) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 3, 1).ok()); });
  FlipBit(JoinPath(Dir(0), "model.safetensors"));
  RunRanks(4, [&](Comm& comm) {
    EXPECT_THAT(std::string(OpenDir(comm).status().message()),
                AllOf(HasSubstr("model.safetensors, which node "), HasSubstr("is damaged")));
  });
}

// A Comm in which a piece of a file changes on its way to the others.
class NoisyComm : public BorrowedComm {
 public:
  explicit NoisyComm(Comm& comm) : BorrowedComm(comm) {}
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    std::string got = BorrowedComm::BroadcastBytes(bytes, root);
    if (rank() != root && !got.empty() && got[0] == 'D') got.back() ^= 1;
    return got;
  }
};

TEST_F(NodeCheckpointsTest, DamageOnTheWay_IsUnavailable_AndNothingOlderIsTaken) {
  RunRanks(4, [&](Comm& comm) {
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(SaveNumbered(comm, i).ok());
  });
  RunRanks(4, [&](Comm& comm) {
    NoisyComm noisy(comm);
    const absl::Status status = OpenNewest(noisy).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 2: " + CheckpointFolder(Disk(1)).PathOf(1)),
                      HasSubstr("what rank 0 sent does not match the manifest")));
  });
  // Nothing of it is left.
  EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("checkpoint_0", "checkpoint_1"));
  EXPECT_FALSE(PathExists(JoinPath(CheckpointFolder(Disk(1)).PathOf(1), "model.safetensors")));
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenNewest(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 1);
  });
}

// A process that ends before its `last`-th broadcast.
class LeavingComm : public BorrowedComm {
 public:
  LeavingComm(Comm& comm, int last) : BorrowedComm(comm), left_(last) {}
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    if (--left_ == 0) throw std::runtime_error("this process ends");
    return BorrowedComm::BroadcastBytes(bytes, root);
  }

 private:
  int left_;
};

TEST_F(NodeCheckpointsTest, PeerThatEndsWhileAFileIsFetched_LeavesWhatWasThere) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 2, 1).ok()); });
  const std::vector<std::string> before = *ListDirectory(Dir(1));
  // Either the holder of files, or the node that fetches them.
  for (const int who : {0, 2}) {
    bool ended = true;
    for (int last = 1; ended; ++last) {
      SCOPED_TRACE("rank " + std::to_string(who) + ", broadcast " + std::to_string(last));
      ASSERT_LT(last, 100);
      std::atomic<int> opened = 0;
      try {
        RunRanks(4, [&](Comm& comm) {
          LeavingComm leaving(comm, comm.rank() == who ? last : 0);
          opened += OpenDir(leaving).ok() ? 1 : 0;
        });
        ended = false;
      } catch (const std::exception& error) {
        EXPECT_THAT(std::string(error.what()), HasSubstr("this process ends"));
      }
      EXPECT_EQ(opened, ended ? 0 : 4);
      EXPECT_THAT(*ListDirectory(Disk(0)), ElementsAre("ckpt"));
      EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("ckpt"));
      if (ended) {
        EXPECT_EQ(*ListDirectory(Dir(1)), before);
      }
    }
    // Used by the other node.
    const std::vector<std::string> after = *ListDirectory(Dir(1));
    for (const std::string& name : after) {
      if (std::find(before.begin(), before.end(), name) != before.end()) continue;
      ASSERT_EQ(unlink(JoinPath(Dir(1), name).c_str()), 0);
    }
  }
}

TEST_F(NodeCheckpointsTest, OneThatIsReplacedOnANode_IsNotMixedWithTheOthers) {
  const std::string other = Dir(1) + "-other";
  int aborted = 0;
  bool replaced = true;
  for (int moment = 0; replaced; ++moment) {
    SCOPED_TRACE(moment);
    ASSERT_LT(moment, 100);
    for (int node = 0; node < 2; ++node) ASSERT_TRUE(RemoveTree(Disk(node)).ok());
    RunRanks(4, [&](Comm& comm) {
      const std::string dir = Dir(NodeOf(comm));
      int step = 0;
      // With all files on each node.
      for (const std::string& saved : {dir, dir + "-other"}) {
        ++step;
        ASSERT_TRUE(Save(comm, saved, step, step).ok());
        ASSERT_TRUE(Open(comm, saved, CheckpointFolder("")).ok());
      }
    });
    replaced = false;
    std::vector<std::string> opened(4);
    RunRanks(4, [&](Comm& comm) {
      EventfulComm eventful(comm, comm.rank() == 2 ? moment : -1, [&] {
        ASSERT_EQ(rename(Dir(1).c_str(), (Dir(1) + "-old").c_str()), 0);
        ASSERT_EQ(rename(other.c_str(), Dir(1).c_str()), 0);
        replaced = true;
      });
      const auto reader = OpenDir(eventful);
      opened[comm.rank()] = reader.ok() ? absl::StrCat(reader->manifest().info.step)
                                        : absl::StatusCodeToString(reader.status().code());
    });
    EXPECT_THAT(opened, Each(opened[0]));
    if (opened[0] == "ABORTED") ++aborted;
  }
  EXPECT_GT(aborted, 0);
}

TEST_F(NodeCheckpointsTest, OneNodeFails_NothingChangesAnywhere) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 1, 1).ok()); });
  RunRanks(4, [&](Comm& comm) {
    const absl::Status failed = SaveCheckpoint(
        comm, Dir(NodeOf(comm)), {.step = 2},
        [&](StateWriter& writer) {
          return comm.rank() == 3 ? absl::ResourceExhaustedError("no space") : WriteAll(writer, 2);
        },
        NodeOf(comm));
    EXPECT_EQ(failed.message(), "rank 3: no space");
    const auto reader = OpenDir(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 1);
  });
  EXPECT_THAT(*ListDirectory(Disk(0)), ElementsAre("ckpt"));
  EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("ckpt"));
}

// The state after a crash of all processes when only node 0 has moved its folder.
TEST_F(NodeCheckpointsTest, CrashBetweenTheNodesCommits_IsFinishedByTheNextLoad) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 1, 1).ok()); });
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)) + "-new", 2, 2).ok()); });
  // Node 0: the new one is in place, the old one beside it. Node 1: the other way around.
  const std::string beside = ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(Dir(0).c_str(), (Dir(0) + beside).c_str()), 0);
  ASSERT_EQ(rename((Dir(0) + "-new").c_str(), Dir(0).c_str()), 0);
  ASSERT_EQ(rename((Dir(1) + "-new").c_str(), (Dir(1) + beside).c_str()), 0);
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenDir(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 2);
    EXPECT_EQ(RandomOf(*reader, comm.rank()), 20 + comm.rank());
    // The next save removes what is left.
    ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 3, 3).ok());
  });
  EXPECT_THAT(*ListDirectory(Disk(0)), ElementsAre("ckpt"));
  EXPECT_THAT(*ListDirectory(Disk(1)), ElementsAre("ckpt"));
}

// The same, and node 1 cannot read what is in its place, which may be newer than anything else.
TEST_F(NodeCheckpointsTest, CopyInItsPlaceThatCannotBeReadNow_NothingIsMoved) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 1, 1).ok()); });
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)) + "-new", 2, 2).ok()); });
  const std::string beside = ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(Dir(0).c_str(), (Dir(0) + beside).c_str()), 0);
  ASSERT_EQ(rename((Dir(0) + "-new").c_str(), Dir(0).c_str()), 0);
  ASSERT_EQ(rename((Dir(1) + "-new").c_str(), (Dir(1) + beside).c_str()), 0);
  {
    const std::string manifest = JoinPath(Dir(1), kManifestName);
    const HiddenPath hidden(manifest);
    RunRanks(4, [&](Comm& comm) {
      const auto groups = FindNodeGroups(comm, Disk(NodeOf(comm)), NodeOf(comm));
      ASSERT_TRUE(groups.ok()) << groups.status();
      const absl::Status settled = SettleNodes(comm, Dir(NodeOf(comm)), *groups);
      EXPECT_TRUE(settled.ok()) << settled;
      // If only that node has a checkpoint, the error names it.
      const absl::Status status = OpenDir(comm).status();
      EXPECT_FALSE(absl::IsNotFound(status) || StaysUnreadable(status)) << status;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 2: "), HasSubstr(manifest)));
    });
  }
  for (const int node : {0, 1}) {
    EXPECT_THAT(*ListDirectory(Disk(node)), ElementsAre("ckpt", "ckpt" + beside));
  }
  EXPECT_EQ(ReadManifest(Dir(1))->info.step, 1);
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenDir(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 2);
  });
}

TEST_F(NodeCheckpointsTest, CrashBeforeAllNodesHavePrepared_GoesBackToTheFormer) {
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)), 1, 1).ok()); });
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(Save(comm, Dir(NodeOf(comm)) + "-new", 2, 2).ok()); });
  const std::string beside = ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(Dir(0).c_str(), (Dir(0) + beside).c_str()), 0);
  ASSERT_EQ(rename((Dir(0) + "-new").c_str(), Dir(0).c_str()), 0);
  ASSERT_TRUE(RemoveTree(Dir(1) + "-new").ok());
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenDir(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 1);
  });
}

TEST_F(NodeCheckpointsTest, Rotation_CountsWhatEveryNodeHas) {
  RunRanks(4, [&](Comm& comm) {
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(SaveNumbered(comm, i).ok());
  });
  ASSERT_TRUE(RemoveTree(CheckpointFolder(Disk(1)).PathOf(2)).ok());
  RunRanks(4, [&](Comm& comm) { ASSERT_TRUE(SaveNumbered(comm, 3, 2).ok()); });
  EXPECT_THAT(*CheckpointFolder(Disk(0)).Numbers(), ElementsAre(1, 2, 3));
  EXPECT_THAT(*CheckpointFolder(Disk(1)).Numbers(), ElementsAre(1, 3));
}

// Saves a checkpoint as if all ranks had one disk: by number, with a seal.json.
void SaveSealed(Comm& comm, const std::string& root, int64_t number, bool promoted, bool pinned,
                double value) {
  const std::string path = CheckpointFolder(root).PathOf(number);
  ASSERT_TRUE(
      SaveCheckpoint(comm, path, {.iteration = number, .step = number},
                     [&](StateWriter& writer) -> absl::Status {
                       if (writer.rank() != 0) return absl::OkStatus();
                       return writer.WriteModel(ModelFileName(0), {{"w", at::full({3}, value)}});
                     })
          .ok());
  RegisteredCheckpoint record;
  record.job = "job";
  record.sha256 = std::string(64, 'b');
  record.promoted = promoted;
  record.pinned = pinned;
  if (comm.rank() != 0) return;
  ASSERT_TRUE(WriteSeal(path, record).ok());
}

TEST_F(NodeCheckpointsTest, Rotation_LeavesWhatIsPinnedOnOneNode) {
  RunRanks(4, [&](Comm& comm) {
    SaveSealed(comm, Disk(0), 0, /*promoted=*/true, /*pinned=*/true, 7);
    for (int i = 1; i < 4; ++i) ASSERT_TRUE(SaveNumbered(comm, i, 2).ok());
  });
  EXPECT_THAT(*CheckpointFolder(Disk(0)).Numbers(), ElementsAre(0, 2, 3));
  EXPECT_THAT(*CheckpointFolder(Disk(1)).Numbers(), ElementsAre(2, 3));
}

TEST_F(NodeCheckpointsTest, NewestThatWasHeldBack_TheOneBeforeIsTaken) {
  RunRanks(4, [&](Comm& comm) {
    SaveSealed(comm, Disk(0), 0, /*promoted=*/true, /*pinned=*/false, 7);
    SaveSealed(comm, Disk(0), 1, /*promoted=*/false, /*pinned=*/false, 8);
  });
  RunRanks(4, [&](Comm& comm) {
    const auto reader = OpenNewest(comm);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 7);
  });
  // Loads it by its name.
  RunRanks(4, [&](Comm& comm) {
    const CheckpointFolder folder(Disk(NodeOf(comm)));
    const auto reader = Open(comm, folder.PathOf(1), folder);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ModelOf(*reader), 8);
  });
}

}  // namespace
}  // namespace muster
