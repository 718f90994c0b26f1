// The ranks' side of checkpoints in memory, with the agent's side of two nodes. Ranks are threads.
#include "worker/checkpoint/memory_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "agent/memory_holder.h"
#include "base/held_memory.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/test_threads.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/memory_record.h"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/gloo_ranks.h"
#include "worker/collective/local_comm.h"
#include "worker/collective/process_group.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Nodes of one rank each, for the whole job.
class MemoryTierTest : public testing::Test {
 protected:
  MemoryTierTest() {
    for (int rank = 0; rank < 2; ++rank) AddNode(absl::StrCat("w", rank));
  }

  void AddNode(const std::string& worker) {
    speakers_.push_back(std::make_unique<Speaker>());
    Speaker* const speaker = speakers_.back().get();
    speaker->Set(worker);
    auto holder = agent::MemoryHolder::Start(
        [speaker](pid_t pid) { return pid == getpid() ? speaker->Get() : std::string(); });
    EXPECT_TRUE(holder.ok()) << holder.status();
    holders_.push_back(*std::move(holder));
  }
  // Moves the memory of a worker's node: the worker was on another one.
  void MoveMemory(int from, int to) {
    const std::string before = speakers_[to]->Get();
    const auto held = TakeHeldMemory(holders_[from]->address());
    ASSERT_TRUE(held.ok()) << held.status();
    for (const HeldMemory& piece : *held) {
      speakers_[to]->Set(piece.worker_id);
      ASSERT_TRUE(HoldMemory(holders_[to]->address(), piece.slot, piece.fd.get()).ok());
    }
    speakers_[to]->Set(before);
  }

  // Runs one attempt of the job.
  void Attempt(const std::function<void(Comm&, MemoryTier&)>& body, int ranks = 2) {
    RunGlooRanks(ranks, [&](Comm& comm) {
      auto tier =
          MemoryTier::Open(comm, holders_[comm.rank()]->address(), absl::StrCat("w", comm.rank()));
      ASSERT_TRUE(tier.ok()) << tier.status();
      body(comm, **tier);
    });
  }

  // Runs an attempt whose saves are mirrored. `before_piece` is called with the rank before each
  // exchange of pieces, `at_end` once its tier is gone.
  void MirroredAttempt(int ranks, const std::function<void(Comm&, MemoryTier&)>& body,
                       const std::function<void(int)>& before_piece = nullptr,
                       const std::function<void(int)>& at_end = nullptr) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    RunGlooRanks(ranks, [&](Comm& comm) {
      const int rank = comm.rank();
      MemoryTier::MirrorOptions mirror;
      mirror.connect = [&]() -> absl::StatusOr<std::unique_ptr<Comm>> {
        GlooOptions gloo;
        gloo.rank = rank;
        gloo.size = comm.size();
        gloo.single_host = true;
        return MakeC10dComm(MakeGlooGroup(store, gloo));
      };
      if (before_piece != nullptr) mirror.before_piece = [&, rank] { before_piece(rank); };
      auto tier =
          MemoryTier::Open(comm, holders_[rank]->address(), absl::StrCat("w", rank), mirror);
      ASSERT_TRUE(tier.ok()) << tier.status();
      body(comm, **tier);
      tier->reset();
      if (at_end != nullptr) at_end(rank);
    });
  }
  // Makes saves that are mirrored, one after the other.
  static void SaveMirrored(Comm& comm, MemoryTier& tier, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      EXPECT_TRUE(Save(comm, tier, step).ok());
      const absl::Status mirrored = tier.WaitForMirror();
      EXPECT_TRUE(mirrored.ok()) << mirrored;
      comm.Barrier();
    }
  }
  // Puts another machine, with the agent of the same worker, in the place of a lost one.
  void LoseNode(int node) {
    Speaker* const speaker = speakers_[node].get();
    holders_[node] = *agent::MemoryHolder::Start([speaker](pid_t) { return speaker->Get(); });
  }
  // Makes each of the first two workers run where the other was.
  void SwapNodes() {
    std::swap(holders_[0], holders_[1]);
    std::swap(speakers_[0], speakers_[1]);
    speakers_[0]->Set("w0");
    speakers_[1]->Set("w1");
  }
  // Returns what all agents hold now.
  std::vector<std::unique_ptr<agent::MemoryHolder>> CopyOfAllMemory() {
    std::vector<std::unique_ptr<agent::MemoryHolder>> copies;
    for (size_t node = 0; node < holders_.size(); ++node) {
      Speaker* const speaker = speakers_[node].get();
      copies.push_back(*agent::MemoryHolder::Start([speaker](pid_t) { return speaker->Get(); }));
      const auto held = TakeHeldMemory(holders_[node]->address());
      EXPECT_TRUE(held.ok()) << held.status();
      for (const HeldMemory& piece : *held) {
        const auto memory = AlignedMemory::OfFile(piece.fd.get());
        const auto fd = CreateHoldableMemory("copy");
        EXPECT_TRUE(memory.ok() && fd.ok());
        EXPECT_EQ(write(fd->get(), memory->data(), memory->size()),
                  static_cast<ssize_t>(memory->size()));
        EXPECT_TRUE(HoldMemory(copies.back()->address(), piece.slot, fd->get()).ok());
      }
    }
    return copies;
  }

  static absl::Status Save(Comm& comm, MemoryTier& tier, int64_t step, int failing_rank = -1,
                           const std::function<void()>& during = nullptr) {
    CheckpointInfo info;
    info.step = step;
    absl::Status earlier;
    const auto write = [&](StateWriter& writer) {
      if (during != nullptr) during();
      StateDict own, shared;
      own.SetInt("step", step + 100 * comm.rank());
      absl::Status status =
          writer.Write(absl::StrCat("random_states_", comm.rank(), ".safetensors"), own);
      if (comm.rank() == 0) {
        shared.SetTensor("weight", at::full({3 << 20}, static_cast<double>(step)));
        status.Update(writer.Write("optimizer.safetensors", shared));
      }
      if (comm.rank() == failing_rank) status.Update(absl::InternalError("the test says so"));
      return status;
    };
    const absl::Status saved = tier.Save(comm, info, step % 5, /*lazy=*/true, write, &earlier);
    EXPECT_TRUE(earlier.ok()) << earlier;
    EXPECT_EQ(absl::IsInternal(saved), failing_rank >= 0) << saved;
    return saved;
  }

  // Returns the step that all ranks find, with contents; -1: none.
  static int64_t FoundStep(Comm& comm, MemoryTier& tier, bool keep = false) {
    const auto found = tier.Find(comm);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok() || !found->has_value()) return -1;
    const StateReader& reader = (*found)->reader;
    const int64_t step = reader.info().step;
    EXPECT_EQ((*found)->since_disk, step % 5);
    const auto shared = reader.Read("optimizer.safetensors");
    EXPECT_TRUE(shared.ok()) << shared.status();
    if (shared.ok()) {
      EXPECT_TRUE(
          shared->tensors()[0].second.equal(at::full({3 << 20}, static_cast<double>(step))));
    }
    for (int rank = 0; rank < comm.size(); ++rank) {
      const auto own = reader.Read(absl::StrCat("random_states_", rank, ".safetensors"));
      EXPECT_TRUE(own.ok()) << own.status();
      if (own.ok()) {
        EXPECT_EQ(*own->GetInt("step"), step + 100 * rank);
      }
    }
    if (keep) tier.Keep(**found);
    return step;
  }

  void Damage(int rank, int slot) {
    const auto held = TakeHeldMemory(holders_[rank]->address());
    ASSERT_TRUE(held.ok());
    char byte = 0;
    const int fd = (*held)[slot].fd.get();
    ASSERT_EQ(pread(fd, &byte, 1, 4096 + 9), 1);
    byte ^= 4;
    ASSERT_EQ(pwrite(fd, &byte, 1, 4096 + 9), 1);
  }

  // Damages one rank's part of a save, in `copies` of the copies that a node has of it.
  void DamagePart(int owner, int node, int64_t step, int copies = 1) {
    const auto held = TakeHeldMemory(holders_[node]->address());
    ASSERT_TRUE(held.ok());
    int damaged = 0;
    for (size_t i = 0; i < held->size() && damaged < copies; ++i) {
      const auto memory = AlignedMemory::OfFile((*held)[i].fd.get());
      ASSERT_TRUE(memory.ok()) << memory.status();
      const auto record = ReadMemoryRecord({memory->data(), memory->size()});
      if (!record.ok() || record->rank != owner || record->manifest.info.step != step) continue;
      Damage(node, static_cast<int>(i));
      ++damaged;
    }
    EXPECT_EQ(damaged, copies);
  }

  // The worker that this process represents to a node's agent.
  class Speaker {
   public:
    void Set(const std::string& worker) {
      MutexLock lock(&mu_);
      worker_ = worker;
    }
    std::string Get() {
      MutexLock lock(&mu_);
      return worker_;
    }

   private:
    Mutex mu_;
    std::string worker_ ABSL_GUARDED_BY(mu_);
  };

  // Holds up every caller while it is closed.
  class Gate {
   public:
    void Close() { Set(false); }
    void Open() { Set(true); }
    void Pass() {
      MutexLock lock(&mu_);
      while (!open_) changed_.Wait(&mu_);
    }

   private:
    void Set(bool open) {
      MutexLock lock(&mu_);
      open_ = open;
      changed_.SignalAll();
    }
    Mutex mu_;
    CondVar changed_;
    bool open_ ABSL_GUARDED_BY(mu_) = true;
  };

  std::vector<std::unique_ptr<Speaker>> speakers_;
  std::vector<std::unique_ptr<agent::MemoryHolder>> holders_;
};

TEST_F(MemoryTierTest, NextAttempt_FindsTheLastSaveOfAllNodes) {
  Attempt([](Comm& comm, MemoryTier& tier) {
    EXPECT_EQ(FoundStep(comm, tier), -1);
    for (int step = 1; step <= 4; ++step) EXPECT_TRUE(Save(comm, tier, step).ok());
  });
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 4); });
}

TEST_F(MemoryTierTest, SaveThatOneRankHasNot_DoesNotCountAndIsAnErrorOnAll) {
  Attempt([](Comm& comm, MemoryTier& tier) {
    EXPECT_TRUE(Save(comm, tier, 1).ok());
    EXPECT_FALSE(Save(comm, tier, 2, /*failing_rank=*/1).ok());
  });
  Attempt([](Comm& comm, MemoryTier& tier) {
    EXPECT_EQ(FoundStep(comm, tier, /*keep=*/true), 1);
    EXPECT_EQ(Save(comm, tier, 3, /*failing_rank=*/1).message(), "rank 1: the test says so");
    EXPECT_EQ(FoundStep(comm, tier), 1);
    EXPECT_TRUE(Save(comm, tier, 4).ok());
    EXPECT_EQ(FoundStep(comm, tier), 4);
    EXPECT_TRUE(Save(comm, tier, 5).ok());
  });
}

TEST_F(MemoryTierTest, TensorThatIsChangedBeforeItIsCopied_IsToldByTheNextSave) {
  Attempt([](Comm& comm, MemoryTier& tier) {
    at::Tensor weight = at::ones({3 << 20});
    const auto save = [&](int64_t step, bool changes, absl::Status* earlier) {
      CheckpointInfo info;
      info.step = step;
      return tier.Save(
          comm, info, 0, /*lazy=*/true,
          [&](StateWriter& writer) {
            StateDict file;
            file.SetTensor("weight", weight);
            writer.CopyLater(weight);
            absl::Status status =
                writer.Write(absl::StrCat("random_states_", comm.rank(), ".safetensors"), file);
            // Changes the weight before the copy can begin.
            if (changes && comm.rank() == 1) weight.add_(1);
            return status;
          },
          earlier);
    };
    absl::Status earlier;
    EXPECT_TRUE(save(1, /*changes=*/true, &earlier).ok());
    EXPECT_TRUE(earlier.ok()) << earlier;
    EXPECT_TRUE(save(2, /*changes=*/false, &earlier).ok()) << "it is made all the same";
    EXPECT_EQ(earlier.code(), absl::StatusCode::kFailedPrecondition) << earlier;
    EXPECT_THAT(earlier.message(), HasSubstr("rank 1: "));
    EXPECT_TRUE(save(3, /*changes=*/false, &earlier).ok());
    EXPECT_TRUE(earlier.ok()) << earlier;
    EXPECT_TRUE(tier.Settle(comm).ok());
    // The ranks that wait for it together may also report it, once.
    EXPECT_TRUE(save(4, /*changes=*/true, &earlier).ok());
    const absl::Status last = tier.Settle(comm);
    EXPECT_EQ(last.code(), absl::StatusCode::kFailedPrecondition) << last;
    EXPECT_THAT(last.message(), HasSubstr("rank 1: "));
    EXPECT_TRUE(tier.Settle(comm).ok());
    EXPECT_TRUE(save(5, /*changes=*/false, &earlier).ok());
    EXPECT_TRUE(earlier.ok()) << earlier;
  });
}

TEST_F(MemoryTierTest, CrashInAnySaveAfterARestart_LeavesTheOneThatWasLoaded) {
  Attempt([](Comm& comm, MemoryTier& tier) {
    for (int step = 1; step <= 3; ++step) EXPECT_TRUE(Save(comm, tier, step).ok());
  });
  for (int i = 0; i < 3; ++i) {
    Attempt([](Comm& comm, MemoryTier& tier) {
      EXPECT_EQ(FoundStep(comm, tier, /*keep=*/true), 3);
      EXPECT_FALSE(Save(comm, tier, 4, /*failing_rank=*/0).ok());
    });
  }
}

TEST_F(MemoryTierTest, DamagedSave_IsPassedOver) {
  Attempt([](Comm& comm, MemoryTier& tier) {
    for (int step = 1; step <= 2; ++step) EXPECT_TRUE(Save(comm, tier, step).ok());
  });
  Damage(1, 1);  // the second save
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 1); });
  Damage(0, 0);
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), -1); });
}

// The agent may answer again: only RESOURCE_EXHAUSTED ends the saves to memory for good.
TEST_F(MemoryTierTest, AgentThatDoesNotAnswer_IsUnavailable) {
  Attempt([this](Comm& comm, MemoryTier& tier) {
    EXPECT_TRUE(Save(comm, tier, 1).ok());
    if (comm.rank() == 1) holders_[1].reset();
    comm.Barrier();
    for (int step = 2; step <= 3; ++step) {
      const absl::Status saved = Save(comm, tier, step);
      EXPECT_EQ(saved.code(), absl::StatusCode::kUnavailable) << saved;
      EXPECT_THAT(saved.message(), HasSubstr("rank 1: the agent's memory"));
    }
  });
}

TEST_F(MemoryTierTest, AgentThatDoesNotAnswerAtFirst_BeginsNoSave) {
  Attempt([this](Comm& comm, MemoryTier& tier) {
    if (comm.rank() == 1) holders_[1].reset();
    comm.Barrier();
    for (int step = 1; step <= 2; ++step) {
      EXPECT_EQ(Save(comm, tier, step).code(), absl::StatusCode::kUnavailable);
    }
    EXPECT_EQ(TakeHeldMemory(holders_[0]->address())->size(), 0u);
  });
}

// Two ranks of one node, and a third elsewhere: each node gets one copy of what it lacks.
TEST_F(MemoryTierTest, PartsOfOtherNodes_AreCopiedOncePerNode) {
  AddNode("w2");
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); }, 3);
  MoveMemory(1, 0);
  std::array<uint64_t, 3> copied = {};
  RunGlooRanks(3, [&](Comm& comm) {
    const int node = comm.rank() == 2 ? 2 : 0;
    auto tier = MemoryTier::Open(comm, holders_[node]->address(), absl::StrCat("w", comm.rank()));
    ASSERT_TRUE(tier.ok()) << tier.status();
    const auto found = (*tier)->Find(comm);
    ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
    copied[comm.rank()] = (*found)->copied_bytes;
    for (int owner = 0; owner < 3; ++owner) {
      const auto own = (*found)->reader.Read(absl::StrCat("random_states_", owner, ".safetensors"));
      ASSERT_TRUE(own.ok()) << own.status();
      EXPECT_EQ(*own->GetInt("step"), 1 + 100 * owner);
    }
    comm.Barrier();
  });
  EXPECT_GT(copied[0], 0u);
  EXPECT_EQ(copied[1], 0u);
  EXPECT_GT(copied[2], size_t{12} << 20);
}

// The rank may have memory later: no rank takes an older save, or one of the disk.
TEST_F(MemoryTierTest, RankWithoutMemoryForOtherNodes_IsAnErrorOnAll) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  Attempt([](Comm& comm, MemoryTier& tier) {
    MemoryTier::FindOptions options;
    if (comm.rank() == 1) {
      options.create = [](const std::string&) -> absl::StatusOr<OwnedFd> {
        throw std::bad_alloc();
      };
    }
    const absl::Status found = tier.Find(comm, options).status();
    EXPECT_THAT(found.message(), AllOf(HasSubstr("cannot read the checkpoint of step 1 in memory"),
                                       HasSubstr("rank 1: ")));
    EXPECT_EQ(FoundStep(comm, tier), 1);
  });
}

// The node would not have the memory at the next start either, and the disk has a checkpoint.
TEST_F(MemoryTierTest, NodeWhoseMemoryIsFull_PassesOverTheSaveOnAll) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  Attempt([](Comm& comm, MemoryTier& tier) {
    MemoryTier::FindOptions options;
    if (comm.rank() == 1) {
      options.create = [](const std::string&) -> absl::StatusOr<OwnedFd> {
        return absl::ResourceExhaustedError("no memory is left");
      };
    }
    const auto found = tier.Find(comm, options);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_FALSE(found->has_value());
  });
}

// The older save is not gathered, because there may be no memory for that.
TEST_F(MemoryTierTest, SaveThatIsOlderThanTheDisk_IsNotGathered) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  Attempt([](Comm& comm, MemoryTier& tier) {
    MemoryTier::FindOptions options;
    options.from_step = 2;
    options.create = [](const std::string&) -> absl::StatusOr<OwnedFd> { throw std::bad_alloc(); };
    const auto older = tier.Find(comm, options);
    ASSERT_TRUE(older.ok()) << older.status();
    EXPECT_FALSE(older->has_value());
    options.from_step = 1;
    EXPECT_FALSE(tier.Find(comm, options).ok());
  });
}

TEST_F(MemoryTierTest, AgentThatDoesNotAnswerASearch_IsAnErrorOnAll) {
  Attempt([](Comm& comm, MemoryTier& tier) {
    for (int step = 1; step <= 2; ++step) EXPECT_TRUE(Save(comm, tier, step).ok());
  });
  Attempt([this](Comm& comm, MemoryTier& tier) {
    if (comm.rank() == 1) holders_[1].reset();
    comm.Barrier();
    const absl::Status found = tier.Find(comm).status();
    EXPECT_EQ(found.code(), absl::StatusCode::kUnavailable) << found;
    EXPECT_THAT(found.message(), HasSubstr("rank 1: "));
  });
}

TEST_F(MemoryTierTest, LostNode_LeavesNothing) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  holders_[1] = *agent::MemoryHolder::Start([](pid_t) { return "w1"; });
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), -1); });
}

TEST_F(MemoryTierTest, MirroredSaves_SurviveTheLossOfAnyNode) {
  AddNode("w2");
  MirroredAttempt(3, [](Comm& comm, MemoryTier& tier) {
    EXPECT_EQ(FoundStep(comm, tier), -1);
    SaveMirrored(comm, tier, 1, 3);
  });
  for (int lost = 0; lost < 3; ++lost) {
    LoseNode(lost);
    // From here on, any further node may be lost.
    MirroredAttempt(3, [&](Comm& comm, MemoryTier& tier) {
      EXPECT_EQ(FoundStep(comm, tier, /*keep=*/true), 3 + lost);
      SaveMirrored(comm, tier, 4 + lost, 4 + lost);
    });
  }
  LoseNode(0);
  LoseNode(1);
  MirroredAttempt(3, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), -1); });
}

// What was lost with the node is found in the mirror until a later save is whole.
TEST_F(MemoryTierTest, CrashAfterALostNode_LeavesTheMirrorThatWasLoaded) {
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 2); });
  LoseNode(1);
  for (int i = 0; i < 3; ++i) {
    MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) {
      EXPECT_EQ(FoundStep(comm, tier, /*keep=*/true), 2);
      EXPECT_FALSE(Save(comm, tier, 3, /*failing_rank=*/0).ok());
      EXPECT_FALSE(tier.WaitForMirror().ok());
    });
  }
}

// Saves continue while a mirror is under way, and what is mirrored stays until it is done.
TEST_F(MemoryTierTest, MirrorSlowerThanSaves_LeavesTheLastSaveAndTheLastMirror) {
  Gate gate;
  std::vector<std::unique_ptr<agent::MemoryHolder>> at_the_crash;
  MirroredAttempt(
      2,
      [&](Comm& comm, MemoryTier& tier) {
        SaveMirrored(comm, tier, 1, 2);
        gate.Close();
        comm.Barrier();
        for (int step = 3; step <= 7; ++step) EXPECT_TRUE(Save(comm, tier, step).ok());
        EXPECT_TRUE(tier.Wait().ok());
        comm.Barrier();
        if (comm.rank() == 0) at_the_crash = CopyOfAllMemory();
        comm.Barrier();
        gate.Open();
        EXPECT_TRUE(tier.WaitForMirror().ok());
        comm.Barrier();
        SaveMirrored(comm, tier, 8, 8);
      },
      [&](int) { gate.Pass(); });
  // Four pieces for saves, two for mirrors.
  EXPECT_EQ(TakeHeldMemory(holders_[0]->address())->size(), 6u);
  LoseNode(1);
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 8); });
  holders_ = std::move(at_the_crash);
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 7); });
  LoseNode(0);
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 2); });
}

TEST_F(MemoryTierTest, MirrorsFasterThanSaves_TakeTwoPiecesEach) {
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 5); });
  EXPECT_EQ(TakeHeldMemory(holders_[0]->address())->size(), 4u);
}

TEST_F(MemoryTierTest, PartThatArrivesDamaged_IsNotMirrored) {
  Gate gate;
  MirroredAttempt(
      2,
      [&](Comm& comm, MemoryTier& tier) {
        SaveMirrored(comm, tier, 1, 1);
        gate.Close();
        comm.Barrier();
        EXPECT_TRUE(Save(comm, tier, 2).ok());
        EXPECT_TRUE(tier.Wait().ok());
        comm.Barrier();
        if (comm.rank() == 0) {
          Damage(0, 1);
          gate.Open();
        }
        const absl::Status mirrored = tier.WaitForMirror();
        EXPECT_EQ(mirrored.ok(), comm.rank() == 0) << mirrored;
        if (comm.rank() == 1) {
          EXPECT_THAT(mirrored.message(), HasSubstr("the part of rank 0: "));
          EXPECT_THAT(mirrored.message(), HasSubstr("arrived with another digest"));
        }
      },
      [&](int) { gate.Pass(); });
  LoseNode(0);
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 1); });
}

// The damaged part is not read on its own node either. The copy that it is read from stays.
TEST_F(MemoryTierTest, DamagedPart_IsTakenFromTheOtherNode) {
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 2); });
  DamagePart(0, /*node=*/0, /*step=*/2);
  DamagePart(1, /*node=*/0, /*step=*/2);
  for (int i = 0; i < 3; ++i) {
    MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) {
      EXPECT_EQ(FoundStep(comm, tier, /*keep=*/true), 2);
      EXPECT_FALSE(Save(comm, tier, 3, /*failing_rank=*/1).ok());
      EXPECT_FALSE(tier.WaitForMirror().ok());
    });
  }
}

// Each of two workers had a copy of its own.
TEST_F(MemoryTierTest, DamagedCopyOfANodeWithAnother_IsPassedOverForIt) {
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 2); });
  MoveMemory(1, 0);
  LoseNode(1);
  DamagePart(0, /*node=*/0, /*step=*/2);
  DamagePart(1, /*node=*/0, /*step=*/2);
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 2); });
  // The earlier copy is whole again, and the other is damaged.
  DamagePart(1, /*node=*/0, /*step=*/2, /*copies=*/2);
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 2); });
  DamagePart(1, /*node=*/0, /*step=*/2);
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 1); });
}

TEST_F(MemoryTierTest, PartDamagedOnBothNodes_ItsSaveIsPassedOver) {
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 2); });
  DamagePart(0, /*node=*/0, /*step=*/2);
  DamagePart(0, /*node=*/1, /*step=*/2);
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 1); });
}

TEST_F(MemoryTierTest, NoMemoryForMirrors_SavesGoOnWithoutThem) {
  MirroredAttempt(2, [this](Comm& comm, MemoryTier& tier) {
    const bool refused = comm.rank() == 1;
    // Fails after the memory of the save itself has been taken.
    EXPECT_TRUE(Save(comm, tier, 1, -1, [&] {
                  if (refused) speakers_[1]->Set("");
                }).ok());
    EXPECT_EQ(absl::IsResourceExhausted(tier.WaitForMirror()), refused) << tier.WaitForMirror();
    if (refused) speakers_[1]->Set("w1");
    for (int step = 2; step <= 4; ++step) EXPECT_TRUE(Save(comm, tier, step).ok());
    EXPECT_TRUE(tier.WaitForMirror().ok());
    EXPECT_EQ(FoundStep(comm, tier), 4);
  });
  LoseNode(1);
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), -1); });
}

TEST_F(MemoryTierTest, PeerLostInTheMiddleOfAMirror_NobodyWaits) {
  Gate gate, gone;
  gate.Close();
  gone.Close();
  MirroredAttempt(
      2,
      [&](Comm& comm, MemoryTier& tier) {
        EXPECT_TRUE(Save(comm, tier, 1).ok());
        if (comm.rank() == 1) return;  // gives it up
        gone.Pass();
        gate.Open();
        const absl::Status mirrored = tier.WaitForMirror();
        EXPECT_TRUE(absl::IsUnavailable(mirrored)) << mirrored;
      },
      [&](int rank) {
        if (rank == 0) gate.Pass();
      },
      [&](int rank) {
        if (rank == 1) gone.Open();
      });
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), 1); });
}

TEST_F(MemoryTierTest, WhatIsForgotten_IsNotInMirrorsEither) {
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 2); });
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) {
    EXPECT_TRUE(tier.Forget(comm).ok());
    comm.Barrier();
    EXPECT_EQ(FoundStep(comm, tier), -1);
  });
  // The same holds if the workers have changed places.
  MirroredAttempt(2, [](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 2); });
  SwapNodes();
  Attempt([](Comm& comm, MemoryTier& tier) {
    EXPECT_EQ(FoundStep(comm, tier), 2);
    EXPECT_TRUE(tier.Forget(comm).ok());
    comm.Barrier();
    EXPECT_EQ(FoundStep(comm, tier), -1);
  });
}

TEST_F(MemoryTierTest, OtherNumberOfRanks_FindsNothing) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), -1); }, 1);
}

TEST_F(MemoryTierTest, WhatIsForgotten_IsNotFound) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  Attempt([](Comm& comm, MemoryTier& tier) {
    EXPECT_TRUE(tier.Forget(comm).ok());
    comm.Barrier();
    EXPECT_EQ(FoundStep(comm, tier), -1);
  });
}

// Otherwise the save would be found later, and be newer than the disk's checkpoint at that time.
TEST_F(MemoryTierTest, RankThatCannotForget_IsAnErrorOnAllAndNothingIsForgotten) {
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_TRUE(Save(comm, tier, 1).ok()); });
  Attempt([this](Comm& comm, MemoryTier& tier) {
    if (comm.rank() == 1) speakers_[1]->Set("");
    const absl::Status forgotten = tier.Forget(comm);
    EXPECT_THAT(forgotten.message(), AllOf(HasSubstr("cannot discard the checkpoints in memory"),
                                           HasSubstr("rank 1: ")));
    if (comm.rank() == 1) speakers_[1]->Set("w1");
    EXPECT_EQ(FoundStep(comm, tier), 1);
    EXPECT_TRUE(tier.Forget(comm).ok());
    comm.Barrier();
    EXPECT_EQ(FoundStep(comm, tier), -1);
  });
}

// Otherwise a job whose ranks move from node to node would fill the nodes.
TEST_F(MemoryTierTest, MemoryOfWorkersThatRunElsewhere_IsDroppedOnceLaterSavesReplaceIt) {
  for (const bool mirrored : {false, true}) {
    const auto attempt = [&](const std::function<void(Comm&, MemoryTier&)>& body) {
      mirrored ? MirroredAttempt(2, body) : Attempt(body);
    };
    const size_t pieces = mirrored ? 4 : 2;
    attempt([](Comm& comm, MemoryTier& tier) { SaveMirrored(comm, tier, 1, 3); });
    EXPECT_EQ(TakeHeldMemory(holders_[0]->address())->size(), pieces);
    SwapNodes();
    attempt([&](Comm& comm, MemoryTier& tier) {
      EXPECT_EQ(FoundStep(comm, tier, /*keep=*/true), 3);
      SaveMirrored(comm, tier, 4, 4);
      EXPECT_EQ(TakeHeldMemory(holders_[comm.rank()]->address())->size(),
                pieces + (mirrored ? 2 : 1));
      comm.Barrier();
      SaveMirrored(comm, tier, 5, 6);
      const auto held = TakeHeldMemory(holders_[comm.rank()]->address());
      EXPECT_EQ(held->size(), pieces);
      for (const HeldMemory& piece : *held) {
        EXPECT_EQ(piece.worker_id, absl::StrCat("w", comm.rank()));
      }
      comm.Barrier();
      EXPECT_EQ(FoundStep(comm, tier), 6);
      EXPECT_TRUE(tier.Forget(comm).ok());
    });
    LoseNode(0);
    LoseNode(1);
  }
}

// Two objects would overwrite each other's saves.
TEST_F(MemoryTierTest, SecondObjectOfAProcess_IsRefusedOnAll) {
  Attempt([this](Comm& comm, MemoryTier& tier) {
    EXPECT_TRUE(Save(comm, tier, 1).ok());
    const auto second =
        MemoryTier::Open(comm, holders_[comm.rank()]->address(), absl::StrCat("w", comm.rank()));
    EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
    EXPECT_THAT(second.status().message(), HasSubstr("another Accelerator of this process"));
    EXPECT_EQ(FoundStep(comm, tier), 1);
  });
}

TEST_F(MemoryTierTest, RankWithoutAThread_IsSaidOnAll) {
  RunGlooRanks(2, [&](Comm& comm) {
    const std::string worker = absl::StrCat("w", comm.rank());
    {
      std::optional<ThreadsLeft> none;
      if (comm.rank() == 1) none.emplace(0);
      const auto tier = MemoryTier::Open(comm, holders_[comm.rank()]->address(), worker);
      EXPECT_THAT(tier.status().message(), HasSubstr("rank 1: Resource temporarily unavailable"));
    }
    const auto tier = MemoryTier::Open(comm, holders_[comm.rank()]->address(), worker);
    ASSERT_TRUE(tier.ok()) << tier.status();
    EXPECT_TRUE(Save(comm, **tier, 1).ok());
    EXPECT_EQ(FoundStep(comm, **tier), 1);
  });
}

TEST_F(MemoryTierTest, RankWithoutAMirror_IsNotMirroredAndNobodyWaits) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunGlooRanks(2, [&](Comm& comm) {
    MemoryTier::MirrorOptions mirror;
    mirror.connect = [&]() -> absl::StatusOr<std::unique_ptr<Comm>> {
      GlooOptions gloo;
      gloo.rank = comm.rank();
      gloo.size = comm.size();
      gloo.single_host = true;
      auto between = MakeC10dComm(MakeGlooGroup(store, gloo));
      // It has no process group.
      if (comm.rank() == 1) return std::make_unique<LocalComm>();
      return between;
    };
    const auto tier = MemoryTier::Open(comm, holders_[comm.rank()]->address(),
                                       absl::StrCat("w", comm.rank()), mirror);
    ASSERT_TRUE(tier.ok()) << tier.status();
    for (int step = 1; step <= 2; ++step) EXPECT_TRUE(Save(comm, **tier, step).ok());
    EXPECT_TRUE((*tier)->WaitForMirror().ok());
    EXPECT_EQ(FoundStep(comm, **tier), 2);
  });
  LoseNode(1);
  Attempt([](Comm& comm, MemoryTier& tier) { EXPECT_EQ(FoundStep(comm, tier), -1); });
}

// This is as with a sharded model, whose parts the ranks exchange before they write.
TEST_F(MemoryTierTest, RankWithoutMemory_TakesPartInWhatWritingExchanges) {
  Attempt([this](Comm& comm, MemoryTier& tier) {
    EXPECT_TRUE(Save(comm, tier, 1).ok());
    if (comm.rank() == 1) holders_[1].reset();
    comm.Barrier();
    int exchanges = 0;
    const absl::Status failed =
        Save(comm, tier, 2, -1, [&] { exchanges += comm.AllGatherBytes("").size(); });
    EXPECT_EQ(exchanges, 2);
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable) << failed;
    EXPECT_THAT(failed.message(), HasSubstr("rank 1: the agent's memory"));
  });
}

TEST_F(MemoryTierTest, RankWithoutAnAgent_IsSaidOnAll) {
  RunGlooRanks(2, [&](Comm& comm) {
    const auto tier = MemoryTier::Open(comm, comm.rank() == 0 ? holders_[0]->address() : "", "w0");
    EXPECT_TRUE(absl::IsFailedPrecondition(tier.status())) << tier.status();
    EXPECT_THAT(tier.status().message(), HasSubstr("rank 1: no agent holds memory"));
  });
}

}  // namespace
}  // namespace muster
