#include "worker/checkpoint/checkpoint_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "worker/checkpoint/fake_registrar.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/test_eventful_comm.h"
#include "worker/collective/thread_comm.h"

namespace {

// Calls the second before the first read of a file whose path has the first part. Set only while no
// thread reads.
struct BeforeRead {
  char part[4096] = "";
  std::function<void()> run;
  std::atomic<bool> waits = false;
};
BeforeRead before_read;

bool IsRead(int fd) {
  if (!before_read.waits || !muster::PathHas(fd, before_read.part)) return false;
  if (before_read.waits.exchange(false)) before_read.run();
  return false;
}

void OnRead(const std::string& part, std::function<void()> run) {
  snprintf(before_read.part, sizeof(before_read.part), "%s", part.c_str());
  before_read.run = std::move(run);
  before_read.waits = true;
}

}  // namespace

MUSTER_REPLACE_READS(IsRead)

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using State = RegisteredCheckpoint::State;

constexpr int kRanks = 2;

absl::Status WriteAll(StateWriter& writer, double value) {
  StateDict state;
  state.SetTensor("w", at::full({3}, value));
  return writer.Write(RandomStatesFileName(writer.rank()), state);
}

// Reads all files and checks their digests. Returns the same status on every rank.
absl::Status ReadAll(Comm& comm, const StateReader& reader) {
  absl::Status status;
  for (const ManifestFile& file : reader.manifest().files) {
    status.Update(reader.Read(file.name).status());
  }
  std::string all;
  for (const std::string& code : comm.AllGatherBytes(absl::StrCat(status.raw_code()))) {
    if (code != "0" && all.empty()) all = code;
  }
  if (all.empty()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(std::stoi(all)), "a file cannot be read");
}

class CheckpointSearchTest : public testing::Test {
 protected:
  ~CheckpointSearchTest() override {
    before_read.waits = false;
    ReleaseInPlace();
    SetLockPatience(patience_);
  }
  void Save(int64_t iteration, PublishOptions options = {}) {
    if (options.registrar == nullptr && registered_) options.registrar = &registrar_;
    RunRanks(kRanks, [&](Comm& comm) {
      const absl::Status saved = SaveNumberedCheckpoint(
          comm, folder_, {.iteration = iteration, .step = 10 * iteration}, options,
          [&](StateWriter& writer) { return WriteAll(writer, static_cast<double>(iteration)); });
      ASSERT_TRUE(saved.ok()) << saved;
    });
  }
  // Makes a checkpoint look as if its writer had ended after it was sealed and noted.
  std::string TakeNameAway(uint64_t id) {
    RegisteredCheckpoint& record = registrar_.records.at(id);
    record.state = State::kSealed;
    record.published = false;
    EXPECT_EQ(rename(record.path.c_str(), record.staging.c_str()), 0);
    return record.staging;
  }
  absl::StatusOr<StateReader> Load(Comm& comm, CheckpointRegistrar* registrar,
                                   absl::FunctionRef<absl::Status(StateReader&)> read) const {
    return OpenAndReadCheckpoint(comm,
                                 {.dir = "",
                                  .folder = folder_,
                                  .groups = NodeGroups::Shared(comm.rank(), comm.size()),
                                  .registrar = registrar},
                                 read);
  }
  absl::StatusOr<StateReader> Load(Comm& comm, CheckpointRegistrar* registrar = nullptr) const {
    return Load(comm, registrar, [&](StateReader& reader) { return ReadAll(comm, reader); });
  }
  // Returns the path that all ranks load, or the error of all.
  std::string Loaded(CheckpointRegistrar* registrar = nullptr) const {
    std::vector<std::string> all(kRanks);
    RunRanks(kRanks, [&](Comm& comm) {
      const auto reader = Load(comm, registrar);
      all[comm.rank()] = reader.ok() ? BaseName(reader->dir()) : reader.status().ToString();
    });
    EXPECT_EQ(all[0], all[1]);
    return all[0];
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
  const CheckpointFolder folder_{root_};
  FakeRegistrar registrar_;
  bool registered_ = true;
  const absl::Duration patience_ = SetLockPatience(absl::Milliseconds(50));
};

TEST_F(CheckpointSearchTest, NamedBeforeItIsOpened_IsOpenedUnderItsName) {
  Save(0);
  Save(1);
  const std::string staging = TakeNameAway(2);
  ASSERT_TRUE(HoldInPlace(staging));
  registrar_.records.at(2).damage = "as it was seen then";
  registrar_.on_verified = [&] {
    ReleaseInPlace();
    ASSERT_EQ(rename(staging.c_str(), folder_.PathOf(1).c_str()), 0);
  };
  EXPECT_EQ(Loaded(&registrar_), "checkpoint_1");
  EXPECT_EQ(registrar_.verdicts.size(), 1u);
}

// Reading a large one takes minutes, but another load waits only seconds for a writer.
TEST_F(CheckpointSearchTest, SealedWithoutItsName_IsNotLockedWhileItsContentsAreRead) {
  Save(0);
  const std::string staging = TakeNameAway(1);
  ASSERT_EQ(unlink(JoinPath(staging, kSealName).c_str()), 0);
  std::optional<FolderWriter> writer;
  OnRead(JoinPath(BaseName(staging), RandomStatesFileName(0)), [&] { writer = WriterOf(staging); });
  EXPECT_EQ(Loaded(&registrar_), "checkpoint_0");
  EXPECT_EQ(writer, FolderWriter::kGone);
}

// Returns from its broadcast of the path only when `go` is set.
class LateComm : public BorrowedComm {
 public:
  LateComm(Comm& comm, std::future<void> go) : BorrowedComm(comm), go_(std::move(go)) {}
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    std::string got = BorrowedComm::BroadcastBytes(bytes, root);
    if (++broadcasts_ == 2) go_.wait();
    return got;
  }

 private:
  std::future<void> go_;
  int broadcasts_ = 0;
};

TEST_F(CheckpointSearchTest, ReplacedWhileTheRanksOpenIt_IsOpenedAgainByAll) {
  registered_ = false;
  Save(0);
  Save(1);
  const std::string next = JoinPath(root_, "next");
  ASSERT_EQ(rename(folder_.PathOf(1).c_str(), next.c_str()), 0);
  std::promise<void> replaced;
  std::vector<int64_t> steps(kRanks);
  const auto load = [&](Comm& comm) {
    const auto reader = Load(comm, nullptr, [](StateReader&) { return absl::OkStatus(); });
    ASSERT_TRUE(reader.ok()) << reader.status();
    steps[comm.rank()] = reader->info().step;
  };
  RunRanks(kRanks, [&](Comm& comm) {
    if (comm.rank() == 1) {
      LateComm late(comm, replaced.get_future());
      load(late);
      return;
    }
    // After the status of the search and the path, the checkpoint is open here.
    EventfulComm eventful(comm, 2, [&] {
      EXPECT_TRUE(RemoveTree(folder_.PathOf(0)).ok());
      EXPECT_EQ(rename(next.c_str(), folder_.PathOf(0).c_str()), 0);
      replaced.set_value();
    });
    load(eventful);
  });
  EXPECT_THAT(steps, ElementsAre(10, 10));
}

TEST_F(CheckpointSearchTest, RemovedBeforeItIsOpened_IsAnError) {
  Save(0);
  registrar_.records.at(1).damage = "as it was seen then";
  registrar_.on_verified = [&] { ASSERT_TRUE(RemoveTree(folder_.PathOf(0)).ok()); };
  EXPECT_THAT(Loaded(&registrar_), HasSubstr("UNAVAILABLE"));
}

// A writer takes the lock after all ranks have learned the path.
TEST_F(CheckpointSearchTest, LockedBeforeItIsOpened_IsAnError) {
  SetLockPatience(absl::ZeroDuration());
  Save(0);
  Save(1);
  const std::string staging = TakeNameAway(2);
  ASSERT_TRUE(HoldInPlace(staging));
  registrar_.records.at(2).damage = "as it was seen then";
  OwnedFd lock;
  registrar_.on_verified = [&] {
    ReleaseInPlace();
    lock = OwnedFd(LockFolder(staging));
  };
  EXPECT_THAT(Loaded(&registrar_), AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("has it locked")));
}

// It is loaded in place, and another machine, whose locks are not visible here, renames it.
TEST_F(CheckpointSearchTest, NamedWhileItsFilesAreRead_IsReadUnderItsName) {
  for (const bool at_the_end : {false, true}) {
    SCOPED_TRACE(at_the_end);
    const int64_t number = at_the_end ? 3 : 1;
    Save(number - 1);
    Save(number);
    const std::string staging = TakeNameAway(registrar_.records.rbegin()->first);
    ASSERT_TRUE(HoldInPlace(staging));
    std::atomic<int> reads = 0;
    RunRanks(kRanks, [&](Comm& comm) {
      const auto reader = Load(comm, nullptr, [&](StateReader& opened) {
        if (comm.rank() == 0 && ++reads == 1) {
          EXPECT_EQ(opened.dir(), staging);
          const auto rename_it = [&] {
            EXPECT_EQ(rename(opened.dir().c_str(), folder_.PathOf(number).c_str()), 0);
          };
          // Either before the first file is opened, or while one is open.
          if (at_the_end) {
            OnRead(staging + "/random_states_", rename_it);
          } else {
            rename_it();
          }
        }
        comm.Barrier();
        return ReadAll(comm, opened);
      });
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ(reader->dir(), folder_.PathOf(number));
      EXPECT_EQ(reader->info().iteration, number);
    });
    EXPECT_EQ(reads, 2);
    ReleaseInPlace();
  }
}

TEST_F(CheckpointSearchTest, WhatMovesInEachSearch_IsAnErrorAfterThree) {
  registered_ = false;
  Save(0);
  std::atomic<int> reads = 0;
  RunRanks(kRanks, [&](Comm& comm) {
    const auto reader = Load(comm, nullptr, [&](StateReader& opened) {
      comm.Barrier();
      if (comm.rank() == 0) {
        EXPECT_EQ(rename(opened.dir().c_str(), folder_.PathOf(++reads).c_str()), 0);
      }
      comm.Barrier();
      return ReadAll(comm, opened);
    });
    EXPECT_TRUE(absl::IsUnavailable(reader.status())) << reader.status();
  });
  EXPECT_EQ(reads, kCheckpointSearches);
  EXPECT_EQ(Loaded(), "checkpoint_3");
}

// A checkpoint that is held back gets its name after the held-back ones were determined and before
// the choice.
TEST_F(CheckpointSearchTest, SealOfTheChosenOne_IsLookedAtAfterItIsChosen) {
  Save(0);
  Save(1, {.promote = false});
  const std::string staging = TakeNameAway(2);
  for (CheckpointRegistrar* const registrar :
       std::vector<CheckpointRegistrar*>{nullptr, &registrar_}) {
    SCOPED_TRACE(registrar != nullptr);
    // The registry knows no other checkpoint, so the folder decides.
    if (registrar != nullptr) registrar_.records.erase(1);
    // Prevents this process from renaming it.
    ASSERT_TRUE(HoldInPlace(staging));
    bool named = false;
    OnRead("checkpoint_0/seal.json", [&] {
      ASSERT_EQ(rename(staging.c_str(), folder_.PathOf(1).c_str()), 0);
      named = true;
    });
    EXPECT_EQ(Loaded(registrar), "checkpoint_0");
    EXPECT_TRUE(named);
    ReleaseInPlace();
    ASSERT_EQ(rename(folder_.PathOf(1).c_str(), staging.c_str()), 0);
  }
}

// Another program keeps one checkpoint, and saves the next while this one loads.
TEST_F(CheckpointSearchTest, NewestGoesForANewerOne_AtAnyMoment_ThatOneIsLoaded) {
  registered_ = false;
  Save(1);
  Save(2);
  const std::string next = JoinPath(root_, "next");
  const auto prepare = [&] { ASSERT_EQ(rename(folder_.PathOf(2).c_str(), next.c_str()), 0); };
  const auto replace = [&] {
    ASSERT_EQ(rename(next.c_str(), folder_.PathOf(2).c_str()), 0);
    ASSERT_TRUE(RemoveCheckpoint(folder_.PathOf(1)).ok());
  };
  bool happened = true;
  int moments = 0;
  for (; happened; ++moments) {
    SCOPED_TRACE(moments);
    prepare();
    RunRanks(kRanks, [&](Comm& comm) {
      EventfulComm eventful(comm, comm.rank() == 0 ? moments : -1, replace);
      const auto reader = Load(eventful);
      ASSERT_TRUE(reader.ok()) << reader.status();
      if (comm.rank() == 0) happened = eventful.happened();
    });
    if (!happened) replace();
    Save(1);
    ASSERT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_1", "checkpoint_2"));
  }
  EXPECT_GT(moments, 3);
  // Also while its manifest is read: nothing then shows that there was a checkpoint.
  prepare();
  OnRead("checkpoint_1/manifest.json", replace);
  EXPECT_EQ(Loaded(), "checkpoint_2");
}

// Like the "best" checkpoint of a running training, which another program loads. Reading parts of
// both is not reported as damage.
TEST_F(CheckpointSearchTest, NamedOneIsReplaced_AtAnyMoment_OneOfTheTwoIsLoaded) {
  const std::string best = JoinPath(root_, "best"), next = JoinPath(root_, "next");
  const auto prepare = [&] {
    for (const std::string& name : {best, next}) (void)RemoveTree(name);
    for (const int64_t number : {1, 2}) Save(number);
    ASSERT_EQ(rename(folder_.PathOf(1).c_str(), best.c_str()), 0);
    ASSERT_EQ(rename(folder_.PathOf(2).c_str(), next.c_str()), 0);
  };
  const auto replace = [&] { ASSERT_TRUE(PutInPlace(next, best).ok()); };
  const auto load = [&](Comm& comm) {
    absl::StatusOr<StateDict> state;
    const auto reader = OpenAndReadCheckpoint(
        comm,
        {.dir = best, .folder = folder_, .groups = NodeGroups::Shared(comm.rank(), comm.size())},
        [&](StateReader& opened) {
          // Not later, because it may be replaced while the ranks agree that they have read it.
          state = opened.Read(RandomStatesFileName(comm.rank()));
          return ReadAll(comm, opened);
        });
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(10 * state->GetTensor("w")->mean().item<double>(),
              static_cast<double>(reader->info().step));
  };
  registered_ = false;
  bool happened = true;
  int moments = 0;
  for (; happened; ++moments) {
    SCOPED_TRACE(moments);
    ASSERT_LT(moments, 100);
    prepare();
    RunRanks(kRanks, [&](Comm& comm) {
      EventfulComm eventful(comm, comm.rank() == 0 ? moments : -1, replace);
      load(eventful);
      if (comm.rank() == 0) happened = eventful.happened();
    });
  }
  EXPECT_GT(moments, 3);
  for (const std::string file : {"manifest.json", "random_states_0", "random_states_1"}) {
    SCOPED_TRACE(file);
    prepare();
    OnRead("best/" + file, replace);
    RunRanks(kRanks, load);
  }
}

TEST_F(CheckpointSearchTest, NamedOneIsReplacedAgainAndAgain_IsAnErrorThatSaysSo) {
  registered_ = false;
  const std::string best = JoinPath(root_, "best"), next = JoinPath(root_, "next");
  for (const int64_t number : {1, 2}) Save(number);
  ASSERT_EQ(rename(folder_.PathOf(1).c_str(), best.c_str()), 0);
  ASSERT_EQ(rename(folder_.PathOf(2).c_str(), next.c_str()), 0);
  RunRanks(1, [&](Comm& comm) {
    int reads = 0;
    const auto reader = OpenAndReadCheckpoint(
        comm, {.dir = best, .folder = folder_, .groups = NodeGroups::Shared(0, 1)},
        [&](StateReader& opened) {
          ++reads;
          EXPECT_TRUE(PutInPlace(next, best).ok());
          return ReadAll(comm, opened);
        });
    EXPECT_TRUE(absl::IsUnavailable(reader.status())) << reader.status();
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr("another process has replaced"));
    EXPECT_EQ(reads, kCheckpointSearches);
  });
}

TEST_F(CheckpointSearchTest, DamagedOne_IsReportedAndTheOneBeforeIsTaken) {
  Save(0);
  Save(1);
  const std::string path = JoinPath(folder_.PathOf(1), RandomStatesFileName(1));
  std::string bytes = *ReadFile(path);
  bytes.back() ^= 1;
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  EXPECT_EQ(Loaded(&registrar_), "checkpoint_0");
  ASSERT_EQ(registrar_.verdicts.size(), 1u);
  EXPECT_EQ(registrar_.verdicts[0].first, 2u);
}

// Rank i is alone on node i, with a disk of its own.
class SearchOnNodesTest : public testing::Test {
 protected:
  std::string Disk(int node) const { return JoinPath(root_, absl::StrCat("node_", node)); }
  CheckpointFolder FolderOf(int node) const { return CheckpointFolder(Disk(node)); }

  void Save(int64_t iteration, int keep = 0) {
    RunRanks(kRanks, [&](Comm& comm) {
      const absl::Status saved = SaveNumberedCheckpoint(
          comm, FolderOf(comm.rank()), {.iteration = iteration, .step = iteration}, keep,
          [&](StateWriter& writer) { return WriteAll(writer, static_cast<double>(iteration)); },
          comm.rank());
      ASSERT_TRUE(saved.ok()) << saved;
    });
  }
  absl::StatusOr<StateReader> Load(Comm& comm, absl::FunctionRef<absl::Status(StateReader&)> read,
                                   const std::string& dir = "") const {
    NodeGroups groups = NodeGroups::Shared(comm.rank(), comm.size());
    groups.leader_of = {0, 1};
    groups.nodes = {{.leader = 0, .host = "a"}, {.leader = 1, .host = "b"}};
    return OpenAndReadCheckpoint(
        comm, {.dir = dir, .folder = FolderOf(comm.rank()), .groups = std::move(groups)}, read);
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
};

TEST_F(SearchOnNodesTest, NewestGoesForANewerOne_AtAnyMoment_ThatOneIsLoaded) {
  const auto next = [&](int node) { return JoinPath(Disk(node), "next"); };
  // Replaces it on both nodes, or first on only one of them.
  const auto replace = [&](int node) {
    ASSERT_EQ(rename(next(node).c_str(), FolderOf(node).PathOf(2).c_str()), 0);
    ASSERT_TRUE(RemoveCheckpoint(FolderOf(node).PathOf(1)).ok());
  };
  for (const bool fetched : {false, true}) {
    bool happened = true;
    int moments = 0;
    for (; happened; ++moments) {
      SCOPED_TRACE(absl::StrCat(fetched ? "fetched" : "to be fetched", ", moment ", moments));
      ASSERT_LT(moments, 100);
      for (const int node : {0, 1}) (void)RemoveTree(Disk(node));
      Save(1);
      if (fetched) {
        RunRanks(kRanks, [&](Comm& comm) {
          ASSERT_TRUE(Load(comm, [](StateReader&) { return absl::OkStatus(); }).ok());
        });
      }
      Save(2);
      for (const int node : {0, 1}) {
        ASSERT_EQ(rename(FolderOf(node).PathOf(2).c_str(), next(node).c_str()), 0);
      }
      RunRanks(kRanks, [&](Comm& comm) {
        EventfulComm eventful(comm, comm.rank() == 0 ? moments : -1, [&] {
          replace(0);
          replace(1);
        });
        const auto reader =
            Load(eventful, [&](StateReader& opened) { return ReadAll(eventful, opened); });
        ASSERT_TRUE(reader.ok()) << reader.status();
        EXPECT_GE(reader->info().iteration, 1);
        if (comm.rank() == 0) happened = eventful.happened();
      });
    }
    EXPECT_GT(moments, 10);
  }
}

// The nodes' paths always differ, so they do not show what the nodes were given.
TEST_F(SearchOnNodesTest, NamedOneIsReplacedOnOneNode_AtAnyMoment_TheSearchBeginsAgain) {
  const auto path = [&](int node, const char* name) { return JoinPath(Disk(node), name); };
  bool happened = true;
  int moments = 0;
  for (; happened; ++moments) {
    SCOPED_TRACE(absl::StrCat("moment ", moments));
    ASSERT_LT(moments, 100);
    for (const int node : {0, 1}) (void)RemoveTree(Disk(node));
    for (const int64_t number : {1, 2}) Save(number);
    for (const int node : {0, 1}) {
      ASSERT_EQ(rename(FolderOf(node).PathOf(1).c_str(), path(node, "best").c_str()), 0);
      ASSERT_EQ(rename(FolderOf(node).PathOf(2).c_str(), path(node, "next").c_str()), 0);
    }
    // That node has all files of the other checkpoint.
    std::filesystem::copy(
        path(0, "next"), path(1, "next"),
        std::filesystem::copy_options::skip_existing | std::filesystem::copy_options::recursive);
    RunRanks(kRanks, [&](Comm& comm) {
      EventfulComm eventful(comm, comm.rank() == 1 ? moments : -1, [&] {
        ASSERT_TRUE(PutInPlace(path(1, "next"), path(1, "best")).ok());
      });
      const auto reader = Load(
          eventful, [&](StateReader& opened) { return ReadAll(eventful, opened); },
          path(comm.rank(), "best"));
      ASSERT_TRUE(reader.ok()) << reader.status();
      if (comm.rank() == 1) happened = eventful.happened();
    });
  }
  EXPECT_GT(moments, 5);
}

// Nothing is left of what was found: that is not the same as none yet.
TEST_F(SearchOnNodesTest, WhatMovesInEachSearch_IsAnErrorAfterThree_AndSoIsWhatIsGone) {
  Save(1);
  RunRanks(kRanks, [&](Comm& comm) {
    int reads = 0;
    const auto reader = Load(comm, [&](StateReader& opened) {
      comm.Barrier();
      EXPECT_EQ(rename(opened.dir().c_str(),
                       FolderOf(comm.rank()).PathOf(opened.info().iteration + ++reads).c_str()),
                0);
      comm.Barrier();
      return ReadAll(comm, opened);
    });
    EXPECT_TRUE(absl::IsUnavailable(reader.status())) << reader.status();
    EXPECT_EQ(reads, kCheckpointSearches);
  });
  RunRanks(kRanks, [&](Comm& comm) {
    const auto reader = Load(comm, [&](StateReader& opened) {
      comm.Barrier();
      EXPECT_TRUE(RemoveCheckpoint(opened.dir()).ok());
      comm.Barrier();
      return ReadAll(comm, opened);
    });
    EXPECT_TRUE(absl::IsUnavailable(reader.status())) << reader.status();
  });
  RunRanks(kRanks, [&](Comm& comm) {
    const auto reader = Load(comm, [](StateReader&) { return absl::OkStatus(); });
    EXPECT_TRUE(absl::IsNotFound(reader.status())) << reader.status();
  });
}

}  // namespace
}  // namespace muster
