#include "worker/checkpoint/shared_files.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr char kModel[] = "model.safetensors";
constexpr char kOptimizer[] = "optimizer.safetensors";

class SharedFilesTest : public testing::Test {
 protected:
  // A model of three blocks and an optimizer of two, written by rank 0 of two ranks.
  void SetUp() override {
    RunRanks(2, [this](Comm& comm) {
      const absl::Status saved = SaveCheckpoint(comm, dir_, {}, [&](StateWriter& writer) {
        StateDict random;
        random.SetInt("rank", comm.rank());
        absl::Status status = writer.Write(absl::StrCat("own_", comm.rank(), ".json"), random);
        if (comm.rank() != 0) return status;
        StateDict optimizer;
        optimizer.SetTensor("m", at::arange(3'000'000, at::kFloat));
        optimizer.SetInt("steps", 3);
        status.Update(writer.WriteModel(
            kModel, {{"w", at::arange(5'000'000, at::kFloat)}, {"b", at::arange(7, at::kDouble)}}));
        status.Update(writer.Write(kOptimizer, optimizer));
        return status;
      });
      ASSERT_TRUE(saved.ok()) << saved;
    });
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(dir_).ok()); }

  std::vector<ManifestFile> Files() const {
    const auto reader = StateReader::Open(dir_);
    return {*reader->manifest().Find(kModel), *reader->manifest().Find(kOptimizer)};
  }

  void Damage(const std::string& name, off_t position) {
    const int fd = open(JoinPath(dir_, name).c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_EQ(pwrite(fd, "!", 1, position), 1);
    close(fd);
  }

  SharedFilesTest() = default;
  explicit SharedFilesTest(std::string dir) : dir_(std::move(dir)) {}

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("shared_files");
};

// Uses a folder in memory. Containers may share /dev/shm.
class SharedFilesInMemoryTest : public SharedFilesTest {
 protected:
  SharedFilesInMemoryTest()
      : SharedFilesTest(absl::StrCat("/dev/shm/muster-shared-files-test-", getpid(), "-",
                                     std::random_device()())) {}
};

// Counts the bytes that it transfers, by offset and file.
class CountingSystem {
 public:
  CountingSystem() {
    system_.pread = [this](int fd, void* to, size_t size, off_t at) {
      const ssize_t n = ::pread(fd, to, size, at);
      if (n > 0) bytes_ += n;
      return n;
    };
  }
  const DirectFileSystem* system() const { return &system_; }
  uint64_t bytes() const { return bytes_; }

 private:
  DirectFileSystem system_;
  std::atomic<uint64_t> bytes_{0};
};

TEST_F(SharedFilesTest, RanksOfAHost_ReadEachBlockOnceTogetherAndAllHaveTheWhole) {
  const std::vector<ManifestFile> files = Files();
  const uint64_t all = files[0].digest.bytes + files[1].digest.bytes;
  for (const int ranks : {2, 3}) {
    std::vector<CountingSystem> systems(ranks);
    RunRanks(ranks, [&](Comm& comm) {
      SharedFiles::Options options;
      options.read.system = systems[comm.rank()].system();
      const auto shared = SharedFiles::Read(comm, dir_, files, options);
      ASSERT_TRUE(shared.ok()) << shared.status();
      for (const ManifestFile& file : files) {
        const std::string path = (*shared)->PathOf(file.name);
        ASSERT_FALSE(path.empty());
        const auto digest = DigestFile(path);
        ASSERT_TRUE(digest.ok()) << digest.status();
        EXPECT_EQ(*digest, file.digest);
      }
      EXPECT_EQ((*shared)->PathOf("other"), "");
    });
    uint64_t read = 0;
    for (const CountingSystem& system : systems) {
      EXPECT_GT(system.bytes(), 0u);
      EXPECT_LT(system.bytes(), all);
      read += system.bytes();
    }
    EXPECT_EQ(read, all);
  }
}

TEST_F(SharedFilesTest, RanksOfSeveralHosts_ShareWithinEachOnly) {
  const std::vector<ManifestFile> files = Files();
  std::vector<CountingSystem> systems(3);
  RunRanks(3, [&](Comm& comm) {
    SharedFiles::Options options;
    options.host = std::string(comm.rank() == 1 ? "b" : "a");
    options.read.system = systems[comm.rank()].system();
    const auto shared = SharedFiles::Read(comm, dir_, files, options);
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ((*shared)->PathOf(kModel).empty(), comm.rank() == 1) << "alone on its host";
  });
  EXPECT_EQ(systems[1].bytes(), 0u);
  EXPECT_EQ(systems[0].bytes() + systems[2].bytes(), files[0].digest.bytes + files[1].digest.bytes);
}

TEST_F(SharedFilesTest, RanksThatNeedParts_ReadTheBlocksOfTheirHostEachOnce) {
  const std::vector<ManifestFile> files = Files();
  const uint64_t block = files[0].blocks.block_bytes;
  ASSERT_EQ(files[0].blocks.xxh3.size(), 3u);
  ASSERT_EQ(files[1].blocks.xxh3.size(), 2u);
  // Ranks 0 and 2, on one host, need the first block and the end of the model, rank 1 on another
  // host its middle. Rank 1 needs nothing of the optimizer, the others all of it.
  const std::vector<std::vector<FileRange>> wanted = {
      {{.begin = 0, .end = 8}},
      {{.begin = block + 5, .end = block + 6}},
      {{.begin = block - 1, .end = block}, {.begin = 2 * block, .end = UINT64_MAX}}};
  std::vector<CountingSystem> systems(3);
  RunRanks(3, [&](Comm& comm) {
    SharedFiles::Options options;
    options.host = std::string(comm.rank() == 1 ? "b" : "a");
    options.read.system = systems[comm.rank()].system();
    options.ranges[kModel] = wanted[comm.rank()];
    if (comm.rank() == 1) options.ranges[kOptimizer] = {};
    const auto shared = SharedFiles::Read(comm, dir_, files, options);
    ASSERT_TRUE(shared.ok()) << shared.status();
    const std::string whole = *ReadFile(JoinPath(dir_, kModel));
    const std::string found = *ReadFile((*shared)->PathOf(kModel));
    ASSERT_EQ(found.size(), whole.size());
    for (size_t i = 0; i < 3; ++i) {
      const bool read = (i == 1) == (comm.rank() == 1);
      EXPECT_EQ(found.substr(i * block, block),
                read ? whole.substr(i * block, block)
                     : std::string(std::min<size_t>(block, whole.size() - i * block), '\0'))
          << comm.rank() << " " << i;
    }
    EXPECT_EQ((*shared)->bytes_read(),
              comm.rank() == 1 ? block : whole.size() - block + files[1].digest.bytes);
  });
  EXPECT_EQ(systems[1].bytes(), block);
  EXPECT_EQ(systems[0].bytes() + systems[2].bytes(),
            files[0].digest.bytes - block + files[1].digest.bytes);
}

TEST_F(SharedFilesTest, DamageOutsideOfWhatIsNeeded_IsNotRead) {
  const std::vector<ManifestFile> files = Files();
  Damage(kModel, 9'000'000);  // in the second block
  RunRanks(2, [&](Comm& comm) {
    SharedFiles::Options options;
    options.ranges[kModel] = {{.begin = 0, .end = 8}};
    EXPECT_TRUE(SharedFiles::Read(comm, dir_, files, options).ok());
    if (comm.rank() == 1) options.ranges[kModel] = {{.begin = 9'000'000, .end = 9'000'001}};
    EXPECT_TRUE(absl::IsDataLoss(SharedFiles::Read(comm, dir_, files, options).status()));
  });
}

TEST_F(SharedFilesInMemoryTest, Files_AreCheckedAndUsedWhereTheyAre) {
  const std::vector<ManifestFile> files = Files();
  for (const int ranks : {1, 2}) {
    RunRanks(ranks, [&](Comm& comm) {
      SharedFiles::Options options;
      options.create = [](const char*) -> int {
        ADD_FAILURE() << "no memory is needed";
        return -1;
      };
      const auto shared = SharedFiles::Read(comm, dir_, files, options);
      ASSERT_TRUE(shared.ok()) << shared.status();
      for (const ManifestFile& file : files) {
        const auto digest = DigestFile((*shared)->PathOf(file.name));
        ASSERT_TRUE(digest.ok()) << digest.status();
        EXPECT_EQ(*digest, file.digest);
      }
    });
  }
}

TEST_F(SharedFilesInMemoryTest, Damage_IsFoundInWhatIsNeededOnly) {
  const std::vector<ManifestFile> files = Files();
  Damage(kModel, 9'000'000);  // in the second block
  for (const int ranks : {1, 2}) {
    RunRanks(ranks, [&](Comm& comm) {
      SharedFiles::Options options;
      options.ranges[kModel] = {{.begin = 0, .end = 8}};
      EXPECT_TRUE(SharedFiles::Read(comm, dir_, files, options).ok());
      if (comm.rank() == ranks - 1) {
        options.ranges[kModel] = {{.begin = 9'000'000, .end = 9'000'001}};
      }
      const absl::Status status = SharedFiles::Read(comm, dir_, files, options).status();
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("is damaged: block 1 of 3"));
    });
  }
}

TEST_F(SharedFilesTest, FilesInPlaceByChoice_AreCheckedOnceAHostAndTakeNoMemory) {
  const std::vector<ManifestFile> files = Files();
  const uint64_t all = files[0].digest.bytes + files[1].digest.bytes;
  for (const int ranks : {1, 3}) {
    std::vector<CountingSystem> systems(ranks);
    RunRanks(ranks, [&](Comm& comm) {
      SharedFiles::Options options;
      options.read.system = systems[comm.rank()].system();
      options.in_place = true;
      options.create = [](const char*) {
        ADD_FAILURE() << "memory";
        return -1;
      };
      const auto shared = SharedFiles::Read(comm, dir_, files, options);
      ASSERT_TRUE(shared.ok()) << shared.status();
      for (const ManifestFile& file : files) {
        const auto identity = std::filesystem::canonical((*shared)->PathOf(file.name));
        EXPECT_EQ(identity, std::filesystem::canonical(JoinPath(dir_, file.name)));
      }
    });
    uint64_t read = 0;
    for (const CountingSystem& system : systems) read += system.bytes();
    // The last block of a file is read up to the alignment of direct I/O.
    EXPECT_GE(read, all);
    EXPECT_LE(read, all + 2 * kDirectAlignment);
  }
  Damage(kOptimizer, 9 << 20);
  RunRanks(2, [&](Comm& comm) {
    SharedFiles::Options options;
    options.in_place = true;
    const absl::Status status = SharedFiles::Read(comm, dir_, files, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(status.message(), HasSubstr(kOptimizer));
  });
}

TEST_F(SharedFilesTest, RanksThatWantOtherFiles_DoNotShare) {
  const std::vector<ManifestFile> files = Files();
  RunRanks(2, [&](Comm& comm) {
    const auto shared = SharedFiles::Read(comm, dir_, {files[comm.rank()]}, {});
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ((*shared)->PathOf(kModel), "");
  });
}

TEST_F(SharedFilesTest, NoSharedMemory_EachRankReadsForItself) {
  const std::vector<ManifestFile> files = Files();
  RunRanks(2, [&](Comm& comm) {
    SharedFiles::Options options;
    options.create = [](const char*) {
      errno = EMFILE;
      return -1;
    };
    const auto shared = SharedFiles::Read(comm, dir_, files, options);
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ((*shared)->PathOf(kModel), "");
  });
}

TEST_F(SharedFilesTest, NoMemoryForTheBlocks_IsTheSameErrorOnAllRanks) {
  const std::vector<ManifestFile> files = Files();
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    SharedFiles::Options options;
    options.create = [](const char* name) {
      const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
      // The file can be sized, but every write fails.
      EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
      return fd;
    };
    const auto shared = SharedFiles::Read(comm, dir_, files, options);
    errors[comm.rank()] = std::string(shared.status().message());
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 0: no memory for "), HasSubstr(kModel))));
}

TEST_F(SharedFilesTest, DamagedBlock_IsTheSameErrorOnAllRanks) {
  const std::vector<ManifestFile> files = Files();
  Damage(kOptimizer, 9'000'000);  // in the share of the last rank
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    const auto shared = SharedFiles::Read(comm, dir_, files, {});
    EXPECT_EQ(shared.status().code(), absl::StatusCode::kDataLoss);
    errors[comm.rank()] = std::string(shared.status().message());
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1: "), HasSubstr(kOptimizer),
                                 HasSubstr("is damaged: block 1 of 2"))));
  EXPECT_EQ(errors[0], errors[1]);
}

// Two nodes of two ranks, on one host as far as they know: the first has the model, the other one
// the optimizer and a small file.
class SharedFilesOnNodesTest : public SharedFilesTest {
 protected:
  static constexpr char kSmall[] = "own_1.json";

  void SetUp() override {
    SharedFilesTest::SetUp();
    for (const char* name : {kModel, kOptimizer, kSmall}) {
      whole_[name] = *ReadFile(JoinPath(dir_, name));
      const std::string disk = Disk(name == std::string(kModel) ? 0 : 2);
      ASSERT_TRUE(MakeDirectories(disk).ok());
      ASSERT_TRUE(WriteFileAtomically(JoinPath(disk, name), whole_[name]).ok());
    }
    ASSERT_TRUE(MakeDirectories(scratch_).ok());
    files_ = Files();
    files_.push_back(*StateReader::Open(dir_)->manifest().Find(kSmall));
  }

  std::string Disk(int rank) const { return folder_.Path(absl::StrCat("node_", rank / 2)); }

  // Each rank needs the second block of the model, and a byte of the optimizer's second block; rank
  // 1 also the small file.
  SharedFiles::Options Needs(int rank) {
    SharedFiles::Options options;
    options.nodes = &nodes_;
    options.headers = &headers_;
    options.scratch = scratch_;
    const uint64_t block = files_[0].blocks.block_bytes;
    options.ranges[kModel] = {{.begin = block + 5, .end = block + 6}};
    options.ranges[kOptimizer] = {{.begin = block, .end = block + 1}};
    if (rank != 1) options.ranges[kSmall] = {};
    return options;
  }

  void ExpectWhatIsNeeded(Comm& comm, const SharedFiles& shared, bool in_place) {
    const uint64_t block = files_[0].blocks.block_bytes;
    const std::string& model = whole_[kModel];
    const std::string& optimizer = whole_[kOptimizer];
    const std::string found = *ReadFile(shared.PathOf(kModel));
    ASSERT_EQ(found.size(), model.size());
    EXPECT_EQ(found.substr(block, block), model.substr(block, block));
    EXPECT_EQ(found.substr(0, 8), model.substr(0, 8)) << "the header";
    if (!in_place || comm.rank() >= 2) {
      EXPECT_EQ(found.substr(8, block - 8), std::string(block - 8, '\0'));
    }
    EXPECT_EQ(ReadFile(shared.PathOf(kOptimizer))->substr(block), optimizer.substr(block));
    const uint64_t second = optimizer.size() - block, small = whole_[kSmall].size();
    if (comm.rank() < 2) {
      EXPECT_EQ(*ReadFile(shared.PathOf(kSmall)), whole_[kSmall]);
      EXPECT_EQ(shared.bytes_read(), block);
      EXPECT_EQ(shared.bytes_received(), second + small);
    } else {
      EXPECT_EQ(shared.bytes_read(), second);
      EXPECT_EQ(shared.bytes_received(), block);
    }
  }

  std::map<std::string, std::string> whole_;
  std::vector<ManifestFile> files_;
  FilesOnNodes nodes_ = {.leader_of = {0, 0, 2, 2},
                         .holders = {{kModel, {0}}, {kOptimizer, {2}}, {kSmall, {2}}}};
  std::map<std::string, std::string> headers_;
  const std::string scratch_ = folder_.Path("scratch");
};

TEST_F(SharedFilesOnNodesTest, Nodes_GetTheBlocksThatTheyNeedAndLack) {
  headers_[kModel] = whole_[kModel].substr(0, 8);
  for (const bool in_place : {false, true}) {
    RunRanks(4, [&](Comm& comm) {
      SharedFiles::Options options = Needs(comm.rank());
      options.in_place = in_place;
      if (in_place) {
        options.create = [](const char*) {
          ADD_FAILURE() << "memory";
          return -1;
        };
      }
      const auto shared = SharedFiles::Read(comm, Disk(comm.rank()), files_, options);
      ASSERT_TRUE(shared.ok()) << shared.status();
      ExpectWhatIsNeeded(comm, **shared, in_place);
    });
    EXPECT_TRUE(ListDirectory(scratch_)->empty()) << "its files have no names";
  }
  EXPECT_EQ(ListDirectory(Disk(0))->size(), 1u);
}

TEST_F(SharedFilesOnNodesTest, RanksThatCannotShareMemory_GetEachWhatTheyNeed) {
  headers_[kModel] = whole_[kModel].substr(0, 8);
  std::atomic<int> failures = 0;
  RunRanks(4, [&](Comm& comm) {
    SharedFiles::Options options = Needs(comm.rank());
    options.create = [&, rank = comm.rank()](const char* name) {
      // Fails for the first file of the first rank of each node.
      if (rank % 2 == 0 && failures < 2 && name == std::string(kModel)) {
        ++failures;
        errno = EMFILE;
        return -1;
      }
      return memfd_create(name, MFD_CLOEXEC);
    };
    const auto shared = SharedFiles::Read(comm, Disk(comm.rank()), files_, options);
    ASSERT_TRUE(shared.ok()) << shared.status();
    const uint64_t block = files_[0].blocks.block_bytes;
    EXPECT_EQ(ReadFile((*shared)->PathOf(kModel))->substr(block, block),
              whole_[kModel].substr(block, block));
    EXPECT_EQ(ReadFile((*shared)->PathOf(kOptimizer))->substr(block),
              whole_[kOptimizer].substr(block));
    if (comm.rank() == 1) {
      EXPECT_EQ(*ReadFile((*shared)->PathOf(kSmall)), whole_[kSmall]);
    }
  });
  EXPECT_EQ(failures, 2);
}

TEST_F(SharedFilesOnNodesTest, NoMemoryForWhatComes_IsTheSameErrorOnAllRanks) {
  std::vector<std::string> errors(4);
  RunRanks(4, [&](Comm& comm) {
    SharedFiles::Options options = Needs(comm.rank());
    if (comm.rank() == 2) {
      options.create = [](const char* name) {
        const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (name == std::string(kModel)) {
          EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
        }
        return fd;
      };
    }
    const auto shared = SharedFiles::Read(comm, Disk(comm.rank()), files_, options);
    errors[comm.rank()] = std::string(shared.status().message());
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("no memory for "), HasSubstr(kModel))));
  EXPECT_EQ(errors[0], errors[3]);
}

TEST_F(SharedFilesOnNodesTest, DamagedBlockOfAnotherNode_IsTheSameErrorOnAllRanks) {
  std::string damaged = whole_[kModel];
  damaged[9'000'000] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(JoinPath(Disk(0), kModel), damaged).ok());
  std::vector<std::string> errors(4);
  RunRanks(4, [&](Comm& comm) {
    const auto shared = SharedFiles::Read(comm, Disk(comm.rank()), files_, Needs(comm.rank()));
    EXPECT_TRUE(absl::IsDataLoss(shared.status())) << shared.status();
    errors[comm.rank()] = std::string(shared.status().message());
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank "), HasSubstr(JoinPath(Disk(0), kModel)),
                                 HasSubstr("block 1 of 3"))));
}

TEST_F(SharedFilesOnNodesTest, RanksThatNameOtherFiles_AreRefusedOnAllRanks) {
  RunRanks(4, [&](Comm& comm) {
    std::vector<ManifestFile> files = files_;
    if (comm.rank() == 3) files.pop_back();
    const absl::Status status =
        SharedFiles::Read(comm, Disk(comm.rank()), files, Needs(comm.rank())).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 3 reads other files"));
  });
}

TEST_F(SharedFilesTest, StateReader_TakesSharedFilesAndKeepsWritesOfOneRankToItself) {
  RunRanks(2, [&](Comm& comm) {
    auto reader = StateReader::Open(dir_);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const absl::Status read =
        reader->ReadTogether(comm, {kModel, kOptimizer, "own_0.json", "not there"});
    ASSERT_TRUE(read.ok()) << read;
    // Damage after the read shows that nothing is read again.
    comm.Barrier();
    if (comm.rank() == 0) Damage(kModel, 9'000'000);
    comm.Barrier();
    auto model = reader->Read(kModel);
    auto optimizer = reader->Read(kOptimizer);
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_TRUE(optimizer.ok()) << optimizer.status();
    ASSERT_TRUE(reader->Read("own_0.json").ok());
    EXPECT_EQ(model->metadata().at("format"), "pt");
    EXPECT_EQ(*optimizer->GetInt("steps"), 3);
    at::Tensor weight = *model->GetTensor("w");
    EXPECT_TRUE(weight.equal(at::arange(5'000'000, at::kFloat)));
    EXPECT_TRUE(model->GetTensor("b")->equal(at::arange(7, at::kDouble)));
    EXPECT_TRUE(optimizer->GetTensor("m")->equal(at::arange(3'000'000, at::kFloat)));
    comm.Barrier();
    if (comm.rank() == 0) weight.zero_();
    comm.Barrier();
    EXPECT_EQ(weight[4].item<float>(), comm.rank() == 0 ? 0 : 4);
    // Tensors outlive the reader.
    reader = absl::NotFoundError("gone");
    EXPECT_EQ(weight[4'999'999].item<float>(), comm.rank() == 0 ? 0 : 4'999'999);
  });
}

}  // namespace
}  // namespace muster
