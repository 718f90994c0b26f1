#include "base/machine.h"

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

class MachineTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    ASSERT_TRUE(MakeDirectories(ParentPath(root_ + path)).ok());
    ASSERT_TRUE(WriteFileAtomically(root_ + path, text).ok());
  }
  const TestFolder folder_;
  const std::string root_ = folder_.path();
};

TEST_F(MachineTest, KernelFiles_AreRead) {
  Write("/etc/os-release", "NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n");
  Write("/proc/cpuinfo", "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n");
  Write("/proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:   400 kB\n");
  Write("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  const Machine machine = ReadMachine({}, root_);
  EXPECT_EQ(machine.system, "Debian GNU/Linux 12");
  EXPECT_EQ(machine.cpu_model, "Some CPU @ 2 GHz");
  EXPECT_EQ(machine.memory_bytes, 1'024'000);
  EXPECT_EQ(machine.memory_available_bytes, 409'600);
  EXPECT_EQ(machine.cores, 1);
  EXPECT_EQ(machine.usable_gpus, 0);
  EXPECT_FALSE(machine.hostname.empty());
}

TEST_F(MachineTest, Gpus_AreThoseWithADeviceNode) {
  Write("/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 12.2\n");
  Write("/proc/driver/nvidia/gpus/0000:01:00.0/information",
        "Model: \t NVIDIA H200\nDevice Minor: \t 0\n");
  Write("/proc/driver/nvidia/gpus/0000:02:00.0/information",
        "Model: \t NVIDIA H200\nGPU UUID: \t GPU-6f2a-01\nDevice Minor: \t 1\n");
  Write("/dev/nvidia1", "");
  Write("/dev/nvidiactl", "");
  Write("/dev/nvidia-uvm", "");
  Machine machine = ReadMachine({}, root_);
  EXPECT_EQ(machine.driver, "570.86.15");
  ASSERT_EQ(machine.gpus.size(), 1u);
  EXPECT_EQ(machine.gpus[0].model, "NVIDIA H200");
  EXPECT_EQ(machine.gpus[0].uuid, "GPU-6f2a-01");
  EXPECT_EQ(machine.usable_gpus, 1);
  EXPECT_EQ(ReadMachine({{"CUDA_VISIBLE_DEVICES", ""}}, root_).usable_gpus, 0);
  Write("/proc/driver/nvidia/gpus/0000:02:00.0/information",
        "GPU UUID: \t GPU-?\?\?-01\nDevice Minor: \t 1\n");
  EXPECT_EQ(ReadMachine({}, root_).gpus[0].uuid, "");
  Write("/dev/nvidia7", "");
  EXPECT_EQ(ReadMachine({}, root_).gpus.size(), 2u);
}

TEST(CountVisible, StopsAtTheFirstThatNamesNone) {
  EXPECT_EQ(CountVisible("0,2", 4), 2);
  EXPECT_EQ(CountVisible("0,-1,2", 4), 1);
  EXPECT_EQ(CountVisible("9", 4), 0);
  EXPECT_EQ(CountVisible("GPU-abc,GPU-def", 4), 2);
  EXPECT_EQ(CountVisible("", 4), 0);
  EXPECT_EQ(CountVisible("0", 0), 0);
  EXPECT_EQ(VisibleDevices("2, GPU-abc,9,0", 4), (std::vector<std::string>{"2", "GPU-abc"}));
}

}  // namespace
}  // namespace muster
