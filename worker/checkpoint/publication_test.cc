#include "worker/checkpoint/publication.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "base/test_keys.h"
#include "base/text.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/fake_registrar.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/planned_files.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/sealing.h"
#include "worker/checkpoint/staged_save.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::SizeIs;
using State = RegisteredCheckpoint::State;

class PublicationTest : public testing::Test {
 protected:
  // Saves on two ranks; both get the same status.
  absl::Status Save(int64_t iteration, PublishOptions options = {}) {
    std::vector<absl::Status> statuses(2);
    if (options.registrar == nullptr && registered_) options.registrar = &registrar_;
    RunRanks(2, [&](Comm& comm) {
      statuses[comm.rank()] =
          SaveNumberedCheckpoint(comm, folder_, {.iteration = iteration, .step = 10 * iteration},
                                 options, [&](StateWriter& writer) {
                                   StateDict state;
                                   state.SetTensor("w", at::full({3}, 1.0));
                                   return writer.Write(RandomStatesFileName(writer.rank()), state);
                                 });
    });
    EXPECT_EQ(statuses[0], statuses[1]);
    return statuses[0];
  }
  // Saves, on one rank, a checkpoint that a user has named.
  void SaveNamed(const std::string& path, int keep = 0, bool registered = true) {
    RunRanks(1, [&](Comm& comm) {
      const absl::Status saved = SaveCheckpoint(
          comm, path, {.step = 3},
          PublishOptions{.registrar = registered ? &registrar_ : nullptr, .keep = keep},
          [](StateWriter& writer) {
            StateDict state;
            state.SetInt("x", 1);
            return writer.Write("scheduler.json", state);
          });
      ASSERT_TRUE(saved.ok()) << saved;
    });
  }
  std::vector<std::string> Names() const { return *ListDirectory(root_); }
  std::string Resume(CheckpointRegistrar* registrar,
                     const std::vector<std::string>& damaged = {}) const {
    const absl::StatusOr<std::string> found = FindCheckpointToResume(folder_, registrar, damaged);
    return found.ok() ? BaseName(*found) : std::string(found.status().message());
  }
  ~PublicationTest() override {
    ReleaseInPlace();
    SetLockPatience(patience_);
  }
  // Makes a checkpoint look as if its writer had ended after it was sealed.
  void TakeNameAway(uint64_t id, bool noted) {
    RegisteredCheckpoint& record = registrar_.records.at(id);
    record.state = State::kSealed;
    record.published = false;
    ASSERT_EQ(rename(record.path.c_str(), record.staging.c_str()), 0);
    if (noted) return;
    ASSERT_EQ(unlink(JoinPath(record.staging, kSealName).c_str()), 0);
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
  const CheckpointFolder folder_{root_};
  FakeRegistrar registrar_;
  bool registered_ = true;
  const absl::Duration patience_ = SetLockPatience(absl::Milliseconds(50));
};

TEST_F(PublicationTest, Save_EndsSealedAndPublishedWithTheRecordBesideIt) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_EQ(registrar_.records.size(), 1u);
  const RegisteredCheckpoint& record = registrar_.records.at(1);
  EXPECT_EQ(record.state, State::kPublished);
  EXPECT_EQ(record.path, folder_.PathOf(0));
  const auto seal = ReadSeal(folder_.PathOf(0));
  ASSERT_TRUE(seal.ok()) << seal.status();
  EXPECT_EQ(seal->sha256, record.sha256);
  EXPECT_THAT(registrar_.slices, ElementsAre("random_states_0:w", "random_states_1:w"));
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  EXPECT_EQ(Resume(nullptr), "checkpoint_0");
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0"));
}

// Rank 0 and rank 1 write a part of a model each; the plan of rank 0 describes the model.
class PlannedTest : public PublicationTest {
 protected:
  using TensorNames = std::vector<std::string>;
  absl::Status SaveParts(const TensorNames& planned, const TensorNames& of_rank_0,
                         const TensorNames& of_rank_1, int states_of_rank_1 = 0) {
    std::vector<absl::Status> statuses(2);
    RunRanks(2, [&](Comm& comm) {
      statuses[comm.rank()] = SaveNumberedCheckpoint(
          comm, folder_, {.iteration = 0},
          PublishOptions{.registrar = registered_ ? &registrar_ : nullptr},
          [&](StateWriter& writer) {
            const std::string part = PartFileName(ModelFileName(0), writer.rank(), 2);
            NamedTensors tensors;
            for (const std::string& name : writer.rank() == 0 ? of_rank_0 : of_rank_1) {
              tensors.emplace_back(name, TensorOf(name));
            }
            if (const absl::Status status = writer.WriteModel(part, tensors); !status.ok()) {
              return status;
            }
            nlohmann::json plan = {{"tensors", nlohmann::json::array()},
                                   {"parts", {{part, ModelFileName(0)}}}};
            for (const std::string& name : planned) {
              if (writer.rank() != 0) break;
              plan["tensors"].push_back(
                  {ModelFileName(0), name, "F32", TensorOf(name).sizes().vec()});
            }
            for (int rank = 0; rank < 2 && writer.rank() == 0 && !by_files_.empty(); ++rank) {
              TensorList list;
              for (const std::string& name : by_files_.at(rank)) {
                list.Add(name, "F32", TensorOf(name).sizes());
              }
              plan["files"][PartFileName(ModelFileName(0), rank, 2)] = list.Summary();
            }
            // Like the states of a sharded model, which are in its own plan.
            if (writer.rank() == 1 && states_of_rank_1 > 0) {
              StateDict states;
              for (int i = 0; i < states_of_rank_1; ++i) {
                const std::string name = absl::StrCat(std::string(100, 's'), i);
                states.SetTensor(name, at::full({1}, 1.0));
                plan["tensors"].push_back({OptimizerFileName(0), name, "F32", {1}});
              }
              const absl::Status status = writer.Write(OptimizerFileName(0), states);
              if (!status.ok()) return status;
            }
            StateDict random;
            random.SetTensor("cpu", at::full({3}, 1.0));
            random.SetMetadata("muster.plan", plan.dump());
            return writer.Write(RandomStatesFileName(writer.rank()), random);
          });
    });
    EXPECT_EQ(statuses[0], statuses[1]);
    return statuses[0];
  }
  static at::Tensor TensorOf(const std::string& name) {
    const auto options = at::TensorOptions().dtype(at::kFloat);
    if (name == "scalar") return at::full({}, 1.0, options);
    if (name == "empty") return at::full({0, 3}, 1.0, options);
    if (name == "deep") return at::full({1, 2, 1, 2, 1, 2, 1, 2, 1}, 1.0, options);
    return at::full({2, 3}, 1.0, options);
  }

  // The tensors of each rank, if rank 0 plans by files.
  std::vector<TensorNames> by_files_;
  // Longer than a name that the registry accepts.
  const std::string long_ = std::string(1500, 'l');
};

TEST_F(PlannedTest, EachTensorInOneFile_IsSealed) {
  const TensorNames all = {"a", "b", "deep", "empty", "scalar", long_};
  const absl::Status saved = SaveParts(all, {"a", "deep", long_}, {"b", "empty", "scalar"});
  ASSERT_TRUE(saved.ok()) << saved;
  EXPECT_THAT(registrar_.slices, IsSupersetOf({"model:a", "model:b", "model:deep"}));
  EXPECT_TRUE(PathExists(folder_.PathOf(0)));
}

TEST_F(PlannedTest, TensorInNoFile_IsNotCovered) {
  for (const std::string& name : TensorNames{"b", "scalar", "empty", "deep", long_}) {
    SCOPED_TRACE(name);
    const absl::Status saved = SaveParts({"a", name}, {"a"}, {});
    EXPECT_TRUE(absl::IsInvalidArgument(saved)) << saved;
    EXPECT_THAT(
        std::string(saved.message()),
        AllOf(HasSubstr("tensor model:" + name.substr(0, 900)), HasSubstr("have 0 of its ")));
    EXPECT_FALSE(PathExists(folder_.PathOf(0)));
  }
}

TEST_F(PlannedTest, TensorInTwoFiles_IsNotCovered) {
  for (const std::string& name : TensorNames{"b", "scalar", "deep"}) {
    SCOPED_TRACE(name);
    const absl::Status saved = SaveParts({"a", name}, {"a", name}, {name});
    EXPECT_TRUE(absl::IsInvalidArgument(saved)) << saved;
    EXPECT_THAT(std::string(saved.message()), HasSubstr("tensor model:" + name));
    EXPECT_FALSE(PathExists(folder_.PathOf(0)));
  }
}

// More than fits into the report of one file.
TEST_F(PlannedTest, ThousandsOfTensorsInAFile_AreAllReported) {
  TensorNames many;
  for (int i = 0; i < 900; ++i) many.push_back(absl::StrCat(std::string(900, 'x'), i));
  const absl::Status saved = SaveParts(many, many, {});
  ASSERT_TRUE(saved.ok()) << saved;
  EXPECT_THAT(registrar_.slices, Contains("model:" + many.back()));
  EXPECT_LT(registrar_.largest_file_report, size_t{768} << 10);
}

// The rank that has what rank 0 announces reports it, and reports it first.
TEST_F(PlannedTest, ReportWithoutRoomForAll_LeavesOutNothingThatIsAnnounced) {
  TensorNames many;
  for (int i = 0; i < 3000; ++i) many.push_back(absl::StrCat(std::string(100, 'x'), i));
  const absl::Status saved = SaveParts(many, {}, many, /*states_of_rank_1=*/15'000);
  ASSERT_TRUE(saved.ok()) << saved;
  EXPECT_THAT(registrar_.slices, IsSupersetOf({"model:" + many.front(), "model:" + many.back()}));
  EXPECT_LT(registrar_.largest_file_report, size_t{768} << 10);
}

// However many tensors there are, one slice for each file proves that all of them exist.
TEST_F(PlannedTest, LargePlan_IsOneOfFiles_AndProvesTheSame) {
  TensorNames many = {"a"};
  for (int i = 0; i < 12'000; ++i) many.push_back(absl::StrCat(std::string(100, 'x'), i));
  const TensorNames others = {"b", "scalar"};
  TensorNames lacks = many, surplus = others;
  lacks.pop_back();
  surplus.push_back("a");
  by_files_ = {many, others};
  for (const bool registered : {true, false}) {
    registered_ = registered;
    SCOPED_TRACE(registered);
    const std::string first = PartFileName(ModelFileName(0), 0, 2);
    const std::string second = PartFileName(ModelFileName(0), 1, 2);
    const absl::Status missing = SaveParts({}, lacks, others);
    EXPECT_TRUE(absl::IsInvalidArgument(missing)) << missing;
    EXPECT_THAT(std::string(missing.message()), AllOf(HasSubstr(first), HasSubstr("12001 tensor")));
    const absl::Status twice = SaveParts({}, many, surplus);
    EXPECT_TRUE(absl::IsInvalidArgument(twice)) << twice;
    EXPECT_THAT(std::string(twice.message()), HasSubstr(second));
    EXPECT_THAT(Names(), IsEmpty());
    const absl::Status saved = SaveParts({}, many, others);
    EXPECT_TRUE(saved.ok()) << saved;
    EXPECT_THAT(Names(), ElementsAre("checkpoint_0"));
    ASSERT_TRUE(RemoveTree(folder_.PathOf(0)).ok());
  }
  EXPECT_LT(registrar_.largest_file_report, size_t{4} << 10);
}

// The registry's names are text.
TEST_F(PlannedTest, LongNameOfOtherLetters_IsCutBetweenTwo) {
  std::string name = "x";
  while (name.size() < 1500) name += "\xC3\xA9";
  ASSERT_TRUE(SaveParts({name}, {name}, {}).ok());
  for (const std::string& slice : registrar_.slices) {
    EXPECT_EQ(Utf8Prefix(slice, slice.size()), slice);
    EXPECT_NE(static_cast<unsigned char>(slice[slice.rfind(':') - 1]), 0xC3) << slice;
  }
}

TEST_F(PlannedTest, OtherPlan_HasAnotherDigest) {
  ASSERT_TRUE(SaveParts({"a"}, {"a"}, {"b"}).ok());
  ASSERT_TRUE(RemoveTree(folder_.PathOf(0)).ok());
  ASSERT_TRUE(SaveParts({"a", "b"}, {"a"}, {"b"}).ok());
  EXPECT_NE(registrar_.records.at(1).plan, registrar_.records.at(2).plan);
}

TEST_F(PublicationTest, RegistryThatForgetsReports_GetsThemAgain) {
  registrar_.forgets = 2;
  ASSERT_TRUE(Save(0).ok());
  EXPECT_EQ(registrar_.seals, 3);
  registrar_.forgets = 1000;
  const absl::Status status = Save(1);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has forgotten 10 times"));
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0"));
  EXPECT_EQ(registrar_.records.size(), 1u);
}

TEST_F(PublicationTest, RefusedOrUnreported_LeavesWhatWasThere) {
  ASSERT_TRUE(Save(0).ok());
  registrar_.refusal = absl::InvalidArgumentError("tensor w is not covered");
  EXPECT_THAT(std::string(Save(1).message()), HasSubstr("tensor w is not covered"));
  EXPECT_THAT(registrar_.aborts, ElementsAre(HasSubstr("not covered")));
  registrar_.refusal = absl::OkStatus();
  registrar_.failing_rank = 1;
  EXPECT_THAT(std::string(Save(1).message()), AllOf(HasSubstr("rank 1"), HasSubstr("no answer")));
  registrar_.failing_rank = -1;
  registrar_.away = absl::UnavailableError("no coordinator for 90 s");
  EXPECT_THAT(std::string(Save(1).message()), HasSubstr("no coordinator for 90 s"));
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0"));
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0") << "the folder alone is enough";
}

TEST_F(PublicationTest, SealWithoutAnAnswer_LeavesTheFolderForTheResume) {
  registrar_.refusal = absl::UnavailableError("no answer");
  EXPECT_THAT(std::string(Save(0).message()), HasSubstr("no answer"));
  ASSERT_EQ(Names().size(), 1u);
  EXPECT_THAT(Names()[0], HasSubstr("checkpoint_0.tmp-"));
  // The next save of this process leaves it alone.
  registrar_.refusal = absl::OkStatus();
  ASSERT_TRUE(Save(1).ok());
  EXPECT_EQ(Names().size(), 2u);
  EXPECT_THAT(registrar_.aborts, IsEmpty());
}

// Rank 0 makes the records, as a coordinator does otherwise.
class WithoutRegistryTest : public PublicationTest {
 protected:
  WithoutRegistryTest() { registered_ = false; }
  absl::Status Check(int64_t number, const char* key = nullptr) const {
    const std::string dir = folder_.PathOf(number);
    std::optional<VerifyingKey> checks;
    if (key != nullptr) checks = *VerifyingKey::Parse(key, "key");
    const auto seal = ReadSeal(dir);
    if (!seal.ok()) return seal.status();
    return CheckSeal(dir, *ReadManifest(dir), *seal, key == nullptr ? nullptr : &*checks, "key");
  }
};

TEST_F(WithoutRegistryTest, Saves_AreSealedInAChain) {
  std::string previous;
  for (int number = 0; number < 3; ++number) {
    ASSERT_TRUE(Save(number).ok());
    EXPECT_TRUE(Check(number).ok()) << Check(number);
    const RegisteredCheckpoint seal = *ReadSeal(folder_.PathOf(number));
    EXPECT_EQ(seal.previous_sha256, previous);
    EXPECT_EQ(seal.id, static_cast<uint64_t>(number + 1));
    EXPECT_EQ(seal.step, 10 * number);
    EXPECT_EQ(seal.ranks, 2);
    EXPECT_EQ(seal.files, 3);
    EXPECT_EQ(seal.path, folder_.PathOf(number));
    EXPECT_EQ(seal.signature, "");
    previous = seal.sha256;
  }
  EXPECT_EQ(Resume(nullptr), "checkpoint_2");
  // A coordinator continues in the folder, and knows none of them.
  EXPECT_EQ(Resume(&registrar_), "checkpoint_2");
  registered_ = true;
  ASSERT_TRUE(Save(3, {.keep = 2}).ok());
  EXPECT_THAT(Names(), Contains("checkpoint_3"));
}

// No two records of a folder have one id, whatever the program calls its checkpoints.
TEST_F(WithoutRegistryTest, NamedOnes_AreInTheChainOfTheNumberedOnes) {
  std::string previous;
  uint64_t id = 0;
  const auto expect_next = [&](const std::string& dir) {
    const RegisteredCheckpoint seal = *ReadSeal(dir);
    EXPECT_EQ(seal.id, ++id) << dir;
    EXPECT_EQ(seal.previous_sha256, previous) << dir;
    previous = seal.sha256;
  };
  const std::string best = JoinPath(root_, "best");
  for (int64_t number = 0; number < 3; ++number) {
    ASSERT_TRUE(Save(number).ok());
    expect_next(folder_.PathOf(number));
    SaveNamed(best, /*keep=*/0, /*registered=*/false);
    expect_next(best);
  }
  // The newest one has a lower number, and another one lacks its name.
  SaveNamed(folder_.PathOf(0), /*keep=*/0, /*registered=*/false);
  expect_next(folder_.PathOf(0));
  ASSERT_TRUE(Save(3).ok());
  expect_next(folder_.PathOf(3));
  ASSERT_EQ(rename(folder_.PathOf(3).c_str(), JoinPath(root_, "last.tmp-0000000000000001").c_str()),
            0);
  ASSERT_TRUE(Save(4).ok());
  expect_next(folder_.PathOf(4));
}

// A record that follows in the chain is newer.
TEST_F(WithoutRegistryTest, ClockThatWasSetBack_DoesNotRepeatAnId) {
  ASSERT_TRUE(Save(0).ok());
  RegisteredCheckpoint first = *ReadSeal(folder_.PathOf(0));
  first.created_us += uint64_t{3'600'000'000};
  ASSERT_TRUE(WriteSeal(folder_.PathOf(0), first).ok());
  for (int64_t number = 1; number < 4; ++number) {
    ASSERT_TRUE(Save(number).ok());
    EXPECT_EQ(ReadSeal(folder_.PathOf(number))->id, static_cast<uint64_t>(number + 1));
  }
}

TEST_F(WithoutRegistryTest, WithAKey_AreSigned) {
  const std::string file = JoinPath(root_, "key.pem");
  ASSERT_TRUE(WriteSecretFile(file, kTestPrivateKey).ok());
  ASSERT_TRUE(Save(0, {.key_file = file}).ok());
  EXPECT_TRUE(Check(0, kTestPublicKey).ok()) << Check(0, kTestPublicKey);
  EXPECT_TRUE(absl::IsDataLoss(Check(0, kOtherTestPublicKey)));
  // There is no checkpoint without the signature that was requested.
  ASSERT_TRUE(WriteSecretFile(file, "no key").ok());
  const absl::Status saved = Save(1, {.key_file = file});
  EXPECT_THAT(std::string(saved.message()), HasSubstr("MUSTER_CHECKPOINT_KEY"));
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "key.pem"));
}

// Its writer was killed after it was sealed.
TEST_F(WithoutRegistryTest, WithoutItsName_GetsItFromTheNextSaveOrLoad) {
  for (const bool loads : {true, false}) {
    const int64_t number = *folder_.NextNumber();
    ASSERT_TRUE(Save(number).ok());
    const std::string left = folder_.PathOf(number) + ".tmp-0000000000000001";
    ASSERT_EQ(rename(folder_.PathOf(number).c_str(), left.c_str()), 0);
    if (loads) {
      EXPECT_EQ(Resume(nullptr), BaseName(folder_.PathOf(number)));
    } else {
      ASSERT_TRUE(Save(number + 1).ok());
    }
    EXPECT_FALSE(PathExists(left));
    EXPECT_TRUE(Check(number).ok());
  }
}

// Records the length of the longest message that this rank sends to all.
class MeasuringComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    longest = std::max(longest, bytes.size());
    return BorrowedComm::AllGatherBytes(bytes);
  }
  size_t longest = 0;
};

// One rank with much more data than the others makes gathering take a round for each rank.
TEST_F(WithoutRegistryTest, PlanOfAllRanks_StaysOnRank0) {
  nlohmann::json plan = {{"tensors", nlohmann::json::array()}, {"parts", nlohmann::json::object()}};
  for (int rank = 0; rank < 1000; ++rank) {
    plan["files"][PartFileName(ModelFileName(0), rank, 1000)] = "3 tensors, 00";
  }
  RunRanks(2, [&](Comm& comm) {
    MeasuringComm measuring(comm);
    const absl::Status saved =
        SaveNumberedCheckpoint(measuring, folder_, {.iteration = 0}, {}, [&](StateWriter& writer) {
          StateDict random;
          random.SetTensor("cpu", at::full({3}, 1.0));
          if (writer.rank() == 0) random.SetMetadata("muster.plan", plan.dump());
          return writer.Write(RandomStatesFileName(writer.rank()), random);
        });
    EXPECT_THAT(std::string(saved.message()),
                HasSubstr("no rank has written model-00001-of-01000"));
    EXPECT_LT(measuring.longest, size_t{2} << 10);
  });
}

// Returns the bytes of the files that the manifest lists.
uint64_t BytesOfFiles(const std::string& dir) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  uint64_t bytes = 0;
  for (const ManifestFile& file : manifest->files) bytes += file.digest.bytes;
  return bytes;
}

// The coordinator is older than this program, or has no room for another record: rank 0 makes the
// records.
TEST_F(WithoutRegistryTest, CoordinatorThatKeepsNoRecord_TheFolderIsSealedAllTheSame) {
  registered_ = true;
  int64_t number = 0;
  for (const absl::Status& why : {absl::UnimplementedError("unknown service"),
                                  absl::ResourceExhaustedError("4,096 records")}) {
    registrar_.away = why;
    ASSERT_TRUE(Save(number, {.keep = 2}).ok()) << why;
    EXPECT_TRUE(Check(number).ok()) << Check(number);
    const RegisteredCheckpoint seal = *ReadSeal(folder_.PathOf(number));
    EXPECT_EQ(seal.id, static_cast<uint64_t>(++number));
    EXPECT_EQ(seal.job, "");
    // It could not be promoted, and a resume would take it.
    EXPECT_FALSE(Save(number, {.promote = false}).ok()) << why;
    EXPECT_THAT(registrar_.unrecorded, SizeIs(number)) << "it is counted";
    EXPECT_EQ(registrar_.unrecorded.back(), BytesOfFiles(folder_.PathOf(number - 1)));
  }
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1"));
  EXPECT_EQ(ReadSeal(folder_.PathOf(1))->previous_sha256, ReadSeal(folder_.PathOf(0))->sha256);
}

TEST_F(WithoutRegistryTest, DiskInEveryNode_SavesAreCountedByTheCoordinator) {
  RunRanks(2, [&](Comm& comm) {
    const CheckpointFolder folder(JoinPath(root_, absl::StrCat("node", comm.rank())));
    const absl::Status saved = SaveNumberedCheckpoint(
        comm, folder, {.iteration = 0}, PublishOptions{.registrar = &registrar_},
        [](StateWriter& writer) {
          StateDict state;
          state.SetTensor("w", at::full({3}, 1.0));
          return writer.Write(RandomStatesFileName(writer.rank()), state);
        },
        /*node=*/comm.rank());
    EXPECT_TRUE(saved.ok()) << saved;
    EXPECT_TRUE(PathExists(JoinPath(folder.PathOf(0), kSealName)));
  });
  EXPECT_THAT(registrar_.records, IsEmpty());
  const uint64_t bytes = BytesOfFiles(JoinPath(root_, "node0/checkpoint_0"));
  EXPECT_GT(bytes, 0u);
  EXPECT_THAT(registrar_.unrecorded, ElementsAre(bytes)) << "once, by rank 0";
}

// A file system accepts any bytes as a name, a coordinator only text.
TEST_F(WithoutRegistryTest, NameThatIsNotText_IsSealedByRank0_AndReadableInErrors) {
  const CheckpointFolder folder(JoinPath(root_, "caf\xe9"));
  RunRanks(2, [&](Comm& comm) {
    const auto save = [&](PublishOptions options) {
      return SaveNumberedCheckpoint(
          comm, folder, {.iteration = 0}, options, [](StateWriter& writer) {
            StateDict state;
            state.SetInt("x", 1);
            return writer.Write(RandomStatesFileName(writer.rank()), state);
          });
    };
    const absl::Status saved = save({.registrar = &registrar_});
    EXPECT_TRUE(saved.ok()) << saved;
    const absl::Status again = save({.registrar = &registrar_});
    EXPECT_THAT(std::string(again.message()), HasSubstr("caf\\xe9/checkpoint_0 exists"));
  });
  EXPECT_THAT(registrar_.records, IsEmpty());
  EXPECT_EQ(ReadSeal(folder.PathOf(0))->job, "");
  EXPECT_EQ(FindCheckpointToResume(folder, &registrar_).value(), folder.PathOf(0));
}

// For example by another machine that sees another folder.
TEST_F(PublicationTest, FolderOfASaveIsRemoved_TheErrorSaysSo) {
  RunRanks(2, [&](Comm& comm) {
    const auto save =
        StagedSave::Begin(comm, folder_.PathOf(0), NodeGroups::Shared(comm.rank(), comm.size()),
                          /*replaces=*/false, nullptr, nullptr);
    ASSERT_TRUE(save.ok()) << save.status();
    EXPECT_TRUE(save->CheckVisible().ok());
    comm.Barrier();
    if (comm.rank() == 0) {
      EXPECT_TRUE(RemoveTree(save->path()).ok());
    }
    comm.Barrier();
    EXPECT_THAT(std::string(save->CheckVisible().message()),
                HasSubstr(comm.rank() == 0 ? "was removed" : "that all ranks share"));
    comm.Barrier();
  });
}

TEST_F(PlannedTest, CoordinatorThatKeepsNoRecord_EachTensorIsInOneFileAllTheSame) {
  registrar_.away = absl::UnimplementedError("unknown service");
  const TensorNames all = {"a", "b", "deep", "empty", "scalar", long_};
  for (const std::string& name : all) {
    SCOPED_TRACE(name);
    const absl::Status missing = SaveParts({"x", name}, {"x"}, {}, /*states_of_rank_1=*/1);
    EXPECT_TRUE(absl::IsInvalidArgument(missing)) << missing;
    EXPECT_THAT(std::string(missing.message()),
                HasSubstr("no rank has written tensor model:" + name.substr(0, 900)));
    const absl::Status twice = SaveParts({"x", name}, {"x", name}, {name});
    EXPECT_TRUE(absl::IsInvalidArgument(twice)) << twice;
    EXPECT_THAT(std::string(twice.message()), HasSubstr("have both written tensor model:"));
  }
  EXPECT_THAT(Names(), IsEmpty());
  const absl::Status saved = SaveParts(all, {"a", "deep", long_}, {"b", "empty", "scalar"},
                                       /*states_of_rank_1=*/3);
  ASSERT_TRUE(saved.ok()) << saved;
  EXPECT_TRUE(PathExists(JoinPath(folder_.PathOf(0), kSealName)));
}

TEST_F(PublicationTest, SealedWhenItsWriterEnded_GetsItsNameAtAResume) {
  for (const bool noted : {false, true}) {
    ASSERT_TRUE(Save(noted ? 2 : 1).ok());
    TakeNameAway(noted ? 2 : 1, noted);
    EXPECT_EQ(Resume(&registrar_), noted ? "checkpoint_2" : "checkpoint_1");
    EXPECT_EQ(registrar_.records.at(noted ? 2 : 1).state, State::kPublished);
  }
  EXPECT_THAT(Names(), ElementsAre("checkpoint_1", "checkpoint_2"));
  // The coordinator ended, too: the noted record counts.
  TakeNameAway(2, /*noted=*/true);
  EXPECT_EQ(Resume(nullptr), "checkpoint_2");
}

// Nothing sealed is removed, whichever step after the seal fails: before the record is in the
// folder, or before the name.
TEST_F(PublicationTest, SealedAndNotFinished_IsAnErrorOfTheSave_AndNamedByTheNextLoad) {
  ASSERT_TRUE(Save(0).ok());
  int64_t number = 0;
  for (const std::string failpoint :
       {"worker.checkpoint_sealed", "worker.checkpoint_noted", "worker.checkpoint_publish"}) {
    SCOPED_TRACE(failpoint);
    ASSERT_TRUE(ArmFailpoints(failpoint + "=error:RESOURCE_EXHAUSTED", "", "").ok());
    const absl::Status saved = Save(++number);
    ASSERT_TRUE(ArmFailpoints("", "", "").ok());
    EXPECT_TRUE(absl::IsResourceExhausted(saved)) << saved;
    const RegisteredCheckpoint& record = registrar_.records.rbegin()->second;
    EXPECT_EQ(record.state, State::kSealed);
    EXPECT_THAT(std::string(saved.message()),
                AllOf(HasSubstr(record.staging), HasSubstr(record.path)));
    EXPECT_EQ(Resume(&registrar_), absl::StrCat("checkpoint_", number));
    EXPECT_EQ(record.state, State::kPublished);
    EXPECT_EQ(ReadManifest(folder_.PathOf(number))->info.step, 10 * number);
  }
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"));
}

// The job continues and saves before any process loads.
TEST_F(PublicationTest, SealedAndNotFinished_StaysBesideTheNextSave) {
  ASSERT_TRUE(Save(0).ok());
  for (const std::string failpoint :
       {"worker.checkpoint_sealed", "worker.checkpoint_noted", "worker.checkpoint_publish"}) {
    SCOPED_TRACE(failpoint);
    const int64_t number = *folder_.NextNumber();
    ASSERT_TRUE(ArmFailpoints(failpoint + "=error:UNAVAILABLE", "", "").ok());
    EXPECT_TRUE(absl::IsUnavailable(Save(number)));
    ASSERT_TRUE(ArmFailpoints("", "", "").ok());
    const std::string staging = registrar_.records.rbegin()->second.staging;
    ASSERT_TRUE(Save(number + 1).ok());
    EXPECT_TRUE(PathExists(staging));
    EXPECT_EQ(Resume(&registrar_), absl::StrCat("checkpoint_", number + 1));
    // If the newer one is damaged, this one is the next to take.
    EXPECT_EQ(Resume(&registrar_, {folder_.PathOf(number + 1)}),
              absl::StrCat("checkpoint_", number));
  }
}

// A process is killed when rank 0 asks for the seal: simulated by a copy of the folder of that
// moment, which is not locked.
class KilledAtTheSealTest : public PublicationTest {
 protected:
  // `sealed`: whether the registry has sealed it nevertheless.
  void SaveAndKill(int64_t number, bool sealed) {
    left_ = absl::StrCat(folder_.PathOf(number), ".tmp-00000000000000", 10 + number);
    const std::string copy = JoinPath(root_, "copy");
    registrar_.on_seal = [&](const RegisteredCheckpoint& record) {
      std::filesystem::copy(record.staging, copy);
    };
    ASSERT_TRUE(Save(number).ok());
    registrar_.on_seal = nullptr;
    ASSERT_EQ(rename(copy.c_str(), left_.c_str()), 0);
    RegisteredCheckpoint& record = registrar_.records.rbegin()->second;
    ASSERT_TRUE(RemoveTree(record.path).ok());
    record.state = State::kSealed;
    record.published = false;
    record.staging = left_;
    ++registrar_.generation;
    if (!sealed) registrar_.records.erase(record.id);
    EXPECT_TRUE(PathExists(JoinPath(left_, kManifestName)));
    EXPECT_FALSE(PathExists(JoinPath(left_, kSealName)));
  }

  std::string left_;
};

TEST_F(KilledAtTheSealTest, Sealed_IsNeverRemovedByAJobThatLoadsNothing_AndGetsItsName) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  const std::string sha256 = registrar_.records.at(2).sha256;
  EXPECT_EQ(*folder_.NextNumber(), 2);
  ASSERT_TRUE(Save(2).ok());
  EXPECT_TRUE(PathExists(left_) || PathExists(folder_.PathOf(1)));
  ASSERT_TRUE(Save(3).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"));
  EXPECT_EQ(ReadSeal(folder_.PathOf(1))->sha256, sha256);
  EXPECT_FALSE(PathExists(JoinPath(folder_.PathOf(1), kSealingName)));
  EXPECT_EQ(registrar_.records.count(2), 0u) << "the folder speaks for itself";
}

// The process that is to delete it was killed as well, or another one has the folder locked.
TEST_F(KilledAtTheSealTest, SealedAndLetGo_StaysUntilItsFolderKnows) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  {
    const OwnedFd lock(LockFolder(left_));
    ASSERT_TRUE(lock.open());
    ASSERT_TRUE(Save(2).ok());
    EXPECT_EQ(registrar_.records.at(2).state, State::kDeleting);
    EXPECT_TRUE(HasAskedForSeal(left_));
  }
  EXPECT_EQ(Resume(&registrar_), "checkpoint_2");
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2"));
}

// A checkpoint that was held back is not taken after all records of that are gone.
TEST_F(KilledAtTheSealTest, SealedAndHeldBack_IsSoInItsFolder) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  registrar_.records.at(2).promoted = false;
  ASSERT_TRUE(Save(2).ok());
  ASSERT_TRUE(Save(3).ok());
  EXPECT_FALSE(ReadSeal(folder_.PathOf(1))->promoted);
}

TEST_F(KilledAtTheSealTest, Sealed_IsTakenByALoad) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1"));
}

// The node that saved had the project folder under another path.
TEST_F(KilledAtTheSealTest, SealedUnderAnotherPath_IsNotTakenForOneThatIsNotSealed) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  RegisteredCheckpoint& record = registrar_.records.rbegin()->second;
  record.path = JoinPath("/elsewhere", BaseName(record.path));
  record.staging = JoinPath("/elsewhere", BaseName(record.staging));
  EXPECT_EQ(Resume(nullptr), "checkpoint_0");
  registrar_.superfluous = {record.id};
  ASSERT_TRUE(Save(2).ok());
  ASSERT_TRUE(Save(3).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"));
}

TEST_F(KilledAtTheSealTest, NotSealed_GoesOnceTheRegistryHasSaidSo) {
  for (const bool loads : {true, false}) {
    ASSERT_TRUE(Save(10 + 10 * loads).ok());
    SaveAndKill(11 + 10 * loads, /*sealed=*/false);
    if (loads) {
      EXPECT_EQ(Resume(&registrar_), "checkpoint_20");
    } else {
      ASSERT_TRUE(Save(12).ok());
    }
    ASSERT_TRUE(Save(13 + 10 * loads).ok());
    EXPECT_FALSE(PathExists(left_)) << loads;
  }
}

// The registry that sealed it may be gone: it counts as one of those that are kept.
TEST_F(KilledAtTheSealTest, WithoutTheRegistry_StaysUntilEnoughAreNewer) {
  SaveAndKill(0, /*sealed=*/true);
  registrar_.records.clear();
  registered_ = false;
  for (int number = 1; number <= 3; ++number) {
    EXPECT_TRUE(PathExists(left_)) << number;
    EXPECT_EQ(*folder_.NextNumber(), number);
    ASSERT_TRUE(Save(number, {.keep = 3}).ok());
  }
  EXPECT_FALSE(PathExists(left_));
  EXPECT_THAT(Names(), ElementsAre("checkpoint_1", "checkpoint_2", "checkpoint_3"));
}

TEST_F(KilledAtTheSealTest, AnotherJobsRegistry_DoesNotDecideIt) {
  SaveAndKill(0, /*sealed=*/false);
  ASSERT_TRUE(ForgetSealing(left_).ok());
  ASSERT_TRUE(
      BeginSealing(left_, {.job = "another job", .registry = registrar_.name, .id = 1}, 100).ok());
  for (int number = 1; number <= 3; ++number) ASSERT_TRUE(Save(number).ok());
  EXPECT_TRUE(PathExists(left_));
}

// Like the registry of the next `muster launch`, whose jobs have the same name, and a coordinator
// that was put back to a copy of its data. Its ids begin again.
TEST_F(KilledAtTheSealTest, AnotherRegistryOfTheSameName_DoesNotDecideIt) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  FakeRegistrar another;
  another.name = "another registry";
  EXPECT_EQ(Resume(&another), "checkpoint_0");
  for (int number = 2; number <= 5; ++number) {
    ASSERT_TRUE(Save(number, {.registrar = &another}).ok());
  }
  EXPECT_TRUE(PathExists(left_));
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1") << "its own registry still knows";
}

// Like after `muster remove`, which removes the records of the job.
TEST_F(KilledAtTheSealTest, RecordsOfTheJobWereRemoved_WhatIsMissingMayHaveBeenSealed) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/true);
  registrar_.records.clear();
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  for (int number = 2; number <= 4; ++number) ASSERT_TRUE(Save(number).ok());
  EXPECT_TRUE(PathExists(left_));
  // It counts as a checkpoint, which it may be.
  ASSERT_TRUE(Save(5, {.keep = 2}).ok());
  EXPECT_FALSE(PathExists(left_));
}

// A program that names its checkpoints has no retention, and no load without a directory.
TEST_F(KilledAtTheSealTest, NamedAndNotSealed_GoesTooOnceTheRegistryHasSaidSo) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/false);
  const std::string best = JoinPath(root_, "best");
  const std::string left = best + ".tmp-0000000000000001";
  ASSERT_EQ(rename(left_.c_str(), left.c_str()), 0);
  SaveNamed(best);
  SaveNamed(best);
  EXPECT_FALSE(PathExists(left));
}

// An attempt takes over the records of the previous one, which has another name.
TEST_F(KilledAtTheSealTest, NotSealed_GoesInTheNextAttemptToo) {
  ASSERT_TRUE(Save(0).ok());
  SaveAndKill(1, /*sealed=*/false);
  registrar_.job_name = "the next attempt";
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  ASSERT_TRUE(Save(2).ok());
  EXPECT_FALSE(PathExists(left_));
}

// The record was written before the disk was full or the process ended; only its final name is
// missing.
TEST_F(KilledAtTheSealTest, RecordInItsRoom_GetsItsNameWithoutTheRegistry) {
  SaveAndKill(0, /*sealed=*/true);
  const RegisteredCheckpoint record = registrar_.records.rbegin()->second;
  ASSERT_TRUE(WriteSeal(left_, record).ok());
  ASSERT_EQ(rename(JoinPath(left_, kSealName).c_str(), JoinPath(left_, kSealingName).c_str()), 0);
  registered_ = false;
  ASSERT_TRUE(Save(1).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1"));
  EXPECT_EQ(ReadSeal(folder_.PathOf(0))->sha256, record.sha256);
}

// The registry may count newer ones, because it does not know yet that they are damaged.
TEST_F(PublicationTest, SealedAndSuperfluousWhenItGetsItsName_IsNotRemovedByItsOwnLoad) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  registrar_.superfluous = {1, 2};
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  EXPECT_THAT(Names(), ElementsAre("checkpoint_1")) << "others go";
}

// The process that has it locked may rename it at any moment; no run continues from an older one.
TEST_F(PublicationTest, SealedAndLockedByAWriter_IsAnError_NoOlderOneIsTaken) {
  SetLockPatience(absl::ZeroDuration());
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  const std::string staging = registrar_.records.at(2).staging;
  {
    const OwnedFd lock(LockFolder(staging));
    ASSERT_TRUE(lock.open());
    for (CheckpointRegistrar* const registrar :
         std::vector<CheckpointRegistrar*>{nullptr, &registrar_}) {
      const absl::Status status = FindCheckpointToResume(folder_, registrar).status();
      EXPECT_TRUE(absl::IsAborted(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(staging));
    }
    EXPECT_EQ(registrar_.records.at(2).state, State::kSealed) << "its path has nothing";
    EXPECT_THAT(registrar_.verdicts, IsEmpty());
  }
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
}

// It keeps its temporary name while another process reads it.
TEST_F(PublicationTest, SealedAndLoadedByAnotherProcess_IsLoadedFromWhereItIs) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  const std::string staging = registrar_.records.at(2).staging;
  ASSERT_TRUE(HoldInPlace(staging));
  EXPECT_EQ(Resume(nullptr), BaseName(staging));
  EXPECT_EQ(Resume(&registrar_), BaseName(staging));
  EXPECT_EQ(registrar_.records.at(2).state, State::kSealed) << "its path has nothing";
  // The load skips what it finds damaged.
  EXPECT_EQ(Resume(nullptr, {staging}), "checkpoint_0");
  EXPECT_EQ(Resume(&registrar_, {staging}), "checkpoint_0");
  ReleaseInPlace();
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
}

TEST_F(PublicationTest, HeldBackAndWithoutItsName_IsNotTaken) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1, {.promote = false}).ok());
  TakeNameAway(2, /*noted=*/true);
  ASSERT_TRUE(HoldInPlace(registrar_.records.at(2).staging));
  EXPECT_EQ(Resume(nullptr), "checkpoint_0");
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  registrar_.records.erase(1);
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0") << "no record is taken";
}

TEST_F(PublicationTest, KnownAsDamagedAndWithoutItsName_IsNotTaken) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  RegisteredCheckpoint& record = registrar_.records.at(2);
  record.damage = "a block has another digest";
  record.damage_in_contents = true;
  ASSERT_TRUE(HoldInPlace(record.staging));
  registrar_.records.erase(1);
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  ASSERT_TRUE(RemoveTree(folder_.PathOf(0)).ok());
  const absl::Status status = FindCheckpointToResume(folder_, &registrar_).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

// The coordinator lets go of those of former generations.
TEST_F(PublicationTest, Retention_LeavesWhatIsSealedAndLackedItsName_AndWhatIsLocked) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  ASSERT_TRUE(Save(2).ok());
  TakeNameAway(1, /*noted=*/true);
  TakeNameAway(2, /*noted=*/false);
  const std::string sealed = registrar_.records.at(1).staging;
  const std::string unknown = registrar_.records.at(2).staging;
  registrar_.superfluous = {1, 2};
  OwnedFd lock(LockFolder(unknown));
  ASSERT_TRUE(lock.open());
  ASSERT_TRUE(Save(3).ok());
  EXPECT_FALSE(PathExists(sealed)) << "it has its name";
  EXPECT_EQ(ReadManifest(folder_.PathOf(0))->info.step, 0);
  EXPECT_TRUE(PathExists(unknown));
  EXPECT_EQ(registrar_.records.count(2), 1u) << "asked for again";
  lock.Close();
  registrar_.superfluous = {2};
  ASSERT_TRUE(Save(4).ok());
  EXPECT_FALSE(PathExists(unknown));
  EXPECT_EQ(registrar_.records.count(2), 0u);
}

// Its staging folder is beside the folder that the link leads to.
TEST_F(PublicationTest, LinkWithoutItsName_IsLoadedFromWhereItIs) {
  const TestFolder disk;
  const std::string best = JoinPath(root_, "best");
  ASSERT_TRUE(MakeDirectories(disk.Path("best")).ok());
  ASSERT_EQ(symlink(disk.Path("best").c_str(), best.c_str()), 0);
  SaveNamed(best);
  RegisteredCheckpoint& record = registrar_.records.at(1);
  ASSERT_EQ(ParentPath(record.staging), disk.path());
  record.state = State::kSealed;
  record.published = false;
  ASSERT_EQ(rename(disk.Path("best").c_str(), record.staging.c_str()), 0);
  ASSERT_TRUE(MakeDirectories(disk.Path("best")).ok());
  ASSERT_TRUE(HoldInPlace(record.staging));
  const auto found = FindCheckpointToResume(folder_, &registrar_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, record.staging);
  EXPECT_THAT(registrar_.verdicts, IsEmpty());
}

// The answer was lost, and survivors of a generation load in the same process.
TEST_F(PublicationTest, SealedWithoutAnAnswer_IsNamedByAResumeOfTheSameProcess) {
  ASSERT_TRUE(Save(0).ok());
  registrar_.refusal = absl::UnavailableError("no answer");
  ASSERT_FALSE(Save(1).ok());
  registrar_.refusal = absl::OkStatus();
  RegisteredCheckpoint& record = registrar_.records.at(2);
  record.state = State::kSealed;
  record.sha256 = std::string(64, 'b');
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1"));
}

// It is not known yet whether it is sealed, so nothing removes it.
TEST_F(PublicationTest, SealedWithoutAnAnswer_StaysAfterAResumeThatCannotReadIt) {
  registrar_.refusal = absl::UnavailableError("no answer");
  ASSERT_FALSE(Save(1).ok());
  registrar_.refusal = absl::OkStatus();
  RegisteredCheckpoint& record = registrar_.records.at(1);
  record.state = State::kSealed;
  record.sha256 = std::string(64, 'b');
  const std::string path = JoinPath(record.staging, RandomStatesFileName(0));
  const std::string bytes = *ReadFile(path);
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_EQ(symlink(RandomStatesFileName(0).c_str(), path.c_str()), 0);
  const absl::Status status = FindCheckpointToResume(folder_, &registrar_).status();
  EXPECT_FALSE(status.ok() || absl::IsNotFound(status) || StaysUnreadable(status)) << status;
  registered_ = false;
  ASSERT_TRUE(Save(0).ok());
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
}

TEST_F(PublicationTest, SealedAndItsNameHasOtherFiles_IsLoadedFromWhereItIs) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  const std::string staging = BaseName(registrar_.records.at(2).staging);
  ASSERT_TRUE(MakeDirectories(folder_.PathOf(1)).ok());
  const std::string notes = JoinPath(folder_.PathOf(1), "notes");
  ASSERT_TRUE(WriteFileAtomically(notes, "of a user").ok());
  EXPECT_EQ(Resume(nullptr), staging);
  EXPECT_EQ(Resume(&registrar_), staging);
  EXPECT_TRUE(PathExists(notes));
  ASSERT_EQ(unlink(notes.c_str()), 0);
  EXPECT_EQ(Resume(nullptr), "checkpoint_1") << "an empty folder is in nobody's way";
}

// Without a record it is unknown whether the older one may be removed.
TEST_F(PublicationTest, SealedAndItsNameHasAnOlderOne_IsLoadedFromWhereItIs) {
  registered_ = false;
  ASSERT_TRUE(Save(1).ok());
  Manifest older = *ReadManifest(folder_.PathOf(1));
  older.created = "1999-01-01T00:00:00+00:00";
  registered_ = true;
  ASSERT_TRUE(Save(2).ok());
  const std::string staging = folder_.PathOf(1) + ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(folder_.PathOf(2).c_str(), staging.c_str()), 0);
  ASSERT_TRUE(
      WriteFileAtomically(JoinPath(folder_.PathOf(1), kManifestName), *EncodeManifest(older)).ok());
  EXPECT_EQ(Resume(nullptr), BaseName(staging));
  EXPECT_EQ(ReadManifest(folder_.PathOf(1))->info.step, 10);
  EXPECT_THAT(Names(), ElementsAre("checkpoint_1", BaseName(staging)));
}

// Retention would treat one that is published and not pinned as a numbered one.
TEST_F(PublicationTest, CoordinatorThatDoesNotPin_TheCheckpointIsThereAndNotPublished) {
  registrar_.pin_error = absl::UnavailableError("no answer");
  const std::string best = JoinPath(root_, "best");
  SaveNamed(best);
  EXPECT_EQ(registrar_.records.at(1).state, State::kSealed);
  EXPECT_EQ(Resume(&registrar_), "best");
  TakeNameAway(1, /*noted=*/false);
  EXPECT_EQ(Resume(&registrar_), "best");
  EXPECT_EQ(registrar_.records.at(1).state, State::kSealed);
  registrar_.pin_error = absl::OkStatus();
  EXPECT_EQ(Resume(&registrar_), "best");
  EXPECT_EQ(registrar_.records.at(1).state, State::kPublished);
  EXPECT_TRUE(registrar_.records.at(1).pinned);
}

TEST_F(PublicationTest, SealedWhenItsWriterEnded_DoesNotReplaceANewerOneOfItsName) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  const std::string staging = BaseName(registrar_.records.at(2).staging);
  registered_ = false;
  ASSERT_TRUE(Save(1).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", staging));
  Manifest newer = *ReadManifest(folder_.PathOf(1));
  newer.created = "2999-01-01T00:00:00+00:00";
  ASSERT_TRUE(
      WriteFileAtomically(JoinPath(folder_.PathOf(1), kManifestName), *EncodeManifest(newer)).ok());
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  EXPECT_EQ(ReadManifest(folder_.PathOf(1))->created, newer.created);
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", staging));
}

TEST_F(PublicationTest, SealedButDamaged_TheOneBeforeIsTaken) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  TakeNameAway(2, /*noted=*/true);
  ASSERT_TRUE(
      WriteFileAtomically(JoinPath(registrar_.records.at(2).staging, RandomStatesFileName(0)), "x")
          .ok());
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  EXPECT_TRUE(PathExists(registrar_.records.at(2).staging)) << "nothing sealed is thrown away";
}

// Its size is right, so only its contents show the damage.
TEST_F(PublicationTest, SealedButDamaged_DoesNotLetTheOneBeforeGo) {
  for (const bool noted : {true, false}) {
    const int64_t number = noted ? 0 : 10;
    ASSERT_TRUE(Save(number).ok());
    ASSERT_TRUE(Save(number + 1).ok());
    const uint64_t id = registrar_.records.rbegin()->first;
    TakeNameAway(id, noted);
    const std::string file = JoinPath(registrar_.records.at(id).staging, RandomStatesFileName(0));
    absl::StatusOr<std::string> bytes = ReadFile(file);
    ASSERT_TRUE(bytes.ok());
    bytes->back() ^= 1;
    ASSERT_TRUE(WriteFileAtomically(file, *bytes).ok());
    registrar_.set_keep(1);
    EXPECT_EQ(Resume(&registrar_), absl::StrCat("checkpoint_", number));
    EXPECT_TRUE(PathExists(folder_.PathOf(number)));
    registrar_.set_keep(0);
    registrar_.records.erase(id);
  }
}

TEST_F(PublicationTest, HeldBack_IsNotTakenWithoutItsRegistryEither) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1, {.promote = false}).ok());
  FakeRegistrar another, away;
  away.away = absl::UnavailableError("no answer");
  EXPECT_EQ(Resume(nullptr), "checkpoint_0");
  EXPECT_EQ(Resume(&another), "checkpoint_0");
  EXPECT_EQ(Resume(&away), "checkpoint_0");
  // A resume that takes it once it is promoted notes that in the folder.
  registrar_.records.at(2).promoted = true;
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  EXPECT_EQ(Resume(nullptr), "checkpoint_1");
}

TEST_F(PublicationTest, RecordThatCannotBeRead_TheOneBeforeIsTaken_ForItMayBeHeldBack) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1, {.promote = false}).ok());
  const std::string path = JoinPath(folder_.PathOf(1), kSealName);
  std::string text = *ReadFile(path);
  const size_t at = text.find("held_back");
  ASSERT_NE(at, std::string::npos);
  text[at] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  FakeRegistrar another;
  testing::internal::CaptureStderr();
  EXPECT_EQ(Resume(nullptr), "checkpoint_0");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("passing over " + folder_.PathOf(1) + ": " + path));
  EXPECT_EQ(Resume(&another), "checkpoint_0");
  // Its own registry knows that it is promoted, but not that it is this folder.
  registrar_.records.at(2).promoted = true;
  testing::internal::CaptureStderr();
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("of step 10: " + path));
  // If there is no other, no run begins from scratch.
  ASSERT_TRUE(RemoveTree(folder_.PathOf(0)).ok());
  for (CheckpointRegistrar* const registrar :
       std::vector<CheckpointRegistrar*>{nullptr, &another, &registrar_}) {
    const absl::Status status = FindCheckpointToResume(folder_, registrar).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
}

// Like after ESTALE or EIO: the newest may be whole. (A link to itself is such an error even for
// root.)
TEST_F(PublicationTest, RecordThatCannotBeReadNow_IsAnError_NoOlderOneIsTaken) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  const std::string path = JoinPath(folder_.PathOf(1), kSealName);
  const std::string text = *ReadFile(path);
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_EQ(symlink(kSealName, path.c_str()), 0);
  FakeRegistrar another;
  for (CheckpointRegistrar* const registrar :
       std::vector<CheckpointRegistrar*>{nullptr, &another, &registrar_}) {
    const absl::Status status = FindCheckpointToResume(folder_, registrar).status();
    EXPECT_EQ(status, ReadSeal(folder_.PathOf(1)).status());
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    // A checkpoint that a load could not read is skipped.
    EXPECT_EQ(FindCheckpointToResume(folder_, registrar, {folder_.PathOf(1)}).value(),
              folder_.PathOf(0));
  }
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  EXPECT_EQ(Resume(nullptr), "checkpoint_1");
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
}

TEST_F(PublicationTest, FileThatCannotBeReadNow_IsAnError_NoOlderOneIsTaken) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  FakeRegistrar another;
  for (const std::string& name : {std::string(kManifestName), RandomStatesFileName(0)}) {
    SCOPED_TRACE(name);
    const std::string path = JoinPath(folder_.PathOf(1), name);
    const std::string text = *ReadFile(path);
    ASSERT_EQ(unlink(path.c_str()), 0);
    ASSERT_EQ(symlink(name.c_str(), path.c_str()), 0);
    for (CheckpointRegistrar* const registrar :
         std::vector<CheckpointRegistrar*>{nullptr, &another, &registrar_}) {
      const absl::Status status = FindCheckpointToResume(folder_, registrar).status();
      EXPECT_EQ(status, VerifyCheckpoint(folder_.PathOf(1), VerifyLevel::kSizes).status());
      EXPECT_FALSE(status.ok() || absl::IsNotFound(status) || StaysUnreadable(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
      EXPECT_EQ(FindCheckpointToResume(folder_, registrar, {folder_.PathOf(1)}).value(),
                folder_.PathOf(0));
    }
    EXPECT_THAT(registrar_.verdicts, IsEmpty());
    ASSERT_EQ(unlink(path.c_str()), 0);
    ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  }
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  // The same if the newest is sealed and lacks only its name.
  TakeNameAway(2, /*noted=*/true);
  const std::string path = JoinPath(registrar_.records.at(2).staging, kManifestName);
  const std::string text = *ReadFile(path);
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_EQ(symlink(kManifestName, path.c_str()), 0);
  for (CheckpointRegistrar* const registrar :
       std::vector<CheckpointRegistrar*>{nullptr, &registrar_}) {
    const absl::Status status = FindCheckpointToResume(folder_, registrar).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
  // It stays, whatever is saved meanwhile.
  registered_ = false;
  ASSERT_TRUE(Save(1).ok());
  ASSERT_TRUE(Save(2).ok());
  EXPECT_TRUE(PathExists(registrar_.records.at(2).staging));
}

TEST_F(PublicationTest, AllThatIsRegisteredIsHeldBack_TheNewestToResumeStays) {
  registered_ = false;
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  registered_ = true;
  ASSERT_TRUE(Save(2, {.keep = 1, .promote = false}).ok());
  ASSERT_TRUE(Save(3, {.keep = 1, .promote = false}).ok());
  EXPECT_TRUE(PathExists(folder_.PathOf(1)));
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
}

// The registry has not been told that it has its name, which the next save has given it.
TEST_F(PublicationTest, HeldBackAndJustNamed_TheNewestToResumeStays) {
  registered_ = false;
  ASSERT_TRUE(Save(2).ok());
  registered_ = true;
  ASSERT_TRUE(Save(3, {.promote = false}).ok());
  TakeNameAway(1, /*noted=*/true);
  ASSERT_TRUE(Save(4, {.keep = 1, .promote = false}).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_2", "checkpoint_4"));
  EXPECT_EQ(Resume(&registrar_), "checkpoint_2");
  // The same for a checkpoint of another registry.
  registrar_.records.erase(2);
  ASSERT_TRUE(Save(5, {.keep = 1, .promote = false}).ok());
  EXPECT_TRUE(PathExists(folder_.PathOf(2)));
  EXPECT_EQ(Resume(&registrar_), "checkpoint_2");
}

TEST_F(PublicationTest, Damaged_IsReportedAndPassedOver) {
  for (const int i : {0, 1, 2}) ASSERT_TRUE(Save(i).ok());
  EXPECT_GT(registrar_.published_times.save, absl::ZeroDuration());
  EXPECT_EQ(registrar_.published_times.stall, registrar_.published_times.save) << "synchronous";
  // Files of another size are noticed at once.
  const std::string file = JoinPath(folder_.PathOf(2), RandomStatesFileName(0));
  const std::string whole = *ReadFile(file);
  ASSERT_TRUE(WriteFileAtomically(file, whole + "?").ok());
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  ASSERT_EQ(registrar_.verdicts.size(), 1u);
  EXPECT_EQ(registrar_.verdicts[0].first, 3u);
  EXPECT_THAT(registrar_.verdicts[0].second, HasSubstr(RandomStatesFileName(0)));
  // Damage in the contents is found by the reader, which asks again.
  EXPECT_EQ(Resume(&registrar_, {folder_.PathOf(1)}), "checkpoint_0");
  ReportDamage(folder_.PathOf(1), &registrar_, "a block has another digest");
  EXPECT_EQ(registrar_.verdicts.back().first, 2u);
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0") << "known now";
  EXPECT_EQ(Resume(nullptr, {folder_.PathOf(1)}), "checkpoint_0");
  // After a repair, sizes are checked again, contents only when a report says so.
  ASSERT_TRUE(WriteFileAtomically(file, whole).ok());
  EXPECT_EQ(Resume(&registrar_), "checkpoint_2");
  EXPECT_EQ(registrar_.verdicts.back(), std::make_pair(uint64_t{3}, std::string()));
}

TEST_F(PublicationTest, OnlyDamagedOnes_IsNotTheSameAsNone) {
  EXPECT_TRUE(absl::IsNotFound(FindCheckpointToResume(folder_, &registrar_).status()));
  ASSERT_TRUE(Save(0).ok());
  ReportDamage(folder_.PathOf(0), &registrar_, "a block has another digest");
  EXPECT_TRUE(absl::IsDataLoss(FindCheckpointToResume(folder_, &registrar_).status()));
  registrar_.records.at(1).damage.clear();
  registrar_.records.at(1).damage_in_contents = false;
  ASSERT_TRUE(WriteFileAtomically(JoinPath(folder_.PathOf(0), RandomStatesFileName(0)), "").ok());
  EXPECT_TRUE(absl::IsDataLoss(FindCheckpointToResume(folder_, &registrar_).status()));
  EXPECT_TRUE(absl::IsDataLoss(FindCheckpointToResume(folder_, nullptr).status()));
  // The record and the seal still exist.
  ASSERT_EQ(unlink(JoinPath(folder_.PathOf(0), kManifestName).c_str()), 0);
  EXPECT_TRUE(absl::IsDataLoss(FindCheckpointToResume(folder_, &registrar_).status()));
}

TEST_F(PublicationTest, HeldBack_IsNotTaken) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1, {.promote = false}).ok());
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0");
  registrar_.records.at(2).promoted = true;
  EXPECT_EQ(Resume(&registrar_), "checkpoint_1");
  registrar_.records.at(2).promoted = false;
  registrar_.records.erase(1);
  EXPECT_EQ(Resume(&registrar_), "checkpoint_0") << "saved by somebody else, and whole";
}

TEST_F(PublicationTest, Retention_DeletesOnlyWhatTheRecordIsAbout) {
  ASSERT_TRUE(Save(0).ok());
  ASSERT_TRUE(Save(1).ok());
  // Another program has saved under the name meanwhile.
  ASSERT_TRUE(RemoveTree(folder_.PathOf(0)).ok());
  registered_ = false;
  ASSERT_TRUE(Save(7).ok());
  registered_ = true;
  ASSERT_EQ(rename(folder_.PathOf(7).c_str(), folder_.PathOf(0).c_str()), 0);
  // Checkpoints that no registry knows count as well, and the newest of them stays if there is
  // room.
  ASSERT_TRUE(Save(2, {.keep = 3}).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2"));
  registrar_.records.at(1).state = State::kPublished;
  registrar_.records.at(1).pinned = true;
  ASSERT_TRUE(Save(3, {.keep = 2}).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_2", "checkpoint_3"));
}

TEST_F(PublicationTest, KeepEvery_SparesTheirSteps) {
  registered_ = false;
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(Save(i, {.keep = 1, .keep_every = 20}).ok());
  // Step 0 is the only one of a program that has no optimizer.
  EXPECT_THAT(Names(), ElementsAre("checkpoint_2", "checkpoint_4", "checkpoint_5"));
}

// Also beside one whose record cannot be read, because it may be pinned.
TEST_F(PublicationTest, KeepByTheFolder_IsBesidePinnedOnes) {
  registered_ = false;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Save(i, {}).ok());
  RegisteredCheckpoint record;
  record.pinned = true;
  for (int i = 2; i < 4; ++i) {
    ASSERT_TRUE(WriteSeal(JoinPath(root_, absl::StrCat("checkpoint_", i)), record).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(JoinPath(root_, "checkpoint_0/seal.json"), "{").ok());
  ASSERT_TRUE(Save(4, {.keep = 2}).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3",
                                   "checkpoint_4"));
  ASSERT_TRUE(Save(5, {.keep = 2}).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_2", "checkpoint_3", "checkpoint_4",
                                   "checkpoint_5"));
}

// A person has pinned the folder; no record says so.
TEST_F(PublicationTest, PinInTheFolder_IsSparedByEveryRetention) {
  for (const bool registered : {false, true}) {
    SCOPED_TRACE(registered);
    registered_ = registered;
    const int64_t first = *folder_.NextNumber();
    ASSERT_TRUE(Save(first).ok());
    const std::string pin = JoinPath(folder_.PathOf(first), "pinned");
    ASSERT_TRUE(WriteFileAtomically(pin, "").ok());
    ASSERT_TRUE(Save(first + 1, {.keep = 1}).ok());
    ASSERT_TRUE(Save(first + 2, {.keep = 1}).ok());
    EXPECT_TRUE(PathExists(folder_.PathOf(first)));
    EXPECT_FALSE(PathExists(folder_.PathOf(first + 1)));
    // Also one whose record was lost.
    (void)unlink(JoinPath(folder_.PathOf(first), kSealName).c_str());
    ASSERT_TRUE(Save(first + 3, {.keep = 1}).ok());
    EXPECT_TRUE(PathExists(folder_.PathOf(first)));
    ASSERT_EQ(unlink(pin.c_str()), 0);
    ASSERT_TRUE(Save(first + 4, {.keep = 1}).ok());
    EXPECT_FALSE(PathExists(folder_.PathOf(first)));
  }
}

// Its publication got no answer, and a person has since pinned it at the registry.
TEST_F(PublicationTest, PinnedAndNotPublished_IsSpared) {
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Save(i).ok());
  RegisteredCheckpoint& record = registrar_.records.at(1);
  record.state = State::kSealed;
  record.published = false;
  record.pinned = true;
  ASSERT_TRUE(Save(2, {.keep = 1}).ok());
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", "checkpoint_2"));
}

// The one that would be taken, and newer ones, have to be readable.
TEST_F(PublicationTest, RecordThatCannotBeReadNow_IsNoReasonNotToTakeANewerOne) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Save(i).ok());
  const auto hide = [&](int64_t number) {
    const std::string seal = JoinPath(folder_.PathOf(number), kSealName);
    ASSERT_EQ(unlink(seal.c_str()), 0);
    ASSERT_EQ(symlink(kSealName, seal.c_str()), 0);  // ELOOP
  };
  hide(0);
  EXPECT_EQ(Resume(nullptr), "checkpoint_2");
  hide(2);
  EXPECT_THAT(Resume(nullptr), HasSubstr("checkpoint_2/seal.json"));
}

// It is older by the clock of its writer, which was set back.
TEST_F(WithoutRegistryTest, SealedAfterTheOneOfItsName_IsNotRemoved) {
  const std::string best = JoinPath(root_, "best"), next = JoinPath(root_, "next");
  SaveNamed(best, 0, /*registered=*/false);
  SaveNamed(next, 0, /*registered=*/false);
  Manifest manifest = *ReadManifest(next);
  manifest.created = "2001-01-01T00:00:00+00:00";
  ASSERT_TRUE(WriteFileAtomically(JoinPath(next, kManifestName), *EncodeManifest(manifest)).ok());
  const std::string staging = best + ".tmp-0123456789abcdef";
  ASSERT_EQ(rename(next.c_str(), staging.c_str()), 0);
  EXPECT_TRUE(*IsNewerCheckpoint(staging, best));
  EXPECT_FALSE(*IsNewerCheckpoint(best, staging));
  ASSERT_TRUE(Staging::Create(best).ok());
  EXPECT_TRUE(PathExists(staging));
}

TEST_F(PublicationTest, FileNameThatIsNone_IsTheSameErrorOfAllRanks) {
  const std::string path = JoinPath(root_, "x");
  for (const std::string& name :
       {std::string("a\xff.json"), std::string("a\n.json"), std::string(252, 'a') + ".json",
        std::string("a\0.json", 7), std::string("a/b.json"), std::string("manifest.json"),
        std::string("a.json.tmp-0123456789abcdef")}) {
    SCOPED_TRACE(name);
    std::vector<absl::Status> statuses(2);
    RunRanks(2, [&](Comm& comm) {
      statuses[comm.rank()] =
          SaveCheckpoint(comm, path, {.step = 3}, PublishOptions{}, [&](StateWriter& writer) {
            return writer.rank() == 1 ? writer.WriteText(name, "{}") : absl::OkStatus();
          });
    });
    EXPECT_TRUE(absl::IsInvalidArgument(statuses[0])) << statuses[0];
    EXPECT_EQ(statuses[0], statuses[1]);
    EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("is not a valid name"));
    EXPECT_THAT(Names(), IsEmpty());
  }
}

// However the name got there: if a rank failed alone, the others would wait.
TEST_F(PublicationTest, NameOfOtherBytes_LeavesNoRankInTheExchange) {
  RunRanks(2, [&](Comm& comm) {
    std::vector<ManifestFile> all;
    const std::vector<ManifestFile> mine = {
        {.name = comm.rank() == 1 ? "a\xff" : "b", .rank = comm.rank(), .digest = {}}};
    EXPECT_TRUE(AgreeOnFiles(comm, absl::OkStatus(), mine, &all).ok());
    EXPECT_EQ(all.size(), 2u);
  });
}

TEST_F(PublicationTest, NamedCheckpoint_IsPinned) {
  SaveNamed(JoinPath(root_, "best"), /*keep=*/1);
  EXPECT_TRUE(registrar_.records.at(1).pinned);
  EXPECT_THAT(registrar_.slices, IsEmpty());
}

}  // namespace
}  // namespace muster
