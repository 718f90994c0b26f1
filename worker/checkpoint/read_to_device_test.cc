#include "worker/checkpoint/read_to_device.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/test_left_copies.h"
#include "worker/checkpoint/transfer.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

FakeStreams& Streams() { return FakeDevice(); }

// A checkpoint with a file of several blocks, and a device that does nothing before a thread waits
// for it.
class ReadToDeviceTest : public testing::Test {
 protected:
  ReadToDeviceTest() {
    state_.SetTensor("a.large", at::arange(9'000'000, at::kFloat));
    state_.SetTensor("b.small", at::full({3}, 7, at::kFloat));
    state_.SetTensor("c.bytes", at::arange(200'000, at::kLong).remainder(251).to(at::kByte));
    state_.SetTensor("d.half", at::arange(100'000, at::kFloat).to(at::kBFloat16).view({10, -1}));
    state_.SetInt("steps", 12);
    state_.SetMetadata("format", "pt");
    RunRanks(1, [&](Comm& comm) {
      const absl::Status saved = SaveCheckpoint(comm, dir_, {}, [&](StateWriter& writer) {
        const absl::Status small = writer.Write(SchedulerFileName(0), scheduler_);
        return small.ok() ? writer.Write(OptimizerFileName(0), state_) : small;
      });
      ASSERT_TRUE(saved.ok()) << saved;
    });
  }
  ~ReadToDeviceTest() override {
    Streams().LeaveUntilWaitedFor(nullptr);
    Streams().Break(false);
  }

  size_t left() const { return copies_.size(); }
  absl::StatusOr<StateDict> Read(const std::string& name = OptimizerFileName(0)) {
    const absl::StatusOr<StateReader> reader = StateReader::Open(dir_);
    if (!reader.ok()) return reader.status();
    return ReadToDevice(*reader, name, uploads_);
  }
  void ExpectWhole(const absl::StatusOr<StateDict>& read) {
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(left(), 0u);
    ASSERT_EQ(read->tensors().size(), state_.tensors().size());
    for (const auto& [name, want] : state_.tensors()) {
      const absl::StatusOr<at::Tensor> tensor = read->GetTensor(name);
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      EXPECT_EQ(tensor->device(),
                name == "a.large" || name == "d.half" ? Streams().device() : c10::Device(at::kCPU))
          << name;
      EXPECT_EQ(tensor->sizes(), want.sizes());
      EXPECT_EQ(tensor->scalar_type(), want.scalar_type());
      EXPECT_EQ(std::memcmp(tensor->const_data_ptr(), want.const_data_ptr(), want.nbytes()), 0)
          << name;
    }
    EXPECT_EQ(*read->GetInt("steps"), 12);
    EXPECT_EQ(read->metadata(), state_.metadata());
  }

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("checkpoint");
  StateDict state_, scheduler_;
  Mutex mu_;
  LeftCopies copies_{Streams()};
  bool fails_ ABSL_GUARDED_BY(mu_) = false;
  // Fewer blocks than the file has.
  DeviceUploads uploads_{Streams().device(),
                         {.block_bytes = kDirectBlockBytes, .threads = 1, .blocks = 2},
                         [this](char* to, const char* from, size_t bytes) {
                           MutexLock lock(&mu_);
                           TORCH_CHECK(!fails_ || copies_.size() == 0, "out of order");
                           copies_.Leave(to, from, bytes);
                         },
                         nullptr};
};

TEST_F(ReadToDeviceTest, LargeFloats_AreOnTheDeviceAndAllElseOnTheHost) { ExpectWhole(Read()); }

TEST_F(ReadToDeviceTest, Default_CopiesOnTheDevice) {
  Streams().LeaveUntilWaitedFor(nullptr);
  const absl::StatusOr<StateReader> reader = StateReader::Open(dir_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const size_t before = CopiesToFakeDevice().size();
  const auto uploads = UploadsTo(Streams().device());
  ExpectWhole(ReadToDevice(*reader, OptimizerFileName(0), *uploads));
  EXPECT_EQ(CopiesToFakeDevice().size() - before,
            reader->manifest().Find(OptimizerFileName(0))->blocks.xxh3.size());
}

TEST_F(ReadToDeviceTest, FileThatRanksHaveReadTogether_ComesFromTheirMemory) {
  Streams().LeaveUntilWaitedFor(nullptr);
  Mutex one_at_a_time;
  RunRanks(2, [&](Comm& comm) {
    absl::StatusOr<StateReader> reader = StateReader::Open(dir_);
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_TRUE(reader->ReadTogether(comm, {OptimizerFileName(0)}).ok());
    ASSERT_FALSE(reader->PathOfShared(OptimizerFileName(0)).empty());
    const auto uploads = UploadsTo(Streams().device());
    const absl::StatusOr<StateDict> read = ReadToDevice(*reader, OptimizerFileName(0), *uploads);
    MutexLock lock(&one_at_a_time);
    ExpectWhole(read);
  });
}

TEST_F(ReadToDeviceTest, CheckpointInMemory_ComesFromThereBlockByBlock) {
  const std::string name = OptimizerFileName(0);
  const absl::StatusOr<StateReader> on_disk = StateReader::Open(dir_);
  ASSERT_TRUE(on_disk.ok()) << on_disk.status();
  std::map<std::string, std::string> contents;
  std::map<std::string, absl::string_view> views;
  // Like the manifest that ranks send to each other.
  Manifest manifest = on_disk->manifest();
  for (ManifestFile& file : manifest.files) {
    file.blocks = BlockDigests();
    contents[file.name] = *ReadFile(JoinPath(dir_, file.name));
    views[file.name] = contents[file.name];
  }
  const StateReader reader =
      StateReader::OfMemory("memory", manifest, views, std::make_shared<int>(0));
  EXPECT_EQ(BytesToDevice(reader, name), contents[name].size());
  EXPECT_EQ(BytesToDevice(reader, SchedulerFileName(0)), 0u) << "is small";
  ExpectWhole(ReadToDevice(reader, name, uploads_));
}

// A failure of one rank's device or file is an error of all, and leaves nothing that would disturb
// a later load.
TEST_F(ReadToDeviceTest, OneRankThatFails_IsTheErrorOfAllAndTheNextLoadSucceeds) {
  Streams().LeaveUntilWaitedFor(nullptr);
  const std::string name = OptimizerFileName(0), path = JoinPath(dir_, name);
  const std::string contents = *ReadFile(path);
  // Fewer threads than the file has blocks.
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  ASSERT_LT(ReadingThreads(), 5);
  enum class Fault { kDevice, kFile, kNone };
  for (const Fault fault : {Fault::kDevice, Fault::kFile, Fault::kNone}) {
    std::vector<absl::Status> statuses(2);
    RunRanks(2, [&](Comm& comm) {
      Mutex mu;
      bool first = true;
      DeviceUploads uploads(
          Streams().device(),
          {.block_bytes = kDirectBlockBytes,
           .threads = ReadingThreads(),
           .blocks = ReadingThreads() + 2},
          [&](char* to, const char* from, size_t bytes) {
            // No thread reads its second block before the first of all blocks has failed.
            MutexLock lock(&mu);
            const bool fails = comm.rank() == 1 && std::exchange(first, false);
            TORCH_CHECK(!fails || fault != Fault::kDevice, "the device is lost");
            const bool shrinks = fails && fault == Fault::kFile;
            EXPECT_TRUE(!shrinks || truncate(path.c_str(), 17 << 20) == 0);
            std::memcpy(to, from, bytes);
          },
          nullptr);
      const absl::StatusOr<StateReader> reader = StateReader::Open(dir_);
      ASSERT_TRUE(reader.ok()) << reader.status();
      absl::Status mine;
      if (comm.rank() == 0) mine = ReadToDevice(*reader, name, uploads).status();
      comm.Barrier();
      if (comm.rank() == 1) mine = ReadToDevice(*reader, name, uploads).status();
      EXPECT_EQ(mine.ok(), comm.rank() == 0 || fault == Fault::kNone) << mine;
      statuses[comm.rank()] = AgreeOnFiles(comm, mine, {}, nullptr);
    });
    EXPECT_EQ(statuses[0], statuses[1]);
    if (fault == Fault::kNone) {
      EXPECT_TRUE(statuses[0].ok()) << statuses[0];
      continue;
    }
    EXPECT_THAT(std::string(statuses[0].message()),
                AllOf(HasSubstr("rank 1: "), fault == Fault::kDevice
                                                 ? HasSubstr("the device is lost")
                                                 : HasSubstr(path + ": ends at byte ")));
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    EXPECT_EQ(pwrite(fd, contents.data(), contents.size(), 0),
              static_cast<ssize_t>(contents.size()));
    close(fd);
  }
  at::set_num_threads(threads);
}

TEST_F(ReadToDeviceTest, DamageInSharedMemory_NamesTheFileOfTheCheckpoint) {
  Streams().LeaveUntilWaitedFor(nullptr);
  RunRanks(2, [&](Comm& comm) {
    absl::StatusOr<StateReader> reader = StateReader::Open(dir_);
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_TRUE(reader->ReadTogether(comm, {OptimizerFileName(0)}).ok());
    if (comm.rank() != 0) return comm.Barrier();
    const std::string memory = reader->PathOfShared(OptimizerFileName(0));
    const int fd = open(memory.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    const auto expect_named = [&](const absl::Status& status) {
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(JoinPath(dir_, OptimizerFileName(0))), HasSubstr("in memory"),
                        Not(HasSubstr("/proc/"))));
    };
    const std::string damage(64, '\xff');
    ASSERT_EQ(pwrite(fd, damage.data(), damage.size(), 20'000'000), ssize_t{64});
    const auto uploads = UploadsTo(Streams().device());
    const absl::Status read = ReadToDevice(*reader, OptimizerFileName(0), *uploads).status();
    EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss) << read;
    expect_named(read);
    // Damages its header.
    ASSERT_EQ(pwrite(fd, damage.data(), damage.size(), 0), ssize_t{64});
    const absl::Status mapped = reader->Read(OptimizerFileName(0)).status();
    EXPECT_FALSE(mapped.ok());
    expect_named(mapped);
    close(fd);
    comm.Barrier();
  });
}

TEST_F(ReadToDeviceTest, FileOfOneBlock_IsReadAsBefore) {
  const absl::StatusOr<StateDict> read = Read(SchedulerFileName(0));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->tensors().empty());
}

TEST_F(ReadToDeviceTest, DamagedBlock_IsNamedAndNothingIsUnderWay) {
  const std::string path = JoinPath(dir_, OptimizerFileName(0));
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, 20'000'000), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(pwrite(fd, &byte, 1, 20'000'000), 1);
  const absl::Status damaged = Read().status();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damaged.message()), HasSubstr("is damaged: block 2"));
  EXPECT_EQ(left(), 0u) << "the device still reads memory that goes";
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(pwrite(fd, &byte, 1, 20'000'000), 1);
  close(fd);
  ExpectWhole(Read());
}

TEST_F(ReadToDeviceTest, DeviceThatFails_IsTheErrorAndNothingIsUnderWay) {
  {
    MutexLock lock(&mu_);
    fails_ = true;
  }
  const absl::Status failed = Read().status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("out of order"));
  EXPECT_EQ(left(), 0u);
  {
    MutexLock lock(&mu_);
    fails_ = false;
  }
  ExpectWhole(Read());
}

TEST_F(ReadToDeviceTest, FileThatIsNotThere_IsNamed) {
  EXPECT_THAT(std::string(Read("other.safetensors").status().message()),
              HasSubstr("has no other.safetensors"));
}

}  // namespace
}  // namespace muster
